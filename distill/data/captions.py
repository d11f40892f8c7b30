"""`data=captions`: captions without clips, for methods that train on the student's own samples alone.

The text encoder embeds the captions; of the VAE the settings alone count, until samples are decoded.

Shape legend: C t h w latents, T H W pixels, L tokens, D width of an embedding.
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


class Captions:
    """Data set of the captions of a file, embedded on first use and cached.

    Making one is collective: every rank makes it with the same arguments, and afterwards all hold the same items in the
    same order.
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
        """Check, then embed what the cache does not hold yet, then free the text encoder.

        Args:
            path: see :func:`read_captions`.
            encoders: diffusers pipeline folder with vae/, text_encoder/ and tokenizer/.
            cache: folder for the embeddings, shared by all ranks; created.
            num_frames, height, width: size of the student's clips in frames and pixels, as the VAE and the patches
                divide them.
            fps: frames per second of the sample videos.
            negative_prompt: text of ``null_text``.
            max_text_tokens: L; longer captions are cut (and logged), shorter ones filled with zeros.
            device, dtype: where and in which precision the encoders run; embeddings are fp32.

        Raises: ``UserError`` on every rank for a setting that does not fit, before weights are loaded.
        """
        self.path, self.fps = Path(path), float(fps)
        clip = ClipFormat(num_frames=num_frames, height=height, width=width, fps=self.fps)

        def check() -> tuple[EncoderFolder, list[str]]:
            if max_text_tokens < 1:
                raise UserError(f"data.max_text_tokens={max_text_tokens} must be at least 1; Wan uses 512")
            found = read_captions(self.path)
            self.encoders = inspect_encoders(encoders)
            self.latent_shape = self.encoders.latent_shape(clip)
            # Ranks may reach the folder by different paths, but must find the same in it.
            return replace(self.encoders, path=Path()), found

        checked = together(check)
        if any(found != checked[0] for found in checked):
            raise UserError(f"data.path={path} or data.encoders={encoders} differs between ranks; give the same")
        self._items = checked[0][1]
        self.text_shape = (max_text_tokens, self.encoders.text_width)
        self.device, self.dtype = torch.device(device), dtype
        self._codec: VideoCodec | None = None
        self.cache = LatentCache(
            cache,
            encoders=self.encoders,
            clip=clip,
            max_text_tokens=max_text_tokens,
            device=self.device,
            dtype=dtype,
        )
        texts = list(dict.fromkeys([*self._items, negative_prompt]))
        self._texts = dict(zip(texts, self.cache.write_texts(texts), strict=True))
        self.null_text = self.embed([negative_prompt])[0]
        encoded = sum(together(lambda: self.cache.encoded_captions))
        if rank() == 0:
            logger.info(
                "%d captions from %s: %d of %d texts embedded now, the rest read from %s",
                len(self),
                self.path,
                encoded,
                len(texts),
                self.cache.folder,
            )
        decides = [self._items, sorted(self._texts.items()), negative_prompt, self.latent_shape]
        self.fingerprint = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        """Number of captions; one that stands there twice counts twice."""
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"text": fp32 (L, D), "caption": str}, read from the cache."""
        return {"text": self._text(self._items[index]), "caption": self._items[index]}

    def captions(self) -> list[str]:
        """Distinct captions in the order of the file."""
        return list(dict.fromkeys(self._items))

    def embed(self, captions: list[str]) -> torch.Tensor:
        """fp32 (n, L, D). Raises ``UserError`` for a caption that is neither in the file nor the negative prompt."""
        for caption in captions:
            if caption not in self._texts:
                raise UserError(
                    f"the caption '{caption}' has no embedding, the text encoder is freed; use one of the "
                    f"{len(self.captions())} in {self.path}, such as '{self._items[0]}'"
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


def read_captions(path: Path) -> list[str]:
    """The captions of ``path``: its column ``caption`` if it ends in ``.csv``, its lines otherwise.

    White space around a caption is dropped; empty ones are left out, and that is logged.

    Raises: ``UserError`` if the file, the column or every caption is missing, or if it is not UTF-8.
    """
    if not path.is_file():
        raise UserError(f"data.path={path} is not a file; give a text file with a caption per line, or a .csv file")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:  # spreadsheets put a byte order mark first
            found = _column(path, csv.DictReader(stream)) if path.suffix.lower() == ".csv" else list(stream)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"data.path={path} is not UTF-8 text ({error}); save it as UTF-8") from error
    captions = [caption.strip() for caption in found if caption.strip()]
    if not captions:
        raise UserError(f"data.path={path} has no caption; add one per line")
    if len(captions) < len(found) and rank() == 0:
        logger.warning("%d empty captions of %s left out", len(found) - len(captions), path)
    return captions


def _column(path: Path, reader: csv.DictReader) -> list[str]:
    if "caption" not in (reader.fieldnames or []):
        found = ",".join(reader.fieldnames or []) or "nothing"
        raise UserError(f"data.path={path} has no column caption (found {found}); add one")
    return [row["caption"] or "" for row in reader]
