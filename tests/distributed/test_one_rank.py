"""One rank alone: the same bits as with FSDP2's copies, without them, and weights that nothing frees."""

from contextlib import nullcontext
from functools import lru_cache

import pytest
import torch
from torch import nn

from fsdp_cp import build_mesh, discard_step, microbatch, shard_module
from fsdp_cp.measure.sharding_memory import ShardingMemory, shard_bytes
from fsdp_cp.reduce import scale_grads
from fsdp_cp.sharding import one_rank, shard
from fsdp_cp.sharding.state import fsdp_modules, gathered_units, param_groups, reshard
from tests.distributed.test_library import TOKENS, Transformer

SETTINGS = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "bf16 masters": {"precision": "bf16", "master_dtype": "bf16"},
    "optim": {"strategy": "optim"},
    "optim, bf16": {"strategy": "optim", "precision": "bf16"},
    "no_shard": {"strategy": "no_shard"},
    "keep_gathered": {"keep_gathered": True},
    "scaled": {"gradient_scale": 4.0},
    "unused": {"reduce_unused": True},
    "checkpointed": {"activation_checkpointing": True},
    "offloaded": {"offload": "cpu"},
    "compiled": {"compile": True},
}
COPIES = ("bf16", "optim, bf16", "offloaded")
"""Full parameters of another dtype, or that FSDP2 wants on another device, are memory of their own."""


@lru_cache
def _mesh():
    return build_mesh(dp_shard=1, cp=1)


def _model(network=Transformer, *, copies=False, **settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network()
    with pytest.MonkeyPatch.context() as patch:
        if copies:
            patch.setattr(shard, "compute_in_place", lambda root: None)
        shard_module(model, mesh=_mesh(), units=model.blocks, **settings)
    return model


def _parameters(model):
    return [
        parameter for unit in fsdp_modules(model) for group in param_groups(unit) for parameter in group.fsdp_params
    ]


def _trained(settings, *, copies):
    """Losses, gradients and weights of three updates of two micro-batches, with a forward for nothing between them."""
    model = _model(copies=copies, **settings)
    dtype = torch.bfloat16 if settings.get("precision") == "bf16" else torch.float32
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(3):
        for i in range(2):
            x, y = (torch.randn(2, TOKENS, 5, generator=generator).to(dtype) for _ in range(2))
            with microbatch(model, is_first=i == 0, is_last=i == 1):
                loss = (model(x) - y).float().square().mean()
                loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            seen.append(model(x).clone())
        reshard(model)  # of "optim" it stays gathered
        seen += [p.to_local().detach().clone() for p in model.parameters()]
    return seen, [getattr(p, "_in_place", False) for p in _parameters(model)]


def _both(settings):
    ours, in_place = _trained(settings, copies=False)
    theirs, copied = _trained(settings, copies=True)
    assert not any(copied), "FSDP2 as it is"
    assert len(ours) == len(theirs) > 20
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), set(in_place)


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x == "compiled" else x for x in SETTINGS])
def test_the_same_bits_as_with_the_copies(pools, name):
    same, in_place = pools[1].run(_both, SETTINGS[name])[0]
    assert same
    assert in_place == {name not in COPIES}


def _memory():
    """Bytes of full parameters and of gradients beside the shards, inside a step."""
    model = _model()
    shards = {p._sharded_param_data.untyped_storage().data_ptr() for p in _parameters(model)}
    full = set()
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda m, _: full.update(p.untyped_storage().data_ptr() for p in m.parameters())
        )
    with microbatch(model, is_first=True, is_last=True):
        model(torch.randn(2, TOKENS, 5)).square().mean().backward()
    before = [p.to_local().clone() for p in model.parameters()]
    for unit in fsdp_modules(model):
        unit.unshard()
        unit.reshard()
    after = [p.to_local() for p in model.parameters()]
    return full <= shards and len(full) > 0, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _gradients_taken():
    """Where autograd put each gradient, and where the shard's is."""
    model = _model()
    model(torch.randn(2, TOKENS, 5))
    reshard(model)
    full = {}
    for p in _parameters(model):
        p._unsharded_param.register_post_accumulate_grad_hook(
            lambda x, key=p: full.__setitem__(key, x.grad.untyped_storage().data_ptr())
        )
    with microbatch(model, is_first=True, is_last=True):
        model(torch.randn(2, TOKENS, 5)).square().mean().backward()
    found = {p: p.sharded_param.grad.to_local().untyped_storage().data_ptr() for p in full}
    return len(full), [found[p] == full[p] for p in full]


def test_gradients_are_taken_as_they_come(pools):
    ((count, same),) = pools[1].run(_gradients_taken)
    assert count > 10 and all(same)


def test_full_parameters_are_the_shards_and_letting_go_of_them_frees_nothing(pools):
    assert pools[1].run(_memory) == [(True, True)]


