"""Decoding of clips: which frames, pixels and colors are read, and which files are refused."""

from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from distill.data.videos.container import ClipError, Cut
from distill.data.videos.decode import ClipFormat, crop_and_resize, read_clip, read_largest_part
from distill.data.videos.span import Span
from tests.tiny_pipeline import moving_square, write_video


def clip(num_frames=1, height=32, width=32, fps=8.0):
    return ClipFormat(num_frames=num_frames, height=height, width=width, fps=fps)


def flat(color, frames=4, height=64, width=64):
    return np.broadcast_to(np.array(color, np.uint8), (frames, height, width, 3))


def levels(x):
    """Map [-1, 1] to 0..255."""
    return (x + 1) * 127.5


def write_counted(file, frames, fps, times=None):
    """Write clips whose frame k is gray of level 20 + 4 k, so that a decoded frame tells its number."""
    video = np.stack([np.full((32, 32, 3), 20 + 4 * k, np.uint8) for k in range(frames)])
    write_video(file, video, fps=fps, times=times)
    return file


def numbers(x):
    return [round(float((levels(frame).mean() - 20) / 4)) for frame in x.unbind(1)]


LANDSCAPE, UPRIGHT, SHORT, SMALL = clip(9, 32, 48), clip(9, 48, 32), clip(5, 64, 96), clip(9, 16, 24)


@pytest.mark.parametrize(
    ("frames", "height", "width", "chosen"),
    [
        (20, 48, 80, LANDSCAPE),
        (20, 96, 64, UPRIGHT),
        (20, 96, 96, LANDSCAPE),  # as much of both is kept: the first
        (20, 64, 96, LANDSCAPE),  # nine frames of all pixels, not five; of the same part the larger size
        (12, 64, 96, SHORT),  # six frames at 8 fps are too few for the others
        (20, 32, 46, SMALL),  # none is enlarged
        (20, 16, 22, None),
        (8, 64, 96, None),
    ],
)
def test_a_clip_takes_the_size_that_keeps_most_of_it(tmp_path, frames, height, width, chosen):
    write_video(tmp_path / "a.mp4", moving_square("red", frames, height, width), fps=16)
    sizes = [LANDSCAPE, UPRIGHT, SHORT, SMALL]
    if chosen is None:
        with pytest.raises(ClipError):
            read_largest_part(tmp_path / "a.mp4", sizes)
        return
    video, found = read_largest_part(tmp_path / "a.mp4", sizes)
    assert found == chosen and torch.equal(video, read_clip(tmp_path / "a.mp4", chosen))


@pytest.mark.parametrize(
    ("source", "fps", "wanted"),
    [
        (16, 8, [0, 2, 4, 6, 8]),
        (8, 16, [0, 0, 1, 1, 2]),  # equally near: the earlier one
        (30, 16, [0, 2, 4, 6, 7]),  # 0, 1.875, 3.75, 5.625, 7.5
        (Fraction(30000, 1001), 15, [0, 2, 4, 6, 8]),
    ],
)
def test_frames_are_the_nearest_in_time(tmp_path, source, fps, wanted):
    file = write_counted(tmp_path / "a.mp4", 30, source)
    assert numbers(read_clip(file, clip(5, fps=fps))) == wanted


@pytest.mark.parametrize(
    ("first", "last", "unit", "wanted"),
    [
        (0.5, 1.5, "s", [8, 10, 12, 14, 16]),
        (0.563, 2, "s", [9, 11, 13, 15, 17]),  # frame 9 is at 0.5625: the table's time is rounded
        (0.562, 1.126, "s", [9, 11, 13, 15, 17]),  # frame 18 is the next part's
        (0.57, 2, "s", [10, 12, 14, 16, 18]),  # frame 9 is nearer, but the part before's
        (0.5, float("inf"), "s", [8, 10, 12, 14, 16]),
        (9, 18, "frames", [9, 11, 13, 15, 17]),
        (0, 30, "frames", [0, 2, 4, 6, 8]),
        (0.5, 0.9, "s", "too short"),
        (9, 17, "frames", "too short"),
        (2, 3, "s", "no frame"),
    ],
)
def test_a_part_of_a_video_holds_its_own_frames_alone(tmp_path, first, last, unit, wanted):
    file = Cut(write_counted(tmp_path / "a.mp4", 30, 16), Span(first, last, unit))
    if isinstance(wanted, str):
        with pytest.raises(ClipError, match=wanted):
            read_clip(file, clip(5))
    else:
        assert numbers(read_clip(file, clip(5))) == wanted


def test_variable_frame_rate_is_sampled_by_time_not_by_count(tmp_path):
    # Frames 0..3 at 16 fps, then a pause, then one every fourth sixteenth.
    file = write_counted(tmp_path / "a.mp4", 8, 16, times=[0, 1, 2, 3, 8, 12, 16, 20])
    assert numbers(read_clip(file, clip(9, fps=8))) == [0, 2, 3, 4, 4, 4, 5, 5, 6]  # 0 2 4 6 8 10 12 14 16


def test_a_clip_that_starts_late_starts_at_its_first_frame(tmp_path):
    file = write_counted(tmp_path / "a.mp4", 6, 16, times=[40, 41, 42, 43, 44, 45])
    assert numbers(read_clip(file, clip(3, fps=8))) == [0, 2, 4]


