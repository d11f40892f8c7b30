"""Encoders that are damaged or not what they say: named in one line, never used."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from distill.data.encoders import TextEncoder, VideoCodec, inspect_encoders
from fsdp_cp.errors import UserError

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@pytest.fixture
def pipeline(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "pipeline")


@pytest.mark.parametrize(
    ("file", "settings", "words"),
    [
        ("tokenizer/tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}, "has auto_map"),
        ("text_encoder/config.json", {"auto_map": {"AutoModel": "evil.Model"}}, "has auto_map"),
        ("vae/config.json", {"auto_map": {"AutoModel": "evil.Model"}}, "has auto_map"),
        ("text_encoder/config.json", {"attn_implementation": "somebody/kernels"}, "has attn_implementation"),
        ("text_encoder/config.json", {"quantization_config": {"quant_method": "x"}}, "has quantization_config"),
        ("text_encoder/config.json", {"architectures": "UMT5EncoderModel"}, "without a class name"),
        ("text_encoder/config.json", {"architectures": [3]}, "holds 3; use UMT5EncoderModel"),
        ("text_encoder/config.json", {"d_model": "32"}, "d_model='32'"),
        ("text_encoder/config.json", {"d_model": None}, "d_model=None"),
        ("text_encoder/config.json", {"num_layers": 10**9}, "num_layers=1000000000, beyond 1024"),
        ("text_encoder/config.json", {"vocab_size": 10**12}, "beyond"),
        ("vae/config.json", {"z_dim": "16"}, "z_dim='16'"),
        ("vae/config.json", {"z_dim": -16}, "z_dim=-16"),
        ("vae/config.json", {"dim_mult": 4}, "dim_mult=4"),
        ("vae/config.json", {"dim_mult": [1] * 64}, "dim_mult="),
        ("vae/config.json", {"temperal_downsample": [0, 1, 10**6]}, "temperal_downsample="),
        ("vae/config.json", {"latents_std": [0.0] * 16}, "latents_std="),
        ("vae/config.json", {"latents_mean": ["a"] * 16}, "latents_mean="),
        ("vae/config.json", {"latents_mean": [float("nan")] * 16}, "latents_mean="),
        ("vae/config.json", {"num_res_blocks": 10**9}, "num_res_blocks=1000000000, beyond 1024"),
        ("transformer/config.json", {"patch_size": "122"}, "patch_size='122'; use [1, 2, 2]"),
        ("transformer/config.json", {"patch_size": [0, 2, 2]}, "patch_size=[0, 2, 2]"),
    ],
)
def test_settings_of_encoders_that_cannot_be(pipeline, file, settings, words):
    path = pipeline / file
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(UserError) as error:
        inspect_encoders(pipeline)
    message = str(error.value)
    assert message.startswith(f"data.encoders={pipeline}") and words in message and "\n" not in message


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", "\udcff", ""])
@pytest.mark.parametrize("file", ["vae/config.json", "text_encoder/config.json", "tokenizer/tokenizer_config.json"])
def test_settings_that_are_no_json_objects(pipeline, file, text):
    (pipeline / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=f"data.encoders=.*{file}"):
        inspect_encoders(pipeline)


def test_code_of_a_folder_is_never_run(pipeline, monkeypatch):
    """Not even where the check above is passed by."""
    (pipeline / "tokenizer" / "evil.py").write_text("raise SystemExit('code from a checkpoint was run')\n")
    path = pipeline / "tokenizer" / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}}
    folder = inspect_encoders(pipeline)
    path.write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asks whether to run the code"))
    try:
        TextEncoder(folder, max_tokens=8, **CPU)  # the known class of that name is taken
    except UserError as error:
        assert "tokenizer/ cannot be read" in str(error)
    assert not any("evil" in name for name in sys.modules)


def test_pickles_are_never_read(pipeline):
    """Beside safetensors they are passed by; alone they are refused."""
    for part, name in (("vae", "diffusion_pytorch_model"), ("text_encoder", "model")):
        (pipeline / part / f"{name}.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (pipeline / "text_encoder" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    folder = inspect_encoders(pipeline)
    VideoCodec(folder, **CPU), TextEncoder(folder, max_tokens=8, **CPU)
    (pipeline / "text_encoder" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="text_encoder/ holds no .safetensors weights; other formats are not read"):
        inspect_encoders(pipeline)


def test_an_index_outside_the_folder_and_an_adapter(pipeline):
    index = pipeline / "text_encoder" / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": {"shared.weight": "../vae/diffusion_pytorch_model.safetensors"}})
    )
    with pytest.raises(UserError, match="text_encoder/: model.safetensors.index.json names '../vae"):
        inspect_encoders(pipeline)
    index.unlink()
    (pipeline / "text_encoder" / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(UserError, match="text_encoder/ holds adapter_config.json"):
        inspect_encoders(pipeline)


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
def test_encoders_with_weights_that_are_not_finite(pipeline, part):
    """A VAE's decoder is first used at the end of the run: its samples would be noise."""
    file = next((pipeline / part).glob("*.safetensors"))
    weights = load_file(file)
    name = sorted(name for name in weights if "decoder" in name or part == "text_encoder")[-1]
    weights[name].view(-1)[-1] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    folder = inspect_encoders(pipeline)
    with pytest.raises(UserError) as error:
        VideoCodec(folder, **CPU) if part == "vae" else TextEncoder(folder, max_tokens=8, **CPU)
    assert f"{part}/ is damaged, {name} is not finite" in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t["added_tokens"].append({"id": 99999, "content": "zzz"} | FLAGS),
            "has words that the text encoder",
        ),
        (lambda t: t.pop("model"), "tokenizer/ cannot be read"),
        (lambda t: t.update(model={"type": "Unigram", "vocab": [], "unk_id": 7}), "tokenizer/ cannot be read"),
    ],
)
def test_tokenizers_of_other_models(pipeline, change, words):
    file = pipeline / "tokenizer" / "tokenizer.json"
    settings = json.loads(file.read_text())
    change(settings)
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError) as error:
        TextEncoder(inspect_encoders(pipeline), max_tokens=8, **CPU).encode("zzz")
    assert words in str(error.value) and "\n" not in str(error.value)
