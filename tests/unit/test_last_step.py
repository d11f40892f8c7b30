"""``fake_knows_last_step``: the time that the fake score of DMD2 and rCM receives, and its effect."""

import pytest
import torch
from torch import nn

from distill.methods import METHODS, build_method
from distill.methods.dmd2 import Dmd2Settings
from distill.methods.rcm import RcmSettings
from models.families.wan import Wan
from models.roles.role_plan import build_additions
from tests.unit.method_roles import Judge, Net, make_batch, random_at

DMD2 = {"step_list": [1.0, 0.8, 0.5], "fake_updates_per_student_update": 1}
SETTINGS = {
    "dmd2 with a GAN": Dmd2Settings(**DMD2, fake_knows_last_step=True, gan_weight_student=0.1, gan_r1_weight=0.1),
    "rcm": RcmSettings(consistency_steps=0, student_every=2, fake_knows_last_step=True, jvp="finite_difference"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_the_fake_score_is_told_when_the_last_step_was_and_no_other_role_is(case):
    roles = {"teacher": Net(20), "student": Net(21), "fake": Judge(22)}
    method = build_method(SETTINGS[case], roles)
    lengths = set()
    for step in range(24):
        for role in roles.values():
            role.calls.clear()
            role.logit_calls.clear()
        for loss in method.losses(step, make_batch(), random_at(step)):
            if loss.name == "scm":
                continue
            loss.closure()
        student = roles["student"].calls
        lengths.add(len(student))
        calls = roles["fake"].calls + roles["fake"].logit_calls
        assert len(calls) == (2 if "GAN" in case else 1)
        for call in calls:
            assert torch.equal(call.r, student[-1].t.repeat(len(call.x) // 4)), "the time of each sample's own rollout"
        assert all(call.r is None for name in ("teacher", "student") for call in roles[name].calls)
    assert lengths >= {1, 2, 3}


@pytest.mark.parametrize("case", SETTINGS)
def test_without_it_nothing_is_told_and_nothing_is_added(case):
    kind = METHODS[case.split()[0]][0]
    settings = SETTINGS[case]
    assert "last_step" in kind.additions(settings)["fake"]
    plain = type(settings)(**vars(settings) | {"fake_knows_last_step": False})
    assert "last_step" not in kind.additions(plain).get("fake", {})
    roles = {"teacher": Net(20), "student": Net(21), "fake": Judge(22)}
    method = build_method(plain, roles)
    for step in range(4):
        for loss in method.losses(step, make_batch(), random_at(step)):
            loss.closure()
    assert all(call.r is None for call in roles["fake"].calls + roles["fake"].logit_calls)


def test_the_addition_embeds_the_second_time_itself():
    """The addition embeds ``r`` itself and not the interval, which differs at each time of the score."""
    config = {"freq_dim": 8, "num_attention_heads": 2, "attention_head_dim": 4}
    network = nn.Module()
    network.condition_embedder = nn.Module()
    network.condition_embedder.time_embedder = nn.Identity()
    addition = build_additions(("last_step",), Wan(), config)["last_step"]
    addition.attach(network, Wan(), None)
    nn.init.normal_(addition.linear_2.weight)
    t, r = torch.tensor([0.2, 0.9]), torch.tensor([0.5, 0.5])

    def called(t, r):
        with addition.at(t, r):
            return network.condition_embedder.time_embedder(torch.zeros(2, 8))

    out = called(t, r)
    assert torch.equal(out[0], out[1]) and out.abs().max() > 1e-2
    assert not torch.allclose(called(t, r + 0.3), out)
    with pytest.raises(RuntimeError):
        network.condition_embedder.time_embedder(torch.zeros(2, 8))
