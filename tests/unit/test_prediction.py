"""Networks that predict v or the noise, called as rectified flow: against diffusers' schedulers and float64."""

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler, DDIMScheduler
from torch.autograd import forward_ad

from tests.outside.prediction import DiscretePrediction

COGVIDEOX = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SCHEDULERS = {
    "2b": CogVideoXDPMScheduler(
        **COGVIDEOX, prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_shift_scale=3.0
    ),
    "5b": CogVideoXDDIMScheduler(
        **COGVIDEOX,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=1.0,
        timestep_spacing="trailing",
    ),
    "noise": DDIMScheduler(**COGVIDEOX, prediction_type="epsilon", clip_sample=False),
}
ALL = pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)


def draw(seed, count=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 3, 4, 5, generator=generator, dtype=torch.float64)


def times(*values):
    return torch.tensor(values, dtype=torch.float64)


@ALL
def test_states_and_times_at_the_trained_levels_are_the_schedulers_own(scheduler):
    prediction, x0, noise = DiscretePrediction.from_scheduler(scheduler), draw(0), draw(1)
    steps = torch.tensor([0, 1, 137, 500, 998, 999])
    t = torch.tensor(prediction.levels, dtype=torch.float64)[steps]
    weight = t[:, None, None, None, None]
    theirs = scheduler.add_noise(x0, noise, steps)
    assert torch.allclose(prediction.state((1 - weight) * x0 + weight * noise, t), theirs, rtol=0, atol=1e-6)
    assert torch.equal(prediction.network_time(t), steps.double())
    assert torch.allclose(prediction.network_time(t.float()), steps.float(), rtol=0, atol=1e-3)


@ALL
def test_velocities_are_e_minus_x0_of_the_schedulers_own_prediction(scheduler):
    """``step`` says which x0 the scheduler takes from an output. From the true target it takes the true x0."""
    prediction, x0, noise = DiscretePrediction.from_scheduler(scheduler), draw(2), draw(3)
    steps = torch.tensor([0, 1, 137, 500, 900, 999])
    t = torch.tensor(prediction.levels, dtype=torch.float64)[steps]
    weight = t[:, None, None, None, None]
    x = (1 - weight) * x0 + weight * noise
    state = prediction.state(x, t)
    kind, output = scheduler.config.prediction_type, draw(4)
    target = scheduler.get_velocity(x0, noise, steps) if kind == "v_prediction" else noise
    assert torch.allclose(prediction.velocity(target, x, t), noise - x0, rtol=0, atol=1e-5)
    known = DDIMScheduler(trained_betas=[0.1], prediction_type=kind, clip_sample=False)
    velocity = prediction.velocity(output, x, t)
    known.set_timesteps(1)
    for i, step in enumerate(steps):
        known.alphas_cumprod = scheduler.alphas_cumprod[step][None].double()
        theirs = known.step(output[i], 0, state[i]).pred_original_sample
        ours = x[i] - t[i] * velocity[i]
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-5), step


def test_steps_of_euler_are_steps_of_ddim():
    """The steps are equal at the levels of integer times, so DDIM can sample a student with Euler's steps."""
    scheduler = SCHEDULERS["5b"]
    prediction, z = DiscretePrediction.from_scheduler(scheduler), draw(5, 1)
    x = z.clone()
    scheduler.set_timesteps(4)
    steps = scheduler.timesteps.tolist()
    levels = [prediction.levels[step] for step in steps] + [0.0]

    def network(state, time):
        return (state * 0.7).sin() + time / 1000

    for i, step in enumerate(steps):
        t = times(levels[i])
        output = network(prediction.state(x, t), prediction.network_time(t))
        x = x + (levels[i + 1] - levels[i]) * prediction.velocity(output, x, t)
        z = scheduler.step(network(z, step), step, z).prev_sample
        after = times(levels[i + 1])
        assert torch.allclose(prediction.state(x, after), z, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["v_prediction", "epsilon"])
def test_the_velocity_of_an_ideal_network_is_exact_between_the_levels(kind):
    """The velocity is exact in float64, also at both ends. The noise needs t < 1."""
    alphas = torch.linspace(0.99, 0.01, 20, dtype=torch.float64)
    prediction, x0, noise = DiscretePrediction(alphas.tolist(), kind), draw(6, 5), draw(7, 5)
    t = times(0.0, 1e-3, 0.123, 0.789, 0.999 if kind == "epsilon" else 1.0)
    weight = t[:, None, None, None, None]
    norm = ((1 - weight) ** 2 + weight**2).sqrt()
    target = ((1 - weight) * noise - weight * x0) / norm if kind == "v_prediction" else noise
    x = (1 - weight) * x0 + weight * noise
    assert torch.allclose(prediction.velocity(target, x, t), noise - x0, rtol=0, atol=1e-12)
    assert prediction.state(x.bfloat16(), t.float()).dtype == torch.bfloat16
    assert prediction.velocity(target.bfloat16(), x.bfloat16(), t.float()).dtype == torch.float32
    frames = t[:, None].expand(-1, 3)
    assert torch.equal(prediction.velocity(target, x, frames), prediction.velocity(target, x, t))


def test_network_times_rise_and_stay_within_the_trained_ones():
    prediction = DiscretePrediction.from_scheduler(SCHEDULERS["noise"])
    found = prediction.network_time(torch.linspace(0, 1, 10001, dtype=torch.float64))
    assert found[0] == 0 and found[-1] == 999 and (found.diff() >= 0).all()
    assert prediction.network_time(torch.full((2, 3), 0.5)).shape == (2, 3)


@ALL
def test_derivatives_are_those_of_finite_differences(scheduler):
    """The derivatives are along the state and the time, through a network that depends on both."""
    prediction, x, direction = DiscretePrediction.from_scheduler(scheduler), draw(8), draw(9)
    t, rate = times(0.01, 0.1003, 0.3, 0.5, 0.7, 0.9), times(1.0, -0.5, 0.7, 1.0, 1.3, -2.0)

    def call(x, t):
        time = prediction.network_time(t)[:, None, None, None, None]
        output = (prediction.state(x, t) * 1.3).sin() * (1 + (time / 300).cos())
        return prediction.velocity(output, x, t)

    with forward_ad.dual_level():
        dual = call(forward_ad.make_dual(x, direction), forward_ad.make_dual(t, rate))
        tangent = forward_ad.unpack_dual(dual).tangent
    step = 1e-7
    difference = (call(x + step * direction, t + step * rate) - call(x - step * direction, t - step * rate)) / (
        2 * step
    )
    assert torch.allclose(tangent, difference, rtol=1e-6, atol=1e-6)
    functional = torch.func.jvp(call, (x, t), (direction, rate))[1]
    assert torch.allclose(functional, tangent, rtol=0, atol=1e-12)


def test_what_has_no_velocity_is_refused():
    prediction = DiscretePrediction([0.9, 0.5, 0.1], "epsilon")
    x = draw(10, 1)
    with pytest.raises(ValueError, match="t = 1"):
        prediction.velocity(x, x, times(1.0))
    for alphas, kind in (
        ([0.9, 0.5, 0.0], "epsilon"),  # the last level is noise alone
        ([0.9, 0.5, 0.5], "v_prediction"),
        ([1.0, 0.5, 0.1], "v_prediction"),
        ([0.9], "v_prediction"),
        ([0.9, 0.5, 0.1], "sample"),
    ):
        with pytest.raises(ValueError):
            DiscretePrediction(alphas, kind)
