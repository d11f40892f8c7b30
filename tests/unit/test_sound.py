"""Sound of clips: read from the first frame's time on, and written so that it reads back in step with the picture."""

import time
from contextlib import suppress
from fractions import Fraction
from functools import partial

import av
import numpy as np
import pytest
import torch

from distill.data.sets import encode
from distill.data.videos.container import ClipError, Cut, extend_limit
from distill.data.videos.decode import ClipFormat, SoundFormat, read_clip
from distill.data.videos.reader_process import ReaderProcesses
from distill.data.videos.sound import SOUND_VERSION, end_sound_readers, read_sound
from distill.data.videos.sound_track import mixing
from distill.data.videos.span import Span
from distill.report.media import Sound, write_mp4
from models.sample import part_name
from tests.encoded import encode_source, open_set
from tests.tiny_ltx2_pipeline import build_tiny_ltx2_pipeline
from tests.tiny_pipeline import write_metadata
from tests.unit.refused import refused


def video(
    path, *, samples=None, rate=48000, codec="aac", layout="mono", picture_at=0.0, sound_at=0.0, seconds=2, gap=0.0
):
    """Write a clip of 25 frames a second whose picture and sound begin at these times, and return its path. The sound
    has a gap after 1 s."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        if samples is not None:
            track = container.add_stream(codec, rate=rate)
            track.layout = layout
        for i in range(25 * seconds):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 4 * i % 255, np.uint8), format="rgb24")
            frame.pts, frame.time_base = i + round(picture_at * 25), Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if samples is not None:
            whole = av.AudioFrame.from_ndarray(samples.T.reshape(1, -1), format="flt", layout=layout)
            whole.sample_rate, whole.pts, whole.time_base = rate, round(sound_at * rate), Fraction(1, rate)
            to = av.AudioResampler(format=track.format.name, layout=layout, rate=rate, frame_size=1024)
            for frame in [*to.resample(whole), *to.resample(None)]:
                frame.pts += round(gap / frame.time_base) if frame.time >= 1.0 else 0
                container.mux(track.encode(frame))
            container.mux(track.encode())
    return path


def click(at, rate, seconds=2, channels=1):
    """Return silence with 20 ms of a tone that begins at ``at`` seconds."""
    samples = np.zeros((channels, rate * seconds), np.float32)
    first, count = round(at * rate), rate // 50
    samples[:, first : first + count] = 0.8 * np.sin(2 * np.pi * 1000 * np.arange(count) / rate)
    return samples


def onset(sound, rate):
    """Return the time of the first sample that is loud."""
    return float(np.argmax(np.abs(np.asarray(sound)).max(0) > 0.2)) / rate


def broken(path):
    """Write a clip whose sound track is zeros after its beginning."""
    damaged = bytearray(video(path, samples=click(0.5, 48000), codec="flac").read_bytes())
    start = damaged.rfind(b"fLaC")
    damaged[start + 200 :] = bytes(len(damaged) - start - 200)
    path.write_bytes(damaged)


@pytest.mark.parametrize("rate", [8000, 44100, 48000, 96000])
def test_sound_begins_with_the_first_frame(tmp_path, rate):
    """A click is found where it was put, relative to the picture, whichever of the two begins late."""
    for picture_at, sound_at in ((0, 0), (0.52, 0), (0, 0.48)):
        name = tmp_path / f"{picture_at}_{sound_at}.mp4"
        video(name, samples=click(1.0, rate), rate=rate, picture_at=picture_at, sound_at=sound_at)
        sound = read_sound(name, SoundFormat(16000, 24000, 2))
        assert sound.shape == (2, 24000)
        assert abs(onset(sound, 16000) - (1.0 + sound_at - picture_at)) < 0.004


@pytest.mark.parametrize("span", [Span(0.8, 1.2, "s"), Span(20, 30, "frames")])
def test_sound_is_cut_where_the_picture_is(tmp_path, span):
    """A part's sound begins with its first frame and ends with it: the next part's click is not heard."""
    both = click(1.0, 48000) + click(1.2, 48000)
    file = video(tmp_path / "a.mp4", samples=both, picture_at=0.52, sound_at=0.52, codec="flac")
    sound = read_sound(Cut(file, span), SoundFormat(16000, 16000, 1))
    assert abs(onset(sound, 16000) - 0.2) < 0.004 and sound[0, 3600:].abs().max() < 0.01


@pytest.mark.parametrize(("layout", "channels"), [("mono", 1), ("stereo", 2), ("5.1", 6)])
def test_any_layout_becomes_the_wanted_channels(tmp_path, layout, channels):
    """PCM at 192 kHz, which no AAC encoder takes; mono comes out on both channels."""
    file = video(
        tmp_path / "a.mkv", samples=click(0.5, 192000, channels=channels), rate=192000, codec="pcm_f32le", layout=layout
    )
    sound = read_sound(file, SoundFormat(16000, 16000, 2))
    assert abs(onset(sound[:1], 16000) - 0.5) < 0.002 and abs(onset(sound[1:], 16000) - 0.5) < 0.002
    assert read_sound(file, SoundFormat(24000, 100, 1)).shape == (1, 100)


def test_short_missing_and_broken_sound(tmp_path):
    short = video(tmp_path / "short.mp4", samples=click(0.5, 48000, seconds=1))
    sound = read_sound(short, SoundFormat(16000, 32000, 2))
    assert sound[:, 20000:].abs().max() == 0 and abs(onset(sound, 16000) - 0.5) < 0.004
    with pytest.raises(ClipError):
        read_sound(video(tmp_path / "silent.mp4"), SoundFormat(16000, 100, 2))
    broken(tmp_path / "broken.mkv")
    with pytest.raises(ClipError):
        read_sound(tmp_path / "broken.mkv", SoundFormat(16000, 100, 2))


def test_a_gap_stays_silent(tmp_path):
    """Sound after a gap is heard at its time: the gap is not closed."""
    both = click(0.5, 48000) + click(1.2, 48000)
    sound = read_sound(
        video(tmp_path / "a.mkv", samples=both, codec="pcm_s16le", gap=0.4), SoundFormat(16000, 32000, 1)
    )
    assert abs(onset(sound, 16000) - 0.5) < 0.004 and abs(onset(sound[:, 16000:], 16000) - 0.6) < 0.004


@pytest.mark.parametrize("first", [click(0.4, 48000, seconds=1), None])
def test_the_sound_of_joined_files_stays_with_its_picture(tmp_path, first):
    """Time stamps restart where files were joined. The picture is taken in order then, and the sound with it, though
    the first file may have none."""
    one = video(tmp_path / "1.ts", samples=first, seconds=1)
    two = video(tmp_path / "2.ts", samples=click(0.8, 48000))
    (tmp_path / "both.ts").write_bytes(one.read_bytes() + two.read_bytes())
    wanted, size = SoundFormat(16000, 40000, 1), ClipFormat(num_frames=60, height=64, width=64, fps=25.0)
    picture = read_clip(tmp_path / "both.ts", size).mean(dim=(0, 2, 3))
    assert (picture.diff() < 0).nonzero().flatten().tolist() == [24]
    sound = read_sound(tmp_path / "both.ts", wanted)
    assert abs(onset(sound[:, 16000:], 16000) - 0.8) < 0.01
    assert first is None or abs(onset(sound, 16000) - 0.4) < 0.01
    assert sound[:, : 16000 * 2 // 5 - 200].abs().max() < 0.01  # the second file's is not heard in the first


def test_sound_goes_with_frames_that_are_taken_in_order(tmp_path):
    """AVI has times of packets alone, which are not those of frames where there are B-frames: the first is not late."""
    file = video(tmp_path / "a.avi", samples=click(1.0, 48000), codec="pcm_s16le")
    assert abs(onset(read_sound(file, SoundFormat(16000, 32000, 1)), 16000) - 1.0) < 0.004
    part = Cut(file, Span(20, 40, "frames"))
    assert abs(onset(read_sound(part, SoundFormat(16000, 8000, 1)), 16000) - 0.2) < 0.004


@pytest.mark.parametrize(("layout", "channels"), [("mono", 1), ("stereo", 2), ("5.1", 6), ("7.1", 8)])
def test_the_level_stays(tmp_path, layout, channels):
    """A tone of .5 in all channels is one of .5 in stereo and in mono."""
    tone = np.tile(0.5 * np.sin(2 * np.pi * 1000 * np.arange(48000) / 48000, dtype=np.float32), (channels, 1))
    file = video(tmp_path / "a.mkv", samples=tone, codec="pcm_f32le", layout=layout)
    for count in (1, 2):
        loudest = read_sound(file, SoundFormat(16000, 12000, count))[:, 1000:].amax(dim=1)
        torch.testing.assert_close(loudest, torch.full((count,), 0.5), atol=1e-3, rtol=0)


def test_surround_is_mixed_as_the_standard_says():
    """The weights of ITU-R BS.775, with a sum of 1; channels without a place are averaged, but two."""
    names = ["FL", "FR", "FC", "LFE", "BL", "BR", "SL", "SR"]
    left, right = np.array([[1, 0, 0.707, 0, 0.707, 0, 0.707, 0], [0, 1, 0.707, 0, 0, 0.707, 0, 0.707]]) / 3.121
    np.testing.assert_allclose(mixing(names, 2), [left, right], rtol=1e-6)
    np.testing.assert_allclose(mixing(names, 1), [(left + right) / 2], rtol=1e-6)
    np.testing.assert_array_equal(mixing(["NONE"] * 3, 2), np.full((2, 3), np.float32(1 / 3)))
    np.testing.assert_array_equal(mixing(["NONE", "NONE"], 2), np.eye(2))
    np.testing.assert_array_equal(mixing(["FL", "FR"], 2), np.eye(2))


def test_a_track_with_nothing_in_the_clip_is_none(tmp_path):
    late = video(tmp_path / "late.mkv", samples=click(0.5, 48000), sound_at=10.0)
    with pytest.raises(ClipError):
        read_sound(late, SoundFormat(16000, 100, 2))
    assert read_sound(late, SoundFormat(16000, 100, 2), silence=True).abs().max() == 0


def read_slowly():
    for _ in range(4):
        time.sleep(0.4)
        extend_limit()
    return b"", 4


def test_a_file_that_ends_or_holds_up_its_reader_costs_itself_alone(tmp_path):
    with pytest.raises(ClipError):
        ReaderProcesses("os:abort", seconds=20).call()
    with pytest.raises(ClipError):
        ReaderProcesses("time:sleep", seconds=1).call(30)
    assert ReaderProcesses("tests.unit.test_sound:read_slowly", seconds=1).call() == (b"", 4), "it makes progress"
    good = video(tmp_path / "good.mp4", samples=click(0.5, 48000))
    bad = video(tmp_path / "bad.mov", samples=click(0.5, 48000, channels=8), codec="pcm_s16le", layout="7.1")
    before = read_sound(good, SoundFormat(16000, 16000, 2))
    for _ in range(3):
        with suppress(ClipError):  # PyAV 18.1 dies of it; a later one may read it
            read_sound(bad, SoundFormat(16000, 16000, 2))
        assert torch.equal(read_sound(good, SoundFormat(16000, 16000, 2)), before)
    end_sound_readers()
    assert torch.equal(read_sound(good, SoundFormat(16000, 16000, 2)), before)


@pytest.mark.parametrize(("rate", "fps", "frames"), [(16000, 8, 6), (24000, 24, 31), (192000, 25, 30)])
def test_written_sound_reads_back_in_step(tmp_path, rate, fps, frames):
    """The onset survives, and the track is not longer than the clip by more than AAC's frame."""
    samples = click(0.4, rate, channels=2)
    write_mp4(tmp_path / "clip.mp4", np.zeros((frames, 64, 64, 3), np.uint8), fps, Sound(samples, rate))
    count = round(frames / fps * 16000)
    sound = read_sound(tmp_path / "clip.mp4", SoundFormat(16000, count, 2))
    assert abs(onset(sound, 16000) - 0.4) < 0.004
    expected = click(0.4, 16000, channels=2)[:, :count]
    assert np.corrcoef(sound.numpy().ravel(), expected.ravel())[0, 1] > 0.95
    with av.open(str(tmp_path / "clip.mp4")) as container:
        track = container.streams.audio[0]
        assert abs(float(track.duration * track.time_base) - frames / fps) < 1024 / min(rate, 48000)


