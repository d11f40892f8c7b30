"""Context parallelism for any ``nn.Module``, by a plan that states where tokens are split and gathered.

The plan has the format of diffusers' ``_cp_plan``: ``{module name: entry}``, where an entry is either
``{argument name or output index: split}``, a gather (or a list of gathers, one per output), or :class:`EmbedOwnTokens`.
A *split* is any object with ``split_dim``, ``expected_dims`` and ``split_output``; a *gather* has ``gather_dim``.
diffusers' ``ContextParallelInput`` and ``ContextParallelOutput`` are such objects; :class:`SplitTokens` and
:class:`GatherTokens` are for other models. In a module's name ``*`` stands for one child: ``blocks.*.attn``. If an
argument is a tuple or list, each of its tensors is split, by one split or by a list of splits, one per element.
``None`` stays ``None``. The model's attention must call :func:`fsdp_cp.attention.context_parallel_attention`.

A module may return a tensor, a tuple or list, a mapping or a dataclass (``ModelOutput`` is both). An output index
counts the values in order; in mappings and dataclasses it skips ``None``.

Token counts that ``cp`` does not divide are padded at the tail. A gather drops the pads: it takes the sequence length
from the split, in the same forward, of the argument that its ``source`` names. So does attention
(:mod:`fsdp_cp.sequence_lengths`).

Splitting again after a gather in the same forward raises an error: every rank computes the modules between, and their
gradients would mix complete and partial sums (docs/gradients.md). So does dropout in training: each rank would draw
separate masks, which would depend on the mesh.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.dropout import _DropoutNd

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh, check_mesh
from fsdp_cp.runtime.torch_versions import in_backward
from fsdp_cp.sequence import gather_tokens, local_token_count, split_tokens
from fsdp_cp.sequence_lengths import Lengths, enter, entered, leave, records_of
from fsdp_cp.tiles import Tiles

_ONCE = "split once, before the first block, and gather once, after the last"


@dataclass(frozen=True)
class SplitTokens:
    """Plan entry that splits an argument (or, with ``split_output``, an output) of a module along ``split_dim``.

    An argument may be a tensor, or a tuple or list of tensors (such as rotary tables), each of which is split. With
    ``expected_dims``, a tensor with another number of dimensions is not split: some models' arguments carry no tokens.
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


TilesOf = Callable[..., Mapping[str, Tiles]]
"""Function of the arguments of a model's forward that returns the tiles of the sequences that its plan splits."""


def parallelize_context(model: nn.Module, *, mesh: Mesh, plan: Mapping[str, Any], tiles: TilesOf | None = None) -> None:
    """Register hooks on ``model`` that split and gather tokens by ``plan``. Call it before :func:`shard_module`.

    Args:
        model: the module whose sub-modules the plan names (``""`` is the model itself). Call the model, not its
            sub-modules: each call of the model starts a new record of token counts.
        mesh: the mesh. When ``cp`` is 1, the plan is checked but no hook is registered.
        plan: plan in the format of the module docstring.
        tiles: for sparse attention, a function of the model's arguments that returns the tiles of the video by the
            names of the splits whose tokens are the video's: ``{"hidden_states": Tiles(grid), "rotary": Tiles(grid)}``.
            On a ring of several ranks, these splits put the tokens in tile order, and gathers put them back. Attention
            gets the same tiles by ``Tiles.on(mesh)``.

    Raises:
        UserError: ``mesh`` is not a :class:`Mesh`; the model is already sharded; dropout in training, now or in a
            forward.
        ValueError: an entry names an unknown module or argument, or is neither a split nor a gather; two entries split
            the same argument; several modules each have both a split and a gather. In a forward: an argument is
            neither a tensor nor a tuple or list of tensors; the outputs do not match the plan's gathers; tokens are
            split twice, or after a gather.
    """
    check_mesh(mesh)
    if isinstance(model, FSDPModule):
        raise UserError(f"{type(model).__name__} is sharded already; call parallelize_context before shard_module")
    entries = read_plan(model, plan)
    if mesh.context.cp_size == 1:
        return
    _refuse_dropout(model)
    forwards = _Forwards(mesh, tiles)
    # `begin` runs before and `end` after all other hooks, so that the root's splits and gathers run between them.
    model.register_forward_pre_hook(forwards.begin, prepend=True, with_kwargs=True)
    for planned in entries:
        planned.register(forwards)
    model.register_forward_hook(forwards.end, always_call=True)


