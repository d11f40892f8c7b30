"""Checks of the arguments of attention, for the entry points to call before anything is sent."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_cp.attention.kernels.choose import choose_kernel
from fsdp_cp.attention.mask import BlockMask
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import ContextGroups, Mesh
from fsdp_cp.sequence import is_count, local_token_count

QKV = tuple[Tensor, Tensor, Tensor]


def check_tensors(q: Any, k: Any, v: Any, where: str = "") -> QKV:
    """Check that q, k and v fit each other. Return them in the dtype of autocast for scaled_dot_product_attention.

    Messages prefix a tensor's name with ``where``.
    """
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not isinstance(x, Tensor) or x.ndim != 4 or 0 in x.shape:
            raise UserError(
                f"{where}{name} must be a tensor (batch, tokens, heads, head_dim) with no size 0, got {_shown(x)}"
            )
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise UserError(f"{where}{name} must be {q.dtype} on {q.device}, as {where}q is, got {_shown(x)}")
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]) or q.shape[2] % k.shape[2]:
        raise UserError(
            f"{where}q {tuple(q.shape)}, {where}k {tuple(k.shape)} and {where}v {tuple(v.shape)} must agree in batch"
            " and head_dim, k and v in all sizes, and the heads of k and v must divide those of q"
        )
    return q, k, v


def check_options(q: Tensor, scale: Any, backend: Any, keys: int, key_mask: Any = None, mask: Any = None) -> None:
    """Check options of attention to ``keys`` keys. A compiled graph checks ``backend`` when it runs."""
    wanted = (q.shape[0], keys)
    if key_mask is not None and (
        not isinstance(key_mask, Tensor)
        or (key_mask.dtype, key_mask.device, key_mask.shape) != (torch.bool, q.device, wanted)
    ):
        raise UserError(
            f"key_mask must be a bool tensor (batch, keys) = {wanted} on {q.device}, got {_shown(key_mask)}"
        )
    if mask is not None and (not isinstance(mask, BlockMask) or mask.tokens != keys):
        described = f"one of {mask.tokens} tokens" if isinstance(mask, BlockMask) else _shown(mask)
        raise UserError(f"mask must be a BlockMask of all {keys} tokens, got {described}")
    if scale is not None and (not isinstance(scale, (int, float)) or not math.isfinite(scale)):
        raise UserError(f"scale must be a finite number, or None for head_dim ** -0.5, got {scale!r}")
    if not torch.compiler.is_compiling():
        masked = key_mask is not None
        choose_kernel(backend, device=q.device, dtype=q.dtype, head_dim=q.shape[-1], masked=masked)


def check_split(q: Tensor, k: Tensor, segments: tuple[int, ...], head_groups: Any, groups: ContextGroups) -> None:
    """Check that the rank's token counts match ``segments`` and that the mesh divides the heads."""
    ranks, cp = groups.ulysses_size, groups.cp_size
    local = sum(local_token_count(total, cp) for total in segments)
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] != local:
            raise UserError(
                f"{name} has {x.shape[1]} local tokens, but total_tokens={segments} over cp={cp} makes {local}; use"
                " fsdp_cp.sequence.split_tokens"
            )
        if x.shape[2] % ranks:
            common = math.gcd(q.shape[2], k.shape[2], cp)
            fitting = " or ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise UserError(
                f"mesh.ulysses={ranks} does not divide the {x.shape[2]} heads of {name}; use mesh.ulysses={fitting}"
            )
        if not is_count(head_groups) or x.shape[2] // ranks % head_groups:
            raise UserError(
                f"head_groups must divide the {x.shape[2] // ranks} heads of {name} that a rank gets, got"
                f" {head_groups!r}"
            )


def check_joint(joint: Any, tensors: QKV, segments: tuple[int, ...], mesh: Mesh | DeviceMesh) -> QKV:
    """Check the text that every rank holds in full; return its q, k and v."""
    if not isinstance(joint, (tuple, list)) or len(joint) != 3 or not isinstance(mesh, Mesh):
        raise UserError("joint must be q, k and v of the text, (batch, L, heads, head_dim), on a mesh of build_mesh")
    if len(segments) > 1:
        raise UserError("joint text takes no total_tokens of several segments")
    text = check_tensors(joint[0], joint[1], joint[2], where="joint ")
    for name, x, video in zip("qkv", text, tensors, strict=True):
        wanted = (video.shape[0], text[0].shape[1], *video.shape[2:])
        if (x.shape, x.dtype, x.device) != (wanted, video.dtype, video.device):
            raise UserError(f"joint {name} must be {video.dtype} {wanted} on {video.device}, got {_shown(x)}")
    return text


def _shown(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
