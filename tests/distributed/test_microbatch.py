"""Micro-batch contexts: reductions and gathers of each strategy, equal gradients, and clean failures (fp64)."""

from functools import lru_cache

import pytest
import torch
from torch import nn

from fsdp_cp import build_mesh, discard_step, microbatch, shard_module
from fsdp_cp.context.check_parallel import gradient_errors
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.sharding.state import fsdp_modules, gathered_units, has_gradients, param_groups, reshard
from tests.oracles.full_tensors import full_tensors
from tests.oracles.seeded import seeded
from tests.oracles.small_transformer import TOKENS, Transformer
from tests.tiers import slow, slow_case

KINDS = {
    "no_shard": ({"dp_shard": 4}, {"strategy": "no_shard"}),
    "optim": ({"dp_shard": 4}, {"strategy": "optim"}),
    "optim_grads": ({"dp_shard": 4}, {"strategy": "optim_grads"}),
    "optim_grads_params": ({"dp_shard": 4}, {}),
    "keep_gathered": ({"dp_shard": 4}, {"keep_gathered": True}),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, {}),
    "hsdp optim": ({"dp_replicate": 2, "dp_shard": 2}, {"strategy": "optim"}),
}
GROUPS = 4  # three blocks and the root
SAMPLES, MINE = 16, 4


QUICK = ("optim", "optim_grads")


@lru_cache
def _mesh(dp_replicate=1, dp_shard=4):
    return build_mesh(dp_replicate=dp_replicate, dp_shard=dp_shard)


def _model(kind, network=Transformer, **changes):
    model = seeded(network).double()
    if kind is not None:
        sizes, settings = KINDS[kind]
        shard_module(model, mesh=_mesh(**sizes), units=model.blocks, **{"precision": "fp64"} | settings | changes)
    return model


@lru_cache
def _data(step=0):
    generator = torch.Generator().manual_seed(step + 5)
    shape = (SAMPLES, TOKENS, 5)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def _loss(model, x, y):
    return (model(x) - y).square().sum() / (SAMPLES * TOKENS * 5)


def _mine(step=0):
    rank = torch.distributed.get_rank()
    return [t[rank * MINE : (rank + 1) * MINE] for t in _data(step)]


def _accumulate(model, parts, step=0):
    x, y = _mine(step)
    for i, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        with microbatch(model, is_first=i == 0, is_last=i == parts - 1):
            _loss(model, a, b).backward()


