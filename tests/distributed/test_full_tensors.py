"""The oracles' way to whole tensors is torch's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_cp import build_mesh, shard_module
from tests.oracles.full_tensors import full_tensors


def _both(sizes, settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(3, 1), nn.Conv2d(2, 6, 3))
        shard_module(model, mesh=build_mesh(**sizes), units=[model[0]], **settings)
    named = {name: p for name, p in model.state_dict().items()} | {"plain": torch.arange(3.0)}
    found = full_tensors(named)
    truth = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in named.items()}
    dist.barrier()
    return all(torch.equal(found[name], truth[name]) for name in truth), len(found), type(named["1.bias"]).__name__


@pytest.mark.parametrize("sizes", [{"dp_shard": 4}, {"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard": 2}])
@pytest.mark.parametrize("settings", [{}, {"strategy": "no_shard"}, {"strategy": "optim"}])
def test_whole_tensors_of_uneven_shards(pools, sizes, settings):
    assert set(pools[4].run(_both, sizes, settings)) == {(True, 7, "DTensor")}
