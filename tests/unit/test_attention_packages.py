"""FlashAttention 4: a stand-in for its functions on the CPU, and when ``auto`` takes it.

The stand-in has the signatures of the released version, computes the same attention, and fails where the real one would
silently read something else. With a GPU and the package, ``test_cuda_kernels.py`` runs the real one.
"""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fsdp_cp.attention.kernels import choose
from fsdp_cp.attention.kernels import cuda as cuda_kernels
from fsdp_cp.attention.kernels.cuda import CUDA_KERNELS
from fsdp_cp.runtime import packages
from tests.oracles.attention_kernels import CASES, attend, attend_backward, check_aligned, check_kernel

KERNELS = {kernel.name: kernel for kernel in CUDA_KERNELS}


def _flash_results(given):
    """Compute the packages' forward, and check that only plain attention is requested."""
    for name, value in given.items():
        if name not in ("q", "k", "v", "softmax_scale"):
            assert value in (None, False, 0.0, -1, (-1, -1)), name
    check_aligned(given["q"], given["k"], given["v"])
    return attend(given["q"], given["k"], given["v"], None, given["softmax_scale"])


def _function(name, arguments, body):
    """Make a function called ``name`` with these arguments, which passes them to ``body`` by name."""
    space = {"body": body}
    exec(f"def {name}({arguments}):\n    return body(locals())", space)
    return space[name]


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


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("expected", "capability", "dtype", "head_dim", "tokens", "gradients", "installed"),
    [
        ("flash_attn_4", (9, 0), HALF, 128, 8192, True, True),
        ("flash_attn_4", (9, 0), torch.float16, 64, 32760, True, True),
        ("cudnn", (9, 0), HALF, 128, 8191, True, True),
        ("flash_attn_4", (9, 0), HALF, 128, 32760, False, True),
        ("cudnn", (9, 0), HALF, 128, 32759, False, True),
        ("cudnn", (9, 0), HALF, 128, 32760, True, False),
        ("flash", (9, 0), HALF, 192, 32760, True, True),
        ("efficient", (9, 0), torch.float32, 128, 32760, True, True),
        ("cudnn", (10, 0), HALF, 128, 32760, True, True),
        ("flash", (8, 0), HALF, 128, 32760, True, True),
        ("flash", (12, 0), HALF, 128, 32760, True, True),
        ("cpu_flash", None, HALF, 128, 32760, True, True),
    ],
)
def test_choice_of_auto(hopper, install, expected, capability, dtype, head_dim, tokens, gradients, installed):
    hopper.setattr(cuda_kernels, "_capability", lambda device: capability)
    if installed:
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


def test_packages_that_are_absent_old_or_broken_are_refused(install, monkeypatch, tmp_path):
    packages.optional_package.cache_clear()
    assert isinstance(KERNELS["flash_attn_4"].package(), str)
    install("flash-attn-4", "4.0.0b27", "flash_attn.cute.interface")
    assert "4.0.0b36" in KERNELS["flash_attn_4"].package()
    for version in ("4.0.0b36", "4.0.0", "4.1"):
        install("flash-attn-4", version, "flash_attn.cute.interface")
        assert not isinstance(KERNELS["flash_attn_4"].package(), str), version
    (tmp_path / "broken_package.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(packages.optional_package("broken_package", "pip install it"), str)
