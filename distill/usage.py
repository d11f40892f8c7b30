"""The texts of ``train.py --help`` and ``--cfg job``, made from the configuration and its dataclasses."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING as MISSING_DEFAULT
from dataclasses import asdict, fields, is_dataclass
from itertools import pairwise
from typing import Any

from omegaconf import MISSING, OmegaConf

from distill.command_line import wanted_information
from distill.config import CONFIGS, DATA, Config, compose_config
from distill.methods import METHODS
from fsdp_cp.errors import shown


def information(arguments: list[str]) -> str | None:
    """What ``--help`` or ``--cfg job`` among ``arguments`` asks for; ``None`` where neither is there.

    Raises:
        UserError: settings that do not compose; an option that train.py does not have.
    """
    wanted, overrides = wanted_information(arguments)
    if wanted is None:
        return None
    config = compose_config(overrides)
    if wanted == "cfg":
        return OmegaConf.to_yaml(OmegaConf.create(asdict(config))).rstrip()
    return usage(config, " ".join(overrides))


def usage(config: Config, chosen: str = "") -> str:
    """The text of ``train.py --help``: the groups and every key with its value and meaning.

    Args:
        config: whose values are shown; of methods and data sets that it has not, the defaults.
        chosen: the words that made it.
    """
    lines = [
        "torchrun --nproc-per-node N train.py experiment=NAME [key=value ...]",
        "",
        "Distils a video diffusion transformer into a few-step student. Later overrides win; lists are [a,b,c].",
        "--cfg job prints the composed configuration; dry_run=true checks it and starts nothing.",
        "",
    ]
    for group in ("experiment", "method", "data", "mesh", "optim"):
        names = sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))
        lines.append(f"  {group}=  {' | '.join(names)}")
    lines += ["", f"Values are those of {chosen or 'experiment=quickstart (the default)'}."]
    sections: list[tuple[str, type, Any]] = [("", Config, config)]
    for prefix, own, classes in (
        ("method.", config.method, [settings for _, settings in METHODS.values()]),
        ("data.", config.data, list(DATA.values())),
    ):
        sections.append((prefix, type(own), own))
        sections += [(prefix, settings, None) for settings in classes if settings is not type(own)]
    for prefix, settings, own in sections:
        title = "" if own is not None else ", which is not chosen: defaults"
        lines += ["", f"{settings.__name__}{title}:"]
        lines += [f"  {key:<46} {text}" for key, text in _described(settings, prefix, own)]
    return "\n".join(lines)


def _described(settings: type, prefix: str, own: Any) -> list[tuple[str, str]]:
    """(key=value, meaning) of every field, nested ones included; the meaning is the string below the field.

    The values are those of ``own``, the defaults where it is ``None``.
    """
    meanings = _field_docs(settings)
    rows: list[tuple[str, str]] = []
    for item in fields(settings):
        if own is not None:
            value = getattr(own, item.name)
        elif item.default_factory is not MISSING_DEFAULT:
            value = item.default_factory()
        else:
            value = item.default if item.default is not MISSING_DEFAULT else None
        if is_dataclass(value):
            if item.name not in ("method", "data"):  # which have sections of their own
                rows += _described(type(value), f"{prefix}{item.name}.", value)
        elif item.name != "name" and value != MISSING:
            rows.append((f"{prefix}{item.name}={shown(value)}", meanings.get(item.name, "")))
        elif item.name != "name" and item.name in meanings:
            rows.append((f"{prefix}{item.name}", meanings[item.name]))
    return rows


def _field_docs(settings: type) -> dict[str, str]:
    """The string literal below each field of a dataclass and of its bases."""
    docs: dict[str, str] = {}
    for cls in reversed(settings.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
        for node, following in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
                docs[node.target.id] = " ".join(ast.literal_eval(following.value).split())
    return docs
