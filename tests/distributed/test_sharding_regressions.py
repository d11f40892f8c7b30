"""Bugs that sharding code has had elsewhere: stale weights, roots left gathered, wrong scales, cached dtypes."""

from contextlib import nullcontext
from functools import lru_cache

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_cp import build_mesh, gather_first_block_early, materialise, microbatch, phase, set_trainable, shard_module
from fsdp_cp.sharding.settings import ShardSettings
from fsdp_cp.sharding.state import FSDPModule, gathered_units, reset_iteration, reshard, unrecorded_forward
from models.condition import text_condition
from models.load import build_role
from models.role_plan import plan_role
from tests.distributed.test_library import TOKENS, Transformer
from tests.oracles.tiny_wan import ARCHITECTURE, CONDITION_SHAPES, LATENT_SHAPE, TEXT_SHAPE

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
KEEPS = ("optim", "optim_grads")  # stay gathered after a forward


@lru_cache
def _mesh(dp_replicate=1, dp_shard=-1):
    return build_mesh(dp_replicate=dp_replicate, dp_shard=dp_shard)


def _model(dtype=torch.float64, mesh=None, **settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer().to(dtype)
    if dtype == torch.float64:
        settings["precision"] = "fp64"
    shard_module(model, mesh=mesh or _mesh(), units=model.blocks, **settings)
    return model


@lru_cache
def _batches(dtype=torch.float64):
    """Different samples on every rank."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    return [torch.randn(2, TOKENS, 5, generator=generator, dtype=dtype) for _ in range(6)]


def _step(model, optimizer, x, between=nullcontext):
    for i, part in enumerate(x.split(1)):
        with microbatch(model, is_first=i == 0, is_last=i == 1):
            model(part).square().mean().backward()
        if i == 0:
            between()
    reshard(model)
    optimizer.step()
    optimizer.zero_grad()


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def _forward(model, x):
    with phase("evaluation", [model]), torch.no_grad(), unrecorded_forward(model):
        return model(x)


def _early_gather(strategy):
    """A gather begun before the optimizer's step, and one after it; against a model that never gathers early."""
    early, plain = _model(strategy=strategy), _model(strategy=strategy)
    optimizers = [_adamw(m) for m in (early, plain)]
    same = []
    for x in _batches():
        gather_first_block_early(early, early.blocks[0])  # this step's weights: used
        assert gathered_units(early) == [early, early.blocks[0]]
        for model in (early, plain):
            model(x).square().mean().backward()
            reshard(model)
        gather_first_block_early(early, early.blocks[0])  # weights of before the update: to be dropped
        reshard(early)
        assert not gathered_units(early)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same.append(torch.equal(_forward(early, x), _forward(plain, x)))
        same += [torch.equal(a.to_local(), b.to_local()) for a, b in zip(early.parameters(), plain.parameters())]  # noqa: B905
    return all(same)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_an_early_gather_has_the_weights_of_its_step(pools, strategy):
    assert pools[4].run(_early_gather, strategy) == [True] * 4


def _gathered_before_the_update():
    """Why: what was gathered before an update would be used after it."""
    model, plain = _model(), _model()
    x = _batches()[0]
    for m in (model, plain):
        optimizer = _adamw(m)
        m(x).square().mean().backward()
        if m is model:
            gather_first_block_early(m, m.blocks[0])
        optimizer.step()
    return (_forward(model, x) - _forward(plain, x)).abs().max().item()


def test_the_comparison_sees_stale_weights(pools):
    assert min(pools[2].run(_gathered_before_the_update)) > 1e-6


def _evaluations(strategy, sizes):
    plain, watched, after = (_model(strategy=strategy, mesh=_mesh(**sizes)) for _ in range(3))
    optimizers = {m: _adamw(m) for m in (plain, watched, after)}
    batches, outputs = _batches(), []
    for x in batches[:3]:
        _step(plain, optimizers[plain], x)  # never evaluated
        _step(after, optimizers[after], x)  # evaluated after a step alone
        outputs.append(_forward(watched, batches[3]))
        _step(watched, optimizers[watched], x, between=lambda: _forward(watched, batches[4]))
        outputs.append(_forward(watched, batches[3]))
        assert torch.equal(outputs[-1], _forward(after, batches[3]))
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[-1], _forward(plain, batches[3]))
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(plain.parameters(), watched.parameters()))  # noqa: B905


@pytest.mark.parametrize(
    ("strategy", "sizes"), [*((s, {"dp_shard": 4}) for s in STRATEGIES), ("optim_grads_params", {"dp_replicate": 2})]
)
def test_train_evaluate_train_equals_train_train(pools, strategy, sizes):
    """Evaluations between steps and between micro-batches change nothing, and see the newest weights."""
    assert pools[4].run(_evaluations, strategy, sizes) == [True] * 4


