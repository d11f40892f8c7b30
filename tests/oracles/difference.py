"""Differences between two runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_cp.context.check_parallel import gradient_errors, relative_error
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import Setup, Trace
from tests.oracles.sharded_run import trace_on_ranks
from tests.pools import Pools


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


def check_trace(trace: Trace, oracle: Trace, bound: float = 1e-5) -> None:
    """Require that ``trace`` is ``oracle`` to rounding."""
    difference = compare(trace, oracle)
    assert difference.largest < bound, difference


def check_run(pools: Pools, setup: Setup, folder: Path, oracle: Trace | None = None, bound: float = 1e-5) -> Trace:
    """Require that ``setup`` on its mesh equals plain networks in one process, or ``oracle``; return its trace."""
    trace = trace_on_ranks(setup, folder, pools[setup.world_size])
    check_trace(trace, oracle or oracle_trace(setup, folder), bound)
    assert all(norm > 1e-4 for norm in trace.norms), "nothing to compare"
    return trace
