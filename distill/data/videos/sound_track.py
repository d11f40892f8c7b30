"""Sound track of a video file (PyAV), on the clock of its picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from distill.data.videos.clock import RESTART, Clock, Stretch, picture_clock
from distill.data.videos.container import ClipError, VideoFile, extend_limit, opened

if TYPE_CHECKING:
    import av

_JITTER = Fraction(1, 100)
"""Seconds by which time stamps may differ from the samples before them without a gap: containers round them."""
_OTHERS = 0.707
"""Weight of the center and the surround channels, next to 1 for left and right (ITU-R BS.775)."""


def read_track(file: VideoFile, rate: int, samples: int, channels: int) -> tuple[bytes, int]:
    """Return what ``read_sound`` says, and the number of samples up to the end of the track's last sound in the clip:
    0 if there is none."""
    sound, end = np.zeros((channels, samples), np.float32), 0
    position: int | None = None
    with opened(file, is_video=False) as (container, picture):
        if not container.streams.audio:
            return sound.tobytes(), 0
        clock = _own_clock(container) if picture is None else picture_clock(file, Fraction(samples, rate))
        most = samples if clock.end is None else min(samples, round((clock.end - clock.begin) * rate))
        for start, values in _pieces(container, clock, rate, channels):
            if position is None or (start is not None and abs(start - position) > _JITTER * rate):
                position = start or 0
            first, last = max(position, 0), min(position + values.shape[1], most)
            if first < last:
                sound[:, first:last], end = values[:, first - position : last - position], last
            position += values.shape[1]
            if position >= samples:
                break
    if not np.isfinite(sound).all():
        raise ClipError("has sound that is not finite")
    return sound.tobytes(), end


def _own_clock(container: av.container.InputContainer) -> Clock:
    """Return the clock of a file of sound alone, which begins with its track."""
    track = container.streams.audio[0]
    begin = (track.start_time or 0) * (track.time_base or Fraction(1))
    return Clock([Stretch(begin, begin, 0)], begin, None)


def _pieces(
    container: av.container.InputContainer, clock: Clock, rate: int, channels: int
) -> Iterator[tuple[int | None, np.ndarray]]:
    """Yield the track at the wanted rate: the sample of the clip at which a piece begins, and (channels, n) values."""
    from av import AudioResampler

    resampler, mix = AudioResampler(format="flt", rate=rate), None  # "fltp" of 8 channels crashes in to_ndarray
    for frame, stretch in _frames(container, clock):
        for piece in resampler.resample(frame):
            if mix is None:
                mix = mixing([channel.name for channel in piece.layout.channels], channels)
            stamp = None if piece.pts is None else piece.pts * piece.time_base
            start = None if stamp is None else round(clock.place(stamp, stretch) * rate)
            yield start, mix @ piece.to_ndarray().reshape(-1, mix.shape[1]).T


def _frames(container: av.container.InputContainer, clock: Clock) -> Iterator[tuple[av.AudioFrame | None, int]]:
    """Yield the frames of the first track, each with its stretch of the clock, and last ``None``, at which the
    resampler gives what it still holds."""
    track = container.streams.audio[0]
    stretch, latest = 0, None
    for packet in container.demux(track):
        extend_limit()
        if packet.pts is not None:
            restarts = latest is not None and (latest - packet.pts) * track.time_base > RESTART
            stretch, latest = max(stretch + restarts, clock.stretch_at(packet.pos)), packet.pts
        for frame in packet.decode():
            if frame.pts is None:
                raise ClipError("has sound without time stamps")
            yield frame, stretch
    yield None, stretch


def mixing(names: Sequence[str], channels: int) -> np.ndarray:
    """Return the weights (``channels``, n) that mix channels with these FFmpeg ``names`` to stereo or mono. Their sum
    is 1, so that the level stays. The low-frequency channel is left out. Two channels without known places, as a wav
    file has them, are left and right; others are averaged."""
    names = ("FL", "FR") if [*names] == ["NONE"] * 2 else names
    sides = [np.array([_weight(name, side) for name in names]) for side in "LR"]
    sides = [weights if weights.any() else np.ones(len(names)) for weights in sides]
    stereo = np.stack([weights / weights.sum() for weights in sides])
    return (stereo if channels == 2 else stereo.mean(axis=0, keepdims=True)).astype(np.float32)


def _weight(name: str, side: str) -> float:
    """Return the weight of a channel on the ``side`` L or R, next to 1 for the one in front."""
    if name in (f"F{side}", f"D{side}"):
        return 1.0
    is_center = not {"L", "R"} & set(name)
    return _OTHERS if is_center or (side in name and name[:3] != "LFE") else 0.0
