"""Start ``train.py`` as a user would."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fsdp_cp.launch import outside_of_torchrun
from tests.e2e.forked import run_forked

ROOT = Path(__file__).parents[2]


def command(ranks: int, *overrides: str) -> list[str]:
    """``torchrun --nproc-per-node ranks train.py overrides``; plain ``python`` for ``ranks=0``."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    return [sys.executable, *torchrun, "train.py", "device=cpu", *overrides]


def environment() -> dict[str, str]:
    """This process's, without a torchrun's around it."""
    return outside_of_torchrun() | {"OMP_NUM_THREADS": "1"}


def train(ranks: int, *overrides: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """A run to its end, on ranks that no torchrun starts; on failure the output is in the assertion."""
    words = ["device=cpu", *overrides]
    done = run_forked(ranks, "train", words, cwd=ROOT, environment=environment(), timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_command(ranks: int, *overrides: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """The command line itself, under torchrun, or plain ``python`` for ``ranks=0``, whatever it ends with."""
    return subprocess.run(
        command(ranks, *overrides), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def losses(run_dir: Path) -> list[dict[str, float]]:
    """``step`` and the losses and gradient norms of every line of ``metrics.jsonl``."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k == "step" or k.endswith(("/loss", "/grad_norm"))} for r in records]


def kill_all(marker: str) -> None:
    """SIGKILL every process with ``marker`` in its command line: torchrun's workers do not die with it.

    Returns when they are dead, or the locks that they held could still be theirs.
    """
    killed = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            if marker in words and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
                killed.append(entry)
        except OSError:  # it has ended by itself
            continue
    deadline = time.monotonic() + 60
    while any(_alive(entry) for entry in killed):
        assert time.monotonic() < deadline, "a killed process is still there"
        time.sleep(0.02)


def _alive(process: Path) -> bool:
    """Is the process of this folder of ``/proc`` there, and no zombie, which holds nothing more?"""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
