"""Gathers of modules that return more than a tensor: lists, dicts, dataclasses, ``ModelOutput``; uneven tokens."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

from fsdp_cp import build_mesh, microbatch, shard_module
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.context_parallel import GatherTokens, SplitTokens, parallelize_context
from tests.oracles.seeded import seeded
from tests.oracles.small_transformer import DIM, HEADS, Transformer

TOKENS, RANKS = 11, 3


@dataclass
class Plain:
    sample: torch.Tensor
    features: torch.Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    sample: torch.Tensor
    features: torch.Tensor | None = None


Named = namedtuple("Named", ["sample", "features"])
KINDS = {  # functions that make the output from (sample, features), and that take the sample from it
    "tensor": (lambda a, b: a, lambda out: out),
    "tuple": (lambda a, b: (a, b), lambda out: out[0]),
    "list": (lambda a, b: [a, None], lambda out: out[0]),
    "named": (Named, lambda out: out.sample),
    "dict": (lambda a, b: {"sample": a, "nothing": None, "features": b}, lambda out: out["sample"]),
    "dataclass": (Plain, lambda out: out.sample),
    "dataclass_without": (lambda a, b: Plain(a), lambda out: out.sample),
    "frozen": (Frozen, lambda out: out.sample),
    "model_output": (lambda a, b: Transformer2DModelOutput(sample=a), lambda out: out.sample),
}
GATHERS = {"tensor": 1, "dataclass_without": 1, "model_output": 1}


class Network(Transformer):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return KINDS[self.kind][0](self.head(x), x)


def _gradients(kind, cp):
    mesh = build_mesh(cp=cp, heads=HEADS)
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(3, TOKENS, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    model = seeded(lambda: Network(kind)).double()
    for block in model.blocks:
        block.mesh = mesh
    # The gather is the whole network's own: what the user gets is what it returns.
    gathers = [GatherTokens(gather_dim=1), None if kind == "list" else GatherTokens(gather_dim=1)]
    plan = {"blocks.0": {"hidden_states": SplitTokens(split_dim=1)}, "": gathers[: GATHERS.get(kind, 2)]}
    parallelize_context(model, mesh=mesh, plan=plan)
    shard_module(model, mesh=mesh, units=model.blocks, precision="fp64")
    own = slice(mesh.dp_rank * 3 // mesh.dp_size, (mesh.dp_rank + 1) * 3 // mesh.dp_size)
    with microbatch(model, is_first=True, is_last=True):
        output = model(x[own])
        make, find = KINDS[kind]
        assert type(output) is type(make(x, x))
        (find(output) - target[own]).square().sum().backward()
    assert find(output).shape == (len(x[own]), TOKENS, 5)
    features = output["features"] if kind == "dict" else getattr(output, "features", None)
    assert features is None or features.shape == (len(x[own]), TOKENS, DIM)
    if kind == "model_output":
        assert output["sample"] is output.sample is output[0]
    return [p.grad.full_tensor() for p in model.parameters()]


def _every_kind():
    """Return the largest error of a gradient by kind of output: split tokens against a tensor of split samples."""
    truth = _gradients("tensor", 1)
    return {kind: max(map(relative_error, _gradients(kind, RANKS), truth)) for kind in KINDS}


@pytest.mark.slow
def test_gradients_through_every_kind_of_output(pools):
    for errors in pools[RANKS].run(_every_kind):
        assert errors.keys() == KINDS.keys() and max(errors.values()) < 1e-12, errors


class Odd(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.block, self.output = nn.Identity(), output

    def forward(self, x):
        return self.output(self.block(x))


def _refused():
    mesh = build_mesh(cp=RANKS)
    for output, gathers in (
        (lambda x: ("text", x), 2),
        (lambda x: object(), 1),
        (lambda x: None, 1),
        (lambda x: {"sample": x, "features": x}, 1),
    ):
        model = Odd(output)
        plan = {
            "block": {"input": SplitTokens(split_dim=1)},
            "": [GatherTokens(gather_dim=1, source="input")] * gathers,
        }
        parallelize_context(model, mesh=mesh, plan=plan)
        with pytest.raises(ValueError):
            model(torch.zeros(1, TOKENS, 2))
    return True


def test_outputs_that_cannot_be_gathered_are_refused(pools):
    assert all(pools[RANKS].run(_refused))
