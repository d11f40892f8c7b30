"""A test-sized Wan pipeline folder with random weights, and small clips.

    python -m tests.tiny_pipeline FOLDER [--seed 0] [--image | --frame] [--boundary 0.875]

writes a folder in diffusers layout that ``WanPipeline.from_pretrained`` loads: nothing is downloaded.
"""

import argparse
import csv
import inspect
import string
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch

LATENT_CHANNELS = 16
TEXT_WIDTH = 32
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 70, 220),
    "yellow": (230, 220, 50),
    "white": (235, 235, 235),
    "purple": (150, 50, 190),
}


def build_tiny_pipeline(
    folder: str | Path,
    seed: int = 0,
    *,
    image: bool = False,
    frame: bool = False,
    boundary: float | None = None,
    text_width: int = TEXT_WIDTH,
) -> Path:
    """Write vae/, text_encoder/, tokenizer/, transformer/, scheduler/ and model_index.json; returns the folder.

    With ``image`` an image-to-video pipeline, with image_encoder/ and image_processor/ too (5 features of width 20).
    With ``frame`` one like Wan 2.2's TI2V: a residual VAE of 48 channels, 16x in space, and ``expand_timesteps``.
    With ``boundary`` one like Wan 2.2's A14B: transformer_2/ too, and with ``image`` no image encoder.

    VAE 16 channels, 4x in time, 8x in space, with ``latents_mean`` and ``latents_std`` measured on smooth noise, so
    that latents are about unit scale; transformer 2 layers of 4 heads x 24, patches (1, 2, 2).
    """
    from diffusers import (
        AutoencoderKLWan,
        UniPCMultistepScheduler,
        WanImageToVideoPipeline,
        WanPipeline,
        WanTransformer3DModel,
    )
    from transformers import UMT5Config, UMT5EncoderModel

    vae_settings = dict(
        base_dim=4,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )
    channels = 48 if frame else LATENT_CHANNELS
    if frame:
        vae_settings |= dict(z_dim=channels, latents_mean=[0.0] * channels, latents_std=[1.0] * channels)
        vae_settings |= dict(is_residual=True, in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16)
    with torch.random.fork_rng(devices=[]):  # the caller's random state does not change
        torch.manual_seed(seed)
        vae = AutoencoderKLWan(**vae_settings).eval()
        noise = torch.randn(1, 3, 3, 4, 4)
        video = torch.nn.functional.interpolate(noise, size=(17, 64, 64), mode="trilinear").clamp(-1, 1)
        with torch.no_grad():
            z = vae.encode(video).latent_dist.mode()
        vae.register_to_config(
            latents_mean=z.mean(dim=(0, 2, 3, 4)).tolist(), latents_std=z.std(dim=(0, 2, 3, 4)).clamp_min(1e-3).tolist()
        )
        tokenizer = _tokenizer()
        text_encoder = UMT5EncoderModel(
            UMT5Config(vocab_size=len(tokenizer), d_model=text_width, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        ).eval()
        settings = dict(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=24,
            in_channels=channels + (4 + channels if image else 0),
            out_channels=channels,
            text_dim=text_width,
            freq_dim=32,
            ffn_dim=192,
            num_layers=2,
            rope_max_seq_len=128,
            **({"image_dim": 20, "added_kv_proj_dim": 96} if image and boundary is None else {}),
        )
        transformer = WanTransformer3DModel(**settings).eval()
        parts = {"expand_timesteps": True} if frame else {}
        if boundary is not None:
            parts = {"transformer_2": WanTransformer3DModel(**settings).eval(), "boundary_ratio": boundary}
            parts |= {"image_encoder": None, "image_processor": None} if image else {}
        elif image:
            parts = _image_parts()
    pipeline = (WanImageToVideoPipeline if image else WanPipeline)(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        **parts,
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return Path(folder)


def _image_parts() -> dict[str, object]:
    """Return a CLIP of 2 x 2 patches and its processor."""
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 20, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
    encoder = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=16, patch_size=8)).eval()
    processor = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return {"image_encoder": encoder, "image_processor": processor}


def _tokenizer():
    """Return a T5 tokenizer of single characters and a few words, so that ASCII captions have different tokens."""
    from transformers import T5Tokenizer

    words = ["▁a", "▁the", "▁of", "▁on", "▁in", "ing", "er", *(f"▁{color}" for color in COLORS)]
    letters = list(string.ascii_letters + string.digits + string.punctuation)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(word, -1.0) for word in words] + [(letter, -3.0) for letter in letters]
    return T5Tokenizer(vocab=pieces, extra_ids=0)


