"""What is set up before the process group."""

import os
import subprocess
import sys

import pytest
import torch

from fsdp_cp.launch import choose_allocator

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # remembered, so that the tests leave no trace
        monkeypatch.delenv(name)
    return monkeypatch


def allocator() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


def test_the_allocator_is_set_on_cuda_alone(environment):
    choose_allocator(torch.device("cpu"), "expandable_segments:True")
    choose_allocator(torch.device("cuda", 0), None)
    assert allocator() == [None, None]
    choose_allocator(torch.device("cuda", 0), "expandable_segments:True")
    assert allocator() == [None, "expandable_segments:True"]


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_wins_over_the_setting(environment, name, caplog):
    environment.setenv(name, "max_split_size_mb:64")
    choose_allocator(torch.device("cuda", 0), "expandable_segments:True")
    assert os.environ[name] == "max_split_size_mb:64" and allocator().count(None) == 1
    assert f"{name}=max_split_size_mb:64 is set; cuda_allocator=expandable_segments:True is not used" in caplog.text


LATE_COLLECTIVES = """
import sys
import torch
import torch.distributed as dist
from fsdp_cp.launch import end_process

rank, store, end = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2), sys.argv[3]
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
for _ in range(400):
    dist.all_reduce(torch.ones(200_000), async_op=True)
kept = dist.group.WORLD  # as DTensor's caches keep a mesh's groups beyond destroy_process_group
dist.destroy_process_group()
import atexit
atexit.register(lambda: print("handlers of the exit ran"))
print("work is done")
if end == "end_process":
    end_process(3)
sys.exit(3)
"""


def test_a_collective_s_last_thread_does_not_abort_a_process_that_is_done(tmp_path):
    """Threads of gloo let go of tensors late; Python's own end aborts then (-6 instead of 3 on one rank or both)."""

    def codes(end: str) -> list[int]:
        command = [sys.executable, "-W", "ignore", "-c", LATE_COLLECTIVES]
        ranks = [
            subprocess.Popen([*command, str(rank), str(tmp_path / end), end], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        out = [each.communicate(timeout=120)[0] for each in ranks]
        assert all(text.startswith("work is done") for text in out)
        if end == "end_process":
            assert all("handlers of the exit ran" in text for text in out)
        return [each.returncode for each in ranks]

    assert codes("end_process") == [3, 3]
