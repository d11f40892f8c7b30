"""``first_role`` names the role whose forward is the first of a step. Only its gather may start early."""

import pytest
import torch

from distill.methods import METHODS, Batch, build_method
from tests.oracles.samples import Stub, video
from tests.unit.method_roles import SHAPE, make_batch, normal, random_at

SETTINGS = {
    "dmd2": {},
    "dmd2 with a GAN": {"gan_weight_student": 1e-3},
    "rcm": {"consistency_steps": 2, "student_every": 2},
    "scm": {"jvp": "finite_difference"},
    "meanflow": {"guidance_scale": 1.0},
    "meanflow without a teacher": {"guidance_scale": 1.0, "velocity": "data"},
    "dcm": {},
    "ode_regression": {},
    "flow_matching": {},
}


class Called(Exception):
    pass


class Alarm(Stub, torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def of_video(self, *_, **__):
        raise Called(self.name)

    logits = of_video


@pytest.mark.parametrize("case", SETTINGS)
def test_the_first_role_of_every_step(case):
    method_class, settings_class = METHODS[case.split()[0]]
    settings = settings_class(**SETTINGS[case])
    roles = method_class.roles_needed(settings)
    method = build_method(settings, {name: Alarm(name) for name in roles})
    whole = make_batch()
    batch = Batch(
        latents=whole.latents,
        condition=whole.condition,
        states=video(normal(4, 4, *SHAPE, seed=4)) if case == "ode_regression" else None,
    )
    by_settings = method_class(settings, {})  # as a run's settings are checked, before there are roles
    for step in range(12):
        with pytest.raises(Called) as called:
            next(iter(method.losses(step, batch, random_at(step)))).closure()
        assert str(called.value) == method.first_role(step) == by_settings.first_role(step)
