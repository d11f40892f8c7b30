"""torchrun's error file: atomic, whatever ends the process that writes it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fsdp_cp.error_file import write_error

RAISES = """
import sys
from fsdp_cp.error_file import recorded

@recorded
def main(size):
    raise RuntimeError("x" * size)

main(int(sys.argv[1]))
"""


def worker(file, size):
    return subprocess.Popen(
        [sys.executable, "-c", RAISES, str(size)],
        env=os.environ | {"TORCHELASTIC_ERROR_FILE": str(file)},
        stderr=subprocess.DEVNULL,
    )


def test_torch_reads_what_an_exception_left(tmp_path):
    file = tmp_path / "error.json"
    assert worker(file, 10).wait() == 1
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert failure.message["message"] == "RuntimeError: xxxxxxxxxx"
    assert failure.message["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last)")
    assert abs(failure.timestamp - time.time()) < 120 and os.listdir(tmp_path) == ["error.json"]


@pytest.mark.slow
def test_a_worker_killed_while_it_writes_leaves_no_half_file(tmp_path):
    """torchrun kills the other workers when one has died. A half-written file would prevent the restart."""
    kill = signal.SIGTERM
    file = tmp_path / "error.json"
    process = worker(file, 200_000_000)  # long enough to be met at it
    while not os.listdir(tmp_path):
        assert process.poll() is None
    process.send_signal(kill)
    assert process.wait() == -kill and not file.exists()


def test_a_users_mistake_has_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    write_error("error: x")
    assert set(json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]) == {"timestamp"}
