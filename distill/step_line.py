"""The log's line for a logged step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from fsdp_cp.words import duration


class StepLine:
    """Formats logged metrics as lines of aligned columns, and estimates the time that is left.

    Args:
        rates: for each trained role, the names under which its learning rates are logged (two for two experts).
        step: step that the run starts from.
        steps: last step of the run.
    """

    def __init__(self, rates: Mapping[str, Sequence[str]], *, step: int, steps: int):
        self._rates, self._steps = rates, steps
        self._since, self._clock = step, time.perf_counter()
        self._first = True

    def text(self, step: int, metrics: Mapping[str, float | None]) -> str:
        """Return the line of a 1-based step; ``-`` stands for a value that the metrics lack.

        Args:
            step: the step that was logged.
            metrics: the step's line of ``metrics.jsonl``.
        """

        def value(key: str, form: str, width: int) -> str:
            found = metrics.get(key)
            return f"{'-' if found is None else format(found, form):>{width}}"

        parts = [f"step {step:>{len(str(self._steps))}}/{self._steps}"]
        for role, names in self._rates.items():
            rates = "/".join(value(f"{name}/lr", ".2e", 8) for name in names)
            loss, norm = value(f"{role}/loss", ".4g", 9), value(f"{role}/grad_norm", ".3g", 8)
            parts.append(f"{role} loss {loss} norm {norm} lr {rates}")
        parts.append(f"{value('perf/seconds_per_step', '.3g', 6)} s")
        parts.append(f"{value('perf/tokens_per_second', ',.0f', 8)} tokens/s")
        if metrics.get("perf/mfu") is not None:  # unknown on a CPU, at all steps
            parts.append(f"MFU {value('perf/mfu', '.1%', 5)}")
        parts.append(f"{value('memory/peak_gib', '.2f', 5)} GiB")
        if step < self._steps:
            parts.append(f"{duration(self._seconds_left(step)):>8} left")
        return "  ".join(parts)

    def _seconds_left(self, step: int) -> float:
        """Extrapolate from the wall time since the first line, which leaves out compilation and other first calls."""
        now = time.perf_counter()
        per_step = (now - self._clock) / (step - self._since)
        if self._first:
            self._since, self._clock, self._first = step, now, False
        return per_step * (self._steps - step)
