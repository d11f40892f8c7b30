"""Make the trajectories that ``method=ode_regression`` trains on, with the settings of the training:

``torchrun --nproc-per-node N -m distill.trajectories experiment=NAME method.trajectories=FOLDER key=value ...``

Makes ``method.num_trajectories`` trajectories and keeps existing ones. Trajectory i uses the i-th caption of the data
set, and starts from the noise of ``seed`` and i.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from distill.config import Config, compose_config
from distill.config.usage import information
from distill.data import ClipDataset, condition_of
from distill.data.trajectories import TrajectoryFolder
from distill.methods.ode_regression import OdeRegression, trajectory, trajectory_settings
from distill.run.open import open_device, open_mesh
from distill.run.setup import plan_run
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.launch import end_process, exit_code, rank
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import all_gather_objects, on_all_ranks
from fsdp_cp.rng import StepRandom
from fsdp_cp.runtime.progress import log_to_console, progress
from models.roles.condition import has_image
from models.roles.role import Role

log = logging.getLogger(__name__)


class _TeacherAlone(OdeRegression):
    """Method with only the teacher, which makes the trajectories."""

    required_roles = ("teacher",)
    trained_roles = ()

    def first_role(self, step: int) -> str:
        return "teacher"

    @classmethod
    def check_files(cls, config: Any) -> None:
        """Check nothing: the files do not exist yet."""


def _write(folder: TrajectoryFolder, trajectories: Iterable[tuple[int, Tensor, Tensor, str]]) -> None:
    for entry in trajectories:
        folder.write(*entry)


def write_trajectories(
    config: Config, *, teacher: Role, data: ClipDataset, mesh: Mesh, device: torch.device, batch: int
) -> int:
    """Write the missing trajectories of ``config.method.num_trajectories``, and return their number. A collective.

    Args:
        config: a configuration with ``method=ode_regression``.
        teacher: the teacher.
        data: captions and their embeddings.
        mesh: the mesh, whose ``dp`` ranks share the trajectories.
        device: this rank's device.
        batch: number of trajectories per forward on a data-parallel rank.

    Raises:
        UserError: a folder that holds trajectories of other settings, or that cannot be written.
    """
    settings, folder = config.method, TrajectoryFolder(config.method.trajectories)
    about = trajectory_settings(config) | {"teacher.precision": config.teacher.precision, "seed": config.seed}
    if has_image(data.condition_shapes):
        about["data.fingerprint"] = data.fingerprint
    on_all_ranks(lambda: folder.begin(about) if rank() == 0 else None)
    shape = (len(settings.step_list), *data.latent_shape)
    # Use rank 0's list: all ranks must run the same number of forwards, but may not see a new file at the same moment.
    missing = all_gather_objects(folder.missing(settings.num_trajectories, shape) if rank() == 0 else None)[0]
    chunk = batch * mesh.dp_size
    with progress(len(missing), "trajectories", "trajectory") as advance:
        for start in range(0, len(missing), chunk):
            first = start + mesh.dp_rank * batch
            # Fill the last chunk by repeating its last trajectory, without writing the copies.
            numbers = [missing[min(i, len(missing) - 1)] for i in range(first, first + batch)]
            items = [data[i % len(data)] for i in numbers]
            random = StepRandom(seed=config.seed, step=0, positions=numbers, device=device)
            noise = random.normal("trajectories/noise", data.latent_shape)
            condition = condition_of(default_collate(items), data).to(device)
            states, latents = trajectory(teacher, noise, condition, settings)
            made = zip(numbers, states, latents, (item["caption"] for item in items), strict=True)
            written = islice(made, max(0, len(missing) - first) if mesh.cp_rank == 0 else 0)
            on_all_ranks(partial(_write, folder, written))
            advance(min(chunk, len(missing) - start))
    return len(missing)


def run(overrides: list[str]) -> None:
    """Compose and check the settings, build mesh, data and teacher, and write the trajectories."""
    config = compose_config(overrides)
    if config.method.name != "ode_regression":
        raise UserError(f"method={config.method.name} takes no trajectories; use method=ode_regression")
    if config.dry_run:
        raise UserError("dry_run=true is train.py's, and nothing here is left out by it; use train.py dry_run=true")
    for other in (config.student, config.fake):
        other.checkpoint = other.architecture = None  # else the plan warns that they are not used
    device = open_device(config)
    plan = plan_run(config, _TeacherAlone)
    with open_mesh(config, plan, device) as mesh:
        data = config.data.build(seed=config.seed, device=device, run_dir=plan.run_dir)
        roles = plan.build_roles(mesh=mesh, device=device, data=data, seed=config.seed)
        written = write_trajectories(
            config, teacher=roles["teacher"], data=data, mesh=mesh, device=device, batch=plan.micro_batch_size
        )
    total = config.method.num_trajectories
    log.info("%d trajectories in %s, %d of them made now", total, config.method.trajectories, written)


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return exit code 0, or 2 with one line for a user's mistake."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    log_to_console()

    @paths_of_the_user()
    def work() -> None:
        if (text := information(arguments)) is not None:  # --cfg job
            print(text)
            return
        run(arguments)

    return exit_code(work)


if __name__ == "__main__":
    end_process(main())
