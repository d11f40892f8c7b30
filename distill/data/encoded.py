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

from distill.data.choose_encoders import choose_encoders
from distill.data.clips import ClipFormat, first_frame
from distill.data.encoders import EncoderFolder, VideoCodec, check_text_tokens
from distill.data.first_frame import ImageInput
from distill.data.latent_cache import LatentCache
from fsdp_cp.errors import UserError, counted
from fsdp_cp.launch import rank
from fsdp_cp.reduce import on_all_ranks
from models.roles.condition import Condition

logger = logging.getLogger(__name__)


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
        vae_dtype: torch.dtype | None = None,
        vae_tiling: bool = False,
        captions: Sequence[str] = (),
        image: str | None = None,
        images: Sequence[str] = (),
        columns: object = None,
    ) -> None:
        """Check, then encode what the cache does not hold yet, then free the encoders.

        Args:
            path: folder of the videos and their table, or file of the captions.
            encoders: diffusers pipeline folder with vae/, text_encoder/ and tokenizer/.
            cache: folder for what the encoders make, shared by all ranks; created.
            num_frames, height, width: size of a clip in frames and pixels, as the VAE and the patches divide it.
            fps: frames per second of the clips.
            negative_prompt: text of ``null``.
            max_text_tokens: L; longer captions are cut (and logged), shorter ones filled with zeros.
            device, dtype: where and in which precision the encoders run; latents and embeddings are fp32.
            vae_dtype, vae_tiling: of the VAE, to encode and to decode; ``dtype`` and whole frames by default.
            captions: others to embed, beside the items' own; they are no part of ``fingerprint``.
            image: ``first_frame`` for the items' first images as conditions, ``None`` for none.
            images: files of the images of ``captions``, in their order, or none.
            columns: names that the table has for its columns (``data.columns``), or ``None``.

        Raises: ``UserError`` on every rank for a setting that does not fit, before weights are loaded or videos
        decoded; and if no item can be used.
        """
        for what, text in (("data.negative_prompt", negative_prompt), *(("the caption", text) for text in captions)):
            _require_text(what, text)
        clip = ClipFormat(num_frames=num_frames, height=height, width=width, fps=fps)
        self.path, self.columns, self.fps = Path(path), columns, float(fps)

        given = [Path(file).expanduser() for file in images]

        def check() -> tuple[EncoderFolder, list[Any]]:
            check_text_tokens(max_text_tokens)
            rows = self._read()
            self.encoders = choose_encoders(encoders)
            self.latent_shape = self.encoders.latent_shape(clip)
            if image is not None:
                self._image = self.encoders.inspect_image(f"data.encoders={encoders}")
                for file in given:  # found now, and not when clips and captions are encoded
                    first_frame(file, clip)
            # Ranks may reach the folder by different paths, but must find the same in it.
            return replace(self.encoders, path=Path()), rows

        self._image: ImageInput | None = None
        checked = on_all_ranks(check)
        if any(found != checked[0] for found in checked):
            raise UserError(f"data.path={path} or data.encoders={encoders} differs between ranks; give the same")
        for remark in self.encoders.remarks(clip, max_text_tokens, self._image) if rank() == 0 else ():
            logger.warning("%s", remark)
        self.condition_shapes = self.encoders.condition_shapes(clip, max_text_tokens, self._image)
        self.device, self.dtype = torch.device(device), dtype
        self._codec: VideoCodec | None = None
        self.cache = LatentCache(
            cache,
            encoders=self.encoders,
            clip=clip,
            max_text_tokens=max_text_tokens,
            device=self.device,
            dtype=dtype,
            vae_dtype=vae_dtype,
            vae_tiling=vae_tiling,
        )
        self._items = self._usable(checked[0][1])
        own = dict.fromkeys([*self.captions(), negative_prompt])
        texts = list(own | dict.fromkeys(["", *captions]))
        self._texts = dict(zip(texts, self.cache.write_texts(texts), strict=True))
        self.clip_tensors = self.encoders.clip_tensors(clip)
        self.null, self.empty = self._text_tensors(negative_prompt), self._text_tensors("")
        self._given_images = dict(zip(captions, self._encoded_images(given), strict=False))
        cache = self.cache
        if self._image is not None:
            for caption in captions:  # found now, and not when the networks are built
                self._image_key(caption)
        encoded = on_all_ranks(lambda: (cache.encoded_clips, cache.encoded_captions, cache.encoded_images))
        if rank() == 0:
            logger.info(
                "%s from %s: %s and %s%s encoded now, the rest read from %s",
                counted(len(self), "item"),
                self.path,
                counted(sum(clips for clips, _, _ in encoded), "clip"),
                counted(sum(captions for _, captions, _ in encoded), "text"),
                f" and {counted(sum(images for *_, images in encoded), 'image')}" if self._image is not None else "",
                self.cache.folder,
            )
        keys = sorted((text, self._texts[text]) for text in own)  # sampling others must not make it other data
        decides = [self._items, keys, negative_prompt, *self._decides()]
        decides += [{name: value.tolist() for name, value in self.clip_tensors.items()}] if self.clip_tensors else []
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

    def condition(self, captions: list[str], clips: Sequence[int] | None = None) -> Condition:
        """Of n samples: ``text`` fp32 (n, L, D), what else the encoders give, and where images condition those of the
        items ``clips``.

        Without ``clips`` an image is the one given with its caption, or else that of the first item with the caption.

        Raises: ``UserError`` for a caption that was not known when the data set was made.
        """
        texts = self._embedded(captions)
        tensors = {name: torch.stack([each[name] for each in texts]) for name in texts[0]}
        tensors |= {name: torch.stack([value] * len(texts)) for name, value in self.clip_tensors.items()}
        if self._image is not None:
            keys = [self._image_key(caption) for caption in captions] if clips is None else map(self._item_image, clips)
            images = [self._image_tensors(key) for key in keys]
            tensors |= {name: torch.stack([each[name] for each in images]) for name in images[0]}
        return Condition(tensors, self.null, self.empty)

    def _encoded_images(self, files: list[Path]) -> list[str]:
        """Cache keys of the images, which are encoded now where they are not there yet; collective."""
        return self.cache.write_images(files, self._image) if self._image is not None and files else []

    def _image_key(self, caption: str) -> str:
        """Of the image that a caption is sampled with."""
        raise NotImplementedError

    def _item_image(self, index: int) -> str:
        """Cache key of an item's image."""
        raise NotImplementedError

    def _image_tensors(self, key: str) -> dict[str, torch.Tensor]:
        """The image's part of a condition: its latents, its mask, its features; or the first frame, and features."""
        assert self._image is not None
        if self._image.latents != "image_latents":
            return self.cache.image(key, self._image)
        mask = torch.zeros(self.condition_shapes["image_mask"])
        mask[:, 0] = 1  # all frames of the first latent frame count as given, as in WanImageToVideoPipeline
        return {"image_mask": mask, **self.cache.image(key, self._image)}

    def _embedded(self, captions: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        for caption in captions:
            if caption not in self._texts:
                known = self.captions()
                raise UserError(
                    f"the caption '{caption}' has no embedding, the text encoder is freed; use one of the "
                    f"{len(known)} in {self.table}, such as '{known[0]}'"
                )
        return [self._text_tensors(caption) for caption in captions]

    def _text_tensors(self, caption: str) -> dict[str, torch.Tensor]:
        """The caption's part of a condition: its embedding, filled up, and what the encoders give beside it."""
        return self.encoders.text_tensors(self.cache.texts(self._texts[caption]), self.condition_shapes["text"][0])

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (n, C, t, h, w) on any device -> uint8 (n, T, H, W, 3) on the CPU. The first call loads the VAE."""
        if self._codec is None:
            self._codec = self.cache.codec()
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
