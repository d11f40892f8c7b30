"""Samples during training: student and teacher clips, in the run directory and in the run's loggers."""

import json
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from distill.config import compose_config
from distill.config.schema import LogSettings, SampleSettings
from distill.data.shape_measures import MEASURES
from distill.data.shape_scenes import CAPTIONS
from distill.evaluate.evaluator import Evaluator
from distill.train.metrics import MetricsLog
from models.condition import Condition
from tests.oracles.clips import moving_shapes
from tests.oracles.samples import video
from tests.tiers import slow


class Painter:
    """Method whose clips have one brightness: by its steps for the teacher, by its updates for the student."""

    trained_roles = ("student", "fake")

    def __init__(self):
        self.roles = {name: SimpleNamespace(network=nn.Identity(), causal=None) for name in ("teacher", "student")}
        self.calls, self.updates, self.noise = [], 0, []
        self.settings = SimpleNamespace(name="painter")

    def clock(self, role):
        return {"video": 1.0}

    def evaluations(self, role, steps):
        return 2 * steps if role == "teacher" else steps

    def trained_role(self, step):
        return "student" if step % 5 == 0 else "fake"

    def stream(self, role, noise, condition, steps, random):
        for x in noise:
            self.calls.append((role, steps))
            self.noise.append(x.video)
            yield video(torch.full_like(x.video, steps / 10 if role == "teacher" else -self.updates / 10))


def evaluator(tmp_path, method, **settings):
    sample = SampleSettings(**{"prompts": 2, "teacher_steps": [5, 2], "student_steps": [3]} | settings)
    config = compose_config([f"run_dir={tmp_path}"])
    config.sample = sample
    made = Evaluator(
        config=config,
        mesh=SimpleNamespace(shape="1 x 1", dp_size=1, dp_rank=0, dp=SimpleNamespace(size=lambda: 1)),
        device=torch.device("cpu"),
        data=moving_shapes("assets/quickstart_teacher"),
        method=method,
        micro_batch_size=1,
    )
    made.batch = 2
    return made


