"""Prediction of a run's memory, time and cost from the simulation of rank 0, and data of the GPUs it can run on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from omegaconf import OmegaConf

from distill.config import Config
from distill.config.errors import CONFIGS
from distill.planning.roles import HOST, KINDS
from distill.planning.simulation import LOOK, Simulation
from distill.run.setup import RunPlan
from fsdp_cp.attention.kernels.choose import KERNELS
from fsdp_cp.errors import UserError
from fsdp_cp.measure.memory import Peak
from fsdp_cp.mesh import MeshShape

GIB = 2**30
FRAGMENTATION = 0.05
"""Memory that the caching allocator reserves but no tensor uses, as a share of the allocated memory; assumed."""
CONTEXT_GIB = 0.6
"""Memory of CUDA and its libraries before the first tensor; assumed."""
NCCL_GIB = 0.3
"""Buffers of one NCCL communicator; assumed."""
WORLD = "default_pg"
"""torch's name for the group of all ranks, and for a mesh axis that spans the world."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A GPU, its node, and the network between nodes, from ``configs/hardware/NAME.yaml``, which names its sources."""

    name: str
    memory_gib: float
    """Device memory as torch reports it, a few hundred MiB below nvidia-smi's value."""
    bf16_tflops: float
    """Published rate of dense bf16 products, TFLOPS."""
    gpus_per_node: int
    nvlink_gb_per_s: float
    """Bandwidth from a GPU to the other GPUs of its node, one way, in 1e9 bytes per second."""
    network_gb_per_s: float
    """Bandwidth from a GPU to other nodes, one way."""
    host_gb_per_s: float
    """Bandwidth from a GPU to host memory, one way."""
    sustained: float
    """Share of ``bf16_tflops`` that matrix products and attention reach together; assumed."""
    sustained_cudnn: float | None = None
    """The same share with cuDNN's attention, on GPUs with a faster kernel that may be missing."""


def hardware_names() -> list[str]:
    return sorted(path.stem for path in (CONFIGS / "hardware").glob("*.yaml"))


