"""Encoders against diffusers' own pipeline, and directories that do not fit."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from distill.data.encoders.choose import choose_encoders
from distill.data.encoders.wan import TextEncoder, VideoCodec, pad_text
from distill.data.videos.decode import ClipFormat
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.errors import NotFinite, UserError
from tests.encoded import check_decoded
from tests.tiers import long, slow_case
from tests.tiny_pipeline import LATENT_CHANNELS, build_tiny_pipeline
from tests.unit.refused import change, refused

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
CLIP = ClipFormat(num_frames=9, height=32, width=48, fps=8)


@pytest.fixture(scope="module")
def pipeline(tiny):
    from diffusers import WanPipeline

    return WanPipeline.from_pretrained(tiny)


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "pipeline")


def smooth_video(seed=0):
    noise = torch.randn(1, 3, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    size = (CLIP.num_frames, CLIP.height, CLIP.width)
    return torch.nn.functional.interpolate(noise, size=size, mode="trilinear")[0].clamp(-1, 1)


def test_text_is_what_the_pipeline_makes(tiny, pipeline):
    encoder = TextEncoder(choose_encoders(tiny), max_tokens=40, **CPU)
    for caption in ("a red square", "", "Two  cyclists &amp; a dog.", "longer than forty tokens, " * 4):
        text = encoder.encode(caption)
        wanted, _ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=40)
        torch.testing.assert_close(pad_text(text, 40), wanted[0], rtol=1e-5, atol=1e-5)
        assert text.dtype == torch.float32 and text.abs().sum(dim=1).gt(0).all()
    assert encoder.encode("").shape == (1, 32)  # the end token alone


def test_decode_undoes_encode_as_the_pipeline_does(tiny, pipeline):
    folder, vae = choose_encoders(tiny), pipeline.vae
    codec = VideoCodec(folder, **CPU)
    latents = codec.encode(smooth_video())
    with torch.no_grad():
        z = vae.encode(smooth_video()[None]).latent_dist.mean
        mean, std = (torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
        torch.testing.assert_close(latents[None] / (1.0 / std) + mean, z)  # the line of WanPipeline.__call__
        pixels = vae.decode(z).sample[0]
    assert latents.shape == folder.latent_shape(CLIP) == (LATENT_CHANNELS, 3, 4, 6)
    check_decoded(codec, latents, pixels)


def test_frames_that_are_not_finite_do_not_become_black(tiny):
    codec = VideoCodec(choose_encoders(tiny), **CPU)
    codec.vae.post_quant_conv.weight.data *= 1e38
    with pytest.raises(NotFinite):
        codec.decode(1e3 * torch.ones(1, LATENT_CHANNELS, 1, 4, 6))


@pytest.mark.parametrize("frame", [False, slow_case(True)], ids=["wan2.1", "ti2v"])
def test_a_stream_is_decoded_as_the_whole_clip(tiny, tmp_path, frame):
    codec = VideoCodec(choose_encoders(build_tiny_pipeline(tmp_path, seed=1, frame=True) if frame else tiny), **CPU)
    latents = torch.randn(1, codec.mean.shape[1], 4, 2, 3, generator=torch.Generator().manual_seed(2))
    for sizes in ([1, 2, 1], [2, 2]):  # the second clip begins with nothing of the first
        pieces = [codec.decode_next(z, is_first=i == 0) for i, z in enumerate(latents.split(sizes, dim=2))]
        differences = torch.cat(pieces, dim=1).int() - codec.decode(latents).int()
        assert differences.abs().max() <= 1 and differences.count_nonzero() < 1e-3 * differences.numel(), "rounding"
        codec.decode_next(latents[:, :, :1], is_first=True)


@long
def test_tiles_and_bf16_make_nearly_the_same_clips(tiny):
    """Frames of 288 x 320 pixels exceed a tile of 256. The truth is diffusers' own VAE with tiling."""
    folder = choose_encoders(tiny)
    video = torch.nn.functional.interpolate(smooth_video(), size=(288, 320), mode="bilinear")
    exact, tiled = VideoCodec(folder, **CPU), VideoCodec(folder, **CPU, tiling=True)
    latents, in_tiles = exact.encode(video), tiled.encode(video)
    assert not torch.equal(latents, in_tiles) and relative_error(in_tiles, latents) < 0.2
    exact.vae.enable_tiling()
    assert torch.equal(exact.encode(video), in_tiles)
    half = VideoCodec(folder, device=CPU["device"], dtype=torch.bfloat16)
    assert relative_error(half.encode(video), latents) < 0.05
    difference = half.decode(latents[None]).int() - VideoCodec(folder, **CPU).decode(latents[None]).int()
    assert 0 < difference.abs().float().mean() < 2, "levels of 255"


