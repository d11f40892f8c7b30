"""scm in fp64: against a dense reference with ``torch.func``, and on problems whose flow map is known."""

import math
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from distill.methods import METHODS, Batch, build_method
from distill.methods.scm import ScmSettings
from fsdp_cp.errors import UserError
from tests.oracles.samples import video
from tests.oracles.tiny_wan import text_condition
from tests.tiers import long, parametrize
from tests.unit import analytic
from tests.unit.analytic import PROBLEMS, TO_LEARN, ExactStudent, SmallNet, flow_map_error, normal, train
from tests.unit.method_roles import (
    SHAPE,
    TEXT,
    N,
    Net,
    close,
    gradients,
    is_normal,
    make_batch,
    null_text_of,
    random_at,
    text_of,
    wide,
)
from tests.unit.refused import refused, refuses_all

PROBLEM_NAMES = [type(problem).__name__ for problem in PROBLEMS]


def scm(teacher=None, student=None, **settings):
    settings = ScmSettings(**{"tangent_warmup": 0, "guidance_scale": 2.5, **settings})
    return build_method(settings, {"teacher": teacher or Net(20), "student": student or Net(21)})


def run(method, step=3, positions=range(4), batch=None):
    """Return the loss and the gradients of its backward."""
    (loss,) = method.losses(step, batch or make_batch(positions), random_at(step, positions))
    assert loss.name == "scm" and loss.weight == 1.0
    for role in method.roles.values():
        role.calls.clear()
        role.zero_grad()
    assert not any(role.calls for role in method.roles.values()), "losses are lazy: listing them must run nothing"
    value = loss.closure()
    value.backward()
    return value.detach()


def noised(call):
    """Return TrigFlow state and time of a role's call."""
    t = torch.atan2(call.t, 1 - call.t)
    return call.x * wide(torch.cos(t) + torch.sin(t)), t


# ---------------------------------------------------------------- against a dense reference


def reference(method, r):
    """Return loss and gradients by the formulas, at the student's last state."""
    settings, batch, student = method.settings, make_batch(), method.roles["student"]
    x, t = (value.detach() for value in noised(student.calls[-1]))
    cos, sin = torch.cos(wide(t)), torch.sin(wide(t))

    def field(formula, x, t):
        k = torch.cos(wide(t)) + torch.sin(wide(t))
        return ((torch.cos(wide(t)) - torch.sin(wide(t))) * x + formula(x / k, torch.sin(t) / k.flatten())) / k

    def students(parameters, x, t):
        def formula(x, t):
            return torch.func.functional_call(Formula(student), parameters, (x, t, text_of(batch)))

        return field(formula, x, t)

    def guided(x, t):
        c = method.roles["teacher"].formula(x, t, text_of(batch))
        u = method.roles["teacher"].formula(x, t, null_text_of(batch))
        return u + settings.guidance_scale * (c - u)

    teacher = field(guided, x, t).detach()
    parameters = {f"net.{name}": p.detach() for name, p in student.named_parameters()}
    fixed, derivative = torch.func.jvp(
        lambda x, t: students(parameters, x, t), (x, t), (cos * sin * teacher, (cos * sin).flatten())
    )
    if settings.tangent == "lu_song":
        g = -(cos**2) * (fixed - teacher) - r * cos * sin * x - r * derivative
    else:
        g = -cos * (1 - r**2 * sin**2).sqrt() * (fixed - teacher) - (r * cos * sin * x + derivative)
    norms = torch.stack([sample.square().sum().sqrt() for sample in g])
    g = math.sqrt(N) * g / (wide(norms) + 0.1)

    def loss(parameters):
        return (students(parameters, x, t) - fixed - g).square().sum() / (len(x) * N)

    return loss(parameters), torch.func.grad(loss)(parameters), norms, derivative


class Formula(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, t, text):
        return self.net.formula(x, t, text)


