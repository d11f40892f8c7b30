"""The attention operators under compilation, checkpointing, autocast and low precision; what is refused, and how."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_cp.attention import context_parallel_attention, cross_attention, operators
from fsdp_cp.attention.cuda_kernels import SM_MARGIN, FlashAttention3
from fsdp_cp.attention.foreign import Foreign
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sequence import gather_tokens, split_tokens
from tests.oracles.attention import Case, errors, make_inputs, on_ranks, oracle, plain_attention
from tests.oracles.attention_kernels import attend, attend_backward

DIM, HEADS, TOKENS, TEXT = 24, 4, 17, 5


class Block(nn.Module):
    """Self-attention over split tokens, then cross-attention to text."""

    def __init__(self, mesh, head_groups=1):
        super().__init__()
        self.mesh, self.head_groups = mesh, head_groups
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, x, text):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        out = context_parallel_attention(
            q, k, v, mesh=self.mesh, total_tokens=TOKENS, head_groups=self.head_groups
        )  # fmt: skip
        x = x + self.out(out.flatten(2))
        k, v = self.kv(text).unflatten(-1, (2, HEADS, -1)).unbind(2)
        return x + cross_attention(self.q(x).unflatten(-1, (HEADS, -1)), k, v).flatten(2)


def _block_and_inputs(mesh, head_groups=1):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = Block(mesh, head_groups).double()
        x, text = torch.randn(2, TOKENS, DIM).double(), torch.randn(2, TEXT, DIM).double()
    return block, split_tokens(x, mesh).requires_grad_(), text


def _compiled(ulysses, head_groups, backend):
    mesh = build_mesh(cp=4, ulysses=ulysses, heads=HEADS)
    block, x, text = _block_and_inputs(mesh, head_groups)
    leaves = [x, *block.parameters()]
    eager = block(x, text)
    truth = torch.autograd.grad(eager.sin().sum(), leaves)
    compiled = torch.compile(block, fullgraph=True, backend=backend)

    def recomputed(x, text):
        return checkpoint(compiled, x, text, use_reentrant=False)

    worst = 0.0
    for call in (compiled, recomputed):
        out = call(x, text)
        grads = torch.autograd.grad(out.sin().sum(), leaves)
        pairs = zip((out, *grads), (eager, *truth), strict=True)
        worst = max(worst, *(((a - b).norm() / b.norm()).item() for a, b in pairs))
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        messages = []
        for call in (compiled, torch.compile(block, backend=backend)):
            with pytest.raises(Exception) as error:
                call(dual, text)
            messages.append(str(error.value))
    return worst, messages


@pytest.mark.parametrize(
    ("ulysses", "head_groups", "backend"),
    [
        (1, 1, "aot_eager"),
        pytest.param(2, 2, "inductor", marks=pytest.mark.long),
        pytest.param(4, 1, "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_fullgraph_compilation(ulysses, head_groups, backend):
    """Values and gradients as in eager; tangents, which inductor's graphs would lose, are refused."""
    for worst, messages in run_ranks(4, _compiled, ulysses, head_groups, backend, timeout=400):
        assert worst < 1e-14
        assert all("no forward-mode AD in a compiled graph; call the module uncompiled" in m for m in messages), (
            messages
        )


def _func_jvp(ulysses):
    mesh = build_mesh(cp=4, ulysses=ulysses, heads=HEADS)
    block, x, text = _block_and_inputs(mesh)
    x, t, t_text = x.detach(), torch.randn_like(x), torch.randn_like(text)
    with torch.no_grad():
        _, functional = torch.func.jvp(block, (x, text), (t, t_text))
        with forward_ad.dual_level():
            dual = block(forward_ad.make_dual(x, t), forward_ad.make_dual(text, t_text))
            ours = forward_ad.unpack_dual(dual).tangent.clone()
    return (functional - ours).norm().item() / ours.norm().item()


@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_functional_and_forward_ad_interfaces_agree(ulysses):
    assert max(run_ranks(4, _func_jvp, ulysses)) < 1e-14


def _refused_tangents():
    mesh = build_mesh(cp=2, heads=HEADS)
    q, k, v, t = (torch.randn(1, 3, HEADS, 6) for _ in range(4))
    text = torch.randn(1, TEXT, HEADS, 6)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, t)
        for call in (
            lambda: context_parallel_attention(dual, k, v, mesh=mesh),
            lambda: context_parallel_attention(q, k, dual, mesh=mesh),
            lambda: cross_attention(dual, text, text),
            lambda: gather_tokens(dual, mesh),
        ):
            with pytest.raises(RuntimeError, match=r"compute it under torch\.no_grad\(\)"):
                call()
        with torch.no_grad():
            with pytest.raises(ValueError, match="backend='cpu_flash' has no forward-mode derivative"):
                context_parallel_attention(dual, k, v, mesh=mesh, backend="cpu_flash")
            out = context_parallel_attention(dual, k, v, mesh=mesh, backend="reference")
            assert forward_ad.unpack_dual(out).tangent is not None
    with pytest.raises(RuntimeError, match=r"compute it under torch\.no_grad\(\)"):
        torch.func.jvp(lambda q: context_parallel_attention(q, k, v, mesh=mesh), (q,), (t,))
    return True


