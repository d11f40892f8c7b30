"""The guard's limits, when a measure can raise an alarm, the best checkpoint, and settings that are refused."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from distill.config import compose_config
from distill.evaluate.guard import ALLOWED, SEEDS, SIDES, GuardState, by_caption, limits_of
from distill.evaluate.measures import clip_measures
from distill.train.trainer import build_trainer
from tests.unit.refused import refused


def state_of(**limits: tuple[float, float]) -> GuardState:
    return GuardState(limits=limits or {"saturation": (0.2, 0.1), "motion": (0.5, 0.1)})


INSIDE, OUTSIDE = {"saturation": 0.2, "motion": 0.5}, {"saturation": 0.2 + 0.2 * ALLOWED, "motion": 0.5}


def test_measures_are_by_caption_and_limits_have_their_spread():
    clips = np.random.default_rng(0).integers(0, 256, (3 * SEEDS, 4, 8, 8, 3), dtype=np.uint8)
    clips[2 * SEEDS :] //= 4
    measured = by_caption(clips)
    for i, motion in enumerate(measured["motion"]):
        own = [clip_measures(clip)["motion"] for clip in clips[SEEDS * i : SEEDS * (i + 1)]]
        assert motion == pytest.approx(np.mean(own))
    assert measured["diversity"][2] == pytest.approx(measured["diversity"][0] / 4, rel=0.1)
    limits = limits_of(measured)
    assert limits["motion"] == pytest.approx((np.mean(measured["motion"]), np.std(measured["motion"], ddof=1)))
    assert limits["static"] == (0, 0.25), "none of so few clips is static by chance"
    assert limits_of({"motion": [0.5, 0.5], "flicker": [math.nan] * 2}) == {"motion": (0.5, 0.025)}
    assert limits.keys() == SIDES.keys()


def test_limits_are_on_one_side():
    state = state_of()
    state.judge({"saturation": 0.2 - 0.1 * (ALLOWED + 3), "motion": 0.5 - 0.1 * (ALLOWED + 2)})
    assert state.excess("saturation") == 0 and state.excess("motion") == pytest.approx(2)
    assert state.total_excess() == pytest.approx(2)


@pytest.mark.parametrize(
    ("looks", "alarms"),
    [
        ([INSIDE, OUTSIDE, OUTSIDE, OUTSIDE, INSIDE], [0, 0, 1, 1, 0]),
        ([INSIDE, OUTSIDE, INSIDE, OUTSIDE, INSIDE], [0, 0, 0, 0, 0]),
        ([OUTSIDE] * 5, [0, 0, 0, 0, 0]),
        ([OUTSIDE, INSIDE, OUTSIDE, OUTSIDE, OUTSIDE], [0, 0, 0, 0, 0]),
        ([OUTSIDE, INSIDE, INSIDE, OUTSIDE, OUTSIDE], [0, 0, 0, 0, 1]),
        ([INSIDE, {"saturation": None, "motion": None}, OUTSIDE], [0, 0, 1]),
    ],
    ids=["armed at once", "never twice", "never armed", "once inside", "twice inside", "not finite"],
)
def test_an_armed_measure_alarms_at_its_second_look_outside(looks, alarms):
    state = state_of()
    raised = [state.judge(values) for values in looks]
    assert [len(names) for names in raised] == alarms or looks[1]["motion"] is None
    assert [bool(names) for names in raised] == [bool(alarm) for alarm in alarms]
    assert "motion" in state.armed


def test_the_best_checkpoint_has_the_least_excess_and_is_the_latest_of_equals():
    state, best = state_of(), []
    worse = OUTSIDE | {"motion": 0.0}
    for step, values in enumerate([OUTSIDE, worse, OUTSIDE, INSIDE, INSIDE, OUTSIDE], 1):
        state.updates = step
        state.judge(values)
        state.mark(step)
        best.append(state.best)
    assert best == [1, 1, 3, 4, 5, 5]
    state.updates += 1
    state.mark(99)
    state.judge({"saturation": None, "motion": None})
    state.mark(100)
    assert state.best == 5, "a student that no look saw, and clips that are not finite"


def test_settings_that_are_refused():
    for captions in (0, 1):
        with refused("captions"):
            compose_config(["guard.every=10", f"guard.captions={captions}"])
    with refused("guard.every"):
        compose_config(["guard.every=-1"])
    keep = ["guard.action=keep", "guard.every=10"]
    for word in ("checkpoint.keep=0", "checkpoint.every=0"):
        with refused(word.split("=")[0]):
            compose_config([*keep, word])
    with refused("guard.every=7"):  # the student trains 20 times in 100 steps
        compose_config([*keep, "guard.every=7"])
    with refused("guard.every"):  # data without a decoder
        build_trainer(SimpleNamespace(config=compose_config(["guard.every=10"])), SimpleNamespace())
    compose_config([*keep])
    compose_config(["guard.action=keep", "checkpoint.keep=0"])
