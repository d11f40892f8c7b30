"""ode_regression: its loss by the formula, states against Euler's method, the set that it reads."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from distill.data.settings import EncodedSettings, MovingShapesSettings
from distill.methods import build_method
from distill.methods.common.sampling import guided_states
from distill.methods.common.schedules import euler_times
from distill.methods.ode_regression import OdeRegression, OdeRegressionSettings
from fsdp_cp.rng import StepRandom
from models.causal import CausalSettings
from tests.encoded import open_set
from tests.oracles.samples import video
from tests.oracles.state_set import stored, write_state_set
from tests.oracles.tiny_wan import text_condition
from tests.unit.method_roles import SHAPE, TEXT, Net, close, gradients, make_batch, normal, run_loss, text_of
from tests.unit.refused import refused, refuses_all

TIMES = [1.0, 0.8, 0.5]


def ode_regression(student=None, **settings) -> OdeRegression:
    chosen = {"step_list": TIMES, "guidance_scale": 2.5, "shift": 3.0} | settings
    return build_method(OdeRegressionSettings(**chosen), {"student": student or Net(5)})


# ---------------------------------------------------------------- the loss


def test_loss_and_gradient_by_the_formula():
    method = ode_regression()
    student = method.roles["student"]
    loss, batch = run_loss(method, 0), make_batch()
    loss.backward()
    ours = gradients(student)
    student.zero_grad()
    (call,) = student.calls
    total = 0.0
    for i, t in enumerate(call.t.tolist()):
        state = batch.states.video[i, TIMES.index(t)]
        assert torch.equal(call.x[i], state)
        v = student.formula(state[None], call.t[i : i + 1], text_of(batch)[i : i + 1])[0]
        total = total + ((state - t * v - batch.latents.video[i]) ** 2).sum()
    truth = total / batch.latents.video.numel()
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-12)
    for name, gradient in gradients(student).items():
        assert close(ours[name], gradient), name
    assert torch.equal(call.text, text_of(batch)), "the guidance is in the states"


def test_states_are_drawn_evenly_for_each_sample():
    method = ode_regression()
    run_loss(method, 0, range(1200), make_batch(range(1200), 1200))
    t = method.roles["student"].calls[-1].t
    counts = [(t == time).sum().item() for time in TIMES]
    assert sum(counts) == 1200
    assert stats.chisquare(counts).pvalue > 1e-3


# ---------------------------------------------------------------- states


@pytest.mark.parametrize("times", [TIMES, [0.9, 0.2]])
def test_states_are_eulers_on_a_grid_with_their_times_in_it(times):
    teacher = Net(8)
    noise, text, null = normal(2, *SHAPE, seed=1), normal(2, *TEXT, seed=2), normal(*TEXT, seed=3)
    how = {"sampler": "euler", "steps": 7, "shift": 3.0, "guidance": 2.5, "states": times}
    random = StepRandom(seed=5, step=0, positions=[0, 1])
    ((*states, latents),) = guided_states(teacher, [video(noise)], text_condition(text, null), random, **how)
    grid = sorted({*euler_times(7, 3.0), *times}, reverse=True)
    x, wanted = noise, {}
    for t, following in zip(grid, grid[1:], strict=False):
        wanted[t] = x
        at = torch.full((2,), t, dtype=torch.float64)
        c, u = teacher.formula(x, at, text), teacher.formula(x, at, null.expand_as(text))
        x = x + (following - t) * (u + 2.5 * (c - u))
    assert len(states) == len(times) and close(latents.video, x)
    for state, time in zip(states, times, strict=True):
        assert close(state.video, wanted[time])


# ---------------------------------------------------------------- the data


def test_states_of_a_set_in_the_order_of_the_step_list(tmp_path):
    write_state_set(tmp_path / "set", 5, TIMES)
    data = open_set(tmp_path / "set", cache=tmp_path / "cache")
    assert "states" not in data[0] and data[0]["latents"].shape == data.latent_shapes["video"]
    chosen = data.with_states(OdeRegression.state_times(OdeRegressionSettings(step_list=[1.0, 0.5])))
    item = chosen[3]
    assert torch.equal(item["states"], stored(3, TIMES)["states"][[0, 2]])
    assert torch.equal(item["latents"], stored(3, TIMES)["latents"])
    assert item["caption"] == MovingShapesSettings().build(seed=0).caption(3)
    assert chosen.fingerprint == data.fingerprint
    torch.testing.assert_close(item["text"], MovingShapesSettings().build(seed=0)[3]["text"])


def test_training_needs_a_set_with_the_states_of_its_step_list(tmp_path):
    write_state_set(tmp_path / "set", 2, TIMES)

    def check(data, *times):
        config = SimpleNamespace(method=OdeRegressionSettings(step_list=[1.0, *times]), data=data)
        OdeRegression.check_files(config, {"student": None})

    encoded = EncodedSettings(path=str(tmp_path / "set"))
    check(encoded, 0.5)
    with refused("method.step_list"):
        check(encoded, 0.75)
    with refused("data=moving_shapes"):
        check(MovingShapesSettings(), 0.5)
    with refused("distill.encode"):
        check(EncodedSettings(path=str(tmp_path)), 0.5)


def test_a_set_says_whose_states_it_has(tmp_path, caplog):
    def check(path, student):
        config = SimpleNamespace(method=OdeRegressionSettings(step_list=TIMES), data=EncodedSettings(path=str(path)))
        caplog.clear()
        with caplog.at_level("INFO"):
            OdeRegression.check_files(config, {"student": student})
        return caplog.text

    causal = CausalSettings(chunk=2, first_chunk=1)
    write_state_set(tmp_path / "of all frames", 2, TIMES)
    write_state_set(tmp_path / "by chunks", 2, TIMES, causal=causal)
    assert "bidirectional" in (line := check(tmp_path / "of all frames", None)) and "poor" not in line
    assert "poor" in check(tmp_path / "of all frames", causal)
    assert "causal (chunk=2)" in check(tmp_path / "by chunks", replace(causal, window=1))
    assert "causal" in check(tmp_path / "by chunks", None)
    for name, value in {"chunk": 3, "first_chunk": 2, "context_time": 0.1}.items():
        with refused(f"student.causal.{name}"):
            check(tmp_path / "by chunks", replace(causal, **{name: value}))


# ---------------------------------------------------------------- settings


def test_settings():
    assert OdeRegression.roles_needed(OdeRegressionSettings()) == ("student",)
    assert not OdeRegression.needs_latents(OdeRegressionSettings()), "captions are enough"
    refuses_all(OdeRegressionSettings, {"step_list": [1.0, 0.0]})
