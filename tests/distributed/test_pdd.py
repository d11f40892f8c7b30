"""pdd on meshes: a step against its formulas in float64, with sound too; heads saved, averaged and resumed."""

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from diffusers import MiniMaxH3Transformer3DModel, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import nn

from distill.config.schema import EmaSettings
from distill.methods import build_method
from distill.methods.base import Batch
from distill.methods.pdd import Pdd, PddSettings
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import build_mesh
from fsdp_cp.rng import StepRandom
from models.export import RoleExport
from models.export_folder import sharded
from models.lora.saved import find_adapters
from models.lora.settings import LoraSettings
from models.roles.load import build_roles
from models.roles.role_plan import plan_role
from tests.oracles import tiny_minimax_h3, tiny_wan
from tests.oracles.method_step import SEED, Case, plain_step, step_errors, step_on_rank
from tests.oracles.pdd_of_heads import PddOfHeads
from tests.oracles.plain_run import from_a_frame
from tests.oracles.runs import Setup, random_adapter
from tests.oracles.sharded_run import check_resume
from tests.oracles.tiny_wan import CONDITION_SHAPES, text_condition
from tests.oracles.written_out import WrittenOut
from tests.tiers import long_case, parametrize, slow
from tests.unit.refused import refused

MESHES = [(2, 2), (1, 1), (1, 2), (2, 1)]
BATCH, STEPS = 4, (0, 1)
SETTINGS = PddSettings(grid_steps=8, steps=[2, 4], guidance_scale=2.0, shift=3.0)
ADAPTERS = {"student": LoraSettings(rank=3, alpha=6)}


@dataclass(frozen=True, kw_only=True)
class PddCase(Case):
    """A family whose student has heads."""

    layers: dict[str, str]
    """Last layer of each part."""
    ratio: float = 1.0
    """Shift from the video's time to the sound's."""


_WAN = ("wan", WanTransformer3DModel, tiny_wan.ARCHITECTURE, {"video": tiny_wan.LATENT_SHAPE})
_VIDEO = {"layers": {"video": "proj_out"}}
CASES = {
    "wan": PddCase(*_WAN, CONDITION_SHAPES, SETTINGS, **_VIDEO),
    "wan, from a frame": PddCase(*_WAN, CONDITION_SHAPES | {"first_frame": (4, 1, 8, 8)}, SETTINGS, **_VIDEO),
    "wan, all blocks": PddCase(
        *_WAN, CONDITION_SHAPES, replace(SETTINGS, blocks="all", solver="euler", targets=3), **_VIDEO
    ),
    "minimax_h3, adapted": PddCase(
        "minimax_h3", MiniMaxH3Transformer3DModel, tiny_minimax_h3.ARCHITECTURE, tiny_minimax_h3.SHAPES,
        {"text": (5, 20)}, replace(SETTINGS, guidance_scale=1.0, shift=12.0, audio_weight=0.7), ADAPTERS,
        layers={"video": "proj_out", "audio": "audio_proj_out"}, ratio=0.25,
    ),
}  # fmt: skip


def _condition(case):
    generator = torch.Generator().manual_seed(7)
    text, null = (torch.randn(n, *case.condition["text"], generator=generator).double() for n in (BATCH, 1))
    made = text_condition(text, null[0])
    if "first_frame" not in case.condition:
        return made
    frame = torch.randn(BATCH, *case.condition["first_frame"], generator=generator).double()
    return replace(made, tensors=made.tensors | {"first_frame": frame})


# On the ranks


@lru_cache  # every mesh creates process groups with their threads
def _mesh(dp_shard, cp):
    return build_mesh(dp_shard=dp_shard, cp=cp, heads=4, device_type="cpu")


def _method(case, folder, mesh, *random) -> Pdd:
    return build_method(case.settings, case.roles(folder, mesh, *random))


def _batch(case, method, rows):
    shifts = method.clock("student")
    return Batch(latents=None, condition=_condition(case)[rows], latent_shapes=case.shapes, latent_shifts=shifts)


def _steps(case, folder, dp_shard, cp):
    """Return this rank's samples, and two steps."""
    mesh = _mesh(dp_shard, cp)
    mine = torch.arange(BATCH).chunk(mesh.dp_size)[mesh.dp_rank]
    method = _method(case, folder, mesh)
    batch = _batch(case, method, mine)
    return mine, {step: step_on_rank(method, step, batch, mine, BATCH) for step in STEPS}


# The formulas


