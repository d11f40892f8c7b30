"""``python -m models.lora extract``, and folders of adapters as ``student.checkpoint``."""

import json
import shutil

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from fsdp_cp.files.atomic_folder import atomic_folder, description
from fsdp_cp.mesh import build_mesh
from models.card import is_ours
from models.families.wan import Wan
from models.lora import extract as extraction
from models.lora.__main__ import main
from models.lora.contract import KEY, read_contract
from models.lora.files import file_tensors
from models.lora.saved import find_adapters, inspect_adapters
from models.lora.settings import LoraSettings
from models.roles.role_plan import plan_role
from tests.oracles.full_tensors import full_tensors
from tests.oracles.tiny_wan import ARCHITECTURE, tiny_role
from tests.unit.refused import check_command, refused


@pytest.fixture(scope="module")
def full(checkpoints, tmp_path_factory):
    """Save the teacher with differences of rank 3 in each layer of its blocks, and another bias."""
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
    """Return the exit code of the command and how many lines it wrote to stderr."""
    capsys.readouterr()
    return main(["extract", *map(str, arguments)]), capsys.readouterr().err.count("\n")


def _pipeline(base, adapters):
    network, scheduler = WanTransformer3DModel.from_pretrained(base), FlowMatchEulerDiscreteScheduler()
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=network)
    pipeline.load_lora_weights(adapters)
    return pipeline


@pytest.mark.parametrize(("kind", "exact"), [("diffusers-lora", True), ("wan-lora", False)])
def test_a_difference_of_that_rank_is_found_whole(capsys, monkeypatch, checkpoints, full, tmp_path, kind, exact):
    """The method also works where layers are so large that only their leading directions are computed."""
    if not exact:
        monkeypatch.setattr(extraction, "_EXACT", 8)
    base = checkpoints / "teacher"
    assert extract(capsys, full, base, tmp_path / "out", "--rank", 3, "--format", kind)[0] == 0
    pipeline = _pipeline(base, tmp_path / "out")
    pipeline.fuse_lora(components=["transformer"])
    truth = dict(WanTransformer3DModel.from_pretrained(full).named_parameters())
    named = pipeline.transformer.named_parameters()
    fused = {name.replace(".base_layer", ""): p for name, p in named if "lora_" not in name}
    assert fused.keys() == truth.keys()
    for name, value in truth.items():
        if name != "proj_out.bias":
            torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-5)


def test_layers_outside_of_the_blocks(capsys, checkpoints, full, tmp_path):
    """diffusers reads no scale for these layers from files with Wan's keys."""
    words = ("--rank", 2, "--format", "wan-lora", "--targets", "proj_out", "*.attn1.to_q")
    assert extract(capsys, full, checkpoints / "teacher", tmp_path / "out", *words)[0] == 0
    network = _pipeline(checkpoints / "teacher", tmp_path / "out").transformer
    assert "proj_out.lora_A.default_0.weight" in dict(network.named_parameters())
    names = [
        f"{layer}.{which}.weight" for layer in ("proj_out", "blocks.0.ffn.net.2") for which in ("lora_A", "lora_B")
    ]
    tensors = file_tensors("wan-lora", names, lambda _: torch.ones(2, 2), family=Wan(), scale=0.5, dtype=torch.float32)
    assert tensors["diffusion_model.head.head.lora_up.weight"].unique() == 0.5
    assert tensors["diffusion_model.blocks.0.ffn.2.lora_up.weight"].unique() == 1.0
    assert [name for name in tensors if name.endswith(".alpha")] == ["diffusion_model.blocks.0.ffn.2.alpha"]


@pytest.mark.parametrize("exact", [True, False])
def test_a_smaller_rank_holds_what_svd_says(capsys, monkeypatch, checkpoints, full, tmp_path, exact):
    if not exact:
        monkeypatch.setattr(extraction, "_EXACT", 8)
    assert extract(capsys, full, checkpoints / "teacher", tmp_path / "out", "--rank", 1)[0] == 0
    after, before = (WanTransformer3DModel.from_pretrained(p) for p in (full, checkpoints / "teacher"))
    tensors = load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")
    layers = [n for n, m in after.named_modules() if isinstance(m, torch.nn.Linear) and n.startswith("blocks.")]
    for name in layers:
        difference = (after.get_submodule(name).weight - before.get_submodule(name).weight).detach()
        found = tensors[f"transformer.{name}.lora_B.weight"] @ tensors[f"transformer.{name}.lora_A.weight"]
        values = torch.linalg.svdvals(difference)
        assert found.norm().item() == pytest.approx(values[0].item(), rel=1e-3)
        assert (difference - found).norm().item() == pytest.approx(values[1:].norm().item(), rel=0.01)


