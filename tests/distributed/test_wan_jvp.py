"""Forward-mode derivatives through a whole network: sharded by FSDP2, tokens split, against ``torch.func.jvp``."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from fsdp_cp import build_mesh, shard_module
from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.context_parallel import GatherTokens, SplitTokens, parallelize_context
from models.condition import text_condition
from tests.oracles.wan64 import LATENTS, plain_wan, relative, sample, sharded_role
from tests.oracles.written_out import WrittenOut

MESHES = [
    {"cp": 1}, {"cp": 2}, {"dp_shard": 2, "cp": 1}, {"dp_shard": 2, "cp": 2}, {"cp": 3}, {"cp": 3, "ring": 3},
    {"cp": 4}, {"cp": 4, "ring": 2}, {"cp": 4, "ring": 4},
]  # fmt: skip


def world(sizes):
    return sizes.get("dp_shard", 1) * sizes["cp"]


def attend(q, k, v):
    """Attention over ``(B, S, H, D)``, written out: torch's own on the CPU has no forward-mode AD."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)


def _tangents(x, t):
    generator = torch.Generator().manual_seed(99)
    return torch.randn(x.shape, generator=generator).double(), torch.rand(t.shape, generator=generator).double() + 0.5


def _wan_jvp(folder, sizes):
    role, mesh = sharded_role(folder, sizes)
    samples = 2 // mesh.dp_size
    mine = slice(mesh.dp_rank * samples, (mesh.dp_rank + 1) * samples)
    x, t, text, _ = sample(LATENTS)
    condition = text_condition(text[mine])
    dx, dt = _tangents(x, t)
    with torch.no_grad(), forward_ad.dual_level():
        dual_x, dual_t = forward_ad.make_dual(x[mine], dx[mine]), forward_ad.make_dual(t[mine], dt[mine])
        both = forward_ad.unpack_dual(role.velocity(dual_x, dual_t, condition))
        of_time = forward_ad.unpack_dual(role.velocity(x[mine], dual_t, condition)).tangent
    again = role.velocity(x[mine], t[mine], condition).detach()  # the network as it was, without duals
    return mesh.dp_rank, both.primal, both.tangent, of_time, again


@pytest.fixture(scope="module")
def oracle(wan64):
    """Velocity, its derivative along tangents of x and t, and of t alone."""
    network = plain_wan(wan64).requires_grad_(False)
    plain = network(*_inputs(), return_dict=False)[0]
    for block in network.blocks:
        block.attn1.set_processor(WrittenOut())
        block.attn2.set_processor(WrittenOut())
    x, t, text, _ = sample(LATENTS)
    dx, dt = _tangents(x, t)

    def velocity(x, t):
        return network(hidden_states=x, timestep=1000 * t, encoder_hidden_states=text, return_dict=False)[0]

    out, tangent = torch.func.jvp(velocity, (x, t), (dx, dt))
    assert relative(out, plain) < 1e-7, "the oracle is diffusers' network"
    return out, tangent, torch.func.jvp(velocity, (x, t), (torch.zeros_like(dx), dt))[1]


def _inputs():
    x, t, text, _ = sample(LATENTS)
    return x, 1000 * t, text


@pytest.mark.parametrize("sizes", MESHES)
def test_jvp_of_wan(pools, wan64, oracle, sizes):
    """45 tokens, in fp64 as far as Wan's norms allow, which diffusers computes in fp32."""
    ranks = pools[world(sizes)].run(_wan_jvp, wan64, sizes)
    out, tangent, of_time = oracle
    samples = len(out) // sizes.get("dp_shard", 1)
    for dp_rank, *ours in ranks:
        mine = slice(dp_rank * samples, (dp_rank + 1) * samples)
        for each, truth in zip(ours, (out, tangent, of_time, out), strict=True):
            assert relative(each, truth[mine]) < 1e-6


DIM, HEADS, TOKENS = 24, 12, 13


class Block(nn.Module):
    """Every operation in the dtype of its input, so that fp64 is fp64."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 31), nn.GELU("tanh"), nn.Linear(31, DIM))
        self.modulation = nn.Linear(DIM, 2 * DIM)
        self.attend = attend

    def forward(self, hidden_states, temb):
        shift, scale = self.modulation(temb).chunk(2, dim=-1)
        x = self.norm(hidden_states) * (1 + scale) + shift
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM // HEADS)).unbind(2)
        hidden_states = hidden_states + self.out(self.attend(q, k, v).flatten(2))
        return hidden_states + self.mlp(hidden_states)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.time = nn.Linear(5, DIM), nn.Linear(DIM, 5), nn.Linear(1, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, t):
        temb, x = self.time(t[:, None, None]).sin(), self.embed(x)
        for block in self.blocks:
            x = block(x, temb)
        return self.head(x)


def _own_case():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Transformer().double().requires_grad_(False)
        values = [torch.randn(shape, dtype=torch.float64) for shape in ((2, TOKENS, 5), (2,)) * 2]
    return model, values[:2], values[2:]


def _own_jvp(sizes, head_groups):
    mesh = build_mesh(**sizes, heads=HEADS)
    model, inputs, tangents = _own_case()
    for block in model.blocks:
        block.attend = lambda q, k, v: context_parallel_attention(
            q, k, v, mesh=mesh, total_tokens=TOKENS, head_groups=head_groups
        )
    plan = {"blocks.0": {"hidden_states": SplitTokens(1)}, "head": GatherTokens(1)}
    parallelize_context(model, mesh=mesh, plan=plan)
    shard_module(model, mesh=mesh, units=model.blocks, precision="fp64")
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, dx) for x, dx in zip(inputs, tangents, strict=True)]
        out = forward_ad.unpack_dual(model(*duals))
    return out.primal, out.tangent


@pytest.mark.parametrize(
    ("sizes", "head_groups"), [*((sizes, 1) for sizes in MESHES), ({"cp": 4, "ring": 2}, 3), ({"cp": 6, "ring": 3}, 2)]
)
def test_jvp_of_a_transformer_in_fp64(pools, sizes, head_groups):
    model, inputs, tangents = _own_case()
    truth = torch.func.jvp(model, tuple(inputs), tuple(tangents))
    for ours in pools[world(sizes)].run(_own_jvp, sizes, head_groups):
        assert relative(ours[0], truth[0]) < 1e-12
        assert relative(ours[1], truth[1]) < 1e-10
