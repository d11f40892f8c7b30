"""What ``shard_module`` promises: shards between uses, dtypes, the settings on every unit, order records."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_cp import build_mesh, microbatch, shard_module
from fsdp_cp.errors import UserError
from fsdp_cp.sharding import shard
from fsdp_cp.sharding.settings import ShardSettings
from fsdp_cp.sharding.state import fsdp_modules
from models.condition import text_condition
from models.load import build_role
from models.role_plan import plan_role
from tests.oracles.tiny_wan import ARCHITECTURE, CONDITION_SHAPES, LATENT_SHAPE, TEXT_SHAPE


def _role(mesh, *, precision="fp32", trainable=True, seed=0, checkpointing=False, scale=1.0):
    plan = plan_role(
        "student",
        checkpoint=None,
        architecture=dict(ARCHITECTURE),
        sharding=ShardSettings(activation_checkpointing=checkpointing, gradient_scale=scale),
    )
    return build_role(
        plan, mesh=mesh, device=torch.device("cpu"), precision=precision, trainable=trainable,
        latent_shape=LATENT_SHAPE, condition_shapes=CONDITION_SHAPES, seed=seed,
    )  # fmt: skip


def _inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, *LATENT_SHAPE, generator=generator, dtype=dtype)
    text = torch.randn(2, *TEXT_SHAPE, generator=generator, dtype=dtype)
    return x, torch.tensor([0.3, 0.9], dtype=dtype), text_condition(text)


def _gathered(role):
    """Units whose full parameters are alive."""
    groups = [m._get_fsdp_state()._fsdp_param_group for m in fsdp_modules(role.network)]
    return [g for g in groups if g is not None and g.is_unsharded]


def _nothing_stays_gathered():
    mesh = build_mesh(dp_shard=2, cp=2, heads=4)
    role = _role(mesh)
    x, t, condition = _inputs()
    units = fsdp_modules(role.network)
    assert len(units) == ARCHITECTURE["num_layers"] + 1
    with torch.no_grad():
        before = role.velocity(x, t, condition)
    assert not _gathered(role), "a root that stays gathered would ignore the next update of its shards"
    # An update of the shards must reach the next forward, the root's own parameters included.
    with torch.no_grad():
        for parameter in role.parameters():
            parameter.to_local().mul_(1.5)
        after = role.velocity(x, t, condition)
    plain = WanTransformer3DModel(**ARCHITECTURE)
    plain.load_state_dict({name: w.full_tensor() for name, w in role.weights().items()})
    with torch.no_grad():
        expected = plain(hidden_states=x, timestep=1000 * t, encoder_hidden_states=condition.tensors["text"]).sample
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)
    assert (after - before).abs().max() > 1e-2
    role.velocity(x, t, condition).square().mean().backward()
    assert not _gathered(role)
    return True


def test_nothing_stays_gathered_between_uses(pools):
    assert all(pools[4].run(_nothing_stays_gathered))


def _walks():
    role = _role(build_mesh(dp_shard=2, cp=1))
    x, t, condition = _inputs()
    role.velocity(x, t, condition).square().mean().backward()  # FSDP2 itself walks in the first forward
    role.network.zero_grad()
    walks, named_modules = [], nn.Module.named_modules

    def counted(module, *args, **kwargs):
        if module is role.network:
            walks.append(module)
        return named_modules(module, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "named_modules", counted)
        for is_first in (True, False):
            with microbatch(role.network, is_first=is_first, is_last=not is_first):
                role.velocity(x, t, condition).square().mean().backward()
    return len(walks), fsdp_modules(role.network) == [m for m in role.network.modules() if isinstance(m, FSDPModule)]


def test_a_step_does_not_walk_over_the_modules(pools):
    """Of 40 blocks a walk takes milliseconds of the host, and a micro-batch once took ten."""
    assert pools[2].run(_walks) == [(0, True)] * 2


def _sum_on_every_unit():
    role = _role(build_mesh(dp_shard=2, cp=1))
    groups = [m._get_fsdp_state()._fsdp_param_group for m in fsdp_modules(role.network)]
    return [(g.gradient_divide_factor, g.force_sum_reduction_for_comms) for g in groups]


def test_gradients_are_summed_on_every_unit(pools):
    for settings in pools[2].run(_sum_on_every_unit):
        assert settings == [(1.0, True)] * (ARCHITECTURE["num_layers"] + 1)


def _temporaries_alone():
    """Of a backward on one rank, without a scale and with one: the largest division, and the gradients."""
    found = []
    for scale in (1.0, 4.0):
        role = _role(build_mesh(dp_shard=1, cp=1), scale=scale)
        x, t, condition = _inputs()
        loss = role.velocity(x, t, condition).square().mean()
        with _Divisions() as seen:
            loss.backward()
        found.append((seen.largest, [p.grad.to_local().clone() for p in role.parameters() if p.grad is not None]))
    return found


class _Divisions(TorchDispatchMode):
    """The most elements that a division by a number takes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor):
            self.largest = max(self.largest, args[0].numel())
        return func(*args, **(kwargs or {}))


