"""The Wan family: diffusers' unmodified ``WanTransformer3DModel`` (text to video) as a role's network."""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanRotaryPosEmbed
from torch import Tensor, nn

from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.context_parallel import EmbedOwnTokens, parallelize_context
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from fsdp_cp.sequence import local_token_count

RotaryTables = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, int]


class WanSelfAttention(WanAttnProcessor):
    """Wan's self-attention over tokens that are split over ``mesh.cp``.

    Projections, norms and the rotary embedding are those of :class:`WanAttnProcessor`; only the attention over all
    tokens is replaced, at cp = 1 too: diffusers' own has no forward-mode AD.
    """

    def __init__(self, mesh: Mesh, backend: str = "auto", head_groups: int = 1):
        super().__init__()
        self.mesh, self.backend, self.head_groups = mesh, backend, head_groups

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: RotaryTables | None = None,
    ) -> Tensor:
        """``hidden_states`` is ``(B, S_local, dim)``; ``rotary_emb`` as :func:`own_rotary_tables` gives it."""
        if attention_mask is not None:
            raise ValueError("context-parallel Wan self-attention takes no attention_mask")
        # The number of tokens comes with the tables, as an argument of the block: a block that is run again in backward
        # gets its own forward's, whatever the network was called with since.
        cos, sin, total = rotary_emb if len(rotary_emb) == 3 else (*rotary_emb, None)
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        k = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, (attn.heads, -1))
        v = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = context_parallel_attention(
            q, k, v, mesh=self.mesh, total_tokens=total, backend=self.backend, head_groups=self.head_groups
        )
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))


class WanCrossAttention(WanAttnProcessor):
    """Wan's attention to the text, which every rank holds: as :class:`WanAttnProcessor`, with forward-mode AD."""

    def __init__(self, backend: str = "auto"):
        super().__init__()
        self.backend = backend

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_emb: RotaryTables | None = None,
    ) -> Tensor:
        """``hidden_states`` is ``(B, S_local, dim)``, ``encoder_hidden_states`` ``(B, L, dim)``."""
        if attention_mask is not None or rotary_emb is not None:
            raise ValueError("Wan's cross-attention takes neither attention_mask nor rotary_emb")
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        k = attn.norm_k(attn.to_k(encoder_hidden_states)).unflatten(2, (attn.heads, -1))
        v = attn.to_v(encoder_hidden_states).unflatten(2, (attn.heads, -1))
        out = cross_attention(q, k, v, backend=self.backend)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Wan's rotary embedding of neighbouring pairs; ``x`` is ``(B, S, H, D)``, computed in the table's fp32."""
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).flatten(-2).type_as(x)


def own_rotary_tables(rope: WanRotaryPosEmbed, mesh: Mesh, hidden_states: Tensor) -> RotaryTables:
    """What ``rope`` makes for latents ``(B, C, T, H, W)``, of the rank's own tokens only.

    Returns:
        Cosines and sines ``(1, S_local, 1, head_dim)``, where pads have those of the last token; and ``S``.

    Raises:
        ValueError: more positions than ``rope_max_seq_len`` along an axis.
    """
    sizes = [n // patch for n, patch in zip(hidden_states.shape[2:], rope.patch_size, strict=True)]
    if max(sizes) > rope.max_seq_len:
        raise ValueError(
            f"{max(sizes)} token positions along an axis are more than rope_max_seq_len={rope.max_seq_len}"
        )
    (_, height, width), total = sizes, math.prod(sizes)
    local = local_token_count(total, mesh.cp_size)
    tokens = torch.arange(mesh.cp_rank * local, (mesh.cp_rank + 1) * local, device=rope.freqs_cos.device)
    tokens = tokens.clamp_max(total - 1)
    positions = (tokens // (height * width), tokens // width % height, tokens % width)
    dims = (rope.t_dim, rope.h_dim, rope.w_dim)
    cos, sin = (
        torch.cat([part[at] for part, at in zip(table.split(dims, dim=1), positions, strict=True)], dim=1)
        for table in (rope.freqs_cos, rope.freqs_sin)
    )
    return cos[None, :, None], sin[None, :, None], total


def _own_token_plan(network: WanTransformer3DModel) -> dict[str, Any]:
    """diffusers' plan, but split before the patch embedding instead of behind it, and rotary tables of own tokens.

    Raises:
        ValueError: another plan than the one known: diffusers' ``_cp_plan`` is private.
    """
    plan = network._cp_plan
    known = {"rope": {0, 1}, "blocks.0": {"hidden_states"}, "proj_out": None, "": {"timestep"}}
    found = {name: set(entry) if isinstance(entry, Mapping) else None for name, entry in plan.items()}
    if found != known:
        raise ValueError(
            f"this diffusers' WanTransformer3DModel._cp_plan splits {found}, not {known}; use diffusers 0.42"
        )
    return {"": plan[""], "patch_embedding": EmbedOwnTokens(), "proj_out": plan["proj_out"]}


_RANGES = {
    "num_layers": (1, 512),
    "num_attention_heads": (1, 4096),
    "attention_head_dim": (2, 4096),
    "in_channels": (1, 65536),
    "out_channels": (1, 65536),
    "text_dim": (1, 2**20),
    "freq_dim": (2, 65536),
    "ffn_dim": (1, 2**20),
    "rope_max_seq_len": (1, 65536),
    "pos_embed_seq_len": (1, 2**20),
}
"""Least and greatest of what a Wan may have: a damaged file's billion layers would be built for hours."""


