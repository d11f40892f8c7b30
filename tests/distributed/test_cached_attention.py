"""Attention to a cache over ranks, against attention written out in float64 in one process."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.attention.cached import KeyValues, buffered_attention, cached_attention, held_tokens
from fsdp_cp.attention.kernels.kernel import CpuFlash
from fsdp_cp.attention.mask import block_causal, teacher_forcing
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.sequence import gather_tokens, local_token_count, split_tokens
from fsdp_cp.sharding.activations import ATTENTION, compile_forward, offload_inputs, recompute_in_backward
from tests.counted import Counted
from tests.oracles.attention import Case, context_mesh, plain_attention
from tests.tiers import long, long_case, slow_case

MESHES = [
    (1, 1), (1, 2), (3, 1),
    *(slow_case(*sizes) for sizes in ((2, 2), (1, 3))),
    *(long_case(*sizes) for sizes in ((2, 1), (1, 4), (4, 1), (2, 3))),
]  # fmt: skip
BATCH, HEAD_DIM = 2, 6


class Attention(nn.Module):
    """Block whose forward is wrapped, as blocks of networks are."""

    def __init__(self, mesh, total, **options):
        super().__init__()
        self.mesh, self.total, self.options = mesh, total, options

    def forward(self, q, k, v, past):
        out, new = cached_attention(q, k, v, past, mesh=self.mesh, total_tokens=self.total, **self.options)
        return out.sin(), new.k, new.v


def _draw(tokens, heads, kv_heads, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * tokens + heads)
    shapes = [(BATCH, tokens, h, HEAD_DIM) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def _wrap(block, kind):
    if kind in ("full", "selective", "offload"):
        recompute_in_backward(block, ATTENTION if kind == "selective" else ())
    if kind == "compile":
        compile_forward(block)
    elif kind == "offload":
        offload_inputs(block)
    return block


def _rollout(mesh, chunks, heads, kv_heads, kinds=("none",), bound=1e-12, dtype=torch.float64, **options):
    """Attend chunk by chunk, each to the chunks before it; compare output and gradients. Return the cache."""
    past, plain_keys, plain_values = [], [], []
    for tokens in chunks:
        q, k, v, weight = _draw(tokens, heads, kv_heads)
        plain = [x.clone().requires_grad_() for x in (q, k, v)]
        keys, values = torch.cat([*plain_keys, plain[1]], 1), torch.cat([*plain_values, plain[2]], 1)
        truth = plain_attention(plain[0], keys, values, Case(heads=heads, kv_heads=kv_heads), None).sin()
        (truth * weight).sum().backward()
        for kind in kinds:
            leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
            block = _wrap(Attention(mesh, tokens, **options), kind)
            out, new_k, new_v = block(*(split_tokens(x, mesh) for x in leaves), past)
            full = gather_tokens(out, mesh, tokens)
            (full * weight).sum().backward()
            for x in leaves:
                dist.all_reduce(x.grad)
            pairs = [(full, truth), *((a.grad, b.grad) for a, b in zip(leaves, plain, strict=True))]
            for name, (a, b) in zip(("out", "dq", "dk", "dv"), pairs, strict=True):
                error = ((a - b).norm() / b.norm().clamp_min(1e-3 * weight.norm())).item()
                assert error <= bound, (kind, tokens, len(past), name, error)
        new = KeyValues(new_k.detach(), new_v.detach(), tokens)
        heads_per_rank, place = new.k.shape[2], mesh.context.ulysses_rank
        start = mesh.context.ring_rank * mesh.context.ulysses_size * local_token_count(tokens, mesh.cp_size)
        held = slice(min(start, tokens), min(start, tokens) + held_tokens(tokens, mesh.context))
        share = slice(place * heads_per_rank, (place + 1) * heads_per_rank)
        for x, whole in ((new.k, k), (new.v, v)):
            assert torch.equal(x, whole[:, held, share].to(dtype)), "the cache differs"
        past = [*past, new]
        plain_keys.append(k.detach())
        plain_values.append(v.detach())
    return past


def _numbers(ring, ulysses):
    """Uneven chunks, fewer tokens than ranks; wrappers of a block; grouped queries; groups of heads; low precision."""
    mesh, world = context_mesh(ring * ulysses, ulysses, 4 * ulysses), ring * ulysses
    uneven = (2 * world + 1, max(world - 1, 1), 7, 1)
    _rollout(mesh, uneven, 4 * ulysses, 2 * ulysses, ("none", "full", "selective", "offload"))
    _rollout(mesh, (3 * world, world), 4 * ulysses, 4 * ulysses, head_groups=2, scale=HEAD_DIM**-0.5)
    _rollout(mesh, (3, 5, 2), ulysses, ulysses, backend="reference")
    _rollout(mesh, uneven, 2 * ulysses, ulysses, bound=2e-2, dtype=torch.bfloat16)
    return True


def _operator_is_the_same(mesh):
    """The custom operator, which a dispatch mode asks for, gives the bits of the call without it."""
    world, heads = mesh.cp_size, 2 * mesh.context.ulysses_size
    q, k, v, _ = (split_tokens(x, mesh) for x in _draw(2 * world + 1, heads, heads, torch.float32))
    results = []
    for mode in (None, FlopCounterMode(display=False)):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        past, outs = [], []
        for _ in range(3):
            if mode is None:
                out, new = cached_attention(*leaves, past, mesh=mesh, total_tokens=2 * world + 1)
            else:
                with mode:
                    out, new = cached_attention(*leaves, past, mesh=mesh, total_tokens=2 * world + 1)
            past, outs = [*past, new], [*outs, out]
        torch.stack(outs).square().sum().backward()
        results.append([*outs, *(x.grad for x in leaves)])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _values_stay(mesh):
    """Nothing changes a cache; whoever does is noticed before backward or in it, with and without checkpointing."""
    world, heads = mesh.cp_size, 2 * mesh.context.ulysses_size
    tokens = 2 * world
    past = _rollout(mesh, (tokens, tokens), heads, heads)
    before = [(x.k.clone(), x.v.clone(), x.k._version, x.v._version) for x in past]
    tensors = [split_tokens(x, mesh) for x in _draw(tokens, heads, heads)[:3]]
    for kind in ("none", "full"):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        out, new_k, new_v = _wrap(Attention(mesh, tokens), kind)(*leaves, past)
        owners = {x.untyped_storage().data_ptr() for x in (*leaves, *(y for kv in past for y in (kv.k, kv.v)))}
        assert not {x.untyped_storage().data_ptr() for x in (new_k, new_v)} & owners, "a cache shares memory"
        out.sum().backward()
    for entry, (k, v, *versions) in zip(past, before, strict=True):
        assert torch.equal(entry.k, k) and torch.equal(entry.v, v) and [entry.k._version, entry.v._version] == versions
    for kind, error in (("none", RuntimeError), ("full", ValueError)):
        past = [KeyValues(x.k.clone(), x.v.clone(), x.tokens) for x in past]
        out = _wrap(Attention(mesh, tokens), kind)(*leaves, past)[0]
        past[0].k.roll(1, 1).copy_(past[0].k)  # reading a cache is allowed
        past[1].v.copy_(past[1].v.roll(1, 1))  # a rolling buffer
        with pytest.raises(error, match="modified by an inplace|changed in place"):
            out.sum().backward()
        with pytest.raises(ValueError, match="past"):
            cached_attention(*tensors, past, mesh=mesh, total_tokens=tokens)
    return True


def _traffic(mesh, history):
    """Return the bytes sent in forward and backward of one chunk after ``history`` chunks."""
    heads, tokens = 2 * mesh.context.ulysses_size, 4 * mesh.cp_size
    q, k, v, _ = (split_tokens(x, mesh) for x in _draw(tokens, heads, heads, torch.bfloat16))
    past = []
    for _ in range(history):
        past = [*past, cached_attention(q, k, v, past, mesh=mesh, total_tokens=tokens)[1]]
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    counted = []
    with CollectiveCounter() as sent:
        out = cached_attention(*leaves, past, mesh=mesh, total_tokens=tokens)[0]
    counted.append((Counter(sent.calls), Counter(sent.bytes)))
    with CollectiveCounter() as sent:
        out.backward(torch.ones_like(out))
    counted.append((Counter(sent.calls), Counter(sent.bytes)))
    return counted


def _expected_traffic(mesh):
    """Return the calls and bytes of forward and backward, for P = ulysses and R = ring.

    A rank's queries have n elements of bf16; the log-sum-exps have n / D of fp32.
    """
    r, p = mesh.context.ring_size, mesh.context.ulysses_size
    n = BATCH * 4 * 2 * p * HEAD_DIM
    calls = {"all_to_all": 2} if p > 1 else {}
    sent = {"all_to_all": 2 * 4 * n * (p - 1) / p} if p > 1 else {}
    forward, backward = (Counter(calls), Counter(sent)), (Counter(calls), Counter(sent))
    if r > 1:
        lse = 4 * n / HEAD_DIM
        forward[0].update(all_gather=1, all_to_all=1)
        forward[1].update(all_gather=2 * n * (r - 1), all_to_all=(2 * n + lse) * (r - 1))
        backward[0].update(all_gather=1, reduce_scatter=1)
        backward[1].update(all_gather=(2 * 3 * n + lse) * (r - 1), reduce_scatter=4 * n * (r - 1))
    return [forward, backward]


def _calls_of_kernels(mesh):
    """One call for each cached chunk and one for the new chunk, whatever the ring."""
    heads, tokens = 2 * mesh.context.ulysses_size, 4 * mesh.cp_size
    q, k, v, _ = (split_tokens(x, mesh) for x in _draw(tokens, heads, heads))
    past, counts = [], []
    with pytest.MonkeyPatch.context() as patch:
        forward = CpuFlash.forward
        patch.setattr(CpuFlash, "forward", lambda *args: (counts.append(len(past)), forward(*args))[1])
        for _ in range(3):
            past = [*past, cached_attention(q, k, v, past, mesh=mesh, total_tokens=tokens)[1]]
    return Counter(counts) == {0: 1, 1: 2, 2: 3}


@torch.no_grad()
def _in_a_buffer(mesh):
    """The buffer holds and sees what the list does, by one kernel call, with and without the operator."""
    world, kv_heads = mesh.cp_size, 2 * mesh.context.ulysses_size
    counts, forward, past, at = [], CpuFlash.forward, [], 3
    buffers = [torch.full((BATCH, at + 40, 2, HEAD_DIM), torch.nan, dtype=torch.float64) for _ in range(2)]
    for tokens in (2 * world + 1, max(world - 1, 1), 7, 1):
        q, k, v, _ = (split_tokens(x, mesh) for x in _draw(tokens, 2 * kv_heads, kv_heads))
        call, held = {"mesh": mesh, "total_tokens": tokens}, held_tokens(tokens, mesh.context)
        truth, new = cached_attention(q, k, v, past, **call)
        place = torch.tensor((at, 3, at + held))
        counts.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CpuFlash, "forward", lambda *args: (counts.append(1), forward(*args))[1])
            out = buffered_attention(q, k, v, *buffers, place, **call)
            assert len(counts) == (at + held > 3)
        assert (out - truth).norm() <= 1e-12 * truth.norm().clamp_min(1)
        assert all(torch.equal(x[:, at : at + held], y) for x, y in zip(buffers, (new.k, new.v), strict=True))
        with FlopCounterMode(display=False):
            assert torch.equal(buffered_attention(q, k, v, *buffers, place, **call), out)
        past, at = [*past, new], at + held
    for name, changed in (("keys", buffers[0][:1]), ("keys", buffers[0].float())):
        with pytest.raises(ValueError, match=name):
            buffered_attention(q, k, v, changed, buffers[1], place, **call)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="no_grad"):
        buffered_attention(q, k, v, *buffers, place, **call)
    return all(x[:, :3].isnan().all() for x in buffers)


def _refusals(mesh):
    heads, tokens = 2 * mesh.context.ulysses_size, 2 * mesh.cp_size
    q, k, v, _ = (split_tokens(x, mesh) for x in _draw(tokens, heads, heads, torch.float32))
    _, entry = cached_attention(q, k, v, [], mesh=mesh, total_tokens=tokens)
    call = {"mesh": mesh, "total_tokens": tokens}
    for name, past, settings in (
        ("past", None, {}),
        ("past", [(k, v)], {}),
        (r"past\[1\]\.k", [entry, KeyValues(entry.k.bfloat16(), entry.v, tokens)], {}),
        (r"past\[0\]\.v", [KeyValues(entry.k, entry.v[:1], tokens)], {}),
        (r"past\[0\]\.k", [KeyValues(entry.k, entry.v, tokens + mesh.cp_size)], {}),
        ("total_tokens", [entry], {"total_tokens": 5 * tokens}),
        ("total_tokens", [entry], {"total_tokens": (mesh.cp_size, mesh.cp_size)}),
        ("head_groups", [entry], {"head_groups": 3}),
        ("scale", [entry], {"scale": "1"}),
    ):
        with pytest.raises(ValueError, match=name):
            cached_attention(q, k, v, past, **call | settings)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        cached_attention(forward_ad.make_dual(q, q), k, v, [entry], **call)
    return True


def _everything(ring, ulysses):
    mesh = context_mesh(ring * ulysses, ulysses, 4 * ulysses)
    assert _numbers(ring, ulysses) and _operator_is_the_same(mesh) and _values_stay(mesh)
    expected = _expected_traffic(mesh)
    for history in (0, 3):
        assert _traffic(mesh, history) == expected, (history, _traffic(mesh, history), expected)
    assert _calls_of_kernels(mesh) and _refusals(mesh) and _in_a_buffer(mesh)
    return True


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_attention_to_a_cache(pools, ring, ulysses):
    """Numbers, bytes, kernel calls and refusals on one mesh. Bytes do not depend on what is cached."""
    assert all(pools[ring * ulysses].run(_everything, ring, ulysses))


def _sums():
    """Return dQ of a chunk whose cached chunks add 1024, 3 and -1024 to it. A sum in bf16 loses the 3."""
    mesh, past = context_mesh(1, 1, 1), []
    values = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.bfloat16).view(1, 4, 1, 1).expand(1, 4, 1, 8)
    for first in (1024, 3, -1024):
        keys = torch.zeros_like(values)
        keys[0, 0, 0, 0] = first
        past.append(KeyValues(keys, values.clone(), 4))
    q = torch.zeros(values.shape, dtype=torch.bfloat16, requires_grad=True)  # every probability is 1/16
    out, _ = cached_attention(q, torch.zeros_like(values), values, past, mesh=mesh, scale=16)
    out[..., 0].sum().backward()
    return q.grad[0, :, 0, 0].tolist()


def test_a_cache_sums_in_fp32(pools):
    assert pools[1].run(_sums) == [[3.0] * 4]


class Masked(nn.Module):
    """Block that gets its mask as an argument."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, q, k, v, mask):
        options = {"mesh": self.mesh, "total_tokens": 10}
        return context_parallel_attention(q, k, v, mask=mask, **options).sin()


