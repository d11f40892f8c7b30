"""Roles whose blocks compute in emulated fp8: near bf16 on every mesh, and otherwise unchanged.

torchao emulates fp8 itself. Transformer Engine needs CUDA, so its tests show the wiring, with a stand-in on the ranks.

The miniature networks have three blocks; the middle one has ten fp8 layers.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from distill.config.schema import EmaSettings
from fsdp_cp import build_mesh, microbatch, shard_module
from fsdp_cp.checkpoint.folder import reader, step_folder
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.errors import UserError
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.sharding.settings import ShardSettings
from fsdp_cp.sharding.state import gathered_units
from models.export import main as export
from models.lora.settings import LoraSettings
from models.roles.role_plan import plan_role
from tests.oracles.full_tensors import full_tensors
from tests.oracles.runs import Setup, make_config
from tests.oracles.samples import video
from tests.oracles.sharded_run import make_trainer, trace_on_ranks
from tests.oracles.tiny_wan import CONDITION_SHAPES, LATENT_SHAPE, text_condition, tiny_role
from tests.oracles.transformer_engine import install
from tests.tiers import long, long_case, slow

pytestmark = slow
FP8, GATHER = {"fp8": "torchao"}, {"fp8": "torchao", "fp8_gather": True}
TE = {"fp8": "transformer_engine"}
LAYERS = 3  # the first and the last block stay in bf16
EMA = EmaSettings(enabled=True, decay=0.7, start=1)
LORA = {"student": LoraSettings(rank=16, alpha=8.0), "fake": LoraSettings(rank=4)}
LARGEST_LOSS, LARGEST_GRADIENT, LEAST_COSINE = 0.03, 0.15, 0.99
"""Bounds of the differences between the first steps of an fp8 run and a bf16 run.

