"""Does a checkpoint go on with this configuration? Asked before data and networks are built."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from distill.config import Config
from distill.methods import METHODS
from fsdp_cp.checkpoint import read_state
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.sharding.settings import ShardSettings
from models.checkpoint_files import defining, fingerprint, fingerprint_of
from models.role import Role, trained_names
from models.role_plan import RolePlan

log = logging.getLogger(__name__)


def boundaries_of(roles: Iterable[Role | RolePlan]) -> dict[str, list[float]]:
    """Of the roles that are experts, the times between them, as JSON gives them back."""
    return {role.name: list(role.boundaries) for role in roles if role.boundaries}


BY_CONTENT = (
    "teacher.checkpoint",
    "student.checkpoint",
    "fake.checkpoint",
    "data.path",
    "data.encoders",
    "method.trajectories",
)
"""Settings that name files: a resumed run needs the same contents, wherever they lie."""


def find_sources(config: Config, roles: Iterable[RolePlan]) -> dict[str, Any]:
    """Return what the settings of :data:`BY_CONTENT` name, by setting: ``value`` and ``fingerprint``, or ``None``.

    Reads samples of the weights, tables whole, and of clips the sizes.

    Raises:
        UserError: an entry of ``checkpoint.accept`` that is not a setting of files or data; a table or a folder that
            cannot be read.
    """
    values = _flat(asdict(config))
    for name in config.checkpoint.accept:
        if name not in BY_CONTENT and not (name.startswith("data.") and name in values):
            raise UserError(
                f"checkpoint.accept={name} must be one of {', '.join(BY_CONTENT)}, or another data.* setting"
            )
    found = METHODS[config.method.name][0].fingerprints(config.method)
    if config.data is not None:
        found |= config.data.fingerprints()
    roles = list(roles)
    weights = {path: fingerprint(folder) for path, folder in {f.path: f for r in roles for f in r.folders}.items()}
    for role in roles:
        saved = role.lora.saved if role.lora is not None else None
        if saved is not None:
            found[f"{role.name}.checkpoint"] = fingerprint_of([saved.file])
        of_base = "teacher" if saved is not None else role.name
        given = getattr(config, of_base)
        found[f"{of_base}.checkpoint"] = (
            " ".join([*(weights[folder.path] for folder in role.folders), *map(str, role.boundaries)])
            if role.folders
            else json.dumps([given.architecture, given.boundary])
        )
    return {key: {"value": values.get(key), "fingerprint": found[key]} if key in found else None for key in BY_CONTENT}


def accepts_other_data(config: Config) -> bool:
    """Whether ``checkpoint.accept`` allows other items than those of the checkpoint."""
    return any(name.startswith(("data.", "method.")) for name in config.checkpoint.accept)


def check_resume(
    config: Config, checkpoint: Path, roles: Iterable[RolePlan] = (), sources: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Compare ``state.json`` with the settings before data and networks are built; log what has changed otherwise.

    Args:
        config: of the run.
        checkpoint: a ``step_*`` folder.
        roles: the run's; those that train must have the checkpoint's networks.
        sources: from :func:`find_sources`.

    Returns:
        ``sources``, for the checkpoints to come. One that differs and was accepted has the former as ``earlier``.

    Raises:
        UserError: another seed or method, other networks, files or data, or fewer steps than the checkpoint has; or a
            changed setting where no step is left to be trained with it.
    """
    state = read_state(checkpoint)
    for kind, keys in (
        (int, ("seed", "samples")),
        (str, ("method", "data")),
        (dict, ("settings", "configs", "updates", "skipped", "unlogged")),
        (float, ("seconds",)),
    ):
        for key in keys:
            if not isinstance(state.get(key), kind):
                raise UserError(
                    f"checkpoint.resume: {checkpoint}/state.json is damaged (its {key} is {state.get(key)!r}); use an"
                    " earlier checkpoint"
                )
    for key in ("boundaries", "sources"):  # which earlier versions have not
        if not isinstance(state.get(key, {}), dict):
            raise UserError(
                f"checkpoint.resume: {checkpoint}/state.json is damaged (its {key} is {state[key]!r}); use an earlier"
                " checkpoint"
            )
    if state["step"] > config.steps:
        raise UserError(f"steps={config.steps}, but {checkpoint} is further; use steps={state['step']} or more")
    for setting, now in (("seed", config.seed), ("method", config.method.name)):
        if state[setting] != now:
            raise UserError(
                f"checkpoint.resume: {checkpoint} was made with {setting}={state[setting]}, not {now};"
                " use that, another run_dir, or checkpoint.resume=never"
            )
    trained = METHODS[config.method.name][0].trained_roles  # a frozen one is in no checkpoint
    for role in (role for role in roles if role.name in trained):
        before = state["configs"].get(role.name)  # of a role that trains
        named = {"_class_name": role.family.class_name}  # which checkpoints of earlier versions leave out
        if before is not None and (not isinstance(before, dict) or named | defining(before) != defining(role.config)):
            raise UserError(
                f"checkpoint.resume: {checkpoint} was made with another network of the {role.name}; use the same"
                f" {role.name}.checkpoint or {role.name}.architecture, or begin anew with another run_dir"
            )
        names = trained_names(role.name, role.boundaries, role.trained_experts)
        earlier = sorted(name for name in state["updates"] if name.partition(".")[0] == role.name)
        if role.boundaries and state.get("boundaries", {}).get(role.name) and earlier != sorted(names):
            raise UserError(
                f"checkpoint.resume: {checkpoint} has what trains {' and '.join(earlier)}, and this run is to train"
                f" {' and '.join(names)}; use the same {role.name}.experts, or begin anew with another run_dir"
            )
        now = list(role.boundaries)
        if (earlier := state.get("boundaries", {}).get(role.name, [])) != now:
            said = [", ".join(f"{b:g}" for b in each) or "none" for each in (earlier, now)]
            raise UserError(
                f"checkpoint.resume: {checkpoint} was made with boundaries {said[0]} between the experts of the"
                f" {role.name}, not {said[1]}; use the same, or begin anew with another run_dir"
            )
        _check_adapters(role, state, checkpoint, config.checkpoint.accept)
    # Checkpoints of earlier versions lack settings that are new; of this one a run had what is now the default.
    before = {"expert_draws": Config.expert_draws} | _flat(state["settings"])
    now = _flat(asdict(config))
    changed = [key for key in sorted(now.keys() & before.keys() - _OF_A_START) if before[key] != now[key]]
    sources, earlier = dict(sources or {}), state.get("sources", {})
    known = sources.keys() & earlier.keys()
    other = {key for key in known if _content(earlier[key]) != _content(sources[key])}
    free = {f"data.{name}" for name in config.data.free_on_resume} if config.data is not None else set()
    other |= {key for key in changed if key.startswith("data.") and key not in {*BY_CONTENT, *free}}
    # Roles that begin at the teacher's weights, then and now, follow its setting.
    follow = {
        key
        for key in other & {"student.checkpoint", "fake.checkpoint"} & known
        if all(_content(each[key]) == _content(each.get("teacher.checkpoint")) for each in (earlier, sources))
    }
    refused = sorted(other - follow - set(config.checkpoint.accept))
    if refused:
        values = [
            f"{key}={before.get(key)}, not {now[key]}"
            if before.get(key) != now[key]
            else f"other contents of {key}={now[key]}"
            for key in refused
        ]
        raise UserError(
            f"checkpoint.resume: {checkpoint} was made with {'; '.join(values)}; use that, another run_dir,"
            " checkpoint.resume=never, or, if the change is meant,"
            f" checkpoint.accept=[{','.join(sorted({*refused, *config.checkpoint.accept}))}]"
        )
    moved = known - other  # the same contents in another place
    of_result = [key for key in changed if key not in moved and _changes_result(key)]
    if state["step"] == config.steps and of_result:
        key = of_result[0]
        raise UserError(
            f"{key}={now[key]}, but {checkpoint} has all steps={config.steps} of its run and was made with"
            f" {before[key]}: nothing would be trained; use another run_dir, checkpoint.resume=never, more steps,"
            f" or {key}={before[key]}"
        )
    if rank() == 0:
        for key in changed:
            level = logging.WARNING if key in of_result else logging.INFO
            log.log(level, "resumed with %s=%s, which was %s", key, now[key], before[key])
        for key in sorted(other - set(changed)):
            log.warning("resumed with other contents of %s=%s", key, now[key])
        if unknown := [key for key in sources if key not in earlier]:
            log.warning("%s has no fingerprints of %s: not compared", checkpoint, ", ".join(unknown))
        if state["step"] == config.steps:
            log.info("all %d steps are trained: what a run writes at its end is written again", config.steps)
    for key in other & known:
        sources[key] = {**(sources[key] or {}), "earlier": earlier[key], "since_step": state["step"]}
    return sources


