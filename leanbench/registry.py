"""What a kernel must say of itself, and how the kernels room is searched.

A family is a folder in `kernels/` (or in a folder of `LEANBENCH_KERNEL_PATH`) whose `__init__.py` lists its kernels in
`KERNELS`. That file must import fast: torch and triton are loaded in `prepare`, not at the top.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from leanbench.decomposition import Schedule
from leanbench.errors import UserError, nearest
from leanbench.gpu.spec import GpuSpec
from leanbench.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.inputs import AttentionInputs
    from leanbench.timeline import CtaTimeline


@dataclass(frozen=True)
class KernelConfig:
    """How a kernel is launched. A field that a kernel does not have is None."""

    #: Context tokens of one LeanTile.
    tile_tokens: int
    num_warps: int
    num_stages: int
    #: stream-K: CTAs launched per SM; the grid is this times the SMs.
    ctas_per_sm: int | None = None
    #: stream-K: a CTA with fewer LeanTiles than this is not worth waking.
    min_tiles_per_cta: int | None = None
    #: stream-K: the grid is rounded down to a multiple of the output tiles, so that no CTA crosses from one to the
    #: next.
    align_grid: bool | None = None
    #: fixed_split: parts of every output tile.
    splits: int | None = None

    def to_dict(self) -> dict[str, int | bool]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class LaunchResources:
    """What one CTA of a compiled GPU kernel takes of its SM."""

    #: The GPU kernel's name.
    launch: str
    #: CTAs of the grid.
    ctas: int
    num_warps: int
    registers_per_thread: int
    shared_bytes: int
    spilled_registers: int


class TracedCall(ABC):
    """One call of a kernel whose GPU kernels were compiled with stamps."""

    @abstractmethod
    def launch(self) -> None:
        """Does what the plain launch does, and stamps."""

    @abstractmethod
    def read(self) -> tuple[CtaTimeline, ...]:
        """Every CTA of the latest launch, after waiting for it; times in microseconds from the first start."""


class Kernel(ABC):
    """One way to compute decode attention."""

    #: The name users type.
    name: str
    #: One line for `leanbench list kernels`.
    title: str
    #: `one_cta_per_tile`, `fixed_split`, `stream_k` or `other`.
    decomposition: str
    #: Paper, or library and version.
    source: str
    #: Whether its launches can be timed: captured in a CUDA graph, without host synchronisation.
    is_timed: bool = True
    #: The kernel name that its kept configs go under; None: it is not tuned. A stream-K kernel, see leanbench.tune.
    tuned_as: str | None = None

    def unsupported_reason(self, problem: AttentionProblem) -> str | None:
        """One sentence why this kernel cannot run the problem, or None."""
        return None

    @abstractmethod
    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig | None:
        """The heuristic: what runs when nobody chose and nothing is kept; None for a kernel without launch settings."""

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        """What `--configs best` tries, the default among them."""
        config = self.default_config(problem, gpu)
        return [] if config is None else [config]

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        """What `leanbench tune` considers for problems of this head_dim, dtype, group size and layout, of any size."""
        return []

    def grid_limit(self, rows: int, head_dim: int, wanted: int) -> int:
        """CTAs that the kernel launches at most where `wanted` were asked for, with `rows` query rows to a partial."""
        return wanted

    def merge_rounds(self, rows: int, head_dim: int, num_warps: int, partials: int) -> int:
        """Rounds of loads, each waiting for the one before, in which one CTA merges `partials` of `rows` query rows."""
        return partials

    def schedule(self, problem: AttentionProblem, config: KernelConfig | None, gpu: GpuSpec) -> Schedule | None:
        """Who does what, for predictions; None where the kernel's inside is unknown."""
        return None

    @abstractmethod
    def prepare(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], Any]:
        """A launch that writes `inputs.out` and `inputs.lse`, without host synchronisation; compiles before it
        returns.
        """

    def resources(self, inputs: AttentionInputs, config: KernelConfig | None) -> tuple[LaunchResources, ...]:
        """What the compiled GPU kernels of a call take, in the order they are launched; empty where that is unknown."""
        return ()

    def prepare_traced(self, inputs: AttentionInputs, config: KernelConfig | None) -> TracedCall | None:
        """The same call in an instrumented build; None where the kernel has none."""
        return None


@cache
def kernels() -> dict[str, Kernel]:
    """Every kernel found, by name, in a stable order."""
    room = importlib.import_module("leanbench.kernels")
    found: dict[str, Kernel] = {}
    for module in sorted(pkgutil.iter_modules(room.__path__), key=lambda module: module.name):
        if not module.ispkg:
            continue
        family = importlib.import_module(f"leanbench.kernels.{module.name}")
        for kernel in getattr(family, "KERNELS", ()):
            if kernel.name in found:
                raise UserError(f"two kernels are called {kernel.name!r}: rename one of them")
            found[kernel.name] = kernel
    return found


def kernel(name: str) -> Kernel:
    """The kernel of that name.

    Raises:
        UserError: there is none; the nearest name is suggested.
    """
    found = kernels()
    if name not in found:
        raise UserError(f"there is no kernel {name!r}, {nearest(name, found)}")
    return found[name]
