"""Python sources for FlashInfer-Bench: the reference of a definition, and `lean` as solution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leanbench.core.problem import AttentionProblem

#: Author of solutions and traces, and a folder of both.
AUTHOR = "leanbench"
_ENTRY = "main.py"

_REFERENCE = '''\
import math

import torch


def cached(cache, sequence{lengths}):
    """K or V of a sequence in fp32, (tokens, KV heads, head_dim)."""
{tokens}


@torch.no_grad()
def run({arguments}):
    output = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for sequence in range(q.shape[0]):
        k = cached(k_cache, sequence{lengths})
        v = cached(v_cache, sequence{lengths})
        grouped = q[sequence].float().unflatten(0, (k.shape[1], -1))
        scores = torch.einsum("kgd,tkd->kgt", grouped, k) * sm_scale
        lse[sequence] = torch.logsumexp(scores, 2).flatten() / math.log(2)
        weights = torch.softmax(scores, 2)
        output[sequence] = torch.einsum("kgt,tkd->kgd", weights, v).flatten(0, 1).to(q.dtype)
    return output, lse
'''

_SOLUTION = '''\
"""LeanAttention of the installed package leanbench, by its public call."""

import math

{imports}from leanbench import lean_attn_with_kvcache

LOG2_E = 1 / math.log(2)


def run({arguments}):
{lengths}    output, lse = lean_attn_with_kvcache(
        q.unsqueeze(1),
        k_cache{nhd},
        v_cache{nhd},
        cache_seqlens=cache_seqlens,{block_table}
        softmax_scale=sm_scale,
        return_softmax_lse=True,
    )
    return output.squeeze(1), lse.squeeze(2) * LOG2_E
'''

#: From pages one sequence after the other to a row of them for each sequence.
_BLOCK_TABLE = """\
    pages = kv_indptr.diff()
    columns = torch.arange(int(pages.max()), device=q.device)
    entries = kv_indptr[:-1, None] + columns
    block_table = kv_indices[entries.clamp(max=kv_indices.numel() - 1)]
    cache_seqlens = {lengths}
"""


def reference(inputs: Sequence[str], problem: AttentionProblem) -> str:
    """Return the source of a `run` with torch's operators.

    Args:
        inputs: Names of its arguments in order.
    """
    lengths = [name for name in inputs if name.startswith("kv_") or name == "cache_seqlens"]
    return _REFERENCE.format(
        arguments=", ".join(inputs),
        lengths="".join(f", {name}" for name in lengths),
        tokens="\n".join(f"    {line}" for line in _tokens(problem)),
    )


def _tokens(problem: AttentionProblem) -> list[str]:
    """Return source lines that return a sequence's tokens from a cache."""
    if problem.page_size is None:
        length = "cache_seqlens" + ("[sequence]" if problem.lengths_on == "device" else "")
        own = "cache[sequence]" + (".transpose(0, 1)" if problem.kv_layout == "HND" else "")
        return [f"return {own}[:{length}].float()"]
    pages = "pages = kv_indices[kv_indptr[sequence] : kv_indptr[sequence + 1]].long()"
    own = "cache[pages]" + (".transpose(1, 2)" if problem.kv_layout == "HND" else "")
    if problem.page_size == 1:
        return [pages, f"return {own}.flatten(0, 1).float()"]
    return [
        pages,
        f"unused = {problem.page_size} - kv_last_page_len[sequence] if pages.numel() else 0",
        f"length = pages.numel() * {problem.page_size} - int(unused)",
        f"return {own}.flatten(0, 1)[:length].float()",
    ]


def solution(inputs: Sequence[str], problem: AttentionProblem) -> str:
    """Return the source of a `run` with `lean_attn_with_kvcache`."""
    nhd = ".transpose(1, 2)" if problem.kv_layout == "HND" else ""
    parts = {"imports": "", "lengths": "", "block_table": ""}
    if problem.page_size is not None:
        tokens = "pages"
        if problem.page_size > 1:
            tokens = f"(pages - 1) * {problem.page_size} + kv_last_page_len"
        parts = {
            "imports": "import torch\n\n",
            "lengths": _BLOCK_TABLE.format(lengths=tokens),
            "block_table": "\n        block_table=block_table,",
        }
    return _SOLUTION.format(arguments=", ".join(inputs), nhd=nhd, **parts)


def solution_of(problem: AttentionProblem, definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the solution of a problem's definition."""
    return {
        "name": solution_name(definition),
        "definition": definition["name"],
        "author": AUTHOR,
        "description": "LeanAttention (stream-K), with the launch settings that leanbench finds for"
        " the GPU. Needs the package leanbench.",
        "spec": {
            "language": "python",
            "target_hardware": ["cuda"],
            "entry_point": f"{_ENTRY}::run",
            "dependencies": ["leanbench"],
            "destination_passing_style": False,
        },
        "sources": [{"path": _ENTRY, "content": solution(list(definition["inputs"]), problem)}],
    }


def solution_name(definition: Mapping[str, Any]) -> str:
    return f"leanbench_lean_{definition['name']}"
