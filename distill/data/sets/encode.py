"""Encode a folder of videos or a file of captions into a set. Every rank calls these functions with the same arguments.

Shape legend: C t h w latents, T H W pixels, L tokens, D width of an embedding.
"""

import gc
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from distill.data.base import IMAGES, VAE_PRECISIONS, ClipSettings, to_bytes
from distill.data.encoders.choose import choose_encoders
from distill.data.encoders.image import ImageEncoder, ImageInput
from distill.data.encoders.wan import EncoderFolder, TextEncoder, VideoCodec
from distill.data.sets.stored import check_deviation, check_texts, rate_of, stored_text
from distill.data.sets.write_set import Row, Save, SetWriter, Text, texts_of
from distill.data.shares import Shares, read_ahead
from distill.data.sources.source import Source
from distill.data.videos.container import ClipError
from distill.data.videos.decode import DECODER_VERSION, ClipFormat, read_clip, read_largest_part
from distill.data.videos.references import parse
from distill.data.videos.sound import EARLIER_SOUNDS, SOUND_VERSION, end_sound_readers, read_sound
from distill.data.videos.video_folder import ListedClip
from fsdp_cp.errors import UserError, counted, shown
from fsdp_cp.launch import rank
from fsdp_cp.reduce import on_all_ranks, on_first_rank
from models.condition import FIRST_FRAME, KEYFRAMES, REFERENCE_PARTS, REFERENCES
from models.files.checkpoint_files import fingerprint_of
from models.sample import PartShapes, part_name

logger = logging.getLogger(__name__)

Made = tuple[dict[str, torch.Tensor], dict[str, Any]]
_Read = tuple[torch.Tensor | None, torch.Tensor | None, int, list[Any]]
"""Frames (3, T, H, W) of a clip or stored latents (C, t, h, w), its sound, its length where only one is read, and its
references, each with what is cut."""
IMAGE_TENSORS = (FIRST_FRAME, "image_latents", "image_embeds", KEYFRAMES, *REFERENCE_PARTS)
"""Parts of a clip that its image gives."""
_CHECKED_CLIPS = 64
_TEXT_FILL = 4  # captions are a quarter as long as the longest, about


@dataclass(kw_only=True)
class Encoding(ClipSettings):
    """Everything that decides what the encoders make of a source, apart from the source."""

    latents: Literal["fp32", "bf16"] = "fp32"
    """Stored type of latents. Embeddings are stored in the type in which their encoder computes."""

    @property
    def clips(self) -> list[ClipFormat]:
        """Length, size and rate of the clips of each bucket."""
        return [ClipFormat(num_frames=t, height=h, width=w, fps=self.fps) for t, h, w in self.sizes]

    @property
    def clip(self) -> ClipFormat:
        """Length, size and rate of the clips of the first bucket."""
        return self.clips[0]

    def inspect(self) -> tuple[EncoderFolder, ImageInput | None]:
        """Read the pipeline folder's settings without loading weights."""
        folder = choose_encoders(self.encoders)
        for size, clip in zip(self.sizes, self.clips, strict=True):
            try:
                folder.latent_shape(clip)
            except UserError as error:
                raise UserError(str(error) if self.buckets is None else f"data.buckets: {size}: {error}") from error
        if self.vae_precision not in folder.vae_precisions:
            fit = " or ".join(folder.vae_precisions)
            raise UserError(f"data.vae_precision={self.vae_precision} does not fit {self.encoders}; use {fit}")
        if self.silence is not None and folder.sound_format(self.clip) is None:
            raise UserError(f"data.silence={self.silence} is for encoders of sound, not {self.encoders}; leave it out")
        return folder, self._inspect_image(folder)

    def _inspect_image(self, folder: EncoderFolder) -> ImageInput | None:
        if self.image is None:
            return None
        image = folder.inspect_image(f"data.encoders={self.encoders}")
        if self.image != FIRST_FRAME and image.latents != KEYFRAMES:
            what = f"image={self.image}" if self.references is None else f"references={shown(self.references)}"
            raise UserError(f"data.{what} is for MiniMax-H3, not {self.encoders}; use {FIRST_FRAME}")
        if image.processor is not None and self.negative_prompt:
            alone = "a text that shows images has none but them"
            raise UserError(f"data.negative_prompt={self.negative_prompt!r} must be empty: {alone}")
        if self.references is not None:
            edges = self.reference_image_edge, self.reference_video_edge
            return replace(image, latents=REFERENCES, anchors=(), references=tuple(self.references), edges=edges)
        return replace(image, anchors=tuple(-frame for frame in IMAGES[self.image].values()))

    def bucket_shapes(self) -> list[tuple[PartShapes, dict[str, tuple[int, ...]]]]:
        """Return the shapes of the parts' latents and of the tensors of a condition, by bucket, as :meth:`inspect`."""
        folder, image = self.inspect()
        most = folder.text_tokens(self.clips, self.max_text_tokens, image)
        return [(folder.latent_shapes(clip), folder.condition_shapes(clip, most, image)) for clip in self.clips]

    def clip_bytes(self, latents: int = 1) -> int:
        """Return the stored bytes of the largest clip with so many ``latents``: 0 for captions with images, more for
        states."""
        most = 0
        for parts, made in self.bucket_shapes():
            shapes = [*parts.values()] * latents + [made[name] for name in IMAGE_TENSORS if name in made]
            most = max(most, sum(torch.Size(shape).numel() for shape in shapes))
        return most * VAE_PRECISIONS[self.latents].itemsize

    def fingerprint(self, *, has_clips: bool = True) -> str:
        """Return a hash of the encoders' files; without those of the VAE, if there are no clips."""
        folder = choose_encoders(self.encoders)
        image = self._inspect_image(folder)
        parts = [*(folder.codec_parts if has_clips else []), *folder.text_parts, *(image.parts if image else ())]
        return fingerprint_of(folder.files(*parts))

    def described(self) -> dict[str, Any]:
        """Return everything that an encoding depends on, apart from the source, wherever the encoders are."""
        folder, _ = self.inspect()
        values = asdict(self) | {"fps": float(self.fps), "text": folder.text_key()}
        values["buckets"] = self.buckets and self.sizes
        if self.references is None:  # not always: sets of before must stay
            values = {name: value for name, value in values.items() if not name.startswith("reference")}
        for name in ("silence", "buckets"):
            if values[name] is None:
                del values[name]
        return values | {"encoders": self.fingerprint()}


