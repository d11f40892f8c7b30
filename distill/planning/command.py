"""``train.py plan=true``: what the run of these settings would hold, compute and send, told by one CPU process."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Sequence
from copy import deepcopy

import torch

from distill.config import Config
from distill.methods import METHODS
from distill.planning.coding import coding_peaks
from distill.planning.depth import simulate_any_depth
from distill.planning.files import FILE, PAGE, PICTURE, make_writable, refuse_foreign, settings_digest, write
from distill.planning.hardware import load_hardware
from distill.planning.prediction import Prediction, predict
from distill.planning.watched import Shapes
from distill.planning.words import in_words
from distill.setup import RunPlan, plan_run
from fsdp_cp.errors import UserError
from fsdp_cp.launch import world_size
from fsdp_cp.sharding.settings import ShardSettings
from models.checkpoint_files import defining
from models.families.base import config_of
from models.families.registry import family_of

log = logging.getLogger(__name__)

_OF_THE_GPU = ("compile", "communication_buffers", "fp8", "fp8_gather")
"""Settings of roles that a CPU has not, and that change nothing of what is simulated; pooled buffers it has."""


def plan_command(config: Config, command: Sequence[str]) -> None:
    """Print the plan and write ``plan.json``, ``plan.html`` and ``plan.png`` into ``RUN_DIR``.

    Args:
        config: the checked configuration.
        command: the words that started this process.

    Raises:
        UserError: what a run of these settings would refuse before it loads weights, but for settings that only a GPU
            has (kernels, compiled graphs, NCCL's communication buffers); torchrun around it; files of
            these names that no plan has written, or a folder that cannot be written.
    """
    require_plannable(config)
    digest = settings_digest(config)
    log_fp8(config)
    config = as_planned(config)
    shapes = planned_shapes(config)
    plan = plan_run(config, shapes=shapes)
    refuse_foreign(plan.run_dir)
    make_writable(plan.run_dir)
    prediction = make_prediction(config, plan, shapes, at_once=True)
    for line in in_words(config, prediction):
        log.info(line)
    from distill.planning.page import page, picture  # lazily: they load matplotlib

    described = prediction.as_json(config) | {"settings": digest}
    write(
        plan.run_dir,
        {
            FILE: lambda: (json.dumps(described, indent=1) + "\n").encode(),
            PAGE: lambda: page(config, prediction, shlex.join(command)).encode(),
            PICTURE: lambda: picture(prediction),
        },
    )
    log.info("written to %s, %s and %s", plan.run_dir / FILE, PAGE, PICTURE)


def require_plannable(config: Config) -> None:
    """Refuse what cannot be planned, before anything is simulated.

    Raises:
        UserError: torchrun around the planning; hardware that is unknown.
    """
    if world_size() > 1:
        raise UserError(
            f"plan={str(config.plan).lower()} is one process; start it without torchrun, with world={world_size()}"
        )
    if config.planning.hardware is not None:
        load_hardware(config.planning.hardware)  # refused at once, not after minutes


def make_prediction(config: Config, plan: RunPlan, shapes: Shapes, *, at_once: bool = False) -> Prediction:
    """The prediction for a configuration of :func:`as_planned`; there must be no process group.

    Args:
        config, plan, shapes: of the run.
        at_once: use a second process where that is quicker, which imports the main module again.
    """
    hardware = None if config.planning.hardware is None else load_hardware(config.planning.hardware)
    simulation = simulate_any_depth(config, plan, shapes, stands_for="cuda", at_once=at_once)
    coding = coding_peaks(config, shapes)
    return predict(config, plan, simulation, plan.roles[0].tokens(*shapes), hardware, coding)


def log_fp8(config: Config) -> None:
    """Say which roles are planned without the fp8 that a run of ``config`` gives them, and what that means."""
    names = METHODS[config.method.name][0].roles_needed(config.method)
    chosen = [name for name in names if getattr(config, name).fp8 != "none"]
    if chosen:
        log.warning(
            "%s: planned as without fp8: rates of fp8 products are not known here, so times are of bf16 ones, longer"
            " than the run's; gathers are counted in the dtype of compute, also under fp8_gather",
            ", ".join(f"{name}.fp8={getattr(config, name).fp8}" for name in chosen),
        )


def as_planned(config: Config) -> Config:
    """``config`` for one CPU process: published networks where none is named, and nothing that needs a GPU.

    Raises:
        UserError: a published network that the family has not.
    """
    config = deepcopy(config)
    config.device, config.attention.backend, config.log.wandb = "cpu", "auto", False
    default = ShardSettings()
    for name in METHODS[config.method.name][0].roles_needed(config.method):
        role = getattr(config, name)
        for setting in _OF_THE_GPU:
            if getattr(role, setting) != "pooled":
                setattr(role, setting, getattr(default, setting))
        if role.checkpoint is None and role.architecture is None and config.planning.model is not None:
            published = family_of(role.family, name).published
            if config.planning.model not in published:
                raise UserError(
                    f"planning.model={config.planning.model} is no published network of {name}.family={role.family};"
                    f" use {' or '.join(sorted(published)) or f'{name}.architecture'}"
                )
            role.architecture = dict(published[config.planning.model])
            role.boundary = family_of(role.family, name).published_boundaries.get(config.planning.model)
    return config


def planned_shapes(config: Config) -> Shapes:
    """Shapes of a sample's latents and condition; without ``data.encoders``, of the family's published VAE.

    Raises:
        UserError: as of the data.
    """
    student = config.student
    if getattr(config.data, "encoders", "") is not None or student.architecture is None:
        return config.data.sample_shapes()
    family = family_of(student.family, "student")
    family.check_keys(student.architecture, "student.architecture")
    with torch.device("meta"):  # what the architecture leaves open, the network's class fills in
        network = defining(config_of(family.build(dict(student.architecture), "student.architecture")))
    latents = family.latents_for(network, config.data.num_frames, config.data.height, config.data.width)
    shapes = family.condition_shapes(network, latents, config.data.max_text_tokens)
    # As the data give it, so that what does not go together is refused as in a run.
    shapes["text"] = (config.data.max_text_tokens, *shapes["text"][1:])
    if config.data.image is None:
        return latents, {name: shape for name, shape in shapes.items() if not name.startswith("image_")}
    if optional := family.optional_shapes(network, latents):
        return latents, shapes | optional
    return latents, {"image_latents": latents, **shapes}
