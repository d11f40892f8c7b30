"""Shares of time in collectives: against counting on a fine grid, and of traces whose times are known."""

import random

import pytest

from fsdp_cp.measure.overlap import Interval, by_name, shares, trace_intervals, trace_windows

GRID = 200
"""All times are whole numbers below this, so that a cell of the grid lies inside of an interval or outside."""


def spans(draw, most, longest=40):
    starts = [draw.randrange(GRID) for _ in range(draw.randrange(most + 1))]
    return [(start, min(GRID, start + draw.randrange(longest))) for start in starts]


def cells(some):
    return {cell for start, end in some for cell in range(start, end)}


@pytest.mark.parametrize("seed", range(30))
def test_the_shares_are_those_that_cells_of_a_grid_count(seed):
    draw = random.Random(seed)
    kinds, most = ("collective", "compute", "waiting"), draw.choice((2, 12))
    intervals = [
        Interval(start, end, kind, stream) for kind in kinds for stream in range(3) for start, end in spans(draw, most)
    ]
    draw.shuffle(intervals)
    windows = spans(draw, 4, longest=120) or [(0, GRID)]
    counted = cells(windows)
    if not counted:
        with pytest.raises(ValueError, match="no length"):
            shares(intervals, windows)
        return
    computing, communicating = set(), set()
    for cell in range(GRID):
        here = {(i.kind, i.stream) for i in intervals if i.start <= cell < i.end}
        if any(("compute", s) in here and ("waiting", s) not in here for s in range(3)):
            computing.add(cell)
        if any(kind == "collective" for kind, _ in here):
            communicating.add(cell)
    found = shares(intervals, windows)
    assert found.collectives == pytest.approx(len(counted & communicating) / len(counted), abs=1e-12)
    assert found.exposed == pytest.approx(len((counted & communicating) - computing) / len(counted), abs=1e-12)
    assert found.compute == pytest.approx(len(counted & computing) / len(counted), abs=1e-12)


def event(cat, name, start, length, thread=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "tid": thread, "pid": 9, "args": args}


def test_a_trace_of_the_cpu():
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 9, "ts": 0.0},
            event("user_annotation", "ProfilerStep#20", 0.0, 100.0),
            event("user_annotation", "ProfilerStep#21", 150.0, 100.0),
            event("user_annotation", "student/update", 0.0, 90.0),
            # 40 us in flight, 25 of them beside a product, of which 5 wait for something else.
            event("user_annotation", "gloo:all_gather", 10.0, 40.0, thread=2),
            event("cpu_op", "aten::copy_", 12.0, 30.0, thread=2),  # gloo's own
            event("cpu_op", "aten::mm", 20.0, 30.0),
            event("cpu_op", "_c10d_functional::wait_tensor", 30.0, 5.0),
            event("cpu_op", "c10d::allreduce_", 60.0, 1.0),
            event("user_annotation", "gloo:all_gather", 110.0, 40.0, thread=2),  # between the steps
            event("user_annotation", "gloo:all_reduce", 240.0, 20.0, thread=3),  # half of it in the step
        ]
    }  # fmt: skip
    windows = trace_windows(trace)
    assert windows == {20: (0.0, 100.0), 21: (150.0, 250.0)}
    intervals = trace_intervals(trace, "cpu")
    found = shares(intervals, windows.values())
    assert found.collectives == pytest.approx((40 + 10) / 200)
    assert found.exposed == pytest.approx((40 - 25 + 10) / 200)
    assert found.compute == pytest.approx(25 / 200)
    assert by_name(intervals, windows.values()) == {
        "gloo:all_gather": {"calls": 1, "seconds": pytest.approx(40e-6)},
        "gloo:all_reduce": {"calls": 1, "seconds": pytest.approx(20e-6)},
    }
    assert trace_intervals(trace, "cuda") == [], "no kernel ran"


def test_a_trace_of_a_gpu():
    """The kernels count, on whatever stream; neither copies nor what the host did."""
    trace = {
        "traceEvents": [
            event("user_annotation", "ProfilerStep#3", 0.0, 100.0),
            event("gpu_user_annotation", "ProfilerStep#3", 5.0, 60.0),
            event("cpu_op", "aten::mm", 0.0, 100.0),
            event("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 10.0, 40.0, stream=20),
            event("kernel", "sm90_xmma_gemm_bf16", 30.0, 30.0, stream=7),
            event("gpu_memcpy", "Memcpy DtoD", 10.0, 10.0, stream=7),
        ]
    }
    windows = trace_windows(trace)
    assert windows == {3: (0.0, 100.0)}
    intervals = trace_intervals(trace, "cuda")
    found = shares(intervals, windows.values())
    assert (found.collectives, found.exposed, found.compute) == pytest.approx((0.4, 0.2, 0.3))
    assert list(by_name(intervals, windows.values())) == ["ncclDevKernel_AllGather_RING_LL"]
