"""Guarantees of ``shard_module`` on a Wan: shards between uses, dtypes, sums on every unit, order records."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_cp import build_mesh, microbatch, resharded, shard_module
from fsdp_cp.errors import UserError
from fsdp_cp.sharding.settings import ShardSettings
from fsdp_cp.sharding.state import fsdp_modules, gathered_units
from models.roles.role_plan import plan_role
from tests.oracles.samples import video
from tests.oracles.tiny_wan import ARCHITECTURE, LATENT_SHAPE, TEXT_SHAPE, text_condition, tiny_role
from tests.tiers import slow_case

UNITS = ARCHITECTURE["num_layers"] + 1


def _role(mesh, *, precision="fp32", trainable=True, strategy="optim_grads_params"):
    sharding = ShardSettings(strategy=strategy)
    plan = plan_role("student", checkpoint=None, architecture=dict(ARCHITECTURE), sharding=sharding)
    return tiny_role(plan, mesh, precision=precision, trainable=trainable, seed=0)


def _inputs():
    generator = torch.Generator().manual_seed(1)
    x, text = (torch.randn(2, *shape, generator=generator) for shape in (LATENT_SHAPE, TEXT_SHAPE))
    return x, torch.tensor([0.3, 0.9]), text_condition(text)


def _updates_are_seen(strategy):
    """Check that each use of the shards sees an update, also after forwards that leave the network gathered."""
    role = _role(build_mesh(dp_shard=2, cp=2, heads=4), strategy=strategy)
    network, (x, t, condition) = role.network, _inputs()
    names = {name for name, _ in network.named_parameters()}
    assert len(fsdp_modules(network)) == UNITS
    with torch.no_grad():
        with resharded([network]):
            role.velocity(video(x), t, condition)
            assert len(gathered_units(network)) == (UNITS if strategy == "optim" else 0)
        assert not gathered_units(network)
        before = role.velocity(video(x), t, condition).video
        parameters = role.parameters()  # as an optimizer that is built now
        role.velocity(video(x), t, condition)
        assert all(isinstance(p, DTensor) for p in parameters)
        assert {name for name, w in role.weights().items() if isinstance(w, DTensor)} == names
        for parameter in parameters:
            parameter.to_local().mul_(1.5)
        after = role.velocity(video(x), t, condition).video
    plain = WanTransformer3DModel(**ARCHITECTURE)
    plain.load_state_dict({name: w.full_tensor() for name, w in role.weights().items()})
    with torch.no_grad():
        expected = plain(hidden_states=x, timestep=1000 * t, encoder_hidden_states=condition.tensors["text"]).sample
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)
    assert (after - before).abs().max() > 1e-2
    with microbatch(network, is_first=True, is_last=True):
        role.velocity(video(x), t, condition).video.square().mean().backward()
    assert not gathered_units(network)
    return True


@pytest.mark.parametrize("strategy", [slow_case("optim"), "optim_grads_params"])
def test_updates_of_shards_are_seen_and_nothing_stays_gathered(pools, strategy):
    assert all(pools[4].run(_updates_are_seen, strategy))


def _order_records():
    mesh = build_mesh(dp_shard=1, cp=2, heads=4)
    role = _role(mesh)
    x, t, condition = _inputs()
    order = lambda: len(role.network._get_fsdp_state()._comm_ctx.post_forward_order)  # noqa: E731
    for _ in range(3):
        with torch.no_grad():
            role.velocity(video(x), t, condition)
    frozen = order()
    out = role.velocity(video(x), t, condition).video
    trained = order()
    with torch.no_grad():
        role.velocity(video(x), t, condition)  # between a forward and its backward
    kept = order()
    out.square().mean().backward()
    return frozen, trained, kept, order()


def test_forwards_without_backward_leave_no_record(pools):
    assert pools[2].run(_order_records) == [(0, UNITS, UNITS, 0)] * 2


def _bf16():
    mesh = build_mesh(dp_shard=2, cp=1)
    role, full = _role(mesh, precision="bf16"), _role(mesh)
    seen, embedder = {}, role.network.condition_embedder
    for module, note in (
        (embedder, lambda m, a, k: seen.update(times=a[0])),
        (embedder.time_embedder, lambda m, a, k: seen.update(weight=m.linear_1.weight.dtype, frequencies=a[0].dtype)),
        (
            role.network.blocks[0],
            lambda m, a, k: seen.update(block_weight=m.ffn.net[2].weight.dtype, hidden=a[0].dtype, rope=a[3][0].dtype),
        ),
    ):
        module.register_forward_pre_hook(note, with_kwargs=True)
    x, _, condition = _inputs()
    t = torch.tensor([0.2571, 0.9993])  # 257.1 and 999.3: bf16 would make them 257 -> 256 or 258, 999.3 -> 1000
    out = role.velocity(video(x), t, condition).video
    assert torch.equal(seen.pop("times"), 1000 * t)
    out.square().mean().backward()
    assert {p.dtype for p in role.parameters()} == {p.grad.dtype for p in role.parameters()} == {torch.float32}
    with torch.no_grad():
        error = ((out - full.velocity(video(x), t, condition).video).norm() / out.norm()).item()
    return seen, out.dtype, error


def test_bf16_compute_keeps_times_masters_and_gradients_in_fp32(pools):
    in_bf16 = {"block_weight", "hidden"}
    for kinds, out, error in pools[2].run(_bf16):
        assert len(kinds) == 5 and out == torch.float32 and 0 < error < 0.02
        assert kinds == {name: torch.bfloat16 if name in in_bf16 else torch.float32 for name in kinds}


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


def _refusals():
    mesh = build_mesh(dp_shard=2)
    model = _Tied()
    with pytest.raises(ValueError, match=r"second\.weight"):
        shard_module(model, mesh=mesh, units=[model.first, model.second])
    with pytest.raises(UserError, match="strategy"):
        shard_module(nn.Linear(2, 2), mesh=mesh, units=[], strategy="zero")
    return True


def test_refusals(pools):
    assert all(pools[2].run(_refusals))


def _dtypes_survive_an_idle_start():
    """Check that a first forward without gradients, when FSDP2 settles its dtypes, changes no dtype in training."""
    role = _role(build_mesh(dp_shard=2, cp=1), precision="bf16")
    x, t, condition = _inputs()
    with torch.no_grad():
        role.velocity(video(x), t, condition)
    role.velocity(video(x), t, condition).video.square().mean().backward()
    fresh = _role(build_mesh(dp_shard=2, cp=1), precision="bf16")
    fresh.velocity(video(x), t, condition).video.square().mean().backward()
    groups = [m._get_fsdp_state()._fsdp_param_group for m in fsdp_modules(role.network)]
    same = all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in zip(role.parameters(), fresh.parameters()))  # noqa: B905
    return same, {g._reduce_dtype for g in groups}


def test_a_role_that_was_idle_first_trains_in_the_same_dtypes(pools):
    expected = {torch.float32, None}  # None: the time embedder's gradients are fp32 as they are
    assert pools[2].run(_dtypes_survive_an_idle_start) == [(True, expected)] * 2


def _frozen():
    mesh = build_mesh(dp_shard=1, cp=2, heads=4)
    frozen, trained = _role(mesh, precision="bf16", trainable=False), _role(mesh, precision="bf16")
    x, t, condition = _inputs()
    with torch.no_grad():
        same = torch.equal(
            frozen.velocity(video(x), t, condition).video, trained.velocity(video(x), t, condition).video
        )
    dtypes = {n: p.dtype for n, p in frozen.network.named_parameters()}
    x.requires_grad_()
    frozen.velocity(video(x), t, condition).video.square().mean().backward()
    assert x.grad.abs().sum() > 0, "a gradient must pass through to the input"
    assert all(p.grad is None for p in frozen.parameters())
    inside, outside = ({d for n, d in dtypes.items() if ("time_embedder" in n) == where} for where in (True, False))
    return same, inside, outside


def test_a_frozen_role_is_stored_as_it_computes_and_holds_no_gradients(pools):
    assert pools[2].run(_frozen) == [(True, {torch.float32}, {torch.bfloat16})] * 2
