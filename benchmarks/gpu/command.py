"""Measurements of this project on one GPU, as one command: ``python -m benchmarks.gpu``.

The command takes at most 30 minutes, in parts of at most 2 minutes, the most decisive first. Each part is a process
with a time limit: a crash or a hang becomes a row with its error, and the other parts run. A finished part is not
measured again, except with ``--again NAME``; the same command therefore resumes an interrupted one. Results go to
``benchmarks/results/gpu_DEVICE.md`` and ``.json`` after each part, with device, driver, versions and commit.

``python -m benchmarks.gpu --device cpu --tiny`` runs every part at test size on a machine without a GPU; without
``--out`` it keeps nothing. fp8 is measured only on a GPU.

Exit codes: 0; 1 if a requested part is not finished; 2 with one line for a user's mistake; 75 after SIGTERM.

From Python, :func:`main` takes other parts. A part names an importable function of a
:class:`benchmarks.gpu.child.Context`.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from benchmarks.arguments import above_0
from benchmarks.gpu.child import ROOT, TINY_PATIENCE
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.process import FINISHED, run_part
from benchmarks.gpu.report import NOT_RUN, Results
from fsdp_cp.errors import UserError
from fsdp_cp.launch import exit_code
from fsdp_cp.runtime.signals import Stopped

MINUTES = 30.0
LEAST_SECONDS = 15.0
"""Minimum remaining time for starting a part."""


def main(argv: list[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the command. Return exit code 0; 1 if a part is not finished; 2 with one line for a user's mistake.

    Args:
        argv: the words after the command.
        parts: the parts to measure, in this order.
    """
    args = _parser(parts).parse_args(argv)
    unfinished: list[str] = []
    code = exit_code(lambda: unfinished.extend(_measure(args, parts)))
    return code or int(bool(unfinished))


def stop(number: int, frame: object) -> NoReturn:
    """Handle SIGTERM by an exception, which ends the running part. The default action would leave the part running.

    Raises:
        Stopped: always.
    """
    raise Stopped(f"stopped by {signal.Signals(number).name}; the same command resumes with the interrupted part")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one line and without the usage, which ``--help`` prints."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def _parser(parts: Sequence[Part]) -> argparse.ArgumentParser:
    names = ", ".join(f"'{part.name}'" for part in parts)
    parser = _Parser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0], epilog=f"Parts: {names}."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for --tiny alone")
    parser.add_argument("--tiny", action="store_true", help="every part at test size")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="parts to be measured once more")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of all parts these alone")
    parser.add_argument("--minutes", type=above_0, default=MINUTES, help="for all parts together; at most 30")
    parser.add_argument("--out", type=Path, help="another folder for the results than benchmarks/results")
    return parser


def _measure(args: argparse.Namespace, parts: Sequence[Part]) -> list[str]:
    """Measure the requested parts that are missing, print the page, and return the names of unfinished parts.

    Raises:
        UserError: unknown parts, GPU sizes on a CPU, no GPU, a folder that cannot be written.
    """
    known = [part.name for part in parts]
    for option in ("again", "only"):
        for name in getattr(args, option):
            if name not in known:
                raise UserError(f"--{option} {name} is unknown; use {', '.join(map(repr, known))}")
    if args.device == "cpu" and not args.tiny:
        raise UserError("--device cpu has sizes for a test alone; add --tiny, or use --device cuda")
    if args.minutes > MINUTES:
        raise UserError(f"--minutes {args.minutes:g} is more than {MINUTES:g}; start the command again to continue")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out} is a file; give a folder")
    wanted = [part for part in parts if not args.only or part.name in args.only or part.name in args.again]
    with ExitStack() as stack:
        began = time.monotonic()
        device, made_with = described(args.device)
        folder = args.out
        if folder is None and args.tiny:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu_")))
        results = Results.read(folder or ROOT / "benchmarks" / "results", device, args.tiny)
        results.write(parts)  # find now, not in half an hour, that the folder cannot be written
        for part in wanted:
            if results.has(part.name) and part.name not in args.again:
                print(f"{part.name}: has its result (--again '{part.name}' measures it once more)", file=sys.stderr)
                continue
            left = 60 * args.minutes - (time.monotonic() - began)
            if left < LEAST_SECONDS:
                results.parts.setdefault(part.name, _not_run(args.minutes))
                continue
            limit = min(part.seconds * (TINY_PATIENCE if args.tiny else 1), left)
            print(f"{part.name}: {limit:.0f} s at most", file=sys.stderr, flush=True)
            outcome = run_part(part, device_type=args.device, tiny=args.tiny, seconds=limit)
            if outcome.status != FINISHED:
                print(*outcome.printed, f"{part.name}: {outcome.error}", sep="\n", file=sys.stderr, flush=True)
            record = {key: value for key, value in asdict(outcome).items() if key != "printed"}
            results.parts[part.name] = record | {"made_with": made_with}
            results.write(parts)
        results.write(parts)
        print(results.markdown(parts), flush=True)
        if args.out is not None or not args.tiny:
            print(f"written to {results.file.with_suffix('.md')} and {results.file.name}", file=sys.stderr)
    return [part.name for part in wanted if not results.has(part.name)]


def _not_run(minutes: float) -> dict[str, object]:
    return {"status": NOT_RUN, "error": f"the {minutes:g} minutes were over; start the command again", "rows": []}


# --- device and versions ---


def described(device_type: str) -> tuple[str, dict[str, str]]:
    """Return the device's name, and the commit and versions.

    Raises:
        UserError: no GPU.
    """
    made_with = {"commit": _commit(), "torch": _version("torch"), "python": platform.python_version()}
    if device_type == "cpu":
        return f"cpu {platform.machine()}", made_with
    # Ask in another process: a process that asks a GPU for its name keeps some of its memory.
    code = "import sys; from benchmarks.gpu.command import print_gpu; sys.exit(print_gpu())"
    try:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as error:
        raise UserError("--device cuda: the GPU's driver does not answer; or use --device cpu --tiny") from error
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or [""]
        raise UserError(f"--device cuda needs a GPU that torch can use ({last[0]}); or use --device cpu --tiny")
    report = json.loads(done.stdout.splitlines()[-1])
    return report.pop("name"), made_with | report | {"driver": _driver()}


def print_gpu() -> int:
    """Print a JSON object with the first GPU's ``name`` and versions of its software. Return 0, or 1 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        print("torch sees none")
        return 1
    properties = torch.cuda.get_device_properties(0)
    gpu = {
        "name": properties.name,
        "GiB": f"{properties.total_memory / 2**30:.1f}",
        "capability": f"{properties.major}.{properties.minor}",
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "diffusers": _version("diffusers"),
        "flash-attn-3": _version("flash-attn-3"),
        "transformer-engine": _version("transformer-engine"),
    }
    print(json.dumps(gpu))
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):  # some containers lack the command
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"


def _commit() -> str:
    """Return the short commit, with a note of uncommitted changes; ``unknown`` outside of a checkout."""
    try:
        commands = [
            subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=60)
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    if any(done.returncode for done in commands):
        return "unknown"
    return commands[0].stdout.strip() + (" and changes" if commands[1].stdout.strip() else "")
