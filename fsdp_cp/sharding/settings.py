"""How one network is sharded: the settings of :func:`fsdp_cp.shard_module`, and which of them exclude each other."""

from __future__ import annotations

import math
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch

from fsdp_cp.choices import check_choices
from fsdp_cp.errors import UserError

if TYPE_CHECKING:
    from fsdp_cp.mesh import MeshShape

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
Precision = Literal["fp32", "bf16", "fp64"]
Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


@dataclass(kw_only=True)
class ShardSettings:
    """One network's settings; docs/configuration.md says what each costs.

    Names of strategies, and which states they shard, follow Megatron-FSDP (ZeRO stages 0 to 3; Rajbhandari et al.
    2020).
    """

    strategy: Strategy = "optim_grads_params"
    """``no_shard`` (every rank holds everything), ``optim`` (optimizer state sharded, gradients reduced once a step),
    ``optim_grads`` (gradients sharded too, reduced in each micro-batch), ``optim_grads_params`` (parameters too,
    gathered one unit at a time)."""
    replicate: bool = True
    """Share a copy among the ranks of each of ``mesh.dp_replicate`` replicas; ``False`` shards over all ranks."""
    shard_ranks: int | None = None
    """Neighbouring ranks, as a rule those of a node, that share a copy of this network alone; ``None`` for all of a
    replica. For a frozen network that is gathered within the node while the others are sharded over all of them."""
    precision: Precision = "fp32"
    """Dtype of compute and of gathered parameters."""
    reduce_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype in which gradients are summed over ranks; ``auto`` is fp32 (fp64 for fp64). The sharded gradient then has
    its master's dtype."""
    master_dtype: Literal["keep", "fp32", "bf16"] = "keep"
    """Dtype of the sharded parameters; ``keep`` leaves them as they come."""
    activation_checkpointing: Literal["none", "full", "selective"] | bool = "none"
    """``full``: keep a unit's inputs alone, and run it again in backward. ``selective``: keep the outputs of
    ``keep_operators`` too. ``True`` and ``False`` stand for ``full`` and ``none``."""
    keep_operators: list[str] = field(default_factory=list)
    """Operators (``"aten.addmm"``, ``"fsdp_cp.ring_attention"``) whose outputs selective checkpointing keeps; empty for
    ``fsdp_cp.ring_attention``, which :mod:`fsdp_cp.attention` calls."""
    activation_offload: bool = False
    """Keep what backward needs of a unit in CPU memory (pinned where there is a GPU)."""
    compile: bool = False
    """``torch.compile`` each unit as one graph."""
    fp8: Literal["none", "torchao", "transformer_engine"] = "none"
    """``torchao``: the products of the units' linear layers in fp8, but those of the first and the last unit; emulated
    on a CPU."""
    fp8_gather: bool = False
    """Gather the weights of these layers in fp8, too."""
    offload: Literal["none", "cpu"] = "none"
    """``cpu``: sharded parameters, gradients and optimizer state live in CPU memory; the optimizer steps there."""
    gather_stream: Literal["own", "compute"] = "own"
    """``own``: gathers run beside compute, their copies too, and the bytes of three units are alive at once.
    ``compute``: only their communication does, and two units are alive."""
    forward_prefetch: int = 1
    """Units gathered ahead in forward; 1 is FSDP2's own prefetch."""
    backward_prefetch: int = 1
    """Units gathered ahead in backward; 1 is FSDP2's own prefetch."""
    keep_gathered: bool = False
    """Keep parameters gathered from the first micro-batch of a step to its last (``optim_grads_params``)."""
    gather_early: bool = False
    """Begin to gather the first unit of the step's first forward before its data is there."""
    gradient_buffers: int = 2
    """Full gradients of units that may wait for their reduce-scatter at once."""
    separate_reduce_group: bool = False
    """Reduce-scatters get a communicator of their own, so that they need not queue behind all-gathers."""
    communication_buffers: Literal["default", "pooled", "process_group", "symmetric"] = "default"
    """Where the staging buffers of collectives come from: ``pooled`` (one piece of memory for those of all networks
    with this setting, planned from the first steps), ``process_group`` (memory registered with NCCL), ``symmetric``
    (NCCL's symmetric memory)."""
    reduce_unused: bool = False
    """Count a parameter that got no gradient on this rank as zero, where ranks may use different parameters."""
    gradient_scale: float = 1.0
    """Factor on the reduced gradients."""

    def __post_init__(self) -> None:
        if isinstance(self.activation_checkpointing, bool):
            self.activation_checkpointing = "full" if self.activation_checkpointing else "none"

    def frozen(self) -> ShardSettings:
        """Of a network that does not train: what is for training alone at its default, stored as it computes."""
        defaults = {name: getattr(ShardSettings(), name) for name in TRAINED_ONLY}
        return replace(self, **defaults, master_dtype="bf16" if self.precision == "bf16" else "keep")

    def copies(self, shape: MeshShape, where: str = "") -> int:
        """How many times the ranks of a mesh hold the network; its gradients are summed over these.

        Args:
            shape: of the mesh.
            where: as in :meth:`check`.

        Raises:
            UserError: ``shard_ranks`` that the ranks cannot be shared out in.
        """
        if self.strategy == "no_shard":
            return shape.world
        if self.shard_ranks is None:
            return shape.dp_replicate if self.replicate else 1
        if shape.world % self.shard_ranks:
            fitting = [n for n in range(2, shape.world + 1) if shape.world % n == 0]
            works = f" among {', '.join(map(str, fitting))}, or" if fitting else ""
            raise UserError(
                f"{where}shard_ranks={self.shard_ranks} does not divide the world of {shape.world} ranks; use"
                f"{' one' + works if works else ''} null"
            )
        return shape.world // self.shard_ranks

    def check(self, device_type: str, where: str = "") -> None:
        """Refuse values and combinations that do not work, before anything is built.

        Args:
            device_type: ``cpu`` or ``cuda``.
            where: what stands before the setting's name in the message, e.g. ``"student."``.

        Raises:
            UserError: with a value that works.
        """
        check_choices(self, where)
        for name in ("forward_prefetch", "backward_prefetch", "gradient_buffers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{where}{name}={value} must be at least 1, an integer")
        if self.shard_ranks is not None and (type(self.shard_ranks) is not int or self.shard_ranks < 2):
            raise UserError(
                f"{where}shard_ranks={self.shard_ranks} must be at least 2, a number of ranks, or null for all;"
                f" one that holds a copy each is {where}strategy=no_shard"
            )
        if not isinstance(self.gradient_scale, (int, float)):
            raise UserError(f"{where}gradient_scale={self.gradient_scale!r} must be a number")
        if isinstance(self.keep_operators, str) or not isinstance(self.keep_operators, Sequence):
            raise UserError(f"{where}keep_operators={self.keep_operators!r} must be a list of names, e.g. [aten.addmm]")
        if not 0 < self.gradient_scale < math.inf:
            raise UserError(f"{where}gradient_scale={self.gradient_scale} must be above 0 and finite")
        for wrong, message in self._conflicts(device_type):
            if wrong:
                raise UserError(message.replace("@", where))
        for name in map(str, self.keep_operators):
            find_operator(name, f"{where}keep_operators")

    def _conflicts(self, device_type: str) -> list[tuple[bool, str]]:
        """A row per refused pair; ``@`` stands before a setting's name."""
        sharded = self.strategy != "no_shard"
        return [
            (
                self.fp8 == "transformer_engine",
                "@fp8=transformer_engine is not available yet: its layers have been tried by nobody here; use"
                " @fp8=torchao or none",
            ),
            (
                self.fp8 != "none" and self.precision == "fp64",
                f"@fp8={self.fp8} would round what @precision=fp64 is for; use @fp8=none",
            ),
            (
                self.fp8_gather and self.fp8 == "none",
                "@fp8_gather=true gathers the weights of @fp8=torchao, not of @fp8=none; set one of them",
            ),
            (
                self.fp8_gather and not sharded,
                "@fp8_gather=true has nothing to gather under @strategy=no_shard; set it to false",
            ),
            (
                self.fp8_gather and self.offload != "none",
                f"@fp8_gather=true casts shards where they are gathered, and those of @offload={self.offload} are"
                " elsewhere; set it to false",
            ),
            (
                self.fp8_gather and self.reduce_unused,
                "@fp8_gather=true with @reduce_unused=true: a weight that is gathered in fp8 has no gradient of zeros"
                " to send; set one of them to false",
            ),
            (
                self.keep_gathered and self.strategy != "optim_grads_params",
                f"@keep_gathered=true is for @strategy=optim_grads_params; {self.strategy} gathers nothing twice in a"
                " step as it is",
            ),
            (
                not sharded and not self.replicate,
                "@replicate=false shards over all ranks, and @strategy=no_shard not at all; set it to true",
            ),
            (
                self.shard_ranks is not None and not sharded,
                f"@shard_ranks={self.shard_ranks} has nothing to shard under @strategy=no_shard; set it to null",
            ),
            (
                self.shard_ranks is not None and not self.replicate,
                f"@shard_ranks={self.shard_ranks} is a copy for each {self.shard_ranks} ranks, and @replicate=false one"
                " for all; set @shard_ranks=null or @replicate=true",
            ),
            (
                not sharded and self.gather_stream != "own",
                f"@gather_stream={self.gather_stream} has nothing to gather under @strategy=no_shard; use own",
            ),
            (
                not sharded and self.gather_early,
                "@gather_early=true has nothing to gather under @strategy=no_shard; set it to false",
            ),
            (
                not sharded and self.separate_reduce_group,
                "@separate_reduce_group=true has no reduce-scatter to separate under @strategy=no_shard; set it to"
                " false",
            ),
            (
                not sharded and self.communication_buffers != "default",
                f"@communication_buffers={self.communication_buffers} has no all-gather to serve under"
                " @strategy=no_shard; use default",
            ),
            (
                device_type != "cuda" and self.communication_buffers in ("process_group", "symmetric"),
                f"@communication_buffers={self.communication_buffers} is memory of NCCL, and the device is"
                f" {device_type}; use default",
            ),
            (
                self.communication_buffers == "symmetric" and self.gradient_buffers > 1,
                "@communication_buffers=symmetric has one gradient buffer, not"
                f" @gradient_buffers={self.gradient_buffers}; set that to 1",
            ),
            (
                bool(self.keep_operators) and self.activation_checkpointing != "selective",
                "@keep_operators is for @activation_checkpointing=selective, not"
                f" {self.activation_checkpointing}; leave it empty",
            ),
            (
                self.precision == "fp64" and self.reduce_dtype != "auto",
                f"@reduce_dtype={self.reduce_dtype} would round the gradients of @precision=fp64; use auto",
            ),
            (
                self.master_dtype != "keep"
                and COMPUTE_DTYPE[self.master_dtype].itemsize < COMPUTE_DTYPE[self.precision].itemsize,
                f"@master_dtype={self.master_dtype} would hold less than @precision={self.precision} computes with; use"
                " keep",
            ),
            (
                not sharded and self.forward_prefetch > 1,
                f"@forward_prefetch={self.forward_prefetch} has nothing to gather under @strategy=no_shard; use 1",
            ),
            (
                self.backward_prefetch > 1 and (self.strategy != "optim_grads_params" or self.keep_gathered),
                f"@backward_prefetch={self.backward_prefetch} has nothing to gather in backward under"
                f" @{'keep_gathered=true' if self.keep_gathered else 'strategy=' + self.strategy}; use 1",
            ),
        ]


