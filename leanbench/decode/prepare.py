"""A kernel made ready as the attention of a loaded model: an eager step, a check of its layers, a
CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from leanbench.check.reference import CELL_PAIRS, Reference
from leanbench.configs import lookup
from leanbench.core.config import KernelConfig
from leanbench.core.kernel import Kernel
from leanbench.core.whole_model import WEIGHT_BYTES
from leanbench.decode import BOUND
from leanbench.decode.attention import Attention, LayerAttention, call_inputs
from leanbench.decode.step import DecodeStep
from leanbench.measure.instruments import Instruments
from leanbench.measure.timing import Replay
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    import torch


class StepReplay(Replay):
    """A replay of a step, timed behind another one: the host takes most of a millisecond to start a
    graph of 1,400 kernels, in which the GPU would otherwise have nothing to do.
    """

    def _replay_ms(self) -> float:
        self.graph.replay()
        return super()._replay_ms()


@dataclass
class Candidate:
    """One kernel as the attention of the loaded model."""

    kernel: Kernel
    attention: Attention
    replay: StepReplay
    #: (batch, vocabulary), of an eager step.
    logits: torch.Tensor
    outcome: Outcome
    warnings: list[str] = field(default_factory=list)


def prepare(
    instruments: Instruments, step: DecodeStep, kernel: Kernel, request: str | KernelConfig
) -> Candidate:
    """The kernel in an eager step, whose first layer of each kind is checked, and in a CUDA
    graph.
    """
    import torch

    problem = step.problem
    torch.cuda.reset_peak_memory_stats()
    attention, outcome = attention_of(instruments, step, kernel, request)
    if kernel.name != BOUND:
        outcome |= checked(step, kernel, attention)
    step.attend_with(attention)
    logits = step.logits()
    outcome |= Outcome(
        memory_bytes=torch.cuda.max_memory_allocated(),
        weight_bytes=problem.model.weights * WEIGHT_BYTES if problem.model else None,
    )
    replay = StepReplay([step], instruments.options.effort.sample_ms)
    return Candidate(kernel, attention, replay, logits, outcome)


def attention_of(
    instruments: Instruments, step: DecodeStep, kernel: Kernel, request: str | KernelConfig
) -> tuple[Attention, Outcome]:
    """The kernel as a model calls it, and how its launch settings were chosen."""
    own = getattr(kernel, "attend", None)
    if own is not None:
        return own, Outcome()
    attention = LayerAttention(kernel, step.problem, step.cache.lengths, instruments.spec, request)
    choice = next(iter(attention.choices.values()))
    return attention, Outcome(**lookup.row_fields(kernel, choice))


def checked(step: DecodeStep, kernel: Kernel, attention: Attention) -> Outcome:
    """The worst error of the first layer of each kind against the fp64 reference over the same Q, K
    and V; `incorrect` where one is above the limit.
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
        # The model outlives the step, and what it calls would keep the step's cache.
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
