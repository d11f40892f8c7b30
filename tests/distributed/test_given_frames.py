"""Samples from keyframes and references (MiniMax-H3) and a first frame (LTX-2) are those of diffusers on any mesh."""

from unittest import mock

import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline, LTX2VideoTransformer3DModel, MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3 import before_denoise
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import (
    MiniMaxH3FL2VACoreDenoiseStep,
    MiniMaxH3Ref2VACoreDenoiseStep,
)

from distill.evaluate.sampling import ClipSampler
from distill.methods import build_method
from distill.methods.dmd2 import Dmd2Settings
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.mesh import build_mesh
from fsdp_cp.rng import StepRandom
from models.condition import Condition
from models.families.ltx2 import LTX2
from models.families.minimax_h3 import MiniMaxH3
from models.roles.load import build_role
from models.roles.role_plan import plan_role
from tests.oracles.tiny_minimax_h3 import REFERENCE_SIZES, references_of
from tests.tiers import long_case, slow
from tests.tiny_ltx2_pipeline import build_tiny_ltx2_pipeline
from tests.tiny_minimax_h3_pipeline import TRANSFORMER

SEED = 5
TIMES = {"ltx2": [1.0, 0.75, 0.5, 0.25], "minimax_h3": [1.0, 0.947368, 0.857143, 0.666667]}
SHAPES = {
    "ltx2": {"video": (8, 3, 2, 3), "audio": (2, 35, 4)},
    "minimax_h3": {"video": (24, 37, 2, 2), "audio": (32, 207, 2)},
}
"""MiniMax-H3: the shortest clip, with one row a frame, so that two keyframes have fewer rows than four ranks."""
CLIPS = ["0", "1"]


def _drawn(name, *shape):
    return StepRandom(seed=3, step=0, positions=range(2)).normal(name, shape)


def _condition(family, anchors=(), clips=None):
    text, width = _drawn("text", 8, 48 if family == "ltx2" else 24), SHAPES[family]["video"][2:]
    if family == "ltx2":
        fps = torch.full((2, 1), 12.0)
        frame = _drawn("first_frame", 8, 1, *width)
        return Condition({"text": text, "audio_text": _drawn("audio_text", 8, 24), "fps": fps, "first_frame": frame})
    tagged = {"text_tags": torch.arange(8) < torch.tensor([[2], [3]]), "text_length": torch.tensor([8, 5])}
    if clips is not None:
        given = {"references": _drawn("references", 84, 24), "reference_sounds": _drawn("sounds", 26, 32)}
        return Condition({"text": text, "reference_sizes": REFERENCE_SIZES[clips]} | given | tagged)
    keyframes = {
        "keyframes": _drawn("keyframes", 24, len(anchors), *width),
        "keyframe_anchors": torch.tensor(anchors).expand(2, -1),
    }
    return Condition({"text": text} | keyframes | tagged)


class _Captions:
    """Part of a data set that sampling needs."""

    def __init__(self, family, condition):
        self.latent_shapes, self.given = SHAPES[family], condition

    def condition(self, captions, clips=None):
        return self.given[torch.tensor([int(caption) for caption in captions])]


def _ours(family, folder, condition, dp_shard, cp):
    """Return both clips' latents by the student's sampler."""
    mesh = build_mesh(dp_shard=dp_shard, cp=cp, heads=4, device_type="cpu")
    shapes = {name: tuple(x.shape[1:]) for name, x in condition.tensors.items()}
    role = build_role(
        plan_role("student", checkpoint=str(folder), family=family), mesh=mesh, device=torch.device("cpu"),
        trainable=False, shapes=SHAPES[family], condition_shapes=shapes,
    )  # fmt: skip
    settings = Dmd2Settings(step_list=TIMES[family], student_sampler="ode", guidance_scale=1.0)
    method, data = build_method(settings, {"student": role}), _Captions(family, condition)
    sampler = ClipSampler(method=method, data=data, mesh=mesh, device=torch.device("cpu"))
    return sampler.generate("student", CLIPS, steps=4, seed=SEED, batch=1).parts


def _start(family):
    """Return the noise of both clips."""
    random = StepRandom(seed=SEED, step=0, positions=range(2))
    names = {"video": "sample/noise", "audio": "sample/noise/audio"}
    return {part: random.normal(names[part], shape) for part, shape in SHAPES[family].items()}


def _off(ours, theirs):
    return {part: relative_error(ours[part], x) for part, x in theirs.items()}


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    torch.manual_seed(0)
    network = MiniMaxH3Transformer3DModel(**TRANSFORMER)
    for parameter in network.parameters():  # two rows of 453 must matter
        parameter.data += 0.3 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("minimax_h3")
    network.save_pretrained(folder)
    return network, folder


