"""LTX-2: both VAEs, vocoder, spectrogram and text encoder against diffusers' own pipeline (0.42)."""

import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline, LTX2Pipeline, LTX2VideoDiffusionDecoderModel
from PIL import Image

from distill.data.encoders.choose import choose_encoders
from distill.data.encoders.image import as_frame, stretched
from distill.data.encoders.ltx2 import log_mel
from distill.data.encoders.ltx2_5 import window_attention
from distill.data.sets.encode import Encoding
from distill.data.videos.decode import ClipFormat
from fsdp_cp.rng import stream
from tests.encoded import encode_source
from tests.tiers import parametrize
from tests.tiny_ltx2_pipeline import build_tiny_ltx2_pipeline
from tests.unit.refused import check_no_encoders, refused

CPU = {"device": torch.device("cpu")}
CLIP = ClipFormat(num_frames=17, height=64, width=96, fps=24.0)
CAPTION = "  a red &amp; blue  square "


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {v: build_tiny_ltx2_pipeline(tmp_path_factory.mktemp("ltx2") / v, version=v) for v in ("2.0", "2.3", "2.5")}


@pytest.mark.parametrize(
    ("frames", "fps", "rows"), [(17, 24.0, 18), (121, 24.0, 126), (241, 25.0, 241), (241, 24.0, 251), (505, 25.0, 505)]
)
def test_a_clip_has_the_rows_of_sound_of_the_pipeline(folders, frames, fps, rows):
    """Centered windows give more latents than rows at every length; samples are exactly those of the rows."""
    folder, clip = choose_encoders(folders["2.3"]), replace(CLIP, num_frames=frames, fps=fps)
    assert folder.latent_shapes(clip) == {"video": (8, (frames - 1) // 8 + 1, 2, 3), "audio": (2, rows, 4)}
    sound = folder.sound_format(clip)
    assert sound == (16000, 640 * rows, 2)
    assert log_mel(torch.randn(2, sound.samples), 16000, 160, 16).shape == (2, 4 * rows + 1, 16)


def test_the_spectrogram_is_written_out():
    """One window by hand: Slaney's triangles, of area 2 / band in hertz, on magnitudes of a mirrored waveform."""
    sound = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = log_mel(sound, 16000, 160, 64)[0]
    mel = np.linspace(0, 15 + 27 * np.log(8000 / 1000) / np.log(6.4), 66)
    edges = np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))
    hertz = np.arange(513) * 16000 / 1024
    for frame in (0, 7, 25):
        whole = np.pad(sound[0].numpy(), 512, mode="reflect")[160 * frame : 160 * frame + 1024]
        magnitude = np.abs(np.fft.rfft(whole * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1024) / 1024))))
        for band in (0, 20, 63):
            low, mid, high = edges[band : band + 3]
            triangle = np.clip(np.minimum((hertz - low) / (mid - low), (high - hertz) / (high - mid)), 0, None)
            wanted = np.log(max(1e-5, (triangle * 2 / (high - low) * magnitude).sum()))
            assert abs(float(found[frame, band]) - wanted) < 1e-6, "the window is fp32"
    assert (log_mel(torch.zeros(1, 4000), 16000, 160, 64) == torch.tensor(1e-5).log()).all(), "silence"


@pytest.mark.parametrize("version", ["2.0", "2.3", "2.5"])
def test_texts_are_those_of_the_pipeline(folders, version):
    pipeline = LTX2Pipeline.from_pretrained(folders[version], dtype=torch.bfloat16)
    encoder = choose_encoders(folders[version]).text_encoder(max_tokens=32, dtype=torch.bfloat16, **CPU)
    for caption in (CAPTION, ""):
        found = encoder.embeddings(caption)
        with torch.no_grad():
            hidden, mask, _, _ = pipeline.encode_prompt(caption, None, False, max_sequence_length=32)
            video, audio, ones = pipeline.connectors(hidden, mask, padding_side="left")
        assert 0 < mask.sum() < 32 and ones.all(), "registers fill the caption up"
        assert torch.equal(found["text"], video[0].float()) and torch.equal(found["audio_text"], audio[0].float())


