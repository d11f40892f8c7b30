"""Times by phase: parts of a whole, each without the phases inside it."""

import random
import time
from types import SimpleNamespace

import pytest
import torch

from distill.train.metrics import speed
from fsdp_cp.measure import phases
from fsdp_cp.measure.phases import PhaseTimes, phase

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """Stand in for the clock, which stands still unless moved. Whole numbers make sums exact."""
    now = SimpleNamespace(seconds=0)
    monkeypatch.setattr(
        phases, "time", SimpleNamespace(perf_counter=lambda: float(now.seconds), monotonic=time.monotonic)
    )
    return now


def _tree(draw, clock, inside, expected, depth=0):
    """Run random nested phases, and add the time of each to ``expected``."""
    for _ in range(draw.randrange(1, 4)):
        spent = draw.randrange(5)
        clock.seconds += spent
        expected[inside] = expected.get(inside, 0) + spent
        if depth < 4 and draw.random() < 0.7:
            name = draw.choice("abcd")
            with phase(name):
                expected.setdefault(name, 0)
                _tree(draw, clock, name, expected, depth + 1)


@pytest.mark.parametrize("seed", range(8))
def test_each_phase_has_its_own_time_and_all_of_them_the_whole(clock, seed):
    draw, expected = random.Random(seed), {"": 0}
    clock.seconds = start = draw.randrange(100)
    with PhaseTimes(CPU) as times:
        _tree(draw, clock, "", expected)
    assert times.seconds() == expected
    assert sum(times.seconds().values()) == clock.seconds - start
    clock.seconds += 7
    with phase("a"):
        clock.seconds += 7
    assert times.seconds() == expected, "what comes later is none of its own"


def test_a_phase_that_fails_leaves_the_others_right(clock):
    with PhaseTimes(CPU) as times:
        with pytest.raises(ZeroDivisionError), phase("a"):
            raise ZeroDivisionError
        with phase("b"):
            clock.seconds += 3
    assert times.seconds()["b"] == 3
    with pytest.raises(KeyError), PhaseTimes(CPU):
        raise KeyError
    assert not phases._at_borders


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_kernels_are_timed_and_not_their_launch():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    with PhaseTimes(device) as times:
        with phase("long"):
            for _ in range(20):
                x @ x
        with phase("short"):
            x.sum().item()  # the host waits here
    found = times.seconds()
    assert found["long"] > 5 * found["short"]


def test_the_metrics_of_a_step():
    phases_of_it = {"": 0.5, "data": 0.25, "student/gradients": 0.25, "student/dmd/backward": 1.0, "metrics": 0.0}
    found = speed("student", seconds=2.0, phases=phases_of_it, samples=4, tokens=1024, flops=6e12, peak=12e12)
    assert found == {
        "perf/seconds_per_step": 2.0,
        "perf/samples_per_second": 2.0,
        "perf/tokens": 1024,
        "perf/tokens_per_second": 512.0,
        "perf/flops": 6e12,
        "perf/mfu": 0.25,
        "perf/seconds/student": 2.0,
        "perf/seconds/student/other": 0.5,
        "perf/seconds/student/data": 0.25,
        "perf/seconds/student/gradients": 0.25,
        "perf/seconds/student/dmd/backward": 1.0,
        "perf/seconds/student/metrics": 0.0,
    }
    assert speed("fake", seconds=2.0, phases={}, samples=4, tokens=8, flops=1.0, peak=None)["perf/mfu"] is None
