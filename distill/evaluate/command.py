"""Evaluate students next to their teacher, so that others can repeat it:

``torchrun --nproc-per-node N -m distill.evaluate WHAT... --prompts FILE --out DIR [--seeds 5] [--like FILE]``

WHAT is a run's folder, whose exported student is sampled; a diffusers folder or an adapter of other weights; or
``teacher``, which is always there if the first run has one. ``@N`` after it is the number of steps, as in
``runs/wan_dmd2@2`` and ``teacher@50``. Settings of the first run hold for all folders that are not a run's; without a
run, give ``experiment=NAME key=value ...``. Prompt i starts from the same noise of each seed for every participant.

After a kill, the same command continues. ``--like`` takes prompts, seeds, sizes and precision of another evaluation.
"""

import argparse
import hashlib
import json
import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from distill.config import Config, compose_config
from distill.config.trained_method import sampling_in_words
from distill.data import ClipDataset
from distill.data.base import MeasuredDataset
from distill.data.sets.encode import release_memory
from distill.data.settings import CaptionsSettings, EncodedSettings, VideoFolderSettings
from distill.data.shares import Shares
from distill.evaluate.comparison import (
    FEW_PROMPTS,
    RESULT,
    SIZES,
    compare,
    comparison_lines,
    differing,
    markdown,
    read_evaluation,
    rows_of_table,
    summarize,
)
from distill.evaluate.evaluator import SHOWN_CLIPS
from distill.evaluate.measures import VERSION, prompt_measures
from distill.evaluate.networks import (
    SampledNetwork,
    check_number,
    checked_steps,
    exported_student,
    network_to_sample,
    prompts_with_images,
    read_prompts,
    sampled_as,
    settings_of_run,
    teacher_of,
)
from distill.evaluate.perceptual import LPIPS_LEAST, Embedding, embeddings, read_networks
from distill.evaluate.sampling import decoded, sample_batches
from distill.evaluate.vbench import DIMENSIONS, SEEDS, check_package, read_extended, read_suite, run_suite, seeds_of
from distill.methods.common.few_step import FewStepSettings
from distill.report.media import write_clips
from distill.report.page import evaluation_page
from distill.report.verdict import ReportRow
from distill.report.write import finite
from distill.run.folder import command_line, this_start
from distill.run.hub_names import resolve_hub_names
from distill.run.open import open_device, open_mesh
from fsdp_cp.checkpoint.lock import held_directory
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, counted, paths_of_the_user
from fsdp_cp.files.atomic_file import atomic_path, write_text, writing
from fsdp_cp.files.foreign import refuse_foreign
from fsdp_cp.launch import exit_code, rank, recorded, world_size
from fsdp_cp.mesh import Mesh
from fsdp_cp.progress import log_to_console, progress
from fsdp_cp.reduce import on_all_ranks, on_first_rank
from models.files.checkpoint_files import fingerprint, fingerprint_of
from models.sample import Sample

log = logging.getLogger(__name__)

_BEGUN, _PROMPTS = "evaluation_begun.json", "prompts.jsonl"
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Plan:
    """Checked evaluation."""

    out: Path
    config: Config
    """Settings of the data that all participants share."""
    networks: dict[str, SampledNetwork]
    counts: dict[str, int]
    """Number of seeds of each prompt."""
    captions: list[str]
    """Text that is sampled for each prompt: itself, or its extended prompt."""
    images: list[str]
    """Image of each prompt, where images condition."""
    suite: list[dict[str, Any]] | None
    """Entries of VBench, if its suite is evaluated."""
    dimensions: list[str]
    """Dimensions of VBench to compute."""
    protocol: dict[str, Any]
    """Settings that two evaluations must share to be compared."""
    other: dict[str, Any] | None
    """Content of the evaluation that ``--like`` names."""
    embeddings: dict[str, Embedding]
    """Networks of measures, by their names."""

    @property
    def prompts(self) -> list[str]:
        return list(self.counts)

    def clips_of(self, name: str) -> dict[tuple[str, int], Path]:
        return {
            (prompt, seed): self.folder("clips", name) / f"{i:05d}-{seed}.mp4"
            for i, (prompt, count) in enumerate(self.counts.items())
            for seed in range(count)
        }

    @property
    def teacher(self) -> str | None:
        """Name of the first teacher, from which distances are measured."""
        return next((name for name, network in self.networks.items() if network.role == "teacher"), None)

    def participants(self) -> dict[str, Any]:
        """Return the facts of the participants, which may differ between evaluations that are compared."""
        return {name: _facts(network) for name, network in self.networks.items()}

    def folder(self, kind: str, name: str) -> Path:
        number = list(self.networks).index(name)
        return self.out / kind / f"{number}_{re.sub(r'[^A-Za-z0-9.-]+', '_', name)[-60:]}"


