"""Instrumented builds: outputs stay right, and the timeline events match the schedule of
leanbench.core.decomposition.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from depth import diagonal, label
from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.check.reference import Reference
from leanbench.core.config import TileConfig
from leanbench.core.decomposition import (
    Schedule,
    TileGrid,
    fixed_split,
    one_cta_per_tile,
    stream_k,
    tile_rows,
)
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.kernel import LaunchResources, TracedCall
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.core.timeline import CtaTimeline

TILE_TOKENS = 16
PROBLEMS = [
    AttentionProblem(1, 3, 3, 100, 64),
    AttentionProblem(2, 4, 2, 77, 64, "bf16", "NHD"),
    AttentionProblem(1, 70, 1, 90, 64),
    AttentionProblem(3, 4, 2, (1, 130, 48), 80),
    AttentionProblem(5, 2, 1, (16, 1, 1, 75, 33), 64),
]
LEAN = LeanTritonConfig(TILE_TOKENS, 4, 2, ctas_per_sm=1, min_tiles_per_cta=1, align_grid=False)
FA2 = TileConfig(TILE_TOKENS, 4, 2)
FIXED_SPLIT = FixedSplitTritonConfig(TILE_TOKENS, 4, 2, splits=3)


def traced_call(
    family: str, inputs: AttentionInputs, config: TileConfig, max_events: int | None = None, **grid
) -> TracedCall:
    """Return a traced call; `max_events` defaults to the kernel's value."""
    launches = triton_launches(family, inputs, config, **grid)
    if max_events is None:
        traceable: Any = kernel(f"{family}_triton")
        max_events = traceable.most_events(inputs, config, launches)
    traced = importlib.import_module("leanbench.kernels.traced")
    return traced.TracedLaunches(launches, max_events, inputs.q.device)


def triton_launches(family: str, inputs: AttentionInputs, config: TileConfig, **grid: Any) -> Any:
    module = importlib.import_module(f"leanbench.kernels.{family}.triton")
    return module.launches(inputs, config, **grid)


def traced(
    family: str, problem: AttentionProblem, config: TileConfig, device: str, **grid
) -> tuple[CtaTimeline, ...]:
    """Return the CTAs of the second of two traced calls, after checking its output.

    Without a grid, it is the registered kernel's call.
    """
    inputs = make_inputs(problem, device)
    call: Any = kernel(family).prepare_traced(inputs, config)
    if grid:
        call = traced_call(family, inputs, config, **grid)
    call.launch()
    inputs.poison()
    call.launch()
    ctas = call.read()
    assert Reference(inputs).check(inputs).failure(problem.dtype) is None
    assert_times_are_sound(ctas)
    return ctas


def assert_times_are_sound(ctas: tuple[CtaTimeline, ...]) -> None:
    """Check that within its CTA's life every span begins at the end of the previous one."""
    assert min(cta.start_us for cta in ctas) == 0
    for cta in ctas:
        at = cta.spans[0].start_us if cta.spans else cta.end_us
        assert cta.start_us <= at <= cta.end_us
        for span in cta.spans:
            assert span.start_us == at
            assert span.start_us <= span.end_us <= cta.end_us
            at = span.end_us


def recorded(ctas: tuple[CtaTimeline, ...], launch: str) -> dict[int, list[tuple[str, int]]]:
    """Return (kind, output tile) of every span of a launch, by CTA."""
    return {
        cta.cta: [(span.kind, span.output_tile) for span in cta.spans]
        for cta in ctas
        if cta.launch == launch
    }


def expected(schedule: Schedule, grid: int | None = None) -> dict[int, list[tuple[str, int]]]:
    """Return the spans that the schedule requires of every CTA of the grid.

    A host block waits and reduces in the same launch.
    """
    events: dict[int, list[tuple[str, int]]] = {cta: [] for cta in range(grid or schedule.grid)}
    for segment in schedule.segments:
        kinds = ["tiles"]
        if schedule.decomposition == "stream_k" and segment.is_host and not segment.is_whole:
            kinds += ["wait", "reduction"]
        events[segment.cta] += [(kind, segment.output_tile) for kind in kinds]
    return events


def assert_covers(ctas: tuple[CtaTimeline, ...], tiles: TileGrid) -> None:
    walked = {span.output_tile for cta in ctas for span in cta.spans if span.kind == "tiles"}
    assert walked == set(range(tiles.output_tiles))


@pytest.mark.parametrize(("problem", "sms"), diagonal(PROBLEMS, [1, 2, 5, 19], keep=3), ids=label)
def test_lean(problem, sms, device):
    tiles = TileGrid.of(problem, TILE_TOKENS)
    ctas = traced("lean", problem, LEAN, device, sms=sms)
    # For lengths on the device, the grid is launched for the longest context. CTAs past the
    # schedule's idle.
    assert recorded(ctas, "lean_kernel") == expected(
        stream_k(tiles, sms), len(ctas) if problem.is_ragged else None
    )
    assert {cta.launch for cta in ctas} == {"lean_kernel"}
    assert_covers(ctas, tiles)


def test_lean_aligned(device):
    problem = AttentionProblem(1, 4, 4, 150, 64)
    ctas = traced("lean", problem, replace(LEAN, align_grid=True), device, sms=14)
    schedule = stream_k(TileGrid.of(problem, TILE_TOKENS), 14, aligned=True)
    assert recorded(ctas, "lean_kernel") == expected(schedule)
    assert len(ctas) == 12


def test_the_registered_kernel_can_be_traced(device):
    assert_covers(traced("lean", PROBLEMS[3], LEAN, device), TileGrid.of(PROBLEMS[3], TILE_TOKENS))