class _Plain:
    """Plain networks of a case in float64, the student with heads as parameters of their own."""

    def __init__(self, case, folder):
        self.case, self.networks = case, {}
        for name in ("teacher", "student"):
            self.networks[name] = case.plain(folder, name)
            if case.family == "wan":
                self.networks[name].set_attn_processor(WrittenOut())
        self.heads = {}
        for part, layer in case.layers.items():
            linear = self.networks["student"].get_submodule(layer).requires_grad_(False)
            for key, tensor in (("weight", linear.weight), ("bias", linear.bias)):
                name = f"additions.heads.{part}.{key}"
                values = random_adapter("student", name, (case.settings.grid_steps, *tensor.shape))
                self.heads[name] = nn.Parameter(values.double())

    @contextmanager
    def head(self, k):
        """Run the student within this context with the last layers of head k."""
        hooks = []
        for part, layer in self.case.layers.items():
            weight, bias = (self.heads[f"additions.heads.{part}.{key}"][k] for key in ("weight", "bias"))

            def replaced(module, args, _, weight=weight, bias=bias):
                return F.linear(args[0], module.weight + weight, module.bias + bias)

            hooks.append(self.networks["student"].get_submodule(layer).register_forward_hook(replaced))
        yield
        for hook in hooks:
            hook.remove()

    def call(self, name, x, times, null):
        condition = _condition(self.case)
        text = (condition.null if null else condition).tensors["text"]
        if self.case.family == "minimax_h3":
            times = {part: time.expand(len(text)) for part, time in times.items()}
            return tiny_minimax_h3.velocity(self.networks[name], x, times, text)
        t, network = times["video"].expand(len(text)), self.networks[name]
        if "first_frame" in condition.tensors:
            v, *_ = from_a_frame(network, x["video"], t, condition.tensors["first_frame"], text)
        else:
            (v,) = network(hidden_states=x["video"], timestep=1000 * t, encoder_hidden_states=text, return_dict=False)
        return {"video": v}


@pytest.fixture(scope="module", params=[pytest.param(c, marks=slow if c != "wan" else ()) for c in CASES])
def truth(request, tmp_path_factory):
    """Return a case and its folder, and loss, clip norm and gradients of the whole batch in two steps."""
    case, found = CASES[request.param], {}
    folder = case.write(tmp_path_factory.mktemp("pdd"))
    plain = _Plain(case, folder)
    for step in STEPS:
        random = StepRandom(seed=SEED, step=step, positions=range(BATCH))
        ratios = {"video": 1.0, "audio": case.ratio}
        formulas = PddOfHeads(plain.call, plain.head, case.settings, random, case.shapes, ratios)
        found[step] = plain_step(formulas.loss(), plain.networks["student"], plain.heads)
    return case, folder, found


@parametrize(("dp_shard", "cp"), MESHES, quick=1)
def test_a_step_equals_its_formula(pools, truth, dp_shard, cp):
    """Loss, clip norm and all gradients; the last layers under the heads have none."""
    case, folder, wanted = truth
    errors = step_errors(pools[dp_shard * cp].run(_steps, case, folder, dp_shard, cp), wanted)
    for _, _, gradients in wanted.values():
        assert all(gradients[f"additions.heads.{part}.weight"].norm() > 1e-4 for part in case.layers)
    print(f"\n{case.family} {dp_shard} x {cp}:", {f"{k} {name}": f"{error:.0e}" for (k, name), error in errors.items()})
    assert max(errors.values()) < 1e-5, errors


# Values


def _values(case, folder, size):
    """Return samples of student and teacher, and two heads' velocities with their difference by the formula."""
    mesh = _mesh(1, 1)
    method, random = _method(case, folder, mesh, "bf16", size), StepRandom(seed=SEED, step=0, positions=range(BATCH))
    batch = replace(_batch(case, method, slice(None)))
    batch = replace(batch, condition=batch.condition.to(torch.float32))
    noise, student = batch.noise(random, "noise"), method.roles["student"]
    kept = []
    layer = student.network.get_submodule(case.layers["video"])
    with torch.no_grad():
        hook = layer.register_forward_hook(lambda _m, args, out: kept.append((args[0].float(), out)))
        t = torch.full((BATCH,), 0.7)
        student.velocity(noise, t, batch.condition, heads=method.grid.mean((0, 1), (5, 6)))
        hook.remove()
        features, out = kept[-1]
        heads = {n: w.full_tensor() for n, w in student.weights().items() if n.startswith("additions.heads.video")}
        weight, bias = (heads[f"additions.heads.video.{key}"] for key in ("weight", "bias"))
        steps = method.generate("student", noise, batch.condition, 4, random)
        path = method.generate("teacher", noise, batch.condition, 4, random)
    difference = features @ (weight[5] - weight[0]).T + bias[5] - bias[0]
    return steps, path, out, difference, {w.dtype for w in heads.values()}


