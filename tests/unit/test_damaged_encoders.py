"""Damaged encoders: refused in one line, never used, and their code never run."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from distill.data.encoders.choose import choose_encoders
from distill.data.encoders.wan import TextEncoder, VideoCodec
from fsdp_cp.errors import UserError
from tests.unit.refused import change, check_no_encoders, refused

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@pytest.fixture
def pipeline(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "pipeline")


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("tokenizer/tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}),
        ("text_encoder/config.json", {"auto_map": {"AutoModel": "evil.Model"}}),
        ("text_encoder/config.json", {"attn_implementation": "somebody/kernels"}),
        ("text_encoder/config.json", {"architectures": [3]}),
        ("text_encoder/config.json", {"d_model": None}),
        ("text_encoder/config.json", {"num_layers": 10**9}),
        ("vae/config.json", {"z_dim": "16"}),
        ("vae/config.json", {"dim_mult": [1] * 64}),
        ("vae/config.json", {"temperal_downsample": [0, 1, 10**6]}),
        ("vae/config.json", {"latents_std": [0.0] * 16}),
        ("vae/config.json", {"latents_mean": [float("nan")] * 16}),
        ("transformer/config.json", {"patch_size": [0, 2, 2]}),
    ],
)
def test_settings_of_encoders_that_cannot_be(pipeline, file, settings):
    (key,) = settings
    check_no_encoders(pipeline, file, settings, "" if key == "architectures" else key)


def test_settings_that_are_no_json_objects(pipeline):
    for file in ("vae/config.json", "text_encoder/config.json", "tokenizer/tokenizer_config.json"):
        whole = (pipeline / file).read_bytes()
        for text in (b"[" * 100_000, b"[]", b"\xff", b""):
            (pipeline / file).write_bytes(text)
            with refused(file):
                choose_encoders(pipeline)
        (pipeline / file).write_bytes(whole)


def test_code_of_a_folder_is_never_run(pipeline, monkeypatch):
    """Check the loader itself: the folder is changed after its inspection."""
    (pipeline / "tokenizer" / "evil.py").write_text("raise SystemExit('code from a checkpoint was run')\n")
    folder = choose_encoders(pipeline)
    classes = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    change(pipeline / "tokenizer" / "tokenizer_config.json", auto_map=classes)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asks whether to run the code"))
    try:
        TextEncoder(folder, max_tokens=8, **CPU)  # the known class of that name is taken
    except UserError as error:
        assert "tokenizer" in str(error)
    assert not any("evil" in name for name in sys.modules)


def test_pickles_are_never_read(pipeline):
    """Pickles next to safetensors are ignored; pickles alone are refused."""
    for part, name in (("vae", "diffusion_pytorch_model"), ("text_encoder", "model")):
        (pipeline / part / f"{name}.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (pipeline / "text_encoder" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    folder = choose_encoders(pipeline)
    VideoCodec(folder, **CPU), TextEncoder(folder, max_tokens=8, **CPU)
    (pipeline / "text_encoder" / "model.safetensors").unlink()
    with refused("text_encoder"):
        choose_encoders(pipeline)


def test_an_index_outside_the_folder_and_an_adapter(pipeline):
    index = pipeline / "text_encoder" / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": {"shared.weight": "../vae/diffusion_pytorch_model.safetensors"}})
    )
    with refused("model.safetensors.index.json"):
        choose_encoders(pipeline)
    index.unlink()
    (pipeline / "text_encoder" / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with refused("adapter_config.json"):
        choose_encoders(pipeline)


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
def test_encoders_with_weights_that_are_not_finite(pipeline, part):
    """A VAE's decoder is first used at the end of the run: its samples would be noise."""
    file = next((pipeline / part).glob("*.safetensors"))
    weights = load_file(file)
    name = sorted(name for name in weights if "decoder" in name or part == "text_encoder")[-1]
    weights[name].view(-1)[-1] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    folder = choose_encoders(pipeline)
    with refused(name):
        VideoCodec(folder, **CPU) if part == "vae" else TextEncoder(folder, max_tokens=8, **CPU)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["added_tokens"].append({"id": 99999, "content": "zzz"} | FLAGS),  # beyond the word table
        lambda t: t.pop("model"),
    ],
)
def test_tokenizers_of_other_models(pipeline, change):
    file = pipeline / "tokenizer" / "tokenizer.json"
    settings = json.loads(file.read_text())
    change(settings)
    file.write_text(json.dumps(settings))
    with refused("tokenizer"):
        TextEncoder(choose_encoders(pipeline), max_tokens=8, **CPU).encode("zzz")