Largest difference of losses, largest difference of whole gradients by norm, and least cosine of these gradients.
benchmarks/results/fp8.md has the measured values.
"""


def _run(pools, checkpoints, changes, **sizes):
    setup = Setup(**{"precision": "bf16", "steps": 2, "changes": {"all": changes}} | sizes)
    return trace_on_ranks(setup, checkpoints, _ranks(pools, setup.world_size, changes))


def _ranks(pools, size, changes):
    if changes.get("fp8") == "transformer_engine":
        pools[size].run(install)
    return pools[size]


def _whole(gradients):
    return torch.cat([gradients[name].flatten().double() for name in sorted(gradients)])


def _errors(trace, oracle):
    """Return errors of the first step: the loss's, the gradient's by norm, and 1 - its cosine."""
    assert trace.roles == oracle.roles and trace.gradients[0].keys() == oracle.gradients[0].keys()
    ours, theirs = (_whole(each.gradients[0]) for each in (trace, oracle))
    cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=0)
    return abs(trace.losses[0] / oracle.losses[0] - 1), relative_error(ours, theirs), float(1 - cosine)


def _check_near(trace, oracle):
    loss, norm, angle = _errors(trace, oracle)
    print("errors", loss, norm, angle)
    assert 0 < norm < LARGEST_GRADIENT and loss < LARGEST_LOSS and angle < 1 - LEAST_COSINE, (loss, norm, angle)


@pytest.mark.parametrize(
    ("changes", "dp_shard", "cp"),
    [
        long_case(GATHER, 2, 1),
        (FP8, 1, 2),
        long_case(TE, 1, 2),
        (TE, 2, 2),
    ],
)
def test_near_bf16_on_every_mesh(pools, checkpoints, changes, dp_shard, cp):
    sizes = {"dp_shard": dp_shard, "cp": cp, "activation_checkpointing": True}
    _check_near(_run(pools, checkpoints, changes, **sizes), _run(pools, checkpoints, {}, **sizes))


@long
@pytest.mark.parametrize(
    ("changes", "cases"),
    [
        pytest.param(
            GATHER,
            (
                {"strategy": "optim", "activation_checkpointing": "full", "activation_offload": True},
                {"keep_gathered": True, "gather_stream": "compute"},
            ),
        ),
        pytest.param(
            FP8,
            ({"strategy": "no_shard"}, {"offload": "cpu"}),
        ),
        (
            TE,
            (
                {"strategy": "no_shard", "activation_checkpointing": "full", "activation_offload": True},
                {"strategy": "optim", "activation_checkpointing": "selective"},
                {"strategy": "optim_grads", "activation_checkpointing": "full"},
                {"offload": "cpu", "keep_gathered": True},
            ),
        ),
    ],
    ids=["torchao, gathered in fp8", "torchao", "Transformer Engine"],
)
def test_how_it_is_sharded_changes_nothing(pools, checkpoints, changes, cases):
    """In fp32 only the products round, so results equal those of ``optim_grads_params`` up to one step of fp8."""
    sizes = {"dp_shard": 2, "precision": "fp32"}
    expected = _run(pools, checkpoints, changes, **sizes)
    for more in cases:
        found = _run(pools, checkpoints, changes | more, **sizes)
        _, norm, _ = _errors(found, expected)
        assert norm < 0.01 and found.losses == pytest.approx(expected.losses, rel=1e-3), (more, norm)


@pytest.mark.parametrize("changes", [long_case(GATHER), TE])
def test_adapters_on_an_fp8_base(pools, checkpoints, changes):
    """The three roles share one base. Its layers compute in fp8; the adapters do not."""
    sizes = {"cp": 2, "lora": LORA, "activation_checkpointing": True}
    trace = _run(pools, checkpoints, changes, **sizes)
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in trace.gradients[0])
    _check_near(trace, _run(pools, checkpoints, {}, **sizes))
    for adapters, base in pools[2].run(_fp8_layers_with_adapters, checkpoints, changes):
        assert adapters == 0 and base == 10


def _fp8_layers_with_adapters(folder, changes):
    setup = Setup(lora=LORA, cp=2, precision="bf16", changes={"all": changes})
    network = make_trainer(setup, folder).roles["student"].network
    fp8 = [name for name, module in network.named_modules() if type(module).__name__ == "Float8Linear"]
    return sum("lora_" in name for name in fp8), len(fp8)


def _role(folder, trainable=True, **settings):
    mesh = build_mesh(cp=torch.distributed.get_world_size(), heads=4, device_type="cpu")
    plan = plan_role(
        "student", checkpoint=str(folder / "student"), sharding=ShardSettings(precision="bf16", **settings)
    )
    role = tiny_role(plan, mesh, trainable=trainable)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, *LATENT_SHAPE, generator=generator)
    condition = text_condition(torch.randn(2, *CONDITION_SHAPES["text"], generator=generator))
    return role, (x, torch.tensor([0.3, 0.8]), condition)


def _jvp(folder, settings):
    role, (x, t, condition) = _role(folder, **settings)
    with torch.no_grad():
        plain = role.velocity(video(x), t, condition).video
        with forward_ad.dual_level():
            dual = role.velocity(
                video(forward_ad.make_dual(x, x.flip(0))), forward_ad.make_dual(t, torch.ones(2)), condition
            ).video
            dual = forward_ad.unpack_dual(dual)
        return plain, dual.primal, dual.tangent, role.velocity(video(x), t, condition).video


def test_derivatives_in_forward_mode_are_those_of_bf16(pools, checkpoints):
    """Derivatives are equal bit by bit, between two forwards in fp8. Weights that were gathered in fp8 are refused."""
    plain = pools[2].run(_jvp, checkpoints, {})
    for settings in (FP8, TE):
        for ours, theirs in zip(_ranks(pools, 2, settings).run(_jvp, checkpoints, settings), plain, strict=True):
            assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[2], theirs[2])
            assert torch.equal(ours[0], ours[3]) and not torch.equal(ours[0], theirs[0])
    with pytest.raises(RuntimeError, match="fp8_gather"):
        pools[1].run(_jvp, checkpoints, GATHER)


def _looked_at(folder, settings, trainable):
    """Return names, dtypes and classes of parameters outside of forwards, and the weights."""
    role, (x, t, condition) = _role(folder, trainable, **settings)

    def look():
        return {
            name: (parameter.dtype, type(parameter).__name__, type(parameter.to_local()).__name__)
            for name, parameter in role.network.named_parameters()
        }

    before = look()
    for _ in range(2):
        if trainable:
            with microbatch(role.network, is_first=True, is_last=True):
                role.velocity(video(x), t, condition).video.square().mean().backward()
            grads = {parameter.grad.dtype for parameter in role.parameters() if parameter.grad is not None}
            assert grads == {torch.float32}
            role.network.zero_grad()
        else:
            with torch.no_grad():
                role.velocity(video(x), t, condition)
    assert look() == before and gathered_units(role.network) == []
    assert list(role.network.state_dict()) == list(before)
    return before, full_tensors(role.weights())


@pytest.mark.parametrize("trainable", [True, False])
def test_weights_are_what_they_are_without(pools, checkpoints, trainable):
    """Names, dtypes, classes and values stay: checkpoints, averages and optimizers see no fp8."""
    plain = pools[2].run(_looked_at, checkpoints, {}, trainable)
    for settings in (FP8, GATHER, TE):
        for (names, weights), (expected, values) in zip(
            _ranks(pools, 2, settings).run(_looked_at, checkpoints, settings, trainable), plain, strict=True
        ):
            assert names == expected and weights.keys() == values.keys()
            assert all(torch.equal(weights[name], value) for name, value in values.items())


def _saved(folder, run_dir, setup, first=0):
    """Train from step ``first``; save after steps 2 and 3. Return the trace, the step, and names of state dicts."""
    trainer = make_trainer(setup, folder, make_config(setup, folder, run_dir), first)
    trace = trainer.record(save_at=(2, 3))
    return trace, {name: list(get_model_state_dict(role.network)) for name, role in trainer.roles.items()}


@long
@pytest.mark.parametrize("dp_shard", [1, 2])
def test_checkpoints_and_exports_do_not_know_transformer_engine(pools, checkpoints, tmp_path, dp_shard):
    """A resume continues bit by bit. Without fp8 the same checkpoint has the same names and values."""
    setup = Setup(dp_shard=dp_shard, cp=2, precision="bf16", steps=3, ema=EMA, changes={"all": TE})
    plain = replace(setup, changes={})
    pool, te = pools[setup.world_size], _ranks(pools, setup.world_size, TE)
    folders = {name: tmp_path / name for name in ("te", "plain", "resumed")}
    trace, names = te.run(_saved, checkpoints, folders["te"], setup)[0]
    _, plain_names = pool.run(_saved, checkpoints, folders["plain"], plain)[0]
    assert names == plain_names
    saved, expected = (
        reader(step_folder(folders[name] / "checkpoints", 3)).read_metadata().state_dict_metadata
        for name in ("te", "plain")
    )
    assert saved.keys() == expected.keys() and not any("_extra_state" in name for name in saved)

    shutil.copytree(folders["te"] / "checkpoints", folders["resumed"] / "checkpoints")
    resumed, _ = te.run(_saved, checkpoints, folders["resumed"], setup, 2)[0]
    assert resumed.losses == trace.losses[2:]
    loaded, _ = pool.run(_saved, checkpoints, folders["te"], plain, 3)[0]  # no step is left
    assert trace.weights.keys() == {"student", "fake", "average of student"} and not loaded.losses
    for found in (resumed, loaded):
        for group, weights in trace.weights.items():
            assert found.weights[group].keys() == weights.keys()
            assert all(torch.equal(found.weights[group][name], value) for name, value in weights.items()), group

    for weights, group in (("raw", "student"), ("ema", "average of student")):
        assert export([str(folders["te"]), str(tmp_path / weights), "--weights", weights]) == 0
        network, info = WanTransformer3DModel.from_pretrained(tmp_path / weights, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert all(torch.equal(p, trace.weights[group][name]) for name, p in network.named_parameters())


def _gathered_bytes(folder, settings):
    """Return all-gathered and all-reduced bytes of one forward, and elements of fp8 layers' weights."""
    role, (x, *others) = _role(folder, **settings)
    inputs = (video(x), *others)
    layers = [m for m in role.network.modules() if isinstance(m, nn.Linear) and type(m).__name__ == "Float8Linear"]
    elements = sum(layer.weight.numel() for layer in layers)
    with torch.no_grad():
        role.velocity(*inputs)  # a first forward settles what is gathered ahead
        with CollectiveCounter() as sent:
            role.velocity(*inputs)
    fsdp = sent.by_group
    gathered = sum(size for (kind, _), size in fsdp.items() if kind == "all_gather")
    reduced = sum(size for (kind, _), size in fsdp.items() if kind == "all_reduce")
    return gathered, reduced, elements, len(layers), sent.calls["all_reduce"]


