"""A role: a purpose (teacher, student, fake score) with the sharded networks that serve it, called on full latents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fsdp_cp.duals import may_be_dual
from fsdp_cp.sequence import with_whole_gradient
from fsdp_cp.sharding.settings import COMPUTE_DTYPE
from fsdp_cp.sharding.shard import kept_gathered
from fsdp_cp.sharding.state import frozen, reshard, unrecorded_forward
from models.additions.base import additions_of
from models.additions.gan_head import GanHead
from models.additions.heads import Heads, Rows
from models.additions.time_conditioning import SecondTime
from models.causal import CausalSettings
from models.condition import FIRST_FRAME, Condition
from models.families.base import Family, Outputs
from models.families.causal_forward import CausalForward, History, Slots
from models.families.operations import Flops, count_flops
from models.roles.history import Cache, StreamCache, TrainingCache, whole_clip
from models.roles.network import Network
from models.sample import VIDEO, PartShapes, Sample
from models.sparse import SparseSettings, file_contents

EXPERTS = ("high", "low")
"""Names of two experts, by the noise level of their times."""
ROUNDING = 1e-7
"""Distance below a boundary at which a time still counts as the boundary: fp32 rounds .9 down."""


def trained_names(role: str, boundaries: Sequence[float], experts: Sequence[int]) -> list[str]:
    """Return the names of a role's networks that train, in logs and checkpoints: the role's, or its experts'."""
    return [f"{role}.{EXPERTS[i]}" for i in experts] if boundaries else [role]


class Call(NamedTuple):
    """One forward of a role's network."""

    role: Role
    network: Network
    x: Sample
    t: Tensor
    condition: Condition
    causal: CausalForward | None = None
    depth: float = 1.0
    """Share of the blocks that a backward passes."""

    @property
    def tokens(self) -> int:
        """Number of tokens of one sample."""
        return self.network.family.tokens(self.network.config, self.x.shapes)

    @property
    def flops(self) -> Flops:
        """Operations of one sample."""
        family, config, tokens = self.network.family, self.network.config, self.tokens
        shapes = {name: tuple(value.shape[1:]) for name, value in self.condition.tensors.items()}
        if (sparse := self.network.sparse.plans.get(self.role.name)) is not None:
            return sparse.flops(family, config, self.x.shapes, shapes, self.network.sparse.sparsity[self.role.name])
        if self.causal is not None and 0 not in self.causal.positions:
            shapes.pop(FIRST_FRAME, None)  # no frame of this chunk is given
        flops = count_flops(family, config, self.x.shapes, shapes, frame_times=self.t.ndim == 2)
        if self.causal is None:
            return flops
        unseen = tokens**2 - self.causal.history.pairs(tokens)
        return flops.without(4 * family.layers(config) * family.width(config) * unseen)


