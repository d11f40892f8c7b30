"""Weight decay and learning rates by name, on shards, against ``torch.optim.AdamW`` with the same groups."""

import pytest
import torch
from torch import nn

from distill.config.schema import OptimizerSettings
from distill.train.optimizers import RoleOptimizer
from fsdp_cp import build_mesh, shard_module
from models.families.wan import Wan
from models.roles.network import Network
from models.roles.role import Role
from tests.tiers import long_case, slow_case

RATES = [1e-2, 3e-3, 2e-2]
WORLD = 4


class Model(nn.Module):
    """Network whose rows four ranks cannot share evenly; of 3, 2 and 1 rows some ranks have none."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Linear(6, 7), nn.LayerNorm(7)
        self.second, self.norm2 = nn.Linear(7, 3), nn.LayerNorm(3)
        self.head = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x):
        x = self.norm1(torch.tanh(self.first(x)))
        return self.scale * self.head(self.norm2(torch.tanh(self.second(x))))


def _model_and_data():
    torch.manual_seed(1)
    model = Model().double()
    return model, torch.randn(3, 4 * WORLD, 6, dtype=torch.float64), torch.randn(3, 4 * WORLD, 2, dtype=torch.float64)


SETTINGS = {"no_decay": ["*.bias"], "lr_scale": {"norm?.*": 2.0, "head.weight": 0.5, "scale": 0.0}}
MEANT = {  # the settings above, spelled out: (weight decay, factor of the rate)
    "first.weight": (0.1, 1.0),
    "first.bias": (0.0, 1.0),
    "norm1.weight": (0.1, 2.0),
    "norm1.bias": (0.0, 2.0),
    "second.weight": (0.1, 1.0),
    "second.bias": (0.0, 1.0),
    "norm2.weight": (0.1, 2.0),
    "norm2.bias": (0.0, 2.0),
    "head.weight": (0.1, 0.5),
    "head.bias": (0.0, 1.0),
    "scale": (0.1, 0.0),
}


def _sharded(sizes, strategy):
    mesh = build_mesh(**sizes, sharded=strategy != "no_shard")
    model, x, target = _model_and_data()
    for name, parameter in model.named_parameters():
        parameter.tag, parameter.no_decay = name, name.endswith("bias")
    shard_module(model, mesh=mesh, units=[model.first, model.second], precision="fp64", strategy=strategy)
    role = Role(
        name="student",
        networks=(Network(family=Wan(), config={}, module=model, mesh=mesh, precision="fp64"),),
        trainable=True,
    )
    settings = OptimizerSettings(lr=1e-2, betas=[0.8, 0.99], eps=1e-7, weight_decay=0.1, **SETTINGS)
    optimizer = RoleOptimizer(role, settings)
    mine = slice(4 * torch.distributed.get_rank(), 4 * torch.distributed.get_rank() + 4)
    for step, rate in enumerate(RATES):
        loss = (model(x[step, mine]) - target[step, mine]).square().sum() / target[step].numel()
        loss.backward()
        role.rest()
        optimizer.step(rate)
    assert all(p.tag == name and p.no_decay == name.endswith("bias") for name, p in model.named_parameters())
    empty = sum(p.to_local().numel() == 0 for p in model.parameters())
    state = {
        f"{name}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, entry in optimizer.state.items()
        for key, value in entry.items()
    }
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}, state, empty


def _plain(meant):
    model, x, target = _model_and_data()
    groups = [
        {"params": [p], "weight_decay": meant[name][0], "factor": meant[name][1]}
        for name, p in model.named_parameters()
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.99), eps=1e-7, foreach=False)
    for step, rate in enumerate(RATES):
        (model(x[step]) - target[step]).square().mean().backward()
        for group in adamw.param_groups:
            group["lr"] = rate * group["factor"]
        adamw.step()
        adamw.zero_grad()
    state = {f"{n}.{key}": value for n, p in model.named_parameters() for key, value in adamw.state[p].items()}
    return {name: p.detach() for name, p in model.named_parameters()}, state


SHARDED, REPLICAS = {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        (SHARDED, "optim_grads_params"),
        long_case(SHARDED, "optim"),
        slow_case(REPLICAS, "optim_grads"),
        long_case({"dp_replicate": 4}, "no_shard"),
    ],
)
def test_groups_on_shards_equal_plain_adamw(pools, sizes, strategy):
    weights, state = _plain(MEANT)
    alike, _ = _plain(dict.fromkeys(MEANT, (0.1, 1.0)))
    assert sum((w - alike[name]).abs().max() > 1e-4 for name, w in weights.items()) > 6, (
        "the groups must make a difference"
    )
    results = pools[WORLD].run(_sharded, sizes, strategy)
    for ours, our_state, _ in results:
        for theirs, mine in ((weights, ours), (state, our_state)):
            assert theirs.keys() == mine.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-12, check_dtype=False, msg=name)
    if sizes == SHARDED:
        assert [empty > 0 for _, _, empty in results] == [False, True, True, True], "some shards have no rows"
