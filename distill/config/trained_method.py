"""Method that trained an export, which decides how its student is sampled."""

from pathlib import Path
from typing import Any

from distill.config.compose import method_settings
from fsdp_cp.errors import UserError
from fsdp_cp.files.atomic_folder import description


def trained_method(folder: Path) -> Any | None:
    """Return the settings of the method that trained the export in ``folder``, or in its parent for one of two experts,
    or of adapters by their header; ``None`` if nothing records them."""
    from models.lora.contract import METHOD, read_contract
    from models.lora.saved import find_adapters

    values = (description(folder) or description(folder.parent)).get(METHOD)
    if values is None:
        values = read_contract(find_adapters(str(folder))).get(METHOD)
    if values is None:
        return None
    try:
        return method_settings(values)
    except (UserError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"{folder} was trained by a method that this version does not know ({error})") from error


def few_steps_in_words(folder: Path) -> str | None:
    """Describe how the few-step student in ``folder`` is sampled; ``None`` for any other network, or an unknown one."""
    try:
        earlier = trained_method(folder)
    except UserError:  # a method that this version does not know
        return None
    return sampling_in_words(earlier) if hasattr(earlier, "student_times") else None


def sampling_in_words(method: Any) -> str:
    """Describe the method ``method.*`` by all that decides how its student is sampled."""
    if not hasattr(method, "student_times"):
        chosen = [
            f"{name}={getattr(method, name)}"
            for name in ("sampler", "shift", "guidance_scale")
            if hasattr(method, name)
        ]
        return " ".join([f"method={method.name}", *chosen])
    lists = [method.student_times(), getattr(method, "step_list_first", None)]
    times = ", first chunk ".join(", ".join(f"{time:.6g}" for time in times) for times in lists if times)
    sound = "" if method.audio_shift_ratio is None else f", sound at {method.audio_shift_ratio:g} of it"
    return f"method={method.name} at the times {times} by {method.student_sampler} (shift {method.shift:g}{sound})"
