"""Plan of an evaluation: its command line, checked before anything is sampled."""

import hashlib
import json
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from distill.config import Config, compose_config
from distill.config.trained_method import sampling_in_words
from distill.data.base import image_files
from distill.data.settings import CaptionsSettings, EncodedSettings, VideoFolderSettings
from distill.data.videos.references import with_files
from distill.evaluate.comparison import RESULT, SIZES, differing, read_evaluation
from distill.evaluate.measures import VERSION
from distill.evaluate.networks import (
    RoleName,
    SampledNetwork,
    check_number,
    chosen_network,
    exported_student,
    prompts_with_images,
    read_prompts,
    settings_of_run,
)
from distill.evaluate.perceptual import LPIPS_LEAST, Embedding, read_networks
from distill.evaluate.vbench import DIMENSIONS, read_extended, read_suite, seeds_of
from distill.methods.common.few_step import FewStepSettings
from distill.run.hub_names import resolve_hub_names
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, counted, paths_of_the_user
from fsdp_cp.files.foreign import refuse_foreign
from models.condition import REFERENCES
from models.files.checkpoint_files import fingerprint, fingerprint_of

BEGUN, PROMPTS = "evaluation_begun.json", "prompts.jsonl"
_WRITTEN = (RESULT, "evaluation.html", "evaluation.md", PROMPTS, "latents", "measures", "clips", "vbench")
_WRITTEN += ("vbench.json", "vbench.md")
_MOST_SEEDS = 1000

Suite = list[dict[str, Any]]
"""Entries of VBench."""


class Prompts(NamedTuple):
    """Prompts of an evaluation."""

    counts: dict[str, int]
    """Number of seeds of each prompt."""
    captions: list[str]
    """Text that is sampled for each prompt: itself, or its extended prompt."""
    images: list[str]
    """Images of all prompts, where images condition: one for each prompt, or two."""


@dataclass(frozen=True)
class Plan:
    """Checked evaluation."""

    out: Path
    config: Config
    """Settings of the data that all participants share."""
    networks: dict[str, SampledNetwork]
    counts: dict[str, int]
    captions: list[str]
    images: list[str]
    """Images of all prompts, as in :class:`Prompts`."""
    suite: Suite | None
    """Entries of VBench, if its suite is evaluated."""
    dimensions: list[str]
    """Dimensions of VBench to compute."""
    protocol: dict[str, Any]
    """Settings that two evaluations must share to be compared."""
    other: dict[str, Any]
    """Content of the evaluation that ``--like`` names; empty without one."""
    embeddings: dict[str, Embedding]
    """Networks of measures, by their names."""

    @property
    def prompts(self) -> list[str]:
        return list(self.counts)

    @property
    def teacher(self) -> str | None:
        """Name of the first teacher, from which distances are measured."""
        return next((name for name, network in self.networks.items() if network.role == "teacher"), None)

    def participants(self) -> dict[str, Any]:
        """Return the facts of the participants, which may differ between evaluations that are compared."""
        return {name: _facts(network) for name, network in self.networks.items()}

    @cached_property
    def record(self) -> dict[str, Any]:
        """Record of the evaluation: its protocol and its participants."""
        return {"protocol": self.protocol, "participants": self.participants()}

    def folder(self, kind: str, name: str) -> Path:
        number, words = list(self.networks).index(name), re.sub(r"[^A-Za-z0-9.-]+", "_", name)
        return self.out / kind / f"{number}_{words[-60:]}"

    def clip_file(self, name: str, prompt: int, seed: int) -> Path:
        return self.folder("clips", name) / f"{prompt:05d}-{seed}.mp4"

    def latents_file(self, name: str, prompt: int, seed: int) -> Path:
        return self.folder("latents", name) / f"{prompt:05d}-{seed}.safetensors"

    def clips_of(self, name: str) -> dict[tuple[str, int], Path]:
        """Return the file of each clip of a participant, by prompt and seed."""
        files = {}
        for i, (prompt, count) in enumerate(self.counts.items()):
            files |= {(prompt, seed): self.clip_file(name, i, seed) for seed in range(count)}
        return files