@pytest.mark.slow
def test_clips_become_items_of_two_parts(tmp_path, monkeypatch):
    """The encoders get a clip with its sound. One without a track is left out, or silent; a broken one is left out."""
    folder, pipeline = tmp_path / "clips", build_tiny_ltx2_pipeline(tmp_path / "pipeline")
    folder.mkdir()
    video(folder / "a.mp4", samples=click(0.7, 44100, channels=2), rate=44100, layout="stereo", picture_at=0.52)
    video(folder / "b.mp4")
    broken(folder / "c.mkv")
    write_metadata(folder, [("a.mp4", "a"), ("b.mp4", "b"), ("c.mkv", "c")])
    sizes = {"num_frames": 17, "height": 64, "width": 96, "fps": 24.0}

    make = partial(encode_source, path=folder, encoders=pipeline, max_text_tokens=8, **sizes)
    data, silent = make(), make(silence="zero")
    assert len(data) == 1 and len(silent) == 2 and data.set.path != silent.set.path
    reasons = (data.set.path / "left_out.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in reasons] == ["name", "b.mp4", "c.mkv"]
    codec = data.encoders.codec(device=torch.device("cpu"), dtype=torch.float32, tiling=False)
    wanted = SoundFormat(16000, 18 * 640, 2)
    heard = read_sound(folder / "a.mp4", wanted)
    assert abs(onset(heard, 16000) - 0.18) < 0.004
    for item, name, sound in ((data[0], "a", heard), (silent[0], "a", heard), (silent[1], "b", torch.zeros(2, 11520))):
        truth = codec.encode_clip(read_clip(folder / f"{name}.mp4", ClipFormat(**sizes)), sound)
        assert all(torch.equal(item[part_name("latents", part)], x[0]) for part, x in truth.parts.items())
    waves, rate = data.decode_sound(truth)
    assert waves.shape[:2] == (1, 2) and abs(waves.shape[2] / rate - 17 / 24) < 0.05
    again = open_set(silent.set.path, cache=tmp_path / "cache")
    assert torch.equal(again[1]["latents/audio"], silent[1]["latents/audio"])
    monkeypatch.setattr(encode, "SOUND_VERSION", "another")  # what is finished by earlier rules is used as it is
    monkeypatch.setattr(encode, "EARLIER_SOUNDS", ("none", SOUND_VERSION))
    assert make().set.path == data.set.path
    (data.set.path / "set.json").unlink()
    assert make().set.path != data.set.path
    with refused("data.silence"):
        make(encoders="assets/quickstart_teacher", silence="zero", num_frames=6, height=16, width=16)
