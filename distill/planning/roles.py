"""Roles of the planner: networks on fake tensors whose allocations are counted by role and kind."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distill.run.setup import RunPlan
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.measure.phases import phase_now
from fsdp_cp.mesh import Mesh
from fsdp_cp.sharding.activations import keeps_attention
from fsdp_cp.sharding.allocations import watch_allocations
from fsdp_cp.sharding.shard import materialise, settings_of
from models.roles.network import Network
from models.roles.role import Call, Role
from models.roles.role_plan import RolePlan

KINDS = (
    "parameters", "optimizer", "ema", "gathered", "gradients", "gradient_buffers", "activations", "cache", "workspace",
)  # fmt: skip
"""Kinds of device memory, in the order of the tables."""
HOST = "host"
"""Kind of host memory (``offload=cpu``, ``activation_offload``), which does not count as device memory."""
_SHARDING_KINDS = {
    "gathered": "gathered",
    "staging": "gathered",
    "full_gradients": "gradient_buffers",
    "reduce_inputs": "gradient_buffers",
    "shard_gradients": "gradients",
}


class Watch:
    """Observer of all roles. It labels the allocations of a forward with its role, also while another role trains."""

    def __init__(self, storages: LiveStorages):
        self.storages = storages
        self.recomputed = 0.0
        """Operations of repeated forwards; see :attr:`StepCost.recomputed`."""
        self.recomputed_sparse = 0.0
        """Operations of sparse attention among them."""
        self.queries: dict[str, int] = {}
        """See :attr:`Simulation.queries`."""
        self.holders: dict[Network, str] = {}
        """Role for which the memory of each network counts: of a shared one, the role without adapters, if any."""

    @contextmanager
    def forward(self, call: Call) -> Iterator[None]:
        role, settings, size = call.role, settings_of(call.network.module), len(call.x)
        if torch.is_grad_enabled() and (role.trainable or any(part.requires_grad for part in call.x.parts.values())):
            if settings.activation_checkpointing != "none":
                flops, kept = call.flops, keeps_attention(settings)
                self.recomputed += call.depth * size * (flops.forward - (flops.attention if kept else 0))
                self.recomputed_sparse += call.depth * size * (0 if kept else flops.sparse)
            queries = size * call.tokens * call.network.family.width(call.network.config)
            self.queries[phase_now()] = max(queries, self.queries.get(phase_now(), 0))
        with self.storages.labelled((role.name, "activations")):
            yield
        for tensor in () if call.causal is None else call.causal.history.tensors():
            self.storages.relabel(tensor, (role.name, "cache"))

    def sharding(self, role: Role) -> AbstractContextManager:
        """Label FSDP2's allocations for one network. Gradients of a shared network count for the role that trains."""

        def label(kind: str, tensor: Tensor) -> None:
            # A DTensor is a shard's final gradient, which FSDP2 has moved to the host. A plain tensor is the output of
            # the reduction, still on the device.
            moved = isinstance(tensor, DTensor) and kind == "shard_gradients" and is_offloaded(role)
            kind, holder = _SHARDING_KINDS[kind], self.holders[role.networks[0]]
            if role.networks[0].adapters and kind != "gathered":
                holder = self.storages.label[0]
            self.storages.relabel(tensor, (holder, HOST if moved else kind))

        return watch_allocations(role.network, label)

    def build_roles(self, plan: RunPlan, mesh: Mesh, tensors: AbstractContextManager) -> dict[str, Role]:
        """Build the roles as in training, with allocated weights but without values, and observe them."""

        def fill(network: Network, plans: Sequence[RolePlan]) -> None:
            # A network on meta cannot be copied inside the fake mode, so only its allocation is.
            with tensors, self.storages:
                self._allocate(network, plans)

        roles = plan.build_roles(mesh=mesh, device=torch.device("cpu"), fill=fill)
        for role in roles.values():
            role.observer = self.forward
        return roles

    def _allocate(self, network: Network, plans: Sequence[RolePlan]) -> None:
        """Allocate the weights; label adapters with their role and other weights with the holder."""
        holder = next((plan.name for plan in plans if plan.lora is None), plans[0].name)
        self.holders[network] = holder
        held = HOST if plans[0].sharding.offload == "cpu" else "parameters"
        with self.storages.labelled((holder, "parameters")):
            with self.storages.labelled((holder, held)):
                materialise(network.module, "cpu")
            for name in network.adapters:
                for parameter in network.named_parameters(name).values():
                    self.storages.relabel(parameter, (name, held))
            for buffer in network.module.buffers():
                self.storages.relabel(buffer, (holder, "parameters"))
            network.family.restore_buffers(network.module, torch.device("cpu"))


def busiest_expert(role: Role, roles: Iterable[Role]) -> int:
    """Return the position of the expert of ``role`` that most of ``roles`` train. It alone runs: all have one size."""
    sharing = [other for other in roles if other.trainable and other.networks[0] is role.networks[0]]
    return max(range(len(role.networks)), key=lambda i: sum(i in other.trained_experts for other in sharing))


def is_offloaded(role: Role) -> bool:
    return settings_of(role.networks[0].module).offload == "cpu"
