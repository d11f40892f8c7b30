"""A role's checkpoint folder: what is found in it, and one clear line for whatever is wrong with it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from fsdp_cp.errors import UserError
from models.checkpoint_files import check_tensors, inspect_transformer
from models.role_plan import plan_role

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


def refusal(checkpoint) -> str:
    with pytest.raises(UserError) as caught:
        inspect_transformer(str(checkpoint), "fake.checkpoint")
    message = str(caught.value)
    assert message.startswith(f"fake.checkpoint={checkpoint}") and "\n" not in message
    return message


def test_transformer_folder_and_pipeline_folder_are_the_same(folder):
    direct = inspect_transformer(str(folder), "teacher.checkpoint")
    through = inspect_transformer(str(folder.parent), "teacher.checkpoint")
    assert direct == through
    assert direct.path == folder and direct.config == {"num_layers": 2} and direct.shapes == SHAPES


def test_shapes_come_from_all_files_of_an_index(sharded):
    assert inspect_transformer(str(sharded), "teacher.checkpoint").shapes == SHAPES


def test_missing_folder(tmp_path):
    assert "is not a folder" in refusal(tmp_path / "nowhere")


def test_a_file_is_not_a_folder(folder):
    assert "is not a folder" in refusal(folder / FILE)


def test_no_config(folder):
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder)
    assert "transformer/config.json" in refusal(folder.parent)


@pytest.mark.parametrize("text", ["{", "", "[]", "3", "null"])
def test_config_that_is_no_json_object(folder, text):
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(folder)


def test_no_weights(folder):
    (folder / FILE).rename(folder / "diffusion_pytorch_model.bin")
    assert ".safetensors" in refusal(folder)


@pytest.mark.parametrize("content", ["empty", "garbage", "truncated header", "truncated tensors"])
def test_broken_weights(folder, content):
    whole = (folder / FILE).read_bytes()
    broken = {"empty": b"", "garbage": b"\xff" * 100, "truncated header": whole[:20], "truncated tensors": whole[:-4]}
    (folder / FILE).write_bytes(broken[content])
    assert FILE in refusal(folder)


def test_broken_file_of_an_index(sharded):
    (sharded / "part-2.safetensors").write_bytes(b"")
    assert "part-2.safetensors" in refusal(sharded)


def test_file_that_the_index_names_is_missing(sharded):
    (sharded / "part-2.safetensors").unlink()
    assert "lacks part-2.safetensors" in refusal(sharded)


def test_file_that_the_index_does_not_name(sharded):
    """The reader would take every file of the folder, and the stray one might win."""
    save_file(TENSORS, sharded / "older.safetensors")
    assert "older.safetensors" in refusal(sharded)


def test_second_file_without_an_index(folder):
    """As above: the weights of a variant would be mixed into those of the network."""
    save_file(TENSORS, folder / "diffusion_pytorch_model.fp16.safetensors")
    assert "diffusion_pytorch_model.fp16.safetensors" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_broken_index(sharded, text):
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded)


# ---------------------------------------------------------------- tensors


def difference(folder, **changes) -> str:
    expected = {**SHAPES, **changes}
    with pytest.raises(UserError) as caught:
        check_tensors(
            inspect_transformer(str(folder), "student.checkpoint"),
            {name: shape for name, shape in expected.items() if shape is not None},
            "student.checkpoint",
        )
    message = str(caught.value)
    assert message.startswith(f"student.checkpoint={folder}") and "\n" not in message
    return message


def test_what_fits_passes(folder):
    check_tensors(inspect_transformer(str(folder), "student.checkpoint"), SHAPES, "student.checkpoint")


def test_missing_tensors_are_named(folder):
    message = difference(folder, c=(1,), d=(2,))
    assert "lacks c, d" in message
    message = difference(folder, **{name: (1,) for name in "cdefg"})
    assert "lacks c, d, e and 2 more" in message


def test_unexpected_tensors_are_named(folder):
    assert "unexpected a.bias, b" in difference(folder, **{"a.bias": None, "b": None})


def test_other_shapes_are_named_with_both(folder):
    message = difference(folder, **{"a.weight": (3, 2)})
    assert "a.weight" in message and "(2, 3)" in message and "(3, 2)" in message
    assert "(2 tensors differ)" in difference(folder, **{"a.weight": (3, 2), "b": (5,)})


# ---------------------------------------------------------------- with the real network

SMALL = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 2,
    "out_channels": 2,
    "text_dim": 6,
    "freq_dim": 8,
    "ffn_dim": 16,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


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


def planning_refusal(**given) -> str:
    with pytest.raises(UserError) as caught:
        plan_role("student", **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_saved_network_is_planned_from_its_folder(wan):
    plan = plan_role("student", checkpoint=str(wan))
    assert plan.config["num_layers"] == 2 and plan.folders[0].path == wan and plan.family.heads(plan.config) == 2


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_layers": 3}, ["lacks", "blocks.2."]),
        ({"num_layers": 1}, ["unexpected", "blocks.1."]),
        ({"ffn_dim": 32}, ["ffn.net", "(16", "(32"]),
        ({"_class_name": "UNet2DModel"}, ["UNet2DModel", "WanTransformer3DModel"]),
        ({"image_dim": 16}, ["image-to-video"]),
        ({"in_channels": 30, "out_channels": 16}, ["takes 30 channels and returns 16", "image-to-video"]),
        ({"num_layers": "two"}, ["num_layers"]),
    ],
    ids=str,
)
def test_config_that_does_not_fit_the_weights(wan, changes, parts):
    rewrite_config(wan, **changes)
    message = planning_refusal(checkpoint=str(wan))
    assert message.startswith("student.checkpoint") and all(part in message for part in parts), message


@pytest.mark.parametrize("wrong", [{"num_layer": 2}, {"num_layers": "two"}, {"patch_size": "abc"}], ids=str)
def test_architecture_that_wan_does_not_know(wrong):
    """diffusers ignores a misspelt key with a warning, and would build its default of 14B parameters."""
    message = planning_refusal(checkpoint=None, architecture={**SMALL, **wrong})
    assert "student.architecture" in message and next(iter(wrong)) in message


def test_neither_and_both_of_checkpoint_and_architecture(wan):
    for given in ({"checkpoint": None}, {"checkpoint": str(wan), "architecture": SMALL}):
        message = planning_refusal(**given)
        assert message.startswith("student.checkpoint") and "student.architecture" in message


def test_unknown_family(wan):
    message = planning_refusal(checkpoint=str(wan), family="won")
    assert message == "student.family=won is unknown; use wan or ltx or hunyuan15"


# ---------------------------------------------------------------- files from outside


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/part-2.safetensors", "part-2.bin", "", "a\0b", "..", 3, None]
)
def test_an_index_names_safetensors_of_its_folder_alone(sharded, name):
    (sharded / "sub").mkdir()
    for place in (sharded / "sub" / "part-2.safetensors", sharded.parent / "outside.safetensors"):
        shutil.copy(sharded / "part-2.safetensors", place)
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["b"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    assert INDEX in refusal(sharded)


def test_links_are_followed(folder, tmp_path):
    """The layout of the Hugging Face cache."""
    (tmp_path / "blob").write_bytes((folder / FILE).read_bytes())
    (folder / FILE).unlink()
    (folder / FILE).symlink_to("../blob")
    assert inspect_transformer(str(folder), "teacher.checkpoint").shapes == SHAPES


def test_a_tensor_in_two_files(sharded):
    save_file(
        {"b": TENSORS["b"], "a.weight": TENSORS["a.weight"] + 1, "a.bias": TENSORS["a.bias"]},
        sharded / "part-2.safetensors",
    )
    assert "a.weight is in part-2.safetensors and in another file" in refusal(sharded)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_floats(folder, dtype):
    """A flipped bit in a header turns F32 into I32: the same bytes, converted to other weights."""
    save_file({**TENSORS, "b": torch.zeros(4).to(dtype)}, folder / FILE)
    message = refusal(folder)
    assert f"{FILE} holds b as " in message and "use" not in message.split("holds")[0]


def test_one_ranks_part_of_a_sharded_save(folder):
    save_file(TENSORS, folder / FILE, metadata={"DCP_SHARDING_INFO": "{}"})
    assert "one rank's part" in refusal(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, '{"_class_name": "a\\nb"}'])
def test_json_that_breaks_readers(wan, text):
    (wan / "config.json").write_text(text)
    assert planning_refusal(checkpoint=str(wan)).startswith("student.checkpoint")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", 10**9), ("num_layers", -1), ("num_layers", 0), ("num_layers", True), ("num_layers", 2.0),
        ("num_layers", None), ("num_layers", [2]), ("patch_size", "122"), ("patch_size", [1, 2]), ("patch_size", 2),
        ("patch_size", [1, 2, 0]), ("patch_size", [1, 2, "2"]), ("patch_size", [1, 2, 10**9]), ("patch_size", None),
        ("attention_head_dim", 13), ("attention_head_dim", 10**9), ("num_attention_heads", 0), ("eps", "tiny"),
        ("eps", float("nan")), ("eps", -1), ("cross_attn_norm", "yes"), ("qk_norm", {"a": 1}), ("text_dim", {}),
        ("rope_max_seq_len", 10**12), ("freq_dim", 1), ("ffn_dim", -16), ("out_channels", "two"), ("in_channels", None),
    ],
)  # fmt: skip
def test_values_that_no_wan_has(wan, key, value):
    """Some would be built for hours, some with another meaning, some end in a traceback of diffusers."""
    rewrite_config(wan, **{key: value})
    message = planning_refusal(checkpoint=str(wan))
    assert message.startswith("student.checkpoint") and f"{key}=" in message
    message = planning_refusal(checkpoint=None, architecture={**SMALL, key: value})
    assert message.startswith("student.architecture") and f"{key}=" in message


def test_the_plans_configuration_is_what_defines_the_network(wan):
    """diffusers' notes on it are left out: ``_use_default_values`` is in another order in every process."""
    given = {key: value for key, value in SMALL.items() if key != "rope_max_seq_len"}
    planned = plan_role("student", checkpoint=None, architecture=given).config
    assert [key for key in planned if key.startswith("_")] == ["_class_name"]
    assert planned == json.loads(json.dumps(planned)), "no tuples: a state gives back lists"
    assert planned["rope_max_seq_len"] == 1024 and planned["patch_size"] == [1, 2, 2]
    from_file = plan_role("student", checkpoint=str(wan)).config
    assert from_file["_class_name"] == planned["_class_name"] == "WanTransformer3DModel"
    assert from_file == planned | {"rope_max_seq_len": 32}
    assert plan_role("student", checkpoint=None, architecture=planned).config == planned


