"""Forward-mode derivatives through a whole network: sharded by FSDP2, tokens split, against ``torch.func.jvp``."""

import pytest
import torch
from torch.autograd import forward_ad

from fsdp_cp.context.check_parallel import relative_error
from tests.oracles.samples import video
from tests.oracles.tiny_wan import text_condition
from tests.oracles.wan64 import LATENTS, plain_wan, sample, sharded_role
from tests.oracles.written_out import WrittenOut
from tests.tiers import slow_case

MESHES = [
    {"dp_shard": 2, "cp": 1}, {"cp": 2}, {"cp": 3, "ring": 3},
    slow_case({"dp_shard": 2, "cp": 2}), slow_case({"cp": 4, "ring": 2}),
]  # fmt: skip


def world(sizes):
    return sizes.get("dp_shard", 1) * sizes["cp"]


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
        both = forward_ad.unpack_dual(role.velocity(video(dual_x), dual_t, condition).video)
        of_time = forward_ad.unpack_dual(role.velocity(video(x[mine]), dual_t, condition).video).tangent
    again = role.velocity(video(x[mine]), t[mine], condition).video.detach()  # the network as it was, without duals
    return mesh.dp_rank, both.primal, both.tangent, of_time, again


@pytest.fixture(scope="module")
def oracle(wan64):
    """Return velocity, its derivative along tangents of x and t, and its derivative along t alone."""
    network = plain_wan(wan64).requires_grad_(False)
    x, t, text, _ = sample(LATENTS)
    plain = network(x, 1000 * t, text, return_dict=False)[0]
    for block in network.blocks:
        block.attn1.set_processor(WrittenOut())
        block.attn2.set_processor(WrittenOut())
    dx, dt = _tangents(x, t)

    def velocity(x, t):
        return network(hidden_states=x, timestep=1000 * t, encoder_hidden_states=text, return_dict=False)[0]

    out, tangent = torch.func.jvp(velocity, (x, t), (dx, dt))
    assert relative_error(out, plain) < 1e-7, "the oracle is diffusers' network"
    return out, tangent, torch.func.jvp(velocity, (x, t), (torch.zeros_like(dx), dt))[1]


@pytest.mark.parametrize("sizes", MESHES)
def test_jvp_of_wan(pools, wan64, oracle, sizes):
    """Wan has 45 tokens and runs in fp64, except for its norms, which diffusers computes in fp32."""
    ranks = pools[world(sizes)].run(_wan_jvp, wan64, sizes)
    out, tangent, of_time = oracle
    samples = len(out) // sizes.get("dp_shard", 1)
    for dp_rank, *ours in ranks:
        mine = slice(dp_rank * samples, (dp_rank + 1) * samples)
        for each, truth in zip(ours, (out, tangent, of_time, out), strict=True):
            assert relative_error(each, truth[mine]) < 1e-6
