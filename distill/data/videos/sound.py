"""Sound of a video file, read by PyAV from the first frame's time stamp on."""

import logging
from fractions import Fraction
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from distill.data.videos.colors import ClipError
from distill.data.videos.decode import SoundFormat, VideoFile, opened, picture_times

logger = logging.getLogger(__name__)

SOUND_VERSION = "from the first frame, first track, 1"
_JITTER = Fraction(1, 100)
"""Seconds by which time stamps may differ from the samples before them without a gap: containers round them."""
_NOTABLE = 0.1
"""Seconds of silence at an end that are worth a line."""


def read_sound(file: VideoFile, wanted: SoundFormat, *, silence: bool = False) -> Tensor:
    """Return the first sound track of ``file``, resampled to the ``wanted`` samples: float32 (channels, samples), about
    [-1, 1]. It begins at the time stamp of the clip's first frame, which is not always 0. Samples before the track, in
    gaps, after its end and after the clip's part of the file are 0; FFmpeg mixes channels. No track: ``ClipError``, or
    ``silence``."""
    import av  # here alone: a run without video files needs no FFmpeg

    with opened(file) as (container, _):
        if not container.streams.audio:
            if silence:
                return torch.zeros(wanted.channels, wanted.samples)
            raise ClipError("has no sound track; silence=zero takes it as silent")
    rate, samples, channels = wanted
    begin, part_end = picture_times(file, Fraction(samples, rate))
    most = samples if part_end is None else min(samples, round((part_end - begin) * rate))
    sound, end = np.zeros((channels, samples), np.float32), 0
    with opened(file) as (container, _):
        track = container.streams.audio[0]
        resampler = av.AudioResampler(format="fltp", layout={1: "mono", 2: "stereo"}[channels], rate=rate)
        position: int | None = None
        for frame in chain(container.decode(track), [None]):  # None: what the filter still holds, some milliseconds
            if frame is not None and frame.pts is None:
                raise ClipError("has sound without time stamps")
            for piece in resampler.resample(frame):
                values = piece.to_ndarray()
                if piece.pts is not None:
                    start = round((piece.pts * piece.time_base - begin) * rate)
                    if position is None or abs(start - position) > _JITTER * rate:
                        position = start
                position = position or 0
                first, last = max(position, 0), min(position + values.shape[1], most)
                if first < last:
                    sound[:, first:last], end = values[:, first - position : last - position], last
                position += values.shape[1]
            if position is not None and position >= samples:
                break
    if not np.isfinite(sound).all():
        raise ClipError("has sound that is not finite")
    if (silent := (samples - end) / rate) > _NOTABLE:
        logger.warning("%s: its sound ends %.2f s before the clip; the rest is silence", file, silent)
    return torch.from_numpy(sound)
