"""The VAE and the text encoder of a diffusers pipeline folder, as WanPipeline uses them: Wan 2.1's, or 2.2's TI2V's.

``data.encoders`` names the folder; its ``vae/``, ``text_encoder/`` and ``tokenizer/`` are read. Latents and embeddings
come out as the transformer of that pipeline expects them. Other families have subclasses of these classes.

Shape legend: C latent channels, t h w latent frames and sides, T H W pixels, L tokens, D width of an embedding.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from distill.data.base import to_bytes
from distill.data.encoders.folder import load_part, part_settings, readable, shown, whole_number
from distill.data.encoders.image import ImageInput, inspect_image_encoder
from distill.data.videos.container import VideoFile
from distill.data.videos.decode import ClipFormat, SoundFormat, first_frame
from fsdp_cp.errors import UserError
from models.condition import FIRST_FRAME, KEYFRAME_ANCHORS, KEYFRAMES, TEXT_TAGS
from models.families.diffusers_family import parameters_of
from models.files.checkpoint_files import SUFFIXES
from models.sample import AUDIO, VIDEO, PartShapes, Sample

logger = logging.getLogger(__name__)


class VideoCodec:
    """A Wan VAE between pixels and latents ``(z - latents_mean) / latents_std``, which ``WanPipeline.__call__`` undoes
    before it decodes. ``z`` is the mode of the posterior: a draw would make a latent depend on which run wrote it.

    A codec of a network that takes keyframes or references also encodes these (``minimax_h3.py``)."""

    vae_class = "AutoencoderKLWan"

    def __init__(
        self, folder: EncoderFolder, *, device: torch.device, dtype: torch.dtype, tiling: bool = False
    ) -> None:
        """Load ``vae/`` to ``device`` as ``dtype``. Raises ``UserError`` if its weights do not fit its settings.

        With ``tiling``, larger frames than a tile (256 pixels; LTX's 512) go through the VAE in tiles, whose edges
        diffusers blends: less memory, and a pixel sees only its tile.
        """
        import diffusers

        self.device, self.dtype = device, dtype
        # In fp32 first: LTX's statistics are among the weights, and bf16 would round them.
        self.vae = load_part(getattr(diffusers, self.vae_class), folder.path, "vae", torch_dtype=torch.float32)
        mean, std = (torch.as_tensor(values).float() for values in self._statistics())
        if not (std > 0).all():
            raise UserError(f"data.encoders={folder.path}: vae/ has latents_std of 0 or less; copy it again")
        self.mean, self.std = (values.view(1, -1, 1, 1, 1).to(device) for values in (mean, std))
        torch.nn.Module.to(self.vae, device=device, dtype=dtype)  # diffusers' own warns of modules that it has none of
        if tiling:
            self.vae.enable_tiling()

    def _statistics(self) -> tuple[Any, Any]:
        """Return mean and standard deviation of the VAE's output, by channel, on the CPU."""
        return self.vae.config["latents_mean"], self.vae.config["latents_std"]

    @torch.no_grad()
    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """Encode (3, T, H, W) in [-1, 1] to latents (C, t, h, w), fp32 on the CPU."""
        return self.normalized(self._latents(video[None].to(self.device)).float())[0].cpu()

    def normalized(self, z: torch.Tensor) -> torch.Tensor:
        """Return fp32 ``z`` (n, C, t, h, w) on the codec's device, as the VAE's encoder gives it, as latents."""
        return (z - self.mean) / self.std

    @torch.no_grad()
    def encode_clip(self, video: torch.Tensor, sound: torch.Tensor | None) -> Sample:
        """Encode a clip, (3, T, H, W) in [-1, 1], with its sound (:meth:`EncoderFolder.sound_format`), to fp32."""
        parts = {VIDEO: self.encode(video)[None]}
        if sound is not None:
            parts[AUDIO] = self._sound_latents(sound.to(self.device, torch.float32))[None].cpu()
        return Sample(parts)

    @torch.no_grad()
    def decode_sound(self, latents: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Decode audio latents (n, C, L, F) to fp32 (n, channels, samples) on the CPU, and samples per second."""
        waves = [self._waveform(one.to(self.device, torch.float32)).float().cpu() for one in latents]
        return torch.stack(waves), self.sound_rate

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents (n, C, t, h, w) to uint8 (n, T, H, W, 3) on the CPU, one clip at a time to save memory."""
        videos = []
        for one in latents.split(1):
            video = self._pixels(one.to(self.device, torch.float32) * self.std + self.mean)[0].float()
            videos.append(to_bytes(video).permute(1, 2, 3, 0).cpu())
        return torch.stack(videos)

    @torch.no_grad()
    def decode_next(self, latents: torch.Tensor, *, is_first: bool) -> torch.Tensor | None:
        """Decode the next latents of clips, as :meth:`decode` does after those of the calls before, or the first ones;
        ``None`` if that cannot be, as in tiles. Reads the VAE's cache of frames (private, diffusers 0.42)."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, unpatchify

        vae = self.vae
        if type(vae) is not AutoencoderKLWan or vae.use_tiling or len(latents) > 1:
            return None
        if is_first:
            vae.clear_cache()
        z = vae.post_quant_conv((latents.to(self.device, torch.float32) * self.std + self.mean).to(self.dtype))
        pieces = []
        for i, frame in enumerate(z.split(1, dim=2)):
            vae._conv_idx = [0]
            cache = {"feat_cache": vae._feat_map, "feat_idx": vae._conv_idx}
            pieces.append(vae.decoder(frame, **cache, first_chunk=is_first and i == 0))
        video = torch.cat(pieces, dim=2)
        if vae.config["patch_size"] is not None:
            video = unpatchify(video, patch_size=vae.config["patch_size"])
        return to_bytes(video.float()).permute(0, 2, 3, 4, 1).cpu()

    def _latents(self, video: torch.Tensor) -> torch.Tensor:
        """Encode (1, 3, T, H, W) in [-1, 1] to (1, C, t, h, w), as the VAE's encoder gives it."""
        return self.vae.encode(video.to(self.dtype)).latent_dist.mode()

    def _pixels(self, z: torch.Tensor) -> torch.Tensor:
        """Decode (1, C, t, h, w), as the VAE's encoder gives it, to (1, 3, T, H, W) in [-1, 1]."""
        return self.vae.decode(z.to(self.dtype)).sample

    sound_rate: int
    """Samples per second of decoded sound, of families that make sound."""

    def _sound_latents(self, sound: torch.Tensor) -> torch.Tensor:
        """Encode a sound (channels, samples) to latents (C, L, F), fp32 on the codec's device."""
        raise NotImplementedError

    def _waveform(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents (C, L, F) of a sound to (channels, samples), on the codec's device."""
        raise NotImplementedError


class TextEncoder:
    """A T5 with its tokenizer, as ``encode_prompt`` of the pipelines uses them."""

    class_name = "UMT5EncoderModel"
    stored_class: ClassVar[str | None] = None
    """Class that the folder names, where :attr:`class_name` is a part of it."""
    pipeline = "WanPipeline"

    def __init__(self, folder: EncoderFolder, *, max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        """Load ``text_encoder/`` and ``tokenizer/``. Raises ``UserError`` if the weights do not fit the settings."""
        import transformers

        self.folder, self.max_tokens, self.device = folder.path, max_tokens, device
        self.cuts: list[str] = []
        """Cuts of the latest caption, in words."""
        self.tokenizer = load_tokenizer(folder.path, "tokenizer")
        self.model = self._load(getattr(transformers, self.class_name), folder, dtype=dtype).to(device)

    def _load(self, model_class: Any, folder: EncoderFolder, **options: Any) -> Any:
        return load_part(model_class, folder.path, "text_encoder", **options)

    @staticmethod
    def loaded_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the ``config.json`` of what is loaded of a text encoder with this ``config.json``."""
        return config

    @staticmethod
    def encode_zeros(models: Any, tokens: int) -> None:
        """Run the text encoders of a folder as for a caption of ``tokens`` tokens. The planner measures it."""
        models[0](torch.zeros(1, tokens, dtype=torch.long), torch.ones(1, tokens, dtype=torch.long))

    def embeddings(self, caption: str) -> dict[str, torch.Tensor]:
        """Return what the networks get of one caption (:meth:`EncoderFolder.text_sizes`), fp32 on the CPU, unpadded."""
        self.cuts = []
        return {"text": self.encode(caption)}

    def report_cut(self, caption: str, what: str, length: int, most: int, setting: str = "") -> None:
        """Log that a part of a caption of ``length`` tokens is cut, if it is, and keep that in :attr:`cuts`."""
        if length > most:
            self.cuts.append(f"{what} cut from {length} to {setting}{most} tokens")
            logger.warning("%s: %.60s", self.cuts[-1], caption)

    def cleaned(self, caption: str) -> str:
        """Return ``caption`` as the pipeline hands it to the tokenizer: without mojibake (with ftfy installed), HTML
        entities and runs of white space."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return prompt_clean(caption)

    def _check_words(self, tokens: Sequence[int], model: Any, tokenizer: str, encoder: str) -> None:
        words = model.get_input_embeddings().num_embeddings
        if max(tokens, default=0) >= words:  # on a GPU an assertion of the device, which names nothing
            unknown = f"{tokenizer}/ has words beyond the {words} of {encoder}/"
            raise UserError(f"data.encoders={self.folder}: {unknown}; give the {tokenizer}/ that belongs to it")

    @cached_property
    def _pipeline(self) -> Any:
        """The pipeline with the text encoder alone."""
        import diffusers

        kind = getattr(diffusers, self.pipeline)
        required = [name for name, parameter in parameters_of(kind).items() if parameter.default is parameter.empty]
        return kind(**dict.fromkeys(required) | {"text_encoder": self.model, "tokenizer": self.tokenizer})

    @torch.no_grad()
    def encode(self, caption: str) -> torch.Tensor:
        """Encode one caption as the pipeline does: fp32 (tokens, D) on the CPU, without padding. One at a time: in a
        batch, the last bits would depend on the other captions."""
        count, (embeddings, *_) = self._piped(caption)
        return embeddings[0, :count].float().cpu()

    def _piped(self, caption: str) -> tuple[int, Sequence[torch.Tensor]]:
        """Return the number of tokens of a caption, before it is cut, and what the pipeline makes of the caption. A
        folder that cannot encode it is refused."""
        ids = self.tokenizer(self.cleaned(caption), add_special_tokens=True).input_ids
        self._check_words(ids, self.model, "tokenizer", "text_encoder")
        if not ids:
            raise UserError(f"data.encoders={self.folder}: tokenizer/ makes no token of {caption[:60]!r}; use T5's")
        self.report_cut(caption, "caption", len(ids), self.max_tokens, "data.max_text_tokens=")
        return len(ids), self._pipeline.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=self.max_tokens, device=self.device
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class EncoderFolder:
    """Settings of the encoders in a pipeline folder, without weights."""

    codec_class: ClassVar[type[VideoCodec]] = VideoCodec
    text_class: ClassVar[type[TextEncoder]] = TextEncoder
    codec_parts: ClassVar[tuple[str, ...]] = ("vae",)
    """Sub-folders that decide the latents of a clip."""
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")
    """Sub-folders that decide the embedding of a caption."""
    text_masks: ClassVar[Mapping[str, str]] = {}
    """Name of the mask of the tokens that count, for embeddings with one: true before the zeros that fill it up."""
    text_dtype: ClassVar[torch.dtype] = torch.float32
    """Dtype in which the text encoder computes, and embeddings are stored."""
    vae_precisions: ClassVar[tuple[str, ...]] = ("fp32", "bf16")
    """Values of ``data.vae_precision`` that the VAE takes."""

    path: Path
    channels: int
    """C, latent channels."""
    temporal: int
    """Frames per latent frame after the first, which stands alone: T = temporal * (t - 1) + 1."""
    spatial: int
    """Pixels per latent pixel along one side."""
    patch: tuple[int, int, int]
    """Latents per token (t, h, w) of the folder's transformer; (1, 1, 1) when the folder has none."""
    text_width: int
    """D."""

    @classmethod
    def read(cls, folder: Path, where: str, vae: dict[str, Any], text: dict[str, Any]) -> Self:
        """Return the settings of a folder from the checked arguments of its VAE and its text encoder's settings."""
        channels = vae["z_dim"]
        check_statistics(vae, channels, f"{where}: vae/config.json")
        return cls(
            path=folder,
            channels=channels,
            # From the layers, not from scale_factor_*: those label only the pipeline, and Wan 2.1 leaves them out.
            temporal=2 ** sum(vae["temperal_downsample"]),
            spatial=2 ** (len(vae["dim_mult"]) - 1) * (vae["patch_size"] or 1),
            patch=transformer_patch(folder, where, (1, 1, 1)),
            text_width=whole_number(text, "d_model", f"{where}: text_encoder/config.json"),
        )

    def latent_shape(self, clip: ClipFormat) -> tuple[int, int, int, int]:
        """Return (C, t, h, w) of one encoded clip, which the VAE and the patches must divide evenly (``UserError``)."""
        frames = self.latent_frames(clip)
        for name, side, patch in (("height", clip.height, self.patch[1]), ("width", clip.width, self.patch[2])):
            unit = self.spatial * patch
            if side < 1 or side % unit:
                works = max(1, round(side / unit)) * unit
                unit_of = f"{unit} (VAE {self.spatial} x patch {patch})"
                raise UserError(f"data.{name}={side} is not a multiple of {unit_of}; use {works}")
        return self.channels, frames, clip.height // self.spatial, clip.width // self.spatial

    def latent_shapes(self, clip: ClipFormat) -> PartShapes:
        """Return the shape of each part of one encoded clip; see :meth:`latent_shape`."""
        return {VIDEO: self.latent_shape(clip)}

    def sound_format(self, clip: ClipFormat) -> SoundFormat | None:
        """Return the sound that :meth:`VideoCodec.encode_clip` takes with a clip; ``None`` if the family has none."""
        return None

    def condition_shapes(
        self, clip: ClipFormat, max_text_tokens: int, image: ImageInput | None
    ) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of a sample's condition, with an image where its encoder is given."""
        none = {
            name: torch.zeros(0, width, device="meta") for name, (_, width) in self.text_sizes(max_text_tokens).items()
        }
        tensors = self.text_tensors(none, max_text_tokens) | self.clip_tensors(clip)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if image is not None:
            channels, *sizes = self.latent_shape(clip)
            if image.latents == FIRST_FRAME:
                shapes[FIRST_FRAME] = (channels, 1, *sizes[1:])
            elif image.latents == KEYFRAMES:
                count = len(image.anchors)
                shapes |= {KEYFRAMES: (channels, count, *sizes[1:]), KEYFRAME_ANCHORS: (count,)}
                shapes[TEXT_TAGS] = (max_text_tokens,)
            else:
                shapes |= {"image_latents": (channels, *sizes), "image_mask": (self.temporal, *sizes)}
            if image.encoder is not None:
                shapes["image_embeds"] = (image.encoder.tokens, image.encoder.width)
        return shapes

    def check_network(self, config: Mapping[str, Any], setting: str) -> None:
        """Refuse a network, of this ``config.json`` with all defaults, whose shapes fit, but that had other
        encoders."""

    def inspect_image(self, where: str) -> ImageInput:
        """Return the tensors that the pipeline makes of an image, without loading weights. Wan 2.2's TI2V
        (``expand_timesteps``) puts the frame in the noisy one's place, and its I2V A14B has no image encoder; Wan 2.1's
        I2V has one, as has a folder without ``model_index.json``."""
        index = part_settings(self.path, ".", where, "model_index.json", optional=True)
        in_place = index.get("expand_timesteps")
        if in_place is not None and type(in_place) is not bool:
            raise UserError(f"{where}: model_index.json has expand_timesteps={shown(in_place)}; use true or false")
        if in_place:
            return ImageInput(latents=FIRST_FRAME)
        # diffusers writes [null, null] for a part that a pipeline does without.
        if index.get("_class_name") == "WanImageToVideoPipeline" and index.get("image_encoder") in (None, [None, None]):
            return ImageInput(latents="image_latents")
        return ImageInput(latents="image_latents", encoder=inspect_image_encoder(self.path, where))

    def read_image(self, file: VideoFile, clip: ClipFormat, *, follows: bool = False) -> torch.Tensor:
        """Return an image from a file as a frame (3, 1, H, W) in [-1, 1]: by default, cropped as clips are. The second
        of two images ``follows`` the first. Raises ``ClipError``."""
        return first_frame(file, clip)

    def remarks(self, clip: ClipFormat, max_text_tokens: int, image: ImageInput | None) -> list[str]:
        """Return warnings: guesses about the folder, and settings that fit clips, captions or images badly."""
        return []

    def codec(self, *, device: torch.device, dtype: torch.dtype, tiling: bool) -> VideoCodec:
        return self.codec_class(self, device=device, dtype=dtype, tiling=tiling)

    def text_encoder(self, image: ImageInput | None = None, **options: Any) -> TextEncoder:
        """Load the text encoder; with an ``image`` that it sees, its vision too."""
        return self.text_class(self, **options)

    def text_key(self) -> dict[str, Any]:
        """Return whatever else decides an embedding, in addition to files and the number of tokens."""
        return {}

    def text_sizes(self, max_tokens: int) -> dict[str, tuple[int, int]]:
        """Return the greatest number of tokens and the width of each embedding of a caption, by name."""
        return {"text": (max_tokens, self.text_width)}

    def text_tokens(self, clips: Sequence[ClipFormat], max_text_tokens: int, image: ImageInput | None) -> int:
        """Return the most tokens of a text, of clips of these formats: those of a caption, and of images in it."""
        return max_text_tokens

    def text_tensors(self, texts: Mapping[str, torch.Tensor], max_tokens: int) -> dict[str, torch.Tensor]:
        """Return the text tensors of a condition from the embeddings of a caption (:meth:`text_sizes`), and masks."""
        tensors = {}
        for name, (most, _) in self.text_sizes(max_tokens).items():
            tensors[name] = pad_text(texts[name], most)
            if name in self.text_masks:
                tensors[self.text_masks[name]] = torch.arange(most) < len(texts[name])
        return tensors

    def clip_tensors(self, clip: ClipFormat) -> dict[str, torch.Tensor]:
        """Return the tensors of a condition that are the same for all clips of one format."""
        return {}

    def latent_frames(self, clip: ClipFormat) -> int:
        """Return t of one encoded clip; refuse frames that do not fit, the last of which the VAE would drop."""
        frames_per_token = self.temporal * self.patch[0]
        # t = (T - 1) / temporal + 1 must be a multiple of patch[0], so T = frames_per_token * n - temporal + 1.
        first = frames_per_token - self.temporal + 1
        if clip.num_frames < 1 or (clip.num_frames - first) % frames_per_token:
            works = first + max(0, round((clip.num_frames - first) / frames_per_token)) * frames_per_token
            joins = f"which joins {self.temporal} frames after the first, in patches of {self.patch[0]}"
            raise UserError(f"data.num_frames={clip.num_frames} does not fit the VAE, {joins}; use {works}")
        return (clip.num_frames - 1) // self.temporal + 1

    def files(self, *parts: str) -> list[Path]:
        """Return the files that decide the output of the sub-folders ``parts``: settings, words, weights; sorted."""
        files = (file for part in parts for file in (self.path / part).iterdir())
        return sorted(file for file in files if file.suffix in SUFFIXES and file.is_file())


def transformer_patch(folder: Path, where: str, default: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return ``patch_size`` of a folder's transformer; ``default`` if the folder has none."""
    patch = part_settings(folder, "transformer", where, optional=True).get("patch_size", default)
    is_list = isinstance(patch, (list, tuple)) and len(patch) == 3
    if not is_list or not all(type(side) is int and 1 <= side <= 64 for side in patch):
        raise UserError(f"{where}: transformer/config.json has patch_size={shown(patch)}; use [1, 2, 2]")
    return patch[0], patch[1], patch[2]


def check_statistics(vae: Mapping[str, Any], channels: int, file: str) -> None:
    """Raise ``UserError`` unless a VAE's ``config.json`` has a mean and a standard deviation for each channel."""
    mean, std = vae["latents_mean"], vae["latents_std"]
    if mean is None or std is None or not len(mean) == len(std) == channels or min(std) <= 0:
        given = f"latents_mean={shown(mean)}, latents_std={shown(std)}"
        raise UserError(f"{file} has {given}; give {channels} numbers each, deviations above 0")


def load_tokenizer(folder: Path, part: str) -> Any:
    """Load the tokenizer in ``part`` of a pipeline folder. Raises ``UserError`` for one that cannot be read or used."""
    import transformers

    with readable(folder, part):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder / part, local_files_only=True, trust_remote_code=False
        )
        tokenizer("a", padding="max_length", max_length=2, truncation=True)  # it can fill up and cut
    return tokenizer


def pad_text(text: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Pad (tokens, D) with zeros to (``max_tokens``, D), as WanPipeline does."""
    return torch.cat([text, text.new_zeros(max_tokens - text.shape[0], text.shape[1])])
