"""A test-sized LTX-2 pipeline folder with random weights: LTX-2.3, 2.0 or 2.5.

    python -m tests.tiny_ltx2_pipeline FOLDER [--seed 0] [--version 2.0]

writes a folder in diffusers layout that ``LTX2Pipeline.from_pretrained`` loads: nothing is downloaded.
"""

from pathlib import Path
from typing import Any

import torch

from models.families.ltx2_5 import CHANGES
from tests.tiny_pipeline import _tokenizer, command

CHANNELS, SOUND_CHANNELS, BANDS = 8, 2, 4
"""Channels of the video's latents, channels and bands of the sound's."""
REGISTERS = 8
TRANSFORMER: dict[str, Any] = {
    "in_channels": CHANNELS, "out_channels": CHANNELS, "num_attention_heads": 4, "attention_head_dim": 12,
    "cross_attention_dim": 48, "audio_in_channels": SOUND_CHANNELS * BANDS,
    "audio_out_channels": SOUND_CHANNELS * BANDS, "audio_num_attention_heads": 4, "audio_attention_head_dim": 6,
    "audio_cross_attention_dim": 24, "num_layers": 2, "caption_channels": 24, "rope_type": "split",
}  # fmt: skip
LATER: dict[str, Any] = {
    "gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False, "perturbed_attn": True,
}  # fmt: skip
"""Changes of LTX-2.3."""
DECODER: dict[str, Any] = {
    "latent_channels": CHANNELS, "decoder_head_dim": 16, "decoder_stage_channels": (64, 32, 16, 16, 16),
    "decoder_stage_depths": (1, 1, 1, 1, 2), "decoder_stage_kernels": ((3, 1, 1), (3, 3, 3), (3, 3, 3), (3, 5, 3)),
    "decoder_upsample_channel_reductions": (2, 2, 1, 1), "decoder_stage5_kernel": (5, 3, 7), "decoder_t_emb_dim": 32,
}  # fmt: skip
"""Diffusion decoder of LTX-2.5."""
_VOCODER: dict[str, Any] = {
    "in_channels": 8 * BANDS, "hidden_channels": 16, "upsample_kernel_sizes": [20, 16], "upsample_factors": [10, 8],
    "resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]],
}  # fmt: skip


