"""GPUs and what connects them, from ``configs/hardware/``: each file says where its numbers are from."""

from __future__ import annotations

from dataclasses import dataclass, fields

from omegaconf import OmegaConf

from distill.config.errors import CONFIGS
from fsdp_cp.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU, its node, and the network between nodes."""

    memory_gib: float
    """Of the device, as torch shows it: a few hundred MiB below what nvidia-smi does."""
    bf16_tflops: float
    """Published dense rate."""
    gpus_per_node: int
    nvlink_gb_per_s: float
    """From a GPU to the others of its node, one way, 1e9 bytes."""
    network_gb_per_s: float
    """From a GPU to other nodes, one way."""
    host_gb_per_s: float
    """From a GPU to its host's memory, one way."""
    sustained: float
    """Share of ``bf16_tflops`` that matrix products and attention reach together; assumed until it is measured."""


def hardware_names() -> list[str]:
    """What ``planning.hardware`` may be."""
    return sorted(path.stem for path in (CONFIGS / "hardware").glob("*.yaml"))


def load_hardware(name: str) -> Hardware:
    """The GPU of ``configs/hardware/NAME.yaml``.

    Raises:
        UserError: there is none of this name.
    """
    if name not in hardware_names():
        raise UserError(f"planning.hardware={name} is unknown; use {', '.join(hardware_names())}, or null")
    values = OmegaConf.to_object(OmegaConf.load(CONFIGS / "hardware" / f"{name}.yaml"))
    assert isinstance(values, dict) and values.keys() == {item.name for item in fields(Hardware)}, name
    return Hardware(**values)
