"""Shipped files from any working directory, and the command that writes a word table."""

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from distill.config import compose_config
from distill.data import word_table
from distill.data.encoders import inspect_encoders
from fsdp_cp.errors import UserError
from models.checkpoint_files import inspect_transformer
from models.shipped import find_shipped
from tests.unit.refused import refused

ROOT = Path(__file__).resolve().parents[2]
TEACHER = "assets/quickstart_teacher"


def test_shipped_files_are_found_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_shipped(TEACHER) == ROOT / TEACHER
    assert inspect_transformer(TEACHER, "teacher.checkpoint").path == ROOT / TEACHER / "transformer"
    config = compose_config(["experiment=quickstart"])
    assert config.teacher.checkpoint == config.data.encoders == TEACHER, "the configuration keeps the short name"
    data = config.data.build(seed=0, device="cpu", run_dir=tmp_path)
    assert data.captions()[0] == "a red circle growing"


def test_what_is_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / TEACHER).mkdir(parents=True)
    assert find_shipped(TEACHER) == Path(TEACHER)
    with refused("teacher.checkpoint=assets/quickstart_teacher"):
        inspect_transformer(TEACHER, "teacher.checkpoint")


@pytest.mark.parametrize("path", ["nowhere", "", ".", str(ROOT / "nowhere"), "assets/nowhere"])
def test_everything_else_stays_as_it_is(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    assert find_shipped(path) == Path(path)
    for inspect in (inspect_encoders, lambda p: inspect_transformer(p, "teacher.checkpoint")):
        with pytest.raises(UserError):
            inspect(path)


def test_the_command_replaces_word_tables_alone(tmp_path, capsys):
    out = tmp_path / "words.safetensors"
    assert word_table.main([str(out)]) == 0
    first = out.read_bytes()
    assert word_table.main([str(out)]) == 0 and out.read_bytes() == first
    assert load_file(out)["vectors"].shape == (17, 32)
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes((ROOT / TEACHER / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes())
    for path, content in ((weights, weights.read_bytes()), (tmp_path / "notes.safetensors", b"mine")):
        path.write_bytes(content)
        capsys.readouterr()
        assert word_table.main([str(path)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and str(path) in said
        assert path.read_bytes() == content
    assert word_table.main([str(weights / "x.safetensors")]) == 2
    assert sorted(os.listdir(tmp_path)) == ["notes.safetensors", "weights.safetensors", "words.safetensors"]