def encode(
    source: Source, settings: Encoding, device: torch.device, *, out: Path | None = None, cache: Path | None = None
) -> Path:
    """Encode what is missing of ``source`` into the folder ``out``, or one in ``cache`` whose name is a hash of all
    that a set depends on; return that folder, with the encoders freed. A collective, whose errors all ranks raise."""
    described = on_all_ranks(lambda: (settings.described(), source.table_hash()))
    if any(other != described[0] for other in described):
        raise UserError(f"{source.name} or data.encoders={settings.encoders} differs between ranks; give the same")
    if rank() == 0 and (extra := source.not_used()):
        text = "%d videos and archives of %s are not in its table and not used: %s"
        logger.warning(text, len(extra), source.folder, ", ".join(extra[:5]))
    made = {"decoder": DECODER_VERSION, "clips": source.has_latents, "rows": source.fingerprint()}
    if source.latents is not None:
        made["normalized"] = source.is_normalized
    if source.has_latents and settings.inspect()[0].sound_format(settings.clip) is not None:
        made["sound"] = SOUND_VERSION
    decides = described[0][0] | made
    writer = _writer(decides, out, cache)
    if "sound" in made:
        for version in EARLIER_SOUNDS:
            earlier = _writer(decides | {"sound": version}, out, cache)
            if on_first_rank(earlier.is_finished):
                if rank() == 0:
                    logger.info("%s is used, though its sound was read by earlier rules", earlier.where)
                return earlier.path
    with writer.begun() as is_whole:
        if not is_whole:
            _Job(writer, source, settings, device).run()
    return writer.path


def _writer(decides: Mapping[str, Any], out: Path | None, cache: Path | None) -> SetWriter:
    if out is not None:
        return SetWriter(out, f"OUT={out}", decides)
    out = cache / hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    return SetWriter(out, f"data.cache={out}", decides)