def load_hardware(name: str) -> Hardware:
    """Read ``configs/hardware/NAME.yaml``. A missing file raises ``UserError``."""
    if name not in hardware_names():
        raise UserError(f"planning.hardware={name} is unknown; use {', '.join(hardware_names())}, or null")
    return Hardware(name=name, **OmegaConf.to_object(OmegaConf.load(CONFIGS / "hardware" / f"{name}.yaml")))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted memory, time and cost of a run. Memory, operations and traffic are per rank."""

    mesh: MeshShape
    tokens: int
    simulation: Simulation
    peaks: dict[str, Peak]
    """Peak of each phase: the simulated peaks with the workspace of attention kernels, and the encoders' peaks."""
    staging_gib: float
    """Host memory for the copy of a checkpoint that is written while training continues."""
    hardware: Hardware | None
    seconds: dict[str, float]
    """Seconds of a step that trains a role, and of a look of the guard, by name. Empty if times are unknown: without
    hardware, with ``offload=cpu``, or with a role that is not in bf16 (only bf16 rates are known)."""
    shares: dict[str, float]
    """Share of the run's steps that train a role, by role; number of looks over number of steps."""
    steps: int
    samples_between_steps: bool
    """Whether the run makes samples before its last step (``sample.every``, ``guard.every``)."""
    size: list[int] | None = None
    """Frames, height and width of the largest bucket, which is planned; ``None`` for data of one size."""

    @property
    def roles(self) -> list[str]:
        """Names of the roles that hold memory, data and encoders included."""
        holders = {role for peak in self.peaks.values() for role, _ in peak.by}
        return [role for role in ("teacher", "student", "fake", "data", "encoders") if role in holders]

    @property
    def allocated_gib(self) -> float:
        """Predicted ``torch.cuda.max_memory_allocated`` at the end of training, without encoding and last samples."""
        outside = ("encode/",) if self.samples_between_steps else ("encode/", "sample/", "decode")
        return max(peak.bytes for name, peak in self.peaks.items() if not name.startswith(outside)) / GIB

    @property
    def offloaded_gib(self) -> float:
        """Largest host memory of offloaded states and activations."""
        return self.simulation.host.bytes / GIB

    @property
    def host_gib(self) -> float:
        """Host memory of offloaded tensors and checkpoint staging, in addition to Python and its libraries."""
        return self.offloaded_gib + self.staging_gib

    @property
    def peak_phase(self) -> str:
        return max(self.peaks, key=lambda name: self.peaks[name].bytes)

    @property
    def most_gib(self) -> float:
        return self.peaks[self.peak_phase].bytes / GIB

    @property
    def nccl_gib(self) -> float:
        """Buffers of the communicators that a step uses, including those for metrics (``dp`` and the world)."""
        groups = {group for cost in self.simulation.steps.values() for (_, group), size in cost.sent.items() if size}
        if self.mesh.world > 1:
            groups.add(WORLD)
        if 1 < self.mesh.dp < self.mesh.world:
            groups.add("mesh_dp")
        return NCCL_GIB * len(groups)

    @property
    def device_gib(self) -> float:
        """Required device memory: allocated memory, fragmentation, CUDA's context and NCCL's buffers."""
        return self.most_gib * (1 + FRAGMENTATION) + CONTEXT_GIB + self.nccl_gib

    @property
    def fits(self) -> bool | None:
        """Whether :attr:`hardware` has :attr:`device_gib` of memory; ``None`` without hardware."""
        return None if self.hardware is None else self.device_gib <= self.hardware.memory_gib

    @property
    def seconds_per_step(self) -> float | None:
        """Mean seconds of the run's steps; ``None`` if times are unknown."""
        if not self.seconds:
            return None
        return sum(self.shares[name] * seconds for name, seconds in self.seconds.items())

    @property
    def flops_per_step(self) -> float:
        """Mean operations of a step over all ranks, without recomputation."""
        return self.mesh.dp * sum(self.shares[name] * cost.flops for name, cost in self.simulation.steps.items())

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: share of the published rate, without recomputation."""
        if self.hardware is None or self.seconds_per_step is None:
            return None
        return self.flops_per_step / self.seconds_per_step / (self.hardware.bf16_tflops * 1e12 * self.mesh.world)

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours of all steps; ``None`` if times are unknown."""
        return None if self.seconds_per_step is None else self.seconds_per_step * self.steps * self.mesh.world / 3600

    def role_gib(self, role: str) -> dict[str, float]:
        """Return the largest memory of ``role`` in any phase, by kind. Kinds may peak at different moments."""
        return {kind: max(peak.by.get((role, kind), 0) for peak in self.peaks.values()) / GIB for kind in KINDS}

    def as_json(self) -> dict[str, Any]:
        names = (
            *("tokens", "size", "allocated_gib", "device_gib", "fits", "peak_phase", "host_gib"),
            *("seconds_per_step", "mfu", "flops_per_step", "gpu_hours"),
        )
        hardware = self.hardware
        content = {name: getattr(self, name) for name in names}
        content["mesh"], content["world"] = str(self.mesh), self.mesh.world
        content["hardware"] = hardware and hardware.name
        content["memory_gib"] = hardware and hardware.memory_gib
        content["device_gib_of"] = {
            "allocated": self.most_gib,
            "fragmentation": self.most_gib * FRAGMENTATION,
            "cuda_context": CONTEXT_GIB,
            "nccl": self.nccl_gib,
        }
        content["host_gib_of"] = {"offloaded": self.offloaded_gib, "checkpoint_staging": self.staging_gib}
        content["seconds_per_step_of"] = self.seconds
        content["bytes_sent_per_step"] = {
            name: {f"{kind}, {group}": size for (kind, group), size in sorted(cost.sent.items())}
            for name, cost in self.simulation.steps.items()
        }
        content["roles"] = {
            role: {f"{kind}_gib": size for kind, size in self.role_gib(role).items()} for role in self.roles
        }
        content["phases"] = {name: _in_gib(peak) for name, peak in self.peaks.items()}
        return content


def _in_gib(peak: Peak) -> dict[str, Any]:
    parts = {f"{role}.{kind}": size / GIB for (role, kind), size in sorted(peak.by.items())}
    return {"gib": peak.bytes / GIB, "of": parts}


