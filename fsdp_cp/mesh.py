"""The one device mesh: axes ``dp_replicate x dp_shard x ring x ulysses`` and the views that the rest uses.

``cp = ring x ulysses`` splits the tokens of one sample; FSDP shards parameters over the flattened ``dp_shard x cp``
axis, since a two-dimensional mesh handed to ``fully_shard`` means hybrid sharding (it would replicate over
``dp_shard``). Ulysses is the innermost axis, so that its all-to-all stays inside a node.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_cp.communicators import connect, connect_once, context_overrides
from fsdp_cp.errors import UserError, shown
from fsdp_cp.timeouts import inherited_timeout


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Sizes of the mesh axes, all at least 1, whose product is the world size; and ``own_groups``."""

    dp_replicate: int
    dp_shard: int
    ring: int
    ulysses: int
    own_groups: bool = False

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp_replicate * self.dp_shard * self.ring * self.ulysses

    @property
    def cp(self) -> int:
        """Ranks that share the tokens of one sample."""
        return self.ring * self.ulysses

    @property
    def dp(self) -> int:
        """Ranks that hold different samples."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        return (
            f"dp_replicate={self.dp_replicate} x dp_shard={self.dp_shard} x cp={self.cp}"
            f" (ring={self.ring} x ulysses={self.ulysses})"
        )


def resolve_mesh(
    *,
    world_size: int,
    dp_replicate: int = 1,
    dp_shard: int = -1,
    cp: int = 1,
    ulysses: int | Literal["auto"] = "auto",
    ring: int | Literal["auto"] = "auto",
    own_groups: bool = False,
    heads: int | None = None,
    sharded: bool = True,
) -> MeshShape:
    """Check the mesh settings against the world and fill in what is left open. Needs no process group.

    Args:
        world_size: ranks in all.
        dp_replicate: replicas of the sharded networks (hybrid sharding); 1 for plain sharding.
        dp_shard: data-parallel ranks over which parameters are sharded; -1 takes what the other axes leave.
        cp: ranks that share one sample's tokens.
        ulysses: degree of the Ulysses all-to-all, a divisor of ``heads``; ``"auto"`` is ``cp / ring`` where ``ring``
            is set, else ``gcd(heads, cp)``.
        ring: degree of ring attention; ``"auto"`` is ``cp / ulysses``. Where both are set, their product is ``cp``.
        own_groups: give ``ring`` and ``ulysses`` process groups of their own where they span the world. DeviceMesh
            hands out the default group there, so that their exchanges and FSDP's gathers queue behind each other.
            On CUDA a ring's own group, this one or that of a smaller ring, sends on a stream of high priority.
        heads: greatest common divisor of the query and key/value heads of every network on this mesh; ``None`` where
            no attention is split, or any number of heads would do (``ulysses`` is ``cp`` then).
        sharded: is any network sharded? ``False`` where all of them have ``strategy="no_shard"``: replicas alone will
            do then (``dp_shard x cp`` may be 1).

    Raises:
        UserError: sizes that do not fit the world or the heads.
    """
    given: dict[str, Any] = {
        "dp_replicate": dp_replicate,
        "dp_shard": dp_shard,
        "cp": cp,
        "ulysses": ulysses,
        "ring": ring,
    }
    for name in ("dp_replicate", "dp_shard", "cp"):
        if not isinstance(given[name], int) or isinstance(given[name], bool):
            raise UserError(f"mesh.{name}={given[name]!r} is no integer; use a number of ranks")
    if heads is not None and (not isinstance(heads, int) or isinstance(heads, bool) or heads < 1):
        raise UserError(f"heads={heads!r} is no number of attention heads; use an integer of at least 1, or None")
    shape = _fit(world_size, heads, sharded, **given)
    if isinstance(shape, MeshShape):
        return replace(shape, own_groups=own_groups)
    raise UserError(f"{shape}; use {_advice(world_size, heads, sharded, given)}")


def _fit(
    world_size: int,
    heads: int | None,
    sharded: bool,
    *,
    dp_replicate: int,
    dp_shard: int,
    cp: int,
    ulysses: int | Literal["auto"],
    ring: int | Literal["auto"],
) -> MeshShape | str:
    """The shape, or what does not fit."""
    for name, size in (("mesh.dp_replicate", dp_replicate), ("mesh.cp", cp)):
        if size < 1:
            return f"{name}={size} must be at least 1"
    if dp_shard != -1 and dp_shard < 1:
        return f"mesh.dp_shard={dp_shard} must be at least 1, or -1 for what is left of the world"
    for name, degree in (("mesh.ulysses", ulysses), ("mesh.ring", ring)):
        if degree != "auto" and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 1):
            return f"{name}={shown(degree)} must be auto or a number of at least 1"
    if dp_shard == -1:
        if world_size % (dp_replicate * cp):
            return f"mesh.dp_replicate={dp_replicate} x mesh.cp={cp} does not divide the world of {world_size} ranks"
        dp_shard = world_size // (dp_replicate * cp)
    if dp_replicate * dp_shard * cp != world_size:
        return (
            f"mesh.dp_replicate={dp_replicate} x mesh.dp_shard={dp_shard} x mesh.cp={cp} needs"
            f" {dp_replicate * dp_shard * cp} ranks, but the world has {world_size}"
        )
    if sharded and dp_replicate > 1 and dp_shard * cp == 1:
        return (
            f"mesh.dp_replicate={dp_replicate} leaves nothing to shard over (dp_shard x cp = 1), which needs"
            " strategy=no_shard on every role"
        )
    given_degrees = f"mesh.ring={ring} x mesh.ulysses={ulysses}"
    for name, degree in (("mesh.ulysses", ulysses), ("mesh.ring", ring)):
        if degree != "auto" and cp % degree:
            return f"{name}={degree} does not divide mesh.cp={cp}"
    if ulysses != "auto" and heads and heads % ulysses:
        return f"mesh.ulysses={ulysses} does not divide {heads} heads"
    if ulysses == "auto":
        if ring == "auto":
            ulysses = math.gcd(heads, cp) if heads else cp
            ring = cp // ulysses
        else:
            ulysses = cp // ring
            if heads and heads % ulysses:
                return f"mesh.ring={ring} of mesh.cp={cp} leaves ulysses={ulysses}, which does not divide {heads} heads"
    elif ring == "auto":
        ring = cp // ulysses
    if ring * ulysses != cp:
        return f"{given_degrees} is not mesh.cp={cp}"
    return MeshShape(dp_replicate=dp_replicate, dp_shard=dp_shard, ring=ring, ulysses=ulysses)


def _advice(world_size: int, heads: int | None, sharded: bool, given: dict[str, Any]) -> str:
    """Changes of the settings that were tried and fit: of one setting if that is enough, else of several."""
    free: dict[str, Any] = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "ulysses": "auto", "ring": "auto"}
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    degrees: list[int | str] = ["auto", *(n for n in sizes if given["cp"] >= 1 and given["cp"] % n == 0)]
    singles: dict[str, Sequence[int | str]] = {"cp": sizes, "ulysses": degrees, "ring": degrees, "dp_shard": [-1]}
    found = []
    for name, values in singles.items():
        others = [v for v in values if v != given[name]]
        fitting = [v for v in others if isinstance(_fit(world_size, heads, sharded, **given | {name: v}), MeshShape)]
        if len(fitting) > 1:
            found.append(f"a mesh.{name} among {', '.join(map(str, fitting))}")
        elif fitting:
            found.append(f"mesh.{name}={fitting[0]}")
    if found:
        return ", or use ".join(found)
    order = ("ring", "ulysses", "dp_shard", "dp_replicate", "cp")
    for count in range(2, len(order) + 1):
        for names in itertools.combinations(order, count):
            changes = {name: free[name] for name in names}
            if isinstance(_fit(world_size, heads, sharded, **given | changes), MeshShape):
                return " ".join(f"mesh.{name}={value}" for name, value in changes.items() if value != given[name])
    raise AssertionError("with every setting at its default each world fits")


@dataclass(frozen=True)
class ContextGroups:
    """The ``cp`` axis as plain data, for the attention operators: Dynamo sees integers and strings only.

    The groups are named as torch knows them (``ProcessGroup.group_name``). Ulysses is innermost, so that neighbouring
    ``cp`` ranks exchange heads, and the rank's tokens are those of ``cp_rank``.
    """

    ring_group: str
    ring_rank: int
    ring_size: int
    ulysses_group: str
    ulysses_rank: int
    ulysses_size: int

    @property
    def cp_size(self) -> int:
        """Ranks that share the tokens of one sample."""
        return self.ring_size * self.ulysses_size

    @property
    def cp_rank(self) -> int:
        """Which of them this is: 0 holds the first tokens."""
        return self.ring_rank * self.ulysses_size + self.ulysses_rank


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The device mesh and its views; made by :func:`build_mesh`.

    ``fsdp`` is what ``fully_shard`` takes: one axis (the flattened ``dp_shard x cp``), or two with ``dp_replicate``
    first when replicas were asked for. ``world`` is every rank as one axis. ``dp`` is the axis of ranks that hold
    different samples, ``cp`` the axis of ranks that share them, and ``context`` the same as plain data.
    """

    shape: MeshShape
    device_mesh: DeviceMesh
    world: DeviceMesh
    fsdp: DeviceMesh
    dp: DeviceMesh
    cp: DeviceMesh
    ring: DeviceMesh
    ulysses: DeviceMesh
    context: ContextGroups
    _within: dict[int, DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property  # of this mesh, not by value: its process groups die with it
    def replicas(self) -> DeviceMesh:
        """All ranks as replicas (world x 1), for networks that are not sharded at all. First asked for by all ranks."""
        sizes = (self.world.size(), 1)
        with inherited_timeout():
            return init_device_mesh(self.device_type, sizes, mesh_dim_names=("dp_replicate", "dp_shard_cp"))

    def within(self, ranks: int) -> DeviceMesh:
        """All ranks as copies of ``ranks`` neighbours each (world / ranks x ranks). First asked for by all ranks."""
        if ranks not in self._within:
            sizes, names = (self.world.size() // ranks, ranks), ("copies", f"shard_{ranks}")
            with inherited_timeout():
                self._within[ranks] = init_device_mesh(self.device_type, sizes, mesh_dim_names=names)
            connect(self._within[ranks])
        return self._within[ranks]

    @property
    def dp_rank(self) -> int:
        return self.dp.get_local_rank()

    @property
    def dp_size(self) -> int:
        return self.dp.size()

    @property
    def cp_rank(self) -> int:
        return self.context.cp_rank

    @property
    def cp_size(self) -> int:
        return self.context.cp_size

    @property
    def device_type(self) -> str:
        return self.device_mesh.device_type


def check_mesh(mesh: object) -> None:
    """Refuse what is no mesh of :func:`build_mesh`, a plain ``DeviceMesh`` above all.

    Raises:
        UserError: it is not.
    """
    # What has the same view of the groups will do: one process without a process group has no Mesh.
    if not isinstance(mesh, Mesh) and not hasattr(mesh, "context"):
        raise UserError(
            f"mesh is a {type(mesh).__name__}; use the mesh that fsdp_cp.build_mesh(dp_shard=..., cp=...) returns"
            " (its parts, mesh.fsdp and mesh.cp among them, are DeviceMeshes)"
        )


def context_groups(mesh: Mesh | DeviceMesh) -> ContextGroups:
    """The ``(ring, ulysses)`` axes of a mesh as plain data.

    Args:
        mesh: our mesh, or a ``DeviceMesh`` with axes out of ``("ring", "ulysses")``, in this order; one that is missing
            has size 1.

    Raises:
        ValueError: a ``DeviceMesh`` with other axes, or in another order.
    """
    if isinstance(mesh, Mesh):
        return mesh.context
    if not isinstance(mesh, DeviceMesh):
        check_mesh(mesh)
    names = mesh.mesh_dim_names or ()
    if names not in (("ring", "ulysses"), ("ring",), ("ulysses",)):
        found = ", ".join(names) or "without names"
        raise UserError(
            f"the mesh has the axes ({found}); use axes out of (ring, ulysses), in this order, or the mesh that"
            " fsdp_cp.build_mesh returns"
        )
    groups = {name: mesh.get_group(name) for name in names}
    if mesh.device_type == "cuda":
        connect_once(mesh)  # another's, which build_mesh has not connected
    axes: list[Any] = []
    for name in ("ring", "ulysses"):
        # The group of an axis of size 1 is never communicated over, so any name that exists stands for it.
        group = groups.get(name)
        known = group if group is not None else next(iter(groups.values()))
        axes += [known.group_name, group.rank() if group is not None else 0, group.size() if group is not None else 1]
    return ContextGroups(*axes)


def _flattened(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """One axis out of several neighbouring ones. ``DeviceMesh._flatten`` is private (torch 2.11 to 2.13)."""
    return mesh[axes]._flatten(name)


def _replicated(device_type: str, shape: MeshShape) -> DeviceMesh:
    """(replicate, shard) for hybrid sharding: a mesh of its own, since slicing flattened axes is deprecated."""
    sizes = (shape.dp_replicate, shape.dp_shard * shape.cp)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("dp_replicate", "dp_shard_cp"))


def _checked_device_type(device_type: str) -> str:
    try:
        kind = torch.device(device_type).type if isinstance(device_type, (str, torch.device)) else None
    except RuntimeError:
        kind = None
    if kind is None or kind == "meta":
        raise UserError(f"device_type={device_type!r} is unknown; use 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("device_type='cuda', but torch sees no GPU; use 'cpu'")
    return kind


def build_mesh(
    *,
    dp_replicate: int = 1,
    dp_shard: int = -1,
    cp: int = 1,
    ulysses: int | Literal["auto"] = "auto",
    ring: int | Literal["auto"] = "auto",
    own_groups: bool = False,
    heads: int | None = None,
    sharded: bool = True,
    device_type: str = "cpu",
) -> Mesh:
    """Build the mesh over the initialised process group, with its timeout. Arguments as in :func:`resolve_mesh`.

    Raises:
        UserError: sizes that do not fit the world or the heads; no process group; a device that is not there.
    """
    _require_process_group()
    shape = resolve_mesh(
        world_size=dist.get_world_size(),
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp=cp,
        ulysses=ulysses,
        ring=ring,
        own_groups=own_groups,
        heads=heads,
        sharded=sharded,
    )
    return mesh_of_shape(shape, device_type=device_type)


def _require_process_group() -> None:
    if not dist.is_initialized():
        raise UserError(
            "build_mesh needs a process group; call torch.distributed.init_process_group(), or use"
            " `with fsdp_cp.launch.process_group(device)`, and start with torchrun"
        )


def mesh_of_shape(shape: MeshShape, *, device_type: str = "cpu") -> Mesh:
    """The mesh of sizes that :func:`resolve_mesh` resolved, over the initialised process group, with its timeout.

    Raises:
        UserError: no process group; a device that is not there.
    """
    _require_process_group()
    device_type = _checked_device_type(device_type)
    axes = ("dp_replicate", "dp_shard", "ring", "ulysses")
    sizes = tuple(getattr(shape, axis) for axis in axes)
    own = context_overrides(ring=shape.ring, ulysses=shape.ulysses, own_groups=shape.own_groups)
    with inherited_timeout():
        root = init_device_mesh(device_type, sizes, mesh_dim_names=axes, backend_override=own)
        world = _flattened(root, axes, "world")
        shard = _flattened(root, ("dp_shard", "ring", "ulysses"), "fsdp")
        data = _flattened(root, ("dp_replicate", "dp_shard"), "dp")
        context = _flattened(root, ("ring", "ulysses"), "cp")
        fsdp = _replicated(device_type, shape) if shape.dp_replicate > 1 else shard
    connect(world, fsdp, data, context, root["ring", "ulysses"])  # not dp_shard's, which nothing is sent over
    return Mesh(
        shape=shape,
        device_mesh=root,
        world=world,
        fsdp=fsdp,
        dp=data,
        cp=context,
        ring=root["ring"],
        ulysses=root["ulysses"],
        context=context_groups(root["ring", "ulysses"]),
    )
