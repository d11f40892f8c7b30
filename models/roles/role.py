"""A role: a purpose (teacher, student, fake score) with the sharded networks that serve it, called on full latents."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fsdp_cp.attention.duals import may_be_dual
from fsdp_cp.sharding.settings import COMPUTE_DTYPE
from fsdp_cp.sharding.shard import gather_first_block_early, settings_of
from fsdp_cp.sharding.state import frozen, reshard, unrecorded_forward
from models.additions.base import additions_of
from models.additions.gan_head import gan_head_of
from models.additions.time_conditioning import second_time
from models.families.base import Family
from models.roles.condition import Condition
from models.roles.network import Network

EXPERTS = ("high", "low")
"""What two experts are called, by the noise of their times."""
ROUNDING = 1e-7
"""By how much a time may be below a boundary and is at it: fp32 has .9 as a little less."""


def trained_names(role: str, boundaries: Sequence[float], experts: Sequence[int]) -> list[str]:
    """Return the names of a role's networks that train, in logs and checkpoints: the role's, or its experts'."""
    return [f"{role}.{EXPERTS[i]}" for i in experts] if boundaries else [role]


@dataclass(kw_only=True)
class Role:
    """A purpose on the mesh. Callers never see that its networks are sharded, or that their tokens are split.

    A role has one network, or several experts of one configuration, of which each serves a range of times; another role
    may hold the same ones. Which expert a forward runs must be the same on every rank, or their collectives never meet.
    """

    name: str
    """``teacher``, ``student`` or ``fake``."""
    networks: tuple[Network, ...]
    """The first serves the noisiest times."""
    boundaries: tuple[float, ...] = ()
    """Times in (0, 1), falling, between those that one network serves and the next: from the boundary on the former."""
    trainable: bool
    trained_experts: tuple[int, ...] = ()
    """Positions of the experts that train; all of them by default."""
    adapters: dict[str, Any] | None = None
    """Description of the role's adapters (:attr:`models.roles.role_plan.RolePlan.adapters`)."""
    network: nn.Module = field(init=False)
    """The FSDP root; of experts a list of theirs, whose parameters' names begin with ``0.``, ``1.``, ..."""
    beyond: float = field(default=0.0, init=False)
    """Inside of :meth:`differences`, by how much a time may lie outside of its expert's range."""
    flops: int = 0
    """Operations since the trainer last set it to 0, over all samples that this rank passed in; backward included."""

    def __post_init__(self) -> None:
        ends = (1.0, *self.boundaries, 0.0)
        if len(self.boundaries) != len(self.networks) - 1 or any(low >= high for high, low in pairwise(ends)):
            raise ValueError(
                f"{self.name}: {len(self.networks)} networks with boundaries {self.boundaries}; give one boundary fewer"
                " than networks, falling, between 1 and 0"
            )
        if any(network.config != self.config for network in self.networks):
            raise ValueError(f"{self.name}: its networks are not of one configuration")
        if not self.trained_experts:
            self.trained_experts = tuple(range(len(self.networks)))
        modules = [network.module for network in self.networks]
        self.network = modules[0] if len(modules) == 1 else nn.ModuleList(modules)

    @property
    def family(self) -> Family:
        """Model family of the networks."""
        return self.networks[0].family

    @property
    def config(self) -> dict[str, Any]:
        """Diffusers configuration that all networks of this role share."""
        return self.networks[0].config

    @property
    def tokens(self) -> int:
        """Number of tokens of one sample."""
        return self.networks[0].tokens

    def expert_at(self, time: float) -> int:
        """Return the position of the network that serves ``time``.

        A boundary belongs to the network before it, as in diffusers' pipelines.
        """
        return sum(time + ROUNDING < boundary for boundary in self.boundaries)

    def trains_at(self, time: float) -> bool:
        """Return whether the network that serves ``time`` is one of those that train."""
        return self.expert_at(time) in self.trained_experts

    def network_at(self, t: Tensor, at: float | None) -> Network:
        """The network that serves the times ``t``.

        Args:
            t: ``(B,)`` or ``(B, T)`` in [0, 1].
            at: of experts, a time in the same range as all of ``t``, known to the host and the same on every rank.

        Raises:
            ValueError: experts without ``at``; times of several experts, where that can be seen without waiting for a
                device.
        """
        if not self.boundaries:
            return self.networks[0]
        if at is None:
            raise ValueError(f"{self.name}: which of its {len(self.networks)} networks is wanted must be said by at=")
        expert = self.expert_at(at)
        if t.device.type == "cpu" and type(t) is Tensor:  # in a plan it has no values
            wrong = [
                time
                for time in t.detach().flatten().tolist()
                if not self.expert_at(time + self.beyond) <= expert <= self.expert_at(time - self.beyond)
            ]
            if wrong:
                raise ValueError(
                    f"{self.name}: a time of {wrong[0]:g} where at={at:g} asks for the network of another range"
                    f" (boundaries {', '.join(f'{b:g}' for b in self.boundaries)}); draw a batch's times in one range"
                )
        return self.networks[expert]

    def single(self, index: int) -> Role:
        """Return the role with one of its networks alone."""
        if not self.boundaries:
            return self
        return replace(self, networks=(self.networks[index],), boundaries=(), trained_experts=())

    @property
    def trained_networks(self) -> dict[str, int]:
        """Positions of the networks that train, by their names in logs and checkpoints."""
        names = trained_names(self.name, self.boundaries, self.trained_experts)
        return dict(zip(names, self.trained_experts, strict=True))

    def velocity(
        self, x: Tensor, t: Tensor, condition: Condition, r: Tensor | None = None, *, at: float | None = None
    ) -> Tensor:
        """The rectified-flow velocity ``v(x_t, t, condition)``, an estimate of ``e - x0``.

        Args:
            x: ``x_t``, full latents ``(B, C, T, H, W)``, fp32 or better.
            t: ``(B,)`` in [0, 1], fp32 or better; never rounded to the compute dtype. A time for each latent frame,
                ``(B, T)``, where the family takes them.
            condition: of the B samples.
            r: ``(B,)`` in [0, 1], for a network with the addition ``second_time`` (the mean velocity from r to t) or
                ``last_step`` (of samples whose last step was at r), and only for one.
            at: of :meth:`network_at`.

        Returns:
            ``(B, C, T, H, W)`` in the dtype of ``x``.

        Raises:
            ValueError: times of another shape, or of several experts.
        """
        network = self.network_at(t, at)
        with second_time(additions_of(network.module, self.name), t, r):
            v = self._outputs(network, x, t, condition)[0]
        if v.dtype == x.dtype:
            return v
        return network.family.hold(v.to(x.dtype), x, t, condition)

    def logits(
        self, x: Tensor, t: Tensor, condition: Condition, r: Tensor | None = None, *, at: float | None = None
    ) -> Tensor:
        """``D(x_t, t, condition)`` of this role's GAN head (models/additions/gan_head.py), above 0 where ``x_t`` looks
        real.

        Args:
            x, t, condition, r, at: as of :meth:`velocity`.

        Returns:
            ``(B, K)`` of its K blocks, in the dtype of ``x``.
        """
        network = self.network_at(t, at)
        head = gan_head_of(network.module, self.name)
        with head.wanted(self.tokens), second_time(additions_of(network.module, self.name), t, r):
            return self._outputs(network, x, t, condition, depth=head.depth)[1].to(x.dtype)

    def _outputs(
        self, network: Network, x: Tensor, t: Tensor, condition: Condition, depth: float = 1.0
    ) -> tuple[Tensor, ...]:
        """What ``network`` returns; ``depth`` is the share of it that a backward passes."""
        dtype = COMPUTE_DTYPE[network.precision]
        of_frames = network.family.frame_times and t.shape == (x.shape[0], x.shape[2])
        if t.shape != x.shape[:1] and not of_frames:
            # A network that broadcasts would take (B, T) for times of tokens, and split them where T is cp.
            raise ValueError(f"times of shape {tuple(t.shape)} for {len(x)} samples; give one a sample, ({len(x)},)")
        assert t.dtype in (torch.float32, torch.float64), "times lose their meaning below fp32"
        # A backward costs a forward for the inputs' gradients and one for the weights', which a base has none of.
        backward = (1 if network.adapters else 2) if self.trainable else int(x.requires_grad)
        flops = (1 + depth * backward * torch.is_grad_enabled()) * network.forward_flops
        if may_be_dual(x) and any(forward_ad.unpack_dual(a).tangent is not None for a in (x, t)):
            flops += network.tangent_flops
        self.flops += int(flops * x.shape[0])
        recorded = nullcontext() if torch.is_grad_enabled() else unrecorded_forward(network.module)
        with network.serves(self.name), recorded:
            return network.family.outputs(network.module, x.to(dtype), t, condition.to(dtype))

    @contextmanager
    def differences(self, step: float) -> Iterator[None]:
        """Within this context, allow times up to ``step`` outside the range of the selected expert.

        A finite difference so uses one network on both sides.
        """
        self.beyond = step
        try:
            yield
        finally:
            self.beyond = 0.0

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let gradients pass through to the inputs alone: inside, a trained role gets none and allocates none.

        For whole steps, between two updates: a backward must end inside too. Afterwards what was trainable before is so
        again, and nothing else. Nests. Roles that share the network train on.
        """
        before, self.trainable = self.trainable, False
        try:
            with ExitStack() as stack:
                for network in self.networks:
                    names = network.owned_names(self.name)
                    stack.enter_context(frozen(network.module, names if network.adapters else None))
                yield
        finally:
            self.trainable = before

    @contextmanager
    def training(self, experts: Container[int]) -> Iterator[None]:
        """Inside, of a network that several roles train adapters of, this one's alone are trainable.

        Else FSDP would wait for gradients of the others: a unit's sum over its replicas would lack theirs. Nor are its
        own in an expert that this step does not train, through which another role's forward may have a gradient: it
        would leave some there. For whole steps, as :meth:`frozen`.

        Args:
            experts: those of its networks that the step trains, by their position.
        """
        with ExitStack() as stack:
            for i, network in enumerate(self.networks):
                if len(network.adapters) > 1:
                    names = network.trained_elsewhere(self.name)
                    if i not in experts:
                        names |= network.owned_names(self.name)
                    stack.enter_context(frozen(network.module, names))
            yield

    def gather_early(self) -> None:
        """Begin to gather what this role's next forward needs first, if its settings ask for it.

        Not of a network that two roles adapt: what is frozen in it changes at a step's begin, which lets go of it.
        """
        if len(self.networks) > 1 or len(self.networks[0].adapters) > 1:  # which expert comes, nobody knows yet
            return
        if settings_of(self.network).gather_early:
            gather_first_block_early(self.network, self.family.blocks(self.network)[0])

    def rest(self) -> None:
        """Free gathered parameters: where they stay gathered, updates of the shards would be ignored."""
        reshard(self.network)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What is this role's own, sharded, by public name (:meth:`Network.named_parameters`), in a fixed order."""
        self.rest()
        named = [network.named_parameters(self.name) for network in self.networks]
        if len(named) == 1:
            return named[0]
        return {f"{i}.{name}": weight for i, network in enumerate(named) for name, weight in network.items()}

    def parameters(self) -> list[nn.Parameter]:
        """Return the values of :meth:`named_parameters`."""
        return list(self.named_parameters().values())

    def weights(self) -> dict[str, Tensor]:
        """Return the sharded masters of :meth:`named_parameters` (DTensors that share their storage), by name."""
        return {name: parameter.detach() for name, parameter in self.named_parameters().items()}
