"""Adapters from files: diffusers', peft's, and those with names of a model's own code, which diffusers converts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from models.checkpoint_files import one_line, refuse_pointer
from models.families.base import Family
from models.lora.files import NAME
from models.shipped import find_shipped

_FILES = (NAME, "adapter_model.safetensors")
"""diffusers' name, and peft's; other names are taken where a folder holds one file of adapters."""
_PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.")
_DOWN, _UP = (".lora_A", ".lora_down"), (".lora_B", ".lora_up")
_ENDS = (
    *(("a", f"{end}.weight") for end in _DOWN),
    *(("b", f"{end}.weight") for end in _UP),
    *(("bias", f"{end}.bias") for end in _UP),
    ("alpha", ".alpha"),
)


def find_adapters(checkpoint: str | None) -> Path | None:
    """Return the file of adapters that ``checkpoint`` is, or that the folder holds; ``None`` where there is none.

    Raises:
        UserError: a folder with several; a pointer of git-lfs in the place of one.
    """
    path = find_shipped(checkpoint) if checkpoint and checkpoint.strip() else None
    if path is None:
        return None
    if path.is_file():
        return path if path.suffix == ".safetensors" and _holds_adapters(path, unreadable=True) else None
    if not path.is_dir() or any((path / name).exists() for name in ("config.json", "transformer/config.json")):
        return None
    named = [path / name for name in _FILES if (path / name).is_file()]
    files = named[:1] or [file for file in sorted(path.glob("*.safetensors")) if _holds_adapters(file)]
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise UserError(f"{checkpoint} holds {len(files)} files of adapters ({names}); give the path of one of them")
    return files[0] if files else None


def _holds_adapters(file: Path, *, unreadable: bool = False) -> bool:
    """Whether ``file`` has names of adapters; ``unreadable`` where it cannot be read."""
    try:
        with safe_open(file, framework="pt") as opened:
            return any(".lora_" in name or name.startswith("lora_") for name in opened.keys())
    except Exception:  # safetensors raises its own, which is not public everywhere
        refuse_pointer(file, str(file.parent))
        return unreadable


class Adapter(NamedTuple):
    """Weights of one layer's adapter, fp32, the scale in B and in the bias."""

    a: Tensor
    b: Tensor
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True)
class SavedAdapters:
    """Layers that the file has adapters for. It is read again for the weights."""

    file: Path
    family: Family
    rank: int
    """The largest of all layers; smaller adapters are filled up with zeros."""
    tensors: Mapping[str, tuple[str, str, str | None, float]]
    """By layer: the names of A, of B and of B's bias (:func:`_read`), and their scale."""

    @property
    def biased(self) -> bool:
        """Whether an adapter has a bias (``.diff_b``)."""
        return any(bias is not None for _, _, bias, _ in self.tensors.values())

    def read(self) -> dict[str, Adapter]:
        """Read the adapter of each layer."""
        tensors = _read(self.file, self.family)
        found = {}
        for layer, (a, b, bias, scale) in self.tensors.items():
            down, up = tensors[a].float(), scale * tensors[b].float()
            missing = self.rank - len(down)
            found[layer] = Adapter(
                nn.functional.pad(down, (0, 0, 0, missing)),
                nn.functional.pad(up, (0, missing)),
                None if bias is None else scale * tensors[bias].float(),
            )
        return found


def _read(file: Path, family: Family) -> dict[str, Tensor]:
    """Return the tensors of ``file``; those with the names of a model's own code by diffusers' names.

    Raises:
        UserError: a file that cannot be read; names that diffusers cannot convert; tensors other than zero that it
            would leave out.
    """
    try:
        tensors = load_file(file)
    except Exception as error:  # safetensors raises its own, which is not public everywhere
        refuse_pointer(file, str(file.parent))
        raise UserError(f"{file.name} is not a readable file of adapters ({one_line(error)})") from error
    tensors = {name.replace(".default.", "."): tensor for name, tensor in tensors.items()}
    try:
        converted = family.diffusers_adapters(tensors)
    except Exception as error:  # KeyError, ValueError and others, by what is missing or left over
        reason = one_line(f"{type(error).__name__}: {error}")
        raise UserError(
            f"diffusers cannot read the format of {file.name}, with names as {next(iter(tensors))} ({reason}); convert"
            " it to diffusers' own names"
        ) from error
    read = {id(tensor) for tensor in converted.values()}  # scaled pairs are others; none of a pair is left out
    for name, tensor in sorted(tensors.items()):
        pair = name.endswith((*(end for kind, end in _ENDS if kind != "bias"),))
        if not pair and id(tensor) not in read and tensor.any():
            raise UserError(
                f"{file.name} holds {name}, which diffusers leaves out and which is not zero; merge it first"
            )
    return converted


def inspect_adapters(file: Path, network: nn.Module, family: Family, setting: str) -> SavedAdapters:
    """Compare the file's adapters with the base that they are for.

    Args:
        file: from :func:`find_adapters`.
        network: the base, plain, on any device.
        family: its family.
        setting: where the file came from, for messages (``student.checkpoint``).

    Raises:
        UserError: a file that cannot be read, that holds anything but adapters, or whose layers the base has not, or
            has in other sizes.
    """
    where = f"{setting}={file.parent}"
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    try:
        read = _read(file, family)
        with safe_open(file, framework="pt") as opened:
            scales = _Scales.of(file, opened.metadata() or {})
            if any(name.endswith(".alpha") and name not in read for name in opened.keys()):
                scales = _Scales(patterns={})  # they are in the matrices by now
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{where}: what is said of the scale cannot be read ({one_line(error)})") from error
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in read.items():
        short = next((name.removeprefix(p) for p in _PREFIXES if name.startswith(p)), name)
        kind, end = next(((kind, end) for kind, end in _ENDS if short.endswith(end)), ("", ""))
        if not kind:
            raise UserError(f"{where} holds {name}, which is no adapter of a linear layer; it cannot be used")
        layer = short.removesuffix(end)
        if layer not in linear:
            raise UserError(f"{where} has an adapter for {layer}, and the base has no such linear layer")
        found.setdefault(layer, {})[kind] = (name, tuple(tensor.shape))
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
        bias, bias_shape = parts.get("bias", (None, (sizes[1],)))
        if bias_shape != (sizes[1],):
            raise UserError(f"{where}: {bias} has the shape {bias_shape}, but {layer} gives {sizes[1]} features")
        scale = float(read[parts["alpha"][0]]) / down[0] if "alpha" in parts else scales.scale(layer, down[0])
        tensors[layer] = (a, b, bias, scale)
    if not tensors:
        raise UserError(f"{where}: {file.name} holds no adapters")
    return SavedAdapters(file=file, family=family, rank=max(ranks), tensors=tensors)


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
