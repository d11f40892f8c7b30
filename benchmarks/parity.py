"""Is the run the same run on every mesh? ``python -m benchmarks.parity`` prints how far each mesh is off.

The real trainer runs DMD2 (one fake update per student update) on a tiny Wan, on each mesh. The oracle shares only
the method's formulas with it: plain diffusers networks in one process, ``torch.optim.AdamW``,
``torch.nn.utils.clip_grad_norm_``; no mesh, no sharding, no trainer.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor

from benchmarks.arguments import at_least_1
from distill.config import Config, OptimizerSettings, OptimSettings
from distill.data.order import clip_at
from distill.methods import METHODS, Batch, build_method
from distill.methods.dmd2 import Dmd2Settings
from distill.trainer import Trainer
from fsdp_cp.initialise import initialise
from fsdp_cp.local_ranks import RankPool
from fsdp_cp.mesh import Mesh, build_mesh
from fsdp_cp.rng import StepRandom
from fsdp_cp.shard_settings import ShardSettings
from models.additions import attach_additions
from models.load import build_role, plan_role
from models.role import Role
from models.wan import Wan

ARCHITECTURE = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 10,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 3,
    "cross_attn_norm": True,
    "rope_max_seq_len": 32,
}
LATENT_SHAPE = (4, 3, 8, 8)  # 48 tokens
TEXT_SHAPE = (5, 10)
BATCH = 4
MESHES = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One run: mesh sizes, precision and so on. ``dp_shard x cp x dp_replicate`` ranks."""

    dp_shard: int = 1
    cp: int = 1
    dp_replicate: int = 1
    steps: int = 6
    precision: str = "fp32"
    activation_checkpointing: bool = False
    batch_size: int = BATCH
    micro_batch_size: int = 1
    latent_shape: tuple[int, int, int, int] = LATENT_SHAPE
    method: Any = field(
        default_factory=lambda: Dmd2Settings(
            fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, shift=2.0
        )
    )
    """Settings of the method; DMD2 in miniature by default."""
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of how a role is sharded, by role; under ``all`` those of every role."""

    @property
    def world_size(self) -> int:
        return self.dp_shard * self.cp * self.dp_replicate

    def sharding(self, role: str) -> ShardSettings:
        """How ``role`` is sharded."""
        chosen = {"activation_checkpointing": self.activation_checkpointing, "precision": self.precision}
        return ShardSettings(**chosen | self.changes.get("all", {}) | self.changes.get(role, {}))


@dataclass
class Trace:
    """What a run did, step by step."""

    roles: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Full gradients before clipping, by parameter name."""
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Full weights of each trained role at the end."""


class RandomClips:
    """An in-memory data set of random latents and text embeddings."""

    text_shape, fps, fingerprint = TEXT_SHAPE, 8.0, "random"

    def __init__(self, latent_shape: tuple[int, int, int, int] = LATENT_SHAPE) -> None:
        generator = torch.Generator().manual_seed(7)
        self.latent_shape = latent_shape
        self.latents = torch.randn(32, *latent_shape, generator=generator)
        self.text = torch.randn(32, *TEXT_SHAPE, generator=generator)
        self.null_text = torch.randn(*TEXT_SHAPE, generator=generator)
        self.empty_text = torch.randn(*TEXT_SHAPE, generator=generator)

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"latents": self.latents[index], "text": self.text[index], "caption": str(index)}

    def embed(self, captions: list[str]) -> torch.Tensor:
        return torch.stack([self.text[int(caption)] if caption else self.empty_text for caption in captions])


def write_checkpoints(folder: Path) -> None:
    """Random teacher, student and fake networks in diffusers layout; three different ones."""
    for seed, name in enumerate(("teacher", "student", "fake")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = WanTransformer3DModel(**ARCHITECTURE)
            # diffusers' initialisation leaves biases at 0, which would hide errors in their gradients.
            for parameter in network.parameters():
                parameter.data += 0.05 * torch.randn_like(parameter)
        network.save_pretrained(folder / name)


def make_config(setup: Setup, folder: Path) -> Config:
    """In miniature, with clipping that bites."""
    settings = OptimizerSettings(lr=1e-4, betas=[0.0, 0.99], weight_decay=0.01)
    return Config(
        steps=setup.steps,
        batch_size=setup.batch_size,
        seed=3,
        run_dir=str(folder / "run"),
        method=setup.method,
        optim=OptimSettings(student=settings, fake=settings, clip=0.5),
        data=None,
    )


class RecordingTrainer(Trainer):
    """The trainer, which notes full gradients as they are before clipping."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.trace = Trace()

    def _update(self, name: str, norm: float, lr: float) -> None:
        named = self.roles[name].network.named_parameters()
        self.trace.gradients.append({n: p.grad.full_tensor().clone() for n, p in named if p.grad is not None})
        super()._update(name, norm, lr)

    def record(self) -> Trace:
        """Run all steps; nothing is written."""
        data = self._steps_of_data()
        while self.step < self.config.steps:
            name = self.method.trained_role(self.step)
            metrics = self._train_step(data)
            self.trace.roles.append(name)
            self.trace.losses.append(metrics[f"{name}/loss"])
            self.trace.norms.append(metrics[f"{name}/grad_norm"])
        for name, role in self.roles.items():
            self.trace.weights[name] = {n: w.full_tensor().clone() for n, w in role.weights().items()}
        return self.trace


