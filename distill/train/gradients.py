"""Backward passes of one step of one role. Training runs them; the planner runs them on fake tensors."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from distill.methods import Batch, Loss, Method
from distill.methods.common.chunks import noised
from fsdp_cp.measure.phases import phase
from fsdp_cp.rng import StepRandom
from fsdp_cp.sharding.shard import microbatch
from fsdp_cp.sharding.state import complete_unreduced_gradients, resharded
from models.roles.role import Role


class Losses(NamedTuple):
    """Losses of a step over this rank's micro-batches, as tensors, so that the host does not wait for the device."""

    sums: dict[str, Tensor]
    """This rank's share of each loss's mean over the global batch, by name, in fp64."""
    weights: dict[str, float]
    """Weight of each loss, by name."""
    networks: set[int]
    """Positions of the role's networks that were trained."""


def accumulate_gradients(
    method: Method, step: int, micro_batches: Sequence[Batch], *, share: float, random: Callable[[int], StepRandom]
) -> Losses:
    """Run the backward of every loss of this rank's micro-batches, for the role that trains at the 0-based ``step``.
    ``share`` is a micro-batch's weight in the mean over the global batch; ``random`` returns its streams."""
    name = method.trained_role(step)
    role = method.roles[name]
    # List all losses first, to know the last backward of each network. Only their closures compute.
    work: list[Loss] = []
    for i, batch in enumerate(micro_batches):
        batch = replace(batch, condition=noised(batch.condition, random(i)))
        work += method.losses(step, batch, random(i))
    networks = [role.expert_at(loss.at) for loss in work]
    losses = Losses({}, {}, set(networks))
    has_gan = "gan_head" in method.additions(method.settings).get(name, ())
    with phase(f"{name}/gradients"), _only(method, step, losses.networks):
        for i, (loss, index) in enumerate(zip(work, networks, strict=True)):
            is_first, is_last = index not in networks[:i], index not in networks[i + 1 :]
            network = role.networks[index].module
            with microbatch(network, is_first=is_first, is_last=is_last):
                if has_gan and is_last:
                    complete_unreduced_gradients(network)
                with phase(f"{name}/{loss.name}/forward"):
                    value = loss.closure()
                with phase(f"{name}/{loss.name}/backward"):
                    (loss.weight * share * value).backward()
            losses.weights[loss.name] = loss.weight
            losses.sums[loss.name] = losses.sums.get(loss.name, 0.0) + share * value.detach().double()
    if has_gan:
        _fill_missing_gradients(role, losses.networks)
    return losses


@contextmanager
def _only(method: Method, step: int, trained: Container[int]) -> Iterator[None]:
    """Let only the networks ``trained`` of the role that trains at ``step`` get gradients within this context."""
    roots = [role.network for role in method.roles.values()]
    with resharded(roots), ExitStack() as frozen:
        frozen.enter_context(method.roles[method.trained_role(step)].training(trained))
        for other in method.frozen_roles(step):
            frozen.enter_context(method.roles[other].frozen())
        yield


def _fill_missing_gradients(role: Role, trained: Iterable[int]) -> None:
    """Give zeros to the parameters of ``trained`` networks that no loss of the step has used, as replicas do: the
    optimizer counts them. The losses of a GAN use different parameters, and an expert may get one of them alone."""
    for index in trained:
        for parameter in role.single(index).parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
