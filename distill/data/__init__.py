"""Data sets: base.py says what one is, settings.py which there are."""

from distill.data.base import ClipDataset, condition_of
from distill.data.settings import DATA, EncodedSettings

__all__ = ["DATA", "ClipDataset", "EncodedSettings", "condition_of"]
