"""How a network is sharded, as settings: every value and pair that is refused, and every one that is not."""

import itertools
import re
from dataclasses import fields

import pytest
import torch

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import MeshShape
from fsdp_cp.sharding.settings import STRATEGIES, ShardSettings, find_operator, require_compiler

# Every field with a value other than its default, to be had under optim_grads_params alone.
CHANGED = {
    "strategy": "optim",
    "replicate": False,
    "shard_ranks": 8,
    "precision": "bf16",
    "reduce_dtype": "bf16",
    "master_dtype": "fp32",
    "activation_checkpointing": "full",
    "keep_operators": ["aten.addmm"],
    "activation_offload": True,
    "compile": True,
    "fp8": "torchao",
    "fp8_gather": True,
    "offload": "cpu",
    "gather_stream": "compute",
    "forward_prefetch": 2,
    "backward_prefetch": 3,
    "keep_gathered": True,
    "gather_early": True,
    "gradient_buffers": 1,
    "separate_reduce_group": True,
    "communication_buffers": "process_group",
    "reduce_unused": True,
    "gradient_scale": 0.5,
}
NEEDS = {"keep_operators": {"activation_checkpointing": "selective"}, "fp8_gather": {"fp8": "torchao"}}
"""What a changed field is of no use without."""

NO_OPERATORS: dict = {"keep_operators": []}
FP8_GATHER = {"fp8": "torchao", "fp8_gather": True}
DEFAULT_BUFFERS = {"communication_buffers": "default"}
REFUSED = [  # settings, device, what the message names, a change that it suggests
    ({"strategy": "zero3"}, "cpu", "strategy=zero3", {"strategy": "optim_grads_params"}),
    ({"precision": "fp16"}, "cpu", "precision=fp16", {"precision": "bf16"}),
    ({"reduce_dtype": "fp16"}, "cpu", "reduce_dtype=fp16", {"reduce_dtype": "auto"}),
    ({"master_dtype": "int8"}, "cpu", "master_dtype=int8", {"master_dtype": "keep"}),
    (
        {"activation_checkpointing": "some"},
        "cpu",
        "activation_checkpointing=some",
        {"activation_checkpointing": "selective"},
    ),
    ({"offload": "disk"}, "cpu", "offload=disk", {"offload": "cpu"}),
    ({"communication_buffers": "pool"}, "cuda", "communication_buffers=pool", {"communication_buffers": "default"}),
    ({"forward_prefetch": 0}, "cpu", "forward_prefetch=0", {"forward_prefetch": 1}),
    ({"backward_prefetch": -1}, "cpu", "backward_prefetch=-1", {"backward_prefetch": 1}),
    ({"gradient_buffers": 0}, "cpu", "gradient_buffers=0", {"gradient_buffers": 1}),
    ({"gradient_scale": 0.0}, "cpu", "gradient_scale=0.0", {"gradient_scale": 0.5}),
    ({"gradient_scale": -1.0}, "cpu", "gradient_scale=-1.0", {"gradient_scale": 0.5}),
    ({"gradient_scale": float("nan")}, "cpu", "gradient_scale=nan", {"gradient_scale": 0.5}),
    ({"gradient_scale": float("inf")}, "cpu", "gradient_scale=inf", {"gradient_scale": 0.5}),
    *(
        ({"keep_gathered": True, "strategy": s}, "cpu", "keep_gathered=true", {"strategy": "optim_grads_params"})
        for s in STRATEGIES
        if s != "optim_grads_params"
    ),
    ({"gather_stream": "side"}, "cpu", "gather_stream=side", {"gather_stream": "compute"}),
    ({"gather_stream": "compute", "strategy": "no_shard"}, "cpu", "gather_stream=compute", {"gather_stream": "own"}),
    ({"replicate": False, "strategy": "no_shard"}, "cpu", "replicate=false", {"replicate": True}),
    ({"shard_ranks": 1}, "cpu", "shard_ranks=1", {"strategy": "no_shard", "shard_ranks": None}),
    ({"shard_ranks": 2.0}, "cpu", "shard_ranks=2.0", {"shard_ranks": 2}),
    ({"shard_ranks": 2, "strategy": "no_shard"}, "cpu", "shard_ranks=2", {"shard_ranks": None}),
    ({"shard_ranks": 2, "replicate": False}, "cpu", "shard_ranks=2", {"replicate": True}),
    ({"gather_early": True, "strategy": "no_shard"}, "cpu", "gather_early=true", {"gather_early": False}),
    (
        {"separate_reduce_group": True, "strategy": "no_shard"},
        "cpu",
        "separate_reduce_group=true",
        {"separate_reduce_group": False},
    ),
    *(
        ({"communication_buffers": b, "strategy": s}, d, f"communication_buffers={b}", DEFAULT_BUFFERS)
        for b in ("process_group", "symmetric")
        for s, d in (("no_shard", "cuda"), ("optim_grads_params", "cpu"))
    ),
    (
        {"communication_buffers": "pooled", "strategy": "no_shard"},
        "cpu",
        "communication_buffers=pooled",
        DEFAULT_BUFFERS,
    ),
    (
        {"communication_buffers": "symmetric", "gradient_buffers": 2},
        "cuda",
        "gradient_buffers=2",
        {"gradient_buffers": 1},
    ),
    *(
        ({"keep_operators": ["aten.addmm"], "activation_checkpointing": a}, "cpu", "keep_operators", NO_OPERATORS)
        for a in ("none", "full", True, False)
    ),
    *(
        ({"precision": "fp64", "reduce_dtype": r}, "cpu", f"reduce_dtype={r}", {"reduce_dtype": "auto"})
        for r in ("fp32", "bf16")
    ),
    *(
        ({"precision": p, "master_dtype": m}, "cpu", f"master_dtype={m}", {"master_dtype": "keep"})
        for p, m in (("fp32", "bf16"), ("fp64", "bf16"), ("fp64", "fp32"))
    ),
    ({"fp8": "int8"}, "cpu", "fp8=int8", {"fp8": "torchao"}),
    *(({"fp8": "transformer_engine"}, d, "fp8=transformer_engine is not", {"fp8": "torchao"}) for d in ("cpu", "cuda")),
    ({"fp8": "torchao", "precision": "fp64"}, "cpu", "fp8=torchao", {"fp8": "none"}),
    ({"fp8_gather": True}, "cpu", "fp8_gather=true", {"fp8": "torchao"}),
    (FP8_GATHER | {"strategy": "no_shard"}, "cpu", "fp8_gather=true", {"fp8_gather": False}),
    (FP8_GATHER | {"offload": "cpu"}, "cpu", "fp8_gather=true", {"fp8_gather": False}),
    (FP8_GATHER | {"reduce_unused": True}, "cpu", "fp8_gather=true", {"fp8_gather": False}),
    ({"forward_prefetch": 2, "strategy": "no_shard"}, "cpu", "forward_prefetch=2", {"forward_prefetch": 1}),
    *(
        ({"backward_prefetch": 2, "strategy": s}, "cpu", "backward_prefetch=2", {"backward_prefetch": 1})
        for s in STRATEGIES
        if s != "optim_grads_params"
    ),
    ({"backward_prefetch": 2, "keep_gathered": True}, "cpu", "backward_prefetch=2", {"backward_prefetch": 1}),
    *(
        (
            {"activation_checkpointing": "selective", "keep_operators": [o]},
            "cpu",
            f"operator {o!r}",
            {"keep_operators": ["aten.addmm"]},
        )
        for o in ("aten.mmm", "mm", "aten", "", "aten.add.Tensorr", "fsdp_cp.ring_attentoin", "aten.mm.default.x")
    ),
]


