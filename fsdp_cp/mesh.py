"""Device mesh with the axes ``dp_replicate x dp_shard x ring x ulysses``, and its views for the rest of the package.

``cp = ring x ulysses`` splits the tokens of one sample. FSDP shards parameters over the flattened ``dp_shard x cp``
axis: given two axes, ``fully_shard`` would use hybrid sharding and replicate over ``dp_shard``. Ulysses is the
innermost axis, so that its all-to-all stays inside a node.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_cp.errors import UserError, shown
from fsdp_cp.runtime.timeouts import inherited_timeout

Degree = int | Literal["auto"]
"""Size of an axis that splits tokens; ``"auto"`` follows from the other sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Sizes of the mesh axes, all at least 1; their product is the world size."""

    dp_replicate: int
    dp_shard: int
    ring: int
    ulysses: int

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.dp_replicate * self.dp_shard * self.ring * self.ulysses

    @property
    def cp(self) -> int:
        """Number of ranks that share the tokens of one sample."""
        return self.ring * self.ulysses

    @property
    def dp(self) -> int:
        """Number of ranks that hold different samples."""
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
    ulysses: Degree = "auto",
    ring: Degree = "auto",
    heads: int | None = None,
    sharded: bool = True,
) -> MeshShape:
    """Check the mesh settings against the world and compute the sizes left open. Needs no process group.

    Args:
        world_size: number of all ranks.
        dp_replicate: number of replicas of the sharded networks (hybrid sharding); 1 for plain sharding.
        dp_shard: number of data-parallel ranks that shard parameters; -1 for all ranks that the other axes leave.
        cp: number of ranks that share one sample's tokens.
        ulysses: degree of the Ulysses all-to-all, a divisor of ``heads``; ``"auto"`` is ``cp / ring`` if ``ring`` is
            set, else ``gcd(heads, cp)``.
        ring: degree of ring attention; ``"auto"`` is ``cp / ulysses``. If both are set, their product must be ``cp``.
        heads: greatest common divisor of the query and key/value heads of every network on this mesh; ``None`` if no
            attention is split or any number of heads works (``"auto"`` then makes ``ulysses`` equal to ``cp``).
        sharded: whether any network is sharded. ``False`` (all have ``no_shard``) allows a mesh of replicas only.
    """
    _check_size("dp_replicate", dp_replicate)
    if dp_shard != -1 or type(dp_shard) is not int:
        _check_size("dp_shard", dp_shard, ", or -1 for what the other axes leave")
    _check_size("cp", cp)
    for name, degree in (("ulysses", ulysses), ("ring", ring)):
        if degree != "auto" and (type(degree) is not int or degree < 1 or cp % degree):
            raise UserError(f"mesh.{name} must be auto or a divisor of mesh.cp={cp}, got {shown(degree)}")
    if heads is not None and (type(heads) is not int or heads < 1):
        raise UserError(f"heads must be an int >= 1 or None, got {heads!r}")
    dp_shard = _fill_world(world_size, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp)
    if sharded and dp_replicate > 1 and dp_shard * cp == 1:
        advice = "use a smaller one, or strategy=no_shard on every role"
        raise UserError(f"mesh.dp_replicate={dp_replicate} leaves no ranks to shard over; {advice}")
    ring, ulysses = _split_context(cp, ring=ring, ulysses=ulysses, heads=heads)
    return MeshShape(dp_replicate=dp_replicate, dp_shard=dp_shard, ring=ring, ulysses=ulysses)


def _check_size(axis: str, size: int, hint: str = "") -> None:
    if type(size) is not int or size < 1:
        raise UserError(f"mesh.{axis} must be an int >= 1{hint}, got {shown(size)}")


def _fill_world(world_size: int, *, dp_replicate: int, dp_shard: int, cp: int) -> int:
    """Return ``dp_shard``, for -1 the size with which the axes fill the world; refuse axes that do not."""
    others = f"mesh.dp_replicate={dp_replicate} x mesh.cp={cp}"
    if dp_shard == -1:
        dp_shard, rest = divmod(world_size, dp_replicate * cp)
        if rest:
            divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise UserError(f"{others} must divide the world of {world_size} ranks; use {divisors}")
    elif dp_replicate * dp_shard * cp != world_size:
        product = f"{others} x mesh.dp_shard={dp_shard}"
        raise UserError(f"{product} must equal the world of {world_size} ranks; use mesh.dp_shard=-1 for the rest")
    return dp_shard


def _split_context(cp: int, *, ring: Degree, ulysses: Degree, heads: int | None) -> tuple[int, int]:
    """Return the degrees of the ring and of Ulysses, whose product is ``cp``."""
    if ulysses == "auto":
        if ring != "auto":
            ulysses = cp // ring
        else:
            ulysses = math.gcd(heads, cp) if heads else cp
    if ring == "auto":
        ring = cp // ulysses
    automatic = "use mesh.ulysses=auto mesh.ring=auto"
    if ring * ulysses != cp:
        raise UserError(f"mesh.ring={ring} x mesh.ulysses={ulysses} must equal mesh.cp={cp}; {automatic}")
    if heads and heads % ulysses:
        raise UserError(f"ulysses={ulysses} (mesh.ring={ring} of mesh.cp={cp}) must divide {heads} heads; {automatic}")
    return ring, ulysses


@dataclass(frozen=True)
class ContextGroups:
    """Integers and strings that describe the ``cp`` axis, for the attention operators and Dynamo.

    Groups are given by ``ProcessGroup.group_name``. Ulysses is the inner axis, so neighboring ``cp`` ranks exchange
    heads. ``cp_rank`` determines the rank's tokens.
    """

    ring_group: str
    ring_rank: int
    ring_size: int
    ulysses_group: str
    ulysses_rank: int
    ulysses_size: int

    @property
    def cp_size(self) -> int:
        """Number of ranks that share the tokens of one sample."""
        return self.ring_size * self.ulysses_size

    @property
    def cp_rank(self) -> int:
        """Index of this rank among the ranks that share a sample; rank 0 holds the first tokens."""
        return self.ring_rank * self.ulysses_size + self.ulysses_rank


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group with a ``group_name``. ``_resolve_process_group`` is private (torch 2.11 to 2.13)."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # GroupName, a str


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Device mesh and its views; made by :func:`build_mesh`.

    ``fsdp`` is the mesh for ``fully_shard``: one axis (the flattened ``dp_shard x cp``), or two with ``dp_replicate``
    first if there are several replicas. ``world`` is one axis of all ranks. ``dp`` is the axis of ranks that hold
    different samples, ``cp`` the axis of ranks that share a sample. ``context`` describes ``cp`` as plain data.
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

    def within(self, ranks: int) -> DeviceMesh:
        """Return a mesh of copies of ``ranks`` neighbors each; with 1 all ranks are replicas. Called by all ranks."""
        if ranks not in self._within:
            sizes = self.world.size() // ranks, ranks
            names = ("copies", f"shard_{ranks}") if ranks > 1 else ("dp_replicate", "dp_shard_cp")
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


class OneRank:
    """Stand-in for a :class:`Mesh` of one rank, without a process group: for a network that a plain pipeline calls."""

    context = ContextGroups("", 0, 1, "", 0, 1)
    cp_rank, cp_size = 0, 1


def check_mesh(mesh: object) -> None:
    """Refuse a mesh that :func:`build_mesh` did not make, such as a plain ``DeviceMesh``."""
    # Accept any object with `context`, such as OneRank.
    if not isinstance(mesh, Mesh) and not hasattr(mesh, "context"):
        raise UserError(f"mesh is a {type(mesh).__name__}; use the whole mesh that fsdp_cp.build_mesh(...) returns")


def context_groups(mesh: Mesh | DeviceMesh) -> ContextGroups:
    """Return the ``(ring, ulysses)`` axes of a mesh as plain data.

    ``mesh`` is a :class:`Mesh`, or a ``DeviceMesh`` with one or both of these axes; a missing axis has size 1.
    """
    if not isinstance(mesh, DeviceMesh):
        check_mesh(mesh)
        return mesh.context
    names = mesh.mesh_dim_names or ()
    if names not in (("ring", "ulysses"), ("ring",), ("ulysses",)):
        raise UserError(f"the mesh has the axes {names}; use (ring, ulysses) or one of them, or a mesh of build_mesh")
    if mesh.device_type == "cuda":
        connect_once(mesh)  # a plain DeviceMesh is not connected yet
    fields: list[Any] = []
    for name in ("ring", "ulysses"):
        # A missing axis never communicates, so the name of any existing group works.
        group = mesh.get_group(name if name in names else names[0])
        fields += [group.group_name, group.rank(), group.size()] if name in names else [group.group_name, 0, 1]
    return ContextGroups(*fields)


def build_mesh(*, device_type: str = "cpu", **sizes: Any) -> Mesh:
    """Build the mesh over the initialized process group, with its timeout. ``sizes`` are those of :func:`resolve_mesh`.

    Raises:
        UserError: sizes that do not fit the world or the heads; no process group; no GPU for ``cuda``.
    """
    if not dist.is_initialized():
        raise UserError("build_mesh needs a process group; use `with fsdp_cp.launch.process_group(device)`, torchrun")
    shape = resolve_mesh(world_size=dist.get_world_size(), **sizes)
    return mesh_of_shape(shape, device_type=device_type)


def mesh_of_shape(shape: MeshShape, *, device_type: str = "cpu") -> Mesh:
    """Build the mesh of a shape that :func:`resolve_mesh` returned, over the initialized process group."""
    device_type = str(device_type).partition(":")[0]
    if device_type not in ("cpu", "cuda"):
        raise UserError(f"device_type must be 'cpu' or 'cuda', got {device_type!r}")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise UserError("device_type='cuda', but torch sees no GPU; use 'cpu'")
    axes = ("dp_replicate", "dp_shard", "ring", "ulysses")
    sizes = tuple(getattr(shape, axis) for axis in axes)
    with inherited_timeout():
        overrides = context_overrides(ring=shape.ring, ulysses=shape.ulysses)
        root = init_device_mesh(device_type, sizes, mesh_dim_names=axes, backend_override=overrides)
        # Flatten neighboring axes. ``DeviceMesh._flatten`` is private (torch 2.11 to 2.13).
        world = root[axes]._flatten("world")
        fsdp = root["dp_shard", "ring", "ulysses"]._flatten("fsdp")
        data = root["dp_replicate", "dp_shard"]._flatten("dp")
        context = root["ring", "ulysses"]._flatten("cp")
        if shape.dp_replicate > 1:  # a separate mesh, since slicing flattened axes is deprecated
            names = ("dp_replicate", "dp_shard_cp")
            fsdp = init_device_mesh(device_type, (shape.dp_replicate, shape.dp_shard * shape.cp), mesh_dim_names=names)
    connect(world, fsdp, data, context, root["ring", "ulysses"])  # without dp_shard, which never communicates
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


def context_overrides(*, ring: int, ulysses: int) -> dict[int | str, Any]:
    """Return ``backend_override`` of ``init_device_mesh`` for the axes that split a sample's tokens.

    An axis that spans the world would get the default group, which FSDP also uses: its collectives would queue after
    FSDP's gathers. An override, even with the same backend, gives the axis a separate group. A ring's NCCL group sends
    on a high-priority stream: its hops must overlap with an attention kernel, whose blocks are queued for every SM.
    """
    world, backend = dist.get_world_size(), str(dist.get_backend_config())  # backends of all devices
    overrides: dict[int | str, Any] = {}
    for axis, size in (("ring", ring), ("ulysses", ulysses)):
        if size == world > 1:
            overrides[axis] = backend
    if ring > 1 and "nccl" in backend:  # torch without CUDA lacks ProcessGroupNCCL
        overrides["ring"] = (backend, dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
    return overrides


def groups_of(*meshes: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups of all axes of ``meshes`` with several ranks, each once, in the same order on all ranks."""
    groups = (group for mesh in meshes for group in mesh.get_all_groups())
    return [group for group in dict.fromkeys(groups) if group.size() > 1]


def connect(*meshes: DeviceMesh) -> None:
    """Run one small collective on every group of :func:`groups_of`, for meshes on CUDA. Called by all ranks.

    NCCL makes a communicator and its buffers at the group's first collective. Without this call that happens in
    mid-step, at peak memory, and too late to register buffers with the communicator (``communication_buffers``).
    On the CPU this does nothing: gloo connects when groups are made.
    """
    if meshes[0].device_type == "cuda":
        first_collectives(groups_of(*meshes), torch.device("cuda", torch.cuda.current_device()))


connect_once = lru_cache(maxsize=64)(connect)


def first_collectives(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Sum one number over each of ``groups``. Called by all their ranks.

    NCCL's first ``batch_isend_irecv`` on a group needs all ranks, but a ring step may leave some out. Waiting for each
    sum makes a communicator that cannot be created fail here and not in a step.
    """
    for group in groups:
        count = torch.ones(1, device=device)
        dist.all_reduce(count, group=group)
        if count.item() != group.size():
            raise RuntimeError(f"{group.group_desc}: {count.item():g} of {group.size()} ranks answered")