def test_new_heads_take_the_teachers_steps_and_small_ones_are_not_rounded(pools, tmp_path):
    """Under bf16: a new student's steps are the teacher's, and heads differ in less than bf16 can tell."""
    case = replace(CASES["wan"], settings=replace(SETTINGS, guidance_scale=1.0), lora=ADAPTERS)
    folder = case.write(tmp_path)
    ((steps, path, *_),) = pools[1].run(_values, case, folder, 0.0)
    assert relative_error(steps.video, path.video) < 1e-6
    ((steps, path, out, difference, dtypes),) = pools[1].run(_values, case, folder, 1e-3)
    assert relative_error(steps.video, path.video) > 1e-5
    ours = out.unflatten(-1, (-1, 2, 4)).select(-2, 1) - out.unflatten(-1, (-1, 2, 4)).select(-2, 0)
    assert relative_error(ours.flatten(-2), difference) < 1e-2 and dtypes == {torch.float32}


def _mistakes(case, folder):
    method = _method(case, folder, _mesh(1, 1))
    batch = _batch(case, method, slice(None))
    noise = batch.noise(StepRandom(seed=SEED, step=0, positions=range(BATCH)), "noise")
    t, rows = torch.full((BATCH,), 0.7, dtype=torch.float64), method.grid.mean((0, 1))
    with torch.no_grad():
        for role, given in (("student", {}), ("teacher", {"heads": rows})):
            with pytest.raises(RuntimeError):
                method.roles[role].velocity(noise, t, batch.condition, **given)
    with pytest.raises(UserError):
        method.generate("student", noise, batch.condition, 3, None)
    return True


def test_missing_heads_are_refused(pools, tmp_path):
    assert all(pools[1].run(_mistakes, CASES["wan"], CASES["wan"].write(tmp_path)))


def test_a_family_without_a_named_last_layer_is_refused():
    with refused("ltx"):
        plan_role("student", checkpoint=None, architecture={"num_layers": 1}, family="ltx",
                  additions=Pdd.additions(SETTINGS)["student"])  # fmt: skip


# A run


@slow
@pytest.mark.parametrize("blocks", ["one", long_case("all")])
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(pools, tmp_path, blocks):
    case = CASES["minimax_h3, adapted"]
    folder, settings = case.write(tmp_path / "networks"), replace(case.settings, blocks=blocks)
    setup = Setup(
        cp=2, dp_shard=2, micro_batch_size=2, steps=4, family=case.family, architecture=case.architecture,
        method=settings, latent_shape=case.shapes["video"], audio_shape=case.shapes["audio"],
        condition_shapes=case.condition, lora=case.lora, ema=EmaSettings(enabled=True),
    )  # fmt: skip
    weights = check_resume(pools[4], setup, folder, tmp_path / "run")
    for name in ("student", "average of student"):
        assert weights[name]["additions.heads.audio.weight"].norm() > 0


# VideoX-Fun's file


def _videox_file(folder, case):
    """Write a file as VideoX-Fun's trainer does, on the teacher in ``folder``; return its tensors."""
    base, rank, tensors = load_file(folder / "teacher" / "diffusion_pytorch_model.safetensors"), 3, {}
    generator = torch.Generator().manual_seed(3)
    for name, weight in base.items():
        if re.search(
            r"blocks\.\d+\.(attn\.to_[qkv]|attn\.to_out\.0|ff\.net\.[02](\.proj)?|adaln_proj\.linear)\.weight", name
        ):
            layer = name.removesuffix(".weight")
            tensors[f"{layer}.lora_down"] = torch.randn(rank, weight.shape[1], generator=generator)
            tensors[f"{layer}.lora_up"] = 0.1 * torch.randn(weight.shape[0], rank, generator=generator)
    for layer in case.layers.values():
        for kind in ("weight", "bias"):
            whole = base[f"{layer}.{kind}"].expand(8, *base[f"{layer}.{kind}"].shape)
            tensors[f"{layer}.{kind}"] = whole * (1 + 0.2 * torch.rand(whole.shape, generator=generator))
    targets = "to_q,to_k,to_v,to_out.0,ff.net.0.proj,ff.net.2,adaln_proj.linear"
    config = {"pdd_num_steps": 8, "pdd_block_size": 2, "lora_rank": rank, "lora_alpha": 3.0, "lora_targets": targets}
    (folder / "theirs").mkdir()
    save_file(tensors, folder / "theirs" / "pdd.safetensors")
    (folder / "theirs" / "pdd_config.json").write_text(json.dumps(config))
    return tensors, config


