"""Tasks that srun or MPI started without torchrun."""

import pytest

from fsdp_cp.errors import UserError
from fsdp_cp.launch import refuse_separate_worlds
from train import main

NAMES = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "RANK", "WORLD_SIZE")


@pytest.fixture
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_several_tasks_without_ranks_are_refused(environment, name):
    environment.setenv(name, "2")
    with pytest.raises(UserError, match=f"{name}=2.*torchrun"):
        refuse_separate_worlds()
    environment.setenv("RANK", "0")  # torchrun under srun, or exported by hand
    environment.setenv("WORLD_SIZE", "2")
    refuse_separate_worlds()


@pytest.mark.parametrize("given", [{}, {"SLURM_NTASKS": "8"}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}])
def test_one_task_passes(environment, given):
    for name, value in given.items():
        environment.setenv(name, value)
    refuse_separate_worlds()


def test_train_refuses_before_it_writes(environment, tmp_path, capsys):
    environment.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert main(["device=cpu", f"run_dir={tmp_path}/run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "SLURM_STEP_NUM_TASKS=2" in line and not list(tmp_path.iterdir())
