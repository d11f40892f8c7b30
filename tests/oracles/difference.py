"""Differences between two runs."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fsdp_cp.context.check_parallel import gradient_errors, relative_error
from tests.oracles.runs import Trace


@dataclass(frozen=True)
class Difference:
    """Largest relative differences of a run from the oracle, over all steps."""

    loss: float
    norm: float
    gradient: float
    """Maximum over tensors: norm of the difference to norm of the truth (at least 1e-6 of the whole gradient's)."""
    weight: float
    worst: str
    """Name of the tensor with the largest gradient difference."""

    @property
    def largest(self) -> float:
        return _largest([self.loss, self.norm, self.gradient, self.weight])


def _largest(values: Iterable[float]) -> float:
    """Return the maximum, or NaN if any value is NaN; ``max`` may ignore a NaN."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def compare(trace: Trace, oracle: Trace) -> Difference:
    """Return the differences of ``trace`` from ``oracle``. Raise if a gradient is missing or a role differs."""
    assert trace.roles == oracle.roles, (trace.roles, oracle.roles)
    worst, gradient = "", 0.0
    for step, (ours, truth) in enumerate(zip(trace.gradients, oracle.gradients, strict=True)):
        assert ours.keys() == truth.keys(), ours.keys() ^ truth.keys()
        for name, error in gradient_errors(ours, truth).items():
            if error > gradient:
                gradient, worst = error, f"{trace.roles[step]} step {step + 1} {name}"
    weight = [
        relative_error(trace.weights[role][n], w)
        for role, weights in oracle.weights.items()
        for n, w in weights.items()
    ]
    return Difference(
        loss=_largest(abs(a - b) / abs(b) for a, b in zip(trace.losses, oracle.losses, strict=True)),
        norm=_largest(abs(a - b) / abs(b) for a, b in zip(trace.norms, oracle.norms, strict=True)),
        gradient=gradient,
        weight=_largest(weight),
        worst=worst,
    )
