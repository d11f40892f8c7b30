"""Samples during training: student against teacher, in the run's folder and wherever else the run logs."""

import json
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from distill.config import Config, LogSettings, SampleSettings, compose_config
from distill.data.moving_shapes import CAPTIONS, MovingShapes
from distill.evaluate import Evaluator
from distill.measures import HIGHER_IS_BETTER
from distill.metrics import MetricsLog
from fsdp_cp.errors import UserError


class Painter:
    """A method whose clips are of one brightness: the teacher's by its steps, the student's by its updates."""

    def __init__(self):
        self.roles = {name: SimpleNamespace(network=nn.Identity()) for name in ("teacher", "student")}
        self.calls, self.updates, self.noise = [], 0, []

    def generate(self, role, noise, text, null_text, steps, random):
        self.calls.append((role, steps))
        self.noise.append(noise)
        return torch.full_like(noise, steps / 10 if role == "teacher" else -self.updates / 10)


def evaluator(tmp_path, method, **settings):
    sample = SampleSettings(**{"prompts": 2, "teacher_steps": [5, 2], "student_steps": [3]} | settings)
    return Evaluator(
        config=Config(sample=sample),
        mesh=SimpleNamespace(dp_size=1, dp_rank=0, dp=SimpleNamespace(size=lambda: 1)),
        device=torch.device("cpu"),
        data=MovingShapes(encoders="assets/quickstart_teacher"),
        method=method,
        run_dir=tmp_path,
        batch=2,
    )


def brightness(path):
    with av.open(str(path)) as container:
        return np.mean([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_the_teacher_is_sampled_once_and_shown_every_time(tmp_path):
    method = Painter()
    evaluate = evaluator(tmp_path, method)
    metrics = MetricsLog(tmp_path, LogSettings(), {})
    for step in (10, 20):
        method.updates = step
        evaluate.write_samples(step, metrics)
    assert method.calls == [("teacher", 5), ("teacher", 2), ("student", 3), ("student", 3)]
    assert all(torch.equal(noise, method.noise[0]) for noise in method.noise), "the same noise for all"
    files = {
        *(f"teacher_{n}steps_{i}.mp4" for n in (5, 2) for i in (0, 1)),
        *(f"step_000000{step}_student_3steps_{i}.mp4" for step in (10, 20) for i in (0, 1)),
        "step_00000010.png", "step_00000020.png", "measures.jsonl",
    }  # fmt: skip
    assert {path.name for path in (tmp_path / "samples").iterdir()} == files
    # Three rows in the second sheet too: one of each brightness of the teacher, and the student's of that step.
    sheet = np.asarray(Image.open(tmp_path / "samples" / "step_00000020.png"))
    for value in (0.5, 0.2, -1.0):
        grey = round((value + 1) * 127.5)
        assert (sheet == grey).all(-1).sum() > 1000, value
    assert brightness(tmp_path / "samples" / "teacher_5steps_1.mp4") == pytest.approx(1.5 * 127.5, abs=3)
    assert brightness(tmp_path / "samples" / "step_00000010_student_3steps_0.mp4") == pytest.approx(0, abs=3)

    lines = [json.loads(line) for line in (tmp_path / "samples" / "measures.jsonl").read_text().splitlines()]
    names = {f"validation/{row}/{key}" for row in ("teacher_5steps", "teacher_2steps", "student_3steps")
             for key in HIGHER_IS_BETTER}  # fmt: skip
    assert [line.pop("step") for line in lines] == [10, 20]
    assert all(line.keys() == names for line in lines)
    assert lines[1]["validation/student_3steps/colour_accuracy"] == 0, "a dark clip shows no colour"


def test_named_captions_are_shown_in_their_order(tmp_path):
    shown = [CAPTIONS[7], CAPTIONS[3], CAPTIONS[3]]
    method = Painter()
    asked = []
    evaluate = evaluator(tmp_path, method, captions=shown, teacher_steps=[])
    embed = evaluate.data.embed
    evaluate.data.embed = lambda captions: asked.extend(captions) or embed(captions)
    evaluate.write_samples(1, None)
    assert asked[:3] == shown
    assert len(list((tmp_path / "samples").glob("*.mp4"))) == 3


def test_a_caption_that_the_data_does_not_know_is_refused_before_any_step(tmp_path):
    with pytest.raises(UserError, match="^sample.captions: caption 'a purple cow'"):
        evaluator(tmp_path, Painter(), captions=[CAPTIONS[0], "a purple cow"])
    # Of moving shapes all captions are known before there is any data.
    with pytest.raises(UserError, match="^sample.captions: 'a red circle' is not a caption of moving_shapes"):
        compose_config([f"sample.captions=[{CAPTIONS[0]},a red circle]"])
    assert compose_config([f"sample.captions=[{CAPTIONS[0]}]"]).sample.captions == [CAPTIONS[0]]


# ---------------------------------------------------------------- other places than the run's folder


def log_one_set(tmp_path, **settings):
    metrics = MetricsLog(tmp_path, LogSettings(**settings), {})
    metrics.write(20, {"student/loss": 0.5})
    evaluator(tmp_path, Painter(), teacher_steps=[5]).write_samples(20, metrics)
    metrics.close()
    return np.asarray(Image.open(tmp_path / "samples" / "step_00000020.png"))


def test_tensorboard_shows_the_sheet_and_the_measures(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sheet = log_one_set(tmp_path, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (image,) = events.Images("samples/sheet")
    assert (image.step, image.height, image.width) == (20, *sheet.shape[:2])
    (scalar,) = events.Scalars("validation/student_3steps/colour_accuracy")
    assert (scalar.step, scalar.value) == (20, 0.0)


def test_wandb_shows_the_sheet_the_videos_and_the_measures(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged = []
    log = wandb.sdk.wandb_run.Run.log
    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", lambda self, data: logged.append(data) or log(self, data))
    log_one_set(tmp_path, wandb=True)
    (shown,) = (data for data in logged if "samples/sheet" in data)
    assert shown["step"] == 20 and shown["validation/student_3steps/colour_accuracy"] == 0
    assert [len(shown[f"samples/{name}"]) for name in ("teacher_5steps", "student_3steps")] == [2, 2]
    media = [path for path in (tmp_path / "wandb").rglob("media/**/*") if path.is_file()]
    assert sorted(path.suffix for path in media) == [".mp4", ".mp4", ".png"], "equal clips are kept once"
    assert len(list((tmp_path / "samples").glob("*.mp4"))) == 4, "copied, not moved"
