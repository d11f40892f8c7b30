"""Causal roles on every mesh against diffusers' network in one process, with dense masks and lists as caches."""

from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.autograd import forward_ad
from torch.distributed.tensor import distribute_tensor

from fsdp_cp import ShardSettings, build_mesh, microbatch
from fsdp_cp.attention.kernels.kernel import CpuFlash
from fsdp_cp.context.check_parallel import gradient_errors, relative_error
from fsdp_cp.reduce import grad_norm
from models.causal import CausalSettings
from models.condition import Condition
from models.lora.settings import LoraSettings
from models.roles.role_plan import plan_role
from tests.counted import Counted
from tests.oracles.causal_wan import CausalWan
from tests.oracles.full_tensors import full_tensors
from tests.oracles.method_step import plain_step
from tests.oracles.samples import video
from tests.oracles.tiny_wan import ARCHITECTURE, text_condition, tiny_role
from tests.tiers import long_case, slow, slow_case

MESHES = [
    *(slow_case(mesh) for mesh in ({"cp": 2, "ring": 2}, {"dp_shard": 2, "cp": 2})),
    *(long_case(mesh) for mesh in ({"cp": 1}, {"dp_shard": 2}, {"cp": 2})),
    long_case({"dp_replicate": 2, "cp": 2}), long_case({"cp": 3, "ring": 3}),
    *(long_case({"cp": 4, "ring": ring}) for ring in (1, 2, 4)),
]  # fmt: skip
CHUNKS, LONG, FRAMES, TEXT = (1, 2, 2, 2), (1, *[2] * 6), 7, (5, 10)
SHAPE = (2, 4, FRAMES, 10, 6)
"""15 tokens a frame: chunks of 15 and 30 tokens, which 2 and 4 ranks do not divide."""
SMALL = (2, 4, FRAMES, 2, 2)
"""One token a frame: chunks of 1 and 2 tokens, fewer than ranks."""
LIMITS = {"all": (None, 0), "window and sink": (1, 1), "window": (2, 0)}
STEPS = (1.0, 0.6)
KINDS = {"none": "optim_grads_params", "full": "no_shard", "selective": "optim", "compiled": "optim_grads_params"}
"""Activation checkpointing (selective for compiled blocks), each with a strategy of sharding."""


def settings(window=None, sink=0, context_time=0.0):
    return CausalSettings(chunk=2, first_chunk=1, window=window, sink=sink, context_time=context_time)


def data(shape=SHAPE, frames=None):
    """Clean and noisy clips, the times of their chunks ``(B, T)``, text, and a random clip."""
    shape = (*shape[:2], frames or shape[2], *shape[3:])
    generator = torch.Generator().manual_seed(1)
    clean, noise, other = (torch.randn(shape, generator=generator) for _ in range(3))
    number = (torch.arange(shape[2]) + 1) // 2
    t = (0.1 + 0.85 * torch.rand(2, 20, generator=generator))[:, number % 20]
    noisy = torch.lerp(clean, noise, t[:, None, :, None, None])
    return clean, noisy, t, torch.randn(2, *TEXT, generator=generator), other


def cut(x, sizes=CHUNKS):
    return x.split(list(sizes), 2)


def build(folder, mesh, lora=None, **sharding):
    plan = plan_role(
        "student", checkpoint=str(folder / "student"), sharding=ShardSettings(**sharding), causal=settings(), lora=lora
    )
    return tiny_role(plan, mesh, latents=SHAPE[1:], conditions={"text": TEXT})


def by_chunks(role, clean, noisy, t, condition, sizes=CHUNKS, start=0, training=False, after_chunk=lambda cache: None):
    """Way 3: the velocities of all chunks, with ``clean`` as the history."""
    cache, parts = role.cache(condition, training=training), []
    cache = replace(cache, frames=start) if start else cache
    given = cache.count
    for clean_chunk, x, time in zip(
        cut(clean, sizes)[given:], cut(noisy, sizes)[given:], t.split(list(sizes), 1)[given:], strict=True
    ):
        parts.append(role.chunk_velocity(video(x), time[:, 0], cache).video)
        cache = cache.with_chunk(video(clean_chunk))
        after_chunk(cache)
    return torch.cat(parts, 2), cache


