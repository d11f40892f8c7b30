"""Check that a network computes the same on every mesh: ``python -m models.verify FOLDER_OR_FAMILY``.

For a FAMILY it uses small example networks with random weights. For a FOLDER (a diffusers transformer or pipeline
folder) it uses the network in it, or both experts. It builds each network as a role, then splits and shards it on each
mesh that ``--ranks`` local processes allow. It compares outputs, gradients and derivatives in float64 with those of the
unmodified network in one process. It runs a network with optional inputs, such as a first frame, with and without them.
A network that can be causal is also compared as a causal role with that role on one rank: with a noisy and a clean
history, and chunk by chunk. So is a network with sparse attention: of a folder with ``sparse.json``, or, with
``--sparse``, of a family's examples.
"""

import argparse
import importlib.metadata
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdp_cp.choices import user_path
from fsdp_cp.context.check_parallel import gradient_errors, relative_error
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.launch import exit_code
from fsdp_cp.measure.memory import available_host_memory
from fsdp_cp.mesh import Mesh, build_mesh
from fsdp_cp.reduce import full_tensor, gather_samples, grad_norm
from fsdp_cp.runtime.local_ranks import RankPool
from fsdp_cp.sharding.settings import ShardSettings
from models.causal import CausalSettings
from models.condition import KEYFRAME_ANCHORS, KEYFRAMES, REFERENCE_SIZES, TEXT_LENGTH, TEXT_TAGS, Condition
from models.export_folder import sharded, write_folder
from models.families.base import Shape, config_of
from models.families.registry import family_names, family_of, family_of_class
from models.files.checkpoint_files import EXPERT_FOLDERS, TransformerFolder, defining, inspect_checkpoint, tensor_reader
from models.files.hub import network_files, resolve_path
from models.lora.merge import Weights
from models.roles.gates import plan_sparse
from models.roles.load import build_role
from models.roles.role import Role
from models.roles.role_plan import RolePlan, plan_role
from models.sample import VIDEO, PartShapes, Sample
from models.sparse import FILE as SPARSE_FILE
from models.sparse import SparseSettings, file_contents

MESHES = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 4))
"""Mesh sizes, dp_shard x cp."""
GRIDS = ((3, 3, 5), (2, 2, 4))
"""Token grids (frames, height, width): 45 tokens do not divide over 2 or 4 ranks, 16 do not divide over 3."""
HISTORIES = ("noisy", "clean")
"""Histories of a causal role: the noisy clip, or a clean one, which is compared with the cache too."""
EXAMPLE = SparseSettings(sparsity=0.6, tile=[2, 2, 2])
"""Sparse attention of a family's examples: to 5 of 12 tiles of the first grid."""
BATCH = 2
TEXT_TOKENS = 7
BOUND = 1e-5
"""Maximum relative error."""
COLUMNS = ("output", "each gradient", "norm", "derivative", "weights changed")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    folder: Path
    family: str
    dp_shard: int
    cp: int
    grid: tuple[int, int, int]
    checkpointing: bool
    expert: int = 0
    """Position of the network in the folder."""
    optional: int = 0
    """Number of the one of :meth:`models.families.base.Family.options` that the condition has; 0 for none."""
    history: str | None = None
    """History of a causal role, one of :data:`HISTORIES`; ``None`` for a role that attends to all frames."""


class Result(NamedTuple):
    """Results of one step, in float64."""

    values: dict[str, Tensor]
    """The velocity of all parts (``output``), its ``derivative`` along random directions of state and time, the clip
    ``norm`` of all gradients, and for a clean history the velocity ``chunk by chunk`` with a cache."""
    gradients: dict[str, Tensor]
    """Gradients of a random linear function of the velocity, by parameter name; parameters without one are left out."""


