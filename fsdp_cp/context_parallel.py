"""Context parallelism for any ``nn.Module`` whose plan says where tokens are split and gathered.

The plan has the format of diffusers' ``_cp_plan``: ``{module name: entry}``, where an entry is either
``{argument name or output index: split}``, a gather (or a list of gathers, one per output), or :class:`EmbedOwnTokens`.
A *split* is any object with ``split_dim``, ``expected_dims`` and ``split_output``; a *gather* has ``gather_dim``.
diffusers' ``ContextParallelInput`` and ``ContextParallelOutput`` are such objects, and so are the two classes here, for
models from elsewhere. Attention itself is the model's business: its processor calls
:func:`fsdp_cp.attention.context_parallel_attention`.

What a module returns may be a tensor, a tuple or list, a mapping or a dataclass (``ModelOutput`` is both): a position
is then that of a value in its order, values that are ``None`` not counted for mappings and dataclasses.

Token counts that ``cp`` does not divide are padded at the tail. A gather drops the pads: it has the sequence's length
from the split of the argument that it names (``of``), of the same forward.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh, check_mesh
from fsdp_cp.sequence import gather_tokens, split_tokens


@dataclass(frozen=True)
class SplitTokens:
    """Split an argument (or, with ``split_output``, an output) of a module along ``split_dim``.

    With ``expected_dims`` a tensor of another rank is left whole: diffusers uses that for arguments which carry
    tokens in some models only.
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


def parallelize_context(model: nn.Module, *, mesh: Mesh, plan: Mapping[str, Any]) -> None:
    """Register the hooks that split and gather tokens by ``plan``, in place; before :func:`shard_module`.

    Args:
        model: the module whose sub-modules the plan names (``""`` is the model itself).
        mesh: the mesh; nothing is registered when ``cp`` is 1.
        plan: see the module's docstring.

    Raises:
        UserError: a mesh of another kind; a model that is sharded already.
        ValueError: an entry that names no module or no argument, or that is neither split nor gather. In a forward: an
            output that has not as many values as the plan has gathers, or none that can be gathered.
    """
    check_mesh(mesh)
    if isinstance(model, FSDPModule):
        raise UserError(f"{type(model).__name__} is sharded already; call parallelize_context before shard_module")
    if not isinstance(plan, Mapping):
        raise UserError(f"plan is a {type(plan).__name__}; use {{module name: SplitTokens, GatherTokens, ...}}")
    if mesh.cp_size == 1:
        return
    totals: dict[str, int] = {}
    for name, entry in plan.items():
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            raise ValueError(
                f"the context-parallel plan names {name!r}, which {type(model).__name__} has not"
            ) from error
        if isinstance(entry, Mapping):
            _register_splits(module, name, entry, mesh, totals)
        elif isinstance(entry, EmbedOwnTokens):
            _register_embedding(module, name, entry, mesh, totals)
        else:
            gathers = entry if isinstance(entry, (list, tuple)) else [entry]
            _register_gathers(module, name, gathers, mesh, totals)