def test_one_rank_alone_divides_no_gradients(pools):
    """By 1, into a temporary of a unit's gradients, as torch does for any factor; by another one it must."""
    ((plain, gradients), (divided, scaled)) = pools[1].run(_temporaries_alone)[0]
    assert plain < 1000 < divided
    for gradient, other in zip(gradients, scaled, strict=True):
        assert torch.equal(4 * gradient, other)


def _order_records():
    mesh = build_mesh(dp_shard=1, cp=2, heads=4)
    role = _role(mesh)
    x, t, condition = _inputs()
    order = lambda: len(role.network._get_fsdp_state()._comm_ctx.post_forward_order)  # noqa: E731
    for _ in range(3):
        with torch.no_grad():
            role.velocity(x, t, condition)
    frozen = order()
    out = role.velocity(x, t, condition)
    trained = order()
    with torch.no_grad():
        role.velocity(x, t, condition)  # between a forward and its backward
    kept = order()
    out.square().mean().backward()
    return frozen, trained, kept, order()


def test_forwards_without_backward_leave_no_record(pools):
    units = ARCHITECTURE["num_layers"] + 1
    assert pools[2].run(_order_records) == [(0, units, units, 0)] * 2


def _bf16():
    mesh = build_mesh(dp_shard=2, cp=1)
    role, full = _role(mesh, precision="bf16"), _role(mesh)
    seen = {}

    def note(name):
        def hook(module, args, kwargs, output=None):
            values = [*args, *kwargs.values()]
            seen[name] = [v for v in values if isinstance(v, torch.Tensor)]

        return hook

    embedder = role.network.condition_embedder
    embedder.register_forward_pre_hook(lambda m, a, k: note("times")(m, a, k), with_kwargs=True)
    embedder.time_embedder.register_forward_pre_hook(
        lambda m, a, k: seen.update(time_weight=m.linear_1.weight.dtype, frequencies=a[0].dtype), with_kwargs=True
    )
    role.network.blocks[0].register_forward_pre_hook(
        lambda m, a, k: seen.update(block_weight=m.ffn.net[2].weight.dtype, hidden=a[0].dtype, rope=a[3][0].dtype),
        with_kwargs=True,
    )
    x, _, condition = _inputs()
    t = torch.tensor([0.2571, 0.9993])  # 257.1 and 999.3: bf16 would make them 257 -> 256 or 258, 999.3 -> 1000
    out = role.velocity(x, t, condition)
    torch.testing.assert_close(seen["times"][0], 1000 * t, rtol=0, atol=0)
    out.square().mean().backward()
    gradients = {p.grad.dtype for p in role.parameters()}
    masters = {p.dtype for p in role.parameters()}
    with torch.no_grad():
        error = ((out - full.velocity(x, t, condition)).norm() / out.norm()).item()
    kinds = {key: seen[key] for key in ("time_weight", "frequencies", "block_weight", "hidden", "rope")}
    return kinds, out.dtype, masters, gradients, error


def test_bf16_compute_keeps_times_masters_and_gradients_in_fp32(pools):
    for kinds, out, masters, gradients, error in pools[2].run(_bf16):
        assert kinds == {
            "time_weight": torch.float32,
            "frequencies": torch.float32,
            "block_weight": torch.bfloat16,
            "hidden": torch.bfloat16,
            "rope": torch.float32,
        }
        assert out == torch.float32 and masters == {torch.float32} and gradients == {torch.float32}
        assert 0 < error < 0.02


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


