"""Baselines for GPUs that share a KV cache: attend, exchange through a collective, merge.

`lean` exchanges and merges in its own launch. Each baseline attends to its shard with `lean` and
the same settings, so only the exchange differs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from leanbench.kernels.lean import LEAN
from leanbench.kernels.lean.configs import LEAN_CONFIGS
from leanbench.kernels.libraries.library import installed_version

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.kernels.lean.configs import LeanConfig

    from leanbench.core.inputs import AttentionInputs

#: Install command for FlashInfer's exchange and its dependencies.
INSTALL = "pip install flashinfer-python==0.6.13 apache-tvm-ffi cuda-tile cuda-bindings"


class Exchanging(Kernel["LeanConfig"]):
    """Attention over this GPU's shard, followed by launches that exchange and merge."""

    decomposition = "stream_k"
    tuned_as = "lean"
    config_types = LEAN_CONFIGS
    axes = Kernel.axes | {"parallel", "lengths", "lengths_on", "capacity", "page_size"}

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.gpus.context == 1:
            return f"{self.name} merges what GPUs make of shards: give parallel cp:2"
        return None

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanConfig:
        return LEAN.default_config(problem, gpu)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanConfig:
        return LEAN.any_length_config(problem, gpu)

    @abstractmethod
    def prepare(self, inputs: AttentionInputs, config: LeanConfig) -> Callable[[], None]: ...


class NcclAllGather(Exchanging):
    name = "nccl_all_gather"
    title = "lean over each shard, NCCL's all-gather of outputs and LSEs, and a kernel that merges"
    source = "vLLM's decode context parallelism; NCCL of torch"

    def prepare(self, inputs: AttentionInputs, config: LeanConfig) -> Callable[[], None]:
        from leanbench.kernels.distributed.collectives import all_gather

        return all_gather(inputs, config)


class DealingHeads(Exchanging):
    """A kernel after which each GPU has the merged output of its share of the query heads."""

    shares_heads = True

    def refusal(self, problem: AttentionProblem) -> str | None:
        ranks = problem.gpus.context
        heads = problem.q_heads // problem.gpus.tensor
        if heads % ranks:
            return (
                f"{self.name} deals {heads} query heads to {ranks} GPUs: choose heads that divide"
            )
        return super().refusal(problem)


class NcclAllToAll(DealingHeads):
    name = "nccl_all_to_all"
    title = (
        "lean over each shard, NCCL's all-to-all of shares of the heads, and a kernel that merges:"
        " each GPU ends with its share"
    )
    source = "Helix parallelism, arXiv 2507.07120; NCCL of torch"

    def prepare(self, inputs: AttentionInputs, config: LeanConfig) -> Callable[[], None]:
        from leanbench.kernels.distributed.collectives import all_to_all

        return all_to_all(inputs, config)


class FlashInferAllToAll(DealingHeads):
    name = "flashinfer_all_to_all"
    title = (
        "lean over each shard, FlashInfer's all-to-all for decode context parallelism of shares of"
        " the heads, and a kernel that merges: each GPU ends with its share"
    )
    source = "flashinfer.comm.decode_cp_a2a_alltoall, from NVIDIA TensorRT-LLM; flashinfer-python"

    def unavailable_reason(self) -> str | None:
        missing = [name for name in ("flashinfer", "tvm_ffi") if find_spec(name) is None]
        if not missing:
            return None
        return f"{self.name} is not installed here (no module {', '.join(missing)}): {INSTALL}"

    def library(self) -> str:
        return f"flashinfer-python {installed_version('flashinfer-python')}"

    def refusal(self, problem: AttentionProblem) -> str | None:
        return self.unavailable_reason() or super().refusal(problem)

    def prepare(self, inputs: AttentionInputs, config: LeanConfig) -> Callable[[], None]:
        """Prepare the launch; raise UserError if a dependency of flashinfer.comm is missing."""
        from leanbench.kernels.distributed.flash_infer import all_to_all

        try:
            return all_to_all(inputs, config)
        except ImportError as error:
            raise UserError(
                f"{self.name} cannot import flashinfer.comm ({error}): {INSTALL}"
            ) from error


class SymmetricMemory(Exchanging):
    name = "symmetric_memory"
    title = (
        "lean over each shard into memory that all GPUs see, torch's barrier, and a kernel that"
        " merges"
    )
    source = "torch's symmetric memory, one shot, without multicast"

    def prepare(self, inputs: AttentionInputs, config: LeanConfig) -> Callable[[], None]:
        from leanbench.kernels.distributed.collectives import symmetric_memory

        return symmetric_memory(inputs, config)


class TreeAttention(Exchanging):
    name = "tree_attention"
    title = "lean over each shard, all-reduces of the maximum, the numerator and the denominator"
    source = "Shyam et al. 2024, Tree Attention, arXiv 2408.04093; NCCL of torch"

    def prepare(self, inputs: AttentionInputs, config: LeanConfig) -> Callable[[], None]:
        from leanbench.kernels.distributed.collectives import tree_attention

        return tree_attention(inputs, config)


class RingAttention(Exchanging):
    name = "ring_attention"
    title = "K and V passed round: each GPU attends to every shard in turn, and merges"
    source = "Liu et al. 2023, Ring Attention, arXiv 2310.01889; NCCL of torch"
    axes = Kernel.axes | {"parallel"}

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.max_context % problem.gpus.context:
            return (
                f"ring_attention passes shards of one size round, {problem.max_context} tokens do"
                f" not divide by {problem.gpus.context}: choose a context that does"
            )
        return super().refusal(problem)

    def prepare(self, inputs: AttentionInputs, config: LeanConfig) -> Callable[[], None]:
        from leanbench.kernels.distributed.ring import ring_attention

        return ring_attention(inputs, config)


KERNELS = (
    NcclAllGather(),
    NcclAllToAll(),
    FlashInferAllToAll(),
    SymmetricMemory(),
    TreeAttention(),
    RingAttention(),
)
