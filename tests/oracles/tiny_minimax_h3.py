"""A tiny MiniMax-H3, called on rows, layout and times that the steps of diffusers' modular pipeline make."""

from types import SimpleNamespace

import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)
from einops import rearrange
from torch import Tensor

ARCHITECTURE = {
    "num_attention_heads": 4, "attention_head_dim": 12, "hidden_size": 40, "num_layers": 2, "num_refiner_layers": 1,
    "ffn_dim": 24, "in_channels": 4, "audio_in_channels": 6, "text_dim": 20, "freq_dim": 16,
    "time_embed_hidden_dim": 32, "time_embed_dim": 24, "rope_freq_dim": 2,
}  # fmt: skip
SHAPES = {"video": (4, 3, 4, 6), "audio": (6, 7, 2)}
"""18 rows of video and 14 of sound; with 5 of text 37 rows, which no mesh divides."""


KEYFRAMES = {"keyframes": (4, 2, 4, 6), "keyframe_anchors": (2,), "text_length": (), "text_tags": (5,)}
"""Shapes of the condition on two keyframes, in addition to a text of 5 rows."""
REFERENCE_SIZES = torch.tensor(
    [
        [[1, 4, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
        [[7, 2, 4, 5], [1, 4, 6, 0], [0, 0, 0, 3]],
        [[0, 0, 0, 2], [7, 4, 2, 0], [1, 2, 2, 0]],
        [[1, 2, 2, 0], [1, 2, 4, 0], [7, 2, 2, 13]],
    ]
)
"""Sizes in four samples: a picture; a clip with sound, a picture, a sound; a sound, a silent clip, a picture; ..."""
REFERENCES = {
    "references": (84, 4), "reference_sounds": (26, 6), "reference_sizes": (3, 4), "text_length": (), "text_tags": (5,),
}  # fmt: skip
"""Shapes of the condition on three references, in addition to a text of 5 rows."""
AUG = 0.999
"""diffusers' ``keyframe_noise_aug``."""


def packed(tags: Tensor, audio: int, grid: tuple[int, ...], patch: tuple[int, ...], anchors=()) -> tuple:
    """Return diffusers' layout of text with ``tags``, ``audio`` latents of a side, latents ``grid`` and keyframes."""
    anchors = tuple(("first", "last")[anchor] for anchor in anchors)
    return MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, *grid, audio, patch, 2, 2, 0, anchors)


def references_of(given: dict[str, Tensor], i: int) -> tuple[list, list[Tensor], list[Tensor], list[Tensor]]:
    """Return the references of sample ``i`` of a condition: kinds, latents, noise and rows of sounds, as diffusers has
    them."""
    sizes = [size for size in given["reference_sizes"][i].tolist() if any(size)]
    kinds = [
        SimpleNamespace(kind="audio" if not t else "video" if t > 1 else "image", has_audio=sound > 0)
        for t, _, _, sound in sizes
    ]
    counts, rows = [t * h * w for t, h, w, _ in sizes if t], [2 * sound for *_, sound in sizes if sound]

    def pictures(name: str) -> list[Tensor]:
        pieces = given[name][i, : sum(counts)].split(counts)
        return [x.T.unflatten(1, size[:3])[None] for x, size in zip(pieces, [s for s in sizes if s[0]], strict=True)]

    sounds = given["reference_sounds"][i, : sum(rows)].split(rows) if rows else []
    return kinds, pictures("references"), pictures("reference_noise"), list(sounds)


def packed_with_references(tags: Tensor, audio: int, grid: tuple, patch: tuple, kinds, latents, sounds) -> tuple:
    build = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence
    return build(tags, kinds, latents, sounds, *grid, audio, patch, 2, 2, 0)


def velocity(
    network: torch.nn.Module, x: dict[str, Tensor], times: dict[str, Tensor], text: Tensor, given: dict | None = None
) -> dict:
    """Return the velocity from data to noise of each sample, at the parts' own times ``(B,)``.

    ``given`` are the tensors of a condition but for its text: keyframes or references with their noise, and lengths.
    """
    patch, each = tuple(network.config.patch_size), []
    for i in range(len(text)):
        video, audio, words = x["video"][i : i + 1], x["audio"][i], text[i : i + 1]
        grid, anchors, rows = video.shape[2:], [], patchify_video_latents(video, patch)
        tags, sounds = torch.ones(words.shape[1]), rearrange(audio, "a l s -> (s l) a")
        if given:
            words = words[:, : given["text_length"][i]]
            tags = torch.ones(words.shape[1])
        if given and "text_tags" in given:
            tags = 1 - (given["text_tags"][i, : words.shape[1]] == 1).long()
        if given and "references" in given:
            kinds, pictures, noises, given_sounds = references_of(given, i)
            made = [AUG * x + (1 - AUG) * noise for x, noise in zip(pictures, noises, strict=True)]
            rows = torch.cat([*(patchify_video_latents(x, patch) for x in made), rows])
            sounds = torch.cat([*given_sounds, sounds])
            layout = packed_with_references(tags, audio.shape[1], grid, patch, kinds, pictures, given_sounds)
        elif given and "keyframes" in given:
            anchors, noise = given["keyframe_anchors"][i].tolist(), given["keyframe_noise"][i : i + 1]
            noised = AUG * given["keyframes"][i : i + 1] + (1 - AUG) * noise
            rows = torch.cat([patchify_video_latents(noised, patch), rows])
        if not given or "references" not in given:
            layout = packed(tags, audio.shape[1], grid, patch, anchors)
        positions, tags, videos, audios, texts, count, of_sounds = layout
        clean = {part: 1 - time[i].item() for part, time in times.items()}
        row_times, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            videos,
            audios,
            count,
            of_sounds,
            words.shape[1],
            clean["video"],
            clean["audio"],
            max(clean["video"], AUG),
            1.0,
        )
        rows, sound = network(
            hidden_states=rows[None],
            audio_hidden_states=sounds[None],
            encoder_hidden_states=words,
            timestep=row_times,
            timestep_indices=indices,
            token_tags=tags,
            position_ids=positions,
            video_indices=videos,
            audio_indices=audios,
            text_indices=texts,
            return_dict=False,
        )
        sizes = {"t": grid[0], "h": grid[1] // patch[1], "p": patch[1], "q": patch[2]}
        rows = rearrange(rows[:, count:], "1 (t h w) (c p q) -> c t (h p) (w q)", **sizes)
        each.append((-rows, -rearrange(sound[:, of_sounds:], "1 (s l) a -> a l s", s=2)))
    return {part: torch.stack(parts) for part, parts in zip(("video", "audio"), zip(*each, strict=True), strict=True)}
