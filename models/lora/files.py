"""Adapter files in the formats of diffusers and peft, and with the layers of the model's original code (``wan-lora``).

FastVideo's file (``fastvideo-lora``) has diffusers' layers, and gates of sparse attention whole: ``GATE.set_weight``.

If a format has no field for ``alpha / rank`` that all its readers support, the scale is multiplied into B. Strength 1
then reproduces the trained network.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import SchedulerMixin
from torch import Tensor

from models.families.base import Family
from models.files.save import write_export
from models.lora import videox
from models.lora.contract import contract_of, header
from models.owner import is_gate

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
    *,
    family: str,
    name: str = NAME,
    config: Mapping[str, Any] | None = None,
    texts: Mapping[str, Mapping[str, Any] | None],
    schedulers: Mapping[str, SchedulerMixin] | None = None,
    **options: Any,
) -> None:
    """Write an adapter file, with arguments as :func:`models.files.save.write_export`. A collective.
    VideoX-Fun's has a ``name`` and a ``config`` of its own. ``about`` is in the file's header too
    (:mod:`models.lora.contract`), with the name of the ``family``."""
    has_alphas = config is not None or any(key.endswith(".alpha") for key in tensors)
    about_file = header(contract_of(about, tensors), family=family, step=about.get("step"), has_alphas=has_alphas)
    metadata = {key: str(value) for key, value in (config or {}).items()} | about_file
    files, texts = iter([(Path(name), tensors)]), {videox.CONFIG: config, **texts}
    write_export(folder, about, files, texts, header=metadata, schedulers=schedulers or {}, **options)
