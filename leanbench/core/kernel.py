"""Kernel interface."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from leanbench.core.axes import AXES, LENGTHS
from leanbench.core.axis import Axis, Switch
from leanbench.core.config import KernelConfig, read_config
from leanbench.core.decomposition import Schedule
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.llm.model import WholeModel
from leanbench.core.parallel import NONE
from leanbench.core.problem import HEAD_DIMS, MAX_Q_LEN, PAGE_SIZES, AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs
    from leanbench.core.timeline import CtaTimeline


#: Precision of a kernel that rounds Q and softmax weights to fp8.
FP8 = "fp8"
#: Suffix of the precision of a kernel that also rounds scores to the dtype.
ROUNDED_SCORES = " scores"
#: `Kernel.config_choice` of a kernel that always runs with its `batch_invariant_config`.
BATCH_INVARIANT = "batch_invariant"


@dataclass(frozen=True)
class LaunchResources:
    """Resources of one CTA of a compiled GPU kernel."""

    #: Name of the GPU kernel.
    launch: str
    #: CTAs of the grid.
    ctas: int
    num_warps: int
    registers_per_thread: int
    shared_bytes: int
    spilled_registers: int


class TracedCall(ABC):
    """One call of a kernel compiled with timeline events."""

    @abstractmethod
    def launch(self) -> None:
        """Launch like the plain call, and record events."""

    @abstractmethod
    def read(self) -> tuple[CtaTimeline, ...]:
        """Wait for the latest launch. Return every CTA, in microseconds from the first start."""


class OwnOutputs(ABC):
    """Launch of a library that allocates its outputs in every call.

    A copy to `inputs.out` would be a GPU kernel that is not the library's. Read or poison outputs
    through `written_by`.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        #: Inputs with the outputs of the latest call, which they keep alive until the next one.
        #: After a capture, these are the tensors that the graph writes.
        self.results = inputs

    def __call__(self) -> None:
        out, lse = self.compute()
        self.results = replace(self.results, out=out, lse=lse)

    @abstractmethod
    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and LSE, shaped as in `AttentionInputs`."""


def written_by(launch: Callable[[], Any], inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with the outputs that the latest call of `launch` wrote."""
    return launch.results if isinstance(launch, OwnOutputs) else inputs


def caller(launch: Callable[[], Any]) -> Callable[[], Any]:
    """Return the call behind a launch, which keeps no outputs for a check."""
    return launch.compute if isinstance(launch, OwnOutputs) else launch


#: Launch settings of a kernel; None without any.
ConfigT = TypeVar("ConfigT", bound="KernelConfig | None")


