"""How a pipeline folder gives its network an image: through encoders of its own, or as the first frame in its place.

The latter is Wan 2.2's TI2V, whose ``model_index.json`` says ``expand_timesteps``: the image is encoded as a clip of
one frame, and no image encoder is read. Wan 2.2's I2V A14B reads none either: of an image it gets the latents alone.
HunyuanVideo 1.5 gets both, the frame for channels of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.data.image_encoder import ImageEncoderFolder, inspect_image_encoder
from fsdp_cp.errors import UserError
from models.checkpoint_files import one_line
from models.condition import FIRST_FRAME

INDEX = "model_index.json"
KEY = "expand_timesteps"
_OF_IMAGES = "WanImageToVideoPipeline"


@dataclass(kw_only=True, slots=True, frozen=True)
class FirstFrame:
    """The first frame alone, as the VAE encodes it, is all of an image that the network gets."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ImageLatents:
    """Latents of the clip whose first frame is given, and a mask, are all of an image that the network gets."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FrameAndFeatures:
    """The first frame alone, as the VAE encodes it, and an image encoder's features of it."""

    encoder: ImageEncoderFolder


ImageInput = ImageEncoderFolder | FirstFrame | ImageLatents | FrameAndFeatures
"""What is read of a pipeline folder for ``data.image=first_frame``."""


def _index(folder: Path, where: str) -> dict[str, Any]:
    """What the ``model_index.json`` of a pipeline folder says; nothing where there is none.

    Raises:
        UserError: one that cannot be read.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {INDEX} cannot be read ({one_line(error)}); save it again") from error
    return index if isinstance(index, dict) else {}


def frame_in_place(folder: Path, where: str) -> bool:
    """Does the pipeline of ``folder`` put a given first frame in its place?

    Args:
        folder: a pipeline folder; without ``model_index.json`` it does not.
        where: setting and folder, for messages.

    Raises:
        UserError: an index that cannot be read, or with a value that is neither true nor false.
    """
    found = _index(folder, where).get(KEY)
    if found is not None and type(found) is not bool:
        raise UserError(f"{where}: {INDEX} has {KEY}={' '.join(repr(found).split())[:60]}; use true or false")
    return bool(found)


def inspect_image(folder: Path, where: str) -> ImageInput:
    """What the pipeline of ``folder`` reads of an image, without loading weights.

    Args:
        folder: a pipeline folder.
        where: setting and folder, for messages.

    Raises:
        UserError: neither a folder of Wan 2.2's TI2V or I2V nor one with an image encoder; a part that is damaged.
    """
    if frame_in_place(folder, where):
        return FirstFrame()
    index = _index(folder, where)
    # diffusers writes [null, null] for a part that a pipeline does without.
    if index.get("_class_name") == _OF_IMAGES and index.get("image_encoder") in (None, [None, None]):
        return ImageLatents()
    return inspect_image_encoder(folder, where)


def cache_parts(image: ImageInput) -> tuple[str, ...]:
    """Folders of the cache that an image's tensors are in."""
    if isinstance(image, FirstFrame):
        return (FIRST_FRAME,)
    if isinstance(image, FrameAndFeatures):
        return FIRST_FRAME, "image_embeds"
    return ("image_latents",) if isinstance(image, ImageLatents) else ("image_latents", "image_embeds")


def image_encoder_of(image: ImageInput) -> ImageEncoderFolder | None:
    """The image encoder that is read, if one is."""
    if isinstance(image, FrameAndFeatures):
        return image.encoder
    return image if isinstance(image, ImageEncoderFolder) else None
