"""A run's state: roles, optimizers, averages, counts, logs; what a step changes and a checkpoint holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distill.config import Config
from distill.data import ClipDataset
from distill.data.order import Batching
from distill.evaluate import Evaluator
from distill.methods import Method
from distill.metrics import MetricsLog, NormsLog
from distill.optimizers import RoleOptimizer
from fsdp_cp.checkpoint import Checkpoints, branch_name
from fsdp_cp.measure.memory import peak_gib
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import all_reduce_scalars
from fsdp_cp.rng import DrawsAhead, StepRandom
from fsdp_cp.timeouts import long_timeout
from models.ema import Ema
from models.role import Role


class TrainingState:
    """What a run has between two steps, of this process; :class:`distill.trainer.Trainer` changes it.

    Args:
        config: the checked configuration.
        mesh: the mesh.
        device: this rank's device.
        data: the clips.
        method: yields the losses.
        micro_batch_size: samples per data-parallel rank and forward.
        run_dir: the run's folder.
    """

    def __init__(
        self,
        *,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        data: ClipDataset,
        method: Method,
        micro_batch_size: int,
        run_dir: Path,
    ):
        self.config, self.mesh, self.device, self.data, self.method = config, mesh, device, data, method
        self.run_dir = run_dir
        self.roles: dict[str, Role] = {name: method.roles[name] for name in method.trained_roles}
        self.trained = {name: part for role in self.roles.values() for name, part in role.trained_apart().items()}
        """What has an optimizer, an average and a schedule of its own: a role, or each of its experts."""
        self.optimizers = {
            name: RoleOptimizer(part, getattr(config.optim, part.name)) for name, part in self.trained.items()
        }
        chosen = {name: getattr(config, part.name).ema for name, part in self.trained.items()}
        self.averages = {
            name: Ema(self.trained[name], decay=ema.decay, gamma=ema.gamma, start=ema.start)
            for name, ema in chosen.items()
            if ema.enabled
        }
        method.student_average = self._student_average
        self.training_data = method.training_data(data)
        self.batching = Batching(
            global_size=config.batch_size,
            micro_batch_size=micro_batch_size,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            parts=config.expert_draws,
        )
        # Moved once: with each micro-batch it would be a copy that the GPU waits for.
        self.null, self.empty = (
            {name: value.to(device) for name, value in values.items()} for values in (data.null, data.empty)
        )
        # On the CPU a thread would take the cores of what it runs ahead of.
        self.draws = DrawsAhead(config.seed, pin=True) if device.type == "cuda" else None
        self.step = 0
        self.samples = 0
        self.updates = dict.fromkeys(self.trained, 0)
        self.skipped = dict.fromkeys(self.roles, 0)
        self.skipped_in_a_row = dict.fromkeys(self.roles, 0)
        """Of this start: one that goes on from a run that ended by them has as many tries again."""
        self.first_skipped: dict[str, str] = {}
        """Step and parameter of the first of those in a row."""
        self.seconds = 0.0
        self.branch_of = branch_name(config.checkpoint.resume)
        self.sources: dict[str, Any] = {}
        """From :func:`distill.resume_checks.find_sources`, for checkpoints."""
        settings = config.checkpoint
        self.checkpoints = Checkpoints(
            run_dir / "checkpoints",
            keep=settings.keep,
            keep_every=settings.keep_every,
            asynchronous=settings.asynchronous,
        )
        self.saved_step: int | None = None
        self.last_loss: dict[str, float] = {}
        """Of each role's latest update in this process."""
        self.log: MetricsLog | None = None
        self.norms: NormsLog | None = None
        self.facts: dict[str, Any] = {}
        """Facts of the run that its report shows, in addition to those of every run."""
        self.unlogged: dict[str, float | None] = {}
        """The latest metrics of every role since the last logged step, which may have been another role's."""
        self.planned_updates = planned_updates(method, config, self.trained)
        self.evaluator = Evaluator(
            config=config, mesh=mesh, device=device, data=data, method=method, run_dir=run_dir, batch=micro_batch_size
        )

    def parts_of(self, role: str) -> list[str]:
        """Names in :attr:`trained` of what ``role`` trains."""
        return self.roles[role].trained_names

    def has_average(self, role: str) -> bool:
        """Does it keep one of a role's weights?"""
        return self.parts_of(role)[0] in self.averages

    def weights_of(self, role: str, *, averaged: bool) -> list[Mapping[str, Tensor]]:
        """Of each of its networks what is the role's own, or of one that it does not train all; by public name."""
        of = self.roles[role]
        of.rest()
        found: list[Mapping[str, Tensor]] = [network.base_parameters() for network in of.networks]
        for i, part in zip(of.trained_experts, of.trained_names, strict=True):
            found[i] = self.averages[part].weights if averaged else self.trained[part].weights()
        return found

    @contextmanager
    def _student_average(self) -> Iterator[None]:
        """Inside, the student computes with its average, if there is one."""
        with ExitStack() as stack:
            for name, average in self.averages.items():
                if self.trained[name].name == "student":
                    stack.enter_context(average.swapped_in())
            yield

    def peak_memory(self) -> float:
        """GiB, the largest over ranks."""
        return all_reduce_scalars([peak_gib(self.device)], self.mesh.world, dist.ReduceOp.MAX)[0]

    @long_timeout()
    def sample(self) -> None:
        """Clips of the student as it is now, averaged where it has an average."""
        with self.method.student_average():
            self.evaluator.write_samples(self.step, self.log)


def planned_updates(method: Method, config: Config, trained: Collection[str]) -> dict[str, int]:
    """How many of a run's steps train each of ``trained`` (:attr:`TrainingState.trained`): of experts, by the draws."""
    counts: Counter[str] = Counter()
    for step in range(config.steps):
        role = method.roles[method.trained_role(step)]
        networks = {0}
        if role.boundaries:
            parts = (StepRandom(seed=config.seed, step=step, positions=(), part=i) for i in range(config.expert_draws))
            networks = {index for draws in parts for index in method.networks(step, draws).values()}
        names = dict(zip(role.trained_experts, role.trained_names, strict=True)) if role.boundaries else {0: role.name}
        counts.update(names[index] for index in networks)
    return {name: counts[name] for name in trained}
