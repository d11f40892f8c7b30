"""CUDA kernels against attention written out in float64.

With a GPU, the tests run the kernels. Without one, stand-ins on the CPU compute what torch's operators compute, with
their layouts and paddings; the tests then check the code around them.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_cp.attention.kernels import cuda as cuda_kernels
from fsdp_cp.attention.kernels.cuda import CUDA_KERNELS, preferred
from tests.oracles.attention_kernels import (
    CASES,
    TOLERANCE,
    attend,
    attend_backward,
    check_aligned,
    check_dense,
    check_derivative,
    check_kernel,
    tokens_first,
)
from tests.tiers import parametrize

KERNELS = {kernel.name: kernel for kernel in CUDA_KERNELS}
MASKED = [name for name, kernel in KERNELS.items() if kernel.takes_masks]


def test_order_of_preference(monkeypatch):
    def names(capability):
        monkeypatch.setattr(cuda_kernels, "_capability", lambda device: capability)
        return list(preferred(torch.device("cuda")))

    assert names((9, 0)) == ["flash_attn_4", "cudnn", "flash", "efficient"]
    assert names((10, 0)) == ["cudnn", "flash", "efficient"]
    for capability in ((8, 0), (8, 9), (12, 0), None):
        assert names(capability) == ["flash", "cudnn", "efficient"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the kernels themselves")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_on_the_gpu(name, dtype, masked):
    reason = KERNELS[name].refuses(torch.device("cuda"), dtype, 32, masked)
    if reason is not None:
        pytest.skip(f"{name} {reason}")
    for case in CASES.values():
        if not (masked and case.get("batch") == 1):  # the masks have three samples
            check_kernel(KERNELS[name], "cuda", dtype, TOLERANCE[dtype], masked, **case)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"))])  # fmt: skip
def test_derivative_in_chunks(device, dtype, tolerance):
    for masked, chunked in ((False, True), (True, False), (True, True)):
        check_derivative(device, dtype, tolerance if device == "cpu" else TOLERANCE[dtype], masked, chunked=chunked)


# --- torch's operators, stood in for on the CPU ---


def _flash(q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
    assert (dropout, causal, debug) == (0.0, False, False)
    check_aligned(q, k, v)
    out, lse = attend(*tokens_first(q, k, v), None, scale)
    none = torch.empty(0)
    return out.transpose(1, 2), lse, none, none, q.shape[2], k.shape[2], none, none, none


def _flash_backward(g, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *, scale=None):
    assert (cu_q, cu_k, max_q, max_k, dropout, causal) == (None, None, q.shape[2], k.shape[2], 0.0, False)
    assert lse.is_contiguous()
    check_aligned(q, k, v)
    return tuple(tokens_first(*attend_backward(*tokens_first(g, q, k, v, out), lse, None, scale)))


def _cudnn(q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None):
    assert (with_lse, dropout, causal, debug) == (True, 0.0, False, False) and k.shape[2] > 1
    check_dense(q, k, v)
    if bias is not None:
        assert bias.dtype == q.dtype and bias.isfinite().all() and k.shape[2] % 128 == 0
    out, lse = attend(*tokens_first(q, k, v), bias, scale)
    none = torch.empty(0)
    return out.transpose(1, 2), lse[..., None], none, none, q.shape[2], k.shape[2], none, none, none


def _cudnn_backward(g, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout, causal, *, scale=None):
    assert (cu_q, cu_k, max_q, max_k, dropout, causal) == (None, None, q.shape[2], k.shape[2], 0.0, False)
    check_dense(g, q, k, v, out)
    assert lse.is_contiguous() and lse.shape == (*q.shape[:3], 1) and lse.isfinite().all()
    return tuple(tokens_first(*attend_backward(*tokens_first(g, q, k, v, out), lse[..., 0], bias, scale)))


def _check_efficient(q, k, bias):
    assert q.shape[1] == k.shape[1], "no grouped-query attention"
    check_aligned(q, k)
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype and bias.stride(3) == 1
        assert (
            bias.isfinite().all()
            and all(s % 16 == 0 for s in bias.stride()[:3])
            and bias.untyped_storage().nbytes() % 64 == 0
        )


def _efficient(q, k, v, bias, with_lse, dropout=0.0, causal=False, *, scale=None):
    assert (with_lse, dropout, causal) == (True, 0.0, False)
    _check_efficient(q, k, bias)
    out, lse = attend(*tokens_first(q, k, v), bias, scale)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.nan)
    return out.transpose(1, 2), lse, torch.empty(0), torch.empty(0)


def _efficient_backward(g, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None):
    assert (dropout, list(wanted), causal) == (0.0, [True, True, True, False], False)
    _check_efficient(q, k, bias)
    check_dense(g, out)
    assert lse.is_contiguous() and lse.shape[2] % 32 == 0 and lse[:, :, q.shape[2] :].isposinf().all()
    grads = attend_backward(*tokens_first(g, q, k, v, out), lse[:, :, : q.shape[2]], bias, scale)
    return *tokens_first(*grads), torch.empty(0)


ATEN = {"flash": (_flash, _flash_backward), "cudnn": (_cudnn, _cudnn_backward),
        "efficient": (_efficient, _efficient_backward)}  # fmt: skip


@parametrize("name", ATEN, quick=2)
def test_arguments_of_torchs_operators(name):
    with torch.library._scoped_library("aten", "IMPL") as library:
        for suffix, function in zip(("", "_backward"), ATEN[name], strict=True):
            library.impl(f"_scaled_dot_product_{name}_attention{suffix}", function, "CPU")
        for case in ("one key", "one query", "grouped", "half a tile", "low logits", "one sample", "strided"):
            for masked in (False, True) if name in MASKED and CASES[case].get("batch") != 1 else (False,):
                check_kernel(KERNELS[name], "cpu", torch.float32, 2e-5, masked, **CASES[case])


@pytest.mark.parametrize("name", ATEN)
@pytest.mark.parametrize(("queries", "keys", "kv_heads"), [(17, 33, 2), (1, 1, 3)])
def test_shapes_and_dtypes_of_torchs_own_fake_kernels(name, queries, keys, kv_heads):
    """torch's shape functions of these operators run on CUDA tensors without a device."""
    dtype = torch.bfloat16
    with FakeTensorMode():
        q = torch.empty(2, queries, 6, 64, device="cuda", dtype=dtype)
        k, v = (torch.empty(2, keys, kv_heads, 64, device="cuda", dtype=dtype) for _ in range(2))
        for masked in (False, True) if name in MASKED else (False,):
            mask = torch.ones(2, keys, device="cuda", dtype=torch.bool) if masked else None
            out, lse = KERNELS[name].forward(q, k, v, mask, 0.1)
            grads = KERNELS[name].backward(torch.empty_like(out), q, k, v, out, lse, mask, 0.1)
            assert (out.shape, out.dtype) == (q.shape, dtype)
            assert (lse.shape, lse.dtype) == ((2, 6, queries), torch.float32)
            assert [(g.shape, g.dtype) for g in grads] == [(x.shape, dtype) for x in (q, k, v)]


