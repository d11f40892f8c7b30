"""Ranks that restart in the same store meet each other, and no rank of an earlier start."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from fsdp_cp.launch import agree, own_part

SOON = timedelta(seconds=20)


@pytest.fixture
def server():
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def start(server, ranks, alive=None, timeout=SOON):
    """Return the names on which ``alive`` of ``ranks`` ranks agree. Each rank has its own client."""

    def one(rank):
        client = dist.TCPStore("localhost", server.port, is_master=False, timeout=SOON)
        return agree(client, rank, ranks, timeout)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, alive or range(ranks)))


def test_every_start_has_a_name_of_its_own(server):
    names = [start(server, 4) for _ in range(3)]
    assert all(len(set(each)) == 1 for each in names) and len({each[0] for each in names}) == 3


def test_a_start_of_which_some_died_early_does_not_disturb_the_next(server):
    for alive in ([2, 3], [0, 1, 3]):
        with pytest.raises(RuntimeError):
            start(server, 4, alive, timedelta(seconds=0.5))
        assert len(set(start(server, 4))) == 1


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, True),
    ],
)
def test_only_in_the_agents_store(server, monkeypatch, environment, wanted):
    own = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (own | {"TORCHELASTIC_USE_AGENT_STORE": ""} | environment).items():
        monkeypatch.setenv(name, value)
    store = own_part(SOON)
    assert (store is not None) == wanted
    if wanted:
        store.set("key", "value")
        assert not server.check(["key"]), "it is in a part of its own"
