import os
import random
from statistics import fmean, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.core.axes import AXES
from leanbench.core.errors import InvalidValue, Reason, UserError
from leanbench.core.files import FileFault, UnreadableFile
from leanbench.core.lengths import (
    MAX_SEQUENCES,
    UnknownColumn,
    draw_context,
    longest_in_file,
    read_lengths,
    read_lengths_of,
    traces,
    write_lengths,
)

LENGTHS = AXES["lengths"]


def several(lengths: str, batch: int, longest: int, draw: random.Random | None = None) -> list[int]:
    contexts = draw_context(lengths, batch, longest, draw)
    assert isinstance(contexts, tuple)
    return list(contexts)


@given(batch=st.integers(2, 200), longest=st.integers(1000, 2**20), mean=st.floats(0.05, 0.99))
def test_one_sequence_is_longest_and_the_mean_is_met(batch, longest, mean):
    lengths = f"mean-{mean:.6f}"
    mean = float(lengths.removeprefix("mean-"))
    if mean * batch <= 1:
        with pytest.raises(InvalidValue):
            draw_context(lengths, batch, longest)
        return
    contexts = draw_context(lengths, batch, longest)
    assert isinstance(contexts, tuple)
    assert len(contexts) == batch
    assert max(contexts) == longest
    assert min(contexts) >= 1
    # Rounding moves each length by half a token at most; a length below 1 token is lifted to 1.
    assert sum(contexts) / batch == pytest.approx(mean * longest, abs=1)


