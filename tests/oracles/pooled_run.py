"""DMD2 with pooled buffers of collectives and with torch's buffers, to compare weights and places of buffers.

The trainer runs teacher, student and fake score, with clips of two lengths and samples between some steps. Buffers are
recorded independently of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.methods import Batch
from distill.methods.common.chunks import draw_noise
from distill.methods.dmd2 import Dmd2Settings
from fsdp_cp.measure.phases import phase
from fsdp_cp.rng import StepRandom
from fsdp_cp.sharding.pool import BufferPool, pool_at
from fsdp_cp.sharding.state import resharded
from tests.oracles import sharded_run
from tests.oracles.buffers import BufferWatch, union
from tests.oracles.full_tensors import full_tensors
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import RecordingTrainer, make_trainer

FAKE_UPDATES = 2
"""Updates of the fake score for each update of the student, which trains at steps 0, 3, 6, ..."""
SAMPLE_EVERY = 5
SETTLED = 0.005
"""Seconds in which gloo's threads free earlier buffers, before each new buffer of a run that records lifetimes."""


@dataclass
class Figures:
    """Buffers of one rank's run, and its weights at the end."""

    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    requests: list[int] = field(default_factory=list)
    """Requested buffers by step, including those of the samples after it."""
    allocations: list[int] = field(default_factory=list)
    """Requested buffers outside of the pool, by step."""
    overlaps: int = 0
    """Number of buffers that overlapped a living one."""
    outputs_in_pool: int = 0
    """Number of reduce-scatter outputs (gradients) in the pool's memory."""
    plans: int = 0
    held: int = 0
    """Bytes of the pool."""
    in_all: int = 0
    """Bytes of all requested buffers, each counted once."""
    most_alive: int = 0
    """Largest number of bytes that were alive at once."""


def train(sizes: dict[str, Any], buffers: str, folder: Path, architecture: dict[str, Any], steps: int) -> Figures:
    """Run all steps on this rank and return its figures."""
    method = Dmd2Settings(
        fake_updates_per_student_update=FAKE_UPDATES, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, shift=2.0
    )
    setup = Setup(
        **sizes,
        steps=steps,
        method=method,
        architecture=architecture,
        changes={"all": {"communication_buffers": buffers}},
    )
    sharded_run._mesh.cache_clear()  # a pool belongs to a mesh, and would still hold the networks of the earlier run
    trainer = make_trainer(setup, folder, make_config(setup, folder))
    networks = {name: role.network for name, role in trainer.method.roles.items()}
    pool = pool_at(networks["student"]) or BufferPool()
    data, figures = _two_lengths(trainer), Figures()
    # Only the run with torch's buffers records lifetimes, and so needs to wait for gloo's threads.
    with BufferWatch(networks, patience=0.0 if buffers == "pooled" else SETTLED) as watch:
        watch.in_memory = pool.owns
        for step in range(steps):
            watch.kind = trainer.method.trained_role(step)
            before = watch.requests, watch.outside
            trainer._train_step(data)
            if (step + 1) % SAMPLE_EVERY == 0:
                watch.kind = "samples"
                _sample(trainer)
            figures.requests.append(watch.requests - before[0])
            figures.allocations.append(watch.outside - before[1])
    whole = union(watch.traces)
    figures.weights = {name: full_tensors(role.weights()) for name, role in trainer.roles.items()}
    figures.overlaps, figures.outputs_in_pool = watch.overlaps, watch.outputs_in_memory
    figures.plans, figures.held = pool.plans, pool.nbytes
    figures.in_all, figures.most_alive = whole.in_all, whole.most_alive
    return figures


def _two_lengths(trainer: RecordingTrainer) -> Iterator[list[Batch]]:
    """Yield the trainer's data: two steps of whole clips, then two steps of their first two frames, and so on."""
    for step, batches in enumerate(trainer._steps_of_data()):
        if step % 4 < 2:
            yield batches
        else:
            yield [replace(batch, latents=batch.latents.frames(slice(2)).map(Tensor.contiguous)) for batch in batches]


def _sample(trainer: RecordingTrainer) -> None:
    """Sample student and teacher, as a run does between steps."""
    networks = [role.network for role in trainer.method.roles.values()]
    random = StepRandom(seed=1, step=0, positions=[0, 1])
    condition = trainer.data.condition(["0", "1"])
    for role, steps in (("student", 2), ("teacher", 2)):
        with phase(f"sample/{role}"), resharded(networks), torch.no_grad():
            noise = draw_noise(random, "sample/noise", trainer.data.latent_shapes)
            trainer.method.generate(role, noise, condition, steps, random)


def both(*args: Any) -> tuple[Figures, Figures, bool]:
    """Return the figures with torch's own and with pooled buffers, and whether all weights are bitwise equal."""
    sizes, *rest = args
    own, pooled = (train(sizes, buffers, *rest) for buffers in ("default", "pooled"))
    same = all(
        torch.equal(x, pooled.weights[role][name]) for role, named in own.weights.items() for name, x in named.items()
    )
    own.weights, pooled.weights = {}, {}
    return own, pooled, same


def faults_of(own: Figures, pooled: Figures, same: bool) -> list[str]:
    """Return one line for each condition that does not hold."""
    found = []
    if not same:
        found.append("weights differ from those with torch's own buffers")
    if pooled.overlaps or pooled.outputs_in_pool:
        found.append(f"{pooled.overlaps} buffers over living buffers, {pooled.outputs_in_pool} gradients in the pool")
    if any(pooled.allocations[2:]):
        found.append(f"allocations after the second step: {pooled.allocations}")
    if pooled.requests != own.requests:
        found.append("the number of requests differs from torch's own buffers")
    if not 0 < pooled.held < own.in_all:
        found.append(f"holds {pooled.held} bytes, of {own.in_all} in all and {own.most_alive} at once")
    return found
