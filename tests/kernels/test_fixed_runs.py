"""Fixed runs: the splits of an output tile depend only on the length of its sequence, and so do the
bits of its output.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_calls import assert_right, attend, differing
from depth import deep, diagonal, label
from hypothesis import given
from hypothesis import strategies as st
from leanbench.kernels.lean import triton as lean
from leanbench.kernels.lean.workspace import fixed_run_bytes, partial_bytes
from test_events import assert_covers, recorded, traced_call
from test_events import expected as expected_spans
from test_schedules import LEAN, PROBLEMS, TILE_TOKENS, assert_walks

from leanbench.attention import prepared
from leanbench.attention.prepared import PreparedLaunches
from leanbench.core.config import KernelConfig
from leanbench.core.decomposition import TileGrid, fixed_runs, stream_k
from leanbench.core.errors import UserError
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

#: Three LeanTiles per CTA: no power of two.
EQUAL_SHARES = LEAN
CONFIG = replace(EQUAL_SHARES, fixed_run_tiles=3)

tile_grids = st.builds(
    TileGrid,
    lean_tiles=st.lists(st.integers(1, 40), min_size=1, max_size=9).map(tuple),
    per_sequence=st.integers(1, 7),
)


@given(tile_grids, st.integers(1, 45))
def test_everything_is_walked_once_by_ctas_of_one_part_each(tiles, run_tiles):
    schedule = fixed_runs(tiles, run_tiles)
    walked = [(s.output_tile, own) for s in schedule.segments for own in range(s.first, s.last)]
    whole = [
        (tile, number)
        for tile in range(tiles.output_tiles)
        for number in range(tiles.of_output_tile(tile))
    ]
    assert sorted(walked) == whole
    assert [segment.cta for segment in schedule.segments] == list(range(schedule.grid))


@given(tile_grids, st.integers(1, 45))
def test_cuts_depend_on_the_length_alone(tiles, run_tiles):
    for segment in (segments := fixed_runs(tiles, run_tiles).segments):
        assert segment.of == tiles.of_output_tile(segment.output_tile)
        assert segment.first % run_tiles == 0
        assert segment.last == min(segment.first + run_tiles, segment.of)
    splits: dict[int, set[tuple[tuple[int, int], ...]]] = {}
    for tile in range(tiles.output_tiles):
        parts = sorted((s.first, s.last) for s in segments if s.output_tile == tile)
        splits.setdefault(tiles.of_output_tile(tile), set()).add(tuple(parts))
    assert all(len(alike) == 1 for alike in splits.values())


@given(tile_grids, st.integers(1, 45))
def test_hosts_wait_for_lower_ctas_only_whose_slots_follow_their_own(tiles, run_tiles):
    """The host block relies on it when it collects, and the launch for freedom from deadlock."""
    schedule = fixed_runs(tiles, run_tiles)
    hosts = {segment.output_tile: segment.cta for segment in schedule.segments if segment.is_host}
    for segment in schedule.segments:
        assert hosts[segment.output_tile] - segment.cta == segment.first // run_tiles


@given(tile_grids, st.integers(1, 6), st.integers(1, 9), st.integers(2, 5))
def test_runs_that_wait_come_last(tiles, run_tiles, max_grid, merge_at_once):
    """A run merges the next ones of its output tile.

    A CTA must walk all runs that others may wait for before it comes to such a run.
    """
    segments = fixed_runs(tiles, run_tiles, max_grid, merge_at_once).segments
    for cta in range(max_grid):
        own = [segment for segment in segments if segment.cta == cta]
        merging = [segment.first // run_tiles % merge_at_once == 0 for segment in own]
        assert merging == sorted(merging)
        waits = [
            (s.output_tile, -s.first) for s, merges in zip(own, merging, strict=True) if merges
        ]
        assert waits == sorted(waits)


@given(tile_grids)
def test_runs_of_one_lean_tile_are_stream_k_with_a_cta_each(tiles):
    dealt = replace(stream_k(tiles, tiles.total), in_fixed_runs=True)
    assert fixed_runs(tiles, 1) == dealt


@pytest.mark.parametrize(
    ("problem", "run_tiles", "sms"), diagonal(PROBLEMS, [1, 2, 3, 8], [1, 40], keep=6), ids=label
)
def test_the_kernel_walks_the_schedule(monkeypatch, problem, run_tiles, sms):
    config = replace(CONFIG, fixed_run_tiles=run_tiles)
    schedule = fixed_runs(TileGrid.of(problem, TILE_TOKENS), run_tiles)
    assert kernel("lean").schedule(problem, config, find("h200")) == schedule
    assert_walks(monkeypatch, "lean", problem, schedule, config=config, sms=sms)


@pytest.mark.parametrize(("problem", "run_tiles"), diagonal(PROBLEMS, [1, 3], keep=3), ids=label)
def test_events_are_those_of_the_schedule(problem, run_tiles, device):
    inputs = make_inputs(problem, device)
    call = traced_call("lean", inputs, replace(CONFIG, fixed_run_tiles=run_tiles))
    call.launch()
    ctas = call.read()
    assert_right(inputs, inputs.out, inputs.lse)
    tiles = TileGrid.of(problem, TILE_TOKENS)
    assert recorded(ctas, "lean_kernel") == expected_spans(fixed_runs(tiles, run_tiles), len(ctas))
    assert_covers(ctas, tiles)


#: Lengths combined to batches.
LENGTHS = (100, 1, 48, 49)
SHAPES = {
    "MHA": {"q_heads": 2, "kv_heads": 2, "head_dim": 64},
    "GQA": {"q_heads": 6, "kv_heads": 2, "head_dim": 80, "dtype": "bf16"},
    "row tiles": {"q_heads": 70, "kv_heads": 1, "head_dim": 64},
    "paged": {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "bf16"},
    "paged drafts": {"q_heads": 4, "kv_heads": 1, "head_dim": 64, "q_len": 3, "page_size": 32},
}


def launched(
    inputs: AttentionInputs, config: KernelConfig, sms: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and LSE of a call."""
    inputs.poison()
    lean.prepare(inputs, config, sms)()
    return inputs.out.clone(), inputs.lse.clone()


