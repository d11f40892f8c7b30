"""Why torch sees no GPU on a machine that has one: an old driver, another build of torch, an environment variable."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

DEVICE_FILES = (Path("/dev/nvidia0"), Path("/dev/nvidiactl"))
"""There where NVIDIA's driver is loaded, in containers too that have been given a GPU."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
OLDEST_DRIVER = {"12": "525", "13": "580"}
"""Branch of the driver that a CUDA release needs at least, on Linux (CUDA's release notes, minor versions included)."""


def why_unseen() -> str | None:
    """The likeliest cause, in words; ``None`` where there is no GPU, or where none is to be seen.

    It is asked where ``torch.cuda.is_available()`` has said no, and starts nothing on a GPU.
    """
    found = next((file for file in DEVICE_FILES if file.exists()), None)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if found is None or visible in ("", "-1"):  # hidden by whoever set that
        return None
    if torch.version.cuda is None:
        cause = f"this torch {torch.__version__} is built without CUDA; install the one of constraints.txt"
    elif not os.access(found, os.R_OK | os.W_OK):
        cause = "this user may not open it"
    elif visible is not None:
        cause = f"CUDA_VISIBLE_DEVICES={visible} may name none of its GPUs"
    else:
        oldest = OLDEST_DRIVER.get(torch.version.cuda.partition(".")[0])
        needs = f", which needs {oldest} or newer" if oldest else ""
        cause = f"the driver{_driver()} may be too old for this torch's CUDA {torch.version.cuda}{needs}"
    return f"there is {found}, but {cause}"


def _driver() -> str:
    """`` 535.104.05``, with a space in front; nothing where it cannot be read."""
    try:
        version = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", DRIVER_FILE.read_text())
    except OSError:
        return ""
    return f" {version[1]}" if version else ""
