"""Data sets of other projects as encoded sets: equal to one of the same clips, and what is refused."""

import importlib.util
import inspect
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file

from distill.data.encoders.choose import choose_encoders
from distill.data.sets.encoded_set import EncodedSet
from distill.data.sets.stored import check_deviation
from distill.data.sources import fastvideo
from distill.data.sources.choose import read_outside
from distill.data.videos.container import Cut
from distill.data.videos.decode import ClipFormat, read_clip
from distill.data.videos.span import Span
from distill.encode import main
from tests.encoded import open_set
from tests.oracles import outside_sets
from tests.oracles.outside_sets import write_tar
from tests.tiers import parametrize, slow
from tests.unit.refused import refused

needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="the extra parquet is not installed"
)
SIZES = ("--num-frames", "9", "--height", "32", "--width", "48")
SHIPPED = "assets/quickstart_teacher"
VIDEOS = ("array", "lines", "webdataset")


@pytest.fixture(scope="module")
def clips(tiny, tmp_path_factory):
    """Five clips with our encoders' output."""
    return outside_sets.encoded_clips(tiny, tmp_path_factory.mktemp("clips"), 5)


def encoded(tiny, source, out, *options, fps=8):
    rate = () if fps is None else ("--fps", fps)
    fixed = ("--encoders", tiny, "--device", "cpu", "--negative-prompt", "blurred")
    return main([str(word) for word in (source, out, *fixed, *rate, *options)])


def shards(path):
    return {file.name: file.read_bytes() for file in path.glob("*-*.safetensors")}


@pytest.fixture(scope="module")
def own(tiny, clips, tmp_path_factory):
    """Sets of the clips by our command, in fp32 and with latents in bf16."""
    folder = tmp_path_factory.mktemp("own")
    for dtype in ("fp32", "bf16"):
        assert encoded(tiny, clips[0].file.parent, folder / dtype, *SIZES, "--latents", dtype) == 0
    return folder


@parametrize("kind", VIDEOS, quick=1)
def test_listed_and_archived_videos(kind, tiny, clips, own, tmp_path):
    getattr(outside_sets, kind)(clips, tmp_path / "source")
    assert encoded(tiny, tmp_path / "source", tmp_path / "set", *SIZES) == 0
    assert shards(tmp_path / "set") == shards(own / "fp32")
    assert list(EncodedSet(tmp_path / "set", "SET").captions) == [clip.caption for clip in clips]


def test_parts_of_a_video_are_clips_of_their_own(tiny, clips, tmp_path):
    """Two captions of one video, in both kinds of tables: each has its frames, and a short part is left out by name."""
    folder, out = tmp_path / "source", tmp_path / "set"
    outside_sets.copy_videos(clips[:1], folder)
    file = folder / "videos" / clips[0].file.name
    parts = {"one": [0, 10], "two": [14, 24], "three": [20, 24], "four": None}
    entries = [{"path": file.name, "cap": caption, "cut": cut} for caption, cut in parts.items()]
    (folder / "metadata.json").write_text(json.dumps(entries))
    sizes = ("--num-frames", "5", *SIZES[2:])
    assert encoded(tiny, folder, out, *sizes) == 0
    made = EncodedSet(out, "SET")
    assert [made.caption(made.text_of(i)) for i in range(len(made))] == ["one", "two", "four"]
    codec = choose_encoders(tiny).codec(device=torch.device("cpu"), dtype=torch.float32, tiling=False)
    size = ClipFormat(num_frames=5, height=32, width=48, fps=8)
    for i, place in enumerate((file, Cut(file, Span(14, 24, "frames")), file)):
        assert torch.equal(made.clip(made.clip_of(i))["latents"], codec.encode(read_clip(place, size)))
    assert "20 to 24 frames" in (out / "left_out.csv").read_text()
    rows = [f"{file.name},one,0,0.625\n", f"{file.name},two,0.875,1.5\n", f"{file.name},three,1.25,\n"]
    (file.parent / "metadata.csv").write_text("".join(["file_name,caption,start,end\n", *rows]))
    assert encoded(tiny, file.parent, tmp_path / "seconds", *sizes) == 0
    seconds = EncodedSet(tmp_path / "seconds", "SET")
    assert len(seconds) == 2
    for i in range(2):
        assert torch.equal(seconds.clip(i)["latents"], made.clip(made.clip_of(i))["latents"])


