"""What a sharded network cannot do gives one sentence that says what works; what it can do stays exact."""

import copy
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from fsdp_cp import build_mesh, microbatch, shard_module
from fsdp_cp.context_parallel import SplitTokens, parallelize_context
from fsdp_cp.errors import UserError
from fsdp_cp.sharding.settings import STRATEGIES
from tests.distributed.test_library import HEADS, PLAN, TOKENS, Transformer


@lru_cache
def _mesh(dp_replicate=1, cp=1):
    return build_mesh(dp_replicate=dp_replicate, cp=cp, heads=HEADS)


def _transformer(mesh, dtype=torch.float32, **settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer().to(dtype)
    for block in model.blocks:
        block.mesh = mesh
    parallelize_context(model, mesh=mesh, plan=copy.deepcopy(PLAN))
    shard_module(model, mesh=mesh, units=model.blocks, **settings)
    return model


def _refusal(function, *args):
    try:
        function(*args)
    except UserError as error:
        message = str(error)
        assert "\n" not in message
        return message
    raise AssertionError("nothing was refused")


# ---- dtypes


class CastsInside(nn.Module):
    """Takes fp32 alone, as networks with times do, and casts what its blocks compute with."""

    def __init__(self):
        super().__init__()
        self.time, self.transformer = nn.Linear(1, 5), Transformer()
        self.seen = []

    def forward(self, x, t, scales=None):
        self.seen.append(t.dtype)
        x = x.to(torch.bfloat16) + self.time(torch.sin(t)[:, None].to(torch.bfloat16))[:, None]
        return self.transformer(x if scales is None else x * scales["x"].to(x.dtype))


def _dtypes(strategy):
    model = _transformer(_mesh(cp=2), strategy=strategy, precision="bf16")
    x = torch.randn(1, TOKENS, 5)
    messages = [_refusal(model, x)]
    messages.append(_refusal(lambda: model(x=x.double())))
    out = model(x.to(torch.bfloat16))
    out.float().square().mean().backward()  # nothing is left over from the refusals
    assert all(p.grad is not None for p in model.parameters())

    legitimate = CastsInside()
    for block in legitimate.transformer.blocks:
        block.mesh = _mesh()
    shard_module(legitimate, mesh=_mesh(), units=legitimate.transformer.blocks, strategy=strategy, precision="bf16")
    t = torch.tensor([999.9])
    legitimate(x, t, scales={"x": torch.ones(1)}).float().square().mean().backward()
    assert legitimate.seen == [torch.float32]
    with torch.no_grad(), forward_ad.dual_level():
        out = legitimate(forward_ad.make_dual(x, x), t)
        assert forward_ad.unpack_dual(out).tangent.abs().sum() > 0
    for wrong in (lambda: legitimate(x), lambda: legitimate(x, t, scales=3)):  # other errors stay as they are
        with pytest.raises(TypeError) as error:
            wrong()
        assert not isinstance(error.value, UserError)
    return messages


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inputs_of_another_dtype(pools, strategy):
    for first, second in pools[2].run(_dtypes, strategy):
        assert first.startswith(
            "precision='bf16' computes in bfloat16, but Transformer got x (float32) in 'embed' (Linear): mat1 and mat2"
        )
        assert "Inputs are not cast, since that would round times: pass x.to(torch.bfloat16), or cast inside" in first
        assert "x (float64)" in second


def _wrapped_dtypes(settings):
    model = _transformer(_mesh(), precision="bf16", **settings)

    def embed_in_fp32(module, args):
        return (args[0].to(torch.bfloat16),)

    model.embed.register_forward_pre_hook(embed_in_fp32)
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0].float(),))
    return _refusal(model, torch.randn(1, TOKENS, 5))


