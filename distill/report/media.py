"""Clips as files: mp4 videos, contact sheets and small pictures for pages.

Clips are uint8 RGB arrays, one clip (T, H, W, 3), several (n, T, H, W, 3).  Tiny clips (the quickstart's are a few
dozen pixels wide) are enlarged by whole factors without smoothing, so that what one sees is what the model drew.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import uuid
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    import av.container

# In order of preference.  The av wheel brings libx264; a distribution's own FFmpeg may lack it.
_ENCODERS: tuple[tuple[str, dict[str, str]], ...] = (
    ("libx264", {"crf": "10", "preset": "medium"}),
    ("libopenh264", {"b": "8000000"}),
    ("mpeg4", {"qscale": "2"}),
)
_BT601, _LIMITED_RANGE = 5, 1  # AVColorSpace and AVColorRange: what swscale writes for rgb24 -> yuv420p


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a path beside `path` (same suffix, so that formats are still told by name) and moves it there on success.

    A reader never sees half a file; a failure inside leaves the old file as it was and no rubbish behind."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name that nobody else has: two nodes may share the folder, and process numbers with it.
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.tmp{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def watchable_scale(height: int, width: int, *, target: int = 256) -> int:
    """The whole factor that brings the longer side of a small clip to at least `target` pixels; 1 for larger clips."""
    return max(1, -(-target // max(height, width)))


def write_mp4(path: str | os.PathLike[str], frames: np.ndarray, fps: float, scale: int | None = 1) -> None:
    """Writes one clip as an mp4 (H.264, yuv420p, plays everywhere).

    `frames`: uint8 (T, H, W, 3), T >= 1.  `fps`: frames per second, may be fractional.  `scale`: whole factor of
    enlargement without smoothing; None takes `watchable_scale`.  An odd side that is left gets its last row or column
    twice, since yuv420p has one colour sample for 2 x 2 pixels.  Raises ValueError for another shape, type or rate."""
    import av  # lazily: training without samples does not need FFmpeg

    _check_clips(frames, 4)
    if not fps > 0:
        raise ValueError(f"fps={fps} is not a frame rate; give a number above 0, such as 8")
    scale = watchable_scale(*frames.shape[1:3]) if scale is None else scale
    if scale < 1:
        raise ValueError(f"scale={scale} does not enlarge; give a whole number from 1 on")
    frames = frames.repeat(scale, axis=1).repeat(scale, axis=2)
    frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    name, options = next((e for e in _ENCODERS if e[0] in av.codecs_available), (None, {}))
    if name is None:
        raise RuntimeError(f"this build of PyAV has none of {', '.join(e[0] for e in _ENCODERS)}; pip install av")
    with atomic_path(path) as temporary, av.open(str(temporary), "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream(name, rate=Fraction(fps).limit_denominator(1001), options=options)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        # Untagged files are shown as BT.709 by some players, which shifts every colour.
        stream.codec_context.colorspace, stream.codec_context.color_range = _BT601, _LIMITED_RANGE
        _encode(container, stream, frames)


def _encode(container: av.container.OutputContainer, stream: av.VideoStream, frames: np.ndarray) -> None:
    import av

    for array in frames:
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
        picture = picture.reformat(format="yuv420p", dst_colorspace=_BT601, dst_color_range=_LIMITED_RANGE)
        container.mux(stream.encode(picture))
    container.mux(stream.encode())


def pick_frames(total: int, most: int | None) -> list[int]:
    """At most `most` evenly spaced frame numbers of 0 .. total - 1, in time order, first and last included."""
    if most is None or most >= total:
        return list(range(total))
    return [round(i) for i in np.linspace(0, total - 1, most)] if most > 1 else [0]


def strip(clip: np.ndarray, *, frames: int | None = None, gap: int = 0) -> np.ndarray:
    """One clip (T, H, W, 3) as a picture (H, columns, 4), RGBA: its frames from left to right, `gap` pixels apart.

    `frames`: at most so many, evenly spaced from the first to the last; None means all.  The gaps are transparent."""
    _check_clips(clip, 4)
    shown = np.pad(clip[pick_frames(len(clip), frames)], ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=255)
    spaced = np.pad(shown, ((0, 0), (0, 0), (0, gap), (0, 0)))
    wide = spaced.transpose(1, 0, 2, 3).reshape(shown.shape[1], -1, 4)
    return wide[:, : wide.shape[1] - gap]


def resize(clip: np.ndarray, height: int, width: int) -> np.ndarray:
    """One clip (T, H, W, 3) at another size: without smoothing to a larger one, with it to a smaller one."""
    _check_clips(clip, 4)
    how = Image.Resampling.NEAREST if height >= clip.shape[1] else Image.Resampling.LANCZOS
    return np.stack([np.asarray(Image.fromarray(frame).resize((width, height), how)) for frame in clip])


def picture_bytes(picture: np.ndarray, format: str = "PNG") -> bytes:
    """A still, uint8 RGB or RGBA (H, W, 3 or 4), as PNG or (without its alpha) as JPEG bytes."""
    buffer = io.BytesIO()
    if format == "JPEG":
        Image.fromarray(picture[..., :3]).save(buffer, format, quality=85)
    else:
        Image.fromarray(picture).save(buffer, format, optimize=True)
    return buffer.getvalue()


def gif_bytes(clip: np.ndarray, fps: float, *, longest: int = 320) -> tuple[bytes, tuple[int, int]]:
    """One clip (T, H, W, 3) as a GIF that loops for ever, and its size (height, width) in pixels.

    Small clips are enlarged as by `watchable_scale`, larger ones shrunk to `longest` pixels on the longer side: a GIF
    of 480 x 832 pixels and 81 frames would weigh tens of MB.  Each frame has 256 colours of its own.  GIF counts time
    in hundredths of a second and players take less than two of them for ten, so frames are shown for at least two, and
    the lengths are rounded so that their sum stays right.  Raises ValueError for another shape, type or rate."""
    _check_clips(clip, 4)
    if not (fps > 0 and math.isfinite(fps)):
        raise ValueError(f"fps={fps} is not a frame rate; give a number above 0, such as 8")
    factor = min(float(watchable_scale(*clip.shape[1:3])), longest / max(clip.shape[1:3]))
    factor = factor if factor < 1 else math.floor(factor)
    height, width = (max(1, round(side * factor)) for side in clip.shape[1:3])
    frames = [Image.fromarray(frame).quantize(256) for frame in resize(clip, height, width)]
    ends = [round(100 * (i + 1) / fps) for i in range(len(frames))]
    durations = [10 * max(2, end - start) for start, end in zip([0, *ends], ends, strict=False)]
    buffer = io.BytesIO()
    frames[0].save(
        buffer, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0, disposal=1, optimize=False
    )
    return buffer.getvalue(), (height, width)


def contact_sheet(
    path: str | os.PathLike[str] | None,
    rows: Sequence[tuple[str, np.ndarray]],
    *,
    captions: Sequence[str] = (),
    notes: Sequence[str] = (),
    colours: Sequence[str] = (),
    title: str = "",
    frames: int | None = 8,
    width: int = 1600,
) -> Image.Image:
    """A labelled picture of clips: one row per model, in it one column per clip, in that the frames in time order.

    `rows`: (label, clips uint8 (n, T, H, W, 3)); T, H, W may differ between rows, n too (missing cells stay empty).
    `captions` head the columns, `notes` (one per row) stand small below the labels, `colours` (one per row) mark them.
    `frames`: at most so many of each clip, evenly spaced.  `width`: about how wide the picture becomes, in pixels:
    tiny clips are enlarged by the whole factor that fits (to 32 to 128 pixels a frame), large ones shrunk.
    Returns the picture and, if `path` is not None, writes it as PNG.
    Raises ValueError for no rows or clips of another shape."""
    if not rows:
        raise ValueError("a contact sheet needs at least one row of clips")
    for _, clips in rows:
        _check_clips(clips, 5)
    columns = max(len(clips) for _, clips in rows)
    picked = [clips[:, pick_frames(clips.shape[1], frames)] for _, clips in rows]
    label_font, note_font, title_font = _font(19, bold=True), _font(15), _font(26, bold=True)
    lengths = [label_font.getlength(label) for label, _ in rows] + [note_font.getlength(note) for note in notes]
    label_width = 40 + min(280, math.ceil(max(lengths)))
    margin, column_gap, row_gap, frame_gap = 24, 28, 14, 3

    height_px, width_px = picked[0].shape[2:4]
    most = max(clips.shape[1] for clips in picked)
    room = (width - 2 * margin - label_width - column_gap * columns) / columns - frame_gap * (most - 1)
    factor = room / most / width_px
    if factor >= 1 or width_px <= 96:
        # Whole; no smaller than one can see, at the cost of the width; no larger than a frame needs, with few of them.
        factor = max(min(int(factor), 128 // width_px), 32 // width_px, 1)
    cell = (max(1, round(width_px * factor)), max(1, round(height_px * factor)))
    column_width = most * cell[0] + (most - 1) * frame_gap
    heads = [_wrap(caption, note_font, column_width, lines=4) for caption in captions[:columns]]
    labels = [_wrap(label, label_font, label_width - 40, lines=3) for label, _ in rows]
    small = [_wrap(note, note_font, label_width - 40, lines=2) for note in notes] + [[]] * (len(rows) - len(notes))
    text_heights = [24 * len(a) + 20 * len(b) for a, b in zip(labels, small, strict=True)]
    row_height = max(cell[1], *text_heights)

    top = margin + (46 if title else 0)
    head_height = 20 * max(map(len, heads), default=0) + (12 if heads else 0)
    sheet_width = 2 * margin + label_width + columns * (column_width + column_gap) - column_gap
    if title:
        sheet_width = max(sheet_width, 2 * margin + round(title_font.getlength(title)))
    sheet_height = top + head_height + len(rows) * (row_height + row_gap) - row_gap + margin
    sheet = Image.new("RGB", (sheet_width, sheet_height), "#ffffff")
    draw = ImageDraw.Draw(sheet)
    draw.text((margin, margin - 4), title, fill="#16191d", font=title_font)
    for column, lines in enumerate(heads):
        x = margin + label_width + column * (column_width + column_gap)
        y = top + head_height - 12 - 20 * len(lines)
        _write(draw, (x, y), lines, note_font, "#3f4750", pitch=20)
    for i, clips in enumerate(picked):
        y = top + head_height + i * (row_height + row_gap)
        if i < len(colours):
            draw.rounded_rectangle((margin, y, margin + 5, y + row_height - 1), radius=2, fill=colours[i])
        text_y = y + (row_height - text_heights[i]) / 2
        _write(draw, (margin + 16, text_y), labels[i], label_font, "#16191d", pitch=24)
        _write(draw, (margin + 16, text_y + 24 * len(labels[i])), small[i], note_font, "#5b646e", pitch=20)
        for j, clip in enumerate(clips):
            for k, frame in enumerate(resize(clip, cell[1], cell[0])):
                x = margin + label_width + j * (column_width + column_gap) + k * (cell[0] + frame_gap)
                sheet.paste(Image.fromarray(frame), (x, y + (row_height - cell[1]) // 2))
    if path is not None:
        with atomic_path(path) as temporary:
            sheet.save(temporary, "PNG", optimize=True)
    return sheet


def _check_clips(clips: np.ndarray, dims: int) -> None:
    shape = "(T, H, W, 3)" if dims == 4 else "(n, T, H, W, 3)"
    if not isinstance(clips, np.ndarray) or clips.dtype != np.uint8:
        raise ValueError(f"clips must be a uint8 NumPy array, not {getattr(clips, 'dtype', type(clips).__name__)}")
    if clips.ndim != dims or clips.shape[-1] != 3 or 0 in clips.shape:
        raise ValueError(f"clips of shape {clips.shape} are not {shape} with at least one frame")


@lru_cache
def _font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans as matplotlib ships it: the same on every machine, whatever fonts are installed."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), size)


def _write(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    lines: list[str],
    font: ImageFont.FreeTypeFont,
    fill: str,
    *,
    pitch: int,
) -> None:
    for i, line in enumerate(lines):
        draw.text((at[0], at[1] + i * pitch), line, fill=fill, font=font)


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: float, *, lines: int) -> list[str]:
    """Words of `text` in at most `lines` lines of at most `width` pixels; what is cut off shows as an ellipsis."""
    done: list[str] = []
    for word in text.split():
        if done and font.getlength(f"{done[-1]} {word}") <= width:
            done[-1] += f" {word}"
        else:
            done.append(word)
    cut, done = len(done) > lines, done[:lines]
    for i, line in enumerate(done):
        shortened = line + ("…" if cut and i == len(done) - 1 else "")
        while len(shortened) > 1 and font.getlength(shortened) > width:
            shortened = shortened.rstrip("…")[:-1] + "…"
        done[i] = shortened
    return done
