"""Distil a video diffusion transformer: ``torchrun --nproc-per-node N train.py experiment=NAME key=value ...``."""

from __future__ import annotations

import logging
import sys
import time

from fsdp_cp.errors import UserError
from fsdp_cp.launch import choose_allocator, choose_device, local_rank, rank


def run(overrides: list[str]) -> None:
    """Compose the settings, check them, build mesh, data and roles, and train."""
    from distill.config import compose_config
    from distill.setup import check_resume, make_run_dir, plan_run, start_run

    config = compose_config(overrides)
    device = choose_device(config.device)
    choose_allocator(device, config.cuda_allocator)  # the checks below may start CUDA, and with it the allocator
    plan = plan_run(config)  # whatever can be refused is refused here, before anything is built

    from distill.data import build_dataset
    from distill.methods import build_method
    from distill.trainer import Trainer
    from fsdp_cp.checkpoint import find_resume
    from fsdp_cp.launch import process_group
    from fsdp_cp.mesh import build_mesh
    from models.load import build_roles

    with process_group(device):
        resume_from = find_resume(config.checkpoint.resume, plan.run_dir / "checkpoints")
        mesh = build_mesh(**plan.mesh_settings, heads=plan.heads, device_type=device.type)
        if resume_from is not None:
            check_resume(config, resume_from)
        make_run_dir(plan.run_dir)
        data = build_dataset(config.data, seed=config.seed, device=device, run_dir=plan.run_dir)
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
        start_run(config, plan.run_dir)
        trainer.run()


def main(arguments: list[str]) -> int:
    """Exit code 0, or 2 with one line for a user's mistake."""
    if {"-h", "--help"} & set(arguments):
        from distill.usage import usage

        print(usage())
        return 0
    logging.basicConfig(level=logging.INFO if rank() == 0 else logging.WARNING, format="%(message)s", stream=sys.stdout)
    try:
        run(arguments)
    except UserError as error:
        if local_rank() != 0:
            time.sleep(3)  # what all ranks refuse is said once: torchrun ends this one when the first has exited
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