class Kernel(ABC, Generic[ConfigT]):
    """One way to compute decode attention."""

    #: Name in flags.
    name: str
    #: One line for `leanbench list kernels`.
    title: str
    #: `one_cta_per_tile`, `fixed_split`, `stream_k` or `other`.
    decomposition: str
    #: Paper, or library and version.
    source: str
    #: True for third-party kernels used as baselines.
    is_peer: bool = False
    #: True if its launches can be captured in a CUDA graph, without host synchronisation.
    is_timed: bool = True
    #: Kernel name of its tuned configs (stream-K, see leanbench.tune); None if it is not tuned.
    tuned_as: str | None = None
    #: Classes of its launch settings, one per implementation.
    config_types: tuple[type[KernelConfig], ...] = ()
    #: Replaces `--configs`: `best` or `BATCH_INVARIANT`; None for the flag.
    config_choice: str | None = None
    #: True if it is measured through `leanbench.lean_attn_with_kvcache`.
    is_api: bool = False
    #: True if GPUs that share sequences end with a share of the query heads each.
    shares_heads: bool = False
    #: Base of the logarithm in the LSE; None for a kernel without LSE.
    lse_base: float | None = math.e
    #: True if lengths on the device are clamped to the cache, and nothing past a sequence's end,
    #: not even NaN, reaches its outputs. `leanbench check` tests it.
    guards_lengths: bool = False
    #: True if a launch over new tensors can be prepared during the capture of a CUDA graph: by
    #: `prepare`, or by `prepare_planned` for a library or with a plan.
    fits_whole_models: bool = False
    #: True for attention that only a model's own code calls.
    only_in_whole_models: bool = False
    #: Axes with values off the default that it supports; `lengths` for ragged batches. Problems off
    #: the default of another axis are unsupported, so a later axis is never ignored.
    axes: frozenset[str] = frozenset({"dtype", "kv_layout"})
    #: Supported sizes: containers of int. Any, because some kernels declare tuples, and the type of
    #: a variable cannot be narrowed.
    head_dims: Any = HEAD_DIMS
    page_sizes: Any = PAGE_SIZES
    max_q_len: int = MAX_Q_LEN

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "unsupported_reason" in vars(cls):
            raise TypeError(
                f"{cls.__name__}.unsupported_reason would hide the check of axes: name it refusal"
            )

    def unavailable_reason(self) -> str | None:
        """Return a sentence if the kernel cannot run here, whatever the problem, or None. No heavy
        import.
        """
        return None

    def library(self) -> str | None:
        """Return package and version of the code, if the kernel is available; None for this
        project's own.
        """
        return None

    @final
    def unsupported_reason(self, problem: AttentionProblem) -> str | None:
        """Return a sentence if the kernel does not support the problem, or None.

        A whole model is supported if the attention of every layer is.
        """
        if problem.model is not None:
            return self._whole_model_refusal(problem, problem.model)
        if self.only_in_whole_models:
            return f"{self.name} is the attention of whole models alone: run `leanbench decode`"
        return self._call_refusal(problem)

    def _whole_model_refusal(self, problem: AttentionProblem, model: WholeModel) -> str | None:
        if not self.fits_whole_models:
            return (
                f"{self.name} cannot be captured with new tensors in every layer of a whole model:"
                " choose among lean, fa2, fixed_split, flash_attn_3, torch_flash_no_split, sdpa,"
                " eager and no_attention"
            )
        if problem.parallel != NONE:
            return f"whole models run on one GPU, this is for {problem.parallel}: leave it out"
        if problem.max_context > model.max_positions:
            return (
                f"{problem.max_context} tokens are above the {model.max_positions} positions of"
                f" {model.name}: choose a shorter context, or --positions {problem.max_context}"
                " for more of them than it was trained with"
            )
        layers = map(problem.layer_problem, model.layer_kinds)
        return next(filter(None, map(self._call_refusal, layers)), None)

    def _call_refusal(self, problem: AttentionProblem) -> str | None:
        if problem.parallel != NONE and problem.gpus.context == 1:
            # Each GPU runs it on its own heads.
            return self._call_refusal(problem.shard(0))
        return self.shape_refusal(problem) or self.refusal(problem)

    def shape_refusal(self, problem: AttentionProblem) -> str | None:
        """Return a sentence if the kernel does not support an axis or a size of a call, installed
        here or not, or None.
        """
        # Shared pages are like any others, but to the API, which reads them apart.
        takes_shared = "page_size" in self.axes and not self.is_api
        axes = self.axes | ({"shared_prefix"} if takes_shared else set())
        for name in problem.special:
            if name not in axes:
                return f"{self.name} {_beyond(AXES[name], problem)}"
        return self._size_refusal(problem)

    def _size_refusal(self, problem: AttentionProblem) -> str | None:
        size, choices = "", ""
        if problem.head_dim not in self.head_dims:
            size, choices = f"head_dim {problem.head_dim}", size_choices(self.head_dims)
        elif problem.page_size is not None and problem.page_size not in self.page_sizes:
            size = f"page_size {problem.page_size}"
            choices = f"{size_choices(self.page_sizes)}, or no pages"
        elif problem.q_len > self.max_q_len:
            size, choices = f"q_len {problem.q_len}", f"at most {self.max_q_len}"
        return f"{self.name} does not take {size}: choose {choices}" if size else None

    def refusal(self, problem: AttentionProblem) -> str | None:
        """Return a sentence if the kernel does not support a combination of values in `axes`, or
        None.
        """
        return None

    def precision(self, problem: AttentionProblem) -> str:
        """Return `fp16`, `bf16` or `FP8`: the rounding of Q and softmax weights, by which errors
        are judged.

        With `ROUNDED_SCORES`, scores are rounded too.
        """
        return problem.dtype

    @property
    def implementation(self) -> str | None:
        """`triton` or `cuda`; None if there is only one, or the kernel stands for all."""
        return self.config_types[0].implementation if len(self.config_types) == 1 else None

    def read_config(self, values: Mapping[str, Any]) -> KernelConfig:
        """Build the launch settings of a `to_dict`.

        Raises:
            UserError: The settings are not this kernel's.
        """
        if not self.config_types:
            raise UserError(f"{self.name} has no launch settings")
        return read_config(self.config_types, values)

    @abstractmethod
    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> ConfigT:
        """Return the heuristic's launch settings, for untuned problems; None for a kernel without
        any.

        With lengths on the device they are those of `any_length_config`.
        """

    def default_configs(
        self, problem: AttentionProblem, gpu: GpuSpec
    ) -> Callable[[int, int], ConfigT]:
        """Return a function with the `default_config` of each batch and context of a problem."""

        def config(batch: int, context: int) -> ConfigT:
            if (batch, context) == (problem.batch, problem.context):
                return self.default_config(problem, gpu)
            q_lens = None if problem.q_lens is None else (problem.q_len,) * batch
            sized = replace(problem, batch=batch, context=context, q_lens=q_lens)
            return self.default_config(sized, gpu)

        return config

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> ConfigT:
        """Return the heuristic for lengths on the device, good for every length up to
        `max_context`, the capacity of the cache.
        """
        return self.default_config(problem, gpu)

    def batch_invariant_config(self, problem: AttentionProblem, gpu: GpuSpec) -> ConfigT | None:
        """Return settings whose output bits do not depend on the other sequences or the GPU's SMs,
        or None.

        They are equal for all problems of a head_dim, dtype, group size and q_len.
        """
        return None

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[ConfigT]:
        """Return the candidates of `--configs best`: the default, and those of `leanbench tune`."""
        configs = dict.fromkeys(
            [self.default_config(problem, gpu), *self.tuning_space(problem, gpu)]
        )
        return [config for config in configs if config is not None]

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[ConfigT]:
        """Return the candidates of `leanbench tune`, those expected to be fastest first if a model
        ranks them.
        """
        return []

    def implementation_of(self, config: ConfigT) -> Kernel[Any]:
        """Return the kernel that launches `config`, if this one stands for several
        implementations.
        """
        return self

    def implementation_on(self, gpu: GpuSpec) -> Kernel[Any]:
        """Return the kernel that the heuristic launches on a GPU, if this one stands for several
        implementations.
        """
        return self

    def compile(
        self, problem: AttentionProblem, config: ConfigT, capability: tuple[int, int]
    ) -> tuple[LaunchResources, ...]:
        """Compile for a compute capability, with or without such a GPU. Return the resources of a
        CTA of each GPU kernel, in launch order.

        Raises:
            TypeError: The kernel has nothing to compile.
        """
        raise TypeError(f"{self.name} has nothing to compile")

    def takes(self, config: KernelConfig) -> bool:
        """Return True for a config of this kernel."""
        return isinstance(config, self.config_types)

    def schedule(self, problem: AttentionProblem, config: ConfigT, gpu: GpuSpec) -> Schedule | None:
        """Return the schedule for predictions; None if it is unknown."""
        return None

    @abstractmethod
    def prepare(self, inputs: AttentionInputs, config: ConfigT) -> Callable[[], Any]:
        """Compile, and return a launch that writes `inputs.out` and `inputs.lse`, or is an
        `OwnOutputs`.

        The launch does not synchronize with the host.
        """

    def prepare_all(
        self, copies: Sequence[AttentionInputs], config: ConfigT
    ) -> list[Callable[[], Any]]:
        """Prepare a launch over each copy of a call.

        Copies have equal shapes, strides and lengths at other addresses. Work that depends only on
        those can be shared.
        """
        return [self.prepare(inputs, config) for inputs in copies]

    def planner(self, inputs: AttentionInputs, config: ConfigT) -> Callable[[], Any] | None:
        """Return a call that plans a step for its lengths, timed apart from the launch; None
        without plan.
        """
        return None

    def prepare_planned(
        self, inputs: AttentionInputs, config: ConfigT, plan: Any
    ) -> Callable[[], Any]:
        """Return a launch as of `prepare`, with the plan of a call with equal shapes and lengths.

        Raises:
            TypeError: The kernel needs its own plan.
        """
        raise TypeError(f"{self.name} plans every call by itself")

    def resources(self, inputs: AttentionInputs, config: ConfigT) -> tuple[LaunchResources, ...]:
        """Return the resources of the GPU kernels of a call, in launch order; empty if unknown."""
        return ()

    def prepare_traced(self, inputs: AttentionInputs, config: ConfigT) -> TracedCall | None:
        """Return the same call in an instrumented build; None if there is none."""
        return None


def size_choices(sizes: Container[int]) -> str:
    """Format sizes: ``one of 64, 128``, ``from 8 to 256 in steps of 8``."""
    if isinstance(sizes, range):
        step = f" in steps of {sizes.step}" if sizes.step > 1 else ""
        return f"from {sizes[0]} to {sizes[-1]}{step}"
    return f"one of {', '.join(map(str, sizes))}" if isinstance(sizes, Iterable) else "another"


def _beyond(axis: Axis, problem: AttentionProblem) -> str:
    """Describe the limit of a kernel without `axis`, the value of the problem, and the fix."""
    does = axis.refusal or f"takes no {axis.name}"
    if axis is LENGTHS:
        return f"{does}, all sequences must have the same context"
    value = axis.write(getattr(problem, axis.name))
    # The words of a switch contain its name: not "sinks sinks".
    text = value if isinstance(axis.values, Switch) else f"{axis.name} {value}"
    return f"{does}, this problem has {text}: leave it out"