def inputs(
    plan: RolePlan, grid: tuple[int, int, int], optional: int = 0
) -> tuple[Sample, Tensor, Condition, Sample, Sample]:
    """Draw the state, times, condition, direction of the state and cotangent of the output, the same on every rank."""
    parts, shapes = sample_shapes(plan, grid, optional)
    generator = torch.Generator().manual_seed(17)

    def normal(*shape: int) -> Tensor:
        return torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)

    x, direction, cotangent = (
        Sample({name: normal(*shape) for name, shape in parts.items()}, plan.family.parts) for _ in range(3)
    )
    t = torch.rand(BATCH, generator=generator, dtype=torch.float64)
    tensors = {name: normal(*shape) for name, shape in shapes.items()}
    # Use captions of different lengths. Each needs at least one token, but may have no quoted text.
    for name, least in (("text_mask", 1), ("glyph_mask", 0)):
        if name in shapes:
            lengths = least + torch.arange(BATCH) * 3 % shapes[name][0]
            tensors[name] = torch.arange(shapes[name][0]) < lengths[:, None]
    if TEXT_LENGTH in shapes:
        tensors[TEXT_LENGTH] = 1 + torch.arange(BATCH) * 3 % TEXT_TOKENS
    if KEYFRAMES in shapes:  # the last frame is the first keyframe, in one sample; the text begins with a picture
        count = shapes[KEYFRAMES][1]
        tensors[KEYFRAME_ANCHORS] = (torch.arange(count) + torch.arange(BATCH)[:, None]) % 2
        tensors[TEXT_TAGS] = (torch.arange(TEXT_TOKENS) < 2).expand(BATCH, -1)
    if REFERENCE_SIZES in shapes:  # a picture of one row; a clip with sound, a picture and a sound
        _, p, q = plan.family.patch_size(plan.config)
        one, nothing = [1, p, q, 0], [0, 0, 0, 0]
        clip, picture, sound = [2, 2 * p, q, 3], [1, p, 2 * q, 0], [0, 0, 0, 1]
        tensors[REFERENCE_SIZES] = torch.tensor([[one, nothing, nothing], [clip, picture, sound]])
        tensors[TEXT_TAGS] = (torch.arange(TEXT_TOKENS) == 1).expand(BATCH, -1)
    condition = Condition(tensors).with_noise(lambda name, shape: normal(*shape))
    return x, t, condition, direction, cotangent


def causal_settings(grid: tuple[int, int, int]) -> CausalSettings:
    """Return settings with a chunk of one frame and a chunk of the others."""
    return CausalSettings(chunk=grid[0] - 1, first_chunk=1)


