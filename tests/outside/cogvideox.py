"""Model family of another package, for CogVideoX from text: a diffusers class whose networks predict v.

An entry point (``fsdp_cp.families``) registers it; nothing in ``models`` names it.

Not supported: networks that take an image (``use_learned_positional_embeddings``, ``ofs_embed_dim``). Not yet run with
published weights or on a GPU.

Shape legend: B samples, C T H W latents of one sample, S video tokens of one sample, L D text.
"""

import math

from diffusers import CogVideoXDPMScheduler, CogVideoXTransformer3DModel
from diffusers.models.embeddings import apply_rotary_emb, get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.context_parallel import GatherTokens, SplitTokens, parallelize_context
from fsdp_cp.errors import UserError
from models.families.base import Flops, Outputs, config_of
from models.families.diffusers_family import DiffusersFamily, refuse
from models.sample import VIDEO, Sample
from tests.outside.prediction import DiscretePrediction


def schedule(snr_shift_scale):
    """Return the levels and the prediction of published networks (diffusers' ``convert_cogvideox_to_diffusers.py``)."""
    scheduler = CogVideoXDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction",
        rescale_betas_zero_snr=True, snr_shift_scale=snr_shift_scale,
    )  # fmt: skip
    return DiscretePrediction.from_scheduler(scheduler)


SCHEDULES = {False: schedule(3.0), True: schedule(1.0)}
"""Schedules by ``use_rotary_positional_embeddings``: ``snr_shift_scale`` is 3 for 2b and 1 for 5b and 1.5."""


