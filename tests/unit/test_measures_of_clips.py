"""Measures of an evaluation: each finds the damage that it is meant for; prompts are compared in pairs."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from distill.evaluate.comparison import compare, comparison_lines, read_evaluation, summarize, verdict
from distill.evaluate.intervals import mean_interval
from distill.evaluate.measures import MEASURES, clip_measures, prompt_measures
from distill.evaluate.perceptual import embeddings, read_networks
from models.sample import Sample
from tests.oracles.clips import write_dino, write_lpips
from tests.tiers import parametrize
from tests.unit.refused import refused

PROMPTS, SEEDS = 32, 4


def noisy(clips):
    noise = np.random.default_rng(0).normal(0, 8, clips.shape)
    return (clips + noise).round().clip(0, 255).astype(np.uint8)


def frozen(clips):
    return clips[:, :1].repeat(clips.shape[1], axis=1)


def saturated(clips):
    grey = clips.mean(axis=-1, keepdims=True)
    return (grey + 1.3 * (clips - grey)).round().clip(0, 255).astype(np.uint8)


def one_mode(clips):
    return clips[:1].repeat(len(clips), axis=0)


@pytest.fixture(scope="module")
def teacher_clips():
    """The shipped teacher's clips, (seeds, T, H, W, 3) of each prompt."""
    with safe_open("assets/quickstart_teacher/clips_50steps.safetensors", framework="np") as stored:
        clips, captions = stored.get_tensor("clips"), json.loads(stored.metadata()["captions"])
    groups = {}
    for caption, clip in zip(captions, clips, strict=True):
        groups.setdefault(caption, []).append(clip)
    return [np.stack(group[:SEEDS]) for group in groups.values()][:PROMPTS]


def evaluated(prompts, change):
    """Return the values of the teacher's clips and of the changed ones."""
    values = {"teacher": {}, "student": {}}
    for clips in prompts:
        both = {"teacher": clips, "student": change(clips)}
        latents = {name: Sample({"video": torch.from_numpy(x).float()}) for name, x in both.items()}
        for name, measures in prompt_measures(both, latents, "teacher").items():
            for key, numbers in measures.items():
                values[name].setdefault(key, []).append(numbers)
    return values


@parametrize(
    ("change", "meant"),
    [(noisy, {"sharpness", "flicker"}), (frozen, {"static"}), (saturated, {"saturation"}), (one_mode, {"diversity"})],
    quick=1,
)
def test_the_measure_that_is_meant_for_a_damage_finds_it(teacher_clips, change, meant):
    results = summarize(evaluated(teacher_clips, change), "teacher")
    whole, worse = results["teacher"], results["student"]
    shifts = {key: abs(worse[key]["value"] - x["value"]) / (x["standard_error"] or 1e-9) for key, x in whole.items()}
    found = meant & set(sorted(shifts, key=shifts.get)[-2:])
    assert found, shifts
    assert any(not whole[key]["low"] <= worse[key]["value"] <= whole[key]["high"] for key in found)


def test_measures_of_simple_clips():
    black = np.zeros((4, 8, 8, 3), np.uint8)
    assert clip_measures(black) == dict.fromkeys(clip_measures(black), 0.0) | {"static": 1.0}
    blinking = black.copy()
    blinking[1::2] = 255
    assert clip_measures(blinking)["motion"] == clip_measures(blinking)["flicker"] == 1.0
    fading = np.arange(4, dtype=np.uint8)[:, None, None, None] * 51 + black
    assert clip_measures(fading)["motion"] == pytest.approx(0.2) and clip_measures(fading)["flicker"] < 1e-6
    assert clip_measures(fading)["static"] == 0.0, "it moves, without flicker"
    red = black.copy()
    red[..., 0] = 255
    assert clip_measures(red)["saturation"] == 1.0 and clip_measures(red)["contrast"] < 1e-6
    halves = black.copy()
    halves[:, :, 4:] = 255
    assert clip_measures(halves)["contrast"] == pytest.approx(0.5)
    assert clip_measures(halves)["sharpness"] == pytest.approx(2 / 6), "2 of 6 inner columns"


def test_distances_and_diversity():
    x = {"teacher": np.stack([np.full((3, 4, 4, 3), value, np.uint8) for value in (0, 51)])}
    x["student"] = x["teacher"] + 51
    latents = {"teacher": Sample({"video": torch.ones(2, 3)}), "student": Sample({"video": 1.5 * torch.ones(2, 3)})}
    found = prompt_measures(x, latents, "teacher")
    assert found["student"]["distance/pixels"] == pytest.approx([0.2, 0.2])
    assert found["student"]["distance/latents"] == pytest.approx([0.5, 0.5])
    assert found["student"]["diversity"] == pytest.approx([0.2]) and found["student"]["diversity/teacher"] == [1.0]
    assert "distance/pixels" not in found["teacher"]
    alone = prompt_measures({name: clips[:1] for name, clips in x.items()}, latents, None)
    assert "diversity" not in alone["student"] and "distance/pixels" not in alone["student"]