class _Forwards:
    """Hooks of one model, which record the token counts that each forward splits."""

    def __init__(self, mesh: Mesh, tiles: TilesOf | None):
        self.mesh, self.groups, self.tiles = mesh, mesh.context, tiles

    def begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        _refuse_dropout(model)  # training mode may be set after parallelize_context
        leave(self)  # after an interrupt the previous forward ended without `end`
        record = Lengths(self.groups, self)
        if self.tiles is not None:
            for name, tiles in self.tiles(*args, **kwargs).items():
                record.tiles[name] = tiles.on(self.mesh)
        enter(record)

    def end(self, _model: nn.Module, _args, _output: Any) -> None:
        leave(self)

    def _running(self) -> Lengths | None:
        return next((record for record in reversed(entered()) if record.owner is self), None)

    def _records(self) -> list[Lengths]:
        running = self._running()
        return records_of(self.groups) if running is None else [running]

    def split(self, x: Tensor, dim: int, name: str, where: str) -> Tensor:
        """Return the rank's own tokens of ``x``; record the token count under ``name``."""
        _check_dim(x, dim, where)
        self.note(name, x.shape[dim], where)
        return split_tokens(self.reorder(x, dim, name, where), self.mesh, dim)

    def reorder(self, x: Tensor, dim: int, name: str, where: str) -> Tensor:
        """Return all tokens of a sequence, in raster order along ``dim``, in the order in which they are split."""
        tiles = self.tiles_of([name], x.shape[dim], where)
        return x if tiles is None else tiles.reorder(x, dim)

    def tiles_of(self, names: Collection[str], total: int, where: str) -> Tiles | None:
        """Return the tiles of a sequence of ``total`` tokens, split under one of ``names``; ``None`` without tiles."""
        found = {
            record.tiles_of(name) for record in self._records() for name in names if record.totals.get(name) == total
        }
        if any(tiles is not None and tiles.tokens != total for tiles in found):
            raise ValueError(f"the plan splits {total} tokens of {names} at {where!r}, but their tiles are {found}")
        if len(found) > 1:
            raise ValueError(f"the plan has split {names} at {where!r} in several orders: {found}; use one")
        return next(iter(found), None)

    def note(self, name: str, total: int, where: str) -> None:
        """Record that ``total`` tokens are split under ``name`` at the module ``where``."""
        running = self._running()
        if running is None:
            return  # a block recomputed in backward, or called without the model
        if running.gathered is not None and not in_backward():
            raise ValueError(
                f"the context-parallel plan splits {name!r} at {where!r} after its gather at {running.gathered!r}:"
                f" gradients of what lies between would be wrong; {_ONCE}"
            )
        if (earlier := running.totals.get(name, total)) != total:
            raise ValueError(
                f"the context-parallel plan splits {name!r} of {total} tokens at {where!r}, after {name!r} of {earlier}"
                " tokens; split a sequence once, and give two sequences two names"
            )
        running.note(name, total)

    def source_of(self, gather: Any, local: int, where: str) -> tuple[int, set[str]]:
        """Return the tokens and names of the sequence that ``gather`` gathers from ``local`` tokens on each rank."""
        source, records = getattr(gather, "source", "hidden_states"), self._records()
        fitting: dict[int, set[str]] = {}
        for record in records:
            for name in [source] if source in record.totals else record.totals:
                total = record.totals[name]
                if local_token_count(total, self.groups.cp_size) == local:
                    fitting.setdefault(total, set()).add(name)
        if len(fitting) != 1:
            known = "; or ".join(map(str, records)) or "nothing (call the model, not its sub-modules)"
            gathered = f"the gather of {where!r} gathers {source!r} of {local} tokens on each rank"
            raise ValueError(f"{gathered}, but this forward has split {known}; give GatherTokens(source=...)")
        return next(iter(fitting.items()))

    def gather(self, x: Tensor, gather: Any, where: str) -> Tensor:
        """Return the full sequence, gathered from each rank's ``x``."""
        dim = gather.gather_dim
        _check_dim(x, dim, where)
        total, names = self.source_of(gather, x.shape[dim], where)
        full = gather_tokens(x, self.mesh, total, dim)
        tiles = self.tiles_of(names, total, where)
        running = self._running()
        if running is not None and running.gathered is None:
            running.gathered = where
        return full if tiles is None else tiles.restore(full, dim)


def _check_dim(x: Tensor, dim: int, where: str) -> None:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"the context-parallel plan of {where!r} has dim={dim} for a tensor of shape {tuple(x.shape)}")


def _refuse_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        p = module.p if isinstance(module, _DropoutNd) else 0
        p = module.dropout if isinstance(module, nn.MultiheadAttention) else p
        if p > 0 and module.training:
            raise UserError(f"{name!r} has dropout p={p} in training, whose masks would depend on the mesh; set p=0")


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(x is None or isinstance(x, Tensor) for x in value)


