"""``python -m distill.demo`` before it serves: which run a folder is of, and one line for each mistake."""

import importlib.util
import shutil
import socket
import sys

import pytest

from distill.demo.command import main, run_and_student
from fsdp_cp.files.atomic_folder import MANIFEST, atomic_folder
from fsdp_cp.runtime.packages import optional_package
from tests.unit.refused import check_command, refused
from tests.unit.test_sample_command import TEACHER, write_run

ABOUT = {"role": "student", "step": 1}


def test_an_export_names_its_run(tmp_path):
    run = write_run(tmp_path / "run", TEACHER)
    assert run_and_student(run) == (run, None)
    records = {"checkpoint": str(run / "checkpoints" / "step_00000001")}, {"run": str(run)}
    for name, record in zip("ab", records, strict=True):
        with atomic_folder(tmp_path / name, ABOUT | record):
            pass
        assert run_and_student(tmp_path / name) == (run, tmp_path / name)
    moved = shutil.move(run, tmp_path / "moved")
    with refused("has no config.yaml here"):
        run_and_student(tmp_path / "b")
    (moved / "export" / "student" / MANIFEST).write_text((tmp_path / "b" / MANIFEST).read_text())
    assert run_and_student(moved / "export" / "student") == (moved, moved / "export" / "student")
    with refused("neither a run's folder"):
        run_and_student(tmp_path)


@pytest.mark.slow
def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "run", TEACHER)
    with socket.create_server(("127.0.0.1", 0)) as other:
        cases = {"--port": ["--port", str(other.getsockname()[1])], "999.1.1.1": ["--host", "999.1.1.1"]}
        if importlib.util.find_spec("gradio") is None:
            cases = {}
        for named, words in cases.items():
            check_command(main, capsys, named, run, *words)
    monkeypatch.setitem(sys.modules, "gradio", None)
    optional_package.cache_clear()
    shutil.rmtree(run / "export")
    for named in ("export/student", "fsdp-cp[demo]"):
        check_command(main, capsys, named, run)
        shutil.copytree(TEACHER, run / "export" / "student", dirs_exist_ok=True)
    optional_package.cache_clear()
