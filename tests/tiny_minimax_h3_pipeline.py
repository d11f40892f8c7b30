"""A test-sized MiniMax-H3 pipeline folder with random weights.

    python -m tests.tiny_minimax_h3_pipeline FOLDER [--seed 0]

writes the parts of diffusers' modular pipeline, each in its folder: nothing is downloaded.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny_hunyuan_pipeline import _tokenizer
from tests.tiny_pipeline import new_folder

CHANNELS, SOUND_CHANNELS = 24, 32
"""Channels of the video's latents and the sound's, constants of the steps that denoise, which have no VAE."""
VISION_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"]
TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 4, "attention_head_dim": 12, "hidden_size": 40, "num_layers": 2, "num_refiner_layers": 1,
    "ffn_dim": 24, "in_channels": CHANNELS, "audio_in_channels": SOUND_CHANNELS, "text_dim": 24, "freq_dim": 16,
    "time_embed_hidden_dim": 32, "time_embed_dim": 24, "rope_freq_dim": 2,
}  # fmt: skip
"""Architecture of the transformer, which fits the latents of both VAEs."""


def build_tiny_minimax_h3_pipeline(folder: str | Path, seed: int = 0) -> Path:
    """Write both VAEs, text_encoder/, tokenizer/, processor/, transformer/ and two schedulers; returns the folder.

    Video 24 channels, 16x in space, 17 frames a chunk. Sound at 8 kHz, 40 latents a second of 32 channels. Statistics
    of both VAEs are those of noise. Qwen3-VL of 53 layers, of which 51 count. Transformer of 2 layers of 4 heads.
    """
    from diffusers import (
        AutoencoderKLMiniMaxH3,
        AutoencoderKLMiniMaxH3Audio,
        MiniMaxH3Scheduler,
        MiniMaxH3Transformer3DModel,
    )
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    folder, tokenizer = Path(folder), _tokenizer()
    tokenizer.add_tokens(VISION_TOKENS, special_tokens=True)
    begin, image, clip, end = tokenizer.convert_tokens_to_ids(VISION_TOKENS)
    with torch.random.fork_rng(devices=[]):  # the caller's random state does not change
        torch.manual_seed(seed)
        vae = AutoencoderKLMiniMaxH3(
            latent_channels=CHANNELS, block_out_channels=(8,) * 6, layers_per_block=1, norm_num_groups=4,
            decoder_num_layers=1, decoder_num_attention_heads=2, decoder_attention_head_dim=8,
        ).eval()  # fmt: skip
        audio_vae = AutoencoderKLMiniMaxH3Audio(
            encoder_dim=2, encoder_rates=(5, 5, 8), latent_dim=32, latent_channels=SOUND_CHANNELS,
            num_attention_heads=2, decoder_dim=8, decoder_rates=(8, 5, 5), decoder_kernel_sizes=(16, 9, 9),
            resblock_kernel_sizes=(3,), resblock_dilation_sizes=((1, 3),), sampling_rate=8000,
        ).eval()  # fmt: skip
        for block in vae.decoder.transformer_blocks:  # diffusers leaves them at 0
            block.scale1.data.normal_()
            block.scale2.data.normal_()
        noise = torch.nn.functional.interpolate(torch.randn(1, 3, 5, 4, 4), size=(22, 64, 64), mode="trilinear")
        with torch.no_grad():
            pixels, sound = vae.encode(noise), audio_vae.encode(0.1 * torch.randn(2, 1, 8000))
        for network, found in ((vae, pixels), (audio_vae, sound)):
            z = found.latent_dist.mode().transpose(0, 1).flatten(1)
            network.register_to_config(
                latents_mean=z.mean(dim=1).tolist(), latents_std=z.std(dim=1).clamp_min(1e-3).tolist()
            )
        text_encoder = Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(
                text_config={
                    "vocab_size": len(tokenizer), "hidden_size": TRANSFORMER["text_dim"], "intermediate_size": 16,
                    "num_hidden_layers": 53, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12,
                    "rope_parameters": {
                        "rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 2, 2],
                        "mrope_interleaved": True,
                    },
                },
                vision_config={
                    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 1, "out_hidden_size": 24,
                    "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
                },
                image_token_id=image, video_token_id=clip, vision_start_token_id=begin, vision_end_token_id=end,
            )
        ).eval()  # fmt: skip
        transformer = MiniMaxH3Transformer3DModel(**TRANSFORMER).eval()
    parts = {"vae": vae, "audio_vae": audio_vae, "text_encoder": text_encoder, "tokenizer": tokenizer}
    # Released with 65536 pixels at least; patches of 16 pixels, of which four are a row.
    parts["processor"] = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 1024, "longest_edge": 65536}, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    (folder / "processor").mkdir(parents=True)
    sizes = {"size": {"shortest_edge": 1024, "longest_edge": 24576}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "processor" / "video_preprocessor_config.json").write_text(json.dumps(sizes))
    parts |= {"scheduler": MiniMaxH3Scheduler(), "audio_scheduler": MiniMaxH3Scheduler(shift=3.0)}
    for name, part in ({"transformer": transformer} | parts).items():
        part.save_pretrained(folder / name)
    return folder


def main() -> None:
    """Command line: write the pipeline folder."""
    parser = argparse.ArgumentParser(description="Write a test-sized MiniMax-H3 pipeline folder with random weights.")
    parser.add_argument("folder", type=new_folder)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(build_tiny_minimax_h3_pipeline(arguments.folder, arguments.seed))


if __name__ == "__main__":
    main()
