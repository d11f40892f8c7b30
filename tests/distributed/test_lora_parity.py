"""Adapters on one shared, sharded base equal peft's own on three plain diffusers networks in one process."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch

from distill.methods import METHODS as METHODS_BY_NAME
from distill.methods.dmd2 import Dmd2Settings
from distill.methods.flow_matching import FlowMatchingSettings
from distill.methods.meanflow import MeanFlowSettings
from distill.methods.rcm import RcmSettings
from distill.methods.scm import ScmSettings
from fsdp_cp import microbatch
from models.lora.settings import LoraSettings
from tests.oracles.difference import compare
from tests.oracles.full_tensors import full_tensors
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import MESHES, Setup, make_config
from tests.oracles.sharded_run import make_trainer, trace_on_ranks

slow, long = pytest.mark.slow, pytest.mark.long
LORA = {"student": LoraSettings(rank=4, alpha=2.0), "fake": LoraSettings(rank=3)}


_WITH_PARAMETERS = ("proj_out", "condition_embedder.time_proj", *(
    f"blocks.{i}.{name}" for i in range(3)
    for name in ("norm2", "attn1.norm_q", "attn1.norm_k", "attn2.norm_q", "attn2.norm_k")
))  # fmt: skip


def _for_peft(lora):
    """peft takes names that end so for ``modules_to_save``, no patterns."""
    return {
        role: replace(settings, train=[n for n in _WITH_PARAMETERS if any(fnmatchcase(n, p) for p in settings.train)])
        for role, settings in lora.items()
    }


@pytest.fixture(scope="module")
def oracle(checkpoints):
    return oracle_trace(Setup(lora=LORA), checkpoints)


def _check(pools, checkpoints, oracle, **changes):
    setup = Setup(**{"lora": LORA} | changes)
    trace = trace_on_ranks(setup, checkpoints, pools[setup.world_size])
    difference = compare(trace, oracle)
    assert difference.largest < 1e-5, difference
    assert all(norm > 1e-3 for norm in trace.norms), "nothing to compare"
    return trace


@pytest.mark.parametrize(
    ("dp_shard", "cp", "checkpointing"),
    [
        (2, 2, False),
        *(pytest.param(*sizes, True, marks=long if sizes in ((1, 1), (2, 1)) else slow) for sizes in MESHES),
        *(pytest.param(*sizes, False, marks=long) for sizes in MESHES if sizes != (2, 2)),
    ],
)
def test_dmd2_with_a_shared_base(pools, checkpoints, oracle, dp_shard, cp, checkpointing):
    sizes = {"dp_shard": dp_shard, "cp": cp, "activation_checkpointing": checkpointing}
    trace = _check(pools, checkpoints, oracle, **sizes)
    assert trace.roles == ["student", "fake"] * 3
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for step in trace.gradients for name in step)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"activation_checkpointing": "selective"}, marks=long),
        {"activation_checkpointing": "selective", "activation_offload": True},
        pytest.param({"strategy": "no_shard"}, marks=slow),
        {"strategy": "optim"},
        pytest.param({"strategy": "optim_grads"}, marks=slow),
        pytest.param({"keep_gathered": True}, marks=long),
        pytest.param({"gather_stream": "compute", "gather_early": True}, marks=slow),
        pytest.param({"offload": "cpu", "reduce_unused": True}, marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [pytest.param({"dp_shard": 2}, marks=long), {"dp_replicate": 2}], ids=str)
def test_settings_of_the_shared_network(pools, checkpoints, oracle, changes, sizes):
    """With two micro-batches a step; replicas add up by position what of a unit has gradients."""
    sizes = sizes | ({"cp": 2} if "dp_shard" in sizes else {"dp_shard": 2})
    _check(pools, checkpoints, oracle, changes={"all": changes}, **sizes)


@pytest.mark.parametrize("adapted", ["student", pytest.param("fake", marks=slow)])
def test_one_of_them_trains_its_whole_network(pools, checkpoints, adapted):
    lora = {adapted: LORA[adapted]}
    setup = {"lora": lora, "steps": 4}
    trace = _check(pools, checkpoints, oracle_trace(Setup(**setup), checkpoints), dp_shard=2, cp=2, **setup)
    full = next(name for name in ("student", "fake") if name not in lora)
    assert "patch_embedding.weight" in trace.weights[full]


@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((2, 2), marks=slow), pytest.param((1, 1), marks=long)], ids=str)
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=long), True])
def test_modules_that_a_role_trains_whole(pools, checkpoints, sizes, checkpointing):
    lora = {
        "student": LoraSettings(rank=4, train=["proj_out", "*norm*"]),
        "fake": LoraSettings(rank=2, train=["condition_embedder.time_proj", "blocks.1.norm2"]),
    }
    setup = {"lora": lora, "steps": 4, "activation_checkpointing": checkpointing}
    plain = oracle_trace(Setup(**setup | {"lora": _for_peft(lora)}), checkpoints)
    trace = _check(pools, checkpoints, plain, dp_shard=sizes[0], cp=sizes[1], **setup)
    assert "proj_out.bias" in trace.gradients[0] and "blocks.1.norm2.weight" in trace.gradients[1]


METHODS = {
    "gan": Dmd2Settings(
        fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, gan_weight_student=0.5,
        gan_weight_head=0.5, gan_r1_weight=2.0, fake_knows_last_step=True,
    ),
    "rcm": RcmSettings(
        tangent_warmup=2, consistency_steps=1, student_every=2, guidance_scale=3.0, consistency_weight=0.7
    ),
    "scm": ScmSettings(tangent_warmup=3, guidance_scale=3.0),
    "meanflow": MeanFlowSettings(tangent_warmup=2, interval_ratio=0.8, guidance_scale=3.0, step_list=[1.0, 0.8, 0.5]),
    "flow_matching": FlowMatchingSettings(caption_dropout=0.5, shift=3.0),
}  # fmt: skip


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=long if name == "scm" else slow) for name in METHODS],
)
@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((1, 2), marks=long)], ids=str)
def test_methods(pools, checkpoints, method, sizes):
    """Derivatives in forward mode; a loss through the fake score, whose heads and second time are its alone.

    With recomputation: in the backward of the student's loss its blocks run again after the fake score's forward.
    """
    settings = {"method": METHODS[method], "steps": 5, "activation_checkpointing": True}
    needed = METHODS_BY_NAME[METHODS[method].name][0].trained_roles
    settings["lora"] = {name: LORA[name] for name in needed}
    if method == "gan":  # in fp64, as in test_gan_head.py
        settings["precision"] = "fp64"
        settings["changes"] = {"all": {"reduce_unused": True}}
    plain = oracle_trace(Setup(**settings), checkpoints)
    _check(pools, checkpoints, plain, dp_shard=sizes[0], cp=sizes[1], **settings)


@pytest.mark.long
def test_compiled(pools, checkpoints, oracle):
    """A graph for each role; with recomputation, which must run the adapters of its forward."""
    changes = {"all": {"compile": True, "activation_checkpointing": "full"}}
    _check(pools, checkpoints, oracle, cp=2, changes=changes)


@pytest.mark.parametrize("checkpointing", ["full", pytest.param("selective", marks=slow)])
def test_a_block_that_runs_again_runs_the_adapters_of_its_forward(pools, checkpoints, checkpointing):
    for bound, gradients, plain in pools[2].run(_another_role_between, checkpoints, checkpointing):
        assert bound == [], "the network served the teacher last"
        assert gradients.keys() == plain.keys() and len(gradients) == 60
        for name, gradient in gradients.items():
            assert torch.equal(gradient, plain[name]), name


def _another_role_between(folder, checkpointing):
    setup = Setup(lora=LORA, cp=2, activation_checkpointing=checkpointing)
    trainer = make_trainer(setup, folder, make_config(setup, folder))
    roles = trainer.method.roles
    batch = next(trainer._steps_of_data())[0]
    x, t = batch.latents, torch.full((len(batch.latents),), 0.5)

    def gradients(*between):
        with roles["student"].training({0}), microbatch(roles["student"].network, is_first=True, is_last=True):
            loss = roles["student"].velocity(x, t, batch.condition).square().mean()
            with torch.no_grad():
                for name in between:
                    roles[name].velocity(x, t, batch.condition)
            bound = roles["student"].network.get_submodule("blocks.0.attn1.to_q").active_adapters
            loss.backward()
        found = full_tensors({n: p.grad for n, p in roles["student"].named_parameters().items()})
        trainer.optimizers["student"].clear_gradients()
        return bound, found

    bound, found = gradients("fake", "teacher")
    return bound, found, gradients()[1]


def test_in_bf16_the_base_is_stored_so_and_adapters_are_not(pools, checkpoints):
    stored = pools[2].run(_stored_in_bf16, checkpoints)
    for base, adapters, gradients in stored:
        assert base == {"condition_embedder.time_embedder": {torch.float32}, "": {torch.bfloat16}}
        assert adapters == {torch.float32} and gradients == {torch.float32}


def _stored_in_bf16(folder):
    setup = Setup(lora=LORA, cp=2, precision="bf16", steps=1)
    trainer = make_trainer(setup, folder, make_config(setup, folder))
    network = trainer.roles["student"].networks[0]
    in_fp32 = "condition_embedder.time_embedder"
    base: dict[str, set] = {in_fp32: set(), "": set()}
    for name, parameter in network.base_parameters().items():
        base[in_fp32 if name.startswith(in_fp32) else ""].add(parameter.dtype)
    gradients = set()
    update = trainer._update

    def noted(*args):
        gradients.update(p.grad.dtype for p in trainer.roles["student"].parameters())
        update(*args)

    trainer._update = noted
    trainer.record()
    return base, {p.dtype for name in LORA for p in trainer.roles[name].parameters()}, gradients
