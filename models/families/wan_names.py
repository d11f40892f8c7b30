"""What Wan's repository calls the layers of diffusers' ``WanTransformer3DModel``, as ComfyUI and LightX2V do."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from fsdp_cp.errors import UserError

_NAMES = (
    (r"\.attn1\.to_([qkv])$", r".self_attn.\1"),
    (r"\.attn1\.to_out\.0$", r".self_attn.o"),
    (r"\.attn2\.to_([qkv])$", r".cross_attn.\1"),
    (r"\.attn2\.to_out\.0$", r".cross_attn.o"),
    (r"\.attn2\.add_([kv])_proj$", r".cross_attn.\1_img"),
    (r"\.ffn\.net\.0\.proj$", r".ffn.0"),
    (r"\.ffn\.net\.2$", r".ffn.2"),
    (r"^condition_embedder\.time_embedder\.linear_1$", "time_embedding.0"),
    (r"^condition_embedder\.time_embedder\.linear_2$", "time_embedding.2"),
    (r"^condition_embedder\.text_embedder\.linear_1$", "text_embedding.0"),
    (r"^condition_embedder\.text_embedder\.linear_2$", "text_embedding.2"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj$", "img_emb.proj.1"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2$", "img_emb.proj.3"),
    (r"^condition_embedder\.time_proj$", "time_projection.1"),
    (r"^proj_out$", "head.head"),
)
"""Of linear layers: diffusers' names, and those of Wan's repository."""


def original_name(layer: str) -> str:
    """Of a linear layer: ``blocks.0.attn1.to_q`` is ``blocks.0.self_attn.q``.

    Raises:
        UserError: a layer that has none.
    """
    found = layer
    for ours, theirs in _NAMES:
        found = re.sub(ours, theirs, found)
    if found == layer:
        raise UserError(f"{layer} has no name in Wan's own code; use --format diffusers-lora")
    return found


_PREFIX = re.compile(r"(base_model\.model|transformer|diffusion_model|pipe\.dit)\.")
_OWN_LAYER = re.compile(r"lora_unet_|blocks\.\d+\.((self|cross)_attn|ffn\.\d)\.")


def original_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return adapters with the names of Wan's own code as diffusers expects them; ``None`` for other names.

    musubi and kohya write ``lora_unet_``, DiffSynth ``pipe.dit.`` or no prefix, ComfyUI ``diffusion_model.``.
    """
    bare = {name: _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name for name in tensors}
    if not any(_OWN_LAYER.match(name) for name in bare.values()):
        return None
    return {
        name if name.startswith("lora_unet_") else f"diffusion_model.{bare[name]}": tensor
        for name, tensor in tensors.items()
    }