def rollout(chunk, remember, x, noise):
    """Clip of a few steps per chunk, with gradients of each chunk's last step; the history is the clip so far.

    Args:
        chunk: velocity of the next chunk at a time.
        remember: appends a finished chunk.
        x: noise of all chunks.
        noise: noise of the second step.
    """
    done = []
    for first, second in zip(cut(x), cut(noise), strict=True):
        with torch.no_grad():
            x0 = first - STEPS[0] * chunk(first, STEPS[0])
        x0 = torch.lerp(x0, second, STEPS[1])
        done.append(x0 - STEPS[1] * chunk(x0, STEPS[1]))
        remember(done[-1].detach())
    return torch.cat(done, 2)


# On the ranks


def _values(of):
    """Velocities in all ways, by name; ``of(way, clips, limits, ...)`` computes one."""
    found, clips, longer = {}, data(), data(frames=13)
    for name, limits in LIMITS.items():
        for way in ("noisy history", "clean history", "chunks", "training chunks"):
            found[f"{way}, {name}"] = of(way, clips, limits)
    found["one time"] = of("one time", clips)
    for way in ("clean history", "chunks"):
        found[f"context time, {way}"] = of(way, clips, context_time=0.1)
        found[f"few tokens, {way}"] = of(way, data(SMALL))
    for way in ("noisy history", "clean history", "chunks"):
        found[f"first frame, {way}"] = of(way, clips, has_frame=True)
    # Any frame number, also beyond rope_max_seq_len; and more frames than in training, with a sink.
    found["frame 1000"] = of("chunks", clips, (1, 0), start=1000)
    for way in ("chunks", "training chunks"):
        found[f"long, with a sink, {way}"] = of(way, longer, (1, 1), sizes=LONG)
        found[f"long, all, {way}"] = of(way, longer, sizes=LONG)
    return found


def _on_role(role, mine):
    def of(way, clips, limits=(None, 0), context_time=0.0, sizes=CHUNKS, start=0, has_frame=False):
        clean, noisy, t, text, _ = (x[mine] for x in clips)
        limited, condition, frame = replace(role, causal=settings(*limits, context_time)), text_condition(text), None
        if has_frame:
            frame = clean[:, :, :1]
            condition = Condition({"text": text, "first_frame": frame})
            clean = torch.cat([torch.zeros_like(frame), clean[:, :, 1:]], 2)  # the given frame replaces it
        if "chunks" in way:
            training = way == "training chunks"
            v, cache = by_chunks(limited, clean, noisy, t, condition, sizes, start, training)
            assert cache.frames == start + noisy.shape[2]
            n = len(sizes)
            assert not training or list(cache.chunks) == [i for i in range(n) if limited.causal.sees(n, i)]
            return v
        history = {"clean": video(clean)} if way == "clean history" else {}
        v = limited.velocity(video(noisy), t[:, 0] if way == "one time" else t, condition, **history).video
        if frame is None:
            return v
        held = noisy[:, :, :1] - t[:, None, :1, None, None] * v[:, :, :1]
        assert torch.allclose(held, frame, atol=1e-5)
        return v[:, :, 1:]

    return _values(of)


def _tangent(role, mine):
    clean, noisy, t, text, direction = (x[mine] for x in data())
    with torch.no_grad(), forward_ad.dual_level():
        duals = video(forward_ad.make_dual(noisy, direction)), forward_ad.make_dual(t, torch.full_like(t, 0.7))
        v = role.velocity(*duals, text_condition(text), clean=video(clean)).video
        return forward_ad.unpack_dual(v).tangent.clone()


def _gradients(role, mine, loss):
    """Loss of this rank's share of the batch, clip norm, and all gradients."""
    with microbatch(role.network, is_first=True, is_last=True):
        value = loss(role, mine) * len(mine) / 2
        value.backward()
    norm, named = grad_norm(role.parameters()), role.named_parameters()
    gradients = full_tensors({name: p.grad for name, p in named.items() if p.grad is not None})
    for parameter in named.values():
        parameter.grad = None
    return value.detach(), norm, gradients


def _teacher_forcing(role, mine):
    clean, noisy, t, text, target = (x[mine] for x in data())
    return (role.velocity(video(noisy), t, text_condition(text), clean=video(clean)).video - target).square().mean()


