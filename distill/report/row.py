"""A row of a run's report, and how its measures are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from distill.report.measures import Measure


@dataclass(frozen=True, slots=True, eq=False)
class ReportRow:
    """One line of the report: a way to make clips, what it made, and how that measures."""

    name: str
    """As shown: "teacher, 50 steps"."""
    role: Literal["teacher", "student", "heldout"]
    steps: int | None
    """Sampling steps; None for held-out renders."""
    measures: Mapping[str, Measure] | None
    """By measure name; None for data sets without measures."""
    clips: np.ndarray
    """uint8 (n, T, H, W, 3); clip i belongs to caption i and noise i, in every row."""
    evaluations: int
    """Network evaluations that one clip takes (guidance evaluates twice a step); 0 for held-out renders."""


def label(measure: str) -> str:
    """A measure's name in words: "distance/edge_sharpness" is "edge sharpness distance"."""
    group, _, name = measure.rpartition("/")
    return f"{name} {group}".strip().replace("_", " ")
