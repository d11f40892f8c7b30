"""Encode a folder of videos, or a file of captions, into a set that ``data=encoded`` reads:

``torchrun --nproc-per-node N -m distill.encode SOURCE OUT --encoders PIPELINE [--num-frames N --height H ...]``

SOURCE is what ``data=video_folder`` or ``data=captions`` reads. After a kill the same command continues. At the end
``OUT/left_out.csv`` names the clips that are left out, and why. ``--verify OUT`` reads a whole set and notes what is
damaged.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from distill.data.sets.encode import EncodeSettings, Source, describe, encode
from distill.data.sets.write_set import verify
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.launch import choose_device, end_process, exit_code, process_group, rank, refuse_separate_worlds
from fsdp_cp.reduce import on_all_ranks
from fsdp_cp.runtime.progress import log_to_console
from fsdp_cp.words import counted

log = logging.getLogger(__name__)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m distill.encode", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("source", nargs="?", help="folder of videos with metadata.csv or .txt files, or file of captions")
    add("out", nargs="?", help="folder of the set: new, empty, or of the same command")
    add("--encoders", help="diffusers pipeline folder with vae/, text_encoder/ and tokenizer/")
    add("--num-frames", type=int, default=17, help="frames of a clip")
    add("--height", type=int, default=64, help="pixels")
    add("--width", type=int, default=112, help="pixels")
    add("--fps", type=float, default=8.0, help="frames per second at which clips are sampled")
    add("--negative-prompt", default="", help="caption of the unconditional branch of guidance")
    add("--max-text-tokens", type=int, default=512, help="longer captions are cut and named")
    add("--image", choices=["first_frame"], help="encode first frames too, as conditions")
    add("--columns", default="", help="names of the table's columns: file_name=video,caption=prompt")
    add("--latents", choices=["fp32", "bf16"], default="fp32", help="stored type of latents")
    add("--vae-precision", choices=["fp32", "bf16"], default="fp32", help="precision of the VAE")
    add("--vae-tiling", action="store_true", help="frames through the VAE in tiles")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="device of the encoders")
    add("--verify", metavar="SET", help="read the whole set and note what is damaged")
    return parser


def _columns(text: str) -> dict[str, str] | None:
    parts = [part.split("=", 1) for part in text.split(",") if part]
    if any(len(part) != 2 for part in parts):
        raise UserError(f"--columns must be like file_name=video,caption=prompt, got {text!r}")
    return dict(parts) or None


def run(arguments: argparse.Namespace) -> None:
    """Encode, or verify.

    Raises:
        UserError: arguments, a source or a folder that do not fit; a set that is damaged.
    """
    refuse_separate_worlds()
    device = choose_device(arguments.device)
    if arguments.verify is not None:
        with process_group(device):
            clips, texts = verify(Path(arguments.verify), f"SET={arguments.verify}")
        if clips or texts:
            raise UserError(
                f"{arguments.verify}: {counted(len(clips), 'clip')} and {counted(len(texts), 'caption')} are damaged;"
                " run the command that made the set, which encodes their shards again, or set data.damaged=skip"
            )
        log.info("%s is whole", arguments.verify)
        return
    for name in ("source", "out", "encoders"):
        if getattr(arguments, name) is None:
            raise UserError(f"{name.upper() if name != 'encoders' else '--encoders'} is missing; see --help")
    settings = EncodeSettings(
        encoders=arguments.encoders,
        num_frames=arguments.num_frames,
        height=arguments.height,
        width=arguments.width,
        fps=arguments.fps,
        negative_prompt=arguments.negative_prompt,
        max_text_tokens=arguments.max_text_tokens,
        image=arguments.image,
        latents=arguments.latents,
        vae_precision=arguments.vae_precision,
        vae_tiling=arguments.vae_tiling,
    )
    path = Path(arguments.source).expanduser()
    out = Path(arguments.out).expanduser().absolute()
    if path.is_file() and arguments.image is not None:
        raise UserError(f"--image={arguments.image}: {path} holds captions without clips; give a folder of videos")
    with process_group(device):
        sources: list[Source] = []
        on_all_ranks(
            lambda: sources.append(Source.read(path, _columns(arguments.columns), has_clips=not path.is_file()))
        )
        encode(out, f"OUT={out}", sources[0], settings, device, describe(settings, sources[0]))
    if rank() == 0:
        log.info("%s is complete; train with data=encoded data.path=%s", out, out)


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0, or 2 with one line for a user's mistake."""
    arguments = _parser().parse_args(argv)
    log_to_console()

    @paths_of_the_user()
    def work() -> None:
        run(arguments)

    return exit_code(work)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
