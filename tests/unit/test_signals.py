"""The first signal stops a run after its step, a second one ends the process. Real signals, real processes."""

import signal
import subprocess
import sys
import time

import pytest

from tests.tiers import long, slow

PROGRAM = """
import sys, time
from fsdp_cp.launch import exit_code
from fsdp_cp.runtime.signals import StopSignal, Stopped

def work():
    with StopSignal() as stop:
        if sys.argv[1] == "store":
            import datetime
            import torch.distributed as dist
            store = dist.TCPStore("localhost", 0, 1, True, timeout=datetime.timedelta(seconds=60))
            import threading
            threading.Timer(2, lambda: print("ready", flush=True)).start()  # when the wait has begun
            store.wait(["never"])
        if sys.argv[1] == "deferred":
            with stop.deferred():
                print("ready", flush=True)
                while stop.received is None:
                    time.sleep(0.02)
                print("saving", flush=True)
                time.sleep(float(sys.argv[2]))
                print("saved", flush=True)
        print("ready", flush=True)
        time.sleep(60)

sys.exit(exit_code(work))
"""


def start(*arguments: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGHUP])
def test_outside_the_loop_it_ends_at_once(sent):
    process = start("now", "0")
    process.send_signal(sent)
    code, out, err = end(process)
    assert (code, out) == (75, "") and len(err.splitlines()) == 1


@slow
def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("now", "0")
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert end(process)[0] == 75


@slow
def test_in_the_loop_it_is_kept_until_the_loop_ends():
    process = start("deferred", "0.3")
    process.send_signal(signal.SIGTERM)
    code, out, err = end(process)
    assert (code, out) == (75, "saving\nsaved\n") and "SIGTERM" in err


@long
def test_the_same_one_again_within_a_moment_is_the_first_one():
    """The same signal comes from the terminal and from torchrun."""
    process = start("deferred", "1")
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    code, out, err = end(process)
    assert (code, out) == (75, "saved\n") and "SIGINT" in err


@slow
def test_a_second_one_ends_it_at_once():
    process = start("deferred", "60")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saving\n"
    time.sleep(2.1)
    process.send_signal(signal.SIGINT)
    assert end(process)[:2] == (128 + signal.SIGINT, "")


@slow
def test_a_second_one_ends_a_process_that_waits_in_a_collective():
    """Python calls no handler before the wait returns."""
    process = start("store", "60")
    process.send_signal(signal.SIGTERM)
    time.sleep(2.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert end(process)[:2] == (128 + signal.SIGTERM, "")


WORKER = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import os, time
from fsdp_cp.launch import exit_code
from fsdp_cp.runtime.signals import StopSignal, end_with_torchrun
def work():
    end_with_torchrun()
    with StopSignal():
        print(os.getpid(), flush=True)
        time.sleep(60)
raise SystemExit(exit_code(work))
'''], env=os.environ | {"TORCHELASTIC_RUN_ID": "x"})
child.wait()
"""


@slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's parent-death signal is Linux's")
def test_a_worker_ends_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", WORKER], stdout=-1, stderr=-1, text=True)
    worker = int(parent.stdout.readline())
    parent.kill()
    # Its ends of the pipes close when the worker has ended.
    out, err = parent.communicate(timeout=30)
    assert "SIGTERM" in err, (worker, out, err)
