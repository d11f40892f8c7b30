"""A context-parallel plan, read and checked against the model, before anything is registered.

The format is that of diffusers' ``_cp_plan``; :mod:`fsdp_cp.context_parallel` says what the entries mean.
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
    """Split an argument (or, with ``split_output``, an output) of a module along ``split_dim``.

    An argument may be a tensor, or a tuple or list of tensors (rotary tables, say), of which each is split. With
    ``expected_dims`` a tensor of another rank is left whole: diffusers uses that for arguments which carry tokens in
    some models only.
    """

    split_dim: int
    expected_dims: int | None = None
    split_output: bool = False


@dataclass(frozen=True)
class GatherTokens:
    """Gather an output of a module along ``gather_dim``: a tensor, or a value of a ``ModelOutput``, dict or dataclass.

    It has the tokens of the argument ``of``: its split says how many there are. Where no argument of this name is
    split, all splits must have the same number of tokens.
    """

    gather_dim: int
    expected_dims: int | None = None
    of: str = "hidden_states"


@dataclass(frozen=True)
class EmbedOwnTokens:
    """Split the input of a patch embedding, so that it embeds the rank's own tokens alone.

    For a convolution whose stride is its kernel, ``(pt, ph, pw)`` say: its input ``(B, C, T, H, W)``, which every rank
    holds in full, is cut into patches, in the order (t h w) of the tokens. The rank's own S_local go in one above the
    other, ``(B, C, S_local pt, ph, pw)``, and come out as ``(B, dim, S_local, 1, 1)``, which
    ``flatten(2).transpose(1, 2)`` makes ``(B, S_local, dim)`` of. No rank ever holds ``(B, S, dim)``.
    """

    of: str = "hidden_states"
    """The name of these tokens for a gather."""


@dataclass
class Planned:
    """What the plan has for one module; ``inputs`` and ``outputs`` hold splits, or tuples of them."""

    name: str
    module: nn.Module
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    embedding: EmbedOwnTokens | None = None
    gathers: list[Any] | None = None


def read_plan(model: nn.Module, plan: Mapping[str, Any]) -> list[Planned]:
    """The plan's modules in its order, wildcards expanded; one item for a module, however many keys name it.

    Raises:
        UserError: a plan that is no mapping.
        ValueError: names, arguments or entries that do not fit the model.
    """
    if not isinstance(plan, Mapping):
        raise UserError(f"plan is a {type(plan).__name__}; use {{module name: SplitTokens, GatherTokens, ...}}")
    found: dict[int, Planned] = {}
    for pattern, entry in plan.items():
        for name, module in _named_by(model, pattern):
            planned = found.setdefault(id(module), Planned(name, module))
            if isinstance(entry, Mapping):
                _add_splits(planned, entry)
            elif isinstance(entry, EmbedOwnTokens):
                _check_embedding(planned)
                planned.embedding = entry
            else:
                _add_gathers(planned, entry)
    _refuse_pairs([planned for planned in found.values() if planned.inputs and planned.gathers])
    return list(found.values())


def _named_by(model: nn.Module, pattern: Any) -> list[tuple[str, nn.Module]]:
    """The modules that ``pattern`` names; ``*`` stands for one child, whatever its name."""
    refusal = f"the context-parallel plan names {pattern!r}, which {type(model).__name__} has not"
    if not isinstance(pattern, str):
        raise ValueError(refusal)
    found = [("", model)]
    for atom in pattern.split(".") if pattern else []:
        below = []
        for name, module in found:
            children = dict(module.named_children())
            wanted = list(children) if atom == "*" else [atom]
            missing = [child for child in wanted if child not in children]
            if missing and "*" in pattern:
                raise ValueError(f"{refusal}: there is no {f'{name}.{missing[0]}'.lstrip('.')!r}")
            if missing:
                raise ValueError(refusal)
            below += [(f"{name}.{child}".lstrip("."), children[child]) for child in wanted]
        found = below
    if not found:
        raise ValueError(f"{refusal}: its wildcard matches nothing")
    return found


def _add_splits(planned: Planned, entry: Mapping[str | int, Any]) -> None:
    for key, given in entry.items():
        several = isinstance(given, (list, tuple))
        splits = list(given) if several else [given]
        if not splits or not all(hasattr(split, "split_dim") for split in splits):
            raise ValueError(f"the context-parallel plan of {planned.name!r} has an entry without split_dim: {key!r}")
        for split in splits:
            _check_dim(split.split_dim, "split_dim", planned.name)
        of_output = {bool(split.split_output) for split in splits}
        if of_output == {True} and not several:
            if not isinstance(key, int) or isinstance(key, bool) or key < 0:
                raise ValueError(
                    f"the context-parallel plan of {planned.name!r} splits the output {key!r}; use its position, 0 for"
                    " the first"
                )
            table: dict[Any, Any] = planned.outputs  # by positions, the other by names
        elif of_output == {False}:
            if key not in arguments(planned.module):
                raise ValueError(
                    f"the context-parallel plan of {planned.name!r} names the argument {key!r}, which it has not"
                )
            table = planned.inputs
        else:
            raise ValueError(f"the context-parallel plan of {planned.name!r} has a list with split_output: {key!r}")
        if key in table:
            raise ValueError(
                f"two keys of the context-parallel plan split {key!r} of {planned.name!r}; it can be split once"
            )
        table[key] = tuple(splits) if several else given


def arguments(module: nn.Module) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind not in variadic]


def _check_embedding(planned: Planned) -> None:
    name, module = planned.name, planned.module
    if planned.embedding is not None:
        raise ValueError(f"two keys of the context-parallel plan embed by {name!r}; use one")
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        raise ValueError(
            f"EmbedOwnTokens takes a convolution, but {name!r} is a {type(module).__name__}; split its output"
        )
    kernel = tuple(module.kernel_size)
    overlaps = tuple(module.stride) != kernel or any(d != 1 for d in module.dilation)
    if overlaps or module.padding not in ("valid", (0,) * len(kernel)):
        raise ValueError(
            f"EmbedOwnTokens takes a convolution whose stride is its kernel, without padding, but {name!r} has kernel"
            f" {kernel}, stride {tuple(module.stride)}, padding {module.padding}; split its output"
        )


def _add_gathers(planned: Planned, entry: Any) -> None:
    gathers = list(entry) if isinstance(entry, (list, tuple)) else [entry]
    single = not isinstance(entry, (list, tuple))
    if not all(hasattr(gather, "gather_dim") or (gather is None and not single) for gather in gathers):
        raise ValueError(f"the context-parallel plan of {planned.name!r} is neither a split nor a gather")
    for gather in gathers:
        if gather is not None:
            _check_dim(gather.gather_dim, "gather_dim", planned.name)
    if planned.gathers is not None:
        raise ValueError(f"two keys of the context-parallel plan gather what {planned.name!r} returns; use one")
    planned.gathers = gathers


def _check_dim(dim: Any, name: str, module: str) -> None:
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ValueError(f"the context-parallel plan of {module!r} has {name}={dim!r}; dim must be an integer")


def _refuse_pairs(pairs: list[Planned]) -> None:
    """What lies between a gather and the next split is computed by every rank, so its gradients would count cp times.

    One pair may be the whole network's own.
    """
    if len(pairs) > 1:
        raise ValueError(
            f"the context-parallel plan splits what {pairs[0].name!r} takes and gathers what it returns, and"
            f" {pairs[1].name!r} again: gradients of what lies between would be wrong; split once, before the first"
            " block, and gather once, behind the last"
        )
