"""Latents and text embeddings on disk: written once by all ranks together, read by every later run that asks the same.

``FOLDER/latents/KEY.safetensors`` holds one clip, ``FOLDER/text/KEY.safetensors`` one caption (``FOLDER/glyphs`` what
it quotes, where a second encoder reads that). A KEY is a hash of all that decides the content, so a changed setting
looks for another file and never reads a stale one. Files appear by ``os.replace``: a killed run leaves no half file
under a KEY, and the next one goes on with what is there.

Every file's numbers are checked before they are used, at the start of a run and again at each reading: their dtype,
shape and checksum, and that they are finite. At the start a damaged file is named and written again.

Bytes are hashed, not names, sizes and times: reading a clip costs far less than encoding it, copied and touched folders
stay cached, and a file replaced by one of the same size and time does not pass for the old one. The files of the
encoders are shared out over the ranks for hashing, since a text encoder has tens of gigabytes.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from distill.data.cache_files import Damaged, is_unfinished, read_tensor, write_tensor
from distill.data.clips import DECODER_VERSION, ClipError, ClipFormat, first_frame, read_clip
from distill.data.encoders import EncoderFolder, TextEncoder, VideoCodec
from distill.data.first_frame import ImageInput
from distill.data.image_encoder import ImageEncoder
from distill.data.shares import Shares, first_of_each, node, read_ahead
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.reduce import on_all_ranks
from models.roles.condition import FIRST_FRAME

logger = logging.getLogger(__name__)

_FOLDERS = ("latents", "text", "glyphs", "image_latents", "image_embeds", FIRST_FRAME)
_DAY = 24 * 3600.0


class LatentCache:
    """The cache folder for one pair of encoders and one clip format.

    ``write_clips`` and ``write_texts`` are collective: every rank calls them with the same arguments. Reading is local.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        encoders: EncoderFolder,
        clip: ClipFormat,
        max_text_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        vae_dtype: torch.dtype | None = None,
        vae_tiling: bool = False,
    ) -> None:
        """Create the folders; collective. Raises ``UserError`` if ``folder`` cannot be made or is not one for all.

        Args:
            folder: is created.
            encoders: the pipeline folder.
            clip: length, size and rate of clips.
            max_text_tokens: of an embedding.
            device: where the encoders run.
            dtype: of the text and the image encoder.
            vae_dtype: of the VAE; ``dtype`` by default.
            vae_tiling: see :class:`distill.data.encoders.VideoCodec`.
        """
        self.folder, self.encoders, self.clip = Path(folder).absolute(), encoders, clip
        self.max_text_tokens, self.device, self.dtype = max_text_tokens, device, dtype
        self.vae_dtype, self.vae_tiling = vae_dtype or dtype, vae_tiling
        self.latent_shape = encoders.latent_shape(clip)
        self.encoded_clips = 0
        """Clips that this rank put through the VAE."""
        self.encoded_captions = 0
        """Captions that this rank put through the text encoder."""
        self.encoded_images = 0
        """First frames that this rank encoded."""
        peers = on_all_ranks(self._prepare)
        ranks = tuple(range(len(peers)))
        assert tuple(who for who, _, _ in peers) == ranks, "RANK in the environment is not the process group's rank"
        self._all = Shares(ranks=ranks)
        self._one_a_node = Shares(ranks=first_of_each([where for _, where, _ in peers]))
        if len({folder for _, _, folder in peers}) > 1:
            raise UserError(f"data.cache={folder} is another folder on another rank; give an absolute path")

    def _prepare(self) -> tuple[int, str, str]:
        try:
            for part in ("latents", "text"):
                (self.folder / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"data.cache={self.folder} cannot be created ({error.strerror}); give a folder that can be written"
            ) from error
        for left in (file for part in _FOLDERS for file in (self.folder / part).glob(".*.tmp")):
            if not is_unfinished(left):  # a file of the user's
                continue
            try:  # of killed runs; a young one may be in use
                if time.time() - left.stat().st_mtime > _DAY:
                    left.unlink()
            except OSError:  # another rank was first; or the folder can only be read, which may be enough
                continue
        return rank(), node(), str(self.folder)

    # Writing, all ranks together

    def write_clips(self, files: list[Path]) -> list[tuple[str, str]]:
        """Latents of every file, encoding those that are not there yet; file i is rank ``i % world``'s.

        Returns, the same on every rank and in the order of ``files``: ("key", KEY), or ("error", reason) for a file
        that gives no clip. Frees the VAE. Raises ``UserError`` if not every rank sees the files that another wrote.
        """
        settings = {
            "decoder": DECODER_VERSION,
            "vae": self._identity("vae"),
            "clip": [self.clip.num_frames, self.clip.height, self.clip.width, float(self.clip.fps)],
            "dtype": str(self.vae_dtype),
            **self._tiling(),
        }
        codec: VideoCodec | None = None

        def read(i: int) -> tuple[str, str, torch.Tensor | None]:
            """What is known of file i, or its key and, where that is not in the cache, its frames."""
            try:
                if files[i].exists() and not files[i].is_file():  # a pipe would never end
                    return "error", "is not a file", None
                key = _hash(settings | {"bytes": _file_hash(files[i])})
            except FileNotFoundError:
                return "error", "is missing", None
            except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
                return "error", f"cannot be read ({getattr(error, 'strerror', None) or 'a link to itself'})", None
            if self._holds(self._latents_file(key), "latents", self._is_latents):
                return "key", key, None
            try:
                return "key", key, read_clip(files[i], self.clip)
            except ClipError as error:
                return "error", str(error), None

        def write(i: int) -> tuple[str, str]:
            nonlocal codec
            what, value, video = next(ahead)
            if video is None:
                return what, value
            target = self._latents_file(value)
            if target in written:  # the same bytes under another name, read before the first was written
                return what, value
            if codec is None:  # not loaded at all where nothing is left to do
                codec = self.codec()
            latents = codec.encode(video)
            self.encoded_clips += 1
            self._require_finite(files[i].name, "latents", latents)
            self._write(target, "latents", latents, {"file": files[i].name} | settings)
            written.add(target)
            return what, value

        written: set[Path] = set()
        with closing(read_ahead(read, self._all.own(len(files)))) as ahead:
            results = self._all.run(len(files), write, "latents", "clip")
        if codec is not None:
            codec = None
            self.release_memory()
        self._require_shared([self._latents_file(value) for what, value in results if what == "key"])
        return results

    def write_texts(self, captions: list[str]) -> list[str]:
        """Embeddings of every caption, encoding those that are not there yet: one rank of each node, in turn.

        On every rank Wan's text encoder would be 22.7 GB eight times over in the memory of a node.

        Returns the KEY of each, the same on every rank. Frees the text encoder.
        """
        settings = {
            "text": self._identity(*self.encoders.text_parts()),
            "max_text_tokens": self.max_text_tokens,
            "dtype": str(self.dtype),
            **self.encoders.text_key(),
        }
        encoder: TextEncoder | None = None

        def write(i: int) -> str:
            nonlocal encoder
            key = _hash(settings | {"caption": self.encoders.cleaned(captions[i])})
            targets = self._text_files(key)
            if not all(self._holds(file, part, self._fits_text(part)) for part, file in targets.items()):
                if encoder is None:
                    encoder = self.encoders.text_encoder(
                        max_tokens=self.max_text_tokens, device=self.device, dtype=self.dtype
                    )
                texts = encoder.embeddings(captions[i])
                self.encoded_captions += 1
                if not all(text.isfinite().all() for text in texts.values()):
                    raise UserError(f"the text encoder's output is not finite in {self.dtype}; encode in float32")
                for part, text in texts.items():
                    self._write(targets[part], part, text, {"caption": captions[i]} | settings)
            return key

        keys = self._one_a_node.run(len(captions), write, "captions", "caption")
        if encoder is not None:
            encoder = None
            self.release_memory()
        self._require_shared([file for key in keys for file in self._text_files(key).values()])
        return keys

    def write_images(self, files: list[Path], folder: ImageInput) -> list[str]:
        """The first frame of every file, encoded by the VAE (with grey frames behind it) and by an image encoder.

        The VAE encodes a :data:`FIRST_FRAME` as a clip of one frame. Only an input with an encoder is encoded by one.

        File i is rank ``i % world``'s. Returns the KEY of each, the same on every rank. Frees the encoders.

        Raises:
            UserError: on every rank, a file that gives no image.
        """
        settings: dict[str, Any] = {"decoder": DECODER_VERSION, "vae": self._identity("vae"), **self._tiling()}
        clip, parts = [self.clip.num_frames, self.clip.height, self.clip.width], folder.parts
        reads = folder.encoder
        settings |= {"image_encoder": self._identity(*reads.parts)} if reads is not None else {}
        if FIRST_FRAME in parts:
            settings |= {"first_frame": clip[1:], "dtype": str(self.vae_dtype)}
            settings |= {"encoder_dtype": str(self.dtype)} if reads is not None else {}
        else:
            settings |= {"clip": clip, "dtype": str(self.dtype)}
            settings |= {"vae_dtype": str(self.vae_dtype)} if self.vae_dtype != self.dtype else {}
        loaded: tuple[VideoCodec, ImageEncoder | None] | None = None

        def write(i: int) -> str:
            nonlocal loaded
            try:
                key = _hash(settings | {"bytes": _file_hash(files[i])})
                targets = {part: self._image_file(part, key) for part in parts}
                if all(self._holds(targets[part], part, self._fits(part, folder)) for part in parts):
                    return key
                frame = first_frame(files[i], self.clip)
            except OSError as error:
                raise UserError(f"{files[i]} cannot be read ({error.strerror}); give another image") from error
            if loaded is None:
                loaded = (
                    self.codec(),
                    None if reads is None else ImageEncoder(reads, device=self.device, dtype=self.dtype),
                )
            codec, encoder = loaded
            if FIRST_FRAME in parts:
                made = {FIRST_FRAME: codec.encode(frame)}
            else:
                video = torch.cat([frame, frame.new_zeros(3, self.clip.num_frames - 1, *frame.shape[2:])], dim=1)
                made = {"image_latents": codec.encode(video)}
            if encoder is not None:
                levels = frame[:, 0].add(1).mul(127.5).round().to(torch.uint8).permute(1, 2, 0).contiguous()
                made["image_embeds"] = encoder.encode(levels)
            self.encoded_images += 1
            for part, tensor in made.items():
                self._require_finite(files[i].name, part, tensor)
                self._write(targets[part], part, tensor, {"file": files[i].name} | settings)
            return key

        keys = self._all.run(len(files), write, "images", "image")
        if loaded is not None:
            loaded = None
            self.release_memory()
        self._require_shared([self._image_file(part, key) for key in keys for part in parts])
        return keys

    def codec(self) -> VideoCodec:
        """The VAE that latents are made with, newly loaded."""
        return self.encoders.codec(device=self.device, dtype=self.vae_dtype, tiling=self.vae_tiling)

    def _tiling(self) -> dict[str, Any]:
        """The part of a key that is there for tiles alone: without them keys are those of before."""
        return {"tiling": True} if self.vae_tiling else {}

    def _require_finite(self, name: str, what: str, tensor: torch.Tensor) -> None:
        if not tensor.isfinite().all():
            raise UserError(f"{name}: its {what} are not finite in {self.vae_dtype}; set data.vae_precision=fp32")

    def _fits(self, part: str, folder: ImageInput) -> Callable[[Sequence[int]], bool]:
        channels, _, *sides = self.latent_shape
        if part == FIRST_FRAME:
            return lambda shape: tuple(shape) == (channels, 1, *sides)
        if part == "image_latents":
            return self._is_latents
        reads = folder.encoder
        assert reads is not None
        return lambda shape: tuple(shape) == (reads.tokens, reads.width)

    def _image_file(self, part: str, key: str) -> Path:
        return self.folder / part / f"{key}.safetensors"

    def image(self, key: str, folder: ImageInput) -> dict[str, torch.Tensor]:
        """fp32 ``image_latents`` (C, t, h, w) or ``first_frame`` (C, 1, h, w), and ``image_embeds`` (N, D), of an image
        that ``write_images`` returned.

        Raises ``UserError`` if a file of them is damaged.
        """
        return {part: self._get(self._image_file(part, key), part, self._fits(part, folder)) for part in folder.parts}

    def _is_latents(self, shape: Sequence[int]) -> bool:
        return tuple(shape) == self.latent_shape

    def _fits_text(self, part: str) -> Callable[[Sequence[int]], bool]:
        least, most, width = self.encoders.text_sizes(self.max_text_tokens)[part]
        return lambda shape: len(shape) == 2 and least <= shape[0] <= most and shape[1] == width

    def _identity(self, *parts: str) -> dict[str, str]:
        """Hash of every file of these sub-folders of the pipeline, each read by one rank."""
        files = self.encoders.files(*parts)
        names = [f"{file.parent.name}/{file.name}" for file in files]

        def mine() -> tuple[list[str], dict[str, str]]:
            try:
                return names, {names[j]: _file_hash(files[j]) for j in self._all.own(len(files))}
            except OSError as error:
                raise UserError(
                    f"data.encoders={self.encoders.path}: {error.filename} cannot be read ({error.strerror})"
                ) from error

        hashes = on_all_ranks(mine)
        if any(listed != names for listed, _ in hashes):
            raise UserError(f"data.encoders={self.encoders.path} differs between ranks; give all the same folder")
        return dict(sorted((name, digest) for _, part in hashes for name, digest in part.items()))

    def _require_shared(self, files: list[Path]) -> None:
        unseen = on_all_ranks(lambda: [file.name for file in files if not file.exists()])
        if any(unseen):
            raise UserError(f"data.cache={self.folder} is not shared by all ranks; give a folder that every node sees")

    def release_memory(self) -> None:
        """Give back what a dropped encoder held, on the device too."""
        gc.collect()  # an encoder in a reference cycle would keep its gigabytes until some later collection
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # Files

    def _latents_file(self, key: str) -> Path:
        return self.folder / "latents" / f"{key}.safetensors"

    def _text_files(self, key: str) -> dict[str, Path]:
        parts = self.encoders.text_sizes(self.max_text_tokens)
        return {part: self.folder / part / f"{key}.safetensors" for part in parts}

    def _holds(self, file: Path, name: str, fits: Callable[[Sequence[int]], bool]) -> bool:
        """Whether ``file`` is there and whole; a damaged one is logged and will be replaced."""
        if not file.exists():
            return False
        try:
            read_tensor(file, name, fits)
        except Damaged as error:
            logger.warning("cache file %s is damaged (%s); it is written again", file, error)
            return False
        return True

    def _write(self, file: Path, name: str, tensor: torch.Tensor, about: dict[str, Any]) -> None:
        try:
            write_tensor(file, name, tensor, about)
        except OSError as error:  # a full disk, or a folder that can only be read
            raise UserError(
                f"data.cache={self.folder} cannot be written ({error.strerror}); give a folder with space for it; what"
                " is encoded already stays"
            ) from error

    def latents(self, key: str) -> torch.Tensor:
        """fp32 (C, t, h, w) of a clip that ``write_clips`` returned. Raises ``UserError`` if its file is damaged."""
        return self._get(self._latents_file(key), "latents", self._is_latents)

    def texts(self, key: str) -> dict[str, torch.Tensor]:
        """fp32 (tokens, D) of a caption that ``write_texts`` returned, by name, without the zeros behind it.

        Raises ``UserError`` if a file is damaged.
        """
        return {part: self._get(file, part, self._fits_text(part)) for part, file in self._text_files(key).items()}

    def _get(self, file: Path, name: str, fits: Callable[[Sequence[int]], bool]) -> torch.Tensor:
        try:
            return read_tensor(file, name, fits)
        except Damaged as error:
            raise UserError(
                f"data.cache: {file} was damaged while the run was using it ({error}); start again, and it is written"
                " anew"
            ) from error


def _file_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
