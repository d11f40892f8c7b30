"""Stand-in for Transformer Engine on the CPU, with the signatures and assertions of ``transformer_engine_facts.json``.

It shows wiring, and the recipe's rounding: casts by each tensor's largest element, to e4m3 in forward and e5m2 for
gradients, and products of the rounded values in fp32. It runs none of the package's code.

``python -m tests.oracles.transformer_engine key=value ...`` runs ``train.py`` with it.
"""

import inspect
import math
import sys
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import nn

from fsdp_cp.launch import end_process
from fsdp_cp.runtime import packages
from fsdp_cp.sharding import fp8
from tests.transformer_engine_facts import read

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_ACTIVE: list[object] = []


def install() -> None:
    """Let this process find the stand-in instead of the package, and run it on a CPU."""
    modules = stand_in()
    packages.transformer_engine = fp8.transformer_engine = lambda module="", at_least="": modules[
        module or "transformer_engine.pytorch"
    ]
    fp8._layer_class.cache_clear()
    fp8.require_fp8 = lambda *_: None


def call_checker(arguments: str):
    """Return a function that binds a call to ``arguments`` and returns all values by name."""
    space: dict = {}
    exec(f"def signature({arguments}): pass", space)
    signature = inspect.signature(space["signature"])

    def bound(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        return call.arguments

    return bound


def stand_in() -> dict[str, ModuleType]:
    """Return the modules by name. Versions 2.17.0 to 2.20.2 have the same signatures and assertions."""
    (facts,) = read().values()
    module = {
        name: ModuleType(name)
        for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common.recipe")
    }
    te = module["transformer_engine.pytorch"]
    te.Linear = _linear_class(facts)
    te.autocast = _autocast(call_checker(facts["autocast"]))
    module["transformer_engine.common.recipe"].Float8CurrentScaling = type("Float8CurrentScaling", (), {})
    return module


def _autocast(checked):
    @contextmanager
    def autocast(*args, **kwargs):
        call = checked(*args, **kwargs)
        assert call["enabled"] and type(call["recipe"]).__name__ == "Float8CurrentScaling"
        _ACTIVE.append(call["recipe"])
        try:
            yield
        finally:
            _ACTIVE.pop()

    return autocast


def _linear_class(facts):
    init, forward_call = call_checker(facts["Linear"]), call_checker(facts["Linear.forward"])

    class Linear(nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            assert not args, "every argument by keyword"
            call = init(**kwargs)
            self.use_bias, self.init_meta, dtype = call["bias"], {}, call["params_dtype"]
            weight = torch.empty(call["out_features"], call["in_features"], device=call["device"], dtype=dtype)
            self.register_parameter("weight", nn.Parameter(weight), init_fn=call["init_method"])
            if self.use_bias:
                self.register_parameter("bias", nn.Parameter(weight.new_empty(len(weight))), init_fn=None)
            else:
                self.bias = torch.Tensor().to(dtype=dtype, device=call["device"])
            self.reset_parameters(defer_init=call["device"] == "meta")

        def register_parameter(self, name, param, **kwargs):
            super().register_parameter(name, param)
            self.init_meta.setdefault(name, kwargs)

        def reset_parameters(self, defer_init=False):
            assert defer_init, "the real one initializes on a GPU"

        def get_extra_state(self):
            return torch.empty(0, dtype=torch.uint8)

        def set_extra_state(self, state):
            pass

        def forward(self, *args, **kwargs):
            inp = forward_call(*args, **kwargs)["inp"]
            assert _ACTIVE, "outside of autocast the products are not fp8"
            for tensor in (inp, self.weight):
                if eval(facts["refused sizes"], {"math": math, "tensor": tensor}):
                    raise ValueError(f"FP8 execution requires other sizes than {list(tensor.shape)}")
            if torch.is_grad_enabled() and self.weight.requires_grad:
                assert math.prod(inp.shape[:-1]) % 16 == 0, "the inner size of the weight gradient's product"
            if any(inp.dtype != parameter.dtype for parameter in self.parameters()):
                raise TypeError("Data types for parameters must match when outside of autocasted region.")
            return _Product.apply(inp, self.weight, self.bias if self.use_bias else None)

    return Linear


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` scaled by its largest element, rounded to ``dtype``, and scaled back, in fp32."""
    largest, limit = x.abs().amax().float(), torch.finfo(dtype).max
    scale = torch.where(largest > 0, limit / largest, torch.ones(()))
    return (x.float() * scale).clamp(-limit, limit).to(dtype).float() / scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)  # FSDP2 gathers this weight again; the real layer keeps x in fp8
        ctx.bias = bias is not None
        out = rounded(x, E4M3) @ rounded(weight, E4M3).T
        return (out if bias is None else out + bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        down = rounded(grad, E5M2)
        return (
            (down @ rounded(weight, E4M3)).to(x.dtype) if ctx.needs_input_grad[0] else None,
            (down.T @ rounded(x, E4M3)).to(weight.dtype) if ctx.needs_input_grad[1] else None,
            grad.float().sum(0).to(weight.dtype) if ctx.bias and ctx.needs_input_grad[2] else None,
        )


if __name__ == "__main__":
    import train

    install()
    end_process(train.main(sys.argv[1:]))
