"""ode_regression: its loss by the formula, its trajectories against Euler's method, its folder against mistakes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from distill.data.trajectories import TrajectoryClips, TrajectoryFolder
from distill.methods import build_method
from distill.methods.base import Batch
from distill.methods.common.schedules import euler_times
from distill.methods.ode_regression import (
    OdeRegression,
    OdeRegressionSettings,
    trajectory,
    trajectory_settings,
)
from fsdp_cp.rng import StepRandom
from models.roles.condition import text_condition
from tests.unit.method_roles import SHAPE, TEXT, Net, close, gradients, normal, text_of
from tests.unit.refused import refused, refuses_all

TIMES = [1.0, 0.8, 0.5]


def ode_regression(student=None, **settings) -> OdeRegression:
    chosen = {"step_list": TIMES, "guidance_scale": 2.5, "shift": 3.0, "trajectories": "none"} | settings
    return build_method(OdeRegressionSettings(**chosen), {"student": student or Net(5)})


def make_batch(count=6, positions=None):
    positions = list(range(count)) if positions is None else positions
    return Batch(
        latents=normal(count, *SHAPE, seed=1)[positions],
        condition=text_condition(
            normal(count, *TEXT, seed=2)[positions], normal(*TEXT, seed=3), normal(*TEXT, seed=13)
        ),
        trajectory=normal(count, len(TIMES), *SHAPE, seed=4)[positions],
    )


def run_loss(method, step=0, count=6, positions=None):
    batch = make_batch(count, positions)
    random = StepRandom(seed=5, step=step, positions=list(range(count)) if positions is None else positions)
    (loss,) = method.losses(step, batch, random)
    return loss.closure(), batch


# ---------------------------------------------------------------- the loss


def test_loss_and_gradient_by_the_formula():
    method = ode_regression()
    student = method.roles["student"]
    loss, batch = run_loss(method)
    loss.backward()
    ours = gradients(student)
    student.zero_grad()
    (call,) = student.calls
    total = 0.0
    for i, t in enumerate(call.t.tolist()):
        state = batch.trajectory[i, TIMES.index(t)]
        assert torch.equal(call.x[i], state)
        v = student.formula(state[None], call.t[i : i + 1], text_of(batch)[i : i + 1])[0]
        total = total + ((state - t * v - batch.latents[i]) ** 2).sum()
    truth = total / batch.latents.numel()
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-12)
    for name, gradient in gradients(student).items():
        assert close(ours[name], gradient), name
    assert torch.equal(call.text, text_of(batch)), "the guidance is in the trajectories"


def test_states_are_drawn_evenly_for_each_sample():
    method = ode_regression()
    run_loss(method, count=1200)
    t = method.roles["student"].calls[-1].t
    counts = [(t == time).sum().item() for time in TIMES]
    assert sum(counts) == 1200
    assert stats.chisquare(counts).pvalue > 1e-3


def test_a_mean_over_samples():
    method = ode_regression()
    whole = run_loss(method)[0].item()
    parts = [run_loss(method, positions=p)[0].item() * len(p) / 6 for p in ([0, 4], [1, 2, 3], [5])]
    assert sum(parts) == pytest.approx(whole, rel=1e-12)


# ---------------------------------------------------------------- trajectories


def test_a_trajectory_is_eulers_on_a_grid_with_the_step_list_in_it():
    teacher = Net(8)
    settings = OdeRegressionSettings(step_list=TIMES, teacher_steps=7, shift=3.0, guidance_scale=2.5)
    noise, text, null = normal(2, *SHAPE, seed=1), normal(2, *TEXT, seed=2), normal(*TEXT, seed=3)
    states, latents = trajectory(teacher, noise, text_condition(text, null), settings)
    grid = sorted({*euler_times(7, 3.0), *TIMES}, reverse=True)
    x, wanted = noise, {}
    for t, following in zip(grid, grid[1:], strict=False):
        wanted[t] = x
        at = torch.full((2,), t, dtype=torch.float64)
        c, u = teacher.formula(x, at, text), teacher.formula(x, at, null.expand_as(text))
        x = x + (following - t) * (u + 2.5 * (c - u))
    assert states.shape == (2, 3, *SHAPE) and close(latents, x)
    for k, time in enumerate(TIMES):
        assert close(states[:, k], wanted[time])
    assert torch.equal(states[:, 0], noise)


# ---------------------------------------------------------------- the folder


ABOUT = {"method.step_list": TIMES, "method.shift": 3.0, "data.negative_prompt": ""}


class Captioned:
    """A data set of captions."""

    latent_shape, condition_shapes, fingerprint, fps = SHAPE, {"text": TEXT}, "captions", 8.0

    def __len__(self):
        return 2

    def condition(self, captions, clips=None):
        return text_condition(torch.stack([torch.full(TEXT, float(len(caption))) for caption in captions]))


def filled(path, count=3):
    folder = TrajectoryFolder(str(path))
    folder.begin(ABOUT)
    for i in range(count):
        folder.write(i, normal(len(TIMES), *SHAPE, seed=i), normal(*SHAPE, seed=50 + i), "x" * i)
    return folder


def test_what_was_written_is_read(tmp_path):
    folder = filled(tmp_path / "new")
    clips = TrajectoryClips(folder, 3, Captioned())
    assert len(clips) == 3 and clips.fps == 8.0 and clips.fingerprint != "captions"
    item = clips[2]
    assert torch.equal(item["trajectory"], normal(len(TIMES), *SHAPE, seed=2).float())
    assert torch.equal(item["latents"], normal(*SHAPE, seed=52).float())
    assert item["caption"] == "xx" and (item["text"] == 2).all()
    assert [p.name for p in tmp_path.rglob("*.tmp")] == []


def test_with_images_trajectories_belong_to_the_clips_that_they_were_made_of(tmp_path):
    """A caption does not tell whose image a trajectory began with."""

    class Images(Captioned):
        condition_shapes = {"text": TEXT, "image_latents": SHAPE}

    folder = TrajectoryFolder(str(tmp_path))
    folder.begin(ABOUT | {"data.fingerprint": "captions"})
    assert len(TrajectoryClips(folder, 3, Images())) == 3
    Images.fingerprint = "edited"
    with refused("data.path"):
        TrajectoryClips(folder, 3, Images())
    assert len(TrajectoryClips(folder, 3, Captioned())) == 3, "text alone is told by the caption"


def test_missing_and_damaged_trajectories_are_made_again(tmp_path):
    folder, shape = filled(tmp_path, 4), (len(TIMES), *SHAPE)
    assert folder.missing(4, shape) == []
    folder.file(1).unlink()
    folder.file(2).write_bytes(folder.file(2).read_bytes()[:100])
    assert folder.missing(5, shape) == [1, 2, 4]
    assert folder.missing(2, (2, *SHAPE)) == [0, 1]


def test_other_settings_are_refused_by_name(tmp_path):
    folder = filled(tmp_path / "made")
    folder.check(ABOUT)
    folder.begin(ABOUT)
    for check in (folder.check, folder.begin):
        with refused("method.shift"):
            check(ABOUT | {"method.shift": 5.0})
    with refused("seed"):
        folder.begin(ABOUT | {"seed": 1})
    # Folders of earlier versions do not note all settings.
    folder.check(ABOUT | {"data.fps": 24.0, "data.max_text_tokens": 128, "data.image": None})
    folder = TrajectoryFolder(str(tmp_path / "new"))
    folder.begin(ABOUT | {"data.fps": 24.0, "data.image": "first_frame"})
    for key, value in (("data.fps", 8.0), ("data.image", None)):
        with refused(key):
            folder.check(ABOUT | {key: value})


def test_a_folder_without_trajectories_is_refused(tmp_path):
    with refused("distill.trajectories"):
        TrajectoryFolder(str(tmp_path)).check(ABOUT)
    folder = filled(tmp_path, 3)
    folder.check_complete(3)
    with refused("method.num_trajectories"):
        folder.check_complete(4)


def test_training_checks_the_folder_before_anything_is_built(tmp_path):
    settings = OdeRegressionSettings(trajectories=str(tmp_path), num_trajectories=2)
    data = SimpleNamespace(
        name="moving_shapes", num_frames=6, height=16, width=16, negative_prompt="", fps=8.0, image=None
    )
    config = SimpleNamespace(method=settings, data=data, teacher=SimpleNamespace(checkpoint="a/teacher"))
    with refused("distill.trajectories"):
        OdeRegression.check_files(config)
    folder = TrajectoryFolder(str(tmp_path))
    folder.begin(trajectory_settings(config) | {"seed": 4})
    with refused("00000000.safetensors"):
        OdeRegression.check_files(config)
    for i in range(2):
        folder.write(i, normal(4, *SHAPE, seed=i), normal(*SHAPE, seed=i), "")
    OdeRegression.check_files(config)
    for group, key, value in (
        ("data", "negative_prompt", "ugly"),
        ("data", "image", "first_frame"),
        ("method", "shift", 2.0),
    ):
        changed = SimpleNamespace(**vars(config))
        other = getattr(config, group)
        other = replace(other, shift=2.0) if group == "method" else SimpleNamespace(**vars(other) | {key: value})
        setattr(changed, group, other)
        with refused(f"{group}.{key}"):
            OdeRegression.check_files(changed)


# ---------------------------------------------------------------- settings


def test_settings():
    assert OdeRegression.roles_needed(OdeRegressionSettings()) == ("student",)
    assert not OdeRegression.needs_latents(OdeRegressionSettings()), "captions are enough"
    refuses_all(OdeRegressionSettings, {"num_trajectories": 0}, {"teacher_steps": 0}, {"step_list": [1.0, 0.0]})
    with refused("method.trajectories"):
        OdeRegression.check(SimpleNamespace(method=OdeRegressionSettings()))
