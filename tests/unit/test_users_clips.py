"""Clips and tables as users have them: orientation, times, colors and names, stored in unusual ways."""

import logging
import struct
import unicodedata
from fractions import Fraction
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from distill.data.videos.colors import other_colors
from distill.data.videos.container import ClipError
from distill.data.videos.decode import ClipFormat, first_frame, read_clip
from distill.data.videos.table import read_captions
from distill.data.videos.video_folder import read_metadata
from fsdp_cp.errors import UserError
from tests.unit.refused import refused
from tests.unit.test_clips import levels, numbers

B_FRAMES = {"x264-params": "bframes=3:b-adapt=0:scenecut=0:b-pyramid=none"}


def clip(num_frames=1, height=32, width=32):
    return ClipFormat(num_frames=num_frames, height=height, width=width, fps=8)


def write(file, pictures, codec="libx264", form=None, pix_fmt="yuv420p", options=None):
    """Write pictures of 8 fps; the size may change between them where the codec can."""
    with av.open(str(file), "w", format=form) as container:
        stream = container.add_stream(codec, rate=8, options=options or {})
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = pix_fmt
        for index, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts, frame.time_base = index, Fraction(1, 8)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file


def counted(first=0, last=24):
    """Return pictures whose gray tells their number."""
    return [np.full((32, 32, 3), 20 + 4 * k, np.uint8) for k in range(first, last)]


def remux(source, file, change):
    """Write the packets of ``source`` after calling ``change`` with each."""
    with av.open(str(source)) as old, av.open(str(file), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for packet in old.demux(old.streams.video[0]):
            if packet.size:
                change(packet)
                packet.stream = stream
                new.mux(packet)
    return file


# Orientation


def corners(height=32, width=48):
    picture = np.full((height, width, 3), 40, np.uint8)
    picture[:12, :12], picture[:12, -12:], picture[-12:, :12] = (230, 40, 40), (40, 230, 40), (40, 40, 230)
    return picture


def set_matrix(file, matrix):
    """Write a, b, c, d into the track's header."""
    a, b, c, d = (value << 16 for value in matrix)
    data = bytearray(file.read_bytes())
    at = data.index(b"tkhd") + 4 + 4 + 20 + 16
    data[at : at + 32] = struct.pack(">8i", a, b, 0, c, d, 0, 0, 0)
    file.write_bytes(data)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write(tmp_path_factory.mktemp("plain") / "a.mp4", [corners()] * 2).read_bytes()


@pytest.mark.parametrize(
    "matrix", [(a, 0, 0, d) for a in (1, -1) for d in (1, -1)] + [(0, b, c, 0) for b in (1, -1) for c in (1, -1)]
)
def test_the_whole_display_matrix_is_applied(tmp_path, plain, matrix):
    """x' = a x + c y, y' = b x + d y: each pixel moves to its place. Mirrored files get another key."""
    a, b, c, d = matrix
    (tmp_path / "a.mp4").write_bytes(plain)
    set_matrix(tmp_path / "a.mp4", matrix)
    source = corners()
    height, width = source.shape[:2] if a else source.shape[1::-1]
    y, x = np.mgrid[: source.shape[0], : source.shape[1]]
    wanted = np.zeros((height, width, 3), np.uint8)
    rows, columns = b * x + d * y, a * x + c * y
    wanted[rows - rows.min(), columns - columns.min()] = source
    shown = read_clip(tmp_path / "a.mp4", clip(height=height, width=width))[:, 0]
    difference = levels(shown) - torch.from_numpy(wanted).permute(2, 0, 1)
    assert difference.abs().mean() < 8, "a wrong corner alone makes 17"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_shown_as_their_exif_says(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(corners()).save(tmp_path / "a.png", exif=exif)
    wanted = torch.from_numpy(np.array(ImageOps.exif_transpose(Image.open(tmp_path / "a.png")))).permute(2, 0, 1)
    shown = first_frame(tmp_path / "a.png", clip(height=wanted.shape[1], width=wanted.shape[2]))[:, 0]
    assert torch.equal(levels(shown).round(), wanted.float())


# Time


def b_frames(folder):
    return write(folder / "b.avi", counted(), options=B_FRAMES)


def joined(folder):
    parts = [
        write(folder / f"{first}.ts", counted(first, last), "libx264", "mpegts", options=B_FRAMES).read_bytes()
        for first, last in ((0, 10), (10, 24))
    ]
    (folder / "joined.ts").write_bytes(b"".join(parts))
    return folder / "joined.ts"


def decoding_order(folder):
    source = write(folder / "source.mkv", counted(), options=B_FRAMES)
    return remux(source, folder / "order.mkv", lambda packet: setattr(packet, "pts", packet.dts or packet.pts))


@pytest.mark.parametrize("make", [b_frames, joined, decoding_order])
def test_frames_are_taken_in_order_where_their_times_do_not_grow(tmp_path, make, caplog):
    file = make(tmp_path)
    for frames in (2, 17, 24):
        caplog.clear()
        assert numbers(read_clip(file, clip(frames))) == list(range(frames))
        assert len(caplog.messages) == 1, "said once"
    with pytest.raises(ClipError, match="3.00 s"):
        read_clip(file, clip(25))


def test_a_raw_stream_without_a_rate_is_left_out(tmp_path):
    file = write(tmp_path / "a.h264", counted(), form="h264")
    with pytest.raises(ClipError):
        read_clip(file, clip(5))


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.mp4", "libx264", B_FRAMES),
        ("a.mkv", "libx264", B_FRAMES),
        ("a.ts", "libx264", B_FRAMES),
        ("a.mp4", "libx265", {"x265-params": "log-level=none"}),
        ("a.avi", "mpeg4", {"bf": "2", "b": "4M"}),
        ("a.webm", "libvpx-vp9", {}),
        ("a.mov", "mjpeg", {}),
    ],
)
def test_ordinary_files_keep_their_key(tmp_path, name, codec, options):
    """The cached latents of these files stay valid; another key would make every user encode every clip again."""
    pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    file = write(tmp_path / name, counted(), codec, pix_fmt=pix_fmt, options=options)
    assert numbers(read_clip(file, clip(24))) == list(range(24))


