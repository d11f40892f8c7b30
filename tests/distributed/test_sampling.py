"""Sample clips are the same on every mesh, for student and teacher, with any batch size."""

import json
import re
import shutil
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from distill.data.base import to_bytes
from distill.evaluate.sampling import ClipSampler, decode, sample_captions
from distill.methods.common.schedules import euler_times
from distill.methods.dcm import DcmSettings
from distill.methods.flow_matching import FlowMatchingSettings
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.errors import NotFinite, UserError
from fsdp_cp.launch import rank
from fsdp_cp.rng import StepRandom
from models.causal import CausalSettings
from tests.oracles.causal_wan import CausalWan
from tests.oracles.runs import Setup
from tests.oracles.samples import video
from tests.oracles.sharded_run import make_trainer
from tests.oracles.tiny_wan import LATENT_SHAPE, TEXT_SHAPE, text_condition
from tests.tiers import long, long_case, parametrize, slow


class _Captions:
    """Part of a data set that sampling needs: each caption has a different embedding."""

    latent_shapes = {"video": LATENT_SHAPE}

    def captions(self):
        return [str(i) for i in range(12)]

    def condition(self, captions, clips=None):
        generator = torch.Generator().manual_seed(1)
        table = torch.randn(12, *TEXT_SHAPE, generator=generator)
        return text_condition(torch.stack([table[int(c)] for c in captions]), torch.zeros(TEXT_SHAPE))


CAPTIONS = ["3", "1", "4", "1", "5"]


class _FirstFrames(_Captions):
    """The same with a first frame for each caption."""

    def condition(self, captions, clips=None):
        condition = super().condition(captions)
        frames = torch.stack([torch.full((LATENT_SHAPE[0], 1, *LATENT_SHAPE[2:]), 0.1 * int(c)) for c in captions])
        return replace(condition, tensors={**condition.tensors, "first_frame": frames})


def _clips(setup, folder, role, steps, batch, latent_shape=None):
    trainer = make_trainer(setup, folder)
    data = _FirstFrames() if "first_frame" in setup.condition_shapes else _Captions()
    sampler = ClipSampler(method=trainer.method, data=data, mesh=trainer.mesh, device=torch.device("cpu"))
    return sampler.generate(
        role,
        CAPTIONS,
        steps=steps,
        seed=5,
        batch=batch,
        latent_shapes=None if latent_shape is None else {"video": latent_shape},
    ).video


@slow
@pytest.mark.parametrize(("role", "steps"), [("student", 2), long_case("teacher", 2)])
def test_the_same_clips_on_every_mesh(pools, checkpoints, role, steps):
    truth = pools[1].run(_clips, Setup(), checkpoints, role, steps, 5)[0]
    assert truth.shape == (5, *LATENT_SHAPE)
    assert (truth[1] - truth[3]).abs().max() > 0.1, "the same caption from other noise is another clip"
    for other in pools[4].run(_clips, Setup(dp_shard=2, cp=2), checkpoints, role, steps, 2):
        assert relative_error(other, truth) < 1e-5


CAUSAL = CausalSettings(chunk=1, window=1, sink=1, context_time=0.1)
FLOW_MATCHING = FlowMatchingSettings(guidance_scale=2.0, shift=3.0)


def _texts(position):
    condition = _Captions().condition([CAPTIONS[position]])
    return torch.cat([condition.tensors["text"], condition.null.tensors["text"]])


def _noise(position, chunks, purpose="sample/noise"):
    random = StepRandom(seed=5, step=0, positions=[position])
    channels, _, *sizes = LATENT_SHAPE
    return [random.normal(f"{purpose}/{n}", (channels, count, *sizes)) for n, count in enumerate(chunks)]


def _guided(oracle, x, texts, position, number):
    """Two Euler steps of a chunk with guidance as a batch of two."""
    for t, after in pairwise(euler_times(2, 3.0)):
        v, null = oracle.chunk(x.repeat(2, 1, 1, 1, 1), torch.full((2,), t), texts).chunk(2)
        x = x + (after - t) * (null + 2.0 * (v - null))
    return x


def _few_steps(oracle, x, texts, position, number):
    """Re-noised steps of a chunk at 1 and .8, the first two of three, without guidance."""
    x = x - oracle.chunk(x.repeat(2, 1, 1, 1, 1), torch.ones(2), texts)[:1]
    noise = StepRandom(seed=5, step=0, positions=[position]).normal(f"sample/renoise/{number}_1", x.shape[1:])
    x = torch.lerp(x, noise, 0.8)
    return x - 0.8 * oracle.chunk(x.repeat(2, 1, 1, 1, 1), torch.full((2,), 0.8), texts)[:1]


@torch.no_grad()
def _plain_clip(folder, position, causal, frames, first=None, role="student", sample=_guided):
    """Sample a clip chunk by chunk with diffusers' network and lists as caches.

    ``first`` is a given first frame ``(1, C, 1, H, W)``.
    """
    chunks, time, texts = causal.chunks(frames), causal.context_time, _texts(position)
    network = WanTransformer3DModel.from_pretrained(folder / role)
    trained = len(causal.chunks(LATENT_SHAPE[1]))
    oracle, made = CausalWan(network, chunks, causal.window, causal.sink, trained_chunks=trained), []
    noises = zip(_noise(position, chunks), _noise(position, chunks, "sample/context"), strict=True)
    for number, (x, e) in enumerate(noises):
        if first is not None and not made:
            oracle.remember(first.repeat(2, 1, 1, 1, 1), texts, 0.0)
            made.append(first)
            continue
        x = sample(oracle, x, texts, position, number)
        made.append(x)
        oracle.remember(((1 - time) * x + time * e).repeat(2, 1, 1, 1, 1), texts, time)
    return torch.cat(made, dim=2)