class _Job:
    """Encoding of one set."""

    def __init__(self, writer: SetWriter, source: Source, settings: Encoding, device: torch.device) -> None:
        self.writer, self.source, self.settings, self.device = writer, source, settings, device
        self.folder, self.image = settings.inspect()
        self.clip = settings.clip
        self._clip_bytes = settings.clip_bytes(latents=int(source.has_latents))
        self._most_tokens = self.folder.text_tokens(settings.clips, settings.max_text_tokens, self.image)
        sizes = self.folder.text_sizes(self._most_tokens)
        self._text_bytes = sum(self.folder.text_dtype.itemsize * most * width for most, width in sizes.values())
        self.clips = source.clips if source.has_latents or self.image is not None else []
        if rank() == 0:
            for remark in self.folder.remarks(self.clip, settings.max_text_tokens, self.image):
                logger.warning("%s", remark)
            captions = len({row.caption for row in source.rows})
            total = self._clip_bytes * len(self.clips) + self._text_bytes * captions / _TEXT_FILL
            text = "%s and %s take about %.2f GB; a million clips take %.3g TB, a million captions at most %.3g TB"
            counts, sizes = (len(self.clips), "clip"), (self._clip_bytes / 1e6, self._text_bytes / 1e6)
            logger.info(text, counted(*counts), counted(captions, "caption"), total / 1e9, *sizes)
        self._texts: list[Text] = []
        self._kept: list[int] = []

    @cached_property
    def _codec(self) -> VideoCodec:
        return load_codec(self.folder, self.settings, self.device)

    @cached_property
    def _image_encoder(self) -> ImageEncoder | None:
        folder = None if self.image is None else self.image.encoder
        return None if folder is None else ImageEncoder(folder, device=self.device, dtype=torch.float32)

    @cached_property
    def _text_encoder(self) -> TextEncoder:
        options = {"max_tokens": self._most_tokens, "device": self.device, "dtype": self.folder.text_dtype}
        return self.folder.text_encoder(self.image, **options)

    @cached_property
    def _stored_texts(self) -> dict[str, str]:
        rows = self.source.rows if self.source.text is not None else ()
        return {row.caption: row.file for row in reversed(rows) if not row.problem}

    def _free_encoders(self) -> None:
        for name in ("_codec", "_image_encoder", "_text_encoder"):
            self.__dict__.pop(name, None)
        release_memory(self.device)

    def run(self) -> None:
        writer, source, negative = self.writer, self.source, self.settings.negative_prompt
        on_first_rank(self._check_stored)
        writer.write("clips", len(self.clips), self._clip_bytes, "clip", self._make_clips)
        end_sound_readers()
        self._free_encoders()
        rows, left_out = self._kept_rows()
        self._texts = texts_of(rows, negative)
        writer.write("texts", len(self._texts), self._text_bytes // _TEXT_FILL, "caption", self._make_texts)
        self._free_encoders()
        left_out += [(self.clips[number].name, reason) for number, reason in writer.notes("clips", "cut").items()]
        left_out += [(self._texts[number][0], reason) for number, reason in writer.notes("texts", "cut").items()]
        writer.finish(rows, negative, encoders=self.settings.encoders, left_out=left_out)
        if rank() == 0:
            what = counted(len(rows), "clip" if self.clips else "caption")
            logger.info("encoded %s of %s into %s", what, source.name, writer.path)
            if left_out:
                logger.warning("left_out.csv names what is left out or cut: %d of them", len(left_out))

    def _kept_rows(self) -> tuple[list[Row], list[tuple[str, str]]]:
        """Return the rows that can be used, and the names and reasons of the others."""
        reasons = {self.clips[number].name: why for number, why in self.writer.notes("clips", "left_out").items()}
        self._kept = [number for number, clip in enumerate(self.clips) if clip.name not in reasons]
        numbers = {self.clips[kept].name: number for number, kept in enumerate(self._kept)}
        is_shown = self.image is not None and self.image.processor is not None
        rows, left_out = [], []
        for row in self.source.rows:
            if reason := row.problem or reasons.get(row.name):
                left_out.append((row.name, reason))
            else:
                clip = numbers.get(row.name, -1)
                rows.append((clip, (row.caption, clip if is_shown else -1)))
        if rank() == 0:
            for name, reason in left_out:
                logger.warning("clip left out: %s %s", name, reason)
        if not rows:
            first = f", first: {' '.join(left_out[0])}" if left_out else ""
            why = f"{self.source.name} has no usable clip ({len(left_out)} left out{first})"
            size = "num_frames lower" if self.settings.buckets is None else "buckets smaller"
            longer = f"give longer videos, or set data.{size} or data.fps higher"
            raise UserError(f"{why}; {longer if self.source.has_latents else 'give images that can be read'}")
        return rows, left_out

    def _make_clips(self, numbers: Sequence[int], save: Save, advance: Callable[[int], object]) -> None:
        """Encode clips; threads decode the next ones meanwhile."""
        shares = Shares()
        with closing(read_ahead(self._read, [numbers[i] for i in shares.assigned(len(numbers))])) as ahead:
            shares.run(numbers, lambda number: save(number, *self._encode_clip(number, next(ahead))), advance)

    def _encode_clip(self, number: int, clip: _Read | str) -> Made:
        """Return tensors and notes of a clip or of the reason to leave it out."""
        if isinstance(clip, str):
            return {}, {"left_out": clip}
        video, sound, frames, references = clip
        made, notes = {}, {}
        if self.source.latents is not None:
            made = {"latents": self._stored_as_latents(video)}
        elif self.source.has_latents:
            parts = self._codec.encode_clip(video, sound).parts
            made = {part_name("latents", part): latents[0] for part, latents in parts.items()}
        if references:
            made |= self._codec.encode_references([reference for reference, _ in references])
            if problem := self._too_large(made):
                return {}, {"left_out": problem}
            cuts = [f"{cut} of reference {i} cut" for i, (_, cut) in enumerate(references, start=1) if cut]
            notes = {"cut": f"{'; '.join(cuts)} to the clip's length"} if cuts else {}
        elif self.image is not None:
            made |= self._image_tensors(self._given(video), frames, self.image)
        for part, tensor in made.items():
            if not tensor.isfinite().all():
                where = f"{self.clips[number].name}: its {part}"
                raise UserError(f"{where} are not finite in {self._codec.dtype}; set data.vae_precision=fp32")
        return stored_as(made, VAE_PRECISIONS[self.settings.latents]), notes

    def _too_large(self, made: Mapping[str, torch.Tensor]) -> str:
        """Return the reason to leave out references that are larger than ``data.references`` leaves room for."""
        room = self.folder.condition_shapes(self.clip, self._most_tokens, self.image)
        for part in REFERENCE_PARTS:
            if len(made[part]) > room[part][0]:
                have = f"has {part} of {len(made[part])}, more than the {room[part][0]} of data.references"
                return f"{have}={shown(self.settings.references)}; list another kind there, or make them smaller"
        return ""

    def _given(self, video: torch.Tensor) -> torch.Tensor:
        """Return the images (3, K, H, W) of a clip; without clips these are all."""
        return video[:, list(IMAGES[self.settings.image].values())] if self.source.has_latents else video

    def _stored_as_latents(self, stored: torch.Tensor) -> torch.Tensor:
        """Return stored latents (C, t, h, w) as the transformer takes them."""
        if self.source.is_normalized:
            return stored
        return self._codec.normalized(stored[None].to(self.device))[0].cpu()

    def _check_stored(self) -> None:
        """Compare some stored latents with the scale of normalized ones, and some embeddings with the encoder's."""
        source, captions = self.source, list(self._stored_texts)
        if source.latents is not None and source.is_checked:
            some = range(0, len(self.clips), max(1, len(self.clips) // _CHECKED_CLIPS))
            read = (self._read(number) for number in some)
            latents = (self._stored_as_latents(found[0]) for found in read if not isinstance(found, str))
            check_deviation(latents, source.name, were_normalized=source.is_normalized)
        if captions:
            some = dict.fromkeys(captions[position] for position in (0, len(captions) // 2, -1))
            texts = {caption: self._stored_text(caption) for caption in some}
            check_texts(texts, lambda caption: self._text_encoder.embeddings(caption)["text"], source.name)
        self._free_encoders()

    def _stored_text(self, caption: str) -> torch.Tensor:
        most, width = self.folder.text_sizes(self.settings.max_text_tokens)["text"]
        return stored_text(self.source, self._stored_texts[caption], most=most, width=width)

    def _image_tensors(self, frame: torch.Tensor, frames: int, image: ImageInput) -> dict[str, torch.Tensor]:
        """Return what the networks get of the first frame (3, 1, H, W) of a clip of so many ``frames``, or of K
        keyframes: the VAE encodes each alone, or one with gray frames after it; an image encoder, where there is one,
        gives its features."""
        if image.latents == KEYFRAMES:
            return {KEYFRAMES: torch.cat([self._codec.encode_keyframe(one) for one in frame.split(1, dim=1)], dim=1)}
        gray = frame.new_zeros(3, frames - 1, *frame.shape[2:])
        pixels = frame if image.latents == FIRST_FRAME else torch.cat([frame, gray], dim=1)
        made = {image.latents: self._codec.encode(pixels)}
        if self._image_encoder is not None:
            levels = to_bytes(frame[:, 0]).permute(1, 2, 0).contiguous()
            made["image_embeds"] = self._image_encoder.encode(levels)
        return made

    def _read(self, number: int, *, is_shown: bool = False) -> _Read | str:
        """Read a clip, or only what its text shows if it ``is_shown``, or return the reason to leave it out."""
        clip = self.clips[number]
        file = self.source.video(clip)
        try:
            if self.source.latents is not None:
                return self._stored_latents(clip.file), None, 0, []
            for name in clip.files:
                if name not in self.source.videos and not (there := self.source.folder / name).is_file():
                    return "is not a file" if there.exists() else "is missing"  # a pipe would never end
            references = read_references(self.folder, self.source, clip, self.clip, self.image)
            if references and (is_shown or not self.source.has_latents):
                return None, None, 0, references
            if not self.source.has_latents:
                return read_images(self.folder, self.source, clip, self.clip), None, self.clip.num_frames, []
            size = self.clip
            if self.settings.buckets is None:
                video = read_clip(file, size)
            else:
                video, size = read_largest_part(file, self.settings.clips)
            form, silence = self.folder.sound_format(size), self.settings.silence == "zero"
            sound = None if form is None or is_shown else read_sound(file, form, silence=silence)
            return video, sound, size.num_frames, references
        except ClipError as error:
            return str(error)
        except OSError as error:
            return f"cannot be read ({error.strerror})"

    def _stored_latents(self, name: str) -> torch.Tensor:
        latents, shapes = self.source.latents(name), [self.folder.latent_shape(clip) for clip in self.settings.clips]
        if latents.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ClipError(f"has latents of shape {list(latents.shape)}, not {wanted}")
        if not latents.isfinite().all():
            raise ClipError("has latents that are not finite")
        rate = rate_of(self.source, name)
        if rate not in (None, self.settings.fps):
            wrong = f"{name} has {rate:g} frames per second, not data.fps={self.settings.fps:g}"
            raise UserError(f"{self.source.name}: {wrong}; give clips of one rate")
        return latents

    def _make_texts(self, numbers: Sequence[int], save: Save, advance: Callable[[int], object]) -> None:
        Shares.one_per_node().run(numbers, lambda number: save(number, *self._encode_text(number)), advance)

    def _encode_text(self, number: int) -> Made:
        caption, clip = self._texts[number]
        if caption in self._stored_texts:
            return {"text": self._stored_text(caption).to(self.folder.text_dtype)}, {}
        encoder = self._text_encoder
        made = encoder.embeddings(caption, *self._shown(clip))
        if not all(text.isfinite().all() for text in made.values()):
            raise UserError("the text encoder's output is not finite; give weights in fp32")
        made = {name: text.to(self.folder.text_dtype) for name, text in made.items()}
        return made, {"cut": "; ".join(encoder.cuts)} if encoder.cuts else {}

    def _shown(self, clip: int) -> list[Any]:
        """Return the images or references that a text shows, of a clip that was encoded before; none for -1."""
        if clip < 0:
            return []
        number = self._kept[clip]
        found = self._read(number, is_shown=True)
        if isinstance(found, str):
            what = f"{self.clips[number].name} {found}, after its clip was encoded"
            raise UserError(f"{self.source.name}: {what}; put it back, and start again")
        video, _, _, references = found
        return [[reference for reference, _ in references] if references else self._given(video)]


def stored_as(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of a clip on the CPU, numbers with a fraction in ``dtype``."""
    return {part: x.to("cpu", dtype if x.is_floating_point() else x.dtype) for part, x in tensors.items()}


def read_references(
    folder: EncoderFolder, source: Source, row: ListedClip, clip: ClipFormat, image: ImageInput | None
) -> list[Any]:
    """Return the references of a row, each with what is cut of it. Raises ``ClipError`` that names the file."""
    made = []
    for kind, file in parse(row.references):
        try:
            made.append(folder.read_reference(source.folder / file, kind, clip.num_frames, image.edges))
        except ClipError as error:
            raise ClipError(f"has the reference {kind}:{file}, which {error}") from error
    return made


def read_images(folder: EncoderFolder, source: Source, row: ListedClip, clip: ClipFormat) -> torch.Tensor:
    """Return the image of a row, or both, (3, K, H, W) in [-1, 1], as the pipeline of ``folder`` sees them."""
    files = [source.folder / name for name in row.files]
    return torch.cat([folder.read_image(file, clip, follows=i > 0) for i, file in enumerate(files)], dim=1)


def load_codec(folder: EncoderFolder, settings: Encoding, device: torch.device) -> VideoCodec:
    return folder.codec(device=device, dtype=VAE_PRECISIONS[settings.vae_precision], tiling=settings.vae_tiling)


def release_memory(device: torch.device) -> None:
    """Free the memory of a dropped encoder, on the device too."""
    gc.collect()  # an encoder in a reference cycle would keep its gigabytes until some later collection
    if device.type == "cuda":
        torch.cuda.empty_cache()