def test_lean_ctas_without_work_start_and_end(device):
    inputs = make_inputs(AttentionProblem(3, 2, 2, (200, 1, 1), 64), device)
    call = traced_call("lean", inputs, replace(LEAN, min_tiles_per_cta=4), sms=12)
    call.launch()
    ctas = call.read()
    # 13 + 1 + 1 LeanTiles for each of two heads: 30, enough for 7 CTAs of 4.
    assert len(ctas) == 12
    assert [bool(cta.spans) for cta in ctas] == [True] * 7 + [False] * 5
    assert_times_are_sound(ctas)


@pytest.mark.parametrize("problem", PROBLEMS, ids=label)
def test_fa2(problem, device):
    tiles = TileGrid.of(problem, TILE_TOKENS)
    ctas = traced("fa2", problem, FA2, device)
    assert recorded(ctas, "fa2_kernel") == expected(one_cta_per_tile(tiles))
    assert_covers(ctas, tiles)


@pytest.mark.parametrize("problem", PROBLEMS, ids=label)
def test_fixed_split(problem, device):
    tiles = TileGrid.of(problem, TILE_TOKENS)
    ctas = traced("fixed_split", problem, FIXED_SPLIT, device)
    assert recorded(ctas, "split_kernel") == expected(fixed_split(tiles, 3))
    # One CTA per query head, in the order of sequences and heads.
    rows = tile_rows(problem.group_size, problem.head_dim)
    row_tiles = -(-problem.group_size // rows)
    heads = [divmod(head, problem.group_size) for head in range(problem.batch * problem.q_heads)]
    merges = [kv_head * row_tiles + row // rows for kv_head, row in heads]
    assert recorded(ctas, "merge_kernel") == {
        cta: [("reduction", tile)] for cta, tile in enumerate(merges)
    }
    assert_covers(ctas, tiles)


def test_one_split_is_one_launch(device):
    ctas = traced("fixed_split", PROBLEMS[0], replace(FIXED_SPLIT, splits=1), device)
    assert recorded(ctas, "fa2_kernel") == {cta: [("tiles", cta)] for cta in range(3)}


def test_the_reference_has_no_instrumented_build(device):
    inputs = make_inputs(PROBLEMS[0], device)
    assert kernel("reference").prepare_traced(inputs, None) is None
    assert kernel("reference").resources(inputs, None) == ()


def test_events_that_nobody_recorded_are_not_read(device):
    call = traced_call("fa2", make_inputs(PROBLEMS[0], device), FA2)
    with pytest.raises(RuntimeError, match="before the traced call was launched"):
        call.read()


def test_more_events_than_a_row_holds(device):
    """The output is still right, and reading reports the overflow."""
    inputs = make_inputs(AttentionProblem(1, 4, 4, 40, 64), device)
    # Two whole output tiles per CTA: a beginning and two ends.
    call = traced_call("lean", inputs, LEAN, max_events=2, sms=2)
    call.launch()
    assert Reference(inputs).check(inputs).failure("fp16") is None
    with pytest.raises(RuntimeError, match="CTA 0 of lean_kernel had 3 events and its row holds 2"):
        call.read()


def test_resources_of_a_compiled_kernel():
    launch = importlib.import_module("leanbench.kernels.launch")
    passed = []
    compiled = SimpleNamespace(
        metadata=SimpleNamespace(num_warps=8, shared=2048),
        n_regs=96,
        n_spills=3,
        _init_handles=lambda: None,
    )

    def warmup(*arguments, grid, **options):
        passed.append((arguments, grid, options))
        return compiled

    function = SimpleNamespace(__name__="some_kernel", warmup=warmup)
    resources = launch.TritonLaunch(function, 7, (1, 2), {"BLOCK": 16}).resources()
    assert passed == [((1, 2), (7,), {"BLOCK": 16})]
    assert resources == LaunchResources("some_kernel", 7, 8, 96, 2048, 3)


def test_resources_follow_the_launches(device):
    """The interpreter compiles nothing, so there are no resources."""
    taken = kernel("fixed_split_triton").resources(make_inputs(PROBLEMS[0], device), FIXED_SPLIT)
    names = [] if device == "cpu" else ["split_kernel", "merge_kernel"]
    assert [resources.launch for resources in taken] == names


def test_launches_run_in_order():
    launch = importlib.import_module("leanbench.kernels.launch")
    seen = []

    class Function:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **options: seen.append((self.name, grid, arguments, options))

    first = launch.TritonLaunch(Function("split"), 4, (1,), {"A": 2})
    second = launch.TritonLaunch(Function("merge"), 5, (3,), {"B": 4})
    launch.run_all([first, second])()
    assert seen == [("split", (4,), (1,), {"A": 2}), ("merge", (5,), (3,), {"B": 4})]


@pytest.mark.parametrize(
    ("context", "sms", "events"),
    [
        # 12 output tiles of 3 LeanTiles each: a CTA has 12, 6, 4, 3 of them, and part of a 13th
        # needs no more events.
        (48, 1, 16),
        (48, 2, 16),
        (48, 3, 8),
        (48, 12, 8),
        # 15 + 11 LeanTiles, the second CTA has 11 of 13 output tiles: a beginning, an end per part,
        # a wait and a reduction.
        ((240, *[1] * 11), 2, 16),
        # Of 36 sequences the busiest of three CTAs has 17.
        ((240, *[1] * 35), 3, 32),
    ],
)
def test_a_row_holds_the_events_of_the_busiest_cta(context, sms, events, device):
    batch, heads = (1, 12) if isinstance(context, int) else (len(context), 1)
    inputs = make_inputs(AttentionProblem(batch, heads, heads, context, 64), device)
    launches = triton_launches("lean", inputs, LEAN, sms=sms)
    traceable: Any = kernel("lean_triton")
    assert traceable.most_events(inputs, LEAN, launches) == events
