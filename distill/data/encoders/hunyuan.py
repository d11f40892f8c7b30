"""The encoders of a HunyuanVideo 1.5 pipeline folder, as diffusers' pipelines (0.42) use them.

A VAE; Qwen2.5-VL's text model for the caption, within a chat template; a byT5 for what the caption puts in quotation
marks, to be written in the picture; and for an image SigLIP.

Shape legend: C latent channels, t h w latent frames and sides, T H W pixels, L tokens, D width of an embedding.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.data.encoders.first_frame import ImageInput
from distill.data.encoders.folder import (
    MAX_NUMBER,
    check_values,
    check_weight_files,
    class_defaults,
    load_part,
    part_settings,
    positive,
    require_class,
    shown,
    whole_numbers,
)
from distill.data.encoders.image import SIGLIP, inspect_image_encoder
from distill.data.encoders.wan import EncoderFolder, TextEncoder, VideoCodec, load_tokenizer, pad_text, text_width
from distill.data.videos.decode import ClipFormat
from fsdp_cp.errors import UserError
from models.families.hunyuan import GLYPH_TOKENS
from models.files.checkpoint_files import one_line
from models.roles.condition import FIRST_FRAME

logger = logging.getLogger(__name__)

_VAE_SIZES = {"latent_channels": 4096, "spatial_compression_ratio": 1024, "temporal_compression_ratio": 1024}
HUNYUAN_VAE_CLASS = "AutoencoderKLHunyuanVideo15"
PIPELINE_TOKENS = 1000
"""``tokenizer_max_length`` of HunyuanVideo15Pipeline."""
TEMPLATE_TOKENS = 108
"""Tokens of the chat template before the caption, which the pipelines cut off after the encoder."""
_TEXT_PARTS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


@dataclass(kw_only=True, slots=True, frozen=True)
class HunyuanEncoderFolder(EncoderFolder):
    """Settings of the encoders in a HunyuanVideo 1.5 pipeline folder, without weights."""

    glyph_width: int
    """D of the embeddings of quoted text."""
    task: str | None
    """``task_type`` of the folder's transformer: ``t2v``, ``i2v`` or ``None``."""
    target_size: int
    """Side in pixels of the square by which the image-to-video pipeline sizes clips."""

    def remarks(self, clip: ClipFormat, max_text_tokens: int, image: ImageInput | None) -> list[str]:
        remarks = []
        if max_text_tokens != PIPELINE_TOKENS:
            remarks.append(
                f"data.max_text_tokens={max_text_tokens}: HunyuanVideo15Pipeline cuts captions at {PIPELINE_TOKENS};"
                " shorter ones are the same in both, and each token costs a network as one of the video"
            )
        if self.task is not None and self.task != ("t2v" if image is None else "i2v"):
            of = "text alone" if image is None else "first frames"
            remarks.append(
                f"data.encoders={self.path}: its transformer was trained for task_type={self.task}, and the data are of"
                f" {of}; give the checkpoint for that, or change data.image"
            )
        if image is not None and (size := self.pipeline_size(clip)) != (clip.height, clip.width):
            remarks.append(
                f"data.height={clip.height} data.width={clip.width}: HunyuanVideo15ImageToVideoPipeline makes clips of"
                f" {size[0]} x {size[1]} of such images, and takes no other size; use these to sample with it"
            )
        return remarks

    def pipeline_size(self, clip: ClipFormat) -> tuple[int, int]:
        """Return height and width of the clip that the image-to-video pipeline makes of an image of ``clip``'s size."""
        from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

        processor = HunyuanVideo15ImageProcessor(vae_scale_factor=self.spatial)
        height, width = processor.calculate_default_height_width(clip.height, clip.width, self.target_size)
        return int(height), int(width)

    def condition_shapes(
        self, clip: ClipFormat, max_text_tokens: int, image: ImageInput | None
    ) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"text": (max_text_tokens, self.text_width)}
        shapes |= {"text_mask": (max_text_tokens,)}
        shapes |= {"glyphs": (GLYPH_TOKENS, self.glyph_width), "glyph_mask": (GLYPH_TOKENS,)}
        if image is not None and image.encoder is not None:
            channels, _, height, width = self.latent_shape(clip)
            shapes[FIRST_FRAME] = (channels, 1, height, width)
            shapes["image_embeds"] = (image.encoder.tokens, image.encoder.width)
        return shapes

    def inspect_image(self, where: str) -> ImageInput:
        return ImageInput(latents=FIRST_FRAME, encoder=inspect_image_encoder(self.path, where, SIGLIP))

    def codec(self, *, device: torch.device, dtype: torch.dtype, tiling: bool) -> HunyuanVideoCodec:
        return HunyuanVideoCodec(self, device=device, dtype=dtype, tiling=tiling)

    def text_encoder(self, *, max_tokens: int, device: torch.device, dtype: torch.dtype) -> HunyuanTextEncoder:
        return HunyuanTextEncoder(self, max_tokens=max_tokens, device=device, dtype=dtype)

    def text_parts(self) -> tuple[str, ...]:
        return _TEXT_PARTS

    def text_key(self) -> dict[str, Any]:
        """Return system message, cut-off and layer of the embedding: defaults of diffusers."""
        parameters = inspect.signature(_pipeline()._get_mllm_prompt_embeds).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    def text_sizes(self, max_tokens: int) -> dict[str, tuple[int, int, int]]:
        return EncoderFolder.text_sizes(self, max_tokens) | {"glyphs": (0, GLYPH_TOKENS, self.glyph_width)}

    def cleaned(self, caption: str) -> str:
        """Return ``caption`` unchanged: the pipelines clean nothing."""
        return caption

    def text_tensors(self, texts: Mapping[str, torch.Tensor], max_tokens: int) -> dict[str, torch.Tensor]:
        """Add masks of the tokens that count. They come before the zeros, those of a quotation too."""
        text, glyphs = texts["text"], texts["glyphs"]
        return {
            "text": pad_text(text, max_tokens),
            "text_mask": torch.arange(max_tokens) < text.shape[0],
            "glyphs": pad_text(glyphs, GLYPH_TOKENS),
            "glyph_mask": torch.arange(GLYPH_TOKENS) < glyphs.shape[0],
        }


