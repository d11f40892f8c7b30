"""Checkpoint directories of a role: configuration, shapes, two experts, and one line for each kind of damage."""

import json
import shutil

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from fsdp_cp.errors import UserError
from models.files.checkpoint_files import check_tensors, indexed_files, inspect_checkpoint, inspect_transformer
from models.roles.role_plan import plan_role
from tests.oracles.small_wan import SMALL
from tests.unit.refused import refusal

FILE = "diffusion_pytorch_model.safetensors"
INDEX = FILE + ".index.json"
TENSORS = {"a.weight": torch.zeros(2, 3), "a.bias": torch.zeros(3), "b": torch.zeros(4)}
SHAPES = {"a.weight": (2, 3), "a.bias": (3,), "b": (4,)}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "transformer"
    folder.mkdir()
    (folder / "config.json").write_text('{"num_layers": 2}')
    save_file(TENSORS, folder / FILE)
    return folder


@pytest.fixture
def sharded(folder):
    (folder / FILE).unlink()
    names = {"part-1.safetensors": ["a.weight"], "part-2.safetensors": ["a.bias", "b"]}
    for file, keys in names.items():
        save_file({k: TENSORS[k] for k in keys}, folder / file)
    weight_map = {key: file for file, keys in names.items() for key in keys}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refused(checkpoint) -> str:
    message = refusal(inspect_transformer, str(checkpoint), "fake.checkpoint")
    assert message.startswith(f"fake.checkpoint={checkpoint}")
    return message


def test_transformer_and_pipeline_directories_are_the_same(folder):
    direct = inspect_transformer(str(folder), "teacher.checkpoint")
    assert direct == inspect_transformer(str(folder.parent), "teacher.checkpoint")
    assert direct.path == folder and direct.config == {"num_layers": 2} and direct.shapes == SHAPES


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("w-00001-of-00002", "w.fp16-00002-of-00002"),
        ("w-00001-of-00002", "w-00002-of-00003"),
        ("w-00001-of-00002.fp16", "w-00002-of-00002"),
        ("a", "b"),
    ],
)
def test_halves_of_two_sets_of_weights_are_not_mixed(folder, first, second):
    (folder / FILE).unlink()
    for file, keys in ((first, ["a.weight"]), (second, ["a.bias", "b"])):
        save_file({key: TENSORS[key] for key in keys}, folder / f"{file}.safetensors")
    assert first in (message := refused(folder)) and second in message


def test_a_file_next_to_those_of_an_index_is_another_set(sharded):
    save_file({"c": torch.zeros(1)}, sharded / "part-3.safetensors")
    assert "part-3" in refused(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_config_that_is_no_json_object(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder)
    (folder / "config.json").unlink()
    refused(folder)


@pytest.mark.parametrize("content", ["renamed", "empty", "truncated header", "truncated tensors"])
def test_broken_weights(folder, content):
    whole = (folder / FILE).read_bytes()
    broken = {"renamed": whole, "empty": b"", "truncated header": whole[:20], "truncated tensors": whole[:-4]}
    (folder / FILE).write_bytes(broken[content])
    if content == "renamed":
        (folder / FILE).rename(folder / "diffusion_pytorch_model.bin")
    refused(folder)


@pytest.mark.parametrize(
    "harm",
    [
        lambda sharded: (sharded / "part-2.safetensors").write_bytes(b""),
        lambda sharded: (sharded / "part-2.safetensors").unlink(),
        # The reader would take every file of the directory, and the stray one might win.
        lambda sharded: save_file(TENSORS, sharded / "older.safetensors"),
        lambda sharded: save_file(TENSORS, sharded / "part-2.safetensors"),  # a tensor in two files
        lambda sharded: (sharded / INDEX).write_text("{}"),
        lambda sharded: (sharded / INDEX).write_text('{"weight_map": 3}'),
    ],
)
def test_broken_files_of_an_index(sharded, harm):
    harm(sharded)
    refused(sharded)


def test_an_index_that_is_a_dangling_link(tmp_path):
    (tmp_path / INDEX).symlink_to("gone")
    with pytest.raises(UserError, match=INDEX):
        indexed_files(tmp_path / INDEX, "teacher.checkpoint")


def test_weights_that_belong_to_something_else(folder):
    save_file(TENSORS, folder / "diffusion_pytorch_model.fp16.safetensors")
    refused(folder)
    (folder / "diffusion_pytorch_model.fp16.safetensors").unlink()
    inspect_transformer(str(folder), "teacher.checkpoint")
    save_file(TENSORS, folder / FILE, metadata={"DCP_SHARDING_INFO": "{}"})  # one rank's part of a sharded save
    refused(folder)


@pytest.mark.parametrize(
    ("changes", "name"), [({"c": (1,)}, "c"), ({"a.bias": None}, "a.bias"), ({"a.weight": (3, 2)}, "a.weight")]
)
def test_tensors_that_differ_are_named(folder, changes, name):
    found = inspect_transformer(str(folder), "student.checkpoint")
    check_tensors(found, SHAPES, "student.checkpoint")
    expected = {key: shape for key, shape in (SHAPES | changes).items() if shape is not None}
    message = refusal(check_tensors, found, expected, "student.checkpoint")
    assert message.startswith("student.checkpoint") and name in message


# ---------------------------------------------------------------- two experts


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
    assert "FOLDER" in refusal(inspect_transformer, str(pipeline), "FOLDER")
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
    assert "teacher.checkpoint" in refusal(inspect_checkpoint, str(pipeline), "teacher.checkpoint")


def test_half_a_pipeline_of_two_experts(experts, monkeypatch):
    pipeline, _ = experts
    for given in (str(pipeline / "transformer"), "transformer"):
        monkeypatch.chdir(pipeline)
        assert "teacher.checkpoint" in refusal(inspect_checkpoint, given, "teacher.checkpoint")
    (pipeline / "transformer_2" / FILE).unlink()
    assert "transformer_2" in refusal(inspect_checkpoint, str(pipeline), "teacher.checkpoint")
    (pipeline / "transformer_2" / "config.json").unlink()
    assert "transformer_2" in refusal(inspect_checkpoint, str(pipeline), "teacher.checkpoint")


# ---------------------------------------------------------------- with the real network


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    WanTransformer3DModel(**SMALL).save_pretrained(folder)
    return folder


@pytest.fixture
def wan(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "wan")


def rewrite_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 3},
        {"num_layers": 1},
        {"ffn_dim": 32},
        {"_class_name": "UNet2DModel"},
        {"_class_name": "a\nb"},
        {"image_dim": 16},
        {"in_channels": 30, "out_channels": 16},
    ],
    ids=str,
)
def test_config_that_does_not_fit_the_weights(wan, changes):
    rewrite_config(wan, **changes)
    assert refusal(plan_role, "student", checkpoint=str(wan)).startswith("student.checkpoint")


