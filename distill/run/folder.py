"""Run directory: its lock, its protection of other files, and the records of every start and of the end."""

import json
import logging
import os
import platform
import shlex
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import distributions
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from distill.config import Config
from fsdp_cp.checkpoint.folder import saved_steps
from fsdp_cp.checkpoint.lock import held_directory, locked_directory
from fsdp_cp.errors import NO_ROOM, UserError, first_line
from fsdp_cp.files.atomic_file import atomic_path, write_text, writing
from fsdp_cp.files.foreign import refuse_foreign
from fsdp_cp.launch import rank, world_size
from fsdp_cp.measure.memory import resident_at_start
from fsdp_cp.progress import log_to_console
from fsdp_cp.reduce import on_first_rank
from fsdp_cp.runtime.signals import STOPPED, Stopped

log = logging.getLogger(__name__)

STARTS = "starts.jsonl"
"""File with a JSON object per start of the run: command line, commit, versions, machine and whole configuration."""
LOG = "log.txt"
STATUS = "status.json"
"""File with the state of the run; see :func:`recorded_end`."""
OUTPUTS = (
    *("config.yaml", STARTS, LOG, STATUS, "metrics.jsonl", "norms.jsonl", "tensorboard"),
    *("checkpoints", "samples", "profile", "export", "report.html", "report.json", "report.png"),
)
"""Names of a run's output files. ``cache`` (keyed, so later runs can use it), ``wandb`` and ``previous`` stay."""
_PACKAGES = ("fsdp-cp", "torch", "diffusers", "transformers", "safetensors", "omegaconf", "hydra-core")


def refuse_foreign_run(run_dir: Path, setting: str = "run_dir") -> None:
    """Refuse a directory that cannot be written, or in which a run would overwrite files of other programs."""

    def refuse(names: Sequence[str], record: str) -> None:
        keys = {"started", "state", "exit_code", "job"} if record == STATUS else {"started"}
        refuse_foreign(run_dir, setting, names, record=record, is_ours=lambda it: keys <= it.keys(), maker="a run")

    names = OUTPUTS
    with suppress(UserError):
        refuse((), STATUS)  # a signal may have stopped a run before it wrote more
        names = tuple(name for name in OUTPUTS if name != STATUS)
    refuse(names, STARTS)


def held_run_dir(run_dir: Path, setting: str = "run_dir") -> AbstractContextManager[None]:
    """Make the directory, lock it for the duration of the context, and check that every rank sees it. A collective."""
    return held_directory(run_dir, setting, check=lambda: refuse_foreign_run(run_dir, setting))


def start_run(config: Config, run_dir: Path, *, resume_from: Path | None, step: int, command: Sequence[str]) -> None:
    """Write the record of this start, ``config.yaml`` and the log so far, on rank 0, after all checks: a refused run
    must not change an earlier one's files. A run from scratch moves these to ``previous``. ``step`` is that of
    ``resume_from``, or 0."""

    def write() -> None:
        with writing(f"run_dir={run_dir}", "use another"):
            if resume_from is None or resume_from.resolve().parent != (run_dir / "checkpoints").resolve():
                _move_aside(run_dir)
            record = {"from_step": step, **this_start(command), "config": asdict(config)}
            with (run_dir / STARTS).open("a") as file:  # write it first: it marks the directory as a run's
                file.write(json.dumps(record) + "\n")
            with atomic_path(run_dir / "config.yaml") as temporary:
                OmegaConf.save(OmegaConf.create(asdict(config)), temporary)
            handler = logging.FileHandler(run_dir / LOG, encoding="utf-8")
        handler.setLevel(logging.INFO)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        root = logging.getLogger()
        for kept in [h for h in root.handlers if isinstance(h, MemoryHandler)]:
            root.removeHandler(kept)
            kept.setTarget(handler)
            kept.close()  # writes the lines so far to the target
        root.addHandler(handler)

    on_first_rank(write)