def test_exactly_long_enough_and_one_frame_too_short(tmp_path):
    file = write_counted(tmp_path / "a.mp4", 9, 16)
    assert numbers(read_clip(file, clip(5, fps=8))) == [0, 2, 4, 6, 8]
    with pytest.raises(ClipError):
        read_clip(file, clip(6, fps=8))
    write_counted(file, 8, 16)  # ends where the fifth frame would begin
    with pytest.raises(ClipError):
        read_clip(file, clip(5, fps=8))


@pytest.mark.parametrize("colorspace", [1, 6, None], ids=["BT.709", "BT.601", "untagged"])
def test_colors_come_back(tmp_path, colorspace):
    """Red and blue exchanged, or BT.709 read as BT.601 (off by up to 30 levels), would fail."""
    for color in ((200, 40, 30), (30, 180, 60), (40, 60, 210), (255, 255, 255)):
        write_video(tmp_path / "a.mp4", flat(color), fps=8, colorspace=colorspace)
        with av.open(str(tmp_path / "a.mp4")) as container:
            assert next(container.decode(video=0)).colorspace == (colorspace or 2)
        x = levels(read_clip(tmp_path / "a.mp4", clip(2)))
        assert (x.mean(dim=(1, 2, 3)) - torch.tensor(color)).abs().max() < 4, color


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 32), (16, 64)])
def test_the_center_is_cropped_and_the_aspect_kept(height, width):
    """A centered disc of a quarter of the shorter side stays round and centered; the far edges are cut off."""
    y, x = torch.meshgrid(torch.arange(96) + 0.5 - 48, torch.arange(160) + 0.5 - 80, indexing="ij")
    disc = ((y**2 + x**2) < 12**2)[..., None] * torch.tensor([255, 255, 255])
    source = disc.to(torch.uint8)
    source[0, :], source[-1, :], source[:, 0], source[:, -1] = (torch.tensor([255, 0, 0], dtype=torch.uint8),) * 4
    small = levels(crop_and_resize(source, height, width))
    mass = small[1] / 255  # green: the disc alone
    rows, columns = mass.sum(1), mass.sum(0)
    y, x = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    assert (rows * y).sum() / mass.sum() == pytest.approx(height / 2, abs=0.05)
    assert (columns * x).sum() / mass.sum() == pytest.approx(width / 2, abs=0.05)
    scale = max(height / 96, width / 160)
    assert mass.sum() == pytest.approx(torch.pi * (12 * scale) ** 2, rel=0.03)
    spread_y = ((rows * (y - height / 2) ** 2).sum() / mass.sum()).sqrt()
    spread_x = ((columns * (x - width / 2) ** 2).sum() / mass.sum()).sqrt()
    assert spread_y == pytest.approx(float(spread_x), rel=0.06)
    cut_sides = height * 160 > width * 96
    red = small[0] - small[1]
    assert (red[4:-4, 0] if cut_sides else red[0, 4:-4]).mean() < 5


def test_reduction_averages_thin_lines():
    source = torch.zeros(128, 128, 3, dtype=torch.uint8)
    source[:, ::8] = 255
    small = levels(crop_and_resize(source, 16, 16))
    assert small[:, 2:-2, 2:-2].std() < 8  # picking pixels gives 0 or 255
    assert small.mean() == pytest.approx(255 / 8, rel=0.1)
    x = crop_and_resize(source[:8, 8:16], 64, 64)
    assert x.min() == -1 and x.max() == 1, "enlarged, still within the range"


def test_wide_pixels_are_widened(tmp_path):
    """A frame of 32x64 whose pixels are twice as wide as high becomes 64x64, without cropping."""
    video = flat((40, 40, 40), height=64, width=32).copy()
    video[:, :, 0:4] = (230, 40, 40)
    write_video(tmp_path / "a.mp4", video, fps=8, pixel_aspect=Fraction(2))
    x = levels(read_clip(tmp_path / "a.mp4", clip(1)))[:, 0]
    assert x[0, :, 0].mean() > 200
    assert x[0, :, 16:].mean() < 60


def test_files_that_give_no_clip(tmp_path):
    whole = tmp_path / "whole.mp4"
    write_video(whole, moving_square("red", 24, 48, 80), fps=16)
    data = whole.read_bytes()
    cases = {"half": data[: len(data) // 2], "empty": b"", "text": b"not a video\n" * 99, "header": data[:200]}
    for name, content in cases.items():
        (tmp_path / f"{name}.mp4").write_bytes(content)
        with pytest.raises(ClipError):
            read_clip(tmp_path / f"{name}.mp4", clip(5))
    with pytest.raises(ClipError):
        read_clip(tmp_path / "absent.mp4", clip(5))
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(ClipError):
        read_clip(tmp_path / "sound.mp4", clip(5))


def test_damaged_pictures_do_not_pass_as_data(tmp_path):
    """If the index is intact and pictures are overwritten, the decoder often conceals frames without an error."""
    file = tmp_path / "a.mp4"
    write_video(file, moving_square("red", 24, 64, 96), fps=16)
    whole = file.read_bytes()
    first, last = whole.index(b"mdat") + 900, whole.index(b"moov") - 60  # after the encoder's comment
    for seed in range(8):
        random = np.random.default_rng(seed)
        at, length = int(random.integers(first, last)), int(random.integers(8, 40))
        data = bytearray(whole)
        data[at : at + length] = random.bytes(length)
        file.write_bytes(data)
        with pytest.raises(ClipError):
            read_clip(file, clip(23, fps=16))