def differences(shape: dict[str, Any], config: KernelConfig, device: str) -> list[str]:
    """Return the surroundings in which a sequence's bits differ from those in the whole batch."""
    inputs = make_inputs(AttentionProblem(batch=len(LENGTHS), context=LENGTHS, **shape), device)
    names = differing(inputs, lambda call: launched(call, config, 5))
    results = zip(launched(inputs, config, 17), launched(inputs, config, 5), strict=True)
    return names if all(torch.equal(*both) for both in results) else [*names, "another GPU"]


@pytest.mark.deep
@pytest.mark.parametrize("name", SHAPES)
def test_bits_do_not_depend_on_the_surroundings(name, device):
    assert differences(SHAPES[name], CONFIG, device) == []


@pytest.mark.deep
@pytest.mark.parametrize("name", ["MHA", "paged"])
def test_bits_of_equal_shares_do(name, device):
    """Otherwise the test above could not fail. With 28 heads, not all numbers agree by chance."""
    assert {"alone", "another GPU"} <= set(
        differences({**SHAPES[name], "q_heads": 28}, EQUAL_SHARES, device)
    )


#: The call's own runs have 1024 tokens.
CALLS = {
    "ragged": AttentionProblem(4, 12, 1, (1500, 1, 1024, 1025), 64, "bf16", "NHD"),
    "uniform": AttentionProblem(2, 12, 1, 2100, 64),
    "paged drafts": AttentionProblem(3, 4, 1, (1026, 2, 2050), 64, q_len=3, page_size=64),
    "many rows": AttentionProblem(2, 16, 1, (1500, 70), 128),
}


