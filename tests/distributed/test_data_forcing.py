"""Data forcing on a mesh: forced and other steps equal plain networks in one process."""

from dataclasses import replace

import pytest

from distill.methods.dmd2 import Dmd2Settings
from models.lora.settings import LoraSettings
from tests.oracles.difference import compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import Setup
from tests.oracles.sharded_run import trace_on_ranks
from tests.tiers import long_case, slow

METHOD = Dmd2Settings(
    fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, shift=2.0, student_input="clips"
)


@slow
@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {"student": LoraSettings(rank=2), "fake": LoraSettings(rank=2)}, "dp_shard": 2, "cp": 1},
        long_case({"dp_shard": 1, "cp": 2, "micro_batch_size": 2}),
    ],
    ids=str,
)
def test_steps_with_a_coin_equal_one_process(pools, checkpoints, changes):
    """Forced and other steps of student and fake score, and adapters."""
    setup = Setup(**{"steps": 3, "micro_batch_size": 1, "method": replace(METHOD, data_forcing=0.5)} | changes)
    trace, truth = trace_on_ranks(setup, checkpoints, pools[setup.world_size]), oracle_trace(setup, checkpoints)
    assert compare(trace, truth).largest < 1e-5
    always = oracle_trace(replace(setup, method=replace(METHOD, data_forcing=1.0)), checkpoints)
    assert [a == b for a, b in zip(truth.losses, always.losses, strict=True)] == [True, True, False]
