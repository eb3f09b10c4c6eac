"""How a step of a whole model is measured: as a problem of attention is, with the model loaded once
and each kernel in the place of its attention.

Load, prepare and check each kernel, time all in turn and the step without attention among them,
confirm what was timed, and measure what else the options ask for.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from leanbench.core.config import KernelConfig
from leanbench.core.errors import OutOfMemory, SuspectResult
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel as kernel_named
from leanbench.decode import BOUND
from leanbench.decode.model import kept_bytes
from leanbench.decode.prefill import prefill_fields
from leanbench.decode.prepare import Candidate, StepReplay, prepare
from leanbench.decode.products import products_of
from leanbench.decode.refusal import refusal, request_of
from leanbench.decode.step import DecodeStep
from leanbench.decode.tokens import token_fault
from leanbench.integrations.transformers import version_fault
from leanbench.measure.buffers import free_memory, refuse_shortage
from leanbench.measure.energy import measure_sustained, sustained_outcome
from leanbench.measure.fields import sample_fields, timing_outcome
from leanbench.measure.instruments import Instruments
from leanbench.measure.judge import SLOWDOWNS, disturbance, noise, throttle_warning
from leanbench.measure.timing import Timing, run_rounds
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    from leanbench.gpu.processes import GpuProcess

#: The step's matrix products among the candidates of a problem.
_PRODUCTS = "matrix products"
#: How far a replayed step may fall below the bound before something is wrong with one of them.
_BOUND_MARGIN = 0.03


def measure_step(
    instruments: Instruments,
    problem: AttentionProblem,
    kernels: Sequence[Kernel],
    configs: str = "default",
    overrides: Mapping[str, KernelConfig] | None = None,
) -> dict[str, dict[str, Any]]:
    """The row fields that a measurement fills, by kernel; raw samples under `raw_samples`.

    Args:
        problem: has a whole model.
        configs: as of `leanbench.configs.lookup.resolve`; overrides: launch settings by kernel, in
            its place.

    Raises:
        SuspectResult: the kernel announced last did what makes its figures meaningless.
        GpuUnusable: the GPU no longer answers.
    """
    requests = {
        kernel.name: request_of(kernel, configs, (overrides or {}).get(kernel.name))
        for kernel in kernels
    }
    outcomes: dict[str, Outcome] = {}
    for kernel in kernels:
        instruments.announce(kernel.name)
        reason = version_fault() or refusal(kernel, problem, requests[kernel.name])
        outcomes[kernel.name] = (
            Outcome(status="unsupported", reason=reason) if reason else Outcome()
        )
    able = [kernel for kernel in kernels if outcomes[kernel.name].status is None]
    requests = {kernel.name: requests[kernel.name] for kernel in able}
    instruments.announce(None)
    try:
        if able:
            outcomes |= _measure(instruments, problem, able, requests)
    except OutOfMemory as error:
        outcomes |= dict.fromkeys(requests, Outcome(status="out_of_memory", reason=str(error)))
    return {
        kernel.name: {
            "source": "measured",
            "decomposition": kernel.decomposition,
            "kv_bytes": problem.kv_bytes,
            "library": None if kernel.unavailable_reason() else kernel.library(),
            **outcomes[kernel.name].fields(),
        }
        for kernel in kernels
    }


def _measure(
    instruments: Instruments,
    problem: AttentionProblem,
    kernels: Sequence[Kernel],
    requests: Mapping[str, str | KernelConfig],
) -> dict[str, Outcome]:
    announce = instruments.announce
    step = _loaded(instruments, problem)
    candidates: dict[str, Candidate] = {}
    for kernel in dict.fromkeys([*kernels, kernel_named(BOUND)]):
        announce(kernel.name if kernel.name in requests else None)
        request = requests.get(kernel.name, "default")
        candidates[kernel.name] = prepare(instruments, step, kernel, request)
    announce(None)
    started_us = int(time.time() * 1e6)
    able = {name: own for name, own in candidates.items() if own.outcome.status is None}
    step.attend_with(candidates[BOUND].attention)
    products = StepReplay([products_of(step)], instruments.options.effort.sample_ms)
    timings = run_rounds(
        {_PRODUCTS: products, **{name: own.replay for name, own in able.items()}},
        instruments.options.effort,
        instruments.gpu_state,
        lambda name: announce(name if name in requests else None),
    )
    nvml = instruments.nvml
    seen = None if nvml is None else nvml.other_processes(started_us)
    strangers = [process for process in seen or () if process.pid != os.getppid()]
    for name in timings.keys() & requests.keys():
        announce(name)
        own, timing, bound = candidates[name], timings[name], timings[BOUND]
        step.attend_with(own.attention)
        own.outcome |= _confirmed(step, own, timing)
        own.outcome |= _shares(problem, timing, bound, timings[_PRODUCTS])
        own.outcome |= _judged(instruments, own, timing, bound, strangers)
        own.outcome |= _sustained(instruments, own, problem.batch)
    announce(None)
    # Last: the prompt's K and V take the place of the random ones.
    first_token, warnings = prefill_fields(instruments, step)
    return {
        name: candidates[name].outcome
        | first_token
        | Outcome(warnings=[*candidates[name].warnings, *warnings] or None)
        for name in requests
    }


def _loaded(instruments: Instruments, problem: AttentionProblem) -> DecodeStep:
    """The model and its cache; the weights of the problem before count as free where they are the
    same.

    Raises:
        OutOfMemory: they do not fit into the GPU's free memory.
    """
    assert problem.whole_model is not None
    held = kept_bytes(problem.whole_model, problem.dtype, str(instruments.device))
    # Objects that refer to each other keep what they are about.
    gc.collect()
    free_memory(instruments.spec)
    refuse_shortage(problem, instruments.device, held)
    return DecodeStep(problem, instruments.device)


def _confirmed(step: DecodeStep, own: Candidate, timing: Timing) -> Outcome:
    """Timing's figures, after a replay that must choose what the eager step chose, to rounding.

    There is no cross-check.

    Raises:
        SuspectResult: it does not.
    """
    step.chosen.fill_(-1)
    own.replay.graph.replay()
    fault = token_fault(own.logits, step.chosen, step.problem.dtype)
    if fault:
        raise SuspectResult(fault)
    fields = timing_outcome(timing, step.problem.kv_bytes)
    if own.kernel.name == BOUND:
        fields |= Outcome(bandwidth_tb_s=None)
    return fields | Outcome(raw_samples=sample_fields(timing, ()))


def _shares(problem: AttentionProblem, timing: Timing, bound: Timing, products: Timing) -> Outcome:
    """Where the time of a step goes: attention is what the step without it lacks."""
    step_us, without_us = timing.median_us, bound.median_us
    return Outcome(
        tokens_per_s=problem.batch / step_us * 1e6,
        no_attention_us=without_us,
        attention_share=max(0.0, 1 - without_us / step_us),
        gemm_us=products.median_us,
    )


def _judged(
    instruments: Instruments,
    own: Candidate,
    timing: Timing,
    bound: Timing,
    strangers: Sequence[GpuProcess],
) -> Outcome:
    options = instruments.options
    warnings = (
        throttle_warning(timing),
        "occupancy and counters are of single kernels, and not measured of whole models"
        if options.occupancy or options.counters
        else None,
    )
    own.warnings += [warning for warning in warnings if warning]
    alarm = None
    if timing.median_us < bound.median_us * (1 - _BOUND_MARGIN):
        alarm = (
            f"{timing.median_us:.2f} µs beats the same step without attention"
            f" ({bound.median_us:.2f} µs): part of its work was not timed"
        )
    noisy = disturbance(strangers) or noise(timing, options.effort)
    return Outcome(status="suspect" if alarm else "noisy" if noisy else "ok", reason=alarm or noisy)


def _sustained(instruments: Instruments, own: Candidate, batch: int) -> Outcome:
    """Latency over seconds of steps; with the energy option, energy of a step and of a token."""
    options = instruments.options
    if not (options.sustained or options.energy):
        return Outcome()
    nvml = instruments.nvml if options.energy else None
    if options.energy and nvml is None:
        own.warnings.append(
            "NVML cannot be used here, so there is no energy: run `leanbench doctor`"
        )
    reading = measure_sustained(
        own.replay.graph.replay,
        own.replay.launches,
        nvml,
        instruments.calibration,
        options.window_s,
    )
    slowdowns = sorted(SLOWDOWNS.intersection(reading.throttle_reasons or ()))
    if slowdowns:
        own.warnings.append(f"clocks were lowered in the sustained window ({', '.join(slowdowns)})")
    own.warnings += reading.warnings
    outcome = sustained_outcome(reading, instruments.calibration, None)
    energy_mj = outcome.energy_mj
    per_token_j = None if energy_mj is None else energy_mj / batch / 1000
    return outcome | Outcome(energy_per_token_j=per_token_j)
