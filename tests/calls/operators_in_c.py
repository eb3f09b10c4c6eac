"""Operators of compiled graphs in C, registered for the CPU: run by test_fast_operators.py in a
process of its own, because torch keeps the registration.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import use_fake_cuda
from test_fast import ALL_KINDS, of_kind, same

from leanbench.attention import checks, fast, lean_attn_with_kvcache, operator, run

#: Kinds of one launch, without an output of the caller.
TAKEN = {name: kind for name, kind in ALL_KINDS.items() if not kind.get("out")}
OPERATOR = torch.ops.leanbench.lean_attn_with_kvcache.default


def check_kinds(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "is_traced", lambda *tensors: True)
    for name, kind in TAKEN.items():
        fast.clear()
        fake.launches.clear()
        calls = [of_kind(**kind) for _ in range(4)]
        results = [lean_attn_with_kvcache(**call) for call in calls]
        assert [launched.in_c for launched in fake.launches] == [False, False, True, True], name
        ours, result = fake.launches[-1], results[-1]
        fast.clear()
        expected = lean_attn_with_kvcache(**calls[-1])
        for one, other in zip(*map(as_tuple, (result, expected)), strict=True):
            assert one.shape == other.shape
            assert one.stride() == other.stride()
            assert one.dtype == other.dtype
        assert as_tuple(result)[0].data_ptr() == ours.params.out
        same(ours, fake.launches[-1], "out", "lse")


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def plain(**changes: Any) -> tuple[Any, ...]:
    call = of_kind(q_len=1)
    lengths = torch.tensor([40, 17], dtype=torch.int32)
    arguments = {name: call[name] for name in ("q", "k_cache", "v_cache")}
    arguments |= {"cache_seqlens": lengths, "length": None, "block_table": None}
    arguments |= {"softmax_scale": None, "causal": True, "batch_invariant": False}
    arguments |= {"config": None, "implementation": None}
    return tuple((arguments | changes).values())


def check_keys(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_known(*arguments: Any) -> bool:
        OPERATOR(*arguments)
        return fake.launches[-1].in_c

    fast.clear()
    base = plain()
    for _ in range(2):
        assert not is_known(*base)
    assert is_known(*base)
    for change in (
        *({"softmax_scale": 0.5}, {"causal": False}, {"batch_invariant": True}),
        *({"cache_seqlens": None, "length": 33}, {"q": torch.zeros(2, 1, 4, 64).half()[:, :, :2]}),
        {"cache_seqlens": torch.zeros(4, dtype=torch.int32)[::2]},
    ):
        assert not is_known(*plain(**change)), change
    by_length = [plain(cache_seqlens=None, length=length) for length in (33, 34, 39)]
    for arguments in by_length:
        OPERATOR(*arguments)
    assert [launched.params.context for launched in fake.launches[-3:]] == [33, 34, 39]
    assert fake.launches[-1].in_c
    with monkeypatch.context() as patched:
        patched.setattr(checks, "CHECKS_VALUES", True)
        assert not is_known(*base)
    assert is_known(*base)


def check_errors(fake: Any) -> None:
    short = of_kind(q_len=1)["k_cache"][:1]
    with pytest.raises(RuntimeError, match=r"k_cache \(1, "):
        OPERATOR(*plain(k_cache=short))
    for words in ("ends \u20ac" * 400, ""):
        with pytest.MonkeyPatch.context() as patched:

            def interrupted(call: Any, with_lse: bool, words: str = words) -> None:
                raise KeyboardInterrupt(words)

            patched.setattr(operator, "attend", interrupted)
            with pytest.raises(RuntimeError, match=words[:1000] or "^KeyboardInterrupt"):
                OPERATOR(*plain(k_cache=short))
    base = plain()
    for _ in range(3):
        OPERATOR(*base)
    fake.status = 700
    with pytest.raises(RuntimeError, match=r"driver"):
        OPERATOR(*base)
    fake.status = 0


def check_memory() -> None:
    base = plain()
    for _ in range(3):
        OPERATOR(*base)
    resident = pages()
    for _ in range(20_000):
        OPERATOR(*base)
    # A word or handle of 32 bytes in each call would be 150 pages.
    assert pages() - resident < 100
    # torch keeps a tensor's object as long as a handle has it.
    tensors = [weakref.ref(tensor) for tensor in base if isinstance(tensor, torch.Tensor)]
    del base
    gc.collect()
    assert all(tensor() is None for tensor in tensors)


def pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def check_compiled(fake: Any) -> None:
    compiled = torch.compile(
        lambda q, k, v, lengths: lean_attn_with_kvcache(q, k, v, cache_seqlens=lengths) * 2,
        backend="aot_eager",
        fullgraph=True,
    )
    for _ in range(3):
        compiled(*plain()[:4])
    assert fake.launches[-1].in_c


def main() -> None:
    assert operator.use_c("CPU") is None
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        fake = use_fake_cuda(monkeypatch)
        check_compiled(fake)
        monkeypatch.setattr(fast, "is_on", False)
        check_keys(fake, monkeypatch)
        check_errors(fake)
        check_kinds(fake, monkeypatch)
        recent: Any = deque(maxlen=1)
        fake.launches = recent
        check_memory()


if __name__ == "__main__":
    main()
