"""What context-parallel attention sends: calls and bytes of each rank and pass are those of a formula, and no others.

Counted from the profiler, which sees inside the operators and in backward; `test_the_wire_carries_the_formula` holds
the same formula against the bytes that the process really wrote. With n = batch * padded tokens * heads * head_dim / cp
elements, m the same for the K/V heads (m = n without grouped queries), P the Ulysses and R the ring degree:

    Ulysses  forward 2 (n + m) (P-1)/P in 2 all-to-alls (4n (P-1)/P for m = n), backward as much, JVP twice as much in 2
    ring     forward 2m (R-1) in R-1 sends; backward 2m (R-1) for K/V and 2m (R-1) in fp32 for dK/dV; JVP 4m (R-1)
"""

import os
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_cp.attention import context_parallel_attention, cross_attention, ring
from fsdp_cp.attention.layout import Layout
from tests.oracles.attention import Case, context_mesh

FACTORS = [(w // u, u) for w in (2, 3, 4, 6) for u in range(1, w + 1) if w % u == 0]
PASSES = ("forward", "backward", "jvp")
SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2}
NAMES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "c10::BFloat16"}
# Those that wait for the device where there is one: sizes that depend on data, numbers taken out of tensors.
SYNCS = ("item", "_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "_unique2")
PROCESS_IO = Path("/proc/self/io")


# --- counting ---


def _traffic(call, also=()):
    """What ``call()`` sends: ``{(what, dtype): (calls, bytes)}``. A rank's own share of an all-to-all is not sent.

    ``c10d::send`` is the call and ``gloo:send`` its work, which alone knows the tensor. Events that wait for the device
    are listed likewise, and those named in ``also``. ``kineto_results`` is private (torch 2.11 to 2.13).
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        call()
    calls, sent = Counter(), Counter()
    for event in profiler.profiler.kineto_results.events():
        name, key, size = event.name(), None, 0
        if name in ("gloo:send", "gloo:recv"):
            key = name.removeprefix("gloo:"), event.dtypes()[0]
            size = torch.Size(event.shapes()[0]).numel()
        elif name == "c10d::alltoall_base_":
            key = "all_to_all", event.dtypes()[1]
            splits = event.concrete_inputs()[4]
            own = splits[dist.get_rank() % len(splits)] / sum(splits)  # ulysses ranks are neighbours
            size = torch.Size(event.shapes()[1]).numel() * (1 - own)
        elif name.startswith("c10d::") or name.removeprefix("aten::") in SYNCS or name in also:
            key = name, ""
        if key:
            calls[key] += 1
            sent[key] += size * SIZES.get(key[1], 0)
    for direction, call_name in (("send", "c10d::send"), ("recv", "c10d::recv_")):
        works = sum(n for (what, _), n in calls.items() if what == direction)
        assert calls.pop((call_name, ""), 0) == works, "a work that the profiler lost"
    return {key: (count, round(sent[key])) for key, count in calls.items()}


def _local(case, mesh):
    generator = torch.Generator().manual_seed(mesh.cp_rank)
    tokens = sum(-(-total // case.world) for total in case.tokens)

    def draw(length, heads):
        return torch.randn(case.batch, length, heads, case.head_dim, generator=generator).to(case.dtype)

    heads = (case.heads, case.kv_heads, case.kv_heads)
    video, text = ([draw(length, h) for h in heads] for length in (tokens, case.text))
    mask = torch.arange(case.total).remainder(3).ne(1).expand(case.batch, -1) if case.masked else None

    def attend(q, k, v):
        out = context_parallel_attention(
            q,
            k,
            v,
            mesh=mesh,
            total_tokens=case.tokens if len(case.tokens) > 1 else case.tokens[0],
            key_mask=mask,
            causal_block=case.block,
            joint=tuple(text) if case.text else None,
            head_groups=case.head_groups,
        )
        return torch.cat(out, dim=1) if case.text else out

    return video, attend


def _passes(tensors, attend, count):
    """``count`` of a forward, a backward and a JVP of ``attend(*tensors)``."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    outs, found = [], {}
    found["forward"] = count(lambda: outs.append(attend(*leaves)))
    found["backward"] = count(lambda: outs[0].backward(torch.ones_like(outs[0])))
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in tensors]
        found["jvp"] = count(lambda: attend(*duals))
    return found


def _mesh(case):
    return context_mesh(case.world, case.ulysses, case.kv_heads)


def _count(cases, count=_traffic):
    return [_passes(*_local(case, _mesh(case)), count) for case in cases]


# --- the formula ---


