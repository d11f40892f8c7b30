"""HunyuanVideo 1.5 on every mesh equals plain diffusers networks in one process, over five steps; uneven tokens."""

import pytest
import torch

from distill.methods.dmd2 import Dmd2Settings
from distill.methods.flow_matching import FlowMatchingSettings
from distill.methods.meanflow import MeanFlowSettings
from distill.methods.rcm import RcmSettings
from models.lora.settings import LoraSettings
from tests.oracles.difference import compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import Setup
from tests.oracles.sharded_run import trace_on_ranks
from tests.oracles.tiny_hunyuan import ARCHITECTURE, CONDITION_SHAPES, IMAGE_SHAPES, LATENT_SHAPE, write_checkpoints

slow, long = pytest.mark.slow, pytest.mark.long
METHODS = {
    "dmd2": Dmd2Settings(
        fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, shift=2.0
    ),
    "dmd2, GAN": Dmd2Settings(
        fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, gan_weight_student=0.3
    ),
    "rcm": RcmSettings(
        tangent_warmup=2, consistency_steps=1, student_every=2, guidance_scale=3.0, consistency_weight=0.7
    ),
    "flow_matching": FlowMatchingSettings(caption_dropout=0.5, shift=3.0),
    "meanflow": MeanFlowSettings(guidance_scale=3.0),
}  # fmt: skip
IMAGE = {"condition_shapes": CONDITION_SHAPES | IMAGE_SHAPES}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hunyuan")
    write_checkpoints(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(checkpoints):
    traces = {}

    def of(setup):
        key = (repr(setup.method), repr(setup.condition_shapes), repr(setup.lora))
        if key not in traces:
            traces[key] = oracle_trace(setup, checkpoints)
        return traces[key]

    return of


def setup_of(method, dp_shard=1, cp=1, **changes):
    chosen = {"condition_shapes": CONDITION_SHAPES} | changes
    return Setup(
        dp_shard=dp_shard, cp=cp, steps=5, method=METHODS[method], architecture=ARCHITECTURE, family="hunyuan15",
        latent_shape=LATENT_SHAPE, **chosen,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "dp_shard", "cp"),
    [
        ("dmd2", 1, 2),
        *(pytest.param("dmd2", *sizes, marks=slow) for sizes in ((1, 1), (2, 1), (2, 2))),
        pytest.param("dmd2", 1, 4, marks=long),
        pytest.param("dmd2, GAN", 1, 2, marks=long),
        *(pytest.param("rcm", 1, cp, marks=slow) for cp in (1, 2)),
        *(pytest.param("flow_matching", 1, cp, marks=slow) for cp in (1, 2)),
        pytest.param("meanflow", 1, 2, marks=long),
    ],
)
def test_five_steps(pools, checkpoints, oracle, method, dp_shard, cp):
    setup = setup_of(method, dp_shard, cp)
    difference = compare(trace_on_ranks(setup, checkpoints, pools[setup.world_size]), oracle(setup))
    assert difference.largest < 1e-5, difference


@pytest.mark.parametrize(
    ("method", "dp_shard", "cp"),
    [
        ("dmd2", 1, 2),
        *(pytest.param("dmd2", *sizes, marks=slow) for sizes in ((1, 1), (2, 1), (2, 2))),
        pytest.param("dmd2", 1, 4, marks=long),
        *(pytest.param(method, 1, cp, marks=slow) for method in ("rcm", "flow_matching") for cp in (1, 2)),
    ],
)
def test_five_steps_from_an_image(pools, checkpoints, oracle, method, dp_shard, cp):
    setup = setup_of(method, dp_shard, cp, **IMAGE)
    truth = oracle(setup)
    difference = compare(trace_on_ranks(setup, checkpoints, pools[setup.world_size]), truth)
    assert difference.largest < 1e-5, difference
    if method == "dmd2":
        assert compare(truth, oracle(setup_of(method))).largest > 1e-2, "an image makes a difference"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"dp_replicate": 2, "cp": 2}, marks=slow),
        pytest.param({"dp_shard": 2, "activation_checkpointing": True}, marks=slow),
        pytest.param({"cp": 2, "changes": {"all": {"compile": True}}}, marks=long),
    ],
    ids=["replicas", "checkpointing", "compiled"],
)
def test_however_it_is_sharded(pools, checkpoints, oracle, changes):
    """With replicas, which refuse parameters that get no gradient; with blocks that run again, or as graphs."""
    setup = setup_of("dmd2", **changes)
    difference = compare(trace_on_ranks(setup, checkpoints, pools[setup.world_size]), oracle(setup))
    assert difference.largest < 1e-5, difference


@slow
@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((2, 2), marks=long)], ids=str)
def test_adapters(pools, checkpoints, oracle, sizes):
    """On every linear layer of the blocks but those behind the last one's texts."""
    adapters = {role: LoraSettings(rank=3, alpha=6) for role in ("student", "fake")}
    setup = setup_of("dmd2", *sizes, lora=adapters)
    trace = trace_on_ranks(setup, checkpoints, pools[setup.world_size])
    difference = compare(trace, oracle(setup))
    assert difference.largest < 1e-5, difference
    assert not any(".2.ff_context." in name for name in trace.gradients[0]) and trace.gradients[0]


@pytest.mark.parametrize("name", ["text_mask", "glyph_mask", "image_embeds"])
def test_the_comparison_sees_what_the_condition_says(checkpoints, oracle, monkeypatch, name):
    """A text without its mask, or another image, does not pass."""
    from tests.oracles import plain_run, tiny_hunyuan

    setup = setup_of("flow_matching", **IMAGE)
    truth = oracle(setup)

    def other(network, x, t, given):
        changed = -given[name] if name == "image_embeds" else torch.ones_like(given[name])
        return tiny_hunyuan.outputs(network, x, t, {**given, name: changed})

    monkeypatch.setitem(plain_run._CALLED_AS, "hunyuan15", other)
    assert compare(oracle_trace(setup, checkpoints), truth).gradient > 1e-3
