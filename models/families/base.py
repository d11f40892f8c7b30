"""Interface of a model family: everything that differs between video transformers.

A family is one file. It defines how an unmodified diffusers network is built, split over the mesh, called and counted.
All other code uses networks only through this interface. See docs/extending.md; models/verify.py checks it.

Shape legend: B samples, C T H W latents of one sample, S tokens of one sample, L D text.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from models.condition import Condition
from models.families.causal_forward import CausalForward
from models.files.scheduler import few_step_scheduler
from models.sample import VIDEO, PartShapes, Sample

if TYPE_CHECKING:
    from diffusers import SchedulerMixin

NetworkConfig = Mapping[str, Any]
"""Configuration of a network, as in its ``config.json``."""
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Shapes of the tensors of one sample's condition, by name."""
LatentShape = tuple[int, ...]
"""Shape ``(C, T, H, W)`` of the latents of one sample's video."""


def config_of(network: nn.Module) -> NetworkConfig:
    """Return the configuration that diffusers recorded when it built ``network``."""
    return cast(NetworkConfig, network.config)


class Outputs(NamedTuple):
    """Outputs of a network."""

    velocity: Sample
    """Rectified-flow velocity, with the parts of the network's input. Of P fused heads (models/additions/heads.py) it
    has P B samples: those of the first head, then those of the second."""
    others: tuple[Tensor, ...] = ()
    """Outputs of additions."""


class LastLayer(NamedTuple):
    """Linear layer whose output is the velocity of one part."""

    name: str
    inputs: int
    outputs: int


class GateLayer(NamedTuple):
    """Gate of a block's sparse attention (models/sparse.py): a linear layer next to the unmodified network."""

    parent: str
    """Name of the module that holds the gate."""
    inputs: int
    outputs: int
    bias: bool


class Pipeline(NamedTuple):
    """Pipeline of diffusers that samples a family's networks, for the code on model cards (models/card.py)."""

    text: str
    """Class that samples from text."""
    image: str
    """Class that samples from a first frame."""
    neutral: Sequence[str] = ("guidance_scale=1.0",)
    """Arguments of a call without guidance, which a few-step student has built in."""
    parts: Sequence[str] = ()
    """Further arguments of ``from_pretrained``."""
    imports: Sequence[str] = ()
    """Classes of diffusers that ``parts`` need."""
    adapters: str = "pipeline.load_lora_weights({where})"
    """Line that loads an adapter file."""
    takes_fps: bool = False
    """Whether a call takes ``frame_rate``."""
    takes_tokens: bool = True
    """Whether a call takes ``max_sequence_length``."""
    reseeds: bool = True
    """Whether a call takes ``callback_on_step_end``, in which the noise of the next step can be seeded."""
    same_noise: bool = True
    """Whether a seeded call draws the noise of ``distill.sample``."""
    sets_times: bool = False
    """Whether its scheduler can be given any times: a call passes none of its own, and takes latents as they are."""


@dataclass(frozen=True, slots=True)
class ReferenceRoom:
    """Most that the references of a sample take."""

    count: int
    """Number of references."""
    rows: int
    """Rows of pictures."""
    sounds: int
    """Rows of sounds."""
    text: int
    """Rows of the text that show pictures. Labels count as the caption's."""


