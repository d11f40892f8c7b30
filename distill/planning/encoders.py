"""Memory of a data set's encoders, measured on fake tensors: encoding before training, decoding of samples."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from distill.config import Config
from distill.data.base import VAE_PRECISIONS
from distill.data.encoders.choose import FAMILIES
from distill.data.encoders.image import CLIP, encode_zeros
from distill.data.encoders.ltx2_5 import prepared
from distill.data.encoders.wan import EncoderFolder, TextEncoder
from distill.data.encoders.words import table_file
from distill.data.settings import EncodedSettings, VideoFolderSettings
from distill.run.setup import Shapes
from fsdp_cp.measure.fake_world import fake_tensors
from fsdp_cp.measure.memory import LiveStorages, Peak
from models.condition import REFERENCES
from models.families.ltx2_5 import DECODER
from models.families.registry import family_of
from models.files.shipped import find_shipped
from models.sample import VIDEO


def encoder_peaks(config: Config, shapes: Shapes) -> dict[str, Peak]:
    """Return the peak memory of the phases ``encode/...`` and ``decode`` on a rank's device; empty for rendered data.
    An encoder is alone on the device, before the networks, and takes single captions or clips; the decoder takes single
    samples next to the networks, not included. Without ``data.encoders``, the family has published ones."""
    parts, _ = shapes
    data = config.data
    if isinstance(data, EncodedSettings):
        data = data.encoding()
    elif not isinstance(data, VideoFolderSettings):
        return {}
    if data.encoders is not None and table_file(data.encoders).is_file():
        return {}
    settings = encoder_settings(config, data.encoders, shapes)
    kind = FAMILIES[settings["vae"].get("_class_name", EncoderFolder.codec_class.vae_class)]
    build_codec = partial(_build_codec, data, kind, settings)
    peaks = {}
    if isinstance(data, VideoFolderSettings):
        # The text of references shows tens of thousands of their rows.
        tokens = shapes[1]["text"][0] if REFERENCES in shapes[1] else config.data.max_text_tokens
        peaks["encode/captions"] = _captions_peak(tokens, kind, settings)
        if data.has_clips or data.image is not None:
            # Latents of an image can be those of a clip that begins with it.
            frames = data.num_frames if data.has_clips or "image_latents" in shapes[1] else 1
            pixels = (1, 3, frames, data.height, data.width)
            peaks["encode/clips"] = _peak(build_codec, lambda vae: vae.encode(torch.zeros(pixels, dtype=vae.dtype)))
        if image := settings["image_encoder"]:
            peaks["encode/images"] = _peak(lambda: build_encoder(image, CLIP[0]), encode_zeros)
    if config.sample.at_end or config.sample.every or config.guard.every:
        shape = (1, *parts[VIDEO])
        build = partial(_build_decoder, data, settings[DECODER], build_codec) if DECODER in settings else build_codec
        peaks["decode"] = _peak(build, lambda vae: _decode(vae, torch.zeros(shape, dtype=vae.dtype)))
    return peaks


def _build_decoder(data: VideoFolderSettings | EncodedSettings, settings: Mapping[str, Any], codec: Any) -> Any:
    """Build a diffusion decoder, next to the VAE."""
    with _default_dtype(VAE_PRECISIONS[data.vae_precision]):
        model = prepared(build_vae(settings), data.vae_tiling, planned=True)
    model.codec, network = codec(), model.decoder
    vars(model)["unused"] = network.det_stages, network.diff_blocks  # equal blocks peak as the first does
    network.det_stages = nn.ModuleList(blocks[:1] for blocks in network.det_stages)
    network.diff_blocks = network.diff_blocks[:1]
    return model


def _build_codec(
    data: VideoFolderSettings | EncodedSettings, kind: type[EncoderFolder], settings: Mapping[str, Mapping[str, Any]]
) -> Any:
    """Build the VAE and the networks of the sound next to it."""
    with _default_dtype(VAE_PRECISIONS[data.vae_precision]):
        vae = build_vae(settings["vae"])
    # The sound's networks are in fp32. Their activations are small, and not measured.
    vae.of_sound = nn.ModuleList(build_vae(settings[part]) for part in kind.codec_parts[1:] if part in settings)
    if data.vae_tiling:
        vae.enable_tiling()
    if blocks := getattr(vae.decoder, "transformer_blocks", None):  # hundreds of tiles through 36 blocks
        # Without gradients two equal blocks peak as all do. The others stay in memory.
        vae.decoder.transformer_blocks, vars(vae)["unused"] = blocks[:2], blocks
    return vae


def _captions_peak(tokens: int, kind: type[EncoderFolder], settings: Mapping[str, Mapping[str, Any]]) -> Peak:
    """Return the peak of encoding one text of so many tokens, with all text encoders of a folder of that ``kind``."""
    parts = [part for part in kind.text_parts if not part.startswith("tokenizer")]
    chosen = [settings.get(part, settings.get("text_encoder_2", {})) for part in parts]
    chosen[0] = kind.text_class.loaded_config(chosen[0])

    def build() -> nn.Module:
        with _default_dtype(kind.text_dtype):
            return nn.ModuleList(build_vae(one) if "_class_name" in one else build_encoder(one) for one in chosen)

    return _peak(build, lambda models: kind.text_class.encode_zeros(models, tokens))


def encoder_settings(config: Config, path: str | None, shapes: Shapes) -> dict[str, Mapping[str, Any]]:
    """Return ``config.json`` of each encoder by its sub-folder, without a ``path`` the family's published ones. The
    image encoder's is empty without image features."""
    parts, condition_shapes = shapes
    if path is None:
        planning = family_of(config.student.family, "student").planning
        settings = planning.encoders(parts[VIDEO][0], config.planning.model)
    else:
        files = Path(find_shipped(path)).glob("*/config.json")
        settings = {file.parent.name: json.loads(file.read_text()) for file in files}
    return settings if "image_embeds" in condition_shapes else {**settings, "image_encoder": {}}


