"""fp8 layers by Transformer Engine's ``te.Linear`` (2.17 to 2.20) with current scaling. Not yet run on a GPU.

Current scaling scales each tensor by its largest element of this product: inputs and weights to e4m3, gradients to
e5m2. It needs no state. Under FSDP2 the layer saves no fp8 weight; its backward casts the weight that FSDP2 gathers.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_cp.context.duals import inside_dual_level
from fsdp_cp.runtime.packages import transformer_engine

FORWARD_ROWS, BACKWARD_ROWS = 8, 16
"""Numbers that must divide the rows of an input: the layer asserts 8; the weight's gradient sums over rows and needs
16."""


def te_linear(layer: Any) -> nn.Module:
    """Return a ``te.Linear`` with the parameters of the ``nn.Linear`` ``layer``, under the same names."""
    # On the meta device te.Linear allocates nothing and draws no random numbers; its default device is "cuda".
    made = _layer_class()(
        in_features=layer.in_features,
        out_features=layer.out_features,
        bias=layer.bias is not None,
        params_dtype=layer.weight.dtype,
        device="meta",
    )
    for name, parameter in layer.named_parameters():
        made.register_parameter(name, parameter)
    return made.train(layer.training)


@cache
def _layer_class() -> type[nn.Module]:
    te: Any = transformer_engine()
    recipe: Any = transformer_engine("transformer_engine.common.recipe")
    current_scaling = recipe.Float8CurrentScaling()

    class Float8Linear(te.Linear):
        """``te.Linear`` without a state, for any number of rows, and plain inside a dual level."""

        get_extra_state = nn.Module.get_extra_state  # torch then leaves the key out of state dicts
        set_extra_state = nn.Module.set_extra_state

        def reset_parameters(self, defer_init: bool = False) -> None:
            if not defer_init:  # te.Linear would draw other values, on a GPU
                nn.Linear.reset_parameters(self)

        def forward(self, x: Tensor) -> Tensor:
            if inside_dual_level():  # te.Linear would drop tangents
                return F.linear(x, self.weight, self.bias if self.use_bias else None)
            rows = math.prod(x.shape[:-1])
            multiple = BACKWARD_ROWS if torch.is_grad_enabled() and self.weight.requires_grad else FORWARD_ROWS
            # Rows of zeros change neither the scales nor the sums over rows.
            padded = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, -rows % multiple))
            with te.autocast(enabled=True, recipe=current_scaling):
                out: Tensor = super().forward(padded)
            return out[:rows].view(*x.shape[:-1], -1)

    return Float8Linear


@cache
def compile_refusal() -> str:
    """Return the clause that says why units with these layers cannot be compiled, or an empty string.

    Before 2.20 each layer breaks the graph. For later versions a small layer is compiled, forward and backward.
    """
    if isinstance(package := transformer_engine(at_least="2.20"), str):
        return package
    try:
        layer: Any = te_linear(nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16))
        torch.compile(layer, fullgraph=True)(layer.weight.detach()).sum().backward()
    except Exception as error:  # of Dynamo, inductor or the package
        return f"cannot compile a layer: {(str(error) or type(error).__name__).splitlines()[0]}"
    return ""
