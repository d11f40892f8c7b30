"""Methods on networks with video and sound, on meshes: against formulas in float64, and resumed."""

from dataclasses import replace

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel, MiniMaxH3Transformer3DModel
from einops import rearrange

from distill.config.schema import EmaSettings
from distill.methods import build_method
from distill.methods.base import Batch
from distill.methods.dmd2 import Dmd2Settings
from distill.methods.flow_matching import FlowMatchingSettings
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.mesh import build_mesh
from fsdp_cp.rng import StepRandom
from models.families.ltx2_5 import CHANGES
from models.lora.settings import LoraSettings
from models.sample import Sample
from tests.oracles import tiny_minimax_h3
from tests.oracles.dmd2_of_parts import Dmd2OfParts, FitOfParts
from tests.oracles.method_step import SEED, Case, plain_step, step_errors, step_on_rank
from tests.oracles.runs import Setup
from tests.oracles.sharded_run import check_resume
from tests.oracles.tiny_wan import text_condition
from tests.tiers import long_case, parametrize, slow
from tests.tiny_ltx2_pipeline import LATER

MESHES = [(2, 2), (1, 1), (1, 2), (2, 1)]
SHAPES = {"video": (4, 3, 2, 3), "audio": (2, 7, 2)}
"""18 tokens of video and 7 of sound, which no mesh divides."""
ARCHITECTURE = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 12, "cross_attention_dim": 48,
    "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 4, "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 32, "num_layers": 2, "caption_channels": 20, "rope_type": "split",
}  # fmt: skip
CONDITION = {"text": (5, 20), "audio_text": (5, 20), "fps": (1,)}
RATIO = 0.5
SETTINGS = Dmd2Settings(
    step_list=[1.0, 0.8], shift=6.0, time_limits="draw", guidance_scale=2.0, audio_guidance_scale=3.0, audio_weight=0.7,
    audio_shift_ratio=RATIO, fake_updates_per_student_update=1,
)  # fmt: skip
BATCH = 4
TRAINED = ("student", "fake")
"""Roles in the order of the steps that train them."""
ADAPTERS = {role: LoraSettings(rank=3, alpha=6) for role in TRAINED}
_LTX2 = ("ltx2", LTX2VideoTransformer3DModel, ARCHITECTURE, SHAPES, CONDITION, SETTINGS)
LORA = LoraSettings(rank=3, alpha=6, targets=["*.to_q", "*.to_k", "*.to_v", "*.to_out.0", "*ff.net.*"])
"""Layers that the recipe of LTX-2 adapts."""
CASES = {
    "ltx2": Case(*_LTX2[:-1], replace(SETTINGS, projection=True)),
    "ltx2, adapted": Case(*_LTX2, {"student": LORA, "fake": LORA}),
    # An embedding of keyframes is not used.
    "ltx2, 2.5": Case(
        *_LTX2[:2], ARCHITECTURE | LATER | CHANGES, SHAPES, {**CONDITION, "text": (5, 48), "audio_text": (5, 32)},
        SETTINGS,
    ),
    # The teacher has no guidance. Each rank runs its samples one by one.
    "minimax_h3, adapted": Case(
        "minimax_h3", MiniMaxH3Transformer3DModel, tiny_minimax_h3.ARCHITECTURE, tiny_minimax_h3.SHAPES,
        {"text": (5, 20)}, replace(SETTINGS, guidance_scale=1.0, audio_guidance_scale=1.0), ADAPTERS,
    ),
    # The student makes two steps, with the same noise on the keyframes.
    "minimax_h3, keyframes": Case(
        "minimax_h3", MiniMaxH3Transformer3DModel, tiny_minimax_h3.ARCHITECTURE, tiny_minimax_h3.SHAPES,
        {"text": (5, 20)} | tiny_minimax_h3.KEYFRAMES,
        replace(SETTINGS, guidance_scale=1.0, audio_guidance_scale=1.0),
    ),
    "minimax_h3, references": Case(
        "minimax_h3", MiniMaxH3Transformer3DModel, tiny_minimax_h3.ARCHITECTURE, tiny_minimax_h3.SHAPES,
        {"text": (5, 20)} | tiny_minimax_h3.REFERENCES,
        replace(SETTINGS, guidance_scale=1.0, audio_guidance_scale=1.0, projection=True), ADAPTERS,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return CASES["ltx2"].write(tmp_path_factory.mktemp("ltx2"))


def given_rows(case):
    return next((name for name in ("keyframe", "reference") if f"{name}s" in case.condition), "")


def condition(case):
    generator = torch.Generator().manual_seed(7)
    shape = (2, *case.condition["text"])
    text, null = (torch.randn(n, *shape, generator=generator).double() for n in (BATCH, 1))
    made = text_condition(text[:, 0], null[0, 0])
    rows = torch.tensor([[2], [0], [1], [3]])
    tensors = {"text_tags": torch.arange(5) < rows, "text_length": torch.tensor([5, 3, 4, 5])}
    if "references" in case.condition:
        tensors["reference_sizes"] = tiny_minimax_h3.REFERENCE_SIZES
        for name in ("references", "reference_sounds"):
            tensors[name] = torch.randn(BATCH, *case.condition[name], generator=generator).double()
        return replace(made, tensors=made.tensors | tensors)
    if "keyframes" in case.condition:
        tensors["keyframe_anchors"] = torch.tensor([[0, 1], [1, 0], [0, 1], [0, 1]])
        tensors["keyframes"] = torch.randn(BATCH, *case.condition["keyframes"], generator=generator).double()
        return replace(made, tensors=made.tensors | tensors)
    if case.family != "ltx2":
        return made
    width = case.condition["audio_text"][1]
    tensors = {"audio_text": text[:, 1, :, :width], "fps": torch.full((BATCH, 1), 8.0, dtype=torch.float64)}
    null_values = made.null_values | {"audio_text": null[0, 1, :, :width]}
    return replace(made, tensors=made.tensors | tensors, null_values=null_values)


# On the ranks


def _steps(case, folder, dp_shard, cp):
    """Return this rank's samples, and a step of each trained role."""
    mesh = build_mesh(dp_shard=dp_shard, cp=cp, heads=4, device_type="cpu")
    mine = torch.arange(BATCH).chunk(mesh.dp_size)[mesh.dp_rank]
    method = build_method(case.settings, case.roles(folder, mesh))
    clock = method.clock("student")
    batch = Batch(latents=None, condition=condition(case)[mine], latent_shapes=case.shapes, latent_shifts=clock)
    return mine, {name: step_on_rank(method, step, batch, mine, BATCH) for step, name in enumerate(TRAINED)}


# The formulas


def _call_ltx2(network, x, times, given):
    frames, height, width = x["video"].shape[2:]
    video = {"num_frames": frames, "height": height, "width": width, "fps": 8.0}
    v, audio = network(
        hidden_states=rearrange(x["video"], "b c t h w -> b (t h w) c"),
        audio_hidden_states=rearrange(x["audio"], "b c l f -> b l (c f)"),
        encoder_hidden_states=given.tensors["text"],
        audio_encoder_hidden_states=given.tensors["audio_text"],
        timestep=1000 * times["video"],
        audio_timestep=1000 * times["audio"],
        sigma=1000 * times["video"],
        audio_sigma=1000 * times["audio"],
        audio_num_frames=x["audio"].shape[2],
        use_cross_timestep=True,
        return_dict=False,
        **video,
    )
    v = rearrange(v, "b (t h w) c -> b c t h w", t=frames, h=height)
    return {"video": v, "audio": rearrange(audio, "b l (c f) -> b c l f", c=SHAPES["audio"][0])}


@pytest.fixture(scope="module", params=[pytest.param(c, marks=slow if c != "ltx2" else ()) for c in CASES])
def truth(request, tmp_path_factory):
    """Return a case and its folder, and loss, clip norm, gradients and normalisers of the whole batch by role."""
    case, found = CASES[request.param], {}
    folder = case.write(tmp_path_factory.mktemp(request.param))
    networks = {name: case.plain(folder, name) for name in ("teacher", *TRAINED)}

    def call(name, x, times, null):
        network, given = networks[name], condition(case).null if null else condition(case)
        if case.family == "ltx2":
            return _call_ltx2(network, x, times, given)
        rows = given.tensors | {f"{kind}_noise": noise} if kind else None
        return tiny_minimax_h3.velocity(network, x, times, given.tensors["text"], rows)

    for step, name in enumerate(TRAINED):
        random = StepRandom(seed=SEED, step=step, positions=range(BATCH))
        if kind := given_rows(case):
            noise = random.normal(f"condition/{kind}_noise", case.condition[f"{kind}s"], torch.float64)
        formulas = Dmd2OfParts(call, case.settings, random, case.shapes, {"video": 1.0, "audio": RATIO})
        loss = formulas.student_loss() if name == "student" else formulas.fake_loss()
        found[name] = *plain_step(loss, networks[name]), formulas.normalisers
    return case, folder, found


@parametrize(("dp_shard", "cp"), MESHES, quick=1)
def test_a_step_equals_its_formula(pools, truth, dp_shard, cp):
    """Student's and fake's loss, clip norm, all gradients, and the normaliser of each part."""
    case, folder, wanted = truth
    ranks = pools[dp_shard * cp].run(_steps, case, folder, dp_shard, cp)
    errors = step_errors(ranks, wanted)
    for name, (*_, normalisers) in wanted.items():
        shares = {tuple(mine.tolist()): found[name][3] for mine, found in ranks}
        for part, q in normalisers.items():
            observed = "dmd_normaliser" if part == "video" else f"dmd_normaliser/{part}"
            total = sum(share[observed][0] for share in shares.values())
            errors[name, f"normaliser of {part}"] = relative_error(torch.as_tensor(total / BATCH), q.mean())
    print(f"\n{case.family} {dp_shard} x {cp}:", {" ".join(key): f"{error:.0e}" for key, error in errors.items()})
    assert max(errors.values()) < 1e-5, errors


# Built-in guidance

FIT = FlowMatchingSettings(
    time="uniform", shift=6.0, audio_weight=0.7, audio_shift_ratio=RATIO, caption_dropout=0.0, guidance_scale=1.0,
    built_in_guidance=3.0, guidance_min_time=0.5, anchor_weight=0.5, anchor_min_time=0.8, keep_weight=0.25,
)  # fmt: skip
GUIDED = replace(CASES["minimax_h3, adapted"], settings=FIT, lora={"student": ADAPTERS["student"]})
RANGES = {0: 1, 1: 2}
"""Range of time of each step, in which not all samples' first draws are."""


def _clips(clock):
    generator = torch.Generator().manual_seed(8)
    shapes = {part: (BATCH, *shape) for part, shape in GUIDED.shapes.items()}
    return Sample({part: torch.randn(shape, generator=generator).double() for part, shape in shapes.items()}, clock)


def _fits(folder, dp_shard, cp):
    mesh = build_mesh(dp_shard=dp_shard, cp=cp, heads=4, device_type="cpu")
    mine = torch.arange(BATCH).chunk(mesh.dp_size)[mesh.dp_rank]
    method = build_method(FIT, GUIDED.roles(folder, mesh))
    batch = Batch(latents=_clips(method.clock("student"))[mine], condition=condition(GUIDED)[mine])
    return mine, {step: step_on_rank(method, step, batch, mine, BATCH) for step in RANGES}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Return a folder, and loss, clip norm and gradients of the whole batch by step."""
    folder, wanted = GUIDED.write(tmp_path_factory.mktemp("fitted")), {}
    networks = {name: GUIDED.plain(folder, name) for name in ("teacher", "student")}

    def call(name, x, times, null):
        given = condition(GUIDED).null if null else condition(GUIDED)
        return tiny_minimax_h3.velocity(networks[name], x, times, given.tensors["text"])

    for step, in_range in RANGES.items():
        random = StepRandom(seed=SEED, step=step, positions=range(BATCH))
        formulas = FitOfParts(call, FIT, random, GUIDED.shapes, {"video": 1.0, "audio": RATIO}, clips=_clips({}).parts)
        wanted[step] = plain_step(formulas.student_loss(), networks["student"])
        assert formulas.range == in_range and formulas.redrawn
    return folder, wanted


@parametrize(("dp_shard", "cp"), MESHES, quick=0)
def test_a_fit_with_built_in_guidance_equals_its_formula(pools, fitted, dp_shard, cp):
    folder, wanted = fitted
    errors = step_errors(pools[dp_shard * cp].run(_fits, folder, dp_shard, cp), wanted)
    assert max(errors.values()) < 1e-5, errors


# A run


@slow
@pytest.mark.parametrize("lora", [{}, long_case(ADAPTERS)])
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(pools, folder, tmp_path, lora):
    setup = Setup(
        cp=2, dp_shard=2, micro_batch_size=2, steps=4, family="ltx2", architecture=ARCHITECTURE, method=SETTINGS,
        latent_shape=SHAPES["video"], audio_shape=SHAPES["audio"], condition_shapes=CONDITION, lora=lora,
        ema=EmaSettings(enabled=True),
    )  # fmt: skip
    check_resume(pools[4], setup, folder, tmp_path)
