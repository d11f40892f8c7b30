"""What the device is and did: peak memory, and the arithmetic it could do."""

from __future__ import annotations

import resource

import torch


def reset_peak(device: torch.device) -> None:
    """Count CUDA's peak from here on; the CPU's cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Peak memory of this process so far, GiB: allocated by torch on CUDA, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


_DENSE_BF16_TFLOPS = {"H20": 148, "H100": 989, "H200": 989, "A100": 312, "A800": 312, "H800": 989, "L40S": 362}
"""Published dense bf16 rates by a word of the device's name."""


def peak_flops(device: torch.device) -> float | None:
    """Published dense bf16 rate of ``device`` in operations per second; ``None`` where it is not known."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    return next((rate * 1e12 for name, rate in _DENSE_BF16_TFLOPS.items() if name in words), None)