def this_start(command: Sequence[str]) -> dict[str, Any]:
    """Return all that is needed to run this process again, except the configuration."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        installed = next(iter(distributions(name=package)), None)  # none for a checkout that is not installed
        versions[package.replace("-", "_")] = "unknown" if installed is None else installed.version
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return {
        "started": _now(),
        "command": shlex.join(command),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        **_commit(),
        "versions": versions,
        "device": f"{world_size()} x {name}",
        "world_size": world_size(),
        "resident_gib_before": resident_at_start(),
        "torchrun": _torchrun(),
    }


def _torchrun() -> str | None:
    """Return an identifier of the torchrun that started this process: its error folder, which restarts keep."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "").partition("/attempt_")[0] or None


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _commit() -> dict[str, Any]:
    """Return ``commit`` and whether the tree was ``clean``. Both are ``None`` outside of a checkout."""
    words = ("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    command = ["git", "-C", str(Path(__file__).resolve().parents[2]), *words]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "clean": None}
    return {"commit": answer.removesuffix("-dirty"), "clean": not answer.endswith("-dirty")}


def resume_setting(config: Config, run_dir: Path) -> str:
    """Return ``checkpoint.resume`` for this start; a collective. torchrun's ``--max-restarts`` starts the same command
    again after a rank has died, and ``never`` applies only to the first start of a torchrun, by the newest record."""

    def decide() -> str:
        if config.checkpoint.resume == "never" and _torchrun() is not None:
            with suppress(OSError, ValueError, LookupError, TypeError):
                last = json.loads((run_dir / STARTS).read_text().splitlines()[-1])
                if last["torchrun"] == _torchrun():
                    return "auto"
        return config.checkpoint.resume

    return on_first_rank(decide)


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return the words that start this process again. The torchrun part is rebuilt from the world's sizes."""
    launch = [sys.executable]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local, world = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), world_size()
        nodes = [] if world == local else ["--nnodes", str(world // local)]
        launch = ["torchrun", *nodes, "--nproc-per-node", str(local)]
    return [*launch, sys.argv[0], *arguments]


def _move_aside(run_dir: Path) -> None:
    """Move an earlier run's files to ``previous/N/``. The latent cache stays, since it is keyed by its inputs."""
    outputs = [run_dir / name for name in OUTPUTS if (run_dir / name).exists()]
    if all(path.name == STATUS for path in outputs):
        return
    previous = run_dir / "previous"
    number = 1 + max((int(p.name) for p in previous.glob("*") if p.name.isdigit()), default=0)
    target = previous / str(number)
    target.mkdir(parents=True)
    # Move the record of starts last: after a kill it still marks the remaining files as a run's.
    for path in sorted(outputs, key=lambda path: path.name == STARTS):
        path.rename(target / path.name)
    log.info("starting from scratch; moved the previous run's files to %s", target)


@contextmanager
def run_log() -> Iterator[None]:
    """Log to stdout, and buffer the lines until :func:`start_run` opens ``log.txt``, which gets an error that ends the
    run too. Ranks other than 0 log only warnings, and only to stdout."""
    log_to_console()
    root = logging.getLogger()
    root.setLevel(logging.INFO if rank() == 0 else logging.WARNING)  # set it even if handlers exist
    before = list(root.handlers)
    if rank() == 0:
        root.addHandler(MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1))
    try:
        yield
    except BaseException as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, UserError | Stopped):
            text = str(error) if isinstance(error, Stopped) else f"error: {error}"
        for handler in root.handlers:
            if isinstance(handler, logging.FileHandler) and handler not in before:
                handler.handle(logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, None, None))
        raise
    finally:
        for handler in [h for h in root.handlers if h not in before]:
            root.removeHandler(handler)
            handler.close()


@contextmanager
def recorded_end(run_dir: Path) -> Iterator[None]:
    """Write ``status.json`` on entering and on leaving the context, on rank 0, with this process's ``exit_code``, since
    torchrun exits with 1 for every failure. ``state`` is ``running`` (also after a kill), ``finished``, ``stopped`` (by
    a signal; the same command resumes) or ``failed``, with the reason in ``error``. ``checkpoint`` is the newest saved
    step, ``job`` the job id of SLURM or torchrun."""
    if rank() != 0:
        yield
        return
    started = _now()
    _write_status(run_dir, started, "running", None)
    try:
        yield
    except Stopped as stopped:
        _write_status(run_dir, started, "stopped", STOPPED, str(stopped))
        raise
    except BaseException as error:
        user = isinstance(error, UserError) or (isinstance(error, OSError) and error.errno in NO_ROOM)
        reason = " ".join(str(error).splitlines()) if user else f"{type(error).__name__}: {first_line(error)}"
        _write_status(run_dir, started, "failed", 2 if user else 1, reason)
        raise
    _write_status(run_dir, started, "finished", 0)


@contextmanager
def recorded_stop(config: Config) -> Iterator[None]:
    """Write ``status.json`` when a signal stops a run that has not begun: it starts, loads or encodes. A dry run writes
    nothing, nor does one in a directory that is not a run's or that another process holds."""
    run_dir, started = Path(config.run_dir), _now()
    try:
        yield
    except Stopped as stopped:
        if rank() == 0 and not (config.dry_run or config.plan):
            with suppress(UserError, OSError):
                refuse_foreign_run(run_dir)
                with locked_directory(run_dir, "run_dir"):
                    if not _has_finished(run_dir):  # the command was repeated: nothing is left to resume
                        _write_status(run_dir, started, "stopped", STOPPED, str(stopped))
        raise


def _has_finished(run_dir: Path) -> bool:
    with suppress(OSError, ValueError):
        return json.loads((run_dir / STATUS).read_text(encoding="utf-8")).get("state") == "finished"
    return False


def _write_status(run_dir: Path, started: str, state: str, exit_code: int | None, error: str | None = None) -> None:
    about = {
        "state": state,
        "exit_code": exit_code,
        "error": error,
        "checkpoint": (saved_steps(run_dir / "checkpoints") or [None])[-1],
        "started": started,
        "ended": None if exit_code is None else _now(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID"),
    }
    text = json.dumps(about, indent=1) + "\n"
    # An error of this write must not hide the run's own error.
    with suppress(OSError):
        try:
            write_text(run_dir / STATUS, text)
        except OSError:  # a full disk has room in the blocks of the file that is there
            with (run_dir / STATUS).open("r+", encoding="utf-8", errors="replace") as file:
                file.write(text)
                file.truncate()
