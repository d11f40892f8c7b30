"""Gates of sparse roles: their plan, checked against network and checkpoint, and their modules."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fsdp_cp.errors import UserError, shown
from fsdp_cp.launch import rank
from fsdp_cp.tiles import sparse_tiles
from models.families.base import Family, GateLayer, NetworkConfig, Shapes
from models.families.operations import Flops, count_flops
from models.files.checkpoint_files import TransformerFolder
from models.files.fastvideo import read_sparse_contract
from models.owner import GATE, is_gate
from models.sample import PartShapes
from models.sparse import SparseSettings, read_sparse

log = logging.getLogger(__name__)
SET_SPARSITY = "set {role}.sparse_attention.sparsity (and .tile) to what it was trained with, as to 0.8 or 0.9"
"""Advice for weights with gates."""


class Gate(nn.Linear):
    """Gate of one block, zero at the start."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


@dataclass(frozen=True)
class SparsePlan:
    """Sparse attention of a role, checked against its network."""

    settings: SparseSettings
    gates: tuple[GateLayer, ...]
    """Gates of the blocks that are not dense."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the gates' parameters, by public name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for gate in self.gates:
            shapes[f"{gate.parent}.{GATE}.weight"] = (gate.outputs, gate.inputs)
            if gate.bias:
                shapes[f"{gate.parent}.{GATE}.bias"] = (gate.outputs,)
        return shapes

    def for_network(self, family: Family, config: NetworkConfig) -> SparsePlan:
        """Return the plan for another network of the family."""
        gates = enumerate(family.gates(config))
        return replace(self, gates=tuple(gate for layer, gate in gates if layer not in self.settings.dense_layers))

    def name_dense(self, role: str, grid: Sequence[int], given_frames: int) -> None:
        """Warn of a video of one tile, to which attention is dense."""
        if self.settings.tiles(grid, given_frames).count == 1 and rank() == 0:
            text = "%s.sparse_attention.tile=%s holds the whole video of %s tokens: its attention is dense"
            log.warning(text, role, self.settings.tile, "x".join(map(str, grid)))

    def flops(
        self, family: Family, config: NetworkConfig, shapes: PartShapes, condition: Shapes, sparsity: float
    ) -> Flops:
        """Return the operations of one forward of one sample at a ``sparsity``: those of chosen tiles, of attention
        between tiles, and of gates."""
        grid = family.token_grid(config, shapes)
        segments = (*family.dense_rows(config, shapes, condition), math.prod(grid))
        tiles = self.settings.tiles(grid, family.given_frames(condition))
        pairs = sum(tiles.pairs(segments, int(sparse_tiles(tiles, sparsity).kept)))
        of_pair = 4 * sum(gate.outputs for gate in self.gates)
        flops = count_flops(family, config, shapes, condition).without(of_pair * (sum(segments) ** 2 - pairs))
        of_gates = 2 * sum(segments) * sum(gate.inputs * gate.outputs for gate in self.gates)
        forward, tangent = flops.forward + of_gates, flops.tangent + of_gates
        return flops._replace(forward=forward, tangent=tangent, sparse=of_pair * pairs)


def plan_sparse(
    role: str, settings: SparseSettings, folders: Collection[Path], family: Family, config: NetworkConfig
) -> SparsePlan | None:
    """Return the sparse attention of ``role``, by its settings or else by ``sparse.json`` in the first of its
    ``folders`` that has one, or FastVideo's file next to it."""
    where = f"{role}.sparse_attention."
    if not settings.enabled:
        if settings != SparseSettings():
            _refuse_unused(settings, where)
        for folder in folders:
            checkpoint = f"{role}.checkpoint={folder}"
            saved = read_sparse(folder, checkpoint) or read_sparse_contract(folder.parent, checkpoint)
            if saved is not None:
                settings = saved
                break
    if not settings.enabled:
        return None
    setting, layers = f"{where}sparsity={settings.sparsity}", family.gates(config)
    if not layers:
        raise UserError(f"{setting}: the family {family.name} has no sparse attention; leave it out")
    if missing := [layer for layer in settings.dense_layers if layer >= len(layers)]:
        raise UserError(f"{where}dense_layers has {missing[0]}, but the {role} has blocks 0 to {len(layers) - 1}")
    return SparsePlan(settings, ()).for_network(family, config)


def _refuse_unused(settings: SparseSettings, where: str) -> None:
    """Refuse settings other than the defaults without a sparsity, with the words that make the role dense."""
    set_there, defaults = asdict(settings), asdict(SparseSettings())
    words = [
        f"{where}{name}={shown(value).replace(' ', '')}" for name, value in defaults.items() if set_there[name] != value
    ]
    advice = f"set it, as to 0.9, or for a dense role give {' '.join(words)}"
    raise UserError(f"{where}sparsity is null, so the other {where}* have no effect; {advice}")


def saved_gates(role: str, folder: TransformerFolder, plan: SparsePlan | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of those gates of a role that its ``folder`` holds; others begin at zero.

    Gates of a dense role are refused: without them the network would compute something else.
    """
    held = [name for name in folder.shapes if is_gate(name)]
    if held and plan is None:
        trained = f"{role}.checkpoint={folder.path} was trained with sparse attention (it has {held[0]})"
        raise UserError(f"{trained}; {SET_SPARSITY.format(role=role)}")
    return {} if plan is None else {name: shape for name, shape in plan.shapes.items() if name in held}


def attach_gates(network: nn.Module, role: str, plan: SparsePlan) -> None:
    """Add the gates of ``role`` to a network on the meta device, in place, before it is sharded."""
    with torch.device("meta"):
        for layer in plan.gates:
            parent = network.get_submodule(layer.parent)
            if not hasattr(parent, GATE):
                setattr(parent, GATE, nn.ModuleDict())
            parent.get_submodule(GATE)[role] = Gate(layer.inputs, layer.outputs, layer.bias)  # type: ignore[operator]