def build_tiny_ltx2_pipeline(folder: str | Path, seed: int = 0, *, version: str = "2.3") -> Path:
    """Write the eight parts of an ``LTX2Pipeline`` and model_index.json; returns the folder.

    VAE 8 channels, 8x in time, 32x in space. Sound at 16 kHz, 16 mel bins: latents of 2 channels and 4 bands, 25 a
    second. Vocoder to 8 kHz (2.0), or 16 kHz with a bandwidth extension (2.3). Statistics of both VAEs are
    those of noise. Gemma of 3 layers, a connector of 8 registers for each stream. Transformer 2 layers of 4 heads.
    2.5 has the diffusion decoder too.
    """
    from diffusers import (
        AutoencoderKLLTX2Audio,
        AutoencoderKLLTX2Video,
        FlowMatchEulerDiscreteScheduler,
        LTX2Pipeline,
        LTX2VideoDiffusionDecoderModel,
        LTX2VideoTransformer3DModel,
    )
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma4UnifiedConfig,
        Gemma4UnifiedForConditionalGeneration,
    )

    later = version != "2.0"
    with torch.random.fork_rng(devices=[]):  # the caller's random state does not change
        torch.manual_seed(seed)
        vae = AutoencoderKLLTX2Video(
            latent_channels=CHANNELS,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 16, 32),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1),
            spatial_compression_ratio=32,
            temporal_compression_ratio=8,
        ).eval()
        audio_vae = AutoencoderKLLTX2Audio(
            base_channels=SOUND_CHANNELS * BANDS,  # also the width of the statistics
            ch_mult=(1, 1, 1),
            num_res_blocks=1,
            latent_channels=SOUND_CHANNELS,
            mel_bins=4 * BANDS,
        ).eval()
        with torch.no_grad():
            noise = torch.nn.functional.interpolate(torch.randn(1, 3, 3, 4, 4), size=(17, 128, 128), mode="trilinear")
            z = vae.encode(noise.clamp(-1, 1)).latent_dist.mode()
            vae.latents_mean.copy_(z.mean(dim=(0, 2, 3, 4)))
            vae.latents_std.copy_(z.std(dim=(0, 2, 3, 4)).clamp_min(1e-3))
            rows = audio_vae.encode(torch.randn(1, 2, 64, 4 * BANDS) - 3).latent_dist.mode().transpose(1, 2).flatten(2)
            audio_vae.latents_mean.copy_(rows.mean(dim=(0, 1)))
            audio_vae.latents_std.copy_(rows.std(dim=(0, 1)).clamp_min(1e-3))
        tokenizer = _tokenizer()
        gemma = {
            "vocab_size": len(tokenizer), "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12,
        }  # fmt: skip
        text_encoder = Gemma3ForConditionalGeneration(
            Gemma3Config(
                text_config=gemma,
                vision_config={
                    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
                    "image_size": 28, "patch_size": 14,
                },
                mm_tokens_per_image=4,
                image_token_index=2,
            )
        ).eval()  # fmt: skip
        if version == "2.5":
            more = {"num_global_key_value_heads": 1, "global_head_dim": 16, "attention_k_eq_v": True}
            layers = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 8}
            config = Gemma4UnifiedConfig(text_config=gemma | more | layers, image_token_id=2, video_token_id=3)
            text_encoder = Gemma4UnifiedForConditionalGeneration(config).eval()
        heads = {"connector_num_attention_heads": 4, "connector_num_layers": 1}
        heads |= {"connector_num_learnable_registers": REGISTERS}
        connectors = LTX2TextConnectors(
            caption_channels=24,
            text_proj_in_factor=4,
            **{f"{stream}_{key}": value for stream in ("video", "audio") for key, value in heads.items()},
            video_connector_attention_head_dim=12 if later else 6,
            audio_connector_attention_head_dim=6,
            video_gated_attn=later,
            audio_gated_attn=later,
            rope_type="split",
            per_modality_projections=later,
            video_hidden_dim=48,
            audio_hidden_dim=24,
        ).eval()
        if later:
            extension = {f"bwe_{key}": value for key, value in _VOCODER.items()}
            extension |= {"bwe_upsample_kernel_sizes": [32, 20], "bwe_upsample_factors": [16, 10]}
            rates = {"filter_length": 160, "hop_length": 80, "window_length": 160, "num_mel_channels": 4 * BANDS}
            rates |= {"input_sampling_rate": 8000, "output_sampling_rate": 16000}
            vocoder = LTX2VocoderWithBWE(**_VOCODER, **extension, **rates).eval()
            for name, buffer in vocoder.mel_stft.named_buffers():  # constructors leave them at 0
                buffer.normal_().abs_() if name == "mel_basis" else buffer.normal_()
        else:
            vocoder = LTX2Vocoder(**_VOCODER, output_sampling_rate=8000).eval()
        changes = (LATER if later else {}) | (CHANGES if version == "2.5" else {})
        transformer = LTX2VideoTransformer3DModel(**TRANSFORMER | changes).eval()
        if version == "2.5":
            transformer.keyframes_abs_pos_embedding.data.normal_()
            LTX2VideoDiffusionDecoderModel(**DECODER).save_pretrained(Path(folder) / "diffusion_decoder")
    LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        connectors=connectors,
        transformer=transformer,
        vocoder=vocoder,
    ).save_pretrained(folder, safe_serialization=True)
    return Path(folder)


if __name__ == "__main__":
    command(build_tiny_ltx2_pipeline)
