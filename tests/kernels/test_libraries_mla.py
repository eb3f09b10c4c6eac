"""The adapters of FlashMLA and of FlashInfer's MLA decode against fakes of their functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from depth import label
from leanbench.kernels.libraries import library
from library_stand_ins import LATENT, addresses, attended, block_table, checked, planning, stand_in

from leanbench.check.reference import Reference
from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.kernel import written_by
from leanbench.core.registry import kernel
from leanbench.core.row_scales import decode_rows

PAGED = [
    replace(LATENT, page_size=64),
    replace(LATENT, batch=3, context=(2, 65, 130), q_len=2, page_size=64),
]
CONTIGUOUS = replace(LATENT, context=128)


@pytest.fixture
def schedules(monkeypatch) -> list[object]:
    """Install a fake of FlashMLA; return the schedules of its calls."""
    calls: list[object] = []

    def flash_mla_with_kvcache(q, k_cache, table, lengths, head_dim_v, schedule, **options):
        scale = options.pop("softmax_scale")
        assert options == {"causal": True, "use_legacy": True}
        assert k_cache.shape[1:] == (64, 1, 576)
        calls.append(schedule)
        return attended(q, k_cache, k_cache[..., :head_dim_v], lengths, table, scale)

    def get_mla_decoding_metadata(seqlens_k, rows, h_k, h_q, *, use_legacy):
        assert use_legacy
        return seqlens_k.tolist(), rows, h_k, h_q

    stand_in(
        monkeypatch,
        "flash_mla",
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        get_mla_metadata=lambda: (object(), None),
        get_mla_decoding_metadata=get_mla_decoding_metadata,
    )
    return calls


@pytest.mark.parametrize(
    "problem", [*PAGED, CONTIGUOUS, replace(LATENT, context=(100, 7), capacity=192)], ids=label
)
def test_flash_mla_is_handed_pages_and_keeps_its_schedule(problem, schedules):
    adapter = kernel("flash_mla")
    assert adapter.unsupported_reason(problem) is None
    inputs, _ = checked("flash_mla", problem)
    assert len(schedules) == 2
    assert schedules[0] is schedules[1]
    planner = adapter.planner(inputs, None)
    assert planner is not None
    assert planner() == (list(problem.contexts), 16 * problem.q_len, 1, 16)


CHOSEN = replace(LATENT, q_heads=5, select=64, kv_dtype="e4m3", row_scales=True)


@pytest.mark.parametrize(
    ("problem", "lengths"),
    [
        (replace(CHOSEN, context=704), None),
        (replace(CHOSEN, q_heads=128, context=(30, 700), lengths_on="device"), [30, 64]),
    ],
    ids=label,
)
def test_flash_mla_pads_heads_and_is_handed_chosen_rows(problem, lengths, monkeypatch):
    def flash_mla_with_kvcache(q, k_cache, table, seqlens, head_dim_v, schedule, **options):
        scale, indices = options.pop("softmax_scale"), options.pop("indices")
        tokens = options.pop("topk_length")
        assert (table, seqlens, schedule, options) == (None, None, "s", {"use_legacy": True})
        assert (None if tokens is None else tokens.tolist()) == lengths
        assert q.shape[1:] == (1, 64 if problem.q_heads < 64 else 128, 576)
        assert k_cache.shape[1:] == (64 if tokens is None else 2, 1, 656)
        assert k_cache.stride(1) == 656
        assert indices.shape == (2, 1, 64)
        rows = decode_rows(k_cache.flatten(0, 1)[:, None], head_dim_v)
        tokens = torch.full((2,), 64, dtype=torch.int32) if tokens is None else tokens
        return attended(q, rows, rows[..., :head_dim_v], tokens, indices[:, 0], scale)

    members = {"flash_mla_with_kvcache": flash_mla_with_kvcache, "get_mla_metadata": lambda: "s"}
    members["get_mla_decoding_metadata"] = lambda *given, use_legacy: given
    stand_in(monkeypatch, "flash_mla", **members)
    adapter = kernel("flash_mla_sparse")
    assert adapter.unsupported_reason(problem) is None
    inputs, _ = checked("flash_mla_sparse", problem)
    planner = adapter.planner(inputs, None)
    assert planner is not None
    assert planner()[1:] == ((heads := 64 if problem.q_heads < 64 else 128), 1, heads, True, 64)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"row_scales": False}, "give row_scales and kv_dtype e4m3"),
        ({"q_heads": 256}, "takes 128 query heads at most"),
        ({"select": 100, "context": 700}, "these are 100: choose a multiple of 64"),
    ],
)
def test_what_the_sparse_kernel_does_not_take(fields, words):
    reason = kernel("flash_mla_sparse").unsupported_reason(replace(CHOSEN, **fields))
    assert reason is not None
    assert words in reason


class MlaWrapper:
    """A wrapper that reads the cache in two column ranges, by page numbers and strides.

    Like the library, it returns the LSE to base 2 with the heads of a query token together.
    """

    made: list[MlaWrapper]

    def __init__(self, float_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        self.plans = self.runs = 0
        self.made.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self.plans += 1
        given = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert {tensor.dtype for tensor in given} == {torch.int32}
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        assert len(kv_indices) == kv_indptr[-1]
        self.queries, self.pages, self.lengths = qo_indptr, kv_indptr, kv_len_arr
        self.heads, self.page_size, self.scale = num_heads, page_size, sm_scale
        self.causal, self.dtypes = causal, {q_data_type, kv_data_type}
        self._kv_indices_buf = kv_indices

    def page_numbers(self) -> torch.Tensor:
        return self._kv_indices_buf

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, *, out, lse, return_lse, **scales):
        self.runs += 1
        fp8 = ckv_cache.dtype == torch.float8_e4m3fn
        assert scales == ({"ckv_scale": 1.0, "kpe_scale": 1.0} if fp8 else {})
        assert return_lse
        assert out.shape == q_nope.shape == (int(self.queries[-1]), self.heads, 512)
        assert q_pe.shape == (*q_nope.shape[:2], 64)
        assert lse.shape == q_nope.shape[:2]
        assert lse.is_contiguous()
        assert ckv_cache.shape[1:] == (self.page_size, 512)
        assert kpe_cache.shape[1:] == (self.page_size, 64)
        assert {q_nope.dtype, ckv_cache.dtype, kpe_cache.dtype} == self.dtypes
        assert q_nope.dtype == out.dtype
        # Rows are read 16 bytes at a time.
        for tensor in (q_nope, q_pe, ckv_cache, kpe_cache):
            assert tensor.data_ptr() % 16 == 0
            assert tensor.stride(-1) == 1
        batch = len(self.lengths)
        q = torch.cat([q_nope, q_pe], -1).unflatten(0, (batch, -1))
        assert self.queries.diff().tolist() == [q.shape[1]] * batch
        ckv_cache, kpe_cache = ckv_cache.to(out.dtype), kpe_cache.to(out.dtype)
        k, v = torch.cat([ckv_cache, kpe_cache], -1)[:, :, None], ckv_cache[:, :, None]
        table = block_table(self.pages, self.page_numbers())
        outs, natural = attended(q, k, v, self.lengths, table, self.scale, causal=self.causal)
        out.copy_(outs.flatten(0, 1))
        lse.copy_(natural.transpose(1, 2).flatten(0, 1) / math.log(2))
        return out, lse


class BackendWrapper(MlaWrapper):
    """A wrapper of 0.7, whose backend holds the page numbers of its runs."""

    def plan(self, *args: Any, **options: Any) -> None:
        super().plan(*args, **options)
        self._planned_backend = SimpleNamespace(_kv_indices_buf=self._kv_indices_buf)

    def page_numbers(self) -> torch.Tensor:
        return self._planned_backend._kv_indices_buf


@pytest.fixture
def wrappers(monkeypatch) -> Iterator[list[MlaWrapper]]:
    """Return the wrappers that were created."""
    MlaWrapper.made = []
    with planning(monkeypatch):
        stand_in(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=MlaWrapper)
        yield MlaWrapper.made


ODD_PAGES = replace(LATENT, q_heads=5, context=(40, 9), page_size=16, lengths_on="device")


@pytest.mark.parametrize(
    "problem",
    [
        *(*PAGED, CONTIGUOUS, ODD_PAGES, replace(LATENT, context=(100, 7), capacity=101)),
        replace(LATENT, context=(3, 70), q_len=3, causal=False),
        replace(LATENT, dtype="bf16", page_size=64, kv_dtype="e4m3", scaled=False),
    ],
    ids=label,
)
def test_flashinfer_reads_the_cache_in_place(problem, wrappers):
    adapter = kernel("flashinfer_mla")
    assert adapter.unsupported_reason(problem) is None
    assert adapter.lse_base == 2
    inputs, launch = checked("flashinfer_mla", problem)
    (wrapper,) = wrappers
    assert wrapper.plans == 1
    assert wrapper.scale == problem.head_dim**-0.5
    assert wrapper.causal == problem.causal
    # A contiguous cache is one page per sequence.
    assert wrapper.page_size == (problem.page_size or problem.cache_capacity)
    given = (inputs.q, inputs.q[..., 512:], inputs.k_cache, inputs.k_cache[..., 512:])
    assert addresses(*launch._attend.args) == addresses(*given)
    assert launch._attend.keywords["out"].data_ptr() == inputs.out.data_ptr()
    assert launch.results.out is inputs.out
    assert launch.results.lse.shape == inputs.lse.shape


@pytest.mark.parametrize("wrapper", [MlaWrapper, BackendWrapper])
@pytest.mark.parametrize("problem", [PAGED[1], CONTIGUOUS], ids=label)
def test_copies_of_a_call_share_a_plan_and_have_page_numbers_of_their_own(
    problem, wrapper, wrappers, monkeypatch
):
    stand_in(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=wrapper)
    copies = [make_inputs(problem, "cpu", seed=seed) for seed in range(3)]
    launches: list[Any] = kernel("flashinfer_mla").prepare_all(copies, None)
    assert [wrapper.plans for wrapper in wrappers] == [1]
    used = [launch._attend.func.__self__ for launch in launches]
    assert [wrapper.runs for wrapper in used] == [1, 0, 0]
    assert len({wrapper.page_numbers().data_ptr() for wrapper in used}) == 3
    for inputs, launch in zip(copies, launches, strict=True):
        inputs.poison()
        launch()
        result = Reference(inputs).check(written_by(launch, inputs), 2.0)
        assert result.failure(problem.dtype) is None


def test_planning_again_is_told_the_lengths(wrappers):
    again = kernel("flashinfer_mla").planner(make_inputs(ODD_PAGES, "cpu"), None)
    assert again is not None
    again()
    assert wrappers[0].lengths.tolist() == [40, 9]
    assert wrappers[0].pages.tolist() == [0, 3, 4]
    assert wrappers[0].queries.tolist() == [0, 1, 2]


@pytest.mark.usefixtures("wrappers")
def test_a_version_that_keeps_page_numbers_elsewhere_is_named(monkeypatch):
    """Its runs would read the plan's placeholders."""

    class Later(MlaWrapper):
        def plan(self, *args: Any, **options: Any) -> None:
            super().plan(*args, **options)
            del self._kv_indices_buf

    stand_in(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=Later)
    monkeypatch.setattr(library, "installed_version", lambda name: "0.9")
    sentence = r"cannot call flashinfer-python 0\.9 .* written for 0\.6 and 0\.7"
    with pytest.raises(UserError, match=sentence):
        kernel("flashinfer_mla").prepare(make_inputs(PAGED[0], "cpu"), None)
