"""Timing of a problem's candidates on the GPU, in rounds that drop the slowest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from leanbench.configs.lookup import tuned_kernel
from leanbench.configs.store import TunedConfig
from leanbench.core.errors import DoesNotFit, OutOfMemory, UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs, windows_in_cache
from leanbench.core.problem import AttentionProblem
from leanbench.measure.buffers import refuse_shortage, rotating_inputs
from leanbench.measure.timing import Replay, Sampler, Timing
from leanbench.measure.torch_errors import first_line, is_out_of_memory

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Result:
    """Latencies of some configs on a problem, in microseconds, and the configs that failed."""

    times: dict[TunedConfig, float]
    #: Reasons why configs could not be timed.
    failures: dict[TunedConfig, str]


#: Samples per round, and maximum ratio to the fastest for a candidate to reach the next round.
ROUNDS = ((2, 1.15), (3, 1.04), (8, 1.0))
#: GPU time per sample.
_SAMPLE_MS = 0.4
#: Copies of K and V to rotate over at most. More take longer to prepare than to time.
_MOST_COPIES = 40
#: Share of the free memory for them: a server has little, and needs some.
_MOST_SHARE = 0.25
#: Limit of ||out - the first config's out|| over its norm: each differs from the exact result by a
#: few roundings of the output.
_RELATIVE_LIMIT = {"fp16": 4e-3, "bf16": 2e-2}


def knock_out(
    samplers: Mapping[Key, Sampler], rounds: Sequence[tuple[int, float]] = ROUNDS
) -> dict[Key, Timing]:
    """Time all, with more samples for those that may be the fastest, and for the first.

    A round takes samples in turn, so that drifting clocks affect all candidates equally. A warm-up
    pass is discarded, as in leanbench.measure.timing.run_rounds.
    """
    for sampler in samplers.values():
        sampler.sample_us()
    timings = {key: Timing(sampler.launches) for key, sampler in samplers.items()}
    left = list(samplers)
    first = left[0] if left else None
    for samples, within in rounds:
        for _ in range(samples):
            for key in left:
                timings[key].samples_us.append(samplers[key].sample_us())
        fastest_us = min((timings[key].median_us for key in left), default=0.0)
        left = [
            key for key in left if key == first or timings[key].median_us <= within * fastest_us
        ]
    return timings


class GpuStopwatch:
    """Timing on the GPU with torch's `index`, over rotating buffers with a cold L2."""

    def __init__(self, index: int, spec: GpuSpec) -> None:
        import torch

        self._spec = spec
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)

    def time(self, problem: AttentionProblem, configs: Sequence[TunedConfig]) -> Result:
        """Time configs.

        Each output is compared with that of the first config, which is compared with the fp64
        reference.

        Raises:
            OutOfMemory: The problem does not fit into the GPU's free memory.
        """
        try:
            return self._time(problem, configs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(f"the GPU's memory ran out: {first_line(error)}") from None

    def _time(self, problem: AttentionProblem, configs: Sequence[TunedConfig]) -> Result:
        buffers = self.buffers(problem)
        failures: dict[TunedConfig, str] = {}
        replays: dict[TunedConfig, Replay] = {}
        expected = None
        for config in configs:
            buffers[0].poison()
            try:
                replay = Replay(self.launches(buffers, config), _SAMPLE_MS)
            except Exception as error:
                refused = isinstance(error, DoesNotFit | UserError)
                if not refused and type(error).__name__ != "OutOfResources":
                    raise
                failures[config] = str(error).partition("\n")[0]
                continue
            out = buffers[0].out.double()
            if expected is None:
                expected = self._checked(buffers[0])
            wrong = float((out - expected).norm() / expected.norm())
            if not wrong <= _RELATIVE_LIMIT[problem.dtype]:
                failures[config] = (
                    f"differs from the other configs by {wrong:.1e} of the output's norm"
                )
                continue
            replays[config] = replay
        timings = knock_out(replays)
        return Result({config: timing.median_us for config, timing in timings.items()}, failures)

    def buffers(self, problem: AttentionProblem) -> list[AttentionInputs]:
        """Return inputs for launches to rotate over, in a share of the free memory.

        Raises:
            OutOfMemory: The problem does not fit.
        """
        import torch

        torch.cuda.empty_cache()  # holds the buffers of the problem before
        refuse_shortage(problem, self._device)
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        caches = max(1, int(_MOST_SHARE * free_bytes / problem.kv_allocated_bytes))
        most = min(_MOST_COPIES, caches * windows_in_cache(problem))
        return rotating_inputs(problem, self._device, self._spec, "cold", most)

    def launches(
        self, buffers: Sequence[AttentionInputs], config: TunedConfig
    ) -> list[Callable[[], None]]:
        """Return a launch over each of the buffers."""
        return [tuned_kernel(inputs).prepare(inputs, config) for inputs in buffers]

    def _checked(self, inputs: AttentionInputs) -> Any:
        """Return the current output in fp64, after checking a few heads."""
        from leanbench.check.reference import Reference

        dtype = "fp16" if str(inputs.q.dtype) == "torch.float16" else "bf16"
        failure = Reference(inputs, max_pairs=4).check(inputs).failure(dtype)
        if failure:
            raise UserError(
                f"{tuned_kernel(inputs).name} cannot be tuned here, its output is wrong: {failure}"
            )
        return inputs.out.double()