@pytest.mark.parametrize(
    "arguments",
    [
        ("{full}", "{base}", "{base}"),
        ("{full}", "{base}", ""),
        ("{full}", "nowhere", "{out}"),
        ("{full}", "{base}", "{out}", "--rank", "0"),
        ("{full}", "{base}", "{out}", "--rank", "64"),
        ("{base}", "{base}", "{out}", "--rank", "3"),
        ("{full}", "{base}", "{out}", "--targets", "*.nothing"),
        ("{extended}", "{base}", "{out}", "--rank", "2"),
    ],
)
def test_bad_input(capsys, checkpoints, full, tmp_path, arguments):
    extended = tmp_path / "extended"  # with an addition, which a file of adapters cannot hold
    shutil.copytree(full, extended)
    save_file({"additions.second_time.scale": torch.ones(3)}, extended / "additions.safetensors")
    places = {"full": full, "base": checkpoints / "teacher", "out": tmp_path / "out", "extended": extended}
    assert extract(capsys, *(word.format(**places) for word in arguments)) == (2, 1)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def stackable(capsys, checkpoints, full, tmp_path):
    """Return two folders of adapters of one base, a third of another, and the arguments that stack the first two."""
    base, folders = checkpoints / "teacher", [tmp_path / name for name in ("student", "style", "other")]
    for folder, targets, of in zip(folders, ("*", "blocks.0.*", "*"), (base, base, checkpoints / "fake"), strict=True):
        assert extract(capsys, full, of, folder, "--rank", 3, "--targets", targets)[0] == 0
    return folders, ["stack", *map(str, (*folders[:2], base, tmp_path / "out"))]


@pytest.mark.parametrize("kind", ["diffusers-lora", "wan-lora"])
def test_stacked_adapters_are_their_weighted_sum(checkpoints, stackable, tmp_path, kind):
    (*folders, _), arguments = stackable
    student, style = folders
    file, told = find_adapters(str(student)), {"steps": 2, "times": [1.0, 0.5], "sampler": "ode", "guidance_scale": 1.0}
    told |= {"shift": 5.0, "method": {"name": "dmd2"}}
    save_file(load_file(file), file, metadata={KEY: json.dumps(read_contract(file) | told)})
    assert main([*arguments, "--weights", "0.5", "-2", "--format", kind]) == 0
    plain = WanTransformer3DModel.from_pretrained(checkpoints / "teacher")
    read = [
        inspect_adapters(find_adapters(str(f)), plain, Wan(), "").read() for f in (student, style, tmp_path / "out")
    ]
    a, b, both = ({name: m["B.weight"] @ m["A.weight"] for name, m in one.items()} for one in read)
    assert both.keys() == a.keys() > b.keys() and {len(read[2][name]["A.weight"]) for name in b} == {6}
    for name, value in both.items():
        torch.testing.assert_close(value, 0.5 * a[name] - 2 * b.get(name, torch.zeros(())), rtol=1e-4, atol=1e-6)
    about = description(tmp_path / "out")
    contract = read_contract(find_adapters(str(tmp_path / "out")))
    assert contract | told | {"rank": 6, "base": "teacher"} == contract, "a conversion keeps how the sum is sampled"
    assert is_ours((tmp_path / "out" / "README.md").read_text())
    assert about["method"] == {"name": "dmd2"} and about["base_fingerprint"] == description(style)["base_fingerprint"]


def test_adapters_that_cannot_be_stacked(capsys, checkpoints, full, stackable, tmp_path):
    (student, style, other), arguments = stackable
    for i, wrong, named in (
        (1, other, "STUDENT"),
        (2, other, "ADAPTER"),
        (2, full, "ADAPTER"),
        (3, checkpoints / "fake", "STUDENT"),
        (4, style, "OUT"),
    ):
        check_command(main, capsys, named, *arguments[:i], wrong, *arguments[i + 1 :])
    for more in (("--weights", "1", "nan"), ("--format", "videox-pdd")):
        assert main([*arguments, *more]) == 2
    assert not (tmp_path / "out").exists() and find_adapters(str(student))