@long
def test_bytes_of_gathers(pools, checkpoints):
    """An fp8 layer saves one byte per element; its scale costs 4 bytes, in one call before the forward."""
    bf16, fp8, gather = (pools[2].run(_gathered_bytes, checkpoints, s)[0] for s in ({}, FP8, GATHER))
    elements, layers = gather[2:4]
    assert elements == 8 * 48 * 48 + 2 * 48 * 64 and layers == 10
    assert fp8[:2] == bf16[:2] and bf16[0] - gather[0] == elements // 2
    assert gather[1] - bf16[1] == 4 * layers and gather[4] - bf16[4] == 1
    # 64 rows do not divide over 3 ranks, so that layer is gathered as it computes; 48 do.
    bf16, gather = (pools[3].run(_gathered_bytes, checkpoints, s)[0] for s in ({}, GATHER))
    assert bf16[0] - gather[0] == (8 * 48 * 48 + 48 * 64) * 2 // 3 and gather[1] - bf16[1] == round(2 * 4 * 9 * 2 / 3)


def _hooked():
    for hook in ("register_forward_hook", "register_full_backward_pre_hook"):
        blocks = [nn.Sequential(nn.Linear(16, 16)) for _ in range(3)]
        getattr(blocks[1][0], hook)(lambda *_: None)
        model = nn.Sequential(*blocks)
        with pytest.raises(UserError, match=r"1\.0"):
            shard_module(model, mesh=build_mesh(device_type="cpu"), units=blocks, fp8="torchao")
    return True


def test_a_layer_with_hooks_is_refused(pools):
    assert all(pools[1].run(_hooked))
