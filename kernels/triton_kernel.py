"""Base of registry kernels written in Triton, defined by their launches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from leanbench.kernels.launch import TritonLaunch, run_all

from leanbench.compile.triton_target import triton_target
from leanbench.core.config import TileConfig
from leanbench.core.kernel import Kernel, LaunchResources, TracedCall
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs

ConfigT = TypeVar("ConfigT", bound=TileConfig)


class TritonKernel(Kernel[ConfigT]):
    """A Triton kernel, defined by its launches."""

    axes = Kernel.axes | {"q_len", "page_size", "capacity", "lengths", "lengths_on", "select"}
    guards_lengths = True
    fits_whole_models = True

    @abstractmethod
    def launches(self, inputs: AttentionInputs, config: ConfigT) -> tuple[TritonLaunch, ...]:
        """Return the launches of one call, in order."""

    def compile(
        self, problem: AttentionProblem, config: ConfigT, capability: tuple[int, int]
    ) -> tuple[LaunchResources, ...]:
        from leanbench.core.inputs import shape_only

        with triton_target(capability):
            launches = self.launches(shape_only(problem), config)
            return tuple(launch.compile() for launch in launches)

    def most_events(
        self, inputs: AttentionInputs, config: ConfigT, launches: Sequence[TritonLaunch]
    ) -> int:
        """Return the maximum events of a CTA in traced launches; see leanbench.kernels.events."""
        return 2

    def prepare(self, inputs: AttentionInputs, config: ConfigT) -> Callable[[], None]:
        return run_all(self.launches(inputs, config))

    def resources(self, inputs: AttentionInputs, config: ConfigT) -> tuple[LaunchResources, ...]:
        taken = [launch.resources() for launch in self.launches(inputs, config)]
        return tuple(resources for resources in taken if resources is not None)

    def prepare_traced(self, inputs: AttentionInputs, config: ConfigT) -> TracedCall:
        from leanbench.kernels.traced import TracedLaunches

        launches = self.launches(inputs, config)
        max_events = self.most_events(inputs, config, launches)
        return TracedLaunches(launches, max_events, inputs.q.device)
