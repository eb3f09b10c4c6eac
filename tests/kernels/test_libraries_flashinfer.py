"""The adapters of FlashInfer against fakes that read the cache like the library: by page numbers
and strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from depth import label
from leanbench.kernels.libraries import flash_infer, flash_infer_xqa, library
from leanbench.kernels.libraries.best_mode import FlashInferMode
from leanbench.kernels.libraries.flash_infer_xqa import XqaConfig
from library_stand_ins import (
    CAPACITY,
    FP8,
    PAGED,
    RAGGED,
    SINKS,
    SOFTCAPS,
    UNIFORM,
    WINDOWS,
    addresses,
    attend,
    attended,
    block_table,
    checked,
    planning,
    stand_in,
)

from leanbench.check.reference import Reference
from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find


class FlashInferWrapper:
    """A wrapper that reads the cache by page numbers, through the strides of its tensors."""

    made: list[FlashInferWrapper]

    def __init__(
        self, workspace: torch.Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False
    ) -> None:
        assert workspace.dtype == torch.uint8
        assert not workspace.any()
        self.workspace, self.kv_layout = workspace, kv_layout
        self.use_tensor_cores = use_tensor_cores
        self.plans = self.runs = 0
        self.made.append(self)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
        o_data_type: torch.dtype | None = None,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
    ) -> None:
        self.plans += 1
        assert o_data_type in (q_data_type, None)
        assert {tensor.dtype for tensor in (indptr, indices, last_page_len)} == {torch.int32}
        assert len(indices) == indptr[-1]
        self.indptr, self._paged_kv_indices_buf, self.last_page_len = indptr, indices, last_page_len
        self.kv_heads, self.page_size, self.scale = num_kv_heads, page_size, sm_scale
        self.shape = (len(last_page_len), num_qo_heads, head_dim)
        self.dtypes = (q_data_type, kv_data_type, kv_data_type)
        self.window_left, self.softcap = window_left, logits_soft_cap

    def run(self, q, paged_kv_cache, *, out, lse, return_lse):
        self.runs += 1
        assert return_lse
        assert q.shape == out.shape == self.shape
        assert lse.shape == q.shape[:2]
        assert (q.dtype, *(cache.dtype for cache in paged_kv_cache)) == self.dtypes
        assert out.dtype == q.dtype
        assert self._paged_kv_indices_buf.dtype == torch.int32
        if self.kv_layout == "HND":
            paged_kv_cache = [cache.transpose(1, 2) for cache in paged_kv_cache]
        for cache in paged_kv_cache:
            assert cache.shape[1:3] == (self.page_size, self.kv_heads)
        lengths = (self.indptr.diff() - 1) * self.page_size + self.last_page_len
        table = block_table(self.indptr, self._paged_kv_indices_buf)
        kinds = {"window_left": self.window_left, "softcap": self.softcap}
        k, v = paged_kv_cache
        outs, natural = attended(q[:, None], k, v, lengths, table, self.scale, **kinds)
        out.copy_(outs[:, 0])
        lse.copy_(natural[..., 0] / math.log(2))


@pytest.fixture
def flashinfer(monkeypatch) -> Iterator[list[FlashInferWrapper]]:
    """Return the wrappers that were created."""
    FlashInferWrapper.made = []
    with planning(monkeypatch, BatchDecodeWithPagedKVCacheWrapper=FlashInferWrapper):
        yield FlashInferWrapper.made


@pytest.mark.parametrize(
    "problem", [*UNIFORM, *RAGGED, *PAGED, *CAPACITY, *WINDOWS, *SOFTCAPS, *FP8], ids=label
)
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_cuda_cores"])
def test_flashinfer_reads_the_cache_in_place(name, problem, flashinfer):
    assert kernel(name).unsupported_reason(problem) is None
    inputs, launch = checked(name, problem)
    assert len(flashinfer) == 1
    planned = flashinfer[0]
    assert planned.use_tensor_cores == (name == "flashinfer")
    assert planned.kv_layout == problem.kv_layout
    assert planned.page_size == (problem.page_size or math.gcd(problem.cache_capacity, 64))
    assert planned.scale == problem.head_dim**-0.5
    tensors = [*launch.args[:1], *launch.args[1], launch.keywords["out"], launch.keywords["lse"]]
    assert addresses(*tensors) == addresses(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.out, inputs.lse
    )
    caches = launch.args[1]
    assert caches[0].stride() == caches[1].stride()


@pytest.mark.parametrize("problem", [UNIFORM[1], RAGGED[0], PAGED[2]], ids=label)
def test_flashinfer_plans_once_for_buffers_that_rotate(problem, flashinfer):
    """All are created before any is launched: no launch reads data of another."""
    buffers = [make_inputs(problem, "cpu") for _ in range(3)]
    launches: list[Any] = kernel("flashinfer").prepare_all(buffers, None)
    assert [launch.func.__self__.runs for launch in launches] == [1, 0, 0]
    launches += kernel("flashinfer_cuda_cores").prepare_all(buffers, None)
    assert len({launch.func.__self__._paged_kv_indices_buf.data_ptr() for launch in launches}) == 6
    for inputs, launch in zip([*buffers, *buffers], launches, strict=True):
        assert launch.args[0].data_ptr() == inputs.q.data_ptr()
        inputs.poison()
        launch()
        assert Reference(inputs).check(inputs, 2.0).failure(problem.dtype) is None
    assert [wrapper.use_tensor_cores for wrapper in flashinfer] == [True, False]
    assert [wrapper.plans for wrapper in flashinfer] == [1, 1]
    assert flashinfer[0].workspace is flashinfer[1].workspace


def test_planning_again_leaves_the_launches_plan_alone(flashinfer):
    problem = AttentionProblem(2, 8, 2, (300, 70), 64)
    inputs = make_inputs(problem, "cpu")
    launch = kernel("flashinfer").prepare(inputs, None)
    again = kernel("flashinfer").planner(inputs, None)
    assert again is not None
    assert len(flashinfer) == 2
    again()
    assert [wrapper.indptr.tolist() for wrapper in flashinfer] == 2 * [
        flashinfer[0].indptr.tolist()
    ]
    inputs.poison()
    launch()
    assert Reference(inputs).check(inputs, lse_base=2.0).failure("fp16") is None


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_keeps_the_latest_plan():
    for batch in range(1, 4):
        inputs = make_inputs(AttentionProblem(batch, 2, 2, 64, 64), "cpu")
        kernel("flashinfer").prepare(inputs, None)
    assert flash_infer._planned.cache_info().currsize == 1


class PersistentWrapper:
    """A BatchAttention: it takes lengths, not last pages, and has its own name for page numbers."""

    made: list[PersistentWrapper]

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        assert device == "cpu"
        self.decode = FlashInferWrapper(torch.zeros(1, dtype=torch.uint8), kv_layout)
        self.made.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        *,
        causal: bool,
        **options: Any,
    ) -> None:
        # A query token for each sequence.
        assert qo_indptr.tolist() == list(range(len(kv_len_arr) + 1))
        assert {qo_indptr.dtype, kv_len_arr.dtype} == {torch.int32}
        assert not causal
        assert head_dim_qk == head_dim_vo
        last_page_len = ((kv_len_arr - 1) % page_size + 1).to(torch.int32)
        self._kv_indices = kv_indices
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.decode.plan(kv_indptr, kv_indices, last_page_len, *sizes, **options)

    def run(self, q, kv_cache, out, lse, logits_soft_cap):
        assert logits_soft_cap == self.decode.softcap
        self.decode._paged_kv_indices_buf = self._kv_indices
        self.decode.run(q, kv_cache, out=out, lse=lse, return_lse=True)


@pytest.fixture
def persistent(flashinfer, monkeypatch) -> list[PersistentWrapper]:
    """Return the BatchAttentions that were created."""
    PersistentWrapper.made = []
    stand_in(monkeypatch, "flashinfer", BatchAttention=PersistentWrapper)
    return PersistentWrapper.made


@pytest.mark.parametrize(
    "problem", [*UNIFORM, *RAGGED, *PAGED, *CAPACITY, *SOFTCAPS, *FP8], ids=label
)
def test_the_persistent_kernel_plans_once_and_reads_the_cache_in_place(problem, persistent):
    assert kernel("flashinfer_persistent").unsupported_reason(problem) is None
    buffers = [make_inputs(problem, "cpu") for _ in range(3)]
    config = FlashInferMode("flashinfer_persistent")
    launches = kernel("flashinfer_best").prepare_all(buffers, config)
    for inputs, launch in zip(buffers, launches, strict=True):
        inputs.poison()
        launch()
        assert Reference(inputs).check(inputs, 2.0).failure(problem.dtype) is None
    assert [wrapper.decode.plans for wrapper in persistent] == [1]
    assert persistent[0].decode.kv_layout == problem.kv_layout
    launch, first = launches[0], buffers[0]
    assert isinstance(launch, partial)
    tensors = [launch.args[0], *launch.args[1], launch.keywords["out"], launch.keywords["lse"]]
    assert addresses(*tensors) == addresses(
        first.q, first.k_cache, first.v_cache, first.out, first.lse
    )


@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(1, 2, 2, 150, 64),
        AttentionProblem(1, 8, 2, 97, 128, "bf16", "NHD"),
        AttentionProblem(1, 1, 1, 33, 64, "fp16", "NHD"),
        AttentionProblem(1, 4, 1, 64, 256, "bf16", "HND"),
    ],
    ids=label,
)
@pytest.mark.parametrize("name", ["flashinfer_single", "flashinfer_single_cuda_cores"])
def test_a_single_sequence_is_handed_over_in_place(name, problem, monkeypatch):
    calls: list[tuple[torch.Tensor, ...]] = []

    def single_decode_with_kv_cache(
        q, k, v, kv_layout="NHD", *, use_tensor_cores, sm_scale, return_lse
    ):
        assert return_lse
        assert use_tensor_cores == (name == "flashinfer_single")
        assert kv_layout == problem.kv_layout
        # The library computes addresses from the shape.
        assert all(tensor.is_contiguous() for tensor in (q, k, v))
        assert q.shape == (problem.q_heads, problem.head_dim)
        calls.append((q, k, v))
        k, v = (k, v) if kv_layout == "HND" else (k.transpose(0, 1), v.transpose(0, 1))
        out, natural = attend(q[:, None], k, v, sm_scale)
        # On tensor cores, a single head's LSE comes without dimensions.
        return out[:, 0].to(q.dtype), natural[:, 0].squeeze(0) / math.log(2)

    stand_in(monkeypatch, "tvm_ffi")
    stand_in(monkeypatch, "flashinfer", single_decode_with_kv_cache=single_decode_with_kv_cache)
    assert kernel(name).unsupported_reason(problem) is None
    inputs, _ = checked(name, problem)
    assert addresses(*calls[-1]) == addresses(inputs.q, inputs.k_cache, inputs.v_cache)


@pytest.mark.parametrize(
    ("message", "raised", "expected"),
    [
        (
            "Buffer overflow when allocating memory for {} with size 9 and alignment 16, but only 8"
            " bytes available in AlignedAllocator. Increase the workspace buffer size.",
            UserError,
            "no room for {} of 1 sequences x 8 KV heads x head_dim 64, in a buffer",
        ),
        ("CUDA error: misaligned address in {}", RuntimeError, "misaligned address in {}"),
    ],
)
@pytest.mark.parametrize(
    ("name", "wrapper", "buffer"),
    [
        ("flashinfer", FlashInferWrapper, "batch_prefill_tmp_v"),
        ("flashinfer_cuda_cores", FlashInferWrapper, "batch_decode_tmp_v"),
        ("flashinfer_persistent", PersistentWrapper, "holistic_partial_o"),
    ],
)
def test_a_plan_that_does_not_fit_a_buffer_is_told(
    name, wrapper, buffer, message, raised, expected, request, monkeypatch
):
    def plan(self: object, *args: object, **options: object) -> None:
        raise RuntimeError(message.format(buffer))

    request.getfixturevalue("persistent" if wrapper is PersistentWrapper else "flashinfer")
    monkeypatch.setattr(wrapper, "plan", plan)
    inputs = make_inputs(AttentionProblem(1, 8, 8, 300, 64), "cpu")
    with pytest.raises(raised, match=expected.format(buffer)):
        kernel(name).prepare(inputs, None)


class Xqa:
    """A fake of `flashinfer.xqa` that reads pages through their strides."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, q, k_cache, v_cache, table, seq_lens, output, workspace, semaphores, heads, page_size,
        **options: Any,
    ) -> None:  # fmt: skip
        assert k_cache.shape[1:3] == v_cache.shape[1:3] == (page_size, heads)
        assert table.dtype == torch.int32
        assert (seq_lens.dtype, seq_lens.shape) == (torch.uint32, (len(q), 1))
        assert not semaphores.view(torch.int32).any()
        sinks, window = options["sinks"], options["sliding_win_size"]
        assert sinks is None or (sinks.dtype, len(sinks)) == (torch.float32, heads)
        self.calls.append({"page_size": page_size, **options})
        scale = options["q_scale"] * q.shape[-1] ** -0.5
        tokens = seq_lens.view(torch.int32)[:, 0]
        kinds = {"sinks": None if sinks is None else sinks.flatten(), "window_left": window - 1}
        out, _ = attended(q, k_cache, v_cache, tokens, table, scale, **kinds)
        output.copy_(out)


