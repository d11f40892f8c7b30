"""LTX-2.5's differences from LTX-2.3, of the network and of the released encoders, by diffusers (0.42).

The class, the latents, both VAEs, connectors and vocoder are those of 2.3. The video's feed-forward has no bias. The
network holds an embedding of generated keyframes, for which only diffusers' DFR pipelines ask: it is loaded and saved,
never used. Gemma 4 replaces Gemma 3, and a small diffusion model can decode the video's latents. The head that predicts
a clip's length is not read: ``data.num_frames`` is the length.
"""

from collections.abc import Mapping
from typing import Any

CHANGES = {"ff_bias": False, "use_keyframes_abs_pos_embedding": True}
"""Changes of the released network."""
_EARLIER = {"ff_bias": True, "audio_ff_bias": True, "use_prompt_adaln_single": True,
            "use_keyframes_abs_pos_embedding": False}  # fmt: skip
"""Values of LTX-2.0 and 2.3 that networks of LTX-2.5 change, some of them."""
TEXT_ENCODER = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "text_config": {
        "vocab_size": 262144, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 30.0,
    },
}  # fmt: skip
"""Gemma 4 12B's language model, 11.9e9 parameters, fine-tuned by Lightricks."""
DECODER = "diffusion_decoder"
"""Sub-folder of the diffusion decoder."""
DECODER_CLASS = "LTX2VideoDiffusionDecoderModel"


def is_ltx2_5(config: Mapping[str, Any]) -> bool:
    """Return whether a network of this ``config.json``, with all defaults, is of LTX-2.5."""
    return any(config[key] != earlier for key, earlier in _EARLIER.items())
