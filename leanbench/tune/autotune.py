"""`leanbench.autotune()`: time the candidates of each signature that is called."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from leanbench.attention import prepared
from leanbench.configs.lookup import choose, tuned_kernel
from leanbench.configs.store import check_target
from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.switches import CONFIGS, is_on
from leanbench.gpu.local import spec_of_device
from leanbench.tune.search import Request, Tuning

#: Candidates timed for a signature.
_CANDIDATES = 12
#: Threads time one after the other.
_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def autotune(candidates: int = _CANDIDATES) -> Iterator[None]:
    """Time the candidates of each signature called inside: the first ones of
    `lean_attn_with_kvcache`, all of `lean_mla_with_kvcache`.

    For a server's warm-up: timings are kept in this GPU's file, later calls and processes use them,
    and nothing is timed outside, nor in other threads. Calls under CUDA graph capture are not
    timed, nor are those with `config` or `batch_invariant`, and those timed before. Timing takes up
    to a quarter of the GPU's free memory, and the call's outputs; what does not fit keeps the
    model's settings, with a warning.

    Args:
        candidates: Number of the model's first candidates to time.
    """
    if not is_on(CONFIGS, default=True):
        warnings.warn(f"{CONFIGS} is off: nothing is timed", stacklevel=3)
        yield
        return
    tunings: dict[int, Tuning | None] = {}
    seen: set[tuple[int, AttentionProblem]] = set()

    def tune(call: AttentionProblem) -> None:
        index = torch.cuda.current_device()
        # What is saved changes the signatures of prepared launches: calls come again.
        if (index, call) in seen:
            return
        seen.add((index, call))
        with _ONE_AT_A_TIME:
            tune_once(call, index)

    def tune_once(call: AttentionProblem, index: int) -> None:
        spec = spec_of_device(index)
        if choose(tuned_kernel(call), call, spec).how == "tuned":
            return
        try:
            if index not in tunings:
                tunings[index] = None
                check_target(spec)
                tunings[index] = Tuning.of(Request(spec, index, candidates=candidates))
            if (tuning := tunings[index]) is None:
                return
            with torch.cuda.stream(_stream(index)):
                tuning.time(call)
            reason = tuning.left_out.get(call)
        except UserError as error:
            reason = str(error)
        if reason is not None:
            warnings.warn(f"{call.label} keeps the model's settings: {reason}", stacklevel=2)

    before = prepared.replace_hook(tune)
    try:
        yield
    finally:
        prepared.replace_hook(before)
        if any(tunings.values()):
            torch.cuda.empty_cache()


@cache
def _stream(index: int) -> torch.cuda.Stream:
    """Return a stream to time on. Each stream has a workspace, so there is one for all."""
    return torch.cuda.Stream(index)
