"""Process groups of a step: none has one rank, and ring and Ulysses do not share groups with FSDP."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distill.train.trainer import Trainer
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.mesh import build_mesh, context_overrides, first_collectives, groups_of
from fsdp_cp.reduce import full_tensor, parameter_norms
from tests.oracles import sharded_run
from tests.oracles.runs import Setup
from tests.tiers import long_case, slow


def _one_cycle(setup, folder):
    """Run one step each of student and fake score, with logging. Return the calls by kind and group."""
    trainer = sharded_run.make_trainer(setup, folder)
    trainer._update = partial(Trainer._update, trainer)  # without the full gradients that the oracle is compared with
    data = trainer._steps_of_data()
    with CollectiveCounter() as sent:
        for _ in range(2):
            trainer._train_step(data)
        role = trainer.roles["student"]
        parameter_norms(role.named_parameters())
        full_tensor(next(iter(role.parameters())))
    return dict(sent.alone), sum(sent.calls.values())


@slow
@pytest.mark.parametrize("sizes", [(1, 2), (1, 1), long_case((2, 1))], ids=str)
def test_no_collective_over_a_group_of_one_rank(pools, checkpoints, sizes):
    """NCCL would create a communicator for each such group, with some hundred MiB of buffers."""
    setup = Setup(dp_shard=sizes[0], cp=sizes[1], steps=2)
    for alone, calls in pools[setup.world_size].run(_one_cycle, setup, checkpoints):
        assert alone == {}
        assert calls == 0 if setup.world_size == 1 else calls >= 10


# ---------------------------------------------------------------- the first collective of each group


def _connected(sizes):
    mesh = build_mesh(**sizes)
    views = (mesh.world, mesh.fsdp, mesh.dp, mesh.cp, mesh.ring, mesh.ulysses)
    with CollectiveCounter() as sent:
        build_mesh(**sizes)
        built = sum(sent.calls.values())
        groups = groups_of(*views)
        first_collectives(groups, torch.device("cpu"))
    wanted = {group for view in views for group in view.get_all_groups() if group.size() > 1}
    return built, dict(sent.calls), len(groups), set(groups) == wanted, dict(sent.alone)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({"cp": 1}, 1),  # fsdp, dp and the world are the default group
        ({"cp": 4}, 2),  # and ulysses
        ({"cp": 4, "ring": 2}, 3),
        ({"cp": 2}, 4),  # the world, dp, cp, and ulysses, which has the same ranks
        ({"dp_replicate": 2, "cp": 2}, 6),  # and replicas, and the shards within a replica
    ],
    ids=str,
)
def test_every_group_has_one_collective(pools, sizes, count):
    """Gloo needs no first collectives. The test runs CUDA's over gloo: one sum in each group, in one order."""
    for built, calls, groups, complete, alone in pools[4].run(_connected, sizes):
        assert built == 0 and complete and alone == {}
        assert calls == {"all_reduce": groups} and count == groups, groups


# ---------------------------------------------------------------- separate groups


def _shared_with_fsdp(sizes):
    mesh = build_mesh(**sizes)
    context, groups = mesh.context, (mesh.ring.get_group(), mesh.ulysses.get_group())
    assert (context.ring_group, context.ulysses_group) == tuple(group.group_name for group in groups)
    assert [group.size() for group in groups] == [context.ring_size, context.ulysses_size]
    assert mesh.world.get_group() is dist.group.WORLD
    return [group for group in groups if group.size() > 1 and group in mesh.fsdp.get_all_groups()]


@pytest.mark.parametrize(
    "sizes", [{"cp": 4}, {"cp": 4, "ring": 4}, {"cp": 4, "ring": 2}, {"cp": 2}, {"dp_replicate": 2, "cp": 2}], ids=str
)
def test_ring_and_ulysses_never_share_a_group_with_fsdp(pools, sizes):
    assert pools[4].run(_shared_with_fsdp, sizes) == [[]] * 4


def test_only_nccl_has_such_a_stream(monkeypatch):
    options = SimpleNamespace(Options=lambda **given: given)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    for backend in ("cpu:gloo,cuda:gloo", "cpu:gloo", "fake", "cuda:nccl", "cpu:gloo,cuda:nccl"):
        monkeypatch.setattr(dist, "get_backend_config", lambda backend=backend: backend)
        high_priority = {"ring": (backend, {"is_high_priority_stream": True})} if "nccl" in backend else {}
        assert context_overrides(ring=4, ulysses=1) == high_priority
        assert context_overrides(ring=1, ulysses=4) == {}
