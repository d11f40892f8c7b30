"""Owner and public name of each parameter of a network that several roles can share."""

from functools import lru_cache

ADDITIONS = "additions"
"""Name of the module of a network that holds the additions of its roles."""
PREFIX = f"{ADDITIONS}."
GATE = "to_gate_compress"
"""FastVideo's name of a sparse block's gate (models/sparse.py)."""
_ROLE_LAYERS = ("lora_A", "lora_B", GATE)
"""Names of dictionaries with one entry per role: peft's (0.21), whose adapters have their role's name, and gates."""
_BASE_LAYER = "base_layer"
"""Name that peft (0.21) gives a wrapped layer."""


@lru_cache(maxsize=2**16)  # called for the same thousands of names, a dozen times a step
def owner(name: str) -> tuple[str | None, str]:
    """Return the role that owns the parameter ``name`` of a module, and the parameter's public name.

    ``blocks.0.attn1.to_q.lora_A.student.weight`` is ``blocks.0.attn1.to_q.lora_A.weight`` of the student. The role of a
    parameter of the network itself is ``None``, and its public name is diffusers'.
    """
    path = name.split(".")
    if path[0] == ADDITIONS:
        return path[1], ".".join([ADDITIONS, *path[2:]])
    role, public, rest = None, [], iter(path)
    for component in rest:
        if component == _BASE_LAYER:
            continue
        if component in _ROLE_LAYERS:
            role = next(rest)
        public.append(component)
    return role, ".".join(public)


def is_added(name: str) -> bool:
    """Return whether a role added the whole tensor ``name`` to its network: of an addition, or of a gate."""
    return name.startswith(PREFIX) or is_gate(name)


def is_gate(name: str) -> bool:
    """Return whether a tensor or module with this name belongs to a gate of sparse attention."""
    return GATE in name.split(".")
