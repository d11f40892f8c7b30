"""Roles of two experts on every mesh equal plain diffusers networks in one process."""

import pytest

from distill.methods.dmd2 import Dmd2Settings
from distill.methods.flow_matching import FlowMatchingSettings
from distill.methods.rcm import RcmSettings
from distill.methods.scm import ScmSettings
from tests.oracles.difference import compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import MESHES, Setup
from tests.oracles.sharded_run import trace_on_ranks
from tests.oracles.tiny_wan import write_checkpoints

BOUNDARIES = {"teacher": 0.75, "student": 0.7, "fake": 0.6}
"""Three, so that scores are compared within their common refinement."""
METHODS = {
    "dmd2": Dmd2Settings(
        fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, guidance_scale_2=2.0
    ),
    "dmd2, GAN": Dmd2Settings(
        fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, gan_weight_student=0.3,
        student_sampler="ode",
    ),
    "rcm": RcmSettings(
        tangent_warmup=2, consistency_steps=1, student_every=2, guidance_scale=3.0, consistency_weight=0.7
    ),
    "scm": ScmSettings(tangent_warmup=3, guidance_scale=3.0, guidance_scale_2=1.0),
    "flow_matching": FlowMatchingSettings(caption_dropout=0.5, shift=3.0),
}  # fmt: skip
slow, long = pytest.mark.slow, pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    write_checkpoints(folder, boundaries=BOUNDARIES)
    return folder


def _trained(trace):
    """Which experts had gradients, step by step."""
    return [(role, *sorted({name[0] for name in of})) for role, of in zip(trace.roles, trace.gradients, strict=True)]


def _compare(pools, folder, setup):
    trace, oracle = trace_on_ranks(setup, folder, pools[setup.world_size]), oracle_trace(setup, folder)
    difference = compare(trace, oracle)
    assert difference.largest < 1e-5, difference
    return trace


@pytest.mark.parametrize(
    ("dp_shard", "cp"), [sizes if sizes == (2, 2) else pytest.param(*sizes, marks=slow) for sizes in MESHES]
)
def test_dmd2(pools, folder, dp_shard, cp):
    setup = Setup(dp_shard=dp_shard, cp=cp, steps=8, method=METHODS["dmd2"], boundaries=BOUNDARIES)
    trained = _trained(_compare(pools, folder, setup))
    assert {*trained} == {("student", "0"), ("student", "1"), ("fake", "0"), ("fake", "1")}, "each by itself"


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("rcm", {"cp": 2}),
        pytest.param("rcm", {"dp_replicate": 2, "cp": 2}, marks=slow),
        pytest.param("rcm", {}, marks=slow),
        pytest.param("scm", {"dp_shard": 2, "cp": 2}, marks=slow),
        ("dmd2, GAN", {"dp_shard": 2}),
        pytest.param("dmd2", {"dp_replicate": 2, "dp_shard": 2}, marks=slow),
        pytest.param("flow_matching", {}, marks=slow),
        ("flow_matching", {"cp": 2}),
    ],
    ids=str,
)
def test_other_methods(pools, folder, method, sizes):
    trace = _compare(pools, folder, Setup(**sizes, steps=7, method=METHODS[method], boundaries=BOUNDARIES))
    if method == "rcm":
        both = [step for step in _trained(trace) if len(step) == 3]
        assert both, "its two losses went to different experts, and were clipped together"


@pytest.mark.parametrize("roles", [("teacher",), ("teacher", "student"), ("fake",)], ids="-".join)
def test_some_roles_alone(pools, tmp_path, roles):
    """A student of one network from a teacher of two, and the other way about."""
    boundaries = {name: BOUNDARIES[name] for name in roles}
    write_checkpoints(tmp_path, boundaries=boundaries)
    _compare(pools, tmp_path, Setup(cp=2, steps=4, method=METHODS["dmd2, GAN"], boundaries=boundaries))


@pytest.mark.parametrize("micro_batch_size", [2, pytest.param(1, marks=slow)])
def test_accumulation(pools, folder, micro_batch_size):
    setup = Setup(
        cp=2, dp_replicate=2, micro_batch_size=micro_batch_size, steps=4, method=METHODS["rcm"], boundaries=BOUNDARIES
    )
    _compare(pools, folder, setup)
