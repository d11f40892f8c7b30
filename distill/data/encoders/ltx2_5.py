"""Differences of LTX-2.5's encoders from LTX-2.3's: the strength of an image's compression, and a second decoder.

``diffusion_decoder/`` of a folder decodes samples in place of the VAE's decoder, as
``LTX2VideoDiffusionDecodePipeline`` of diffusers (0.42) does: it denoises pixels. Its noise is the same for each clip,
so that a clip depends neither on the mesh nor on the clips before it.

Shape legend: B clips, T H W positions of a grid, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from distill.data.encoders.folder import check_weight_files, load_part, part_settings, readable, require_class, shown
from distill.data.videos.decode import ClipFormat
from fsdp_cp.errors import UserError
from models.families.diffusers_family import checked_arguments
from models.families.ltx2_5 import DECODER, DECODER_CLASS

BLOCK = (8, 16, 16)
"""Queries that attend together: their windows share most keys."""


def image_crf(gemma: str) -> int:
    """Return the strength of H.264 with which a folder with a text encoder of the class ``gemma`` saw images."""
    from diffusers.pipelines.ltx2 import utils

    return utils.LTX2_5_IMAGE_CRF if "Gemma4" in gemma else utils.DEFAULT_IMAGE_CRF


def refuse_dfr(folder: Path, where: str) -> None:
    """Refuse a folder of the pipelines that generate keyframes first, which the family does not know."""
    kind = str(part_settings(folder, ".", where, "model_index.json", optional=True).get("_class_name"))
    if kind.startswith("LTX2DFR"):
        raise UserError(f"{where} names {shown(kind)}: DFR's keyframes are not known; give an LTX2Pipeline's folder")


def decoder_settings(folder: Path, where: str, vae: dict[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a folder's diffusion decoder, ``None`` without one; refuse one that does not fit the
    VAE."""
    if not (folder / DECODER).is_dir():
        return None
    from diffusers import LTX2VideoDiffusionDecoderModel

    check_weight_files(folder / DECODER, where)
    named, file = part_settings(folder, DECODER, where), f"{where}: {DECODER}/config.json"
    require_class(where, DECODER, [named.get("_class_name")], DECODER_CLASS)
    settings = checked_arguments(LTX2VideoDiffusionDecoderModel, named, file)
    if settings["latent_channels"] != vae["latent_channels"]:
        given = f"latent_channels={settings['latent_channels']}, but vae/ has {vae['latent_channels']}"
        raise UserError(f"{file} has {given}; give both of one folder")
    with readable(folder, DECODER), torch.device("meta"):
        LTX2VideoDiffusionDecoderModel(**settings)
    kernels, strides = settings["decoder_stage_kernels"], settings["decoder_upsample_strides"]
    triples = [*kernels, *strides, settings["decoder_stage5_kernel"]]
    if len(kernels) != len(strides) or any(len(sizes) != 3 for sizes in triples):
        given = f"decoder_stage_kernels={shown(kernels)}, decoder_upsample_strides={shown(strides)}"
        raise UserError(f"{file} has {given}, which do not fit each other; give the folder's own")
    return settings


def check_decoded(settings: dict[str, Any], latents: Sequence[int], clip: ClipFormat) -> None:
    """Refuse a clip with ``latents`` (t, h, w) whose grid is smaller than a window of the decoder's attention."""
    frames, *sides = latents
    kernels, strides = settings["decoder_stage_kernels"], settings["decoder_upsample_strides"]
    grids = [(frames + kernels[0][0] // 2 * 2, *sides)]  # the last frame is repeated; the last stage is without that
    for stride in strides:
        frames, *sides = (n * step for n, step in zip((frames, *sides), stride, strict=True))
        frames -= stride[0] - 1
        grids.append((frames, *sides))
    for grid, kernel in zip(grids, [*kernels, settings["decoder_stage5_kernel"]], strict=True):
        for name, size, least in zip(("num_frames", "height", "width"), grid, kernel, strict=True):
            if size < least:
                few = f"gives {DECODER}/ a grid of {size}, less than its window of {least}"
                raise UserError(f"data.{name}={getattr(clip, name)} {few}; use more, or leave {DECODER}/ out")


def load_decoder(folder: Path, *, device: torch.device, dtype: torch.dtype, tiling: bool) -> Any:
    """Load the diffusion decoder of a folder, with attention whose memory does not grow with the square of a clip."""
    import diffusers

    model = load_part(getattr(diffusers, DECODER_CLASS), folder, DECODER, torch_dtype=dtype)
    return prepared(model, tiling).to(device)


def prepared(model: Any, tiling: bool, **planned: bool) -> Any:
    """Return diffusers' decoder with :class:`WindowAttention`; with ``tiling``, it decodes in tiles of 768 pixels."""
    model.set_attn_processor(WindowAttention(**planned))
    if tiling:
        model.enable_tiling()
    return model


class WindowAttention:
    """Attention to the window around each position, of diffusers' ``LTX2VideoVaeNeighborhoodAttention``.

    diffusers' own processors need a mask of all pairs, or fetch a kernel's code. One that is ``planned`` computes a
    single block, since the memory of all peaks alike.
    """

    def __init__(self, planned: bool = False) -> None:
        self.planned = planned

    def __call__(self, attn: Any, hidden_states: Tensor, block_mask: None = None) -> Tensor:
        q, k, v = attn.project_qkv(hidden_states)
        return attn.to_out[0](window_attention(q, k, v, attn.kernel_size, self.planned).flatten(-2))


class _Span(NamedTuple):
    """Queries along one axis, and the keys that they see."""

    queries: slice
    keys: slice
    seen: Tensor
    """Whether each query sees each key."""


def _spans(size: int, window: int, block: int, device: torch.device) -> list[_Span]:
    starts = [min(max(i - window // 2, 0), size - window) for i in range(size)]  # at a border the window moves inward
    spans = []
    for first in range(0, size, block):
        mine = starts[first : first + block]
        low, high = mine[0], mine[-1] + window
        keys, begin = torch.arange(low, high, device=device), torch.tensor(mine, device=device)[:, None]
        spans.append(_Span(slice(first, first + block), slice(low, high), (keys >= begin) & (keys < begin + window)))
    return spans


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: Sequence[int], planned: bool = False) -> Tensor:
    """Return attention of ``q`` (B, T, H, W, heads, D), already scaled, to ``window`` positions (t, h, w) around each
    position, all inside the grid; exact, block by block."""
    out = torch.empty_like(q)
    axes = [_spans(*sizes, q.device) for sizes in zip(q.shape[1:4], window, BLOCK, strict=True)]
    if planned:
        axes = [spans[len(spans) // 2 :][:1] for spans in axes]
    for t, h, w in product(*axes):
        seen = t.seen[:, None, None, :, None, None] & h.seen[:, None, None, :, None] & w.seen[:, None, None, :]
        queries = (slice(None), t.queries, h.queries, w.queries)
        keys = (slice(None), t.keys, h.keys, w.keys)
        rows = (x.flatten(1, 3).transpose(1, 2) for x in (q[queries], k[keys], v[keys]))
        made = scaled_dot_product_attention(*rows, attn_mask=seen.flatten(3).flatten(0, 2), scale=1.0)
        out[queries] = made.transpose(1, 2).unflatten(1, seen.shape[:3])
    return out