@needs_pyarrow
def test_fastvideos_latents_are_normalized(tiny, clips, own, tmp_path):
    outside_sets.fastvideo(clips, tmp_path / "source")
    assert encoded(tiny, tmp_path / "source", tmp_path / "set") == 0
    assert shards(tmp_path / "set") == shards(own / "fp32")


@parametrize(("kind", "options"), [("rcm", {}), ("rcm", {"merged": True}), ("lightx2v", {"ranks": 2})], quick=1)
def test_normalized_latents_are_taken_as_they_are(kind, options, tiny, clips, own, tmp_path):
    getattr(outside_sets, kind)(clips, tmp_path / "source", **options)
    rate = 8 if kind == "rcm" else None
    assert encoded(tiny, tmp_path / "source", tmp_path / "set", "--latents", "bf16", fps=rate) == 0
    made, ours = (open_set(path, cache=tmp_path / "cache") for path in (tmp_path / "set", own / "bf16"))
    assert len(made) == len(ours) == 5 and made.fps == ours.fps == 8 and made.latent_shapes == ours.latent_shapes
    known = {ours[i]["caption"]: ours[i] for i in range(5)}
    for i in range(5):
        item = made[i]
        wanted = known[item["caption"]]
        assert torch.equal(item["latents"], wanted["latents"])
        assert torch.equal(item["text"], wanted["text"].bfloat16().float())
    for name in ("null", "empty"):
        assert torch.equal(getattr(made, name)["text"], getattr(ours, name)["text"])


@pytest.mark.parametrize("kind", ["lightx2v", pytest.param("fastvideo", marks=needs_pyarrow)])
def test_stored_captions_alone(kind, tiny, clips, tmp_path):
    getattr(outside_sets, kind)(clips, tmp_path / "source", text_only=True)
    assert encoded(tiny, tmp_path / "source", tmp_path / "set", fps=None) == 0
    made = EncodedSet(tmp_path / "set", "SET")
    assert not made.parts and len(made) == 5 and list(made.captions) == [clip.caption for clip in clips]
    for i, clip in enumerate(clips):
        text = clip.text if kind == "fastvideo" else clip.text.bfloat16().float()
        assert torch.equal(made.text(made.text_of(i))["text"], text)


@parametrize("kind", ["clips", "texts", "index"], quick=1)
def test_a_kill_in_the_middle_changes_no_byte(kind, tiny, clips, tmp_path, monkeypatch, capsys):
    """The next run continues: finished entries stay, and all files equal those of an undisturbed run. A finished entry
    that is damaged ends one run, which names it; the next makes it again."""
    outside_sets.rcm(clips, tmp_path / "source")
    assert encoded(tiny, tmp_path / "source", tmp_path / "whole") == 0
    replace, made = os.replace, []

    def killed(source, target):
        if Path(target).name.startswith(kind):
            made.append(target)
            if len(made) == 3 or kind == "index":
                raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    assert encoded(tiny, tmp_path / "source", tmp_path / "set") == 130
    monkeypatch.undo()
    assert not (tmp_path / "set" / "set.json").exists() and made
    there = {file: file.stat().st_mtime_ns for file in (tmp_path / "set").glob("clips-*.safetensors")}
    assert bool(there) == (kind != "clips")
    if kind == "clips":
        entries = list((tmp_path / "set").rglob("unfinished/*.safetensors"))
        assert len(entries) == 2
        entries[0].write_bytes(entries[0].read_bytes()[:-1])
        assert encoded(tiny, tmp_path / "source", tmp_path / "set") == 2
        assert entries[0].name in capsys.readouterr().err
    assert encoded(tiny, tmp_path / "source", tmp_path / "set") == 0
    assert all(file.stat().st_mtime_ns == time for file, time in there.items()), "nothing is made again"
    files = {file.name: file.read_bytes() for file in (tmp_path / "set").iterdir() if file.name != ".lock"}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir() if file.name != ".lock"}


