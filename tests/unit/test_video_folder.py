"""The video folder as the trainer uses it, and its cache, in one process."""

import gc
import os
import shutil
import weakref
from functools import partial

import pytest
import torch
from safetensors.torch import save

from distill.data.encoders.choose import choose_encoders
from distill.data.encoders.wan import TextEncoder, VideoCodec, pad_text
from distill.data.sets.write_set import verify
from distill.data.videos.decode import ClipFormat, read_clip
from tests.encoded import encode_source, open_set
from tests.oracles.samples import video
from tests.tiers import slow
from tests.tiny_pipeline import moving_square, render_clips, write_metadata, write_video
from tests.unit.refused import refused


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
def make(tiny, videos):
    return partial(encode_source, path=videos, encoders=tiny)


def cached(tmp_path):
    return {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*") if file.is_file()}


@slow
def test_another_way_through_the_vae_is_another_latent(make, counts):
    """Latents made in bf16 or by tiles must not pass for fp32 latents."""
    fingerprints = {make().fingerprint}
    assert len(counts["clips"]) == 3
    for n, changes in enumerate([{"vae_precision": "bf16"}, {"vae_tiling": True}], start=2):
        data = make(**changes)
        fingerprints.add(data.fingerprint)
        assert len(counts["clips"]) == 3 * n and data.decode(video(data[0]["latents"][None])).shape == (1, 9, 32, 48, 3)
    assert len(fingerprints) == 3


def test_items_are_the_clips_through_the_encoders(make, tiny, videos):
    data = make(negative_prompt="blurred")
    assert (
        len(data) == 3
        and data.fps == 8
        and data.latent_shapes == {"video": (16, 3, 4, 6)}
        and data.condition_shapes == {"text": (24, 32)}
    )
    assert list(data.captions()) == ["a red square, drifting", "a green square, drifting", "a blue square, drifting"]
    folder, cpu = choose_encoders(tiny), {"device": torch.device("cpu"), "dtype": torch.float32}
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
    assert len(files) == 6, "two shards, index, set.json, left_out.csv and the lock"
    loads = []
    load = VideoCodec.__init__
    monkeypatch.setattr(VideoCodec, "__init__", lambda self, *a, **k: (loads.append(1), load(self, *a, **k))[1])
    second = make()
    assert len(counts["clips"]) == 3 and len(counts["captions"]) == 4 and cached(tmp_path) == files
    assert second.fingerprint == first.fingerprint
    assert all(torch.equal(first[i]["latents"], second[i]["latents"]) for i in range(3))
    latents = video(torch.stack([second[0]["latents"], second[2]["latents"]]))
    assert not loads
    clips = second.decode(latents)
    assert clips.shape == (2, 9, 32, 48, 3) and clips.dtype == torch.uint8 and clips.device.type == "cpu"
    assert torch.equal(second.decode(latents[1:])[0], clips[1]) and len(loads) == 1
    second.release()
    assert torch.equal(second.decode(latents[:1])[0], clips[0]) and len(loads) == 2


# Clips that are left out


def test_bad_clips_are_named_and_left_out_again_when_the_rest_is_cached(tmp_path, tiny, caplog):
    folder = render_clips(tmp_path / "bad", 2, broken=True, short=True, missing=True)
    write_video(folder / "unlisted.mp4", moving_square("red", 24, 48, 80), fps=16)
    for n in range(2):
        caplog.clear()
        data = encode_source(folder, tiny)
        assert len(data) == 2 and data.captions()[0] == data[0]["caption"] == "a red square, drifting"
        left_out = (data.set.path / "left_out.csv").read_text()
        for text in (left_out, *([caplog.text] if not n else [])):
            assert all(name in text for name in ("broken.mp4", "missing.mp4", "short.mp4"))
        assert "unlisted.mp4" in caplog.text and "clip_" not in left_out


def test_no_usable_clip_is_an_error(tmp_path, tiny):
    folder = render_clips(tmp_path / "bad", 0, broken=True, short=True)
    with refused("broken.mp4"):
        encode_source(folder, tiny)
    write_video(folder / "broken.mp4", moving_square("red", 24, 32, 48), fps=16)
    with refused("data.buckets"):
        encode_source(folder, tiny, buckets=[[9, 48, 48]])


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
        ("buckets", [[9, 32, 48], [9, 32, 40]]),
        ("buckets", [[9, 32, 48], [9, 32, 48]]),
        ("buckets", [[9, 32]]),
        ("buckets", []),
    ):
        with refused(f"data.{setting}"):
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


