"""pdd in fp64 on data whose paths are known in closed form, of video alone and with sound."""

from dataclasses import replace

import pytest
import torch

from distill.methods import Batch, build_method
from distill.methods.pdd import Pdd, PddSettings
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.rng import StepRandom
from models.additions.heads import Grid
from models.sample import Sample
from tests.oracles.samples import video
from tests.unit.analytic import Gaussian, Mixture, normal, nothing
from tests.unit.refused import refuses_all

SHAPE = (2, 2, 2, 2)
PROBLEMS = {"video": Gaussian(SHAPE), "audio": Gaussian(SHAPE, seed=5)}
COUNT = 3


class Parts:
    """Role with the exact velocity of each part at the part's own time."""

    has_experts, causal, boundaries = False, None, ()

    def __init__(self, problems, shifts=None):
        self.problems, self.calls = problems, 0
        self.family = type("Family", (), {"parts": shifts or dict.fromkeys(problems, 1.0)})

    kept_gathered = staticmethod(torch.no_grad)

    def velocity(self, x, t, condition, at=None, clean=None):
        self.calls += 1
        parts = {p: self.problems[p].of_video(part, x.time(p, t), condition) for p, part in x.parts.items()}
        return replace(x, parts=parts)


class Exact(Parts):
    """Student whose heads are the mean velocities of the exact paths, or of the teacher's Euler steps."""

    def __init__(self, problems, shifts=None, *, euler=False, grid=None):
        super().__init__(problems, shifts)
        self.euler, self.grid = euler, grid

    def velocity(self, x, t, condition, heads):
        times, made = {p: g for p, g in self.grid.times.items() if p in x.parts}, []
        start = int((torch.tensor(times["video"]).double() - t[0]).abs().argmin())
        for part, own in times.items():
            z, means = x.parts[part], []
            for k, (a, b) in enumerate(zip(own, own[1:], strict=False)):
                now, then = (torch.full((len(z),), time, dtype=torch.float64) for time in (a, b))
                if k < start:
                    means.append(torch.full_like(z, torch.nan))
                    continue
                if self.euler:
                    moved = z + (b - a) * self.problems[part].of_video(z, now, condition)
                else:
                    moved = self.problems[part].flow_map(z, now, then)
                means.append((moved - z) / (b - a))
                z = moved
            rows = heads[part]
            made.append([sum(w * mean for w, mean in zip(row, means, strict=True) if w) for row in rows])
        return replace(x, parts={p: torch.cat(outputs) for p, outputs in zip(times, made, strict=True)})


def pdd(student, teacher, **settings) -> Pdd:
    chosen = {"grid_steps": 8, "steps": [1], "guidance_scale": 1.0, "shift": 3.0} | settings
    method = build_method(PddSettings(**chosen), {"teacher": teacher, "student": student})
    student.grid = method.grid
    return method


def batch_of(parts) -> Batch:
    shapes, shifts = dict.fromkeys(parts, SHAPE), dict(parts)
    return Batch(latents=None, condition=nothing(COUNT), latent_shapes=shapes, latent_shifts=shifts)


def values(method, batch, step=0):
    random = StepRandom(seed=5, step=step, positions=range(COUNT))
    return [loss.weight * loss.closure() for loss in method.losses(step, batch, random)]


# ---------------------------------------------------------------- known answers


@pytest.mark.parametrize("solver", ["euler", "midpoint"])
def test_the_error_of_the_teachers_step_falls_with_its_order(solver):
    """In the midpoint's second call the sound is at the middle of its own interval; elsewhere it is off by 3e-3."""
    shifts, errors = {"video": 1.0, "audio": 0.25}, []
    for intervals in (16, 32, 64):
        method = pdd(
            Exact(PROBLEMS, shifts), Parts(PROBLEMS, shifts), shift=12.0, solver=solver, grid_steps=intervals,
            targets=intervals,
        )  # fmt: skip
        values(method, batch_of(shifts))
        drained = method.observations.drain()
        sums, counts = torch.tensor([drained[f"loss/{part}"] for part in shifts]).T
        errors.append((sums / counts).sqrt())
    least = {"euler": 1.8, "midpoint": 3.4}[solver]
    for coarse, fine in zip(errors, errors[1:], strict=False):
        assert (coarse / fine > least).all(), errors
    assert errors[1][1] < 3e-4 if solver == "midpoint" else (errors[0] / errors[1] < 2.5).all()