def _check_values(config: dict[str, Any], setting: str) -> None:
    """diffusers builds networks of any value that Python takes: of ``True`` layers, or strings for patches.

    Raises:
        UserError: by key.
    """

    def refuse(key: str, wanted: str) -> None:
        shown = " ".join(repr(config[key]).split())[:80]
        raise UserError(f"{setting}: {key}={shown} of its configuration must be {wanted}")

    for key, (least, most) in _RANGES.items():
        value = config.get(key, least)
        optional = key in ("out_channels", "pos_embed_seq_len")  # None: as many as go in; no such table
        if (value is not None or not optional) and (type(value) is not int or not least <= value <= most):
            refuse(key, f"a whole number from {least} to {most}")
    if config.get("attention_head_dim", 2) % 2:
        refuse("attention_head_dim", "even, for the rotary embedding")
    patch = config.get("patch_size", (1, 2, 2))
    if not isinstance(patch, (list, tuple)) or len(patch) != 3 or any(type(p) is not int or p < 1 for p in patch):
        refuse("patch_size", "three whole numbers (frames, height, width) of 1 or more, such as [1, 2, 2]")
    if max(patch) > 64:
        refuse("patch_size", "three whole numbers up to 64")
    eps = config.get("eps", 1e-6)
    if type(eps) not in (int, float) or not 0 <= eps < 1:
        refuse("eps", "a number from 0 to 1")
    if type(config.get("cross_attn_norm", True)) is not bool:
        refuse("cross_attn_norm", "true or false")
    if not isinstance(config.get("qk_norm"), (str, type(None))):
        refuse("qk_norm", "a name, such as rms_norm_across_heads")


