"""Sparse roles: settings, gates, and the file ``sparse.json`` (video sparse attention, Zhang et al. 2025).

A sparse role runs the self-attention of its network by :mod:`fsdp_cp.attention.sparse`. A *gate*, a linear layer of
each sparse block, weighs the coarse attention between tiles. Gates begin at zero, where the role is plain attention to
the best tiles. They have FastVideo's names, and belong to the role: other roles of a shared network stay dense.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fsdp_cp.choices import Bounds, Checked, NonNegativeInt, PositiveInt
from fsdp_cp.errors import UserError, one_line, shown
from fsdp_cp.launch import rank
from fsdp_cp.mesh import Mesh
from fsdp_cp.tiles import Sparse, Tiles, sparse_tiles
from models.additions.base import GATE, is_gate
from models.owner import owner

if TYPE_CHECKING:
    from models.families.base import Family, Flops, GateLayer, NetworkConfig, Shapes
    from models.files.checkpoint_files import TransformerFolder
    from models.sample import PartShapes

FILE = "sparse.json"
"""File next to the weights of a network with sparse attention. It holds the settings without the ramp."""
NOTE = (
    f"This network has sparse attention between tiles of the video ({FILE}). A plain diffusers pipeline drops its gates"
    " with a warning and attends to all tokens, which is not what was trained; python -m distill.sample has both."
)
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SparseSettings(Checked):
    """``ROLE.sparse_attention.*``; see docs/sparse.md."""

    sparsity: Annotated[float, Bounds(least=0, below=1)] | None = None
    """Share of the video's tiles that a tile of queries leaves out, 0 to below 1; null for dense attention, or for the
    checkpoint's ``sparse.json``."""
    tile: list[PositiveInt] = field(default_factory=lambda: [4, 4, 4])
    """Number of tokens of a tile along frames, rows and columns."""
    dense_layers: list[NonNegativeInt] = field(default_factory=list)
    """Blocks that stay dense, by number from 0. They have no gate."""
    warmup: list[float] | None = None
    """Ramp from dense attention: the sparsity added, and every how many updates of the role, as ``[0.03,50]``; null for
    ``sparsity`` from the start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.tile) != 3:
            raise UserError(f"tile={shown(self.tile)} must be three numbers of tokens: frames, rows, columns")
        if self.warmup is None:
            return
        added, every = self.warmup if len(self.warmup) == 2 else (0.0, 0.0)
        if not (0 < added <= (self.sparsity or 0) and every >= 1 and float(every).is_integer()):
            wanted = f"[A,N]: a sparsity of at most {self.sparsity or 0:g} added every N >= 1 updates, as [0.03,50]"
            raise UserError(f"warmup={shown(self.warmup)} must be {wanted}; null for none")

    @property
    def enabled(self) -> bool:
        """Whether the settings describe a sparse role."""
        return self.sparsity is not None

    def sparsity_after(self, updates: int | None) -> float:
        """Return the sparsity after ``updates`` of the role; ``None`` for the final one."""
        assert self.sparsity is not None
        if self.warmup is None or updates is None:
            return self.sparsity
        added, every = self.warmup
        return min(self.sparsity, added * (updates // int(every)))

    def tiles(self, grid: Sequence[int]) -> Tiles:
        """Return the tiles of a video whose tokens are frames, rows and columns of ``grid``."""
        (t, h, w), (tile_t, tile_h, tile_w) = grid, self.tile
        return Tiles((t, h, w), (tile_t, tile_h, tile_w))


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

    def name_dense(self, role: str, grid: Sequence[int]) -> None:
        """Warn of a video of one tile, to which attention is dense."""
        if self.settings.tiles(grid).count == 1 and rank() == 0:
            text = "%s.sparse_attention.tile=%s holds the whole video of %s tokens: its attention is dense"
            log.warning(text, role, self.settings.tile, "x".join(map(str, grid)))

    def flops(
        self, family: Family, config: NetworkConfig, shapes: PartShapes, condition: Shapes, sparsity: float
    ) -> Flops:
        """Return the operations of one forward of one sample at a ``sparsity``: those of chosen tiles, of attention
        between tiles, and of gates."""
        grid, layers = family.token_grid(config, shapes), family.layers(config)
        segments = (*family.dense_rows(config, shapes, condition), math.prod(grid))
        tiles = self.settings.tiles(grid)
        sparse_pairs = sum(tiles.pairs(segments, int(sparse_tiles(tiles, sparsity).kept)))
        dense_layers = layers - len(self.gates)
        pairs = (len(self.gates) * sparse_pairs + dense_layers * sum(segments) ** 2) // layers
        flops = family.flops(config, shapes, condition, pairs)
        of_gates = 2 * sum(segments) * sum(gate.inputs * gate.outputs for gate in self.gates)
        return flops._replace(forward=flops.forward + of_gates, tangent=flops.tangent + of_gates)


def plan_sparse(
    role: str, settings: SparseSettings, folders: Collection[Path], family: Family, config: NetworkConfig
) -> SparsePlan | None:
    """Return the sparse attention of ``role``, by its settings or else by ``sparse.json`` in one of its ``folders``."""
    where = f"{role}.sparse_attention."
    if not settings.enabled:
        if settings != SparseSettings():
            raise UserError(f"{where}sparsity is not set, so the other {where}* have no effect; set it, as to 0.9")
        saved = (read_sparse(folder, f"{role}.checkpoint={folder}") for folder in folders)
        settings = next((found for found in saved if found is not None), settings)
    if not settings.enabled:
        return None
    setting, layers = f"{where}sparsity={settings.sparsity}", family.gates(config)
    if not layers:
        raise UserError(f"{setting}: the family {family.name} has no sparse attention; leave it out")
    if missing := [layer for layer in settings.dense_layers if layer >= len(layers)]:
        raise UserError(f"{where}dense_layers has {missing[0]}, but the {role} has blocks 0 to {len(layers) - 1}")
    return SparsePlan(settings, ()).for_network(family, config)


def saved_gates(role: str, folder: TransformerFolder, plan: SparsePlan | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of those gates of a role that its ``folder`` holds; others begin at zero.

    Gates of a dense role are refused: without them the network would compute something else.
    """
    held = [name for name in folder.shapes if is_gate(name)]
    if held and plan is None:
        advice = f"set {role}.sparse_attention.sparsity (and .tile) to what it was trained with, as to 0.8 or 0.9"
        raise UserError(
            f"{role}.checkpoint={folder.path} was trained with sparse attention (it has {held[0]}); {advice}"
        )
    return {} if plan is None else {name: shape for name, shape in plan.shapes.items() if name in held}


