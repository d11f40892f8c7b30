"""Comparison of compiled kernels with plain torch, before a run uses them.

Inputs are as hard as those of a trained network: logits are about 300, of which softmax sees only the differences. A
kernel that scales keys in 16 bits before their product is right for logits of 1, and off by a tenth here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_cp.attention.kernels.kernel import Dual, Kernel, Reference, attention_dual
from fsdp_cp.attention.kernels.sparse import PLAIN_SPARSE, SparseKernels
from fsdp_cp.attention.layout import Layout
from fsdp_cp.attention.pieces import Chosen, cut
from fsdp_cp.errors import first_line
from fsdp_cp.tiles import Tiles

LOGITS = 300.0
"""Mean of the logits."""
TOLERANCE = 2e-2
"""Relative difference that a check allows: both implementations round probabilities to half precision."""
_NAMES = ("output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v")
_DUAL_NAMES = ("output", "log-sum-exp", "tangent of the output", "tangent of the log-sum-exp")


def hard_inputs(queries: int, keys: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """Return q, k, v and three tensors of their shapes, fp32 on the CPU; logits of q and k are about :data:`LOGITS`."""
    generator = torch.Generator().manual_seed(0)  # the global generator's state belongs to the run
    shapes = [(2, queries, heads, head_dim), *[(2, keys, kv_heads, head_dim)] * 2] * 2
    q, k, *others = (torch.randn(shape, generator=generator) for shape in shapes)
    axis = torch.nn.functional.normalize(torch.randn(head_dim, generator=generator), dim=0)
    far = (LOGITS * head_dim**0.5) ** 0.5 * axis
    q, k = (x - (x @ axis)[..., None] * axis + far for x in (q, k))
    return [q, k, *others]


def self_check(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Compare ``kernel`` with plain torch on a part of the keys, as in a ring; return what is wrong, or ``None``."""
    if reason := kernel.refuses(device, dtype, head_dim, masked=False):
        return reason
    # Several tiles of queries and of keys: a backward of one tile is compiled separately.
    q, k, v, grad, *_ = (x.to(device, dtype) for x in hard_inputs(600, 800, 2, 2, head_dim))
    reference, scale, half = Reference(), head_dim**-0.5, slice(0, 400)
    out, lse = reference.forward(q, k, v, None, scale)

    def results(kernel: Kernel) -> tuple[Tensor, ...]:
        some = (q, k[:, half], v[:, half])
        return *kernel.forward(*some, None, scale), *kernel.backward(grad, *some, out, lse, None, scale)

    try:
        return difference(_NAMES, results(kernel), results(reference))
    except Exception as error:  # the compiler, the driver or the package fails: use another kernel
        return f"fails in its self-check ({type(error).__name__}: {first_line(error)})"


def check_dual(fused: Callable[..., Dual], device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Compare an implementation of attention with its derivative with plain torch, on masked keys."""
    tensors = [x.to(device, dtype) for x in hard_inputs(150, 200, 4, 2, head_dim)]
    mask = (torch.rand(2, 200, generator=torch.Generator().manual_seed(1)) < 0.8).to(device)
    plain: Callable[..., Dual] = attention_dual
    computed, expected = (attend(*tensors, mask, head_dim**-0.5) for attend in (fused, plain))
    return difference(_DUAL_NAMES, computed, expected)


def check_sparse(
    kernels: SparseKernels, device: torch.device, dtype: torch.dtype, head_dim: int, width: int
) -> str | None:
    """Compare kernels of attention to chosen pieces, of up to ``width`` tokens, with plain torch, as in a ring."""
    video = Tiles((4, 5, width), (1, 2, max(1, width // 2)))
    layout = Layout((width + 3, video.tokens), (width + 3, video.tokens), ulysses=1, ring=2, tiles=video)
    queries, keys = cut(layout, device).of_rank
    generator = torch.Generator().manual_seed(1)
    allowed = torch.rand(2, 2, len(queries.sizes), len(keys.sizes), generator=generator).to(device) < 0.3
    chosen = Chosen(queries, keys, allowed & (keys.sizes > 0), allowed.shape[-1])
    sizes = (layout.chunk(0).size, layout.chunk(1).size, 2, 2, head_dim)
    tensors = [x.to(device, dtype) for x in hard_inputs(*sizes)]
    (q, k, v, grad, *_), scale = tensors, head_dim**-0.5
    kernel, plain = kernels.kernel, PLAIN_SPARSE.kernel
    out, lse = plain.forward(q, k, v, chosen, scale)
    lse = (lse + 0.5).masked_fill(lse == -torch.inf, torch.inf)  # as if other ranks held further keys

    def results(kernel: Kernel) -> tuple[Tensor, ...]:
        backward = kernel.backward(grad, q, k, v, out, lse, chosen, scale)
        return *kernel.forward(q, k, v, chosen, scale), *backward

    problem = difference(_NAMES, results(kernel), results(plain))
    computed, expected = (attend(*tensors, chosen, scale) for attend in (kernels.dual, PLAIN_SPARSE.dual))
    return problem or difference(_DUAL_NAMES, computed, expected)


def difference(names: Sequence[str], computed: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """Name the first tensor that differs; return ``None`` if none does. A log-sum-exp counts as the sum itself."""
    for name, a, b in zip(names, computed, expected, strict=True):
        a, b = a.float(), b.float()
        if name == "log-sum-exp":  # its relative error is small however wrong the sums are
            a, b = (a - b).nan_to_num(nan=0.0).exp(), torch.ones_like(b)  # -inf in both, without a key
        relative = float((a - b).norm() / b.norm())
        if not relative < TOLERANCE:
            return f"is off by {relative:.1e} in the {name} of its self-check"
    return None
