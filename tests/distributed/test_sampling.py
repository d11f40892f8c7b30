"""Sample clips are the same on every mesh, for student and teacher, whatever the batch."""

import pytest
import torch

from benchmarks.parity import LATENT_SHAPE, TEXT_SHAPE, Setup, make_config, make_trainer, write_checkpoints
from distill.sampling import generate, sample_captions
from fsdp_cp.local_ranks import run_ranks


class _Captions:
    """The part of a data set that sampling needs: each caption embeds to numbers of its own."""

    latent_shape, null_text = LATENT_SHAPE, torch.zeros(TEXT_SHAPE)

    def captions(self):
        return [str(i) for i in range(12)]

    def embed(self, captions):
        generator = torch.Generator().manual_seed(1)
        table = torch.randn(12, *TEXT_SHAPE, generator=generator)
        return torch.stack([table[int(c)] for c in captions])


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling")
    write_checkpoints(folder)
    return folder


@pytest.mark.parametrize(("role", "steps"), [("student", 2), ("teacher", 3)])
def test_the_same_clips_on_every_mesh(folder, role, steps):
    truth = run_ranks(1, _clips, Setup(), folder, role, steps, 5)[0]
    assert truth.shape == (5, *LATENT_SHAPE)
    assert (truth[1] - truth[3]).abs().max() > 0.1, "the same caption from other noise is another clip"
    for rank in run_ranks(4, _clips, Setup(dp_shard=2, cp=2), folder, role, steps, 2):
        assert (rank - truth).norm() < 1e-5 * truth.norm()


@pytest.mark.parametrize("known", [1, 2, 12, 64])
def test_captions_are_balanced(known):
    class Data:
        def captions(self):
            return [str(i) for i in range(known)]

    assert sorted(sample_captions(Data(), 3 * known)) == sorted(3 * Data().captions())
    assert len(set(sample_captions(Data(), known))) == known
