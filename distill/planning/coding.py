"""What the encoders of a data set take on fake tensors: captions and clips before the steps, decoded samples after."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distill.config import Config
from distill.data.hunyuan_encoders import HUNYUAN_VAE_CLASS, TEMPLATE_TOKENS, HunyuanTextEncoder
from distill.data.image_encoder import SIGLIP
from distill.data.ltx_encoders import LTX_VAE_CLASS
from distill.data.settings import VAE_PRECISIONS, VideoFolderSettings
from distill.planning.watched import Shapes
from fsdp_cp.fake_world import fake_tensors
from fsdp_cp.measure.attributed import AttributedStorages, Peak
from models.families.registry import family_of
from models.shipped import find_shipped


def coding_peaks(config: Config, shapes: Shapes) -> dict[str, Peak]:
    """The peak of each part of ``encode/`` and ``decode/`` on a rank's device, beside whatever else it holds.

    Empty for data that are rendered. Captions are encoded one at a time and clips one at a time, each encoder alone on
    the device, before the networks are built; samples are decoded one at a time beside the networks.

    Args:
        config: the checked configuration; without ``data.encoders`` the published ones of the student's family count.
        shapes: of a sample's latents and condition.
    """
    latent_shape, _ = shapes
    if not isinstance(config.data, VideoFolderSettings):
        return {}
    text, vae, image = encoder_settings(config, shapes)
    data = config.data
    dtype = VAE_PRECISIONS[data.vae_precision]

    def build() -> Any:
        with _default_dtype(dtype):
            network = build_vae(vae)
        if data.vae_tiling:
            network.enable_tiling()
        return network

    peaks = {"encode/captions": _captions_peak(config, text)}
    if data.has_clips or data.image is not None:
        pixels = (1, 3, data.num_frames if data.has_clips else 1, data.height, data.width)
        peaks["encode/clips"] = _peak(build, lambda model: model.encode(torch.zeros(pixels, dtype=model.dtype)))
    if image:
        size = image["image_size"]
        peaks["encode/images"] = _peak(
            lambda: _image_encoder(image),
            lambda model: model(torch.zeros(1, 3, size, size), output_hidden_states=not _is_siglip(image)),
        )
    if config.sample.at_end or config.sample.every:
        shape = (1, *latent_shape)
        peaks["decode"] = _peak(build, lambda model: _decode(model, torch.zeros(shape, dtype=model.dtype)))
    return peaks


def _captions_peak(config: Config, text: Mapping[str, Any]) -> Peak:
    """Of a caption; HunyuanVideo's within its template, where all layers' outputs are there, since the last but two
    counts, and a second encoder stands beside the first."""
    tokens = config.data.max_text_tokens
    if not _is_qwen(text):
        return _peak(lambda: build_text_encoder(text), lambda model: model(*_caption(tokens)))
    if config.data.encoders is None:
        second = dict(family_of(config.student.family, "student").text_encoder_2)
    else:
        second = json.loads((find_shipped(config.data.encoders) / "text_encoder_2" / "config.json").read_text())
    return _peak(
        lambda: nn.ModuleList([build_text_encoder(text), build_text_encoder(second)]),
        lambda models: models[0](*_caption(tokens + TEMPLATE_TOKENS), output_hidden_states=True),
    )


def encoder_settings(config: Config, shapes: Shapes) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """``config.json`` of the text encoder, the VAE and the image encoder; of the last one ``{}`` where none is read.

    Without ``data.encoders``, the family's published ones for latents of as many channels. An image encoder is read
    where its features are of the condition.
    """
    (channels, *_), condition_shapes = shapes
    reads_image = "image_embeds" in condition_shapes
    if config.data.encoders is None:
        text, vae, image = map(dict, family_of(config.student.family, "student").encoders_for(channels).values())
        return text, vae, image if reads_image else {}
    folder = Path(find_shipped(config.data.encoders))
    parts = ["text_encoder", "vae"]
    if reads_image:
        parts.append("image_encoder")
    found = {part: json.loads((folder / part / "config.json").read_text()) for part in parts}
    return found["text_encoder"], found["vae"], found.get("image_encoder", {})


def build_text_encoder(settings: Mapping[str, Any]) -> nn.Module:
    """The encoder of ``config.json``, umT5's, T5's or Qwen's, with random weights on the current default device."""
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    if _is_qwen(settings):
        from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

        return Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**settings))
    if "T5EncoderModel" in (settings.get("architectures") or ()):
        return T5EncoderModel(T5Config(**settings))
    return UMT5EncoderModel(UMT5Config(**settings))


def _is_qwen(settings: Mapping[str, Any]) -> bool:
    return HunyuanTextEncoder.class_name in (settings.get("architectures") or ())


def _is_siglip(settings: Mapping[str, Any]) -> bool:
    return SIGLIP.classes[0] in (settings.get("architectures") or ())


def _image_encoder(settings: Mapping[str, Any]) -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel

    if _is_siglip(settings):
        return SiglipVisionModel(SiglipVisionConfig(**settings))
    return CLIPVisionModel(CLIPVisionConfig(**settings))


def _caption(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, tokens, dtype=torch.long), torch.ones(1, tokens, dtype=torch.long)


def build_vae(settings: Mapping[str, Any]) -> Any:
    """The VAE of ``config.json``, with random weights on the current default device; of ``{}`` Wan's as published."""
    from diffusers import AutoencoderKLHunyuanVideo15, AutoencoderKLLTXVideo, AutoencoderKLWan

    others = {LTX_VAE_CLASS: AutoencoderKLLTXVideo, HUNYUAN_VAE_CLASS: AutoencoderKLHunyuanVideo15}
    cls: Any = others.get(settings.get("_class_name", ""), AutoencoderKLWan)
    # Folders of other versions have keys that the class does not know; from_pretrained passes them by, too.
    parameters = inspect.signature(cls.__init__).parameters
    return cls(**{name: value for name, value in settings.items() if name in parameters})


def _decode(model: Any, z: torch.Tensor) -> Any:
    """LTX's VAE may take the time of what it decodes."""
    return model.decode(z, *[z.new_zeros(1)] if model.config.get("timestep_conditioning") else [])


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Of what is built inside: ``Module.to`` cannot change the dtype of fake parameters (torch 2.13)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _peak(build: Callable[[], nn.Module], call: Callable[[Any], object]) -> Peak:
    """Of one call of a network, as data sets run their encoders."""
    storages = AttributedStorages(fakes=True)
    with fake_tensors(), storages, torch.no_grad():
        with storages.labelled(("encoders", "parameters")):
            network = build().eval()
        storages.reset_peaks()  # what drawing random weights took
        with storages.labelled(("encoders", "activations")):
            call(network)
    return storages.peaks[""]
