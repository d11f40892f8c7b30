"""Checks of a run's checkpoints before data and networks are built: what it resumes, and the disk space it needs."""

import json
import logging
import math
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distill.config import Config
from distill.config.kinds import RENAMED
from distill.config.schema import SETTINGS
from distill.methods import METHODS
from distill.run.setup import RunPlan
from fsdp_cp.checkpoint.folder import find_resume, read_state, saved_steps
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from models.files.checkpoint_files import defining, fingerprint, fingerprint_of
from models.roles.role import trained_names
from models.roles.role_plan import RolePlan

log = logging.getLogger(__name__)

BY_CONTENT = ("teacher.checkpoint", "student.checkpoint", "fake.checkpoint", "data.path", "data.encoders")
"""Settings that name files. A resumed run needs files with the same contents; their paths may differ."""
_OF_A_START = {"run_dir", "dry_run", "plan", "world"}
"""Settings that may differ between starts of a run, and are not compared."""
_OF_TRAINING = ("batch_size", "expert_draws", "precision", "method.", "optim.")
"""Prefixes of settings that change the results of steps. ``seed`` and ``steps`` are compared by name."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Checked start of a run."""

    resume_from: Path | None
    """Folder of the checkpoint that the run resumes, if any."""
    step: int
    """Step of that checkpoint, or 0."""
    sources: dict[str, Any]
    """Result of :func:`check_resume`, for the run's checkpoints."""
    data: str
    """Number of items of the data set, and where they are."""
    space: str
    """Disk space for checkpoints."""


def check_start(config: Config, plan: RunPlan, resume: str) -> Start:
    """Check the data's table, the checkpoint to resume (``resume``), and the disk space. Rank 0 alone calls it."""
    # Check the table before the checkpoint: check_resume would report a faulty table as changed data.
    data = config.data.table_in_words()
    resume_from, step = find_resume(resume, plan.run_dir / "checkpoints"), 0
    sources = find_sources(config, plan.roles)
    if resume_from is not None:
        sources, step = check_resume(config, resume_from, plan.roles, sources), read_state(resume_from)["step"]
    space = check_disk(config, plan, config.steps - step, resume)
    return Start(resume_from=resume_from, step=step, sources=sources, data=data, space=space)


def find_sources(config: Config, roles: Iterable[RolePlan]) -> dict[str, Any]:
    """Return ``value`` and ``fingerprint`` (samples of weights, tables, sizes of clips) of each setting in
    :data:`BY_CONTENT`; ``None`` for an unused one."""
    values = _flat(asdict(config))
    for name in config.checkpoint.accept:
        if name not in BY_CONTENT and not (name.startswith("data.") and name in values):
            raise UserError(f"checkpoint.accept={name} must be {', '.join(BY_CONTENT)} or another data.* setting")
    fingerprints = config.data.fingerprints()
    for role in roles:
        base = role.name
        if role.lora is not None and role.lora.saved is not None:
            fingerprints[f"{role.name}.checkpoint"] = fingerprint_of([role.lora.saved.file])
            base = "teacher"
        settings = getattr(config, base)
        fingerprints[f"{base}.checkpoint"] = (
            " ".join([*map(fingerprint, role.folders), *map(str, role.boundaries)])
            if role.folders
            else json.dumps([settings.architecture, settings.boundary])
        )
    return {
        key: {"value": values.get(key), "fingerprint": fingerprints[key]} if key in fingerprints else None
        for key in BY_CONTENT
    }


