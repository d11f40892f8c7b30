"""Extract adapters from a fully trained network by SVD: ``python -m models.lora extract FULL BASE OUT --rank 64``."""

import argparse
import logging
import sys

import torch

from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.files.atomic_folder import refuse_input, refuse_occupied
from fsdp_cp.launch import exit_code
from models.families.registry import family_names, family_of
from models.files.checkpoint_files import inspect_transformer
from models.lora.extract import extract
from models.lora.files import FORMATS, file_tensors, write_file
from models.lora.settings import LoraSettings


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0, or 2 after a one-line message for a user error."""
    parser = argparse.ArgumentParser(prog="python -m models.lora", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("extract", help="adapters that make FULL of BASE, as nearly as their rank can")
    command.add_argument("full", metavar="FULL", help="diffusers folder of the trained network")
    command.add_argument("base", metavar="BASE", help="diffusers folder of the network that it began as")
    command.add_argument("out", metavar="OUT", help="folder to write: new, empty, or an earlier export")
    command.add_argument("--rank", type=int, default=64)
    command.add_argument(
        "--targets", nargs="+", default=[], help="patterns of layer names; those of the blocks by default"
    )
    command.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="as of python -m models.export")
    command.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    command.add_argument("--family", choices=family_names(), default="wan")
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")

    @paths_of_the_user()
    def work() -> None:
        out = user_path(args.out, "OUT")
        refuse_occupied(out, "OUT")
        if args.rank < 1:
            raise UserError(f"--rank {args.rank} must be at least 1")
        given = (("FULL", args.full), ("BASE", args.base))
        full, base = (inspect_transformer(str(user_path(folder, name)), name) for name, folder in given)
        refuse_input(out, "OUT", {"FULL": full.path, "BASE": base.path})
        family = family_of(args.family, "--family")
        with torch.device("meta"):
            network = family.build(base.config, "BASE")
        extracted = extract(full, base, network, family, LoraSettings(rank=args.rank, targets=args.targets))
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
        adapters = extracted.adapters
        tensors = file_tensors(args.format, adapters, adapters.__getitem__, family=family, scale=1.0, dtype=dtype)
        about = {"made by": "models.lora extract", "full": str(full.path), "base": str(base.path), "rank": args.rank}
        write_file(out, tensors, about | {"format": args.format})
        print(f"{out}: adapters of rank {args.rank} for {len(extracted.adapters) // 2} layers, which hold"
              f" {extracted.kept:.2%} of the squared difference there")  # fmt: skip
        if extracted.left_out:
            most = max(extracted.left_out, key=extracted.left_out.__getitem__)
            print(f"left out: {len(extracted.left_out)} other tensors that differ, the most {most} (by"
                  f" {extracted.left_out[most]:.2g} of its norm)")  # fmt: skip

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
