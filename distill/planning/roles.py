"""Roles of the planner: networks on fake tensors whose allocations are counted by role and kind."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distill.run.setup import RunPlan
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.measure.phases import phase_now
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import local_shard
from fsdp_cp.sharding.activations import keeps_attention
from fsdp_cp.sharding.allocations import watch_allocations
from fsdp_cp.sharding.pool import pool_at
from fsdp_cp.sharding.shard import materialise, settings_of
from models.condition import Condition
from models.families.causal_forward import CausalForward, Record
from models.roles.history import Cache
from models.roles.load import build_network, trained_with
from models.roles.network import Network
from models.roles.role import Role
from models.roles.role_plan import RolePlan, sharing
from models.sample import VIDEO, Sample

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


class WatchedRole(Role):
    """A role that labels the allocations of its forwards with its name, also while another role trains."""

    storages: LiveStorages
    recomputed: float = 0.0
    queries: dict[str, int]
    """:attr:`Simulation.queries`, shared by all roles."""
    holder: str
    """Role for which the network's memory counts."""
    held: tuple[Network, ...] = ()
    """Other experts of the role. Only this reference keeps their memory alive."""
    idle: tuple[Network, ...] = ()
    """Trained experts that do not run: all experts have one size, so a step's memory does not depend on its expert."""

    def _outputs(
        self,
        network: Network,
        x: Sample,
        t: Tensor,
        condition: Condition,
        depth: float = 1.0,
        causal: CausalForward | None = None,
    ) -> Any:
        settings = settings_of(network.module)
        if torch.is_grad_enabled() and (self.trainable or any(part.requires_grad for part in x.parts.values())):
            flops = self.flops_of(network, x, t, condition, causal)
            if settings.activation_checkpointing != "none":
                again = flops.forward - (flops.attention if keeps_attention(settings) else 0)
                self.recomputed += depth * len(x) * again
            size = len(x) * self.tokens_of(network, x, causal) * network.family.width(network.config)
            self.queries[phase_now()] = max(size, self.queries.get(phase_now(), 0))
        with self.storages.labelled((self.name, "activations")):
            return super()._outputs(network, x, t, condition, depth, causal)

    def chunk_velocity(self, x: Sample, t: Tensor, cache: Cache, record: Record | None = None) -> Sample:
        velocity = super().chunk_velocity(x, t, cache, record)
        if record is not None:
            chunk = [tensor for layer in record.layers.values() for tensor in (layer.k, layer.v)]
            for tensor in (*chunk, *(tensor for pair in record.text.values() for tensor in pair)):
                self.storages.relabel(tensor, (self.name, "cache"))
        return velocity


def watch_sharding(role: WatchedRole, storages: LiveStorages) -> AbstractContextManager:
    """Label FSDP2's allocations for one network. Gradients of a shared network count for the role that trains."""
    pool = pool_at(role.network)

    def label(kind: str, tensor: Tensor) -> None:
        if pool is not None and pool.owns(local_shard(tensor)):
            return
        # A DTensor is a shard's final gradient, which FSDP2 has moved to the host. A plain tensor is the output of the
        # reduction, still on the device.
        moved = isinstance(tensor, DTensor) and kind == "shard_gradients" and is_offloaded(role)
        kind, holder = _SHARDING_KINDS[kind], role.holder
        if role.networks[0].adapters and kind != "gathered":
            assert isinstance(storages.label, tuple)
            holder = storages.label[0]
        storages.relabel(tensor, (holder, HOST if moved else kind))

    return watch_allocations(role.network, label)


def is_offloaded(role: Role) -> bool:
    return settings_of(role.networks[0].module).offload == "cpu"


def build_watched(
    plan: RunPlan,
    mesh: Mesh,
    storages: LiveStorages,
    tensors: AbstractContextManager,
    queries: dict[str, int],
) -> dict[str, WatchedRole]:
    """Build the roles with allocated weights but without values. Their forwards fill ``queries``."""
    shapes, condition_shapes = plan.shapes
    trained = plan.method.trained_roles
    roles: dict[str, WatchedRole] = {}
    for group in sharing(plan.roles, trained):
        trained_of = [trained_with(group, i, trained) for i in range(group[0].experts)]
        order = sorted(range(group[0].experts), key=lambda i: -len(trained_of[i]))  # the first expert runs
        # Build outside the fake mode, on meta: a network on meta cannot be copied inside it.
        network, *idle = (
            build_network(
                [plan.expert(i) for plan in group],
                trained=trained_of[i],
                mesh=mesh,
                device=torch.device("cpu"),
                shapes=shapes,
                condition_shapes=condition_shapes,
                allocate=False,
            )
            for i in order
        )
        # A shared base counts for the role without adapters, if any.
        holder = next((role_plan.name for role_plan in group if role_plan.lora is None), group[0].name)
        for role_plan in group:
            role = WatchedRole(
                name=role_plan.name, networks=(network,), trainable=role_plan.name in trained, causal=role_plan.causal
            )
            role.trained_frames = shapes[VIDEO][1]
            role.storages, role.queries, role.holder, role.held = storages, queries, holder, tuple(idle)
            role.idle = tuple(one for i, one in zip(order[1:], idle, strict=True) if role_plan.name in trained_of[i])
            roles[role_plan.name] = role
        with tensors, storages:
            for one in (network, *idle):
                _allocate(one, holder, group, storages)
    return {role_plan.name: roles[role_plan.name] for role_plan in plan.roles}


def _allocate(network: Network, holder: str, group: Sequence[RolePlan], storages: LiveStorages) -> None:
    """Allocate the weights; label adapters with their role and other weights with ``holder``."""
    held = HOST if group[0].sharding.offload == "cpu" else "parameters"
    with storages.labelled((holder, "parameters")):
        with storages.labelled((holder, held)):
            materialise(network.module, "cpu")
        for name in network.adapters:
            for parameter in network.named_parameters(name).values():
                storages.relabel(parameter, (name, held))
        for buffer in network.module.buffers():
            storages.relabel(buffer, (holder, "parameters"))
        network.family.restore_buffers(network.module, torch.device("cpu"))
