"""Guard of a run: it looks at fixed clips of the student, and raises an alarm when they collapse.

The losses of distribution matching do not show a collapse. So the guard measures clips, and compares them with the
teacher's of the same captions and noises, or with real clips where a method has no teacher. A measure has a limit on
one side, some spreads over captions from the mean of the teacher's clips (:data:`LIMITS`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.data.base import ClipDataset
from distill.data.shares import Shares
from distill.evaluate.evaluator import SAMPLE_SEED, Evaluator
from distill.evaluate.measures import SHARES, prompt_measures
from distill.evaluate.sampling import TEACHER_STEPS, check_finite, sample_captions
from distill.methods.common.chunks import noise_like, noised
from distill.methods.common.distribution_matching import fake_score_error
from distill.methods.common.expert_times import Times
from distill.methods.common.schedules import add_noise
from fsdp_cp.checkpoint.folder import step_folder
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.measure.phases import phase
from fsdp_cp.reduce import all_reduce_scalars, on_first_rank
from fsdp_cp.rng import StepRandom
from fsdp_cp.sharding.state import resharded
from models.condition import Condition
from models.roles.role import Role
from models.sample import Sample

log = logging.getLogger(__name__)

FIELD = "guidance_error"
"""Measure of the student itself: length of the difference of its guidance from its base's, relative to the latter; the
mean over bands of high noise. Neither length nor direction of the guidance alone shows all losses."""
LIMITS = {
    "saturation": 1.25,
    "contrast": 1.25,
    "motion": -1.25,
    "flicker": 2.5,
    "sharpness": -1.25,
    "diversity": -1.25,
    "static": 1.25,
    FIELD: 1.25,
}
"""Distance of a measure's limit from the reference's mean, in spreads; negative: a least value. High learning rates
make the pictures of healthy students grainy for a while, which costs two spreads of flicker."""
SEEDS = 2
"""Clips of a caption: the fewest that show diversity."""
_FIELD_LIMITS = (0.0, 0.4)
"""Mean and spread of :data:`FIELD`, whose limit is half of the base's guidance (benchmarks/results/fine_tuning.md)."""
_HIGH_NOISE = 0.5
"""Least lower end of the bands of :data:`FIELD`: at low noise guidance is a few percent of the prediction."""
_LEAST_SPREAD = 0.05
"""Least spread of a measure, as a share of its mean."""
_LEAST_SHARE = 0.25
"""Least spread of a share of clips: the clips are few."""
_HALF_LEVEL = 0.5 / 255
"""Spread of a measure that is 0 for all clips, as the saturation of gray ones."""
_OBSERVED = ("student/grad_norm", "fake/grad_norm", "fake/gan_accuracy")
"""Metrics of training that describe the health of the game."""


