"""Folders that appear whole or not at all: random existing folders, failures in the middle, two writers."""

import hashlib
import json
import os
import random
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fsdp_cp.errors import UserError
from fsdp_cp.files.atomic_folder import MANIFEST, atomic_folder, refuse_occupied, withdraw
from models.export_folder import export_schedulers
from tests.unit.refused import refused


def contents(folder: Path) -> dict[str, str]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def write(folder: Path, text: str, names=("config.json", "weights.safetensors"), **options) -> None:
    with atomic_folder(folder, {"text": text}, **options) as unfinished:
        for name in names:
            (unfinished / name).write_text(text)


def test_a_new_an_empty_and_an_earlier_export_are_written(tmp_path):
    out = tmp_path / "deep" / "er" / "out"
    write(out, "one", ("config.json", "a", "b"))
    assert {p.name for p in out.iterdir()} == {"config.json", "a", "b", MANIFEST}
    assert out.stat().st_mode & 0o777 == 0o777 & ~_umask(), "not mkdtemp's, which others cannot read"
    with atomic_folder(out, {"text": "tensors"}) as unfinished:
        save_file({"a": torch.ones(2)}, unfinished / "a.safetensors")
    assert (out / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~_umask(), "safetensors' files are as private"
    write(out, "two")
    assert {p.name for p in out.iterdir()} == {"config.json", "weights.safetensors", MANIFEST}
    assert (out / "config.json").read_text() == "two"
    empty = tmp_path / "empty"
    empty.mkdir()
    write(empty, "one")
    assert [p.name for p in out.parent.iterdir()] == ["out"], "nothing is left next to it"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_clips_and_weights_do_not_replace_each_other(tmp_path):
    """``distill.sample --out RUN/export/student`` once deleted the student."""
    clips, weights = {"made by": "distill.sample"}, {"run": "a"}
    for first, second, maker in ((weights, clips, "models"), (clips, weights, "distill.sample")):
        out = tmp_path / maker
        with atomic_folder(out, first) as unfinished:
            (unfinished / "a").write_text("first")
        before = contents(out)
        with refused(f"--out {out}"):
            refuse_occupied(out, "--out", second)
        with refused(maker), atomic_folder(out, second):
            raise AssertionError("it is refused before anything is made")
        assert contents(out) == before
        refuse_occupied(out, "--out", first)


@pytest.mark.parametrize("name", ["../precious", "/precious", "below/../../precious", ".."])
def test_files_elsewhere_that_a_manifest_names_are_kept(tmp_path, name):
    """Replacing or withdrawing such a folder deletes what is in it alone."""
    precious, out = tmp_path / "precious", tmp_path / "out"
    out.mkdir()
    precious.write_text("mine")
    named = str(precious) if name.startswith("/") else name
    (out / MANIFEST).write_text(json.dumps({"about": {}, "files": {named: [4, precious.stat().st_mtime_ns]}}))
    write(out, "new")
    (out / MANIFEST).write_text(json.dumps({"about": {}, "files": {named: [4, precious.stat().st_mtime_ns]}}))
    withdraw(out)
    assert precious.read_text() == "mine" and {p.name for p in out.iterdir()} > {MANIFEST}


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    out = tmp_path / "somebody's"
    out.mkdir()

    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)  # root may read everything
    with refused("OUT"):
        refuse_occupied(out, "OUT")


@given(seed=st.integers(0, 10**9))
@settings(max_examples=20, derandomize=True, deadline=None)
def test_nothing_of_somebody_else_is_touched(tmp_path_factory, seed):
    """The place of an export has random contents: files, folders, links, earlier exports with additional files."""
    draw = random.Random(seed)
    place = tmp_path_factory.mktemp("place")
    out = place / "out"
    kind = draw.choice(["foreign", "added", "changed", "folder", "link", "manifest", "file"])
    if kind in ("added", "changed", "manifest"):
        write(out, "earlier")
    elif kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
    if kind == "foreign":
        (out / draw.choice(["config.json", "notes.txt", "diffusion_pytorch_model.safetensors", ".hidden"])).write_text(
            "x"
        )
    elif kind == "added":
        (out / draw.choice(["mine.txt", "README.md", ".git"])).write_text("mine")
    elif kind == "changed":
        (out / "config.json").write_text("mine, now")
    elif kind == "folder":
        (out / "sub").mkdir()
    elif kind == "link":
        (out / "config.json").symlink_to(draw.choice(["/etc/hostname", "nowhere"]))
    elif kind == "manifest":
        (out / MANIFEST).write_text(
            draw.choice(["", "[]", "{}", '{"files": 3}', '{"files": {"config.json": "x"}}', "\0"])
        )
    before = contents(place)
    with refused(str(out)):
        write(out, "new")
    assert contents(place) == before and {p.name for p in place.iterdir()} == {"out"}
    if kind != "file":
        write(out, "new", move_aside=True)
        kept = {name.removeprefix("out_kept_1/"): value for name, value in contents(place).items() if "kept" in name}
        assert kept == {name.removeprefix("out/"): value for name, value in before.items()}
        assert (out / "config.json").read_text() == "new"