def _loaded(base, files):
    found = []
    for file, settings in files:
        plan = plan_role("student", checkpoint=str(base), lora=LoraSettings(**settings), saved=file)
        role = tiny_role(plan, build_mesh(dp_shard=2, cp=1, heads=4), seed=0)
        found.append((full_tensors(role.weights()), role.adapters))
    return found


@pytest.mark.slow
def test_a_student_begins_with_adapters_from_a_file(capsys, pools, checkpoints, full, tmp_path):
    base = checkpoints / "teacher"
    for kind in ("diffusers-lora", "wan-lora"):
        assert extract(capsys, full, base, tmp_path / kind, "--rank", 3, "--format", kind)[0] == 0
    (tmp_path / "peft").mkdir()  # with half of B, and alpha twice the rank
    renamed = {
        name.replace("transformer.", "base_model.model."): value / 2 if "lora_B" in name else value
        for name, value in load_file(tmp_path / "diffusers-lora" / "pytorch_lora_weights.safetensors").items()
    }
    save_file(renamed, tmp_path / "peft" / "adapter_model.safetensors")
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 6}))
    folders = [tmp_path / kind for kind in ("diffusers-lora", "wan-lora", "peft")]
    files = [(find_adapters(str(f)), settings) for f in folders for settings in ({}, {"rank": 3, "alpha": 12.0})]
    truth, start = (WanTransformer3DModel.from_pretrained(p).state_dict() for p in (full, base))
    for weights, adapters in pools[2].run(_loaded, base, files)[0]:
        assert adapters["rank"] == 3 and len(adapters["targets"]) == 20
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
    for name, weights in found.items():
        torch.testing.assert_close(
            weights["B.weight"] @ weights["A.weight"], network.get_submodule(name).get_delta_weight("default")
        )


def test_no_input_is_written_over(capsys, checkpoints, full, tmp_path):
    """The command may replace an earlier export, but not one that it reads."""
    inputs = {}
    for name, source in (("FULL", full), ("BASE", checkpoints / "teacher")):
        with atomic_folder(tmp_path / name / "transformer", {}) as folder:
            for file in source.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
        inputs[name] = tmp_path / name
    for folder in inputs.values():
        assert extract(capsys, *inputs.values(), folder / "transformer", "--rank", 2) == (2, 1)
        assert (folder / "transformer" / "config.json").is_file()


def test_adapters_that_do_not_fit(capsys, checkpoints, full, tmp_path):
    base, folder = checkpoints / "teacher", tmp_path / "adapters"
    assert extract(capsys, full, base, folder, "--rank", 3)[0] == 0
    file = find_adapters(str(folder))
    broken = tmp_path / "broken"
    broken.mkdir()

    def check(named, architecture=ARCHITECTURE, found=file, **settings):
        with refused(named):
            lora = LoraSettings(**settings)
            plan_role("student", checkpoint=None, architecture=dict(architecture), saved=found, lora=lora)

    check("rank", rank=8)
    check("targets", rank=3, targets=["*.attn1.to_q"])
    check("blocks.1", ARCHITECTURE | {"num_layers": 1})
    check("blocks.0.ffn.net", ARCHITECTURE | {"ffn_dim": 32})
    (broken / "adapter_model.safetensors").write_bytes(b"no")
    check("broken", found=find_adapters(str(broken)))
    save_file({"transformer.blocks.0.norm2.weight": torch.ones(48)}, broken / "adapter_model.safetensors")
    check("blocks.0.norm2.weight", found=find_adapters(str(broken)))
    tensors = load_file(file)
    tensors.pop("transformer.blocks.0.attn1.to_q.lora_A.weight")
    save_file(tensors, broken / "adapter_model.safetensors")
    check("blocks.0.attn1.to_q", found=find_adapters(str(broken)))
    assert find_adapters(str(base)) is None and find_adapters("nowhere") is None and find_adapters(None) is None


def test_names_of_wan_are_those_of_diffusers_converter():
    """Every linear layer has a different name. The converter returns those that it knows."""
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
