"""The encoders of a HunyuanVideo 1.5 pipeline folder, as diffusers' pipelines (0.42) use them.

A VAE; Qwen2.5-VL's text model for the caption, within a chat template; a byT5 for what the caption puts in quotation
marks, to be written in the picture; and for an image SigLIP.

Shape legend: C latent channels, t h w latent frames and sides, T H W pixels, L tokens, D width of an embedding.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.data.encoders.folder import load_part, part_settings, readable, require_class, shown, whole_number
from distill.data.encoders.image import SIGLIP, ImageInput, inspect_image_encoder
from distill.data.encoders.wan import EncoderFolder, TextEncoder, VideoCodec, load_tokenizer
from distill.data.videos.decode import ClipFormat
from fsdp_cp.errors import UserError
from models.condition import FIRST_FRAME
from models.families.hunyuan import GLYPH_TOKENS

TEMPLATE_TOKENS = 108
"""Tokens of the chat template before the caption, which the pipelines cut off after the encoder."""


class HunyuanVideoCodec(VideoCodec):
    """HunyuanVideo 1.5's VAE between pixels and the latents that the transformer sees: the mode of its posterior times
    ``scaling_factor``, which ``HunyuanVideo15Pipeline.__call__`` undoes before it decodes."""

    vae_class = "AutoencoderKLHunyuanVideo15"

    def _statistics(self) -> tuple[Any, Any]:
        return [0.0], [1 / self.vae.config["scaling_factor"]]


class HunyuanTextEncoder(TextEncoder):
    """Qwen2.5-VL's text model and a byT5, each with its tokenizer."""

    class_name = "Qwen2_5_VLTextModel"

    def __init__(self, folder: EncoderFolder, *, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(folder, dtype=dtype, **options)
        from transformers import T5EncoderModel

        self.template = _template()
        self.glyph_tokenizer = load_tokenizer(folder.path, "tokenizer_2")
        self.glyph_model = load_part(T5EncoderModel, folder.path, "text_encoder_2", dtype=dtype).to(self.device)

    @staticmethod
    def encode_zeros(models: Any, tokens: int) -> None:
        """Run the text model as for a caption of ``tokens`` tokens in its template, with all layers' outputs."""
        whole = tokens + TEMPLATE_TOKENS
        ids, mask = torch.zeros(1, whole, dtype=torch.long), torch.ones(1, whole, dtype=torch.long)
        models[0](ids, mask, output_hidden_states=True)

    def embeddings(self, caption: str) -> dict[str, torch.Tensor]:
        """Return fp32 ``text`` and ``glyphs`` (tokens, D); the latter is empty if the caption quotes nothing."""
        self.cuts = []
        return {"text": self.encode(caption), "glyphs": self._glyphs(caption)}

    @torch.no_grad()
    def encode(self, caption: str) -> torch.Tensor:
        """Return fp32 (tokens, D) on the CPU, of the last layer but two, without the template's system part."""
        whole = self._within_template(caption)
        self._check_words(whole, self.model, "tokenizer", "text_encoder")
        embeddings, mask = _diffusers().HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
            self.model, self.tokenizer, caption, self.device, tokenizer_max_length=self.max_tokens
        )
        valid = embeddings[0][mask[0].bool()].float().cpu()
        if not len(valid):
            cut = f"tokenizer/'s chat template leaves no token of the caption {caption[:60]!r}"
            raise UserError(f"data.encoders={self.folder}: {cut}; give the folder's own")
        length = len(whole) - self.template["crop_start"]
        self.report_cut(caption, "caption", length, self.max_tokens, "data.max_text_tokens=")
        return valid

    def _within_template(self, caption: str) -> list[int]:
        """Return the tokens of the whole chat, which begins with the system's part, before the pipelines cut them."""
        chat = _diffusers().format_text_input([caption], self.template["system_message"])
        with readable(self.folder, "tokenizer"):
            made = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
        return made["input_ids"][0]

    @torch.no_grad()
    def _glyphs(self, caption: str) -> torch.Tensor:
        quoted = _diffusers().extract_glyph_texts(caption)
        whole = [] if quoted is None else self.glyph_tokenizer(quoted, add_special_tokens=True)["input_ids"]
        self._check_words(whole, self.glyph_model, "tokenizer_2", "text_encoder_2")
        embeddings, mask = _diffusers().HunyuanVideo15Pipeline._get_byt5_prompt_embeds(
            self.glyph_tokenizer, self.glyph_model, caption, self.device, tokenizer_max_length=GLYPH_TOKENS
        )
        valid = embeddings[0][mask[0].bool()].float().cpu()
        self.report_cut(caption, "quoted text", len(whole), GLYPH_TOKENS)
        return valid


