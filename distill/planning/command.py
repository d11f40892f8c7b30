"""``train.py plan=true``: predict the memory, computation and traffic of a run on one CPU, as text and as a page."""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from distill.config import Config
from distill.data.base import IMAGES, ClipSettings
from distill.data.settings import EncodedSettings
from distill.methods import METHODS
from distill.planning.encoders import encoder_peaks
from distill.planning.extrapolation import simulate_any_depth
from distill.planning.prediction import (
    CONTEXT_GIB,
    FRAGMENTATION,
    GIB,
    Prediction,
    hardware_names,
    load_hardware,
    predict,
)
from distill.planning.roles import KINDS
from distill.planning.simulation import LOOK
from distill.report.charts import svg
from distill.report.page import data_uri, render
from distill.run.setup import RunPlan, Shapes, plan_run
from distill.train.export import check_export
from fsdp_cp.errors import UserError
from fsdp_cp.files.atomic_file import write_text
from fsdp_cp.files.foreign import refuse_foreign
from fsdp_cp.launch import world_size
from fsdp_cp.sharding.settings import ShardSettings
from models.condition import REFERENCES
from models.families.base import config_of
from models.families.registry import family_of
from models.files.checkpoint_files import defining
from models.sample import VIDEO

if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger(__name__)

FILE, PAGE = "plan.json", "plan.html"
MADE_BY = "fsdp_cp plan"
"""Value of ``made_by`` in the planner's JSON files."""
_GPU_ONLY = ("compile", "communication_buffers", "fp8", "fp8_gather")
"""Role settings that need a GPU and do not change the simulation."""


def plan_command(config: Config, command: Sequence[str]) -> None:
    """Print the plan and write ``plan.json`` and ``plan.html`` into ``RUN_DIR``. The page shows ``command``."""
    require_plannable(config)
    config, plan = plan_without_gpus(config)
    refuse_other_files(plan.run_dir, FILE, PAGE)
    prediction = make_prediction(config, plan, at_once=True)
    for line in in_words(prediction):
        log.info(line)
    content = {"made_by": MADE_BY, **prediction.as_json()}
    for name, text in ((FILE, json.dumps(content, indent=1) + "\n"), (PAGE, page(prediction, shlex.join(command)))):
        write_text(plan.run_dir / name, text)
    log.info("wrote %s and %s", plan.run_dir / FILE, PAGE)


def require_plannable(config: Config) -> None:
    """Refuse torchrun and unknown hardware before the simulation, and warn of fp8."""
    if world_size() > 1:
        hint = f"start it without torchrun, with world={world_size()}"
        raise UserError(f"plan={str(config.plan).lower()} must run in one process; {hint}")
    if config.planning.hardware is not None:
        load_hardware(config.planning.hardware)
    names = METHODS[config.method.name][0].roles_needed(config.method)
    if fp8 := [f"{name}.fp8={getattr(config, name).fp8}" for name in names if getattr(config, name).fp8 != "none"]:
        log.warning("%s: planned as bf16, gathers too; rates of fp8 are unknown, and times longer", ", ".join(fp8))


def make_prediction(config: Config, plan: RunPlan, *, at_once: bool = False) -> Prediction:
    """Predict the run of :func:`plan_without_gpus`, without a process group; ``at_once``: in two if faster."""
    hardware = None if config.planning.hardware is None else load_hardware(config.planning.hardware)
    simulation = simulate_any_depth(config, plan, stands_for="cuda", at_once=at_once)
    prediction = predict(config, plan, simulation, hardware, encoder_peaks(config, plan.shapes))
    return replace(prediction, size=_planned_size(config, plan))


def plan_without_gpus(config: Config) -> tuple[Config, RunPlan]:
    """Return the planner's version of ``config`` and its plan, of several buckets for the largest."""
    config = as_planned(config)
    if isinstance(data := config.data, ClipSettings) and data.buckets is not None:
        single = [replace(data, buckets=[size]) for size in data.sizes]
        buckets = [(one, planned_shapes(replace(config, data=one))) for one in single]
    else:
        stored = data.bucket_shapes() if isinstance(data, EncodedSettings) else [planned_shapes(config)]
        buckets = [(data, shapes) for shapes in stored]
    # More tokens need more memory and time in every phase.
    config.data, shapes = max(buckets, key=lambda bucket: math.prod(bucket[1][0][VIDEO][1:]))
    plan = plan_run(config, shapes=shapes)
    check_export(config, plan)
    return config, plan


