"""Wan's attention in diffusers, written out."""

import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor


class WrittenOut(WanAttnProcessor):
    """diffusers' processor with written-out attention, since torch's CPU attention has no forward-mode AD."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        image = None
        if attn.add_k_proj is not None:  # the text is the last 512 tokens, for any number of image tokens
            image, keys = keys[:, :-512], keys[:, -512:]
        q = attn.norm_q(attn.to_q(hidden_states))
        out = self._attend(attn, q, attn.norm_k(attn.to_k(keys)), attn.to_v(keys), rotary_emb)
        if image is not None:
            out = out + self._attend(attn, q, attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image))
        return attn.to_out[0](out)

    def _attend(self, attn, q, k, v, rotary_emb=None):
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        if rotary_emb is not None:
            q, k = (self._rotate(x, *rotary_emb) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Multiply pairs of neighboring numbers, as complex numbers, by ``cos + i sin``."""
        turn = torch.complex(cos[..., 0::2], sin[..., 1::2])
        pairs = torch.view_as_complex(x.to(cos.dtype).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)