def _facts(network: SampledNetwork) -> dict[str, Any]:
    (role,), method = network.plan.roles, network.config.method
    weights = [*map(fingerprint, role.folders)]
    if role.lora is not None and role.lora.saved is not None:
        weights.append(fingerprint_of([role.lora.saved.file]))
    if network.role == "teacher":
        shift = f"shift {method.sampling_shift:g}"
        sampler = f"{method.teacher_sampler}, {shift}, guidance {json.dumps(method.guidance)}"
    else:
        sampler = sampling_in_words(method)
    facts = {"role": network.role, "family": role.family.name, "steps": network.steps, "sampler": sampler}
    return facts | {"causal": role.causal and asdict(role.causal), "weights": " ".join(weights)}


def _path_and_steps(word: str) -> tuple[str, int | None]:
    path, _, count = word.rpartition("@")
    return (path, int(count)) if count.isdecimal() and path else (word, None)


def _resolved(config: Config) -> Config:
    """Replace the hub names of teacher and encoders, in place, and return ``config``."""
    resolve_hub_names(config, ["teacher"] if config.teacher.checkpoint else [])
    return config


def _networks(words: Sequence[str], config: Config, arguments: argparse.Namespace) -> dict[str, SampledNetwork]:
    shapes, networks = config.data.sample_shapes()[0], {}
    if isinstance(config.method, FewStepSettings) and "teacher" not in {_path_and_steps(word)[0] for word in words}:
        words = [*words, *["teacher"] * (config.teacher.checkpoint is not None)]
    for word in words:
        path, count = _path_and_steps(word)
        role, own = "student", config
        if path == "teacher":
            role, folder = "teacher", Path(teacher_of(config))
        else:
            folder = user_path(path, "WHAT")
            if (folder / "config.yaml").is_file():
                own = _resolved(settings_of_run(folder, arguments.device, arguments.cp))
                folder = exported_student(folder)
                if (sizes := own.data.sample_shapes()[0]) != shapes:
                    raise UserError(f"{word} has latents of {sizes}, and the first run of {shapes}; leave it out")
                if (image := own.data.encoding().image) != config.data.encoding().image:
                    raise UserError(f"{word} has data.image={image or 'null'}, unlike the first run; leave it out")
            own = sampled_as(own, folder)
        steps = checked_steps(own, role, count, f"{path}@")
        own = replace(own, data=config.data)
        if arguments.precision:
            own = replace(own, **{role: replace(getattr(own, role), precision=arguments.precision)})
        name = f"{path}, {counted(steps, 'step')}"
        if name in networks:
            raise UserError(f"{word} is there twice; leave one out")
        networks[name] = network_to_sample(own, role, folder, steps)
    for what, of in (
        ("family", {name: network.plan.roles[0].family.name for name, network in networks.items()}),
        ("precision", {name: network.plan.roles[0].sharding.precision for name, network in networks.items()}),
    ):
        if len(set(of.values())) > 1:
            hint = "give --precision" if what == "precision" else "evaluate them apart"
            raise UserError(f"WHAT are of different {what}: {', '.join(f'{n} {x}' for n, x in of.items())}; {hint}")
    return networks


def _asked(
    arguments: argparse.Namespace, suite: list[dict[str, Any]] | None, other: dict[str, Any] | None, *, has_images: bool
) -> tuple[dict[str, int], list[str], list[str]]:
    """Return the number of seeds of each prompt, its sampled text, and its image where images condition."""
    if has_images and arguments.suite:
        raise UserError("--suite vbench has no images, and data.image needs them; give --prompts")
    if other is None and suite is None:
        check_number("--seeds", arguments.seeds, 1, _MOST_SEEDS)
    seeds = other["protocol"]["seeds"] if other else arguments.seeds
    if has_images and arguments.prompts:  # with --like too: its images may lie elsewhere here
        of_prompt = prompts_with_images(arguments.prompts, "--prompts")
        return dict.fromkeys(of_prompt, seeds), list(of_prompt), list(of_prompt.values())
    if other is not None:
        if arguments.prompts:
            raise UserError("--prompts with --like gives images, and data.image is null; leave it out")
        images = (other.get("images") or []) if has_images else []
        if has_images and not images:
            raise UserError(f"--like {arguments.like} has no images, which data.image needs; give --prompts")
        counts = seeds_of(suite) if suite else dict.fromkeys(other["prompts"], seeds)
        return counts, other.get("captions") or list(counts), images
    if suite is None:
        prompts = read_prompts(arguments.prompts, "--prompts")
        return dict.fromkeys(prompts, seeds), prompts, []
    counts = seeds_of(suite)
    if not arguments.extended:
        return counts, list(counts), []
    extended = read_extended(user_path(arguments.extended, "--extended"), suite)
    return counts, [extended[prompt] for prompt in counts], []


