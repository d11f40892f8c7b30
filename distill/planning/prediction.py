"""From what rank 0 holds, computes and sends: what a GPU has left, how long a step takes, and what the run costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distill.config import Config
from distill.planning.files import MADE_BY
from distill.planning.hardware import Hardware
from distill.planning.simulation import Simulation
from distill.planning.watched import HOST, KINDS
from distill.setup import RunPlan
from fsdp_cp.measure.attributed import Peak
from fsdp_cp.mesh import MeshShape

GIB = 2**30
FRAGMENTATION = 0.05
"""Share of the allocated memory that the caching allocator holds beside it; assumed."""
CONTEXT_GIB = 0.6
"""What CUDA and its libraries take before the first tensor; assumed."""
NCCL_GIB = 0.3
"""Buffers of a communicator of NCCL; assumed."""
WORLD = "default_pg"
"""What torch calls the group of all ranks, which is also that of an axis of the mesh that is the whole world."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a run takes, of each of its ranks."""

    mesh: MeshShape
    tokens: int
    """Of a sample."""
    simulation: Simulation
    peaks: dict[str, Peak]
    """By phase: those of the simulation with what attention kernels allocate for themselves, and those of encoders."""
    staging_gib: float
    """Of the host's memory: a rank's copy of a checkpoint that is written while training goes on."""
    hardware: Hardware | None
    seconds: dict[str, float]
    """Of a step at which a role trains, by role; empty where :attr:`why_no_seconds` says so."""
    why_no_seconds: str | None
    """Why nothing is known of times; ``None`` where it is."""
    shares: dict[str, float]
    """Of the run's steps at which a role trains, by role."""
    steps: int
    samples_between_steps: bool
    """Are some made before the last step (``sample.every``)?"""

    @property
    def roles(self) -> list[str]:
        """Those that hold something, the encoders among them."""
        found = {role for peak in self.peaks.values() for role, _ in peak.by}
        return [role for role in ("teacher", "student", "fake", "data", "encoders") if role in found]

    @property
    def allocated_gib(self) -> float:
        """What ``torch.cuda.max_memory_allocated`` is to say at the end of training: nothing is encoded any more, and
        samples that are made after it do not count."""
        beside = ("encode/",) if self.samples_between_steps else ("encode/", "sample/", "decode")
        return max(peak.bytes for name, peak in self.peaks.items() if not name.startswith(beside)) / GIB

    @property
    def offloaded_gib(self) -> float:
        """Most of the host's memory that a rank's offloaded states and activations take."""
        return self.simulation.host.bytes / GIB

    @property
    def host_gib(self) -> float:
        """Of the host's memory for a rank, beside what Python and its libraries take."""
        return self.offloaded_gib + self.staging_gib

    @property
    def peak_phase(self) -> str:
        """The phase in which most is held, that of the encoders among them."""
        return max(self.peaks, key=lambda name: self.peaks[name].bytes)

    @property
    def most_gib(self) -> float:
        """What is allocated then."""
        return self.peaks[self.peak_phase].bytes / GIB

    @property
    def nccl_gib(self) -> float:
        """Buffers of the communicators that a step sends over, and of those of its numbers: ``dp`` and the world."""
        groups = {group for cost in self.simulation.steps.values() for (_, group), size in cost.sent.items() if size}
        if self.mesh.world > 1:
            groups.add(WORLD)
        if 1 < self.mesh.dp < self.mesh.world:
            groups.add("mesh_dp")
        return NCCL_GIB * len(groups)

    @property
    def device_gib(self) -> float:
        """What a device must have: fragmentation, CUDA's context and NCCL's buffers on top."""
        return self.most_gib * (1 + FRAGMENTATION) + CONTEXT_GIB + self.nccl_gib

    @property
    def fits(self) -> bool | None:
        """``None`` where no hardware is named."""
        return None if self.hardware is None else self.device_gib <= self.hardware.memory_gib

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the run's steps; ``None`` where :attr:`why_no_seconds` says so."""
        if not self.seconds:
            return None
        return sum(self.shares[name] * seconds for name, seconds in self.seconds.items())

    @property
    def flops_per_step(self) -> float:
        """Of all ranks, mean over the run's steps; recomputation is not counted."""
        return self.mesh.dp * sum(self.shares[name] * cost.flops for name, cost in self.simulation.steps.items())

    @property
    def mfu(self) -> float | None:
        """Share of the published rate; recomputation is not counted."""
        if self.hardware is None or self.seconds_per_step is None:
            return None
        return self.flops_per_step / self.seconds_per_step / (self.hardware.bf16_tflops * 1e12 * self.mesh.world)

    def role_gib(self, role: str) -> dict[str, float]:
        """The most that is held for ``role`` in any phase, by kind; not all of it at one moment."""
        return {kind: max(peak.by.get((role, kind), 0) for peak in self.peaks.values()) / GIB for kind in KINDS}

    def as_json(self, config: Config) -> dict[str, Any]:
        """What ``plan.json`` holds."""
        seconds = self.seconds_per_step
        return {
            "made_by": MADE_BY,
            "mesh": str(self.mesh),
            "world": self.mesh.world,
            "tokens": self.tokens,
            "hardware": config.planning.hardware,
            "memory_gib": None if self.hardware is None else self.hardware.memory_gib,
            "allocated_gib": self.allocated_gib,
            "device_gib": self.device_gib,
            "device_gib_of": {
                "allocated": self.most_gib,
                "fragmentation": self.most_gib * FRAGMENTATION,
                "cuda_context": CONTEXT_GIB,
                "nccl": self.nccl_gib,
            },
            "fits": self.fits,
            "peak_phase": self.peak_phase,
            "host_gib": self.host_gib,
            "host_gib_of": {"offloaded": self.offloaded_gib, "checkpoint_staging": self.staging_gib},
            "seconds_per_step": seconds,
            "seconds_per_step_of": self.seconds,
            "mfu": self.mfu,
            "flops_per_step": self.flops_per_step,
            "days": None if seconds is None else seconds * self.steps / 86400,
            "gpu_hours": None if seconds is None else seconds * self.steps * self.mesh.world / 3600,
            "bytes_sent_per_step": {
                name: {f"{kind}, {group}": size for (kind, group), size in sorted(cost.sent.items())}
                for name, cost in self.simulation.steps.items()
            },
            "roles": {role: {f"{kind}_gib": size for kind, size in self.role_gib(role).items()} for role in self.roles},
            "phases": {
                name: {
                    "gib": peak.bytes / GIB,
                    "of": {f"{role}.{kind}": size / GIB for (role, kind), size in sorted(peak.by.items())},
                }
                for name, peak in self.peaks.items()
            },
        }