class Wan:
    """Build, split and call a Wan transformer. Nothing here knows what role it plays."""

    name = "wan"

    @staticmethod
    def build(config: dict[str, Any], setting: str) -> WanTransformer3DModel:
        """A network of ``config`` (the ``config.json`` of a diffusers folder) on the current default device.

        Raises:
            UserError: a config of another class, or of an image-to-video Wan.
        """
        name = config.get("_class_name", "WanTransformer3DModel")
        if name != "WanTransformer3DModel":
            shown = " ".join(str(name).split())[:80]
            raise UserError(f"{setting} is a {shown}, but family=wan needs a WanTransformer3DModel")
        if config.get("image_dim") is not None or config.get("added_kv_proj_dim") is not None:
            raise UserError(f"{setting} is an image-to-video Wan; only text-to-video ones are built yet")
        _check_values(config, setting)
        try:
            return WanTransformer3DModel.from_config(config)
        except (TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError, AssertionError) as error:
            given = {key: value for key, value in config.items() if not key.startswith("_")}
            reason = " ".join(f"{given} ({error})".split())[:400]
            raise UserError(f"{setting}: no Wan can be built of {reason}") from error

    @staticmethod
    def check_keys(architecture: dict[str, Any], setting: str) -> None:
        """diffusers ignores a key that it does not know, with a warning; the default would be built instead.

        Raises:
            UserError: a misspelt key.
        """
        known = [key for key in inspect.signature(WanTransformer3DModel.__init__).parameters if key != "self"]
        for key in architecture:
            if key not in known and not key.startswith("_"):
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {setting}.{near[0]}?" if near else ""
                raise UserError(f"there is no setting {setting}.{key}{hint}")

    @staticmethod
    def units(network: WanTransformer3DModel) -> list[nn.Module]:
        """The transformer blocks, each an FSDP unit."""
        return list(network.blocks)

    @staticmethod
    def full_precision_units(network: WanTransformer3DModel) -> list[nn.Module]:
        """What computes in fp32 under ``precision=bf16``, as an FSDP unit of its own.

        diffusers keeps ``rope``, ``time_embedder``, ``scale_shift_table`` and the block norms in fp32 when it loads
        weights in bf16. Here the time embedder is a unit of its own in fp32; rope has no parameters and its tables
        stay fp32; the norms compute in fp32 and the modulation adds in fp32 as diffusers writes them, from weights
        rounded to bf16 (the masters are fp32), since they are gathered with their block.
        """
        return [network.condition_embedder.time_embedder]

    @staticmethod
    def parallelize(network: WanTransformer3DModel, mesh: Mesh, backend: str = "auto", head_groups: int = 1) -> None:
        """Each rank embeds, rotates and works on its own tokens; this family's processors on every attention.

        Args:
            network: in place.
            mesh: the mesh.
            backend, head_groups: of :func:`fsdp_cp.attention.context_parallel_attention`.

        Raises:
            ValueError: a diffusers version whose plan is not the one known.
        """
        if mesh.cp_size > 1:
            parallelize_context(network, mesh=mesh, plan=_own_token_plan(network))
            network.rope.forward = partial(own_rotary_tables, network.rope, mesh)
        for block in network.blocks:
            block.attn1.set_processor(WanSelfAttention(mesh, backend, head_groups))
            block.attn2.set_processor(WanCrossAttention(backend))

    @staticmethod
    def restore_buffers(network: WanTransformer3DModel, device: torch.device) -> None:
        """Compute the non-persistent rotary tables again, on ``device``; ``to_empty`` leaves garbage in them."""
        config = network.config
        fresh = type(network.rope)(config.attention_head_dim, tuple(config.patch_size), config.rope_max_seq_len)
        network.rope.freqs_cos = fresh.freqs_cos.to(device)
        network.rope.freqs_sin = fresh.freqs_sin.to(device)

    @staticmethod
    def fill_special(module: nn.Module, name: str, tensor: Tensor) -> None:
        """Random values of the modulation tables, which diffusers draws in constructors; see ``initialise``."""
        if name == "scale_shift_table":
            tensor.normal_().div_(tensor.shape[-1] ** 0.5)

    @staticmethod
    def heads(config: dict[str, Any]) -> int:
        """What a ``mesh.ulysses`` must divide: query heads, of which Wan has as many as key/value heads."""
        return config["num_attention_heads"]

    @staticmethod
    def head_dim(config: dict[str, Any]) -> int:
        """Size of an attention head."""
        return config["attention_head_dim"]

    @staticmethod
    def tokens(config: dict[str, Any], latent_shape: tuple[int, int, int, int], setting: str) -> int:
        """Tokens of one sample of latents ``(C, T, H, W)``.

        Raises:
            UserError: channels or sizes that the network cannot take, more positions than ``rope_max_seq_len`` along
                an axis among them.
        """
        channels, *sizes = latent_shape
        if channels != config["in_channels"]:
            raise UserError(
                f"{setting} takes latents of {config['in_channels']} channels, but the data has {channels};"
                " use a checkpoint made for this VAE, or other data.encoders"
            )
        if config["out_channels"] not in (None, channels):
            raise UserError(
                f"{setting} has out_channels={config['out_channels']}, and a velocity has {channels} channels, as the"
                " latents; use a network with as many"
            )
        tokens = 1
        positions = config["rope_max_seq_len"]
        for key, size, patch in zip(
            ("data.num_frames", "data.height", "data.width"), sizes, config["patch_size"], strict=True
        ):
            most = positions * patch
            if size > most:
                # What a latent is of the clip, only the data's VAE says: none, or one of the two that Wan has.
                with_vae = 4 * most - 3 if key == "data.num_frames" else 8 * most
                raise UserError(
                    f"{key} gives {size} latent positions, but {setting} has rope_max_seq_len={positions} in patches of"
                    f" {patch}; use at most {most} latent positions ({key}={most} without a VAE, {with_vae} with Wan's)"
                )
            if size % patch:
                raise UserError(
                    f"{key} gives {size} latent positions, which the patch size {patch} of {setting} does not divide;"
                    f" use a {key} that gives {size - size % patch or patch}"
                )
            tokens *= size // patch
        return tokens

    @staticmethod
    def text_dim(config: dict[str, Any]) -> int:
        """Size of the text embeddings that the network takes."""
        return config["text_dim"]

    @staticmethod
    def outputs(network: nn.Module, x: Tensor, time: Tensor, text: Tensor) -> tuple[Tensor, ...]:
        """The velocity, and what additions put behind it.

        ``x`` is ``(B, C, T, H, W)``, ``time`` ``(B,)`` in [0, 1000], ``text`` ``(B, L, D)``.
        """
        with warnings.catch_warnings():
            # The output is a view, which an in-place operation would cut off from FSDP's hooks; Role makes none.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            return network(hidden_states=x, timestep=time, encoder_hidden_states=text, return_dict=False)

    @staticmethod
    def forward_flops(config: dict[str, Any], tokens: int, text_tokens: int) -> int:
        """Floating-point operations of one forward of one sample: matrix products and attention alone."""
        dim = config["num_attention_heads"] * config["attention_head_dim"]
        patch = config["patch_size"][0] * config["patch_size"][1] * config["patch_size"][2]
        self_attention = 4 * tokens * dim * dim + 2 * tokens * tokens * dim
        cross_attention = 2 * tokens * dim * dim + 2 * text_tokens * dim * dim + 2 * tokens * text_tokens * dim
        feed_forward = 2 * tokens * dim * config["ffn_dim"]
        embeddings = text_tokens * dim * (config["text_dim"] + dim) + dim * (config["freq_dim"] + 7 * dim)
        ends = tokens * dim * patch * (config["in_channels"] + config["out_channels"])
        return 2 * (config["num_layers"] * (self_attention + cross_attention + feed_forward) + embeddings + ends)
