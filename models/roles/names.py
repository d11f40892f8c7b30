"""Owner and checkpoint name of a parameter, derived from its name in a module that roles can share."""

from __future__ import annotations

from functools import lru_cache

ADDITIONS = "additions"
_OF_ROLE = ("lora_A", "lora_B", "modules_to_save")
"""Names of peft's (0.21) dictionaries with one entry per adapter. An adapter has its role's name."""
_OF_BASE = ("base_layer", "original_module")
"""Names that peft (0.21) gives a wrapped layer, and a wrapped module that a role has a copy of."""


@lru_cache(maxsize=2**16)  # called for the same thousands of names, a dozen times a step
def owner(name: str) -> tuple[str | None, str]:
    """Return the role that owns the parameter ``name``, and the parameter's public name.

    Args:
        name: name in the module, e.g. ``blocks.0.attn1.to_q.lora_A.student.weight``.

    Returns:
        Role (``None`` for a parameter of the network itself, whose public name is diffusers') and public name. A role's
        copy of a base module has the base's name. Names with ``lora_A.weight`` and ``additions.gan_head`` are the same
        for every role.
    """
    path = name.split(".")
    if path[0] == ADDITIONS:
        return path[1], ".".join([ADDITIONS, *path[2:]])
    role, public, rest = None, [], iter(path)
    for component in rest:
        if component in _OF_BASE:
            continue
        if component in _OF_ROLE:
            role = next(rest)
            if component == "modules_to_save":
                continue
        public.append(component)
    return role, ".".join(public)
