"""A role's AdamW and its learning rate."""

import math

import pytest
import torch
from torch import nn

from distill.config.schema import OptimizerSettings
from distill.train.optimizers import RoleOptimizer, learning_rate
from models.families.wan import Wan
from models.roles.network import Network
from models.roles.role import Role
from tests.unit.refused import refused


def role(seed=0):
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4))
    return Role(
        name="student",
        networks=(Network(family=Wan(), config={}, module=network, mesh=None, precision="fp32"),),
        trainable=True,
    )


def backward(network, step):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    network(x).square().mean().backward()


def rates(updates, **settings):
    return [learning_rate(OptimizerSettings(**settings), i, updates) for i in range(updates)]


def test_constant_rate_and_linear_warm_up():
    assert rates(5, lr=0.3) == [0.3] * 5
    assert rates(6, lr=0.4, warmup=4) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_cosine_falls_from_the_peak_to_its_share():
    final = 0.1
    settings = OptimizerSettings(lr=2.0, schedule="cosine", warmup=10, final_lr=final)
    curve = [learning_rate(settings, i, 110) for i in range(110)]
    assert max(curve) == curve[10] == 2.0 and curve[9] == 2.0
    assert all(a < b for a, b in zip(curve[:9], curve[1:10], strict=True))
    assert all(a > b for a, b in zip(curve[10:], curve[11:], strict=False))
    assert curve[60] == pytest.approx(2 * (final + (1 - final) / 2)), "half way, the mean of both ends"
    assert curve[35] == pytest.approx(2 * (final + (1 - final) * (0.5 + 0.5 * math.cos(math.pi / 4))))
    assert curve[-1] == pytest.approx(2 * final, abs=1e-3)
    assert learning_rate(settings, 110, 110) == pytest.approx(2 * final), "never below, however long it goes on"
    assert learning_rate(settings, 500, 110) == pytest.approx(2 * final)


def test_cosine_with_nothing_after_the_warm_up():
    assert rates(2, lr=0.3, schedule="cosine", warmup=5) == pytest.approx([0.06, 0.12])
    assert rates(1, lr=0.3, schedule="cosine") == [0.3]


def test_updates_equal_torch_adamw_with_a_changing_rate():
    betas = [0, 0.99]
    ours, reference = role(), role()
    optimizer = RoleOptimizer(ours, OptimizerSettings(lr=1e-2, betas=betas, eps=1e-7, weight_decay=0.1))
    adamw = torch.optim.AdamW(
        reference.network.parameters(), lr=1e-2, betas=tuple(map(float, betas)), eps=1e-7, weight_decay=0.1
    )
    for step, (lr, scale) in enumerate([(1e-2, 1), (5e-3, 0.3), (2e-2, 1), (0.0, 0.7), (1e-3, 1)]):
        backward(ours.network, step)
        backward(reference.network, step)
        for parameter in reference.parameters():
            parameter.grad *= scale
        optimizer.step(lr, scale)
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        adamw.zero_grad()
        assert all(p.grad is None for p in ours.parameters()), "gradients are cleared"
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_state_is_complete_before_the_first_update_and_named_by_parameter():
    optimizer = RoleOptimizer(role(), OptimizerSettings())
    state = optimizer.state
    assert state.keys() == {name for name, _ in optimizer.role.network.named_parameters()}
    shapes = {key: {k: tuple(v.shape) for k, v in entry.items()} for key, entry in state.items()}
    backward(optimizer.role.network, 0)
    optimizer.step(1e-2)
    after = {key: {k: tuple(v.shape) for k, v in entry.items()} for key, entry in optimizer.state.items()}
    assert after == shapes, "a checkpoint before the first update must have the same entries as one after it"


NAMES = ["embed.weight", "embed.bias", "blocks.0.norm.weight", "blocks.0.ffn.weight", "blocks.10.ffn.bias", "out"]


def groups(**settings):
    return OptimizerSettings(weight_decay=0.1, **settings).groups(NAMES, "optim.student")


def test_groups_by_pattern_of_name():
    assert groups() == {(0.1, 1.0): NAMES}
    assert groups(no_decay=["*.bias", "*norm*"]) == {
        (0.1, 1.0): ["embed.weight", "blocks.0.ffn.weight", "out"],
        (0.0, 1.0): ["embed.bias", "blocks.0.norm.weight", "blocks.10.ffn.bias"],
    }
    # The first pattern that matches counts, an exact name is a pattern too, and `blocks.1` is not `blocks.10`.
    assert groups(no_decay=["out"], lr_scale={"blocks.0.norm.*": 3, "blocks.*": 0.5, "out": 0.0}) == {
        (0.1, 1.0): ["embed.weight", "embed.bias"],
        (0.1, 3.0): ["blocks.0.norm.weight"],
        (0.1, 0.5): ["blocks.0.ffn.weight", "blocks.10.ffn.bias"],
        (0.0, 0.0): ["out"],
    }


def test_what_a_method_adds_has_a_rate_of_its_own():
    """GAN heads barely learn at a fake score's rate. Patterns multiply the additions' rate."""
    names = [*NAMES, "additions.gan_head.heads.0.out.weight", "additions.gan_head.heads.0.out.bias"]
    settings = OptimizerSettings(lr=4e-7, additions_lr=1e-5, weight_decay=0.1, lr_scale={"*.heads.0.out.bias": 2.0})
    found = settings.groups(names, "optim.fake")
    assert [group for group, chosen in found.items() if chosen == NAMES] == [(0.1, 1.0)]
    rates = {chosen[0]: settings.lr * group.lr_scale for group, chosen in found.items() if chosen != NAMES}
    assert rates == pytest.approx({names[-2]: 1e-5, names[-1]: 2e-5})
    assert len(OptimizerSettings(lr=4e-7).groups(names, "optim.fake")) == 1, "null: the role's own"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"no_decay": ["*.bias", "*.baes"]}, "optim.student.no_decay: '*.baes'"),
        ({"lr_scale": {"blocks.1.*": 0.1}}, "optim.student.lr_scale: 'blocks.1.*'"),
        ({"no_decay": ["Embed.*"]}, "optim.student.no_decay: 'Embed.*'"),
        ({"lr_scale": {"blocks.*": 0.1, "blocks.0.*": 0.2}}, "'blocks.0.*'"),  # comes too late
    ],
)
def test_a_pattern_without_effect_is_refused_by_name(settings, named):
    with refused(named):
        groups(**settings)


def test_a_parameter_without_a_gradient_stays_and_does_not_count():
    optimizer = RoleOptimizer(role(), OptimizerSettings(lr=1e-2, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in optimizer.role.named_parameters().items()}
    backward(optimizer.role.network, 0)
    optimizer.role.network[0].bias.grad = None
    optimizer.step(1e-2)
    moved = {name for name, p in optimizer.role.named_parameters().items() if not torch.equal(p, before[name])}
    counted = {name for name, state in optimizer.state.items() if state["step"] == 1}
    assert moved == counted == before.keys() - {"0.bias"}
    assert not optimizer.state["0.bias"]["exp_avg_sq"].any()
