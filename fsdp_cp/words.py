"""Counts and durations in words, for messages and pages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 clip`` or ``2 clips``; ``plural`` is for nouns whose plural is irregular."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """Return ``4.2 s``, ``42 s``, ``4.2 min``, ``42 min``, ``4.2 h`` or ``4.2 days``."""
    units = ((100, 1, "s"), (100 * 60, 60, "min"), (48 * 3600, 3600, "h"), (float("inf"), 86400, "days"))
    size, unit = next((size, unit) for limit, size, unit in units if seconds < limit)
    amount = seconds / size
    return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:.0f} {unit}"
