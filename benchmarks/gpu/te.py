"""Transformer Engine: its fp8 layer against float64, and steps of DMD2."""

from __future__ import annotations

from benchmarks.gpu.child import Context
from benchmarks.gpu.wan import run
from fsdp_cp.runtime.packages import transformer_engine

ROWS = 32760
"""Tokens of a clip of Wan 1.3B at 480p."""


def te(context: Context) -> None:
    """Write one row that says why nothing is measured, or all rows. Each measurement is a separate process."""
    reason = "runs on CUDA devices" if context.device_type == "cpu" else transformer_engine()
    if isinstance(reason, str):
        context.row("transformer_engine", refused=f"not carried: {reason}")
        return
    context.isolated("te.Linear", "benchmarks.gpu.te:linear", seconds=25)
    run(context, "DMD2, compiled, Transformer Engine")


def linear(context: Context) -> None:
    """Write errors of the layer's output and gradients, and those of the same layer in bf16."""
    import torch
    from torch import nn

    from fsdp_cp.context.check_parallel import relative_error
    from fsdp_cp.sharding.fp8 import te_linear

    generator = torch.Generator(context.device).manual_seed(0)
    for rows in (ROWS, 1, 250):
        plain = nn.Linear(1536, 8960, device=context.device, dtype=torch.bfloat16)
        x = torch.randn(rows, 1536, generator=generator, device=context.device).bfloat16()
        down = torch.randn(rows, 8960, generator=generator, device=context.device).bfloat16()
        exact = nn.Linear(1536, 8960, device=context.device, dtype=torch.float64)
        exact.load_state_dict(plain.state_dict())

        def results(layer, x, down):
            x = x.detach().requires_grad_()
            out = layer(x)
            return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], down)]

        expected = results(exact, x.double(), down.double())
        for name, layer in (("bf16", plain), ("te.Linear", te_linear(plain))):

            def errors(layer=layer, x=x, down=down, expected=expected):
                names = ("output", "of input", "of weight", "of bias")
                return dict(zip(names, map(relative_error, results(layer, x, down), expected), strict=True))

            context.attempt(f"{name}, {rows} rows", errors)
