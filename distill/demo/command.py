"""Try a student in the browser: ``python -m distill.demo RUN|EXPORT [--teacher] [--cp N]``.

EXPORT is RUN/export/student or a folder of ``python -m models.export``; the run that it names must be there. gradio
(``pip install 'fsdp-cp[demo]'``) serves the page, to this machine alone unless ``--host``. Under
``torchrun --nproc-per-node N -m distill.demo`` all ranks sample, and rank 0 serves.
"""

import argparse
import logging
import socket
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from distill.demo.page import Page, import_gradio
from distill.demo.studio import Studio
from distill.evaluate.networks import RoleName, check_number, chosen_network, run_command, settings_of_run
from distill.run.open import open_device, open_mesh
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.files.atomic_folder import description
from fsdp_cp.launch import rank, recorded
from fsdp_cp.reduce import on_first_rank

log = logging.getLogger(__name__)


@paths_of_the_user()
def run_and_student(folder: Path) -> tuple[Path, Path | None]:
    """Return the run of ``folder``, and its student if ``folder`` is an export."""
    if (folder / "config.yaml").is_file() or not folder.is_dir():
        return folder, None
    about = description(folder)
    if about.get("role") != "student" or not {"run", "checkpoint"} & about.keys():
        raise UserError(f"{folder} is neither a run's folder (config.yaml) nor an export of its student; give one")
    run = Path(about["run"]) if "run" in about else Path(about["checkpoint"]).parents[1]
    for candidate in (run, *folder.resolve().parents[1:2]):  # a run may have moved with its export
        if (candidate / "config.yaml").is_file():
            return candidate, folder
    raise UserError(f"{folder} is an export of {run}, which has no config.yaml here; give the folder of its run")


def check_port(host: str, port: int) -> None:
    """Refuse an address that another program has, or that is not of this machine."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise UserError(f"--port {port} of {host} cannot be served ({error}); give another") from error


def demo(arguments: argparse.Namespace) -> None:
    """Serve the page until a signal. All ranks must call this."""
    check_number("--port", arguments.port, 1, 65535)
    run, student = run_and_student(user_path(arguments.folder, "RUN|EXPORT"))
    config = settings_of_run(run, arguments.device, arguments.cp)
    device = open_device(config)
    roles: list[RoleName] = ["student", "teacher"] if arguments.teacher else ["student"]
    networks = {role: chosen_network(config, role, student=student) for role in roles}
    with ExitStack() as stack, open_mesh(config, networks["student"].plan, device) as mesh:
        folder = on_first_rank(lambda: Path(stack.enter_context(TemporaryDirectory(prefix="fsdp_cp_demo_"))))
        on_first_rank(lambda: import_gradio(folder) and None)  # before anything is loaded
        on_first_rank(lambda: check_port(arguments.host, arguments.port))
        data = config.data.build(seed=config.seed, device=device, run_dir=run)
        studio = Studio(networks, data=data, mesh=mesh, device=device, folder=folder)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # gradio asks its own page
        # Deferred until the tabs have read why: torchrun sends a signal when a rank is lost.
        with studio.signal, studio.signal.deferred(), ExitStack() as served:
            if rank() == 0:
                page = Page(import_gradio(folder), studio, folder, f"{run.resolve().name}: try the student")
                log.info("the page is at %s; Ctrl-C ends it", page.launch(arguments.host, arguments.port))
                served.callback(page.close)
            studio.serve()


@recorded  # torchrun's summary then ends with the traceback, except for a user's mistake
def main(argv: list[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 with one line for a user's mistake; 75 after a signal."""
    parser = argparse.ArgumentParser(prog="python -m distill.demo", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", metavar="RUN|EXPORT", help="a run's folder, or an export of its student")
    add("--teacher", action="store_true", help="sample the teacher of the run too, from the same noise")
    add("--host", default="127.0.0.1", help="address to serve; 0.0.0.0 shows the page to the whole network")
    add("--port", type=int, default=7860)
    return run_command(parser, argv, demo)
