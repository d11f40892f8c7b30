"""Error file of a torchrun worker, written atomically: torchrun fails when it reads an incomplete file."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

P = ParamSpec("P")
T = TypeVar("T")


def recorded(main: Callable[P, T]) -> Callable[P, T | None]:
    """Wrap ``main`` in torch's ``record``, so that torchrun's summary ends with the exception that ``main`` raises.

    The wrapper returns ``None`` after ``sys.exit(0)``.

    torch's handler writes the file piece by piece. If another worker has died, torchrun may send this one SIGTERM in
    between. It then reads an incomplete file and fails with JSONDecodeError instead of restarting (``--max-restarts``).
    """
    return record(main, _AtomicHandler())


def write_error(message: str, callstack: str | None = None) -> None:
    """Write the error file if torchrun requests one (``TORCHELASTIC_ERROR_FILE``).

    Args:
        message: one line.
        callstack: traceback, which torchrun shows instead of the message.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    more = {} if callstack is None else {"py_callstack": callstack}
    about = {"message": {"message": message, "extraInfo": {**more, "timestamp": str(int(time.time()))}}}
    part = f"{file}.part"  # torchrun removes the worker's folder
    try:
        with open(part, "w") as stream:
            json.dump(about, stream)
        os.replace(part, file)
    except OSError as failure:
        print(f"torchrun's error file {file} cannot be written ({failure.strerror})", file=sys.stderr)


class _AtomicHandler(ErrorHandler):
    def record_exception(self, e: BaseException) -> None:
        write_error(f"{type(e).__name__}: {e}", traceback.format_exc())