def _planned_size(config: Config, plan: RunPlan) -> list[int] | None:
    """Return frames, height and width of the bucket that is planned; ``None`` for data of one size."""
    if isinstance(config.data, ClipSettings):
        return None if config.data.buckets is None else config.data.sizes[0]
    stored = config.data.bucket_shapes() if isinstance(config.data, EncodedSettings) else []
    return config.data.encoding().sizes[stored.index(plan.shapes)] if len(stored) > 1 else None


def as_planned(config: Config) -> Config:
    """Return ``config`` without settings that need a GPU, and with published networks for roles that name none."""
    config = deepcopy(config)
    config.device, config.attention.backend, config.log.wandb = "cpu", "auto", False
    if getattr(config.method, "guidance_scale_2", None) is not None:  # the simulation runs one expert
        config.method.guidance_scale = max(config.method.guidance_scale, config.method.guidance_scale_2)
        config.method.guidance_scale_2 = None
    default = ShardSettings()
    for name in METHODS[config.method.name][0].roles_needed(config.method):
        role = getattr(config, name)
        for setting in _GPU_ONLY:
            setattr(role, setting, getattr(default, setting))
        if role.checkpoint is None and role.architecture is None and config.planning.model is not None:
            released = family_of(role.family, name).planning
            if config.planning.model not in released.networks:
                known = " or ".join(sorted(released.networks)) or f"{name}.architecture"
                unknown = f"planning.model={config.planning.model} is not a network of {name}.family={role.family}"
                raise UserError(f"{unknown}; use {known}")
            role.architecture = dict(released.networks[config.planning.model])
            role.boundary = released.boundaries.get(config.planning.model)
    return config


def planned_shapes(config: Config) -> Shapes:
    """Return the shapes of a sample's latents and condition; without ``data.encoders``, those of the published VAE."""
    student, is_encoded = config.student, config.data.name == "encoded"
    if getattr(config.data, "encoders", "") is not None or student.architecture is None or is_encoded:
        return config.data.sample_shapes()
    family = family_of(student.family, "student")
    family.check_keys(student.architecture, "student.architecture")
    with torch.device("meta"):  # the network's class adds the defaults that the architecture leaves out
        network = defining(config_of(family.build(dict(student.architecture), "student.architecture")))
    channels, data = family.latent_channels(network), config.data
    parts = family.planning.shapes_of_clip(channels, data.num_frames, data.height, data.width, data.fps)
    images, room = len(IMAGES.get(data.image, ())), None
    tokens = data.max_text_tokens + images * family.planning.picture_tokens(data.height, data.width)
    if data.image == REFERENCES:
        edges = data.reference_image_edge, data.reference_video_edge
        room = family.planning.reference_room(data.references, data.num_frames, *edges)
        tokens = data.max_text_tokens + room.text
    shapes = family.condition_shapes(network, parts[VIDEO], tokens)
    # Use the data's number of tokens, so that a run's checks catch a mismatch with the network.
    shapes["text"] = (tokens, *shapes["text"][1:])
    if not images:
        return parts, {name: shape for name, shape in shapes.items() if not name.startswith("image_")}
    if room is not None:
        return parts, shapes | family.reference_shapes(network, tokens, room.count, room.rows, room.sounds)
    if optional := family.optional_shapes(network, parts[VIDEO], tokens, images):
        return parts, shapes | optional
    return parts, {"image_latents": parts[VIDEO], **shapes}


def refuse_other_files(folder: Path, file: str, *others: str) -> None:
    """Refuse a directory that cannot be written, or with a ``file`` or ``others`` that no plan wrote."""
    refuse_foreign(
        folder, "run_dir", others, record=file, is_ours=lambda plan: plan["made_by"] == MADE_BY, maker="the planner"
    )


_COLORS = ("#35506f", "#5f86b3", "#9fbbd8", "#d59f3c", "#0c7a56", "#7cc0a2", "#b4532a", "#c9a227", "#7a6a8f")
"""Color of each kind of memory."""


