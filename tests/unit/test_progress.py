"""Progress without a terminal, what training waits for, and counts in words."""

import logging
import time

import pytest

from fsdp_cp import progress
from fsdp_cp.errors import counted, duration


@pytest.mark.parametrize(("between", "lines"), [(0.0, 3), (60.0, 0)])
def test_a_log_that_is_no_terminal_gets_a_line_now_and_then(monkeypatch, caplog, capsys, between, lines):
    monkeypatch.setattr(progress, "_BETWEEN_LINES", between)
    with caplog.at_level(logging.INFO), progress.progress(6, "clips", "clip") as advance:
        for _ in range(3):
            advance(2)
    assert len(caplog.messages) == lines and capsys.readouterr().err == ""
    assert all(f"{2 * i + 2} of 6" in line for i, line in enumerate(caplog.messages))


@pytest.mark.parametrize(("seconds", "lines"), [(0.2, 2), (0.0, 0)])
def test_a_long_wait_is_announced_and_a_short_one_is_not(monkeypatch, caplog, seconds, lines):
    monkeypatch.setattr(progress, "_LONG", 0.1)
    with caplog.at_level(logging.INFO), progress.announced("the checkpoint of step 4"):
        time.sleep(seconds)
        during = len(caplog.messages)
    assert (during, len(caplog.messages)) == (lines // 2, lines)


def test_counts_and_durations():
    assert [counted(n, "clip") for n in (0, 1, 2)] == ["0 clips", "1 clip", "2 clips"]
    assert counted(2, "micro-batch", "micro-batches") == "2 micro-batches"
    assert [duration(s) for s in (0.04, 42, 240, 2400, 20_000, 1_000_000)] == [
        "0.0 s", "42 s", "4.0 min", "40 min", "5.6 h", "12 days"
    ]  # fmt: skip
