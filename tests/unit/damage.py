"""Generated damage to files, and checks of what reads them."""

import contextlib
import hashlib
import io
import json
import math
import os
import warnings
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fsdp_cp.errors import UserError


def examples(count: int):
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


# ---------------------------------------------------------------- damage

BYTES = st.lists(
    st.tuples(
        st.sampled_from(["cut", "flip", "overwrite", "insert", "remove", "zero", "swap"]),
        st.floats(0, 1),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=3,
)


def damaged(data: bytes, steps, head: int = 0) -> bytes:
    """Return ``data`` after ``steps``. With ``head``, about half of them change the first ``head`` bytes."""
    changed = bytearray(data)
    for what, where, seed in steps:
        span = min(head, len(changed)) if head and seed % 2 else len(changed)
        at = min(int(where * span), max(0, len(changed) - 1))
        noise = hashlib.sha256(str(seed).encode()).digest()[: 1 + seed % 24]
        if what == "cut":
            del changed[at:]
        elif what == "flip" and changed:
            changed[at] ^= 1 << seed % 8
        elif what == "overwrite":
            changed[at : at + len(noise)] = noise
        elif what == "insert":
            changed[at:at] = noise
        elif what == "remove":
            del changed[at : at + len(noise)]
        elif what == "zero":
            changed[at : at + 4096] = bytes(len(changed[at : at + 4096]))
        elif what == "swap":
            changed[at : at + 16] = changed[at : at + 16][::-1]
    return bytes(changed)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(
        [0, -1, 1, 2, 3, 10**9, -(10**9), 10**30, 1e308, math.nan, math.inf, 0.5, "", "x", "../x", "\ud800"]
    )
    | st.integers()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["set", "set", "remove", "add"]), st.integers(0, 10**6), JUNK), min_size=1, max_size=3
)


def changed_json(text: str, changes) -> str:
    """Return the JSON object with values replaced, keys removed or added."""
    content = json.loads(text)
    for what, number, value in changes:
        key = sorted(content)[number % len(content)] if content else "a"
        if what == "remove":
            content.pop(key, None)
        else:
            content[key if what == "set" else f"key_{number}"] = value
    return json.dumps(content)


# ---------------------------------------------------------------- checks


def refusal(work) -> str | None:
    """Run ``work`` and return its refusal of one line, or ``None``. Any other exception fails the test."""
    noise = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(noise), contextlib.redirect_stdout(noise):
            warnings.simplefilter("ignore")
            work()
    except UserError as error:
        assert str(error) and "\n" not in str(error), repr(str(error))
        return str(error)
    return None


def command(main, *arguments) -> str | None:
    """Run a command's ``main``: check that it exits with 0, or with 2 and one line; return the line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main([str(argument) for argument in arguments])
    said = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
    assert "Traceback" not in err.getvalue()
    assert (code, len(said)) in ((0, 0), (2, 1)), (code, err.getvalue())
    return said[0] if said else None


def snapshot(*folders: Path) -> dict[str, str]:
    """Return a hash of every file below ``folders``."""
    found = {}
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            about = os.readlink(file) if file.is_symlink() else ""
            if file.is_file() and not file.is_symlink():
                about = hashlib.sha256(file.read_bytes()).hexdigest()
            found[str(file)] = about
    return found
