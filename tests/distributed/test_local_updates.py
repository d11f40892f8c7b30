"""Updates of local shards: equal to AdamW over DTensors to the last digit, also after FSDP2 replaces the shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distill.config import OptimizerSettings
from distill.optimizers import RoleOptimizer
from fsdp_cp import build_mesh, materialise, microbatch, shard_module
from fsdp_cp.checkpoint import Checkpoints, load, step_folder
from fsdp_cp.reduce import full_tensor
from fsdp_cp.sharding.initialise import initialise
from fsdp_cp.tensor_lists import local_shards
from models.ema import Ema
from models.families.wan import Wan
from models.network import Network
from models.role import Role

RATES = [1e-2, 3e-3, 2e-2, 5e-3]
SETTINGS = {"lr": 1e-2, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1, "no_decay": ["*.bias"]}


class Model(nn.Module):
    """Rows that three ranks cannot share evenly; of 2 rows and of 1 some ranks have none."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 2)
        self.scale = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.second(self.norm(torch.tanh(self.first(x)))) * self.scale.weight.view(-1)


def _role(mesh, **settings):
    """By way of the meta device, as in a run: with memory FSDP2 pads the shards, and has replaced them."""
    with torch.device("meta"):
        model = Model()
    shard_module(model, mesh=mesh, units=[model.first, model.second], **settings)
    materialise(model, "cpu")
    initialise(model, seed=3)
    network = Network(family=Wan(), config={}, module=model, precision="fp32", tokens=1, forward_flops=1)
    return Role(name="student", networks=(network,), trainable=True)


def _backward(role, step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    dtype = torch.bfloat16 if role.network._shard_settings.precision == "bf16" else torch.float32
    x, target = torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)
    with microbatch(role.network, is_first=True, is_last=True):
        (role.network(x.to(dtype)).float() - target).square().sum().backward()


def _same(ours, theirs, our_state, their_state):
    """Check that weights and AdamW's states are equal bit by bit, and sharded alike; return how many there are."""
    pairs = [(p, theirs.named_parameters()[name]) for name, p in ours.named_parameters().items()]
    assert our_state.keys() == their_state.keys()
    for name, state in our_state.items():
        assert list(state) == list(their_state[name]) == ["step", "exp_avg", "exp_avg_sq"]
        pairs += [(value, their_state[name][key]) for key, value in state.items()]
    for mine, its in pairs:
        assert (type(mine), mine.shape, mine.dtype) == (type(its), its.shape, its.dtype)
        assert getattr(mine, "placements", None) == getattr(its, "placements", None)
        assert torch.equal(*local_shards([mine, its]))
    return len(pairs)


