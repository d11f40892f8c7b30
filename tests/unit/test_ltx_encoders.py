"""LTX-Video: VAE, text encoder and coordinates against diffusers' own pipelines (0.42)."""

import json
import shutil
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from diffusers import LTXConditionPipeline, LTXPipeline

from distill.data.encoders.choose import choose_encoders
from distill.data.encoders.image import ImageInput
from distill.data.encoders.ltx import LtxVideoCodec
from distill.data.videos.decode import ClipFormat
from models.families.ltx import video_coordinates
from tests.encoded import check_decoded, encode_source
from tests.tiny_ltx_pipeline import build_tiny_ltx_pipeline
from tests.unit.refused import change, check_no_encoders, refused

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
CLIP = ClipFormat(num_frames=17, height=64, width=96, fps=24.0)
CAPTION = "a red &amp; blue  square"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_ltx_pipeline(tmp_path_factory.mktemp("ltx"))


@pytest.fixture(scope="module")
def later(tmp_path_factory):
    """Write a folder like those of 0.9.5 and later: another pipeline, and a VAE that takes a time."""
    return build_tiny_ltx_pipeline(
        tmp_path_factory.mktemp("later"), timestep_conditioning=True, pipeline="LTXConditionPipeline"
    )


def test_sizes(folder):
    found = choose_encoders(folder)
    assert found.latent_shape(CLIP) == (8, 3, 2, 3)
    assert found.condition_shapes(CLIP, 128, None) == {
        "text": (128, 32), "text_mask": (128,), "latent_spacing": (4,)
    }  # fmt: skip
    pipeline = LTXPipeline.from_pretrained(folder)
    assert (found.temporal, found.spatial) == (
        pipeline.vae_temporal_compression_ratio,
        pipeline.vae_spatial_compression_ratio,
    )


@pytest.mark.parametrize(("which", "tokens"), [("folder", 128), ("later", 256)])
def test_text_is_that_of_the_pipeline_where_it_counts(request, which, tokens):
    path = request.getfixturevalue(which)
    kind = LTXPipeline if which == "folder" else LTXConditionPipeline
    encoders = choose_encoders(path)
    given = encoders.text_tensors(encoders.text_encoder(max_tokens=tokens, **CPU).embeddings(CAPTION), tokens)
    with torch.no_grad():  # else torch takes another kernel
        theirs, mask, _, _ = kind.from_pretrained(path).encode_prompt(
            CAPTION, do_classifier_free_guidance=False, max_sequence_length=tokens
        )
    assert 1 < mask.sum() < tokens and torch.equal(given["text_mask"], mask[0])
    assert torch.allclose(given["text"][mask[0]], theirs[0][mask[0]], atol=1e-6)
    assert not given["text"][~mask[0]].any()


