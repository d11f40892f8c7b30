"""Whose a parameter is, and what it is called in checkpoints, by its name in a module that roles may share."""

from __future__ import annotations

from functools import lru_cache

ADDITIONS = "additions"
_OF_ROLE = ("lora_A", "lora_B", "modules_to_save")
"""What peft (0.21) calls its dictionaries of one entry for each adapter; an adapter has its role's name here."""
_OF_BASE = ("base_layer", "original_module")
"""What peft (0.21) calls the wrapped layer, and the wrapped module that a role has a copy of."""


@lru_cache(maxsize=2**16)  # of the same thousands of names, a dozen times a step
def owner(name: str) -> tuple[str | None, str]:
    """The role that alone has the parameter ``name``, and its public name.

    Args:
        name: of a parameter in the module: ``blocks.0.attn1.to_q.lora_A.student.weight``.

    Returns:
        ``None`` for a parameter of the network itself, whose public name is diffusers'. What a role trains instead of a
        module of the base has the base's name; ``lora_A.weight`` and ``additions.gan_head`` are called so for any role.
    """
    parts = name.split(".")
    if parts[0] == ADDITIONS:
        return parts[1], ".".join([ADDITIONS, *parts[2:]])
    role, public, rest = None, [], iter(parts)
    for part in rest:
        if part in _OF_BASE:
            continue
        if part in _OF_ROLE:
            role = next(rest)
            if part == "modules_to_save":
                continue
        public.append(part)
    return role, ".".join(public)
