"""Clips as files: they decode to the same pixels, with the right size, count and rate."""

import io
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from distill.report import media
from fsdp_cp.files.atomic_file import atomic_path


def moving_disc(frames: int = 6, height: int = 16, width: int = 16, color=(255, 60, 20)) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    clip = np.full((frames, height, width, 3), 26, np.uint8)
    for i, frame in enumerate(clip):
        frame[(x - 4 - i) ** 2 + (y - height / 2) ** 2 < 12] = color
    return clip


def decode(path) -> tuple[np.ndarray, Fraction]:
    with av.open(str(path)) as container:
        rate = container.streams.video[0].average_rate
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]), rate


@pytest.mark.parametrize(("fps", "frames"), [(8, 6), (23.976, 1)])
def test_mp4_decodes_to_the_same_clip(tmp_path, fps, frames):
    clip = moving_disc(frames)
    media.write_mp4(tmp_path / "deep" / "clip.mp4", clip, fps)
    decoded, rate = decode(tmp_path / "deep" / "clip.mp4")
    assert decoded.shape == (frames, 256, 256, 3)
    assert float(rate) == pytest.approx(fps, rel=1e-4)
    expected = clip.repeat(16, axis=1).repeat(16, axis=2).astype(float)
    assert np.abs(decoded - expected).mean() < 2
    # Colors inside the blocks of one source pixel, where no edge is near: limited range and matrix must agree.
    inside = np.abs(decoded - expected)[:, 7::16, 7::16]
    assert inside.max() <= 12


def test_mp4_pads_odd_sides_and_enlarges_small_clips(tmp_path):
    media.write_mp4(tmp_path / "clip.mp4", moving_disc(3, 15, 271), 8)
    assert decode(tmp_path / "clip.mp4")[0].shape == (3, 16, 272, 3)
    media.write_mp4(tmp_path / "clip.mp4", moving_disc(2), 8)
    assert decode(tmp_path / "clip.mp4")[0].shape == (2, 256, 256, 3)


def test_a_failure_leaves_the_old_file_and_no_rubbish(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    with atomic_path(path) as first, atomic_path(path) as second:
        assert first != second and first.suffix == path.suffix, "two nodes may write the same file"
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first", "the outer one is moved last"
    assert list(tmp_path.iterdir()) == [path]


def test_strip_holds_the_frames_in_order():
    clip = moving_disc(4)
    picture = media.strip(clip, gap=2)
    assert picture.shape == (16, 4 * 16 + 3 * 2, 3)
    for i, frame in enumerate(clip):
        assert (picture[:, i * 18 : i * 18 + 16] == frame).all()
    assert (picture[:, 16:18] == 255).all()
    again = np.asarray(Image.open(io.BytesIO(media.picture_bytes(picture))))
    assert (again == picture).all()


def test_contact_sheets_of_large_clips_are_shrunk(tmp_path):
    rows = [("a", np.zeros((2, 9, 240, 416, 3), np.uint8))]
    sheet = media.contact_sheet(tmp_path / "a.png", rows, captions=["x"] * 2, frames=4)
    assert sheet.height < 240 and Image.open(tmp_path / "a.png").size == sheet.size


def test_a_contact_sheet_shows_each_pixel_of_tiny_clips(tmp_path):
    clips = np.random.default_rng(0).integers(0, 255, (1, 2, 4, 4, 3), dtype=np.uint8)
    sheet = np.asarray(media.contact_sheet(tmp_path / "a.png", [("a", clips)], captions=["x"]))
    frame = clips[0, 1].repeat(32, axis=0).repeat(32, axis=1)
    y, x = (int(i[0]) for i in np.nonzero((sheet == clips[0, 1, 0, 0]).all(axis=-1)))
    np.testing.assert_array_equal(sheet[y : y + 128, x : x + 128], frame)
