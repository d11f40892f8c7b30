"""Time and memory of one block of Wan 14B on a rank of ``cp=8`` at 720p, by activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.attention_kernels import MIB, timed, world_of_one
from benchmarks.gpu.child import Context
from benchmarks.gpu.networks import Peak, architecture_of
from fsdp_cp.mesh import Mesh, build_mesh
from fsdp_cp.sharding.activations import wrap_unit
from fsdp_cp.sharding.settings import ShardSettings
from models.families import wan_attention
from models.families.wan import Wan

RANKS = 8
LATENTS, TINY_LATENTS = (21, 90, 160), (3, 8, 16)
"""Latent shape without channels of a clip at 720p (21 x 45 x 80 tokens, an eighth on each rank), and of a test clip."""
TEXT_TOKENS = 512
ULYSSES, RING = "Ulysses 8", "ring 8, one of its chunks"
TARGET = "benchmarks.gpu.block:one_way"
CHECKPOINTING = ("none", "full", "selective")


def block(context: Context) -> None:
    """Measure each exchange with each kind of activation checkpointing, eager and compiled."""
    # Measure all eager cases first: a compiler may use up, or hang for, all the remaining time.
    for compiled in ("eager",) if context.tiny else ("eager", "compiled"):
        for exchange in (ULYSSES, RING):
            context.isolated(f"{exchange}, {compiled}", TARGET, exchange, compiled, seconds=120)


def one_way(context: Context, exchange: str, compiled: str) -> None:
    """Write the rows of one exchange, eager or compiled."""
    with world_of_one(context.device_type):
        mesh = build_mesh(cp=1, device_type=context.device_type)
        for kept in CHECKPOINTING:
            settings = ShardSettings(precision="bf16", activation_checkpointing=kept, compile=compiled == "compiled")
            context.attempt(
                f"{exchange}, {compiled}", lambda settings=settings: _measure(context, mesh, exchange, settings),
                recomputed=kept, needs=10,
            )  # fmt: skip


def _measure(context: Context, mesh: Mesh, exchange: str, settings: ShardSettings) -> dict[str, Any]:
    """Return the cells of forward and backward of one block."""
    device, peak = context.device, Peak(context.device)
    run, tokens, heads = _block(context, mesh, settings)
    patched = mock.patch.object(wan_attention, "context_parallel_attention", _exchanged)
    with patched if exchange == ULYSSES else nullcontext():
        for _ in range(2):  # the first call compiles, and libraries keep what they allocate then
            torch.autograd.grad(*run())
        kept, most, out_bytes = _memory(device, peak, run)
        forward = timed(lambda: run()[0], context.device_type, limit=2.0)
        both = timed(lambda: torch.autograd.grad(*run()), context.device_type, limit=2.0)
    return {
        "tokens": tokens,
        "heads": heads // RANKS if exchange == ULYSSES else heads,
        "forward ms": forward * 1e3,
        "forward + backward ms": both * 1e3,
        "kept MiB": None if kept is None else (kept - out_bytes) / MIB,
        "peak MiB": None if most is None else most / MIB,
    }


def _block(
    context: Context, mesh: Mesh, settings: ShardSettings
) -> tuple[Callable[[], tuple[Tensor, list[Tensor], Tensor]], int, int]:
    """Return a function that runs the block, and the numbers of tokens and heads.

    The function returns the output, the leaves that need gradients, and the output's gradient.
    """
    device, family = context.device, Wan()
    architecture = architecture_of("14b", tiny=False, layers=1)
    if context.tiny:
        architecture |= {"num_attention_heads": RANKS, "attention_head_dim": 12, "ffn_dim": 64, "text_dim": 8}
    with torch.device(device):
        network = family.build(architecture, "architecture")
    architecture = dict(network.config)  # with diffusers' defaults
    network.to(torch.bfloat16)
    family.restore_buffers(network, device)
    family.parallelize(network, mesh)
    (unit,) = family.blocks(network)
    wrap_unit(unit, settings)
    width, channels = family.width(architecture), architecture["in_channels"]
    latents = torch.empty(1, channels, *(TINY_LATENTS if context.tiny else LATENTS), device=device)
    rotary = network.rope(latents)
    whole = rotary[0].shape[1]
    tokens = whole // RANKS
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x = draw(1, tokens, width).bfloat16().requires_grad_()
    # As in diffusers, the modulation is fp32. One time per sample.
    text, modulation, grad = (
        draw(1, TEXT_TOKENS, width).bfloat16(),
        draw(1, 6, width),
        draw(1, tokens, width).bfloat16(),
    )
    cos, sin = (table[:, :tokens].contiguous() for table in rotary)
    weights = [parameter.requires_grad_() for parameter in unit.parameters()]

    def run() -> tuple[Tensor, list[Tensor], Tensor]:
        return unit(x, text, modulation, (cos, sin)), [x, *weights], grad

    return run, tokens, family.heads(architecture)


def _exchanged(q: Tensor, k: Tensor, v: Tensor, *, mesh: Mesh, total_tokens: int | None, **options: Any) -> Tensor:
    """Attend like a rank of a Ulysses group, over all tokens and an eighth of the heads.

    In place of the all-to-all, the rank copies its own tensor, which has the size of the data from the other ranks.
    """

    def to_all_tokens(x: Tensor) -> Tensor:
        """Reshape ``(B, S, H, D)`` to ``(B, 8 S, H / 8, D)``."""
        return x.unflatten(2, (RANKS, -1)).transpose(1, 2).flatten(1, 2).contiguous()

    out = _ATTENTION(*(to_all_tokens(x) for x in (q, k, v)), mesh=mesh, total_tokens=None, **options)
    return out.unflatten(1, (RANKS, -1)).transpose(1, 2).flatten(2, 3).contiguous()


_ATTENTION = wan_attention.context_parallel_attention


def _memory(
    device: torch.device, peak: Peak, run: Callable[[], tuple[Tensor, list[Tensor], Tensor]]
) -> tuple[int | None, int | None, int]:
    """Return the bytes kept after a forward, the peak bytes of forward and backward, and the bytes of the output.

    The first two do not include earlier allocations.
    """
    with peak.watched():
        before = peak.now()
        peak.reset()
        out, leaves, grad = run()
        kept = peak.now()
        torch.autograd.grad(out, leaves, grad)
        most = peak.read()
    size = out.nbytes
    if before is None or kept is None or most is None:
        return None, None, size
    return kept - before, most - before, size
