"""Adapter files in the formats of diffusers and peft, and with the layers of the model's original code (``wan-lora``).

FastVideo's file (``fastvideo-lora``) has diffusers' layers, and gates of sparse attention whole: ``GATE.set_weight``.

If a format has no field for ``alpha / rank`` that all its readers support, the scale is multiplied into B. Strength 1
then reproduces the trained network.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import SchedulerMixin
from torch import Tensor

from fsdp_cp.files.atomic_folder import atomic_folder
from fsdp_cp.reduce import on_first_rank
from models.causal import write_causal
from models.families.base import Family
from models.files.save import refuse_unwritten, save_tensors
from models.lora import videox
from models.lora.contract import contract_of, header
from models.owner import is_gate
from models.sparse import write_sparse

FASTVIDEO = "fastvideo-lora"
FORMATS = ("diffusers-lora", "wan-lora", videox.KIND, FASTVIDEO)
NAME = "pytorch_lora_weights.safetensors"
"""File name that diffusers' ``load_lora_weights`` expects."""
NAMES = {videox.KIND: videox.FILE, FASTVIDEO: "adapter_model.safetensors"}
"""File names of the formats that have another."""
WHOLE = "set_"
"""Start of the last part of a whole tensor's name in FastVideo's file, which ComfyUI reads too."""


def file_tensors(
    kind: str, names: Iterable[str], read: Callable[[str], Tensor], *, family: Family, scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of an adapter file of a ``kind`` of :data:`FORMATS`, by name.

    ``read`` returns a whole adapter or gate by one of ``names``. The ``family`` knows the original code's names,
    ``scale`` is ``alpha / rank``, and ``dtype`` is that of the file.
    """
    tensors: dict[str, Tensor] = {}
    adapters: dict[str, dict[str, Tensor]] = {}
    for name in names:
        if is_gate(name):
            gate, _, kind_of_tensor = name.rpartition(".")
            tensors[f"{gate}.{WHOLE}{kind_of_tensor}"] = read(name).cpu().to(dtype)
            continue
        layer, _, matrix = name.rpartition(".lora_")
        adapters.setdefault(layer, {})[matrix] = read(name).cpu()
    if kind == "wan-lora":
        adapters = family.original_adapters(adapters)
    for layer, matrices in adapters.items():
        # diffusers (0.42) reads alpha only in blocks. Without alpha every reader uses scale 1.
        has_alpha = kind == "wan-lora" and layer.startswith("blocks.")
        for matrix, value in matrices.items():
            factor = 1.0 if matrix == "A.weight" or (has_alpha and matrix == "B.weight") else scale
            name = f"{'' if kind == FASTVIDEO else 'transformer.'}{layer}.lora_{matrix}"
            if kind == "wan-lora":
                name = f"diffusion_model.{layer}.{family.original_matrices[matrix]}"
            tensors[name] = (factor * value).to(dtype)
        if has_alpha:
            rank = len(matrices["A.weight"])
            tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(scale * rank, dtype=torch.float32)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def write_file(
    folder: Path,
    tensors: Mapping[str, Tensor],
    about: Mapping[str, Any],
    causal: Mapping[str, Any] | None = None,
    sparse: Mapping[str, Any] | None = None,
    schedulers: Mapping[str, SchedulerMixin] | None = None,
    *,
    family: str,
    name: str = NAME,
    config: Mapping[str, Any] | None = None,
    finish: Callable[[Path], object] = lambda folder: None,
    move_aside: bool = False,
) -> None:
    """Write an adapter file, with arguments as :func:`models.export_folder.write_folder`. A collective.
    VideoX-Fun's has a ``name`` and a ``config`` of its own. ``about`` is in the file's header too
    (:mod:`models.lora.contract`), with the name of the ``family``."""

    def write() -> None:
        with refuse_unwritten(folder), atomic_folder(folder, about, move_aside=move_aside) as unfinished:
            has_alphas = config is not None or any(key.endswith(".alpha") for key in tensors)
            contract = contract_of(about, tensors)
            metadata = {key: str(value) for key, value in (config or {}).items()}
            metadata |= header(contract, family=family, step=about.get("step"), has_alphas=has_alphas)
            save_tensors(tensors, unfinished / name, metadata)
            if config is not None:
                (unfinished / videox.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            if causal is not None:
                write_causal(unfinished, causal)
            if sparse is not None:
                write_sparse(unfinished, sparse)
            for folder_name, scheduler in (schedulers or {}).items():
                scheduler.save_pretrained(unfinished / folder_name)
            finish(unfinished)

    on_first_rank(write)
