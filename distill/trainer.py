"""The training loop: accumulation, clipping, optimizers, EMA, schedules, metrics, checkpoints and exact resume."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from tqdm import tqdm

from distill.announce import announce
from distill.config import Config
from distill.data import ClipDataset
from distill.data.order import Batching, MicroBatchSampler
from distill.evaluate import Evaluator, write_scheduler
from distill.methods import Batch, Method
from distill.metrics import MEASURES, MetricsLog, NormsLog, cut_back
from distill.optimizers import RoleOptimizer, learning_rate
from distill.setup import run_settings
from distill.state_checks import refuse_broken_weights
from fsdp_cp import checkpoint
from fsdp_cp.diagnostics import parameter_norms
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank, world_size
from fsdp_cp.memory import peak_flops, peak_gib, reset_peak
from fsdp_cp.mesh import Mesh
from fsdp_cp.microbatch import microbatch
from fsdp_cp.phases import phase
from fsdp_cp.reduce import all_reduce_scalars, barrier, grad_norm, scale_grads, together
from fsdp_cp.rng import StepRandom
from models.ema import Ema
from models.export import export_weights
from models.load import defining
from models.role import Role

log = logging.getLogger(__name__)


class Trainer:
    """Runs ``config.steps`` optimizer steps, of whichever role the method says, on full latents.

    Args:
        config: the checked configuration.
        mesh: the mesh.
        device: this rank's device.
        data: the clips.
        method: yields the losses.
        micro: samples per data-parallel rank and forward.
        run_dir: the run's folder.
        resume_from: the checkpoint to go on from, or ``None``.
    """

    def __init__(
        self,
        *,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        data: ClipDataset,
        method: Method,
        micro: int,
        run_dir: Path,
        resume_from: Path | None,
    ):
        self.config, self.mesh, self.device, self.data, self.method = config, mesh, device, data, method
        self.run_dir = run_dir
        self.roles: dict[str, Role] = {name: method.roles[name] for name in method.trained_roles}
        self.optimizers = {name: RoleOptimizer(role, getattr(config.optim, name)) for name, role in self.roles.items()}
        ema = config.student.ema
        self.ema = (
            Ema(self.roles["student"], decay=ema.decay, gamma=ema.gamma, start=ema.start) if ema.enabled else None
        )
        if self.ema is not None:
            method.student_average = self.ema.swapped_in
        self.training_data = method.training_data(data)
        self.batching = Batching(global_size=config.batch_size, micro=micro, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
        self.null_text, self.empty_text = data.null_text.to(device), data.embed([""])[0].to(device)
        self.step = 0
        self.samples = 0
        self.updates = dict.fromkeys(self.roles, 0)
        self.skipped = dict.fromkeys(self.roles, 0)
        self.skipped_in_a_row = dict.fromkeys(self.roles, 0)
        self.seconds = 0.0
        self.branch_of = checkpoint.branch_name(config.checkpoint.resume)
        self.last_loss: dict[str, float] = {}
        """Of each role's latest update in this process."""
        self.log: MetricsLog | None = None
        self.norms: NormsLog | None = None
        self.unlogged: dict[str, float | None] = {}
        """The latest metrics of every role since the last logged step, which may have been another role's."""
        self.planned_updates = {
            name: sum(method.trained_role(step) == name for step in range(config.steps)) for name in self.roles
        }
        self.evaluator = Evaluator(
            config=config, mesh=mesh, device=device, data=data, method=method, run_dir=run_dir, batch=micro
        )
        if resume_from is not None:
            self._restore(resume_from)

    def run(self) -> None:
        """Train, then export the student and write samples and the report."""
        announce(self)
        together(self._open_log)
        reset_peak(self.device)
        # As a context: an error would else be printed behind the bar, in its line.
        steps = self.config.steps
        with tqdm(total=steps, initial=self.step, unit="step", disable=rank() != 0, smoothing=0.05) as progress:
            self._train(progress)
        self._finish()
        for opened in (self.log, self.norms):
            if opened is not None:
                opened.close()

    def _train(self, progress: tqdm) -> None:
        """The remaining steps, with what is logged, saved and shown between them."""
        first, started = self.step, time.perf_counter()
        data = self._steps_of_data()
        while self.step < self.config.steps:
            metrics = self._train_step(data)
            progress.update()
            self.unlogged |= metrics
            if self.step % self.config.log.every == 0 or self.step == self.config.steps:
                self.unlogged["memory/peak_gib"] = self._peak_memory()
                if self.log is not None:
                    self.log.write(self.step, self.unlogged)
                    progress.set_postfix({k: f"{v:.4f}" for k, v in self.unlogged.items() if k.endswith("/loss")})
                self.unlogged = {}
            if self.step == first + 20 and rank() == 0:
                left = (time.perf_counter() - started) / 20 * (self.config.steps - self.step)
                log.info("about %.1f minutes of training left", left / 60)
            every = self.config.checkpoint.every
            at_end = self.step == self.config.steps and self.config.checkpoint.at_end
            if (every and self.step % every == 0) or at_end:
                self._save()
            every = self.config.sample.every
            if every and self.step % every == 0 and self.step < self.config.steps:
                self._sample()

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
            text=items["text"].to(self.device, non_blocking=True),
            null_text=self.null_text,
            empty_text=self.empty_text,
            latent_shape=self.data.latent_shape,
            trajectory=items["trajectory"].to(self.device, non_blocking=True) if "trajectory" in items else None,
        )

    def _train_step(self, data: Iterator[list[Batch]]) -> dict[str, float | None]:
        """One update of the role whose turn it is; returns its metrics, equal on all ranks."""
        started = time.perf_counter()
        self.method.roles[self.method.first_role(self.step)].gather_early()
        with phase("data"):
            micro_batches = next(data)
        for r in self.method.roles.values():
            r.flops = 0
        name = self.method.trained_role(self.step)
        role = self.roles[name]
        with phase(f"{name}/gradients", [r.network for r in self.method.roles.values()]), ExitStack() as stack:
            for frozen in self.method.frozen_roles(self.step):
                stack.enter_context(self.roles[frozen].frozen())
            total, losses = self._accumulate_gradients(role, micro_batches)
        self._log_norms(name)
        norm = grad_norm(role.parameters())
        lr = learning_rate(getattr(self.config.optim, name), self.updates[name], self.planned_updates[name])
        with phase(f"{name}/update"):
            self._update(name, norm, lr)
        # Sums over data-parallel ranks only: the ranks of a cp group hold the same loss.
        names = sorted(losses)
        flops = float(sum(r.flops for r in self.method.roles.values()))
        observed = self.method.observations.drain()
        flat = [total, flops, *(losses[n] for n in names), *(x for pair in observed.values() for x in pair)]
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
            f"{name}/lr": lr,
            f"{name}/skipped": float(self.skipped[name]),
            "perf/seconds_per_step": seconds,
            "perf/tokens_per_second": role.tokens * self.config.batch_size / seconds,
            "perf/flops": reduced[1],
            "perf/mfu": None if peak is None else reduced[1] / seconds / (peak * world_size()),
        }
        if len(names) > 1:
            metrics |= {f"{name}/{n}": value for n, value in zip(names, reduced[2 : 2 + len(names)], strict=True)}
        rest = reduced[2 + len(names) :]
        for key, value, count in zip(observed, rest[::2], rest[1::2], strict=True):
            metrics[f"{name}/{key}"] = value / count if count else None
        return metrics

    def _accumulate_gradients(self, role: Role, micro_batches: list[Batch]) -> tuple[float, dict[str, float]]:
        """Backward of every loss of every micro-batch; returns this rank's share of the total and of each loss."""
        share = self.batching.micro / self.config.batch_size
        sums: dict[str, torch.Tensor] = {}
        weights: dict[str, float] = {}
        first = True
        for i, batch in enumerate(micro_batches):
            random = StepRandom(
                seed=self.config.seed, step=self.step, positions=self.batching.positions(i), device=self.device
            )
            # The closures do the work: listing the losses, to know which backward is the last, runs nothing early.
            for loss, following in pairwise([*self.method.losses(self.step, batch, random), None]):
                is_last = i == len(micro_batches) - 1 and following is None
                with microbatch(role.network, is_first=first, is_last=is_last):
                    with phase(f"{role.name}/{loss.name}/forward"):
                        value = loss.closure()
                    with phase(f"{role.name}/{loss.name}/backward"):
                        (loss.weight * share * value).backward()
                first = False
                weights[loss.name] = loss.weight
                sums[loss.name] = sums.get(loss.name, 0.0) + share * value.detach().double()
        losses = {name: float(value) for name, value in sums.items()}
        return sum(weights[name] * value for name, value in losses.items()), losses

    def _log_norms(self, name: str) -> None:
        """A line of ``norms.jsonl`` at role ``name``'s first update of each ``log.norms_every`` steps.

        Counted by steps of all roles, a role that trains every fifth step would be missed by most intervals.
        """
        every, step = self.config.log.norms_every, self.step + 1
        if not every or step < every:
            return
        before = range(step - step % every, step)
        if any(self.method.trained_role(earlier - 1) == name for earlier in before):
            return
        with phase(f"{name}/norms"):
            norms = parameter_norms(self.roles[name].network)
        if self.norms is not None:
            self.norms.write(step, name, norms)

    def _update(self, name: str, norm: float, lr: float) -> None:
        """Clip and step, or skip the update where the norm, which all ranks agree on, is not finite."""
        optimizer = self.optimizers[name]
        if not math.isfinite(norm):
            optimizer.clear_gradients()
            self.skipped[name] += 1
            self.skipped_in_a_row[name] += 1
            if rank() == 0:
                log.warning("step %d: the gradient norm of %s is %s; update skipped", self.step + 1, name, norm)
            if self.skipped_in_a_row[name] >= self.config.optim.max_skipped:
                raise UserError(
                    f"{self.skipped_in_a_row[name]} updates of {name} in a row had a non-finite gradient"
                    " (optim.max_skipped);"
                    f" stopped at step {self.step + 1}; lower optim.{name}.lr or resume from an earlier checkpoint"
                )
            return
        self.skipped_in_a_row[name] = 0
        clip = self.config.optim.clip
        if clip is not None and norm > clip:
            scale_grads(self.roles[name].parameters(), clip / norm)
        optimizer.step(lr)
        if name == "student" and self.ema is not None:
            self.ema.update(self.updates[name])
        self.updates[name] += 1

    def _peak_memory(self) -> float:
        return all_reduce_scalars([peak_gib(self.device)], self.mesh.world, dist.ReduceOp.MAX)[0]

    def _tensors(self) -> dict[str, Any]:
        """Everything that trains, by role; the teacher is not among it, since it does not change."""
        tensors: dict[str, Any] = {
            name: {"weights": role.weights(), "adamw": self.optimizers[name].state()}
            for name, role in self.roles.items()
        }
        if self.ema is not None:
            tensors["student"]["ema"] = self.ema.weights
        return tensors

    def _numbers(self) -> dict[str, Any]:
        """Plain state. Random streams are functions of seed, step and position, so these restore them too."""
        return {
            "step": self.step,
            "samples": self.samples,
            "seed": self.config.seed,
            "updates": self.updates,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "seconds": self.seconds,
            "unlogged": self.unlogged,
            "branch_of": self.branch_of,
            "settings": run_settings(self.config),
            "method": self.method.settings.name,
            "data": self.training_data.fingerprint,
            "configs": {name: role.config for name, role in self.roles.items()},
        }

    def _save(self) -> None:
        folder = self.run_dir / "checkpoints"
        refuse_broken_weights(self.roles, self.mesh, self.step)
        with phase("checkpoint"):
            checkpoint.save(folder, self.step, self._tensors(), self._numbers(), self.config.checkpoint.keep)

    def _restore(self, folder: Path) -> None:
        numbers = checkpoint.read_numbers(folder)
        # Checkpoints of earlier versions hold diffusers' own notes beside what defines a network.
        networks = {name: defining(config) for name, config in numbers["configs"].items()}
        for what, before, now in (
            ("other data", numbers["data"], self.training_data.fingerprint),
            ("other networks", networks, {name: defining(role.config) for name, role in self.roles.items()}),
        ):
            if before != now:
                raise UserError(
                    f"checkpoint.resume: {folder} was made with {what};"
                    " use the same settings, another run_dir, or checkpoint.resume=never"
                )
        checkpoint.load(folder, self._tensors())
        if folder.parent.resolve() == (self.run_dir / "checkpoints").resolve():
            checkpoint.leave_branch(folder)
        self.step, self.samples, self.seconds = numbers["step"], numbers["samples"], numbers["seconds"]
        for name in ("updates", "skipped", "skipped_in_a_row", "unlogged"):
            setattr(self, name, dict(numbers[name]))
        self.branch_of = self.branch_of or numbers.get("branch_of")
        if rank() == 0:
            log.info("resumed from step %d (%s)", self.step, folder)

    def _sample(self) -> None:
        with self.ema.swapped_in() if self.ema is not None else nullcontext():
            self.evaluator.write_samples(self.step, self.log)

    def _finish(self) -> None:
        """Export, samples and report, with the averaged student where there is one.

        Raises:
            UserError: a run that ended with a loss that is not finite: its student is not shown as a result.
        """
        broken = [name for name, loss in self.last_loss.items() if not math.isfinite(loss)]
        if broken:
            name = broken[0]
            raise UserError(
                f"the run ended at step {self.step} with a loss of the {name} that is not finite"
                f" ({self.skipped[name]} of its updates were skipped): nothing is exported; lower optim.{name}.lr and"
                " begin again with checkpoint.resume=never, or from an earlier checkpoint"
            )
        if self.config.export.at_end:
            self._export()
        if self.config.sample.at_end:
            self._sample()
            if self.config.sample.report_clips:
                self._report()
        barrier()

    def _export(self) -> None:
        use_ema = self.ema is not None and self.config.export.weights != "raw"
        weights = self.ema.weights if use_ema else self.roles["student"].weights()
        dtype = torch.bfloat16 if self.config.export.dtype == "bf16" else torch.float32
        about = {"run": str(self.run_dir.resolve()), "step": self.step, "role": "student"}
        about["weights"] = "ema" if use_ema else "raw"
        folder = self.run_dir / "export"
        export_weights(folder / "student", weights, self.roles["student"].config, dtype=dtype, about=about)
        together(lambda: write_scheduler(self.method, folder / "scheduler") if rank() == 0 else None)
        if rank() == 0:
            log.info("exported the student (%s weights) to %s", about["weights"], folder / "student")

    def _report(self) -> None:
        memory = self._peak_memory()
        facts = {
            "steps": self.step,
            "minutes of training": round(self.seconds / 60, 2),
            "updates": ", ".join(f"{name} {count}" for name, count in self.updates.items()),
            "peak memory per rank, GiB": round(memory, 3),
        }
        with self.ema.swapped_in() if self.ema is not None else nullcontext():
            self.evaluator.write_report(facts)
