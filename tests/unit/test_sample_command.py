"""``python -m distill.sample`` on a run directory: its files, new captions, and one line for each mistake."""

import json
import re
import resource
import shutil
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from distill.config import compose_config, load_config
from distill.run.open import summary
from distill.run.setup import plan_run
from distill.sample import main
from models.causal import CausalSettings
from tests.tiers import slow
from tests.unit.refused import check_command, snapshot

TEACHER = Path(__file__).resolve().parents[2] / "assets" / "quickstart_teacher"
CAPTION = "a red circle growing"


def write_run(folder: Path, export: Path, *overrides: str, experiment: str = "quickstart") -> Path:
    """Write a run directory as sampling reads it: its configuration and its student."""
    config = compose_config([f"experiment={experiment}", "device=cpu", *overrides])
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(asdict(config)), folder / "config.yaml")
    shutil.copytree(export, folder / "export" / "student")
    return folder


@pytest.fixture
def run_dir(tmp_path):
    return write_run(tmp_path / "run", TEACHER)


@pytest.fixture
def captions_run(tmp_path, tiny):
    (tmp_path / "captions.txt").write_text("a red square\na green square\n")
    sizes = ["data.num_frames=5", "data.height=32", "data.width=48", "data.max_text_tokens=24"]
    return write_run(
        tmp_path / "run", tiny / "transformer", "data=captions", "sample.report_clips=0",
        f"data.path={tmp_path / 'captions.txt'}", f"data.encoders={tiny}", f"teacher.checkpoint={tiny}", *sizes,
    )  # fmt: skip


