"""Gradient norms and clipping, against torch in one process."""

import math

import pytest
import torch
from torch import nn

from fsdp_cp import build_mesh, shard_module
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.reduce import grad_norm, parameter_norms
from tests.oracles.seeded import seeded


def _model():
    return seeded(lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2), nn.Linear(2, 1)))


def _norms(world, replicas):
    mesh = build_mesh(dp_replicate=replicas)
    model = _model()
    shard_module(model, mesh=mesh, units=list(model))
    x = torch.arange(10.0).view(2, 5)
    # Every rank has the same batch and gradients are summed: the loss is scaled by the rank's share.
    (model(x).square().sum() / world).backward()
    norm = grad_norm(model.parameters())
    gradient = model[0].weight.grad.full_tensor()
    model[1].bias.grad = None  # as a parameter that no loss used
    with CollectiveCounter() as counter:
        unused = grad_norm(model.parameters())
    names = parameter_norms(dict(model.named_parameters()))
    if mesh.world.get_local_rank() == 0:
        model[0].weight.grad = None  # ranks that differ in `grad is None` must not wait for the others
        model[1].weight.grad.to_local()[:] = torch.inf
    bad = grad_norm(model.parameters())
    return norm, unused, gradient, sum(counter.calls.values()), names, bad


MESHES = [(1, 1), (3, 1), (4, 2)]


@pytest.mark.parametrize(("world", "replicas"), MESHES)
def test_norms(pools, world, replicas):
    model = _model()
    model(torch.arange(10.0).view(2, 5)).square().sum().backward()
    truth = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    without_bias = torch.nn.utils.get_total_norm([p.grad for n, p in model.named_parameters() if n != "1.bias"]).item()
    found = pools[world].run(_norms, world, replicas)
    for rank, (norm, unused, gradient, reductions, names, bad) in enumerate(found):
        assert norm == pytest.approx(truth, rel=1e-6)
        assert unused == pytest.approx(without_bias, rel=1e-6)
        torch.testing.assert_close(gradient, model[0].weight.grad, rtol=1e-5, atol=1e-6)
        assert reductions == (world > replicas), "one for all parameters, and none among one rank"
        for name, p in model.named_parameters():
            weight, grad = names[name]
            assert weight == pytest.approx(p.norm().item(), rel=1e-6), name
            assert grad is None if name == "1.bias" else grad == pytest.approx(p.grad.norm().item(), rel=1e-6), name
        # Replicas have separate gradients here; in training they are equal by then.
        assert math.isinf(bad) == (rank < world // replicas), "the same on all ranks that share the gradients"
