"""One problem on the GPU, as all kernels of a comparison meet it."""

from __future__ import annotations

import gc
from types import TracebackType

from leanbench.check.reference import CELL_PAIRS, Reference
from leanbench.core.errors import SuspectResult
from leanbench.core.problem import AttentionProblem
from leanbench.measure.buffers import free_memory, refuse_shortage, rotating_inputs
from leanbench.measure.energy_meter import SustainedReading
from leanbench.measure.instruments import Instruments
from leanbench.measure.read_floor import fingerprint


class LoadedProblem:
    """Inputs that launches rotate over, the fp64 reference of the first, and what tells whether a
    kernel changed them. Leaving the context gives the inputs up.

    Raises:
        OutOfMemory: the inputs and their check do not fit into the GPU's free memory.
    """

    def __init__(self, problem: AttentionProblem, instruments: Instruments) -> None:
        # Objects that refer to each other, and what these hold, would pile up.
        gc.collect()
        spec, device = instruments.spec, instruments.device
        free_memory(spec)
        refuse_shortage(problem, device)
        self.problem = problem
        self.instruments = instruments
        self.buffers = rotating_inputs(problem, device, spec, instruments.options.cache)
        self.reference = Reference(self.buffers[0], max_pairs=CELL_PAIRS)
        #: Sustained reading of the read floor, once a kernel's energy was measured.
        self.floor_reading: SustainedReading | None = None
        self._fingerprint = fingerprint(self.buffers[0])

    def __enter__(self) -> LoadedProblem:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.buffers.clear()

    def refuse_changed_inputs(self, names: str) -> None:
        """Looks whether the first buffer still holds what it held.

        Args:
            names: of the kernels that ran since the last look.

        Raises:
            SuspectResult: it does not.
        """
        after = fingerprint(self.buffers[0])
        pairs = zip(self._fingerprint, after, strict=True)
        if not all(bool((was == is_now).all()) for was, is_now in pairs):
            raise SuspectResult(
                f"{names} changed its inputs: Q, K, V or the lengths are not what they were"
            )
