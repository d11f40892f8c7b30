"""Model card of an export: ``README.md`` with the hub's metadata, how the network was made, and how it is sampled.

The card ends with a seal, the checksum of all above. :func:`is_ours` tells a card that nobody has edited since, so that
no command replaces words of a user.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from fsdp_cp.errors import UserError
from fsdp_cp.rng import stream_seed
from models.families.base import Family, Pipeline
from models.files.checkpoint_files import EXPERT_FOLDERS, HEADS_FILE
from models.files.shipped import find_shipped, parse_hub_name
from models.sample import VIDEO

FILE = "README.md"
NETWORK = EXPERT_FOLDERS[0]
PROMPT = "A red kite over the sea."
SHOWN_CLIPS = 4
_SEAL = "\n<!-- written by fsdp_cp, {}; without this line it is yours and no command replaces it -->\n"
_CACHED = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(/|$)")
"""Path of a repository in the hub's cache."""
_MADE = ("made by", "weights", "role", "dtype")
"""Keys of an export's description that tell what its weights are."""
_SAMPLE = "```bash\npython -m distill.sample RUN_DIR --student FOLDER\n```"


@dataclass(frozen=True, kw_only=True)
class Card:
    """Facts of an export, from which its card is written."""

    family: Family
    config: Mapping[str, Any]
    """Configuration of the network."""
    about: Mapping[str, Any]
    """Description of the export: ``role``, ``step``, ``weights``, ``dtype``, and ``format`` of one file."""
    settings: Mapping[str, Any]
    """Settings of the run; empty if they are not known."""
    few_steps: Mapping[str, Any] | None
    """Arguments of :meth:`models.families.base.Family.schedulers`; ``None`` for other than a few-step student."""
    experts: Sequence[str] = ()
    """Folders of two experts, by the names of a pipeline's parts."""
    adapters: Mapping[str, Any] = field(default_factory=dict)
    """``rank`` and ``alpha`` of an adapter file."""
    notes: Sequence[str] = ()
    """Texts on what diffusers' pipeline needs or lacks."""
    has_code: bool = True
    """Whether diffusers' pipeline samples the export."""
    has_heads: bool = False
    """Whether a note defines ``use_heads``, which the code then calls."""
    scheduler: str | None = None
    """Folder of the export's scheduler, from the export's own folder; ``None`` without."""
    repository: str | None = None
    """Name of the export on the hub, if it is known."""
    base: Base | None = None
    """The network that the role started from, if it is known."""
    is_expert: bool = False
    """Whether the export is one of two experts, which samples no clip alone."""
    contract: str = ""
    """Whether the export has FastVideo's file of times, and why not."""
    commit: str | None = None
    """Commit of this program that trained the network."""

    def text(self) -> str:
        """Return the card without seal."""
        name = self.base.name if self.base is not None else self.family.class_name
        steps = "" if self.few_steps is None else f" in {len(self.few_steps['times'])} steps"
        sections = {
            f"# {name}{steps}": [self._summary()],
            "## Sample": [*self.notes, *self._code()],
            "## Trained times": self._times(),
            "## Not to be used with": self._limits(),
            "## How it was made": [self._table()],
        }
        blocks = [f"{title}\n\n" + "\n\n".join(parts) for title, parts in sections.items() if parts]
        return "\n\n".join([self._metadata(), *blocks]) + "\n"

    # Facts

    @property
    def data(self) -> Mapping[str, Any]:
        return self.settings.get("data") or {}

    @property
    def method(self) -> str | None:
        return (self.settings.get("method") or {}).get("name")

    @property
    def is_guided(self) -> bool:
        """Whether guidance is built in: the pipeline's own would come on top of it."""
        built_in = (self.settings.get("method") or {}).get("built_in_guidance") or 1
        return self.few_steps is not None or built_in > 1

    @property
    def takes_image(self) -> bool:
        """Whether an image conditions the network."""
        return bool(self.data.get("image"))

    # Parts

    def _metadata(self) -> str:
        from huggingface_hub import ModelCardData

        task, base = "image-to-video" if self.takes_image else "text-to-video", self.base
        kinds = [task, self.method, None if self.few_steps is None else "few-step", "lora" if self.adapters else None]
        facts: dict[str, Any] = {"library_name": "diffusers", "pipeline_tag": task, **_license(base)}
        if base is not None and base.repository is not None:
            relation = "adapter" if self.adapters else "finetune"
            facts |= {"base_model": base.repository, "base_model_relation": relation}
        data = ModelCardData(tags=[kind for kind in (*kinds, "fsdp_cp") if kind], **facts)
        return f"---\n{data.to_yaml()}\n---"

    def _summary(self) -> str:
        what = "Adapters (LoRA) for" if self.adapters else "Weights of"
        made = "" if self.method is None else f", trained with `{self.method}` by fsdp_cp"
        return f"{what} {self.family.class_name}{made}. License: as the base's."

    def _times(self) -> list[str]:
        if self.few_steps is None:
            return []
        times, boundaries = self.few_steps["times"], self.few_steps.get("boundaries") or []
        noise = "with fresh noise at each step" if self.few_steps["stochastic"] else "along the velocity (Euler steps)"
        lines = [f"{', '.join(f'{time:.6g}' for time in times)} (1 is pure noise), {noise}."]
        if boundaries:
            lines.append(f"The first expert serves times from {boundaries[0]:g} on, the second earlier ones.")
        shifts = self.few_steps.get("shifts") or self.family.parts
        if len(shifts) > 1:
            lines.append("Shifts of the parts' times: " + ", ".join(f"{k} {v:.6g}" for k, v in shifts.items()) + ".")
        return ["\n".join(lines)]

    def _limits(self) -> list[str]:
        limits = []
        if self.few_steps is not None:
            limits += [
                f"numbers of steps other than {len(self.few_steps['times'])}: these have times that it was not trained"
                " at",
                "guidance: it is trained in, so scales stay at 1 and a negative prompt has no effect",
                "the base's scheduler, or other samplers",
            ]
        if self.adapters:
            limits.append("another base than its own, or that base quantized")
        if size := _size(self.data):
            limits.append(f"clips of very different size: it was trained at {size}")
        return ["\n".join(f"- {limit}" for limit in limits)] if limits else []

    def _table(self) -> str:
        about, base = self.about, self.base
        fingerprint = (self.data.get("path") or "").rstrip("/")
        data = [self.data.get("name"), PurePosixPath(fingerprint).name]
        rows = {
            "base": None if base is None else base.shown,
            "method": self.method,
            "training steps": about.get("step"),
            "weights": " ".join(str(about[key]) for key in _MADE if about.get(key)),
            "adapters": ", ".join(f"{key} {value:g}" for key, value in self.adapters.items()),
            "format": about.get("format"),
            "expert": about.get("expert"),
            "data": ": ".join(part for part in data if part),
            "clips": _size(self.data),
            "batch size": self.settings.get("batch_size"),
            "fastvideo_inference.json": self.contract,
            "commit of fsdp_cp": self.commit,
        }
        lines = [f"| {name} | {value} |" for name, value in rows.items() if value not in (None, "")]
        return "\n".join(["| fact | value |", "|---|---|", *lines])

    # Code

    def _code(self) -> list[str]:
        """Return code that samples the export with diffusers alone, or the command that does it."""
        pipeline, encoders = self.family.pipeline, self._encoders()
        lines, chosen = None, None
        if self.base is not None and self.base.revision is None:
            chosen = self.base.repository
        if self.has_code and pipeline is not None and encoders and self.about.get("role") == "student":
            with suppress(UserError):
                lines = self._pipeline_lines(pipeline, Base.of(encoders, chosen))
        if self.is_expert:
            return []
        if lines is None or pipeline is None:
            return [f"With this program, where RUN_DIR is the run that made it:\n\n{_SAMPLE}"]
        noise = "It makes the first clip of `distill.sample --seed 0` for this caption (on a CPU, in fp32).\n\n"
        steps = self.few_steps
        exact = steps is not None and (pipeline.reseeds or not steps["stochastic"])
        exact = exact and pipeline.same_noise and not self.takes_image
        return [f"{noise if exact else ''}```python\n" + "\n".join(lines) + "\n```"]

    def _encoders(self) -> str | None:
        """Return the folder or hub name of the encoders, unless it is a folder here that is no whole pipeline."""
        encoders = self.data.get("encoders")
        folder = find_shipped(encoders) if encoders else None
        is_part = folder is not None and folder.is_dir() and not (folder / "model_index.json").is_file()
        return None if is_part else encoders

    def _pipeline_lines(self, pipeline: Pipeline, base: Base) -> list[str]:
        """Return the whole code: imports, the pipeline with the export's parts, and its call."""
        kind = pipeline.image if self.takes_image else pipeline.text
        dtype = f"dtype=torch.{'bfloat16' if self.settings.get('precision') == 'bf16' else 'float32'}"
        networks = self._networks(base, dtype)
        loaded = [self._argument(base), dtype, *networks]
        if self.scheduler is not None:
            loaded.append(f"scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained({self._where(self.scheduler)})")
        before, call = self._call(pipeline)
        lines = ["from functools import partial", ""] if any("partial(" in line for line in before) else []
        parts, imports = (pipeline.parts, pipeline.imports) if self.is_guided else ((), ())
        names = [kind, *imports, *([self.family.class_name] if networks else [])]
        lines += [*self._imports(names), "", f"pipeline = {kind}.from_pretrained("]
        lines += [f"    {argument}," for argument in [*loaded, *parts]]
        lines += [")", 'pipeline.to("cuda" if torch.cuda.is_available() else "cpu")']
        if self.adapters:
            lines.append(pipeline.adapters.format(where=self._where("")))
        if self.has_heads:
            lines.append(f'use_heads(pipeline.transformer, "{HEADS_FILE}")')
        lines += [*before, "clip = pipeline(", *(f"    {argument}," for argument in call), ")"]
        fps = round(self.data.get("fps") or 16)
        made = "clip.mp4" if self.repository else "../clip.mp4"  # a file in the export would count as a change
        return [*lines, f'encode_video(clip.frames[0], fps={fps}, output_path="{made}")']

    def _imports(self, names: Sequence[str]) -> list[str]:
        """Return the imports of torch and of diffusers' classes: ``names`` and the scheduler's."""
        utilities = ["encode_video", *(["load_image"] if self.takes_image else [])]
        return [
            "import torch",
            f"from diffusers import {', '.join(sorted(['FlowMatchEulerDiscreteScheduler', *names]))}",
            f"from diffusers.utils import {', '.join(utilities)}",
        ]

    def _networks(self, base: Base, dtype: str) -> list[str]:
        """Return the arguments that replace the networks of the pipeline ``base``: by the export's own, or by the
        adapters' base where the pipeline has another network."""
        load = f"{self.family.class_name}.from_pretrained"
        if not self.adapters:
            folders = self.experts or [""]
            return [f"{folder or 'transformer'}={load}({self._where(folder)}, {dtype})" for folder in folders]
        if self.base is None or self.base.is_of(base):
            return []
        folder = self.base.folder
        where = self._argument(self.base) + (f', subfolder="{folder}"' if folder else "")
        return [f"transformer={load}({where}, {dtype})"]

    def _argument(self, base: Base) -> str:
        """Return the first arguments of ``from_pretrained`` for a folder or a repository. On the hub, a path of this
        machine tells others nothing."""
        is_here = self.repository is not None and base.repository is None
        return json.dumps(base.name) if is_here else base.argument

    def _where(self, folder: str) -> str:
        """Return the arguments of ``from_pretrained`` for a ``folder`` of the export, or next to it."""
        parent, _, name = folder.rpartition("/")
        place = self.repository or parent or "."
        return ", ".join([json.dumps(place), *([f'subfolder="{name}"'] if name else [])])

    def _call(self, pipeline: Pipeline) -> tuple[list[str], list[str]]:
        """Return lines before the call, and its arguments. Raises ``UserError`` for times that it does not take."""
        captions = (self.settings.get("sample") or {}).get("captions") or [PROMPT]
        call = [f"prompt={json.dumps(captions[0], ensure_ascii=False)}"]
        if self.takes_image:
            call.append('image=load_image("first_frame.png")')
        if self.few_steps is None:
            return [], [*call, *(pipeline.neutral if self.is_guided else ()), *self._clip_arguments(pipeline)]
        times, stochastic = self.few_steps["times"], self.few_steps["stochastic"]
        call += [f"num_inference_steps={len(times)}", *pipeline.neutral, *self._clip_arguments(pipeline)]
        start = f"torch.Generator().manual_seed({stream_seed(0, 'sample/noise', 0, 0)})"
        before: list[str] = []
        if self.scheduler is None:
            if not pipeline.sets_times:
                raise UserError("the pipeline takes no such times")
            before += self._set_times(times, stochastic, start)
            call.append("latents=times[0] * noise")
        else:
            call.append(f"generator={start}")
        if stochastic and pipeline.reseeds and len(times) > 1:
            before += _reseeded(len(times))
            call.append("callback_on_step_end=reseed")
        return before, call

    def _clip_arguments(self, pipeline: Pipeline) -> list[str]:
        """Return the arguments for a clip like those of the data."""
        call = [f"{key}={self.data[key]}" for key in ("height", "width", "num_frames") if self.data.get(key)]
        if pipeline.takes_fps and self.data.get("fps"):
            call.append(f"frame_rate={self.data['fps']:g}")
        if pipeline.takes_tokens and self.data.get("max_text_tokens"):
            call.append(f"max_sequence_length={self.data['max_text_tokens']}")
        return call

    def _set_times(self, times: Sequence[float], stochastic: bool, start: str) -> list[str]:
        """Return lines that set the ``times``, with which diffusers has no scheduler, and draw noise by ``start``."""
        shape = self.family.planning.shapes_of_clip(
            self.config["out_channels"], *(self.data[key] for key in ("num_frames", "height", "width", "fps"))
        )[VIDEO]
        return [
            f"times = {times}",
            f"pipeline.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling={stochastic})",
            "pipeline.scheduler.set_timesteps = partial(pipeline.scheduler.set_timesteps, sigmas=times)",
            f"noise = torch.randn(1, {', '.join(map(str, shape))}, generator={start})",
        ]


