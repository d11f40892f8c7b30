"""Tiny HunyuanVideo 1.5 for comparisons: its sizes, three checkpoints, and its call by diffusers."""

from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

from tests.oracles.seeded import write_three

ARCHITECTURE = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 3,
    "num_refiner_layers": 2,
    "patch_size": 1,
    "patch_size_t": 1,
    "text_embed_dim": 10,
    "text_embed_2_dim": 8,
    "image_embed_dim": 6,
    "rope_axes_dim": [4, 4, 4],
}
LATENT_SHAPE = (4, 3, 5, 3)  # 45 tokens, which neither 2 nor 4 ranks can share evenly
CONDITION_SHAPES = {"text": (5, 10), "text_mask": (5,), "glyphs": (4, 8), "glyph_mask": (4,)}
IMAGE_SHAPES = {"first_frame": (4, 1, 5, 3), "image_embeds": (3, 6)}
PIPELINE_FEATURES = 729
"""Number of zero features that ``HunyuanVideo15Pipeline`` passes for a missing image."""


def write_checkpoints(folder: Path) -> None:
    write_three(folder, lambda: HunyuanVideo15Transformer3DModel(**ARCHITECTURE))


def outputs(network: nn.Module, x: Tensor, t: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Call the network like ``HunyuanVideo15Pipeline`` or, with a first frame, like the image-to-video pipeline.

    Return the velocity, and outputs that additions append.
    """
    image, mask = torch.zeros_like(x), torch.zeros_like(x[:, :1])
    features = x.new_zeros(len(x), PIPELINE_FEATURES, network.config.image_embed_dim)
    if "first_frame" in given:
        image = given["first_frame"].repeat(1, 1, x.shape[2], 1, 1)
        image[:, :, 1:] = 0
        mask[:, :, 0] = 1
        features = given["image_embeds"]
    return network(
        hidden_states=torch.cat([x, image, mask], dim=1),
        image_embeds=features,
        timestep=1000 * t,
        encoder_hidden_states=given["text"],
        encoder_attention_mask=given["text_mask"].to(x.dtype),
        encoder_hidden_states_2=given["glyphs"],
        encoder_attention_mask_2=given["glyph_mask"].to(x.dtype),
        return_dict=False,
    )


class WrittenOutHunyuan:
    """Diffusers' processors with written-out attention, since torch's CPU attention has no forward-mode AD.

    In a block, text tokens follow the video tokens. A row that may not attend to any token gives 0.
    """

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None
    ):  # fmt: skip
        def heads(x):
            return x.unflatten(2, (attn.heads, -1))

        q, k, v = heads(attn.to_q(hidden_states)), heads(attn.to_k(hidden_states)), heads(attn.to_v(hidden_states))
        if encoder_hidden_states is None:  # the token refiner, whose mask is of pairs
            return attn.to_out[0](_attend(q, k, v, attention_mask).flatten(2))
        q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (attn.norm_q(q), attn.norm_k(k)))
        text_q, text_k, text_v = (
            heads(of(encoder_hidden_states)) for of in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        )
        q = torch.cat([q, attn.norm_added_q(text_q)], dim=1)
        k = torch.cat([k, attn.norm_added_k(text_k)], dim=1)
        seen = torch.cat([attention_mask.new_ones(hidden_states.shape[:2]), attention_mask], dim=1).bool()
        pairs = seen[:, None, :, None] & seen[:, None, None, :]
        out = _attend(q, k, torch.cat([v, text_v], dim=1), pairs).flatten(2)
        video, text = out.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[0](video), attn.to_add_out(text)


def _attend(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> Tensor:
    """Attend over ``(B, S, H, D)`` under a mask ``(B, 1, S, S)``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~pairs, -1e30)
    return ((logits.softmax(-1) * pairs) @ v).transpose(1, 2)