@paths_of_the_user()
def plan_evaluation(arguments: Namespace) -> Plan:
    """Check the command line without starting anything."""
    other = read_evaluation(user_path(arguments.like, "--like")) if arguments.like else {}
    _check_options(arguments, other)
    suite = _suite_of(arguments, other)
    words, config = _participants_and_settings(arguments)
    out = user_path(arguments.out, "--out").absolute()
    _use_prompts(config, out / PROMPTS)
    prompts = _prompts_of(arguments, suite, other, config.data.encoding().image)
    _check_captions(arguments, config, prompts.captions)
    if other:
        _repeat(arguments, config, other["protocol"])
    networks = _networks(words, config, arguments)
    measuring = read_networks(arguments.lpips, arguments.dino)
    _check_clips(arguments, config, prompts.images)
    protocol = _protocol(config, prompts, networks, "vbench" if suite else None)
    plan = Plan(
        out=out,
        config=config,
        networks=networks,
        **prompts._asdict(),
        suite=suite,
        dimensions=_dimensions(suite, arguments.dimensions) if suite else [],
        protocol=protocol | {name: files for name, (_, files) in measuring.items()},
        other=other,
        embeddings={name: embedding for name, (embedding, _) in measuring.items()},
    )
    return _continued(plan)


# ---------------------------------------------------------------- arguments


def _check_options(arguments: Namespace, other: Mapping[str, Any]) -> None:
    """Refuse options that do not go together."""
    has_own_prompts = bool(other) and not other.get("images")
    if arguments.prompts is None and not other or arguments.prompts is not None and has_own_prompts:
        raise UserError("give --prompts FILE, or --like OTHER/evaluation.json, which has prompts of its own")
    if arguments.suite and other:
        raise UserError("give --suite or --like: --like takes the suite of the other evaluation")
    if not (arguments.suite or other.get("suite")) and (arguments.vbench_python or arguments.dimensions):
        raise UserError("--vbench-python and --dimensions are for the suite of VBench; give --suite vbench")
    if arguments.extended and not arguments.suite:
        raise UserError("--extended is for --suite vbench; give extended prompts as --prompts otherwise")


def _suite_of(arguments: Namespace, other: Mapping[str, Any]) -> Suite | None:
    if arguments.suite:
        return read_suite(user_path(arguments.prompts, "--prompts"))
    return other.get("suite")


def _dimensions(suite: Suite, chosen: Sequence[str] | None) -> list[str]:
    have = {dimension for entry in suite for dimension in entry["dimension"]}
    return [name for name in DIMENSIONS if name in have & set(chosen or DIMENSIONS)]


def _path_and_steps(word: str) -> tuple[str, int | None]:
    path, _, count = word.rpartition("@")
    return (path, int(count)) if count.isdecimal() and path else (word, None)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _participants_and_settings(arguments: Namespace) -> tuple[list[str], Config]:
    """Return the words of WHAT that name participants, and the settings of the first run or of the other words."""
    # The folder of a run of a sweep may have "=" in its name.
    settings = [word for word in arguments.what if "=" in word and not Path(_path_and_steps(word)[0]).exists()]
    words = [word for word in arguments.what if word not in settings]
    run = next(filter(_is_run, (Path(_path_and_steps(word)[0]) for word in words)), None)
    if bool(settings) == bool(run):
        raise UserError("give the settings of one run: a run's folder among WHAT, or experiment=NAME key=value ...")
    if run is not None:
        return words, _resolved(settings_of_run(run, arguments.device, arguments.cp))
    config = _resolved(compose_config(settings))
    config.device, config.mesh.cp = arguments.device or config.device, arguments.cp
    return words, config


def _resolved(config: Config) -> Config:
    """Replace the hub names of teacher and encoders, in place, and return ``config``."""
    resolve_hub_names(config, ["teacher"] if config.teacher.checkpoint else [])
    return config


def _use_prompts(config: Config, file: Path) -> None:
    """Replace videos or an encoded set by the prompts: sampling needs no clip of the training."""
    if isinstance(config.data, VideoFolderSettings | EncodedSettings):
        values = asdict(config.data.encoding())
        known = {field.name for field in fields(CaptionsSettings)}
        kept = {name: value for name, value in values.items() if name in known}
        config.data = CaptionsSettings(**kept | {"path": str(file), "name": "captions", "buckets": None})


def _repeat(arguments: Namespace, config: Config, protocol: Mapping[str, Any]) -> None:
    """Take precision and sizes of another evaluation, in place."""
    arguments.precision = protocol["precision"]
    known = {field.name for field in fields(config.data)}
    config.data = replace(config.data, **{name: protocol[name] for name in SIZES if name in known})


# ---------------------------------------------------------------- prompts


