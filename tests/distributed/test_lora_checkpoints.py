"""Adapters in checkpoints and exports: resumed on any mesh, and the same network in every format."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file

from distill.config.schema import EmaSettings
from distill.config.trained_method import trained_method
from distill.run.checkpoint_checks import check_resume
from fsdp_cp.checkpoint.folder import reader, step_folder
from fsdp_cp.errors import UserError
from fsdp_cp.files.atomic_folder import atomic_folder
from models.export import main as export
from models.files.checkpoint_files import fingerprint, inspect_checkpoint
from models.lora.contract import BASE, read_contract
from models.lora.saved import find_adapters
from models.lora.settings import LoraSettings
from models.roles.role_plan import plan_role
from tests.oracles.difference import check_trace
from tests.oracles.runs import Setup, make_config
from tests.oracles.samples import video
from tests.oracles.sharded_run import make_trainer
from tests.oracles.tiny_wan import LATENT_SHAPE, TEXT_SHAPE, text_condition
from tests.tiers import long_case, slow

pytestmark = slow
STEPS, STOP = 4, 3
LORA = {"student": LoraSettings(rank=4, alpha=2.0), "fake": LoraSettings(rank=3)}
OWN = Setup(dp_shard=2, micro_batch_size=2, lora=LORA, steps=STEPS, ema=EmaSettings(enabled=True, decay=0.7, start=1))


def _run(setup, folder, run_dir, first=0):
    """Train from step ``first``; save at STOP and at the end. Return the trace and the networks' outputs."""
    config = make_config(setup, folder, run_dir)
    config.student.checkpoint = str(folder / "teacher")
    trainer = make_trainer(setup, folder, config, first)
    trace = trainer.record(save_at=(STOP, setup.steps))
    x, t, condition = _inputs()
    with torch.no_grad():
        says = {"raw": trainer.roles["student"].velocity(video(x), t, condition).video}
        with trainer.trained["student"].average.swapped_in():
            says["ema"] = trainer.roles["student"].velocity(video(x), t, condition).video
        says["teacher"] = trainer.method.roles["teacher"].velocity(video(x), t, condition).video
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
    return run_dir, *pools[2].run(_run, OWN, checkpoints, run_dir)[0]


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        long_case({"dp_shard": 1, "cp": 2}),
        long_case({"dp_replicate": 2, "dp_shard": 2, "micro_batch_size": 1}),
    ],
    ids=str,
)
def test_resume(pools, checkpoints, straight, tmp_path, sizes):
    shutil.copytree(straight[0] / "checkpoints", tmp_path / "checkpoints")
    setup, truth = replace(OWN, **sizes), straight[1]
    trace, _ = pools[setup.world_size].run(_run, setup, checkpoints, tmp_path, STOP)[0]
    check_trace(trace, truth.after(STOP), 1e-5 if sizes else 1e-30)


def test_a_checkpoint_holds_adapters_alone_and_refuses_others(checkpoints, straight):
    checkpoint = step_folder(straight[0] / "checkpoints", STEPS)
    saved = reader(checkpoint).read_metadata().state_dict_metadata
    assert {name.split(".")[1] for name in saved} == {"weights", "ema", "adamw"}
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in saved)
    adapters = json.loads((checkpoint / "state.json").read_text())["adapters"]
    assert (adapters["student"]["rank"], adapters["student"]["scale"], adapters["fake"]["rank"]) == (4, 0.5, 3)
    config = make_config(replace(OWN, steps=STEPS + 1), checkpoints)
    for changes, base, name in (
        ({"rank": 8}, "teacher", "student.lora.rank"),
        ({"rank": 0, "alpha": None}, "teacher", "student.lora.rank"),
        ({"alpha": 4.0}, "teacher", "student.lora.alpha"),
        ({"targets": ["*.attn1.*"]}, "teacher", "student.lora.targets"),
        ({}, "fake", "teacher.checkpoint"),
    ):
        lora = LoraSettings(**{"rank": 4, "alpha": 2.0} | changes)
        with pytest.raises(UserError, match=name):
            check_resume(config, checkpoint, [plan_role("student", checkpoint=str(checkpoints / base), lora=lora)])


def _export(straight, out, *arguments):
    return export([str(straight[0]), str(out), *arguments])


