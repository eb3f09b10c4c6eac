"""lean.cu distributes LeanTiles as the performance model assumes: schedule.cuh, compiled for the
CPU, against leanbench.kernels.lean.cuda_schedule.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from config_examples import FLASH_DECODING
from depth import diagonal, examples
from lean_on_cpu import launch_on
from leanbench.kernels.lean.configs import CudaConfig
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_masks import dealt_lengths, dealt_tokens, pass_masks
from leanbench.kernels.lean.cuda_params import Divisor, aligned_params
from leanbench.kernels.lean.cuda_schedule import (
    END_TILES,
    cuda_schedule,
    fixed_run_tokens,
    has_whole_tiles,
    most_fixed_runs,
    split_limits,
)
from leanbench.kernels.lean.cuda_settings import cuda_config

from leanbench.attention.prepared import lengths_with
from leanbench.core.decomposition import Segment, cluster_slots, stream_k_grid
from leanbench.core.inputs import make_inputs, shape_only
from leanbench.core.paths import KERNELS
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile schedule.cuh")
H200 = find("h200")
ONE_ROW = cuda_config(32, 4, 2, 1, 1, 8, "bulk", 1, False)
#: 16 query heads per KV head are two output tiles.
BUILDS = {
    "one row": (1, ONE_ROW),
    "two row tiles, at least 3 LeanTiles": (16, cuda_config(32, 4, 2, 1, 1, 8, "bulk", 3, False)),
    "clusters": (4, cuda_config(32, 4, 2, 1, 8, 8, "bulk", 1, False)),
    "two CTAs to an SM": (1, cuda_config(16, 4, 2, 2, 1, 8, "bulk", 1, False)),
}
#: (CTA, output tile, first and last LeanTile, LeanTiles, splits of the output tile, split).
Part = tuple[int, int, int, int, int, int, int]
Deal = Callable[[AttentionProblem, CudaConfig], list[Part]]


class CPart(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int)
        for name in ("cta", "sequence", "head", "first", "last", "tiles", "splits", "split")
    ]


@pytest.fixture(scope="module")
def deal(tmp_path_factory: pytest.TempPathFactory) -> Deal:
    """Return a function for the parts of a launch on an H200; ragged lengths are on the device."""
    libraries: dict[CudaBuild, ctypes.CDLL] = {}

    def parts(problem: AttentionProblem, config: CudaConfig) -> list[Part]:
        build = CudaBuild.of(problem, config)
        if build not in libraries:
            libraries[build] = compiled(build, tmp_path_factory.mktemp("schedule"))
        return walked(libraries[build], problem, config, build)

    return parts


def compiled(build: CudaBuild, folder: Path) -> ctypes.CDLL:
    for name in ("schedule", "position", "lengths", "tiles", "params", "build"):
        shutil.copy(KERNELS / "lean" / f"{name}.cuh", folder)
    # PTX is for GPUs; schedule_on_cpu.cpp has the functions that schedule.cuh needs.
    (folder / "ptx.cuh").write_text("")
    source, library = Path(__file__).with_name("schedule_on_cpu.cpp"), folder / "schedule.so"
    defines = [f"-D{name}={value}" for name, value in build.source((9, 0)).defines]
    words = ["-std=c++17", "-Og", "-shared", "-fPIC", "-nostdlib", f"-I{folder}", "-o", library]
    assert COMPILER is not None
    subprocess.run([COMPILER, *defines, *words, source], check=True)
    return ctypes.CDLL(str(library))


def walked(
    library: ctypes.CDLL, problem: AttentionProblem, config: CudaConfig, build: CudaBuild
) -> list[Part]:
    per_sequence = problem.kv_heads * build.row_tiles(problem.q_len)
    output_tiles = problem.batch * per_sequence
    on_device = problem.lengths_on == "device"
    host_tokens = problem.cache_capacity if on_device else problem.max_context
    most_tokens = dealt_tokens(build, host_tokens, problem.q_len, problem.window_left)
    most_tiles = -(-most_tokens // config.tile_tokens)
    slots = cluster_slots(H200.sms, build.ctas_per_sm, build.cluster)
    if config.splits:
        ranges = output_tiles * config.splits
    elif config.fixed_run_tiles:
        most_tiles = most_fixed_runs(most_tokens, per_sequence, config)
        ranges = min(output_tiles * most_tiles, slots)
    else:
        aligned = config.align_grid and not build.ragged
        ranges = stream_k_grid(
            output_tiles * most_tiles,
            slots,
            config.min_tiles_per_cta,
            output_tiles if aligned else 1,
        )
        sizes = output_tiles, most_tiles, config.tile_tokens, slots
        if aligned and has_whole_tiles(build, *sizes):
            ranges = output_tiles
    lengths = (ctypes.c_int * problem.batch)(*problem.contexts)
    params = aligned_params()
    leftpads = (ctypes.c_int * problem.batch)(*problem.leftpads)
    pass_masks(params, shape_only(problem), build)
    params.cache_seqlens, params.cache_leftpad = map(ctypes.addressof, (lengths, leftpads))
    params.context, params.batch = host_tokens, problem.batch
    params.kv_heads = problem.kv_heads
    params.tile_shift = config.tile_tokens.bit_length() - 1
    params.longest_shift = (config.tile_tokens * config.fixed_run_tiles).bit_length() - 1
    if not config.splits:
        params.min_tiles_per_range = config.min_tiles_per_cta
        params.longest_steps, params.merge_tiles = split_limits(build, config.tile_tokens)
    params.end_tiles = END_TILES if build.ragged and not config.fixed_run_tiles else 0
    params.by_heads = Divisor.of(per_sequence)
    if not (config.splits or config.fixed_run_tiles):
        params.share, params.longer = divmod(output_tiles * most_tiles, ranges)
        params.by_tiles = Divisor.of(most_tiles)
        params.by_share = Divisor.of(params.share)
        params.by_share_plus_1 = Divisor.of(params.share + 1)
    room = (CPart * (output_tiles * (2 + config.fixed_run_tiles * most_tiles) + 2 * ranges))()
    count = library.deal(ctypes.byref(params), ranges, room, len(room))
    return [
        (
            part.cta,
            part.sequence * per_sequence + part.head,
            part.first,
            part.last,
            part.tiles,
            part.splits,
            part.split,
        )
        for part in room[:count]
    ]


def played(problem: AttentionProblem, config: CudaConfig) -> list[Part]:
    """Return the parts of the schedule used for predictions, traces and tests."""
    return parts_of(cuda_schedule(problem, config, H200).segments)


def parts_of(segments: Sequence[Segment]) -> list[Part]:
    starts: dict[int, list[int]] = defaultdict(list)
    for segment in segments:
        starts[segment.output_tile].append(segment.first)
    splits = {output_tile: sorted(firsts) for output_tile, firsts in starts.items()}
    return [
        (
            segment.cta,
            segment.output_tile,
            segment.first,
            segment.last,
            segment.of,
            len(splits[segment.output_tile]),
            splits[segment.output_tile].index(segment.first),
        )
        for segment in segments
    ]


#: Lengths of batches.
LENGTHS = [
    # Equal splits, with and without idle CTAs; whole short output tiles, the longest of those
    # and the shortest that is split.
    (4096, 4096),
    (4096,) * 5,
    (704 * 128,) * 5,
    (705 * 128,) * 5,
    (245,) * 8,
    (384,) * 5,
    (512,) * 5,
    # More output tiles than CTAs.
    (1024,) * 40,
    # One long sequence with short ones; none much longer than a share; an empty one.
    (65_536, 16, 16, 16),
    (256, 128, 1, 128),
    (1, 1, 1, 30_000),
    (300, 5000, 129, 128, 127, 2047),
]


@pytest.mark.parametrize(("build", "contexts"), diagonal(tuple(BUILDS), LENGTHS, keep=2))
def test_lengths_on_the_device(deal: Deal, build: str, contexts: tuple[int, ...]) -> None:
    group, config = BUILDS[build]
    problem = AttentionProblem(len(contexts), 4 * group, 4, contexts, 64)
    assert deal(problem, config) == played(problem, config)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("context", [100, 4096, (65_536, 16, 16), (300, 1, 300)])
def test_caches_with_room_for_more(deal: Deal, build: str, context: int | tuple[int, ...]) -> None:
    """CTAs are launched for the capacity, but walk the lengths."""
    group, config = BUILDS[build]
    problem = AttentionProblem(3, 4 * group, 4, context, 64, capacity=131_072, lengths_on="device")
    parts = deal(problem, config)
    assert parts == played(problem, config)
    per_sequence = (max(part[1] for part in parts) + 1) // problem.batch
    for _, output_tile, _, _, of, _, _ in parts:
        tiles = -(-problem.contexts[output_tile // per_sequence] // config.tile_tokens)
        assert of - tiles in (0, END_TILES)


def test_batches_at_random(deal: Deal) -> None:
    draw = random.Random(20261122)
    for _ in range(examples(60)):
        batch, longest = draw.choice([1, 3, 33, 70]), draw.choice([100, 3000, 40_000])
        contexts = tuple(draw.randint(1, longest) for _ in range(batch))
        problem = AttentionProblem(batch, 2, 2, contexts, 64)
        assert deal(problem, ONE_ROW) == played(problem, ONE_ROW), problem.contexts


@pytest.mark.parametrize(
    ("build", "page_size", "fixed_run_tiles"),
    diagonal(tuple(BUILDS), (None, 16, 48), (0, 4), keep=3),
)
def test_windows_and_padding(
    deal: Deal, build: str, page_size: int | None, fixed_run_tiles: int
) -> None:
    group, config = BUILDS[build]
    config = replace(config, fixed_run_tiles=fixed_run_tiles)
    axes = {"page_size": page_size, "window_left": 700, "q_len": 2}
    for context in (100, 701, 20_000, (5000, 30, 1000, 702, 701)):
        problem = AttentionProblem(5, 4 * group, 4, context, 64, capacity=30_000, **axes)
        is_ragged = problem.is_ragged
        for leftpad in (False, True) if is_ragged else (False,):
            given = replace(problem, leftpad=leftpad, capacity=30_000 if is_ragged else None)
            plays = of_runs if fixed_run_tiles else played
            assert deal(given, config) == plays(given, config), given.label


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_window_is_dealt_as_a_short_context(page_size: int | None) -> None:
    config = ONE_ROW
    long = AttentionProblem(5, 8, 8, 65_536, 64, window_left=511, page_size=page_size)
    build = CudaBuild.of(long, config)
    assert build.start_step == (page_size or 1)
    short = replace(long, context=512 + build.start_step - 1, window_left=-1)
    assert cuda_schedule(long, config, H200) == cuda_schedule(short, config, H200)


@pytest.mark.parametrize("context", [1, 245, 4096, 65_536])
@pytest.mark.parametrize("batch", [1, 5, 40])
@pytest.mark.parametrize("align_grid", [False, True])
def test_lengths_that_the_host_knows(
    deal: Deal, align_grid: bool, batch: int, context: int
) -> None:
    problem, config = (
        AttentionProblem(batch, 8, 8, context, 64),
        replace(ONE_ROW, align_grid=align_grid),
    )
    assert deal(problem, config) == played(problem, config)


@pytest.mark.parametrize("min_tiles", [1, 8])
@pytest.mark.parametrize("build", BUILDS)
def test_many_short_output_tiles_are_a_cta_each(deal: Deal, build: str, min_tiles: int) -> None:
    group, config = BUILDS[build]
    config = replace(config, align_grid=True, min_tiles_per_cta=min_tiles)
    problem = AttentionProblem(300, 8 * group, 8, 1000, 64)
    parts = deal(problem, config)
    assert parts == played(problem, config)
    tiles = len({part[1] for part in parts})
    assert {part[:2] for part in parts} == {(tiles - 1 - tile, tile) for tile in range(tiles)}
    for other in (replace(problem, batch=10), replace(problem, context=8200)):
        parts = deal(other, config)
        assert parts == played(other, config)
        assert len({part[0] for part in parts}) <= 264


def test_a_sequence_with_rows_for_one_of_two_warpgroups_has_longer_lean_tiles(tmp_path) -> None:
    """LeanTiles have 384 tokens, and 512 if all rows of a KV head belong to one warpgroup.

    16 query tokens of 4 query heads have 64 rows, 17 have 68.
    """
    contexts, q_lens = (3000, 2999, 1536, 70), (40, 16, 17, 1)
    problem = AttentionProblem(
        4, 8, 2, contexts, 64, q_lens=q_lens, capacity=4096, lengths_on="device"
    )
    warpgroups = cuda_config(128, 8, 2, 1, 1, 128, "bulk", 1, False)
    launch = launch_on(make_inputs(problem, "cpu", 0), warpgroups, H200.sms)
    room = (CPart * 1000)()
    library = compiled(launch.build, tmp_path)
    count = library.deal(ctypes.byref(launch.params), launch.grid, room, len(room))
    of_sequence = {part.sequence: part.tiles for part in room[:count]}
    assert of_sequence == {0: -(-3000 // 384), 1: -(-2999 // 512), 2: 1536 // 384, 3: 1}


#: Fixed runs of 128 to 1024 tokens.
FIXED = replace(ONE_ROW, fixed_run_tiles=8)


def of_runs(problem: AttentionProblem, config: CudaConfig) -> list[Part]:
    """Return the expected parts, counting fixed runs instead of LeanTiles."""
    parts = []
    for cta, output_tile, first, _, of, splits, split in played(problem, config):
        build = CudaBuild.of(problem, config)
        per_sequence = problem.kv_heads * build.row_tiles(problem.q_len)
        dealt = dealt_lengths(build, problem)[output_tile // per_sequence]
        run = fixed_run_tokens(dealt, per_sequence, config) // config.tile_tokens
        parts.append(
            (cta, output_tile, first // run, first // run + 1, -(-of // run), splits, split)
        )
    return parts


@pytest.mark.parametrize(
    "contexts",
    [
        (1024,),
        (1, 300, 4000, 20_000),
        (1024,) * 40,
        (65_536, 16, 2048, 2049),
        (128,) * 70,
        (3000,) * 5,
        (2063,) * 2,
        (2064,) * 2,
    ],
    ids=lambda contexts: f"{len(contexts)}x{max(contexts)}",
)
@pytest.mark.parametrize("kv_heads", [1, 8, 56])
def test_fixed_runs(deal: Deal, contexts: tuple[int, ...], kv_heads: int) -> None:
    context = contexts[0] if len(set(contexts)) == 1 else contexts
    problem = AttentionProblem(len(contexts), kv_heads, kv_heads, context, 64)
    assert deal(problem, FIXED) == of_runs(problem, FIXED)
    roomy = AttentionProblem(
        len(contexts), kv_heads, kv_heads, context, 64, capacity=131_072, lengths_on="device"
    )
    assert deal(roomy, FIXED) == of_runs(roomy, FIXED)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (8, 4), (56, 1), (2, 32)])
def test_fixed_runs_fit_the_slots_that_the_capacity_asks_for(kv_heads: int, group: int) -> None:
    per_sequence = kv_heads * -(-group // FIXED.tile_rows)
    for capacity in (1, 100, 128, 129, 1000, 2048, 5000, 16_385, 70_000):
        most = max(
            -(-tokens // fixed_run_tokens(tokens, per_sequence, FIXED))
            for tokens in range(1, capacity + 1)
        )
        assert most == most_fixed_runs(capacity, per_sequence, FIXED)


@pytest.mark.parametrize("kv_heads", [1, 3, 4, 8, 56])
def test_fixed_runs_of_lengths_that_share_a_launch_fit_the_slots_of_each(kv_heads: int) -> None:
    """2,063 tokens of 8 KV heads have fixed runs of 128 tokens, 2,064 of 256."""
    for length in range(1, 12_000, 7):
        fewest = most_fixed_runs(lengths_with(length)[0], kv_heads, FIXED)
        for other in lengths_with(length):
            if -(-other // FIXED.tile_tokens) == -(-length // FIXED.tile_tokens):
                assert -(-other // fixed_run_tokens(other, kv_heads, FIXED)) <= fewest


def test_a_lone_sequence_has_fixed_runs_for_most_ctas() -> None:
    runs = [8 * -(-tokens // fixed_run_tokens(tokens, 8, FIXED)) for tokens in (2048, 4096, 16_384)]
    assert runs == [128, 128, 128]
    assert fixed_run_tokens(1, 8, FIXED) == fixed_run_tokens(1024, 8, FIXED) == 128
    assert fixed_run_tokens(1 << 20, 8, FIXED) == 1024


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "contexts", [(4096,) * 2, (65_536, 16, 16, 16), (1, 1, 1, 30_000), (1024,) * 40, (3000,)]
)
def test_who_merges_waits_for_ctas_that_start_before(
    deal: Deal, build: str, contexts: tuple[int, ...]
) -> None:
    group, config = BUILDS[build]
    context = contexts[0] if len(set(contexts)) == 1 else contexts
    problem = AttentionProblem(
        len(contexts), 4 * group, 4, context, 64, capacity=131_072, lengths_on="device"
    )
    for settings in (config, replace(config, fixed_run_tiles=8)):
        ctas: dict[int, dict[int, int]] = defaultdict(dict)
        for cta, output_tile, _, _, _, _, split in deal(problem, settings):
            ctas[output_tile][split] = cta
        is_split = any(len(of_splits) > 1 for of_splits in ctas.values())
        assert is_split or config.cluster_size > 1 or len(contexts) == 40
        for of_splits in ctas.values():
            in_order = [of_splits[split] for split in range(len(of_splits))]
            assert in_order == sorted(in_order, reverse=True)


@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize("cluster_size", [1, 2])
def test_equal_splits(deal: Deal, splits: int, cluster_size: int) -> None:
    """Lengths are on the host and on the device, with windows.

    Some sequences have fewer LeanTiles than splits.
    """
    config = replace(FLASH_DECODING, cluster_size=cluster_size, splits=splits)
    flash_decoding = kernel("fixed_split_cuda")
    for context in (1, 245, 4096, (65_536, 16, 16), (300, 1, 300)):
        problem = AttentionProblem(3, 32, 2, context, 64)
        on_device = replace(problem, capacity=131_072, lengths_on="device")
        for given in (problem, on_device, replace(on_device, window_left=700, q_len=2)):
            schedule = flash_decoding.schedule(given, config, H200)
            assert schedule is not None
            assert deal(given, config) == parts_of(schedule.segments), given.label


@pytest.mark.parametrize("places", [1, 3, 50, 132])
@pytest.mark.parametrize(
    "contexts", [(4096,) * 8, (1024,) * 32, (20_000, 1, 300, 2048), (65_536,), (3000,) * 5]
)
def test_fixed_runs_end_on_any_number_of_places(contexts: tuple[int, ...], places: int) -> None:
    """CTAs start in order.

    They stay resident while a first run waits for all others of its output tile.
    """
    context = contexts[0] if len(set(contexts)) == 1 else contexts
    problem = AttentionProblem(len(contexts), 8, 8, context, 64)
    segments = cuda_schedule(problem, FIXED, H200).segments
    left: dict[int, list[Segment]] = defaultdict(list)
    waited_for: dict[int, int] = defaultdict(int)
    for segment in segments:
        left[segment.cta].append(segment)
        waited_for[segment.output_tile] += segment.first > 0
    starting, running = sorted(left), list[int]()
    while starting or running:
        running += starting[: places - len(running)]
        starting = [cta for cta in starting if cta not in running]
        before = sum(len(left[cta]) for cta in running)
        for cta in running:
            while left[cta] and (
                left[cta][0].first > 0 or not waited_for[left[cta][0].output_tile]
            ):
                segment = left[cta].pop(0)
                waited_for[segment.output_tile] -= segment.first > 0
        assert sum(len(left[cta]) for cta in running) < before
        running = [cta for cta in running if left[cta]]