@parametrize("version", ["2.0", "2.5", "2.3"], quick=2)
def test_clips_are_those_of_the_pipeline(folders, version):
    """The pipeline's own normalization, packing and decoding, of both parts; 2.5's diffusion decoder draws noise."""
    folder = choose_encoders(folders[version])
    codec, pipeline = folder.codec(tiling=False, dtype=torch.float32, **CPU), LTX2Pipeline.from_pretrained(folder.path)
    generator = torch.Generator().manual_seed(0)
    video = torch.rand(3, 17, 64, 96, generator=generator) * 2 - 1
    sound = 0.1 * torch.randn(2, folder.sound_format(CLIP).samples, generator=generator)
    found = codec.encode_clip(video, sound)
    assert found.shapes == folder.latent_shapes(CLIP)
    mel, statistics = log_mel(sound, 16000, 160, 16)[None], (pipeline.vae.latents_mean, pipeline.vae.latents_std)
    with torch.no_grad():
        z = pipeline.audio_vae.encode(mel).latent_dist.mode()
        assert z.shape[2] == 19, "one more than the rows"
        latents = pipeline.prepare_audio_latents(latents=z[:, :, :18], dtype=torch.float32)
        assert torch.allclose(pipeline._pack_audio_latents(found.parts["audio"]), latents, atol=1e-5)
        frames = pipeline.prepare_latents(latents=pipeline.vae.encode(video[None]).latent_dist.mode())
        assert torch.allclose(pipeline._pack_latents(found.video), frames, atol=1e-5)
        decoder, z_video = pipeline.vae, pipeline._denormalize_latents(found.video, *statistics)
        options = {}
        if version == "2.5":
            decoder = LTX2VideoDiffusionDecoderModel.from_pretrained(folder.path / "diffusion_decoder")
            options = {"generator": stream(0, "decode/noise")}
        decoded = decoder.decode(z_video, **options).sample[0]
        wave, rate = codec.decode_sound(found.parts["audio"])
        theirs = pipeline.vocoder(pipeline.audio_vae.decode(z[:, :, :18]).sample)
    levels = codec.decode(found.video)[0].permute(3, 0, 1, 2).float()
    assert (levels - (decoded.clamp(-1, 1) + 1) * 127.5).abs().max() < 0.51 and levels.std() > 1
    assert torch.allclose(wave, theirs, atol=1e-5) and wave.std() > 1e-3
    assert rate == pipeline.vocoder.config["output_sampling_rate"] and abs(wave.shape[2] / rate - 0.72) < 0.04


def test_embeddings_are_stored_in_bf16(folders, tmp_path):
    """A set of captions holds what the encoder computed, in half the bytes."""
    (tmp_path / "captions.txt").write_text("a red square\na blue square\n")
    data = encode_source(tmp_path / "captions.txt", folders["2.3"], max_text_tokens=32, **asdict(CLIP))
    encoder = choose_encoders(folders["2.3"]).text_encoder(max_tokens=32, dtype=torch.bfloat16, **CPU)
    for name, text in encoder.embeddings("a blue square").items():
        assert data.embeddings("a blue square")[name].dtype == torch.bfloat16
        assert torch.equal(data[1][name], text) and data[1][name].dtype == torch.float32
    assert data[1]["fps"].tolist() == [24.0] and data.latent_shapes["audio"] == (2, 18, 4)


@pytest.mark.parametrize(
    ("part", "settings", "named"),
    [
        ("vae", {"latent_channels": "8"}, "latent_channels"),
        ("audio_vae", {"base_channels": 9}, "base_channels"),
        ("audio_vae", {"in_channels": 1}, "in_channels"),
        ("audio_vae", {"mel_bins": None}, "base_channels"),
        ("vocoder", {"_class_name": "Vocoder"}, "LTX2Vocoder"),
        ("connectors", {"text_proj_in_factor": 49}, "text_encoder/"),
        ("connectors", {"audio_connector_num_learnable_registers": None}, "registers"),
        ("text_encoder", {"architectures": ["Gemma4ForConditionalGeneration"]}, "Gemma4Unified"),
        (".", {"_class_name": "LTX2DFRPipeline"}, "DFR"),
        ("diffusion_decoder", {"latent_channels": 4}, "latent_channels"),
        ("diffusion_decoder", {"decoder_stage_kernels": [[1, 1]] * 4}, "decoder_stage_kernels"),
        ("diffusion_decoder", {"decoder_stage_channels": [64, 64, 16, 16, 16]}, "diffusion_decoder/"),
        ("diffusion_decoder", {"_class_name": "AutoencoderKLLTX2Video"}, "LTX2VideoDiffusionDecoderModel"),
        ("transformer", {"patch_size": 2}, "patch_size"),
    ],
)
def test_what_is_no_ltx2_is_refused_by_name(folders, tmp_path, part, settings, named):
    copied = shutil.copytree(folders["2.5"], tmp_path / "copy")
    check_no_encoders(copied, "model_index.json" if part == "." else f"{part}/config.json", settings, named)