class FamilyPlanning:
    """Facts for plans without files on disk. The defaults are those of a family with no released networks."""

    networks: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Configurations of released networks, by the names that ``planning.model`` takes."""
    boundaries: ClassVar[Mapping[str, float]] = {}
    """Time from which the first of two experts serves, by the names of the :attr:`networks` with two experts."""
    text_encoder: ClassVar[Mapping[str, Any]] = {}
    """``config.json`` of the released networks' text encoder."""
    text_encoder_2: ClassVar[Mapping[str, Any]] = {}
    """``config.json`` of a second text encoder, loaded in addition to the first; empty for none."""
    vae: ClassVar[Mapping[str, Any]] = {}
    """``config.json`` of their VAE; empty for Wan 2.1's class with its own defaults."""
    image_encoder: ClassVar[Mapping[str, Any]] = {}
    """``config.json`` of their image encoder, CLIP's or SigLIP's vision transformer; empty for none."""

    def with_layers(self, config: NetworkConfig, layers: int) -> dict[str, Any] | None:
        """Return ``config`` with another number of blocks; ``None`` if blocks differ, so that a plan must build all."""
        return {**config, "num_layers": layers} if "num_layers" in config else None

    vae_sizes: ClassVar[Mapping[int, tuple[str, int, int]]] = {}
    """Released VAEs by the channels of their latents: name, frames per latent frame after the first, and height and
    width of a latent in pixels. The first is that of all other numbers of channels."""

    def reference_room(self, kinds: Sequence[str], num_frames: int, image_edge: int, video_edge: int) -> ReferenceRoom:
        """Return the room for references of these ``kinds`` (data.references) in clips of so many frames, pictures as
        16:9 with a shorter side of ``image_edge`` or ``video_edge`` pixels."""
        raise UserError("data.references is for MiniMax-H3's network of references; leave it out")

    def shapes_of_clip(self, channels: int, num_frames: int, height: int, width: int, fps: float) -> PartShapes:
        """Return the shapes of a clip's latents, for networks with this number of latent channels of the video."""
        if not self.vae_sizes:
            raise UserError("data.encoders must name a pipeline folder: this model family names no VAE of its own")
        channels = channels if channels in self.vae_sizes else next(iter(self.vae_sizes))
        vae, frames, pixels = self.vae_sizes[channels]
        if (num_frames - 1) % frames or height % pixels or width % pixels:
            given = f"data.num_frames={num_frames}, data.height={height}, data.width={width}"
            raise UserError(f"{given}: {vae} takes {frames}k + 1 frames of multiples of {pixels} pixels")
        return {VIDEO: (channels, (num_frames - 1) // frames + 1, height // pixels, width // pixels)}

    def picture_tokens(self, height: int, width: int) -> int:
        """Return the number of text tokens that show a given frame of this size, for families whose text does."""
        return 0

    def encoders(self, channels: int, model: str | None) -> dict[str, Mapping[str, Any]]:
        """Return ``config.json`` of each encoder of a released ``model`` (:attr:`networks`), by its sub-folder: empty
        for the VAE's defaults and for no image encoder."""
        return {name: getattr(self, name) for name in ("text_encoder", "text_encoder_2", "vae", "image_encoder")}


class Family(ABC):
    """Base class of model families, independent of roles. ``config`` is always a network's ``config.json``.

    What a user can mend, such as a configuration or data that do not fit, is a ``UserError`` that names ``setting``,
    the setting that they come from.
    """

    name: ClassVar[str]
    """Name of the family in ``ROLE.family``."""
    class_name: ClassVar[str]
    """``_class_name`` in the network's ``config.json``."""
    time_scale: ClassVar[float] = 1000.0
    """Value of the network's time at pure noise (t = 1)."""
    parts: ClassVar[Mapping[str, float]] = {VIDEO: 1.0}
    """Parts of the samples that the networks make, the video first, with the shift from the video's time to each part's
    own (:class:`models.sample.Sample`), as released."""
    planning: ClassVar[FamilyPlanning] = FamilyPlanning()
    """Facts that only a plan of memory and time uses."""
    takes_times: ClassVar[bool] = True
    """Whether diffusers' pipeline takes a list of times. Otherwise it cannot sample a student without a scheduler."""
    knows_empty_text: ClassVar[bool] = True
    """Whether the network was trained with the empty text, and predicts without a caption from it."""
    export_note: ClassVar[str] = ""
    """Text for the card of an export: what diffusers' pipeline needs, where that is not its defaults."""
    pipeline: ClassVar[Pipeline | None] = None
    """Pipeline for the code on the card; ``None`` for a card without code."""
    frame_times: ClassVar[bool] = False
    """Whether :meth:`outputs` accepts a time per latent frame, ``(B, T)``, as well as per sample."""
    causal: ClassVar[bool] = False
    """Whether roles can be causal (``ROLE.causal.*``): the family then has :meth:`check_causal`, its :meth:`outputs`
    take a causal forward, and it accepts a time per latent frame."""

    # Building

    @abstractmethod
    def build(self, config: NetworkConfig, setting: str) -> nn.Module:
        """Build a network of ``config`` on the current default device; ``setting`` names the source of ``config``."""

    @abstractmethod
    def check_keys(self, architecture: NetworkConfig, setting: str) -> None:
        """Refuse keys of ``ROLE.architecture`` that the network's class does not know."""

    def restore_buffers(self, network: nn.Module, device: torch.device) -> None:  # noqa: B027 - most have none
        """Recompute buffers on ``device`` that no checkpoint holds and the meta device lost, such as rotary tables."""

    def fill_special(self, module: nn.Module, name: str, tensor: Tensor) -> None:  # noqa: B027 - most have none
        """Draw parameters that only their module's constructor initializes; see ``initialise``."""

    @abstractmethod
    def examples(self) -> dict[str, dict[str, Any]]:
        """Return small configurations by name that together cover all features of the family, for ``models.verify``."""

    # Parts

    @abstractmethod
    def blocks(self, network: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks in order, each an FSDP unit with ``(B, S_local, width)`` as its (first) output."""

    def full_precision_units(self, network: nn.Module) -> list[nn.Module]:
        """Return the modules that compute in fp32 under ``precision=bf16``, each as a separate FSDP unit."""
        return []

    @abstractmethod
    def time_embedder(self, network: nn.Module) -> nn.Module:
        """Return the module that embeds the time: ``(B, time_width)``, or per token ``(B, S_local, time_width)``."""

    def fp8_excluded(self, network: nn.Module) -> list[nn.Module]:
        """Return the modulation modules of the blocks, whose linear layers stay out of fp8 under ``ROLE.fp8``."""
        return []

    def last_layers(self, config: NetworkConfig) -> Mapping[str, LastLayer]:
        """Return the last layer of each part, which heads can replace; empty for a family that takes no heads."""
        return {}

    def gates(self, config: NetworkConfig) -> Sequence[GateLayer]:
        """Return the place of each block's gate of sparse attention; empty for a family without sparse roles."""
        return ()

    def dense_rows(self, config: NetworkConfig, shapes: PartShapes, condition: Shapes) -> Sequence[int]:
        """Return the numbers of rows before the video in the blocks' self-attention, which stay dense."""
        return ()

    def given_frames(self, condition: Shapes) -> int:
        """Return the number of the video's own first frames that stay dense, since the condition gives them."""
        return 0

    def token_grid(self, config: NetworkConfig, shapes: PartShapes) -> tuple[int, int, int]:
        """Return the numbers of frames, rows and columns of the video's tokens."""
        sizes = zip(shapes[VIDEO][1:], self.patch_size(config), strict=True)
        frames, rows, columns = (size // patch for size, patch in sizes)
        return frames, rows, columns

    def stacked_outputs(self, config: NetworkConfig, part: str, outputs: Tensor) -> Tensor:
        """Return P outputs of a last layer ``(B, S_local, P, out)`` as one of ``(B, S_local, P out)`` that the network
        can unpack; the default is for a network that returns rows."""
        return outputs.flatten(-2)

    adapter_targets: ClassVar[tuple[str, ...]] = ()
    """Name patterns of the linear layers that get adapters by default; empty for all linear layers of the blocks."""
    keeps_peft_infix: ClassVar[bool] = False
    """Whether diffusers' converter of adapters tells the layout of a file by peft's infix ``.default.``."""
    original_matrices: ClassVar[Mapping[str, str]] = {
        "A.weight": "lora_down.weight",
        "B.weight": "lora_up.weight",
        "B.bias": "diff_b",
    }
    """Names of an adapter's matrices in files with the original code's layers, as diffusers reads them."""
    adapter_alpha: ClassVar[str | None] = None
    """Key of a file's metadata that holds alpha for all adapters without one of their own."""
    masked_attention: ClassVar[bool] = False
    """Whether attention between a network's tokens takes a key mask, which not every kernel supports."""

    def never_trained(self, network: nn.Module) -> list[str]:
        """Return the names of parameters that no gradient reaches; they are frozen."""
        return []

    def original_name(self, layer: str) -> str:
        """Return the name of the linear layer ``layer`` in the model's original code, which ComfyUI uses."""
        raise UserError(f"{layer}: the names of {self.name}'s own code are not known; use --format diffusers-lora")

    def original_adapters(self, adapters: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Convert the matrices ``A.weight``, ``B.weight`` of adapters, by linear layer, to the original code's layers.

        The default renames layers. A family whose original code joins layers joins their matrices.
        """
        return {self.original_name(layer): dict(matrices) for layer, matrices in adapters.items()}

    def diffusers_adapters(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert adapters from the original code's names, merging scales; return others as given. May raise
        anything."""
        return tensors

    # Sizes

    @abstractmethod
    def heads(self, config: NetworkConfig) -> int:
        """Return the greatest common divisor of query and key/value heads, which ``mesh.ulysses`` must divide."""

    @abstractmethod
    def head_dim(self, config: NetworkConfig) -> int:
        """Return the size of an attention head."""

    @abstractmethod
    def width(self, config: NetworkConfig) -> int:
        """Return the number of features of a token between blocks."""

    def time_width(self, config: NetworkConfig) -> int:
        """Return the number of features of an embedded time."""
        return self.width(config)

    @abstractmethod
    def layers(self, config: NetworkConfig) -> int:
        """Return the number of blocks."""

    @abstractmethod
    def time_features(self, config: NetworkConfig) -> int:
        """Return the number of sines and cosines of a time that the network's embedder receives."""

    @abstractmethod
    def latent_channels(self, config: NetworkConfig) -> int:
        """Return C, the channels of latents and velocity. The network can take additional channels from a condition."""

    @abstractmethod
    def patch_size(self, config: NetworkConfig) -> tuple[int, int, int]:
        """Return the size of a token in latents: frames, height, width."""

    @abstractmethod
    def condition_shapes(self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int) -> dict[str, Shape]:
        """Return the shape of each required tensor of one sample's condition; ``text_tokens`` is L, if not fixed."""

    def optional_shapes(
        self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int, images: int = 2
    ) -> dict[str, Shape]:
        """Return the shapes of a sample's optional condition, as a first frame, for plans and ``models.verify``.

        ``images`` is the number of given frames, for families that take several.
        """
        return {}

    def options(self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int) -> list[dict[str, Shape]]:
        """Return the shapes of each kind of optional condition, of which a sample has one, for ``models.verify``."""
        shapes = self.optional_shapes(config, latent_shape, text_tokens)
        return [shapes] if shapes else []

    @abstractmethod
    def check_sample(self, config: NetworkConfig, shapes: PartShapes, condition: Shapes, setting: str) -> None:
        """Check that the network accepts parts and condition tensors of these shapes; these tell whether images are
        given."""

    def check_folder(self, folder: Path, condition: Shapes, setting: str) -> None:  # noqa: B027
        """Check that the network in this folder is for a condition of these tensors, where repositories have several.
        By default, any is."""

    def sample_shapes(self, config: NetworkConfig, latent_shape: LatentShape) -> PartShapes:
        """Return shapes of all parts for a video ``(C, T, H, W)``, for ``models.verify``."""
        return {VIDEO: latent_shape}

    def tokens(self, config: NetworkConfig, shapes: PartShapes) -> int:
        """Return S, the tokens of the video of one sample that passed :meth:`check_sample`."""
        return math.prod(self.token_grid(config, shapes))

    passes_times: ClassVar[bool] = False
    """Whether diffusers' pipeline passes evenly spaced times to its scheduler: 1, 1 - 1/n, ..., 1/n."""

    def schedulers(
        self, *, shifts: Mapping[str, float] | None = None, listed: bool = False, **steps: Any
    ) -> dict[str, SchedulerMixin]:
        """Return the schedulers with which diffusers' pipeline samples a few-step student, by folder.

        Args:
            shifts: shifts from the clock to the parts' times, if they are not the released ones.
            listed: whether a file next to the schedulers lists the times (:meth:`contract`).
            steps: arguments of :func:`models.files.scheduler.few_step_scheduler`.

        Raises:
            UserError: the pipeline cannot sample so.
        """
        if shifts is not None and dict(shifts) != dict(self.parts):
            raise UserError(
                f"{self.name}'s pipeline samples parts with the shifts {dict(self.parts)}, not {dict(shifts)}"
            )
        count = len(steps["times"])
        evenly = [1 - i / count for i in range(count)] if self.passes_times else None
        return {"scheduler": few_step_scheduler(**steps, sigmas=evenly)}

    def contract(
        self, times: Sequence[float], schedulers: Mapping[str, Any], sparse: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return what FastVideo's file says of a student with these ``times`` and schedulers, next to them, and with
        the contents ``sparse`` of ``sparse.json``; empty for a family without that file."""
        return {}

    def check_export(self, shapes: PartShapes, few_steps: Mapping[str, Any]) -> None:
        """Refuse samples and students that diffusers' pipeline cannot make, before training; see :attr:`takes_times`.

        Args:
            shapes: shapes of a sample's parts.
            few_steps: arguments of :meth:`schedulers`; empty for a student without.
        """
        if few_steps:
            self.schedulers(**few_steps)

    # Running

    @abstractmethod
    def parallelize(self, network: nn.Module, mesh: Mesh, backend: str, head_groups: int) -> None:
        """Split the tokens over ``mesh.cp`` and replace the attention, in place, before the network is sharded.

        Attention must accept forward-mode duals at cp = 1 too. ``backend`` and ``head_groups`` are those of
        :func:`fsdp_cp.attention.context_parallel_attention`.
        """

    def serve_pipeline(self, network: nn.Module, mesh: Mesh) -> None:
        """Replace the attention, in place, of a network that diffusers' pipeline calls, on a mesh of one rank."""
        self.parallelize(network, mesh, "auto", 1)

    @abstractmethod
    def outputs(
        self,
        network: nn.Module,
        sample: Sample,
        t: Tensor,
        condition: Condition,
        causal: CausalForward | None = None,
        /,
    ) -> Outputs:
        """Return the rectified-flow velocity and the outputs of additions.

        The family packs the parts of ``sample`` for its network, each with its own time ``sample.time(part, t)``, and
        unpacks the outputs. It scales and casts the time, and expands it if its network takes a time per token.

        The family also inserts frames given by the condition. It returns a velocity for which ``x0 = x - t v`` equals
        the given frame. Differences in a loss are then 0 in a given frame, so losses can average over all frames.

        Args:
            network: plain, or parallel and sharded; a causal one is parallel.
            sample: ``x_t`` in the compute dtype.
            t: ``(B,)`` in [0, 1], fp32 or better; or ``(B, T)`` if :attr:`frame_times`.
            condition: condition of the B samples, in the compute dtype.
            causal: history and positions of a causal forward, only for families that are :attr:`causal`. ``sample`` is
                then a clip, a clean and a noisy clip, or one chunk. Each frame has the position that ``causal`` gives.
                Frames at the position of a given frame are replaced by it and have time 0; :meth:`hold` is not
                applied.
        """

    def check_guidance(self, scale: float, setting: str) -> None:  # noqa: B027 - most take any
        """Check that networks can be guided with ``scale``, not 1: they must know a caption's absence."""

    def check_causal(self, config: NetworkConfig, setting: str) -> None:
        """Check that a network of ``config`` can be causal; ``setting`` is the setting that asks for it."""
        if not self.causal:
            raise UserError(f"{setting}: the family {self.name} has no causal networks; leave it out")

    def hold(self, v: Tensor, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Return the video's velocity ``v`` with that of given frames recomputed in the caller's dtype.

        :meth:`outputs` rounds given frames to the compute dtype, and division by a small time would magnify the error.
        If the compute dtype is not the caller's dtype, this runs after :meth:`outputs` with the video's unrounded
        ``x_t``, ``(B, C, T, H, W)`` in fp32 or better, and ``v`` in its dtype.
        """
        return v
