"""A run of ``train.py``, from composed settings to the end of the training."""

from __future__ import annotations

from datetime import timedelta

from distill.announce import announce
from distill.config import Config
from distill.dry_run import dry_run
from distill.finish import finish
from distill.loggers import log_in
from distill.mesh_check import check_meshes
from distill.planning.command import plan_command
from distill.planning.suggest import suggest_command
from distill.resume_checks import check_resume, find_sources
from distill.room import check_disk
from distill.run_folder import command_line, held_run_dir, recorded_end, refuse_foreign, resume_setting, start_run
from distill.setup import device_of, plan_run
from distill.trainer import build_trainer
from fsdp_cp.checkpoint import find_resume, published_steps, read_state, refuse_overtaken
from fsdp_cp.launch import choose_allocator, choose_threads, process_group, rank, refuse_separate_worlds
from fsdp_cp.mesh import mesh_of_shape
from fsdp_cp.reduce import on_all_ranks
from fsdp_cp.signals import StopSignal


def run(config: Config, overrides: list[str], stop: StopSignal) -> None:
    """Check the settings, build mesh, data and roles, and train.

    Args:
        config: the composed settings.
        overrides: words of the command line that ``config`` is composed of.
        stop: the signal that ends the run early.
    """
    if config.plan == "suggest":
        return suggest_command(config, overrides)
    if config.plan:
        return plan_command(config, command_line(overrides))
    refuse_separate_worlds()
    device = device_of(config)
    choose_allocator(device, config.cuda_allocator)  # the checks below may start CUDA, and with it the allocator
    plan = plan_run(config)  # whatever can be refused is refused here, before anything is built
    refuse_foreign(plan.run_dir)
    if config.dry_run:
        return dry_run(config, plan)
    log_in(config.log)
    offloaded = [role.name for role in plan.roles if role.sharding.offload == "cpu"]
    choose_threads(device, host_optimizer=any(name in plan.method.trained_roles for name in offloaded))
    with process_group(device, timeout=timedelta(minutes=config.timeout.start)):
        # Before the resume, which would refuse a faulty table as other data, or as nothing to train.
        on_all_ranks(lambda: config.data.table_in_words() if rank() == 0 else None)
        checkpoints = plan.run_dir / "checkpoints"
        resume, there = resume_setting(config, plan.run_dir), published_steps(checkpoints)
        resume_from = find_resume(resume, checkpoints)
        mesh = mesh_of_shape(plan.mesh, device_type=device.type)
        sources = on_all_ranks(lambda: find_sources(config, plan.roles) if rank() == 0 else None)[0]
        if resume_from is not None:
            sources = check_resume(config, resume_from, plan.roles, sources)
        steps = config.steps - (read_state(resume_from)["step"] if resume_from else 0)
        on_all_ranks(lambda: check_disk(config, plan, steps, resume) if rank() == 0 else None)
        with held_run_dir(plan.run_dir):
            refuse_overtaken(there, checkpoints)
            where = {"device": device, "run_dir": plan.run_dir}
            data = config.data.build(
                seed=config.seed, captions=config.sample.captions, images=config.sample.images, **where
            )
            checked = {}
            if config.log.mesh_check and resume_from is None:
                checked = check_meshes(config, plan, device=device, data=data)
            trainer = build_trainer(config, plan, mesh=mesh, device=device, data=data)
            trainer.sources = sources
            if checked:
                trainer.facts["first steps on two meshes"] = checked
            if resume_from is not None:
                trainer.resume(resume_from)
            start_run(config, plan.run_dir, resume_from=resume_from, step=trainer.step, command=command_line(overrides))
            with recorded_end(plan.run_dir), trainer.reported_hangs():
                announce(trainer)
                trainer.train(stop)
                finish(trainer)
                trainer.close()
