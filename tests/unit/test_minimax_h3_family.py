"""The family of MiniMax-H3: packed rows and times as diffusers makes them, refused networks and data."""

import pytest
import torch
from safetensors.torch import save_file

from distill.config import compose_config
from distill.planning.command import plan_without_gpus, planned_shapes
from distill.train.export import check_export
from models.condition import Condition
from models.export import RoleExport
from models.families.minimax_h3 import MiniMaxH3, stream_positions
from models.lora.files import file_tensors
from models.lora.plan import plan_lora
from models.lora.saved import inspect_adapters
from models.lora.settings import LoraSettings
from models.roles.role_plan import plan_role
from models.sample import AUDIO, VIDEO, Sample
from tests.oracles.tiny_minimax_h3 import (
    REFERENCE_SIZES,
    REFERENCES,
    packed,
    packed_with_references,
    references_of,
    velocity,
)
from tests.tiers import parametrize
from tests.unit.refused import refusal, refused

FAMILY = MiniMaxH3()
EXAMPLES = FAMILY.examples()
TEXT = 7
LAYERS = [f"{role}.architecture={{num_layers: 1, num_refiner_layers: 1}}" for role in ("teacher", "student", "fake")]
TINY = ["adapters=none", "plan=true", "world=8", *LAYERS]


