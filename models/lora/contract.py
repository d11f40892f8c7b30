"""Header of an adapter file, which tells how it is sampled: in our key, and in those that other tools show.

kohya's tools and ComfyUI's pages of a model show ``ss_*`` and ``modelspec.*`` (Stability's ModelSpec 1.0.1). No program
computes with them, but for ``ss_network_alpha``, which must therefore fit the file's matrices.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from fsdp_cp.errors import counted

KEY = "fsdp_cp"
"""Key of :func:`contract_of` in the header, as JSON."""
BASE, BASE_NAME, SAMPLING, METHOD = "base_fingerprint", "base_name", "sampling", "method"
"""Keys of an export's description: fingerprint and name of the base, :func:`sampling`, and settings of the method."""
SHOWN = ("steps", "times", "shift", "sampler", "guidance_scale")


def sampling(few_steps: Mapping[str, Any] | None, method: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return how a few-step student is sampled, by the arguments ``few_steps`` of its schedulers; empty for others."""
    if few_steps is None:
        return {}
    times, sampler = few_steps["times"], "renoise" if few_steps["stochastic"] else "ode"
    values = (len(times), list(times), (method or {}).get("shift"), sampler, 1.0)
    return {name: value for name, value in zip(SHOWN, values, strict=True) if value is not None}


def contract_of(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what the header of adapters says, by the description of their export: :func:`sampling`, ``rank``,
    ``alpha``, ``base``, its fingerprint, and the method."""
    ends = ("lora_A.weight", "lora_down.weight", "lora_down")
    rank = max((len(tensor) for name, tensor in tensors.items() if name.endswith(ends)), default=0)
    known = {
        "rank": rank,
        "alpha": about.get("alpha", float(rank)),
        "base": about.get(BASE_NAME),
        BASE: about.get(BASE),
        METHOD: about.get(METHOD),
    }
    return {**(about.get(SAMPLING) or {}), **{key: value for key, value in known.items() if value is not None}}


def in_words(contract: Mapping[str, Any]) -> str:
    """Describe how adapters are sampled, for people; empty if the contract does not say."""
    if "times" not in contract:
        return ""
    times = ", ".join(f"{time:.6g}" for time in contract["times"])
    sampler = "lcm" if contract["sampler"] == "renoise" else "euler"
    return f"{counted(contract['steps'], 'step')} at the times (sigmas) {times}, sampler {sampler}, cfg 1"


def header(contract: Mapping[str, Any], *, family: str, step: int | None, has_alphas: bool) -> dict[str, str]:
    """Return the header of a file. Without alphas among its tensors (``has_alphas``) their scale is in the matrices."""
    words, rank, base = in_words(contract), contract["rank"], contract.get("base")
    title = " ".join([base or family, *([f"in {counted(contract['steps'], 'step')}"] if words else [])])
    shown = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": rank,
        "ss_network_alpha": contract["alpha"] if has_alphas else float(rank),
        "ss_base_model_version": family,
        "ss_sd_model_name": base,
        "ss_output_name": title,
        "ss_steps": step,
        "ss_training_comment": words,
        "ss_discrete_flow_shift": contract.get("shift"),
        "ss_guidance_scale": contract.get("guidance_scale"),
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{family}/lora",
        "modelspec.implementation": "https://github.com/huggingface/diffusers",
        "modelspec.title": title,
        "modelspec.description": f"Adapters (LoRA) of rank {rank} for {base or family}",
        "modelspec.usage_hint": words,
    }
    texts = {key: str(value) for key, value in shown.items() if value not in (None, "")}
    return {KEY: json.dumps(contract, sort_keys=True), **texts}


def read_contract(file: Path | None) -> dict[str, Any]:
    """Return what the header of an adapter file says; empty for a file of another program, or for ``None``."""
    if file is None:
        return {}
    try:
        with safe_open(file, framework="pt") as opened:
            found = json.loads((opened.metadata() or {}).get(KEY, "{}"))
        return dict(found)
    except Exception:  # safetensors raises its own, which is not public everywhere; the reader of weights reports it
        return {}
