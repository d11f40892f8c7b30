"""Time and peak memory of Wan's VAE and text encoder, with the effects of bf16 and tiling."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.child import Context
from benchmarks.gpu.networks import Peak, gib
from distill.planning.encoders import build_encoder, build_vae
from models.families.wan import Wan

SIZES = {"480p": (81, 480, 832), "720p": (81, 720, 1280)}
"""Frames, height and width."""
TINY_SIZES = {"tiny": (5, 48, 48)}
TINY_VAE = {"base_dim": 8, "z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4, "num_res_blocks": 1}
TINY_TEXT = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
TINY_TILES = (32, 32, 24, 24)
"""Tile sizes and strides in pixels, small enough to tile a test's clip. The VAE's defaults are 256 and 192."""
WAYS = {"fp32": (torch.float32, False), "fp32, tiled": (torch.float32, True), "bf16": (torch.bfloat16, False),
        "bf16, tiled": (torch.bfloat16, True)}  # fmt: skip
CAPTION_TOKENS = 512
WARM_FRAMES = 5
"""Number of frames of the warm-up clip."""


def encoders(context: Context) -> None:
    """Measure both in separate processes, so that neither counts the other's memory."""
    context.isolated("text encoder", "benchmarks.gpu.encoders:text_encoder", seconds=50)
    context.isolated("VAE", "benchmarks.gpu.encoders:vae")


@torch.no_grad()
def text_encoder(context: Context) -> None:
    """Measure umT5-XXL on one caption, in fp32 as data sets run it, and in bf16."""
    device = context.device
    settings = TINY_TEXT | {"feed_forward_proj": "gated-gelu"} if context.tiny else dict(Wan.planning.text_encoder)
    tokens = 8 if context.tiny else CAPTION_TOKENS
    exact: Tensor | None = None
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):

        def measure(dtype: torch.dtype = dtype) -> dict[str, Any]:
            nonlocal exact
            torch.manual_seed(0)
            # Draw the weights in fp32 for both dtypes, so that they are the same; on the device this takes a second.
            with torch.device(device):
                model = build_encoder(settings).eval().to(dtype)
            words = torch.arange(1, tokens + 1, device=device)[None] % settings["vocab_size"]
            mask = torch.ones_like(words)
            cells, hidden = _measured(device, lambda: model(words, mask).last_hidden_state)
            errors, exact = _error(hidden, exact)
            return {"held GiB": gib(sum(p.nbytes for p in model.parameters())), **cells, **errors}

        context.attempt(f"text encoder, {tokens} tokens, {name}", measure, needs=10)
        context.let_go()


@torch.no_grad()
def vae(context: Context) -> None:
    """Encode and decode a clip with the VAE, at each size and in each of the :data:`WAYS`."""
    device = context.device
    torch.manual_seed(0)
    with torch.device(device):
        model = build_vae(TINY_VAE if context.tiny else {}).eval()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    for size, (frames, height, width) in (TINY_SIZES if context.tiny else SIZES).items():
        generator = torch.Generator(device).manual_seed(0)
        video = torch.rand(1, 3, frames, height, width, generator=generator, device=device) * 2 - 1
        _there_and_back(context, f"VAE, {size} x {frames} frames", model, weights, video)


def _encode(model: Any, dtype: torch.dtype, video: Tensor) -> Tensor:
    return model.encode(video.to(dtype)).latent_dist.mode().float()


def _decode(model: Any, dtype: torch.dtype, latents: Tensor) -> Tensor:
    return model.decode(latents.to(dtype)).sample.float()


def _there_and_back(context: Context, label: str, model: Any, weights: dict[str, Tensor], video: Tensor) -> None:
    """Write the rows of one clip ``(1, 3, T, H, W)``. Every way decodes the fp32 latents."""
    exact: dict[str, Tensor | None] = {"encode": None, "decode": None}

    def measure(what: str, call: Callable[[Tensor], Tensor], inputs: Tensor) -> dict[str, Any]:
        cells, out = _measured(context.device, lambda: call(inputs))
        errors, exact[what] = _error(out, exact[what])
        return cells | errors

    for name, (dtype, tiled) in WAYS.items():
        model.to(dtype).load_state_dict(weights)  # undo the rounding of an earlier way
        model.enable_tiling(*(TINY_TILES if context.tiny else ())) if tiled else model.disable_tiling()
        encode, decode = partial(_encode, model, dtype), partial(_decode, model, dtype)

        def forth(encode: Callable[[Tensor], Tensor] = encode, decode: Callable[[Tensor], Tensor] = decode) -> Any:
            decode(encode(video[:, :, :WARM_FRAMES]))  # warm up: choose and load kernels
            return measure("encode", encode, video)

        context.attempt(f"{label}, encode, {name}", forth, needs=15)
        if (latents := exact["encode"]) is not None:
            z = latents.to(context.device)
            back = partial(measure, "decode", decode, z)
            context.attempt(f"{label}, decode, {name}", back, needs=15)
            del z, back
        context.let_go()


def _measured(device: torch.device, call: Callable[[], Tensor]) -> tuple[dict[str, Any], Tensor]:
    """Return the seconds and the peak memory of one call, including weights and inputs, and its result on the CPU."""
    peak = Peak(device)
    with peak.watched():
        _wait(device)
        peak.reset()
        began = time.perf_counter()
        out = call()
        _wait(device)  # the host returns long before the device has finished
        seconds = time.perf_counter() - began
        most = peak.read()
    return {"seconds": seconds, "peak GiB": gib(most)}, out.float().cpu()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _error(values: Tensor, exact: Tensor | None) -> tuple[dict[str, Any], Tensor]:
    """Return cells, with the relative error by norm if ``exact`` is given, and the tensor for later comparisons."""
    cells: dict[str, Any] = {"finite": bool(values.isfinite().all())}
    if exact is None:
        return cells, values
    return cells | {"relative error": float((values - exact).norm() / exact.norm())}, exact