def _prompts_of(arguments: Namespace, suite: Suite | None, other: Mapping[str, Any], image: str | None) -> Prompts:
    if image and arguments.suite:
        raise UserError("--suite vbench has no images, and data.image needs them; give --prompts")
    if not (other or suite):
        check_number("--seeds", arguments.seeds, 1, _MOST_SEEDS)
    seeds = other["protocol"]["seeds"] if other else arguments.seeds
    if image and arguments.prompts:  # with --like too: its images may lie elsewhere here
        prompts, *of_prompts = prompts_with_images(arguments.prompts, "--prompts", image)
        return Prompts(dict.fromkeys(prompts, seeds), *of_prompts)
    if other:
        return _repeated_prompts(arguments, suite, other, has_images=image is not None)
    if suite is not None:
        return _prompts_of_suite(arguments, suite)
    prompts = read_prompts(arguments.prompts, "--prompts")
    return Prompts(dict.fromkeys(prompts, seeds), prompts, [])


def _repeated_prompts(
    arguments: Namespace, suite: Suite | None, other: Mapping[str, Any], *, has_images: bool
) -> Prompts:
    if arguments.prompts:
        raise UserError("--prompts with --like gives images, and data.image is null; leave it out")
    images = (other.get("images") or []) if has_images else []
    if has_images and not images:
        raise UserError(f"--like {arguments.like} has no images, which data.image needs; give --prompts")
    counts = seeds_of(suite) if suite else dict.fromkeys(other["prompts"], other["protocol"]["seeds"])
    return Prompts(counts, other.get("captions") or list(counts), images)


def _prompts_of_suite(arguments: Namespace, suite: Suite) -> Prompts:
    counts = seeds_of(suite)
    if not arguments.extended:
        return Prompts(counts, list(counts), [])
    extended = read_extended(user_path(arguments.extended, "--extended"), suite)
    return Prompts(counts, [extended[prompt] for prompt in counts], [])


def _check_captions(arguments: Namespace, config: Config, captions: list[str]) -> None:
    try:
        config.data.check_captions(captions)
    except UserError as error:
        setting = "--like" if arguments.like else "--extended" if arguments.extended else "--prompts"
        raise UserError(str(error).replace("sample.captions", setting)) from error


def _check_clips(arguments: Namespace, config: Config, images: Sequence[str]) -> None:
    """Check that the clips are large enough for LPIPS, and that their images are here."""
    encoding = config.data.encoding()
    if arguments.lpips and min(encoding.height, encoding.width) < LPIPS_LEAST:
        got = f"{encoding.height} x {encoding.width}"
        raise UserError(f"--lpips needs clips of {LPIPS_LEAST} x {LPIPS_LEAST} pixels or more, got {got}; leave it out")
    files = (file for image in images for file in image_files(image, encoding.image))
    absent = next((file for file in files if not Path(file).is_file()), None)
    if absent is not None:
        where = "--prompts" if arguments.prompts else f"--like {arguments.like}"
        raise UserError(f"{where}: the image {absent} is not a file here; give --prompts FILE with the images")


# ---------------------------------------------------------------- participants


def _networks(words: Sequence[str], config: Config, arguments: Namespace) -> dict[str, SampledNetwork]:
    """Plan to sample each of ``words``, and the teacher if there is one, by name."""
    named = {_path_and_steps(word)[0] for word in words}
    if isinstance(config.method, FewStepSettings) and config.teacher.checkpoint is not None and "teacher" not in named:
        words = [*words, "teacher"]
    networks: dict[str, SampledNetwork] = {}
    for word in words:
        name, network = _participant(word, config, arguments)
        if name in networks:
            raise UserError(f"{word} is there twice; leave one out")
        networks[name] = network
    roles = {name: network.plan.roles[0] for name, network in networks.items()}
    families = {name: role.family.name for name, role in roles.items()}
    precisions = {name: role.sharding.precision for name, role in roles.items()}
    _check_alike("family", families, "evaluate them apart")
    _check_alike("precision", precisions, "give --precision")
    return networks


def _participant(word: str, config: Config, arguments: Namespace) -> tuple[str, SampledNetwork]:
    path, count = _path_and_steps(word)
    role: RoleName = "teacher" if path == "teacher" else "student"
    own, folder = config, None
    if role == "student":
        folder = user_path(path, "WHAT")
        if _is_run(folder):
            own = _resolved(settings_of_run(folder, arguments.device, arguments.cp))
            folder = exported_student(folder)
            _check_data(word, own, config)
    own = replace(own, data=config.data)
    if arguments.precision:
        own = replace(own, **{role: replace(getattr(own, role), precision=arguments.precision)})
    network = chosen_network(own, role, student=folder, steps=count, setting=f"{path}@")
    return f"{path}, {counted(network.steps, 'step')}", network


