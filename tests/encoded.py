"""Encoded data sets, as a run builds them from its settings, and pixels of their clips."""

from dataclasses import dataclass
from pathlib import Path

import torch

from distill.data.sets.dataset import EncodedDataset
from distill.data.settings import CaptionsSettings, EncodedSettings, VideoFolderSettings


@dataclass(kw_only=True)
class _Clips(VideoFolderSettings):
    latents: str = "fp32"
    """Type of stored latents, as ``distill.encode --latents``."""


SIZES = {"num_frames": 9, "height": 32, "width": 48, "fps": 8, "max_text_tokens": 24}


def encode_source(path, encoders, *, device="cpu", captions=(), images=(), **settings):
    """Encode a folder of videos, or a file of captions, and open the set; its cache is next to it by default."""
    path = Path(path)
    given = SIZES | {"cache": path.parent / "cache"} | settings
    places = {"path": str(path), "encoders": str(encoders), "cache": str(given.pop("cache"))}
    kind = CaptionsSettings if path.suffix else _Clips
    return _built(kind(**places, **given), device, captions, images)


def open_set(path, *, cache, device="cpu", captions=(), images=(), **settings):
    """Open a set."""
    return _built(EncodedSettings(path=str(path), cache=str(cache), **settings), device, captions, images)


def _built(settings, device, captions, images) -> EncodedDataset:
    chosen = {"captions": captions, "images": images}
    return settings.build(seed=0, device=torch.device(device), run_dir=Path(settings.cache), **chosen)


def check_decoded(codec, latents, pixels):
    """Require ``pixels``, of -1 to 1 and more than one color, of each clip with ``latents``, but for rounding."""
    clips = codec.decode(torch.stack([latents, latents]))
    levels = pixels.clamp(-1, 1).add(1).mul(127.5).permute(1, 2, 3, 0)
    assert clips.shape == (2, *levels.shape) and clips.dtype == torch.uint8 and torch.equal(clips[0], clips[1])
    assert (clips[0].float() - levels).abs().max() < 0.51 and levels.std() > 1
