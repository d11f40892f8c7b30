"""The memory that a host, or a container on it, has available."""

import pytest

from fsdp_cp.measure import memory
from fsdp_cp.measure.memory import available_host_memory


def of(tmp_path, monkeypatch, meminfo: str | None, limit: str, usage: int = 0, cache: int = 0, group="") -> int | None:
    """Return the available memory, where ``group`` of ``/job/step`` has the limit."""
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
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "_ROOTS", {"": (tmp_path / "cgroup", "memory.max", "memory.current")})
    return available_host_memory()


def test_a_containers_limit_counts_without_the_cache_that_can_go(tmp_path, monkeypatch):
    meminfo = "MemTotal: 9000 kB\nMemAvailable:     1000 kB\n"
    assert of(tmp_path, monkeypatch, meminfo, "max") == 1000 * 1024
    assert of(tmp_path, monkeypatch, meminfo, "700000", 600000, 50000) == 150000
    assert of(tmp_path, monkeypatch, meminfo, "700000", 900000) == 0
    assert of(tmp_path, monkeypatch, meminfo, str(2**62), 5) == 1000 * 1024
    (tmp_path / "meminfo").unlink()
    assert of(tmp_path, monkeypatch, None, "max") is None


@pytest.mark.parametrize("group", ["job", "job/step"])
def test_the_limit_of_a_job_or_of_its_step_counts(tmp_path, monkeypatch, group):
    meminfo = "MemTotal: 9000 kB\nMemAvailable:     1000 kB\n"
    assert of(tmp_path, monkeypatch, meminfo, "5000", 1000, group=group) == 4000