@paths_of_the_user()
def plan_evaluation(arguments: argparse.Namespace) -> Plan:
    """Check the command line without starting anything."""
    # The folder of a run of a sweep may have "=" in its name.
    settings = [word for word in arguments.what if "=" in word and not Path(_path_and_steps(word)[0]).exists()]
    words = [word for word in arguments.what if word not in settings]
    other = read_evaluation(user_path(arguments.like, "--like")) if arguments.like else None
    if (arguments.prompts is None) == (other is None) and not (other and other.get("images")):
        raise UserError("give --prompts FILE, or --like OTHER/evaluation.json, which has prompts of its own")
    if arguments.suite and other:
        raise UserError("give --suite or --like: --like takes the suite of the other evaluation")
    suite, dimensions = other.get("suite") if other else None, []
    if arguments.suite:
        suite = read_suite(user_path(arguments.prompts, "--prompts"))
    if suite is None and (arguments.vbench_python or arguments.dimensions):
        raise UserError("--vbench-python and --dimensions are for the suite of VBench; give --suite vbench")
    if arguments.extended and not arguments.suite:
        raise UserError("--extended is for --suite vbench; give extended prompts as --prompts otherwise")
    if suite is not None:
        have = {dimension for entry in suite for dimension in entry["dimension"]}
        dimensions = [name for name in DIMENSIONS if name in have & set(arguments.dimensions or DIMENSIONS)]
    folders = [Path(_path_and_steps(word)[0]) for word in words]
    run = next((folder for folder in folders if (folder / "config.yaml").is_file()), None)
    if bool(settings) == bool(run):
        raise UserError("give the settings of one run: a run's folder among WHAT, or experiment=NAME key=value ...")
    config = _resolved(settings_of_run(run, arguments.device, arguments.cp) if run else compose_config(settings))
    if not run:
        config.device, config.mesh.cp = arguments.device or config.device, arguments.cp
    out = user_path(arguments.out, "--out").absolute()
    _use_prompts(config, out / _PROMPTS)
    counts, captions, images = _asked(arguments, suite, other, has_images=config.data.encoding().image is not None)
    try:
        config.data.check_captions(captions)
    except UserError as error:
        setting = "--like" if other else "--extended" if arguments.extended else "--prompts"
        raise UserError(str(error).replace("sample.captions", setting)) from error
    if other:
        arguments.precision = other["protocol"]["precision"]
        known = {field.name for field in fields(config.data)}
        sizes = {name: other["protocol"][name] for name in SIZES if name in known}
        config.data = replace(config.data, **sizes)
    networks = _networks(words, config, arguments)
    encoding, measuring = config.data.encoding(), read_networks(arguments.lpips, arguments.dino)
    if "lpips" in measuring and min(encoding.height, encoding.width) < LPIPS_LEAST:
        got = f"{encoding.height} x {encoding.width}"
        raise UserError(f"--lpips needs clips of {LPIPS_LEAST} x {LPIPS_LEAST} pixels or more, got {got}; leave it out")
    if absent := [image for image in images if not Path(image).is_file()]:
        where = "--prompts" if arguments.prompts else f"--like {arguments.like}"
        raise UserError(f"{where}: the image {absent[0]} is not a file here; give --prompts FILE with the images")
    decides = [*counts, *(captions if captions != list(counts) else []), *(fingerprint_of([Path(i)]) for i in images)]
    protocol = {
        "prompts": hashlib.sha256("\n".join(decides).encode()).hexdigest(),
        "seeds": sorted(set(counts.values())) if suite else next(iter(counts.values())),
        "suite": suite and "vbench",
        **{name: getattr(encoding, name) for name in SIZES},
        "data": config.data.name,
        "image": encoding.image,
        "latents": {part: list(shape) for part, shape in config.data.sample_shapes()[0].items()},
        "precision": next(iter(networks.values())).plan.roles[0].sharding.precision,
        "decoder": encoding.fingerprint(),
        "decoder precision": encoding.vae_precision,
        "measures": VERSION,
        **{name: files for name, (_, files) in measuring.items()},
    }
    embeddings = {name: embedding for name, (embedding, _) in measuring.items()}
    plan = Plan(out, config, networks, counts, captions, images, suite, dimensions, protocol, other, embeddings)
    earlier = refuse_foreign(
        out,
        "--out",
        (RESULT, "evaluation.html", "evaluation.md", _PROMPTS, "latents", "measures", "clips")
        + ("vbench", "vbench.json", "vbench.md"),
        record=_BEGUN,
        is_ours=lambda it: {"protocol", "participants"} <= it.keys(),
        maker="an evaluation",
    )
    if earlier is not None:
        changed = differing(earlier["protocol"], protocol)
        changed += [f"participant {name}" for name in differing(earlier["participants"], _json(plan.participants()))]
        if changed:
            raise UserError(f"--out={out} holds an evaluation with other {', '.join(changed)}; give another --out")
        # Folders are numbered, and the first teacher is the reference: in another order nothing would be found again.
        plan = replace(plan, networks={name: networks[name] for name in earlier["participants"]})
    return plan


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _use_prompts(config: Config, file: Path) -> None:
    """Replace videos or an encoded set by the prompts: sampling needs no clip of the training."""
    if isinstance(config.data, VideoFolderSettings | EncodedSettings):
        values = asdict(config.data.encoding())
        known = {field.name for field in fields(CaptionsSettings)}
        kept = {name: value for name, value in values.items() if name in known}
        config.data = CaptionsSettings(**kept | {"path": str(file), "name": "captions", "buckets": None})


