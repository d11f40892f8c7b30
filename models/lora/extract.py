"""Adapters from two whole networks: what a fully trained student has beside its base, in so many directions a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from models.additions.base import named_additions
from models.families.base import Family
from models.files.checkpoint_files import TransformerFolder, tensor_reader
from models.lora.plan import target_layers
from models.lora.settings import LoraSettings

_EXACT = 2048
"""Up to this smaller size of a layer all singular values are computed; of larger layers the leading ones alone."""


@dataclass(frozen=True, kw_only=True)
class Extracted:
    """What of the difference the adapters hold."""

    adapters: dict[str, Tensor]
    """A and B by public name; their scale is 1."""
    kept: float
    """Share of the squared difference of the layers with adapters, in [0, 1]."""
    left_out: dict[str, float]
    """Other tensors that differ, such as norms and biases, each with its difference over its norm."""


def extract(
    full: TransformerFolder, base: TransformerFolder, network: nn.Module, family: Family, settings: LoraSettings
) -> Extracted:
    """The best approximation of that rank in the least-squares sense, layer by layer (Eckart & Young 1936).

    Args:
        full: the trained network's folder.
        base: the one that it began as, of the same shapes.
        network: of their configuration, on the meta device.
        family: its family.
        settings: rank and targets.

    Raises:
        UserError: folders of other shapes, or of equal weights; what :func:`models.lora.inject.target_layers` refuses.
    """
    for folder in (full, base):
        if folder.additions:
            raise UserError(
                f"{folder.path} has additions ({', '.join(sorted(named_additions(folder.additions)))}), without which"
                " its network is another, and which no file of adapters can hold"
            )
    if full.shapes != base.shapes:
        other = sorted(name for name in full.shapes.keys() | base.shapes.keys()
                       if full.shapes.get(name) != base.shapes.get(name))  # fmt: skip
        raise UserError(
            f"{full.path} and {base.path} differ in {other[0]} ({len(other)} tensors): not one architecture"
        )
    targets = {f"{name}.weight" for name in target_layers(network, family, settings, "--")}
    of_full, of_base = tensor_reader(full), tensor_reader(base)
    adapters: dict[str, Tensor] = {}
    left_out: dict[str, float] = {}
    whole = lost = 0.0
    for name in sorted(full.shapes):
        trained, start = of_full(name).float(), of_base(name).float()
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
        others = f", though in {len(left_out)} other tensors" if left_out else ""
        raise UserError(
            f"{full.path} and {base.path} do not differ in the {len(targets)} layers that have adapters{others}; give"
            " the trained network as FULL, and the one that it began as as BASE"
        )
    return Extracted(adapters=adapters, kept=1.0 - lost / whole, left_out=left_out)


def _leading(x: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``rank`` largest singular values of ``x`` ``(out, in)``, ``(r,)``, between their vectors ``(out, r)`` and
    ``(in, r)``."""
    if min(x.shape) <= _EXACT:
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        return u[:, :rank], s[:rank], vh[:rank].T
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(x, q=min(2 * rank + 16, *x.shape), niter=6)
    return u[:, :rank], s[:rank], v[:, :rank]
