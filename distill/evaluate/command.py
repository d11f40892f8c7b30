"""Evaluate students next to their teacher, so that others can repeat it:

``torchrun --nproc-per-node N -m distill.evaluate WHAT... --prompts FILE --out DIR [--seeds 5] [--like FILE]``

WHAT is a run's folder, whose exported student is sampled; a diffusers folder or an adapter of other weights; or
``teacher``, which is always there if the first run has one. ``@N`` after it is the number of steps, as in
``runs/wan_dmd2@2`` and ``teacher@50``. Settings of the first run hold for all folders that are not a run's; without a
run, give ``experiment=NAME key=value ...``. Prompt i starts from the same noise of each seed for every participant.

After a kill, the same command continues. ``--like`` takes prompts, seeds, sizes and precision of another evaluation.
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from distill.data.base import IMAGES, ClipDataset, MeasuredDataset
from distill.data.sets.encode import release_memory
from distill.data.shares import Shares
from distill.evaluate.comparison import (
    FEW_PROMPTS,
    RESULT,
    compare,
    comparison_lines,
    markdown,
    rows_of_table,
    summarize,
)
from distill.evaluate.evaluator import SHOWN_CLIPS
from distill.evaluate.measures import prompt_measures
from distill.evaluate.networks import run_command
from distill.evaluate.perceptual import embeddings
from distill.evaluate.plan import BEGUN, PROMPTS, Plan, plan_evaluation
from distill.evaluate.sampling import decoded
from distill.evaluate.vbench import DIMENSIONS, SEEDS, check_package, run_suite
from distill.report.media import write_clips
from distill.report.page import evaluation_page
from distill.report.verdict import ReportRow
from distill.report.write import finite
from distill.run.folder import command_line, this_start
from distill.run.open import open_device, open_mesh
from fsdp_cp.checkpoint.lock import held_directory
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, counted
from fsdp_cp.files.atomic_file import atomic_path, write_text, writing
from fsdp_cp.launch import rank, recorded, world_size
from fsdp_cp.mesh import Mesh
from fsdp_cp.progress import first_rank_log, progress
from fsdp_cp.reduce import on_all_ranks, on_first_rank
from models.sample import Sample

log = first_rank_log(__name__)


def _written(plan: Plan) -> AbstractContextManager[None]:
    """Turn a failed write into one line that says that nothing is lost."""
    return writing(f"--out={plan.out}", "make room and start the same command again: finished clips are kept")


def sample_missing(plan: Plan, name: str, *, data: ClipDataset, mesh: Mesh, device: torch.device) -> None:
    """Sample the clips of a participant that are not there yet, and store their latents. A collective."""
    network, finished = plan.networks[name], _finished(plan, name)
    missing = len(plan.prompts) * len(finished) - sum(map(len, finished))
    if not missing:
        return
    sampler = network.loaded(mesh=mesh, device=device, data=data)
    # The data's rows are the prompts, of which several may have one caption.
    clips = range(len(plan.captions)) if plan.images else None
    with progress(missing, f"sampling {name}", "clip") as advance:
        for seed, finished_here in enumerate(finished):
            times = [time.perf_counter()]
            batches = sampler.batches(
                network.role,
                plan.captions,
                steps=network.steps,
                seed=seed,
                clips=clips,
                chunk_done=lambda _, times=times: times.append(time.perf_counter()),
                finished=finished_here,
            )
            for positions, latents in batches:
                seconds = {"seconds": (times[-1] - times[0]) / len(positions), "first": times[1] - times[0]}
                on_all_ranks(partial(_store, plan, name, seed, positions, latents, seconds))
                advance(len(set(positions) - finished_here))
                times[:] = [time.perf_counter()]


def _finished(plan: Plan, name: str) -> list[set[int]]:
    """Return for each seed the prompts that need no clip of it: it is there, or they have fewer seeds."""
    folder, counts = plan.folder("latents", name), list(plan.counts.values())
    have = on_first_rank(lambda: {file.name for file in folder.glob("*.safetensors")})

    def is_finished(prompt: int, seed: int) -> bool:
        return seed >= counts[prompt] or plan.latents_file(name, prompt, seed).name in have

    return [{i for i in range(len(counts)) if is_finished(i, seed)} for seed in range(max(counts))]


def _store(
    plan: Plan, name: str, seed: int, positions: Sequence[int], latents: Sample, seconds: Mapping[str, float]
) -> None:
    """Write this rank's share of sampled latents, one file a clip."""
    counts, about = list(plan.counts.values()), {key: str(value) for key, value in seconds.items()}
    for i in range(rank(), len(positions), world_size()):
        prompt = positions[i]
        if seed >= counts[prompt]:
            continue
        parts = {part: x[i].contiguous() for part, x in latents.parts.items()}
        if not all(x.isfinite().all() for x in parts.values()):
            raise UserError(f"{name}: the latents of prompt {prompt} are not finite")
        with _written(plan), atomic_path(plan.latents_file(name, prompt, seed)) as file:
            file.write_bytes(save(parts, about))  # as bytes: save_file hides a full disk in a SafetensorError


