"""Norms and phases, against full tensors."""

import json
import math

import pytest
import torch
from torch import nn

from distill.config.schema import LogSettings
from distill.train.metrics import MetricsLog
from fsdp_cp import build_mesh, resharded, shard_module
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.reduce import parameter_norms
from fsdp_cp.sharding.settings import COMPUTE_DTYPE
from fsdp_cp.sharding.state import gathered_units
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import make_trainer
from tests.tiers import long_case, slow, slow_case


class _Uneven(nn.Module):
    """Network whose rows four ranks cannot share evenly.

    With 3 and 2 rows some ranks have no rows. ``idle`` gets no gradient.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(3, 7)
        self.head = nn.Linear(7, 2)
        self.idle = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(4, 2), requires_grad=False)
        self.dtype = torch.float32

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x.to(self.dtype))))))


def _sharded(mesh, **changes):
    torch.manual_seed(0)
    model = _Uneven()
    model.dtype = COMPUTE_DTYPE[changes.get("precision", "fp32")]
    shard_module(model, mesh=mesh, units=[model.first, model.second], **changes)
    return model


def _norms(sizes, changes):
    model = _sharded(build_mesh(**sizes, sharded=changes.get("strategy") != "no_shard"), **changes)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    model(x).square().sum().backward()
    with CollectiveCounter() as counter:
        norms = parameter_norms(dict(model.named_parameters()))
    truth = {}
    for name, p in model.named_parameters():
        gradient = None if p.grad is None else p.grad.full_tensor().double().norm().item()
        truth[name] = (p.full_tensor().double().norm().item(), gradient)
    return norms, truth, {kind: count for kind, count in counter.calls.items() if count}


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ({"dp_shard": 2, "cp": 2}, {"strategy": "optim"}),
        slow_case({"dp_replicate": 2, "dp_shard": 2}, {"offload": "cpu", "precision": "bf16"}),
        long_case({"dp_replicate": 4}, {"strategy": "no_shard"}),
    ],
)
def test_norms_are_those_of_the_full_tensors_by_one_collective(pools, sizes, changes):
    results = pools[4].run(_norms, sizes, changes)
    for norms, truth, calls in results:
        assert norms == results[0][0], "the same on every rank"
        assert calls == ({} if changes.get("strategy") == "no_shard" else {"all_reduce": 1}), "each rank has it all"
        assert norms.keys() == truth.keys() and len(norms) == 8
        for name, (weight, gradient) in truth.items():
            assert norms[name][0] == pytest.approx(weight, rel=1e-12), name
            assert norms[name][1] == (None if gradient is None else pytest.approx(gradient, rel=1e-12)), name
        missing = {name for name, (_, gradient) in norms.items() if gradient is None}
        assert missing == {"idle", "frozen"}


def test_norms_that_are_not_numbers_show_as_such(tmp_path):
    log = MetricsLog(tmp_path, LogSettings(), {})
    log.write_norms(3, "student", {"a": (1.0, None), "b": (2.0, math.inf), "c": (math.nan, 0.5)})
    log.close()
    norms = {"a": [1.0, None], "b": [2.0, "inf"], "c": ["nan", 0.5]}
    assert json.loads((tmp_path / "norms.jsonl").read_text()) == {"step": 3, "role": "student", "norms": norms}


def _fails_inside():
    model = _sharded(build_mesh(dp_shard=2), strategy="optim")
    for broken in (False, True):  # a network that cannot be resharded must not hide the first exception
        with pytest.raises(ZeroDivisionError), resharded([model, nn.Linear(2, 2)] if broken else [model]):
            with torch.no_grad():
                model(torch.ones(2, 6))
            assert gathered_units(model)
            if broken:
                model.first.reshard = None
            raise ZeroDivisionError
        assert broken or not gathered_units(model), "the network is resharded all the same"
    with pytest.raises(TypeError), resharded([model]):  # the broken reshard is reported if nothing else failed
        pass
    return True


def test_an_exception_inside_a_phase_stays_what_it_is(pools):
    assert all(pools[2].run(_fails_inside))


def _run_with_norms(folder, every):
    setup = Setup(dp_shard=4, steps=7)
    config = make_config(setup, folder)
    config.log.norms_every = every
    trainer = make_trainer(setup, folder, config)
    written = []

    class Log:
        def write_norms(self, step, role, norms):
            total = math.sqrt(sum(g * g for _, g in norms.values() if g is not None))
            written.append((step, role, len(norms), total))

    trainer.log = Log()
    trace = trainer.record()
    return written, trace.roles, trace.norms


@slow
def test_each_role_has_a_line_per_interval_with_its_gradients_before_clipping(pools, checkpoints):
    every = 2  # the period of the roles: counted by steps, one of them would never have a line
    for written, roles, total in pools[4].run(_run_with_norms, checkpoints, every):
        expected = []
        for first in range(every, 8, every):
            interval = range(first, min(first + every, 8))
            for role in ("student", "fake"):
                expected += [(step, role) for step in interval if roles[step - 1] == role][:1]
        assert [(step, role) for step, role, _, _ in written] == sorted(expected)
        for step, _, _, norm in written:
            assert norm == pytest.approx(total[step - 1], rel=1e-9)