def _patches(x: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """Cut ``(B, C, T, H, W)`` into patches in raster order, ``(B, C, S, pt, ph, pw)``."""
    sizes, dims = x.shape[2:], range(len(kernel))
    if any(size % patch for size, patch in zip(sizes, kernel, strict=True)):
        raise ValueError(f"the patch size {kernel} must divide the input size {tuple(sizes)}")
    for dim in reversed(dims):
        x = x.unflatten(2 + dim, (-1, kernel[dim]))
    # (B, C, t, pt, h, ph, w, pw) to (B, C, t, h, w, pt, ph, pw)
    x = x.permute(0, 1, *(2 + 2 * dim for dim in dims), *(3 + 2 * dim for dim in dims))
    return x.flatten(2, 1 + len(kernel))


def output_values(output: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the values in a module's output, and a function that returns a copy of the output with new values."""
    if isinstance(output, (list, tuple)):
        kind = type(output)
        return list(output), kind._make if hasattr(kind, "_make") else kind
    if dataclasses.is_dataclass(output):  # check before Mapping: ModelOutput is both, and its items omit None fields
        fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    elif isinstance(output, Mapping):
        fields = dict(output)
    else:
        return [output], lambda values: values[0]
    names = [name for name, value in fields.items() if value is not None]

    def rebuilt(values: list[Any]) -> Any:
        changed = copy.copy(output)
        for name, value in zip(names, values, strict=True):
            if isinstance(output, Mapping):
                changed[name] = value  # a ModelOutput sets its attribute too
            else:
                object.__setattr__(changed, name, value)  # setattr raises for a frozen dataclass
        return changed

    return [fields[name] for name in names], rebuilt


@dataclass
class Planned:
    """Entries of the plan for one module, and their hooks. Values of ``inputs`` are splits or tuples of splits."""

    name: str
    module: nn.Module
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    embedding: EmbedOwnTokens | None = None
    gathers: list[Any] = field(default_factory=list)
    forwards: _Forwards = field(init=False)

    def register(self, forwards: _Forwards) -> None:
        """Register the hooks of the module, which split and gather by ``forwards``."""
        self.forwards = forwards
        if self.embedding is not None:
            self.module.register_forward_pre_hook(self._embed_own)
        if self.inputs:
            names = arguments(self.module)
            self.module.register_forward_pre_hook(partial(self._split_inputs, names), with_kwargs=True)
        if self.outputs:
            self.module.register_forward_hook(self._split_outputs)
        if self.gathers:
            self.module.register_forward_hook(self._gather_outputs)

    def _embed_own(self, module: Any, args):
        assert self.embedding is not None
        (x,) = args
        patches = _patches(x, tuple(module.kernel_size))
        return self.forwards.split(patches, 2, self.embedding.name, self.name).flatten(2, 3)

    def _split_inputs(self, names: list[str], _module, args, kwargs):
        args, kwargs = list(args), dict(kwargs)
        for name, splits in self.inputs.items():
            index = names.index(name)
            if name in kwargs:
                kwargs[name] = self._split_argument(kwargs[name], splits, name)
            elif index < len(args):
                args[index] = self._split_argument(args[index], splits, name)
        return tuple(args), kwargs

    def _split_outputs(self, _module, _args, output):
        values, rebuilt = output_values(output)
        missing = [i for i in self.outputs if i >= len(values)]
        if missing:
            raise self.mistake(f"splits the output {missing[0]!r}, but it has {len(values)} outputs")
        for i, split in self.outputs.items():
            values[i] = self._split_tensor(self._tensor(values[i], i), split, f"{self.name}[{i}]")
        return rebuilt(values)

    def _gather_outputs(self, _module, _args, output):
        values, rebuilt = output_values(output)
        count = len(values)
        if count != len(self.gathers):
            raise self.mistake(
                f"has {len(self.gathers)} gathers, but it returns {count} values; give one or None for each"
            )
        for i, (x, gather) in enumerate(zip(values, self.gathers, strict=True)):
            if gather is not None and (x is not None or count == 1):
                values[i] = self.forwards.gather(self._tensor(x, i), gather, self.name)
        return rebuilt(values)

    def _split_argument(self, value: Any, splits: Any, name: str) -> Any:
        """Split a tensor, or each tensor of a tuple or list, by one split or by one split each."""
        several = isinstance(splits, tuple)
        if value is None:
            return None
        if isinstance(value, Tensor) and not several:
            return self._split_tensor(value, splits, name)
        if not _is_tensor_list(value) or (several and len(splits) != len(value)):
            wanted = f"{len(splits)} tensors in a tuple" if several else "a tensor, a tuple of tensors"
            raise self.mistake(f"splits {name!r}: give {wanted} or None, not a {type(value).__name__}")
        shares = list(value)
        for i, x in enumerate(shares):
            if x is not None:
                split = splits[i] if several else splits
                shares[i] = self._split_tensor(x, split, f"{name}[{i}]")
        return output_values(value)[1](shares)

    def _split_tensor(self, x: Tensor, split: Any, name: str) -> Tensor:
        if split.expected_dims is not None and x.ndim != split.expected_dims:
            return x
        return self.forwards.split(x, split.split_dim, name, self.name)

    def _tensor(self, x: Any, index: int) -> Tensor:
        if not isinstance(x, Tensor):
            advice = "name the sub-module whose output is the tensor, or call the model with return_dict=False"
            raise self.mistake(f"needs a tensor as output {index}, got a {type(x).__name__}; {advice}")
        return x

    def mistake(self, problem: str) -> ValueError:
        return ValueError(f"the context-parallel plan of {self.name!r} {problem}")


def read_plan(model: nn.Module, plan: Mapping[str, Any]) -> list[Planned]:
    """Return the plan's modules in its order, with wildcards expanded, each module once though several keys name it."""
    if not isinstance(plan, Mapping):
        raise UserError(f"plan must be {{module name: SplitTokens, GatherTokens, ...}}, got a {type(plan).__name__}")
    modules: dict[int, Planned] = {}
    for pattern, entry in plan.items():
        for name, module in _named_by(model, pattern):
            planned = modules.setdefault(id(module), Planned(name, module))
            if isinstance(entry, Mapping):
                for key, splits in entry.items():
                    _add_splits(planned, key, splits)
            elif isinstance(entry, EmbedOwnTokens):
                _check_embedding(planned)
                planned.embedding = entry
            else:
                _add_gathers(planned, entry)
    # One module may both split and gather. Between the gather of one and the split of a second ranks repeat each other.
    pairs = [planned.name for planned in modules.values() if planned.inputs and planned.gathers]
    if len(pairs) > 1:
        raise ValueError(
            f"the context-parallel plan splits the input of {pairs[0]!r} and gathers its output, then {pairs[1]!r}'s:"
            f" gradients of what lies between would count cp times; {_ONCE}"
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
                    raise ValueError(f"the plan names {pattern!r}, but {type(model).__name__} has no {path!r}")
                below.append((path, children[child]))
        named = below
    if not named:
        raise ValueError(f"the context-parallel plan names {pattern!r}, which matches no module")
    return named


def _add_splits(planned: Planned, key: str | int, value: Any) -> None:
    several = isinstance(value, (list, tuple))
    splits = tuple(value) if several else (value,)
    if not splits or not all(_has_dim(split, "split_dim") for split in splits):
        raise planned.mistake(f"has an entry without an integer split_dim: {key!r}")
    of_output = any(split.split_output for split in splits)
    if of_output and (several or type(key) is not int or key < 0):
        raise planned.mistake(f"splits the output {key!r}; use its position, 0 for the first, and one split")
    if not of_output and key not in arguments(planned.module):
        raise planned.mistake(f"names the argument {key!r}, which its forward does not have")
    table: dict[Any, Any] = planned.outputs if of_output else planned.inputs  # by positions, or by names
    if key in table:
        raise planned.mistake(f"splits {key!r} by two keys; use one")
    table[key] = splits if several else value


def arguments(module: nn.Module) -> list[str]:
    """Return the names of the arguments of ``module.forward``."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind not in variadic]


def _check_embedding(planned: Planned) -> None:
    module = planned.module
    if planned.embedding is not None:
        raise planned.mistake("embeds by two keys; use one")
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        raise planned.mistake(f"has EmbedOwnTokens, but it is a {type(module).__name__}; split its output")
    kernel, stride, padding = tuple(module.kernel_size), tuple(module.stride), module.padding
    if stride != kernel or any(d != 1 for d in module.dilation) or padding not in ("valid", (0,) * len(kernel)):
        raise planned.mistake(
            f"has EmbedOwnTokens, but not stride {kernel} without padding, dilation; split its output"
        )


def _add_gathers(planned: Planned, entry: Any) -> None:
    several = isinstance(entry, (list, tuple))
    gathers = list(entry) if several else [entry]
    if not gathers or not all(_has_dim(gather, "gather_dim") or (gather is None and several) for gather in gathers):
        raise planned.mistake(f"has an entry without an integer split_dim or gather_dim: {entry!r}")
    if planned.gathers:
        raise planned.mistake("gathers by two keys; use one")
    planned.gathers = gathers


def _has_dim(entry: Any, name: str) -> bool:
    return isinstance(getattr(entry, name, None), int) and not isinstance(getattr(entry, name), bool)
