"""Causal roles: settings, chunks of a clip, and the file ``causal.json``.

A causal network processes a clip in chunks of latent frames. A frame attends to its own chunk and to earlier ones. The
same network runs in three ways (:class:`models.roles.role.Role`):

1. the whole clip under a mask (noisy history, "diffusion forcing"; Chen et al. 2024);
2. the whole clip next to the clean clip, which is the history ("teacher forcing");
3. chunk by chunk, with the keys and values of earlier chunks in a :class:`models.roles.history.Cache` (CausVid, Yin et
   al. 2025).

Ways 2 and 3 compute the same function. docs/causal.md describes them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fsdp_cp.choices import Bounds, Checked, NonNegativeInt, PositiveInt
from fsdp_cp.errors import UserError, one_line, shown

if TYPE_CHECKING:
    from fsdp_cp.attention.mask import BlockMask

FILE = "causal.json"
"""File next to the weights of a causal network. It holds the settings and the number of latent frames in training."""
NOTE = (
    f"This network is causal: it was trained to make a clip in chunks of latent frames ({FILE}). A plain diffusers"
    " pipeline attends to all frames at once and does not reproduce it. python -m distill.sample does."
)


@dataclass(kw_only=True)
class CausalSettings(Checked):
    """``student.causal.*`` and ``teacher.causal.*``; see docs/causal.md."""

    chunk: PositiveInt | None = None
    """Number of latent frames in a chunk; null to attend to all frames, or for the checkpoint's ``causal.json``."""
    first_chunk: PositiveInt | None = None
    """Number of latent frames in the first chunk; null for ``chunk``. A given first frame is a chunk of 1."""
    window: PositiveInt | None = None
    """Number of earlier chunks that a chunk attends to; null for all."""
    sink: NonNegativeInt = 0
    """Number of first chunks that all later chunks attend to, in addition to ``window``."""
    context_time: Annotated[float, Bounds(least=0, below=1)] = 0.0
    """Time in [0, 1) at which a finished chunk is cached; 0 for no noise."""

    @property
    def enabled(self) -> bool:
        """Whether the settings describe a causal network."""
        return self.chunk is not None

    def size(self, number: int) -> int:
        """Return the number of latent frames of chunk ``number``, counted from 0."""
        assert self.chunk is not None
        return self.first_chunk if number == 0 and self.first_chunk is not None else self.chunk

    def chunks(self, frames: int, where: str = "") -> tuple[int, ...]:
        """Return the number of latent frames in each chunk of a clip of ``frames``; ``where`` prefixes settings."""
        first, later = self.size(0), self.size(1)
        if frames < first:
            name = "chunk" if self.first_chunk is None else "first_chunk"
            raise UserError(f"{where}{name}={first} must be at most the clip's latent frames, {frames}")
        count, rest = divmod(frames - first, later)
        if rest:
            fitting = f"{frames - rest} or {frames - rest + later}"
            raise UserError(f"{where}chunk={later}: {frames} latent frames are not whole chunks; use {fitting}")
        return (first, *[later] * count)

    def mask(self, frames: int, tokens: int, *, clean: bool = False) -> BlockMask:
        """Return the mask of a clip of latent frames of ``tokens`` tokens each, with ``clean`` after its clean
        history."""
        from fsdp_cp.attention.mask import block_causal, teacher_forcing  # settings alone need no attention

        blocks = [tokens * size for size in self.chunks(frames)]
        return (teacher_forcing if clean else block_causal)(blocks, window=self.window, sink=self.sink)

    def sees(self, number: int, earlier: int) -> bool:
        """Return whether chunk ``number`` attends to chunk ``earlier``: the rule of :mod:`fsdp_cp.attention.mask`."""
        return earlier < self.sink or self.window is None or earlier >= number - self.window

    def merged(self, saved: CausalSettings, where: str, folder: Path) -> CausalSettings:
        """Return the settings ``saved`` in a checkpoint's ``folder``, which these must not contradict."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(saved, item.name)
            if mine not in (item.default, theirs):
                raise UserError(f"{where}{item.name}={shown(mine)} must be {shown(theirs)}, as in {folder / FILE}")
        return saved


def read_causal(folder: Path, where: str) -> tuple[CausalSettings, int] | None:
    """Return the settings in a folder's ``causal.json`` and the frames in training; ``None`` without the file."""
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
        raise UserError(f"{where}: {file} is damaged ({one_line(error)}); copy it again") from error
    return settings, frames