def predict(
    config: Config,
    plan: RunPlan,
    simulation: Simulation,
    tokens: int,
    hardware: Hardware | None,
    coding: Mapping[str, Peak] | None = None,
) -> Prediction:
    """Memory, time and cost of a run, from the simulation of its steps.

    Args:
        config: the checked configuration.
        plan: of it.
        simulation: of it.
        tokens: of a sample.
        hardware: of each rank; ``None`` leaves time and cost out.
        coding: of :func:`distill.planning.coding.coding_peaks`; ``None`` leaves the encoders out.
    """
    method, counts = plan.method(config.method, {}), dict.fromkeys(plan.method.trained_roles, 0)
    for step in range(config.steps):
        counts[method.trained_role(step)] += 1
    why_not = _why_no_seconds(plan, hardware)
    return Prediction(
        mesh=plan.mesh,
        tokens=tokens,
        simulation=simulation,
        peaks=_all_peaks(simulation, plan.mesh.cp, coding or {}),
        staging_gib=_staging(config, plan, simulation) / GIB,
        hardware=hardware,
        seconds={}
        if hardware is None or why_not is not None
        else {name: _seconds(simulation, name, plan, hardware) for name in simulation.steps},
        why_no_seconds=why_not,
        shares={name: count / config.steps for name, count in counts.items() if name in simulation.steps},
        steps=config.steps,
        samples_between_steps=bool(config.sample.every),
    )


