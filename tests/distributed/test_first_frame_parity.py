"""Wan 2.2's TI2V on every mesh equals plain diffusers networks in one process, over five steps: from a first frame, and
from text alone."""

import pytest
import torch

from distill.methods.meanflow import MeanFlowSettings
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sharding.settings import ShardSettings
from models.condition import Condition
from models.load import build_role
from models.role_plan import plan_role
from tests.distributed.test_image_parity import METHODS
from tests.oracles.difference import compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import Setup
from tests.oracles.sharded_run import trace_on_ranks
from tests.oracles.tiny_wan import ARCHITECTURE, TEXT_SHAPE, write_checkpoints

CHANNELS = 48
LATENTS = (CHANNELS, 3, 6, 10)  # 45 tokens
TI2V = ARCHITECTURE | {"in_channels": CHANNELS, "out_channels": CHANNELS, "num_layers": 2}
CONDITIONS = {"frame": {"text": TEXT_SHAPE, "first_frame": (CHANNELS, 1, 6, 10)}, "text": {"text": TEXT_SHAPE}}
METHODS = METHODS | {"meanflow": MeanFlowSettings(guidance_scale=3.0)}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ti2v")
    write_checkpoints(folder, TI2V)
    return folder


def setup_of(method, given, dp_shard=1, cp=1):
    return Setup(
        dp_shard=dp_shard, cp=cp, steps=5, method=METHODS[method], architecture=TI2V, latent_shape=LATENTS,
        condition_shapes=CONDITIONS[given],
    )  # fmt: skip


@pytest.fixture(scope="module")
def oracle(checkpoints):
    made = {}

    def of(method, given):
        if (method, given) not in made:
            made[method, given] = oracle_trace(setup_of(method, given), checkpoints)
        return made[method, given]

    return of


@pytest.mark.parametrize(
    ("method", "given", "dp_shard", "cp"),
    [
        ("dmd2", "frame", 2, 2),
        *(pytest.param("dmd2", "frame", *sizes, marks=slow) for sizes in ((1, 1), (2, 1), (1, 2))),
        *(pytest.param("dmd2", "text", *sizes, marks=slow) for sizes in ((1, 1), (2, 1), (1, 2), (2, 2))),
        *(pytest.param("rcm", "frame", 1, cp, marks=slow) for cp in (1, 2)),
        *(pytest.param("flow_matching", "frame", 1, cp, marks=slow) for cp in (1, 2)),
        pytest.param("meanflow", "frame", 1, 2, marks=slow),  # a second time, beside times of tokens
    ],
)
def test_five_steps(pools, checkpoints, oracle, method, given, dp_shard, cp):
    setup = setup_of(method, given, dp_shard, cp)
    difference = compare(trace_on_ranks(setup, checkpoints, pools[setup.world_size]), oracle(method, given))
    assert difference.largest < 1e-5, difference


def test_a_frame_makes_a_difference(oracle):
    assert compare(oracle("dmd2", "frame"), oracle("dmd2", "text")).largest > 1e-2


def _way_to_the_frame(folder):
    """How far ``x - t v`` is from the given frame, of a role that computes in bf16, at three times."""
    plan = plan_role("student", checkpoint=str(folder / "student"), sharding=ShardSettings(precision="bf16"))
    mesh = build_mesh(cp=2, heads=4)
    role = build_role(
        plan, mesh=mesh, device=torch.device("cpu"), trainable=False, latent_shape=LATENTS,
        condition_shapes=CONDITIONS["frame"],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    x, frame = (torch.randn(3, *shape, generator=generator) for shape in (LATENTS, (CHANNELS, 1, *LATENTS[2:])))
    t = torch.tensor([1.0, 0.5, 1e-3])
    condition = Condition({"text": torch.randn(3, *TEXT_SHAPE, generator=generator), "first_frame": frame})
    v = role.velocity(x, t, condition)
    return (x - t.view(-1, 1, 1, 1, 1) * v)[:, :, :1].sub(frame).abs().amax(dim=(1, 2, 3, 4)), v.dtype


def test_the_frame_is_met_in_fp32_where_the_network_computes_in_bf16(pools, checkpoints):
    """Rounded to bf16, the state at t = 1e-3 would lead 4 units past it."""
    for error, dtype in pools[2].run(_way_to_the_frame, checkpoints):
        assert dtype == torch.float32 and error.max() < 1e-6
