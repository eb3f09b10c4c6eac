"""Sources of FlashAttention-3: the package built from source (`flash_attn_interface`), or the
shared object in vLLM's wheels, which needs no build.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries import library as libraries
from leanbench.kernels.libraries.library import installed_version, lengths

from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs

#: Variable with a path of the shared object, overriding an installed vLLM.
LIBRARY_PATH = "LEANBENCH_FA3_LIBRARY"
_PACKAGE = "flash_attn_interface"
_OBJECT = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
#: Neutral values of arguments that a call does not use. Arguments of optional types take None.
_NEUTRAL = {
    "is_rotary_interleaved": True,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}

#: Output and LSE, with any further results of the library.
Results = tuple["torch.Tensor", ...]


@dataclass(frozen=True)
class Call:
    """One call of FlashAttention-3: tensors and options."""

    inputs: AttentionInputs
    #: `inputs.q`, or rounded to the caches' fp8: the library takes Q and the caches in one dtype.
    q: torch.Tensor
    #: (batch,), int32: lengths before the call, as `inputs.cache_seqlens`.
    lengths: torch.Tensor
    pack_gqa: bool
    #: Maximum splits per output tile; 0: a heuristic.
    splits: int

    @classmethod
    def of(cls, inputs: AttentionInputs, pack_gqa: bool, splits: int) -> Call:
        return cls(inputs, inputs.q.to(inputs.k_cache.dtype), lengths(inputs), pack_gqa, splits)

    @property
    def causal(self) -> bool:
        """Return whether a causal mask is needed.

        A single query token needs it only for the end of its window.
        """
        return self.inputs.causal and (self.inputs.q_len > 1 or self.inputs.window_left >= 0)

    @property
    def window(self) -> tuple[int, int]:
        return self.inputs.window_left, self.inputs.window_right

    @property
    def capacity(self) -> int:
        """Return the maximum length of a sequence.

        The library does not read the longest from the device.
        """
        table = self.inputs.block_table
        return self.inputs.k_cache.shape[1] * (1 if table is None else table.shape[1])


class Build(ABC):
    @property
    @abstractmethod
    def version(self) -> str:
        """Return package and version, or the file's digest."""

    def refusal(self, problem: AttentionProblem) -> str | None:
        """Return which of the problem's features this build lacks, or None: ``has no sinks``."""
        return None

    @abstractmethod
    def schedule(self, call: Call) -> Callable[[], torch.Tensor] | None:
        """Return the schedule for the call's lengths, or None if this build cannot precompute it.

        Servers compute it once for all layers of a step.
        """

    @abstractmethod
    def attend(self, call: Call, schedule: torch.Tensor | None) -> Callable[[], Results]:
        """Run attention without copies."""


class SourcePackage(Build):
    """The package built by `hopper/setup.py` of flash-attention."""

    @property
    def version(self) -> str:
        return f"flash_attn_3 {installed_version('flash_attn_3')}"

    def refusal(self, problem: AttentionProblem) -> str | None:
        return "has no sinks in the package flash_attn_3: leave them out" if problem.sinks else None

    def schedule(self, call: Call) -> Callable[[], torch.Tensor] | None:
        import flash_attn_interface as library

        if not hasattr(library, "get_scheduler_metadata"):
            return None
        inputs = call.inputs
        return partial(
            library.get_scheduler_metadata,
            inputs.batch,
            inputs.q_len,
            call.capacity,
            inputs.q_heads,
            inputs.kv_heads,
            inputs.head_dim,
            headdim_v=inputs.value_dim,
            qkv_dtype=call.q.dtype,
            page_size=inputs.page_size,
            max_seqlen_k_new=inputs.new_tokens,
            has_softcap=inputs.softcap > 0,
            **self._shared(call),
        )

    def attend(self, call: Call, schedule: torch.Tensor | None) -> Callable[[], Results]:
        import flash_attn_interface as library

        inputs = call.inputs
        return partial(
            library.flash_attn_with_kvcache,
            call.q,
            inputs.k_cache,
            inputs.v_cache,
            k=inputs.k_new,
            v=inputs.v_new,
            rotary_cos=inputs.rotary_cos,
            rotary_sin=inputs.rotary_sin,
            rotary_interleaved=inputs.rotary_interleaved,
            cache_batch_idx=inputs.cache_batch_idx,
            page_table=inputs.block_table,
            max_seqlen_q=inputs.max_seqlen_q,
            q_descale=inputs.q_descale,
            k_descale=inputs.k_descale,
            v_descale=inputs.v_descale,
            softmax_scale=inputs.softmax_scale,
            softcap=inputs.softcap,
            scheduler_metadata=schedule,
            return_softmax_lse=True,
            **self._shared(call),
        )

    def _shared(self, call: Call) -> dict[str, Any]:
        """Return the arguments common to both functions."""
        return {
            "cache_seqlens": call.lengths,
            "cache_leftpad": call.inputs.cache_leftpad,
            "cu_seqlens_q": call.inputs.cu_seqlens_q,
            "causal": call.causal,
            "window_size": call.window,
            "pack_gqa": call.pack_gqa,
            "num_splits": call.splits,
        }


