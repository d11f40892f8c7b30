"""Clips, latents, embeddings and trajectories that are damaged or not what they say: named, never used."""

import io
import json
import logging
import os
import shutil
from contextlib import redirect_stderr
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from distill.data import MovingShapesSettings, VideoFolderSettings
from distill.data.captions import Captions
from distill.data.clips import ClipError, ClipFormat, read_clip
from distill.data.encoders import TextEncoder, VideoCodec
from distill.data.trajectories import TrajectoryFolder
from distill.data.video_folder import VideoFolder
from fsdp_cp.errors import UserError
from tests.tiny_pipeline import moving_square, render_clips, write_metadata, write_video
from tests.unit.test_sample_command import full_disk, listing

SIZES = {"num_frames": 5, "height": 32, "width": 48, "fps": 8, "max_text_tokens": 24}


@pytest.fixture(scope="module")
def encoded(tiny, tmp_path_factory):
    """Two clips, and a cache that holds them."""
    root = tmp_path_factory.mktemp("encoded")
    render_clips(root / "videos", 2)
    VideoFolder(path=root / "videos", encoders=tiny, cache=root / "cache", **SIZES)
    return root


@pytest.fixture
def root(encoded, tmp_path):
    return shutil.copytree(encoded, tmp_path / "data")


@pytest.fixture
def make(root, tiny):
    def build(kind=VideoFolder, **changes):
        return kind(**({"path": root / "videos", "encoders": tiny, "cache": root / "cache"} | SIZES | changes))

    return build


# Sizes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fps", float("nan")), ("fps", float("inf")), ("fps", 0), ("fps", -8), ("fps", 1e-9), ("fps", 1e9),
        ("fps", True), ("fps", "8"), ("num_frames", True), ("num_frames", -5), ("num_frames", 10**9),
        ("num_frames", 5.0),
        ("height", -32), ("height", 2**31), ("height", False), ("width", 0), ("width", 10**30), ("width", "48"),
    ],
)  # fmt: skip
def test_sizes_that_are_none_are_refused_by_every_data_set(make, tiny, tmp_path, name, value):
    (tmp_path / "captions.txt").write_text("one\n")
    shapes = {"name": "moving_shapes", name: value}
    for refuse in (
        make,
        lambda **change: make(Captions, path=tmp_path / "captions.txt", **change),
        lambda **change: MovingShapesSettings(**(shapes | change)).sample_shapes(),
        lambda **change: VideoFolderSettings(path="x", encoders=str(tiny), **change).sample_shapes(),
    ):
        with pytest.raises(UserError) as error:
            refuse(**{name: value})
        assert f"data.{name}=" in str(error.value) and "; use " in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("tokens", [True, -1, 10**9, 2.0])
def test_max_text_tokens(make, tiny, tokens):
    with pytest.raises(UserError, match=f"data.max_text_tokens={tokens} must be"):
        make(max_text_tokens=tokens)
    settings = VideoFolderSettings(path="x", encoders=str(tiny), max_text_tokens=tokens)
    with pytest.raises(UserError, match=f"data.max_text_tokens={tokens} must be"):
        settings.sample_shapes()  # in a dry run, too


# Clips


def test_what_is_called_a_clip_and_is_none(make, root, caplog):
    """A folder, a pipe (which would never end), a link to itself, a name no disk has, a playlist with an address."""
    videos = root / "videos"
    (videos / "folder.mp4").mkdir()
    os.mkfifo(videos / "pipe.mp4")
    (videos / "loop.mp4").symlink_to("loop.mp4")
    (videos / "dangling.mp4").symlink_to("nowhere")
    (videos / "list.mp4").write_text("#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n")
    (videos / "linked.mp4").symlink_to("clip_1.mp4")
    names = ["folder.mp4", "pipe.mp4", "loop.mp4", "dangling.mp4", "list.mp4", "x" * 300 + ".mp4", "linked.mp4"]
    write_metadata(videos, [(name, "a red square, drifting") for name in names])
    data = make()
    assert len(data) == 1 and "6 of 7 clips left out" in caplog.text
    for name in names[:-1]:
        assert f"clip left out: {name} " in caplog.text
    assert "pipe.mp4 is not a file" in caplog.text and "list.mp4 cannot be decoded" in caplog.text