def make_trainer(setup: Setup, folder: Path, config: Config, resume_from: Path | None = None) -> RecordingTrainer:
    """The project's trainer on this process group's ranks, from the checkpoints in ``folder``."""
    mesh = _mesh(setup.dp_replicate, setup.dp_shard, setup.cp)
    device = torch.device("cpu")
    method, roles = METHODS[config.method.name][0], {}
    for name in method.roles_needed(config.method):
        plan = plan_role(
            name,
            checkpoint=str(folder / name),
            sharding=setup.sharding(name),
            additions=method.additions(config.method).get(name, ()),
        )
        roles[name] = build_role(
            plan,
            mesh=mesh,
            device=device,
            trainable=name in method.trained_roles,
            latent_shape=setup.latent_shape,
            text_shape=TEXT_SHAPE,
        )
    data = RandomClips(setup.latent_shape)
    if setup.precision == "fp64":
        data.latents, data.text, data.null_text = data.latents.double(), data.text.double(), data.null_text.double()
    return RecordingTrainer(
        config=config,
        mesh=mesh,
        device=device,
        data=data,
        method=build_method(config.method, roles),
        micro=setup.micro_batch_size,
        run_dir=Path(config.run_dir),
        resume_from=resume_from,
    )


@lru_cache  # each has process groups, with threads of their own
def _mesh(dp_replicate: int, dp_shard: int, cp: int) -> Mesh:
    return build_mesh(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, heads=4)


def sharded_trace(setup: Setup, folder: Path) -> Trace:
    """All steps of ``setup`` on this process group's ranks."""
    return make_trainer(setup, folder, make_config(setup, folder)).record()


_ONE_RANK = SimpleNamespace(context=SimpleNamespace(cp_size=1))
"""All that an addition asks of a mesh whose tokens are not split."""


class _PlainRole(Role):
    """A diffusers network called directly."""

    def _outputs(self, x: Tensor, t: Tensor, text: Tensor, depth: float = 1.0) -> tuple[Tensor, ...]:
        return self.network(hidden_states=x, timestep=1000 * t, encoder_hidden_states=text, return_dict=False)


class _WrittenOut(WanAttnProcessor):
    """diffusers' processor with attention as the formula has it: torch's own on the CPU has no forward-mode AD."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(keys)), attn.to_v(keys)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        if rotary_emb is not None:
            q, k = (self._rotate(x, *rotary_emb) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        return attn.to_out[0](out.transpose(1, 2).flatten(2))

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Pairs of neighbours as complex numbers, times ``cos + i sin``."""
        turn = torch.complex(cos[..., 0::2], sin[..., 1::2])
        pairs = torch.view_as_complex(x.to(cos.dtype).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


def oracle_trace(setup: Setup, folder: Path) -> Trace:
    """The same steps with plain networks, one process, the whole batch at once."""
    dtype = torch.float64 if setup.precision == "fp64" else torch.float32
    config = make_config(setup, folder)
    kind, roles = METHODS[config.method.name][0], {}
    for name in kind.roles_needed(config.method):
        trainable = name in kind.trained_roles
        network = WanTransformer3DModel.from_pretrained(folder / name).requires_grad_(trainable)
        network.set_attn_processor(_WrittenOut())
        chosen = kind.additions(config.method).get(name, ())
        if chosen:
            attach_additions(network, chosen, network.config, _ONE_RANK)
            initialise(network.additions, seed=0)
        torch.nn.Module.to(network, dtype)
        roles[name] = _PlainRole(
            name=name, family=Wan, config={}, network=network, trainable=trainable, precision="fp32",
            tokens=0, text_tokens=0,
        )  # fmt: skip
    method = build_method(config.method, roles)
    settings = config.optim.student
    optimizers = {
        name: torch.optim.AdamW(
            roles[name].network.parameters(),
            lr=settings.lr,
            betas=tuple(settings.betas),
            weight_decay=settings.weight_decay,
        )
        for name in kind.trained_roles
    }
    data, trace = RandomClips(setup.latent_shape), Trace()
    for step in range(setup.steps):
        size = setup.batch_size
        indices = [clip_at(config.seed, len(data), step * size + i) for i in range(size)]
        batch = Batch(
            latents=data.latents[indices].to(dtype),
            text=data.text[indices].to(dtype),
            null_text=data.null_text.to(dtype),
            empty_text=data.empty_text.to(dtype),
        )
        name = method.trained_role(step)
        parameters = dict(roles[name].network.named_parameters())
        total = 0.0
        for role in roles.values():  # another role's loss may have gone through it
            role.network.zero_grad()
        for loss in method.losses(step, batch, StepRandom(seed=config.seed, step=step, positions=range(size))):
            value = loss.weight * loss.closure()
            value.backward()
            total += value.item()
        trace.roles.append(name)
        trace.losses.append(total)
        trace.gradients.append({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
        trace.norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), config.optim.clip).item())
        optimizers[name].step()
        optimizers[name].zero_grad()
    trace.weights = {n: {k: p.detach().clone() for k, p in roles[n].network.named_parameters()} for n in optimizers}
    return trace