@torch.no_grad()
def _of_minimax_h3(network, condition, noises):
    """Sample both clips by diffusers' steps, which draw the noise of given rows; ``noises`` replace their draws."""
    schedulers = MiniMaxH3().schedulers(times=TIMES["minimax_h3"], stochastic=False)
    of_references = "references" in condition.tensors
    core = MiniMaxH3Ref2VACoreDenoiseStep if of_references else MiniMaxH3FL2VACoreDenoiseStep
    steps, start, made = core().init_pipeline(), _start("minimax_h3"), []
    steps.update_components(**{"transformer_ref" if of_references else "transformer": network}, **schedulers)
    for i in range(2):
        given = {name: tensor[i] for name, tensor in condition.tensors.items()}
        count = given["text_length"]
        if of_references:
            kinds, pictures, draws, sounds = references_of(condition.tensors | {"reference_noise": noises}, i)
            inputs = {"normalized_references": kinds, "condition_latents": pictures, "audio_condition_latents": sounds}
        else:
            draws = [noise[None, :, None] for noise in noises[i].unbind(1)]
            inputs = {"condition_latents": [frame[None, :, None] for frame in given["keyframes"].unbind(1)]}
            inputs["keyframe_anchors"] = tuple(("first", "last")[anchor] for anchor in given["keyframe_anchors"])
        with mock.patch.object(before_denoise, "randn_tensor", side_effect=draws):
            found = steps(
                prompt_embeds=given["text"][None, :count], text_token_tags=1 - given["text_tags"][:count].long(),
                latents=start["video"][i : i + 1], audio_latents=start["audio"][i].permute(2, 0, 1), **inputs,
                height=32, width=32, num_frames=124, num_inference_steps=5,
            )  # fmt: skip
        made.append((found.get("latents")[0], found.get("audio_latents").permute(1, 2, 0)))
    return {part: torch.stack(x) for part, x in zip(("video", "audio"), zip(*made, strict=True), strict=True)}


@slow
@pytest.mark.parametrize(
    ("anchors", "clips"),
    [
        ([0, 1], None),
        ([1], None),
        long_case([0], None),
        (None, [0, 1]),
        long_case(None, [2, 3]),
    ],
)
def test_given_rows_of_minimax_h3(pools, network, anchors, clips):
    """The noise of a keyframe or reference is that of its clip's seed; the steps see the same."""
    network, folder = network
    condition, name = _condition("minimax_h3", anchors, clips), "keyframe" if clips is None else "reference"
    random = StepRandom(seed=SEED, step=0, positions=range(2))
    noises = random.normal(f"condition/{name}_noise", condition.tensors[f"{name}s"].shape[1:])
    theirs = _of_minimax_h3(network, condition, noises)
    for sizes in ((1, 1), (1, 4), (2, 2)):
        for ours in pools[sizes[0] * sizes[1]].run(_ours, "minimax_h3", folder, condition, *sizes):
            assert max(_off(ours, theirs).values()) < 1e-5, sizes
    other = _of_minimax_h3(network, condition, 20 * noises)
    assert min(_off(other, theirs).values()) > 3e-5, "the check sees noise twenty times as large"


@slow
@pytest.mark.parametrize("version", ["2.5", *(long_case(v) for v in ("2.0", "2.3"))])
def test_the_first_frame_of_ltx2(pools, tmp_path, version):
    folder, condition = build_tiny_ltx2_pipeline(tmp_path / "pipeline", version=version), _condition("ltx2")
    schedulers = LTX2().schedulers(times=TIMES["ltx2"], stochastic=False, boundaries=[], experts=[0] * 4)
    transformer = LTX2VideoTransformer3DModel.from_pretrained(folder / "transformer")
    if transformer.config.use_prompt_embeddings:
        condition = Condition({n: x[..., :24] if "text" in n else x for n, x in condition.tensors.items()})
    pipeline = LTX2ImageToVideoPipeline.from_pretrained(folder, transformer=transformer, **schedulers)
    pipeline.set_progress_bar_config(disable=True)
    vae, spread, mean = (
        pipeline.vae,
        *(x.view(-1, 1, 4) for x in (pipeline.audio_vae.latents_std, pipeline.audio_vae.latents_mean)),
    )
    neutral = {"guidance_scale": 1.0, "modality_scale": 1.0, "stg_scale": 0.0, "guidance_rescale": 0.0}
    neutral |= {f"audio_{name}": scale for name, scale in neutral.items()}
    texts = (condition.tensors["text"], condition.tensors["audio_text"], torch.ones(2, 8, dtype=torch.long))

    def theirs(frame):
        start = _start("ltx2")
        start["video"][:, :, :1] = frame
        with mock.patch.object(pipeline.connectors, "forward", return_value=texts):
            made, audio = pipeline(
                prompt=["a", "b"], max_sequence_length=8, height=64, width=96, num_frames=17, frame_rate=12.0,
                latents=pipeline._denormalize_latents(start["video"], vae.latents_mean, vae.latents_std),
                audio_latents=start["audio"] * spread + mean, num_inference_steps=4, output_type="latent",
                return_dict=False, **neutral,
            )  # fmt: skip
        made = pipeline._normalize_latents(made, vae.latents_mean, vae.latents_std)
        return {"video": made, "audio": (audio - mean) / spread}

    wanted, frame = theirs(condition.tensors["first_frame"]), condition.tensors["first_frame"]
    for sizes in ((1, 1), (1, 4), (2, 2)):
        for ours in pools[sizes[0] * sizes[1]].run(_ours, "ltx2", folder / "transformer", condition, *sizes):
            assert max(_off(ours, wanted).values()) < 1e-5, sizes
            assert (ours["video"][:, :, :1] - frame).abs().max() < 1e-5
    assert _off(theirs(-frame), wanted)["audio"] > 1e-4, "the check sees the frame"
