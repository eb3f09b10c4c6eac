"""What a launch draws: the idle board, the SMs that run, and every byte, up to the board's power
limit.

Launches follow each other for seconds (docs/measuring.md, `energy_mj`). On an H200 every kernel
that uses all SMs is held at the power limit there, so that only kernels which leave SMs idle tell
what an SM and a byte draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from leanbench.core.gpu_spec import GpuSpec
from leanbench.model.constants import Constants

_WATT_US_IN_MJ = 1e-3


def energy_mj(
    latency_us: float,
    kv_bytes: int,
    running_sms: int,
    spec: GpuSpec,
    constants: Constants,
    calibrated_limit_w: float,
) -> float:
    """Energy of one launch, back to back with others.

    Args:
        running_sms: SMs that run a CTA.
        calibrated_limit_w: the power limit of the GPU that the constants belong to; the idle power
            scales with it.
    """
    idle_w = constants.idle_power_w * spec.power_limit_w / calibrated_limit_w
    static_mj = (idle_w + running_sms * constants.sm_power_w) * latency_us * _WATT_US_IN_MJ
    read_mj = kv_bytes * constants.byte_pj * 1e-9
    limit_mj = constants.power_cap_share * spec.power_limit_w * latency_us * _WATT_US_IN_MJ
    return min(static_mj + read_mj, limit_mj)


def fit_energy(
    figures: Sequence[tuple[float, int, int, float, float, float]], spec: GpuSpec, start: Constants
) -> Constants:
    """Constants of energy for rows of (latency_us, kv_bytes, running SMs, energy_mj, idle power,
    sustained power).

    The idle power is the rows' own, the cap the highest power seen where it is near the limit. An
    SM's power and a byte's energy follow by least squares, held near where they start: runs in
    which all uncapped kernels use as many SMs do not tell them apart.
    """
    import numpy as np
    from scipy.optimize import least_squares

    if not figures:
        return start
    idle_w = float(np.median([idle for *_, idle, _ in figures]))
    capped_w = [power for *_, power in figures if power > 0.97 * spec.power_limit_w]
    cap = float(np.median(capped_w)) / spec.power_limit_w if capped_w else 1.0
    base = replace(start, idle_power_w=idle_w, power_cap_share=cap)

    def constants(steps: Sequence[float]) -> Constants:
        sm_w, byte_pj = start.sm_power_w * np.exp(steps[0]), start.byte_pj * np.exp(steps[1])
        return replace(base, sm_power_w=float(sm_w), byte_pj=float(byte_pj))

    def residuals(steps: Sequence[float]) -> list[float]:
        now = constants(steps)
        errors = [
            np.log(energy_mj(us, read, sms, spec, now, spec.power_limit_w) / measured)
            for us, read, sms, measured, _, _ in figures
        ]
        return [*errors, *(1e-3 * step for step in steps)]

    return constants(least_squares(residuals, [0.0, 0.0]).x)
