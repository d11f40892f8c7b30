"""A run's folder: whose it is, one run at a time, what an earlier one left, and the record of every start."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import IO, Any

import torch
from omegaconf import OmegaConf

from distill.config import Config, load_config
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.launch import rank, world_size
from fsdp_cp.measure.memory import resident_at_start
from fsdp_cp.progress import log_to_console
from fsdp_cp.reduce import barrier, on_all_ranks
from fsdp_cp.signals import Stopped
from models.published import file_above

log = logging.getLogger(__name__)

STARTS = "starts.jsonl"
"""A JSON object per start of the run: command line, commit, versions, machine and the whole configuration."""
LOG = "log.txt"
STATUS = "status.json"
"""How the run is, or how it ended: see :func:`recorded_end`."""
OUTPUTS = (
    "config.yaml",
    STARTS,
    LOG,
    "metrics.jsonl",
    "metrics.jsonl.damaged",
    "norms.jsonl",
    "norms.jsonl.damaged",
    "tensorboard",
    "checkpoints",
    "samples",
    "profile",
    "export",
    "report.html",
    "report.json",
    "report.png",
    STATUS,
)
"""What a run writes, beside ``cache``, which is keyed and stays, ``wandb`` and ``previous``."""
_LOCK = ".lock"
_LOCKED_BY = re.compile(r"(process \d+ on .*\n)?")
_PACKAGES = ("fsdp-cp", "torch", "diffusers", "transformers", "safetensors", "omegaconf", "hydra-core")


@paths_of_the_user()
def refuse_foreign(run_dir: Path, setting: str = "run_dir") -> None:
    """Refuse a folder in which a run would overwrite what no run wrote; changes nothing.

    Args:
        run_dir: as of :func:`held_run_dir`.
        setting: what the user calls it.

    Raises:
        UserError: naming the file.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{setting}={run_dir} is a file; give a folder")
    if run_dir.is_symlink() and not run_dir.exists():
        raise UserError(f"{setting}={run_dir} is a link to {run_dir.readlink()}, which is not there; give a folder")
    if (file := file_above(run_dir)) is not None:
        raise UserError(f"{setting}={run_dir} cannot be written ({file} is a file); give another folder")
    # A missing one is made in the nearest that is there.
    if not os.access(next(path for path in (run_dir, *run_dir.parents) if path.exists()), os.W_OK | os.X_OK):
        raise UserError(f"{setting}={run_dir} cannot be written ({os.strerror(errno.EACCES)}); use another")
    if not _is_our_lock(run_dir / _LOCK):
        raise UserError(f"{setting}={run_dir} has a {_LOCK} that neither a run nor a sweep wrote; give another folder")
    if not run_dir.is_dir() or _is_a_run(run_dir):
        return
    found = [name for name in OUTPUTS if (run_dir / name).exists()]
    if found:
        raise UserError(
            f"{setting}={run_dir} is no run's folder, and a run would overwrite its {found[0]}; give an empty or a new"
            " folder"
        )


def _is_our_lock(file: Path) -> bool:
    """Or none: what :func:`_lock` wrote there, or began to."""
    if file.is_symlink():  # what it leads to may lie anywhere
        return False
    try:
        return _LOCKED_BY.fullmatch(file.read_text()) is not None
    except FileNotFoundError:
        return True
    except (OSError, UnicodeDecodeError):
        return False


def _is_a_run(run_dir: Path) -> bool:
    """Has a run written here? Its first two files appear together; runs before there was a record had the second."""
    with suppress(OSError, ValueError, LookupError, TypeError), (run_dir / STARTS).open() as file:
        if "started" in json.loads(next(file, "")):
            return True
    try:
        load_config(run_dir / "config.yaml")
    except UserError:
        # A configuration of an older version, which this one cannot read, stands beside the run's other files.
        return (run_dir / "config.yaml").is_file() and (run_dir / "metrics.jsonl").is_file()
    return True


