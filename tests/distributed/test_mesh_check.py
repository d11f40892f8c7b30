"""The first steps on two meshes are the same steps, and the run starts as if they had not been computed."""

import re

import pytest
import torch

from distill.config import compose_config
from distill.run.open import Run
from distill.run.setup import plan_run
from distill.train.mesh_check import check_meshes
from distill.train.trainer import build_trainer
from fsdp_cp.mesh import mesh_of_shape
from tests.pools import run_ranks

CPU = torch.device("cpu")


def checked(folder, cp):
    words = ["experiment=quickstart", "device=cpu", "batch_size=4", f"mesh.cp={cp}", f"run_dir={folder / 'run'}"]
    config = compose_config(words)
    plan = plan_run(config)
    data = config.data.build(seed=config.seed, device=CPU, run_dir=plan.run_dir)
    run = Run(config=config, plan=plan, device=CPU, mesh=mesh_of_shape(plan.mesh, device_type="cpu"))
    return check_meshes(run, data), build_trainer(run, data).first_steps()


@pytest.mark.parametrize("cp", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.long)])
def test_first_steps_on_two_meshes(tmp_path, cp):
    found, own = run_ranks(2, checked, tmp_path, cp)[0]
    numbers = {
        name: [float(n) for n in re.findall(r"[\d.e+-]*\d", text)]
        for name, text in found["first steps on two meshes"].items()
    }
    shapes = ["dp_shard=1 x cp=2", "dp_shard=2 x cp=1"]
    assert list(numbers) == [f"{step}, {shape}" for step in ("step 1 (student)", "step 2 (fake)") for shape in shapes]
    for step, values in own.items():
        one, other = (numbers[f"{step}, {shape}"] for shape in shapes)
        assert one == pytest.approx(other, rel=1e-4)
        assert numbers[f"{step}, {shapes[2 - cp]}"] == pytest.approx(values, rel=1e-6)
    assert own["step 1 (student)"] != own["step 2 (fake)"]


@pytest.mark.slow
def test_one_rank_has_nothing_to_compare(tmp_path):
    assert run_ranks(1, checked, tmp_path, 1)[0][0] == {}
