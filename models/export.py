"""Export of a role's weights from a training checkpoint, as a diffusers folder or as an adapter file.

Run ``python -m models.export RUN OUT`` in one process. OUT is a new or empty folder, or an earlier export. The new
export replaces an earlier one when complete. Any other folder is refused and not changed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_cp.checkpoint.folder import find_checkpoint, read_state, readable, reader
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.files.atomic_folder import refuse_input, refuse_occupied
from fsdp_cp.launch import exit_code
from models.export_folder import write_folder
from models.families.registry import family_of
from models.files.checkpoint_files import EXPERT_FOLDERS, fingerprint, inspect_checkpoint, tensor_reader
from models.lora.files import FORMATS, file_tensors, write_file
from models.lora.merge import Weights, merged
from models.roles.role import EXPERTS


def _networks(checkpoint: Path, state: Mapping[str, Any], role: str, weights: str) -> dict[str, Weights]:
    """Return a role's weights in a checkpoint, one entry per network, by its name in the checkpoint."""
    files = reader(checkpoint)
    stored = files.read_metadata().state_dict_metadata
    names = [role]
    if state.get("boundaries", {}).get(role):  # parameter names of a network may begin with anything
        names += [f"{role}.{expert}" for expert in EXPERTS]

    def read(prefix: str, name: str) -> Tensor:
        key = prefix + name
        tensor = cast(TensorStorageMetadata, stored[key])  # all weights are tensors
        value = torch.empty(tensor.size, dtype=tensor.properties.dtype)
        with readable(checkpoint), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is intended
            dcp.load({key: value}, storage_reader=files, no_dist=True)
        return value

    networks = {}
    for name in names:
        prefix = f"{name}.{'ema' if weights == 'ema' else 'weights'}."
        tensors = {key.removeprefix(prefix): tensor for key, tensor in stored.items() if key.startswith(prefix)}
        shapes = {key: tuple(cast(TensorStorageMetadata, tensor).size) for key, tensor in tensors.items()}
        if shapes:
            networks[name] = Weights(shapes, partial(read, prefix))
    if not networks:
        held = sorted({key.partition(".")[0] for key in stored} & {"student", "fake"})
        raise UserError(
            f"{checkpoint} holds no {weights} weights of a role {role!r}; it has raw weights of {' and '.join(held)}"
        )
    return networks


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    role: str,
    weights: str,
    dtype: torch.dtype,
    kind: str | None,
    base: str | None,
    expert: str | None = None,
) -> str:
    """Export a role of a training checkpoint without a process group, with at most one output file in memory.

    Args:
        checkpoint: a ``step_*`` folder.
        out: the folder to write; see :func:`fsdp_cp.files.atomic_folder.refuse_occupied`.
        role: ``student`` or ``fake``.
        weights: ``raw`` or ``ema``.
        dtype: dtype of the files.
        kind: ``merged``, or one of :data:`models.lora.files.FORMATS`; ``None`` for the whole network, which is
            ``merged`` where the role has adapters.
        base: folder of the adapters' base, if it has moved.
        expert: ``high`` or ``low`` to export one of a role's two experts as a single network.

    Returns:
        Description of the export.

    Raises:
        UserError: the checkpoint lacks the role or its EMA or is damaged, ``out`` cannot be replaced, or the base is
            not the one that the adapters were trained on.
    """
    refuse_occupied(out, "OUT")
    state = read_state(checkpoint)
    try:
        networks = _networks(checkpoint, state, role, weights)
        config, adapters = dict(state["configs"][role]), state.get("adapters", {}).get(role)
        boundaries = list(state.get("boundaries", {}).get(role) or ())
        causal = state.get("causal", {}).get(role)
        step = state["step"]
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{checkpoint / 'state.json'} is damaged ({error!r}); use another checkpoint") from error
    experts = [network.rpartition(".")[2] for network in networks] if boundaries else []
    takes_both = len(experts) == len(EXPERTS) and kind not in FORMATS  # an adapter file holds one expert
    if boundaries and expert not in experts and not (expert is None and takes_both):
        raise UserError(
            f"{checkpoint} holds the {role}'s experts for {' and '.join(experts)} noise; add --expert"
            f" {' or '.join(experts)}, or take both from the run's export/student"
        )
    if adapters is None and kind is not None:
        raise UserError(f"--format {kind} is for adapters, and the {role} trained its whole network; leave it out")
    about = {"checkpoint": str(checkpoint.resolve()), "step": step, "role": role, "weights": weights}
    about["dtype"], name, chosen = str(dtype), f"the {role}", list(networks.values())
    if boundaries and expert is not None:
        about["expert"], name = expert, f"the {role}'s expert for {expert} noise"
        chosen, experts, boundaries = [networks[f"{role}.{expert}"]], [expert], []
    if kind in FORMATS:
        (adapters_only,) = chosen
        if whole := sorted(key for key in adapters_only.shapes if ".lora_" not in key):
            raise UserError(
                f"{name} in {checkpoint} has {whole[0]} too, which an adapter file cannot hold; use --format merged"
            )
        family = family_of(state["settings"][role]["family"], role)
        tensors = file_tensors(
            kind, adapters_only.shapes, adapters_only.read, family=family, scale=adapters["scale"], dtype=dtype
        )
        write_file(out, tensors, about | {"format": kind}, causal)
        return f"the {weights} adapters of {name}"
    if adapters is not None:
        bases = _bases(state, role, base, out)
        base_weights = [bases[EXPERTS.index(expert)] for expert in experts] or bases
        chosen = [
            merged(frozen, trained, adapters["scale"]) for frozen, trained in zip(base_weights, chosen, strict=True)
        ]
    write_folder(out, chosen, config, dtype=dtype, boundaries=boundaries, about=about, causal=causal)
    return f"the {weights} weights of {name}{', merged into their base,' if adapters else ''}"


