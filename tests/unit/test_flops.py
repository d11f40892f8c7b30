"""Operation counts that MFU is computed from, against PyTorch's counter on the real network."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from distill.planning.hardware import load_hardware
from fsdp_cp.measure.memory import peak_flops
from models.families.wan import Wan
from tests.oracles.tiny_wan import ARCHITECTURE

SMALL = ARCHITECTURE | {"out_channels": 6}
LONG_TEXT = {"patch_size": (1, 4, 4), "text_dim": 40, "ffn_dim": 20, "num_layers": 1, "cross_attn_norm": False}


@pytest.mark.parametrize(
    ("changes", "batch", "sizes", "text_tokens"),
    [({"num_attention_heads": 2, "freq_dim": 64}, 1, (3, 8, 8), 5), (LONG_TEXT, 2, (1, 8, 16), 30)],
)
def test_forward_flops_are_those_that_torch_counts(changes, batch, sizes, text_tokens):
    network = WanTransformer3DModel(**SMALL | changes)
    config = dict(network.config)
    inputs = {
        "hidden_states": torch.randn(batch, 4, *sizes),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": torch.randn(batch, text_tokens, config["text_dim"]),
    }
    # The counter knows no operations of the CPU's flash kernel and would leave attention out.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        network(**inputs)
    assert "aten.bmm" in {str(op) for op in counter.get_flop_counts()["Global"]}, "attention was not counted"
    # As many channels come out as go in where a network has a role; here not, so that the two cannot be confused.
    tokens = Wan().tokens(config, (4, *sizes))
    ours = batch * Wan().forward_flops(config, tokens, {"text": (text_tokens, config["text_dim"])})
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)
    shapes = {"text": (text_tokens, config["text_dim"])}
    of_attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert batch * Wan().attention_flops(config, tokens, shapes) == of_attention


def test_those_of_an_image_to_video_network_too(image_tokens=257):
    image = {"in_channels": 16, "out_channels": 6, "image_dim": 14, "added_kv_proj_dim": 48}
    network = WanTransformer3DModel(**SMALL | image)
    config, text = dict(network.config), (512, SMALL["text_dim"])
    inputs = {
        "hidden_states": torch.randn(1, 16, 3, 8, 8),
        "timestep": torch.full((1,), 500.0),
        "encoder_hidden_states": torch.randn(1, *text),
        "encoder_hidden_states_image": torch.randn(1, image_tokens, 14),
    }
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        network(**inputs)
    shapes = {"text": text, "image_embeds": (image_tokens, 14)}
    tokens = Wan().tokens(config, (6, 3, 8, 8))
    assert Wan().forward_flops(config, tokens, shapes) == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert Wan().attention_flops(config, tokens, shapes) == counter.get_flop_counts()["Global"][torch.ops.aten.bmm]


class _Counted(TorchDispatchMode):
    """torch's counts without products of zeros, which forward mode makes for the tangents that weights do not have."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func._overloadpacket in flop_registry:
            factors = args[1:3] if func._overloadpacket is torch.ops.aten.addmm else args[:2]
            if all(factor.any() for factor in factors):
                self.flops += flop_registry[func._overloadpacket](*args, **kwargs or {}, out_val=out)
        return out


@pytest.mark.parametrize(
    ("changes", "sizes", "text_tokens"), [({}, (3, 8, 8), 5), (LONG_TEXT, (2, 16, 16), 30)], ids=str
)
def test_those_of_a_tangent_too(changes, sizes, text_tokens):
    """Count tangents of the state and the time, as the methods with derivatives need them."""
    network = WanTransformer3DModel(**SMALL | changes)
    config = dict(network.config)
    condition = {"text": (text_tokens, config["text_dim"])}
    x, t = torch.randn(1, 4, *sizes), torch.full((1,), 500.0)
    text = torch.randn(1, *condition["text"])
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(value, torch.randn_like(value)) for value in (x, t)]
        with _Counted() as counter:
            network(duals[0], duals[1], text)
    tokens = Wan().tokens(config, (4, *sizes))
    forward, tangent = (f(config, tokens, condition) for f in (Wan().forward_flops, Wan().tangent_flops))
    assert forward + tangent == pytest.approx(counter.flops, rel=0.01)


def test_rates_by_the_device_s_name(monkeypatch):
    """The rates are those of planning.hardware, where both know the device."""
    for name, tflops, known in (
        ("NVIDIA H20", 148, "h20"), ("NVIDIA H200", 989, "h200"), ("NVIDIA H100 PCIe", None, None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == (None if tflops is None else tflops * 1e12)
        if known:
            assert load_hardware(known).bf16_tflops == pytest.approx(tflops, rel=1e-3)
