"""Random clips in memory, in place of a data set."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model

from distill.data.base import Bucket
from distill.data.moving_shapes import MovingShapes
from distill.data.settings import MovingShapesSettings
from models.condition import Condition
from tests.oracles.tiny_ltx import SPACING
from tests.oracles.tiny_wan import CONDITION_SHAPES, LATENT_SHAPE


class RandomClips:
    """In-memory data set of random latents and conditions."""

    fps, fingerprint = 8.0, "random"

    def __init__(
        self,
        latent_shape: tuple[int, int, int, int] = LATENT_SHAPE,
        condition_shapes: Mapping[str, tuple[int, ...]] = CONDITION_SHAPES,
        dtype: torch.dtype = torch.float32,
        audio_shape: tuple[int, int, int] | None = None,
        more_shapes: Sequence[tuple[int, int, int, int]] = (),
    ) -> None:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.latent_shapes, self.condition_shapes = {"video": latent_shape}, dict(condition_shapes)
        text_shape = condition_shapes["text"]
        self.latents = draw(32, *latent_shape)
        self.tensors = {"text": draw(32, *text_shape)}
        self.null, self.empty = {"text": draw(*text_shape)}, {"text": draw(*text_shape)}
        self.tensors |= {name: draw(32, *shape) for name, shape in condition_shapes.items() if name != "text"}
        if (
            "first_frame" in condition_shapes
        ):  # use the clip's own image: with another clip's image, the loss grows with 1/t
            self.tensors["first_frame"] = self.latents[:, :, :1].clone()
        if "text_mask" in condition_shapes:  # captions of 1 to L tokens, a negative prompt of 2, an empty one
            (tokens,) = condition_shapes["text_mask"]
            self.tensors["text_mask"] = torch.arange(tokens) < 1 + torch.arange(32)[:, None] % tokens
            self.null |= {"text_mask": torch.arange(tokens) < 2}
            self.empty |= {"text_mask": torch.arange(tokens) < 1}
        if "latent_spacing" in condition_shapes:
            self.tensors["latent_spacing"] = torch.tensor(SPACING).repeat(32, 1)
        if "glyphs" in condition_shapes:  # some captions quote a text, others do not; the prompts do not
            (tokens,) = condition_shapes["glyph_mask"]
            self.tensors["glyph_mask"] = torch.arange(tokens) < torch.arange(32)[:, None] % (tokens + 1)
            nothing = {"glyphs": torch.zeros(condition_shapes["glyphs"]), "glyph_mask": torch.zeros(tokens) > 0}
            self.null |= nothing
            self.empty |= nothing

        if "audio_text" in condition_shapes:
            self.null |= {"audio_text": draw(*condition_shapes["audio_text"])}
            self.empty |= {"audio_text": draw(*condition_shapes["audio_text"])}
            self.tensors["fps"] = torch.full((32, 1), self.fps)
        self.sound: dict[str, Tensor] = {}
        if audio_shape is not None:
            self.latent_shapes["audio"], self.sound = audio_shape, {"latents/audio": draw(32, *audio_shape)}
        self.sized = [self.latents, *(draw(32, *shape) for shape in more_shapes)]
        self.buckets = [
            Bucket(latent_shapes=self.latent_shapes | {"video": shape}, items=range(number, 32, 1 + len(more_shapes)))
            for number, shape in enumerate([latent_shape, *more_shapes])
        ]

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tensors = {name: value[index] for name, value in (self.tensors | self.sound).items()}
        latents = self.sized[index % len(self.sized)][index]
        return {"latents": latents, "caption": str(index), **tensors}

    def condition(self, captions: list[str], clips: Sequence[int] | None = None) -> Condition:
        items = [int(caption or 0) for caption in captions] if clips is None else list(clips)
        tensors = {name: value[items] for name, value in self.tensors.items()}
        texts = [self.tensors["text"][int(caption)] if caption else self.empty["text"] for caption in captions]
        return Condition(tensors | {"text": torch.stack(texts)}, self.null, self.empty)


def moving_shapes(encoders: str | Path, seed: int = 0, **settings: Any) -> MovingShapes:
    """Return the data set of rendered clips with these settings."""
    return MovingShapesSettings(encoders=str(encoders), **settings).build(seed=seed)


def write_lpips(folder):
    """Write random weights of LPIPS, as torchvision and the package lpips store them."""
    folder.mkdir()
    random = torch.Generator().manual_seed(0)
    network, linear, inputs = {}, {}, 3
    for i, (layer, outputs, size) in enumerate([(0, 64, 11), (3, 192, 5), (6, 384, 3), (8, 256, 3), (10, 256, 3)]):
        network[f"features.{layer}.weight"] = torch.randn(outputs, inputs, size, size, generator=random) / 10
        network[f"features.{layer}.bias"] = torch.randn(outputs, generator=random) / 10
        linear[f"lin{i}.model.1.weight"] = torch.rand(1, outputs, 1, 1, generator=random)
        inputs = outputs
    torch.save(network, folder / "alexnet.pth")
    torch.save(linear, folder / "lpips_alex.pth")


def write_dino(folder):
    """Write a tiny DINO with random weights, and return it."""
    config = Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=224, patch_size=56)
    model = Dinov2Model(config).eval()
    model.save_pretrained(folder)
    return model
