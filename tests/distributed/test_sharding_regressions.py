"""Bugs that sharding code has had elsewhere: stale weights, roots left gathered, wrong scales, cached dtypes."""

from contextlib import nullcontext
from functools import lru_cache

import pytest
import torch
from torch import nn

from fsdp_cp import build_mesh, gather_first_block_early, microbatch, resharded, shard_module
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.sharding.state import FSDPModule, gathered_units, reset_iteration, reshard, unrecorded_forward
from tests.oracles.seeded import seeded
from tests.oracles.small_transformer import TOKENS, Transformer
from tests.tiers import slow, slow_case


@lru_cache
def _mesh(dp_replicate=1, dp_shard=-1):
    return build_mesh(dp_replicate=dp_replicate, dp_shard=dp_shard)


def _model(dtype=torch.float64, mesh=None, **settings):
    model = seeded(Transformer).to(dtype)
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
    with resharded([model]), torch.no_grad(), unrecorded_forward(model):
        return model(x)


def _early_gather(strategy):
    """Train with early gathers before and after each optimizer step, and without; compare."""
    early, plain = _model(strategy=strategy), _model(strategy=strategy)
    reset_iteration(early)  # before the first forward it does nothing
    optimizers = [_adamw(m) for m in (early, plain)]
    same = []
    for x in _batches()[:3]:
        gather_first_block_early(early, early.blocks[0])  # this step's weights: used
        assert gathered_units(early) == [early, early.blocks[0]]
        for model in (early, plain):
            model(x).square().mean().backward()
            reshard(model)
        gather_first_block_early(early, early.blocks[0])  # weights from before the update must be dropped
        reshard(early)
        assert not gathered_units(early)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same.append(torch.equal(_forward(early, x), _forward(plain, x)))
        same += [torch.equal(a.to_local(), b.to_local()) for a, b in zip(early.parameters(), plain.parameters())]  # noqa: B905
    stale = _model(strategy=strategy)
    optimizer = _adamw(stale)
    stale(x).square().mean().backward()
    gather_first_block_early(stale, stale.blocks[0])
    optimizer.step()  # without the reshard above, the next forward computes with weights from before the update
    late = _model(strategy=strategy)
    optimizer = _adamw(late)
    late(x).square().mean().backward()
    reshard(late)
    optimizer.step()
    return all(same), (_forward(stale, x) - _forward(late, x)).abs().max().item()


@pytest.mark.parametrize("strategy", ["optim_grads_params", slow_case("optim")])
def test_an_early_gather_has_the_weights_of_its_step(pools, strategy):
    for same, stale in pools[2].run(_early_gather, strategy):
        assert same and stale > 1e-6, "else the comparison would not see stale weights"


def _evaluations(strategy, sizes):
    plain, watched, after = (_model(strategy=strategy, mesh=_mesh(**sizes)) for _ in range(3))
    optimizers = {m: _adamw(m) for m in (plain, watched, after)}
    batches, outputs = _batches(), []
    for x in batches[:2]:
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
    ("strategy", "sizes"),
    [
        ("optim", {"dp_shard": 2}),
        slow_case("optim_grads_params", {"dp_replicate": 2, "dp_shard": 2}),
        slow_case("no_shard", {"dp_shard": 2}),
    ],
)
def test_train_evaluate_train_equals_train_train(pools, strategy, sizes):
    """Evaluations between steps and micro-batches change nothing, and use the newest weights."""
    world = sizes["dp_shard"] * sizes.get("dp_replicate", 1)
    assert pools[world].run(_evaluations, strategy, sizes) == [True] * world


