"""FlashAttention 3 and 4 and Transformer Engine: stand-ins for their functions on the CPU.

The stand-ins have the signatures of released versions, compute the same attention, and fail where the real ones would
silently read something else. With a GPU and the packages, ``test_cuda_kernels.py`` runs the real ones.
"""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fsdp_cp.attention.kernels import choose
from fsdp_cp.attention.kernels import cuda as cuda_kernels
from fsdp_cp.attention.kernels.cuda import CUDA_KERNELS, SM_MARGIN
from fsdp_cp.runtime import packages
from tests.oracles.attention_kernels import CASES, attend, attend_backward, check_aligned, check_dense, check_kernel
from tests.oracles.transformer_engine import call_checker
from tests.transformer_engine_facts import read

KERNELS = {kernel.name: kernel for kernel in CUDA_KERNELS}


def _flash_results(given):
    """Compute the packages' forward, and check that only plain attention is requested."""
    for name, value in given.items():
        if name not in ("q", "k", "v", "softmax_scale"):
            assert value in (None, False, 0.0, -1, (-1, -1)), name
    check_aligned(given["q"], given["k"], given["v"])
    return attend(given["q"], given["k"], given["v"], None, given["softmax_scale"])


def _flash_write(given):
    for name in ("dout", "out", "softmax_lse", "dq", "dk", "dv"):
        assert given[name].is_contiguous(), name
    check_aligned(given["q"], given["k"], given["v"])
    tensors = (given[n] for n in ("dout", "q", "k", "v", "out", "softmax_lse"))
    grads = attend_backward(*tensors, None, given["softmax_scale"])
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        given[name].copy_(grad)


def _function(name, arguments, body):
    """Make a function called ``name`` with these arguments, which passes them to ``body`` by name."""
    space = {"body": body}
    exec(f"def {name}({arguments}):\n    return body(locals())", space)
    return space[name]


def _operator(name, arguments, results, mutates, body):
    """Make the same as a custom operator, as the packages have it from 2025 on."""
    names = [a.split("=")[0].split()[-1] for a in arguments.split(", ")]
    return torch.library.custom_op(
        f"fsdp_cp_tests::{name}",
        lambda *a: body(dict(zip(names, a, strict=False))),  # arguments at their defaults are left out
        mutates_args=mutates,
        schema=f"({arguments}) -> {results}",
    )


def _short(given):
    out, lse = _flash_results(given)
    return out.contiguous(), lse.contiguous(), out.new_empty(0), out.new_empty(0)


def _softmax_d(given):
    _flash_write(given)
    return torch.empty(0)


_QKV, _GRADS = "Tensor q, Tensor k, Tensor v", "Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None"
_ROWS = f"Tensor dout, {_QKV}, Tensor out, Tensor softmax_lse"
# FlashAttention 3 of November 2025.
_FORWARD = (f"{_QKV}, Tensor? k_new=None, Tensor? out_=None, int? max_seqlen_q=None, float? softmax_scale=None, "
            "bool causal=False, int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float "
            "softcap=0.0, int sm_margin=0")  # fmt: skip
_BACKWARD = (f"{_ROWS}, Tensor? cu_seqlens_q=None, {_GRADS}, float? softmax_scale=None, bool is_causal=False, int "
             "window_size_left=-1, int window_size_right=-1, float softcap=0.0, bool deterministic=False, int "
             "sm_margin=0")  # fmt: skip


@pytest.fixture
def install(monkeypatch):
    """Install modules under their import names for the rest of the test."""

    def put(distribution, version, module, **contents):
        made = ModuleType(module)
        made.__spec__ = SimpleNamespace(name=module)
        vars(made).update(contents)
        parts = module.split(".")
        for end in range(1, len(parts)):  # importing a module imports its parents
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        monkeypatch.setitem(sys.modules, module, made)
        installed = packages.metadata.version
        monkeypatch.setattr(
            packages.metadata, "version", lambda name: version if name == distribution else installed(name)
        )
        packages.optional_package.cache_clear()

    yield put
    packages.optional_package.cache_clear()


def _install_flash(install, forward, backward):
    module = "flash_attn_interface"
    install("flash-attn-3", "3.0.0", module, _flash_attn_forward=forward, _flash_attn_backward=backward)
    return KERNELS["flash_attn_3"]


def test_flash_attention_3(install):
    forward = _operator("f3", _FORWARD, "(Tensor, Tensor, Tensor, Tensor)", (), _short)
    backward = _operator("b3", _BACKWARD, "Tensor", ("dq", "dk", "dv"), _softmax_d)
    kernel = _install_flash(install, forward, backward)
    assert kernel.unavailable((9, 0), 128) is None
    for case in ("grouped", "strided", "broadcast"):
        check_kernel(kernel, "cpu", torch.float32, 2e-5, False, **CASES[case])