@pytest.fixture
def xqa(monkeypatch) -> Iterator[Xqa]:
    """Install a fake of XQA; return it with its calls."""
    calls = Xqa()
    stand_in(monkeypatch, "flashinfer", xqa=calls)
    stand_in(monkeypatch, "tvm_ffi")
    monkeypatch.setattr(flash_infer_xqa, "_SCRATCH_BYTES", 1000)
    flash_infer_xqa._workspace.cache_clear()
    yield calls
    flash_infer_xqa._workspace.cache_clear()


OF_XQA = [UNIFORM[1], UNIFORM[2], *PAGED, CAPACITY[1], CAPACITY[2], *SINKS, *FP8]


@pytest.mark.parametrize("problem", [*OF_XQA, WINDOWS[0], WINDOWS[2]], ids=label)
def test_xqa_reads_pages_in_place(problem, xqa):
    assert kernel("flashinfer_xqa").unsupported_reason(problem) is None
    config = XqaConfig(enable_pdl=problem.batch > 1)
    inputs, launch = checked("flashinfer_xqa", problem, config)
    assert addresses(*launch.args[:3]) == addresses(inputs.q, inputs.k_cache, inputs.v_cache)
    call = xqa.calls[-1]
    assert call["page_size"] == (problem.page_size or math.gcd(problem.cache_capacity, 64))
    assert call["q_scale"] == pytest.approx(1)
    assert call["enable_pdl"] == (problem.batch > 1)


