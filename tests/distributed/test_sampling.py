"""Sample clips are the same on every mesh, for student and teacher, with any batch size."""

import pytest
import torch

from distill.evaluate.sampling import decode, generate, sample_captions
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from models.roles.condition import text_condition
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import make_trainer
from tests.oracles.tiny_wan import LATENT_SHAPE, TEXT_SHAPE


class _Captions:
    """Part of a data set that sampling needs: each caption has a different embedding."""

    latent_shape = LATENT_SHAPE

    def captions(self):
        return [str(i) for i in range(12)]

    def condition(self, captions, clips=None):
        generator = torch.Generator().manual_seed(1)
        table = torch.randn(12, *TEXT_SHAPE, generator=generator)
        return text_condition(torch.stack([table[int(c)] for c in captions]), torch.zeros(TEXT_SHAPE))


def _clips(setup, folder, role, steps, batch):
    trainer = make_trainer(setup, folder, make_config(setup, folder))
    return generate(
        trainer.method,
        role,
        steps=steps,
        captions=["3", "1", "4", "1", "5"],
        data=_Captions(),
        mesh=trainer.mesh,
        device=torch.device("cpu"),
        seed=5,
        batch=batch,
    )


@pytest.mark.parametrize(("role", "steps"), [("student", 2), ("teacher", 2)])
def test_the_same_clips_on_every_mesh(pools, checkpoints, role, steps):
    truth = pools[1].run(_clips, Setup(), checkpoints, role, steps, 5)[0]
    assert truth.shape == (5, *LATENT_SHAPE)
    assert (truth[1] - truth[3]).abs().max() > 0.1, "the same caption from other noise is another clip"
    for other in pools[4].run(_clips, Setup(dp_shard=2, cp=2), checkpoints, role, steps, 2):
        assert (other - truth).norm() < 1e-5 * truth.norm()


class _Codec:
    """Codec that decodes a clip to its first latents, and counts."""

    def __init__(self):
        self.decoded = 0

    def decode(self, latents):
        assert latents.dtype == torch.float32
        self.decoded += len(latents)
        return latents[:, :1].permute(0, 2, 3, 4, 1).round().to(torch.uint8)


def _decoded(count):
    codec = _Codec()
    latents = torch.arange(count * 24, dtype=torch.float64).reshape(count, 2, 3, 2, 2).remainder(256)
    return decode(codec, latents), codec.decoded, _Codec().decode(latents.float()).numpy()


def test_every_rank_decodes_its_share(pools):
    for world, count in ((1, 3), (4, 7), (4, 2), (4, 8)):
        ranks = pools[world].run(_decoded, count)
        assert (ranks[0][0] == ranks[0][2]).all() and ranks[0][0].shape == (count, 3, 2, 2, 1)
        assert [clips for clips, _, _ in ranks[1:]] == [None] * (world - 1)
        assert [done for _, done, _ in ranks] == [len(range(rank, count, world)) for rank in range(world)]


def _failing():
    class Broken:
        def decode(self, latents):
            if rank() == 2:
                raise UserError("the VAE is damaged")
            return latents

    with pytest.raises(UserError, match="the VAE is damaged"):
        decode(Broken(), torch.zeros(5, 1, 1, 1, 1))


def test_a_rank_that_cannot_decode_is_heard_on_all(pools):
    pools[4].run(_failing)


@pytest.mark.parametrize("known", [1, 12, 64])
def test_captions_are_balanced(known):
    class Data:
        def captions(self):
            return [str(i) for i in range(known)]

    assert sorted(sample_captions(Data(), 3 * known)) == sorted(3 * Data().captions())
    assert len(set(sample_captions(Data(), known))) == known