@pytest.mark.parametrize(
    ("warmup", "step", "r", "tangent", "scale"),
    [
        (0, 3, 1.0, "lu_song", 2.5),
        (10, 0, 0.0, "lu_song", 1.0),
        (10, 3, 0.3, "lu_song", 2.5),
        (10, 3, 0.3, "rcm", 2.5),
        (10, 10, 1.0, "rcm", 1.0),
        (10, 99, 1.0, "rcm", 2.5),
    ],
)
def test_loss_and_gradient_equal_the_dense_reference(scale, tangent, warmup, step, r):
    method = scm(guidance_scale=scale, tangent=tangent, tangent_warmup=warmup)
    loss = run(method, step)
    expected, expected_gradients, norms, derivative = reference(method, r)
    assert close(loss, expected, 1e-10)
    ours = gradients(method.roles["student"])
    assert ours.keys() == {"mix", "time", "caption"} and not gradients(method.roles["teacher"])
    for name, gradient in ours.items():
        assert close(gradient, expected_gradients[f"net.{name}"], 1e-9), name
    observed = method.observations.drain()
    assert observed["tangent_norm"] == pytest.approx((float(norms.sum()) / N**0.5, 4.0))
    assert observed["jvp_norm"][0] == pytest.approx(float(derivative.flatten(1).square().mean(1).sqrt().sum()))
    gradient = 2 * norms / (norms + 0.1)
    assert observed["output_gradient/scm"][0] == pytest.approx(float(gradient.sum()))
    by_time = [observed[f"loss/t{low:.2f}"] for low in (0, 0.25, 0.5, 0.75)]
    assert sum(total for total, _ in by_time) == pytest.approx(4 * float(loss)) and sum(n for _, n in by_time) == 4


def test_what_runs():
    """A step makes one guided teacher call, one dual student call and one with a gradient, all at one state."""
    method = scm()
    run(method)
    (teacher,), (dual, last) = method.roles["teacher"].calls, method.roles["student"].calls
    assert [call.with_grad for call in (teacher, dual, last)] == [False, False, True]
    batch = make_batch()
    assert torch.equal(teacher.text, torch.cat([text_of(batch), null_text_of(batch)]))
    assert torch.equal(last.text, text_of(batch))
    for call in (dual, last):
        assert torch.equal(torch.cat([call.x, call.x]), teacher.x) and torch.equal(call.t, teacher.t[:4])
    method = scm(jvp="finite_difference")
    run(method)
    assert [call.with_grad for call in method.roles["student"].calls] == [False, False, True]


# ---------------------------------------------------------------- what is drawn


def test_times_and_noise():
    """``log tan t`` is N(mean, std^2), drawn per sample. The noise is standard normal on the data."""
    method = scm(guidance_scale=1.0, time_mean=-0.3, time_std=1.2)
    method.roles["teacher"].formula = lambda x, t, text: x
    count = 1500
    data = normal(count, *SHAPE, seed=4)
    batch = Batch(
        latents=video(data),
        condition=text_condition(normal(count, *TEXT, seed=5), normal(*TEXT, seed=6), normal(*TEXT, seed=16)),
    )
    (loss,) = method.losses(1, batch, random_at(1, range(count)))
    loss.closure()
    x, t = noised(method.roles["teacher"].calls[0])
    assert stats.kstest(torch.log(torch.tan(t)).numpy(), "norm", (-0.3, 1.2)).pvalue > 1e-3
    noise = (x - torch.cos(wide(t)) * data) / torch.sin(wide(t))
    assert is_normal(noise[:, 0, 0, 0, 0])
    assert is_normal(noise[:100])
    assert abs(torch.corrcoef(torch.stack([noise[:, 0, 0, 0, 0], t]))[0, 1]) < 0.1


# ---------------------------------------------------------------- problems with a known answer


def on(problem, student, positions=32, **settings):
    """Build scm from ``problem``'s own velocity without guidance, and a batch of its data."""
    settings = {"guidance_scale": 1.0, "tangent_warmup": 0, **settings}
    method = build_method(ScmSettings(**settings), {"teacher": problem, "student": student})
    return method, analytic.make_batch(problem, positions), random_at(0, range(positions))


