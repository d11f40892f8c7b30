"""One rank alone computes the same bits as FSDP2, without its copies."""

from functools import lru_cache

import pytest
import torch
from torch import nn

from fsdp_cp import build_mesh, microbatch, shard_module
from fsdp_cp.reduce import scale_grads
from fsdp_cp.sharding import shard
from fsdp_cp.sharding.state import fsdp_modules, param_groups, reshard
from tests.distributed.test_library import TOKENS, Transformer

SETTINGS = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "optim": {"strategy": "optim"},
    "scaled, checkpointed": {"gradient_scale": 4.0, "activation_checkpointing": True},
    "bf16 masters": {"precision": "bf16", "master_dtype": "bf16", "keep_gathered": True},
    "offloaded": {"offload": "cpu"},
}
COPIES = ("bf16", "offloaded")
"""Full parameters of another dtype, or that FSDP2 wants on another device, are memory of their own."""


@lru_cache
def _mesh():
    return build_mesh(dp_shard=1, cp=1)


def _model(network=Transformer, *, copies=False, **settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network()
    with pytest.MonkeyPatch.context() as patch:
        if copies:
            patch.setattr(shard, "compute_in_place", lambda root: None)
        shard_module(model, mesh=_mesh(), units=model.blocks, **settings)
    return model


def _parameters(model):
    return [
        parameter for unit in fsdp_modules(model) for group in param_groups(unit) for parameter in group.fsdp_params
    ]


def _trained(settings, *, copies):
    """Return losses, gradients and weights of two updates of two micro-batches, with a validation after each."""
    model = _model(copies=copies, **settings)
    dtype = torch.bfloat16 if settings.get("precision") == "bf16" else torch.float32
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(2):
        for i in range(2):
            x, y = (torch.randn(2, TOKENS, 5, generator=generator).to(dtype) for _ in range(2))
            with microbatch(model, is_first=i == 0, is_last=i == 1):
                loss = (model(x) - y).float().square().mean()
                loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            seen.append(model(x).clone())
        reshard(model)  # of "optim" it stays gathered
        seen += [p.to_local().detach().clone() for p in model.parameters()]
    return seen, [getattr(p, "_in_place", False) for p in _parameters(model)]


def _both(settings):
    ours, in_place = _trained(settings, copies=False)
    theirs, copied = _trained(settings, copies=True)
    assert not any(copied), "FSDP2 as it is"
    assert len(ours) == len(theirs) > 20
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), set(in_place)


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x != "fp32" else x for x in SETTINGS])
def test_the_same_bits_as_with_the_copies(pools, name):
    same, in_place = pools[1].run(_both, SETTINGS[name])[0]
    assert same
    assert in_place == {name not in COPIES}


class _Shared(nn.Module):
    """A block whose two parameters get views of one tensor as their gradients: autograd hands them out as they are."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 6))

    def forward(self, x):
        return x * (self.a.view(-1) + self.b.view(-1))


class _Sharing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([_Shared(), _Shared()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _shared_gradients():
    x = torch.randn(5, 12)
    torch.manual_seed(0)
    plain = _Sharing()
    plain(x).square().mean().backward()
    wanted = [p.grad.clone() for p in plain.parameters()]
    shared = len({p.grad.untyped_storage().data_ptr() for p in plain.parameters()})
    model = _model(_Sharing)
    with microbatch(model, is_first=True, is_last=True):
        model(x).square().mean().backward()
    scale_grads(list(model.parameters()), 0.5)
    return shared, [torch.equal(p.grad.to_local(), 0.5 * g) for p, g in zip(model.parameters(), wanted, strict=True)]


@pytest.mark.slow
def test_gradients_that_share_memory_are_scaled_once_each(pools):
    """FSDP2's copies ensure it; plain torch has two tensors for the four gradients, and would scale them twice."""
    ((shared, right),) = pools[1].run(_shared_gradients)
    assert shared == 2, "the case that this is about"
    assert right == [True] * 4
