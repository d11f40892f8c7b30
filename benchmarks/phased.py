"""Training of the fake score of a phase with and without its weight: ``python -m benchmarks.phased``, in a plane.

In phased DMD's high phase, samples end at the border ``s = .8333``, and the fake score fits a target whose variance is
large shortly above it. The benchmark trains a small network on this loss, weighted by ``1 / (1 + var)`` or not. It
begins as the score of one mixture of normal distributions and has to follow the samples to another, as a fake score
does: far, to half of the modes, or near, to modes 10 % further out. The velocity of the other is known, so the error is
measured without the target's noise.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.arguments import at_least_1
from distill.methods.common.phases import Phase
from models.sample import VIDEO, Sample, shift_time

BORDER, MARGIN, SHIFT = 0.8333, 0.02, 5.0
"""Border and shift of Wan2.2 A14B's recipe, and the least distance of a time from the border."""
BATCH, SPREAD, MODES = 64, 0.2, 8
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
TIMES = (0.8533, 0.87, 0.9, 0.94, 0.98)
PHASE = Phase(BORDER)


class Mixture:
    """Normal distributions around ``centers`` ``(modes, d)``."""

    def __init__(self, centers: Tensor):
        self.centers = centers

    def samples(self, n: int, generator: torch.Generator) -> Tensor:
        chosen = self.centers[torch.randint(len(self.centers), (n,), generator=generator)]
        return chosen + SPREAD * torch.randn(chosen.shape, generator=generator)

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Return the flow's velocity ``E[e - x0 | x_t]``."""
        t = t[:, None]
        variance = (1 - t) ** 2 * SPREAD**2 + t**2
        away = x[:, None] - (1 - t)[:, None] * self.centers
        share = (-away.square().sum(2) / (2 * variance)).softmax(1)
        means = self.centers + ((1 - t) * SPREAD**2 / variance)[:, None] * away
        x0 = (share[:, :, None] * means).sum(1)
        return (x - x0) / t


class Score(nn.Module):
    """Velocity of points ``(n, 2)`` at times ``(n,)``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        turned = 20 * t[:, None]
        return self.layers(torch.cat([x, t[:, None], turned.sin(), turned.cos()], 1))


def times(n: int, generator: torch.Generator) -> Tensor:
    """Draw times of the phase's scores as ``method=dmd2`` does."""
    low, top = (shift_time(t, 1 / SHIFT) for t in (BORDER + MARGIN, 0.98))
    return shift_time(low + (top - low) * torch.rand(n, generator=generator), SHIFT)


def phase_loss(score: Score, data: Mixture, generator: torch.Generator, *, weighted: bool) -> Tensor:
    """Return the fake score's loss on new samples at the border."""
    t, noise = times(BATCH, generator), [torch.randn(BATCH, 2, generator=generator) for _ in range(2)]
    x_s = Sample({VIDEO: (1 - BORDER) * data.samples(BATCH, generator) + BORDER * noise[0]})
    e = Sample({VIDEO: noise[1]})
    errors = (score(PHASE.add_noise(x_s, e, t).video, t) - PHASE.velocity(x_s, e, t).video).square().mean(1)
    return (errors * PHASE.weight(x_s, t).video if weighted else errors).mean()


def exact_loss(score: Score, data: Mixture, generator: torch.Generator) -> Tensor:
    """Return the error of the velocity itself, over the phase's times."""
    t = times(BATCH, generator)
    x_t = (1 - t)[:, None] * data.samples(BATCH, generator) + t[:, None] * torch.randn(BATCH, 2, generator=generator)
    return (score(x_t, t) - data.velocity(x_t, t)).square().mean()


def fit(
    score: Score, loss: Callable[[], Tensor], steps: int, rate: float, seen: Callable[[], None] | None = None
) -> None:
    """Train ``score`` with Adam, with the moments of the recipes. Call ``seen`` at each tenth of the second half."""
    optimizer = torch.optim.Adam(score.parameters(), lr=rate, betas=(0.0, 0.999))
    every = max(1, steps // 20)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        if seen and 2 * step > steps and step % every == 0:
            seen()


def noise_of_gradient(score: Score, loss: Callable[[], Tensor], batches: int) -> float:
    """Return the variance of a batch's gradient over the squared length of its mean, at most ``batches``."""
    found = []
    for _ in range(batches):
        gradients = torch.autograd.grad(loss(), list(score.parameters()))
        found.append(torch.cat([g.flatten() for g in gradients]))
    every = torch.stack(found).double()
    variance, squared = every.var(0).sum(), every.mean(0).square().sum()
    return float(variance / torch.maximum(squared - variance / batches, variance / batches))


def errors_at(score: Score, data: Mixture, generator: torch.Generator) -> list[float]:
    """Return the mean squared error of the velocity at :data:`TIMES`."""
    found = []
    with torch.no_grad():
        for time in TIMES:
            t = torch.full((4096,), time)
            noise = torch.randn(4096, 2, generator=generator)
            x_t = (1 - time) * data.samples(4096, generator) + time * noise
            found.append(float((score(x_t, t) - data.velocity(x_t, t)).square().mean()))
    return found


def row(name: str, values: Sequence[Sequence[float]]) -> str:
    """Format means over seeds and looks."""
    means = torch.tensor(values).mean(0).tolist()
    return f"| {name} | " + " | ".join(f"{value:.4f}" for value in means) + " |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.phased", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=at_least_1, default=3)
    parser.add_argument("--updates", type=at_least_1, default=400, help="updates of the fake score on the new samples")
    parser.add_argument("--start-updates", type=at_least_1, default=3000, help="updates before")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    angles = torch.arange(MODES) * (2 * torch.pi / MODES)
    ring = 2 * torch.stack([angles.cos(), angles.sin()], 1)
    cases = {"far": Mixture(1.2 * ring[: MODES // 2]), "near": Mixture(1.1 * ring)}
    rows: dict[str, list[list[float]]] = {}
    noises: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        generator, start = torch.Generator().manual_seed(seed), Score()
        for rate in (1e-3, 1e-4):
            fit(start, partial(exact_loss, start, Mixture(ring), generator), args.start_updates // 2, rate)
        for case, data in cases.items():
            rows.setdefault(f"{case} | before | ", []).append(errors_at(start, data, generator))
            for weighted, weight in ((False, "1"), (True, "1 / (1 + var)")):
                loss = partial(phase_loss, data=data, generator=generator, weighted=weighted)
                noises.setdefault(f"{case} | {weight}", []).append(noise_of_gradient(start, partial(loss, start), 400))
                for rate in RATES:
                    score, found = copy.deepcopy(start), rows.setdefault(f"{case} | {weight} | {rate:g}", [])
                    look = partial(lambda *of: of[0].append(errors_at(*of[1:])), found, score, data, generator)
                    fit(score, partial(loss, score), args.updates, rate, look)
    print("| samples moved | weight | variance of the gradient over its mean's square |\n|---|---|---|")
    for name, values in noises.items():
        print(f"| {name} | {sum(values) / len(values):.1f} |")
    print(
        "\n| samples moved | weight | rate | "
        + " | ".join(f"t = {t}" for t in TIMES)
        + " |\n|"
        + "---|" * (3 + len(TIMES))
    )
    for name, found in rows.items():
        print(row(name, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
