"""Adapters from files of diffusers, of peft, or with names of a model's original code, which diffusers converts."""

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdp_cp.errors import UserError, one_line
from models.families.base import Family, LastLayer, config_of
from models.files.checkpoint_files import TransformerFolder, fingerprint, refuse_pointer
from models.files.shipped import find_shipped
from models.lora import videox
from models.lora.contract import BASE, read_contract
from models.lora.files import NAME, WHOLE
from models.owner import is_gate

log = logging.getLogger(__name__)

_PEFT_FILE = "adapter_model.safetensors"
_FILES = (NAME, _PEFT_FILE)
"""File names of diffusers and peft. Another name is accepted if it is the folder's only adapter file."""
_PREFIX = re.compile(r"^(base_model\.model|transformer|diffusion_model|pipe\.dit)\.")
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of peft's ``init_lora_weights`` that leave the base as it is; PiSSA and OLoRA take a part out of it."""
_MATRICES = ("A.weight", "B.weight", "B.bias")


def find_adapters(checkpoint: str | None) -> Path | None:
    """Return the adapter file that ``checkpoint`` is or contains; ``None`` without such a file."""
    path = find_shipped(checkpoint) if checkpoint and checkpoint.strip() else None
    if path is None:
        return None
    if path.is_file():
        return path if path.suffix == ".safetensors" and _holds_adapters(path, unreadable=True) else None
    is_network = any((path / name).exists() for name in ("config.json", "transformer/config.json"))
    if is_network or not path.is_dir():
        return None
    for name in _FILES:
        if (path / name).is_file():
            return path / name
    files = [file for file in sorted(path.glob("*.safetensors")) if _holds_adapters(file)]
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise UserError(f"{checkpoint} holds {len(files)} files of adapters ({names}); give the path of one of them")
    return files[0] if files else None


def _holds_adapters(file: Path, *, unreadable: bool = False) -> bool:
    """Return whether ``file`` has names of adapters; return ``unreadable`` if it cannot be read."""
    try:
        with safe_open(file, framework="pt") as opened:
            return any(".lora_" in name or name.startswith("lora_") for name in opened.keys())
    except Exception:  # safetensors raises its own, which is not public everywhere
        refuse_pointer(file, str(file.parent))
        return unreadable


@dataclass(frozen=True, kw_only=True)
class SavedAdapters:
    """Contents of an adapter file, without weights. :meth:`read` reads these."""

    file: Path
    family: Family
    rank: int
    """Largest rank of all layers; smaller adapters are padded with zeros."""
    scales: Mapping[str, float]
    """Scale of the product of each layer's matrices. It also multiplies the bias, as in peft."""
    biases: frozenset[str]
    """Layers whose adapter has a bias (``.diff_b``)."""
    last_layers: Mapping[str, LastLayer]
    """Last layers of the base (:meth:`models.families.base.Family.last_layers`)."""
    added: Mapping[str, tuple[int, ...]]
    """Shapes of the whole tensors that the file has for the role's heads or gates, by public name."""

    @property
    def biased(self) -> bool:
        """Whether an adapter has a bias."""
        return not self.biases.isdisjoint(self.scales)

    def read(self) -> dict[str, dict[str, Tensor]]:
        """Return each layer's fp32 ``A.weight``, ``B.weight`` and perhaps ``B.bias``, the latter two times the
        scale."""
        tensors, weights = _read(self.file, self.family, self.last_layers).adapters, {}
        for layer, scale in self.scales.items():
            a, b = tensors[f"{layer}.lora_A.weight"].float(), scale * tensors[f"{layer}.lora_B.weight"].float()
            missing = self.rank - len(a)
            pad = nn.functional.pad
            weights[layer] = {"A.weight": pad(a, (0, 0, 0, missing)), "B.weight": pad(b, (0, missing))}
            if layer in self.biases:
                weights[layer]["B.bias"] = scale * tensors[f"{layer}.lora_B.bias"].float()
        return weights

    def read_added(self) -> dict[str, Tensor]:
        """Return the tensors of :attr:`added`: gates, or last layers in the place of heads."""
        return _read(self.file, self.family, self.last_layers).added


class _Contents(NamedTuple):
    """Tensors of a file."""

    adapters: dict[str, Tensor]
    """By diffusers' names: ``LAYER.lora_A.weight``, ``.lora_B.weight``, ``.lora_B.bias``, ``LAYER.alpha``."""
    added: dict[str, Tensor]
    """Last layers for heads, or gates, by public name."""


