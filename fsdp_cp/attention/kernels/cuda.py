"""Local attention kernels for CUDA: torch's built-in kernels and FlashAttention 4.

In backward, every kernel takes the log-sum-exp and the output of the whole row, even if other ranks hold some of the
row's keys: it computes ``P = exp(scale q.k - lse)`` and ``delta = rowsum(grad_out * out)`` from them. The kernels also
take random states, which they read only with dropout.

Each private function of torch and of FlashAttention 4 is called in one place, with the signature of torch 2.11 to
2.13 and of ``flash-attn-4`` 4.0.0b36 on PyPI. Shapes: B batch, Sq and Sk query and key tokens, H query heads, Hk
key/value heads, D head size.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_cp.attention.kernels.kernel import Kernel, UngroupedKernel
from fsdp_cp.runtime.packages import optional_package

_HALF = (torch.float16, torch.bfloat16)


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _aligned(x: Tensor) -> Tensor:
    """Return ``x``, or a dense copy if its rows do not start at multiples of 16 bytes, the unit that kernels load."""
    # Copy broadcast rows (stride 0) too: ``efficient`` was wrong for them in torch 2.12 (pytorch issue 191937).
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if 0 not in strides and all(start * x.element_size() % 16 == 0 for start in (x.storage_offset(), *strides)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _packed(x: Tensor) -> Tensor:
    """Return ``x`` dense and aligned, with the strides of a contiguous tensor even for dimensions of size 1."""
    dense = _aligned(x) if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return dense.view(-1).view(x.shape)


def _padded(x: Tensor, dim: int, multiple: int, value: float = 0.0) -> Tensor:
    shape = list(x.shape)
    shape[dim] = -x.shape[dim] % multiple
    return torch.cat((x, x.new_full(shape, value)), dim) if shape[dim] else x


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _bias(mask: Tensor, dtype: torch.dtype, multiple: int) -> Tensor:
    """Convert a mask ``(B, Sk)`` to a bias of the logits, ``(B, 1, 1, Sk)`` with ``Sk`` padded by masked keys."""
    # Rows without keys would be NaN with an infinite bias, and kernels in base 2 overflow near the largest number.
    hidden = _padded(mask, 1, multiple, False).logical_not()
    bias = torch.zeros(hidden.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(hidden, -6e4 if dtype == torch.float16 else -1e30).unsqueeze(1).unsqueeze(1)


class _CudaKernel(Kernel):
    """Limits of a CUDA kernel, and the check against them."""

    dtypes: tuple[torch.dtype, ...] = _HALF
    max_head_dim: int | None = 256
    takes_masks: bool = False
    min_capability: tuple[int, int] = (8, 0)

    def refuses(self, device, dtype, head_dim, masked):
        if device.type != "cuda":
            return f"runs on CUDA devices, not on {device.type}"
        if dtype not in self.dtypes:
            takes = " and ".join(str(d).removeprefix("torch.") for d in self.dtypes)
            return f"takes {takes}, not {str(dtype).removeprefix('torch.')}"
        if head_dim % 8 or (self.max_head_dim and head_dim > self.max_head_dim):
            limit = f" up to {self.max_head_dim}" if self.max_head_dim else ""
            return f"takes head sizes that are multiples of 8{limit}, not {head_dim}"
        if masked and not self.takes_masks:
            return "takes no key mask"
        capability = _capability(device)
        if capability is None:
            return "finds no CUDA device"
        if capability < self.min_capability:
            return f"needs compute capability {_dotted(self.min_capability)} or later, not {_dotted(capability)}"
        if reason := self.unavailable(capability, head_dim):
            return reason
        package = self.package()
        return package if isinstance(package, str) else None

    @staticmethod
    def package() -> Any:
        """Return the module with the kernel's functions, or the clause that says why it cannot be used."""
        return torch

    def unavailable(self, capability: tuple[int, int], head_dim: int) -> str | None:
        """Return why the kernel cannot run on this machine for reasons beyond its limits, or ``None`` if it can."""
        return None


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))


class Flash(_CudaKernel):
    """torch's FlashAttention 2 (``aten::_scaled_dot_product_flash_attention``), with grouped-query attention."""

    name = "flash"

    def unavailable(self, capability, head_dim):
        if head_dim > 192 and (capability in ((8, 6), (8, 9)) or capability[0] == 12):  # too little shared memory
            return f"takes head sizes up to 192 on compute capability {_dotted(capability)}, not {head_dim}"
        return None

    def forward(self, q, k, v, mask, scale):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention.default(
            *_heads_first(_aligned(q), _aligned(k), _aligned(v)), 0.0, False, False, scale=scale
        )
        return out.transpose(1, 2), lse

    def backward(self, grad_out, q, k, v, out, lse, mask, scale):
        # The kernel ignores the strides of the log-sum-exp and assumes that it is dense.
        tensors = _heads_first(_packed(grad_out), _aligned(q), _aligned(k), _aligned(v), _packed(out))
        lengths, no_dropout = (None, None, q.shape[1], k.shape[1]), (0.0, False)
        random = [torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ())]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
            *tensors, lse.contiguous(), *lengths, *no_dropout, *random, scale=scale
        )
        return tuple(_heads_first(*grads))