def _bases(state: Mapping[str, Any], role: str, moved: str | None, out: Path) -> list[Weights]:
    """Return the base of the adapters of each network of the role. Refuse one with other weights, or that ``out``
    replaces."""
    base = state["adapters"][role]["base"]
    if base["path"] is None:
        raise UserError(f"the {role}'s base has random weights, which no file holds; take the run's export/student")
    path = moved or base["path"]
    # Check a pipeline's network folders too: one of them may be an earlier export, which would be replaced.
    for place in (".", *EXPERT_FOLDERS):
        refuse_input(out, "OUT", {"the adapters' base": Path(path) / place})
    inspected = inspect_checkpoint(path, "--base")
    if " ".join(map(fingerprint, inspected.folders)) != base["fingerprint"]:
        raise UserError(f"--base {path} has other weights than the {role}'s base {base['path']}; give that base")
    return [Weights(folder.shapes, tensor_reader(folder)) for folder in inspected.folders]


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0, or 2 after a one-line message for a user error."""
    parser = argparse.ArgumentParser(prog="python -m models.export", description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN", help="a run folder (its newest checkpoint is taken) or a step_* folder")
    parser.add_argument(
        "out",
        metavar="OUT",
        help="the diffusers transformer folder to write: new, empty, or an earlier export, which is replaced",
    )
    parser.add_argument("--role", default="student", choices=("student", "fake"))
    parser.add_argument("--weights", default="raw", choices=("raw", "ema"))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument(
        "--format",
        choices=("merged", *FORMATS),
        help="of a role with adapters: merged into its base, as a diffusers folder (the default), as a file for"
        " diffusers' load_lora_weights, or one with the keys of Wan's own code, as ComfyUI and LightX2V read it",
    )
    parser.add_argument(
        "--expert", choices=EXPERTS, help="of a role of two experts one alone, as a network of its own; both by default"
    )
    parser.add_argument("--base", help="with --format merged: the folder of the base, where it has moved")
    args = parser.parse_args(argv)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    logging.basicConfig(format="%(message)s")

    @paths_of_the_user()
    def work() -> None:
        out = user_path(args.out, "OUT")
        checkpoint = find_checkpoint(user_path(args.run, "RUN") if args.run else "", "RUN")
        base = str(user_path(args.base, "--base")) if args.base is not None else None
        chosen = {"role": args.role, "weights": args.weights, "kind": args.format, "expert": args.expert}
        written = export_checkpoint(checkpoint, out, dtype=dtype, base=base, **chosen)
        print(f"{out}: {written} in {checkpoint}")

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