def _rolled_out(role, mine):
    """A rollout whose first chunks leave the cache before the backward begins."""
    noise, second, _, text, target = (x[mine] for x in data())
    role = replace(role, causal=settings(1, 0))
    cache = role.cache(text_condition(text), training=True)

    def chunk(x, t):
        return role.chunk_velocity(video(x), torch.full((len(x),), t), cache).video

    def remember(x0):
        nonlocal cache
        cache = cache.with_chunk(video(x0))

    return (rollout(chunk, remember, noise, second) - target).square().mean()


LOSSES = {"teacher forcing": _teacher_forcing, "rollout": _rolled_out}


def _on_mesh(folder, sizes):
    mesh = build_mesh(**sizes, heads=4, device_type="cpu")
    mine = torch.arange(2).chunk(mesh.dp_size)[mesh.dp_rank]
    gradients = {}
    for kind, strategy in KINDS.items():
        if kind == "compiled" and mesh.world.size() > 2:
            continue  # half a minute each; the smaller meshes compile
        with Counted() as counted:
            saved = {"activation_checkpointing": "selective", "compile": True} if kind == "compiled" else {}
            role = build(folder, mesh, **{"activation_checkpointing": kind, "strategy": strategy} | saved)
            if kind == "none":
                with torch.no_grad():
                    values = _on_role(role, mine)
                tangent = _tangent(role, mine)
            for name, loss in LOSSES.items():
                gradients[name, kind] = _gradients(role, mine, loss)
        assert (counted.graphs > 0) == (kind == "compiled")
    half = build(folder, mesh, precision="bf16")
    clean, noisy, t, text, _ = (x[mine] for x in data())
    with torch.no_grad():
        in_bf16 = {
            "clean history": half.velocity(video(noisy), t, text_condition(text), clean=video(clean)).video,
            "chunks": by_chunks(half, clean, noisy, t, text_condition(text))[0],
        }
    return mine, values, tangent, gradients, in_bf16


def _on_one_rank(folder):
    role, mine = build(folder, build_mesh(cp=1, heads=4, device_type="cpu")), torch.arange(2)
    with torch.no_grad():
        return _on_role(role, mine)


# The oracle


def _plain(folder):
    return WanTransformer3DModel.from_pretrained(folder / "student")


@pytest.fixture(scope="module")
def true_values(checkpoints):
    network = _plain(checkpoints)

    def of(way, clips, limits=(None, 0), context_time=0.0, sizes=CHUNKS, start=0, has_frame=False):
        oracle, (clean, noisy, t, text, _) = CausalWan(network, sizes, *limits, trained_chunks=len(CHUNKS)), clips
        if has_frame:
            noisy, t = torch.cat([clean[:, :, :1], noisy[:, :, 1:]], 2), torch.cat([0 * t[:, :1], t[:, 1:]], 1)
        if way == "clean history":
            v = oracle.clean_history(noisy, t, text, clean, context_time)
        elif "chunks" in way:
            parts = []
            for clean_chunk, x, time in zip(cut(clean, sizes), cut(noisy, sizes), t.split(list(sizes), 1), strict=True):
                parts.append(oracle.chunk(x, time[:, 0], text))
                oracle.remember(clean_chunk, text, context_time)
            v = torch.cat(parts, 2)
        else:
            v = oracle.noisy_history(noisy, t[:, :1].expand(-1, FRAMES) if way == "one time" else t, text)
        return v[:, :, 1:] if has_frame else v

    with torch.no_grad():
        return _values(of)


@pytest.fixture(scope="module")
def truth(checkpoints, true_values):
    """Velocities by name, tangent, and (loss, clip norm, gradients) by loss."""
    oracle, (clean, noisy, t, text, other) = CausalWan(_plain(checkpoints), CHUNKS), data()

    def velocity(x, times):
        return oracle.clean_history(x, times, text, clean)

    _, tangent = torch.func.jvp(velocity, (noisy, t), (other, torch.full_like(t, 0.7)))
    return true_values, tangent, {name: _true_gradients(checkpoints, loss) for name, loss in _TRUE_LOSSES.items()}


def _true_gradients(folder, loss):
    network = _plain(folder)
    return plain_step(loss(network), network)


def _true_teacher_forcing(network):
    clean, noisy, t, text, target = data()
    return (CausalWan(network, CHUNKS).clean_history(noisy, t, text, clean) - target).square().mean()


def _true_rollout(network):
    noise, second, _, text, target = data()
    oracle = CausalWan(network, CHUNKS, 1, 0)
    clip = rollout(
        lambda x, t: oracle.chunk(x, torch.full((2,), t), text), lambda x0: oracle.remember(x0, text), noise, second
    )
    return (clip - target).square().mean()