def _reseeded(steps: int) -> list[str]:
    """Return lines that make the scheduler's noise after each step that of ``distill.sample``."""
    seeds = [stream_seed(0, f"sample/renoise_{k}", 0, 0) for k in range(1, steps)]
    return [
        "# The scheduler draws its noise from torch's global stream. Any seeds do.",
        f"seeds = {[*seeds, 0]}",
        "torch.manual_seed(seeds[0])",
        "def reseed(pipeline, step, time, tensors):",
        "    torch.manual_seed(seeds[min(step + 1, len(seeds) - 1)])",
        "    return tensors",
    ]


@dataclass(frozen=True)
class Base:
    """Network or pipeline that a setting names."""

    path: str
    repository: str | None
    """Name on the hub."""
    revision: str | None = None

    @classmethod
    def of(cls, path: str, chosen: str | None) -> Base:
        """Return the folder or the hub name ``path``; ``chosen`` is the name on the hub of a folder."""
        # Runs record the commit of a hub name: other text is a folder, perhaps not of this working directory.
        if (name := parse_hub_name(path)) is not None and name.is_commit:
            return cls(path, name.repo, name.revision)
        if (cached := _CACHED.search(path)) is not None:
            return cls(path, f"{cached[1]}/{cached[2]}", cached[3])
        return cls(path, chosen)

    @property
    def name(self) -> str:
        return PurePosixPath(self.repository or self.root).name

    @property
    def shown(self) -> str:
        return f"{self.repository or self.name}{'' if self.revision is None else f' at {self.revision}'}"

    @property
    def folder(self) -> str:
        """Sub-folder of the network, empty for a folder that is one."""
        path = PurePosixPath(self.path)
        if path.name.startswith(NETWORK):
            return path.name
        is_network = (find_shipped(self.path) / "config.json").is_file()
        return "" if is_network else NETWORK

    @property
    def root(self) -> str:
        """Path without the sub-folder."""
        path = PurePosixPath(self.path)
        return str(path.parent if path.name.startswith(NETWORK) else path)

    def is_of(self, pipeline: Base) -> bool:
        """Return whether this is the network of a ``pipeline``."""
        is_one = self.root == pipeline.root or (self.repository is not None and self.repository == pipeline.repository)
        return is_one and self.folder == NETWORK

    @property
    def argument(self) -> str:
        """First arguments of ``from_pretrained``, without the sub-folder."""
        if self.revision is None:
            folder = find_shipped(self.root)
            return json.dumps(self.repository or str(folder.resolve() if folder.exists() else folder))
        return f'"{self.repository}", revision="{self.revision}"'