def attach_gates(network: nn.Module, role: str, plan: SparsePlan) -> None:
    """Add the gates of ``role`` to a network on the meta device, in place, before it is sharded."""
    with torch.device("meta"):
        for layer in plan.gates:
            parent = network.get_submodule(layer.parent)
            if not hasattr(parent, GATE):
                setattr(parent, GATE, nn.ModuleDict())
            parent.get_submodule(GATE)[role] = Gate(layer.inputs, layer.outputs, layer.bias)  # type: ignore[operator]


class SparseCall(NamedTuple):
    """Sparse attention of one call of a network, an argument of its blocks: recomputation in backward gets it too."""

    role: str
    sparse: Sparse

    def options(self, gates: Mapping[str, nn.Module], x: Tensor, heads: int) -> dict[str, Any]:
        """Return the arguments of attention in a block with these ``gates`` by role, whose attention gets ``x``; none
        in a dense block."""
        if self.role not in gates:
            return {}
        gate = gates[self.role](x)
        return {"sparse": self.sparse, "gate": gate.unflatten(-1, (heads, -1))}


class SparseRoles:
    """Sparse roles of one network, and the role that it serves at the moment."""

    def __init__(self, plans: Mapping[str, SparsePlan], trained: Collection[str]):
        self.plans = plans
        self.sparsity = {
            name: plan.settings.sparsity_after(0 if name in trained else None) for name, plan in plans.items()
        }
        """Current sparsity of each role."""
        self.role = ""

    @contextmanager
    def serves(self, role: str) -> Iterator[None]:
        """Run calls of the network within this context for ``role``. Nests."""
        outer, self.role = self.role, role
        try:
            yield
        finally:
            self.role = outer

    def call(self, grid: Sequence[int], mesh: Mesh) -> SparseCall | None:
        """Return the attention of the current role to a video whose tokens are frames, rows and columns of ``grid``,
        in the order of the split sequence; ``None`` for a dense role."""
        plan = self.plans.get(self.role)
        if plan is None:
            return None
        return SparseCall(self.role, sparse_tiles(plan.settings.tiles(grid).on(mesh), self.sparsity[self.role]))


def sparse_roles(network: nn.Module) -> SparseRoles:
    """Return the sparse roles of a network, none for one without."""
    return vars(network).get(FILE) or SparseRoles({}, ())


def gates_of(module: nn.Module) -> Mapping[str, nn.Module]:
    """Return the gates that roles have in ``module``, by role."""
    return cast("Mapping[str, nn.Module]", getattr(module, GATE, {}))


def keep_sparse_roles(network: nn.Module, roles: SparseRoles) -> None:
    """Keep ``roles`` with the network, for :func:`sparse_roles`."""
    vars(network)[FILE] = roles


def file_contents(settings: SparseSettings, sparsity: float) -> dict[str, Any]:
    """Return the contents of ``sparse.json`` at a current ``sparsity``."""
    return {**asdict(settings), "sparsity": sparsity, "warmup": None}


def read_sparse(folder: Path, where: str) -> SparseSettings | None:
    """Return the settings in a folder's ``sparse.json``; ``None`` without the file."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        settings = SparseSettings(**json.loads(file.read_text(encoding="utf-8")))
        if not settings.enabled:
            raise ValueError("sparsity must be a number")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{where}: {file} is damaged ({one_line(error)}); copy it again") from error
    return settings


def write_sparse(folder: Path, contents: Mapping[str, Any]) -> None:
    """Write ``sparse.json`` (:func:`file_contents`)."""
    (folder / FILE).write_text(json.dumps(contents, indent=2) + "\n")


def gate_stream(role: str, name: str) -> str | None:
    """Return ``name`` if that module of a network is a gate of ``role``: only those get their first values."""
    return name if is_gate(name) and owner(f"{name}.weight")[0] == role else None