def test_a_trimmed_file_begins_where_its_edit_list_says(tmp_path):
    """`ffmpeg -ss ... -c copy` keeps the frames before the cut and hides them (vllm-project/vllm 48608)."""

    def earlier(packet):
        packet.pts, packet.dts = packet.pts - first, packet.dts - first

    source = write(tmp_path / "source.mp4", counted(), options={"bf": "0"})
    with av.open(str(source)) as container:
        first = round(5 / 8 / container.streams.video[0].time_base)
    assert numbers(read_clip(remux(source, tmp_path / "a.mp4", earlier), clip(19))) == list(range(5, 24))


# Other files that must not be read as they are


def cover_art_first(folder):
    """Write a film whose poster is its first video stream (UltraStar-Deluxe/USDX 948)."""
    file = folder / "a.mp4"
    write(folder / "film.mp4", counted(), options={"bf": "0"})
    poster = write(folder / "poster.jpg", counted(20, 21), "mjpeg", "image2", "yuvj420p").read_bytes()

    def box(kind, content):
        return struct.pack(">I4s", 8 + len(content), kind) + content

    data = (folder / "film.mp4").read_bytes()
    at = data.rindex(b"moov") - 4
    image = box(b"covr", box(b"data", struct.pack(">II", 13, 0) + poster))
    handler = box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9))
    tags = box(b"udta", box(b"meta", bytes(4) + handler + box(b"ilst", image)))
    file.write_bytes(data[:at] + box(b"moov", tags + data[at + 8 :]))
    with av.open(str(file)) as container:
        assert [stream.codec_context.name for stream in container.streams.video] == ["mjpeg", "h264"]
    return file


