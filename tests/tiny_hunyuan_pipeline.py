"""A test-sized HunyuanVideo 1.5 pipeline folder with random weights.

    python -m tests.tiny_hunyuan_pipeline FOLDER [--seed 0] [--image]

writes a folder in diffusers layout that ``HunyuanVideo15Pipeline.from_pretrained`` loads (with ``--image``
``HunyuanVideo15ImageToVideoPipeline``): nothing is downloaded.
"""

import string
from pathlib import Path
from typing import Any

import torch

from tests.tiny_pipeline import command

CHANNELS, TEXT_WIDTH, GLYPH_WIDTH, IMAGE_WIDTH = 8, 32, 24, 20
SYSTEM_TOKENS = 108
"""Number of tokens of the chat template that the pipelines cut off."""
TRANSFORMER: dict[str, Any] = {
    "in_channels": 2 * CHANNELS + 1, "out_channels": CHANNELS, "num_attention_heads": 4, "attention_head_dim": 12,
    "num_layers": 2, "num_refiner_layers": 2, "text_embed_dim": TEXT_WIDTH, "text_embed_2_dim": GLYPH_WIDTH,
    "image_embed_dim": IMAGE_WIDTH, "rope_axes_dim": (4, 4, 4), "target_size": 64,
}  # fmt: skip


def build_tiny_hunyuan_pipeline(folder: str | Path, seed: int = 0, *, image: bool = False) -> Path:
    """Write vae/, two text encoders and tokenizers, transformer/, scheduler/, guider/ and model_index.json; with
    ``image`` image_encoder/ and feature_extractor/ too. Returns the folder.

    VAE 8 channels, 4x in time, 16x in space, scaled to latents of about 1. Transformer 2 layers of 4 heads x 12.
    """
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15ImageToVideoPipeline,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )
    from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

    with torch.random.fork_rng(devices=[]):  # the caller's random state does not change
        torch.manual_seed(seed)
        settings = {"latent_channels": CHANNELS, "block_out_channels": (8, 8, 16, 16, 16), "layers_per_block": 1}
        vae = AutoencoderKLHunyuanVideo15(**settings).eval()
        noise = torch.randn(1, 3, 3, 4, 4)
        video = torch.nn.functional.interpolate(noise, size=(9, 64, 64), mode="trilinear").clamp(-1, 1)
        with torch.no_grad():
            spread = float(vae.encode(video).latent_dist.mode().std())
        vae.register_to_config(scaling_factor=1 / spread)
        tokenizer = _tokenizer()
        text_encoder = Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(
                vocab_size=len(tokenizer),
                hidden_size=TEXT_WIDTH,
                intermediate_size=48,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                rope_scaling={"type": "default", "mrope_section": [1, 1, 2]},
            )  # fmt: skip
        ).eval()
        text_encoder_2 = T5EncoderModel(
            T5Config(vocab_size=384, d_model=GLYPH_WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=3)
        ).eval()
        transformer = HunyuanVideo15Transformer3DModel(**TRANSFORMER).eval()
        parts = _image_parts() if image else {}
    pipeline = HunyuanVideo15ImageToVideoPipeline if image else HunyuanVideo15Pipeline
    pipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=ByT5Tokenizer(),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
        **parts,
    ).save_pretrained(folder, safe_serialization=True)
    return Path(folder)


def _image_parts() -> dict[str, Any]:
    """Return a SigLIP of 9 patches and its processor."""
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        hidden_size=IMAGE_WIDTH, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, image_size=42,
        patch_size=14,
    )  # fmt: skip
    size = {"height": 42, "width": 42}
    return {"image_encoder": SiglipVisionModel(config).eval(), "feature_extractor": SiglipImageProcessor(size=size)}


def _tokenizer() -> Any:
    """Return a tokenizer of single characters whose chat template has a system part as long as the published one."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "<system>", "<user>", "<end>", *string.printable]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<system>", "<user>", "<end>"],
        padding_side="right",
    )
    # The first letters of the system message fill the 108 tokens that precede the caption in the published template.
    shown = "{{ messages[0]['content'][:" + str(SYSTEM_TOKENS - 2) + "] }}"
    tokenizer.chat_template = f"<system>{shown}<user>{{{{ messages[1]['content'] }}}}<end>"
    return tokenizer


if __name__ == "__main__":
    command(build_tiny_hunyuan_pipeline)
