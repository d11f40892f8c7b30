"""Contents of a diffusers transformer folder, read from ``config.json`` and the safetensors headers only."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from safetensors import safe_open
from torch import Tensor

from fsdp_cp.errors import UserError, one_line
from fsdp_cp.files.json_lines import parse
from models.files import originals, originals_ltx2
from models.files.shipped import find_shipped

SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")
"""Files that may be downloaded, and that a network depends on: settings, weights, vocabularies and chat templates. A
``.bin`` is a pickle, and is never opened."""
ADDITIONS_FILE = "additions.safetensors"
"""File with the tensors of a network's additions (models/additions/), which diffusers does not read."""
HEADS_FILE = "heads.safetensors"
"""File with the last layers of each step of a student with heads, for a hook on diffusers' network."""
EXPERT_FOLDERS = ("transformer", "transformer_2")
"""Folders of a pipeline's two experts: first the expert for the noisier times, then the other."""
_WRAPPERS = re.compile(r"^(module\.|_orig_mod\.|model\.diffusion_model\.)+|(?<=\.)_orig_mod\.")
"""Prefixes of names that DistributedDataParallel, torch.compile and ComfyUI add."""
_LINK = "link one of them and config.json into a new folder, and give that one"
_HASHED_PIECES, _HASHED_BYTES = 64, 4096
"""Number of pieces, and bytes of a piece, that the fingerprint of a file hashes."""


@dataclass(frozen=True, kw_only=True)
class TransformerFolder:
    """A diffusers transformer folder: its config and the shape of every tensor. No weights are read."""

    path: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    additions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the tensors in ``additions.safetensors``, by name."""
    stored: dict[str, str] = field(default_factory=dict)
    """Names in the files, by name in ``shapes``, if they differ: a removed prefix, or names of the original code."""

    @property
    def weight_files(self) -> list[Path]:
        """Files with the network's weights. ``path`` can be one file."""
        if self.path.is_file():
            return [self.path]
        return [file for file in sorted(self.path.glob("*.safetensors")) if file.name != ADDITIONS_FILE]


class Checkpoint(NamedTuple):
    """The networks in a folder."""

    folders: tuple[TransformerFolder, ...]
    """Folder of one network, or folders of two experts with the expert for the noisier times first."""
    boundaries: tuple[float, ...]
    """Time in (0, 1) from which the first expert serves; empty for one network."""


def inspect_transformer(checkpoint: str, setting: str) -> TransformerFolder:
    """Find and describe the transformer in ``checkpoint``, a transformer folder or a pipeline of one network."""
    inspected = inspect_checkpoint(checkpoint, setting, alone=True)
    if inspected.boundaries:
        raise UserError(f"{setting}={checkpoint} is a model of two experts; give the folder of one of them")
    return inspected.folders[0]


def inspect_checkpoint(checkpoint: str, setting: str, *, alone: bool = False, config: str | None = None) -> Checkpoint:
    """Find and describe the networks in ``checkpoint``: one, or the two experts of a pipeline such as Wan 2.2's A14B.

    For a pipeline with a ``boundary_ratio``, ``transformer_2/`` is read too. ``alone`` accepts the folder of the
    noisier expert as a network. ``config`` is a folder whose ``config.json`` replaces the network's own, for one file
    of weights or weights in the names of the original code. ``setting`` names it in messages (``teacher.checkpoint``).
    """
    where = f"{setting}={checkpoint}"
    root = find_shipped(checkpoint)
    given = None if config is None else _given_config(config, setting)
    if root.is_file() and root.suffix == ".safetensors":
        return Checkpoint((_inspect(root, where, given),), ())
    if not str(checkpoint).strip() or not root.is_dir():
        raise UserError(f"{where} is not a folder; give a diffusers pipeline or transformer folder, or a .safetensors")
    path = root / "transformer" if (root / "transformer" / "config.json").is_file() else root
    boundary = None
    if path != root:
        boundary = _boundary(root, where)
    elif not alone and root.absolute().name == "transformer" and _boundary(root.absolute().parent, where) is not None:
        raise UserError(f"{where} is only the high-noise expert of two; give {root.absolute().parent} for both")
    if not (path / "config.json").is_file():
        inside = ", ".join(sorted(file.parent.name for file in root.glob("*/config.json"))[:5])
        hint = f"; there is one in {inside}" if inside else ""
        raise UserError(f"{where} has neither transformer/config.json nor config.json{hint}")
    first = _inspect(path, where, given)
    if boundary is None:
        return Checkpoint((first,), ())
    return Checkpoint((first, _inspect(root / EXPERT_FOLDERS[1], where)), (boundary,))


