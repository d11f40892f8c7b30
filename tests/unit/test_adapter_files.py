"""Adapters as others write them: the network with them is what diffusers makes of the same file."""

import json

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTXVideoTransformer3DModel, WanPipeline, WanTransformer3DModel
from safetensors import safe_open
from safetensors.torch import save_file

from models.families.ltx import LTX
from models.families.wan import Wan
from models.files.checkpoint_files import fingerprint, inspect_transformer
from models.files.save import save_tensors
from models.lora.contract import BASE, KEY
from models.lora.files import FASTVIDEO, FORMATS, NAME, file_tensors
from models.lora.merge import Weights, merged
from models.lora.saved import find_adapters, inspect_adapters
from models.lora.settings import LoraSettings
from models.owner import owner
from models.roles.role_plan import plan_role
from tests.oracles.samples import video
from tests.oracles.small_wan import SMALL, small_role
from tests.oracles.tiny_wan import text_condition
from tests.tiers import parametrize
from tests.unit.refused import refusal, refused

LATENTS, TEXT = (2, 1, 4, 4), (3, 6)
RANK = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    WanTransformer3DModel(**SMALL).save_pretrained(folder)
    return folder


def pairs(base, rank=lambda i: RANK):
    """Return A and B of each linear layer of the blocks."""
    generator = torch.Generator().manual_seed(1)
    network = WanTransformer3DModel.from_pretrained(base)
    linear = [(n, m) for n, m in network.named_modules() if isinstance(m, torch.nn.Linear) and n.startswith("blocks.")]
    return {
        name: (
            torch.randn(rank(i), layer.in_features, generator=generator),
            0.2 * torch.randn(layer.out_features, rank(i), generator=generator),
        )
        for i, (name, layer) in enumerate(linear)
    }


def original(base):
    return {Wan().original_name(name): pair for name, pair in pairs(base).items()}


def named(template, found):
    return {template.format(n, w): m for n, ab in found.items() for w, m in zip("AB", ab, strict=True)}


def diffusers(base):
    """Return adapters whose ranks differ between layers."""
    return named("transformer.{}.lora_{}.weight", pairs(base, rank=lambda i: 1 + i % RANK))


def kohya(base):
    tensors = {}
    for name, (a, b) in original(base).items():
        unit = f"lora_unet_{name.replace('.', '_')}"
        tensors |= {f"{unit}.lora_down.weight": a, f"{unit}.lora_up.weight": b, f"{unit}.alpha": torch.tensor(2.0)}
    return tensors


def kohya_some(base):
    """Return adapters of some layers. One has no alpha: its scale is 1."""
    tensors = {name: x for name, x in kohya(base).items() if "ffn" not in name and "blocks_0_self" not in name}
    del tensors["lora_unet_blocks_1_cross_attn_o.alpha"]
    return tensors


def kohya_metadata(base):
    """Return adapters of some layers, whose alpha is in the metadata alone."""
    return {name: x for name, x in kohya_some(base).items() if not name.endswith(".alpha")}


def diffsynth(base):
    return named("pipe.dit.{}.lora_{}.default.weight", original(base))


def diffsynth_bare(base):
    return named("{}.lora_{}.default.weight", original(base))


def distilled(base):
    """Return tensors like published few-step adapters: with biases of some layers, and zero differences of norms."""
    tensors = {}
    for i, (name, (a, b)) in enumerate(original(base).items()):
        unit = f"diffusion_model.{name}"
        tensors |= {f"{unit}.lora_down.weight": a, f"{unit}.lora_up.weight": b}
        if i % 2:
            tensors |= {f"{unit}.diff_b": 0.3 * torch.ones(len(b))}
        if i % 3 == 0:
            tensors |= {f"{unit}.alpha": torch.tensor(2.0)}  # scales the pair, not the bias
    return tensors | {"diffusion_model.blocks.0.norm3.diff": torch.zeros(24)}


def head(base):
    """Return the difference of a whole layer, whose rank is the layer's number of output features."""
    return distilled(base) | {
        "diffusion_model.head.head.diff": 0.1 * torch.ones(8, 24),
        "diffusion_model.head.head.diff_b": torch.ones(8),
    }


def says(velocity):
    generator = torch.Generator().manual_seed(3)
    x, text = torch.randn(1, *LATENTS, generator=generator), torch.randn(1, *TEXT, generator=generator)
    with torch.no_grad():
        return velocity(x, torch.tensor([0.7]), text)


