"""The run directory after kills, and settings when torchrun restarts the ranks."""

import errno
import json
from pathlib import Path

import pytest

from distill.config import compose_config
from distill.run.folder import (
    OUTPUTS,
    STARTS,
    STATUS,
    _move_aside,
    held_run_dir,
    recorded_end,
    recorded_stop,
    refuse_foreign_run,
    resume_setting,
    this_start,
)
from fsdp_cp.runtime.signals import Stopped
from tests.unit.refused import refused


class Killed(BaseException):
    pass


@pytest.mark.parametrize("renames", range(4))
def test_killed_while_files_are_moved_aside_it_is_still_a_runs_folder(tmp_path, monkeypatch, renames):
    files = ("config.yaml", STARTS, "log.txt", "metrics.jsonl")
    for name in files:
        (tmp_path / name).write_text(json.dumps({"started": "2020-01-01T00:00:00+00:00"}) + "\n")
    rename, done = Path.rename, []

    def until_killed(path, target):
        if len(done) == renames:
            raise Killed
        done.append(path.name)
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", until_killed)
        _move_aside(tmp_path)
    assert len(done) == renames
    refuse_foreign_run(tmp_path)
    _move_aside(tmp_path)
    assert not any((tmp_path / name).exists() for name in OUTPUTS)
    kept = [path.name for path in (tmp_path / "previous").rglob("*") if path.is_file()]
    assert sorted(kept) == sorted(files)


@pytest.mark.parametrize(
    ("resume", "begun", "expected"), [("never", "b", "auto"), ("never", "a", "never"), ("auto", "b", "auto")]
)
def test_never_is_meant_for_a_jobs_first_start(tmp_path, monkeypatch, resume, begun, expected):
    """A restart by torchrun ``b`` resumes the run that ``b`` started, and moves aside files of an earlier torchrun."""
    config = compose_config(["experiment=quickstart", f"checkpoint.resume={resume}", f"run_dir={tmp_path}"])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/torchelastic_{begun}/none_1/attempt_0/0/error.json")
    record = json.dumps(this_start(["train.py"]))
    (tmp_path / STARTS).write_text(f"{record}\n")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/torchelastic_b/none_1/attempt_1/0/error.json")
    assert resume_setting(config, tmp_path) == expected
    (tmp_path / STARTS).write_text("{")
    assert resume_setting(config, tmp_path) == resume
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    (tmp_path / STARTS).write_text(f"{json.dumps(this_start(['train.py']))}\n")
    assert resume_setting(config, tmp_path) == resume, "plain python restarts nothing"


@pytest.mark.parametrize(
    ("content", "linked", "setting"),
    [
        (b"my precious lock\n", False, "run_dir"),
        (b"process 7 on host\nand more\n", True, "sweep_dir"),
        (b"\xff\xfe", True, "run_dir"),
    ],
)
def test_a_lock_of_somebody_else_is_not_written_to(tmp_path, content, linked, setting):
    folder = tmp_path / "run"
    folder.mkdir()
    theirs = tmp_path / "theirs" if linked else folder / ".lock"
    theirs.write_bytes(content)
    if linked:
        (folder / ".lock").symlink_to(theirs)
    with refused(f"{setting}={folder}"), held_run_dir(folder, setting):
        pass
    assert theirs.read_bytes() == content


def test_a_lock_is_taken_once_at_a_time(tmp_path):
    """A lock file of an earlier run exists each time; one run was killed before it wrote its name."""
    for _ in range(2):
        with held_run_dir(tmp_path):
            with refused("run_dir"), held_run_dir(tmp_path):
                raise AssertionError("two runs have one folder")
            assert (tmp_path / ".lock").read_text().startswith("process ")
        (tmp_path / ".lock").write_text("")


def test_a_link_to_nowhere_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "run").symlink_to("nowhere")
    with refused("run_dir"):
        refuse_foreign_run(tmp_path / "run")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("content", ["", "[1]", '{"theirs": 1}'])
def test_a_record_of_starts_is_known_by_what_it_says(tmp_path, content):
    (tmp_path / STARTS).write_text(content)
    with refused("run_dir"):
        refuse_foreign_run(tmp_path)


def test_a_signal_before_the_run_begins_is_recorded(tmp_path):
    """A scheduler's script reads ``stopped`` and starts the same command again, in a directory that stays a run's."""
    config = compose_config(["experiment=quickstart", f"run_dir={tmp_path / 'run'}"])

    def stop():
        with pytest.raises(Stopped), recorded_stop(config):
            raise Stopped("stopped by SIGUSR1")

    stop()
    about = json.loads((tmp_path / "run" / STATUS).read_text())
    assert (about["state"], about["exit_code"], about["checkpoint"]) == ("stopped", 75, None)
    refuse_foreign_run(tmp_path / "run")
    _move_aside(tmp_path / "run")
    assert not (tmp_path / "run" / "previous").exists(), "nothing was begun"
    for theirs in ("theirs", '{"state": "up", "started": "today"}'):
        (tmp_path / "run" / STATUS).write_text(theirs)
        with refused("run_dir"):
            refuse_foreign_run(tmp_path / "run")
        stop()
        assert (tmp_path / "run" / STATUS).read_text() == theirs
    finished = json.dumps(about | {"state": "finished"})
    (tmp_path / "run" / STATUS).write_text(finished)
    stop()
    assert (tmp_path / "run" / STATUS).read_text() == finished, "nothing is left to resume"
    (tmp_path / "run" / STATUS).unlink()
    with held_run_dir(tmp_path / "run"):
        stop()
        assert not (tmp_path / "run" / STATUS).exists(), "another process has the directory"


def test_a_full_disk_does_not_hide_the_end(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError), recorded_end(tmp_path):
        assert json.loads((tmp_path / STATUS).read_text())["state"] == "running"
        monkeypatch.setattr("distill.run.folder.write_text", full)
        full(None, None)
    about = json.loads((tmp_path / STATUS).read_text())
    assert (about["state"], about["exit_code"]) == ("failed", 2)