def _latents(plan: Plan, name: str, prompt: int, seeds: Iterable[int]) -> tuple[Sample, list[dict[str, str]]]:
    """Return the latents of a prompt's ``seeds``, and what their files say of the time that they took."""
    made, times, parts = [], [], plan.config.data.sample_shapes()[0]
    for seed in seeds:
        path = plan.latents_file(name, prompt, seed)
        try:
            with safe_open(path, framework="pt") as file:
                made.append(Sample({part: file.get_tensor(part)[None] for part in parts}))
                times.append(file.metadata())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error}); remove it, and start the same command again") from error
    return Sample.cat(made), times


def measure_prompt(plan: Plan, data: ClipDataset, prompt: int, device: torch.device) -> dict[str, Any]:
    """Decode, measure and write the clips of a prompt, or read its measures if they are there."""
    record = plan.out / "measures" / f"{prompt:05d}.json"
    if record.is_file():
        return json.loads(record.read_text())
    count = plan.counts[plan.prompts[prompt]]
    # The 25 clips of VBench's flickering would take GB: five are measured, as of its other prompts.
    together = min(count, SEEDS) if plan.suite else count
    latents, clips, times = {}, {}, {}
    for name in plan.networks:
        times[name] = []
        for start in reversed(range(0, count, together)):  # the first ones stay to be measured
            seeds = range(start, min(start + together, count))
            latents[name], taken = _latents(plan, name, prompt, seeds)
            made = decoded(data, latents[name])
            clips[name], times[name] = made.frames, taken + times[name]
            with _written(plan):
                write_clips([plan.clip_file(name, prompt, seed) for seed in seeds], *made, fps=data.fps)
    networks = {name: partial(embeddings, network=of, device=device) for name, of in plan.embeddings.items()}
    values = prompt_measures(clips, latents, plan.teacher, networks)
    found = finite({"values": values, "times": times})
    with _written(plan):
        write_text(record, json.dumps(found))
    return found


def evaluate(arguments: Namespace) -> None:
    """Sample, measure and write the files of the evaluation. All ranks must call this."""
    plan = plan_evaluation(arguments)
    if len(plan.prompts) < FEW_PROMPTS:
        log.warning("%d prompts are few: intervals are reliable from %d on", len(plan.prompts), FEW_PROMPTS)
    many = counted(sum(plan.counts.values()), "clip")
    log.info("%s of each of %d networks; the time left is shown meanwhile", many, len(plan.networks))
    device, dimensions = open_device(plan.config), plan.dimensions
    python = user_path(arguments.vbench_python, "--vbench-python") if arguments.vbench_python else None
    first = next(iter(plan.networks.values()))
    with open_mesh(plan.config, first.plan, device) as mesh, held_directory(plan.out, "--out"):
        if python is not None:
            dimensions = on_first_rank(lambda: check_package(python, plan.dimensions))
        on_first_rank(lambda: _begin(plan))
        options = {"seed": plan.config.seed, "device": device, "run_dir": plan.out, "captions": plan.captions}
        data = plan.config.data.build(**options)
        if plan.images and len(data) < len(plan.captions):
            raise UserError(f"--prompts: {len(plan.captions) - len(data)} images cannot be read (see above)")
        for name in plan.networks:
            sample_missing(plan, name, data=data, mesh=mesh, device=device)
            release_memory(device)
        with progress(len(plan.prompts), "measuring", "prompt") as advance:
            found = Shares().run(range(len(plan.prompts)), lambda i: measure_prompt(plan, data, i, device), advance)
        on_first_rank(lambda: _write(plan, data, found))
        data.release()
    if plan.suite is not None and rank() == 0:  # after the process group: it takes hours, and the others need not wait
        with _written(plan):
            participants = {name: plan.clips_of(name) for name in plan.networks}
            run_suite(plan.suite, participants, plan.out, python=python, dimensions=dimensions, device=device.type)


