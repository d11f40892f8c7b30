"""What a model family is: everything that differs between video transformers, behind one interface.

A family is one file. It says how an unmodified network (diffusers' class) is built, split over the mesh, called and
counted; the rest of the house knows networks through it alone. docs/extending.md shows how to add one; models/verify.py
proves it.

Shape legend: B samples, C T H W latents of one sample, S tokens of one sample, L D text.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from models.families.planning import FamilyPlanning, LatentShape
from models.roles.condition import Condition

Shape = tuple[int, ...]


def config_of(network: nn.Module) -> Mapping[str, Any]:
    """What diffusers has noted of how ``network`` was built."""
    return cast("Mapping[str, Any]", network.config)


class Family(ABC):
    """The protocol. Nothing in it knows what role a network plays; ``config`` is always a network's ``config.json``."""

    name: ClassVar[str]
    """As ``ROLE.family`` names it."""
    class_name: ClassVar[str]
    """``_class_name`` of the network's ``config.json``."""
    time_scale: ClassVar[float] = 1000.0
    """What the network calls the time 1 of pure noise."""
    planning: ClassVar[FamilyPlanning] = FamilyPlanning()
    """Facts that only a plan of memory and time needs."""
    frame_times: ClassVar[bool] = False
    """Does :meth:`outputs` take a time for each latent frame, ``(B, T)``, beside one for each sample?"""

    # Building

    @abstractmethod
    def build(self, config: Mapping[str, Any], setting: str) -> nn.Module:
        """A network of ``config`` on the current default device; ``setting`` names where the config came from.

        Raises:
            UserError: a configuration of another class, or one that no network can be built of.
        """

    @abstractmethod
    def check_keys(self, architecture: Mapping[str, Any], setting: str) -> None:
        """Refuse keys of ``ROLE.architecture`` that the network's class does not know.

        Raises:
            UserError: a misspelt key.
        """

    def restore_buffers(self, network: nn.Module, device: torch.device) -> None:  # noqa: B027 - most have none
        """Compute what is in no checkpoint and was lost on the meta device, such as rotary tables, on ``device``."""

    def fill_special(self, module: nn.Module, name: str, tensor: Tensor) -> None:  # noqa: B027 - most have none
        """Random values of bare parameters, which only their module's constructor knows; see ``initialise``."""

    @abstractmethod
    def examples(self) -> dict[str, dict[str, Any]]:
        """Small configurations that between them use all that the family can do, by name, for ``models.verify``."""

    # Parts

    @abstractmethod
    def blocks(self, network: nn.Module) -> Sequence[nn.Module]:
        """The transformer blocks in their order, each an FSDP unit; their output is ``(B, S_local, width)``, alone or
        the first of a tuple."""

    def full_precision_units(self, network: nn.Module) -> list[nn.Module]:
        """What computes in fp32 under ``precision=bf16``, each as an FSDP unit of its own."""
        return []

    @abstractmethod
    def time_embedder(self, network: nn.Module) -> nn.Module:
        """The module whose output embeds the time: ``(B, time_width)``, or ``(B, S_local, time_width)`` where each
        token has a time."""

    def fp8_excluded(self, network: nn.Module) -> list[nn.Module]:
        """Modules of the blocks whose linear layers stay as they are under ``ROLE.fp8``: those of their modulation."""
        return []

    masked_attention: ClassVar[bool] = False
    """Does the attention between a network's own tokens take a mask of keys? Not every kernel does."""

    def never_trained(self, network: nn.Module) -> list[str]:
        """Names of parameters that no gradient ever reaches; they are frozen."""
        return []

    def original_name(self, layer: str) -> str:
        """What the model's own code calls the linear layer ``layer`` of the diffusers network, as ComfyUI does.

        Raises:
            UserError: a layer without such a name.
        """
        raise UserError(f"{layer}: the names of {self.name}'s own code are not known; use --format diffusers-lora")

    def diffusers_adapters(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert adapters with the names of the model's own code to diffusers', with the scales in them; return others
        as they are.

        Raises:
            Exception: of any kind, by names that diffusers cannot convert.
        """
        return tensors

    # Sizes

    @abstractmethod
    def heads(self, config: Mapping[str, Any]) -> int:
        """What a ``mesh.ulysses`` must divide: the greatest common divisor of query and key/value heads."""

    @abstractmethod
    def head_dim(self, config: Mapping[str, Any]) -> int:
        """Size of an attention head."""

    @abstractmethod
    def width(self, config: Mapping[str, Any]) -> int:
        """Features of a token between the blocks."""

    def time_width(self, config: Mapping[str, Any]) -> int:
        """Features of an embedded time."""
        return self.width(config)

    @abstractmethod
    def layers(self, config: Mapping[str, Any]) -> int:
        """Number of blocks."""

    @abstractmethod
    def time_features(self, config: Mapping[str, Any]) -> int:
        """Sines and cosines of a time that the network's own embedder gets."""

    @abstractmethod
    def latent_channels(self, config: Mapping[str, Any]) -> int:
        """C, channels of the latents and of the velocity; the network itself may take more, of a condition."""

    @abstractmethod
    def patch_size(self, config: Mapping[str, Any]) -> tuple[int, int, int]:
        """Latents of a token: frames, height, width."""

    @abstractmethod
    def condition_shapes(
        self, config: Mapping[str, Any], latent_shape: LatentShape, text_tokens: int
    ) -> dict[str, Shape]:
        """Name and shape of each tensor of one sample's condition that the network needs.

        What it takes too where the data give it is in :meth:`optional_shapes`.

        Args:
            config: of the network.
            latent_shape: ``(C, T, H, W)`` of a sample.
            text_tokens: L, where the network leaves it open.
        """

    def optional_shapes(self, config: Mapping[str, Any], latent_shape: LatentShape) -> dict[str, Shape]:
        """What a network of ``config`` takes too where the data give it, as :meth:`condition_shapes` has what it needs.

        Of networks whose configuration does not tell whether an image comes, such as a first frame that takes the
        noisy one's place. Plans and ``models.verify`` ask for it; of a run's data :meth:`check_sample` judges.
        """
        return {}

    @abstractmethod
    def check_sample(
        self, config: Mapping[str, Any], latent_shape: LatentShape, condition: Mapping[str, Shape], setting: str
    ) -> None:
        """Can the network take samples of latents ``(C, T, H, W)`` and tensors of these names and shapes beside them?

        Where its configuration leaves open whether an image comes, the ``condition`` decides.

        Raises:
            UserError: channels, sizes or conditions that it cannot take or lacks.
        """

    def tokens(self, config: Mapping[str, Any], latent_shape: LatentShape) -> int:
        """S, tokens of one sample of latents ``(C, T, H, W)`` that :meth:`check_sample` took."""
        sizes = zip(latent_shape[1:], self.patch_size(config), strict=True)
        return math.prod(size // patch for size, patch in sizes)

    @abstractmethod
    def forward_flops(self, config: Mapping[str, Any], tokens: int, condition: Mapping[str, Shape]) -> int:
        """Floating-point operations of one forward of one sample: matrix products and attention alone."""

    def tangent_flops(self, config: Mapping[str, Any], tokens: int, condition: Mapping[str, Shape]) -> int:
        """Operations of the tangent of one sample beside its forward, where the latents and the time have tangents.

        As many as the forward's, unless the family knows better: a linear map takes its own once more, a product of two
        things that both have tangents, as in self-attention, twice.
        """
        return self.forward_flops(config, tokens, condition)

    def attention_flops(self, config: Mapping[str, Any], tokens: int, condition: Mapping[str, Shape]) -> int:
        """Those of :meth:`forward_flops` that are attention's own, of queries with keys and of weights with values.

        What selective recomputation does not run again, as it keeps attention's output. 0 is no wrong answer: a plan
        then counts all of it.
        """
        return 0

    def pipeline_times(self, steps: int) -> list[float] | None:
        """What diffusers' pipeline of these networks hands its scheduler for ``steps`` steps, before any shift.

        ``None`` where it leaves the times to the scheduler. An export's scheduler is made for that pipeline.

        Raises:
            UserError: the pipeline takes no flow-matching scheduler, so none is exported.
        """
        return None

    # Running

    @abstractmethod
    def parallelize(self, network: nn.Module, mesh: Mesh, backend: str = "auto", head_groups: int = 1) -> None:
        """Split the tokens over ``mesh.cp`` and replace the attention, in place, before the network is sharded.

        Args:
            network: the network.
            mesh: the mesh; at cp = 1 too, attention must take forward-mode duals.
            backend, head_groups: of :func:`fsdp_cp.attention.context_parallel_attention`.

        Raises:
            ValueError: a version of the network's library that is not the one known.
        """

    @abstractmethod
    def outputs(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, ...]:
        """The rectified-flow velocity ``(B, C, T, H, W)``, and behind it whatever additions append.

        The family packs ``x`` as its network takes it and unpacks what comes back; it scales and casts the time, and
        expands it where its network wants one for each token. Frames that the condition gives are the family's too: it
        puts them in, and returns a velocity whose ``x0 = x - t v`` is the given frame there. So every difference that
        a loss takes is 0 in a given frame: losses are means over all frames and need not know of it.

        Args:
            network: plain, or parallel and sharded.
            x: ``x_t``, ``(B, C, T, H, W)`` in the dtype of compute.
            t: ``(B,)`` in [0, 1], fp32 or better; ``(B, T)`` too where :attr:`frame_times` says so.
            condition: of the B samples, in the dtype of compute.
        """

    def hold(self, v: Tensor, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """``v`` with the velocity of given frames as exact as the caller's numbers.

        :meth:`outputs` has them rounded to the dtype of compute, which a division by a small time would magnify: where
        that is not the caller's own, this is called behind it with what was not rounded.

        Args:
            v: of :meth:`outputs`, in the dtype of ``x``.
            x, t, condition: as of :meth:`outputs`, fp32 or better.
        """
        return v
