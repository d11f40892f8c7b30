"""Errors of local attention kernels against attention written out in float64.

The cases are those of the GPU tests (``tests/oracles/attention_kernels.py``). Here each kernel runs in a separate
process, since an illegal access destroys the device's context, and the table shows the largest error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.gpu.child import Context, DeviceLost, error_line
from fsdp_cp.attention.kernels.choose import KERNELS
from fsdp_cp.attention.kernels.kernel import Kernel
from tests.oracles.attention_kernels import CASES, TOLERANCE, check_derivative, check_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIM = 32
"""Head size of the cases."""


def kernels(context: Context) -> None:
    """Write a row for each kernel and dtype, without and with masks."""
    for name, kernel in KERNELS.items():
        refusal = refused_at_once(kernel, context.device_type, HEAD_DIM)
        if refusal is not None:
            context.row(name, refused=refusal)
        else:
            context.isolated(name, "benchmarks.gpu.kernels:one_kernel", name, seconds=60)


def refused_at_once(kernel: Kernel, device_type: str, head_dim: int) -> str | None:
    """Return why ``kernel`` cannot run, as far as this is known without starting CUDA.

    On a GPU only missing packages are known. Starting CUDA here would take GPU memory from the other processes.
    """
    if device_type == "cpu":
        return kernel.refuses(torch.device("cpu"), torch.bfloat16, head_dim, False)
    if kernel.name == "cpu_flash":
        return "runs on the CPU"
    package = kernel.package() if hasattr(kernel, "package") else None
    return f"not carried: {package}" if isinstance(package, str) else None


def one_kernel(context: Context, name: str) -> None:
    """Write the rows of one kernel. Only the reference has a derivative, and rows for it."""
    kernel = KERNELS[name]
    for dtype in DTYPES:
        for masked in (False, True):
            label = f"{name}, {str(dtype).removeprefix('torch.')}{', masked' if masked else ''}"
            refusal = kernel.refuses(context.device, dtype, HEAD_DIM, masked)
            if refusal is not None:
                context.row(label, refused=refusal)
                continue
            cases = {
                case: lambda sizes=sizes, dtype=dtype, masked=masked: check_kernel(
                    kernel, context.device_type, dtype, TOLERANCE[dtype], masked, **sizes
                )
                for case, sizes in CASES.items()
                if not (masked and sizes.get("batch") == 1)  # the masks have three samples
            }
            _row(context, label, cases, TOLERANCE[dtype])
    if name == "reference":
        for dtype in (*DTYPES, torch.float64):
            derivatives = {
                f"{'masked' if masked else 'plain'}, {'two chunks' if chunked else 'whole'}": (
                    lambda dtype=dtype, masked=masked, chunked=chunked: check_derivative(
                        context.device_type, dtype, TOLERANCE[dtype], masked, chunked=chunked
                    )
                )
                for masked in (False, True)
                for chunked in (False, True)
            }
            label = f"{name}, derivative, {str(dtype).removeprefix('torch.')}"
            _row(context, label, derivatives, TOLERANCE[dtype])


def _row(context: Context, label: str, cases: Mapping[str, Callable[[], dict[str, float]]], tolerance: float) -> None:
    """Write a row: number of correct cases, their largest error, and the first failure.

    Raises:
        DeviceLost: a case has made the GPU unusable. The row is written first.
    """
    largest, where, wrong = 0.0, "", []
    lost = None
    for case, check in cases.items():
        try:
            errors = check()
        except Exception as error:
            wrong.append(f"{case}: {error_line(error)}")
        else:
            worst = max(errors, key=errors.__getitem__)
            if errors[worst] >= largest:
                largest, where = errors[worst], f"{worst} of {case}"
            continue
        try:
            context.let_go()
        except DeviceLost as error:
            lost = error
            break
    cells: dict[str, Any] = {
        "right": f"{len(cases) - len(wrong)} of {len(cases)}" if lost is None else None,
        "largest error": largest if where else None, "in": where, "allowed": tolerance,
    }  # fmt: skip
    context.row(label, **cells, **({"error": wrong[0]} if wrong else {}))
    if lost is not None:
        raise lost
