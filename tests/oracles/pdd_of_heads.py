"""Parallel decoding distillation written out for float64: a loop over heads, each part at its own times."""

from itertools import pairwise

import torch
from torch import Tensor

from tests.oracles.dmd2_of_parts import shifted

Parts = dict[str, Tensor]


class PddOfHeads:
    """Losses of one step. ``call(role, x, times, null)`` is the velocity of all parts at the parts' own times, and
    ``head(k)`` a context in which the student's last layers are those of head k.

    ``ratios`` are the shifts from the video's time to each part's.
    """

    def __init__(self, call, head, settings, random, shapes, ratios):
        self.call, self.head, self.settings, self.random, self.shapes = call, head, settings, random, shapes
        count = settings.grid_steps
        even = torch.arange(count, -1, -1, dtype=torch.float64) / count
        self.grid = {part: shifted(even, settings.shift * ratios[part]) for part in shapes}
        self.steps = {part: [b - a for a, b in pairwise(grid)] for part, grid in self.grid.items()}

    def at(self, k: int) -> Parts:
        return {part: grid[k] for part, grid in self.grid.items()}

    def follow(self, x: Parts, heads: dict[int, Parts], first: int, end: int) -> Parts:
        for k in range(first, end):
            x = {part: x[part] + self.steps[part][k] * heads[k][part] for part in x}
        return x

    def heads(self, x: Parts, first: int, end: int) -> dict[int, Parts]:
        found = {}
        for k in range(first, end):
            with self.head(k):
                found[k] = self.call("student", x, self.at(first), False)
        return found

    def teacher(self, x: Parts, times: Parts) -> Parts:
        scale = self.settings.guidance_scale
        v = self.call("teacher", x, times, False)
        if scale == 1.0:
            return v
        null = self.call("teacher", x, times, True)
        return {part: null[part] + scale * (v[part] - null[part]) for part in v}

    @torch.no_grad()
    def target(self, x: Parts, k: int) -> Parts:
        v = self.teacher(x, self.at(k))
        if self.settings.solver == "euler":
            return v
        halves = {part: self.steps[part][k] / 2 for part in x}
        moved = {part: x[part] + halves[part] * v[part] for part in x}
        return self.teacher(moved, {part: self.at(k)[part] + halves[part] for part in x})

    def drawn(self, first: int, end: int) -> list[int]:
        left, targets = list(range(first, end)), []
        for i in range(min(self.settings.targets, end - first)):
            targets.append(left.pop(self.random.shared_integer(f"pdd/target/{first}_{i}", 0, len(left) - 1)))
        return targets

    def loss(self) -> Tensor:
        served = self.settings.steps
        steps = served[self.random.shared_integer("pdd/steps", 0, len(served) - 1)]
        size = self.settings.grid_steps // steps
        names = {part: "pdd/noise" if part == "video" else f"pdd/noise/{part}" for part in self.shapes}
        x = {part: self.random.normal(names[part], shape, torch.float64) for part, shape in self.shapes.items()}
        last = steps if self.settings.blocks == "all" else self.random.shared_integer("pdd/block", 0, steps - 1) + 1
        trained = range(last) if self.settings.blocks == "all" else [last - 1]
        loss, weights = torch.zeros((), dtype=torch.float64), {"video": 1.0, "audio": self.settings.audio_weight}
        for block in range(last):
            first, end = block * size, (block + 1) * size
            with torch.set_grad_enabled(block in trained):
                heads = self.heads(x, first, end)
            passed = {k: {part: v.detach() for part, v in head.items()} for k, head in heads.items()}
            if block in trained:
                targets = self.drawn(first, end)
                for k in targets:
                    u = self.target(self.follow(x, passed, first, k), k)
                    for part in x:
                        error = (heads[k][part] - u[part]).square().mean()
                        loss = loss + weights[part] * error / len(targets) / len(trained)
            x = self.follow(x, passed, first, end)
        return loss