_TRUE_LOSSES = {"teacher forcing": _true_teacher_forcing, "rollout": _true_rollout}


def test_velocities_of_one_rank(pools, checkpoints, true_values):
    """Ways 1, 2 and 3 with and without window and sink, at a context time, with a first frame."""
    (ours,) = pools[1].run(_on_one_rank, checkpoints)
    errors = {name: relative_error(value, true_values[name]) for name, value in ours.items()}
    assert ours.keys() == true_values.keys() and max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_mesh_computes_as_one_process(pools, checkpoints, truth, sizes):
    """Ways 1, 2 and 3 with and without window and sink, derivatives, losses, all gradients, clip norms, bf16."""
    values, tangent, gradients = truth
    world = sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1) * sizes.get("cp", 1)
    ranks, errors = pools[world].run(_on_mesh, checkpoints, sizes), {}

    def note(name, error):
        errors[name] = max(error, errors.get(name, 0.0))

    for mine, ours, our_tangent, our_gradients, in_bf16 in ranks:
        assert ours.keys() == values.keys()
        for name, value in ours.items():
            note(name, relative_error(value, values[name][mine]))
        note("tangent", relative_error(our_tangent, tangent[mine]))
        for (name, kind), (_, norm, each) in our_gradients.items():
            note(f"norm of {name}, {kind}", relative_error(torch.as_tensor(norm), gradients[name][1]))
            note(f"gradients of {name}, {kind}", max(gradient_errors(each, gradients[name][2]).values()))
        for name, value in in_bf16.items():
            assert relative_error(value, values["clean history, all"][mine]) < 0.02, name
    shares = {tuple(r[0].tolist()): r[3] for r in ranks}  # the loss of each part of the batch once
    for name, kind in shares[next(iter(shares))]:
        loss = sum(part[name, kind][0] for part in shares.values())
        note(f"loss of {name}, {kind}", relative_error(loss, gradients[name][0]))
    print(f"\n{sizes}: largest {max(errors.values()):.1e}", {k: f"{e:.0e}" for k, e in errors.items() if e > 2e-6})
    assert max(errors.values()) < 1e-5, errors


def _with_adapters(folder, sizes, **sharding):
    """Velocities in way 2, which are those in way 3, and gradients of adapters through a rollout."""
    mesh = build_mesh(**sizes, heads=4, device_type="cpu")
    role = build(folder, mesh, lora=LoraSettings(rank=2), **sharding)
    for name, parameter in role.named_parameters().items():
        if ".lora_B." in name:  # 0 at the start, which would hide the adapters
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))
            parameter.data.copy_(distribute_tensor(0.05 * drawn, parameter.device_mesh, parameter.placements))
    clean, noisy, t, text, _ = data()
    with torch.no_grad():
        whole = role.velocity(video(noisy), t, text_condition(text), clean=video(clean)).video
        chunks, _ = by_chunks(role, clean, noisy, t, text_condition(text))
    assert relative_error(chunks, whole) < 1e-5
    return whole, _gradients(role, torch.arange(2), _rolled_out)


def _offloaded(folder):
    return _with_adapters(
        folder, {"cp": 2, "ring": 2}, activation_checkpointing="full", activation_offload=True, offload="cpu"
    )


@slow
def test_adapters(pools, checkpoints):
    """A causal student with adapters on a ring of two, with weights and saved tensors in CPU memory."""
    ((whole, (loss, norm, gradients)),) = pools[1].run(_with_adapters, checkpoints, {"cp": 1})
    assert any(".lora_A." in name for name in gradients)
    for ours, (our_loss, our_norm, ours_of) in pools[2].run(_offloaded, checkpoints):
        assert relative_error(ours, whole) < 1e-5 and relative_error(our_loss, loss) < 1e-5
        assert relative_error(torch.as_tensor(our_norm), torch.as_tensor(norm)) < 1e-5
        assert max(gradient_errors(ours_of, gradients).values()) < 1e-5


