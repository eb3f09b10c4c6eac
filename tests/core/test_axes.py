import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leanbench.core.axes import AXES
from leanbench.core.axis_values import Switch, Words
from leanbench.core.errors import UserError
from leanbench.core.syntax import (
    MAX_NUMBER,
    MAX_VALUES,
    parse_names,
    parse_numbers,
    parse_percent,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4096", (4096,)),
        ("1k,4k,16k", (1024, 4096, 16384)),
        ("1K, 2m", (1024, 2 * 1024 * 1024)),
        ("1k:8k:x2", (1024, 2048, 4096, 8192)),
        ("1:100:x10", (1, 10, 100)),
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


@pytest.mark.parametrize(("axis", "limit"), [("batch", 2**20), ("head_dim", 1024)])
def test_a_number_above_every_limit_is_told_the_axis_limit(axis, limit):
    with pytest.raises(UserError, match=f"{axis} 99999999999 is above the limit of {limit}:"):
        AXES[axis].parse("99999999999")


def test_the_papers_contexts_are_ten_doublings():
    assert AXES["context"].parse("1k:512k:x2") == tuple(1024 * 2**n for n in range(10))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has an empty entry"),
        ("1k,,4k", "has an empty entry"),
        ("1k,", "has an empty entry"),
        ("4q", "'4q' is not understood, write a whole number"),
        ("1.5k", "'1.5k' is not understood"),
        ("1_000", "'1_000' is not understood"),
        ("٣", "is not understood"),
        ("0", "0 is below 1"),
        ("0k", "0k is below 1"),
        ("-5", "-5 is negative"),
        ("2147483648", "above the limit of 2147483647"),
        ("9999999999m", "above the limit"),
        ("99999999999999", "above the limit of 2147483647"),
        ("1" * 5000, "is not understood"),
        ("1k:4k", "is not a range"),
        ("1k:4k:2", "is not a range"),
        ("1k:4k:x2:x2", "is not a range"),
        ("4k:1k:x2", "starts above its end"),
        ("1k:4k:x1", "never reaches its end"),
        ("1k:4k:x0", "never reaches its end: multiply by at least 2"),
        ("1k:4k:+0", "never reaches its end: add at least 1, as in 4k:32k:+4k"),
        ("1:10001:+1", "holds more than 10000 values"),
        ("1:10000:+1,10001", "holds more than 10000 values"),
        ("1:2147483647:+1", "holds more than 10000 values"),
    ],
)
def test_wrong_numbers_name_the_text_and_the_fix(text, words):
    with pytest.raises(UserError) as error:
        AXES["context"].parse(text)
    assert words in str(error.value)
    assert str(error.value).startswith("context ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("56", ((56, 56),)),
        ("56,32/8", ((56, 56), (32, 8))),
        ("8:32:x2", ((8, 8), (16, 16), (32, 32))),
        ("7/1", ((7, 1),)),
    ],
)
def test_heads(text, pairs):
    assert AXES["heads"].parse(text) == pairs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("32/5", "32 query heads are not a multiple of 5 KV heads"),
        ("32/", "heads '32/' is not understood, write query heads/KV heads such as 32/8"),
        ("32/8/2", "heads '32/8/2' is not understood, write query heads/KV heads"),
        ("32/0", "0 is below 1"),
        ("32:8", "or query heads/KV heads such as 32/8"),
        (
            "many",
            "heads 'many' is not understood, write query heads, or query/KV heads, such as 56"
            " or 32/8$",
        ),
        ("8/32", "8 query heads are not a multiple of 32 KV heads"),
    ],
)
def test_wrong_heads(text, words):
    with pytest.raises(UserError, match=words):
        AXES["heads"].parse(text)


def test_names_of_shapes_and_types():
    assert AXES["head_dim"].parse("64,128") == (64, 128)
    assert AXES["dtype"].parse("FP16,bf16") == ("fp16", "bf16")
    assert AXES["kv_layout"].parse("hnd,NHD") == ("HND", "NHD")
    assert parse_names("kernels", "lean, fa2,lean") == ("lean", "fa2")


def test_unsupported_names_suggest_what_there_is():
    with pytest.raises(
        UserError, match=r"^head_dim 65 is no multiple of 8: choose one, up to 1024$"
    ):
        AXES["head_dim"].parse("64,65")
    with pytest.raises(UserError, match="dtype 'fp8' is not supported, choose from fp16, bf16"):
        AXES["dtype"].parse("fp8")
    with pytest.raises(UserError, match="kv_layout 'HNDD' is not supported, choose from HND, NHD"):
        AXES["kv_layout"].parse("HNDD")


def test_query_tokens():
    assert AXES["q_len"].parse("1,4,16") == (1, 4, 16)
    assert AXES["q_len"].parse("1:16:x2") == (1, 2, 4, 8, 16)
    with pytest.raises(UserError, match=r"^q_len 0 is below 1"):
        AXES["q_len"].parse("0")


def test_page_sizes():
    assert AXES["page_size"].parse("none,16,256,NONE") == (None, 16, 256)
    assert AXES["page_size"].parse("16:256:x2") == (16, 32, 64, 128, 256)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "0",
            "page_size 0 is below 1, the least there is: write a number of tokens such as 64,"
            " or none for a",
        ),
        (
            "nothing",
            "page_size 'nothing' is not understood, write a number of tokens such as 64, or"
            " none for a",
        ),
        ("none,,16", "page_size 'none,,16' has an empty entry"),
    ],
)
def test_wrong_page_sizes(text, sentence):
    with pytest.raises(UserError) as error:
        AXES["page_size"].parse(text)
    assert str(error.value).startswith(sentence)


