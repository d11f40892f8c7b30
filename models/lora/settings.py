"""Settings ``ROLE.lora.*`` of a role that trains adapters on a frozen base."""

import math
from dataclasses import dataclass, field
from typing import Annotated

from fsdp_cp.choices import Bounds, Checked, NonNegativeInt


@dataclass(kw_only=True)
class LoraSettings(Checked):
    """Adapters of a role on a frozen base: adapted layers compute ``W x + (alpha / rank) B A x``."""

    rank: NonNegativeInt = 0
    """Rank: rows of A and columns of B; 0 for a role that trains its whole network."""
    alpha: Annotated[float, Bounds(above=0, below=math.inf)] | None = None
    """Scale of the product times the rank; null for ``rank``, which gives scale 1."""
    targets: list[str] = field(default_factory=list)
    """Name patterns of the linear layers that get adapters, e.g. ``[*.attn1.*,*.ffn.*]``; empty for all linear layers
    of the blocks, or those that the family names."""

    @property
    def enabled(self) -> bool:
        """Whether the role trains adapters."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Scale of the product, ``alpha / rank``."""
        return 1.0 if self.alpha is None else self.alpha / self.rank
