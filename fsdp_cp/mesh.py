"""The one device mesh: axes ``dp_replicate x dp_shard x ring x ulysses`` and the views that the rest uses.

``cp = ring x ulysses`` splits the tokens of one sample; FSDP shards parameters over the flattened ``dp_shard x cp``
axis, since a two-dimensional mesh handed to ``fully_shard`` means hybrid sharding (it would replicate over
``dp_shard``). Ulysses is the innermost axis, so that its all-to-all stays inside a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_cp.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Sizes of the mesh axes, all at least 1; their product is the world size."""

    dp_replicate: int
    dp_shard: int
    ring: int
    ulysses: int

    @property
    def cp(self) -> int:
        """Ranks that share the tokens of one sample."""
        return self.ring * self.ulysses

    @property
    def dp(self) -> int:
        """Ranks that hold different samples."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        return f"dp_replicate={self.dp_replicate} x dp_shard={self.dp_shard} x cp={self.cp} (ulysses={self.ulysses})"


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def resolve_mesh(
    *,
    world_size: int,
    dp_replicate: int = 1,
    dp_shard: int = -1,
    cp: int = 1,
    ulysses: int | Literal["auto"] = "auto",
    ring: int | Literal["auto"] = "auto",
    heads: int | None = None,
) -> MeshShape:
    """Check the mesh settings against the world and fill in what is left open. Needs no process group.

    Args:
        world_size: ranks in all.
        dp_replicate: replicas of the sharded networks (hybrid sharding); 1 for plain sharding.
        dp_shard: data-parallel ranks over which parameters are sharded; -1 takes what the other axes leave.
        cp: ranks that share one sample's tokens.
        ulysses: degree of the Ulysses all-to-all; ``"auto"`` is ``gcd(heads, cp)``.
        ring: degree of ring attention; ``"auto"`` is ``cp / ulysses``. It must come out as 1 for now.
        heads: greatest common divisor of the query and key/value heads of every network on this mesh;
            ``None`` where no attention is split.

    Raises:
        UserError: sizes that do not fit the world or the heads.
    """
    for name, size in (("mesh.dp_replicate", dp_replicate), ("mesh.cp", cp)):
        if size < 1:
            raise UserError(f"{name}={size} must be at least 1")
    if dp_shard != -1 and dp_shard < 1:
        raise UserError(f"mesh.dp_shard={dp_shard} must be at least 1, or -1 for what is left of the world")
    if dp_shard == -1:
        if world_size % (dp_replicate * cp):
            raise UserError(
                f"mesh.dp_replicate={dp_replicate} x mesh.cp={cp} does not divide the world of {world_size} ranks;"
                f" use a mesh.cp among {_divisors(world_size)}"
            )
        dp_shard = world_size // (dp_replicate * cp)
    if dp_replicate * dp_shard * cp != world_size:
        raise UserError(
            f"mesh.dp_replicate={dp_replicate} x mesh.dp_shard={dp_shard} x mesh.cp={cp} needs"
            f" {dp_replicate * dp_shard * cp} ranks, but the world has {world_size}; use mesh.dp_shard=-1,"
            f" or start {dp_replicate * dp_shard * cp} processes"
        )
    if dp_replicate > 1 and dp_shard * cp == 1:
        raise UserError(
            f"mesh.dp_replicate={dp_replicate} leaves nothing to shard over (dp_shard x cp = 1);"
            f" use mesh.dp_replicate=1 mesh.dp_shard={world_size}"
        )
    for name, degree in (("mesh.ulysses", ulysses), ("mesh.ring", ring)):
        if degree != "auto" and (not isinstance(degree, int) or degree < 1):
            raise UserError(f"{name}={degree} must be auto or a number of at least 1")
    if ulysses == "auto":
        ulysses = cp // ring if ring != "auto" and cp % ring == 0 else math.gcd(heads, cp) if heads else cp
    if heads and heads % ulysses:
        raise UserError(f"mesh.ulysses={ulysses} does not divide {heads} heads; use {_divisors(heads)}")
    if ring != "auto" and ring * ulysses != cp:
        raise UserError(f"mesh.ring={ring} x mesh.ulysses={ulysses} is not mesh.cp={cp}; set one of them to auto")
    if ulysses != cp:
        fitting = _divisors(math.gcd(world_size, heads) if heads else ulysses)
        raise UserError(
            f"mesh.cp={cp} with Ulysses degree {ulysses}"
            + (f" ({heads} heads)" if heads else "")
            + f" needs ring attention, which is not built yet; use a mesh.cp among {fitting}"
        )
    return MeshShape(dp_replicate=dp_replicate, dp_shard=dp_shard, ring=1, ulysses=ulysses)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The device mesh and its views; made by :func:`build_mesh`.

    ``fsdp`` is what ``fully_shard`` takes: one axis (the flattened ``dp_shard x cp``), or two with ``dp_replicate``
    first when replicas were asked for. ``world`` is every rank as one axis. ``dp`` is the axis of ranks that hold
    different samples, ``cp`` the axis of ranks that share them.
    """

    shape: MeshShape
    device_mesh: DeviceMesh
    world: DeviceMesh
    fsdp: DeviceMesh
    dp: DeviceMesh
    cp: DeviceMesh
    ring: DeviceMesh
    ulysses: DeviceMesh

    @property
    def dp_rank(self) -> int:
        return self.dp.get_local_rank()

    @property
    def dp_size(self) -> int:
        return self.dp.size()

    @property
    def cp_rank(self) -> int:
        return self.cp.get_local_rank()

    @property
    def cp_size(self) -> int:
        return self.cp.size()

    @property
    def device_type(self) -> str:
        return self.device_mesh.device_type


def _flattened(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """One axis out of several neighbouring ones. ``DeviceMesh._flatten`` is private (torch 2.11 to 2.13)."""
    return mesh[axes]._flatten(name)


def build_mesh(
    *,
    dp_replicate: int = 1,
    dp_shard: int = -1,
    cp: int = 1,
    ulysses: int | Literal["auto"] = "auto",
    ring: int | Literal["auto"] = "auto",
    heads: int | None = None,
    device_type: str = "cpu",
) -> Mesh:
    """Build the mesh over the initialised process group. Arguments as in :func:`resolve_mesh`.

    Raises:
        UserError: sizes that do not fit the world or the heads.
    """
    shape = resolve_mesh(
        world_size=dist.get_world_size(),
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp=cp,
        ulysses=ulysses,
        ring=ring,
        heads=heads,
    )
    axes = ("dp_replicate", "dp_shard", "ring", "ulysses")
    root = init_device_mesh(
        device_type, (shape.dp_replicate, shape.dp_shard, shape.ring, shape.ulysses), mesh_dim_names=axes
    )
    world = _flattened(root, axes, "world")
    shard = _flattened(root, ("dp_shard", "ring", "ulysses"), "fsdp")
    data = _flattened(root, ("dp_replicate", "dp_shard"), "dp")
    context = _flattened(root, ("ring", "ulysses"), "cp")
    return Mesh(
        shape=shape,
        device_mesh=root,
        world=world,
        fsdp=root["dp_replicate", "fsdp"] if shape.dp_replicate > 1 else shard,
        dp=data,
        cp=context,
        ring=root["ring"],
        ulysses=root["ulysses"],
    )
