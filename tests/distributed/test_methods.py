"""Every method on every mesh equals plain diffusers networks in one process, over five steps.

DMD2 as published is in test_parity.py, with a GAN in test_gan_head.py, ode_regression in test_trajectories.py.
"""

import pytest

from distill.methods.dcm import DcmSettings
from distill.methods.dmd2 import Dmd2Settings
from distill.methods.flow_matching import FlowMatchingSettings
from distill.methods.meanflow import MeanFlowSettings
from distill.methods.rcm import RcmSettings
from distill.methods.scm import ScmSettings
from tests.oracles.difference import compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import Setup
from tests.oracles.sharded_run import trace_on_ranks

FEW = [1.0, 0.8, 0.5]
METHODS = {
    "flow_matching": FlowMatchingSettings(caption_dropout=0.5, shift=3.0),
    "scm": ScmSettings(tangent_warmup=3, guidance_scale=3.0),
    "rcm": RcmSettings(
        tangent_warmup=2, consistency_steps=1, student_every=2, guidance_scale=3.0, consistency_weight=0.7
    ),
    "rcm, last step": RcmSettings(
        consistency_steps=0, student_every=2, guidance_scale=3.0, consistency_weight=0.7, fake_knows_last_step=True
    ),
    "dmd2, last step": Dmd2Settings(
        fake_updates_per_student_update=2, guidance_scale=3.0, step_list=FEW, fake_knows_last_step=True,
        student_sampler="ode",
    ),
    "dmd2, last step, GAN": Dmd2Settings(
        fake_updates_per_student_update=1, guidance_scale=3.0, step_list=FEW, fake_knows_last_step=True,
        gan_weight_student=0.3, gan_r1_weight=0.2,
    ),
    "meanflow": MeanFlowSettings(tangent_warmup=2, interval_ratio=0.8, guidance_scale=3.0, step_list=FEW),
    "dcm": DcmSettings(grid_steps=6, guidance_scale=3.0, step_list=FEW),
}  # fmt: skip
FAST = ("flow_matching", "rcm", "dmd2, last step, GAN", "meanflow", "dcm")
slow, long = pytest.mark.slow, pytest.mark.long
# DMD2 goes over all meshes in test_parity.py; here the others are those on which samples and tokens are split at once.
MESHES = (*(pytest.param(*sizes, marks=long) for sizes in ((1, 1), (2, 1))), pytest.param(1, 2, marks=slow), (2, 2))


@pytest.fixture(scope="module", params=[name if name in FAST else pytest.param(name, marks=slow) for name in METHODS])
def method(request):
    return request.param


@pytest.fixture(scope="module")
def oracle(checkpoints, method):
    return oracle_trace(Setup(steps=5, method=METHODS[method]), checkpoints)


@pytest.mark.parametrize(("dp_shard", "cp"), MESHES)
def test_five_steps(pools, checkpoints, method, oracle, dp_shard, cp):
    setup = Setup(dp_shard=dp_shard, cp=cp, steps=5, method=METHODS[method])
    trace = trace_on_ranks(setup, checkpoints, pools[setup.world_size])
    difference = compare(trace, oracle)
    assert difference.largest < 1e-5, difference
    assert all(norm > 1e-3 for norm in trace.norms), "nothing to compare"