def test_remarks_are_made_where_the_pipeline_is_guessed(folder, later, tmp_path):
    assert choose_encoders(folder).remarks(CLIP, 128, None) == choose_encoders(later).remarks(CLIP, 40, None) == []
    assert len(choose_encoders(folder).remarks(CLIP, 40, None)) == 1, "LTXPipeline fills captions up to 128 tokens"
    alone = shutil.copytree(folder, tmp_path / "copy")
    (alone / "model_index.json").unlink()
    assert len(choose_encoders(alone).remarks(CLIP, 128, None)) == 1
    (alone / "model_index.json").write_text('{"_class_name": "LTXLatentUpsamplePipeline"}')
    assert len(choose_encoders(alone).remarks(CLIP, 128, None)) == 1
    for pipeline, tokens in (("LTXImageToVideoPipeline", 128), ("LTXConditionPipeline", 256)):
        (alone / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
        found = choose_encoders(alone)
        image = found.inspect_image("data.encoders=x")
        assert image == ImageInput(latents="first_frame") and not found.remarks(CLIP, tokens, None), pipeline
        assert found.condition_shapes(CLIP, 128, image)["first_frame"] == (8, 1, 2, 3), pipeline


@pytest.mark.parametrize("which", ["folder", "later"])
def test_pixels_are_those_of_the_pipeline(request, which):
    """A VAE that takes a time and draws noise decodes at the pipeline's time 0, with different noise for each clip."""
    path = request.getfixturevalue(which)
    codec = choose_encoders(path).codec(tiling=False, **CPU)
    assert isinstance(codec, LtxVideoCodec)
    pipeline = LTXPipeline.from_pretrained(path)
    vae = pipeline.vae
    video = torch.rand(3, 17, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = codec.encode(video)
    with torch.no_grad():
        z = vae.encode(video[None]).latent_dist.mode()
    normal = pipeline._normalize_latents(z, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    assert torch.allclose(latents, normal[0], atol=1e-5) and latents.shape == (8, 3, 2, 3)
    back = pipeline._denormalize_latents(normal, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    torch.manual_seed(0)
    with torch.no_grad():
        theirs = vae.decode(back, torch.zeros(1) if vae.config.timestep_conditioning else None).sample
        again = vae.decode(back, torch.zeros(1) if vae.config.timestep_conditioning else None).sample
    assert (which == "later") == (not torch.equal(theirs, again)), "the decoder draws noise"
    check_decoded(codec, latents, theirs[0])


def test_a_vae_in_bf16_keeps_its_statistics(folder):
    codec = choose_encoders(folder).codec(device=torch.device("cpu"), dtype=torch.bfloat16, tiling=True)
    whole = choose_encoders(folder).codec(tiling=False, **CPU)
    assert codec.vae.dtype == torch.bfloat16 and codec.vae.use_tiling
    assert torch.equal(codec.mean, whole.mean) and torch.equal(codec.std, whole.std)
    assert torch.equal(whole.mean.flatten(), whole.vae.latents_mean) and whole.mean.any()


def test_coordinates_are_those_of_the_pipelines(folder, later):
    """Coordinates equal ``rope_interpolation_scale`` in every bit. LTXConditionPipeline multiplies in another order."""
    grid = (3, 2, 3)
    rope = LTXPipeline.from_pretrained(folder).transformer.rope
    spacing = choose_encoders(folder).clip_tensors(CLIP)["latent_spacing"][None]
    tokens = torch.zeros(1, 18, 8)
    theirs = rope(tokens, *grid, rope_interpolation_scale=(8 / 24.0, 32, 32))
    ours = rope(tokens, video_coords=video_coordinates(spacing, grid))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    ids = LTXConditionPipeline._prepare_video_ids(1, *grid)
    ids = LTXConditionPipeline._scale_video_ids(ids).float()
    ids[:, 0] *= 1 / 24.0
    spacing = choose_encoders(later).clip_tensors(CLIP)["latent_spacing"][None]
    assert torch.allclose(video_coordinates(spacing, grid), ids, rtol=1e-5)
    assert not torch.allclose(rope(tokens, video_coords=ids)[0], theirs[0], atol=0.1), "the two differ"


@pytest.mark.slow
def test_the_cache_tells_the_pipelines_apart_and_a_fingerprint_the_frame_rate(tmp_path, folder):
    """Both pipelines have the same text encoder, but only one of them lets it see the padding of a caption."""
    other = shutil.copytree(folder, tmp_path / "copy")
    change(other / "model_index.json", _class_name="LTXConditionPipeline")
    (tmp_path / "captions.txt").write_text("a red square\n")

    data = partial(encode_source, tmp_path / "captions.txt", max_text_tokens=40, **asdict(CLIP))
    first, second, slower = data(folder), data(other), data(folder, fps=12.0)
    assert len(list((tmp_path / "cache").iterdir())) == 3
    assert not torch.equal(first[0]["text"], second[0]["text"])
    assert torch.equal(first[0]["text"], slower[0]["text"])
    assert len({first.fingerprint, second.fingerprint, slower.fingerprint}) == 3
    condition = first.condition(["a red square", "a red square"])
    assert {name: tuple(value.shape) for name, value in condition.tensors.items()} == {
        "text": (2, 40, 32), "text_mask": (2, 40), "latent_spacing": (2, 4),
    }  # fmt: skip
    assert condition.tensors["text_mask"].dtype == torch.bool
    assert condition.null.tensors["text_mask"].sum() == 2, "the empty caption is one token"
    rounded = condition.to(torch.bfloat16)
    assert rounded.tensors["latent_spacing"].dtype == torch.float32 and rounded.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("part", "settings", "named"),
    [
        ("vae", {"latent_channels": "8"}, "latent_channels"),
        ("vae", {"timestep_conditioning": 1}, "timestep_conditioning"),
        ("vae", {"spatial_compression_ratio": 0}, "spatial_compression_ratio"),
        ("text_encoder", {"architectures": ["UMT5EncoderModel"]}, ""),
        ("text_encoder", {"d_model": None}, ""),
        ("transformer", {"patch_size": 2}, "patch_size"),
    ],
)
def test_what_is_no_ltx_is_refused_by_name(folder, tmp_path, part, settings, named):
    check_no_encoders(shutil.copytree(folder, tmp_path / "copy"), f"{part}/config.json", settings, named)


def test_clips_that_the_vae_would_cut_are_refused(folder):
    for setting, value in (("num_frames", 16), ("height", 48)):
        with refused(setting):
            choose_encoders(folder).latent_shape(replace(CLIP, **{setting: value}))