def _written(plan: Plan) -> AbstractContextManager[None]:
    """Turn a failed write into one line that says that nothing is lost."""
    return writing(f"--out={plan.out}", "make room and start the same command again: finished clips are kept")


def _latents_file(plan: Plan, name: str, prompt: int, seed: int) -> Path:
    return plan.folder("latents", name) / f"{prompt:05d}-{seed}.safetensors"


def sample_missing(plan: Plan, name: str, *, data: ClipDataset, mesh: Mesh, device: torch.device) -> None:
    """Sample the clips of a participant that are not there yet, and store their latents. A collective."""
    network, folder = plan.networks[name], plan.folder("latents", name)
    have = on_first_rank(lambda: {file.name for file in folder.glob("*.safetensors")})
    count, counts = len(plan.prompts), list(plan.counts.values())
    # A prompt of fewer seeds counts as finished in the others.
    finished = [
        {i for i in range(count) if seed >= counts[i] or _latents_file(plan, name, i, seed).name in have}
        for seed in range(max(counts))
    ]
    missing = count * len(finished) - sum(map(len, finished))
    if not missing:
        return
    method = network.method(mesh=mesh, device=device, data=data)
    with progress(missing, f"sampling {name}", "clip") as advance:
        for seed in range(len(finished)):
            times = [time.perf_counter()]
            for positions, latents in sample_batches(
                method,
                network.role,
                steps=network.steps,
                captions=plan.captions,
                data=data,
                mesh=mesh,
                device=device,
                seed=seed,
                chunk_done=lambda times=times: times.append(time.perf_counter()),
                finished=finished[seed],
            ):
                seconds = {"seconds": (times[-1] - times[0]) / len(positions), "first": times[1] - times[0]}

                def store(positions=positions, latents=latents, seed=seed, seconds=seconds) -> None:
                    for i in range(rank(), len(positions), world_size()):
                        if seed >= counts[positions[i]]:
                            continue
                        parts = {part: x[i].contiguous() for part, x in latents.parts.items()}
                        if not all(x.isfinite().all() for x in parts.values()):
                            raise UserError(f"{name}: the latents of prompt {positions[i]} are not finite")
                        with _written(plan), atomic_path(_latents_file(plan, name, positions[i], seed)) as file:
                            # As bytes: save_file hides a full disk in a SafetensorError.
                            file.write_bytes(save(parts, {key: str(value) for key, value in seconds.items()}))

                on_all_ranks(store)
                advance(len(set(positions) - finished[seed]))
                times[:] = [time.perf_counter()]


