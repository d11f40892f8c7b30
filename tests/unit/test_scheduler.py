"""The scheduler that is exported with a student: it has the trained times and the student's update."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from distill.methods.common.sampling import rollout
from distill.methods.common.schedules import shift_time
from distill.methods.meanflow import MeanFlow, MeanFlowSettings
from distill.methods.rcm import Rcm, RcmSettings
from fsdp_cp.context.check_parallel import relative_error
from models.export_folder import export_schedulers
from models.files.scheduler import TOLERANCE, few_step_scheduler
from models.roles.role import Role
from tests.oracles.samples import video
from tests.unit.method_roles import SHAPE, Net, dmd2, make_batch, text_of
from tests.unit.refused import refused

PUBLISHED = [1.0, 0.9375, 0.8333, 0.625]


def times_of(scheduler, steps):
    scheduler.set_timesteps(steps)
    assert scheduler.timesteps.tolist() == pytest.approx([1000 * t for t in scheduler.sigmas[:-1].tolist()])
    assert scheduler.sigmas[-1] == 0
    return scheduler.sigmas[:-1].tolist()


@pytest.mark.parametrize(
    ("times", "within"),
    [([shift_time(1 - i / n, s) for i in range(n)], 1e-6) for n, s in ((1, 5.0), (2, 0.3), (4, 12.0), (16, 5.0))]
    + [(PUBLISHED, 2e-5), ([1.0, 0.4], 1e-6), ([1.0, 0.9, 0.2], 1e-6)],
)
def test_shifted_grids_and_step_lists_are_met(times, within):
    assert times_of(few_step_scheduler(times, stochastic=True), len(times)) == pytest.approx(times, abs=within)


@pytest.mark.parametrize("moved", [0.4, 3.0])
def test_a_list_is_met_within_the_tolerance_or_refused(moved):
    """The nearest scheduler splits the difference if one time of a grid is off."""
    times = [shift_time(t, 5.0) for t in (1.0, 0.75, 0.5, 0.25)]
    times[1] += moved * TOLERANCE
    if moved < 1:
        assert times_of(few_step_scheduler(times, stochastic=True), 4) == pytest.approx(times, abs=TOLERANCE)
    else:
        with refused("times"):
            few_step_scheduler(times, stochastic=True)


def test_other_lists_are_refused_by_name():
    for times in ([1.0, 0.999, 0.2], [80 / 81, 0.934, 0.853, 0.609], [0.98]):
        with refused(f"{times[0]:.6g}"):
            few_step_scheduler(times, stochastic=True)


def test_saved_and_loaded_as_a_pipeline_loads_it(tmp_path):
    folder = tmp_path / "export" / "scheduler"
    export_schedulers(folder.parent, {"scheduler": few_step_scheduler([1.0, 0.4], stochastic=True)})
    export_schedulers(folder.parent, {"scheduler": few_step_scheduler(PUBLISHED, stochastic=True)})
    loaded = FlowMatchEulerDiscreteScheduler.from_pretrained(folder)
    assert times_of(loaded, 4) == pytest.approx(PUBLISHED, abs=2e-5)
    export_schedulers(folder.parent, {})
    assert list(folder.parent.iterdir()) == [], "what an earlier export left would be another student's"


class TorchDraws:
    """Fresh noise as diffusers draws it: from torch's global stream, in order."""

    def normal(self, purpose, shape, dtype):
        return torch.randn(4, *shape, dtype=torch.float32).to(dtype)


def steps_of(scheduler, student, noise, text):
    """Run diffusers' loop in fp64, except for what the scheduler rounds to fp32."""
    x = noise
    for t in scheduler.timesteps:
        v = student.formula(x, (t.double() / 1000).expand(len(x)), text)
        x = scheduler.step(v, t, x).prev_sample
    return x


@pytest.mark.parametrize("sampler", ["renoise", "ode"])
@pytest.mark.parametrize("times", [[1.0, 0.4], PUBLISHED])
def test_its_update_is_the_students(times, sampler):
    student, batch = Net(3), make_batch()
    scheduler = few_step_scheduler(times, stochastic=sampler == "renoise")
    exact = times_of(scheduler, len(times))
    torch.manual_seed(5)
    noise = torch.randn(4, *SHAPE).double()
    theirs = steps_of(scheduler, student, noise, text_of(batch))

    def ours(times):
        torch.manual_seed(5)
        noise = torch.randn(4, *SHAPE).double()
        return rollout(student, video(noise), batch.condition, times, TorchDraws(), "renoise", sampler=sampler).x0.video

    def off(times):
        return relative_error(ours(times), theirs)

    assert off(exact) < 1e-6
    assert off(times) < 1e-4, "what it costs that the times are met to 1e-5"
    assert off([*times[:-1], times[-1] - 0.01]) > 3e-4, "the checks above can tell times apart"


def student_with(*boundaries):
    """Return a student with boundaries alone."""
    student = object.__new__(Role)
    student.boundaries = boundaries
    return student


@pytest.mark.parametrize(
    ("boundary", "times"),
    [
        (0.875, [1.0, 0.9545, 0.875, 0.7]),
        (0.875, [1.0, 0.9545, 0.8749, 0.7]),
        (0.875, [shift_time(1 - i / 8, 7.0) for i in range(8)]),
        (0.9, [1.0, 0.9, 0.5]),
        (0.875, [1.0, 0.875]),
        (0.625, PUBLISHED),
        (0.8333, PUBLISHED),
    ],
)
def test_a_pipeline_runs_the_expert_that_was_trained(boundary, times):
    """diffusers takes the first expert where a time is not below the boundary times 1000."""
    student = student_with(boundary)
    scheduler = few_step_scheduler(**dmd2(student, step_list=times).few_steps)
    assert times_of(scheduler, len(times)) == pytest.approx(times, abs=TOLERANCE)
    served = [0 if t >= boundary * 1000 else 1 for t in scheduler.timesteps]
    assert served == [student.expert_at(t) for t in times]


def test_a_scheduler_that_would_run_the_other_expert_is_withheld():
    times = [1.0, 0.936, 0.8333, 0.625]
    assert times_of(few_step_scheduler(**dmd2(student_with(), step_list=times).few_steps), 4)[2] < 0.8324
    with refused("0.8333"):
        few_step_scheduler(**dmd2(student_with(0.8333), step_list=times).few_steps)


@pytest.mark.parametrize("sampler", ["renoise", "ode"])
def test_methods_give_their_students_scheduler(sampler):
    method = dmd2(student_with(), step_list=PUBLISHED, student_sampler=sampler)
    scheduler = few_step_scheduler(**method.few_steps)
    assert times_of(scheduler, 4) == pytest.approx(PUBLISHED, abs=2e-5)
    assert scheduler.config.stochastic_sampling == (sampler == "renoise")
    assert MeanFlow(MeanFlowSettings(), {}).few_steps is None, "its network is not one of diffusers'"
    with refused("0.987654"):
        few_step_scheduler(**Rcm(RcmSettings(), {"student": student_with()}).few_steps)
