"""torchrun's error file is written atomically, even if its writer is killed."""

import json
import multiprocessing
import os
import signal
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdp_cp.launch import recorded, write_error


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


@pytest.mark.slow
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
