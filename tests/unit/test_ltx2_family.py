"""The family of LTX-2.0, 2.3 and 2.5: inputs as diffusers makes them, operations, names of adapters, refusals."""

import pytest
import torch
from diffusers import LTX2Pipeline
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.condition import Condition
from models.families.ltx2 import LTX2
from models.families.minimax_h3 import MiniMaxH3
from models.families.operations import count_flops
from models.lora.files import FASTVIDEO, FORMATS, file_tensors
from models.sample import AUDIO, VIDEO, Sample

FAMILY = LTX2()
EXAMPLES = FAMILY.examples()


def built(example, family=FAMILY):
    torch.manual_seed(0)
    network = family.build(family.examples()[example], "teacher.architecture")
    return network, family.defaults() | family.examples()[example]


def drawn(config, batch=1, frames=3, family=FAMILY, optional=False):
    """Return a sample of ``frames`` latent frames with shifted sound, and its condition, with ``optional`` tensors."""
    patch = family.patch_size(config)
    shapes = family.sample_shapes(config, (family.latent_channels(config), frames, 3 * patch[1], 5 * patch[2]))
    sample = Sample({name: torch.randn(batch, *shape) for name, shape in shapes.items()}, {VIDEO: 1.0, AUDIO: 0.5})
    tensors = {name: torch.randn(batch, *s) for name, s in family.condition_shapes(config, shapes[VIDEO], 7).items()}
    if optional:
        more = family.optional_shapes(config, shapes[VIDEO], 7)
        tensors |= {name: torch.randn(batch, *shape) for name, shape in more.items()}
        tensors["text_length"] = torch.full((batch,), 7)
    if "keyframes" in tensors:
        tensors["keyframe_noise"] = torch.randn_like(tensors["keyframes"])
    return sample, Condition(tensors | {"fps": torch.tensor([[24.0]]).expand(batch, 1)})


