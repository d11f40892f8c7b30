"""Orientation, fields and colors of a decoded frame, as its file says that it must be shown."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from distill.data.videos.container import ClipError

if TYPE_CHECKING:
    import av

_PQ, _HLG = 16, 18  # color_trc, as in ITU-T H.273
_OTHER_CURVES = {8: "linear light", 9: "a logarithmic curve", 10: "a logarithmic curve", 17: "SMPTE ST 428's curve"}
_WIDE = {9: "BT.2020", 11: "DCI-P3", 12: "Display P3"}  # color_primaries
_TO_BT709 = (
    # Other intents clip what is brighter than the reference white of 203 cd/m2. The result is for a BT.1886 display.
    "out_transfer=bt709:out_primaries=bt709:intent=perceptual:flags=bicubic+full_chroma_int+accurate_rnd"
)


def upright(rgb_HWC: torch.Tensor, frame: av.VideoFrame) -> torch.Tensor:
    """Return the picture turned and mirrored by the frame's display matrix (phones, front cameras, EXIF)."""
    a, b, c, d = _directions(frame)
    if b or c:  # columns become rows
        rgb_HWC = rgb_HWC.transpose(0, 1)
    return rgb_HWC.flip([dim for dim, sign in ((0, b + d), (1, a + c)) if sign < 0])


def is_turned(frame: av.VideoFrame) -> bool:
    """Whether :func:`upright` exchanges height and width."""
    return _directions(frame)[1] != 0


def _directions(frame: av.VideoFrame) -> tuple[int, int, int, int]:
    """Return the signs of a, b, c, d in x' = a x + c y, y' = b x + d y (y down)."""
    data = _side_data(frame).get("DISPLAYMATRIX")
    if data is None:
        return 1, 0, 0, 1
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(data))
    small = max(map(abs, (a, b, c, d))) / 100
    a, b, c, d = (0 if abs(value) <= small else 1 if value > 0 else -1 for value in (a, b, c, d))
    if abs(a * d - b * c) != 1:
        raise ClipError(f"is rotated by {frame.rotation} degrees; only multiples of 90 can be turned upright")
    return a, b, c, d


def _side_data(frame: av.VideoFrame) -> Mapping[str, Any]:
    try:
        return frame.side_data
    except ValueError:  # PyAV 18 knows no type above 27, and images with EXIF have one
        return _through(frame, [("sidedata", f"mode=delete:type={kind}") for kind in range(28, 40)])(frame).side_data


def _through(frame: av.VideoFrame, filters: list[tuple[str, str]]) -> Any:
    """Return a function that passes frames of this one's size and format through FFmpeg's ``filters``."""
    from av.filter import Graph

    graph = Graph()
    last = graph.add_buffer(width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base or 1)
    for name, options in [*filters, ("buffersink", "")]:
        following = graph.add(name, options)
        last.link_to(following)
        last = following
    graph.configure()

    def convert(picture: av.VideoFrame) -> av.VideoFrame:
        graph.push(picture)
        return graph.pull()

    return convert


def other_colors(frame: av.VideoFrame) -> str:
    """Name the frame's colors if they are not the standard range; :class:`ClipError` if they cannot be converted."""
    if frame.color_trc in _OTHER_CURVES:
        raise ClipError(f"has colors in {_OTHER_CURVES[frame.color_trc]}; convert it to BT.709")
    if frame.colorspace == 8 or frame.colorspace > 10:  # swscale would take BT.601's instead
        raise ClipError(f"has a color matrix that FFmpeg cannot convert ({frame.colorspace} of H.273); use BT.709's")
    side_data = _side_data(frame)
    if frame.color_trc == _PQ and "MASTERING_DISPLAY_METADATA" not in side_data:
        raise ClipError("is HDR (PQ) and does not say how bright its highlights are; convert it to BT.709")
    if "DOVI_RPU_BUFFER" in side_data and frame.color_trc not in (_PQ, _HLG):
        raise ClipError("is Dolby Vision of profile 5, which no other decoder shows right; convert it to BT.709")
    named = {_PQ: "HDR (PQ)", _HLG: "HDR (HLG)"}
    return named.get(frame.color_trc) or _WIDE.get(frame.color_primaries, "")


def to_bt709(frame: av.VideoFrame) -> Any:
    """Return a function that converts HDR and wide-gamut frames of this one's size and format to 8-bit RGB in BT.709.
    FFmpeg's ``scale`` compresses highlights; its table takes 4 s of a core on the first frame."""
    return _through(frame, [("scale", _TO_BT709), ("format", "rgb24")])
