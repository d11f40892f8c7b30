"""Paths without permission to look, circular links, and links into what a command would replace."""

import contextlib
import ctypes
import io
import os
import pickle
import traceback
from pathlib import Path

import pytest

from distill.run.folder import refuse_foreign_run
from distill.sample import main as sample
from fsdp_cp.errors import paths_of_the_user
from fsdp_cp.files.atomic_folder import refuse_input
from models.export import main as export
from models.lora.__main__ import main as lora
from tests.unit.refused import refused
from train import main as train

TEACHER = "assets/quickstart_teacher"


def _obey_permissions():
    """Drop the capabilities that let root read and write everywhere.

    They are ``CAP_DAC_OVERRIDE`` (1) and ``CAP_DAC_READ_SEARCH`` (2).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the same of capabilities from 32 on
    assert libc.capget(header, sets) == 0
    for i in range(3):
        sets[i] &= ~0b110
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def as_a_user(function, *args):
    """Call ``function(*args)`` in a process that obeys permissions, unlike root."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            _obey_permissions()
            answer = (True, function(*args))
        except BaseException:  # told in the parent
            answer = (False, traceback.format_exc())
        os.write(write, pickle.dumps(answer))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as stream:
        right, found = pickle.loads(stream.read())
    os.waitpid(child, 0)
    assert right, found
    return found


def _ended(command, words):
    """Return the exit code and what a command writes to stderr."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = command(words)
    return code, errors.getvalue()


def _refuse_foreign(run_dir):
    with refused("run_dir"):
        refuse_foreign_run(run_dir)


def test_where_nobody_may_write_no_run_begins(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o555)
    for run_dir in (tmp_path / "theirs", tmp_path / "theirs" / "a" / "b"):
        as_a_user(_refuse_foreign, run_dir)
        assert not any((tmp_path / "theirs").iterdir())


TRAIN = ("experiment=quickstart", "device=cpu", "mesh.cp=1", "dry_run=true")
COMMANDS = {
    "extract": (lora, "extract {path} {teacher} {tmp}/out"),
    "sample": (sample, "{path} --out {tmp}/out"),
    "run_dir": (train, "run_dir={path}"),
    "teacher": (train, "run_dir={tmp}/run teacher.checkpoint={path}"),
}


def _words(command, path, folder):
    words = command.format(path=path, tmp=folder, teacher=Path(TEACHER).resolve()).split()
    return [*TRAIN, *words] if "=" in words[0] else words


@pytest.mark.parametrize("name", COMMANDS)
def test_what_lies_behind_a_closed_folder_is_a_line(tmp_path, name):
    (tmp_path / "closed").mkdir(mode=0o000)
    command, words = COMMANDS[name]
    code, said = as_a_user(_ended, command, _words(words, tmp_path / "closed" / "x", tmp_path))
    assert code == 2 and len(said.splitlines()) == 1 and "closed" in said, said


@pytest.mark.parametrize(("command", "words"), [(export, "{teacher} {path}"), (train, "run_dir={path}")])
def test_links_in_a_circle_are_a_line(tmp_path, command, words):
    (tmp_path / "loop").symlink_to("loop")
    code, said = _ended(command, _words(words, tmp_path / "loop", tmp_path))
    assert code == 2 and len(said.splitlines()) == 1, said


def test_other_errors_stay_what_they_are():
    for error in (RuntimeError(), FileNotFoundError()):
        with pytest.raises(type(error)), paths_of_the_user():
            raise error


@pytest.mark.parametrize("name", ["config.json", "diffusion_pytorch_model.safetensors"])
def test_files_that_a_link_leads_to_are_an_input_too(tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("trained")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / name).symlink_to(f"../out/{name}")
    with refused("FULL"):
        refuse_input(tmp_path / "out", "OUT", {"FULL": tmp_path / "snapshot"})
    refuse_input(tmp_path / "another", "OUT", {"FULL": tmp_path / "snapshot", "BASE": tmp_path / "not there"})
