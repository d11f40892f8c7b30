"""The VAE and the text encoder of a diffusers pipeline folder, as WanPipeline uses them.

``data.encoders`` names the folder; its ``vae/``, ``text_encoder/`` and ``tokenizer/`` are read. Latents and embeddings
come out as the transformer of that pipeline expects them.

Shape legend: C latent channels, t h w latent frames and sides, T H W pixels, L tokens, D width of an embedding.
"""

from __future__ import annotations

import inspect
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from distill.data.clips import ClipFormat
from fsdp_cp.errors import UserError

logger = logging.getLogger(__name__)

VAE_CLASS = "AutoencoderKLWan"
TEXT_CLASS = "UMT5EncoderModel"
_VAE_SETTINGS = ("z_dim", "dim_mult", "temperal_downsample", "latents_mean", "latents_std")  # (diffusers' spelling)


@dataclass(kw_only=True, slots=True, frozen=True)
class EncoderFolder:
    """What a pipeline folder's JSON files say about its encoders; holds no weights."""

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
        """(C, t, h, w) of one encoded clip. Raises ``UserError`` where ``clip`` does not fit (see ``check``)."""
        self.check(clip)
        frames = (clip.num_frames - 1) // self.temporal + 1
        return self.channels, frames, clip.height // self.spatial, clip.width // self.spatial

    def check(self, clip: ClipFormat) -> None:
        """Raises ``UserError`` unless the VAE and the patches divide ``clip`` evenly.

        The VAE would not complain: it drops the last frames of a clip that is not ``temporal * k + 1`` long.
        """
        if not clip.fps > 0:
            raise UserError(f"data.fps={clip.fps:g} must be above 0; use 8")
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
        """The files that decide what the sub-folders ``parts`` compute, in a fixed order: settings, words, weights."""
        found = (file for part in parts for file in (self.path / part).iterdir())
        return sorted(file for file in found if file.suffix in _IDENTITY and file.is_file())


# Weights are safetensors only: a .bin is a pickle, and is never opened.
_IDENTITY = {".json", ".safetensors", ".model", ".txt"}


def inspect_encoders(path: str | Path) -> EncoderFolder:
    """Read a pipeline folder's settings without loading weights.

    Raises: ``UserError`` if the folder, a sub-folder, its settings or its safetensors weights are missing, or if it
    holds a VAE or text encoder of another class than WanPipeline's.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"data.encoders={path} is not a folder; give a diffusers pipeline folder")
    for part in ("vae", "text_encoder", "tokenizer"):
        if not (folder / part).is_dir():
            raise UserError(f"data.encoders={path} has no {part}/; give a diffusers pipeline folder that has one")
    vae, text = _settings(folder, "vae"), _settings(folder, "text_encoder")
    _require_class(folder, "vae", [vae.get("_class_name")], VAE_CLASS)
    _require_class(folder, "text_encoder", text.get("architectures") or [], TEXT_CLASS)
    for part in ("vae", "text_encoder"):
        if not any((folder / part).glob("*.safetensors")):
            raise UserError(f"data.encoders={path}: {part}/ holds no .safetensors weights; other formats are not read")

    if any(name not in vae for name in _VAE_SETTINGS):
        vae = _vae_defaults() | vae
    for name in ("latents_mean", "latents_std"):
        if len(vae[name]) != vae["z_dim"]:
            raise UserError(
                f"data.encoders={path}: vae/config.json has {len(vae[name])} {name} for {vae['z_dim']} channels; give "
                f"{vae['z_dim']}"
            )
    patch = (1, 1, 1)
    if (folder / "transformer" / "config.json").is_file():
        patch = tuple(_settings(folder, "transformer").get("patch_size", patch))
    return EncoderFolder(
        path=folder,
        channels=vae["z_dim"],
        # From the layers, not from scale_factor_*: those only label the pipeline, and Wan 2.1 folders leave them out.
        temporal=2 ** sum(vae["temperal_downsample"]),
        spatial=2 ** (len(vae["dim_mult"]) - 1) * (vae.get("patch_size") or 1),
        patch=patch,
        text_width=text["d_model"],
    )


def _settings(folder: Path, part: str) -> dict[str, Any]:
    file = folder / part / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"data.encoders={folder} has no {part}/config.json; save it with save_pretrained") from error
    except ValueError as error:
        raise UserError(f"data.encoders={folder}: {part}/config.json is not JSON ({error}); save it again") from error


def _require_class(folder: Path, part: str, found: list[str | None], wanted: str) -> None:
    if wanted not in found:
        name = found[0] if found else "a model without a class name"
        raise UserError(f"data.encoders={folder}: {part}/ holds {name}; use {wanted}")


def _vae_defaults() -> dict[str, Any]:
    """Constructor defaults of the VAE class, for the settings that a folder leaves out."""
    from diffusers import AutoencoderKLWan

    parameters = inspect.signature(AutoencoderKLWan.__init__).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


class VideoCodec:
    """A Wan VAE between pixels and the normalised latents that the transformer sees.

    Latents are ``(z - latents_mean) / latents_std``, which ``WanPipeline.__call__`` undoes before it decodes.
    ``z`` is the mode of the posterior: a draw would make a latent depend on which run wrote it.
    """

    def __init__(self, folder: EncoderFolder, *, device: torch.device, dtype: torch.dtype) -> None:
        """Load ``vae/`` to ``device`` as ``dtype``. Raises ``UserError`` if its weights do not fit its settings."""
        from diffusers import AutoencoderKLWan

        self.device, self.dtype = device, dtype
        self.vae = _load(AutoencoderKLWan, folder.path, "vae", torch_dtype=dtype).to(device)
        statistics = (torch.tensor(self.vae.config[name]).float() for name in ("latents_mean", "latents_std"))
        self.mean, self.std = (values.view(1, -1, 1, 1, 1).to(device) for values in statistics)

    @torch.no_grad()
    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """(3, T, H, W) in [-1, 1] -> latents (C, t, h, w), fp32 on the CPU."""
        z = self.vae.encode(video[None].to(self.device, self.dtype)).latent_dist.mode().float()
        return ((z - self.mean) / self.std)[0].cpu()

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (n, C, t, h, w) -> uint8 (n, T, H, W, 3) on the CPU, one clip at a time to save memory."""
        videos = []
        for one in latents.split(1):
            z = one.to(self.device, torch.float32) * self.std + self.mean
            video = self.vae.decode(z.to(self.dtype)).sample[0].float()
            # Rounded, not cut: cutting darkens every frame by half a level on average.
            levels = video.clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8)
            videos.append(levels.permute(1, 2, 3, 0).cpu())
        return torch.stack(videos)