@slow
def test_padded_and_other_shapes_of_stored_tensors(tiny, clips, tmp_path):
    """A clip of another length, one that is damaged and one that would run code are left out, and named."""
    source, mark = tmp_path / "source", tmp_path / "mark"

    class Code:
        def __reduce__(self):
            return Path.touch, (mark,)

    outside_sets.rcm(clips, source)
    broken = {"5": outside_sets.saved(clips[0].latents[:, :2]), "6": b"PK", "7": outside_sets.saved(Code())}
    text, more = outside_sets.saved(outside_sets.filled(clips[0].text)), []
    for name, latents in broken.items():
        more += [
            (f"{name}.latent.pt", latents),
            (f"{name}.embed.pt", text),
            (f"{name}.prompt.txt", clips[0].caption.encode()),
        ]
    write_tar(source / "more.tar", [*more, ("8.prompt.txt", b"alone")])
    assert encoded(tiny, source, tmp_path / "set") == 0
    assert not mark.exists()
    left_out = (tmp_path / "set" / "left_out.csv").read_text()
    assert all(f"more.tar:{name}," in left_out for name in "5678") and left_out.count("\n") == 5
    assert len(EncodedSet(tmp_path / "set", "SET")) == 5
    sizes = "[[9,32,48],[5,32,48]]"
    assert encoded(tiny, source, tmp_path / "sizes", "--buckets", sizes) == 0
    data = open_set(tmp_path / "sizes", cache=tmp_path / "cache")
    assert [list(bucket.items) for bucket in data.buckets] == [[1, 2, 3, 4, 5], [0]]
    assert torch.equal(data[0]["latents"], clips[0].latents[:, :2])


def other_encoder(tiny, folder):
    """Copy a pipeline with another text encoder."""
    shutil.copytree(tiny, folder)
    file = folder / "text_encoder" / "model.safetensors"
    weights = load_file(file)
    save_file({name: value * 1.05 for name, value in weights.items()}, file, metadata={"format": "pt"})
    return folder


def test_mistakes_with_stored_tensors(tiny, clips, tmp_path, capsys):
    """Each ends with 2 and one line that names the option, before anything is written."""
    outside_sets.rcm(clips, tmp_path / "good")
    raw = [clip._replace(latents=3 * clip.latents) for clip in clips]
    outside_sets.rcm(raw, tmp_path / "raw")
    long = [clip._replace(text=clip.text.repeat(2, 1)[:40]) for clip in clips]
    outside_sets.rcm(long, tmp_path / "long")
    outside_sets.rcm([clip._replace(latents=clip.latents[:8]) for clip in clips], tmp_path / "channels")
    nan = [clip._replace(text=clip.text * (torch.nan if n == 2 else 1)) for n, clip in enumerate(clips)]
    outside_sets.rcm(nan, tmp_path / "nan")  # of a caption that is not compared with the encoder's
    other = other_encoder(tiny, tmp_path / "other")
    for source, encoders, options, named in (
        ("good", tiny, (), "--fps"),  # which alone is not given
        ("good", tiny, ("--num-frames", "13"), "--num-frames=13"),
        ("good", tiny, ("--image", "first_frame"), "--image"),
        ("good", tiny, ("--references", "image"), "--references"),
        ("good", tiny, ("--max-text-tokens", "4"), "--max-text-tokens=4"),
        ("good", tiny, ("--columns", "caption=prompt"), "--columns"),
        ("good", other, (), "--encoders"),
        ("good", SHIPPED, (), "--encoders"),
        ("channels", tiny, (), "channels"),
        ("long", tiny, (), "tokens"),
        ("nan", tiny, (), "finite"),
        ("raw", tiny, (), "--normalized"),
        ("good", tiny, ("--buckets", "auto"), "--buckets"),
        ("good", tiny, ("--buckets", "[[9,32,40]]"), "--buckets"),
    ):
        capsys.readouterr()
        rate = None if named == "--fps" else 8
        assert encoded(encoders, tmp_path / source, tmp_path / "set", *options, fps=rate) == 2, (source, named)
        message = capsys.readouterr().err.splitlines()[-1]
        assert named in message, message
        assert not list((tmp_path / "set").glob("*.safetensors")) or source == "nan"
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
    assert encoded(tiny, tmp_path / "raw", tmp_path / "set", "--normalized", "yes") == 0