def in_words(prediction: Prediction) -> list[str]:
    largest = "" if prediction.size is None else f" of the size {prediction.size}, the largest of data.buckets"
    lines = [
        f"plan for {prediction.mesh.world} ranks: nothing is loaded, trained or sent",
        f"mesh: {prediction.mesh}; {prediction.tokens} tokens a sample{largest}",
        "GiB a rank, the largest of each kind in any phase:",
        f"  {'':<8}" + "".join(f"{kind:>17}" for kind in KINDS),
    ]
    lines += [
        f"  {role:<8}" + "".join(f"{x:>17.3f}" for x in prediction.role_gib(role).values()) for role in prediction.roles
    ]
    lines.append("GiB a rank at the peak of each phase, and its largest contents:")
    for name, peak in sorted(prediction.peaks.items(), key=lambda item: -item[1].bytes):
        largest = sorted(peak.by.items(), key=lambda item: -item[1])[:3]
        words = ", ".join(f"{role} {kind} {size / GIB:.3f}" for (role, kind), size in largest)
        lines.append(f"  {peak.bytes / GIB:8.3f}  {_label(name)}: {words}")
    lines.append(
        f"allocated in training {prediction.allocated_gib:.3f} GiB; with fragmentation, CUDA's context and NCCL, which"
        f" are assumed, {prediction.device_gib:.2f} GiB in {_label(prediction.peak_phase)}"
    )
    if prediction.host_gib:
        lines.append(
            f"host memory {prediction.host_gib:.3f} GiB a rank: {prediction.offloaded_gib:.3f} for offloaded tensors,"
            f" {prediction.staging_gib:.3f} for the copy of a checkpoint that is being written"
        )
    look = " and a look of the guard, of which the samples count," if LOOK in prediction.shares else ""
    lines.append(
        f"a step of each role{look}: operations of all ranks, seconds by arithmetic, and the GiB that a rank sends:"
    )
    for name, step in prediction.simulation.steps.items():
        seconds = f", {prediction.seconds[name]:.3g} s" if name in prediction.seconds else ""
        sent = "".join(
            f", {kind} {group} {size / GIB:.3g}" for (kind, group), size in sorted(step.sent.items()) if size
        )
        operations = f"{step.flops * prediction.mesh.dp / 1e15:.3g} PFLOP"
        often = f"{prediction.shares[name]:.0%} of the steps"
        if name == LOOK:
            often = f"one in {1 / prediction.shares[name]:.3g} steps"
        lines.append(f"  {name:<8} {often}: {operations}{seconds}{sent}")
    return [*lines, verdict(prediction)]


def verdict(prediction: Prediction) -> str:
    """Return one or two sentences on whether the run fits and how long it takes."""
    hardware = prediction.hardware
    if hardware is None:
        names = ", ".join(hardware_names())
        return f"{prediction.device_gib:.1f} GiB of each device; set planning.hardware to see if it fits: {names}"
    fits = "fits" if prediction.fits else "does not fit"
    words = f"It {fits}: {prediction.device_gib:.1f} GiB of the {hardware.memory_gib:g} GiB of each {hardware.name}"
    seconds = prediction.seconds_per_step
    if seconds is None:
        return f"{words}; times are known for bf16 without offload=cpu."
    return (
        f"{words}; by arithmetic {seconds:.3g} s a step (MFU {prediction.mfu:.2f}, products at {hardware.sustained:g}"
        f" of {hardware.bf16_tflops:g} TFLOPS, which is assumed), {prediction.steps} steps in"
        f" {seconds * prediction.steps / 86400:.3g} days and {prediction.gpu_hours:,.0f} GPU-hours."
    )


def page(prediction: Prediction, command: str) -> str:
    """Return the HTML page: a picture of the memory, and the lines of :func:`in_words`. It loads nothing."""
    *lines, last = in_words(prediction)
    picture = data_uri(_picture(prediction), "svg+xml")
    title = "Predicted needs of this run"
    return render("plan.html.j2", title=title, picture=picture, command=command, verdict=last, lines=lines)


def _picture(prediction: Prediction) -> bytes:
    """Draw the memory of each phase by kind, with a line at the device's memory for tensors, as SVG."""
    names = [_label(name) for name in prediction.peaks]

    def draw(axes: Axes) -> None:
        left = np.zeros(len(names))
        for kind, color in zip(KINDS, _COLORS, strict=True):
            sizes = [
                sum(size for (_, k), size in peak.by.items() if k == kind) / GIB for peak in prediction.peaks.values()
            ]
            axes.barh(names, sizes, left=left, color=color, label=kind)
            left += sizes
        if prediction.hardware is not None:
            usable = (prediction.hardware.memory_gib - CONTEXT_GIB - prediction.nccl_gib) / (1 + FRAGMENTATION)
            axes.axvline(usable, color="#c22f3d", ls="--", label=f"limit of {prediction.hardware.name}")
        axes.invert_yaxis()
        axes.set_title("GiB allocated at the peak of each phase")

    return svg(draw, size=(9.6, 1.5 + 0.3 * len(names)))


def _label(phase: str) -> str:
    return phase or "between phases"
