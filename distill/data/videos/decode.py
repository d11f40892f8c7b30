"""Decode one video file into a clip of T frames of fixed size, H x W, in the channels red, green, blue (PyAV)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
import torch.nn.functional as F

from distill.data.videos.colors import is_turned, other_colors, to_bt709, upright
from distill.data.videos.container import MOST_B_FRAMES, ClipError, TimesError, VideoFile, opened, timed_frames
from fsdp_cp.choices import Bounds, Checked

if TYPE_CHECKING:
    import av

logger = logging.getLogger(__name__)

# Decoding rules that change pixels must change this name: it is part of every latent's key.
DECODER_VERSION = "nearest-time, centre crop, bicubic antialiased, 1"

MAX_SIZE = 65536
"""Frames of a clip, and pixels of its sides, at most: far above any network's, and below what fills a memory."""
_LEAST_FPS = 0.01
_MAX_PIXELS = 2**26  # of a source's frame, twice 8K: a damaged header may claim any size


@dataclass(kw_only=True, slots=True, frozen=True)
class ClipFormat(Checked):
    """Length, size and rate of clips."""

    prefix = "data."

    num_frames: Annotated[int, Bounds(most=MAX_SIZE)]
    height: Annotated[int, Bounds(most=MAX_SIZE)]
    width: Annotated[int, Bounds(most=MAX_SIZE)]
    fps: Annotated[float, Bounds(least=_LEAST_FPS, most=1000.0)]
    """Frames per second at which the source is sampled, of those that mp4 files can say."""


class SoundFormat(NamedTuple):
    """Waveform that goes with a clip. It begins with the first frame."""

    rate: int
    """Samples per second."""
    samples: int
    """Samples of each channel: those of exactly the clip's audio latents, which the clip's length rounds to."""
    channels: int
    """1 or 2."""


def read_clip(file: VideoFile, clip: ClipFormat) -> torch.Tensor:
    """Return the first ``clip.num_frames`` frames of ``file``, sampled at ``clip.fps``, resized and center-cropped.

    The picked frame is the one nearest in time to ``k / fps`` after the first frame (of two equally near, the earlier),
    so variable frame rates and rounded time stamps sample evenly. A source slower than ``fps`` repeats frames. Where
    the times of frames do not grow, frames count in the decoder's order at the average rate.

    Colors follow the stream's own matrix and range; an untagged stream is read as BT.601 limited range, as swscale (so
    ffmpeg, imageio and diffusers' ``export_to_video``) writes and reads it. HDR and wide-gamut colors are converted.
    Pixel aspect and display matrix (rotation, mirroring) in the file are applied.

    Returns: float32 (3, T, H, W) in [-1, 1].
    Raises: ``ClipError`` with the reason if the file is missing, broken, too short, interlaced, or changes its shape.
    """

    def resized(rgb_HWC: torch.Tensor, aspect: Fraction) -> torch.Tensor:
        return crop_and_resize(rgb_HWC, clip.height, clip.width, aspect)

    return torch.stack(_in_time_or_order(file, clip, resized), dim=1)


