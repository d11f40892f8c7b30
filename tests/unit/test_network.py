"""Which parameters of a network are whose, remembered from the first walk."""

import torch
from torch import nn

from models.families.wan import Wan
from models.names import owner
from models.network import Network


def _network():
    """Two roles' adapters and additions on one base, a weight that two layers share, as injection leaves them."""
    torch.manual_seed(0)
    adapted = nn.Module()
    adapted.base_layer = nn.Linear(4, 4)
    adapted.lora_A = nn.ModuleDict({name: nn.Linear(4, 2, bias=False) for name in ("student", "fake")})
    module = nn.ModuleDict({"first": nn.Linear(4, 4), "adapted": adapted, "last": nn.Linear(4, 4)})
    module["last"].weight = module["first"].weight
    module.add_module("additions", nn.ModuleDict({"fake": nn.ModuleDict({"gan_head": nn.Linear(4, 1)})}))
    return Network(
        family=Wan(),
        config={},
        module=module,
        precision="fp32",
        tokens=1,
        forward_flops=1,
        adapters=("student", "fake"),
    )


def _walked(network, roles):
    owned = ((owner(name), parameter) for name, parameter in network.module.named_parameters())
    return {name: parameter for (of, name), parameter in owned if of in roles}


def _same(found, wanted):
    assert list(found) == list(wanted), "in the module's order, since reductions add up in it"
    assert all(found[name] is wanted[name] for name in wanted)


def test_parameters_are_those_of_a_walk_before_and_after_they_are_replaced():
    network = _network()
    assert "last.weight" not in network.base_parameters(), "it is first.weight, once"
    for changes in (lambda module: module, lambda module: module.to_empty(device="meta"), nn.Module.double):
        changes(network.module)
        _same(network.base_parameters(), _walked(network, [None]))
        for role in ("student", "fake", "teacher"):
            _same(network.named_parameters(role), _walked(network, [role, None if role == "teacher" else role]))
        assert network.trained_elsewhere("student") == {
            "adapted.lora_A.fake.weight", "additions.fake.gan_head.weight", "additions.fake.gan_head.bias",
        }  # fmt: skip