# --- refusals and the order of preference ---


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "masked", "capability", "refused"),
    [
        ("flash", "cpu", torch.bfloat16, 64, False, (9, 0), True),
        ("flash", "cuda", torch.float32, 64, False, (9, 0), True),
        ("flash", "cuda", torch.bfloat16, 64, True, (9, 0), True),
        ("flash", "cuda", torch.bfloat16, 100, False, (9, 0), True),
        ("flash", "cuda", torch.bfloat16, 256, False, (8, 9), True),
        ("flash", "cuda", torch.bfloat16, 256, False, (9, 0), False),
        ("flash", "cuda", torch.bfloat16, 64, False, (7, 5), True),
        ("flash", "cuda", torch.bfloat16, 64, False, None, True),
        ("cudnn", "cuda", torch.float16, 192, False, (9, 0), True),
        ("efficient", "cuda", torch.float32, 512, True, (8, 6), False),
        ("flash_attn_4", "cuda", torch.bfloat16, 64, False, (8, 0), True),
        ("flash_attn_4", "cuda", torch.bfloat16, 192, False, (9, 0), True),
    ],
)
def test_kernels_refuse_what_they_cannot_compute(
    monkeypatch, name, device, dtype, head_dim, masked, capability, refused
):
    monkeypatch.setattr(cuda_kernels, "_capability", lambda device: capability)
    assert (KERNELS[name].refuses(torch.device(device), dtype, head_dim, masked) is not None) == refused


def test_cudnn_is_refused_where_it_goes_wrong(monkeypatch):
    ask = (torch.device("cuda"), torch.bfloat16, 64, False)
    monkeypatch.setattr(cuda_kernels, "_capability", lambda device: (9, 0))
    for version in (None, 91002):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert KERNELS["cudnn"].refuses(*ask), version
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    assert KERNELS["cudnn"].refuses(*ask) is None
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    assert KERNELS["cudnn"].refuses(*ask)
    monkeypatch.delenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE")
    torch.use_deterministic_algorithms(True)
    try:
        assert KERNELS["cudnn"].refuses(*ask)
    finally:
        torch.use_deterministic_algorithms(False)
