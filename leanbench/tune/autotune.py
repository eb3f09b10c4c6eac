"""`leanbench.autotune()`: time the candidates of each signature that is called."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from leanbench.attention import prepared
from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.local import spec_of_device
from leanbench.tune.search import Request, Tuning

#: Candidates timed for a signature.
_CANDIDATES = 12


@contextmanager
def autotune(candidates: int = _CANDIDATES) -> Iterator[None]:
    """Time the first candidates of each new signature of `lean_attn_with_kvcache` called inside.

    For a server's warm-up: timings are kept in this GPU's file, later calls and processes use them,
    and nothing is timed outside. Calls under CUDA graph capture are not timed, nor are those with
    `config` or `batch_invariant`. Timing takes memory of its own, about 400 MB; a call that does
    not fit beside what is allocated keeps the model's settings, with a warning.

    Args:
        candidates: Number of the model's first candidates to time.
    """
    import torch

    tunings: dict[int, Tuning] = {}
    seen: set[tuple[int, AttentionProblem]] = set()

    def tune(call: AttentionProblem) -> None:
        index = torch.cuda.current_device()
        # What is saved changes the signatures of prepared launches: calls come again.
        if (index, call) in seen:
            return
        seen.add((index, call))
        if index not in tunings:
            request = Request(kernel("lean"), spec_of_device(index), index, candidates=candidates)
            tunings[index] = Tuning.of(request)
        tuning = tunings[index]
        try:
            with torch.cuda.stream(torch.cuda.Stream(index)):
                tuning.time(call)
        except UserError as error:
            warnings.warn(f"{call.label} keeps the model's settings: {error}", stacklevel=2)
        if (reason := tuning.left_out.get(call)) is not None:
            warnings.warn(f"{call.label} keeps the model's settings: {reason}", stacklevel=2)

    before = prepared.on_signature
    prepared.on_signature = tune
    try:
        yield
    finally:
        prepared.on_signature = before