@pytest.mark.parametrize("has_frame", [False, True])
@pytest.mark.parametrize("example", EXAMPLES)
def test_inputs_are_those_of_diffusers(example, has_frame):
    """diffusers makes the coordinates from sizes and the frames per second; the sound has its own time. Tokens of a
    given frame have time 0; ``sigma`` is the sample's."""
    network, config = built(example)
    sample, condition = drawn(config, optional=has_frame)
    t = torch.tensor([0.7])
    v = FAMILY.outputs(network, sample, t, condition).velocity
    p, (frames, height, width) = config["patch_size"], sample.video.shape[2:]
    video = sample.video.clone()
    times = {"timestep": 700 * torch.ones(1), "audio_timestep": 1000 * 0.5 * t / (1 - 0.5 * t)}
    sigma = times["timestep"]
    if has_frame:
        video[:, :, :1] = condition.tensors["first_frame"]
        of_frame = height * width // p**2
        times["timestep"] = sigma.expand(1, frames * of_frame).clone()
        times["timestep"][:, :of_frame] = 0
    video = video.unflatten(4, (-1, p)).unflatten(3, (-1, p)).permute(0, 2, 3, 5, 1, 4, 6)
    ours, sound = network(
        video.flatten(4).flatten(1, 3),
        sample.parts[AUDIO].transpose(1, 2).flatten(2),
        condition.tensors["text"],
        condition.tensors["audio_text"],
        **times,
        sigma=sigma,
        audio_sigma=times["audio_timestep"],
        num_frames=frames,
        height=height,
        width=width,
        fps=24.0,
        audio_num_frames=sample.parts[AUDIO].shape[2],
        use_cross_timestep=True,
        return_dict=False,
    )
    theirs = ours.unflatten(2, (-1, p, p)).unflatten(1, (frames, height // p, width // p))
    theirs = theirs.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)
    if has_frame:
        x0 = sample.video - 0.7 * v.video
        assert torch.allclose(x0[:, :, :1], condition.tensors["first_frame"], atol=1e-5)
        theirs[:, :, :1] = v.video[:, :, :1]
    assert torch.allclose(v.video, theirs, atol=1e-5) and v.video.shape == sample.video.shape
    sound = sound.unflatten(2, (2, -1)).transpose(1, 2)
    assert torch.allclose(v.parts[AUDIO], sound, atol=1e-5)


def test_frames_per_second_place_the_frames_next_to_the_sound():
    network, config = built("2.3")
    sample, condition = drawn(config, batch=2)
    rates = torch.tensor([[24.0], [12.0]])
    v = FAMILY.outputs(network, sample, torch.tensor([0.5, 0.5]), Condition({**condition.tensors, "fps": rates}))
    for i in range(2):
        alone = Condition({**{n: x[i : i + 1] for n, x in condition.tensors.items()}, "fps": rates[i : i + 1]})
        single = FAMILY.outputs(network, sample[i : i + 1], torch.tensor([0.5]), alone).velocity
        for part, x in single.parts.items():
            assert torch.allclose(x, v.velocity.parts[part][i : i + 1], atol=1e-5)
    same = FAMILY.outputs(network, sample, torch.tensor([0.5, 0.5]), condition).velocity
    assert not torch.allclose(same.video[1], v.velocity.video[1], atol=1e-3)


@pytest.mark.parametrize(
    "example",
    [
        *((family, name, False) for family in (FAMILY, MiniMaxH3()) for name in family.examples()),
        *((family, name, True) for family in (FAMILY, MiniMaxH3()) for name in family.examples()),
    ],
    ids=lambda example: f"{example[0].name} {example[1]}{', optional' if example[2] else ''}",
)
def test_operations_are_those_that_torch_counts(example):
    family, name, optional = example
    network, config = built(name, family)
    sample, condition = drawn(config, family=family, optional=optional)
    shapes = {name: tuple(x.shape[1:]) for name, x in condition.tensors.items()}
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        family.outputs(network, sample, torch.tensor([0.5]), condition)
    flops = count_flops(family, config, sample.shapes, shapes)
    assert flops.forward == counted.get_total_flops()
    products = sum(n for kind, n in counted.flop_counts["Global"].items() if kind in (torch.ops.aten.bmm,))
    assert flops.attention == products


def test_adapters_have_the_names_of_lightricks():
    network, _ = built("2.3")
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    tensors = {
        f"diffusion_model.{FAMILY.original_name(name)}.lora_{side}.weight": torch.full((1, 1), float(i))
        for i, name in enumerate(linear)
        for side in "AB"
    }
    assert any("adaln_single" in name for name in tensors)
    found = FAMILY.diffusers_adapters(tensors)
    wanted = {f"transformer.{name}.lora_{side}.weight" for name in linear for side in "AB"}
    assert found.keys() == wanted
    assert all(found[f"transformer.{name}.lora_A.weight"].item() == i for i, name in enumerate(linear))
    with pytest.raises(ValueError, match=r"transformer\.x"):
        FAMILY.diffusers_adapters(tensors | {"transformer.x.lora_A.weight": torch.ones(1, 1)})


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != FASTVIDEO])
def test_diffusers_reads_both_formats_of_adapters(tmp_path, kind):
    network, _ = built("2.3")
    layers = [name for name, m in network.named_modules() if isinstance(m, nn.Linear) and ".attn" in name]
    own = {}
    for layer in layers:
        linear = network.get_submodule(layer)
        own[f"{layer}.lora_A.weight"] = torch.randn(2, linear.in_features)
        own[f"{layer}.lora_B.weight"] = torch.randn(linear.out_features, 2)
    before = {layer: network.get_submodule(layer).weight.clone() for layer in layers}
    tensors = file_tensors(kind, own, own.__getitem__, family=FAMILY, scale=0.5, dtype=torch.float32)
    save_file(tensors, tmp_path / "adapters.safetensors")
    state = LTX2Pipeline.lora_state_dict(tmp_path, weight_name="adapters.safetensors", use_safetensors=True)
    LTX2Pipeline.load_lora_into_transformer(state, transformer=network)
    network.fuse_lora()
    for layer, weight in before.items():
        change = 0.5 * own[f"{layer}.lora_B.weight"] @ own[f"{layer}.lora_A.weight"]
        fused = network.get_submodule(layer).weight
        torch.testing.assert_close(fused, weight + change, rtol=1e-5, atol=1e-5)
