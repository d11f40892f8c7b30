"""``python -m models.lora extract``, and folders of adapters as ``student.checkpoint``."""

import json
import re

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from fsdp_cp.errors import UserError
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.mesh import build_mesh
from models.families.wan import Wan
from models.load import build_role
from models.lora import extract as extraction
from models.lora.__main__ import main
from models.lora.files import file_tensors
from models.lora.saved import find_adapters, inspect_adapters
from models.lora.settings import LoraSettings
from models.published import published
from models.role_plan import plan_role
from tests.oracles.full_tensors import full_tensors
from tests.oracles.tiny_wan import ARCHITECTURE, CONDITION_SHAPES, LATENT_SHAPE


@pytest.fixture(scope="module")
def full(checkpoints, tmp_path_factory):
    """The teacher with differences of rank 3 in each layer of its blocks, and another bias."""
    network = WanTransformer3DModel.from_pretrained(checkpoints / "teacher")
    generator = torch.Generator().manual_seed(0)
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("blocks."):
            left = torch.randn(module.out_features, 3, generator=generator)
            module.weight.data += 0.1 * left @ torch.randn(3, module.in_features, generator=generator)
    network.proj_out.bias.data += 0.5
    folder = tmp_path_factory.mktemp("full")
    network.save_pretrained(folder)
    return folder


def extract(capsys, *arguments):
    code = main(["extract", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("kind", ["diffusers-lora", "wan-lora"])
def test_a_difference_of_that_rank_is_found_whole(capsys, checkpoints, full, tmp_path, kind):
    base = checkpoints / "teacher"
    code, out, _ = extract(capsys, full, base, tmp_path / "out", "--rank", 3, "--format", kind)
    assert code == 0 and "which hold 100.00%" in out and "left out: 1 other tensors that differ" in out
    assert "proj_out.bias" in out
    network = WanTransformer3DModel.from_pretrained(base)
    pipeline = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=FlowMatchEulerDiscreteScheduler(), transformer=network
    )
    pipeline.load_lora_weights(tmp_path / "out")
    pipeline.fuse_lora(components=["transformer"])
    truth = dict(WanTransformer3DModel.from_pretrained(full).named_parameters())
    named = pipeline.transformer.named_parameters()
    fused = {name.replace(".base_layer", ""): p for name, p in named if "lora_" not in name}
    assert fused.keys() == truth.keys()
    for name, value in truth.items():
        if name != "proj_out.bias":
            torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-5)


def test_layers_outside_of_the_blocks(capsys, checkpoints, full, tmp_path):
    """diffusers reads their scale in no file with the keys of Wan."""
    words = ("--rank", 2, "--format", "wan-lora", "--targets", "proj_out", "*.attn1.to_q")
    assert extract(capsys, full, checkpoints / "teacher", tmp_path / "out", *words)[0] == 0
    network = WanTransformer3DModel.from_pretrained(checkpoints / "teacher")
    pipeline = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=FlowMatchEulerDiscreteScheduler(), transformer=network
    )
    pipeline.load_lora_weights(tmp_path / "out")
    assert "proj_out.lora_A.default_0.weight" in dict(pipeline.transformer.named_parameters())
    names = [
        f"{layer}.{which}.weight" for layer in ("proj_out", "blocks.0.ffn.net.2") for which in ("lora_A", "lora_B")
    ]
    tensors = file_tensors("wan-lora", names, lambda _: torch.ones(2, 2), family=Wan(), scale=0.5, dtype=torch.float32)
    assert tensors["diffusion_model.head.head.lora_up.weight"].unique() == 0.5
    assert tensors["diffusion_model.blocks.0.ffn.2.lora_up.weight"].unique() == 1.0
    assert [name for name in tensors if name.endswith(".alpha")] == ["diffusion_model.blocks.0.ffn.2.alpha"]


def test_a_smaller_rank_holds_what_svd_says(capsys, checkpoints, full, tmp_path):
    code, out, _ = extract(capsys, full, checkpoints / "teacher", tmp_path / "out", "--rank", 1)
    after, before = (WanTransformer3DModel.from_pretrained(p) for p in (full, checkpoints / "teacher"))
    kept = whole = 0.0
    for (name, a), (_, b) in zip(after.named_parameters(), before.named_parameters(), strict=True):
        if name.startswith("blocks.") and name.endswith("weight") and a.ndim == 2 and not torch.equal(a, b):
            values = torch.linalg.svdvals((a - b).double().detach())
            kept, whole = kept + values[0].item() ** 2, whole + values.square().sum().item()
    assert code == 0 and f"which hold {kept / whole:.2%}" in out and kept / whole < 0.9


