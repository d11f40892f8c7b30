"""Adapters on one shared, sharded base equal peft's own on three plain diffusers networks in one process."""

import pytest

from models.lora.settings import LoraSettings
from tests.oracles.difference import compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import MESHES, Setup
from tests.oracles.sharded_run import trace_on_ranks

LORA = {"student": LoraSettings(rank=4, alpha=2.0), "fake": LoraSettings(rank=3)}


@pytest.fixture(scope="module")
def oracle(checkpoints):
    return oracle_trace(Setup(lora=LORA), checkpoints)


def _difference(pools, checkpoints, oracle, **changes):
    setup = Setup(lora=LORA, **changes)
    return compare(trace_on_ranks(setup, checkpoints, pools[setup.world_size]), oracle)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dp_shard", "cp"), MESHES)
def test_dmd2_with_a_shared_base(pools, checkpoints, oracle, dp_shard, cp, checkpointing):
    sizes = {"dp_shard": dp_shard, "cp": cp, "activation_checkpointing": checkpointing}
    difference = _difference(pools, checkpoints, oracle, **sizes)
    assert difference.largest < 1e-5, difference
