"""Checks of combinations of settings that do not depend on the world, the device or files."""

from itertools import accumulate
from math import gcd
from pathlib import Path

from distill.config.schema import Config
from distill.data.base import IMAGES, image_files
from distill.methods import METHODS
from fsdp_cp.errors import UserError, counted, shown


def check(config: Config) -> None:
    """Raise ``UserError`` for a combination that cannot work. Each dataclass has already checked its own values."""
    if config.world is not None and not (config.dry_run or config.plan):
        raise UserError(f"world={config.world} needs dry_run=true or plan=true; torchrun sets the world of a run")
    if config.dry_run and config.plan:
        raise UserError("dry_run=true writes nothing, and plan writes its page; leave dry_run or plan out")
    METHODS[config.method.name][0].check(config)
    check_clips(config)
    if config.export.weights == "ema" and not config.student.ema.enabled:
        raise UserError("export.weights=ema needs student.ema.enabled=true")
    if config.profile.steps and config.profile.steps[1] > config.steps:
        raise UserError(f"profile.steps={shown(config.profile.steps)} must be at most steps={config.steps}")
    counts = config.sample.student_steps
    config.method.check_steps(counts, f"sample.student_steps={shown(counts)}")  # samples would fail after training
    check_allocator(config)
    check_guard(config)
    check_images(config)
    config.data.check_captions(config.sample.captions)


def check_clips(config: Config) -> None:
    """Check that the data have real clips where the method or the report needs them."""
    name, data, clips = config.method.name, config.data.name, config.sample.report_clips
    if config.data.has_clips:
        return
    if METHODS[name][0].needs_latents(config.method):
        needs = "data=video_folder, or dmd2 without GAN, method.data_forcing and method.student_input=clips"
        raise UserError(f"method={name} trains on real clips, and data={data} has none; use {needs}")
    if clips:
        raise UserError(f"sample.report_clips={clips} needs real clips, and data={data} has none; use 0")


def check_allocator(config: Config) -> None:
    """Check that CUDA's memory can be registered with NCCL where a role asks for it."""
    if "expandable_segments:True" not in (config.cuda_allocator or ""):
        return
    for role in ("teacher", "student", "fake"):
        if (buffers := getattr(config, role).communication_buffers) in ("process_group", "symmetric"):
            refused = f"{role}.communication_buffers={buffers}, which registers memory with NCCL"
            raise UserError(f"cuda_allocator={config.cuda_allocator} does not allow {refused}; use null")


def check_guard(config: Config) -> None:
    """Check that a guard that acts looks, and with ``keep`` at the student of each checkpoint, of which some go."""
    chosen, looks = config.checkpoint, config.guard.every
    if config.guard.action != "warn" and not looks:
        raise UserError(f"guard.action={config.guard.action} needs a guard that looks; set guard.every, e.g. 10")
    if config.guard.action != "keep":
        return
    if not (chosen.every and chosen.keep):
        raise UserError(
            f"guard.action=keep must have checkpoint.every and checkpoint.keep above 0, got {chosen.every} and"
            f" {chosen.keep}; use these, or guard.action=warn (checkpoint.keep=0 keeps all checkpoints)"
        )
    method = METHODS[config.method.name][0](config.method, {})
    counts = list(accumulate(method.trained_role(step) == "student" for step in range(config.steps)))
    between = gcd(*counts[chosen.every - 1 :: chosen.every])
    if between % looks:
        raise UserError(
            f"guard.every={looks} must divide the student's {between} updates in checkpoint.every={chosen.every} steps;"
            f" use {divisors(between, looks)}"
        )


def check_images(config: Config) -> None:
    """Check that the model takes ``sample.images``, and that they exist and match ``sample.captions``."""
    images, captions = config.sample.images, config.sample.captions
    if not images:
        return
    if (kind := getattr(config.data, "image", None)) is None:
        hint = "set data.image=first_frame, or leave them out"
        raise UserError(f"sample.images={shown(images)} are for models of images, and data.image is null; {hint}")
    each = len(IMAGES[kind])
    if len(images) != each * len(captions) or len(set(captions)) < len(captions):
        given = f"{counted(len(images), 'image')} and {len(set(captions))} different captions"
        raise UserError(f"sample.images must be {each} for each of sample.captions, in their order, got {given}")
    for file in (file for text in images for file in image_files(text, kind)):
        if not Path(file).is_file():
            raise UserError(f"sample.images: {file} is not a file; give an image or a video")


def micro_batch_size(config: Config, dp_size: int) -> int:
    if config.batch_size % dp_size:
        fit = f"batch_size={max(1, config.batch_size // dp_size) * dp_size}"
        raise UserError(f"batch_size={config.batch_size} is not a multiple of {dp_size} data-parallel ranks; use {fit}")
    local, draws = config.batch_size // dp_size, config.expert_draws
    if local % draws:
        value = f"batch_size / data-parallel ranks = {config.batch_size} / {dp_size} = {local}"
        raise UserError(f"expert_draws={draws} must divide {value}; use {divisors(local, draws)}")
    drawn = local // draws
    micro = config.micro_batch_size if config.micro_batch_size is not None else drawn
    if drawn % micro:
        by, numbers = (" / expert_draws", f" / {draws}") if draws > 1 else ("", "")
        value = f"batch_size / data-parallel ranks{by} = {config.batch_size} / {dp_size}{numbers} = {drawn}"
        raise UserError(f"micro_batch_size={micro} must divide {value}; use {divisors(drawn, micro)}")
    return micro


def divisors(number: int, near: int) -> str:
    """Return the divisors of ``number`` that are nearest to ``near``, as text."""
    fitting = sorted((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - near))[:8]
    return ", ".join(map(str, sorted(fitting)))