def test_flash_attention_3_leaves_sms_free_during_messages(install):
    margins = []

    def recorded(body):
        return lambda given: (margins.append(given.pop("sm_margin")), body(given))[1]

    forward = _function("f", "q, k, v, softmax_scale, causal, sm_margin", recorded(_short))
    backward = _function("b", "dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, is_causal, deterministic, "
                         "sm_margin", recorded(_flash_write))  # fmt: skip
    kernel = _install_flash(install, forward, backward)
    plain, ring = (check_kernel(x, "cpu", torch.float32, 2e-5, False) for x in (kernel, kernel.next_to_messages()))
    assert plain == ring, "the same numbers"
    assert all(k.next_to_messages() is k for k in KERNELS.values() if k.name != "flash_attn_3")
    assert margins == [0] * 4 + [SM_MARGIN] * 4, "two chunks, forward and backward"
    assert SM_MARGIN % 2 == 0, "an odd number of SMs holds no whole clusters"


# FlashAttention 4, 4.0.0b36 (flash_attn/cute/interface.py).
_FORWARD_4 = (
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, "
    "window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
    "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, "
    "block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, "
    "q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, "
    "seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False"
)
_BACKWARD_4 = (
    "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
    "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, "
    "num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, "
    "AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, "
    "learnable_sink=None"
)


def _forward_4(given):
    assert given.pop("return_lse"), "without it the log-sum-exp is None"
    assert (given.pop("num_threads"), given.pop("num_splits")) == (384, 1)
    out, lse = _flash_results(given)
    return out.contiguous(), lse.contiguous(), None, None, None


def _backward_4(given):
    assert not given["causal"] and given["dlse"] is None
    for name in ("out", "dout", "lse"):
        assert given[name].is_contiguous(), name
    check_aligned(given["q"], given["k"], given["v"])
    tensors = (given[n] for n in ("dout", "q", "k", "v", "out", "lse"))
    return tuple(attend_backward(*tensors, None, given["softmax_scale"]))