def test_of_large_layers_the_leading_directions_alone(monkeypatch):
    monkeypatch.setattr(extraction, "_EXACT", 8)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=generator) @ torch.randn(5, 40, generator=generator)
    x += 1e-3 * torch.randn(60, 40, generator=generator)
    u, s, v = extraction._leading(x, 5)
    truth = torch.linalg.svdvals(x)
    torch.testing.assert_close(s, truth[:5], rtol=1e-4, atol=1e-4)
    assert ((x - u * s @ v.T).norm() / truth[5:].norm()).item() == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{full}", "{base}", "{base}"), "OUT .* is not empty"),
        (("{full}", "{base}", ""), "OUT is empty"),
        (("{full}", "nowhere", "{out}"), "BASE=.*nowhere is not a folder"),
        (("{full}", "{base}", "{out}", "--rank", "0"), "--rank 0 must be at least 1"),
        (("{full}", "{base}", "{out}", "--rank", "64"), "rank=64 is above the size of blocks.0.attn1.to_q"),
        (("{base}", "{base}", "{out}", "--rank", "3"), "do not differ in the 30 layers that have adapters; give"),
        (("{full}", "{base}", "{out}", "--targets", "*.nothing"), "targets: .*nothing.* matches no linear layer"),
    ],
)
def test_bad_input(capsys, checkpoints, full, tmp_path, arguments, message):
    places = {"full": full, "base": checkpoints / "teacher", "out": tmp_path / "out"}
    code, _, err = extract(capsys, *(word.format(**places) for word in arguments))
    assert code == 2 and re.search(message, err), err
    assert err.count("\n") == 1 and not (tmp_path / "out").exists()


def _loaded(base, file, settings, seed):
    plan = plan_role("student", checkpoint=str(base), lora=LoraSettings(**settings), saved=file)
    role = build_role(
        plan, mesh=build_mesh(dp_shard=2, cp=1, heads=4), device=torch.device("cpu"), trainable=True,
        latent_shape=LATENT_SHAPE, condition_shapes=CONDITION_SHAPES, seed=seed,
    )  # fmt: skip
    return full_tensors(role.weights()), role.adapters


@pytest.mark.parametrize("kind", ["diffusers-lora", "wan-lora", "peft"])
@pytest.mark.parametrize("settings", [{}, {"rank": 3, "alpha": 12.0}], ids=str)
def test_a_student_begins_with_adapters_from_a_file(capsys, checkpoints, full, tmp_path, kind, settings):
    base, folder = checkpoints / "teacher", tmp_path / "adapters"
    written = "diffusers-lora" if kind == "peft" else kind
    assert extract(capsys, full, base, folder, "--rank", 3, "--format", written)[0] == 0
    if kind == "peft":  # with half of B, and alpha twice the rank
        tensors = load_file(folder / "pytorch_lora_weights.safetensors")
        folder = tmp_path / "peft"
        folder.mkdir()
        renamed = {
            name.replace("transformer.", "base_model.model."): value / 2 if "lora_B" in name else value
            for name, value in tensors.items()
        }
        save_file(renamed, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 6}))
    file = find_adapters(str(folder))
    weights, adapters = run_ranks(2, _loaded, base, file, settings, 0)[0]
    assert adapters["rank"] == 3 and len(adapters["targets"]) == 30
    truth, start = (WanTransformer3DModel.from_pretrained(p).state_dict() for p in (full, base))
    for layer in adapters["targets"]:
        product = adapters["scale"] * weights[f"{layer}.lora_B.weight"] @ weights[f"{layer}.lora_A.weight"]
        difference = truth[f"{layer}.weight"] - start[f"{layer}.weight"]
        torch.testing.assert_close(product, difference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("saved_by", ["diffusers", "peft"])
@pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True}, {"alpha_pattern": {"attn1.to_k": 4, "ffn.net.2": 2}}], ids=str
)
def test_the_scale_is_what_peft_makes_of_it(checkpoints, tmp_path, saved_by, changes):
    network = WanTransformer3DModel.from_pretrained(checkpoints / "teacher")
    targets = ["to_q", "to_k", "ffn.net.2"]
    settings = LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False, **changes)
    network.add_adapter(settings)
    if saved_by == "diffusers":
        network.save_lora_adapter(tmp_path)
    else:
        tensors = get_peft_model_state_dict(network, adapter_name="default")
        save_file({f"base_model.model.{k}": v for k, v in tensors.items()}, tmp_path / "adapter_model.safetensors")
        settings.save_pretrained(tmp_path)
    file = find_adapters(str(tmp_path))
    plain = WanTransformer3DModel.from_pretrained(checkpoints / "teacher")
    found = inspect_adapters(file, plain, Wan(), "student.checkpoint").read()
    assert len(found) == 5 * ARCHITECTURE["num_layers"]
    for name, (a, b, _) in found.items():
        torch.testing.assert_close(b @ a, network.get_submodule(name).get_delta_weight("default"))