def _streamed(folder, sizes, precision):
    """Stream 12 chunks by compiled blocks, eagerly, again, and through a training cache.

    Return the velocities; the graphs and the attention calls after each chunk, by kind; and the bytes of a stream.
    """
    mesh = build_mesh(**sizes, heads=4, device_type="cpu")
    found, graphs, calls, forward = {}, {}, {}, CpuFlash.forward
    clean, noisy, t, text, _ = data(frames=23)
    arguments = (clean, noisy, t[:, :1].expand(-1, 23), text_condition(text), (1, *[2] * 11))

    def count(*args):
        calls[kind].append(None)
        return forward(*args)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuFlash, "forward", count)
        for kind in ("compiled", "eager", "again", "training"):
            graphs[kind], calls[kind] = [], []
            with Counted() as counted:
                role = build(folder, mesh, precision=precision, compile=kind in ("compiled", "training"))
                role = replace(role, causal=settings(window=2, sink=1))

                def after_chunk(cache, kind=kind, counted=counted):
                    graphs[kind].append((counted.graphs, len(calls[kind])))

                found[kind], cache = by_chunks(role, *arguments, training=kind == "training", after_chunk=after_chunk)
            if kind == "again":
                size = sum(x.numel() * x.element_size() for x in cache.history().tensors())
    return found, graphs, size


@slow
@pytest.mark.parametrize(
    ("sizes", "precision", "bound"),
    [({"cp": 1}, "fp32", 1e-5), ({"cp": 2, "ring": 1}, "fp32", 1e-5), ({"cp": 3, "ring": 3}, "fp64", 1e-12)],
    ids=str,
)
def test_a_stream(pools, checkpoints, sizes, precision, bound):
    """A stream computes what a training cache does, with the same bits each time, in a buffer of the planned size.

    Each layer is one call of self-attention and one of cross-attention. One graph serves the first chunk, which has its
    own size, and one all others. A training cache runs uncompiled.
    """
    whole, layers, forwards = 0, ARCHITECTURE["num_layers"], 2 * 12  # a velocity, and the finished chunk
    for found, counts, size in pools[sizes["cp"]].run(_streamed, checkpoints, sizes, precision):
        for kind in ("compiled", "eager"):
            assert relative_error(found[kind], found["training"]) < bound, kind
        assert torch.equal(found["eager"], found["again"])
        assert [graphs for graphs, _ in counts["compiled"]] == [1] + [2] * 11
        assert counts["eager"][-1] == (0, 2 * layers * forwards) and counts["training"][-1][0] == 0
        whole += size
    kept = 2 * (15 + 3 * 30) + 15  # keys and values: the sink, and 2 + 1 chunks; the sink's unmoved keys
    width = layers * 2 * 48 * (4 if precision == "fp32" else 8)
    assert whole == width * kept


def _misused(folder):
    mesh = build_mesh(cp=1, heads=4, device_type="cpu")
    role, (clean, noisy, t, text, _) = build(folder, mesh, activation_checkpointing="full"), data()
    condition, plain = text_condition(text), replace(role, causal=None)
    with pytest.raises(ValueError, match="student.causal.chunk"):
        plain.velocity(video(noisy), t, condition, clean=video(clean))
    with pytest.raises(ValueError, match="student.causal.chunk"):
        plain.cache(condition)
    with pytest.raises(ValueError, match="whole chunks"):
        role.velocity(video(noisy[:, :, :6]), t[:, :6], condition)
    with pytest.raises(RuntimeError, match="no_grad"):
        role.chunk_velocity(video(noisy[:, :, :1]), t[:, 0], role.cache(condition))
    cache = role.cache(condition, training=True)
    for x, time in ((noisy[:, :, :2], t[:, 0]), (noisy[:1, :, :1], t[:1, 0]), (noisy[:, :, :1], t[:, :1])):
        with pytest.raises(ValueError, match="chunk 0"):
            role.chunk_velocity(video(x), time, cache)
    # A cache that is overwritten between a forward and the recomputation in its backward.
    cache = cache.with_chunk(video(clean[:, :, :1]))
    assert role.flops > 0
    with microbatch(role.network, is_first=True, is_last=True):
        loss = role.chunk_velocity(video(noisy[:, :, 1:3]), t[:, 1], cache).video.square().mean()
        cache.chunks[0][0].k.mul_(2)
        with pytest.raises((ValueError, RuntimeError)):
            loss.backward()
        raise _BrokenOff


class _BrokenOff(Exception):
    pass


def _misused_and_dropped(folder):
    with pytest.raises(_BrokenOff):
        _misused(folder)


def test_misuse_and_a_cache_that_is_overwritten_are_refused(pools, checkpoints):
    pools[1].run(_misused_and_dropped, checkpoints)
