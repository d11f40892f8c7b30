"""dcm towards the student's average: swapped in inside a step, on every mesh and strategy the same run."""

import pytest

from distill.config import EmaSettings
from distill.methods.dcm import DcmSettings
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import make_trainer


def _setup(target, dp_shard=1, cp=1, strategy="optim_grads_params", **changes):
    method = DcmSettings(grid_steps=6, guidance_scale=3.0, step_list=[1.0, 0.8], target=target)
    return Setup(
        dp_shard=dp_shard, cp=cp, steps=4, method=method, changes={"student": {"strategy": strategy} | changes}
    )


def _run(setup, checkpoints):
    config = make_config(setup, checkpoints)
    config.optim.student.lr = 1e-3
    config.student.ema = EmaSettings(enabled=True, decay=0.9)
    return make_trainer(setup, checkpoints, config).record()


@pytest.fixture(scope="module")
def alone(pools, checkpoints):
    (trace,) = pools[1].run(_run, _setup("ema"), checkpoints)
    return trace


@pytest.mark.parametrize(
    ("dp_shard", "cp", "settings"),
    [
        (2, 1, {}),
        pytest.param(1, 2, {"strategy": "optim"}, marks=pytest.mark.slow),
        (2, 2, {"strategy": "optim_grads"}),
        pytest.param(2, 1, {"strategy": "no_shard"}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"keep_gathered": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_same_run(pools, checkpoints, alone, dp_shard, cp, settings):
    for trace in pools[dp_shard * cp].run(_run, _setup("ema", dp_shard, cp, **settings), checkpoints):
        assert trace.losses == pytest.approx(alone.losses, rel=1e-5)
        assert trace.norms == pytest.approx(alone.norms, rel=1e-5)


def test_the_average_is_another_target_than_the_student(pools, checkpoints, alone):
    """Until the first update they are the same weights."""
    (student,) = pools[1].run(_run, _setup("student"), checkpoints)
    assert student.losses[0] == alone.losses[0]
    for step in (1, 2, 3):
        assert student.losses[step] != pytest.approx(alone.losses[step], rel=1e-6)
