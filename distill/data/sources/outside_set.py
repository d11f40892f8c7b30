"""A data set in the format of another project, as the readers of this folder return it (``None`` for other formats)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distill.data.videos.colors import ClipError
from distill.data.videos.decode import FilePart
from distill.data.videos.video_folder import ListedClip
from fsdp_cp.errors import first_line


@dataclass(frozen=True, kw_only=True)
class OutsideSet:
    """Clips or captions of another project, perhaps with latents of a VAE and embeddings of the text encoder."""

    format: str
    """Name of the format."""
    rows: Sequence[ListedClip]
    """Clips; ``file`` names the place of a clip where it is not a file of its own."""
    files: Sequence[Path] = ()
    """Files with the clips, latents and embeddings; none where these are the files of ``rows``."""
    videos: Mapping[str, FilePart] = field(default_factory=dict)
    """Videos in archives, by the ``file`` of their row."""
    latents: Callable[[str], torch.Tensor] | None = None
    """Read the stored latents (C, t, h, w) of a row by its ``file``; ``ClipError`` if they are damaged."""
    text: Callable[[str], torch.Tensor] | None = None
    """Read the stored embedding (tokens, D) of a row's caption likewise, perhaps filled up with zeros."""
    vae_class: str = "AutoencoderKLWan"
    """Class of the VAE of the model that stored tensors are for."""
    is_normalized: bool = True
    """Whether stored latents are as the transformer takes them, or as the VAE's encoder gives them."""
    is_checked: bool = True
    """Whether the scale of latents must show that."""
    fps: Callable[[str], Any] | None = None
    """Read the frame rate of a row's clip, where the format tells it."""


def load_tensors(file: Path | Any) -> Any:
    """Return the tensors, and dictionaries of them, in a ``.pt`` file or stream; no other object is loaded."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # RuntimeError, UnpicklingError, EOFError, KeyError, ...
        raise ClipError(f"cannot be read ({first_line(error)[:200]})") from error


def as_tensor(value: Any, dims: int) -> torch.Tensor:
    """Return a stored tensor of so many dimensions in fp32, or raise ``ClipError``."""
    if not isinstance(value, torch.Tensor) or value.ndim != dims or not value.is_floating_point():
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ClipError(f"holds {shape}, not a tensor of {dims} dimensions")
    return value.float()
