"""Sparse attention over ranks against dense attention written out in float64: output, gradients, tangent."""

from dataclasses import replace

import pytest

from tests.oracles.sparse_attention import SparseCase, all_on_ranks, errors, oracle, random_case

FACTORS = [
    (1, 1), (1, 2), (2, 1), (3, 1),
    *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 2), (4, 1))),
    pytest.param(3, 2, marks=pytest.mark.long),
]  # fmt: skip
CASES = [
    SparseCase(grid=(5, 6, 7), sparsity=0.6),
    SparseCase(grid=(9, 6, 7), sparsity=0.8, is_ordered=True, head_groups=2, size=6.0),
    SparseCase(grid=(9, 6, 5), sparsity=0.7, is_tied=True),
    SparseCase(grid=(6, 5, 6), dense=(70, 5), sparsity=0.8, is_ordered=True, size=2.0),
    SparseCase(grid=(4, 5, 3), dense=(1, 3), tile=(2, 2, 2), sparsity=0.7, has_gate=False),
    SparseCase(grid=(1, 1, 2), sparsity=0.9),
    SparseCase(grid=(1, 5, 6), tile=(1, 1, 1), sparsity=0.9, size=32.0, is_ordered=True),
]


def _check(pools, cases):
    ranks = pools[cases[0].world].run(all_on_ranks, cases)
    for i, case in enumerate(cases):
        truth = oracle(case)
        for rank in ranks:
            *ours, recomputed = rank[i]
            worst = errors(ours, truth, case)
            assert max(worst.values()) <= 1e-12, (case, worst)
            assert recomputed == 0, case


@pytest.mark.parametrize(("ring", "ulysses"), FACTORS)
def test_values_gradients_and_tangents(pools, ring, ulysses):
    """Uneven counts, dense segments, equal scores, fewer tokens than ranks, large logits, both orders."""
    _check(pools, [replace(case, ring=ring, ulysses=ulysses) for case in CASES])


@pytest.mark.long
def test_two_hundred_random_cases(pools):
    cases = [random_case(seed) for seed in range(200)]
    for world in sorted({case.world for case in cases}):
        _check(pools, [case for case in cases if case.world == world])


def test_a_comparison_can_fail():
    case = CASES[0]
    worst = errors(oracle(replace(case, sparsity=0.3)), oracle(case), case)
    assert min(worst[name] for name in ("out", "dq", "dk", "dv", "tangent")) > 1e-3
