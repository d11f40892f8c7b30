"""What sharding holds on each rank: shards, gathered parameters, gradients, and nothing once it is let go of."""

import gc
import math
import tempfile
import weakref
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.sharding import measure_three
from fsdp_cp import build_mesh, microbatch, shard_module
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.measure.sharding_memory import ShardingMemory, shard_bytes, storage_bytes
from fsdp_cp.reduce import grad_norm
from fsdp_cp.sharding.state import fsdp_modules, reshard
from tests.oracles.tiny_wan import write_checkpoints

WORLD, BLOCKS, DIM = 4, 5, 46  # 46 is no multiple of 4: shards are padded
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Block(nn.Module):
    """Its parameters have 1 to 92 rows: at 4 ranks some shards are uneven and some empty."""

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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Network()


def _data():
    """The samples of every rank; each of them is a micro-batch."""
    return torch.randn(2 * WORLD, 2, 3, generator=torch.Generator().manual_seed(1))


@lru_cache
def _mesh(replicas):
    return build_mesh(dp_replicate=replicas, dp_shard=WORLD // replicas)


def _sharded(replicas=1, dtype=torch.float32, **settings):
    model = _network().to(dtype)
    shard_module(model, mesh=_mesh(replicas), units=list(model.blocks), **settings)
    return model


def _accumulate(model, between=lambda: None, dtype=torch.float32):
    """The gradients of a step: two micro-batches on this rank."""
    for i, x in enumerate(_data()[2 * dist.get_rank() :][:2].to(dtype)):
        with microbatch(model, is_first=i == 0, is_last=i == 1):
            (model(x).square().mean() / (2 * WORLD)).backward()
        if i == 0:
            between()


def _sizes(shards):
    """Bytes in fp32 of all parameters; and with dim 0 filled up to a multiple of ``shards``: of all, a block, the root.

    ``n`` rows over ``W`` ranks are ``ceil(n / W)`` on each.
    """
    model = _network()
    padded = lambda m: sum(math.ceil(p.shape[0] / shards) * shards * p[0].numel() * 4 for p in m.parameters())  # noqa: E731
    block, everything = padded(model.blocks[0]), padded(model)
    return sum(p.numel() * 4 for p in model.parameters()), everything, block, everything - BLOCKS * block


# --- what is held ---


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
            shard = shard_bytes(model)
            adamw.zero_grad()
    state = storage_bytes(x for s in adamw.state.values() for x in s.values() if isinstance(x, DTensor))
    *peak, buffers = (min(column) for column in zip(*peaks, strict=True))
    return shard, state, tuple(peak), buffers, kept, after


CASES = [(strategy, 1, {}) for strategy in STRATEGIES] + [
    ("optim_grads_params", 2, {}),
    ("optim_grads_params", 1, {"offload": "cpu"}),
    ("optim_grads_params", 1, {"activation_checkpointing": "full"}),
    ("optim_grads_params", 1, {"gradient_buffers": 1}),
    ("optim_grads_params", 1, {"gradient_buffers": 3}),
    ("optim_grads_params", 1, {"keep_gathered": True}),
    ("optim_grads_params", 1, {"gather_stream": "compute"}),
]


def _every_case():
    return [_held(replicas, {"strategy": strategy, **settings}) for strategy, replicas, settings in CASES]


@pytest.mark.slow
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
            assert (shard.full, shard.parameters, shard.gradients) == (full, padded // shards, padded // shards), case
            assert state == 2 * sum(mine), case
            stays = strategy in ("optim", "optim_grads") or settings.get("keep_gathered")
            gathered = padded if stays else block + root  # ready for use
            staged = 0 if shards == 1 else 2 * block  # on its way: FSDP2 lets go of a unit's buffer after the next's
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


def _deeper():
    peaks = []
    for forward in (1, 2, 3):
        model = _sharded(forward_prefetch=forward)
        with torch.no_grad():
            model(_data()[0])
            with ShardingMemory(model, patience=0.003) as memory:
                found = []
                for _ in range(3):
                    memory.reset_peak()
                    model(_data()[0])
                    memory.settle("staging")
                    found.append(memory.peak_parameters)
        peaks.append(min(found))
    return peaks


def test_deeper_prefetch_gathers_more(pools):
    _, _, block, root = _sizes(WORLD)
    for peaks in pools[WORLD].run(_deeper):
        assert peaks == [3 * block + root, 4 * block + root, 5 * block + root]


def _seen_by_all_storages():
    """The first forward of a network, by what operations allocate; the second, by what FSDP2 is seen to allocate."""
    model = _sharded()
    x = _data()[0]
    with torch.no_grad(), LiveStorages() as live:
        model(x)
    with torch.no_grad(), ShardingMemory(model) as memory:
        model(x)
    unrun = _sharded()
    with pytest.raises(RuntimeError, match="has not run yet"), ShardingMemory(unrun):
        pass
    return live.peak_bytes, memory.peak_parameters


def test_the_peak_is_that_of_all_storages(pools):
    for live, watched in pools[WORLD].run(_seen_by_all_storages):
        assert watched < live < 1.05 * watched  # activations, and the shards on their way into an all-gather


def _watched_and_not():
    gradients, waiting = [], []
    for watch in (False, True):
        model = _sharded(precision="bf16", strategy="optim", master_dtype="fp32")
        _accumulate(model, dtype=torch.bfloat16)
        model.zero_grad()
        if watch:
            with ShardingMemory(model) as memory:
                note = lambda memory=memory: waiting.append(memory.bytes["full_gradients"])  # noqa: E731
                _accumulate(model, note, torch.bfloat16)
        else:
            _accumulate(model, dtype=torch.bfloat16)
        gradients.append([p.grad.to_local().clone() for p in model.parameters()])
    return waiting, all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_watching_changes_nothing_and_sees_casts(pools):
    full, *_ = _sizes(WORLD)
    assert pools[WORLD].run(_watched_and_not) == [([full], True)] * WORLD  # bf16 gradients wait in fp32


def _three(folder):
    mixed = {"teacher": "optim_grads_params", "student": "optim_grads", "fake": "optim"}
    return [measure_three(s, folder) for s in (dict.fromkeys(mixed, "optim_grads_params"), mixed)]


@pytest.mark.slow
def test_idle_roles_hold_their_shards_alone(pools):
    with tempfile.TemporaryDirectory() as name:
        write_checkpoints(Path(name))
        found = pools[WORLD].run(_three, Path(name))
    for alike, mixed in found:
        assert set(alike.others.values()) == {0}
        for idle in (alike, mixed):
            assert idle.after == idle.fake_gradients == idle.student_gradients == idle.teacher_gradients == 0


# --- what is let go of ---


def _released(settings):
    model = _network()
    whole = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    assert _mesh(1).replicas.ndim == 2  # made now: meshes are kept, with the numbers of their ranks
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
    settings = [{"strategy": s} for s in STRATEGIES]
    settings += [{"forward_prefetch": 2, "backward_prefetch": 2}, {"activation_checkpointing": "selective"}]
    return [_released(s) for s in settings]


@pytest.mark.slow
def test_no_full_parameter_survives_sharding_and_deleting_a_model_frees_it(pools):
    _, padded, *_ = _sizes(WORLD)
    for found in pools[WORLD].run(_all_released):
        for left, alive, busy, after in found:
            assert left == 0 and alive == 0
            assert busy > 2 * padded // WORLD and after == 0, (busy, after)  # shards, Adam's state but for empty ones


# --- empty shards and aliases ---


def _oracle(steps):
    """AdamW in one process, fp64: gradient norms; weights, moments."""
    model = _network().double()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    norms = []
    for _ in range(steps):
        adamw.zero_grad()
        sum(model(x.double()).square().mean() / (2 * WORLD) for x in _data()).backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        adamw.step()
    state = {n: adamw.state[p] for n, p in model.named_parameters()}
    return norms, {n: (p.detach(), state[n]["exp_avg"], state[n]["exp_avg_sq"]) for n, p in model.named_parameters()}


IMPLEMENTATIONS = {"for_loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def _trained(kind, steps):
    model = _sharded(dtype=torch.float64, precision="fp64")
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **IMPLEMENTATIONS[kind])
    norms = []
    for _ in range(steps):
        _accumulate(model, dtype=torch.float64)
        norms.append(grad_norm(model.parameters()))
        adamw.step()
        adamw.zero_grad()
    shards = {}
    for name, p in model.named_parameters():
        tensors = (p, adamw.state[p]["exp_avg"], adamw.state[p]["exp_avg_sq"])
        shards[name] = [x.detach().to_local() for x in tensors]
    return norms, shards


def _each_kind(steps):
    return {kind: _trained(kind, steps) for kind in IMPLEMENTATIONS}


def test_adamw_with_uneven_and_empty_shards(pools):
    norms, truth = _oracle(3)
    empty = 0
    for rank, found in enumerate(pools[WORLD].run(_each_kind, 3)):
        for kind, (our_norms, shards) in found.items():
            torch.testing.assert_close(our_norms, norms, rtol=1e-12, atol=0)
            assert shards.keys() == truth.keys()
            for name, values in shards.items():
                for ours, whole in zip(values, truth[name], strict=True):
                    chunks = whole.chunk(WORLD)
                    mine = chunks[rank] if rank < len(chunks) else whole[:0]
                    empty += mine.numel() == 0
                    torch.testing.assert_close(ours, mine, rtol=1e-9, atol=1e-12, msg=f"{kind} {name} {rank}")
    # Of each block the table is empty on 3 ranks, the gate's weight and bias on 2; the head's on 1.
    assert empty == 3 * 3 * (BLOCKS * (3 + 2 + 2) + 1 + 1)


class Pooled:
    """A reduce-scatter that gives its buffers out again, as a pooling allocator does."""

    def __init__(self, outputs_too, ahead=3):
        self.outputs_too, self.ahead, self.buffers, self.calls = outputs_too, ahead, {}, 0

    def allocate(self, size, *, dtype, device):
        is_output, self.calls = self.calls % 2, self.calls + 1
        if is_output and not self.outputs_too:
            return torch.empty(*size, dtype=dtype, device=device)
        key = (is_output, tuple(size), dtype, self.calls // 2 % self.ahead)
        return self.buffers.setdefault(key, torch.empty(*size, dtype=dtype, device=device))

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
        return scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _pooled(outputs_too):
    plain, pooled = _sharded(), _sharded()
    comm = Pooled(outputs_too)
    for module in fsdp_modules(pooled):
        module.set_custom_reduce_scatter(comm)
    for model in (plain, pooled):
        _accumulate(model)
    pairs = [
        (a.grad.to_local(), b.grad.to_local()) for a, b in zip(plain.parameters(), pooled.parameters(), strict=True)
    ]
    return max((a - b).abs().max().item() for a, b in pairs if a.numel())


def test_a_pooling_communicator_may_pool_inputs_only(pools):
    assert pools[WORLD].run(_pooled, False) == [0.0] * WORLD
    assert min(pools[WORLD].run(_pooled, True)) > 1e-3, (
        "gradients are the outputs themselves: a pool would overwrite them"
    )
