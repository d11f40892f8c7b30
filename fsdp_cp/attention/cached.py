"""Attention of new tokens to their own and to cached keys and values, for causal video networks that run by chunks.

With gradients a cache is a list of immutable :class:`KeyValues`, one per chunk of tokens (:func:`cached_attention`).
Without, it can be a buffer that new tokens enter in place, so that a kernel sees all keys in one call
(:func:`buffered_attention`). Each rank holds ``1 / cp`` of every chunk and never sends it: queries and results travel
(:mod:`fsdp_cp.attention.pass_q`). See docs/library.md, "Masks and cached attention".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_cp.attention import QKV, check_options, check_split, check_tensors, summary
from fsdp_cp.attention.layout import Layout
from fsdp_cp.attention.operators import is_observed
from fsdp_cp.attention.pass_q import attend_by_passing_queries, attend_in_buffer, attend_in_buffer_operator
from fsdp_cp.attention.ulysses import with_all_tokens
from fsdp_cp.duals import may_be_dual, unpack_duals
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import ContextGroups, Mesh, context_groups
from fsdp_cp.sequence import local_token_count
from fsdp_cp.sequence_lengths import segments_of


@dataclass(frozen=True, slots=True)
class KeyValues:
    """Keys and values of one chunk of tokens in one layer, as a rank holds them after the Ulysses exchange.

    A value: nobody may change its tensors in place. A forward pass and its recomputation in backward must read the same
    numbers, so :func:`cached_attention` refuses tensors that have changed since this object was made.
    """

    k: Tensor
    """``(B, tokens of this ring rank without pads, heads / ulysses, D)``."""
    v: Tensor
    """The same shape as ``k``."""
    tokens: int
    """Number of tokens in the chunk on all ranks."""
    _versions: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", self._read_versions())

    def _read_versions(self) -> tuple[int, ...]:
        if torch.compiler.is_compiling():
            return ()
        return tuple(0 if x.is_inference() else x._version for x in (self.k, self.v))


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Sequence[KeyValues],
    *,
    mesh: Mesh | DeviceMesh,
    total_tokens: int | str | None = None,
    scale: float | None = None,
    backend: str = "auto",
    head_groups: int = 1,
) -> tuple[Tensor, KeyValues]:
    """Compute attention of a chunk of tokens, split over ``cp``, to itself and to all tokens of ``past``.

    As in :func:`fsdp_cp.attention.context_parallel_attention`, an all-to-all exchanges a split of the chunk's tokens
    for a split of its heads. Over the ring, each rank keeps its keys and values, cached and new: the chunk's queries
    are gathered, each rank attends to the keys that it holds, and the results return and merge by their log-sum-exps.
    Traffic therefore does not grow with ``past``, which is neither sent nor copied.

    Gradients flow to ``q``, ``k`` and ``v``; ``past`` is constant. There is no forward-mode derivative.

    Args:
        q, k, v: the chunk's tokens, shapes as in :func:`fsdp_cp.attention.context_parallel_attention`.
        past: keys and values of earlier chunks, in any order, from earlier calls on the same mesh.
        mesh, scale, backend, head_groups: as in :func:`fsdp_cp.attention.context_parallel_attention`.
        total_tokens: number of tokens in the chunk on all ranks, or a name from the plan; the default is as in
            :func:`fsdp_cp.attention.context_parallel_attention`.

    Returns:
        ``(B, S_local, H, D)``, pads 0; and the chunk's keys and values, detached copies to append to ``past``.

    Raises:
        ValueError: invalid arguments, before anything is sent; ``past`` does not fit or was changed in place.
        RuntimeError: an argument has a forward-mode tangent.
    """
    groups = context_groups(mesh)
    qkv, tokens, settings = _checked(q, k, v, groups, total_tokens, scale, backend, head_groups)
    _check_past(past, qkv[1], groups)
    held = held_tokens(tokens, groups)
    received: list[tuple[Tensor, Tensor]] = []

    def attend(x: Sequence[Tensor], group: int) -> list[Tensor]:
        _, k, v = x
        received.append((k[:, :held].detach(), v[:, :held].detach()))  # only the tail has pads
        heads = _heads(k, group)
        return attend_by_passing_queries([x[:, :, heads] for entry in past for x in (entry.k, entry.v)], settings, x)

    out = with_all_tokens(qkv, attend, groups, head_groups)
    keys, values = (torch.cat(x, dim=2) for x in zip(*received, strict=True))  # a copy, of one tensor too
    return out, KeyValues(keys, values, tokens)


def buffered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    *,
    mesh: Mesh | DeviceMesh,
    total_tokens: int | str | None = None,
    scale: float | None = None,
    backend: str = "auto",
    head_groups: int = 1,
) -> Tensor:
    """Write a chunk's keys and values into a buffer; compute attention of the chunk to a range of the buffer.

    As :func:`cached_attention`, with its arguments and one kernel call per rank (and head group). It has no derivative
    and needs ``torch.no_grad()``; a compiled graph serves every ``place``.

    Args:
        keys, values: this rank's buffers ``(B, slots, Hk / ulysses, D)``, changed in place.
        place: int64 ``(3,)`` on the CPU: ``(at, start, stop)``. The :func:`held_tokens` of the chunk are written from
            slot ``at`` on. Its queries see the slots from ``start`` to ``stop``.

    Returns:
        ``(B, S_local, H, D)``, pads 0.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("buffered_attention has no backward; call it under torch.no_grad(), or use cached_attention")
    groups = context_groups(mesh)
    qkv, _, settings = _checked(q, k, v, groups, total_tokens, scale, backend, head_groups)
    for name, x in (("keys", keys), ("values", values)):
        _check_held(name, x, keys.shape[1], qkv[1], groups)

    def attend(x: Sequence[Tensor], group: int) -> list[Tensor]:
        heads = _heads(x[1], group)
        inputs: tuple[Any, ...] = (*x, keys[:, :, heads], values[:, :, heads])
        compute = attend_in_buffer_operator if is_observed(*inputs) else attend_in_buffer
        return [compute(*inputs, place, *settings, False)]

    return with_all_tokens(qkv, attend, groups, head_groups)


