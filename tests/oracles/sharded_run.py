"""Recording trainer on a mesh, for comparison with :mod:`tests.oracles.plain_run`."""

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.config import Config
from distill.methods import METHODS, build_method
from distill.train.optimizers import Trained
from distill.train.trainer import Trainer
from fsdp_cp.checkpoint.folder import step_folder
from fsdp_cp.mesh import Mesh, build_mesh
from fsdp_cp.runtime.local_ranks import RankPool
from fsdp_cp.sharding.initialise import copy_own_part
from models.roles.load import build_roles
from models.roles.role_plan import plan_role
from tests.oracles.full_tensors import full_tensors
from tests.oracles.runs import Setup, Trace, make_config, random_adapter, random_clips


class RecordingTrainer(Trainer):
    """Trainer that records full gradients before clipping."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.trace = Trace()

    def _update(self, name: str, norm: float, trained: Sequence[Trained]) -> None:
        named = self.roles[name].named_parameters()
        self.trace.gradients.append(full_tensors({n: p.grad for n, p in named.items() if p.grad is not None}))
        super()._update(name, norm, trained)

    def record(self, save_at: Sequence[int] = ()) -> Trace:
        """Run all steps. Write checkpoints only after the steps ``save_at``."""
        data = self._steps_of_data()
        while self.step < self.config.steps:
            name = self.method.trained_role(self.step)
            metrics = self._train_step(data)
            self.trace.roles.append(name)
            self.trace.losses.append(metrics[f"{name}/loss"])
            self.trace.norms.append(metrics[f"{name}/grad_norm"])
            if self.step in save_at:
                self._save()
                self.checkpoints.wait()
        for name, role in self.roles.items():
            self.trace.weights[name] = full_tensors(role.weights())
        for name, network in self.trained.items():
            if network.average is not None:
                self.trace.weights[f"average of {name}"] = full_tensors(network.average.weights)
        return self.trace


def make_trainer(setup: Setup, folder: Path, config: Config | None = None, first: int = 0) -> RecordingTrainer:
    """Build the trainer on this process group's ranks, from the checkpoints in ``folder``.

    A trainer of a ``first`` step that is not 0 resumes from that step's checkpoint in the run directory.
    """
    config = config or make_config(setup, folder)
    mesh = _mesh(setup.dp_replicate, setup.dp_shard, setup.cp, setup.architecture["num_attention_heads"])
    device = torch.device("cpu")
    method = METHODS[config.method.name][0]
    plans = [
        plan_role(
            name,
            checkpoint=str(folder / ("teacher" if name in setup.lora else name)),
            family=setup.family,
            sharding=setup.sharding(name),
            additions=method.additions(config.method).get(name, ()),
            lora=setup.lora.get(name),
            training_adapter=Path(file) if name == "student" and (file := setup.training_adapter) else None,
            experts=setup.experts if name in method.trained_roles else "both",
            causal=setup.causal if name in setup.causal_roles else None,
            sparse=setup.sparse.get(name),
        )
        for name in method.roles_needed(config.method)
    ]
    roles = build_roles(
        plans,
        trained=method.trained_roles,
        mesh=mesh,
        device=device,
        shapes=random_clips(setup).latent_shapes,
        condition_shapes=setup.condition_shapes,
    )
    for name in setup.lora:
        for network in roles[name].networks:
            for key, parameter in network.named_parameters(name).items():
                if "lora_" in key:
                    copy_own_part(parameter.detach(), random_adapter(name, key, parameter.shape), key)
    trainer = RecordingTrainer(
        config=config,
        mesh=mesh,
        device=device,
        data=random_clips(setup),
        method=build_method(config.method, roles),
        micro_batch_size=setup.micro_batch_size,
    )
    if first:
        trainer.resume(step_folder(Path(config.run_dir) / "checkpoints", first))
    return trainer


@lru_cache  # every mesh creates process groups with their threads
def _mesh(dp_replicate: int, dp_shard: int, cp: int, heads: int) -> Mesh:
    return build_mesh(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, heads=heads)


def sharded_trace(setup: Setup, folder: Path) -> Trace:
    """Run all steps of ``setup`` on this process group's ranks."""
    return make_trainer(setup, folder).record()


def trace_on_ranks(setup: Setup, folder: Path, pool: RankPool | None = None) -> Trace:
    """Run :func:`sharded_trace` on as many processes as ``setup`` needs, and check that the ranks' traces are equal.

    Args:
        setup: the run.
        folder: folder written by :func:`tests.oracles.tiny_wan.write_checkpoints`.
        pool: pool of ``setup.world_size`` ranks; new ones by default.
    """
    if pool is None:
        with RankPool(setup.world_size, preload=("torch", "distill.train.trainer")) as pool:
            return trace_on_ranks(setup, folder, pool)
    assert pool.world_size == setup.world_size
    traces = pool.run(sharded_trace, setup, folder)
    for other in traces[1:]:
        assert other.losses == traces[0].losses and other.norms == traces[0].norms, "ranks disagree"
    return traces[0]


def check_resume(pool: RankPool, setup: Setup, folder: Path, run_dir: Path) -> dict[str, dict[str, Tensor]]:
    """Check that a run of ``setup``, resumed after two steps, has the losses and weights of an unbroken one; return
    the weights."""
    whole = pool.run(_run_from, setup, folder, run_dir, 0, (2,))[0]
    again = pool.run(_run_from, setup, folder, run_dir, 2)[0]
    assert again.losses == whole.losses[2:] and again.weights.keys() == whole.weights.keys()
    for role, weights in whole.weights.items():
        assert all(torch.equal(again.weights[role][name], value) for name, value in weights.items())
    assert len(set(whole.losses)) == setup.steps and all(map(math.isfinite, whole.losses))
    return whole.weights


def _run_from(setup: Setup, folder: Path, run_dir: Path, first: int, save_at: Sequence[int] = ()) -> Trace:
    trace = make_trainer(setup, folder, make_config(setup, folder, run_dir), first).record(save_at)
    return Trace(losses=trace.losses, weights=trace.weights)