def _begin(plan: Plan) -> None:
    """Write the record of an evaluation that has begun, and the table of prompts from which its data are built."""
    columns = [*IMAGES.get(plan.protocol["image"], ["image"])]
    images = iter(plan.images or [None] * len(plan.captions))
    table = [dict(zip(columns, images, strict=False)) | {"caption": text} for text in plan.captions]
    with _written(plan):
        write_text(plan.out / PROMPTS, "".join(json.dumps(row) + "\n" for row in table))
        write_text(plan.out / BEGUN, json.dumps(plan.record, indent=1) + "\n")


def _write(plan: Plan, data: ClipDataset, found: Sequence[Mapping[str, Any]]) -> None:
    """Write and print the results of ``found``, the measures of each prompt."""
    result = _json(_result(plan, data, found))
    compared = compare(result, plan.other) if plan.other else None
    lines = comparison_lines(compared, "--like") if compared else []
    shown = {"table": rows_of_table(result["results"]), "compared": lines, "few": FEW_PROMPTS}
    page = evaluation_page(result, rows=_first_clips(plan, data), fps=data.fps, **shown)
    seconds = [
        f"{name}: {x['seconds']:.3g} s a clip, first chunk after {x['first']:.3g} s (latents, median)"
        for name, x in result["seconds"].items()
    ]
    paragraphs = [markdown(result["results"]), "\n".join(seconds), "\n".join(lines)]
    table = "\n\n".join(filter(None, paragraphs))
    with _written(plan):
        write_text(plan.out / RESULT, json.dumps(result | {"compared": compared}, indent=1) + "\n")
        write_text(plan.out / "evaluation.md", table + "\n")
        write_text(plan.out / "evaluation.html", page)
    print(f"{table}\n\nwritten to {plan.out / 'evaluation.html'}")


def _json(value: Any) -> Any:
    """Return ``value`` as it is read again."""
    return json.loads(json.dumps(finite(value)))


def _result(plan: Plan, data: ClipDataset, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of ``evaluation.json``, but for the comparison with another one."""
    values = {name: _columns([prompt["values"][name] for prompt in found]) for name in plan.networks}
    seconds = {name: _medians(chain.from_iterable(prompt["times"][name] for prompt in found)) for name in plan.networks}
    return {
        "version": 1,
        **plan.record,
        "made": this_start(command_line(sys.argv[1:])),
        "prompts": plan.prompts,
        "captions": plan.captions,
        "images": plan.images,
        "suite": plan.suite,
        "results": summarize(values, plan.teacher),
        "report": _report_measures(plan, data),
        "seconds": seconds,
        "values": values,
    }


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


def _medians(clips: Iterable[Mapping[str, str]]) -> dict[str, float]:
    return {key: float(np.median([*map(float, values)])) for key, values in _columns([*clips]).items()}


def _first_clips(plan: Plan, data: ClipDataset) -> list[ReportRow]:
    """Return the clips of the first prompts, a row per participant."""
    rows = []
    for name, network in plan.networks.items():
        first = [_latents(plan, name, i, [0])[0] for i in range(min(SHOWN_CLIPS, len(plan.prompts)))]
        clips = decoded(data, Sample.cat(first))
        rows.append(ReportRow(name, network.role, network.steps, None, clips.frames, 0, clips.sounds))
    return rows


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
    parser = ArgumentParser(prog="python -m distill.evaluate", description=__doc__.splitlines()[0])
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
    return run_command(parser, argv, evaluate)
