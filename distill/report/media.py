"""Clips as files: mp4 videos, contact sheets and small pictures for pages. Clips are uint8 RGB, (T, H, W, 3) each.

Tiny clips (the quickstart's are 16 pixels wide) are enlarged by whole factors without smoothing, to show the pixels.
"""

import io
import os
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


def write_mp4(path: str | os.PathLike[str], frames: np.ndarray, fps: float, sound: Sound | None = None) -> None:
    """Write one clip, uint8 (T, H, W, 3), as an mp4 (H.264, yuv420p, plays everywhere) of at least 256 pixels on the
    longer side, at ``fps``, perhaps fractional. An odd side repeats its last row or column, since yuv420p has one color
    sample for 2 x 2 pixels. `sound` begins with the first frame (AAC)."""
    import av  # lazily: training without samples does not need FFmpeg

    frames = enlarged(frames)
    frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    name, options = "libx264", {"crf": "10", "preset": "medium"}
    if name not in av.codecs_available:  # a distribution's FFmpeg; the av wheel has it
        name, options = "mpeg4", {"qscale": "2"}
    with atomic_path(path) as temporary, av.open(str(temporary), "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream(name, rate=Fraction(fps).limit_denominator(1001), options=options)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        # Some players show untagged files as BT.709, which shifts every color.
        stream.codec_context.colorspace, stream.codec_context.color_range = _BT601, _LIMITED_RANGE
        track = None if sound is None else container.add_stream("aac", rate=min(sound.rate, _AAC_RATE))
        if sound is not None and track is not None:
            track.layout = {1: "mono", 2: "stereo"}[len(sound.samples)]
        for array in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
            picture = picture.reformat(format="yuv420p", dst_colorspace=_BT601, dst_color_range=_LIMITED_RANGE)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
        if sound is not None and track is not None:
            # Trim it to the clip: some players would hold the last frame until the sound ends.
            count = min(sound.samples.shape[1], round(len(frames) / Fraction(fps).limit_denominator(1001) * sound.rate))
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


def write_webp(path: str | os.PathLike[str], frames: np.ndarray, fps: float) -> None:
    """Write a piece of a clip, uint8 (T, H, W, 3), as an animation that a browser plays once: quicker than video."""
    first, *others = (Image.fromarray(frame) for frame in enlarged(frames))
    how = {"save_all": True, "append_images": others, "duration": round(1000 / fps), "loop": 1, "method": 0}
    with atomic_path(path) as temporary:
        first.save(temporary, "WEBP", quality=80, **how)


def pick_frames(total: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced frame numbers from 0 to total - 1, in order, including both ends."""
    if most >= total:
        return list(range(total))
    return [round(i) for i in np.linspace(0, total - 1, most)] if most > 1 else [0]


def strip(clip: np.ndarray, *, gap: int = 0) -> np.ndarray:
    """Return the frames of one clip (T, H, W, 3) side by side, as RGBA (H, columns, 4), `gap` pixels apart."""
    opaque = np.pad(clip, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=255)
    spaced = np.pad(opaque, ((0, 0), (0, 0), (0, gap), (0, 0)))
    wide = spaced.transpose(1, 0, 2, 3).reshape(clip.shape[1], -1, 4)
    return wide[:, : wide.shape[1] - gap]


def resize(clip: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize one clip (T, H, W, 3). Enlarging does not smooth; shrinking does."""
    resampling = Image.Resampling.NEAREST if height >= clip.shape[1] else Image.Resampling.LANCZOS
    return np.stack([np.asarray(Image.fromarray(frame).resize((width, height), resampling)) for frame in clip])


def picture_bytes(picture: np.ndarray, format: str = "PNG") -> bytes:
    """Return a still, uint8 RGB or RGBA (H, W, 3 or 4), as PNG or (without its alpha) as JPEG bytes."""
    buffer = io.BytesIO()
    if format == "JPEG":
        Image.fromarray(picture[..., :3]).save(buffer, format, quality=85)
    else:
        Image.fromarray(picture).save(buffer, format, optimize=True)
    return buffer.getvalue()


def contact_sheet(
    path: str | os.PathLike[str],
    rows: Sequence[tuple[str, np.ndarray]],
    *,
    captions: Sequence[str],
    title: str = "",
    frames: int = 8,
) -> Image.Image:
    """Write a labeled PNG of about 1600 pixels, one row per model (label, clips uint8 (n, T, H, W, 3), whose sizes
    may differ) and one column per clip with at most ``frames`` evenly spaced frames; return the picture."""
    width, margin, gap, frame_gap, label_width = 1600, 24, 24, 3, 240
    picked = [clips[:, pick_frames(clips.shape[1], frames)] for _, clips in rows]
    columns, most = (max(clips.shape[axis] for clips in picked) for axis in (0, 1))
    frame_width = ((width - 2 * margin - label_width) / columns - gap) / most - frame_gap
    source = picked[0].shape[2:4]
    # Tiny frames get at least 32 pixels to be visible, even beyond `width`, and at most 128.
    size = fitted_size(*source, target=round(frame_width if source[1] > 96 else min(max(frame_width, 32), 128)))
    column_width = most * (size[1] + frame_gap) + gap
    heads = [_wrapped(caption, column_width - gap, lines=4) for caption in captions[:columns]]
    head_height = max(20 * (head.count("\n") + 1) for head in heads)
    top, row_height = margin + 46 * bool(title) + head_height, max(size[0], 66) + 14
    sheet_size = (2 * margin + label_width + columns * column_width, top + len(rows) * row_height + margin)
    sheet = Image.new("RGB", sheet_size, "#ffffff")
    draw = ImageDraw.Draw(sheet)
    text_font, label_font, title_font = (ImageFont.load_default(size) for size in (15, 18, 26))
    draw.text((margin, margin), title, fill="#16191d", font=title_font)
    for column, head in enumerate(heads):
        x = margin + label_width + column * column_width
        draw.text((x, top - 8), head, fill="#3f4750", font=text_font, anchor="ld")
    for i, ((label, _), clips) in enumerate(zip(rows, picked, strict=True)):
        y = top + i * row_height
        draw.text((margin + 14, y), _wrapped(label, label_width, lines=3), fill="#16191d", font=label_font)
        for column, clip in enumerate(clips):
            picture = Image.fromarray(strip(resize(clip, *size), gap=frame_gap))
            sheet.paste(picture, (margin + label_width + column * column_width, y), mask=picture)
    with atomic_path(path) as temporary:
        sheet.save(temporary, "PNG", optimize=True)
    return sheet


def _wrapped(text: str, width: int, *, lines: int) -> str:
    return textwrap.fill(text, max(8, width // 9), max_lines=lines, placeholder="…") or " "