def test_the_scale_of_latents():
    """Wan's statistics tell normalized latents from raw ones and from ones that were normalized twice."""
    std = torch.tensor(inspect.signature(AutoencoderKLWan).parameters["latents_std"].default).view(-1, 1, 1, 1)
    latents = torch.randn(16, 5, 32, 32, generator=torch.Generator().manual_seed(0))
    check_deviation([latents + 0.5, 0.9 * latents + 0.5], "SOURCE", were_normalized=True)
    shifted = latents + torch.tensor([3.0, -3.0]).repeat(8).view(-1, 1, 1, 1)
    for wrong, number in ((latents * std, "2.2"), (latents / std, "0.5"), (shifted, "3")):
        with refused(number):
            check_deviation([wrong], "SOURCE", were_normalized=True)


@needs_pyarrow
def test_other_parquet_files(clips, tmp_path):
    for name, options, named in (
        ("missing", {"without": ["vae_latent_shape"]}, "vae_latent_shape"),
        ("caption", {"without": ["caption"]}, "caption"),
    ):
        outside_sets.fastvideo(clips, tmp_path / name, **options)
        with refused(named):
            fastvideo.read(tmp_path / name)
    import pyarrow as pa
    from pyarrow import parquet

    for column, schema in fastvideo.OTHER_SCHEMAS.items():
        parquet.write_table(pa.table({column: [b""]}), tmp_path / "other.parquet")
        with refused(schema):
            fastvideo.read(tmp_path / "other.parquet")
    (tmp_path / "other.parquet").write_bytes(b"PAR1")
    with refused("other.parquet"):
        fastvideo.read(tmp_path / "other.parquet")
    outside_sets.fastvideo(clips, tmp_path / "mixed")
    outside_sets.fastvideo(clips, tmp_path / "mixed" / "text", text_only=True)
    with refused("mixed"):
        fastvideo.read(tmp_path / "mixed")


def test_archives_and_lists_with_mistakes(clips, tmp_path):
    """Members and paths outside are refused; videos that are missing and samples without a caption are named."""
    for name in ("../up.mp4", "/abs.mp4", "a/../../up.mp4"):
        write_tar(tmp_path / "a.tar", [(name, b"")])
        with refused("outside"):
            read_outside(tmp_path / "a.tar")
    write_tar(tmp_path / "a.tar", [("0.mp4", bytes(2000)), ("0.txt", b"x"), ("1.mp4", b""), ("1.txt", b"y")])
    whole = (tmp_path / "a.tar").read_bytes()
    second = 512 + 2048
    flipped = bytearray(whole)
    flipped[second] ^= 1
    for damaged in (whole[:1500], whole[:second], whole[: second + 200], bytes(flipped), whole + whole):
        (tmp_path / "a.tar").write_bytes(damaged)  # tarfile ends there without a word, but for the first
        with refused("a.tar"):
            read_outside(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(whole.rstrip(b"\0") + bytes(2000))
    assert len(read_outside(tmp_path / "a.tar").rows) == 2
    for names in (("0.mp4", "0.MP4"), ("0.txt", "1.txt", "0.txt"), ("a/0.txt", "b/0.txt", "a/./0.txt")):
        write_tar(tmp_path / "a.tar", [(name, b"x") for name in names])
        with refused("a.tar"):
            read_outside(tmp_path / "a.tar")
    members = [(name, b"x") for name in ("0.mp4", "0.txt", "1.mp4", "1.txt")]
    write_tar(tmp_path / "a.tar", [pair for name, x in members for pair in ((f"d/._{name}", b"\0"), (f"d/{name}", x))])
    assert [(row.file, row.caption, row.problem) for row in read_outside(tmp_path / "a.tar").rows] == [
        ("a.tar:d/0.mp4", "x", ""),
        ("a.tar:d/1.mp4", "x", ""),
    ]
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "b.tar.gz").write_bytes(b"x")
    for path in (tmp_path / "packed", tmp_path / "packed" / "b.tar.gz"):
        with refused("unpack"):
            read_outside(path)
    write_tar(tmp_path / "a.tar", [("0.mp4", b""), ("1.txt", b"x"), ("2.mp4", b""), ("2.txt", b"\xff")])
    assert all(row.problem for row in read_outside(tmp_path / "a.tar").rows)
    outside_sets.lines(clips, tmp_path / "lines", "prompt.txt")
    (tmp_path / "lines" / "videos" / clips[0].file.name).unlink()
    (first, *others) = read_outside(tmp_path / "lines").rows
    assert first.problem and not any(row.problem for row in others)
    for content in ("one\n", "1\n2\n\n4\n5\n6\n"):
        (tmp_path / "lines" / "prompt.txt").write_text(content)
        with refused("prompt.txt"):
            read_outside(tmp_path / "lines")
    folder = tmp_path / "array"
    outside_sets.array(clips, folder, "videos2caption.json")
    file = folder / "videos2caption.json"
    for entries in (
        {},
        [{"path": "a.mp4"}, 1],
        [{"path": "../a.mp4", "cap": "x"}],
        [{"path": "a.mp4", "cap": [1]}],
        [{"path": "a.mp4", "cap": "\ud800"}],
        [],
    ):
        file.write_text(json.dumps(entries))
        with refused("videos2caption.json"):
            read_outside(folder)
    file.write_text(json.dumps([{"video": clips[0].file.name, "cap": ["a", "b", ""]}]))
    rows = read_outside(folder, {"file_name": "video"}).rows
    assert [(row.file, row.caption, bool(row.problem)) for row in rows] == [
        (f"videos/{clips[0].file.name}", caption, not caption) for caption in ("a", "b", "")
    ]
    (folder / "metadata.csv").write_text("file_name,caption\n")
    assert read_outside(folder) is None, "our own table comes first"
    for name in ("1.mp4", "1.txt"):
        (tmp_path / "lines" / name).write_bytes(b"x")
    assert read_outside(tmp_path / "lines") is None, "captions next to videos too"


