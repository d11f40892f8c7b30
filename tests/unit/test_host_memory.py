"""What a host, or a container on it, still has."""

import time

import pytest
import torch

from fsdp_cp import host_memory
from fsdp_cp.host_memory import available_host_memory


def test_it_shrinks_by_what_is_taken():
    """The kernel counts with a delay, and other processes take and give back meanwhile: it is looked at repeatedly."""
    seen = []
    for _ in range(5):
        before = available_host_memory()
        taken = torch.ones(2**26)  # 256 MiB, written to
        for _ in range(10):
            time.sleep(0.2)
            seen.append(before - available_host_memory())
            if 2**27 < seen[-1] < 2**29:
                return
        del taken
    raise AssertionError(seen)


def of(tmp_path, monkeypatch, meminfo: str | None, limit: str, usage: int = 0, cache: int = 0, group="") -> int | None:
    """What is available; the limit is that of ``group`` of ``/job/step``."""
    if meminfo is not None:
        (tmp_path / "meminfo").write_text(meminfo)
    folder = tmp_path / "cgroup" / group
    (tmp_path / "cgroup" / "job" / "step").mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("memory.max", limit),
        ("memory.current", str(usage)),
        ("memory.stat", f"anon 5\ninactive_file {cache}\n"),
    ):
        (folder / name).write_text(text)
    (tmp_path / "own").write_text("0::/job/step\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host_memory, "_ROOTS", {"": (tmp_path / "cgroup", "memory.max", "memory.current")})
    return available_host_memory()


def test_a_containers_limit_counts_without_the_cache_that_can_go(tmp_path, monkeypatch):
    meminfo = "MemTotal: 9000 kB\nMemAvailable:     1000 kB\n"
    assert of(tmp_path, monkeypatch, meminfo, "max") == 1000 * 1024
    assert of(tmp_path, monkeypatch, meminfo, "700000", 600000, 50000) == 150000
    assert of(tmp_path, monkeypatch, meminfo, "700000", 900000) == 0
    assert of(tmp_path, monkeypatch, meminfo, str(2**62), 5) == 1000 * 1024


def test_unknown_elsewhere(tmp_path, monkeypatch):
    assert of(tmp_path, monkeypatch, None, "max") is None


@pytest.mark.parametrize("group", ["job", "job/step"])
def test_the_limit_of_a_job_or_of_its_step_counts(tmp_path, monkeypatch, group):
    meminfo = "MemTotal: 9000 kB\nMemAvailable:     1000 kB\n"
    assert of(tmp_path, monkeypatch, meminfo, "5000", 1000, group=group) == 4000