@pytest.mark.parametrize(
    "name", ["paged drafts", deep("ragged"), deep("uniform"), deep("many rows")]
)
def test_bits_of_a_batch_invariant_call_do_not_depend_on_the_surroundings(
    name, device, monkeypatch
):
    inputs = make_inputs(CALLS[name], device)

    def call(inputs: AttentionInputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = inputs.context if inputs.cache_seqlens is None else inputs.cache_seqlens
        return attend(inputs, cache_seqlens=lengths, **options)

    def is_same(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
        return all(torch.equal(*both) for both in zip(left, right, strict=True))

    assert differing(inputs, lambda inputs: call(inputs, batch_invariant=True)) == []
    whole, equal_shares = call(inputs, batch_invariant=True), call(inputs, config=EQUAL_SHARES)
    # The H100 PCIe has 18 SMs fewer than the interpreter's H200.
    monkeypatch.setattr("leanbench.kernels.launch.INTERPRETER_SMS", 17)
    monkeypatch.setattr(prepared, "spec_of", lambda device: find("h100-pcie"))
    monkeypatch.setattr(prepared, "_LAUNCHES", PreparedLaunches())
    assert is_same(call(inputs, batch_invariant=True), whole)
    # Otherwise the assertions above could not fail.
    if device == "cpu":
        assert not is_same(call(inputs, config=EQUAL_SHARES), equal_shares)


def test_a_batch_invariant_call_takes_settings_of_fixed_runs_only(device):
    inputs = make_inputs(AttentionProblem(2, 2, 2, (100, 40), 64), device)
    out, lse = attend(inputs, batch_invariant=True, config=CONFIG)
    assert_right(inputs, out, lse)
    assert torch.equal(lse, launched(inputs, CONFIG, 5)[1])
    words = r"^batch_invariant needs a config with fixed_run_tiles: set it, or leave"
    with pytest.raises(ValueError, match=words):
        attend(inputs, batch_invariant=True, config=EQUAL_SHARES)


def test_many_partials_are_merged(device):
    """There are 60 of one output tile, several times the capacity of one wait."""
    inputs = make_inputs(AttentionProblem(1, 9, 1, 960, 64), device)
    assert_right(inputs, *launched(inputs, replace(CONFIG, fixed_run_tiles=1), 5))


@pytest.mark.parametrize("name", ["lean", "lean_triton"])
@pytest.mark.parametrize(
    ("group_size", "head_dim", "q_len"),
    [(1, 64, 1), (4, 128, 1), (4, 128, 4), (71, 128, 1), (8, 256, 2)],
)
def test_settings_follow_from_the_family(name, group_size, head_dim, q_len):
    """The bits depend neither on sizes, layouts and pages nor on the number of SMs.

    The H100 PCIe has 18 fewer than the H200.
    """
    small = AttentionProblem(1, group_size, 1, 1, head_dim, q_len=q_len)
    large = replace(
        small, batch=64, q_heads=8 * group_size, kv_heads=8, context=100_000, kv_layout="NHD",
        page_size=64,
    )  # fmt: skip
    seen = set()
    for gpu, problem in product(("h200", "h100-pcie"), (small, large)):
        config = kernel(name).batch_invariant_config(problem, find(gpu))
        assert config is not None
        assert config.fixed_run_tiles is not None
        assert config.tile_tokens * config.fixed_run_tiles == 1024
        # Stages do not change the bits.
        seen.add(replace(config, num_stages=1))
    assert len(seen) == 1


def test_more_partials_than_a_kernel_can_address_are_refused():
    assert fixed_run_bytes(1000, partial_bytes(4, 128)) == 1000 * 4 * 132 * 8
    inputs = make_inputs(AttentionProblem(1, 64, 1, 16, 128), "cpu")
    endless = replace(inputs, context=1 << 31)
    with pytest.raises(UserError, match=r"take 35\.4 GB, the limit is 8\.6 GB: pass fewer"):
        lean.launches(endless, replace(CONFIG, tile_tokens=64, fixed_run_tiles=64))
