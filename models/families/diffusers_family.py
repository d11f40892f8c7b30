"""Code that the families of diffusers' video transformers share: building, checks of configurations and data, sizes,
tokens of a rank, and first frames.

Shape legend: B samples, C T H W latents of one sample, S tokens of one sample.
"""

import difflib
import inspect
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar, get_args, get_origin

import torch
from torch import Tensor, nn

from fsdp_cp.choices import members
from fsdp_cp.errors import UserError, one_line
from fsdp_cp.mesh import Mesh
from fsdp_cp.sequence import local_token_count
from fsdp_cp.tiles import Tiles
from models.condition import FIRST_FRAME, KEYFRAMES, REFERENCES, Condition
from models.families.base import Family, LatentShape, NetworkConfig, Shape, Shapes
from models.files.checkpoint_files import defining
from models.sample import VIDEO, PartShapes

_LIMITS = {"num_layers": (1, 512), "num_refiner_layers": (0, 64)}
"""Minimum and maximum of these counts. From a damaged file diffusers would build a billion layers for hours."""
_MOST = 2**20
"""Maximum of all other integers."""
TIME_FEATURES = 256
"""Number of sines and cosines of a time, a constant in the embeddings of most of diffusers' networks."""


class DiffusersFamily(Family):
    """A family whose network is one class of diffusers, with ``num_layers`` blocks of ``num_attention_heads`` heads."""

    transformer: ClassVar[type[Any]]
    """diffusers' class, unmodified."""
    label: ClassVar[str]
    """Name of the family's networks in messages."""
    open_counts: ClassVar[tuple[str, ...]] = ()
    """Names of tensors of a condition of which the network takes any number of tokens."""

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of each argument of the network's class, by key."""
        return {name: parameter.default for name, parameter in parameters_of(cls.transformer).items()}

    def requirements(self, values: NetworkConfig) -> Iterator[tuple[str, bool, str]]:
        """Yield the requirements of a configuration with all defaults: key, whether it fits, and a fitting value."""
        return iter(())

    def build(self, config: NetworkConfig, setting: str) -> Any:
        """Build a network of ``config`` (the ``config.json`` of a diffusers folder) on the current default device.

        Values of undeclared types, sizes out of range, and unmet :meth:`requirements` are refused.
        """
        name = config.get("_class_name", self.class_name)
        if name != self.class_name:
            wanted = f"{self.class_name} in diffusers' layout (Wan's repositories end in -Diffusers)"
            raise UserError(f"{setting} is a {one_line(name)}, but family={self.name} needs a {wanted}")
        values = checked_arguments(self.transformer, config, setting)
        for key, fits, wanted in self.requirements(values):
            if not fits:
                refuse(values, key, wanted, setting)
        try:
            return self.transformer.from_config(dict(config))
        except (TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError, AssertionError) as error:
            reason = one_line(f"{defining(config)} ({error})", 400)
            raise UserError(f"{setting}: cannot build a {self.label} network of {reason}") from error

    def check_keys(self, architecture: NetworkConfig, setting: str) -> None:
        """Refuse unknown keys: diffusers would only warn, and build the default instead."""
        known = list(self.defaults())
        for key in architecture:
            if key not in (*known, "_class_name", "_diffusers_version", "_name_or_path"):  # keys that diffusers writes
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {setting}.{near[0]}?" if near else ""
                raise UserError(f"there is no setting {setting}.{key}{hint}")

    def check_sample(self, config: NetworkConfig, shapes: PartShapes, condition: Shapes, setting: str) -> None:
        latent_shape = shapes[VIDEO]
        needed = self.condition_shapes(config, latent_shape, condition["text"][0])
        optional = self.optional_shapes(config, latent_shape, condition["text"][0])
        if optional.keys() & condition.keys():
            needed |= optional
        self.check_data(config, latent_shape, needed, condition, setting)
        self.check_patches(config, latent_shape, setting)

    def check_data(
        self, config: NetworkConfig, latent_shape: LatentShape, needed: Shapes, condition: Shapes, setting: str
    ) -> None:
        """Compare the shapes of the data, latents ``(C, T, H, W)`` and condition, with the ``needed`` tensors."""
        use = "use data.encoders of the pipeline that the checkpoint is from"
        if (channels := self.latent_channels(config)) != latent_shape[0]:
            raise UserError(f"{setting} takes latents of {channels} channels, not the data's {latent_shape[0]}; {use}")
        for name, shape in needed.items():
            data_shape, start = condition.get(name), 1 if name in self.open_counts else 0
            if data_shape is None or data_shape[start:] != shape[start:]:
                image = ", and data.image=first_frame with data=video_folder for an image" if "image" in name else ""
                wanted = f"{setting} ({self.label}) takes {name} of shape {shape}"
                raise UserError(f"{wanted}, but the data give {data_shape or 'none'}; {use}{image}")
        for name in ("image_latents", "image_embeds", FIRST_FRAME, KEYFRAMES, REFERENCES):
            if name in condition and name not in needed:
                raise UserError(f"{setting} ({self.label}) does not take the data's {name}; {use}, or no data.image")
        if FIRST_FRAME in condition and latent_shape[1] < 2:
            raise UserError("data.num_frames gives only the latent frame of data.image=first_frame; use more frames")

    def check_patches(
        self, config: NetworkConfig, latent_shape: LatentShape, setting: str, most: int | None = None
    ) -> None:
        """Check the numbers of tokens along each axis."""
        keys = ("data.num_frames", "data.height", "data.width")
        for key, size, patch in zip(keys, latent_shape[1:], self.patch_size(config), strict=True):
            fitting = min(size - size % patch or patch, patch * (most or size))
            if size != fitting:
                wanted = f"{setting} takes patches of {patch}{'' if most is None else f', at most {most}'}"
                raise UserError(f"{key} gives {size} latent positions, but {wanted}; use one that gives {fitting}")

    def fill_special(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Draw random modulation tables, which diffusers draws in constructors; see ``initialise``."""
        if name == "scale_shift_table":
            tensor.normal_().div_(tensor.shape[-1] ** 0.5)

    def heads(self, config: NetworkConfig) -> int:
        """Return the number of query heads, which equals that of key/value heads."""
        return config["num_attention_heads"]

    def head_dim(self, config: NetworkConfig) -> int:
        return config["attention_head_dim"]

    def width(self, config: NetworkConfig) -> int:
        return config["num_attention_heads"] * config["attention_head_dim"]

    def layers(self, config: NetworkConfig) -> int:
        return config["num_layers"]

    def time_features(self, config: NetworkConfig) -> int:
        return TIME_FEATURES

    def blocks(self, network: Any) -> list[nn.Module]:
        return list(network.transformer_blocks)


def parameters_of(cls: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class of diffusers, by name."""
    parameters = inspect.signature(cls.__init__, eval_str=True).parameters
    return {name: parameter for name, parameter in parameters.items() if name != "self"}


def checked_arguments(cls: type[Any], config: NetworkConfig, setting: str) -> dict[str, Any]:
    """Return the arguments of a class of diffusers by a ``config.json``, with the defaults of the others."""
    arguments = {}
    for key, parameter in parameters_of(cls).items():
        value, hint = config.get(key, parameter.default), parameter.annotation
        arguments[key] = value
        # diffusers uses in_channels where out_channels is null. Some defaults are not of the type that they declare.
        if value is None and (key == "out_channels" or parameter.default is None):
            continue
        least, most = _LIMITS.get(key, (0 if parameter.default == 0 else 1, _MOST))
        if hint is not inspect.Parameter.empty and not _fits(value, hint, least, most):
            name = hint.__name__ if isinstance(hint, type) else hint
            bounds = f", {least} to {most}" if int in members(hint) else ""
            refuse(config, key, f"{name}{bounds}", setting)
    return arguments


def _fits(value: Any, hint: Any, least: int, most: int) -> bool:
    """Whether ``value`` has a type that ``hint`` allows, with integers from ``least`` to ``most``.

    Floats are above 0, or 0 where ``least`` is 0. A list has at most 16 integers from 1 on, or finite floats.
    """
    kinds = members(hint)
    if value is None or isinstance(value, (bool, str)):
        return type(value) in kinds
    if isinstance(value, (list, tuple)):
        listed = [get_args(kind)[0] for kind in kinds if get_origin(kind) in (tuple, list)]
        if float in listed:
            return all(type(item) in (int, float) and math.isfinite(item) for item in value)
        return bool(listed) and len(value) <= 16 and all(_fits(item, listed[0], 1, most) for item in value)
    if type(value) is int and int in kinds:
        return least <= value <= most
    return float in kinds and isinstance(value, (int, float)) and (0 < value < math.inf or value == least == 0)


def refuse(config: NetworkConfig, key: str, wanted: str, setting: str) -> None:
    """Refuse the value of ``key`` by a ``UserError``."""
    raise UserError(f"{setting}: {key}={one_line(repr(config[key]), 80)} of its configuration must be {wanted}")


def token_positions(
    hidden_states: Tensor, patch: Sequence[int], mesh: Mesh, device: torch.device, tiles: Tiles | None = None
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Return frame, row and column ``(S_local,)`` of the rank's own tokens, and S, the number of all tokens.

    ``hidden_states`` are latents ``(B, C, T, H, W)``; ``patch`` is the size of a token: frames, height, width. Padding
    tokens have the positions of the last token. ``tiles`` are those of a sparse role, in their order.
    """
    frames, height, width = (size // step for size, step in zip(hidden_states.shape[2:], patch, strict=True))
    total = frames * height * width
    local = local_token_count(total, mesh.cp_size)
    tokens = torch.arange(mesh.cp_rank * local, (mesh.cp_rank + 1) * local, device=device).clamp_max(total - 1)
    tokens = tokens if tiles is None else tiles.order(device)[tokens]
    return (tokens // (height * width), tokens // width % height, tokens % width), total


# First frames that the data give: their latents replace the noisy ones and have time 0, in networks without image
# channels or an image encoder (Wan 2.2's TI2V, LTX-Video, LTX-2).

LEAST_TIME = 1e-6
"""Minimum time that :func:`hold_first_frame` divides by: at t = 0 the velocity would be 0 / 0."""


class FrameFamily(DiffusersFamily):
    """A family whose networks take a given first frame in place of the noisy one."""

    def optional_shapes(
        self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int, images: int = 2
    ) -> dict[str, Shape]:
        return {FIRST_FRAME: first_frame_shape(latent_shape)}

    def with_frame(
        self, x: Tensor, t: Tensor, condition: Condition, patch: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor]:
        """Return the network's latents ``(B, C, T, H, W)`` and times: ``x`` and ``t`` without a given frame, otherwise
        ``x`` with it and a time per token, ``(B, S)``."""
        frame = condition.tensors.get(FIRST_FRAME)
        return (x, t) if frame is None else (insert_first_frame(x, frame), token_times(t, x, patch))

    def hold(self, v: Tensor, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        frame = condition.tensors.get(FIRST_FRAME)
        return v if frame is None else hold_first_frame(v, x, t, frame)


def first_frame_shape(latent_shape: LatentShape) -> Shape:
    """Return the shape of the first frame of latents ``(C, T, H, W)``."""
    channels, _, height, width = latent_shape
    return channels, 1, height, width


def insert_first_frame(x: Tensor, frame: Tensor) -> Tensor:
    """Replace frame 0 of ``x`` ``(B, C, T, H, W)`` by ``frame`` ``(B, C, 1, H, W)``."""
    return torch.cat([frame.to(x.dtype), x[:, :, 1:]], dim=2)


def token_times(t: Tensor, latents: Tensor, patch: tuple[int, int, int], clean: Collection[int] = (0,)) -> Tensor:
    """Return a time for each token, ``(B, S)``: 0 in given ``clean`` frames, ``t`` ``(B,)`` or ``(B, T)`` in others.

    ``patch`` is the size of a token of ``latents`` ``(B, C, T, H, W)``, with one frame.
    """
    frames, height, width = latents.shape[2:]
    tokens = (height // patch[1]) * (width // patch[2])
    times = [t if t.ndim == 1 else t[:, i] for i in range(frames)]
    times = [torch.zeros_like(time) if i in clean else time for i, time in enumerate(times)]
    return torch.stack(times, dim=1).repeat_interleave(tokens, dim=1)


def hold_first_frame(v: Tensor, x: Tensor, t: Tensor, frame: Tensor) -> Tensor:
    """Replace frame 0 of ``v`` by the velocity from ``x`` to ``frame``, so that ``x - t v`` is the frame there.

    ``x`` is ``(B, C, T, H, W)``, ``v`` alike or P times as many samples, ``frame`` ``(B, C, 1, H, W)``, ``t`` ``(B,)``
    or ``(B, T)`` in fp32 or better.
    """
    first = t if t.ndim == 1 else t[:, 0]
    held = (x[:, :, :1] - frame) / first.clamp_min(LEAST_TIME).view(-1, 1, 1, 1, 1)
    held = held.to(v.dtype).repeat(len(v) // len(x), 1, 1, 1, 1)
    return torch.cat([held, v[:, :, 1:]], dim=2)
