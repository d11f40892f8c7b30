"""Runs of each model family from mp4 files to an export, sampled by our sampler and by diffusers' pipeline."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoModel, FlowMatchEulerDiscreteScheduler, ModelMixin
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from distill.config import load_config
from distill.data.videos.decode import ClipFormat, read_clip
from distill.methods import METHODS, build_method
from distill.methods.common.sampling import rollout
from fsdp_cp.mesh import build_mesh
from models.roles.load import build_role
from models.roles.role_plan import plan_role
from models.sample import AUDIO, VIDEO, Sample
from tests.e2e.launch import train
from tests.oracles.samples import video
from tests.pools import run_ranks
from tests.tiny_pipeline import render_clips

STEPS = [1.0, 0.9375, 0.8333333, 0.625]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model family at test size."""

    latents: tuple[int, ...]
    """Shape of a clip's latents."""
    height: int
    width: int
    captions: tuple[str, str] = ("a green square, drifting", "a red square, drifting")
    family: str = "wan"
    fps: float = 8.0
    num_frames: int = 17
    sound: tuple[int, ...] | None = None
    """Shape of its sound's latents, where the family makes sound."""
    method: tuple[str, ...] = (
        "experiment=quickstart", f"method.step_list={STEPS}", "method.fake_updates_per_student_update=1",
    )  # fmt: skip
    more: tuple[str, ...] = field(default=())
    """Further settings."""

    def words(self, pipeline: Path, clips: Path) -> list[str]:
        """Return the settings of a run of two steps on two ranks that share each clip."""
        path = clips / "metadata.csv" if "data=captions" in self.more else clips
        return [
            *self.method, "data=video_folder", f"data.path={path}", f"data.encoders={pipeline}",
            *(f"{role}.family={self.family}" for role in ("teacher", "student", "fake")),
            *(f"{role}.checkpoint={pipeline}" for role in ("teacher", "student", "fake")), "optim.student.lr=1e-2",
            f"data.height={self.height}", f"data.width={self.width}", f"data.fps={self.fps}",
            f"data.num_frames={self.num_frames}", "batch_size=2", "student.ema.enabled=false",
            "sample.student_steps=[4]",
            "sample.report_clips=0", "sample.teacher_steps=[]", "steps=2", "mesh.cp=2",
            f"sample.captions=['{self.captions[0]}','{self.captions[1]}']", *self.more,
        ]  # fmt: skip

    def clips(self, folder: Path) -> Path:
        """Write three clips and their captions."""
        return render_clips(folder, 3, frames=36, fps=round(self.fps), height=72, width=120)

    def noise(self) -> Tensor:
        """Draw the start of one clip for each caption."""
        return torch.randn(2, *self.latents, generator=torch.Generator().manual_seed(0))

    def start(self) -> Sample:
        """Return :meth:`noise` with that of the sound, where there is sound."""
        if self.sound is None:
            return video(self.noise())
        sound = torch.randn(2, *self.sound, generator=torch.Generator().manual_seed(1))
        return Sample({VIDEO: self.noise(), AUDIO: sound})

    def call(self) -> dict[str, Any]:
        """Return the arguments of a pipeline's call."""
        return {
            "height": self.height, "width": self.width, "num_frames": self.num_frames, "num_inference_steps": 4,
            "output_type": "latent", "return_dict": False,
        }  # fmt: skip

    def first_frame(self, file: Path) -> Tensor:
        """Return ``(3, H, W)`` in [-1, 1], resized and cropped as clips are."""
        size = ClipFormat(num_frames=1, height=self.height, width=self.width, fps=self.fps)
        return read_clip(file, size)[:, 0]

    def picture(self, file: Path) -> Image.Image:
        """Return :meth:`first_frame` as an 8-bit image."""
        return Image.fromarray(
            self.first_frame(file).add(1).mul(127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
        )


@dataclass(frozen=True)
class Run:
    """Finished run of a family, with its inputs."""

    case: Case
    pipeline: Path
    clips: Path
    folder: Path

    @property
    def student(self) -> Path:
        return self.folder / "export" / "student"

    @property
    def network(self) -> ModelMixin:
        return AutoModel.from_pretrained(str(self.student))

    @property
    def files(self) -> tuple[str, str]:
        """Videos whose first frames go with the captions."""
        return str(self.clips / "clip_0.mp4"), str(self.clips / "clip_1.mp4")

    def ours(self, images: tuple[str, ...] = (), *, text_alone: bool = False, times: tuple = ()):
        """Sample the export with our sampler on one rank; see :func:`_ours`."""
        return run_ranks(1, _ours, self, images, text_alone, times)[0]

    def theirs(self, kind: type, **parts: Any):
        """Load a diffusers pipeline with the exported scheduler and the given parts."""
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(self.folder / "export" / "scheduler")
        pipeline = kind.from_pretrained(self.pipeline, **{"scheduler": scheduler} | parts)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def distil(tmp_path: Path, case: Case, build, *changes: str, **options: Any) -> Run:
    """Write a pipeline folder and clips, and run ``train.py`` on two ranks."""
    pipeline = build(tmp_path / "pipeline", **options)
    run = Run(case, pipeline, case.clips(tmp_path / "clips"), tmp_path / "run")
    words = [change.format(clips=run.clips) for change in changes]
    train(2, *case.words(pipeline, run.clips), *words, f"run_dir={run.folder}")
    return run


class TorchDraws:
    """Noise from torch's global stream, as a stochastic pipeline draws it."""

    def normal(self, purpose, shape, dtype):
        return torch.randn(2, *shape, dtype=dtype)


def _ours(run: Run, images: tuple[str, ...], text_alone: bool, times: tuple):
    """Return latents, pixels, the condition, an item's shapes, and latents along each of ``times``, or of the sound."""
    config = load_config(run.folder / "config.yaml")
    if text_alone:
        config.data.image = None
    captions = list(run.case.captions)
    data = config.data.build(
        seed=0, device=torch.device("cpu"), run_dir=run.folder, captions=captions, images=list(images)
    )
    added = METHODS[config.method.name][0].additions(config.method).get("student", ())
    role = build_role(
        plan_role("student", checkpoint=str(run.student), family=run.case.family, additions=added),
        mesh=build_mesh(cp=1, heads=4),
        device=torch.device("cpu"),
        trainable=False,
        shapes=data.latent_shapes,
        condition_shapes=data.condition_shapes,
    )
    condition, method = data.condition(captions), build_method(config.method, {"student": role})
    noise, along = replace(run.case.start(), shifts=method.clock("student")), []
    with torch.no_grad():
        for each in times:
            torch.manual_seed(3)
            along.append(rollout(role, noise, condition, each, TorchDraws(), "renoise", sampler="renoise").x0.video)
        torch.manual_seed(3)
        latents = method.generate("student", noise, condition, 4, TorchDraws())
        along += [part for name, part in latents.parts.items() if name != VIDEO]
        pixels, latents = data.decode(latents), latents.video
    shapes = {name: tuple(value.shape) for name, value in data[0].items() if name != "caption"}
    return latents, pixels, dict(condition.tensors), shapes, along


def weights(folder: Path) -> dict[str, Tensor]:
    """Load the only safetensors file of a folder."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def same_weights(folder: Path, other: Path, file: str | None = None) -> bool:
    """Return whether two folders hold the same weights, bit by bit, in their only file or in ``file``."""
    ours, theirs = (weights(path) if file is None else load_file(path / file) for path in (folder, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