@slow
def test_distinct_captions_and_distinct_clips_are_encoded_once(make, counts, videos):
    rows = [("clip_0.mp4", "same"), ("clip_1.mp4", "same"), ("clip_0.mp4", "other"), ("clip_2.mp4", " ")]
    write_metadata(videos, rows)
    data = make()
    assert "clip_2.mp4" in (data.set.path / "left_out.csv").read_text(), "it has no caption"
    assert len(data) == 3 and len(counts["clips"]) == 2 and sorted(counts["captions"]) == ["", "other", "same"]
    assert torch.equal(data[0]["latents"], data[2]["latents"]) and data[2]["caption"] == "other"


@slow
@pytest.mark.parametrize(
    ("change", "clips", "captions"),
    [
        ({"num_frames": 5}, 3, 4),
        ({"negative_prompt": "blurred"}, 3, 5),
        ({"latents": "bf16"}, 3, 4),
        ({"max_text_tokens": 16}, 3, 4),
    ],
)
def test_a_changed_setting_never_reads_stale_content(make, counts, change, clips, captions):
    before = make()
    counts["clips"].clear(), counts["captions"].clear()
    after = make(**change)
    assert len(counts["clips"]) == clips and len(counts["captions"]) == captions
    assert after.fingerprint != before.fingerprint
    assert (
        tuple(after[0]["latents"].shape) == after.latent_shapes["video"]
        and tuple(after[0]["text"].shape) == after.condition_shapes["text"]
    )
    counts["clips"].clear(), counts["captions"].clear()
    assert make().fingerprint == before.fingerprint and not counts["clips"] and not counts["captions"]


@slow
@pytest.mark.parametrize("part", ["vae", "text_encoder"])
def test_other_weights_under_the_same_path_are_noticed(make, counts, tiny, tmp_path, part):
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
    assert len(counts["clips"]) == 3 and len(counts["captions"]) == 4


@slow
def test_clips_are_known_by_their_bytes(make, counts, videos):
    make()
    counts["clips"].clear()
    old = (videos / "clip_0.mp4").stat()
    os.utime(videos / "clip_1.mp4", (1, 1))  # touched: still known
    make()
    assert not counts["clips"]
    data = bytearray((videos / "clip_0.mp4").read_bytes())
    at = data.index(b"Lavf")
    data[at : at + 4] = b"Lavx"  # other bytes of the same size and time
    (videos / "clip_0.mp4").write_bytes(data)
    os.utime(videos / "clip_0.mp4", ns=(old.st_atime_ns, old.st_mtime_ns))
    make()
    assert len(counts["clips"]) == 3


SEVERAL = [[9, 32, 48], [9, 48, 32], [5, 32, 48], [9, 64, 96]]


