"""Context-parallel attention for diffusers' networks of any class.

Nearly all of these networks call one function, ``dispatch_attention_fn``, which each model file imports into its
namespace. :func:`parallelize_attention` replaces it there, with effect only in the given networks. The function is
private to diffusers, so its arguments are compared with those of diffusers 0.42, and an attention module that does not
call it raises an error. This module does not import diffusers.
"""

import fnmatch
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh, check_mesh
from fsdp_cp.sequence import gather_tokens, local_token_count
from fsdp_cp.sequence_lengths import Lengths, records_of, segments_of

KNOWN = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "attention_kwargs",
         "backend", "parallel_config")  # fmt: skip
"""Arguments of ``dispatch_attention_fn`` in diffusers 0.42."""
TEXT = "encoder_hidden_states"


@dataclass
class _Call:
    """An attention module that is being called."""

    name: str
    mesh: Mesh
    sequences: tuple[str, ...]
    tokens: int | None
    keys: int | None
    reached: bool = False


_calls: list[_Call] = []


def parallelize_attention(
    model: nn.Module, *, mesh: Mesh, sequences: Sequence[str] | None = None, whole: Sequence[str] = ()
) -> None:
    """Replace every attention of a diffusers network in place. Use it with :func:`parallelize_context`.

    Self-attention, and joint attention to text that the plan splits, call :func:`context_parallel_attention`.
    Attention to ``encoder_hidden_states`` calls :func:`cross_attention`, which gathers the text if the plan splits it.
    Key masks are supported; a float mask must be 0 for a key that counts and at most -10000 for a masked key.
    ``fsdp_cp`` chooses the kernels and ignores diffusers' attention backend.

    Args:
        model: the network; its attention modules have a ``processor`` whose file imports ``dispatch_attention_fn``.
        mesh: the mesh, also at ``cp=1``.
        sequences: the plan's names of the sequences that self-attention joins, in order: ``("encoder_hidden_states",
            "hidden_states")`` for the joint attention of Flux and QwenImage. Required if these are padded. Use
            ``("hidden_states",)`` if a rank has equally many text and video tokens; the forward raises without it.
        whole: attention modules over tokens that every rank holds and the plan does not split (a text refiner). They
            are left unchanged; ``*`` stands for any characters.

    Raises:
        UserError: ``mesh`` is not a :class:`Mesh`, or diffusers' function takes other arguments.
        ValueError: the model has no attention module, or a processor does not use diffusers' function. In a forward:
            dropout, a causal mask, a mask that is not a key mask, joint attention to text that the plan does not
            split, or a module that does not call diffusers' function.
    """
    check_mesh(mesh)
    attentions = {name: m for name, m in model.named_modules() if hasattr(m, "processor") and hasattr(m, "heads")}
    if not attentions:
        raise ValueError(f"{type(model).__name__} has no attention module with a processor, as diffusers' have")
    for pattern in whole:
        if not fnmatch.filter(attentions, pattern):
            raise ValueError(f"whole names {pattern!r}, which is not an attention module of {type(model).__name__}")
    for name, module in attentions.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in whole):
            continue
        _replace_dispatch(name, module)
        # A partial of a method, not a closure: a copy of the network then calls its own modules.
        forward = functools.partial(_forward, module.forward, name, module, mesh, tuple(sequences or ()))
        module.forward = functools.update_wrapper(forward, module.forward)


def _replace_dispatch(name: str, module: nn.Module) -> None:
    """Replace ``dispatch_attention_fn`` in the module namespace of the processor."""
    namespace = sys.modules[type(module.processor).__module__]
    original = getattr(namespace, "dispatch_attention_fn", None)
    if original is None:
        raise _other_attention(name, module, "or name it in whole")
    if getattr(original, "of_fsdp_cp", False):
        return
    names = tuple(inspect.signature(original).parameters)
    if names != KNOWN:
        raise UserError(f"diffusers' dispatch_attention_fn takes ({', '.join(names)}); use diffusers 0.42")

    @functools.wraps(original)
    def dispatch(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, *args, **kwargs):
        if not _calls:  # a network that is not parallelized
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale, *args, **kwargs)
        call, kwargs = _calls[-1], dict(zip(KNOWN[7:], args, strict=False)) | kwargs
        refused = {"dropout_p": dropout_p, "is_causal": is_causal} | {n: kwargs.get(n) for n in (KNOWN[8], KNOWN[10])}
        for argument, value_of in refused.items():
            if value_of:
                raise ValueError(f"the attention {call.name!r} has {argument}={value_of!r}, which split tokens cannot")
        return _attend(call, query, key, value, attn_mask, scale)

    vars(dispatch)["of_fsdp_cp"] = True
    vars(namespace)["dispatch_attention_fn"] = dispatch


