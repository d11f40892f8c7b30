"""Refusals suggest the intended setting, name or command."""

import pytest

from distill.config import compose_config
from distill.run.setup import plan_run
from fsdp_cp.errors import UserError


@pytest.mark.parametrize(
    ("word", "named", "not_named"),
    [
        ("mesh.dp=2", "mesh.dp_shard", "mesh.cp"),
        ("cluster=h20", "h20x4 or h20x8 or h20x8x4", "h200"),
        ("data.num_frames=21,41", "distill.sweep", "train.py"),
        ("data.num_frames=many", "data.num_frames", "distill.sweep"),
    ],
)
def test_a_refusal_names_what_was_meant(word, named, not_named):
    with pytest.raises(UserError) as caught:
        compose_config([word])
    (line,) = str(caught.value).splitlines()
    assert named in line and not_named not in line


def test_a_missing_earlier_stage_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose_config(["experiment=quickstart_self_forcing", "device=cpu", "world=1", "dry_run=true"])
    with pytest.raises(UserError, match="student.checkpoint") as caught:
        plan_run(config)
    assert "python train.py experiment=quickstart_causal_dcm" in str(caught.value)


def test_an_unknown_kernel_is_refused_in_a_dry_run_for_gpus():
    with pytest.raises(UserError, match="attention.backend"):
        plan_run(compose_config(["device=cuda", "dry_run=true", "world=2", "attention.backend=flash9"]))
