"""The adapter of FlashInfer's MLA decode against a fake of its wrapper."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from depth import label
from leanbench.kernels.libraries import flash_infer, library
from library_stand_ins import attend, checked, stand_in

from leanbench.check.reference import Reference
from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.kernel import written_by
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel

LATENT: dict[str, Any] = {"latent": True, "v_head_dim": 512, "dtype": "bf16"}
PROBLEMS = [
    AttentionProblem(2, 16, 1, 100, 576, page_size=64, **LATENT),
    AttentionProblem(3, 16, 1, (2, 65, 130), 576, q_len=2, page_size=64, **LATENT),
    AttentionProblem(2, 5, 1, (40, 9), 576, page_size=16, lengths_on="device", **LATENT),
    AttentionProblem(2, 16, 1, 128, 576, **LATENT),
    AttentionProblem(2, 16, 1, (100, 7), 576, capacity=101, **LATENT),
    AttentionProblem(2, 16, 1, (3, 70), 576, q_len=3, causal=False, **LATENT),
]


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

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, *, out, lse, return_lse):
        self.runs += 1
        assert return_lse
        assert out.shape == q_nope.shape == (int(self.queries[-1]), self.heads, 512)
        assert q_pe.shape == (*q_nope.shape[:2], 64)
        assert lse.shape == q_nope.shape[:2]
        assert lse.is_contiguous()
        assert ckv_cache.shape[1:] == (self.page_size, 512)
        assert kpe_cache.shape[1:] == (self.page_size, 64)
        assert {q_nope.dtype, ckv_cache.dtype, kpe_cache.dtype} == self.dtypes
        assert ckv_cache.dtype == out.dtype
        # Rows are read 16 bytes at a time.
        for tensor in (q_nope, q_pe, ckv_cache, kpe_cache):
            assert tensor.data_ptr() % 16 == 0
            assert tensor.stride(-1) == 1
        for row, length in enumerate(self.lengths.tolist()):
            pages = self._kv_indices_buf[self.pages[row] : self.pages[row + 1]].long()
            parts = [cache[pages].flatten(0, 1)[None, :length] for cache in (ckv_cache, kpe_cache)]
            own = slice(int(self.queries[row]), int(self.queries[row + 1]))
            q = torch.cat([q_nope[own], q_pe[own]], -1)
            # Each query token attends alone to the tokens that the causal mask leaves.
            for token, at in enumerate(range(own.start, own.stop)):
                seen = length - (len(q) - 1 - token if self.causal else 0)
                k = torch.cat([part[:, :seen] for part in parts], -1)
                attended, natural = attend(q[token][:, None], k, parts[0][:, :seen], self.scale)
                out[at] = attended[:, 0].to(out.dtype)
                lse[at] = natural[:, 0] / math.log(2)
        return out, lse


@pytest.fixture
def wrappers(monkeypatch) -> Iterator[list[MlaWrapper]]:
    """Return the wrappers that were created."""
    MlaWrapper.made = []
    stand_in(monkeypatch, "flashinfer")
    stand_in(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=MlaWrapper)
    stand_in(monkeypatch, "tvm_ffi")
    monkeypatch.setattr(flash_infer, "_WORKSPACE_BYTES", 1000)
    flash_infer._planned.cache_clear()
    flash_infer.workspace.cache_clear()
    yield MlaWrapper.made
    flash_infer._planned.cache_clear()
    flash_infer.workspace.cache_clear()


@pytest.mark.parametrize("problem", PROBLEMS, ids=label)
def test_the_cache_is_read_in_place_and_the_lse_is_to_base_2(problem, wrappers):
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
    *given, options = (*launch._attend.args, launch._attend.keywords)
    assert [tensor.data_ptr() for tensor in given] == [
        tensor.data_ptr()
        for tensor in (inputs.q, inputs.q[..., 512:], inputs.k_cache, inputs.k_cache[..., 512:])
    ]
    assert options["out"].data_ptr() == inputs.out.data_ptr()
    assert launch.results.out is inputs.out
    assert launch.results.lse.shape == inputs.lse.shape


@pytest.mark.parametrize("problem", [PROBLEMS[1], PROBLEMS[3]], ids=label)
def test_copies_of_a_call_share_a_plan_and_have_page_numbers_of_their_own(problem, wrappers):
    copies = [make_inputs(problem, "cpu", seed=seed) for seed in range(3)]
    launches: list[Any] = kernel("flashinfer_mla").prepare_all(copies, None)
    assert [wrapper.plans for wrapper in wrappers] == [1]
    used = [launch._attend.func.__self__ for launch in launches]
    assert [wrapper.runs for wrapper in used] == [1, 0, 0]
    assert len({wrapper._kv_indices_buf.data_ptr() for wrapper in used}) == 3
    for inputs, launch in zip(copies, launches, strict=True):
        inputs.poison()
        launch()
        result = Reference(inputs).check(written_by(launch, inputs), 2.0)
        assert result.failure(problem.dtype) is None


def test_planning_again_is_told_the_lengths(wrappers):
    inputs = make_inputs(PROBLEMS[2], "cpu")
    again = kernel("flashinfer_mla").planner(inputs, None)
    assert again is not None
    again()
    assert wrappers[0].lengths.tolist() == [40, 9]
    assert wrappers[0].pages.tolist() == [0, 3, 4]
    assert wrappers[0].queries.tolist() == [0, 1, 2]


@pytest.mark.usefixtures("wrappers")
@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (
            AttentionProblem(2, 16, 1, 100, 576, v_head_dim=512),
            "flashinfer_mla takes latent caches with v_head_dim 512 alone",
        ),
        (
            AttentionProblem(2, 16, 1, 100, 128, latent=True, v_head_dim=64),
            "flashinfer_mla does not take head_dim 128",
        ),
        (
            AttentionProblem(15361, 128, 1, 1, 576, **LATENT),
            "flashinfer_mla plans at most 16384 pieces of work, this problem has 15361",
        ),
        (
            AttentionProblem(7681, 64, 1, 3, 576, q_len=3, **LATENT),
            "flashinfer_mla plans at most 16384 pieces of work, this problem has 7681",
        ),
    ],
    ids=["not latent", "head_dim", "batch", "query rows"],
)
def test_what_it_does_not_take_is_a_sentence(problem, sentence):
    reason = str(kernel("flashinfer_mla").unsupported_reason(problem))
    assert reason.startswith(sentence)


@pytest.mark.usefixtures("wrappers")
def test_a_version_that_keeps_page_numbers_elsewhere_is_named(monkeypatch):
    """Its runs would read the plan's placeholders."""

    class Later(MlaWrapper):
        def plan(self, *args: Any, **options: Any) -> None:
            super().plan(*args, **options)
            del self._kv_indices_buf

    stand_in(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=Later)
    monkeypatch.setattr(library, "installed_version", lambda name: "0.9")
    sentence = r"cannot call flashinfer-python 0\.9 .* written for 0\.6\.13"
    with pytest.raises(UserError, match=sentence):
        kernel("flashinfer_mla").prepare(make_inputs(PROBLEMS[0], "cpu"), None)
