"""Reader of context-parallel plans, which checks them against the model before any hook is registered.

The format is that of diffusers' ``_cp_plan``; :mod:`fsdp_cp.context_parallel` describes the entries.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fsdp_cp.errors import UserError


@dataclass(frozen=True)
class SplitTokens:
    """Plan entry that splits an argument (or, with ``split_output``, an output) of a module along ``split_dim``.

    An argument may be a tensor, or a tuple or list of tensors (such as rotary tables), each of which is split. With
    ``expected_dims``, a tensor with another number of dimensions is not split: diffusers uses this for arguments that
    carry tokens only in some models.
    """

    split_dim: int
    expected_dims: int | None = None
    split_output: bool = False


@dataclass(frozen=True)
class GatherTokens:
    """Plan entry that gathers an output along ``gather_dim``: a tensor, or a value of a ModelOutput, dict or dataclass.

    The split of the argument ``source`` determines the number of tokens. If no argument of this name is split, all
    splits must have the same number of tokens.
    """

    gather_dim: int
    source: str = "hidden_states"


@dataclass(frozen=True)
class EmbedOwnTokens:
    """Plan entry that splits the input of a patch embedding, so that it embeds only the rank's own tokens.

    The module must be a convolution whose stride equals its kernel, for example ``(pt, ph, pw)``. Its input ``(B, C, T,
    H, W)``, which every rank holds, is cut into patches in token order (t h w). The rank's own S_local patches are
    stacked to ``(B, C, S_local pt, ph, pw)``. The output is ``(B, dim, S_local, 1, 1)``; ``flatten(2).transpose(1, 2)``
    turns it into ``(B, S_local, dim)``. No rank ever holds ``(B, S, dim)``.
    """

    name: str = "hidden_states"
    """Name of these tokens for a gather."""


@dataclass
class Planned:
    """Entries of the plan for one module. Values of ``inputs`` and ``outputs`` are splits or tuples of splits."""

    name: str
    module: nn.Module
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    embedding: EmbedOwnTokens | None = None
    gathers: list[Any] | None = None


def read_plan(model: nn.Module, plan: Mapping[str, Any]) -> list[Planned]:
    """Return the plan's modules in its order, with wildcards expanded; each module once, even if several keys name it.

    Raises:
        UserError: the plan is not a mapping.
        ValueError: names, arguments or entries do not fit the model.
    """
    if not isinstance(plan, Mapping):
        raise UserError(f"plan must be {{module name: SplitTokens, GatherTokens, ...}}, got a {type(plan).__name__}")
    modules: dict[int, Planned] = {}
    for pattern, entry in plan.items():
        for name, module in _named_by(model, pattern):
            planned = modules.setdefault(id(module), Planned(name, module))
            if isinstance(entry, Mapping):
                _add_splits(planned, entry)
            elif isinstance(entry, EmbedOwnTokens):
                _check_embedding(planned)
                planned.embedding = entry
            else:
                _add_gathers(planned, entry)
    # One module may both split and gather. Between the gather of one and the split of a second, every rank computes
    # everything.
    pairs = [planned.name for planned in modules.values() if planned.inputs and planned.gathers]
    if len(pairs) > 1:
        raise ValueError(
            f"the context-parallel plan splits the input of {pairs[0]!r} and gathers its output, and {pairs[1]!r}"
            " again: gradients of what lies between would count cp times; split once, before the first block, and"
            " gather once, after the last"
        )
    return list(modules.values())


def _named_by(model: nn.Module, pattern: Any) -> list[tuple[str, nn.Module]]:
    """Return the modules that ``pattern`` names; ``*`` stands for one child, whatever its name."""
    if not isinstance(pattern, str):
        raise ValueError(f"the context-parallel plan names {pattern!r}; use the name of a module")
    named = [("", model)]
    for atom in pattern.split(".") if pattern else []:
        below = []
        for name, module in named:
            children = dict(module.named_children())
            for child in children if atom == "*" else [atom]:
                path = f"{name}.{child}".lstrip(".")
                if child not in children:
                    raise ValueError(
                        f"the context-parallel plan names {pattern!r}, but {type(model).__name__} has no {path!r}"
                    )
                below.append((path, children[child]))
        named = below
    if not named:
        raise ValueError(f"the context-parallel plan names {pattern!r}, which matches no module")
    return named


def _mistake(planned: Planned, problem: str) -> ValueError:
    return ValueError(f"the context-parallel plan of {planned.name!r} {problem}")


def _add_splits(planned: Planned, entry: Mapping[str | int, Any]) -> None:
    for key, value in entry.items():
        several = isinstance(value, (list, tuple))
        splits = tuple(value) if several else (value,)
        if not splits or not all(_has_dim(split, "split_dim") for split in splits):
            raise _mistake(planned, f"has an entry without an integer split_dim: {key!r}")
        of_output = any(split.split_output for split in splits)
        if of_output and several:
            raise _mistake(planned, f"has a list with split_output: {key!r}")
        if of_output and (not isinstance(key, int) or isinstance(key, bool) or key < 0):
            raise _mistake(planned, f"splits the output {key!r}; use its position, 0 for the first")
        if not of_output and key not in arguments(planned.module):
            raise _mistake(planned, f"names the argument {key!r}, which its forward does not have")
        table: dict[Any, Any] = planned.outputs if of_output else planned.inputs  # by positions, or by names
        if key in table:
            raise _mistake(planned, f"splits {key!r} by two keys; use one")
        table[key] = splits if several else value


def arguments(module: nn.Module) -> list[str]:
    """Return the names of the arguments of ``module.forward``."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind not in variadic]


def _check_embedding(planned: Planned) -> None:
    module = planned.module
    if planned.embedding is not None:
        raise _mistake(planned, "embeds by two keys; use one")
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        raise _mistake(planned, f"has EmbedOwnTokens, but it is a {type(module).__name__}; split its output")
    kernel, stride, padding = tuple(module.kernel_size), tuple(module.stride), module.padding
    if stride != kernel or any(d != 1 for d in module.dilation) or padding not in ("valid", (0,) * len(kernel)):
        raise _mistake(
            planned,
            "has EmbedOwnTokens, which takes a convolution whose stride is its kernel, without padding; it has kernel"
            f" {kernel}, stride {stride}, padding {padding}, dilation {module.dilation}; split its output",
        )


def _add_gathers(planned: Planned, entry: Any) -> None:
    several = isinstance(entry, (list, tuple))
    gathers = list(entry) if several else [entry]
    if not all(_has_dim(gather, "gather_dim") or (gather is None and several) for gather in gathers):
        raise _mistake(planned, f"has an entry without an integer split_dim or gather_dim: {entry!r}")
    if planned.gathers is not None:
        raise _mistake(planned, "gathers by two keys; use one")
    planned.gathers = gathers


def _has_dim(entry: Any, name: str) -> bool:
    return isinstance(getattr(entry, name, None), int) and not isinstance(getattr(entry, name), bool)
