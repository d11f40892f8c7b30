"""Context parallelism for any ``nn.Module`` whose plan says where tokens are split and gathered.

The plan has the format of diffusers' ``_cp_plan``: ``{module name: entry}``, where an entry is either
``{argument name or output index: split}``, a gather (or a list of gathers, one per output), or :class:`EmbedOwnTokens`.
A *split* is any object with ``split_dim``, ``expected_dims`` and ``split_output``; a *gather* has ``gather_dim``.
diffusers' ``ContextParallelInput`` and ``ContextParallelOutput`` are such objects, and so are the two classes here, for
models from elsewhere. In a module's name ``*`` stands for one child: ``blocks.*.attn``. An argument that is a tuple or
list has each of its tensors split, by one split or by a list of splits, one per element; one that is ``None`` stays.
Attention itself is the model's business: its processor calls :func:`fsdp_cp.attention.context_parallel_attention`.

What a module returns may be a tensor, a tuple or list, a mapping or a dataclass (``ModelOutput`` is both): a position
is then that of a value in its order, values that are ``None`` not counted for mappings and dataclasses.

Token counts that ``cp`` does not divide are padded at the tail. A gather drops the pads: it has the sequence's length
from the split of the argument that it names (``of``), of the same forward; attention has it from there too
(:mod:`fsdp_cp.context.sequence_lengths`).

Once gathered, tokens cannot be split again in the same forward: what lies between is computed by every rank of the
``cp`` group, and its gradients would be sums of complete and partial ones (docs/gradients.md). That is refused, and so
is dropout with ``p > 0`` in training: each rank would draw masks of its own, for the mesh's partition.
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
    """Register the hooks that split and gather tokens by ``plan``, in place; before :func:`shard_module`.

    Args:
        model: the module whose sub-modules the plan names (``""`` is the model itself). Call it, not its sub-modules,
            so that the token counts of each forward are its own.
        mesh: the mesh; when ``cp`` is 1 the plan is checked all the same, and nothing is registered.
        plan: see the module's docstring.

    Raises:
        UserError: a mesh of another kind; a model that is sharded already; dropout in training, here or in a forward.
        ValueError: an entry that names no module or no argument, or that is neither split nor gather; two that split
            the same; a split and a gather around each of several modules. In a forward: an argument that is neither a
            tensor nor a tuple or list of them; an output that has not as many values as the plan has gathers, or none
            that can be gathered; a split after a gather, or of tokens that are split already.
    """
    check_mesh(mesh)
    if isinstance(model, FSDPModule):
        raise UserError(f"{type(model).__name__} is sharded already; call parallelize_context before shard_module")
    found = read_plan(model, plan)
    if mesh.context.cp_size == 1:
        return
    _refuse_dropout(model)
    forwards = _Forwards(mesh)
    # Before all hooks of the model, and at the end after them: the root's own splits and gathers are inside.
    model.register_forward_pre_hook(forwards.begin, prepend=True)
    for planned in found:
        if planned.embedding is not None:
            _register_embedding(planned, forwards)
        if planned.inputs or planned.outputs:
            _register_splits(planned, forwards)
        if planned.gathers is not None:
            _register_gathers(planned, forwards)
    model.register_forward_hook(forwards.end, always_call=True)


class _Forwards:
    """Hooks of one model, which note what each forward splits."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.groups = mesh, mesh.context

    def begin(self, model: nn.Module, _args) -> None:
        _refuse_dropout(model)  # it may have been put into training mode since
        leave(self)  # an interrupt ends a forward without its hooks
        enter(Lengths(self.groups, self))

    def end(self, _model: nn.Module, _args, _output: Any) -> None:
        leave(self)

    def _running(self) -> Lengths | None:
        return next((record for record in reversed(entered()) if record.owner is self), None)

    def split(self, x: Tensor, dim: int, name: str, where: str) -> Tensor:
        """Return the rank's own tokens of ``x``, noted under ``name``."""
        _check_dim(x, dim, where)
        self.note(name, x.shape[dim], where)
        return split_tokens(x, self.mesh, dim)

    def note(self, name: str, total: int, where: str) -> None:
        """Record that ``total`` tokens are split under ``name`` at the module ``where``."""
        running = self._running()
        if running is None:
            return  # a block that runs again in backward, or one that is called without the model
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
        of = getattr(gather, "of", "hidden_states")
        running = self._running()
        records = [running] if running is not None else records_of(self.groups)
        totals = {t for r in records for t in ([r.totals[of]] if of in r.totals else r.totals.values())}
        fitting = [total for total in totals if local_token_count(total, self.groups.cp_size) == local]
        if len(fitting) != 1:
            known = "; or ".join(map(str, records)) or "nothing (call the model, not its sub-modules)"
            raise ValueError(
                f"the gather of {where!r} is of {of!r}, {local} tokens on each rank, but this forward has split"
                f" {known}; give GatherTokens(of=...)"
            )
        return fitting[0]

    def gather(self, x: Tensor, gather: Any, where: str) -> Tensor:
        """Return the sequence of which ``x`` is the rank's own."""
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
        each = splits if isinstance(splits, tuple) else (splits,) * len(value)
        own = [
            None if x is None else apply_split(x, split, f"{key}[{i}]")
            for i, (x, split) in enumerate(zip(value, each, strict=True))
        ]
        return _outputs(value)[1](own)

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
    kernel, name = tuple(planned.module.kernel_size), planned.embedding.of

    def embed_own(_module, args):
        (x,) = args
        own, total = _own_patches(x, kernel, forwards.mesh)
        forwards.note(name, total, planned.name)
        return own

    planned.module.register_forward_pre_hook(embed_own)


def _own_patches(x: Tensor, kernel: tuple[int, ...], mesh: Mesh) -> tuple[Tensor, int]:
    """Return the rank's own patches of ``(B, C, T, H, W)``, ``(B, C, S_local pt, ph, pw)``, and the number of all."""
    sizes, dims = x.shape[2:], range(len(kernel))
    if any(size % patch for size, patch in zip(sizes, kernel, strict=True)):
        raise ValueError(f"an input of {tuple(sizes)} positions cannot be cut into patches of {kernel}")
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
            f"value {index} of what {name!r} returns is a {type(x).__name__}, not a tensor; name the sub-module whose"
            " output is the tensor, or call the model with return_dict=False"
        )
    return x


def _outputs(output: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the values of what a module returned, and a function that puts others in their places."""
    if isinstance(output, (list, tuple)):
        kind = type(output)
        return list(output), kind._make if hasattr(kind, "_make") else kind
    fields = None
    if dataclasses.is_dataclass(output):  # ModelOutput too, whose items are the fields that are not None
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
                object.__setattr__(changed, name, value)  # a frozen dataclass refuses the plain way
        return changed

    return [fields[name] for name in names], rebuilt