def _token_sum(strategy, scale, sizes, dtype):
    """Loss = local sum / global count, with a different number of tokens on every rank."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    counts = [3 + 5 * r for r in range(world)]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, sum(counts), 5, generator=generator, dtype=torch.float64).to(dtype)
    ours = x[:, sum(counts[:rank]) : sum(counts[: rank + 1])]
    model = _model(dtype, _mesh(**sizes), strategy=strategy, gradient_scale=scale)
    truth = _model_for_tokens(dtype)
    for m, part in ((model, ours), (truth, x)):
        for block in m.blocks:  # tokens of a rank see those alone, so that the sum over ranks is the whole
            block.qkv.requires_grad_(False)
            block.forward = lambda h, b=block: h + b.mlp(h)
        (m(part).square().sum() / sum(counts)).backward()
    named = dict(truth.named_parameters())
    errors = [
        ((p.grad.full_tensor() - scale * named[n].grad).norm() / (scale * named[n].grad).norm()).item()
        for n, p in model.named_parameters()
        if named[n].grad is not None
    ]
    assert len(errors) > 10
    return max(errors)


def _model_for_tokens(dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer().to(dtype)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_token_sums_over_uneven_ranks(pools, world):
    """At one rank torch divides by the factor twice."""
    for strategy in STRATEGIES:
        for scale, dtype, bound in (
            (1.0, torch.float32, 2e-6),
            (0.5, torch.float32, 2e-6),
            (0.25, torch.float64, 1e-13),
        ):
            errors = pools[world].run(_token_sum, strategy, scale, {}, dtype)
            assert max(errors) < bound, (strategy, scale, errors)
    if world == 4:
        assert max(pools[4].run(_token_sum, "optim_grads_params", 0.5, {"dp_replicate": 2}, torch.float32)) < 2e-6


def _role(strategy, trainable=True, **changes):
    plan = plan_role(
        "student",
        checkpoint=None,
        architecture=dict(ARCHITECTURE),
        sharding=ShardSettings(strategy=strategy, **changes),
    )
    return build_role(
        plan, mesh=_mesh(), device=torch.device("cpu"), trainable=trainable, latent_shape=LATENT_SHAPE,
        condition_shapes=CONDITION_SHAPES,
    )  # fmt: skip


def _inputs():
    generator = torch.Generator().manual_seed(1)
    x, text = (torch.randn(1, *shape, generator=generator) for shape in (LATENT_SHAPE, TEXT_SHAPE))
    return x, torch.tensor([0.3]), text_condition(text)


def _roots(strategy):
    """Forwards without gradients leave some strategies gathered, the root too; uses of the shards must not miss it."""
    role = _role(strategy)
    with torch.no_grad():
        with phase("rollout", [role.network]):
            role.velocity(*_inputs())
            inside = len(gathered_units(role.network))
        outside = len(gathered_units(role.network))
        role.velocity(*_inputs())
        parameters = role.parameters()  # as an optimizer that is built now
        role.velocity(*_inputs())
        names = {name for name, w in role.weights().items() if isinstance(w, DTensor)}
    assert all(isinstance(p, DTensor) for p in parameters)
    assert names == {name for name, _ in role.network.named_parameters()}
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    before = {name: w.clone() for name, w in role.weights().items()}
    with torch.no_grad():
        first = role.velocity(*_inputs())
    with microbatch(role.network, is_first=True, is_last=True):
        role.velocity(*_inputs()).square().mean().backward()
    optimizer.step()
    changed = [n for n, w in role.weights().items() if not torch.equal(w.full_tensor(), before[n].full_tensor())]
    with torch.no_grad():
        moved = (role.velocity(*_inputs()) - first).abs().max().item()
    return inside, outside, {"proj_out.weight", "patch_embedding.weight"} <= set(changed), moved


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_root_is_left_gathered(pools, strategy):
    for inside, outside, updated, moved in pools[2].run(_roots, strategy):
        assert inside == (ARCHITECTURE["num_layers"] + 1 if strategy in KEEPS else 0)
        assert outside == 0 and updated and moved > 1e-4


def _unfrozen(strategy):
    """Frozen at its first forward, trained later."""
    role, fresh = _role(strategy, precision="bf16"), _role(strategy, precision="bf16")
    set_trainable(role.network, False)
    with torch.no_grad():
        role.velocity(*_inputs())
    set_trainable(role.network, True)
    for r in (role, fresh):
        for i in range(2):
            with microbatch(r.network, is_first=i == 0, is_last=i == 1):
                r.velocity(*_inputs()).square().mean().backward()
    pairs = list(zip(role.parameters(), fresh.parameters(), strict=True))
    assert all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)
    reduced = {g._reduce_dtype for m in role.network.modules() if isinstance(m, FSDPModule)
               for g in m._get_fsdp_state()._fsdp_param_groups}  # fmt: skip
    set_trainable(role.network, False)
    assert not any(p.requires_grad for p in role.parameters())
    return {a.grad.dtype for a, _ in pairs}, reduced


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_network_unfrozen_late_reduces_in_fp32(pools, strategy):
    # None: the time embedder's gradients are fp32 as they are
    assert pools[2].run(_unfrozen, strategy) == [({torch.float32}, {torch.float32, None})] * 2


def _broken_evaluation(strategy):
    """A forward without gradients that breaks off, then training."""
    model, plain = _model(strategy=strategy), _model(strategy=strategy)
    optimizers = {m: _adamw(m) for m in (model, plain)}
    x = _batches()[0]
    for m in (model, plain):
        _step(m, optimizers[m], x)

    def refuse(*_):
        raise ZeroDivisionError

    handle = model.blocks[1].mlp.register_forward_hook(refuse)
    with pytest.raises(ZeroDivisionError):
        _forward(model, x)
    handle.remove()
    assert not gathered_units(model)
    for m in (model, plain):
        _step(m, optimizers[m], x)
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), plain.parameters()))  # noqa: B905


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_training_after_an_evaluation_that_broke_off(pools, strategy):
    assert pools[2].run(_broken_evaluation, strategy) == [True] * 2


def _without_the_public_reset():
    """torch 2.11 and 2.12 have no ``reset_iter_state``."""
    public = FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        assert not hasattr(_model(), "reset_iter_state")
        return _broken_evaluation("optim")
    finally:
        FSDPModule.reset_iter_state = public


def test_the_reset_of_older_torch(pools):
    assert pools[2].run(_without_the_public_reset) == [True] * 2


def _attributes():
    with torch.device("meta"):
        model = Transformer()
    for name, parameter in model.named_parameters():
        parameter.no_decay, parameter.factor = name.endswith("bias"), len(name)
    shard_module(model, mesh=_mesh(), units=model.blocks)
    sharded = {name: (p.no_decay, p.factor) for name, p in model.named_parameters()}
    materialise(model, "cpu")
    return sharded, {name: vars(p) for name, p in model.named_parameters()}


def test_attributes_of_parameters_survive(pools):
    for sharded, filled in pools[2].run(_attributes):
        assert sharded == {name: (name.endswith("bias"), len(name)) for name in sharded} and len(sharded) > 20
        for name, attributes in filled.items():
            assert (attributes["no_decay"], attributes["factor"]) == sharded[name]


def test_an_early_gather_is_refused_in_a_graph_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph; call it outside"):
        gather_first_block_early(nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_reset_before_the_first_forward_does_nothing(pools):
    assert pools[2].run(_early_reset) == [True] * 2


def _early_reset():
    model = _model()
    gather_first_block_early(model, model.blocks[0])
    reset_iteration(model)
    reshard(model)
    return not gathered_units(model) and _forward(model, _batches()[0]).isfinite().all().item()


class _Either(nn.Module):
    """Two layers in one unit, of which a forward may leave the second out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.both = nn.Linear(6, 6), nn.Linear(6, 6), True

    def forward(self, x):
        return self.first(x) + (self.second(x) if self.both else 0)


