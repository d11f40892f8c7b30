"""``python -m models.export``: what it writes, and everything that it must leave alone."""

import hashlib
import json
import pickle
import random
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from fsdp_cp.checkpoint import Checkpoints
from models.export import main
from tests.oracles.tiny_wan import ARCHITECTURE


def contents(folder: Path) -> dict[str, str]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return WanTransformer3DModel(**ARCHITECTURE)


@pytest.fixture
def run(tmp_path, network):
    """A run's folder with two checkpoints, as the trainer saves them, and what a user keeps beside."""
    weights = {name: p.detach() for name, p in network.named_parameters()}
    average = {name: p + 1 for name, p in weights.items()}
    config = {key: value for key, value in network.config.items() if key != "_use_default_values"}
    for step in (1, 2):
        tensors = {"student": {"weights": weights, "ema": average}, "fake": {"weights": weights}}
        numbers = {"step": step, "configs": {"student": config, "fake": config}}
        Checkpoints(tmp_path / "run" / "checkpoints", keep=0).save(step, tensors, numbers)
    return tmp_path / "run"


def export(capsys, *arguments) -> tuple[int, str]:
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    # Python's own unpickler may add a line about its memory where a length is damaged.
    assert code == 0 or (err.splitlines()[-1].startswith("error: ") and "Traceback" not in err), err
    return code, out + err


def test_an_export_loads_and_says_what_it_is(capsys, run, tmp_path, network):
    out = tmp_path / "out"
    code, text = export(capsys, run, out, "--weights", "ema")
    assert code == 0 and "the ema weights of the student" in text and "step_00000002" in text
    for (name, p), (_, q) in zip(
        WanTransformer3DModel.from_pretrained(out).named_parameters(), network.named_parameters(), strict=True
    ):
        assert torch.equal(p, q + 1), name
    about = json.loads((out / "fsdp_cp_export.json").read_text())["about"]
    assert (about["step"], about["role"], about["weights"]) == (2, "student", "ema")
    assert export(capsys, run / "checkpoints" / "step_00000001", out, "--dtype", "bf16")[0] == 0
    assert json.loads((out / "fsdp_cp_export.json").read_text())["about"]["step"] == 1
    assert not list(out.parent.glob(".out*"))


@pytest.mark.parametrize("place", ["RUN", "RUN/checkpoints", "RUN/checkpoints/step_00000002", "full", "file", ".", ""])
def test_folders_that_hold_anything_else_are_left_alone(capsys, run, tmp_path, monkeypatch, place):
    full = tmp_path / "full"
    (full / "sub").mkdir(parents=True)
    (full / "config.json").write_text("{}")
    (full / "sub" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("mine")
    monkeypatch.chdir(full)
    before = contents(tmp_path)
    out = place.replace("RUN", str(run)) if place in ("", ".") or "RUN" in place else tmp_path / place
    code, message = export(capsys, run, out)
    assert code == 2 and any(
        part in message for part in ("is not empty, and", "is a file", "working directory", "empty")
    )
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "OUT"), "RUN=nowhere has no complete checkpoint; use a run folder"),
        (("", "OUT"), "has no complete checkpoint"),
        (
            ("RUN", "OUT", "--role", "fake", "--weights", "ema"),
            "use --role fake --weights raw, --role student --weights ema",
        ),
    ],
)
def test_what_is_not_there(capsys, run, tmp_path, arguments, message):
    arguments = [a.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for a in arguments]
    code, text = export(capsys, *arguments)
    assert code == 2 and message in text and not (tmp_path / "out").exists()


class _Opens:
    """What a pickle from outside could do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_a_checkpoint_does_not_run(capsys, run, tmp_path):
    metadata = run / "checkpoints" / "step_00000002" / ".metadata"
    metadata.write_bytes(pickle.dumps(_Opens(tmp_path / "ran")))
    (metadata.parent / "manifest.json").unlink()  # in which its size is
    code, message = export(capsys, metadata.parent, tmp_path / "out")
    assert code == 2 and "damaged or unsafe" in message and not (tmp_path / "ran").exists()


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_exported(capsys, caplog, run, tmp_path):
    file = run / "checkpoints" / "step_00000002" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    code, message = export(capsys, run, tmp_path / "out")
    assert code == 0 and "step_00000001" in message
    assert f"the checkpoint of step 2 is damaged and not used: {file} has" in caplog.text


@pytest.mark.slow
def test_damaged_checkpoints_give_one_line(capsys, run, tmp_path):
    """Cut and flipped bits, in each of the files; a flip that a file's own checksums do not see may pass."""
    draw = random.Random(7)
    folder = run / "checkpoints" / "step_00000002"
    before = contents(tmp_path)
    outcomes = []
    for round_ in range(60):
        file = draw.choice([p for p in sorted(folder.iterdir()) if p.is_file()])
        whole = file.read_bytes()
        if round_ % 3 == 0:
            damaged = whole[: draw.randrange(len(whole))]
        else:
            at = draw.randrange(len(whole))
            damaged = whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :]
        file.write_bytes(damaged)
        code, message = export(capsys, folder, tmp_path / f"out{round_}")
        outcomes.append(code)
        assert code == 0 or "out" not in {p.name[:3] for p in tmp_path.iterdir()} or message
        assert (tmp_path / f"out{round_}").exists() == (code == 0)
        file.write_bytes(whole)
    assert outcomes.count(2) > 15
    assert {name: value for name, value in contents(tmp_path).items() if not name.startswith("out")} == before