@dataclass(frozen=True)
class Difference:
    """Largest relative differences of a run from the oracle, over all steps."""

    loss: float
    norm: float
    gradient: float
    """Over tensors: norm of the difference to norm of the truth (at least 1e-6 of the whole gradient's norm)."""
    weight: float
    worst: str
    """The tensor with the largest gradient difference."""

    @property
    def largest(self) -> float:
        return _largest([self.loss, self.norm, self.gradient, self.weight])


def _largest(values: Iterable[float]) -> float:
    """The maximum; NaN if there is one, which ``max`` may drop."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def compare(trace: Trace, oracle: Trace) -> Difference:
    """How far ``trace`` is from ``oracle``. Raises if a gradient is missing or a role differs."""
    assert trace.roles == oracle.roles, (trace.roles, oracle.roles)
    worst, gradient = "", 0.0
    for step, (ours, truth) in enumerate(zip(trace.gradients, oracle.gradients, strict=True)):
        assert ours.keys() == truth.keys(), ours.keys() ^ truth.keys()
        whole = torch.stack([g.norm() for g in truth.values()]).norm()
        for name, g in truth.items():
            error = ((ours[name] - g).norm() / g.norm().clamp_min(1e-6 * whole)).item()
            error = error if math.isfinite(error) else math.inf  # a comparison would pass NaN by
            if error > gradient:
                gradient, worst = error, f"{trace.roles[step]} step {step + 1} {name}"
    weight = [
        ((trace.weights[role][n] - w).norm() / w.norm()).item()
        for role, weights in oracle.weights.items()
        for n, w in weights.items()
    ]
    return Difference(
        loss=_largest(abs(a - b) / abs(b) for a, b in zip(trace.losses, oracle.losses, strict=True)),
        norm=_largest(abs(a - b) / abs(b) for a, b in zip(trace.norms, oracle.norms, strict=True)),
        gradient=gradient,
        weight=_largest(weight),
        worst=worst,
    )


def trace_on_ranks(setup: Setup, folder: Path, pool: RankPool | None = None) -> Trace:
    """:func:`sharded_trace` on as many processes as ``setup`` needs; the ranks' traces must be the same.

    Args:
        setup: the run.
        folder: of :func:`write_checkpoints`.
        pool: of ``setup.world_size`` ranks; new ones by default.
    """
    if pool is None:
        with RankPool(setup.world_size, preload=("torch", "distill.trainer")) as pool:
            return trace_on_ranks(setup, folder, pool)
    assert pool.world_size == setup.world_size
    traces = pool.run(sharded_trace, setup, folder)
    for other in traces[1:]:
        assert other.losses == traces[0].losses and other.norms == traces[0].norms, "ranks disagree"
    return traces[0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least_1, default=6)
    args = parser.parse_args(argv)
    print("largest relative difference from plain diffusers networks in one process\n")
    print("| precision | dp_shard x cp | checkpointing | steps | loss | gradient norm | each gradient | each weight |")
    print("|---|---|---|---|---|---|---|---|")
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoints(folder)
        for precision, steps, bound in (("fp32", args.steps, 1e-5), ("fp64", 1, 1e-6)):
            oracle = oracle_trace(Setup(precision=precision, steps=steps), folder)
            for dp_shard, cp in MESHES:
                for checkpointing in (False, True) if precision == "fp32" else (False,):
                    setup = Setup(
                        dp_shard=dp_shard,
                        cp=cp,
                        precision=precision,
                        steps=steps,
                        activation_checkpointing=checkpointing,
                    )
                    d = compare(trace_on_ranks(setup, folder), oracle)
                    failed |= not d.largest <= bound
                    print(
                        f"| {precision} | {dp_shard} x {cp} | {'on' if checkpointing else 'off'} | {steps} |"
                        f" {d.loss:.1e} | {d.norm:.1e} | {d.gradient:.1e} | {d.weight:.1e} |",
                        flush=True,
                    )
    print("\nFAILED" if failed else "\nall within 1e-5 (fp32) and 1e-6 (fp64)")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
