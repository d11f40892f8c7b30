"""Each rank embeds and processes its own tokens: a whole Wan against plain diffusers, with any token count."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_cp.context.check_parallel import gradient_errors, relative_error
from fsdp_cp.context_parallel import EmbedOwnTokens, GatherTokens, parallelize_context
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sequence import local_token_range
from models.families.wan_attention import own_rotary_tables
from tests.oracles.full_tensors import full_tensors
from tests.oracles.samples import video
from tests.oracles.tiny_wan import text_condition
from tests.oracles.wan64 import ARCHITECTURE, BATCH, LATENTS, plain_wan, sample, sharded_role
from tests.tiers import long_case, slow, slow_case

DIM = 72
FEW_LATENTS = (4, 1, 4, 6)  # 6 tokens: on 4 ranks the last has none


def _plain_gradients(folder, shapes):
    network, losses = plain_wan(folder), []
    for seed, latents in enumerate(shapes):
        x, t, text, target = sample(latents, seed)
        out = network(hidden_states=x, timestep=1000 * t, encoder_hidden_states=text).sample
        losses.append((out - target).square().mean())
    sum(losses).backward()
    return [loss.item() for loss in losses], {name: p.grad for name, p in network.named_parameters()}


def _sharded_gradients(folder, sizes, shapes, checkpointing):
    role, mesh = sharded_role(folder, sizes, shapes[0], checkpointing)
    samples = BATCH // mesh.dp_size
    mine = slice(mesh.dp_rank * samples, (mesh.dp_rank + 1) * samples)
    losses = []
    for seed, latents in enumerate(shapes):
        x, t, text, target = (each[mine] for each in sample(latents, seed))
        losses.append(
            (role.velocity(video(x), t, text_condition(text)).video - target).square().mean() * samples / BATCH
        )
    sum(losses).backward()
    gradients = full_tensors({name: p.grad for name, p in role.named_parameters().items()})
    return [loss.item() for loss in losses], gradients, mesh.dp_rank


def _compare(pool, folder, sizes, shapes, checkpointing=False):
    losses, truth = _plain_gradients(folder, shapes)
    ranks = pool.run(_sharded_gradients, folder, sizes, shapes, checkpointing)
    by_dp = {dp_rank: ours for ours, _, dp_rank in ranks}  # the ranks of a cp group have the same loss
    for i, loss in enumerate(losses):
        assert sum(ours[i] for ours in by_dp.values()) == pytest.approx(loss, rel=1e-7)
    # As far as Wan's norms allow, which diffusers computes in fp32.
    assert max(gradient_errors(ranks[0][1], truth).values()) < 1e-6


@pytest.mark.parametrize(
    ("sizes", "checkpointing"),
    [
        ({"cp": 2}, False),
        ({"dp_shard": 2, "cp": 1}, False),
        ({"cp": 3, "ring": 3}, True),
        slow_case({"dp_shard": 2, "cp": 2, "ring": 2}, True),
        long_case({"dp_shard": 2, "cp": 3}, False),
        long_case({"cp": 6, "ring": 2}, True),
    ],
)
def test_loss_and_gradients_of_wan(pools, wan64, sizes, checkpointing):
    """Wan gets 45 tokens; only cp=3 divides them."""
    world = sizes.get("dp_shard", 1) * sizes["cp"]
    _compare(pools[world], wan64, sizes, (LATENTS,), checkpointing)


@slow
def test_blocks_run_again_with_their_own_forward_s_tokens(pools, wan64):
    """Two forwards of different lengths precede one backward; recomputation must use each forward's own length.

    In the second forward the last rank has no tokens.
    """
    _compare(pools[4], wan64, {"cp": 4, "ring": 2}, (LATENTS, FEW_LATENTS), checkpointing=True)


MANY = (4, 7, 26, 26)  # 1183 tokens: each of 4 ranks has 296, one of them a pad


class LargestStorage(TorchDispatchMode):
    """Mode that records the elements of the largest storage that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if type(x) is torch.Tensor:
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return out