def _from_videox(case, folder, saved, out):
    """Start a student from the file, write it back, and return two heads' velocities at one state."""
    mesh = _mesh(1, 2)
    plans = [
        plan_role(
            name, checkpoint=str(folder / "teacher"), family=case.family, lora=LoraSettings() if saved_here else None,
            saved=saved_here, additions=Pdd.additions(case.settings).get(name, ()),
        )
        for name, saved_here in (("teacher", None), ("student", saved))
    ]  # fmt: skip
    roles = build_roles(
        plans, mesh=mesh, device=torch.device("cpu"), trained=("student",), shapes=case.shapes,
        condition_shapes=case.condition,
    )  # fmt: skip
    method, student = build_method(case.settings, roles), roles["student"]
    export = RoleExport(
        family=student.family, config=student.config, scale=student.adapters["scale"], grid=method.grid,
        trained={0: sharded(student.weights())}, bases=lambda: [sharded(student.networks[0].base_parameters())],
    )  # fmt: skip
    for kind in ("videox-pdd", "wan-lora"):
        export.write(out / kind, kind, dtype=torch.float32, about={})
    x = _batch(case, method, slice(1)).noise(StepRandom(seed=SEED, step=0, positions=[0]), "noise").to(torch.float32)
    text, t = _condition(case)[slice(1)].to(torch.float32), torch.full((1,), 0.7)
    with torch.no_grad():
        return student.velocity(x, t, text, heads=method.grid.mean((0, 1), (5, 6)))


def test_videox_funs_file_both_ways(pools, tmp_path):
    """Values of a started student are those of the file's layers; writing it back gives the file bit by bit."""
    case = replace(CASES["minimax_h3, adapted"], lora={})
    folder = case.write(tmp_path)
    tensors, config = _videox_file(folder, case)
    saved = find_adapters(str(folder / "theirs"))
    velocity = pools[2].run(_from_videox, case, folder, saved, tmp_path / "ours")[0]
    ours = load_file(tmp_path / "ours" / "videox-pdd" / "pdd.safetensors")
    assert ours.keys() == tensors.keys() and all(torch.equal(ours[name], tensors[name]) for name in tensors)
    assert json.loads((tmp_path / "ours" / "videox-pdd" / "pdd_config.json").read_text()) == config | {
        "lora_targets": ",".join(sorted(config["lora_targets"].split(",")))
    }
    comfy = load_file(tmp_path / "ours" / "wan-lora" / "pytorch_lora_weights.safetensors")
    for ours, theirs in (("proj_out", "video_out"), ("audio_proj_out", "audio_out")):
        for kind in ("weight", "bias"):
            stacked = comfy[f"diffusion_model.final_layer.{theirs}.set_{kind}"]
            assert torch.equal(stacked, tensors[f"{ours}.{kind}"].flatten(0, 1))
    network = case.network.from_pretrained(folder / "teacher")
    for name in [name for name in tensors if name.endswith(".lora_up")]:
        layer = name.removesuffix(".lora_up")
        network.get_submodule(layer).weight.data += tensors[name] @ tensors[f"{layer}.lora_down"]
    noise = Batch(latents=None, condition=_condition(case)[slice(1)], latent_shapes=case.shapes).noise(
        StepRandom(seed=SEED, step=0, positions=[0]), "noise"
    )
    times = {"video": torch.tensor([0.7]), "audio": torch.tensor([0.25 * 0.7 / (1 - 0.75 * 0.7)])}
    for row, k in enumerate((0, 5)):
        for layer in case.layers.values():
            for kind in ("weight", "bias"):
                getattr(network.get_submodule(layer), kind).data = tensors[f"{layer}.{kind}"][k]
        with torch.no_grad():
            truth = tiny_minimax_h3.velocity(
                network,
                {p: x.float() for p, x in noise.parts.items()},
                times,
                _condition(case).tensors["text"][:1].float(),
            )
        for part, value in truth.items():
            assert relative_error(velocity.parts[part][row], value[0]) < 1e-5
    for settings, name in ((replace(SETTINGS, grid_steps=16), "grid_steps"), (None, "pdd")):
        added = () if settings is None else Pdd.additions(settings)["student"]
        with refused(name):
            plan_role("student", checkpoint=str(folder / "teacher"), family=case.family, lora=LoraSettings(),
                      saved=saved, additions=added)  # fmt: skip
