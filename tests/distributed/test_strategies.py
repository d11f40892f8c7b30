"""The real trainer (DMD2: teacher, student, fake) under every strategy and switch equals one plain process, in fp32.

The tests compare losses, norms and all gradients of three steps, and the weights after them.
"""

from functools import lru_cache

import pytest

from fsdp_cp.sharding.state import gathered_units
from tests.oracles.difference import check_trace
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import Setup
from tests.oracles.sharded_run import make_trainer
from tests.tiers import long, long_case, slow

STEPS = 3
LAYERS = 3  # a gather two units ahead then differs from one ahead
# strategy, mesh, micro-batches, activation checkpointing, offloaded roles, activation offload
ROWS = [
    ("optim", "cp", 1, "full", "all", False),
    ("no_shard", "dp_cp", 2, "full", "teacher", True),
    ("optim_grads", "dp", 4, "none", "teacher", False),
    ("hsdp", "replicas", 2, "full", "teacher", False),
]
LONG = [
    ("optim_grads_params", "dp_cp", 1, "full", "none", True),
    ("optim", "replicas", 2, "selective", "none", False),
    ("optim_grads", "replicas", 2, "full", "all", True),
    ("optim_grads_params", "dp", 4, "selective", "all", False),
    ("hsdp", "dp_cp", 4, "full", "all", True),
]
SIZES = {
    "dp": {"dp_shard": 2},
    "cp": {"cp": 2},
    "dp_cp": {"dp_shard": 2, "cp": 2},
    "replicas": {"dp_replicate": 2, "dp_shard": 2},
}
MIXED = {
    "teacher": {"strategy": "optim_grads_params"},
    "student": {"strategy": "optim_grads"},
    "fake": {"strategy": "optim"},
}
SWITCHES = {
    "mixed strategies": ("dp_cp", 2, MIXED),
    "mixed offload": ("dp", 1, {"student": {"strategy": "optim", "offload": "cpu"}, "fake": {"strategy": "no_shard"}}),
    "kept, one stream": ("cp", 2, {"all": {"keep_gathered": True, "gather_stream": "compute"}}),
    "prefetch": ("dp", 1, {"all": {"forward_prefetch": 2, "backward_prefetch": 2, "activation_checkpointing": "full"}}),
    "one buffer": ("dp", 2, {"all": {"gradient_buffers": 1}}),
    "three buffers": (
        "dp",
        1,
        {"all": {"strategy": "optim_grads", "gradient_buffers": 3, "separate_reduce_group": True}},
    ),
    "two roles over all ranks": ("replicas", 1, {"teacher": {"replicate": False}, "fake": {"replicate": False}}),
}

LONG_SWITCHES = tuple(name for name in SWITCHES if name not in ("mixed strategies", "three buffers"))
pytestmark = slow


@pytest.fixture(scope="module")
def oracles(checkpoints):
    """Return a function from the batch size to the trace of plain networks."""
    return lru_cache(lambda size: oracle_trace(Setup(steps=STEPS, batch_size=size), checkpoints))


def _setup(mesh, micro_batches, changes):
    sizes = SIZES[mesh]
    replicate, shard, cp = (sizes.get(name, 1) for name in ("dp_replicate", "dp_shard", "cp"))
    dp = replicate * shard
    batch = 4 if 4 >= dp * micro_batches else 8
    assert batch % (dp * micro_batches) == 0
    return Setup(
        dp_replicate=replicate,
        dp_shard=shard,
        cp=cp,
        steps=STEPS,
        batch_size=batch,
        micro_batch_size=batch // (dp * micro_batches),
        changes=changes,
    )


def _row(strategy, mesh, micro_batches, checkpointing, offload, activation_offload):
    settings = {"activation_checkpointing": checkpointing, "activation_offload": activation_offload}
    settings["strategy"] = "optim_grads_params" if strategy == "hsdp" else strategy
    changes = {"all": settings | {"offload": "cpu" if offload == "all" else "none"}}
    if offload == "teacher":
        changes["teacher"] = {"offload": "cpu"}
    setup = _setup(mesh, micro_batches, changes)
    if strategy == "hsdp" and mesh == "dp_cp":
        setup = Setup(**vars(setup) | {"dp_replicate": 2, "dp_shard": 1})
    return setup


def _trace(setup, folder):
    trainer = make_trainer(setup, folder)
    trace = trainer.record()
    assert not any(gathered_units(role.network) for role in trainer.roles.values()), "gathered between steps"
    return trace


def _check(setup, pools, checkpoints, oracles):
    traces = pools[setup.world_size].run(_trace, setup, checkpoints)
    assert all(t.losses == traces[0].losses and t.norms == traces[0].norms for t in traces), "ranks disagree"
    assert traces[0].roles == ["student", "fake", "student"]
    check_trace(traces[0], oracles(setup.batch_size))


@pytest.mark.parametrize(
    "row",
    [*ROWS, *(long_case(row) for row in LONG)],
    ids=lambda row: "-".join(map(str, row)),
)
def test_parity(pools, checkpoints, oracles, row):
    _check(_row(*row), pools, checkpoints, oracles)


@pytest.mark.parametrize("name", [pytest.param(n, marks=long if n in LONG_SWITCHES else ()) for n in SWITCHES])
def test_parity_of_switches(pools, checkpoints, oracles, name):
    _check(_setup(*SWITCHES[name]), pools, checkpoints, oracles)
