"""Kernel as the attention of a loaded model, and the check of its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leanbench.check.reference import CELL_PAIRS, Reference
from leanbench.configs import lookup
from leanbench.core.config import KernelConfig
from leanbench.core.kernel import Kernel
from leanbench.decode.attention import Attention, LayerAttention, call_inputs
from leanbench.decode.step import DecodeStep
from leanbench.measure.instruments import Instruments
from leanbench.records.outcome import Outcome


def attention_of(
    instruments: Instruments, step: DecodeStep, kernel: Kernel, request: str | KernelConfig
) -> tuple[Attention, Outcome]:
    """Return the kernel as a function that models call, and the choice of its launch settings."""
    own = getattr(kernel, "attend", None)
    if own is not None:
        return own, Outcome()
    attention = LayerAttention(kernel, step.problem, step.cache.lengths, instruments.spec, request)
    choice = next(iter(attention.choices.values()))
    return attention, Outcome(**lookup.row_fields(kernel, choice))


def checked(step: DecodeStep, kernel: Kernel, attention: Attention) -> Outcome:
    """Check the first layer of each kind against the fp64 reference over the same Q, K and V.

    Returns:
        The worst error. The status is `incorrect` if one exceeds the limit.
    """
    seen: dict[int | None, Any] = {}

    def watched(module: Any, query: Any, key: Any, value: Any, mask: Any, **call: Any) -> Any:
        out = attention(module, query, key, value, mask, **call)
        window = call.get("sliding_window")
        if window not in seen:
            inputs = call_inputs(
                query,
                key,
                value,
                step.cache.lengths[window],
                scaling=call["scaling"],
                sinks=call.get("s_aux"),
            )
            seen[window] = replace(inputs, q=inputs.q.clone(), out=out.clone())
        return out

    step.attend_with(watched)
    try:
        step()
    finally:
        # The model outlives the step: `watched` would keep the step's cache alive.
        step.attend_with(attention)
    checks = [
        Reference(inputs, max_pairs=CELL_PAIRS // len(seen)).check(inputs, None)
        for inputs in seen.values()
    ]
    worst = max(checks, key=lambda check: check.relative_error)
    outcome = Outcome(
        relative_error=worst.relative_error,
        checked_heads=sum(check.checked_heads for check in checks),
        total_heads=sum(check.total_heads for check in checks),
    )
    failures = [check.failure(kernel.precision(step.problem)) for check in checks]
    failure = next(filter(None, failures), None)
    return outcome | Outcome(status="incorrect", reason=failure) if failure else outcome
