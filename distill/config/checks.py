"""Bounds and combinations of the configuration that its types cannot say."""

from __future__ import annotations

import math
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from distill.config.kinds import fits, settings_of
from distill.config.schema import Config, OptimizerSettings
from distill.methods import METHODS, Method
from fsdp_cp.choices import check_choices
from fsdp_cp.errors import UserError, shown

ROLES = ("teacher", "student", "fake")
TRAINED = ("student", "fake")
_SMALLEST, _LARGEST = 1e-37, 3e38
"""Sizes of numbers that fp32 holds."""
_MOST = 2**20
_WEEK = 7 * 24 * 60
"""In minutes."""
_NOTES = ("_class_name", "_diffusers_version", "_name_or_path")
"""What diffusers writes beside a network's configuration."""
_ALLOCATOR = re.compile(r"\w+:(\[[^\]\s]+\]|[^\[\],\s]+)(,\w+:(\[[^\]\s]+\]|[^\[\],\s]+))*", re.ASCII)


def check(config: Config) -> None:
    """Refuse what no world, device or file could make right.

    Raises:
        UserError: naming the setting and a value that works.
    """
    _check_values(config, "")
    _check_least(config)
    for name in ROLES:
        _check_architecture(f"{name}.architecture", getattr(config, name).architecture)
    if config.cuda_allocator is not None and not _ALLOCATOR.fullmatch(config.cuda_allocator):
        raise UserError(
            f"cuda_allocator={config.cuda_allocator} cannot be read; use name:value, with commas between, as"
            " expandable_segments:True"
        )
    if config.world is not None and not (config.dry_run or config.plan):
        raise UserError(
            f"world={config.world} is for dry_run=true and plan=true; a run's world is what torchrun starts"
        )
    if config.dry_run and config.plan:
        raise UserError("dry_run=true and plan=true are two things; use one of them")
    for name in TRAINED:
        _check_optimizer(f"optim.{name}", getattr(config.optim, name))
    if config.optim.clip is not None and config.optim.clip <= 0:
        raise UserError(f"optim.clip={config.optim.clip} must be above 0, or null for none")
    _check_samples(config)
    _check_profile(config)
    method = METHODS[config.method.name][0]
    method.check(config)
    if not config.data.has_clips:
        _check_captions(config, method)
    if config.timeout.step > config.timeout.start:
        raise UserError(
            f"timeout.step={config.timeout.step} must be at most timeout.start={config.timeout.start}: a first step"
            " takes longer than later ones"
        )
    if config.export.weights == "ema" and not config.student.ema.enabled:
        raise UserError("export.weights=ema needs student.ema.enabled=true")
    for name in TRAINED:
        ema = getattr(config, name).ema
        if ema.decay is not None and not 0 <= ema.decay < 1:
            raise UserError(
                f"{name}.ema.decay={ema.decay} must be at least 0 and below 1, or null for the power schedule"
            )
        if ema.enabled and name not in method.trained_roles and name not in method.settings_read:
            raise UserError(f"{name}.ema.enabled=true: method={config.method.name} trains no {name}; leave it out")


def _check_captions(config: Config, method: type[Method]) -> None:
    """There are no real clips to train on, nor to compare with."""
    if method.needs_latents(config.method):
        raise UserError(
            f"method={config.method.name} trains on real clips, and data={config.data.name} has none; use"
            " data=video_folder, or method=dmd2 with method.gan_weight_student=0"
        )
    if config.sample.report_clips:
        raise UserError(
            f"sample.report_clips={config.sample.report_clips} compares with real clips, and"
            f" data={config.data.name} has none; use sample.report_clips=0"
        )


def _check_values(settings: Any, prefix: str) -> None:
    """What OmegaConf lets through: lists among numbers, and numbers of which nothing is left in a network."""
    check_choices(settings, prefix)
    hints = get_type_hints(type(settings))
    for item in fields(settings):
        key, value = f"{prefix}{item.name}", getattr(settings, item.name)
        if is_dataclass(value):
            _check_values(value, f"{key}.")
            continue
        if not fits(value, hints[item.name]):
            words = dict(settings_of(type(settings), prefix))[key].words(key)
            raise UserError(f"{key}={shown(value)} must be {words}")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):  # NaN would pass every bound below
                raise UserError(f"{key}={shown(value)} must be finite; give a number")
            if isinstance(number, float) and number != 0 and not _SMALLEST <= abs(number) <= _LARGEST:
                raise UserError(f"{key}={shown(value)} is 0 or infinite in fp32; use 0, or {_SMALLEST} to {_LARGEST}")
            if isinstance(number, int) and abs(number) >= 2**63:
                raise UserError(f"{key}={shown(value)} is too large; use less than 2^63 = {2**63}")


def _check_least(config: Config) -> None:
    for name, value, least, most in (
        ("steps", config.steps, 1, math.inf),
        ("seed", config.seed, 0, math.inf),
        ("batch_size", config.batch_size, 1, _MOST),
        *([("world", config.world, 1, _MOST)] if config.world is not None else []),
        ("checkpoint.every", config.checkpoint.every, 0, math.inf),
        ("checkpoint.keep", config.checkpoint.keep, 0, math.inf),
        ("checkpoint.keep_every", config.checkpoint.keep_every, 0, math.inf),
        ("log.every", config.log.every, 1, math.inf),
        ("log.norms_every", config.log.norms_every, 0, math.inf),
        ("sample.every", config.sample.every, 0, math.inf),
        ("sample.prompts", config.sample.prompts, 1, _MOST),
        ("sample.report_clips", config.sample.report_clips, 0, _MOST),
        ("optim.max_skipped", config.optim.max_skipped, 1, math.inf),
        ("attention.head_groups", config.attention.head_groups, 1, math.inf),
        *((f"{name}.ema.start", getattr(config, name).ema.start, 0, math.inf) for name in TRAINED),
        *((f"{name}.ema.gamma", getattr(config, name).ema.gamma, 0, math.inf) for name in TRAINED),
        ("timeout.start", config.timeout.start, 0.01, _WEEK),
        ("timeout.step", config.timeout.step, 0.01, _WEEK),
    ):
        if value < least:
            raise UserError(f"{name}={value} must be at least {least}")
        if value > most:  # lists of that length, or loops, on the way
            raise UserError(f"{name}={value} must be at most {most}")


