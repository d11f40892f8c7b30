"""Files of adapters as others read them: diffusers' and peft's, and the keys of Wan's own code.

The scale ``alpha / rank`` is multiplied into B where a format has no field for it that all of its readers know, so that
strength 1 is what was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fsdp_cp.errors import UserError
from models.families.base import Family
from models.files.published import published

FORMATS = ("diffusers-lora", "wan-lora")
NAME = "pytorch_lora_weights.safetensors"
"""As diffusers' ``load_lora_weights`` looks for it."""


def refuse_whole(names: Iterable[str], what: str) -> None:
    """Refuse what no file of adapters can hold.

    Args:
        names: of a role's own parameters.
        what: whose they are, for the message.

    Raises:
        UserError: modules that were trained whole, or that were added to the network.
    """
    whole = sorted(name for name in names if ".lora_" not in name)
    if whole:
        raise UserError(
            f"{what} has {whole[0]} beside its adapters ({len(whole)} such tensors), which no file of adapters can"
            " hold; use --format merged"
        )


def file_tensors(
    kind: str, names: Iterable[str], read: Callable[[str], Tensor], *, family: Family, scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of a file of adapters.

    Args:
        kind: one of :data:`FORMATS`.
        names: of the role's own parameters, adapters all.
        read: one of them, whole, by name.
        family: of the base, which knows the original code's names.
        scale: ``alpha / rank``.
        dtype: of the file.

    Raises:
        UserError: a layer that the original code has no name for.
    """
    tensors: dict[str, Tensor] = {}
    for name in names:
        layer, _, which = name.rpartition(".lora_")
        value = read(name).cpu()
        if kind == "wan-lora":
            original = family.original_name(layer)
            prefix = f"diffusion_model.{original}"
            # diffusers (0.42) reads alpha in blocks alone; without one, the scale is 1 to every reader.
            has_alpha = original.startswith("blocks.")
            factor = 1.0 if which == "A.weight" or (has_alpha and which == "B.weight") else scale
            theirs = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight", "B.bias": "diff_b"}[which]
            tensors[f"{prefix}.{theirs}"] = (factor * value).to(dtype)
            if has_alpha and which == "A.weight":
                tensors[f"{prefix}.alpha"] = torch.tensor(scale * value.shape[0], dtype=torch.float32)
        else:
            factor = 1.0 if which == "A.weight" else scale
            tensors[f"transformer.{name}"] = (factor * value).to(dtype)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def write_file(
    folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], *, move_aside: bool = False
) -> None:
    """Write ``folder/pytorch_lora_weights.safetensors``; see :func:`models.files.published.published`.

    Raises:
        UserError: a folder that cannot be written.
    """
    try:
        with published(folder, about, move_aside=move_aside) as unfinished:
            save_file(dict(tensors), unfinished / NAME, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, too
        raise UserError(f"{folder} cannot be written ({error}); nothing in it has changed") from error