def _largest_tensor(folder):
    """Return the elements of the largest storage of a step, on this rank and in one process."""
    role, _ = sharded_role(folder, {"cp": 4}, MANY)
    x, t, text, target = (each[:1] for each in sample(MANY))
    with LargestStorage() as ours:
        (role.velocity(video(x), t, text_condition(text)).video - target).square().mean().backward()
    with LargestStorage() as plain, torch.no_grad():
        plain_wan(folder)(hidden_states=x, timestep=1000 * t, encoder_hidden_states=text)
    return ours.largest, plain.largest


@slow
def test_no_rank_ever_makes_all_embeddings(pools, wan64):
    for ours, plain in pools[4].run(_largest_tensor, wan64):
        assert ours < 1183 * DIM <= plain, "the test sees such a tensor"


def _tables(latents):
    mesh = build_mesh(cp=4, ring=2, heads=2)
    rope = WanTransformer3DModel(**ARCHITECTURE).rope
    x = torch.zeros(1, *latents)
    for ours, theirs in zip(own_rotary_tables(rope, mesh, x)[:2], rope(x), strict=True):
        start, stop = local_token_range(theirs.shape[1], 4, mesh.cp_rank)
        assert ours.shape[1] == -(-theirs.shape[1] // 4) and ours.isfinite().all()
        assert torch.equal(ours[:, : stop - start], theirs[:, start:stop])
        assert own_rotary_tables(rope, mesh, x)[2] == theirs.shape[1]
    with pytest.raises(ValueError, match="rope_max_seq_len"):
        own_rotary_tables(rope, mesh, torch.zeros(1, 4, 40, 2, 2))
    return True


def test_rotary_tables_are_those_of_diffusers(pools):
    for latents in (LATENTS, FEW_LATENTS):
        assert all(pools[4].run(_tables, latents))


class Embedded(nn.Module):
    """Patch embedding of any number of axes, with a head per token."""

    def __init__(self, conv):
        super().__init__()
        self.embed, self.head = conv, nn.Linear(conv.out_channels, 3)

    def forward(self, x):
        return self.head(self.embed(x).flatten(2).transpose(1, 2).tanh())


CONVS = [(nn.Conv1d, (3,), (21,)), (nn.Conv2d, (2, 3), (10, 9)), (nn.Conv3d, (2, 1, 2), (4, 3, 6))]  # 7, 15, 18 tokens


def _conv_and_input(index):
    kind, kernel, size = CONVS[index]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        model = Embedded(kind(2, 5, kernel, stride=kernel)).double()
        return model, torch.randn(2, 2, *size, dtype=torch.float64)


def _embed_own(index):
    mesh = build_mesh(cp=4)
    model, x = _conv_and_input(index)
    x.requires_grad_()
    parallelize_context(model, mesh=mesh, plan={"embed": EmbedOwnTokens(name="x"), "head": GatherTokens(1, source="x")})
    out = model(x)
    out.sin().sum().backward()
    return out.detach(), x.grad, model.embed.weight.grad


def test_embedding_of_own_patches(pools):
    for index in range(len(CONVS)):
        model, x = _conv_and_input(index)
        x.requires_grad_()
        model(x).sin().sum().backward()
        ranks = pools[4].run(_embed_own, index)
        for out, *_ in ranks:
            torch.testing.assert_close(out, model(x).detach(), rtol=1e-13, atol=1e-13)
        for i, truth in ((1, x.grad), (2, model.embed.weight.grad)):
            assert relative_error(sum(rank[i] for rank in ranks), truth) < 1e-12, CONVS[index]


def _bad_embeddings():
    mesh = build_mesh(cp=2)
    plan = {"embed": EmbedOwnTokens(), "head": GatherTokens(1)}
    for settings in ({"kernel_size": 3}, {"kernel_size": 2, "padding": 1}, {"kernel_size": 2, "dilation": 2}):
        with pytest.raises(ValueError, match="embed"):
            parallelize_context(Embedded(nn.Conv2d(2, 5, stride=2, **settings)), mesh=mesh, plan=plan)
    model = Embedded(nn.Conv2d(2, 5, 2, stride=2))
    with pytest.raises(ValueError, match="head"):
        parallelize_context(model, mesh=mesh, plan={"head": EmbedOwnTokens()})
    parallelize_context(model, mesh=mesh, plan=plan)
    with pytest.raises(ValueError):
        model(torch.zeros(1, 2, 4, 5))
    return True


def test_what_cannot_be_embedded_so_is_refused(pools):
    assert all(pools[2].run(_bad_embeddings))
