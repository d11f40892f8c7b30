"""``train.py plan=suggest``: search for the fastest mesh, checkpointing, micro-batch and strategy that fit."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from distill.config import Config, compose_config
from distill.methods import METHODS
from distill.planning import command
from distill.planning.command import MADE_BY, make_prediction, plan_without_gpus
from distill.planning.prediction import GIB
from distill.run.setup import has_adapters, world_of
from fsdp_cp.errors import UserError, counted
from fsdp_cp.files.atomic_file import write_text
from fsdp_cp.measure.memory import available_host_memory
from fsdp_cp.progress import progress

log = logging.getLogger(__name__)

SUGGESTIONS = "suggestions.json"
MARGIN = 0.05
"""Share of the device's memory that a suggestion leaves free, since plans have errors."""
_PREDICTED = ("device_gib", "seconds_per_step", "mfu", "peak_phase", "host_gib")
"""Values of a prediction that an outcome has too."""
_SHOWN = 5
_PROCESS_BYTES = 3e9
"""Host memory of one planning process."""

Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Plan of one candidate."""

    words: Words
    """Settings in addition to the user's words."""
    refused: str | None = None
    """Reason why a run would refuse the candidate. The fields below are then unset."""
    device_gib: float = 0.0
    memory_gib: float = 0.0
    mesh: str = ""
    seconds_per_step: float | None = None
    mfu: float | None = None
    peak_phase: str = ""
    largest: str = ""
    """Largest share of the peak: role, kind and size."""
    host_gib: float = 0.0
    """Host memory of a rank: offloaded tensors and the copy of a checkpoint."""

    @property
    def fits(self) -> bool:
        """Whether the candidate fits with :data:`MARGIN` to spare."""
        return self.refused is None and self.device_gib <= (1 - MARGIN) * self.memory_gib


