"""Clips from the student of a finished run: ``python -m distill.sample RUN_DIR [--steps N] [--caption TEXT ...]``.

Under ``torchrun --nproc-per-node N -m distill.sample`` the student is sharded over all ranks.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from distill.config import Config, load_config
from distill.data import build_dataset
from distill.media import contact_sheet, write_mp4
from distill.methods import METHODS, build_method
from distill.sampling import generate, sample_captions
from fsdp_cp.errors import UserError
from fsdp_cp.launch import choose_device, process_group, rank, world_size
from fsdp_cp.mesh import build_mesh
from fsdp_cp.shard_settings import ShardSettings
from models.additions import named_additions
from models.checkpoint_files import ADDITIONS
from models.load import build_role, plan_role


def sample(
    config: Config, *, student: Path, steps: int, captions: list[str] | None, count: int, seed: int, out: Path
) -> None:
    """Write ``out/I.mp4`` and ``out/samples.png``. Called by all ranks.

    Args:
        config: the run's configuration.
        student: a diffusers folder with the student's weights.
        steps: sampling steps.
        captions: what to show; ``None`` for ``count`` captions of the data set.
        count: number of clips without ``captions``.
        seed: of the noise.
        out: the folder to write.
    """
    device = choose_device(config.device)
    trained = config.student
    sharding = ShardSettings(strategy=trained.strategy, precision=trained.precision, offload=trained.offload)
    additions = METHODS[config.method.name][0].additions(config.method).get("student", ())
    plan = plan_role("student", checkpoint=str(student), family=trained.family, sharding=sharding, additions=additions)
    if set(additions) - named_additions(plan.folder.additions):
        raise UserError(
            f"{student} has no {ADDITIONS} with {', '.join(additions)}, without which it is not the student that"
            f" method={config.method.name} trained; give a folder that has"
        )
    with process_group(device):
        mesh = build_mesh(cp=1, heads=plan.family.heads(plan.config), device_type=device.type)
        data = build_dataset(config.data, seed=config.seed, device=device, run_dir=Path(config.run_dir))
        captions = captions or sample_captions(data, count)
        data.embed(captions)  # an unknown caption is refused before the network is built
        role = build_role(
            plan,
            mesh=mesh,
            device=device,
            trainable=False,
            latent_shape=data.latent_shape,
            text_shape=data.text_shape,
        )
        latents = generate(
            build_method(config.method, {"student": role}),
            "student",
            steps=steps,
            captions=captions,
            data=data,
            mesh=mesh,
            device=device,
            seed=seed,
            batch=max(1, -(-len(captions) // world_size())) if config.data.name == "moving_shapes" else 1,
        )
        if rank() == 0:
            clips = data.decode(latents.float().cpu()).numpy()
            out.mkdir(parents=True, exist_ok=True)
            for i, clip in enumerate(clips):
                write_mp4(out / f"{i}.mp4", clip, data.fps, scale=None)
            contact_sheet(out / "samples.png", [(f"student, {steps} steps", clips)], captions=captions)
            print(f"{len(clips)} clips in {out}")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one line for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m distill.sample", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="a run's folder (config.yaml and export/student are read)")
    parser.add_argument(
        "--student", type=Path, help="diffusers folder of other weights; RUN_DIR/export/student by default"
    )
    parser.add_argument(
        "--steps", type=int, help="sampling steps; the most that the run sampled its student with by default"
    )
    parser.add_argument(
        "--caption", action="append", help="a caption that the data set knows; may be given several times"
    )
    parser.add_argument("--count", type=int, default=4, help="clips, where no caption is given")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--out", type=Path, help="folder to write; RUN_DIR/samples/cli by default")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO if rank() == 0 else logging.WARNING, format="%(message)s", stream=sys.stdout)
    try:
        config = load_config(args.run_dir / "config.yaml")
        config.run_dir = str(args.run_dir)  # which may have moved since
        if args.count < 1:
            raise UserError(f"--count {args.count} must be at least 1")
        sample(
            config,
            student=args.student or args.run_dir / "export" / "student",
            steps=max(config.sample.student_steps) if args.steps is None else args.steps,
            captions=args.caption,
            count=args.count,
            seed=args.seed,
            out=args.out or args.run_dir / "samples" / "cli",
        )
    except UserError as error:
        if rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
