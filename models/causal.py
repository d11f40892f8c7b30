"""Causal roles: settings, chunks of a clip, and the cache of keys and values.

A causal network processes a clip in chunks of latent frames. A frame attends to its own chunk and to earlier ones. The
same network runs in three ways (:class:`models.roles.role.Role`):

1. the whole clip under a mask (noisy history, "diffusion forcing"; Chen et al. 2024);
2. the whole clip next to the clean clip, which is the history ("teacher forcing");
3. chunk by chunk, with the keys and values of earlier chunks in a :class:`Cache` (CausVid, Yin et al. 2025).

Ways 2 and 3 compute the same function. docs/causal.md describes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_cp.choices import check_range
from fsdp_cp.errors import UserError, shown

if TYPE_CHECKING:
    from fsdp_cp.attention.cached import KeyValues
    from fsdp_cp.attention.mask import BlockMask
    from models.roles.condition import Condition
    from models.roles.role import Role

FILE = "causal.json"
"""File next to the weights of a causal network. It holds the settings and the number of latent frames in training."""
NOTE = (
    f"This network is causal: it was trained to make a clip in chunks of latent frames ({FILE}). A plain diffusers"
    " pipeline attends to all frames at once and does not reproduce it. python -m distill.sample does."
)


@dataclass(kw_only=True)
class CausalSettings:
    """``student.causal.*`` and ``teacher.causal.*``; see docs/causal.md."""

    chunk: int | None = None
    """Number of latent frames in a chunk; null for a network that attends to all frames, or for the checkpoint's
    ``causal.json``."""
    first_chunk: int | None = None
    """Number of latent frames in the first chunk; null for ``chunk``. A given first frame is a chunk of 1."""
    window: int | None = None
    """Number of earlier chunks that a chunk attends to; null for all."""
    sink: int = 0
    """Number of first chunks that all later chunks attend to, in addition to ``window``."""
    context_time: float = 0.0
    """Time in [0, 1) at which a finished chunk is cached; 0 for no noise."""

    def __post_init__(self) -> None:
        check_range(self, "chunk", "first_chunk", "window", least=1)
        check_range(self, "sink", least=0)
        check_range(self, "context_time", least=0, below=1)

    @property
    def enabled(self) -> bool:
        """Whether the settings describe a causal network."""
        return self.chunk is not None

    def size(self, number: int) -> int:
        """Return the number of latent frames of chunk ``number``, counted from 0."""
        assert self.chunk is not None
        return self.first_chunk if number == 0 and self.first_chunk is not None else self.chunk

    def chunks(self, frames: int, where: str = "") -> tuple[int, ...]:
        """Return the number of latent frames in each chunk of a clip of ``frames`` latent frames.

        ``where`` is the prefix of the settings in messages, e.g. ``"student.causal."``.

        Raises:
            UserError: the frames are not whole chunks.
        """
        first, later = self.size(0), self.size(1)
        if frames < first:
            name = "chunk" if self.first_chunk is None else "first_chunk"
            raise UserError(f"{where}{name}={first} must be at most the clip's latent frames, {frames}")
        count, rest = divmod(frames - first, later)
        if rest:
            fitting = f"{frames - rest} or {frames - rest + later}"
            raise UserError(f"{where}chunk={later}: {frames} latent frames are not whole chunks; use {fitting}")
        return (first, *[later] * count)

    def last_start(self, frames: int) -> int:
        """Return the first latent frame of the last chunk of a clip."""
        return sum(self.chunks(frames)[:-1])

    def mask(self, frames: int, tokens: int, *, clean: bool = False) -> BlockMask:
        """Return the attention mask of a whole clip.

        Args:
            frames: number of latent frames.
            tokens: number of tokens in a latent frame.
            clean: whether a clean clip of the same frames comes first and is the history.
        """
        from fsdp_cp.attention.mask import block_causal, teacher_forcing  # settings alone need no attention

        blocks = [tokens * size for size in self.chunks(frames)]
        return (teacher_forcing if clean else block_causal)(blocks, window=self.window, sink=self.sink)

    def sees(self, number: int, earlier: int) -> bool:
        """Return whether chunk ``number`` attends to chunk ``earlier``: the rule of :mod:`fsdp_cp.attention.mask`."""
        return earlier < self.sink or self.window is None or earlier >= number - self.window

    def merged(self, saved: CausalSettings, where: str, folder: Path) -> CausalSettings:
        """Return the settings ``saved`` with a checkpoint, which these must not contradict.

        Messages name the settings with the prefix ``where`` and the checkpoint's ``folder``.

        Raises:
            UserError: a setting that is not at its default has another value in the checkpoint.
        """
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(saved, item.name)
            if mine not in (item.default, theirs):
                raise UserError(f"{where}{item.name}={shown(mine)} must be {shown(theirs)}, as in {folder / FILE}")
        return saved


def read_causal(folder: Path, where: str) -> tuple[CausalSettings, int] | None:
    """Return the settings in a folder's ``causal.json`` and the latent frames in training; ``None`` without the file.

    Raises:
        UserError: the file is damaged; ``where`` names the setting and the folder.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        frames = values.pop("frames")
        settings = CausalSettings(**values)
        if type(frames) is not int or not settings.enabled:
            raise ValueError("frames and chunk must be numbers")
        settings.chunks(frames)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{where}: {file} is damaged ({' '.join(str(error).split())[:200]}); copy it again") from error
    return settings, frames


