"""`data=video_folder`: a folder of video files with captions, seen as cached latents.

The folder holds ``metadata.csv`` with columns ``file_name,caption`` (the layout that Hugging Face ``datasets`` calls a
video folder); ``file_name`` is relative to it. Shape legend: C t h w latents, T H W pixels, L tokens, D width of an
embedding.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distill.data.clips import ClipFormat
from distill.data.encoders import EncoderFolder, VideoCodec, inspect_encoders, pad_text
from distill.data.latent_cache import LatentCache
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.reduce import together

logger = logging.getLogger(__name__)

COLUMNS = ("file_name", "caption")
_VIDEO_SUFFIXES = {".mp4", ".mov", ".mkv", ".webm", ".avi"}


class VideoFolder:
    """Data set of the clips of a folder, encoded on first use and cached.

    Making one is collective: every rank makes it with the same arguments, and afterwards all hold the same items in the
    same order. Clips that are broken, missing or too short are named in the log and left out.
    """

    def __init__(
        self,
        *,
        path: str | Path,
        encoders: str | Path,
        cache: str | Path,
        num_frames: int,
        height: int,
        width: int,
        fps: float,
        negative_prompt: str = "",
        max_text_tokens: int = 512,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Check, then encode what the cache does not hold yet, then free the encoders.

        Args:
            path: folder with metadata.csv and the videos.
            encoders: diffusers pipeline folder with vae/, text_encoder/ and tokenizer/.
            cache: folder for latents and embeddings, shared by all ranks; created.
            num_frames, height, width: size of the clips in frames and pixels, as the VAE and the patches divide them.
            fps: frames per second at which the videos are sampled.
            negative_prompt: text of ``null_text``.
            max_text_tokens: L; longer captions are cut (and logged), shorter ones filled with zeros.
            device, dtype: where and in which precision the encoders run; latents and embeddings are fp32.

        Raises: ``UserError`` on every rank for a setting that does not fit, before weights are loaded or videos
        decoded; and if no clip of the folder can be used.
        """
        self.path, self.fps = Path(path), float(fps)
        clip = ClipFormat(num_frames=num_frames, height=height, width=width, fps=self.fps)

        def check() -> tuple[EncoderFolder, list[tuple[str, str | None]]]:
            if max_text_tokens < 1:
                raise UserError(f"data.max_text_tokens={max_text_tokens} must be at least 1; Wan uses 512")
            rows = read_metadata(self.path)
            self.encoders = inspect_encoders(encoders)
            self.latent_shape = self.encoders.latent_shape(clip)
            # Ranks may reach the folder by different paths, but must find the same in it.
            return replace(self.encoders, path=Path()), rows

        checked = together(check)
        rows = checked[0][1]
        if any(found != checked[0] for found in checked):
            raise UserError(f"data.path={path} or data.encoders={encoders} differs between ranks; give the same")
        self.text_shape = (max_text_tokens, self.encoders.text_width)
        self.device, self.dtype = torch.device(device), dtype
        self.negative_prompt = negative_prompt
        self._codec: VideoCodec | None = None
        self.cache = LatentCache(
            cache,
            encoders=self.encoders,
            clip=clip,
            max_text_tokens=max_text_tokens,
            device=self.device,
            dtype=dtype,
        )
        self._items = self._usable(rows)
        texts = list(dict.fromkeys([caption for _, caption in self._items] + [negative_prompt]))
        self._texts = dict(zip(texts, self.cache.write_texts(texts), strict=True))
        self.null_text = self.embed([negative_prompt])[0]
        encoded = together(lambda: (self.cache.encoded_clips, self.cache.encoded_captions))
        if rank() == 0:
            logger.info(
                "%d clips from %s: %d encoded now, the rest read from %s; %d of %d texts encoded now",
                len(self),
                self.path,
                sum(clips for clips, _ in encoded),
                self.cache.folder,
                sum(captions for _, captions in encoded),
                len(texts),
            )
        decides = [self._items, sorted(self._texts.items()), negative_prompt]
        self.fingerprint = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]

    def _usable(self, rows: list[tuple[str, str | None]]) -> list[tuple[str, str]]:
        """(cache key, caption) of the usable clips, the same on every rank; rank 0's log names the others."""
        results = self.cache.write_clips([self.path / name for name, _ in rows])
        items, left_out = [], []
        for (name, caption), (what, value) in zip(rows, results, strict=True):
            if what == "error":
                left_out.append((name, value))
            elif caption is None:
                left_out.append((name, "has no caption in metadata.csv"))
            else:
                items.append((value, caption))
        if rank() == 0:
            for name, reason in left_out:
                logger.warning("clip left out: %s %s", name, reason)
            if left_out:
                logger.warning("%d of %d clips left out", len(left_out), len(rows))
            listed = {(self.path / name).resolve() for name, _ in rows}
            extra = sorted(
                file.name
                for file in self.path.iterdir()
                if file.suffix.lower() in _VIDEO_SUFFIXES and file.resolve() not in listed
            )
            if extra:
                names = ", ".join(extra[:5])
                logger.warning("%d videos are not in metadata.csv and not used: %s", len(extra), names)
        if not items:
            name, reason = left_out[0]
            raise UserError(
                f"data.path={self.path} has no usable clip ({len(left_out)} left out, first: {name} {reason}); give "
                "longer videos, or set data.num_frames lower or data.fps higher"
            )
        return items

    def __len__(self) -> int:
        """Number of usable clips."""
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"latents": fp32 (C, t, h, w), "text": fp32 (L, D), "caption": str}, read from the cache."""
        key, caption = self._items[index]
        return {"latents": self.cache.latents(key), "text": self._text(caption), "caption": caption}

    def captions(self) -> list[str]:
        """Distinct captions of the usable clips, in the order of metadata.csv."""
        return list(dict.fromkeys(caption for _, caption in self._items))

    def embed(self, captions: list[str]) -> torch.Tensor:
        """fp32 (n, L, D). Raises ``UserError`` for a caption that is neither in the folder nor the negative prompt."""
        for caption in captions:
            if caption not in self._texts:
                raise UserError(
                    f"the caption '{caption}' has no embedding, the text encoder is freed; use one of the "
                    f"{len(self.captions())} in {self.path / 'metadata.csv'}, such as '{self.captions()[0]}'"
                )
        return torch.stack([self._text(caption) for caption in captions])

    def _text(self, caption: str) -> torch.Tensor:
        return pad_text(self.cache.text(self._texts[caption]), self.text_shape[0])

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (n, C, t, h, w) on any device -> uint8 (n, T, H, W, 3) on the CPU. The first call loads the VAE."""
        if self._codec is None:
            self._codec = VideoCodec(self.encoders, device=self.device, dtype=self.dtype)
        return self._codec.decode(latents)

    def release(self) -> None:
        """Free the VAE that ``decode`` loaded; the next ``decode`` loads it again."""
        self._codec = None
        self.cache.release_memory()