@pytest.mark.parametrize(
    ("text", "audio", "grid"), [(300, 207, (37, 48, 84)), (11, 575, (102, 84, 48)), (1, 1, (2, 4, 6))]
)
def test_positions_are_those_of_diffusers(text, audio, grid):
    for anchors in ([], [0], [1], [0, 1]):
        ours = torch.cat([*stream_positions(text, audio, grid, (2, 2), torch.device("cpu"), anchors).values()])
        theirs = packed(torch.ones(text), audio, grid, (1, 2, 2), anchors)[0]
        assert torch.equal(ours.float(), theirs.float()) and torch.allclose(ours, theirs, rtol=1e-14, atol=1e-12)
    given = slice(text, text + grid[1] * grid[2] // 2)
    assert torch.equal(ours[given, 0], theirs[given, 0])
    # Of references, diffusers packs each one's sound before its picture; here are all pictures before all sounds.
    sizes = torch.tensor([[[1, 128, 228, 0], [37, 84, 48, 207], [0, 0, 0, 90], [22, 48, 84, 0], [7, 4, 6, 200]]])
    tensors = {"reference_sizes": sizes, "reference_sounds": torch.zeros(1, 1000, 1)}
    tensors |= dict.fromkeys(("references", "reference_noise"), torch.zeros(1, 300_000, 1))
    kinds, pictures, _, sounds = references_of(tensors, 0)
    ours = stream_positions(text, audio, grid, (2, 2), torch.device("cpu"), (), sizes[0].tolist())
    theirs, tags, videos, audios, *_ = packed_with_references(
        torch.ones(text), audio, grid, (1, 2, 2), kinds, pictures, sounds
    )
    for streams, rows in ((("given", "video"), videos), (("given sound", "audio"), audios)):
        mine = torch.cat([ours[name] for name in streams])
        assert torch.equal(mine.float(), theirs[rows].float()) and torch.allclose(mine, theirs[rows], rtol=1e-14)


def drawn(example="t2av", sizes=(4, 7, 6, 4), count=2):
    """Return a network, samples and the embeddings of their captions."""
    torch.manual_seed(0)
    network = FAMILY.build(EXAMPLES[example], "teacher.architecture")
    config = FAMILY.defaults() | EXAMPLES[example]
    shapes = FAMILY.sample_shapes(config, sizes)
    sample = Sample({name: torch.randn(count, *shape) for name, shape in shapes.items()}, FAMILY.parts)
    return network, sample, torch.randn(count, TEXT, config["text_dim"])


def check(network, sample, t, text, tensors, *compared):
    """Require the velocity, from data to noise, of diffusers' steps, which is another without each of ``compared``."""
    times = {VIDEO: t, AUDIO: 3 * t / (12 - 9 * t)}
    v = FAMILY.outputs(network, sample, t, Condition(tensors | {"text": text})).velocity
    theirs = velocity(network, sample.parts, times, text, tensors)
    for part, x in sample.parts.items():
        assert v.parts[part].shape == x.shape and torch.allclose(v.parts[part], theirs[part], atol=1e-5)
    for name in compared:
        other = velocity(network, sample.parts, times, text, tensors | {name: torch.zeros_like(tensors[name])})
        assert not torch.allclose(v.video, other["video"], atol=1e-5), name


@pytest.mark.parametrize("example", EXAMPLES)
def test_inputs_are_those_of_diffusers(example):
    patch = FAMILY.patch_size(FAMILY.defaults() | EXAMPLES[example])
    network, sample, text = drawn(example, (4, 7, 3 * patch[1], 2 * patch[2]))
    for tensors in ({}, {"text_length": torch.tensor([4, 4])}):
        check(network, sample, torch.tensor([0.7, 0.2]), text, tensors)


@pytest.mark.parametrize("anchors", [[0], [1], [0, 1], [1, 0]], ids=str)
def test_keyframes_are_those_of_diffusers(anchors):
    """Each sample has its text's length, rows of pictures and noise. A time below the keyframes' is theirs too."""
    network, sample, text = drawn()
    tensors = {
        "keyframes": torch.randn(2, 4, len(anchors), 6, 4),
        "keyframe_noise": 100 * torch.randn(2, 4, len(anchors), 6, 4),
        "keyframe_anchors": torch.tensor([anchors, anchors[::-1]]),
        "text_tags": torch.arange(TEXT) < torch.tensor([[2], [3]]),
        "text_length": torch.tensor([4, 6]),
    }
    check(network, sample, torch.tensor([0.7, 0.0004]), text, tensors, "keyframe_noise", "text_tags")


@pytest.mark.parametrize("samples", [[0, 1], [2, 3], [1]], ids=str)
def test_references_are_those_of_diffusers(samples):
    """One and three references of other sizes in one batch, with and without sound. Zeros after them do not enter."""
    count = len(samples)
    network, sample, text = drawn(count=count)
    for parameter in network.time_embedder.parameters():  # the time of a few rows must matter
        parameter.data *= 5
    tensors = {name: torch.randn(count, *REFERENCES[name]) for name in ("references", "reference_sounds")}
    tensors |= {
        "reference_noise": 100 * torch.randn(count, *REFERENCES["references"]),
        "reference_sizes": REFERENCE_SIZES[samples],
        "text_tags": (torch.arange(TEXT) < torch.tensor([[2], [3]])[:count]) + (torch.arange(TEXT) == 0).to(torch.int8),
        "text_length": torch.tensor([4, 6])[:count],
    }
    compared = ("reference_noise", "reference_sounds") if 1 in samples else ()
    check(network, sample, torch.tensor([0.7, 0.0004])[:count], text, tensors, *compared)


def times_of(scheduler, steps):
    scheduler.set_timesteps(steps + 1)
    return (1 - scheduler.timesteps).tolist()


@pytest.mark.parametrize("shifts", [None, {VIDEO: 1.0, AUDIO: 0.5}])
@pytest.mark.parametrize("times", [[1.0, 0.947368, 0.857143, 0.666667], [1.0, 0.8], [1.0]])
def test_both_parts_have_a_scheduler_of_the_students_times(times, shifts):
    made = FAMILY.schedulers(times=times, stochastic=False, shifts=shifts, boundaries=[], experts=[0] * len(times))
    sample = Sample({VIDEO: torch.zeros(1), AUDIO: torch.zeros(1)}, shifts or FAMILY.parts)
    for name, part in (("scheduler", VIDEO), ("audio_scheduler", AUDIO)):
        wanted = [sample.time(part, t) for t in times]
        assert times_of(made[name], len(times)) == pytest.approx(wanted, abs=2e-5)
        # Euler's step along the velocity to the data.
        x, v = torch.randn(2, 3), torch.randn(2, 3)
        step = made[name].step(v, made[name].timesteps[0], x).prev_sample
        assert torch.allclose(step, x + (wanted[0] - (wanted + [0.0])[1]) * v, atol=1e-4)


@pytest.mark.parametrize(
    ("times", "stochastic", "named"),
    [([1.0, 0.9, 0.75, 0.51], False, "0.51"), ([1.0, 0.947368, 0.857143, 0.666667], True, "student_sampler")],
)
def test_other_students_have_no_scheduler(times, stochastic, named):
    """The pipeline takes no list of times, so an export for it is refused; ComfyUI's adapters have no scheduler."""
    steps = {"times": times, "stochastic": stochastic}
    student = RoleExport(family=FAMILY, config={}, trained={}, bases=list, scale=1.0, few_steps=steps)
    for kind in (None, "merged", "diffusers-lora"):
        with refused(named):
            student.schedulers(kind)
    assert student.schedulers("wan-lora") == {}


@pytest.mark.parametrize(
    "words",
    [
        ["method.step_list=[1.0,0.9,0.75,0.51]", "sample.student_steps=[4]"],
        ["method.student_sampler=renoise"],
        ["data.num_frames=107"],
        ["data.num_frames=362"],
    ],
    ids=str,
)
def test_a_run_whose_export_the_pipeline_cannot_sample_is_refused_at_its_start(words):
    config = compose_config(["experiment=minimax_h3_t2av_dmd2", *TINY, *words])
    with refused(words[0].partition("=")[0]):  # by plans too
        plan_without_gpus(config)
    config.export.at_end = False
    check_export(*plan_without_gpus(config))


def test_the_pipeline_samples_what_the_authors_recipe_exports():
    plan = plan_without_gpus(compose_config(["experiment=minimax_h3_t2av_pdmd", *TINY]))
    check_export(*plan)


@pytest.mark.parametrize("targets", [[], ["*"], ["*.to_q", "*.to_v"]], ids=str)
def test_diffusers_reads_the_adapters_of_the_original_layers(targets):
    """The file joins query, key and value, and swaps gate and value; diffusers' converter takes them apart again."""
    torch.manual_seed(0)
    network = FAMILY.build(EXAMPLES["t2av"], "student.architecture")
    plan = plan_lora(network, FAMILY, LoraSettings(rank=2, alpha=3, targets=targets), "student")
    assert targets or (
        {"adaln_proj", "proj_in"}.isdisjoint(".".join(plan.targets).split(".")) and len(plan.targets) == 24
    )
    ours = {name: torch.randn(shape) for name, shape in plan.shapes(network).items()}
    tensors = {
        kind: file_tensors(kind, ours, ours.__getitem__, family=FAMILY, scale=1.5, dtype=torch.float32)
        for kind in ("diffusers-lora", "wan-lora")
    }
    fused = tensors["wan-lora"]["diffusion_model.blocks.1.attn.qkv_proj.lora_down.weight"]
    assert len(fused) == (4 if len(targets) == 2 else 6)
    for kind in tensors:
        found = FAMILY.diffusers_adapters(tensors[kind])
        layers = {name.removeprefix("transformer.").rpartition(".lora_")[0] for name in found}
        assert layers >= set(plan.targets) and (len(targets) == 2 or len(layers) == len(plan.targets))
        for layer in layers:
            b, a = (ours.get(f"{layer}.lora_{matrix}.weight", torch.zeros(1, 1)) for matrix in "BA")
            theirs = torch.mm(*(found[f"transformer.{layer}.lora_{matrix}.weight"] for matrix in "BA"))
            assert torch.allclose(theirs, 1.5 * b @ a, atol=1e-5), layer


@pytest.mark.parametrize(("infix", "alpha", "scale"), [("", None, 1), ("", "3", 1.5), (".default", None, 1)])
def test_others_files_of_the_original_layers(tmp_path, infix, alpha, scale):
    """Alpha can be metadata of the file; with peft's infix, rows of query, key and value are interleaved by head."""
    network = FAMILY.build(EXAMPLES["t2av"] | {"attention_head_dim": 128}, "teacher.architecture")
    heads = torch.arange(3 * 6).repeat_interleave(128)[:, None].expand(-1, 2).float()
    name, a = "blocks.1.attn.qkv_proj.lora_", torch.randn(2, 60)
    file = tmp_path / "adapters.safetensors"
    tensors = {f"{name}A{infix}.weight": a, f"{name}B{infix}.weight": heads.contiguous()}
    save_file(tensors, file, metadata=None if alpha is None else {"alpha": alpha})
    read = inspect_adapters(file, network, FAMILY, "student.lora").read()
    for position, side in enumerate("qkv"):
        weights = read[f"transformer_blocks.1.attn.to_{side}"]
        expected = torch.arange(position, 18, 3) if infix else torch.arange(6 * position, 6 * position + 6)
        assert torch.equal(weights["B.weight"][::128, 0], scale * expected) and torch.equal(weights["A.weight"], a)


def test_the_recipe_adapts_the_family_s_own_targets():
    network = FAMILY.build(EXAMPLES["t2av"], "student.architecture")
    targets = compose_config(["experiment=minimax_h3_t2av_dmd2", "plan=true"]).student.lora.targets
    ours, recipe = (
        plan_lora(network, FAMILY, LoraSettings(rank=2, targets=each), "student").targets for each in ([], targets)
    )
    assert set(ours) == set(recipe)


@pytest.mark.parametrize(("image", "count"), [("both", 2), ("last_frame", 1)])
def test_a_plan_knows_keyframes_and_the_rows_that_show_them(image, count):
    config = compose_config(["experiment=minimax_h3_t2av_dmd2", *TINY, f"data.image={image}"])
    config.student.architecture = FAMILY.defaults() | {"num_layers": 1}
    shapes = planned_shapes(config)[1]
    assert shapes["keyframes"] == (24, count, 48, 84) and shapes["keyframe_anchors"] == (count,)
    assert shapes["text"][0] == shapes["text_tags"][0] == 512 + count * (24 * 42 + 2)


@parametrize(
    ("word", "shown"),
    [
        ("data.num_frames=241", "226 or 243"),
        ("data.height=720", "32"),
        ("data.fps=25", "24"),
        ("mesh.ulysses=3", "3"),
        ("method.guidance_scale=3", "must be 1"),
        ("method.audio_guidance_scale=7", "must be 1"),
    ],
    quick=2,
)
def test_what_the_model_does_not_take_is_refused_by_the_plan(word, shown):
    line = refusal(plan_without_gpus, compose_config(["experiment=minimax_h3_t2av_dmd2", *TINY, word]))
    assert word.partition("=")[0] in line and shown in line


def test_references_have_a_network_of_their_own(tmp_path):
    """Refused are transformer_ref without references, with keyframes, and the network next to it with references."""
    config = FAMILY.defaults() | EXAMPLES["t2av"]
    for name in ("transformer", "transformer_ref"):
        FAMILY.build(EXAMPLES["t2av"], "teacher.architecture").save_pretrained(tmp_path / name)
    shapes = FAMILY.sample_shapes(config, (4, 2, 4, 4))
    text = {"text": (TEXT, config["text_dim"])}
    keyframes, references = (text | given for given in FAMILY.options(config, shapes[VIDEO], TEXT))
    taken = {"transformer": (text, keyframes), "transformer_ref": (references,)}
    for name, checkpoint in (("transformer", tmp_path), ("transformer_ref", tmp_path / "transformer_ref")):
        plan = plan_role("teacher", checkpoint=str(checkpoint), family="minimax_h3")
        for condition in (text, keyframes, references):
            if condition in taken[name]:
                plan.tokens(shapes, condition)
            else:
                with refused("teacher.checkpoint"):
                    plan.tokens(shapes, condition)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data.references=[sound]"], "data.references"),
        (["data.references=[picture]"], "data.references"),
        (["data.references=[image]", "data.image=both"], "data.references"),
        (["data.image=references"], "data.references"),
        (["data.reference_image_edge=512"], "data.references"),
        (["data.references=[clip,clip,video,video]"], "data.references"),
    ],
    ids=str,
)
def test_wrong_references_are_refused(words, named):
    with refused(named):
        compose_config(["experiment=minimax_h3_t2av_dmd2", *TINY, *words])


def test_a_plan_knows_the_room_of_references():
    """Three pictures of 2048 x 3648, and a clip as long as the generated one."""
    words = ["experiment=minimax_h3_ref2av_dmd2", *TINY]
    for kinds, rows, sounds, text in (
        ("[image,image,image]", 3 * 7296, 0, 3 * 7298), ("[clip]", 37 * 1008, 414, 6 * 1010),
    ):  # fmt: skip
        config = compose_config([*words, f"data.references={kinds}"])
        config.student.architecture = FAMILY.defaults() | {"num_layers": 1}
        shapes = planned_shapes(config)[1]
        assert shapes["references"] == (4 * rows, 24) and shapes["reference_sounds"] == (sounds, 32)
        assert shapes["text"][0] == shapes["text_tags"][0] == 512 + text
