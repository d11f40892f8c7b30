"""Every family, with every condition, equals plain diffusers networks in one process; also uneven tokens."""

import pytest
import torch

from distill.methods.meanflow import MeanFlow, MeanFlowSettings
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sharding.settings import ShardSettings
from models.condition import Condition
from models.lora.settings import LoraSettings
from models.roles.role_plan import plan_role
from tests.oracles import plain_run, tiny_hunyuan, tiny_ltx, tiny_wan
from tests.oracles.difference import check_run, compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import METHODS, Setup, random_clips
from tests.oracles.samples import video
from tests.oracles.tiny_wan import tiny_role
from tests.tiers import long, long_case, parametrize, slow, slow_case

TI2V = tiny_wan.ARCHITECTURE | {"in_channels": 48, "out_channels": 48}
TI2V_LATENTS = (48, 3, 6, 10)  # 45 tokens
FRAME = (48, 1, 6, 10)
WRITE = {
    "wan-image": lambda folder: tiny_wan.write_checkpoints(folder, tiny_wan.IMAGE),
    "wan-ti2v": lambda folder: tiny_wan.write_checkpoints(folder, TI2V),
    "ltx": tiny_ltx.write_checkpoints,
    "hunyuan": tiny_hunyuan.write_checkpoints,
}
_LTX = {"architecture": tiny_ltx.ARCHITECTURE, "family": "ltx", "latent_shape": tiny_ltx.LATENT_SHAPE}
_LTX_FRAME = {"first_frame": (tiny_ltx.LATENT_SHAPE[0], 1, *tiny_ltx.LATENT_SHAPE[2:])}
_HUNYUAN = {
    "architecture": tiny_hunyuan.ARCHITECTURE, "family": "hunyuan15", "latent_shape": tiny_hunyuan.LATENT_SHAPE,
}  # fmt: skip
_TI2V = {"architecture": TI2V, "latent_shape": TI2V_LATENTS}
SETUPS = {
    "wan-image": {"architecture": tiny_wan.IMAGE, "condition_shapes": tiny_wan.IMAGE_SHAPES},
    "wan-ti2v": _TI2V | {"condition_shapes": {"text": (5, 10), "first_frame": FRAME}},
    "wan-ti2v, text": _TI2V,
    "ltx, text": _LTX | {"condition_shapes": tiny_ltx.CONDITION_SHAPES},
    "ltx": _LTX | {"condition_shapes": tiny_ltx.CONDITION_SHAPES | _LTX_FRAME},
    "hunyuan, text": _HUNYUAN | {"condition_shapes": tiny_hunyuan.CONDITION_SHAPES},
    "hunyuan": _HUNYUAN | {"condition_shapes": tiny_hunyuan.CONDITION_SHAPES | tiny_hunyuan.IMAGE_SHAPES},
}
"""Networks and conditions. All except those of text alone have an image or a first frame."""
SPLIT = {"dp_shard": 2, "cp": 2, "micro_batch_size": 2}
TWO = {"cp": 2, "micro_batch_size": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    class Folders(dict):
        def __missing__(self, name):
            self[name] = tmp_path_factory.mktemp(name)
            WRITE[name](self[name])
            return self[name]

    return Folders()


def _check(pools, folders, family, method, sizes, steps=2):
    folder = folders[family.partition(",")[0]]
    setup = Setup(**SETUPS[family] | sizes, steps=steps, method=METHODS[method])
    trace = check_run(pools, setup, folder)
    if "image_embeds" in setup.condition_shapes:
        image = [g for name, g in trace.gradients[0].items() if "add_k_proj" in name or "image_embedder" in name]
        assert image and all(g.norm() > 0 for g in image), "the image has no part in it"
    return trace


@pytest.mark.parametrize("family", [pytest.param(f, marks=slow if f == "hunyuan" else ()) for f in WRITE])
def test_two_steps(pools, folders, family):
    _check(pools, folders, family, "flow_matching", TWO)


@pytest.mark.parametrize(
    ("family", "method", "sizes"),
    [
        *(slow_case(family, "dmd2", SPLIT) for family in ("wan-image", "ltx")),
        *(long_case(family, "dmd2", SPLIT) for family in ("wan-ti2v", "wan-ti2v, text", "ltx, text", "hunyuan")),
        slow_case("wan-ti2v", "rcm", TWO),
        *(long_case(family, "rcm", TWO) for family in ("wan-image", "ltx", "hunyuan")),
        # A second time, in addition to the times of tokens.
        slow_case("ltx", "meanflow", TWO),
        *(long_case(family, "meanflow", TWO) for family in ("wan-ti2v", "hunyuan")),
        *(long_case(family, "dmd2", {"cp": 4, "micro_batch_size": 4}) for family in ("ltx", "hunyuan")),
        long_case("hunyuan", "dmd2, GAN", TWO),
        # Replicas refuse parameters that get no gradient; checkpointing runs blocks again.
        long_case("hunyuan, text", "dmd2", {"dp_replicate": 2, "cp": 2, "micro_batch_size": 2}),
        slow_case("hunyuan", "dmd2", TWO | {"activation_checkpointing": True}),
        long_case("hunyuan, text", "dmd2", TWO | {"changes": {"all": {"compile": True}}}),
    ],
    ids=str,
)
def test_each_role(pools, folders, family, method, sizes):
    """DMD2 trains both roles in two steps, rCM in four."""
    _check(pools, folders, family, method, sizes, steps=4 if method == "rcm" else 2)


@long
def test_adapters_of_hunyuan(pools, folders):
    """All linear layers of the blocks get adapters, except those after the last block's text attention."""
    lora = {role: LoraSettings(rank=3, alpha=6) for role in ("student", "fake")}
    trace = _check(pools, folders, "hunyuan, text", "dmd2", TWO | {"lora": lora})
    assert trace.gradients[0] and not any(".2.ff_context." in name for name in trace.gradients[0])


@parametrize(
    ("family", "names"),
    [
        ("wan-image", ("image_mask", "image_latents", "image_embeds")),
        ("wan-ti2v", ("first_frame",)),
        ("ltx", ("text_mask", "first_frame", "spacing")),
        ("hunyuan", ("text_mask", "glyph_mask", "first_frame", "image_embeds")),
    ],
    quick=2,
)
def test_the_comparison_sees_the_condition(folders, monkeypatch, family, names):
    """The comparison rejects another image, text without its mask, and coordinates of another frame rate."""
    setup = Setup(**SETUPS[family], steps=1, method=METHODS["flow_matching"])
    truth = oracle_trace(setup, folders[family])
    for name in names:
        with monkeypatch.context() as patch:
            if name == "spacing":
                patch.setattr(tiny_ltx, "SPACING", (8 / 25, 32.0, 32.0, 0.0))
            else:
                data = random_clips(setup)
                tensor = data.tensors[name]
                data.tensors[name] = torch.ones_like(tensor) if tensor.dtype == torch.bool else -tensor
                patch.setattr(plain_run, "random_clips", lambda _, data=data: data)
            assert compare(oracle_trace(setup, folders[family]), truth).gradient > 1e-3, name


def _way_to_the_frame(folder):
    """Return how far ``x - t v`` is from the given frame, for a role that computes in bf16, at three times."""
    plan = plan_role("student", checkpoint=str(folder / "student"), sharding=ShardSettings(precision="bf16"))
    conditions = SETUPS["wan-ti2v"]["condition_shapes"]
    role = tiny_role(plan, build_mesh(cp=2, heads=4), latents=TI2V_LATENTS, conditions=conditions, trainable=False)
    generator = torch.Generator().manual_seed(3)
    x, frame, text = (torch.randn(3, *shape, generator=generator) for shape in (TI2V_LATENTS, FRAME, (5, 10)))
    t = torch.tensor([1.0, 0.5, 1e-3])
    v = role.velocity(video(x), t, Condition({"text": text, "first_frame": frame})).video
    return (x - t.view(-1, 1, 1, 1, 1) * v)[:, :, :1].sub(frame).abs().max(), v.dtype


@slow
def test_the_frame_is_met_in_fp32_where_the_network_computes_in_bf16(pools, folders):
    """If the state at t = 1e-3 were rounded to bf16, ``x - t v`` would miss the frame by 4 units."""
    for error, dtype in pools[2].run(_way_to_the_frame, folders["wan-ti2v"]):
        assert dtype == torch.float32 and error < 1e-6


def _velocities(folder):
    """Return velocities of a student with a second time in fp32 and bf16, and how many parameters have a gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = tiny_ltx.CONDITION_SHAPES
    x, text = (torch.randn(1, *shape, generator=generator) for shape in (tiny_ltx.LATENT_SHAPE, shapes["text"]))
    mask = torch.tensor([[True, True, False, False, False]])
    condition = Condition({"text": text, "text_mask": mask, "latent_spacing": torch.tensor([tiny_ltx.SPACING])})
    plan = plan_role(
        "student", checkpoint=str(folder / "student"), family="ltx",
        additions=MeanFlow.additions(MeanFlowSettings())["student"],
    )  # fmt: skip
    found = []
    for precision in ("fp32", "bf16"):
        shape = {"latents": tiny_ltx.LATENT_SHAPE, "conditions": shapes}
        role = tiny_role(plan, build_mesh(cp=2, heads=4), precision=precision, **shape)
        velocity = role.velocity(video(x), torch.tensor([0.5]), condition, torch.tensor([0.2])).video
        velocity.square().mean().backward()
        found.append((velocity.detach(), sum(p.grad is not None for p in role.network.parameters())))
    return found


@slow
def test_bf16_of_ltx_with_a_second_time(pools, folders):
    """The second time's fp32 embedding is added to the time embedding, which later layers take in bf16."""
    (exact, trained), (rounded, too) = pools[2].run(_velocities, folders["ltx"])[0]
    assert trained == too and 0 < relative_error(rounded, exact) < 0.02