def _update(model):
    """Update by plain SGD, so that every difference of a gradient shows in the weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.3)
            parameter.grad = None


def _shards(model):
    return {name: p.to_local().detach().clone() for name, p in model.named_parameters()}


def _gradient_shards(model):
    return {name: p.grad.to_local().clone() for name, p in model.named_parameters()}


def _same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@lru_cache
def _truth():
    model = _model(None)
    _loss(model, *_data()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _error(model):
    ours = full_tensors({n: p.grad for n, p in model.named_parameters()})
    return max(gradient_errors(ours, _truth()).values())


def _flags(model):
    """Return everything that a context sets."""
    groups = [group for module in fsdp_modules(model) for group in param_groups(module)]
    return model._get_fsdp_state()._state_ctx.is_last_backward, [
        (g.reduce_grads, g.all_reduce_grads, g.reshard_after_backward, g._reshard_after_forward) for g in groups
    ]


def _accumulation(kind):
    """Return the gradient error of one and of four micro-batches, and the collectives of a later step of four."""
    model, errors = _model(kind), []
    outside = _flags(model)
    for parts in (1, 4):
        _accumulate(model, parts)
        errors.append(_error(model))
        assert not gathered_units(model) and _flags(model) == outside
        model.zero_grad()
    with CollectiveCounter() as counter:
        _accumulate(model, 4)
    return max(errors), tuple(counter.calls[k] for k in ("all_gather", "reduce_scatter", "all_reduce"))


CALLS = {
    "no_shard": (0, 0, GROUPS),
    "optim": (GROUPS, GROUPS, 0),
    "optim_grads": (GROUPS, 4 * GROUPS, 0),
    "optim_grads_params": (8 * GROUPS, 4 * GROUPS, 0),
    "keep_gathered": (GROUPS, 4 * GROUPS, 0),
    "hsdp": (8 * GROUPS, 4 * GROUPS, GROUPS),
    "hsdp optim": (GROUPS, GROUPS, GROUPS),
}


@pytest.mark.parametrize("kind", [k if k in QUICK else slow_case(k) for k in KINDS])
def test_gradients_and_collectives_of_micro_batches(pools, kind):
    """ZeRO-2 reduces in every micro-batch, so it never holds full gradients. ZeRO-1 reduces once a step."""
    for error, calls in pools[4].run(_accumulation, kind):
        assert error < 1e-13 and calls == CALLS[kind]


def _nested(kind):
    model = _model(kind)
    (a, b, c, d), (p, q, r, s) = (t.split(1) for t in _mine())
    outside = _flags(model)
    with microbatch(model, is_first=True, is_last=False):
        outer = _flags(model)
        first = _loss(model, a, p)
        with microbatch(model, is_first=False, is_last=True):  # its end reduces and reshards under the outer forward
            inner = _flags(model)
            _loss(model, b, q).backward()
        assert _flags(model) == outer and not gathered_units(model)
        first.backward()
        with microbatch(model, is_first=False, is_last=False):
            _loss(model, c, r).backward()
        assert _flags(model) == outer
    assert _flags(model) == outside
    assert kind == "optim_grads_params" or inner != outer
    with microbatch(model, is_first=False, is_last=True):
        _loss(model, d, s).backward()
    return _error(model)


@pytest.mark.parametrize("kind", ["optim", slow_case("hsdp")])
def test_nested_contexts(pools, kind):
    assert max(pools[4].run(_nested, kind)) < 1e-13


class _Broken(Exception):
    pass


def _break(*_args):
    raise _Broken


def _broken(kind, where, begun):
    """Stop in the middle of a step, then run the next two. Compare with a model that never stopped."""
    model, fresh = _model(kind), _model(kind)
    if begun:  # with FSDP2's state as after a step
        for m in (model, fresh):
            _accumulate(m, 2)
            _update(m)
    outside = _flags(model)
    x, y = _mine(step=1)
    if where != "first":
        with microbatch(model, is_first=True, is_last=False):
            _loss(model, x[:2], y[:2]).backward()
        assert has_gradients(model)
    with pytest.raises(_Broken), microbatch(model, is_first=where == "first", is_last=where == "last backward"):
        if where == "forward":
            handle = model.blocks[1].mlp.register_forward_hook(_break)
            try:
                model(x[2:])
            finally:
                handle.remove()
        else:
            hidden = []
            handle = model.blocks[1].mlp.register_forward_hook(lambda _m, _i, out: hidden.append(out))
            loss = _loss(model, x[2:], y[2:])
            handle.remove()
            hidden[0].register_hook(_break)
            loss.backward()
    assert not gathered_units(model) and not has_gradients(model) and _flags(model) == outside
    for m in (model, fresh):
        _accumulate(m, 2)
    same = _same(_gradient_shards(model), _gradient_shards(fresh))
    for m in (model, fresh):
        _update(m)
        _accumulate(m, 2, step=2)
    return same and _same(_gradient_shards(model), _gradient_shards(fresh)) and _same(_shards(model), _shards(fresh))


@pytest.mark.parametrize(
    ("kind", "where", "begun"),
    [
        ("optim_grads_params", "forward", True),
        slow_case("optim", "backward", True),
        slow_case("no_shard", "forward", False),
        slow_case("optim_grads", "backward", True),
        slow_case("keep_gathered", "first", False),
        slow_case("hsdp", "last backward", True),
    ],
)
def test_the_step_after_one_that_broke_off_equals_a_fresh_one(pools, kind, where, begun):
    assert all(pools[4].run(_broken, kind, where, begun))


def _left(kind):
    model = _model(kind)
    x, y = _mine()
    with microbatch(model, is_first=True, is_last=False):
        _loss(model, x, y).backward()
    reshard(model)
    model.zero_grad()  # clears shards only, not gradients that wait for their reduction
    left = has_gradients(model)
    if left:
        with pytest.raises(RuntimeError, match="zero_grad"), microbatch(model, is_first=True, is_last=True):
            pass
    discard_step(model)
    _accumulate(model, 2)
    with pytest.raises(RuntimeError, match="zero_grad"), microbatch(model, is_first=True, is_last=True):
        pass
    return left, _error(model)


@pytest.mark.parametrize(("kind", "waits"), [("optim", True), ("optim_grads", False)])
def test_gradients_that_wait_are_found(pools, kind, waits):
    for left, error in pools[4].run(_left, kind):
        assert left == waits and error < 1e-13


def _misuse():
    model = _model("optim_grads_params")
    context = microbatch(model, is_first=True, is_last=True)
    with context:
        _loss(model, *_mine()).backward()
    model.zero_grad()
    outside = _flags(model)
    with pytest.raises((RuntimeError, AttributeError)), context:
        raise AssertionError("entered twice")
    assert _flags(model) == outside
    parent = nn.ModuleDict({"net": model})
    with microbatch(parent, is_first=True, is_last=False):
        assert _flags(model) != outside
    two = nn.ModuleDict({"a": model, "b": _model("optim")})
    for wrong in (two, nn.Linear(2, 2), model.blocks[0]):
        with pytest.raises(ValueError), microbatch(wrong, is_first=True, is_last=True):
            pass
    return True


def test_misuse(pools):
    assert all(pools[4].run(_misuse))


class _Skipping(Transformer):
    used = 3

    def forward(self, x):
        x = self.embed(x)
        for block in list(self.blocks)[: self.used]:
            x = block(x)
        return self.head(x)


def _unreached(reduce_unused):
    """Skip a block in the last backward, so that the replicas hold only a part of its gradients."""
    model = _model("hsdp", _Skipping, reduce_unused=reduce_unused)
    x, y = _mine()
    with microbatch(model, is_first=True, is_last=False):
        _loss(model, x, y).backward()
    model.used = 2
    context = microbatch(model, is_first=False, is_last=True)
    if reduce_unused:
        with context:
            (0 * _loss(model, x, y)).backward()
        return _error(model)
    with pytest.raises(RuntimeError, match="reduce_unused"), context:
        (0 * _loss(model, x, y)).backward()
    assert not has_gradients(model)
    return 0.0


@slow
@pytest.mark.parametrize("reduce_unused", [False, True])
def test_a_unit_that_the_last_backward_misses(pools, reduce_unused):
    assert max(pools[4].run(_unreached, reduce_unused)) < 1e-13
