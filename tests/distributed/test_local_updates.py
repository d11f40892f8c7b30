"""Updates of local shards after FSDP2 replaced the shards, and with a state that was saved on another mesh."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distill.config.schema import OptimizerSettings
from distill.train.optimizers import RoleOptimizer
from fsdp_cp import build_mesh, materialise, microbatch, shard_module
from fsdp_cp.checkpoint.folder import step_folder
from fsdp_cp.checkpoint.save_load import Checkpoints, load
from fsdp_cp.reduce import full_tensor, local_shards
from fsdp_cp.sharding.initialise import initialise
from models.families.wan import Wan
from models.roles.ema import Ema
from models.roles.network import Network
from models.roles.role import Role
from tests.tiers import slow

RATES = (1e-2, 3e-3, 2e-2, 5e-3)
SETTINGS = {"lr": 1e-2, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1, "no_decay": ["*.bias"]}


class Model(nn.Module):
    """Network whose rows three ranks cannot share evenly; of 2 rows and of 1 some ranks have none."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 2)
        self.scale = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.second(self.norm(torch.tanh(self.first(x)))) * self.scale.weight.view(-1)


def _role(mesh):
    """Build a role on the meta device, as a run does. When it gets memory, FSDP2 pads and replaces the shards."""
    with torch.device("meta"):
        model = Model()
    for name, parameter in model.named_parameters():
        parameter.tag = name
    shard_module(model, mesh=mesh, units=[model.first, model.second])
    materialise(model, "cpu")
    assert all(parameter.tag == name for name, parameter in model.named_parameters()), "attributes must survive both"
    initialise(model, seed=3)
    network = Network(family=Wan(), config={}, module=model, mesh=mesh, precision="fp32")
    return Role(name="student", networks=(network,), trainable=True)


def _backward(role, step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x, target = torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)
    with microbatch(role.network, is_first=True, is_last=True):
        (role.network(x) - target).square().sum().backward()


def _steps(role, optimizer, first, last):
    for step in range(first, last):
        _backward(role, step)
        optimizer.step(RATES[step])


def _replaced(how, folder):
    """Compare two updates before and two after the shards are replaced by equal tensors with four updates in a row."""
    mesh = build_mesh()
    plain, role = _role(mesh), _role(mesh)
    straight, optimizer = (RoleOptimizer(each, OptimizerSettings(**SETTINGS)) for each in (plain, role))
    average = Ema(role, decay=0.5, gamma=1.0, start=0)
    _steps(plain, straight, 0, 4)
    _steps(role, optimizer, 0, 2)
    before = _local(role)  # kept, or new storage may be at the same place
    seen = {name: local.data_ptr() for name, local in before.items()}
    saved = {name: weight.clone() for name, weight in role.weights().items()}
    if how == "load_state_dict(assign=True)":
        role.network.load_state_dict(saved, assign=True)
    elif how == "to_empty":
        materialise(role.network, "cpu")
        with torch.no_grad():
            for name, weight in role.weights().items():
                weight.to_local().copy_(saved[name].to_local())
    else:
        tensors = {"student": {"weights": role.weights(), "adamw": optimizer.state}}
        Checkpoints(folder, keep=1).save(2, tensors, {})
        materialise(role.network, "cpu")
        optimizer = RoleOptimizer(role, OptimizerSettings(**SETTINGS))
        load(step_folder(folder, 2), {"student": {"weights": role.weights(), "adamw": optimizer.state}})
    _steps(role, optimizer, 2, 4)
    average.update(0)
    ours, theirs = _full(role, optimizer), _full(plain, straight)
    assert ours.keys() == theirs.keys() and len(ours) == 28
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    trios = zip(
        _local(_role(mesh)).values(), _local(role).values(), local_shards(average.weights.values()), strict=True
    )
    assert all(torch.equal(first.lerp(last, 0.5), mean) for first, last, mean in trios), "the average must follow"
    return [name for name, local in _local(role).items() if local.data_ptr() != seen[name] and local.numel()]


def _local(role):
    named = role.named_parameters()
    return dict(zip(named, local_shards(named.values()), strict=True))


def _full(role, optimizer):
    state = {f"{n}.{key}": full_tensor(x).clone() for n, entry in optimizer.state.items() for key, x in entry.items()}
    return {name: full_tensor(weight) for name, weight in role.weights().items()} | state


@slow
@pytest.mark.parametrize("how", ["load_state_dict(assign=True)", "to_empty", "a checkpoint"])
def test_replaced_shards_are_updated(pools, tmp_path, how):
    for names in pools[3].run(_replaced, how, tmp_path):
        assert {"first.weight", "norm.weight"} <= set(names), "else nothing was tested"


def _saved_on_one_mesh(folder):
    role = _role(build_mesh())
    optimizer = RoleOptimizer(role, OptimizerSettings(**SETTINGS))
    _steps(role, optimizer, 0, 2)
    tensors = {"student": {"weights": role.weights(), "adamw": optimizer.state}}
    Checkpoints(folder, keep=1).save(2, tensors, {})
    return _full(role, optimizer)


def _loaded_on_another(folder, sizes):
    role = _role(build_mesh(**sizes))
    optimizer = RoleOptimizer(role, OptimizerSettings(**SETTINGS))
    load(step_folder(folder, 2), {"student": {"weights": role.weights(), "adamw": optimizer.state}})
    loaded = _full(role, optimizer)
    _steps(role, optimizer, 2, 3)
    return loaded, {float(state["step"]) for state in optimizer.state.values()}


@slow
def test_state_goes_over_to_another_mesh(pools, tmp_path):
    """A rank whose shard of a parameter is empty counts steps too, so the counts load on another mesh."""
    saved = pools[3].run(_saved_on_one_mesh, tmp_path)[0]
    assert all(value == 2 for name, value in saved.items() if name.endswith(".step"))
    for sizes in ({"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}):
        for loaded, steps in pools[4].run(_loaded_on_another, tmp_path, sizes):
            assert loaded.keys() == saved.keys()
            assert [name for name, x in saved.items() if not torch.equal(loaded[name], x)] == []
            assert steps == {3.0}
