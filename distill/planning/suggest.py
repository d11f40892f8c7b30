"""``train.py plan=suggest``: which meshes, checkpointing, micro-batches and strategies fit, and which is fastest.

Every candidate is planned as ``plan=true`` would (distill/planning/command.py), each in a process of its own. What the
user's words set stays as it is.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from distill.config import Config, compose_config
from distill.methods import METHODS
from distill.planning.command import as_planned, log_fp8, make_prediction, planned_shapes, require_plannable
from distill.planning.files import (
    MADE_BY,
    SUGGESTIONS,
    make_writable,
    refuse_foreign_suggestions,
    settings_digest,
    write,
)
from distill.planning.hardware import load_hardware
from distill.planning.prediction import GIB
from distill.setup import has_adapters, plan_run, world_of
from fsdp_cp.errors import UserError
from fsdp_cp.host_memory import available_host_memory
from fsdp_cp.progress import progress
from fsdp_cp.words import counted

log = logging.getLogger(__name__)

MARGIN = 0.05
"""Share of the device's memory that a suggestion leaves free, for what a plan does not know."""
_SHOWN = 5
_PROCESS_BYTES = 3e9
"""Of the host's memory, for one process that plans."""

Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the plan of one candidate says."""

    words: Words
    """What it sets beside the user's own words."""
    refused: str | None = None
    """Why a run would refuse it; nothing else is known then."""
    device_gib: float = 0.0
    memory_gib: float = 0.0
    mesh: str = ""
    seconds_per_step: float | None = None
    mfu: float | None = None
    peak_phase: str = ""
    largest: str = ""
    """Role and kind of which most is held at the peak."""
    host_gib: float = 0.0
    """Of the host's memory for a rank: what is offloaded, and the copy of a checkpoint."""

    @property
    def fits(self) -> bool:
        """With a margin."""
        return self.refused is None and self.device_gib <= (1 - MARGIN) * self.memory_gib

    @property
    def why_not(self) -> str:
        """Of one that does not fit: the phase that broke the budget, and what of."""
        if self.refused is not None:
            return self.refused
        return f"{self.device_gib:.1f} GiB in {self.peak_phase or 'between phases'}, most of it {self.largest}"


