"""Checkpoints as others write them: variants, shards without an index, wrappers' prefixes, git-lfs pointers."""

import json

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from distill.data.encoders.folder import check_weight_files
from fsdp_cp.errors import UserError
from models.families.wan import Wan
from models.files.checkpoint_files import inspect_transformer, tensor_reader
from models.roles.role_plan import plan_role
from tests.oracles.small_wan import SMALL, small_role
from tests.unit.refused import refusal

NAME = "diffusion_pytorch_model"


@pytest.fixture(scope="module")
def network():
    return WanTransformer3DModel(**SMALL)


@pytest.fixture
def folder(network, tmp_path):
    network.save_config(tmp_path / "network")
    return tmp_path / "network"


def write(folder, tensors, *files, index=None):
    """Spread ``tensors`` over ``files``, and write their names to ``index``."""
    places = {name: files[i % len(files)] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name].contiguous() for name in tensors if places[name] == file}, folder / file)
    if index:
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))


ONE, TWO = f"{NAME}-00001-of-00002.safetensors", f"{NAME}-00002-of-00002.safetensors"
INDEX = f"{NAME}.safetensors.index.bf16.json"
LAYOUTS = {
    "variant": lambda t: (t, [f"{NAME}.bf16-0000{i}-of-00002.safetensors" for i in (1, 2)], INDEX),
    "old variant": lambda t: (t, [f"{NAME}-0000{i}-of-00002.bf16.safetensors" for i in (1, 2)], None),
    "no index": lambda t: (t, [ONE, TWO], None),
    "another index": lambda t: (t, ["model-a.safetensors", "model-b.safetensors"], "model.safetensors.index.json"),
    "another name": lambda t: (t, ["wan.safetensors"], None),
    "DDP of a compiled network": lambda t: ({f"module._orig_mod.{name}": v for name, v in t.items()}, [ONE, TWO], None),
    "compiled blocks": lambda t: ({_compiled(name): v for name, v in t.items()}, ["x.safetensors"], None),
    "ComfyUI": lambda t: ({f"model.diffusion_model.{name}": v for name, v in t.items()}, ["x.safetensors"], None),
}  # fmt: skip


def _compiled(name):
    parts = name.split(".")
    return ".".join([*parts[:2], "_orig_mod", *parts[2:]]) if parts[0] == "blocks" else name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_arrive_whatever_their_files_are_called(network, folder, one_rank, layout):
    weights = network.state_dict()
    tensors, files, index = LAYOUTS[layout](weights)
    write(folder, tensors, *files, index=index)
    plan = plan_role("student", checkpoint=str(folder))
    read, loaded = tensor_reader(plan.folders[0]), small_role(one_rank, plan, trainable=False).weights()
    assert loaded.keys() == plan.folders[0].shapes.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(loaded[name].full_tensor(), weight) and torch.equal(read(name), weight), name


def refused(folder):
    message = refusal(plan_role, "teacher", checkpoint=str(folder))
    assert message.startswith("teacher.checkpoint")
    return message


def test_a_part_that_is_missing_is_noticed(network, folder):
    write(folder, network.state_dict(), ONE, TWO)
    (folder / ONE).unlink()
    assert "a file missing" in refused(folder)


@pytest.mark.parametrize("index", [False, True])
def test_a_pointer_of_git_lfs_is_called_one(network, folder, index):
    write(folder, network.state_dict(), ONE, TWO, index="x.safetensors.index.json" if index else None)
    (folder / TWO).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 5676070424\n")
    assert "git-lfs" in refused(folder)
    with pytest.raises(UserError, match="git-lfs"):
        check_weight_files(folder, "data.encoders")


def test_names_of_wans_own_code_are_shown_with_those_that_lack(network, folder):
    layers = [name.removesuffix(".weight") for name in network.state_dict() if name.endswith("to_q.weight")]
    own = {f"{layer}.": f"{Wan().original_name(layer)}." for layer in layers}
    tensors = {
        next((own[o] + n.removeprefix(o) for o in own if n.startswith(o)), n): w
        for n, w in network.state_dict().items()
    }
    write(folder, tensors, "x.safetensors")
    message = refused(folder)
    assert "blocks.0.attn1.to_q" in message and "blocks.0.self_attn.q" in message
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_class_name": "WanModel"}))
    assert "diffusers" in refused(folder), "an original repository is of another layout"
    (folder / "config.json").rename((folder / "high_noise_model").with_suffix(".json"))
    (folder / "high_noise_model").mkdir()
    (folder / "high_noise_model.json").rename(folder / "high_noise_model" / "config.json")
    assert "high_noise_model" in refused(folder)


def test_one_tensor_under_two_names_is_refused(network, folder):
    tensors = network.state_dict()
    name = "blocks.0.attn1.to_q.weight"
    write(folder, tensors | {_compiled(name): tensors[name].clone()}, "x.safetensors")
    with pytest.raises(UserError, match="twice"):
        inspect_transformer(str(folder), "teacher.checkpoint")
