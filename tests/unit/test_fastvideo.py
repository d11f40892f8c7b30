"""FastVideo's folder of a student: both ways bit by bit, its file of times and sparse attention, and what it lacks."""

import json

import pytest
import torch

from fsdp_cp.checkpoint.save_load import Checkpoints
from models import verify
from models.export import main
from models.families.minimax_h3 import MiniMaxH3
from models.families.registry import family_of
from models.files.checkpoint_files import inspect_transformer, tensor_reader
from models.files.fastvideo import FILE, contract
from models.roles.role_plan import plan_role
from models.sample import AUDIO, VIDEO, shift_time
from models.sparse import FILE as SPARSE_FILE
from models.sparse import SparseSettings
from tests.unit.refused import refused

SPARSE = SparseSettings(sparsity=0.9)
GATES = {"wan": "blocks.1.to_gate_compress.bias", "minimax_h3": "transformer_blocks.1.attn.to_gate_compress.weight"}
EVEN = [shift_time(u, 12.0) for u in (1.0, 0.75, 0.5, 0.25)]


def _tensors(folder):
    found = inspect_transformer(str(folder), "student.checkpoint")
    read = tensor_reader(found)
    return {name: read(name) for name in found.shapes}, found.config


def _write_run(folder, family, sparse, times=EVEN, **more):
    """Write a checkpoint of a trained sparse student with random weights; return these."""
    examples = family_of(family, "student").examples()
    verify.write_example(folder / "network", family, next(iter(examples.values())), sparse)
    weights, config = _tensors(folder / "network")
    few_steps = {"times": list(times), "stochastic": family == "wan", "boundaries": [], "experts": []}
    state = {"step": 1, "configs": {"student": config}, "few_steps": few_steps} | more
    state["settings"] = {"method": {"name": "dmd2"}, "student": {"family": family}}
    state["sparse"] = {"student": json.loads((folder / "network" / SPARSE_FILE).read_text())}
    Checkpoints(folder / "run" / "checkpoints", keep=0).save(1, {"student": {"weights": weights}}, state)
    return weights


@pytest.mark.parametrize("family", GATES)
def test_a_round_trip_is_exact(tmp_path, family):
    weights, out = _write_run(tmp_path, family, SPARSE), tmp_path / "out"
    assert GATES[family] in weights and weights[GATES[family]].any()
    assert main([str(tmp_path / "run"), str(out), "--format", "fastvideo"]) == 0
    again, _ = _tensors(out)
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)
    assert {path.name for path in out.iterdir()} >= {"transformer", "scheduler"}
    assert plan_role("student", checkpoint=str(out), family=family).sparse.settings == SPARSE
    (out / "transformer" / SPARSE_FILE).unlink()  # as FastVideo writes it
    if family == "minimax_h3":
        assert plan_role("student", checkpoint=str(out), family=family).sparse.settings == SPARSE
        (out / FILE).write_text('{"vsa_sparsity": 0.9, "vsa_tile_size": 100}')
        with refused(FILE):
            plan_role("student", checkpoint=str(out), family=family)
    else:
        assert not (out / FILE).exists()
        with refused("student.sparse_attention.sparsity"):
            plan_role("student", checkpoint=str(out), family=family)


UNEVEN = [shift_time(u / 1000, 12.0) for u in (999, 874, 500, 125)]


@pytest.mark.parametrize("times", [EVEN, UNEVEN, [1.0, 0.947368, 0.857143, 0.666667]], ids=["even", "any", "shift 6"])
def test_its_file_samples_the_trained_times(tmp_path, times):
    _write_run(tmp_path, "minimax_h3", SPARSE, times)
    assert main([str(tmp_path / "run"), str(tmp_path / "out"), "--format", "fastvideo"]) == 0
    found = json.loads((tmp_path / "out" / FILE).read_text())
    if times is EVEN:  # diffusers' folder, whose schedulers are the same, has it too
        assert main([str(tmp_path / "run"), str(tmp_path / "plain")]) == 0
        assert json.loads((tmp_path / "plain" / FILE).read_text()) == found
    assert found["num_inference_steps"] == found["transformer_forwards"] + 1 == len(times) + 1
    assert (found["attention_backend"], found["vsa_sparsity"], found["vsa_tile_size"]) == (
        "VIDEO_SPARSE_ATTN_H3", 0.9, 64,
    )  # fmt: skip
    for part, folder, ratio in ((VIDEO, "scheduler", 1.0), (AUDIO, "audio_scheduler", MiniMaxH3.parts[AUDIO])):
        shift = json.loads((tmp_path / "out" / folder / "scheduler_config.json").read_text())["shift"]
        assert found[f"{part}_scheduler_shift"] == shift
        sampled = [shift_time(step / 1000, shift) for step in found["dmd_denoising_steps"]]
        assert sampled == pytest.approx([shift_time(t, ratio) for t in times], abs=1e-3)


@pytest.mark.parametrize(
    ("family", "sparse", "times"),
    [
        ("minimax_h3", SparseSettings(sparsity=0.9, dense_layers=[1]), EVEN),
        ("minimax_h3", SparseSettings(sparsity=0.9, tile=[1, 2, 2]), EVEN),
        ("minimax_h3", SPARSE, [1.0, 0.5, 0.0051]),
        ("ltx2", SPARSE, EVEN),  # FastVideo names no file of an LTX-2
    ],
)
def test_what_it_cannot_hold(tmp_path, capsys, family, sparse, times):
    _write_run(tmp_path, family, sparse, times)
    assert main([str(tmp_path / "run"), str(tmp_path / "out"), "--format", "fastvideo"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ") and not (tmp_path / "out").exists()
    if times is EVEN and family == "minimax_h3":
        assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0 and not (tmp_path / "out" / FILE).exists()
        assert f"{FILE} | none" in (tmp_path / "out" / "README.md").read_text()


def test_a_dense_student_has_no_sparse_attention_in_its_file():
    assert not any("vsa" in key for key in contract(EVEN, video_shift=12.0, audio_shift=3.0))
