"""Settings of causal roles: chunks, refusals, and ``causal.json`` next to exported weights."""

from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel

from distill.planning.roles import Watch
from distill.run.setup import RunPlan
from fsdp_cp.measure.fake_world import fake_world
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.mesh import mesh_of_shape, resolve_mesh
from models.causal import CausalSettings, read_causal
from models.export_folder import write_folder
from models.families.operations import count_flops
from models.families.wan import Wan
from models.lora.merge import Weights
from models.roles.role_plan import plan_role
from tests.oracles import tiny_hunyuan, tiny_ltx
from tests.oracles.samples import video
from tests.oracles.tiny_wan import ARCHITECTURE, CONDITION_SHAPES, IMAGE, text_condition
from tests.unit.refused import refused

CAUSAL = CausalSettings(chunk=2, first_chunk=1, window=3, sink=1, context_time=0.1)


def plan(name="student", architecture=ARCHITECTURE, causal=CAUSAL, **changes):
    return plan_role(name, checkpoint=None, architecture=dict(architecture), causal=causal, **changes)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder of a causal network, trained on clips of 7 latent frames."""
    network, folder = WanTransformer3DModel(**ARCHITECTURE), tmp_path_factory.mktemp("exported") / "student"
    weights = {name: p.detach() for name, p in network.named_parameters()}
    shapes = {name: tuple(p.shape) for name, p in weights.items()}
    texts = {"causal.json": asdict(CAUSAL) | {"frames": 7}}
    write_folder(folder, [Weights(shapes, weights.__getitem__)], dict(network.config), dtype=torch.float32, texts=texts)
    return folder


@pytest.mark.parametrize(
    ("settings", "frames", "chunks"),
    [
        ({"chunk": 3}, 21, (3,) * 7),
        ({"chunk": 3}, 3, (3,)),
        ({"chunk": 4, "first_chunk": 1}, 9, (1, 4, 4)),
        ({"chunk": 1}, 3, (1, 1, 1)),
        ({"chunk": 8, "first_chunk": 2}, 2, (2,)),
    ],
)
def test_whole_chunks(settings, frames, chunks):
    assert CausalSettings(**settings).chunks(frames) == chunks


@pytest.mark.parametrize(
    ("settings", "frames", "words"),
    [
        ({"chunk": 3}, 20, ("18", "21")),
        ({"chunk": 4, "first_chunk": 1}, 8, ("5", "9")),
        ({"chunk": 8, "first_chunk": 1}, 3, ("1", "9")),
        ({"chunk": 8}, 3, ("8", "3")),
        ({"chunk": 1, "first_chunk": 5}, 4, ("first_chunk", "4")),
    ],
)
def test_frames_that_are_not_whole_chunks_are_refused(settings, frames, words):
    """The message names the nearest numbers."""
    role = plan(causal=CausalSettings(**settings))
    for word in words:
        with refused(word):
            role.tokens({"video": (4, frames, 8, 8)}, CONDITION_SHAPES)
    with refused("student.causal."):
        role.tokens({"video": (4, frames, 8, 8)}, CONDITION_SHAPES)


@pytest.mark.parametrize(
    "values", [{"chunk": 0}, {"first_chunk": 0}, {"window": 0}, {"sink": -1}, {"context_time": 1.0}], ids=str
)
def test_values_out_of_range_are_refused(values):
    with refused(next(iter(values))):
        CausalSettings(**{"chunk": 1} | values)


def test_what_cannot_be_causal_is_refused_by_name():
    for family, architecture in (
        ("wan", IMAGE), ("ltx", tiny_ltx.ARCHITECTURE), ("hunyuan15", tiny_hunyuan.ARCHITECTURE),
    ):  # fmt: skip
        with refused("student.causal.chunk"):
            plan(family=family, architecture=architecture)
    with refused("student.causal.chunk"):
        plan(architecture=ARCHITECTURE | {"patch_size": (2, 2, 2)})
    with refused("student.causal.chunk"):
        plan(boundary=0.9)
    with refused("student.causal.chunk"):
        plan(causal=CausalSettings(window=2))
    assert plan(causal=CausalSettings()).causal is None


def test_a_given_frame_is_a_chunk():
    shapes = CONDITION_SHAPES | {"first_frame": (4, 1, 8, 8)}
    assert plan().tokens({"video": (4, 7, 8, 8)}, shapes) == 7 * 16
    with refused("student.causal.first_chunk"):
        plan(causal=CausalSettings(chunk=2)).tokens({"video": (4, 8, 8, 8)}, shapes)


def test_an_export_says_that_it_is_causal(exported):
    """A role that loads it takes its settings, ``fake`` too, so that methods can refuse it."""
    assert read_causal(exported, "x") == (CAUSAL, 7)
    role = plan_role("student", checkpoint=str(exported))
    assert (role.causal, role.trained_frames) == (CAUSAL, 7)
    assert plan_role("teacher", checkpoint=str(exported), causal=CausalSettings(chunk=2)).causal == CAUSAL
    assert plan_role("fake", checkpoint=str(exported)).causal == CAUSAL
    WanTransformer3DModel.from_pretrained(exported)


@pytest.mark.parametrize("other", [{"chunk": 3}, {"window": 2}, {"sink": 2}, {"context_time": 0.2}], ids=str)
def test_settings_that_contradict_the_checkpoint_are_refused(exported, other):
    with refused(f"student.causal.{next(iter(other))}"):
        plan_role("student", checkpoint=str(exported), causal=CausalSettings(**{"chunk": 2} | other))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"chunk": 2}', '{"chunk": 0, "frames": 7}', '{"chunk": 2, "frames": 7}',
             '{"chunk": 2, "frames": "7"}', '{"chunk": 2, "frames": 8, "more": 1}', "[" * 10_000],
)  # fmt: skip
def test_a_damaged_file_is_refused(exported, tmp_path, text):
    (tmp_path / "causal.json").write_text(text)
    with refused("causal.json"):
        read_causal(tmp_path, "student.checkpoint=x")


def frames(count):
    """Return the shape of a clip with 16 tokens a latent frame."""
    return {"video": (4, count, 8, 8)}


def seen_pairs(count, pairs, **options):
    """Return the operations of so many latent frames, of which queries and keys have ``pairs`` in each layer."""
    flops = count_flops(Wan(), Wan().defaults() | ARCHITECTURE, frames(count), CONDITION_SHAPES, **options)
    return flops.forward - 4 * ARCHITECTURE["num_layers"] * 48 * ((16 * count) ** 2 - pairs)


def test_operations_of_a_time_for_each_frame():
    """A clean history attends in rectangles alone."""
    mask = CausalSettings(chunk=1).mask(3, 16, clean=True)
    assert mask.pairs == 2 * 16 * 16 * (1 + 2 + 3)
    by_token = seen_pairs(6, mask.pairs, frame_times=True)
    assert by_token - seen_pairs(6, mask.pairs) == 2 * 95 * 48 * (16 + 7 * 48)


@pytest.mark.long
@pytest.mark.parametrize("cp", [1, 4])
def test_a_plan_counts_the_cache(cp):
    """Keys and values of the visible chunks, divided by cp, none of the text; operations by the mask."""
    shapes = (frames(7), CONDITION_SHAPES)
    role_plan = plan(causal=CausalSettings(chunk=2, first_chunk=1, window=2))
    run = SimpleNamespace(method=SimpleNamespace(trained_roles=("student",)), roles=[role_plan], shapes=shapes)
    run.build_roles = partial(RunPlan.build_roles, run)
    with fake_world(cp) as fakes:
        mesh = mesh_of_shape(resolve_mesh(world_size=cp, cp=cp, heads=4))
        storages = LiveStorages(fakes=True)
        role = Watch(storages).build_roles(run, mesh, fakes)["student"]
        with fakes, storages:
            x, condition = torch.zeros(2, 4, 7, 8, 8), text_condition(torch.zeros(2, *CONDITION_SHAPES["text"]))
            cache = role.cache(condition, training=True)
            for chunk in x.split([1, 2, 2, 2], 2):
                role.chunk_velocity(video(chunk), torch.zeros(2), cache).video.sum().backward()
                cache = cache.with_chunk(video(chunk))
            held = storages.by["student", "cache"]
            of_chunks = role.flops
            del cache
            assert not storages.by["student", "cache"]
            with torch.no_grad():
                stream = role.cache(condition)
                role.chunk_velocity(video(x[:, :, :1]), torch.zeros(2), stream)
                streamed = storages.by["student", "cache"]
            role.flops = 0
            role.velocity(video(x), torch.zeros(2), condition, clean=video(x))
    of_layer = 2 * 2 * 48 * 4  # keys and values of 2 samples, width 48, fp32
    assert held == ARCHITECTURE["num_layers"] * of_layer * (4 * 16 // cp)
    assert streamed == ARCHITECTURE["num_layers"] * of_layer * (3 * 32 // cp)
    tokens = [16, 32, 32, 32]
    pairs = [n * sum(tokens[max(0, i - 2) : i + 1]) for i, n in enumerate(tokens)]
    each = [seen_pairs(n // 16, p) for n, p in zip(tokens, pairs, strict=True)]
    assert of_chunks == 2 * (3 + 1) * sum(each)
    seen = 2 * sum(pairs)  # clean to clean, and noisy to clean and itself
    assert role.flops == 2 * 3 * seen_pairs(14, seen, frame_times=True)
