"""Shared command-line options of the benchmarks."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path


def at_least_1(text: str) -> int:
    """Parse an integer of at least 1, for ``argparse``. Zero steps, ranks or runs would end in a traceback."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1, a whole number")
    return number


def above_0(text: str) -> float:
    """Parse a finite number above 0, for ``argparse``."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return number


def add_students(parser: argparse.ArgumentParser, out: str, unit: str) -> None:
    """Add ``--seeds``, ``--out`` and ``--workers`` of a benchmark that trains students.

    Args:
        parser: the benchmark's parser.
        out: default folder for runs and measures.
        unit: name of the unit that gets ``--seeds`` students, for the help text.
    """
    parser.add_argument("--seeds", type=at_least_1, default=3, help=f"students of each {unit}")
    parser.add_argument("--out", type=Path, default=Path(out), help="runs and measures; kept")
    parser.add_argument("--workers", type=at_least_1, default=os.cpu_count(), help="runs at a time")