@dataclass(kw_only=True, slots=True, frozen=True)
class HunyuanEncoderFolder(EncoderFolder):
    """Settings of the encoders in a HunyuanVideo 1.5 pipeline folder, without weights."""

    codec_class = HunyuanVideoCodec
    text_class = HunyuanTextEncoder
    text_parts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    text_masks = {"text": "text_mask", "glyphs": "glyph_mask"}

    glyph_width: int
    """D of the embeddings of quoted text."""
    task: str | None
    """``task_type`` of the folder's transformer: ``t2v``, ``i2v`` or ``None``."""

    @classmethod
    def read(cls, folder: Path, where: str, vae: dict[str, Any], text: dict[str, Any]) -> HunyuanEncoderFolder:
        """Return the settings of a folder; refuse a second text encoder of another class too."""
        named = part_settings(folder, "tokenizer", where, "tokenizer_config.json", optional=True)
        if not (folder / "tokenizer" / "chat_template.jinja").is_file() and named.get("chat_template") is None:
            raise UserError(f"{where}: tokenizer/ has no chat template (chat_template.jinja); give the folder's own")
        second = part_settings(folder, "text_encoder_2", where)
        require_class(where, "text_encoder_2", second.get("architectures"), "T5EncoderModel")
        network = part_settings(folder, "transformer", where, optional=True)
        file, task = f"{where}: transformer/config.json", network.get("task_type")
        sides = ("patch_size_t", "patch_size", "patch_size")
        if task not in (None, "t2v", "i2v"):
            raise UserError(f"{file} has task_type={shown(task)}; give the folder's own")
        return cls(
            path=folder,
            channels=vae["latent_channels"],
            temporal=vae["temporal_compression_ratio"],
            spatial=vae["spatial_compression_ratio"],
            patch=tuple(whole_number(network, key, file, default=1, most=64) for key in sides),
            text_width=whole_number(text, "hidden_size", f"{where}: text_encoder/config.json"),
            glyph_width=whole_number(second, "d_model", f"{where}: text_encoder_2/config.json"),
            task=task,
        )

    def remarks(self, clip: ClipFormat, max_text_tokens: int, image: ImageInput | None) -> list[str]:
        if self.task in (None, "t2v" if image is None else "i2v"):
            return []
        of = "text alone" if image is None else "first frames"
        return [
            f"data.encoders={self.path}: its transformer was trained for task_type={self.task}, and the data are of"
            f" {of}; give the checkpoint for that, or change data.image"
        ]

    def inspect_image(self, where: str) -> ImageInput:
        return ImageInput(latents=FIRST_FRAME, encoder=inspect_image_encoder(self.path, where, SIGLIP))

    def text_key(self) -> dict[str, Any]:
        return _template()

    def text_sizes(self, max_tokens: int) -> dict[str, tuple[int, int]]:
        return EncoderFolder.text_sizes(self, max_tokens) | {"glyphs": (GLYPH_TOKENS, self.glyph_width)}


def _diffusers() -> Any:
    """Return the module (diffusers 0.42) with the pipeline, whose private methods embed captions and quoted text."""
    from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5

    return pipeline_hunyuan_video1_5


def _template() -> dict[str, Any]:
    """Return system message, cut-off and layer of the embedding: defaults of diffusers."""
    parameters = inspect.signature(_diffusers().HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
