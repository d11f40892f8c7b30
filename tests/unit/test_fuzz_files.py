"""Generated damage to every kind of file that comes from outside, through the doors that a user's command takes.

Each example must give what it would have given, or one line (``UserError``): no other exception, no hang, and no change
outside the folder that the command writes. The examples are the same in every run.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distill.config import load_config
from distill.data import CaptionsSettings, VideoFolderSettings, build_dataset
from distill.data.captions import read_captions
from distill.data.clips import ClipError, ClipFormat, read_clip
from distill.data.encoders import TextEncoder, VideoCodec, inspect_encoders
from distill.data.trajectories import TrajectoryFolder
from distill.data.video_folder import read_metadata
from distill.data.word_table import WordTable
from distill.sample import main as sample_command
from fsdp_cp import build_mesh, checkpoint
from fsdp_cp.errors import UserError
from fsdp_cp.launch import process_group
from models.export import main as export_command
from models.load import build_role, plan_role
from tests.tiny_pipeline import build_tiny_pipeline, render_clips
from tests.unit.test_checkpoint_files import SMALL
from tests.unit.test_sample_command import TEACHER, write_run

CPU = torch.device("cpu")
LATENTS, TEXT = (2, 2, 4, 4), (3, 6)
CLIP = ClipFormat(num_frames=5, height=32, width=48, fps=8)
SIZES = {"num_frames": 5, "height": 32, "width": 48, "fps": 8.0, "max_text_tokens": 24}


def examples(count: int):
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


# ---------------------------------------------------------------- what is done to files

BYTES = st.lists(
    st.tuples(
        st.sampled_from(["cut", "flip", "overwrite", "insert", "remove", "zero", "swap"]),
        st.floats(0, 1),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=3,
)


def damaged(data: bytes, steps, head: int = 0) -> bytes:
    """``data`` after each of ``steps``, of which every second lies in the first ``head`` bytes, if that is given."""
    changed = bytearray(data)
    for what, where, seed in steps:
        span = min(head, len(changed)) if head and seed % 2 else len(changed)
        at = min(int(where * span), max(0, len(changed) - 1))
        noise = hashlib.sha256(str(seed).encode()).digest()[: 1 + seed % 24]
        if what == "cut":
            del changed[at:]
        elif what == "flip" and changed:
            changed[at] ^= 1 << seed % 8
        elif what == "overwrite":
            changed[at : at + len(noise)] = noise
        elif what == "insert":
            changed[at:at] = noise
        elif what == "remove":
            del changed[at : at + len(noise)]
        elif what == "zero":
            changed[at : at + 4096] = bytes(len(changed[at : at + 4096]))
        elif what == "swap":
            changed[at : at + 16] = changed[at : at + 16][::-1]
    return bytes(changed)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(
        [0, -1, 1, 2, 3, 10**9, -(10**9), 10**30, 1e308, math.nan, math.inf, 0.5, "", "x", "../x", "\ud800"]
    )
    | st.integers()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["set", "set", "remove", "add"]), st.integers(0, 10**6), JUNK), min_size=1, max_size=3
)


def changed_json(text: str, changes) -> str:
    """A JSON object with values replaced, keys removed or added."""
    content = json.loads(text)
    for what, number, value in changes:
        key = sorted(content)[number % len(content)] if content else "a"
        if what == "remove":
            content.pop(key, None)
        else:
            content[key if what == "set" else f"key_{number}"] = value
    return json.dumps(content)


# ---------------------------------------------------------------- what may come of it


def refusal(work) -> str | None:
    """What ``work`` refused in one line; ``None`` if it did not. Every other exception is a failure of the test."""
    noise = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(noise), contextlib.redirect_stdout(noise):
            warnings.simplefilter("ignore")
            work()
    except UserError as error:
        assert str(error) and "\n" not in str(error), repr(str(error))
        return str(error)
    return None


def command(main, *arguments) -> str | None:
    """As :func:`refusal`, of a command's ``main``: exit code 0, or 2 and one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main([str(argument) for argument in arguments])
    said = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
    assert "Traceback" not in err.getvalue()
    assert (code, len(said)) in ((0, 0), (2, 1)), (code, err.getvalue())
    return said[0] if said else None


def snapshot(*folders: Path) -> dict[str, str]:
    """Every file below, with a hash."""
    found = {}
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            about = os.readlink(file) if file.is_symlink() else ""
            if file.is_file() and not file.is_symlink():
                about = hashlib.sha256(file.read_bytes()).hexdigest()
            found[str(file)] = about
    return found