def _check_data(word: str, own: Config, first: Config) -> None:
    """Check that a further run makes the same clips as the first one."""
    ours, theirs = own.data.sample_shapes()[0], first.data.sample_shapes()[0]
    if ours != theirs:
        raise UserError(f"{word} has latents of {ours}, and the first run of {theirs}; leave it out")
    image = own.data.encoding().image
    if image != first.data.encoding().image:
        raise UserError(f"{word} has data.image={image or 'null'}, unlike the first run; leave it out")


def _check_alike(what: str, values: Mapping[str, str], hint: str) -> None:
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{name} {value}" for name, value in values.items())
        raise UserError(f"WHAT are of different {what}: {listed}; {hint}")


def _facts(network: SampledNetwork) -> dict[str, Any]:
    (role,), method = network.plan.roles, network.config.method
    weights = [*map(fingerprint, role.folders)]
    if role.lora is not None and role.lora.saved is not None:
        weights.append(fingerprint_of([role.lora.saved.file]))
    if network.role == "teacher":
        shift = f"shift {method.sampling_shift:g}"
        sampler = f"{method.teacher_sampler}, {shift}, guidance {json.dumps(method.guidance)}"
    else:
        sampler = sampling_in_words(method)
    facts = {"role": network.role, "family": role.family.name, "steps": network.steps, "sampler": sampler}
    if role.sparse is not None:  # earlier evaluations lack the key
        facts["sparse"] = asdict(role.sparse.settings)
    return facts | {"causal": role.causal and asdict(role.causal), "weights": " ".join(weights)}


# ---------------------------------------------------------------- protocol and folder


def _protocol(
    config: Config, prompts: Prompts, networks: Mapping[str, SampledNetwork], suite: str | None
) -> dict[str, Any]:
    """Return the settings that two evaluations must share."""
    encoding, shapes = config.data.encoding(), config.data.sample_shapes()[0]
    seeds = sorted(set(prompts.counts.values()))
    first = next(iter(networks.values()))
    return {
        "prompts": hashlib.sha256("\n".join(_deciding(prompts, encoding.image)).encode()).hexdigest(),
        "seeds": seeds if suite else seeds[0],
        "suite": suite,
        **{name: getattr(encoding, name) for name in SIZES},
        "data": config.data.name,
        "image": encoding.image,
        "text tokens": encoding.max_text_tokens,
        "references": [encoding.references, encoding.reference_image_edge, encoding.reference_video_edge],
        "latents": {part: list(shape) for part, shape in shapes.items()},
        "precision": first.plan.roles[0].sharding.precision,
        "decoder": encoding.fingerprint(),
        "decoder precision": encoding.vae_precision,
        "measures": VERSION,
    }


def _deciding(prompts: Prompts, kind: str | None = None) -> Iterator[str]:
    """Yield everything of the prompts that decides a clip."""
    yield from prompts.counts
    if prompts.captions != list(prompts.counts):
        yield from prompts.captions
    for image in prompts.images:
        if kind == REFERENCES:
            yield with_files(image, lambda _: "")
        yield fingerprint_of([Path(file) for file in image_files(image, kind)])


def _continued(plan: Plan) -> Plan:
    """Refuse ``--out`` if it holds anything else. Return ``plan``, in the order of the evaluation that it continues."""
    earlier = refuse_foreign(
        plan.out,
        "--out",
        _WRITTEN,
        record=BEGUN,
        is_ours=lambda record: {"protocol", "participants"} <= record.keys(),
        maker="an evaluation",
    )
    if earlier is None:
        return plan
    changed = differing({**plan.protocol, **earlier["protocol"]}, plan.protocol)  # earlier versions wrote fewer facts
    participants = json.loads(json.dumps(plan.record["participants"]))
    changed += [f"participant {name}" for name in differing(earlier["participants"], participants)]
    if changed:
        raise UserError(f"--out={plan.out} holds an evaluation with other {', '.join(changed)}; give another --out")
    # Folders are numbered, and the first teacher is the reference: in another order nothing would be found again.
    return replace(plan, networks={name: plan.networks[name] for name in earlier["participants"]})