def build_encoder(settings: Mapping[str, Any], default: str = TextEncoder.class_name) -> nn.Module:
    """Build the class of transformers that ``architectures`` of a ``config.json`` names first, with random weights on
    the current default device."""
    import transformers

    cls = getattr(transformers, next(iter(settings.get("architectures") or [default])))
    # transformers draws some weights with a branch on their values, which fake tensors cannot take.
    with mock.patch.object(transformers.PreTrainedModel, "init_weights"):
        model = cls(cls.config_class(**settings))
    model.tie_weights()
    return model


def build_vae(settings: Mapping[str, Any]) -> Any:
    """Build the VAE (Wan's if none is named), LTX-2's connectors or its vocoder, of a ``config.json`` with random
    weights."""
    import diffusers

    name = settings.get("_class_name", "AutoencoderKLWan")
    cls = getattr(diffusers if hasattr(diffusers, name) else import_module("diffusers.pipelines.ltx2"), name)
    return cls.from_config(dict(settings))


def _decode(model: Any, z: torch.Tensor) -> Any:
    """Decode latents; a VAE such as LTX's also takes their time."""
    return model.decode(z, *[z.new_zeros(1)] if model.config.get("timestep_conditioning") else [])


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Build modules in ``dtype``: ``Module.to`` cannot change the dtype of fake parameters (torch 2.13)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _peak(build: Callable[[], nn.Module], call: Callable[[Any], object]) -> Peak:
    storages = LiveStorages(fakes=True)
    with fake_tensors(), storages, torch.no_grad():
        with storages.labelled(("encoders", "parameters")):
            network = build().eval()
        storages.reset_peak()  # leave out the memory for drawing random weights
        with storages.labelled(("encoders", "activations")):
            call(network)
    return storages.peaks[""]
