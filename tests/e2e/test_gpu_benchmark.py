"""``python -m benchmarks.gpu``: crashed and hung parts become rows, finished parts stay; and a small run of all."""

import json
import os
import signal
import subprocess
import sys

import pytest

from benchmarks.gpu.child import ROOT, read_rows
from benchmarks.gpu.command import main
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.process import run_part
from benchmarks.gpu.report import Results
from fsdp_cp.errors import UserError
from tests.e2e.launch import is_alive, wait_for
from tests.tiers import long, slow

RESULTS = ROOT / "benchmarks" / "results"
CPU = ["--device", "cpu", "--tiny"]


def part(name: str, seconds: float = 60) -> Part:
    return Part(name=name, target=f"tests.e2e.gpu_parts:{name}", seconds=seconds, shows=f"What {name} shows.")


def results(out) -> dict:
    (file,) = out.glob("*.json")
    return json.loads(file.read_text())["parts"]


@slow
def test_a_crash_and_a_hang_are_rows(tmp_path, capsys):
    """The other parts are measured, earlier rows of a failed part are kept, and no process of a part survives."""
    parts = [part("crashing"), part("hanging", seconds=1), part("raising"), part("empty"), part("good")]
    assert main([*CPU, "--out", str(tmp_path)], parts) == 1
    printed = capsys.readouterr().out
    found = results(tmp_path)
    assert [found[each.name]["status"] for each in parts] == ["failed", "over its time", "failed", "failed", "finished"]
    assert "SIGSEGV" in found["crashing"]["error"] and "the last words" in found["crashing"]["error"]
    assert found["crashing"]["rows"] == [{"what": "before", "ms": 3}]
    assert 3 <= found["hanging"]["seconds"] < 30
    (row,) = found["hanging"]["rows"]
    wait_for(lambda: not is_alive(row["process"]) and not is_alive(row["group"]), seconds=30)
    before, kernel, last = found["raising"]["rows"]
    assert before["ms"] == 1 and kernel["tokens"] == 8 and "ZeroDivisionError" in kernel["error"]
    assert last["error"] == found["raising"]["error"] and "ModuleNotFoundError" in last["error"]
    assert found["empty"]["error"] and len(found["empty"]["rows"]) == 1
    assert "| a row | 1.25 | 0.5 |" in printed
    (page,) = tmp_path.glob("*.md")
    assert printed.strip() == page.read_text().strip() and found["good"]["made_with"]["torch"]


@slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_runs_on_behind_a_command_that_is_ended(sent, code, tmp_path):
    """A surviving part would hold the GPU until its time is over, and the next start would share it."""
    tell, out = tmp_path / "tell", tmp_path / "out"
    tell.mkdir()
    script = (
        "import signal, sys\nfrom benchmarks.gpu.command import main, stop\nfrom benchmarks.gpu.parts import Part\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "part = Part(name='telling', target='tests.e2e.gpu_parts:telling', seconds=60, shows='')\n"
        f"sys.exit(main({[*CPU, '--out', str(out)]}, [part]))"
    )
    command = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=os.environ | {"TELL": str(tell)})
    try:
        wait_for(lambda: len(list(tell.iterdir())) == 2, seconds=30)
        command.send_signal(sent)
        assert command.wait(timeout=30) == code
    finally:
        command.kill()
        command.wait()
    processes = [int(file.name) for file in tell.iterdir()]
    wait_for(lambda: not any(map(is_alive, processes)), seconds=30)


def test_what_is_finished_is_not_measured_again(tmp_path, capsys):
    """The next start measures only failed parts, parts that ran out of time, and those of ``--again``."""
    out = ["--out", str(tmp_path)]
    assert main([*CPU, *out, "--only", "good"], [part("good"), part("empty")]) == 0
    first = results(tmp_path)
    assert list(first) == ["good"]
    assert main([*CPU, *out, "--minutes", "0.01"], [part("good"), part("empty")]) == 1
    assert results(tmp_path)["empty"]["error"]
    # Earlier finished parts are kept and shown in any later start.
    assert main([*CPU, *out], [part("good"), part("empty")]) == 1
    assert "| a row | 1.25 |" in capsys.readouterr().out
    second = results(tmp_path)
    assert second["good"] == first["good"] and second["empty"]["error"]
    assert main([*CPU, *out, "--only", "good", "--again", "good"], [part("good"), part("empty")]) == 0
    third = results(tmp_path)
    assert third["good"]["seconds"] != first["good"]["seconds"] and third["empty"] == second["empty"]


