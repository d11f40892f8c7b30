"""Streaming of a causal Wan 1.3B: seconds of each chunk, and frames a second, without the VAE."""

from __future__ import annotations

import time
from functools import partial
from unittest import mock

import torch

from benchmarks.gpu.child import Context
from benchmarks.gpu.networks import Peak, fill_on_device, gib, shapes_of, words_of
from benchmarks.gpu.wan import NOT_COMPILED
from distill.config import compose_config
from distill.methods.common.sampling import rollout_chunks
from distill.run.setup import plan_run
from fsdp_cp.launch import process_group
from fsdp_cp.mesh import mesh_of_shape
from fsdp_cp.rng import StepRandom
from models.roles.load import build_role
from models.roles.role import Role
from models.sample import VIDEO, Sample
from tests.oracles.clips import RandomClips

CLIPS = 3
"""Number of clips in a row: the first compiles and warms up every length of the history."""


def streaming(context: Context, kind: str) -> None:
    """Write a row for each clip: its first and last chunk, and frames a second. ``kind``: eager or compiled."""
    if kind == "compiled" and context.tiny:
        context.row(kind, note=NOT_COMPILED)
        return
    device, peak = context.device, Peak(context.device)
    more = ["data.num_frames=33"] if context.tiny else []
    words = words_of("1_3b", "self_forcing", *more, f"student.compile={kind == 'compiled'}",
                     device=context.device_type, tiny=context.tiny)  # fmt: skip
    shapes, config = shapes_of(words), compose_config(words)
    plan = plan_run(config, shapes=shapes)
    clips = RandomClips(shapes[0]["video"], shapes[1])
    fast = mock.patch("models.roles.load.set_first_values", fill_on_device)
    with process_group(device), peak.watched(storages=kind == "eager"), fast, torch.no_grad():
        began = time.perf_counter()
        (student,) = (role for role in plan.roles if role.name == "student")
        role = build_role(
            student,
            trainable=False,
            mesh=mesh_of_shape(plan.mesh, device_type=device.type),
            device=device,
            shapes=shapes[0],
            condition_shapes=shapes[1],
        )
        context.row("built", seconds=time.perf_counter() - began)
        for clip in range(2 if context.tiny else CLIPS):
            peak.reset()
            seconds = _clip(context, role, clips, list(config.method.step_list), clip)
            frames = 4 * shapes[0]["video"][1] - 3  # the VAE makes 4 frames of each latent frame, and 1 of the first
            context.row(
                f"{kind}, clip {clip + 1}", **{"chunks": len(seconds), "first chunk s": seconds[0],
                "last chunk s": seconds[-1], "frames a second": frames / sum(seconds), "peak GiB": gib(peak.read())},
            )  # fmt: skip


def _clip(context: Context, role: Role, clips: RandomClips, times: list[float], clip: int) -> list[float]:
    """Sample a clip, and return the seconds of each chunk."""
    device = context.device
    assert role.causal is not None
    channels, frames, *sizes = clips.latent_shapes[VIDEO]
    draw = partial(torch.randn, device=device)
    noise = (Sample({VIDEO: draw(1, channels, count, *sizes)}) for count in role.causal.chunks(frames))
    random = StepRandom(seed=0, device=device, step=clip, positions=[0], part=0)
    condition = clips.condition(["5"]).to(device)
    seconds, began = [], time.perf_counter()
    for x0 in rollout_chunks(role, noise, condition, lambda i: times, random, "benchmark", sampler="renoise"):
        assert bool(x0.video.isfinite().all())  # waits for the chunk
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    return seconds
