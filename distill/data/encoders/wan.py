"""The VAE and the text encoder of a diffusers pipeline folder, as WanPipeline uses them: Wan 2.1's, or 2.2's TI2V's.

``data.encoders`` names the folder; its ``vae/``, ``text_encoder/`` and ``tokenizer/`` are read. Latents and embeddings
come out as the transformer of that pipeline expects them.

Shape legend: C latent channels, t h w latent frames and sides, T H W pixels, L tokens, D width of an embedding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from distill.data.encoders.first_frame import ImageInput, inspect_image
from distill.data.encoders.folder import (
    MAX_NUMBER,
    check_values,
    check_weight_files,
    class_defaults,
    load_part,
    part_settings,
    require_class,
    shown,
    whole_numbers,
)
from distill.data.videos.decode import ClipFormat
from fsdp_cp.errors import UserError
from models.files.checkpoint_files import one_line
from models.files.shipped import find_shipped
from models.roles.condition import FIRST_FRAME

logger = logging.getLogger(__name__)

MAX_TOKENS = 8192
"""Maximal length of a caption: attention of the text encoder over more would fill a GPU."""
VAE_CLASS = "AutoencoderKLWan"
TEXT_CLASS = "UMT5EncoderModel"
_VAE_SETTINGS = ("z_dim", "dim_mult", "temperal_downsample", "latents_mean", "latents_std")  # (diffusers' spelling)


@dataclass(kw_only=True, slots=True, frozen=True)
class EncoderFolder:
    """Settings of the encoders in a pipeline folder, without weights. Families other than Wan have a subclass."""

    path: Path
    """The pipeline folder."""
    channels: int
    """C, latent channels."""
    temporal: int
    """Frames per latent frame after the first, which stands alone: T = temporal * (t - 1) + 1."""
    spatial: int
    """Pixels per latent pixel along one side."""
    patch: tuple[int, int, int]
    """Latents per token (t, h, w) of the folder's transformer; (1, 1, 1) when the folder has none."""
    text_width: int
    """D."""

    def latent_shape(self, clip: ClipFormat) -> tuple[int, int, int, int]:
        """Return (C, t, h, w) of one encoded clip. Raises ``UserError`` where ``clip`` does not fit (see ``check``)."""
        self.check(clip)
        frames = (clip.num_frames - 1) // self.temporal + 1
        return self.channels, frames, clip.height // self.spatial, clip.width // self.spatial

    def condition_shapes(
        self, clip: ClipFormat, max_text_tokens: int, image: ImageInput | None
    ) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of a sample's condition, with an image where its encoder is given."""
        shapes: dict[str, tuple[int, ...]] = {"text": (max_text_tokens, self.text_width)}
        if image is not None:
            channels, *sizes = self.latent_shape(clip)
            if image.latents == FIRST_FRAME:
                shapes[FIRST_FRAME] = (channels, 1, *sizes[1:])
            else:
                shapes |= {"image_latents": (channels, *sizes), "image_mask": (self.temporal, *sizes)}
            if image.encoder is not None:
                shapes["image_embeds"] = (image.encoder.tokens, image.encoder.width)
        return shapes

    def inspect_image(self, where: str) -> ImageInput:
        """Return the tensors that the pipeline makes of an image; ``where`` is setting and folder, for messages.

        Raises:
            UserError: a pipeline that takes none; a part that is damaged.
        """
        return inspect_image(self.path, where)

    def remarks(self, clip: ClipFormat, max_text_tokens: int, image: ImageInput | None) -> list[str]:
        """Return warnings: guesses about the folder, and settings that fit clips, captions or images badly."""
        return []

    def codec(self, *, device: torch.device, dtype: torch.dtype, tiling: bool) -> VideoCodec:
        """Load the VAE."""
        return VideoCodec(self, device=device, dtype=dtype, tiling=tiling)

    def text_encoder(self, *, max_tokens: int, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        """Load the text encoder."""
        return TextEncoder(self, max_tokens=max_tokens, device=device, dtype=dtype)

    def text_parts(self) -> tuple[str, ...]:
        """Return the sub-folders that decide the embedding of a caption."""
        return "text_encoder", "tokenizer"

    def text_key(self) -> dict[str, Any]:
        """Return whatever else decides an embedding, in addition to files and the number of tokens."""
        return {}

    def text_sizes(self, max_tokens: int) -> dict[str, tuple[int, int, int]]:
        """Return least and greatest number of tokens and the width of each embedding of a caption, by name."""
        return {"text": (1, max_tokens, self.text_width)}

    def cleaned(self, caption: str) -> str:
        """Return ``caption`` as the pipeline hands it to the tokenizer."""
        return clean_caption(caption)

    def text_tensors(self, texts: Mapping[str, torch.Tensor], max_tokens: int) -> dict[str, torch.Tensor]:
        """Return the text tensors of a condition from the embeddings of a caption (:meth:`text_sizes`)."""
        return {"text": pad_text(texts["text"], max_tokens)}

    def clip_tensors(self, clip: ClipFormat) -> dict[str, torch.Tensor]:
        """Return the tensors of a condition that are the same for all clips of one format."""
        return {}

    def check(self, clip: ClipFormat) -> None:
        """Raise ``UserError`` unless the VAE and the patches divide ``clip`` evenly.

        The VAE would not complain: it drops the last frames of a clip that is not ``temporal * k + 1`` long.
        """
        frames_per_token = self.temporal * self.patch[0]
        # t = (T - 1) / temporal + 1 must be a multiple of patch[0], so T = frames_per_token * n - temporal + 1.
        first = frames_per_token - self.temporal + 1
        if clip.num_frames < 1 or (clip.num_frames - first) % frames_per_token:
            works = first + max(0, round((clip.num_frames - first) / frames_per_token)) * frames_per_token
            raise UserError(
                f"data.num_frames={clip.num_frames} does not fit the VAE, which joins {self.temporal} frames after the "
                f"first, in patches of {self.patch[0]}; use {works}"
            )
        for name, side, patch in (("height", clip.height, self.patch[1]), ("width", clip.width, self.patch[2])):
            unit = self.spatial * patch
            if side < 1 or side % unit:
                works = max(1, round(side / unit)) * unit
                raise UserError(
                    f"data.{name}={side} is not a multiple of {unit} (VAE {self.spatial} x patch {patch}); use {works}"
                )

    def files(self, *parts: str) -> list[Path]:
        """Return the files that decide the output of the sub-folders ``parts``: settings, words, weights; sorted."""
        files = (file for part in parts for file in (self.path / part).iterdir())
        return sorted(file for file in files if file.suffix in _IDENTITY and file.is_file())


# Weights are safetensors only: a .bin is a pickle, and is never opened. A chat template is .jinja.
_IDENTITY = {".json", ".safetensors", ".model", ".txt", ".jinja"}


def check_text_tokens(max_text_tokens: int) -> None:
    """Refuse numbers of tokens that no text encoder can be asked for.

    Raises:
        UserError: less than 1, or more than fit.
    """
    if type(max_text_tokens) is not int or not 1 <= max_text_tokens <= MAX_TOKENS:
        what = "at least 1" if max_text_tokens < 1 else f"a whole number up to {MAX_TOKENS}"
        raise UserError(
            f"data.max_text_tokens={max_text_tokens} must be {what}; Wan uses 512, LTX 128, HunyuanVideo 1000"
        )


def inspect_encoders(path: str | Path) -> EncoderFolder:
    """Read a Wan pipeline folder's settings without loading weights. Raises: as :func:`read_encoders`."""
    return inspect_wan(*read_encoders(path, {VAE_CLASS: TEXT_CLASS}))


def read_encoders(path: str | Path, classes: Mapping[str, str]) -> tuple[Path, str, dict[str, Any], dict[str, Any]]:
    """Return a pipeline folder, its name for messages, and ``config.json`` of its VAE and text encoder.

    Args:
        path: the folder.
        classes: of VAEs, and of the text encoder of each.

    Raises: ``UserError`` if the folder, a sub-folder, its settings or its safetensors weights are missing or damaged;
        if it holds a VAE or text encoder of another class, or asks for code of its own.
    """
    folder = find_shipped(path)
    if not folder.is_dir():
        raise UserError(f"data.encoders={path} is not a folder; give a diffusers pipeline folder")
    for part in ("vae", "text_encoder", "tokenizer"):
        if not (folder / part).is_dir():
            raise UserError(f"data.encoders={path} has no {part}/; give a diffusers pipeline folder that has one")
    where = f"data.encoders={path}"
    vae, text = part_settings(folder, "vae", where), part_settings(folder, "text_encoder", where)
    require_class(where, "vae", [vae.get("_class_name")], " or ".join(classes))
    require_class(where, "text_encoder", text.get("architectures"), classes[vae["_class_name"]])
    for name in ("tokenizer_config.json", "config.json"):
        if (folder / "tokenizer" / name).exists():
            part_settings(folder, "tokenizer", where, name)
    for part in ("vae", "text_encoder"):
        check_weight_files(folder / part, where)
    return folder, where, vae, text


def inspect_wan(folder: Path, where: str, vae: dict[str, Any], text: dict[str, Any]) -> EncoderFolder:
    """Return the encoders of a Wan folder from the result of :func:`read_encoders`.

    Raises: ``UserError`` for settings that no Wan VAE has.
    """
    if any(name not in vae for name in _VAE_SETTINGS):
        vae = class_defaults("AutoencoderKLWan") | vae
    config = f"{where}: vae/config.json"
    _check_vae(vae, config)
    for name in ("latents_mean", "latents_std"):
        if len(vae[name]) != vae["z_dim"]:
            raise UserError(f"{config} has {len(vae[name])} {name} for {vae['z_dim']} channels; give {vae['z_dim']}")
    patch = (1, 1, 1)
    if (folder / "transformer" / "config.json").is_file():
        patch = part_settings(folder, "transformer", where).get("patch_size", patch)
        if not whole_numbers(patch, most=64) or len(patch) != 3:
            raise UserError(f"{where}: transformer/config.json has patch_size={shown(patch)}; use [1, 2, 2]")
    return EncoderFolder(
        path=folder,
        channels=vae["z_dim"],
        # From the layers, not from scale_factor_*: those only label the pipeline, and Wan 2.1 folders leave them out.
        temporal=2 ** sum(vae["temperal_downsample"]),
        spatial=2 ** (len(vae["dim_mult"]) - 1) * (vae.get("patch_size") or 1),
        patch=tuple(patch),
        text_width=text_width(text, where),
    )


def text_width(text: dict[str, Any], where: str, part: str = "text_encoder") -> int:
    """Return D from a T5's ``config.json`` in ``part``. Raises ``UserError`` for one that is no width."""
    if not whole_numbers([text.get("d_model")], most=MAX_NUMBER):
        raise UserError(f"{where}: {part}/config.json has d_model={shown(text.get('d_model'))}; give the folder's own")
    return text["d_model"]


def _check_vae(vae: dict[str, Any], config: str) -> None:
    """Check the settings of the VAE from which sizes are computed."""

    def numbers(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(type(v) in (int, float) and math.isfinite(v) for v in value)

    stages = vae["temperal_downsample"]
    fits = {
        "z_dim": whole_numbers([vae["z_dim"]], most=4096),
        "dim_mult": whole_numbers(vae["dim_mult"], most=64) and 1 <= len(vae["dim_mult"]) <= 8,
        "temperal_downsample": isinstance(stages, (list, tuple))
        and len(stages) <= 8
        and all(type(s) is bool for s in stages),
        "latents_mean": numbers(vae["latents_mean"]),
        "latents_std": numbers(vae["latents_std"]) and all(v > 0 for v in vae["latents_std"]),
        "patch_size": vae.get("patch_size") is None or whole_numbers([vae["patch_size"]], most=16),
    }
    check_values(config, vae, fits, "Wan VAE")


class VideoCodec:
    """A Wan VAE between pixels and the normalized latents that the transformer sees.

    Latents are ``(z - latents_mean) / latents_std``, which ``WanPipeline.__call__`` undoes before it decodes.
    ``z`` is the mode of the posterior: a draw would make a latent depend on which run wrote it.
    """

    vae_class = VAE_CLASS

    def __init__(
        self, folder: EncoderFolder, *, device: torch.device, dtype: torch.dtype, tiling: bool = False
    ) -> None:
        """Load ``vae/`` to ``device`` as ``dtype``. Raises ``UserError`` if its weights do not fit its settings.

        With ``tiling``, larger frames than a tile (256 pixels; LTX's 512) go through the VAE in tiles, whose edges
        diffusers blends: less memory, and a pixel sees only its tile.
        """
        import diffusers

        self.device, self.dtype = device, dtype
        # In fp32 first: LTX's statistics are among the weights, and bf16 would round them.
        self.vae = load_part(getattr(diffusers, self.vae_class), folder.path, "vae", torch_dtype=torch.float32)
        mean, std = (torch.as_tensor(values).float() for values in self._statistics())
        if not (std > 0).all():
            raise UserError(f"data.encoders={folder.path}: vae/ has latents_std of 0 or less; copy it again")
        self.mean, self.std = (values.view(1, -1, 1, 1, 1).to(device) for values in (mean, std))
        torch.nn.Module.to(self.vae, device=device, dtype=dtype)  # diffusers' own warns of modules that it has none of
        if tiling:
            self.vae.enable_tiling()

    def _statistics(self) -> tuple[Any, Any]:
        """Return mean and standard deviation of the VAE's output, by channel, on the CPU."""
        return self.vae.config["latents_mean"], self.vae.config["latents_std"]

    @torch.no_grad()
    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """Encode (3, T, H, W) in [-1, 1] to latents (C, t, h, w), fp32 on the CPU."""
        z = self.vae.encode(video[None].to(self.device, self.dtype)).latent_dist.mode().float()
        return ((z - self.mean) / self.std)[0].cpu()

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents (n, C, t, h, w) to uint8 (n, T, H, W, 3) on the CPU, one clip at a time to save memory."""
        videos = []
        for one in latents.split(1):
            video = self._pixels(one.to(self.device, torch.float32) * self.std + self.mean)[0].float()
            # Rounded, not cut: cutting darkens every frame by half a level on average.
            levels = video.clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8)
            videos.append(levels.permute(1, 2, 3, 0).cpu())
        return torch.stack(videos)

    def _pixels(self, z: torch.Tensor) -> torch.Tensor:
        """Decode (1, C, t, h, w), as the VAE's encoder gives it, to (1, 3, T, H, W) in [-1, 1]."""
        return self.vae.decode(z.to(self.dtype)).sample


class TextEncoder:
    """A T5 with its tokenizer, as ``encode_prompt`` of the pipelines uses them."""

    class_name = TEXT_CLASS
    pipeline = "WanPipeline"

    def __init__(self, folder: EncoderFolder, *, max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        """Load ``text_encoder/`` and ``tokenizer/``. Raises ``UserError`` if the weights do not fit the settings."""
        import transformers

        self.max_tokens, self.device, self.cleaned = max_tokens, device, folder.cleaned
        self.cuts: list[str] = []
        """Cuts of the latest caption, in words."""
        self.tokenizer = load_tokenizer(folder.path, "tokenizer")
        self.model = load_part(getattr(transformers, self.class_name), folder.path, "text_encoder", dtype=dtype).to(
            device
        )

    def embeddings(self, caption: str) -> dict[str, torch.Tensor]:
        """Return what the networks get of one caption (:meth:`EncoderFolder.text_sizes`), fp32 on the CPU, unpadded."""
        self.cuts = []
        return {"text": self.encode(caption)}

    def report_cut(self, caption: str, what: str) -> None:
        """Log that a caption is cut, and keep it in :attr:`cuts`."""
        self.cuts.append(what)
        logger.warning("%s: %.60s", what, caption)

    @cached_property
    def _pipeline(self) -> Any:
        """The pipeline with the text encoder alone."""
        import diffusers

        kind = getattr(diffusers, self.pipeline)
        parts = dict.fromkeys(("scheduler", "vae", "transformer"))
        return kind(**parts, text_encoder=self.model, tokenizer=self.tokenizer)

    @torch.no_grad()
    def encode(self, caption: str) -> torch.Tensor:
        """Encode one caption as the pipeline does: fp32 (tokens, D) on the CPU, without what fills it up.

        Captions go through the encoder one at a time: in a batch, the last bits would depend on the other captions.
        """
        ids = self.tokenizer(self.cleaned(caption), add_special_tokens=True).input_ids
        words = self.model.get_input_embeddings().num_embeddings
        if max(ids, default=0) >= words:  # on a GPU an assertion of the device, which names nothing
            raise UserError(
                f"data.encoders: the tokenizer has words that the text encoder of {words} words does not know; give"
                " the tokenizer/ that belongs to text_encoder/"
            )
        if not ids:
            raise UserError(f"data.encoders: the tokenizer makes no token of the caption {caption[:60]!r}; use T5's")
        if len(ids) > self.max_tokens:
            self.report_cut(caption, f"caption cut from {len(ids)} to data.max_text_tokens={self.max_tokens} tokens")
        embeddings = self._pipeline.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=self.max_tokens, device=self.device
        )
        return embeddings[0][0, : len(ids)].float().cpu()


def load_tokenizer(folder: Path, part: str) -> Any:
    """Load the tokenizer in ``part`` of a pipeline folder. Raises ``UserError`` for one that cannot be read or used."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder / part, local_files_only=True, trust_remote_code=False
        )
        tokenizer("a", padding="max_length", max_length=2, truncation=True)  # it can fill up and cut
    except Exception as error:  # the tokenizers library raises bare Exceptions for damaged files
        raise UserError(f"data.encoders={folder}: {part}/ cannot be read ({one_line(error)}); save it again") from error
    return tokenizer


def pad_text(text: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Pad (tokens, D) with zeros to (``max_tokens``, D), as WanPipeline does."""
    return torch.cat([text, text.new_zeros(max_tokens - text.shape[0], text.shape[1])])


def clean_caption(caption: str) -> str:
    """Clean a caption like WanPipeline: mojibake (with ftfy installed), HTML entities, runs of white space."""
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    return prompt_clean(caption)
