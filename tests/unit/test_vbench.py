"""VBench: which clips its suite has, folders of clips, totals, and scores by a package in another process."""

import json
import sys

import pytest

from distill.evaluate import vbench
from distill.evaluate.command import main
from fsdp_cp.errors import UserError
from tests.unit.refused import refused
from tests.unit.test_sample_command import TEACHER, write_run

SUITE = [
    {"prompt_en": "a red circle growing", "dimension": ["subject_consistency", "dynamic_degree"]},
    {"prompt_en": "a blue square falling", "dimension": ["temporal_flickering"]},
    {"prompt_en": "a red circle growing", "dimension": ["appearance_style"], "auxiliary_info": {}},
]
PACKAGE = '''"""Package of the interface and the JSON of vbench 0.1.5, with its temporal flickering."""
import json, os
import av, numpy as np

class VBench:
    def __init__(self, device, full_info_dir, output_path):
        self.info, self.out = full_info_dir, output_path
        os.makedirs(output_path, exist_ok=True)

    def evaluate(self, videos_path, name, dimension_list, local):
        (dimension,), clips = dimension_list, []
        for entry in json.load(open(self.info)):
            for i in range(5) if dimension in entry["dimension"] else ():
                path = os.path.join(videos_path, f"{entry['prompt_en']}-{i}.mp4")
                with av.open(path) as video:
                    frames = np.stack([f.to_ndarray(format="rgb24") for f in video.decode(video=0)]).astype(float)
                clips.append({"video_path": path, "video_results": 1 - abs(np.diff(frames, axis=0)).mean() / 255})
        mean = sum(clip["video_results"] for clip in clips) / len(clips)
        json.dump({dimension: [mean, clips]}, open(os.path.join(self.out, f"{name}_eval_results.json"), "w"))
'''


def test_the_clips_of_a_suite():
    assert vbench.seeds_of(SUITE) == {"a blue square falling": 25, "a red circle growing": 5}


def test_totals_need_all_dimensions():
    """The scripts in the repository: dynamic degree counts half, and quality four times as much as semantic."""
    best = {name: dimension.most for name, dimension in vbench.DIMENSIONS.items()}
    assert vbench.totals(best) == pytest.approx({"quality": 1, "semantic": 1, "total": 1})
    assert vbench.totals(best | {"dynamic_degree": 0.0})["quality"] == pytest.approx(6 / 6.5)
    assert vbench.totals(best | {"scene": 0.0})["total"] == pytest.approx(1 - 1 / 9 / 5)
    assert vbench.totals({name: x for name, x in best.items() if name != "scene"}) == {"quality": pytest.approx(1)}


def test_weights_and_packages_that_are_missing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(vbench.CACHE, str(tmp_path))
    with refused("setuptools<81"):
        vbench.check_package(sys.executable, ["scene"])
    (tmp_path / "vbench").mkdir()
    (tmp_path / "vbench" / "__init__.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with refused("amt-s.pth"):
        vbench.check_package(sys.executable, ["motion_smoothness"])
    assert vbench.check_package(sys.executable, ["color", vbench.FLICKERING]) == [vbench.FLICKERING]
    assert "color" in caplog.text and "detectron2" in caplog.text
    (tmp_path / "old").write_text(f'#!/bin/sh\n[ "$1" = -P ] && exit 2\nexec {sys.executable} "$@"\n')
    (tmp_path / "old").chmod(0o755)
    with pytest.raises(UserError, match=r"3\.11"):
        vbench.check_package(tmp_path / "old", [])
    where = {"videos": tmp_path / "videos", "info": tmp_path / "info", "out": tmp_path / "scores", "device": "cpu"}
    # A filtered score that is there is not shown as one without the filter, nor the reverse.
    for folder, value in ((where["out"], 0.5), (where["out"] / "unfiltered", 0.25)):
        folder.mkdir(parents=True)
        (folder / f"{vbench.FLICKERING}_eval_results.json").write_text(json.dumps({vbench.FLICKERING: [value, []]}))
    unfiltered = vbench.score(vbench.FLICKERING, python=None, **where)
    (tmp_path / "videos_static").mkdir()
    (tmp_path / "videos_static" / "filtered.json").write_text("{}")
    filtered = vbench.score(vbench.FLICKERING, python=None, **where)
    assert (unfiltered["value"], filtered["value"], filtered["note"]) == (0.25, 0.5, "") and unfiltered["note"]


def test_a_dimension_of_right_and_wrong_has_the_interval_of_a_share(tmp_path):
    """If all clips are right, a mean has no width; a share has, and stays at most 1."""
    clips = [{"video_path": f"prompt {i}-{seed}.mp4", "video_results": 1.0} for i in range(10) for seed in range(5)]
    found = {}
    for dimension in ("human_action", "aesthetic_quality"):
        (tmp_path / f"{dimension}_eval_results.json").write_text(json.dumps({dimension: [1.0, clips]}))
        where = {"videos": tmp_path, "info": tmp_path, "out": tmp_path, "device": "cpu"}
        found[dimension] = vbench.score(dimension, python=None, **where)
    assert 0.6 < found["human_action"]["low"] < 0.75 and found["human_action"]["high"] == pytest.approx(1)
    assert found["aesthetic_quality"]["low"] == 1 and found["human_action"]["prompts"] == 10


@pytest.mark.slow
def test_a_suite_is_sampled_and_scored(tmp_path, monkeypatch, capsys):
    (tmp_path / "vbench").mkdir()
    (tmp_path / "vbench" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "suite.json").write_text(json.dumps(SUITE))
    run, out = write_run(tmp_path / "run", TEACHER), tmp_path / "out"
    words = [f"{run}@1", "teacher@1", "--suite", "vbench", "--prompts", tmp_path / "suite.json", "--out", out]
    (tmp_path / "extended.txt").write_text("a red circle blinking\na blue square growing\nan unused line\n")
    words = [*map(str, words), "--dimensions", "temporal_flickering", "--extended", str(tmp_path / "extended.txt")]
    assert main(words) == 0
    assert "vbench_process.py" in capsys.readouterr().out, "the command that is left"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main([*words, "--vbench-python", sys.executable]) == 0
    standard, flickering = (
        next(path for path in (out / "vbench").iterdir() if path.name.endswith(end) and path.name[0] == "0")
        for end in ("step", "step_flickering")
    )
    assert {path.name for path in standard.iterdir()} == {f"a red circle growing-{i}.mp4" for i in range(5)}
    assert {path.name for path in flickering.iterdir()} == {f"a blue square falling-{i}.mp4" for i in range(25)}
    assert all(path.resolve().is_file() for path in standard.iterdir())
    assert len([*(out / "latents").glob("0_*/*")]) == 30, "prompts of five seeds have no more"
    found = json.loads((out / "vbench.json").read_text())[f"{run}, 1 step"]
    assert json.loads((out / "evaluation.json").read_text())["protocol"]["seeds"] == [5, 25]
    assert json.loads((out / "evaluation.json").read_text())["captions"] == [
        "a blue square growing", "a red circle blinking",
    ]  # fmt: skip
    assert found["totals"] == {} and "unfiltered" in found["dimensions"]["temporal_flickering"]["note"]
    values = json.loads((out / "evaluation.json").read_text())["values"][f"{run}, 1 step"]["motion"]
    assert [len(numbers) for numbers in values] == [5, 5]
    ours = 1 - sum(values[0][:5]) / 5
    assert found["dimensions"]["temporal_flickering"]["value"] == pytest.approx(ours, abs=5e-3), "up to H.264"
