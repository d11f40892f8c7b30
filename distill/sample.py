"""Clips from the student of a finished run: ``python -m distill.sample RUN_DIR [--steps N] [--caption TEXT ...]``.

Under ``torchrun --nproc-per-node N -m distill.sample`` the student is sharded over all ranks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from distill.config import Config, load_config
from distill.config.checks import check, check_images
from distill.methods import METHODS, build_method
from distill.report.media import contact_sheet, write_mp4
from distill.sampling import decode, generate, sample_captions
from fsdp_cp.error_file import recorded
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.launch import (
    choose_device,
    end_process,
    exit_code,
    process_group,
    rank,
    refuse_separate_worlds,
    world_size,
)
from fsdp_cp.mesh import build_mesh
from fsdp_cp.paths import user_path
from fsdp_cp.progress import log_to_console, progress
from fsdp_cp.reduce import on_all_ranks
from fsdp_cp.sharding.settings import ShardSettings
from fsdp_cp.words import counted
from models.additions.base import named_additions
from models.checkpoint_files import ADDITIONS
from models.load import build_role
from models.published import published, refuse_input, refuse_occupied
from models.role_plan import RolePlan, plan_role

_MAX_CLIPS = 1024  # their latents and frames are in memory together


def plan_student(config: Config, student: Path) -> RolePlan:
    """The student as its run trained it, from a diffusers folder.

    Raises:
        UserError: no such folder, or one that is not this run's student.
    """
    trained = config.student
    sharding = ShardSettings(strategy=trained.strategy, precision=trained.precision, offload=trained.offload)
    sharding.check(choose_device(config.device).type, "student.")
    additions = METHODS[config.method.name][0].additions(config.method).get("student", ())
    plan = plan_role("student", checkpoint=str(student), family=trained.family, sharding=sharding, additions=additions)
    if any(set(additions) - named_additions(folder.additions) for folder in plan.folders):
        raise UserError(
            f"{student} has no {ADDITIONS} with {', '.join(additions)}, without which it is not the student that"
            f" method={config.method.name} trained; give a folder that has"
        )
    return plan


def sample(
    config: Config,
    *,
    student: Path,
    steps: int,
    captions: list[str] | None,
    images: Sequence[str],
    count: int,
    seed: int,
    out: Path,
) -> None:
    """Write ``out/I.mp4`` and ``out/samples.png``. Called by all ranks.

    Args:
        config: the run's configuration.
        student: a diffusers folder with the student's weights.
        steps: sampling steps.
        captions: what to show; ``None`` for ``count`` captions of the data set.
        images: files, one for each of ``captions``, for an image-to-video student; empty for the data set's.
        count: number of clips without ``captions``.
        seed: of the noise.
        out: the folder to write: a new or empty one, or an earlier sampling's, which is replaced when all is done.

    Raises:
        UserError: what cannot be sampled, or ``out`` with other files in it; nothing in it has changed then.
    """
    refuse_separate_worlds()
    device = choose_device(config.device)
    plan = plan_student(config, student)
    plan.tokens(*config.data.sample_shapes())  # before clips and captions are encoded
    about = {"made by": "distill.sample", "student": str(student), "steps": steps, "captions": captions, "seed": seed}
    if images:
        about["images"] = [str(Path(file).absolute()) for file in images]
    refuse_input(out, "--out", {"the student": student})
    refuse_occupied(out, "--out", about)
    with ExitStack() as stack, process_group(device):
        # Before any work: a folder that cannot be written is found now.
        folder = on_all_ranks(lambda: stack.enter_context(published(out, about)) if rank() == 0 else None)[0]
        mesh = build_mesh(cp=1, heads=plan.family.heads(plan.config), device_type=device.type)
        data = config.data.build(
            seed=config.seed,
            device=device,
            run_dir=Path(config.run_dir),
            captions=captions or (),
            images=images,
        )
        captions = captions or sample_captions(data, count)
        role = build_role(
            plan,
            mesh=mesh,
            device=device,
            trainable=False,
            latent_shape=data.latent_shape,
            condition_shapes=data.condition_shapes,
        )
        with progress(len(captions), "sampling", "clip") as advance:
            latents = generate(
                build_method(config.method, {"student": role}),
                "student",
                steps=steps,
                captions=captions,
                data=data,
                mesh=mesh,
                device=device,
                seed=seed,
                batch=max(1, -(-len(captions) // world_size())) if config.data.cheap_frames else 1,
                advance=advance,
            )
        clips = decode(data, latents)
        if clips is not None:
            _write(folder, clips, captions, data.fps, f"student, {counted(steps, 'step')}")
    if clips is not None:
        print(f"{counted(len(clips), 'clip')} in {out}")


def _write(folder: Path, clips: np.ndarray, captions: Sequence[str], fps: float, label: str) -> None:
    import av

    try:
        with progress(len(clips), "writing", "file") as advance:
            for i, clip in enumerate(clips):
                write_mp4(folder / f"{i}.mp4", clip, fps)
                advance(1)
        contact_sheet(folder / "samples.png", [(label, clips)], captions=captions)
    except (OSError, av.FFmpegError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the clips cannot be written ({reason}); nothing was changed, give another --out") from error


@paths_of_the_user()
def plan_sampling(arguments: argparse.Namespace) -> partial[None]:
    """:func:`sample` with checked arguments, of a checked run.

    Raises:
        UserError: no run, a run without export, numbers that do not fit.
    """
    run_dir = user_path(arguments.run_dir, "RUN_DIR")
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a folder; give a run's, with config.yaml and export/student in it")
    config = load_config(run_dir / "config.yaml")
    config.run_dir = str(run_dir)  # which may have moved since
    config.world, config.dry_run = None, False
    config.sample.captions, config.sample.images = [], []  # of the training; its images need not be there any more
    # A student of GPUs may be looked at anywhere.
    config.device = arguments.device or ("auto" if config.device == "cuda" else config.device)
    check(config)
    # A few-step student knows the times of its own list alone.
    most = len(config.method.student_times()) if hasattr(config.method, "student_times") else math.inf
    steps = max(config.sample.student_steps) if arguments.steps is None else arguments.steps
    if not 1 <= steps <= most:
        works = f"from 1 to {most}, the student's own" if most < math.inf else "from 1 on"
        raise UserError(f"--steps {steps} must be {works}")
    if not 0 <= arguments.seed < 2**63:
        raise UserError(f"--seed {arguments.seed} must be from 0 to 2^63 - 1")
    if "" in (arguments.caption or ()):
        raise UserError("--caption is empty (a shell variable that is not set?); give a caption, or leave it out")
    if not 1 <= arguments.count <= _MAX_CLIPS:
        raise UserError(f"--count {arguments.count} must be from 1 to {_MAX_CLIPS}")
    images = [str(user_path(file, "--image")) for file in arguments.image or ()]
    config.sample.captions, config.sample.images = list(arguments.caption or ()), images
    try:
        check_images(config)
    except UserError as error:
        raise UserError(
            str(error).replace("sample.images", "--image").replace("sample.captions", "--caption")
        ) from None
    student = user_path(arguments.student, "--student") if arguments.student else run_dir / "export" / "student"
    if arguments.student is None and not student.is_dir():
        raise UserError(
            f"{run_dir} has no export/student: the run has not come to its end, or export.at_end=false; write one with"
            f" python -m models.export {run_dir} OUT, and give --student OUT"
        )
    return partial(
        sample,
        config,
        student=student,
        steps=steps,
        captions=arguments.caption,
        images=images,
        count=arguments.count,
        seed=arguments.seed,
        out=user_path(arguments.out, "--out") if arguments.out else run_dir / "samples" / "cli",
    )


@recorded  # torchrun's summary ends with the traceback of what is no user's mistake
def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 2 with one line for a user's mistake; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m distill.sample", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", help="a run's folder (config.yaml and export/student are read)")
    parser.add_argument("--student", help="diffusers folder of other weights; RUN_DIR/export/student by default")
    parser.add_argument(
        "--steps", type=int, help="sampling steps; the most that the run sampled its student with by default"
    )
    parser.add_argument(
        "--caption",
        action="append",
        help="what to show (of moving_shapes, words that it knows); may be given several times",
    )
    parser.add_argument(
        "--image", action="append", help="of an image-to-video student: a file for each --caption, in their order"
    )
    parser.add_argument("--count", type=int, default=4, help="clips, where no caption is given")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="the run's by default; auto for one that was on GPUs"
    )
    parser.add_argument(
        "--out", help="folder to write, new, empty or an earlier sampling's; RUN_DIR/samples/cli by default"
    )
    args = parser.parse_args(argv)
    log_to_console()
    return exit_code(lambda: plan_sampling(args)())


if __name__ == "__main__":
    end_process(main() or 0)  # --help leaves main by sys.exit(0), which `recorded` returns None for
