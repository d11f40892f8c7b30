"""The moving average of a sharded role on one rank, against its closed form in float64."""

import pytest
import torch

from fsdp_cp.sharding.settings import ShardSettings
from models.roles.ema import Ema
from tests.oracles.samples import video
from tests.oracles.small_wan import small_role
from tests.oracles.tiny_wan import text_condition
from tests.tiers import parametrize


@pytest.fixture
def role(one_rank):
    return small_role(one_rank)


def full(weights):
    return {name: w.full_tensor().clone() for name, w in weights.items()}


def wander(role, ema, updates):
    """Change the weights and update the average. Return the weights after each update, in fp64."""
    history = []
    generator = torch.Generator().manual_seed(1)
    for update in range(updates):
        for weight in role.weights().values():
            local = weight.to_local()
            local += 0.1 * torch.randn(local.shape, generator=generator)
        ema.update(update)
        history.append({name: w.double() for name, w in full(role.weights()).items()})
    return history


def worst(ema, expected):
    found = full(ema.weights)
    assert found.keys() == expected.keys()
    return max(((found[n].double() - e).norm() / e.norm().clamp_min(1e-12)).item() for n, e in expected.items())


@parametrize("decay", [0.0, 0.9], quick=1)
def test_constant_decay_equals_the_weighted_sum(role, decay):
    initial = {name: w.double() for name, w in full(role.weights()).items()}
    ema = Ema(role, decay=decay, gamma=6.94, start=0)
    history = wander(role, ema, 12)
    expected = {
        name: decay**12 * w + sum((1 - decay) * decay ** (11 - i) * h[name] for i, h in enumerate(history))
        for name, w in initial.items()
    }
    assert worst(ema, expected) < 1e-6


@parametrize("gamma", [0.0, 6.94], quick=1)
def test_power_schedule_weighs_update_k_by_its_power(role, gamma):
    """b_i = (1 - 1/(i+1))^(gamma+1): the products telescope to ((k+1)/n)^(gamma+1), so the start is forgotten."""
    ema = Ema(role, decay=None, gamma=gamma, start=0)
    n = 12
    history = wander(role, ema, n)
    share = [((k + 1) / n) ** (gamma + 1) - (k / n) ** (gamma + 1) for k in range(n)]
    assert sum(share) == pytest.approx(1)
    expected = {name: sum(s * h[name] for s, h in zip(share, history, strict=True)) for name in history[0]}
    assert worst(ema, expected) < 1e-6


@pytest.mark.parametrize("decay", [0.9, None])
def test_before_its_start_the_average_just_follows(role, decay):
    ema = Ema(role, decay=decay, gamma=6.94, start=5)
    history = wander(role, ema, 5)
    assert all(torch.equal(w.double(), history[-1][name]) for name, w in full(ema.weights).items())
    role.weights()["proj_out.bias"].to_local().add_(1.0)
    ema.update(5)
    moved = (full(ema.weights)["proj_out.bias"].double() - history[-1]["proj_out.bias"]).mean().item()
    # The power schedule begins at the start; the constant one averages from there.
    assert moved == pytest.approx(1.0 if decay is None else 0.1, rel=1e-5)


def velocity(role):
    generator = torch.Generator().manual_seed(3)
    x, text = torch.randn(2, 2, 1, 4, 4, generator=generator), torch.randn(2, 3, 6, generator=generator)
    with torch.no_grad():
        return role.velocity(video(x), torch.tensor([0.3, 0.9]), text_condition(text)).video


def test_swapping_in_computes_with_the_average_and_restores_every_bit(role):
    """An error within the context must restore the weights too."""
    ema = Ema(role, decay=0.5, gamma=6.94, start=0)
    velocity(role)  # FSDP must not keep the parameters that this forward gathered
    wander(role, ema, 3)
    raw, average, raw_velocity = full(role.weights()), full(ema.weights), velocity(role)
    with pytest.raises(KeyError), ema.swapped_in():
        raise KeyError
    with ema.swapped_in():
        assert all(torch.equal(w, average[name]) for name, w in full(role.weights()).items())
        averaged_velocity = velocity(role)
    assert all(torch.equal(w, raw[name]) for name, w in full(role.weights()).items())
    assert all(torch.equal(w, average[name]) for name, w in full(ema.weights).items())
    assert torch.equal(velocity(role), raw_velocity)
    assert not torch.allclose(averaged_velocity, raw_velocity, atol=1e-3)
    for name, weight in role.weights().items():  # the same computation with the average written in by hand
        weight.to_local().copy_(average[name])
    assert torch.equal(velocity(role), averaged_velocity)


def test_bf16_masters_have_no_average(one_rank):
    role = small_role(one_rank, sharding=ShardSettings(precision="bf16", master_dtype="bf16"))
    with pytest.raises(AssertionError):
        Ema(role, decay=0.9, gamma=1.0, start=0)
