"""What the benchmarks' options share."""

from __future__ import annotations

import argparse
import math


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
