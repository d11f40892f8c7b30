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
from fsdp_cp.progress import first_rank_log
from models.files.checkpoint_files import defining, fingerprint, fingerprint_of
from models.roles.role import trained_names
from models.roles.role_plan import RolePlan

log = first_rank_log(__name__)

BY_CONTENT = ("teacher.checkpoint", "student.checkpoint", "fake.checkpoint", "data.path", "data.encoders")
_TRAINING_ADAPTER = "student.training_adapter"
BY_CONTENT += (_TRAINING_ADAPTER,)
"""Settings that name files. A resumed run needs files with the same contents; their paths may differ."""
_OF_A_START = {"run_dir", "dry_run", "plan", "world"}
"""Settings that may differ between starts of a run, and are not compared."""
_OF_TRAINING = ("batch_size", "expert_draws", "precision", "method.", "optim.")
_OF_ROLES = ("sparse_attention.", "ema.", "precision", "master_dtype", "reduce_dtype", "fp8")
_OF_TRAINING += tuple(f"{role}.{key}" for role in ("teacher", "student", "fake") for key in _OF_ROLES)
"""Prefixes of settings that change the results of steps. ``seed`` and ``steps`` are compared by name."""
_NEUTRAL = (None, False, 1.0, "auto", "own", "default", [], {})
"""Values of settings without effect: a removed setting that had one changes nothing."""
_INSTEAD = "use that, another run_dir, or checkpoint.resume=never"


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
        if role.training is not None and role.training.saved is not None:
            fingerprints[_TRAINING_ADAPTER] = fingerprint_of([role.training.saved.file])
        if role.folders:
            found = " ".join([*map(fingerprint, role.folders), *map(str, role.boundaries)])
        else:
            settings = getattr(config, base)
            found = json.dumps([settings.architecture, settings.boundary])
        fingerprints[f"{base}.checkpoint"] = found
    return {
        key: {"value": values.get(key), "fingerprint": fingerprints[key]} if key in fingerprints else None
        for key in BY_CONTENT
    }