@pytest.mark.parametrize("name", ["../outside.safetensors", "sub/part-2.safetensors", "part-2.bin", "a\0b", 3])
def test_an_index_names_safetensors_of_its_folder_alone(sharded, name):
    (sharded / "sub").mkdir()
    for place in (sharded / "sub" / "part-2.safetensors", sharded.parent / "outside.safetensors"):
        shutil.copy(sharded / "part-2.safetensors", place)
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["b"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded)


def test_links_are_followed(folder, tmp_path):
    """The Hugging Face cache has this layout."""
    (tmp_path / "blob").write_bytes((folder / FILE).read_bytes())
    (folder / FILE).unlink()
    (folder / FILE).symlink_to("../blob")
    assert inspect_transformer(str(folder), "teacher.checkpoint").shapes == SHAPES


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_weights_that_are_no_floats(folder, dtype):
    """A flipped bit in a header turns F32 into I32; the same bytes would then be other weights."""
    save_file({**TENSORS, "b": torch.zeros(4).to(dtype)}, folder / FILE)
    refused(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", 10**9), ("num_layers", True), ("num_layers", "two"), ("patch_size", [1, 2]),
        ("patch_size", [1, 2, "2"]), ("attention_head_dim", 13), ("eps", float("nan")), ("cross_attn_norm", "yes"),
        ("qk_norm", {"a": 1}), ("rope_max_seq_len", 10**12), ("out_channels", "two"),
    ],
)  # fmt: skip
def test_values_that_no_wan_has(wan, key, value):
    """Some values would build for hours or with another meaning; others end in a traceback of diffusers."""
    rewrite_config(wan, **{key: value})
    message = refusal(plan_role, "student", checkpoint=str(wan))
    assert message.startswith("student.checkpoint") and key in message
    message = refusal(plan_role, "student", checkpoint=None, architecture={**SMALL, key: value})
    assert message.startswith("student.architecture") and key in message


def test_the_plans_configuration_is_what_defines_the_network(wan):
    """The plan omits diffusers' bookkeeping: the order of ``_use_default_values`` differs in every process."""
    given = {key: value for key, value in SMALL.items() if key != "rope_max_seq_len"}
    planned = plan_role("student", checkpoint=None, architecture=given).config
    assert [key for key in planned if key.startswith("_")] == ["_class_name"]
    assert planned == json.loads(json.dumps(planned)), "no tuples: a state gives back lists"
    assert planned["rope_max_seq_len"] == 1024 and planned["patch_size"] == [1, 2, 2]
    from_file = plan_role("student", checkpoint=str(wan)).config
    assert from_file["_class_name"] == planned["_class_name"] == "WanTransformer3DModel"
    assert from_file == planned | {"rope_max_seq_len": 32}
    assert plan_role("student", checkpoint=None, architecture=planned).config == planned


@pytest.mark.parametrize(
    ("latents", "setting"),
    [((2, 33, 4, 4), "data.num_frames"), ((2, 32, 66, 4), "data.height"), ((2, 1, 4, 10**6), "data.width")],
)
def test_more_positions_than_the_rotary_tables_have(wan, latents, setting):
    plan = plan_role("student", checkpoint=str(wan))
    assert plan.tokens({"video": (2, 32, 64, 64)}, {"text": (1, 6)}) == 32 * 32 * 32
    assert setting in refusal(plan.tokens, {"video": latents}, {"text": (1, 6)})
