"""Sampling of clips with a role. The same captions and noise give the same clips on every mesh."""

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from distill.data.base import ClipDataset, Measure, MeasuredDataset
from distill.methods import Method
from distill.methods.common.chunks import chunk_noise, noised
from distill.report.media import Sound
from fsdp_cp.errors import NotFinite, counted
from fsdp_cp.launch import rank, world_size
from fsdp_cp.measure.phases import phase
from fsdp_cp.mesh import Mesh
from fsdp_cp.progress import progress
from fsdp_cp.reduce import all_reduce_scalars, gather_samples, gathered
from fsdp_cp.rng import StepRandom
from fsdp_cp.sharding.state import resharded
from models.roles.role import Role
from models.sample import AUDIO, VIDEO, PartShapes, Sample

TEACHER_STEPS = 50
"""Full number of a teacher's steps, if the run samples it with none."""


def alone(method: type[Method], name: str) -> type[Method]:
    """Return ``method`` with only the role ``name``, frozen, which it samples."""

    class Alone(method):  # type: ignore[misc, valid-type]
        trained_roles = ()
        settings_read = ("teacher", "student", "fake")

        @classmethod
        def roles_needed(cls, settings: Any) -> tuple[str, ...]:
            return (name,)

        @classmethod
        def accept(cls, *_: Any) -> None:
            """Check nothing: only training reads files, and samplers know sound and two experts."""

        check_given = check_files = check_parts = check_experts = accept

        @classmethod
        def check_causal(cls, settings: Any, causal: Mapping[str, Any]) -> None:
            if name != "teacher":  # every method samples a causal teacher chunk by chunk
                super().check_causal(settings, causal)

    return Alone


def sample_captions(data: ClipDataset, count: int) -> list[str]:
    """Return ``count`` captions, all equally often if ``count`` is a multiple of their number. Strides near the golden
    section show many kinds in few captions."""
    captions = data.captions()
    total = len(captions)
    strides = range(round(0.618 * total) or 1, 2 * total)
    stride = next(s for s in strides if math.gcd(s, total) == 1)
    return [captions[i * stride % total] for i in range(count)]


class Clips(NamedTuple):
    """Decoded clips."""

    frames: np.ndarray
    """uint8 (n, T, H, W, 3)."""
    sounds: list[Sound] | None = None
    """Sound of each clip, where the data have sound."""

    def measured(self, data: MeasuredDataset, captions: Sequence[str]) -> dict[str, Measure]:
        """Measure the clips, of these captions, with their sounds where they have them."""
        sounds = [] if self.sounds is None else [np.stack([sound.samples for sound in self.sounds])]
        return data.measure(self.frames, captions, *sounds)


def decoded(data: ClipDataset, latents: Sample) -> Clips:
    """Decode samples on this rank."""
    frames = data.decode(latents).numpy()
    if AUDIO not in latents.parts:
        return Clips(frames)
    waves, sample_rate = data.decode_sound(latents)
    return Clips(frames, [Sound(wave, sample_rate) for wave in waves.numpy()])


def check_finite(latents: Sample) -> None:
    """Raise :class:`NotFinite` if any of n samples is not finite."""
    finite = [part.isfinite().flatten(1).all(1) for part in latents.parts.values()]
    broken = int((~torch.stack(finite).all(0)).sum())
    if broken:
        clips = f"the latents of {broken} of {len(latents)} clips"
        raise NotFinite(f"{clips} are not finite; use an earlier checkpoint, or fp32")


class StreamDecoder:
    """Decodes a clip that is made chunk by chunk, on this rank."""

    def __init__(self, data: ClipDataset) -> None:
        self._data, self._frames = data, 0
        self._before: list[Sample] = []

    def decode(self, chunk: Sample) -> Clips:
        """Decode the next chunk of n clips: their frames (and sounds) after those of the chunks before."""
        decode_next = getattr(self._data, "decode_next", None)
        if decode_next is not None and chunk.parts.keys() == {VIDEO}:
            made = decode_next(chunk, is_first=self._frames == 0)
            if made is not None:
                self._frames += made.shape[1]
                return Clips(made.numpy())
        self._before.append(chunk)
        clips = decoded(self._data, Sample.cat(self._before, dim=2))
        new, self._frames = clips.frames[:, self._frames :], clips.frames.shape[1]
        return Clips(new, clips.sounds)


def speed_in_words(seconds: Sequence[float], frames: int) -> str:
    """Describe the speed of a stream of ``frames`` by the seconds that each of its chunks took."""
    first, *later = seconds
    rest = f", then {np.mean(later):.3g} s per chunk" if later else ""
    return f"first chunk after {first:.3g} s{rest}, {frames / sum(seconds):.3g} frames per second"


