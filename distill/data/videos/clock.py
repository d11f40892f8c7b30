"""Clock of a clip's picture, by which its sound is placed: time stamps, or the order of frames where these fail."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from distill.data.videos.container import MOST_B_FRAMES, ClipError, Cut, TimesError, VideoFile, opened, timed_frames

if TYPE_CHECKING:
    import av


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
    stretches, look = _stretches(file, seconds)
    if len(stretches) == 1:
        try:
            return Clock([Stretch(Fraction(0), Fraction(0), 0)], *_ends(file, seconds, look, in_order=False))
        except TimesError:
            pass
    return Clock(stretches, *_ends(file, seconds, 0, in_order=True))


def _stretches(file: VideoFile, seconds: Fraction) -> tuple[list[Stretch], int]:
    """Return the stretches that begin within the clip, with the times of frames that are taken in order; and after how
    many frames it is known whether the file's own times grow."""
    with opened(file) as (container, stream):
        rate, until = stream.average_rate, seconds + _skipped(file, stream)
        begins: list[tuple[int, list[av.Packet]]] = []  # number of each stretch's first packet, and its first packets
        last = None
        for number, packet in enumerate(container.demux(stream)):
            if packet.dts is None:  # it flushes the decoder
                continue
            if last is None or packet.dts <= last:
                begins.append((number, []))
            if len(begins[-1][1]) <= MOST_B_FRAMES:
                begins[-1][1].append(packet)
            last = packet.dts
            if not rate or number / rate > until:
                break
        if not begins:
            raise ClipError("holds no frame with a time stamp, from which its sound would begin")
        stretches = []
        for number, packets in begins:
            # What orders frames is not their time where it does not grow, as in AVI, which has times of packets alone.
            stamps = [packet.dts if len(begins) == 1 else packet.pts or packet.dts for packet in packets]
            time = number / rate if rate else Fraction(0)
            stretches.append(Stretch(min(stamps) * stream.time_base, time, packets[0].pos or 0))
        # Times in the order of packets show only after as many frames as there are B-frames in a row.
        pts = [packet.pts for packet in begins[0][1]]
        in_packet_order = None in pts or pts == sorted(pts)
        return stretches, MOST_B_FRAMES if in_packet_order and stream.codec_context.has_b_frames else 0


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
