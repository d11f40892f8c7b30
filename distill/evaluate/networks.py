"""Networks to sample: exported students and teachers, with the settings that sample them."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from distill.config import Config, load_config
from distill.config.checks import check
from distill.config.schema import (
    AttentionSettings,
    ExportSettings,
    GuardSettings,
    LogSettings,
    MeshSettings,
    ProfileSettings,
)
from distill.config.trained_method import sampling_in_words, trained_method
from distill.data.base import IMAGES, ClipDataset, ClipSettings, placed_image
from distill.data.videos.table import read_captions, read_images
from distill.evaluate.sampling import TEACHER_STEPS, ClipSampler, alone
from distill.methods import METHODS, build_method
from distill.methods.common.few_step import FewStepSettings
from distill.run.hub_names import resolve_hub_names
from distill.run.setup import RunPlan, plan_run
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.launch import exit_code, world_size
from fsdp_cp.mesh import Mesh
from fsdp_cp.progress import first_rank_log, log_to_console
from models.additions.base import named_additions
from models.files.checkpoint_files import ADDITIONS_FILE
from models.lora.contract import read_contract
from models.lora.saved import find_adapters
from models.sample import VIDEO, PartShapes

log = first_rank_log(__name__)

MOST_STEPS = 10_000
MOST_SEED = 2**63 - 1

RoleName = Literal["student", "teacher"]


@dataclass(frozen=True, kw_only=True)
class SampledNetwork:
    """Network that is sampled in ``steps`` steps as ``config.method`` says."""

    role: RoleName
    config: Config
    folder: Path
    steps: int
    plan: RunPlan

    def loaded(self, *, mesh: Mesh, device: torch.device, data: ClipDataset) -> ClipSampler:
        """Load the network on ``mesh``, to make clips of ``data``. A collective."""
        roles = self.plan.build_roles(mesh=mesh, device=device, data=data, seed=self.config.seed)
        return ClipSampler(method=build_method(self.config.method, roles), mesh=mesh, device=device, data=data)

    def shapes(self, frames: int, setting: str) -> PartShapes:
        """Return the shapes of the latents of a clip of ``frames``, if a causal student can make it."""
        config, (_, condition), (student,) = self.config, self.plan.shapes, self.plan.roles
        if student.causal is None:
            raise UserError(f"{setting} {frames} is for a causal student, and this one is not; leave it out")
        try:
            one_size = {"buckets": None} if isinstance(config.data, ClipSettings) else {}
            shapes = replace(config.data, **one_size, num_frames=frames).sample_shapes()[0]
            student.causal.chunks(shapes[VIDEO][1], "student.causal.")
            if student.causal.window is None:
                student.tokens(shapes, condition)  # refuses more frames than the network has positions
        except UserError as error:
            raise UserError(f"{setting} {frames}: {error}") from None
        return shapes


def network_to_sample(config: Config, role: RoleName, folder: Path, steps: int) -> SampledNetwork:
    """Plan to sample the network in ``folder``, the ``role`` of a finished run, on a mesh of ``mesh.cp``."""
    trained, name = getattr(config, role), config.method.name
    kept = {key: getattr(trained, key) for key in ("family", "causal", "strategy", "precision", "offload")}
    if role == "teacher":
        kept |= {key: getattr(trained, key) for key in ("config", "sparse_attention")}
    else:
        kept["config"] = None  # an export has its own, and its sparse.json
    if role == "student" and find_adapters(str(folder)):
        kept["experts"] = trained.experts  # the one that the adapters are of
    mesh = MeshSettings(cp=config.mesh.cp)
    of_training = {"batch_size": max(1, world_size() // max(1, mesh.cp)), "micro_batch_size": 1, "expert_draws": 1}
    alone_here = replace(
        config,
        **of_training,
        **{role: type(trained)(checkpoint=str(folder), **kept)},
        mesh=mesh,
        attention=AttentionSettings(),
        export=ExportSettings(at_end=False),
        log=LogSettings(),
        profile=ProfileSettings(),
    )
    plan = plan_run(alone_here, alone(METHODS[name][0], role))
    (planned,) = plan.roles
    if any(set(planned.additions) - named_additions(files.additions) for files in planned.folders):
        lacking = f"{folder} has no {ADDITIONS_FILE} with {', '.join(planned.additions)}"
        raise UserError(f"{lacking}, so method={name} did not train it as {role}; give a folder that has them")
    return SampledNetwork(role=role, config=config, folder=folder, steps=steps, plan=plan)


def run_command(parser: ArgumentParser, argv: list[str] | None, work: Callable[[Namespace], None]) -> int:
    """Run ``work`` on the arguments of a command that samples networks, with ``--cp`` and ``--device``. Return the exit
    code."""
    parser.add_argument(
        "--cp", type=int, default=1, help="ranks that share a clip's tokens, for clips too large for one GPU"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="the run's by default; auto for one that was on GPUs"
    )
    arguments = parser.parse_args(argv)
    log_to_console()
    return exit_code(lambda: work(arguments))


@paths_of_the_user()
def chosen_network(
    config: Config,
    role: RoleName,
    *,
    student: Path | None = None,
    sampling: Literal["student", "run"] = "student",
    steps: int | None = None,
    setting: str = "--steps",
) -> SampledNetwork:
    """Plan to sample a network of the run with ``config``: its teacher, or its exported student (other weights, if
    ``student`` is a folder), sampled as that or the run says, in ``steps``, which ``setting`` names."""
    if role == "teacher":
        teacher_of(config)  # refuses a run without one
    else:
        folder = exported_student(Path(config.run_dir)) if student is None else student
        config = sampled_as(config, folder, sampling)
    steps = checked_steps(config, role, steps, setting)
    if role == "student" and (trained := read_contract(find_adapters(str(folder))).get("steps")):
        if steps not in (getattr(config.method, "steps", None) or [trained]):
            log.warning("%s was trained for %d steps, and %s is %d", folder, trained, setting, steps)
    resolve_hub_names(config, ["teacher"] if role == "teacher" else [])
    return network_to_sample(config, role, Path(config.teacher.checkpoint) if role == "teacher" else folder, steps)


def settings_of_run(run_dir: Path, device: str | None, cp: int) -> Config:
    """Return the configuration of a run, to sample its networks on ``device``, ``None`` for the run's, with ``cp``."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a folder; give a run's, with config.yaml and export/student in it")
    config = load_config(run_dir / "config.yaml")
    config.run_dir = str(run_dir)  # the run may have moved since
    config.world, config.dry_run, config.mesh = None, False, MeshSettings(cp=cp)
    config.sample.captions, config.sample.images = [], []  # the images of the training may be missing by now
    config.guard = GuardSettings()
    # A student trained on GPUs can be sampled on any device.
    config.device = device or ("auto" if config.device == "cuda" else config.device)
    check(config)
    return config


