"""The mesh on real process groups: which ranks each view holds."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group

from fsdp_cp.mesh import build_mesh, context_groups


def _views(sizes):
    mesh = build_mesh(**sizes)
    ranks = {
        name: sorted(dist.get_process_group_ranks(getattr(mesh, name).get_group()))
        for name in ("world", "dp", "cp", "ring", "ulysses")
    }
    fsdp = [sorted(dist.get_process_group_ranks(mesh.fsdp.get_group(axis))) for axis in range(mesh.fsdp.ndim)]
    return ranks, fsdp, (mesh.dp_rank, mesh.dp_size, mesh.cp_rank, mesh.cp_size)


def test_views_of_dp_shard_x_cp(pools):
    for rank, (ranks, fsdp, sizes) in enumerate(pools[6].run(_views, {"dp_shard": 2, "cp": 3, "heads": 6})):
        dp, cp = divmod(rank, 3)
        assert fsdp == [list(range(6))], "parameters are sharded over dp_shard x cp, on one axis"
        assert ranks["cp"] == ranks["ulysses"] == [3 * dp, 3 * dp + 1, 3 * dp + 2]
        assert ranks["dp"] == [cp, 3 + cp]
        assert ranks["ring"] == [rank]
        assert ranks["world"] == list(range(6))
        assert sizes == (dp, 2, cp, 3)


def test_views_of_ring_x_ulysses(pools):
    sizes = {"dp_shard": 1, "cp": 6, "ring": 3, "ulysses": 2, "heads": 4}
    for rank, (ranks, fsdp, (*_, cp_rank, cp_size)) in enumerate(pools[6].run(_views, sizes)):
        ring, ulysses = divmod(rank, 2)
        assert fsdp == [list(range(6))] and ranks["cp"] == list(range(6))
        assert ranks["ring"] == [ulysses, 2 + ulysses, 4 + ulysses]
        assert ranks["ulysses"] == [2 * ring, 2 * ring + 1], "neighbours"
        assert (cp_rank, cp_size) == (rank, 6)


def test_views_with_replicas(pools):
    sizes = {"dp_replicate": 2, "dp_shard": 1, "cp": 2, "heads": 4}
    for rank, (ranks, fsdp, (dp_rank, dp_size, *_)) in enumerate(pools[4].run(_views, sizes)):
        replica, cp = divmod(rank, 2)
        assert fsdp == [[cp, 2 + cp], [2 * replica, 2 * replica + 1]], "replicate over the first axis, shard the second"
        assert ranks["dp"] == [cp, 2 + cp]
        assert (dp_rank, dp_size) == (replica, 2)


def _groups(sizes):
    mesh = build_mesh(**sizes)
    c = mesh.context
    plain = mesh.device_mesh["ring", "ulysses"]
    of_plain, of_ring, of_ulysses = (context_groups(x) for x in (plain, plain["ring"], plain["ulysses"]))
    for other in (c, of_plain):  # the names are those of the right ranks
        for name, rank, size, axis in (
            (other.ring_group, other.ring_rank, other.ring_size, mesh.ring),
            (other.ulysses_group, other.ulysses_rank, other.ulysses_size, mesh.ulysses),
        ):
            group = _resolve_process_group(name)
            assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(axis.get_group())
            assert (dist.get_rank(group), dist.get_world_size(group)) == (rank, size)
        assert (other.cp_rank, other.cp_size) == (mesh.cp.get_local_rank(), mesh.cp.size())
    assert context_groups(mesh) is c and (mesh.cp_rank, mesh.cp_size) == (c.cp_rank, c.cp_size)
    assert (of_ring.ring_group, of_ring.ring_rank, of_ring.ulysses_size) == (of_plain.ring_group, c.ring_rank, 1)
    assert (of_ulysses.ulysses_group, of_ulysses.ulysses_rank) == (of_plain.ulysses_group, c.ulysses_rank)
    assert of_ulysses.ring_size == 1
    root = mesh.device_mesh
    for other in (
        root,
        root["dp_shard", "ring"],
        mesh.cp,
        init_device_mesh("cpu", (2, 3)),
        init_device_mesh("cpu", (2, 3), mesh_dim_names=("ulysses", "ring")),
    ):
        with pytest.raises(ValueError, match="axes"):
            context_groups(other)
    return c.ring_rank, c.ulysses_rank


@pytest.mark.parametrize(("sizes", "ulysses"), [({"cp": 6, "heads": 4}, 2), ({"dp_shard": 2, "cp": 3, "heads": 2}, 1)])
def test_context_groups(pools, sizes, ulysses):
    for rank, (ring_rank, ulysses_rank) in enumerate(pools[6].run(_groups, sizes)):
        assert ring_rank * ulysses + ulysses_rank == rank % sizes["cp"], "Ulysses is innermost"
