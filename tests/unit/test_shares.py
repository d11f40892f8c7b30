"""Items shared out over ranks, and files read ahead of their use."""

import threading
import time
from contextlib import closing

import pytest

from distill.data import shares
from distill.data.shares import Shares, first_of_each, read_ahead


@pytest.mark.parametrize(
    ("nodes", "first"),
    [(["a", "a", "a"], (0,)), (["a", "b", "a", "b"], (0, 1)), (["0 h", "0 h", "1 h", "1 h"], (0, 2))],
)
def test_one_rank_of_each_node(nodes, first):
    assert first_of_each(nodes) == first


@pytest.mark.parametrize(("count", "ranks"), [(0, (0,)), (5, (0, 1, 2)), (23, (1, 3))])
def test_every_item_has_one_rank(monkeypatch, count, ranks):
    own = []
    for number in range(4):
        monkeypatch.setattr(shares, "rank", lambda number=number: number)
        own += [(item, number) for item in Shares(ranks=ranks).assigned(count)]
    assert [item for item, _ in sorted(own)] == list(range(count))
    assert [number for _, number in sorted(own)] == sorted(number for _, number in own), "a run of neighbors each"
    shares_of_all = [sum(number == rank for _, number in own) for rank in ranks]
    assert max(shares_of_all) - min(shares_of_all) <= 1


def test_items_are_read_by_threads_and_no_further_ahead_than_there_are(monkeypatch):
    monkeypatch.setattr(shares, "share_of_cores", lambda: 3)
    begun, together, gate = [], threading.Barrier(3, timeout=20), threading.Event()

    def read(item):
        begun.append(item)
        if len(begun) <= 3:
            together.wait()  # three at a time, or this breaks
        gate.wait(20)
        return item * item

    with closing(read_ahead(read, range(0, 40, 2))) as ahead:
        threading.Timer(0.3, gate.set).start()
        assert next(ahead) == 0
        for _ in range(100):
            time.sleep(0.01)
        assert sorted(begun) == [0, 2, 4, 6], "as many ahead as there are threads: each clip is up to 0.9 GB"
        assert [next(ahead) for _ in range(2, 20, 2)] == [i * i for i in range(2, 20, 2)]
    assert len(begun) < 20, "what nobody will take is not read"


def test_what_reading_raises_comes_to_whoever_takes():
    def read(item):
        if item == 1:
            raise OSError("torn")
        return item

    ahead = read_ahead(read, range(3))
    assert next(ahead) == 0
    with pytest.raises(OSError, match="torn"):
        next(ahead)
