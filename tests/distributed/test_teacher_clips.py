"""A teacher's clips as an encoded set: the same on every mesh, also after a stop."""

from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel

from distill import teacher_clips
from distill.config import compose_config
from distill.data.sets.encoded_set import EncodedSet
from distill.data.sets.write_set import SetWriter
from distill.evaluate.sampling import alone
from distill.methods.common.few_step import FewStepMethod
from distill.methods.common.schedules import euler_times
from distill.methods.ode_regression import OdeRegressionSettings
from distill.run.setup import plan_run
from fsdp_cp import build_mesh
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom
from models.causal import CausalSettings
from models.roles.role_plan import plan_role
from tests.oracles.causal_wan import CausalWan
from tests.oracles.clips import RandomClips
from tests.oracles.tiny_wan import LATENT_SHAPE, tiny_role
from tests.tiers import long_case, slow

pytestmark = slow
TIMES = [1.0, 0.8, 0.5]
COUNT = 5
DEVICE = torch.device("cpu")


class Captions(RandomClips):
    """Data set of three captions."""

    def __len__(self):
        return 3

    def caption(self, index):
        return str(index)

    def embeddings(self, caption):
        return {"text": self.tensors["text"][int(caption)] if caption else self.empty["text"]}


@lru_cache  # each has process groups, with threads of their own
def _mesh(dp_shard, cp):
    return build_mesh(dp_shard=dp_shard, cp=cp, heads=4)


CAUSAL = CausalSettings(chunk=1, window=1, context_time=0.1)
NOISES = ("teacher_clips/noise", "sample/context")


def _write(checkpoints, folder, dp_shard, cp, seed=3, stop_after=None, causal=None):
    """Write the set; return how many clips this rank made, or the refusal."""
    teacher_clips.sampling_batch = lambda *_: 2
    mesh, plan = _mesh(dp_shard, cp), plan_role("teacher", checkpoint=str(checkpoints / "teacher"), causal=causal)
    teacher = tiny_role(plan, mesh, trainable=False)
    method = OdeRegressionSettings(step_list=TIMES, guidance_scale=3.0, shift=2.0)
    encoding = SimpleNamespace(
        latents="fp32",
        negative_prompt="",
        max_text_tokens=9,
        encoders="assets",
        clip_bytes=lambda latents: 4096 * latents,
    )
    sampling = object.__new__(teacher_clips._Sampling)
    sampling.config = SimpleNamespace(method=method, seed=seed)
    sampling.arguments = SimpleNamespace(steps=4, states=TIMES)
    sampling.data, sampling.count, sampling.settings = Captions(), COUNT, encoding
    made = []

    class Writer(SetWriter):
        def _save(self, kind, number, *arguments):
            if len(made) == stop_after:
                raise RuntimeError("stopped")
            super()._save(kind, number, *arguments)
            made.append((kind, number))

    writer = Writer(folder, f"OUT={folder}", {"seed": seed})
    try:
        with writer.begun() as is_whole:
            if not is_whole:
                sampling.write(writer, teacher=teacher, mesh=mesh, device=DEVICE)
    except UserError as error:
        return str(error)
    except RuntimeError:
        return "stopped"
    return [number for kind, number in made if kind == "clips"]


def _integrated(x, velocity):
    """States and the end of Euler's method with guidance; ``velocity`` is of the caption and of the negative prompt."""
    grid, states = sorted({*euler_times(4, 2.0), *TIMES}, reverse=True), []
    for t, following in zip(grid, grid[1:], strict=False):
        if t in TIMES:
            states.append(x[0])
        c, u = velocity(x.repeat(2, 1, 1, 1, 1), torch.full((2,), t)).chunk(2)
        x = x + (following - t) * (u + 3.0 * (c - u))
    return torch.stack(states), x


def _inputs(checkpoints):
    """Return the plain teacher, and each clip's draws and texts."""
    network = WanTransformer3DModel.from_pretrained(checkpoints / "teacher").requires_grad_(False)
    data, draws = Captions(), [StepRandom(seed=3, step=0, positions=[i]) for i in range(COUNT)]
    return network, [
        (draw, torch.stack([data.tensors["text"][i % 3], data.null["text"]])) for i, draw in enumerate(draws)
    ]


