"""Facts about a model family that only a plan of memory and time uses: released networks and their encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fsdp_cp.errors import UserError

LatentShape = tuple[int, int, int, int]


class FamilyPlanning:
    """Facts for plans without files on disk. The defaults are those of a family with no released networks."""

    networks: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Configurations of released networks, by the names that ``planning.model`` takes."""
    boundaries: ClassVar[Mapping[str, float]] = {}
    """Time from which the first of two experts serves, by the names of the :attr:`networks` with two experts."""
    text_encoder: ClassVar[Mapping[str, Any]] = {}
    """``config.json`` of the released networks' text encoder."""
    text_encoder_2: ClassVar[Mapping[str, Any]] = {}
    """``config.json`` of a second text encoder, loaded in addition to the first; empty for none."""
    vae: ClassVar[Mapping[str, Any]] = {}
    """``config.json`` of their VAE; empty for Wan 2.1's class with its own defaults."""
    image_encoder: ClassVar[Mapping[str, Any]] = {}
    """``config.json`` of their image encoder, CLIP's or SigLIP's vision transformer; empty for none."""

    def with_layers(self, config: Mapping[str, Any], layers: int) -> dict[str, Any] | None:
        """Return ``config`` with another number of blocks; ``None`` if blocks differ, so that a plan must build all."""
        return None

    def latents_of_clip(self, channels: int, num_frames: int, height: int, width: int) -> LatentShape:
        """Return the shape ``(C, T, H, W)`` of a clip's latents, for networks with this number of latent channels.

        Raises:
            UserError: the clip's sizes do not fit the VAE, or the family has no VAE.
        """
        raise UserError("data.encoders must name a pipeline folder: this model family names no VAE of its own")

    def encoders(self, channels: int) -> dict[str, Mapping[str, Any]]:
        """Return ``config.json`` of ``text_encoder``, ``vae`` and ``image_encoder`` for this number of latent channels.

        The VAE's is empty for the defaults of its class; the image encoder's is empty for none.
        """
        return {"text_encoder": self.text_encoder, "vae": self.vae, "image_encoder": self.image_encoder}


def encoded_clip(
    vae: str, channels: int, frames: int, pixels: int, *, num_frames: int, height: int, width: int
) -> LatentShape:
    """Return the shape ``(C, T, H, W)`` of a clip's latents.

    Args:
        vae: name of the VAE, for messages.
        channels: C.
        frames: frames per latent frame; the first frame has its own latent frame.
        pixels: height and width of a latent.
        num_frames, height, width: of the clip.

    Raises:
        UserError: the VAE does not divide the clip.
    """
    if (num_frames - 1) % frames or height % pixels or width % pixels:
        raise UserError(
            f"data.num_frames={num_frames}, data.height={height}, data.width={width}: {vae} takes {frames}k + 1 frames"
            f" of multiples of {pixels} pixels"
        )
    return channels, (num_frames - 1) // frames + 1, height // pixels, width // pixels
