"""Freezing and unfreezing a network restores exactly its trainable parameters, and FSDP2's cached dtypes with them."""

from functools import lru_cache
from typing import get_args

import pytest
import torch
from torch import nn

from fsdp_cp import build_mesh, frozen, microbatch, shard_module
from fsdp_cp.sharding.settings import Strategy
from fsdp_cp.sharding.state import gathered_units, param_groups
from tests.oracles.small_transformer import DIM, TOKENS, Transformer
from tests.tiers import long_case, slow_case

RANKS = 3


@lru_cache
def _mesh():
    return build_mesh()


class AdaptedBlock(nn.Module):
    """A block with a trainable layer in parallel."""

    def __init__(self, block):
        super().__init__()
        self.block, self.adapter = block, nn.Linear(DIM, DIM)

    def forward(self, hidden_states):
        return self.block(hidden_states) + self.adapter(hidden_states)


def _adapted(strategy, precision):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer().requires_grad_(False)
        model.blocks = nn.ModuleList(AdaptedBlock(block) for block in model.blocks)
    shard_module(model, mesh=_mesh(), units=model.blocks, strategy=strategy, precision=precision)
    return model


def _trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def _gradients(model, precision):
    """Return the gradients of two micro-batches of this rank's own samples."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(2, TOKENS, 5, generator=generator).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    for i, part in enumerate(x.split(1)):
        with microbatch(model, is_first=i == 0, is_last=i == 1):
            model(part).float().square().mean().backward()
    gradients = {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def _same(model, fresh, precision):
    ours, theirs = _gradients(model, precision), _gradients(fresh, precision)
    assert ours.keys() == theirs.keys() == _trained(fresh)
    for name, gradient in theirs.items():
        assert ours[name].dtype == gradient.dtype == torch.float32
        assert torch.equal(ours[name], gradient), name
    dtypes = [
        [(g._reduce_dtype, g._orig_dtype) for m in network.blocks for g in param_groups(m)]
        for network in (model, fresh)
    ]
    assert dtypes[0] == dtypes[1]


def _given_back(strategy, precision):
    """Freeze and unfreeze repeatedly, nested, and across exceptions. Compare with a network that was never frozen."""
    model, fresh = _adapted(strategy, precision), _adapted(strategy, precision)
    adapters = _trained(fresh)
    assert (len(adapters), len(list(model.parameters()))) == (6, 46)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.randn(1, TOKENS, 5, dtype=dtype, requires_grad=True)
    with frozen(model):
        assert not _trained(model)
        model(x).float().square().mean().backward()  # the first forward of all, while frozen
    assert x.grad is not None and all(p.grad is None for p in model.parameters())
    assert _trained(model) == adapters
    _same(model, fresh, precision)

    first = sorted(adapters)[0]
    with frozen(model, {first}):
        assert _trained(model) == adapters - {first}
        with frozen(model):
            assert not _trained(model)
            model(x.detach())
        assert _trained(model) == adapters - {first}, "the inner one must not end the outer one"
    assert _trained(model) == adapters
    _same(model, fresh, precision)

    def refuse(*_):
        raise ZeroDivisionError

    mlp = model.blocks[1].block.mlp
    for register in (mlp.register_forward_hook, mlp.register_full_backward_hook):
        handle = register(refuse)
        with pytest.raises(ZeroDivisionError), frozen(model), frozen(model):
            model(x).float().sum().backward()
        handle.remove()
        assert _trained(model) == adapters and not gathered_units(model)
    _same(model, fresh, precision)
    return True


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("optim", "bf16"),
        *(long_case(s, "bf16") for s in get_args(Strategy) if s != "optim"),
        slow_case("optim_grads_params", "fp32"),
    ],
)
def test_what_was_frozen_before_stays_frozen(pools, strategy, precision):
    assert all(pools[RANKS].run(_given_back, strategy, precision))
