"""The oracle's full tensors equal those of torch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_cp import build_mesh, shard_module
from tests.oracles.full_tensors import full_tensors


def _both(sizes):
    names = []
    for settings in ({}, {"strategy": "no_shard"}, {"strategy": "optim"}):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(7, 5), nn.Linear(3, 1), nn.Conv2d(2, 6, 3))
            shard_module(model, mesh=build_mesh(**sizes), units=[model[0]], **settings)
        named = dict(model.state_dict()) | {"plain": torch.arange(3.0)}
        found = full_tensors(named)
        names.append(len(found))
        for name, x in named.items():
            assert torch.equal(found[name], x.full_tensor() if name != "plain" else x), (settings, name)
    dist.barrier()
    return names


@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard": 2}])
def test_whole_tensors_of_uneven_shards(pools, sizes):
    assert pools[4].run(_both, sizes) == [[7] * 3] * 4
