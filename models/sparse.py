"""Sparse roles: settings, calls, and the file ``sparse.json`` (video sparse attention, Zhang et al. 2025).

A sparse role runs the self-attention of its network by :mod:`fsdp_cp.attention.sparse`. A *gate*, a linear layer of
each sparse block, weighs the coarse attention between tiles. Gates begin at zero, where the role is plain attention to
the best tiles. They have FastVideo's names, and belong to the role: other roles of a shared network stay dense.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, cast

from torch import Tensor, nn

from fsdp_cp.choices import Bounds, Checked, NonNegativeInt, PositiveInt
from fsdp_cp.errors import UserError, one_line, shown
from fsdp_cp.mesh import Mesh
from fsdp_cp.tiles import Sparse, Tiles, sparse_tiles
from models.owner import GATE

FILE = "sparse.json"
"""File next to the weights of a network with sparse attention. It holds the settings without the ramp."""
NOTE = f"""This network has sparse attention between tiles of the video ({FILE}). A plain diffusers pipeline drops its
gates with a warning and attends to all tokens, which is not what was trained. These lines give it both, with this
folder as FOLDER. `python -m distill.sample` has them too.

```python
from models.sparse_pipeline import use_sparse_attention

use_sparse_attention(pipeline.transformer, FOLDER)
```"""


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
        if self.warmup is None or self.sparsity is None:
            return
        added, every = self.warmup if len(self.warmup) == 2 else (0.0, 0.0)
        if not (0 < added <= self.sparsity and every >= 1 and float(every).is_integer()):
            wanted = f"[A,N]: a sparsity of at most {self.sparsity:g} added every N >= 1 updates, as [0.03,50]"
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

    def tiles(self, grid: Sequence[int], given_frames: int = 0) -> Tiles:
        """Return the tiles of a video whose tokens are frames, rows and columns of ``grid``. The first ``given_frames``
        stay dense."""
        (t, h, w), (tile_t, tile_h, tile_w) = grid, self.tile
        if t <= given_frames:
            raise UserError("a sparse role needs more latent frames than the given one; set data.num_frames higher")
        return Tiles((t - given_frames, h, w), (tile_t, tile_h, tile_w), given=given_frames * h * w)


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


class Planned(Protocol):
    """Plan of a role's sparse attention (``models/roles/gates.py``), as far as calls need it."""

    @property
    def settings(self) -> SparseSettings: ...

    @property
    def flops(self) -> Callable[..., Any]: ...


class SparseRoles:
    """Sparse roles of one network, and the role that it serves at the moment."""

    def __init__(self, plans: Mapping[str, Planned], trained: Collection[str]):
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

    def call(self, grid: Sequence[int], mesh: Mesh, given_frames: int = 0) -> SparseCall | None:
        """Return the attention of the current role to a video whose tokens are frames, rows and columns of ``grid``,
        in the order of the split sequence; ``None`` for a dense role. The first ``given_frames`` stay dense."""
        plan = self.plans.get(self.role)
        if plan is None:
            return None
        tiles = plan.settings.tiles(grid, given_frames).on(mesh)
        return SparseCall(self.role, sparse_tiles(tiles, self.sparsity[self.role]))


class SparseTables:
    """Sparse attention of a network's current call, which its blocks get with the rotary tables."""

    def __init__(self, roles: SparseRoles, mesh: Mesh):
        self.roles, self.mesh = roles, mesh
        self.video: Tiles | None = None
        """Tiles of the call's video; ``None`` for a dense role."""
        self._added: tuple[Any, ...] = ()

    def begin(self, grid: Sequence[int], *more: Any, given_frames: int = 0) -> None:
        """Begin a call with a video of ``grid``, as :meth:`SparseRoles.call`. Sparse blocks get ``more`` too."""
        call = self.roles.call(grid, self.mesh, given_frames)
        self.video = None if call is None else call.sparse.tiles
        self._added = () if call is None else (call, *more)

    def add(self, _rope: nn.Module, _args: tuple, tables: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
        """Return the rotary tables with the attention of a sparse role."""
        return (*tables, *self._added)


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