def test_networks_that_measure(tmp_path):
    """LPIPS against the paper's equation 1, and DINO against the cosine of transformers' model."""
    write_lpips(tmp_path / "lpips")
    model = write_dino(tmp_path / "dino")
    found = read_networks(str(tmp_path / "lpips"), str(tmp_path / "dino"))
    x = np.random.default_rng(0).integers(0, 256, (3, 5, 64, 96, 3), dtype=np.uint8)
    clips = {"teacher": x[:2], "student": x[1:]}
    latents = {name: Sample({"video": torch.ones(2, 3)}) for name in clips}
    networks = {name: partial(embeddings, network=of, device=torch.device("cpu")) for name, (of, _) in found.items()}
    values = prompt_measures(clips, latents, "teacher", networks)["student"]

    def column(values):
        return torch.tensor(values)[:, None, None]

    features, small = [], []
    for clip in x[:2]:  # the first clip of the teacher, and of the student
        frames = torch.from_numpy(clip).permute(0, 3, 1, 2) / 255
        features.append((2 * frames - 1 - column([-0.030, -0.088, -0.188])) / column([0.458, 0.448, 0.450]))
        frames = F.interpolate(frames, (224, 224), mode="bicubic", antialias=True)
        small.append((frames - column([0.485, 0.456, 0.406])) / column([0.229, 0.224, 0.225]))
    weights, lpips = torch.load(tmp_path / "lpips" / "lpips_alex.pth"), 0.0
    weights |= torch.load(tmp_path / "lpips" / "alexnet.pth")
    for i, (layer, stride, padding) in enumerate([(0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1)]):
        convolution = weights[f"features.{layer}.weight"], weights[f"features.{layer}.bias"]
        features = [F.conv2d(f, *convolution, stride, padding).relu() for f in features]
        difference = F.normalize(features[0]) - F.normalize(features[1])
        lpips += F.conv2d(difference.square(), weights[f"lin{i}.model.1.weight"]).mean().item()
        features = [F.max_pool2d(f, 3, 2) for f in features] if i < 2 else features
    assert values["distance/lpips"][0] == pytest.approx(lpips, rel=1e-4)
    tokens = [model(frames).last_hidden_state[:, 0] for frames in small]
    assert values["distance/dino"][0] == pytest.approx(1 - F.cosine_similarity(*tokens).mean().item(), abs=1e-5)
    assert {"diversity/lpips", "diversity/dino"} <= values.keys() <= MEASURES.keys()


def test_paired_differences_see_what_the_means_do_not():
    rng = np.random.default_rng(0)
    of_prompt = rng.lognormal(size=(40, 1))
    teacher = of_prompt + 0.01 * rng.standard_normal((40, 5))
    values = {"teacher": {"motion": teacher.tolist()}, "student": {"motion": (teacher + 0.02).tolist()}}
    values["student"]["motion"][7] = [None] * 5
    result = summarize(values, "teacher")["student"]["motion"]
    assert result["low"] < np.mean(teacher) < result["high"] and result["prompts"] == 39
    assert verdict(result["difference"]) == "higher" and result["difference"]["value"] == pytest.approx(0.02)


def test_a_difference_is_of_equal_prompts_and_of_means_over_their_seeds():
    rng = np.random.default_rng(0)
    of_prompt = rng.lognormal(size=(20, 1))
    ours, theirs = (of_prompt + rng.standard_normal((20, 5)) for _ in range(2))
    theirs[4] = np.nan
    values = {"here": {"motion": ours.tolist()}, "there": {"motion": theirs.tolist()}}
    wanted = mean_interval(np.delete((ours - theirs).mean(axis=1), 4))
    found = summarize(values, "there")["here"]["motion"]["difference"]
    assert found["prompts"] == 19
    assert {key: found[key] for key in wanted} == pytest.approx({key: float(x) for key, x in wanted.items()})
    whole = {"protocol": {}, "made": {}, "participants": {name: {"role": "student"} for name in values}}
    one, other = (whole | {"participants": {name: {"role": "student"}}, "values": values} for name in values)
    (pair,) = compare(one, other)["participants"]
    assert pair["differences"]["motion"] == found, "ours less theirs"