def test_draws_are_the_same_in_every_process_and_in_random_order():
    assert draw_context("mean-0.5", 4, 4096) == (805, 509, 4096, 2782)
    assert draw_context("mean-0.5", 8, 4096) != draw_context("mean-0.5", 8, 4095)
    assert draw_context("azure-code", 4, 32768) == draw_context("azure-code", 4, 32768)
    draws = [draw_context("azure-code", 4, 32768, random.Random(seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert sorted(several("one-long", 4, 65536)) == [16, 16, 16, 65536]
    assert draw_context("one-long", 3, 8) == 8
    zipf = several("zipf", 64, 4096)
    assert sorted(zipf, reverse=True) == [4096 // rank for rank in range(1, 65)]
    assert zipf != sorted(zipf, reverse=True)


@pytest.mark.parametrize(
    ("lengths", "batch", "name", "reason", "limit"),
    [
        ("mean-0.25", 2, "lengths", Reason.BELOW_MINIMUM, "mean-0.5"),
        ("zipf", 4097, "batch", Reason.ABOVE_MAXIMUM, 4096),
    ],
)
def test_batches_that_cannot_be_drawn(lengths, batch, name, reason, limit):
    with pytest.raises(InvalidValue) as caught:
        draw_context(lengths, batch, 4096)
    error = caught.value
    assert (error.name, error.reason, error.limit) == (name, reason, limit)


def test_uniform_and_a_single_sequence_are_one_number():
    for batch in (8, 2**20):
        assert draw_context("uniform", batch, 4096) == 4096
    for lengths in ("one-long", "zipf", "mean-0.25"):
        assert draw_context(lengths, 1, 4096) == 4096
    # Clipped to the context: all lengths are alike.
    assert draw_context("mooncake", 8, 100) == 100


MEAN_TOKENS = {"azure-code": 2131, "azure-conversation": 1227}
MEAN_TOKENS |= {"mooncake": 13126, "mooncake-synthetic": 7292}


@pytest.mark.parametrize(("name", "mean_tokens"), MEAN_TOKENS.items())
def test_a_trace_is_drawn_by_its_quantiles(name, mean_tokens):
    trace = traces()[name]
    assert len(trace.quantiles) == 65
    assert list(trace.quantiles) == sorted(trace.quantiles)
    assert trace.source
    assert trace.licence
    draw = random.Random(1)
    batch = [tokens for _ in range(8) for tokens in several(name, 4096, 2**20, draw)]
    assert min(batch) >= trace.quantiles[0]
    assert max(batch) <= trace.quantiles[-1]
    assert quantiles(batch, n=8)[3] == pytest.approx(trace.quantiles[32], rel=0.05)
    assert fmean(batch) == pytest.approx(trace.mean_tokens, rel=0.05)
    # Linear between 65 quantiles: the tail is straight where the trace's is not.
    assert trace.mean_tokens == pytest.approx(mean_tokens, rel=0.15)
    assert max(several(name, 4096, 1000, draw)) <= 1000


def test_a_file_has_a_length_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Lengths.txt").write_text("100\n4k\n300\n")
    assert LENGTHS.parse("Lengths.txt,zipf") == ("Lengths.txt", "zipf")
    batch = draw_context("Lengths.txt", 1000, 2**20)
    assert isinstance(batch, tuple)
    assert quantiles(batch, n=2) == pytest.approx([300], abs=60)
    assert 100 <= min(batch) <= max(batch) <= 4096
    assert max(several("Lengths.txt", 1000, 2000)) == 2000


TRACE = "time,prompt,output\n2031-05-06 07:08:09.5,300,7\n2031-05-06 07:08:10,20,8\n"
RECORDS = '{"id": "a", "prompt": 300, "output": 7}\n{"id": "b", "prompt": 20.0, "output": 8}\n'
OBJECT = '{"prompt": [300, 20], "output": [7, 8]}'


@pytest.mark.parametrize(
    ("content", "column", "lengths"),
    [
        ("\ufeff100\r\n\r\n# a comment\r\n4k\r\n", "", [100, 4096]),
        ("tokens\n8.0\n1e3\n2.5E2\n+7\n", "", [8, 1000, 250, 7]),
        ("Prompt Tokens\n100\n30", "", [100, 30]),
        ("Prompt Tokens\n100\n30", "Prompt Tokens", [100, 30]),
        ("# two lines\n# of comments\n\n12\n", "", [12]),
        ("100 20  30", "", [100, 20, 30]),
        ("100,20,30\n", "", [100, 20, 30]),
        (TRACE, "prompt", [300, 20]),
        (TRACE.replace(",", ";"), "output", [7, 8]),
        ('"a,b,c";"Context Tokens"\n5;6\n7;8\n', "Context Tokens", [6, 8]),
        (TRACE.replace(",", "\t"), "prompt", [300, 20]),
        (TRACE.replace("\n", "\r\n"), "prompt", [300, 20]),
        ('"a, b","c"\n"1","2"\n', "a, b", [1]),
        ('prompt,n\n"two\nlines, quoted",5\n"one",6\n', "n", [5, 6]),
        ("prompt output\n300 7\n20 8\n", "output", [7, 8]),
        ('"Prompt, all"\r\n"300"\r\n"20"\r\n', "", [300, 20]),
        ('"a b"  300\n"c" 20\n', "2", [300, 20]),
        ('a, b\n1, "2,3"\n', "a", [1]),
        ("a,b\r300,7\r20,8\r", "b", [7, 8]),
        ('# x, "y\nn,p\n5,"a\n# b"\n # x, "y"z\n6,c\n', "n", [5, 6]),
        ("a,b\nx\u2028y\x85z,8\n", "b", [8]),
        ("300 7\n20 8\n", "2", [7, 8]),
        ("300|7\n20|8\n", "1", [300, 20]),
        ("a:b,c\n5,6\n", "a:b", [5]),
        (RECORDS, "prompt", [300, 20]),
        (RECORDS.splitlines()[0], "output", [7]),
        (f"[{', '.join(RECORDS.splitlines())}]", "prompt", [300, 20]),
        ('{"n": 5}\n\n{"n": "6"}\n', "", [5, 6]),
        ('{"n": 5, "x": NaN}', "n", [5]),
        ('{"p": "a\u2028b\x85c", "n": 5}\n{"p": "", "n": 6}\n', "n", [5, 6]),
        ('# a comment\n{"n": 5}\n{"n": 6}\n', "", [5, 6]),
        ("# a comment\n[5,\n# another\n6]\n", "", [5, 6]),
        (OBJECT, "output", [7, 8]),
        ('[300, 4e2, "4k"]', "", [300, 400, 4096]),
        ("[[300, 7], [20, 8]]", "2", [7, 8]),
        ("[300, 7]\n[20, 8]\n", "1", [300, 20]),
    ],
)
@pytest.mark.parametrize("file", ["mine", "dir/a:b,c.csv"])
def test_a_file_has_lengths_or_a_column_of_them(content, column, lengths, file, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode())
    value = f"{path}:{column}" if column else str(path)
    assert LENGTHS.parse(value) == (value,)
    assert read_lengths_of("lengths", value) == lengths
    assert longest_in_file(value) == max(lengths)


@pytest.mark.parametrize(
    ("content", "column", "columns", "example"),
    [
        (TRACE, "", ["time", "prompt", "output"], "prompt"),
        (TRACE, "Prompt", ["time", "prompt", "output"], ""),
        (RECORDS, "", ["id", "prompt", "output"], "prompt"),
        (OBJECT, "", ["prompt", "output"], "prompt"),
        ("300 7\n20 8\n", "", ["1", "2"], "1"),
        ("300,7\n20,8\n", "prompt", ["1", "2"], ""),
        ("300\n20\n", "prompt", ["1"], ""),
        ("[[300, 7], [20, 8]]", "", ["1", "2"], "1"),
        ("a,b\nx,y\n", "", ["a", "b"], "a"),
        (",ts,n\n0,0,5\n1,1.5,6\n", "", ["", "ts", "n"], "n"),
        ("|ts|n|\n|--|--|\n|1|5|\n", "", ["", "ts", "n", ""], "ts"),
    ],
)
def test_a_column_is_named_where_there_are_several(content, column, columns, example, tmp_path):
    file = str(tmp_path / "file")
    (tmp_path / "file").write_text(content)
    with pytest.raises(UnknownColumn) as refused:
        LENGTHS.parse(f"{file}:{column}")
    error = refused.value
    assert (error.file, error.column) == (file, column)
    assert (error.columns, error.example) == (columns, example)
    assert column or all(name in str(error) for name in columns)
    assert column or f":{example}" in str(error)


@pytest.mark.parametrize(
    ("content", "column", "place", "value", "reason"),
    [
        ("12\nx\n", "", "line 2:", "x", Reason.SYNTAX),
        ("\n#\n0\n", "", "line 3:", "0", Reason.BELOW_MINIMUM),
        ("-3\n", "", "line 1:", "-3", Reason.BELOW_MINIMUM),
        ("4q\n300\n", "", "line 1:", "4q", Reason.SYNTAX),
        ("NaN\n300\n", "", "line 1:", "NaN", Reason.SYNTAX),
        ("8.5\n", "", "line 1:", "8.5", Reason.SYNTAX),
        ("1e999999999\n", "", "line 1:", "1e999999999", Reason.ABOVE_MAXIMUM),
        ("2147483648\n", "", "line 1:", "2147483648", Reason.ABOVE_MAXIMUM),
        ("٣\n", "", "line 1:", "٣", Reason.SYNTAX),
        ("1" * 2_000_000, "", "line 1:", "1" * 40, Reason.ABOVE_MAXIMUM),
        (TRACE, "time", "line 2, column 'time':", "2031-05-06 07:08:09.5", Reason.SYNTAX),
        ("a,b\n1,2\n3\n", "b", "line 3, column 'b':", "", Reason.EMPTY_ENTRY),
        ("a,b\n1,2\n3,\n", "b", "line 3, column 'b':", "", Reason.EMPTY_ENTRY),
        (RECORDS, "id", "line 1, column 'id':", "a", Reason.SYNTAX),
        ('[{"n": 5}, {"m": 6}]', "n", "entry 2, column 'n':", "", Reason.EMPTY_ENTRY),
        ("[5, true]", "", "entry 2:", "true", Reason.SYNTAX),
        ("[5, null]", "", "entry 2:", "null", Reason.SYNTAX),
        ("[5, Infinity]", "", "entry 2:", "Infinity", Reason.SYNTAX),
        ("[5, 1.5]", "", "entry 2:", "1.5", Reason.SYNTAX),
        ('[{"n": [5]}]', "", "entry 1:", "[5]", Reason.SYNTAX),
        ("[1, 2, [3]]", "", "entry 3:", "[3]", Reason.SYNTAX),
    ],
    ids=range(21),
)
def test_a_wrong_length_is_named_with_its_place(content, column, place, value, reason, tmp_path):
    file = tmp_path / "file"
    file.write_text(content)
    with pytest.raises(InvalidValue) as refused:
        LENGTHS.parse(f"{file}:{column}")
    error = refused.value
    assert error.name == f"lengths {str(file)!r} {place}"
    assert (error.value, error.reason) == (value, reason)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no length"),
        ("\n# nothing\n", "has no length"),
        ("tokens\n", "has no length"),
        ("a,b\n", "has no length"),
        ("[]", "has no length"),
        ("{", "cannot be read (no JSON at column 2)"),
        ("[\n1,\n2,\n]", "cannot be read (no JSON at line 4, column 1)"),
        ('{"n": 1}\n{"n":\n', "line 2 cannot be read (no JSON at column 6)"),
        ('{"n": 1\n{"n": 2}\n', "line 1 cannot be read (no JSON at column 8)"),
        ('n,p\n1,"a"\n\n2,"b\n3,c\n', "line 4 has a quoted cell that does not end"),
        ('n,p\n1,"b\n3,"c"\n', "line 2 has a quoted cell that does not end"),
    ],
)
def test_a_file_without_lengths_is_one_sentence(content, words, tmp_path):
    file = tmp_path / "file"
    file.write_text(content)
    with pytest.raises(UserError) as refused:
        LENGTHS.parse(str(file))
    assert str(refused.value).startswith(f"lengths {str(file)!r} {words}")
    assert "\n" not in str(refused.value)


def test_files_stand_in_lists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one.csv", "t,wo.csv"):
        (tmp_path / name).write_text('a,"b,c"\n300,7\n')
    for values in (("one.csv:a", "uniform"), ("one.csv:a", "mean-0.5", "one.csv:b,c"), ("4096",)):
        assert LENGTHS.parse(",".join(values)) == values
        assert LENGTHS.parse(",".join(("t,wo.csv:b,c", *values))) == ("t,wo.csv:b,c", *values)


def test_a_file_that_is_compressed_or_has_a_name_twice_is_refused(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match="' is compressed: unpack it with `gunzip`"):
        LENGTHS.parse(f"{tmp_path}/a.csv.gz:n")
    (tmp_path / "b.csv").write_text("n,n,m\n1,2,3\n")
    with pytest.raises(UserError, match=" has 2 columns 'n': give each a name of its own"):
        LENGTHS.parse(f"{tmp_path}/b.csv:n")
    assert read_lengths_of("lengths", f"{tmp_path}/b.csv:m") == [3]
    with pytest.raises(UnknownColumn) as unknown:
        LENGTHS.parse(f"{tmp_path}/b.csv:{'x' * 5000}")
    assert f" no column '{'x' * 79}...', known: m" in str(unknown.value)


def test_what_is_no_file_of_lengths(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    faults = dict.fromkeys(("fifo", "fifo:column", "/dev/zero"), FileFault.NOT_REGULAR)
    faults |= {"": FileFault.FOLDER, "bytes": FileFault.NOT_UTF8, "large": FileFault.TOO_LARGE}
    for name, fault in faults.items():
        with pytest.raises(UnreadableFile) as refused:
            LENGTHS.parse(str(tmp_path / name))
        assert refused.value.fault is fault, name
    for name in ("gone.csv", "gone.csv:column", "x" * 300, "fifo/below"):
        with pytest.raises(InvalidValue) as unknown:
            LENGTHS.parse(str(tmp_path / name))
        assert unknown.value.reason is Reason.UNSUPPORTED
        assert len(str(unknown.value)) < 400


def test_names_and_explicit_lengths_are_written_in_one_way():
    written = "zipf mean-0.5 uniform 65536+16x3 4096x8 512x2"
    read = LENGTHS.parse("Zipf,mean-.50,mean-1,64k+16x3,4kx8,512+512")
    assert read == tuple(written.split())


@given(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=50))
def test_written_lengths_read_back(lengths):
    assert read_lengths("lengths", write_lengths(tuple(lengths))) == tuple(lengths)


@pytest.mark.parametrize(
    ("text", "value", "reason", "limit"),
    [
        ("zip", "zip", Reason.UNSUPPORTED, None),
        ("0.25", "0.25", Reason.UNSUPPORTED, None),
        *((text, text, Reason.SYNTAX, None) for text in ("mean-0", "mean-1.01", "mean-nan")),
        *((text, text, Reason.SYNTAX, None) for text in ("mean-", "64k+", "16x")),
        ("64k+0", "0", Reason.BELOW_MINIMUM, 1),
        ("16x5000", "16x5000", Reason.TOO_MANY_VALUES, MAX_SEQUENCES),
    ],
)
def test_invalid_lengths(text, value, reason, limit):
    with pytest.raises(InvalidValue) as caught:
        LENGTHS.parse(text)
    error = caught.value
    assert (error.value, error.reason, error.limit) == (value, reason, limit)
