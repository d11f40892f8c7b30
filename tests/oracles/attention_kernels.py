"""Attention written out, and checks of local kernels against it in float64."""

import torch

from fsdp_cp.attention.kernels.kernel import attention_dual
from fsdp_cp.context.check_parallel import relative_error

TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3, torch.float32: 1e-3, torch.float64: 1e-10}
"""Relative errors up to which a kernel counts as correct on a GPU. Guesses, since no kernel has run on one."""
CASES = {
    "plain": {},
    "fewer keys": {"keys": (40, 24)},
    "one key": {"keys": (1, 24)},
    "one query": {"queries": 1},
    "grouped": {"heads": 6, "kv_heads": 2},
    "half a tile": {"queries": 192, "keys": (192, 64)},
    "low logits": {"queries": 64, "keys": (64, 192), "shift": -120.0},
    "one sample": {"batch": 1},
    "strided": {"strided": True},
    "broadcast": {"broadcast": True},
}


def attend(q, k, v, bias, scale):
    """Return output and log-sum-exp for ``(B, S, H, D)`` and ``bias`` ``(B, 1 or H, 1 or Sq, Sk)``.

    K and V may have fewer heads.
    """
    logits, _, v = _logits(q, k, v, bias, scale)
    lse = logits.logsumexp(-1)
    return torch.einsum("bhst,bthd->bshd", (logits - lse[..., None]).exp(), v), lse


def attend_backward(grad_out, q, k, v, out, lse, bias, scale):
    """Return the gradients of :func:`attend`, from the ``lse`` and ``out`` of rows over more keys."""
    logits, wide_k, wide_v = _logits(q, k, v, bias, scale)
    p = (logits - lse[..., None]).exp()
    delta = (grad_out * out).sum(-1).transpose(1, 2)
    ds = p * (torch.einsum("bshd,bthd->bhst", grad_out, wide_v) - delta[..., None]) * scale
    dq = torch.einsum("bhst,bthd->bshd", ds, wide_k)
    dk, dv = torch.einsum("bhst,bshd->bthd", ds, q), torch.einsum("bhst,bshd->bthd", p, grad_out)
    return dq, *(x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))


def _logits(q, k, v, bias, scale):
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bshd,bthd->bhst", q, k) * scale
    return logits if bias is None else logits + bias, k, v


def check_kernel(
    kernel,
    device,
    dtype,
    tolerance,
    masked,
    *,
    batch=3,
    queries=48,
    keys=(48, 80),
    heads=4,
    kv_heads=None,
    shift=0.0,
    strided=False,
    broadcast=False,
):
    """Check a kernel: forward on two chunks of the keys, merged, then backward on each chunk with the merged rows.

    Returns:
        Relative errors of the output and the gradients, and a tenth of the largest error of the log-sum-exp, by name.
    """
    g = torch.Generator().manual_seed(queries + sum(keys))
    scale, head_dim, total = 0.2, 32, sum(keys)

    def tensor(tokens, heads):
        if not strided:
            return torch.randn(batch, tokens, heads, head_dim, generator=g).to(device, dtype)
        # Take a slice of tokens and heads that begins 3 elements into its storage.
        wide = torch.randn(batch * (tokens + 2) * (heads * 2 + 1) * head_dim + 3, generator=g).to(device, dtype)
        return wide[3:].view(batch, tokens + 2, heads * 2 + 1, head_dim)[:, 1:-1, 1 : heads + 1]

    q, k, v = tensor(queries, heads), tensor(total, kv_heads or heads), tensor(total, kv_heads or heads)
    if broadcast:
        k, v = (x[:1].expand(x.shape) for x in (k, v))
    # Use an expanded gradient, like the gradient of a sum.
    grad_out = torch.randn(batch, 1, heads, head_dim, generator=g).to(device, dtype).expand(q.shape)
    if shift:
        q[..., 0], k[..., 0] = shift / scale, 1.0
    mask = None
    if masked:
        mask = torch.rand(batch, total, generator=g).lt(0.7).to(device)
        mask[0] = True
        mask[1, : keys[0]], mask[1, -1] = False, True  # no key in the first chunk
        mask[2] = False  # no key at all

    truths = [x.double().requires_grad_() for x in (q, k, v)]
    bias = None if mask is None else torch.zeros(mask.shape, device=device).masked_fill(~mask, -1e9)[:, None, None]
    expected, expected_lse = attend(*truths, bias, scale)
    if masked:
        expected = expected * mask.any(1)[:, None, None, None]
    expected.backward(grad_out.double())

    chunks = [slice(0, keys[0]), slice(keys[0], None)]
    outs, lses = [], []
    for c in chunks:
        part = None if mask is None else mask[:, c]
        out, lse = kernel.forward(q, k[:, c], v[:, c], part, scale)
        assert out.shape == q.shape and out.dtype == dtype
        assert lse.shape == (batch, heads, queries) and lse.dtype == torch.float32
        if masked:
            empty = ~part.any(1)[:, None, None]
            out, lse = out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
        outs.append(out.float()), lses.append(lse)
    lse = torch.logaddexp(*lses)
    weights = [(x - lse).exp().nan_to_num(0.0).transpose(1, 2)[..., None] for x in lses]
    out = (outs[0] * weights[0] + outs[1] * weights[1]).to(dtype)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    rows = slice(None) if mask is None else mask.any(1)
    errors = {
        "out": relative_error(out, expected.detach()),
        "lse": (lse[rows] - expected_lse[rows]).abs().max().item() / 10,
    }
    _assert_small(errors, tolerance)

    strided_lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    grads = []
    for c in chunks:
        part = None if mask is None else mask[:, c]
        grads.append(kernel.backward(grad_out, q, k[:, c], v[:, c], out, strided_lse, part, scale))
        for grad, x in zip(grads[-1], (q, k[:, c], v[:, c]), strict=True):
            assert grad.shape == x.shape and grad.dtype == dtype and grad.isfinite().all()
    (dq0, dk0, dv0), (dq1, dk1, dv1) = grads
    ours = dq0.float() + dq1.float(), torch.cat((dk0, dk1), 1), torch.cat((dv0, dv1), 1)
    for name, value, truth in zip("qkv", ours, truths, strict=True):
        errors[f"d{name}"] = relative_error(value, truth.grad)
    _assert_small(errors, tolerance)
    return errors


