"""Settings of :func:`fsdp_cp.shard_module` and checks of their combinations."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch

from fsdp_cp.choices import check_choices
from fsdp_cp.errors import UserError

if TYPE_CHECKING:
    from fsdp_cp.mesh import MeshShape

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
Precision = Literal["fp32", "bf16", "fp64"]
Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(kw_only=True)
class ShardSettings:
    """Sharding settings of one network; docs/configuration.md lists their costs.

    Strategy names and their sharded states follow Megatron-FSDP (ZeRO stages 0 to 3; Rajbhandari et al. 2020).
    """

    strategy: Strategy = "optim_grads_params"
    """Sharded states: ``no_shard`` (none), ``optim`` (optimizer state; gradients reduced once a step), ``optim_grads``
    (gradients too; reduced in each micro-batch), ``optim_grads_params`` (parameters too; gathered unit by unit)."""
    replicate: bool = True
    """Whether each of ``mesh.dp_replicate`` replicas holds a copy; ``False`` shards one copy over all ranks."""
    shard_ranks: int | None = None
    """Number of neighboring ranks, usually those of a node, that share a copy of this network; ``None`` for all ranks
    of a replica. Use it for a frozen network that is gathered within a node while others are sharded over all ranks."""
    precision: Precision = "fp32"
    """Dtype of compute and of gathered parameters."""
    reduce_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype in which gradients are summed over ranks; ``auto`` is fp32 (fp64 for fp64). The sharded gradient then has
    its master's dtype."""
    master_dtype: Literal["keep", "fp32", "bf16"] = "keep"
    """Dtype of the sharded parameters; ``keep`` does not change it."""
    activation_checkpointing: Literal["none", "full", "selective"] | bool = "none"
    """``full``: keep only a unit's inputs and recompute it in backward. ``selective``: keep the outputs of
    ``keep_operators`` too. ``True`` and ``False`` stand for ``full`` and ``none``."""
    keep_operators: list[str] = field(default_factory=list)
    """Operators (e.g. ``"aten.addmm"``) whose outputs selective checkpointing keeps; empty for
    ``"fsdp_cp.ring_attention"``, ``"fsdp_cp.cached_attention"`` and ``"fsdp_cp.sparse_attention"``, which
    :mod:`fsdp_cp.attention` calls."""
    activation_offload: bool = False
    """Whether to keep the inputs of recomputed units (``activation_checkpointing=full``) in CPU memory, pinned for
    CUDA."""
    compile: bool = False
    """Whether to ``torch.compile`` each unit as one graph."""
    fp8: Literal["none", "torchao", "transformer_engine"] = "none"
    """Package that multiplies in fp8 in the linear layers of all units but the first and the last. On a CPU ``torchao``
    emulates fp8; ``transformer_engine`` needs CUDA."""
    fp8_gather: bool = False
    """Whether to gather the weights of these layers in fp8 too (``torchao``)."""
    offload: Literal["none", "cpu"] = "none"
    """``cpu``: sharded parameters, gradients and optimizer state live in CPU memory; the optimizer steps there."""
    gather_stream: Literal["own", "compute"] = "own"
    """``own``: gathers and their copies overlap with compute, and the bytes of three units are alive at once.
    ``compute``: only the communication of gathers overlaps, and two units are alive."""
    forward_prefetch: int = 1
    """Units gathered ahead in forward; 1 is FSDP2's own prefetch."""
    backward_prefetch: int = 1
    """Units gathered ahead in backward; 1 is FSDP2's own prefetch."""
    keep_gathered: bool = False
    """Whether parameters stay gathered from a step's first micro-batch to its last (``optim_grads_params``)."""
    gradient_buffers: int = 2
    """Maximum number of units whose full gradients wait for their reduce-scatter."""
    separate_reduce_group: bool = False
    """Whether reduce-scatters use a separate communicator, so that they do not queue after all-gathers."""
    communication_buffers: Literal["default", "process_group", "symmetric"] = "default"
    """Source of the staging buffers of collectives: ``process_group`` (memory registered with NCCL), ``symmetric``
    (NCCL's symmetric memory)."""

    def __post_init__(self) -> None:
        if isinstance(self.activation_checkpointing, bool):
            self.activation_checkpointing = "full" if self.activation_checkpointing else "none"

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters stay gathered from a step's first micro-batch to its last."""
        return self.strategy in ("optim", "optim_grads") or (self.keep_gathered and self.strategy != "no_shard")

    def frozen(self) -> ShardSettings:
        """Return the settings of a network that does not train, stored in the dtype in which it computes."""
        defaults = {name: getattr(ShardSettings(), name) for name in TRAINED_ONLY}
        return replace(self, **defaults, master_dtype="bf16" if self.precision == "bf16" else "keep")

    def effective(self) -> ShardSettings:
        """Return a copy in which settings without effect under the strategy or ``fp8`` have their defaults."""
        idle: set[str] = set()
        if self.strategy == "no_shard":
            idle.update(GATHERED_ONLY)
        if self.strategy != "optim_grads_params":
            idle.update(("keep_gathered", "backward_prefetch"))
        if self.keep_gathered:
            idle.add("backward_prefetch")
        if self.fp8 == "none":
            idle.add("fp8_gather")
        return replace(self, **{name: getattr(ShardSettings(), name) for name in idle})

    def copies(self, shape: MeshShape, where: str = "") -> int:
        """Return the number of copies of the network on a mesh; gradients are summed over copies."""
        if self.strategy == "no_shard":
            return shape.world
        if self.shard_ranks is None:
            return shape.dp_replicate if self.replicate else 1
        if shape.world % self.shard_ranks:
            raise UserError(f"{where}shard_ranks={self.shard_ranks} must divide the {shape.world} ranks, or be null")
        return shape.world // self.shard_ranks

    def reduces_over_copies(self, shape: MeshShape) -> bool:
        """Return whether a step sums each loss's gradients over copies, which FSDP2 does by position in a unit."""
        return self.strategy in ("optim_grads", "optim_grads_params") and self.copies(shape) > 1

    def check(self, device_type: str, where: str = "") -> None:
        """Refuse values and combinations that do not work; ``where`` prefixes names, as ``"student."`` does."""
        check_choices(self, where)
        least = {"forward_prefetch": 1, "backward_prefetch": 1, "gradient_buffers": 1}
        if self.shard_ranks is not None:
            least["shard_ranks"] = 2
        for name, minimum in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < minimum:
                hint = f"; for a copy on each rank use {where}strategy=no_shard" if name == "shard_ranks" else ""
                raise UserError(f"{where}{name} must be an int >= {minimum}, got {value}{hint}")
        if isinstance(self.keep_operators, str) or not isinstance(self.keep_operators, Sequence):
            raise UserError(f"{where}keep_operators must be a list, e.g. [aten.addmm], got {self.keep_operators!r}")
        for name in map(str, self.keep_operators):
            find_operator(name, f"{where}keep_operators")
        for message, wrong in self.effective()._conflicts(device_type).items():
            if wrong:
                raise UserError(message.replace("@", where))

    def _conflicts(self, device_type: str) -> dict[str, bool]:
        """Return whether each refused combination is set, by its message; ``@`` stands for the name's prefix."""
        fp64, buffers, ranks = self.precision == "fp64", self.communication_buffers, self.shard_ranks
        master = COMPUTE_DTYPE[self.precision if self.master_dtype == "keep" else self.master_dtype]
        return {
            "@fp8 rounds away what @precision=fp64 computes; use @fp8=none": self.fp8 != "none" and fp64,
            "@fp8_gather=true gathers for torchao; use @fp8=torchao or @fp8_gather=false": self.fp8_gather
            and self.fp8 == "transformer_engine",
            "@activation_offload=true keeps the inputs of recomputed units in CPU memory; use"
            f" @activation_checkpointing=full, got {self.activation_checkpointing}": self.activation_offload
            and self.activation_checkpointing != "full",
            "@fp8_gather=true needs shards on the GPU; use @offload=none or @fp8_gather=false": self.fp8_gather
            and self.offload != "none",
            f"@shard_ranks={ranks} makes a copy per {ranks} ranks, but @replicate=false one for all ranks; use"
            " @shard_ranks=null or @replicate=true": ranks is not None and not self.replicate,
            f"@communication_buffers={buffers} is memory of NCCL, but the device is {device_type}; use default": (
                device_type != "cuda" and buffers in ("process_group", "symmetric")
            ),
            "@communication_buffers=symmetric allows one gradient buffer; use @gradient_buffers=1": (
                buffers == "symmetric" and self.gradient_buffers > 1
            ),
            f"@reduce_dtype={self.reduce_dtype} rounds the gradients of @precision=fp64; use auto": fp64
            and self.reduce_dtype != "auto",
            f"@master_dtype={self.master_dtype} is narrower than @precision={self.precision}; use keep": (
                master.itemsize < COMPUTE_DTYPE[self.precision].itemsize
            ),
        }


