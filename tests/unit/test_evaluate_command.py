"""``python -m distill.evaluate`` on a run directory: its files, repetition, resume, and one line for each mistake."""

import json
import shutil
from argparse import Namespace
from functools import partial

import av
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from distill import sample
from distill.evaluate.command import main
from distill.evaluate.comparison import differing
from distill.evaluate.plan import Prompts, _deciding, plan_evaluation
from tests.e2e.launch import forked
from tests.oracles.clips import write_dino, write_lpips
from tests.tiers import slow
from tests.tiny_pipeline import build_tiny_pipeline, render_clips
from tests.unit.refused import check_command, snapshot
from tests.unit.test_sample_command import TEACHER, full_disk, write_run
from train import main as train

PROMPTS = ["a red circle growing", "a blue square falling", "a green square blinking"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run, prompts, and an evaluation of the run's student in one step next to its teacher in two."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_run(folder / "run", TEACHER)
    write_dino(folder / "dino")
    (folder / "prompts.txt").write_text("\n".join([*PROMPTS, PROMPTS[0]]))
    assert main(words(folder, "done")) == 0
    return folder


def words(home, out, *more, like=False):
    protocol = (
        ["--like", home / "done" / "evaluation.json"] if like else ["--prompts", home / "prompts.txt", "--seeds", 2]
    )
    protocol += ["--dino", home / "dino"]
    return [str(word) for word in (home / "run@1", "teacher@2", *protocol, "--out", home / out, *more)]


def result(home, out):
    return json.loads((home / out / "evaluation.json").read_text())


check_refused = partial(check_command, main)


def planned(tmp_path, *what, **options):
    """Return the plan of an evaluation, without sampling."""
    names = "prompts like suite extended vbench_python dimensions lpips dino precision device".split()
    values = dict.fromkeys(names) | {"seeds": 2, "cp": 1, "out": str(tmp_path / "out")} | options
    return plan_evaluation(Namespace(what=[str(word) for word in what], **values))


def test_a_plan_takes_the_protocol_of_another_evaluation_and_tells_other_weights_apart(tmp_path):
    run = write_run(tmp_path / "run", TEACHER)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    first = planned(tmp_path, run, prompts=str(tmp_path / "prompts.txt"), precision="bf16", seeds=3)
    values = {name: {"motion": [[0.1] * 3] * 3} for name in first.participants()}
    content = {"protocol": first.protocol, "participants": first.participants(), "values": values}
    content |= {"made": {"commit": "1"}, "prompts": first.prompts}
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    again = planned(tmp_path, run, like=str(tmp_path / "evaluation.json"))
    assert again.protocol == first.protocol and first.protocol["precision"] == "bf16"
    assert planned(tmp_path, run, prompts=str(tmp_path / "prompts.txt")).protocol["precision"] == "fp32"
    sparse = write_run(tmp_path / "sparse", TEACHER, "teacher.sparse_attention.sparsity=0.5")
    facts = planned(tmp_path, sparse, "teacher", prompts=str(tmp_path / "prompts.txt")).participants().values()
    assert [role.get("sparse", {}).get("sparsity") for role in facts] == [None, 0.5]
    adapters, weights = tmp_path / "adapters", []
    adapters.mkdir()
    for value in (0.1, 0.2):
        shapes = {"lora_A": (2, 128), "lora_B": (128, 2)}
        named = {f"transformer.blocks.0.attn1.to_q.{x}.weight": torch.full(shape, value) for x, shape in shapes.items()}
        save_file(named, adapters / "pytorch_lora_weights.safetensors")
        plan = planned(tmp_path, adapters, run, prompts=str(tmp_path / "prompts.txt"))
        weights.append({name: facts["weights"] for name, facts in plan.participants().items()})
    changed, student, teacher = differing(*weights), *list(weights[0])[1:]
    assert changed == [f"{adapters}, 4 steps"] and weights[0][student] == weights[0][teacher]


def test_a_protocol_has_the_content_of_images(tmp_path):
    image, decide = tmp_path / "image.png", []
    for content in (b"one", b"two!"):
        image.write_bytes(content)
        decide.append([*_deciding(Prompts({"a": 1}, ["a"], [str(image)]))])
    assert decide[0][0] == decide[1][0] == "a" and decide[0] != decide[1]


@slow
def test_the_files_of_an_evaluation(home):
    found = result(home, "done")
    student, teacher = found["participants"]
    assert found["prompts"] == PROMPTS, "a prompt that is there twice is merged"
    assert [found["participants"][name]["role"] for name in (student, teacher)] == ["student", "teacher"]
    assert found["values"][teacher].keys() <= found["values"][student].keys()
    assert all(len(numbers) == 3 for numbers in found["values"][student].values())
    assert [len(numbers) for numbers in found["values"][student]["motion"]] == [2, 2, 2]
    assert found["results"][student]["distance/pixels"]["value"] > 0 and "color_accuracy" in found["report"][student]
    clips = sorted((home / "done" / "clips").glob("*/*.mp4"))
    assert len(clips) == 12
    with av.open(str(clips[0])) as video:
        assert sum(1 for _ in video.decode(video=0)) == 6
    page = (home / "done" / "evaluation.html").read_text()
    assert all(prompt in page for prompt in PROMPTS) and page.count('<div class="film"') == 6
    assert f"{found['results'][student]['motion']['value']:.4g}" in (home / "done" / "evaluation.md").read_text()


@slow
def test_a_repetition_on_the_same_mesh_and_on_another(home, capsys):
    assert main(words(home, "again", like=True)) == 0
    assert result(home, "again")["values"] == result(home, "done")["values"]
    assert "no verdict" not in capsys.readouterr().out
    assert all(
        difference["value"] == 0
        for pair in result(home, "again")["compared"]["participants"]
        for difference in pair["differences"].values()
    )
    assert forked(4, "distill.evaluate", *words(home, "ranks", "--cp", 2, like=True)).wait().returncode == 0
    for name, measures in result(home, "done")["results"].items():
        for key, measure in measures.items():
            other = result(home, "ranks")["results"][name][key]["value"]
            assert other == pytest.approx(measure["value"], abs=1e-4), (name, key)


@slow
def test_a_killed_evaluation_continues_to_the_same_numbers(home):
    shutil.copytree(home / "done", home / "killed")
    for name in ("evaluation.json", "evaluation.html", "evaluation.md", "measures/00001.json"):
        (home / "killed" / name).unlink()
    latents = sorted((home / "killed" / "latents").glob("*/*"))
    assert len(latents) == 12
    kept = {path: path.stat().st_mtime_ns for path in latents[6:]}
    for path in latents[1:6:2]:
        path.unlink()
    clips = {path.name for path in (home / "killed" / "clips").iterdir()}
    run, teacher, *protocol = words(home, "killed")
    assert main([teacher, run, *protocol]) == 0, "in another order"
    assert result(home, "killed")["values"] == result(home, "done")["values"]
    assert list(result(home, "killed")["participants"]) == list(result(home, "done")["participants"])
    assert {path.name for path in (home / "killed" / "clips").iterdir()} == clips
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items()), "the teacher is not sampled again"