def _license(base: Base | None) -> dict[str, str]:
    """Return the hub's metadata of the base's license, from its own card where it is on this machine."""
    from huggingface_hub import ModelCard

    if base is not None:
        folder = find_shipped(base.path)
        for file in (folder / FILE, folder.parent / FILE):
            with suppress(Exception):  # a missing card, or one of any other kind
                found = ModelCard.load(file, ignore_metadata_errors=True).data.to_dict()
                keys = ("license", "license_name", "license_link")
                if isinstance(found.get("license"), str):
                    return {key: str(found[key]) for key in keys if found.get(key)}
    link = (
        {} if base is None or base.repository is None else {"license_link": f"https://huggingface.co/{base.repository}"}
    )
    return {"license": "other", "license_name": "license-of-the-base", **link}


def _size(data: Mapping[str, Any]) -> str:
    if not all(data.get(key) for key in ("num_frames", "height", "width")):
        return ""
    rate = f" at {data['fps']:g} per second" if data.get("fps") else ""
    return f"{data['num_frames']} frames of {data['height']} x {data['width']}{rate}"


def commit_of(run_dir: Path) -> str | None:
    """Return the commit of this program in the newest start of a run; ``None`` if it is not known."""
    with suppress(OSError, ValueError, IndexError, TypeError, KeyError):
        start = json.loads((run_dir / "starts.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        return start["commit"] and f"{start['commit']}{'' if start.get('clean') else ' with changes'}"
    return None


# ---------------------------------------------------------------- files


def write_card(folder: Path, text: str) -> None:
    """Write a sealed card into an unfinished export."""
    file = folder / FILE
    file.unlink(missing_ok=True)  # it may be a link to the earlier export's
    file.write_text(text + _SEAL.format(hashlib.sha256(text.encode()).hexdigest()), encoding="utf-8")


def is_ours(text: str) -> bool:
    """Return whether a card is sealed and has not changed since."""
    body, _, _ = text.rpartition("\n<!-- written by fsdp_cp, ")
    return bool(body) and text == body + _SEAL.format(hashlib.sha256(body.encode()).hexdigest())


def extend_card(folder: Path, *, clips: Sequence[Path] = (), table: str = "") -> None:
    """Add sample clips and the table of an evaluation to the card of an unfinished export, if it is ours."""
    text = (folder / FILE).read_text(encoding="utf-8")
    if not is_ours(text) or not (clips or table):
        return
    body = text.rpartition("\n<!-- written by fsdp_cp, ")[0]
    if table:
        body += f"\n## Evaluation\n\n{table.strip()}\n"
    if clips:
        (folder / "samples").mkdir(exist_ok=True)
        links = []
        for i, clip in enumerate(clips[:SHOWN_CLIPS]):
            shutil.copyfile(clip, folder / "samples" / f"{i}.mp4")
            links.append(f'<video controls loop src="samples/{i}.mp4"></video>')
        body += "\n## Clips\n\n" + "\n".join(links) + "\n"
    write_card(folder, body)


def sample_clips(run_dir: Path, step: int) -> list[Path]:
    """Return the student's sample clips of a run's step, at the most steps that it was sampled with."""
    names = re.compile(rf"step_{step:08d}_student_(\d+)steps_(\d+)\.mp4")
    found = ((file, names.fullmatch(file.name)) for file in (run_dir / "samples").glob("*.mp4"))
    numbers = {file: (int(match[1]), int(match[2])) for file, match in found if match is not None}
    most = max((steps for steps, _ in numbers.values()), default=0)
    return sorted((file for file, (steps, _) in numbers.items() if steps == most), key=numbers.__getitem__)
