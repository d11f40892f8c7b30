"""Small stand-ins for the files that documented commands name, and how a command line is started beside them."""

from __future__ import annotations

import json
import math
import re
import shlex
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.families import wan_frames
from models.families.hunyuan import Hunyuan
from tests.e2e.documented import taken_apart
from tests.e2e.forked import run_forked
from tests.e2e.launch import ROOT, environment
from tests.tiny_pipeline import build_tiny_pipeline, render_clips
from tests.unit.test_recipes import ARCHITECTURES

SMALL = [
    "device=cpu", "steps=2", "batch_size=2", "log.every=1", "checkpoint.every=0", "sample.every=0", "sample.prompts=1",
    "sample.student_steps=[1]", "sample.teacher_steps=[]", "sample.report_clips=0",
]  # fmt: skip
"""What makes a quickstart one of a few seconds."""


@dataclass(frozen=True)
class Places:
    """Small stand-ins for the files that the documents speak of; ``elsewhere`` is where the commands are typed."""

    root: Path

    @property
    def elsewhere(self) -> Path:
        return self.root / "elsewhere"

    def put(self, word: str) -> str:
        """``word`` with this machine's paths in the place of the documents'."""
        if word == "TEXT":
            return "a red circle growing"
        if word in ("RUN_DIR", "RUN", "/shared/runs/wan_dmd2"):
            return str(self.run)
        for name in ("/ckpt", "/data", "/shared"):
            word = re.sub(rf"(^|=){name}(?=/|$)", rf"\g<1>{self.root}{name}", word)
        word = re.sub(r"(^|=)(/tmp/pipeline|FOLDER)$", rf"\g<1>{self.root}/pipeline", word)
        word = re.sub(r"(^|=)CLIPS$", rf"\g<1>{self.root}/clips", word)
        return word if word not in ("OUT", "OUT.safetensors", "timeline.png") else str(self.elsewhere / word)

    @property
    def run(self) -> Path:
        """A finished run, for the commands that take one."""
        folder = self.root / "run"
        if not (folder / "export").is_dir():
            arguments = ["torchrun", "--nproc-per-node", "2", "train.py", "experiment=quickstart", f"run_dir={folder}"]
            start(shlex.join([*arguments, *SMALL]), self)
        return folder


def make_places(root: Path) -> Places:
    """Tiny pipeline and clips, and folders of Wan's shapes: safetensors files with a header, and holes for the rest."""
    found = Places(root)
    found.elsewhere.mkdir()
    build_tiny_pipeline(found.root / "pipeline")
    render_clips(found.root / "clips", 2, frames=40, fps=8, height=72, width=120)
    render_clips(found.root / "data" / "clips", 2)
    captions = "".join(f"a bird, number {i}\n" for i in range(30))
    for name in ("prompts.txt", "vidprom_filtered_extended.txt"):
        (found.root / "data" / name).write_text(captions)
    for size, architecture in (("1.3B", "1_3b"), ("14B", "14b")):
        _write_hollow_wan(found.root / "ckpt" / f"Wan2.1-T2V-{size}-Diffusers", ARCHITECTURES[architecture])
    image = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
    folder = found.root / "ckpt" / "Wan2.1-I2V-14B-480P-Diffusers"
    _write_hollow_wan(folder, ARCHITECTURES["14b"] | image)
    _write_hollow_clip(folder)
    folder = found.root / "ckpt" / "Wan2.2-TI2V-5B-Diffusers"
    _write_hollow_wan(folder, dict(wan_frames.PUBLISHED), wan_frames.VAE)
    (folder / "model_index.json").write_text('{"expand_timesteps": true}')
    folder = found.root / "ckpt" / "Wan2.2-T2V-A14B-Diffusers"
    _write_hollow_wan(folder, ARCHITECTURES["14b"])
    (folder / "transformer_2").symlink_to("transformer")
    (folder / "model_index.json").write_text('{"boundary_ratio": 0.875}')
    _write_hollow_ltx(found.root / "ckpt" / "LTX-Video")
    _write_hollow_hunyuan(found.root / "ckpt" / "HunyuanVideo-1.5")
    return found


def _write_hollow_wan(folder: Path, architecture: dict, vae_settings: Mapping[str, Any] | None = None) -> None:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    with torch.device("meta"):
        transformer, vae = WanTransformer3DModel(**architecture), AutoencoderKLWan(**vae_settings or {})
        text = UMT5EncoderModel(UMT5Config(vocab_size=256384, d_model=4096, d_ff=10240, num_layers=24, num_heads=64))
    text.config.architectures = ["UMT5EncoderModel"]
    _write_hollow_parts(folder, transformer, vae, text)


