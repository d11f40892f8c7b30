"""Gradient norms, clipping and gathering, against torch in one process."""

import math

import pytest
import torch
from torch import nn

from fsdp_cp import build_mesh, shard_module
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.measure.diagnostics import parameter_norms
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.reduce import all_reduce_scalars, gather_samples, grad_norm, scale_grads


def _model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2), nn.Linear(2, 1))


def _norm_and_clip(world, replicas):
    mesh = build_mesh(dp_replicate=replicas)
    model = _model()
    shard_module(model, mesh=mesh, units=list(model))
    x = torch.arange(10.0).view(2, 5)
    # Every rank has the same batch and gradients are summed: the loss is scaled by the rank's share.
    (model(x).square().sum() / world).backward()
    norm = grad_norm(model.parameters())
    scale_grads(model.parameters(), 0.25)
    halved = grad_norm(model.parameters())
    gradient = model[0].weight.grad.full_tensor()
    model[1].bias.grad = None  # as a parameter that no loss used
    unused = grad_norm(model.parameters())
    if mesh.world.get_local_rank() == 0:
        model[0].weight.grad = None  # ranks that differ in `grad is None` must not wait for each other
    grad_norm(model.parameters())
    return norm, halved, unused, gradient


@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (3, 1), (4, 1), (4, 2)])
def test_norm_and_clip(world, replicas):
    model = _model()
    model(torch.arange(10.0).view(2, 5)).square().sum().backward()
    truth = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    without_bias = torch.nn.utils.get_total_norm([p.grad for n, p in model.named_parameters() if n != "1.bias"]).item()
    for norm, scaled, unused, gradient in run_ranks(world, _norm_and_clip, world, replicas):
        assert norm == pytest.approx(truth, rel=1e-6)
        assert scaled == pytest.approx(truth / 4, rel=1e-6)
        assert unused == pytest.approx(without_bias / 4, rel=1e-6)
        torch.testing.assert_close(gradient, model[0].weight.grad / 4, rtol=1e-5, atol=1e-6)


def _in_turn(replicas):
    """Norms by lists against one call for each shard, added up in their order: equal to the last digit."""
    mesh = build_mesh(dp_replicate=replicas)
    model = _model()  # of 3, 2 and 1 rows some ranks have none
    shard_module(model, mesh=mesh, units=list(model))
    model(torch.arange(10.0).view(2, 5)).square().sum().backward()
    model[1].bias.grad = None
    named = dict(model.named_parameters())

    def alone(x):
        return torch.linalg.vector_norm(x.detach().to_local(), dtype=torch.float64).square()

    zero = torch.zeros((), dtype=torch.float64)
    weights, gradients = (
        torch.stack([zero if x is None else alone(x) for x in tensors])
        for tensors in (named.values(), [p.grad for p in named.values()])
    )
    total = zero.clone()
    for square in gradients:
        total += square
    # In the same layout: gloo's order of adding depends on where in a buffer a number lies.
    sums, group = torch.stack([weights, gradients, zero.expand(6)], dim=1), mesh.fsdp.get_group(mesh.fsdp.ndim - 1)
    torch.distributed.all_reduce(total, group=group)
    torch.distributed.all_reduce(sums, group=group)
    norms = parameter_norms(named)
    for i, name in enumerate(named):
        weight, gradient, _ = sums[i].tolist()
        assert norms[name] == (weight**0.5, None if name == "1.bias" else gradient**0.5), name
    with CollectiveCounter() as counter:
        grad_norm(named.values())
    bad = named["0.weight"].grad.to_local()
    norm = grad_norm(named.values())
    if torch.distributed.get_rank() == 0:
        bad[0, 0] = torch.inf
    return norm, total.sqrt().item(), sum(counter.calls.values()), grad_norm(named.values())


@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (3, 1), (4, 1), (4, 2)])
def test_norms_by_lists_equal_those_of_each_shard(pools, world, replicas):
    for rank, (norm, in_turn, reductions, bad) in enumerate(pools[world].run(_in_turn, replicas)):
        assert norm == in_turn > 0, "to the last digit"
        assert reductions == (world > replicas), "one for all parameters, and none among one rank"
        # Another replica's gradients are its own: in training they are equal by then.
        assert math.isinf(bad) == (rank < world // replicas), "the same on all ranks that share the gradients"


def _gather():
    mesh = build_mesh(dp_shard=2, cp=2)
    mine = torch.full((2, 3), float(mesh.dp_rank))
    return gather_samples(mine, mesh.dp)[:, 0].tolist(), all_reduce_scalars([1.0, mesh.dp_rank], mesh.dp)


def test_samples_and_scalars_go_over_data_parallel_ranks_only():
    assert run_ranks(4, _gather) == [([0.0, 0.0, 1.0, 1.0], [2.0, 1.0])] * 4