def brightness(path):
    with av.open(str(path)) as container:
        return np.mean([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@slow
def test_the_teacher_is_sampled_once_and_shown_every_time(tmp_path):
    method = Painter()
    evaluate = evaluator(tmp_path, method)
    metrics = MetricsLog(tmp_path, LogSettings(), {})
    for step in (10, 20):
        method.updates = step
        metrics.show(step, evaluate.write_samples(step))
    assert method.calls == [("teacher", 5), ("teacher", 2), ("student", 3), ("student", 3)]
    assert all(torch.equal(noise, method.noise[0]) for noise in method.noise), "the same noise for all"
    files = {
        *(f"teacher_{n}steps_{i}.mp4" for n in (5, 2) for i in (0, 1)),
        *(f"step_000000{step}_student_3steps_{i}.mp4" for step in (10, 20) for i in (0, 1)),
        "step_00000010.png", "step_00000020.png", "measures.jsonl",
    }  # fmt: skip
    assert {path.name for path in (tmp_path / "samples").iterdir()} == files
    # The second sheet has three rows too: one per brightness of the teacher, and the student at that step.
    sheet = np.asarray(Image.open(tmp_path / "samples" / "step_00000020.png"))
    for value in (0.5, 0.2, -1.0):
        grey = round((value + 1) * 127.5)
        assert (sheet == grey).all(-1).sum() > 1000, value
    assert brightness(tmp_path / "samples" / "teacher_5steps_1.mp4") == pytest.approx(1.5 * 127.5, abs=3)
    assert brightness(tmp_path / "samples" / "step_00000010_student_3steps_0.mp4") == pytest.approx(0, abs=3)

    lines = [json.loads(line) for line in (tmp_path / "samples" / "measures.jsonl").read_text().splitlines()]
    names = {f"validation/{row}/{key}" for row in ("teacher_5steps", "teacher_2steps", "student_3steps")
             for key in MEASURES}  # fmt: skip
    assert [line.pop("step") for line in lines] == [10, 20]
    assert all(line.keys() == names for line in lines)
    assert lines[1]["validation/student_3steps/color_accuracy"] == 0, "a dark clip shows no color"


@slow
def test_clips_that_are_not_finite_are_left_out_and_named(tmp_path, caplog):
    """uint8 would show them as black clips."""
    method = Painter()
    method.updates = float("nan")
    evaluate = evaluator(tmp_path, method, teacher_steps=[2], report_clips=2)
    evaluate.write_samples(10)
    assert {path.name.split("_")[0] for path in (tmp_path / "samples").glob("*.mp4")} == {"teacher"}
    assert (tmp_path / "samples" / "step_00000010.png").is_file()
    assert "student, 3 steps" in caplog.text and "2 of 2 clips" in caplog.text
    evaluate.write_report({"steps": 10})
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["role"] for row in report["rows"]] == ["heldout", "teacher"]
    assert "There are no clips of the student." in report["troubles"]
    evaluator(tmp_path, method, teacher_steps=[]).write_samples(20)
    assert not (tmp_path / "samples" / "step_00000020.png").exists()


@slow
def test_named_captions_are_shown_in_their_order(tmp_path):
    shown = [CAPTIONS[7], CAPTIONS[3], CAPTIONS[3]]
    asked = []
    evaluate = evaluator(tmp_path, Painter(), captions=shown, teacher_steps=[])
    condition = evaluate.data.condition
    evaluate.data.condition = lambda captions, clips=None: asked.extend(captions) or condition(captions)
    evaluate.write_samples(1)
    assert asked[:3] == shown
    assert len(list((tmp_path / "samples").glob("*.mp4"))) == 3


@slow
def test_the_report_of_a_run_has_its_starts_and_updates(tmp_path):
    line = {"step": 10, "student/loss": 0.5, "student/grad_norm": 1.0, "student/skipped": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "starts.jsonl").write_text(json.dumps({"command": "train.py 'a=<b>'", "from_step": 0}) + "\n")
    evaluator(tmp_path, Painter(), report_clips=2).write_report({"steps": 10})
    data = json.loads((tmp_path / "report.json").read_text())
    assert "1 of 2" in data["troubles"][0], "of ten steps the student had two"
    assert data["starts"][0]["command"] == "train.py 'a=<b>'"
    page = (tmp_path / "report.html").read_text()
    assert "train.py &#39;a=&lt;b&gt;&#39;" in page


@slow
def test_samples_overwrite_nothing_but_their_own_names(tmp_path):
    samples = tmp_path / "samples"
    mine = ("mine.mp4", "step_00000010.tmp", "step_00000010_student_3steps_9.mp4", "teacher_50steps_0.mp4", "cli/0.mp4",
            "step_00000009.png", ".step_00000010.tmp.png")  # fmt: skip
    for name in mine:
        (samples / name).parent.mkdir(parents=True, exist_ok=True)
        (samples / name).write_text("mine")
    evaluate = evaluator(tmp_path, Painter())
    evaluate.write_samples(10)
    evaluate.teacher_clips.clear()
    evaluate.write_samples(10)  # a run that was killed and resumed writes its own files again
    assert all((samples / name).read_text() == "mine" for name in mine)
    written = {str(p.relative_to(samples)) for p in samples.rglob("*") if p.is_file()} - set(mine)
    assert written == {
        "step_00000010.png", *(f"step_00000010_student_3steps_{i}.mp4" for i in (0, 1)),
        *(f"teacher_{n}steps_{i}.mp4" for n in (5, 2) for i in (0, 1)),
    }  # fmt: skip


# ---------------------------------------------------------------- loggers


def log_one_set(tmp_path, **settings):
    metrics = MetricsLog(tmp_path, LogSettings(**settings), {})
    metrics.write(20, {"student/loss": 0.5})
    metrics.show(20, evaluator(tmp_path, Painter(), teacher_steps=[5]).write_samples(20))
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
    (scalar,) = events.Scalars("validation/student_3steps/color_accuracy")
    assert (scalar.step, scalar.value) == (20, 0.0)


# ---------------------------------------------------------------- image to video


class Pictured:
    """Data set of four clips of one brightness each, two per caption, conditioned on images."""

    latent_shapes, fps = {"video": (3, 6, 16, 16)}, 8.0
    condition_shapes = {"text": (1, 1), "image_latents": (3, 6, 16, 16)}

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"latents": torch.full(self.latent_shapes["video"], index / 10), "caption": self.caption(index)}

    def caption(self, index):
        return ("one", "two")[index % 2]

    def captions(self):
        return ["one", "two"]

    def condition(self, captions, clips=None):
        items = [("one", "two").index(caption) for caption in captions] if clips is None else clips
        images = torch.stack([self[i]["latents"] for i in items])
        return Condition({"text": torch.zeros(len(items), 1, 1), "image_latents": images})

    def decode(self, latents):
        return (latents.video * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1)

    def release(self):
        pass


class Copier(Painter):
    """Method that returns the image that conditions it."""

    def stream(self, role, noise, condition, steps, random):
        return (video(condition.tensors["image_latents"]) for _ in noise)


@slow
def test_a_clip_of_an_image_stands_in_the_report_below_the_clip_that_the_image_is_of(tmp_path, monkeypatch):
    evaluate = evaluator(tmp_path, Copier(), report_clips=4)
    evaluate.data, made = Pictured(), []
    clips = evaluate.clips
    monkeypatch.setattr(evaluate, "clips", lambda *args, **given: made.append(clips(*args, **given)) or made[-1])
    evaluate.write_report({"steps": 10})
    real = evaluate.real_clips(["one", "two", "one", "two"]).frames
    assert len({int(clip.mean()) for clip in real}) == 4, "different clips"
    assert len(made) == 3 and all(
        sorted(c.mean() for c in row.frames) == sorted(c.mean() for c in real) for row in made
    )
    captions = json.loads((tmp_path / "report.json").read_text())["captions"]
    assert all(np.array_equal(row.frames, evaluate.real_clips(captions).frames) for row in made)
