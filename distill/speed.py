"""``perf/*`` of a step: time by phase, throughput and the share of the device's arithmetic that was used."""

from __future__ import annotations

from collections.abc import Mapping


def speed(
    name: str,
    *,
    seconds: float,
    phases: Mapping[str, float],
    samples: int,
    tokens: int,
    flops: float,
    peak: float | None,
) -> dict[str, float | None]:
    """The metrics of one step of role ``name``.

    A line of metrics has the latest step of every role since the line before, so the times by phase are under the
    role's name: of one line, those under ``perf/seconds/ROLE/`` add up to ``perf/seconds/ROLE``.

    Args:
        name: of the role that trained.
        seconds: of the step, by the host's clock.
        phases: of :meth:`fsdp_cp.measure.phases.PhaseTimes.seconds`.
        samples: of the global batch.
        tokens: of the global batch.
        flops: of the step, over all ranks.
        peak: operations per second that all ranks together could do; ``None`` where that is not known.
    """
    times = {phase.removeprefix(f"{name}/") or "other": taken for phase, taken in phases.items()}
    return {
        "perf/seconds_per_step": seconds,
        "perf/samples_per_second": samples / seconds,
        "perf/tokens_per_second": tokens / seconds,
        "perf/flops": flops,
        "perf/mfu": None if peak is None else flops / seconds / peak,
        f"perf/seconds/{name}": seconds,
        **{f"perf/seconds/{name}/{phase}": taken for phase, taken in times.items()},
    }
