"""Bounds and combinations of the configuration that its types cannot say."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from distill.data.moving_shapes import CAPTIONS
from distill.methods import METHODS, Method
from fsdp_cp.errors import UserError

if TYPE_CHECKING:  # which calls these
    from distill.config import Config, OptimizerSettings

ROLES = ("teacher", "student", "fake")
TRAINED = ("student", "fake")


def check(config: Config) -> None:
    """Refuse what no world, device or file could make right.

    Raises:
        UserError: naming the setting and a value that works.
    """
    _check_least(config)
    _check_choices(config)
    for name in TRAINED:
        _check_optimizer(f"optim.{name}", getattr(config.optim, name))
    if config.optim.clip is not None and config.optim.clip <= 0:
        raise UserError(f"optim.clip={config.optim.clip} must be above 0, or null for none")
    _check_samples(config)
    method = METHODS[config.method.name][0]
    method.check(config)
    if getattr(config.data, "name", None) == "captions":
        _check_captions(config, method)
    for item in fields(config.method):
        value = getattr(config.method, item.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"method.{item.name}={value} must be a finite number")
    if config.export.weights == "ema" and not config.student.ema.enabled:
        raise UserError("export.weights=ema needs student.ema.enabled=true")
    decay = config.student.ema.decay
    if decay is not None and not 0 <= decay < 1:
        raise UserError(f"student.ema.decay={decay} must be at least 0 and below 1, or null for the power schedule")


def _check_captions(config: Config, method: type[Method]) -> None:
    """There are no real clips to train on, nor to compare with."""
    if method.needs_latents(config.method):
        raise UserError(
            f"method={config.method.name} trains on real clips, and data=captions has none; use data=video_folder, or"
            " method=dmd2 with method.gan_weight_student=0"
        )
    if config.sample.report_clips:
        raise UserError(
            f"sample.report_clips={config.sample.report_clips} compares with real clips, and data=captions has none;"
            " use sample.report_clips=0"
        )


def _check_least(config: Config) -> None:
    for name, value, least in (
        ("steps", config.steps, 1),
        ("seed", config.seed, 0),
        ("batch_size", config.batch_size, 1),
        ("checkpoint.every", config.checkpoint.every, 0),
        ("checkpoint.keep", config.checkpoint.keep, 0),
        ("log.every", config.log.every, 1),
        ("log.norms_every", config.log.norms_every, 0),
        ("sample.every", config.sample.every, 0),
        ("sample.prompts", config.sample.prompts, 1),
        ("sample.report_clips", config.sample.report_clips, 0),
        ("optim.max_skipped", config.optim.max_skipped, 1),
        ("attention.head_groups", config.attention.head_groups, 1),
        ("student.ema.start", config.student.ema.start, 0),
        ("student.ema.gamma", config.student.ema.gamma, 0),
    ):
        if value < least:
            raise UserError(f"{name}={value} must be at least {least}")


def _check_choices(config: Config) -> None:
    for name, value, choices in (
        ("precision", config.precision, ("fp32", "bf16")),
        *((f"{role}.precision", getattr(config, role).precision, ("fp32", "bf16")) for role in ROLES),
        ("device", config.device, ("auto", "cpu", "cuda")),
        ("export.weights", config.export.weights, ("auto", "raw", "ema")),
        ("export.dtype", config.export.dtype, ("fp32", "bf16")),
    ):
        if value not in choices:
            raise UserError(f"{name}={value} is unknown; use {' or '.join(choices)}")


def _check_optimizer(where: str, settings: OptimizerSettings) -> None:
    for key, choices in (
        ("schedule", ("constant", "cosine")),
        ("implementation", ("foreach", "fused", "for_loop")),
    ):
        if getattr(settings, key) not in choices:
            raise UserError(f"{where}.{key}={getattr(settings, key)} is unknown; use {' or '.join(choices)}")
    for key in ("lr", "eps", "weight_decay", "warmup", "final_lr"):
        if not 0 <= getattr(settings, key) < math.inf:
            raise UserError(f"{where}.{key}={getattr(settings, key)} must be at least 0")
    if len(settings.betas) != 2 or not all(0 <= b < 1 for b in settings.betas):
        raise UserError(f"{where}.betas={settings.betas} must be two numbers of at least 0 and below 1")
    if not _is_scales(settings.lr_scale):
        raise UserError(
            f"{where}.lr_scale={settings.lr_scale} must be factors of at least 0 by pattern, as"
            " {patch_embedding.*: 0.1}, or null for none"
        )


def _is_scales(scales: Any) -> bool:
    if scales is None:
        return True
    return isinstance(scales, dict) and all(
        isinstance(pattern, str)
        and isinstance(factor, int | float)
        and not isinstance(factor, bool)
        and 0 <= factor < math.inf
        for pattern, factor in scales.items()
    )


def _check_samples(config: Config) -> None:
    """Samples are made at the end too: steps that the sampler refuses would be found after the training."""
    most = len(config.method.student_times()) if hasattr(config.method, "student_times") else math.inf
    for name, value, limit in (
        ("sample.student_steps", config.sample.student_steps, most),
        ("sample.teacher_steps", config.sample.teacher_steps, math.inf),
    ):
        if any(not 1 <= steps <= limit for steps in value) or (name == "sample.student_steps" and not value):
            raise UserError(f"{name}={value} must be numbers from 1" + (f" to {limit}" if limit < math.inf else " on"))
    if getattr(config.data, "name", None) == "moving_shapes":
        for caption in config.sample.captions:
            if caption not in CAPTIONS:
                raise UserError(
                    f"sample.captions: {caption!r} is not a caption of moving_shapes; use for example {CAPTIONS[0]!r}"
                )


def micro_batch_size(config: Config, dp_size: int) -> int:
    """Samples per data-parallel rank and forward.

    Raises:
        UserError: a batch that does not divide into them.
    """
    if config.batch_size % dp_size:
        raise UserError(
            f"batch_size={config.batch_size} is not a multiple of the {dp_size} data-parallel ranks;"
            f" use batch_size={max(1, config.batch_size // dp_size) * dp_size}"
        )
    local = config.batch_size // dp_size
    micro = config.micro_batch_size if config.micro_batch_size is not None else local
    if micro < 1 or local % micro:
        fitting = ", ".join(str(d) for d in range(1, local + 1) if local % d == 0)
        raise UserError(
            f"micro_batch_size={micro} does not divide batch_size / data-parallel ranks ="
            f" {config.batch_size} / {dp_size} = {local}; use {fitting}"
        )
    return micro
