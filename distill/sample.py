"""Sample clips from a run's exported student: ``python -m distill.sample RUN_DIR [--steps N] [--caption TEXT]``.

A finished run has exported its student. Of a running one, ``python -m models.export RUN_DIR FOLDER`` exports a
checkpoint, and ``--student FOLDER`` samples it.

``torchrun --nproc-per-node N -m distill.sample`` shards the student over all ranks. ``--frames N`` makes clips of
another length, chunk by chunk, with a causal student.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from distill.config import Config, load_config
from distill.config.checks import check, check_images
from distill.config.trained_method import sampling_in_words, trained_method
from distill.evaluate.sampling import Clips, decode, generate, plan_sampling, sample_captions
from distill.methods import build_method
from distill.report.media import contact_sheet, write_mp4
from distill.run.hub_names import resolve_hub_names
from distill.run.open import open_device, open_mesh
from distill.run.setup import RunPlan
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, counted, paths_of_the_user
from fsdp_cp.files.atomic_folder import atomic_folder, refuse_input, refuse_occupied
from fsdp_cp.launch import end_process, exit_code, rank, recorded, world_size
from fsdp_cp.progress import log_to_console, progress
from fsdp_cp.reduce import on_first_rank
from models.additions.base import named_additions
from models.files.checkpoint_files import ADDITIONS_FILE
from models.sample import VIDEO, PartShapes

log = logging.getLogger(__name__)

_MAX_CLIPS = 1024  # the latents and frames of all clips are in memory together


def plan_student(config: Config, student: Path) -> RunPlan:
    """Return the plan to sample the student in a diffusers folder, with the settings of its run.

    Raises:
        UserError: see :func:`distill.evaluate.sampling.plan_sampling`; a folder without the modules that the run's
            method adds.
    """
    plan = plan_sampling(config, "student", student)
    (role,) = plan.roles
    if any(set(role.additions) - named_additions(folder.additions) for folder in role.folders):
        raise UserError(
            f"{student} has no {ADDITIONS_FILE} with {', '.join(role.additions)}, without which it is not the student"
            f" that method={config.method.name} trained; give a folder that has"
        )
    return plan


def sampled_shapes(config: Config, plan: RunPlan, frames: int | None) -> PartShapes:
    """Return the shapes of a clip's latents: the run's, or those of ``--frames``, if they can be made."""
    (shapes, condition), (student,) = plan.shapes, plan.roles
    if frames is None:
        return shapes
    if student.causal is None:
        raise UserError(f"--frames {frames} is for a causal student, and this one is not; leave it out")
    try:
        shapes = replace(config.data, num_frames=frames).sample_shapes()[0]
        student.causal.chunks(shapes[VIDEO][1], "student.causal.")
        if student.causal.window is None:
            student.tokens(shapes, condition)  # refuses more frames than the network has positions
    except UserError as error:
        raise UserError(f"--frames {frames}: {error}") from None
    return shapes


def student_folder(arguments: argparse.Namespace) -> Path:
    """Return the folder of the student's weights."""
    if arguments.student:
        return user_path(arguments.student, "--student")
    return user_path(arguments.run_dir, "RUN_DIR") / "export" / "student"


def sampling_method(config: Config, student: Path, chosen: str) -> Any:
    """Return the settings of the method that samples ``student``: of the one that trained it, or of the run.

    Raises:
        UserError: the student's own are chosen, and this version cannot read them.
    """
    try:
        own = trained_method(student)
    except UserError as error:
        if chosen == "student":
            raise UserError(f"{error}; give --sampling run") from error
        own = None
    if own is None:
        return config.method
    words = {"student": sampling_in_words(own), "run": sampling_in_words(config.method)}
    if words["student"] != words["run"] and rank() == 0:
        log.warning(
            "%s is a student of %s, and the run has %s; sampling as the %s says (--sampling)",
            student,
            words["student"],
            words["run"],
            chosen,
        )
    return own if chosen == "student" else config.method


@paths_of_the_user()
def checked_config(arguments: argparse.Namespace) -> Config:
    """Return the configuration of a finished run, with the device, captions and images of the command line.

    Raises:
        UserError: a folder that is not a run's, or arguments that do not fit the run.
    """
    run_dir = user_path(arguments.run_dir, "RUN_DIR")
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a folder; give a run's, with config.yaml and export/student in it")
    config = load_config(run_dir / "config.yaml")
    config.run_dir = str(run_dir)  # the run may have moved since
    config.world, config.dry_run = None, False
    config.sample.captions, config.sample.images = [], []  # the images of the training may be missing by now
    # A student trained on GPUs can be sampled on any device.
    config.device = arguments.device or ("auto" if config.device == "cuda" else config.device)
    check(config)
    config.method = sampling_method(config, student_folder(arguments), arguments.sampling)
    # A few-step student is trained only at the times of its own list.
    most = len(config.method.student_times()) if hasattr(config.method, "student_times") else math.inf
    arguments.steps = min(most, max(config.sample.student_steps)) if arguments.steps is None else arguments.steps
    for name, value, least, greatest in (
        ("--steps", arguments.steps, 1, most),
        ("--seed", arguments.seed, 0, 2**63 - 1),
        ("--count", arguments.count, 1, _MAX_CLIPS),
    ):
        if not least <= value <= greatest:
            limit = "" if greatest == math.inf else f" and at most {greatest}"
            raise UserError(f"{name} {value} must be at least {least}{limit}")
    captions = list(arguments.caption or ())
    if "" in captions:
        raise UserError("--caption is empty (a shell variable that is not set?); give a caption, or leave it out")
    config.sample.captions = captions
    config.sample.images = [str(user_path(file, "--image")) for file in arguments.image or ()]
    try:
        check_images(config)
    except UserError as error:
        message = str(error).replace("sample.images", "--image").replace("sample.captions", "--caption")
        raise UserError(message) from None
    if arguments.student is None and not (run_dir / "export" / "student").is_dir():
        raise UserError(
            f"{run_dir} has no export/student: the run has not come to its end, or export.at_end=false; write one with"
            f" python -m models.export {run_dir} OUT, and give --student OUT"
        )
    return config


