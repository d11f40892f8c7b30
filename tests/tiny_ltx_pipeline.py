"""A test-sized LTX-Video pipeline folder with random weights.

    python -m tests.tiny_ltx_pipeline FOLDER [--seed 0]

writes a folder in diffusers layout that ``LTXPipeline.from_pretrained`` loads: nothing is downloaded.
"""

from pathlib import Path
from typing import Any

import torch

from tests.tiny_pipeline import _tokenizer, command

CHANNELS = 8
TEXT_WIDTH = 32
TRANSFORMER: dict[str, Any] = {
    "in_channels": CHANNELS, "out_channels": CHANNELS, "num_attention_heads": 4, "attention_head_dim": 12,
    "cross_attention_dim": 48, "num_layers": 2, "caption_channels": TEXT_WIDTH,
}  # fmt: skip


def build_tiny_ltx_pipeline(
    folder: str | Path, seed: int = 0, *, timestep_conditioning: bool = False, pipeline: str = "LTXPipeline"
) -> Path:
    """Write vae/, text_encoder/, tokenizer/, transformer/, scheduler/ and model_index.json; returns the folder.

    VAE 8 channels, 8x in time, 32x in space, its statistics measured on smooth noise; with ``timestep_conditioning``
    its decoder takes a time and puts noise into its layers, as 0.9.1's. Transformer 2 layers of 4 heads x 12.
    """
    import diffusers
    from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXVideoTransformer3DModel
    from transformers import T5Config, T5EncoderModel

    with torch.random.fork_rng(devices=[]):  # the caller's random state does not change
        torch.manual_seed(seed)
        vae = AutoencoderKLLTXVideo(
            latent_channels=CHANNELS,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            decoder_inject_noise=(timestep_conditioning,) * 5,
            timestep_conditioning=timestep_conditioning,
        ).eval()
        for name, parameter in vae.named_parameters():
            if "per_channel_scale" in name:  # constructors leave the noise's share at 0
                parameter.data += 0.1
        noise = torch.randn(1, 3, 3, 4, 4)
        video = torch.nn.functional.interpolate(noise, size=(17, 128, 128), mode="trilinear").clamp(-1, 1)
        with torch.no_grad():
            z = vae.encode(video).latent_dist.mode()
        vae.latents_mean.copy_(z.mean(dim=(0, 2, 3, 4)))
        vae.latents_std.copy_(z.std(dim=(0, 2, 3, 4)).clamp_min(1e-3))
        tokenizer = _tokenizer()
        text_encoder = T5EncoderModel(
            T5Config(vocab_size=len(tokenizer), d_model=TEXT_WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        ).eval()
        transformer = LTXVideoTransformer3DModel(**TRANSFORMER).eval()
    getattr(diffusers, pipeline)(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    ).save_pretrained(folder, safe_serialization=True)
    return Path(folder)


if __name__ == "__main__":
    command(build_tiny_ltx_pipeline)
