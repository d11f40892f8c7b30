"""Context-parallel attention against attention written out in float64 in one process: output, gradients, tangent."""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from fsdp_cp.attention import context_parallel_attention, cross_attention, cross_way
from fsdp_cp.attention.mask import BlockMask, block_causal, teacher_forcing
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.sequence import gather_tokens, split_tokens
from tests.oracles.attention import Case, all_on_ranks, context_mesh, errors, on_ranks, oracle, plain_attention
from tests.tiers import long_case, slow, slow_case

FACTORS = [
    (1, 1), (1, 2), (2, 1), (3, 1), slow_case(2, 2),
    *(long_case(*sizes) for sizes in ((1, 4), (2, 3), (6, 1), (4, 2))),
]  # fmt: skip


def _check(pools, cases, bound=1e-12):
    ranks = pools[cases[0].world].run(all_on_ranks, cases)
    for i, case in enumerate(cases):
        truth = oracle(case)
        for rank in ranks:
            worst = errors(rank[i], truth, case)
            assert max(worst.values()) <= bound, (case, worst)


@pytest.mark.parametrize(("ring", "ulysses"), FACTORS)
def test_values_gradients_and_tangents(pools, ring, ulysses):
    """Even and uneven token counts, fewer tokens than ranks, grouped queries, masks, blocks, text and segments."""
    u, world = ulysses, ring * ulysses
    counts = sorted({4 * world, 17, max(world - 1, 1), 1})
    plain = [
        Case(ring=ring, ulysses=u, heads=heads, kv_heads=heads, tokens=(n,)) for heads in (u, 3 * u) for n in counts
    ]
    common = {"ring": ring, "ulysses": u, "heads": 4 * u, "kv_heads": 2 * u}
    variants = [
        {"tokens": (17,), "scale": 0.3, "head_groups": 2},
        {"tokens": (19,), "masked": True},
        {"tokens": (2,), "masked": True},
        {"tokens": (23,), "block": 4},
        {"tokens": (23,), "block": 4, "head_groups": 2, "masked": True},
        {"tokens": (4 * world,), "block": world},
        {"tokens": (5,), "block": 7},
        {"tokens": (23,), "mask": block_causal((5, 4, 9, 2, 3), window=1, sink=1)},
        {"tokens": (22,), "mask": teacher_forcing((4, 3, 3, 1)), "masked": True},
        {"tokens": (22,), "mask": teacher_forcing((1, 4, 2, 4), window=1, sink=1), "head_groups": 2},
        {"tokens": (2,), "mask": teacher_forcing((1,))},
        {"tokens": (3, 9), "mask": BlockMask((2, 1, 9), (((0, 3),), (), ((1, 2), (4, 8))))},
        {"tokens": (9,), "text": 3, "mask": BlockMask((3, 9), (((0, 12),), ((0, 2), (5, 12))))},
        {"tokens": (17,), "text": 3, "masked": True, "head_groups": 2},
        {"tokens": (2 * world,), "text": world},
        {"tokens": (3, 18, 4), "masked": True},
        {"tokens": (17,), "backend": "reference"},
    ]
    if world <= 2:  # several tiles of the chunked reference, in both directions
        variants += [{"tokens": (600 * ring + 1,), "batch": 1, "masked": True, "backend": "reference"}]
    _check(pools, plain + [Case(**common, **variant) for variant in variants])


@st.composite
def block_masks(draw, tokens):
    """Draw a mask of any runs and key ranges, some of them empty."""
    cuts = draw(st.lists(st.integers(1, tokens - 1), unique=True, max_size=4)) if tokens > 1 else []
    queries = tuple(b - a for a, b in pairwise([0, *sorted(cuts), tokens]))
    bounds = st.lists(st.integers(0, tokens), unique=True, max_size=7).map(sorted)
    keys = (draw(bounds) for _ in queries)
    return BlockMask(queries, tuple(tuple(zip(x[::2], x[1::2], strict=False)) for x in keys))


@st.composite
def _cases(draw):
    world = draw(st.sampled_from((2, 3, 4)))
    ulysses = draw(st.sampled_from([u for u in range(1, world + 1) if world % u == 0]))
    head_groups = draw(st.integers(1, 2))
    kv_heads = ulysses * head_groups * draw(st.integers(1, 2))
    kind = draw(st.sampled_from(("plain", "block", "text", "segments")))
    segments = draw(st.lists(st.integers(1, 13), min_size=2, max_size=3)) if kind == "segments" else None
    tokens = tuple(segments) if segments else (draw(st.integers(1, 40)),)
    text = draw(st.integers(1, 9)) if kind == "text" else 0
    mask = draw(block_masks(text + sum(tokens))) if kind != "block" and draw(st.booleans()) else None
    return Case(
        ring=world // ulysses,
        ulysses=ulysses,
        tokens=tokens,
        text=text,
        mask=mask,
        block=draw(st.integers(1, 20)) if kind == "block" else None,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 9)),
        batch=draw(st.integers(1, 3)),
        scale=draw(st.sampled_from((None, 0.7))),
        masked=draw(st.booleans()),
        head_groups=head_groups,
    )


@slow
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(_cases(), min_size=1, max_size=1))
def test_any_shape(pools, cases):
    _check(pools, cases)


def test_the_comparison_sees_a_missing_hop(pools):
    """The comparison rejects a gradient without one rank's part, and a NaN."""
    case = Case(ring=3, tokens=(12,))
    ours, truth = pools[3].run(on_ranks, case)[0], oracle(case)
    for index in range(len(ours)):
        spoilt = [x.clone() for x in ours]
        spoilt[index][:, :4] *= 0.99
        assert max(errors(spoilt, truth, case).values()) > 1e-4
        spoilt[index][0, 0, 0, 0] = float("nan")
        assert max(errors(spoilt, truth, case).values()) == float("inf")