def _write_hollow_ltx(folder: Path) -> None:
    """LTX-Video 0.9.0."""
    from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel
    from transformers import T5Config, T5EncoderModel

    with torch.device("meta"):
        transformer, vae = LTXVideoTransformer3DModel(), AutoencoderKLLTXVideo()
        text = T5EncoderModel(T5Config(vocab_size=32128, d_model=4096, d_ff=10240, num_layers=24, num_heads=64))
    text.config.architectures = ["T5EncoderModel"]
    _write_hollow_parts(folder, transformer, vae, text)


def _write_hollow_hunyuan(folder: Path) -> None:
    """HunyuanVideo 1.5, of text."""
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

    settings = {key: value for key, value in Hunyuan.text_encoder.items() if key != "architectures"}
    with torch.device("meta"):
        transformer, vae = HunyuanVideo15Transformer3DModel(), AutoencoderKLHunyuanVideo15()
        text = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**settings))
        glyphs = T5EncoderModel(
            T5Config(vocab_size=1510, d_model=1472, d_ff=3584, d_kv=64, num_layers=12, num_heads=6)
        )  # fmt: skip
    text.config.architectures, glyphs.config.architectures = ["Qwen2_5_VLTextModel"], ["T5EncoderModel"]
    _write_hollow_parts(folder, transformer, vae, text)
    _write_hollow_part(folder / "text_encoder_2", glyphs)
    (folder / "tokenizer_2").mkdir()
    (folder / "tokenizer_2" / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer" / "chat_template.jinja").write_text("{{ messages[1]['content'] }}")


def _write_hollow_parts(folder: Path, transformer, vae, text) -> None:
    for part, model in (("transformer", transformer), ("vae", vae), ("text_encoder", text)):
        _write_hollow_part(folder / part, model)
    (folder / "tokenizer").mkdir()


def _write_hollow_part(folder: Path, model) -> None:
    """A model of diffusers, or of transformers."""
    folder.mkdir(parents=True)
    (model.save_config if hasattr(model, "save_config") else model.config.save_pretrained)(folder)
    _write_hollow_shards(folder, {name: list(tensor.shape) for name, tensor in model.state_dict().items()})


def _write_hollow_clip(folder: Path) -> None:
    """CLIP ViT-H/14 and its processor, as an image-to-video pipeline has them."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    with torch.device("meta"):
        encoder = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16, image_size=224,
                patch_size=14,
            )
        )  # fmt: skip
    encoder.config.architectures = ["CLIPVisionModel"]
    encoder.config.save_pretrained(folder / "image_encoder")
    _write_hollow_shards(
        folder / "image_encoder", {name: list(tensor.shape) for name, tensor in encoder.state_dict().items()}
    )
    (folder / "image_processor").mkdir()
    (folder / "image_processor" / "preprocessor_config.json").write_text("{}")


def _write_hollow_shards(folder: Path, shapes: dict[str, list[int]]) -> None:
    """Safetensors files of at most 10 GB, as diffusers writes them, and their index."""
    shards: list[dict] = [{}]
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        if end > 10**10:
            shards.append({})
            begin, end = 0, end - begin
        shards[-1][name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    where = {}
    for i, header in enumerate(shards, start=1):
        raw = json.dumps(header).encode()
        file = f"diffusion_pytorch_model{f'-{i:05}-of-{len(shards):05}' if len(shards) > 1 else ''}.safetensors"
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(raw)) + raw)
            stream.truncate(8 + len(raw) + list(header.values())[-1]["data_offsets"][1])
        where |= dict.fromkeys(header, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": where}
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def start(
    command: str, places: Places, *more: str, check: bool = True, typed: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command line of torchrun or python as a user in another folder would.

    Args:
        command: the line.
        places: what it names.
        more: further words.
        check: it must end well.
        typed: with torchrun, and in interpreters of its own; else those of train.py and of its packages are forked.
    """
    launch = taken_apart(command)
    env = environment()
    words = [*map(places.put, launch.words), *more]
    package = launch.target.split(".")[0]
    if not typed and package in ("train", "distill", "models"):
        name = launch.target.removesuffix(".py")
        done = run_forked(launch.world, name, words, cwd=places.elsewhere, environment=env, timeout=500)
    else:
        if launch.module and package in ("benchmarks", "tests"):
            env["PYTHONPATH"] = str(ROOT)  # these are in the checkout and not installed
        target = ["-m", launch.target] if launch.module else [str(ROOT / launch.target)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(launch.world)]
        done = subprocess.run(
            [sys.executable, *(torchrun if launch.world else []), *target, *words],
            cwd=places.elsewhere, env=env, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done