def sample(arguments: argparse.Namespace) -> None:
    """Write ``OUT/I.mp4`` and ``OUT/samples.png``. All ranks must call this.

    Raises:
        UserError: arguments that cannot be sampled, or an OUT that holds other files. OUT is then unchanged.
    """
    config = checked_config(arguments)
    run_dir, steps, seed = Path(config.run_dir), arguments.steps, arguments.seed
    student = student_folder(arguments)
    out = user_path(arguments.out, "--out") if arguments.out else run_dir / "samples" / "cli"
    captions, images = config.sample.captions, config.sample.images
    device = open_device(config)
    resolve_hub_names(config, [])
    plan = plan_student(config, student)
    shapes = sampled_shapes(config, plan, arguments.frames)  # before clips and captions are encoded
    about = {"made by": "distill.sample", "student": str(student), "captions": captions or None}
    about |= {"steps": steps, "seed": seed}
    about |= {"frames": arguments.frames} if arguments.frames is not None else {}
    about |= {"images": [str(Path(file).absolute()) for file in images]} if images else {}
    refuse_input(out, "--out", {"the student": student})
    refuse_occupied(out, "--out", about)
    with ExitStack() as stack, open_mesh(config, plan, device) as mesh:
        # Open the output before any work, to find now that it cannot be written.
        folder = on_first_rank(lambda: stack.enter_context(atomic_folder(out, about)))
        data = config.data.build(seed=config.seed, device=device, run_dir=run_dir, captions=captions, images=images)
        captions = captions or sample_captions(data, arguments.count)
        roles = plan.build_roles(mesh=mesh, device=device, data=data, seed=config.seed)
        finished = [time.perf_counter()]
        with progress(len(captions), "sampling", "clip") as advance:
            latents = generate(
                build_method(config.method, roles),
                "student",
                steps=steps,
                captions=captions,
                data=data,
                mesh=mesh,
                device=device,
                seed=seed,
                batch=max(1, -(-len(captions) // world_size())) if config.data.cheap_frames else 1,
                advance=advance,
                latent_shapes=shapes,
                chunk_done=lambda: finished.append(time.perf_counter()),
            )
        clips = decode(data, latents)
        if clips is not None:
            _write(folder, clips, captions, data.fps, f"student, {counted(steps, 'step')}")
    if clips is not None:
        print(f"{counted(len(captions), 'clip')} in {out}")
        if causal := plan.roles[0].causal:
            print(_chunk_times(finished, len(causal.chunks(shapes[VIDEO][1]))))


def _chunk_times(finished: list[float], chunks: int) -> str:
    """Describe the seconds per chunk from the times at the start and after each chunk, of all batches of clips."""
    first, *later = np.diff(finished).reshape(-1, chunks).mean(axis=0)
    rest = f", then {np.mean(later):.3g} s per chunk" if later else ""
    return f"first chunk after {first:.3g} s{rest} (latents, without decoding)"


def _write(folder: Path, clips: Clips, captions: Sequence[str], fps: float, label: str) -> None:
    import av

    try:
        with progress(len(captions), "writing", "file") as advance:
            for i, (clip, sound) in enumerate(zip(clips.frames, clips.sounds or repeat(None), strict=False)):
                write_mp4(folder / f"{i}.mp4", clip, fps, sound)
                advance(1)
        contact_sheet(folder / "samples.png", [(label, clips.frames)], captions=captions)
    except (OSError, av.FFmpegError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the clips cannot be written ({reason}); nothing was changed, give another --out") from error


@recorded  # torchrun's summary then ends with the traceback, except for a user's mistake
def main(argv: list[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 with one line for a user's mistake; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m distill.sample", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("run_dir", help="a run's folder (config.yaml and export/student are read)")
    add("--student", help="diffusers folder of other weights; RUN_DIR/export/student by default")
    add("--steps", type=int, help="sampling steps; by default the most that the run sampled its student with")
    add("--caption", action="append", help="what to show (of moving_shapes, words that it knows); also several times")
    add("--image", action="append", help="of an image-to-video student: a file for each --caption, in their order")
    add("--count", type=int, default=4, help="clips, where no caption is given")
    own = "whose times and sampler: those that the student's export records (the default), or those of the run"
    add("--sampling", choices=("student", "run"), default="student", help=own)
    add("--frames", type=int, help="of a causal student: frames of a clip, whole chunks; data.num_frames by default")
    add("--seed", type=int, default=0, help="of the noise")
    add("--device", choices=("auto", "cpu", "cuda"), help="the run's by default; auto for one that was on GPUs")
    add("--out", help="folder to write, new, empty or an earlier sampling's; RUN_DIR/samples/cli by default")
    args = parser.parse_args(argv)
    log_to_console()
    return exit_code(lambda: sample(args))


if __name__ == "__main__":
    end_process(main() or 0)  # --help calls sys.exit(0) in main, and `recorded` turns that into None
