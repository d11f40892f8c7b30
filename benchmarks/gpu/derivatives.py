"""Forwards of whole networks with and without their forward-mode derivative, of each model family, on one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.attention_kernels import timed
from benchmarks.gpu.child import Context
from benchmarks.gpu.networks import Peak, gib
from distill.methods.common.derivatives import directional_derivative
from fsdp_cp.launch import process_group
from fsdp_cp.mesh import build_mesh
from models.families.base import Family
from models.families.registry import family_of
from models.sample import VIDEO, Sample
from tests.oracles.clips import RandomClips

NETWORKS = {
    "wan2_1_t2v_1_3b": ("wan", (81, 480, 832), 512),
    "ltx_video_2b": ("ltx", (121, 704, 1280), 128),
    "hunyuan_video1_5": ("hunyuan15", (81, 480, 832), 1000),
}
"""Family, clip (frames, height, width) and caption tokens of each network: 32,760, 14,080 and 32,760 video tokens."""
TINY_GRID, TINY_TEXT = (3, 4, 6), 7


def derivative(context: Context, name: str) -> None:
    """Measure one of :data:`NETWORKS` in a separate process, and write how many forwards its derivative takes."""
    context.isolated(name, "benchmarks.gpu.derivatives:one_network", name)
    times = {row["what"]: row["seconds"] for row in context.written() if "seconds" in row}
    plain, dual = times.get(f"{name}: forward"), times.get(f"{name}: with its derivative")
    if plain and dual:
        context.row(f"{name}: derivative over forward", ratio=dual / plain)


def one_network(context: Context, name: str) -> None:
    """Write the rows of an unsharded bf16 network with random weights."""
    family_name, clip, text_tokens = NETWORKS[name]
    family = family_of(family_name, "teacher")
    config = dict(family.planning.networks[name])
    if context.tiny:
        config, text_tokens = next(iter(family.examples().values())), TINY_TEXT
    device, dtype, peak = context.device, torch.bfloat16, Peak(context.device)
    with process_group(device), torch.no_grad(), peak.watched():
        network = _plain_network(family, config, device)
        config, channels = dict(network.config), family.latent_channels(network.config)
        if context.tiny:
            frames, height, width = (n * p for n, p in zip(TINY_GRID, family.patch_size(config), strict=True))
            shape = (channels, frames, height, width)
        else:
            shape = family.planning.shapes_of_clip(channels, *clip, fps=16.0)[VIDEO]
        clips = RandomClips(shape, family.condition_shapes(config, shape, text_tokens))
        condition = clips.condition(["5"]).to(device).to(dtype)
        family.parallelize(network, build_mesh(cp=1, device_type=device.type), "auto", 1)
        generator = torch.Generator(device).manual_seed(0)
        x, t_x = (torch.randn(1, *shape, generator=generator, device=device).to(dtype) for _ in range(2))
        times = torch.full((1,), 0.5, device=device)

        sample, direction = Sample({VIDEO: x}), Sample({VIDEO: t_x})

        def forward(x: Sample = sample, t: Tensor = times) -> Sample:
            return family.outputs(network, x, t, condition).velocity

        def dual() -> None:
            tangent = directional_derivative(forward, sample, times, direction, mode="exact", step=0.0)
            assert bool(tangent.video.isfinite().all())

        def measured(run: Any) -> dict[str, Any]:
            peak.reset()
            run()
            most = peak.read()
            return {"seconds": timed(run, context.device_type, limit=5.0), "peak GiB": gib(most)}

        context.attempt(f"{name}: forward", partial(measured, forward))
        context.attempt(f"{name}: with its derivative", partial(measured, dual))


def _plain_network(family: Family, architecture: dict[str, Any], device: torch.device) -> nn.Module:
    """Build a bf16 network with random weights drawn on the device. As in roles, rotary tables stay in fp32."""
    with torch.device(device):
        network = family.build(architecture, "architecture")
    network.to(torch.bfloat16)
    family.restore_buffers(network, device)
    return network.eval().requires_grad_(False)
