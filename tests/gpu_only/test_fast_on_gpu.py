"""The C path of calls on a GPU: the bits of Python's path, and the streams, threads and captures
around it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_kind import KINDS
from test_kinds_on_gpu import called_by_default, problem_of

from leanbench.attention import (
    fast,
    lean_attn_with_kvcache,
    lean_mla_with_kvcache,
    mla,
    prepared,
    run,
)
from leanbench.core.inputs import make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180, method="thread"),
    pytest.mark.skipif(not fast.is_on, reason=f"no C path: {fast.why_not}"),
]


class Recorder:
    """Calls, and whether C took them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[bool] = []
        self._in_python = 0

        def attend(*arguments: Any) -> Any:
            self._in_python += 1
            return prepared.attend(*arguments)

        for module in (run, mla):
            monkeypatch.setattr(module, "attend", attend)

    def several(self, count: int, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the results of several calls."""
        results = []
        for _ in range(count):
            before = self._in_python
            results.append(call(*arguments, **options))
            self.taken.append(self._in_python == before)
        return results


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_c_computes_the_bits_of_python(kind, recorder):
    inputs = make_inputs(problem_of(kind), "cuda")
    results = recorder.several(4, called_by_default, inputs)
    assert recorder.taken in ([False, False, True, True], [False] * 4)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


Q = (4, 1, 16, 128)
CACHE = (4, 512, 4, 128)


def tensors() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, device="cuda").half() for shape in (Q, CACHE, CACHE))


@torch.no_grad()
def test_plain_and_latent_calls_are_taken(recorder):
    lengths = torch.tensor([9, 512, 77, 300], dtype=torch.int32, device="cuda")
    calls: list[Any] = [
        (lean_attn_with_kvcache, *tensors(), {"cache_seqlens": lengths}),
        (lean_attn_with_kvcache, *tensors(), {"cache_seqlens": 301}),
    ]
    if torch.cuda.get_device_capability()[0] == 9:
        rows = torch.randn(4, 1, 16, 576, device="cuda").bfloat16()
        latent = torch.randn(4, 512, 576, device="cuda").bfloat16()
        calls.append((lean_mla_with_kvcache, rows, latent, {"cache_seqlens": lengths}))
    for *call, options in calls:
        recorder.taken.clear()
        results = recorder.several(3, *call, **options)
        assert recorder.taken == [False, False, True]
        assert torch.equal(results[0], results[2])


@torch.no_grad()
def test_streams_have_launches_of_their_own_and_captures_are_pythons(recorder):
    call = (lean_attn_with_kvcache, *tensors())
    results = recorder.several(3, *call)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # The first call of a known family has no launch of its own.
        results += recorder.several(4, *call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results += recorder.several(3, *call)
    graph.replay()
    torch.cuda.synchronize()
    assert recorder.taken == [False, False, True] + [False] * 3 + [True] + [False] * 3
    assert all(torch.equal(result, results[0]) for result in results)


@torch.no_grad()
def test_a_thread_without_a_context_calls(recorder):
    call = (lean_attn_with_kvcache, *tensors())
    results = recorder.several(3, *call)

    def call_in_thread() -> None:
        with torch.no_grad():
            results.extend(recorder.several(3, *call))

    thread = threading.Thread(target=call_in_thread)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert recorder.taken == [False, False, True] * 2
    assert all(torch.equal(result, results[0]) for result in results)
