"""Encoded sets as data sets: ``data=encoded``, and ``data=video_folder`` and ``data=captions``, which encode first."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from distill.data.base import Bucket, placed_image
from distill.data.encoders.wan import VideoCodec, pad_text
from distill.data.sets.encode import Encoding, encode, load_codec, read_references, release_memory
from distill.data.sets.encoded_set import COMMAND, KINDS, Captions, EncodedSet
from distill.data.sources.source import Source
from distill.data.videos.container import ClipError
from distill.data.videos.decode import ClipFormat
from distill.data.videos.table import require_utf8
from distill.data.videos.video_folder import listed_images
from fsdp_cp.errors import UserError, shown
from fsdp_cp.launch import rank
from fsdp_cp.reduce import on_all_ranks
from models.condition import (
    KEYFRAME_ANCHORS,
    KEYFRAMES,
    REFERENCE_PARTS,
    REFERENCE_SIZES,
    REFERENCES,
    Condition,
)
from models.sample import AUDIO, VIDEO, Sample, part_name

logger = logging.getLogger(__name__)

STATES = "states"
"""Part of a clip: states of the teacher that sampled it, and an item's tensor with them."""


class EncodedDataset:
    """Items of an encoded set, made by all ranks together. A damaged set is refused unless ``damaged`` is ``skip``."""

    def __init__(
        self,
        encoded: EncodedSet,
        settings: Encoding,
        *,
        device: str | torch.device = "cpu",
        damaged: Literal["refuse", "skip"] = "refuse",
    ) -> None:
        self.set, self.settings, self.device = encoded, settings, torch.device(device)
        self.further: EncodedSet | None = None
        """Set of further captions for :meth:`condition`, with images where images condition."""
        self._states: list[int] = []
        self.encoders, self._image = settings.inspect()
        self.fps = float(settings.fps)
        self._codec: VideoCodec | None = None
        rows = self._whole_rows(damaged)
        self._rows: Sequence[int] = range(len(encoded)) if rows is None else rows
        buckets = self._buckets()
        self._bucket, self.clip, self.condition_shapes, first = buckets[0]
        self.buckets, self.latent_shapes = [bucket for *_, bucket in buckets], first.latent_shapes
        self.clip_tensors = self.encoders.clip_tensors(self.clip)
        without = (encoded.negative, encoded.empty)  # none in a set whose texts show images
        self.null, self.empty = ({} if text is None else self._text_tensors(encoded, text) for text in without)
        decides = [encoded.fingerprint(), rows, {name: value.tolist() for name, value in self.clip_tensors.items()}]
        self.fingerprint = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]

    def _buckets(self) -> list[tuple[int, ClipFormat, dict[str, tuple[int, ...]], Bucket]]:
        """Return the buckets with clips, each with its number in the set, its format and the condition's shapes."""
        shapes, buckets = self.settings.bucket_shapes(), []
        have_sizes = len(shapes) > 1 and bool(self.set.parts)
        numbers = self.set.row_buckets()[np.asarray(self._rows)] if have_sizes else None
        for clip, (latents, condition) in zip(self.settings.clips, shapes, strict=True):
            number, items = self.set.bucket_with(latents[VIDEO]), range(len(self))
            if numbers is not None:
                items = np.flatnonzero(numbers == (-1 if number is None else number))
            if len(items):
                buckets.append((number or 0, clip, condition, Bucket(latent_shapes=latents, items=items)))
            elif rank() == 0:
                size = f"[{clip.num_frames},{clip.height},{clip.width}]"
                logger.warning("%s has no clip of the size %s of data.buckets", self.set.where, size)
        return buckets

    def _whole_rows(self, policy: str) -> list[int] | None:
        """Return the rows of the items, or ``None`` for all. All ranks decide alike."""
        seen = on_all_ranks(self.set.damaged)
        damaged = {kind: sorted(set().union(*(one[kind] for one in seen))) for kind in KINDS}
        shards = self.set.shards_of(damaged)
        if not shards:
            return None
        rows = self.set.rows_without(damaged)
        damage = f"{self.set.where} has {len(shards)} damaged shards, first {shards[0].name}"
        if policy != "skip":
            left = f"{len(rows)} of {len(self.set)}"
            raise UserError(f"{damage}; encode it again, or set data.damaged=skip to use {left}")
        if {self.set.negative, self.set.empty} & set(damaged["texts"]) or not rows:
            raise UserError(f"{damage}, which all items need; encode it again")
        if rank() == 0:
            logger.warning("%s: %d of %d items left out", damage, len(self.set) - len(rows), len(self.set))
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``caption``, the condition's tensors by name, fp32, and the ``latents`` of a clip's parts, fp32."""
        row = self._rows[index]
        leave = () if self._states else self._states_names
        item = {"caption": self.caption(index), **self._row_tensors(self.set, row, leave=leave)}
        for name in self._states_names if self._states else ():
            item[name] = item[name][self._states]
        return item

    @property
    def _states_names(self) -> list[str]:
        return [part_name(STATES, part) for part in self.latent_shapes]

    def with_states(self, times: Sequence[float]) -> EncodedDataset:
        """Return these data with ``states`` (K, C, t, h, w) in each item: the teacher's at these K times."""
        data = copy.copy(self)
        data._states = states_at(self.set, times)
        return data

    def add_captions(self, captions: Sequence[str], images: Sequence[str], cache: Path) -> None:
        """Encode further ``captions`` (and ``images``) for :meth:`condition`, in place of those before, into a set of
        ``cache``. A collective."""
        settings = self.settings
        check_local(lambda: check_further(settings, captions, images))
        if images or any(self.set.find(caption) is None for caption in captions):
            files = [placed_image(file, settings.image, lambda x: x.relative_to("/")) for file in images]
            files = files or [""] * len(captions)
            each = len(files) // len(captions)  # the images of a caption follow each other
            kind = {"are_references": bool(images) and settings.image == REFERENCES}
            rows = [
                listed_images(files[i * each : (i + 1) * each], caption, **kind) for i, caption in enumerate(captions)
            ]
            source = Source(name="the captions", rows=rows, folder=Path("/") if images else None, has_latents=False)
            size = {name: getattr(self.clip, name) for name in ("num_frames", "height", "width")}
            without = {} if images else {"image": None, "references": None}
            their_settings = replace(settings, buckets=None, **size, **without)
            made = encode(source, their_settings, self.device, cache=cache.absolute())
            self.further = check_local(lambda: EncodedSet(made, f"data.cache={made}"))
        for caption in captions if settings.image is not None else ():
            self.image_of(caption)

    def embeddings(self, caption: str, item: int | None = None) -> dict[str, torch.Tensor]:
        where, text = self._find(caption) if item is None else (self.set, self.set.text_of(self._rows[item]))
        return where.text(text)

    def caption(self, index: int) -> str:
        return self.set.caption(self.set.text_of(self._rows[index]))

    def captions(self) -> Sequence[str]:
        is_whole = isinstance(self._rows, range)
        if is_whole and (len(self.buckets) == 1 or not self.set.parts):
            return self.set.captions
        rows = np.asarray(self._rows)[self.buckets[0].items]
        return Captions(self.set, np.unique(self.set.row_texts()[rows]))

    def condition(self, captions: Sequence[str], clips: Sequence[int] | None = None) -> Condition:
        """Return the condition of n samples: ``text`` fp32 (n, L, D), and whatever else the encoders give. Images are
        those of the items ``clips``, or given with the caption, or of the first item with the caption."""
        rows = []
        leave = [part_name("latents", part) for part in self.latent_shapes] + self._states_names
        for i, caption in enumerate(captions):
            if self._image is None:
                where, text = self._find(caption)
                rows.append(self._text_tensors(where, text) | self.clip_tensors)
                continue
            where, row = self.image_of(caption) if clips is None else (self.set, self._rows[clips[i]])
            rows.append(self._row_tensors(where, row, leave=leave))
        return Condition({name: torch.stack([row[name] for row in rows]) for name in rows[0]}, self.null, self.empty)

    def _find(self, caption: str) -> tuple[EncodedSet, int]:
        for where in (self.set, self.further):
            text = None if where is None else where.find(caption)
            if text is not None:
                return where, text
        known = f"one of the {len(self.captions())} in {self.set.where}, such as '{self.captions()[0]}'"
        raise UserError(f"the caption '{caption}' has no embedding, and the text encoder is freed; use {known}")

    def image_of(self, caption: str) -> tuple[EncodedSet, int]:
        """Return the set and the row with the image of a caption. A caption without one raises ``UserError``."""
        items = {"bucket": self._bucket, "among": None if isinstance(self._rows, range) else self._rows}
        for where, among in ((self.further, {}), (self.set, items)):
            row = None if where is None else where.first_row(caption, **among)
            if row is not None and where.clip_of(row) >= 0:
                return where, row
        where = f"of no clip of {self.set.where}"
        raise UserError(f"the caption '{caption}' is {where}; give it an image (sample.images, or --image)")

    def _text_tensors(self, where: EncodedSet, text: int) -> dict[str, torch.Tensor]:
        texts = {name: tensor.float() for name, tensor in where.text(text).items()}
        return self.encoders.text_tensors(texts, self.condition_shapes["text"][0])

    def _row_tensors(self, where: EncodedSet, row: int, leave: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the tensors of text, latents and image, except the parts of a clip to ``leave``; image latents come
        with the mask of the frames that are given."""
        tensors, clip = self._text_tensors(where, where.text_of(row)) | self.clip_tensors, where.clip_of(row)
        if clip < 0:
            return tensors
        tensors |= where.clip(clip, leave=leave)
        for name in REFERENCE_PARTS if REFERENCES in tensors else ():
            tensors[name] = pad_text(tensors[name], self.condition_shapes[name][0])
        if REFERENCE_SIZES in tensors:
            tensors[REFERENCE_SIZES] = tensors[REFERENCE_SIZES].long()
        if KEYFRAMES in tensors:
            tensors[KEYFRAME_ANCHORS] = torch.tensor(self._image.anchors)
        if "image_latents" in tensors:
            mask = torch.zeros(self.condition_shapes["image_mask"][0], *tensors["image_latents"].shape[1:])
            mask[:, 0] = 1  # all frames of the first latent frame count as given, as in WanImageToVideoPipeline
            tensors["image_mask"] = mask
        return tensors

    def decode(self, latents: Sample) -> torch.Tensor:
        return self._loaded().decode(latents.video)

    def decode_next(self, latents: Sample, *, is_first: bool) -> torch.Tensor | None:
        return self._loaded().decode_next(latents.video, is_first=is_first)

    def decode_sound(self, latents: Sample) -> tuple[torch.Tensor, int]:
        return self._loaded().decode_sound(latents.parts[AUDIO])

    def _loaded(self) -> VideoCodec:
        if self._codec is None:
            self._codec = load_codec(self.encoders, self.settings, self.device)
        return self._codec

    def release(self) -> None:
        self._codec = None
        release_memory(self.device)


def encode_source(
    read_source: Callable[[], Source],
    settings: Encoding,
    cache: Path,
    *,
    device: torch.device,
    **further: Sequence[str],
) -> EncodedDataset:
    """Encode a source into a set of the folder ``cache``, unless it is there, and open it. A collective.
    ``further`` are ``captions`` and their ``images``, if any, on which ``fingerprint`` does not depend."""
    folder, source = cache.expanduser().absolute(), check_local(read_source)
    check_local(lambda: check_further(settings, **further))
    made = encode(source, settings, device, cache=folder)

    def read() -> tuple[EncodedSet, Encoding]:
        encoded = EncodedSet(made, f"data.cache={made}")
        return encoded, encoding_of(encoded, settings.encoders)

    return open_set(read, folder, device=device, **further)


def open_set(
    read: Callable[[], tuple[EncodedSet, Encoding]],
    cache: Path,
    *,
    captions: Sequence[str] = (),
    images: Sequence[str] = (),
    device: torch.device,
    damaged: Literal["refuse", "skip"] = "refuse",
) -> EncodedDataset:
    """Open the set that ``read`` returns with its settings; ``cache`` gets those of ``captions``. A collective."""
    encoded, settings = check_local(read)
    data = EncodedDataset(encoded, settings, device=device, damaged=damaged)
    data.add_captions(captions, images, cache)
    return data


def encoding_of(encoded: EncodedSet, encoders: str | None, **changes: Any) -> Encoding:
    """Return the settings that a set was made with, except for another place of the encoders, and ``changes`` of the
    VAE that are not ``None``."""
    made_with = encoded.about["settings"]
    names = Encoding.__dataclass_fields__.keys() & made_with.keys()
    values = {name: made_with[name] for name in names} | {"encoders": encoders or encoded.about["encoders"]}
    settings = Encoding(**values)
    if settings.fingerprint() != made_with["encoders"]:
        wrong = f"data.encoders={settings.encoders} are not the encoders of {encoded.where}"
        raise UserError(f"{wrong}; give those, or encode the set again with {COMMAND}")
    return replace(settings, **{name: value for name, value in changes.items() if value is not None})


def states_at(encoded: EncodedSet, times: Sequence[float]) -> list[int]:
    """Return the positions of ``times`` among the states of a set. A time without states raises ``UserError``."""
    stored = encoded.about["settings"].get("teacher", {}).get(STATES, [])
    missing = [time for time in times if time not in stored]
    if missing:
        have = f"{encoded.where} has states at {shown(stored)}, not at {missing[0]} of method.step_list"
        make = f"make a set with python -m distill.teacher_clips --states {','.join(map(str, times))}"
        raise UserError(f"{have}={shown(times)}; use times that it has, or {make}")
    return [stored.index(time) for time in times]


def check_further(settings: Encoding, captions: Sequence[str] = (), images: Sequence[str] = ()) -> None:
    """Refuse captions that are not text, and files that are not images."""
    for what, text in (("data.negative_prompt", settings.negative_prompt), *(("the caption", c) for c in captions)):
        require_utf8(text, f"{what} {text!r}")  # bytes of a command line may be no UTF-8
    for file in images if settings.image is not None else ():
        folder, image = settings.inspect()
        try:
            if image.references:
                row = listed_images([placed_image(file, settings.image)], "", are_references=True)
                read_references(folder, Source(name="", rows=[], folder=Path("/")), row, settings.clip, image)
            else:
                folder.read_image(Path(file).expanduser(), settings.clip)
        except ClipError as error:
            raise UserError(f"{file} gives no image ({error}); give a video or an image file") from error


def check_local(check: Any) -> Any:
    """Return this rank's result of ``check``; raise on all ranks if it raises on any."""
    result: list[Any] = []
    on_all_ranks(lambda: result.append(check()))
    return result[0]
