"""Samples of the video alone, for tests whose formulas are of tensors."""

from dataclasses import replace
from functools import wraps

from torch import Tensor

from models.sample import VIDEO, Sample


def video(x: Tensor) -> Sample:
    return Sample({VIDEO: x})


def takes_samples(velocity):
    """Let a stand-in's ``velocity``, written for tensors, take samples of the video alone, and tensors too."""

    @wraps(velocity)
    def wrapped(self, x, *arguments, clean=None, **more):
        if isinstance(x, Tensor):
            return velocity(self, x, *arguments, clean=clean, **more)
        clean = None if clean is None else clean.video
        return replace(x, parts={VIDEO: velocity(self, x.video, *arguments, clean=clean, **more)})

    return wrapped