def predict(
    config: Config,
    plan: RunPlan,
    simulation: Simulation,
    hardware: Hardware | None,
    encoders: Mapping[str, Peak] | None = None,
) -> Prediction:
    """Predict memory, time and cost of a run from the simulation of its steps and the encoders' peaks. Without
    ``hardware``, the GPU of each rank, time and cost are left out."""
    if hardware and hardware.sustained_cudnn and not _has_flash_attention_4(plan):
        hardware = replace(hardware, sustained=hardware.sustained_cudnn)
    method, counts = plan.method(config.method, {}), dict.fromkeys(plan.method.trained_roles, 0)
    for step in range(config.steps):
        counts[method.trained_role(step)] += 1
    if config.guard.every:
        counts[LOOK] = counts["student"] // config.guard.every + 1
    seconds = {}
    if hardware and all(role.sharding.precision == "bf16" and role.sharding.offload == "none" for role in plan.roles):
        seconds = {name: _seconds(simulation, name, plan, hardware) for name in simulation.steps}
    return Prediction(
        mesh=plan.mesh,
        tokens=plan.tokens,
        simulation=simulation,
        peaks=_all_peaks(simulation, plan.mesh.cp, encoders or {}),
        staging_gib=_staging(config, plan, simulation) / GIB,
        hardware=hardware,
        seconds=seconds,
        shares={name: count / config.steps for name, count in counts.items() if name in simulation.steps},
        steps=config.steps,
        samples_between_steps=bool(config.sample.every or config.guard.every),
    )


def _has_flash_attention_4(plan: RunPlan) -> bool:
    """Return whether ``auto`` takes FlashAttention 4 in training, as far as its package is installed here."""
    tokens = plan.tokens // plan.mesh.ring
    is_slower = KERNELS["flash_attn_4"].slower_than_others(tokens, True)
    if is_slower or any(role.family.masked_attention for role in plan.roles):
        return False
    try:
        return bool(metadata.version("flash-attn-4"))
    except metadata.PackageNotFoundError:
        return False


def _all_peaks(simulation: Simulation, cp: int, encoders: Mapping[str, Peak]) -> dict[str, Peak]:
    """Return the simulated peaks with the attention kernels' workspace, and the peaks of encoders and decoder.

    The workspace in backward is a formula: fp32 gradients of the queries, which FlashAttention 2 and 3 and cuDNN sum
    before they cast them. The decoder runs next to everything that is held between steps.
    """
    peaks = dict(simulation.peaks)
    for name, peak in simulation.peaks.items():
        kernel = 4 * simulation.queries.get(name.removesuffix("/backward") + "/forward", 0) // cp
        if name.endswith("/backward") and kernel:
            peaks[name] = Peak(peak.bytes + kernel, {**peak.by, (name.split("/")[0], "workspace"): kernel})
    resting = {label: size for label, size in simulation.resting.items() if label[1] != HOST}
    for name, peak in encoders.items():
        held = {} if name.startswith("encode/") else resting
        peaks[name] = Peak(peak.bytes + sum(held.values()), {**held, **peak.by})
    return peaks


def _staging(config: Config, plan: RunPlan, simulation: Simulation) -> int:
    """Return the bytes of the host copy of a rank's shards for an asynchronous checkpoint; 0 if checkpoints block."""
    checkpoint = config.checkpoint
    if not (checkpoint.asynchronous and (checkpoint.every or checkpoint.at_end)):
        return 0
    saved = ("parameters", "optimizer", "ema", HOST)
    trained = plan.method.trained_roles
    return sum(size for (role, kind), size in simulation.resting.items() if role in trained and kind in saved)


def _seconds(simulation: Simulation, role: str, plan: RunPlan, hardware: Hardware) -> float:
    """Return the seconds of a step: the longest of compute, FSDP2's collectives and copies, which overlap, plus
    attention's exchanges. A group that spans nodes sends at the network's rate."""
    cost, mesh = simulation.steps[role], plan.mesh
    compute = cost.at_dense_rate / mesh.cp / (hardware.sustained * hardware.bf16_tflops * 1e12)
    shard_ranks = {role_plan.sharding.shard_ranks for role_plan in plan.roles} - {None}
    extents = {
        "mesh_ulysses": mesh.ulysses,
        "mesh_ring": mesh.cp,
        "mesh_cp": mesh.cp,
        "mesh_dp_shard_cp": mesh.dp_shard * mesh.cp,
        **{f"mesh_shard_{ranks}": ranks for ranks in shard_ranks},
    }
    overlapped = exposed = 0.0
    for (kind, group), size in cost.sent.items():
        inside = extents.get(group, mesh.world) <= hardware.gpus_per_node
        seconds = size / (1e9 * (hardware.nvlink_gb_per_s if inside else hardware.network_gb_per_s))
        if kind in ("all_to_all", "send") or group == "mesh_cp":
            exposed += seconds
        else:
            overlapped += seconds
    copies = 2 * cost.copied / (1e9 * hardware.host_gb_per_s)
    return max(compute, overlapped, copies) + exposed
