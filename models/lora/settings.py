"""``ROLE.lora.*``: a role that trains adapters on a frozen base."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fsdp_cp.errors import UserError, shown


@dataclass(kw_only=True)
class LoraSettings:
    """What a role adds to a frozen base: ``W x + (alpha / rank) B A x`` in the layers that it adapts."""

    rank: int = 0
    """Rows of A, columns of B; 0 for a role that trains its whole network."""
    alpha: float | None = None
    """Scale of the product, over the rank; null for ``rank``: a scale of 1."""
    targets: list[str] = field(default_factory=list)
    """Linear layers that get adapters, as patterns of their names, ``[*.attn1.*,*.ffn.*]``; empty for all linear layers
    of the blocks."""
    train: list[str] = field(default_factory=list)
    """Modules that the role trains whole, in a copy of its own, as patterns of their names: ``[proj_out,*norm*]``."""

    @property
    def enabled(self) -> bool:
        """Does the role train adapters?"""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """``alpha / rank``."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def check(self, where: str) -> None:
        """Refuse values that no adapters can have.

        Args:
            where: the settings' prefix, e.g. ``"student.lora."``.

        Raises:
            UserError: with a value that works.
        """
        if type(self.rank) is not int or self.rank < 0:
            raise UserError(f"{where}rank={shown(self.rank)} must be a whole number of 1 or more, or 0 for no adapters")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise UserError(f"{where}alpha={self.alpha} must be above 0 and finite, or null for the rank")
