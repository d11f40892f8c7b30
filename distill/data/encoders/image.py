"""Image inputs: which tensors a pipeline folder makes of a first image for its network, and its image encoder.

Wan's is CLIP's vision transformer, HunyuanVideo 1.5's SigLIP. H W pixels, N features of an image, D their width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from distill.data.encoders.folder import (
    check_weight_files,
    load_part,
    part_settings,
    readable,
    require_class,
    whole_number,
)
from fsdp_cp.errors import UserError

CLIP = ("CLIPVisionModel", "CLIPVisionModelWithProjection")
SIGLIP = ("SiglipVisionModel",)
"""Classes in transformers."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ImageEncoderFolder:
    """Settings of the image encoder in a pipeline folder, without weights."""

    path: Path
    class_name: str
    """Class of the encoder in transformers."""
    processor: str
    """Sub-folder of the processor."""
    tokens: int
    """N: one feature for each patch, and the class token if there is one; each has D, its ``width``."""
    width: int


def inspect_image_encoder(folder: Path, where: str, classes: Sequence[str] = CLIP) -> ImageEncoderFolder:
    """Read the settings in a pipeline folder without loading weights. The encoder may have one of ``classes``."""
    processor = "image_processor" if classes == CLIP else "feature_extractor"
    for part in ("image_encoder", processor):
        if not (folder / part).is_dir():
            raise UserError(f"{where} has no {part}/, which data.image needs; give an image-to-video folder")
    settings = part_settings(folder, "image_encoder", where)
    part_settings(folder, processor, where, "preprocessor_config.json")
    known = require_class(where, "image_encoder", settings.get("architectures"), " or ".join(classes))
    check_weight_files(folder / "image_encoder", where)
    file = f"{where}: image_encoder/config.json"
    image, width = (whole_number(settings, key, file) for key in ("image_size", "hidden_size"))
    patch = whole_number(settings, "patch_size", file, most=image)
    tokens = (image // patch) ** 2 + (classes == CLIP)  # a feature of each patch, and CLIP's of its class token
    return ImageEncoderFolder(path=folder, class_name=known, processor=processor, tokens=tokens, width=width)


@dataclass(kw_only=True, slots=True, frozen=True)
class ImageInput:
    """Tensors that a network gets of an image, with ``data.image=first_frame``."""

    latents: str
    """``first_frame``: the VAE encodes the image as a clip of one frame. ``image_latents``: the VAE encodes a clip that
    begins with the image, and a mask tells which frames are given. ``keyframes``: the VAE encodes each of one or two
    images, and the text encoder sees them. ``references``: so it is with pictures and clips of their own sizes."""
    encoder: ImageEncoderFolder | None = None
    """The image encoder, for networks that also get its features."""
    processor: str | None = None
    """Sub-folder of the processor of the text encoder, for one that sees the images."""
    anchors: tuple[int, ...] = (0,)
    """Frames of a clip that the images are: 0 for the first, 1 for the last."""
    references: tuple[str, ...] = ()
    """Kinds of the most references of a clip (``data.references``), where ``latents`` is ``references``."""
    edges: tuple[int, int] = (2048, 768)
    """Pixels of the shorter side of pictures, and of videos, among the references."""

    @property
    def parts(self) -> list[str]:
        """Sub-folders that the image needs."""
        parts = [] if self.encoder is None else ["image_encoder", self.encoder.processor]
        return parts if self.processor is None else [*parts, self.processor]


class ImageEncoder:
    """An image encoder with its processor, as the pipelines use it: Wan's CLIP, HunyuanVideo 1.5's SigLIP."""

    def __init__(self, folder: ImageEncoderFolder, *, device: torch.device, dtype: torch.dtype) -> None:
        """Load both parts. Raises ``UserError`` if the weights do not fit the settings."""
        import transformers

        self.is_clip, self.device, self.dtype = folder.class_name in CLIP, device, dtype
        self.model = load_part(getattr(transformers, folder.class_name), folder.path, "image_encoder", dtype=dtype).to(
            device
        )
        name = f"{folder.class_name.partition('Vision')[0]}ImageProcessor"
        # The processor on PIL; before transformers 5.4 it has the shorter name.
        processor = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
        with readable(folder.path, folder.processor):
            self.processor = processor.from_pretrained(folder.path / folder.processor, local_files_only=True)

    @torch.no_grad()
    def encode(self, rgb_HWC: torch.Tensor) -> torch.Tensor:
        """Encode one image, uint8 (H, W, 3), to fp32 (N, D) on the CPU: CLIP's last features but one, SigLIP's last."""
        pixels = self.processor(images=rgb_HWC.numpy(), return_tensors="pt")["pixel_values"]
        output = self.model(pixels.to(self.device, self.dtype), output_hidden_states=self.is_clip)
        features = output.hidden_states[-2] if self.is_clip else output.last_hidden_state
        return features[0].float().cpu()


def stretched(rgb_HWC: torch.Tensor, height: int, width: int, method: Image.Resampling) -> torch.Tensor:
    """Resize uint8 (H, W, 3) to another size, whatever its aspect, as ``VaeImageProcessor`` does by default."""
    made = Image.fromarray(rgb_HWC.numpy()).resize((width, height), method)
    return torch.from_numpy(np.array(made))


def covering(rgb_HWC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize uint8 (H, W, 3) to cover another size, and crop its center, as ``MiniMaxH3ResizeStep`` does (0.42)."""
    image = Image.fromarray(rgb_HWC.numpy())
    scale = max(width / image.width, height / image.height)
    wide, tall = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    left, top = (wide - width) // 2, (tall - height) // 2
    made = image.resize((wide, tall), Image.Resampling.LANCZOS).crop((left, top, left + width, top + height))
    return torch.from_numpy(np.array(made))


def as_frame(rgb_HWC: torch.Tensor) -> torch.Tensor:
    """Return uint8 (H, W, 3) as fp32 (3, 1, H, W) in [-1, 1]."""
    return (2 * (rgb_HWC.float() / 255) - 1).permute(2, 0, 1)[:, None]


def encode_zeros(model: Any) -> None:
    """Run an image encoder on one image as :meth:`ImageEncoder.encode` does. The planner measures it."""
    side, is_clip = model.config.image_size, type(model).__name__ in CLIP
    model(torch.zeros(1, 3, side, side), output_hidden_states=is_clip)