def write_causal(folder: Path, contents: Mapping[str, Any]) -> None:
    """Write ``causal.json`` (:attr:`models.roles.role.Role.causal_file`)."""
    (folder / FILE).write_text(json.dumps(contents, indent=2) + "\n")


@dataclass(slots=True)
class Record:
    """Keys and values that one forward without gradient leaves for a :class:`Cache`."""

    layers: dict[int, KeyValues] = field(default_factory=dict)
    """Keys and values of the chunk, by layer."""
    text: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values of the text, by layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CausalForward:
    """History and positions of one forward. Every block gets it as an argument, so that a block that is recomputed in
    backward reads what its forward read."""

    positions: tuple[int, ...]
    """Position of each latent frame in the clip."""
    mask: BlockMask | None = None
    """Mask over all tokens; ``None`` for a chunk, which attends to itself and to ``past``."""
    past: tuple[tuple[KeyValues, ...], ...] = ()
    """Keys and values of each earlier chunk that the chunk attends to, by layer. The first ``sinks`` are sinks."""
    sinks: int = 0
    """Number of sinks in ``past``."""
    shift: int = 0
    """Number of frames by which the sinks are nearer than their positions say."""
    text: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values of the text, by layer; empty if they are not known. Used without gradients only."""
    record: Record | None = None
    """Record to fill."""

    def pairs(self, tokens: int) -> int:
        """Return the number of query-key pairs in a layer of a forward of ``tokens`` tokens."""
        if self.mask is not None:
            return self.mask.pairs
        return tokens * (tokens + sum(chunk[0].tokens for chunk in self.past))


def whole_clip(
    settings: CausalSettings, x: Tensor, t: Tensor, clean: Tensor | None, tokens: int
) -> tuple[CausalForward, Tensor, Tensor]:
    """Return the history, the latents and the times of a forward of a whole clip.

    Args:
        settings: settings of the role.
        x: latents ``x_t``, ``(B, C, T, H, W)``.
        t: ``(B,)`` or ``(B, T)``.
        clean: clean clip, the history of every chunk; ``None`` for the noisy history in ``x``.
        tokens: number of tokens in a latent frame.

    Raises:
        ValueError: frames that are not whole chunks, or clips of different shapes.
    """
    frames = x.shape[2]
    mask = settings.mask(frames, tokens, clean=clean is not None)
    if clean is None:
        return CausalForward(positions=tuple(range(frames)), mask=mask), x, t
    if clean.shape != x.shape:
        raise ValueError(f"clean {tuple(clean.shape)} must have the shape of x, {tuple(x.shape)}")
    noisy = t if t.ndim == 2 else t[:, None].expand(-1, frames)
    times = torch.cat([torch.full_like(noisy, settings.context_time), noisy], dim=1)
    return CausalForward(positions=tuple(range(frames)) * 2, mask=mask), torch.cat([clean, x], dim=2), times


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cache:
    """Keys and values of the chunks so far that the next chunk attends to, on this rank. It never changes:
    :meth:`with_chunk` returns a new one, which shares its tensors.

    A forward thus keeps its history until its backward. A buffer that is overwritten would change the history of a
    block that is recomputed, and with it the gradients, without an error.
    """

    role: Role
    """Role that fills the cache."""
    condition: Condition
    """Condition of the B samples."""
    frames: int = 0
    """Number of latent frames so far, evicted ones included."""
    count: int = 0
    """Number of chunks so far, evicted ones included."""
    chunks: Mapping[int, tuple[KeyValues, ...]] = field(default_factory=dict)
    """Keys and values of each layer, by the number of the chunk."""
    text: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values of the text, by layer; empty before the first chunk."""

    def forward(self, record: Record | None = None) -> CausalForward:
        """Return the arguments of a forward of the next chunk."""
        role, settings = self.role, self.role.causal
        assert settings is not None
        trained = role.trained_frames
        return CausalForward(
            positions=tuple(range(self.frames, self.frames + settings.size(self.count))),
            past=tuple(self.chunks.values()),
            sinks=sum(number < settings.sink for number in self.chunks),
            shift=0 if trained is None else max(0, self.frames - settings.last_start(trained)),
            text=self.text,
            record=record,
        )

    @torch.no_grad()
    def with_chunk(self, x0: Tensor) -> Cache:
        """Return the cache with one more chunk, without the chunks that the one after it does not attend to.

        One forward without gradient computes keys and values at ``context_time``; for ``context_time`` above 0 the
        caller adds the noise. A collective.

        Args:
            x0: latents of the finished chunk, ``(B, C, frames of the chunk, H, W)``.

        Raises:
            ValueError: ``x0`` has another number of frames or samples.
        """
        settings = self.role.causal
        assert settings is not None
        dtype = torch.promote_types(x0.dtype, torch.float32)
        t = torch.full((len(x0),), settings.context_time, dtype=dtype, device=x0.device)
        record = Record()
        self.role.chunk_velocity(x0, t, self, record)
        layers = tuple(record.layers[layer] for layer in sorted(record.layers))
        count = self.count + 1
        return replace(
            self,
            frames=self.frames + x0.shape[2],
            count=count,
            chunks={n: kv for n, kv in {**self.chunks, self.count: layers}.items() if settings.sees(count, n)},
            text=self.text or record.text,
        )