@slow
def test_mistakes(home, tmp_path, capsys):
    before = snapshot(home / "done")
    run, prompts = home / "run", home / "prompts.txt"
    (tmp_path / "empty.txt").write_text("\n")
    write_run(tmp_path / "larger", TEACHER, "data.height=32")
    new = ["--out", tmp_path / "new"]
    check_refused(capsys, "seeds", *words(home, "done"), "--seeds", "3")
    check_refused(capsys, "participant", run, "--prompts", prompts, "--seeds", 2, "--out", home / "done")
    check_refused(capsys, "--seeds", run, "--prompts", prompts, "--seeds", 0, *new)
    check_refused(capsys, "--prompts", run, "--prompts", tmp_path / "empty.txt", *new)
    check_refused(capsys, "--prompts", run, *new)
    for cp in (0, 2):
        check_refused(capsys, "mesh.cp", run, "--prompts", prompts, "--cp", cp, *new)
    check_refused(capsys, "larger", run, tmp_path / "larger", "--prompts", prompts, *new)
    check_refused(capsys, "nowhere", run, tmp_path / "nowhere", "--prompts", prompts, *new)
    check_refused(capsys, "twice", run, run, "--prompts", prompts, *new)
    write_lpips(tmp_path / "lpips")
    check_refused(capsys, "16 x 16", run, "--prompts", prompts, "--lpips", tmp_path / "lpips", *new)
    check_refused(capsys, "alexnet.pth", run, "--prompts", prompts, "--lpips", tmp_path, *new)
    check_refused(capsys, "--dino", run, "--prompts", prompts, "--dino", tmp_path, *new)
    check_refused(capsys, "other dino", run, "--prompts", prompts, "--seeds", 2, "--out", home / "done")
    check_refused(capsys, "--like", run, "--like", prompts, *new)
    check_refused(capsys, "teacher@", run, "teacher@0", "--prompts", prompts, *new)
    check_refused(capsys, "experiment=", run / "export" / "student", "--prompts", prompts, *new)
    like = home / "done" / "evaluation.json"
    check_refused(capsys, "--suite", run, "--like", like, "--suite", "vbench", *new)
    check_refused(capsys, "--dimensions", run, "--prompts", prompts, *new, "--dimensions", "scene")
    for damage in ({"protocol": {}}, {"prompts": []}, {"protocol": result(home, "done")["protocol"] | {"seeds": "2"}}):
        (tmp_path / "damaged.json").write_text(json.dumps(result(home, "done") | damage))
        check_refused(capsys, "--like", run, "--like", tmp_path / "damaged.json", *new)
    (tmp_path / "words.txt").write_text("a red circle\n")  # known words, of no caption that can be measured
    check_refused(capsys, "--prompts", run, "--prompts", tmp_path / "words.txt", *new)
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    for name in ("clips", "vbench.json"):
        (tmp_path / "mine" / name).write_text("mine")
        check_refused(capsys, name, run, "--prompts", prompts, "--out", tmp_path / "mine")
        (tmp_path / "mine" / name).unlink()
    with full_disk(4000):
        check_refused(capsys, "cannot be written", *words(home, "full"))
    assert snapshot(home / "done") == before


