"""Latents (C, t, h, w) and embeddings (L, D) that another project stored, in place of the encoders': their checks."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch

from distill.data.base import ClipSettings
from distill.data.encoders.choose import choose_encoders
from distill.data.encoders.wan import EncoderFolder
from distill.data.sources.source import Source
from distill.data.videos.container import ClipError
from fsdp_cp.errors import UserError

S = TypeVar("S", bound=ClipSettings)

DEVIATIONS = (0.67, 1.5)
"""Bounds of the standard deviation of normalized latents: Wan 2.1's raw ones have 2.2."""
LARGEST_SHIFT = 1.0
"""Largest root mean square, over channels, of the means of normalized latents, in their standard deviations."""
_SIZED_CLIPS = 9
TEXT_ERROR = 2e-2
"""Largest relative difference of a stored embedding from ours: encoders in bf16 stay below it."""


def read_stored(read: Callable[[str], torch.Tensor], name: str, where: str) -> torch.Tensor:
    """Return a stored tensor that must be there; a damaged one is a ``UserError``."""
    try:
        return read(name)
    except ClipError as error:
        raise UserError(f"{where}: {name} {error}; copy it again, or leave it out") from error


def fitted_settings(settings: S, source: Source, given: Collection[str]) -> S:
    """Return the settings with the sizes of most of some stored latents, and their rate. Given sizes must agree."""
    if source.latents is None and source.text is None:
        return settings
    where, folder = source.name, choose_encoders(settings.encoders)
    if folder.codec_class.vae_class != (wanted := source.vae_class):
        raise UserError(f"data.encoders={settings.encoders} must have the {wanted} that {where} is for; give these")
    if settings.image is not None:
        raise UserError(f"data.image={settings.image}: {where} holds no frames of its clips; give a folder of videos")
    names = [row.file for row in source.rows if not row.problem]
    if source.latents is None or not names:
        return settings
    channels, *sizes = _usual_shape(source.latents, names, where)
    if channels != folder.channels:
        wrong = f"makes latents of {folder.channels} channels, and {where} has {channels}"
        raise UserError(f"data.encoders={settings.encoders} {wrong}; give the folder of that VAE")
    found: dict[str, Any] = _clip_size(settings, sizes, folder, where, given)
    if "fps" not in given:
        found["fps"] = rate_of(source, names[0])
        if found["fps"] is None:
            raise UserError(f"data.fps is not set, and {where} does not tell it; give the rate of its clips")
    return replace(settings, **found)


def _usual_shape(read: Callable[[str], torch.Tensor], names: Sequence[str], where: str) -> tuple[int, ...]:
    """Return the shape of most of some stored latents."""
    shapes: Counter[tuple[int, ...]] = Counter()
    for name in names[:: max(1, len(names) // _SIZED_CLIPS)]:
        with suppress(ClipError):  # it is left out later, with its reason
            shapes[tuple(read(name).shape)] += 1
    if not shapes:
        read_stored(read, names[0], where)
    return shapes.most_common(1)[0][0]


def _clip_size(
    settings: ClipSettings, latent_sizes: Sequence[int], folder: EncoderFolder, where: str, given: Collection[str]
) -> dict[str, int]:
    """Return the settings of clips with latents of these sizes (t, h, w), unless buckets list them."""
    if settings.buckets == "auto":
        raise UserError(f"data.buckets=auto: {where} holds latents, whose sizes are fixed; list these sizes")
    if settings.buckets is not None:
        return {}
    frames, height, width = latent_sizes
    sides = {"height": folder.spatial * height, "width": folder.spatial * width}
    found = {"num_frames": folder.temporal * (frames - 1) + 1, **sides}
    for key, value in found.items():
        if key in given and getattr(settings, key) != value:
            raise UserError(f"data.{key}={getattr(settings, key)}: the latents of {where} have {value}; leave it out")
    return found


def rate_of(source: Source, name: str) -> float | None:
    """Return the frames per second that the format tells of a row's clip, or ``None``."""
    rate = None
    with suppress(ClipError):
        rate = source.fps and source.fps(name)
    return float(rate) if isinstance(rate, float | int) and rate > 0 else None


def check_deviation(latents: Iterable[torch.Tensor], where: str, *, were_normalized: bool) -> None:
    """Refuse latents (C, t, h, w) whose channels do not have the spread and the means of normalized ones."""
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for clip in latents:
        values = clip.double().flatten(1)
        count, total, squares = count + values.shape[1], total + values.sum(1), squares + values.square().sum(1)
    means = total / max(count, 1)
    deviation = (squares / max(count, 1) - means.square()).mean().sqrt().item()
    shift = means.square().mean().sqrt().item()
    least, most = DEVIATIONS
    if not count or (least <= deviation <= most and shift <= LARGEST_SHIFT):
        return
    found = f"latents of standard deviation {deviation:.3g}, not {least} to {most} as normalized ones of Wan"
    if shift > LARGEST_SHIFT:
        found = f"latents whose channels have means of {shift:.3g} (RMS), not 0 to {LARGEST_SHIFT} as normalized ones"
    told = "no if they are as the VAE gives them" if were_normalized else "yes if they are normalized already"
    raise UserError(f"{where} has {found}: they are another VAE's, or set data.normalized={told}")


def stored_text(source: Source, name: str, *, most: int, width: int) -> torch.Tensor:
    """Return the embedding (L, D) of a row's caption without the zeros that fill it up."""
    assert source.text is not None
    where = source.name
    text = read_stored(source.text, name, where)
    rows = text.ne(0).any(dim=1).nonzero()
    text = text[: int(rows[-1]) + 1 if len(rows) else 0]
    if text.shape[1] != width or not 1 <= len(text) or not text.isfinite().all():
        found = f"the embedding of {name} has shape {list(text.shape)}, not finite rows of {width}"
        raise UserError(f"{where}: {found}; give the encoders that made it")
    if len(text) > most:
        long = f"the embedding of {name} in {where} has {len(text)} tokens"
        raise UserError(f"data.max_text_tokens={most}: {long}; set it higher")
    return text


def check_texts(texts: Mapping[str, torch.Tensor], encode: Callable[[str], torch.Tensor], where: str) -> None:
    """Refuse stored embeddings, by caption, that another text encoder made."""
    for caption, text in texts.items():
        ours = encode(caption)
        if ours.shape == text.shape:
            error = ((text - ours).norm() / ours.norm()).item()
            if error <= TEXT_ERROR:
                continue
            found = f"differs by {error:.2g} of its norm, more than {TEXT_ERROR}, from"
        else:
            found = f"has {len(text)} tokens, not {len(ours)} as"
        found = f"the embedding of the caption {caption[:60]!r} {found} that of data.encoders"
        raise UserError(f"{where}: {found}; give the encoders that made it")
