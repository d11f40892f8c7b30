"""Full tensors of sharded ones by a single exchange, where ``full_tensor`` needs a collective per tensor."""

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def full_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``x.full_tensor()``, or a copy of a plain tensor, by name. A collective of the default group.

    The offset of a shard comes from torch's ``compute_local_shape_and_global_offset`` (private, torch 2.13).
    """
    mine = {name: _shard(x) for name, x in named.items() if isinstance(x, DTensor)}
    shards: list[dict[str, tuple[tuple[int, ...], torch.Size, np.ndarray]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(shards, mine)
    full = {}
    for name, x in named.items():
        if name not in mine:
            full[name] = x.detach().clone()
            continue
        whole = full[name] = torch.full(x.shape, torch.nan, dtype=x.dtype)
        for begin, shape, shard in (each[name] for each in shards):
            values = torch.from_numpy(shard).view(x.dtype).view(shape)
            whole[tuple(slice(i, i + n) for i, n in zip(begin, shape, strict=True))] = values
    return full


def _shard(x: DTensor) -> tuple[tuple[int, ...], torch.Size, np.ndarray]:
    """Return the offset of this rank's shard, its shape, and its bytes, which pickle ten times faster than a tensor."""
    assert all(type(placement) in (Shard, Replicate) for placement in x.placements), x.placements
    local = x.to_local().detach()
    shape, begin = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    assert local.shape == shape or not local.numel(), (local.shape, shape)
    return tuple(begin), local.shape, local.flatten().view(torch.uint8).numpy()