@slow
def test_a_diffusers_folder_with_the_settings_of_an_experiment(home):
    out = home / "folder"
    settings = ["experiment=quickstart", "device=cpu"]
    arguments = [TEACHER, *settings, "teacher@2", "--prompts", home / "prompts.txt", "--seeds", "1", "--out", out]
    assert main([str(word) for word in arguments]) == 0
    student, teacher = result(home, "folder")["participants"].values()
    assert student["weights"] == teacher["weights"] and student["steps"] == 4


@slow
def test_sound_is_measured(home):
    out, sound = home / "sound", TEACHER.with_name("quickstart_sound_teacher")
    arguments = [sound, "experiment=quickstart_sound", "device=cpu", "--prompts", home / "prompts.txt", "--seeds", "1"]
    assert main([*map(str, arguments), "--out", str(out)]) == 0
    assert set(result(home, "sound")["report"].popitem()[1]) > set(result(home, "done")["report"].popitem()[1])


@slow
def test_a_student_of_images(tmp_path, capsys):
    """It trains on captions with images, without clips. Its evaluation samples as ``distill.sample`` does."""
    pipeline = build_tiny_pipeline(tmp_path / "pipeline", image=True)
    pictures = sorted(render_clips(tmp_path / "clips", 2, frames=1, fps=8, height=32, width=48).glob("*.mp4"))
    texts, run, out = ["a red square", "a green square"], tmp_path / "run", tmp_path / "out"
    table = [{"image": f"clips/{file.name}", "caption": text} for file, text in zip(pictures, texts, strict=True)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, table)))
    assert train([
        "experiment=quickstart", "device=cpu", "mesh.cp=1", "data=captions", f"data.path={prompts}", "steps=2",
        f"data.encoders={pipeline}", "data.image=first_frame", "data.num_frames=5", "data.height=32", "data.width=48",
        "batch_size=2", "sample.student_steps=[2]", "sample.teacher_steps=[]",
        "sample.report_clips=0", *(f"{role}.checkpoint={pipeline}" for role in ("teacher", "student", "fake")),
        "method.fake_updates_per_student_update=1", "student.ema.enabled=false", f"run_dir={run}",
    ]) == 0  # fmt: skip
    words = [f"{run}@2", "teacher@1", "--prompts", prompts, "--seeds", 1]
    assert main([str(word) for word in (*words, "--out", out)]) == 0
    found = json.loads((out / "evaluation.json").read_text())
    assert found["images"] == [str(file) for file in pictures]

    def frames(file):
        with av.open(str(file)) as video:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]).astype(float)

    made = [frames(file) for file in sorted((out / "clips").glob("0_*/*.mp4"))]
    for order in (1, -1):
        images = [word for file, text in zip(pictures[::order], texts, strict=True)
                  for word in ("--caption", text, "--image", str(file))]  # fmt: skip
        assert sample.main([str(run), "--steps", "2", "--out", str(tmp_path / f"sampled{order}"), *images]) == 0
        off = [abs(made[i] - frames(tmp_path / f"sampled{order}" / f"{i}.mp4")).mean() for i in (0, 1)]
        assert max(off) < 1e-6 if order == 1 else min(off) > 0.1, f"{off}: the check can tell images apart"
    like = [f"{run}@2", "teacher@1", "--like", out / "evaluation.json"]
    assert main([str(word) for word in (*like, "--out", tmp_path / "again")]) == 0
    assert result(tmp_path, "again")["values"] == found["values"]
    new = ["--out", tmp_path / "new"]
    capsys.readouterr()
    (tmp_path / "clips").rename(tmp_path / "moved")
    check_refused(capsys, "--prompts", *like, *new)
    prompts.write_text(prompts.read_text().replace("clips/", "moved/"))
    assert main([str(word) for word in (*like, "--prompts", prompts, "--out", tmp_path / "elsewhere")]) == 0
    assert result(tmp_path, "elsewhere")["compared"]["protocol"] == []
    (tmp_path / "moved").rename(tmp_path / "clips")
    capsys.readouterr()
    head = "image,caption\n"
    for wrong in ("a red square\n", head, f"{head}clips/none.mp4,a\n", f"{head}clips/clip_0.mp4,\n"):
        (tmp_path / "wrong.csv").write_text(wrong)
        named = "none.mp4" if "none" in wrong else "--prompts"
        check_refused(capsys, named, *words[:3], tmp_path / "wrong.csv", *new)
    prompts.write_text((json.dumps(table[0]) + "\n") * 3)
    check_refused(capsys, "twice", *words, *new)
    prompts.write_text("".join(json.dumps(row | {"caption": texts[0]}) + "\n" for row in (table[1], table[0])))
    assert main([str(word) for word in (*words, "--out", tmp_path / "repeated")]) == 0
    repeated = result(tmp_path, "repeated")
    assert repeated["captions"] == [texts[0]] * 2 and repeated["images"] == [str(pictures[1]), str(pictures[0])]
    assert repeated["prompts"] == [texts[0], f"{texts[0]} ({table[0]['image']})"]