def suggest_command(config: Config, overrides: Sequence[str]) -> None:
    """Print what fits, fastest first, with the words to paste, and why the others fall; write ``suggestions.json``.

    Args:
        config: the checked configuration of ``overrides``.
        overrides: the user's words.

    Raises:
        UserError: as of ``plan=true``; no ``planning.hardware``; nothing that could be tried.
    """
    require_plannable(config)
    log_fp8(config)
    if config.planning.hardware is None:
        raise UserError("plan=suggest must know the GPU; use planning.hardware=h20, or another of configs/hardware")
    load_hardware(config.planning.hardware)
    folder = Path(config.run_dir or ".")
    refuse_foreign_suggestions(folder)
    make_writable(folder)
    own = [word for word in overrides if not word.startswith("plan=")]
    axes = Axes.of(config, own)
    log.info(
        "plan=suggest on %s of %s: cp %s, one plan after another on %s (a minute or more each)",
        counted(world_of(config), "rank"),
        config.planning.hardware,
        ", ".join(map(str, axes.cp)),
        counted(_processes(), "process", "processes"),
    )
    about = {"words": own, "hardware": config.planning.hardware, "settings": settings_digest(config)}
    record = Record(folder, about)
    if record.outcomes:
        log.info("resuming: %s planned already", counted(len(record.outcomes), "candidate"))
    context = get_context("spawn")  # a fork would take torch's threads along in a state of their own
    with ProcessPoolExecutor(
        _processes(), mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        found = search(axes, lambda candidates: plan_all(candidates, _Evaluate(own), pool, record))
    for line in in_words(found, own):
        log.info(line)
    record.write(found, finished=True)
    log.info("written to %s", folder / SUGGESTIONS)


class Record:
    """``suggestions.json``, written after each candidate. An interrupted search with equal ``about`` is resumed.

    Args:
        folder: the run's folder.
        about: JSON values that define the search.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]):
        self._folder, self._about = folder, {"made_by": MADE_BY, **about}
        self.outcomes: dict[Words, Outcome] = {}
        """Planned candidates by their words."""
        with suppress(OSError, ValueError, LookupError, TypeError):  # no file, or one of another version
            earlier = json.loads((folder / SUGGESTIONS).read_text())
            if not earlier["finished"] and all(earlier[key] == value for key, value in self._about.items()):
                for candidate in earlier["candidates"]:
                    del candidate["fits"]
                    outcome = Outcome(**candidate | {"words": tuple(candidate["words"])})
                    self.outcomes[outcome.words] = outcome

    def add(self, outcome: Outcome) -> None:
        """Record a candidate."""
        self.outcomes[outcome.words] = outcome
        self.write(list(self.outcomes.values()), finished=False)

    def write(self, outcomes: Sequence[Outcome], *, finished: bool) -> None:
        """Write the file. A finished search is not resumed: the same command plans all candidates again."""
        candidates = [asdict(outcome) | {"fits": outcome.fits} for outcome in ranked(outcomes)]
        content = {**self._about, "finished": finished, "candidates": candidates}
        write(self._folder, {SUGGESTIONS: lambda: (json.dumps(content, indent=1) + "\n").encode()})


def plan_all(
    candidates: Sequence[Words], plan: Callable[[Words], Outcome], pool: Executor, record: Record
) -> list[Outcome]:
    """Plan the candidates that ``record`` lacks, log and record each when it is done, and return all in order.

    Args:
        candidates: words of each.
        plan: plans one candidate, in a worker of ``pool``.
        pool: runs ``plan``.
        record: the search so far.
    """
    waiting = [pool.submit(plan, words) for words in candidates if words not in record.outcomes]
    try:
        with progress(len(waiting), "planning", "candidate") as advance:
            for future in as_completed(waiting):
                outcome = future.result()
                record.add(outcome)
                what = "fits" if outcome.fits else "refused" if outcome.refused is not None else "does not fit"
                log.info("  %s: %s", shlex.join(outcome.words), what)
                advance(1)
    finally:
        for future in waiting:
            future.cancel()
    return [record.outcomes[words] for words in candidates]


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What may be varied; an axis that the user's words set has no values."""

    cp: tuple[int, ...]
    checkpointing: tuple[str, ...]
    """From the fastest to the smallest."""
    trained: tuple[str, ...]
    roles: tuple[str, ...]
    offloaded: tuple[str, ...]
    """Roles whose states can go to the host's memory: those that train, and who shares a base with them."""
    micro_batches: tuple[int, ...]
    """Larger than the configured one; smallest first."""
    crowded: tuple[int, ...]
    """Those of :attr:`cp` with which a forward takes several samples, where it need not."""
    mesh: bool
    """May ``mesh`` be?"""
    strategy: bool
    offload: bool

    @classmethod
    def of(cls, config: Config, own: Sequence[str]) -> Axes:
        """Those of a configuration that is composed of ``own`` words."""
        method, world = METHODS[config.method.name][0], world_of(config)
        roles, trained = method.roles_needed(config.method), method.trained_roles
        keys = {word.lstrip("+~").split("=")[0] for word in own}

        def free(*names: str) -> bool:
            return not keys & set(names)

        mesh_is_free = free("mesh.cp", "mesh.dp_shard", "mesh.ulysses", "mesh.ring")
        first = config.micro_batch_size  # without one, a step's samples are one already
        adapted = any(has_adapters(getattr(config, name)) for name in trained)
        cp = tuple(n for n in range(1, world + 1) if world % n == 0) if mesh_is_free else (config.mesh.cp,)
        return cls(
            cp=cp,
            checkpointing=("none", "selective", "full")
            if free(*(f"{name}.activation_checkpointing" for name in trained))
            else (),
            trained=tuple(trained),
            roles=tuple(roles),
            offloaded=tuple(roles if adapted else trained),
            micro_batches=tuple(n for n in (2 * first, 4 * first) if config.batch_size % n == 0)
            if first is not None and free("micro_batch_size")
            else (),
            crowded=tuple(n for n in cp if (first or config.batch_size * n // world) > 1)
            if free("micro_batch_size")
            else (),
            mesh=mesh_is_free,
            strategy=free(*(f"{name}.strategy" for name in roles)),
            offload=free(*(f"{name}.offload" for name in trained)),
        )

    def split(self, cp: int) -> Words:
        """So many ranks share a sample; nothing where the user's words say how many."""
        return (f"mesh.cp={cp}",) if self.mesh else ()

    def checkpointed(self, how: str) -> Words:
        """Every trained role checkpointed so."""
        return tuple(f"{name}.activation_checkpointing={how}" for name in self.trained)


def search(axes: Axes, evaluate: Callable[[list[Words]], list[Outcome]]) -> list[Outcome]:
    """All that was tried.

    For every ``mesh.cp`` the least checkpointing that fits: more of it only costs time. From the fastest two of these,
    larger micro-batches, ring attention within the same ``cp``, and parameters that stay gathered. Where none fits, one
    sample a forward; and if that does not either, the smallest with the trained roles' states in the host's memory.

    Args:
        axes: what may be varied.
        evaluate: the outcomes of candidates, in their order.
    """
    tried: list[Outcome] = []
    left = list(axes.cp)
    ways = axes.checkpointing or ("",)
    for how in ways:
        outcomes = evaluate([(*axes.split(cp), *(axes.checkpointed(how) if how else ())) for cp in left])
        # Which keep_operators go with "selective" alone: what one way is refused for, another need not be.
        tried += [outcome for outcome in outcomes if outcome.refused is None or how == ways[-1]]
        left = [cp for cp, outcome in zip(left, outcomes, strict=True) if not outcome.fits]
        if not left:
            break
    best = [outcome for outcome in ranked(tried) if outcome.fits][:2]
    if best:
        more = list(dict.fromkeys(words for outcome in best for words in _variations(axes, outcome.words)))
        return tried + evaluate(more)
    if axes.crowded:
        least = axes.checkpointed(ways[-1]) if ways[-1] else ()
        tried += evaluate([(*axes.split(cp), *least, "micro_batch_size=1") for cp in axes.crowded])
        if any(outcome.fits for outcome in tried):
            return tried
    whole = [outcome for outcome in tried if outcome.refused is None]
    if whole and axes.offload:
        smallest = min(whole, key=lambda outcome: outcome.device_gib).words
        offloaded = tuple(f"{name}.offload=cpu" for name in axes.offloaded)
        tried += evaluate([(*smallest, *offloaded)])
    return tried


def _variations(axes: Axes, words: Words) -> Iterator[Words]:
    for size in axes.micro_batches:
        yield (*words, f"micro_batch_size={size}")
    if axes.mesh and (cp := int(words[0].partition("=")[2])) % 2 == 0:
        yield (*words, f"mesh.ulysses={cp // 2}", "mesh.ring=2")
    if axes.strategy:
        yield (*words, *(f"{name}.strategy=optim_grads" for name in axes.roles))


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that fit first, the fastest of them first, then the others, the smallest first; refused ones last."""

    def key(outcome: Outcome) -> tuple[int, float, float]:
        seconds = outcome.seconds_per_step
        if outcome.refused is not None:
            return 2, 0.0, 0.0
        if outcome.fits:
            return 0, float("inf") if seconds is None else seconds, outcome.device_gib
        return 1, outcome.device_gib, 0.0

    return sorted(outcomes, key=key)


class _Evaluate:
    """Plans a candidate; sent to other processes."""

    def __init__(self, own: Sequence[str]):
        self.own = tuple(own)

    def __call__(self, words: Words) -> Outcome:
        try:
            config = as_planned(compose_config([*self.own, *words, "plan=true"]))
            require_plannable(config)
            shapes = planned_shapes(config)
            prediction = make_prediction(config, plan_run(config, shapes=shapes), shapes)
        except UserError as error:
            return Outcome(words=words, refused=str(error))
        peak, hardware = prediction.peaks[prediction.peak_phase], prediction.hardware
        assert hardware is not None
        (role, kind), size = max(peak.by.items(), key=lambda item: item[1])
        return Outcome(
            words=words,
            device_gib=prediction.device_gib,
            memory_gib=hardware.memory_gib,
            mesh=str(prediction.mesh),
            seconds_per_step=prediction.seconds_per_step,
            mfu=prediction.mfu,
            peak_phase=prediction.peak_phase,
            largest=f"{role} {kind} {size / GIB:.1f} GiB",
            host_gib=prediction.host_gib,
        )


def in_words(outcomes: Sequence[Outcome], own: Sequence[str]) -> list[str]:
    """The table that ``plan=suggest`` prints."""
    found = ranked(outcomes)
    fitting, falling = [o for o in found if o.fits], [o for o in found if not o.fits]
    kept = [word for word in own if not word.startswith("world=")]  # which a run refuses
    lines = [f"{len(fitting)} of {len(found)} fit with {MARGIN:.0%} of the memory to spare, the fastest first:"]
    for outcome in fitting[:_SHOWN]:
        seconds = "unknown" if outcome.seconds_per_step is None else f"{outcome.seconds_per_step:.3g} s a step"
        mfu = "" if outcome.mfu is None else f", MFU {outcome.mfu:.2f}"
        host = f" and {outcome.host_gib:.1f} of the host's" if outcome.host_gib else ""
        lines.append(f"  {seconds}{mfu}, {outcome.device_gib:.1f} of {outcome.memory_gib:g} GiB{host}; {outcome.mesh}")
        lines.append(f"    {shlex.join([*kept, *outcome.words])}")
    if len(fitting) > _SHOWN:
        lines.append(f"  and {len(fitting) - _SHOWN} slower ones")
    if falling:
        lines.append("the others:")
    lines += [f"  {shlex.join(outcome.words)}: {outcome.why_not}" for outcome in falling]
    return lines


def _processes() -> int:
    """As many as there are cores, and memory for."""
    cores, memory = len(os.sched_getaffinity(0)), available_host_memory()
    return cores if memory is None else max(1, min(cores, int(memory // _PROCESS_BYTES)))