@pytest.fixture(scope="module")
def truth(checkpoints):
    """Return states and latents of each clip, by plain diffusers and Euler's method."""
    network, clips = _inputs(checkpoints)
    found = []
    for random, texts in clips:

        def velocity(x, t, texts=texts):
            return network(hidden_states=x, timestep=1000 * t, encoder_hidden_states=texts, return_dict=False)[0]

        states, x = _integrated(random.normal("teacher_clips/noise", LATENT_SHAPE), velocity)
        found.append((states, x[0]))
    return found


@pytest.fixture(scope="module")
def causal_truth(checkpoints):
    """Return the same of a causal teacher, with lists as caches: a chunk's states see the clip before it."""
    (network, clips), (channels, frames, *sizes) = _inputs(checkpoints), LATENT_SHAPE
    found = []
    for random, texts in clips:
        oracle, chunks = CausalWan(network, [1] * frames, window=1), []
        for n in range(frames):
            noise, more = (random.normal(f"{name}/{n}", (channels, 1, *sizes)) for name in NOISES)
            states, x = _integrated(noise, lambda x, t, oracle=oracle, texts=texts: oracle.chunk(x, t, texts))
            oracle.remember(torch.lerp(x, more, 0.1).repeat(2, 1, 1, 1, 1), texts, 0.1)
            chunks.append((states, x[0]))
        states, latents = zip(*chunks, strict=True)
        found.append((torch.cat(states, 2), torch.cat(latents, 1)))
    return found


def _check(folder, truth):
    encoded = EncodedSet(folder, "OUT")
    assert len(encoded) == COUNT and list(encoded.captions) == ["0", "1", "2"]
    for i, (states, latents) in enumerate(truth):
        ours = encoded.clip(encoded.clip_of(i))
        for name, wanted in (("states", states), ("latents", latents)):
            assert ours[name].shape == wanted.shape
            assert relative_error(ours[name], wanted) < 1e-5
        assert encoded.caption(encoded.text_of(i)) == str(i % 3)
        assert torch.equal(encoded.text(encoded.text_of(i))["text"], Captions().tensors["text"][i % 3])


@pytest.mark.parametrize(("dp_shard", "cp"), [(2, 2), *(long_case(*sizes) for sizes in ((2, 1), (1, 3)))])
def test_every_mesh_writes_the_same_and_resumes(pools, checkpoints, truth, tmp_path, dp_shard, cp):
    size, folder = dp_shard * cp, tmp_path / "set"

    def write(*options):
        return pools[size].run(_write, checkpoints, folder, dp_shard, cp, *options)

    assert write(3, 1) == ["stopped"] * size
    kept = {file.name: file.stat().st_mtime_ns for file in (folder / "unfinished").glob("clips-*")}
    assert 1 <= len(kept) < COUNT
    assert all("seed" in answer for answer in write(4)), "another seed"
    made = sorted(number for numbers in write() for number in numbers)
    assert made == sorted(set(range(COUNT)) - {int(name[6:14]) for name in kept})
    _check(folder, truth)
    assert write() == [[]] * size


@pytest.mark.parametrize("words", [{}, {"causal": "chunk=2"}, {"sparse_attention": "sparsity=0.5"}], ids=str)
def test_a_set_says_how_its_teacher_attends(words):
    settings = [f"teacher.{group}.{setting}" for group, setting in words.items()]
    config = compose_config(["experiment=quickstart", "device=cpu", "mesh.cp=1", *settings])
    arguments = SimpleNamespace(clips=2, latents="fp32", steps=4, states=[])
    plan = plan_run(config, alone(FewStepMethod, "teacher"))
    sampling = teacher_clips._Sampling(config, arguments, plan, SimpleNamespace(fingerprint=""))
    described = sampling.described()["teacher"]
    assert {"causal", "sparse"} & described.keys() == {group.partition("_")[0] for group in words}


@pytest.mark.parametrize(("dp_shard", "cp"), [(1, 3), *(long_case(*sizes) for sizes in ((1, 1), (2, 2)))])
def test_a_causal_teacher_rolls_out_chunk_by_chunk(pools, checkpoints, causal_truth, tmp_path, dp_shard, cp):
    options = checkpoints, tmp_path / "set", dp_shard, cp, 3, None, CAUSAL
    made = pools[dp_shard * cp].run(_write, *options)
    assert sorted(number for numbers in made for number in numbers) == list(range(COUNT))
    _check(tmp_path / "set", causal_truth)
