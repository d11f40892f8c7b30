"""Sparse attention of an export in a plain diffusers pipeline."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from diffusers import ModelMixin
from torch import nn

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh, OneRank
from models.families.base import config_of
from models.families.registry import family_of_class
from models.files.checkpoint_files import check_tensors, inspect_transformer, tensor_reader
from models.owner import is_gate, owner
from models.roles.gates import attach_gates, plan_sparse
from models.sparse import SparseRoles, SparseSettings, keep_sparse_roles

_ROLE = "student"


def use_sparse_attention(transformer: nn.Module, folder: str | Path, **settings: Any) -> None:
    """Give the transformer of a diffusers pipeline the gates and the sparse attention of a ``folder``, in place.

    It runs in one process, without a process group. Gates get the dtype and device of the network: move both
    together afterwards.

    Args:
        transformer: a network of Wan, LTX-2 or MiniMax-H3 that diffusers loaded. LTX-2's pipeline then takes no
            spatio-temporal guidance (``stg_scale=0``, ``audio_stg_scale=0``).
        folder: the folder of the weights, with ``sparse.json`` or next to ``fastvideo_inference.json``.
        settings: those of ``ROLE.sparse_attention``, for a folder without these files: ``sparsity=0.8``.

    Raises:
        UserError: the folder has no sparse attention, or gates of another network.
    """
    files = inspect_transformer(str(folder), "folder")
    family = family_of_class(type(transformer).__name__)
    if family is None:
        raise UserError(f"transformer is a {type(transformer).__name__}, which has no sparse attention here")
    plan = plan_sparse(_ROLE, SparseSettings(**settings), [files.path], family, config_of(transformer))
    if plan is None:
        raise UserError(f"folder={files.path} has no sparse attention; give sparsity=, as 0.8, or leave this call out")
    gates = {name: shape for name, shape in files.shapes.items() if is_gate(name)}
    check_tensors(replace(files, shapes=gates), plan.shapes, "folder")
    network = cast(ModelMixin, transformer)
    device, dtype, read = network.device, network.dtype, tensor_reader(files)  # without parameters that stay fp32
    attach_gates(transformer, _ROLE, plan)
    values = {
        name: read(owner(name)[1]).to(device, dtype) for name, _ in transformer.named_parameters() if is_gate(name)
    }
    transformer.load_state_dict(values, strict=False, assign=True)
    roles = SparseRoles({_ROLE: plan}, trained=())
    roles.role = _ROLE
    keep_sparse_roles(transformer, roles)
    family.serve_pipeline(transformer, cast(Mesh, OneRank()))