def _sums(dtype):
    """Return dQ of a ring of 3 whose chunks add 1024, 3 and -1024 to it. A sum in bf16 loses the 3."""
    mesh = context_mesh(3, 1, 1)
    k, v = torch.zeros(2, 1, 16, 1, 8, dtype=dtype)
    k[0, [0, 6, 12], 0, 0] = torch.tensor([1024, 3, -1024], dtype=dtype)
    v[0, ::2, 0, 0], v[0, 1::2, 0, 0] = 1, -1
    q = torch.zeros(1, 16, 1, 8, dtype=dtype, requires_grad=True)  # every probability is 1/16
    out = context_parallel_attention(*(split_tokens(x, mesh) for x in (q, k, v)), mesh=mesh, total_tokens=16, scale=16)
    out[..., 0].sum().backward()
    torch.distributed.all_reduce(q.grad)
    return q.grad[0, :, 0, 0].tolist()


def test_a_ring_sums_in_fp32(pools):
    for found in pools[3].run(_sums, torch.bfloat16):
        assert found == [3.0] * 16


def _cross(masked, is_split):
    """Return the largest error of output and gradients for 7 keys that every rank holds, or that are split."""
    mesh = context_mesh(3, 1, 1)
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, n, heads, 6) for n, heads in ((13, 4), (7, 2), (7, 2), (13, 4))]
    *inputs, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    mask = None
    if masked:
        mask = torch.rand(2, 7, generator=generator) > 0.3
        mask[0] = False
    leaves, plain = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    keys = [split_tokens(x, mesh) for x in leaves[1:]] if is_split else leaves[1:]
    where = {"mesh": mesh, "total_keys": 7} if is_split else {}
    out = gather_tokens(cross_attention(split_tokens(leaves[0], mesh), *keys, key_mask=mask, **where), mesh, 13)
    truth = plain_attention(*plain, Case(heads=4, kv_heads=2, head_dim=6), mask)
    for result in (out, truth):
        (result * weight).sum().backward()
    for x in leaves:
        torch.distributed.all_reduce(x.grad)
    pairs = [(out, truth), *((a.grad, b.grad) for a, b in zip(leaves, plain, strict=True))]
    return max(relative_error(a, b) for a, b in pairs)


@pytest.mark.parametrize("is_split", [False, True])
def test_cross_attention(pools, is_split):
    """The gradients of keys and values are partial sums over the ranks' queries."""
    for masked in (False, True):
        assert max(pools[3].run(_cross, masked, is_split)) < 1e-12


def _split_cross(ring, ulysses, counts, head_groups=1, masked=False, dtype=torch.float64):
    """Return the ways that were taken, and the largest error of output, gradients and tangent."""
    mesh, ways, worst = context_mesh(ring * ulysses, ulysses, 4 * ulysses), set(), 0.0
    heads, shared = 4 * ulysses, 2 * ulysses
    for queries, keys in counts:
        generator = torch.Generator().manual_seed(100 * queries + keys)
        shapes = [(2, n, h, 6) for n, h in ((queries, heads), (keys, shared), (keys, shared), (queries, heads))]
        draws = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(2)]
        (*primals, weight), (*tangents, _) = draws
        mask = torch.rand(2, keys, generator=generator) > 0.3 if masked else None
        sizes = (queries * heads, keys * shared)
        ways.add(cross_way(*sizes, mesh.context, head_dim=6, masked=masked))

        def ours(qkv, total_tokens=queries, total_keys=keys, mask=mask):
            own = (split_tokens(x.to(dtype), mesh) for x in qkv)
            out = cross_attention(
                *own, mesh=mesh, total_tokens=total_tokens, total_keys=total_keys, head_groups=head_groups,
                key_mask=mask,
            )  # fmt: skip
            return gather_tokens(out, mesh, total_tokens).double()

        def plain(qkv, mask=mask):
            return plain_attention(*qkv, Case(heads=heads, kv_heads=shared, head_dim=6), mask)

        results = []
        for attend in (ours, plain):
            leaves = [x.clone().requires_grad_() for x in primals]
            out = attend(leaves)
            (out * weight).sum().backward()
            if attend is ours:
                for x in leaves:
                    torch.distributed.all_reduce(x.grad)
            with torch.no_grad(), forward_ad.dual_level():
                dual = attend([forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)])
                value, tangent = forward_ad.unpack_dual(dual)
            results.append([out.detach(), value, tangent, *(x.grad for x in leaves)])
        for a, b in zip(*results, strict=True):
            worst = max(worst, ((a - b).norm() / b.norm().clamp_min(1e-300)).item())
    return ways, worst


@pytest.mark.parametrize(("ring", "ulysses"), FACTORS)
def test_attention_between_two_split_sequences(pools, ring, ulysses):
    """Any number of tokens on both sides, also fewer than ranks, by the three ways; also in bf16."""
    world = ring * ulysses
    counts = [(13, 7), (5, 60), (60, 5), (17, 50), (1, 9 * world), (9 * world, 2), (3, 3), (1, 2)]
    found = pools[world].run(_split_cross, ring, ulysses, counts)
    assert max(worst for _, worst in found) < 1e-12
    if world > 1:
        assert found[0][0] >= {"keys", "queries"}
    masked = pools[world].run(_split_cross, ring, ulysses, [(5, 60), (60, 5)], 2, True)
    assert max(worst for _, worst in masked) < 1e-12
    rounded = pools[world].run(_split_cross, ring, ulysses, [(5, 60)], 1, False, torch.bfloat16)
    assert max(worst for _, worst in rounded) < 0.03
