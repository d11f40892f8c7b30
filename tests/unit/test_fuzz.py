"""Generated damage to tables, clips, architectures and checkpoints, as a user's command reads them.

Each example must give what it would have given, or one line (``UserError``): no other exception, no hang, and no change
outside the folder that the command writes. The examples are the same in every run.
"""

import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distill.data.videos.decode import ClipError, ClipFormat, read_clip
from distill.data.videos.table import read_captions
from distill.data.videos.video_folder import read_metadata
from fsdp_cp import build_mesh
from fsdp_cp.checkpoint.save_load import Checkpoints
from fsdp_cp.launch import process_group
from models.export import main as export_command
from models.roles.role_plan import plan_role
from tests.oracles.small_wan import SMALL, small_role
from tests.tiny_pipeline import render_clips
from tests.unit.damage import BYTES, CHANGES, changed_json, command, damaged, examples, refusal, snapshot

CLIP = ClipFormat(num_frames=5, height=32, width=48, fps=8)

# ---------------------------------------------------------------- tables of captions

CAPTIONS = st.sampled_from(["a red square", "a green square, drifting", "two\nlines", 'said "no"', " "])
NAMES = st.sampled_from(["clip_0.mp4", "clip_1.mp4", "nowhere.mp4", "./clip_1.mp4"])
WHOLE = st.builds(
    lambda rows: "".join(
        f'{name},"{caption}"\n'
        for name, caption in [("file_name", "caption"), *((a, b.replace('"', '""')) for a, b in rows)]
    ).encode(),
    st.lists(st.tuples(NAMES, CAPTIONS), min_size=1, max_size=4),
)


def test_tables_are_read_or_refused(tmp_path):
    def captions(path):
        assert all(caption.strip() for caption in read_captions(path))

    @examples(80)
    @given(table=WHOLE, steps=st.none() | BYTES, encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "latin-1"]))
    def run(table, steps, encoding):
        table = table.decode().encode(encoding)
        for name in ("metadata.csv", "a.csv", "a.txt"):
            (tmp_path / name).write_bytes(table if steps is None else damaged(table, steps))
        refusal(lambda: read_metadata(tmp_path))
        refusal(lambda: captions(tmp_path / "a.csv"))
        refusal(lambda: captions(tmp_path / "a.txt"))

    run()


# ---------------------------------------------------------------- clips


def test_clips_are_read_or_refused(tmp_path):
    whole, file = (render_clips(tmp_path / "videos", 1) / "clip_0.mp4").read_bytes(), tmp_path / "a.mp4"
    tail = len(whole) - whole.rindex(b"moov")  # the index, where damage does most, lies last
    refused = []

    @examples(60)
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


# ---------------------------------------------------------------- networks and checkpoints


def test_architectures_are_planned_or_refused():
    @examples(60)
    @given(changes=CHANGES)
    def run(changes):
        architecture = json.loads(changed_json(json.dumps(SMALL), changes))
        shapes = {"video": (2, 2, 4, 4)}, {"text": (3, 6)}
        refusal(lambda: plan_role("student", checkpoint=None, architecture=architecture).tokens(*shapes))

    run()


@pytest.fixture
def around(tmp_path_factory):
    """Make files next to the working folders that nothing may change."""
    folder = tmp_path_factory.mktemp("around")
    for name in ("notes.txt", "0.mp4", "config.json", "words.safetensors", "x"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Write a run directory with a checkpoint, as the trainer writes it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with process_group(torch.device("cpu")):
        role = small_role(build_mesh(cp=1, heads=2))
        tensors = {"student": {"weights": role.weights()}}
        numbers = {"step": 7, "configs": {"student": role.config}}
        Checkpoints(folder / "checkpoints", keep=1).save(7, tensors, numbers)
    return folder


def test_exports_are_made_or_refused(tmp_path, checkpoints, around):
    folder, out, before = tmp_path / "run", tmp_path / "out", snapshot(around, checkpoints)
    step = checkpoints / "checkpoints" / "step_00000007"
    files = sorted(p.name for p in step.iterdir())
    made = []

    @examples(40)
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
