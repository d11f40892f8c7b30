"""Export of a run at its end."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from distill.config import Config
from distill.methods import Method
from distill.run.setup import RunPlan
from distill.train.optimizers import Trained
from fsdp_cp.errors import UserError
from fsdp_cp.files.atomic_folder import amended_folder, description, withdraw
from fsdp_cp.progress import first_rank_log
from fsdp_cp.reduce import on_first_rank
from models.additions.heads import Grid
from models.card import extend_card, sample_clips
from models.export import DTYPES, RoleExport, base_fingerprints, exported_weights
from models.export_folder import export_schedulers, sharded
from models.lora.contract import BASE, METHOD
from models.lora.files import FASTVIDEO
from models.roles.role import EXPERTS

log = first_rank_log(__name__)


def check_export(config: Config, plan: RunPlan) -> None:
    """Refuse a run before it trains if diffusers' pipeline could not sample what it exports at its end."""
    roles: dict[str, Any] = {role.name: role for role in plan.roles}
    student = roles.get("student")
    if student is None or student.family.takes_times or not config.export.at_end:
        return
    try:
        student.family.check_export(plan.shapes[0], plan.method(config.method, roles).few_steps or {})
    except UserError as error:
        hint = "with export.at_end=false it trains, but only adapters for ComfyUI or FastVideo's folder can be exported"
        raise UserError(f"{error}; {hint}") from error


def export_student(config: Config, method: Method, trained: Sequence[Trained], step: int) -> None:
    """Export the student, its ``trained`` networks, after ``step`` to ``export/``: weights, adapters, scheduler."""
    run_dir, role = Path(config.run_dir), method.roles["student"]
    has_average = trained[0].average is not None
    weights = exported_weights(config.export.weights, has_average)
    student = _student_weights(config, method, trained, averaged=weights == "ema")
    about: dict[str, Any] = {"run": str(run_dir.resolve()), "step": step, "role": "student", "weights": weights}
    about[METHOD] = asdict(config.method)
    schedulers = student.schedulers()
    card = {"schedulers": schedulers, "place": "../"}
    options: dict[str, Any] = {"dtype": DTYPES[config.export.dtype], "about": about, "move_aside": True, "card": card}
    student.write(run_dir / "export" / "student", "merged", **options)
    whole, of_bases = student.not_adapters, base_fingerprints(role.adapters)
    adapters = {} if role.adapters is None or whole else {network.name: network for network in trained}
    kind = "diffusers-lora" if role.sparse is None else FASTVIDEO
    for name, suffix in (("student", ""), *((f"student.{expert}", f"_{expert}") for expert in EXPERTS)):
        folder = run_dir / "export" / f"student_lora{suffix}"
        if name in adapters:
            of_expert = about | {BASE: of_bases[adapters[name].index]} if of_bases else about
            alone = student.expert(adapters[name].index) if student.boundaries else student
            alone.write(folder, kind, **options | {"about": of_expert})
        else:  # an earlier run in this directory may have left such a folder
            on_first_rank(partial(withdraw, folder))
    on_first_rank(lambda: export_schedulers(run_dir / "export", schedulers))
    if role.adapters is not None and whole:
        others = whole[0], len(whole) - 1
        log.info("skipped export/student_lora: an adapter file cannot hold %s and %d others", *others)
    if has_average and weights == "raw":
        log.info("export.weights=raw: exporting the raw student; samples and report use the average")
    merged = "" if role.adapters is None else ", merged into its base,"
    log.info("exported the student (%s weights)%s to %s", weights, merged, run_dir / "export/student")


def show_clips(run_dir: Path, step: int, *, averaged: bool) -> None:
    """Add the sample clips of the last ``step`` to the card of the run's export, if it has the weights that made them:
    ``averaged`` or raw. Rank 0 calls it."""
    folder, clips = run_dir / "export" / "student", sample_clips(run_dir, step)
    if clips and description(folder).get("weights") == ("ema" if averaged else "raw"):
        with amended_folder(folder) as unfinished:
            extend_card(unfinished, clips=clips)


def _student_weights(config: Config, method: Method, trained: Sequence[Trained], *, averaged: bool) -> RoleExport:
    """Return the student with its ``trained`` networks, or their averages."""
    role = method.roles["student"]
    role.rest()
    return RoleExport(
        family=role.family,
        config=role.config,
        boundaries=role.boundaries,
        causal=role.causal_file,
        sparse=role.sparse_file,
        scale=None if role.adapters is None else role.adapters["scale"],
        trained={network.index: sharded(network.weights(averaged=averaged)) for network in trained},
        bases=lambda: [sharded(network.base_parameters()) for network in role.networks],
        few_steps=method.few_steps,
        grid=None if method.heads is None else Grid(**method.heads),
        settings=asdict(config),
        run_dir=Path(config.run_dir),
    )