def _latents(plan: Plan, name: str, prompt: int, seeds: Sequence[int]) -> tuple[Sample, list[dict[str, str]]]:
    made, times = [], []
    for seed in seeds:
        path = _latents_file(plan, name, prompt, seed)
        try:
            with safe_open(path, framework="pt") as file:
                made.append(Sample({part: file.get_tensor(part)[None] for part in plan.config.data.sample_shapes()[0]}))
                times.append(file.metadata())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error}); remove it, and start the same command again") from error
    return Sample.cat(made), times


def measure_prompt(plan: Plan, data: ClipDataset, prompt: int, device: torch.device) -> dict[str, Any]:
    """Decode, measure and write the clips of a prompt, or read its measures if they are there."""
    record = plan.out / "measures" / f"{prompt:05d}.json"
    if record.is_file():
        return json.loads(record.read_text())
    latents, clips, times, text = {}, {}, {}, plan.prompts[prompt]
    count = plan.counts[text]
    # The 25 clips of VBench's flickering would take GB: five are measured, as of its other prompts.
    networks = {name: partial(embeddings, network=of, device=device) for name, of in plan.embeddings.items()}
    together = min(count, SEEDS) if plan.suite else count
    for name in plan.networks:
        files, times[name] = [file for (of, _), file in plan.clips_of(name).items() if of == text], []
        for start in reversed(range(0, count, together)):
            seeds = range(start, min(start + together, count))
            latents[name], taken = _latents(plan, name, prompt, seeds)
            made = decoded(data, latents[name])
            clips[name], times[name] = made.frames, taken + times[name]
            with _written(plan):
                write_clips(files[start : seeds.stop], *made, fps=data.fps)
    values = prompt_measures(clips, latents, plan.teacher, networks)
    found = finite({"values": values, "times": times})
    with _written(plan):
        write_text(record, json.dumps(found))
    return found


def evaluate(arguments: argparse.Namespace) -> None:
    """Sample, measure and write the files of the evaluation. All ranks must call this."""
    plan = plan_evaluation(arguments)
    if len(plan.prompts) < FEW_PROMPTS and rank() == 0:
        log.warning("%d prompts are few: intervals are reliable from %d on", len(plan.prompts), FEW_PROMPTS)
    if rank() == 0:
        many = counted(sum(plan.counts.values()), "clip")
        log.info("%s of each of %d networks; the time left is shown meanwhile", many, len(plan.networks))
    device, dimensions = open_device(plan.config), plan.dimensions
    python = user_path(arguments.vbench_python, "--vbench-python") if arguments.vbench_python else None
    first = next(iter(plan.networks.values()))
    with open_mesh(plan.config, first.plan, device) as mesh, held_directory(plan.out, "--out"):
        if python is not None:
            dimensions = on_first_rank(lambda: check_package(python, plan.dimensions))
        begun = {"protocol": plan.protocol, "participants": plan.participants()}

        images = plan.images or [None] * len(plan.captions)
        table = [{"image": image, "caption": text} for image, text in zip(images, plan.captions, strict=True)]

        def begin() -> None:
            with _written(plan):
                write_text(plan.out / _PROMPTS, "".join(json.dumps(row) + "\n" for row in table))
                write_text(plan.out / _BEGUN, json.dumps(begun, indent=1) + "\n")

        on_first_rank(begin)
        options = {"seed": plan.config.seed, "device": device, "run_dir": plan.out, "captions": plan.captions}
        data = plan.config.data.build(**options)
        for name in plan.networks:
            sample_missing(plan, name, data=data, mesh=mesh, device=device)
            release_memory(device)
        with progress(len(plan.prompts), "measuring", "prompt") as advance:
            found = Shares().run(len(plan.prompts), lambda i: measure_prompt(plan, data, i, device), advance)
        on_first_rank(lambda: _write(plan, data, found, begun))
        data.release()
    if plan.suite is not None and rank() == 0:  # after the process group: it takes hours, and the others need not wait
        with _written(plan):
            run_suite(
                plan.out,
                {name: (plan.folder("clips", name).name, plan.clips_of(name)) for name in plan.networks},
                entries=plan.suite,
                python=python,
                dimensions=dimensions,
                device=device.type,
            )