def read_frames(
    file: VideoFile, num_frames: int, fps: float, convert: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Return what ``convert`` makes of each frame, uint8 (H, W, 3) in its own size, of the first ``num_frames`` that
    :func:`read_clip` takes, or of all frames of a shorter video. Pixels count as square."""
    clip = ClipFormat(num_frames=num_frames, height=1, width=1, fps=fps)
    return _in_time_or_order(file, clip, lambda rgb_HWC, _: convert(rgb_HWC), can_end=True)


_Convert = Callable[[torch.Tensor, Fraction], torch.Tensor]
"""Function of a frame, uint8 (H, W, 3), and the width of a pixel over its height."""


def _in_time_or_order(
    file: VideoFile, clip: ClipFormat, convert: _Convert, *, can_end: bool = False
) -> list[torch.Tensor]:
    """Return the converted frames of a clip, of which a file may have fewer if it ``can_end``."""
    try:
        return _read(file, clip, convert, in_order=False, can_end=can_end)
    except TimesError as error:
        video = _read(file, clip, convert, in_order=True, can_end=can_end)
        logger.warning("%s: %s; its frames are taken in order, at its average rate", file, error)
        return video


def read_largest_part(file: VideoFile, clips: Sequence[ClipFormat]) -> tuple[torch.Tensor, ClipFormat]:
    """Return a clip in that one of several formats, and the format, which keeps most of the file's pixels x frames; of
    equals, the one with more pixels, then the earlier. None may enlarge frames; ``ClipError`` if none fits."""
    height, width, aspect = _frame_size(file)
    kept = {}
    for clip in clips:
        tall, wide = _crop(height, width, clip.height, clip.width, aspect)
        if tall >= clip.height and wide >= clip.width:
            kept[clip] = tall * wide * clip.num_frames, clip.height * clip.width
    problem, most = ClipError(f"has {width} x {height} pixels, too few for any size"), MAX_SIZE
    for clip in sorted(kept, key=kept.__getitem__, reverse=True):
        if clip.num_frames <= most:
            try:
                return read_clip(file, clip), clip
            except _TooShort as error:
                problem, most = error, error.frames
    raise problem


def _frame_size(file: VideoFile) -> tuple[int, int, Fraction]:
    """Return height and width of the first frame as it is shown, and the width of a pixel over its height."""
    with opened(file) as (container, stream):
        frame = next(container.decode(stream), None)
        if frame is None:
            raise ClipError("holds no frame that can be decoded")
        aspect = Fraction(stream.sample_aspect_ratio or 1)
        return (frame.width, frame.height, 1 / aspect) if is_turned(frame) else (frame.height, frame.width, aspect)


class _TooShort(ClipError):
    """A clip has only so many ``frames``."""

    def __init__(self, message: str, frames: int) -> None:
        super().__init__(message)
        self.frames = frames


def _read(file: VideoFile, clip: ClipFormat, convert: _Convert, *, in_order: bool, can_end: bool) -> list[torch.Tensor]:
    """Return the clip's frames, by their times or in their order; raise ``TimesError`` where times cannot be used."""
    frames: list[torch.Tensor] = []
    conversions: _Conversions = {}
    ends = suppress(_TooShort) if can_end else nullcontext()
    with opened(file) as (container, stream), ends:
        first: av.VideoFrame | None = None
        last: av.VideoFrame | None = None
        timed = timed_frames(file, container, stream, in_order=in_order)
        for frame in _pick(timed, stream, clip, in_order=in_order):
            if frame is not last:  # a repeated frame is converted once
                first = first or frame
                _check_shape(frame, first, stream)
                colors = other_colors(frame)
                if colors and frame is first:
                    logger.info("%s: is %s, converted to BT.709", file, colors)
                rgb, aspect = _to_rgb(_in_bt709(frame, conversions) if colors else frame, stream)
                last, small = frame, convert(rgb, aspect)
            frames.append(small)
        if stream.average_rate and stream.average_rate < clip.fps * 0.999:
            rate = float(stream.average_rate)
            logger.warning("%s: its %.3g fps are below data.fps=%g, frames repeat", file, rate, clip.fps)
    return frames


def _check_decoded(frame: av.VideoFrame, time: Fraction) -> None:
    # The decoder conceals damage: it hands out smeared frames that look like data, and draws later ones from them.
    if frame.is_corrupt:
        raise ClipError(f"is damaged at {float(time):.2f} s")
    if frame.width * frame.height > _MAX_PIXELS:
        raise ClipError(f"has frames of {frame.width} x {frame.height} pixels, more than any camera's")


def _check_shape(frame: av.VideoFrame, first: av.VideoFrame, stream: av.VideoStream) -> None:
    """Refuse an interlaced frame, and one of another shape than the clip's first."""
    if frame.interlaced_frame and stream.codec_context.name != "png":  # Adam7 is not fields
        raise ClipError("is interlaced, so its moving edges are combs; deinterlace it")
    # Recordings of calls change their size with the bandwidth, which is fine, or turn with the phone.
    if abs(frame.width * first.height / (frame.height * first.width) - 1) > 0.02:
        sizes = f"{first.width} x {first.height} to {frame.width} x {frame.height}"
        raise ClipError(f"changes its shape from {sizes}")


_Conversions = dict[tuple[int, int, str], Callable[["av.VideoFrame"], "av.VideoFrame"]]


def _in_bt709(frame: av.VideoFrame, conversions: _Conversions) -> av.VideoFrame:
    """Return a frame in the standard range of colors, by the conversion of frames of its size and format."""
    takes = (frame.width, frame.height, frame.format.name)
    convert = conversions[takes] = conversions.get(takes) or to_bt709(frame)
    return convert(frame)


def _to_rgb(shown: av.VideoFrame, stream: av.VideoStream) -> tuple[torch.Tensor, Fraction]:
    """Return a frame upright, uint8 (H, W, 3), and the width of a pixel over its height."""
    from av.video.reformatter import Interpolation as To

    # swscale's default drops half of the chroma resolution and rounds coarsely; the VAE would see both.
    to_rgb = To.BICUBIC | To.FULL_CHR_H_INT | To.ACCURATE_RND
    rgb_HWC = torch.from_numpy(shown.to_ndarray(format="rgb24", interpolation=to_rgb))
    aspect = Fraction(stream.sample_aspect_ratio or 1)
    aspect = 1 / aspect if is_turned(shown) else aspect
    return upright(rgb_HWC, shown), aspect


def first_frame(file: VideoFile, clip: ClipFormat) -> torch.Tensor:
    """Return a video's first frame, or an image, resized and cropped by :func:`read_clip`: (3, 1, H, W) in [-1, 1]."""
    return read_clip(file, replace(clip, num_frames=1))


def read_picture(file: VideoFile) -> torch.Tensor:
    """Return a video's first frame, or an image, in its own size: uint8 (H, W, 3). Raises ``ClipError``."""
    return read_frames(file, 1, _LEAST_FPS, lambda rgb_HWC: rgb_HWC)[0]


def _pick(
    timed: Iterator[tuple[av.VideoFrame, Fraction]], stream: av.VideoStream, clip: ClipFormat, *, in_order: bool
) -> Iterator[av.VideoFrame]:
    """Yield ``clip.num_frames`` decoded frames nearest to the wanted times; stops decoding after the last."""
    # Exact rationals: with floats 30 fps -> 16 fps picks another frame wherever k/16 rounds across a frame boundary.
    step = 1 / Fraction(clip.fps).limit_denominator(1001)
    rate = stream.average_rate or None
    wanted, previous, previous_time, decoded = 0, None, Fraction(0), 0
    start: Fraction | None = None
    for frame, stamp in timed:
        start = stamp if start is None else start
        time = stamp - start
        _check_decoded(frame, time)
        decoded += 1
        while previous is not None and wanted * step <= (previous_time + time) / 2:
            yield previous
            wanted += 1
            if wanted == clip.num_frames:
                # Times in the order of packets show only after as many frames as there are B-frames in a row.
                deque(islice(timed, MOST_B_FRAMES if stream.codec_context.has_b_frames else 0), maxlen=0)
                return
        previous, previous_time = frame, time
    if previous is None:
        raise ClipError("holds no frame there that can be decoded")
    if previous.duration and not in_order:
        duration = previous.duration * previous.time_base
    else:
        duration = 1 / rate if rate else step
    end = previous_time + duration
    while wanted < clip.num_frames and wanted * step < end:
        yield previous
        wanted += 1
    if wanted < clip.num_frames:
        needs = (clip.num_frames - 1) * step
        needs = f"{clip.num_frames} frames at {clip.fps:g} fps need more than {float(needs):.2f} s"
        raise _TooShort(f"is too short: {decoded} frames, {float(end):.2f} s; {needs}", wanted)


def _crop(
    source_height: int, source_width: int, height: int, width: int, pixel_aspect: Fraction
) -> tuple[Fraction, Fraction]:
    """Return height and width, in source pixels, of the largest part of a frame with the aspect of the given size."""
    aspect = Fraction(width, height) / pixel_aspect
    return min(Fraction(source_height), source_width / aspect), min(Fraction(source_width), source_height * aspect)


def crop_and_resize(
    rgb_HWC: torch.Tensor, height: int, width: int, pixel_aspect: Fraction = Fraction(1)
) -> torch.Tensor:
    """Return the largest centered part of uint8 ``rgb_HWC`` of the wanted aspect, resized: float32 (3, height, width),
    from -1 to 1."""
    source_height, source_width = rgb_HWC.shape[:2]
    sides = _crop(source_height, source_width, height, width, pixel_aspect)
    crop_height, crop_width = (max(1, round(side)) for side in sides)
    top, left = (source_height - crop_height) // 2, (source_width - crop_width) // 2
    # Cropped while still uint8: a float copy of a whole 4K frame is 100 MB.
    crop = rgb_HWC[top : top + crop_height, left : left + crop_width].permute(2, 0, 1)[None].float()
    # Without antialias a large reduction picks single pixels and thin lines flicker from frame to frame.
    small = F.interpolate(crop, size=(height, width), mode="bicubic", antialias=True, align_corners=False)
    return small[0].clamp_(0, 255).div_(127.5).sub_(1)  # bicubic overshoots at edges