def test_no_input_is_written_over(capsys, checkpoints, full, tmp_path):
    """An earlier export would be replaced, and may be what is read."""
    inputs = {}
    for name, source in (("FULL", full), ("BASE", checkpoints / "teacher")):
        with published(tmp_path / name / "transformer", {}) as folder:
            for file in source.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
        inputs[name] = tmp_path / name
    for name, folder in inputs.items():
        code, _, err = extract(capsys, inputs["FULL"], inputs["BASE"], folder / "transformer", "--rank", 2)
        assert code == 2 and f"would replace {name}" in err
        assert (folder / "transformer" / "config.json").is_file()


def test_additions_are_not_left_out_without_a_word(capsys, checkpoints, full, tmp_path):
    for file in full.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file({"additions.second_time.scale": torch.ones(3)}, tmp_path / "additions.safetensors")
    code, _, err = extract(capsys, tmp_path, checkpoints / "teacher", tmp_path / "out", "--rank", 2)
    assert code == 2 and "has additions (second_time)" in err


def test_adapters_that_do_not_fit(capsys, checkpoints, full, tmp_path):
    base, folder = checkpoints / "teacher", tmp_path / "adapters"
    assert extract(capsys, full, base, folder, "--rank", 3)[0] == 0
    file = find_adapters(str(folder))
    broken = tmp_path / "broken"
    broken.mkdir()

    def refused(message, architecture=ARCHITECTURE, found=file, **settings):
        with pytest.raises(UserError, match=message):
            plan_role(
                "student", checkpoint=None, architecture=dict(architecture), saved=found, lora=LoraSettings(**settings)
            )

    refused("rank=8, but the adapters in .* have rank 3", rank=8)
    refused("targets names 3 layers, but the adapters in .* are for 30 others", rank=3, targets=["*.attn1.to_q"])
    refused("has an adapter for blocks.2.*no such linear layer", ARCHITECTURE | {"num_layers": 2})
    refused("the adapter of blocks.0.ffn.net.* shapes .* it is for another base", ARCHITECTURE | {"ffn_dim": 32})
    (broken / "adapter_model.safetensors").write_bytes(b"no")
    refused("is not a readable file of adapters", found=find_adapters(str(broken)))
    save_file({"transformer.blocks.0.norm2.weight": torch.ones(48)}, broken / "adapter_model.safetensors")
    refused("holds transformer.blocks.0.norm2.weight, which is no adapter", found=find_adapters(str(broken)))
    tensors = load_file(file)
    tensors.pop("transformer.blocks.0.attn1.to_q.lora_A.weight")
    save_file(tensors, broken / "adapter_model.safetensors")
    refused("one matrix of two for blocks.0.attn1.to_q", found=find_adapters(str(broken)))
    assert find_adapters(str(base)) is None and find_adapters("nowhere") is None and find_adapters(None) is None


def test_names_of_wan_are_those_of_diffusers_converter():
    """Every linear layer has one, no two the same; the converter turns those that it knows back."""
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_wan_lora_to_diffusers as convert

    with torch.device("meta"):
        network = WanTransformer3DModel(**Wan().examples()["i2v"])
    linear = [name for name, module in network.named_modules() if isinstance(module, torch.nn.Linear)]
    names = {name: Wan().original_name(name) for name in linear}
    assert len(set(names.values())) == len(linear)
    known = [n for n in linear if n.startswith("blocks.") or n in ("condition_embedder.time_proj", "proj_out")]
    tensors = {
        f"diffusion_model.{names[name]}.lora_{which}.weight": torch.full((1, 1), float(i))
        for i, name in enumerate(known) for which in ("down", "up")
    }  # fmt: skip
    back = convert(dict(tensors))
    for i, name in enumerate(known):
        for which in "AB":
            assert back.pop(f"transformer.{name}.lora_{which}.weight").item() == i, name
    assert not back
