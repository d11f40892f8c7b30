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
(:mod:`fsdp_cp.context.sequence_lengths`).

Once gathered, tokens cannot be split again in the same forward: every rank of the ``cp`` group computes the modules
between, and their gradients would mix complete and partial sums (docs/gradients.md). Such a split raises an error. So
does dropout with ``p > 0`` in training: each rank would draw separate masks, which would depend on the mesh.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.dropout import _DropoutNd

from fsdp_cp.context.plan import EmbedOwnTokens, GatherTokens, Planned, SplitTokens, arguments, read_plan
from fsdp_cp.context.sequence_lengths import Lengths, enter, entered, in_backward, leave, records_of
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh, check_mesh
from fsdp_cp.sequence import gather_tokens, local_token_count, split_tokens

__all__ = ["EmbedOwnTokens", "GatherTokens", "SplitTokens", "parallelize_context"]


def parallelize_context(model: nn.Module, *, mesh: Mesh, plan: Mapping[str, Any]) -> None:
    """Register hooks on ``model`` that split and gather tokens by ``plan``. Call it before :func:`shard_module`.

    Args:
        model: the module whose sub-modules the plan names (``""`` is the model itself). Call the model, not its
            sub-modules: each call of the model starts a new record of token counts.
        mesh: the mesh. When ``cp`` is 1, the plan is checked but no hook is registered.
        plan: plan in the format of the module docstring.

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
    forwards = _Forwards(mesh)
    # `begin` runs before and `end` after all other hooks, so that the root's splits and gathers run between them.
    model.register_forward_pre_hook(forwards.begin, prepend=True)
    for planned in entries:
        if planned.embedding is not None:
            _register_embedding(planned, forwards)
        if planned.inputs or planned.outputs:
            _register_splits(planned, forwards)
        if planned.gathers is not None:
            _register_gathers(planned, forwards)
    model.register_forward_hook(forwards.end, always_call=True)


class _Forwards:
    """Hooks of one model, which record the token counts that each forward splits."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.groups = mesh, mesh.context

    def begin(self, model: nn.Module, _args) -> None:
        _refuse_dropout(model)  # training mode may be set after parallelize_context
        leave(self)  # after an interrupt the previous forward ended without `end`
        enter(Lengths(self.groups, self))

    def end(self, _model: nn.Module, _args, _output: Any) -> None:
        leave(self)

    def _running(self) -> Lengths | None:
        return next((record for record in reversed(entered()) if record.owner is self), None)

    def split(self, x: Tensor, dim: int, name: str, where: str) -> Tensor:
        """Return the rank's own tokens of ``x``; record the token count under ``name``."""
        _check_dim(x, dim, where)
        self.note(name, x.shape[dim], where)
        return split_tokens(x, self.mesh, dim)

    def note(self, name: str, total: int, where: str) -> None:
        """Record that ``total`` tokens are split under ``name`` at the module ``where``."""
        running = self._running()
        if running is None:
            return  # a block recomputed in backward, or called without the model
        if running.gathered is not None and not in_backward():
            raise ValueError(
                f"the context-parallel plan splits {name!r} at {where!r} after its gather at {running.gathered!r}:"
                " gradients of what lies between would be wrong; split once, before the first block, and gather once,"
                " after the last"
            )
        if running.totals.get(name, total) != total:
            raise ValueError(
                f"the context-parallel plan splits {name!r} at {where!r}, {total} tokens, when this forward has split"
                f" {name!r} of {running.totals[name]} tokens already; split a sequence once, and give arguments of two"
                " sequences two names"
            )
        running.note(name, total)

    def total_of(self, gather: Any, local: int, where: str) -> int:
        """Return the number of tokens in the sequence that ``gather`` gathers from ``local`` on each rank."""
        source = getattr(gather, "source", "hidden_states")
        running = self._running()
        records = [running] if running is not None else records_of(self.groups)
        totals = {t for r in records for t in ([r.totals[source]] if source in r.totals else r.totals.values())}
        fitting = [total for total in totals if local_token_count(total, self.groups.cp_size) == local]
        if len(fitting) != 1:
            known = "; or ".join(map(str, records)) or "nothing (call the model, not its sub-modules)"
            raise ValueError(
                f"the gather of {where!r} gathers {source!r} of {local} tokens on each rank, but this forward has split"
                f" {known}; give GatherTokens(source=...)"
            )
        return fitting[0]

    def gather(self, x: Tensor, gather: Any, where: str) -> Tensor:
        """Return the full sequence, gathered from each rank's ``x``."""
        dim = gather.gather_dim
        _check_dim(x, dim, where)
        full = gather_tokens(x, self.mesh, self.total_of(gather, x.shape[dim], where), dim)
        running = self._running()
        if running is not None and running.gathered is None:
            running.gathered = where
        return full


def _check_dim(x: Tensor, dim: int, where: str) -> None:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"the context-parallel plan of {where!r} has dim={dim} for a tensor of shape {tuple(x.shape)}")


def _refuse_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        p = module.p if isinstance(module, _DropoutNd) else 0
        p = module.dropout if isinstance(module, nn.MultiheadAttention) else p
        if p > 0 and module.training:
            raise UserError(
                f"{name!r} has dropout p={p} in training: on split tokens its masks would depend on the mesh; set p=0"
                " (or cp=1)"
            )