def test_tangents_are_refused_rather_than_dropped():
    assert all(run_ranks(2, _refused_tangents))


def _some_move(which):
    """Tangents on one of q, k and v alone; on the text's too."""
    case = Case(ring=2, ulysses=2, tokens=(9,), kv_heads=2)
    mesh = build_mesh(cp=4, ulysses=2, heads=2)
    inputs = make_inputs(case)
    tangents = [t if i == which else torch.zeros_like(t) for i, t in enumerate(inputs.tangents)]
    text = [x[:, :5] for x in inputs.primals]
    with torch.no_grad(), forward_ad.dual_level():
        xs = list(inputs.primals)
        xs[which] = forward_ad.make_dual(xs[which], inputs.tangents[which])
        own = [split_tokens(x, mesh) for x in xs]
        ours = forward_ad.unpack_dual(
            gather_tokens(context_parallel_attention(*own, mesh=mesh, total_tokens=9), mesh, 9)
        ).tangent.clone()
        cross = [inputs.primals[0], text[1], text[2]]
        cross[which] = forward_ad.make_dual(cross[which], inputs.tangents[which][:, : cross[which].shape[1]])
        ours_cross = forward_ad.unpack_dual(cross_attention(*cross)).tangent.clone()
    _, truth = torch.func.jvp(lambda *x: plain_attention(*x, case, None), tuple(inputs.primals), tuple(tangents))
    plain = (inputs.primals[0], text[1], text[2])
    moves = tuple(
        inputs.tangents[i][:, : x.shape[1]] if i == which else torch.zeros_like(x) for i, x in enumerate(plain)
    )
    _, truth_cross = torch.func.jvp(lambda *x: plain_attention(*x, case, None), plain, moves)
    return max(((a - b).norm() / b.norm()).item() for a, b in ((ours, truth), (ours_cross, truth_cross)))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_tangents_on_some_arguments(which):
    assert max(run_ranks(4, _some_move, which)) < 1e-12


