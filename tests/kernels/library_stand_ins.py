"""Problems, and fakes of libraries: modules in sys.modules that compute with plain torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from leanbench.kernels.libraries import flash_infer
from leanbench.kernels.reference.torch import attend_all

from leanbench.check.reference import Reference
from leanbench.core.config import KernelConfig
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.kernel import written_by
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel

UNIFORM = [
    AttentionProblem(1, 2, 2, 150, 64),
    AttentionProblem(3, 8, 2, 128, 128, "bf16", "NHD"),
    AttentionProblem(2, 4, 1, 192, 64),
    AttentionProblem(2, 6, 2, 97, 64, "fp16", "HND"),
    AttentionProblem(2, 6, 2, 97, 64, "fp16", "NHD"),
]
RAGGED = [
    AttentionProblem(4, 4, 2, (1, 190, 33, 64), 64, "fp16", "NHD"),
    AttentionProblem(3, 4, 4, (128, 7, 65), 128, "bf16", "HND"),
]
PAGED = [
    AttentionProblem(2, 8, 2, 100, 64, "fp16", "HND", page_size=16),
    AttentionProblem(2, 8, 2, 96, 128, "bf16", "NHD", page_size=32),
    AttentionProblem(3, 4, 2, (1, 65, 130), 64, "fp16", "NHD", page_size=64),
    AttentionProblem(3, 4, 1, (40, 16, 130), 64, "fp16", "HND", page_size=16),
]
SEVERAL_QUERIES = [
    AttentionProblem(2, 4, 2, 50, 80, q_len=4),
    AttentionProblem(3, 4, 2, (9, 65, 130), 64, "bf16", "HND", q_len=7, page_size=16),
]
#: Capacity beyond the longest sequence, lengths on the host and on the device.
CAPACITY = [
    AttentionProblem(2, 4, 2, 50, 64, "fp16", "HND", capacity=192),
    AttentionProblem(2, 4, 2, 50, 64, "fp16", "NHD", capacity=128, lengths_on="device"),
    AttentionProblem(3, 4, 4, (128, 7, 65), 128, "bf16", "HND", capacity=256),
    AttentionProblem(2, 4, 1, (17, 3), 64, "fp16", "NHD", page_size=16, capacity=96),
]
#: Windows over contiguous caches and pages, lengths known and not.
WINDOWS = [
    replace(UNIFORM[1], window_left=40),
    replace(RAGGED[1], window_left=0),
    replace(PAGED[1], window_left=50),
]
SOFTCAPS = [replace(UNIFORM[0], softcap=15.0), replace(PAGED[2], softcap=2.0)]
SINKS = [replace(UNIFORM[1], sinks=True), replace(PAGED[1], sinks=True, window_left=30)]
FP8 = [
    replace(UNIFORM[1], kv_dtype="e4m3", scaled=False),
    replace(PAGED[1], kv_dtype="e4m3", scaled=False),
]
#: Problems that only flash-attn's interface takes.
OF_FLASH_ATTN = [
    replace(SEVERAL_QUERIES[0], causal=False),
    replace(SEVERAL_QUERIES[0], window_left=20, window_right=1, causal=False),
    replace(SEVERAL_QUERIES[0], window_left=7),
    replace(CAPACITY[2], leftpad=True),
    replace(CAPACITY[2], batch_idx=True),
]
LATENT = AttentionProblem(2, 16, 1, 100, 576, "bf16", latent=True, v_head_dim=512)
APPENDS = [
    replace(CAPACITY[1], append=1),
    replace(CAPACITY[2], append=3, q_len=3, rotary_dim=64, rotary_interleaved=True),
]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 output and natural LSE.

    The queries are (..., heads, q_len, head_dim), K and V are (..., kv_heads, tokens, head_dim).

    Args:
        causal: a mask from the first token on, as torch's.
    """
    group_size = q.shape[-3] // k.shape[-3]
    k, v = (own.float().repeat_interleave(group_size, -3) for own in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attended(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    table: torch.Tensor | None,
    scale: float,
    **kinds: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of a call, by the fp64 reference.

    Args:
        kinds: fields of AttentionInputs.
    """
    pages = 1 if table is None else table.shape[1]
    dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
    inputs = AttentionInputs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=cache_seqlens,
        context=pages * k_cache.shape[1],
        softmax_scale=scale,
        out=q.new_empty((*q.shape[:-1], v_cache.shape[-1]), dtype=dtype),
        lse=torch.empty(q.shape[:-1]).transpose(-1, -2).contiguous(),
        block_table=table,
        **kinds,
    )
    attend_all(inputs)
    return inputs.out, inputs.lse


def block_table(offsets: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return the block table of sequences with their pages in a row, between these offsets."""
    rows = pages.split(offsets.diff().tolist())
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def checked(
    name: str, problem: AttentionProblem, config: KernelConfig | None = None
) -> tuple[AttentionInputs, Any]:
    """Compare one call with the reference, on the same inputs every time.

    `standard` keeps its scores in bf16, which exceeds the limit for one draw in a hundred.
    """
    inputs = make_inputs(problem, "cpu", seed=0)
    launch = kernel(name).prepare(inputs, config)
    written_by(launch, inputs).poison()
    launch()
    result = Reference(inputs).check(written_by(launch, inputs), kernel(name).lse_base)
    assert result.failure(kernel(name).precision(problem)) is None
    assert result.checked_heads == result.total_heads == problem.batch * problem.kv_heads
    assert (result.lse_error is None) == (kernel(name).lse_base is None)
    return inputs, launch


def addresses(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@contextmanager
def planning(monkeypatch: pytest.MonkeyPatch, **members: Any) -> Iterator[None]:
    """Install a fake of FlashInfer with small workspaces, without plans of other tests."""
    stand_in(monkeypatch, "flashinfer", **members)
    stand_in(monkeypatch, "tvm_ffi")
    monkeypatch.setattr(flash_infer, "_WORKSPACE_BYTES", 1000)
    kept = (flash_infer._planned, flash_infer.workspace)
    for cached in kept:
        cached.cache_clear()
    yield
    for cached in kept:
        cached.cache_clear()


def lacking() -> None:
    """Stand for a function of a version that takes none of the arguments."""


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module
