"""Samples during training: student against teacher, in the run's folder and wherever else the run logs."""

import json
import logging
import re
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from distill.config import LogSettings, SampleSettings, compose_config
from distill.data.moving_shapes import CAPTIONS, MovingShapes
from distill.evaluate import Evaluator, _duration
from distill.metrics import MetricsLog
from distill.report.measures import HIGHER_IS_BETTER
from fsdp_cp.errors import UserError
from models.condition import Condition


class Painter:
    """A method whose clips are of one brightness: the teacher's by its steps, the student's by its updates."""

    def __init__(self):
        self.roles = {name: SimpleNamespace(network=nn.Identity()) for name in ("teacher", "student")}
        self.calls, self.updates, self.noise = [], 0, []
        self.settings = SimpleNamespace(name="painter")

    def evaluations(self, role, steps):
        return 2 * steps if role == "teacher" else steps

    def trained_role(self, step):
        return "student" if step % 5 == 0 else "fake"

    def generate(self, role, noise, condition, steps, random):
        self.calls.append((role, steps))
        self.noise.append(noise)
        return torch.full_like(noise, steps / 10 if role == "teacher" else -self.updates / 10)


def evaluator(tmp_path, method, **settings):
    sample = SampleSettings(**{"prompts": 2, "teacher_steps": [5, 2], "student_steps": [3]} | settings)
    config = compose_config([f"run_dir={tmp_path}"])
    config.sample = sample
    return Evaluator(
        config=config,
        mesh=SimpleNamespace(shape="1 x 1", dp_size=1, dp_rank=0, dp=SimpleNamespace(size=lambda: 1)),
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
    condition = evaluate.data.condition
    evaluate.data.condition = lambda captions, clips=None: asked.extend(captions) or condition(captions)
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


def test_sampling_says_what_it_does_and_how_long_it_will_take(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    evaluate = evaluator(tmp_path, Painter(), report_clips=4)
    evaluate.write_samples(10, None)
    evaluate.write_report({"steps": 10})
    said = [record.message for record in caplog.records if record.name == "distill.evaluate"]
    time = r"[\d.]+ s"
    expected = [
        rf"sampling teacher, 5 steps: 2 clips in {time}; about {time} of sampling left",
        rf"sampling teacher, 2 steps: 2 clips in {time}; about {time} of sampling left",
        rf"sampling student, 3 steps: 2 clips in {time}",
        rf"samples of step 10: {tmp_path}/samples/step_00000010.png",
        *(line for name, left in (("teacher, 5 steps", True), ("teacher, 2 steps", True), ("student, 3 steps", False))
          for line in (rf"sampling {name}: 4 clips in {time}" + rf"; about {time} of sampling left" * left,
                       rf"measured {name} in {time}")),
        "writing the report",
    ]  # fmt: skip
    assert len(said) == len(expected)
    for line, pattern in zip(said, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_the_time_left_is_what_the_other_rows_cost(tmp_path, caplog, monkeypatch):
    """Five teacher steps with guidance are ten evaluations, three of the student three: 30 s make 9 s."""
    caplog.set_level(logging.INFO)
    evaluate = evaluator(tmp_path, Painter())
    ticks = iter([100.0, 130.0])
    monkeypatch.setattr("distill.evaluate.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    evaluate.clips("teacher", 5, CAPTIONS[:2], then=[("student", 3)])
    assert "sampling teacher, 5 steps: 2 clips in 30 s; about 9.0 s of sampling left" in caplog.text


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (99, "99 s"), (600, "10 min"), (36000, "10.0 h")]
)
def test_durations_read_well(seconds, said):
    assert _duration(seconds) == said


def test_the_report_of_a_run_has_its_settings_starts_and_updates(tmp_path):
    line = {"step": 10, "student/loss": 0.5, "student/grad_norm": 1.0, "student/skipped": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "starts.jsonl").write_text(json.dumps({"command": "train.py 'a=<b>'", "from_step": 0}) + "\n")
    evaluator(tmp_path, Painter(), report_clips=2).write_report({"steps": 10})
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["troubles"][0] == (
        "1 of 2 updates of the student was skipped because its gradient norm was not finite."
    ), "of ten steps the student had two"
    assert data["starts"][0]["command"] == "train.py 'a=<b>'"
    changed = {row["key"]: row["value"] for row in data["settings"] if row["differs"]}
    assert changed["sample.teacher_steps"] == [5, 2] and "seed" not in changed
    page = (tmp_path / "report.html").read_text()
    assert "train.py &#x27;a=&lt;b&gt;&#x27;" in page and 'href="report.png"' in page and 'href="samples/"' not in page


def test_samples_overwrite_nothing_but_their_own_names(tmp_path):
    samples = tmp_path / "samples"
    mine = ("mine.mp4", "step_00000010.tmp", "step_00000010_student_3steps_9.mp4", "teacher_50steps_0.mp4", "cli/0.mp4",
            "step_00000009.png", ".step_00000010.tmp.png")  # fmt: skip
    for name in mine:
        (samples / name).parent.mkdir(parents=True, exist_ok=True)
        (samples / name).write_text("mine")
    evaluate = evaluator(tmp_path, Painter())
    for _ in range(2):  # a run that was killed and resumed writes its own files again
        evaluate.write_samples(10, None)
        evaluate.teacher_clips.clear()
    assert all((samples / name).read_text() == "mine" for name in mine)
    written = {str(p.relative_to(samples)) for p in samples.rglob("*") if p.is_file()} - set(mine)
    assert written == {
        "step_00000010.png", *(f"step_00000010_student_3steps_{i}.mp4" for i in (0, 1)),
        *(f"teacher_{n}steps_{i}.mp4" for n in (5, 2) for i in (0, 1)),
    }  # fmt: skip


def test_what_cannot_be_written_after_the_training_is_one_line(tmp_path):
    (tmp_path / "samples").write_text("a file in the way")
    evaluate = evaluator(tmp_path, Painter(), report_clips=2)
    with pytest.raises(UserError, match="samples cannot be written .* what was trained is in the newest checkpoint"):
        evaluate.write_samples(10, None)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UserError, match="report.html cannot be written .* what was trained is in the newest check"):
        evaluate.write_report({"steps": 10})
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [], "no half file stays"


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


# ---------------------------------------------------------------- image to video


class Pictured:
    """Four clips of one brightness each, two to a caption, whose images condition."""

    latent_shape, fps = (3, 6, 16, 16), 8.0
    condition_shapes = {"text": (1, 1), "image_latents": latent_shape}

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"latents": torch.full(self.latent_shape, index / 10), "caption": ("one", "two")[index % 2]}

    def captions(self):
        return ["one", "two"]

    def condition(self, captions, clips=None):
        items = [("one", "two").index(caption) for caption in captions] if clips is None else clips
        images = torch.stack([self[i]["latents"] for i in items])
        return Condition({"text": torch.zeros(len(items), 1, 1), "image_latents": images})

    def decode(self, latents):
        return (latents * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1)

    def release(self):
        pass


class Copier(Painter):
    """Makes the image itself."""

    def generate(self, role, noise, condition, steps, random):
        return condition.tensors["image_latents"]


def test_a_clip_of_an_image_stands_in_the_report_below_the_clip_that_the_image_is_of(tmp_path, monkeypatch):
    evaluate = evaluator(tmp_path, Copier(), report_clips=4)
    evaluate.data, made = Pictured(), []
    clips = evaluate.clips
    monkeypatch.setattr(evaluate, "clips", lambda *args, **given: made.append(clips(*args, **given)) or made[-1])
    evaluate.write_report({"steps": 10})
    real = evaluate._real_clips(["one", "two", "one", "two"], None)
    assert len({int(clip.mean()) for clip in real}) == 4, "different clips"
    assert len(made) == 3 and all(sorted(c.mean() for c in row) == sorted(c.mean() for c in real) for row in made)
    captions = json.loads((tmp_path / "report.json").read_text())["captions"]
    assert all(np.array_equal(row, evaluate._real_clips(captions, None)) for row in made)