class Cudnn(_CudaKernel):
    """cuDNN through torch (``aten::_scaled_dot_product_cudnn_attention``), with grouped-query attention.

    All tensors are passed packed: torch caches a compiled graph by the layouts of q, k and v, and would reuse it for
    other layouts of the output, its gradient and the statistics.
    """

    name = "cudnn"
    max_head_dim = 128
    takes_masks = True

    def unavailable(self, capability, head_dim):
        if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1":
            return "does not run with TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1, which lays out its statistics differently"
        version = torch.backends.cudnn.version()
        if version is None:
            return "needs a torch that is built with cuDNN"
        # Earlier versions read out of bounds for token counts that are not multiples of 128 (pytorch issue 169849).
        if version <= 91500:
            return f"needs cuDNN 9.15.1 or later, not {version}"
        if _deterministic():
            return "is not deterministic, which torch.use_deterministic_algorithms asks for"
        return None

    def forward(self, q, k, v, mask, scale):
        q, k, v, bias = self._inputs(q, k, v, mask)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            *_heads_first(q, k, v), bias, True, 0.0, False, False, scale=scale
        )
        return out.transpose(1, 2), lse.squeeze(-1)  # (B, H, Sq, 1)

    def backward(self, grad_out, q, k, v, out, lse, mask, scale):
        # cuDNN's backward counts the missing keys of a partly filled last tile of 128 as logits of 0, and dq is NaN if
        # exp(-lse) overflows (pytorch issue 196678; seen on an H200 with cuDNN 9.19, with a bias and without). Process
        # these keys separately, padded to a whole tile that a bias masks.
        whole = k.shape[1] // 128 * 128
        if mask is not None or whole == k.shape[1]:
            return self._backward(grad_out, q, k, v, out, lse, mask, scale)
        (k_whole, k_rest), (v_whole, v_rest) = (x.split([whole, x.shape[1] - whole], dim=1) for x in (k, v))
        every = torch.ones(k_rest.shape[:2], dtype=torch.bool, device=k.device)
        last = self._backward(grad_out, q, k_rest, v_rest, out, lse, every, scale)
        if not whole:
            return last
        first = self._backward(grad_out, q, k_whole, v_whole, out, lse, None, scale)
        return first[0] + last[0], torch.cat((first[1], last[1]), 1), torch.cat((first[2], last[2]), 1)

    def _backward(self, grad_out, q, k, v, out, lse, mask, scale):
        keys = k.shape[1]
        q, k, v, bias = self._inputs(q, k, v, mask)
        # For rows without keys replace +inf by a large number: exp(s - lse) is 0 however the kernel handles inf.
        stats = lse.clamp(max=1e30).contiguous().unsqueeze(-1)
        random = [torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2)]
        lengths, no_dropout = (None, None, q.shape[1], k.shape[1]), (0.0, False)
        tensors = _heads_first(_packed(grad_out), q, k, v, _packed(out))
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            *tensors, stats, *random, bias, *lengths, *no_dropout, scale=scale
        )
        dq, dk, dv = _heads_first(*grads)
        return dq, dk.narrow(1, 0, keys), dv.narrow(1, 0, keys)

    @staticmethod
    def _inputs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None):
        if mask is None and k.shape[1] == 1:  # cuDNN has no kernel for a single key
            mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
        if mask is None:
            return *map(_packed, (q, k, v)), None
        # Pad to whole tiles of 128 keys, which the backward needs.
        return _packed(q), _packed(_padded(k, 1, 128)), _packed(_padded(v, 1, 128)), _bias(mask, q.dtype, 128)


