"""Clips as files: mp4 videos, contact sheets and small pictures for pages. Clips are uint8 RGB, (T, H, W, 3) each.

Tiny clips (the quickstart's are 16 pixels wide) are enlarged by whole factors without smoothing, to show the pixels.
"""

import io
import textwrap
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fsdp_cp.files.atomic_file import atomic_path

_BT601, _LIMITED_RANGE = 5, 1  # AVColorSpace and AVColorRange: what swscale writes for rgb24 -> yuv420p


def fitted_size(height: int, width: int, *, target: int) -> tuple[int, int]:
    """Return (height, width), about `target` pixels wide; smaller clips are scaled by a whole factor."""
    scale = target // width or target / width
    return max(1, round(height * scale)), max(1, round(width * scale))


def enlarged(clip: np.ndarray) -> np.ndarray:
    """Return a clip of at least 256 pixels on the longer side."""
    scale = max(1, -(-256 // max(clip.shape[1:3])))
    return clip.repeat(scale, axis=1).repeat(scale, axis=2)


class Sound(NamedTuple):
    """Sound of one clip."""

    samples: np.ndarray
    """float32 (channels, samples) in [-1, 1], of one or two channels; values outside are clipped."""
    rate: int
    """Samples per second."""


_AAC_RATE = 48000
"""Samples per second to which faster sound is resampled: the AAC encoder refuses 192 kHz."""


def write_mp4(path: Path, frames: np.ndarray, fps: float, sound: Sound | None = None) -> None:
    """Write one clip, uint8 (T, H, W, 3), as an mp4 (H.264, yuv420p, plays everywhere) of at least 256 pixels on the
    longer side, at ``fps``, perhaps fractional. An odd side repeats its last row or column, since yuv420p has one color
    sample for 2 x 2 pixels. `sound` begins with the first frame (AAC)."""
    import av  # lazily: training without samples does not need FFmpeg

    frames = enlarged(frames)
    frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    rate = Fraction(fps).limit_denominator(1001)
    name, options = "libx264", {"crf": "10", "preset": "medium"}
    if name not in av.codecs_available:  # a distribution's FFmpeg; the av wheel has it
        name, options = "mpeg4", {"qscale": "2"}
    with atomic_path(path) as temporary, av.open(str(temporary), "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream(name, rate=rate, options=options)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        # Some players show untagged files as BT.709, which shifts every color.
        stream.codec_context.colorspace, stream.codec_context.color_range = _BT601, _LIMITED_RANGE
        if sound is not None:
            track = container.add_stream("aac", rate=min(sound.rate, _AAC_RATE))
            track.layout = {1: "mono", 2: "stereo"}[len(sound.samples)]
        for array in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
            picture = picture.reformat(format="yuv420p", dst_colorspace=_BT601, dst_color_range=_LIMITED_RANGE)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
        if sound is not None:
            # Trim it to the clip: some players would hold the last frame until the sound ends.
            count = min(sound.samples.shape[1], round(len(frames) / rate * sound.rate))
            samples = np.ascontiguousarray(sound.samples[:, :count].clip(-1, 1), dtype=np.float32)
            whole = av.AudioFrame.from_ndarray(samples, format="fltp", layout=track.layout.name)
            whole.sample_rate, whole.pts, whole.time_base = sound.rate, 0, Fraction(1, sound.rate)
            resampler = av.AudioResampler(format="fltp", layout=track.layout.name, rate=track.rate, frame_size=1024)
            for piece in chain(resampler.resample(whole), resampler.resample(None)):
                container.mux(track.encode(piece))
            container.mux(track.encode())


def write_clips(
    files: Sequence[Path], clips: Iterable[np.ndarray], sounds: Iterable[Sound] | None = None, *, fps: float
) -> None:
    """Write each clip, with its sound, by :func:`write_mp4`. FFmpeg's errors too are an ``OSError``."""
    import av

    try:
        for file, clip, sound in zip(files, clips, sounds or repeat(None), strict=False):
            write_mp4(file, clip, fps, sound)
    except av.FFmpegError as error:
        raise OSError(error.errno, error.strerror, str(files[0].parent)) from error


def write_webp(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write a piece of a clip, uint8 (T, H, W, 3), as an animation that a browser plays once: quicker than video."""
    first, *others = (Image.fromarray(frame) for frame in enlarged(frames))
    how = {"save_all": True, "append_images": others, "duration": round(1000 / fps), "loop": 1, "method": 0}
    with atomic_path(path) as temporary:
        first.save(temporary, "WEBP", quality=80, **how)


def pick_frames(total: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced frame numbers from 0 to total - 1, in order, including both ends."""
    return [round(i) for i in np.linspace(0, total - 1, min(most, total))]


def strip(clip: np.ndarray, *, gap: int = 0) -> np.ndarray:
    """Return the frames of one clip (T, H, W, 3) side by side, (H, columns, 3), `gap` white pixels apart."""
    spaced = np.pad(clip, ((0, 0), (0, 0), (0, gap), (0, 0)), constant_values=255)
    wide = spaced.transpose(1, 0, 2, 3).reshape(clip.shape[1], -1, 3)
    return wide[:, : wide.shape[1] - gap]


def resize(clip: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize one clip (T, H, W, 3). Enlarging does not smooth; shrinking does."""
    resampling = Image.Resampling.NEAREST if height >= clip.shape[1] else Image.Resampling.LANCZOS
    return np.stack([np.asarray(Image.fromarray(frame).resize((width, height), resampling)) for frame in clip])


def picture_bytes(picture: np.ndarray, format: str = "PNG") -> bytes:
    """Return a still, uint8 RGB (H, W, 3), as PNG or JPEG bytes."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format, optimize=True, quality=85)
    return buffer.getvalue()


def contact_sheet(
    path: Path, rows: Sequence[tuple[str, np.ndarray]], *, captions: Sequence[str], title: str = "", frames: int = 8
) -> Image.Image:
    """Write a labeled PNG of about 1600 pixels, one row per model (label, clips uint8 (n, T, H, W, 3), whose sizes
    may differ) and one column per clip with at most ``frames`` evenly spaced frames; return the picture."""
    width, gap, frame_gap, label_width = 1600, 24, 3, 240
    picked = [clips[:, pick_frames(clips.shape[1], frames)] for _, clips in rows]
    columns, most = (max(clips.shape[axis] for clips in picked) for axis in (0, 1))
    frame_width = ((width - label_width) / columns - gap) / most - frame_gap
    source = picked[0].shape[2:4]
    # Tiny frames get at least 32 pixels to be visible, even beyond `width`, and at most 128.
    size = fitted_size(*source, target=round(frame_width if source[1] > 96 else min(max(frame_width, 32), 128)))
    column_width = most * (size[1] + frame_gap)
    cells = [[_text(title, label_width), *(_text(caption, column_width, 15) for caption in captions[:columns])]]
    for (label, _), clips in zip(rows, picked, strict=True):
        pictures = [Image.fromarray(strip(resize(clip, *size), gap=frame_gap)) for clip in clips]
        cells.append([_text(label, label_width), *pictures])
    widths = [label_width, *[column_width] * columns]
    heights = [max(cell.height for cell in row) for row in cells]
    sheet = Image.new("RGB", (sum(widths) + gap * (len(widths) + 1), sum(heights) + gap * (len(heights) + 1)), "white")
    y = gap
    for row, height in zip(cells, heights, strict=True):
        x = gap
        for cell, cell_width in zip(row, widths, strict=False):
            sheet.paste(cell, (x, y))
            x += cell_width + gap
        y += height + gap
    with atomic_path(path) as temporary:
        sheet.save(temporary, "PNG", optimize=True)
    return sheet


def _text(text: str, width: int, size: int = 18) -> Image.Image:
    """Return a picture of at most four lines of text, on white."""
    lines = textwrap.wrap(text, max(8, 2 * width // size), max_lines=4, placeholder="…")
    picture = Image.new("RGB", (width, (size + 5) * max(1, len(lines))), "white")
    ImageDraw.Draw(picture).text((0, 0), "\n".join(lines), fill="#16191d", font=ImageFont.load_default(size))
    return picture
