"""A deep network from two shallow ones: its blocks are alike, and what they hold, compute and send adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch

from distill.config import Config
from distill.planning.simulation import Simulation, StepCost, simulate
from distill.planning.watched import Shapes
from distill.setup import RunPlan, plan_run
from fsdp_cp.measure.attributed import Peak
from fsdp_cp.signals import end_with_parent
from models.role_plan import RolePlan


def simulate_any_depth(
    config: Config, plan: RunPlan, shapes: Shapes, *, stands_for: str = "cpu", at_once: bool = False
) -> Simulation:
    """:func:`simulate`; of deeper networks than :func:`shallow_depths`, from two simulations with so few blocks.

    Whole where blocks differ: where the family says so, where a GAN's heads or adapters hang on some, where roles have
    not equally many.

    Peaks of a phase are taken for the same moment at both depths, which blocks that are alike make true: tests compare
    it with whole simulations.

    Args:
        config, plan, shapes, stands_for: as of :func:`simulate`.
        at_once: simulate the second depth in a process of its own meanwhile, which imports the main module again.
    """
    depths = [role.family.layers(role.config) for role in plan.roles]
    known = shallow_depths(plan)
    whole = (
        min(depths) <= known[1]
        or len(set(depths)) > 1
        or any(role.family.with_layers(role.config, 1) is None or "gan_head" in role.additions for role in plan.roles)
        or not all(_adapted_alike(role) for role in plan.roles)
    )
    if whole:
        return simulate(config, plan, shapes, stands_for=stands_for)
    first, second = ((config, shapes, layers, stands_for) for layers in known)
    if at_once:
        # A fork would take torch's threads along in a state of their own.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
            made = pool.submit(_simulate_shallow, *second)
            few, more = _simulate_shallow(*first, plan), made.result()
    else:
        few, more = _simulate_shallow(*first, plan), _simulate_shallow(*second, plan)
    at = _Line(known, depths[0])
    peaks = {}
    for name in few.peaks:
        by = at.each(few.peaks[name].by, more.peaks[name].by)
        peaks[name] = Peak(sum(by.values()), by)
    steps = {
        name: StepCost(
            flops=at(cost.flops, more.steps[name].flops),
            recomputed=at(cost.recomputed, more.steps[name].recomputed),
            sent=Counter(at.each(cost.sent, more.steps[name].sent)),
            copied=at(cost.copied, more.steps[name].copied),
        )
        for name, cost in few.steps.items()
    }
    host = at.each(few.host.by, more.host.by)
    return Simulation(
        resting=at.each(few.resting, more.resting),
        peaks=peaks,
        steps=steps,
        host=Peak(sum(host.values()), host),
        queries=few.queries,
    )


def _adapted_alike(role: RolePlan) -> bool:
    """Has every block the same adapters, and the same modules that are trained whole?"""
    if role.lora is None:
        return True
    names = {module: name for name, module in role.network.named_modules()}
    blocks = [names[block] + "." for block in role.family.blocks(role.network)]
    chosen = [*role.lora.targets, *(f"{name} whole" for name in role.lora.train)]
    inside = [{name.removeprefix(block) for name in chosen if name.startswith(block)} for block in blocks]
    return all(of_block == inside[0] for of_block in inside)


def _simulate_shallow(
    config: Config, shapes: Shapes, layers: int, stands_for: str, plan: RunPlan | None = None
) -> Simulation:
    plan = plan or plan_run(config, shapes=shapes)
    return simulate(
        config, replace(plan, roles=[shallow(role, layers) for role in plan.roles]), shapes, stands_for=stands_for
    )


def shallow_depths(plan: RunPlan) -> tuple[int, int]:
    """Blocks that are simulated for deeper networks.

    With fewer, what FSDP2 has under way at the first and at the last one would meet: the units that are gathered ahead,
    and the gradients that wait for their reduction.
    """
    under_way = max(
        max(role.sharding.forward_prefetch, role.sharding.backward_prefetch, role.sharding.gradient_buffers)
        for role in plan.roles
    )
    return 2 + under_way, 3 + under_way


class _Line:
    """The value at ``depth`` of a straight line through two."""

    def __init__(self, known: tuple[int, int], depth: int):
        self.share = (depth - known[0]) / (known[1] - known[0])

    def __call__(self, few: float, more: float) -> float:
        return few + self.share * (more - few)

    def each(self, few: Mapping[Any, float], more: Mapping[Any, float]) -> dict[Any, int]:
        return {key: max(0, round(self(few.get(key, 0), more.get(key, 0)))) for key in {**few, **more}}


def shallow(role: RolePlan, layers: int) -> RolePlan:
    """``role`` with so many blocks and random weights."""
    config = role.family.with_layers(role.config, layers)
    assert config is not None
    with torch.device("meta"):
        network = role.family.build(config, f"{role.name}.architecture")
    return role.of(network, ())
