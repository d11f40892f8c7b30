"""Clock of a clip's picture, by which its sound is placed: time stamps, or the order of frames where these fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from distill.data.videos.container import MOST_B_FRAMES, ClipError, Cut, TimesError, VideoFile, opened, timed_frames

if TYPE_CHECKING:
    import av

RESTART = Fraction(1, 10)
"""Seconds by which time stamps fall, at least, where joined files meet. Packets of VP8 share time stamps, or nearly."""


class Stretch(NamedTuple):
    """Packets whose time stamps run on. A file of joined files has several."""

    stamp: Fraction
    """Time stamp of its first frame."""
    time: Fraction
    """Time of its first frame."""
    position: int
    """Place of its first packet in the file, in bytes."""


class Clock(NamedTuple):
    """Times of a clip's frames, in seconds."""

    stretches: list[Stretch]
    begin: Fraction
    """Time of the clip's first frame."""
    end: Fraction | None
    """Time at which the clip's part of the file ends, if this is not after the clip."""

    def place(self, stamp: Fraction, stretch: int) -> Fraction:
        """Return the time in the clip of a time stamp in that stretch."""
        at = self.stretches[min(stretch, len(self.stretches) - 1)]
        return stamp - at.stamp + at.time - self.begin

    def stretch_at(self, position: int | None) -> int:
        """Return the number of the stretch in which a packet lies; 0 if its place is not known."""
        return sum(stretch.position <= (position or 0) for stretch in self.stretches[1:])


def picture_clock(file: VideoFile, seconds: Fraction) -> Clock:
    """Return the clock by which ``read_clip`` takes the frames of a clip of so many ``seconds``."""
    with opened(file) as (container, stream):
        runs = _runs(container, stream, seconds + _skipped(file, stream))
        stretches = [_stretch(number, packets, stream, len(runs) == 1) for number, packets in runs.items()]
        look = _look(next(iter(runs.values())), stream)
    if len(stretches) == 1:
        try:
            return Clock([Stretch(Fraction(0), Fraction(0), 0)], *_ends(file, seconds, look, in_order=False))
        except TimesError:
            pass
    return Clock(stretches, *_ends(file, seconds, 0, in_order=True))


def _runs(
    container: av.container.InputContainer, stream: av.VideoStream, until: Fraction
) -> dict[int, list[av.Packet]]:
    """Return the first packets of each stretch that begins before so many seconds, by the number of its first."""
    runs: dict[int, list[av.Packet]] = {}
    last = None
    for number, packet in enumerate(container.demux(stream)):
        if packet.dts is None:  # it flushes the decoder
            continue
        if last is None or (last - packet.dts) * stream.time_base > RESTART:
            runs[number] = run = []
        if len(run) <= MOST_B_FRAMES:
            run.append(packet)
        last = packet.dts
        if not stream.average_rate or number / stream.average_rate > until:
            break
    if not runs:
        raise ClipError("holds no frame with a time stamp, from which its sound would begin")
    return runs


def _stretch(number: int, packets: Sequence[av.Packet], stream: av.VideoStream, is_only: bool) -> Stretch:
    """Return the stretch that begins with these ``packets``, for frames that are taken in order."""
    # Without a restart, what does not grow are stamps that are no times: AVI has times of packets alone.
    stamps = [packet.dts if is_only or packet.pts is None else packet.pts for packet in packets]
    time = number / stream.average_rate if stream.average_rate else Fraction(0)
    return Stretch(min(stamps) * stream.time_base, time, packets[0].pos or 0)


def _look(packets: Sequence[av.Packet], stream: av.VideoStream) -> int:
    """Return how many frames tell whether times grow: times in the order of packets show only after as many frames as
    there are B-frames in a row."""
    stamps = [packet.pts for packet in packets]
    in_packet_order = None in stamps or stamps == sorted(stamps)
    return MOST_B_FRAMES if in_packet_order and stream.codec_context.has_b_frames else 0


def _skipped(file: VideoFile, stream: av.VideoStream) -> Fraction:
    """Return about how many seconds of the file are before its part."""
    if not isinstance(file, Cut):
        return Fraction(0)
    first = Fraction(file.span.first)
    return first if file.span.unit == "s" else first / (stream.average_rate or 1)


def _ends(file: VideoFile, seconds: Fraction, look: int, *, in_order: bool) -> tuple[Fraction, Fraction | None]:
    """Return the time of the clip's first frame, and the time at which its part of the file ends; ``None`` where this
    is more than so many ``seconds`` later or the file's own end. A whole file is read for ``look`` further frames."""
    with opened(file) as (container, stream):
        frames = timed_frames(file, container, stream, in_order=in_order)
        frame, begin = next(frames, (None, Fraction(0)))
        if frame is None:
            raise ClipError("holds no frame in its part, from which its sound would begin")
        if not isinstance(file, Cut):
            deque(islice(frames, look), maxlen=0)
            return begin, None
        end = begin + _duration(frame, stream)
        for frame, time in frames:
            end = time + _duration(frame, stream)
            if end - begin > seconds:
                return begin, None
        return begin, end


def _duration(frame: av.VideoFrame, stream: av.VideoStream) -> Fraction:
    if frame.duration:
        return frame.duration * frame.time_base
    return 1 / stream.average_rate if stream.average_rate else Fraction(0)
