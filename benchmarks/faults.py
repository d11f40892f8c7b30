"""What the programs share that harm a training run: its start, what is seen of it from outside, and whether it came out
the same as an undisturbed one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from benchmarks.distillation import ROOT
from distill.run_folder import STARTS
from fsdp_cp.checkpoint import published_steps, reader, step_folder
from fsdp_cp.errors import UserError

STEPS, EVERY, KEEP = 24, 3, 2
SETTINGS = (
    "experiment=quickstart",
    "device=cpu",
    "batch_size=2",
    f"steps={STEPS}",
    f"checkpoint.every={EVERY}",
    f"checkpoint.keep={KEEP}",
    "log.every=1",
    "sample.every=0",
    "sample.at_end=false",
)
"""A run of seconds, of which a good part is the writing of checkpoints; it ends with the export."""
PROGRESS = ("unlogged", "seconds")
"""What a checkpoint notes of the time that the run took, which is never the same twice."""


def new_folder(folder: Path) -> Path:
    """The absolute path of a folder that is new or empty.

    Raises:
        UserError: it holds something.
    """
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder} is not empty; remove it or give another")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def environment(**more: str) -> dict[str, str]:
    """This process's, without a torchrun's around it, with one thread a rank."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def processes(run_dir: Path) -> dict[int, int | None]:
    """Every living process of the run in ``run_dir``: its id and its rank, ``None`` for a torchrun."""
    found: dict[int, int | None] = {}
    word = f"run_dir={run_dir}"
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word not in (entry / "cmdline").read_text(errors="replace").split("\0"):
                continue
            variables = (entry / "environ").read_text(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile
            continue
        ranks = [text.removeprefix("RANK=") for text in variables if text.startswith("RANK=")]
        found[int(entry.name)] = int(ranks[0]) if ranks else None
    return found


def lives(process: int) -> bool:
    """Is it more than what an ended process leaves until its parent asks for its exit code?"""
    try:
        # "PID (NAME) STATE ...", where NAME may hold anything
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end_all(run_dir: Path) -> None:
    """SIGKILL every process of the run: torchrun's workers are in sessions of their own and outlive it."""
    for process in processes(run_dir):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Start:
    """One start of ``train.py`` in a run's folder; as a context, nothing of it outlives the block.

    Args:
        run_dir: the run's folder.
        overrides: what ``train.py`` is told beside it.
        torchrun: torchrun's options.
        log: what it prints is appended here.
        before: words before the command, which run it in a network namespace, say.
        more: environment variables.
    """

    def __init__(
        self,
        run_dir: Path,
        overrides: Sequence[str],
        *,
        torchrun: Sequence[str] = ("--standalone", "--nproc-per-node", "2"),
        log: Path,
        before: Sequence[str] = (),
        **more: str,
    ):
        self.run_dir = run_dir
        self.began, self._began_ns = time.monotonic(), time.time_ns()
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "train.py", *overrides]
        with log.open("a") as stream:
            self.process = subprocess.Popen(
                [*before, *command, f"run_dir={run_dir}"],
                cwd=ROOT,
                env=environment(**more),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is this program's, which then ends them all
            )

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            end_all(self.run_dir)
            self.process.wait()

    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.began

    def until(self, condition: Callable[[], bool], seconds: float = 300) -> bool:
        """Wait for ``condition``; false if torchrun ends before.

        Raises:
            RuntimeError: neither happened in ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing happened in {seconds:.0f} s in {self.run_dir}")
            time.sleep(0.002)  # a checkpoint of the tiny model takes a few tens of these
        return True

    def ranks(self) -> dict[int, int]:
        """Process ids of the workers by rank."""
        return {rank: process for process, rank in processes(self.run_dir).items() if rank is not None}

    def _is_new(self, path: Path) -> bool:
        try:
            return path.stat().st_ctime_ns > self._began_ns
        except OSError:
            return False

    def from_step(self) -> int | None:
        """The step that this start goes on from; ``None`` before it has noted that."""
        if not self._is_new(self.run_dir / STARTS):
            return None
        lines = (self.run_dir / STARTS).read_text().splitlines()
        return json.loads(lines[-1])["from_step"] if lines else None

    def writes_checkpoint(self, step: int | None = None) -> bool:
        """Is one (of ``step``) being written? What an earlier start left half written does not count."""
        pattern = "step_*.tmp" if step is None else f"step_{step:08d}.tmp"
        return any(self._is_new(path) for path in (self.run_dir / "checkpoints").glob(pattern))

    def exports(self) -> bool:
        """Is the export being written?"""
        return any(self._is_new(path) for path in (self.run_dir / "export").glob(".*.unfinished_*"))

    def exported(self) -> bool:
        """Is its last file there?"""
        return self._is_new(self.run_dir / "export" / "scheduler")


def newest(run_dir: Path) -> int:
    """The step of the newest complete checkpoint; 0 where there is none."""
    return max(published_steps(run_dir / "checkpoints"), default=0)


def losses(run_dir: Path) -> list[dict[str, float]]:
    """Step, losses and gradient norms of each complete line of ``metrics.jsonl``."""
    try:
        text = (run_dir / "metrics.jsonl").read_text()
    except OSError:
        return []
    lines = [json.loads(line) for line in text.split("\n")[:-1] if line.endswith("}")]
    return [{k: v for k, v in line.items() if k == "step" or k.endswith(("/loss", "/grad_norm"))} for line in lines]


def reached(run_dir: Path) -> int:
    """The last step in ``metrics.jsonl``."""
    return max((line["step"] for line in losses(run_dir)), default=0)


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, weights and optimizer states."""
    saved = reader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in saved.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is wanted
        dcp.load(tensors, storage_reader=reader(checkpoint), no_dist=True)
    return tensors