@pytest.mark.parametrize("blocks", ["one", "all"])
def test_exact_heads_are_the_teachers_steps(blocks):
    """A block is its L Euler steps, and nothing is left to learn, in any number of steps."""
    problem = {"video": Mixture(SHAPE)}
    method = pdd(
        Exact(problem, euler=True), Parts(problem), solver="euler", steps=[1, 2, 4], blocks=blocks, grid_steps=16
    )
    for step in range(6):
        assert all(value < 1e-20 for value in values(method, batch_of({"video": 1.0}), step))
    noise, random = video(normal(COUNT, *SHAPE, seed=8)), StepRandom(seed=0, step=0, positions=range(COUNT))
    path = method.generate("teacher", noise, nothing(COUNT), 16, random).video
    for steps in (1, 2, 4):
        sample = method.generate("student", noise, nothing(COUNT), steps, random).video
        assert relative_error(sample, path) < 1e-12
        assert method.evaluations("student", steps) == steps
    other = pdd(Exact(problem), Parts(problem), solver="euler", grid_steps=16)
    assert values(other, batch_of({"video": 1.0}))[0] > 1e-6, "the comparison can fail"


@pytest.mark.parametrize(("blocks", "losses"), [("one", {1}), ("all", {1, 2, 4})])
def test_a_step_trains_one_block_or_all(blocks, losses):
    """The blocks of a rollout follow each other; each compares its own intervals."""
    problem, seen, counts = {"video": Mixture(SHAPE)}, set(), set()
    teacher = Parts(problem)
    method = pdd(Exact(problem, euler=True), teacher, steps=[1, 2, 4], blocks=blocks, targets=2)
    inner = teacher.velocity
    teacher.velocity = lambda x, t, *rest, **named: seen.add(round(t[0].item(), 6)) or inner(x, t, *rest, **named)
    for step in range(30):
        counts.add(len(values(method, batch_of({"video": 1.0}), step)))
    assert counts == losses
    assert {round(t, 6) for t in method.grid.times["video"][:-1]} <= seen, "every interval is a target"


def test_a_grid_has_each_parts_own_times():
    grid = Grid(intervals=4, shift=12.0, parts={"video": 1.0, "audio": 0.25})
    for part, shift in (("video", 12.0), ("audio", 3.0)):
        even = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0], dtype=torch.float64)
        wanted = shift * even / (1 + (shift - 1) * even)
        assert torch.allclose(torch.tensor(grid.times[part], dtype=torch.float64), wanted, rtol=1e-14)
        row = torch.tensor(grid.mean((1, 3))[part], dtype=torch.float64)[0]
        lengths = (wanted[:-1] - wanted[1:]) * torch.tensor([0.0, 1.0, 1.0, 0.0])
        assert torch.allclose(row, lengths / lengths.sum(), rtol=1e-6)


def test_a_sample_between_the_times_of_one_clock():
    x = Sample({"video": torch.zeros(1), "audio": torch.zeros(1)}).on_clock({"video": 0.9, "audio": 0.4})
    assert [x.time(part, 0.9) for part in x.parts] == pytest.approx([0.9, 0.4], abs=1e-15)


def test_settings_that_do_not_fit():
    refuses_all(PddSettings, {"steps": [4, 2]}, {"steps": []}, {"steps": [2, 2]}, {"steps": [3], "grid_steps": 32})