@pytest.mark.parametrize("settings", [{"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}])
def test_dtypes_inside_a_checkpointed_block(pools, settings):
    (message,) = pools[1].run(_wrapped_dtypes, settings)
    assert "got x (float32) in 'blocks.1.norm' (LayerNorm)" in message or "in 'blocks.1.qkv' (Linear)" in message


@pytest.mark.long
def test_dtypes_inside_a_compiled_block(pools):
    (message,) = pools[1].run(_wrapped_dtypes, {"compile": True})
    assert "precision='bf16' computes in bfloat16, but Transformer got x (float32)" in message
    assert "pass x.to(torch.bfloat16)" in message


# ---- gradient penalties


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


@dataclass
class Judgement:
    score: torch.Tensor


class Judge(nn.Module):
    """A discriminator of plain layers, which autograd can differentiate twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return Judgement(self.head(torch.tanh(x)).clone())


def _judge_and_data():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Judge().double(), torch.randn(12, 5, 4, dtype=torch.float64)


def _penalised(model, x, with_loss, around):
    x = x.clone().requires_grad_()
    score = model(x).score
    with around():
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    penalty = gradient.square().sum()
    return penalty + score.square().sum() if with_loss else penalty


def _own(x):
    own = len(x) // torch.distributed.get_world_size()
    return x[torch.distributed.get_rank() * own :][:own]


def _penalties(settings, replicas):
    """Refused where weights are freed, exact in a micro-batch that is not the last; the next step is a fresh one."""
    keeps = settings.get("strategy") in ("optim", "optim_grads") or settings.get("keep_gathered", False)
    model, x = _judge_and_data()
    if replicas > 1:
        settings = settings | {"reduce_unused": True}  # the penalty alone gives the last bias no gradient
    shard_module(model, mesh=_mesh(dp_replicate=replicas), units=model.blocks, precision="fp64", **settings)
    mine = _own(x)

    def last():
        return microbatch(model, is_first=False, is_last=False)

    messages = []
    for around in (lambda: torch.enable_grad(), *(() if keeps else (last,))):
        with pytest.raises(UserError) as error, microbatch(model, is_first=True, is_last=True):
            _penalised(model, mine, True, around).backward()
        messages.append(str(error.value))
        with pytest.raises(UserError):
            _penalised(model, mine, True, around).backward()
    for parts in (1, 2):
        for with_loss in (False, True):
            plain, _ = _judge_and_data()
            if keeps:
                pieces = mine.split(len(mine) // parts)
                for i, part in enumerate(pieces):
                    with microbatch(model, is_first=i == 0, is_last=i == len(pieces) - 1):
                        _penalised(model, part, with_loss, last).backward()
                _penalised(plain, x, with_loss, torch.enable_grad).backward()
            else:
                with microbatch(model, is_first=True, is_last=True):
                    model(mine).score.square().sum().backward()
                plain(x).score.square().sum().backward()
            for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                if q.grad is not None and q.grad.norm() > 0:
                    assert (p.grad.full_tensor() - q.grad).norm() / q.grad.norm() < 1e-12, name
            model.zero_grad(set_to_none=True)
    return messages


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "settings", [*({"strategy": s} for s in STRATEGIES), {"strategy": "optim_grads_params", "keep_gathered": True}]
)
def test_a_gradient_penalty(pools, settings, replicas):
    if replicas == 2 and settings["strategy"] == "no_shard":
        pytest.skip("no_shard replicates over all ranks as it is")
    for messages in pools[4 if replicas == 2 else 3].run(_penalties, settings, replicas):
        for message in messages:
            assert "a backward with create_graph=True (a gradient penalty) through Judge" in message
            assert f"under strategy={settings['strategy']!r} its weights are freed" in message
            assert "take a finite difference" in message
            if settings["strategy"] in ("no_shard", "optim_grads_params") and "keep_gathered" not in settings:
                assert "use strategy='optim', 'optim_grads' or keep_gathered=True" in message
            else:
                assert "put it into `with microbatch(model, is_first=False, is_last=False)`" in message


def _penalty_of_split_tokens():
    mesh = _mesh(cp=2)
    model = _transformer(mesh, strategy="optim")
    x = torch.randn(1, TOKENS, 5, requires_grad=True)
    with microbatch(model, is_first=True, is_last=False):
        message = _refusal(lambda: torch.autograd.grad(model(x).sum(), x, create_graph=True))
    return message


def test_a_gradient_penalty_through_split_tokens(pools):
    for message in pools[2].run(_penalty_of_split_tokens):
        assert "through split tokens gives each rank a part of the gradient; take a finite difference" in message


def _finite_difference(strategy, cp):
    """The way that the documentation names, against the same in one process: exact on every mesh."""
    mesh, sigma = _mesh(cp=cp), 0.1

    def penalty(model, x, noise):
        logits = model(torch.cat((x, x + sigma * noise))).mean((1, 2))
        clean, disturbed = logits.chunk(2)
        return (disturbed - clean).square().sum() / sigma**2

    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(4, TOKENS, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    own = 4 // mesh.dp_size
    mine = slice(mesh.dp_rank * own, (mesh.dp_rank + 1) * own)
    model = _transformer(mesh, torch.float64, strategy=strategy, precision="fp64")
    with microbatch(model, is_first=True, is_last=True):
        penalty(model, x[mine], noise[mine]).backward()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = Transformer().double()
    penalty(plain, x, noise).backward()
    errors = [
        ((p.grad.full_tensor() - q.grad).norm() / q.grad.norm()).item()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        if q.grad.norm() > 1e-12
    ]
    return len(errors), max(errors)


@pytest.mark.parametrize("cp", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_penalty_by_finite_differences(pools, strategy, cp):
    for compared, error in pools[4].run(_finite_difference, strategy, cp):
        assert compared > 35 and error < 1e-11


# ---- inference mode


def _gradients(model, x):
    with microbatch(model, is_first=True, is_last=True):
        model(x).float().square().mean().backward()
    found = [p.grad.to_local().clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def _inference_first(settings, cp):
    """A first forward in inference mode, training, inference again: as one that has never been in that mode."""
    mesh = _mesh(cp=cp)
    model, fresh = (_transformer(mesh, **settings) for _ in range(2))
    generator = torch.Generator().manual_seed(mesh.dp_rank)
    x = torch.randn(2, TOKENS, 5, generator=generator)
    x = x.to(torch.bfloat16) if settings.get("precision") == "bf16" else x
    with torch.no_grad():
        out = fresh(x)
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(model(x), out)
        for ours, theirs in zip(_gradients(model, x), _gradients(fresh, x), strict=True):
            assert torch.equal(ours, theirs)
    with torch.no_grad():
        assert torch.equal(model(x), out) and not model(x).is_inference()
    return True


@pytest.mark.parametrize("cp", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "settings",
    [
        *({"strategy": s, "precision": "bf16"} for s in STRATEGIES),
        {"keep_gathered": True},
        {"activation_checkpointing": "full"},
        {"gather_stream": "compute"},
    ],
)
def test_a_first_forward_in_inference_mode(pools, settings, cp):
    assert pools[3].run(_inference_first, settings, cp) == [True] * 3


# ---- arguments


def _arguments():
    mesh = _mesh()
    plain = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    x = torch.zeros(1, 2, 2, 2)
    from fsdp_cp.attention import context_parallel_attention
    from fsdp_cp.sequence import gather_tokens, split_tokens

    given = Transformer()
    messages = {
        "shard_module": _refusal(lambda: shard_module(given, mesh=plain, units=given.blocks)),
        "parallelize_context": _refusal(lambda: parallelize_context(given, mesh=plain, plan=PLAN)),
        "split_tokens": _refusal(lambda: split_tokens(x, plain)),
        "gather_tokens": _refusal(lambda: gather_tokens(x, plain)),
        "attention": _refusal(lambda: context_parallel_attention(x, x, x, mesh=plain)),
        "None": _refusal(lambda: shard_module(given, mesh=None, units=given.blocks)),
    }
    others = {
        "units is a Linear; use a list": lambda: shard_module(given, mesh=mesh, units=given.head),
        "units[0] is a str; use modules": lambda: shard_module(given, mesh=mesh, units=["blocks.0"]),
        "units[1] is a Linear that is no part": lambda: shard_module(
            given, mesh=mesh, units=[given.head, nn.Linear(1, 1)]
        ),
        "units[0] is the model itself": lambda: shard_module(given, mesh=mesh, units=[given]),
        "units[3] is units[0] again": lambda: shard_module(given, mesh=mesh, units=[*given.blocks, given.blocks[0]]),
        "no setting 'strtegy'; use strategy": lambda: shard_module(given, mesh=mesh, units=[], strtegy="optim"),
    }
    for message, call in others.items():
        assert message in _refusal(call), message
    shard_module(given, mesh=mesh, units=(block for block in given.blocks))
    sharded = [name for name, module in given.named_modules() if hasattr(module, "unshard")]
    assert sharded == ["", "blocks.0", "blocks.1", "blocks.2"], "a generator of units is used, not used up"
    again = _refusal(lambda: shard_module(given, mesh=mesh, units=given.blocks))
    late = _refusal(lambda: parallelize_context(given, mesh=mesh, plan={"blocks.0": {"hidden_states": SplitTokens(1)}}))
    return messages, again, late


def test_arguments(pools):
    ((messages, again, late),) = pools[1].run(_arguments)
    for name, message in messages.items():
        what = "NoneType" if name == "None" else "DeviceMesh"
        assert message.startswith(f"mesh is a {what}") or name == "attention", name
        assert "fsdp_cp.build_mesh" in message, name
    assert "sharded already; call shard_module once" in again
    assert "sharded already; call parallelize_context before shard_module" in late