def check_resume(
    config: Config, checkpoint: Path, roles: Iterable[RolePlan] = (), sources: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Compare the checkpoint's ``state.json`` with settings and trained ``roles``, and log the allowed changes. Return
    ``sources`` (:func:`find_sources`) for later checkpoints, with the former as ``earlier`` if accepted."""
    state = read_state(checkpoint)
    made = f"checkpoint.resume: {checkpoint} was made with"
    if state["step"] > config.steps:
        raise UserError(f"steps={config.steps} is below the step of {checkpoint}; use steps={state['step']} or more")
    instead = "use that, another run_dir, or checkpoint.resume=never"
    for setting, value in (("seed", config.seed), ("method", config.method.name)):
        if state[setting] != value:
            raise UserError(f"{made} {setting}={state[setting]}, not {value}; {instead}")
    for role in roles:
        if role.name in METHODS[config.method.name][0].trained_roles:
            _check_network(role, state, made, config.checkpoint.accept)
    before = {RENAMED.get(key, key): value for key, value in _flat(state["settings"]).items()}
    now = _flat(asdict(config))
    changed = [key for key in sorted(now.keys() & before.keys() - _OF_A_START) if before[key] != now[key]]
    sources, earlier = dict(sources or {}), state.get("sources", {})
    free = {f"data.{name}" for name in getattr(config.data, "free_on_resume", ())}
    other = _other_contents(earlier, sources)
    other |= {key for key in changed if key.startswith("data.")} - {*BY_CONTENT, *free}
    if refused := sorted(other - set(config.checkpoint.accept)):
        different = {key: f"{key}={before[key]}, not {now[key]}" for key in changed}
        values = [different.get(key, f"other contents of {key}={now[key]}") for key in refused]
        accept = ",".join(sorted({*refused, *config.checkpoint.accept}))
        instead = f"{instead}, or, to allow the change, checkpoint.accept=[{accept}]"
        raise UserError(f"{made} {'; '.join(values)}; {instead}")
    of_training = [key for key in changed if key.startswith(_OF_TRAINING) and key not in BY_CONTENT]
    done = state["step"] == config.steps
    if done and of_training:
        key = of_training[0]
        whole = f"{key}={now[key]}, but {checkpoint} has all steps={config.steps} of its run, made with {before[key]}"
        raise UserError(f"{whole}; {instead}, or more steps")
    if rank() == 0:
        for key in changed:
            level = logging.WARNING if key in of_training else logging.INFO
            log.log(level, "resumed with %s=%s, which was %s", key, now[key], before[key])
        for key in sorted(other.difference(changed)):
            log.warning("resumed with other contents of %s=%s", key, now[key])
        neutral = (None, False, 1.0, "auto", "own", "default", [], {})
        for key in sorted(before.keys() - now.keys()):
            if key.startswith((*_OF_TRAINING, "student.", "fake.")) and before[key] not in neutral:
                log.warning("%s had %s=%s, which this version does not have: not used", checkpoint, key, before[key])
        if unknown := [key for key in sources if key not in earlier]:
            log.warning("%s has no fingerprints of %s: not compared", checkpoint, ", ".join(unknown))
        if done:
            log.info("all %d steps are done; rewriting the final export, samples and report", config.steps)
    for key in other & sources.keys() & earlier.keys():
        sources[key] = {**(sources[key] or {}), "earlier": earlier[key], "since_step": state["step"]}
    return sources


def _other_contents(earlier: Mapping[str, Any], sources: Mapping[str, Any]) -> set[str]:
    """Return the settings whose files differ in content between ``earlier``, the checkpoint's, and ``sources``."""
    before, now = ({key: (used or {}).get("fingerprint") for key, used in side.items()} for side in (earlier, sources))
    other = {key for key in before.keys() & now.keys() if before[key] != now[key]}
    # A role that starts from the teacher's weights, then and now, changes with the teacher: report only the teacher.
    if "teacher.checkpoint" in other:
        for key in ("student.checkpoint", "fake.checkpoint"):
            if all(side.get(key) == side["teacher.checkpoint"] for side in (before, now)):
                other.discard(key)
    return other


def _check_network(role: RolePlan, state: Mapping[str, Any], made: str, accepted: Collection[str]) -> None:
    """Refuse a checkpoint in which a trained role has another configuration, other experts or other adapters."""
    name, config, adapters = role.name, defining(role.config), role.adapters or {}
    earlier = state.get("adapters", {}).get(name) or {}
    named = {"_class_name": role.family.class_name}  # checkpoints of earlier versions lack it
    compared: dict[str, tuple[Any, Any]] = {
        f"{name}.checkpoint or {name}.architecture": (named | defining(state["configs"].get(name, config)), config),
        f"{name}.boundary": (state.get("boundaries", {}).get(name, []), list(role.boundaries)),
        f"{name}.experts": (
            sorted(key for key in state["updates"] if key.partition(".")[0] == name),
            sorted(trained_names(name, role.boundaries, role.trained_experts)),
        ),
        f"{name}.causal": (
            {key: value for key, value in (state.get("causal", {}).get(name) or {}).items() if key != "frames"},
            asdict(role.causal) if role.causal is not None else {},
        ),
        f"{name}.lora.rank": (earlier.get("rank", 0), adapters.get("rank", 0)),
    }
    if earlier and adapters:
        alphas = (earlier["scale"] * earlier["rank"], adapters["scale"] * adapters["rank"])
        compared[f"{name}.lora.alpha"] = alphas
        compared[f"{name}.lora.targets"] = (earlier["targets"], adapters["targets"])
        if whole := earlier.get("train"):
            old = f"{name}.lora.train={whole}, which this version lacks"
            raise UserError(f"{made} {old}; resume with the version that made it, or use another run_dir")
        if not {"teacher.checkpoint", f"{name}.checkpoint"} & set(accepted):
            compared["teacher.checkpoint"] = (earlier["base"]["fingerprint"], adapters["base"]["fingerprint"])
    for setting, (before, now) in compared.items():
        if before != now:
            values = f"={before}, not {now}" if isinstance(now, int | float) else ""
            raise UserError(f"{made} another {setting}{values}; use the same, or another run_dir to start from scratch")


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings by dotted key. A setting that takes a mapping stays one entry."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        group = isinstance(value, dict) and not any(setting.is_mapping for setting in SETTINGS.get(key, ()))
        flat |= _flat(value, f"{key}.") if group else {key: value}
    return flat


def checkpoint_bytes(config: Config, plan: RunPlan) -> int:
    """Return the size of one checkpoint in bytes, over all ranks: weights, Adam moments and EMAs of trained roles."""
    total = 0
    for role in plan.roles:
        if role.name in plan.method.trained_roles:
            count = len(role.trained_experts) * sum(math.prod(shape) for shape in role.own_shapes.values())
            stored = 2 if role.sharding.master_dtype == "bf16" else 4
            copies = 2 if getattr(config, role.name).ema.enabled else 1
            total += count * (copies * stored + 8)  # AdamW has two fp32 moments
    return total


def check_disk(config: Config, plan: RunPlan, steps: int, resume: str) -> str:
    """Check that the disk has room for the checkpoints of the remaining ``steps``. Return the sizes as a sentence."""
    settings, folder = config.checkpoint, plan.run_dir.absolute() / "checkpoints"
    existing = len(saved_steps(folder)) if resume != "never" else 0
    new = (steps // settings.every if settings.every else 0) + int(settings.at_end and steps > 0)
    if settings.keep:
        kept_for_good = settings.every and settings.keep_every and math.lcm(settings.every, settings.keep_every)
        best = int(config.guard.every > 0 and config.guard.action == "keep")
        new = min(new, max(1, settings.keep + 1 - existing) + best + (steps // kept_for_good if kept_for_good else 0))
    size = checkpoint_bytes(config, plan)
    directory = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(directory).free
    if size * new > free:
        room = f"checkpoints need {_gigabytes(size * new)} but only {_gigabytes(free)} are free"
        raise UserError(f"run_dir={plan.run_dir}: {room}; use another disk or set checkpoint.keep=1")
    return (
        f"{_gigabytes(size)} a checkpoint, up to {new} more (checkpoint.keep={settings.keep},"
        f" every={settings.every}) next to {existing} in {folder}: {_gigabytes(size * new)} of {_gigabytes(free)}"
        " free"
    )


def _gigabytes(count: int) -> str:
    """Format bytes as decimal gigabytes, with three digits: ``1.5 GB``."""
    return f"{count / 1e9:.3g} GB" if count < 1e12 else f"{count / 1e9:,.0f} GB"
