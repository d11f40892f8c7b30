"""The operations that MFU is computed from, against PyTorch's own counter on the real network."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.wan import Wan

SMALL = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 6,
    "text_dim": 10,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 3,
    "cross_attn_norm": True,
    "rope_max_seq_len": 32,
}
LONG_TEXT = {"patch_size": (1, 4, 4), "text_dim": 40, "ffn_dim": 20, "num_layers": 1, "cross_attn_norm": False}


@pytest.mark.parametrize("changes", [{}, LONG_TEXT, {"num_attention_heads": 2, "freq_dim": 64}], ids=str)
@pytest.mark.parametrize(("batch", "sizes", "text_tokens"), [(1, (3, 8, 8), 5), (2, (1, 8, 16), 30)])
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
    tokens = Wan.tokens(config | {"out_channels": 4}, (4, *sizes), "test")
    ours = batch * Wan.forward_flops(config, tokens, text_tokens)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)
