"""``python -m models.export``: the files it writes, and the files it must not touch."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from fsdp_cp.checkpoint.save_load import Checkpoints
from models.card import is_ours
from models.export import main
from models.files.checkpoint_files import fingerprint, inspect_checkpoint
from tests.oracles.tiny_wan import ARCHITECTURE
from tests.tiers import parametrize
from tests.unit.refused import change, snapshot

METHOD = {"name": "dmd2", "step_list": [1.0, 0.5]}


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return WanTransformer3DModel(**ARCHITECTURE)


@pytest.fixture
def run(tmp_path, network):
    """Write a run directory with two checkpoints, as the trainer saves them, and next to it one of two experts."""
    weights = {name: p.detach() for name, p in network.named_parameters()}
    average = {name: p + 1 for name, p in weights.items()}
    config = {key: value for key, value in network.config.items() if key != "_use_default_values"}
    numbers = {"configs": {"student": config, "fake": config}, "settings": {"method": METHOD}}
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=0)
    for step in (1, 2):
        tensors = {"student": {"weights": weights, "ema": average}, "fake": {"weights": weights}}
        checkpoints.save(step, tensors, {"step": step, "best": 1, **numbers})
    experts = {"student.high": {"weights": weights}, "student.low": {"weights": average}}
    Checkpoints(tmp_path / "experts", keep=0).save(1, experts, {"step": 1, "boundaries": {"student": [0.9]}, **numbers})
    return tmp_path / "run"


def export(capsys, *arguments) -> int:
    """Run the command and return its exit code. A refusal ends in one error line."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    err = capsys.readouterr().err
    # Python's own unpickler may add a line about its memory where a length is damaged.
    assert code == 0 or (err.splitlines()[-1].startswith("error: ") and "Traceback" not in err), err
    return code


def test_an_export_loads_and_says_what_it_is(capsys, run, tmp_path, network):
    out = tmp_path / "out"
    assert export(capsys, run, out, "--weights", "ema") == 0
    for (name, p), (_, q) in zip(
        WanTransformer3DModel.from_pretrained(out).named_parameters(), network.named_parameters(), strict=True
    ):
        assert torch.equal(p, q + 1), name
    about = json.loads((out / "fsdp_cp_export.json").read_text())["about"]
    assert (about["step"], about["role"], about["weights"]) == (2, "student", "ema")
    assert about["method"] == METHOD, "how the student is sampled"
    assert export(capsys, run, out, "--checkpoint", "best") == 0
    assert json.loads((out / "fsdp_cp_export.json").read_text())["about"]["step"] == 1
    for folder in (run.parent / "experts", run / "checkpoints" / "step_00000001"):
        assert export(capsys, folder, tmp_path / "none", "--checkpoint", "best") == 2, "no best one, or one alone"
    assert export(capsys, run / "checkpoints" / "step_00000001", out, "--dtype", "bf16") == 0
    assert json.loads((out / "fsdp_cp_export.json").read_text())["about"]["step"] == 1
    assert not list(out.parent.glob(".out*"))


def test_the_table_of_an_evaluation_is_on_the_card(capsys, run, tmp_path):
    """An evaluation of the same step, of an export in OUT or of the run's own; no other."""
    out, evaluation = tmp_path / "out", tmp_path / "evaluation"
    assert export(capsys, run, out) == 0
    evaluation.mkdir()
    weights = " ".join(map(fingerprint, inspect_checkpoint(str(out), "").folders))
    (evaluation / "evaluation.md").write_text("| measure | /home/me/out@4 |\n|---|---|\n| fvd | 3.5 |\n\nother lines\n")
    (evaluation / "evaluation.json").write_text(json.dumps({"participants": {"/home/me/out@4": {"weights": weights}}}))
    words = ("--evaluation", evaluation)
    assert export(capsys, run / "checkpoints" / "step_00000001", out, *words) == 2
    assert export(capsys, run, out, *words) == 0
    text = (out / "README.md").read_text()
    assert is_ours(text) and "| measure | out@4 |\n|---|---|\n| fvd | 3.5 |" in text and "/home/me" not in text
    assert export(capsys, run, out, "--evaluation", tmp_path) == 2


def test_the_student_s_scheduler_is_not_the_fake_score_s(capsys, run, tmp_path):
    few_steps = {"times": [1.0, 0.5], "stochastic": False, "boundaries": [], "experts": []}
    change(run / "checkpoints" / "step_00000002" / "state.json", few_steps=few_steps)
    for role, has_scheduler in (("student", True), ("fake", False)):
        assert export(capsys, run, tmp_path / role, "--role", role) == 0
        assert (tmp_path / role / "scheduler").is_dir() == has_scheduler


@parametrize(("expert", "added"), [("high", 0), ("low", 1)], quick=1)
def test_one_of_two_experts_is_exported_alone(capsys, run, tmp_path, network, expert, added):
    assert export(capsys, tmp_path / "experts" / "step_00000001", tmp_path / "out", "--expert", expert) == 0
    found = WanTransformer3DModel.from_pretrained(tmp_path / "out").named_parameters()
    for (name, p), (_, q) in zip(found, network.named_parameters(), strict=True):
        assert torch.equal(p, q + added), name


@parametrize("place", ["RUN", "RUN/checkpoints/step_00000002", "full", "file", "."], quick=3)
def test_folders_that_hold_anything_else_are_left_alone(capsys, run, tmp_path, monkeypatch, place):
    full = tmp_path / "full"
    (full / "sub").mkdir(parents=True)
    (full / "sub" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("mine")
    monkeypatch.chdir(full)
    before = snapshot(tmp_path)
    out = place.replace("RUN", str(run)) if place == "." or "RUN" in place else tmp_path / place
    assert export(capsys, run, out) == 2
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("arguments", [("nowhere", "OUT"), ("RUN", "OUT", "--role", "fake", "--weights", "ema")])
def test_what_is_not_there(capsys, run, tmp_path, arguments):
    arguments = [a.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for a in arguments]
    assert export(capsys, *arguments) == 2 and not (tmp_path / "out").exists()


class _Opens:
    """Pickle that touches a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_damaged_checkpoints_are_not_exported_and_their_code_does_not_run(capsys, run, tmp_path):
    metadata = run / "checkpoints" / "step_00000002" / ".metadata"
    metadata.write_bytes(pickle.dumps(_Opens(tmp_path / "ran")))
    assert export(capsys, metadata.parent, tmp_path / "out") == 2 and not (tmp_path / "ran").exists()
    file = run / "checkpoints" / "step_00000001" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert export(capsys, run, tmp_path / "out") == 2 and not (tmp_path / "out").exists(), "no whole one is left"
