"""The video folder as the trainer sees it, and its cache, in one process."""

import csv
import gc
import logging
import os
import shutil
import time
import weakref
from pathlib import Path

import pytest
import torch

from distill.data.clips import ClipFormat, read_clip
from distill.data.encoders import TextEncoder, VideoCodec, inspect_encoders, pad_text
from distill.data.video_folder import VideoFolder
from fsdp_cp.errors import UserError
from tests.tiny_pipeline import moving_square, render_clips, write_metadata, write_video

SIZES = {"num_frames": 9, "height": 32, "width": 48, "fps": 8, "max_text_tokens": 24}
REAL = Path(__file__).resolve().parents[3] / "shared" / "videos"


@pytest.fixture
def videos(tmp_path):
    return render_clips(tmp_path / "videos", 3)


@pytest.fixture
def counts(monkeypatch):
    """Calls that reach the real encoders: {"clips": [...], "captions": [...]}."""
    seen = {"clips": [], "captions": []}
    encode_clip, encode_text = VideoCodec.encode, TextEncoder.encode

    def clip(self, video):
        seen["clips"].append(video)
        return encode_clip(self, video)

    def text(self, caption):
        seen["captions"].append(caption)
        return encode_text(self, caption)

    monkeypatch.setattr(VideoCodec, "encode", clip)
    monkeypatch.setattr(TextEncoder, "encode", text)
    return seen


@pytest.fixture
def make(tmp_path, tiny, videos):
    def build(**changes):
        return VideoFolder(**({"path": videos, "encoders": tiny, "cache": tmp_path / "cache"} | SIZES | changes))

    return build


