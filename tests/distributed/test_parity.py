"""DMD2 on Wan: the trainer on every mesh equals plain diffusers networks in one process."""

from dataclasses import replace

import pytest

from distill.config.schema import EmaSettings
from distill.data.order import Order
from tests.oracles.difference import check_run, compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import trace_on_ranks
from tests.tiers import long_case, slow, slow_case

# The power schedule counts updates: by steps of both roles it would keep another share.
RUN = {"steps": 3, "ema": EmaSettings(enabled=True, decay=None, gamma=1.0)}


def _slow(**changes):
    return slow_case(changes)


def _long(**changes):
    return long_case(changes)


@pytest.fixture(scope="module")
def oracle(checkpoints):
    return oracle_trace(Setup(**RUN), checkpoints)


@pytest.mark.parametrize(
    "changes",
    [
        _slow(dp_shard=2),
        {"cp": 3, "micro_batch_size": 4},  # a ring: 3 does not divide the 4 heads
        _slow(cp=2, micro_batch_size=2),
        _long(dp_shard=2, cp=2),
        _slow(cp=4, micro_batch_size=4, activation_checkpointing=True),
        _long(),
        _long(cp=6, micro_batch_size=4),
        _long(cp=8, micro_batch_size=4),
        _long(dp_shard=2, cp=2, activation_checkpointing=True),
        _slow(dp_replicate=2, cp=2, micro_batch_size=2),
        _long(dp_replicate=2, dp_shard=2),
        # Two ranks share a copy of a network, also where a sample's tokens are on ranks of both copies.
        _slow(dp_shard=2, cp=2, micro_batch_size=2, changes={"teacher": {"shard_ranks": 2}}),
        _long(cp=4, micro_batch_size=4, changes={"all": {"shard_ranks": 2}}),
    ],
    ids=str,
)
def test_dmd2_in_fp32(pools, checkpoints, oracle, changes):
    """Losses, gradients, clip norms, weights and the average: two updates of the student, one of the fake score."""
    setup = Setup(**RUN | changes)
    assert check_run(pools, setup, checkpoints, oracle).roles == ["student", "fake", "student"]


SIZES = {"more_shapes": ((4, 2, 8, 12), (4, 1, 12, 6)), "steps": 5}
"""Clips of 48, 48 and 18 tokens; the last with a token more than two ranks share evenly at cp=4."""


@pytest.fixture(scope="module")
def oracle_of_sizes(checkpoints):
    return oracle_trace(Setup(**SIZES), checkpoints)


@slow
@pytest.mark.parametrize(
    "changes", [{}, {"cp": 2, "micro_batch_size": 2}, {"dp_shard": 2, "cp": 2}, _long(dp_shard=2)], ids=str
)
def test_clips_of_three_sizes(pools, checkpoints, oracle_of_sizes, changes):
    """Each step has one size, accumulation included, and the plain networks see the same."""
    setup = Setup(**SIZES | changes)
    order = Order(seed=make_config(setup, checkpoints).seed, buckets=(11, 11, 10), batch_size=setup.batch_size)
    assert {order.place(step * setup.batch_size)[0] for step in range(5)} == {0, 1, 2}
    check_run(pools, setup, checkpoints, oracle_of_sizes)


@slow
def test_dmd2_in_fp64(pools, checkpoints):
    """The bounds are those of Wan's norms, which diffusers computes in fp32."""
    setup = Setup(cp=3, precision="fp64", steps=1, micro_batch_size=2)
    difference = compare(trace_on_ranks(setup, checkpoints, pools[setup.world_size]), oracle_trace(setup, checkpoints))
    assert difference.loss < 1e-12 and difference.norm < 1e-8 and difference.gradient < 1e-6, difference


def test_the_comparison_can_fail(oracle):
    """The comparison rejects gradients divided by cp (which Adam hides in the weights), a wrong average, and NaN."""
    gradients = list(oracle.gradients)
    for factor in (0.5, float("nan")):
        gradients[2] = {name: factor * g for name, g in oracle.gradients[2].items()}
        assert not compare(replace(oracle, gradients=gradients), oracle).gradient <= 0.4
    for name in ("losses", "norms"):
        values = [float("nan"), *getattr(oracle, name)[1:]]
        assert not compare(replace(oracle, **{name: values}), oracle).largest <= 1e9
    weights = oracle.weights | {"average of student": oracle.weights["student"]}
    assert compare(replace(oracle, weights=weights), oracle).weight > 1e-4
