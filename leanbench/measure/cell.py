"""Measures one cell: memory, correctness, time, read floor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from leanbench.decomposition import quantisation_efficiency
from leanbench.gpu.spec import GpuSpec
from leanbench.inputs import AttentionInputs, make_inputs
from leanbench.measure.check import check_against_reference
from leanbench.measure.read_floor import measure_read_floor
from leanbench.measure.timing import Effort, Timing, fastest, time_launches
from leanbench.problem import AttentionProblem
from leanbench.registry import Kernel, KernelConfig

if TYPE_CHECKING:
    import torch

    from leanbench.gpu.nvml import Nvml

#: Buffers rotate over at least this many bytes, and over this many times the L2.
_COLD_BYTES = 400 * 1000 * 1000
_COLD_L2_MULTIPLE = 6


@dataclass(frozen=True)
class MeasureOptions:
    """How hard to measure."""

    effort: Effort = field(default_factory=Effort)


class Bench:
    """Measures cells on one GPU. Keeps the inputs and the read floor of the last problem for its other kernels."""

    def __init__(self, device_index: int, options: MeasureOptions | None = None) -> None:
        import torch

        from leanbench.gpu.local import spec_of_device

        self.options = options or MeasureOptions()
        self.device = torch.device("cuda", device_index)
        torch.cuda.set_device(self.device)
        self.spec: GpuSpec = spec_of_device(device_index)
        self._nvml = _open_nvml(self.device)
        self._problem: AttentionProblem | None = None
        self._buffers: list[AttentionInputs] = []
        self._floor: Timing | None = None

    def run(self, problem: AttentionProblem, kernel: Kernel, configs: str) -> dict[str, Any]:
        """The fields of a Row that a measurement fills.

        Args:
            configs: `default`, or `best` to time all of the kernel's candidates and report the fastest.
        """
        fields: dict[str, Any] = {
            "source": "measured",
            "decomposition": kernel.decomposition,
            "kv_bytes": problem.kv_bytes,
        }
        reason = kernel.unsupported_reason(problem)
        if not kernel.is_timed:
            reason = f"{kernel.name} is there to check others, it cannot be captured in a CUDA graph and timed"
        if reason:
            return {**fields, "status": "unsupported", "reason": reason}
        reason = self._load(problem)
        if reason:
            return {**fields, "status": "out_of_memory", "reason": reason}
        config, choice = self._choose(problem, kernel, configs)
        fields |= {"config": config.to_dict() if config else None, "config_choice": choice}
        return fields | self._measure(problem, kernel, config)

    def _measure(self, problem: AttentionProblem, kernel: Kernel, config: KernelConfig | None) -> dict[str, Any]:
        launches = [kernel.prepare(inputs, config) for inputs in self._buffers]
        first = self._buffers[0]
        first.poison()
        launches[0]()
        check = check_against_reference(first)
        fields: dict[str, Any] = {
            "relative_error": check.relative_error,
            "lse_error": check.lse_error,
            "checked_heads": check.checked_heads,
            "total_heads": check.total_heads,
        }
        failure = check.failure(problem.dtype)
        if failure:
            return {**fields, "status": "incorrect", "reason": failure}

        if self._floor is None:
            self._floor = measure_read_floor(self._buffers, problem.kv_bytes)
        checked_out = first.out.clone()
        effort = self.options.effort
        timing = time_launches(launches, effort)
        fields |= self._gpu_state()
        schedule = kernel.schedule(problem, config, self.spec)
        fields |= timing_fields(timing, problem.kv_bytes, self._floor.median_us)
        if schedule is not None:
            resident = config.ctas_per_sm if config and config.ctas_per_sm else 1
            fields["quantisation_efficiency"] = quantisation_efficiency(schedule, self.spec.sms * resident)
        drift = (first.out.double() - checked_out.double()).norm() / checked_out.double().norm()
        if not drift.item() <= 1e-2:
            reason = f"the output after timing differs from the checked one by a relative {drift.item():.1e}"
            return {**fields, "status": "incorrect", "reason": reason}
        if timing.relative_ci > effort.relative_ci:
            reason = (
                f"the confidence interval of the median reaches {timing.relative_ci:.1%} to one side after "
                f"{len(timing.samples_us)} samples, above {effort.relative_ci:.1%}"
            )
            return {**fields, "status": "noisy", "reason": reason}
        return {**fields, "status": "ok"}

    def _gpu_state(self) -> dict[str, Any]:
        """Clock, temperature, power and throttle reasons, read right after the last sample."""
        if self._nvml is None:
            return {}
        state = self._nvml.state()
        return {
            "sm_clock_mhz": state.sm_clock_mhz,
            "temperature_c": state.temperature_c,
            "power_w": state.power_w,
            "throttle_reasons": state.throttle_reasons,
        }

    def _choose(
        self, problem: AttentionProblem, kernel: Kernel, configs: str
    ) -> tuple[KernelConfig | None, str | None]:
        default = kernel.default_config(problem, self.spec)
        if default is None:
            return None, None
        if configs == "default":
            return default, "default"

        def prepare(config: KernelConfig) -> Sequence[Callable[[], object]]:
            return [kernel.prepare(inputs, config) for inputs in self._buffers]

        candidates = kernel.candidate_configs(problem, self.spec)
        best, timed = fastest({config: lambda config=config: prepare(config) for config in candidates})
        assert isinstance(best, KernelConfig)
        return best, f"best of {timed}"

    def _load(self, problem: AttentionProblem) -> str | None:
        """Makes the rotating buffers; one sentence if they do not fit."""
        if problem == self._problem:
            return None
        import torch

        self._problem, self._buffers, self._floor = None, [], None
        torch.cuda.empty_cache()
        reason = self._memory_shortage(problem)
        if reason:
            return reason
        cold_bytes = max(_COLD_BYTES, _COLD_L2_MULTIPLE * self.spec.l2_mb * 1e6)
        free, _ = torch.cuda.mem_get_info(self.device)
        copies = max(1, math.ceil(cold_bytes / problem.kv_bytes))
        copies = max(1, min(copies, int(0.8 * free / problem.kv_allocated_bytes)))
        self._buffers = [make_inputs(problem, self.device, seed=None) for _ in range(copies)]
        self._problem = problem
        return None

    def _memory_shortage(self, problem: AttentionProblem) -> str | None:
        import torch

        free, _ = torch.cuda.mem_get_info(self.device)
        # The fp64 reference holds one head's K, V and scores; 512 MB for the context, workspaces and graphs.
        reference = problem.max_context * (2 * problem.head_dim + 3 * problem.group_size) * 8
        needed = problem.kv_allocated_bytes + reference + 512e6
        if needed <= free:
            return None
        return (
            f"needs {needed / 1e9:.1f} GB (K and V {problem.kv_allocated_bytes / 1e9:.1f} GB, the rest for the check) "
            f"and the GPU has {free / 1e9:.1f} GB free: choose a smaller context, batch or number of KV heads"
        )


def timing_fields(timing: Timing, kv_bytes: int, floor_us: float) -> dict[str, Any]:
    """A timing as Row fields."""
    low, high = timing.interval_us
    p25, p75 = timing.quartiles_us
    return {
        "latency_us": timing.median_us,
        "latency_p25_us": p25,
        "latency_p75_us": p75,
        "latency_ci_low_us": low,
        "latency_ci_high_us": high,
        "samples": len(timing.samples_us),
        "launches_per_sample": timing.launches_per_sample,
        "bandwidth_tb_s": kv_bytes / timing.median_us / 1e6,
        "read_floor_us": floor_us,
        "read_floor_share": floor_us / timing.median_us,
    }


def _open_nvml(device: torch.device) -> Nvml | None:
    """NVML for the GPU that torch means, or None where it cannot be had: latency needs no NVML."""
    import torch

    from leanbench.gpu.nvml import Nvml, NvmlError

    try:
        return Nvml(f"GPU-{torch.cuda.get_device_properties(device).uuid}").__enter__()
    except NvmlError:
        return None
