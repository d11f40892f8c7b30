"""Files and stores that torchrun shares with its workers: the error file, and the store through which ranks meet."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch.distributed as dist
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
    partial = f"{file}.part"  # torchrun removes the worker's folder
    try:
        with open(partial, "w") as stream:
            json.dump(about, stream)
        os.replace(partial, file)
    except OSError as failure:
        print(f"torchrun's error file {file} cannot be written ({failure.strerror})", file=sys.stderr)


class _AtomicHandler(ErrorHandler):
    def record_exception(self, e: BaseException) -> None:
        write_error(f"{type(e).__name__}: {e}", traceback.format_exc())


def own_part(timeout: timedelta) -> dist.Store | None:
    """Return a part of the agent's store to which no earlier start of these ranks has written. Called by all ranks.

    With ``--max-restarts`` torchrun restarts the ranks after one has died, and torch 2.13 gives them the store of the
    previous ranks. There they would find the addresses of dead processes (gloo: ``Connection refused``). The restart
    count cannot name the parts, since the torchruns of several nodes count differently.

    Args:
        timeout: timeout of store operations and of the agreement between ranks.

    Returns:
        ``None`` if ranks cannot restart or do not use the agent's store: ``init_process_group`` then makes a store.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timeout)
    return dist.PrefixStore(agree(store, int(env["RANK"]), int(env["WORLD_SIZE"]), timeout), store)


def agree(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """Return a name that only these ``ranks`` processes share, whatever earlier processes wrote into ``store``.

    Rank 0 makes the name and sends it to each rank that wrote a hello. It also answers the hello of an earlier process,
    but nobody waits for that answer. The ranks have agreed when all have confirmed the name.

    Raises:
        RuntimeError: not all ranks confirmed within ``timeout``.
    """
    if rank != 0:
        hello = uuid.uuid4().hex
        store.set(f"fsdp_cp/hello/{rank}", hello)
        store.wait([f"fsdp_cp/welcome/{hello}"], timeout)
        name = store.get(f"fsdp_cp/welcome/{hello}").decode()
        store.set(f"fsdp_cp/{name}/{rank}", "")
        return f"fsdp_cp/{name}"
    name, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    others, welcomed = range(1, ranks), set[str]()
    while not store.check([f"fsdp_cp/{name}/{other}" for other in others]):
        for other in others:
            if store.check([f"fsdp_cp/hello/{other}"]):
                hello = store.get(f"fsdp_cp/hello/{other}").decode()
                if hello not in welcomed:
                    store.set(f"fsdp_cp/welcome/{hello}", name)
                    welcomed.add(hello)
        if time.monotonic() > deadline:
            raise RuntimeError(f"only some of the {ranks} ranks connected within {timeout.total_seconds():g} s")
        time.sleep(0.02)
    return f"fsdp_cp/{name}"
