"""How a pipeline folder gives its network an image: through encoders of its own, or as the first frame in its place.

The latter is Wan 2.2's TI2V, whose ``model_index.json`` says ``expand_timesteps``: the image is encoded as a clip of
one frame, and no image encoder is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from distill.data.image_encoder import ImageEncoderFolder, inspect_image_encoder
from fsdp_cp.errors import UserError
from models.checkpoint_files import one_line
from models.condition import FIRST_FRAME

INDEX = "model_index.json"
KEY = "expand_timesteps"


@dataclass(kw_only=True, slots=True, frozen=True)
class FirstFrame:
    """The first frame alone, as the VAE encodes it, is all of an image that the network gets."""


ImageInput = ImageEncoderFolder | FirstFrame
"""What is read of a pipeline folder for ``data.image=first_frame``."""


def frame_in_place(folder: Path, where: str) -> bool:
    """Does the pipeline of ``folder`` put a given first frame in its place?

    Args:
        folder: a pipeline folder; without ``model_index.json`` it does not.
        where: setting and folder, for messages.

    Raises:
        UserError: an index that cannot be read, or with a value that is neither true nor false.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {INDEX} cannot be read ({one_line(error)}); save it again") from error
    found = index.get(KEY) if isinstance(index, dict) else None
    if found is not None and type(found) is not bool:
        raise UserError(f"{where}: {INDEX} has {KEY}={' '.join(repr(found).split())[:60]}; use true or false")
    return bool(found)


def inspect_image(folder: Path, where: str) -> ImageInput:
    """What the pipeline of ``folder`` reads of an image, without loading weights.

    Args:
        folder: a pipeline folder.
        where: setting and folder, for messages.

    Raises:
        UserError: neither a folder of Wan 2.2's TI2V nor one with an image encoder; a part that is damaged.
    """
    return FirstFrame() if frame_in_place(folder, where) else inspect_image_encoder(folder, where)


def cache_parts(image: ImageInput) -> tuple[str, ...]:
    """Folders of the cache that an image's tensors are in."""
    return (FIRST_FRAME,) if isinstance(image, FirstFrame) else ("image_latents", "image_embeds")