def frame_times(t: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Return times ``(B, T)`` that differ between the chunks of :func:`causal_settings`."""
    return torch.cat([t[:, None], (1 - t)[:, None].expand(-1, grid[0] - 1)], dim=1)


def sample_shapes(plan: RolePlan, grid: tuple[int, int, int], optional: int = 0) -> tuple[PartShapes, dict[str, Shape]]:
    """Return the shapes of a sample whose video has ``grid`` tokens, and of its condition, ``optional`` tensors too."""
    family, config = plan.family, plan.config
    frames, height, width = (n * patch for n, patch in zip(grid, family.patch_size(config), strict=True))
    latent_shape = (family.latent_channels(config), frames, height, width)
    shapes = family.condition_shapes(config, latent_shape, TEXT_TOKENS)
    shapes |= family.options(config, latent_shape, TEXT_TOKENS)[optional - 1] if optional else {}
    return family.sample_shapes(config, latent_shape), shapes


def plain_result(plan: RolePlan, grid: tuple[int, int, int], optional: int = 0) -> Result:
    """Run the unmodified network in this process, on the whole batch."""
    family = plan.family
    (folder,) = plan.folders
    network = family.build(plan.config, "models.verify").eval()
    weights = _weights(folder)
    broken = next((name for name, tensor in sorted(weights.items()) if not tensor.isfinite().all()), None)
    if broken is not None:
        raise UserError(f"{folder.path}: {broken} holds numbers that are not finite; copy the folder again")
    network.load_state_dict(weights)
    nn.Module.to(network, torch.float64)
    x, t, condition, direction, cotangent = inputs(plan, grid, optional)

    def velocity(x: Sample, t: Tensor) -> Sample:
        return family.outputs(network, x, t, condition).velocity

    output = velocity(x, t)
    _inner(output, cotangent).div(BATCH).backward()
    gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    with sdpa_kernel(SDPBackend.MATH):  # torch's other CPU kernels lack forward-mode AD
        derivative = _derivative(velocity, x, t, direction)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    return Result({"output": _flat(output), "derivative": _flat(derivative), "norm": norm}, gradients)


def _inner(x: Sample, y: Sample) -> Tensor:
    return (x * y).map(Tensor.sum).total({})


def _flat(x: Sample) -> Tensor:
    """Return all numbers of each sample, ``(B, n)``."""
    return torch.cat([part.detach().flatten(1) for part in x.parts.values()], dim=1)


@torch.no_grad()
def _derivative(velocity: Callable[[Sample, Tensor], Sample], x: Sample, t: Tensor, direction: Sample) -> Sample:
    """Return the derivative of ``velocity`` along ``direction`` of the state and 1 of the time."""
    with forward_ad.dual_level():
        duals = x.map(forward_ad.make_dual, direction), forward_ad.make_dual(t, torch.ones_like(t))
        return velocity(*duals).map(lambda part: forward_ad.unpack_dual(part).tangent.clone())


@lru_cache  # each mesh creates process groups with threads
def _mesh(dp_shard: int, cp: int, heads: int) -> Mesh:
    return build_mesh(dp_shard=dp_shard, cp=cp, heads=heads, device_type="cpu")


def rank_result(case: Case, scratch: Path) -> tuple[Result | None, int]:
    """Run a role on this process group's ranks; return rank 0's result, and how many weights a round trip changed."""
    plan = planned(case.folder, case.family, case.expert, checkpointing=case.checkpointing)
    if case.history is not None:
        plan = replace(plan, causal=causal_settings(case.grid))
    mesh = _mesh(case.dp_shard, case.cp, plan.family.heads(plan.config))
    parts, shapes = sample_shapes(plan, case.grid, case.optional)
    data: dict[str, Any] = {"shapes": parts, "condition_shapes": shapes}
    role = build_role(plan, mesh=mesh, device=torch.device("cpu"), trainable=True, precision="fp64", **data)
    x, t, condition, direction, cotangent = inputs(plan, case.grid, case.optional)
    share = BATCH // mesh.dp_size
    mine = slice(mesh.dp_rank * share, (mesh.dp_rank + 1) * share)
    x, t, condition, direction, cotangent = x[mine], t[mine], condition[mine], direction[mine], cotangent[mine]
    t = t if case.history is None else frame_times(t, case.grid)
    clean = direction if case.history == "clean" else None

    def velocity(x: Sample, t: Tensor) -> Sample:
        return role.velocity(x, t, condition, clean=clean)

    output = velocity(x, t)
    _inner(output, cotangent).div(BATCH).backward()
    norm = torch.tensor(grad_norm(role.parameters()), dtype=torch.float64)
    gradients = {name: full_tensor(p.grad) for name, p in role.named_parameters().items() if p.grad is not None}
    role.rest()
    values = {"output": _flat(output), "derivative": _flat(_derivative(velocity, x, t, direction))}
    if clean is not None:
        values["chunk by chunk"] = _by_chunks(role, output, x, t, condition, clean)
    role.rest()
    changed = _changed_weights(plan, role.weights(), scratch)
    values = {name: gather_samples(value, mesh.dp) for name, value in values.items()}
    return (None if torch.distributed.get_rank() else Result(values | {"norm": norm}, gradients)), changed


@torch.no_grad()
def _by_chunks(role: Role, output: Sample, x: Sample, t: Tensor, condition: Condition, clean: Sample) -> Tensor:
    """Return the velocity of ``x`` chunk by chunk. A given first frame is in the cache, so that of ``output`` stays."""
    assert role.causal is not None
    cache = role.cache(condition)
    parts = [output.frames(slice(cache.frames))]
    while cache.frames < x.video.shape[2]:
        chunk = slice(cache.frames, cache.frames + role.causal.size(cache.count))
        parts.append(role.chunk_velocity(x.frames(chunk), t[:, cache.frames], cache))
        cache = cache.with_chunk(clean.frames(chunk))
    return _flat(Sample.cat(parts, dim=2))


def _changed_weights(plan: RolePlan, weights: Mapping[str, Tensor], scratch: Path) -> int:
    """Return the number of tensors that differ in any bit from the folder's after writing them from their shards."""
    (folder,) = plan.folders
    write_folder(scratch, [sharded(weights)], plan.config, dtype=torch.float32)
    before = _weights(folder)
    after = {name: tensor for file in scratch.glob("*.safetensors") for name, tensor in load_file(file).items()}
    renamed, common = before.keys() ^ after.keys(), before.keys() & after.keys()
    return len(renamed) + sum(not torch.equal(before[name].float(), after[name]) for name in common)


def _weights(folder: TransformerFolder) -> dict[str, Tensor]:
    read = tensor_reader(folder)
    return {name: read(name) for name in folder.shapes}


def compare(ours: Result, truth: Result, changed: int) -> tuple[dict[str, float], str]:
    """Return a mesh's errors, ``changed`` weights too, and the parameter with the largest gradient error."""
    gradients = gradient_errors(ours.gradients, truth.gradients)
    worst = max(sorted(gradients), key=gradients.__getitem__)
    errors = {name: relative_error(value, truth.values[name]) for name, value in ours.values.items()}
    return {**errors, "each gradient": gradients[worst], "weights changed": float(changed)}, worst


def planned(folder: Path, family: str, expert: int = 0, *, checkpointing: bool = False) -> RolePlan:
    """Plan the network of ``folder``, or one of its experts, as a role that trains."""
    settings = ShardSettings(activation_checkpointing="full" if checkpointing else "none")
    plan = plan_role("student", checkpoint=str(folder), family=family, sharding=settings).expert(expert)
    return replace(plan, causal=None)  # a causal network's own chunks do not fit the grids


def verify(
    folder: Path, family: str, ranks: int, expert: int = 0, optional: int = 0, *, causal: bool = False
) -> Iterator[tuple[Case, dict[str, float], str]]:
    """Compare on meshes of at most ``ranks`` ranks; ``causal`` compares a causal role with itself on one rank, as a
    sparse role is."""
    plan = planned(folder, family, expert)
    _check_memory(folder, plan, ranks)
    for grid in GRIDS:
        plan.tokens(*sample_shapes(plan, grid, optional))  # raises if the network is too small for them
    histories = HISTORIES if causal else (None,)
    truth: dict[tuple[tuple[int, int, int], str | None], Result] = {}
    if not causal and plan.sparse is None:
        truth = {(grid, None): plain_result(plan, grid, optional) for grid in GRIDS}
    for world in sorted({dp * cp for dp, cp in MESHES if dp * cp <= ranks}):
        with RankPool(world, timeout=1800.0, preload=("torch", "models.families.registry")) as pool:
            for dp_shard, cp in (mesh for mesh in MESHES if math.prod(mesh) == world):
                for grid, checkpointing, history in product(GRIDS, (False, True), histories):
                    case = Case(
                        folder=folder, family=family, dp_shard=dp_shard, cp=cp, grid=grid,
                        checkpointing=checkpointing, expert=expert, optional=optional, history=history,
                    )  # fmt: skip
                    with tempfile.TemporaryDirectory() as scratch:
                        ours, changed = pool.run(rank_result, case, Path(scratch) / "network")[0]
                    if (grid, history) not in truth:  # a role on one rank; chunks of a causal one give the whole clip
                        chunks = {"chunk by chunk": ours.values["output"]} if causal else {}
                        truth[grid, history] = ours._replace(values=ours.values | chunks)
                    yield case, *compare(ours, truth[grid, history], changed)


def _check_memory(folder: Path, plan: RolePlan, ranks: int) -> None:
    """Check that the host has memory in float64 for the plain network and its gradients, and for the ranks' shards,
    gathered copies and gradients."""
    size = sum(p.numel() for p in plan.network.parameters())
    needed, free = size * 8 * (2 + 4 * ranks), available_host_memory()
    if free is not None and needed > free:
        takes = f"{folder} in float64 on {ranks} ranks takes about {needed / 1e9:.0f} GB of {free / 1e9:.0f} GB"
        raise UserError(f"{takes}; use fewer --ranks, or the name of the family, which tries small networks")


def report(title: str, folder: Path, family: str, ranks: int) -> bool:
    """Print one table per network and one with its optional inputs; return whether all errors are within the bound."""
    experts = len(inspect_checkpoint(str(folder), "FOLDER").folders)
    plan = planned(folder, family)
    parts, needed = sample_shapes(plan, GRIDS[0])
    options = [{}, *plan.family.options(plan.config, parts[VIDEO], TEXT_TOKENS)]
    kinds = [i for i, optional in enumerate(options) if _serves(plan, needed | optional)]
    tables: list[tuple[str, dict[str, Any]]] = []
    for expert in range(experts):
        name = f"{title}, {EXPERT_FOLDERS[expert]}" if experts > 1 else title
        for i in kinds:
            given = " and ".join(sorted(options[i].keys() - needed.keys()))
            tables.append((f"{name}, {given} given" if given else name, {"expert": expert, "optional": i}))
    if experts == 1 and plan.sparse is None:
        with suppress(UserError):
            plan.family.check_causal(plan.config, "FOLDER")
            tables.append((f"{title}, causal", {"optional": kinds[-1], "causal": True}))
    return all([_table(name, folder, family, ranks, **options) for name, options in tables])


def _serves(plan: RolePlan, condition: Mapping[str, Shape]) -> bool:
    """Whether the networks of a folder are for such a condition, where a repository has several."""
    with suppress(UserError):
        for folder in plan.folders:
            plan.family.check_folder(folder.path, condition, "FOLDER")
        return True
    return False


def _table(title: str, folder: Path, family: str, ranks: int, *, causal: bool = False, **options: Any) -> bool:
    columns = ("chunk by chunk", *COLUMNS) if causal else COLUMNS
    names = ["dp_shard x cp", "tokens", "checkpointing", *(["history"] if causal else []), *columns]
    print(f"\n**{title}**\n\n| {' | '.join(names)} |\n{'|---' * len(names)}|")
    good = True
    for case, errors, worst in verify(folder, family, ranks, causal=causal, **options):
        fits = max(errors.values()) <= BOUND
        good &= fits
        cells = [f"{case.dp_shard} x {case.cp}", str(math.prod(case.grid)), "on" if case.checkpointing else "off"]
        cells += [case.history] if case.history else []
        for column in columns:
            digits = ".0f" if column == "weights changed" else ".1e"
            cells.append(format(errors[column], digits) if column in errors else "-")
        print(f"| {' | '.join(cells)} |" + ("" if fits else f" **above {BOUND:g}**, first in {worst}"), flush=True)
    return good


def write_example(folder: Path, family: str, config: Mapping[str, Any], sparse: SparseSettings | None = None) -> None:
    """Write a network of ``config`` with random weights to a diffusers folder, with gates for ``sparse`` attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = family_of(family, "student").build(config, "models.verify")
        gates = None
        if sparse is not None:
            gates = plan_sparse("student", sparse, [], family_of(family, "student"), config_of(network))
        for parameter in network.parameters():  # constructors set biases to 0, which would hide errors
            parameter.data += 0.05 * torch.randn_like(parameter)
        tensors = network.state_dict()
        for name, shape in {} if gates is None else gates.shapes.items():
            tensors[name] = 0.3 * torch.randn(shape)
    weights = Weights({name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__)
    named = {"_class_name": family_of(family, "student").class_name} | defining(config_of(network))
    texts = {} if sparse is None else {SPARSE_FILE: file_contents(sparse, sparse.sparsity or 0.0)}
    write_folder(folder, [weights], named, dtype=torch.float32, texts=texts)


def run(target: str, family: str | None, ranks: int, *, sparse: bool = False) -> bool:
    """Print the tables of a folder, or of a family's examples; return whether all errors are within the bound."""
    folder = resolve_path(str(user_path(target, "FOLDER_OR_FAMILY")), "FOLDER_OR_FAMILY", network_files)
    for name in (family, None if folder.is_dir() else target):
        if name is not None and name not in family_names():
            raise UserError(f"{name} is neither a folder nor a family; use a folder, or {' or '.join(family_names())}")
    if folder.is_dir():
        made = family_of_class(str(inspect_checkpoint(str(folder), "FOLDER").folders[0].config.get("_class_name")))
        family = family or (family_names()[0] if made is None else made.name)  # the check of its class reports it
        planned(folder, family)  # raises before anything is printed
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "diffusers"))
    print(f"python -m models.verify {target}: largest relative differences from the plain network in one process,")
    print(f"float64, {packages}, at most {ranks} ranks; {BATCH} samples")
    if folder.is_dir():
        assert family is not None
        return report(target, folder, family, ranks)
    good = True
    for name, config in family_of(target, "student").examples().items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "network"
            write_example(folder, target, config, EXAMPLE if sparse else None)
            good &= report(f"{target} {name}{', sparse' if sparse else ''}", folder, target, ranks)
    return good


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0, 1 if an error is too large, or 2 after a one-line message for a user error."""
    parser = argparse.ArgumentParser(prog="python -m models.verify", description=__doc__.splitlines()[0])
    parser.add_argument("target", metavar="FOLDER_OR_FAMILY", help=f"a folder, or {', '.join(family_names())}")
    parser.add_argument("--family", help="of a folder's network; by its class by default")
    parser.add_argument("--ranks", type=int, default=4, help="local processes at most; bigger meshes are left out")
    parser.add_argument("--sparse", action="store_true", help="a family's examples with sparse attention")
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    good = False

    @paths_of_the_user()
    def work() -> None:
        nonlocal good
        if args.ranks < 1:
            raise UserError(f"--ranks {args.ranks} must be at least 1")
        good = run(args.target, args.family, args.ranks, sparse=args.sparse)
        print(f"\nall within {BOUND:g}" if good else f"\nNOT exact: errors above {BOUND:g}")

    code = exit_code(work)
    return code or int(not good)


if __name__ == "__main__":
    from models import verify as importable  # ranks import `rank_result` by its module's name

    sys.exit(importable.main())