@pytest.mark.parametrize(("given", "device", "named", "change"), REFUSED)
def test_refused_by_name_with_a_value_that_works(given, device, named, change):
    with pytest.raises(UserError) as caught:
        ShardSettings(**given).check(device, "student.")
    message = str(caught.value)
    assert "\n" not in message and named in message and "student." in message and "@" not in message
    key, value = next(iter(change.items()))
    words = {"True": "true", "False": "false", "[]": "empty", "None": "null", "['aten.addmm']": "aten.addmm"}
    text = words.get(str(value), str(value))
    assert text in message or key in ("gradient_scale",), message
    ShardSettings(**given | change).check(device, "student.")


def test_the_message_of_another_place_has_its_name():
    with pytest.raises(UserError, match=r"^strategy=zero is unknown; use no_shard or optim or optim_grads or"):
        ShardSettings(strategy="zero").check("cpu")
    with pytest.raises(UserError, match=r"^fake\.gather_early=true .* fake\.strategy=no_shard"):
        ShardSettings(strategy="no_shard", gather_early=True).check("cpu", "fake.")


def test_copies_on_a_mesh():
    shape = MeshShape(dp_replicate=2, dp_shard=3, ring=1, ulysses=4)
    known = [({}, 2), ({"replicate": False}, 1), ({"strategy": "no_shard"}, 24), ({"shard_ranks": 8}, 3)]
    for given, copies in known:
        assert ShardSettings(**given).copies(shape) == copies
    message = r"^teacher\.shard_ranks=7 does not divide the world of 24 ranks; use one among 2, 3, 4, 6, 8, 12, 24, or"
    with pytest.raises(UserError, match=message):
        ShardSettings(shard_ranks=7).copies(shape, "teacher.")
    with pytest.raises(UserError, match=r"does not divide the world of 1 ranks; use null$"):
        ShardSettings(shard_ranks=2).copies(MeshShape(dp_replicate=1, dp_shard=1, ring=1, ulysses=1))