def _check_architecture(where: str, architecture: Any) -> None:
    if architecture is None:
        return
    if not isinstance(architecture, dict):
        raise UserError(
            f"{where}={shown(architecture)} must be a network's configuration, as {{num_layers: 4}}, or null"
        )
    for key in architecture:
        if not isinstance(key, str) or (key.startswith("_") and key not in _NOTES):
            raise UserError(f"{where} has {key}, which no network has; leave it out")


def _check_optimizer(where: str, settings: OptimizerSettings) -> None:
    for key in ("lr", "eps", "weight_decay", "warmup", "final_lr"):
        if not 0 <= getattr(settings, key) < math.inf:
            raise UserError(f"{where}.{key}={getattr(settings, key)} must be at least 0")
    if settings.additions_lr is not None:
        if not 0 <= settings.additions_lr < math.inf:
            raise UserError(f"{where}.additions_lr={settings.additions_lr} must be at least 0, or null for {where}.lr")
        if settings.lr == 0:  # it is kept as a factor of lr
            raise UserError(f"{where}.lr=0 with {where}.additions_lr={settings.additions_lr}: use {where}.lr=1e-20")
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
    most = len(config.method.student_times()) if hasattr(config.method, "student_times") else _MOST
    for name, value, limit in (
        ("sample.student_steps", config.sample.student_steps, most),
        ("sample.teacher_steps", config.sample.teacher_steps, _MOST),
    ):
        if any(not 1 <= steps <= limit for steps in value) or (name == "sample.student_steps" and not value):
            times = "method.mid_times" if hasattr(config.method, "mid_times") else "method.step_list"
            why = f", as many as the student has times ({times})" if name == "sample.student_steps" else ""
            raise UserError(f"{name}={value} must be numbers from 1 to {limit}{why if limit != _MOST else ''}")
        if len(set(value)) < len(value):
            raise UserError(f"{name}={value} names a number twice; leave one out")
    check_images(config)
    config.data.check_captions(config.sample.captions)


def _check_profile(config: Config) -> None:
    """What needs no world; the rest is distill/profiling.py's."""
    steps, ranks = config.profile.steps, config.profile.ranks
    if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= config.steps):
        raise UserError(
            f"profile.steps={shown(steps)} must be the first and the last step, from 1 to steps={config.steps}, as"
            f" profile.steps=[{min(2, config.steps)},{min(4, config.steps)}]"
        )
    numbers = isinstance(ranks, list) and all(isinstance(r, int) and not isinstance(r, bool) for r in ranks)
    if ranks != "all" and (not numbers or not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks)):
        raise UserError(f"profile.ranks={shown(ranks)} must be ranks from 0 on, each once, as [0,8], or all")
    if config.profile.memory and not steps:
        raise UserError(
            "profile.memory=true records the steps of profile.steps, and there are none; add profile.steps=[20,22]"
        )


def check_images(config: Config) -> None:
    """``sample.images`` against the data set and ``sample.captions``.

    Raises:
        UserError: images that nobody looks at, or are not one for each caption, or are not there.
    """
    images, captions = list(config.sample.images), list(config.sample.captions)
    if not images:
        return
    if getattr(config.data, "image", None) is None:
        raise UserError(
            f"sample.images={images} are for an image-to-video model, and data.image is not set; use"
            " data.image=first_frame with data=video_folder, or leave them out"
        )
    if len(images) != len(captions):
        raise UserError(
            f"sample.images has {len(images)} images and sample.captions {len(captions)} captions; give one for each"
        )
    if len(set(captions)) < len(captions):
        raise UserError("sample.captions names a caption twice; with sample.images give each a caption of its own")
    for file in images:
        if not Path(file).expanduser().is_file():
            raise UserError(f"sample.images: {file} is not a file; give an image or a video")


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
    local, draws = config.batch_size // dp_size, config.expert_draws
    if draws < 1:
        raise UserError(f"expert_draws={draws} is no number of parts; use 1, or more for roles of two experts")
    if local % draws:
        fits = -(-local // draws) * draws * dp_size
        raise UserError(
            f"expert_draws={draws} does not divide batch_size / data-parallel ranks ="
            f" {config.batch_size} / {dp_size} = {local}; use {_divisors(local, draws)}, or batch_size={fits}"
        )
    part = local // draws
    micro = config.micro_batch_size if config.micro_batch_size is not None else part
    if micro < 1 or part % micro:
        by, value = (" / expert_draws", f" / {draws}") if draws > 1 else ("", "")
        raise UserError(
            f"micro_batch_size={micro} does not divide batch_size / data-parallel ranks{by} ="
            f" {config.batch_size} / {dp_size}{value} = {part}; use {_divisors(part, micro)}"
        )
    return micro


def _divisors(of: int, near: int) -> str:
    """At most eight, in words: the nearest ones."""
    fitting = sorted((d for d in range(1, of + 1) if of % d == 0), key=lambda d: abs(d - near))[:8]
    return ", ".join(map(str, sorted(fitting)))
