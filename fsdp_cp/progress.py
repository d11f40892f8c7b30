"""Progress of long work on rank 0: a bar on a terminal, otherwise a log line each minute."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from fsdp_cp.errors import duration
from fsdp_cp.launch import rank

log = logging.getLogger(__name__)

_BETWEEN_LINES = 60.0
_LONG = 5.0


def bar(total: int, what: str, unit: str, **settings: Any) -> tqdm:
    """Return a progress bar of ``tqdm``, visible only on rank 0 and on a terminal; ``unit`` is a singular noun."""
    return tqdm(total=total, desc=what, unit=unit, leave=False, disable=True if rank() else None, **settings)


@contextmanager
def progress(total: int, what: str, unit: str) -> Iterator[Callable[[int], object]]:
    """Show the progress of a loop of ``total`` units. Yields a function that counts ``n`` more units as done."""
    done, started = 0, time.monotonic()
    due = started + _BETWEEN_LINES

    with bar(total, what, unit) as shown:

        def advance(n: int = 1) -> None:
            nonlocal done, due
            done += n
            shown.update(n)
            now = time.monotonic()
            if shown.disable and rank() == 0 and now >= due:
                due = now + _BETWEEN_LINES
                left = (now - started) / done * (total - done)
                log.info("%s: %d of %d, about %s left", what, done, total, duration(left))

        yield advance


class Console(logging.StreamHandler):
    """Log handler that writes to stdout immediately, above a visible bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except Exception:
            self.handleError(record)


def log_to_console() -> None:
    """Log to stdout: rank 0 from level INFO, other ranks from WARNING. If handlers exist, change nothing."""
    level = logging.INFO if rank() == 0 else logging.WARNING
    logging.basicConfig(format="%(message)s", level=level, handlers=[Console(sys.stdout)])


def first_rank_log(name: str) -> logging.Logger:
    """Return a logger for messages that are the same on all ranks: only rank 0 writes them."""
    logger = logging.getLogger(name)
    logger.addFilter(lambda _: rank() == 0)
    return logger


@contextmanager
def announced(what: str) -> Iterator[None]:
    """If the block takes more than 5 seconds, log on rank 0 that training waits for ``what``, then how long."""
    if rank() != 0:
        yield
        return
    started = time.monotonic()
    timer = threading.Timer(_LONG, log.info, ("training waits for %s", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if (seconds := time.monotonic() - started) > _LONG:
        log.info("training waited %s for %s", duration(seconds), what)
