"""Distil a video diffusion transformer: ``torchrun --nproc-per-node N train.py experiment=NAME key=value ...``."""

from __future__ import annotations

import sys
from datetime import timedelta

from distill.config import compose_config
from distill.config.usage import information
from distill.dry_run import dry_run
from distill.methods import build_method
from distill.planning.command import plan_command
from distill.planning.own import announce_plan
from distill.planning.suggest import suggest_command
from distill.resume_checks import check_resume, find_sources
from distill.room import check_disk
from distill.run_folder import command_line, held_run_dir, refuse_foreign, resume_setting, run_log, start_run
from distill.run_status import recorded_end
from distill.setup import device_of, plan_run
from distill.sweep.command import main as sweep
from distill.sweep.torchrun import wants_sweep
from distill.trainer import Trainer
from fsdp_cp.checkpoint import find_resume, published_steps, read_state, refuse_overtaken
from fsdp_cp.error_file import recorded
from fsdp_cp.launch import choose_allocator, choose_threads, end_process, exit_code, process_group, rank
from fsdp_cp.mesh import mesh_of_shape
from fsdp_cp.reduce import on_all_ranks
from fsdp_cp.signals import StopSignal, end_with_torchrun
from models.load import build_roles


def run(overrides: list[str], stop: StopSignal) -> None:
    """Compose the settings, check them, build mesh, data and roles, and train."""
    config = compose_config(overrides)
    if config.plan == "suggest":
        return suggest_command(config, overrides)
    if config.plan:
        return plan_command(config, command_line(overrides))
    device = device_of(config)
    choose_allocator(device, config.cuda_allocator)  # the checks below may start CUDA, and with it the allocator
    plan = plan_run(config)  # whatever can be refused is refused here, before anything is built
    refuse_foreign(plan.run_dir)
    if config.dry_run:
        return dry_run(config, plan)
    offloaded = [role.name for role in plan.roles if role.sharding.offload == "cpu"]
    choose_threads(device, host_optimizer=any(name in plan.method.trained_roles for name in offloaded))
    with process_group(device, timeout=timedelta(minutes=config.timeout.start)):
        checkpoints = plan.run_dir / "checkpoints"
        resume, there = resume_setting(config, plan.run_dir), published_steps(checkpoints)
        resume_from = find_resume(resume, checkpoints, verify=config.checkpoint.verify)
        mesh = mesh_of_shape(plan.mesh, device_type=device.type)
        sources = on_all_ranks(lambda: find_sources(config, plan.roles) if rank() == 0 else None)[0]
        if resume_from is not None:
            sources = check_resume(config, resume_from, plan.roles, sources)
        steps = config.steps - (read_state(resume_from)["step"] if resume_from else 0)
        on_all_ranks(lambda: check_disk(config, plan, steps, resume) if rank() == 0 else None)
        with held_run_dir(plan.run_dir):
            refuse_overtaken(there, checkpoints)
            announce_plan(config, plan.run_dir, overrides, device)
            where = {"device": device, "run_dir": plan.run_dir}
            data = config.data.build(
                seed=config.seed, captions=config.sample.captions, images=config.sample.images, **where
            )
            roles = build_roles(
                plan.roles,
                trained=plan.method.trained_roles,
                mesh=mesh,
                device=device,
                latent_shape=data.latent_shape,
                condition_shapes=data.condition_shapes,
                seed=config.seed,
            )
            trainer = Trainer(
                config=config,
                mesh=mesh,
                device=device,
                data=data,
                method=build_method(config.method, roles),
                micro_batch_size=plan.micro_batch_size,
                run_dir=plan.run_dir,
            )
            trainer.sources = sources
            if resume_from is not None:
                trainer.resume(resume_from)
            start_run(config, plan.run_dir, resume_from=resume_from, step=trainer.step, command=command_line(overrides))
            with recorded_end(plan.run_dir):
                trainer.run(stop)


@recorded  # torchrun's summary ends with the traceback of what is no user's mistake
def main(arguments: list[str]) -> int:
    """Exit code 0; 2 with one line for a user's mistake; 75 for a run that a signal stopped and that can go on."""
    if wants_sweep(arguments):  # --multirun
        return sweep(arguments)

    def work() -> None:
        if (text := information(arguments)) is not None:  # --help, --cfg job
            print(text)
            return
        end_with_torchrun()
        with StopSignal() as stop, run_log():
            run(arguments, stop)

    return exit_code(work)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
