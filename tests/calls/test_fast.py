"""The C path of calls: which calls C takes, and that it launches what Python would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from every_kind import KINDS, PLAIN
from fake_cuda import FakeCuda, Launched, use_fake_cuda

from leanbench.attention import fast, lean_attn_with_kvcache
from leanbench.check.launches import api_arguments
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = pytest.mark.skipif(fast.attention is None, reason=f"no C path: {fast.why_not}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with torch.no_grad():
        yield use_fake_cuda(monkeypatch)
    fast.clear()


class Calls:
    """Calls of one kind; each has tensors of its own."""

    def __init__(self, problem: AttentionProblem, **options: Any) -> None:
        self._problem, self._options = problem, options

    def arguments(self) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        inputs = make_inputs(self._problem, "cpu")
        given = {**api_arguments(inputs), **self._options}
        if given.get("out") is True:
            given["out"] = torch.empty_like(inputs.out)
        return (inputs.q, inputs.k_cache, inputs.v_cache), given


ALL_KINDS: dict[str, Calls] = {
    "plain": Calls(replace(PLAIN, q_len=1)),
    "without the LSE": Calls(PLAIN, return_softmax_lse=False),
    "out": Calls(PLAIN, out=True, return_softmax_lse=False),
    "pages": Calls(replace(PLAIN, page_size=16, context=(40, 17))),
    **{name: Calls(replace(PLAIN, **kind)) for name, kind in KINDS.items()},
}


def same(block: Launched, other: Launched, *own: str) -> None:
    """Compare whole blocks but for the epoch and the fields of new tensors."""
    for launched in (block, other):
        launched.params.epoch = 0
        for name in own:
            setattr(launched.params, name, 0)
    assert bytes(block.params) == bytes(other.params)
    assert block[1:4] == other[1:4]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_c_launches_what_python_launches(kind, fake, monkeypatch):
    calls = ALL_KINDS[kind]
    for number in range(3):
        tensors, options = calls.arguments()
        result = lean_attn_with_kvcache(*tensors, **options)
        assert fake.launches[-1].in_c == (number == 2)
    ours = fake.launches[-1]
    out, lse = result if isinstance(result, tuple) else (result, None)
    assert ours.params.out == out.data_ptr()
    assert lse is None or ours.params.lse == lse.data_ptr()
    monkeypatch.setattr(fast, "attention", None)
    theirs = lean_attn_with_kvcache(*tensors, **options)
    like, lse_like = theirs if isinstance(theirs, tuple) else (theirs, None)
    launched = fake.launches[-1]
    assert not launched.in_c
    for tensor, expected in ((out, like), (lse, lse_like)):
        if tensor is not None:
            assert (tensor.shape, tensor.stride(), tensor.dtype) == (
                *(expected.shape, expected.stride()),
                expected.dtype,
            )
    assert ours.params.epoch != launched.params.epoch
    own = () if "out" in options else ("out",)
    same(ours, launched, *own, *(() if lse is None else ("lse",)))
