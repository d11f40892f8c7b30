"""Networks of LTX-2.0, 2.3 and 2.5 in the names of Lightricks' own code: their names and configuration as diffusers has
them, and back. The functions are those of :mod:`models.files.originals`.

A released file holds all networks of a pipeline, and their configuration in its header.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from fsdp_cp.errors import UserError
from models.files.originals import Shape

CLASS = "AVTransformer3DModel"
"""Lightricks' name of the class, in a header."""
PREFIX = "model.diffusion_model."
_OWN_PARTS = {
    "proj_in": "patchify_proj",
    "audio_proj_in": "audio_patchify_proj",
    "time_embed": "adaln_single",
    "audio_time_embed": "audio_adaln_single",
    "prompt_adaln": "prompt_adaln_single",
    "audio_prompt_adaln": "audio_prompt_adaln_single",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
    "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
    "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
    "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}
"""Parts of names, between dots, that differ: diffusers' and Lightricks'."""
_PARTS = {own: part for part, own in _OWN_PARTS.items()}
_OTHER_NETWORK = re.compile(
    rf"(?:{re.escape(PREFIX)})?"
    r"(vae|audio_vae|vocoder|duration_head|text_embedding_projection|video_embeddings_connector"
    r"|audio_embeddings_connector)\."
)
_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 32, "attention_head_dim": 128, "cross_attention_dim": 4096, "in_channels": 128,
    "out_channels": 128, "audio_num_attention_heads": 32, "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 2048, "audio_in_channels": 128, "audio_out_channels": 128, "num_layers": 48,
    "caption_channels": 3840, "norm_eps": 1e-6, "rope_type": "split", "positional_embedding_theta": 10000.0,
    "timestep_scale_multiplier": 1000, "av_ca_timestep_scale_multiplier": 1, "ff_bias": True, "audio_ff_bias": True,
    "use_prompt_adaln_single": True, "use_keyframes_abs_pos_embedding": False,
}  # fmt: skip
"""Values that a header can leave out (``LTXModelConfigurator`` of Lightricks' ``ltx_core``)."""
_KEYS = {"positional_embedding_theta": "rope_theta",
         "av_ca_timestep_scale_multiplier": "cross_attn_timestep_scale_multiplier"}  # fmt: skip
"""diffusers' keys of the same values, where they differ."""
_log = logging.getLogger(__name__)


def is_original(names: Iterable[str]) -> bool:
    """Return whether these are names of Lightricks' own code for picture and sound, without prefix."""
    return {"patchify_proj.weight", "audio_patchify_proj.weight"} <= {*names}


def transformer_names(names: Iterable[str], where: str) -> list[str]:
    """Return the names in a file without those of other networks of a pipeline, and log which networks these are."""
    found = {name: _OTHER_NETWORK.match(name) for name in names}
    if not is_original(name.removeprefix(PREFIX) for name in found):
        return [*found]
    _log_others(where, tuple(sorted({match[1] for match in found.values() if match})))
    return [name for name, match in found.items() if match is None]


@cache  # all roles may start from the file
def _log_others(where: str, others: tuple[str, ...]) -> None:
    if others:
        _log.info("%s: reading the transformer; leaving out %s", where, ", ".join(others))


def diffusers_names(shapes: Mapping[str, Shape], where: str) -> dict[str, str]:
    """Return the own name of each tensor by its name in diffusers."""
    return {".".join(_PARTS.get(part, part) for part in name.split(".")): name for name in shapes}


def own_names(names: Iterable[str]) -> dict[str, str]:
    """Return the own name of each tensor, with the prefix of released files, by its name in diffusers."""
    return {name: PREFIX + ".".join(_OWN_PARTS.get(part, part) for part in name.split(".")) for name in names}


def configure(shapes: Mapping[str, Shape], given: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """Return diffusers' configuration of a network in its own names.

    ``given`` is diffusers' configuration, or that of a header in Lightricks' keys, or ``None`` for a released network.
    """
    if given is None:
        sizes = [(shapes[f"{part}patchify_proj.weight"] or (0,))[0] for part in ("", "audio_")]
        layers = len({name.split(".")[1] for name in shapes if name.startswith("transformer_blocks.")})
        if [layers, *sizes] != [48, 4096, 2048]:
            raise UserError(
                f"{where} has no configuration in its header, and is not a released LTX-2: {layers} layers, widths"
                f" {sizes[0]} and {sizes[1]}; set ROLE.config to a folder with its config.json"
            )
        since_2_3 = "transformer_blocks.0.attn1.to_gate_logits.weight" in shapes
        later = ("apply_gated_attention", "cross_attention_adaln", "caption_proj_before_connector")
        given = dict.fromkeys(later, since_2_3) | {
            **{f"{part}ff_bias": f"transformer_blocks.0.{part}ff.net.2.bias" in shapes for part in ("", "audio_")},
            # Only networks whose text is modulated have the embedder; for the others diffusers' default stays.
            "use_prompt_adaln_single": not since_2_3 or "prompt_adaln_single.linear.weight" in shapes,
            "use_keyframes_abs_pos_embedding": "keyframes_abs_pos_embedding" in shapes,
            "frequencies_precision": "float64",
            "av_ca_timestep_scale_multiplier": 1000,
        }
    elif given.get("_class_name", CLASS) != CLASS:
        return dict(given)
    spans: list[Any] = [given.get("positional_embedding_max_pos", [20, 2048, 2048]),
                        given.get("audio_positional_embedding_max_pos", [20])]  # fmt: skip
    if [len(span) if isinstance(span, list) else 0 for span in spans] != [3, 1]:
        raise UserError(f"{where}: positional_embedding_max_pos of its header must be 3 numbers, and audio_... one")
    values = {_KEYS.get(key, key): given.get(key, value) for key, value in _DEFAULTS.items()}
    scale = "cross_attn_timestep_scale_multiplier"
    if values[scale] == 1000.0:  # so written in released files
        values[scale] = 1000
    gated, modulated = given.get("apply_gated_attention", False), given.get("cross_attention_adaln", False)
    return {
        "_class_name": "LTX2VideoTransformer3DModel",
        **values,
        **dict.fromkeys(("gated_attn", "audio_gated_attn", "perturbed_attn"), gated),
        **dict.fromkeys(("cross_attn_mod", "audio_cross_attn_mod"), modulated),
        **dict(zip(("pos_embed_max_pos", "base_height", "base_width"), spans[0], strict=True)),
        "audio_pos_embed_max_pos": spans[1][0],
        "rope_double_precision": given.get("frequencies_precision") == "float64",
        "use_prompt_embeddings": not given.get("caption_proj_before_connector", False),
    }


def own_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in Lightricks' keys for one of diffusers."""
    own = {
        "_class_name": CLASS,
        **{key: config[_KEYS.get(key, key)] for key in _DEFAULTS},
        "apply_gated_attention": config["gated_attn"],
        "cross_attention_adaln": config["cross_attn_mod"],
        "caption_proj_before_connector": not config["use_prompt_embeddings"],
        "frequencies_precision": "float64" if config["rope_double_precision"] else "float32",
        "positional_embedding_max_pos": [config[key] for key in ("pos_embed_max_pos", "base_height", "base_width")],
        "audio_positional_embedding_max_pos": [config["audio_pos_embed_max_pos"]],
    }
    for key, value in ({"patch_size": 1} | configure({}, own, "")).items():
        if config.get(key, value) != value and key != "perturbed_attn":  # a choice of diffusers' processor
            raise UserError(f"Lightricks' own code has no {key}={config[key]}; leave out --format ltx2")
    return own