def _forward(
    inner: Callable, name: str, module: nn.Module, mesh: Mesh, sequences: tuple[str, ...], *args: Any, **kwargs: Any
) -> Any:
    """Call ``inner``, the forward of an attention module, which must reach its processor's dispatch function."""
    passed = dict(zip(("hidden_states", TEXT), args, strict=False)) | kwargs
    # Some networks give a tuple of texts and images.
    first = (next(filter(torch.is_tensor, tree_leaves(passed.get(name))), None) for name in ("hidden_states", TEXT))
    tokens, keys = (None if x is None else x.shape[1] for x in first)
    call = _Call(name, mesh, sequences, tokens, keys)
    _calls.append(call)
    try:
        output = inner(*args, **kwargs)
    finally:
        _calls.pop()
    if not call.reached:
        raise _other_attention(name, module, "or each rank would attend to its own tokens alone")
    return output


def _other_attention(name: str, module: nn.Module, advice: str) -> ValueError:
    kind = type(module.processor).__name__
    return ValueError(
        f"the attention {name!r} ({kind}) does not use diffusers' dispatch_attention_fn; give it a processor that calls"
        f" context_parallel_attention, {advice}"
    )


def _attend(call: _Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    call.reached, mesh, groups = True, call.mesh, call.mesh.context
    records = records_of(groups)
    text_is_split = any(TEXT in record.totals for record in records)
    where = f"the attention {call.name!r}"
    if groups.cp_size > 1 and not any(record.totals for record in records):
        advice = "name it in whole if all ranks hold them, and call the network given to parallelize_context"
        raise ValueError(f"{where} is called before the plan has split any tokens; {advice}")
    # Text with as many tokens as the video is cross-attention too. In joint attention the queries hold both.
    if q.shape[1] != k.shape[1] or (call.keys is not None and call.tokens == q.shape[1]):
        if not text_is_split:
            return cross_attention(q, k, v, key_mask=_key_mask(call, mask, q, k), scale=scale)
        segments = segments_of(TEXT, k.shape[1], groups, "k", "total_keys")
        mask = _key_mask(call, mask, q, k, segments)
        return cross_attention(q, k, v, key_mask=mask, scale=scale, mesh=mesh, total_keys=segments[0])
    if call.keys is not None and not text_is_split and groups.cp_size > 1:
        raise ValueError(f"{where} is joint with {TEXT}, of which each rank's copy would count; split {TEXT} too")
    names = call.sequences
    if not any(_joined_share(record, names) == q.shape[1] for record in records):
        names = ()  # a module may attend to only one of the joined sequences
    segments = segments_of(names or None, q.shape[1], groups, where, "sequences of parallelize_attention")
    mask = _key_mask(call, mask, q, k, segments)
    out = context_parallel_attention(q, k, v, mesh=mesh, total_tokens=segments, scale=scale, key_mask=mask)
    assert isinstance(out, Tensor), "without joint it is one tensor"
    return out


def _joined_share(record: Lengths, names: Sequence[str]) -> int:
    """Return the number of tokens on a rank of the joined sequences ``names``, as far as the forward has split them."""
    totals = [record.totals[name] for name in names if name in record.totals]
    return sum(local_token_count(total, record.groups.cp_size) for total in totals)


def _key_mask(
    call: _Call, mask: Tensor | None, q: Tensor, k: Tensor, segments: tuple[int, ...] | None = None
) -> Tensor | None:
    """Convert diffusers' mask to a bool mask of all keys. Gather it if the keys are split into ``segments``."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.ndim)]
    sizes = zip(mask.shape, (q.shape[0], q.shape[2], 1, k.shape[1]), strict=True)
    if not all(size in (1, wanted) for size, wanted in sizes) or mask.shape[3] != k.shape[1]:
        raise ValueError(f"the attention {call.name!r} has a mask {tuple(mask.shape)}, not (batch, 1, 1, {k.shape[1]})")
    if mask.dtype != torch.bool:
        if torch.compiler.is_compiling():
            raise ValueError(f"the attention {call.name!r} has a mask of {mask.dtype}; in a compiled graph use bool")
        if not ((mask == 0) | (mask <= -10000)).all():
            raise ValueError(f"the attention {call.name!r} adds a bias to its logits, which is not a mask")
        mask = mask == 0
    if mask.shape[1] > 1 and not (mask == mask[:, :1]).all():
        raise ValueError(f"the attention {call.name!r} has another mask for each head")
    keys = mask[:, 0, 0].expand(q.shape[0], -1)
    if segments is None or call.mesh.cp_size == 1:
        return keys
    cp = call.mesh.cp_size
    shares = keys.to(torch.uint8).split([local_token_count(total, cp) for total in segments], dim=1)
    with torch.no_grad():
        full = [gather_tokens(x, call.mesh, total) for x, total in zip(shares, segments, strict=True)]
    return torch.cat(full, dim=1).bool()
