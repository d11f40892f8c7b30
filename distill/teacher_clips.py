"""Sample clips from a teacher into an encoded set, which any method trains on with ``data=encoded``:

``torchrun --nproc-per-node N -m distill.teacher_clips experiment=NAME key=value ... OUT [--clips N] [--states 1.0,.9]``

The settings are those of the training: ``teacher.checkpoint``, ``method.guidance_scale``, ``method.shift``,
``method.teacher_sampler``, ``data`` (captions are enough) and ``seed``. Clip i has the caption (and image) of item i of
the data, and starts from the noise of ``seed`` and i. After a kill, the same command continues.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from distill.config import Config, compose_config
from distill.data.base import VAE_PRECISIONS, ClipDataset, condition_of
from distill.data.sets.dataset import STATES
from distill.data.sets.encode import IMAGE_TENSORS, stored_as
from distill.data.sets.write_set import Save, SetWriter, refuse_other_set, texts_of
from distill.data.shares import Shares
from distill.evaluate.networks import MOST_STEPS, check_number
from distill.evaluate.sampling import alone, sampling_batch
from distill.methods.common.chunks import chunk_noise, noised
from distill.methods.common.few_step import FewStepMethod, FewStepSettings
from distill.methods.common.sampling import guided_states
from distill.run.checkpoint_checks import find_sources
from distill.run.hub_names import resolve_hub_names
from distill.run.open import open_device, open_mesh
from distill.run.setup import RunPlan, plan_run
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, counted, paths_of_the_user
from fsdp_cp.launch import end_process, exit_code
from fsdp_cp.mesh import Mesh
from fsdp_cp.progress import log_to_console
from fsdp_cp.reduce import on_all_ranks, on_first_rank
from fsdp_cp.rng import StepRandom
from models.condition import TEXT_TAGS
from models.roles.role import Role
from models.sample import Sample, part_name

log = logging.getLogger(__name__)


class _Sampling:
    """Sampling of one set."""

    def __init__(self, config: Config, arguments: argparse.Namespace, plan: RunPlan, data: ClipDataset) -> None:
        self.config, self.arguments, self.plan, self.data = config, arguments, plan, data
        self.count = arguments.clips or len(data)
        self.settings = replace(config.data.encoding(), latents=arguments.latents)
        if missing := plan.roles[0].family.parts.keys() - self.settings.bucket_shapes()[0][0].keys():
            have = f"the teacher makes {missing.pop()} too, but data.encoders={self.settings.encoders} do not"
            raise UserError(f"{have}; use data=captions or video_folder with encoders of the teacher's family")

    def described(self) -> dict[str, Any]:
        method = self.config.method
        sources = find_sources(self.config, self.plan.roles)
        teacher = {
            "weights": sources["teacher.checkpoint"]["fingerprint"],
            "precision": self.config.teacher.precision,
            "sampler": method.teacher_sampler,
            "steps": self.arguments.steps,
            "guidance_scale": method.guidance,
            "shift": method.sampling_shift,
            "seed": self.config.seed,
            STATES: self.arguments.states,
        }
        (role,) = self.plan.roles
        if role.causal is not None:
            teacher["causal"] = asdict(role.causal)
        if role.sparse is not None:
            teacher["sparse"] = asdict(role.sparse.settings)
        # A refusal names the first difference. "rows" comes last: it is a hash, and says less than the seed.
        made = {"clips": self.count, "teacher": teacher, "rows": self.data.fingerprint}
        return json.loads(json.dumps(self.settings.described() | made))

    def write(self, writer: SetWriter, *, teacher: Role, mesh: Mesh, device: torch.device) -> None:
        """Write the set, or the part of it that is missing. A collective."""
        captions = [self.data.caption(i) for i in range(min(self.count, len(self.data)))]
        # A text that shows images is that of its item.
        is_shown = TEXT_TAGS in self.data.condition_shapes
        items = [i % len(captions) for i in range(self.count)]
        rows = [(i, (captions[item], item if is_shown else -1)) for i, item in enumerate(items)]
        texts = texts_of(rows, self.settings.negative_prompt)
        bytes_per_clip = self.settings.clip_bytes(1 + len(self.arguments.states))
        log.info("%s take about %.3g GB", counted(self.count, "clip"), self.count * bytes_per_clip / 1e9)
        batch = sampling_batch([teacher], self.data.latent_shapes, mesh, device)

        def make_clips(numbers: Sequence[int], save: Save, advance: Callable[[int], object]) -> None:
            chunk = batch * mesh.dp_size
            for start in range(0, len(numbers), chunk):
                # Fill the last chunk by repeating its last clip, without writing the copies.
                first = start + mesh.dp_rank * batch
                mine = [numbers[min(i, len(numbers) - 1)] for i in range(first, first + batch)]
                made = self._sample(mine, teacher, device)
                written = list(dict.fromkeys(mine)) if mesh.cp_rank == 0 and first < len(numbers) else []
                on_all_ranks(lambda made=made, written=written: [save(n, made[n], {}) for n in written])
                advance(min(chunk, len(numbers) - start))

        def copy_texts(numbers: Sequence[int], save: Save, advance: Callable[[int], object]) -> None:
            def copy(number: int) -> None:
                caption, item = texts[number]
                save(number, self.data.embeddings(caption, *([item] if is_shown else [])), {})

            Shares().run(numbers, copy, advance)

        writer.write("clips", self.count, bytes_per_clip, "clip", make_clips)
        text = self.data.embeddings(captions[0])
        bytes_per_text = sum(self.data.condition_shapes["text"][0] * t.shape[1] * t.itemsize for t in text.values())
        writer.write("texts", len(texts), bytes_per_text, "caption", copy_texts)
        writer.finish(rows, self.settings.negative_prompt, encoders=self.settings.encoders)

    def _sample(self, numbers: Sequence[int], teacher: Role, device: torch.device) -> dict[int, dict[str, Tensor]]:
        """Sample the clips ``numbers``; return the tensors to store, by number."""
        method = self.config.method
        items = [self.data[i % len(self.data)] for i in numbers]
        random = StepRandom(seed=self.config.seed, step=0, positions=numbers, device=device)
        shapes = {part: self.data.latent_shapes[part] for part in teacher.family.parts}
        noise = chunk_noise(teacher, random, "teacher_clips/noise", shapes, teacher.family.parts)
        inputs = default_collate([{name: item[name] for name in self.data.condition_shapes} for item in items])
        condition = noised(condition_of(inputs, self.data).to(device), random)
        how = method.teacher_sampler, self.arguments.steps, method.sampling_shift, method.guidance
        chunks = guided_states(teacher, noise, condition, random, *how, self.arguments.states)
        *states, latents = (Sample.cat(pieces, dim=2) for pieces in zip(*chunks, strict=True))
        made = {part_name("latents", part): x for part, x in latents.parts.items()}
        for part in shapes if states else ():
            made[part_name(STATES, part)] = torch.stack([state.parts[part] for state in states], dim=1)
        return {number: self._stored(number, k, made, items[k]) for k, number in enumerate(numbers)}

    def _stored(self, number: int, k: int, made: Mapping[str, Tensor], item: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors to store of clip ``number``, the ``k``-th of those ``made``, with its image."""
        tensors = {name: tensor[k] for name, tensor in made.items()}
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise UserError(f"the teacher's clip {number} is not finite; set teacher.precision=fp32")
        tensors |= {name: item[name] for name in IMAGE_TENSORS if name in item}
        dtype = VAE_PRECISIONS[self.settings.latents]
        return stored_as(tensors, dtype)


