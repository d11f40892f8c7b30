"""Simulation of deep networks from two shallow ones: memory, operations and traffic are linear in the depth."""

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, is_dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch

from distill.config import Config
from distill.planning.simulation import Simulation, simulate
from distill.run.setup import RunPlan, Shapes, plan_run
from fsdp_cp.measure.memory import Peak
from fsdp_cp.runtime.signals import end_with_parent
from models.roles.role_plan import RolePlan


def simulate_any_depth(config: Config, plan: RunPlan, *, stands_for: str = "cpu", at_once: bool = False) -> Simulation:
    """Simulate a run like :func:`simulate`; extrapolate deep networks from :func:`shallow_depths`, assuming that a
    phase peaks at the same moment at both, as with equal blocks (tests compare whole simulations). Networks whose
    blocks differ (by family, GAN heads or adapters) or roles of different depths are simulated whole. While a phase
    peaks at other moments, up to three further depths follow. With ``at_once``, the second simulation runs in a
    separate process, which imports the main module."""
    low, high = shallow_depths(plan)
    depth = _common_depth(plan)
    if depth is None or depth <= high:
        return simulate(config, plan, stands_for=stands_for)
    if at_once:
        # Spawn: a fork would copy torch's threads in their current state.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
            made = pool.submit(_simulate_shallow, config, plan.shapes, high, stands_for)
            few, more = _simulate_shallow(config, plan.shapes, low, stands_for), made.result()
    else:
        few, more = (_simulate_shallow(config, plan.shapes, layers, stands_for) for layers in (low, high))
    last = min(high + 3, depth - 1)
    while high < last and not _have_equal_moments(few, more, depth - low):
        low, high = high, high + 1
        few, more = more, _simulate_shallow(config, plan.shapes, high, stands_for)
    return _on_line(few, more, depth - low)


def _common_depth(plan: RunPlan) -> int | None:
    """Return the number of equal blocks of all networks; ``None`` if blocks or depths differ."""
    depths = {role.family.layers(role.config) for role in plan.roles}
    for role in plan.roles:
        has_equal_blocks = role.family.planning.with_layers(role.config, 1) is not None
        if not has_equal_blocks or "gan_head" in role.additions or not _adapted_alike(role):
            return None
    return depths.pop() if len(depths) == 1 else None


_ROUNDING = 1 << 20
"""Bytes below nothing that a line may reach: allocations are rounded."""


def _on_line(few: Any, more: Any, distance: int) -> Any:
    """Return a simulation, or a part of one, on the line through those of two depths, one apart, ``distance`` from the
    first. Bytes end at 0."""
    if isinstance(few, Peak):
        by = _on_line(few.by, more.by, distance)
        return Peak(sum(by.values()), by)
    if isinstance(few, Mapping):
        return {key: _on_line(few.get(key, 0), more.get(key, 0), distance) for key in {**few, **more}}
    if is_dataclass(few):
        names = [field.name for field in fields(few)]
        return replace(few, **{name: _on_line(getattr(few, name), getattr(more, name), distance) for name in names})
    end = few + distance * (more - few)
    return end if isinstance(end, float) else max(0, end)


def _have_equal_moments(few: Simulation, more: Simulation, distance: int) -> bool:
    """Whether each phase may peak at the same moment at both depths: else contents of the shallower one's moment
    shrink, on the line to less than nothing, while those of the other one's grow too fast."""
    pairs = [(peak.by, more.peaks[name].by) for name, peak in few.peaks.items()]
    ends = (size + distance * (b.get(key, 0) - size) for a, b in pairs for key, size in a.items())
    return all(end > -_ROUNDING for end in ends)


def _adapted_alike(role: RolePlan) -> bool:
    if role.lora is None:
        return True
    names = {module: name for name, module in role.network.named_modules()}
    blocks = [names[block] + "." for block in role.family.blocks(role.network)]
    inside = [{name.removeprefix(block) for name in role.lora.targets if name.startswith(block)} for block in blocks]
    return all(of_block == inside[0] for of_block in inside)


def _simulate_shallow(config: Config, shapes: Shapes, layers: int, stands_for: str) -> Simulation:
    plan = plan_run(config, shapes=shapes)
    plan = replace(plan, roles=[shallow(role, layers) for role in plan.roles])
    return simulate(config, plan, stands_for=stands_for)


def shallow_depths(plan: RunPlan) -> tuple[int, int]:
    """Return the two numbers of blocks from which deeper networks are extrapolated. With fewer, FSDP2's prefetches and
    reductions at both ends would overlap."""
    under_way = max(
        max(role.sharding.forward_prefetch, role.sharding.backward_prefetch, role.sharding.gradient_buffers)
        for role in plan.roles
    )
    return 2 + under_way, 3 + under_way


def shallow(role: RolePlan, layers: int) -> RolePlan:
    """Return ``role`` with ``layers`` blocks and random weights."""
    config = role.family.planning.with_layers(role.config, layers)
    with torch.device("meta"):
        network = role.family.build(config, f"{role.name}.architecture")
    return role.for_network(network, ())
