"""MiniMax-H3: both VAEs and the text encoder against the steps of diffusers' modular pipeline (0.42)."""

import json
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from diffusers.image_processor import VaeImageProcessor
from diffusers.modular_pipelines.minimax_h3 import before_encoder as before
from diffusers.modular_pipelines.minimax_h3 import encoders as theirs
from diffusers.modular_pipelines.minimax_h3 import references as refs
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    MiniMaxH3ModularPipeline,
    audio_latent_num_frames,
    video_latent_num_frames,
)
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

from distill.data.base import IMAGES
from distill.data.encoders.choose import choose_encoders
from distill.data.sets.encode import Encoding
from distill.data.sets.encoded_set import EncodedSet
from distill.data.videos.decode import ClipFormat, read_clip
from distill.encode import main as encode
from tests.encoded import encode_source, open_set
from tests.noisy_media import write_clip, write_sound
from tests.tiers import parametrize, slow
from tests.tiny_minimax_h3_pipeline import build_tiny_minimax_h3_pipeline
from tests.tiny_pipeline import render_clips
from tests.unit.refused import check_no_encoders, refusal, refused

CPU = {"device": torch.device("cpu")}
CLIP = ClipFormat(num_frames=22, height=32, width=64, fps=24.0)
COLORS = {name: getattr(MiniMaxH3ModularPipeline, name).fget(None) for name in ("pixel_mean", "pixel_std")}
CAPTION = " a red &amp; blue  square "


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build_tiny_minimax_h3_pipeline(tmp_path_factory.mktemp("minimax_h3") / "pipeline")


@parametrize("frames", [22, 124, 158, 209, 243, 260, 311, 345], quick=3)
def test_a_clip_has_the_latents_of_the_pipeline(path, frames):
    """At 158, 209, 260 and 311 frames the sound of the whole clip would have one latent more."""
    folder = choose_encoders(path)
    rows, latents = audio_latent_num_frames(frames), video_latent_num_frames(frames, 17, 5)
    assert folder.latent_shapes(replace(CLIP, num_frames=frames)) == {
        "video": (24, latents, 2, 4),
        "audio": (32, rows, 2),
    }
    rate, samples, _ = folder.sound_format(replace(CLIP, num_frames=frames))
    sound_vae = AutoencoderKLMiniMaxH3Audio.from_pretrained(path / "audio_vae")
    with torch.no_grad():
        assert sound_vae.encode(torch.zeros(2, 1, samples)).latent_dist.mode().shape[2] == rows
    assert rate == 8000 and abs(samples / rate - frames / 24) <= 0.5 / 40


