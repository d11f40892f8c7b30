"""Encode a folder of videos, or a file of captions, into a set that ``data=encoded`` reads:

``torchrun --nproc-per-node N -m distill.encode SOURCE OUT --encoders PIPELINE [--num-frames N --height H ...]``

SOURCE is what ``data=video_folder`` or ``data=captions`` reads, or a data set of another project: FastVideo's parquet
files, rCM's tar shards, LightX2V's caches, archives of webdataset, ``metadata.json``, ``videos.txt`` and
``prompts.txt``. After a kill the same command continues. At the end ``OUT/left_out.csv`` names the clips that are left
out, and why. ``--verify OUT`` reads a whole set and notes what is damaged.
"""

import argparse
import json
import logging
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from distill.config.usage import field_docs
from distill.data.sets.dataset import check_local
from distill.data.sets.encode import Encoding, encode
from distill.data.sets.stored import fitted_settings
from distill.data.sets.write_set import verify
from distill.data.sources import own
from distill.data.sources.choose import read_outside
from distill.data.sources.source import Source
from fsdp_cp.choices import words
from fsdp_cp.errors import UserError, counted, paths_of_the_user
from fsdp_cp.launch import choose_device, end_process, exit_code, process_group, refuse_separate_worlds
from fsdp_cp.progress import log_to_console
from models.files.hub import encoder_files, resolve

log = logging.getLogger(__name__)


def _buckets(text: str) -> Any:
    return text if text == "auto" else [[int(number) for number in size] for size in json.loads(text)]


_buckets.__name__ = "value, [[81,480,832],[81,832,480]] or auto,"  # as argparse names it


@contextmanager
def _named_as_here() -> Iterator[None]:
    """Name the arguments of this command, in place of the settings of a training, in the message of a mistake."""
    names = "|".join(item.name for item in fields(Encoding))
    try:
        yield
    except UserError as error:
        message = re.sub(r"(?<![\w./])data\.path\b", "SOURCE", str(error))
        known = rf"(?<![\w./])data\.({names}|columns|normalized)\b"
        raise UserError(re.sub(known, lambda match: f"--{match[1].replace('_', '-')}", message)) from error


def _source(
    path: Path, settings: Encoding, arguments: argparse.Namespace, given: Collection[str]
) -> tuple[Source, Encoding]:
    """Return the rows to encode, and the settings with the sizes of stored latents."""
    pairs = [pair.partition("=") for pair in arguments.columns.split(",") if pair]
    if not all(equals for _, equals, _ in pairs):
        raise UserError(f"--columns must be like file_name=video,caption=prompt, got {arguments.columns!r}")
    columns = {name: column for name, _, column in pairs} or None
    source = read_outside(path, columns)
    if arguments.normalized is not None:
        if source is None or source.latents is None:
            raise UserError(f"--normalized={arguments.normalized}: {path} holds no latents; leave it out")
        source = replace(source, is_normalized=arguments.normalized == "yes", is_checked=False)
    if source is not None and settings.references is not None:
        raise UserError(f"data.references: {path} is {source.format or 'archives'}, which name none; leave it out")
    if source is not None:
        return source, fitted_settings(settings, source, given)
    if path.is_file() and settings.image is not None and settings.buckets is not None:
        raise UserError(f"data.buckets={settings.buckets}: captions with images have one size; leave it out")
    return own.read(path, columns, has_clips=not path.is_file(), image=settings.image), settings


def _refuse_more_than_verify(arguments: argparse.Namespace) -> None:
    """Refuse what belongs to encoding next to ``--verify``, which encodes nothing."""
    for name, value in vars(arguments).items():
        if value and name not in ("verify", "device"):
            what = f"--verify checks a set and encodes nothing, but {name}={value} is given"
            raise UserError(f"{what}; leave it out, or encode first and verify after it")


@_named_as_here()
@paths_of_the_user()
def run(arguments: argparse.Namespace) -> None:
    """Encode, or verify. A set that is damaged is a ``UserError`` too."""
    refuse_separate_worlds()
    device = choose_device(arguments.device)
    if arguments.verify is not None:
        _refuse_more_than_verify(arguments)
        with process_group(device):
            damaged = verify(Path(arguments.verify), f"SET={arguments.verify}")
        clips, texts = (len(numbers) for numbers in damaged.values())
        if clips or texts:
            damage = f"{counted(clips, 'clip')} and {counted(texts, 'caption')} are damaged"
            hint = "run the command that made the set again, which replaces them, or set data.damaged=skip"
            raise UserError(f"{arguments.verify}: {damage}; {hint}")
        log.info("%s is whole", arguments.verify)
        return
    given = {item.name: getattr(arguments, item.name) for item in fields(Encoding) if hasattr(arguments, item.name)}
    for name in ("source", "out", "encoders"):
        if (vars(arguments) | given).get(name) is None:
            raise UserError(f"{name.upper() if name != 'encoders' else '--encoders'} is missing; see --help")
    settings = Encoding(**given)
    path = Path(arguments.source).expanduser()
    out = Path(arguments.out).expanduser().absolute()
    settings.encoders = resolve({"--encoders": (settings.encoders, encoder_files)}).get("--encoders", settings.encoders)
    with process_group(device):
        source, settings = check_local(lambda: _source(path, settings, arguments, given))
        if source.format:
            log.info("%s is in the format of %s", path, source.format)
        encode(source, settings, device, out=out)
    log.info("%s is complete; train with data=encoded data.path=%s", out, out)


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0, or 2 with one line for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m distill.encode", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("source", nargs="?", help="folder of videos and captions, file of captions, or data set of another project")
    add("out", nargs="?", help="folder of the set: new, empty, or of the same command")
    docs, hints = field_docs(Encoding), get_type_hints(Encoding)
    for item in fields(Encoding):
        kind: dict[str, Any] = {"type": str if item.default is None else type(item.default)}
        if choices := words(hints[item.name]):
            kind = {"choices": choices}
        elif item.default is False:
            kind = {"action": "store_true"}
        if item.name == "buckets":
            kind = {"type": _buckets}
        if item.name == "references":
            kind = {"type": lambda text: text.split(",")}
        add(f"--{item.name.replace('_', '-')}", help=docs[item.name], default=argparse.SUPPRESS, **kind)
    told = "whether the latents that SOURCE stores are, whatever their scale"
    add("--normalized", "--normalised", choices=["yes", "no"], help=told)
    add("--columns", default="", help="names of the table's columns: file_name=video,caption=prompt")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="device of the encoders")
    add("--verify", metavar="SET", help="read the whole set and note what is damaged")
    arguments = parser.parse_args(argv)
    log_to_console()
    return exit_code(lambda: run(arguments))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
