"""Damaged clips, latents and embeddings: refused or written again, never used."""

import io
import os
import shutil
from contextlib import redirect_stderr
from functools import partial

import av
import numpy as np
import pytest

from distill.data.settings import MovingShapesSettings, VideoFolderSettings
from distill.data.videos.container import ClipError
from distill.data.videos.decode import ClipFormat, read_clip
from tests.encoded import encode_source
from tests.tiers import slow, slow_case
from tests.tiny_pipeline import render_clips, write_metadata
from tests.unit.refused import refused
from tests.unit.test_sample_command import full_disk


@pytest.fixture(scope="module")
def encoded(tiny, tmp_path_factory):
    """Encode two clips into a cache, and return both."""
    root = tmp_path_factory.mktemp("encoded")
    render_clips(root / "videos", 2)
    encode_source(root / "videos", tiny, num_frames=5)
    return root


@pytest.fixture
def root(encoded, tmp_path):
    return shutil.copytree(encoded, tmp_path / "data")


@pytest.fixture
def make(root, tiny):
    return partial(encode_source, path=root / "videos", encoders=tiny, num_frames=5)


# Sizes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fps", float("nan")), ("fps", 0), ("fps", 1e9), ("num_frames", 0), ("num_frames", 10**9),
        ("height", -32), ("width", 10**30), ("max_text_tokens", 0), ("max_text_tokens", 10**9),
    ],
)  # fmt: skip
def test_sizes_are_refused_by_every_data_set(make, tiny, tmp_path, name, value):
    (tmp_path / "captions.txt").write_text("one\n")
    refusing = [
        make,
        partial(make, path=tmp_path / "captions.txt"),
        lambda **change: VideoFolderSettings(path="x", encoders=str(tiny), **change).sample_shapes(),
    ]
    if name != "max_text_tokens":
        refusing.append(lambda **change: MovingShapesSettings(name="moving_shapes", **change).sample_shapes())
    for refuse in refusing:
        with refused(f"data.{name}"):
            refuse(**{name: value})


# Clips


def test_files_that_are_no_clips_are_left_out(make, root, caplog):
    """Cases: a folder, a pipe (which never ends), a link to itself, an impossible name, a playlist with an address."""
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
    assert len(data) == 1
    for name in names[:-1]:
        assert name in caplog.text


@slow
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
    with pytest.raises(ClipError):
        read_clip(file, ClipFormat(num_frames=1, height=32, width=32, fps=8))


# Full disk


@pytest.mark.parametrize("size", [0, slow_case(1000)])
def test_a_full_disk_is_one_line_and_loses_nothing(make, root, size):
    """1000 bytes are enough for a note, but not for latents."""
    shutil.rmtree(root / "cache")
    (root / "cache").mkdir()
    silent = redirect_stderr(io.StringIO())  # pytest's own capture is a file, too
    with silent, full_disk(size), refused(f"data.cache={root / 'cache'}"):
        make()
    assert not list((root / "cache").rglob("*.safetensors"))
    assert len(make()) == 2
