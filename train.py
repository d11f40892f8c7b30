"""Distil a video diffusion transformer: ``torchrun --nproc-per-node N train.py experiment=NAME key=value ...``.

The training itself is distill/run.py.
"""

from __future__ import annotations

import sys

from distill.config import compose_config
from distill.config.usage import information
from fsdp_cp.error_file import recorded
from fsdp_cp.launch import end_process, exit_code
from fsdp_cp.signals import StopSignal, end_with_torchrun


@recorded  # torchrun's summary ends with the traceback of what is no user's mistake
def main(arguments: list[str]) -> int:
    """Exit code 0; 2 with one line for a user's mistake; 75 for a run that a signal stopped and that can go on."""
    if {"-m", "--multirun"} & set(arguments):
        from distill.sweep.command import main as sweep

        return sweep(arguments)

    def work() -> None:
        if (text := information(arguments)) is not None:  # --help, --cfg job
            print(text)
            return
        end_with_torchrun()
        with StopSignal() as stop:
            config = compose_config(arguments)
            # Imported once the settings are right: FSDP, diffusers and peft take most of a start.
            from distill.run import run
            from distill.run_folder import run_log

            with run_log():
                run(config, arguments, stop)

    return exit_code(work)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
