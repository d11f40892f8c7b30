"""What families of diffusers' video transformers share: how they are built, and what all configurations call alike."""

from __future__ import annotations

import difflib
import inspect
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from fsdp_cp.errors import UserError
from models.families.base import Family, LatentShape, Shape


class DiffusersFamily(Family):
    """A family whose network is one class of diffusers, with ``num_layers`` blocks of ``num_attention_heads`` heads."""

    transformer: ClassVar[type[Any]]
    """diffusers' class, unmodified."""
    label: ClassVar[str]
    """What messages call a network of the family."""

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """What the network's class takes for what a configuration does not say, by key."""
        parameters = inspect.signature(cls.transformer.__init__).parameters.items()
        return {name: parameter.default for name, parameter in parameters if name != "self"}

    @abstractmethod
    def check_values(self, config: Mapping[str, Any], setting: str) -> None:
        """Refuse what diffusers would build a network of that cannot run, or build for hours.

        Raises:
            UserError: by key.
        """

    @abstractmethod
    def products(self, config: Mapping[str, Any], tokens: int, condition: Mapping[str, Shape]) -> tuple[int, int, int]:
        """Multiplications of one forward: of tokens with tokens, what else follows the latents and the time, and what
        depends on the condition alone."""

    def build(self, config: Mapping[str, Any], setting: str) -> Any:
        """A network of ``config`` (the ``config.json`` of a diffusers folder) on the current default device.

        Raises:
            UserError: a config of another class, of a network that is not supported, or that none can be built of.
        """
        name = config.get("_class_name", self.class_name)
        if name != self.class_name:
            shown = " ".join(str(name).split())[:80]
            import diffusers

            layout = (
                ""
                if hasattr(diffusers, str(name))
                else "; that is not a class of diffusers: give the repository in diffusers' layout (Wan's end in"
                " -Diffusers)"
            )
            raise UserError(f"{setting} is a {shown}, but family={self.name} needs a {self.class_name}{layout}")
        self.check_values(config, setting)
        try:
            return self.transformer.from_config(dict(config))
        except (TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError, AssertionError) as error:
            given = {key: value for key, value in config.items() if not key.startswith("_")}
            reason = " ".join(f"{given} ({error})".split())[:400]
            raise UserError(f"{setting}: no {self.label} can be built of {reason}") from error

    def check_keys(self, architecture: Mapping[str, Any], setting: str) -> None:
        """diffusers ignores a key that it does not know, with a warning; the default would be built instead.

        Raises:
            UserError: a misspelt key.
        """
        known = list(self.defaults())
        for key in architecture:
            if key not in (*known, "_class_name", "_diffusers_version", "_name_or_path"):  # diffusers writes these
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {setting}.{near[0]}?" if near else ""
                raise UserError(f"there is no setting {setting}.{key}{hint}")

    def check_text_width(self, width: int, condition: Mapping[str, Shape], setting: str) -> None:
        """Raises ``UserError`` unless the data's captions have embeddings of ``width``."""
        given = condition["text"][1]
        if given != width:
            raise UserError(
                f"{setting} takes text embeddings of size {width}, but the data's have {given};"
                " use a checkpoint made for this text encoder, or other data.encoders"
            )

    def check_channels(self, config: Mapping[str, Any], latent_shape: LatentShape, setting: str) -> None:
        """Raises ``UserError`` unless the data's latents have as many channels as the network's."""
        if self.latent_channels(config) != latent_shape[0]:
            raise UserError(
                f"{setting} takes latents of {self.latent_channels(config)} channels, but the data's have"
                f" {latent_shape[0]}; use a checkpoint made for this VAE, or other data.encoders"
            )

    def check_patch(self, key: str, size: int, patch: int, setting: str) -> None:
        """Raises ``UserError`` unless ``patch`` divides the ``size`` latent positions that ``key`` gives."""
        if size % patch:
            raise UserError(
                f"{key} gives {size} latent positions, which the patch size {patch} of {setting} does not divide;"
                f" use a {key} that gives {size - size % patch or patch}"
            )

    def fill_special(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Random values of the modulation tables, which diffusers draws in constructors; see ``initialise``."""
        if name == "scale_shift_table":
            tensor.normal_().div_(tensor.shape[-1] ** 0.5)

    def with_layers(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        return {**config, "num_layers": layers}

    def heads(self, config: Mapping[str, Any]) -> int:
        """Query heads, of which there are as many as key/value heads."""
        return config["num_attention_heads"]

    def head_dim(self, config: Mapping[str, Any]) -> int:
        return config["attention_head_dim"]

    def width(self, config: Mapping[str, Any]) -> int:
        return config["num_attention_heads"] * config["attention_head_dim"]

    def layers(self, config: Mapping[str, Any]) -> int:
        return config["num_layers"]

    def forward_flops(self, config: Mapping[str, Any], tokens: int, condition: Mapping[str, Shape]) -> int:
        return 2 * sum(self.products(config, tokens, condition))

    def tangent_flops(self, config: Mapping[str, Any], tokens: int, condition: Mapping[str, Shape]) -> int:
        pairs, others, _ = self.products(config, tokens, condition)
        return 2 * (2 * pairs + others)


def refuse_values(
    config: Mapping[str, Any], ranges: Mapping[str, tuple[int, int]], optional: Collection[str], setting: str
) -> None:
    """Refuse what is not a whole number within ``ranges``.

    Args:
        config: a network's, with every key of ``ranges``.
        ranges: least and greatest by key; a damaged file's billion layers would be built for hours.
        optional: which may be null.
        setting: where the configuration came from.

    Raises:
        UserError: by key.
    """
    for key, (least, most) in ranges.items():
        value = config[key]
        if (value is not None or key not in optional) and (type(value) is not int or not least <= value <= most):
            refuse(config, key, f"a whole number from {least} to {most}", setting)


def refuse(config: Mapping[str, Any], key: str, wanted: str, setting: str) -> None:
    """Refuse the value of ``key``.

    Raises:
        UserError: always, with what it must be.
    """
    shown = " ".join(repr(config[key]).split())[:80]
    raise UserError(f"{setting}: {key}={shown} of its configuration must be {wanted}")