TRAINED_ONLY = (
    "reduce_dtype",
    "activation_checkpointing",
    "keep_operators",
    "activation_offload",
    "backward_prefetch",
    "keep_gathered",
    "gradient_buffers",
    "separate_reduce_group",
    "reduce_unused",
    "gradient_scale",
)
"""Settings of :class:`ShardSettings`, beside ``master_dtype``, that say nothing about a frozen network."""


def require_compiler(device_type: str, setting: str) -> None:
    """Refuse compiled units where torch would find no compiler at their first forward, with all weights loaded.

    Args:
        device_type: on ``cuda`` Triton builds its launchers in C, on ``cpu`` inductor its kernels in C++.
        setting: what asks for it, e.g. ``student.compile``.

    Raises:
        UserError: none is on the ``PATH``, or the one that ``CC`` or ``CXX`` names is not.
    """
    language, variable, usual = ("C", "CC", ("gcc", "clang")) if device_type == "cuda" else ("C++", "CXX", ("g++",))
    given = os.environ.get(variable)
    if not any(map(shutil.which, shlex.split(given)[:1] if given else usual)):
        raise UserError(
            f"{setting}=true needs a {language} compiler, and there is no {given or ' or '.join(usual)}; install one,"
            f" name it in {variable}, or use {setting}=false"
        )


def find_operator(name: str, setting: str) -> torch._ops.OpOverload:
    """The overload that ``"namespace.operator"`` or ``"namespace.operator.overload"`` names.

    Raises:
        UserError: no such operator, or one that autograd takes apart.
    """
    import fsdp_cp.attention  # noqa: F401  its operators are known once it has been imported

    namespace, operator, overload, *rest = [*name.replace("::", ".").split("."), "", "", ""]
    packet = getattr(getattr(torch.ops, namespace, None), operator, None) if namespace and operator else None
    found = getattr(packet, overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload) or any(rest):
        raise UserError(
            f"{setting}: torch has no operator {name!r};"
            " use names as aten.addmm, aten.add.Tensor or fsdp_cp.ring_attention"
        )
    # No policy ever sees these, so that nothing would be kept: linear layers come as aten.addmm or aten.mm.
    if found.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        raise UserError(f"{setting}: {name} is made of other operators; name those, for linear layers aten.addmm")
    return found