def _read(file: Path, family: Family, last_layers: Mapping[str, LastLayer]) -> _Contents:
    """Return the tensors of ``file``."""
    added: dict[str, Tensor] = {}
    try:
        tensors = _kohya_scaled(file, load_file(file))
        if videox.read_config(file):
            tensors, added = videox.split_heads(tensors, last_layers)
        for name in [name for name in tensors if is_gate(name) and ".lora_" not in name]:
            added[_PREFIX.sub("", name).replace(f".{WHOLE}", ".")] = tensors.pop(name)
    except Exception as error:  # safetensors raises its own, which is not public everywhere
        refuse_pointer(file, str(file.parent))
        raise UserError(f"{file.name} is not a readable file of adapters ({one_line(error)})") from error
    _refuse_two_adapters(file, tensors)
    if not family.keeps_peft_infix:
        tensors = {name.replace(".default.", "."): tensor for name, tensor in tensors.items()}
    try:
        converted = family.diffusers_adapters(tensors)
    except Exception as error:  # KeyError, ValueError or others, depending on the missing or unused names
        names = f"the names of {file.name}, as {next(iter(tensors))} ({one_line(repr(error))})"
        raise UserError(f"diffusers cannot read {names}; convert them") from error
    _refuse_left_out(file, tensors, converted)
    adapters = {
        _PREFIX.sub("", name).replace(".lora_down.", ".lora_A.").replace(".lora_up.", ".lora_B."): tensor
        for name, tensor in converted.items()
    }
    return _Contents(adapters, added)


