"""The library part on a transformer, as the README shows it: fp64, against plain torch."""

import copy

import pytest
import torch

from fsdp_cp import build_mesh, microbatch, shard_module
from fsdp_cp.context.check_parallel import gradient_errors
from fsdp_cp.context_parallel import parallelize_context
from tests.oracles.full_tensors import full_tensors
from tests.oracles.seeded import seeded
from tests.oracles.small_transformer import HEADS, PLAN, TOKENS, Transformer
from tests.tiers import slow_case

BATCH = 4


def _model_and_data():
    return seeded(
        lambda: (Transformer().double(), *(torch.randn(BATCH, TOKENS, 5, dtype=torch.float64) for _ in range(2)))
    )


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
        slow_case({"dp_shard": 2, "cp": 3}, True),
    ],
)
def test_loss_and_gradients(pools, sizes, checkpointing):
    model, x, target = _model_and_data()
    loss = (model(x) - target).square().mean()
    loss.backward()
    cp, dp = sizes.get("cp", 1), sizes.get("dp_shard", 1)
    ranks = pools[cp * dp].run(_sharded, sizes, checkpointing)
    assert sum(ranks[d * cp][0] for d in range(dp)) == pytest.approx(loss.item(), rel=1e-13)
    truth = {name: p.grad for name, p in model.named_parameters()}
    assert max(gradient_errors(ranks[0][1], truth).values()) < 1e-12
