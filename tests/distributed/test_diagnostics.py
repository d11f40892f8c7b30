"""Norms, unit reports and phases, against full tensors and counted bytes."""

import json
import math

import pytest
import torch
from torch import nn

from distill.metrics import NormsLog
from fsdp_cp import build_mesh, phase, shard_module
from fsdp_cp.measure.diagnostics import connection_advice, group_report, parameter_norms
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.sharding.settings import COMPUTE_DTYPE
from fsdp_cp.sharding.state import fsdp_modules, gathered_units
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import make_trainer

slow = pytest.mark.slow


class _Uneven(nn.Module):
    """Rows that four ranks cannot share evenly; with 3 and 2 rows some ranks have none. ``idle`` gets no gradient."""

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
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, {"offload": "cpu", "precision": "bf16"}, marks=slow),
        pytest.param({"dp_replicate": 4}, {"strategy": "no_shard"}, marks=slow),
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
    log = NormsLog(tmp_path)
    log.write(3, "student", {"a": (1.0, None), "b": (2.0, math.inf), "c": (math.nan, 0.5)})
    log.close()
    norms = {"a": [1.0, None], "b": [2.0, "inf"], "c": ["nan", 0.5]}
    assert json.loads((tmp_path / "norms.jsonl").read_text()) == {"step": 3, "role": "student", "norms": norms}


def _report(sizes, changes):
    model = _sharded(build_mesh(**sizes), **changes)
    rows = group_report(model)
    assert group_report(model) == rows
    model(torch.ones(1, 6)).sum().backward()
    assert group_report(model) == rows, "the same before and after the first forward"
    local = {name: p.to_local() for name, p in model.named_parameters()}
    mine = {
        unit: [t for name, t in local.items() if name.startswith(f"{unit}.")]
        if unit != "(root)"
        else [t for name, t in local.items() if not name.startswith(("first.", "second."))]
        for unit in ("(root)", "first", "second")
    }
    true = {unit: sum(t.numel() * t.element_size() for t in tensors) for unit, tensors in mine.items()}
    held = {unit: sum(t.untyped_storage().nbytes() for t in tensors) for unit, tensors in mine.items()}
    # What is gathered, as storages while everything is gathered.
    gathered = {}
    for module, row in zip(fsdp_modules(model), rows, strict=True):
        module.unshard()
        owned = [p for p in module.parameters(recurse=row.name != "(root)")]
        owned += list(module.head.parameters()) if row.name == "(root)" else []
        gathered[row.name] = sum(p.untyped_storage().nbytes() for p in owned)
        module.reshard()
    empty = [any(t.numel() == 0 for t in mine[unit]) for unit in ("(root)", "first", "second")]
    return rows, true, held, gathered, empty


@pytest.mark.parametrize(
    ("sizes", "changes", "dtypes"),
    [
        ({"dp_shard": 2, "cp": 2}, {"precision": "bf16", "reduce_dtype": "bf16"}, ("bfloat16", "bfloat16", "float32")),
        pytest.param(
            {"dp_replicate": 2, "dp_shard": 2}, {"strategy": "optim"}, ("float32", "float32", "float32"), marks=slow
        ),
    ],
)
def test_units_are_as_large_as_they_say(pools, sizes, changes, dtypes):
    results = pools[4].run(_report, sizes, changes)
    for rows, true, held, gathered, _ in results:
        assert [row.name for row in rows] == ["(root)", "first", "second"]
        assert [row.parameters for row in rows] == [7 * 2 + 2 + 5 + 4 * 2, 6 * 3 + 3, 3 * 7 + 7]
        for row in rows:
            assert (row.compute_dtype, row.reduce_dtype, row.master_dtype) == dtypes
            assert row.true_shard_bytes == true[row.name]
            assert row.shard_bytes == held[row.name], "what the shards' storages take, padding included"
            assert row.gathered_bytes == gathered[row.name]
    for unit, row in enumerate(results[0][0]):
        assert row.empty_ranks == sum(empty[unit] for *_, empty in results), row.name
    if "cp" in sizes:
        assert [row.empty_ranks for row in results[0][0]][:2] == [2, 1]


def _fails_inside():
    model = _sharded(build_mesh(dp_shard=2), strategy="optim")
    for broken in (False, True):  # a network that cannot be resharded must not hide the first exception
        with pytest.raises(ZeroDivisionError), phase("a", [model, nn.Linear(2, 2)] if broken else [model]):
            with torch.no_grad():
                model(torch.ones(2, 6))
            assert gathered_units(model)
            if broken:
                model.first.reshard = None
            raise ZeroDivisionError
        assert broken or not gathered_units(model), "the network is resharded all the same"
    with pytest.raises(TypeError), phase("c", [model]):  # and is reported where nothing else failed
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
        def write(self, step, role, norms):
            total = math.sqrt(sum(g * g for _, g in norms.values() if g is not None))
            written.append((step, role, len(norms), total))

    trainer.norms = Log()
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


@pytest.mark.parametrize(
    ("capability", "cp", "value", "wanted"),
    [
        (None, 4, "1", False),  # no GPU
        ((9, 0), 1, None, False),
        ((9, 0), 1, "8", False),
        ((10, 0), 8, "32", False),
        ((9, 0), 1, "1", True),
        ((10, 0), 4, "1", True),
        ((9, 0), 4, None, True),
        ((8, 0), 2, "8", True),
        ((9, 0), 4, "0", True),
        ((10, 0), 1, "33", True),
    ],
)
def test_advice_on_cuda_connections(capability, cp, value, wanted):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    advice = connection_advice("cuda" if capability else "cpu", capability, cp, {} if value is None else {name: value})
    assert (advice is not None) == wanted
    assert not wanted or (name in advice and "\n" not in advice)