def by_diffusers(base, file):
    """Return the network's output with ``file`` loaded by diffusers, or without adapters if it is None."""
    network = WanTransformer3DModel.from_pretrained(base)
    if file is not None:
        parts = {"tokenizer": None, "text_encoder": None, "vae": None, "scheduler": FlowMatchEulerDiscreteScheduler()}
        WanPipeline(**parts, transformer=network).load_lora_weights(
            file.parent, weight_name=file.name, low_cpu_mem_usage=False
        )
    return says(lambda x, t, text: network(x, 1000 * t, text, return_dict=False)[0])


def write(folder, tensors, name="my_style-step00001000.safetensors", metadata=None):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name, metadata=metadata)
    return folder / name


def planned(base, checkpoint, **settings):
    found = find_adapters(str(checkpoint))
    return plan_role("student", checkpoint=str(base), lora=LoraSettings(**settings), saved=found)


@parametrize(
    "make", [diffusers, kohya, kohya_some, kohya_metadata, diffsynth, diffsynth_bare, distilled, head], quick=3
)
def test_a_role_says_what_diffusers_says(base, one_rank, tmp_path, make):
    tensors = make(base)
    metadata = {"ss_network_alpha": "3.0"} if make is kohya_metadata else None
    file = oracle = write(tmp_path / "adapters", tensors, metadata=metadata)
    if ".default." in next(iter(tensors)):  # diffusers does not know DiffSynth's names
        renamed = named("diffusion_model.{}.lora_{}.weight", original(base))
        oracle = write(tmp_path / "renamed", renamed)
    if make in (kohya_some, kohya_metadata):  # diffusers reads kohya's names only with all layers and alphas
        units = {f"lora_unet_{name.replace('.', '_')}": f"diffusion_model.{name}" for name in original(base)}
        parts = {name: name.partition(".") for name in tensors}
        renamed = {f"{units[unit]}.{matrix}": tensors[name] for name, (unit, _, matrix) in parts.items()}
        if metadata:
            renamed |= {f"{units[unit]}.alpha": torch.tensor(3.0) for unit, _, _ in parts.values()}
        oracle = write(tmp_path / "renamed", renamed)
    truth = by_diffusers(base, oracle)
    assert not torch.allclose(truth, by_diffusers(base, None), rtol=1e-2, atol=1e-2), "nothing to compare"
    rank = 8 if "diffusion_model.head.head.diff" in tensors else RANK
    plan = planned(base, file.parent, rank=rank, alpha=2.0 * rank)
    role = small_role(one_rank, plan)
    torch.testing.assert_close(
        says(lambda x, t, s: role.velocity(video(x), t, text_condition(s)).video), truth, rtol=1e-4, atol=1e-5
    )
    own = {name: weight.full_tensor() for name, weight in role.weights().items()}
    scale = role.adapters["scale"]
    for kind in {*FORMATS} - {FASTVIDEO}:  # and back
        written = file_tensors(kind, own, own.__getitem__, family=Wan(), scale=scale, dtype=torch.float32)
        torch.testing.assert_close(by_diffusers(base, write(tmp_path / kind, written)), truth, rtol=1e-4, atol=1e-5)
    network = WanTransformer3DModel.from_pretrained(base)
    weights = network.state_dict()
    whole, adapters = (Weights({name: x.shape for name, x in w.items()}, w.__getitem__) for w in (weights, own))
    together = merged(whole, adapters, scale)
    network.load_state_dict({name: together.read(name) for name in weights})
    out = says(lambda x, t, text: network(x, 1000 * t, text, return_dict=False)[0])
    torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)


