"""Traffic of context-parallel attention: calls and bytes of each rank and pass equal a formula.

The profiler counts them, since it sees inside the operators and in backward. With n = batch * padded tokens * heads *
head_dim / cp elements, m the same for the K/V heads, P the Ulysses degree and R the ring degree:

    Ulysses  forward 2 (n + m) (P-1)/P in 2 all-to-alls (4n (P-1)/P for m = n), backward the same, JVP twice that in 2
    ring     forward 2m (R-1) in R-1 sends; backward 2m (R-1) for K/V and 2m (R-1) in fp32 for dK/dV; JVP 4m (R-1)
"""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile

from fsdp_cp.attention import context_parallel_attention, cross_attention, ring
from fsdp_cp.attention.layout import Layout
from fsdp_cp.attention.mask import teacher_forcing
from tests.oracles.attention import Case, context_mesh, equal_blocks
from tests.tiers import long_case, slow, slow_case

FACTORS = [
    (1, 2), (3, 1), slow_case(2, 2),
    *(long_case(*sizes) for sizes in ((4, 1), (2, 3))),
]  # fmt: skip
PASSES = ("forward", "backward", "jvp")
SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2}
NAMES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "c10::BFloat16"}
# Events that wait for a GPU: sizes that depend on data, and numbers read from tensors.
SYNCS = ("item", "_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "_unique2")


# --- counting ---


def _traffic(call):
    """Return what ``call()`` sends, as ``{(what, dtype): (calls, bytes)}``.

    A rank's own share of an all-to-all is not sent. ``c10d::send`` is the call and ``gloo:send`` its work, which alone
    knows the tensor. Events that wait for the device are listed likewise. ``kineto_results`` is private (torch 2.11 to
    2.13).
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
        elif name.startswith("c10d::") or name.removeprefix("aten::") in SYNCS:
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
            q, k, v, mesh=mesh, total_tokens=case.tokens if len(case.tokens) > 1 else case.tokens[0], key_mask=mask,
            mask=case.mask or equal_blocks(case), joint=tuple(text) if case.text else None,
            head_groups=case.head_groups,
        )  # fmt: skip
        return torch.cat(out, dim=1) if case.text else out

    return video, attend


def _passes(tensors, attend):
    """Return the traffic of a forward, a backward and a JVP of ``attend(*tensors)``."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    outs, found = [], {}
    found["forward"] = _traffic(lambda: outs.append(attend(*leaves)))
    found["backward"] = _traffic(lambda: outs[0].backward(torch.ones_like(outs[0])))
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in tensors]
        found["jvp"] = _traffic(lambda: attend(*duals))
    return found


def _mesh(case):
    return context_mesh(case.world, case.ulysses, case.kv_heads)


def _count(cases):
    return [_passes(*_local(case, _mesh(case))) for case in cases]


# --- the formula ---


