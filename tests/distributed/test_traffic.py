"""The counter of collectives: each kind counted once, with the bytes of its formula, wherever it is called from."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_cp import build_mesh
from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.reduce import all_gather_single

WORLD = 3
N = 5 * WORLD  # elements of 4 bytes


def _every_kind():
    x, out = torch.randn(N), torch.empty(N * WORLD)
    rank, found = dist.get_rank(), {}
    pieces = list(torch.empty(WORLD, N))
    scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    calls = {
        "all_gather": lambda: all_gather_single(out, x, dist.group.WORLD),
        "all_gather, list": lambda: dist.all_gather(pieces, x),
        "reduce_scatter": lambda: scatter(x[: N // WORLD].clone(), x),
        "all_reduce": lambda: dist.all_reduce(x.clone()),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(x), x),
        "broadcast": lambda: dist.broadcast(x.clone(), src=1),
        "reduce": lambda: dist.reduce(x.clone(), dst=1),
        "gather": lambda: dist.gather(x, pieces if rank == 0 else None, dst=0),
        "scatter": lambda: dist.scatter(x.clone(), list(torch.empty(WORLD, N)) if rank == 0 else None, src=0),
        "send": lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, (rank + 1) % WORLD),
                    dist.P2POp(dist.irecv, torch.empty_like(x), (rank - 1) % WORLD),
                ]
            )
        ],
        "barrier": dist.barrier,
        "all_reduce, functional": lambda: funcol.all_reduce(x, "sum", dist.group.WORLD).clone(),
        "all_gather, half precision": lambda: all_gather_single(out.bfloat16(), x.bfloat16(), dist.group.WORLD),
    }
    for name, call in calls.items():
        with CollectiveCounter() as counter:
            call()
        found[name] = dict(counter.calls), {kind: size for kind, size in counter.bytes.items() if size}
    return found


def test_every_kind(pools):
    size, around = 4 * N, 4 * N * (WORLD - 1) // WORLD
    expected = {
        "all_gather": ({"all_gather": 1}, {"all_gather": size * (WORLD - 1)}),
        "all_gather, list": ({"all_gather": 1}, {"all_gather": size * (WORLD - 1)}),
        "reduce_scatter": ({"reduce_scatter": 1}, {"reduce_scatter": around}),
        "all_reduce": ({"all_reduce": 1}, {"all_reduce": 2 * around}),
        "all_to_all": ({"all_to_all": 1}, {"all_to_all": around}),
        "broadcast": ({"broadcast": 1}, {"broadcast": around}),
        "reduce": ({"reduce": 1}, {"reduce": around}),
        "gather": ({"gather": 1}, {"gather": around}),
        "scatter": ({"scatter": 1}, {"scatter": around}),
        "send": ({"send": 1, "recv": 1}, {"send": size}),
        "barrier": ({"barrier": 1}, {}),
        "all_reduce, functional": ({"all_reduce": 1}, {"all_reduce": 2 * around}),
        "all_gather, half precision": ({"all_gather": 1}, {"all_gather": size // 2 * (WORLD - 1)}),
    }
    for found in pools[WORLD].run(_every_kind):
        assert found == expected


def _inside():
    """Collectives of DTensors, of a custom operator, of backward."""
    mesh = init_device_mesh("cpu", (WORLD,))
    x = distribute_tensor(torch.randn(N, 2), mesh, [Shard(0)])
    with CollectiveCounter() as gathered:
        x.full_tensor()
    with CollectiveCounter() as moved:
        x.redistribute(placements=[Replicate()])
    q, k, v = (torch.randn(1, 4, WORLD, 8, requires_grad=True) for _ in range(3))
    cp = build_mesh(cp=WORLD, ulysses=WORLD, heads=WORLD)
    with CollectiveCounter() as forward:
        out = context_parallel_attention(q, k, v, mesh=cp)
    with CollectiveCounter() as backward:
        out.square().sum().backward()
    with CollectiveCounter() as twice:
        with CollectiveCounter() as inner:
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    return [dict(c.calls) for c in (gathered, moved, forward, backward, inner, twice)], forward.total_bytes


def test_collectives_of_dtensors_custom_operators_and_backward(pools):
    for calls, sent in pools[WORLD].run(_inside):
        one, two = {"all_gather": 1}, {"all_to_all": 2}
        assert calls == [one, one, two, two, {"all_reduce": 1}, {"all_reduce": 2}]
        assert sent == 4 * (4 * WORLD * 8) * 4 * (WORLD - 1) // WORLD  # q, k, v and the output
