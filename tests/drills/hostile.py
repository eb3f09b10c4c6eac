"""Inputs that nobody means well, how many of them a run tries, and the limits that hold while it
does.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from depth import DEEP
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

#: Inputs of all fuzzed tests together; `LEANBENCH_FUZZ_INPUTS=100000` is the full drill.
INPUTS = int(os.environ.get("LEANBENCH_FUZZ_INPUTS", "2000" if DEEP else "400"))
#: CPU time of one input, and memory beyond what the process has already.
MOST_SECONDS = 20
MOST_BYTES = 3 << 30

MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
#: What stands where a number, a name or a list should.
SCALARS: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        16,
        64,
        65,
        2**31,
        2**63,
        10**30,
        -(10**30),
        0.0,
        -0.5,
        1e-300,
        1e300,
    ),
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        "1",
        "lean",
        "ok",
        "noisy",
        "measured",
        "nan",
        "../../x",
        "\x00",
    ),
    *(
        "\ud7ff\u202e",
        "a\nb",
        "{{ 7*7 }}",
        "=cmd()",
        "<b>",
        "[/b]",
        MARKUP,
        "9" * 400,
        [],
        {},
        [[]],
        [1, 2],
        {"a": {}},
        [None],
    ),
]
VALUES = st.one_of(
    st.sampled_from(SCALARS),
    st.text(max_size=12),
    st.integers(),
    st.floats(),
    st.lists(st.integers(-2, 5000), max_size=4),
)

_TOKENS = [
    *"0123456789kmKMxX+-:,/. eE%\t\n\"'[]{}#=_",
    *(
        "1k",
        "4k",
        "32/8",
        "56",
        "none",
        "fp16",
        "HND",
        "lean",
        "fa2",
        "0.5",
        "1",
        "8",
        "64",
        "128",
        "nan",
        "inf",
        "--",
    ),
    *(
        "1:1e12:+1",
        "1:2147483647:+1",
        "1:2147483647:x2",
        "1k:512k:x2",
        "1:10000:+1",
        "2147483647",
        "9" * 60,
        "٣",
        "²",
    ),
]
#: What may follow a flag, as a person mistypes it or an enemy types it.
TYPED = st.one_of(st.lists(st.sampled_from(_TOKENS), max_size=8).map("".join), st.text(max_size=20))


def share(part: float) -> settings:
    """Settings of a test that takes this part of all inputs."""
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(
        max_examples=max(10, round(INPUTS * part)), suppress_health_check=checks, database=None
    )


@contextmanager
def within_limits() -> Iterator[None]:
    """MemoryError, or TimeoutError, for an input that takes more than it may."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"an input took more than {MOST_SECONDS} s of CPU time")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, late)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """A JSON document with up to three values replaced, removed or repeated."""
    root = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, 3))):
        where, key = draw(st.sampled_from(list(_places(root)) or [(root, 0)]))
        match draw(st.sampled_from(["replace", "replace", "replace", "remove", "repeat"])):
            case "replace":
                # A copy: the next change may be inside of it.
                where[key] = copy.deepcopy(draw(VALUES))
            case "remove" if where is not root:
                del where[key]
            case "repeat" if isinstance(where, list) and where is not root:
                where.append(copy.deepcopy(where[key]))
    return root[0]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


@st.composite
def torn(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes cut, overwritten or with others put between."""
    at = draw(st.integers(0, len(content)))
    more = draw(
        st.one_of(
            st.binary(max_size=6),
            st.sampled_from([b"[" * 100_000, b"\xff\xfe", b"\n\n", b"\x00" * 9]),
        )
    )
    match draw(st.sampled_from(["cut", "insert", "overwrite", "append"])):
        case "cut":
            return content[:at]
        case "insert":
            return content[:at] + more + content[at:]
        case "overwrite":
            return content[:at] + more + content[at + len(more) :]
    return content + more


@st.composite
def damaged_json(draw: st.DrawFn, document: Any) -> bytes:
    """A document's bytes with wrong values in it, or with wrong bytes."""
    if draw(st.integers(0, 3)):
        return json.dumps(draw(changed(document))).encode("utf-8", "surrogatepass")
    return draw(torn(json.dumps(document).encode()))
