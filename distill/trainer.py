"""The training loop: accumulation, clipping, optimizers, EMA, schedules, metrics, checkpoints and exact resume."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from distill.announce import announce
from distill.config import Config
from distill.data import ClipDataset
from distill.data.order import MicroBatchSampler
from distill.finish import finish
from distill.gradients import Losses, accumulate_gradients
from distill.hang_advice import reports_hangs, shorten_timeout
from distill.json_lines import cut_back
from distill.methods import Batch, build_method
from distill.metrics import MEASURES, MetricsLog, NormsLog, StepLine, speed
from distill.optimizers import learning_rate
from distill.profiling import StepProfiler
from distill.sampling import sampling_batch
from distill.saved_state import restore, same_command, saved_state, saved_tensors
from distill.setup import RunPlan
from distill.state_checks import refuse_broken_weights
from distill.training_state import TrainingState
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank, world_size
from fsdp_cp.measure.diagnostics import first_non_finite, parameter_norms
from fsdp_cp.measure.memory import peak_flops, peak_gib, reserved_gib, reset_peak
from fsdp_cp.measure.phases import PhaseTimes, phase
from fsdp_cp.mesh import Mesh
from fsdp_cp.progress import announced, bar
from fsdp_cp.reduce import all_reduce_scalars, grad_norm, on_all_ranks, scale_grads
from fsdp_cp.rng import StepRandom
from fsdp_cp.signals import Stopped, StopSignal
from fsdp_cp.timeouts import long_timeout
from models.condition import Condition
from models.load import build_roles

log = logging.getLogger(__name__)


def build_trainer(config: Config, plan: RunPlan, *, mesh: Mesh, device: torch.device, data: ClipDataset) -> Trainer:
    """Build the roles of ``plan`` on ``mesh``, and return their trainer before its first step. A collective."""
    roles = build_roles(
        plan.roles,
        trained=plan.method.trained_roles,
        mesh=mesh,
        device=device,
        latent_shape=data.latent_shape,
        condition_shapes=data.condition_shapes,
        seed=config.seed,
    )
    return Trainer(
        config=config,
        mesh=mesh,
        device=device,
        data=data,
        method=build_method(config.method, roles),
        micro_batch_size=plan.micro_batch_size,
        run_dir=plan.run_dir,
    )


class Trainer(TrainingState):
    """Runs ``config.steps`` optimizer steps, of whichever role the method says, on full latents."""

    def resume(self, folder: Path) -> None:
        """Go on from the checkpoint in ``folder``; a collective.

        Raises:
            UserError: it was made with other data or networks, or cannot be read.
        """
        restore(self, folder)
        self.saved_step = self.step

    @reports_hangs
    def run(self, stop: StopSignal) -> None:
        """Train, then export the student and write samples and the report.

        Args:
            stop: which signal has come; heeded between two steps, at once when no step is left.
        """
        announce(self)
        on_all_ranks(self._open_log)
        fitting = sampling_batch(self.method.roles.values(), self.mesh, self.device)
        self.evaluator.batch = max(self.evaluator.batch, fitting)  # a micro-batch fits in training
        reset_peak(self.device)
        profiler = StepProfiler(self.config.profile, device=self.device, run_dir=self.run_dir, step=self.step)
        with stop.deferred(), self.checkpoints.completed(), profiler:
            # A context closes the bar before an error is printed.
            with bar(self.config.steps, "training", "step", initial=self.step, smoothing=0.05) as shown:
                self._train(shown.update, stop, profiler)
        finish(self)
        for opened in (self.log, self.norms):
            if opened is not None:
                opened.close()

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
            shorten_timeout(self)
            advance()
            self.unlogged |= metrics
            if self.step % self.config.log.every == 0 or self.step == self.config.steps:
                self.unlogged |= self._memory()
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
        """The micro-batches of each remaining step, in turn."""
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
        """One update of the role whose turn it is; returns its metrics, but for times equal on all ranks.

        On CUDA too the host's clock tells the step's time: the numbers that are reduced at its end go to the device
        behind the optimizer's kernels, and are waited for.
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
        """This rank's share of the losses, and of what trains what now has gradients."""

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
        """A line of ``norms.jsonl`` at role ``name``'s first update of each ``log.norms_every`` steps, of each of its
        ``parts`` that trains at this step.

        Counted by steps of all roles, a role that trains every fifth step would be missed by most intervals.
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
            for part, of in norms.items():
                self.norms.write(step, part, of)

    def _update(self, name: str, norm: float, rates: Mapping[str, float]) -> None:
        """Clip and step, or skip the update where the norm, which all ranks agree on, is not finite.

        Args:
            name: the role.
            norm: of all that trains at this step.
            rates: of each of that, by its name in :attr:`trained`.
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
        """Leave the state of role ``name`` as it is, and say where its gradient is not finite.

        Raises:
            UserError: on all ranks, for the last of ``optim.max_skipped`` in a row; what went well is saved then.
        """
        self.skipped_in_a_row[name] += 1
        where = first_non_finite(self.roles[name].named_parameters(), self.mesh.world)
        if self.skipped_in_a_row[name] == 1:
            self.first_skipped[name] = f"step {self.step + 1} in {where}"
        for part in self.parts_of(name):
            self.optimizers[part].clear_gradients()
        if rank() == 0:
            log.warning(
                "step %d: the gradient norm of %s is %s, first in %s; update skipped", self.step + 1, name, norm, where
            )
        count = self.skipped_in_a_row[name]
        if count < self.config.optim.max_skipped:
            self.skipped[name] += 1
            return
        # Skipped ones changed nothing: this is the last good state. What goes on from it comes to this step again, and
        # counts it then.
        self._save()
        self.checkpoints.wait()
        raise UserError(
            f"{count} updates of {name} in a row had a non-finite gradient (optim.max_skipped), the first at"
            f" {self.first_skipped[name]}; stopped at step {self.step + 1}, and the state after step {self.step}, with"
            f" the weights from before them, is saved; lower optim.{name}.lr or resume from an earlier checkpoint"
        )

    def _memory(self) -> dict[str, float | None]:
        """The largest over ranks, GiB."""
        found = {"memory/peak_gib": peak_gib(self.device)}
        if (reserved := reserved_gib(self.device)) is not None:
            found["memory/reserved_gib"] = reserved
        largest = all_reduce_scalars(list(found.values()), self.mesh.world, dist.ReduceOp.MAX)
        return dict(zip(found, largest, strict=True))

    @long_timeout()
    def _save(self) -> None:
        """The state after this step, if it is not saved already."""
        if self.saved_step == self.step:
            return
        started = time.perf_counter()
        self.checkpoints.wait()  # before what may refuse: the one that is being written would go with the process
        refuse_broken_weights(self.roles, self.mesh, self.step)
        with phase("checkpoint"), announced(f"the checkpoint of step {self.step}"):
            self.checkpoints.save(self.step, saved_tensors(self), saved_state(self))
        self.saved_step = self.step
        self.unlogged["perf/checkpoint_seconds"] = time.perf_counter() - started

    def _heed(self, stop: StopSignal) -> None:
        """Save and end where a signal came to any rank, or end where a checkpoint could not be written.

        Raises:
            Stopped: on all ranks.
            UserError: on all ranks; the checkpoint that was being written beside the training cannot be written.
        """
        number = float(stop.received or 0)
        number, failed = all_reduce_scalars(
            [number, float(self.checkpoints.has_failed())], self.mesh.world, dist.ReduceOp.MAX
        )
        if failed:
            self.checkpoints.wait()
        if not number:
            return
        self._save()
        self.checkpoints.wait()
        raise Stopped(
            f"stopped by {signal.Signals(int(number)).name} after step {self.step} of {self.config.steps}, which is"
            f" saved in {self.run_dir / 'checkpoints'}; {same_command(self.config)} goes on from there"
        )
