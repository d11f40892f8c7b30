"""An image-to-video Wan on every mesh equals plain diffusers networks in one process, over five steps."""

import pytest

from distill.methods.dmd2 import Dmd2Settings
from distill.methods.flow_matching import FlowMatchingSettings
from distill.methods.rcm import RcmSettings
from tests.oracles.difference import compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import Setup
from tests.oracles.sharded_run import trace_on_ranks
from tests.oracles.tiny_wan import ARCHITECTURE, LATENT_SHAPE, write_checkpoints

CHANNELS, *SIZES = LATENT_SHAPE
IMAGE_ARCHITECTURE = ARCHITECTURE | {"in_channels": 2 * CHANNELS + 4, "image_dim": 14, "added_kv_proj_dim": 48}
CONDITION = {
    "text": (512, 10), "image_latents": LATENT_SHAPE, "image_mask": (4, *SIZES), "image_embeds": (5, 14),
}  # fmt: skip
METHODS = {
    "dmd2": Dmd2Settings(
        fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, shift=2.0
    ),
    "rcm": RcmSettings(
        tangent_warmup=2, consistency_steps=1, student_every=2, guidance_scale=3.0, consistency_weight=0.7
    ),
    "flow_matching": FlowMatchingSettings(caption_dropout=0.5, shift=3.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    write_checkpoints(folder, IMAGE_ARCHITECTURE)
    return folder


def setup_of(method, dp_shard=1, cp=1):
    return Setup(
        dp_shard=dp_shard, cp=cp, steps=5, method=METHODS[method], architecture=IMAGE_ARCHITECTURE,
        condition_shapes=CONDITION,
    )  # fmt: skip


@pytest.fixture(
    scope="module", params=[name if name == "rcm" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def method(request):
    return request.param


@pytest.fixture(scope="module")
def oracle(checkpoints, method):
    return oracle_trace(setup_of(method), checkpoints)


@pytest.mark.parametrize(
    ("dp_shard", "cp"),
    [
        (2, 2),
        pytest.param(1, 2, marks=pytest.mark.slow),
        *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((1, 1), (2, 1))),
    ],
)
def test_five_steps(pools, checkpoints, method, oracle, dp_shard, cp):
    setup = setup_of(method, dp_shard, cp)
    trace = trace_on_ranks(setup, checkpoints, pools[setup.world_size])
    difference = compare(trace, oracle)
    assert difference.largest < 1e-5, difference
    image = [name for name in trace.gradients[0] if "add_k_proj" in name or "image_embedder" in name]
    assert image and all(trace.gradients[0][name].norm() > 0 for name in image), "the image has no part in it"