def decode(data: ClipDataset, latents: Sample) -> Clips | None:
    """Decode n samples, which every rank holds, on rank 0; return ``None`` on the others. A collective: rank ``i %
    world`` decodes clip i. What is not finite raises :class:`NotFinite` on all ranks."""
    check_finite(latents)
    mine = latents[rank() :: world_size()].to("cpu", torch.float32)
    made = gathered(lambda: decoded(data, mine) if len(mine) else None)
    if made is None:
        return None
    places = [(made[i % len(made)], i // len(made)) for i in range(len(latents))]
    sounds = None if made[0].sounds is None else [clips.sounds[i] for clips, i in places]
    return Clips(np.stack([clips.frames[i] for clips, i in places]), sounds)


def sampling_batch(roles: Iterable[Role], shapes: PartShapes, mesh: Mesh, device: torch.device) -> int:
    """Return the number of clips per forward on each rank, from the smallest memory of all devices. A collective. A
    forward of both branches of guidance keeps about 32 fp32 numbers per token and unit of width, and may fill 1/32 of
    the memory, with at most 32 clips: more are not faster on a CPU."""
    of_clip = max(2 * 32 * 4 * role.tokens(shapes) * role.family.width(role.config) for role in roles)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
    (least,) = all_reduce_scalars([memory], mesh.world, dist.ReduceOp.MIN)
    return max(1, min(32, int(least) // 32 // of_clip))


@dataclass(kw_only=True, eq=False)
class ClipSampler:
    """Networks of a method on a mesh, and the data whose clips they make."""

    method: Method
    data: ClipDataset
    mesh: Mesh
    device: torch.device

    def generate(self, role: str, captions: list[str], *, steps: int, **options: Any) -> Sample:
        """Return the latents of all ``captions`` by :meth:`batches`, with its ``options``; show the progress."""
        made = []
        with progress(len(captions), f"sampling {role}, {counted(steps, 'step')}", "clip") as advance:
            for positions, latents in self.batches(role, captions, steps=steps, **options):
                made.append(latents)
                advance(len(positions))
        return Sample.cat(made)

    @torch.no_grad()
    def batches(
        self,
        role: str,
        captions: list[str],
        *,
        steps: int,
        seed: int,
        batch: int | None = None,
        clips: Sequence[int] | None = None,
        latent_shapes: PartShapes | None = None,
        chunk_done: Callable[[Sample], object] | None = None,
        finished: Collection[int] = (),
    ) -> Iterator[tuple[range, Sample]]:
        """Sample a clip of each caption; yield positions in ``captions`` and their latents, on the CPU of every rank.

        A collective. A causal role makes its chunks one after another. Finished chunks wait in host memory.

        Args:
            seed: seed of the noise; clip ``i`` starts from the same noise for every role and number of steps.
            batch: number of clips per forward on a rank; by default what fits (:func:`sampling_batch`).
            clips: items of the data that give the images, one per caption; see ``ClipDataset.condition``.
            latent_shapes: shapes of a clip's parts; those of the data by default. A causal role can make longer clips.
            chunk_done: called on all ranks with each finished chunk, or clip of a bidirectional role, of all captions
                of a batch. What it raises on all of them ends the sampling.
            finished: positions that are not needed. A batch of them alone is left out; the other batches do not change.
        """
        method, data, mesh = self.method, self.data, self.mesh
        clock, shapes = method.clock(role), data.latent_shapes if latent_shapes is None else latent_shapes
        shapes = {part: shapes[part] for part in clock}
        if batch is None:
            batch = sampling_batch(method.roles.values(), data.latent_shapes, mesh, self.device)
        batch = min(batch, -(-len(captions) // mesh.dp_size))
        # Every rank must run the same number of forwards: fill the last positions by repeating captions.
        chunk = batch * mesh.dp_size
        with phase(f"sample/{role}"), resharded([r.network for r in method.roles.values()]):
            for start in range(0, len(captions), chunk):
                wanted = range(start, min(start + chunk, len(captions)))
                if set(wanted) <= set(finished):
                    continue
                filled = [i % len(captions) for i in range(start, start + chunk)]
                items = None if clips is None else [clips[i] for i in filled]
                # Of all ranks' clips: a caption that is refused raises on every rank. All batches would take much.
                condition = data.condition([captions[i] for i in filled], items)
                first = start + mesh.dp_rank * batch
                random = StepRandom(seed=seed, step=0, positions=range(first, first + batch), device=self.device)
                noise = chunk_noise(method.roles[role], random, "sample/noise", shapes, clock)
                chunks = []
                mine = noised(condition[first - start : first - start + batch].to(self.device), random)
                for latents in method.stream(role, noise, mine, steps, random):
                    chunks.append(latents.map(lambda part: gather_samples(part, mesh.dp).cpu()))
                    if chunk_done is not None:
                        chunk_done(chunks[-1])
                yield wanted, Sample.cat(chunks, dim=2)[: len(wanted)]