def _check_header(file, checkpoints, kind):
    """The header tells how the adapters are sampled, in our key and in those that other tools show."""
    contract = read_contract(file)
    base = " ".join(fingerprint(folder) for folder in inspect_checkpoint(str(checkpoints / "teacher"), "").folders)
    found = {key: contract[key] for key in ("steps", "sampler", "guidance_scale", "rank", "alpha", "base", BASE)}
    assert found == {
        "steps": len(contract["times"]), "sampler": "renoise", "guidance_scale": 1.0, "rank": 4, "alpha": 2.0,
        "base": "teacher", BASE: base,
    }  # fmt: skip
    assert trained_method(file.parent).name == contract["method"]["name"] == "dmd2"
    with safe_open(file, framework="pt") as opened:
        shown = opened.metadata()
    # A scale in the matrices must not be applied twice by tools that compute alpha / rank.
    assert (shown["ss_network_dim"], shown["ss_network_alpha"]) == ("4", "2.0" if kind == "wan-lora" else "4.0")
    assert shown["modelspec.architecture"] == "wan/lora" and "cfg 1" in shown["modelspec.usage_hint"]
    assert {"ss_network_module", "ss_base_model_version", "modelspec.sai_model_spec", "modelspec.title"} <= {*shown}


@pytest.mark.parametrize("kind", [None, "merged", "diffusers-lora", "wan-lora"])
def test_every_format_says_what_the_student_said(checkpoints, straight, tmp_path, kind):
    says = straight[2]
    for weights in ("ema", "raw") if kind == "merged" else ("ema",):
        out = tmp_path / weights
        assert _export(straight, out, "--weights", weights, *(() if kind is None else ("--format", kind))) == 0
        if kind in (None, "merged"):
            network = WanTransformer3DModel.from_pretrained(out)
        else:
            base = WanTransformer3DModel.from_pretrained(checkpoints / "teacher")
            scheduler = FlowMatchEulerDiscreteScheduler()
            pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=base)
            pipeline.load_lora_weights(out)
            network = pipeline.transformer
            adapted = [name for name, _ in network.named_parameters() if "lora_A" in name]
            assert len(adapted) == 20, "a layer that the reader does not know is left out without a word"
            _check_header(find_adapters(str(out)), checkpoints, kind)
        torch.testing.assert_close(_plain(network), says[weights], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(says[weights], says["teacher"], rtol=1e-2, atol=1e-2), "nothing to compare"
    if kind == "wan-lora":
        tensors = load_file(out / "pytorch_lora_weights.safetensors")
        layers = {name.rpartition(".lora_")[0] or name.removesuffix(".alpha") for name in tensors}
        assert {"diffusion_model.blocks.1.cross_attn.o", "diffusion_model.blocks.0.ffn.2"} <= layers
        for layer in layers:
            down, up = tensors[f"{layer}.lora_down.weight"], tensors[f"{layer}.lora_up.weight"]
            assert down.shape[0] == up.shape[1] == 4 and tensors[f"{layer}.alpha"].item() == 2.0


def test_bases(checkpoints, straight, tmp_path, capsys):
    """An export takes a base that has moved, and refuses another base and a base that it would overwrite."""
    assert _export(straight, tmp_path / "out", "--base", str(checkpoints / "teacher"), "--dtype", "bf16") == 0
    base = tmp_path / "base"
    with atomic_folder(base, {}) as folder:  # as an earlier export, which a new one may replace
        for file in (checkpoints / "teacher").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    capsys.readouterr()
    for out, arguments in (
        ("no", ("--base", str(checkpoints / "fake"))),
        ("base", ("--format", "merged", "--base", str(base))),
        ("base", ("--format", "diffusers-lora", "--base", str(base))),
    ):
        assert _export(straight, tmp_path / out, *arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "no").exists()
    assert before == {file.name: file.read_bytes() for file in base.iterdir()}


def test_a_role_that_trains_whole_has_no_file_of_adapters(pools, checkpoints, tmp_path, capsys):
    pools[2].run(_run, replace(OWN, lora={"fake": LORA["fake"]}, steps=1), checkpoints, tmp_path / "full")
    capsys.readouterr()
    assert export([str(tmp_path / "full"), str(tmp_path / "no"), "--format", "wan-lora"]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "no").exists()
