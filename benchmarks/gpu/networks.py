"""Settings of Wan runs with random weights, and the peak memory of their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from distill.config import compose_config
from distill.planning.command import planned_shapes
from distill.run.setup import Shapes
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.reduce import local_shard
from fsdp_cp.rng import stream_seed
from models.families.wan import Wan
from models.roles.network import Network
from models.roles.role_plan import RolePlan

GIB = 2**30
ROLES = ("teacher", "student", "fake")
TINY = {
    "num_attention_heads": 1,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 8,
    "freq_dim": 256,
    "ffn_dim": 16,
    "num_layers": 1,
    "cross_attn_norm": True,
}
"""Architecture of a Wan of one small block."""


def architecture_of(size: str, tiny: bool, layers: int | None = None) -> dict[str, Any]:
    """Return the architecture of the published Wan of ``size`` (``1_3b``, ``14b``), with ``layers`` blocks if given.

    If ``tiny``, return the architecture of one small block.
    """
    published = dict(Wan.planning.networks[f"wan2_1_t2v_{size}"])
    return dict(TINY) if tiny else published if layers is None else published | {"num_layers": layers}


def words_of(size: str, method: str, *more: str, device: str, tiny: bool) -> list[str]:
    """Return the settings of a run of three Wans with random weights on one rank, at 480p and 81 frames.

    The run only trains: no checkpoints, samples or exports.

    Args:
        size: ``1_3b`` or ``14b``.
        method: a method with a published recipe.
        more: further settings of ``train.py``; ``layers=N`` sets the number of blocks.
        device: ``cuda`` or ``cpu``.
        tiny: whether to use one small block and a clip of a few tokens.
    """
    layers = next((int(word.removeprefix("layers=")) for word in more if word.startswith("layers=")), None)
    network = architecture_of(size, tiny, layers)
    architecture = "{" + ", ".join(f"{key}: {str(value).lower()}" for key, value in network.items()) + "}"
    small = ("data.num_frames=9", "data.height=32", "data.width=32", "data.max_text_tokens=8") if tiny else ()
    cycles = {
        "dmd2": ("method.fake_updates_per_student_update=1", "method.step_list=[1.0]"),
        "self_forcing": ("method.step_list=[1.0,0.9375,0.8333,0.625]",),
        "rcm": ("method.consistency_steps=0", "method.student_every=2", "method.mid_times=[]"),
    }
    return [
        f"experiment=wan2_1_t2v_{size}_{method}",
        "cluster=one_gpu",
        f"device={device}",
        *(f"{role}.checkpoint=null" for role in ROLES),
        *(f"{role}.architecture={architecture}" for role in ROLES),
        # The recipes compile on GPUs; a row must say so if its blocks are compiled.
        *(f"{role}.compile=false" for role in ROLES),
        *cycles[method],
        "batch_size=1",
        "steps=1000",
        "sample.every=0",
        "sample.at_end=false",
        "sample.student_steps=[1]",
        "export.at_end=false",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
        *small,
        *(word for word in more if not word.startswith("layers=")),
    ]


def shapes_of(words: list[str]) -> Shapes:
    """Return the shapes of a sample's latents and condition."""
    return planned_shapes(compose_config(words))


@torch.no_grad()
def fill_on_device(network: Network, plans: Sequence[RolePlan], seed: int) -> None:
    """Draw random weights on the device, in place of :func:`models.roles.load.set_first_values`.

    That function draws on the CPU, which takes three minutes for 14B. Matrices are normal and preserve the scale of
    their inputs; biases are 0, other vectors 1. Adapters keep their initial values.
    """
    for name, parameter in network.base_parameters().items():
        local = local_shard(parameter.detach())
        if local.ndim > 1:
            generator = torch.Generator(local.device).manual_seed(stream_seed("benchmarks.gpu", seed, name))
            local.normal_(std=local[0].numel() ** -0.5, generator=generator)
        else:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
    for plan in plans:
        if plan.lora is not None:
            plan.lora.fill(network.module, plan.name, seed)


class Peak:
    """Peak bytes of tensors since :meth:`reset`, by CUDA's allocator or, on the CPU, by live storages."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._live: LiveStorages | None = None

    @contextmanager
    def watched(self, storages: bool = True) -> Iterator[None]:
        """Count allocations within this context. On the CPU, set ``storages``; it does not work with a compiler."""
        if self.device.type == "cuda" or not storages:
            yield
            return
        with LiveStorages() as self._live:
            yield

    def reset(self) -> None:
        """Restart the peak from the current bytes."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._live is not None:
            self._live.reset_peak()

    def now(self) -> int | None:
        """Return the current bytes of tensors; ``None`` if nothing is watched."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return None if self._live is None else self._live.bytes

    def read(self) -> int | None:
        """Return the peak bytes; ``None`` if nothing is watched. Does not wait for kernels: the host counts."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return None if self._live is None else self._live.peak_bytes


def gib(size: int | None) -> float | None:
    """Convert bytes to GiB."""
    return None if size is None else size / GIB