@dataclass(kw_only=True)
class Role:
    """A purpose on the mesh. Sharding and token splitting are invisible to callers.

    A role has one network, or several experts of one configuration that each serve a range of times. Roles can share
    networks. All ranks must select the same expert for a forward; otherwise their collectives would not match.
    """

    name: str
    """``teacher``, ``student`` or ``fake``."""
    networks: tuple[Network, ...]
    """Networks of the role. The first serves the noisiest times."""
    boundaries: tuple[float, ...] = ()
    """Decreasing times in (0, 1) between successive networks. A boundary belongs to the earlier network."""
    trainable: bool
    trained_experts: tuple[int, ...] = ()
    """Positions of the experts that train; all of them by default."""
    adapters: dict[str, Any] | None = None
    """Description of the role's adapters (:attr:`models.roles.role_plan.RolePlan.adapters`)."""
    causal: CausalSettings | None = None
    """Settings of a causal role, which has one network; ``None`` for a role that attends to all frames."""
    sparse: SparseSettings | None = None
    """Settings of a sparse role; ``None`` for a dense role."""
    trained_frames: int = 1
    """Number of latent frames of a clip in training, for a causal role. Sinks stay as near as in such clips."""
    network: nn.Module = field(init=False)
    """FSDP root. For experts a list of roots, so that parameter names begin with ``0.``, ``1.``, ..."""
    beyond: float = field(default=0.0, init=False)
    """Distance by which a time may lie outside its expert's range, within :meth:`reaching`."""
    flops: int = 0
    """Operations since the trainer last set it to 0, for all samples of this rank, including backward."""
    sparse_flops: int = 0
    """Operations of sparse attention among them."""
    observer: Callable[[Call], AbstractContextManager] = field(default=nullcontext, repr=False)
    """Function that returns a context in which the role makes a call. The planner's labels what the call allocates."""

    def __post_init__(self) -> None:
        ends = (1.0, *self.boundaries, 0.0)
        assert len(self.boundaries) == len(self.networks) - 1 and all(low < high for high, low in pairwise(ends))
        assert all(network.config == self.config for network in self.networks)
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

    def tokens(self, shapes: PartShapes) -> int:
        """Return the number of tokens of the video of a sample with parts of these shapes."""
        return self.family.tokens(self.config, shapes)

    @property
    def causal_file(self) -> dict[str, Any] | None:
        """Contents of the ``causal.json`` of an export; ``None`` for a role that is not causal."""
        return None if self.causal is None else {**asdict(self.causal), "frames": self.trained_frames}

    @property
    def sparse_file(self) -> dict[str, Any] | None:
        """Contents of the ``sparse.json`` of an export, at the present sparsity; ``None`` for a dense role."""
        sparsities = [network.sparse.sparsity[self.name] for network in self.networks if self.sparse is not None]
        return file_contents(self.sparse, min(sparsities)) if self.sparse is not None else None

    def after_updates(self, updates: int) -> None:
        """Set the sparsity of a sparse role's networks to that after ``updates`` of them."""
        if self.sparse is not None:
            for network in self.networks:
                network.sparse.sparsity[self.name] = self.sparse.sparsity_after(updates)

    def expert_at(self, time: float | None) -> int:
        """Return the position of the network that serves ``time``. A boundary belongs to the network before it."""
        if not self.has_experts:
            return 0
        if time is None:
            raise ValueError(f"{self.name}: at= must be a time, which selects one of its networks")
        return sum(time + ROUNDING < boundary for boundary in self.boundaries)

    def trains_at(self, time: float) -> bool:
        """Return whether the network that serves ``time`` is one of those that train."""
        return self.expert_at(time) in self.trained_experts

    def network_at(self, t: Tensor, at: float | None) -> Network:
        """Return the network that serves the times ``t``, ``(B,)`` or ``(B, T)`` in [0, 1].

        Experts need ``at``, a time in the same range as all of ``t``, known to the host and equal on all ranks. Times
        on CUDA are not checked, which would synchronize the device.
        """
        expert = self.expert_at(at)
        if self.has_experts and t.device.type == "cpu" and type(t) is Tensor:  # fake tensors of a plan have no values
            for time in t.detach().flatten().tolist():
                if not self.expert_at(time + self.beyond) <= expert <= self.expert_at(time - self.beyond):
                    raise ValueError(f"{self.name}: time {time:g} is not in the range of at={at:g} ({self.boundaries})")
        return self.networks[expert]

    def single(self, index: int) -> Role:
        """Return the role with one of its networks alone."""
        if not self.has_experts:
            return self
        return replace(self, networks=(self.networks[index],), boundaries=(), trained_experts=())

    @property
    def has_experts(self) -> bool:
        """Whether the role has several networks, each for a range of times."""
        return bool(self.boundaries)

    @property
    def trained_networks(self) -> dict[str, int]:
        """Positions of the networks that train, by their names in logs and checkpoints."""
        names = trained_names(self.name, self.boundaries, self.trained_experts)
        return dict(zip(names, self.trained_experts, strict=True))

    def velocity(
        self,
        x: Sample,
        t: Tensor,
        condition: Condition,
        second_time: Tensor | None = None,
        *,
        clean: Sample | None = None,
        at: float | None = None,
        heads: Rows | None = None,
    ) -> Sample:
        """Return the rectified-flow velocity ``v(x_t, t, condition)``, an estimate of ``e - x0``.

        A causal role masks its attention: a frame sees its own chunk and earlier ones, of ``x`` or of ``clean``.

        Args:
            x: ``x_t``, full latents, fp32 or better. Parts other than the video are at their own times.
            t: ``(B,)`` in [0, 1], fp32 or better; or ``(B, T)``, per latent frame, if the family supports it.
            second_time: ``(B,)`` in [0, 1]: with the addition ``second_time``, the start of the interval over which the
                velocity is a mean; with ``last_step``, the last step of the samples. Refused without them.
            clean: for a causal role, the clip at ``causal.context_time``, of the shapes of ``x``: the history of every
                chunk (teacher forcing).
            at: as for :meth:`network_at`.
            heads: P means of heads, for a role with the addition ``heads``, which needs them.

        Returns:
            Velocity of each part, in the dtype of ``x``; for P means of heads P times as many samples, first all those
            of the first. The gradient that reaches ``x`` is whole on every rank.
        """
        network, causal, hidden, times = self.network_at(t, at), None, x, t
        if clean is not None and second_time is not None:
            raise ValueError(f"{self.name}: a clean history has one time a token, and takes no second time")
        if self.causal is not None:
            frame_tokens = network.family.tokens(network.config, x.shapes) // x.video.shape[2]
            causal, hidden, times = whole_clip(self.causal, x, t, clean, frame_tokens)
        elif clean is not None:
            raise ValueError(f"{self.name} is not causal and takes no clean history; set {self.name}.causal.chunk")
        with self._telling_additions(network, t, second_time, heads):
            v = self._outputs(Call(self, network, hidden, times, condition, causal)).velocity
        if causal is None and v.dtype == x.dtype:
            return v
        v = v.map(lambda part, noisy: part[:, :, -noisy.shape[2] :].to(noisy.dtype), x)
        held = network.family.hold(v.video, x.video, t, condition)
        return replace(v, parts={**v.parts, VIDEO: held})

    @contextmanager
    def _telling_additions(
        self, network: Network, t: Tensor, second_time: Tensor | None, heads: Rows | None = None
    ) -> Iterator[None]:
        """Run calls of ``network`` within this context at ``t`` and ``second_time``, with these means of ``heads``."""
        added: Collection[Any] = additions_of(network.module, self.name).values()
        with ExitStack() as stack:
            for kind, told in ((SecondTime, (t, second_time)), (Heads, (heads,))):
                additions = [addition for addition in added if isinstance(addition, kind)]
                if len(additions) != (told[-1] is not None):
                    raise RuntimeError(f"{self.name}: a role with {kind.__name__} must get the call's, and no other")
                for addition in additions:
                    stack.enter_context(addition.at(*told))
            yield

    def cache(self, condition: Condition, *, training: bool = False) -> Cache:
        """Return the cache of a causal role at the start of a clip: empty, or with a first frame as the first chunk.

        With ``training``, chunks are computed with gradients, or again later (:class:`TrainingCache`). A cache without
        gradient is a buffer that is changed in place (:class:`StreamCache`).
        """
        if self.causal is None:
            raise ValueError(f"{self.name} is not causal and has no cache; set {self.name}.causal.chunk")
        empty: Cache
        if training:
            empty = TrainingCache(role=self, condition=condition)
        else:
            slots = Slots(self.causal, len(self.causal.chunks(self.trained_frames)))
            empty = StreamCache(role=self, condition=condition, slots=slots)
        frame = condition.tensors.get(FIRST_FRAME)
        return empty if frame is None else empty.with_chunk(Sample({VIDEO: frame}))

    def chunk_velocity(self, x: Sample, t: Tensor, cache: Cache, history: History | None = None) -> Sample:
        """Return the velocity of the next chunk, whose history is ``cache``.

        Gradients reach the network and ``x``; a training cache is constant. With another cache, gradients must be
        disabled, and the chunk's keys and values enter its buffer until the next forward. ``x`` are the chunk's
        ``x_t``, ``t`` is ``(B,)``, fp32 or better; ``history`` is ``cache.history()`` if the caller has it.
        """
        causal, (network,) = cache.forward(history or cache.history()), self.networks
        samples, frames = len(cache.condition), len(causal.positions)
        if cache.role is not self or (len(x), x.video.shape[2]) != (samples, frames) or t.shape != (samples,):
            wanted = f"chunk {cache.count} of {cache.role.name} has {frames} latent frames of {samples} samples"
            raise ValueError(f"{wanted}, but x is {tuple(x.video.shape)} and t {tuple(t.shape)}")
        return self._outputs(Call(self, network, x, t, cache.condition, causal)).velocity.to(x.dtype)

    def logits(
        self, x: Sample, t: Tensor, condition: Condition, second_time: Tensor | None = None, *, at: float | None = None
    ) -> Tensor:
        """Return ``D(x_t, t, condition)`` of this role's GAN head (models/additions/gan_head.py); positive means real.

        Arguments are those of :meth:`velocity`. The logits ``(B, K)`` of its K blocks have the dtype of ``x``.
        """
        network = self.network_at(t, at)
        head = cast(GanHead, additions_of(network.module, self.name)["gan_head"])
        with head.wanted(self.tokens(x.shapes)), self._telling_additions(network, t, second_time):
            return self._outputs(Call(self, network, x, t, condition, depth=head.depth)).others[0].to(x.dtype)

    def _outputs(self, call: Call) -> Outputs:
        """Call a network and return its outputs."""
        _, network, x, t, condition, causal, depth = call
        dtype = COMPUTE_DTYPE[network.precision]
        by_frame = network.family.frame_times and t.shape == (len(x), x.video.shape[2])
        if t.shape != (len(x),) and not by_frame:
            # A broadcasting network would read (B, T) as times of tokens, and split them if T equals cp.
            raise ValueError(f"times of shape {tuple(t.shape)} for {len(x)} samples; give one a sample, ({len(x)},)")
        assert t.dtype in (torch.float32, torch.float64), "times lose their meaning below fp32"
        # A backward costs one forward for input gradients and one for weight gradients, which a frozen base lacks.
        needs_gradient = any(part.requires_grad for part in x.parts.values())
        backward = (1 if network.adapters else 2) if self.trainable else int(needs_gradient)
        sample = call.flops
        passes = 1 + depth * backward * torch.is_grad_enabled()
        flops, sparse = passes * sample.forward, passes * sample.sparse
        inputs = (*x.parts.values(), t)
        if may_be_dual(t) and any(forward_ad.unpack_dual(value).tangent is not None for value in inputs):
            flops, sparse = flops + sample.tangent, sparse + 2 * sample.sparse
        self.flops += int(flops * len(x))
        self.sparse_flops += int(sparse * len(x))
        recorded = nullcontext() if torch.is_grad_enabled() else unrecorded_forward(network.module)
        with self.observer(call), network.serves(self.name), recorded:
            # Chunks of a clip, and the clip, are split differently.
            x = x.map(lambda part: with_whole_gradient(part, network.mesh).to(dtype))
            history = () if causal is None else (causal,)
            return network.family.outputs(network.module, x, t, condition.to(dtype), *history)

    @contextmanager
    def as_exported(self) -> Iterator[None]:
        """Within this context, compute without a training adapter, as an export does."""
        servings = [network.serving for network in self.networks if network.serving is not None]
        for serving in servings:
            serving.in_training = False
        try:
            yield
        finally:
            for serving in servings:
                serving.in_training = True

    @contextmanager
    def reaching(self, distance: float) -> Iterator[None]:
        """Within this context, let an expert serve times up to ``distance`` outside of its range: on both sides of a
        finite difference, or down to the end of a phase."""
        self.beyond = distance
        try:
            yield
        finally:
            self.beyond = 0.0

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the role within this context: gradients reach only the inputs, and the role allocates none.

        Use it for whole steps between two updates; a backward must end inside too. On exit the same parameters are
        trainable as before. Nests. Other roles of the network keep training.
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
        """Freeze other roles' adapters on shared networks within this context.

        Otherwise FSDP would wait for their gradients: a unit's sum over its replicas would lack them. Adapters of this
        role in experts that the step does not train are frozen too, since another role's backward through such an
        expert would leave gradients there. Use it for whole steps, as :meth:`frozen`.

        Args:
            experts: positions of the role's networks that the step trains.
        """
        with ExitStack() as stack:
            for i, network in enumerate(self.networks):
                if len(network.adapters) > 1:
                    names = network.trained_elsewhere(self.name)
                    if i not in experts:
                        names |= network.owned_names(self.name)
                    stack.enter_context(frozen(network.module, names))
            yield

    @contextmanager
    def kept_gathered(self) -> Iterator[None]:
        """Keep gathered parameters between the forwards in this context, if the settings keep them within a step
        (``keep_gathered``), and free them on exit. Within a micro-batch of the role the step frees them."""
        with ExitStack() as stack:
            for network in self.networks:
                stack.enter_context(kept_gathered(network.module))
            yield

    def rest(self) -> None:
        """Free gathered parameters. Gathered copies would hide later updates of the shards."""
        reshard(self.network)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return this role's sharded parameters by public name (:meth:`Network.named_parameters`), in a fixed order."""
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
