"""An average of the fake score: kept, resumed and exported as the student's is."""

import pytest
import torch
from safetensors.torch import load_file

from models.export import main as export
from tests.e2e.launch import train

WORDS = (
    "experiment=quickstart", "steps=5", "batch_size=4", "mesh.cp=2", "checkpoint.every=1",
    "method.fake_updates_per_student_update=1", "checkpoint.keep=9", "checkpoint.at_end=true", "fake.ema.enabled=true",
    "fake.ema.decay=0.5", "fake.ema.start=1",
    "sample.at_end=false", "sample.every=0", "export.at_end=false",
)  # fmt: skip


def _weights(checkpoint, out, kind):
    assert export([str(checkpoint), str(out), "--role", "fake", "--weights", kind, "--dtype", "fp32"]) == 0
    (file,) = out.glob("*.safetensors")
    return {name: weight.double() for name, weight in load_file(file).items()}


@pytest.mark.long
def test_the_average_of_the_fake_score(tmp_path):
    """The fake score trains at steps 2 and 4 (of 1 to 5): its first update is before ``start``, the second halves."""
    run_dir = tmp_path / "run"
    train(2, *WORDS, f"run_dir={run_dir}", "steps=3")
    train(2, *WORDS, f"run_dir={run_dir}")  # the second update is another process's
    raw = {step: _weights(run_dir / f"checkpoints/step_{step:08d}", tmp_path / f"raw_{step}", "raw") for step in (2, 4)}
    average = _weights(run_dir / "checkpoints/step_00000005", tmp_path / "average", "ema")
    assert average.keys() == raw[4].keys() and len(average) > 20
    for name, weight in average.items():
        truth = (raw[2][name] + raw[4][name]) / 2
        assert (weight - truth).abs().max() <= 2e-7 * truth.abs().max(), name
    assert any(not torch.equal(raw[2][name], raw[4][name]) for name in raw[2])