def test_cover_art_is_not_the_film(tmp_path):
    file = cover_art_first(tmp_path)
    assert numbers(read_clip(file, clip(24))) == list(range(24)) and numbers(first_frame(file, clip())) == [0]


def interlaced(folder):
    """Write an interlaced file, as of broadcasts and camcorders (n00mkrad/flowframes 375)."""
    return write(folder / "a.mp4", counted(), options={"x264-params": "tff=1"})


def other_shape(folder):
    """Write a call's recording that turns with the phone (radek-k/FFMediaToolkit 105)."""
    wide, high = ([np.full((height, width, 3), 90, np.uint8)] * 4 for height, width in ((32, 64), (64, 32)))
    parts = [write(folder / f"{i}.ts", some, form="mpegts").read_bytes() for i, some in enumerate((wide, high))]
    (folder / "a.ts").write_bytes(b"".join(parts))
    return folder / "a.ts"


def pq_without_peak(folder):
    params = "log-level=none:colorprim=bt2020:transfer=smpte2084:colormatrix=bt2020nc"
    return write(folder / "a.mp4", counted(), "libx265", None, "yuv420p10le", {"x265-params": params})


def ictcp(folder):
    """Write a file with a matrix that swscale does not know, and replaces by BT.601's."""
    return write(folder / "a.mp4", counted(), "libx265", options={"x265-params": "log-level=none:colormatrix=ictcp"})


@pytest.mark.parametrize("make", [interlaced, other_shape, pq_without_peak, ictcp])
def test_what_cannot_be_read_right_is_left_out(tmp_path, make):
    file = make(tmp_path)
    with pytest.raises(ClipError):
        read_clip(file, clip(8))


def test_dolby_vision_without_a_base_layer_is_left_out():
    """Profile 5 declares no colors but has Dolby's data. No encoder here writes it (mpv-player/mpv 7326)."""
    frame = SimpleNamespace(color_trc=2, color_primaries=2, colorspace=2, side_data={"DOVI_RPU_BUFFER": b""})
    with pytest.raises(ClipError):
        other_colors(frame)
    frame.color_trc = 18  # profile 8.4, of phones, is HLG
    assert other_colors(frame)


def test_a_call_that_changes_its_size_alone_is_read(tmp_path):
    pictures = [np.full((size, size, 3), 20 + 4 * k, np.uint8) for k, size in enumerate((32, 32, 64, 64))]
    parts = [write(tmp_path / f"{i}.ts", pictures[i : i + 2], form="mpegts").read_bytes() for i in (0, 2)]
    (tmp_path / "a.ts").write_bytes(b"".join(parts))
    assert numbers(read_clip(tmp_path / "a.ts", clip(4))) == [0, 1, 2, 3]


# HDR


def pq(light):
    """Return the signal for light in cd/m2: the inverse of BT.2100's PQ EOTF."""
    power = (np.asarray(light) / 10000) ** (2610 / 16384)
    return ((3424 / 4096 + 2413 / 128 * power) / (1 + 2392 / 128 * power)) ** (2523 / 32)


def hlg(light):
    """Return the signal for light of a 1,000 cd/m2 display: the inverse of BT.2100's HLG OOTF (gamma 1.2) and OETF."""
    luminance = np.maximum(light @ np.array([0.2627, 0.6780, 0.0593]), 1e-9)[:, None]
    scene = np.asarray(light) / 1000 * (luminance / 1000) ** (1 / 1.2 - 1)
    a = 0.17883277
    b, c = 1 - 4 * a, 0.5 - a * np.log(4 * a)
    return np.where(scene <= 1 / 12, np.sqrt(3 * scene), a * np.log(np.maximum(12 * scene - b, 1e-9)) + c)


