"""The choice of a local attention kernel: what ``auto`` takes, and what is refused."""

import logging

import pytest
import torch

from fsdp_cp.attention.kernels.choose import KERNELS, _explain, choose_dual, choose_kernel
from fsdp_cp.attention.kernels.kernel import Reference, attention_dual
from fsdp_cp.attention.kernels.self_check import self_check

CPU = torch.device("cpu")


def _choose(backend, dtype=torch.float32, device=CPU, **options):
    what = {"device": device, "dtype": dtype, "head_dim": 64, "masked": False}
    choose_kernel(backend, **what)  # only checks
    return choose_kernel(backend, **what, tokens=8, gradients=True, **options)


def test_auto_takes_the_first_kernel_that_can_and_logs_it_once(caplog):
    _explain.cache_clear()
    with caplog.at_level(logging.INFO, logger="fsdp_cp.attention"):
        for _ in range(3):
            assert _choose("auto").name == "cpu_flash"
    assert len(caplog.records) == 1
    assert _choose("auto", dtype=torch.float64).name == "cpu_flash"


def test_a_derivative_is_refused_by_every_kernel_that_has_none():
    q = torch.zeros(1, 1, 1, 8)
    for name in KERNELS:
        if name != "reference":
            with pytest.raises(ValueError, match=name):
                choose_dual(name, q)
    assert choose_dual("auto", q) is choose_dual("reference", q) is attention_dual


def test_unknown_names_and_dtypes_are_refused():
    for backend, options in (
        ("sdpa", {}),
        ("flash_attn_4", {"device": torch.device("cuda")}),
        ("auto", {"dtype": torch.int64}),
        ("auto", {"dtype": torch.float8_e4m3fn}),
    ):
        with pytest.raises(ValueError) as caught:
            _choose(backend, **options)
        assert "\n" not in str(caught.value), backend


class Off(Reference):
    """Kernel with a relative error in one of its results."""

    def __init__(self, results: str, position: int, error: float):
        self.results, self.position, self.error = results, position, error

    def _with_error(self, results: str, tensors):
        off = 1 + self.error if results == self.results else 1
        return tuple(x * off if i == self.position else x for i, x in enumerate(tensors))

    def forward(self, *arguments):
        return self._with_error("forward", super().forward(*arguments))

    def backward(self, *arguments):
        return self._with_error("backward", super().backward(*arguments))


@pytest.mark.parametrize(
    ("results", "position", "name"),
    [
        ("forward", 0, "output"),
        ("forward", 1, "log-sum-exp"),
        ("backward", 0, "gradient of q"),
        ("backward", 1, "gradient of k"),
        ("backward", 2, "gradient of v"),
    ],
)
def test_a_self_check_names_a_result_that_is_off_by_more_than_rounding(results, position, name):
    check = (CPU, torch.float32, 16)
    assert name in self_check(Off(results, position, 0.05), *check)
    assert self_check(Off(results, position, 1e-5), *check) is None