def _unfinished(strategy):
    """The last micro-batch of a step has no backward."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    shard_module(model, mesh=build_mesh(), units=list(model), strategy=strategy)
    for _ in range(2):  # the step that is broken off leaves nothing behind
        with microbatch(model, is_first=True, is_last=False):
            model(torch.randn(3, 6)).sum().backward()
        with (
            pytest.raises(RuntimeError, match="the last micro-batch had no backward"),
            microbatch(model, is_first=False, is_last=True),
        ):
            pass
    assert all(p.grad is None for p in model.parameters())
    return True


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_ends_without_a_backward_is_refused(pools, ranks, strategy):
    assert all(pools[ranks].run(_unfinished, strategy))


def _partial(reduce_unused):
    model = nn.Sequential(_Either(), nn.Linear(6, 6))
    shard_module(model, mesh=build_mesh(dp_replicate=2), units=list(model), reduce_unused=reduce_unused)
    model[0].both = False
    with microbatch(model, is_first=True, is_last=False):
        model(torch.randn(3, 6)).sum().backward()
    return True


def test_replicas_are_not_summed_over_different_parameters(pools):
    """FSDP2 adds micro-batches up by position, before it knows which parameters they are of."""
    assert all(pools[4].run(_partial, True))
    with pytest.raises(RuntimeError, match=r"a parameter of 0 got no gradient .* needs reduce_unused=true"):
        pools[4].run(_partial, False)
