"""Operation counts that MFU is computed from, of every family, against PyTorch's counter on the real network."""

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel, LTXVideoTransformer3DModel, WanTransformer3DModel
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from distill.planning.prediction import load_hardware
from fsdp_cp.measure.memory import peak_flops
from models.condition import Condition
from models.families.hunyuan import Hunyuan
from models.families.ltx import LTX
from models.families.operations import count_flops
from models.families.wan import Wan
from tests.oracles import tiny_hunyuan, tiny_ltx, tiny_wan
from tests.oracles.samples import video
from tests.tiers import parametrize


def wan_inputs(changes, batch, sizes, text_tokens, image=False):
    """Return the family, a network and its inputs."""
    network = WanTransformer3DModel(**tiny_wan.ARCHITECTURE | changes)
    tensors = {"text": torch.randn(batch, text_tokens, network.config.text_dim)}
    if image == "first_frame":
        tensors["first_frame"] = torch.randn(batch, 4, 1, *sizes[1:])
    elif image:
        tensors["image_latents"], tensors["image_mask"] = torch.randn(batch, 4, *sizes), torch.ones(batch, 4, *sizes)
        tensors["image_embeds"] = torch.randn(batch, 257, network.config.image_dim)
    return Wan(), network, torch.randn(batch, 4, *sizes), torch.full((batch,), 0.5), Condition(tensors)


def ltx_inputs(changes, batch, sizes, text_tokens, image=False):
    """Return the family, a network and its inputs."""
    network = LTXVideoTransformer3DModel(**tiny_ltx.ARCHITECTURE | changes)
    tensors = {
        "text": torch.randn(batch, text_tokens, network.config.caption_channels),
        "text_mask": torch.ones(batch, text_tokens, dtype=torch.bool),
        "latent_spacing": torch.tensor(tiny_ltx.SPACING).repeat(batch, 1),
    }
    return LTX(), network, torch.randn(batch, 4, *sizes), torch.full((batch,), 0.5), Condition(tensors)


def hunyuan_inputs(changes, batch, sizes, text_tokens, image=False):
    """Return the family, a network and its inputs. All text tokens count, so that torch uses one kernel."""
    network = HunyuanVideo15Transformer3DModel(**tiny_hunyuan.ARCHITECTURE | changes)
    config = network.config
    tensors = {
        "text": torch.randn(batch, text_tokens, config.text_embed_dim),
        "text_mask": torch.ones(batch, text_tokens, dtype=torch.bool),
        "glyphs": torch.randn(batch, 4, config.text_embed_2_dim),
        "glyph_mask": torch.ones(batch, 4, dtype=torch.bool),
    }
    if image:
        tensors["first_frame"] = torch.randn(batch, 4, 1, *sizes[1:])
        tensors["image_embeds"] = torch.randn(batch, 5, config.image_embed_dim)
    return Hunyuan(), network, torch.randn(batch, 4, *sizes), torch.full((batch,), 0.5), Condition(tensors)


LONG_TEXT = {"patch_size": (1, 4, 4), "text_dim": 40, "ffn_dim": 20, "num_layers": 1, "cross_attn_norm": False}
WAN_IMAGE = {"in_channels": 12, "image_dim": 14, "added_kv_proj_dim": 48}
NARROW_LTX = {"num_attention_heads": 2, "cross_attention_dim": 20, "caption_channels": 40, "num_layers": 1}
NARROW_HUNYUAN = {"num_attention_heads": 2, "text_embed_dim": 40, "num_layers": 1, "num_refiner_layers": 1}
UNREFINED = {"num_refiner_layers": 0, "mlp_ratio": 2.5, "text_embed_2_dim": 20}


def described(network, condition):
    """Return the network's configuration and the shapes of its condition."""
    return dict(network.config), {name: tuple(value.shape[1:]) for name, value in condition.tensors.items()}


@pytest.mark.parametrize(
    ("inputs", "changes", "batch", "sizes", "text_tokens", "image"),
    [
        (wan_inputs, {"num_attention_heads": 2, "freq_dim": 64}, 1, (3, 8, 8), 5, False),
        (wan_inputs, LONG_TEXT, 2, (1, 8, 16), 30, False),
        (wan_inputs, WAN_IMAGE, 1, (3, 8, 8), 512, True),
        (wan_inputs, {"out_channels": 4}, 1, (3, 6, 8), 5, "first_frame"),
        (ltx_inputs, {}, 2, (1, 8, 16), 30, False),
        (ltx_inputs, NARROW_LTX, 1, (3, 8, 8), 5, False),
        (hunyuan_inputs, {}, 2, (1, 8, 16), 30, True),
        (hunyuan_inputs, NARROW_HUNYUAN, 1, (3, 8, 8), 5, False),
    ],
)
def test_forward_flops_are_those_that_torch_counts(inputs, changes, batch, sizes, text_tokens, image):
    family, network, x, t, condition = inputs(changes, batch, sizes, text_tokens, image)
    # The counter knows no operations of the CPU's flash kernel and would leave attention out.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        family.outputs(network, video(x), t, condition)
    config, shapes = described(network, condition)
    ours = count_flops(family, config, video(x).shapes, shapes)
    assert batch * ours.forward == counter.get_total_flops()
    assert batch * ours.attention == counter.get_flop_counts()["Global"][torch.ops.aten.bmm] > 0


class _Counted(TorchDispatchMode):
    """torch's counter without products of zeros, which forward mode creates for weights without tangents."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func._overloadpacket in flop_registry:
            factors = args[1:3] if func._overloadpacket is torch.ops.aten.addmm else args[:2]
            if all(factor.any() for factor in factors):
                self.flops += flop_registry[func._overloadpacket](*args, **kwargs or {}, out_val=out)
        return out


@parametrize(
    ("inputs", "changes", "sizes"),
    [
        (wan_inputs, {}, (3, 8, 8)),
        (wan_inputs, LONG_TEXT, (2, 16, 16)),
        (ltx_inputs, NARROW_LTX, (2, 8, 8)),
        (hunyuan_inputs, NARROW_HUNYUAN, (2, 8, 8)),
        (hunyuan_inputs, UNREFINED, (2, 8, 8)),
    ],
    quick=3,
)
def test_those_of_a_tangent_too(inputs, changes, sizes):
    """The test counts tangents of the state and the time, which the methods with derivatives need."""
    family, network, x, t, condition = inputs(changes, 1, sizes, 30)
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), forward_ad.dual_level():
        dual_x, dual_t = (forward_ad.make_dual(value, torch.randn_like(value)) for value in (x, t))
        with _Counted() as counter:
            family.outputs(network, video(dual_x), dual_t, condition)
    config, shapes = described(network, condition)
    ours = count_flops(family, config, video(x).shapes, shapes)
    assert ours.forward + ours.tangent == pytest.approx(counter.flops, rel=0.001)


def test_rates_by_the_device_s_name(monkeypatch):
    """The rates are those of planning.hardware, where both know the device."""
    for name, tflops, known in (
        ("NVIDIA H20", 148, "h20"), ("NVIDIA H200", 989, "h200"), ("NVIDIA H100 PCIe", None, None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == (None if tflops is None else tflops * 1e12)
        if known:
            assert load_hardware(known).bf16_tflops == pytest.approx(tflops, rel=1e-3)
