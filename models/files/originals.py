"""Networks of Wan in the names of Wan's own code: their names and configuration as diffusers has them, and back.

The names are those of one file, with ComfyUI's prefix or without, or of the parts that Wan's repositories have.
diffusers guesses a configuration from the width and channels, which is wrong for Wan 2.2; heads cannot be read off any
shape. So :func:`configure` takes a given configuration, or a released network's by all shapes that differ between them.
"""

import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch

from fsdp_cp.errors import UserError

Shape = tuple[int, ...]
HEAD_DIM = 128
"""Head size of every released network."""
RELEASED: dict[tuple[int, int, int, int, bool], str] = {
    (30, 1536, 16, 16, False): "Wan 2.1 T2V 1.3B",
    (40, 5120, 16, 16, False): "Wan 2.1 T2V 14B, and an expert of Wan 2.2 T2V A14B",
    (40, 5120, 36, 16, True): "Wan 2.1 I2V 14B",
    (40, 5120, 36, 16, False): "an expert of Wan 2.2 I2V A14B",
    (30, 3072, 48, 48, False): "Wan 2.2 TI2V 5B",
}
"""Released networks by layers, width, channels in and out, and whether they have an image embedder."""
_BLOCK = re.compile(r"^blocks\.(\d+)\.")
_NEEDED = ("patch_embedding.weight", "head.head.weight", "blocks.0.ffn.0.weight", "text_embedding.0.weight",
           "time_embedding.0.weight")  # fmt: skip


def is_original(names: Iterable[str]) -> bool:
    """Return whether these are names of Wan's own code."""
    return {"patch_embedding.weight", "head.head.weight"} <= {*names}


def diffusers_names(shapes: Mapping[str, Shape], where: str) -> dict[str, str]:
    """Return the own name of each tensor by its name in diffusers, by diffusers' own converter on the meta device.

    ``diffusers.loaders.single_file_utils.convert_wan_transformer_to_diffusers`` is no public interface (0.42).
    """
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    own = {id(tensor): name for name, tensor in tensors.items()}
    try:
        converted = convert_wan_transformer_to_diffusers(dict(tensors))
        names = {name: own[id(tensor)] for name, tensor in converted.items()}
    except (KeyError, IndexError):
        names = {}
    if len(names) != len(tensors):
        raise UserError(f"{where} is a Wan network of another kind (Animate, VACE); give a text or image to video one")
    return names


def configure(shapes: Mapping[str, Shape], given: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """Return diffusers' configuration of a network in its own names.

    ``given`` is diffusers' configuration, or one of Wan's own code (``dim``, ``num_heads``), or ``None`` for a released
    network.
    """
    if given is not None and "num_attention_heads" in given:
        return dict(given)
    if missing := [name for name in _NEEDED if name not in shapes or len(shapes[name]) < 2]:
        raise UserError(f"{where} has no {missing[0]} as Wan's networks have; give a diffusers folder")
    width, channels, *patch = shapes["patch_embedding.weight"]
    layers = 1 + max(int(found[1]) for name in shapes if (found := _BLOCK.match(name)))
    out = shapes["head.head.weight"][0] // max(1, math.prod(patch))
    image = shapes.get("img_emb.proj.1.weight")
    key = (layers, width, channels, out, image is not None)
    known = given if given is not None and "num_heads" in given else {}
    heads = width // HEAD_DIM if not known and key in RELEASED else known.get("num_heads")
    if type(heads) is not int or heads < 1 or width % heads:
        raise UserError(
            f"{where} is not a released Wan network: {layers} layers, width {width}, {channels} channels in and {out}"
            f" out, {'an' if image else 'no'} image embedder. Heads cannot be read off shapes; set ROLE.config to a"
            " folder with its config.json"
        )
    return {
        "_class_name": "WanTransformer3DModel",
        "patch_size": list(patch),
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "in_channels": channels,
        "out_channels": out,
        "text_dim": shapes["text_embedding.0.weight"][1],
        "freq_dim": shapes["time_embedding.0.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.0.weight"][0],
        "num_layers": layers,
        "cross_attn_norm": "blocks.0.norm3.weight" in shapes,
        "qk_norm": "rms_norm_across_heads" if "blocks.0.self_attn.norm_q.weight" in shapes else None,
        "eps": known.get("eps", 1e-6),
        "image_dim": None if image is None else image[1],
        "added_kv_proj_dim": shapes.get("blocks.0.cross_attn.k_img.weight", (0, None))[1],
    }


_FIXED = {"rope_max_seq_len": 1024, "qk_norm": "rms_norm_across_heads", "pos_embed_seq_len": None}
"""Values of diffusers' configuration that Wan's own code does not let a configuration change."""


def own_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of Wan's own code for a configuration of diffusers."""
    for name, value in _FIXED.items():
        if config.get(name, value) != value:
            raise UserError(f"Wan's own code has no {name}={config[name]}; leave out --format wan")
    heads, channels = config["num_attention_heads"], config["in_channels"]
    image = config.get("image_dim") is not None or channels == 36
    names = {"ffn_dim": "ffn_dim", "freq_dim": "freq_dim", "in_channels": "in_dim", "out_channels": "out_dim",
             "num_layers": "num_layers", "eps": "eps"}  # fmt: skip
    return {
        "_class_name": "WanModel",
        "model_type": "i2v" if image else "ti2v" if channels == 48 else "t2v",
        "dim": heads * config["attention_head_dim"],
        "num_heads": heads,
        "text_len": 512,
        **{own: config[name] for name, own in names.items()},
    }


@cache
def _own_stems() -> dict[str, str]:
    """Return the own name of each parameter by its name in diffusers, for a network of one block."""
    block = [f"{kind}_attn.{part}" for kind in ("self", "cross") for part in ("q", "k", "v", "o", "norm_q", "norm_k")]
    block += ["ffn.0", "ffn.2", "norm3", "modulation", *(f"cross_attn.{part}_img" for part in ("k", "v", "norm_k"))]
    ends = ["patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2",
            "time_projection.1", "head.head", "head.modulation"]  # fmt: skip
    ends += [f"img_emb.proj.{i}" for i in (0, 1, 3, 4)]
    stems = [*ends, *(f"blocks.0.{stem}" for stem in block)]
    names = [
        name
        for stem in stems
        for name in ([stem] if stem.endswith("modulation") else [f"{stem}.weight", f"{stem}.bias"])
    ]
    return diffusers_names(dict.fromkeys(names, (1,)), "Wan")


def own_names(names: Iterable[str]) -> dict[str, str]:
    """Return the own name of each tensor by its name in diffusers: the converter, read backwards."""
    own: dict[str, str] = {}
    for name in names:
        block = _BLOCK.match(name)
        known = _own_stems().get(_BLOCK.sub("blocks.0.", name))
        if known is None:
            raise UserError(f"Wan's own code has no {name}; use a format of diffusers")
        own[name] = known if block is None else _BLOCK.sub(block[0], known)
    return own
