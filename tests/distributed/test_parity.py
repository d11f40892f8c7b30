"""The trainer on every mesh equals plain diffusers networks in one process (DESIGN: the gradient convention)."""

import pytest

from tests.oracles.difference import compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import MESHES, Setup, Trace
from tests.oracles.sharded_run import trace_on_ranks

slow, long = pytest.mark.slow, pytest.mark.long


@pytest.fixture(scope="module")
def oracle(checkpoints):
    return oracle_trace(Setup(), checkpoints)


@pytest.mark.parametrize(
    ("dp_shard", "cp", "checkpointing"),
    [
        *((*sizes, False) if sizes == (2, 2) else pytest.param(*sizes, False, marks=slow) for sizes in MESHES),
        *(pytest.param(*sizes, True, marks=slow if sizes in ((2, 2), (1, 4)) else long) for sizes in MESHES),
    ],
)
def test_dmd2_in_fp32(pools, checkpoints, oracle, dp_shard, cp, checkpointing):
    setup = Setup(dp_shard=dp_shard, cp=cp, activation_checkpointing=checkpointing)
    trace = trace_on_ranks(setup, checkpoints, pools[setup.world_size])
    assert trace.roles == ["student", "fake"] * 3
    difference = compare(trace, oracle)
    assert difference.largest < 1e-5, difference


@pytest.mark.parametrize(
    ("dp_shard", "cp"), [pytest.param(*sizes, marks=slow if sizes in ((2, 2), (1, 4)) else long) for sizes in MESHES]
)
def test_dmd2_in_fp64(pools, checkpoints, dp_shard, cp):
    """As far as Wan's norms allow, which diffusers computes in fp32."""
    setup = Setup(dp_shard=dp_shard, cp=cp, precision="fp64", steps=1)
    difference = compare(trace_on_ranks(setup, checkpoints, pools[setup.world_size]), oracle_trace(setup, checkpoints))
    assert difference.loss < 1e-12 and difference.norm < 1e-8 and difference.gradient < 1e-6, difference


@pytest.mark.parametrize("sizes", [{"dp_replicate": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard": 2}])
def test_replicas(pools, checkpoints, oracle, sizes):
    assert compare(trace_on_ranks(Setup(**sizes), checkpoints, pools[4]), oracle).largest < 1e-5


@pytest.mark.parametrize(
    ("sizes", "roles"),
    [({"dp_shard": 2, "cp": 2}, "teacher"), ({"cp": 4}, "all"), pytest.param({"dp_shard": 4}, "student", marks=slow)],
    ids=str,
)
def test_copies_of_one_network_alone(pools, checkpoints, oracle, sizes, roles):
    """Two ranks share a copy of it, as those of a node; also where a sample's tokens are on ranks of both copies."""
    setup = Setup(**sizes, changes={roles: {"shard_ranks": 2}})
    assert compare(trace_on_ranks(setup, checkpoints, pools[4]), oracle).largest < 1e-5


@pytest.mark.parametrize("micro_batch_size", [2, *(pytest.param(n, marks=slow) for n in (1, 4))])
def test_accumulation(pools, checkpoints, oracle, micro_batch_size):
    """1 x 4 micro-batches equal 4 x 1."""
    setup = Setup(cp=2, micro_batch_size=micro_batch_size)
    assert compare(trace_on_ranks(setup, checkpoints, pools[setup.world_size]), oracle).largest < 1e-5


def test_the_comparison_sees_a_wrong_scale(checkpoints, oracle):
    """Gradients divided by cp (which Adam would hide in the weights) do not pass."""
    trace = oracle_trace(Setup(), checkpoints)
    trace.gradients[3] = {name: g / 2 for name, g in trace.gradients[3].items()}
    assert compare(trace, oracle).gradient > 0.4


@pytest.mark.parametrize("what", ["losses", "norms", "gradients"])
def test_the_comparison_sees_nan(checkpoints, oracle, what):
    trace = oracle_trace(Setup(steps=2), checkpoints)
    two = Trace(oracle.roles[:2], oracle.losses[:2], oracle.norms[:2], oracle.gradients[:2], trace.weights)
    if what == "gradients":
        trace.gradients[0] = {name: g * float("nan") for name, g in trace.gradients[0].items()}
    else:
        getattr(trace, what)[0] = float("nan")
    assert not compare(trace, two).largest <= 1e9
