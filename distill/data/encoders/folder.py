"""Parts of a diffusers pipeline folder: settings and weights. Nothing is unpickled, fetched or run from a folder."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fsdp_cp.errors import UserError, one_line
from models.files.checkpoint_files import indexed_files, refuse_pointer

_OWN_CODE = ("auto_map", "custom_pipelines", "attn_implementation", "_attn_implementation", "experts_implementation")
"""Keys by which a folder makes the libraries fetch code, or run its own."""
MOST_LAYERS, MAX_NUMBER = 1024, 2**24


def part_settings(
    folder: Path, part: str, where: str, name: str = "config.json", *, optional: bool = False
) -> dict[str, Any]:
    """Return the JSON object of ``part/name``, or ``{}`` for a missing one that is ``optional``. Refuse keys that load
    code, and sizes beyond any network's."""
    try:
        settings = json.loads((folder / part / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if optional:
            return {}
        raise UserError(f"{where} has no {part}/{name}; save it with save_pretrained") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {part}/{name} cannot be read ({one_line(error)}); save it again") from error
    if not isinstance(settings, dict):
        raise UserError(f"{where}: {part}/{name} is not a JSON object; save it again")
    for key in _OWN_CODE:
        if settings.get(key) is not None:
            raise UserError(f"{where}: {part}/{name} has {key}, code of its own, which is never run; remove that key")
    if settings.get("quantization_config") is not None:
        raise UserError(f"{where}: {part}/{name} has quantization_config; give weights that are not quantized")
    for key, value in settings.items():
        most = MOST_LAYERS if key in ("num_layers", "num_res_blocks", "num_decoder_layers") else MAX_NUMBER
        # Booleans are numbers too. A tokenizer's model_max_length is "no limit" as 1e30.
        if not part.startswith("tokenizer") and isinstance(value, (int, float)) and not -most <= value <= most:
            raise UserError(f"{where}: {part}/{name} has {key}={shown(value)}, beyond {most}; give the folder's own")
    return settings


def whole_number(settings: dict[str, Any], key: str, where: str, *, default: Any = None, most: int = MAX_NUMBER) -> int:
    """Return a whole number from 1 to ``most``. Raises ``UserError`` for another value; ``where`` names the file."""
    value = settings.get(key, default)
    if type(value) is not int or not 1 <= value <= most:
        raise UserError(f"{where} has {key}={shown(value)}; give the folder's own")
    return value


def shown(value: Any) -> str:
    """Return a value of a JSON file for a message, cut to 60 characters."""
    return one_line(repr(value), 60)


def check_weight_files(folder: Path, where: str) -> None:
    """Refuse weights of a part that are not safetensors inside the folder, or are an adapter."""
    part = folder.name
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{where}: {part}/ holds no .safetensors weights; other formats are not read")
    for file in folder.glob("*.safetensors"):
        refuse_pointer(file, f"{where}: {part}/")
    for index in folder.glob("*.safetensors.index.json"):
        indexed_files(index, f"{where}: {part}/")
    if (folder / "adapter_config.json").exists():  # transformers would load the model that it names instead
        raise UserError(f"{where}: {part}/ holds adapter_config.json; merge the adapter into the weights")


def require_class(where: str, part: str, architectures: Any, wanted: str) -> str:
    """Return ``wanted``, or the first of ``A or B``, that is among the class names ``architectures``. Raises
    ``UserError`` if none is."""
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    for name in wanted.split(" or "):
        if name in names:
            return name
    holds = shown(names[0]).strip("'") if names else "a model without a class name"
    raise UserError(f"{where}: {part}/ holds {holds}; use {wanted}")


@contextmanager
def readable(folder: Path, part: str) -> Iterator[None]:
    """Turn whatever the libraries raise for a damaged part of a folder into one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # TypeError, KeyError, bare Exceptions of the tokenizers library, Jinja's
        raise UserError(f"data.encoders={folder}: {part}/ cannot be read ({one_line(error)}); save it again") from error


def load_part(model_class: Any, folder: Path, part: str, **options: Any) -> torch.nn.Module:
    """Call ``from_pretrained``; raise ``UserError`` where the libraries only warn and leave random weights."""
    with readable(folder, part):
        model, info = model_class.from_pretrained(
            folder / part, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
        )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in info.get(what) or ())
        if keys:
            wrong = f"{len(keys)} {what.replace('_', ' ')}, first {keys[0]}"
            raise UserError(f"data.encoders={folder}: {part}/ has {wrong}; give weights that fit {part}/config.json")
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and not weight.isfinite().all():
            raise UserError(f"data.encoders={folder}: {part}/ is damaged, {name} is not finite; copy it again")
    return model.eval().requires_grad_(False)