def _refusals():
    mesh = build_mesh(dp_shard=2)
    model = _Tied()
    with pytest.raises(ValueError, match="'second.weight' is shared with another FSDP unit"):
        shard_module(model, mesh=mesh, units=[model.first, model.second])
    with pytest.raises(UserError, match="strategy=zero is unknown; use no_shard or optim"):
        shard_module(nn.Linear(2, 2), mesh=mesh, units=[], strategy="zero")
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard_module(plain, mesh=mesh, units=list(plain))
    with microbatch(plain, is_first=True, is_last=False):
        plain(torch.randn(3, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="gradients are left"), microbatch(plain, is_first=True, is_last=True):
        pass
    with pytest.raises(ZeroDivisionError), microbatch(plain, is_first=False, is_last=False):
        raise ZeroDivisionError
    assert plain._get_fsdp_state()._state_ctx.is_last_backward, "restored after an exception"
    return True


def test_refusals_and_restored_state(pools):
    assert all(pools[2].run(_refusals))


def _dtypes_survive_an_idle_start():
    """FSDP2 settles its dtypes at the first forward, here one without gradients, as an idle role's is."""
    role = _role(build_mesh(dp_shard=2, cp=1), precision="bf16")
    x, t, condition = _inputs()
    with torch.no_grad():
        role.velocity(x, t, condition)
    role.velocity(x, t, condition).square().mean().backward()
    fresh = _role(build_mesh(dp_shard=2, cp=1), precision="bf16")
    fresh.velocity(x, t, condition).square().mean().backward()
    groups = [m._get_fsdp_state()._fsdp_param_group for m in fsdp_modules(role.network)]
    same = all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in zip(role.parameters(), fresh.parameters()))  # noqa: B905
    return same, {g._reduce_dtype for g in groups}


def test_a_role_that_was_idle_first_trains_in_the_same_dtypes(pools):
    expected = {torch.float32, None}  # None: the time embedder's gradients are fp32 as they are
    assert pools[2].run(_dtypes_survive_an_idle_start) == [(True, expected)] * 2


def _frozen_bf16():
    mesh = build_mesh(dp_shard=2, cp=1)
    frozen, trained = _role(mesh, precision="bf16", trainable=False), _role(mesh, precision="bf16")
    with torch.no_grad():
        same = torch.equal(frozen.velocity(*_inputs()), trained.velocity(*_inputs()))
    dtypes = {name: p.dtype for name, p in frozen.network.named_parameters()}
    return (
        same,
        {d for n, d in dtypes.items() if "time_embedder" in n},
        {d for n, d in dtypes.items() if "time_embedder" not in n},
    )


def test_a_frozen_role_is_stored_as_it_computes(pools):
    assert pools[2].run(_frozen_bf16) == [(True, {torch.float32}, {torch.bfloat16})] * 2


def _frozen():
    role = _role(build_mesh(dp_shard=1, cp=2, heads=4), trainable=False)
    x, t, condition = _inputs()
    x.requires_grad_()
    role.velocity(x, t, condition).square().mean().backward()  # a gradient passes through to the input
    return x.grad.abs().sum().item() > 0, [p.grad for p in role.parameters()]


def test_a_frozen_role_holds_no_gradients(pools):
    for passed, gradients in pools[2].run(_frozen):
        assert passed and all(g is None for g in gradients)


def _saved_bytes(checkpointing):
    role = _role(build_mesh(dp_shard=2, cp=1), checkpointing=checkpointing)
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = role.velocity(*_inputs())
    names = [name for name, _ in role.network.named_parameters()]
    out.square().mean().backward()
    return sum(sizes.values()), names


def test_activation_checkpointing_saves_memory_and_keeps_names(pools):
    without, names = pools[2].run(_saved_bytes, False)[0]
    with_it, same_names = pools[2].run(_saved_bytes, True)[0]
    assert with_it < 0.5 * without
    assert names == same_names == [name for name, _ in WanTransformer3DModel(**ARCHITECTURE).named_parameters()]


def _old_torch():
    mesh = build_mesh()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.randn(2, 3)
    with pytest.MonkeyPatch.context() as patch, forward_ad.dual_level():
        patch.setattr(shard, "FORWARD_AD_SINCE", (99, 0))
        shard_module(model, mesh=mesh, units=list(model))
        assert model(x).shape == (2, 3)
        for args, kwargs in (((forward_ad.make_dual(x, x),), {}), ((), {"input": forward_ad.make_dual(x, x)})):
            with pytest.raises(RuntimeError):
                model(*args, **kwargs)
        with torch.no_grad():
            out, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x)))
            torch.testing.assert_close(tangent, out - model(torch.zeros_like(x)))
    return True


def test_forward_mode_with_gradients_is_refused_where_torch_cannot(pools):
    assert all(pools[2].run(_old_torch))