@paths_of_the_user()
def run(arguments: argparse.Namespace) -> None:
    """Compose and check the settings, build mesh, data and teacher, and write the set."""
    overrides = [word for word in arguments.words if "=" in word]
    names = [word for word in arguments.words if "=" not in word]
    if len(names) != 1:
        raise UserError(f"give one folder OUT next to key=value settings, got {' '.join(names) or 'none'}")
    config = compose_config(overrides)
    if not isinstance(config.method, FewStepSettings):
        raise UserError(f"method={config.method.name} has no teacher; use a method that distills one, such as dmd2")
    if config.dry_run or config.plan:
        raise UserError("dry_run and plan are settings of train.py; leave them out")
    check_number("--steps", arguments.steps, 1, MOST_STEPS)
    if arguments.clips is not None:
        check_number("--clips", arguments.clips, 1, 2**31)
    if arguments.states and config.method.teacher_sampler != "euler":
        raise UserError(f"--states needs method.teacher_sampler=euler, not {config.method.teacher_sampler}")
    out = user_path(names[0], "OUT").absolute()
    where = f"OUT={out}"
    device = open_device(config)
    resolve_hub_names(config, ["teacher"])
    if len(config.data.bucket_shapes()) > 1:
        raise UserError("data.buckets has several sizes, and a teacher's clips have one; use num_frames, height, width")
    plan = plan_run(config, alone(FewStepMethod, "teacher"))
    with open_mesh(config, plan, device) as mesh:
        on_first_rank(lambda: refuse_other_set(out, where))
        data = config.data.build(seed=config.seed, device=device, run_dir=plan.run_dir)
        sampling = _Sampling(config, arguments, plan, data)
        writer = SetWriter(out, where, on_all_ranks(sampling.described)[0])
        with writer.begun() as is_whole:
            if not is_whole:
                roles = plan.build_roles(mesh=mesh, device=device, data=data, seed=config.seed)
                sampling.write(writer, teacher=roles["teacher"], mesh=mesh, device=device)
    log.info("%s in %s; train with data=encoded data.path=%s", counted(sampling.count, "clip"), out, out)


def _times(text: str) -> list[float]:
    times = sorted({float(word) for word in text.split(",") if word}, reverse=True)
    if not all(0 < time <= 1 for time in times):
        raise ValueError
    return times


_times.__name__ = "list of times in (0, 1]"  # as argparse names it


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return exit code 0, or 2 with one line for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m distill.teacher_clips", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("words", nargs="+", metavar="key=value | OUT", help="settings as train.py has them, and the folder to write")
    add("--clips", type=int, help="number of clips; by default one for each item of the data")
    add("--steps", type=int, default=50, help="steps of the teacher's sampler")
    add("--states", type=_times, default=[], help="times of stored states, for method=ode_regression: 1.0,.9,.75")
    add("--latents", choices=["fp32", "bf16"], default="fp32", help="stored type of latents and states")
    arguments = parser.parse_intermixed_args(argv)
    log_to_console()
    return exit_code(lambda: run(arguments))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
