"""The mesh on real process groups: which ranks each view holds."""

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch.distributed.tensor import Shard

from benchmarks.parity import ARCHITECTURE
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.mesh import build_mesh
from models.load import build_role, plan_role


def _views(sizes):
    mesh = build_mesh(**sizes)
    ranks = {
        name: sorted(dist.get_process_group_ranks(getattr(mesh, name).get_group()))
        for name in ("world", "dp", "cp", "ring", "ulysses")
    }
    fsdp = [sorted(dist.get_process_group_ranks(mesh.fsdp.get_group(axis))) for axis in range(mesh.fsdp.ndim)]
    return ranks, fsdp, (mesh.dp_rank, mesh.dp_size, mesh.cp_rank, mesh.cp_size)


def test_views_of_dp_shard_x_cp():
    for rank, (ranks, fsdp, sizes) in enumerate(run_ranks(6, _views, {"dp_shard": 2, "cp": 3, "heads": 6})):
        dp, cp = divmod(rank, 3)
        assert fsdp == [list(range(6))], "parameters are sharded over dp_shard x cp, on one axis"
        assert ranks["cp"] == ranks["ulysses"] == [3 * dp, 3 * dp + 1, 3 * dp + 2]
        assert ranks["dp"] == [cp, 3 + cp]
        assert ranks["ring"] == [rank]
        assert ranks["world"] == list(range(6))
        assert sizes == (dp, 2, cp, 3)


def test_views_with_replicas():
    sizes = {"dp_replicate": 2, "dp_shard": 1, "cp": 2, "heads": 4}
    for rank, (ranks, fsdp, (dp_rank, dp_size, *_)) in enumerate(run_ranks(4, _views, sizes)):
        replica, cp = divmod(rank, 2)
        assert fsdp == [[cp, 2 + cp], [2 * replica, 2 * replica + 1]], "replicate over the first axis, shard the second"
        assert ranks["dp"] == [cp, 2 + cp]
        assert (dp_rank, dp_size) == (replica, 2)


def _placements(sizes):
    mesh = build_mesh(**sizes, heads=4)
    plan = plan_role("student", checkpoint=None, architecture=dict(ARCHITECTURE))
    role = build_role(
        plan, mesh=mesh, device=torch.device("cpu"), precision="fp32", trainable=True,
        latent_shape=(4, 3, 8, 8), text_shape=(5, 10),
    )  # fmt: skip
    return {
        name: (p.placements, p.device_mesh.ndim, p.to_local().numel()) for name, p in role.network.named_parameters()
    }


@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "cp": 2}, {"dp_shard": 1, "cp": 4}, {"dp_shard": 4, "cp": 1}])
def test_every_parameter_is_sharded_over_all_ranks(sizes):
    ranks = run_ranks(4, _placements, sizes)
    for name, (placements, axes, _) in ranks[0].items():
        # A two-dimensional mesh here would mean replicas over dp_shard, by accident.
        assert axes == 1 and placements == (Shard(0),), name
    total = sum(numel for rank in ranks for _, _, numel in rank.values())
    assert total == sum(p.numel() for p in WanTransformer3DModel(**ARCHITECTURE).parameters())
