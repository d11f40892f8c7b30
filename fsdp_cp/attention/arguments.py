"""Kinds of the attention's arguments: what is no tensor, no number of tokens or no name is refused by name.

Shapes and dtypes are checked where they must fit each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_cp.errors import UserError


def check_arguments(q: Any, k: Any, v: Any, key_mask: Any, scale: Any, backend: Any) -> None:
    """Refuse what every attention would choke on.

    Raises:
        UserError: naming the argument.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise UserError(f"{name} is a {type(x).__name__}; use a tensor (batch, tokens, heads, head_dim)")
        if x.ndim != 4:
            raise UserError(f"{name} has shape {tuple(x.shape)}; it must be (batch, tokens, heads, head_dim)")
    if key_mask is not None and not isinstance(key_mask, Tensor):
        raise UserError(f"key_mask is a {type(key_mask).__name__}; use a bool tensor (batch, keys), or None")
    if scale is not None and (not isinstance(scale, (int, float)) or not math.isfinite(scale)):
        raise UserError(f"scale={scale!r} is no finite number; use a float, or None for head_dim ** -0.5")
    if not isinstance(backend, str):
        raise UserError(f"backend={backend!r} is no name of a kernel; use 'auto'")


def check_split_arguments(total_tokens: Any, causal_block: Any, head_groups: Any, joint: Any) -> None:
    """Refuse what only split tokens have.

    Raises:
        UserError: naming the argument.
    """
    if total_tokens is not None and not _is_count(total_tokens) and not isinstance(total_tokens, str):
        if not isinstance(total_tokens, Sequence) or not all(_is_count(x) or isinstance(x, str) for x in total_tokens):
            raise UserError(
                f"total_tokens={total_tokens!r} is no number of tokens; use an integer or a name of the plan, or one"
                " per segment"
            )
    if causal_block is not None and not _is_count(causal_block):
        raise UserError(f"causal_block={causal_block!r} is no number of tokens; use an integer, or None")
    if not _is_count(head_groups):
        raise UserError(f"head_groups={head_groups!r} is no number of groups; use an integer of at least 1")
    if joint is not None and (
        not isinstance(joint, (tuple, list)) or len(joint) != 3 or not all(isinstance(x, Tensor) for x in joint)
    ):
        raise UserError("joint is not q, k and v of the text; use a tuple of three tensors (batch, L, heads, head_dim)")


def check_total_keys(total_keys: Any) -> None:
    """Refuse what counts no keys.

    Raises:
        UserError: naming the argument.
    """
    if total_keys is not None and not _is_count(total_keys) and not isinstance(total_keys, str):
        raise UserError(f"total_keys={total_keys!r} is no number of tokens; use an integer or a name of the plan")


def _is_count(x: Any) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)
