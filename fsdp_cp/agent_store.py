"""The store of torchrun's agent, a part of it for each start of the ranks."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist


def own_part(timeout: timedelta) -> dist.Store | None:
    """A part of the agent's store to which no earlier start of these ranks has written. Called by all ranks.

    With ``--max-restarts`` torchrun starts the ranks again when one has died, and torch 2.13 lets them meet in the
    store in which those before them met: they would find the addresses of dead processes (gloo: ``Connection
    refused``). How often they have been started does not tell the parts apart: torchruns of several nodes count
    differently.

    Args:
        timeout: of the store, and of meeting in it.

    Returns:
        ``None`` where ranks are started once, or have a store of their own: ``init_process_group`` makes it then.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timeout)
    return dist.PrefixStore(agree(store, int(env["RANK"]), int(env["WORLD_SIZE"]), timeout), store)


def agree(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """A name that these ``ranks`` processes alone have agreed on, whatever others wrote into ``store`` before.

    Rank 0 makes the name and gives it to each that says hello; a hello that an earlier process left is answered too,
    but nobody waits for that answer. It is agreed on when all have confirmed it.

    Raises:
        RuntimeError: not all have come in time.
    """
    if rank != 0:
        own = uuid.uuid4().hex
        store.set(f"fsdp_cp/hello/{rank}", own)
        store.wait([f"fsdp_cp/welcome/{own}"], timeout)
        name = store.get(f"fsdp_cp/welcome/{own}").decode()
        store.set(f"fsdp_cp/{name}/{rank}", "")
        return f"fsdp_cp/{name}"
    name, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    others, welcomed = range(1, ranks), set[str]()
    while not store.check([f"fsdp_cp/{name}/{other}" for other in others]):
        for other in others:
            if store.check([f"fsdp_cp/hello/{other}"]):
                own = store.get(f"fsdp_cp/hello/{other}").decode()
                if own not in welcomed:
                    store.set(f"fsdp_cp/welcome/{own}", name)
                    welcomed.add(own)
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {ranks} ranks have come within {timeout.total_seconds():g} s")
        time.sleep(0.02)
    return f"fsdp_cp/{name}"
