"""Heads: one last layer for each interval of a grid of times (parallel decoding distillation, arXiv:2607.26004).

One forward of the network predicts the mean velocity over each of the intervals that follow. A mean over several
intervals is a mean of heads, so it takes one product with a *fused* head.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from models.additions.base import Addition
from models.families.base import Family, config_of
from models.sample import VIDEO, shift_time

NAME = "heads"
Span = tuple[int, int]
"""Intervals of a grid, from the first to before the second."""
Rows = Mapping[str, Sequence[Sequence[float]]]
"""P weighted means of N heads, ``(P, N)``, by part."""
Fused = Mapping[str, tuple[Tensor, Tensor]]
"""Weight ``(P, out, in)`` and bias ``(P, out)`` of P fused heads, by part."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Grid of ``intervals`` between the times 1 and 0, even before the shift, each part on its own clock."""

    intervals: int
    shift: float
    """Shift of the video's times."""
    parts: Mapping[str, float]
    """Shift from the video's time to each part's own."""
    steps: Sequence[int] = ()
    """Numbers of sampling steps that a student on this grid serves, ascending."""

    @cached_property
    def times(self) -> dict[str, list[float]]:
        """Each part's own times, from 1 down to 0."""
        even = [shift_time(1 - i / self.intervals, self.shift) for i in range(self.intervals + 1)]
        return {part: [shift_time(t, shift) for t in even] for part, shift in self.parts.items()}

    def lengths(self, span: Span) -> dict[str, float]:
        """Return the change of each part's time over ``span``, below 0."""
        first, end = span
        return {part: times[end] - times[first] for part, times in self.times.items()}

    def blocks(self, steps: int) -> list[Span]:
        """Return the spans of a sampler of ``steps`` steps, each of equally many intervals."""
        size = self.intervals // steps
        return [(i * size, (i + 1) * size) for i in range(steps)]

    def few_steps(self, steps: int) -> list[float]:
        """Return the video's times of a sampler of ``steps`` steps, above 0."""
        return [self.times[VIDEO][first] for first, _ in self.blocks(steps)]

    def mean(self, *spans: Span) -> Rows:
        """Return one row for each of ``spans``: the weights of the heads in its mean velocity, which are proportional
        to the lengths of their intervals."""
        return {part: [_weights(times, *span) for span in spans] for part, times in self.times.items()}


def _weights(times: Sequence[float], first: int, end: int) -> list[float]:
    whole = times[first] - times[end]
    return [(a - b) / whole if first <= i < end else 0.0 for i, (a, b) in enumerate(pairwise(times))]


class _PartHeads(nn.Module):
    """Differences of one part's N heads from the network's last layer, zero at the start."""

    def __init__(self, count: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(count, outputs))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def mean(self, rows: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
        weights = torch.tensor(rows, dtype=self.weight.dtype, device=self.weight.device)
        return torch.einsum("pn,noi->poi", weights, self.weight), weights @ self.bias


class Heads(Addition):
    """N last layers of each part, as differences from the network's own, which is frozen.

    A call names means of heads (:meth:`at`), and the network's output then stacks the P velocities of these means
    along its batch: those of the first mean for all samples, then those of the second. Fused heads are summed before
    the product and added to the output of the network's own layer, both in fp32 under bf16.
    """

    def __init__(self, family: Family, config: Mapping[str, Any], *, count: int):
        super().__init__(family, config)
        layers = family.last_layers(config)
        if not layers:
            raise UserError(f"method=pdd trains heads in the place of a last layer, which {family.name} does not name")
        for part, layer in layers.items():
            self.add_module(part, _PartHeads(count, layer.inputs, layer.outputs))
        self.freezes = [f"{layer.name}.{tensor}" for layer in layers.values() for tensor in ("weight", "bias")]
        self._rows: Rows | None = None
        self._fused: Fused | None = None

    def forward(self, rows: Rows) -> Fused:
        """Return the differences of fused heads from the network's last layers."""
        return {part: cast(_PartHeads, heads).mean(rows[part]) for part, heads in self.named_children()}

    def attach(self, network: nn.Module, family: Family, mesh: Mesh) -> None:
        config = config_of(network)
        for part, layer in family.last_layers(config).items():
            hook = partial(self._replace, part, partial(family.stacked_outputs, config))
            network.get_submodule(layer.name).register_forward_hook(hook)

    @contextmanager
    def at(self, rows: Rows) -> Iterator[None]:
        """Run calls of the network within this context with the P means of heads ``rows``."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows, self._fused = None, None

    def _replace(self, part: str, stacked, _layer: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        """Return the outputs of P means in the place of the last layer's ``output``."""
        if self._rows is None:
            if self.shared:
                return None
            raise RuntimeError("this network was called without its heads; give them to Role.velocity")
        if self._fused is None:  # once for all parts: their parameters are one FSDP unit
            self._fused = self(self._rows)
        weight, bias = self._fused[part]
        difference = F.linear(args[0].to(weight.dtype), weight.flatten(0, 1), bias.flatten())
        return stacked(part, output.unsqueeze(-2) + difference.unflatten(-1, bias.shape))
