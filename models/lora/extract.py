"""Extraction of adapters from a trained student and its base: low-rank approximations of the layers' differences."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from models.additions.base import named_additions
from models.families.base import Family
from models.files.checkpoint_files import TransformerFolder, tensor_reader
from models.lora.plan import target_layers
from models.lora.settings import LoraSettings
from models.owner import is_gate

_EXACT = 2048
"""Smaller dimension up to which a layer's full SVD is computed; larger layers use a truncated one."""


@dataclass(frozen=True, kw_only=True)
class Extracted:
    """Extracted adapters and the part of the difference that they hold."""

    adapters: dict[str, Tensor]
    """Matrices A and B by public name; their scale is 1."""
    gates: dict[str, Tensor]
    """Whole gates of sparse attention that the base lacks, by public name."""
    kept: float
    """Share of the squared difference of the layers with adapters, in [0, 1]."""
    left_out: dict[str, float]
    """Relative difference of each other tensor that differs, such as norms and biases."""


def extract(
    full: TransformerFolder, base: TransformerFolder, network: nn.Module, family: Family, settings: LoraSettings
) -> Extracted:
    """Return each layer's best approximation of the rank (Eckart & Young 1936); ``network`` is on the meta device."""
    for folder in (full, base):
        if folder.additions:
            names = ", ".join(sorted(named_additions(folder.additions)))
            raise UserError(f"{folder.path} has additions ({names}), which no adapter file holds; give a plain folder")
    gates = {name for name in full.shapes if is_gate(name)} - base.shapes.keys()
    if other := sorted({name for name, _ in full.shapes.items() ^ base.shapes.items()} - gates):
        raise UserError(f"{full.path} and {base.path} differ in the shape of {other[0]}; give one architecture")
    targets = {f"{name}.weight" for name in target_layers(network, family, settings, "--")}
    read_full, read_base = tensor_reader(full), tensor_reader(base)
    adapters: dict[str, Tensor] = {}
    left_out: dict[str, float] = {}
    whole = lost = 0.0
    for name in sorted(full.shapes.keys() - gates):
        trained, start = read_full(name).float(), read_base(name).float()
        difference = trained - start
        if not difference.isfinite().all():
            raise UserError(f"{name} holds numbers that are not finite; copy the folders again")
        if name not in targets:
            if difference.any():
                left_out[name] = (difference.norm() / start.norm().clamp_min(1e-30)).item()
            continue
        u, s, v = _leading(difference, settings.rank)
        layer = name.removesuffix(".weight")
        a, b = s.sqrt()[:, None] * v.T, u * s.sqrt()
        adapters[f"{layer}.lora_A.weight"], adapters[f"{layer}.lora_B.weight"] = a.contiguous(), b.contiguous()
        whole += difference.double().square().sum().item()
        lost += (difference - b @ a).double().square().sum().item()
    if not whole:
        equal = f"{full.path} and {base.path} do not differ in the {len(targets)} layers with adapters"
        raise UserError(f"{equal}; give the trained network as FULL and the network it started from as BASE")
    of_gates = {name: read_full(name) for name in sorted(gates)}
    return Extracted(adapters=adapters, gates=of_gates, kept=1.0 - lost / whole, left_out=left_out)


def _leading(x: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return left vectors ``(out, r)``, the ``r = rank`` largest singular values and right vectors ``(in, r)``."""
    if min(x.shape) <= _EXACT:
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        return u[:, :rank], s[:rank], vh[:rank].T
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(x, q=min(2 * rank + 16, *x.shape), niter=6)
    return u[:, :rank], s[:rank], v[:, :rank]