@pytest.fixture(scope="module")
def around(tmp_path_factory):
    """Files that nothing may touch, beside the folders that are worked on."""
    folder = tmp_path_factory.mktemp("around")
    for name in ("notes.txt", "0.mp4", "config.json", "words.safetensors", "x"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return build_tiny_pipeline(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return render_clips(tmp_path_factory.mktemp("videos"), 2)


# ---------------------------------------------------------------- tables of captions

CELL = st.text(st.sampled_from('ab ,;"\n\r\t|\0\ufeff\u2028\u00e9.m4p/'), max_size=12)
NAME = (
    st.sampled_from(["clip_0.mp4", "clip_1.mp4", "../x", "/x", "", "nowhere.mp4", ".", "metadata.csv", "a" * 300])
    | CELL
)
ROWS = st.lists(st.tuples(NAME, CELL | st.sampled_from(["a red square", "", " "])), max_size=5)
TABLE = st.builds(
    lambda header, rows, separator, end, encoding, quote: (
        end.join([header, *(separator.join((quote + a + quote, quote + b)) for a, b in rows)]) + end
    ).encode(encoding, "replace"),
    st.sampled_from(
        ["file_name,caption", "caption,file_name", "caption", "file_name;caption", '"file_name","caption"', "x"]
    ),
    ROWS,
    st.sampled_from([",", ",", ",", ";", "\t", ",,"]),
    st.sampled_from(["\n", "\r\n", "\r", "\n\n"]),
    st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"]),
    st.sampled_from(["", "", '"']),
)

CAPTIONS = st.sampled_from(["a red square", "a green square, drifting", "two\nlines", 'said "no"', " "])
NAMES = st.sampled_from(["clip_0.mp4", "clip_1.mp4", "nowhere.mp4", "./clip_1.mp4"])
WHOLE = st.builds(
    lambda rows: "".join(
        f'{name},"{caption}"\n'
        for name, caption in [("file_name", "caption"), *((a, b.replace('"', '""')) for a, b in rows)]
    ).encode(),
    st.lists(st.tuples(NAMES, CAPTIONS), min_size=1, max_size=4),
)


def read_tables(table: bytes, folder: Path) -> None:
    (folder / "metadata.csv").write_bytes(table)
    refusal(lambda: read_metadata(folder))
    for name in ("a.csv", "a.txt"):
        (folder / name).write_bytes(table)

        def captions(path=folder / name):
            assert all(caption.strip() for caption in read_captions(path))

        refusal(captions)


def test_tables_are_read_or_refused(tmp_path):
    @examples(150)
    @given(table=TABLE | WHOLE | st.binary(max_size=60))
    def run(table):
        read_tables(table, tmp_path)

    run()


def test_folders_of_clips_become_data_sets_or_are_refused(tmp_path, tiny, videos, around):
    """With damaged clips beside whole ones: what is left is what can be used, and every item of it is."""
    folder = shutil.copytree(videos, tmp_path / "videos")
    whole = (folder / "clip_0.mp4").read_bytes()
    before = snapshot(around, tiny)
    seen = set()

    @examples(50)
    @given(table=WHOLE | WHOLE | TABLE, steps=st.none() | BYTES)
    def run(table, steps):
        (folder / "metadata.csv").write_bytes(table)
        (folder / "clip_0.mp4").write_bytes(whole if steps is None else damaged(whole, steps))
        data = VideoFolderSettings(path=str(folder), encoders=str(tiny), **SIZES)
        inside = snapshot(folder)

        def build():
            made = build_dataset(data, seed=0, device=CPU, run_dir=tmp_path / "run")
            for i in range(len(made)):
                item = made[i]
                assert item["caption"].strip() and item["latents"].shape == made.latent_shape
                assert item["latents"].isfinite().all() and item["text"].isfinite().all()
            seen.add(len(made))

        refusal(build)
        assert snapshot(folder) == inside and snapshot(around, tiny) == before

    run()
    assert len(seen) > 1, "some of them are data sets"


def test_files_of_captions_become_data_sets_or_are_refused(tmp_path, tiny, around):
    before = snapshot(around, tiny)

    @examples(30)
    @given(table=WHOLE | TABLE, name=st.sampled_from(["a.txt", "a.csv"]))
    def run(table, name):
        (tmp_path / name).write_bytes(table)
        data = CaptionsSettings(path=str(tmp_path / name), encoders=str(tiny), **SIZES)
        refusal(lambda: build_dataset(data, seed=0, device=CPU, run_dir=tmp_path / "run")[0]["text"])
        assert snapshot(around, tiny) == before

    run()


# ---------------------------------------------------------------- clips


def clips_are_read_or_refused(tmp_path: Path, videos: Path, count: int) -> None:
    whole, file = (videos / "clip_0.mp4").read_bytes(), tmp_path / "a.mp4"
    tail = len(whole) - whole.rindex(b"moov")  # the index, where damage does most, lies last
    refused = []

    @examples(count)
    @given(steps=BYTES, index=st.booleans())
    def run(steps, index):
        cut = len(whole) - tail if index else 0
        file.write_bytes(whole[:cut] + damaged(whole[cut:], steps))
        try:
            clip = read_clip(file, CLIP)
        except ClipError as error:
            assert str(error) and "\n" not in str(error)
            refused.append(str(error))
        else:
            assert clip.shape == (3, 5, 32, 48) and clip.isfinite().all() and clip.abs().max() <= 1

    run()
    assert len(set(refused)) > 3


def test_clips_are_read_or_refused(tmp_path, videos):
    clips_are_read_or_refused(tmp_path, videos, 120)


@pytest.mark.slow
def test_many_clips_are_read_or_refused(tmp_path, videos):
    clips_are_read_or_refused(tmp_path, videos, 400)


# ---------------------------------------------------------------- networks


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    from diffusers import WanTransformer3DModel

    folder = tmp_path_factory.mktemp("network")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        WanTransformer3DModel(**SMALL).save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def networks_are_built_or_refused(tmp_path: Path, network: Path, around: Path, count: int) -> None:
    folder, before = tmp_path / "network", snapshot(around, network)
    files = sorted(p.name for p in network.iterdir())
    texts = [name for name in files if name.endswith(".json")]
    built = []

    def build():
        plan = plan_role("student", checkpoint=str(folder))
        role = build_role(
            plan, mesh=build_mesh(cp=1, heads=2), device=CPU, trainable=False, latent_shape=LATENTS, text_shape=TEXT
        )  # fmt: skip
        assert all(weight.to_local().isfinite().all() for weight in role.weights().values())
        built.append(role)

    @examples(count)
    @given(name=st.sampled_from(files), steps=BYTES, changes=CHANGES, text=st.booleans())
    def run(name, steps, changes, text):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(network, folder)
        file = folder / name
        if text and name in texts:
            file.write_text(changed_json(file.read_text(), changes))
        else:
            size = int.from_bytes(file.read_bytes()[:8], "little") if name not in texts else 0
            file.write_bytes(damaged(file.read_bytes(), steps, head=8 + min(size, 4096)))
        inside = snapshot(folder)
        refusal(build)
        assert snapshot(folder) == inside and snapshot(around, network) == before

    with process_group(CPU):
        run()
    assert built, "damage that leaves the numbers finite cannot be seen without a hash"


def test_networks_are_built_or_refused(tmp_path, network, around):
    networks_are_built_or_refused(tmp_path, network, around, 15)


@pytest.mark.slow
def test_many_networks_are_built_or_refused(tmp_path, network, around):
    networks_are_built_or_refused(tmp_path, network, around, 60)


def test_architectures_are_planned_or_refused():
    @examples(120)
    @given(changes=CHANGES)
    def run(changes):
        architecture = json.loads(changed_json(json.dumps(SMALL), changes))
        refusal(lambda: plan_role("student", checkpoint=None, architecture=architecture).check_sample(LATENTS, TEXT))

    run()


# ---------------------------------------------------------------- encoders


def encoders_are_loaded_or_refused(tmp_path: Path, tiny: Path, around: Path, count: int) -> None:
    folder, before = tmp_path / "pipeline", snapshot(around, tiny)
    parts = ("vae", "text_encoder", "tokenizer")
    files = sorted(str(p.relative_to(tiny)) for part in parts for p in (tiny / part).iterdir())

    def load():
        found = inspect_encoders(folder)
        assert min(found.latent_shape(CLIP)) >= 1
        options = {"device": CPU, "dtype": torch.float32}
        VideoCodec(found, **options)
        text = TextEncoder(found, max_tokens=8, **options).encode("a red square")
        assert text.ndim == 2 and text.shape[1] == found.text_width

    @examples(count)
    @given(name=st.sampled_from(files), steps=BYTES, changes=CHANGES, text=st.booleans())
    def run(name, steps, changes, text):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny, folder)
        file = folder / name
        if text and name.endswith(".json"):
            file.write_text(changed_json(file.read_text(), changes))
        else:
            file.write_bytes(damaged(file.read_bytes(), steps, head=1000))
        inside = snapshot(folder)
        refusal(load)
        assert snapshot(folder) == inside and snapshot(around, tiny) == before

    run()


def test_encoders_are_loaded_or_refused(tmp_path, tiny, around):
    encoders_are_loaded_or_refused(tmp_path, tiny, around, 10)


@pytest.mark.slow
def test_many_encoders_are_loaded_or_refused(tmp_path, tiny, around):
    encoders_are_loaded_or_refused(tmp_path, tiny, around, 40)


def test_word_tables_are_loaded_or_refused(tmp_path):
    whole = (TEACHER / "words.safetensors").read_bytes()

    @examples(100)
    @given(steps=BYTES)
    def run(steps):
        (tmp_path / "words.safetensors").write_bytes(damaged(whole, steps, head=400))

        def load():
            assert WordTable.load(tmp_path).embed(["a red circle growing"], 4).isfinite().all()

        refusal(load)

    run()


# ---------------------------------------------------------------- what we wrote


def test_the_cache_gives_what_was_written_or_writes_it_again(tmp_path, tiny, videos, around):
    """No damage to a file of the cache changes an item of a run that starts after it; a run that reads it refuses."""
    settings_of_data = VideoFolderSettings(path=str(videos), encoders=str(tiny), **SIZES)

    def build():
        return build_dataset(settings_of_data, seed=0, device=CPU, run_dir=tmp_path)

    data = build()
    wanted = [data[i] for i in range(2)]
    files = sorted((tmp_path / "cache").rglob("*.safetensors"))
    before, contents = snapshot(around, tiny, videos), {file: file.read_bytes() for file in files}

    def same(items):
        for item, was in zip(items, wanted, strict=True):
            assert torch.equal(item["latents"], was["latents"]) and torch.equal(item["text"], was["text"])

    @examples(30)
    @given(number=st.integers(0, len(files) - 1), steps=BYTES, again=st.sampled_from([False, False, False, True]))
    def run(number, steps, again):
        for file, content in contents.items():
            file.write_bytes(content)
        files[number].write_bytes(damaged(contents[files[number]], steps, head=700))
        refusal(lambda: same([data[i] for i in range(2)]))
        if again:
            made = build()
            same([made[i] for i in range(2)])
            assert sorted((tmp_path / "cache").rglob("*.safetensors")) == files
        assert snapshot(around, tiny, videos) == before

    run()


def test_trajectories_are_read_or_refused(tmp_path, around):
    folder = TrajectoryFolder(str(tmp_path / "trajectories"))
    folder.begin({"seed": 0, "method.step_list": [1.0, 0.5]})
    for i in range(2):
        folder.write(i, torch.ones(2, 2, 1, 4, 4), torch.ones(2, 1, 4, 4), "a caption")
    contents = {file: file.read_bytes() for file in sorted(folder.path.iterdir())}
    before = snapshot(around)

    @examples(120)
    @given(number=st.integers(0, 2), steps=BYTES)
    def run(number, steps):
        for file, content in contents.items():
            file.write_bytes(content)
        file = list(contents)[number]
        file.write_bytes(damaged(contents[file], steps, head=300))
        inside = snapshot(folder.path)

        def read():
            folder.check({"seed": 0})
            folder.check_complete(2)
            missing = folder.missing(2, (2, 2, 1, 4, 4))
            for i in {0, 1} - set(missing):
                states, latents, caption = folder.read(i)
                assert states.isfinite().all() and latents.isfinite().all() and isinstance(caption, str)
            for i in missing:
                folder.read(i)

        refusal(read)
        assert snapshot(folder.path) == inside and snapshot(around) == before

    run()


# ---------------------------------------------------------------- commands


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "run", TEACHER)


