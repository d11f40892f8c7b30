"""A checkpoint of two experts: what is found in it, and one clear line for whatever is wrong with it."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from fsdp_cp.errors import UserError
from models.checkpoint_files import inspect_checkpoint, inspect_transformer

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
    """A pipeline of two networks, and its index."""
    shutil.copytree(folder, folder.with_name("transformer_2"))
    index = folder.parent / "model_index.json"
    index.write_text('{"boundary_ratio": 0.875, "transformer_2": ["diffusers", "X"]}')
    return folder.parent, index


def test_a_pipeline_of_two_experts(experts):
    pipeline, _ = experts
    found = inspect_checkpoint(str(pipeline), "teacher.checkpoint")
    assert [each.path.name for each in found.folders] == ["transformer", "transformer_2"]
    assert found.boundaries == (0.875,) and found.folders[0].shapes == found.folders[1].shapes
    with pytest.raises(UserError, match=r"FOLDER=.* is a model of two experts, .*boundary_ratio 0.875\), where one"):
        inspect_transformer(str(pipeline), "FOLDER")
    assert inspect_transformer(str(pipeline / "transformer_2"), "FOLDER").path == pipeline / "transformer_2"


@pytest.mark.parametrize("index", [None, '{"boundary_ratio": null, "transformer_2": [null, null]}', "{", "[1]"])
def test_a_pipeline_of_one_network(folder, index):
    if index is not None:
        (folder.parent / "model_index.json").write_text(index)
    assert inspect_checkpoint(str(folder.parent), "teacher.checkpoint").boundaries == ()
    assert inspect_transformer(str(folder.parent), "teacher.checkpoint").path == folder


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (None, "has a transformer_2, a second expert, and its model_index.json no boundary_ratio"),
        ("[", "no boundary_ratio"),
        ('{"transformer": ["diffusers", "X"]}', "no boundary_ratio"),
        ('{"boundary_ratio": 1.5}', r"boundary_ratio=1.5 of its model_index.json is not between 0 and 1"),
        ('{"boundary_ratio": true}', "boundary_ratio=True of"),
        ('{"boundary_ratio": "0.9"}', "boundary_ratio=0.9 of"),
    ],
)
def test_a_boundary_that_is_none(experts, index, words):
    """Its first expert, for high noise, would be the teacher at every time."""
    pipeline, file = experts
    if index is None:
        file.unlink()
    else:
        file.write_text(index)
    with pytest.raises(UserError, match=f"teacher.checkpoint=.* ?{words}"):
        inspect_checkpoint(str(pipeline), "teacher.checkpoint")


def test_half_a_pipeline_of_two_experts(experts, monkeypatch):
    pipeline, _ = experts
    for given in (str(pipeline / "transformer"), "transformer"):
        monkeypatch.chdir(pipeline)
        with pytest.raises(UserError, match="is the expert for high noise of a model of two, and no network for other"):
            inspect_checkpoint(given, "teacher.checkpoint")
    (pipeline / "transformer_2" / FILE).unlink()
    with pytest.raises(UserError, match="has no .safetensors file in .*transformer_2"):
        inspect_checkpoint(str(pipeline), "teacher.checkpoint")
    (pipeline / "transformer_2" / "config.json").unlink()
    with pytest.raises(UserError, match="has boundary_ratio=0.875, a model of two experts, and no transformer_2"):
        inspect_checkpoint(str(pipeline), "teacher.checkpoint")