def test_frames_of_any_claimed_size(tmp_path):
    """A header that claims 30000 x 30000 pixels would take 2.7 GB for each frame."""
    file = tmp_path / "huge.mp4"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mjpeg", rate=8)
        stream.width, stream.height, stream.pix_fmt = 8190, 8198, "yuvj420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((8198 * 3 // 2, 8190), np.uint8), format="yuvj420p")
        for k in range(2):
            frame.pts = k
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(ClipError, match="has frames of 8190 x 8198 pixels"):
        read_clip(file, ClipFormat(num_frames=1, height=32, width=32, fps=8))


def test_one_frame_names_with_colons_and_tags_in_other_encodings(tmp_path, monkeypatch):
    write_video(tmp_path / "12:30.mp4", moving_square("red", 1, 48, 80), fps=16)
    monkeypatch.chdir(tmp_path)
    assert read_clip("12:30.mp4", ClipFormat(num_frames=1, height=32, width=32, fps=8)).shape == (3, 1, 32, 32)
    with pytest.raises(ClipError, match="is too short: 1 frames"):
        read_clip("12:30.mp4", ClipFormat(num_frames=2, height=32, width=32, fps=8))
    data = Path("12:30.mp4").read_bytes()
    assert data.count(b"Lavf") == 1
    Path("tags.mp4").write_bytes(data.replace(b"Lavf", b"\xff\xfe\xe9\xe9"))
    assert read_clip("tags.mp4", ClipFormat(num_frames=1, height=32, width=32, fps=8)).shape == (3, 1, 32, 32)


# The cache


def _other(tensor: torch.Tensor, damage: str) -> torch.Tensor:
    if damage == "shape":
        return tensor[:-1].contiguous()
    if damage == "dtype":
        return tensor.to(torch.float64)
    tensor.view(-1)[3] = {"nan": torch.nan, "inf": torch.inf, "value": 0.25}[damage]
    return tensor