class TextEncoder:
    """umT5 with its tokenizer, as ``WanPipeline._get_t5_prompt_embeds`` uses them."""

    def __init__(self, folder: EncoderFolder, *, max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        """Load ``text_encoder/`` and ``tokenizer/``. Raises ``UserError`` if the weights do not fit the settings."""
        from transformers import AutoTokenizer, UMT5EncoderModel

        self.max_tokens, self.device = max_tokens, device
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder.path / "tokenizer", local_files_only=True)
        except (OSError, ValueError) as error:
            raise UserError(
                f"data.encoders={folder.path}: tokenizer/ cannot be read ({_line(error)}); save it again"
            ) from error
        self.model = _load(UMT5EncoderModel, folder.path, "text_encoder", dtype=dtype).to(device)

    @torch.no_grad()
    def encode(self, caption: str) -> torch.Tensor:
        """One caption -> fp32 (tokens, D) on the CPU, without the zeros that fill it up to ``max_tokens``.

        One at a time, filled up to ``max_tokens`` under a mask as WanPipeline does: batches would change the last bits
        of an embedding with whatever else is in the batch.
        """
        text = clean_caption(caption)
        length = len(self.tokenizer(text, add_special_tokens=True).input_ids)
        if length > self.max_tokens:
            logger.warning(
                "caption cut from %d to data.max_text_tokens=%d tokens: %.60s", length, self.max_tokens, caption
            )
        tokens = self.tokenizer(
            text,
            padding="max_length",
            max_length=self.max_tokens,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = tokens.attention_mask.to(self.device)
        hidden = self.model(tokens.input_ids.to(self.device), mask).last_hidden_state
        # The filled-up positions hold garbage that the transformer, which has no text mask, would attend to.
        return hidden[0, : int(mask.gt(0).sum())].float().cpu()


def pad_text(text: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """(tokens, D) -> (``max_tokens``, D), zeros behind, as WanPipeline hands it to the transformer."""
    return torch.cat([text, text.new_zeros(max_tokens - text.shape[0], text.shape[1])])


def clean_caption(caption: str) -> str:
    """WanPipeline's own cleaning: mojibake (with ftfy installed), HTML entities, runs of white space."""
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    return prompt_clean(caption)


def _load(model_class: Any, folder: Path, part: str, **options: Any) -> torch.nn.Module:
    """``from_pretrained`` that fails by name where the libraries only warn and leave random weights."""
    try:
        model, info = model_class.from_pretrained(
            folder / part, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise UserError(f"data.encoders={folder}: {part}/ cannot be loaded ({_line(error)}); save it again") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in info.get(what) or ())
        if keys:
            raise UserError(
                f"data.encoders={folder}: {part}/ has {len(keys)} {what.replace('_', ' ')}, first {keys[0]}; give "
                f"weights that fit {part}/config.json"
            )
    return model.eval().requires_grad_(False)


def _line(error: Exception) -> str:
    """An exception's message on one line, cut: loaders list every key of a checkpoint."""
    return " ".join(str(error).split())[:200]
