"""FlashInfer's batch decode and its persistent batch attention over a paged cache (Ye et al., 2025,
arXiv 2501.01005), for flashinfer-python 0.6 and 0.7.

A contiguous cache is passed as views of pages, without a copy: FlashInfer reads K and V through the
strides of its tensors. Its planner assigns whole pages to CTAs, so a sequence in a single page
would never be split.
"""

from __future__ import annotations

import copy
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.library import LibraryKernel, current_stream

from leanbench.core.config import KernelConfig
from leanbench.core.errors import UserError
from leanbench.core.kinds import SAME
from leanbench.core.problem import PAGE_SIZES, AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs

#: Tokens per page of a contiguous cache; its largest factor that divides the cache's length is
#: used.
_PAGE_TOKENS = 64
#: Size of the partials buffer. FlashInfer recommends 128 MB. By its source, 32 query heads to one
#: KV head of head_dim 128 need 280 MB on 132 SMs.
_WORKSPACE_BYTES = 512 * 1000 * 1000
#: Group sizes compiled for the decode kernel without tensor cores, in all versions since 0.6.
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)


class FlashInferKernel(LibraryKernel):
    """Common base of FlashInfer's kernels."""

    source = "Ye et al. 2025, arXiv 2501.01005; flashinfer-python"
    modules = ("flashinfer", "tvm_ffi")
    install = "pip install flashinfer-python apache-tvm-ffi"
    distribution = "flashinfer-python"
    written_for = "0.6 and 0.7"
    head_dims = (64, 128, 256)
    page_sizes: Any = (1, *PAGE_SIZES)
    lse_base = 2.0
    use_tensor_cores = True

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.kv_dtype != SAME and problem.scaled:
            return f"{self.name} has no scales for each KV head: choose unscaled"
        if not self.use_tensor_cores and problem.group_size not in _CUDA_CORE_GROUPS:
            groups = ", ".join(map(str, _CUDA_CORE_GROUPS))
            return (
                f"{self.name} has no kernel for groups of {problem.group_size} query heads, choose"
                f" from {groups}"
            )
        return super().refusal(problem)


class PlannedFlashInfer(FlashInferKernel):
    """Kernels planned on the host for the lengths of a call before the launch."""

    #: Wrapper attribute that holds the page numbers read by its runs.
    page_numbers_name: str

    @abstractmethod
    def plan_call(self, plan: Plan) -> tuple[Any, Callable[[], Any]]:
        """Create a wrapper and its planning function."""

    @abstractmethod
    def run_call(self, wrapper: Any, inputs: AttentionInputs, plan: Plan) -> Callable[[], Any]:
        """Return the launch of a planned wrapper over these tensors."""

    def page_size(self, inputs: AttentionInputs) -> int:
        """Return tokens per page, also for a contiguous cache."""
        return page_size_of(inputs)

    def launches(
        self, copies: Sequence[AttentionInputs], config: KernelConfig | None
    ) -> list[Callable[[], Any]]:
        """Return a launch per copy, each with a wrapper of its own.

        A run takes its page numbers by address. The launches share the plan, which would take 8 MB
        each.
        """
        plan = self._plan_of(copies[0])
        numbers = page_numbers(copies, plan.page_size, plan.page_counts)
        wrappers = [copy.copy(_planned(self, plan)) for _ in copies]
        for wrapper, copy_numbers in zip(wrappers, numbers, strict=True):
            self.pass_page_numbers(wrapper, copy_numbers)
        return [
            self.run_call(wrapper, inputs, plan)
            for wrapper, inputs in zip(wrappers, copies, strict=True)
        ]

    def pass_page_numbers(self, wrapper: Any, numbers: torch.Tensor) -> None:
        """Replace the placeholders of a plan; raise AttributeError if they have another name."""
        getattr(wrapper, self.page_numbers_name)
        setattr(wrapper, self.page_numbers_name, numbers)

    def planner(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], Any]:
        return self.plan_call(self._plan_of(inputs))[1]

    def _plan_of(self, inputs: AttentionInputs) -> Plan:
        return Plan.of(inputs, self.page_size(inputs))


