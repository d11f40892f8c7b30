"""``python -m distill.evaluate`` on a run directory: its files, repetition, resume, and one line for each mistake."""

import json
import shutil

import av
import pytest

from distill.evaluate.command import main
from tests.e2e.launch import forked
from tests.oracles.clips import write_dino, write_lpips
from tests.unit.damage import snapshot
from tests.unit.test_sample_command import TEACHER, full_disk, write_run

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


def refused(capsys, named, arguments):
    assert main([str(word) for word in arguments]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and named in line, line


@pytest.mark.slow
def test_the_files_of_an_evaluation(home):
    found = result(home, "done")
    student, teacher = found["participants"]
    assert found["prompts"] == PROMPTS, "a prompt that is there twice is merged"
    assert [found["participants"][name]["role"] for name in (student, teacher)] == ["student", "teacher"]
    assert found["values"][teacher].keys() <= found["values"][student].keys()
    assert all(len(numbers) == 3 for numbers in found["values"][student].values())
    assert [len(numbers) for numbers in found["values"][student]["motion"]] == [2, 2, 2]
    assert found["results"][student]["distance/pixels"]["value"] > 0 and "colour_accuracy" in found["report"][student]
    clips = sorted((home / "done" / "clips").glob("*/*.mp4"))
    assert len(clips) == 12
    with av.open(str(clips[0])) as video:
        assert sum(1 for _ in video.decode(video=0)) == 6
    page = (home / "done" / "evaluation.html").read_text()
    assert all(prompt in page for prompt in PROMPTS) and page.count('<div class="film"') == 6
    assert f"{found['results'][student]['motion']['value']:.4g}" in (home / "done" / "evaluation.md").read_text()


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_killed_evaluation_continues_to_the_same_numbers(home, caplog):
    shutil.copytree(home / "done", home / "killed")
    for name in ("evaluation.json", "evaluation.html", "evaluation.md", "measures/00001.json"):
        (home / "killed" / name).unlink()
    latents = sorted((home / "killed" / "latents").glob("*/*"))
    assert len(latents) == 12
    kept = {path: path.stat().st_mtime_ns for path in latents[6:]}
    for path in latents[1:6:2]:
        path.unlink()
    assert main(words(home, "killed")) == 0
    assert result(home, "killed")["values"] == result(home, "done")["values"]
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items()), "the teacher is not sampled again"


@pytest.mark.slow
def test_mistakes(home, tmp_path, capsys):
    before = snapshot(home / "done")
    run, prompts = home / "run", home / "prompts.txt"
    (tmp_path / "empty.txt").write_text("\n")
    write_run(tmp_path / "larger", TEACHER, "data.height=32")
    new = ["--out", tmp_path / "new"]
    refused(capsys, "seeds", [*words(home, "done"), "--seeds", "3"])
    refused(capsys, "participant", [run, "--prompts", prompts, "--seeds", 2, "--out", home / "done"])
    refused(capsys, "--seeds", [run, "--prompts", prompts, "--seeds", 0, *new])
    refused(capsys, "--prompts", [run, "--prompts", tmp_path / "empty.txt", *new])
    refused(capsys, "--prompts", [run, *new])
    for cp in (0, 2):
        refused(capsys, "mesh.cp", [run, "--prompts", prompts, "--cp", cp, *new])
    refused(capsys, "larger", [run, tmp_path / "larger", "--prompts", prompts, *new])
    refused(capsys, "nowhere", [run, tmp_path / "nowhere", "--prompts", prompts, *new])
    refused(capsys, "twice", [run, run, "--prompts", prompts, *new])
    write_lpips(tmp_path / "lpips")
    refused(capsys, "16 x 16", [run, "--prompts", prompts, "--lpips", tmp_path / "lpips", *new])
    refused(capsys, "alexnet.pth", [run, "--prompts", prompts, "--lpips", tmp_path, *new])
    refused(capsys, "--dino", [run, "--prompts", prompts, "--dino", tmp_path, *new])
    refused(capsys, "other dino", [run, "--prompts", prompts, "--seeds", 2, "--out", home / "done"])
    refused(capsys, "--like", [run, "--like", prompts, *new])
    refused(capsys, "teacher@", [run, "teacher@0", "--prompts", prompts, *new])
    refused(capsys, "experiment=", [run / "export" / "student", "--prompts", prompts, *new])
    like = home / "done" / "evaluation.json"
    refused(capsys, "--suite", [run, "--like", like, "--suite", "vbench", *new])
    refused(capsys, "--dimensions", [run, "--prompts", prompts, *new, "--dimensions", "scene"])
    for damage in ({"protocol": {}}, {"prompts": []}, {"protocol": result(home, "done")["protocol"] | {"seeds": "2"}}):
        (tmp_path / "damaged.json").write_text(json.dumps(result(home, "done") | damage))
        refused(capsys, "--like", [run, "--like", tmp_path / "damaged.json", *new])
    (tmp_path / "words.txt").write_text("a red circle\n")  # known words, of no caption that can be measured
    refused(capsys, "--prompts", [run, "--prompts", tmp_path / "words.txt", *new])
    images = ["experiment=quickstart", "device=cpu", "data=video_folder", f"data.path={tmp_path}"]
    images += [f"data.encoders={TEACHER}", "data.image=first_frame"]
    refused(capsys, "data.image", [TEACHER, *images, "--prompts", prompts, *new])
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    for name in ("clips", "vbench.json"):
        (tmp_path / "mine" / name).write_text("mine")
        refused(capsys, name, [run, "--prompts", prompts, "--out", tmp_path / "mine"])
        (tmp_path / "mine" / name).unlink()
    with full_disk(4000):
        refused(capsys, "cannot be written", words(home, "full"))
    assert snapshot(home / "done") == before


@pytest.mark.slow
def test_a_diffusers_folder_with_the_settings_of_an_experiment(home):
    out = home / "folder"
    settings = ["experiment=quickstart", "device=cpu"]
    arguments = [TEACHER, *settings, "teacher@2", "--prompts", home / "prompts.txt", "--seeds", "1", "--out", out]
    assert main([str(word) for word in arguments]) == 0
    student, teacher = result(home, "folder")["participants"].values()
    assert student["weights"] == teacher["weights"] and student["steps"] == 4


@pytest.mark.slow
def test_sound_is_measured(home):
    out, sound = home / "sound", TEACHER.with_name("quickstart_sound_teacher")
    arguments = [sound, "experiment=quickstart_sound", "device=cpu", "--prompts", home / "prompts.txt", "--seeds", "1"]
    assert main([*map(str, arguments), "--out", str(out)]) == 0
    assert set(result(home, "sound")["report"].popitem()[1]) > set(result(home, "done")["report"].popitem()[1])