VALUES = (
    "null|true|-1|0|1e9|.nan|.inf|x|[]|{}|[1, a]|{a: 1}|'|!!python/name:os.system|${seed}|${nowhere}|${oc.env:HOME}"
    "|&a [*a]|2001-01-01|\udcff|???|99999999999999999999999"
)
LINE = st.tuples(
    st.integers(0, 10**6), st.sampled_from(["cut", "drop", "value", "key"]), st.sampled_from(VALUES.split("|"))
)


def changed_yaml(text: str, lines) -> bytes:
    rows = text.splitlines()
    for number, what, value in lines:
        at = number % len(rows)
        key, _, _ = rows[at].partition(":")
        rows[at] = {"cut": rows[at][: len(value)], "drop": "", "value": f"{key}: {value}", "key": f"{key}x: {value}"}[
            what
        ]
    return "\n".join(rows).encode("utf-8", "surrogateescape")


def test_configurations_are_loaded_or_refused(tmp_path, run_dir):
    text = (run_dir / "config.yaml").read_text()

    @examples(60)
    @given(lines=st.lists(LINE, min_size=1, max_size=3), steps=st.none() | BYTES)
    def run(lines, steps):
        content = changed_yaml(text, lines)
        (tmp_path / "config.yaml").write_bytes(content if steps is None else damaged(content, steps))
        refusal(lambda: load_config(tmp_path / "config.yaml"))

    run()


