"""The choice of a local kernel: what ``auto`` takes and says, and what is refused by name."""

import logging

import pytest
import torch

from fsdp_cp.attention.kernels import _explain, all_kernels, choose_kernel

CPU = torch.device("cpu")


def _choose(backend, dtype=torch.float32, device=CPU, **options):
    return choose_kernel(backend, device=device, dtype=dtype, head_dim=64, masked=False, **options)


def test_auto_explains_its_choice_once(caplog):
    _explain.cache_clear()
    with caplog.at_level(logging.INFO, logger="fsdp_cp.attention"):
        for _ in range(3):
            assert _choose("auto").name == "cpu_flash"
            assert _choose("auto", jvp=True).name == "reference"
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "attention backend auto: cpu_flash for torch.float32 on cpu (first choice)",
        "attention backend auto: reference for torch.float32 on cpu, JVP (the only one with a forward-mode derivative)",
    ]


@pytest.mark.parametrize("name", [n for n in all_kernels() if n != "reference"])
def test_a_derivative_is_refused_by_every_kernel_that_has_none(name):
    with pytest.raises(
        ValueError, match=rf"backend='{name}' has no forward-mode derivative \(JVP\); use backend='auto'"
    ):
        _choose(name, jvp=True)


@pytest.mark.parametrize("name", ["flash", "cudnn", "flash_attn_2", "flash_attn_3", "transformer_engine"])
def test_fp32_is_refused_by_half_precision_kernels(name):
    with pytest.raises(ValueError, match=rf"backend='{name}' takes .*, not float32"):
        _choose(name, device=torch.device("cuda"))


def test_unknown_names_and_dtypes():
    with pytest.raises(ValueError, match="backend='sdpa' is unknown; use auto or cpu_flash, "):
        _choose("sdpa")
    with pytest.raises(ValueError, match="no attention kernel takes torch.int64 on cpu: cpu_flash takes "):
        _choose("auto", dtype=torch.int64)
    assert _choose("auto", dtype=torch.float64).name == "cpu_flash"
    with pytest.raises(ValueError, match="reference takes fp64, fp32, bf16 and fp16, not torch.float8_e4m3fn"):
        _choose("auto", dtype=torch.float8_e4m3fn)