def test_sizes_come_from_the_layers(copy):
    """The layers decide if a folder lacks scale_factor_* (Wan 2.1) or has wrong values."""
    settings = json.loads((copy / "vae/config.json").read_text())
    settings.pop("scale_factor_temporal")
    settings["scale_factor_spatial"] = 4
    (copy / "vae/config.json").write_text(json.dumps(settings))
    folder = choose_encoders(copy)
    assert (folder.temporal, folder.spatial, folder.patch) == (4, 8, (1, 2, 2))


def test_latent_statistics_left_out_are_wans(copy):
    settings = json.loads((copy / "vae/config.json").read_text())
    for name in ("latents_mean", "latents_std"):
        settings.pop(name)
    (copy / "vae/config.json").write_text(json.dumps(settings))
    codec = VideoCodec(choose_encoders(copy), **CPU)
    assert codec.mean.flatten()[0] == pytest.approx(-0.7571) and codec.std.flatten()[0] == pytest.approx(2.8184)


@pytest.mark.parametrize("patch", [(1, 2, 2), (2, 2, 2)])
def test_a_size_that_does_not_fit_names_one_that_does(copy, patch):
    change(copy / "transformer/config.json", patch_size=patch)
    folder = choose_encoders(copy)
    refused = 0
    for number in range(-1, 40):
        for name in ("num_frames", "height", "width"):
            sizes = {"num_frames": 13, "height": 32, "width": 48}
            try:
                shape = folder.latent_shape(ClipFormat(**(sizes | {name: number}), fps=8))
            except UserError as error:
                refused += 1
                assert f"data.{name}={number} " in str(error) and "\n" not in str(error)
                works = int(re.findall(r"-?\d+", str(error))[-1])
                shape = folder.latent_shape(ClipFormat(**(sizes | {name: works}), fps=8))
            assert min(shape) >= 1
            assert all(side % unit == 0 for side, unit in zip(shape[1:], patch, strict=True))
    assert refused > 41  # most numbers fit nothing


@pytest.mark.parametrize("part", ["vae", "vae/config.json", "tokenizer", "text_encoder/model.safetensors"])
def test_a_folder_without_a_part_is_refused(copy, part):
    shutil.rmtree(copy / part) if (copy / part).is_dir() else (copy / part).unlink()
    with refused("data.encoders"):
        choose_encoders(copy)


@pytest.mark.parametrize("text", ["[", '{"expand_timesteps": "yes"}'])
def test_an_index_that_does_not_say_where_an_image_goes_is_refused(copy, text):
    (copy / "model_index.json").write_text(text)
    with refused("data.encoders=x"):
        choose_encoders(copy).inspect_image("data.encoders=x")


@pytest.mark.parametrize(
    ("file", "load"),
    [
        ("vae/diffusion_pytorch_model.safetensors", lambda folder: VideoCodec(folder, **CPU)),
        ("text_encoder/model.safetensors", lambda folder: TextEncoder(folder, max_tokens=8, **CPU)),
    ],
)
@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape"])
def test_weights_that_do_not_fit_are_refused(copy, file, load, damage):
    """The libraries only warn and use random weights."""
    weights = load_file(copy / file)
    key = next(name for name in sorted(weights) if name != "encoder.embed_tokens.weight")
    if damage == "missing":
        del weights[key]
    elif damage == "unexpected":
        weights["stranger"] = torch.zeros(1)
    elif damage == "shape":
        weights[key] = torch.zeros(*weights[key].shape, 2)
    save_file(weights, copy / file, metadata={"format": "pt"})
    with refused(file.split("/")[0]):
        load(choose_encoders(copy))


@pytest.mark.parametrize("names", [["shared.weight"], ["encoder.embed_tokens.weight"]])
def test_the_tied_word_table_may_be_saved_under_either_name(copy, names):
    """Published umT5 directories differ in this."""
    file = copy / "text_encoder/model.safetensors"
    weights = load_file(file)
    both = ("shared.weight", "encoder.embed_tokens.weight")
    table = next(weights[name] for name in both if name in weights)
    weights = {name: value for name, value in weights.items() if name not in both}
    weights |= {name: table.clone() for name in names}
    save_file(weights, file, metadata={"format": "pt"})
    encoder = TextEncoder(choose_encoders(copy), max_tokens=8, **CPU)
    assert torch.equal(encoder.model.get_input_embeddings().weight, table)
