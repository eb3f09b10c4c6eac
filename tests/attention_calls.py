"""`lean_attn_with_kvcache` over a problem's tensors, the check of its results, and the dependencies
of its bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from leanbench.attention import lean_attn_with_kvcache
from leanbench.check.reference import Reference
from leanbench.core.inputs import AttentionInputs


def attend(inputs: AttentionInputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE; `inputs.out` and `inputs.lse` do not change."""
    options = {
        "cache_seqlens": inputs.cache_seqlens,
        "block_table": inputs.block_table,
        "causal": inputs.q_len > 1,
        "return_softmax_lse": True,
        **options,
    }
    out, lse = lean_attn_with_kvcache(inputs.q, inputs.k_cache, inputs.v_cache, **options)
    return out, lse


def sentences(
    error: type[Exception],
    calls: Iterable[Mapping[str, Any]],
    call: Callable[..., object] = lean_attn_with_kvcache,
) -> str:
    """Return class and sentence with which `call` refuses each of these arguments, a line each."""
    found = []
    for arguments in calls:
        with pytest.raises(error) as caught:
            call(**arguments)
        found.append(f"{caught.typename}: {caught.value}")
        assert "\n" not in found[-1]
    return "\n".join(found)


def captured(
    call: Callable[[], tuple[torch.Tensor, torch.Tensor]], stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    """Return a graph of a call, its output and its LSE, poisoned.

    The call is made before on another stream, which may compile, as in torch's guide to graphs.
    """
    aside = stream or torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out, lse = call()
    out.fill_(math.nan)
    lse.fill_(math.nan)
    return graph, out, lse


def compiled(
    call: Callable[[AttentionInputs], tuple[torch.Tensor, torch.Tensor]],
    backend: str = "aot_eager",
    dynamic: bool | None = None,
) -> Callable[[AttentionInputs], tuple[torch.Tensor, torch.Tensor]]:
    """Return a call as a part of one compiled graph, which doubles its output."""
    torch._dynamo.reset()

    def twice(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = call(inputs)
        return out * 2, lse

    graph = torch.compile(twice, fullgraph=True, dynamic=dynamic, backend=backend)

    def halved(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = graph(inputs)
        return out / 2, lse

    return halved


def assert_right(inputs: AttentionInputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Check the results of every head within the limits of `leanbench.check.reference`."""
    written = replace(inputs, out=out, lse=lse)
    result = Reference(written, max_elements=1 << 62).check(written)
    assert result.failure("fp16" if out.dtype == torch.float16 else "bf16") is None
    assert result.checked_heads == result.total_heads


def differing(
    inputs: AttentionInputs, call: Callable[[AttentionInputs], tuple[torch.Tensor, torch.Tensor]]
) -> list[str]:
    """Return the surroundings in which a sequence's bits differ from those in the whole batch.

    Also checks all results.

    Args:
        call: returns output and LSE.
    """
    whole = call(inputs)
    assert_right(inputs, *whole)
    names = []
    for name, (sequences, surrounded) in _surroundings(inputs).items():
        results = call(surrounded)
        assert_right(surrounded, *results)
        if not all(
            torch.equal(result, expected[sequences])
            for result, expected in zip(results, whole, strict=True)
        ):
            names.append(name)
    return names


def _surroundings(inputs: AttentionInputs) -> dict[str, tuple[list[int], AttentionInputs]]:
    """Return other batches of the same sequences, with the indices of those in each."""
    everyone = list(range(inputs.q.shape[0]))
    last = everyone[-1]
    chosen = {
        "alone": [0],
        "the last alone": [last],
        "fewer": everyone[::-2],
        "the other way round": everyone[::-1],
        "twice": [0, 0, last, last],
    }
    surroundings = {
        name: (sequences, _some(inputs, sequences)) for name, sequences in chosen.items()
    }
    surroundings["more room"] = (everyone, _roomier(inputs))
    if inputs.cache_seqlens is not None:
        length = int(inputs.cache_seqlens[0])
        surroundings["a number"] = (
            [0],
            replace(surroundings["alone"][1], cache_seqlens=None, context=length),
        )
    return surroundings


def _some(inputs: AttentionInputs, sequences: list[int]) -> AttentionInputs:
    """Return these sequences of a batch, with poisoned outputs and unchanged pages."""
    paged = inputs.block_table is not None
    some = replace(
        inputs,
        q=inputs.q[sequences],
        k_cache=inputs.k_cache if paged else inputs.k_cache[sequences],
        v_cache=inputs.v_cache if paged else inputs.v_cache[sequences],
        cache_seqlens=inputs.cache_seqlens[sequences] if inputs.cache_seqlens is not None else None,
        block_table=inputs.block_table[sequences] if inputs.block_table is not None else None,
        out=inputs.out[sequences],
        lse=inputs.lse[sequences],
    )
    some.poison()
    return some


def _roomier(inputs: AttentionInputs) -> AttentionInputs:
    """Return the batch with lengths on the device, and more than twice the capacity.

    The added tokens are NaN, and pages are in another order.
    """
    batch, room = inputs.q.shape[0], inputs.context + 90
    lengths = inputs.cache_seqlens
    if lengths is None:
        lengths = torch.full((batch,), inputs.context, dtype=torch.int32, device=inputs.q.device)
    added = inputs.k_cache.shape[0] if inputs.block_table is not None else room
    padding = (
        (0, 0, 0, 0, 0, 0, added, 0) if inputs.block_table is not None else (0, 0, 0, 0, 0, added)
    )
    k_cache = torch.nn.functional.pad(inputs.k_cache, padding, value=math.nan)
    v_cache = torch.nn.functional.pad(inputs.v_cache, padding, value=math.nan)
    table = inputs.block_table
    if table is not None:
        # Entries past a sequence's end refer to the added pages.
        table = torch.nn.functional.pad(table + added, (0, -(-room // inputs.k_cache.shape[1])))
    context = inputs.context + room
    padded = replace(
        inputs,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=lengths,
        block_table=table,
        context=context if table is None else table.shape[1] * k_cache.shape[1],
        out=inputs.out.clone(),
        lse=inputs.lse.clone(),
    )
    padded.poison()
    return padded
