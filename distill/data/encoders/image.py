"""The image encoder of an image-to-video pipeline folder, as diffusers' pipelines use it.

Of ``data.encoders``: ``image_encoder/`` (CLIP's vision transformer) and ``image_processor/`` in a folder of Wan's, and
SigLIP's with ``feature_extractor/`` in one of HunyuanVideo 1.5's. Shape legend: H W
pixels, N features of an image, D width of a feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.data.encoders.folder import (
    MAX_NUMBER,
    check_weight_files,
    load_part,
    part_settings,
    require_class,
    shown,
    whole_numbers,
)
from fsdp_cp.errors import UserError
from models.files.checkpoint_files import one_line


@dataclass(kw_only=True, slots=True, frozen=True)
class ImageEncoderKind:
    """Kind of image encoder of a family's pipelines."""

    classes: tuple[str, ...]
    """Names of the classes in transformers."""
    processor: str
    """Sub-folder of the processor."""
    class_tokens: int
    """Number of features in addition to those of patches."""


CLIP = ImageEncoderKind(
    classes=("CLIPVisionModel", "CLIPVisionModelWithProjection"), processor="image_processor", class_tokens=1
)
SIGLIP = ImageEncoderKind(classes=("SiglipVisionModel",), processor="feature_extractor", class_tokens=0)


@dataclass(kw_only=True, slots=True, frozen=True)
class ImageEncoderFolder:
    """Settings of the image encoder in a pipeline folder, without weights."""

    path: Path
    """The pipeline folder."""
    kind: ImageEncoderKind
    class_name: str
    """Class of the encoder in transformers."""
    tokens: int
    """N: one feature for each patch, and the class token if there is one."""
    width: int
    """D."""

    @property
    def parts(self) -> tuple[str, str]:
        """Sub-folders that are read."""
        return "image_encoder", self.kind.processor


def inspect_image_encoder(folder: Path, where: str, kind: ImageEncoderKind = CLIP) -> ImageEncoderFolder:
    """Read the settings without loading weights.

    Args:
        folder: a pipeline folder.
        where: setting and folder, for messages.
        kind: what is wanted.

    Raises:
        UserError: a part that is missing or damaged, or is another model.
    """
    for part in ("image_encoder", kind.processor):
        if not (folder / part).is_dir():
            raise UserError(
                f"{where} has no {part}/, which data.image=first_frame needs; give an image-to-video pipeline folder"
            )
    settings = part_settings(folder, "image_encoder", where)
    part_settings(folder, kind.processor, where, "preprocessor_config.json")
    architectures = settings.get("architectures")
    known = next((name for name in kind.classes if isinstance(architectures, list) and name in architectures), None)
    if known is None:
        require_class(where, "image_encoder", architectures, kind.classes[0])
    check_weight_files(folder / "image_encoder", where)
    sizes = [settings.get(key) for key in ("image_size", "patch_size", "hidden_size")]
    if not whole_numbers(sizes, most=MAX_NUMBER) or sizes[1] > sizes[0]:
        raise UserError(
            f"{where}: image_encoder/config.json has image_size, patch_size, hidden_size = {shown(sizes)}; give the"
            " folder's own"
        )
    image, patch, width = sizes
    tokens = (image // patch) ** 2 + kind.class_tokens
    return ImageEncoderFolder(path=folder, kind=kind, class_name=known, tokens=tokens, width=width)


class ImageEncoder:
    """An image encoder with its processor, as ``WanImageToVideoPipeline.encode_image`` uses CLIP, and
    ``HunyuanVideo15ImageToVideoPipeline`` SigLIP."""

    def __init__(self, folder: ImageEncoderFolder, *, device: torch.device, dtype: torch.dtype) -> None:
        """Load both parts. Raises ``UserError`` if the weights do not fit the settings."""
        import transformers

        self.kind, self.device, self.dtype = folder.kind, device, dtype
        self.model = load_part(getattr(transformers, folder.class_name), folder.path, "image_encoder", dtype=dtype).to(
            device
        )
        try:
            self.processor = _processor_class(folder.kind).from_pretrained(
                folder.path / folder.kind.processor, local_files_only=True
            )
        except Exception as error:  # of a damaged folder, whatever the library raises
            raise UserError(
                f"data.encoders={folder.path}: {folder.kind.processor}/ cannot be read ({one_line(error)}); save it"
                " again"
            ) from error

    @torch.no_grad()
    def encode(self, rgb_HWC: torch.Tensor) -> torch.Tensor:
        """Encode one image, uint8 (H, W, 3), to fp32 (N, D) on the CPU: CLIP's features after the last block but one,
        SigLIP's last."""
        pixels = self.processor(images=rgb_HWC.numpy(), return_tensors="pt")["pixel_values"]
        output = self.model(pixels.to(self.device, self.dtype), output_hidden_states=self.kind == CLIP)
        features = output.hidden_states[-2] if self.kind == CLIP else output.last_hidden_state
        return features[0].float().cpu()


def _processor_class(kind: ImageEncoderKind) -> Any:
    """Return the processor on PIL. transformers 5 has another name for it; 4 has only one processor."""
    import transformers

    name = "CLIPImageProcessor" if kind == CLIP else "SiglipImageProcessor"
    return getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
