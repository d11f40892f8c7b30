"""Output of a run: a line per logged step of a short run in the log, and a progress bar only on a terminal."""

import json
import os
import re
import sys
import termios

import pytest

from tests.e2e.launch import TINY
from tests.tiers import slow_case
from train import main

WORDS = (
    "experiment=quickstart", "device=cpu", "mesh.cp=1", "steps=3", "batch_size=2", "log.every=1",
    "method.fake_updates_per_student_update=1", "sample.at_end=false", "export.at_end=false", "checkpoint.at_end=false",
)  # fmt: skip
NUMBERS = re.compile(r"(\w+) loss +(\S+) norm +(\S+) lr +(\S+)")


@pytest.mark.parametrize("on_a_terminal", [slow_case(False), True])
def test_step_lines_equal_the_metrics_and_a_bar_is_for_terminals(tmp_path, monkeypatch, on_a_terminal):
    reading, writing = os.openpty() if on_a_terminal else os.pipe()
    if on_a_terminal:
        termios.tcsetwinsize(writing, (24, 80))
    with open(writing, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert main([*WORDS, *TINY, f"run_dir={tmp_path}/run"]) == 0
        monkeypatch.undo()
        print("END", file=stderr, flush=True)  # reading an empty pipe would block
        shown = b""
        while b"END" not in shown:  # a terminal hands its output over in pieces
            shown += os.read(reading, 2**16)
        shown = shown.decode().replace("END", "")
    os.close(reading)
    assert ("/3 [" in shown and shown.count("\r") > 3) == on_a_terminal
    assert on_a_terminal or not shown.strip()

    log = (tmp_path / "run" / "log.txt").read_bytes().decode()
    assert "\r" not in log
    lines = [line for line in log.splitlines() if "/3 " in line]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(records) == 3
    latest = {}
    for line, record in zip(lines, records, strict=True):
        latest |= record
        for role, *numbers in NUMBERS.findall(line):
            for key, number in zip(("loss", "grad_norm", "lr"), numbers, strict=True):
                value = latest.get(f"{role}/{key}")
                assert number == "-" if value is None else float(number) == pytest.approx(value, rel=1e-2)
        seconds, tokens, memory = re.search(r"(\S+) s +(\S+) tokens/s +(\S+) GiB", line).groups()
        assert float(seconds) == pytest.approx(record["perf/seconds_per_step"], rel=1e-2)
        assert float(tokens.replace(",", "")) == pytest.approx(record["perf/tokens_per_second"], abs=0.5)
        assert float(memory) == pytest.approx(record["memory/peak_gib"], abs=0.01)
    assert {role for line in lines for role, *_ in NUMBERS.findall(line)} == {"student", "fake"}
    assert len({line.index("GiB") for line in lines}) == 1, "columns are aligned"
