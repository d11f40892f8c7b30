"""Run of plain diffusers networks in one process, without mesh, sharding or trainer.

It shares only the method's formulas with the trainer. The rest is torch's (``torch.optim.AdamW``,
``torch.nn.utils.clip_grad_norm_``), on the whole batch at once.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import HunyuanVideo15Transformer3DModel, LTXVideoTransformer3DModel, WanTransformer3DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor

from distill.config.schema import EmaSettings
from distill.data.order import Order, clip_at
from distill.methods import METHODS, Batch
from fsdp_cp.rng import StepRandom
from fsdp_cp.sharding.initialise import initialise
from models.additions.base import attach_additions
from models.condition import Condition
from models.families.base import Outputs
from models.families.registry import FAMILIES
from models.lora.settings import LoraSettings
from models.roles.load import seed_of_expert
from models.roles.network import Network
from models.roles.role import EXPERTS, Call, Role
from models.roles.role_plan import build_additions
from tests.oracles import tiny_hunyuan, tiny_ltx
from tests.oracles.causal_wan import CausalWan
from tests.oracles.joint_self_forcing import JointSelfForcing
from tests.oracles.runs import Setup, Trace, make_config, random_adapter, random_clips
from tests.oracles.samples import Stub, video
from tests.oracles.written_out import WrittenOut

_ONE_RANK = SimpleNamespace(context=SimpleNamespace(cp_size=1))
"""Mesh of one rank, as far as additions ask."""


_CALLED_AS = {
    "ltx": lambda *arguments: (tiny_ltx.velocity(*arguments),),  # looked up at the call, since a test replaces it
    "hunyuan15": tiny_hunyuan.outputs,
}
"""Calls of the pipelines of families other than Wan."""
_CLASSES = {
    "wan": WanTransformer3DModel,
    "ltx": LTXVideoTransformer3DModel,
    "hunyuan15": HunyuanVideo15Transformer3DModel,
}
_ADAPTED = {
    "wan": r"blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0|add_[kv]_proj)|ffn\.net\.(0\.proj|2))",
    # All linear layers of a block, except those for text tokens after the last block's attention.
    "hunyuan15": r"transformer_blocks\.(\d+\.(norm1(_context)?\.linear|attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj)"
    r"|ff\.net\.(0\.proj|2))|[01]\.(attn\.to_add_out|ff_context\.net\.(0\.proj|2)))",
}
"""Patterns of the layers that get adapters; HunyuanVideo's are for three blocks."""
_PROCESSORS = {"wan": WrittenOut, "ltx": tiny_ltx.WrittenOutLtx, "hunyuan15": tiny_hunyuan.WrittenOutHunyuan}