@contextmanager
def held_run_dir(run_dir: Path, setting: str = "run_dir") -> Iterator[None]:
    """Make the run's folder, lock it for the length of the context, and check that every rank sees it. On all ranks.

    Args:
        run_dir: the folder, of a run or of a sweep.
        setting: what the user calls it.

    Raises:
        UserError: a folder that cannot be made or written, that another run writes into, or that the nodes do not
            share: shards would be lost.
    """
    token = run_dir / f".shared_{uuid.uuid4().hex}"
    lock: list[IO[str]] = []

    def write() -> str | None:
        if rank() != 0:
            return None
        refuse_foreign(run_dir, setting)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            token.touch()
            lock.append(_lock(run_dir, setting))
        except OSError as error:
            raise UserError(f"{setting}={run_dir} cannot be written ({error.strerror}); use another") from error
        return token.name

    def look() -> None:
        if not (run_dir / name).exists():
            raise UserError(f"{setting}={run_dir} is not one folder for all nodes; use one on a shared file system")

    try:
        try:
            name = on_all_ranks(write)[0]
            on_all_ranks(look)
        finally:
            with suppress(OSError):  # which would hide why the folder could not be made
                token.unlink(missing_ok=True)
        yield
    finally:
        for stream in lock:
            stream.close()


def _lock(run_dir: Path, setting: str) -> IO[str]:
    """Two runs in one folder would overwrite each other's checkpoints. The kernel lets go when the process dies."""
    stream = (run_dir / _LOCK).open("a+")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.seek(0)
        who = stream.read().strip() or "another process"
        stream.close()
        raise UserError(f"{setting}={run_dir} is in use by {who}; wait for it, or use another {setting}") from error
    except OSError as failure:  # not every network file system has locks
        log.warning("%s=%s cannot be locked (%s): start no second run in it", setting, run_dir, failure.strerror)
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    stream.flush()
    return stream


def start_run(config: Config, run_dir: Path, *, resume_from: Path | None, step: int, command: Sequence[str]) -> None:
    """Write ``config.yaml``, the record of this start and the log so far; called by all ranks, rank 0 writes.

    Once nothing is left that could refuse the run: a refused one must not change another's files. A run that starts
    afresh moves what an earlier one left aside.

    Args:
        config: the checked configuration.
        run_dir: the run's folder.
        resume_from: the checkpoint that the run goes on from.
        step: of that checkpoint; 0 without.
        command: the words of the command line.

    Raises:
        UserError: a folder that cannot be written.
    """

    def write() -> None:
        if rank() != 0:
            return
        try:
            if resume_from is None:
                _move_aside(run_dir)
            elif resume_from.resolve().parent != (run_dir / "checkpoints").resolve():
                _move_aside(run_dir)  # metrics of a run of this folder that did not come to its first checkpoint
            temporary = run_dir / f".config.{os.getpid()}.tmp"
            OmegaConf.save(OmegaConf.create(asdict(config)), temporary)
            temporary.replace(run_dir / "config.yaml")
            record = {"from_step": step, **this_start(command), "config": asdict(config)}
            with (run_dir / STARTS).open("a") as file:
                file.write(json.dumps(record) + "\n")
            _log_to(run_dir / LOG)
        except OSError as error:
            raise UserError(f"run_dir={run_dir} cannot be written ({error.strerror}); use another") from error

    on_all_ranks(write)
    barrier()