def write_causal_run(parent: Path) -> Path:
    """Write a run whose student has a window of one chunk of 2 frames."""
    causal = ["student.causal.chunk=2", "student.causal.window=1"]
    folder = write_run(parent / "run", TEACHER / "transformer", *causal, experiment="quickstart_causal_teacher")
    settings = asdict(load_config(folder / "config.yaml").student.causal) | {"frames": 6}
    (folder / "export" / "student" / "causal.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def causal_run(tmp_path):
    return write_causal_run(tmp_path)


check_refused = partial(check_command, main)


@slow
def test_a_causal_student_makes_clips_of_any_length(causal_run, capsys):
    """Clips can be longer than the 64 positions of the network, since a window limits what a chunk sees."""
    for frames, chunks in (("6", 3), ("66", 33)):
        assert main([str(causal_run), "--frames", frames, "--count", "1", "--steps", "1"]) == 0
        assert re.search(r"first chunk after [\d.e+-]+ s, then [\d.e+-]+ s per chunk", capsys.readouterr().out)
        with av.open(str(causal_run / "samples" / "cli" / "0.mp4")) as video:
            assert sum(1 for _ in video.decode(video=0)) == 2 * chunks


def test_lengths_that_a_student_cannot_make(causal_run, capsys):
    check_refused(capsys, "--frames 9: student.causal.chunk=2", causal_run, "--frames", "9")
    check_refused(capsys, "--frames 4", causal_run, "--frames", "4")
    for name, window in (("config.yaml", "window: 1"), ("export/student/causal.json", '"window": 1')):
        text = (causal_run / name).read_text()
        (causal_run / name).write_text(text.replace(window, window.replace("1", "null")))
    check_refused(capsys, "at most 64", causal_run, "--frames", "66")
    assert not (causal_run / "samples").exists()


def test_a_bidirectional_student_has_one_length(run_dir, capsys):
    check_refused(capsys, "--frames 12", run_dir, "--frames", "12")
    settings = asdict(CausalSettings(chunk=1)) | {"frames": 6}
    (run_dir / "export" / "student" / "transformer" / "causal.json").write_text(json.dumps(settings))
    check_refused(capsys, "method=dmd2", run_dir)


def clips(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} - {"fsdp_cp_export.json"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU it is used")
def test_a_student_of_gpus_is_sampled_without_one(run_dir, tmp_path, capsys):
    config = OmegaConf.load(run_dir / "config.yaml")
    config.device = "cuda"
    OmegaConf.save(config, run_dir / "config.yaml")
    words = [str(run_dir), "--steps", "1", "--count", "1", "--out", str(tmp_path / "clips")]
    check_refused(capsys, "device=cuda", *words, "--device", "cuda")
    assert main(words) == 0 and clips(tmp_path / "clips") == {"0.mp4", "samples.png"}


@slow
def test_a_caption_that_the_run_never_saw_is_encoded(captions_run, tmp_path):
    out = tmp_path / "clips"
    assert main([str(captions_run), "--caption", "a bird, flying", "--caption", "a red square", "--out", str(out)]) == 0
    assert clips(out) == {"0.mp4", "1.mp4", "samples.png"}
    about = json.loads((out / "fsdp_cp_export.json").read_text())["about"]
    assert about["captions"] == ["a bird, flying", "a red square"] and about["steps"] == 4


@slow
def test_new_captions_are_embedded_and_leave_the_fingerprint_alone(captions_run):
    config = load_config(captions_run / "config.yaml")
    given = {"seed": 0, "device": torch.device("cpu"), "run_dir": captions_run}
    plain = config.data.build(**given)
    told = config.data.build(**given, captions=["a bird", "a red square", ""])
    assert told.fingerprint == plain.fingerprint and len(told) == len(plain)
    assert list(told.captions()) == list(plain.captions())
    bird, red, empty = told.condition(["a bird", "a red square", ""]).tensors["text"]
    assert torch.equal(red, plain.condition(["a red square"]).tensors["text"][0])
    assert torch.equal(empty, plain.null["text"]) and torch.equal(empty, plain.empty["text"])
    assert not torch.equal(bird, red)
    with pytest.raises(ValueError, match="a bird"):
        plain.condition(["a bird"])
    with pytest.raises(ValueError):
        config.data.build(**given, captions=["a \udcff"])


def test_moving_shapes_refuses_unknown_words(run_dir, capsys):
    check_refused(capsys, "bird", run_dir, "--caption", "a bird")
    assert not (run_dir / "samples" / "cli").exists()


def test_adapters_are_sampled_on_the_teacher(run_dir, tmp_path):
    """They make the clips of the network into which they are merged."""
    merged, adapters, frames = tmp_path / "merged", tmp_path / "adapters", {}
    shutil.copytree(TEACHER, merged)
    (file,) = (merged / "transformer").glob("*.safetensors")
    weights, layer = load_file(file), "blocks.0.ffn.net.2"
    out_features, in_features = weights[f"{layer}.weight"].shape
    torch.manual_seed(0)
    a, b = torch.randn(2, in_features), 0.1 * torch.randn(out_features, 2)
    weights[f"{layer}.weight"] += b @ a
    save_file(weights, file, {"format": "pt"})
    adapters.mkdir()
    named = {f"transformer.{layer}.lora_A.weight": a, f"transformer.{layer}.lora_B.weight": b}
    save_file(named, adapters / "pytorch_lora_weights.safetensors")
    for student in (merged, adapters, TEACHER):
        out = tmp_path / "clips" / student.name
        assert main([str(run_dir), "--student", str(student), "--steps", "1", "--count", "1", "--out", str(out)]) == 0
        with av.open(str(out / "0.mp4")) as video:
            frames[student] = np.stack([x.to_ndarray(format="rgb24") for x in video.decode(video=0)]).astype(float)
    assert abs(frames[merged] - frames[adapters]).max() <= 2
    assert abs(frames[merged] - frames[TEACHER]).mean() > 3, "the check can tell them apart"


def test_the_teacher_is_sampled_with_captions_of_a_file(run_dir, tmp_path, capsys):
    file = tmp_path / "captions.txt"
    file.write_text(f"{CAPTION}\na blue square falling\n{CAPTION}\n")
    out = tmp_path / "clips"
    words = [str(run_dir), "--captions", str(file), "--steps", "1", "--out", str(out)]
    assert main([*words, "--teacher"]) == 0
    assert clips(out) == {"0.mp4", "1.mp4", "samples.png"}, "a caption that is there twice is sampled once"
    about = json.loads((out / "fsdp_cp_export.json").read_text())["about"]
    assert about["teacher"] == "assets/quickstart_teacher"
    of_teacher = (out / "0.mp4").read_bytes()
    assert main(words) == 0 and (out / "0.mp4").read_bytes() != of_teacher
    check_refused(capsys, "--captions", run_dir, "--captions", tmp_path / "nowhere.txt")


def test_a_second_sampling_replaces_the_first_and_nothing_else(run_dir):
    assert main([str(run_dir), "--count", "2"]) == 0
    out = run_dir / "samples" / "cli"
    assert clips(out) == {"0.mp4", "1.mp4", "samples.png"}
    assert main([str(run_dir), "--caption", CAPTION]) == 0
    assert clips(out) == {"0.mp4", "samples.png"}
    assert {p.name for p in out.parent.iterdir()} == {"cli"}


def test_a_student_whose_numbers_overflow_writes_nothing(run_dir, capsys):
    """Its weights are finite."""
    file = run_dir / "export" / "student" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["proj_out.weight"] *= 1e38
    save_file(weights, file)
    check_refused(capsys, "3 of 3 clips", run_dir, "--count", "3")
    assert not (run_dir / "samples" / "cli").exists()


def test_a_student_of_another_run_is_sampled_as_it_was_trained(run_dir, tmp_path, caplog):
    other = write_run(
        tmp_path / "other", TEACHER / "transformer", "method.step_list=[1.0,0.5]", "sample.student_steps=[2]"
    )
    foreign = shutil.copytree(TEACHER / "transformer", tmp_path / "foreign")
    about = {"about": {"method": asdict(load_config(other / "config.yaml").method)}, "files": {}}
    (foreign / "fsdp_cp_export.json").write_text(json.dumps(about))

    def sampled(folder, *words):
        assert main([str(folder), "--count", "1", "--out", str(tmp_path / "clips"), *words]) == 0
        return (tmp_path / "clips" / "0.mp4").read_bytes()

    truth = sampled(other, "--steps", "2")
    assert "is a student of" not in caplog.text
    assert sampled(run_dir, "--student", str(foreign)) == truth, "as many steps as the student has"
    assert "1, 0.5 by" in caplog.text and "1, 0.9, 0.75, 0.5 by" in caplog.text
    assert sampled(run_dir, "--student", str(foreign), "--steps", "2", "--sampling", "run") != truth
    config = compose_config(["device=cpu", "mesh.cp=1", f"student.checkpoint={foreign}"])
    student = next(line for line in summary(config, plan_run(config), "") if line.startswith("student"))
    assert "1, 0.5 by" in student, "a run that starts from it"
    unknown = about["about"]["method"] | {"name": "of_tomorrow"}
    (foreign / "fsdp_cp_export.json").write_text(json.dumps({"about": {"method": unknown}, "files": {}}))
    assert main([str(run_dir), "--student", str(foreign)]) == 2


def test_files_of_others_are_never_overwritten(run_dir, tmp_path, capsys):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "0.mp4").write_text("mine")
    before = snapshot(tmp_path)
    for place in (out, run_dir / "export" / "student"):
        check_refused(capsys, f"--out {place}", run_dir, "--out", place, "--count", 1)
    assert snapshot(tmp_path) == before
    (out / "0.mp4").unlink()
    assert main([str(run_dir), "--out", str(out), "--count", "1"]) == 0
    (out / "0.mp4").write_bytes(b"edited")
    before = snapshot(tmp_path)
    check_refused(capsys, "0.mp4", run_dir, "--out", out, "--count", 1)
    assert snapshot(tmp_path) == before


def test_arguments_that_do_not_fit(run_dir, capsys):
    before = snapshot(run_dir)
    for name, value in (
        ("--steps", "0"),
        ("--steps", "99"),
        ("--count", "1000000000"),
        ("--out", run_dir / "config.yaml" / "below"),
        ("--out", "."),
        ("--student", run_dir / "config.yaml"),
    ):
        check_refused(capsys, "student.checkpoint" if name == "--student" else name, run_dir, name, value)
    assert snapshot(run_dir) == before
    several = write_run(run_dir / "several", TEACHER, experiment="quickstart_pdd")
    check_refused(capsys, "--steps 3 must be among method.steps=[1, 2, 4]", several, "--steps", "3")


def test_folders_that_are_no_run(run_dir, tmp_path, capsys):
    check_refused(capsys, "nowhere", tmp_path / "nowhere")
    check_refused(capsys, "config.yaml", tmp_path)
    shutil.rmtree(run_dir / "export")
    check_refused(capsys, "export/student", run_dir)


def test_configurations_of_others(run_dir, capsys):
    text = (run_dir / "config.yaml").read_text()
    for old, new, named in (
        ("seed: 0", "seed: zero", "config.yaml"),
        ("name: dmd2", "name: dmd9", "config.yaml"),
        ("device: cpu", "device: tpu", "device=tpu"),
        ("fps: 8.0", "fps: .nan", "data.fps"),
        ("num_frames: 6", "num_frames: 65", "at most 64"),
        ("seed: 0", "seed: !!python/object/apply:os.system ['true']", "config.yaml"),
        ("seed: 0", "seed: \udcff", "config.yaml"),
    ):
        assert old in text
        (run_dir / "config.yaml").write_bytes(text.replace(old, new, 1).encode("utf-8", "surrogateescape"))
        check_refused(capsys, named, run_dir, "--count", 1)


def test_a_setting_of_another_version_is_left_out_with_a_line(run_dir, caplog):
    file = run_dir / "config.yaml"
    file.write_text(file.read_text().replace("seed: 0", "seed: 0\nearlier: 3"))
    assert load_config(file).seed == 0 and "earlier" in caplog.text


def test_a_setting_is_read_by_its_former_name(run_dir, caplog):
    file, shares = run_dir / "config.yaml", [0.125] * 8
    file.write_text(file.read_text().replace("color_shares: null", f"colour_shares: {shares}"))
    assert load_config(file).data.color_shares == shares and not caplog.text


@contextmanager
def full_disk(size: int):
    """Limit all files to ``size`` bytes, so that writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@slow
def test_a_full_disk_leaves_the_earlier_clips(run_dir, capsys):
    assert main([str(run_dir), "--caption", CAPTION]) == 0
    before = snapshot(run_dir)
    capsys.readouterr()
    with full_disk(2000):
        check_refused(capsys, "--out", run_dir, "--caption", CAPTION)
    assert snapshot(run_dir) == before and {p.name for p in (run_dir / "samples").iterdir()} == {"cli"}
