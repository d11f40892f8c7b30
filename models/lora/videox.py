"""VideoX-Fun's file of a student of parallel decoding: adapters, and one whole last layer for each interval.

``pdd.safetensors`` has ``LAYER.lora_down``, ``LAYER.lora_up``, and the last layers' ``weight`` ``(N, out, in)`` and
``bias``: the base's plus the heads' differences. Grid, rank and alpha are in ``pdd_config.json`` and in the header.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from fsdp_cp.errors import UserError, one_line
from models.additions.heads import NAME as HEADS
from models.additions.heads import Grid
from models.families.base import LastLayer
from models.owner import PREFIX

KIND = "videox-pdd"
FILE, CONFIG = "pdd.safetensors", "pdd_config.json"
_IN_BLOCK = re.compile(r"^.*?\.\d+\.")
"""Start of a layer's name up to the number of its block. The file names layers by their ends."""
_SIDES = {"lora_down": "A.weight", "lora_up": "B.weight"}


def is_described(file: Path, named: str) -> bool:
    """Return whether a configuration next to ``file`` is of it: of the file that its format has ``named``, if that is
    there, and else of one that was renamed."""
    return file.name == named or not (file.parent / named).exists()


def read_config(file: Path) -> dict[str, Any]:
    """Return the configuration next to ``file`` or in its header; empty for a file of another format."""
    neighbor = file.parent / CONFIG
    try:
        if neighbor.is_file() and is_described(file, FILE):
            config = json.loads(neighbor.read_text(encoding="utf-8"))
        else:
            with safe_open(file, framework="pt") as opened:
                config = opened.metadata() or {}
        return dict(config) if "pdd_num_steps" in config else {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{neighbor} cannot be read as JSON ({one_line(error)}); copy it again") from error


def split_heads(
    tensors: Mapping[str, Tensor], layers: Mapping[str, LastLayer]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the adapters by diffusers' names, and the whole last layers by the names of the heads' parameters."""
    own = {theirs: ours for ours, theirs in base_names(layers).items()}
    heads, adapters = {}, {}
    for name, tensor in tensors.items():
        if name in own:
            heads[own[name]] = tensor
        else:
            layer, _, side = name.rpartition(".")
            adapters[f"{layer}.lora_{_SIDES[side]}" if side in _SIDES else name] = tensor
    return adapters, heads


def base_names(layers: Mapping[str, LastLayer]) -> dict[str, str]:
    """Return the name of the base's tensor under each parameter of the heads."""
    return {
        f"{PREFIX}{HEADS}.{part}.{kind}": f"{layer.name}.{kind}"
        for part, layer in layers.items()
        for kind in ("weight", "bias")
    }


def comfy_heads(
    tensors: Mapping[str, Tensor], layers: Mapping[str, LastLayer], original_name: Callable[[str], str]
) -> dict[str, Tensor]:
    """Return the last layers of :func:`file_parts` as ComfyUI's loader of adapters sets them: ``(N out, in)``."""
    return {
        f"diffusion_model.{original_name(layer.name)}.set_{kind}": tensors[f"{layer.name}.{kind}"].flatten(0, 1)
        for layer in layers.values()
        for kind in ("weight", "bias")
    }


def file_parts(
    names: Iterable[str],
    read: Callable[[str], Tensor],
    base: Callable[[str], Tensor],
    layers: Mapping[str, LastLayer],
    grid: Grid,
    scale: float,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the configuration of a file, fp32. ``read`` returns one of the student's ``names``,
    ``base`` a tensor of the base, on every rank; ``scale`` is ``alpha / rank``."""
    sides, own, tensors, rank = {theirs: side for side, theirs in _SIDES.items()}, base_names(layers), {}, 0
    targets = set()
    for name in names:
        full = read(name).cpu().float()
        if name in own:
            tensors[own[name]] = base(own[name]).cpu().float() + full
            continue
        layer, _, matrix = name.rpartition(".lora_")
        tensors[f"{layer}.{sides[matrix]}"] = full
        targets.add(_IN_BLOCK.sub("", layer).removeprefix("attn."))
        if matrix == "A.weight":
            rank = len(full)
    config = {
        "pdd_num_steps": grid.intervals, "pdd_block_size": grid.intervals // grid.steps[-1], "lora_rank": rank,
        "lora_alpha": scale * rank, "lora_targets": ",".join(sorted(targets)),
    }  # fmt: skip
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, config
