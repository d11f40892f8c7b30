"""Samples of the video alone, for tests whose formulas are of tensors."""

from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor

from models.sample import VIDEO, Sample


def video(x: Tensor) -> Sample:
    return Sample({VIDEO: x})


class Stub:
    """Stand-in for a role of one network. Subclasses define ``of_video(x, t, condition, r, clean)`` for tensors."""

    has_experts, causal, kept_gathered, boundaries = False, None, nullcontext, ()
    trains_at = staticmethod(lambda time: True)

    def velocity(self, x, t, condition, r=None, *, at=None, clean=None):
        """Take samples of the video alone, as methods call it, and tensors too."""
        if isinstance(x, Tensor):
            return self.of_video(x, t, condition, r=r, clean=clean)
        clean = None if clean is None else clean.video
        return replace(x, parts={VIDEO: self.of_video(x.video, t, condition, r=r, clean=clean)})