def _given_config(folder: str, setting: str) -> dict[str, Any]:
    """Return the configuration of ``ROLE.config``, a transformer or pipeline folder."""
    where, root = f"{setting.rpartition('.')[0]}.config={folder}", find_shipped(folder)
    files = [file for file in (root / "transformer" / "config.json", root / "config.json") if file.is_file()]
    if not files:
        raise UserError(f"{where} has neither transformer/config.json nor config.json; give a folder that has one")
    return _read_config(files[0], where)


def _read_config(file: Path, where: str) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        reason = one_line(error.strerror if isinstance(error, OSError) else error)
        raise UserError(f"{where}: {file} cannot be read as a JSON object ({reason})") from error
    return config


def _inspect(path: Path, where: str, given: dict[str, Any] | None = None) -> TransformerFolder:
    """Describe the network in a folder or in one file; a configuration may be ``given``, unless it has diffusers'."""
    neighbor = (path.parent if path.is_file() else path) / "config.json"
    config = given if path.is_file() else _read_config(neighbor, where)
    if config is not None and "quantization_config" in config:
        raise UserError(f"{where} is quantized, which FSDP2 cannot shard; give the weights in bf16 or fp32")
    shapes, stored = _read_weights([path] if path.is_file() else _weight_files(path, where), where)
    if config is None:
        config = _header_config(path, where)
    if config is None and neighbor.is_file():
        config = _read_config(neighbor, where)
    for code in (originals, originals_ltx2):
        if code.is_original(shapes):
            config = code.configure(shapes, given or config, where)
            own = code.diffusers_names(shapes, where)
            shapes = {name: shapes[other] for name, other in own.items()}
            stored = {name: stored[other] for name, other in own.items()}
    if config is None:
        advice = "give a diffusers folder, or set ROLE.config to a folder with its config.json"
        raise UserError(f"{where} has no configuration, and not the names of Wan's or Lightricks' own code; {advice}")
    extra = path / ADDITIONS_FILE
    additions = _read_shapes(extra, where) if extra.is_file() else {}
    return TransformerFolder(path=path, config=config, shapes=shapes, additions=additions, stored=stored)


def _read_weights(files: Sequence[Path], where: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the shape of each tensor in ``files``, and its name there, by its name without wrappers."""
    shapes: dict[str, tuple[int, ...]] = {}
    stored: dict[str, str] = {}
    holders: dict[str, str] = {}
    for file in files:
        for in_file, shape in _read_shapes(file, where).items():
            name = _WRAPPERS.sub("", in_file)
            if name in shapes:  # the reader would take either tensor
                raise UserError(f"{where} holds {name} twice, in {holders[name]} and {file.name}; {_LINK}")
            shapes[name], stored[name], holders[name] = shape, in_file, file.name
    return shapes, stored


def _header_config(file: Path, where: str) -> dict[str, Any] | None:
    """Return the configuration in the header of one file of weights, as Lightricks writes it; ``None`` without one."""
    with safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get("config")
    try:
        config = None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: the config in its header is no JSON ({one_line(error)}); set ROLE.config") from error
    config = config.get("transformer", config) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else None


def _weight_files(path: Path, where: str) -> list[Path]:
    """Return the files that hold the network's weights: one file, or the parts that an index or their names give."""
    indexed: dict[str, tuple[str, ...]] = {}
    for index in path.glob("*.safetensors.index*.json"):
        names = tuple(indexed_files(index, where))
        indexed |= dict.fromkeys(names, names)
    files = [file for file in sorted(path.glob("*.safetensors")) if file.name not in (ADDITIONS_FILE, HEADS_FILE)]
    sets: dict[tuple[str, ...], str] = {}
    for file in files:
        part = _PART.fullmatch(file.name)
        sets.setdefault(indexed.get(file.name) or (part.groups() if part else (file.name,)), file.name)
    if not files:
        raise UserError(f"{where} has no .safetensors file in {path}")
    if len(sets) > 1:
        raise UserError(f"{where} holds several sets of weights ({', '.join(sets.values())}); {_LINK}")
    return files


_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})(.*)\.safetensors")


def defining(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what identifies a network, without diffusers' list of defaults, whose order differs between processes."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in config.items()
        if not key.startswith("_") or key == "_class_name"
    }


def tensor_reader(folder: TransformerFolder) -> Callable[[str], Tensor]:
    """Return a function that reads a tensor of ``folder`` by name."""
    files: dict[str, Path] = {}
    for path in [*folder.weight_files, folder.path / ADDITIONS_FILE]:
        if path.is_file():
            with safe_open(path, framework="pt") as opened:
                files |= dict.fromkeys(opened.keys(), path)

    def read(name: str) -> Tensor:
        stored = folder.stored.get(name, name)
        with safe_open(files[stored], framework="pt") as opened:
            return opened.get_tensor(stored)

    return read


