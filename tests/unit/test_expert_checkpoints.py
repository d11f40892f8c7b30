"""Checkpoints of two experts: their directories and boundary, and what is refused."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from models.files.checkpoint_files import inspect_checkpoint, inspect_transformer
from tests.unit.refused import refused

FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "transformer"
    folder.mkdir()
    (folder / "config.json").write_text('{"num_layers": 2}')
    save_file({"a.weight": torch.zeros(2, 3)}, folder / FILE)
    return folder


@pytest.fixture
def experts(folder):
    """Write a pipeline of two networks, with its index."""
    shutil.copytree(folder, folder.with_name("transformer_2"))
    index = folder.parent / "model_index.json"
    index.write_text('{"boundary_ratio": 0.875, "transformer_2": ["diffusers", "X"]}')
    return folder.parent, index


def test_a_pipeline_of_two_experts(experts):
    pipeline, _ = experts
    found = inspect_checkpoint(str(pipeline), "teacher.checkpoint")
    assert [each.path.name for each in found.folders] == ["transformer", "transformer_2"]
    assert found.boundaries == (0.875,) and found.folders[0].shapes == found.folders[1].shapes
    with refused("FOLDER"):
        inspect_transformer(str(pipeline), "FOLDER")
    assert inspect_transformer(str(pipeline / "transformer_2"), "FOLDER").path == pipeline / "transformer_2"


@pytest.mark.parametrize("index", [None, '{"boundary_ratio": null, "transformer_2": [null, null]}', "{"])
def test_a_pipeline_of_one_network(folder, index):
    if index is not None:
        (folder.parent / "model_index.json").write_text(index)
    assert inspect_checkpoint(str(folder.parent), "teacher.checkpoint").boundaries == ()
    assert inspect_transformer(str(folder.parent), "teacher.checkpoint").path == folder


@pytest.mark.parametrize("index", [None, "[", '{"boundary_ratio": 1.5}', '{"boundary_ratio": true}'])
def test_a_boundary_that_is_none(experts, index):
    """A wrong boundary would make the high-noise expert the teacher at every time."""
    pipeline, file = experts
    if index is None:
        file.unlink()
    else:
        file.write_text(index)
    with refused("teacher.checkpoint"):
        inspect_checkpoint(str(pipeline), "teacher.checkpoint")


def test_half_a_pipeline_of_two_experts(experts, monkeypatch):
    pipeline, _ = experts
    for given in (str(pipeline / "transformer"), "transformer"):
        monkeypatch.chdir(pipeline)
        with refused("teacher.checkpoint"):
            inspect_checkpoint(given, "teacher.checkpoint")
    (pipeline / "transformer_2" / FILE).unlink()
    with refused("transformer_2"):
        inspect_checkpoint(str(pipeline), "teacher.checkpoint")
    (pipeline / "transformer_2" / "config.json").unlink()
    with refused("transformer_2"):
        inspect_checkpoint(str(pipeline), "teacher.checkpoint")
