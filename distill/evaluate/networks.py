"""Networks to sample: exported students and teachers, with the settings that sample them."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from distill.config import Config, load_config
from distill.config.checks import check
from distill.config.trained_method import sampling_in_words, trained_method
from distill.data import ClipDataset
from distill.data.videos.table import read_captions
from distill.evaluate.sampling import plan_sampling
from distill.methods import Method, build_method
from distill.methods.common.few_step import FewStepSettings
from distill.run.setup import RunPlan
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.launch import rank
from fsdp_cp.mesh import Mesh

log = logging.getLogger(__name__)

_TEACHER_STEPS = 50
_MOST_STEPS = 10_000

RoleName = Literal["student", "teacher"]


@dataclass(frozen=True, kw_only=True)
class SampledNetwork:
    """Network that is sampled in ``steps`` steps as ``config.method`` says."""

    role: RoleName
    folder: Path
    config: Config
    steps: int
    plan: RunPlan

    def method(self, *, mesh: Mesh, device: torch.device, data: ClipDataset) -> Method:
        """Load the network on ``mesh``; return the method that samples it. A collective."""
        roles = self.plan.build_roles(mesh=mesh, device=device, data=data, seed=self.config.seed)
        return build_method(self.config.method, roles)


@paths_of_the_user()
def network_to_sample(config: Config, role: RoleName, folder: Path, steps: int) -> SampledNetwork:
    """Plan to sample the network in ``folder`` with the settings of its run.

    Raises:
        UserError: see :func:`distill.evaluate.sampling.plan_sampling`.
    """
    return SampledNetwork(
        role=role, folder=folder, config=config, steps=steps, plan=plan_sampling(config, role, folder)
    )


def settings_of_run(run_dir: Path, device: str | None = None) -> Config:
    """Return the configuration of a run, to sample its networks on ``device``; ``None`` for the run's.

    Raises:
        UserError: the folder is not a run's, or its settings do not fit this machine.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a folder; give a run's, with config.yaml and export/student in it")
    config = load_config(run_dir / "config.yaml")
    config.run_dir = str(run_dir)  # the run may have moved since
    config.world, config.dry_run = None, False
    config.sample.captions, config.sample.images = [], []  # the images of the training may be missing by now
    # A student trained on GPUs can be sampled on any device.
    config.device = device or ("auto" if config.device == "cuda" else config.device)
    check(config)
    return config


def exported_student(run_dir: Path) -> Path:
    """Return the folder of the student that a run exported."""
    folder = run_dir / "export" / "student"
    if not folder.is_dir():
        raise UserError(
            f"{run_dir} has no export/student: the run has not come to its end, or export.at_end=false; write one with"
            f" python -m models.export {run_dir} OUT, and give OUT"
        )
    return folder


def sampled_as(config: Config, student: Path, chosen: Literal["student", "run"] = "student") -> Config:
    """Return ``config`` with the method that samples ``student``: the one that trained it, or the run's.

    Raises:
        UserError: the student's own is chosen, and this version cannot read it.
    """
    try:
        own = trained_method(student)
    except UserError as error:
        if chosen == "student":
            raise UserError(f"{error}; give --sampling run") from error
        own = None
    if own is None:
        return config
    words = {"student": sampling_in_words(own), "run": sampling_in_words(config.method)}
    if words["student"] != words["run"] and rank() == 0:
        log.warning(
            "%s is a student of %s, and the run has %s; sampling as the %s says (--sampling)",
            student,
            words["student"],
            words["run"],
            chosen,
        )
    return replace(config, method=own) if chosen == "student" else config


def teacher_of(config: Config) -> str:
    """Return the checkpoint of the teacher that ``config`` distills."""
    if not isinstance(config.method, FewStepSettings) or config.teacher.checkpoint is None:
        raise UserError(f"method={config.method.name} has no teacher with a checkpoint to sample")
    return config.teacher.checkpoint


def checked_steps(config: Config, role: RoleName, steps: int | None, setting: str) -> int:
    """Return the number of sampling steps; by default, the most with which the run samples the role."""
    # A few-step student is trained only at the times of its own list.
    of_list = role == "student" and hasattr(config.method, "student_times")
    most = len(config.method.student_times()) if of_list else _MOST_STEPS
    sampled = config.sample.student_steps if role == "student" else config.sample.teacher_steps or [_TEACHER_STEPS]
    steps = min(most, max(sampled)) if steps is None else steps
    check_number(setting, steps, 1, most)
    return steps


def check_number(setting: str, value: int, least: int, most: float = math.inf) -> None:
    """Raise ``UserError`` unless ``value`` is within the bounds."""
    if not least <= value <= most:
        limit = "" if most == math.inf else f" and at most {most}"
        raise UserError(f"{setting} {value} must be at least {least}{limit}")


def read_prompts(text: str, setting: str) -> list[str]:
    """Return the prompts of a text, ``.csv`` or ``.jsonl`` file in their order, each once.

    Raises:
        UserError: a file that cannot be read, or an empty one.
    """
    path = user_path(text, setting)
    try:
        found = read_captions(path)
    except UserError as error:
        raise UserError(str(error).replace("data.path=", f"{setting} ")) from error
    prompts = list(dict.fromkeys(found))
    if len(prompts) < len(found) and rank() == 0:
        log.warning("%s: merged %d prompts that are there twice", path, len(found) - len(prompts))
    return prompts
