"""Plain attention in fp64, the reference for every other kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from leanbench.core.axes import AXES
from leanbench.core.config import KernelConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs


class Reference(Kernel):
    name = "reference"
    title = "plain attention in fp64 (torch), for correctness, not for speed"
    decomposition = "other"
    source = "definition of softmax attention"
    is_timed = False
    axes = frozenset(AXES) - {"parallel"}
    head_dims = page_sizes = range(1, 2**31)
    max_q_len = 2**31
    guards_lengths = True

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig | None:
        return None

    def prepare(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], None]:
        from leanbench.kernels.reference.torch import attend_all

        return lambda: attend_all(inputs)


KERNELS = (Reference(),)
