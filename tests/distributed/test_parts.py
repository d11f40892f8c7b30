"""DMD2 of a network with video and sound (LTX-2) on meshes: against formulas in float64, and resumed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from einops import rearrange
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from distill.config.schema import EmaSettings
from distill.methods import build_method
from distill.methods.base import Batch
from distill.methods.dmd2 import Dmd2Settings
from fsdp_cp.checkpoint.folder import step_folder
from fsdp_cp.context.check_parallel import gradient_errors, relative_error
from fsdp_cp.mesh import build_mesh
from fsdp_cp.reduce import grad_norm
from fsdp_cp.rng import StepRandom
from fsdp_cp.sharding.initialise import copy_own_part
from fsdp_cp.sharding.settings import ShardSettings
from fsdp_cp.sharding.shard import microbatch
from models.lora.settings import LoraSettings
from models.roles.load import build_roles
from models.roles.role_plan import plan_role
from tests.oracles.dmd2_of_parts import Dmd2OfParts
from tests.oracles.full_tensors import full_tensors
from tests.oracles.plain_run import public_name
from tests.oracles.runs import Setup, make_config, random_adapter
from tests.oracles.sharded_run import make_trainer
from tests.oracles.tiny_wan import text_condition

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2)]
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
LORA = LoraSettings(rank=3, alpha=6, targets=["*.to_q", "*.to_k", "*.to_v", "*.to_out.0", "*ff.net.*"])
ADAPTED = r"transformer_blocks\..*\.(to_[qkv]|to_out\.0|(audio_)?ff\.net\.(0\.proj|2))"
"""Names for peft of the layers that the recipe adapts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ltx2")
    for seed, name in enumerate(("teacher", "student", "fake")):
        torch.manual_seed(seed)
        network = LTX2VideoTransformer3DModel(**ARCHITECTURE)
        for parameter in network.parameters():  # biases of 0 would hide errors in their gradients
            parameter.data += 0.05 * torch.randn_like(parameter)
        network.save_pretrained(folder / name)
    return folder


def condition():
    generator = torch.Generator().manual_seed(7)
    text, null = (torch.randn(n, 2, *CONDITION["text"], generator=generator).double() for n in (BATCH, 1))
    made = text_condition(text[:, 0], null[0, 0])
    tensors = {"audio_text": text[:, 1], "fps": torch.full((BATCH, 1), 8.0, dtype=torch.float64)}
    return replace(made, tensors=made.tensors | tensors, null_values=made.null_values | {"audio_text": null[0, 1]})


# On the ranks


def _roles(folder, mesh, adapted):
    """Return three networks; ``adapted``, the adapters of two roles on one."""
    sharding = ShardSettings(activation_checkpointing="selective")
    plans = [
        plan_role(
            name, checkpoint=str(folder / ("teacher" if adapted else name)), family="ltx2", sharding=sharding,
            lora=LORA if adapted and name != "teacher" else None,
        )
        for name in ("teacher", *TRAINED)
    ]  # fmt: skip
    roles = build_roles(
        plans, mesh=mesh, device=torch.device("cpu"), precision="fp64", trained=TRAINED, shapes=SHAPES,
        condition_shapes=CONDITION,
    )  # fmt: skip
    for name in TRAINED if adapted else ():
        for key, parameter in roles[name].named_parameters().items():
            copy_own_part(parameter.detach(), random_adapter(name, key, parameter.shape), key)
    return roles


def _steps(folder, dp_shard, cp, adapted):
    """Return this rank's samples, and loss, clip norm, gradients and observations of a step of each trained role."""
    mesh = build_mesh(dp_shard=dp_shard, cp=cp, heads=4, device_type="cpu")
    mine, found = torch.arange(BATCH).chunk(mesh.dp_size)[mesh.dp_rank], {}
    method = build_method(SETTINGS, _roles(folder, mesh, adapted))
    clock = method.clock("student")
    batch = Batch(latents=None, condition=condition()[mine], latent_shapes=SHAPES, latent_shifts=clock)
    for step, name in ((0, "student"), (1, "fake")):
        role = method.roles[name]
        (loss,) = method.losses(step, batch, StepRandom(seed=4, step=step, positions=mine.tolist()))
        with microbatch(role.network, is_first=True, is_last=True):
            value = loss.closure() * len(mine) / BATCH
            value.backward()
        norm, named = grad_norm(role.parameters()), role.named_parameters()
        gradients = full_tensors({n: p.grad for n, p in named.items() if p.grad is not None})
        found[name] = value.detach(), norm, gradients, method.observations.drain()
        role.network.zero_grad()  # adapters share it
    return mine.tolist(), found


