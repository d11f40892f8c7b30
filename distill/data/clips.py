"""Decode one video file into a clip of fixed length and size (PyAV, no process group, no cache).

Shape legend: T frames, H height, W width, 3 channels in the order red, green, blue.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fsdp_cp.errors import UserError

if TYPE_CHECKING:
    import av

logger = logging.getLogger(__name__)

# Decoding rules that change pixels must change this name: it is part of every latent's key.
DECODER_VERSION = "nearest-time, centre crop, bicubic antialiased, 1"

MAX_SIZE = 65536
"""Frames of a clip, and pixels of its sides, at most: far above any network's, and below what fills a memory."""
FPS = (0.01, 1000.0)
"""Frame rates that mp4 files can say."""
_MAX_PIXELS = 2**26  # of a source's frame, twice 8K: a damaged header may claim any size


class ClipError(Exception):
    """This file cannot give the clip that was asked for; the message is the reason, without the file's name."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ClipFormat:
    """Length, size and rate of the clips to cut, in pixels and frames."""

    num_frames: int
    """Frames per clip."""
    height: int
    """Height in pixels."""
    width: int
    """Width in pixels."""
    fps: float
    """Frames per second at which the source is sampled."""


def check_sizes(*, num_frames: object, height: object, width: object, fps: object) -> None:
    """Raises ``UserError`` for what is no size of a clip: not a whole number, none at all, or beyond all measure."""
    for name, value in (("num_frames", num_frames), ("height", height), ("width", width)):
        if type(value) is not int:
            raise UserError(f"data.{name}={value} must be a whole number; use 64")
        if value > MAX_SIZE:
            raise UserError(f"data.{name}={value} is too large; use {MAX_SIZE} or less")
    least, most = FPS
    # nan is neither; `not` catches it
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not least <= fps <= most:
        shown = f"{fps:g}" if isinstance(fps, float) else fps
        raise UserError(f"data.fps={shown} must be between {least:g} and {most:g} frames per second, above 0; use 8")


def read_clip(file: str | Path, clip: ClipFormat) -> torch.Tensor:
    """The first ``clip.num_frames`` frames of ``file``, sampled at ``clip.fps``, resized and centre-cropped.

    The picked frame is the one nearest in time to ``k / fps`` after the first frame (of two equally near, the earlier),
    so variable frame rates and rounded time stamps sample evenly. A source slower than ``fps`` repeats frames. Frames
    are resized one at a time as they are decoded: memory holds the small clip and a few source frames, whatever the
    source.

    Colours follow the stream's own matrix and range; an untagged stream is read as BT.601 limited range, as swscale (so
    ffmpeg, imageio and diffusers' ``export_to_video``) writes and reads it. No gamma or HDR conversion is done.
    Pixel aspect and display rotation in the file are applied.

    Returns: float32 (3, T, H, W) in [-1, 1].
    Raises: ``ClipError`` with the reason if the file is missing, broken or too short.
    """
    import av  # here alone: a run without video files needs no FFmpeg

    frames: list[torch.Tensor] = []
    try:
        # Absolute, and files alone: "12:30.mp4" would be a protocol, and a playlist called .mp4 may name an address.
        with av.open(
            os.path.abspath(file), options={"protocol_whitelist": "file"}, metadata_errors="ignore"
        ) as container:
            if not container.streams.video:
                raise ClipError("holds no video stream")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            if stream.average_rate and stream.average_rate < clip.fps * 0.999:
                logger.warning(
                    "%s: its %.3g fps are below data.fps=%g, frames repeat", file, float(stream.average_rate), clip.fps
                )
            last: av.VideoFrame | None = None
            for frame in _pick(container, stream, clip):
                if frame is not last:  # a repeated frame is converted once
                    small, last = frame_to_tensor(frame, clip.height, clip.width, _pixel_aspect(stream)), frame
                frames.append(small)
    # Missing, truncated, not a video; of the others, numbers in a damaged header that no arithmetic takes.
    except (av.FFmpegError, OSError, ValueError, ArithmeticError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ClipError(f"cannot be decoded ({' '.join(str(reason).split())[:200]})") from error
    return torch.stack(frames, dim=1)


def first_frame(file: Path, clip: ClipFormat) -> torch.Tensor:
    """The first frame of a video, or an image, resized and cropped as :func:`read_clip` does: (3, 1, H, W) in [-1, 1].

    Raises: ``UserError`` for a file that gives none.
    """
    try:
        return read_clip(file, replace(clip, num_frames=1))
    except ClipError as error:
        raise UserError(f"{file} gives no image ({error}); give a video or an image file") from error


def _pick(container: av.container.InputContainer, stream: av.VideoStream, clip: ClipFormat) -> Iterator[av.VideoFrame]:
    """Yield ``clip.num_frames`` decoded frames nearest to the wanted times; stops decoding after the last."""
    # Exact rationals: with floats 30 fps -> 16 fps picks another frame wherever k/16 rounds across a frame boundary.
    step = 1 / Fraction(clip.fps).limit_denominator(1001)
    wanted, previous, previous_time, start, decoded = 0, None, Fraction(0), None, 0
    for frame in container.decode(stream):
        if frame.pts is None or frame.time_base is None:
            raise ClipError("has frames without time stamps")
        # The decoder conceals damage: it hands out smeared frames that look like data, and draws later ones from them.
        if frame.is_corrupt:
            raise ClipError(f"is damaged at {frame.time:.2f} s")
        if frame.width * frame.height > _MAX_PIXELS:
            raise ClipError(f"has frames of {frame.width} x {frame.height} pixels, more than any camera's")
        decoded += 1
        time = frame.pts * frame.time_base
        start = time if start is None else start
        time -= start
        while previous is not None and wanted * step <= (previous_time + time) / 2:
            yield previous
            wanted += 1
            if wanted == clip.num_frames:
                return
        previous, previous_time = frame, time
    if previous is None:
        raise ClipError("holds no frame that can be decoded")
    duration = previous.duration * previous.time_base if previous.duration else None
    if duration is None:
        duration = 1 / stream.average_rate if stream.average_rate else step
    end = previous_time + duration
    while wanted < clip.num_frames and wanted * step < end:
        yield previous
        wanted += 1
    if wanted < clip.num_frames:
        needs = (clip.num_frames - 1) * step
        raise ClipError(
            f"is too short: {decoded} frames, {float(end):.2f} s; {clip.num_frames} frames at {clip.fps:g} fps need "
            f"more than {float(needs):.2f} s"
        )


def _pixel_aspect(stream: av.VideoStream) -> Fraction:
    """Width of one pixel over its height; 1 where the file does not say."""
    aspect = stream.sample_aspect_ratio
    return Fraction(aspect) if aspect else Fraction(1)


def frame_to_tensor(
    frame: av.VideoFrame, height: int, width: int, pixel_aspect: Fraction = Fraction(1)
) -> torch.Tensor:
    """One decoded frame as float32 (3, ``height``, ``width``) in [-1, 1], upright, centre-cropped and resized."""
    from av.video.reformatter import Interpolation as To

    # swscale's default drops half of the chroma resolution and rounds coarsely; both would reach the VAE.
    to_rgb = To.BICUBIC | To.FULL_CHR_H_INT | To.ACCURATE_RND
    rgb_HWC = torch.from_numpy(frame.to_ndarray(format="rgb24", interpolation=to_rgb))
    turns, rest = divmod(round(frame.rotation), 90)  # degrees counter-clockwise, as phones store portrait clips
    if rest:
        raise ClipError(f"is rotated by {frame.rotation} degrees; only multiples of 90 can be turned upright")
    if turns % 4:
        rgb_HWC = torch.rot90(rgb_HWC, turns % 4, dims=(0, 1))
    if turns % 2:
        pixel_aspect = 1 / pixel_aspect
    return crop_and_resize(rgb_HWC, height, width, pixel_aspect)


def crop_and_resize(
    rgb_HWC: torch.Tensor, height: int, width: int, pixel_aspect: Fraction = Fraction(1)
) -> torch.Tensor:
    """Largest centred part of uint8 ``rgb_HWC`` of the wanted aspect, resized: float32 (3, height, width), [-1, 1]."""
    source_height, source_width = rgb_HWC.shape[:2]
    aspect = Fraction(width, height) / pixel_aspect  # in source pixels
    crop_width = min(source_width, max(1, round(source_height * aspect)))
    crop_height = min(source_height, max(1, round(source_width / aspect)))
    top, left = (source_height - crop_height) // 2, (source_width - crop_width) // 2
    # Cropped while still uint8: a float copy of a whole 4K frame is 100 MB.
    crop = rgb_HWC[top : top + crop_height, left : left + crop_width].permute(2, 0, 1)[None].float()
    # Without antialias a large reduction picks single pixels and thin lines flicker from frame to frame.
    small = F.interpolate(crop, size=(height, width), mode="bicubic", antialias=True, align_corners=False)
    return small[0].clamp_(0, 255).div_(127.5).sub_(1)  # bicubic overshoots at edges
