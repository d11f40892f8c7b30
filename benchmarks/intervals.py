"""Coverage of the evaluation's intervals, by simulation (``python -m benchmarks.intervals``).

Each row is a kind of measure at a number of prompts. Each cell is the share of simulated evaluations whose interval
lies above the truth, and below it, in percent: 2.5 and 2.5 where an interval is exact. A difference is one of two
participants of the same kind, whose truth is 0: its misses are false verdicts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from benchmarks.arguments import at_least_1
from distill.evaluate.intervals import Interval, mean_interval, share_interval
from fsdp_cp.errors import counted

COUNTS = (8, 20, 100)
SEEDS = (1, 5)
OF_PROMPT = 0.5
"""Share of the variance, before a kind's transformation, that the clips of a prompt have in common."""


@dataclass(frozen=True)
class Kind:
    """Distribution of a measure of clips."""

    name: str
    of_normal: Callable[[np.ndarray], np.ndarray]
    """Values of clips, from standard normal numbers."""
    truth: float
    is_share: bool = False

    def draw(self, rng: np.random.Generator, prompts: int, seeds: int, repeats: int) -> np.ndarray:
        """Return means over the seeds of each prompt, ``(prompts, repeats)``."""
        of_prompt = rng.standard_normal((prompts, 1, repeats))
        of_clip = rng.standard_normal((prompts, seeds, repeats))
        clips = self.of_normal(OF_PROMPT**0.5 * of_prompt + (1 - OF_PROMPT) ** 0.5 * of_clip)
        return clips.mean(axis=1)


def _share(p: float) -> Kind:
    return Kind(f"share {p:g}", lambda z: (z < ndtri(p)).astype(float), p, is_share=True)


_TIED = ndtri(0.9)
KINDS = (
    Kind("normal", lambda z: z, 0.0),
    Kind("lognormal 1", np.exp, float(np.exp(0.5))),
    *map(_share, (0.5, 0.9, 0.97, 0.99)),
    # 0 for nine clips of ten, and the excess over a threshold for the tenth.
    Kind(
        "90 % ties",
        lambda z: np.maximum(z - _TIED, 0),
        float(np.exp(-(_TIED**2) / 2) / (2 * np.pi) ** 0.5 - 0.1 * _TIED),
    ),
)


@dataclass(frozen=True)
class Misses:
    """Shares of the simulated intervals that miss the truth."""

    above: float
    """Share that lies above the truth whole: a false "higher"."""
    below: float
    without_spread: float
    """Share of the simulated samples whose values are all equal."""

    @property
    def covered(self) -> float:
        return 1 - self.above - self.below


def misses(interval: Interval, truth: float) -> Misses:
    """Compare intervals, one a column, with the truth."""
    if not np.isfinite([interval["low"], interval["high"]]).all():
        raise AssertionError("a bound is not finite")
    above, below = interval["low"] > truth, interval["high"] < truth
    return Misses(float(above.mean()), float(below.mean()), float((interval["standard_error"] == 0).mean()))


def simulate(kind: Kind, prompts: int, seeds: int, repeats: int, *, is_difference: bool) -> Misses:
    """Return the misses of the interval that an evaluation takes."""
    rng = np.random.default_rng(prompts * 10 + seeds)
    means = kind.draw(rng, prompts, seeds, repeats)
    if is_difference:
        return misses(mean_interval(means - kind.draw(rng, prompts, seeds, repeats)), 0.0)
    if kind.is_share:
        return misses(share_interval(means, prompts * seeds), kind.truth)
    return misses(mean_interval(means), kind.truth)


def _cell(found: Misses) -> str:
    tied = f" ({100 * found.without_spread:.0f} % without spread)" if found.without_spread > 0.025 else ""
    return f"{100 * found.above:.1f} + {100 * found.below:.1f}{tied}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=at_least_1, default=4000, help="simulated evaluations of each cell")
    repeats = parser.parse_args().repeats
    heads = [f"{n} prompts, {counted(seeds, 'seed')}" for n in COUNTS for seeds in SEEDS]
    print(f"| misses above + below, in % | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|", sep="\n")
    for is_difference in (False, True):
        for kind in KINDS:
            found = [simulate(kind, n, seeds, repeats, is_difference=is_difference) for n in COUNTS for seeds in SEEDS]
            name = f"difference of two, {kind.name}" if is_difference else kind.name
            print(f"| {name} | {' | '.join(map(_cell, found))} |", flush=True)


if __name__ == "__main__":
    main()
