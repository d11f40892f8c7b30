"""What the benchmarks' options share."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path


def at_least_1(text: str) -> int:
    """A whole number of at least 1, for ``argparse``: a benchmark of no steps, ranks or runs ends in a traceback."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1, a whole number")
    return number


def above_0(text: str) -> float:
    """A finite number above 0, for ``argparse``."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return number


def add_students(parser: argparse.ArgumentParser, out: str, each: str) -> None:
    """``--seeds``, ``--out`` and ``--workers`` of a benchmark that trains students.

    Args:
        out: the folder of what is trained and measured.
        each: of what there are so many students.
    """
    parser.add_argument("--seeds", type=at_least_1, default=3, help=f"students of each {each}")
    parser.add_argument("--out", type=Path, default=Path(out), help="runs and measures; kept")
    parser.add_argument("--workers", type=at_least_1, default=os.cpu_count(), help="runs at a time")
