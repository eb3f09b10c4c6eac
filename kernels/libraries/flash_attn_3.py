"""FlashAttention-3 for Hopper (Shah et al., 2024, arXiv 2407.08608): decoding over a KV cache, with
its heuristics and with the fastest of its options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.flash_attn_3_builds import LIBRARY_PATH, Build, Call, find_build
from leanbench.kernels.libraries.library import MAX_PROMPT, LibraryKernel

from leanbench.core.config import KernelConfig, optional_number, switch
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import FP8, OwnOutputs
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs

#: Waves of CTAs for which split counts are tried.
_WAVES = (0.5, 1, 2, 4)
_MOST_SPLITS = 128


@dataclass(frozen=True)
class FlashAttn3Config(KernelConfig):
    """Options of FlashAttention-3 available to a caller."""

    #: Pack the query heads of a group into the rows of a tile.
    pack_gqa: bool = switch()
    #: Maximum splits per output tile; 0: the library's heuristic.
    splits: int = optional_number(1, _MOST_SPLITS, unused=0)


class FlashAttn3(LibraryKernel):
    """FlashAttention-3 with its split heuristic and packed query heads, as in servers."""

    name = "flash_attn_3"
    title = "FlashAttention-3 over a KV cache, for Hopper; a heuristic splits the context"
    decomposition = "fixed_split"
    source = "Shah et al. 2024, arXiv 2407.08608; flash_attn_3 or vLLM's build of it"
    distribution = "flash_attn_3"
    written_for = "flash_attn_3 3.0 and vllm 0.22"
    fits_whole_models = True
    head_dims = range(8, 257, 8)
    max_q_len = MAX_PROMPT
    axes = LibraryKernel.axes | {
        *("q_len", "page_size", "lengths", "lengths_on", "q_lens", "causal", "v_head_dim"),
        *("window_left", "window_right", "softcap", "sinks", "leftpad", "batch_idx"),
        *("append", "rotary_dim", "rotary_interleaved", "kv_dtype", "q_dtype", "scaled"),
    }
    config_types = (FlashAttn3Config,)

    def unavailable_reason(self) -> str | None:
        try:
            build = find_build()
        except UserError as error:
            return str(error)
        if build is not None:
            return None
        return (
            f"{self.name} is not installed here (no module flash_attn_interface or vllm): pip"
            f" install vllm, or set {LIBRARY_PATH} to _vllm_fa3_C.abi3.so of a vLLM wheel"
        )

    def library(self) -> str:
        return _build().version

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.kv_dtype not in (SAME, "e4m3"):
            return (
                f"{self.name} takes fp8 as e4m3, this problem has {problem.kv_dtype}: choose e4m3"
            )
        if problem.kv_dtype != SAME and problem.dtype != "bf16":
            return f"{self.name} writes bf16 with fp8 caches, dtype is {problem.dtype}: choose bf16"
        if problem.v_head_dim is not None and (problem.head_dim, problem.v_head_dim) != (192, 128):
            return (
                f"{self.name} takes V of another head_dim than K at 192 and 128 alone, this problem"
                f" has {problem.head_dim} and {problem.v_head_dim}: leave v_head_dim out"
            )
        if (reason := super().refusal(problem)) is not None:
            return reason
        if (lacking := _build().refusal(problem)) is not None:
            return f"{self.name} {lacking}"
        return None

    def precision(self, problem: AttentionProblem) -> str:
        """Return FP8 for fp8 caches: Q and softmax weights are rounded to their dtype."""
        return problem.dtype if problem.kv_dtype == SAME else FP8

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> FlashAttn3Config:
        return FlashAttn3Config(pack_gqa=problem.group_size > 1)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[FlashAttn3Config]:
        """Return packed and unpacked groups, each with several split counts.

        They are the heuristic's, and those that make half a wave to four waves of CTAs.
        """
        tiles = problem.batch * problem.kv_heads
        counts = {1, *(int(gpu.sms * waves / tiles) for waves in _WAVES)}
        splits = [0, *sorted(count for count in counts if 1 <= count <= _MOST_SPLITS)]
        packed = (True, False) if problem.group_size > 1 else (False,)
        return [FlashAttn3Config(pack, count) for pack in packed for count in splits]

    def launches(
        self, copies: Sequence[AttentionInputs], config: FlashAttn3Config
    ) -> list[FlashAttn3Launch]:
        """Return a launch per copy.

        The schedule is computed once if the build supports it, as servers do for all layers of a
        step. Each launch has a copy of the schedule and its lengths, so that a cold L2 reads both
        from memory.
        """
        work_out = self.planner(copies[0], config)
        if work_out is None:
            return [FlashAttn3Launch(inputs, config, None) for inputs in copies]
        schedule = work_out()
        return [FlashAttn3Launch(inputs, config, schedule.clone()) for inputs in copies]

    def prepare_planned(
        self, inputs: AttentionInputs, config: FlashAttn3Config, plan: torch.Tensor | None
    ) -> FlashAttn3Launch:
        return FlashAttn3Launch(inputs, config, plan)

    def planner(
        self, inputs: AttentionInputs, config: FlashAttn3Config
    ) -> Callable[[], Any] | None:
        return _build().schedule(Call.of(inputs, config.pack_gqa, config.splits))


class FlashAttn3Best(FlashAttn3):
    name = "flash_attn_3_best"
    title = (
        "FlashAttention-3 with the fastest of packed heads or not and of split counts, timed in"
        " every cell"
    )
    config_choice = "best"


class FlashAttn3Launch(OwnOutputs):
    """A call with a precomputed `schedule`, unless it is None."""

    def __init__(
        self, inputs: AttentionInputs, config: FlashAttn3Config, schedule: torch.Tensor | None
    ) -> None:
        super().__init__(inputs)
        call = Call.of(inputs, config.pack_gqa, config.splits)
        self._attend = _build().attend(call, schedule)

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._attend()
        return out, lse


def _build() -> Build:
    """Return the build that runs on this machine; raise ImportError if there is none."""
    if (build := find_build()) is None:
        raise ImportError("no module flash_attn_interface or vllm")
    return build
