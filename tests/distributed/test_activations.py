"""Activation memory and compilation of units: what is kept, where, how often it is computed, and the same gradients."""

import gc
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fsdp_cp import ShardSettings, build_mesh, microbatch, shard_module
from fsdp_cp.context.check_parallel import gradient_errors
from fsdp_cp.context_parallel import parallelize_context
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.sharding.activations import wrap_unit
from fsdp_cp.sharding.state import gathered_units
from tests.counted import Counted
from tests.oracles.full_tensors import full_tensors
from tests.oracles.seeded import seeded
from tests.oracles.small_transformer import PLAN, Transformer
from tests.tiers import long, long_case, slow

BLOCKS, TOKENS, DIM, HEADS, BATCH = 3, 185, 96, 4, 4
WAYS = (("none", False), ("full", False), ("full", True), ("selective", False))
"""Checkpointing, and whether inputs are offloaded."""


class Scaled(Transformer):
    """Transformer whose blocks take two arguments, by name."""

    def forward(self, x):
        x, scale = self.embed(x), x.mean((1, 2))[:, None, None] + 1
        for block in self.blocks:
            x = block(hidden_states=x, scale=scale)
        return self.head(x)


def _model_and_data():
    return seeded(
        lambda: (
            Scaled(DIM, heads=HEADS, hidden=3 * DIM, tokens=TOKENS).double(),
            *(torch.randn(BATCH, TOKENS, 5, dtype=torch.float64) for _ in range(2)),
        )
    )


def _all_gathers(call):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return sum(event.name == "c10d::_allgather_base_" for event in profiler.events())


def _kept_bytes(settings):
    """Return the bytes that a forward leaves alive: on the device, and in copies."""
    model, x, _ = _model_and_data()
    for block in model.blocks:
        block.mesh = build_mesh(dp_shard=2)
        wrap_unit(block, ShardSettings(**settings))
    with Counted() as counted:
        with LiveStorages() as live:
            out = model(x)  # noqa: F841  held: it holds what backward needs
        gc.collect()
        kept = live.bytes - sum(counted.copies)
    return kept, sum(counted.copies)


def _bytes_kept():
    return {
        (kept, offload): _kept_bytes({"activation_checkpointing": kept, "activation_offload": offload})
        for kept, offload in WAYS
    }


@long
def test_bytes_kept(pools):
    """A device keeps full < selective < none; offloading leaves almost nothing of the units on it."""
    kept, _ = pools[2].run(_bytes_kept)
    unit = BATCH * TOKENS * DIM * 8
    none, full, selective = (kept[choice, False][0] for choice in ("none", "full", "selective"))
    assert full < selective < none, kept
    # Selective keeps attention's output in addition to the input, and the log-sum-exp, a 24th of the output.
    assert BLOCKS * unit <= full <= (BLOCKS + 1.2) * unit, full / unit
    assert selective - full == pytest.approx(BLOCKS * unit * (1 + 1 / (DIM // HEADS)), rel=0.05)
    assert none >= BLOCKS * 10 * unit
    device, host = kept["full", True]
    assert device <= 1.6 * unit, device / unit  # the last output
    assert host == pytest.approx(full - device, rel=0.1)


# --- sharded, against one process ---


def _sharded_model(mesh, settings):
    model, x, target = _model_and_data()
    for block in model.blocks:
        block.mesh = mesh
    parallelize_context(model, mesh=mesh, plan=dict(PLAN))
    shard_module(model, mesh=mesh, units=model.blocks, precision="fp64", **settings)
    return model, x, target


def _train(sizes, settings, backend="aot_eager"):
    """Train two steps of two micro-batches, with an evaluation between them."""
    with Counted(backend) as counted:
        mesh = build_mesh(**sizes, heads=HEADS)
        model, x, target = _sharded_model(mesh, settings)
        names = [name for name, _ in model.named_parameters()]
        mine = torch.arange(BATCH).chunk(mesh.dp_size)[mesh.dp_rank].chunk(2)
        loss, rings, gradients = 0.0, Counter(), []

        def step():
            nonlocal loss
            loss = 0.0
            for i, at in enumerate(mine):
                with microbatch(model, is_first=i == 0, is_last=i == 1):
                    before = counted.rings
                    part = (model(x[at]) - target[at]).square().mean() * len(at) / BATCH
                    rings["forward"] += counted.rings - before
                    before = counted.rings
                    part.backward()
                    rings["backward"] += counted.rings - before
                loss += part.item()

        gathers = [_all_gathers(step)] if not settings.get("compile") else [step()]
        graphs = counted.graphs
        gradients.append(full_tensors({name: p.grad for name, p in model.named_parameters()}))
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            model(x[mine[0]])
        model.train()
        step()
        gradients.append(full_tensors({name: p.grad for name, p in model.named_parameters()}))
        assert not gathered_units(model)
    return {
        "loss": loss, "gradients": gradients, "names": names, "rings": dict(rings), "gathers": gathers[0],
        "graphs": graphs, "host": len(counted.copies),
    }  # fmt: skip


@pytest.fixture(scope="module")
def truth():
    model, x, target = _model_and_data()
    loss = (model(x) - target).square().mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def _check(ranks, truth, settings, cp):
    loss, gradients = truth
    assert sum(rank["loss"] for rank in ranks[::cp]) == pytest.approx(loss, rel=1e-12)
    for rank in ranks:
        assert rank["names"] == list(gradients), "names of parameters stay"
        passes = 2 * 2 * BLOCKS  # steps x micro-batches x blocks
        again = passes if settings["activation_checkpointing"] == "full" else 0
        assert rank["rings"] == {"forward": passes, "backward": again}, settings
        assert (rank["host"] > 0) == settings["activation_offload"]
        for found in rank["gradients"]:
            assert max(gradient_errors(found, gradients).values()) < 1e-12, settings


@slow
@pytest.mark.parametrize(("world", "sizes"), [(2, {"cp": 2}), long_case(4, {"dp_shard": 2, "cp": 2})])
def test_gradients_calls_and_gathers(pools, truth, world, sizes):
    """Attention runs once in all if its output is kept, and once more under full checkpointing."""
    gathers = set()
    for kept, offload in (("none", False), ("full", True), ("selective", False)):
        settings = {"activation_checkpointing": kept, "activation_offload": offload}
        ranks = pools[world].run(_train, sizes, settings)
        _check(ranks, truth, settings, sizes["cp"])
        gathers |= {rank["gathers"] for rank in ranks}
    # For each micro-batch: the blocks and the root for forward and for backward, and the tokens of the output.
    assert gathers == {2 * (2 * (BLOCKS + 1) + 1)}, "recomputation must not gather again"


FULL = {"activation_checkpointing": "full", "activation_offload": True, "compile": True}
SELECTIVE = {"activation_checkpointing": "selective", "activation_offload": False, "compile": True}


@slow
@pytest.mark.parametrize("settings", [FULL, long_case(SELECTIVE)], ids=str)
def test_compiled(pools, truth, settings):
    ranks = pools[2].run(_train, {"cp": 2, "ulysses": 2}, settings)
    _check(ranks, truth, settings, 2)
    assert {rank["graphs"] for rank in ranks} == {1}, "all blocks share one"


@long
def test_compiled_by_inductor(pools, truth):
    _check(pools[4].run(_train, {"dp_shard": 2, "cp": 2}, FULL, "inductor"), truth, FULL, 2)