class _PlainRole(Role):
    """Role that calls its diffusers network directly."""

    kept_gathered = nullcontext

    def _outputs(self, call: Call) -> Outputs:
        assert call.causal is None, "_PlainCausalRole calls causal networks"
        v, *others = self._called(call.network, call.x.video, call.t, call.condition.tensors)
        return Outputs(video(v), tuple(others))

    def _called(self, network: Network, x: Tensor, t: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        if network.family.name in _CALLED_AS:
            return _CALLED_AS[network.family.name](network.module, x, t, given)
        if "first_frame" in given:
            return from_a_frame(network.module, x, t, given["first_frame"], given["text"])
        return network.module(timestep=1000 * t, return_dict=False, **_plain_inputs(x, given))


class _PlainCausalRole(Stub, _PlainRole):
    """Causal role that calls its diffusers network with dense masks."""

    def of_video(self, x, t, condition, r, clean):
        chosen, text, frame = self.causal, condition.tensors["text"], condition.tensors.get("first_frame")
        oracle = CausalWan(self.network, chosen.chunks(x.shape[2]), chosen.window, chosen.sink)
        if frame is not None:
            assert chosen.context_time == 0, "the oracle has one time for all clean frames"
            held = (x[:, :, :1] - frame) / t[:, 0].view(-1, 1, 1, 1, 1)
            x, clean = (torch.cat([frame, whole[:, :, 1:]], dim=2) for whole in (x, clean))
            t = torch.cat([torch.zeros_like(t[:, :1]), t[:, 1:]], dim=1)
            v = oracle.clean_history(x, t, text, clean)
            return torch.cat([held, v[:, :, 1:]], dim=2)
        if clean is None:
            return oracle.noisy_history(x, t, text)
        return oracle.clean_history(x, t, text, clean, chosen.context_time)


def from_a_frame(network: torch.nn.Module, x: Tensor, t: Tensor, frame: Tensor, text: Tensor) -> tuple[Tensor, ...]:
    """Call the network like WanImageToVideoPipeline with ``expand_timesteps``. Frame 0 points to the given frame."""
    mask = torch.ones_like(x[:, :1])
    mask[:, :, 0] = 0
    times = (mask[:, 0, :, ::2, ::2] * 1000 * t.view(-1, 1, 1, 1)).flatten(1)
    mixed = (1 - mask) * frame + mask * x
    v, *others = network(hidden_states=mixed, timestep=times, encoder_hidden_states=text, return_dict=False)
    return mask * v + (1 - mask) * (x - frame) / t.view(-1, 1, 1, 1, 1), *others


def _plain_inputs(x: Tensor, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the arguments of diffusers' Wan pipelines, except the time: the channels are latents, mask, image."""
    channels = [x, *(given[name] for name in ("image_mask", "image_latents") if name in given)]
    inputs = {"hidden_states": torch.cat(channels, dim=1), "encoder_hidden_states": given["text"]}
    if "image_embeds" in given:
        inputs["encoder_hidden_states_image"] = given["image_embeds"]
    return inputs


def oracle_trace(setup: Setup, folder: Path) -> Trace:
    """Run the steps of ``setup`` with plain networks, in one process, on the whole batch at once."""
    data = random_clips(setup)
    config = make_config(setup, folder)
    kind = {"self_forcing": JointSelfForcing}.get(config.method.name, METHODS[config.method.name][0])
    roles, family = {}, FAMILIES[setup.family]
    for name in kind.roles_needed(config.method):
        trainable = name in kind.trained_roles
        networks = []
        for number, part in enumerate(("transformer", "transformer_2") if name in setup.boundaries else (".",)):
            network = _network(setup, folder, name, part).requires_grad_(trainable and name not in setup.lora)
            network.set_attn_processor(_PROCESSORS[setup.family]())
            chosen = kind.additions(config.method).get(name, ())
            if chosen:
                added = build_additions(chosen, family, network.config)
                attach_additions(network, name, added, family, _ONE_RANK)
                initialise(added, seed=seed_of_expert(0, number))
            for parameter, value in network.named_parameters():
                value.requires_grad_(value.requires_grad or (trainable and ".default." in parameter))
            torch.nn.Module.to(network, data.latents.dtype)
            own = {key: value for key, value in network.config.items() if not key.startswith("_")}  # without its path
            networks.append(Network(family=family, config=own, module=network, mesh=_ONE_RANK, precision="fp32"))
        boundaries = (setup.boundaries[name],) if name in setup.boundaries else ()
        kwargs = {"name": name, "networks": tuple(networks), "boundaries": boundaries, "trainable": trainable}
        if setup.experts != "both" and trainable:
            kwargs["trained_experts"] = (EXPERTS.index(setup.experts),)
        if setup.causal is not None and name in setup.causal_roles:
            roles[name] = _PlainCausalRole(**kwargs, causal=setup.causal)
        else:
            roles[name] = _PlainRole(**kwargs)
    method = kind(config.method, roles)
    settings = config.optim.student
    optimizers = {
        name: torch.optim.AdamW(
            [p for p in roles[name].network.parameters() if p.requires_grad],
            lr=settings.lr,
            betas=tuple(settings.betas),
            weight_decay=settings.weight_decay,
        )
        for name in kind.trained_roles
    }
    trace, averages, updates = Trace(), {}, 0
    counts = tuple(len(bucket.items) for bucket in data.buckets)
    order = Order(seed=config.seed, buckets=counts, batch_size=setup.batch_size)
    if setup.ema.enabled:
        averages = {key: p.detach().clone() for key, p in _trained(roles["student"]).items()}
    for step in range(setup.steps):
        size = setup.batch_size
        bucket, start = order.place(step * size)
        items = data.buckets[bucket].items
        name = method.trained_role(step)
        parameters = _trained(roles[name])
        total = 0.0
        for role in roles.values():  # another role's loss may have left gradients in it
            role.network.zero_grad()
        for part in range(setup.expert_draws):
            positions = [i for i in range(size) if i * setup.expert_draws // size == part]
            indices = [int(items[clip_at(config.seed, len(items), start + i, bucket)]) for i in positions]
            given = {key: value[indices] for key, value in data.tensors.items()}
            latents = video(torch.stack([data[i]["latents"] for i in indices]))
            batch = Batch(latents=latents, condition=Condition(given, data.null, data.empty))
            draws = StepRandom(seed=config.seed, step=step, positions=positions, part=part)
            for loss in method.losses(step, batch, draws):
                value = loss.weight * loss.closure() / setup.expert_draws
                value.backward()
                total += value.item()
        if "gan_head" in kind.additions(config.method).get(name, ()):
            _fill_missing_gradients(parameters, has_experts=name in setup.boundaries)
        trace.roles.append(name)
        trace.losses.append(total)
        trace.gradients.append({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
        trace.norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), config.optim.clip_of(name)).item())
        optimizers[name].step()
        optimizers[name].zero_grad()
        if setup.ema.enabled and name == "student":
            averages = {
                key: torch.lerp(p.detach(), averages[key], _kept(setup.ema, updates)) for key, p in parameters.items()
            }
            updates += 1
    trace.weights = {n: {k: p.detach().clone() for k, p in _trained(roles[n]).items()} for n in optimizers}
    if averages:
        trace.weights["average of student"] = averages
    return trace


def _fill_missing_gradients(parameters: Mapping[str, torch.nn.Parameter], *, has_experts: bool) -> None:
    """Give zeros to parameters that a GAN's losses have not used, in networks that they have used."""

    def network(name: str) -> str:
        return name.partition(".")[0] if has_experts else ""

    used = {network(name) for name, parameter in parameters.items() if parameter.grad is not None}
    for name, parameter in parameters.items():
        if parameter.grad is None and network(name) in used:
            parameter.grad = torch.zeros_like(parameter)


def _kept(ema: EmaSettings, update: int) -> float:
    """Return the old average's share after the ``update``-th update (Karras et al. 2024, eq. 121; 0-based)."""
    i = update - ema.start
    return 0.0 if i < 0 else ema.decay if ema.decay is not None else (i / (i + 1)) ** (ema.gamma + 1)


def _network(setup: Setup, folder: Path, name: str, part: str = ".") -> torch.nn.Module:
    """Load a plain network. A role with adapters gets the teacher's network with peft's adapters."""
    lora = setup.lora.get(name)
    if lora is None:
        return _CLASSES[setup.family].from_pretrained(folder / name / part)
    network = _CLASSES[setup.family].from_pretrained(folder / "teacher" / part)
    if name == "student" and setup.training_adapter:
        network.load_lora_adapter(setup.training_adapter, prefix=None)
        network.fuse_lora()
        network.unload_lora()
    inject_random_adapters(network, name, lora, _ADAPTED[setup.family])
    return network


def inject_random_adapters(network: torch.nn.Module, role: str, lora: LoraSettings, layers: str) -> None:
    """Give ``network`` peft's adapters on ``layers`` with the random values of ``role``; they alone train."""
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha or lora.rank, target_modules=layers)
    inject_adapter_in_model(config, network)
    for key, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in key)
        if "lora_" in key:
            parameter.data = random_adapter(role, public_name(key), parameter.shape)


def public_name(name: str) -> str:
    """Return the project's name of a parameter that peft, for adapter ``default``, or an addition calls ``name``."""
    parts = name.split(".")
    if parts[0].isdecimal():  # an expert's index
        return f"{parts[0]}.{public_name('.'.join(parts[1:]))}"
    if parts[0] == "additions":
        return ".".join([parts[0], *parts[2:]])
    return ".".join(part for part in parts if part not in ("default", "base_layer"))


def _trained(role: Role) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters of a role by public name: its adapters, or all without adapters."""
    named = dict(role.network.named_parameters())
    adapted = any(".default." in name for name in named)
    return {
        public_name(name): p for name, p in named.items() if not adapted or ".default." in name or "additions." in name
    }