def render_clips(
    folder: str | Path,
    n: int = 3,
    *,
    frames: int = 24,
    fps: int = 16,
    height: int = 48,
    width: int = 80,
    broken: bool = False,
    short: bool = False,
    missing: bool = False,
) -> Path:
    """Write ``n`` clips of a bright square that drifts over a gray ramp, and metadata.csv. Return the folder.

    ``broken`` adds a row for broken.mp4 (a truncated mp4), ``short`` for short.mp4 (3 frames), ``missing`` for a file
    that does not exist. These rows come first, in this order, so that skipping them shifts every good clip.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    if broken:
        write_video(folder / "broken.mp4", moving_square("white", frames, height, width), fps=fps)
        data = (folder / "broken.mp4").read_bytes()
        (folder / "broken.mp4").write_bytes(data[: len(data) // 2])  # the index at its end is lost
        rows.append(("broken.mp4", "a broken clip"))
    if short:
        write_video(folder / "short.mp4", moving_square("white", 3, height, width), fps=fps)
        rows.append(("short.mp4", "a short clip"))
    if missing:
        rows.append(("missing.mp4", "a missing clip"))
    names = list(COLORS)
    for i in range(n):
        color = names[i % len(names)]
        write_video(folder / f"clip_{i}.mp4", moving_square(color, frames, height, width, speed=1 + i), fps=fps)
        rows.append((f"clip_{i}.mp4", f"a {color} square, drifting"))
    write_metadata(folder, rows)
    return folder


def write_metadata(
    folder: str | Path, rows: list[tuple[str, str]], header: tuple[str, ...] = ("file_name", "caption")
) -> None:
    """Write ``folder``/metadata.csv."""
    with (Path(folder) / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def moving_square(color: str, frames: int, height: int, width: int, speed: int = 1) -> np.ndarray:
    """Return uint8 (frames, height, width, 3): a square of ``color`` that moves right, ``speed`` pixels per frame."""
    ramp = np.linspace(20, 110, width, dtype=np.float32)[None, None, :, None]
    video = np.broadcast_to(ramp, (frames, height, width, 3)).astype(np.uint8)
    side = height // 3
    for k in range(frames):
        left = (k * speed) % max(1, width - side)
        video[k, side : 2 * side, left : left + side] = COLORS[color]
    return video


def write_video(
    file: str | Path,
    video: np.ndarray,
    *,
    fps: Fraction | int,
    colorspace: int | None = None,
    times: list[int] | None = None,
    pixel_aspect: Fraction | None = None,
) -> None:
    """Encode uint8 (T, H, W, 3) as H.264, or as MPEG-4 if the wheel lacks libx264.

    ``colorspace``: AVColorSpace to convert to and tag (1 BT.709, 6 BT.601); None leaves the file untagged.
    ``times``: a time stamp per frame, in frames, for variable frame rates.
    """
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = video.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "8"} if codec == "libx264" else {"qscale": "2"}
        if pixel_aspect is not None:
            stream.codec_context.sample_aspect_ratio = pixel_aspect
        if colorspace is not None:
            stream.codec_context.colorspace = colorspace
            stream.codec_context.color_range = 1
        for k, picture in enumerate(video):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts, frame.time_base = k if times is None else times[k], 1 / Fraction(fps)
            if colorspace is not None:
                frame = frame.reformat(format="yuv420p", dst_colorspace={1: 1, 6: 5}[colorspace], dst_color_range=1)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def new_folder(name: str) -> Path:
    """Parse a folder for ``argparse``. It must be new or empty."""
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise argparse.ArgumentTypeError(f"{folder} is there and not empty; give a new folder")
    return folder


def command(build: Callable[..., Path]) -> None:
    """Command line of ``build``: write the pipeline folder. Its options are the keywords of ``build``."""
    parser = argparse.ArgumentParser(description="Write a test-sized pipeline folder with random weights.")
    parser.add_argument("folder", type=new_folder)
    for name, option in list(inspect.signature(build, eval_str=True).parameters.items())[1:]:
        if isinstance(option.default, bool):
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=float if name == "boundary" else type(option.default))
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    print(build(given.pop("folder"), **given))


if __name__ == "__main__":
    command(build_tiny_pipeline)
