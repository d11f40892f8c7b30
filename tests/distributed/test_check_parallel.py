"""The check of plans: it names a difference, and accepts a correct plan."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.context.check_parallel import ParallelMismatch, check_parallel
from fsdp_cp.context_parallel import GatherTokens, SplitTokens
from tests.tiers import parametrize

PLAN = {"blocks.0": {"x": SplitTokens(1)}, "head": GatherTokens(1)}
DIM = 8


class Block(nn.Module):
    def __init__(self, kind="right", mesh=None):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.kind, self.mesh = kind, mesh

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).unbind(2)
        if self.kind == "own tokens":
            out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        else:
            k = k.detach() if self.kind == "no gradient" and self.mesh.cp_size > 1 else k
            out = context_parallel_attention(q, k, v, mesh=self.mesh)
        x = x + self.out(out.flatten(2))
        return x - x.mean(1, keepdim=True) if self.kind == "mean" else x


class Network(nn.Module):
    def __init__(self, kind="right", mesh=None):
        super().__init__()
        self.embed, self.head, self.scale = nn.Linear(3, DIM), nn.Linear(DIM, 3), nn.Linear(3, 3)
        self.blocks = nn.ModuleList([Block("right", mesh), Block(kind, mesh)])
        self.kind = kind

    def forward(self, x, again=None):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return {"sample": self.scale(x) if self.kind == "after" else x, "nothing": again}


def _build(mesh):
    return Network("right", mesh)


def _inputs(tokens=7):
    return {"x": torch.randn(2, tokens, 3, generator=torch.Generator().manual_seed(3))}


def test_a_right_plan():
    network, state = Network(), torch.get_rng_state()
    worst = check_parallel(network, PLAN, _inputs())
    assert set(worst) == {2, 3} and max(worst.values()) < 1e-12
    assert torch.equal(state, torch.get_rng_state())
    assert check_parallel(_build, PLAN, (_inputs()["x"],), cp=(2,))[2] < 1e-12


@parametrize(
    ("kind", "plan", "name"),
    [
        ("own tokens", PLAN, "'blocks.1.out'"),
        ("mean", PLAN, "'blocks.1'"),
        ("after", PLAN, "'scale.weight'"),
        ("no gradient", PLAN, "'embed.weight'"),
        ("right", PLAN | {"head": {"input": SplitTokens(2)}}, "RuntimeError"),
        ("right", {"blocks.1": {"x": SplitTokens(1)}}, "model"),
    ],
    quick=4,
)
def test_a_difference_is_named(kind, plan, name):
    with pytest.raises(ParallelMismatch, match=f"^cp=2: .*{name}") as raised:
        check_parallel(Network(kind), plan, _inputs(), cp=(2,))
    assert "\n" not in str(raised.value)


def test_a_difference_at_three_ranks_alone():
    """A plan can be right on one mesh by chance: the check must also compare three ranks."""
    with pytest.raises(ParallelMismatch, match="^cp=3: "):
        check_parallel(_wrong_on_three, PLAN, _inputs(), cp=(2, 3))


def _wrong_on_three(mesh):
    return Network("mean" if mesh.cp_size == 3 else "right", mesh)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 3),
        ("model", lambda mesh: Network("right", mesh)),  # does not pickle
        ("inputs", torch.zeros(1)),
        ("cp", (1, 2)),
        ("tolerance", 0),
        ("plan", {"block": GatherTokens(1)}),
    ],
)
def test_arguments_that_cannot_be_used(name, value):
    arguments = {"model": Network(), "plan": PLAN, "inputs": _inputs()} | {name: value}
    with pytest.raises(ValueError, match="block" if name == "plan" else name):
        check_parallel(**arguments)
