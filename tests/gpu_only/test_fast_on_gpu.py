"""The C path of calls on a GPU: the bits of Python's path, and the streams, threads and captures
around it.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from every_kind import KINDS
from test_kinds_on_gpu import called_by_default, problem_of

from leanbench.attention import fast, lean_attn_with_kvcache, lean_mla_with_kvcache
from leanbench.core.inputs import make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180, method="thread"),
    pytest.mark.skipif(fast.attention is None, reason=f"no C path: {fast.why_not}"),
]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether C took each call."""
    seen: list[bool] = []
    for name in ("attention", "latent"):
        take = getattr(fast, name)

        def call(*arguments: Any, take: Any = take) -> Any:
            result = take(*arguments)
            seen.append(not isinstance(result, bool))
            return result

        monkeypatch.setattr(fast, name, call)
    return seen


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_c_computes_the_bits_of_python(kind, taken):
    inputs = make_inputs(problem_of(kind), "cuda")
    results = [called_by_default(inputs) for _ in range(4)]
    assert taken in ([False, False, True, True], [False] * 4)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


Q = (4, 1, 16, 128)
CACHE = (4, 512, 4, 128)


def tensors() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, device="cuda").half() for shape in (Q, CACHE, CACHE))


@torch.no_grad()
def test_a_plain_and_a_latent_call_are_taken(taken):
    lengths = torch.tensor([9, 512, 77, 300], dtype=torch.int32, device="cuda")
    rows = torch.randn(4, 1, 16, 576, device="cuda").bfloat16()
    latent = torch.randn(4, 512, 576, device="cuda").bfloat16()
    q, k, v = tensors()
    calls: list[Any] = [
        lambda: lean_attn_with_kvcache(q, k, v, cache_seqlens=lengths),
        lambda: lean_attn_with_kvcache(q, k, v, cache_seqlens=301),
    ]
    if torch.cuda.get_device_capability()[0] == 9:
        calls.append(lambda: lean_mla_with_kvcache(rows, latent, lengths))
    for call in calls:
        taken.clear()
        results = [call() for _ in range(3)]
        assert taken == [False, False, True]
        assert torch.equal(results[0], results[2])


@torch.no_grad()
def test_streams_have_launches_of_their_own_and_captures_are_pythons(taken):
    q, k, v = tensors()
    results: list[Any]
    expected: Any
    expected, *results = [lean_attn_with_kvcache(q, k, v) for _ in range(3)]
    assert taken == [False, False, True]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results += [lean_attn_with_kvcache(q, k, v) for _ in range(3)]
        stream.synchronize()
    assert taken[3:] == [False, False, True]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results += [lean_attn_with_kvcache(q, k, v) for _ in range(3)]
    assert taken[6:] == [False] * 3
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


@torch.no_grad()
def test_a_thread_without_a_context_calls(taken):
    q, k, v = tensors()
    results: list[Any] = [lean_attn_with_kvcache(q, k, v)]

    def call() -> None:
        with torch.no_grad():
            results.extend(lean_attn_with_kvcache(q, k, v) for _ in range(4))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert len(results) == 5
    assert all(torch.equal(result, results[0]) for result in results)
