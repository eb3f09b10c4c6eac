"""Calls that are tuned: common, recorded and random ones, and the fills of their caches."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import islice, product

import pytest
from leanbench.kernels.lean.cuda_settings import fill_lengths
from timed_examples import H200, LATENT, LATENT_SERVED, PROBLEM, SERVED

from leanbench.configs.lookup import refusal
from leanbench.configs.signature import signature_of
from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.tune.calls import common, drawn, fills, read_calls


def test_common_calls_are_distinct_and_supported():
    calls = common(H200)
    # 20 models, 4 batches, 2 bounds, 2 dtypes; 3 lengths on the host.
    assert len(calls) == len({signature_of(call) for call in calls}) == 320 + 60 + 16
    assert {refusal(call, H200) for call in calls} == {None}
    assert common(H200) == calls
    latent = [call for call in calls if call.latent]
    assert {(call.q_heads, call.batch, call.context) for call in latent} == {
        *product((16, 128), (1, 8, 32, 128), (4096, 16384))
    }
    assert {(call.page_size, call.lengths_on) for call in latent} == {(64, "device")}
    elsewhere = common(find("a100"))
    assert len(elsewhere) == 320 + 60
    assert not any(call.latent for call in elsewhere)
    # The first ones of any number are spread.
    for count in (24, 96):
        some = calls[:count]
        assert sum(call.lengths_on == "host" for call in some) == pytest.approx(count / 7, abs=2)
        assert sum(call.kv_dtype == "e4m3" for call in some) == pytest.approx(0.42 * count, rel=0.4)
        assert len({(call.group_size, call.head_dim) for call in some}) > 6
        assert {call.batch for call in some} == {1, 8, 32, 128}


def some_drawn(seed: int, count: int = 200) -> list[list[AttentionProblem]]:
    return list(islice(drawn(seed), count))


def test_drawn_calls_are_reproducible_and_continuous():
    calls = some_drawn(7)
    assert calls == some_drawn(7)
    assert calls != some_drawn(8)
    assert calls[:10] == some_drawn(7, 10)
    firsts = [call[0] for call in calls]
    # No list of values that settings could have been made for.
    assert len({first.max_context for first in firsts}) > 190
    assert len({first.batch for first in firsts}) > 60
    assert sum(first.max_context % 16 > 0 for first in firsts) > 150
    kinds = Counter(name for first in firsts for name in first.special)
    assert min(kinds[name] for name in ("kv_dtype", "q_dtype", "window_left", "sinks")) > 5
    assert 0.4 < sum(first.lengths_on == "device" for first in firsts) / 200 < 0.6


def test_one_in_ten_drawn_calls_is_latent():
    latent = [call for call in some_drawn(7, 600) if call[0].latent]
    assert 40 < len(latent) < 80
    assert {refusal(fill, H200) for call in latent for fill in call} == {None}
    firsts = [call[0] for call in latent]
    assert {first.q_heads for first in firsts} == {8, 16, 32, 64, 128}
    assert {(first.page_size, first.kv_dtype) for first in firsts} == {
        *product((None, 64, 128), ("same", "e4m3"))
    }
    assert len({first.max_context for first in firsts}) > 35
    assert {len(call) for call in latent} == {1, 4}


def test_drawn_fills_are_of_one_call():
    several = [call for call in some_drawn(3) if len(call) > 1]
    for call in several:
        full, few, lone, mixed = call
        assert full.contexts == (full.cache_capacity,) * full.batch or full.page_size
        assert {replace(fill, context=1, capacity=None) for fill in call} == {
            replace(full, context=1, capacity=None)
        }
        assert {fill.cache_capacity for fill in call} == {full.cache_capacity}
        assert max(few.contexts) <= max(9, 0.12 * full.max_context + 1)
        assert lone.contexts[0] == full.max_context
        assert lone.contexts[1:] == few.contexts[1:]
        assert max(mixed.contexts) <= full.max_context
    assert {refusal(fill, H200) for call in several for fill in call} == {None}


def test_fills():
    assert fills(PROBLEM) == [PROBLEM]
    served = replace(SERVED, batch=4)
    made = fills(served)
    assert [fill.contexts for fill in made] == fill_lengths(4, 4096)
    assert {(fill.cache_capacity, fill.lengths_on) for fill in made} == {(4096, "device")}
    ragged = replace(served, context=(5, 4096, 9, 70))
    assert fills(ragged) == [ragged]


def test_recorded_calls_are_read_once_each(tmp_path):
    path = tmp_path / "calls.jsonl"
    calls = PROBLEM, SERVED, LATENT, LATENT_SERVED, PROBLEM
    lines = [json.dumps({"problem": each.to_dict()}) for each in calls]
    # A line that was cut off while it was written, and those of another version.
    others = ["", lines[0][:40], "[1]", "{}", json.dumps({"problem": {"batch": 1}})]
    path.write_text("\n".join([lines[0], *others, *lines[1:], lines[0][:-5]]))
    # The empty line is one of them.
    with pytest.warns(UserWarning, match="6 lines of"):
        assert read_calls(path) == [PROBLEM, SERVED, LATENT, LATENT_SERVED]


@pytest.mark.parametrize("content", ["", "\n", "hello", "[5]", '{"problem": null}'])
def test_a_file_without_calls(content, tmp_path):
    path = tmp_path / "calls.jsonl"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read_calls(path)
    fix = f"give a file that LEANBENCH_RECORD={path} wrote"
    assert str(caught.value) == f"{path} has no recorded calls: {fix}"


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"^cannot read .*none \(there is no such file\)"):
        read_calls(tmp_path / "none")