class _Shared(nn.Module):
    """A block whose two parameters get views of one tensor as their gradients: autograd hands them out as they are."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 6))

    def forward(self, x):
        return x * (self.a.view(-1) + self.b.view(-1))


class _Sharing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([_Shared(), _Shared()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _shared_gradients():
    x = torch.randn(5, 12)
    torch.manual_seed(0)
    plain = _Sharing()
    plain(x).square().mean().backward()
    wanted = [p.grad.clone() for p in plain.parameters()]
    shared = len({p.grad.untyped_storage().data_ptr() for p in plain.parameters()})
    model = _model(_Sharing)
    with microbatch(model, is_first=True, is_last=True):
        model(x).square().mean().backward()
    scale_grads(list(model.parameters()), 0.5)
    return shared, [torch.equal(p.grad.to_local(), 0.5 * g) for p, g in zip(model.parameters(), wanted, strict=True)]


def test_gradients_that_share_memory_are_scaled_once_each(pools):
    """As FSDP2's copies see to; plain torch has two tensors for the four gradients, and would scale them twice."""
    ((shared, right),) = pools[1].run(_shared_gradients)
    assert shared == 2, "the case that this is about"
    assert right == [True] * 4


def _assign_parts(model, flat):
    """Load by assignment, as parts of ``flat``."""
    state, start = {}, 0
    for name, p in model.state_dict().items():
        part = flat[start : start + p.numel()].view(p.shape)
        state[name] = torch.distributed.tensor.DTensor.from_local(part, p.device_mesh, p.placements)
        start += p.numel()
    model.load_state_dict(state, assign=True)


def _assigned():
    """Weights loaded by assignment, as parts of one storage, between two micro-batches of a step, and after one."""
    model, other = _model(), _model()
    x = torch.randn(2, TOKENS, 5)
    with torch.no_grad():
        for p in other.parameters():
            p.to_local().mul_(1.5)
        expected = other(x)
    flat = torch.cat([p.to_local().flatten() for p in other.parameters()])
    model(x)  # full parameters in place
    _assign_parts(model, flat)
    with torch.no_grad():
        found = model(x)
    whole = flat.clone()
    model(x).square().mean().backward()
    trained = all(p.grad is not None for p in model.parameters())
    # And back to memory of their own.
    model.load_state_dict({name: w.clone() for name, w in other.state_dict().items()}, assign=True)
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().mul_(2)
        again = model(x)
        for p in other.parameters():
            p.to_local().mul_(2)
        doubled = other(x)
    in_place = {p._in_place for p in _parameters(model)}
    return torch.equal(found, expected), torch.equal(flat, whole), trained, torch.equal(again, doubled), in_place


def test_weights_that_are_loaded_by_assignment(pools):
    assert pools[1].run(_assigned) == [(True, True, True, True, {True})]


def _validated_after_assignment():
    """The first forward with weights that are parts of one storage runs in inference mode."""
    model, x = _model(), torch.randn(2, TOKENS, 5)
    model(x)
    flat = torch.cat([p.to_local().flatten() for p in model.parameters()])
    old = {p._sharded_param_data.untyped_storage().data_ptr() for p in _parameters(model)}
    _assign_parts(model, flat)
    held = {x.untyped_storage().data_ptr() for p in _parameters(model) for x in p.all_gather_outputs if x.numel()}
    held |= {p._unsharded_param.untyped_storage().data_ptr() for p in _parameters(model)}
    with torch.inference_mode():
        first = model(x).clone()
    with microbatch(model, is_first=True, is_last=True):
        second = model(x)
        second.square().mean().backward()
    return torch.equal(first, second), all(p.grad is not None for p in model.parameters()), not held & old


def test_validation_after_an_assignment_spoils_nothing_and_old_weights_go_at_once(pools):
    assert pools[1].run(_validated_after_assignment) == [(True, True, True)]


def _changed_between(settings, inside, resharded):
    """Weights that change behind a forward: what its backward says, in the first step and in a later one."""
    model, x = _model(**settings), torch.randn(2, TOKENS, 5)

    def change():
        if resharded:
            reshard(model)
        with torch.no_grad():
            for p in _parameters(model):
                p.sharded_param.to_local().mul_(2)

    said = []
    for late in (True, False, True):
        try:
            with microbatch(model, is_first=True, is_last=True) if inside else nullcontext():
                if not late:
                    change()
                loss = model(x).square().mean()
                if late:
                    change()
                loss.backward()
        except RuntimeError as error:
            said.append(str(error))
            discard_step(model)
        reshard(model)
        model.zero_grad()
    return said