def _refuse_two_adapters(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse two tensors of one layer's matrix, under different prefixes: one would be lost."""
    names: dict[str, str] = {}
    for name in tensors:
        bare = _PREFIX.sub("", name).replace(".default.", ".")
        if (other := names.setdefault(bare, name)) != name:
            raise UserError(f"{file.name} holds {other} and {name}, of two adapters; give one alone")


def _refuse_left_out(file: Path, tensors: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> None:
    """Refuse a tensor that diffusers drops, such as the difference of a norm, which the adapters would lack."""
    read = {id(tensor) for tensor in converted.values()}  # scaled pairs are new tensors; none is dropped
    pairs = (".lora_A.weight", ".lora_down.weight", ".lora_B.weight", ".lora_up.weight", ".alpha")
    for name, tensor in sorted(tensors.items()):
        pair = name.replace(".default.", ".").endswith(pairs)
        if not pair and id(tensor) not in read and tensor.any():
            raise UserError(f"{file.name} holds {name}, which diffusers leaves out and is not zero; merge it first")


def _kohya_scaled(file: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` with the scale of kohya's adapters (``lora_unet_``), alpha / rank, multiplied into B.

    Alpha is the layer's tensor, or else ``ss_network_alpha`` of the metadata (only for kohya's names: a conversion can
    keep it though it merged the scale), or else the rank.
    """
    with safe_open(file, framework="pt") as opened:
        written = (opened.metadata() or {}).get("ss_network_alpha", "None")
    default = 0.0 if written == "None" else float(written)
    scaled = {name: x for name, x in tensors.items() if not (name.startswith("lora_unet_") and name.endswith(".alpha"))}
    for name, tensor in scaled.items():
        layer, up, _ = name.partition(".lora_up.weight")
        if name.startswith("lora_unet_") and up:
            rank = tensor.shape[-1]
            alpha = float(tensors[f"{layer}.alpha"]) if f"{layer}.alpha" in tensors else default or rank
            scaled[name] = tensor.float() * (alpha / rank)
    return scaled


def inspect_adapters(file: Path, network: nn.Module, family: Family, setting: str) -> SavedAdapters:
    """Compare the adapters of ``file`` (:func:`find_adapters`) with their base, a plain ``network`` on any device."""
    where = f"{setting}={file.parent}"
    linear, last_layers = linear_layers(network), family.last_layers(config_of(network))
    try:
        tensors, added = _read(file, family, last_layers)
        scale_of = _scales(file, tensors, family.adapter_alpha)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{where}: the scale of its adapters cannot be read ({one_line(error)})") from error
    layers = _matrices_by_layer(tensors, linear, where)
    if not layers:
        raise UserError(f"{where}: {file.name} holds no adapters")
    scales, ranks = {}, []
    for layer, shapes in layers.items():
        has_alpha = shapes.pop("alpha", None) is not None
        rank = _checked_rank(layer, shapes, linear[layer], where)
        ranks.append(rank)
        scales[layer] = float(tensors[f"{layer}.alpha"]) / rank if has_alpha else scale_of(layer, rank)
    biases = frozenset(layer for layer, shapes in layers.items() if "B.bias" in shapes)
    unbiased = next((layer for layer in layers if linear[layer].bias is None), None)
    if biases and unbiased is not None:  # a merged network would lose the bias
        raise UserError(f"{where} has adapters with biases, but {unbiased} has no bias; it is for another base")
    return SavedAdapters(
        file=file, family=family, rank=max(ranks), scales=scales, biases=biases, last_layers=last_layers,
        added={name: tuple(tensor.shape) for name, tensor in added.items()},
    )  # fmt: skip


def refuse_other_base(file: Path, base: Sequence[TransformerFolder], where: str, *, warn: bool = False) -> None:
    """Refuse adapters that were exported for other weights than those in ``base``, or ``warn``. Files of other programs
    do not say for which; their layers must fit."""
    recorded = str(read_contract(file).get(BASE) or "").split()
    if base and not {*recorded} <= {*map(fingerprint, base)}:
        made = f"{where}={file.parent} was trained on other weights than those in {base[0].path}"
        if warn:
            return log.warning("%s, on %s", made, read_contract(file).get("base", "another base"))
        raise UserError(f"{made}; give an adapter of this base")


def linear_layers(network: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of ``network`` by name."""
    return {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}


Shapes = dict[str, tuple[int, ...]]
"""Shapes of a layer's :data:`_MATRICES` and of its ``alpha``."""


def _matrices_by_layer(tensors: Mapping[str, Tensor], linear: Mapping[str, nn.Linear], where: str) -> dict[str, Shapes]:
    """Group the shapes of tensors by the layer that they adapt; refuse other tensors."""
    layers: dict[str, Shapes] = {}
    for name, tensor in tensors.items():
        layer, _, matrix = name.rpartition("." if name.endswith(".alpha") else ".lora_")
        if matrix not in (*_MATRICES, "alpha") or layer not in linear:
            raise UserError(f"{where} holds {name}, which is not an adapter of a linear layer of the base")
        layers.setdefault(layer, {})[matrix] = tuple(tensor.shape)
    return layers


def _checked_rank(layer: str, shapes: Shapes, module: nn.Linear, where: str) -> int:
    """Return the rank of a layer's adapter; refuse matrices that do not fit the layer."""
    if not {"A.weight", "B.weight"} <= shapes.keys():
        raise UserError(f"{where} has {', '.join(shapes)} of {layer}, but not A and B; copy it again")
    rank = (*shapes["A.weight"], 0)[0]
    size = (module.out_features, rank)
    wanted = {"A.weight": (rank, module.in_features), "B.weight": size, "B.bias": size[:1]}
    if rank < 1 or shapes != {matrix: wanted[matrix] for matrix in shapes}:
        raise UserError(f"{where}: the adapter of {layer} has {shapes}, but the layer needs {wanted}; use its base")
    return rank


def _unscaled(_layer: str, _rank: int) -> float:
    return 1.0


def _scale_settings(file: Path, alpha_key: str | None) -> tuple[dict[str, Any], str]:
    """Return the settings that scale the adapters of ``file``, and where they stand: VideoX-Fun's file next to it,
    diffusers' metadata in it, peft's ``adapter_config.json`` next to it, or the metadata's ``alpha_key``; without any
    an empty dict and no place."""
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
        is_of_peft = any(name.startswith("base_model.model.") for name in opened.keys())
    if parallel := videox.read_config(file):
        return {"lora_alpha": parallel.get("lora_alpha")}, videox.CONFIG
    if "lora_adapter_metadata" in metadata:
        entries = json.loads(metadata["lora_adapter_metadata"])
        # A pipeline's file has prefixed keys of several components; a network's own file has no prefix.
        return {key.removeprefix("transformer."): value for key, value in entries.items()}, "its metadata"
    neighbor = file.parent / "adapter_config.json"
    if neighbor.is_file() and (is_of_peft or videox.is_described(file, _PEFT_FILE)):
        return json.loads(neighbor.read_text(encoding="utf-8")), neighbor.name
    if alpha_key is not None and alpha_key in metadata:
        return {"lora_alpha": metadata[alpha_key]}, "its metadata"
    return {}, ""


def _scales(file: Path, tensors: Mapping[str, Tensor], alpha_key: str | None) -> Callable[[str, int], float]:
    """Return a function from a layer's name and the adapter's rank to the adapter's scale.

    The scale is 1 without settings (:func:`_scale_settings`), and if ``tensors`` lack the file's alphas, which a
    conversion then multiplied into the matrices. rsLoRA (Kalajdzievski 2023) divides by the square root of the rank.
    """
    config, name = _scale_settings(file, alpha_key)
    if not name:
        return _unscaled
    with safe_open(file, framework="pt") as opened:
        converted = any(key.endswith(".alpha") and key not in tensors for key in opened.keys())
    if (made := config.get("init_lora_weights")) not in (None, *_PLAIN_STARTS):
        raise UserError(
            f"{name} has init_lora_weights={made}, which changes the base too; convert it to plain adapters"
        )
    if not config.get("lora_alpha"):
        raise UserError(f"{name} has no lora_alpha, so the scale of the adapters is not known")
    default = float(config["lora_alpha"])
    patterns = {key: float(alpha) for key, alpha in (config.get("alpha_pattern") or {}).items()}

    def scale(layer: str, rank: int) -> float:
        alpha = patterns.get(get_pattern_key(list(patterns), layer), default)
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return _unscaled if converted else scale
