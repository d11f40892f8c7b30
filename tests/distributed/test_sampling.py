"""Sample clips are the same on every mesh, for student and teacher, whatever the batch."""

import pytest
import torch

from distill.sampling import generate, sample_captions
from fsdp_cp.local_ranks import run_ranks
from models.condition import text_condition
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import make_trainer
from tests.oracles.tiny_wan import LATENT_SHAPE, TEXT_SHAPE


class _Captions:
    """The part of a data set that sampling needs: each caption embeds to numbers of its own."""

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


@pytest.mark.parametrize(("role", "steps"), [("student", 2), ("teacher", 3)])
def test_the_same_clips_on_every_mesh(checkpoints, role, steps):
    truth = run_ranks(1, _clips, Setup(), checkpoints, role, steps, 5)[0]
    assert truth.shape == (5, *LATENT_SHAPE)
    assert (truth[1] - truth[3]).abs().max() > 0.1, "the same caption from other noise is another clip"
    for rank in run_ranks(4, _clips, Setup(dp_shard=2, cp=2), checkpoints, role, steps, 2):
        assert (rank - truth).norm() < 1e-5 * truth.norm()


@pytest.mark.parametrize("known", [1, 2, 12, 64])
def test_captions_are_balanced(known):
    class Data:
        def captions(self):
            return [str(i) for i in range(known)]

    assert sorted(sample_captions(Data(), 3 * known)) == sorted(3 * Data().captions())
    assert len(set(sample_captions(Data(), known))) == known
