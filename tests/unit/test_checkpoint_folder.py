"""Checkpoints on the disk: summed while they are written, published whole, and never used damaged."""

import hashlib
import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp_cp.checkpoint import (
    Checkpoints,
    find_checkpoint,
    find_resume,
    load,
    published_steps,
    refuse_overtaken,
    step_folder,
)
from fsdp_cp.checkpoint_reader import _Unpickler, reader
from fsdp_cp.errors import UserError
from fsdp_cp.launch import process_group
from fsdp_cp.signals import Stopped

SHAPE = (64, 33)


@pytest.fixture(autouse=True)
def one_rank():
    with process_group(torch.device("cpu")):
        yield


def tensors(step):
    generator = torch.Generator().manual_seed(step)
    return {"student": {name: torch.randn(SHAPE, generator=generator) for name in ("weights", "ema")}}


@pytest.fixture
def folder(tmp_path):
    """``checkpoints/`` with those of steps 1 and 2."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=0)
    for step in (1, 2):
        checkpoints.save(step, tensors(step), {"step": step})
    return tmp_path / "checkpoints"


def holds(checkpoint, step):
    loaded = tensors(99)
    load(checkpoint, loaded)
    return all(torch.equal(loaded["student"][name], x) for name, x in tensors(step)["student"].items())


def test_the_manifest_has_size_and_sum_of_every_file(folder):
    newest = step_folder(folder, 2)
    files = json.loads((newest / "manifest.json").read_text())["files"]
    assert files.keys() | {"manifest.json"} == {p.name for p in newest.iterdir()}
    for name, about in files.items():
        content = (newest / name).read_bytes()
        assert about == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert holds(newest, 2)


def cut(file):
    file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2])


def empty(file):
    file.write_bytes(b"")


def longer(file):
    file.write_bytes(file.read_bytes() + b"0")


def missing(file):
    file.unlink()


FILES = ("__0_0.distcp", ".metadata", "state.json", "manifest.json")


@pytest.mark.parametrize("harm", [cut, empty, longer, missing])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_one_is_named_and_the_one_before_it_used(folder, name, harm, caplog):
    newest = step_folder(folder, 2)
    harm(newest / name)
    if (name, harm) == ("manifest.json", missing):  # as in checkpoints of earlier versions
        assert find_resume("auto", folder) == newest and holds(newest, 2)
        return
    assert find_resume("auto", folder) == step_folder(folder, 1) and holds(step_folder(folder, 1), 1)
    (message,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "step 2" in message and str(newest / name) in message
    assert find_checkpoint(folder.parent, "RUN") == step_folder(folder, 1)
    with pytest.raises(UserError, match=r"checkpoint.resume=.*step_00000002 (is damaged|has no complete)"):
        find_resume(str(newest), folder.parent / "another")


@pytest.mark.parametrize("name", FILES[:3])
def test_changed_bytes_are_found_by_their_sums(folder, name, caplog):
    file = step_folder(folder, 2) / name
    content = bytearray(file.read_bytes())
    place = content.index(b'"step"') + 1 if name == "state.json" else len(content) // 2
    content[place] ^= 1
    file.write_bytes(bytes(content))
    assert find_resume("auto", folder, verify=True) == step_folder(folder, 1)
    assert str(file) in caplog.text
    file.write_bytes(file.read_bytes()[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    assert find_resume("auto", folder, verify=True) == step_folder(folder, 2)


def test_a_signal_while_one_is_read_is_no_damage(folder, monkeypatch):
    def stopped(self, plan, planner):
        raise Stopped("stopped by SIGTERM")

    monkeypatch.setattr("fsdp_cp.checkpoint_reader._Reader.read_data", stopped)
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        load(step_folder(folder, 2), tensors(9))


def test_a_reader_reads_the_list_of_tensors_once(folder, monkeypatch):
    """An export loads tensor by tensor; the list again for each is quadratic (200 s for 600 adapters of 1.3B)."""
    newest, opened, unpickle = step_folder(folder, 2), [], _Unpickler.load
    monkeypatch.setattr(_Unpickler, "load", lambda self: opened.append(1) or unpickle(self))
    files, saved = reader(newest), tensors(2)["student"]
    for name, expected in saved.items():
        value = torch.empty(SHAPE)
        dcp.load({f"student.{name}": value}, storage_reader=files, no_dist=True)
        assert torch.equal(value, expected)
    assert len(opened) == 1


def test_none_that_is_whole_is_no_reason_to_begin_anew(folder):
    for step in (1, 2):
        cut(step_folder(folder, step) / "__0_0.distcp")
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole .*checkpoint.resume=never"):
        find_resume("auto", folder)
    (folder.parent / "other").mkdir()
    other = Checkpoints(folder.parent / "other" / "checkpoints", keep=1)
    other.save(5, tensors(5), {"step": 5})
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole .*checkpoint.resume=never"):
        find_resume(str(folder.parent / "other"), folder)
    with pytest.raises(UserError, match=r"has no complete checkpoint \(that of step 2 is damaged: .*__0_0.distcp has"):
        find_resume(str(folder.parent), folder.parent / "another")
    assert find_resume("never", folder) is None


def test_a_run_goes_on_where_the_checkpoint_that_it_began_from_is_gone(folder):
    """``keep`` removes it in the end, and so may the run that it was of."""
    for gone in (step_folder(folder, 1), folder.parent / "another"):
        Checkpoints(folder, keep=0).save(3, tensors(3), {"step": 3, "branch_of": str(gone)})
        shutil.rmtree(gone, ignore_errors=True)
        assert find_resume(str(gone), folder) == step_folder(folder, 3)
        with pytest.raises(UserError, match="has no complete checkpoint|no folder"):
            find_resume(str(folder.parent / "a third"), folder)
        shutil.rmtree(step_folder(folder, 3))


def test_what_is_no_checkpoint_is_not_looked_at(folder):
    (folder / "step_00000003.tmp").mkdir()
    (folder / "step_00000004").mkdir()
    (folder / "notes.txt").write_text("mine")
    assert published_steps(folder) == [1, 2] and find_resume("auto", folder) == step_folder(folder, 2)
    assert find_resume(str(folder.parent), folder) == step_folder(folder, 2)
    assert find_resume(str(step_folder(folder, 1)), folder) == step_folder(folder, 1)
    with pytest.raises(UserError, match="has no complete checkpoint; use auto, never"):
        find_resume(str(folder), folder.parent / "another")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_and_every_nth_are_kept(tmp_path, asynchronous):
    checkpoints = Checkpoints(tmp_path, keep=2, keep_every=4, asynchronous=asynchronous)
    (tmp_path / "mine").mkdir()
    for step in range(1, 11):
        checkpoints.save(step, tensors(step), {"step": step})
    checkpoints.wait()
    assert published_steps(tmp_path) == [4, 8, 9, 10]
    assert sorted(p.name for p in tmp_path.iterdir())[0] == "mine" and len(list(tmp_path.iterdir())) == 5
    assert all(holds(step_folder(tmp_path, step), step) for step in (4, 8, 9, 10))


def test_what_a_killed_save_left_is_removed_and_nothing_else(folder):
    shutil.copytree(step_folder(folder, 2), folder / "step_00000003.tmp")
    mine = ["step_1.tmp", "step_mine", "step_mine.tmp"]
    for name in mine:
        (folder / name).mkdir()
    Checkpoints(folder, keep=1)
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000001", "step_00000002", *mine]


def test_what_is_being_written_is_completed_before_an_error_ends_the_process(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=True)
    with pytest.raises(UserError, match="mistake"), checkpoints.completed():
        checkpoints.save(3, tensors(3), {"step": 3})
        raise UserError("mistake")
    assert holds(step_folder(tmp_path, 3), 3)


def test_a_later_one_that_appeared_meanwhile_is_not_left_behind(folder):
    there = published_steps(folder)
    refuse_overtaken(there, folder)
    Checkpoints(folder, keep=0).save(3, tensors(3), {"step": 3})
    with pytest.raises(UserError, match="step_00000003 was saved while this start looked"):
        refuse_overtaken(there, folder)


def test_training_goes_on_beside_it_and_the_copy_is_of_before(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=True)
    state = tensors(5)
    checkpoints.save(5, state, {"step": 5})
    for x in state["student"].values():
        x.fill_(torch.nan)
    checkpoints.wait()
    assert holds(step_folder(tmp_path, 5), 5)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_is_full(tmp_path, asynchronous, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=asynchronous)
    checkpoints.save(1, tensors(1), {"step": 1})
    checkpoints.wait()

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fsdp_cp.checkpoint_writer.SummedStream.write", full)
    with pytest.raises(UserError, match="checkpoint of step 2 cannot be written .*newest complete one is of step 1"):
        checkpoints.save(2, tensors(2), {"step": 2})
        checkpoints.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    monkeypatch.undo()
    checkpoints.save(3, tensors(3), {"step": 3})
    checkpoints.wait()
    assert holds(step_folder(tmp_path, 3), 3)
