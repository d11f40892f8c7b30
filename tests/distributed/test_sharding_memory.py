"""Memory of sharding on each rank: shards, gathered parameters, gradients, and nothing once a model is deleted."""

import gc
import math
import weakref
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_cp import build_mesh, microbatch, shard_module
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.sharding.state import reshard
from tests.oracles.seeded import seeded
from tests.oracles.sharding_memory import ShardingMemory, storage_bytes
from tests.tiers import long, slow

WORLD, BLOCKS, DIM = 4, 5, 46  # 46 is not a multiple of 4, so shards are padded
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Block(nn.Module):
    """Block with parameters of 1 to 92 rows: at 4 ranks some shards are uneven and some empty."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.table = nn.Parameter(torch.randn(1, 3, DIM))
        self.gate = nn.Linear(DIM, 2)

    def forward(self, x):
        scale, shift, _ = self.table.unbind(1)
        h = self.down(torch.nn.functional.gelu(self.up(x * (1 + scale) + shift)))
        return x + h * self.gate(x).sigmoid().sum(-1, keepdim=True)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, DIM), nn.Linear(DIM, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _network():
    return seeded(Network)


def _data():
    """Return the samples of all ranks; each sample is a micro-batch."""
    return torch.randn(2 * WORLD, 2, 3, generator=torch.Generator().manual_seed(1))


@lru_cache
def _mesh(replicas):
    return build_mesh(dp_replicate=replicas, dp_shard=WORLD // replicas)


def _sharded(replicas=1, **settings):
    model = _network()
    shard_module(model, mesh=_mesh(replicas), units=list(model.blocks), **settings)
    return model


def _accumulate(model, between=lambda: None):
    """Compute a step's gradients from two micro-batches on this rank."""
    for i, x in enumerate(_data()[2 * dist.get_rank() :][:2]):
        with microbatch(model, is_first=i == 0, is_last=i == 1):
            (model(x).square().mean() / (2 * WORLD)).backward()
        if i == 0:
            between()


def _sizes(shards):
    """Return bytes in fp32 of all parameters; and, padded to ``shards`` equal shards, of all, a block and the root.

    ``n`` rows over ``W`` ranks are ``ceil(n / W)`` on each.
    """
    model = _network()
    padded = lambda m: sum(math.ceil(p.shape[0] / shards) * shards * p[0].numel() * 4 for p in m.parameters())  # noqa: E731
    block, everything = padded(model.blocks[0]), padded(model)
    return sum(p.numel() * 4 for p in model.parameters()), everything, block, everything - BLOCKS * block


def _held(replicas, settings):
    model = _sharded(replicas, **settings)
    adamw = torch.optim.AdamW(model.parameters(), foreach=True)
    _accumulate(model)
    adamw.step()
    adamw.zero_grad()
    kept = {}
    peaks = []
    with ShardingMemory(model, patience=0.003) as memory:
        for _ in range(3):  # the least of all: gloo's threads may hold a buffer longer still
            memory.settle("staging", "reduce_inputs")
            memory.reset_peak()
            _accumulate(model, between=lambda: kept.update(memory.bytes))
            memory.settle("staging", "reduce_inputs")
            after = dict(memory.bytes)
            peaks.append((memory.peak["gathered"], memory.peak_parameters, memory.peak_reduce_inputs))
            shard = storage_bytes(model.parameters()), storage_bytes(p.grad for p in model.parameters())
            adamw.zero_grad()
    state = storage_bytes(x for s in adamw.state.values() for x in s.values() if isinstance(x, DTensor))
    *peak, buffers = (min(column) for column in zip(*peaks, strict=True))
    return shard, state, tuple(peak), buffers, kept, after


CASES = [(strategy, 1, {}) for strategy in STRATEGIES] + [
    ("optim_grads_params", 2, {}),
    ("optim_grads_params", 1, {"offload": "cpu"}),
    ("optim_grads_params", 1, {"activation_checkpointing": "full"}),
    ("optim_grads_params", 1, {"gradient_buffers": 3}),
    ("optim_grads_params", 1, {"keep_gathered": True}),
    ("optim_grads_params", 1, {"gather_stream": "compute"}),
    ("optim_grads_params", 1, {"forward_prefetch": 2}),
]


def _every_case():
    return [_held(replicas, {"strategy": strategy, **settings}) for strategy, replicas, settings in CASES]


@long
def test_each_strategy_holds_its_share(pools):
    ranks = pools[WORLD].run(_every_case)
    for rank, found in enumerate(ranks):
        for (strategy, replicas, settings), held in zip(CASES, found, strict=True):
            shard, state, peak, buffers, kept, after = held
            shards = 1 if strategy == "no_shard" else WORLD // replicas
            full, padded, block, root = _sizes(shards)
            mine = [  # rows of each parameter that are this rank's, as torch.chunk gives them
                len(chunk) * p[0].numel() * 4
                for p in _network().parameters()
                for chunk in [dict(enumerate(p.chunk(shards))).get(rank % shards, p[:0])]
            ]
            case = (strategy, replicas, settings, rank)
            assert shard == (padded // shards, padded // shards), case
            assert state == 2 * sum(mine), case
            stays = strategy in ("optim", "optim_grads") or settings.get("keep_gathered")
            gathered = padded if stays else block + root  # ready for use
            staged = 0 if shards == 1 else 2 * block  # in flight: FSDP2 frees a unit's buffer after the next one's
            if "forward_prefetch" in settings:
                staged = 3 * block
            if settings.get("gather_stream") == "compute":
                staged = block
            assert peak == (gathered, gathered + staged), (case, peak)
            limit = settings.get("gradient_buffers", 2)
            assert buffers == limit, case
            if strategy in ("no_shard", "optim"):
                assert kept["full_gradients"] == full and not kept["shard_gradients"], (case, kept)
            else:
                assert kept["shard_gradients"] == padded // shards and not kept["full_gradients"], (case, kept)
            assert kept["gathered"] == (padded if stays and shards > 1 else 0), (case, kept)
            gone = dict.fromkeys(("gathered", "staging", "full_gradients", "reduce_inputs"), 0)
            assert after == gone | {"shard_gradients": padded // shards}, (case, after)


def _released(settings):
    model = _network()
    whole = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    assert _mesh(1).within(1).ndim == 2  # made now: meshes are kept, with the numbers of their ranks
    with LiveStorages() as live:
        shard_module(model, mesh=_mesh(1), units=list(model.blocks), **settings)
        gc.collect()
        left = sum(ref() is not None for ref in whole)
        adamw = torch.optim.AdamW(model.parameters(), foreach=True)
        _accumulate(model)
        adamw.step()
        reshard(model)
        adamw.zero_grad()
        shards = [weakref.ref(p.to_local().untyped_storage()) for p in model.parameters()]
        busy = live.bytes
        del model, adamw
        gc.collect()
    alive = sum(ref() is not None for ref in shards)
    return left, alive, busy, live.bytes


def _all_released():
    prefetch = {"forward_prefetch": 2, "backward_prefetch": 2}
    return [_released(s) for s in (prefetch, {"strategy": "optim", "activation_checkpointing": "selective"})]


@slow
def test_no_full_parameter_survives_sharding_and_deleting_a_model_frees_it(pools):
    _, padded, *_ = _sizes(WORLD)
    for found in pools[WORLD].run(_all_released):
        for left, alive, busy, after in found:
            assert left == 0 and alive == 0
            assert busy > 2 * padded // WORLD and after == 0, (busy, after)  # shards, and Adam's state of nonempty ones