def _write(plan: Plan, data: ClipDataset, found: Sequence[Mapping[str, Any]], begun: Mapping[str, Any]) -> None:
    values = {
        name: {key: [prompt["values"][name][key] for prompt in found] for key in found[0]["values"][name]}
        for name in plan.networks
    }
    times = {name: [clip for prompt in found for clip in prompt["times"][name]] for name in plan.networks}
    result = {
        "version": 1,
        **begun,
        "made": this_start(command_line(sys.argv[1:])),
        "prompts": plan.prompts,
        "captions": plan.captions,
        "images": plan.images,
        "suite": plan.suite,
        "results": summarize(values, plan.teacher),
        "report": _report_measures(plan, data),
        "seconds": {
            name: {key: float(np.median([float(clip[key]) for clip in clips])) for key in ("seconds", "first")}
            for name, clips in times.items()
        },
        "values": values,
    }
    compared = compare(_json(finite(result)), plan.other) if plan.other else None
    lines = comparison_lines(compared, "--like") if compared else []
    seconds = [
        f"{name}: {x['seconds']:.3g} s a clip, first chunk after {x['first']:.3g} s (latents, median)"
        for name, x in result["seconds"].items()
    ]
    table = "\n\n".join([markdown(result["results"]), "\n".join(seconds), *(["\n".join(lines)] if lines else [])])
    rows = []
    for name, network in plan.networks.items():
        first = [_latents(plan, name, i, [0])[0] for i in range(min(SHOWN_CLIPS, len(plan.prompts)))]
        clips = decoded(data, Sample.cat(first))
        rows.append(ReportRow(name, network.role, network.steps, None, clips.frames, 0, clips.sounds))
    shown = {"table": rows_of_table(result["results"]), "compared": lines, "few": FEW_PROMPTS}
    page = evaluation_page(_json(finite(result)), rows=rows, fps=data.fps, **shown)
    with _written(plan):
        write_text(plan.out / RESULT, json.dumps(finite(result | {"compared": compared}), indent=1) + "\n")
        write_text(plan.out / "evaluation.md", table + "\n")
        write_text(plan.out / "evaluation.html", page)
    print(f"{table}\n\nwritten to {plan.out / 'evaluation.html'}")


def _report_measures(plan: Plan, data: ClipDataset) -> dict[str, Any] | None:
    """Return the measures of the report, of all clips of a participant together, where there are renders."""
    if not isinstance(data, MeasuredDataset):
        return None
    captions = [text for text, count in zip(plan.captions, plan.counts.values(), strict=True) for _ in range(count)]
    measured = {}
    for name in plan.networks:
        latents = [_latents(plan, name, i, range(count))[0] for i, count in enumerate(plan.counts.values())]
        found = decoded(data, Sample.cat(latents)).measured(data, captions)
        measured[name] = {key: asdict(measure) for key, measure in found.items()}
    return measured


@recorded
def main(argv: list[str] | None = None) -> int:
    """Run the command. Return exit code 0, or 2 with one line for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m distill.evaluate", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("what", nargs="+", metavar="WHAT", help="run's folder, diffusers folder, adapter, or teacher; @N for N steps")
    of_images = ", and image where images condition"
    add("--prompts", metavar="FILE", help=f"a prompt per line, or .csv or .jsonl with a column caption{of_images}")
    add("--seeds", type=int, default=SEEDS, help="clips of each prompt")
    add("--suite", choices=("vbench",), help="suite of the prompts: FILE is the package's VBench_full_info.json")
    add("--extended", metavar="FILE", help="extended prompts of the suite: a line for each entry of --prompts FILE")
    add("--vbench-python", metavar="PATH", help="Python of an environment that has vbench, to compute its dimensions")
    add("--dimensions", nargs="+", choices=DIMENSIONS, metavar="NAME", help="dimensions of VBench; all by default")
    add("--out", required=True, help="folder to write: new, empty, or of the same evaluation, which then continues")
    add("--like", metavar="FILE", help="evaluation.json whose prompts, seeds, sizes and precision to repeat")
    add("--lpips", metavar="DIR", help="weights of LPIPS, to measure with it; see docs/evaluating.md")
    add("--dino", metavar="DIR", help="a DINO model as transformers store it, to measure with it")
    add("--precision", choices=("fp32", "bf16"), help="precision of all networks; by default as in their runs")
    add("--cp", type=int, default=1, help="ranks that share a clip's tokens, for clips too large for one GPU")
    add("--device", choices=("auto", "cpu", "cuda"), help="device; the first run's by default, auto for one on GPUs")
    arguments = parser.parse_args(argv)
    log_to_console()
    return exit_code(lambda: evaluate(arguments))