def this_start(command: Sequence[str]) -> dict[str, Any]:
    """What is to be known of this process to run it again: all but the configuration."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package.replace("-", "_")] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            versions[package.replace("-", "_")] = "unknown"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        **_commit(),
        "versions": versions,
        "device": f"{world_size()} x {name}",
        "world_size": world_size(),
        "resident_gib_before": resident_at_start(),
        "job": os.environ.get("TORCHELASTIC_RUN_ID"),
    }


def resume_setting(config: Config, run_dir: Path) -> str:
    """``checkpoint.resume`` for this start. Called by all ranks.

    torchrun's ``--max-restarts`` starts the same command line again after a rank has died. ``never`` was meant for the
    first of these starts: taken at its word, every death would begin the run anew. Whether this torchrun has begun the
    run is known by the record of its newest start: of the same job, and later than torchrun itself.
    """

    def decide() -> str:
        setting, restarts = config.checkpoint.resume, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if rank() != 0 or setting != "never" or restarts == "0":
            return setting
        try:
            last = json.loads((run_dir / STARTS).read_text().splitlines()[-1])
            is_later = datetime.fromisoformat(last["started"]).timestamp() >= int(_parents_start())
        except (OSError, ValueError, LookupError, TypeError):
            return setting
        # A run id alone is none of this torchrun's: the user's may be the same every time, the static one is "none".
        return "auto" if is_later and last.get("job") == os.environ["TORCHELASTIC_RUN_ID"] else setting

    return on_all_ranks(decide)[0]


def _parents_start() -> float:
    """When the parent process began, in seconds since the epoch; Linux alone, elsewhere an ``OSError``."""
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    return int(booted.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    """The CPU's name as Linux knows it; Python's own functions know the architecture alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or f"{platform.machine()} CPU"


def _commit() -> dict[str, Any]:
    """``commit`` and whether the tree was ``clean``; both ``None`` where this is no checkout."""
    root = Path(__file__).resolve().parents[1]
    answers = []
    for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return {"commit": None, "clean": None}
        if done.returncode != 0:
            return {"commit": None, "clean": None}
        answers.append(done.stdout.strip())
    return {"commit": answers[0], "clean": not answers[1]}


def command_line(arguments: Sequence[str]) -> list[str]:
    """The words that start this process again: torchrun's are gone by now, so its sizes stand for them."""
    launch = [sys.executable]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local, world = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), world_size()
        nodes = [] if world == local else ["--nnodes", str(world // local)]
        launch = ["torchrun", *nodes, "--nproc-per-node", str(local)]
    return [*launch, sys.argv[0], *arguments]


@contextmanager
def run_log() -> Iterator[None]:
    """Log to stdout; and keep what is logged until :func:`start_run` knows where ``log.txt`` is.

    An end by an error goes into the file too. Ranks other than 0 say warnings alone, and have no file.
    """
    log_to_console()
    root = logging.getLogger()
    root.setLevel(logging.INFO if rank() == 0 else logging.WARNING)  # also where handlers exist
    before = list(root.handlers)
    if rank() == 0:
        root.addHandler(MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1))
    try:
        yield
    except BaseException as error:
        traceback = (type(error), error, error.__traceback__)
        text = logging.Formatter().formatException(traceback)
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


def _log_to(file: Path) -> None:
    """From here on, and what was kept: every line of the log with its time."""
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    for kept in [h for h in root.handlers if isinstance(h, MemoryHandler)]:
        root.removeHandler(kept)
        kept.setTarget(handler)
        kept.close()  # hands over what it kept
    root.addHandler(handler)


def _move_aside(run_dir: Path) -> None:
    """Nothing is deleted: an earlier run's files go to ``previous/N/``. The latent cache stays, it is keyed."""
    found = [run_dir / name for name in OUTPUTS if (run_dir / name).exists()]
    if not found:
        return
    previous = run_dir / "previous"
    number = 1 + max((int(p.name) for p in previous.glob("*") if p.name.isdigit()), default=0)
    target = previous / str(number)
    target.mkdir(parents=True)
    # By its record a run's folder is known: gone first, a kill before the last rename would leave files of nobody.
    for path in sorted(found, key=lambda path: path.name == STARTS):
        path.rename(target / path.name)
    log.info("this run starts afresh: the earlier one's files are in %s", target)