class JointAttention:
    """Attention of the rank's own video tokens and of all text tokens to both, with forward-mode AD.

    Projections, norms and the rotary embedding are those of diffusers' ``CogVideoXAttnProcessor2_0`` (0.42). Every rank
    holds the text whole, as in ``models/families/hunyuan_forward.py``.
    """

    def __init__(self, mesh, backend, head_groups):
        self.mesh, self.backend, self.head_groups = mesh, backend, head_groups

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask=None, image_rotary_emb=None):
        """Take ``(B, S_local, width)``, ``(B, L, width)`` and tables ``(S_local, head_dim)``; return the first two."""

        assert attention_mask is None  # CogVideoX attends to padded text too

        def projected(x):
            q, k, v = (layer(x).unflatten(2, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
            return attn.norm_q(q), attn.norm_k(k), v

        q, k, v = projected(hidden_states)
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        total = "hidden_states" if self.mesh.cp_size > 1 else None  # the argument under which the plan splits tokens
        outputs = context_parallel_attention(
            q, k, v, joint=projected(encoder_hidden_states), mesh=self.mesh, total_tokens=total, backend=self.backend,
            head_groups=self.head_groups,
        )  # fmt: skip
        video, text = (attn.to_out[1](attn.to_out[0](x.flatten(2).type_as(hidden_states))) for x in outputs)
        return video, text


class CogVideoX(DiffusersFamily):
    """CogVideoX and CogVideoX 1.5 from text, by diffusers' ``CogVideoXTransformer3DModel`` (0.42)."""

    name = "cogvideox"
    class_name = "CogVideoXTransformer3DModel"
    transformer = CogVideoXTransformer3DModel
    label = "CogVideoX"

    def pipeline_times(self, steps):
        raise UserError(
            "CogVideoX predicts v, and its pipelines take no flow-matching scheduler; use python -m distill.sample"
        )

    def check_values(self, config, setting):
        values = self.defaults() | dict(config)
        super().check_values(values, setting)
        for key, wanted in (
            ("use_learned_positional_embeddings", False), ("ofs_embed_dim", None), ("dropout", 0.0),
            ("out_channels", values["in_channels"]),
        ):  # fmt: skip
            if values[key] != wanted:
                refuse(
                    values,
                    key,
                    f"{wanted}: other networks, such as those that take an image, are not supported",
                    setting,
                )
        if values["attention_head_dim"] % 16:
            refuse(values, "attention_head_dim", "a multiple of 16, for positions in three dimensions", setting)

    def examples(self):
        """Return small networks of the three published kinds: sinusoidal embeddings, rotary tables, patches in time."""
        sizes = {
            "num_attention_heads": 6, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2,
            "time_embed_dim": 20, "text_embed_dim": 24, "max_text_seq_length": 5, "sample_frames": 9,
            "sample_height": 6, "sample_width": 10,
        }  # fmt: skip
        rotary = {"use_rotary_positional_embeddings": True}
        return {"2b": sizes, "5b": sizes | rotary, "1.5": sizes | rotary | {"patch_size_t": 2, "patch_bias": False}}

    def restore_buffers(self, network, device):
        embed = network.patch_embed
        if embed.use_positional_embeddings:
            sizes = (embed.sample_height, embed.sample_width, embed.sample_frames)
            embed.pos_embedding = embed._get_positional_embeddings(*sizes, device=device)

    def blocks(self, network):
        """Return the blocks. Each returns the video's tokens, then the text's."""
        return list(network.transformer_blocks)

    def time_embedder(self, network):
        return network.time_embedding

    def time_width(self, config):
        return config["time_embed_dim"]

    def time_features(self, config):
        return self.width(config)

    def fp8_excluded(self, network):
        return [norm for block in network.transformer_blocks for norm in (block.norm1, block.norm2)]

    def latent_channels(self, config):
        return config["in_channels"]

    def patch_size(self, config):
        return config["patch_size_t"] or 1, config["patch_size"], config["patch_size"]

    def condition_shapes(self, config, latent_shape, text_tokens):
        """Return shapes of the text. Sinusoidal embeddings count text tokens too, so their number is fixed."""
        fixed = not config["use_rotary_positional_embeddings"]
        return {"text": (config["max_text_seq_length"] if fixed else text_tokens, config["text_embed_dim"])}

    def check_sample(self, config, shapes, condition, setting):
        latent_shape = shapes["video"]
        needed = self.condition_shapes(config, latent_shape, condition["text"][0])
        self.check_data(config, latent_shape, needed, condition, setting)
        most = config["sample_height"], config["sample_width"]
        if config["patch_size_t"] is not None and any(a > b for a, b in zip(latent_shape[2:], most, strict=True)):
            raise UserError(
                f"{setting} is a CogVideoX 1.5 of at most {most} latents; use a smaller data.height and width"
            )

    def flops(self, config, shapes, condition, pairs=None, times=None):
        tokens = self.tokens(config, shapes)
        dim, layers, time = self.width(config), config["num_layers"], config["time_embed_dim"]
        text, text_dim = condition["text"]
        both = tokens + text
        block = both * 12 * dim * dim + 12 * time * dim
        patch = math.prod(self.patch_size(config))
        ends = tokens * dim * patch * (config["in_channels"] + config["out_channels"])
        embedded = dim * time + time * time + 2 * time * dim
        between = 2 * layers * both * both * dim
        return Flops.from_products(between, layers * block + ends + embedded, text * text_dim * dim, 0)

    def parallelize(self, network, mesh, backend="auto", head_groups=1):
        """Split tokens after their embedding, so blocks process the rank's own tokens. The text stays whole."""
        plan = {
            "": {"image_rotary_emb": SplitTokens(0)},
            "transformer_blocks.0": {"hidden_states": SplitTokens(1)},
            "proj_out": GatherTokens(1),
        }
        parallelize_context(network, mesh=mesh, plan=plan)
        for block in network.transformer_blocks:
            block.attn1.set_processor(JointAttention(mesh, backend, head_groups))
        # Under bf16 an addition to the time's embedding is fp32, and the blocks are not.
        network.time_embedding.register_forward_hook(lambda _, args, output: output.to(args[0].dtype))

    def outputs(self, network, sample, t, condition):
        config, x = config_of(network), sample.video
        prediction = SCHEDULES[config["use_rotary_positional_embeddings"]]
        v, *others = network(
            hidden_states=prediction.state(x, t).transpose(1, 2),  # (B, T, C, H, W)
            encoder_hidden_states=condition.tensors["text"],
            timestep=prediction.network_time(t),
            image_rotary_emb=rotary_tables(config, x.shape[2:], x.device),
            return_dict=False,
        )
        return Outputs(Sample({VIDEO: prediction.velocity(v.transpose(1, 2), x, t)}), tuple(others))


def rotary_tables(config, sizes, device):
    """Return cosines and sines ``(S, head_dim)`` as ``CogVideoXPipeline`` makes them; ``None`` without."""
    if not config["use_rotary_positional_embeddings"]:
        return None
    patch, frames, (height, width) = (
        config["patch_size"],
        sizes[0],
        (size // config["patch_size"] for size in sizes[1:]),
    )
    base = config["sample_height"] // patch, config["sample_width"] // patch
    kind = {"crops_coords": get_resize_crop_region_for_grid((height, width), base[1], base[0])}
    if config["patch_size_t"] is not None:
        frames //= config["patch_size_t"]
        kind = {"crops_coords": None, "grid_type": "slice", "max_size": base}
    return get_3d_rotary_pos_embed(
        config["attention_head_dim"], grid_size=(height, width), temporal_size=frames, device=device, **kind
    )