def test_a_failure_leaves_the_earlier_export_whole(tmp_path):
    out = tmp_path / "out"
    write(out, "one")
    before = contents(tmp_path)
    for error in (RuntimeError("broken"), KeyboardInterrupt(), OSError(28, "No space left on device")):
        with pytest.raises(UserError if isinstance(error, OSError) else type(error)) as caught:
            with atomic_folder(out, {}) as unfinished:
                (unfinished / "half").write_text("x")
                raise error
        assert contents(tmp_path) == before and [p.name for p in tmp_path.iterdir()] == ["out"]
    assert "\n" not in str(caught.value)


def test_a_kill_between_the_two_renames_is_undone(tmp_path):
    out = tmp_path / "out"
    write(out, "one")
    before = contents(out)
    out.rename(tmp_path / ".out.replaced_abc")
    with pytest.raises(RuntimeError):
        with atomic_folder(out, {}):
            assert contents(out) == before, "the earlier one is back before anything else"
            raise RuntimeError
    assert contents(out) == before


def test_what_a_killed_export_left_is_named_and_kept_or_swept(tmp_path, caplog):
    left = tmp_path / ".out.unfinished_abc"
    left.mkdir()
    (left / "weights").write_text("x")
    write(tmp_path / "out", "one")
    assert str(left) in caplog.text and (left / "weights").is_file()
    write(tmp_path / ".out.replaced_abc", "zero")  # killed after the second of the two renames
    write(tmp_path / ".out.removed_abc", "zero")  # killed while it was deleted
    (tmp_path / ".out.removed_abc" / "config.json").unlink()
    with atomic_folder(tmp_path / "out", {}, move_aside=True) as unfinished:  # in a run directory, which is locked
        assert not left.exists() and unfinished.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_working_directory_is_no_place(tmp_path, monkeypatch):
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    for place in (".", "..", str(tmp_path)):
        with refused("OUT"):
            refuse_occupied(Path(place), "OUT")


def test_a_scheduler_is_withdrawn_unless_it_has_changed(tmp_path):
    folder = tmp_path / "scheduler"
    export_schedulers(folder.parent, {"scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0)})
    assert FlowMatchEulerDiscreteScheduler.from_pretrained(folder).config.shift == 3.0
    export_schedulers(folder.parent, {})
    assert not folder.exists()
    export_schedulers(folder.parent, {})
    export_schedulers(folder.parent, {"scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0)})
    (folder / "notes").write_text("mine")
    withdraw(folder)
    assert (folder / "notes").is_file()


def _experts(folder, text):
    with atomic_folder(folder, {}) as unfinished:
        for name in ("transformer", "transformer_2"):
            (unfinished / name).mkdir()
            (unfinished / name / "weights").write_text(text)
        (unfinished / "model_index.json").write_text(text)


def test_folders_in_a_folder_are_replaced_and_withdrawn_whole(tmp_path):
    out = tmp_path / "out"
    for text in ("first", "second"):
        _experts(out, text)
        found = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}
        assert set(found.values()) - {found[MANIFEST]} == {text} and len(found) == 4
        assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing of the earlier one is left"
    write(out, "one network in the place of two")
    assert sorted(path.name for path in out.iterdir()) != [] and not (out / "transformer").exists()
    _experts(out, "again")
    withdraw(out)
    assert not out.exists()


@pytest.mark.parametrize("where", ["transformer/deeper/notes.txt", "empty/notes.txt", "notes.txt"])
def test_a_file_in_a_folder_of_an_export_is_never_lost(tmp_path, where):
    out = tmp_path / "out"
    _experts(out, "first")
    (out / where).parent.mkdir(parents=True, exist_ok=True)
    (out / where).write_text("mine")
    with refused(str(out)):
        _experts(out, "second")
    withdraw(out)
    assert (out / where).read_text() == "mine" and (out / "transformer" / "weights").read_text() == "first"


def test_a_file_that_appears_while_an_export_is_deleted_is_kept(tmp_path, monkeypatch, caplog):
    """It appears after the last check, and is named after no file of the export or after one."""
    rename = Path.rename

    def add_files(path, target):
        if ".removed_" in Path(target).name:
            (path / "transformer" / "notes.txt").write_text("mine")
            (path / "model_index.json").write_text("mine, now")
        return rename(path, target)

    out = tmp_path / "out"
    _experts(out, "first")
    monkeypatch.setattr(Path, "rename", add_files)
    _experts(out, "second")
    for sweep in (False, True):  # a later export of a run keeps them too
        kept = {path.name: path.read_text() for path in tmp_path.glob(".out.removed_*/**/*") if path.is_file()}
        assert kept == {"notes.txt": "mine", "model_index.json": "mine, now"} and ".out.removed_" in caplog.text
        if not sweep:
            monkeypatch.undo()
            write(tmp_path / "out", "third", move_aside=True)


def test_what_lies_behind_a_link_is_never_touched(tmp_path):
    """A user moved an expert to another disk and linked to it."""
    out, moved = tmp_path / "out", tmp_path / "moved"
    _experts(out, "first")
    (out / "transformer").rename(moved)
    (out / "transformer").symlink_to(moved)
    with refused("transformer"):
        _experts(out, "second")
    withdraw(out)
    assert (moved / "weights").read_text() == "first" and (out / "transformer").is_symlink()
    earlier = out.with_name(f".{out.name}.replaced_x")  # left by a kill while it was removed
    out.rename(earlier)
    out.mkdir()
    with atomic_folder(out, {}, move_aside=True) as unfinished:
        (unfinished / "new").write_text("")
    assert (moved / "weights").read_text() == "first" and (earlier / "transformer").is_symlink()
