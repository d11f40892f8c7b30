"""Free disk space is compared with the size of a run's new checkpoints before the run starts."""

from types import SimpleNamespace

import pytest

from distill.config import compose_config
from distill.run import checkpoint_checks as room
from distill.run.checkpoint_checks import check_disk, checkpoint_bytes
from distill.run.setup import plan_run
from tests.tiers import parametrize
from tests.unit.refused import refused


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Return ``planned(free checkpoints, there, settings)``, which asks whether a run fits on that disk."""

    def ask(free: float, there: int, *settings: str) -> None:
        config = compose_config(["experiment=quickstart", "mesh.cp=1", "steps=100", f"run_dir={tmp_path}", *settings])
        for step in range(there):
            (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True, exist_ok=True)
            (tmp_path / "checkpoints" / f"step_{step:08d}" / "state.json").touch()
        plan = plan_run(config)
        size = checkpoint_bytes(config, plan)
        monkeypatch.setattr(room.shutil, "disk_usage", lambda path: SimpleNamespace(free=free * size))
        check_disk(config, plan, config.steps, config.checkpoint.resume)

    return ask


@parametrize(
    ("settings", "there", "needed"),
    [
        (("checkpoint.every=10", "checkpoint.keep=2"), 0, 3),  # two, and the one that is being written
        (("checkpoint.every=10", "checkpoint.keep=2"), 5, 1),  # new ones replace existing ones
        (("checkpoint.every=10", "checkpoint.keep=2", "checkpoint.keep_every=20"), 0, 8),
        (("checkpoint.every=40", "checkpoint.keep=0"), 0, 3),
    ],
    quick=2,
)
def test_what_is_there_at_once_must_fit(planned, settings, there, needed):
    planned(needed, there, *settings)
    with refused("checkpoint.keep"):
        planned(needed - 0.01, there, *settings)


def test_without_checkpoints_no_room_is_needed(planned):
    planned(0, 0, "checkpoint.every=0", "checkpoint.at_end=false")