def test_a_training_adapter_runs_in_training_alone(base, one_rank, tmp_path):
    file = write(tmp_path / "adapters", diffusers(base))
    options = {"checkpoint": str(base), "training_adapter": file}
    role = small_role(one_rank, plan_role("student", **options, lora=LoraSettings(rank=2)))

    def says_now():
        return says(lambda x, t, s: role.velocity(video(x), t, text_condition(s)).video)

    torch.testing.assert_close(says_now(), by_diffusers(base, file), rtol=1e-4, atol=1e-5)
    with role.as_exported():
        torch.testing.assert_close(says_now(), by_diffusers(base, None), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(says_now(), by_diffusers(base, file), rtol=1e-4, atol=1e-5)
    (network,) = role.networks
    shapes = {name: p.shape for name, p in WanTransformer3DModel.from_pretrained(base).named_parameters()}
    assert {name: p.shape for name, p in network.base_parameters().items()} == shapes
    assert {len(p) for name, p in role.named_parameters().items() if "lora_A" in name} == {2}, "the export's adapters"
    assert all(p.requires_grad == owner(name)[0].endswith("student") for name, p in network.module.named_parameters()
               if ".lora_" in name)  # fmt: skip


def test_the_same_contents_are_the_same_bytes(tmp_path):
    """A library's random order would send equal files to the hub again."""
    tensors, metadata = {"a.weight": torch.ones(3)}, {f"key {i}": f'a "quoted" ü {i}' for i in range(20)}
    for name in "xyz":
        save_tensors(tensors, tmp_path / name, metadata)
    assert len({(tmp_path / name).read_bytes() for name in "xyz"}) == 1
    with safe_open(tmp_path / "x", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", **metadata} and opened.get_tensor("a.weight").sum() == 3


def test_a_training_adapter_of_another_base_is_refused(base, tmp_path):
    def plans(tensors, recorded=None, **settings):
        (tmp_path / "adapters").mkdir(exist_ok=True)
        save_file(tensors, tmp_path / "adapters" / NAME, metadata={KEY: json.dumps({BASE: recorded})})
        return plan_role("student", checkpoint=str(base), training_adapter=tmp_path / "adapters" / NAME, **settings)

    lora, own = {"lora": LoraSettings(rank=2)}, fingerprint(inspect_transformer(str(base), ""))
    assert plans(diffusers(base), own, **lora).training.settings.rank == RANK
    wide = {name: torch.cat([x, x], dim=1) if "lora_A" in name else x for name, x in diffusers(base).items()}
    deep = {name.replace("blocks.1", "blocks.2"): x for name, x in diffusers(base).items()}
    for wrong in ((diffusers(base), "of others"), (wide,), (deep,)):
        with refused("student.training_adapter"):
            plans(*wrong, **lora)
    with refused("student.training_adapter"):  # a whole network would export it
        plans(diffusers(base))


def test_the_path_of_a_file_is_its_folder(base, tmp_path):
    file = write(tmp_path / "adapters", kohya(base))
    assert find_adapters(str(file)) == find_adapters(str(file.parent)) == file
    write(file.parent, diffusers(base), "other.safetensors")
    assert find_adapters(str(file)) == file
    with refused("other"):
        find_adapters(str(file.parent))
    assert find_adapters(str(base)) is None and find_adapters(str(base / "config.json")) is None


@pytest.mark.parametrize(
    "change",
    [
        {"diffusion_model.blocks.1.norm3.diff": torch.ones(24)},
        {"diffusion_model.blocks.1.self_attn.norm_q.diff": torch.ones(24)},
        {"diffusion_model.blocks.0.self_attn.q.dora_scale": torch.ones(24)},
        {"diffusion_model.time_projection.1.diff_b": torch.ones(144)},
        {"diffusion_model.blocks.0.self_attn.q.hada_w1_a": torch.ones(4, 24)},
        {"blocks.0.self_attn.q.lora_down.weight": torch.ones(4, 24)},  # of a second adapter
        {"pipe.dit.blocks.0.self_attn.q.lora_up.weight": torch.ones(24, 4)},
    ],
    ids=lambda change: next(iter(change)).rpartition("q.")[2],
)
def test_what_diffusers_would_leave_out_is_refused_by_name(base, tmp_path, change):
    path = write(tmp_path / "adapters", distilled(base) | change)
    line = refusal(planned, base, path)
    assert "student.checkpoint" in line and next(iter(change)).removeprefix("diffusion_model.") in line
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with refused("git-lfs"):
        planned(base, path.parent)


def test_a_configuration_scales_its_own_file_alone(base, tmp_path):
    """A folder of peft with a copy of the adapters in another format, whose scale is in its matrices."""
    file = write(tmp_path, named("base_model.model.{}.lora_{}.weight", pairs(base)), "adapter_model.safetensors")
    copy = write(tmp_path, diffusers(base))
    config = {"lora_alpha": 2 * RANK, "r": RANK}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    scales = [{*planned(base, path).lora.saved.scales.values()} for path in (file, copy)]
    assert scales == [{2.0}, {1.0}]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    with refused("pissa"):
        planned(base, file)


def test_biases_are_refused_where_the_base_has_none(tmp_path):
    """A merged network would lose them."""
    sizes = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 4}
    with torch.device("meta"):
        network = LTXVideoTransformer3DModel(**sizes, cross_attention_dim=16, num_layers=1, attention_bias=False)
    layer = "transformer.transformer_blocks.0.attn1.to_q"
    pair = {f"{layer}.lora_A.weight": torch.ones(2, 16), f"{layer}.lora_B.weight": torch.ones(16, 2)}
    inspect_adapters(write(tmp_path, pair), network, LTX(), "student.checkpoint")
    with refused("no bias"):
        file = write(tmp_path, pair | {f"{layer}.lora_B.bias": torch.ones(16)})
        inspect_adapters(file, network, LTX(), "student.checkpoint")
