"""What `data=video_folder` and `data=captions` share: a table of captions, embedded on first use and cached.

Shape legend: C t h w latents, T H W pixels, L tokens, D width of an embedding.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distill.data.clips import ClipFormat, check_sizes
from distill.data.encoders import EncoderFolder, VideoCodec, inspect_encoders, pad_text
from distill.data.latent_cache import LatentCache
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.reduce import together

logger = logging.getLogger(__name__)
_MAX_TOKENS = 8192  # attention of the text encoder over more would fill a GPU


class EncodedData:
    """Items of a table at ``data.path``, each with a caption.

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
        captions: Sequence[str] = (),
    ) -> None:
        """Check, then encode what the cache does not hold yet, then free the encoders.

        Args:
            path: folder of the videos and their table, or file of the captions.
            encoders: diffusers pipeline folder with vae/, text_encoder/ and tokenizer/.
            cache: folder for what the encoders make, shared by all ranks; created.
            num_frames, height, width: size of a clip in frames and pixels, as the VAE and the patches divide it.
            fps: frames per second of the clips.
            negative_prompt: text of ``null_text``.
            max_text_tokens: L; longer captions are cut (and logged), shorter ones filled with zeros.
            device, dtype: where and in which precision the encoders run; latents and embeddings are fp32.
            captions: others to embed, beside the items' own; they are no part of ``fingerprint``.

        Raises: ``UserError`` on every rank for a setting that does not fit, before weights are loaded or videos
        decoded; and if no item can be used.
        """
        check_sizes(num_frames=num_frames, height=height, width=width, fps=fps)
        for what, text in (("data.negative_prompt", negative_prompt), *(("the caption", text) for text in captions)):
            _require_text(what, text)
        self.path, self.fps = Path(path), float(fps)
        clip = ClipFormat(num_frames=num_frames, height=height, width=width, fps=self.fps)

        def check() -> tuple[EncoderFolder, list[Any]]:
            if type(max_text_tokens) is not int or not 1 <= max_text_tokens <= _MAX_TOKENS:
                what = "at least 1" if max_text_tokens < 1 else f"a whole number up to {_MAX_TOKENS}"
                raise UserError(f"data.max_text_tokens={max_text_tokens} must be {what}; Wan uses 512")
            rows = self._read()
            self.encoders = inspect_encoders(encoders)
            self.latent_shape = self.encoders.latent_shape(clip)
            # Ranks may reach the folder by different paths, but must find the same in it.
            return replace(self.encoders, path=Path()), rows

        checked = together(check)
        if any(found != checked[0] for found in checked):
            raise UserError(f"data.path={path} or data.encoders={encoders} differs between ranks; give the same")
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
        self._items = self._usable(checked[0][1])
        own = dict.fromkeys([*self.captions(), negative_prompt])
        texts = list(own | dict.fromkeys(["", *captions]))
        self._texts = dict(zip(texts, self.cache.write_texts(texts), strict=True))
        self.null_text = self.embed([negative_prompt])[0]
        encoded = together(lambda: (self.cache.encoded_clips, self.cache.encoded_captions))
        if rank() == 0:
            logger.info(
                "%d items from %s: %d clips and %d texts encoded now, the rest read from %s",
                len(self),
                self.path,
                sum(clips for clips, _ in encoded),
                sum(captions for _, captions in encoded),
                self.cache.folder,
            )
        keys = sorted((text, self._texts[text]) for text in own)  # sampling others must not make it other data
        decides = [self._items, keys, negative_prompt, *self._decides()]
        self.fingerprint = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]

    def _read(self) -> list[Any]:
        """The table's rows: plain values, the same on every rank. Raises ``UserError``."""
        raise NotImplementedError

    def _usable(self, rows: list[Any]) -> list[Any]:
        """The items, of those rows; collective. Raises ``UserError``."""
        return rows

    def _decides(self) -> Sequence[Any]:
        """What else a fingerprint must tell apart."""
        return ()

    @property
    def table(self) -> Path:
        """The file that holds the captions."""
        return self.path

    def __len__(self) -> int:
        """Number of items; one that is listed twice counts twice."""
        return len(self._items)

    def captions(self) -> list[str]:
        """Distinct captions of the items, in their order."""
        raise NotImplementedError

    def embed(self, captions: list[str]) -> torch.Tensor:
        """fp32 (n, L, D). Raises ``UserError`` for a caption that was not known when the data set was made."""
        for caption in captions:
            if caption not in self._texts:
                known = self.captions()
                raise UserError(
                    f"the caption '{caption}' has no embedding, the text encoder is freed; use one of the "
                    f"{len(known)} in {self.table}, such as '{known[0]}'"
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


def _require_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of a command line that were no UTF-8
        raise UserError(f"{what} {text!r} is not UTF-8 text; type it in a UTF-8 terminal") from error
