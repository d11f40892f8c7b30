"""The trainer: a run's state, its loop of steps, what it logs and saves, and exact resume."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from distill.announce import announce
from distill.config import Config
from distill.data import ClipDataset
from distill.data.order import Batching, MicroBatchSampler
from distill.evaluate import Evaluator
from distill.finish import finish
from distill.gradients import Losses, accumulate_gradients
from distill.json_lines import cut_back
from distill.methods import Batch, Method
from distill.metrics import MEASURES, MetricsLog, NormsLog, StepLine, speed
from distill.optimizers import RoleOptimizer, learning_rate
from distill.profiling import StepProfiler
from distill.run import Run
from distill.run_folder import same_command
from distill.sampling import sampling_batch
from fsdp_cp.checkpoint import Checkpoints, branch_name, leave_branch, load, read_state
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank, world_size
from fsdp_cp.measure.diagnostics import first_non_finite, parameter_norms
from fsdp_cp.measure.memory import peak_flops, peak_gib, reserved_gib, reset_peak
from fsdp_cp.measure.phases import PhaseTimes, phase
from fsdp_cp.mesh import Mesh
from fsdp_cp.progress import announced, bar
from fsdp_cp.reduce import all_reduce_scalars, grad_norm, local_shard, on_all_ranks, scale_grads
from fsdp_cp.rng import DrawsAhead, StepRandom
from fsdp_cp.signals import Stopped, StopSignal
from fsdp_cp.timeouts import long_timeout, shorten
from models.condition import Condition
from models.ema import Ema
from models.role import Role

log = logging.getLogger(__name__)


class Trainer:
    """State of a run between two steps, and its loop: ``config.steps`` updates of the role that the method names.

    Args:
        config: the checked configuration.
        mesh: the mesh.
        device: this rank's device.
        data: the clips.
        method: yields the losses.
        micro_batch_size: samples per data-parallel rank and forward.
        run_dir: the run directory.
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
        """Parts with their own optimizer, average and schedule: a role, or each of its experts."""
        self.optimizers = {
            name: RoleOptimizer(part, getattr(config.optim, part.name)) for name, part in self.trained.items()
        }
        self.averages: dict[str, Ema] = {}
        for name, part in self.trained.items():
            ema = getattr(config, part.name).ema
            if ema.enabled:
                self.averages[name] = Ema(part, decay=ema.decay, gamma=ema.gamma, start=ema.start)
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
        self.planned_updates = _planned_updates(method, config, self.trained)
        # Saved and restored.
        self.step = 0
        self.samples = 0
        self.updates = dict.fromkeys(self.trained, 0)
        self.skipped = dict.fromkeys(self.roles, 0)
        self.seconds = 0.0
        self.unlogged: dict[str, float | None] = {}
        """Latest metrics of every role since the last logged step, which may have been another role's."""
        self.branch_of = branch_name(config.checkpoint.resume)
        self.sources: dict[str, Any] = {}
        """From :func:`distill.resume_checks.find_sources`, for checkpoints."""
        # Of this start.
        self.skipped_in_a_row = dict.fromkeys(self.roles, 0)
        self.first_skipped: dict[str, str] = {}
        """Step and parameter of the first of the updates skipped in a row, by role."""
        self.last_loss: dict[str, float] = {}
        """Loss of each role's latest update in this process."""
        self.saved_step: int | None = None
        self.facts: dict[str, Any] = {}
        """Facts that the report shows, in addition to those of every run."""
        self.log: MetricsLog | None = None
        self.norms: NormsLog | None = None
        settings = config.checkpoint
        self.checkpoints = Checkpoints(
            run_dir / "checkpoints",
            keep=settings.keep,
            keep_every=settings.keep_every,
            asynchronous=settings.asynchronous,
        )
        self.evaluator = Evaluator(
            config=config, mesh=mesh, device=device, data=data, method=method, run_dir=run_dir, batch=micro_batch_size
        )

    def run(self, run: Run, stop: StopSignal) -> None:
        """Restore the checkpoint that ``run`` resumes, train the remaining steps, and write what a run ends with.

        Args:
            run: the opened run.
            stop: the signal that has come; heeded between two steps.
        """
        self.sources, self.facts = run.sources, run.facts
        if run.resume_from is not None:
            self.resume(run.resume_from)
        with run.started(lambda: self.step):
            announce(self)
            self.train(stop)
            finish(self)
            self.close()

    def train(self, stop: StopSignal) -> None:
        """Open the logs and train the remaining steps.

        Args:
            stop: the signal that has come; heeded between two steps.
        """
        on_all_ranks(self._open_log)
        fitting = sampling_batch(self.method.roles.values(), self.mesh, self.device)
        self.evaluator.batch = max(self.evaluator.batch, fitting)  # a micro-batch fits in training
        reset_peak(self.device)
        profiler = StepProfiler(self.config.profile, device=self.device, run_dir=self.run_dir, step=self.step)
        with stop.deferred(), self.checkpoints.completed(), profiler:
            # A context closes the bar before an error is printed.
            with bar(self.config.steps, "training", "step", initial=self.step, smoothing=0.05) as shown:
                self._train(shown.update, stop, profiler)

    def close(self) -> None:
        """Close the logs."""
        for opened in (self.log, self.norms):
            if opened is not None:
                opened.close()

    def resume(self, folder: Path) -> None:
        """Continue from the checkpoint in ``folder``; a collective.

        Raises:
            UserError: it was made with other data or networks, or cannot be read.
        """
        state = read_state(folder)
        accepted = any(name.startswith(("data.", "method.")) for name in self.config.checkpoint.accept)
        if state["data"] != self.training_data.fingerprint and not accepted:
            raise UserError(
                f"checkpoint.resume: {folder} was made with other data; use the same settings, another run_dir, or"
                " checkpoint.resume=never"
            )
        load(folder, self.saved_tensors())
        if folder.parent.resolve() == (self.run_dir / "checkpoints").resolve():
            leave_branch(folder)
        self.step, self.samples, self.seconds = state["step"], state["samples"], state["seconds"]
        self.updates, self.skipped, self.unlogged = state["updates"], state["skipped"], state["unlogged"]
        self.branch_of = self.branch_of or state.get("branch_of")
        self.saved_step = self.step
        if rank() == 0:
            log.info("resumed from step %d (%s)", self.step, folder)

    def saved_tensors(self) -> dict[str, Any]:
        """Return everything that trains, by part. The teacher is not part of it, since it does not change."""
        tensors: dict[str, Any] = {
            name: {"weights": part.weights(), "adamw": self.optimizers[name].state()}
            for name, part in self.trained.items()
        }
        for name, average in self.averages.items():
            tensors[name]["ema"] = average.weights
        return tensors

    def _saved_state(self) -> dict[str, Any]:
        """Return the plain state. Random streams are functions of seed, step and position, so it restores them too."""
        return {
            "step": self.step,
            "samples": self.samples,
            "seed": self.config.seed,
            "updates": self.updates,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "unlogged": self.unlogged,
            "branch_of": self.branch_of,
            "settings": asdict(self.config),
            "sources": self.sources,
            "method": self.method.settings.name,
            "data": self.training_data.fingerprint,
            "configs": {name: role.config for name, role in self.roles.items()},
            "boundaries": {name: list(role.boundaries) for name, role in self.roles.items() if role.boundaries},
            "adapters": {name: role.adapters for name, role in self.roles.items() if role.adapters is not None},
        }

    def first_steps(self, most: int = 10) -> dict[str, tuple[float, float]]:
        """Train until each role has had a step; return loss and gradient norm by ``step 1 (student)`` and the like.

        Args:
            most: steps after which a role without a step is left out.
        """
        found: dict[str, tuple[float, float]] = {}
        data, waiting = self._steps_of_data(), set(self.roles)
        while waiting and self.step < min(most, self.config.steps):
            name = self.method.trained_role(self.step)
            metrics = self._train_step(data)
            if name in waiting:
                waiting.remove(name)
                found[f"step {self.step} ({name})"] = metrics[f"{name}/loss"], metrics[f"{name}/grad_norm"]
        return found

    def _train(self, advance: Callable[[], object], stop: StopSignal, profiler: StepProfiler) -> None:
        """Train the remaining steps; log, save and sample between them. Call ``advance`` after each."""
        rates = {name: role.trained_names for name, role in self.roles.items()}
        line = StepLine(rates, step=self.step, steps=self.config.steps)
        data = self._steps_of_data()
        while self.step < self.config.steps:
            with profiler.step(self.step + 1):
                metrics = self._train_step(data)
            if self.last_loss.keys() == self.roles.keys():  # each role may compile in its first step
                shorten(timedelta(minutes=self.config.timeout.step))
            advance()
            self.unlogged |= metrics
            if self.step % self.config.log.every == 0 or self.step == self.config.steps:
                self.unlogged |= self.memory()
                if self.log is not None:
                    self.log.write(self.step, self.unlogged)
                    log.info(line.text(self.step, self.unlogged))
                self.unlogged = {}
            every = self.config.checkpoint.every
            at_end = self.step == self.config.steps and self.config.checkpoint.at_end
            if (every and self.step % every == 0) or at_end:
                self._save()
            self._heed(stop)
            every = self.config.sample.every
            if every and self.step % every == 0 and self.step < self.config.steps:
                self.sample()

    def _open_log(self) -> None:
        if rank() == 0:
            for name in ("metrics.jsonl", "norms.jsonl", MEASURES):
                cut_back(self.run_dir / name, self.step)
            self.log = MetricsLog(self.run_dir, self.config.log, asdict(self.config), self.step)
            if self.config.log.norms_every:
                self.norms = NormsLog(self.run_dir)

    def _steps_of_data(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each remaining step."""
        sampler = MicroBatchSampler(
            seed=self.config.seed,
            clips=len(self.training_data),
            batching=self.batching,
            first_sample=self.samples,
            steps=self.config.steps - self.step,
        )
        micro_batches = iter(
            DataLoader(self.training_data, batch_sampler=sampler, pin_memory=self.device.type == "cuda")
        )
        for _ in range(self.config.steps - self.step):
            yield [self._to_batch(next(micro_batches)) for _ in range(self.batching.accumulation)]

    def _to_batch(self, items: dict[str, Any]) -> Batch:
        return Batch(
            latents=items["latents"].to(self.device, non_blocking=True) if "latents" in items else None,
            condition=Condition(
                {name: items[name].to(self.device, non_blocking=True) for name in self.data.condition_shapes},
                self.null,
                self.empty,
            ),
            latent_shape=self.data.latent_shape,
            trajectory=items["trajectory"].to(self.device, non_blocking=True) if "trajectory" in items else None,
        )

    def _train_step(self, data: Iterator[list[Batch]]) -> dict[str, float | None]:
        """Update the role whose turn it is and return its metrics, which except for times are equal on all ranks.

        On CUDA too the host's clock measures the step's time: the host waits for the numbers that are reduced at its
        end, after the optimizer's kernels.
        """
        started = time.perf_counter()
        name = self.method.trained_role(self.step)
        role = self.roles[name]
        for r in self.method.roles.values():
            r.flops = 0
        if self.draws is not None:
            self.draws.begin(self.step, name, self.method.trained_role(self.step + 1))
        with PhaseTimes(self.device) as times:
            self.method.roles[self.method.first_role(self.step)].gather_early()
            with phase("data"):
                micro_batches = next(data)
            found, parts = self._accumulate_gradients(micro_batches)
            self._log_norms(name, parts)
            with phase(f"{name}/clip"):
                norm = grad_norm(chain.from_iterable(self.trained[part].parameters() for part in parts))
            settings = getattr(self.config.optim, name)
            rates = {part: learning_rate(settings, self.updates[part], self.planned_updates[part]) for part in parts}
            with phase(f"{name}/update"):
                self._update(name, norm, rates)
            # Not before the norm, which would be launched late on CUDA: the host waits for either.
            losses = {name: float(value) for name, value in found.sums.items()}
            total = sum(found.weights[name] * value for name, value in losses.items())
            # Sums over data-parallel ranks only: the ranks of a cp group hold the same loss.
            names = sorted(losses)
            flops = float(sum(r.flops for r in self.method.roles.values()))
            observed = self.method.observations.drain()
            flat = [total, flops, *(losses[n] for n in names), *(x for pair in observed.values() for x in pair)]
            with phase("metrics"):
                reduced = all_reduce_scalars(flat, self.mesh.dp)
        seconds = time.perf_counter() - started
        self.step += 1
        self.samples += self.config.batch_size
        self.seconds += seconds
        self.last_loss[name] = reduced[0]
        peak = peak_flops(self.device)
        metrics: dict[str, float | None] = {
            f"{name}/loss": reduced[0],
            f"{name}/grad_norm": norm,
            **{f"{part}/lr": rate for part, rate in rates.items()},
            f"{name}/skipped": float(self.skipped[name]),
            **speed(
                name,
                seconds=seconds,
                phases=times.seconds(),
                samples=self.config.batch_size,
                tokens=role.tokens * self.config.batch_size,
                flops=reduced[1],
                peak=None if peak is None else peak * world_size(),
            ),
        }
        if len(names) > 1:
            metrics |= {f"{name}/{n}": value for n, value in zip(names, reduced[2 : 2 + len(names)], strict=True)}
        rest = reduced[2 + len(names) :]
        for key, value, count in zip(observed, rest[::2], rest[1::2], strict=True):
            metrics[f"{name}/{key}"] = value / count if count else None
        return metrics

    def _accumulate_gradients(self, micro_batches: list[Batch]) -> tuple[Losses, list[str]]:
        """Return this rank's share of the losses, and the names of the parts that now have gradients."""

        def random(i: int) -> StepRandom:
            return StepRandom(
                seed=self.config.seed,
                step=self.step,
                positions=self.batching.positions(i),
                part=self.batching.part(i),
                device=self.device,
                ahead=self.draws,
            )

        share = self.batching.micro_batch_size / self.config.batch_size
        found = accumulate_gradients(self.method, self.step, micro_batches, share=share, random=random)
        role = self.roles[self.method.trained_role(self.step)]
        names = dict(zip(role.trained_experts, role.trained_names, strict=True))
        return found, [names[index] for index in sorted(found.networks)]

    def _log_norms(self, name: str, parts: Sequence[str]) -> None:
        """Log the norms of ``parts`` at the first update of role ``name`` in each ``log.norms_every`` steps.

        A fixed step of the interval would miss a role that trains every fifth step.
        """
        every, step = self.config.log.norms_every, self.step + 1
        if not every or step < every:
            return
        before = range(step - step % every, step)
        if any(self.method.trained_role(earlier - 1) == name for earlier in before):
            return
        with phase(f"{name}/norms"):
            norms = {part: parameter_norms(self.trained[part].named_parameters()) for part in parts}
        if self.norms is not None:
            for part, values in norms.items():
                self.norms.write(step, part, values)

    def _update(self, name: str, norm: float, rates: Mapping[str, float]) -> None:
        """Clip and step, or skip the update if the norm, which is the same on all ranks, is not finite.

        Args:
            name: the role.
            norm: gradient norm of all parts that train at this step.
            rates: learning rate of each of these parts, by its name in :attr:`trained`.
        """
        if not math.isfinite(norm):
            self._skip(name, norm)
            return
        self.skipped_in_a_row[name] = 0
        clip = self.config.optim.clip
        for part, rate in rates.items():
            if clip is not None and norm > clip:
                scale_grads(self.trained[part].parameters(), clip / norm)
            self.optimizers[part].step(rate)
            if part in self.averages:
                self.averages[part].update(self.updates[part])
            self.updates[part] += 1

    def _skip(self, name: str, norm: float) -> None:
        """Leave the state of role ``name`` as it is, and log where its gradient is not finite.

        Raises:
            UserError: on all ranks, for the last of ``optim.max_skipped`` in a row, after the last good state is saved.
        """
        self.skipped_in_a_row[name] += 1
        where = first_non_finite(self.roles[name].named_parameters(), self.mesh.world)
        if self.skipped_in_a_row[name] == 1:
            self.first_skipped[name] = f"step {self.step + 1} in {where}"
        for part in self.roles[name].trained_names:
            self.optimizers[part].clear_gradients()
        if rank() == 0:
            log.warning(
                "step %d: the gradient norm of %s is %s, first in %s; update skipped", self.step + 1, name, norm, where
            )
        count = self.skipped_in_a_row[name]
        if count < self.config.optim.max_skipped:
            self.skipped[name] += 1
            return
        # Skipped updates changed nothing: this is the last good state. A run that resumes from it repeats and counts
        # this step.
        self._save()
        self.checkpoints.wait()
        raise UserError(
            f"{count} updates of {name} in a row had a non-finite gradient (optim.max_skipped), the first at"
            f" {self.first_skipped[name]}; stopped at step {self.step + 1}, and the state after step {self.step}, with"
            f" the weights from before them, is saved; lower optim.{name}.lr or resume from an earlier checkpoint"
        )

    def memory(self) -> dict[str, float]:
        """Return peak and, on CUDA, reserved memory in GiB, the largest over ranks. A collective."""
        found = {"memory/peak_gib": peak_gib(self.device)}
        if (reserved := reserved_gib(self.device)) is not None:
            found["memory/reserved_gib"] = reserved
        largest = all_reduce_scalars(list(found.values()), self.mesh.world, dist.ReduceOp.MAX)
        return dict(zip(found, largest, strict=True))

    @long_timeout()
    def _save(self) -> None:
        """Save the state after this step, if it is not saved already.

        Raises:
            UserError: on all ranks, for weights that are not finite: the run would resume from them.
        """
        if self.saved_step == self.step:
            return
        started = time.perf_counter()
        self.checkpoints.wait()  # before what may refuse: the one that is being written would go with the process
        for name, role in self.roles.items():
            broken = sum(not local_shard(weight).isfinite().all() for weight in role.weights().values())
            if all_reduce_scalars([float(broken)], self.mesh.world)[0]:
                raise UserError(
                    f"step {self.step}: weights of the {name} are not finite and are not saved; lower optim.{name}.lr"
                    " and resume from an earlier checkpoint, or start again with checkpoint.resume=never"
                )
        with phase("checkpoint"), announced(f"the checkpoint of step {self.step}"):
            self.checkpoints.save(self.step, self.saved_tensors(), self._saved_state())
        self.saved_step = self.step
        self.unlogged["perf/checkpoint_seconds"] = time.perf_counter() - started

    def _heed(self, stop: StopSignal) -> None:
        """Save and end if a signal came to any rank, or end if the latest checkpoint could not be written.

        Raises:
            Stopped: on all ranks.
            UserError: on all ranks, for the checkpoint.
        """
        flags = [float(stop.received or 0), float(self.checkpoints.has_failed())]
        number, failed = all_reduce_scalars(flags, self.mesh.world, dist.ReduceOp.MAX)
        if failed:
            self.checkpoints.wait()
        if not number:
            return
        self._save()
        self.checkpoints.wait()
        raise Stopped(
            f"stopped by {signal.Signals(int(number)).name} after step {self.step} of {self.config.steps}, which is"
            f" saved in {self.run_dir / 'checkpoints'}; {same_command(self.config)} resumes from there"
        )

    @long_timeout()
    def sample(self) -> None:
        """Write clips of the student as it is now, averaged if it has an average."""
        with self.method.student_average():
            self.evaluator.write_samples(self.step, self.log)

    @contextmanager
    def _student_average(self) -> Iterator[None]:
        """Within this context, the student computes with its average, if it has one."""
        with ExitStack() as stack:
            for name, average in self.averages.items():
                if self.trained[name].name == "student":
                    stack.enter_context(average.swapped_in())
            yield

    def weights_of(self, role: str, *, averaged: bool) -> list[Mapping[str, Tensor]]:
        """Return for each network of a role the weights that are the role's own, by public name.

        An expert that does not train has those of its base.
        """
        networks = self.roles[role]
        networks.rest()
        found: list[Mapping[str, Tensor]] = [network.base_parameters() for network in networks.networks]
        for i, part in zip(networks.trained_experts, networks.trained_names, strict=True):
            found[i] = self.averages[part].weights if averaged else self.trained[part].weights()
        return found


def _planned_updates(method: Method, config: Config, trained: Collection[str]) -> dict[str, int]:
    """Return the number of optimizer updates that each trained network gets in this run, by name.

    For two experts, count the steps whose random draw selects the expert.
    """
    counts: Counter[str] = Counter()
    for step in range(config.steps):
        role = method.roles[method.trained_role(step)]
        if not role.boundaries:
            counts[role.name] += 1
            continue
        parts = (StepRandom(seed=config.seed, step=step, positions=(), part=i) for i in range(config.expert_draws))
        networks = {index for draws in parts for index in method.networks(step, draws).values()}
        names = dict(zip(role.trained_experts, role.trained_names, strict=True))
        counts.update(names[index] for index in networks)
    return {name: counts[name] for name in trained}
