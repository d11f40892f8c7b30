"""Data sets: base.py says what one is, settings.py which there are."""

from distill.data.base import ClipDataset, condition_of
from distill.data.settings import (
    DATA,
    CaptionsSettings,
    DataSettings,
    EncodedSettings,
    MovingShapesSettings,
    VideoFolderSettings,
)

__all__ = [
    "DATA",
    "CaptionsSettings",
    "ClipDataset",
    "DataSettings",
    "EncodedSettings",
    "MovingShapesSettings",
    "VideoFolderSettings",
    "condition_of",
]
