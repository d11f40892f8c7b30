"""The LTX-Video family: diffusers' unmodified ``LTXVideoTransformer3DModel`` as a role's network.

Text to video, or a given first frame to video. The frame replaces the noisy one
(models/families/diffusers_family.py), as in ``LTXImageToVideoPipeline``. A token is one latent. In addition to the text
the network takes ``text_mask``, the text tokens that count, and ``latent_spacing``, the distances between latents in
seconds and pixels for its rotary embedding. LTX's encoders provide both.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from diffusers import LTXVideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx import LTXAttention
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2Attention,
    apply_interleaved_rotary_emb,
    apply_split_rotary_emb,
)
from torch import Tensor, nn

from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.context_parallel import GatherTokens, SplitTokens, parallelize_context
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from models.condition import Condition
from models.families.base import FamilyPlanning, LatentShape, NetworkConfig, Outputs, Pipeline, Shape
from models.families.diffusers_family import FrameFamily
from models.sample import VIDEO, Sample
from models.sparse import SparseCall, gates_of


class LTXPlanning(FamilyPlanning):
    """Lightricks' networks and their encoders."""

    networks = {
        "ltx_video_2b": {"num_layers": 28},  # diffusers' conversion script uses its defaults for 0.9.0 and 0.9.1
        # Lightricks' xora_v1.2-13B-balanced-128.json, from AI-Hypercomputer/maxdiffusion (0.9.7).
        "ltx_video_13b": {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48},
    }
    text_encoder = {
        "architectures": ["T5EncoderModel"], "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240,
        "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }  # fmt: skip
    """T5 v1.1 XXL, 4.8e9 parameters."""
    vae = {"_class_name": "AutoencoderKLLTXVideo"}
    """VAE of 0.9.0, with the default sizes of the class."""

    vae_sizes = {128: ("LTX's VAE", 8, 32)}


class LTX(FrameFamily):
    """LTX-Video by diffusers' ``LTXVideoTransformer3DModel`` (0.42): text to video, or a first frame to video."""

    name = "ltx"
    class_name = "LTXVideoTransformer3DModel"
    transformer = LTXVideoTransformer3DModel
    label = "LTX"
    passes_times = True
    planning = LTXPlanning()
    # The scheduler draws its noise for packed latents.
    pipeline = Pipeline("LTXPipeline", "LTXImageToVideoPipeline", takes_fps=True, reseeds=False)

    def requirements(self, values: NetworkConfig) -> Iterator[tuple[str, bool, str]]:
        inputs, width = values["in_channels"], self.width(values)
        for key in ("patch_size", "patch_size_t"):
            yield key, values[key] == 1, "1: diffusers' LTX pipelines count a token for each latent"
        yield "out_channels", values["out_channels"] in (None, inputs), f"as many as go in, {inputs}"
        yield "attention_head_dim", width % 2 == 0, "even, or the heads, for the rotary embedding"
        wanted = f"the network's width {width}, to which it projects the text"
        yield "cross_attention_dim", values["cross_attention_dim"] == width, wanted

    def examples(self) -> dict[str, dict[str, Any]]:
        """Return the published layout (norms without weights, linear layers with biases) and the opposite.

        Rotary tables cover multiples of six features: all of a width of 72, and all but four of 64.
        """
        sizes = {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 6, "attention_head_dim": 12,
            "cross_attention_dim": 72, "num_layers": 2, "caption_channels": 24,
        }  # fmt: skip
        other = {"norm_elementwise_affine": True, "attention_bias": False, "attention_out_bias": False}
        odd = {"num_attention_heads": 4, "attention_head_dim": 16, "cross_attention_dim": 64}
        return {"t2v": sizes, "t2v of other norms": sizes | odd | other}

    def time_embedder(self, network: LTXVideoTransformer3DModel) -> nn.Module:
        """Return the time embedder. Under bf16 it computes in bf16: diffusers casts its sines, and LTX's
        ``_keep_in_fp32_modules`` do not include it."""
        return network.time_embed.emb.timestep_embedder

    def latent_channels(self, config: NetworkConfig) -> int:
        return config["in_channels"]

    def patch_size(self, config: NetworkConfig) -> tuple[int, int, int]:
        return 1, 1, 1

    def condition_shapes(self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int) -> dict[str, Shape]:
        """Return the shapes of the text, its mask and the spacing of latents."""
        text = (text_tokens, config["caption_channels"])
        return {"text": text, "text_mask": (text_tokens,), "latent_spacing": (4,)}

    def parallelize(self, network: LTXVideoTransformer3DModel, mesh: Mesh, backend: str, head_groups: int) -> None:
        """Let each rank process its own tokens and compute rotary tables from their coordinates. The text stays whole.

        diffusers' plan also splits the text, and computes the tables of all tokens on every rank before splitting them.
        """
        plan = {
            "": {"hidden_states": SplitTokens(split_dim=1), "timestep": SplitTokens(split_dim=1, expected_dims=2)},
            "rope": {"video_coords": SplitTokens(split_dim=2)},
            "proj_out": GatherTokens(gather_dim=1),
        }
        parallelize_context(network, mesh=mesh, plan=plan)
        for block in network.transformer_blocks:
            block.attn1.set_processor(SplitAttention("hidden_states", "hidden_states", mesh, backend, head_groups))
            block.attn2.set_processor(SplitAttention("hidden_states", None, mesh, backend, head_groups))
        network.time_embed.emb.register_forward_hook(in_hidden_dtype, with_kwargs=True)

    def outputs(self, network: nn.Module, sample: Sample, t: Tensor, condition: Condition, *_: Any) -> Outputs:
        tensors, x = condition.tensors, sample.video
        grid = (x.shape[2], x.shape[3], x.shape[4])
        hidden, times = self.with_frame(x, t, condition, (1, 1, 1))
        velocity, *others = network(
            hidden_states=hidden.flatten(2).transpose(1, 2),
            encoder_hidden_states=tensors["text"],
            timestep=self.time_scale * times,
            encoder_attention_mask=tensors["text_mask"].bool(),
            video_coords=video_coordinates(tensors["latent_spacing"], grid),
            return_dict=False,
        )
        velocity = self.hold(velocity.transpose(1, 2).unflatten(2, grid), x, t, condition)
        return Outputs(Sample({VIDEO: velocity}), tuple(others))


def in_hidden_dtype(_embedding: nn.Module, _args: tuple, kwargs: Mapping[str, Any], output: Tensor) -> Tensor:
    """Cast a time embedding: under bf16 an addition makes it fp32, but the following layers are bf16."""
    return output.to(kwargs["hidden_dtype"])


class SplitAttention:
    """Attention of LTX and LTX-2: queries of one split stream, and keys of the same, of another, or of whole text.

    Projections, norms, rotary embeddings and gates are those of diffusers' processors (0.42); only the attention over
    all tokens is replaced, at cp = 1 too, since diffusers' attention has no forward-mode AD. Streams have their names
    in the plan.
    """

    def __init__(self, queries: str, keys: str | None, mesh: Mesh, backend: str, head_groups: int):
        self.queries, self.keys, self.mesh = queries, keys, mesh
        self.backend, self.head_groups = backend, head_groups

    def __call__(
        self,
        attn: LTXAttention | LTX2Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, SparseCall] | None = None,
        key_rotary_emb: tuple[Tensor, Tensor] | None = None,
        perturbation_mask: Tensor | None = None,
        all_perturbed: bool | None = None,
    ) -> Tensor:
        """Attend from ``(B, S_local, dim)``; rotary tables are those of the rank's own tokens, those of a sparse role's
        video with its attention.

        LTX's text has a bias ``(B, 1, L)``, 0 or -10000. A weight under -10000 underflows to 0 in every dtype, so
        skipping its key gives the same result.
        """
        assert self.keys is None or attention_mask is None
        if perturbation_mask is not None or all_perturbed:
            raise UserError(
                "spatio-temporal guidance is not here; set the pipeline's stg_scale and audio_stg_scale to 0"
            )
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(context)), attn.to_v(context)
        options: dict[str, Any] = {"mesh": self.mesh, "backend": self.backend, "head_groups": self.head_groups}
        if query_rotary_emb is not None:
            cos, sin, *sparse = query_rotary_emb
            q = _rotated(attn, q, (cos, sin))
            k = _rotated(attn, k, key_rotary_emb or (cos, sin))
            for call in sparse:
                options |= call.options(gates_of(attn), hidden_states, attn.heads)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        if self.keys is None:
            mask = None if attention_mask is None else attention_mask[:, 0] == 0
            # Flash kernels do not take a mask. The text is short, so another kernel is fast enough.
            backend = self.backend if mask is None or self.backend == "reference" else "auto"
            # total_keys states that the text is not split, since it can have as many tokens as a rank's share.
            out = cross_attention(q, k, v, key_mask=mask, backend=backend, total_keys=k.shape[1])
        elif self.keys == self.queries:
            total = self.queries if self.mesh.cp_size > 1 else None
            out = cast(Tensor, context_parallel_attention(q, k, v, total_tokens=total, **options))  # no joint text
        else:
            out = cross_attention(q, k, v, total_tokens=self.queries, total_keys=self.keys, **options)
        out = out.type_as(q)
        if (gate := getattr(attn, "to_gate_logits", None)) is not None:
            out = out * (2.0 * torch.sigmoid(gate(hidden_states))).unsqueeze(-1)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))


def _rotated(attn: LTXAttention | LTX2Attention, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    is_split = getattr(attn, "rope_type", "interleaved") == "split"
    return apply_split_rotary_emb(x, tables) if is_split else apply_interleaved_rotary_emb(x, tables)


def video_coordinates(spacing: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Return the coordinates of a video's tokens for LTX's rotary tables: seconds, pixels down, pixels right.

    Args:
        spacing: ``(B, 4)`` fp32: seconds, pixels down and pixels right from one latent to the next; and seconds by
            which all latent frames but the first are shifted earlier (0 for ``LTXPipeline``).
        grid: latent frames, height and width.

    Returns:
        ``(B, 3, S)`` fp32, tokens in the order frames, height, width.
    """
    axes = [torch.arange(size, dtype=torch.float32, device=spacing.device) for size in grid]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
    spacing = spacing.float()
    frames, rows, columns = (places[None] * spacing[:, :3, None]).unbind(1)
    return torch.stack([(frames - spacing[:, 3:]).clamp_min(0), rows, columns], dim=1)