def _register_splits(
    module: nn.Module, name: str, entry: Mapping[str | int, Any], mesh: Mesh, totals: dict[str, int]
) -> None:
    if not all(hasattr(split, "split_dim") for split in entry.values()):
        raise ValueError(f"the context-parallel plan of {name!r} has an entry without split_dim")
    inputs = {key: split for key, split in entry.items() if not split.split_output}
    outputs = {key: split for key, split in entry.items() if split.split_output}
    parameters = list(inspect.signature(module.forward).parameters)
    unknown = [key for key in inputs if key not in parameters]
    if unknown:
        raise ValueError(f"the context-parallel plan of {name!r} names the argument {unknown[0]!r}, which it has not")

    def apply_split(x: Tensor, split: Any, key: str) -> Tensor:
        if split.expected_dims is not None and x.ndim != split.expected_dims:
            totals.pop(key, None)  # or the length of an earlier call's tokens would stay
            return x
        totals[key] = x.shape[split.split_dim]
        return split_tokens(x, mesh, split.split_dim)

    def split_inputs(_module, args, kwargs):
        args = list(args)
        for key, split in inputs.items():
            index = parameters.index(key)
            if isinstance(kwargs.get(key), Tensor):
                kwargs = {**kwargs, key: apply_split(kwargs[key], split, key)}
            elif index < len(args) and isinstance(args[index], Tensor):
                args[index] = apply_split(args[index], split, key)
        return tuple(args), kwargs

    def split_outputs(_module, _args, output):
        values, rebuilt = _outputs(output)
        missing = [i for i in outputs if not isinstance(i, int) or not 0 <= i < len(values)]
        if missing:
            raise ValueError(f"{name!r} has {len(values)} outputs; its context-parallel plan splits {missing[0]!r}")
        return rebuilt(
            [
                apply_split(_tensor(x, name, i), outputs[i], f"{name}[{i}]") if i in outputs else x
                for i, x in enumerate(values)
            ]
        )

    if inputs:
        module.register_forward_pre_hook(split_inputs, with_kwargs=True)
    if outputs:
        module.register_forward_hook(split_outputs)


def _register_embedding(
    module: nn.Module, name: str, entry: EmbedOwnTokens, mesh: Mesh, totals: dict[str, int]
) -> None:
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

    def embed_own(_module, args):
        (x,) = args
        own, totals[entry.of] = _own_patches(x, kernel, mesh)
        return own

    module.register_forward_pre_hook(embed_own)


def _own_patches(x: Tensor, kernel: tuple[int, ...], mesh: Mesh) -> tuple[Tensor, int]:
    """``(B, C, T, H, W)`` to the rank's own patches ``(B, C, S_local pt, ph, pw)``, and how many there are in all."""
    sizes, axes = x.shape[2:], range(len(kernel))
    if any(size % patch for size, patch in zip(sizes, kernel, strict=True)):
        raise ValueError(f"an input of {tuple(sizes)} positions cannot be cut into patches of {kernel}")
    for axis in reversed(axes):
        x = x.unflatten(2 + axis, (-1, kernel[axis]))
    # (B, C, t, pt, h, ph, w, pw) to (B, C, t, h, w, pt, ph, pw)
    x = x.permute(0, 1, *(2 + 2 * axis for axis in axes), *(3 + 2 * axis for axis in axes))
    patches = x.flatten(2, 1 + len(kernel))
    return split_tokens(patches, mesh, 2).flatten(2, 3), patches.shape[2]


def _register_gathers(module: nn.Module, name: str, gathers: list[Any], mesh: Mesh, totals: dict[str, int]) -> None:
    if not all(gather is None or hasattr(gather, "gather_dim") for gather in gathers):
        raise ValueError(f"the context-parallel plan of {name!r} is neither a split nor a gather")

    def total_of(gather: Any) -> int:
        of = getattr(gather, "of", "hidden_states")
        lengths = {totals[of]} if of in totals else set(totals.values())
        if len(lengths) != 1:
            known = ", ".join(f"{key} ({total} tokens)" for key, total in totals.items()) or "nothing"
            raise ValueError(
                f"the gather of {name!r} is of {of!r}, but this forward has split {known}; give GatherTokens(of=...)"
            )
        return lengths.pop()

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
                else gather_tokens(_tensor(x, name, i), mesh, total_of(gather), gather.gather_dim)
                for i, (x, gather) in enumerate(zip(values, gathers, strict=True))
            ]
        )  # fmt: skip

    module.register_forward_hook(gather_outputs)


def _tensor(x: Any, name: str, index: int) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(
            f"value {index} of what {name!r} returns is a {type(x).__name__}, not a tensor; name the sub-module whose"
            " output is the tensor, or call the model with return_dict=False"
        )
    return x


def _outputs(output: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The values of what a module returned, and what puts others in their places."""
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
