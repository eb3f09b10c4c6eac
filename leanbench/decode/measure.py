"""Step of a whole model as the subject of a measurement.

The model is loaded once. Each kernel replaces its attention. The step without attention and cache
writes, and its matrix products, are timed together with the kernels.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from leanbench.check.reference import CELL_PAIRS, Reference
from leanbench.configs import lookup
from leanbench.core.config import KernelConfig
from leanbench.core.errors import SuspectResult
from leanbench.core.inputs import torch_dtype
from leanbench.core.kernel import Kernel
from leanbench.core.llm.model import WEIGHT_BYTES
from leanbench.core.registry import kernel as kernel_named
from leanbench.decode import BOUND
from leanbench.decode.attention import (
    Attention,
    LayerAttention,
    call_inputs,
    refusal,
    written_first,
)
from leanbench.decode.model import kept_bytes
from leanbench.decode.prefill import prefill_fields
from leanbench.decode.step import DecodeStep, products_of
from leanbench.integrations.transformers import version_fault
from leanbench.measure.buffers import free_memory, refuse_shortage
from leanbench.measure.candidate import Candidate, sample_fields, timing_outcome
from leanbench.measure.extras import sustained_fields
from leanbench.measure.instruments import Instruments
from leanbench.measure.judge import disturbance, noise, throttle_warning, verdict
from leanbench.measure.protocol import Subject
from leanbench.measure.timing import Launches, Replay, Sampler
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    import torch

#: Name of the step's matrix products in the rounds.
_PRODUCTS = "matrix products"
#: Allowed distance of a step's latency below the bound.
_BOUND_MARGIN = 0.03
#: Distance by which rounding moves two logits, in the dtype's epsilon times the sequence's largest
#: logit: one for each. The order of sums alone, `eager` against `sdpa` on a CPU, moves a logit by
#: 0.24 (root mean square) after 2 layers and after 32.
_ROUNDING_STEPS = 2


def confirm(subject: ModelStep, candidate: Candidate) -> Outcome:
    """Replay once: it must choose the tokens of the eager step, to rounding. Return the figures.

    There is no cross-check.

    Raises:
        SuspectResult: It chose other tokens.
    """
    step, logits, timing = subject.step, subject.logits[candidate.name], candidate.timing
    step.chosen.fill_(-1)
    candidate.replay.graph.replay()
    if fault := token_fault(logits, step.chosen, subject.problem.dtype):
        raise SuspectResult(fault)
    fields = timing_outcome(timing, subject.problem.kv_bytes)
    if candidate.name == BOUND:
        fields |= Outcome(bandwidth_tb_s=None)
    return fields | Outcome(raw_samples=sample_fields(timing))


def shares(subject: ModelStep, candidate: Candidate) -> Outcome:
    """Split the time of a step. Attention, with the write of the new token, is the difference from
    the step without both.
    """
    step_us = candidate.timing.median_us
    without_us = subject.timings[BOUND].median_us
    return Outcome(
        tokens_per_s=subject.problem.batch / step_us * 1e6,
        no_attention_us=without_us,
        attention_share=max(0.0, 1 - without_us / step_us),
        gemm_us=subject.timings[_PRODUCTS].median_us,
    )


def judge(subject: ModelStep, candidate: Candidate) -> Outcome:
    """Add warnings and return the status."""
    options, timing = subject.instruments.options, candidate.timing
    if warning := throttle_warning(timing):
        candidate.warnings.append(warning)
    if options.occupancy or options.counters:
        candidate.warnings.append(
            "occupancy and counters are of single kernels, and not measured of whole models"
        )
    bound_us, alarm = subject.timings[BOUND].median_us, None
    if timing.median_us < bound_us * (1 - _BOUND_MARGIN):
        alarm = (
            f"{timing.median_us:.2f} µs beats the same step without attention"
            f" ({bound_us:.2f} µs): part of its work was not timed"
        )
    return verdict(alarm, disturbance(subject.other_processes) or noise(timing, options.effort))


def token_energy(subject: ModelStep, candidate: Candidate) -> Outcome:
    """Return the energy of a token, if the energy of a step is known."""
    energy_mj = candidate.outcome.energy_mj
    if energy_mj is None:
        return Outcome()
    return Outcome(energy_per_token_j=energy_mj / subject.problem.batch / 1000)


class ModelStep(Subject):
    """Decode step of a whole model."""

    steps = (confirm, shares, judge, sustained_fields, token_energy)

    step: DecodeStep
    #: Logits of an eager step by kernel, (batch, vocabulary).
    logits: dict[str, torch.Tensor]

    def refusal(self, kernel: Kernel, request: str | KernelConfig) -> str | None:
        assert self.problem.model is not None
        reason = version_fault() or self.problem.model.only_predicted
        return reason or refusal(kernel, self.problem, request)

    def known_fields(self, kernel: Kernel) -> dict[str, Any]:
        fields = super().known_fields(kernel)
        # A step has no choice of the L2's state.
        del fields["cache"]
        return fields

    def load(self) -> None:
        """Load the model and its cache. Weights that the last problem left count as free."""
        assert self.problem.whole_model is not None
        device = self.instruments.device
        held_bytes = kept_bytes(self.problem.whole_model, self.problem.dtype, str(device))
        # Reference cycles keep their tensors.
        gc.collect()
        free_memory(self.instruments.spec)
        refuse_shortage(self.problem, device, held_bytes)
        self.step, self.logits = DecodeStep(self.problem, device), {}

    def prepare(self, kernel: Kernel, request: str | KernelConfig) -> Candidate:
        """Check the first layer of each kind, and run an eager step."""
        import torch

        step, model = self.step, self.problem.model
        torch.cuda.reset_peak_memory_stats()
        attention, fields = attention_of(self.instruments, step, kernel, request)
        if kernel.name != BOUND:
            fields |= checked(step, kernel, attention)
        step.attend_with(attention)
        self.logits[kernel.name] = step.logits()
        fields |= Outcome(
            memory_bytes=torch.cuda.max_memory_allocated(),
            weight_bytes=model.weights * WEIGHT_BYTES if model else None,
        )
        launches = [partial(step.run_with, attention)]
        return Candidate(kernel=kernel, launches=launches, outcome=fields)

    def make_replay(self, launches: Launches) -> Replay:
        return Replay(launches, self.instruments.options.effort.sample_ms, is_slow_to_start=True)

    def baselines(self) -> dict[str, Sampler]:
        """Capture the matrix products, and the step without attention unless a row asks for it."""
        self.instruments.announce(None)
        bound: Any = kernel_named(BOUND)
        samplers: dict[str, Sampler] = {}
        if BOUND not in self.names:
            samplers[BOUND] = self.make_replay(self.prepare(bound, "default").launches)
        self.step.attend_with(bound.attend)
        return samplers | {_PRODUCTS: self.make_replay([products_of(self.step)])}

    def finish(self, candidates: Sequence[Candidate], timed: Sequence[Candidate]) -> None:
        """Measure the time to first token. Last, because a prompt overwrites the random K and V."""
        first_token, warnings = prefill_fields(self.instruments, self.step)
        model = self.problem.model
        for candidate in candidates:
            candidate.outcome |= first_token
            candidate.warnings += [*warnings, *(model.notes if model else ())]


def attention_of(
    instruments: Instruments, step: DecodeStep, kernel: Kernel, request: str | KernelConfig
) -> tuple[Attention, Outcome]:
    """Return the kernel as a function that models call, and the choice of its launch settings."""
    attend = getattr(kernel, "attend", None)
    if attend is not None:
        # The bound writes nothing.
        own = attend if kernel.name == BOUND else partial(written_first, attend, step.cache)
        return own, Outcome()
    attention = LayerAttention(kernel, step.problem, step.cache, instruments.spec, request)
    choice = next(iter(attention.choices.values()))
    return attention, Outcome(**lookup.row_fields(kernel, choice))


def checked(step: DecodeStep, kernel: Kernel, attention: Attention) -> Outcome:
    """Check the first layer of each kind against the fp64 reference over the same Q, and the cache
    with the new token.

    Returns:
        The worst error. The status is `incorrect` if one exceeds the limit, or if the token is not
        in the cache.
    """
    seen: dict[int | None, Any] = {}
    missing: list[int] = []

    def watched(module: Any, query: Any, key: Any, value: Any, mask: Any, **call: Any) -> Any:
        out = attention(module, query, key, value, mask, **call)
        window = call.get("sliding_window")
        if window not in seen:
            k, v = step.cache.layers[module.layer_idx]
            inputs = call_inputs(
                query,
                k,
                v,
                step.cache.lengths[window],
                scaling=call["scaling"],
                sinks=call.get("s_aux"),
            )
            seen[window] = replace(inputs, q=inputs.q.clone(), out=out.clone())
            if not step.cache.holds(key, value, module.layer_idx):
                missing.append(module.layer_idx)
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
    if missing:
        failure = f"layer {missing[0]} did not write the step's token into the cache"
    return outcome | Outcome(status="incorrect", reason=failure) if failure else outcome


def token_fault(logits: torch.Tensor, chosen: torch.Tensor, dtype: str) -> str | None:
    """Compare the tokens of a replay with those of the eager step; return a sentence or None.

    Another order of sums may choose another token if its logit is as large up to rounding.

    Args:
        logits: Logits of the eager step, (batch, vocabulary).
        chosen: Tokens of the replay, (batch,); -1 if it wrote none.
        dtype: Dtype of the step.
    """
    import torch

    missing = int((chosen < 0).sum())
    if missing:
        return f"a replay of the CUDA graph wrote no token for {missing} of {len(chosen)} sequences"
    values = logits.float()
    gaps = values.amax(dim=-1) - values.gather(1, chosen[:, None])[:, 0]
    epsilon = torch.finfo(torch_dtype(dtype)).eps
    limits = _ROUNDING_STEPS * epsilon * values.abs().amax(dim=-1)
    # NaN exceeds every limit.
    differs = (chosen != logits.argmax(dim=-1)) & ~(gaps <= limits)
    if not differs.any():
        return None
    worst = int((gaps / limits).where(differs, -1.0).argmax())
    return (
        f"a replay of the CUDA graph chose {int(differs.sum())} of {len(chosen)} tokens that the"
        f" eager step did not: in its logits they are up to {float(gaps[worst]):.3g} below the"
        f" largest, and rounding to {dtype} accounts for {float(limits[worst]):.3g}"
    )