def test_what_does_not_fit_is_refused(folders, tmp_path):
    folder = choose_encoders(folders["2.3"])
    for setting, value in (("num_frames", 16), ("height", 48), ("width", 80)):
        with refused(f"data.{setting}"):
            folder.latent_shapes(replace(CLIP, **{setting: value}))
    with refused("data.fps"):
        replace(CLIP, fps=0.0)
    with refused("data.max_text_tokens"):
        folder.condition_shapes(CLIP, 30, None)
    with refused("data.num_frames"):  # 1 frame, and the decoder's last window is 5
        choose_encoders(folders["2.5"]).latent_shapes(replace(CLIP, num_frames=1))
    copied = shutil.copytree(folders["2.3"], tmp_path / "copy")
    shutil.rmtree(copied / "connectors")
    with refused("connectors/"):
        choose_encoders(copied)
    assert len(folder.remarks(CLIP, 256, None)) == 1 and not folder.remarks(CLIP, 1024, None)


@pytest.mark.parametrize("version", ["2.3", "2.5"])
def test_a_first_frame_is_that_of_the_pipeline(folders, tmp_path, version):
    """A picture of another shape is re-compressed, then stretched; one cut from a clip is neither."""
    levels = torch.randint(256, (9, 7, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    picture = Image.fromarray(levels.numpy()).resize((70, 90), Image.Resampling.BILINEAR)
    picture.save(tmp_path / "a.png")
    (tmp_path / "table.csv").write_text("image,caption\na.png,a red square\n")
    sizes = asdict(CLIP) | {"max_text_tokens": 32}
    data = encode_source(tmp_path / "table.csv", folders[version], image="first_frame", **sizes)
    pipeline = LTX2ImageToVideoPipeline.from_pretrained(folders[version])
    kept = {}
    pipeline.prepare_latents = lambda image, *_args, **_options: kept.update(image=image) or 1 / 0
    with pytest.raises(ZeroDivisionError):
        pipeline(picture, prompt="a", height=64, width=96, num_frames=17, max_sequence_length=32, guidance_scale=1.0)
    with torch.no_grad():
        z = pipeline.vae.encode(kept["image"].float()[:, :, None]).latent_dist.mode()
    wanted = pipeline._normalize_latents(z, pipeline.vae.latents_mean, pipeline.vae.latents_std)[0]
    assert torch.allclose(data[0]["first_frame"], wanted, atol=1e-5) and wanted.shape == (8, 1, 2, 3)
    plain = choose_encoders(folders[version]).codec(tiling=False, dtype=torch.float32, **CPU)
    unpacked = as_frame(stretched(torch.from_numpy(np.array(picture)), 64, 96, Image.Resampling.BILINEAR))
    assert (plain.encode(unpacked) - wanted).abs().max() > 1e-3, "the check can tell a picture that is not compressed"
    with refused("data.image=both"):
        Encoding(encoders=str(folders[version]), num_frames=17, height=64, width=96, image="both").inspect()


@pytest.mark.parametrize("window", [(1, 1, 1), (3, 5, 7), (11, 11, 11)], ids=str)
def test_a_window_attends_as_if_written_out(window):
    """Blocks of queries that do not divide the grid, against a mask of all pairs in float64."""
    grid = (13, 18, 35)
    q, k, v = torch.randn(3, 1, *grid, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    places = torch.cartesian_prod(*map(torch.arange, grid))
    some = places[::97]
    seen = torch.ones(len(some), len(places), dtype=torch.bool)
    for axis, (size, width) in enumerate(zip(grid, window, strict=True)):
        start = (some[:, axis, None] - width // 2).clamp(0, size - width)
        seen &= (places[:, axis] >= start) & (places[:, axis] < start + width)
    assert (seen.sum(1) == np.prod(window)).all()
    weights = torch.einsum("qhd,khd->hqk", q.flatten(1, 3)[0, ::97], k.flatten(1, 3)[0])
    weights = weights.masked_fill(~seen, -torch.inf).softmax(-1)
    wanted = torch.einsum("hqk,khd->qhd", weights, v.flatten(1, 3)[0])
    found = window_attention(q, k, v, window).flatten(1, 3)[0, ::97]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
