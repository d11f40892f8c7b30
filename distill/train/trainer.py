"""Trainer: a run's state and its loop of steps, with logs, checkpoints and exact resume."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from itertools import chain, islice, tee
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from distill.config import Config
from distill.data.base import ClipDataset, buckets_of, sample_of
from distill.data.order import Batching, clips_of_micro_batches
from distill.evaluate.evaluator import Evaluator
from distill.evaluate.guard import Guard
from distill.methods import Batch, Method, build_method
from distill.run.loggers import Metrics
from distill.run.open import Run
from distill.train.export import export_student, show_clips
from distill.train.gradients import Losses, accumulate_gradients
from distill.train.metrics import MEASURES, MetricsLog, StepLine, speed
from distill.train.optimizers import ENOUGH_TRIES, Trained, averaged, build_trained
from distill.train.profiling import StepProfiler
from fsdp_cp.checkpoint.folder import BEST, branch_name, leave_branch, read_state
from fsdp_cp.checkpoint.save_load import Checkpoints, load
from fsdp_cp.errors import UserError
from fsdp_cp.files.json_lines import cut_back
from fsdp_cp.launch import world_size
from fsdp_cp.measure.memory import peak_flops, peak_gib, reserved_gib, reset_peak
from fsdp_cp.measure.phases import PhaseTimes, phase
from fsdp_cp.mesh import Mesh
from fsdp_cp.progress import announced, bar, first_rank_log
from fsdp_cp.reduce import (
    all_reduce_scalars,
    barrier,
    first_non_finite,
    grad_norm,
    local_shard,
    on_first_rank,
    parameter_norms,
)
from fsdp_cp.rng import StepRandom
from fsdp_cp.runtime.signals import Stopped, StopSignal
from fsdp_cp.runtime.timeouts import long_timeout, shorten
from models.condition import Condition
from models.roles.role import Role
from models.sample import PartShapes, part_name

log = first_rank_log(__name__)


class Trainer:
    """State of a run between two steps, and its training loop. Each step updates the role that the method names."""

    def __init__(
        self,
        *,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        data: ClipDataset,
        method: Method,
        micro_batch_size: int,
    ):
        self.config, self.mesh, self.device, self.data, self.method = config, mesh, device, data, method
        self.run_dir = Path(config.run_dir)
        self.roles: dict[str, Role] = {name: method.roles[name] for name in method.trained_roles}
        self.trained = build_trained(config, method)
        method.student_average = partial(averaged, self.trained_of("student"))
        self.clock = method.clock("student")
        times = method.state_times(method.settings)
        self.training_data = data.with_states(times) if times else data
        self.batching = Batching(
            global_size=config.batch_size,
            micro_batch_size=micro_batch_size,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            parts=config.expert_draws,
        )
        # Move them once: a copy with each micro-batch would stall the GPU.
        moved = Condition({}, data.null, data.empty).to(device)
        self._null, self._empty = moved.null_values, moved.empty_values
        # State that checkpoints save and restore, in addition to the networks in ``trained``.
        self.step = 0
        self.samples = 0
        self.skipped = dict.fromkeys(self.roles, 0)
        self.seconds = 0.0
        self.last_loss: dict[str, float] = {}
        """Loss of each role's latest update."""
        self.unlogged: Metrics = {}
        """Latest metrics of every role since the last logged step, which may have trained another role."""
        self.branch_of = branch_name(config.checkpoint.resume)
        self.sources: dict[str, Any] = {}
        """Fingerprints of the run's files, for checkpoints; see :func:`distill.run.checkpoint_checks.check_resume`."""
        # State of this start only.
        self.skipped_in_a_row = dict.fromkeys(self.roles, 0)
        self.first_skipped: dict[str, str] = {}
        """Step and parameter of the first update in the current row of skipped updates, by role."""
        self.cold = set(self.roles)
        """Roles without a step in this process: the first one may compile."""
        self.saved_step: int | None = None
        self.log: MetricsLog | None = None
        kept = {name: getattr(config.checkpoint, name) for name in ("keep", "keep_every", "asynchronous")}
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", **kept)
        self.evaluator = Evaluator(
            config=config, mesh=mesh, device=device, data=data, method=method, micro_batch_size=micro_batch_size
        )
        self.guard = Guard(self.evaluator) if config.guard.every else None

    def run(self, run: Run, stop: StopSignal) -> None:
        """Restore the checkpoint that ``run`` resumes, train the remaining steps, and write export, samples and report.
        A signal, which ``stop`` holds, ends the run between two steps."""
        assert run.start is not None, "the run was opened"
        self.sources = run.start.sources
        if self.guard is not None:
            self.guard.teacher = (self.sources.get("teacher.checkpoint") or {}).get("fingerprint")
        if run.start.resume_from is not None:
            self.resume(run.start.resume_from)
        with run.started(lambda: self.step):
            on_first_rank(self._open_log)
            reset_peak(self.device)
            profiler = StepProfiler(self.config.profile, device=self.device, run_dir=self.run_dir, step=self.step)
            # As a context, the bar closes before an error is printed.
            progress = bar(self.config.steps, "training", "step", initial=self.step, smoothing=0.05)
            with stop.deferred(), self.checkpoints.completed(), profiler, progress as shown:
                self._train(shown.update, stop, profiler)
            self.finish()
            if self.log is not None:
                self.log.close()

    @long_timeout()
    def finish(self) -> None:
        """Write export, samples and report; refuse a last loss that is not finite: no such student is a result."""
        for name, loss in self.last_loss.items():
            if not math.isfinite(loss):
                why = f"the run ended at step {self.step} with a loss of the {name} that is not finite"
                skipped = f"{self.skipped[name]} of its updates were skipped, and nothing is exported"
                hint = f"lower optim.{name}.lr and begin again with checkpoint.resume=never, or an earlier checkpoint"
                raise UserError(f"{why}: {skipped}; {hint}")
        self._check_moved()
        if self.config.export.at_end:
            export_student(self.config, self.method, self.trained_of("student"), self.step)
        if self.config.sample.at_end:
            self._write_samples()
            if self.config.export.at_end:
                averaged = self.trained_of("student")[0].average is not None
                on_first_rank(lambda: show_clips(self.run_dir, self.step, averaged=averaged))
            if self.config.sample.report_clips:
                self._write_report()
        barrier()

    def _check_moved(self) -> None:
        """Refuse a result of networks whose updates all changed nothing; name an expert that no step trained."""
        for network in self.trained.values():
            if network.is_stuck:
                hint = f"lower method.guidance_scale or optim.{network.role.name}.lr, and see log.norms_every"
                why = f"{network.name} never moved: {network.idleness}"
                raise UserError(f"{why}; nothing is exported, and the checkpoints are kept; {hint}")
            if not network.tried and network.role.boundaries:
                log.warning("no step trained %s: it has the weights of the run's start", network.name)

    def resume(self, folder: Path) -> None:
        """Continue from the checkpoint in ``folder``; a collective."""
        state = read_state(folder)
        accepted = any(name.startswith("data.") for name in self.config.checkpoint.accept)
        if state["data"] != self.training_data.fingerprint and not accepted:
            hint = "use the same settings, another run_dir, or checkpoint.resume=never"
            raise UserError(f"checkpoint.resume: {folder} was made with other data; {hint}")
        load(folder, self.saved_tensors())
        if folder.parent.resolve() == (self.run_dir / "checkpoints").resolve():
            leave_branch(folder)
        self.step, self.samples, self.seconds = state["step"], state["samples"], state["seconds"]
        self.skipped, self.unlogged = state["skipped"], state["unlogged"]
        self.last_loss = state.get("last_loss", {})
        for name, count in state["updates"].items():
            network = self.trained[name]
            network.count(count)
            network.tried = state.get("tried", state["updates"])[name]
            network.moved = state.get("moved", state["updates"])[name]
        self.branch_of = self.branch_of or state.get("branch_of")
        if self.guard is not None:
            self.guard.resume(state.get("guard"), self.step)
        self.saved_step = self.step
        log.info("resumed from step %d (%s)", self.step, folder)

    def saved_tensors(self) -> dict[str, Any]:
        """Return the trained networks' tensors, by network. The teacher is left out, since it does not change."""
        return {name: network.tensors() for name, network in self.trained.items()}

    @property
    def updates(self) -> dict[str, int]:
        return {name: network.updates for name, network in self.trained.items()}

    def trained_of(self, role: str) -> list[Trained]:
        return [network for network in self.trained.values() if network.role.name == role]

    def _saved_state(self) -> dict[str, Any]:
        """Return the JSON state. Seed and step also restore the random streams, which depend on nothing else."""
        return {
            "step": self.step,
            "samples": self.samples,
            "seed": self.config.seed,
            "updates": self.updates,
            "tried": {name: network.tried for name, network in self.trained.items()},
            "moved": {name: network.moved for name, network in self.trained.items()},
            "skipped": self.skipped,
            "last_loss": self.last_loss,
            "seconds": self.seconds,
            "unlogged": self.unlogged,
            "branch_of": self.branch_of,
            "guard": None if self.guard is None else asdict(self.guard.state),
            # Step of the checkpoint to keep for good.
            BEST: self.guard.state.best if self.guard is not None and self.config.guard.action == "keep" else None,
            "settings": asdict(self.config),
            "sources": self.sources,
            "method": self.method.settings.name,
            "few_steps": self.method.few_steps,
            "heads": self.method.heads,
            "data": self.training_data.fingerprint,
            "configs": {name: role.config for name, role in self.roles.items()},
            "boundaries": {name: list(role.boundaries) for name, role in self.roles.items() if role.boundaries},
            "adapters": {name: role.adapters for name, role in self.roles.items() if role.adapters is not None},
            "causal": {name: role.causal_file for name, role in self.roles.items() if role.causal is not None},
            "sparse": {name: role.sparse_file for name, role in self.roles.items() if role.sparse is not None},
        }

    def _train(self, advance: Callable[[], object], stop: StopSignal, profiler: StepProfiler) -> None:
        """Train the remaining steps; log, save and sample between them. Call ``advance`` after each step."""
        rates = {name: [network.name for network in self.trained_of(name)] for name in self.roles}
        line = StepLine(rates, step=self.step, steps=self.config.steps, every=self.config.log.print_every)
        data = self._steps_of_data()
        self._look_and_sample_first()
        while self.step < self.config.steps:
            with profiler.step(self.step + 1):
                metrics = self._train_step(data)
            if not self.cold:
                shorten(timedelta(minutes=self.config.timeout.step))
            advance()
            self.unlogged |= metrics
            line.add(metrics)
            self._look_if_due(metrics)
            at_end = self.step == self.config.steps
            if at_end or self._is_due(self.config.log.every):
                self._log_metrics(line)
            if self.guard is not None:
                self.guard.stop_at(self.step, self.saved_step)
            if self._is_due(self.config.checkpoint.every) or (at_end and self.config.checkpoint.at_end):
                self._save()
            self._heed(stop)
            if self._is_due(self.config.sample.every) and not at_end:
                self._write_samples()

    def _look_and_sample_first(self) -> None:
        """Let the guard look at the student of the start, and make samples that a kill took after their checkpoint."""
        if self.guard is not None and not self.guard.state.looks:
            self._look()
        is_resumed = self.saved_step == self.step < self.config.steps
        if is_resumed and self._is_due(self.config.sample.every):
            if not on_first_rank(lambda: self.evaluator.sheet(self.step).is_file()):
                self._write_samples()

    def _is_due(self, every: int) -> bool:
        """Return whether this step is a multiple of ``every``; 0 stands for never."""
        return every > 0 and self.step % every == 0

    def _log_metrics(self, line: StepLine) -> None:
        """Write the metrics since the last time, and print a line if one is due."""
        self.unlogged |= self.memory()
        if self.log is not None:
            self.log.write(self.step, self.unlogged)
            if line.is_due(self.step):
                log.info(line.text(self.step, self.unlogged["memory/peak_gib"]))
        self.unlogged = {}

    @long_timeout()
    def _write_samples(self) -> None:
        with self.method.student_average():
            shown = self.evaluator.write_samples(self.step)
        if self.log is not None and shown is not None:
            self.log.show(self.step, shown)

    def _look_if_due(self, metrics: Metrics) -> None:
        if self.guard is not None and self.guard.is_due(self.method.trained_role(self.step - 1), metrics):
            self._look()

    @long_timeout()
    def _look(self) -> None:
        """Let the guard look at the student, at its average if it has one."""
        with self.method.student_average():
            self.unlogged |= self.guard.look(self.step)

    def _write_report(self) -> None:
        facts = {
            "steps": self.step,
            "minutes of training": round(self.seconds / 60, 2),
            "updates": ", ".join(f"{name} {count}" for name, count in self.updates.items()),
            "peak memory per rank, GiB": round(self.memory()["memory/peak_gib"], 3),
        }
        with self.method.student_average():
            self.evaluator.write_report(facts)

    def _open_log(self) -> None:
        for name in ("metrics.jsonl", "norms.jsonl", MEASURES):
            cut_back(self.run_dir / name, self.step)
        self.log = MetricsLog(self.run_dir, self.config.log, asdict(self.config), self.step)

    def _steps_of_data(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each remaining step. They depend only on the seed and on the samples before."""
        steps, buckets = self.config.steps - self.step, buckets_of(self.training_data)
        drawn, sampled = tee(
            clips_of_micro_batches(
                seed=self.config.seed,
                buckets=[bucket.items for bucket in buckets],
                batching=self.batching,
                first_sample=self.samples,
                steps=steps,
            )
        )
        sampler = (clips for _, clips in sampled)
        loader = iter(DataLoader(self.training_data, batch_sampler=sampler, pin_memory=self.device.type == "cuda"))
        for _ in range(steps):
            of_step = islice(drawn, self.batching.accumulation)
            yield [self._on_device(next(loader), buckets[bucket].latent_shapes) for bucket, _ in of_step]

    def _on_device(self, items: dict[str, Any], shapes: PartShapes) -> Batch:
        wanted = {part_name(name, part) for name in ("latents", "states") for part in self.clock}
        moved = {name: items[name].to(self.device, non_blocking=True) for name in items if name in wanted}
        condition = Condition({name: items[name] for name in self.data.condition_shapes}, self._null, self._empty)
        return Batch(
            latents=sample_of(moved, self.clock),
            condition=condition.to(self.device, non_blocking=True),
            latent_shapes={part: shapes[part] for part in self.clock},
            latent_shifts=self.clock,
            states=sample_of(moved, self.clock, "states"),
        )

    def _train_step(self, data: Iterator[list[Batch]]) -> Metrics:
        """Update the role whose turn it is and return its metrics, equal on all ranks but for times. The host's clock
        has these: it waits for the reduced metrics at the end of the step, after the optimizer's kernels."""
        started, batching = time.perf_counter(), self.batching
        name = self.method.trained_role(self.step)
        for role in self.method.roles.values():
            role.flops = 0

        def random(i: int) -> StepRandom:
            at = {"step": self.step, "positions": batching.positions(i), "part": batching.part(i)}
            return StepRandom(seed=self.config.seed, device=self.device, **at)

        with PhaseTimes(self.device) as times:
            with phase("data"):
                micro_batches = next(data)
            share = batching.micro_batch_size / self.config.batch_size
            losses = accumulate_gradients(self.method, self.step, micro_batches, share=share, random=random)
            trained = [network for network in self.trained_of(name) if network.index in losses.networks]
            self._write_norms(name, trained)
            with phase(f"{name}/clip"):
                norm = grad_norm(chain.from_iterable(network.single.parameters() for network in trained))
            rates = {f"{network.name}/lr": network.rate() for network in trained}
            with phase(f"{name}/update"):
                self._update(name, norm, trained)
            loss, flops, means = self._reduce(losses)
        seconds = time.perf_counter() - started
        self.step += 1
        self.samples += self.config.batch_size
        self.seconds += seconds
        self.last_loss[name] = loss
        self.cold.discard(name)
        peak, samples = peak_flops(self.device), self.config.batch_size
        peak = None if peak is None else peak * world_size()
        tokens = self.roles[name].tokens(micro_batches[0].shapes) * samples
        return {
            f"{name}/loss": loss,
            f"{name}/grad_norm": norm,
            **rates,
            f"{name}/skipped": float(self.skipped[name]),
            **speed(name, seconds, times.seconds(), samples, tokens, flops, peak),
            **{f"{name}/{key}": value for key, value in means.items()},
        }

    def _write_norms(self, role: str, trained: Sequence[Trained]) -> None:
        """Write norms at each role's first update in every ``log.norms_every`` steps: fixed steps could miss a role."""
        every, step = self.config.log.norms_every, self.step + 1
        if not every or step < every:
            return
        if any(self.method.trained_role(earlier - 1) == role for earlier in range(step - step % every, step)):
            return
        with phase(f"{role}/norms"):
            norms = {network.name: parameter_norms(network.single.named_parameters()) for network in trained}
        if self.log is not None:
            for name, values in norms.items():
                self.log.write_norms(step, name, values)

    def _reduce(self, losses: Losses) -> tuple[float, float, Metrics]:
        """Return a step's loss and operations, and the means of its losses and observations. A collective, after the
        gradient norm: the host waits for each, and on CUDA the norm's kernels would be launched late."""
        values = {name: float(value) for name, value in losses.sums.items()}
        total = sum(losses.weights[name] * value for name, value in values.items())
        # Sum over data-parallel ranks only: the ranks of a cp group hold the same loss.
        names = sorted(values)
        flops = float(sum(role.flops for role in self.method.roles.values()))
        observed = self.method.observations.drain()
        flat = [total, flops, *(values[name] for name in names), *chain.from_iterable(observed.values())]
        with phase("metrics"):
            loss, flops, *rest = all_reduce_scalars(flat, self.mesh.dp)
        means: Metrics = dict(zip(names, rest, strict=False)) if len(names) > 1 else {}
        pairs = rest[len(names) :]
        for key, value, count in zip(observed, pairs[::2], pairs[1::2], strict=True):
            means[key] = value / count if count else None
        return loss, flops, means

    def _update(self, name: str, norm: float, trained: Sequence[Trained]) -> None:
        """Clip by ``norm``, that of all networks of this step on all ranks, and update; skip one that is not finite."""
        if math.isfinite(norm):
            self.skipped_in_a_row[name] = 0
            clip = self.config.optim.clip_of(name)
            for network in trained:
                network.update(clip / norm if clip is not None and norm > clip else 1.0)
                network.moved += norm > 0
        else:
            self._skip(name, norm)
        for network in trained:
            network.tried += 1
            if network.is_stuck and network.tried == ENOUGH_TRIES:
                log.warning("step %d: %s has not moved: %s", self.step + 1, network.name, network.idleness)

    def _skip(self, name: str, norm: float) -> None:
        """Skip the update of role ``name``, and log which gradient is not finite. Raise ``UserError`` on all ranks,
        after saving the last good state, for ``optim.max_skipped`` updates in a row."""
        self.skipped_in_a_row[name] += 1
        where = first_non_finite(self.roles[name].named_parameters(), self.mesh.world)
        if self.skipped_in_a_row[name] == 1:
            self.first_skipped[name] = f"step {self.step + 1} in {where}"
        for network in self.trained_of(name):
            network.optimizer.clear_gradients()
        text = "step %d: the gradient norm of %s is %s, first in %s; update skipped"
        log.warning(text, self.step + 1, name, norm, where)
        count = self.skipped_in_a_row[name]
        if count < self.config.optim.max_skipped:
            self.skipped[name] += 1
            return
        # Skipped updates changed nothing, so this is the last good state. A run that resumes from it repeats this step
        # and counts it then.
        self._save()
        self.checkpoints.wait()
        first = f"had a non-finite gradient (optim.max_skipped), the first at {self.first_skipped[name]}"
        saved = f"stopped at step {self.step + 1}; the state from before them is saved as step {self.step}"
        hint = f"lower optim.{name}.lr or resume from an earlier checkpoint"
        raise UserError(f"{count} updates of {name} in a row {first}; {saved}; {hint}")

    def memory(self) -> dict[str, float]:
        """Return peak memory and, on CUDA, reserved memory in GiB: the maximum over all ranks. A collective."""
        memory = {"memory/peak_gib": peak_gib(self.device)}
        if (reserved := reserved_gib(self.device)) is not None:
            memory["memory/reserved_gib"] = reserved
        largest = all_reduce_scalars(list(memory.values()), self.mesh.world, dist.ReduceOp.MAX)
        return dict(zip(memory, largest, strict=True))

    @long_timeout()
    def _save(self) -> None:
        """Save the state after this step, if it is not saved; refuse weights that are not finite, on all ranks."""
        if self.saved_step == self.step:
            return
        started = time.perf_counter()
        self.checkpoints.wait()  # first: an error below would end the process in the middle of a write
        for name, role in self.roles.items():
            broken = sum(not local_shard(weight).isfinite().all() for weight in role.weights().values())
            if all_reduce_scalars([float(broken)], self.mesh.world)[0]:
                why = f"step {self.step}: weights of the {name} are not finite and are not saved"
                hint = "resume from an earlier checkpoint, or start again with checkpoint.resume=never"
                raise UserError(f"{why}; lower optim.{name}.lr and {hint}")
        if self.guard is not None:
            self.guard.state.mark(self.step)
        with phase("checkpoint"), announced(f"the checkpoint of step {self.step}"):
            self.checkpoints.save(self.step, self.saved_tensors(), self._saved_state())
        self.saved_step = self.step
        self.unlogged["perf/checkpoint_seconds"] = time.perf_counter() - started

    def _heed(self, stop: StopSignal) -> None:
        """Save and end (``Stopped``, on all ranks) if any rank received a signal; or the latest checkpoint failed."""
        flags = [float(stop.received or 0), float(self.checkpoints.has_failed())]
        number, failed = all_reduce_scalars(flags, self.mesh.world, dist.ReduceOp.MAX)
        if failed:
            self.checkpoints.wait()
        if not number:
            return
        self._save()
        self.checkpoints.wait()
        instead = ", with checkpoint.resume=auto," if self.config.checkpoint.resume == "never" else ""
        raise Stopped(
            f"stopped by {signal.Signals(int(number)).name} after step {self.step} of {self.config.steps}, which is"
            f" saved in {self.run_dir / 'checkpoints'}; the same command{instead} resumes from there"
        )


def build_trainer(run: Run, data: ClipDataset) -> Trainer:
    """Build the roles and the method of ``run`` on its mesh, and their trainer. A collective.

    Raises:
        UserError: a guard, and data that no decoder shows.
    """
    if run.config.guard.every and not hasattr(data, "decode"):
        raise UserError(
            f"guard.every={run.config.guard.every} needs a decoder, which data={run.config.data.name} lacks; use 0"
        )
    roles = run.plan.build_roles(mesh=run.mesh, device=run.device, data=data, seed=run.config.seed)
    return Trainer(
        config=run.config,
        mesh=run.mesh,
        device=run.device,
        data=data,
        method=build_method(run.config.method, roles),
        micro_batch_size=run.plan.micro_batch_size,
    )
