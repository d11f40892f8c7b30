"""Every method equals plain diffusers networks in one process; DMD2 as published is in test_parity.py.

ode_regression is in test_teacher_clips.py, the GAN in fp64 in test_gan_head.py.
"""

from dataclasses import replace

import pytest

from distill.config.schema import EmaSettings
from distill.methods.dmd2 import Dmd2Settings
from models.causal import CausalSettings
from models.lora.settings import LoraSettings
from tests.oracles.difference import check_run
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import METHODS, Setup, make_config
from tests.oracles.sharded_run import make_trainer
from tests.oracles.tiny_wan import CONDITION_SHAPES, LATENT_SHAPE
from tests.tiers import long, long_case, slow, slow_case

FAST = {"dp_shard": 2, "cp": 2, "micro_batch_size": 2}
RING = {"cp": 3, "micro_batch_size": 4}
FORCED = Dmd2Settings(
    fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, shift=2.0, student_input="clips"
)


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        *(
            slow_case(name, FAST)
            for name in (
                "flow_matching",
                "flow_matching, built-in guidance",
                "scm",
                "rcm",
                "dmd2, GAN",
                "dmd2, own path",
                "meanflow",
                "dcm",
            )
        ),
        *(long_case(name, FAST) for name in ("rcm, last step", "dmd2, last step")),
        *(
            pytest.param(name, RING, marks=slow if name in ("scm", "rcm, last step") else long)
            for name in METHODS
            if name != "dmd2"
        ),
    ],
    ids=str,
)
def test_three_steps(pools, checkpoints, method, sizes):
    setup = Setup(**sizes, steps=3, method=METHODS[method])
    check_run(pools, setup, checkpoints)


@slow
@pytest.mark.parametrize(("method", "sizes"), [("dcm", RING), ("scm", RING), long_case("dcm", FAST)], ids=str)
def test_a_causal_teacher_and_an_adapted_student(pools, checkpoints, method, sizes):
    causal, lora = CausalSettings(chunk=1, window=1, context_time=0.1), {"student": LoraSettings(rank=2)}
    setup = Setup(**sizes, steps=3, method=METHODS[method], causal=causal, lora=lora)
    check_run(pools, setup, checkpoints)


@slow
@pytest.mark.parametrize(("history", "sizes"), [("clean", FAST), ("noisy", RING), long_case("clean", RING)], ids=str)
def test_a_causal_student(pools, checkpoints, history, sizes):
    """Teacher forcing and diffusion forcing equal dense masks, with a time and draws for each chunk."""
    method = replace(METHODS["flow_matching"], history=history)
    causal = CausalSettings(chunk=1, window=1, context_time=0.1)
    setup = Setup(**sizes, steps=3, method=method, causal=causal)
    truth = oracle_trace(setup, checkpoints)
    check_run(pools, setup, checkpoints, truth)
    other = oracle_trace(replace(setup, causal=replace(causal, window=None)), checkpoints)
    assert abs(other.losses[0] - truth.losses[0]) > 1e-4, "the comparison can tell masks apart"


@slow
def test_a_causal_student_with_a_given_first_frame(pools, checkpoints):
    """The frame is a chunk, has time 0 in both halves, and adds nothing to the loss."""
    causal = CausalSettings(chunk=2, first_chunk=1)
    shapes = CONDITION_SHAPES | {"first_frame": (LATENT_SHAPE[0], 1, *LATENT_SHAPE[2:])}
    method = replace(METHODS["flow_matching"], history="clean")
    setup = Setup(**FAST, steps=2, method=method, causal=causal, condition_shapes=shapes)
    check_run(pools, setup, checkpoints)


def _average_as_target(folder, target, sizes, sharding):
    method = replace(METHODS["dcm"], target=target)
    setup = Setup(**sizes, steps=3, micro_batch_size=2, method=method, changes={"student": sharding})
    config = make_config(setup, folder)
    config.optim.student.lr = 1e-3
    config.student.ema = EmaSettings(enabled=True, decay=0.9)
    trace = make_trainer(setup, folder, config).record()
    return trace.losses + trace.norms


@slow
def test_dcm_towards_the_average(pools, checkpoints):
    """The average is swapped in within a step, on every mesh and strategy."""
    (alone,), (student,) = (pools[1].run(_average_as_target, checkpoints, t, {}, {}) for t in ("ema", "student"))
    assert student[0] == alone[0], "until the first update both are the same weights"
    assert all(student[step] != pytest.approx(alone[step], rel=1e-6) for step in (1, 2))
    for sizes, sharding in (
        ({"dp_shard": 2}, {}),
        ({"cp": 2}, {"strategy": "optim"}),
        ({"dp_shard": 2}, {"strategy": "no_shard"}),
        ({"dp_shard": 2}, {"keep_gathered": True}),
    ):
        for numbers in pools[2].run(_average_as_target, checkpoints, "ema", sizes, sharding):
            assert numbers == pytest.approx(alone, rel=1e-5), sharding


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
    setup = Setup(**{"steps": 3, "micro_batch_size": 1, "method": replace(FORCED, data_forcing=0.5)} | changes)
    truth = oracle_trace(setup, checkpoints)
    check_run(pools, setup, checkpoints, truth)
    always = oracle_trace(replace(setup, method=replace(FORCED, data_forcing=1.0)), checkpoints)
    assert [a == b for a, b in zip(truth.losses, always.losses, strict=True)] == [True, True, False]
