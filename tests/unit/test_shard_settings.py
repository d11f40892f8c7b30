"""Sharding settings: every refused value and pair, and every accepted one."""

import itertools
from dataclasses import fields
from typing import get_args

import pytest
import torch

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import MeshShape
from fsdp_cp.sharding.settings import ShardSettings, Strategy, find_operator, require_compiler
from tests.unit.refused import refused

# Every field with a value other than its default that optim_grads_params allows.
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
    "gradient_buffers": 1,
    "separate_reduce_group": True,
    "communication_buffers": "process_group",
}
NEEDS = {
    "keep_operators": {"activation_checkpointing": "selective"},
    "activation_offload": {"activation_checkpointing": "full"},
    "fp8_gather": {"fp8": "torchao"},
}
"""Settings that a changed field needs to have an effect."""

DEFAULT_BUFFERS = {"communication_buffers": "default"}
SELECTIVE = {"activation_checkpointing": "selective"}
REFUSED = [  # settings, device, the setting that the message names, a change that works
    ({"precision": "fp16"}, "cpu", "precision", {"precision": "bf16"}),
    ({"communication_buffers": "pooled"}, "cuda", "communication_buffers", {"communication_buffers": "default"}),
    ({"backward_prefetch": -1}, "cpu", "backward_prefetch", {"backward_prefetch": 1}),
    ({"shard_ranks": 1}, "cpu", "shard_ranks", {"strategy": "no_shard", "shard_ranks": None}),
    ({"shard_ranks": 2.0}, "cpu", "shard_ranks", {"shard_ranks": 2}),
    ({"communication_buffers": "process_group"}, "cpu", "communication_buffers", DEFAULT_BUFFERS),
    (
        {"communication_buffers": "symmetric", "gradient_buffers": 2},
        "cuda",
        "gradient_buffers",
        {"gradient_buffers": 1},
    ),
    ({"keep_operators": "aten.addmm"}, "cpu", "keep_operators", {"keep_operators": ["aten.addmm"]}),
    ({"precision": "fp64", "reduce_dtype": "fp32"}, "cpu", "reduce_dtype", {"reduce_dtype": "auto"}),
    ({"precision": "fp32", "master_dtype": "bf16"}, "cpu", "master_dtype", {"master_dtype": "keep"}),
    ({"precision": "fp64", "master_dtype": "fp32"}, "cpu", "master_dtype", {"master_dtype": "keep"}),
    ({"activation_offload": True}, "cpu", "activation_checkpointing", {"activation_checkpointing": "full"}),
    (SELECTIVE | {"activation_offload": True}, "cpu", "activation_checkpointing", {"activation_offload": False}),
    ({"fp8": "flash"}, "cuda", "fp8", {"fp8": "transformer_engine"}),
    ({"fp8": "transformer_engine", "fp8_gather": True}, "cuda", "fp8_gather", {"fp8": "torchao"}),
    ({"fp8": "transformer_engine", "precision": "fp64"}, "cuda", "fp8", {"precision": "bf16"}),
    ({"fp8": "torchao", "precision": "fp64"}, "cpu", "fp8", {"fp8": "none"}),
    ({"fp8": "torchao", "fp8_gather": True, "offload": "cpu"}, "cpu", "fp8_gather", {"offload": "none"}),
    *(
        (
            SELECTIVE | {"keep_operators": [operator]},
            "cpu",
            f"operator {operator!r}",
            {"keep_operators": ["aten.addmm"]},
        )
        for operator in ("aten.mmm", "mm", "", "aten.add.Tensorr", "fsdp_cp.ring_attentoin", "aten.mm.default.x")
    ),
]


@pytest.mark.parametrize(("given", "device", "named", "change"), REFUSED)
def test_refused_by_name_where_another_value_works(given, device, named, change):
    with refused(f"student.{named}" if "operator " not in named else named):
        ShardSettings(**given).check(device, "student.")
    ShardSettings(**given | change).check(device, "student.")


def test_copies_on_a_mesh():
    shape = MeshShape(dp_replicate=2, dp_shard=3, ring=1, ulysses=4)
    known = [({}, 2), ({"replicate": False}, 1), ({"strategy": "no_shard"}, 24), ({"shard_ranks": 8}, 3)]
    for given, copies in known:
        assert ShardSettings(**given).copies(shape) == copies
    with refused("teacher.shard_ranks=7"):
        ShardSettings(shard_ranks=7).copies(shape, "teacher.")
    with refused("shard_ranks=2"):
        ShardSettings(shard_ranks=2).copies(MeshShape(dp_replicate=1, dp_shard=1, ring=1, ulysses=1))


def test_every_field_is_here():
    assert CHANGED.keys() == {item.name for item in fields(ShardSettings)}
    default = ShardSettings()
    assert all(getattr(default, name) != value for name, value in CHANGED.items())
    default.check("cpu")


def is_refused(given: dict, device: str) -> bool:
    try:
        ShardSettings(**given).check(device)
    except UserError:
        return True
    return False


# Settings that have no effect under a strategy if no other setting is changed.
IDLE = {
    "no_shard": set(
        "replicate shard_ranks gather_stream forward_prefetch backward_prefetch keep_gathered separate_reduce_group"
        " communication_buffers fp8_gather".split()
    ),
    "optim": {"keep_gathered", "backward_prefetch"},
    "optim_grads": {"keep_gathered", "backward_prefetch"},
    "optim_grads_params": set(),
}


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_every_other_setting_goes_with_every_strategy_and_those_listed_have_no_effect(strategy):
    for name, value in CHANGED.items():
        if name == "strategy":
            continue
        given = {"strategy": strategy, name: value, **NEEDS.get(name, {})}
        settings = ShardSettings(**given)
        settings.check("cuda")
        effective = settings.effective()
        idle = {field.name for field in fields(settings) if getattr(effective, field.name) != given.get(field.name)}
        idle &= given.keys()
        assert idle == {name} & IDLE[strategy], name
        keeps = strategy in ("optim", "optim_grads") or given == {
            "strategy": "optim_grads_params",
            "keep_gathered": True,
        }
        assert effective.keeps_gathered == settings.keeps_gathered == keeps


def test_every_pair_of_settings_goes_together_but_those_listed():
    against = {("activation_offload", "keep_operators"), ("fp8_gather", "offload"), ("replicate", "shard_ranks")}
    names = sorted(CHANGED.keys() - {"strategy"})
    for pair in itertools.combinations(names, 2):
        given = {name: CHANGED[name] for name in pair}
        given = {**{k: v for name in pair for k, v in NEEDS.get(name, {}).items()}, **given}
        assert is_refused(given, "cuda") == (pair in against), pair


def test_checkpointing_as_yes_and_no():
    for given, meant in ((True, "full"), (False, "none"), ("selective", "selective")):
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
    """The check finds a compiler like Triton and inductor. ``CC="ccache gcc"`` means the program ccache."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    with refused("fake.compile"):
        require_compiler(device, "fake.compile")
    for name in (usual, "ccache"):
        (tmp_path / name).touch(mode=0o755)
    require_compiler(device, "fake.compile")
    monkeypatch.setenv(variable, "ccache mine")
    require_compiler(device, "fake.compile")
    monkeypatch.setenv(variable, "mine")
    with refused(variable):
        require_compiler(device, "fake.compile")
