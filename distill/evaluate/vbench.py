"""VBench 0.1.5: its folders of clips, its scores by the package in an environment of its own, and its totals.

Minima, maxima and weights are those of ``scripts/constant.py`` in github.com/Vchitect/VBench, and totals those of
``scripts/cal_final_score.py`` (Huang et al., arXiv:2311.17982). The package has neither script.
"""

import json
import logging
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distill.data.videos.table import read_captions
from distill.evaluate.comparison import in_words, mean_over_prompts, table_lines
from fsdp_cp.errors import UserError, counted
from fsdp_cp.files.atomic_file import write_text
from fsdp_cp.launch import outside_of_torchrun

log = logging.getLogger(__name__)

SEEDS, FLICKER_SEEDS = 5, 25
"""Clips of a prompt, and of a prompt of ``temporal_flickering``, from which the static filter chooses five."""
FLICKERING = "temporal_flickering"
CACHE = "VBENCH_CACHE_DIR"


class Dimension(NamedTuple):
    """Dimension of VBench."""

    least: float
    most: float
    weights: tuple[str, ...] = ()
    """Files that it needs below ``VBENCH_CACHE_DIR``."""
    weight: float = 1.0
    is_quality: bool = False
    is_share: bool = False
    """Whether a clip's value is 0 or 1, or a share of its frames."""


_CLIP_B, _RAFT = "clip_model/ViT-B-32.pt", "raft_model/models/raft-things.pth"
_GRIT = "grit_model/grit_b_densecap_objectdet.pth"
_VICLIP = ("ViCLIP/ViClip-InternVid-10M-FLT.pth", "ViCLIP/bpe_simple_vocab_16e6.txt.gz")
_DINO = ("dino_model/dino_vitbase16_pretrain.pth", "dino_model/facebookresearch_dino_main")
_AESTHETIC = ("clip_model/ViT-L-14.pt", "aesthetic_model/emb_reader/sa_0_4_vit_l_14_linear.pth")
DIMENSIONS = {
    "subject_consistency": Dimension(0.1462, 1.0, _DINO, is_quality=True),
    "background_consistency": Dimension(0.2615, 1.0, (_CLIP_B,), is_quality=True),
    FLICKERING: Dimension(0.6293, 1.0, is_quality=True),
    "motion_smoothness": Dimension(0.706, 0.9975, ("amt_model/amt-s.pth",), is_quality=True),
    "dynamic_degree": Dimension(0.0, 1.0, (_RAFT,), weight=0.5, is_quality=True, is_share=True),
    "aesthetic_quality": Dimension(0.0, 1.0, _AESTHETIC, is_quality=True),
    "imaging_quality": Dimension(0.0, 1.0, ("pyiqa_model/musiq_spaq_ckpt-358bb6af.pth",), is_quality=True),
    "object_class": Dimension(0.0, 1.0, (_GRIT,), is_share=True),
    "multiple_objects": Dimension(0.0, 1.0, (_GRIT,), is_share=True),
    "human_action": Dimension(0.0, 1.0, ("umt_model/l16_ptk710_ftk710_ftk400_f16_res224.pth",), is_share=True),
    "color": Dimension(0.0, 1.0, (_GRIT,), is_share=True),
    "spatial_relationship": Dimension(0.0, 1.0, (_GRIT,), is_share=True),
    "scene": Dimension(0.0, 0.8222, ("caption_model/tag2text_swin_14m.pth",), is_share=True),
    "appearance_style": Dimension(0.0009, 0.2855, (_CLIP_B,)),
    "temporal_style": Dimension(0.0, 0.364, _VICLIP),
    "overall_consistency": Dimension(0.0, 0.364, _VICLIP),
}


_SELF_FORCING = "extended prompts of github.com/guandeh17/Self-Forcing; arXiv:2506.08009, table 1"
PUBLISHED = (
    ("published, in percent", "total", "quality", "semantic", "protocol"),
    ("Wan 2.1 1.3B, 50 steps", "84.26", "85.30", "80.09", _SELF_FORCING),
    ("Wan 2.1 1.3B, 50 steps", "83.31", "85.23", "75.65", "VBench's leaderboard, as github.com/NVlabs/Sana copies it"),
    ("Wan 2.1 1.3B, 50 steps", "82.78", "", "", "rCM's, as issue 92 of Self-Forcing's repository quotes it"),
    ("Wan 2.1 14B, 50 steps", "83.69", "85.59", "76.11", "VBench's leaderboard, as github.com/NVlabs/Sana copies it"),
    ("Self-Forcing 1.3B, 4 steps", "84.31", "85.07", "81.28", _SELF_FORCING),
    ("CausVid 1.3B, 4 steps", "81.20", "84.05", "69.80", _SELF_FORCING),
)
"""Table of published totals, its head first."""