def test_texts_are_those_of_the_pipeline(path):
    """The state after 50 of 53 layers, without norm; 51 layers are loaded."""
    encoder = choose_encoders(path).text_encoder(max_tokens=32, dtype=torch.bfloat16, **CPU)
    assert len(encoder.model.layers) == 51
    whole = Qwen3VLForConditionalGeneration.from_pretrained(path / "text_encoder", dtype=torch.bfloat16)
    processor = SimpleNamespace(create_mm_token_type_ids=lambda ids: [[0] * len(one) for one in ids])
    for caption, pads in ((CAPTION, False), ("", True)):
        ids = encoder.tokenizer(caption, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            wanted = theirs.get_qwen3vl_prompt_embeds(whole, processor, ids or [encoder.tokenizer.pad_token_id])
        found = encoder.embeddings(caption)["text"]
        assert torch.equal(found, wanted[0].float()) and len(found) == (len(ids) or pads)
    assert len(encoder.embeddings("a" * 40)["text"]) == 32 and len(encoder.cuts) == 1
    encoder.tokenizer = lambda *_, **__: SimpleNamespace(input_ids=[])
    with refused("data.encoders"):
        encoder.encode("unknown")


@slow
def test_clips_are_those_of_the_pipeline(path):
    """The pipeline's pixels and statistics, of both parts, with tiles, as released."""
    folder = choose_encoders(path)
    codec = folder.codec(tiling=False, dtype=torch.float32, **CPU)
    vae = AutoencoderKLMiniMaxH3.from_pretrained(path / "vae")
    sound_vae = AutoencoderKLMiniMaxH3Audio.from_pretrained(path / "audio_vae")
    clip = replace(CLIP, width=288)
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(256, (3, 22, 32, 288), generator=generator)
    sound = 0.1 * torch.randn(2, folder.sound_format(clip).samples, generator=generator)
    found = codec.encode_clip(levels / 127.5 - 1, sound)
    assert found.shapes == folder.latent_shapes(clip)

    mean, std = (torch.tensor(value).view(1, 3, 1, 1, 1) for value in COLORS.values())
    video_mean, video_std = (torch.tensor(vae.config[k]).view(1, -1, 1, 1, 1) for k in ("latents_mean", "latents_std"))
    sound_mean, sound_std = (torch.tensor(sound_vae.config[k]).view(1, -1, 1) for k in ("latents_mean", "latents_std"))
    with torch.no_grad():
        vae.quant_conv.weight[24:], vae.quant_conv.bias[24:] = 0, -30  # the pipeline draws from the posterior
        latents = theirs.encode_vae_condition(vae, levels[None], *COLORS.values())
        assert 0.5 < found.video.std() < 2 and torch.allclose(found.video, latents, atol=1e-2), "fp16"
        z = sound_vae.encode(sound[:, None]).latent_dist.mode()
        rows = ((z - sound_mean) / sound_std).permute(1, 2, 0)
        assert torch.allclose(found.parts["audio"][0], rows, atol=1e-5)
        pixels = (vae.decode(found.video * video_std + video_mean).sample * std + mean).clamp(0, 1)[0]
        waves = sound_vae.decode(z).sample[:, 0]
    decoded = codec.decode(found.video)[0].permute(3, 0, 1, 2).float()
    assert decoded.shape[1] == 22 and (decoded - pixels * 255).abs().max() < 0.51 and decoded.std() > 1
    wave, rate = codec.decode_sound(found.parts["audio"])
    assert torch.allclose(wave[0], waves, atol=1e-5) and wave.std() > 1e-4 and rate == 8000


@slow
def test_a_set_tells_the_length_of_a_text(path, tmp_path):
    (tmp_path / "captions.txt").write_text("a red square\na blue square\n")
    data = encode_source(tmp_path / "captions.txt", path, max_text_tokens=32, **asdict(CLIP))
    assert [data[i]["text_length"].item() for i in range(2)] == [12, 13] and data[0]["text"].shape == (32, 24)
    assert data.condition(["a blue square"]).null.tensors["text_length"].tolist() == [1]
    assert data.embeddings("a blue square")["text"].dtype == torch.bfloat16
    assert not data[0]["text"][12:].any() and data[0]["text"][11].any()


def test_lightx2v_s_embeddings_are_taken_as_they_are(path, tmp_path, capsys):
    texts = {caption: torch.zeros(0) for caption in ("a red square", "a blue square", "with a keyframe")}
    encoder = choose_encoders(path).text_encoder(max_tokens=32, dtype=torch.bfloat16, **CPU)
    rows = []
    (tmp_path / "source" / "conditions").mkdir(parents=True)
    for number, caption in enumerate(texts):
        task = "i2av" if "keyframe" in caption else "t2av"
        texts[caption] = text = (1.01 * encoder.embeddings(caption)["text"]).bfloat16()  # not what we would make
        name = f"conditions/condition_{number:08d}.pt"
        positive = {"prompt_embeds": text[None], "text_token_tags": torch.ones(len(text), dtype=torch.long)}
        positive |= {"task": task, "keyframe_anchors": torch.empty(0, dtype=torch.long), "target_num_frames": 124}
        metadata = {"model": {"component_files": [{"path": "vae/config.json", "size": 1}]}, "media": {}}
        made = {"cache_schema_version": 3, "cache_metadata": metadata, "conditioning": {"positive": positive}}
        torch.save(made | {"prompt": caption, "source_id": number, "task": task}, tmp_path / "source" / name)
        rows.append({"id": number, "task": task, "caption": caption, "condition_path": name, "num_frames": 124})
    table = tmp_path / "source" / "metadata.jsonl"

    def encoded(out, rows):
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sizes = ["--num-frames", "124", "--height", "32", "--width", "64", "--fps", "24", "--max-text-tokens", "32"]
        return encode([str(table.parent), str(out), "--encoders", str(path), "--device", "cpu", *sizes])

    assert encoded(tmp_path / "set", rows) == 0
    made = EncodedSet(tmp_path / "set", "SET")
    assert list(made.captions) == list(texts)[:2] and not made.parts
    for i, text in enumerate([*texts.values()][:2]):
        assert torch.equal(made.text(made.text_of(i))["text"], text.float())
    without_task = [{"caption": row["caption"], "condition_path": row["condition_path"]} for row in rows]
    with_sound = [row | {"audio_latent_path": "a.pt"} for row in rows]
    capsys.readouterr()
    for other, named in ((without_task, "--encoders"), (with_sound, "SOURCE")):
        assert encoded(tmp_path / "other", other) == 2
        assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "settings", "named"),
    [
        ("vae", {"clip_length": 9}, "clip_length"),
        ("vae", {"temporal_downsample_factors": [1, 2, 1, 1, 1, 1]}, "frames"),
        ("vae", {"latents_std": [1.0] * 23 + [0.0]}, "latents_std"),
        ("audio_vae", {"latents_mean": None}, "latents_mean"),
        ("audio_vae", {"sampling_rate": 16000}, "sampling_rate"),
        ("text_encoder", {"architectures": ["Qwen2VLForConditionalGeneration"]}, "Qwen3VL"),
        ("text_encoder", {"text_config": {"num_hidden_layers": 50}}, "layers"),
        ("transformer", {"patch_size": [1, 0, 2]}, "patch_size"),
    ],
)
def test_what_is_no_minimax_h3_is_refused_by_name(path, tmp_path, part, settings, named):
    check_no_encoders(shutil.copytree(path, tmp_path / "copy"), f"{part}/config.json", settings, named)


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [("num_frames", 121, "107 or 124"), ("num_frames", 5, "22 or 39"), ("height", 48, "32"), ("fps", 25.0, "24")],
)
def test_what_does_not_fit_is_refused(path, setting, value, shown):
    line = refusal(choose_encoders(path).latent_shapes, replace(CLIP, **{setting: value}))
    assert f"data.{setting}" in line and shown in line


