"""A first frame in its place, against the lines of diffusers' pipeline that insert it."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.autograd import forward_ad

from models.condition import Condition
from models.families.diffusers_family import hold_first_frame, insert_first_frame, token_times
from models.families.wan import Wan
from tests.oracles.samples import video
from tests.oracles.tiny_wan import ARCHITECTURE, TEXT_SHAPE
from tests.unit.refused import refused

X = (2, 4, 3, 6, 8)
FRAME = (2, 4, 1, 6, 8)
CONDITION = {"text": TEXT_SHAPE, "first_frame": FRAME[1:]}


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_times_and_states_are_those_of_the_pipeline():
    """diffusers 0.42's pipeline_wan_i2v.py has the mask, the mixed latents, and the times of tokens in their order."""
    x, frame, t = draw(*X), draw(*FRAME), torch.tensor([0.3, 0.9], dtype=torch.float64)
    mask = torch.ones(1, 1, *X[2:], dtype=torch.float64)
    mask[:, :, 0] = 0
    assert torch.equal(insert_first_frame(x, frame), (1 - mask) * frame + mask * x)
    for i in range(2):
        wanted = (mask[0][0][:, ::2, ::2] * t[i]).flatten()
        assert torch.equal(token_times(t, x, (1, 2, 2))[i], wanted)


@pytest.mark.parametrize("t", [0.5, 1e-5])
def test_the_velocity_leads_to_the_frame_and_stays_on_its_way(t):
    x, frame, v = draw(*X), draw(*FRAME), draw(*X)
    times = torch.full((2,), t, dtype=torch.float64)
    with forward_ad.dual_level():
        held = hold_first_frame(v, x, times, frame)
        torch.testing.assert_close((x - t * held)[:, :, :1], frame)
        assert torch.equal(held[:, :, 1:], v[:, :, 1:])
        duals = forward_ad.make_dual(x, held), forward_ad.make_dual(times, torch.ones_like(times))
        along = forward_ad.unpack_dual(hold_first_frame(v, *duals, frame)).tangent[:, :, :1]
    assert along.abs().max() < 1e-9 / t**2, "a straight line: its velocity does not change along it"


def test_at_no_noise_it_is_finite():
    x = draw(*X)
    assert torch.equal(
        hold_first_frame(draw(*X), x, torch.zeros(2, dtype=torch.float64), x[:, :, :1])[:, :, :1], x[:, :, :1] * 0
    )


def test_without_a_frame_the_network_is_called_as_ever():
    seen = {}

    class Recorder(torch.nn.Module):
        config = ARCHITECTURE

        def forward(self, **given):
            seen.update(given)
            return (given["hidden_states"],)

    x, t = draw(*X), torch.tensor([0.3, 0.9], dtype=torch.float64)
    v = Wan().outputs(Recorder(), video(x), t, Condition({"text": draw(2, *TEXT_SHAPE)})).velocity.video
    assert torch.equal(v, x) and seen["hidden_states"] is x and torch.equal(seen["timestep"], 1000 * t)


@pytest.mark.parametrize(
    ("changes", "latents", "frame", "named"),
    [
        ({}, X[1:], (4, 1, 6, 6), "first_frame"),
        ({}, (4, 1, 6, 8), FRAME[1:], "data.image"),
        ({"patch_size": (2, 2, 2)}, (4, 4, 6, 8), FRAME[1:], "teacher.checkpoint"),
        ({"in_channels": 12, "image_dim": 14, "added_kv_proj_dim": 48}, X[1:], FRAME[1:], "teacher.checkpoint"),
    ],
)
def test_refusals(changes, latents, frame, named):
    with torch.device("meta"):
        config = dict(WanTransformer3DModel(**ARCHITECTURE | changes).config)
    with refused(named):
        Wan().check_sample(config, {"video": latents}, CONDITION | {"first_frame": frame}, "teacher.checkpoint")
