"""Open a video file (PyAV), and read the times of its frames. Nothing here imports torch: a process that reads sound
does without."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distill.data.videos.span import Span
from fsdp_cp.errors import one_line

if TYPE_CHECKING:
    import av

_NO_TIMES = 0x80  # AVFMT_NOTIMESTAMPS: raw streams, to which FFmpeg gives 25 fps
MOST_B_FRAMES = 16  # in a row, of any codec


class ClipError(Exception):
    """This file cannot give the clip that was asked for; the message is the reason, without the file's name."""


class TimesError(Exception):
    """The times of a clip's frames cannot be used; the message is the reason."""


class FilePart(NamedTuple):
    """``size`` bytes of a file from ``offset`` on, such as a member of an archive."""

    file: Path
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.file} (byte {self.offset})"

    def read(self) -> bytes:
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            return stream.read(self.size)


class Cut(NamedTuple):
    """A part of a video in time."""

    file: Path | FilePart
    span: Span

    def __str__(self) -> str:
        return f"{self.file} ({self.span})"


VideoFile = str | Path | FilePart | Cut


@contextmanager
def opened(file: VideoFile, *, is_video: bool = True) -> Iterator[tuple[av.container.InputContainer, Any]]:
    """Open a file and its first video stream that is not cover art; what PyAV raises becomes a ``ClipError``. A file
    that need not be a video may have none: then the stream is ``None``."""
    import av  # here alone: a run without video files needs no FFmpeg

    try:
        file = file.file if isinstance(file, Cut) else file
        # Absolute, and files alone: "12:30.mp4" would be a protocol, and a playlist called .mp4 may name an address.
        name, protocols = os.path.abspath(file.file if isinstance(file, FilePart) else file), "file"
        if isinstance(file, FilePart):
            name, protocols = f"subfile,,start,{file.offset},end,{file.offset + file.size},,:{name}", "file,subfile"
        with av.open(name, options={"protocol_whitelist": protocols}, metadata_errors="ignore") as container:
            cover = av.stream.Disposition.attached_pic
            stream = next((video for video in container.streams.video if not video.disposition & cover), None)
            if stream is None and is_video:
                raise ClipError("holds no video stream")
            if stream is not None:
                stream.thread_type = "AUTO"
            yield container, stream
    # Missing, truncated, not a video; of the others, numbers in a damaged header that no arithmetic takes.
    except (av.FFmpegError, OSError, ValueError, ArithmeticError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ClipError(f"cannot be decoded ({one_line(reason)})") from error


def timed_frames(
    file: VideoFile, container: av.container.InputContainer, stream: av.VideoStream, *, in_order: bool
) -> Iterator[tuple[av.VideoFrame, Fraction]]:
    """Yield the decoded frames of the file's part and their times: in order at the average rate, from 0 for the file's
    first, or the time stamps, which raise ``TimesError`` if they are missing or do not grow."""
    times = _times_in_order(container, stream) if in_order else _time_stamps(container, stream)
    yield from file.span.frames(times) if isinstance(file, Cut) else times


def extend_limit() -> None:
    """Give a reader (:mod:`distill.data.videos.reader_process`) its whole time again: it makes progress."""
    _, seconds = signal.getitimer(signal.ITIMER_REAL)
    if seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)


def _times_in_order(
    container: av.container.InputContainer, stream: av.VideoStream
) -> Iterator[tuple[av.VideoFrame, Fraction]]:
    if not stream.average_rate:
        raise ClipError("has frames whose times do not grow, and no frame rate")
    for index, frame in enumerate(container.decode(stream)):
        extend_limit()
        yield frame, index / stream.average_rate


def _time_stamps(
    container: av.container.InputContainer, stream: av.VideoStream
) -> Iterator[tuple[av.VideoFrame, Fraction]]:
    last = None
    for index, frame in enumerate(container.decode(stream)):
        extend_limit()
        if frame.pts is None or frame.time_base is None:
            if container.format.flags & _NO_TIMES or not stream.average_rate:
                raise ClipError("has frames without time stamps, and no frame rate")
            raise TimesError("has frames without time stamps")
        time = frame.pts * frame.time_base
        if last is not None and time <= last:
            raise TimesError(f"the times of its frames do not grow at frame {index}")
        last = time
        yield frame, time
