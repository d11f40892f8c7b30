"""The guard's limits, when a measure can raise an alarm, the best checkpoint, and settings that are refused."""

import math
import re
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distill.config import compose_config
from distill.evaluate.evaluator import Evaluator
from distill.evaluate.guard import FIELD, LIMITS, SEEDS, Guard, GuardState, by_caption, limits_of, middle_time
from distill.evaluate.measures import clip_measures
from distill.methods import METHODS
from distill.train.trainer import Trainer, build_trainer
from models.sample import VIDEO, Sample
from tests.unit.refused import refused


def state_of(**limits: tuple[float, float]) -> GuardState:
    return GuardState(limits=limits or {"saturation": (0.2, 0.1), "motion": (0.5, 0.1)})


INSIDE, OUTSIDE = {"saturation": 0.2, "motion": 0.5}, {"saturation": 0.2 + 0.2 * LIMITS["saturation"], "motion": 0.5}


def measured(clips: np.ndarray) -> dict[str, list[float]]:
    data = SimpleNamespace(decode=lambda latents: latents.video.byte())
    return by_caption(data, Sample({VIDEO: torch.from_numpy(clips)}))


def test_measures_are_by_caption_and_limits_have_their_spread():
    clips = np.random.default_rng(0).integers(0, 256, (3 * SEEDS, 4, 8, 8, 3), dtype=np.uint8)
    clips[2 * SEEDS :] //= 4
    found = measured(clips)
    for i, motion in enumerate(found["motion"]):
        own = [clip_measures(clip)["motion"] for clip in clips[SEEDS * i : SEEDS * (i + 1)]]
        assert motion == pytest.approx(np.mean(own))
    assert found["diversity"][2] == pytest.approx(found["diversity"][0] / 4, rel=0.1)
    limits = limits_of(found)
    assert limits["motion"] == pytest.approx((np.mean(found["motion"]), np.std(found["motion"], ddof=1)))
    assert limits["static"] == (0, 0.25), "none of so few clips is static by chance"
    assert limits_of({"motion": [0.5, 0.5], "flicker": [math.nan] * 2}) == {"motion": (0.5, 0.025)}
    assert limits.keys() == LIMITS.keys() - {FIELD}
    gray = limits_of(measured(np.full((2 * SEEDS, 4, 8, 8, 3), 9, dtype=np.uint8)))
    assert "diversity" not in gray, "a caption of one real clip has none"
    state = GuardState(limits=gray)
    state.judge({name: mean for name, (mean, _) in gray.items()})
    assert state.total_excess() == 0


