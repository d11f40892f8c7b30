"""Checks of combinations of settings that do not depend on the world, the device or files."""

from __future__ import annotations

from pathlib import Path

from distill.config.schema import Config
from distill.methods import METHODS
from fsdp_cp.errors import UserError, shown


def check(config: Config) -> None:
    """Raise ``UserError`` for a combination that cannot work. Each dataclass has already checked its own values."""
    method = METHODS[config.method.name][0]
    name, data = config.method.name, config.data.name
    if config.world is not None and not (config.dry_run or config.plan):
        raise UserError(f"world={config.world} needs dry_run=true or plan=true; torchrun sets the world of a run")
    method.check(config)
    if not config.data.has_clips and method.needs_latents(config.method):
        raise UserError(
            f"method={name} trains on real clips, and data={data} has none; use data=video_folder, or method=dmd2 with"
            " method.gan_weight_student=0, method.student_input=rollout and method.data_forcing=0"
        )
    if not config.data.has_clips and config.sample.report_clips:
        raise UserError(
            f"sample.report_clips={config.sample.report_clips} compares with real clips, and data={data} has none; use"
            " sample.report_clips=0"
        )
    if config.export.weights == "ema" and not config.student.ema.enabled:
        raise UserError("export.weights=ema needs student.ema.enabled=true")
    if config.profile.steps and config.profile.steps[1] > config.steps:
        raise UserError(f"profile.steps={shown(config.profile.steps)} must be at most steps={config.steps}")
    # Check the sampler's steps now: samples at the end of the run would otherwise fail after training.
    if hasattr(config.method, "student_times"):
        most = len(config.method.student_times())
        times = "mid_times" if hasattr(config.method, "mid_times") else "step_list"
        if max(config.sample.student_steps) > most:
            raise UserError(
                f"sample.student_steps={shown(config.sample.student_steps)} must be at most {most}, the number of the"
                f" student's times (method.{times})"
            )
    if "expandable_segments:True" in (config.cuda_allocator or ""):
        for role in ("teacher", "student", "fake"):
            if (buffers := getattr(config, role).communication_buffers) in ("process_group", "symmetric"):
                raise UserError(
                    f"{role}.communication_buffers={buffers} registers memory with NCCL, which"
                    f" cuda_allocator={config.cuda_allocator} does not allow; use cuda_allocator=null"
                )
    check_images(config)
    config.data.check_captions(config.sample.captions)


def check_images(config: Config) -> None:
    """Check that the model takes ``sample.images``, and that they exist and match ``sample.captions``."""
    images, captions = config.sample.images, config.sample.captions
    if not images:
        return
    if getattr(config.data, "image", None) is None:
        raise UserError(
            f"sample.images={shown(images)} are for an image-to-video model, and data.image is not set; use"
            " data.image=first_frame with data=video_folder, or leave them out"
        )
    if len(images) != len(captions) or len(set(captions)) < len(captions):
        raise UserError(
            f"sample.images has {len(images)} images and sample.captions {len(set(captions))} different captions; give"
            " one for each"
        )
    for file in images:
        if not Path(file).expanduser().is_file():
            raise UserError(f"sample.images: {file} is not a file; give an image or a video")


def micro_batch_size(config: Config, dp_size: int) -> int:
    """Return the number of samples per data-parallel rank and forward."""
    if config.batch_size % dp_size:
        raise UserError(
            f"batch_size={config.batch_size} is not a multiple of the {dp_size} data-parallel ranks;"
            f" use batch_size={max(1, config.batch_size // dp_size) * dp_size}"
        )
    local, draws = config.batch_size // dp_size, config.expert_draws
    if local % draws:
        raise UserError(
            f"expert_draws={draws} does not divide batch_size / data-parallel ranks ="
            f" {config.batch_size} / {dp_size} = {local}; use {_divisors(local, draws)}"
        )
    drawn = local // draws
    micro = config.micro_batch_size if config.micro_batch_size is not None else drawn
    if drawn % micro:
        by, value = (" / expert_draws", f" / {draws}") if draws > 1 else ("", "")
        raise UserError(
            f"micro_batch_size={micro} does not divide batch_size / data-parallel ranks{by} ="
            f" {config.batch_size} / {dp_size}{value} = {drawn}; use {_divisors(drawn, micro)}"
        )
    return micro


def _divisors(number: int, near: int) -> str:
    """Return the eight divisors of ``number`` nearest to ``near``, as text."""
    fitting = sorted((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - near))[:8]
    return ", ".join(map(str, sorted(fitting)))
