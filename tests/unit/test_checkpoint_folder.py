"""Checkpoints on disk: published atomically, and never used when damaged."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import DefaultStager

from fsdp_cp.checkpoint.folder import (
    _Unpickler,
    find_checkpoint,
    find_resume,
    reader,
    refuse_overtaken,
    saved_steps,
    step_folder,
)
from fsdp_cp.checkpoint.save_load import Checkpoints, load
from fsdp_cp.launch import process_group
from fsdp_cp.runtime import torch_versions
from fsdp_cp.runtime.signals import Stopped
from tests.unit.refused import refused

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
    """Write ``checkpoints/`` with those of steps 1 and 2."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=0)
    for step in (1, 2):
        checkpoints.save(step, tensors(step), {"step": step})
    return tmp_path / "checkpoints"


def holds(checkpoint, step):
    loaded = tensors(99)
    load(checkpoint, loaded)
    return all(torch.equal(loaded["student"][name], x) for name, x in tensors(step)["student"].items())


def cut(file):
    file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2])


def missing(file):
    file.unlink()


def test_a_checkpoint_has_its_name_only_when_all_its_files_are_there(tmp_path, monkeypatch):
    """A kill at any file operation must leave no published step without its state."""
    seen, rename = [], Path.rename

    def note(self, target):
        if self.parent == tmp_path:
            seen.append({p.name for p in self.iterdir()})
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", note)
    Checkpoints(tmp_path, keep=0).save(1, tensors(1), {"step": 1})
    (files,) = [each for each in seen if each]
    assert files >= {"__0_0.distcp", ".metadata", "state.json"}