def test_every_field_is_here():
    assert CHANGED.keys() == {item.name for item in fields(ShardSettings)}
    default = ShardSettings()
    assert all(getattr(default, name) != value for name, value in CHANGED.items())
    default.check("cpu")


def refused(given: dict, device: str) -> bool:
    try:
        ShardSettings(**given).check(device)
    except UserError:
        return True
    return False


# Of the pairs of a strategy and one other changed setting, those that are refused on CUDA; all others pass.
AGAINST = {
    "no_shard": {
        "replicate",
        "shard_ranks",
        "gather_stream",
        "forward_prefetch",
        "backward_prefetch",
        "keep_gathered",
        "gather_early",
        "separate_reduce_group",
        "communication_buffers",
        "fp8_gather",
    },
    "optim": {"keep_gathered", "backward_prefetch"},
    "optim_grads": {"keep_gathered", "backward_prefetch"},
    "optim_grads_params": set(),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_other_setting_goes_with_every_strategy_but_those_listed(strategy):
    for name, value in CHANGED.items():
        if name == "strategy":
            continue
        given = {"strategy": strategy, name: value, **NEEDS.get(name, {})}
        assert refused(given, "cuda") == (name in AGAINST[strategy]), name


def test_every_pair_of_settings_goes_together_but_those_listed():
    """Under optim_grads_params, on CUDA."""
    against = {
        ("activation_checkpointing", "keep_operators"),
        ("backward_prefetch", "keep_gathered"),
        ("fp8_gather", "offload"),
        ("fp8_gather", "reduce_unused"),
        ("replicate", "shard_ranks"),
    }
    names = sorted(CHANGED.keys() - {"strategy"})
    for pair in itertools.combinations(names, 2):
        given = {name: CHANGED[name] for name in pair}
        given = {**{k: v for name in pair for k, v in NEEDS.get(name, {}).items()}, **given}
        assert refused(given, "cuda") == (pair in against), pair


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pooled_buffers_go_with_every_setting_that_gathers(device):
    for name, value in CHANGED.items():
        if name != "communication_buffers":
            assert not refused({"communication_buffers": "pooled", name: value, **NEEDS.get(name, {})}, device), name


@pytest.mark.parametrize(("given", "meant"), [(True, "full"), (False, "none"), ("selective", "selective")])
def test_checkpointing_as_yes_and_no(given, meant):
    settings = ShardSettings(activation_checkpointing=given)
    settings.check("cpu")
    assert settings.activation_checkpointing == meant


def test_operators_by_name():
    assert find_operator("aten.mm", "x") is torch.ops.aten.mm.default
    assert find_operator("aten::mm", "x") is torch.ops.aten.mm.default
    assert find_operator("aten.add.Tensor", "x") is torch.ops.aten.add.Tensor
    assert find_operator("fsdp_cp.ring_attention", "x") is torch.ops.fsdp_cp.ring_attention.default


@pytest.mark.parametrize(("device", "usual", "variable"), [("cuda", "gcc", "CC"), ("cpu", "g++", "CXX")])
def test_compiled_units_need_a_compiler(device, usual, variable, tmp_path, monkeypatch):
    """As Triton and inductor look for one; ``CC="ccache gcc"`` is the program ccache."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UserError, match=f"fake.compile=true needs a C.* there is no {re.escape(usual)}"):
        require_compiler(device, "fake.compile")
    for name in (usual, "ccache"):
        (tmp_path / name).touch(mode=0o755)
    require_compiler(device, "fake.compile")
    monkeypatch.setenv(variable, "ccache mine")
    require_compiler(device, "fake.compile")
    monkeypatch.setenv(variable, "mine")
    with pytest.raises(UserError, match=f"there is no mine; install one, name it in {variable}, or use fake.compile=f"):
        require_compiler(device, "fake.compile")