def test_a_caption_that_no_clip_has_is_refused_instead_of_searched_forever():
    data = SimpleNamespace(caption=lambda i: "ab"[i % 2])
    evaluator = SimpleNamespace(config=compose_config([]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distill.evaluate.evaluator.buckets_of", lambda _: [SimpleNamespace(items=range(4))])
        assert Evaluator._items(evaluator, ["b", "a", "b", "b"], data) == [1, 0, 3, 1]
        with refused("caption"):
            Evaluator._items(evaluator, ["a", "c"], data)


def test_a_resumed_guard_counts_from_step_0_forgets_deleted_checkpoints_and_keeps_or_renews_limits(tmp_path):
    guard = object.__new__(Guard)
    guard.captions, guard.teacher, guard.state = ["a", "a"], "one", GuardState()
    guard.config = SimpleNamespace(run_dir=str(tmp_path), sample=SimpleNamespace(teacher_steps=[4], images=[]))
    guard.method = SimpleNamespace(roles={"teacher": None}, trained_role=lambda step: ["fake", "student"][step % 2])
    guard.evaluator = SimpleNamespace(data=SimpleNamespace(latent_shapes={"video": (1, 2, 3, 4)}))
    guard.resume(None, 10)
    assert guard.state.updates == 5, "looks fall on the same steps as in a run from step 0"
    saved = asdict(GuardState(["a", "a"], guard.reference, {"motion": (0.5, 0.1)}, updates=5, looked_at=5, best=8))
    (tmp_path / "checkpoints" / "step_00000008").mkdir(parents=True)
    guard.resume(saved, 10)
    assert (guard.state.best, guard.state.looked_at, guard.state.limits) == (8, 5, saved["limits"])
    (tmp_path / "checkpoints" / "step_00000008").rmdir()
    guard.resume(saved, 10)
    assert (guard.state.best, guard.state.limits) == (None, saved["limits"])
    older = {name: value for name, value in saved.items() if name != "reference"}
    changed = {**saved, "reference": {**saved["reference"], "distances": {"motion": -2}}}
    other = {**saved, "reference": {**saved["reference"], "images": ["a.png", "a.png"]}}
    for state in (older, changed, other, {**saved, "captions": ["b", "b"]}):
        guard.state = GuardState()
        guard.resume(state, 10)
        assert guard.state == GuardState(updates=5, looked_at=5)


def test_the_fake_scores_error_is_at_a_time_of_an_expert_that_trains():
    def role(*trained):
        return SimpleNamespace(boundaries=(0.9,), trained_experts=trained, expert_at=lambda time: int(time < 0.9))

    assert [middle_time(role(0)), middle_time(role(1)), middle_time(role(0, 1))] == [pytest.approx(0.95), 0.5, 0.5]


def test_limits_are_on_one_side():
    state = state_of()
    state.judge({"saturation": 0.2 - 0.1 * (LIMITS["saturation"] + 3), "motion": 0.5 + 0.1 * (LIMITS["motion"] - 2)})
    assert state.excess("saturation") == 0 and state.excess("motion") == pytest.approx(2)
    assert state.total_excess() == pytest.approx(2)
    for name, distance in LIMITS.items():
        assert state_of(**{name: (0.5, 0.1)}).limit(name) == pytest.approx(0.5 + 0.1 * distance)


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


def test_the_advice_names_settings_that_have_an_effect():
    def advice(*words, method="dmd2"):
        return " ".join(compose_config([f"method={method}", *words]).method.remedies)

    assert "gan_weight_student" not in advice() and "guidance_scale" in advice() and "projection" in advice()
    with_gan = advice("method.gan_weight_student=0.01")
    assert "gan_weight_student" in with_gan and "data_forcing" not in with_gan, "the two exclude each other"
    assert "guidance_scale" not in advice("method.guidance_scale=1")
    assert "data_forcing" not in advice("method.data_forcing=0.5")
    assert "projection" not in advice("method.projection=true", method="rcm")
    assert advice().startswith("raise method.fake_updates") and advice(method="rcm").startswith(
        "raise method.student_e"
    )
    for name, (_, settings) in METHODS.items():
        named = re.findall(r"method\.(\w+)", " ".join(settings().remedies))
        assert named and all(hasattr(settings(), setting) for setting in named), name


def test_the_fake_score_is_asked_as_it_is_trained():
    t = torch.tensor([0.5, 0.5])
    for name in ("dmd2", "rcm"):
        method, settings = METHODS[name]
        assert method(settings(), {}).fake_last_step(t) is None
        chosen = settings(fake_knows_last_step=True)
        assert torch.equal(method(chosen, {}).fake_last_step(t), torch.full_like(t, chosen.student_times()[-1]))


def test_a_look_is_at_the_average():
    """Samples and the export are of the average too."""
    inside, seen = [], []

    @contextmanager
    def average():
        inside.append(True)
        yield
        inside.pop()

    guard = SimpleNamespace(look=lambda step: seen.append((step, bool(inside))) or {"guard/alarm": 0.0})
    trainer = SimpleNamespace(method=SimpleNamespace(student_average=average), guard=guard, step=4, unlogged={})
    Trainer._look(trainer)
    assert seen == [(4, True)] and trainer.unlogged == {"guard/alarm": 0.0}


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
    for action in ("keep", "stop"):
        with refused("guard.every"):
            compose_config([f"guard.action={action}"])
    compose_config([*keep])