@dataclass(frozen=True)
class SharedObject(Build):
    """`_vllm_fa3_C.abi3.so`: torch loads its functions as operators."""

    path: Path
    #: Distribution that contains it; empty for a separate file, identified by its digest.
    package: str = ""

    @property
    def version(self) -> str:
        return self.package or f"{self.path.name} sha256 {_digest(self.path)}"

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.append:
            return "appends nothing in vLLM's build: leave append out"
        if problem.sinks and problem.dtype != "bf16":
            return f"takes sinks in bf16, this problem has {problem.dtype}: choose dtype bf16"
        return None

    def schedule(self, call: Call) -> Callable[[], torch.Tensor]:
        inputs = call.inputs
        return _bound(
            self._operators().get_scheduler_metadata,
            batch_size=inputs.batch,
            num_heads=inputs.q_heads,
            num_heads_k=inputs.kv_heads,
            headdim=inputs.head_dim,
            headdim_v=inputs.value_dim,
            qkv_dtype=call.q.dtype,
            page_size=inputs.page_size,
            max_seqlen_k_new=0,
            has_softcap=inputs.softcap > 0,
            **self._shared(call),
        )

    def attend(self, call: Call, schedule: torch.Tensor | None) -> Callable[[], Results]:
        inputs = call.inputs
        return _bound(
            self._operators().fwd,
            q=call.q,
            k=inputs.k_cache,
            v=inputs.v_cache,
            kv_batch_idx=inputs.cache_batch_idx,
            page_table=inputs.block_table,
            q_descale=inputs.q_descale,
            k_descale=inputs.k_descale,
            v_descale=inputs.v_descale,
            softmax_scale=inputs.softmax_scale,
            softcap=inputs.softcap,
            scheduler_metadata=schedule,
            s_aux=inputs.sinks,
            **self._shared(call),
        )

    def _shared(self, call: Call) -> dict[str, Any]:
        """Return the arguments common to both functions."""
        left, right = call.window
        return {
            "max_seqlen_q": call.inputs.q_len,
            "max_seqlen_k": call.capacity,
            "seqused_k": call.lengths,
            "leftpad_k": call.inputs.cache_leftpad,
            "cu_seqlens_q": call.inputs.cu_seqlens_q,
            "is_causal": call.causal,
            "window_size_left": left,
            "window_size_right": right,
            "num_splits": call.splits,
            "pack_gqa": call.pack_gqa,
        }

    def _operators(self) -> Any:
        import torch

        _load(self.path)
        return torch.ops._vllm_fa3_C


def find_build() -> Build | None:
    """Return the build to run: of the named path, else the package, else vLLM's, else None.

    Nothing is imported.

    Raises:
        UserError: the named path is no file.
    """
    if named := os.environ.get(LIBRARY_PATH):
        if not Path(named).is_file():
            raise UserError(
                f"{LIBRARY_PATH} is {named}, which is no file: give the path of {_OBJECT} of a vLLM"
                " wheel"
            )
        return SharedObject(Path(named))
    if libraries.find_spec(_PACKAGE) is not None:
        return SourcePackage()
    vllm = libraries.find_spec("vllm")
    folders = (vllm and vllm.submodule_search_locations) or ()
    objects = [path for folder in folders if (path := Path(folder, _OBJECT)).is_file()]
    return SharedObject(objects[0], f"vllm {installed_version('vllm')}") if objects else None


def _bound(operator: Any, **arguments: Any) -> partial[Any]:
    """Return a call of a torch operator without defaults, with arguments by name.

    Schemas differ between versions.

    Raises:
        TypeError: the schema lacks an argument, or has one without a neutral value.
    """
    overload = operator.default
    is_optional = _arguments(overload)
    if lacking := arguments.keys() - is_optional.keys():
        raise TypeError(f"{overload} takes no {', '.join(sorted(lacking))}")
    values = {**_NEUTRAL, **arguments}
    unknown = [name for name in is_optional if name not in values and not is_optional[name]]
    if unknown:
        raise TypeError(f"{overload} wants {', '.join(unknown)}")
    return partial(overload, *(values.get(name) for name in is_optional))


# Reading a schema takes 30 us. Thousands of calls may need it.
@cache
def _arguments(overload: Any) -> dict[str, bool]:
    """Return the names of an operator's arguments in order, and whether each is optional."""
    return {
        argument.name: argument.type.kind() == "OptionalType"
        for argument in overload._schema.arguments
    }


@cache
def _load(path: Path) -> None:
    import torch

    torch.ops.load_library(str(path))


@cache
def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:8]
