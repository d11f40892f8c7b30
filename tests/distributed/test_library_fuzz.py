"""Random arguments of the library's functions: each call works, or raises one ValueError that names an argument."""

import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fsdp_cp import build_mesh, shard_module
from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.attention.mask import block_causal
from fsdp_cp.context_parallel import EmbedOwnTokens, GatherTokens, SplitTokens, parallelize_context
from fsdp_cp.sequence import gather_tokens, split_tokens
from tests.oracles.small_transformer import TOKENS, Transformer
from tests.pools import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
EXAMPLES = {
    "max_examples": 40,
    "deadline": None,
    "derandomize": True,  # ranks must draw the same
    "database": None,
    "phases": (Phase.generate,),  # shrinking on one rank would leave the others in a collective
    "suppress_health_check": list(HealthCheck),
}

junk = st.sampled_from([None, "auto", "2", 1.0, 2.5, True, [2], (1, 2), float("nan"), torch.device("cpu")])
sizes = st.one_of(st.integers(-2, 9), st.integers(-2, 9), junk)
shapes = st.lists(st.integers(0, 4), max_size=5)


@st.composite
def tensors(draw):
    if draw(st.integers(0, 9)) == 0:
        return draw(junk)
    return torch.ones(draw(shapes), dtype=draw(st.sampled_from(DTYPES)))


def call(function, arguments: tuple[str, ...], *args, **kwargs):
    """Return the call's result, or ``None`` after a refusal in one line that names one of ``arguments``."""
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message, message
        assert any(re.search(rf"\b{name}\b", message) for name in arguments), message
        return None


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield build_mesh()
    dist.destroy_process_group()


MESH = ("dp_replicate", "dp_shard", "cp", "ulysses", "ring", "heads", "device_type", "sharded")


@settings(**EXAMPLES)
@given(data=st.data())
def test_build_mesh(mesh, data):
    names = data.draw(st.lists(st.sampled_from(MESH), unique=True))
    values = {name: data.draw(st.sampled_from(["cpu", "cuda", "tpu", "", None, torch.device("cpu"), 3])
                              if name == "device_type" else sizes) for name in names}  # fmt: skip
    built = call(build_mesh, MESH, **values)
    if built is not None:
        assert built.world.size() == 1 and built.shape.cp * built.shape.dp == 1


def _split_and_gather(mesh, data):
    x, dim = data.draw(tensors()), data.draw(st.one_of(st.integers(-6, 6), junk))
    total = data.draw(st.one_of(st.none(), st.integers(-1, 9), junk))
    local = call(split_tokens, ("x", "dim", "tokens"), x, mesh, dim)
    if local is not None:
        full = call(gather_tokens, ("x", "dim"), local, mesh, x.shape[dim], dim)
        assert full is not None and torch.equal(full, x)
    call(gather_tokens, ("x", "dim", "total", "tokens"), x, mesh, total, dim)


def _attend(mesh, data):
    fitting = data.draw(st.booleans())
    local, keys, heads = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)))
    dtype = data.draw(st.sampled_from(DTYPES))
    q, k, v = (torch.ones(1, local, heads, 4, dtype=dtype) for _ in range(3))
    if not fitting:
        q, k, v = (x if data.draw(st.booleans()) else data.draw(tensors()) for x in (q, k, v))
    options = {
        "total_tokens": st.one_of(st.integers(-1, 9), st.tuples(st.integers(-1, 9), st.integers(0, 9)), junk),
        "scale": st.one_of(st.floats(), junk),
        "backend": st.one_of(st.sampled_from(["cpu_flash", "reference", "flash", "sdpa", ""]), junk),
        "key_mask": tensors(),
        "mask": st.one_of(st.builds(block_causal, st.lists(st.integers(1, 3), min_size=1)), junk),
        "head_groups": sizes,
        "joint": st.one_of(st.tuples(tensors(), tensors(), tensors()), tensors(), st.just((q, k, v))),
    }
    chosen = data.draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=3))
    values = {name: data.draw(options[name]) for name in chosen}
    names = ("q", "k", "v", "heads", *options)
    out = call(context_parallel_attention, names, q, k, v, mesh=mesh, **values)
    if out is not None:
        assert (out if isinstance(out, torch.Tensor) else out[0]).shape == q.shape
    for name in ("total_tokens", "mask", "head_groups", "joint"):
        values.pop(name, None)
    k, v = (x if data.draw(st.booleans()) else torch.ones(1, keys, heads, 4, dtype=dtype) for x in (k, v))
    out = call(cross_attention, names, q, k, v, **values)
    assert out is None or out.shape == q.shape


@settings(**EXAMPLES)
@given(data=st.data())
def test_split_and_gather(mesh, data):
    _split_and_gather(mesh, data)


@settings(**EXAMPLES)
@given(data=st.data())
def test_attention(mesh, data):
    _attend(mesh, data)


def _on_ranks():
    mesh = build_mesh(cp=2)
    settings(**EXAMPLES)(given(data=st.data())(lambda data: _split_and_gather(mesh, data)))()
    settings(**EXAMPLES)(given(data=st.data())(lambda data: _attend(mesh, data)))()
    settings(**EXAMPLES)(given(data=st.data())(lambda data: _plan(mesh, data)))()
    return True


def _plan(mesh, data):
    """Apply a random plan and random arguments of shard_module. An accepted plan runs, or raises with a reason."""
    names = st.sampled_from(["", "blocks.0", "blocks", "head", "nowhere", "embed", 3, None])
    arguments = st.sampled_from(["hidden_states", "x", "input", "nothing", 0, 1, -1, None])
    dims = st.one_of(st.integers(-4, 4), junk)
    splits = st.builds(
        SplitTokens, split_dim=dims, expected_dims=st.sampled_from([None, 3]), split_output=st.booleans()
    )
    gathers = st.builds(GatherTokens, gather_dim=dims)
    entry = st.one_of(
        st.dictionaries(arguments, st.one_of(splits, splits, junk), max_size=2),
        gathers, st.lists(st.one_of(gathers, st.none()), max_size=2), st.just(EmbedOwnTokens()), junk,
    )  # fmt: skip
    plan = data.draw(st.one_of(st.dictionaries(names, entry, max_size=3), junk))
    model = Transformer()
    words = ("plan", "dim", "EmbedOwnTokens", "gather", "total")
    call(parallelize_context, words, model, mesh=mesh, plan=plan)
    with torch.no_grad():
        try:
            call(model, words, torch.ones(1, TOKENS, 5))
        except RuntimeError as error:  # a plan that splits channels: torch's layers say what shape they got
            assert "shape" in str(error) or "size" in str(error), error


@pytest.mark.slow
def test_on_two_ranks():
    assert run_ranks(2, _on_ranks) == [True] * 2


@settings(**EXAMPLES)
@given(data=st.data())
def test_shard_module(mesh, data):
    model = Transformer()
    units = data.draw(
        st.one_of(junk, st.lists(st.sampled_from([*model.modules(), torch.nn.Linear(1, 1), "head", None]), max_size=3))
    )
    names = ("strategy", "precision", "reduce_dtype", "offload", "forward_prefetch", "keep_operators")
    values = st.one_of(st.sampled_from(["optim", "bf16", "cpu", "auto", ["aten.addmm"], ["nonsense"], 0.5]), sizes)
    changes = data.draw(st.dictionaries(st.sampled_from([*names, "strategies"]), values, max_size=2))
    words = ("units", "parameter", "shard_module", *names)
    call(shard_module, words, model, mesh=mesh, units=units, **changes)
