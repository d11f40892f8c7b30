"""The image encoder of an image-to-video pipeline folder, as WanImageToVideoPipeline uses it.

``image_encoder/`` (CLIP's vision transformer) and ``image_processor/`` of ``data.encoders`` are read. Shape legend: H W
pixels, N features of an image, D width of a feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.data.pipeline_folder import (
    MAX_NUMBER,
    check_weight_files,
    load_part,
    part_settings,
    require_class,
    shown,
    whole_numbers,
)
from fsdp_cp.errors import UserError
from models.checkpoint_files import one_line

PARTS = ("image_encoder", "image_processor")
_CLASSES = ("CLIPVisionModel", "CLIPVisionModelWithProjection")


@dataclass(kw_only=True, slots=True, frozen=True)
class ImageEncoderFolder:
    """What a pipeline folder's JSON files say about its image encoder; holds no weights."""

    path: Path
    """The pipeline folder."""
    class_name: str
    """Of the encoder, in transformers."""
    tokens: int
    """N: one for each patch, and the class token."""
    width: int
    """D."""


def inspect_image_encoder(folder: Path, where: str) -> ImageEncoderFolder:
    """Read the settings without loading weights.

    Args:
        folder: a pipeline folder.
        where: setting and folder, for messages.

    Raises:
        UserError: a part that is missing or damaged, or is another model than WanImageToVideoPipeline's.
    """
    for part in PARTS:
        if not (folder / part).is_dir():
            raise UserError(
                f"{where} has no {part}/, which data.image=first_frame needs; give an image-to-video pipeline folder"
            )
    settings = part_settings(folder, "image_encoder", where)
    part_settings(folder, "image_processor", where, "preprocessor_config.json")
    found = settings.get("architectures")
    known = next((name for name in _CLASSES if isinstance(found, list) and name in found), None)
    if known is None:
        require_class(where, "image_encoder", found, _CLASSES[0])
    check_weight_files(folder / "image_encoder", where)
    sizes = [settings.get(key) for key in ("image_size", "patch_size", "hidden_size")]
    if not whole_numbers(sizes, most=MAX_NUMBER) or sizes[1] > sizes[0]:
        raise UserError(
            f"{where}: image_encoder/config.json has image_size, patch_size, hidden_size = {shown(sizes)}; give the"
            " folder's own"
        )
    image, patch, width = sizes
    return ImageEncoderFolder(path=folder, class_name=known, tokens=(image // patch) ** 2 + 1, width=width)


class ImageEncoder:
    """CLIP's vision transformer with its processor, as ``WanImageToVideoPipeline.encode_image`` uses them."""

    def __init__(self, folder: ImageEncoderFolder, *, device: torch.device, dtype: torch.dtype) -> None:
        """Load both parts. Raises ``UserError`` if the weights do not fit the settings."""
        import transformers

        self.device, self.dtype = device, dtype
        self.model = load_part(getattr(transformers, folder.class_name), folder.path, "image_encoder", dtype=dtype).to(
            device
        )
        try:
            self.processor = _processor_class().from_pretrained(folder.path / "image_processor", local_files_only=True)
        except Exception as error:  # of a damaged folder, whatever the library raises
            raise UserError(
                f"data.encoders={folder.path}: image_processor/ cannot be read ({one_line(error)}); save it again"
            ) from error

    @torch.no_grad()
    def encode(self, rgb_HWC: torch.Tensor) -> torch.Tensor:
        """One image, uint8 (H, W, 3), -> the features behind its last block but one, fp32 (N, D) on the CPU."""
        pixels = self.processor(images=rgb_HWC.numpy(), return_tensors="pt")["pixel_values"]
        output = self.model(pixels.to(self.device, self.dtype), output_hidden_states=True)
        return output.hidden_states[-2][0].float().cpu()


def _processor_class() -> Any:
    """CLIP's processor on PIL, which transformers 5 names apart from the one on torchvision; 4 has that one alone."""
    import transformers

    return getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
