"""Sound of a video file, on the clock of its picture, read in a process that may die."""

import logging

import numpy as np
import torch
from torch import Tensor

from distill.data.videos.container import ClipError, VideoFile
from distill.data.videos.decode import SoundFormat
from distill.data.videos.reader_process import ReaderProcesses

logger = logging.getLogger(__name__)

SOUND_VERSION = "on the picture's clock, first track, channels mixed with weights of sum 1, 3"
EARLIER_SOUNDS = (f"{SOUND_VERSION[:-1]}2", "from the first frame, first track, 1")
"""Versions whose finished sets are used as they are."""
_NOTABLE = 0.1
"""Seconds of silence at an end that are worth a line."""
# PyAV 18.1 dies of a custom order of channels: it frees the layout twice.
_readers = ReaderProcesses("distill.data.videos.sound_track:read_track", seconds=60)
end_sound_readers = _readers.close


def read_sound(file: VideoFile, wanted: SoundFormat, *, silence: bool = False) -> Tensor:
    """Return the first sound track of ``file``, resampled to the ``wanted`` samples: float32 (channels, samples), about
    [-1, 1]. It begins with the clip's first frame: at its time stamp, which is not always 0, or with the frames' order
    where the picture is taken in order. Samples before the track, in gaps, after its end and after the clip's part of
    the file are 0. Channels are mixed with weights of sum 1, so that the level stays.

    Raises: ``ClipError`` with the reason if the track cannot be read, or ends or holds up its reader; and if no sound
    is in the clip, unless ``silence``.
    """
    rate, samples, _ = wanted
    sound, end = _track(file, wanted)
    if not end and not silence:
        raise ClipError("has no sound in the clip; silence=zero takes it as silent")
    if end and (silent := (samples - end) / rate) > _NOTABLE:
        logger.warning("%s: its sound ends %.2f s before the clip; the rest is silence", file, silent)
    return sound


def read_heard(file: VideoFile, wanted: SoundFormat) -> Tensor:
    """Return the first sound track of ``file`` as :func:`read_sound`, up to its own end. Silence is a ``ClipError``."""
    sound, end = _track(file, wanted)
    if not sound.any():
        raise ClipError("has no sound, or silence alone")
    return sound[:, :end]


def _track(file: VideoFile, wanted: SoundFormat) -> tuple[Tensor, int]:
    """Return the sound, filled up with zeros, and the number of samples up to its end."""
    rate, samples, channels = wanted
    payload, end = _readers.call(file, rate, samples, channels)
    return torch.from_numpy(np.frombuffer(payload, np.float32).reshape(channels, samples).copy()), end