class FlashInfer(PlannedFlashInfer):
    name = "flashinfer"
    title = "FlashInfer's batch decode on tensor cores, planned for the lengths before it is timed"
    axes = FlashInferKernel.axes | {
        *("page_size", "lengths", "lengths_on"),
        *("window_left", "softcap", "kv_dtype", "scaled"),
    }
    page_numbers_name = "_paged_kv_indices_buf"

    def plan_call(self, plan: Plan) -> tuple[Any, Callable[[], Any]]:
        import torch
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        indptr = offsets(plan.page_counts)
        last_page_len = torch.tensor(
            [(length - 1) % plan.page_size + 1 for length in plan.lengths], dtype=torch.int32
        )
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace(plan.device, plan.stream),
            kv_layout=plan.kv_layout,
            use_tensor_cores=self.use_tensor_cores,
        )
        return wrapper, partial(
            wrapper.plan,
            indptr,
            torch.zeros(int(indptr[-1]), dtype=torch.int32),
            last_page_len,
            plan.q_heads,
            plan.kv_heads,
            plan.head_dim,
            plan.page_size,
            q_data_type=plan.dtype,
            kv_data_type=plan.kv_dtype,
            # The default would be the caches' dtype.
            o_data_type=plan.dtype,
            sm_scale=plan.softmax_scale,
            window_left=plan.window_left,
            logits_soft_cap=plan.softcap,
        )

    def run_call(self, wrapper: Any, inputs: AttentionInputs, plan: Plan) -> partial[Any]:
        return partial(_over_pages(wrapper, inputs, plan), return_lse=True)


class FlashInferCudaCores(FlashInfer):
    name = "flashinfer_cuda_cores"
    title = (
        "FlashInfer's batch decode without tensor cores, planned for the lengths before it is timed"
    )
    use_tensor_cores = False


class FlashInferPersistent(PlannedFlashInfer):
    name = "flashinfer_persistent"
    title = (
        "FlashInfer's BatchAttention: one grid that stays, its work dealt out before it is timed"
    )
    axes = FlashInferKernel.axes | {
        *("page_size", "lengths", "lengths_on"),
        *("softcap", "kv_dtype", "scaled"),
    }
    page_numbers_name = "_kv_indices"

    def plan_call(self, plan: Plan) -> tuple[Any, Callable[[], Any]]:
        """Create a wrapper, which sizes its buffers itself, and its planning function."""
        import torch
        from flashinfer import BatchAttention

        page_offsets = offsets(plan.page_counts)
        wrapper = BatchAttention(kv_layout=plan.kv_layout, device=str(plan.device))
        return wrapper, partial(
            wrapper.plan,
            offsets([1] * len(plan.lengths)),
            page_offsets,
            torch.zeros(int(page_offsets[-1]), dtype=torch.int32),
            torch.tensor(plan.lengths, dtype=torch.int32),
            plan.q_heads,
            plan.kv_heads,
            plan.head_dim,
            plan.head_dim,
            plan.page_size,
            # The single query token sees all tokens.
            causal=False,
            sm_scale=plan.softmax_scale,
            q_data_type=plan.dtype,
            kv_data_type=plan.kv_dtype,
            logits_soft_cap=plan.softcap,
        )

    def run_call(self, wrapper: Any, inputs: AttentionInputs, plan: Plan) -> partial[Any]:
        return partial(_over_pages(wrapper, inputs, plan), logits_soft_cap=plan.softcap)