@pytest.mark.slow
def test_the_plans_configuration_does_not_depend_on_the_hash_seed():
    code = (
        "import json; from models.role_plan import plan_role\n"
        "print(json.dumps(plan_role('student', checkpoint=None, architecture={'num_layers': 1}).config))"
    )
    command, root = [sys.executable, "-c", code], Path(__file__).resolve().parents[2]
    said = [
        subprocess.run(
            command, cwd=root, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("latents", "words"),
    [
        ((2, 33, 4, 4), "data.num_frames gives 33 latent positions, but student.checkpoint has rope_max_seq_len=32 in"
            " patches of 1; use at most 32 latent positions (data.num_frames=32 without a VAE, 125 with Wan's)"),
        ((2, 32, 66, 4), "data.height gives 66 latent positions, but student.checkpoint has rope_max_seq_len=32 in"
            " patches of 2; use at most 64 latent positions (data.height=64 without a VAE, 512 with Wan's)"),
        ((2, 1, 4, 10**6), "data.width gives 1000000 latent positions"),
    ],
)  # fmt: skip
def test_more_positions_than_the_rotary_tables_have(wan, latents, words):
    plan = plan_role("student", checkpoint=str(wan))
    assert plan.tokens((2, 32, 64, 64), {"text": (1, 6)}) == 32 * 32 * 32
    with pytest.raises(UserError) as error:
        plan.tokens(latents, {"text": (1, 6)})
    assert words in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UserError, match="but student.architecture has rope"):
        plan_role("student", checkpoint=None, architecture=SMALL).tokens((2, 33, 4, 4), {"text": (1, 6)})
