"""The library part on a transformer of this test, as the README shows it: fp64, against plain torch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_cp import build_mesh, microbatch, shard_module
from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.context_parallel import GatherTokens, SplitTokens, parallelize_context
from tests.oracles.full_tensors import full_tensors

PLAN = {"blocks.0": {"hidden_states": SplitTokens(split_dim=1)}, "head": GatherTokens(gather_dim=1)}
TOKENS, DIM, HEADS, BATCH = 12, 18, 6, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 31), nn.GELU(), nn.Linear(31, DIM))
        self.mesh = None

    def forward(self, hidden_states):
        q, k, v = self.qkv(self.norm(hidden_states)).unflatten(-1, (3, HEADS, DIM // HEADS)).unbind(2)
        if self.mesh is not None:
            out = context_parallel_attention(q, k, v, mesh=self.mesh)
        else:
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        hidden_states = hidden_states + self.out(out.flatten(2))
        return hidden_states + self.mlp(hidden_states)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(5, DIM), nn.Linear(DIM, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _model_and_data():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer().double()
        return model, torch.randn(BATCH, TOKENS, 5, dtype=torch.float64), torch.randn(BATCH, TOKENS, 5).double()


def _sharded(sizes, checkpointing):
    mesh = build_mesh(**sizes, heads=HEADS)
    model, x, target = _model_and_data()
    for block in model.blocks:
        block.mesh = mesh
    parallelize_context(model, mesh=mesh, plan=copy.deepcopy(PLAN))
    shard_module(model, mesh=mesh, units=model.blocks, precision="fp64", activation_checkpointing=checkpointing)
    samples = BATCH // mesh.dp_size
    mine = range(mesh.dp_rank * samples, (mesh.dp_rank + 1) * samples)
    losses = 0.0
    for i in mine:  # one sample a micro-batch
        with microbatch(model, is_first=i == mine[0], is_last=i == mine[-1]):
            loss = (model(x[i : i + 1]) - target[i : i + 1]).square().mean() / BATCH
            loss.backward()
        losses += loss.item()
    return losses, full_tensors({name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("sizes", "checkpointing"),
    [
        ({"cp": 3, "ring": 3}, True),
        ({"dp_shard": 2, "cp": 2}, False),
        pytest.param({"dp_shard": 2, "cp": 3}, True, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients(pools, sizes, checkpointing):
    model, x, target = _model_and_data()
    loss = (model(x) - target).square().mean()
    loss.backward()
    cp, dp = sizes.get("cp", 1), sizes.get("dp_shard", 1)
    ranks = pools[cp * dp].run(_sharded, sizes, checkpointing)
    assert sum(ranks[d * cp][0] for d in range(dp)) == pytest.approx(loss.item(), rel=1e-13)
    for name, p in model.named_parameters():
        error = (ranks[0][1][name] - p.grad).norm() / p.grad.norm()
        assert error < 1e-12, (name, error)
