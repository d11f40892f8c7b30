"""HunyuanVideo 1.5: VAE, text encoders and image encoder against diffusers' own pipelines (0.42)."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from distill.data.encoders.choose import choose_encoders
from distill.data.encoders.hunyuan import GLYPH_TOKENS, HunyuanVideoCodec
from distill.data.videos.decode import ClipFormat
from tests.encoded import check_decoded, encode_source
from tests.tiers import slow
from tests.tiny_hunyuan_pipeline import build_tiny_hunyuan_pipeline
from tests.unit.refused import change, refused

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
CLIP = ClipFormat(num_frames=9, height=32, width=48, fps=24.0)
QUOTES = 'a sign “开放” & a door that says "OPEN  24h", "OPEN  24h"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_hunyuan_pipeline(tmp_path_factory.mktemp("hunyuan"), image=True)


@pytest.fixture(scope="module")
def pipeline(folder):
    return HunyuanVideo15ImageToVideoPipeline.from_pretrained(folder)


def test_sizes(folder, pipeline):
    found = choose_encoders(folder)
    texts = {"text": (60, 32), "text_mask": (60,), "glyphs": (GLYPH_TOKENS, 24), "glyph_mask": (GLYPH_TOKENS,)}
    assert found.latent_shape(CLIP) == (8, 3, 2, 3)
    assert found.condition_shapes(CLIP, 60, None) == texts
    image = found.inspect_image("data.encoders=x")
    assert found.condition_shapes(CLIP, 60, image) == texts | {"first_frame": (8, 1, 2, 3), "image_embeds": (9, 20)}
    with refused("num_frames"):
        found.latent_shape(replace(CLIP, num_frames=8))
    assert (found.temporal, found.spatial) == (pipeline.vae_scale_factor_temporal, pipeline.vae_scale_factor_spatial)


@pytest.mark.parametrize(
    ("caption", "tokens"), [("", 60), (QUOTES, 60), ("x" * 200, 60), ('"' + "y" * 400 + '"', 1000)]
)
def test_texts_are_those_of_the_pipeline_where_they_count(folder, pipeline, caption, tokens):
    encoders = choose_encoders(folder)
    texts = encoders.text_encoder(max_tokens=tokens, **CPU).embeddings(caption)
    given = encoders.text_tensors(texts, tokens)
    pipeline.tokenizer_max_length = tokens
    with torch.no_grad():
        theirs, mask, glyphs, glyph_mask = pipeline.encode_prompt(caption)
    pipeline.tokenizer_max_length = 1000
    assert torch.equal(given["text_mask"], mask[0].bool()) and given["text_mask"].any()
    assert torch.equal(given["glyph_mask"], glyph_mask[0].bool()) and given["glyph_mask"].any() == ('"' in caption)
    for name, whole, counts in (("text", theirs, mask), ("glyphs", glyphs, glyph_mask)):
        counts = counts[0].bool()
        assert torch.allclose(given[name][counts], whole[0][counts], atol=1e-5)
        assert not given[name][~counts].any()
    most, width = encoders.text_sizes(tokens)["glyphs"]
    assert len(texts["glyphs"]) <= most and texts["glyphs"].shape[1] == width


@pytest.mark.parametrize("tokenizer", ["tokenizer", "tokenizer_2"])
def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path, tokenizer):
    """Token numbers beyond the embeddings cause an assertion on a GPU that names nothing."""
    copied = shutil.copytree(folder, tmp_path / "copy")
    words = AutoTokenizer.from_pretrained(copied / tokenizer)
    words.add_tokens([f"zzz{i}" for i in range(2000)])
    words.save_pretrained(copied / tokenizer)
    texts = choose_encoders(copied).text_encoder(max_tokens=60, **CPU)
    with refused(tokenizer):
        texts.embeddings('a "zzz1999"')


def test_pixels_are_those_of_the_pipeline(folder, pipeline):
    codec = choose_encoders(folder).codec(tiling=False, **CPU)
    assert isinstance(codec, HunyuanVideoCodec)
    vae, video = pipeline.vae, torch.rand(3, 9, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        theirs = vae.encode(video[None]).latent_dist.mode() * vae.config.scaling_factor
        pixels = vae.decode(theirs / vae.config.scaling_factor).sample
    latents = codec.encode(video)
    assert latents.shape == (8, 3, 2, 3) and torch.allclose(latents, theirs[0], atol=1e-5)
    assert vae.config.scaling_factor != 1
    check_decoded(codec, latents, pixels[0])
    tiled = choose_encoders(folder).codec(device=torch.device("cpu"), dtype=torch.bfloat16, tiling=True)
    assert tiled.vae.use_tiling and tiled.vae.dtype == torch.bfloat16 and torch.equal(tiled.std, codec.std)


@slow
def test_the_cache_holds_both_texts_and_knows_both_encoders(folder, tmp_path):
    """A change of only the second encoder makes another cache."""
    file = tmp_path / "captions.csv"
    file.write_text('caption\n"a red square"\n"a sign that says ""OPEN"""\n')

    data = partial(encode_source, file, max_text_tokens=60)
    first = data(folder)
    plain, quoting = first[0], first[1]
    assert plain["glyph_mask"].sum() == 0 and quoting["glyph_mask"].sum() == 14
    condition = first.condition(['a sign that says "OPEN"'])
    assert condition.null.tensors["glyph_mask"].sum() == 0 and condition.null.tensors["text_mask"].any()
    assert first.set.about["counts"]["texts"] == 3 and sorted(first.set.text_widths) == ["glyphs", "text"]

    other = tmp_path / "other"
    shutil.copytree(folder, other)
    weights = next((other / "text_encoder_2").glob("*.safetensors"))
    tensors = {name: 2 * tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    second = data(other)
    assert second.fingerprint != first.fingerprint
    assert torch.equal(second[1]["text"], quoting["text"]) and not torch.equal(second[1]["glyphs"], quoting["glyphs"])


@pytest.mark.parametrize(
    ("part", "settings"),
    [
        ("vae", {"latent_channels": "8"}),
        ("vae", {"spatial_compression_ratio": 0}),
        ("text_encoder", {"architectures": ["T5EncoderModel"]}),
        ("text_encoder_2", {"d_model": 0}),
        ("transformer", {"patch_size": "1"}),
        ("text_encoder_2", None),
        ("image_encoder", None),
        ("tokenizer/chat_template.jinja", None),
    ],
)
def test_what_is_no_hunyuan_is_refused_by_name(folder, tmp_path, part, settings):
    copied = shutil.copytree(folder, tmp_path / "copy")
    if settings is not None:
        change(copied / part / "config.json", **settings)
    else:
        shutil.rmtree(copied / part) if (copied / part).is_dir() else (copied / part).unlink()
    with refused(part.partition("/")[0]):
        choose_encoders(copied).inspect_image(f"data.encoders={copied}")


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "<user>"])
def test_a_chat_template_that_cannot_be_used_is_refused(folder, tmp_path, template):
    """The second template leaves no token of the caption."""
    copied = shutil.copytree(folder, tmp_path / "copy")
    (copied / "tokenizer" / "chat_template.jinja").write_text(template)
    with refused("tokenizer"):
        choose_encoders(copied).text_encoder(max_tokens=60, **CPU).embeddings("a cat")


def test_remarks_are_made_where_the_settings_differ_from_the_pipelines(folder, tmp_path):
    """A checkpoint of the other task is named."""
    copied = shutil.copytree(folder, tmp_path / "copy")
    for task, with_image, count in (("t2v", False, 0), ("t2v", True, 1), ("i2v", True, 0), ("i2v", False, 1)):
        change(copied / "transformer" / "config.json", task_type=task)
        found = choose_encoders(copied)
        image = found.inspect_image("data.encoders=x") if with_image else None
        assert len(found.remarks(CLIP, 60, image)) == count, (task, with_image)


@slow
def test_a_changed_chat_template_is_another_cache(folder, tmp_path):
    (tmp_path / "captions.txt").write_text("a red square\n")
    copied = shutil.copytree(folder, tmp_path / "copy")
    template = copied / "tokenizer" / "chat_template.jinja"

    def first():
        return encode_source(tmp_path / "captions.txt", copied, max_text_tokens=60)[0]["text"]

    before = first()
    template.write_text(template.read_text().replace("<end>", "<end><end>"))
    assert not torch.equal(first(), before)
