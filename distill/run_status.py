"""``status.json``: how a run is, or how it ended, for scripts that decide whether to start it again.

torchrun ends with 1 whatever its workers ended with; this file has their own exit code.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from distill.run_folder import STATUS
from fsdp_cp.checkpoint import published_steps
from fsdp_cp.errors import NO_ROOM, UserError
from fsdp_cp.launch import rank
from fsdp_cp.signals import STOPPED, Stopped


@contextmanager
def recorded_end(run_dir: Path) -> Iterator[None]:
    """Write ``status.json`` on entering and on leaving; rank 0 does.

    ``state`` is ``running``, ``finished``, ``stopped`` (a signal was heeded: the same command goes on) or ``failed``
    (``error`` says of what); ``exit_code`` is the process's own. After a kill, or where the host died, it stays
    ``running``. ``checkpoint`` is the newest step that is saved, ``job`` what SLURM or torchrun call the job.

    Args:
        run_dir: the run's folder, which this process holds.
    """
    if rank() != 0:
        yield
        return
    started = _now()

    def write(state: str, exit_code: int | None, error: str | None = None) -> None:
        about = {
            "state": state,
            "exit_code": exit_code,
            "error": error,
            "checkpoint": (published_steps(run_dir / "checkpoints") or [None])[-1],
            "started": started,
            "ended": None if exit_code is None else _now(),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID"),
        }
        _replace(run_dir / STATUS, about)

    write("running", None)
    try:
        yield
    except Stopped as stopped:
        write("stopped", STOPPED, str(stopped))
        raise
    except BaseException as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        user = isinstance(error, UserError) or (isinstance(error, OSError) and error.errno in NO_ROOM)
        write("failed", 2 if user else 1, " ".join(lines) if user else f"{type(error).__name__}: {lines[0]}")
        raise
    write("finished", 0)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _replace(file: Path, about: dict[str, Any]) -> None:
    """At once: a script that looks meanwhile reads the one or the other."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(about, indent=1) + "\n")
        temporary.replace(file)
    except OSError:  # a full disk has said so elsewhere; this must not hide it
        temporary.unlink(missing_ok=True)