def check_resume(
    config: Config, checkpoint: Path, roles: Iterable[RolePlan] = (), sources: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Compare the checkpoint's ``state.json`` with settings and trained ``roles``, and log the allowed changes. Return
    ``sources`` (:func:`find_sources`) for later checkpoints, with the former as ``earlier`` if accepted."""
    state, sources = read_state(checkpoint), dict(sources or {})
    made = f"checkpoint.resume: {checkpoint} was made with"
    _check_identity(config, state, checkpoint, made)
    for role in roles:
        if role.name in METHODS[config.method.name][0].trained_roles:
            _check_network(role, state, made, config.checkpoint.accept)
    changes = _Changes.between(config, state, sources)
    _refuse_other_data(config, changes, made)
    if state["step"] == config.steps:
        _refuse_other_training(config, changes, checkpoint)
    changes.log(checkpoint)
    if state["step"] == config.steps:
        log.info("all %d steps are done; rewriting the final export, samples and report", config.steps)
    earlier = state.get("sources", {})
    for key in changes.of_data & sources.keys() & earlier.keys():
        sources[key] = {**(sources[key] or {}), "earlier": earlier[key], "since_step": state["step"]}
    return sources


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """Differences between a checkpoint and a run that resumes from it."""

    before: dict[str, Any]
    """Settings of the checkpoint by dotted key."""
    now: dict[str, Any]
    """Settings of the run."""
    keys: list[str]
    """Settings that both have, with other values."""
    of_data: set[str]
    """Settings with other contents, or of other data; a run resumes only if they are accepted."""
    unknown: list[str]
    """Settings that name files whose contents the checkpoint does not know."""

    @classmethod
    def between(cls, config: Config, state: Mapping[str, Any], sources: Mapping[str, Any]) -> "_Changes":
        before = {RENAMED.get(key, key): value for key, value in _flat(state["settings"]).items()}
        now = _flat(asdict(config))
        keys = [key for key in sorted(now.keys() & before.keys() - _OF_A_START) if before[key] != now[key]]
        earlier = dict(state.get("sources", {}))
        if _TRAINING_ADAPTER not in before:  # made by a version without the setting: it trained without one
            earlier[_TRAINING_ADAPTER] = None
        free = {f"data.{name}" for name in getattr(config.data, "free_on_resume", ())}
        other_data = {key for key in keys if key.startswith("data.")} - {*BY_CONTENT, *free}
        return cls(
            before=before,
            now=now,
            keys=keys,
            of_data=_other_contents(earlier, sources) | other_data,
            unknown=[key for key, used in sources.items() if used and key not in earlier],
        )

    @property
    def of_training(self) -> list[str]:
        """Changed settings that change the results of steps."""
        return [key for key in self.keys if key.startswith(_OF_TRAINING) and key not in BY_CONTENT]

    def log(self, checkpoint: Path) -> None:
        """Log the changes, and what cannot be compared."""
        before, now = self.before, self.now
        for key in self.keys:
            level = logging.WARNING if key in self.of_training else logging.INFO
            log.log(level, "resumed with %s=%s, which was %s", key, now[key], before[key])
        for key in sorted(self.of_data.difference(self.keys)):
            log.warning("resumed with other contents of %s=%s", key, now[key])
        for key in sorted(before.keys() - now.keys()):
            if key.startswith((*_OF_TRAINING, "student.", "fake.")) and before[key] not in _NEUTRAL:
                log.warning("%s had %s=%s, which this version does not have: not used", checkpoint, key, before[key])
        if self.unknown:
            log.warning("%s has no fingerprints of %s: not compared", checkpoint, ", ".join(self.unknown))


def _check_identity(config: Config, state: Mapping[str, Any], checkpoint: Path, made: str) -> None:
    """Refuse a checkpoint of another seed or method, or of more steps."""
    if state["step"] > config.steps:
        raise UserError(f"steps={config.steps} is below the step of {checkpoint}; use steps={state['step']} or more")
    for setting, value in (("seed", config.seed), ("method", config.method.name)):
        if state[setting] != value:
            raise UserError(f"{made} {setting}={state[setting]}, not {value}; {_INSTEAD}")


def _refuse_other_data(config: Config, changes: _Changes, made: str) -> None:
    """Refuse other data and other contents of files, except for those in ``checkpoint.accept``."""
    accepted = set(config.checkpoint.accept)
    refused = sorted(changes.of_data - accepted)
    if not refused:
        return
    before, now = changes.before, changes.now
    different = {key: f"{key}={before[key]}, not {now[key]}" for key in changes.keys}
    values = [different.get(key, f"other contents of {key}={now[key]}") for key in refused]
    accept = f"checkpoint.accept=[{','.join(sorted({*refused, *accepted}))}]"
    raise UserError(f"{made} {'; '.join(values)}; {_INSTEAD}, or, to allow the change, {accept}")


def _refuse_other_training(config: Config, changes: _Changes, checkpoint: Path) -> None:
    """Refuse settings of training that change when no step is left to train with them."""
    general_first = sorted(changes.of_training, key=lambda key: key.count("."))  # precision sets that of all roles
    for key in general_first[:1]:
        made = f"but {checkpoint} has all steps={config.steps} of its run, made with {changes.before[key]}"
        raise UserError(f"{key}={changes.now[key]}, {made}; {_INSTEAD}, or more steps")


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
    compared = _network_facts(role, state) | _adapter_facts(role, state, made, accepted)
    for setting, (before, now) in compared.items():
        if before != now:
            values = f"={before}, not {now}" if isinstance(now, int | float) else ""
            raise UserError(f"{made} another {setting}{values}; use the same, or another run_dir to start from scratch")


_Facts = dict[str, tuple[Any, Any]]
"""Values of the checkpoint and of the run, by setting."""


def _network_facts(role: RolePlan, state: Mapping[str, Any]) -> _Facts:
    name, config = role.name, defining(role.config)
    built = {"_class_name": role.family.class_name}  # checkpoints of earlier versions lack it
    built |= defining(state["configs"].get(name, config))
    trained = sorted(key for key in state["updates"] if key.partition(".")[0] == name)
    causal = dict(state.get("causal", {}).get(name) or {})
    causal.pop("frames", None)
    sparse = None if role.sparse is None else asdict(role.sparse.settings)
    return {
        f"{name}.checkpoint or {name}.architecture": (built, config),
        f"{name}.boundary": (state.get("boundaries", {}).get(name, []), list(role.boundaries)),
        f"{name}.experts": (trained, sorted(trained_names(name, role.boundaries, role.trained_experts))),
        f"{name}.causal": (causal, asdict(role.causal) if role.causal is not None else {}),
        f"{name}.sparse_attention.tile or .dense_layers": (_gates(state.get("sparse", {}).get(name)), _gates(sparse)),
    }


def _gates(sparse: Mapping[str, Any] | None) -> list[Any] | None:
    """Return what determines a sparse role's gates and tiles; its sparsity may change."""
    return None if sparse is None else [sparse["tile"], sparse["dense_layers"]]


def _adapter_facts(role: RolePlan, state: Mapping[str, Any], made: str, accepted: Collection[str]) -> _Facts:
    name, now = role.name, role.adapters or {}
    before = state.get("adapters", {}).get(name) or {}
    facts: _Facts = {f"{name}.lora.rank": (before.get("rank", 0), now.get("rank", 0))}
    if not (before and now):
        return facts
    facts[f"{name}.lora.alpha"] = (before["scale"] * before["rank"], now["scale"] * now["rank"])
    facts[f"{name}.lora.targets"] = (before["targets"], now["targets"])
    if whole := before.get("train"):
        old = f"{name}.lora.train={whole}, which this version lacks"
        raise UserError(f"{made} {old}; resume with the version that made it, or use another run_dir")
    if not {"teacher.checkpoint", f"{name}.checkpoint"} & set(accepted):
        facts["teacher.checkpoint"] = (before["base"]["fingerprint"], now["base"]["fingerprint"])
    return facts


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