def read_suite(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a ``VBench_full_info.json``: ``prompt_en``, ``dimension`` (a list), and others."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if entries and all(
            isinstance(x["prompt_en"], str) and set(x["dimension"]) <= DIMENSIONS.keys() for x in entries
        ):
            return entries
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"--prompts {path} cannot be read ({error}); give VBench_full_info.json") from error
    raise UserError(f"--prompts {path} is not VBench_full_info.json, which is in the package vbench; give that file")


def read_extended(path: Path, entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the extended prompt of each prompt from a file with a line per entry, in their order, as VBench's
    repository has them (``prompts/augmented_prompts``). A prompt of several entries takes the first line."""
    lines = read_captions(path, setting="--extended ")
    if len(lines) != len(entries):
        have = f"--extended {path} has {counted(len(lines), 'line')} for {len(entries)} entries of --prompts"
        raise UserError(f"{have}; give a line for each entry, in their order")
    return {entry["prompt_en"]: line for entry, line in reversed([*zip(entries, lines, strict=True)])}


def seeds_of(entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of clips of each distinct prompt, those of flickering first."""
    flicker = {entry["prompt_en"] for entry in entries if FLICKERING in entry["dimension"]}
    prompts = sorted(dict.fromkeys(entry["prompt_en"] for entry in entries), key=lambda prompt: prompt not in flicker)
    return {prompt: FLICKER_SEEDS if prompt in flicker else SEEDS for prompt in prompts}


def check_package(python: Path, dimensions: Sequence[str]) -> list[str]:
    """Return the dimensions that can be computed; log those that are left out for lack of detectron2."""
    program = "import importlib.util as u; print([n for n in ('vbench', 'detectron2') if u.find_spec(n)])"
    try:
        done = subprocess.run([python, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"--vbench-python {python} cannot be started ({error})"
        raise UserError(f"{reason}; give a Python 3.11 or newer that has vbench") from error
    if "vbench" not in done.stdout:
        install = f"{python} -m pip install vbench 'setuptools<81'"
        raise UserError(f"--vbench-python {python} lacks the package; run {install}")
    wanted = list(dimensions)
    if "detectron2" not in done.stdout and (without := [name for name in wanted if _GRIT in DIMENSIONS[name].weights]):
        log.warning("left out %s: they need detectron2 in the environment of VBench", ", ".join(without))
        wanted = [name for name in wanted if name not in without]
    files = dict.fromkeys(file for name in wanted for file in DIMENSIONS[name].weights)
    cache = Path(os.environ.get(CACHE, "~/.cache/vbench")).expanduser()
    if absent := [file for file in files if not (cache / file).exists()]:
        lacks = f"{CACHE}={cache} lacks {', '.join(absent)}"
        raise UserError(f"{lacks}; put them there, or choose others with --dimensions")
    return wanted


def link_clips(clips: Mapping[tuple[str, int], Path], folder: Path, *, flickering: bool) -> Path:
    """Make a folder with links ``PROMPT-SEED.mp4`` to the clips of flickering, or to the others; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = {prompt for prompt, seed in clips if seed >= SEEDS}
    for (prompt, seed), clip in clips.items():
        link = folder / f"{prompt}-{seed}.mp4"
        if (prompt in prompts) == flickering and not link.is_symlink():
            link.symlink_to(os.path.relpath(clip, folder))
    return folder


def command(python: str | Path, request: Mapping[str, Any]) -> list[str]:
    # -P: `import vbench` must not find this file, which is next to the script.
    return [str(python), "-P", str(Path(__file__).with_name("vbench_process.py")), json.dumps(request)]


def score(
    dimension: str, *, python: Path | None, videos: Path, info: Path, out: Path, device: str
) -> dict[str, Any] | None:
    """Compute a dimension, or read it: the package's ``value``, ``low`` and ``high`` by prompt, and ``note``. Without
    ``python``, print its command."""
    note = ""
    if dimension == FLICKERING:
        videos, note = _filtered(videos, python, device)
        out = out / "unfiltered" if note else out
    result = out / f"{dimension}_eval_results.json"
    request = {"device": device, "info": str(info), "videos": str(videos), "out": str(out), "dimension": dimension}
    if not result.is_file():
        if python is None:
            print(shlex.join(command("PYTHON_OF_VBENCH", request)))
            return None
        _run(command(python, request), f"VBench's {dimension}")
    value, clips = json.loads(result.read_text())[dimension]
    groups: dict[str, list[float]] = {}
    for clip in clips:
        prompt = re.sub(r"-\d+$", "", Path(clip["video_path"]).stem)
        groups.setdefault(prompt, []).append(float(clip["video_results"]))
    means = np.array([np.mean(numbers) for numbers in groups.values()])
    if dimension == "imaging_quality":  # the package divides the mean alone
        means = means / 100
    counts = [len(numbers) for numbers in groups.values()] if DIMENSIONS[dimension].is_share else None
    return mean_over_prompts(means, counts) | {"value": float(value), "note": note}


def _filtered(videos: Path, python: Path | None, device: str) -> tuple[Path, str]:
    """Return the folder of the clips that the package's static filter keeps; ``videos`` where it cannot run."""
    weights = Path(os.environ.get(CACHE, "~/.cache/vbench")).expanduser() / _RAFT
    kept = videos.with_name(f"{videos.name}_static")
    if not (kept / "filtered.json").is_file():
        if python is None or device != "cuda" or not weights.is_file():
            return videos, " (unfiltered)"
        _run(command(python, {"raft": str(weights), "videos": str(videos), "out": str(kept)}), "VBench's static filter")
    return kept / "filtered_videos", ""


def _run(words: Sequence[str], what: str) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=outside_of_torchrun() | offline)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"{what} failed ({last}); its command: {shlex.join(words)}")


def run_suite(
    suite: Sequence[Mapping[str, Any]],
    participants: Mapping[str, Mapping[tuple[str, int], Path]],
    out: Path,
    *,
    python: Path | None,
    dimensions: Sequence[str],
    device: str,
) -> None:
    """Score the clips of ``participants``, files by prompt and seed, and write ``OUT/vbench.json`` and ``.md``."""
    found = {}
    info = out / "vbench" / "VBench_full_info.json"
    write_text(info, json.dumps(suite))
    for name, clips in participants.items():
        folder = next(iter(clips.values())).parent.name
        videos = link_clips(clips, out / "vbench" / folder, flickering=False)
        flickering = link_clips(clips, out / "vbench" / f"{folder}_flickering", flickering=True)
        scores = {
            dimension: score(
                dimension,
                python=python,
                videos=flickering if dimension == FLICKERING else videos,
                info=info,
                out=out / "vbench" / f"{folder}_scores",
                device=device,
            )
            for dimension in dimensions
        }
        if python is not None:
            found[name] = {"dimensions": scores, "totals": totals({key: x["value"] for key, x in scores.items()})}
    if python is None:
        print("VBench was not run; these commands are left, and then this command with --vbench-python")
        return
    write_text(out / "vbench.json", json.dumps(found, indent=1) + "\n")
    rows = []
    for dimension in dimensions:
        scores = [x["dimensions"][dimension] for x in found.values()]
        rows.append([dimension, *(in_words(score) + score["note"] for score in scores)])
    for key in ("quality", "semantic", "total"):
        sums = [x["totals"].get(key) for x in found.values()]
        rows.append([key, *("a dimension is missing" if total is None else f"{total:.4f}" for total in sums)])
    lines = [*table_lines(["VBench", *found], rows), "", *table_lines(PUBLISHED[0], PUBLISHED[1:])]
    write_text(out / "vbench.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


def totals(scores: Mapping[str, float]) -> dict[str, float]:
    """Return ``quality``, ``semantic`` and ``total`` of the package's values; each only if no dimension is missing."""
    found = {}
    for name, is_quality in (("quality", True), ("semantic", False)):
        group = {key: dimension for key, dimension in DIMENSIONS.items() if dimension.is_quality == is_quality}
        if group.keys() <= scores.keys():
            scaled = [d.weight * (scores[key] - d.least) / (d.most - d.least) for key, d in group.items()]
            found[name] = sum(scaled) / sum(d.weight for d in group.values())
    if len(found) == 2:
        found["total"] = (4 * found["quality"] + found["semantic"]) / 5
    return found