def cached(tmp_path):
    return {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*") if file.is_file()}


def test_another_way_through_the_vae_is_another_latent(make, counts):
    """What bf16 or tiles made must not pass for what fp32 makes; embeddings do not depend on it."""
    texts = len(make().cache.write_texts([""])), len(counts["captions"])
    fingerprints = {make().fingerprint}
    assert len(counts["clips"]) == 3
    for n, changes in enumerate([{"vae_dtype": torch.bfloat16}, {"vae_tiling": True}], start=2):
        data = make(**changes)
        fingerprints.add(data.fingerprint)
        assert len(counts["clips"]) == 3 * n and data.decode(data[0]["latents"][None]).shape == (1, 9, 32, 48, 3)
    assert len(fingerprints) == 3 and texts == (1, len(counts["captions"]))


def test_items_are_the_clips_through_the_encoders(make, tiny, videos):
    data = make(negative_prompt="blurred")
    assert (
        len(data) == 3
        and data.fps == 8
        and data.latent_shape == (16, 3, 4, 6)
        and data.condition_shapes == {"text": (24, 32)}
    )
    assert data.captions() == ["a red square, drifting", "a green square, drifting", "a blue square, drifting"]
    folder, cpu = inspect_encoders(tiny), {"device": torch.device("cpu"), "dtype": torch.float32}
    codec, encoder = VideoCodec(folder, **cpu), TextEncoder(folder, max_tokens=24, **cpu)
    for i in range(3):
        item = data[i]
        assert set(item) == {"latents", "text", "caption"} and item["caption"] == data.captions()[i]
        wanted = codec.encode(read_clip(videos / f"clip_{i}.mp4", ClipFormat(num_frames=9, height=32, width=48, fps=8)))
        torch.testing.assert_close(item["latents"], wanted)
        torch.testing.assert_close(item["text"], pad_text(encoder.encode(item["caption"]), 24), rtol=1e-5, atol=1e-5)
        assert item["latents"].dtype == item["text"].dtype == torch.float32
    assert not torch.equal(data[0]["latents"], data[1]["latents"])
    known = data.condition(["blurred", data.captions()[1]])
    assert torch.equal(known.tensors["text"], torch.stack([data.null["text"], data[1]["text"]]))
    assert torch.equal(known.null.tensors["text"][1], data.null["text"])
    assert data.null["text"].shape == (24, 32) and data.null["text"].abs().sum() > 0


def test_a_caption_without_embedding_is_refused_by_name(make):
    with pytest.raises(UserError, match="'an unknown caption'.*'a red square, drifting'"):
        make().condition(["an unknown caption"])


def test_decode_gives_the_clip_size_and_loads_the_vae_only_then(make, monkeypatch):
    make()  # fills the cache
    loads = []
    load = VideoCodec.__init__
    monkeypatch.setattr(VideoCodec, "__init__", lambda self, *a, **k: (loads.append(1), load(self, *a, **k))[1])
    data = make()
    latents = torch.stack([data[0]["latents"], data[2]["latents"]])
    assert not loads
    video = data.decode(latents)
    assert video.shape == (2, 9, 32, 48, 3) and video.dtype == torch.uint8 and video.device.type == "cpu"
    assert torch.equal(data.decode(latents[1:])[0], video[1]) and len(loads) == 1
    data.release()
    assert torch.equal(data.decode(latents[:1])[0], video[0]) and len(loads) == 2


# Clips that are left out


def test_bad_clips_are_named_counted_and_left_out(tmp_path, tiny, caplog):
    folder = render_clips(tmp_path / "bad", 3, broken=True, short=True, missing=True)
    write_video(folder / "unlisted.mp4", moving_square("red", 24, 48, 80), fps=16)
    with caplog.at_level(logging.WARNING):
        data = VideoFolder(path=folder, encoders=tiny, cache=tmp_path / "cache", **SIZES)
    assert len(data) == 3 and data.captions()[0] == data[0]["caption"] == "a red square, drifting"
    log = caplog.text
    assert "broken.mp4 cannot be decoded" in log and "missing.mp4 is missing" in log
    assert "short.mp4 is too short: 3 frames" in log
    assert "3 of 6 clips left out" in log
    assert "1 videos are not in metadata.csv and not used: unlisted.mp4" in log
    assert "clip_" not in log
    good = render_clips(tmp_path / "good", 3)
    assert VideoFolder(path=good, encoders=tiny, cache=tmp_path / "cache", **SIZES).fingerprint == data.fingerprint


def test_left_out_clips_are_named_again_when_the_rest_is_cached(tmp_path, tiny, caplog):
    folder = render_clips(tmp_path / "bad", 1, broken=True)
    for _ in range(2):
        caplog.clear()
        VideoFolder(path=folder, encoders=tiny, cache=tmp_path / "cache", **SIZES)
        assert "broken.mp4" in caplog.text and "1 of 2 clips left out" in caplog.text


def test_no_usable_clip_is_an_error(tmp_path, tiny):
    folder = render_clips(tmp_path / "bad", 0, broken=True, short=True)
    with pytest.raises(UserError) as error:
        VideoFolder(path=folder, encoders=tiny, cache=tmp_path / "cache", **SIZES)
    assert "no usable clip (2 left out, first: broken.mp4" in str(error.value) and "\n" not in str(error.value)


def test_clips_without_a_caption_are_named_counted_and_left_out(make, counts, videos, caplog):
    (videos / "metadata.csv").write_text("file_name,caption\nclip_0.mp4\nclip_1.mp4, \nclip_2.mp4,last\n")
    data = make()
    assert [data[i]["caption"] for i in range(len(data))] == ["last"] and len(counts["clips"]) == 1
    for name in ("clip_0.mp4", "clip_1.mp4"):  # without one, and with white space alone
        assert f"{name} has no caption in metadata.csv" in caplog.text
    assert "2 of 3 clips left out" in caplog.text


# Settings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "nowhere"}, "data.path=nowhere is not a folder"),
        ({"encoders": "nowhere"}, "data.encoders=nowhere is not a folder"),
        ({"num_frames": 16}, "data.num_frames=16 .* use 17"),
        ({"height": 40}, "data.height=40 .* use 32"),
        ({"width": 0}, "data.width=0 .* use 16"),
        ({"fps": 0}, "data.fps=0 "),
        ({"max_text_tokens": 0}, "data.max_text_tokens=0 "),
    ],
)
def test_settings_that_do_not_fit_fail_before_any_work(make, counts, tmp_path, change, words):
    with pytest.raises(UserError, match=words) as error:
        make(**change)
    assert "\n" not in str(error.value)
    assert not counts["clips"] and not counts["captions"] and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no metadata.csv"),
        (b"", "no column file_name"),
        (b"file,caption\na.mp4,x\n", "no column file_name .found file,caption"),
        (b"file_name,text\na.mp4,x\n", "no column caption"),
        (b"file_name,caption\n", "no rows"),
        (b"file_name,caption\nclip_0.mp4,x\n,y\n", "no file_name in line 3"),
        (b"file_name,caption\nclip_0.mp4,\xff\xfe\n", "UTF-8"),
    ],
)
def test_a_wrong_table_is_named(make, videos, content, words):
    (videos / "metadata.csv").unlink()
    if content is not None:
        (videos / "metadata.csv").write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        make()
    assert "data.path" in str(error.value) and "\n" not in str(error.value)


