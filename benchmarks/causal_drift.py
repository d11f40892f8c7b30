"""Drift of long clips of a causal teacher: ``python -m benchmarks.causal_drift RUN`` samples blinking shapes.

Of all motions, only blinking continues beyond a clip of training. So clips of 24 frames have blinking captions, and are
measured in windows of six frames that begin in phase with the blinking.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from distill.config import load_config
from distill.data.moving_shapes import BLINK_PERIOD, MovingShapes
from distill.evaluate.evaluator import SAMPLE_SEED
from distill.evaluate.sampling import decode, generate
from distill.report.measures import measure
from distill.sample import build_student, plan_student
from fsdp_cp.launch import process_group

COLUMNS = ("colour_accuracy", "motion_accuracy", "distance/area", "distance/compactness", "distance/edge_sharpness")


def windows(run_dir: Path, *, frames: int, count: int, steps: int) -> dict[str, list[str]]:
    """Sample ``count`` blinking clips of a run's student, and return the measures of each window of frames.

    Distances are from held-out renders of the same captions.
    """
    config, device = load_config(run_dir / "config.yaml"), torch.device("cpu")
    config.world = None
    data = config.data.build(seed=config.seed, device=device, run_dir=run_dir)
    assert isinstance(data, MovingShapes), "other clips have no measures"
    blinking = [caption for caption in data.captions() if caption.endswith("blinking")]
    captions = [blinking[i % len(blinking)] for i in range(count)]
    renders = data.heldout()
    numbers = [i for i in range(len(renders.captions()) * 32) if renders[i]["caption"] in blinking]
    reference = renders.decode(torch.stack([renders[i]["latents"] for i in numbers])).numpy()
    with process_group(device):
        plan = plan_student(config, run_dir / "export" / "student")
        method, mesh = build_student(config, plan, data, device)
        channels, length, *sizes = data.latent_shape
        latents = generate(
            method,
            "student",
            steps=steps,
            captions=captions,
            data=data,
            mesh=mesh,
            device=device,
            seed=SAMPLE_SEED,
            batch=min(count, 32),
            latent_shape=(channels, frames, *sizes),
        )
        clips = decode(data, latents)
    rows = {}
    for start in range(0, frames - length + 1, BLINK_PERIOD):
        found = measure(clips[:, start : start + length], captions, reference)
        rows[f"{start}-{start + length - 1}"] = [
            f"{found[name].value:.3f} ± {found[name].standard_error:.3f}" for name in COLUMNS
        ]
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print the table, and return exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.causal_drift", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="a finished run with a causal student")
    parser.add_argument("--frames", type=int, default=24, help="frames of a clip")
    parser.add_argument("--count", type=int, default=128, help="number of clips")
    parser.add_argument("--steps", type=int, default=8, help="sampling steps per chunk")
    arguments = parser.parse_args(argv)
    rows = windows(arguments.run_dir, frames=arguments.frames, count=arguments.count, steps=arguments.steps)
    print(f"| frames | {' | '.join(name.removeprefix('distance/').replace('_', ' ') for name in COLUMNS)} |")
    print(f"|{'---|' * (len(COLUMNS) + 1)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
