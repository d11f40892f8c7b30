"""Optional packages: imported at first use, with a minimum version."""

import importlib
from functools import lru_cache
from importlib import metadata
from types import ModuleType

from torch.torch_version import TorchVersion

from fsdp_cp.errors import first_line


@lru_cache(maxsize=16)
def optional_package(module: str, install: str, distribution: str = "", at_least: str = "") -> ModuleType | str:
    """Import ``module``; return it, or the clause that says why it cannot be used.

    ``distribution`` (``pip``'s name of the package) must have version ``at_least``. Its metadata is read, since
    FlashAttention 4 gives itself the ``__version__`` "0.0.0".
    """
    try:
        if distribution and (version := TorchVersion(metadata.version(distribution))) < at_least:
            return f"needs {distribution} {at_least} or later, not {version} ({install})"
        return importlib.import_module(module)
    except Exception as error:  # built for another torch or CUDA, it may raise anything; the user reads it
        return f"is not installed, or does not load: {first_line(error)} ({install})"


def transformer_engine(module: str = "transformer_engine.pytorch", at_least: str = "2.17") -> ModuleType | str:
    """Import a module of Transformer Engine, like :func:`optional_package`.

    2.17 is the oldest version whose source was read for this project. Versions before 2.16 keep each unit's fp8 weights
    alive until backward, since they do not recognize FSDP2.
    """
    # An isolated build would compile against another torch.
    install = "pip install --no-build-isolation 'fsdp-cp[te]'"
    return optional_package(module, install, "transformer-engine", at_least)
