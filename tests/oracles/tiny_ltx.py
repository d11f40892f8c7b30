"""Tiny LTX-Video for comparisons: its sizes, three checkpoints, and its call by diffusers."""

from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import LTXPipeline, LTXVideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor, apply_rotary_emb
from torch import Tensor, nn

from tests.oracles.seeded import write_three

ARCHITECTURE = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 10,
    "cross_attention_dim": 40,
    "num_layers": 2,
    "caption_channels": 10,
}
LATENT_SHAPE = (4, 3, 5, 3)  # 45 tokens, which neither 2 nor 4 ranks can share evenly
CONDITION_SHAPES = {"text": (5, 10), "text_mask": (5,), "latent_spacing": (4,)}
FRAME_RATE = 24
SPACING = (8 / FRAME_RATE, 32.0, 32.0, 0.0)


def write_checkpoints(folder: Path) -> None:
    write_three(folder, lambda: LTXVideoTransformer3DModel(**ARCHITECTURE))


def velocity(network: nn.Module, x: Tensor, t: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """Return the velocity of a call like ``LTXPipeline``'s, including packing and unpacking.

    With a first frame the call is like ``LTXImageToVideoPipeline``'s, and frame 0 points to the given frame.
    """
    frames, height, width = x.shape[2:]
    mask = torch.zeros_like(x[:, :1])
    times, mixed = 1000 * t, x
    if "first_frame" in given:
        mask[:, :, 0] = 1
        mixed = mask * given["first_frame"] + (1 - mask) * x
        times = 1000 * t[:, None] * (1 - LTXPipeline._pack_latents(mask)[..., 0])
    out = network(
        hidden_states=LTXPipeline._pack_latents(mixed),
        encoder_hidden_states=given["text"],
        timestep=times,
        encoder_attention_mask=given["text_mask"],
        num_frames=frames,
        height=height,
        width=width,
        rope_interpolation_scale=SPACING[:3],
        return_dict=False,
    )[0]
    v = LTXPipeline._unpack_latents(out, frames, height, width)
    return (1 - mask) * v + mask * (x - given.get("first_frame", x)) / t.view(-1, 1, 1, 1, 1)


class WrittenOutLtx(LTXVideoAttnProcessor):
    """Diffusers' processor with written-out attention, since torch's CPU attention has no forward-mode AD."""

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None
    ):  # fmt: skip
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(keys)), attn.to_v(keys)
        if image_rotary_emb is not None:
            q, k = apply_rotary_emb(q, image_rotary_emb), apply_rotary_emb(k, image_rotary_emb)
        q, k, v = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (q, k, v))
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if attention_mask is not None:
            logits = logits + attention_mask[:, None]
        return attn.to_out[0]((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
