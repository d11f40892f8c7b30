"""Export of a role's weights from a run or its checkpoint, as a diffusers folder or as an adapter file.

Run ``python -m models.export RUN OUT`` in one process. It writes what the run would export, with the scheduler in
``OUT/scheduler``. OUT is a new or empty folder, or an earlier export. The new export replaces an earlier one when
complete. Any other folder is refused and not changed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from diffusers import SchedulerMixin
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_cp.checkpoint.folder import find_checkpoint, read_state, readable, reader
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, one_line, paths_of_the_user, shown
from fsdp_cp.files.atomic_folder import description, refuse_input, refuse_occupied
from fsdp_cp.launch import exit_code
from models.additions.base import addition_tensors, named_additions
from models.additions.heads import Grid
from models.card import Base, Card, commit_of, extend_card, sample_clips, write_card
from models.causal import FILE as CAUSAL_FILE
from models.causal import NOTE as CAUSAL_NOTE
from models.export_folder import SCHEDULERS, write_folder
from models.export_heads import NOTE as HEADS_NOTE
from models.export_heads import fused_heads, without_heads
from models.families.base import Family
from models.families.registry import family_of
from models.files import fastvideo, originals, originals_ltx2
from models.files.checkpoint_files import ADDITIONS_FILE, EXPERT_FOLDERS, fingerprint, inspect_checkpoint, tensor_reader
from models.files.shipped import find_shipped
from models.lora import videox
from models.lora.contract import BASE, BASE_NAME, SAMPLING, sampling
from models.lora.files import FASTVIDEO, FORMATS, NAMES, file_tensors, write_file
from models.lora.files import NAME as LORA_NAME
from models.lora.merge import Weights, merged
from models.lora.saved import find_adapters
from models.owner import is_gate
from models.push import check_name, push
from models.roles.role import EXPERTS
from models.sparse import FILE as SPARSE_FILE
from models.sparse import NOTE as SPARSE_NOTE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OWN = {"wan": originals, "ltx2": originals_ltx2}
"""Formats of a whole network in the names of its family's own code: one file for ComfyUI, with ``config.json``."""
_ADDITIONS_NOTE = (
    "This network was trained with additions ({names}), which are in {file}. diffusers does not know them: a plain"
    " pipeline loads the network without them, which is not what was trained. python -m distill.sample has them."
)
_NO_CODE = (*OWN, fastvideo.KIND, "wan-lora", videox.KIND, FASTVIDEO)
"""Formats that diffusers' pipelines do not read as they stand."""
_EXPERT_NOTE = (
    "This is one of two experts, which makes no clip alone. Load it next to the other one: as `transformer` for high"
    " noise, as `transformer_2` for low noise (adapters with `load_into_transformer_2=True`)."
)
_FILE_NOTE = (
    "This file has the names of the original code. In ComfyUI use cfg 1, the sampler `{sampler}` and the times below as"
    " sigmas, followed by 0."
)
_GATES_NOTE = (
    "This file has adapters and whole gates of sparse attention, as FastVideo reads them. diffusers' loader takes no"
    " gates: `models.export --format merged` writes a folder that a pipeline can use."
)
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RoleExport:
    """Weights of a role in a run or in its checkpoint, and what an export needs to know of them."""

    family: Family
    config: dict[str, Any]
    boundaries: Sequence[float] = ()
    causal: Mapping[str, Any] | None = None
    sparse: Mapping[str, Any] | None = None
    scale: float | None = None
    """``alpha / rank`` of adapters; ``None`` for a role that trained its whole network."""
    trained: Mapping[int, Weights]
    """Weights of the networks that train, by position."""
    bases: Callable[[], Sequence[Weights]]
    """Function that returns what adapters are merged into, and an expert that does not train."""
    few_steps: Mapping[str, Any] | None = None
    """Arguments of :meth:`models.families.base.Family.schedulers`; ``None`` for a role without schedulers."""
    grid: Grid | None = None
    """Grid of a role with heads, ``None`` without."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run, for the card."""
    run_dir: Path | None = None
    """Directory of the run, whose record has the commit."""
    is_expert: bool = False
    """Whether this is one of two experts alone."""
    steps: int | None = None
    """Sampling steps to export a role with heads for; ``None`` for the most that it serves, next to all heads."""

    def at_steps(self, steps: int | None) -> RoleExport:
        """Return a role with heads for ``steps`` alone, if given."""
        if steps is None:
            return self
        if self.grid is None:
            raise UserError(f"--steps {steps} is for a student of method=pdd, which this one is not; leave it out")
        if steps not in self.grid.steps:
            raise UserError(f"--steps {steps} must be one that the student serves: {shown(self.grid.steps)}")
        few_steps = {**(self.few_steps or {}), "times": self.grid.few_steps(steps)}
        return replace(self, steps=steps, few_steps=few_steps)

    def expert(self, index: int) -> RoleExport:
        """Return one of two experts as a network of its own, which samples no clip alone."""
        trained, bases = {0: self.trained[index]}, lambda: [self.bases()[index]]
        return replace(self, boundaries=(), trained=trained, bases=bases, is_expert=True)

    @property
    def not_adapters(self) -> list[str]:
        """Names of the weights that an adapter file cannot hold. FastVideo's holds gates."""
        names = [name for weights in self.trained.values() for name in weights.shapes]
        return [name for name in names if ".lora_" not in name and not is_gate(name)]

    def schedulers(self, kind: str | None = None) -> dict[str, SchedulerMixin]:
        """Return the schedulers with which a plain diffusers pipeline samples the student, by folder. If none fits, log
        why, or refuse a ``kind`` of export that only a pipeline reads that takes no times."""
        if self.few_steps is None or self.is_expert:
            return {}
        try:
            return self.family.schedulers(**self.few_steps, listed=kind == fastvideo.KIND)
        except UserError as error:
            if not self.family.takes_times and kind != "wan-lora":
                hint = "; --format fastvideo lists the times for FastVideo"
                hint += "" if self.scale is None else ", --format wan-lora exports adapters for ComfyUI"
                raise UserError(f"{error}{hint}") from error
            log.warning("could not write a scheduler: %s", error)
            return {}

    def write(
        self,
        folder: Path,
        kind: str | None,
        *,
        dtype: torch.dtype,
        about: Mapping[str, Any],
        card: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Write the role as a diffusers folder, or as an adapter file of a ``kind`` of :data:`FORMATS`. A collective.

        A ``kind`` of :data:`OWN` writes one file in the names of the original code, ``fastvideo`` FastVideo's folder.
        ``folder``, ``about`` and ``options`` are as for :func:`models.export_folder.write_folder`. ``card`` has what
        :meth:`_write_card` takes.
        """
        about = {"dtype": str(dtype), **self._described(kind, about), **about}
        options = {"texts": {CAUSAL_FILE: self.causal, SPARSE_FILE: self.sparse}, **options}
        card = {"schedulers": options.get("schedulers") or {}, **(card or {})}
        options["finish"] = partial(self._write_card, kind, about, **card)
        if self.sparse is not None or self._additions:
            log.warning("%s has parts that a plain diffusers pipeline drops; see its README.md", folder)
        if kind in FORMATS:
            tensors, config = self._file(kind, dtype)
            options |= {"name": NAMES.get(kind, LORA_NAME), "config": config, "family": self.family.name}
            write_file(folder, tensors, about, **options)
            return
        networks, config = self._merged(), self.config
        if self.grid is not None:
            (network,), steps = networks, self.steps or self.grid.steps[-1]
            heads = fused_heads(network, self.family.last_layers(config), self.grid, steps)
            if self.steps == 1:
                networks = [without_heads(network, heads)]
            else:
                options["heads"] = heads
        if (code := OWN.get(kind or "")) is not None:
            (network,) = networks
            networks = [_renamed(network, code.own_names(network.shapes))]
            config = code.own_config(config)
            options |= {"max_bytes": 2**62, "schedulers": {}}
            options["header"] = {"config": json.dumps({"transformer": config})}
        if kind == fastvideo.KIND:
            options["in_pipeline"] = True
            if self.few_steps is not None:  # refuse what its file cannot hold
                self.family.contract(self.few_steps["times"], options["schedulers"], self.sparse)
        write_folder(folder, networks, config, dtype=dtype, about=about, boundaries=self.boundaries, **options)

    def _merged(self) -> list[Weights]:
        """Return the networks with the weights that trained in them; adapters are merged."""
        networks = list(self.bases())
        for i, weights in self.trained.items():
            networks[i] = merged(networks[i], weights, self.scale or 1.0)
        return networks

    def _described(self, kind: str | None, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the description of the export says of its format, of sampling, and of adapters."""
        described: dict[str, Any] = {} if kind not in (*FORMATS, *OWN) else {"format": kind}
        if found := sampling(self.few_steps, about.get("method")):
            described[SAMPLING] = found
        if kind in FORMATS:
            described |= self._adapters
            if (base := self._base(about, None)) is not None:
                described[BASE_NAME] = base.repository or base.name
        return described

    def _base(self, about: Mapping[str, Any], chosen: str | None) -> Base | None:
        """Return the network that the role started from, ``chosen`` by name; ``None`` if its settings do not say."""
        own, teacher = (
            (self.settings.get(name) or {}).get("checkpoint") for name in (about.get("role", "student"), "teacher")
        )
        with suppress(UserError):
            own = teacher if find_adapters(own) else own
        path = own or teacher
        return Base.of(path, chosen) if path else None

    @property
    def _adapters(self) -> dict[str, Any]:
        """Rank and alpha of the adapters."""
        shapes = [shape for weights in self.trained.values() for shape in weights.shapes.items()]
        rank = max((shape[0] for name, shape in shapes if name.endswith(".lora_A.weight")), default=0)
        return {"rank": rank, "alpha": cast(float, self.scale) * rank}

    @property
    def _additions(self) -> list[str]:
        """Names of additions to the exported network, other than heads."""
        names = {name for weights in self.trained.values() for name in named_additions(weights.shapes)}
        return [] if self.grid is not None else sorted(names)

    def _notes(self, kind: str | None) -> list[str]:
        """Return what the card says about diffusers' pipeline: what it needs, and what it lacks."""
        if kind in OWN or kind in ("wan-lora", videox.KIND):
            sampler = "lcm" if (self.few_steps or {}).get("stochastic") else "euler"
            return [_FILE_NOTE.format(sampler=sampler)]
        notes = [self.family.export_note] if self.family.export_note else []
        if kind == fastvideo.KIND:
            notes.append(fastvideo.NOTE)
        if self._has_heads(kind):
            assert self.grid is not None
            notes.append(HEADS_NOTE.format(steps=self.steps or self.grid.steps[-1]))
        if self._additions:
            notes.append(_ADDITIONS_NOTE.format(names=", ".join(self._additions), file=ADDITIONS_FILE))
        if self.is_expert:
            notes.append(_EXPERT_NOTE)
        parts = {CAUSAL_NOTE: self.causal, _GATES_NOTE if kind == FASTVIDEO else SPARSE_NOTE: self.sparse}
        return [*notes, *(note for note, contents in parts.items() if contents is not None)]

    def _has_heads(self, kind: str | None) -> bool:
        """Whether the export is a folder with a file of heads."""
        return self.grid is not None and self.steps != 1 and kind not in (*FORMATS, *_NO_CODE)

    def _write_card(
        self,
        kind: str | None,
        about: Mapping[str, Any],
        folder: Path,
        *,
        schedulers: Mapping[str, SchedulerMixin],
        place: str = "",
        clips: Sequence[Path] = (),
        table: str = "",
        base_model: str | None = None,
        **facts: Any,
    ) -> None:
        """Write the card into an unfinished export, and FastVideo's file. The ``schedulers`` are in ``place``, from the
        export's folder; ``facts`` are further fields of :class:`models.card.Card`."""
        drops = (self.causal, self.sparse, self._additions or None, self.is_expert or None)
        has_code = not any(part is not None for part in drops) and kind not in _NO_CODE
        made = Card(
            family=self.family,
            config=self.config,
            about=about,
            settings=self.settings,
            few_steps=self.few_steps,
            experts=EXPERT_FOLDERS if self.boundaries else (),
            adapters=self._adapters if kind in FORMATS else {},
            notes=self._notes(kind),
            has_code=has_code and (self.grid is None or kind not in FORMATS),
            has_heads=self._has_heads(kind),
            is_expert=self.is_expert,
            base=self._base(about, base_model),
            scheduler=f"{place}{SCHEDULERS[0]}" if schedulers else None,
            contract=self._write_contract(folder, schedulers),
            commit=None if self.run_dir is None else commit_of(self.run_dir),
            **facts,
        )
        write_card(folder, made.text())
        extend_card(folder, clips=clips, table=table)

    def _contract(self, schedulers: Mapping[str, SchedulerMixin]) -> dict[str, Any]:
        """Return the contents of FastVideo's file of times. A ``UserError`` says why the export has none."""
        if self.few_steps is None or (self.grid is not None and self.steps != 1):
            raise UserError("not a student with one list of times")
        _check_fastvideo(self, "the student")
        contract = self.family.contract(self.few_steps["times"], schedulers, self.sparse) if schedulers else {}
        if not contract:
            raise UserError("only students of MiniMax-H3 have it, with schedulers")
        return contract

    def _write_contract(self, folder: Path, schedulers: Mapping[str, SchedulerMixin]) -> str:
        """Write FastVideo's file of times where a student has one; say whether, for the card."""
        try:
            text = json.dumps(self._contract(schedulers), indent=2) + "\n"
        except UserError as error:
            return f"none: {error}"
        (folder / fastvideo.FILE).write_text(text)
        return "has the trained times"

    def _file(self, kind: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """Return the tensors of an adapter file of a ``kind`` of :data:`FORMATS`, and the configuration of heads."""
        (student,), scale, config = self.trained.values(), cast(float, self.scale), None
        whole: dict[str, Tensor] = {}
        if self.grid is not None:
            (base,), layers = self.bases(), self.family.last_layers(self.config)
            grid = self.grid if self.steps is None else replace(self.grid, steps=[self.steps])
            whole, config = videox.file_parts(student.shapes, student.read, base.read, layers, grid, scale)
            if kind == videox.KIND:
                return whole, config
            whole = videox.comfy_heads(whole, layers, self.family.original_name)
        adapters = [name for name in student.shapes if ".lora_" in name or is_gate(name)]
        return file_tensors(kind, adapters, student.read, family=self.family, scale=scale, dtype=dtype) | whole, config


def exported_weights(setting: str, has_average: bool) -> str:
    """Return ``raw`` or ``ema``: the weights that a run with this ``export.weights`` exports."""
    return "ema" if has_average and setting != "raw" else "raw"


def base_fingerprints(adapters: Mapping[str, Any] | None) -> list[str]:
    """Return the fingerprints of the networks under ``adapters``, as :attr:`RolePlan.adapters` describes them; none
    without files."""
    return [] if adapters is None else str(adapters["base"]["fingerprint"] or "").split()


def _trained(
    checkpoint: Path, role: str, boundaries: Sequence[float], chosen: str | None, setting: str
) -> tuple[dict[int, Weights], str]:
    """Return a role's ``chosen`` weights in a checkpoint (by default as ``export.weights=setting``), and ``raw`` or
    ``ema``."""
    files = reader(checkpoint)
    stored = files.read_metadata().state_dict_metadata
    names = [f"{role}.{expert}" for expert in EXPERTS] if boundaries else [role]
    has_average = any(key.startswith(f"{name}.ema.") for key in stored for name in names)
    weights = chosen or exported_weights(setting, has_average)

    def read(prefix: str, name: str) -> Tensor:
        key = prefix + name
        tensor = cast(TensorStorageMetadata, stored[key])  # all weights are tensors
        value = torch.empty(tensor.size, dtype=tensor.properties.dtype)
        with readable(checkpoint), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is intended
            dcp.load({key: value}, storage_reader=files, no_dist=True)
        return value

    trained = {}
    for i, name in enumerate(names):
        prefix = f"{name}.{'ema' if weights == 'ema' else 'weights'}."
        tensors = {key.removeprefix(prefix): tensor for key, tensor in stored.items() if key.startswith(prefix)}
        shapes = {key: tuple(cast(TensorStorageMetadata, tensor).size) for key, tensor in tensors.items()}
        if shapes:
            trained[i] = Weights(shapes, partial(read, prefix))
    if not trained:
        held = " and ".join(sorted({key.partition(".")[0] for key in stored} & {"student", "fake"}))
        raise UserError(f"{checkpoint} holds no {weights} weights of a role {role!r}; it has raw weights of {held}")
    return trained, weights


def export_checkpoint(checkpoint: Path, out: Path, options: argparse.Namespace) -> str:
    """Export a role of a training checkpoint by the command's ``options``, file by file; return a description."""
    role, kind, expert = options.role, options.format, options.expert
    refuse_occupied(out, "OUT")
    state = read_state(checkpoint)
    table = _table(options.evaluation, [out, checkpoint.resolve().parent.parent / "export" / "student"], state["step"])
    try:
        exported, about, dtype = _read_role(checkpoint, state, out, options)
        schedulers = exported.schedulers(kind)
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{checkpoint / 'state.json'} is damaged ({error!r}); use another checkpoint") from error
    name = f"the {role}"
    if exported.boundaries:
        _check_expert(exported, expert, kind, f"{checkpoint} holds the {role}'s experts")
        if expert is not None:
            exported, name = exported.expert(EXPERTS.index(expert)), f"the {role}'s expert for {expert} noise"
            about["expert"], schedulers = expert, {}
    _check_format(exported, kind, role, name)
    card = {"clips": _clips(exported, about), "base_model": options.base_model, "repository": options.push}
    card["table"] = table
    exported.write(out, kind, dtype=dtype, about=about, schedulers=schedulers, card=card)
    weights = about["weights"]
    if kind in FORMATS:
        return f"the {weights} adapters of {name}"
    return f"the {weights} weights of {name}{'' if exported.scale is None else ', merged into their base,'}"


def _table(evaluation: str | None, exports: Sequence[Path], step: int) -> str:
    """Return the table of a ``distill.evaluate`` of one of ``exports`` of this step; empty without ``evaluation``."""
    if evaluation is None:
        return ""
    folder = user_path(evaluation, "--evaluation")
    try:
        participants = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["participants"]
        table = (folder / "evaluation.md").read_text(encoding="utf-8").partition("\n\n")[0]
        evaluated = {participant["weights"] for participant in participants.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--evaluation {folder} is not a finished distill.evaluate ({one_line(error)})") from error
    made = (path for path in exports if path.is_dir() and description(path).get("step") == step)
    weights = (" ".join(map(fingerprint, inspect_checkpoint(str(path), "OUT").folders)) for path in made)
    if evaluated.isdisjoint(weights):
        places = " and ".join(str(path) for path in exports)
        raise UserError(f"--evaluation {folder} is not of step {step}; evaluate an export of it, in {places}")
    for name in participants:
        table = table.replace(f" {name} |", f" {Path(name).name} |", 1)
    return table


def _clips(exported: RoleExport, about: Mapping[str, Any]) -> list[Path]:
    """Return the run's sample clips of these weights, if there are any."""
    average = ((exported.settings.get("student") or {}).get("ema") or {}).get("enabled", False)
    if about["role"] != "student" or about["weights"] != ("ema" if average else "raw") or exported.is_expert:
        return []
    return sample_clips(cast(Path, exported.run_dir), about["step"])


def _renamed(network: Weights, names: Mapping[str, str]) -> Weights:
    """Return the weights of a network by other ``names``."""
    stored = {other: name for name, other in names.items()}
    shapes = {other: network.shapes[name] for other, name in stored.items()}
    return Weights(shapes, lambda other: network.read(stored[other]))


def _read_role(
    checkpoint: Path, state: Mapping[str, Any], out: Path, options: argparse.Namespace
) -> tuple[RoleExport, dict[str, Any], torch.dtype]:
    """Return a role of the checkpoint with this ``state.json``, what its export says about it, and the dtype."""
    role = options.role
    settings, boundaries = state.get("settings", {}), list(state.get("boundaries", {}).get(role) or ())
    as_the_run = {"weights": "auto", "dtype": "fp32", **settings.get("export", {})}
    trained, weights = _trained(checkpoint, role, boundaries, options.weights, as_the_run["weights"])
    adapters = state.get("adapters", {}).get(role)
    base = None if adapters is None else options.base or adapters["base"]["path"]
    _refuse_inputs(state.get("sources", {}), base, out)

    def bases() -> list[Weights]:
        if adapters is not None:
            return _bases(adapters["base"], role, options.base)
        # Without adapters every network that is exported trained, and none needs its base.
        any_network = next(iter(trained.values()))
        return [trained.get(i, any_network) for i in range(len(boundaries) + 1)]

    exported = RoleExport(
        family=family_of(settings.get(role, {}).get("family", "wan"), role),
        config=dict(state["configs"][role]),
        boundaries=boundaries,
        causal=state.get("causal", {}).get(role),
        sparse=state.get("sparse", {}).get(role),
        scale=None if adapters is None else adapters["scale"],
        trained=trained,
        bases=bases,
        few_steps=state.get("few_steps") if role == "student" else None,
        grid=Grid(**state["heads"]) if state.get("heads") and role == "student" else None,
        settings=settings,
        run_dir=checkpoint.resolve().parent.parent,
    )
    exported = exported.at_steps(options.steps)
    about = {"checkpoint": str(checkpoint.resolve()), "step": state["step"], "role": role, "weights": weights}
    about["method"] = settings.get("method")  # decides how the student is sampled
    if of_bases := base_fingerprints(adapters):
        about[BASE] = of_bases[0 if options.expert is None else EXPERTS.index(options.expert)]
    return exported, about, DTYPES[options.dtype or as_the_run["dtype"]]


def _check_expert(exported: RoleExport, expert: str | None, kind: str | None, holds: str) -> None:
    """Refuse an expert that did not train, and both experts where they did not both train or one file is written."""
    trained = [EXPERTS[i] for i in exported.trained]
    takes_both = len(trained) == len(EXPERTS) and kind not in (*FORMATS, *OWN)
    is_exported = takes_both if expert is None else expert in trained
    if not is_exported:
        advice = f"add --expert {' or '.join(trained)}, or take both from the run's export/student"
        raise UserError(f"{holds} for {' and '.join(trained)} noise; {advice}")


def _check_format(exported: RoleExport, kind: str | None, role: str, name: str) -> None:
    """Refuse a format that the role's family or its weights do not have."""
    if exported.sparse is not None and kind not in (None, "merged", fastvideo.KIND, FASTVIDEO):
        advice = f"use --format {fastvideo.KIND if exported.scale is None else FASTVIDEO}, or leave it out"
        raise UserError(f"--format {kind} has no gates of sparse attention, and the {role} has; {advice}")
    if kind in (*OWN, fastvideo.KIND):
        _check_whole(exported, kind, role, name)
    elif exported.scale is None and kind is not None:
        raise UserError(f"--format {kind} is for adapters, and the {role} trained its whole network; leave it out")
    if kind == videox.KIND and exported.grid is None:
        raise UserError(f"--format {kind} is for a student of method=pdd, and the {role} has no heads; leave it out")
    holds_heads = exported.grid is not None and kind not in ("diffusers-lora", FASTVIDEO)
    if kind in FORMATS and not holds_heads and (others := exported.not_adapters):
        raise UserError(f"{name} has {others[0]} too, which an adapter file cannot hold; use --format merged")


def _check_whole(exported: RoleExport, kind: str, role: str, name: str) -> None:
    """Refuse a format of whole networks that is another family's, or that the role's heads or additions do not fit."""
    families = fastvideo.FAMILIES if kind == fastvideo.KIND else (kind,)
    if exported.family.name not in families:
        wanted = f"--format {kind} is for {' and '.join(families)}"
        raise UserError(f"{wanted}, and the {role} is {exported.family.name}; leave it out")
    if exported.grid is not None and exported.steps != 1:
        raise UserError(f"--format {kind} has one last layer, and the {role} has heads; add --steps 1, or leave it out")
    if kind == fastvideo.KIND:
        _check_fastvideo(exported, name)


def _check_fastvideo(exported: RoleExport, name: str) -> None:
    """Refuse a role that FastVideo's networks cannot be: it would load without additions, and sparse in all blocks."""
    (weights, *_), sparse = exported.trained.values(), exported.sparse or {}
    added = next(iter(addition_tensors(weights.shapes)), None)
    if added is not None and exported.grid is None:
        raise UserError(f"--format {fastvideo.KIND} has no {added}, and {name} has; leave it out")
    if sparse.get("dense_layers"):
        raise UserError(f"--format {fastvideo.KIND} has no dense_layers, and {name} has some; leave it out")


def _refuse_inputs(sources: Mapping[str, Any], base: str | None, out: Path) -> None:
    """Refuse an ``out`` that would replace a file that the run was made from (its ``sources``), or its ``base``."""
    inputs = {f"the run's {key}": source["value"] for key, source in sources.items() if source is not None}
    for name, path in {**inputs, "the adapters' base": base}.items():
        # Check a pipeline's network folders too: one of them may be an earlier export.
        for place in (".", *EXPERT_FOLDERS) if path else ():
            refuse_input(out, "OUT", {name: find_shipped(path) / place})


def _bases(base: Mapping[str, Any], role: str, moved: str | None) -> list[Weights]:
    """Return the base of each network's adapters. Refuse one with other weights."""
    if base["path"] is None:
        raise UserError(f"the {role}'s base has random weights, which no file holds; take the run's export/student")
    path = moved or base["path"]
    inspected = inspect_checkpoint(path, "--base")
    if " ".join(map(fingerprint, inspected.folders)) != base["fingerprint"]:
        raise UserError(f"--base {path} has other weights than the {role}'s base {base['path']}; give that base")
    return [Weights(folder.shapes, tensor_reader(folder)) for folder in inspected.folders]


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0, or 2 after a one-line message for a user error."""
    parser = argparse.ArgumentParser(prog="python -m models.export", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("run", metavar="RUN", help="a run folder (its newest checkpoint is taken) or a step_* folder")
    add("out", metavar="OUT", help="the folder to write: new, empty, or an earlier export")
    marked = "best: the one that guard.action=keep marked"
    add("--checkpoint", choices=("newest", "best"), default="newest", help=marked)
    add("--role", default="student", choices=("student", "fake"))
    add("--weights", choices=("raw", "ema"), help="by default those that the run exports")
    add("--dtype", choices=tuple(DTYPES), help="by default that of the run's export")
    formats = (
        f"{', '.join(OWN)}: the whole network as one file in the names of the family's own code, for ComfyUI."
        " fastvideo: FastVideo's folder, with MiniMax-H3's times and sparse attention. Of a role with adapters:"
        " merged into its base, as a diffusers folder (the default), as a file for diffusers'"
        " load_lora_weights, or one with the keys of the original code, as ComfyUI and LightX2V read it;"
        f" {FASTVIDEO}: FastVideo's file, with the gates of sparse attention;"
        f" {videox.KIND}: of a student of method=pdd, VideoX-Fun's file"
    )
    add("--format", choices=("merged", *FORMATS, *OWN, fastvideo.KIND), help=formats)
    add(
        "--steps",
        type=int,
        help="of a student of method=pdd: its sampling steps, the most by default; 1: a plain folder",
    )
    add("--expert", choices=EXPERTS, help="of two experts one alone, as a network of its own; both by default")
    add("--push", metavar="NAME", help="upload OUT to the hub too, as owner/name; again: what is missing")
    add("--private", action="store_true", help="with --push: make a new repository private")
    add("--yes", action="store_true", help="with --push: replace files of the repository without a question")
    add("--evaluation", metavar="DIR", help="for the card: --out of a distill.evaluate of an export of this step")
    add("--base-model", metavar="NAME", help="name of the base on the hub for the card, where the run had a folder")
    add("--base", help="with --format merged: the folder of the base, where it has moved")
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")

    @paths_of_the_user()
    def work() -> None:
        if args.push is not None:
            check_name(args.push)
        elif args.private or args.yes:
            raise UserError("--private and --yes are for --push, which is not given; leave them out")
        out = user_path(args.out, "OUT")
        run = user_path(args.run, "RUN") if args.run else ""
        checkpoint = find_checkpoint(run, "RUN", best=args.checkpoint == "best")
        if args.base is not None:
            args.base = str(user_path(args.base, "--base"))
        print(f"{out}: {export_checkpoint(checkpoint, out, args)} in {checkpoint}")
        if args.push is not None:
            print(push(out, args.push, private=args.private, replace=args.yes))

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
