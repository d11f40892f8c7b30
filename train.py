"""Distil a video diffusion transformer: ``torchrun --nproc-per-node N train.py experiment=NAME key=value ...``."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import record

from distill.config import compose_config
from distill.data import build_dataset
from distill.dry_run import dry_run
from distill.methods import build_method
from distill.run_folder import command_line, held_run_dir, refuse_foreign, run_log, start_run
from distill.setup import check_resume, plan_run
from distill.trainer import Trainer
from distill.usage import information
from fsdp_cp.checkpoint import find_resume
from fsdp_cp.launch import choose_allocator, choose_device, exit_code, process_group
from fsdp_cp.mesh import build_mesh
from models.load import build_roles


def run(overrides: list[str]) -> None:
    """Compose the settings, check them, build mesh, data and roles, and train."""
    config = compose_config(overrides)
    device = choose_device(config.device)
    choose_allocator(device, config.cuda_allocator)  # the checks below may start CUDA, and with it the allocator
    plan = plan_run(config)  # whatever can be refused is refused here, before anything is built
    refuse_foreign(plan.run_dir)
    if config.dry_run:
        return dry_run(config, plan)
    with process_group(device):
        resume_from = find_resume(config.checkpoint.resume, plan.run_dir / "checkpoints")
        mesh = build_mesh(**plan.mesh_settings, heads=plan.heads, device_type=device.type)
        if resume_from is not None:
            check_resume(config, resume_from, plan.roles)
        with held_run_dir(plan.run_dir):
            where = {"device": device, "run_dir": plan.run_dir}
            data = build_dataset(config.data, seed=config.seed, captions=config.sample.captions, **where)
            roles = build_roles(
                plan.roles,
                trained=plan.method.trained_roles,
                mesh=mesh,
                device=device,
                latent_shape=data.latent_shape,
                text_shape=data.text_shape,
                seed=config.seed,
            )
            trainer = Trainer(
                config=config,
                mesh=mesh,
                device=device,
                data=data,
                method=build_method(config.method, roles),
                micro=plan.micro,
                run_dir=plan.run_dir,
                resume_from=resume_from,
            )
            start_run(config, plan.run_dir, resume_from=resume_from, step=trainer.step, command=command_line(overrides))
            trainer.run()


@record  # torchrun's summary ends with the traceback of what is no user's mistake
def main(arguments: list[str]) -> int:
    """Exit code 0, or 2 with one line for a user's mistake."""

    def work() -> None:
        if (text := information(arguments)) is not None:  # --help, --cfg job
            print(text)
            return
        with run_log():
            run(arguments)

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