def _content(source: Mapping[str, Any] | None) -> str | None:
    return source.get("fingerprint") if source else None


def _check_adapters(role: RolePlan, state: Mapping[str, Any], checkpoint: Path, accepted: Collection[str]) -> None:
    """Are the checkpoint's adapters of ``role`` those of the run, on the same base?

    Raises:
        UserError: naming what differs.
    """
    saved, now = state.get("adapters", {}), role.adapters
    before = saved.get(role.name) if isinstance(saved, dict) else None
    ranks = [each["rank"] if each else 0 for each in (before, now)]
    where = f"checkpoint.resume: {checkpoint} was made"
    instead = "or begin anew with another run_dir"
    if ranks[0] != ranks[1]:
        raise UserError(f"{where} with {role.name}.lora.rank={ranks[0]}, not {ranks[1]}; use that, {instead}")
    if before is None or now is None:
        return
    if before["scale"] != now["scale"]:
        alphas = [f"{role.name}.lora.alpha={each['scale'] * each['rank']:g}" for each in (before, now)]
        raise UserError(f"{where} with {alphas[0]}, not {alphas[1]}; use that, {instead}")
    for key in ("targets", "train"):
        if before[key] != now[key]:
            raise UserError(
                f"{where} with {len(before[key])} modules by {role.name}.lora.{key}, and these settings name others,"
                f" {len(now[key])}; use the same, {instead}"
            )
    if {"teacher.checkpoint", f"{role.name}.checkpoint"} & set(accepted):
        return
    if before["base"]["fingerprint"] != now["base"]["fingerprint"]:
        raise UserError(
            f"{where} on another base than {now['base']['path']} (it was {before['base']['path']}), without which"
            f" adapters mean nothing; give that as teacher.checkpoint, {instead}"
        )


_SAME_RESULT = {
    "cache",
    *(
        item.name
        for item in fields(ShardSettings)
        if item.name
        not in ("precision", "fp8", "fp8_gather", "reduce_dtype", "master_dtype", "gradient_scale", "reduce_unused")
    ),
}
"""Last parts of settings that say where things are held and when they move, not what comes out."""


_OF_A_START = {"run_dir", "dry_run", "plan", "world"}
"""Settings of a start rather than of its run: they are not compared."""
_OF_THE_RESULT = {"batch_size", "expert_draws", "precision", "method", "optim", "data", "teacher", "student", "fake"}
"""First parts of settings that change what a run computes. ``seed`` and ``steps`` are compared apart."""


def _changes_result(key: str) -> bool:
    return key.partition(".")[0] in _OF_THE_RESULT and key.rpartition(".")[2] not in _SAME_RESULT


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key. Dictionaries that are one setting's value stay whole."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        group = isinstance(value, dict) and key not in ("architecture", "lr_scale")
        flat |= _flat(value, f"{prefix}{key}.") if group else {f"{prefix}{key}": value}
    return flat
