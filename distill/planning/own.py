"""A run's own plan: said before anything is loaded, and at the end beside what the run took.

The plan is made by a process of its own, which runs this module: the process group of the simulation, of ranks that are
not there, must not share torch's caches with the real one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distill.config import Config, compose_config
from distill.planning.command import plan_command
from distill.planning.files import PAGE, read_plan
from fsdp_cp.launch import exit_code, outside_of_torchrun, rank, world_size
from fsdp_cp.reduce import on_all_ranks
from fsdp_cp.signals import end_with_parent

log = logging.getLogger(__name__)

_TIMEOUT = 900.0
"""Seconds after which a run begins without its plan."""


def announce_plan(config: Config, run_dir: Path, overrides: Sequence[str], device: torch.device) -> None:
    """Say in a line what a rank will hold at its peak, and warn where the device has less. Called by all ranks.

    On the CPU only with ``planning.before_run=true``: there is no device's memory to compare with. A plan that is there
    for the same settings is not made again.

    Args:
        config: the checked configuration.
        run_dir: of the run, which is held.
        overrides: what the configuration was composed of.
        device: this rank's.
    """
    wanted = config.planning.before_run
    if wanted is False or (wanted is None and device.type != "cuda"):
        return

    def say() -> None:
        if rank() != 0:
            return
        plan = read_plan(config, run_dir)
        if plan is None:
            log.info("planning the run (planning.before_run=false leaves it out)")
            # The other ranks wait in a collective meanwhile, and that for timeout.start at most.
            reason = _make(overrides, min(_TIMEOUT, 30 * config.timeout.start))
            plan = read_plan(config, run_dir)
            if plan is None:
                log.info("no plan: %s", reason or "another one is in the folder")
                return
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None
        line, fits = plan_line(plan, memory)
        log.log(logging.INFO if fits else logging.WARNING, "%s; see %s", line, run_dir / PAGE)

    on_all_ranks(say)


def compare_with_plan(config: Config, run_dir: Path, device: torch.device, peak_gib: float) -> None:
    """Say what was predicted beside what was measured; nothing where there is no plan of these settings. On rank 0.

    Args:
        config: the checked configuration.
        run_dir: of the run.
        device: this rank's.
        peak_gib: the largest over ranks, as ``memory/peak_gib`` of ``metrics.jsonl`` has it.
    """
    if rank() != 0 or (plan := read_plan(config, run_dir)) is None:
        return
    measured = f"allocated {peak_gib:.2f} GiB" if device.type == "cuda" else f"the process held {peak_gib:.2f} GiB"
    log.info("memory of a rank: planned %.2f GiB of tensors, %s at most", plan["allocated_gib"], measured)


def plan_line(plan: Mapping[str, Any], memory_gib: float | None) -> tuple[str, bool]:
    """What a plan says of memory, and whether that fits.

    Args:
        plan: of ``plan.json``.
        memory_gib: of the device; ``None`` for none to compare with, into which everything fits.
    """
    phase, needed = plan["peak_phase"] or "between phases", plan["device_gib"]
    line = f"plan: {plan['allocated_gib']:.2f} GiB of tensors on a rank, {needed:.2f} GiB of the device in {phase}"
    if memory_gib is None:
        return line, True
    if needed <= memory_gib:
        return f"{line}; it has {memory_gib:.1f}", True
    return f"{line}, and it has {memory_gib:.1f}: the run will not fit; plan=suggest looks for settings that do", False


def _make(overrides: Sequence[str], seconds: float) -> str | None:
    """Plan in another process, which sees neither torchrun nor GPUs; why it could not in so long, or ``None``."""
    env = outside_of_torchrun()
    root = str(Path(__file__).resolve().parents[2])
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))}
    words = [*overrides, "plan=true", f"world={world_size()}", "device=cpu", "planning.before_run=false"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, *words], env=env, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {seconds / 60:.3g} minutes"
    lines = (done.stderr or done.stdout).strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"it ended with exit code {done.returncode}")


def main(overrides: Sequence[str]) -> int:
    """Plan the run of these words, for as long as that run's process lives."""
    end_with_parent()
    return exit_code(lambda: plan_command(compose_config(list(overrides)), ["train.py", *overrides]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