def write_patches(file, signal, transfer, more=""):
    """Write squares of 16 pixels of BT.2020 signal values R'G'B', lossless."""
    weights = np.array([0.2627, 0.6780, 0.0593])
    luma = signal @ weights
    planes = [64 + 876 * luma, 512 + 896 * (signal[:, 2] - luma) / 1.8814, 512 + 896 * (signal[:, 0] - luma) / 1.4746]
    frame = av.VideoFrame(16 * len(signal), 16, "yuv420p10le")
    for plane, values, size in zip(frame.planes, planes, (16, 8, 8), strict=True):
        rows = np.zeros((plane.height, plane.line_size // 2), "<u2")
        rows[:, : size * len(signal)] = np.repeat(values.round(), size)
        plane.update(rows.tobytes())
    params = f"log-level=none:lossless=1:bframes=0:colorprim=bt2020:transfer={transfer}:colormatrix=bt2020nc{more}"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx265", rate=8, options={"x265-params": params})
        stream.width, stream.height, stream.pix_fmt = frame.width, frame.height, "yuv420p10le"
        frame.pts, frame.time_base = 0, Fraction(1, 8)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file


@pytest.mark.long  # FFmpeg's tables take 4 s each
def test_hdr_is_converted_by_the_formulas_of_bt_2100(tmp_path, caplog):
    """The same light by PQ and by HLG must give the same pixels. Shades stay distinct, gray stays gray, hues stay."""
    grays = np.array([0, 2, 10, 50, 100, 203, 400, 600, 800, 1000.0])
    to_2020 = np.array([[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114], [0.0164, 0.0880, 0.8956]])  # BT.2087
    colors = np.array([[100, 60, 60], [60, 100, 60], [60, 60, 100], [90, 80, 50.0]])
    light = np.concatenate([np.repeat(grays[:, None], 3, axis=1), colors @ to_2020.T])
    peak = ":master-display=G(13250,34500)B(7500,3000)R(34000,16000)WP(15635,16450)L(10000000,1):max-cll=1000,400"
    files = [
        write_patches(tmp_path / "pq.mp4", pq(light), "smpte2084", peak),
        write_patches(tmp_path / "hlg.mp4", hlg(light)[::-1], "arib-std-b67"),
    ]
    set_matrix(files[1], (-1, 0, 0, 1))  # the conversion must not lose it
    shown = []
    for file in files:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            video = read_clip(file, clip(height=16, width=16 * len(light)))
        assert len(caplog.messages) == 1
        shown.append(((video[:, 0, 8, 8::16] + 1) / 2).T.numpy())
    assert np.abs(shown[0] - shown[1]).max() * 255 < 4
    for patches in shown:
        gray = patches[: len(grays)]
        assert np.ptp(gray, axis=1).max() * 255 <= 2
        assert gray[0].max() * 255 < 2 and gray[-1].min() > 0.99
        assert (np.diff(gray[:, 1]) * 255 > 4).all() and 0.6 < gray[grays == 203].mean() < 0.8, "nothing is clipped"
        linear = patches[len(grays) :] ** 2.4  # BT.1886
        np.testing.assert_allclose(
            linear / linear.sum(1, keepdims=True), colors / colors.sum(1, keepdims=True), atol=0.02
        )


# Names


@pytest.mark.parametrize(
    ("files", "name", "wanted"),
    [
        (["cafe\u0301.mp4"], "caf\u00e9.mp4", "cafe\u0301.mp4"),
        (["caf\u00e9.mp4"], "cafe\u0301.mp4", "caf\u00e9.mp4"),
        (["cafe\u0301.mp4", "caf\u00e9.mp4"], "caf\u00e9.mp4", "caf\u00e9.mp4"),
        (["a.mp4"], "a.mp4 ", "a.mp4"),
        (["a.mp4 ", "a.mp4"], "a.mp4 ", "a.mp4 "),
        (["x/a.mp4"], "x\\a.mp4", "x/a.mp4"),
        (["x\\a.mp4", "x/a.mp4"], "x\\a.mp4", "x\\a.mp4"),
        (["x /cafe\u0301.mp4"], "x\\caf\u00e9.mp4", "x /cafe\u0301.mp4"),
        (["a.mp4 ", " a.mp4"], "a.mp4", None),
        (["a.mp4"], "b.mp4", None),
        (["a.mp4"], "x\\..\\..\\a.mp4", None),
    ],
)
def test_files_are_found_by_the_names_that_other_systems_give_them(tmp_path, files, name, wanted):
    folder = tmp_path / "clips"
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    assert unicodedata.is_normalized("NFC", name) or "e\u0301" in name
    (folder / "metadata.csv").write_text(f'file_name,caption\n"{name}",one\n')
    (row,) = read_metadata(folder)
    assert (row.file, bool(row.problem)) == ((wanted, False) if wanted else (name, True))


# Tables

ROWS = [("a.mp4", "a cat"), ("b.mp4", "a dog, running")]


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("metadata.csv", ',file_name,caption\n0,a.mp4,a cat\n7,b.mp4,"a dog, running"\n', None),
        ("metadata.csv", 'video,prompt\na.mp4,a cat\nb.mp4,"a dog, running"\n', ("video", "prompt")),
        ("metadata.csv", 'text,path\na cat,a.mp4\n"a dog, running",b.mp4\n', ("path", "text")),
        (
            "metadata.jsonl",
            '{"file_name": "a.mp4", "caption": "a cat"}\n\n{"caption": "a dog, running", "file_name": "b.mp4", "n": 1}',
            None,
        ),
        ("metadata.jsonl", '{"v": "a.mp4", "t": "a cat"}\n{"v": "b.mp4", "t": "a dog, running"}', ("v", "t")),
        ("a.txt", "a cat\n", None),
    ],
)
def test_tables_that_users_have(tmp_path, name, content, columns):
    for file, caption in ROWS:
        (tmp_path / file).touch()
        if name == "a.txt":
            (tmp_path / file).with_suffix(".txt").write_text(f" {caption}\n")
    if name != "a.txt":
        (tmp_path / name).write_text(content)
    renamed = columns and dict(zip(("file_name", "caption"), columns, strict=True))
    assert [(row.file, row.caption, row.problem) for row in read_metadata(tmp_path, renamed)] == [
        (*r, "") for r in ROWS
    ]
    if name != "a.txt":
        renamed = columns and {"caption": columns[1]}
        assert read_captions(tmp_path / name, renamed) == [caption for _, caption in ROWS]


