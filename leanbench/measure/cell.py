"""Measures the kernels of one problem together: memory, correctness, time in turn, cross-check,
what else is asked.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leanbench.check.reference import CELL_PAIRS, Reference
from leanbench.configs import lookup
from leanbench.core.decomposition import quantisation_efficiency
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import Kernel, KernelConfig, written_by
from leanbench.gpu.nvml_library import GpuLostError
from leanbench.measure import extras, fields
from leanbench.measure.buffers import free_memory, memory_shortage, rotating_inputs
from leanbench.measure.candidate import Candidate
from leanbench.measure.crosscheck import CrossCheck, cross_check, disagreement
from leanbench.measure.energy import check_window, row_fields
from leanbench.measure.options import MeasureOptions
from leanbench.measure.read_floor import ReadFloor, fingerprint
from leanbench.measure.timing import Launches, Replay, Timing, fastest, run_rounds

if TYPE_CHECKING:
    import torch

    from leanbench.core.timeline import Timeline
    from leanbench.gpu.nvml import Nvml
    from leanbench.measure.energy import SustainedReading

#: The read floor among the candidates of a problem.
FLOOR = None
Outcome = dict[str, Any]


class Alarm(Exception):
    """A kernel did something that makes its figures meaningless; the message is the sentence for
    its row.
    """


@dataclass
class Loaded:
    """A problem on the GPU, kept for the kernels that come to it later."""

    problem: AttentionProblem
    buffers: list[AttentionInputs]
    reference: Reference
    fingerprint: list[torch.Tensor]
    #: Sustained reading of the read floor, once somebody asked.
    floor_reading: SustainedReading | None = None


class Bench:
    """Measures on one GPU.

    Args:
        announce: told which kernel's code runs next, None for nobody's: whoever watches this
            process knows whom to blame if it dies.
    """

    def __init__(
        self,
        device_index: int,
        options: MeasureOptions | None = None,
        announce: Callable[[str | None], None] = lambda name: None,
    ) -> None:
        import torch

        from leanbench.gpu.local import spec_of_device

        self.options = options or MeasureOptions()
        self.device = torch.device("cuda", device_index)
        torch.cuda.set_device(self.device)
        self.spec: GpuSpec = spec_of_device(device_index)
        self._announce = announce
        self._nvml = _open_nvml(self.device)
        self._floor = ReadFloor()
        self._loaded: Loaded | None = None
        self._calibration = extras.calibrate(self._nvml) if self.options.energy else None
        if self._calibration is not None:
            check_window(self.options.window_s, self._calibration.tick_ms)

    def run(
        self,
        problem: AttentionProblem,
        kernels: Sequence[Kernel],
        configs: str,
        pins: Mapping[str, KernelConfig] | None = None,
    ) -> dict[str, Outcome]:
        """The row fields that a measurement fills, by kernel; raw samples under `raw_samples`.

        Args:
            configs: `default` or `heuristic`, see leanbench.configs.lookup, or `best` to time all
                of a kernel's candidates and report the fastest.
            pins: launch settings by kernel, for those that `configs` is not asked about.

        Raises:
            Alarm: the kernel announced last did what makes its figures meaningless.
        """
        rows: dict[str, Outcome] = {}
        able: list[Kernel] = []
        for kernel in kernels:
            self._announce(kernel.name)
            rows[kernel.name] = self._base(problem, kernel)
            reason = _unable(kernel, problem)
            if reason:
                rows[kernel.name] |= {"status": "unsupported", "reason": reason}
            else:
                able.append(kernel)
        if not able:
            return rows
        self._announce(None)
        reason = self._load(problem)
        if reason:
            return rows | {
                kernel.name: {**rows[kernel.name], "status": "out_of_memory", "reason": reason}
                for kernel in able
            }
        candidates: dict[str, Candidate] = {}
        for kernel in able:
            self._announce(kernel.name)
            asked = (pins or {}).get(kernel.name, kernel.config_choice or configs)
            candidate = self._prepare(problem, kernel, asked, rows[kernel.name])
            if candidate is not None:
                candidates[kernel.name] = candidate
        if candidates:
            self._measure(problem, candidates)
        return rows

    def timeline(self, problem: AttentionProblem, kernel: Kernel, configs: str) -> Timeline | str:
        """What every CTA of one call did; a sentence where that cannot be had."""
        from leanbench.measure.timeline import record_timeline

        reason = _unable(kernel, problem) or self._load(problem)
        if reason:
            return reason
        assert self._loaded is not None
        config = self._choose(problem, kernel, configs).config
        buffers = self._loaded.buffers
        replay = Replay(
            [kernel.prepare(inputs, config) for inputs in buffers], self.options.effort.sample_ms
        )
        timing = run_rounds({kernel.name: replay}, self.options.effort, self._state)[kernel.name]
        timeline = record_timeline(problem, kernel, config, buffers, self.spec, timing.median_us)
        return timeline or f"{kernel.name} has no instrumented build"

    def _base(self, problem: AttentionProblem, kernel: Kernel) -> Outcome:
        return {
            "source": "measured",
            "decomposition": kernel.decomposition,
            "kv_bytes": problem.kv_bytes,
            "cache": self.options.cache,
        }

    def _load(self, problem: AttentionProblem) -> str | None:
        """Makes the rotating buffers and the reference; one sentence if they do not fit."""
        if self._loaded is not None and self._loaded.problem == problem:
            return None
        self._loaded = None
        # The profiler's results refer to each other, some 100,000 objects a problem: Python would
        # let them pile up.
        gc.collect()
        free_memory(self.spec)
        reason = memory_shortage(problem, self.device)
        if reason:
            return reason
        buffers = rotating_inputs(problem, self.device, self.spec, self.options.cache)
        reference = Reference(buffers[0], max_pairs=CELL_PAIRS)
        self._loaded = Loaded(problem, buffers, reference, fingerprint(buffers[0]))
        return None

    def _prepare(
        self, problem: AttentionProblem, kernel: Kernel, configs: str | KernelConfig, row: Outcome
    ) -> Candidate | None:
        """Chooses settings, runs once and checks; None if the output is wrong, `row` says
        so then.
        """
        assert self._loaded is not None
        choice = self._choose(problem, kernel, configs)
        config = choice.config
        row |= lookup.row_fields(kernel, choice)
        launches = [kernel.prepare(inputs, config) for inputs in self._loaded.buffers]
        first = self._loaded.buffers[0]
        written_by(launches[0], first).poison()
        launches[0]()
        check = self._loaded.reference.check(written_by(launches[0], first), kernel.lse_base)
        self._refuse_changed_inputs(kernel.name)
        row |= {
            "relative_error": check.relative_error,
            "lse_error": check.lse_error,
            "checked_heads": check.checked_heads,
            "total_heads": check.total_heads,
        }
        failure = check.failure(problem.dtype)
        if failure:
            row |= {"status": "incorrect", "reason": failure}
            return None
        schedule = kernel.schedule(problem, config, self.spec)
        if schedule is not None:
            resident = config.ctas_per_sm if config and config.ctas_per_sm else 1
            row["quantisation_efficiency"] = quantisation_efficiency(
                schedule, self.spec.sms * resident
            )
        return Candidate(kernel, config, launches, row)

    def _measure(self, problem: AttentionProblem, candidates: dict[str, Candidate]) -> None:
        """Times the candidates in turn, the read floor among them, and finishes their rows."""
        started_us = int(time.time() * 1e6)
        replays: dict[str | None, Replay] = {}
        for name, candidate in candidates.items():
            self._announce(name)
            replays[name] = Replay(candidate.launches, self.options.effort.sample_ms)
            self._refuse_changed_inputs(name)
        timings = self._rounds(problem, replays)
        others = None if self._nvml is None else self._nvml.other_processes(started_us)
        processes = [process for process in others or () if process.pid != os.getppid()]
        for name, candidate in candidates.items():
            self._announce(name)
            self._verify_replay(candidate, replays[name])
            checked = cross_check(candidate.launches, timings[name].median_us)
            self._finish(
                problem, candidate, timings[name], timings[FLOOR].median_us, checked, processes
            )
        for name, candidate in candidates.items():
            self._announce(name)
            self._extras(problem, candidate, replays[name])
        self._announce(None)
        self._refuse_changed_inputs(", ".join(candidates))

    def _rounds(
        self, problem: AttentionProblem, replays: dict[str | None, Replay]
    ) -> dict[str | None, Timing]:
        """Timings of the kernels and of the read floor.

        A kernel faster than the floor may only show that the floor's variant, chosen for a problem
        of nearly this size, is not the best one here: then it is chosen again and all are timed
        again.
        """
        assert self._loaded is not None
        for again in (False, True):
            self._announce(None)
            launches = self._floor.launches(self._loaded.buffers, problem.kv_bytes, again)
            floor = Replay(launches, self.options.effort.sample_ms)
            timings = run_rounds(
                {FLOOR: floor, **replays}, self.options.effort, self._state, self._announce
            )
            fastest_us = min(timings[name].median_us for name in replays)
            if fastest_us > 0.99 * timings[FLOOR].median_us:
                break
        return timings

    def _verify_replay(self, candidate: Candidate, replay: Replay) -> None:
        """Replays once over poisoned outputs: what was timed must be what computes."""
        import torch

        assert self._loaded is not None
        pairs = zip(candidate.launches, self._loaded.buffers, strict=True)
        written = [written_by(launch, inputs) for launch, inputs in pairs]
        for results in written:
            results.poison()
        replay.graph.replay()
        # One wait for all of them.
        unwritten = int(torch.stack([results.out.isnan().any() for results in written]).sum())
        if unwritten:
            raise Alarm(
                f"{unwritten} of {len(written)} outputs were not written when the CUDA graph was "
                "replayed: part of the work ran on another stream and was not timed"
            )
        check = self._loaded.reference.check(written[0], candidate.kernel.lse_base)
        failure = check.failure(self._loaded.problem.dtype)
        if failure:
            candidate.row |= {"status": "incorrect", "reason": f"after timing, {failure}"}

    def _finish(
        self,
        problem: AttentionProblem,
        candidate: Candidate,
        timing: Timing,
        floor_us: float,
        checked: CrossCheck | str,
        processes: Sequence[Any],
    ) -> None:
        row, warnings = candidate.row, candidate.warnings
        row |= fields.timing_fields(timing, problem.kv_bytes, floor_us)
        if isinstance(checked, str):
            warnings.append(checked)
        else:
            row["crosscheck_us"] = checked.median_us
            row["gpu_kernels"] = list(checked.kernels)
            differs = disagreement(checked.median_us, timing.samples_us)
            warnings += [differs] if differs else []
        row["raw_samples"] = fields.sample_fields(
            timing, () if isinstance(checked, str) else checked.samples_us
        )
        cache = self.options.cache
        found = (
            fields.throttle_warning(timing),
            fields.floor_warning(floor_us, problem.kv_bytes, self.spec, cache),
            fields.warm_warning(problem.kv_bytes, self.spec, cache),
            fields.rotation_warning(len(candidate.launches), problem.kv_bytes, self.spec, cache),
        )
        warnings += [warning for warning in found if warning]
        row["warnings"] = warnings
        if row.get("status") == "incorrect":
            return
        alarm = fields.impossible(timing.median_us, floor_us, problem.kv_bytes, self.spec, cache)
        noise = fields.disturbance(processes) or fields.noise(timing, self.options.effort)
        row["status"] = "suspect" if alarm else "noisy" if noise else "ok"
        row["reason"] = alarm or noise

    def _extras(self, problem: AttentionProblem, candidate: Candidate, replay: Replay) -> None:
        """Planning; sustained latency, energy, occupancy, counters where the options ask for them.
        What cannot be had is a warning.
        """
        import torch

        loaded, options = self._loaded, self.options
        assert loaded is not None
        assert self.device.index is not None
        index = self.device.index
        asked: list[Callable[[], Outcome]] = [
            lambda: extras.plan_fields(candidate, loaded.buffers[0])
        ]
        if options.sustained or options.energy:
            asked.append(lambda: self._sustained_fields(problem, candidate, replay))
        if options.occupancy:
            asked.append(lambda: extras.resource_fields(candidate, loaded.buffers, self.spec))
            asked.append(lambda: extras.busy_fields(candidate, problem, loaded.buffers, self.spec))
        if options.counters:
            asked.append(lambda: extras.counter_fields(candidate, problem, index, options.cache))
        for measure in asked if candidate.row["status"] != "incorrect" else ():
            try:
                candidate.row |= measure()
            except GpuLostError:
                raise
            except UserError as error:
                candidate.warnings.append(str(error))
            except Exception as error:
                # The latency is there. An error of the GPU itself is sticky: then this raises.
                torch.cuda.synchronize()
                said = str(error).partition("\n")[0]
                candidate.warnings.append(
                    f"part of what was asked is missing ({type(error).__name__}: {said})"
                )

    def _sustained_fields(
        self, problem: AttentionProblem, candidate: Candidate, replay: Replay
    ) -> Outcome:
        assert self._loaded is not None
        reading = self._sustained(replay)
        trouble = sorted({*(reading.throttle_reasons or ())} & fields.TROUBLE)
        if trouble:
            candidate.warnings.append(
                f"clocks were lowered in the sustained window ({', '.join(trouble)})"
            )
        candidate.warnings += reading.warnings
        if self.options.energy and self._nvml is None:
            candidate.warnings.append(
                "NVML cannot be used here, so there is no energy: run `leanbench doctor`"
            )
        elif self.options.energy and self._loaded.floor_reading is None:
            launches = self._floor.launches(self._loaded.buffers, problem.kv_bytes)
            self._loaded.floor_reading = self._sustained(
                Replay(launches, self.options.effort.sample_ms)
            )
        floor = self._loaded.floor_reading
        candidate.warnings += [
            f"read floor: {warning}" for warning in (floor.warnings if floor else ())
        ]
        return row_fields(reading, self._calibration, self._loaded.floor_reading)

    def _sustained(self, replay: Replay) -> SustainedReading:
        from leanbench.measure.energy import measure_sustained

        nvml = self._nvml if self.options.energy else None
        return measure_sustained(
            replay.graph.replay, replay.launches, nvml, self._calibration, self.options.window_s
        )

    def _refuse_changed_inputs(self, name: str) -> None:
        """Raises Alarm if Q, K, V or the lengths of the first buffer are not what they were."""
        assert self._loaded is not None
        before, now = self._loaded.fingerprint, fingerprint(self._loaded.buffers[0])
        if all(bool((one == other).all()) for one, other in zip(before, now, strict=True)):
            return
        self._loaded = None
        raise Alarm(f"{name} changed its inputs: Q, K, V or the lengths are not what they were")

    def _state(self) -> Any:
        return None if self._nvml is None else self._nvml.state()

    def _choose(
        self, problem: AttentionProblem, kernel: Kernel, configs: str | KernelConfig
    ) -> lookup.Choice:
        choice = lookup.resolve(kernel, problem, self.spec, configs)
        if configs != "best" or choice.config is None:
            return choice
        assert self._loaded is not None
        buffers = self._loaded.buffers

        def prepare(config: KernelConfig) -> Launches:
            return [kernel.prepare(inputs, config) for inputs in buffers]

        candidates = dict.fromkeys([choice.config, *kernel.candidate_configs(problem, self.spec)])
        best, timed = fastest(
            {config: lambda config=config: prepare(config) for config in candidates}
        )
        return lookup.Choice(
            best, f"best of {timed}", f"the fastest of {timed} that were timed in this cell"
        )


def _unable(kernel: Kernel, problem: AttentionProblem) -> str | None:
    if not kernel.is_timed:
        return (
            f"{kernel.name} is there to check others, it cannot be captured in a CUDA graph and"
            " timed"
        )
    return kernel.unsupported_reason(problem)


def _open_nvml(device: torch.device) -> Nvml | None:
    """NVML for the GPU that torch means, or None where it cannot be had: latency needs no NVML."""
    import torch

    from leanbench.gpu.nvml import Nvml, NvmlError

    try:
        # With or without its prefix: torch names a MIG instance's too.
        return Nvml(str(torch.cuda.get_device_properties(device).uuid)).__enter__()
    except NvmlError:
        return None