@parametrize(("problem", "tangent"), list(zip(PROBLEMS, ("rcm", "lu_song"), strict=True)), ids=PROBLEM_NAMES, quick=1)
def test_the_gradient_vanishes_at_the_flow_map(problem, tangent):
    student = ExactStudent(problem)
    method, batch, random = on(problem, student, tangent=tangent)
    (loss,) = method.losses(0, batch, random)
    loss.closure().backward()
    largest = max(p.grad.abs().max() for p in student.parameters())
    assert largest < 1e-8
    assert method.observations.drain()["tangent_norm"][0] / 32 < 1e-8
    student.zero_grad()
    with torch.no_grad():
        student.scale.fill_(0.01)
    loss.closure().backward()
    assert max(p.grad.abs().max() for p in student.parameters()) > 1e-3


@long
def test_a_student_converges_to_the_flow_map():
    """Training starts from the teacher's own prediction, whose error is most of the data's deviation."""
    problem = TO_LEARN[1]
    student = SmallNet(problem, width=32)
    assert flow_map_error(problem, student) > 0.6
    method, *_ = on(problem, student)
    train(method, problem, 500, 1e-2)
    assert flow_map_error(problem, student) < 0.15


def test_samples_of_the_exact_student_are_the_flow_maps():
    """The test takes one step, and two: the first result is noised to the second time."""
    problem = PROBLEMS[0]
    method, _, random = on(problem, ExactStudent(problem), 8)
    noise, condition = normal(8, *problem.shape, seed=6), analytic.nothing(8)
    first, second = 80 / 81, math.tan(1.5) / (1 + math.tan(1.5))

    def mapped(x, time):
        t = torch.full((8,), time, dtype=torch.float64)
        return problem.flow_map(x, t, torch.zeros_like(t))

    one = method.generate("student", video(noise), condition, 1, random).video
    torch.testing.assert_close(one, mapped(first * noise, first))
    two = method.generate("student", video(noise), condition, 2, random).video
    fresh = random.normal("sample/renoise_1", problem.shape, torch.float64)
    torch.testing.assert_close(two, mapped((1 - second) * one + second * fresh, second))


# ---------------------------------------------------------------- settings


def test_refused_settings():
    refuses_all(ScmSettings, {"time_std": 0.0}, {"jvp_step": -1e-4}, {"sigma_max": 0.0}, {"tangent_warmup": -1})
    refuses_all(ScmSettings, {"tangent": "tangent"}, {"jvp": "forward"}, {"shift": 0.0})
    refuses_all(ScmSettings, {"mid_times": [1.5, 1.5]}, {"mid_times": [1.4, 0.0]})
    refuses_all(ScmSettings, {"sigma_max": None, "mid_times": [1.6]})
    with refused("mid_times"):  # 1.5 is above where samples begin
        ScmSettings(sigma_max=10.0)


def student(**settings):
    return SimpleNamespace(**{"compile": False, "precision": "fp32", "fp8": "none", "fp8_gather": False, **settings})


@pytest.mark.parametrize("name", ["scm", "rcm", "meanflow"])
def test_refused_combinations(name):
    method, kind = METHODS[name]

    def check(jvp, **settings):
        method.check(SimpleNamespace(method=kind(jvp=jvp), student=student(**settings)))

    for accepted in (("exact", {}), ("exact", {"precision": "bf16", "compile": True}), ("finite_difference", {})):
        check(accepted[0], **accepted[1])
    with refused("student.precision"):
        check("finite_difference", precision="bf16")
    with refused("student.fp8_gather"):
        check("exact", fp8="torchao", fp8_gather=True)


def test_the_students_times():
    times = ScmSettings().student_times()
    assert times == pytest.approx([80 / 81] + [math.tan(t) / (1 + math.tan(t)) for t in (1.5, 1.4, 1.0)])
    method = scm()
    assert [len(method.sampling_times(n)) for n in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert method.sampling_times(2) == times[:2]
    for steps in (0, 5):
        with pytest.raises(UserError):
            method.sampling_times(steps)
    assert method.evaluations("student", 3) == 3 and method.evaluations("teacher", 3) == 6