def by_caption(data: ClipDataset, latents: Sample) -> dict[str, list[float]]:
    """Return the mean of each measure for each caption, of the clips that :data:`SEEDS` ``latents`` in a row are.

    A collective: ranks share the captions. What is not finite raises :class:`NotFinite` on all of them.
    """
    check_finite(latents)

    def measured(i: int) -> dict[str, list[float]]:
        clips = data.decode(latents[SEEDS * i : SEEDS * (i + 1)].to("cpu", torch.float32)).numpy()
        return prompt_measures({"": clips}, {}, None)[""]

    found = Shares().run(range(len(latents) // SEEDS), measured)
    return {name: [float(np.mean(of_caption[name])) for of_caption in found] for name in LIMITS if name != FIELD}


def limits_of(measured: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Return mean and spread over captions of each measure that the clips have."""
    limits = {}
    for name, values in measured.items():
        if name == "diversity" and 0 in values:  # real clips: a caption has one only
            continue
        mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        if np.isfinite(mean):  # clips of two frames have no flicker
            least = _LEAST_SHARE if name in SHARES else _LEAST_SPREAD * abs(mean)
            limits[name] = mean, max(spread, least) or _HALF_LEVEL
    return limits


def middle_time(role: Role) -> float:
    """Return 0.5, or the middle of the times of a role's first expert that trains if none trains at 0.5."""
    if role.expert_at(0.5) in role.trained_experts:
        return 0.5
    ends, first = (1.0, *role.boundaries, 0.0), min(role.trained_experts)
    return (ends[first] + ends[first + 1]) / 2


@dataclass
class GuardState:
    """Limits and memory of a guard, as checkpoints save them."""

    captions: list[str] = field(default_factory=list)
    reference: dict[str, Any] = field(default_factory=dict)
    """Origin of the limits; see :attr:`Guard.reference`."""
    limits: dict[str, Sequence[float]] = field(default_factory=dict)
    """Mean and spread of the reference, by measure."""
    updates: int = 0
    """Number of steps that trained the student."""
    looks: int = 0
    looked_at: int = 0
    """:attr:`updates` at the latest look."""
    values: dict[str, float | None] = field(default_factory=dict)
    """Measures of the latest look; ``None`` if its clips were not finite."""
    rows: dict[str, int] = field(default_factory=dict)
    """Number of latest looks in a row inside of the limit of each measure; negative: outside."""
    armed: list[str] = field(default_factory=list)
    """Measures that can raise an alarm, since they were inside of their limit before."""
    alarm: bool = False
    is_half_reported: bool = False
    best: int | None = None
    """Step of the best checkpoint."""
    best_excess: float = 0.0
    observed: dict[str, float] = field(default_factory=dict)
    """Latest metrics of training that the guard reports."""

    def limit(self, name: str) -> float:
        """Return the limit of a measure."""
        mean, spread = self.limits[name]
        return mean + LIMITS[name] * spread

    def excess(self, name: str) -> float | None:
        """Return the distance of the latest value over the limit, in spreads; 0 inside, ``None`` without a value."""
        value, side = self.values.get(name), 1 if LIMITS[name] > 0 else -1
        return None if value is None else max(0.0, side * (value - self.limit(name)) / self.limits[name][1])

    def total_excess(self) -> float | None:
        """Return the sum of the excesses; ``None`` for clips that are not finite."""
        excesses = [self.excess(name) for name in self.limits]
        return None if None in excesses else sum(excesses)

    def judge(self, values: Mapping[str, float | None]) -> list[str]:
        """Take the values of a look. Return the measures that raise an alarm: armed, and outside at two looks in a row.

        A measure is armed once it was inside at the first look, or at two looks in a row: early students are bad.
        """
        self.values = dict(values)
        for name in self.limits:
            row, is_inside = self.rows.get(name, 0), self.excess(name) == 0
            self.rows[name] = max(row, 0) + 1 if is_inside else min(row, 0) - 1
            if is_inside and (self.looks == 0 or self.rows[name] > 1) and name not in self.armed:
                self.armed.append(name)
        self.looks += 1
        self.looked_at = self.updates
        return [name for name in self.armed if self.rows[name] < -1]

    def mark(self, step: int) -> None:
        """Take the checkpoint of ``step`` as the best one if the latest look was at its student, and was no worse."""
        excess = self.total_excess() if self.looks and self.looked_at == self.updates else None
        if excess is not None and (self.best is None or excess <= self.best_excess):
            self.best, self.best_excess = step, excess


class Guard:
    """Looks of a run at its student, every ``guard.every`` updates of it. All ranks call each method."""

    def __init__(self, evaluator: Evaluator):
        self.evaluator, self.config, self.method = evaluator, evaluator.config, evaluator.method
        self.settings, self.state = self.config.guard, GuardState()
        self.teacher: Any = None
        """Fingerprint of the teacher's files."""
        data = evaluator.data
        known = list(dict.fromkeys(self.config.sample.captions))
        if "teacher" not in self.method.roles:  # captions of real clips, which are of the first bucket
            known = evaluator.real_captions()
        elif not known:
            known = sample_captions(data, len(data.captions()))
        self.captions = [caption for caption in known[: self.settings.captions] for _ in range(SEEDS)]

    def resume(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Take the ``state`` of the checkpoint of ``step``. Begin with a new one if the checkpoint has no looks at
        these captions, or its limits are of another reference."""
        same = state is not None and state["captions"] == self.captions
        earlier, reference = (state or {}).get("reference") or {}, self.reference  # older checkpoints have none
        if "images" not in earlier:  # nor the images
            reference.pop("images", None)
        if same and earlier == reference:
            self.state = GuardState(**state)
        elif rank() == 0:
            log.info("guard: the checkpoint has no limits for these captions, clips and distances; measuring new ones")
        now = self.state
        missed = sum(self.method.trained_role(earlier) == "student" for earlier in range(step)) - now.updates
        now.updates, now.looked_at = now.updates + missed, now.looked_at + missed
        folder = Path(self.config.run_dir) / "checkpoints"
        if now.best is not None and not on_first_rank(lambda: step_folder(folder, now.best).is_dir()):
            now.best = None  # deleted, or of another run

    def is_due(self, role: str, metrics: Mapping[str, float | None]) -> bool:
        """Return whether a look follows the step that trained ``role`` and has these ``metrics``."""
        self.state.observed |= {name: value for name in _OBSERVED if (value := metrics.get(name)) is not None}
        self.state.updates += role == "student"
        return role == "student" and self.state.updates % self.settings.every == 0

    def look(self, step: int) -> dict[str, float | None]:
        """Sample and measure the student after ``step``; return the metrics ``guard/...``. A collective.

        The first look measures the reference too.
        """
        state, evaluator = self.state, self.evaluator
        if not state.limits:
            state.captions, state.reference, state.limits = self.captions, self.reference, self._reference()
        latents = evaluator.latents("student", max(self.config.sample.student_steps), self.captions)
        found = evaluator.decoded("the student", evaluator.data, latents, by_caption)
        evaluator.data.release()
        before, bands = state.values, self._guidance(latents) if found else {}
        values = {name: float(np.mean(of_clips)) for name, of_clips in (found or {}).items()}
        if bands:
            values[FIELD] = float(np.mean([error for low, (_, _, error) in bands.items() if low >= _HIGH_NOISE]))
        raised = state.judge({name: values.get(name) for name in state.limits})
        metrics = {**state.values, "excess": state.total_excess(), "alarm": float(bool(raised))}
        metrics |= self._health(latents, before)
        self._warn(step, raised)
        kept = {f"student/guidance_kept/t{low:.2f}": length for low, (length, *_) in bands.items()}
        turned = {f"student/guidance_cosine/t{low:.2f}": cosine for low, (_, cosine, _) in bands.items()}
        return {f"guard/{name}": value for name, value in metrics.items()} | kept | turned

    def _warn(self, step: int, raised: Sequence[str]) -> None:
        """Log an alarm when it begins, and after half of the run, once, the measures that cannot raise one."""
        state = self.state
        if rank() == 0 and raised and not state.alarm:
            log.warning("step %d: %s", step, self.words(raised))
        state.alarm = bool(raised)
        unarmed = sorted(state.limits.keys() - state.armed)
        if 2 * step >= self.config.steps and not state.is_half_reported:
            state.is_half_reported = True
            if rank() == 0 and unarmed:
                log.warning("guard: half of the run is done, and %s never came inside of the limit", ", ".join(unarmed))

    def words(self, raised: Sequence[str]) -> str:
        """Describe the alarm of the measures ``raised``, and name what to change."""
        state = self.state
        shown = [
            f"{name} {'of no finite clip' if state.values[name] is None else format(state.values[name], '.3g')}"
            f" ({'at most' if LIMITS[name] > 0 else 'at least'} {state.limit(name):.3g})"
            for name in raised
        ]
        earlier = "an earlier checkpoint (guard.action=keep marks the best)"
        if self.settings.action == "keep" and state.best is not None:
            earlier = f"the best checkpoint, of step {state.best}"
        remedies = [f"take {earlier}", *self.config.method.remedies]
        return f"the guard saw {', '.join(shown)} at two looks in a row; in this order, {', '.join(remedies)}"

    def stop_at(self, step: int, saved: int | None) -> None:
        """End the run with ``guard.action=stop`` while there is an alarm. Nothing is saved, so that no checkpoint goes.

        Raises:
            UserError: on all ranks.
        """
        if self.state.alarm and self.settings.action == "stop":
            raised = [name for name in self.state.armed if self.state.rows[name] < -1]
            ended = f"guard.action=stop ended the run after step {step}: {self.words(raised)}"
            if saved is None:
                raise UserError(f"{ended}; nothing is saved yet: begin again, with guard.action=warn to pass this step")
            instead = ", with checkpoint.resume=auto," if self.config.checkpoint.resume == "never" else ""
            past = "and with guard.action=warn goes past this step"
            raise UserError(f"{ended}; the same command{instead} resumes from step {saved}, {past}")

    @property
    def reference(self) -> dict[str, Any]:
        """Origin of the limits, as JSON holds it. Guidance is left out: it is what one changes after an alarm."""
        shapes = {part: list(shape) for part, shape in self.evaluator.data.latent_shapes.items()}
        reference: dict[str, Any] = {"shapes": shapes, "distances": LIMITS}
        if self.config.sample.images:
            reference["images"] = list(self.config.sample.images)
        if "teacher" not in self.method.roles:
            return reference
        return {**reference, "teacher": self.teacher, "steps": self._teacher_steps()}

    def _teacher_steps(self) -> int:
        return max(self.config.sample.teacher_steps or [TEACHER_STEPS])

    def _reference(self) -> dict[str, tuple[float, float]]:
        """Measure the teacher's clips at its full steps, or real ones without a teacher."""
        evaluator = self.evaluator
        if "teacher" in self.method.roles:
            source = evaluator.data, evaluator.latents("teacher", self._teacher_steps(), self.captions)
        else:
            source = evaluator.real_latents(self.captions)
        measured = evaluator.decoded("the guard's reference", *source, by_caption)
        if measured is None:
            raise UserError(f"guard.every={self.settings.every}: the clips to compare with are not finite; use 0")
        knows_field = self.method.guidance_bands and "teacher" in self.method.roles
        return limits_of(measured) | ({FIELD: _FIELD_LIMITS} if knows_field else {})

    def _guidance(self, latents: Sample) -> dict[float, list[float]]:
        """Return length, cosine and error of the student's guidance relative to its base's, in the middle of each band
        of time, by the band's lower end; nothing if the method has none."""
        measured: dict[float, list[float]] = {}
        for low, high in pairwise([*self.method.guidance_bands, 1.0]) if FIELD in self.state.limits else ():

            def of_batch(x: Sample, times: Times, noise: Sample, condition: Condition) -> Tensor:
                return self.method.guidance_field(add_noise(x, noise, times.t), times, condition)

            measured[low] = self._means(latents, (low + high) / 2, of_batch)
        return measured

    def _health(self, latents: Sample, before: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the health of the game: metrics of training, the student's pace, the fake score's error."""
        state, health = self.state, {}
        moved = []
        for name, value in state.values.items():
            old = before.get(name)
            if value is not None and old is not None:
                moved.append(abs(value - old) / state.limits[name][1])
        if moved:  # not at the first look
            health["pace"] = float(np.mean(moved))
        seen = state.observed
        if "fake/gan_accuracy" in seen:
            health["gan_accuracy"] = seen["fake/gan_accuracy"]
        if seen.get("fake/grad_norm") and "student/grad_norm" in seen:
            health["norm_ratio"] = seen["student/grad_norm"] / seen["fake/grad_norm"]
        if "fake" in self.method.roles:
            health["fake_error"] = self._fake_error(latents)
        return health

    def _fake_error(self, latents: Sample) -> float:
        """Return the fake score's error on the clips of this look, at one time. Its training saw none of them."""
        fake, weights = self.method.roles["fake"], self.config.method.weights

        def of_batch(x: Sample, times: Times, noise: Sample, condition: Condition) -> Tensor:
            last = self.method.fake_last_step(times.t)
            return fake_score_error(fake, x, times, noise, condition, last).total(weights)[None]

        return self._means(latents, middle_time(fake), of_batch)[0]

    @torch.no_grad()
    def _means(self, latents: Sample, time: float, measure: Callable[..., Tensor]) -> list[float]:
        """Return the means over the clips of this look of what ``measure`` returns, ``(K, B)``, of B clips with their
        times, noises and conditions."""
        evaluator, count = self.evaluator, len(self.captions)
        mesh, device = evaluator.mesh, evaluator.device
        share = -(-count // mesh.dp_size)  # ranks run equally many forwards: the last ones repeat clips
        positions = range(mesh.dp_rank * share, (mesh.dp_rank + 1) * share)
        totals: list[float] = []
        with phase("guard/measures"), resharded([role.network for role in self.method.roles.values()]):
            for first in range(0, share, evaluator.batch):
                of_batch = positions[first : first + evaluator.batch]
                clips = [i % count for i in of_batch]
                x = latents[clips].to(device)
                times = Times(torch.full((len(x),), time, device=device), time)
                random = StepRandom(seed=SAMPLE_SEED, step=0, positions=clips, device=device)
                condition = noised(evaluator.data.condition([self.captions[i] for i in clips]).to(device), random)
                noise = noise_like(x, random, "guard/noise")
                rows = measure(x, times, noise, condition).tolist()
                sums = [sum(value for value, i in zip(row, of_batch, strict=True) if i < count) for row in rows]
                totals = [a + b for a, b in zip(totals or [0.0] * len(sums), sums, strict=True)]
        return [total / count for total in all_reduce_scalars(totals, mesh.dp)]