def test_clips_next_to_archives(tiny, clips, tmp_path):
    """Both are read; an archive next to its unpacked clips, or of latents, is refused."""
    outside_sets.webdataset(clips[:3], tmp_path / "source")
    for name, clip in zip(("y", "z"), clips[3:], strict=True):
        shutil.copy(clip.file, tmp_path / "source" / f"{name}.mp4")
        (tmp_path / "source" / f"{name}.txt").write_text(clip.caption)
    shutil.copy(clips[0].file, tmp_path / "source" / "no_text.mp4")
    assert encoded(tiny, tmp_path / "source", tmp_path / "set", *SIZES) == 0
    captions = [clip.caption for clip in clips]
    assert list(EncodedSet(tmp_path / "set", "SET").captions) == captions[3:] + captions[:3]
    assert "no_text.mp4," in (tmp_path / "set" / "left_out.csv").read_text()
    shutil.copy(clips[0].file, tmp_path / "source" / "00000.mp4")
    with refused("00000.mp4"):
        read_outside(tmp_path / "source")
    outside_sets.rcm(clips, tmp_path / "latents")
    for name in ("y.mp4", "y.txt"):
        shutil.copy(tmp_path / "source" / name, tmp_path / "latents")
    with refused("latents"):
        read_outside(tmp_path / "latents")


def test_caches_of_lightx2v_with_mistakes(tiny, clips, tmp_path, capsys):
    outside_sets.lightx2v(clips, tmp_path)
    table = tmp_path / "metadata.jsonl"
    good = table.read_text()
    for line in (
        "not JSON",
        '{"condition_path": "a", "caption": "\\ud800"}',
        '{"condition_path": "../x.pt"}',
        '{"condition_path": 1}',
        '{"audio_latent_path": "a.pt"}',
    ):
        table.write_text(f"{good}{line}\n")
        with refused("data.path"):
            read_outside(tmp_path)
    table.write_text(good + '{"caption": "x", "condition_path": "a.pt"}\n{"caption": "x", "condition_path": "a.pt",')
    with refused("data.path"):
        read_outside(tmp_path)
    table.write_text(good + '{"caption": "x", "condition_path": "a.pt"}\n')
    assert [bool(row.problem) for row in read_outside(tmp_path).rows] == [False] * 5 + [True]
    table.write_text(good)
    (tmp_path / "metadata_rank00.jsonl").write_text(good.splitlines()[-1] + "\n")
    with refused("metadata_rank00.jsonl"):
        read_outside(tmp_path)
    (tmp_path / "metadata_rank00.jsonl").unlink()
    file = sorted((tmp_path / "latents").iterdir())[3]
    torch.save({**torch.load(file), "fps": 16.0}, file)
    for rate in (None, 8):
        assert encoded(tiny, tmp_path, tmp_path / "set", fps=rate) == 2
        assert "metadata.jsonl:4" in capsys.readouterr().err.splitlines()[-1]
