"""Flow matching (Lipman et al. 2022, eq. 23; Esser et al. 2024): train or fine-tune a teacher on data.

A causal student draws one time per chunk. Its history is clean (teacher forcing), or noisy at the earlier chunks' times
(diffusion forcing, Chen et al. 2024, arXiv:2407.01392). The parallel pass trains what sampling by chunks computes.

A base whose guidance is built in predicts ``u + s (c - u)``, where plain fits would train ``c``. ``built_in_guidance``
fits ``(v_c + (s - 1) sg v_u) / s`` instead (musubi-tuner, docs/minimax_h3.md), whose optimum keeps the guidance.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor

from distill.methods.base import Batch, Loss, Method, PartSettings
from distill.methods.common.chunks import CausalRoles, chunk_draws, clean_history
from distill.methods.common.expert_times import Times, draw_times
from distill.methods.common.observations import squared_error
from distill.methods.common.sampling import Sampler, guided_states
from distill.methods.common.schedules import add_noise
from fsdp_cp.choices import Bounds, NonNegativeFloat, PositiveFloat, Share
from fsdp_cp.errors import UserError
from fsdp_cp.measure.fake_world import real_tensors
from fsdp_cp.rng import StepRandom
from models.condition import Condition
from models.sample import Sample, shift_time

if TYPE_CHECKING:
    from models.roles.role_plan import RolePlan

TimeDistribution = Literal["uniform", "logit_normal"]


@dataclass(kw_only=True)
class FlowMatchingSettings(PartSettings):
    """``method=flow_matching``."""

    name: str = "flow_matching"
    time: TimeDistribution = "logit_normal"
    """Distribution of t before the shift: ``logit_normal`` or ``uniform``. ``uniform`` with Wan's ``shift`` trains at
    the times at which Wan is sampled."""
    logit_mean: float = 0.0
    """Mean of logit(t), for ``logit_normal``."""
    logit_std: PositiveFloat = 1.0
    """Standard deviation of logit(t), for ``logit_normal``; > 0."""
    shift: PositiveFloat = 1.0
    """Time shift of training and sampling, > 0; above 1 for more noise. Wan: 3 at 480p, 5 at 720p."""
    weight: Literal["none", "gaussian"] = "none"
    """Weight of the loss at a time t: ``none``, or ``gaussian``, ``exp(-2 (t - 1/2)^2)`` less its value at 1, scaled to
    a mean of 1 over uniform times with this ``shift`` (Self-Forcing, Causal-Forcing, DiffSynth)."""
    caption_dropout: Share = 0.1
    """Probability that a sample trains on the empty caption, which guidance needs; 0 to 1."""
    sampler: Sampler = "euler"
    """Sampler: ``euler``, or ``unipc``, which Wan's pipelines use."""
    history: Literal["clean", "noisy"] = "noisy"
    """Earlier chunks that a causal student sees in training: ``clean`` (teacher forcing, as in sampling), or ``noisy``
    at their own times (diffusion forcing). A bidirectional student has one chunk and no history."""
    built_in_guidance: Annotated[float, Bounds(least=1)] = 1.0
    """Guidance scale ``s`` that was distilled into the base, and stays in the student; 1 for none, at least 1."""
    null: Literal["frozen", "live"] = "frozen"
    """Unconditional branch under ``built_in_guidance``: ``frozen``, that of the role ``teacher``, which is the base; or
    ``live``, the student's own, which drifts without an anchor."""
    anchor_weight: NonNegativeFloat = 0.0
    """Weight of a loss that holds the student's unconditional branch at that of ``teacher``, the base; 0 for none."""
    anchor_min_time: Share = 0.9
    """Least time of the anchor's loss, 0 to 1."""
    guidance_min_time: Share = 0.0
    """Least time of a fit under ``built_in_guidance``, 0 to 1; the fit below is plain, without a second forward."""
    keep_weight: NonNegativeFloat = 0.0
    """Weight of a term that holds the student's output for captions at that of ``teacher``, the base; 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        built_in = self.built_in_guidance
        if built_in == 1.0:
            names = ("null", "anchor_weight", "anchor_min_time", "guidance_min_time")
            self._refuse_changed(names, "built_in_guidance above 1")
            return
        if self.anchor_weight == 0.0:
            self._refuse_changed(("anchor_min_time",), "anchor_weight above 0")
        wanted = {"caption_dropout": (0.0,), **dict.fromkeys(self.guidance_scales, (1.0, None))}
        for name, allowed in wanted.items():
            if (value := getattr(self, name)) not in allowed:
                why = f"with method.built_in_guidance={built_in}, which the student keeps"
                raise UserError(f"method.{name}={value} must be {allowed[0]:g} {why}")

    def _refuse_changed(self, names: Collection[str], wanted: str) -> None:
        """Refuse settings ``names`` with other values than their defaults, which are read only with ``wanted``."""
        for name in names:
            default = getattr(FlowMatchingSettings, name)
            if (value := getattr(self, name)) != default:
                raise UserError(f"method.{name}={value} is for method.{wanted}; set it, or use {name}={default}")

    @property
    def needing_base(self) -> list[str]:
        """Settings that need the base, which is the role ``teacher``."""
        needing = ["null=frozen"] if self.built_in_guidance > 1 and self.null == "frozen" else []
        weights = {"anchor_weight": self.anchor_weight, "keep_weight": self.keep_weight}
        return needing + [f"{name}={weight}" for name, weight in weights.items() if weight]

    @property
    def remedies(self) -> list[str]:
        drifts = self.built_in_guidance > 1 and self.null == "live" and not self.anchor_weight
        return [*(["set method.null=frozen or method.anchor_weight"] if drifts else []), *super().remedies]

    @property
    def time_bounds(self) -> list[float]:
        """Times between which a step runs the same forwards."""
        if self.built_in_guidance == 1.0:
            return []
        return [self.guidance_min_time, *([self.anchor_min_time] if self.anchor_weight else [])]


class FlowMatching(Method):
    """Flow matching of the role ``student``. The loss is ``mean w(t) (v(x_t, t, c) - (e - x0))^2``. Built-in guidance
    may need its base, the role ``teacher``; adapters share that network."""

    required_roles = ("student",)
    guided_roles = ("student", "teacher")
    knows_experts = True
    settings: FlowMatchingSettings
    guidance_bands = (0.0, 0.5, 0.8, 0.9)  # most of the field is at high noise (musubi-tuner)

    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        times = self._times(batch, random)
        yield Loss("flow_matching", lambda: self._loss(batch, times, random), at=times.at)
        weight = self.settings.anchor_weight
        if weight and times.at >= self.settings.anchor_min_time:
            yield Loss("anchor", lambda: self._anchor(batch, times, random), weight, times.at)

    @classmethod
    def roles_needed(cls, settings: Any) -> tuple[str, ...]:
        return ("teacher", "student") if settings.needing_base else cls.required_roles

    @classmethod
    def check_given(cls, config: Any) -> None:
        needing, base = config.method.needing_base, config.teacher
        if needing and base.checkpoint is None and base.architecture is None:
            raise UserError(f"method.{needing[0]} needs the base as the role teacher; set teacher.checkpoint")

    @classmethod
    def check_roles(cls, config: Any, roles: Mapping[str, "RolePlan"]) -> None:
        super().check_roles(config, roles)
        family, data = roles["student"].family, config.data
        if config.method.built_in_guidance == 1 or family.knows_empty_text:
            return
        negative, image = (getattr(data, name, None) for name in ("negative_prompt", "image"))
        if negative == "" and image is None:  # images are a text of their own
            lacks = f"data.negative_prompt='' has no token, and {family.name} was not trained with such a text"
            raise UserError(f"{lacks}, which method.built_in_guidance needs; use a space, \"data.negative_prompt=' '\"")

    @classmethod
    def check_parts(cls, settings: Any, parts: Collection[str]) -> None:
        if settings.weight != "none":
            raise UserError(f"method.weight={settings.weight} is for models of video alone; use method.weight=none")

    @classmethod
    def check_causal(cls, settings: Any, causal: CausalRoles) -> None:
        if settings.history == "clean" and causal["student"] is None:
            raise UserError("method.history=clean is for a causal student; set student.causal.chunk, or use noisy")
        for name, without in (("built_in_guidance", 1), ("keep_weight", 0)):
            if (value := getattr(settings, name)) != without and any(causal.values()):
                raise UserError(f"method.{name}={value} is not for causal roles; use {without}")

    def _draw(self, random: StepRandom, purpose: str, dtype: torch.dtype) -> list[Tensor]:
        return [draw_time(self.settings, self.settings.shift, random, purpose, dtype)]

    def _loss(self, batch: Batch, times: Times, random: StepRandom) -> Tensor:
        x0, student, (t, at) = batch.latents, self.student, times
        noise = batch.noise(random, "flow_matching/noise", student)
        dropped = random.uniform("flow_matching/caption_dropout") < self.settings.caption_dropout
        condition = Condition.where(dropped, batch.condition.empty, batch.condition)
        clean = None
        if self.settings.history == "clean":
            clean = clean_history(student, x0, random, "flow_matching/context")
        x, s = add_noise(x0, noise, t), self.settings
        guided = s.built_in_guidance > 1 and at >= s.guidance_min_time
        branch = "teacher" if s.null == "frozen" else "student"
        null = self._fixed(branch, x, batch.condition.null, times) if guided else None
        base = self._fixed("teacher", x, condition, times) if s.keep_weight else None
        v = student.velocity(x, t, condition, at=at, clean=clean)
        kept = None if base is None else self.total("keep", squared_error(v, base))
        if null is not None:
            v = (v + null * (s.built_in_guidance - 1)) / s.built_in_guidance
        errors = self.total("loss", squared_error(v, noise - x0, t))
        self.observations.add_by_time("loss", errors, t)
        self.observations.add_latents("data", x0)
        fit = errors.mean() if s.weight == "none" else (gaussian(t, s.shift) * errors).mean()
        if kept is None:
            return fit
        self.observations.add("keep", kept)
        return fit + s.keep_weight * kept.mean()

    @torch.no_grad()
    def _fixed(self, role: str, x: Sample, condition: Condition, times: Times) -> Sample:
        """Return the output of ``role`` at the states ``x``, without gradient."""
        return self.roles[role].velocity(x, times.t, condition, at=times.at)

    def guidance_field(self, x: Sample, times: Times, condition: Condition) -> Tensor:
        """Compare ``v_c`` and the base's ``c``, both less the base's unconditional branch: the student's own may have
        drifted away from a guided output that is right."""
        null = self._fixed("teacher", x, condition.null, times)
        student, base = (self._fixed(role, x, condition, times) - null for role in ("student", "teacher"))

        def dot(one: Sample, other: Sample) -> Tensor:
            return torch.stack([*(one * other).map(lambda part: part.flatten(1).sum(1)).parts.values()]).sum(0)

        # A base that knows no captions has a field of zero.
        own, its = (dot(field, field).sqrt().clamp_min(1e-12) for field in (student, base))
        error = student - base
        return torch.stack([own / its, dot(student, base) / (own * its), dot(error, error).sqrt() / its])

    def _anchor(self, batch: Batch, times: Times, random: StepRandom) -> Tensor:
        """Return the squared distance of the student's unconditional branch from the base's."""
        student = self.student
        x = add_noise(batch.latents, batch.noise(random, "flow_matching/noise", student), times.t)
        target = self._fixed("teacher", x, batch.condition.null, times)
        v = student.velocity(x, times.t, batch.condition.null, at=times.at)
        return self.total("anchor", squared_error(v, target)).mean()

    def _times(self, batch: Batch, random: StepRandom) -> Times:
        student, purpose = self.student, "flow_matching/time"
        if student.causal is None:
            roles, bounds = tuple(self.roles.values()), self.settings.time_bounds
            return draw_times(self._draw, random, purpose, batch.dtype, [roles], student, bounds)[0]
        return Times(chunk_draws(student, batch.frames, lambda name: self._draw(random, name, batch.dtype)[0], purpose))

    def stream(
        self, role: str, noise: Iterable[Sample], condition: Condition, steps: int, random: StepRandom
    ) -> Iterator[Sample]:
        s = self.settings
        states = guided_states(self.roles[role], noise, condition, random, s.sampler, steps, s.shift, s.guidance)
        return (chunk[-1] for chunk in states)


def gaussian(t: Tensor, shift: float) -> Tensor:
    """Return the weights of times ``t`` as in ``training_weight`` of Self-Forcing's ``utils/scheduler.py``: 0 at t = 1,
    with the mean 1 over the source's 1000 training times of this shift."""
    least = math.exp(-0.5)
    with real_tensors():  # a plan's tensors have no values
        nodes = shift_time(torch.arange(1, 1001, dtype=torch.float64) / 1000, shift)
        mean = (torch.exp(-2 * (nodes - 0.5).square()) - least).mean().item()
    return (torch.exp(-2 * (t - 0.5).square()) - least) / mean


def draw_time(settings: Any, shift: float, random: StepRandom, purpose: str, dtype: torch.dtype) -> Tensor:
    """Draw times ``(B,)``, fp32 or better, by ``settings.time``, ``logit_mean`` and ``logit_std`` (Esser et al. 2024),
    then shifted."""
    if settings.time == "uniform":
        t = random.uniform(purpose, dtype)
    else:
        t = torch.sigmoid(settings.logit_mean + settings.logit_std * random.normal(purpose, (), dtype))
    return shift_time(t, shift)


METHOD = (FlowMatching, FlowMatchingSettings)