def inspect_hunyuan(folder: Path, where: str, vae: dict[str, Any], text: dict[str, Any]) -> HunyuanEncoderFolder:
    """Return the settings of a HunyuanVideo 1.5 folder, from :func:`distill.data.encoders.wan.read_encoders`.

    Args:
        folder: the pipeline folder.
        where: setting and folder, for messages.
        vae, text: ``config.json`` of the VAE and of the first text encoder.

    Raises: ``UserError`` for a second text encoder that is missing or another one, and for settings that no VAE of
        HunyuanVideo 1.5 has.
    """
    for part in ("text_encoder_2", "tokenizer_2"):
        if not (folder / part).is_dir():
            raise UserError(f"{where} has no {part}/; give a HunyuanVideo 1.5 pipeline folder, which has one")
    part_settings(folder, "tokenizer_2", where, "tokenizer_config.json")
    if (
        not (folder / "tokenizer" / "chat_template.jinja").is_file()
        and part_settings(folder, "tokenizer", where, "tokenizer_config.json").get("chat_template") is None
    ):
        raise UserError(f"{where}: tokenizer/ has no chat template (chat_template.jinja); give the folder's own")
    second = part_settings(folder, "text_encoder_2", where)
    require_class(where, "text_encoder_2", second.get("architectures"), "T5EncoderModel")
    check_weight_files(folder / "text_encoder_2", where)
    vae = class_defaults("AutoencoderKLHunyuanVideo15") | vae
    config = f"{where}: vae/config.json"
    fits = {key: whole_numbers([vae[key]], most=most) for key, most in _VAE_SIZES.items()}
    fits["scaling_factor"] = positive(vae["scaling_factor"])
    check_values(config, vae, fits, "VAE of HunyuanVideo 1.5")
    if not whole_numbers([text.get("hidden_size")], most=MAX_NUMBER):
        raise UserError(
            f"{where}: text_encoder/config.json has hidden_size={shown(text.get('hidden_size'))}; give the folder's own"
        )
    there = (folder / "transformer" / "config.json").is_file()
    transformer = part_settings(folder, "transformer", where) if there else {}
    sides = [transformer.get(key, 1) for key in ("patch_size_t", "patch_size")]
    if not whole_numbers(sides, most=64):
        raise UserError(f"{where}: transformer/config.json has patches of {shown(sides)}; give the folder's own")
    target, task = transformer.get("target_size", 640), transformer.get("task_type")
    # Below a latent the pipeline's sizes of images are none.
    if (
        not whole_numbers([target], most=65536)
        or target < vae["spatial_compression_ratio"]
        or task not in (None, "t2v", "i2v")
    ):
        raise UserError(
            f"{where}: transformer/config.json has target_size={shown(target)}, task_type={shown(task)}; give the"
            " folder's own"
        )
    return HunyuanEncoderFolder(
        path=folder,
        channels=vae["latent_channels"],
        temporal=vae["temporal_compression_ratio"],
        spatial=vae["spatial_compression_ratio"],
        patch=(sides[0], sides[1], sides[1]),
        text_width=text["hidden_size"],
        glyph_width=text_width(second, where, "text_encoder_2"),
        task=task,
        target_size=target,
    )


