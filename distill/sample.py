"""Sample clips from a run's exported student: ``python -m distill.sample RUN_DIR [--steps N] [--caption TEXT]``.

A finished run has exported its student. Of a running one, ``python -m models.export RUN_DIR FOLDER`` exports a
checkpoint, and ``--student FOLDER`` samples it.

``torchrun --nproc-per-node N -m distill.sample`` shards the student over all ranks. ``--frames N`` makes clips of
another length, chunk by chunk, with a causal student.
"""

import argparse
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from distill.config import Config
from distill.config.checks import check_images
from distill.data.base import placed_image
from distill.evaluate.networks import (
    MOST_SEED,
    check_number,
    chosen_network,
    read_prompts,
    run_command,
    settings_of_run,
)
from distill.evaluate.sampling import decode, sample_captions, speed_in_words
from distill.report.media import contact_sheet, write_clips
from distill.run.open import open_device, open_mesh
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, counted, paths_of_the_user
from fsdp_cp.files.atomic_file import writing
from fsdp_cp.files.atomic_folder import atomic_folder, refuse_input, refuse_occupied
from fsdp_cp.launch import end_process, recorded
from fsdp_cp.reduce import on_first_rank
from models.sample import VIDEO

_MAX_CLIPS = 1024  # the latents and frames of all clips are in memory together


@paths_of_the_user()
def chosen_settings(arguments: argparse.Namespace) -> Config:
    """Return the run's configuration with the chosen captions and images."""
    config = settings_of_run(user_path(arguments.run_dir, "RUN_DIR"), arguments.device, arguments.cp)
    check_number("--seed", arguments.seed, 0, MOST_SEED)
    check_number("--count", arguments.count, 1, _MAX_CLIPS)
    captions = list(arguments.caption or ())
    if "" in captions:
        raise UserError("--caption is empty (a shell variable that is not set?); give a caption, or leave it out")
    captions += read_prompts(arguments.captions, "--captions") if arguments.captions else []
    check_number("number of captions", len(captions), 0, _MAX_CLIPS)
    config.sample.captions = captions
    try:
        config.sample.images = [
            placed_image(file, getattr(config.data, "image", None)) for file in arguments.image or ()
        ]
        check_images(config)
    except UserError as error:
        message = str(error).replace("sample.images", "--image").replace("sample.captions", "--caption")
        raise UserError(message) from None
    return config


def sample(arguments: argparse.Namespace) -> None:
    """Write ``OUT/I.mp4`` and ``OUT/samples.png``. All ranks must call this."""
    config = chosen_settings(arguments)
    run_dir, seed = Path(config.run_dir), arguments.seed
    out = user_path(arguments.out, "--out") if arguments.out else run_dir / "samples" / "cli"
    captions, images = config.sample.captions, config.sample.images
    device = open_device(config)
    student = user_path(arguments.student, "--student") if arguments.student else None
    how = {"student": student, "sampling": arguments.sampling, "steps": arguments.steps}
    network = chosen_network(config, "teacher" if arguments.teacher else "student", **how)
    plan, role, folder, steps = network.plan, network.role, network.folder, network.steps
    # Before clips and captions are encoded.
    shapes = None if arguments.frames is None else network.shapes(arguments.frames, "--frames")
    about = {"made by": "distill.sample", role: str(folder), "captions": captions or None, "steps": steps, "seed": seed}
    about |= {"frames": arguments.frames} if arguments.frames is not None else {}
    about |= {"images": images} if images else {}
    refuse_input(out, "--out", {f"the {role}": folder})
    refuse_occupied(out, "--out", about)
    with ExitStack() as stack, open_mesh(config, plan, device) as mesh:
        # Open the output before any work, to find now that it cannot be written.
        unfinished = on_first_rank(lambda: stack.enter_context(atomic_folder(out, about)))
        data = config.data.build(seed=config.seed, device=device, run_dir=run_dir, captions=captions, images=images)
        captions = captions or sample_captions(data, arguments.count)
        sampler = network.loaded(mesh=mesh, device=device, data=data)
        finished = [time.perf_counter()]
        latents = sampler.generate(
            role,
            captions,
            steps=steps,
            seed=seed,
            latent_shapes=shapes,
            chunk_done=lambda _: finished.append(time.perf_counter()),
        )
        clips = decode(data, latents)
        if clips is not None:
            with writing(f"--out={out}", "nothing was changed; give another"):
                write_clips([unfinished / f"{i}.mp4" for i in range(len(captions))], *clips, fps=data.fps)
                label = f"{role}, {counted(steps, 'step')}"
                contact_sheet(unfinished / "samples.png", [(label, clips.frames)], captions=captions)
    if clips is not None:
        print(f"{counted(len(captions), 'clip')} in {out}")
        if causal := plan.roles[0].causal:
            chunks = len(causal.chunks((shapes or data.latent_shapes)[VIDEO][1]))
            seconds = np.diff(finished).reshape(-1, chunks).mean(axis=0)  # of all batches of clips
            print(f"{speed_in_words(seconds, clips.frames.shape[1])} (latents, without decoding)")


@recorded  # torchrun's summary then ends with the traceback, except for a user's mistake
def main(argv: list[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 with one line for a user's mistake; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m distill.sample", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("run_dir", help="a run's folder (config.yaml and export/student are read)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--student", help="diffusers folder or adapters of other weights; RUN_DIR/export/student by default"
    )
    which.add_argument("--teacher", action="store_true", help="sample the teacher of the run")
    add("--steps", type=int, help="sampling steps; by default the most that the run samples the network with")
    add("--caption", action="append", help="what to show (of moving_shapes, words that it knows); also several times")
    add("--captions", metavar="FILE", help="file with a caption per line, or .csv or .jsonl with a column caption")
    add("--image", action="append", help="of a student of images: a file (of both frames: two) for each --caption")
    add("--count", type=int, default=4, help="clips, where no caption is given")
    own = "whose times and sampler: those that the student's export records (the default), or those of the run"
    add("--sampling", choices=("student", "run"), default="student", help=own)
    add("--frames", type=int, help="of a causal student: frames of a clip, whole chunks; data.num_frames by default")
    add("--seed", type=int, default=0, help="of the noise")
    add("--out", help="folder to write, new, empty or an earlier sampling's; RUN_DIR/samples/cli by default")
    return run_command(parser, argv, sample)


if __name__ == "__main__":
    end_process(main() or 0)  # --help calls sys.exit(0) in main, and `recorded` turns that into None
