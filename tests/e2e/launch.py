"""Start ``train.py`` and the other commands as a user would."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fsdp_cp.checkpoint.folder import saved_steps
from fsdp_cp.launch import outside_of_torchrun
from tests.e2e.forked import Forked

ROOT = Path(__file__).parents[2]
QUICK = (
    "experiment=quickstart", "batch_size=2", "sample.at_end=false", "checkpoint.every=1", "log.every=1",
    "method.fake_updates_per_student_update=1", "optim.student.schedule=constant", "optim.fake.schedule=constant",
)  # fmt: skip
"""Settings of a run whose steps take a fraction of a second, and do not depend on their number."""
ONE_BLOCK = (
    "{num_layers: 1, num_attention_heads: 2, attention_head_dim: 12, in_channels: 3, out_channels: 3, text_dim: 32,"
    " freq_dim: 16, ffn_dim: 32, patch_size: [1, 4, 4], cross_attn_norm: true, rope_max_seq_len: 64}"
)
ONE_BLOCK_WITH_SOUND = (
    "{num_layers: 1, num_attention_heads: 2, attention_head_dim: 12, in_channels: 48, out_channels: 48, patch_size: 4,"
    " cross_attention_dim: 24, audio_num_attention_heads: 2, audio_attention_head_dim: 6, audio_in_channels: 16,"
    " audio_out_channels: 16, audio_cross_attention_dim: 12, caption_channels: 32, rope_type: split}"
)
TINY, TINY_SOUND = (
    tuple(
        word
        for role in ("teacher", "student", "fake")
        for word in (f"{role}.checkpoint=null", f"{role}.architecture={block}")
    )
    for block in (ONE_BLOCK, ONE_BLOCK_WITH_SOUND)
)
"""Random networks of one block instead of the shipped ones. A start then takes a third of the time."""
T = TypeVar("T")


def environment() -> dict[str, str]:
    """Return this process's environment, without the variables of a torchrun around it."""
    return outside_of_torchrun() | {"OMP_NUM_THREADS": "1"}


def forked(ranks: int, module: str, *words: str, file_bytes: int | None = None, cwd: Path = ROOT) -> Forked:
    """Start a command on forked ranks; see :class:`Forked`."""
    return Forked(ranks, module, list(words), cwd=cwd, environment=environment(), file_bytes=file_bytes)


def train(ranks: int, *overrides: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run ``train.py`` to its end on forked ranks; on failure the output is in the assertion."""
    done = forked(ranks, "train", "device=cpu", *overrides).wait(timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def train_killed(ranks: int, run_dir: Path, step: int, *overrides: str, cwd: Path = ROOT) -> int:
    """Run ``train.py`` on forked ranks and kill them as soon as the checkpoint of ``step`` is there.

    Returns:
        The step of the newest checkpoint.
    """
    folder = run_dir / "checkpoints"
    with forked(ranks, "train", "device=cpu", *overrides, f"run_dir={run_dir}", cwd=cwd) as run:
        wait_for(lambda: step in saved_steps(folder), run.lives)
        for process in run.processes:
            process.kill()  # SIGKILL; one may have ended by another's end
    return max(saved_steps(folder))


def torchrun_command(ranks: int, *overrides: str, options: tuple[str, ...] = ("--standalone",)) -> list[str]:
    """Return the words of ``torchrun --nproc-per-node ranks train.py overrides``; plain ``python`` for ``ranks=0``."""
    torchrun = ["-m", "torch.distributed.run", *options, "--nproc-per-node", str(ranks)] if ranks else []
    return [sys.executable, *torchrun, "train.py", "device=cpu", *overrides]


def run_command(ranks: int, *overrides: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run ``train.py`` under torchrun, or in a new interpreter for ``ranks=0``, and accept any exit code."""
    words = torchrun_command(ranks, *overrides)
    return subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)


def losses(run_dir: Path) -> list[dict[str, float]]:
    """Return ``step``, losses, gradient norms and the guard's numbers of every line of ``metrics.jsonl``."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in r.items() if k == "step" or k.startswith("guard/") or k.endswith(("/loss", "/grad_norm"))}
        for r in records
    ]


def wait_for(condition: Callable[[], T], lives: Callable[[], bool] = lambda: True, seconds: float = 300) -> T:
    """Return the value of ``condition`` as soon as it is true, while ``lives``."""
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert lives() and time.monotonic() < limit
        time.sleep(0.02)
    return found


def processes(marker: str) -> list[int]:
    """Return the ids of other processes, without zombies, that have ``marker`` in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            if marker in words and int(entry.name) != os.getpid() and is_alive(int(entry.name)):
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return sorted(found)


def is_alive(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_all(marker: str) -> None:
    """Kill every process with ``marker`` in its command line, since torchrun's workers outlive it. Wait for the end."""
    for process in processes(marker):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    wait_for(lambda: not processes(marker), seconds=60)