def exported_student(run_dir: Path) -> Path:
    folder = run_dir / "export" / "student"
    if not folder.is_dir():
        reason = f"{run_dir} has no export/student: the run has not ended, or export.at_end=false"
        raise UserError(f"{reason}; write one with python -m models.export {run_dir} OUT, and give OUT")
    return folder


def sampled_as(config: Config, student: Path, chosen: Literal["student", "run"] = "student") -> Config:
    """Return ``config`` with the method that samples ``student``: the one that trained it, or the run's."""
    try:
        own = trained_method(student)
    except UserError as error:
        if chosen == "student":
            raise UserError(f"{error}; give --sampling run") from error
        own = None
    if own is None:
        return config
    words = {"student": sampling_in_words(own), "run": sampling_in_words(config.method)}
    if words["student"] != words["run"]:
        warning = "%s is a student of %s, and the run has %s; sampling as the %s says (--sampling)"
        log.warning(warning, student, *words.values(), chosen)
    return replace(config, method=own) if chosen == "student" else config


def teacher_of(config: Config) -> str:
    if not isinstance(config.method, FewStepSettings) or config.teacher.checkpoint is None:
        raise UserError(f"method={config.method.name} has no teacher with a checkpoint to sample")
    return config.teacher.checkpoint


def checked_steps(config: Config, role: RoleName, steps: int | None, setting: str) -> int:
    """Return the number of sampling steps; by default, the most with which the run samples the role."""
    # A few-step student is trained only at the times of its own list.
    of_list = role == "student" and hasattr(config.method, "student_times")
    most = len(config.method.student_times()) if of_list else MOST_STEPS
    sampled = config.sample.student_steps if role == "student" else config.sample.teacher_steps or [TEACHER_STEPS]
    steps = min(most, max(sampled)) if steps is None else steps
    check_number(setting, steps, 1, most)
    if role == "student":
        config.method.check_steps([steps], f"{setting} {steps}")
    return steps


def check_number(setting: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UserError(f"{setting} {value} must be at least {least} and at most {most}")


def read_prompts(text: str, setting: str) -> list[str]:
    """Return the prompts of a text, ``.csv`` or ``.jsonl`` file in their order, each once."""
    path = user_path(text, setting)
    found = read_captions(path, setting=f"{setting} ")
    prompts = list(dict.fromkeys(found))
    if len(prompts) < len(found):
        log.warning("%s: merged %d prompts that are there twice", path, len(found) - len(prompts))
    return prompts


def prompts_with_images(text: str, setting: str, image: str) -> tuple[list[str], list[str], list[str]]:
    """Return prompts, their captions and the images of all of them, one for each column of ``data.image``, from a
    ``.csv`` or ``.jsonl`` file, whose images are named from its folder. A caption may have several prompts: the names
    of those that follow its first tell their images."""
    path = user_path(text, setting)
    found = read_images(path, images=[*IMAGES[image]], setting=f"{setting} ")
    prompts: list[str] = []
    for files, caption in found:
        prompts.append(caption if caption not in prompts else f"{caption} ({' and '.join(files)})")
    if len(set(prompts)) < len(prompts):
        repeated = len(prompts) - len(set(prompts))
        raise UserError(f"{setting} {path}: {repeated} prompts are there twice, with the same images; make them differ")
    images = [placed_image(file, image, folder=path.parent) for files, _ in found for file in files]
    return prompts, [caption for _, caption in found], images