@pytest.mark.parametrize("part", ["latents", "text"])
@pytest.mark.parametrize("damage", ["nan", "inf", "value", "bit", "shape", "dtype", "zero", "cut", "name", "header"])
def test_damaged_cache_files_are_named_and_written_again(make, root, caplog, part, damage):
    data = make()
    before = [data[i] for i in range(2)]
    file = (
        data.cache._latents_file(data._items[0][0])
        if part == "latents"
        else data.cache._text_files(data._texts[data.captions()[0]])["text"]
    )
    whole = file.read_bytes()
    if damage in ("nan", "inf", "value", "shape", "dtype"):
        notes = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
        save_file({part: _other(load_file(file)[part], damage)}, file, metadata=notes)
    elif damage == "name":
        save_file({"other": load_file(file)[part]}, file)
    else:
        at = {"bit": len(whole) - 9, "header": 12}.get(damage, 0)
        flipped = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
        file.write_bytes({"zero": b"", "cut": whole[: len(whole) // 2]}.get(damage, flipped))
    with pytest.raises(UserError, match="was damaged while the run was using it") as error:
        data[0]
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    again = make()
    assert f"cache file {file} is damaged (" in caplog.text and "is written again" in caplog.text
    for i in range(2):
        assert torch.equal(again[i]["latents"], before[i]["latents"]) and torch.equal(
            again[i]["text"], before[i]["text"]
        )


def test_files_of_the_cache_without_a_checksum_are_read(make, root, monkeypatch):
    """Those of earlier versions."""
    for file in (root / "cache").rglob("*.safetensors"):
        save_file(load_file(file), file, metadata={"about": "{}"})
    monkeypatch.setattr(TextEncoder, "__init__", lambda *_, **__: pytest.fail("everything is in the cache"))
    monkeypatch.setattr(VideoCodec, "__init__", lambda *_, **__: pytest.fail("everything is in the cache"))
    assert make()[0]["latents"].isfinite().all()


@pytest.mark.parametrize("size", [0, 1000])
def test_a_full_disk_is_one_line_and_leaves_no_half_file(make, root, size):
    """1000 bytes are enough for no latents, which come first; with those there, for no embedding."""
    shutil.rmtree(root / "cache" / ("latents" if size else "text"))
    silent = redirect_stderr(io.StringIO())  # pytest's own capture is a file, too
    with silent, full_disk(size), pytest.raises(UserError, match=r"cannot be written \(File too large\)") as error:
        make()
    assert str(error.value).startswith(f"data.cache={root / 'cache'}") and "\n" not in str(error.value)
    assert not list((root / "cache" / ("latents" if size else "text")).iterdir())
    assert len(make()) == 2


def test_left_overs_that_cannot_be_removed_are_no_mistake(make, root):
    """A cache that can only be read, with all that is needed in it."""
    stuck = root / "cache" / "latents" / f".{'0a' * 16}.host.1.tmp"
    stuck.mkdir()  # cannot be unlinked, whoever runs the test
    os.utime(stuck, (1, 1))
    assert len(make()) == 2 and stuck.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_can_only_be_read(make, root):
    for folder in (root / "cache" / "latents", root / "cache" / "text"):
        folder.chmod(0o555)
    assert len(make()) == 2
    with pytest.raises(UserError, match="cannot be written .Permission denied."):
        make(fps=4, num_frames=5)


# Trajectories


@pytest.fixture
def trajectories(tmp_path):
    folder = TrajectoryFolder(str(tmp_path / "trajectories"))
    folder.begin({"seed": 0})
    for i in range(2):
        folder.write(i, torch.randn(3, 2, 1, 4, 4), torch.randn(2, 1, 4, 4), f"caption {i}")
    return folder


@pytest.mark.parametrize("damage", ["zero", "cut", "nan", "dtype", "shape", "names", "caption"])
def test_damaged_trajectories_are_named_and_made_again(trajectories, caplog, damage):
    file, shape = trajectories.file(1), (3, 2, 1, 4, 4)
    assert trajectories.missing(2, shape) == []
    states, latents, _ = trajectories.read(1)
    tensors, notes = {"states": states, "latents": latents}, {"caption": "caption 1"}
    if damage == "nan":
        states[0, 0, 0, 0, 0] = torch.nan
    if damage == "dtype":
        tensors["states"] = states.half()
    if damage == "shape":
        tensors["latents"] = latents[:1].contiguous()
    if damage == "names":
        tensors = {"other": states}
    if damage == "caption":
        notes = None
    save_file(tensors, file, metadata=notes)
    if damage in ("zero", "cut"):
        file.write_bytes(file.read_bytes()[: 100 if damage == "cut" else 0])
    with pytest.raises(UserError) as error:
        trajectories.read(1)
    assert f"{file} is damaged (" in str(error.value) and "\n" not in str(error.value)
    assert trajectories.missing(2, shape) == [1] and f"{file} is damaged" in caplog.text


@pytest.mark.parametrize("text", ["", "[", "[]", "3", "\udcff", "[" * 100_000, '{"seed": "a\\nb"}'])
def test_damaged_settings_of_trajectories(trajectories, text):
    (trajectories.path / "settings.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError) as error:
        trajectories.check({"seed": 0})
    assert str(trajectories.path) in str(error.value) and "\n" not in str(error.value)


def test_trajectories_on_a_full_disk(trajectories):
    before = listing(trajectories.path)
    with full_disk(100), pytest.raises(UserError, match=r"cannot be written \(File too large\)"):
        trajectories.write(2, torch.zeros(3, 2, 1, 4, 4), torch.zeros(2, 1, 4, 4), "caption 2")
    with full_disk(0), pytest.raises(UserError, match=r"cannot be written \(File too large\)"):
        TrajectoryFolder(str(trajectories.path / "other")).begin({"seed": 0})
    shutil.rmtree(trajectories.path / "other")
    assert listing(trajectories.path) == before
    with pytest.raises(UserError, match="holds no trajectories"):
        TrajectoryFolder(str(trajectories.file(0))).check({})