def _expected(case, kind, keys=None, grads=None, behind=None):
    """The same as :func:`_traffic`. ``keys`` and ``grads`` are the hops that this rank's ring place sends K/V and dK/dV
    on, ``behind`` those of the place behind it; R-1 by default."""
    r, p = case.ring, case.ulysses
    groups = case.head_groups if p > 1 else 1  # without an exchange there is nothing to hide behind another group
    local = sum(-(-total // case.world) for total in (*case.tokens, case.text))
    n, m = (case.batch * local * heads * case.head_dim for heads in (case.heads, case.kv_heads))
    keys, grads = (r - 1 if x is None else x for x in (keys, grads))
    tensors = 2 if kind == "jvp" else 1
    dtype, sums = NAMES[case.dtype], NAMES[torch.promote_types(case.dtype, torch.float32)]
    calls, sent = Counter(), Counter()
    if p > 1:
        calls["all_to_all", dtype] = 2 * groups
        sent["all_to_all", dtype] = tensors * 2 * (n + m) * (p - 1) // p * SIZES[dtype]
    for what, (k, g) in (("send", (keys, grads)), ("recv", behind or (keys, grads))):
        hops = groups * k, groups * g if kind == "backward" else 0
        for name, count in zip((dtype, sums), hops, strict=True):
            if count:
                calls[what, name] += count
                sent[what, name] += count * tensors * 2 * m // groups * SIZES[name]
    return {key: (count, sent[key]) for key, count in calls.items()}


def _differences(case, ranks, **hops):
    """(rank, pass, got, expected) wherever they differ; ``hops`` are per ring rank."""
    wrong = []
    for rank, found in enumerate(ranks):
        place = rank // case.ulysses
        own = {name: counts[place] for name, counts in hops.items()}
        behind = (hops["keys"][place - 1], hops["grads"][place - 1]) if hops else None
        for kind in PASSES:
            expected = _expected(case, kind, **own, behind=behind)
            if found[kind] != expected:
                wrong.append((rank, kind, found[kind], expected))
    return wrong


@pytest.mark.parametrize(("ring_size", "ulysses"), FACTORS)
def test_bytes_and_calls(pools, ring_size, ulysses):
    common = {"ring": ring_size, "ulysses": ulysses, "heads": 24, "kv_heads": 24}
    f32, bf16 = torch.float32, torch.bfloat16
    cases = [
        Case(**common, tokens=(24,), dtype=f32),
        Case(**common, tokens=(24,), dtype=bf16),
        Case(**common, tokens=(23,), dtype=bf16),
        Case(**common, tokens=(23,), dtype=f32, masked=True),
        Case(**common, tokens=(24,), dtype=f32, head_groups=2),
        Case(**common | {"kv_heads": ulysses}, tokens=(23,), dtype=bf16),
        Case(**common, tokens=(7, 17), dtype=f32),
    ]
    ranks = pools[ring_size * ulysses].run(_count, cases)
    for i, case in enumerate(cases):
        assert not _differences(case, [rank[i] for rank in ranks])


def test_the_formula_in_numbers():
    """By hand: batch 2, 24 tokens, 12 heads of 6 over (2, 2) are n = 864 elements."""
    case = Case(ring=2, ulysses=2, tokens=(24,), heads=12, kv_heads=12, dtype=torch.bfloat16)
    exchange, hop = ("all_to_all", "c10::BFloat16"), ("send", "c10::BFloat16")
    forward, backward, jvp = (_expected(case, kind) for kind in PASSES)
    assert forward[exchange] == (2, 4 * 864 // 2 * 2) and forward[hop] == (1, 2 * 864 * 2)
    assert backward[exchange] == forward[exchange] and backward[hop] == forward[hop]
    assert backward["send", "float"] == (1, 2 * 864 * 4)
    assert jvp[exchange] == (2, 8 * 864 // 2 * 2) and jvp[hop] == (1, 4 * 864 * 2)


# Sends of each ring rank: K/V (forward, backward and JVP) and dK/dV (backward). A hop is made if K/V reach someone who
# looks at them on it or later; for dK/dV, if someone has added to them. Worked out on paper.
SPARSE = [
    # One block a rank: chunk c goes on to the last rank, rank 3's to nobody; its gradients come home from rank c+1 on.
    (Case(ring=4, tokens=(12,), block=3), (1, 2, 3, 0), (2, 2, 2, 3)),
    (Case(ring=4, tokens=(24,), block=3, dtype=torch.bfloat16), (1, 2, 3, 0), (2, 2, 2, 3)),
    # Blocks 0-5 and 6-11, ranks of 4 tokens: all see all, but rank 0 does not see rank 2's.
    (Case(ring=3, tokens=(12,), block=6), (2, 2, 2), (1, 2, 2)),
    # 3 tokens on each of ranks 0 to 2, none on rank 3, which passes on what others look at.
    (Case(ring=4, tokens=(9,)), (2, 2, 2, 2), (2, 2, 2, 2)),
    (Case(ring=2, ulysses=2, tokens=(8,), block=4), (1, 0), (0, 1)),
    (Case(ring=2, ulysses=2, tokens=(2,), dtype=torch.float32), (0, 0), (0, 0)),
    (Case(ring=2, ulysses=2, tokens=(8,), block=4, head_groups=2), (1, 0), (0, 1)),
]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_hops_that_nobody_needs_are_not_made(pools, world):
    cases = [entry for entry in SPARSE if entry[0].world == world]
    ranks = pools[world].run(_count, [case for case, *_ in cases])
    for i, (case, keys, grads) in enumerate(cases):
        assert not _differences(case, [rank[i] for rank in ranks], keys=keys, grads=grads)


def _count_quiet(case):
    """One rank alone, and attention to text that every rank holds."""
    (q, k, v), attend = _local(case, _mesh(case))
    mask = torch.tensor([[True, False] * 3]).expand(case.batch, -1)
    text = [x[:, :6] for x in (k, v)]
    alone = _passes((q, k, v), attend, _traffic) if case.world == 1 else {}
    return alone, _passes((q, *text), partial(cross_attention, key_mask=mask), _traffic)


@pytest.mark.parametrize("world", [1, 2])
def test_one_rank_and_cross_attention_send_nothing(pools, world):
    for masked in (False, True):
        case = Case(ring=world, tokens=(12,), dtype=torch.float32, masked=masked)
        for alone, cross in pools[world].run(_count_quiet, case):
            assert len(alone) == (3 if world == 1 else 0) and len(cross) == 3
            assert not any(alone.values()) and not any(cross.values())


def test_joint_text_adds_one_gather(pools):
    """The text's output is gathered, its gradient reduce-scattered; the text's share of tokens counts in n."""
    case = Case(ring=2, ulysses=2, tokens=(17,), text=5, dtype=torch.float32)
    ranks = [rank[0] for rank in pools[4].run(_count, [case])]
    for found in ranks:
        for kind, name in zip(PASSES, ("_allgather_base_", "_reduce_scatter_base_", "_allgather_base_"), strict=True):
            assert found[kind].pop((f"c10d::{name}", "")) == (1, 0)
    assert not _differences(case, ranks)


# --- the count can fail ---


def _full_turn(tensors, place, visited=ring._visited):
    """A ring that brings the chunks home at the end: one hop more."""
    yield from visited(tensors, place)
    last = torch.stack(tensors)
    for work in place.start_hop(last, torch.empty_like(last), 1):
        work.wait()


def _sizes_first(tensors, place, visited=ring._visited):
    sizes = [torch.empty(1, dtype=torch.long) for _ in range(place.size)]
    dist.all_gather(sizes, torch.tensor([tensors[0].shape[1]]), group=place.group)
    assert sizes[0].item() > 0
    yield from visited(tensors, place)


def _count_changed(case, name):
    with pytest.MonkeyPatch.context() as patch:
        if name == "all travel":
            patch.setattr(Layout, "keys_travel", lambda *_: True)
        else:
            patch.setattr(ring, "_visited", {"full turn": _full_turn, "sizes first": _sizes_first}[name])
        return _count([case])[0]


def test_the_count_sees_a_different_ring(pools):
    case = Case(ring=3, tokens=(12,), dtype=torch.float32)
    hop = 2 * 2 * 4 * 4 * 6 * 4
    wrong = _differences(case, pools[3].run(_count_changed, case, "full turn"))
    assert {(rank, kind) for rank, kind, *_ in wrong} == {(r, k) for r in range(3) for k in ("forward", "jvp")}
    for _, kind, got, expected in wrong:
        scale = 2 if kind == "jvp" else 1
        assert got["send", "float"] == (3, 3 * hop * scale) and expected["send", "float"] == (2, 2 * hop * scale)

    wrong = _differences(case, pools[3].run(_count_changed, case, "sizes first"))
    assert len(wrong) == 6
    for _, _, got, expected in wrong:
        extra = {key: calls for key, (calls, _) in got.items() if key not in expected}
        assert extra == {(name, ""): 1 for name in ("c10d::allgather_", "aten::item", "aten::_local_scalar_dense")}

    case, keys, grads = SPARSE[0]
    assert _differences(case, pools[4].run(_count_changed, case, "all travel"), keys=keys, grads=grads)


# --- the wire ---


def _written():
    return int(next(line for line in PROCESS_IO.read_text().splitlines() if line.startswith("wchar")).split()[1])


def _written_by(call):
    before = _written()
    call()
    return _written() - before


def _writes_are_counted():
    if not PROCESS_IO.exists():
        return False
    with open(os.devnull, "wb", buffering=0) as sink:
        return _written_by(lambda: sink.write(bytes(4096))) >= 4096


@pytest.mark.skipif(not _writes_are_counted(), reason="the system does not count what a process writes")
def test_the_wire_carries_the_formula(pools):
    """Bytes that the process wrote, to sockets above all, are those of the formula and less than 1 % of headers."""
    common = {"tokens": (1021,), "heads": 4, "kv_heads": 4, "head_dim": 64, "dtype": torch.float32}
    cases = [Case(ring=4 // u, ulysses=u, **common) for u in (1, 2, 4)]
    cases.append(Case(ring=4, **common | {"dtype": torch.bfloat16}))
    ranks = pools[4].run(_count, cases, _written_by)
    for i, case in enumerate(cases):
        for rank in ranks:
            for kind in PASSES:
                sent = sum(size for (what, _), (_, size) in _expected(case, kind).items() if what != "recv")
                assert sent <= rank[i][kind] <= 1.01 * sent, (case, kind, rank[i][kind] / sent)


# --- checkpointing and compiled graphs ---

# A kernel runs once a chunk. The operator's own name is seen again wherever a dispatch mode passes it on.
FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = FORWARD + "_backward"
LINEAR = "aten::linear"


class _Block(torch.nn.Module):
    def __init__(self, case, mesh):
        super().__init__()
        torch.manual_seed(0)
        width = case.heads * case.head_dim
        self.qkv = torch.nn.Linear(width, 3 * width, dtype=case.dtype)
        self.out = torch.nn.Linear(width, width, dtype=case.dtype)
        self.attend = partial(context_parallel_attention, mesh=mesh, total_tokens=case.tokens[0])
        self.heads = case.heads

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.out(self.attend(q, k, v).flatten(2))


def _keep_attention_output(_ctx, op, *_args, **_kwargs):
    keep = op == torch.ops.fsdp_cp.ring_attention.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _train_block(case):
    """Gradients of a block and its traffic, by how its activations are kept."""
    mesh = _mesh(case)
    block = _Block(case, mesh)
    generator = torch.Generator().manual_seed(1 + mesh.cp_rank)
    shape = (case.batch, -(-case.tokens[0] // case.world), case.heads * case.head_dim)
    x = torch.randn(shape, generator=generator, dtype=case.dtype, requires_grad=True)
    leaves = (x, *block.parameters())
    keep_output = partial(create_selective_checkpoint_contexts, _keep_attention_output)
    runs = {
        "kept": block,
        "recomputed": partial(checkpoint, block, use_reentrant=False),
        "output kept": partial(checkpoint, block, use_reentrant=False, context_fn=keep_output),
        "compiled": torch.compile(block, fullgraph=True, backend="aot_eager"),
    }
    found = {}
    for name, run in runs.items():
        if name == "compiled":  # or the profiler sees the graph being made
            torch.autograd.grad(run(x).square().sum(), leaves)
        grads = []
        traffic = _traffic(
            lambda run=run, grads=grads: grads.extend(torch.autograd.grad(run(x).square().sum(), leaves)),
            also=(FORWARD, BACKWARD, LINEAR),
        )
        found[name] = grads, traffic
    return found


@pytest.mark.parametrize(
    ("ring_size", "ulysses"), [(3, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 2), (1, 2)))]
)
def test_what_checkpointing_sends_again(pools, ring_size, ulysses):
    """Full checkpointing runs the ring forward again in backward; with the output kept, only what leads to it."""
    case = Case(ring=ring_size, ulysses=ulysses, tokens=(23,))
    for found in pools[case.world].run(_train_block, case):
        plain = found["kept"][0]
        assert all(x.abs().max() > 0 for x in plain)
        for name, forwards, exchanges, linears in (
            ("kept", 1, 4, 2),
            ("recomputed", 2, 6, 4),
            ("output kept", 1, 6, 4),
            ("compiled", 1, 4, None),
        ):
            grads, traffic = found[name]
            assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True)), name
            assert traffic.pop((FORWARD, "")) == (forwards * ring_size, 0), name
            assert traffic.pop((BACKWARD, "")) == (ring_size, 0), name
            assert traffic.pop((LINEAR, ""), (None,))[0] == linears, name
            calls = {what: n for (what, _), (n, _) in traffic.items()}
            hops = (forwards + 2) * (ring_size - 1)
            p2p = {"send": hops, "recv": hops} if hops else {}
            assert calls == p2p | ({"all_to_all": exchanges} if ulysses > 1 else {}), name