def samplings_are_made_or_refused(tmp_path: Path, run_dir: Path, around: Path, count: int) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    text, before = (run_dir / "config.yaml").read_text(), snapshot(around, run_dir)
    outs = ["OUT", "OUT", f"{around}", f"{around}/0.mp4", f"{around}/x/y", ".", ""]

    @examples(count)
    @given(
        lines=st.just([]) | st.lists(LINE, min_size=1, max_size=2),
        steps=st.sampled_from(["0", "-1", "1", "5", "99999999999"]),
        captions=st.lists(st.sampled_from(["a red circle growing", "a bird", "", "\udcff", "red " * 9]), max_size=2),
        clips=st.sampled_from(["1", "0", "-4", "100000000"]),
        seed=st.sampled_from(["0", "-1", "99999999999999999999"]),
        out=st.sampled_from(outs),
    )
    def run(lines, steps, captions, clips, seed, out):
        (folder / "config.yaml").write_bytes(changed_yaml(text, lines))
        arguments = [
            "--steps",
            steps,
            "--count",
            clips,
            "--seed",
            seed,
            "--out",
            out.replace("OUT", str(tmp_path / "out")),
        ]
        for caption in captions:
            arguments += ["--caption", caption]
        command(sample_command, folder, *arguments)
        assert snapshot(around, run_dir) == before
        assert {p.name for p in tmp_path.iterdir()} <= {"run", "out"}
        assert {p.name for p in folder.iterdir()} <= {"config.yaml", "export", "samples"}

    run()


