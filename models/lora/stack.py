"""Stacking of two adapters of one base into one, whose rank is the sum of theirs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from models.families.base import Family
from models.files.checkpoint_files import TransformerFolder
from models.lora.saved import SavedAdapters, find_adapters, inspect_adapters, refuse_other_base
from models.owner import is_gate


def inspect_for_base(
    given: str, base: TransformerFolder, network: nn.Module, family: Family, setting: str
) -> SavedAdapters:
    """Return the adapters in the file or folder ``given``; refuse those of another base."""
    if (file := find_adapters(given)) is None:
        raise UserError(f"{setting} {given} holds no adapters; give a file or a folder of them")
    found = inspect_adapters(file, network, family, setting)
    if not all(map(is_gate, found.added)):
        raise UserError(f"{setting} {given} has last layers of method=pdd, which cannot be added; give adapters alone")
    refuse_other_base(file, [base], setting)
    return found


def stack(adapters: Sequence[SavedAdapters], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return matrices, fp32 by public name, whose products are the sum of the adapters' times their ``weights``."""
    stacked: dict[str, dict[str, Tensor]] = {}
    for one, weight in zip(adapters, weights, strict=True):
        for layer, own in one.read().items():
            own |= {matrix: weight * value for matrix, value in own.items() if matrix != "A.weight"}
            before = stacked.get(layer)
            stacked[layer] = own if before is None else _joined(before, own)
    return {f"{layer}.lora_{matrix}": value for layer, own in stacked.items() for matrix, value in own.items()}


def _joined(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    joined = {
        matrix: torch.cat([one[matrix], other[matrix]], dim) for matrix, dim in (("A.weight", 0), ("B.weight", 1))
    }
    biases = [own["B.bias"] for own in (one, other) if "B.bias" in own]
    return joined | ({"B.bias": torch.stack(biases).sum(0)} if biases else {})