def _token_sum(strategy, sizes):
    """Return the gradient error for loss = local sum / global count, with different token counts per rank (fp64).

    The network has no attention, so that the sum over ranks is the whole loss.
    """
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    counts = [3 + 5 * r for r in range(world)]
    x = torch.randn(1, sum(counts), 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours = x[:, sum(counts[:rank]) : sum(counts[: rank + 1])]
    model = _model(mesh=_mesh(**sizes), strategy=strategy)
    truth = seeded(Transformer).double()
    for m, part in ((model, ours), (truth, x)):
        for block in m.blocks:
            block.qkv.requires_grad_(False)
            block.forward = lambda h, b=block: h + b.mlp(h)
        (m(part).square().sum() / sum(counts)).backward()
    named = dict(truth.named_parameters())
    errors = [
        relative_error(p.grad.full_tensor(), named[n].grad)
        for n, p in model.named_parameters()
        if named[n].grad is not None
    ]
    assert len(errors) > 10
    return max(errors)


def _token_sums(cases):
    return [_token_sum(*case) for case in cases]


@pytest.mark.parametrize("world", [1, 2, slow_case(4)])
def test_token_sums_over_uneven_ranks(pools, world):
    cases = [("no_shard", {}), ("optim_grads_params", {})]
    cases += [("optim_grads_params", {"dp_replicate": 2})] * (world == 4)
    for errors in pools[world].run(_token_sums, cases):
        assert max(errors) < 1e-13, list(zip(cases, errors, strict=True))


def _broken_evaluation(strategy):
    """Train after a forward without gradients that raised."""
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


def _without_the_public_reset():
    """Run :func:`_broken_evaluation` as under torch 2.11 and 2.12, which lack ``reset_iter_state``."""
    public = FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        assert not hasattr(_model(), "reset_iter_state")
        return _broken_evaluation("optim")
    finally:
        FSDPModule.reset_iter_state = public


@slow
def test_training_after_an_evaluation_that_broke_off(pools):
    assert pools[2].run(_broken_evaluation, "optim_grads_params") == [True] * 2
    assert pools[2].run(_without_the_public_reset) == [True] * 2


def _unfinished(strategy):
    """End a step with a micro-batch that runs no backward."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    shard_module(model, mesh=build_mesh(), units=list(model), strategy=strategy)
    for _ in range(2):  # an unfinished step leaves no state
        with microbatch(model, is_first=True, is_last=False):
            model(torch.randn(3, 6)).sum().backward()
        with pytest.raises(RuntimeError, match="is_last=True"), microbatch(model, is_first=False, is_last=True):
            pass
    assert all(p.grad is None for p in model.parameters())
    return True


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "optim_grads_params"), (2, "optim"), (2, "optim_grads_params")])
def test_a_step_that_ends_without_a_backward_is_refused(pools, ranks, strategy):
    assert all(pools[ranks].run(_unfinished, strategy))


class _Either(nn.Module):
    """Unit of two layers whose forward may leave the second out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.both = nn.Linear(6, 6), nn.Linear(6, 6), True

    def forward(self, x):
        return self.first(x) + (self.second(x) if self.both else 0)


def _partial(reduce_unused):
    model = nn.Sequential(_Either(), nn.Linear(6, 6))
    shard_module(model, mesh=build_mesh(dp_replicate=2), units=list(model), reduce_unused=reduce_unused)
    model[0].both = False
    with microbatch(model, is_first=True, is_last=False):
        model(torch.randn(3, 6)).sum().backward()
    return True


def test_replicas_are_not_summed_over_different_parameters(pools):
    """FSDP2 adds micro-batches by position, before it knows which parameters they belong to."""
    assert all(pools[4].run(_partial, True))
    with pytest.raises(RuntimeError, match="reduce_unused"):
        pools[4].run(_partial, False)


class _Shared(nn.Module):
    """A block under three names, as in ALBERT."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6)] * 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


def _one_block():
    models, x = [seeded(_Shared) for _ in range(2)], torch.ones(2, 6)
    shard_module(models[1], mesh=_mesh(), units=models[1].blocks[:1])
    for model in models:
        model(x).sum().backward()
    ours, theirs = models[1].blocks[0].weight.grad.full_tensor(), models[0].blocks[0].weight.grad
    return relative_error(ours, theirs * torch.distributed.get_world_size())


def test_a_unit_may_have_several_names(pools):
    assert max(pools[2].run(_one_block)) < 1e-6


def _used_last(strategy):
    model = seeded(lambda: nn.Sequential(_Either(), nn.Linear(6, 6)))
    settings = {"strategy": strategy, "precision": "bf16", "reduce_unused": True}
    shard_module(model, mesh=_mesh(), units=list(model), **settings)
    for i in range(3):
        model[0].both = i == 2
        with microbatch(model, is_first=i == 0, is_last=i == 2):
            model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    return model[0].second.weight.grad.full_tensor()


def test_a_parameter_that_the_last_micro_batch_alone_uses(pools):
    """FSDP2 refuses its gradient in bf16 next to others that it has accumulated in fp32."""
    ours, theirs = (pools[2].run(_used_last, strategy)[0] for strategy in ("optim", "optim_grads"))
    assert ours.any() and relative_error(ours, theirs) < 0.02
