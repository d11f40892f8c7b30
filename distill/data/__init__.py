"""Data sets: what they share, and how the settings choose one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fsdp_cp.errors import UserError


class ClipDataset(Protocol):
    """Short clips with captions, as latents and text embeddings; or captions alone."""

    latent_shape: tuple[int, int, int, int]
    """``(C, T, H, W)`` of one sample's latents."""
    text_shape: tuple[int, int]
    """``(L, D)`` of one caption's embedding."""
    fps: float
    """Frames per second of the decoded clips."""
    null_text: Tensor
    """Embedding of the negative prompt, fp32 ``(L, D)``."""
    fingerprint: str
    """Short hash of all that decides what item ``i`` is."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``{"latents": fp32 (C, T, H, W), "text": fp32 (L, D), "caption": str}``; captions alone: no ``latents``."""
        ...

    def captions(self) -> list[str]:
        """The distinct captions, in a fixed order."""
        ...

    def embed(self, captions: list[str]) -> Tensor:
        """fp32 ``(n, L, D)``, of the empty caption too; UserError for one that is neither known nor told of."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """``(n, C, T, H, W)`` to uint8 ``(n, T, H, W, 3)`` pixels."""
        ...

    def release(self) -> None:
        """Free what :meth:`decode` loaded (a VAE)."""
        ...


@dataclass(kw_only=True)
class MovingShapesSettings:
    """``data=moving_shapes``."""

    name: str = "moving_shapes"
    encoders: str = "assets/quickstart_teacher"
    """Folder with the word table ``words.safetensors``."""
    num_frames: int = 6
    """Frames of a clip."""
    height: int = 16
    """Pixels."""
    width: int = 16
    """Pixels."""
    fps: float = 8.0
    """Frames per second of the sample videos."""
    negative_prompt: str = ""
    """Caption of the unconditional branch of guidance."""
    num_clips: int = 65536
    """Clips in an epoch."""
    colour_shares: list[float] | None = None
    """Leave the colour out of the captions: of a caption's clips, the shares that are red, orange, yellow, green, cyan,
    blue, magenta, white. For looking at which modes a student keeps; null: captions name the colour."""


@dataclass(kw_only=True)
class VideoFolderSettings:
    """``data=video_folder``."""

    name: str = "video_folder"
    path: str | None = None
    """Folder with mp4 files and ``metadata.csv`` (``file_name,caption``)."""
    encoders: str | None = None
    """Diffusers pipeline folder with ``vae/``, ``text_encoder/`` and ``tokenizer/``."""
    cache: str | None = None
    """Folder of the encoded latents; ``RUN_DIR/cache`` when not set. It is keyed: a changed setting encodes anew."""
    num_frames: int = 17
    """Frames of a clip; 4k + 1 for Wan's VAE."""
    height: int = 64
    """Pixels, after resizing and cropping."""
    width: int = 112
    """Pixels, after resizing and cropping."""
    fps: float = 8.0
    """Frames per second at which clips are sampled."""
    negative_prompt: str = ""
    """Caption of the unconditional branch of guidance."""
    max_text_tokens: int = 512
    """Tokens of a caption; longer ones are cut, and that is logged."""


@dataclass(kw_only=True)
class CaptionsSettings(VideoFolderSettings):
    """``data=captions``."""

    name: str = "captions"
    path: str | None = None
    """Text file with a caption per line, or ``.csv`` file with a column ``caption``."""
    cache: str | None = None
    """Folder of the embeddings; ``RUN_DIR/cache`` when not set. It is keyed: a changed setting encodes anew."""
    fps: float = 8.0
    """Frames per second of the sample videos."""


def sample_shapes(
    settings: MovingShapesSettings | VideoFolderSettings,
) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
    """``(C, T, H, W)`` of a sample's latents and ``(L, D)`` of its text, without encoding anything.

    Raises:
        UserError: folders that are not set or not there, sizes that the data set or the VAE does not take.
    """
    if settings.name == "moving_shapes":
        data = _moving_shapes(settings, seed=0)
        return data.latent_shape, data.text_shape
    from distill.data.clips import ClipFormat
    from distill.data.encoders import inspect_encoders

    for key in ("path", "encoders"):
        if getattr(settings, key) is None:
            what = "file" if (settings.name, key) == ("captions", "path") else "folder"
            raise UserError(f"data.{key} is not set; data={settings.name} needs a {what} there")
    sizes = {key: getattr(settings, key) for key in ("num_frames", "height", "width", "fps")}
    clip, folder = ClipFormat(**sizes), inspect_encoders(settings.encoders)
    return folder.latent_shape(clip), (settings.max_text_tokens, folder.text_width)


def _moving_shapes(settings: MovingShapesSettings, seed: int) -> ClipDataset:
    from distill.data.moving_shapes import MovingShapes

    return MovingShapes(
        encoders=settings.encoders,
        num_frames=settings.num_frames,
        height=settings.height,
        width=settings.width,
        fps=settings.fps,
        negative_prompt=settings.negative_prompt,
        num_clips=settings.num_clips,
        colour_shares=settings.colour_shares,
        seed=seed,
    )


def build_dataset(
    settings: MovingShapesSettings | VideoFolderSettings,
    *,
    seed: int,
    device: torch.device,
    run_dir: Path,
    captions: Sequence[str] = (),
) -> ClipDataset:
    """The data set of ``settings.name``; called by all ranks (clips and captions are encoded by all together).

    Args:
        settings: of the data set.
        seed: of what it renders.
        device: where the encoders run.
        run_dir: the cache is there unless ``settings`` say otherwise.
        captions: others that ``embed`` must know, beside the data set's own: the text encoder is freed before a network
            is built. ``fingerprint`` does not depend on them.

    Raises:
        UserError: settings that do not fit, a folder without a usable clip, captions that the data set cannot embed.
    """
    if settings.name == "moving_shapes":
        data = _moving_shapes(settings, seed)
        data.embed(list(captions))
        return data
    from distill.data.captions import Captions
    from distill.data.video_folder import VideoFolder

    return {"video_folder": VideoFolder, "captions": Captions}[settings.name](
        path=settings.path,
        encoders=settings.encoders,
        num_frames=settings.num_frames,
        height=settings.height,
        width=settings.width,
        fps=settings.fps,
        negative_prompt=settings.negative_prompt,
        cache=settings.cache or str(run_dir / "cache"),
        max_text_tokens=settings.max_text_tokens,
        device=device,
        captions=captions,
    )
