"""cuDNN's attention through its front end (nvidia-cudnn-frontend), as servers call it: lengths on
the device, paged caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.library import MAX_PROMPT, LibraryKernel, current_stream, lengths

from leanbench.core.config import KernelConfig

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs


class CudnnFrontend(LibraryKernel):
    """cuDNN through its front end.

    Equal lengths known to the host are passed as shapes of views on the caches' first tokens.
    """

    name = "cudnn_frontend"
    title = "cuDNN's attention through nvidia-cudnn-frontend: lengths on the device, paged caches"
    source = "NVIDIA cuDNN, the version that torch loads; nvidia-cudnn-frontend"
    modules = ("cudnn",)
    install = "pip install nvidia-cudnn-frontend"
    distribution = "nvidia-cudnn-frontend"
    written_for = "1.20"
    head_dims = (64, 80, 96, 128)
    max_q_len = MAX_PROMPT
    #: No sinks: cuDNN 9.19 supports them only with several query tokens.
    axes = LibraryKernel.axes | {
        *("page_size", "lengths", "lengths_on"),
        *("q_len", "causal", "window_left"),
    }
    #: Only the output is requested.
    lse_base = None

    def library(self) -> str:
        import torch

        return f"{super().library()}, cuDNN {torch.backends.cudnn.version()}"

    def launch(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], Any]:
        return CudnnLaunch(inputs, with_lse=self.lse_base is not None)


class CudnnFrontendLse(CudnnFrontend):
    name = "cudnn_frontend_lse"
    title = "cudnn_frontend, with the LSE written as well"
    lse_base = LibraryKernel.lse_base


@dataclass(frozen=True)
class _Tensor:
    """Tensor properties in cuDNN's graph."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True)
class _Shape:
    """Key of cuDNN's graph. Rotating buffers of a problem share it."""

    #: By name: q, k, v, out, and if used lengths_q, lengths_kv, table and lse.
    tensors: tuple[tuple[str, _Tensor], ...]
    max_tokens: int
    softmax_scale: float
    #: Causal mask, and number of preceding tokens visible to a query token; -1: all.
    causal: bool
    window_left: int
    device: torch.device


class CudnnLaunch:
    """Execution of a cuDNN graph on these tensors, on the current stream."""

    def __init__(self, inputs: AttentionInputs, with_lse: bool) -> None:
        tensors = _tensors(inputs, with_lse)
        described = tuple((name, _Tensor.of(tensor)) for name, tensor in tensors.items())
        table = inputs.block_table
        max_tokens = 0 if table is None else table.shape[1] * inputs.k_cache.shape[1]
        shape = _Shape(
            described,
            max_tokens,
            inputs.softmax_scale,
            # A single query token needs a causal mask only for the end of its window.
            inputs.causal and (inputs.q_len > 1 or inputs.window_left >= 0),
            inputs.window_left,
            inputs.q.device,
        )
        self._graph, uids, self._workspace = _built(shape)
        self._tensors = tensors
        self._pointers = {uids[name]: tensor.data_ptr() for name, tensor in tensors.items()}
        self._device = inputs.q.device

    def __call__(self) -> None:
        import cudnn

        handle = _handle(self._device)
        # A capture has a stream of its own.
        cudnn.set_stream(handle, current_stream(self._device))
        self._graph.execute(self._pointers, self._workspace, handle=handle)


def _tensors(inputs: AttentionInputs, with_lse: bool) -> dict[str, torch.Tensor]:
    """Return views in cuDNN's layouts.

    They are (batch, heads, tokens, head_dim), or (pages, heads, page_size, head_dim) for a paged
    cache. Lengths and the block table have four dimensions.
    """
    import torch

    is_plain = inputs.cache_seqlens is None and inputs.block_table is None
    used = slice(None, inputs.context) if is_plain else slice(None)
    named = {
        "q": inputs.q.transpose(1, 2),
        "k": inputs.k_cache[:, used].transpose(1, 2),
        "v": inputs.v_cache[:, used].transpose(1, 2),
        "out": inputs.out.transpose(1, 2),
    }
    if not is_plain:
        batch = inputs.q.shape[0]
        queries = torch.full((batch,), inputs.q_len, dtype=torch.int32, device=inputs.q.device)
        named["lengths_q"] = queries.view(batch, 1, 1, 1)
        named["lengths_kv"] = lengths(inputs).view(batch, 1, 1, 1)
    if inputs.block_table is not None:
        named["table"] = inputs.block_table[:, None, :, None]
    return named | ({"lse": inputs.lse[..., None]} if with_lse else {})


# The latest graphs belong to the kernels of one problem.
@lru_cache(maxsize=4)
def _built(shape: _Shape) -> tuple[Any, dict[str, int], torch.Tensor]:
    """Build cuDNN's graph for a shape; return graph, tensor numbers by name and workspace."""
    import cudnn
    import torch

    graph = cudnn.pygraph(
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(shape.device),
    )
    described = dict(shape.tensors)
    inputs = {
        name: graph.tensor(
            dim=list(tensor.shape), stride=list(tensor.strides), data_type=tensor.dtype, name=name
        )
        for name, tensor in described.items()
        if name not in ("out", "lse")
    }
    out, lse = graph.sdpa(
        q=inputs["q"],
        k=inputs["k"],
        v=inputs["v"],
        attn_scale=shape.softmax_scale,
        generate_stats="lse" in described,
        use_padding_mask="lengths_kv" in inputs,
        seq_len_q=inputs.get("lengths_q"),
        seq_len_kv=inputs.get("lengths_kv"),
        paged_attention_k_table=inputs.get("table"),
        paged_attention_v_table=inputs.get("table"),
        paged_attention_max_seq_len_kv=shape.max_tokens or None,
        **_mask(shape),
    )
    results = {"out": out, "lse": lse} if "lse" in described else {"out": out}
    for name, result in results.items():
        tensor = described[name]
        result.set_output(True).set_dim(list(tensor.shape)).set_stride(list(tensor.strides))
        result.set_data_type(tensor.dtype)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    uids = {name: tensor.get_uid() for name, tensor in (inputs | results).items()}
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=shape.device)
    return graph, uids, workspace


def _mask(shape: _Shape) -> dict[str, Any]:
    """Return the mask: the band of visible tokens, aligned to the end of the sequence."""
    import cudnn

    if not shape.causal and shape.window_left < 0:
        return {}
    bounds: dict[str, Any] = {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT}
    if shape.causal:
        bounds["diagonal_band_right_bound"] = 0
    if shape.window_left >= 0:
        # cuDNN counts the query token itself.
        bounds["diagonal_band_left_bound"] = shape.window_left + 1
    return bounds


@cache
def _handle(device: torch.device) -> Any:
    import cudnn

    return cudnn.create_handle()
