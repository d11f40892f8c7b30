"""Keyed random streams: a draw belongs to (seed, purpose, step, position), never to the rank that makes it."""

import pytest
import torch
from scipy import stats

from fsdp_cp.rng import StepRandom, permutation
from tests.unit.method_roles import is_normal


def random(positions, seed=1, step=2, **kwargs):
    return StepRandom(seed=seed, step=step, positions=positions, **kwargs)


@pytest.mark.parametrize("groups", [[[0], [1], [2], [3]], [[2, 0], [3, 1]]])
def test_draws_do_not_depend_on_the_grouping_into_micro_batches(groups):
    whole = random(range(4))
    normal, uniform = whole.normal("noise", (2, 3)), whole.uniform("time")
    for group in groups:
        part = random(group)
        assert torch.equal(part.normal("noise", (2, 3)), normal[group])
        assert torch.equal(part.uniform("time"), uniform[group])


def test_draws_do_not_depend_on_what_was_drawn_before_or_on_the_global_generator():
    first = random([5]).normal("noise", (4,))
    torch.manual_seed(99)
    again = random([5])
    again.uniform("something else")
    again.normal("noise", (7,))
    assert torch.equal(again.normal("noise", (4,)), first)
    before = torch.get_rng_state()
    again.normal("noise", (4,))
    again.shared_integer("length", 0, 9)
    assert torch.equal(torch.get_rng_state(), before), "a draw must not move torch's own generator"


def test_draws_differ_with_each_part_of_the_key():
    base = random([3]).normal("noise", (64,))
    others = {
        "purpose": random([3]).normal("noise_1", (64,)),
        "step": random([3], step=3).normal("noise", (64,)),
        "seed": random([3], seed=2).normal("noise", (64,)),
        "position": random([4]).normal("noise", (64,)),
        "step and position swapped": random([2], step=3).normal("noise", (64,)),
    }
    for what, other in others.items():
        assert not torch.equal(base, other), what
        assert abs(torch.corrcoef(torch.cat([base, other]))[0, 1]) < 0.45, what
    digits_moved = random([23], step=1).normal("noise", (8,)), random([3], step=12).normal("noise", (8,))
    assert not torch.equal(*digits_moved), "the parts of the key must not run together"
    # Samples of one step differ from each other, data-parallel ranks included.
    assert len({tuple(x) for x in random(range(256)).normal("noise", (2,)).tolist()}) == 256


def test_normal_is_standard_normal_within_and_across_samples():
    x = random(range(400)).normal("noise", (3, 20))
    assert x.shape == (400, 3, 20) and x.dtype == torch.float32
    assert is_normal(x)
    assert is_normal(x[:, 0, 0])
    across_steps = torch.cat([random([0], step=s).normal("noise", (1,)).flatten() for s in range(400)])
    assert is_normal(across_steps)


def test_uniform_is_uniform_and_below_one():
    u = random(range(2000)).uniform("time", torch.float64)
    assert u.shape == (2000,) and 0 <= u.min() and u.max() < 1
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3


def test_shared_integer_is_one_for_the_step_and_covers_its_range():
    draws = [random(range(8), step=s).shared_integer("length", 1, 4) for s in range(400)]
    others = [random([17], step=s).shared_integer("length", 1, 4) for s in range(400)]
    assert draws == others, "ranks with other samples would run another number of forwards, and deadlock"
    counts = [draws.count(k) for k in (1, 2, 3, 4)]
    assert sum(counts) == 400 and stats.chisquare(counts).pvalue > 1e-3
    assert draws != [random([0], step=s).shared_integer("other", 1, 4) for s in range(400)]
    assert draws != [random([0], step=s, seed=2).shared_integer("length", 1, 4) for s in range(400)]
    assert random([0]).shared_integer("length", 3, 3) == 3


def test_permutation_depends_on_its_arguments_alone():
    order = permutation(1, "order", 0, 50)
    assert sorted(order) == list(range(50)) and order != list(range(50))
    torch.manual_seed(5)
    assert permutation(1, "order", 0, 50) == order
    for other in (permutation(2, "order", 0, 50), permutation(1, "x", 0, 50), permutation(1, "order", 1, 50)):
        assert sorted(other) == list(range(50)) and other != order
