import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leanbench.core import syntax
from leanbench.core.axes import AXES
from leanbench.core.axis import Switch, Words
from leanbench.core.errors import InvalidValue, Reason, UserError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4096", (4096,)),
        ("1k,4k,16k", (1024, 4096, 16384)),
        ("1K, 2m", (1024, 2 * 1024 * 1024)),
        ("1k:8k:x2", (1024, 2048, 4096, 8192)),
        ("1:99:x10", (1, 10)),
        ("4k:16k:+4k", (4096, 8192, 12288, 16384)),
        ("1:6:+2", (1, 3, 5)),
        ("7:7:x2", (7,)),
        ("4k,1k:4k:x2,1024", (4096, 1024, 2048)),
        ("1:10000:+1", tuple(range(1, 10001))),
        ("2147483647", (2**31 - 1,)),
    ],
)
def test_numbers(text, values):
    assert AXES["context"].parse(text) == values


@pytest.mark.parametrize(
    ("axis", "text", "values"),
    [
        ("heads", "56,32/8,7/1", ((56, 56), (32, 8), (7, 1))),
        ("heads", "8:32:x2", ((8, 8), (16, 16), (32, 32))),
        ("head_dim", "64,128", (64, 128)),
        ("dtype", "FP16,bf16", ("fp16", "bf16")),
        ("kv_layout", "hnd,NHD", ("HND", "NHD")),
        ("causal", "yes,NONCAUSAL", (True, False)),
        ("sinks", "no,sinks,no-sinks", (False, True)),
        ("capacity", "exact,4x,1X,32k,1.5x", (None, "4x", 32768, "1.5x")),
        ("select", "none,2k,16X128,512:2k:x2", (None, 2048, "16x128", 512, 1024)),
    ],
)
def test_values_of_other_axes(axis, text, values):
    assert AXES[axis].parse(text) == values
    assert AXES[axis].parse(",".join(map(AXES[axis].write, values))) == values


def test_how_switches_and_capacities_are_written():
    assert list(map(AXES["alibi"].write, (True, False))) == ["alibi", "no-alibi"]
    assert list(map(AXES["capacity"].write, (None, "4x", 32768))) == ["exact", "4x", "32768"]
    assert syntax.parse_names("kernels", "lean, fa2,lean") == ("lean", "fa2")


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("page_size", "none,16,256", (None, 16, 256)),
        ("window_left", "none,0,4k", (-1, 0, 4096)),
        ("softcap", "none,50,0.5", (0.0, 50.0, 0.5)),
        ("append", "none,1", (0, 1)),
        ("rotary_dim", "none,64", (0, 64)),
        ("v_head_dim", "none,128", (None, 128)),
        ("q_lens", "none,512+1x3", (None, (512, 1, 1, 1))),
    ],
)
def test_none_is_off(name, text, values):
    assert AXES[name].parse(text) == values
    assert AXES[name].parse(",".join(map(AXES[name].write, values))) == values


def test_seconds_and_shares():
    seconds = {"90": 90, "90s": 90, "10m": 600, "2h": 7200, "1.5 m": 90, "0.2S": 0.2}
    for text, value in seconds.items():
        assert syntax.parse_seconds("--budget", text) == pytest.approx(value), text
    shares = {"5%": 0.05, "5 %": 0.05, "0.5%": 0.005, " 0% ": 0.0, "50%": 0.5, "12.3456%": 0.123456}
    for text, share in shares.items():
        assert syntax.parse_percent("--ci", text, most=50) == pytest.approx(share), text
    assert syntax.parse_percent("--ci", "0.000001%", most=50, above_zero=True) == pytest.approx(
        1e-8
    )
    assert syntax.parse_percent("--tolerance", "100%", most=100) == 1.0
    parse: Any = partial(syntax.parse_seconds, "--budget")
    for text in ("", "-1", "10 minutes", "1d", "inf", "99999999999"):
        assert rejection(parse, text).reason is Reason.SYNTAX, text
    for text in ("0", "0s", "0.000 h"):
        assert rejection(parse, text).reason is Reason.NOT_POSITIVE, text
    parse = partial(syntax.parse_percent, "--ci", most=50, above_zero=True)
    for text in (*("", "5", "0", "0.05", "-1%", "%", "5%%"), "1e1%", "nan%", "٣%", "999999999%"):
        assert rejection(parse, text).reason is Reason.SYNTAX, text
    assert rejection(parse, "50.1%").reason is Reason.ABOVE_MAXIMUM
    for text in ("0%", " 0.000 %"):
        assert rejection(parse, text).reason is Reason.NOT_POSITIVE, text