def _why_no_seconds(plan: RunPlan, hardware: Hardware | None) -> str | None:
    if hardware is None:
        return "planning.hardware says whose rates to take"
    if any(role.sharding.precision != "bf16" for role in plan.roles):
        return "the rates that are known are of bf16, and a role has another precision"
    if any(role.sharding.offload == "cpu" for role in plan.roles):
        return "what copies of offloaded states and an optimizer on the host take is not known"
    return None


def _all_peaks(simulation: Simulation, cp: int, coding: Mapping[str, Peak]) -> dict[str, Peak]:
    """The simulation's, with what no operation of it shows.

    An attention kernel takes memory for itself in backward, by formula: fp32 gradients of the queries, which
    FlashAttention 2 and 3 and cuDNN sum there before they are cast.

    Args:
        simulation: of the steps.
        cp: ranks that share a sample's tokens.
        coding: of the encoders; clips are decoded beside what is held between steps.
    """
    peaks = {}
    for name, peak in simulation.peaks.items():
        peaks[name] = peak
        kernel = 4 * simulation.queries.get(name.removesuffix("/backward") + "/forward", 0) // cp
        if name.endswith("/backward") and kernel:
            peaks[name] = Peak(peak.bytes + kernel, {**peak.by, (name.split("/")[0], "workspace"): kernel})
    for name, peak in coding.items():
        resting = {label: size for label, size in simulation.resting.items() if label[1] != HOST}
        beside = {} if name.startswith("encode/") else resting
        peaks[name] = Peak(peak.bytes + sum(beside.values()), {**beside, **peak.by})
    return peaks


def _staging(config: Config, plan: RunPlan, simulation: Simulation) -> int:
    """Bytes of a rank's shards of weights, optimizer and average, where a copy of them is written asynchronously."""
    checkpoint = config.checkpoint
    if not (checkpoint.asynchronous and (checkpoint.every or checkpoint.at_end)):
        return 0
    saved = ("parameters", "optimizer", "ema", HOST)
    return sum(
        size for (role, kind), size in simulation.resting.items() if role in plan.method.trained_roles and kind in saved
    )


def _seconds(simulation: Simulation, role: str, plan: RunPlan, hardware: Hardware) -> float:
    """Of a step: its products at the sustained rate, or the weights' gathers and reductions, or the copies of
    activations to the host and back, where these take longer; and what attention sends.

    FSDP2 gathers ahead of what computes, while attention waits for the tokens that it exchanges (all-to-all and send).
    A group that reaches beyond a node sends at the rate of the network between nodes; where an axis of the mesh is the
    whole world, its group is the default one.
    """
    cost, mesh = simulation.steps[role], plan.mesh
    compute = (cost.flops + cost.recomputed) / mesh.cp / (hardware.sustained * hardware.bf16_tflops * 1e12)
    extents = {
        "mesh_ulysses": mesh.ulysses,
        "mesh_ring": mesh.cp,
        "mesh_cp": mesh.cp,
        "mesh_dp_shard_cp": mesh.dp_shard * mesh.cp,
        **{f"mesh_shard_{n}": n for n in (each.sharding.shard_ranks for each in plan.roles) if n is not None},
    }
    beside = waited_for = 0.0
    for (kind, group), size in cost.sent.items():
        inside = extents.get(group, mesh.world) <= hardware.gpus_per_node
        seconds = size / (1e9 * (hardware.nvlink_gb_per_s if inside else hardware.network_gb_per_s))
        if kind in ("all_to_all", "send") or group == "mesh_cp":
            waited_for += seconds
        else:
            beside += seconds
    copies = 2 * cost.copied / (1e9 * hardware.host_gb_per_s)
    return max(compute, beside, copies) + waited_for
