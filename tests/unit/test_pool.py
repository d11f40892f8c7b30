"""Places and lifetimes of pooled buffers: living buffers must not overlap, for random lifetimes."""

import random
import threading
import weakref

import pytest
import torch

from fsdp_cp.sharding import pool as pools
from fsdp_cp.sharding.pool import ALIGNMENT, BufferPool, place

CPU = torch.device("cpu")


def _random_lifetimes(generator, count):
    """Return sizes, which of them are alive at once, and the most bytes alive at once (aligned)."""
    sizes = [generator.choice((1, 512, 513, generator.randrange(1, 20_000))) for _ in range(count)]
    spans = [sorted(generator.sample(range(3 * count), 2)) for _ in range(count)]
    conflicts = [
        {j for j in range(count) if j != i and spans[i][0] < spans[j][1] and spans[j][0] < spans[i][1]}
        for i in range(count)
    ]
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    alive = max(sum(p for p, (a, b) in zip(padded, spans, strict=True) if a <= t < b) for t in range(3 * count))
    return sizes, conflicts, padded, alive


@pytest.mark.parametrize("seed", range(6))
def test_places_of_random_lifetimes(seed):
    generator = random.Random(seed)
    sizes, conflicts, padded, alive = _random_lifetimes(generator, generator.randrange(1, 60))
    offsets, total = place(sizes, conflicts)
    assert len(offsets) == len(sizes) and all(offset % ALIGNMENT == 0 for offset in offsets)
    for i, others in enumerate(conflicts):
        for j in others:
            assert offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]
    assert max(o + s for o, s in zip(offsets, padded, strict=True)) == total
    assert alive <= total <= sum(padded)
    assert total <= 1.5 * alive, "greedy orders of intervals: 1.2 was the worst of a thousand"


class Unit:
    """Stand-in for a unit that requests buffers for one purpose."""

    def __init__(self, pool, name, count, dtype=torch.float32):
        self.pool, self.name, self.count, self.dtype, self.kind = pool, name, count, dtype, []

    def ask(self):
        return self.pool.allocate(self.kind, self.name, (self.count,), dtype=self.dtype, device=CPU)


@pytest.fixture
def quick(monkeypatch):
    """Shorten the waits, since no threads of gloo run in these tests."""
    monkeypatch.setattr(pools, "LET_GO", 0.0)
    monkeypatch.setattr(pools, "PATIENCE", 0.02)


