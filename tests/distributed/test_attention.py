"""Context-parallel attention against attention written out in float64 in one process: output, gradients, tangent."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.oracles.attention import Case, all_on_ranks, errors, on_ranks, oracle

FACTORS = [(w // u, u) for w in (1, 2, 3, 4, 6, 8) for u in range(1, w + 1) if w % u == 0]
HEADS = (3, 4, 5, 6, 12)


def _check(pools, cases, bound=1e-12):
    ranks = pools[cases[0].world].run(all_on_ranks, cases)
    for i, case in enumerate(cases):
        truth = oracle(case)
        for rank in ranks:
            worst = errors(rank[i], truth, case)
            assert max(worst.values()) <= bound, (case, worst)


def _splitting(u):
    heads = [h for h in HEADS if h % u == 0]
    return heads or [u]  # none of them for ulysses = 8


@pytest.mark.parametrize(("ring", "ulysses"), FACTORS)
def test_heads_and_token_counts(pools, ring, ulysses):
    """Even and uneven counts, fewer tokens than ranks, a single one."""
    world = ring * ulysses
    counts = sorted({4 * world, 4 * world + 1, 17, max(world - 1, 1), 1})
    grid = itertools.product(_splitting(ulysses), counts)
    _check(pools, [Case(ring=ring, ulysses=ulysses, heads=h, kv_heads=h, tokens=(n,)) for h, n in grid])


@pytest.mark.parametrize(("ring", "ulysses"), FACTORS)
def test_grouped_queries_masks_blocks_and_text(pools, ring, ulysses):
    u, world = ulysses, ring * ulysses
    common = {"ring": ring, "ulysses": u, "heads": 4 * u, "kv_heads": 2 * u}
    variants = [
        {"tokens": (17,)},
        {"tokens": (17,), "scale": 0.3, "head_groups": 2},
        {"tokens": (19,), "masked": True},
        {"tokens": (2,), "masked": True},
        {"tokens": (23,), "block": 4},
        {"tokens": (23,), "block": 4, "head_groups": 2, "masked": True},
        {"tokens": (4 * world,), "block": world},
        {"tokens": (5,), "block": 7},
        {"tokens": (17,), "text": 5},
        {"tokens": (17,), "text": 3, "masked": True, "head_groups": 2},
        {"tokens": (2 * world,), "text": world},
        {"tokens": (5, 18)},
        {"tokens": (3, 18, 4), "masked": True},
    ]
    _check(pools, [Case(**common, **variant) for variant in variants])


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (2, 2)])
def test_reference_kernel(pools, ring, ulysses):
    """The chunked reference, over several of its tiles in both directions."""
    common = {"ring": ring, "ulysses": ulysses, "heads": 2 * ulysses, "kv_heads": ulysses, "backend": "reference"}
    cases = [Case(**common, tokens=(17,)), Case(**common, tokens=(600 * ring + 1,), batch=1, masked=True)]
    _check(pools, cases)


@st.composite
def _cases(draw):
    world = draw(st.sampled_from((2, 3, 4)))
    ulysses = draw(st.sampled_from([u for u in range(1, world + 1) if world % u == 0]))
    head_groups = draw(st.integers(1, 2))
    kv_heads = ulysses * head_groups * draw(st.integers(1, 2))
    kind = draw(st.sampled_from(("plain", "block", "text", "segments")))
    segments = draw(st.lists(st.integers(1, 13), min_size=2, max_size=3)) if kind == "segments" else None
    return Case(
        ring=world // ulysses,
        ulysses=ulysses,
        tokens=tuple(segments) if segments else (draw(st.integers(1, 40)),),
        text=draw(st.integers(1, 9)) if kind == "text" else 0,
        block=draw(st.integers(1, 20)) if kind == "block" else None,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 9)),
        batch=draw(st.integers(1, 3)),
        scale=draw(st.sampled_from((None, 0.7))),
        masked=draw(st.booleans()),
        head_groups=head_groups,
    )


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(_cases(), min_size=1, max_size=1))
def test_any_shape(pools, cases):
    _check(pools, cases)


def test_the_comparison_sees_a_missing_hop(pools):
    """A gradient without one rank's part does not pass, nor does a NaN."""
    case = Case(ring=3, tokens=(12,))
    ours, truth = pools[3].run(on_ranks, case)[0], oracle(case)
    for index in range(len(ours)):
        spoilt = [x.clone() for x in ours]
        spoilt[index][:, :4] *= 0.99
        assert max(errors(spoilt, truth, case).values()) > 1e-4
        spoilt[index][0, 0, 0, 0] = float("nan")
        assert max(errors(spoilt, truth, case).values()) == float("inf")