def held_tokens(tokens: int, groups: ContextGroups) -> int:
    """Return the number of a chunk's ``tokens`` whose keys and values this rank holds."""
    share = groups.ulysses_size * local_token_count(tokens, groups.cp_size)
    return max(0, min(share, tokens - groups.ring_rank * share))


def _heads(k: Tensor, group: int) -> slice:
    """Return the heads of a head group, among those that this rank holds; ``k`` are the group's keys."""
    return slice(group * k.shape[2], (group + 1) * k.shape[2])


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: ContextGroups,
    total_tokens: Any,
    scale: Any,
    backend: str,
    head_groups: Any,
) -> tuple[QKV, int, tuple[Any, ...]]:
    """Check the arguments. Return q, k and v, the chunk's tokens, and the settings of the operators."""
    q, k, v = check_tensors(q, k, v)
    segments = segments_of(total_tokens, q.shape[1], groups)
    check_split(q, k, segments, head_groups, groups)
    scale = check_options(q, scale, backend, sum(segments))
    if len(segments) > 1:
        raise UserError(f"total_tokens must be one number in attention to a cache, got {segments}")
    if may_be_dual(q) and unpack_duals((q, k, v), "attention to a cache")[1] is not None:
        raise RuntimeError("attention to a cache has no forward-mode AD; use context_parallel_attention with a mask")
    layout = Layout(segments, segments, ulysses=groups.ulysses_size, ring=groups.ring_size)
    return (q, k, v), segments[0], (scale, *layout.as_numbers(), groups.ring_rank, groups.ring_group, backend)


def _check_past(past: Any, k: Tensor, groups: ContextGroups) -> None:
    if not isinstance(past, (list, tuple)) or not all(isinstance(x, KeyValues) for x in past):
        raise UserError(f"past must be a list of KeyValues, got a {type(past).__name__}")
    for i, entry in enumerate(past):
        for name, x in (("k", entry.k), ("v", entry.v)):
            _check_held(f"past[{i}].{name}", x, held_tokens(entry.tokens, groups), k, groups)
        if not torch.compiler.is_compiling() and entry._versions != entry._read_versions():
            raise UserError(f"past[{i}] was changed in place after it was made; backward would read other numbers")


def _check_held(name: str, x: Tensor, tokens: int, k: Tensor, groups: ContextGroups) -> None:
    """Check that ``x`` holds ``tokens`` of this rank, with its share of the heads of ``k``."""
    wanted = (k.shape[0], tokens, k.shape[2] // groups.ulysses_size, k.shape[3])
    if (x.shape, x.dtype, x.device) != (wanted, k.dtype, k.device):
        raise UserError(f"{name} must be {k.dtype} {wanted} on {k.device} on this rank, got {summary(x)}")