def _assert_small(errors, tolerance):
    for name, error in errors.items():
        assert error < tolerance, f"{name} is off by {error:.1e}"


def check_derivative(device, dtype, tolerance, masked, *, chunked):
    """Check attention with its forward-mode derivative against torch's derivative of written-out float64 attention.

    Args:
        device, dtype, masked: properties of the tensors.
        tolerance: bound of the errors.
        chunked: whether to use two chunks of the keys, with tangents merged by the formula w = sigmoid(lse2 - lse).

    Returns:
        Relative errors of ``out``, ``t_out`` and ``t_lse``, and a tenth of the largest error of ``lse``.
    """
    g = torch.Generator().manual_seed(5)
    batch, queries, keys, heads, head_dim, scale = 3, 48, 128, 4, 32, 0.2
    shapes = [(batch, n, heads, head_dim) for n in (queries, keys, keys)] * 2
    tensors = [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]
    primals, tangents = tensors[:3], tensors[3:]
    mask = bias = None
    if masked:
        mask = torch.rand(batch, keys, generator=g).lt(0.7).to(device)
        mask[:, 0] = mask[:, -1] = True
        bias = torch.zeros(mask.shape, device=device).double().masked_fill(~mask, -1e9)[:, None, None]
    wide = [tuple(x.double() for x in group) for group in (primals, tangents)]
    (out, lse), (t_out, t_lse) = torch.func.jvp(lambda q, k, v: attend(q, k, v, bias, scale), *wide)
    q, t_q = primals[0], tangents[0]
    parts = [
        attention_dual(
            q, primals[1][:, c], primals[2][:, c], t_q, tangents[1][:, c], tangents[2][:, c],
            None if mask is None else mask[:, c], scale,
        )
        for c in ([slice(0, 48), slice(48, None)] if chunked else [slice(None)])
    ]  # fmt: skip
    merged = list(parts[0])
    for part in parts[1:]:
        w = torch.sigmoid(part.lse - merged[1])
        wide_w, moved = (x.transpose(1, 2)[..., None] for x in (w, w * (1 - w) * (part.t_lse - merged[3])))
        merged = [
            merged[0] - wide_w * (merged[0] - part.out),
            torch.logaddexp(merged[1], part.lse),
            merged[2] - wide_w * (merged[2] - part.t_out) - moved * (merged[0] - part.out),
            merged[3] + w * (part.t_lse - merged[3]),
        ]
    errors = {
        "out": relative_error(merged[0], out),
        "lse": (merged[1] - lse).abs().max().item() / 10,
        "t_out": relative_error(merged[2], t_out),
        "t_lse": relative_error(merged[3], t_lse),
    }
    _assert_small(errors, tolerance)
    return errors


def check_dense(*tensors):
    """Check that heads-first tensors lie in memory as (B, S, H, D) without gaps, for all sizes."""
    for x in tensors:
        b, h, s, d = x.shape
        assert x.stride() == (s * h * d, d, h * d, 1) and x.storage_offset() * x.element_size() % 16 == 0


def check_aligned(*tensors):
    """Check that each row begins at a multiple of 16 bytes and that rows do not share memory.

    The tensors are ``(B, S, H, D)`` or heads first.
    """
    for x in tensors:
        starts = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
        assert all(i * x.element_size() % 16 == 0 for i in (x.storage_offset(), *starts)) and 0 not in starts


def tokens_first(*tensors):
    """Transpose ``(B, H, S, D)`` to ``(B, S, H, D)``."""
    return [x.transpose(1, 2) for x in tensors]
