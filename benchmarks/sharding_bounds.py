"""Cases of :mod:`benchmarks.sharding`, with the memory and traffic of each, derived from the parameter sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_cp import ShardSettings
from models.families.wan import Wan
from tests.oracles.tiny_wan import ARCHITECTURE

WAN = ARCHITECTURE | {"num_layers": 8, "attention_head_dim": 32, "ffn_dim": 512}  # dim 128
MICRO_BATCHES = 2
BYTES = 4  # fp32


@dataclass(frozen=True)
class Case:
    """Sharding strategy to measure."""

    label: str
    settings: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1

    @property
    def sharding(self) -> ShardSettings:
        return ShardSettings(**self.settings)


REFERENCE = "optim_grads_params"
CASES = (
    Case("no_shard", {"strategy": "no_shard"}),
    Case("optim", {"strategy": "optim"}),
    Case("optim_grads", {"strategy": "optim_grads"}),
    Case(REFERENCE),
    Case("HSDP, 2 replicas", {}, replicas=2),
    Case("+ keep_gathered", {"keep_gathered": True}),
    Case("+ activation_checkpointing=full", {"activation_checkpointing": "full"}),
    Case("+ activation_checkpointing=selective", {"activation_checkpointing": "selective"}),
    Case("+ offload=cpu", {"offload": "cpu"}),
    Case("+ gather_stream=compute", {"gather_stream": "compute"}),
    Case("+ forward_prefetch=2", {"forward_prefetch": 2}),
    Case("+ backward_prefetch=2", {"backward_prefetch": 2}),
    Case("+ gradient_buffers=1", {"gradient_buffers": 1}),
    Case("+ gather_early", {"gather_early": True}),
)


@dataclass
class Figures:
    """Figures of one rank, or their maximum over ranks. All except the last four are bytes."""

    parameters: int = 0
    gradients: int = 0
    """Bytes of the shards' gradients at the end of a step."""
    kept: int = 0
    """Bytes of all gradients between two micro-batches."""
    optimizer: int = 0
    peak_gathered: int = 0
    """Peak bytes of gathered parameters."""
    peak_parameters: int = 0
    """Peak bytes of gathered parameters and staging buffers of all-gathers."""
    peak_gradients: int = 0
    buffers: int = 0
    """Peak number of units whose full gradients wait for their reduction."""
    calls: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes sent, by kind of collective."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of the network in bytes, from its shapes. Padding fills dim 0 of each parameter to equal shards."""

    full: int
    padded: int
    block: int
    """Padded size of one transformer block."""
    root: int
    """Padded size of everything outside the blocks."""
    head: int
    """Unpadded size of the root's layers after the blocks, whose gradients come first."""
    units: int
    parameters: int
    """Number of parameter tensors."""


def sizes_of(shards: int) -> Sizes:
    """Return the sizes of :data:`WAN` over ``shards`` ranks."""
    with torch.device("meta"):
        network = Wan().build(dict(WAN), "benchmark")
    padded = {
        name: math.ceil(p.shape[0] / shards) * shards * p[0].numel() * BYTES for name, p in network.named_parameters()
    }
    blocks = [sum(n for name, n in padded.items() if name.startswith(f"blocks.{i}.")) for i in range(WAN["num_layers"])]
    assert len(set(blocks)) == 1
    return Sizes(
        full=sum(p.numel() for p in network.parameters()) * BYTES,
        padded=sum(padded.values()),
        block=blocks[0],
        root=sum(padded.values()) - sum(blocks),
        head=sum(p.numel() * BYTES for n, p in network.named_parameters() if n.startswith(("proj_out", "scale_shift"))),
        units=len(blocks) + 1,
        parameters=len(padded),
    )


def expected(case: Case, world: int) -> Figures:
    """Return the figures that ``case`` must have. Peaks and kept gradients are upper bounds."""
    settings = case.sharding
    replicated = settings.strategy == "no_shard"
    shards = 1 if replicated else world // case.replicas
    replicas = world // shards
    s, n = sizes_of(shards), MICRO_BATCHES
    shard = s.padded // shards
    stays = settings.strategy in ("optim", "optim_grads") or settings.keep_gathered
    once = settings.strategy in ("optim", "no_shard")
    gathers = 0 if replicated else (1 if stays else 2 * n)
    reductions = 1 if once else n
    gathered = s.padded if stays else s.block + s.root
    # FSDP2 frees a unit's buffer after the next unit's copy-out: two more blocks. Prefetching adds its own buffers.
    staged = 0 if replicated else (1 + settings.forward_prefetch if not stays else 2) * s.block
    if settings.gather_stream == "compute" and not replicated:
        staged = s.block
    # The last buffers stay until the end of the step's last backward. The root is reduced last: its inputs need no
    # gradient.
    waiting = s.root + (settings.gradient_buffers - 1) * s.block
    in_backward = (0 if once else 1) + settings.gradient_buffers  # a unit's full gradients and their copies
    around = (shards - 1) / shards
    calls = {
        "all_gather": gathers * s.units,
        "reduce_scatter": 0 if replicated else reductions * s.units,
        "all_reduce": 1 + (s.units if replicas > 1 else 0),  # 1: the norm
    }
    sent = {
        "all_gather": gathers * s.padded * around,
        "reduce_scatter": 0 if replicated else reductions * s.padded * around,
        "all_reduce": 2 * s.padded / shards * (replicas - 1) / replicas if replicas > 1 else 0,
    }
    return Figures(
        parameters=shard,
        gradients=shard,
        kept=s.full if once else shard + waiting,
        optimizer=2 * shard + BYTES * s.parameters,
        peak_gathered=gathered,
        peak_parameters=gathered + staged,
        peak_gradients=(s.full if once else shard + s.head) + in_backward * s.block,
        buffers=settings.gradient_buffers,
        calls=calls,
        sent={kind: round(size) for kind, size in sent.items()},
    )


def greatest(ranks: list[Figures]) -> Figures:
    """Return the maximum over ranks of each figure."""
    result = Figures()
    for name, value in vars(result).items():
        values = [getattr(figures, name) for figures in ranks]
        if isinstance(value, dict):
            kinds = sorted({kind for v in values for kind in v})
            setattr(result, name, {kind: max(v.get(kind, 0) for v in values) for kind in kinds})
        else:
            setattr(result, name, max(values))
    return result


def broken(figures: Figures, ideal: Figures) -> list[str]:
    """Return a message for each figure that differs from its ideal or exceeds its bound."""
    faults = []
    for name in ("parameters", "gradients", "optimizer"):
        if getattr(figures, name) != getattr(ideal, name):
            faults.append(f"{name}: {getattr(figures, name)} bytes, not {getattr(ideal, name)}")
    for name in ("kept", "peak_gathered", "peak_parameters", "peak_gradients", "buffers"):
        if getattr(figures, name) > getattr(ideal, name):
            faults.append(f"{name}: {getattr(figures, name)}, above {getattr(ideal, name)}")
    for kind in {**figures.calls, **ideal.calls}:
        pair = figures.calls.get(kind, 0), ideal.calls.get(kind, 0)
        if pair[0] != pair[1]:
            faults.append(f"{kind}: {pair[0]} calls, not {pair[1]}")
        sent, least = figures.sent.get(kind, 0), ideal.sent.get(kind, 0)
        if not least <= sent <= least + 1024:  # allow for rounding and the norm
            faults.append(f"{kind}: {sent} bytes, not {least}")
    return faults