def _compiled(ring):
    mesh = context_mesh(2, 2 // ring, 4)
    with Counted() as counted:
        _compare_compiled(mesh)
    return counted.graphs > 0


def _compare_compiled(mesh):
    _rollout(mesh, (5, 3, 7), 4, 4, ("none", "compile"))
    leaves = [split_tokens(x, mesh).requires_grad_() for x in _draw(10, 4, 4)[:3]]
    plain, compiled = Masked(mesh), _wrap(Masked(mesh), "compile")
    for mask in (teacher_forcing((3, 2)), block_causal((3, 7), window=0), block_causal((4, 4, 2))):
        outs = [block(*leaves, mask) for block in (plain, compiled)]
        grads = [torch.autograd.grad(out.sum(), leaves) for out in outs]
        for a, b in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
            assert relative_error(b, a) <= 1e-12, mask


@long
@pytest.mark.parametrize("ring", [1, 2])
def test_compiled(pools, ring):
    """Caches and masks are arguments of a compiled block."""
    assert all(pools[2].run(_compiled, ring))


def _fake():
    """A planner's fake tensors: shapes and bytes without computation."""
    mesh = context_mesh(1, 1, 4)
    with FakeTensorMode():
        past, sizes = [], []
        for tokens in (5, 3):
            q, k, v = (torch.empty(1, tokens, 4, 8, requires_grad=True) for _ in range(3))
            out, new = cached_attention(q, k, v, past, mesh=mesh)
            out.sum().backward()
            past = [*past, new]
            sizes.append((tuple(out.shape), tuple(q.grad.shape), tuple(new.k.shape)))
    return sizes


def test_fake_tensors(pools):
    assert pools[1].run(_fake) == [[((1, n, 4, 8),) * 3 for n in (5, 3)]]
