"""The video folder as the trainer uses it, and its cache, in one process."""

import csv
import gc
import os
import shutil
import time
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from distill.data.clips import ClipFormat, read_clip
from distill.data.encoders import TextEncoder, VideoCodec, inspect_encoders, pad_text
from distill.data.video_folder import VideoFolder
from tests.tiny_pipeline import moving_square, render_clips, write_metadata, write_video
from tests.unit.refused import refused

SIZES = {"num_frames": 9, "height": 32, "width": 48, "fps": 8, "max_text_tokens": 24}


@pytest.fixture
def videos(tmp_path):
    return render_clips(tmp_path / "videos", 3)


@pytest.fixture
def counts(monkeypatch):
    """Record calls that reach the real encoders: {"clips": [...], "captions": [...]}."""
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


@pytest.mark.slow
def test_another_way_through_the_vae_is_another_latent(make, counts):
    """Latents made in bf16 or by tiles must not be used as fp32 latents. Embeddings do not depend on these settings."""
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
    with refused("'an unknown caption'"):
        data.condition(["an unknown caption"])


def test_a_second_run_encodes_nothing_and_loads_the_vae_to_decode(make, counts, tmp_path, monkeypatch):
    first = make()
    assert len(counts["clips"]) == 3 and len(counts["captions"]) == 4  # three captions and the negative prompt
    files = cached(tmp_path)
    assert len(files) == 7
    loads = []
    load = VideoCodec.__init__
    monkeypatch.setattr(VideoCodec, "__init__", lambda self, *a, **k: (loads.append(1), load(self, *a, **k))[1])
    second = make()
    assert len(counts["clips"]) == 3 and len(counts["captions"]) == 4 and cached(tmp_path) == files
    assert second.fingerprint == first.fingerprint
    assert all(torch.equal(first[i]["latents"], second[i]["latents"]) for i in range(3))
    latents = torch.stack([second[0]["latents"], second[2]["latents"]])
    assert not loads
    video = second.decode(latents)
    assert video.shape == (2, 9, 32, 48, 3) and video.dtype == torch.uint8 and video.device.type == "cpu"
    assert torch.equal(second.decode(latents[1:])[0], video[1]) and len(loads) == 1
    second.release()
    assert torch.equal(second.decode(latents[:1])[0], video[0]) and len(loads) == 2


# Clips that are left out


def test_bad_clips_are_named_and_left_out_again_when_the_rest_is_cached(tmp_path, tiny, caplog):
    folder = render_clips(tmp_path / "bad", 2, broken=True, short=True, missing=True)
    write_video(folder / "unlisted.mp4", moving_square("red", 24, 48, 80), fps=16)
    for _ in range(2):
        caplog.clear()
        data = VideoFolder(path=folder, encoders=tiny, cache=tmp_path / "cache", **SIZES)
        assert len(data) == 2 and data.captions()[0] == data[0]["caption"] == "a red square, drifting"
        assert all(name in caplog.text for name in ("broken.mp4", "missing.mp4", "short.mp4", "unlisted.mp4"))
        assert "clip_" not in caplog.text
    good = render_clips(tmp_path / "good", 2)
    assert VideoFolder(path=good, encoders=tiny, cache=tmp_path / "cache", **SIZES).fingerprint == data.fingerprint


def test_no_usable_clip_is_an_error(tmp_path, tiny):
    folder = render_clips(tmp_path / "bad", 0, broken=True, short=True)
    with refused("broken.mp4"):
        VideoFolder(path=folder, encoders=tiny, cache=tmp_path / "cache", **SIZES)


@pytest.mark.slow
def test_a_table_from_a_spreadsheet_is_read_and_clips_without_a_caption_are_left_out(make, counts, videos, caplog):
    """The file has a byte order mark, another column, quotes, commas and line breaks; captions may be blank."""
    rows = [("licence", "caption", "file_name"), ("x", 'a "red", two\nlines', "clip_0.mp4"), ("x", " ", "clip_1.mp4")]
    with (videos / "metadata.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([*rows, ("x", "", "clip_2.mp4")])
    data = make()
    assert data.captions() == ['a "red", two\nlines'] and len(data) == len(counts["clips"]) == 1
    assert "clip_1.mp4" in caplog.text and "clip_2.mp4" in caplog.text


# Settings


def test_settings_that_do_not_fit_fail_before_any_work(make, counts, tmp_path):
    for setting, value in (
        ("path", "nowhere"),
        ("encoders", "nowhere"),
        ("num_frames", 16),
        ("height", 40),
        ("width", 0),
        ("fps", 0),
        ("max_text_tokens", 0),
    ):
        with refused(f"data.{setting}={value}"):
            make(**{setting: value})
    assert not counts["clips"] and not counts["captions"] and not (tmp_path / "cache").exists()


def test_a_wrong_table_is_named(make, videos):
    (videos / "metadata.csv").unlink()
    for content in (
        None,
        b"",
        b"file_name,text\na.mp4,x\n",
        b"file_name,caption\n",
        b"file_name,caption\nc.mp4,x\n,y\n",
    ):
        if content is not None:
            (videos / "metadata.csv").write_bytes(content)
        with refused("data.path"):
            make()


def test_a_cache_that_cannot_be_made_is_named(make, tmp_path):
    (tmp_path / "file").write_text("")
    with refused("data.cache"):
        make(cache=tmp_path / "file" / "cache")


# The cache


@pytest.mark.slow
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
            pytest.param(change, clips, texts, marks=pytest.mark.slow)
            for change, clips, texts in (
                ({"negative_prompt": "blurred"}, 0, 1),
                ({"dtype": torch.bfloat16}, 3, 4),
                ({"max_text_tokens": 16}, 0, 4),
            )
        ),
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


@pytest.mark.parametrize(
    ("part", "clips", "captions"),
    [("vae", 3, 0), pytest.param("text_encoder", 0, 4, marks=pytest.mark.slow)],
)
def test_other_weights_under_the_same_path_are_noticed(make, counts, tiny, tmp_path, part, clips, captions):
    folder = shutil.copytree(tiny, tmp_path / "pipeline")
    before = make(encoders=folder)
    counts["clips"].clear(), counts["captions"].clear()
    names = {"vae": "diffusion_pytorch_model.safetensors", "text_encoder": "model.safetensors"}
    file = folder / part / names[part]
    data, stat = bytearray(file.read_bytes()), file.stat()
    data[-1] ^= 1  # one bit of one weight; same size, same time
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert make(encoders=folder).fingerprint != before.fingerprint
    assert len(counts["clips"]) == clips and len(counts["captions"]) == captions


@pytest.mark.slow
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


def test_a_missing_or_damaged_cache_file_is_written_again(make, counts, tmp_path):
    data = make()
    before, file = data[0]["latents"], tmp_path / "cache" / "latents" / f"{data._items[0][0]}.safetensors"
    files, whole = cached(tmp_path).keys(), file.read_bytes()
    for damaged in (None, whole[:-4], save({"latents": torch.zeros(2, 2)})):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        counts["clips"].clear()
        assert torch.equal(make()[0]["latents"], before) and len(counts["clips"]) == 1
        assert cached(tmp_path).keys() == files


@pytest.mark.slow
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
    """The text encoder is the largest network; nothing may keep it in memory during training."""
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
    with refused("clip_0.mp4"):
        make()
    assert not cached(tmp_path)