class HunyuanVideoCodec(VideoCodec):
    """HunyuanVideo 1.5's VAE between pixels and the latents that the transformer sees: the mode of its posterior times
    ``scaling_factor``, which ``HunyuanVideo15Pipeline.__call__`` undoes before it decodes."""

    vae_class = HUNYUAN_VAE_CLASS

    def _statistics(self) -> tuple[Any, Any]:
        return [0.0], [1 / self.vae.config["scaling_factor"]]


class HunyuanTextEncoder(TextEncoder):
    """Qwen2.5-VL's text model and a byT5, each with its tokenizer."""

    class_name = "Qwen2_5_VLTextModel"

    def __init__(self, folder: EncoderFolder, *, max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(folder, max_tokens=max_tokens, device=device, dtype=dtype)
        from transformers import T5EncoderModel

        self.where, self.template = f"data.encoders={folder.path}", folder.text_key()
        self.glyph_tokenizer = load_tokenizer(folder.path, "tokenizer_2")
        self.glyph_model = load_part(T5EncoderModel, folder.path, "text_encoder_2", dtype=dtype).to(device)

    def embeddings(self, caption: str) -> dict[str, torch.Tensor]:
        """Return fp32 ``text`` and ``glyphs`` (tokens, D); the latter is empty if the caption quotes nothing."""
        self.cuts = []
        return {"text": self.encode(caption), "glyphs": self._glyphs(caption)}

    @torch.no_grad()
    def encode(self, caption: str) -> torch.Tensor:
        """Encode a caption within the pipelines' chat template, without the tokens of the system's part.

        Returns: fp32 (tokens, D) on the CPU, of the last layer but two.
        """
        whole = self._within_template(caption)
        self._check_words(whole, self.model, "tokenizer", "text_encoder")
        embeddings, mask = _pipeline()._get_mllm_prompt_embeds(
            self.model, self.tokenizer, caption, self.device, tokenizer_max_length=self.max_tokens
        )
        valid = embeddings[0][mask[0].bool()].float().cpu()
        if not len(valid):
            raise UserError(
                f"{self.where}: the chat template of tokenizer/ leaves no token of the caption {caption[:60]!r} after"
                " the system's part; give the folder's own"
            )
        length = len(whole) - self.template["crop_start"]
        if length > self.max_tokens:
            self.report_cut(caption, f"caption cut from {length} to data.max_text_tokens={self.max_tokens} tokens")
        return valid

    def _within_template(self, caption: str) -> list[int]:
        """Return the tokens of the whole chat, which begins with the system's part, before the pipelines cut them."""
        chat = _pipeline_module().format_text_input([caption], self.template["system_message"])
        try:
            made = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
        except Exception as error:  # of Jinja, and whatever a template raises
            raise UserError(
                f"{self.where}: the chat template of tokenizer/ cannot be used ({one_line(error)}); give the folder's"
                " own"
            ) from error
        return made["input_ids"][0]

    def _check_words(self, tokens: list[int], model: Any, tokenizer: str, encoder: str) -> None:
        words = model.get_input_embeddings().num_embeddings
        if max(tokens, default=0) >= words:  # on a GPU an assertion of the device, which names nothing
            raise UserError(
                f"{self.where}: {tokenizer}/ has words that {encoder}/ of {words} words does not know; give the"
                f" {tokenizer}/ that belongs to it"
            )

    @torch.no_grad()
    def _glyphs(self, caption: str) -> torch.Tensor:
        quoted = _pipeline_module().extract_glyph_texts(caption)
        whole = [] if quoted is None else self.glyph_tokenizer(quoted, add_special_tokens=True)["input_ids"]
        self._check_words(whole, self.glyph_model, "tokenizer_2", "text_encoder_2")
        embeddings, mask = _pipeline()._get_byt5_prompt_embeds(
            self.glyph_tokenizer, self.glyph_model, caption, self.device, tokenizer_max_length=GLYPH_TOKENS
        )
        valid = embeddings[0][mask[0].bool()].float().cpu()
        if len(whole) > GLYPH_TOKENS:
            self.report_cut(caption, f"quoted text cut from {len(whole)} to {GLYPH_TOKENS} tokens")
        return valid


def _pipeline_module() -> Any:
    """Return the module (diffusers 0.42) with the functions for chat templates and quoted text."""
    from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5

    return pipeline_hunyuan_video1_5


def _pipeline() -> Any:
    """Return the class (diffusers 0.42) whose private static methods embed captions and quoted text."""
    from diffusers import HunyuanVideo15Pipeline

    return HunyuanVideo15Pipeline