def test_a_share_of_few_clips_is_unsure():
    def share(count):
        clips = np.zeros(200)
        clips[:count] = 1
        return summarize({"student": {"static": clips.reshape(40, 5).tolist()}}, None)["student"]["static"]

    assert share(9)["unsure"] and share(191)["unsure"] and not share(10)["unsure"]


def test_few_prompts_have_no_interval():
    """All draws of 2 prompts that tell something have the same mean."""
    values = {name: {"motion": [[0.1 * i + x] for i in range(7)]} for name, x in (("teacher", 0.0), ("student", 0.2))}
    found = summarize(values, "teacher")["student"]["motion"]
    assert found["value"] == pytest.approx(0.5) and found["low"] is None and verdict(found["difference"]) == "unsure"


def evaluation(teacher_steps=50, **changed):
    """Content of an ``evaluation.json`` of nine prompts."""
    measures = {"motion": 0.1, "distance/pixels": 0.2, "diversity/teacher": 0.3}
    values = {"student": measures, "teacher": {"motion": 0.1}}
    facts = {name: {"role": name, "steps": steps} for name, steps in (("student", 4), ("teacher", teacher_steps))}
    sizes = dict.fromkeys(("negative_prompt", "num_frames", "height", "width", "fps"), 1)
    whole = {
        "protocol": {"seeds": 1, "decoder": "x", "precision": "fp32"} | sizes,
        "prompts": list("abcdefghi"),
        "participants": facts,
        "values": {name: {key: [[x + i] for i in range(9)] for key, x in of.items()} for name, of in values.items()},
        "made": {"commit": "1"},
    }
    return whole | changed


def test_evaluations_of_different_protocols_get_no_verdict():
    found = compare(evaluation(), evaluation(protocol={**evaluation()["protocol"], "decoder": "y"}))
    assert (found["protocol"], found["participants"]) == (["decoder"], [])
    other = evaluation(made={"commit": "2"})
    other["participants"]["student"]["steps"] = 2
    student, teacher = compare(evaluation(), other)["participants"]
    assert (student["facts"], teacher["facts"]) == (["steps", "commit"], ["commit"])
    assert {key: x["value"] for key, x in student["differences"].items()} == {
        "motion": 0, "distance/pixels": 0, "diversity/teacher": 0,
    }  # fmt: skip


def test_distances_to_another_reference_get_no_verdict():
    found = compare(evaluation(), evaluation(teacher_steps=2))
    student, teacher = found["participants"]
    assert found["reference"] == ["steps"] and student["differences"].keys() == teacher["differences"].keys()
    assert student["left_out"] == ["distance/pixels", "diversity/teacher"] and teacher["left_out"] == []
    named = [line for line in comparison_lines(found, "--like") if "diversity/teacher" in line]
    assert len(named) == 1 and "steps" in named[0]
    other = evaluation()
    del other["participants"]["teacher"]
    assert "role" in compare(evaluation(), other)["reference"], "no reference is another one"


def test_the_reference_is_the_first_teacher():
    def with_second(first_steps, second_steps):
        found = evaluation(teacher_steps=first_steps)
        found["participants"]["second"] = {"role": "teacher", "steps": second_steps}
        found["values"]["second"] = found["values"]["teacher"]
        return found

    assert compare(with_second(50, 4), with_second(50, 2))["reference"] == []
    assert compare(with_second(50, 4), with_second(2, 4))["reference"] == ["steps"]


def test_a_verdict_needs_an_interval_on_one_side_of_nothing():
    bounds = {"higher": (0.1, 0.3), "lower": (-0.3, -0.1), "no difference shown": (-0.1, 0.3), "unsure": (None, None)}
    assert {name: verdict({"low": low, "high": high}) for name, (low, high) in bounds.items()} == {n: n for n in bounds}
    assert verdict({"low": 0.1, "high": 0.3, "unsure": True}) == "unsure"


def test_an_evaluation_to_repeat_is_read_whole_before_anything_is_sampled(tmp_path):
    file = tmp_path / "evaluation.json"
    whole = evaluation()
    for content in (whole, whole | {"captions": [""] * 9, "images": []}):
        file.write_text(json.dumps(content))
        assert read_evaluation(file) == content
    values = whole["values"]["student"]
    damaged = [
        {"values": {**whole["values"], "student": {**values, "motion": values["motion"][:-1]}}},
        {"values": {**whole["values"], "student": {**values, "motion": [0.1] * 8 + [["x"]]}}},
        {"values": {"student": values}},
        {"participants": {"student": {"steps": 4}}},
        {"participants": {}},
        {"made": None},
        {"captions": ["a"]},
    ]
    for change in damaged:
        file.write_text(json.dumps(whole | change))
        with refused("--like"):
            read_evaluation(file)
