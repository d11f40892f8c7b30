"""Data sets: base.py says what one is, settings.py which there are."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.data.base import ClipDataset, condition_of
    from distill.data.settings import DATA, EncodedSettings

__all__ = ["DATA", "ClipDataset", "EncodedSettings", "condition_of"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: a process that reads sound does without torch."""
    for module in ("base", "settings") if name in __all__ else ():
        if hasattr(imported := import_module(f"distill.data.{module}"), name):
            return getattr(imported, name)
    raise AttributeError(f"module 'distill.data' has no attribute {name!r}")
