"""Groups of parameters that share weight decay and learning rate: checked in a run's plan, used by its optimizers."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from distill.config.schema import OptimizerSettings
from fsdp_cp.errors import UserError
from models.additions.base import PREFIX


class Group(NamedTuple):
    """Settings that the parameters of one group share."""

    weight_decay: float
    lr_scale: float


def parameter_groups(names: Iterable[str], settings: OptimizerSettings, where: str) -> dict[Group, list[str]]:
    """Group parameters, by public name, that share weight decay and learning rate. ``no_decay`` and ``lr_scale`` are
    patterns (``fnmatch``: ``*`` is any text, dots included); ``additions_lr`` is the rate of parameters that a method
    added, before ``lr_scale``. ``where`` is the prefix of settings in a message, as ``"optim.student"``."""
    names, scales = list(names), dict(settings.lr_scale or {})
    groups: dict[Group, list[str]] = {}
    used: set[str] = set()
    for name in names:
        undecayed = [pattern for pattern in settings.no_decay if fnmatchcase(name, pattern)]
        scaled = next((pattern for pattern in scales if fnmatchcase(name, pattern)), None)
        used |= {*undecayed, scaled}
        decay = 0.0 if undecayed else settings.weight_decay
        scale = 1.0 if scaled is None else float(scales[scaled])
        if settings.additions_lr is not None and name.startswith(PREFIX):
            scale *= settings.additions_lr / settings.lr
        groups.setdefault(Group(decay, scale), []).append(name)
    for key, patterns in (("no_decay", settings.no_decay), ("lr_scale", scales)):
        for pattern in patterns:
            if pattern not in used:
                taken = any(fnmatchcase(name, pattern) for name in names)
                why = "comes after patterns that match all it does" if taken else "matches no parameter"
                raise UserError(f"{where}.{key}: {pattern!r} {why}; names are as {names[0]} and {names[-1]}")
    return groups
