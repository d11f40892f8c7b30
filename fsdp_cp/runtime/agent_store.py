"""Store of torchrun's agent, with a separate part for each start of the ranks."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist


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
            raise RuntimeError(f"not all of {ranks} ranks came within {timeout.total_seconds():g} s")
        time.sleep(0.02)
    return f"fsdp_cp/{name}"