def test_a_table_from_a_spreadsheet_is_read(make, videos):
    """Byte order mark, another column, quotes, commas and line breaks in a caption."""
    with (videos / "metadata.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([("licence", "caption", "file_name"), ("x", 'a "red", two\nlines', "clip_0.mp4")])
    data = make()
    assert data.captions() == ['a "red", two\nlines'] and len(data) == 1


def test_a_cache_that_cannot_be_made_is_named(make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="data.cache=.*file"):
        make(cache=tmp_path / "file" / "cache")


# The cache


def test_a_second_run_encodes_nothing(make, counts, tmp_path):
    first = make()
    assert len(counts["clips"]) == 3 and len(counts["captions"]) == 4  # three captions and the negative prompt
    files = cached(tmp_path)
    assert len(files) == 7
    second = make()
    assert len(counts["clips"]) == 3 and len(counts["captions"]) == 4 and cached(tmp_path) == files
    assert second.fingerprint == first.fingerprint
    assert all(torch.equal(first[i]["latents"], second[i]["latents"]) for i in range(3))


def test_distinct_captions_and_distinct_clips_are_encoded_once(make, counts, videos):
    rows = [("clip_0.mp4", "same"), ("clip_1.mp4", "same"), ("clip_0.mp4", "other")]
    write_metadata(videos, rows)
    data = make()
    assert len(data) == 3 and len(counts["clips"]) == 2 and sorted(counts["captions"]) == ["", "other", "same"]
    assert torch.equal(data[0]["latents"], data[2]["latents"]) and data[2]["caption"] == "other"


@pytest.mark.parametrize(
    ("change", "clips", "captions"),
    [
        ({"num_frames": 5}, 3, 0),
        *(
            pytest.param(change, 3, 0, marks=pytest.mark.slow)
            for change in ({"height": 48}, {"width": 32}, {"fps": 10})
        ),
        ({"dtype": torch.bfloat16}, 3, 4),
        ({"max_text_tokens": 16}, 0, 4),
        ({"negative_prompt": "blurred"}, 0, 1),
    ],
)
def test_a_changed_setting_never_reads_stale_content(make, counts, change, clips, captions):
    before = make()
    counts["clips"].clear(), counts["captions"].clear()
    after = make(**change)
    assert len(counts["clips"]) == clips and len(counts["captions"]) == captions
    assert after.fingerprint != before.fingerprint
    assert (
        tuple(after[0]["latents"].shape) == after.latent_shape
        and tuple(after[0]["text"].shape) == after.condition_shapes["text"]
    )
    counts["clips"].clear(), counts["captions"].clear()
    assert make().fingerprint == before.fingerprint and not counts["clips"] and not counts["captions"]


@pytest.mark.parametrize(("part", "clips", "captions"), [("vae", 3, 0), ("text_encoder", 0, 4), ("tokenizer", 0, 4)])
def test_other_weights_under_the_same_path_are_noticed(make, counts, tiny, tmp_path, part, clips, captions):
    folder = shutil.copytree(tiny, tmp_path / "pipeline")
    before = make(encoders=folder)
    counts["clips"].clear(), counts["captions"].clear()
    names = {"vae": "diffusion_pytorch_model.safetensors", "text_encoder": "model.safetensors"}
    file = folder / part / names.get(part, "tokenizer.json")
    data, stat = bytearray(file.read_bytes()), file.stat()
    if part == "tokenizer":
        data = data.replace(b"-3.0", b"-3.5")
    else:
        data[-1] ^= 1  # one bit of one weight; same size, same time
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert make(encoders=folder).fingerprint != before.fingerprint
    assert len(counts["clips"]) == clips and len(counts["captions"]) == captions


def test_clips_are_known_by_their_bytes(make, counts, videos):
    make()
    counts["clips"].clear()
    old = (videos / "clip_0.mp4").stat()
    os.utime(videos / "clip_1.mp4", (1, 1))  # touched: still known
    shutil.move(videos / "clip_2.mp4", videos / "renamed.mp4")
    write_metadata(videos, [(name, "x") for name in ("clip_0.mp4", "clip_1.mp4", "renamed.mp4")])
    make()
    assert not counts["clips"]
    data = bytearray((videos / "clip_0.mp4").read_bytes())
    at = data.index(b"Lavf")
    data[at : at + 4] = b"Lavx"  # other bytes of the same size and time
    (videos / "clip_0.mp4").write_bytes(data)
    os.utime(videos / "clip_0.mp4", ns=(old.st_atime_ns, old.st_mtime_ns))
    make()
    assert len(counts["clips"]) == 1


def test_a_killed_write_leaves_nothing_under_a_key(make, counts, monkeypatch, tmp_path):
    replace, done = os.replace, []

    def killed(source, target):
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        make()
    assert [file.name for file in cached(tmp_path)] == [Path(done[0]).name]
    monkeypatch.undo()
    assert len(make()) == 3


def test_the_next_run_goes_on_with_what_is_there(make, counts, tmp_path):
    make()
    latents = sorted((tmp_path / "cache" / "latents").iterdir())
    latents[0].unlink()
    counts["clips"].clear()
    make()
    assert len(counts["clips"]) == 1 and sorted((tmp_path / "cache" / "latents").iterdir()) == latents


@pytest.mark.parametrize("damage", ["cut", "empty", "shape"])
def test_a_damaged_cache_file_is_written_again_and_logged(make, counts, tmp_path, caplog, damage):
    from safetensors.torch import save_file

    before = make()[0]["latents"]
    file = tmp_path / "cache" / "latents" / f"{make()._items[0][0]}.safetensors"
    if damage == "shape":
        save_file({"latents": torch.zeros(2, 2)}, file)
    else:
        file.write_bytes(file.read_bytes()[:-4] if damage == "cut" else b"")
    counts["clips"].clear()
    assert torch.equal(make()[0]["latents"], before) and len(counts["clips"]) == 1
    assert file.name in caplog.text


def test_left_overs_of_killed_runs_are_removed_young_ones_kept(make, tmp_path):
    folder = tmp_path / "cache" / "latents"
    folder.mkdir(parents=True)
    old, young = folder / f".{'0a' * 16}.host.1.tmp", folder / f".{'0b' * 16}.host.2.tmp"
    of_user = folder / ".notes.tmp"
    for file in (old, young, of_user):
        file.write_text("")
    for file in (old, of_user):
        os.utime(file, (time.time() - 2 * 86400,) * 2)
    make()
    assert not old.exists() and young.exists() and of_user.exists()


def test_the_encoders_are_freed(make, monkeypatch):
    """The text encoder is the largest network of all: nothing may hold it while training runs."""
    held = []
    for encoder, name in ((TextEncoder, "model"), (VideoCodec, "vae")):

        def remember(self, *args, load=encoder.__init__, name=name, **options):
            load(self, *args, **options)
            held.append(weakref.ref(getattr(self, name)))

        monkeypatch.setattr(encoder, "__init__", remember)
    gc.disable()  # the cache itself must collect
    try:
        data = make()
        assert len(held) == 2 and len(data) == 3
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()


def test_latents_that_are_not_finite_are_refused(make, monkeypatch, tmp_path):
    monkeypatch.setattr(VideoCodec, "encode", lambda self, video: torch.full((16, 3, 4, 6), torch.nan))
    with pytest.raises(UserError, match="clip_0.mp4: .*not finite"):
        make()
    assert not cached(tmp_path)


@pytest.mark.skipif(not (REAL / "metadata.csv").is_file(), reason="needs ../shared/videos")
def test_the_real_clips(tiny, tmp_path):
    data = VideoFolder(path=REAL, encoders=tiny, cache=tmp_path, num_frames=9, height=32, width=64, fps=8)
    assert len(data) == 4 and data.condition_shapes == {"text": (512, 32)}
    latents = torch.stack([data[i]["latents"] for i in range(4)])
    assert latents.shape == (4, 16, 3, 4, 8) and 0.3 < latents.std() < 3
    assert data.decode(latents[:1]).shape == (1, 9, 32, 64, 3)
