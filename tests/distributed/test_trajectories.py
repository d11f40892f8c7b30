"""A teacher's trajectories on disk: the same on every mesh, also after a stop; and the training on them."""

from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel

from distill.config import Config, OptimizerSettings
from distill.config.schema import OptimSettings
from distill.data.trajectories import TrajectoryFolder
from distill.methods import build_method
from distill.methods.common.schedules import euler_times
from distill.methods.ode_regression import OdeRegressionSettings
from distill.trajectories import main, write_trajectories
from fsdp_cp import build_mesh
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom
from models.roles.load import build_role
from models.roles.role_plan import plan_role
from tests.oracles.clips import RandomClips
from tests.oracles.sharded_run import RecordingTrainer
from tests.oracles.tiny_wan import CONDITION_SHAPES, LATENT_SHAPE

slow = pytest.mark.slow
TIMES = [1.0, 0.8, 0.5]
COUNT = 5
DEVICE = torch.device("cpu")


class Captions(RandomClips):
    """Data set of three captions."""

    def __len__(self):
        return 3


def _settings(folder):
    return OdeRegressionSettings(
        trajectories=str(folder),
        num_trajectories=COUNT,
        teacher_steps=4,
        step_list=TIMES,
        guidance_scale=3.0,
        shift=2.0,
    )


def _config(folder, seed=3):
    data = SimpleNamespace(name="captions", num_frames=3, height=8, width=8, negative_prompt="")
    teacher = SimpleNamespace(checkpoint="teacher", precision="fp32")
    return SimpleNamespace(method=_settings(folder), data=data, teacher=teacher, seed=seed)


@lru_cache  # each has process groups, with threads of their own
def _mesh(dp_shard, cp):
    return build_mesh(dp_shard=dp_shard, cp=cp, heads=4)


def _role(path, mesh, name):
    plan = plan_role(name, checkpoint=str(path / name))
    return build_role(
        plan,
        mesh=mesh,
        device=DEVICE,
        trainable=name == "student",
        latent_shape=LATENT_SHAPE,
        condition_shapes=CONDITION_SHAPES,
    )


def _write(checkpoints, folder, dp_shard, cp, seed=3):
    mesh = _mesh(dp_shard, cp)
    teacher = _role(checkpoints, mesh, "teacher")
    try:
        return write_trajectories(
            _config(folder, seed), teacher=teacher, data=Captions(), mesh=mesh, device=DEVICE, batch=2
        )
    except UserError as error:
        assert "seed" in str(error)
        return "refused"


@pytest.fixture(scope="module")
def truth(checkpoints):
    """Return states, latents and caption of each trajectory, by plain diffusers and Euler's method."""
    network = WanTransformer3DModel.from_pretrained(checkpoints / "teacher").requires_grad_(False)
    data, grid = Captions(), sorted({*euler_times(4, 2.0), *TIMES}, reverse=True)
    found = []
    for i in range(COUNT):
        noise = StepRandom(seed=3, step=0, positions=[i]).normal("trajectories/noise", LATENT_SHAPE)
        text, null = data.tensors["text"][[i % 3]], data.null["text"][None]
        x, states = noise, []
        for t, following in zip(grid, grid[1:], strict=False):
            if t in TIMES:
                states.append(x[0])
            time = torch.tensor([1000 * t])
            c, u = (
                network(hidden_states=x, timestep=time, encoder_hidden_states=e, return_dict=False)[0]
                for e in (text, null)
            )
            x = x + (following - t) * (u + 3.0 * (c - u))
        found.append((torch.stack(states), x[0], str(i % 3)))
    return found


def _check(folder, truth):
    for i, (states, latents, caption) in enumerate(truth):
        ours = TrajectoryFolder(str(folder)).read(i)
        for tensor, wanted in zip(ours, (states, latents), strict=False):
            assert tensor.shape == wanted.shape
            assert (tensor - wanted).norm() < 1e-5 * wanted.norm()
        assert ours[2] == caption


@pytest.mark.parametrize(("dp_shard", "cp"), [(2, 2), *(pytest.param(*s, marks=slow) for s in ((2, 1), (1, 3)))])
def test_every_mesh_writes_the_same_and_resumes(pools, checkpoints, truth, tmp_path, dp_shard, cp):
    size = dp_shard * cp
    assert pools[size].run(_write, checkpoints, tmp_path, dp_shard, cp) == [COUNT] * size
    _check(tmp_path, truth)
    folder = TrajectoryFolder(str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == [*(folder.file(i).name for i in range(COUNT)), "settings.json"]
    for i in (1, 2, 4):
        folder.file(i).unlink()
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()}
    assert set(pools[size].run(_write, checkpoints, tmp_path, dp_shard, cp, 4)) == {"refused"}, "another seed"
    assert before == {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()}
    assert pools[size].run(_write, checkpoints, tmp_path, dp_shard, cp) == [3] * size
    _check(tmp_path, truth)
    assert folder.file(0).stat().st_mtime_ns == before[folder.file(0).name][1]


def _train(checkpoints, folder, dp_shard, cp):
    mesh = _mesh(dp_shard, cp)
    settings = OptimizerSettings(lr=1e-3, betas=[0.0, 0.99])
    config = Config(
        steps=3, batch_size=4, seed=9, run_dir="unused", data=None,
        method=_settings(folder), optim=OptimSettings(student=settings, clip=0.5),
    )  # fmt: skip
    trainer = RecordingTrainer(
        config=config, mesh=mesh, device=DEVICE, data=Captions(), micro_batch_size=1, run_dir=Path("unused"),
        method=build_method(config.method, {"student": _role(checkpoints, mesh, "student")}),
    )  # fmt: skip
    batches = list(trainer._steps_of_data())
    return trainer.record(), [batch for step in batches for batch in step]


@slow
def test_training_reads_them_and_is_the_same_on_every_mesh(pools, checkpoints, truth, tmp_path):
    pools[1].run(_write, checkpoints, tmp_path, 1, 1)
    ((alone, batches),) = pools[1].run(_train, checkpoints, tmp_path, 1, 1)
    seen = set()
    for batch in batches:
        i = next(i for i, (states, _, _) in enumerate(truth) if (batch.trajectory[0] - states).norm() < 1e-3)
        seen.add(i)
        assert batch.trajectory.shape == (1, 3, *LATENT_SHAPE)
        assert (batch.latents[0] - truth[i][1]).norm() < 1e-4
        assert torch.equal(batch.condition.tensors["text"][0], Captions().tensors["text"][i % 3])
    assert seen == set(range(COUNT)), "12 samples are more than two epochs of them"
    assert len(set(alone.losses)) == 3
    for dp_shard, cp in ((2, 2), (1, 3)):
        for trace, _ in pools[dp_shard * cp].run(_train, checkpoints, tmp_path, dp_shard, cp):
            assert trace.losses == pytest.approx(alone.losses, rel=1e-5)
            assert trace.norms == pytest.approx(alone.norms, rel=1e-5)


def test_the_command_refuses_in_one_line(capsys):
    assert main(["experiment=quickstart"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "method=" in message
