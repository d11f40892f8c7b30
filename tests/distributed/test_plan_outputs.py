"""Gathers on modules that return more than a tensor: lists, dicts, dataclasses, ``ModelOutput``; uneven tokens."""

import re
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

from fsdp_cp import build_mesh, microbatch, shard_module
from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.context_parallel import GatherTokens, SplitTokens, parallelize_context

TOKENS, DIM, RANKS = 11, 12, 3


@dataclass
class Plain:
    sample: torch.Tensor
    features: torch.Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    sample: torch.Tensor
    features: torch.Tensor | None = None


Named = namedtuple("Named", ["sample", "features"])
KINDS = {  # what makes the output of (sample, features), and what finds the sample in it
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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.mesh = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), None

    def forward(self, hidden_states):
        q, k, v = self.qkv(hidden_states).unflatten(-1, (3, 3, 4)).unbind(2)
        return hidden_states + self.out(
            context_parallel_attention(q, k, v, mesh=self.mesh, total_tokens=TOKENS).flatten(2)
        )


class Network(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.head = nn.Linear(5, DIM), nn.Linear(DIM, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.kind = kind

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return KINDS[self.kind][0](self.head(x), x)


def _run(kind, cp):
    mesh = build_mesh(cp=cp, heads=3)
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(3, TOKENS, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Network(kind).double()
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
        expected = make(x, x)
        assert type(output) is type(expected)
        loss = (find(output) - target[own]).square().sum()
        loss.backward()
    assert find(output).shape == (len(x[own]), TOKENS, 5)
    for features in [output["features"]] if kind == "dict" else [getattr(output, "features", None)]:
        assert features is None or features.shape == (len(x[own]), TOKENS, DIM)
    if kind == "model_output":
        assert output["sample"] is output.sample is output[0]
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_every_kind_of_output(pools, kind):
    split, whole = pools[RANKS].run(_run, kind, RANKS)[0], pools[RANKS].run(_run, kind, 1)[0]
    for ours, theirs in zip(split, whole, strict=True):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm()


class Odd(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.block, self.output = nn.Identity(), output

    def forward(self, x):
        x = self.block(x)
        return self.output(x)


def _text(x):
    return "text", x


def _object(x):
    return object()


def _nothing(x):
    return None


def _pair(x):
    return {"sample": x, "features": x}


def _refused(output, gathers):
    mesh = build_mesh(cp=RANKS)
    model = Odd(output)
    plan = {"block": {"input": SplitTokens(split_dim=1)}, "": [GatherTokens(gather_dim=1, of="input")] * gathers}
    parallelize_context(model, mesh=mesh, plan=plan)
    try:
        model(torch.zeros(1, TOKENS, 2))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("output", "gathers", "message"),
    [
        (_text, 2, "value 0 of what '' returns is a str, not a tensor; name the sub-module whose output is the tensor"),
        (_object, 1, "value 0 of what '' returns is a object, not a tensor"),
        (_nothing, 1, "value 0 of what '' returns is a NoneType, not a tensor"),
        (
            _pair,
            1,
            "'' returns 2 values (dict), but its context-parallel plan has 1 gathers; give a list",
        ),
    ],
)
def test_what_cannot_be_gathered(pools, output, gathers, message):
    for found in pools[RANKS].run(_refused, output, gathers):
        assert found is not None and re.match(re.escape(message), found)
