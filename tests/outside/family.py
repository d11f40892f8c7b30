"""External model family: a small transformer that is not a diffusers class.

An entry point (``fsdp_cp.families``) registers it; nothing in ``models`` names it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.context_parallel import GatherTokens, SplitTokens, parallelize_context
from fsdp_cp.errors import UserError
from models.families.base import Family, Outputs
from models.sample import VIDEO, Sample

DEFAULTS = {
    "channels": 4, "patch": 2, "heads": 6, "head_dim": 8, "depth": 2, "text_dim": 10, "time_features": 16,
    "first_frame": False,
}  # fmt: skip


class Attention(nn.Module):
    """Self-attention, or cross-attention to ``context``."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.mesh = heads, None
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x, context=None):
        q = self.q(x).unflatten(-1, (self.heads, -1))
        k, v = self.kv(x if context is None else context).unflatten(-1, (2, self.heads, -1)).unbind(2)
        if self.mesh is None:  # as its author wrote it
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        elif context is None:
            out = context_parallel_attention(q, k, v, mesh=self.mesh)
        else:
            out = cross_attention(q, k, v)
        return self.out(out.flatten(2))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.scale, self.self_attention = nn.Linear(dim, dim), Attention(dim, heads)
        self.cross_attention, self.mlp = Attention(dim, heads), nn.Linear(dim, dim)

    def forward(self, hidden_states, time, text):
        x = F.layer_norm(hidden_states, hidden_states.shape[-1:]) * (1 + self.scale(time))
        x = hidden_states + self.self_attention(x)
        x = x + self.cross_attention(x, text)
        return x + self.mlp(F.silu(x))


class Tower(nn.Module):
    """Transformer of packed tokens ``(B, S, C p p)``, their times ``(B, S)`` from 0 to 1, and text."""

    def __init__(self, **config):
        super().__init__()
        self.config = config = DEFAULTS | config
        dim, tokens = config["heads"] * config["head_dim"], config["channels"] * config["patch"] ** 2
        self.embed, self.text, self.out = (
            nn.Linear(tokens, dim),
            nn.Linear(config["text_dim"], dim),
            nn.Linear(dim, tokens),
        )
        self.time = nn.Sequential(nn.Linear(config["time_features"], dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim, config["heads"]) for _ in range(config["depth"]))

    def forward(self, tokens, time, text):
        rates = torch.arange(self.config["time_features"], dtype=time.dtype, device=time.device)
        embedded = self.time((time[..., None] * rates).cos().to(tokens.dtype))
        x, text = self.embed(tokens), self.text(text)
        for block in self.blocks:
            x = block(x, embedded, text)
        return self.out(x)


class OutsideFamily(Family):
    """Family whose network, with ``first_frame``, gets a clip's clean first frame at time 0."""

    name, class_name, time_scale = "outside", "Tower", 1.0
    frame_times = True

    def build(self, config, setting):
        if config.get("_class_name", "Tower") != "Tower":
            raise UserError(f"{setting} is a {config['_class_name']}, but family=outside needs a Tower")
        return Tower(**{key: value for key, value in config.items() if not key.startswith("_")})

    def check_keys(self, architecture, setting):
        if unknown := [key for key in architecture if key not in DEFAULTS]:
            raise UserError(f"there is no setting {setting}.{unknown[0]}; use {', '.join(DEFAULTS)}")

    def examples(self):
        return {"small": {}, "first_frame": {"first_frame": True}}

    def blocks(self, network):
        return list(network.blocks)

    def time_embedder(self, network):
        return network.time

    def heads(self, config):
        return config["heads"]

    def head_dim(self, config):
        return config["head_dim"]

    def width(self, config):
        return config["heads"] * config["head_dim"]

    def layers(self, config):
        return config["depth"]

    def time_features(self, config):
        return config["time_features"]

    def latent_channels(self, config):
        return config["channels"]

    def patch_size(self, config):
        return 1, config["patch"], config["patch"]

    def condition_shapes(self, config, latent_shape, text_tokens):
        given = {"first_frame": (latent_shape[0], 1, *latent_shape[2:])} if config["first_frame"] else {}
        return {"text": (text_tokens, config["text_dim"]), **given}

    def check_sample(self, config, shapes, condition, setting):
        latent_shape = shapes["video"]
        wanted = self.condition_shapes(config, latent_shape, condition["text"][0])
        if latent_shape[0] != config["channels"] or condition != wanted:
            raise UserError(
                f"{setting} takes {config['channels']} channels and {wanted}, not {latent_shape[0]} and {condition}"
            )

    def check_guidance(self, scale, setting):
        if scale < 0:
            raise UserError(f"{setting}={scale} must be at least 0: this network was never trained away from its text")

    def parallelize(self, network, mesh, backend="auto", head_groups=1):
        parallelize_context(
            network,
            mesh=mesh,
            plan={
                "embed": {"input": SplitTokens(1)},
                "time": {"input": SplitTokens(1)},
                "out": GatherTokens(1, source="input"),
            },
        )
        for block in network.blocks:
            block.self_attention.mesh = block.cross_attention.mesh = mesh

    def outputs(self, network, sample, t, condition):
        x = sample.video
        patch, (frames, height, width) = network.config["patch"], x.shape[2:]
        times = t if t.ndim == 2 else t[:, None].expand(-1, frames)
        given = condition.tensors.get("first_frame")
        if given is not None:
            noisy, times = x[:, :, :1], times * (torch.arange(frames, device=x.device) > 0)
            x = torch.cat([given, x[:, :, 1:]], dim=2)
        tokens = x.unflatten(4, (-1, patch)).unflatten(3, (-1, patch))  # (B, C, T, h, p, w, p)
        tokens = tokens.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)
        per_frame = tokens.shape[1] // frames
        out = network(tokens, times.repeat_interleave(per_frame, dim=1), condition.tensors["text"])
        out = out.unflatten(2, (-1, patch, patch)).unflatten(1, (-1, height // patch, width // patch))
        out = out.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)
        if given is None:
            return Outputs(Sample({VIDEO: out}))
        first = t[:, :1] if t.ndim == 2 else t[:, None]
        held = (noisy - given) / first[:, :, None, None, None].to(x.dtype)  # its x - t v is the given frame
        return Outputs(Sample({VIDEO: torch.cat([held, out[:, :, 1:]], dim=2)}))
