"""Rectified flow's formulas against their definitions."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from distill.methods.common.schedules import add_noise, denoise, euler_times
from models.sample import shift_time
from tests.oracles.samples import video


@pytest.fixture
def clean_and_noise():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 2, 4, 5, 6, dtype=torch.float64, generator=generator).unbind(0)


def test_each_frame_can_have_its_own_time(clean_and_noise):
    x0, noise = clean_and_noise
    t = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x_t, v = add_noise(video(x0), video(noise), t).video, noise - x0
    for frame in range(4):
        assert torch.equal(
            x_t[:, :, frame], add_noise(video(x0[:, :, frame]), video(noise[:, :, frame]), t[:, frame]).video
        )
    assert torch.allclose(denoise(video(x_t), video(v), t).video, x0, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shift", [0.5, 3.0])
def test_shift_keeps_the_ends_and_multiplies_the_odds(shift):
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    shifted = shift_time(t, shift)
    assert shifted[0] == 0 and shifted[-1] == 1 and (shifted.diff() > 0).all()
    odds = t[1:-1] / (1 - t[1:-1])
    assert torch.allclose(shifted[1:-1] / (1 - shifted[1:-1]), shift * odds, rtol=1e-12)
    assert [shift_time(number, shift) for number in t.tolist()] == pytest.approx(shifted.tolist(), abs=1e-15)


@pytest.mark.parametrize(("steps", "shift"), [(1, 5.0), (50, 1.0), (4, 5.0)])
def test_euler_times_descend_from_one_to_zero_as_in_diffusers(steps, shift):
    times = euler_times(steps, shift)
    assert len(times) == steps + 1 and times[0] == 1.0 and times[-1] == 0.0
    assert all(a > b for a, b in zip(times, times[1:], strict=False))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    assert scheduler.sigmas.tolist() == pytest.approx(times, abs=1e-6)
    assert math.isclose(times[-2], shift / (steps + shift - 1))
