"""The start and the end of a process: allocator, threads, device, worlds, stores, and torchrun's error file."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdp_cp import launch
from fsdp_cp.errors import UserError
from fsdp_cp.launch import (
    agree,
    choose_allocator,
    choose_device,
    choose_threads,
    own_part,
    recorded,
    refuse_separate_worlds,
    write_error,
)
from tests.tiers import slow

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


@slow
def test_a_collective_s_last_thread_does_not_abort_a_process_that_is_done(tmp_path):
    """Gloo's threads free tensors late. Python's own exit then aborts (-6 instead of 3 on one rank or both)."""
    command = [sys.executable, "-W", "ignore", "-c", LATE_COLLECTIVES]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    out = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert out == [["done", "atexit"]] * 2 and [rank.returncode for rank in ranks] == [3, 3]


# ---------------------------------------------------------------- tasks that srun or MPI started without torchrun


TASKS = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "RANK", "WORLD_SIZE")


@pytest.fixture
def alone(monkeypatch):
    for name in TASKS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_several_tasks_without_ranks_are_refused(alone, name):
    alone.setenv(name, "2")
    with pytest.raises(UserError, match=f"{name}=2.*torchrun"):
        refuse_separate_worlds()
    alone.setenv("RANK", "0")  # torchrun under srun, or exported by hand
    alone.setenv("WORLD_SIZE", "2")
    refuse_separate_worlds()


@pytest.mark.parametrize("given", [{}, {"SLURM_NTASKS": "8"}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}])
def test_one_task_passes(alone, given):
    for name, value in given.items():
        alone.setenv(name, value)
    refuse_separate_worlds()


# ---------------------------------------------------------------- ranks that restart in the same store


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
    [({}, False), ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False), ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, True)],
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


# ---------------------------------------------------------------- torchrun's error file


@recorded
def _raise(size):
    raise RuntimeError("x" * size)


def _work(file, size):
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(file)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    _raise(size)


def start_worker(file, size):
    worker = multiprocessing.get_context("fork").Process(target=_work, args=(file, size))
    worker.start()
    return worker


def test_torch_reads_what_an_exception_left(tmp_path):
    file = tmp_path / "error.json"
    worker = start_worker(file, 10)
    worker.join()
    assert worker.exitcode == 1
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert failure.message["message"] == "RuntimeError: xxxxxxxxxx"
    assert failure.message["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last)")
    assert abs(failure.timestamp - time.time()) < 120 and os.listdir(tmp_path) == ["error.json"]


@slow
def test_a_worker_killed_while_it_writes_leaves_no_half_file(tmp_path):
    """torchrun kills the other workers when one has died. A half-written file would prevent the restart."""
    file = tmp_path / "error.json"
    worker = start_worker(file, 100_000_000)  # writing takes long enough for the signal to arrive
    while not os.listdir(tmp_path):
        assert worker.is_alive()
    worker.kill()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL and not file.exists()


def test_a_users_mistake_has_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    write_error("error: x")
    assert set(json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]) == {"timestamp"}