@pytest.mark.parametrize(
    ("name", "content", "columns", "cause"),
    [
        ("metadata.csv", "video,prompt\na.mp4,one\n", None, "data.columns"),
        ("metadata.csv", ",file_name,caption\nx,a.mp4,one\n", None, "named columns"),
        ("metadata.csv", ",file_name,caption\n0,a.mp4,one, two\n", None, "4 fields"),
        ("metadata.jsonl", '{"file_name": "a.mp4", "caption": "one"}\n[1]\n', None, "line 2"),
        ("metadata.jsonl", '{"file_name": "a.mp4", "caption": 3}\n', None, "line 1"),
        ("metadata.jsonl", '{"file_name": "a.mp4"}\n', None, "data.columns"),
        ("metadata.csv", "file_name,caption\na.mp4,one\n", {"name": "file_name"}, "data.columns"),
        ("captions.txt", '{"caption": "one"}\n', None, ".jsonl"),
    ],
)
def test_a_refusal_names_its_cause(tmp_path, name, content, columns, cause):
    (tmp_path / name).write_text(content)
    with refused(cause):
        read_captions(tmp_path / name) if name.endswith(".txt") else read_metadata(tmp_path, columns)


def test_two_tables_are_refused(tmp_path):
    for name in ("metadata.csv", "metadata.jsonl"):
        (tmp_path / name).write_text("file_name,caption\n")
    with pytest.raises(UserError):
        read_metadata(tmp_path)