@pytest.mark.parametrize(
    "value", [1.0, torch.ones(2, dtype=torch.int8), [torch.ones(2)]], ids=["number", "int8", "list"]
)
def test_what_could_not_be_read_again_is_not_saved(tmp_path, value):
    with refused("model.x"):
        Checkpoints(tmp_path, keep=0).save(1, {"model": {"x": value}}, {"step": 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
def test_a_damaged_checkpoint_is_skipped_and_the_one_before_it_used(folder, name):
    newest, file = step_folder(folder, 2), step_folder(folder, 2) / name
    whole = file.read_bytes()
    for harm in (cut, missing):
        harm(file)
        assert find_resume("auto", folder) == step_folder(folder, 1), harm
        assert find_checkpoint(folder.parent, "RUN") == step_folder(folder, 1)
        with refused("checkpoint.resume"):
            find_resume(str(newest), folder.parent / "another")
        file.write_bytes(whole)
        assert find_resume("auto", folder) == newest and holds(newest, 2)


def test_a_signal_while_one_is_read_is_no_damage(folder, monkeypatch):
    def stopped(self, plan, planner):
        raise Stopped("stopped by SIGTERM")

    monkeypatch.setattr("fsdp_cp.checkpoint.folder._Reader.read_data", stopped)
    with pytest.raises(Stopped):
        load(step_folder(folder, 2), tensors(9))


def test_a_reader_reads_the_list_of_tensors_once(folder, monkeypatch):
    """An export loads one tensor at a time. Reading the list for each is quadratic (200 s for 600 adapters of 1.3B)."""
    newest, opened, unpickle = step_folder(folder, 2), [], _Unpickler.load
    monkeypatch.setattr(_Unpickler, "load", lambda self: opened.append(1) or unpickle(self))
    files, saved = reader(newest), tensors(2)["student"]
    for name, expected in saved.items():
        value = torch.empty(SHAPE)
        dcp.load({f"student.{name}": value}, storage_reader=files, no_dist=True)
        assert torch.equal(value, expected)
    assert len(opened) == 1


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_scratch(folder):
    for step in (1, 2):
        cut(step_folder(folder, step) / "__0_0.distcp")
    with refused("checkpoint.resume"):
        find_resume("auto", folder)
    (folder.parent / "other").mkdir()
    other = Checkpoints(folder.parent / "other" / "checkpoints", keep=1)
    other.save(5, tensors(5), {"step": 5})
    with refused("checkpoint.resume"):
        find_resume(str(folder.parent / "other"), folder)
    with refused("checkpoint.resume"):
        find_resume(str(folder.parent), folder.parent / "another")
    assert find_resume("never", folder) is None


def test_a_run_resumes_after_the_checkpoint_it_branched_from_is_gone(folder):
    """``keep`` or the other run may have removed it."""
    for gone in (step_folder(folder, 1), folder.parent / "another"):
        Checkpoints(folder, keep=0).save(3, tensors(3), {"step": 3, "branch_of": str(gone)})
        shutil.rmtree(gone, ignore_errors=True)
        assert find_resume(str(gone), folder) == step_folder(folder, 3)
        with refused("checkpoint.resume"):
            find_resume(str(folder.parent / "a third"), folder)
        shutil.rmtree(step_folder(folder, 3))


def test_what_is_no_checkpoint_is_not_looked_at(folder):
    (folder / "step_00000003.tmp").mkdir()
    (folder / "step_00000004").mkdir()
    (folder / "notes.txt").write_text("mine")
    assert saved_steps(folder) == [1, 2] and find_resume("auto", folder) == step_folder(folder, 2)
    assert find_resume(str(folder.parent), folder) == step_folder(folder, 2)
    assert find_resume(str(step_folder(folder, 1)), folder) == step_folder(folder, 1)
    with refused("checkpoint.resume"):
        find_resume(str(folder), folder.parent / "another")


def test_the_newest_and_every_nth_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, keep_every=4, asynchronous=True)
    (tmp_path / "mine").mkdir()
    for step in range(1, 11):
        checkpoints.save(step, tensors(step), {"step": step, "best": 3 if step < 6 else 6})
        if step == 5:
            checkpoints.wait()
            assert saved_steps(tmp_path) == [3, 4, 5], "the best one"
    checkpoints.wait()
    assert saved_steps(tmp_path) == [4, 6, 8, 9, 10]
    assert sorted(p.name for p in tmp_path.iterdir())[0] == "mine" and len(list(tmp_path.iterdir())) == 6
    assert all(holds(step_folder(tmp_path, step), step) for step in (4, 6, 8, 9, 10))


def test_what_a_killed_save_left_is_removed_and_nothing_else(folder):
    shutil.copytree(step_folder(folder, 2), folder / "step_00000003.tmp")
    mine = ["step_1.tmp", "step_mine", "step_mine.tmp"]
    for name in mine:
        (folder / name).mkdir()
    Checkpoints(folder, keep=1)
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000001", "step_00000002", *mine]


def test_a_later_one_that_appeared_meanwhile_is_not_left_behind(folder):
    there = saved_steps(folder)
    refuse_overtaken(there, folder)
    Checkpoints(folder, keep=0).save(3, tensors(3), {"step": 3})
    with refused("step_00000003"):
        refuse_overtaken(there, folder)


def test_an_asynchronous_save_copies_the_state_first(tmp_path):
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

    def full(self, path, mode):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystem, "create_stream", full)
    with refused("step 2"):
        checkpoints.save(2, tensors(2), {"step": 2})
        checkpoints.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    monkeypatch.undo()
    checkpoints.save(3, tensors(3), {"step": 3})
    checkpoints.wait()
    assert holds(step_folder(tmp_path, 3), 3)


def test_a_stager_that_torch_closes_after_each_copy_copies_again(monkeypatch, folder):
    """torch 2.11 and 2.12 do (pytorch issue 183413). A run ended with KeyError at its second checkpoint."""
    stage = DefaultStager._stage

    def stage_and_close(stager, state, **options):
        copied = stage(stager, state, **options)
        stager._state_dict_stager.close()
        return copied

    monkeypatch.setattr(DefaultStager, "_stage", stage_and_close)
    monkeypatch.setattr(torch_versions, "STAGER_REUSED_SINCE", (999,))
    checkpoints = Checkpoints(folder, keep=0, asynchronous=True)
    for step in (3, 4, 5):
        checkpoints.save(step, tensors(step), {"step": step})
    checkpoints.wait()
    assert [holds(step_folder(folder, step), step) for step in (3, 4, 5)] == 3 * [True]
