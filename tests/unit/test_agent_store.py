"""Ranks that are started again in the same store meet each other, and nobody from before."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from fsdp_cp.agent_store import agree, own_part

SOON = timedelta(seconds=20)


@pytest.fixture
def server():
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def start(server, ranks, of=None, timeout=SOON):
    """The names on which ``of`` (all by default) of ``ranks`` ranks agree, each with a client of its own."""

    def one(rank):
        client = dist.TCPStore("localhost", server.port, is_master=False, timeout=SOON)
        return agree(client, rank, ranks, timeout)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, of or range(ranks)))


def test_every_start_has_a_name_of_its_own(server):
    names = [start(server, 4) for _ in range(5)]
    assert all(len(set(each)) == 1 for each in names) and len({each[0] for each in names}) == 5


def test_a_start_of_which_some_died_early_does_not_disturb_the_next(server):
    for alive in ([1], [2, 3], [0], [0, 1, 3]):
        with pytest.raises(Exception, match="not all of 4 ranks|[Tt]ime"):
            start(server, 4, alive, timedelta(seconds=0.5))
        assert len(set(start(server, 4))) == 1


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
    ],
)
def test_only_where_ranks_may_be_started_again(server, monkeypatch, environment, wanted):
    own = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (
        own | {"TORCHELASTIC_USE_AGENT_STORE": "", "TORCHELASTIC_MAX_RESTARTS": ""} | environment
    ).items():
        monkeypatch.setenv(name, value)
    store = own_part(SOON)
    assert (store is not None) == wanted
    if wanted:
        store.set("key", "value")
        assert not server.check(["key"]), "it is in a part of its own"