def _cross(masked):
    generator = torch.Generator().manual_seed(1)
    mesh = build_mesh(cp=3, heads=3)
    q, w, k, v = (torch.randn(2, n, 6, 5, generator=generator).double() for n in (10, 10, 7, 7))
    k, v = k[:, :, :3], v[:, :, :3]
    mask = None
    if masked:
        mask = torch.rand(2, 7, generator=generator) > 0.5
        mask[0] = False
    case = Case(heads=6, kv_heads=3, head_dim=5)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    truth = plain_attention(*leaves, case, mask)
    grads = torch.autograd.grad((truth * w).sum(), leaves)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    out = gather_tokens(cross_attention(split_tokens(ours[0], mesh), *ours[1:], key_mask=mask), mesh, 10)
    (out * w).sum().backward()
    for x in ours:
        dist.all_reduce(x.grad)
    pairs = zip((out, *(x.grad for x in ours)), (truth, *grads), strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize("masked", [False, True])
def test_cross_attention_to_replicated_text(masked):
    """The text's gradients are partial sums over the ranks' queries."""
    assert max(run_ranks(3, _cross, masked)) < 1e-12


def _mistakes():
    mesh = build_mesh(cp=4, ulysses=2, heads=4)
    q, k, v = (torch.zeros(2, 5, 4, 8) for _ in range(3))
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    for message, args, settings in (
        ("total_tokens=100 over cp=4 makes 25", (q, k, v), {"total_tokens": 100}),
        ("q has 5 local tokens", (q, k, v), {"total_tokens": 16}),
        ("must be at least 1", (q, k, v), {"total_tokens": 0}),
        ("k is torch.bfloat16 on cpu, but q is torch.float32", (q, k.bfloat16(), v), {}),
        ("v is torch.float32 on meta", (q, k, v.to("meta")), {}),
        ("must have the same shape", (q, k[:, :3], v), {}),
        ("must be .batch, tokens, heads, head_dim", (q[0], k, v), {}),
        ("agree in batch and head_dim", (q, k[..., :4], v[..., :4]), {}),
        ("the 3 heads of k and v must divide the 4 heads of q", (q, k[:, :, :3], v[:, :, :3]), {}),
        (r"mesh\.ulysses=2 does not divide the 1 heads of k; use mesh\.ulysses=1", (q, k[:, :, :1], v[:, :, :1]), {}),
        ("head_groups=3 does not divide the 2 heads of q that a rank gets", (q, k, v), {"head_groups": 3}),
        ("head_groups=0", (q, k, v), {"head_groups": 0}),
        (r"key_mask has shape \(2, 3\); it must be .* \(2, 17\)", (q, k, v),
         {"key_mask": torch.ones(2, 3, dtype=torch.bool), "total_tokens": 17}),
        ("key_mask is torch.float32", (q, k, v), {"key_mask": torch.ones(2, 17), "total_tokens": 17}),
        ("causal_block=0 must be at least 1", (q, k, v), {"causal_block": 0}),
        ("over one segment", (q, k, v), {"causal_block": 2, "total_tokens": (8, 12)}),
        ("backend='flashy' is unknown; use auto or cpu_flash", (q, k, v), {"backend": "flashy"}),
        ("backend='flash' .*; use auto or cpu_flash, reference", (q, k, v), {"backend": "flash"}),
        ("backend='transformer_engine' ", (q, k, v), {"backend": "transformer_engine"}),
        ("cannot be combined with joint text", (q, k, v), {"joint": (q, k, v), "causal_block": 2}),
        ("number of video tokens", (q, k, v), {"joint": (q, k, v), "total_tokens": (8, 12)}),
        ("joint k", (q, k, v), {"joint": (q, k[:, :, :2], v)}),
        ("joint v has 4 tokens", (q, k, v), {"joint": (q, k, v[:, :4])}),
        ("dp", (q, k, v), {"mesh": whole}),
        ("joint k is torch.bfloat16 on cpu, but k is torch.float32", (q, k, v), {"joint": (q, k.bfloat16(), v)}),
        ("no size may be 0", (q[:0], k[:0], v[:0]), {}),
        ("joint text needs a mesh of fsdp_cp.build_mesh", (q, k, v),
         {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses")), "joint": (q, k, v)}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            context_parallel_attention(*args, **{"mesh": mesh} | settings)
    with pytest.raises(ValueError, match=r"key_mask has shape"):
        cross_attention(q, k[:, :3], v[:, :3], key_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="no size may be 0"):
        cross_attention(q, k[:, :0], v[:, :0])
    with pytest.raises(ValueError, match=r"must be \(batch, tokens, heads, head_dim\)"):
        cross_attention(q, k[0, 0, 0], v)
    return True


def test_mistakes_are_refused_on_every_rank_before_anything_is_sent():
    assert all(run_ranks(4, _mistakes))


def _with_device_meshes():
    case = Case(ring=2, ulysses=2, tokens=(9,))
    inputs = make_inputs(case)
    truth, worst = oracle(case)[0], 0.0
    for sizes, names in (((2, 2), ("ring", "ulysses")), ((4,), ("ring",)), ((4,), ("ulysses",))):
        axes = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        mesh = build_mesh(cp=4, heads=4)
        own = [split_tokens(x, mesh) for x in inputs.primals]
        full = gather_tokens(context_parallel_attention(*own, mesh=axes, total_tokens=9), mesh, 9)
        worst = max(worst, ((full - truth).norm() / truth.norm()).item())
    return worst


def test_any_device_mesh_of_ring_and_ulysses():
    assert max(run_ranks(4, _with_device_meshes)) < 1e-12


def _strided(ulysses):
    """q, k, v whose last dimension is not contiguous, as some projections leave them."""
    mesh = build_mesh(cp=2, ulysses=ulysses, heads=2)
    case = Case(ring=2 // ulysses, ulysses=ulysses, tokens=(8,), heads=2, kv_heads=2)
    inputs, truth = make_inputs(case), oracle(case)
    leaves = [x.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in inputs.primals]
    own = [x[:, mesh.cp_rank * 4 : mesh.cp_rank * 4 + 4] for x in leaves]
    assert all(x.stride(-1) != 1 for x in own)
    out = gather_tokens(context_parallel_attention(*own, mesh=mesh), mesh)
    text = cross_attention(leaves[0], own[1], own[2])
    plain = plain_attention(inputs.primals[0], *(x[:, mesh.cp_rank * 4 : mesh.cp_rank * 4 + 4]
                                                 for x in inputs.primals[1:]), case, None)  # fmt: skip
    (out * inputs.weight).sum().backward()
    grads = [x.grad.contiguous() for x in leaves]
    for grad in grads:
        dist.all_reduce(grad)
    pairs = zip((out, *grads, text), (*truth[:4], plain), strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize("ulysses", [1, 2])
def test_inputs_whose_last_dimension_is_not_contiguous(ulysses):
    assert max(run_ranks(2, _strided, ulysses)) < 1e-12


def _anomaly():
    mesh = build_mesh(cp=2, heads=2)
    q = torch.randn(1, 2048, 2, 16, requires_grad=True)
    with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=True):
        warnings.simplefilter("ignore")
        for _ in range(3):
            context_parallel_attention(q, q, q, mesh=mesh, head_groups=1).sum().backward()
    return True


def test_anomaly_mode_sees_no_gradient_that_is_still_on_its_way():
    assert all(run_ranks(2, _anomaly))


def _early_stop():
    """Checkpointing ends a recomputation as soon as it has what backward needs, here inside the last exchange."""
    mesh = build_mesh(cp=2, heads=4)
    x = torch.randn(1, 64, 4, 16, requires_grad=True)

    def region(x):
        return context_parallel_attention(x, x, x, mesh=mesh, head_groups=2)

    counts = []
    for _ in range(3):
        checkpoint(region, x, use_reentrant=False).square().sum().backward()
        counts.append(torch._C._distributed_c10d._get_work_registry_size())
    return counts


def test_no_exchange_is_left_behind():
    for counts in run_ranks(2, _early_stop):
        assert counts == [0, 0, 0]


def _reference_under_autocast():
    mesh = build_mesh(cp=1)
    case = Case(tokens=(200,), head_dim=32, dtype=torch.bfloat16)
    inputs, truth = make_inputs(case), oracle(case)
    errors = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs.primals, inputs.tangents, strict=True)]
            tangent = forward_ad.unpack_dual(context_parallel_attention(*duals, mesh=mesh)).tangent.double()
        errors.append(((tangent - truth[-1]).norm() / truth[-1].norm()).item())
    return errors


def test_the_derivative_is_as_precise_under_autocast():
    (plain, cast), *_ = run_ranks(1, _reference_under_autocast)
    assert cast <= 1.01 * plain, (cast, plain)


def _autocast():
    mesh = build_mesh(cp=2, heads=2)
    q, k, v = (torch.randn(1, 6, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    own = [split_tokens(x, mesh) for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = context_parallel_attention(own[0].bfloat16(), own[1], own[2], mesh=mesh)
        text = cross_attention(own[0], k, v)
    low = [x.bfloat16() for x in own]
    return mixed.dtype, torch.equal(mixed, context_parallel_attention(*low, mesh=mesh)), text.dtype


def test_autocast_as_for_torchs_own_attention():
    assert run_ranks(2, _autocast) == [(torch.bfloat16, True, torch.bfloat16)] * 2


def _low_precision(case):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return on_ranks(case)


@pytest.mark.parametrize(
    "dtype", [*(pytest.param(x, marks=pytest.mark.slow) for x in (torch.bfloat16, torch.float16)), torch.float32]
)
def test_a_ring_of_16_is_as_precise_as_one_kernel(dtype):
    """Chunks are merged in fp32, so 16 of them cost no more than 1.3 times the error of one kernel over all tokens."""
    common = {"tokens": (800,), "heads": 2, "kv_heads": 2, "head_dim": 32, "batch": 1, "dtype": dtype}
    one, ring = Case(**common), Case(**common, ring=16)
    truth = oracle(one)
    single = errors(run_ranks(1, _low_precision, one)[0], truth, one)
    merged = errors(run_ranks(16, _low_precision, ring, timeout=400)[0], truth, ring)
    for name, error in merged.items():
        assert error <= 1.3 * single[name], (name, error, single[name])


def _margins(case):
    """Attention with a stand-in for FlashAttention 3, and the SMs that it was told to leave free."""
    margins = []

    def forward(q, k, v, softmax_scale, sm_margin=0):
        margins.append(sm_margin)
        return attend(q, k, v, None, softmax_scale)

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, sm_margin=0):
        margins.append(sm_margin)
        grads = attend_backward(dout, q, k, v, out, softmax_lse, None, softmax_scale)
        for written, grad in zip((dq, dk, dv), grads, strict=True):
            written.copy_(grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlashAttention3, "functions", lambda self: Foreign(None, forward, backward))
        patch.setattr(operators, "choose_kernel", lambda *a, **b: FlashAttention3())
        return on_ranks(case), margins


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2), (3, 1)])
def test_flash_attention_3_leaves_sms_to_the_messages_of_a_ring(pools, ring, ulysses):
    case = Case(ring=ring, ulysses=ulysses, tokens=(17,))
    for ours, margins in pools[case.world].run(_margins, case):
        assert max(errors(ours, oracle(case), case).values()) < 1e-12
        assert margins == [SM_MARGIN if ring > 1 else 0] * 2 * ring
