"""Networks that measure clips: LPIPS (Zhang et al., arXiv:1801.03924) and DINO, from local files.

Both are embeddings of frames whose squared distance is the measure: LPIPS itself, and 1 minus DINO's cosine similarity.
"""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from distill.report.media import pick_frames
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, first_line
from models.files.checkpoint_files import fingerprint_of

Embedding = Callable[[Tensor], Tensor]
"""From frames (n, 3, H, W) in [0, 1] to (n, d)."""

LPIPS_LEAST = 32
"""Least height and width of frames for LPIPS."""
_FRAMES = 8
_LPIPS_FILES = ("alexnet.pth", "lpips_alex.pth")
_LPIPS_SHIFT, _LPIPS_SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DINO_SIZE = 224
# Of each of AlexNet's convolutions: its number in torchvision, stride, padding, and whether the input is pooled.
_ALEXNET = ((0, 4, 2, False), (3, 1, 2, True), (6, 1, 1, True), (8, 1, 1, False), (10, 1, 1, False))


def read_networks(lpips: str | None, dino: str | None) -> dict[str, tuple[Embedding, str]]:
    """Load the networks of the folders that are given: by the measure's name, its embedding and its files' fingerprint.

    Args:
        lpips: folder with torchvision's AlexNet as ``alexnet.pth`` and the package lpips' ``alex.pth`` (version 0.1) as
            ``lpips_alex.pth``.
        dino: folder of a DINO model in the form of transformers, as ``facebook/dinov2-base``.

    Raises:
        UserError: files that are missing, or of something else.
    """
    found = {}
    if lpips is not None:
        folder = user_path(lpips, "--lpips")
        found["lpips"] = _lpips(folder), fingerprint_of([folder / name for name in _LPIPS_FILES])
    if dino is not None:
        folder = user_path(dino, "--dino")
        found["dino"] = _dino(folder), fingerprint_of(sorted(folder.glob("*.safetensors")))
    return found


def _lpips(folder: Path) -> Embedding:
    weights: dict[str, Tensor] = {}
    for name in _LPIPS_FILES:
        try:
            weights |= torch.load(folder / name, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise UserError(f"--lpips {folder}: {name} cannot be read ({error}); see docs/evaluating.md") from error
    layers = []
    try:
        for i, (number, *how) in enumerate(_ALEXNET):
            convolution = weights[f"features.{number}.weight"], weights[f"features.{number}.bias"]
            layers.append((convolution, weights[f"lin{i}.model.1.weight"], *how))
    except KeyError as error:
        raise UserError(f"--lpips {folder} lacks the weight {error}; see docs/evaluating.md") from error

    def embed(frames: Tensor) -> Tensor:
        x, found = _normalized(frames * 2 - 1, _LPIPS_SHIFT, _LPIPS_SCALE), []
        for (weight, bias), of_channel, stride, padding, is_pooled in layers:
            weight, bias, of_channel = (w.to(x) for w in (weight, bias, of_channel))
            x = F.relu(F.conv2d(F.max_pool2d(x, 3, 2) if is_pooled else x, weight, bias, stride, padding))
            # The mean over pixels of the weighted squared difference is a squared distance of these.
            unit = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
            found.append((unit * (of_channel / unit[0, 0].numel()).sqrt()).flatten(1))
        return torch.cat(found, 1)

    return embed


def _dino(folder: Path) -> Embedding:
    from transformers import AutoModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading, once per rank
    try:
        safe = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
        model = AutoModel.from_pretrained(folder, **safe).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"--dino {folder} cannot be loaded ({first_line(error)}); see docs/evaluating.md") from error

    def embed(frames: Tensor) -> Tensor:
        small = F.interpolate(frames, size=(_DINO_SIZE, _DINO_SIZE), mode="bicubic", antialias=True)
        tokens = model.to(frames.device)(_normalized(small, _IMAGENET_MEAN, _IMAGENET_STD)).last_hidden_state
        return F.normalize(tokens[:, 0], dim=1) / 2**0.5  # the first token is that of the image

    return embed


def _normalized(frames: Tensor, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Tensor:
    return (frames - frames.new_tensor(mean)[:, None, None]) / frames.new_tensor(deviation)[:, None, None]


@torch.no_grad()
def embeddings(clips: np.ndarray, network: Embedding, device: torch.device) -> Tensor:
    """Embed 8 evenly spaced frames of each of ``clips``, uint8 (n, T, H, W, 3), on ``device``: (n, frames, d)."""
    chosen = pick_frames(clips.shape[1], _FRAMES)
    frames = (torch.from_numpy(clip[chosen]).to(device).permute(0, 3, 1, 2).float() / 255 for clip in clips)
    return torch.stack([network(of_clip) for of_clip in frames])
