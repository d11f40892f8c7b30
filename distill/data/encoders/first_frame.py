"""Image inputs: which tensors a pipeline folder makes of a first image for its network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.data.encoders.image import ImageEncoderFolder, inspect_image_encoder
from fsdp_cp.errors import UserError
from models.files.checkpoint_files import one_line
from models.roles.condition import FIRST_FRAME

INDEX = "model_index.json"
KEY = "expand_timesteps"
_OF_IMAGES = "WanImageToVideoPipeline"


@dataclass(kw_only=True, slots=True, frozen=True)
class ImageInput:
    """Tensors that a network gets of an image, with ``data.image=first_frame``."""

    latents: str
    """``first_frame``: the VAE encodes the image as a clip of one frame. ``image_latents``: the VAE encodes a clip that
    begins with the image, and a mask tells which frames are given."""
    encoder: ImageEncoderFolder | None = None
    """The image encoder, for networks that also get its features."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the encoded tensors, which are folders of the cache too."""
        return (self.latents,) if self.encoder is None else (self.latents, "image_embeds")


def inspect_image(folder: Path, where: str) -> ImageInput:
    """Return the image input of a Wan pipeline, without loading weights.

    Wan 2.2's TI2V says ``expand_timesteps`` and puts the frame in the noisy one's place. Wan 2.2's I2V A14B has no
    image encoder. Wan 2.1's I2V has one, and so has a folder without ``model_index.json``.

    Args:
        folder: a pipeline folder.
        where: setting and folder, for messages.

    Raises:
        UserError: none of these pipelines; a part that is damaged.
    """
    index: Any = {}
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {INDEX} cannot be read ({one_line(error)}); save it again") from error
    index = index if isinstance(index, dict) else {}
    in_place = index.get(KEY)
    if in_place is not None and type(in_place) is not bool:
        raise UserError(f"{where}: {INDEX} has {KEY}={' '.join(repr(in_place).split())[:60]}; use true or false")
    if in_place:
        return ImageInput(latents=FIRST_FRAME)
    # diffusers writes [null, null] for a part that a pipeline does without.
    if index.get("_class_name") == _OF_IMAGES and index.get("image_encoder") in (None, [None, None]):
        return ImageInput(latents="image_latents")
    return ImageInput(latents="image_latents", encoder=inspect_image_encoder(folder, where))