def test_xqa_is_tried_with_programmatic_dependent_launch_and_without():
    own = kernel("flashinfer_xqa")
    candidates = own.candidate_configs(UNIFORM[1], find("h200"))
    assert candidates == [XqaConfig(enable_pdl=True), XqaConfig(enable_pdl=False)]
    assert own.default_config(UNIFORM[1], find("h200")) == candidates[0]
    assert own.config_choice == "best"


BATCH_MODES = ["flashinfer", "flashinfer_cuda_cores", "flashinfer_persistent"]
SINGLE_MODES = ["flashinfer_single", "flashinfer_single_cuda_cores"]


@pytest.mark.parametrize(
    ("axes", "modes"),
    [
        ({}, [*BATCH_MODES, *SINGLE_MODES]),
        ({"batch": 2}, BATCH_MODES),
        ({"page_size": 16}, BATCH_MODES),
        ({"lengths_on": "device"}, BATCH_MODES),
        ({"q_heads": 10}, BATCH_MODES[::2] + SINGLE_MODES[:1]),
        ({"capacity": 512}, BATCH_MODES),
        ({"capacity": 512, "kv_layout": "NHD"}, [*BATCH_MODES, *SINGLE_MODES]),
    ],
    ids=str,
)
def test_the_best_of_flashinfer_is_any_mode_that_takes_the_problem(axes, modes, monkeypatch):
    problem = replace(AttentionProblem(1, 8, 2, 300, 64), **axes)
    monkeypatch.setattr(library, "find_spec", lambda name: ModuleSpec(name, None))
    best = kernel("flashinfer_best")
    assert best.unsupported_reason(problem) is None
    assert best.config_choice == "best"
    candidates = best.candidate_configs(problem, find("h200"))
    assert candidates == [FlashInferMode(mode) for mode in modes]
    assert best.default_config(problem, find("h200")) == candidates[0]


