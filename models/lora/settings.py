"""Settings ``ROLE.lora.*`` of a role that trains adapters on a frozen base."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fsdp_cp.errors import UserError, shown


@dataclass(kw_only=True)
class LoraSettings:
    """Adapters of a role on a frozen base: adapted layers compute ``W x + (alpha / rank) B A x``."""

    rank: int = 0
    """Rank: rows of A and columns of B; 0 for a role that trains its whole network."""
    alpha: float | None = None
    """Scale of the product times the rank; null for ``rank``, which gives scale 1."""
    targets: list[str] = field(default_factory=list)
    """Name patterns of the linear layers that get adapters, e.g. ``[*.attn1.*,*.ffn.*]``; empty for all linear layers
    of the blocks."""
    train: list[str] = field(default_factory=list)
    """Name patterns of the modules that the role trains whole, as separate copies, e.g. ``[proj_out,*norm*]``."""

    @property
    def enabled(self) -> bool:
        """Whether the role trains adapters."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Scale of the product, ``alpha / rank``."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def check(self, where: str) -> None:
        """Refuse values that no adapters can have.

        Args:
            where: prefix of the settings, e.g. ``"student.lora."``.

        Raises:
            UserError: a value is refused.
        """
        if type(self.rank) is not int or self.rank < 0:
            raise UserError(f"{where}rank={shown(self.rank)} must be a whole number of 1 or more, or 0 for no adapters")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise UserError(f"{where}alpha={self.alpha} must be above 0 and finite, or null for the rank")