#: (axis, text, rejected entry of the text, reason, limit).
REJECTED = [
    *(("context", text, text, Reason.EMPTY_ENTRY, None) for text in ("", "1k,,4k", "1k,")),
    *(
        ("context", text, text, Reason.SYNTAX, None)
        for text in ("4q", "1.5k", "1_000", "٣", "1" * 5000, "1k:4k", "1k:4k:2", "1k:4k:x2:x2")
    ),
    *(("context", text, text, Reason.BELOW_MINIMUM, 1) for text in ("0", "0k", "-5")),
    *(
        ("context", text, text, Reason.ABOVE_MAXIMUM, syntax.MAX_NUMBER)
        for text in ("2147483648", "9999999999m", "99999999999999")
    ),
    ("context", "4k:1k:x2", "4k:1k:x2", Reason.REVERSED_RANGE, None),
    *(
        ("context", text, text, Reason.ENDLESS_RANGE, None)
        for text in ("1k:4k:x1", "1k:4k:x0", "1k:4k:+0")
    ),
    *(
        ("context", text, text, Reason.TOO_MANY_VALUES, syntax.MAX_VALUES)
        for text in ("1:10001:+1", "1:10000:+1,10001", "1:2147483647:+1")
    ),
    ("batch", "99999999999", "99999999999", Reason.ABOVE_MAXIMUM, 2**20),
    ("head_dim", "99999999999", "99999999999", Reason.ABOVE_MAXIMUM, 1024),
    ("head_dim", "64,65", 65, Reason.NOT_A_MULTIPLE, 8),
    ("heads", "32/5", "32/5", Reason.UNEVEN_HEADS, None),
    ("heads", "8/32", "8/32", Reason.UNEVEN_HEADS, None),
    *(("heads", text, text, Reason.SYNTAX, None) for text in ("32/", "32/8/2", "32:8", "many")),
    ("heads", "32/0", "0", Reason.BELOW_MINIMUM, 1),
    ("dtype", "fp16,fp8", "fp8", Reason.UNSUPPORTED, None),
    ("kv_layout", "HNDD", "HNDD", Reason.UNSUPPORTED, None),
    ("kv_dtype", "fp8", "fp8", Reason.UNSUPPORTED, None),
    ("q_len", "0", "0", Reason.BELOW_MINIMUM, 1),
    ("q_lens", "512+0", "0", Reason.BELOW_MINIMUM, 1),
    ("page_size", "0", "0", Reason.BELOW_MINIMUM, 1),
    ("page_size", "nothing", "nothing", Reason.SYNTAX, None),
    ("page_size", "none,,16", "none,,16", Reason.EMPTY_ENTRY, None),
    ("leftpad", "on", "on", Reason.UNSUPPORTED, None),
    ("window_left", "-1", "-1", Reason.BELOW_MINIMUM, 0),
    ("softcap", "-1", "-1", Reason.SYNTAX, None),
    ("softcap", "0", 0.0, Reason.NOT_POSITIVE, None),
    ("append", "0", "0", Reason.BELOW_MINIMUM, 1),
    ("rotary_dim", "24", 24, Reason.NOT_A_MULTIPLE, 16),
    ("capacity", "0", "0", Reason.BELOW_MINIMUM, 1),
    ("capacity", "0.9x", "0.9x", Reason.BELOW_MINIMUM, 1),
    ("select", "0", "0", Reason.BELOW_MINIMUM, 1),
    ("select", "65536x65536", "65536x65536", Reason.ABOVE_MAXIMUM, 2**31 - 1),
    *(
        ("select", text, text, Reason.SYNTAX, None)
        for text in ("16x", "x128", "0x128", "16x0", "-2x3", "2kx16", "2x3x4", "٣x٣")
    ),
    *(
        ("capacity", text, text, Reason.SYNTAX, None)
        for text in ("-4x", "x", "4xx", "none", "nan", "1e3x", "٣x")
    ),
]


def rejection(parse: Callable[[str], object], text: str) -> InvalidValue:
    """Return the error that `parse` raises for `text`."""
    with pytest.raises(InvalidValue) as caught:
        parse(text)
    return caught.value


@pytest.mark.parametrize(("axis", "text", "entry", "reason", "limit"), REJECTED)
def test_invalid_values(axis, text, entry, reason, limit):
    error = rejection(AXES[axis].parse, text)
    assert (error.name, error.value, error.reason, error.limit) == (axis, entry, reason, limit)


def test_messages(snapshot):
    """One message for each axis and reason; `pytest --snapshot-update` rewrites them."""
    errors = [rejection(AXES[axis].parse, text) for axis, text, *_ in REJECTED if len(text) < 100]
    of_problems = {Reason.NOT_ONE_EACH, Reason.NEEDS, Reason.CONFLICT}
    assert {error.reason for error in errors} == set(Reason) - of_problems
    messages = {(error.name, error.reason): str(error) for error in errors}
    assert "\n".join(messages.values()) == snapshot


PARSERS = [
    *(axis.parse for axis in AXES.values()),
    lambda text: (syntax.parse_seconds("--budget", text),),
]


@given(
    st.one_of(
        st.text(alphabet="0123456789km:x+,/.-e ", max_size=30),
        st.text(max_size=20),
        st.lists(
            st.from_regex(r"\d{1,10}[km]?:\d{1,10}[km]?:[x+]\d{1,10}[km]?", fullmatch=True),
            max_size=4,
        ).map(",".join),
    )
)
@example("1:1m:+1")
@example("1:2147483647:x2,1:9999:+1")
def test_any_text_is_values_or_a_user_error_and_bounded(text):
    for parse in PARSERS:
        try:
            values = parse(text)
        except UserError:
            continue
        assert 1 <= len(values) <= syntax.MAX_VALUES
        assert len(set(values)) == len(values)
        for value in values:
            if isinstance(value, int):
                # None of a window is -1, of appended tokens 0.
                assert -1 <= value <= syntax.MAX_NUMBER
            if isinstance(value, float):
                assert 0 < value < math.inf


def test_letters_and_words_name_one_axis_each():
    letters = [axis.letter for axis in AXES.values() if axis.letter]
    assert len(letters) == len(set(letters))
    bare = [axis.values for axis in AXES.values() if not axis.letter]
    words = [word for values in bare if isinstance(values, Words) for word in values.choices]
    switches = [values for values in bare if isinstance(values, Switch)]
    words += [word for values in switches for word in (values.on, values.off)]
    assert len(words) == len(set(words))