def _differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: str) -> Iterator[str]:
    if ours.keys() != theirs.keys():
        yield f"{what}: {len(ours.keys() ^ theirs.keys())} tensors are in one alone"
    # As bytes: two nan are the same here, 0 and -0 are not.
    bad = [
        name
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name].dtype != theirs[name].dtype
        or not torch.equal(ours[name].reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8))
    ]
    if bad:
        yield f"{what}: {len(bad)} of {len(ours)} tensors differ, {bad[0]} the first"


def differences(run_dir: Path, truth: Path) -> list[str]:
    """In what a finished run is other than an undisturbed one, bit for bit; nothing if it is the same."""
    found = []
    if losses(run_dir) != losses(truth):
        found.append("metrics.jsonl: the losses differ")
    if [line["step"] for line in losses(run_dir)] != list(range(1, newest(truth) + 1)):
        found.append("metrics.jsonl: not every step once")
    if newest(run_dir) != newest(truth):
        return [*found, f"the newest checkpoint is of step {newest(run_dir)}, not {newest(truth)}"]
    ours, theirs = (step_folder(folder / "checkpoints", newest(truth)) for folder in (run_dir, truth))
    found += _differing(_tensors(ours), _tensors(theirs), "the newest checkpoint")
    numbers = [json.loads((folder / "state.json").read_text()) for folder in (ours, theirs)]
    if [{k: v for k, v in each.items() if k not in PROGRESS} for each in numbers[:1]] != [
        {k: v for k, v in each.items() if k not in PROGRESS} for each in numbers[1:]
    ]:
        found.append("the newest checkpoint: state.json differs")
    files = sorted(path.relative_to(truth) for path in (truth / "export").rglob("*") if path.is_file())
    for file in files:
        if not (run_dir / file).is_file():
            found.append(f"{file} is missing")
        elif file.suffix == ".safetensors":
            found += _differing(load_file(run_dir / file), load_file(truth / file), str(file))
    return found


def leftovers(run_dir: Path) -> list[str]:
    """What a finished run should not leave: parts of checkpoints and exports, more checkpoints than are kept."""
    checkpoints = run_dir / "checkpoints"
    found = [path for pattern in ("*.tmp", "left_*") for path in checkpoints.glob(pattern)]
    found += [path for path in checkpoints.glob("step_*[0-9]") if not (path / "state.json").is_file()]
    found += [path for pattern in (".*unfinished_*", ".*replaced_*", "*_kept_*") for path in run_dir.rglob(pattern)]
    found += [path for pattern in (".shared_*", ".*.tmp", "*.tmp") for path in run_dir.glob(pattern)]
    names = [str(path.relative_to(run_dir)) for path in sorted(set(found))]
    if len(published_steps(checkpoints)) > KEEP:
        names.append(f"{len(published_steps(checkpoints))} checkpoints, of which {KEEP} are to be kept")
    return names
