"""Distill a video diffusion transformer: ``torchrun --nproc-per-node N train.py experiment=NAME key=value ...``."""

import sys

from distill.config import compose_config
from distill.config.usage import information
from fsdp_cp.launch import end_process, exit_code, recorded
from fsdp_cp.runtime.signals import StopSignal, end_with_torchrun


def train(arguments: list[str], stop: StopSignal) -> None:
    """Compose the settings, plan the run, build it on the mesh, and train. ``stop`` ends the run early."""
    config = compose_config(arguments)
    # Import these after the settings are checked: FSDP, diffusers and peft take most of the startup time.
    from distill.run.folder import command_line, recorded_stop, refuse_foreign_run, run_log
    from distill.run.hub_names import resolve_hub_names
    from distill.run.open import dry_run, open_device, open_run
    from distill.run.setup import plan_run
    from distill.train.export import check_export
    from distill.train.trainer import build_trainer

    with run_log(), recorded_stop(config):
        resolve_hub_names(config)
        if config.plan == "suggest":
            from distill.planning.suggest import suggest_command

            return suggest_command(config, arguments)
        if config.plan:
            from distill.planning.command import plan_command

            return plan_command(config, command_line(arguments))
        device = open_device(config)
        plan = plan_run(config)  # check as much as possible before anything is built
        check_export(config, plan)
        refuse_foreign_run(plan.run_dir)
        if config.dry_run:
            return dry_run(config, plan)
        with open_run(config, plan, device=device, arguments=arguments) as run:
            shown = {"captions": config.sample.captions, "images": config.sample.images}
            data = config.data.build(seed=config.seed, device=device, run_dir=plan.run_dir, **shown)
            build_trainer(run, data).run(run, stop)


@recorded  # torchrun's summary then ends with the traceback, except for a user's mistake
def main(arguments: list[str]) -> int:
    """Run the command. Return exit code 0; 2 with one line for a user's mistake; 75 if a signal stopped the run."""
    if {"-m", "--multirun"} & set(arguments):
        from distill.sweep.command import main as sweep

        return sweep(arguments)

    def work() -> None:
        if (text := information(arguments)) is not None:  # --help, --cfg job
            return print(text)
        end_with_torchrun()
        with StopSignal() as stop:
            train(arguments, stop)

    return exit_code(work)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