def read_metadata(path: Path) -> list[tuple[str, str | None]]:
    """(file name, caption) of every row of ``path``/metadata.csv; the caption is None where the row ends before it.

    Raises: ``UserError`` if the folder, the file, a column, a file name or every row is missing.
    """
    if not path.is_dir():
        raise UserError(f"data.path={path} is not a folder; give a folder with videos and metadata.csv")
    file = path / "metadata.csv"
    if not file.is_file():
        raise UserError(f"data.path={path} has no metadata.csv; add one with the columns {','.join(COLUMNS)}")
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:  # spreadsheets put a byte order mark first
            reader = csv.DictReader(stream)
            absent = [column for column in COLUMNS if column not in (reader.fieldnames or [])]
            if absent:
                found = ",".join(reader.fieldnames or []) or "nothing"
                raise UserError(f"data.path: {file} has no column {absent[0]} (found {found}); use {','.join(COLUMNS)}")
            rows = [(row["file_name"] or "", row["caption"]) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"data.path: {file} is not a UTF-8 table ({error}); save it as UTF-8 csv") from error
    if not rows:
        raise UserError(f"data.path: {file} has no rows; add one per video")
    for number, (name, _) in enumerate(rows, start=1):
        if not name.strip():
            raise UserError(f"data.path: {file} has no file_name in row {number}; fill it in or remove the row")
    return rows