def fingerprint(folder: TransformerFolder) -> str:
    """Return the :func:`fingerprint_of` the weight files in ``folder``; it does not depend on the folder's location."""
    return fingerprint_of(folder.weight_files)


def fingerprint_of(files: Iterable[Path]) -> str:
    """Hash names, sizes and pieces of ``files``, in order. Hashing all bytes of 14B parameters would take minutes."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            for i in range(_HASHED_PIECES):
                data.seek(i * max(0, size - _HASHED_BYTES) // (_HASHED_PIECES - 1))
                digest.update(data.read(_HASHED_BYTES))
    return digest.hexdigest()[:32]


def _boundary(pipeline: Path, where: str) -> float | None:
    """Return the ``boundary_ratio`` of a pipeline of two experts; ``None`` for one network."""
    file = pipeline / "model_index.json"  # a pipeline with one network needs none
    ratio = (parse(file.read_bytes()) or {}).get("boundary_ratio") if file.is_file() else None
    second = pipeline / EXPERT_FOLDERS[1]
    if ratio is None and not second.exists():
        return None
    between = isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 0 < ratio < 1
    if not between or not (second / "config.json").is_file():
        raise UserError(
            f"{where} is a model of two experts, which needs transformer_2/config.json, and in model_index.json a"
            f" boundary_ratio between 0 and 1 (Wan 2.2: .875 for T2V, .9 for I2V), got {one_line(ratio)}; copy it whole"
        )
    return float(cast(float, ratio))


def indexed_files(index: Path, where: str) -> list[str]:
    """Return the files that ``index`` (``*.safetensors.index*.json``) names, sorted; ``where`` is for messages."""
    named = (parse(index.read_bytes()) or {}).get("weight_map") if index.is_file() else None  # else a dangling link
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise UserError(f"{where}: {index.name} is not an index of safetensors files; copy it again")
    names = sorted(set(named.values()))
    for name in names:
        if Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
            raise UserError(f"{where}: {index.name} names {name[:80]!r}, which is not a safetensors file in its folder")
        if not (index.parent / name).is_file():
            raise UserError(f"{where} lacks {name}, which {index.name} names")
    return names


_FLOATS = {"F64", "F32", "F16", "BF16"}


def _read_shapes(file: Path, where: str) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            names = originals_ltx2.transformer_names(tensors.keys(), where)
            slices = {name: tensors.get_slice(name) for name in names}
            shapes = {name: tuple(piece.get_shape()) for name, piece in slices.items()}
            dtypes = {name: str(piece.get_dtype()) for name, piece in slices.items()}
            sharded = "DCP_SHARDING_INFO" in (tensors.metadata() or {})
    except Exception as error:  # safetensors raises its own SafetensorError, which is not public everywhere
        refuse_pointer(file, where)
        raise UserError(f"{where}: {file.name} is not a readable safetensors file ({one_line(error)})") from error
    for name, dtype in dtypes.items():
        if dtype not in _FLOATS:  # the reader would convert quantized integers to wrong weights
            raise UserError(f"{where}: {file.name} holds {name} as {dtype}; give weights in F32, BF16 or F16")
    if sharded:  # the reader would shift tensors by what it says
        raise UserError(f"{where}: {file.name} is one rank's part of a sharded save; give the whole weights")
    return shapes


def refuse_pointer(file: Path, where: str) -> None:
    """Refuse a pointer file that ``git clone`` without git-lfs leaves instead of weights."""
    with file.open("rb") as opened:
        if not opened.read(100).startswith(b"version https://git-lfs"):
            return
    raise UserError(f"{where}: {file.name} is a git-lfs pointer; run git lfs pull in the clone, or download the file")


def check_tensors(folder: TransformerFolder, expected: dict[str, tuple[int, ...]], setting: str) -> None:
    """Compare the tensors in the files with the ``expected`` names and shapes; ``setting`` is for messages."""
    shapes = folder.shapes
    other = [name for name in sorted(expected.keys() & shapes.keys()) if expected[name] != shapes[name]]
    problems = [f"has {name} of shape {shapes[name]}, but its config.json needs {expected[name]}" for name in other]
    for problem, names in (
        ("lacks", expected.keys() - shapes.keys()),
        ("has the unexpected", shapes.keys() - expected.keys()),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            problems.append(f"{problem} {', '.join(sorted(names)[:3])}{more}")
    if problems:
        advice = "is a file missing, or is it of another model, or has it the names of the model's own code?"
        raise UserError(f"{setting}={folder.path} {', and '.join(problems[:3])}; {advice}")
