"""Default settings of kernels: on an H200, for lengths on the device, and for the decompositions of
FlashAttention-2 and FlashDecoding on lean.cu.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from leanbench.kernels.fixed_split.configs import any_length_splits
from leanbench.kernels.lean.cuda_build import CudaBuild, ManyRowsBuild
from leanbench.kernels.lean.cuda_splits import lone_build

from leanbench.core.decomposition import TileGrid
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

H200 = find("h200")
PLAIN = AttentionProblem(8, 32, 8, 65_536, 128)
THREE_LONG = replace(PLAIN, context=(65_536,) * 3 + (16,) * 5)
#: Settings of problems at the borders of the heuristics' cases, a JSON object in each line: kernel,
#: its method, the problem's fields, and the settings.
ROWS = Path(__file__).with_name("settings.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("line", ROWS, ids=range(1, len(ROWS) + 1))
def test_settings_of_an_h200(line):
    row = json.loads(line)
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in row["problem"].items()
    }
    problem, own = AttentionProblem(**fields), kernel(row["kernel"])
    config = getattr(own, row["choice"])(problem, H200)
    assert config.to_dict() == row["config"]
    if row["kernel"] == "lean_cuda":
        build = CudaBuild.of(problem, config)
        assert build.fits(H200)
        assert config in own.candidate_configs(problem, H200) or "any" in row["choice"]
        assert isinstance(build, ManyRowsBuild) == (config.tile_rows >= 64)
        if config.tile_rows >= 64:
            # CTAs that do not wait need not be resident together.
            assert build.cooperative == (config.cluster_size == 1)
    if row["kernel"] == "lean":
        # Neither capacity, lengths nor pages matter.
        for axes in ({"context": 256}, {"context": (7,) * problem.batch}, {"page_size": 64}):
            assert own.any_length_config(replace(problem, **axes), H200) == config


def build_of(config) -> tuple[int, ...]:
    """Return chunk, warps, stages, CTAs per SM and per cluster."""
    return (
        *(config.chunk_tokens, config.num_warps, config.num_stages),
        *(config.ctas_per_sm, config.cluster_size),
    )


@pytest.mark.parametrize("name", ["lean_cuda", "lean_triton", "fixed_split_cuda", "fixed_split"])
def test_uneven_lengths_take_the_settings_for_any_lengths(name):
    """Settings for equal lengths, as long as the longest, would be slower.

    See entry 52 of reports/performance-log.md.
    """
    own = kernel(name)
    on_device = replace(PLAIN, lengths_on="device")
    expected = own.any_length_config(on_device, H200)
    assert own.default_config(THREE_LONG, H200) == expected
    assert own.default_config(on_device, H200) == expected
    short_in_a_large_cache = replace(THREE_LONG, context=(900,) + (16,) * 7, capacity=65_536)
    assert own.default_config(short_in_a_large_cache, H200) == expected
    assert own.default_config(PLAIN, H200) != expected


def test_three_long_sequences_among_short_ones():
    """Clusters with a whole output tile each would be slower."""
    lean = kernel("lean_cuda").default_config(THREE_LONG, H200)
    assert lean is not None
    assert (*build_of(lean), lean.min_tiles_per_cta, lean.align_grid) == (32, 4, 2, 1, 1, 1, False)


@pytest.mark.parametrize(
    ("batch", "heads", "context", "ctas"),
    [
        # Many short output tiles; too few of them, too long ones.
        (64, 48, 1024, 3072),
        (64, 32, 8192, 2048),
        (8, 48, 1024, 264),
        (64, 32, 10_000, 264),
    ],
)
def test_many_short_output_tiles_are_a_cta_each(batch, heads, context, ctas):
    lean, problem = kernel("lean_cuda"), AttentionProblem(batch, heads, heads, context, 64)
    schedule = lean.schedule(problem, lean.default_config(problem, H200), H200)
    assert schedule is not None
    assert len({segment.cta for segment in schedule.segments}) == ctas


@pytest.mark.parametrize(
    ("contexts", "kv_heads", "splits"),
    [
        ((65_536,), 1, 128),
        ((65_536, 16), 8, 16),
        ((65_536, 16, 16), 8, 44),
        ((65_536,) * 64, 8, 2),
        ((65_536,) * 64, 32, 1),
        ((1000,), 8, 4),
        ((100,), 8, 1),
    ],
)
def test_splits_for_any_lengths(contexts, kv_heads, splits):
    """There are eight waves of CTAs, or two of few output tiles.

    A split has at least two LeanTiles, and an output tile at most 128 splits.
    """
    problem = AttentionProblem(len(contexts), 4 * kv_heads, kv_heads, max(contexts), 128)
    tiles = TileGrid.of(problem, 128, 8)
    assert any_length_splits(tiles, H200) == splits
    on_device = replace(problem, context=contexts, lengths_on="device")
    config = kernel("fixed_split_cuda").default_config(on_device, H200)
    assert config is not None
    assert (config.splits, *build_of(config)) == (splits, 16, 8, 2, 1, 1)
    short_rows = kernel("fixed_split_cuda").default_config(replace(on_device, head_dim=64), H200)
    assert short_rows is not None
    assert (short_rows.splits, *build_of(short_rows)) == (splits, 32, 4, 2, 2, 1)


def test_never_split_the_longest_sequence_decides():
    """For more output tiles than SMs, one CTA per SM is faster than two.

    See entry 52 of reports/performance-log.md.
    """
    fa2 = kernel("fa2_cuda")
    equal = AttentionProblem(32, 64, 8, 8192, 128)
    uneven = replace(equal, context=(8192,) + (800,) * 31)
    builds = [build_of(fa2.default_config(problem, H200)) for problem in (equal, uneven)]
    assert builds == [(16, 4, 3, 2, 1), (16, 8, 2, 1, 1)]


@pytest.mark.parametrize(
    ("heads", "head_dim", "kv_dtype", "build"),
    [
        ((8, 8), 64, "same", (32, 8, 2, 1)),
        ((8, 8), 128, "same", (16, 8, 2, 1)),
        ((32, 1), 128, "same", (16, 8, 2, 1)),
        ((8, 8), 128, "e4m3", (32, 8, 2, 1)),
        # Chunks of 32 tokens would spill registers.
        ((32, 1), 128, "e4m3", (16, 8, 2, 1)),
        ((8, 8), 256, "same", (16, 4, 3, 1)),
    ],
)
def test_a_cta_that_has_its_sm_for_itself(heads, head_dim, kv_dtype, build):
    problem = AttentionProblem(1, heads[0], heads[1], 65_536, head_dim, kv_dtype=kv_dtype)
    fa2 = kernel("fa2_cuda").default_config(problem, H200)
    assert fa2 is not None
    assert lone_build(problem, fa2.tile_rows) == build
    assert build_of(fa2) == (*build, 1)


@pytest.mark.parametrize(
    ("batch", "heads", "context", "head_dim", "build", "splits"),
    [
        # Figure 7a.
        (1, (56, 56), 4096, 64, (32, 8, 2, 1, 1), 1),
        (1, (24, 24), 1024, 64, (64, 4, 3, 1, 4), 1),
        (1, (32, 8), 4096, 128, (32, 4, 3, 1, 8), 1),
        (1, (32, 8), 32_768, 128, (16, 8, 2, 1, 1), 16),
        (1, (40, 40), 65_536, 64, (32, 8, 2, 1, 1), 3),
        (8, (12, 12), 4096, 64, (32, 8, 2, 1, 1), 1),
        (1, (16, 16), 524_288, 64, (32, 8, 2, 1, 1), 8),
        (16, (16, 16), 4096, 64, (32, 4, 2, 2, 1), 1),
        (64, (48, 48), 2048, 64, (32, 4, 2, 2, 1), 1),
    ],
)
def test_splits_of_equal_lengths(batch, heads, context, head_dim, build, splits):
    """The splits are within 1% of the fastest (entry 52 of reports/performance-log.md)."""
    problem = AttentionProblem(batch, heads[0], heads[1], context, head_dim)
    config = kernel("fixed_split_cuda").default_config(problem, H200)
    assert config is not None
    assert (build_of(config), config.splits) == (build, splits)


@pytest.mark.parametrize(
    ("heads", "context", "head_dim", "build"),
    [
        # Two CTAs per output tile, 45 to 66 of them.
        (56, 1024, 64, (32, 8, 2, 1, 1)),
        (66, 4096, 64, (32, 8, 2, 1, 1)),
        (45, 2048, 64, (32, 8, 2, 1, 1)),
        # Three: 23 MB, then 41 MB.
        (44, 2048, 64, (64, 4, 3, 1, 2)),
        (40, 4000, 64, (32, 8, 2, 1, 2)),
        (36, 8192, 64, (32, 8, 2, 1, 2)),
        # 134 MB; 128 columns.
        (64, 8192, 64, (32, 8, 2, 1, 2)),
        (56, 1024, 128, (32, 4, 3, 1, 2)),
        # Eight LeanTiles and nine; too few output tiles for that; 128 columns.
        (40, 1024, 64, (32, 8, 2, 1, 1)),
        (40, 1088, 64, (64, 4, 3, 1, 2)),
        (24, 1024, 64, (64, 4, 3, 1, 4)),
        (40, 1024, 128, (32, 4, 3, 1, 2)),
        # Few output tiles, 1.1 GB.
        (4, 1_048_576, 64, (64, 4, 3, 1, 2)),
    ],
)
def test_two_ctas_of_an_output_tile_are_no_pair(heads, context, head_dim, build):
    """Two CTAs of an output tile do not form a cluster (entry 58 of reports/performance-log.md)."""
    problem = AttentionProblem(1, heads, heads, context, head_dim)
    config = kernel("lean_cuda").default_config(problem, H200)
    assert config is not None
    assert build_of(config) == build