def _against_dtensors(settings):
    """Update by torch's AdamW, given the sharded parameters, and by the project's."""
    mesh = build_mesh()
    ours, theirs = (_role(mesh, **settings) for _ in range(2))
    optimizer = RoleOptimizer(ours, OptimizerSettings(implementation="foreach", **SETTINGS))
    named = theirs.named_parameters()
    groups = [
        {"params": [p for name, p in named.items() if name.endswith("bias") == undecayed], "weight_decay": decay}
        for undecayed, decay in ((False, 0.1), (True, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.99), eps=1e-7, foreach=True)
    for step, rate in enumerate(RATES):
        for role in (ours, theirs):
            _backward(role, step)
            if step == 1:  # as one that no loss used, on this step
                role.network.second.bias.grad = None
        optimizer.step(rate)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        adamw.zero_grad()
    shards = local_shards(ours.parameters())
    for parameter, shard in zip(ours.parameters(), shards, strict=True):
        assert parameter.to_local().is_set_to(shard) and not shard.requires_grad, "the same memory, shape and strides"
    assert all(p.grad is None for p in ours.parameters())
    state = {name: adamw.state[p] for name, p in named.items()}
    return _same(ours, theirs, optimizer.state(), state), sum(shard.numel() == 0 for shard in shards)


@pytest.mark.parametrize(
    "settings",
    [
        {"offload": "cpu", "strategy": "optim"},
        pytest.param({"precision": "bf16", "master_dtype": "bf16"}, marks=pytest.mark.slow),
    ],
)
def test_updates_equal_those_of_dtensors_to_the_last_digit(pools, settings):
    results = pools[3].run(_against_dtensors, settings)
    assert all(compared == 7 + 3 * 7 for compared, _ in results)
    assert [empty for _, empty in results] == [0, 1, 3], "shards without a row"


def _steps(role, optimizer, first, last):
    for step in range(first, last):
        _backward(role, step)
        optimizer.step(RATES[step])


def _replaced(how, folder):
    """Update twice, replace the shards by equal tensors, update twice; compare with four updates in a row."""
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
        tensors = {"student": {"weights": role.weights(), "adamw": optimizer.state()}}
        Checkpoints(folder, keep=1).save(2, tensors, {})
        materialise(role.network, "cpu")
        optimizer = RoleOptimizer(role, OptimizerSettings(**SETTINGS))
        load(step_folder(folder, 2), {"student": {"weights": role.weights(), "adamw": optimizer.state()}})
    _steps(role, optimizer, 2, 4)
    average.update(0)
    compared = _same(role, plain, optimizer.state(), straight.state())
    trios = zip(
        _local(_role(mesh)).values(), _local(role).values(), local_shards(average.weights.values()), strict=True
    )
    followed = all(torch.equal(before.lerp(after, 0.5), mean) for before, after, mean in trios)
    replaced = [name for name, local in _local(role).items() if local.data_ptr() != seen[name] and local.numel()]
    return compared, followed, replaced


def _local(role):
    named = role.named_parameters()
    return dict(zip(named, local_shards(named.values()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["load_state_dict(assign=True)", "to_empty", "a checkpoint"])
def test_replaced_shards_are_updated(pools, tmp_path, how):
    results = pools[3].run(_replaced, how, tmp_path)
    for compared, followed, _ in results:
        assert compared == 28 and followed
    assert all({"first.weight", "norm.weight"} <= set(names) for _, _, names in results), "else nothing was tested"


def _saved_on_one_mesh(folder):
    role = _role(build_mesh())
    optimizer = RoleOptimizer(role, OptimizerSettings(**SETTINGS))
    _steps(role, optimizer, 0, 2)
    tensors = {"student": {"weights": role.weights(), "adamw": optimizer.state()}}
    Checkpoints(folder, keep=1).save(2, tensors, {})
    return _full(role, optimizer)


def _loaded_on_another(folder, implementation, sizes):
    role = _role(build_mesh(**sizes))
    optimizer = RoleOptimizer(role, OptimizerSettings(implementation=implementation, **SETTINGS))
    load(step_folder(folder, 2), {"student": {"weights": role.weights(), "adamw": optimizer.state()}})
    loaded = _full(role, optimizer)
    _steps(role, optimizer, 2, 3)
    return loaded, {float(state["step"]) for state in optimizer.state().values()}


def _full(role, optimizer):
    state = {f"{n}.{key}": full_tensor(x).clone() for n, entry in optimizer.state().items() for key, x in entry.items()}
    return {name: full_tensor(weight) for name, weight in role.weights().items()} | state


def test_state_goes_over_to_another_mesh(pools, tmp_path):
    """Counts of steps too: a rank whose shard of a parameter is empty has counted with the others."""
    saved = pools[3].run(_saved_on_one_mesh, tmp_path)[0]
    assert all(value == 2 for name, value in saved.items() if name.endswith(".step"))
    for sizes, implementation in (({"dp_shard": 4}, "foreach"), ({"dp_replicate": 2, "dp_shard": 2}, "fused")):
        for loaded, steps in pools[4].run(_loaded_on_another, tmp_path, implementation, sizes):
            assert loaded.keys() == saved.keys()
            assert [name for name, x in saved.items() if not torch.equal(loaded[name], x)] == []
            assert steps == {3.0}