def test_switches():
    assert AXES["causal"].parse("yes,NONCAUSAL") == (True, False)
    assert AXES["sinks"].parse("no,sinks,no-sinks") == (False, True)
    assert list(map(AXES["alibi"].write, (True, False))) == ["alibi", "no-alibi"]
    with pytest.raises(
        UserError, match=r"^leftpad 'on' is not understood, write yes or leftpad, no or no-leftpad$"
    ):
        AXES["leftpad"].parse("on")


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
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


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("window_left", "-1", "window_left -1 is negative, the least is 0"),
        ("softcap", "-1", "softcap '-1' is not a soft cap"),
        ("append", "0", "append 0 is below 1, the least there is"),
        ("rotary_dim", "24", "rotary_dim 24 is no multiple of 16"),
        ("q_lens", "512+0", "q_lens 0 is below 1"),
        ("kv_dtype", "fp8", "kv_dtype 'fp8' is not supported, choose from same, e4m3, e5m2"),
    ],
)
def test_wrong_kinds(name, text, sentence):
    with pytest.raises(UserError) as error:
        AXES[name].parse(text)
    assert str(error.value).startswith(sentence)


def test_capacities():
    assert AXES["capacity"].parse("exact,4x,1X,32k,1.5x") == (None, "4x", 32768, "1.5x")
    assert list(map(AXES["capacity"].write, (None, "4x", 32768))) == ["exact", "4x", "32768"]


@pytest.mark.parametrize("text", ["0", "0.9x", "-4x", "x", "4xx", "none", "nan", "1e3x", "٣x"])
def test_wrong_capacities(text):
    with pytest.raises(UserError, match=r"write exact, a multiple of the longest sequence"):
        AXES["capacity"].parse(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200), ("1.5 m", 90), ("0.2S", 0.2)],
)
def test_seconds(text, seconds):
    assert parse_seconds("--budget", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-1", "10 minutes", "1d", "inf", "99999999999"])
def test_wrong_seconds(text):
    with pytest.raises(UserError, match="is not a duration, write for example 90s, 10m or 2h"):
        parse_seconds("--budget", text)


@pytest.mark.parametrize("text", ["0", "0s", "0.000 h"])
def test_no_seconds_are_a_duration_that_is_too_short(text):
    with pytest.raises(UserError) as error:
        parse_seconds("--budget", text)
    assert (
        str(error.value) == f"--budget {text!r} must be above 0, write for example 90s, 10m or 2h"
    )


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("5%", 0.05),
        ("5 %", 0.05),
        ("0.5%", 0.005),
        (" 0% ", 0.0),
        ("50%", 0.5),
        ("12.345678%", 0.12345678),
    ],
)
def test_percent(text, share):
    assert parse_percent("--ci", text, most=50) == pytest.approx(share)


@pytest.mark.parametrize(
    "text", ["", "5", "0.05", "50.1%", "-1%", "%", "5%%", "1e1%", "nan%", "٣%", "999999999%"]
)
def test_wrong_percent(text):
    with pytest.raises(UserError) as error:
        parse_percent("--ci", text, most=50)
    assert (
        str(error.value)
        == f"--ci {text!r} is not a percentage, write a number from 0% to 50% with its sign, as"
        " in 5%"
    )


@pytest.mark.parametrize("text", ["0%", " 0.000 %"])
def test_zero_percent_is_refused_where_it_means_nothing(text):
    assert parse_percent("--margin", text, most=50) == 0.0
    with pytest.raises(UserError) as error:
        parse_percent("--ci", text, most=50, above_zero=True)
    assert (
        str(error.value)
        == f"--ci {text!r} must be above 0%, write a number up to 50% with its sign, as in 5%"
    )


def test_percent_above_zero():
    assert parse_percent("--ci", "0.000001%", most=50, above_zero=True) == pytest.approx(1e-8)
    with pytest.raises(
        UserError,
        match=r"--ci '0' is not a percentage, write a number above 0% and up to 50% with its",
    ):
        parse_percent("--ci", "0", most=50, above_zero=True)


def test_the_most_of_a_percentage_is_the_callers():
    assert parse_percent("--tolerance", "100%", most=100) == 1.0
    with pytest.raises(
        UserError, match=r"--tolerance '101%' is not a percentage, write a number from 0% to 100%"
    ):
        parse_percent("--tolerance", "101%", most=100)


PARSERS = [
    lambda text: parse_numbers("group", text),
    *(axis.parse for axis in AXES.values()),
    lambda text: (parse_seconds("--budget", text),),
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
        assert 1 <= len(values) <= MAX_VALUES
        assert len(set(values)) == len(values)
        for value in values:
            if isinstance(value, int):
                assert 1 <= value <= MAX_NUMBER
            if isinstance(value, float):
                assert 0 < value < math.inf


def test_the_docs_have_the_table_of_axes():
    lines = [
        f"| `{axis.flag}` | {axis.letter} | {axis.grid_text} | {axis.help} |"
        for axis in AXES.values()
    ]
    text = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")
    documented = [line for line in text.splitlines() if line.startswith("| `--")]
    assert documented == lines


def test_letters_and_words_name_one_axis_each():
    letters = [axis.letter for axis in AXES.values() if axis.letter]
    assert len(letters) == len(set(letters))
    bare = [axis.values for axis in AXES.values() if not axis.letter]
    words = [word for values in bare if isinstance(values, Words) for word in values.choices]
    switches = [values for values in bare if isinstance(values, Switch)]
    words += [word for values in switches for word in (values.on, values.off)]
    assert len(words) == len(set(words))