@pytest.mark.parametrize("mode", BATCH_MODES)
def test_the_best_of_flashinfer_launches_and_plans_the_mode_that_its_config_names(mode, request):
    request.getfixturevalue("persistent" if mode == "flashinfer_persistent" else "flashinfer")
    checked("flashinfer_best", RAGGED[0], FlashInferMode(mode))
    inputs = make_inputs(RAGGED[0], "cpu")
    again = kernel("flashinfer_best").planner(inputs, FlashInferMode(mode))
    own = kernel(mode).planner(inputs, None)
    assert isinstance(again, partial)
    assert isinstance(own, partial)
    assert again.func.__qualname__ == own.func.__qualname__


class CascadeWrapper:
    """A wrapper that attends over the pages of both levels, in the order of the levels."""

    def __init__(self, num_levels: int, workspace: torch.Tensor, kv_layout: str) -> None:
        assert num_levels == 2
        self.kv_layout = kv_layout

    def plan(
        self, starts, page_starts, pages, last_page_len, q_heads, kv_heads, head_dim, page_size, *,
        sm_scale, logits_soft_cap, q_data_type, kv_data_type,
    ):  # fmt: skip
        batch = len(last_page_len[1])
        assert [each.tolist() for each in starts] == [[0, batch], list(range(batch + 1))]
        assert {each.dtype for each in (*page_starts, *pages, *last_page_len)} == {torch.int32}
        assert last_page_len[0].tolist() == [page_size]
        assert page_starts[0].tolist() == [0, len(pages[0])]
        own = block_table(page_starts[1], pages[1])
        self.table = torch.cat([pages[0].expand(batch, -1), own], dim=1)
        counts = len(pages[0]) + page_starts[1].diff()
        self.lengths = (counts - 1) * page_size + last_page_len[1]
        self.scale, self.softcap = sm_scale, logits_soft_cap

    def run(self, q, paged_kv_cache):
        k, v = paged_kv_cache
        if self.kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        kinds = {"softcap": self.softcap}
        out, _ = attended(q[:, None], k, v, self.lengths, self.table, self.scale, **kinds)
        return out[:, 0]


@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(2, 8, 2, 100, 64, page_size=16, shared_prefix=48),
        AttentionProblem(
            *(3, 4, 2, (40, 33, 130), 64, "bf16", "NHD"),
            page_size=16,
            shared_prefix=32,
            softcap=9.0,
        ),
    ],
    ids=label,
)
def test_the_cascade_reads_both_levels(problem, monkeypatch):
    with planning(monkeypatch, MultiLevelCascadeAttentionWrapper=CascadeWrapper):
        checked("flashinfer_cascade", problem)


def test_the_cascade_takes_sequences_that_share_pages_and_have_more(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: ModuleSpec(name, None))
    cascade, problem = kernel("flashinfer_cascade"), AttentionProblem(2, 8, 2, 100, 64)
    for prefix, reason in ((0, "shared prefix"), (96, None), (100, "tokens of their own")):
        page_size = 4 if prefix else None
        given = replace(problem, page_size=page_size, shared_prefix=prefix)
        refusal = cascade.refusal(given)
        assert refusal is None if reason is None else reason in str(refusal)
