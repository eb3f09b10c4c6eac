"""Which kernels run here and are right."""

from __future__ import annotations

import math

from leanbench.core.kernel import Kernel, written_by
from leanbench.core.problem import AttentionProblem
from leanbench.doctor.finding import Finding, note, ok, problem
from leanbench.doctor.machine import Machine

#: Small, grouped queries, and the default launch settings that the noise floor needs compiled
#: anyway.
TRIED = AttentionProblem(1, 32, 8, 1024, 128)


def kernel_is_right(kernel: Kernel, machine: Machine) -> Finding:
    """One call on fresh inputs against the fp64 reference."""
    from leanbench.check.reference import Reference
    from leanbench.core.inputs import make_inputs

    reason = kernel.unsupported_reason(TRIED)
    if reason is not None:
        return note(reason)
    inputs = make_inputs(TRIED, machine.device)
    launch = kernel.prepare(inputs, kernel.default_config(TRIED, machine.spec))
    launch()
    check = Reference(inputs).check(written_by(launch, inputs), kernel.lse_base)
    failure = check.failure(kernel.precision(TRIED))
    if failure is not None:
        fix = (
            f"trust no figure of it; `leanbench check --kernels {kernel.name}` shows where it is"
            " wrong"
        )
        # JSON has no infinity, which stands for an output that was not written.
        error = check.relative_error if math.isfinite(check.relative_error) else None
        return problem(f"wrong on {TRIED.label}: {failure}", fix, relative_error=error)
    return ok(
        f"right on {TRIED.label}, relative error {check.relative_error:.1e}",
        relative_error=check.relative_error,
    )
