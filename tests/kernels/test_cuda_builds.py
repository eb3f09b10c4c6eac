"""LeanAttention in CUDA C++ without a GPU: its compiled code and its parameters."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from depth import deep, diagonal, label
from every_kind import KINDS, PLAIN
from hypothesis import given
from hypothesis import strategies as st
from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda import CudaLaunch, build_of, refusal
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_params import Divisor, Params, check_counts
from leanbench.kernels.mla.build import MlaBuild

from leanbench.compile.nvrtc import CudaBinary, CudaCompileError, compile_cuda
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import make_inputs, shape_only
from leanbench.core.kinds import SAME
from leanbench.core.paths import KERNELS
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import CATALOGUE, find
from leanbench.gpu.occupancy import theoretical_occupancy

PAGE_SCALES = AttentionProblem(
    8, 32, 8, 8192, 128, "bf16", kv_dtype="e4m3", page_scales="page", page_size=64
)
#: One for every kind of build: rows, pages, query positions, lengths on the device.
PROBLEMS = (
    AttentionProblem(1, 32, 8, 4096, 128),
    AttentionProblem(1, 56, 56, 1024, 64, "bf16"),
    AttentionProblem(32, 32, 8, 4096, 128),
    AttentionProblem(1, 32, 1, 32768, 128),
    AttentionProblem(4, 71, 1, 8192, 64),
    AttentionProblem(1, 28, 2, 8192, 128),
    AttentionProblem(1, 8, 8, 1000, 256),
    AttentionProblem(1, 32, 2, 1000, 256),
    AttentionProblem(64, 32, 8, 4000, 256),
    AttentionProblem(1, 10, 2, 1000, 80),
    AttentionProblem(1, 12, 12, 1000, 96),
    AttentionProblem(2, 64, 8, 4096, 128, q_len=16),
    AttentionProblem(2, 32, 8, (4096, 5), 128, page_size=16),
    AttentionProblem(3, 8, 8, (1, 70, 3000), 64, "bf16", "NHD", page_size=256, q_len=3),
    AttentionProblem(2, 32, 8, (4096, 5), 72, page_size=1),
    AttentionProblem(1, 32, 8, 4096, 512, page_size=48),
    AttentionProblem(1, 32, 8, 4096, 576, v_head_dim=512),
    AttentionProblem(2, 32, 8, 4096, 192, v_head_dim=128, q_lens=(64, 1)),
    AttentionProblem(2, 32, 8, 4096, 128, page_size=1, q_lens=(64, 1)),
    AttentionProblem(8, 32, 8, 4096, 128, "bf16", q_len=16),
    AttentionProblem(8, 64, 8, 4096, 128, q_len=4, page_size=16, causal=False, softcap=20.0),
    AttentionProblem(8, 64, 8, 4096, 64, "bf16", window_left=127, sinks=True, lengths_on="device"),
    AttentionProblem(8, 16, 8, 8192, 256, window_left=1023, softcap=50.0, page_size=64),
    AttentionProblem(4, 32, 8, 4096, 128, append=1, rotary_dim=64, lengths_on="device"),
    AttentionProblem(
        2, 32, 8, 4096, 128, q_len=2, alibi=True, causal=False, leftpad=True, batch_idx=True
    ),
    AttentionProblem(8, 32, 8, 8192, 128, "bf16", kv_dtype="e4m3"),
    AttentionProblem(1, 28, 2, 8192, 128, "bf16", kv_dtype="e4m3", q_dtype="e4m3"),
    AttentionProblem(2, 64, 8, 4096, 128, q_len=16, kv_dtype="e5m2"),
    PAGE_SCALES,
    replace(PAGE_SCALES, page_size=1, q_len=64),
    replace(PAGE_SCALES, page_size=48, q_len=4, window_left=1023, lengths_on="device"),
)
#: Indices of problems compiled in every run: rows, pages, query positions, masks, fp8. Each of GPUS
#: has one of them.
ALWAYS = (0, 11, 13, 18, 21, 23, 26, 28)
#: One of each architecture.
GPUS = ("a100", "a10g", "l40s", "h200", "b200", "rtx-5090")
BUILDS = [
    build if PROBLEMS.index(build.values[0]) in ALWAYS else deep(*build.values)
    for build in diagonal(PROBLEMS, GPUS, keep=len(GPUS))
]
#: Of the launch that merges the results over the prefix.
SHARED_PREFIX = AttentionProblem(
    *(64, 32, 8, 17408, 128, "bf16", "NHD"),
    page_size=16,
    shared_prefix=16384,
    lengths_on="device",
)
BUILDS += [
    deep(problem, name)
    for problem in (
        SHARED_PREFIX,
        replace(SHARED_PREFIX, q_len=4, sinks=True, softcap=30.0),
        replace(SHARED_PREFIX, kv_dtype="e4m3", page_scales="page", head_dim=64),
    )
    for name in GPUS
]


#: Plain decode with 8 query rows, with all candidates compiled in a deep run. Candidates for more
#: rows can spill; the tuner times those too.
TUNED = [
    AttentionProblem(1, 64, 8, 4096, head_dim, kv_dtype=kv_dtype)
    for head_dim in (64, 128, 256)
    for kv_dtype in (SAME, "e4m3")
]
CUDA_GPUS = [spec for spec in CATALOGUE if spec.compute_capability >= (8, 0)]
CAPABILITIES = sorted({spec.compute_capability for spec in CUDA_GPUS})


def assert_clean(binary: CudaBinary) -> None:
    """Fail for warnings, spills, other uses of the stack, and calls of the driver."""
    assert "warning" not in binary.log
    assert binary.spilled_registers == 0
    assert " 0 bytes stack frame" in binary.log
    assert b"__cuda_syscall" not in binary.cubin


def heuristic_build(problem: AttentionProblem, name: str) -> CudaBuild:
    config = kernel("lean_cuda").default_config(problem, find(name))
    assert config is not None
    return CudaBuild.of(problem, config)


# NVRTC takes seconds for each: a problem is compiled for one GPU, in a deep run for all.
@pytest.mark.parametrize(("problem", "name"), BUILDS, ids=label)
def test_heuristic_builds_are_clean_and_fit(problem, name):
    spec, build = find(name), heuristic_build(problem, name)
    binary = compile_cuda(build.source(spec.compute_capability))
    assert_clean(binary)
    resources = build.resources(binary, 1)
    assert resources.registers_per_thread <= 255
    assert theoretical_occupancy(resources, spec).ctas_per_sm >= build.ctas_per_sm


@pytest.mark.deep
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("problem", TUNED, ids=label)
def test_all_candidates_compile_cleanly(problem, capability):
    lean = kernel("lean_cuda")
    configs = [
        config
        for spec in CUDA_GPUS
        if spec.compute_capability == capability
        for config in (lean.default_config(problem, spec), *lean.tuning_space(problem, spec))
    ]
    for build in dict.fromkeys(CudaBuild.of(problem, config) for config in configs):
        assert_clean(compile_cuda(build.source(capability)))


@given(
    problem=st.builds(
        lambda batch, kv_heads, group, contexts, head_dim, q_len: AttentionProblem(
            batch,
            kv_heads * group,
            kv_heads,
            contexts[0] if len(set(contexts[:batch])) == 1 else tuple((contexts * batch)[:batch]),
            head_dim,
            q_len=q_len,
            v_head_dim=512 if head_dim > 512 else None,
        ),
        st.sampled_from([1, 2, 4, 16, 64]),
        st.sampled_from([1, 2, 8, 32]),
        st.sampled_from([1, 2, 5, 8, 16, 32, 71]),
        st.lists(st.sampled_from([1, 128, 700, 4096, 65_536]), min_size=1, max_size=2),
        st.sampled_from([8, 64, 72, 80, 96, 128, 192, 256, 512, 576]),
        st.sampled_from([1, 3, 16, 130]),
    ),
    spec=st.sampled_from(CUDA_GPUS),
)
def test_the_heuristic_finds_what_fits_every_gpu(problem, spec):
    lean = kernel("lean_cuda")
    for config in (
        lean.default_config(problem, spec),
        lean.any_length_config(problem, spec),
        lean.batch_invariant_config(problem, spec),
    ):
        assert config is not None
        assert_fits(CudaBuild.of(problem, config), config, spec)


def assert_fits(build: CudaBuild, config: LeanCudaConfig, spec: GpuSpec) -> None:
    assert build.fits(spec)
    assert build.chunk % 16 == 0
    assert config.tile_tokens % build.chunk == 0
    if spec.compute_capability < (9, 0):
        assert (config.copy, build.bulk, build.cluster) == ("async", 0, 1)


def test_what_the_host_passes_is_what_the_kernel_expects():
    build = CudaBuild.of(PROBLEMS[0], kernel("lean_cuda").default_config(PROBLEMS[0], find("a100")))
    source = build.source((8, 0))
    wrong = tuple((name, value + (name == "PARAMS_BYTES")) for name, value in source.defines)
    with pytest.raises(CudaCompileError, match="Params differs from the one of"):
        compile_cuda(replace(source, defines=wrong))


def test_clangd_gets_the_macros_of_a_build():
    flags = (KERNELS / "lean" / "compile_flags.txt").read_text(encoding="utf-8").splitlines()
    defines = [flag[2:].split("=") for flag in flags if flag.startswith("-D")]
    source = heuristic_build(PROBLEMS[12], "h200").source((9, 0))
    compile_cuda(replace(source, defines=tuple((name, int(value)) for name, value in defines)))
    assert [name for name, _ in defines] == [name for name, _ in source.defines]


def test_clangd_gets_the_macros_of_a_latent_build():
    flags = (KERNELS / "mla" / "compile_flags.txt").read_text(encoding="utf-8").splitlines()
    build = MlaBuild.of_shape(128, q_len=1, bf16=True, causal=True, ragged=True, page=64)
    macros = [f"-D{name}={value}" for name, value in build.source((9, 0)).defines]
    assert [flag for flag in flags if flag.startswith(("-I", "-D"))] == ["-I..", *macros]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
def test_tensors_are_launched_with_the_build_of_their_problem(problem):
    config = kernel("lean_cuda").default_config(problem, find("h200"))
    assert config is not None
    assert build_of(shape_only(problem), config) == CudaBuild.of(problem, config)


def stepping(tensor: torch.Tensor, axis: int, stride: int) -> torch.Tensor:
    """Return a tensor without memory, like `tensor` except for a stride."""
    strides = [
        stride if axis == dimension else own for dimension, own in enumerate(tensor.stride())
    ]
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


@pytest.mark.parametrize(
    ("name", "axis", "what"),
    [
        ("q", 1, "token"),
        ("q", 2, "head"),
        ("out", 1, "token"),
        ("out", 2, "head"),
        ("k_cache", 1, "token"),
        ("v_cache", 1, "token"),
    ],
)
def test_strides_that_a_launch_would_cut_off_are_refused(name, axis, what):
    inputs = shape_only(AttentionProblem(2, 8, 8, 100, 64, q_len=3))
    far, most = (
        replace(inputs, **{name: stepping(getattr(inputs, name), axis, stride)})
        for stride in (2**31, 2**31 - 1)
    )
    assert str(refusal(far)).startswith(
        f"{name} steps by 2147483648 numbers from {what} to {what}, lean_cuda takes at most"
    )
    assert refusal(most) == refusal(inputs) == "lean_cuda runs on a GPU, the tensors are on meta"


def test_strides_that_are_never_used_or_that_have_room_are_not_refused():
    inputs = shape_only(AttentionProblem(2, 8, 8, 100, 64))
    for name, axis in (("q", 0), ("q", 1), ("out", 0), ("k_cache", 0), ("k_cache", 2)):
        far = replace(inputs, **{name: stepping(getattr(inputs, name), axis, 2**40)})
        assert refusal(far) == refusal(inputs), (name, axis)


@pytest.mark.parametrize(("end_tiles", "parts"), [(0, 8), (1, 7), (3, 4)])
def test_a_trace_has_room_for_all_parts_of_a_run(end_tiles, parts):
    """One of five ranges has most of the seven short sequences, next to a long one."""
    problem = AttentionProblem(8, 16, 1, (8192, *[100] * 7), 128)
    params = Params(tile_shift=7, min_tiles_per_range=1, end_tiles=end_tiles)
    build = SimpleNamespace(
        cluster=4, heads_of_row=1, row_tiles=lambda _: 1, fixed_runs=0, start_step=1, packs=False
    )
    launch = SimpleNamespace(params=params, grid=20, build=build)
    assert CudaLaunch.most_parts(cast("Any", launch), make_inputs(problem, "cpu")) == parts


def test_a_trace_has_room_for_all_fixed_runs_of_a_cta():
    build = SimpleNamespace(fixed_runs=1, partial_bytes=1000)
    launch = SimpleNamespace(params=Params(), grid=132, slots_bytes=133 * 1000, build=build)
    assert CudaLaunch.most_parts(cast("Any", launch), cast("Any", None)) == 2


def test_counts_that_a_launch_would_cut_off_are_refused():
    check_counts(2**31 - 1, 2**31 - 1)
    for counts in ((2**31, 1), (1, 2**31)):
        with pytest.raises(UserError, match=r"^this call has 2147483648 .* counts to 2147483647"):
            check_counts(*counts)
    inputs = shape_only(AttentionProblem(2, 8, 8, 100, 64, page_size=16))
    table = torch.empty_strided((2, 2**31), (0, 0), dtype=torch.int32, device="meta")
    assert str(refusal(replace(inputs, block_table=table))).startswith(
        "block_table has 2147483648 pages a sequence, "
    )


def test_divisors_divide_exactly():
    draw = random.Random(5)
    for _ in range(2000):
        divisor = draw.choice((draw.randint(1, 50), draw.randint(1, 1 << 20)))
        by = Divisor.of(divisor)
        near = divisor * draw.randint(0, (1 << 31) // divisor - 1)
        edges = (0, divisor - 1, divisor, near, near + divisor - 1, (1 << 31) - 1)
        for n in (*edges, draw.randrange(1 << 31)):
            assert n * by.multiplier >> by.shift == n // divisor, (n, divisor)


def test_all_tuned_settings_fit_their_gpu():
    for name in ("a100", "h200", "b200"):
        spec = find(name)
        for problem in PROBLEMS:
            configs = kernel("lean_cuda").tuning_space(problem, spec)
            assert configs
            for config in configs:
                assert_fits(CudaBuild.of(problem, config), config, spec)


def test_shared_memory_is_what_the_kernel_lays_out():
    """The expected values are computed by hand from the constants of build.cuh."""
    config = LeanCudaConfig(
        128, 4, 3, 1, 1, True, chunk_tokens=32, tile_rows=32, cluster_size=8, copy="bulk"
    )
    ring = 4 * 3 * 2 * 2 * 32 * 128
    states = 4 * 4 * 4 * (128 + 4) + 8 * 4 * 8

    def inbox(pieces: int, rows: int) -> int:
        """Slices of 8 CTAs with the rows that they can begin and end in, and a barrier."""
        return 8 * (16 * pieces + 8 * rows) + 16

    assert (
        CudaBuild.of(PROBLEMS[0], config).shared_bytes == ring + states + inbox(16, 2) + 8 * 4 * 3
    )
    # In 8 bits, a row is one column, of 64 bytes if that suffices.
    fp8 = replace(PROBLEMS[0], kv_dtype="e4m3")
    assert CudaBuild.of(fp8, config).shared_bytes == ring // 2 + states + inbox(16, 2) + 8 * 4 * 3
    narrow = CudaBuild.of(replace(fp8, head_dim=64), config)
    assert narrow.shared_bytes == ring // 4 + 4 * 4 * 4 * 68 + 8 * 4 * 8 + inbox(8, 2) + 96
    # 32 rows: states overlay the ring, and the query rows are added.
    assert (
        CudaBuild.of(PROBLEMS[3], config).shared_bytes
        == ring + 8 * 4 * 32 + inbox(128, 5) + 2 * 32 * 136 + 96
    )


@pytest.mark.parametrize(
    ("group_size", "q_len", "head_dim", "tile_rows", "rows", "tiles"),
    [
        (1, 1, 128, 32, 8, 1),
        (8, 1, 128, 32, 8, 1),
        (9, 1, 128, 32, 16, 1),
        (9, 1, 128, 8, 8, 2),
        (4, 5, 64, 32, 32, 1),
        (71, 1, 64, 32, 32, 3),
        (71, 1, 64, 16, 16, 5),
        (32, 1, 256, 32, 16, 2),
    ],
)
def test_rows_of_an_output_tile(group_size, q_len, head_dim, tile_rows, rows, tiles):
    problem = AttentionProblem(1, group_size, 1, 100, head_dim, q_len=q_len)
    config = kernel("lean_cuda").default_config(problem, find("h200"))
    assert config is not None
    config = replace(config, tile_rows=tile_rows)
    build = CudaBuild.of(problem, config)
    assert (build.rows, build.row_tiles(q_len)) == (rows, tiles)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_for_any_lengths_follow_from_the_bound_of_a_capacity(kind):
    """leanbench.attention.prepared keeps them for all capacities of a bound."""
    lean = kernel("lean_cuda")
    for contexts in ((3073, 4000, 4096), (2049, 3072)):
        problems = [replace(PLAIN, **{**KINDS[kind], "context": context}) for context in contexts]
        assert len({lean.any_length_config(problem, find("h200")) for problem in problems}) == 1


def test_any_length_in_triton_keeps_the_build_of_a_full_cache():
    problem, spec = AttentionProblem(1, 64, 1, 131_072, 128), find("a100-80gb")
    full = kernel("lean").default_config(problem, spec)
    assert full is not None
    assert (full.min_tiles_per_cta, full.implementation) == (32, "triton")
    config = kernel("lean").any_length_config(problem, spec)
    assert config == replace(full, min_tiles_per_cta=4, align_grid=False)
    short = replace(problem, q_heads=4, kv_heads=4)
    config = kernel("lean").any_length_config(short, spec)
    assert config is not None
    assert (config.min_tiles_per_cta, config.align_grid) == (1, False)