def test_flash_attention_4(install):
    forward, backward = _function("f4", _FORWARD_4, _forward_4), _function("b4", _BACKWARD_4, _backward_4)
    install("flash-attn-4", "4.0.0b36", "flash_attn.cute.interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)
    kernel = KERNELS["flash_attn_4"]
    for capability in ((9, 0), (10, 0), (11, 0), (12, 0)):
        assert kernel.unavailable(capability, 128) is None
    assert kernel.unavailable((13, 0), 128)
    for case in ("grouped", "strided", "broadcast"):
        check_kernel(kernel, "cpu", torch.float32, 2e-5, False, **CASES[case])


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """Stand for a GPU of compute capability 9 whose torch has cuDNN; nothing was checked at setup yet."""
    monkeypatch.setattr(cuda_kernels, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(choose, "_checked_kernels", {})
    for name in ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cuda_kernels._keep_compiled_kernels.cache_clear()
    packages.optional_package.cache_clear()
    return monkeypatch


HALF, BOTH = torch.bfloat16, ("flash_attn_3", "flash_attn_4")


@pytest.mark.parametrize(
    ("expected", "capability", "dtype", "head_dim", "tokens", "gradients", "installed"),
    [
        ("flash_attn_4", (9, 0), HALF, 128, 8192, True, BOTH[1:]),
        ("flash_attn_4", (9, 0), torch.float16, 64, 32760, True, BOTH[1:]),
        ("cudnn", (9, 0), HALF, 128, 8191, True, BOTH[1:]),
        ("flash_attn_4", (9, 0), HALF, 128, 32760, False, BOTH[1:]),
        ("cudnn", (9, 0), HALF, 128, 32759, False, BOTH[1:]),
        ("cudnn", (9, 0), HALF, 128, 32760, True, ()),
        ("flash_attn_3", (9, 0), HALF, 128, 32760, True, BOTH),
        ("flash_attn_3", (9, 0), HALF, 128, 512, False, BOTH),
        ("flash", (9, 0), HALF, 192, 32760, True, BOTH[1:]),
        ("efficient", (9, 0), torch.float32, 128, 32760, True, BOTH),
        ("cudnn", (10, 0), HALF, 128, 32760, True, BOTH),
        ("flash", (8, 0), HALF, 128, 32760, True, BOTH),
        ("flash", (12, 0), HALF, 128, 32760, True, BOTH),
        ("cpu_flash", None, HALF, 128, 32760, True, BOTH),
    ],
)
def test_choice_of_auto(hopper, install, expected, capability, dtype, head_dim, tokens, gradients, installed):
    hopper.setattr(cuda_kernels, "_capability", lambda device: capability)
    if "flash_attn_3" in installed:
        _install_flash(install, None, None)
    if "flash_attn_4" in installed:
        install("flash-attn-4", "4.0.0b36", "flash_attn.cute.interface")
    device = torch.device("cpu" if capability is None else "cuda")
    wanted = {"device": device, "dtype": dtype, "head_dim": head_dim, "masked": False}
    wanted |= {"tokens": tokens, "gradients": gradients}
    if expected == "flash_attn_4":
        assert choose.choose_kernel("auto", **wanted).name == "cudnn", "not before its check at setup"
    choose._checked_kernels["flash_attn_4", dtype, head_dim] = None
    assert choose.choose_kernel("auto", **wanted).name == expected
    if expected == "flash_attn_4":
        wanted["masked"] = True
        assert choose.choose_kernel("auto", **wanted).name == "cudnn"


def test_flash_attention_4_keeps_compiled_kernels_in_the_users_home(hopper, tmp_path):
    names = [f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR")]
    KERNELS["flash_attn_4"].package()
    enabled, folder = (os.environ[name] for name in names)
    assert enabled == "1" and folder.startswith(str(tmp_path)) and os.stat(folder).st_mode & 0o077 == 0
    hopper.setenv(names[0], "0")  # the user's choice stays
    cuda_kernels._keep_compiled_kernels.cache_clear()
    KERNELS["flash_attn_4"].package()
    assert os.environ[names[0]] == "0"


def _te_forward(given):
    assert given["is_training"] and given["qkv_layout"] == "bshd_bshd_bshd"
    assert given["o_format"] == "bshd" and given["fused_attention_backend"] == 1
    q, k, v = given["q"], given["k"], given["v"]
    out, lse = attend(q, k, v, _te_bias(given), given["attn_scale"])
    return out, [lse[..., None], torch.zeros(2, dtype=torch.int64)]


def _te_bias(given):
    """Return the bias of the keys beyond each sample's length; check the sizes."""
    q, k, v = given["q"], given["k"], given["v"]
    check_dense(*(x.transpose(1, 2) for x in (q, k, v)))
    assert given["cu_seqlens_q"].tolist() == [i * q.shape[1] for i in range(len(q) + 1)]
    assert (given["max_seqlen_q"], given["max_seqlen_kv"]) == (q.shape[1], k.shape[1])
    ends = given["cu_seqlens_kv"]
    lengths = ends.diff()
    assert ends.dtype == torch.int32 and ends[0] == 0 and lengths.min() > 0
    if given["attn_mask_type"] == "no_mask":
        assert (lengths == k.shape[1]).all()
        return None
    assert given["attn_mask_type"] == "padding" and given["attn_bias_type"] == "no_bias"
    hidden = torch.arange(k.shape[1]) >= lengths[:, None]
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[:, None, None]


def _te_backward(given):
    formats = [given[n] for n in ("o_format", "do_format", "dqkv_layout")]
    assert formats == ["bshd", "bshd", "bshd_bshd_bshd"]
    tensors = [given[n] for n in ("d_o", "q", "k", "v", "o")]
    check_dense(*(x.transpose(1, 2) for x in tensors))
    lse, rng_state = given["aux_ctx_tensors"]
    assert lse.is_contiguous() and lse.shape[3] == 1 and rng_state.shape == (2,)
    bias = _te_bias(given)
    dq, dk, dv = attend_backward(*tensors, lse[..., 0], bias, given["attn_scale"])
    if bias is not None:  # the package may leave anything there
        dk, dv = (x.masked_fill(bias[:, 0, 0, :, None, None] == -torch.inf, torch.nan) for x in (dk, dv))
    return [dq, dk, dv, None, None]


def test_transformer_engine(install):
    ((version, facts),) = read().items()
    call_forward, call_backward = (call_checker(facts[name]) for name in ("fused_attn_fwd", "fused_attn_bwd"))
    module = "transformer_engine.pytorch.cpp_extensions.fused_attn"
    functions = {
        "fused_attn_fwd": lambda **given: _te_forward(call_forward(**given)),
        "fused_attn_bwd": lambda **given: _te_backward(call_backward(**given)),
    }
    install("transformer-engine", version, module, **functions, FusedAttnBackend={"F16_arbitrary_seqlen": 1})
    assert not isinstance(KERNELS["transformer_engine"].package(), str)
    for case in ("grouped", "strided", "broadcast", "fewer keys"):
        for masked in (False, True):
            check_kernel(KERNELS["transformer_engine"], "cpu", torch.float32, 2e-5, masked, **CASES[case])


def test_packages_that_are_absent_old_or_broken_are_refused(install, monkeypatch, tmp_path):
    packages.optional_package.cache_clear()
    for name in ("flash_attn_3", "flash_attn_4", "transformer_engine"):
        assert isinstance(KERNELS[name].package(), str), name
    module = "transformer_engine.pytorch.cpp_extensions.fused_attn"
    install("transformer-engine", "2.16.1", module)
    assert "2.17" in KERNELS["transformer_engine"].package()
    install("flash-attn-4", "4.0.0b27", "flash_attn.cute.interface")
    assert "4.0.0b36" in KERNELS["flash_attn_4"].package()
    for version in ("4.0.0b36", "4.0.0", "4.1"):
        install("flash-attn-4", version, "flash_attn.cute.interface")
        assert not isinstance(KERNELS["flash_attn_4"].package(), str), version
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    packages.optional_package.cache_clear()
    assert isinstance(KERNELS["flash_attn_3"].package(), str)
