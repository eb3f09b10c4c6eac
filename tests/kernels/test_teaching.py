"""The teaching kernel: against the fp64 reference and the schedule on the host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from depth import diagonal, label
from leanbench.kernels.lean import teaching

from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.compile.build import process_pool
from leanbench.compile.triton_target import triton_target
from leanbench.core.decomposition import TileGrid, stream_k
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

ROOT = Path(__file__).parents[2]
TILE_TOKENS = teaching.TILE_TOKENS.value

#: Groups of 1, 4 and 7; one length, ragged ones, tails, whole LeanTiles, lengths of 1.
PROBLEMS = [
    AttentionProblem(1, 2, 2, 1, 64),
    AttentionProblem(2, 3, 3, 256, 64, "bf16"),
    AttentionProblem(3, 4, 1, (1, 300, 65), 128),
    AttentionProblem(3, 8, 2, (64, 1, 331), 64, "bf16"),
    AttentionProblem(2, 14, 2, (500, 129), 64),
    AttentionProblem(4, 7, 1, (1, 1, 200, 1), 256),
]
#: More than 64 rows, which the real kernel divides into several output tiles.
LARGE_GROUP = AttentionProblem(1, 71, 1, 190, 64)
#: Fewer CTAs than output tiles, the same number, more, and more than LeanTiles.
CTAS = [1, 2, 3, 4, 7, 40]


def attend(inputs: AttentionInputs, ctas: int) -> None:
    """Write the teaching kernel's results into the outputs of these inputs."""
    lengths = inputs.cache_seqlens
    if lengths is None:
        lengths = torch.full((inputs.batch,), inputs.context, device=inputs.q.device)
    k, v = inputs.k_cache.transpose(1, 2), inputs.v_cache.transpose(1, 2)
    out, lse = teaching.lean_attention(inputs.q[:, 0], k, v, lengths, ctas)
    inputs.out.copy_(out[:, None])
    inputs.lse.copy_(lse[:, :, None])


def assert_right(inputs: AttentionInputs) -> None:
    dtype = "bf16" if inputs.out.dtype == torch.bfloat16 else "fp16"
    assert Reference(inputs).check(inputs).failure(dtype) is None


@pytest.mark.parametrize(
    ("problem", "ctas"), diagonal([*PROBLEMS, LARGE_GROUP], CTAS, keep=5), ids=label
)
def test_matches_the_reference(problem, ctas, device):
    inputs = poison_unused(make_inputs(problem, device))
    attend(inputs, ctas)
    assert_right(inputs)


def test_lengths_outside_the_cache_are_the_nearest_inside(device):
    """An empty sequence has output 0 and LSE -inf."""
    inputs = make_inputs(AttentionProblem(3, 4, 2, 100, 64), device)
    wild = torch.tensor([-3, 1000, 0], dtype=torch.int32, device=device)
    inputs = replace(inputs, cache_seqlens=wild)
    attend(inputs, ctas=3)
    assert_right(inputs)
    assert (inputs.out[::2] == 0).all()
    assert inputs.lse[::2].isneginf().all()


def test_other_layouts_are_copied(device):
    inputs = make_inputs(AttentionProblem(2, 4, 2, (100, 300), 64, "fp16", "NHD"), device)
    attend(inputs, ctas=3)
    assert_right(inputs)


def segments(problem: AttentionProblem, ctas: int) -> list[tuple[int, int, int, int]]:
    """Return (g, output tile, first LeanTile, end) for each segment of the schedule on the host.

    A schedule's `cta` is Triton's program, and g counts programs backwards.
    """
    schedule = stream_k(TileGrid.of(problem, TILE_TOKENS), ctas)
    return [(schedule.grid - 1 - s.cta, s.output_tile, s.first, s.last) for s in schedule.segments]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="looks inside the kernel, which only the interpreter allows",
)
@pytest.mark.parametrize(("problem", "ctas"), diagonal(PROBLEMS, CTAS, keep=4), ids=label)
def test_ctas_walk_the_schedule(monkeypatch, problem, ctas):
    import triton.language as tl

    loop, seen = teaching.lean_tile, []

    def number(value) -> int:
        return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)

    def spy(*arguments):
        tile_idx, iter_begin, iter_end = map(number, arguments[3:6])
        seen.append((ctas - 1 - number(tl.program_id(0)), tile_idx, iter_begin, iter_end))
        return loop(*arguments)

    # CTAs without a work range are in the launch, not in the schedule.
    monkeypatch.setattr(teaching, "lean_tile", spy)
    attend(make_inputs(problem, "cpu"), ctas)
    assert seen == segments(problem, ctas)


def run_module(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leanbench.kernels.lean.teaching"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_module_draws_a_schedule_and_prints_the_error():
    done = run_module()
    assert done.returncode == 0, done.stderr
    drawn = re.findall(r"^sequence (\d), KV head (\d): ([\d ]+)$", done.stdout, re.MULTILINE)
    owners: dict[tuple[int, int], list[str]] = {}
    for g, tile, first, last in sorted(
        segments(AttentionProblem(3, 8, 2, (700, 130, 390), 64), ctas=5)
    ):
        owners.setdefault(divmod(tile, 2), []).extend([str(g)] * (last - first))
    assert {(int(s), int(h)): line.split() for s, h, line in drawn} == owners
    error = re.search(r"^Largest error against torch in fp64: (\S+)$", done.stdout, re.MULTILINE)
    assert error is not None
    assert float(error[1]) < 1e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_the_module_names_the_interpreter_without_a_gpu():
    done = run_module(TRITON_INTERPRET="0")
    assert done.returncode == 1
    assert done.stderr == "no GPU found: set TRITON_INTERPRET=1 to run in Triton's interpreter\n"


def test_it_stays_short():
    assert len(Path(teaching.__file__).read_text().splitlines()) <= 150


def ptx() -> str:
    """Return the kernel's PTX for compute capability 9.0."""
    half, single, whole, flags = (
        torch.empty(16, dtype=dtype)
        for dtype in (torch.float16, torch.float32, torch.int64, torch.int32)
    )
    tensors = (half, half, half, half, single, whole, whole, whole, single, single, single, flags)
    with triton_target((9, 0)):
        built = teaching.lean_kernel.warmup(*tensors, 2, 700, 0.125, 16, 64, grid=(5,))
    return built.asm["ptx"]


@pytest.mark.deep
def test_flags_order_the_partials():
    """One thread reads and writes flags; barriers make that hold for the partials of all."""
    with process_pool(1) as pool:
        text = pool.submit(ptx).result()
    steps = re.findall(r"bar\.sync|gpu\.acquire|gpu\.release|st\.global|ld\.global\.b", text)
    assert steps.count("gpu.acquire") == steps.count("gpu.release") == 1
    assert steps[steps.index("gpu.release") - 1] == "bar.sync"
    assert steps[steps.index("gpu.acquire") + 1] == "bar.sync"


@pytest.mark.gpu
@pytest.mark.timeout(180, method="thread")
def test_waiting_ctas_end_on_a_gpu():
    """A call for 5000 CTAs gets one per SM."""
    problem = AttentionProblem(5, 28, 4, (9000, 1, 130, 4096, 777), 128, "bf16")
    inputs = poison_unused(make_inputs(problem, "cuda"))
    for ctas in (1, 20, 100, 5000):
        for _ in range(20):
            inputs.poison()
            attend(inputs, ctas)
            assert_right(inputs)