@pytest.mark.parametrize("resharded", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("settings", [{}, {"strategy": "optim"}, {"strategy": "optim_grads"}, {"keep_gathered": True}])
def test_weights_that_change_between_a_forward_and_its_backward_are_refused(pools, settings, inside, resharded):
    """A copy that stays gathered keeps those of the forward, plain torch raises: in place neither happens by itself."""
    (said,) = pools[1].run(_changed_between, settings, inside, resharded)
    assert len(said) == 2 and all("were changed between a forward and its backward" in each for each in said)


def _between_micro_batches(settings):
    """Inside a step: are the parameters sharded, do they have their gradients, and what is gathered?"""
    model, x = _model(**settings), torch.randn(2, TOKENS, 5)
    seen = []
    for _ in range(2):
        for i in range(3):
            with microbatch(model, is_first=i == 0, is_last=i == 2):
                if i == 1:
                    model(x)  # a forward for nothing, of a micro-batch that has one loss more
                model(x).square().mean().backward()
            parameters = list(model.parameters())
            seen.append((
                all(isinstance(p, torch.distributed.tensor.DTensor) for p in parameters),
                all(p.grad is not None for p in parameters),
                len(gathered_units(model)),
            ))  # fmt: skip
        model.zero_grad()
    return seen


def test_between_micro_batches_parameters_are_sharded_and_have_their_gradients(pools):
    """In the second step too, in which it is known that full parameters take no memory."""
    assert pools[1].run(_between_micro_batches, {}) == [[(True, True, 0)] * 6]


def _loaded_in_another_dtype(copies):
    model = _model(copies=copies)
    x = torch.randn(2, TOKENS, 5, generator=torch.Generator().manual_seed(1))
    model(x)
    model.load_state_dict({name: w.bfloat16() for name, w in model.state_dict().items()}, assign=True)
    with torch.no_grad():
        return model(x)


def test_weights_of_another_dtype_are_computed_with_in_that_of_before(pools):
    (found,), (wanted,) = (pools[1].run(_loaded_in_another_dtype, copies) for copies in (False, True))
    assert found.dtype == torch.float32 and torch.equal(found, wanted)


def _changed_behind_a_validation():
    """With weights that stay gathered behind a forward for nothing: they change, and are trained."""
    model, x = _model(strategy="optim"), torch.randn(2, TOKENS, 5)
    model(x)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            model(x)
        with torch.no_grad():
            for p in _parameters(model):
                p.sharded_param.to_local().mul_(1.5)
        with microbatch(model, is_first=True, is_last=True):
            model(x).square().mean().backward()
        model.zero_grad()
    return True


def test_weights_may_change_behind_a_forward_that_has_no_backward(pools):
    assert pools[1].run(_changed_behind_a_validation) == [True]


def _with_create_graph():
    model, x = _model(strategy="optim"), torch.randn(2, TOKENS, 5)
    with microbatch(model, is_first=True, is_last=False):
        model(x).square().mean().backward(create_graph=True)
    with microbatch(model, is_first=False, is_last=True):
        model(x).square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    for grad in grads:
        grad.mul_(0.5)
    return [grad.requires_grad or grad.to_local().requires_grad for grad in grads]


def test_a_gradient_keeps_no_graph(pools):
    (found,) = pools[1].run(_with_create_graph)
    assert found and not any(found)


def _other_torch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_rank, "OF_TORCH", "2.14.")
        model = _model()
    model(torch.randn(2, TOKENS, 5)).square().mean().backward()
    return [getattr(p, "_in_place", False) for p in _parameters(model)], [p.grad is None for p in model.parameters()]


def test_another_torch_copies(pools):
    ((in_place, missing),) = pools[1].run(_other_torch)
    assert in_place and not any(in_place) and not any(missing)


def _held(precision):
    """Bytes at most by kind in a step of two micro-batches, what is left of them, and what the shards take."""
    model = _model(precision=precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.randn(2, TOKENS, 5, dtype=dtype)
    model(x)  # FSDP2 makes what is watched
    with ShardingMemory(model) as memory:
        for i in range(2):
            with microbatch(model, is_first=i == 0, is_last=i == 1):
                model(x).float().square().mean().backward()
        left = dict(memory.bytes)
    largest = max(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    return dict(memory.peak), left, shard_bytes(model), largest


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_held_beside_the_shards(pools, precision):
    ((most, left, shards, largest),) = pools[1].run(_held, precision)
    assert left == dict.fromkeys(left, 0) | {"shard_gradients": shards.gradients}
    assert shards.gradients == shards.parameters
    assert most["staging"] == most["reduce_inputs"] == 0
    if precision == "fp32":
        assert most["gathered"] == 0
    else:
        assert most["gathered"] >= 2 * largest
    # Of the second micro-batch gradients of a unit are beside those of the shards for a moment.
    assert 0 < most["full_gradients"] < shards.parameters
    assert shards.gradients <= most["shard_gradients"] <= shards.gradients + 4 * largest
