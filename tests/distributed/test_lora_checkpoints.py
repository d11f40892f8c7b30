"""Adapters in checkpoints and in the files that others read: resumed on any mesh, the same network everywhere."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file

from distill.config import EmaSettings
from distill.resume_checks import check_resume
from fsdp_cp.checkpoint import reader, step_folder
from fsdp_cp.errors import UserError
from models.condition import text_condition
from models.export import main as export
from models.lora.settings import LoraSettings
from models.published import published
from models.role_plan import plan_role
from tests.oracles.difference import compare
from tests.oracles.full_tensors import full_tensors
from tests.oracles.runs import Setup, Trace, make_config
from tests.oracles.sharded_run import make_trainer
from tests.oracles.tiny_wan import LATENT_SHAPE, TEXT_SHAPE

slow = pytest.mark.slow
STEPS, STOP = 6, 3
LORA = {"student": LoraSettings(rank=4, alpha=2.0), "fake": LoraSettings(rank=3, init="gaussian")}
WHOLE = {"student": LoraSettings(rank=4, alpha=2.0, train=["proj_out", "*norm*"])}


def _run(setup, folder, run_dir, first, last):
    """Steps ``first`` to ``last``; saves at ``last``. What the student says then, raw and averaged, is in the trace."""
    config = make_config(setup, folder)
    config.run_dir, config.steps = str(run_dir), last
    config.student.ema = EmaSettings(enabled=True, decay=0.7, start=1)
    config.student.checkpoint = str(folder / "teacher")
    resume_from = step_folder(Path(run_dir) / "checkpoints", first) if first else None
    trainer = make_trainer(setup, folder, config, resume_from)
    trace = trainer.record()
    trainer._save()
    trainer.checkpoints.wait()
    average = trainer.averages["student"]
    trace.weights["ema"] = full_tensors(average.weights)
    x, t, condition = _inputs()
    with torch.no_grad():
        says = {"raw": trainer.roles["student"].velocity(x, t, condition)}
        with average.swapped_in():
            says["ema"] = trainer.roles["student"].velocity(x, t, condition)
        says["teacher"] = trainer.method.roles["teacher"].velocity(x, t, condition)
    return trace, says


def _inputs():
    generator = torch.Generator().manual_seed(0)
    x, text = torch.randn(2, *LATENT_SHAPE, generator=generator), torch.randn(2, *TEXT_SHAPE, generator=generator)
    return x, torch.tensor([0.7, 0.3]), text_condition(text)


def _plain(network):
    x, t, condition = _inputs()
    with torch.no_grad():
        return network(hidden_states=x, timestep=1000 * t, encoder_hidden_states=condition.tensors["text"]).sample


@pytest.fixture(scope="module")
def straight(pools, checkpoints, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("straight")
    setup = Setup(dp_shard=2, cp=2, lora=LORA)
    return run_dir, *pools[4].run(_run, setup, checkpoints, run_dir, 0, STEPS)[0]


@pytest.fixture(scope="module")
def stopped(pools, checkpoints, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("stopped")
    pools[4].run(_run, Setup(dp_shard=2, cp=2, lora=LORA), checkpoints, run_dir, 0, STOP)
    return run_dir


def test_the_same_mesh_bit_by_bit(pools, checkpoints, straight, stopped):
    trace, _ = pools[4].run(_run, Setup(dp_shard=2, cp=2, lora=LORA), checkpoints, stopped, STOP, STEPS)[0]
    assert trace.losses == straight[1].losses[STOP:] and trace.norms == straight[1].norms[STOP:]
    for group, weights in straight[1].weights.items():
        for name, value in weights.items():
            assert torch.equal(trace.weights[group][name], value), (group, name)


@pytest.mark.parametrize(
    "sizes", [pytest.param(s, marks=slow) for s in ({"cp": 2}, {}, {"dp_replicate": 2, "dp_shard": 2})], ids=str
)
def test_another_mesh(pools, checkpoints, straight, stopped, sizes):
    setup = Setup(lora=LORA, **sizes)
    trace, _ = pools[setup.world_size].run(_run, setup, checkpoints, stopped, STOP, STEPS)[0]
    whole = straight[1]
    rest = Trace(whole.roles[STOP:], whole.losses[STOP:], whole.norms[STOP:], whole.gradients[STOP:], whole.weights)
    assert compare(trace, rest).largest < 1e-5


def test_a_checkpoint_holds_adapters_alone(straight):
    checkpoint = step_folder(straight[0] / "checkpoints", STEPS)
    saved = reader(checkpoint).read_metadata().state_dict_metadata
    assert {name.split(".")[1] for name in saved} == {"weights", "ema", "adamw"}
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in saved)
    adapters = json.loads((checkpoint / "state.json").read_text())["adapters"]
    assert (adapters["student"]["rank"], adapters["student"]["scale"], adapters["fake"]["rank"]) == (4, 0.5, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 8}, "student.lora.rank=4, not 8"),
        ({"rank": 0, "alpha": None}, "student.lora.rank=4, not 0"),
        ({"alpha": 4.0}, "student.lora.alpha=2, not student.lora.alpha=4"),
        ({"targets": ["*.attn1.*"]}, "student.lora.targets"),
        ({"train": ["proj_out"]}, "student.lora.train"),
        ({"base": "fake"}, "another base than .*fake.* .it was .*teacher"),
    ],
    ids=str,
)
def test_other_adapters_are_not_gone_on_with(checkpoints, straight, changes, message):
    base = changes.get("base", "teacher")
    lora = {"rank": 4, "alpha": 2.0} | {key: value for key, value in changes.items() if key != "base"}
    plan = plan_role("student", checkpoint=str(checkpoints / base), lora=LoraSettings(**lora))
    config = make_config(Setup(steps=STEPS + 1), checkpoints)
    with pytest.raises(UserError, match=message):
        check_resume(config, step_folder(straight[0] / "checkpoints", STEPS), [plan])


def test_adapters_begin_as_the_base(pools, checkpoints, tmp_path):
    """B is 0: what the student says is what the teacher does, and not what random adapters would."""
    for says in pools[2].run(_untrained, checkpoints):
        assert torch.equal(says["student"], says["teacher"]) and torch.equal(says["fake"], says["teacher"])


def _untrained(folder):
    setup = Setup(cp=2, lora=LORA)
    trainer = make_trainer(setup, folder, make_config(setup, folder))
    for name in LORA:
        for key, parameter in trainer.roles[name].named_parameters().items():
            if ".lora_B." in key:
                parameter.detach().zero_()
    x, t, condition = _inputs()
    with torch.no_grad():
        return {name: role.velocity(x, t, condition) for name, role in trainer.method.roles.items()}


def _pipeline(folder):
    network = WanTransformer3DModel.from_pretrained(folder)
    return WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=FlowMatchEulerDiscreteScheduler(), transformer=network
    )


@pytest.mark.parametrize("weights", [pytest.param("raw", marks=pytest.mark.long), "ema"])
@pytest.mark.parametrize("kind", [None, "merged", "diffusers-lora", "wan-lora"])
def test_every_format_says_what_the_student_said(checkpoints, straight, tmp_path, kind, weights):
    run_dir, _, says = straight
    chosen = [] if kind is None else ["--format", kind]
    assert export([str(run_dir), str(tmp_path / "out"), "--weights", weights, *chosen]) == 0
    if kind in (None, "merged"):
        network = WanTransformer3DModel.from_pretrained(tmp_path / "out")
    else:
        pipeline = _pipeline(checkpoints / "teacher")
        pipeline.load_lora_weights(tmp_path / "out")
        network = pipeline.transformer
        adapted = [name for name, _ in network.named_parameters() if "lora_A" in name]
        assert len(adapted) == 30, "a layer that the reader does not know is left out without a word"
    torch.testing.assert_close(_plain(network), says[weights], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(says[weights], says["teacher"], rtol=1e-2, atol=1e-2), "nothing to compare"


def test_keys_of_wan_have_alpha_and_both_matrices(straight, tmp_path):
    assert export([str(straight[0]), str(tmp_path / "out"), "--format", "wan-lora", "--dtype", "bf16"]) == 0
    tensors = load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")
    layers = {name.rpartition(".lora_")[0] or name.removesuffix(".alpha") for name in tensors}
    assert "diffusion_model.blocks.2.cross_attn.o" in layers and "diffusion_model.blocks.0.ffn.2" in layers
    for layer in layers:
        down, up = tensors[f"{layer}.lora_down.weight"], tensors[f"{layer}.lora_up.weight"]
        assert down.shape[0] == up.shape[1] == 4 and tensors[f"{layer}.alpha"].item() == 2.0
        assert down.dtype == up.dtype == torch.bfloat16


def test_a_base_that_has_moved_or_is_another(checkpoints, straight, tmp_path, capsys):
    run_dir = straight[0]
    assert export([str(run_dir), str(tmp_path / "out"), "--base", str(checkpoints / "teacher")]) == 0
    assert export([str(run_dir), str(tmp_path / "no"), "--base", str(checkpoints / "fake")]) == 2
    assert "has other weights than the base" in capsys.readouterr().err and not (tmp_path / "no").exists()
    assert export([str(run_dir), str(tmp_path / "no"), "--base", "x", "--format", "wan-lora"]) == 2
    assert "--base is for adapters that are merged" in capsys.readouterr().err


def test_the_base_is_not_written_over(checkpoints, straight, tmp_path, capsys):
    """Nor would anything know it from an earlier export."""
    base = tmp_path / "base"
    with published(base, {}) as folder:
        for file in (checkpoints / "teacher").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    assert export([str(straight[0]), str(base), "--format", "merged", "--base", str(base)]) == 2
    assert "would replace the adapters' base" in capsys.readouterr().err and (base / "config.json").is_file()


@slow
def test_modules_that_were_trained_whole(pools, checkpoints, tmp_path, capsys):
    setup = Setup(cp=2, lora=WHOLE, steps=2)
    _, says = pools[2].run(_run, setup, checkpoints, tmp_path / "run", 0, 2)[0]
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    network = WanTransformer3DModel.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(_plain(network), says["raw"], rtol=1e-4, atol=1e-5)
    assert export([str(tmp_path / "run"), str(tmp_path / "no"), "--format", "diffusers-lora"]) == 2
    error = capsys.readouterr().err
    assert "beside its adapters" in error and "use --format merged" in error and not (tmp_path / "no").exists()


@slow
def test_a_role_without_adapters_has_no_such_format(pools, checkpoints, tmp_path, capsys):
    pools[2].run(_run, Setup(cp=2, lora={"fake": LORA["fake"]}, steps=1), checkpoints, tmp_path / "run", 0, 1)
    assert export([str(tmp_path / "run"), str(tmp_path / "out"), "--format", "wan-lora"]) == 2
    assert "trained its whole network" in capsys.readouterr().err
