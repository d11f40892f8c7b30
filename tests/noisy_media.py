"""Video and sound files of noise, stored without loss."""

import av
import numpy as np
import torch
from PIL import Image


def write_clip(file, frames, size, rate=8000, sound=None):
    """Write a clip of noise at 24 fps, without loss, and return its frames and its sound (2, samples)."""
    levels = torch.randint(256, (frames, 6, 8, 3), generator=torch.Generator().manual_seed(frames), dtype=torch.uint8)
    pictures = [np.array(Image.fromarray(x.numpy()).resize(size, Image.Resampling.BILINEAR)) for x in levels]
    with av.open(str(file), "w") as container:
        stream = container.add_stream("ffv1", rate=24, width=size[0], height=size[1], pix_fmt="bgr0")
        track = None if sound is None else container.add_stream("pcm_f32le", rate=rate, layout="stereo")
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
        if track is not None:
            _mux_sound(container, track, sound, rate)
    return np.stack(pictures)


def _mux_sound(container, track, sound, rate):
    frame = av.AudioFrame.from_ndarray(sound.T.reshape(1, -1).contiguous().numpy(), format="flt", layout="stereo")
    frame.sample_rate, frame.pts = rate, 0
    container.mux(track.encode(frame))
    container.mux(track.encode())


def write_sound(file, sound, rate=8000):
    with av.open(str(file), "w") as container:
        _mux_sound(container, container.add_stream("pcm_f32le", rate=rate, layout="stereo"), sound, rate)
