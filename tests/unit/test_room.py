"""The disk's room is compared with what a run adds to its checkpoints, before it begins."""

import shutil
from types import SimpleNamespace

import pytest

from distill import room
from distill.config import compose_config
from distill.room import check_disk, role_bytes
from distill.setup import plan_run
from fsdp_cp.errors import UserError


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """``planned(free checkpoints, there, settings)``: what is said of that disk."""

    def ask(free: float, there: int, *settings: str) -> str:
        config = compose_config(["experiment=quickstart", "mesh.cp=1", "steps=100", f"run_dir={tmp_path}", *settings])
        for step in range(there):
            (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
            (tmp_path / "checkpoints" / f"step_{step:08d}" / "state.json").touch()
        plan = plan_run(config)
        shape = plan.mesh
        size = sum(role_bytes(config, plan, role, shape).checkpoint for role in plan.roles)
        monkeypatch.setattr(room.shutil, "disk_usage", lambda path: SimpleNamespace(free=free * size))
        return check_disk(config, plan, config.steps, config.checkpoint.resume)

    assert room.shutil is shutil
    return ask


@pytest.mark.parametrize(
    ("settings", "there", "needed"),
    [
        (("checkpoint.every=10", "checkpoint.keep=2"), 0, 3),  # two, and the one that is being written
        (("checkpoint.every=10", "checkpoint.keep=2"), 2, 1),
        (("checkpoint.every=10", "checkpoint.keep=2"), 5, 1),  # those that are there make room for each other
        (("checkpoint.every=10", "checkpoint.keep=2", "checkpoint.keep_every=20"), 0, 8),
        (("checkpoint.every=10", "checkpoint.keep=2", "checkpoint.resume=never"), 2, 3),
        (("checkpoint.every=0", "checkpoint.keep=2"), 0, 1),
        (("checkpoint.every=40", "checkpoint.keep=0"), 0, 3),
        (("checkpoint.every=0", "checkpoint.at_end=false"), 0, 0),
    ],
)
def test_what_is_there_at_once_must_fit(planned, settings, there, needed):
    assert f"{needed} beside the " in planned(needed, there, *settings)
    if needed:
        with pytest.raises(
            UserError, match=r"the checkpoints need .* are free; use another disk, or checkpoint.keep=1"
        ):
            planned(needed - 0.01, 0, *settings)
