"""What bf16 and tiles change of a clip's latents and pixels: ``python -m benchmarks.vae``.

Encoded and decoded on the CPU by the way that data sets take, against whole frames in fp32. Without ``--encoders`` the
VAE is Wan's published one with random weights: rounding is of the right size there, but what a pixel sees is not what
training made of it, so seams of tiles say little; with a downloaded folder and a clip of one's own all of it counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.arguments import at_least_1
from distill.data.clips import ClipError, ClipFormat, read_clip
from distill.data.encoders import EncoderFolder, VideoCodec, inspect_encoders
from distill.planning.coding import build_vae
from fsdp_cp.errors import UserError
from tests.tiny_pipeline import build_tiny_pipeline, render_clips

WAYS = {
    "fp32": (torch.float32, False),
    "fp32, tiled": (torch.float32, True),
    "bf16": (torch.bfloat16, False),
    "bf16, tiled": (torch.bfloat16, True),
}


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one line for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vae", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--encoders", type=Path, help="a diffusers pipeline folder; Wan's VAE with random weights")
    parser.add_argument("--video", type=Path, help="a clip; a rendered one by default")
    parser.add_argument("--frames", type=at_least_1, default=5)
    parser.add_argument("--height", type=at_least_1, default=288)
    parser.add_argument("--width", type=at_least_1, default=288)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        try:
            clip = ClipFormat(num_frames=args.frames, height=args.height, width=args.width, fps=8.0)
            folder = inspect_encoders(args.encoders or _random_wan(Path(made)))
            folder.check(clip)
            if args.video is None:
                render_clips(Path(made), 1, frames=2 * args.frames + 1, height=args.height, width=args.width)
            try:
                video = read_clip(args.video or Path(made) / "clip_0.mp4", clip)
            except ClipError as error:
                raise UserError(f"--video {args.video} {error}; give another") from error
            table = measure(folder, video)
        except UserError as error:
            print(f"error: {str(error).replace('data.', '--')}", file=sys.stderr)
            return 2
    weights = args.encoders.name if args.encoders else "random weights"
    print(f"{args.frames} frames of {args.height} x {args.width}, {weights}, torch {torch.__version__},"
          f" {platform.machine()}, {os.cpu_count()} cores\n")  # fmt: skip
    print("\n".join(table))
    return 0


def _random_wan(folder: Path) -> Path:
    """A pipeline folder with the published VAE's architecture."""
    build_tiny_pipeline(folder / "encoders")
    torch.manual_seed(0)
    build_vae({}).save_pretrained(folder / "encoders" / "vae")
    return folder / "encoders"


def measure(folder: EncoderFolder, video: torch.Tensor) -> list[str]:
    """The lines of the table for a clip (3, T, H, W) in [-1, 1]; what is decoded are fp32's latents, in every way."""
    lines = [
        "| VAE | latents: error of fp32's norm | pixels: mean error, levels of 255 | largest | encode, s | decode, s |",
        "|---|---|---|---|---|---|",
    ]
    exact: tuple[torch.Tensor, torch.Tensor] | None = None
    for name, (dtype, tiling) in WAYS.items():
        codec = VideoCodec(folder, device=torch.device("cpu"), dtype=dtype, tiling=tiling)
        began = time.perf_counter()
        latents = codec.encode(video)
        between = time.perf_counter()
        pixels = codec.decode((exact[0] if exact else latents)[None]).float()
        ended = time.perf_counter()
        exact = exact or (latents, pixels)
        error = ((latents - exact[0]).norm() / exact[0].norm()).item()
        levels = (pixels - exact[1]).abs()
        lines.append(
            f"| {name} | {error:.2g} | {levels.mean().item():.2f} | {levels.max().item():.0f} |"
            f" {between - began:.1f} | {ended - between:.1f} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