@slow
def test_a_causal_student_makes_the_same_clips_on_every_mesh(pools, checkpoints):
    """A longer clip begins with the same frames. Its window drops chunks, and its sink moves beyond the third frame."""
    setup = Setup(method=FLOW_MATCHING, causal=CAUSAL)
    longer = (LATENT_SHAPE[0], 6, *LATENT_SHAPE[2:])
    truth = torch.cat([_plain_clip(checkpoints, position, CAUSAL, 6) for position in range(5)])
    (short,) = pools[1].run(_clips, setup, checkpoints, "student", 2, 5)
    assert short.shape == (5, *LATENT_SHAPE)
    assert relative_error(truth[:, :, :3], short) < 1e-5
    spread = Setup(dp_shard=2, cp=2, method=FLOW_MATCHING, causal=CAUSAL)
    for clips in pools[4].run(_clips, spread, checkpoints, "student", 2, 2, longer):
        assert relative_error(clips, truth) < 1e-5
    given = _FirstFrames().condition(CAPTIONS).tensors["first_frame"]
    truth = torch.cat([_plain_clip(checkpoints, i, CAUSAL, 3, given[i : i + 1]) for i in range(5)])
    spread = replace(spread, condition_shapes=spread.condition_shapes | {"first_frame": given.shape[1:]})
    for clips in pools[4].run(_clips, spread, checkpoints, "student", 2, 2):
        assert torch.equal(clips[:, :, :1], given) and relative_error(clips, truth) < 1e-5


@long
def test_causal_roles_of_a_few_step_method_make_the_same_clips(pools, checkpoints):
    method = DcmSettings(step_list=[1.0, 0.8, 0.5], guidance_scale=2.0, shift=3.0)
    setup = Setup(dp_shard=2, cp=2, method=method, causal=CAUSAL)
    for role, sample in (("student", _few_steps), ("teacher", _guided)):
        truth = torch.cat([_plain_clip(checkpoints, i, CAUSAL, 3, role=role, sample=sample) for i in range(5)])
        for clips in pools[4].run(_clips, setup, checkpoints, role, 2, 2):
            assert relative_error(clips, truth) < 1e-5, role


@parametrize("limits", [{}, {"window": 1}, {"window": 1, "sink": 1}], ids=str, quick=1)
def test_the_program_of_the_page_streams_the_same_clip(checkpoints, tmp_path, limits):
    page = Path(__file__).parents[2] / "docs" / "causal.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(program, names := {})
    causal = CausalSettings(chunk=2, first_chunk=1, **limits)
    folder = shutil.copytree(checkpoints / "student", tmp_path / "student")
    (folder / "causal.json").write_text(json.dumps(asdict(causal) | {"frames": LATENT_SHAPE[1]}))
    streamer = names["Streamer"](folder, _texts(1), steps=2, shift=3.0, guidance=2.0)
    streamed = torch.cat([*streamer.chunks(_noise(1, causal.chunks(9)))], dim=2)
    truth = _plain_clip(checkpoints, 1, causal, 9)
    assert relative_error(streamed, truth) < 1e-5
    other = _plain_clip(checkpoints, 1, replace(causal, window=2), 9)
    assert (streamed - other).norm() > 1e-3 * truth.norm(), "the comparison can tell masks apart"


class _Codec:
    """Codec that decodes a clip to its first latents, and counts."""

    def __init__(self):
        self.decoded = 0

    def decode(self, latents):
        assert latents.dtype == torch.float32
        self.decoded += len(latents)
        return latents.video[:, :1].permute(0, 2, 3, 4, 1).round().to(torch.uint8)


def _decoded(count):
    codec = _Codec()
    latents = video(torch.arange(count * 24, dtype=torch.float64).reshape(count, 2, 3, 2, 2).remainder(256))
    clips = decode(codec, latents)
    frames = None if clips is None else clips.frames
    return frames, codec.decoded, _Codec().decode(latents.to(torch.float32)).numpy()


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
            return latents.video

    class Overflowing:
        def decode(self, latents):
            return to_bytes(latents.video / (rank() != 2))

    with pytest.raises(UserError, match="the VAE is damaged"):
        decode(Broken(), video(torch.zeros(5, 1, 1, 1, 1)))
    with pytest.raises(NotFinite):  # a run goes on after it
        decode(Overflowing(), video(torch.zeros(5, 1, 1, 1, 1)))


def test_a_rank_that_cannot_decode_is_heard_on_all(pools):
    pools[4].run(_failing)


@pytest.mark.parametrize("known", [1, 12, 64])
def test_captions_are_balanced(known):
    class Data:
        def captions(self):
            return [str(i) for i in range(known)]

    assert sorted(sample_captions(Data(), 3 * known)) == sorted(3 * Data().captions())
    assert len(set(sample_captions(Data(), known))) == known
