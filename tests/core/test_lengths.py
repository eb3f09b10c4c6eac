import random
from statistics import fmean, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.core.axes import AXES
from leanbench.core.errors import UserError
from leanbench.core.lengths import (
    MAX_SEQUENCES,
    draw_context,
    longest_in_file,
    read_lengths,
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
        with pytest.raises(UserError, match="cannot be"):
            draw_context(lengths, batch, longest)
        return
    contexts = draw_context(lengths, batch, longest)
    assert isinstance(contexts, tuple)
    assert len(contexts) == batch
    assert max(contexts) == longest
    assert min(contexts) >= 1
    # Rounding moves each length by half a token at most; a length below 1 token is lifted to 1.
    assert sum(contexts) / batch == pytest.approx(mean * longest, abs=1)


def test_the_draw_is_the_same_in_every_process_and_version():
    assert draw_context("mean-0.5", 4, 4096) == (805, 509, 4096, 2782)
    assert draw_context("mean-0.5", 8, 4096) != draw_context("mean-0.5", 8, 4095)
    assert draw_context("azure-code", 4, 32768) == draw_context("azure-code", 4, 32768)
    draws = [draw_context("azure-code", 4, 32768, random.Random(seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_an_impossible_mean_says_what_is_possible():
    with pytest.raises(UserError, match=r"choose a mean above 0\.5 or a batch above 4"):
        draw_context("mean-0.25", 2, 4096)


def test_uniform_and_a_single_sequence_are_one_number():
    assert draw_context("uniform", 8, 4096) == 4096
    for lengths in ("one-long", "zipf", "mean-0.25"):
        assert draw_context(lengths, 1, 4096) == 4096
    # Clipped to the context: all lengths are alike.
    assert draw_context("mooncake", 8, 100) == 100


def test_one_long_and_zipf_are_in_random_order():
    assert sorted(several("one-long", 4, 65536)) == [16, 16, 16, 65536]
    assert draw_context("one-long", 3, 8) == 8
    zipf = several("zipf", 64, 4096)
    assert sorted(zipf, reverse=True) == [4096 // rank for rank in range(1, 65)]
    assert zipf != sorted(zipf, reverse=True)


@pytest.mark.parametrize(
    ("name", "mean_tokens"),
    [
        ("azure-code", 2131),
        ("azure-conversation", 1227),
        ("mooncake", 13126),
        ("mooncake-synthetic", 7292),
    ],
)
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


def test_a_byte_order_mark_is_no_part_of_the_first_length(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Lengths.txt").write_bytes(b"\xef\xbb\xbf100\r\n4k\r\n")
    assert longest_in_file("Lengths.txt") == 4096


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "lengths 'file' is empty: write a length a line"),
        ("12\nx\n", "lengths 'file': 'x' is "),
        ("0\n", "lengths 'file': '0' is "),
        (b"\xff\xfe\x00", "lengths 'file' is no text in UTF-8: write a length a line"),
        ("1" * 10_000_001, "lengths 'file' is larger than 10000000 bytes"),
    ],
)
def test_a_wrong_file_is_one_sentence(content, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        LENGTHS.parse("file")
    assert str(error.value).startswith(sentence)


def test_a_file_that_cannot_be_read_is_one_sentence():
    with pytest.raises(UserError) as error:
        LENGTHS.parse("/" + "x" * 300)
    assert str(error.value) == (
        f"lengths: cannot read '/{'x' * 79}' (file name too long): name a file that can be read"
    )


def test_names_and_explicit_lengths_are_written_in_one_way():
    assert LENGTHS.parse("Zipf,mean-.50,mean-1,64k+16x3,4kx8,512+512") == (
        "zipf",
        "mean-0.5",
        "uniform",
        "65536+16x3",
        "4096x8",
        "512x2",
    )


@given(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=50))
def test_written_lengths_read_back(lengths):
    assert read_lengths("lengths", write_lengths(tuple(lengths))) == tuple(lengths)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zip", "'zip' is no distribution, no file and no lengths such as 64k+16x3, did you mean"),
        ("mean-0", "is not a mean over the longest length, write mean- and a number above 0"),
        ("mean-1.01", "is not a mean over the longest length"),
        ("mean-nan", "is not a mean over the longest length"),
        ("mean-", "is not a mean over the longest length"),
        ("64k+", "'64k+' lacks a number beside + or x, write lengths such as 1k+300 or 64k+16x3"),
        ("64k+0", "'0' is below"),
        ("16x", "'16x' lacks a number beside + or x, write"),
        ("16x5000", f"has more than {MAX_SEQUENCES} sequences"),
        ("0.25", "'0.25' is no distribution"),
    ],
)
def test_wrong_lengths(text, words):
    with pytest.raises(UserError) as error:
        LENGTHS.parse(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_batch_of_many_lengths_has_a_limit():
    assert draw_context("uniform", 2**20, 16) == 16
    with pytest.raises(UserError, match="batch 4097 is above the limit of 4096 for lengths that"):
        draw_context("zipf", 4097, 16)