def suggest_command(config: Config, overrides: Sequence[str]) -> None:
    """Print the candidates that fit, fastest first, as words to paste, and why others do not fit, also as JSON."""
    command.require_plannable(config)
    if config.planning.hardware is None:
        raise UserError("plan=suggest needs planning.hardware, a name in configs/hardware; use planning.hardware=h20")
    folder = Path(config.run_dir)
    command.refuse_other_files(folder, SUGGESTIONS)
    typed = [word for word in overrides if not word.startswith("plan=")]
    axes = Axes.from_config(config, typed)
    cores, memory = len(os.sched_getaffinity(0)), available_host_memory()
    processes = cores if memory is None else max(1, min(cores, int(memory // _PROCESS_BYTES)))
    ranks, cp = counted(world_of(config), "rank"), ", ".join(map(str, axes.cp))
    text = "plan=suggest on %s of %s: cp %s, plans of a minute or more each on %s"
    log.info(text, ranks, config.planning.hardware, cp, counted(processes, "process", "processes"))

    def evaluate(candidates: list[Words]) -> list[Outcome]:
        outcomes = []
        with progress(len(candidates), "planning", "candidate") as advance:
            for outcome in pool.map(partial(_plan_candidate, typed), candidates):
                result = "fits" if outcome.fits else "refused" if outcome.refused is not None else "does not fit"
                log.info("  %-12s  %s", result, shlex.join(outcome.words))
                outcomes.append(outcome)
                advance(1)
        return outcomes

    context = get_context("spawn")  # a fork would copy torch's threads in their current state
    with ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        outcomes = search(axes, evaluate)
    for line in in_words(outcomes, typed):
        log.info(line)
    candidates = [asdict(outcome) | {"fits": outcome.fits} for outcome in ranked(outcomes)]
    content = {"made_by": MADE_BY, "words": typed, "candidates": candidates}
    write_text(folder / SUGGESTIONS, json.dumps(content, indent=1) + "\n")
    log.info("wrote %s", folder / SUGGESTIONS)


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Settings that the search varies, as words. An axis that the user's words set is empty."""

    cp: tuple[int, ...]
    """Values of ``mesh.cp`` to try, or the configured one."""
    mesh: bool
    """Whether ``mesh`` can vary."""
    checkpointing: tuple[Words, ...]
    """Activation checkpointing of the trained roles, from the fastest to the smallest memory."""
    micro_batches: tuple[Words, ...]
    """Micro-batches larger than the configured one, smallest first."""
    crowded: tuple[int, ...]
    """Values of :attr:`cp` that have several samples per forward and could have one."""
    gathered: Words
    """Words that keep the parameters of all roles gathered."""
    offloaded: Words
    """Words that offload the states of the trained roles, and of a role that shares their base, to host memory."""

    @classmethod
    def from_config(cls, config: Config, typed: Sequence[str]) -> Axes:
        """Return the axes of the configuration composed from ``typed``."""
        method, world, first = METHODS[config.method.name][0], world_of(config), config.micro_batch_size
        roles, trained = method.roles_needed(config.method), method.trained_roles
        keys = {word.lstrip("+~").split("=")[0] for word in typed}
        mesh = not keys & {"mesh.cp", "mesh.dp_shard", "mesh.ulysses", "mesh.ring"}
        divisors = tuple(n for n in range(1, world + 1) if world % n == 0)
        cp = divisors if mesh else (config.mesh.cp,)
        larger: tuple[int, ...] = ()
        crowded: tuple[int, ...] = ()
        if "micro_batch_size" not in keys:
            larger = (2 * first, 4 * first) if first is not None else ()  # without micro-batches, a step is one forward
            crowded = tuple(n for n in cp if (first or config.batch_size * n // world) > 1)
        adapted = any(has_adapters(getattr(config, name)) for name in trained)

        def words(setting: str, value: str, names: Sequence[str] = trained, fixing: Sequence[str] = trained) -> Words:
            if keys & {f"{name}.{setting}" for name in fixing}:
                return ()
            return tuple(f"{name}.{setting}={value}" for name in names)

        kinds = [words("activation_checkpointing", kind) for kind in ("none", "selective", "full")]
        return cls(
            cp=cp,
            mesh=mesh,
            checkpointing=tuple(dict.fromkeys(kinds)),
            micro_batches=tuple((f"micro_batch_size={n}",) for n in larger if config.batch_size % n == 0),
            crowded=crowded,
            gathered=words("strategy", "optim_grads", roles, roles),
            offloaded=words("offload", "cpu", roles if adapted else trained),
        )

    def split(self, cp: int) -> Words:
        """Return the words for ``cp`` ranks per sample."""
        return (f"mesh.cp={cp}",) if self.mesh else ()


def search(axes: Axes, evaluate: Callable[[list[Words]], list[Outcome]]) -> list[Outcome]:
    """Try candidates by ``evaluate``; return all outcomes. For every ``mesh.cp``, find the least checkpointing that
    fits, since more only costs time. Then vary the fastest two: larger micro-batches, ring attention within ``cp``,
    parameters that stay gathered. If none fits, try one sample per forward, then the smallest with states in host
    memory."""
    tried = _least_checkpointing(axes, evaluate)
    fastest = [outcome for outcome in ranked(tried) if outcome.fits][:2]
    if fastest:
        variations: dict[Words, None] = {}  # an ordered set
        for outcome in fastest:
            variations |= dict.fromkeys(_variations(axes, outcome.words))
        return tried + evaluate([*variations])
    if axes.crowded:
        least = axes.checkpointing[-1]
        tried += evaluate([(*axes.split(cp), *least, "micro_batch_size=1") for cp in axes.crowded])
    accepted = [outcome for outcome in tried if outcome.refused is None]
    if accepted and axes.offloaded and not any(outcome.fits for outcome in tried):
        smallest = min(accepted, key=lambda outcome: outcome.device_gib)
        tried += evaluate([(*smallest.words, *axes.offloaded)])
    return tried


def _least_checkpointing(axes: Axes, evaluate: Callable[[list[Words]], list[Outcome]]) -> list[Outcome]:
    """Try more checkpointing for every ``mesh.cp`` until it fits; return the outcomes."""
    tried: list[Outcome] = []
    left = axes.cp
    for words in axes.checkpointing:
        if not left:
            break
        outcomes = dict(zip(left, evaluate([(*axes.split(cp), *words) for cp in left]), strict=True))
        # keep_operators needs "selective", so one kind of checkpointing may be refused while another is valid.
        is_last = words == axes.checkpointing[-1]
        tried += [outcome for outcome in outcomes.values() if is_last or outcome.refused is None]
        left = tuple(cp for cp, outcome in outcomes.items() if not outcome.fits)
    return tried


def _variations(axes: Axes, words: Words) -> list[Words]:
    ring: Words = ()
    if axes.mesh and (cp := int(words[0].partition("=")[2])) % 2 == 0:
        ring = (f"mesh.ulysses={cp // 2}", "mesh.ring=2")
    return [(*words, *more) for more in (*axes.micro_batches, ring, axes.gathered) if more]


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Sort outcomes: candidates that fit, fastest first; then the others, smallest first; refused ones last."""

    def key(outcome: Outcome) -> tuple[bool, bool, float, float]:
        seconds = outcome.seconds_per_step or math.inf
        first = seconds if outcome.fits else outcome.device_gib
        return outcome.refused is not None, not outcome.fits, first, outcome.device_gib

    return sorted(outcomes, key=key)


def _plan_candidate(typed: Sequence[str], words: Words) -> Outcome:
    try:
        prediction = make_prediction(*plan_without_gpus(compose_config([*typed, *words, "plan=true"])))
    except UserError as error:
        return Outcome(words=words, refused=str(error))
    (role, kind), size = max(prediction.peaks[prediction.peak_phase].by.items(), key=lambda item: item[1])
    return Outcome(
        words=words,
        memory_gib=prediction.hardware.memory_gib,
        mesh=str(prediction.mesh),
        largest=f"{role} {kind} {size / GIB:.1f} GiB",
        **{name: getattr(prediction, name) for name in _PREDICTED},
    )


def in_words(outcomes: Sequence[Outcome], typed: Sequence[str]) -> list[str]:
    ordered = ranked(outcomes)
    fitting = [outcome for outcome in ordered if outcome.fits]
    kept = [word for word in typed if not word.startswith("world=")]  # a run refuses world=
    lines = [f"{len(fitting)} of {len(ordered)} fit with {MARGIN:.0%} of the memory to spare, the fastest first:"]
    for outcome in fitting[:_SHOWN]:
        seconds = "unknown" if outcome.seconds_per_step is None else f"{outcome.seconds_per_step:.3g} s a step"
        mfu = "" if outcome.mfu is None else f", MFU {outcome.mfu:.2f}"
        host = f" and {outcome.host_gib:.1f} of the host's" if outcome.host_gib else ""
        lines.append(f"  {seconds}{mfu}, {outcome.device_gib:.1f} of {outcome.memory_gib:g} GiB{host}; {outcome.mesh}")
        lines.append(f"    {shlex.join([*kept, *outcome.words])}")
    if len(fitting) > _SHOWN:
        lines.append(f"  and {len(fitting) - _SHOWN} slower ones")
    for outcome in ordered[len(fitting) :]:
        peak = f"{outcome.device_gib:.1f} GiB in {outcome.peak_phase or 'between phases'}, most of it {outcome.largest}"
        lines.append(f"  {shlex.join(outcome.words)} does not fit: {outcome.refused or peak}")
    return lines