def _expected(case, kind, keys=None, grads=None, previous=None):
    """Return the traffic of :func:`_traffic` by the formula.

    ``keys`` and ``grads`` are the numbers of hops on which this rank's ring place sends K/V and dK/dV; ``previous`` has
    those of the previous ring place. The default is R-1.
    """
    r, p = case.ring, case.ulysses
    groups = case.head_groups if p > 1 else 1  # without an exchange there is no communication to overlap
    local = sum(-(-total // case.world) for total in (*case.tokens, case.text))
    n, m = (case.batch * local * heads * case.head_dim for heads in (case.heads, case.kv_heads))
    keys, grads = (r - 1 if x is None else x for x in (keys, grads))
    tensors = 2 if kind == "jvp" else 1
    dtype, sums = NAMES[case.dtype], NAMES[torch.promote_types(case.dtype, torch.float32)]
    calls, sent = Counter(), Counter()
    if p > 1:
        calls["all_to_all", dtype] = 2 * groups
        sent["all_to_all", dtype] = tensors * 2 * (n + m) * (p - 1) // p * SIZES[dtype]
    for what, (k, g) in (("send", (keys, grads)), ("recv", previous or (keys, grads))):
        hops = groups * k, groups * g if kind == "backward" else 0
        for name, count in zip((dtype, sums), hops, strict=True):
            if count:
                calls[what, name] += count
                sent[what, name] += count * tensors * 2 * m // groups * SIZES[name]
    return {key: (count, sent[key]) for key, count in calls.items()}


def _differences(case, ranks, **hops):
    """Return (rank, pass, got, expected) for each difference. ``hops`` are per ring rank."""
    wrong = []
    for rank, found in enumerate(ranks):
        place = rank // case.ulysses
        own = {name: counts[place] for name, counts in hops.items()}
        previous = (hops["keys"][place - 1], hops["grads"][place - 1]) if hops else None
        for kind in PASSES:
            expected = _expected(case, kind, **own, previous=previous)
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


# Sends of each ring rank: K/V (forward, backward and JVP) and dK/dV (backward). A hop is made if K/V reach someone who
# looks at them on it or later; for dK/dV, if someone has added to them. Worked out on paper.
SPARSE = [
    # One block a rank: chunk c travels up to the last rank, rank 3's nowhere. Its gradients return from rank c+1 on.
    (Case(ring=4, tokens=(12,), block=3), (1, 2, 3, 0), (2, 2, 2, 3)),
    # Blocks 0-5 and 6-11, ranks of 4 tokens: all see all, but rank 0 does not see rank 2's.
    (Case(ring=3, tokens=(12,), block=6), (2, 2, 2), (1, 2, 2)),
    # Clean tokens on ranks 0 and 1, noisy ones on 2 and 3. Ranks 1 and 3 see rank 0's keys, nobody those of the others.
    (Case(ring=4, tokens=(12,), mask=teacher_forcing((3, 3))), (1, 1, 1, 0), (0, 1, 1, 1)),
    # 3 tokens on each of ranks 0 to 2, none on rank 3, which passes on what others look at.
    (Case(ring=4, tokens=(9,)), (2, 2, 2, 2), (2, 2, 2, 2)),
    (Case(ring=2, ulysses=2, tokens=(8,), block=4), (1, 0), (0, 1)),
    (Case(ring=2, ulysses=2, tokens=(2,), dtype=torch.float32), (0, 0), (0, 0)),
    (Case(ring=2, ulysses=2, tokens=(8,), block=4, head_groups=2), (1, 0), (0, 1)),
]


@slow
def test_hops_that_nobody_needs_are_not_made(pools):
    for world in (3, 4):
        cases = [entry for entry in SPARSE if entry[0].world == world]
        ranks = pools[world].run(_count, [case for case, *_ in cases])
        for i, (case, keys, grads) in enumerate(cases):
            assert not _differences(case, [rank[i] for rank in ranks], keys=keys, grads=grads)


def _count_quiet(case):
    """Check that one rank, and attention to text that every rank holds, send nothing."""
    (q, k, v), attend = _local(case, _mesh(case))
    mask = torch.tensor([[True, False] * 3]).expand(case.batch, -1)
    text = [x[:, :6] for x in (k, v)]
    alone = _passes((q, k, v), attend) if case.world == 1 else {}
    return alone, _passes((q, *text), partial(cross_attention, key_mask=mask))


def test_one_rank_and_cross_attention_send_nothing(pools):
    for world, masked in ((1, False), (1, True), (2, True)):
        case = Case(ring=world, tokens=(12,), dtype=torch.float32, masked=masked)
        for alone, cross in pools[world].run(_count_quiet, case):
            assert len(alone) == (3 if world == 1 else 0) and len(cross) == 3
            assert not any(alone.values()) and not any(cross.values())


def test_joint_text_adds_one_gather(pools):
    """The text's output is gathered and its gradient reduce-scattered. The text's share of tokens counts in n."""
    case = Case(ring=2, ulysses=2, tokens=(17,), text=5, dtype=torch.float32)
    ranks = [rank[0] for rank in pools[4].run(_count, [case])]
    for found in ranks:
        for kind, name in zip(PASSES, ("_allgather_base_", "_reduce_scatter_base_", "_allgather_base_"), strict=True):
            assert found[kind].pop((f"c10d::{name}", "")) == (1, 0)
    assert not _differences(case, ranks)


# --- the count can fail ---


def _full_turn(tensors, place, own_last=False, visited=ring._visited):
    """Run a ring that returns the chunks to their ranks at the end of a forward, which takes one more hop."""
    yield from visited(tensors, place, own_last)
    if own_last:
        return
    last = torch.stack(tensors)
    for work in place.start_hop(last, torch.empty_like(last), 1):
        work.wait()


def _count_changed(case, change):
    with pytest.MonkeyPatch.context() as patch:
        if change == "all travel":
            patch.setattr(Layout, "keys_travel", lambda *_: True)
        else:
            patch.setattr(ring, "_visited", _full_turn)
        return _count([case])[0]


def test_the_count_sees_a_different_ring(pools):
    case = Case(ring=3, tokens=(12,), dtype=torch.float32)
    wrong = _differences(case, pools[3].run(_count_changed, case, "full turn"))
    assert {(rank, kind) for rank, kind, *_ in wrong} == {(r, k) for r in range(3) for k in ("forward", "jvp")}
    case, keys, grads = SPARSE[0]
    assert _differences(case, pools[4].run(_count_changed, case, "all travel"), keys=keys, grads=grads)