TRAINED_ONLY = ("reduce_dtype", "activation_checkpointing", "keep_operators", "activation_offload", "backward_prefetch",
                "keep_gathered", "gradient_buffers", "separate_reduce_group")  # fmt: skip
"""Settings of :class:`ShardSettings`, in addition to ``master_dtype``, that do not apply to a frozen network."""
GATHERED_ONLY = ("replicate", "shard_ranks", "fp8_gather", "gather_stream", "forward_prefetch",
                 "separate_reduce_group", "communication_buffers")  # fmt: skip
"""Settings without effect if every rank holds all parameters (``no_shard``)."""


def require_compiler(device_type: str, setting: str) -> None:
    """Check for the C or C++ compiler of Triton (``cuda``) or inductor (``cpu``), which ``setting`` needs."""
    language, variable, usual = ("C", "CC", ("gcc", "clang")) if device_type == "cuda" else ("C++", "CXX", ("g++",))
    command = os.environ.get(variable)
    if not any(map(shutil.which, shlex.split(command)[:1] if command else usual)):
        missing = f"{setting}=true needs a {language} compiler, but {command or ' or '.join(usual)} was not found"
        raise UserError(f"{missing}; install one, name it in {variable}, or use {setting}=false")


def find_operator(name: str, setting: str) -> torch._ops.OpOverload:
    """Return the overload that ``"namespace.operator"`` or ``"namespace.operator.overload"`` names."""
    import fsdp_cp.attention.cached  # noqa: F401  registers the operators of attention

    namespace, operator, variant, *rest = [*name.replace("::", ".").split("."), "", "", ""]
    packet = getattr(getattr(torch.ops, namespace, None), operator, None) if namespace and operator else None
    overload = getattr(packet, variant or "default", None)
    if not isinstance(overload, torch._ops.OpOverload) or any(rest):
        raise UserError(f"{setting}: torch has no operator {name!r}; use names as aten.addmm or aten.add.Tensor")
    # Checkpoint policies never see decomposed operators, so nothing would be kept.
    if overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        raise UserError(f"{setting}: autograd decomposes {name}; name its parts, for linear layers aten.addmm")
    return overload