def test_samplings_are_made_or_refused(tmp_path, run_dir, around, monkeypatch):
    monkeypatch.chdir(run_dir.parent)
    samplings_are_made_or_refused(tmp_path, run_dir, around, 8)


@pytest.mark.slow
def test_many_samplings_are_made_or_refused(tmp_path, run_dir, around, monkeypatch):
    monkeypatch.chdir(run_dir.parent)
    samplings_are_made_or_refused(tmp_path, run_dir, around, 60)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A run's folder with a checkpoint, as the trainer writes it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with process_group(CPU):
        plan = plan_role("student", checkpoint=None, architecture=SMALL)
        role = build_role(
            plan, mesh=build_mesh(cp=1, heads=2), device=CPU, trainable=True, latent_shape=LATENTS, text_shape=TEXT
        )  # fmt: skip
        tensors = {"student": {"weights": role.weights()}}
        checkpoint.save(folder / "checkpoints", 7, tensors, {"step": 7, "configs": {"student": role.config}}, keep=1)
    return folder


def exports_are_made_or_refused(tmp_path: Path, checkpoints: Path, around: Path, count: int) -> None:
    folder, out, before = tmp_path / "run", tmp_path / "out", snapshot(around, checkpoints)
    step = checkpoints / "checkpoints" / "step_00000007"
    files = sorted(p.name for p in step.iterdir())
    made = []

    @examples(count)
    @given(name=st.sampled_from(files), steps=BYTES, changes=CHANGES, text=st.booleans())
    def run(name, steps, changes, text):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(checkpoints, folder)
        file = folder / "checkpoints" / step.name / name
        if text and name == "state.json":
            file.write_text(changed_json(file.read_text(), changes))
        else:
            file.write_bytes(damaged(file.read_bytes(), steps))
        inside, earlier = snapshot(folder), snapshot(out)
        said = command(export_command, folder, out)
        made.append(said is None)
        assert snapshot(folder) == inside and snapshot(around, checkpoints) == before
        assert said is None or snapshot(out) == earlier, "a refused export leaves the earlier one"
        assert {p.name for p in tmp_path.iterdir()} <= {"run", "out"}

    run()
    assert not all(made)


def test_exports_are_made_or_refused(tmp_path, checkpoints, around):
    exports_are_made_or_refused(tmp_path, checkpoints, around, 10)


@pytest.mark.slow
def test_many_exports_are_made_or_refused(tmp_path, checkpoints, around):
    exports_are_made_or_refused(tmp_path, checkpoints, around, 100)