def _register_splits(planned: Planned, forwards: _Forwards) -> None:
    name, inputs, outputs = planned.name, planned.inputs, planned.outputs
    parameters = arguments(planned.module)

    def apply_split(x: Tensor, split: Any, key: str) -> Tensor:
        if split.expected_dims is not None and x.ndim != split.expected_dims:
            return x
        return forwards.split(x, split.split_dim, key, name)

    def apply_splits(value: Any, splits: Any, key: str) -> Any:
        if value is None:
            return None
        if isinstance(value, Tensor) and not isinstance(splits, tuple):
            return apply_split(value, splits, key)
        is_tuple = isinstance(value, (list, tuple)) and all(x is None or isinstance(x, Tensor) for x in value)
        if not is_tuple or (isinstance(splits, tuple) and len(splits) != len(value)):
            wanted = (
                f"a tuple of {len(splits)} tensors" if isinstance(splits, tuple) else "a tensor, a tuple of tensors"
            )
            raise ValueError(
                f"the context-parallel plan splits the argument {key!r} of {name!r}, which must be {wanted} or None,"
                f" got a {type(value).__name__}"
            )
        splits = splits if isinstance(splits, tuple) else (splits,) * len(value)
        shares = [
            None if x is None else apply_split(x, split, f"{key}[{i}]")
            for i, (x, split) in enumerate(zip(value, splits, strict=True))
        ]
        return _outputs(value)[1](shares)

    def split_inputs(_module, args, kwargs):
        args, kwargs = list(args), dict(kwargs)
        for key, splits in inputs.items():
            index = parameters.index(key)
            if key in kwargs:
                kwargs[key] = apply_splits(kwargs[key], splits, key)
            elif index < len(args):
                args[index] = apply_splits(args[index], splits, key)
        return tuple(args), kwargs

    def split_outputs(_module, _args, output):
        values, rebuilt = _outputs(output)
        missing = [i for i in outputs if i >= len(values)]
        if missing:
            raise ValueError(f"{name!r} has {len(values)} outputs; its context-parallel plan splits {missing[0]!r}")
        return rebuilt(
            [
                apply_split(_tensor(x, name, i), outputs[i], f"{name}[{i}]") if i in outputs else x
                for i, x in enumerate(values)
            ]
        )

    if inputs:
        planned.module.register_forward_pre_hook(split_inputs, with_kwargs=True)
    if outputs:
        planned.module.register_forward_hook(split_outputs)


def _register_embedding(planned: Planned, forwards: _Forwards) -> None:
    assert isinstance(planned.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and planned.embedding is not None
    kernel, name = tuple(planned.module.kernel_size), planned.embedding.name

    def embed_own(_module, args):
        (x,) = args
        patches, total = _own_patches(x, kernel, forwards.mesh)
        forwards.note(name, total, planned.name)
        return patches

    planned.module.register_forward_pre_hook(embed_own)


def _own_patches(x: Tensor, kernel: tuple[int, ...], mesh: Mesh) -> tuple[Tensor, int]:
    """Return the rank's own patches of ``(B, C, T, H, W)``, as ``(B, C, S_local pt, ph, pw)``, and the total number."""
    sizes, dims = x.shape[2:], range(len(kernel))
    if any(size % patch for size, patch in zip(sizes, kernel, strict=True)):
        raise ValueError(f"the patch size {kernel} must divide the input size {tuple(sizes)}")
    for dim in reversed(dims):
        x = x.unflatten(2 + dim, (-1, kernel[dim]))
    # (B, C, t, pt, h, ph, w, pw) to (B, C, t, h, w, pt, ph, pw)
    x = x.permute(0, 1, *(2 + 2 * dim for dim in dims), *(3 + 2 * dim for dim in dims))
    patches = x.flatten(2, 1 + len(kernel))
    return split_tokens(patches, mesh, 2).flatten(2, 3), patches.shape[2]


def _register_gathers(planned: Planned, forwards: _Forwards) -> None:
    name, gathers = planned.name, planned.gathers
    assert gathers is not None

    def gather_outputs(_module, _args, output):
        values, rebuilt = _outputs(output)
        if len(values) != len(gathers):
            raise ValueError(
                f"{name!r} returns {len(values)} values ({type(output).__name__}), but its context-parallel plan has"
                f" {len(gathers)} gathers; give a list with a gather or None for each, or name the sub-module whose"
                " output is the tensor"
            )
        return rebuilt(
            [
                x if gather is None or (x is None and len(values) > 1)
                else forwards.gather(_tensor(x, name, i), gather, name)
                for i, (x, gather) in enumerate(zip(values, gathers, strict=True))
            ]
        )  # fmt: skip

    planned.module.register_forward_hook(gather_outputs)


def _tensor(x: Any, name: str, index: int) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(
            f"output {index} of {name!r} must be a tensor, got a {type(x).__name__}; name the sub-module whose"
            " output is the tensor, or call the model with return_dict=False"
        )
    return x


def _outputs(output: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the values in a module's output, and a function that returns a copy of the output with new values."""
    if isinstance(output, (list, tuple)):
        kind = type(output)
        return list(output), kind._make if hasattr(kind, "_make") else kind
    fields = None
    if dataclasses.is_dataclass(output):  # check before Mapping: ModelOutput is both, and its items omit None fields
        fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    elif isinstance(output, Mapping):
        fields = dict(output)
    if fields is None:
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