class Efficient(_CudaKernel, UngroupedKernel):
    """xFormers' kernel in torch (``aten::_scaled_dot_product_efficient_attention``). fp32 too, no query groups."""

    name = "efficient"
    dtypes = (torch.float32, *_HALF)
    max_head_dim = None
    takes_masks = True

    def compute(self, q, k, v, mask, scale):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention.default(
            *_heads_first(_aligned(q), _aligned(k), _aligned(v)), self._bias(mask, q), True, 0.0, False, scale=scale
        )
        return out.transpose(1, 2), lse.narrow(2, 0, q.shape[1])  # drop its pads to a multiple of 32

    def differentiate(self, grad_out, q, k, v, out, lse, mask, scale):
        # Pad as the forward does; an lse of +inf makes P 0 in the padded rows.
        lse = _padded(lse, 2, 32, torch.inf).contiguous()
        random = [torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2)]
        wanted = [True, True, True, False]  # no gradient of the bias
        tensors = _heads_first(_packed(grad_out), _aligned(q), _aligned(k), _aligned(v))
        *grads, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
            *tensors, self._bias(mask, q), *_heads_first(_packed(out)), lse, *random, 0.0, wanted, False, scale=scale
        )
        return tuple(_heads_first(*grads))

    @staticmethod
    def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
        if mask is None:
            return None
        batch, queries, heads, _ = q.shape
        keys = mask.shape[1]
        # Samples start at multiples of 16 elements: the kernel reads 16 bytes at once. All queries share one row with
        # stride 0: the offset query * stride would overflow 32 bits from 65536 tokens on (pytorch issue 187227).
        return _bias(mask, q.dtype, 16).narrow(3, 0, keys).expand(batch, heads, queries, keys)


FLASH_4_TOKENS = {True: 8192, False: 32760}
"""Queries and keys of one call from which ``auto`` takes FlashAttention 4 on Hopper, with and without gradients.

Measured on one H200 (torch 2.11, flash-attn-4 4.0.0b36, bf16, 12 heads of 128) next to cuDNN, in TFLOP/s:

======  =======  =====  =======  =====
tokens  forward  cuDNN  backward cuDNN
======  =======  =====  =======  =====
32,760      692    556       613   501
 8,192      514    569       573   510
======  =======  =====  =======  =====

Not measured: token counts between the two, unequal numbers of queries and keys, and the calls of ``cp > 1``.
"""


@lru_cache(maxsize=1)
def _keep_compiled_kernels() -> None:
    """Let FlashAttention 4 keep compiled kernels on the disk. Call it before the import, which reads both variables.

    The package loads what lies in its folder, so the folder is in the user's home, not in the default ``/tmp``.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "fsdp_cp" / "flash_attention_4"
    if "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED" in os.environ:
        return
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written: each process compiles
        return
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache))


class FlashAttention4(_CudaKernel):
    """The ``flash-attn-4`` package, FlashAttention's folder ``flash_attn/cute`` (CuTe DSL): no masks.

    Its kernels are compiled at the first call of each direction for a head size, dtype and number of query heads per
    key head. Token counts are no part of the compiled key, except that a backward of one block of rows or keys has a
    key of its own. On an H200 a compilation took 3 to 4 s.
    """

    # interface.py of 4.0.0b36: the forward returns (out, lse, p, row_max, o_lo), of which the last three are for sparse
    # multi-head latent attention; it asserts head sizes up to 128 on 10.x and 11.x, so up to 256 on 9.x is not taken.
    name = "flash_attn_4"
    max_head_dim = 128
    min_capability = (9, 0)  # its forward runs on 8.x too, its backward does not

    checked_at_setup = True

    @staticmethod
    def package() -> Any:
        _keep_compiled_kernels()
        return optional_package("flash_attn.cute.interface", "pip install 'fsdp-cp[fa4]'", "flash-attn-4", "4.0.0b36")

    def slower_than_others(self, tokens, gradients):
        least = FLASH_4_TOKENS[gradients]
        return None if tokens >= least else f"is for calls of {least} tokens or more{' with gradients' * gradients}"

    def unavailable(self, capability, head_dim):
        if capability[0] > 12:
            return f"runs on compute capability 9 to 12, not {_dotted(capability)}"
        if capability[0] == 12 and _deterministic():
            return "has no deterministic backward on compute capability 12, as torch.use_deterministic_algorithms asks"
        return None

    def forward(self, q, k, v, mask, scale):
        q, k, v = (_aligned(x) for x in (q, k, v))
        flash = self.package()._flash_attn_fwd
        out, lse, _, _, _ = flash(q, k, v, softmax_scale=scale, causal=False, return_lse=True)
        return out, lse

    def backward(self, grad_out, q, k, v, out, lse, mask, scale):
        q, k, v = (_aligned(x) for x in (q, k, v))
        return self.package()._flash_attn_bwd(
            q, k, v, _packed(out), _packed(grad_out), lse.contiguous(), softmax_scale=scale, causal=False,
            deterministic=_deterministic(),
        )  # fmt: skip


CUDA_KERNELS = (FlashAttention4(), Cudnn(), Flash(), Efficient())


def preferred(device: torch.device) -> tuple[str, ...]:
    """Return the names of kernels in the order in which ``auto`` tries them on ``device``."""
    orders = {9: ("flash_attn_4", "cudnn", "flash", "efficient"), 10: ("cudnn", "flash", "efficient")}
    return orders.get((_capability(device) or (0, 0))[0], ("flash", "cudnn", "efficient"))