# The formulas


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "adapted"])
def truth(request, folder):
    """Return whether roles have peft's adapters; loss, clip norm, gradients and normalisers of the whole batch, by the
    role that trains."""
    networks, found, adapted = {}, {}, request.param
    for name in ("teacher", *TRAINED):
        loaded = LTX2VideoTransformer3DModel.from_pretrained(folder / ("teacher" if adapted else name))
        if adapted and name != "teacher":
            loaded.requires_grad_(False)
            inject_adapter_in_model(LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=ADAPTED), loaded)
            for key, parameter in loaded.named_parameters():
                if "lora_" in key:
                    parameter.data = random_adapter(name, public_name(key), parameter.shape)
        networks[name] = nn.Module.to(loaded, torch.float64)

    def call(name, x, times, null):
        network, given = networks[name], condition().null if null else condition()
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

    for step, name in ((0, "student"), (1, "fake")):
        random = StepRandom(seed=4, step=step, positions=range(BATCH))
        formulas = Dmd2OfParts(call, SETTINGS, random, SHAPES, {"video": 1.0, "audio": RATIO})
        loss = formulas.student_loss() if name == "student" else formulas.fake_loss()
        loss.backward()
        named = networks[name].named_parameters()
        gradients = {public_name(n): p.grad.clone() for n, p in named if p.grad is not None}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        found[name] = loss.detach(), norm, gradients, formulas.normalisers
        networks[name].zero_grad()
    return adapted, found


@pytest.mark.parametrize(("dp_shard", "cp"), MESHES)
def test_a_step_equals_its_formula(pools, folder, truth, dp_shard, cp):
    """Student's and fake's loss, clip norm, all gradients, and the normaliser of each part."""
    adapted, formulas = truth
    ranks, errors = pools[dp_shard * cp].run(_steps, folder, dp_shard, cp, adapted), {}
    for name, (loss, norm, gradients, normalisers) in formulas.items():
        shares = {tuple(mine): found[name] for mine, found in ranks}
        errors[name, "loss"] = relative_error(sum(share[0] for share in shares.values()), loss)
        errors[name, "norm"] = max(relative_error(torch.as_tensor(found[name][1]), norm) for _, found in ranks)
        each = [gradient_errors(found[name][2], gradients) for _, found in ranks]
        errors[name, "gradients"] = max(error for errors_of in each for error in errors_of.values())
        for part, q in normalisers.items():
            observed = "dmd_normaliser" if part == "video" else f"dmd_normaliser/{part}"
            total = sum(share[3][observed][0] for share in shares.values())
            errors[name, f"normaliser of {part}"] = relative_error(torch.as_tensor(total / BATCH), q.mean())
    print(f"\n{dp_shard} x {cp}:", {" ".join(key): f"{error:.0e}" for key, error in errors.items()})
    assert max(errors.values()) < 1e-5, errors


# A run


def _run(setup, folder, run_dir, first=0, save_at=()):
    """Run from step ``first``; return losses and weights."""
    config = make_config(setup, folder)
    config.run_dir = run_dir
    resume_from = step_folder(Path(run_dir) / "checkpoints", first) if first else None
    trace = make_trainer(setup, folder, config, resume_from).record(save_at)
    return trace.losses, trace.weights


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {role: LoraSettings(rank=3, alpha=6) for role in ("student", "fake")}])
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(pools, folder, tmp_path, lora):
    setup = Setup(
        cp=2, dp_shard=2, micro_batch_size=2, steps=4, family="ltx2", architecture=ARCHITECTURE, method=SETTINGS,
        latent_shape=SHAPES["video"], audio_shape=SHAPES["audio"], condition_shapes=CONDITION, lora=lora,
        ema=EmaSettings(enabled=True),
    )  # fmt: skip
    losses, weights = pools[4].run(_run, setup, folder, str(tmp_path), 0, (2,))[0]
    again, other = pools[4].run(_run, setup, folder, str(tmp_path), 2)[0]
    assert again == losses[2:] and other.keys() == weights.keys()
    assert all(torch.equal(other[role][name], value) for role in weights for name, value in weights[role].items())
    assert len(set(losses)) == 4 and all(torch.isfinite(torch.tensor(losses)))
