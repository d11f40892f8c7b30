"""The choice of a local attention kernel: what ``auto`` takes, and what is refused."""

import logging

import pytest
import torch

from fsdp_cp.attention.kernels import _explain, all_kernels, choose_kernel

CPU = torch.device("cpu")


def _choose(backend, dtype=torch.float32, device=CPU, **options):
    return choose_kernel(backend, device=device, dtype=dtype, head_dim=64, masked=False, **options)


def test_auto_takes_the_first_kernel_that_can_and_logs_it_once(caplog):
    _explain.cache_clear()
    with caplog.at_level(logging.INFO, logger="fsdp_cp.attention"):
        for _ in range(3):
            assert _choose("auto").name == "cpu_flash"
            assert _choose("auto", jvp=True).name == "reference"
    assert len(caplog.records) == 2
    assert _choose("auto", dtype=torch.float64).name == "cpu_flash"


@pytest.mark.parametrize("name", [n for n in all_kernels() if n != "reference"])
def test_a_derivative_is_refused_by_every_kernel_that_has_none(name):
    with pytest.raises(ValueError, match=name):
        _choose(name, jvp=True)


def test_unknown_names_and_dtypes_are_refused():
    for backend, options in (
        ("sdpa", {}),
        ("flash_attn_3", {"device": torch.device("cuda")}),
        ("auto", {"dtype": torch.int64}),
        ("auto", {"dtype": torch.float8_e4m3fn}),
    ):
        with pytest.raises(ValueError) as caught:
            _choose(backend, **options)
        assert "\n" not in str(caught.value), backend
