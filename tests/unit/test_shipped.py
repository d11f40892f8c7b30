"""Shipped files from any working directory."""

from pathlib import Path

import pytest

from distill.config import compose_config
from distill.data.encoders.choose import choose_encoders
from fsdp_cp.errors import UserError
from models.files.checkpoint_files import inspect_transformer
from models.files.shipped import find_shipped
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
    for inspect in (choose_encoders, lambda p: inspect_transformer(p, "teacher.checkpoint")):
        with pytest.raises(UserError):
            inspect(path)