@slow
def test_processes_of_a_part_may_fail_alone():
    found = run_part(part("isolating"), device_type="cpu", tiny=True, seconds=60)
    assert found.status == "finished"
    errors = {row["what"]: row.get("error") for row in found.rows}
    assert [bool(errors[name]) for name in ("crashing", "hanging", "raising", "good", "after them")] == [
        True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "name"),
    [(["--again", "wan"], "--again"), (["--minutes", "31", *CPU], "--minutes"), ([*CPU, "--out", "FILE"], "FILE")],
)
def test_a_mistake_is_one_line(words, name, tmp_path, capsys):
    (tmp_path / "FILE").write_text("kept")
    assert main([word.replace("FILE", str(tmp_path / "FILE")) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and name in line and (tmp_path / "FILE").read_text() == "kept"


@pytest.mark.parametrize(
    "text", ["", "{}", '{"parts": {"good": {}}}', '{"parts": {"good": {"status": 1, "rows": []}}}']
)
def test_a_file_of_something_else_is_refused(text, tmp_path):
    file = Results.read(tmp_path, "cpu x", tiny=True).file
    file.write_text(text)
    with pytest.raises(UserError):
        Results.read(tmp_path, "cpu x", tiny=True)
    assert file.read_text() == text


def test_rows_are_read_to_the_last_whole_one(tmp_path):
    file = tmp_path / "rows"
    assert read_rows(file) == []
    file.write_text('{"what": "a"}\n{"what": "b", "x": 1}\n{"what": "c", "x"')
    assert [row["what"] for row in read_rows(file)] == ["a", "b"]


@long
@pytest.mark.timeout(1800)
def test_all_parts_in_small(tmp_path, capsys):
    """Every part is finished, every row is a result, and nothing committed is touched."""
    committed = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    assert main([*CPU, "--out", str(tmp_path)]) == 0
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == committed
    found = results(tmp_path)
    assert list(found) == [part.name for part in PARTS]
    for name, record in found.items():
        assert [row for row in record["rows"] if "error" in row] == [], name
    rows = {name: {row["what"]: row for row in record["rows"]} for name, record in found.items()}
    kernels = rows["kernels"]
    assert kernels["cpu_flash, bfloat16"]["right"] == "10 of 10"
    assert kernels["reference, derivative, float64"]["largest error"] < 1e-12
    assert all(row["right"] for row in found["attention"]["rows"] if "largest error" in row)
    assert any(row["what"] == "JVP of reference over the forward of reference" for row in found["attention"]["rows"])
    for name, run in (("wan 1.3B", "DMD2"), ("wan 1.3B, rCM", "rCM"), ("wan 14B lora", "14B, adapters")):
        assert rows[name][f"{run}: plan against peak"]["within 5 %"], run
        assert rows[name][f"{run}: student step"]["seconds"] > 0 < rows[name][f"{run}: fake step"]["seconds"]
    assert rows["streaming"]["eager, clip 2"]["chunks"] == 3
    memory = [row for row in found["memory"]["rows"] if row["what"].endswith("plan against peak")]
    assert len(memory) > 8 and all(row["within 5 %"] for row in memory)
    quickstart = rows["quickstart"]
    assert quickstart["DMD2, fp32"]["difference"] == 0 == quickstart["self_forcing, fp32"]["difference"]
    assert rows["quickstart, all methods"]["train.py itself, to its report"]["steps"] == 2
    assert all(row["finite"] for row in found["encoders"]["rows"])
    encoders = {name: row["relative error"] for name, row in rows["encoders"].items() if "relative error" in row}
    assert all(error > 0 for error in encoders.values()), "every way is another computation, tiles too"
    assert all(error < 0.1 for name, error in encoders.items() if "tiled" not in name)
    # Another start has nothing to do.
    capsys.readouterr()
    assert main([*CPU, "--out", str(tmp_path)]) == 0 and results(tmp_path) == found
