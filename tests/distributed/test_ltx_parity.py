"""LTX-Video on every mesh equals plain diffusers networks in one process, over five steps; uneven tokens."""

import pytest
import torch

from distill.methods.dmd2 import Dmd2Settings
from distill.methods.flow_matching import FlowMatchingSettings
from distill.methods.meanflow import MeanFlow, MeanFlowSettings
from distill.methods.rcm import RcmSettings
from fsdp_cp.mesh import build_mesh
from models.condition import Condition
from models.load import build_role
from models.role_plan import plan_role
from tests.oracles.difference import compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import Setup
from tests.oracles.sharded_run import trace_on_ranks
from tests.oracles.tiny_ltx import ARCHITECTURE, CONDITION_SHAPES, LATENT_SHAPE, SPACING, write_checkpoints

slow, long = pytest.mark.slow, pytest.mark.long
METHODS = {
    "dmd2": Dmd2Settings(
        fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, shift=2.0
    ),
    "rcm": RcmSettings(
        tangent_warmup=2, consistency_steps=1, student_every=2, guidance_scale=3.0, consistency_weight=0.7
    ),
    "flow_matching": FlowMatchingSettings(caption_dropout=0.5, shift=3.0),
    "meanflow": MeanFlowSettings(guidance_scale=3.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ltx")
    write_checkpoints(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(checkpoints):
    traces = {}

    def of(method, **changes):
        key = (method, *changes)
        if key not in traces:
            traces[key] = oracle_trace(setup_of(method, **changes), checkpoints)
        return traces[key]

    return of


def setup_of(method, dp_shard=1, cp=1, **changes):
    chosen = {"condition_shapes": CONDITION_SHAPES} | changes
    return Setup(
        dp_shard=dp_shard, cp=cp, steps=5, method=METHODS[method], architecture=ARCHITECTURE, family="ltx",
        latent_shape=LATENT_SHAPE, **chosen,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "dp_shard", "cp"),
    [
        ("dmd2", 2, 2),
        *(pytest.param("dmd2", *sizes, marks=slow if sizes == (1, 2) else long) for sizes in ((1, 1), (2, 1), (1, 2))),
        ("rcm", 1, 2),
        pytest.param("rcm", 1, 1, marks=long),
        pytest.param("flow_matching", 1, 2, marks=slow),
        pytest.param("flow_matching", 1, 1, marks=long),
        pytest.param("dmd2", 1, 4, marks=long),
    ],
)
def test_five_steps(pools, checkpoints, oracle, method, dp_shard, cp):
    setup = setup_of(method, dp_shard, cp)
    difference = compare(trace_on_ranks(setup, checkpoints, pools[setup.world_size]), oracle(method))
    print(method, (dp_shard, cp), f"{difference.largest:.1e}")
    assert difference.largest < 1e-5, difference


FRAME = {"condition_shapes": CONDITION_SHAPES | {"first_frame": (LATENT_SHAPE[0], 1, *LATENT_SHAPE[2:])}}


@pytest.mark.parametrize(
    ("method", "dp_shard", "cp"),
    [
        ("dmd2", 2, 2),
        *(pytest.param("dmd2", *sizes, marks=slow) for sizes in ((1, 1), (2, 1), (1, 2), (1, 4))),
        *(pytest.param(method, 1, cp, marks=slow) for method in ("rcm", "flow_matching") for cp in (1, 2)),
        pytest.param("meanflow", 1, 2, marks=slow),  # a second time, beside times of tokens
    ],
)
def test_five_steps_from_a_first_frame(pools, checkpoints, oracle, method, dp_shard, cp):
    """With times of tokens, of which those of the given frame are 0."""
    setup = setup_of(method, dp_shard, cp, **FRAME)
    truth = oracle(method, **FRAME)
    difference = compare(trace_on_ranks(setup, checkpoints, pools[setup.world_size]), truth)
    assert difference.largest < 1e-5, difference
    if method == "dmd2":
        assert compare(truth, oracle(method)).largest > 1e-2, "a frame makes a difference"


def _velocities(folder):
    """Of a student with a second time, in fp32 and in bf16, and how many parameters have a gradient."""
    generator = torch.Generator().manual_seed(0)
    x, text = (torch.randn(1, *shape, generator=generator) for shape in (LATENT_SHAPE, CONDITION_SHAPES["text"]))
    mask = torch.tensor([[True, True, False, False, False]])
    condition = Condition({"text": text, "text_mask": mask, "latent_spacing": torch.tensor([SPACING])})
    found = []
    for precision in ("fp32", "bf16"):
        role = build_role(
            plan_role(
                "student",
                checkpoint=str(folder / "student"),
                family="ltx",
                additions=MeanFlow.additions(MeanFlowSettings())["student"],
            ),
            mesh=build_mesh(cp=2, heads=4),
            device=torch.device("cpu"),
            trainable=True,
            precision=precision,
            latent_shape=LATENT_SHAPE,
            condition_shapes=CONDITION_SHAPES,
        )
        velocity = role.velocity(x, torch.tensor([0.5]), condition, torch.tensor([0.2]))
        velocity.square().mean().backward()
        found.append((velocity.detach(), sum(p.grad is not None for p in role.network.parameters())))
    return found


@slow
def test_bf16_with_a_second_time(pools, checkpoints):
    """An addition in fp32 to the embedding of the time, which LTX's layers behind it take in bf16."""
    (exact, trained), (rounded, too) = pools[2].run(_velocities, checkpoints)[0]
    assert trained == too and 0 < (exact - rounded).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("what", ["mask", "spacing"])
def test_the_comparison_sees_what_the_condition_says(checkpoints, oracle, monkeypatch, what):
    """A text without its mask, or coordinates of another frame rate, do not pass."""
    from tests.oracles import tiny_ltx

    plain, truth = tiny_ltx.velocity, oracle("flow_matching")  # before anything is changed

    def other(network, x, t, given):
        if what == "mask":
            given = {**given, "text_mask": torch.ones_like(given["text_mask"])}
        return plain(network, x, t, given)

    monkeypatch.setattr(tiny_ltx, "velocity", other)
    if what == "spacing":
        monkeypatch.setattr(tiny_ltx, "SPACING", (8 / 25, 32.0, 32.0, 0.0))
    setup = setup_of("flow_matching")
    assert compare(oracle_trace(setup, checkpoints), truth).gradient > 1e-3
