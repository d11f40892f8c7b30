"""Hypothesis strategies for damaged files of JSON lines."""

import json
import math

from hypothesis import strategies as st

KEYS = ("student/loss", "fake/loss", "fake/loss/t0.25", "student/grad_norm", "student/skipped", "student/lr",
        "perf/tokens_per_second", "memory/peak_gib", "fake/loss/$\\frac$", "student/loss<script>", "fake/grad_norm",
        "student/loss\ud800", "perf/seconds/fake",
        "perf/seconds/fake/data", "perf/seconds/fake/\ud800",
        "norms", "role", "started", "from_step", "command", "versions", "host", "clean", "commit",
        "device", "world_size", "directory", "config")  # fmt: skip

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**63),
    st.just(10**400),  # too large for a float
    st.floats(width=32),  # NaN and infinities among them, which Python's json writes and reads
    st.sampled_from([math.nan, math.inf, 1e38, -1e38, 5e-324, 0.0, "<script>alert(1)</script>", "\ud800", "7", ""]),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
steps = st.one_of(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), odd)
objects = st.dictionaries(st.sampled_from(KEYS), odd, max_size=6)
records = st.builds(lambda step, rest: rest | {"step": step}, steps, objects)
whole = st.one_of(records, records, records, objects, odd).map(lambda value: json.dumps(value).encode())
line = st.one_of(
    whole,
    whole,
    whole,
    st.builds(lambda text, at: text[:at], whole, st.integers(0, 40)),  # torn
    st.builds(lambda text, at: text[:at] + text[at + 1 :], whole, st.integers(0, 40)),
    st.builds(lambda a, b: a + b, whole, whole),  # two at once
    st.binary(max_size=12).filter(lambda text: b"\n" not in text),
    st.sampled_from([b"", b"  ", b"\xff\xfe{", b"\x00\x00\x00", b"\xef\xbb\xbf{}", b"[" * 3_000, b'{"a":' * 3_000,
                     b'{"step": ' + b"9" * 5000 + b"}", b'{"step": 3, "x": "' + b"a" * 20_000 + b'"}',
                     b'{"step": 1e400}', b'{"step": true}', b'{"step": 3.0}', b'{"step": "4"}', b'{"step": -1}',
                     b'{"step": 4}\r', b'{"step": 2, "a": "\xe2\x80\xa8"}', b'\x0b{"step": 2}']),
)  # fmt: skip
files = st.builds(
    lambda lines, newline: b"\n".join(lines) + newline, st.lists(line, max_size=8), st.sampled_from([b"", b"\n"])
)