@slow
def test_clips_of_several_sizes(make, videos, tmp_path, caplog):
    """Each clip has the latents that one size alone gives; a size that no clip takes is named."""
    pictures = {"clip_0": (24, 48, 80), "clip_1": (24, 80, 48), "clip_2": (10, 48, 80), "small": (24, 16, 32)}
    for name, size in pictures.items():
        write_video(videos / f"{name}.mp4", moving_square("red", *size), fps=16)
    write_metadata(videos, [(f"{name}.mp4", f"a {name}") for name in (*pictures, "clip_1")])
    data = make(buckets=SEVERAL)
    assert [bucket.latent_shapes["video"] for bucket in data.buckets] == [(16, 3, 4, 6), (16, 3, 6, 4), (16, 2, 4, 6)]
    assert [list(bucket.items) for bucket in data.buckets] == [[0], [1, 3], [2]] and len(data) == 4
    assert "[9,64,96]" in caplog.text and "small.mp4" in (data.set.path / "left_out.csv").read_text()
    assert list(data.captions()) == ["a clip_0"], "samples have the first size"
    assert data.image_of("a clip_0") == (data.set, 0)
    with refused("a clip_1"):  # whose image would have another size
        data.image_of("a clip_1")
    for bucket, (frames, height, width) in zip(data.buckets, SEVERAL, strict=False):
        alone = make(num_frames=frames, height=height, width=width)
        for item in bucket.items:
            caption = data.caption(item)
            row = next(i for i in range(len(alone)) if alone.caption(i) == caption)
            assert torch.equal(data[item]["latents"], alone[row]["latents"])
    opened = open_set(data.set.path, cache=tmp_path / "more")
    assert opened.fingerprint == data.fingerprint and opened.buckets[1].latent_shapes == data.buckets[1].latent_shapes
    assert all(torch.equal(opened[i]["latents"], data[i]["latents"]) for i in range(4))
    reordered = make(buckets=[SEVERAL[1], SEVERAL[0], SEVERAL[2]])
    assert reordered.latent_shapes["video"] == (16, 3, 6, 4) and list(reordered.captions()) == ["a clip_1"]


@slow
def test_a_damaged_shard_is_refused_skipped_or_encoded_again(make, counts, tmp_path):
    data = make()
    before, file = data[0]["latents"], data.set.path / "clips-00000000.safetensors"
    files, whole = cached(tmp_path).keys(), file.read_bytes()
    for damaged in (None, whole[:-4], save({"latents": torch.zeros(2, 2)})):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with refused("data.path"):
            open_set(data.set.path, cache=tmp_path / "more")
        with refused("data.path"):  # no clip is left
            open_set(data.set.path, cache=tmp_path / "more", damaged="skip")
        counts["clips"].clear()
        assert torch.equal(make()[0]["latents"], before) and len(counts["clips"]) == 3
        assert cached(tmp_path).keys() == files and file.read_bytes() == whole
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    file.write_bytes(flipped)
    assert len(verify(data.set.path, "SET=x")["clips"]) == 1
    assert make().fingerprint == data.fingerprint and file.read_bytes() == whole


@slow
def test_a_set_equals_the_folder_it_is_made_of(make, videos, tiny, tmp_path, counts):
    data = make(negative_prompt="blurred")
    opened = open_set(data.set.path, cache=tmp_path / "more", captions=["another caption"])
    assert opened.fingerprint == data.fingerprint and counts["captions"][-3:] == ["another caption", "blurred", ""]
    assert torch.equal(opened.null["text"], data.null["text"])
    assert opened.condition(["another caption"]).tensors["text"].abs().sum() > 0
    for i in range(3):
        one, other = data[i], opened[i]
        assert one.keys() == other.keys() and one["caption"] == other["caption"]
        assert torch.equal(one["latents"], other["latents"]) and torch.equal(one["text"], other["text"])
    half = make(latents="bf16")
    assert torch.equal(half[0]["latents"], data[0]["latents"].bfloat16().float())
    other = shutil.copytree(tiny, tmp_path / "other")
    (other / "vae" / "more.json").write_text("{}")
    with refused("data.encoders"):
        open_set(data.set.path, cache=tmp_path / "more", encoders=str(other))
    with refused("data.path"):
        open_set(videos, cache=tmp_path / "more")


def test_foreign_folders_are_refused(make, tmp_path):
    data = make(cache=tmp_path / "sets")
    (data.set.path / "set.json").unlink()
    (data.set.path / "notes.txt").write_text("")
    with refused("data.cache"):
        make(cache=tmp_path / "sets")


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
    assert not [file for file in cached(tmp_path) if file.suffix == ".safetensors"]
