"""Profile hook over one training step: which files it enters, and how deep its stack is.

``torchrun --nproc-per-node 2 -m tests.main_path experiment=quickstart_dmd2 mesh.cp=2 steps=4 device=cpu run_dir=DIR
sample.at_end=false`` runs ``train.py``. For step 4 (a student's) on rank 0 it prints the project's files that the step
enters, and the deepest stack of the project's frames from which a function of torch is called.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import train
from distill.train.trainer import Trainer

ROOT = f"{Path(__file__).resolve().parent.parent}/"
PROFILED = ("fsdp_cp/", "models/", "distill/", "train.py")
files: set[str] = set()
deepest: list[str] = []


def record(frame: FrameType | None, event: str, argument: Any) -> None:
    """Record a call, as :func:`sys.setprofile` asks for it."""
    global deepest
    assert frame is not None
    name = frame.f_code.co_filename.removeprefix(ROOT)
    if event == "call" and name.startswith(PROFILED):
        files.add(name)
    if event == "c_call" and (
        isinstance(getattr(argument, "__self__", None), torch.Tensor) or str(argument.__module__).startswith("torch")
    ):
        stack = []
        while frame is not None:
            name = frame.f_code.co_filename.removeprefix(ROOT)
            if name.startswith(PROFILED):
                stack.append(f"{name}:{frame.f_code.co_name}")
            frame = frame.f_back
        deepest = max(deepest, stack, key=len)


def main() -> int:
    step, calls = Trainer._train_step, iter(range(1, 1000))

    def profiled(self: Trainer, *args: Any) -> Any:
        sys.setprofile(record if next(calls) == 4 and os.environ.get("RANK") == "0" else None)
        try:
            return step(self, *args)
        finally:
            sys.setprofile(None)

    Trainer._train_step = profiled
    code = train.main(sys.argv[1:])
    if files:
        print(f"{len(files)} files: {', '.join(sorted(files))}\n{len(deepest)} frames: {' > '.join(reversed(deepest))}")
    return code


if __name__ == "__main__":
    sys.exit(main())