@dataclass(frozen=True)
class Plan:
    """Key of FlashInfer's plan, shared by copies of a call."""

    device: torch.device
    stream: int
    kv_layout: str
    page_size: int
    lengths: tuple[int, ...]
    q_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    softmax_scale: float
    causal: bool
    #: Preceding tokens visible to the query token; -1: all.
    window_left: int
    #: Soft cap of scores; 0: none.
    softcap: float

    @classmethod
    def of(cls, inputs: AttentionInputs, page_size: int) -> Plan:
        device = inputs.q.device
        return cls(
            device,
            current_stream(device),
            layout_of(inputs),
            page_size,
            inputs.read_lengths(),
            inputs.q_len,
            inputs.q_heads,
            inputs.kv_heads,
            inputs.head_dim,
            inputs.value_dim,
            inputs.q.dtype,
            inputs.k_cache.dtype,
            inputs.softmax_scale,
            inputs.causal,
            inputs.window_left,
            inputs.softcap,
        )

    @property
    def page_counts(self) -> list[int]:
        return [-(-length // self.page_size) for length in self.lengths]


def layout_of(inputs: AttentionInputs) -> str:
    """Return the layout's name, from the strides of heads and tokens."""
    return "HND" if inputs.k_cache.stride(2) > inputs.k_cache.stride(1) else "NHD"


def page_size_of(inputs: AttentionInputs) -> int:
    """Return tokens per page, also for a contiguous cache."""
    return inputs.page_size or math.gcd(inputs.k_cache.shape[1], _PAGE_TOKENS)


def _over_pages(wrapper: Any, inputs: AttentionInputs, plan: Plan) -> partial[Any]:
    """Return the call of a planned wrapper for one query token per sequence."""
    batch, _, q_heads, head_dim = inputs.q.shape
    k = pages_of(inputs.k_cache, inputs, plan.page_size)
    v = pages_of(inputs.v_cache, inputs, plan.page_size)
    if plan.kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    q, out = inputs.q.view(batch, q_heads, head_dim), inputs.out.view(batch, q_heads, head_dim)
    return partial(wrapper.run, q, (k, v), out=out, lse=inputs.lse.view(batch, q_heads))


def pages_of(cache: torch.Tensor, inputs: AttentionInputs, page_size: int) -> torch.Tensor:
    """Return the cache as (pages, page_size, kv_heads, head_dim).

    A contiguous cache becomes views of `page_size` tokens. In the HND layout, pages of later heads
    lie between those of the first head and of the next sequence.
    """
    if inputs.block_table is not None:
        return cache
    batch, tokens, kv_heads, head_dim = cache.shape
    pages = (batch - 1) * _sequence_stride(cache, page_size) + tokens // page_size
    strides = (page_size * cache.stride(1), *cache.stride()[1:])
    return cache.as_strided((pages, page_size, kv_heads, head_dim), strides)


def _sequence_stride(cache: torch.Tensor, page_size: int) -> int:
    """Return the number of pages between the first pages of two sequences."""
    pages, remainder = divmod(cache.stride(0), page_size * cache.stride(1))
    assert remainder == 0, (
        f"a cache with strides {cache.stride()} is no whole number of pages of {page_size} tokens"
    )
    return pages


def page_numbers(
    copies: Sequence[AttentionInputs], page_size: int, counts: Sequence[int]
) -> list[torch.Tensor]:
    """Return the page numbers for each copy of a call, int32.

    They are the first `counts` pages of each sequence. Each copy has its own memory, so a cold L2
    reads the numbers from memory.
    """
    import torch

    first = copies[0]
    table = first.block_table
    stride = _sequence_stride(first.k_cache, page_size) if table is None else table.shape[1]
    starts = range(0, len(counts) * stride, stride)
    places = torch.cat(
        [torch.arange(start, start + pages) for start, pages in zip(starts, counts, strict=True)]
    ).to(first.q.device, torch.int32)
    return [
        places.clone()
        if inputs.block_table is None
        else inputs.block_table.view(-1).index_select(0, places)
        for inputs in copies
    ]


# Copies of a call are prepared consecutively. Launches keep their plan alive; a plan of
# BatchAttention holds 400 MB.
@lru_cache(maxsize=1)
def _planned(kernel: PlannedFlashInfer, plan: Plan) -> Any:
    """Return a planned wrapper with placeholder page numbers; compiles if necessary.

    Raises:
        UserError: one of FlashInfer's buffers is too small for the plan.
    """
    wrapper, call = kernel.plan_call(plan)
    try:
        call()
    except RuntimeError as error:
        overflow = re.search(r"Buffer overflow when allocating memory for (\w+)", str(error))
        if overflow is None:
            raise
        raise UserError(
            f"{kernel.name} has no room for {overflow[1]} of {len(plan.lengths)} sequences x"
            f" {plan.kv_heads} KV heads x head_dim {plan.head_dim}, in a buffer whose size"
            " FlashInfer sets: choose fewer KV heads or sequences"
        ) from error
    return wrapper


def offsets(counts: list[int]) -> torch.Tensor:
    """Return the offsets of the sequences and the total: (sequences + 1,), int32."""
    import torch

    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


@cache
def workspace(device: torch.device, stream: int) -> torch.Tensor:
    """Return the buffer shared by all launches of a stream. FlashInfer requires zeros initially."""
    import torch

    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
