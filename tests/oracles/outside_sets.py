"""Writers of other projects' formats, from the clips of a folder and their latents and embeddings.

Each follows the code that writes the format: FastVideo's schema and record creator, rCM's builder and its merger of
shards, LightX2V's builder.
"""

import io
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from distill.data.encoders.choose import choose_encoders
from distill.data.encoders.wan import TextEncoder, VideoCodec
from distill.data.videos.decode import ClipFormat, read_clip
from distill.data.videos.video_folder import read_metadata
from tests.tiny_pipeline import render_clips

TOKENS = 40
"""Rows of a filled-up embedding."""


class Clip(NamedTuple):
    """A clip and what encoders make of it."""

    file: Path
    caption: str
    raw: Tensor
    """The VAE encoder's output (C, t, h, w), fp32."""
    latents: Tensor
    """Normalized."""
    text: Tensor
    """(L, D), fp32."""


def encoded_clips(pipeline: Path, folder: Path, count: int) -> list[Clip]:
    """Render clips into ``folder`` and return them with the encoders' output, of 9 frames of 32 x 48 at 8 fps."""
    render_clips(folder, count)
    encoders, cpu = choose_encoders(pipeline), {"device": torch.device("cpu"), "dtype": torch.float32}
    codec, encoder = VideoCodec(encoders, **cpu), TextEncoder(encoders, max_tokens=512, **cpu)
    clips = []
    for row in read_metadata(folder):
        video = read_clip(folder / row.file, ClipFormat(num_frames=9, height=32, width=48, fps=8))
        with torch.no_grad():
            raw = codec.vae.encode(video[None]).latent_dist.mode()[0]
        clips.append(Clip(folder / row.file, row.caption, raw, codec.encode(video), encoder.encode(row.caption)))
    return clips


def filled(text: Tensor) -> Tensor:
    """Fill an embedding up with rows of zeros."""
    return torch.cat([text, text.new_zeros(TOKENS - len(text), text.shape[1])])


def fastvideo(clips: Sequence[Clip], folder: Path, *, text_only: bool = False, without: Sequence[str] = ()) -> None:
    """Write two files of rows in groups of two, without padding, or filled up as the text pipeline does."""
    import pyarrow as pa
    from pyarrow import parquet

    def triplet(name: str, tensor: Tensor) -> dict:
        array = tensor.numpy()
        return {f"{name}_bytes": array.tobytes(), f"{name}_shape": list(array.shape), f"{name}_dtype": str(array.dtype)}

    rows = []
    for number, clip in enumerate(clips):
        row = {"id": f"clip_{number}", "caption": clip.caption}
        row |= triplet("text_embedding", filled(clip.text) if text_only else clip.text)
        if not text_only:
            row |= triplet("vae_latent", clip.raw) | {"file_name": clip.file.name, "media_type": "video"}
            # As the first pipeline writes them: sides exchanged, latent frames, the rate of the file.
            row |= {"width": 32, "height": 48, "num_frames": clip.raw.shape[1], "duration_sec": 1.5, "fps": 16.0}
        rows.append({key: value for key, value in row.items() if key not in without})
    half = (len(rows) + 1) // 2
    for worker, part in enumerate((rows[:half], rows[half:])):
        file = folder / f"rank_0/worker_{worker}/data_chunk_0.parquet"
        file.parent.mkdir(parents=True)
        parquet.write_table(pa.Table.from_pylist(part), file, compression="zstd", row_group_size=2)


def saved(value: object) -> bytes:
    """Return the bytes of ``torch.save``."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write_tar(file: Path, members: Sequence[tuple[str, bytes]]) -> None:
    """Write an archive of these members in their order."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for name, data in members:
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))


def rcm(clips: Sequence[Clip], folder: Path, *, merged: bool = False) -> None:
    """Write two shards; ``merged`` ones have a folder for each clip."""
    for shard in range(2):
        members = []
        for number, clip in list(enumerate(clips))[shard::2]:
            prefix = f"{number:09d}/{number:09d}" if merged else f"{number:09d}"
            members += [
                (f"{prefix}.latent.pt", saved(clip.latents.bfloat16())),
                (f"{prefix}.embed.pt", saved(filled(clip.text).bfloat16())),
                (f"{prefix}.prompt.txt", clip.caption.encode()),
            ]
        write_tar(folder / f"shard_{shard:06d}.tar", members)


def lightx2v(clips: Sequence[Clip], folder: Path, *, text_only: bool = False, ranks: int = 1) -> None:
    """Write a cache of ``ranks`` processes."""
    tables: list[list[str]] = [[] for _ in range(ranks)]
    for kind in ("latents", "conditions"):
        (folder / kind).mkdir(parents=True)
    for number, clip in enumerate(clips):
        name = f"sample_g{number:06d}_w000.pt"
        row = {"caption": clip.caption, "condition_path": f"conditions/{name}"}
        text = {"prompt": clip.caption, "conditions": {"prompt_embed": filled(clip.text).bfloat16()}}
        torch.save(text, folder / "conditions" / name)
        if not text_only:
            _, frames, height, width = clip.latents.shape
            sizes = {"num_frames": frames, "height": height, "width": width, "fps": 8.0}
            torch.save({"latents": clip.latents.bfloat16(), **sizes}, folder / "latents" / name)
            row |= {"video_latent_path": f"latents/{name}", "raw_num_frames": 4 * frames - 3}
        tables[number % ranks].append(json.dumps(row, ensure_ascii=False))
    for rank, lines in enumerate(tables):
        name = "metadata.jsonl" if ranks == 1 else f"metadata_rank{rank:02d}.jsonl"
        (folder / name).write_text("\n".join(lines) + "\n")


def array(clips: Sequence[Clip], folder: Path, name: str = "metadata.json") -> None:
    """Write the clips into ``videos/``, with captions as texts and as lists of one text."""
    copy_videos(clips, folder)
    entries = [
        {"path": clip.file.name, "cap": clip.caption if n % 2 else [clip.caption]} for n, clip in enumerate(clips)
    ]
    (folder / name).write_text(json.dumps(entries))


def lines(clips: Sequence[Clip], folder: Path, name: str = "prompts.txt") -> None:
    """Write ``videos.txt`` with paths from the folder, and the captions."""
    copy_videos(clips, folder)
    (folder / "videos.txt").write_text("".join(f"videos/{clip.file.name}\n" for clip in clips))
    (folder / name).write_text("".join(f"{clip.caption}\n" for clip in clips))


def webdataset(clips: Sequence[Clip], folder: Path) -> None:
    """Write two shards of videos, captions and notes."""
    half = (len(clips) + 1) // 2
    for shard, part in enumerate((clips[:half], clips[half:])):
        members = []
        for number, clip in enumerate(part):
            members += [(f"{number:05d}.txt", clip.caption.encode()), (f"{number:05d}.mp4", clip.file.read_bytes())]
            members += [(f"{number:05d}.json", b"{}")]
        write_tar(folder / f"{shard:05d}.tar", members)


def copy_videos(clips: Sequence[Clip], folder: Path) -> None:
    """Copy the video files into ``folder/videos``."""
    (folder / "videos").mkdir(parents=True)
    for clip in clips:
        shutil.copy(clip.file, folder / "videos")
