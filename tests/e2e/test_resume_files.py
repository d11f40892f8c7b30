"""A run does not continue with another teacher, unless that is meant."""

import json
import shutil

import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from models.files.originals import own_names
from tests.e2e.launch import ROOT, losses
from tests.tiers import slow
from train import main

QUICK = (
    "experiment=quickstart", "device=cpu", "mesh.cp=1", "batch_size=2", "sample.at_end=false", "export.at_end=false",
    "checkpoint.every=1", "sample.report_clips=0",
)  # fmt: skip


def _state(run_dir, step):
    return json.loads((run_dir / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())


@slow
def test_a_teacher_of_the_hub_stays_at_its_commit(tmp_path, monkeypatch, capsys):
    """Without a network the cache is used. The run records the commit, and keeps it when the branch has moved."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    storage, commits = tmp_path / "models--me--teacher", ("1" * 40, "2" * 40)
    source = ROOT / "assets" / "quickstart_teacher" / "transformer"
    for number, commit in enumerate(commits):
        shutil.copytree(source, storage / "snapshots" / commit / "transformer")
        weights = storage / "snapshots" / commit / "transformer" / "diffusion_pytorch_model.safetensors"
        save_file({name: (1 + number) * tensor for name, tensor in load_file(weights).items()}, weights)
    branch = storage / "refs" / "main"
    branch.parent.mkdir()
    branch.write_text(commits[0])
    run_dir = tmp_path / "run"
    arguments = [*QUICK, f"run_dir={run_dir}", "teacher.checkpoint=me/teacher"]
    assert main([*arguments, "steps=1"]) == 0
    branch.write_text(commits[1])
    assert main([*arguments, "steps=2"]) == 0
    assert f"me/teacher@{commits[0]}" in (run_dir / "config.yaml").read_text()
    assert _state(run_dir, 2)["sources"] == _state(run_dir, 1)["sources"]
    capsys.readouterr()
    assert main([*arguments, "steps=3", f"teacher.checkpoint=me/teacher@{commits[1]}"]) == 2, "other weights"
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert commits[1] in error
    assert main([*arguments, "run_dir=" + str(tmp_path / "missing"), "teacher.checkpoint=me/other"]) == 2


@slow
def test_one_file_in_the_names_of_wans_own_code_trains_as_its_folder(tmp_path):
    """The file lies among others. Losses are those of the diffusers folder, and the run resumes."""
    source = ROOT / "assets" / "quickstart_teacher" / "transformer"
    tensors = load_file(source / "diffusion_pytorch_model.safetensors")
    own = own_names(tensors)
    file = tmp_path / "teacher.safetensors"
    save_file({f"model.diffusion_model.{own[name]}": tensor for name, tensor in tensors.items()}, file)
    save_file({own[name]: torch.zeros_like(tensor) for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
    found = []
    for name, words in (
        ("folder", [f"teacher.checkpoint={source}"]),
        ("file", [f"teacher.checkpoint={file}", f"teacher.config={source}"]),
    ):
        arguments = [*QUICK, f"run_dir={tmp_path / name}", *words]
        assert main([*arguments, "steps=1"]) == 0 == main([*arguments, "steps=2"])
        found.append(losses(tmp_path / name))
    assert found[0] == found[1] and len(found[0]) == 2
