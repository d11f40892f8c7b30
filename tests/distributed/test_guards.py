"""Uses that a sharded network refuses in one line, and similar uses that stay exact."""

import copy
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from torch import nn

from fsdp_cp import build_mesh, microbatch, shard_module
from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.context_parallel import SplitTokens, parallelize_context
from fsdp_cp.errors import UserError
from fsdp_cp.sequence import gather_tokens, split_tokens
from tests.oracles.seeded import seeded
from tests.oracles.small_transformer import HEADS, PLAN, TOKENS, Transformer
from tests.tiers import long_case
from tests.unit.refused import refusal, refused


@lru_cache
def _mesh(dp_replicate=1, cp=1):
    return build_mesh(dp_replicate=dp_replicate, cp=cp, heads=HEADS)


def _transformer(mesh, dtype=torch.float32, **settings):
    model = seeded(Transformer).to(dtype)
    for block in model.blocks:
        block.mesh = mesh
    parallelize_context(model, mesh=mesh, plan=copy.deepcopy(PLAN))
    shard_module(model, mesh=mesh, units=model.blocks, **settings)
    return model


# ---- gradient penalties


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


@dataclass
class Judgement:
    score: torch.Tensor


class Judge(nn.Module):
    """Discriminator of plain layers, which autograd can differentiate twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return Judgement(self.head(torch.tanh(x)).clone())


def _judge_and_data():
    return seeded(lambda: (Judge().double(), torch.randn(12, 5, 4, dtype=torch.float64)))


def _penalised(model, x, with_loss, around):
    x = x.clone().requires_grad_()
    score = model(x).score
    with around():
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    penalty = gradient.square().sum()
    return penalty + score.square().sum() if with_loss else penalty


def _own(x):
    own = len(x) // torch.distributed.get_world_size()
    return x[torch.distributed.get_rank() * own :][:own]


def _penalties(settings, replicas):
    """Check that penalties are refused where weights are freed, and exact in a micro-batch that is not the last.

    The next step must equal that of a new network.
    """
    keeps = settings.get("strategy") in ("optim", "optim_grads") or settings.get("keep_gathered", False)
    model, x = _judge_and_data()
    if replicas > 1:
        settings = settings | {"reduce_unused": True}  # the penalty alone gives the last bias no gradient
    shard_module(model, mesh=_mesh(dp_replicate=replicas), units=model.blocks, precision="fp64", **settings)
    mine = _own(x)

    def last():
        return microbatch(model, is_first=False, is_last=False)

    for around in (lambda: torch.enable_grad(), *(() if keeps else (last,))):
        with refused("create_graph"), microbatch(model, is_first=True, is_last=True):
            _penalised(model, mine, True, around).backward()
        with refused("create_graph"):
            _penalised(model, mine, True, around).backward()
    for parts in (1, 2):
        for with_loss in (False, True):
            plain, _ = _judge_and_data()
            if keeps:
                pieces = mine.split(len(mine) // parts)
                for i, part in enumerate(pieces):
                    with microbatch(model, is_first=i == 0, is_last=i == len(pieces) - 1):
                        _penalised(model, part, with_loss, last).backward()
                _penalised(plain, x, with_loss, torch.enable_grad).backward()
            else:
                with microbatch(model, is_first=True, is_last=True):
                    model(mine).score.square().sum().backward()
                plain(x).score.square().sum().backward()
            for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                if q.grad is not None and q.grad.norm() > 0:
                    assert relative_error(p.grad.full_tensor(), q.grad) < 1e-12, name
            model.zero_grad(set_to_none=True)
    return True


@pytest.mark.parametrize(
    ("strategy", "kept", "replicas"),
    [
        ("optim_grads_params", False, 1),
        ("optim_grads", False, 1),
        long_case("no_shard", False, 1),
        long_case("optim", False, 2),
        long_case("optim_grads_params", True, 2),
    ],
)
def test_a_gradient_penalty(pools, strategy, kept, replicas):
    settings = {"strategy": strategy} | ({"keep_gathered": True} if kept else {})
    assert all(pools[4 if replicas == 2 else 3].run(_penalties, settings, replicas))


def _penalty_of_split_tokens():
    mesh = _mesh(cp=2)
    model = _transformer(mesh, strategy="optim")
    x = torch.randn(1, TOKENS, 5, requires_grad=True)
    with pytest.raises(UserError), microbatch(model, is_first=True, is_last=False):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return True


def test_a_gradient_penalty_through_split_tokens_is_refused(pools):
    assert all(pools[2].run(_penalty_of_split_tokens))


# ---- arguments


def _arguments():
    mesh, plain = _mesh(), torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    x, model = torch.zeros(1, 2, 2, 2), Transformer()
    for attempt in (
        lambda: shard_module(model, mesh=plain, units=model.blocks),
        lambda: shard_module(model, mesh=None, units=model.blocks),
        lambda: parallelize_context(model, mesh=plain, plan=PLAN),
        lambda: split_tokens(x, plain),
        lambda: gather_tokens(x, plain),
        lambda: context_parallel_attention(x, x, x, mesh=plain),
    ):
        assert "mesh" in refusal(attempt)
    for name, units in (
        ("units", model.head),
        ("units[0]", ["blocks.0"]),
        ("units[1]", [model.head, nn.Linear(1, 1)]),
        ("units[0]", [model]),
        ("units[3]", [*model.blocks, model.blocks[0]]),
    ):
        assert name in refusal(lambda units=units: shard_module(model, mesh=mesh, units=units))
    assert "strtegy" in refusal(lambda: shard_module(model, mesh=mesh, units=[], strtegy="optim"))
    shard_module(model, mesh=mesh, units=(block for block in model.blocks))
    sharded = [name for name, module in model.named_modules() if hasattr(module, "unshard")]
    assert sharded == ["", "blocks.0", "blocks.1", "blocks.2"], "a generator of units is used, not used up"
    refusal(lambda: shard_module(model, mesh=mesh, units=model.blocks))
    refusal(lambda: parallelize_context(model, mesh=mesh, plan={"blocks.0": {"hidden_states": SplitTokens(1)}}))
    return True


def test_arguments(pools):
    assert pools[1].run(_arguments) == [True]
