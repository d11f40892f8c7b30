"""Adapters from files: diffusers', peft's, and those with the keys of the model's own code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from models.checkpoint_files import one_line
from models.families.base import Family
from models.lora.files import NAME
from models.shipped import find_shipped

_FILES = (NAME, "adapter_model.safetensors")
"""diffusers' name, and peft's."""
_PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.")
_DOWN, _UP = (".lora_A", ".lora_down"), (".lora_B", ".lora_up")


def find_adapters(checkpoint: str | None) -> Path | None:
    """The file of adapters in the folder ``checkpoint``; ``None`` where it is no such folder."""
    folder = find_shipped(checkpoint) if checkpoint and checkpoint.strip() else None
    if folder is None or (folder / "config.json").is_file():
        return None
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


@dataclass(frozen=True, kw_only=True)
class SavedAdapters:
    """Which layers a file has adapters for; no weights are read."""

    file: Path
    rank: int
    tensors: Mapping[str, tuple[str, str, float]]
    """By layer: the names of A and of B in the file, and the scale of their product."""

    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of each layer, fp32, the scale in B."""
        with safe_open(self.file, framework="pt") as opened:
            return {
                layer: (opened.get_tensor(a).float(), scale * opened.get_tensor(b).float())
                for layer, (a, b, scale) in self.tensors.items()
            }


def inspect_adapters(file: Path, network: nn.Module, family: Family, setting: str) -> SavedAdapters:
    """Compare the file's adapters with the base that they are for; reads headers and scales alone.

    Args:
        file: from :func:`find_adapters`.
        network: the base, plain, on any device.
        family: its family.
        setting: where the file came from, for messages (``student.checkpoint``).

    Raises:
        UserError: a file that cannot be read, that holds anything but adapters, or whose layers the base has not, or
            has in other sizes; several ranks.
    """
    where = f"{setting}={file.parent}"
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    known = {name: name for name in linear}
    for name in linear:
        try:
            known[family.original_name(name)] = name
        except UserError:  # it has none
            pass
    try:
        with safe_open(file, framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
            alphas = {name: float(opened.get_tensor(name)) for name in shapes if name.endswith(".alpha")}
            scales = _Scales.of(file, opened.metadata() or {})
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:  # safetensors raises its own, which is not public everywhere
        raise UserError(f"{where}: {file.name} is not a readable file of adapters ({one_line(error)})") from error
    found: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        short = next((name.removeprefix(p) for p in _PREFIXES if name.startswith(p)), name).removesuffix(".weight")
        layer, kind = short, ""
        for part, ends in (("a", _DOWN), ("b", _UP), ("alpha", (".alpha",))):
            for end in ends:
                if short.removesuffix(".default").endswith(end):
                    layer, kind = short.removesuffix(".default").removesuffix(end), part
        if not kind:
            raise UserError(f"{where} holds {name}, which is no adapter of a linear layer; it cannot be used")
        if layer not in known:
            raise UserError(f"{where} has an adapter for {layer}, and the base has no such linear layer")
        found.setdefault(known[layer], {})[kind] = (name, shape)
    tensors, ranks = {}, set()
    for layer, parts in found.items():
        if not {"a", "b"} <= parts.keys():
            raise UserError(f"{where} has one matrix of two for {layer}; copy it again")
        (a, down), (b, up) = parts["a"], parts["b"]
        sizes = (linear[layer].in_features, linear[layer].out_features)
        if len(down) != 2 or len(up) != 2 or (down[1], up[0]) != sizes or down[0] != up[1]:
            raise UserError(
                f"{where}: the adapter of {layer} has the shapes {down} and {up}, but the layer takes {sizes[0]} and"
                f" gives {sizes[1]} features; it is for another base"
            )
        ranks.add(down[0])
        scale = alphas[parts["alpha"][0]] / down[0] if "alpha" in parts else scales.scale(layer, down[0])
        tensors[layer] = (a, b, scale)
    if len(ranks) != 1:
        raise UserError(f"{where} has adapters of the ranks {sorted(ranks)}; one rank is supported")
    return SavedAdapters(file=file, rank=ranks.pop(), tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class _Scales:
    """What a file says of the scale of its adapters, where it is not beside them (``.alpha``)."""

    alpha: float | None = None
    """``None`` where nobody says anything: a scale of 1."""
    patterns: Mapping[str, float]
    """Other alphas, by patterns of layer names in peft's sense."""
    root: bool = False
    """Over the rank's root, not the rank (rsLoRA, Kalajdzievski 2023)."""

    @classmethod
    def of(cls, file: Path, metadata: Mapping[str, str]) -> _Scales:
        """From peft's ``adapter_config.json`` beside ``file``, or diffusers' metadata in it.

        Raises:
            UserError: one that says nothing of the scale.
        """
        beside = file.parent / "adapter_config.json"
        if beside.is_file():
            config, name = json.loads(beside.read_text(encoding="utf-8")), beside.name
        elif "lora_adapter_metadata" in metadata:
            given, name = json.loads(metadata["lora_adapter_metadata"]), "its metadata"
            # A pipeline's file has those of several components; a network's own has no prefix.
            config = {key.removeprefix("transformer."): value for key, value in given.items()}
        else:
            return cls(patterns={})
        if not config.get("lora_alpha"):
            raise UserError(f"{name} does not say lora_alpha, without which the scale is not known")
        patterns = {key: float(alpha) for key, alpha in (config.get("alpha_pattern") or {}).items()}
        return cls(alpha=float(config["lora_alpha"]), patterns=patterns, root=bool(config.get("use_rslora")))

    def scale(self, layer: str, rank: int) -> float:
        """Of the product of B and A in ``layer``."""
        if self.alpha is None:
            return 1.0
        alpha = self.patterns.get(get_pattern_key(list(self.patterns), layer), self.alpha)
        return alpha / (math.sqrt(rank) if self.root else rank)