def test_bf16_and_keyframes_without_a_processor_are_refused(path, tmp_path):
    sizes = {"num_frames": 22, "height": 32, "width": 64, "fps": 24.0}
    with refused("data.vae_precision"):
        Encoding(encoders=str(path), **sizes, vae_precision="bf16").inspect()
    copied = shutil.copytree(path, tmp_path / "copy")
    shutil.rmtree(copied / "processor")
    with refused("processor/"):
        Encoding(encoders=str(copied), **sizes, image="both").inspect()
    folder = choose_encoders(path)
    assert not folder.remarks(replace(CLIP, num_frames=124), 32, None) and len(folder.remarks(CLIP, 32, None)) == 1


def _stepped(step, components, **given):
    """Return the state after a step of diffusers' pipeline on ``given``."""
    state = SimpleNamespace(**given)
    step.get_block_state, step.set_block_state = lambda _: state, lambda *_: None
    step(SimpleNamespace(**components), None)
    return state


def _text_components(path):
    tokenizer = AutoTokenizer.from_pretrained(path / "tokenizer")
    encoder = choose_encoders(path).text_encoder(
        choose_encoders(path).inspect_image("data.encoders"), max_tokens=9999, dtype=torch.bfloat16, **CPU
    )
    pads = {tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>"): i for i, kind in enumerate(("image", "video"), start=1)}
    processor = SimpleNamespace(
        image_processor=AutoImageProcessor.from_pretrained(path / "processor"), video_processor=encoder.video_processor,
        create_mm_token_type_ids=lambda ids: [[pads.get(i, 0) for i in one] for one in ids],
    )  # fmt: skip
    whole = Qwen3VLForConditionalGeneration.from_pretrained(path / "text_encoder", dtype=torch.bfloat16).eval()
    named = {"tokenizer": tokenizer, "processor": processor, "text_encoder": whole}
    return named | {"_execution_device": torch.device("cpu")}


def _presentation(path, pictures, caption):
    """Return the embedding and the tags that diffusers' step makes of pictures and a caption."""
    components = _text_components(path) | {"text_tag": 1, "video_tag": 0, "text_encoder_layer": 50}
    state = _stepped(theirs.MiniMaxH3FL2VATextEncoderStep(), components, prompt=caption, keyframes=pictures)
    return state.prompt_embeds[0].float(), state.text_token_tags == 0


def _on_canvas(first, last, height, width):
    """Return the pictures as diffusers' step fits them to a canvas."""
    components = {"image_processor": VaeImageProcessor(vae_scale_factor=16)}
    given = {"image": first, "last_image": last, "height": height, "width": width}
    return _stepped(before.MiniMaxH3ResizeStep(), components, **given).keyframes


def _picture(seed, size):
    levels = torch.randint(256, (5, 7, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(levels.numpy()).resize(size, Image.Resampling.BILINEAR)


@parametrize("image", ["both", "first_frame", "last_frame"], quick=1)
def test_keyframes_of_a_table_are_those_of_the_pipeline(path, tmp_path, image):
    """Embeddings, tags and latents bit by bit, of pictures of other shapes. A caption has a text for each image."""
    pictures = {f"{i}.png": _picture(i, size) for i, size in enumerate([(70, 90), (64, 32), (50, 31)])}
    for name, picture in pictures.items():
        picture.save(tmp_path / name)
    columns = [*IMAGES[image]]
    rows = [[f"{(i + k) % 3}.png" for k in range(len(columns))] for i in range(3)]
    captions = ["a red square", "a red square", "a blue square"]
    lines = [",".join([*row, caption]) for row, caption in zip(rows, captions, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join([",".join([*columns, "caption"]), *lines]))
    options = asdict(CLIP) | {"max_text_tokens": 64, "image": image}
    data = encode_source(tmp_path / "table.csv", path, **options)
    vae = AutoencoderKLMiniMaxH3.from_pretrained(path / "vae")
    for i, row in enumerate(rows):
        shown = _on_canvas(*(pictures[name] for name in row), *[None] * (2 - len(row)), 32, 64)
        text, tags = _presentation(path, shown, captions[i])
        item, length = data[i], len(text)
        assert item["text_length"] == length and torch.equal(item["text"][:length], text)
        assert torch.equal(item["text_tags"][:length].bool(), tags) and not item["text_tags"][length:].any()
        levels = [torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None, :, None] for picture in shown]
        with torch.no_grad():
            wanted = [theirs.encode_vae_condition(vae, one, *COLORS.values())[0] for one in levels]
        assert torch.equal(item["keyframes"], torch.cat(wanted, dim=1))
        assert item["keyframe_anchors"].tolist() == {"first_frame": [0], "last_frame": [1], "both": [0, 1]}[image]
        bare = _presentation(path, shown, "")[0]
        null = data.condition([captions[i]], [i]).null.tensors
        assert null["text_length"].tolist() == [len(bare)]
        assert torch.allclose(null["text"][0, : len(bare)], bare, rtol=2e-2, atol=2e-2), "the rows of images are causal"
    assert list(data.captions()) == ["a red square", "a blue square"] and data.set.about["format"] == 3
    assert not torch.equal(data[0]["text"], data[1]["text"]), "a text of another image"
    chosen = data.condition(captions, clips=[1, 0, 2]).tensors
    assert torch.equal(chosen["text"][0], data[1]["text"]) and torch.equal(chosen["keyframes"][1], data[0]["keyframes"])
    assert torch.equal(data.condition(["a red square"]).tensors["keyframes"][0], data[0]["keyframes"])
    own = [str(tmp_path / name) for name in rows[2]]
    data = encode_source(tmp_path / "table.csv", path, **options, captions=["a red square"], images=own)
    given = data.condition(["a red square"]).tensors
    assert torch.equal(given["keyframes"][0], data[2]["keyframes"]) and given["text_length"] == data[0]["text_length"]
    assert data[0]["text"].shape == (64 + len(columns) * 4, 24)
    for wrong in ({"max_text_tokens": 9}, {"negative_prompt": "ugly"}):
        with refused(f"data.{[*wrong][0]}"):
            encode_source(tmp_path / "table.csv", path, **options | wrong)


@slow
def test_keyframes_of_clips_are_their_first_and_last_frames(path, tmp_path):
    """The set is verified, and opens with what training needs; clips without a text of their own are none."""
    clips = render_clips(tmp_path / "clips", 2, frames=30, fps=24, height=32, width=64)
    data = encode_source(clips, path, image="both", max_text_tokens=64, silence="zero", **asdict(CLIP))
    folder = choose_encoders(path)
    codec = folder.codec(tiling=False, dtype=torch.float32, **CPU)
    encoder = folder.text_encoder(data._image, max_tokens=64, dtype=torch.bfloat16, **CPU)
    for i in range(2):
        video = read_clip(clips / f"clip_{i}.mp4", CLIP)
        frames = video[:, [0, -1]]
        item, made = data[i], encoder.embeddings(data.caption(i), frames)
        assert torch.equal(item["keyframes"], torch.cat([codec.encode_keyframe(f) for f in frames.split(1, 1)], 1))
        assert torch.equal(item["text"][: len(made["text"])], made["text"]) and item["latents"].shape == (24, 7, 2, 4)
        assert item["text_tags"].sum() == made["tags"].sum() == 2 * (2 + 2)
    assert encode(["--verify", str(data.set.path)]) == 0
    opened = open_set(data.set.path, cache=tmp_path / "other")
    assert all(torch.equal(opened[1][name], data[1][name]) for name in data[1] if name != "caption")


def _of_the_pipeline(path, references, caption, edges):
    """Return text, tags, latents, rows of sound and kinds that diffusers' steps make of references."""
    kept = {"canvas_short_edge": edges[1], "canvas_max_pixels": edges[1] ** 2 * 7 // 4}
    parts = _text_components(path) | {
        "image_processor": VaeImageProcessor(vae_scale_factor=16),
        "vae": AutoencoderKLMiniMaxH3.from_pretrained(path / "vae"),
        "audio_vae": AutoencoderKLMiniMaxH3Audio.from_pretrained(path / "audio_vae"),
        "config": SimpleNamespace(reference_image_short_edge=edges[0], **kept),
    }
    names = ("audio_sampling_rate", "canvas_multiple", "vae_frames_per_chunk", "vae_latents_per_chunk", "pixel_mean")
    names += ("pixel_std", "keyframe_encode_seed", "text_tag", "video_tag", "text_encoder_layer", "fps")
    sizes = SimpleNamespace(**parts, vae_spatial_compression_ratio=16, patch_size=(1, 2, 2))
    values = {name: getattr(MiniMaxH3ModularPipeline, name).fget(sizes) for name in names}
    components = parts | values | {"min_duration": 0, "max_duration": 99, "audio_latent_channels": 32}
    state = {"prompt": caption, "references": references, "height": 32, "width": 64, "num_frames": 22}
    for step in (
        before.MiniMaxH3Ref2VASetupStep(), theirs.MiniMaxH3Ref2VATextEncoderStep(),
        theirs.MiniMaxH3Ref2VAReferenceEncoderStep(),
    ):  # fmt: skip
        state = vars(_stepped(step, components, **state))
    return SimpleNamespace(**state)


@slow
def test_references_of_a_table_are_those_of_the_pipeline(path, tmp_path):
    """Embeddings, tags, latents and rows of sound, of pictures of other shapes, clips with and without sound, sounds.
    Longer ones are cut. A file that is missing, broken, silent or too short, and too large references are left out."""
    generator = torch.Generator().manual_seed(3)
    sounds = {length: 0.1 * torch.randn(2, length, generator=generator) for length in (5000, 9000)}
    pictures = {f"{i}.png": _picture(i, size) for i, size in enumerate([(70, 90), (64, 32), (50, 31)])}
    for name, picture in pictures.items():
        picture.save(tmp_path / name)
    clips = {
        "a.mkv": (20, None),
        "b.mkv": (30, sounds[9000]),
        "short.mkv": (9, None),
        "silent.mkv": (22, sounds[5000] * 0),
    }
    frames = {name: write_clip(tmp_path / name, n, (50, 40), sound=sound) for name, (n, sound) in clips.items()}
    write_sound(tmp_path / "c.wav", sounds[5000])
    (tmp_path / "broken.png").write_bytes(b"no picture")
    rows = [
        ("a red square", "image:0.png"),
        ("a red square", "clip:b.mkv;image:2.png;sound:c.wav"),
        ("a blue square", "sound:c.wav;video:a.mkv;image:1.png"),
    ]
    bad = ["image:d.png", "image:broken.png", "clip:a.mkv", "clip:silent.mkv", "sound:c.wav", "video:short.mkv",
           "picture:0.png", "", "image:0.png;image:0.png;image:0.png;image:0.png"]  # fmt: skip
    table = [*rows, *(("a bad square", text) for text in bad if text)]
    lines = [json.dumps({"caption": caption, "references": text}) for caption, text in table]
    (tmp_path / "table.jsonl").write_text("\n".join(lines))
    edges = (64, 32)
    options = {
        "path": tmp_path / "table.jsonl", "encoders": path, "cache": tmp_path / "cache",
        "num_frames": 22, "height": 32, "width": 64, "fps": 24.0, "max_text_tokens": 160,
        "references": ["clip", "image", "sound"], "reference_image_edge": edges[0], "reference_video_edge": edges[1],
    }  # fmt: skip
    data = encode_source(**options)
    left_out = next((tmp_path / "cache").glob("*/left_out.csv")).read_text()
    assert len(data) == 3 and len(left_out.splitlines()) == 1 + len(bad) - 1 + 1, left_out
    assert "the video of reference 1 cut" in left_out
    for i, (caption, text) in enumerate(rows):
        references = []
        for kind, name in (part.split(":") for part in text.split(";")):
            if kind == "image":
                references.append(refs.MiniMaxH3ImageReference(image=pictures[name]))
            elif kind == "sound":
                references.append(refs.MiniMaxH3AudioReference(audio=sounds[5000], sample_rate=8000))
            else:
                sound = clips[name][1] if kind == "clip" else None
                references.append(
                    refs.MiniMaxH3VideoReference(frames=frames[name], fps=24.0, audio=sound, sample_rate=8000)
                )
        state, item = _of_the_pipeline(path, references, caption, edges), data[i]
        length = state.prompt_embeds.shape[1]
        assert item["text_length"] == length and torch.equal(item["text"][:length], state.prompt_embeds[0].float())
        assert torch.equal(item["text_tags"][:length] == 1, state.text_token_tags == 0)
        before_caption = length - len(choose_tokens(path, caption))
        assert (item["text_tags"][:before_caption] > 0).all() and not item["text_tags"][before_caption:].any()
        latents = torch.cat([x[0].flatten(1).mT for x in state.condition_latents])
        heard = torch.cat([torch.zeros(0, 32), *state.audio_condition_latents])
        for name, wanted in (("references", latents), ("reference_sounds", heard)):
            assert torch.allclose(item[name][: len(wanted)], wanted, atol=1e-5) and not item[name][len(wanted) :].any()
        audible = iter(state.audio_condition_latents)
        shapes = iter(x.shape[2:] for x in state.condition_latents)
        wanted = [
            [*(next(shapes) if r.kind != "audio" else (0, 0, 0)), len(next(audible)) // 2 if r.has_audio else 0]
            for r in state.normalized_references
        ]
        assert item["reference_sizes"].tolist() == wanted + [[0] * 4] * (3 - len(wanted))
    chosen = data.condition(["a red square", "a red square"], [1, 0])
    assert torch.equal(chosen.tensors["references"][0], data[1]["references"])
    more = ["a green square"], [f"image:{tmp_path / '1.png'};sound:{tmp_path / 'c.wav'}"]
    other = encode_source(**options, captions=more[0], images=more[1])
    given = other.condition(more[0]).tensors
    assert given["reference_sizes"][0].tolist()[0][3] == 0 and given["reference_sizes"][0].tolist()[1][3] == 25


def choose_tokens(path, text):
    return AutoTokenizer.from_pretrained(path / "tokenizer")(text, add_special_tokens=False)["input_ids"]