def _spans(tensors):
    return sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_alive_never_overlaps(seed, quick):
    """Requests and releases are random, and steps differ. Every tensor keeps what was written to it."""
    pool, generator = BufferPool(), random.Random(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    units = [Unit(pool, str(i), generator.randrange(1, 3000), generator.choice(dtypes)) for i in range(8)]
    written = {}
    for step in range(12):
        for _ in range(30):
            if len(written) > 3 or (written and generator.random() < 0.4):
                key = generator.choice(list(written))
                tensor, value = written.pop(key)
                assert (tensor == value).all()
                del tensor
            unit = generator.choice(units)
            tensor = unit.ask()
            assert tensor.shape == (unit.count,) and tensor.dtype == unit.dtype and tensor.is_contiguous()
            key = generator.random()
            written[key] = tensor.fill_(step + 1), step + 1
            spans = _spans(t for t, _ in written.values())
            assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
        if step % 2:
            pool.end_step()
    assert all((tensor == value).all() for tensor, value in written.values())
    assert pool.nbytes


def test_steps_that_are_alike_take_nothing(quick):
    """After the first plan nothing is allocated. Two of three successive buffers are alive and held."""
    pool = BufferPool()
    units = [Unit(pool, f"blocks.{i}", 256) for i in range(6)]

    def step():
        before, held = pool.allocations, None
        for unit in units:
            tensor = unit.ask()
            held = tensor  # noqa: F841  this frees the previous tensor
        pool.end_step()
        return pool.allocations - before

    assert [step() for _ in range(4)] == [6, 0, 0, 0]
    assert pool.plans == 1 and pool.nbytes == 2 * 1024
    assert sum(buffer.size for buffer in pool.buffers) == 6 * 1024


def _planned_unit():
    pool = BufferPool()
    unit = Unit(pool, "blocks.0", 128)
    unit.ask()
    pool.end_step()
    assert pool.owns(unit.ask())
    return pool, unit


@pytest.mark.parametrize("hold", ["view", "dtype", "graph"])
def test_whoever_holds_a_view_keeps_the_memory(hold, quick):
    pool, unit = _planned_unit()
    tensor = unit.ask().fill_(3.0)
    keep = {
        "view": lambda t: t.view(2, -1),
        "dtype": lambda t: t.view(torch.uint8),
        "graph": lambda t: (torch.ones(128, requires_grad=True) * t).sum(),
    }[hold](tensor)
    del tensor
    other = unit.ask()
    assert not pool.owns(other), "the only place is taken"
    other.fill_(9.0)
    if hold == "graph":
        keep.backward()
    elif hold != "dtype":
        assert (keep == 3.0).all()
    del keep, other
    assert pool.owns(unit.ask())


def test_a_thread_that_lets_go_late_is_waited_for(quick, monkeypatch):
    """Gloo's threads release late. The pool waits a moment instead of taking new memory."""
    monkeypatch.setattr(pools, "PATIENCE", 30.0)
    pool, unit = _planned_unit()
    held = [unit.ask()]
    threading.Timer(0.2, held.clear).start()
    before = pool.allocations
    assert pool.owns(unit.ask()) and pool.allocations == before and not held


def test_what_was_not_foreseen_has_memory_of_its_own_and_is_planned_once(quick, caplog):
    pool, unit = _planned_unit()
    first, second = unit.ask(), unit.ask()  # two micro-batches' gradients, say
    assert pool.owns(first) and not pool.owns(second) and pool.plans == 1
    other = Unit(pool, "head", 5)
    third = other.ask()
    pool.end_step()
    assert pool.plans == 2 and pool.nbytes == 3 * 512
    first.fill_(1.0)  # still in the old memory
    del first, second, third
    again = [unit.ask(), unit.ask(), other.ask()]
    assert all(map(pool.owns, again)) and pool.allocations == 3
    pool.end_step()
    assert pool.plans == 2


def test_networks_that_are_gone_are_not_planned(quick):
    pool, unit = _planned_unit()
    gone = Unit(pool, "another network", 10_000)
    gone.ask()
    pool.end_step()
    assert pool.nbytes == 40_448, "the two are never alive at once"
    buffer = weakref.ref(gone.kind[0])
    del gone
    Unit(pool, "a third", 1).ask()
    pool.end_step()
    assert buffer() is None and pool.nbytes == 512 and len(pool.buffers) == 1


class Stream:
    """Stand-in for a CUDA stream that records its calls."""

    def __init__(self):
        self.waited_for = []

    def wait_event(self, event):
        self.waited_for.append(event.recorded_on)


class Event:
    def record(self, stream):
        self.recorded_on = stream


def test_another_stream_waits_for_the_one_that_let_go(quick, monkeypatch):
    """A stream waits neither for living buffers nor for itself, as in torch's allocator."""
    compute, copy_in = Stream(), Stream()
    now = [compute]
    monkeypatch.setattr(pools, "_stream_now", lambda device: now[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    pool = BufferPool()
    gradients, weights = Unit(pool, "reduce", 64), Unit(pool, "gather", 128)
    for unit in (gradients, weights):
        unit.ask()
    pool.end_step()
    assert pool.nbytes == 512, "one place for both"
    gradients.ask()
    gradients.ask()
    assert compute.waited_for == []
    now[0] = copy_in
    held = weights.ask()
    assert set(copy_in.waited_for) == {compute}
    copy_in.waited_for.clear()
    weights.ask()
    assert copy_in.waited_for == [], "the place is taken: it has memory of its own"
    del held
    now[0] = compute
    gradients.ask()
    assert compute.waited_for == [copy_in]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_of_a_gpu_do_not_write_over_each_other():
    """Each stream fills, uses and sums its buffer, and releases it at once, as early as FSDP2 does."""
    device, pool, sums = torch.device("cuda", torch.cuda.current_device()), BufferPool(), []
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    kinds = [[] for _ in range(9)]
    for step in range(20):
        for i, kind in enumerate(kinds):
            with torch.cuda.stream(streams[i % 3]):
                count = (1 + i) * 2**20
                buffer = pool.allocate(kind, str(i), (count,), dtype=torch.float32, device=device)
                buffer.fill_(step + i)
                for _ in range(20):
                    buffer += 1
                sums.append((buffer.double().sum(), (step + i + 20) * count))
                del buffer
        pool.end_step()
    torch.cuda.synchronize(device)
    assert all(float(found) == expected for found, expected in sums)
    assert pool.plans == 1 and pool.allocations == len(kinds)
    assert pool.nbytes == 9 * 2**22, "the largest: the host frees each before it asks for the next"
