"""The counter of collectives: each kind counted once, with the bytes of its formula, wherever it is called from."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_cp import build_mesh
from fsdp_cp.attention import context_parallel_attention, cross_attention, cross_way
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.reduce import all_gather_single

WORLD = 3
N = 5 * WORLD  # elements of 4 bytes


def _every_kind():
    """Count the calls and bytes of each kind of collective: ``[(name, counted, expected)]``."""
    x, out = torch.randn(N), torch.empty(N * WORLD)
    rank, size, around = dist.get_rank(), 4 * N, 4 * N * (WORLD - 1) // WORLD
    pieces = list(torch.empty(WORLD, N))
    scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

    def pass_on():
        there = dist.P2POp(dist.isend, x, (rank + 1) % WORLD)
        here = dist.P2POp(dist.irecv, torch.empty_like(x), (rank - 1) % WORLD)
        for work in dist.batch_isend_irecv([there, here]):
            work.wait()

    calls = [
        ("all_gather", size * (WORLD - 1), lambda: all_gather_single(out, x, dist.group.WORLD)),
        ("all_gather", size * (WORLD - 1), lambda: dist.all_gather(pieces, x)),
        ("all_gather", size // 2 * (WORLD - 1),
         lambda: all_gather_single(out.bfloat16(), x.bfloat16(), dist.group.WORLD)),
        ("reduce_scatter", around, lambda: scatter(x[: N // WORLD].clone(), x)),
        ("all_reduce", 2 * around, lambda: dist.all_reduce(x.clone())),
        ("all_reduce", 2 * around, lambda: funcol.all_reduce(x, "sum", dist.group.WORLD).clone()),
        ("all_to_all", around, lambda: dist.all_to_all_single(torch.empty_like(x), x)),
        ("broadcast", around, lambda: dist.broadcast(x.clone(), src=1)),
        ("reduce", around, lambda: dist.reduce(x.clone(), dst=1)),
        ("gather", around, lambda: dist.gather(x, pieces if rank == 0 else None, dst=0)),
        ("scatter", around, lambda: dist.scatter(x.clone(), list(torch.empty(WORLD, N)) if rank == 0 else None, src=0)),
        ("send", size, pass_on),
        ("barrier", 0, dist.barrier),
    ]  # fmt: skip
    found = []
    for name, expected, call in calls:
        with CollectiveCounter() as counter:
            call()
        kinds = {name: 1} | ({"recv": 1} if name == "send" else {})
        sizes = {kind: size for kind, size in counter.bytes.items() if size}
        found.append((name, (dict(counter.calls), sizes), (kinds, {name: expected} if expected else {})))
    return found


def test_every_kind(pools):
    for found in pools[WORLD].run(_every_kind):
        for name, counted, expected in found:
            assert counted == expected, name


def _inside():
    """Count collectives of DTensors, of a custom operator and of backward."""
    mesh = init_device_mesh("cpu", (WORLD,))
    x = distribute_tensor(torch.randn(N, 2), mesh, [Shard(0)])
    with CollectiveCounter() as gathered:
        x.full_tensor()
    with CollectiveCounter() as moved:
        x.redistribute(placements=[Replicate()])
    q, k, v = (torch.randn(1, 4, WORLD, 8, requires_grad=True) for _ in range(3))
    cp = build_mesh(cp=WORLD, ulysses=WORLD, heads=WORLD)
    with CollectiveCounter() as forward:
        out = context_parallel_attention(q, k, v, mesh=cp, total_tokens=4 * WORLD)
    with CollectiveCounter() as backward:
        out.square().sum().backward()
    with CollectiveCounter() as twice:
        with CollectiveCounter() as inner:
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    lone = [dist.new_group([rank]) for rank in range(WORLD)][dist.get_rank()]
    with CollectiveCounter() as alone:
        dist.all_reduce(torch.ones(3), group=lone)
    assert sum(alone.alone.values()) == 1
    return [dict(c.calls) for c in (gathered, moved, forward, backward, inner, twice)], sum(forward.bytes.values())


def test_collectives_of_dtensors_custom_operators_and_backward(pools):
    for calls, sent in pools[WORLD].run(_inside):
        one, two = {"all_gather": 1}, {"all_to_all": 2}
        assert calls == [one, one, two, two, {"all_reduce": 1}, {"all_reduce": 2}]
        assert sent == 4 * (4 * WORLD * 8) * 4 * (WORLD - 1) // WORLD  # q, k, v and the output


def _between(queries, keys, ulysses):
    """Return the way of an attention between two split sequences in bf16, its bytes sent and those of the formula."""
    cp, heads, size = build_mesh(cp=WORLD, ulysses=ulysses, heads=WORLD), WORLD, 8
    q, k, v = (torch.randn(1, n // WORLD, heads, size).bfloat16().requires_grad_() for n in (queries, keys, keys))
    with CollectiveCounter() as counter:
        out = cross_attention(q, k, v, mesh=cp, total_tokens=queries, total_keys=keys)
        out.float().square().sum().backward()
    way = cross_way(queries * heads, keys * heads, cp.context, head_dim=size)
    n_q, n_k = 2 * queries * heads * size / WORLD, 2 * keys * heads * size / WORLD
    rows = 4 * queries * heads / WORLD  # a log-sum-exp, fp32
    ring = WORLD // ulysses
    cost = {
        "keys": 4 * (WORLD - 1) * n_k,
        "queries": (WORLD - 1) * (7 * n_q + 2 * rows),
        "both": 4 * (ulysses - 1) / ulysses * (n_q + n_k) + 8 * (ring - 1) * n_k,
    }
    return way, sum(counter.bytes.values()), round(cost[way])


def test_attention_between_two_sequences_sends_what_its_rule_counts(pools):
    for queries, keys, ulysses, way in ((90, 6, 1, "keys"), (6, 90, 1, "queries"), (30, 60, WORLD, "both")):
        for found in pools[WORLD].run(_between, queries, keys, ulysses):
            assert found[0] == way and found[1] == found[2], found
