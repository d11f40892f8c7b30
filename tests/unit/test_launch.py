"""Allocator, threads and device, which are chosen before the process group, and the end of a process."""

import os
import subprocess
import sys

import pytest
import torch

from fsdp_cp import launch
from fsdp_cp.errors import UserError
from fsdp_cp.launch import choose_allocator, choose_device, choose_threads

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
def test_the_environment_wins_over_the_setting(environment, name):
    environment.setenv(name, "max_split_size_mb:64")
    choose_allocator(torch.device("cuda", 0), "expandable_segments:True")
    assert os.environ[name] == "max_split_size_mb:64" and allocator().count(None) == 1


# ---------------------------------------------------------------- threads


@pytest.fixture
def cores(monkeypatch):
    """Stand in for a machine of 16 cores. torch's number of threads is restored afterwards."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield monkeypatch
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("given", "ranks", "threads"),
    [(None, None, 16), ("1", "5", 3), ("1", "32", 1)],  # torchrun sets OMP_NUM_THREADS=1 for several ranks
)
def test_an_optimizer_on_the_host_has_its_share_of_the_cores(cores, given, ranks, threads):
    for name, value in (("OMP_NUM_THREADS", given), ("LOCAL_WORLD_SIZE", ranks)):
        cores.delenv(name, raising=False) if value is None else cores.setenv(name, value)
    choose_threads(torch.device("cuda", 0), host_optimizer=True)
    assert torch.get_num_threads() == threads


def test_threads_are_left_alone_elsewhere(cores):
    choose_threads(torch.device("cpu"), host_optimizer=True)  # the optimizer's sums would change
    choose_threads(torch.device("cuda", 0), host_optimizer=False)
    cores.setenv("OMP_NUM_THREADS", "7")
    choose_threads(torch.device("cuda", 0), host_optimizer=True)
    assert torch.get_num_threads() == 1


# ---------------------------------------------------------------- a GPU that torch does not see


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Stand in for a machine with a GPU's device file, and a torch that sees no GPU."""
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(launch, "_GPU_FILES", (tmp_path / "nvidia0", tmp_path / "nvidiactl"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_an_unseen_gpu_is_no_reason_to_compute_on_the_cpu(machine, device, tmp_path):
    with pytest.raises(UserError, match=f"^device={device}.*nvidiactl.*device=cpu$"):
        choose_device(device)
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("hidden", ["", "-1", None])
def test_the_cpu_where_there_is_no_gpu_or_it_is_hidden(machine, hidden, tmp_path):
    if hidden is None:
        (tmp_path / "nvidiactl").unlink()
    else:
        machine.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="device=cuda"):
        choose_device("cuda")


# ---------------------------------------------------------------- the end of a process


LATE_COLLECTIVES = """
import atexit
import sys
import torch
import torch.distributed as dist
from fsdp_cp.launch import end_process

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
for _ in range(400):
    dist.all_reduce(torch.ones(200_000), async_op=True)
kept = dist.group.WORLD  # as DTensor's caches keep a mesh's groups beyond destroy_process_group
dist.destroy_process_group()
atexit.register(lambda: print("atexit"))
print("done")
end_process(3)
"""


@pytest.mark.slow
def test_a_collective_s_last_thread_does_not_abort_a_process_that_is_done(tmp_path):
    """Gloo's threads free tensors late. Python's own exit then aborts (-6 instead of 3 on one rank or both)."""
    command = [sys.executable, "-W", "ignore", "-c", LATE_COLLECTIVES]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    out = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert out == [["done", "atexit"]] * 2 and [rank.returncode for rank in ranks] == [3, 3]
