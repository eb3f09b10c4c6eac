"""The adapter of cuDNN's front end against a fake that reads memory like the library: by addresses,
shapes and strides of its graph.
"""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from depth import label
from leanbench.kernels.libraries import cudnn_frontend
from library_stand_ins import (
    CAPACITY,
    OF_FLASH_ATTN,
    PAGED,
    RAGGED,
    SEVERAL_QUERIES,
    UNIFORM,
    WINDOWS,
    attended,
    checked,
    stand_in,
)

from leanbench.check.reference import Reference
from leanbench.core.inputs import make_inputs
from leanbench.core.registry import kernel

NAMES = ("cudnn_frontend", "cudnn_frontend_lse")


def setter(name: str) -> Any:
    def set_value(tensor: Tensor, value: Any) -> Tensor:
        setattr(tensor, name, value)
        return tensor

    return set_value


class Tensor:
    """A tensor of cuDNN's graph: the data to find it, without memory."""

    dim: list[int]
    stride: list[int]
    dtype: torch.dtype
    set_dim, set_stride, set_data_type = map(setter, ("dim", "stride", "dtype"))
    set_output = setter("is_output")

    def __init__(self, uid: int) -> None:
        self.uid = uid

    def get_uid(self) -> int:
        return self.uid

    def at(self, address: int) -> torch.Tensor:
        """Return the memory at an address as this tensor."""
        last = sum((size - 1) * stride for size, stride in zip(self.dim, self.stride, strict=True))
        numbers = (last + 1) * self.dtype.itemsize
        memory = (ctypes.c_char * numbers).from_address(address)
        flat = torch.frombuffer(memory, dtype=self.dtype)
        return flat.as_strided(self.dim, self.stride)


class Graph:
    made: list[Graph]
    streams: list[int]

    def __init__(self, handle: str, intermediate_data_type: str, compute_data_type: str) -> None:
        assert (handle, intermediate_data_type, compute_data_type) == ("handle", "float", "float")
        self.tensors: list[Tensor] = []
        self.made.append(self)

    def _tensor(self) -> Tensor:
        self.tensors.append(Tensor(len(self.tensors) + 1))
        return self.tensors[-1]

    def tensor(
        self, dim: list[int], stride: list[int], data_type: torch.dtype, name: str
    ) -> Tensor:
        return self._tensor().set_dim(dim).set_stride(stride).set_data_type(data_type)

    def sdpa(self, q: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        self.q, self.options = q, options
        self.out = self._tensor()
        self.lse = self._tensor() if options["generate_stats"] else None
        return self.out, self.lse

    def build(self, modes: list[str]) -> None:
        assert modes == ["A", "FALLBACK"]

    def get_workspace_size(self) -> int:
        return 16

    def execute(self, pointers: dict[int, int], workspace: torch.Tensor, handle: str) -> None:
        assert (handle, workspace.numel()) == ("handle", 16)
        options = self.options

        def written(tensor: Any) -> torch.Tensor:
            return tensor.at(pointers[tensor.uid])

        q = written(self.q).transpose(1, 2)
        if "diagonal_alignment" in options:
            assert options["diagonal_alignment"] == "BOTTOM_RIGHT"
        kinds = {
            "causal": options.get("diagonal_band_right_bound") == 0,
            "window_left": options.get("diagonal_band_left_bound", 0) - 1,
        }
        k, v = written(options["k"]).transpose(1, 2), written(options["v"]).transpose(1, 2)
        lengths = torch.full((q.shape[0],), k.shape[1])
        table = None
        assert options["use_padding_mask"] == (options["seq_len_kv"] is not None)
        if options["use_padding_mask"]:
            of_q, of_kv = written(options["seq_len_q"]), written(options["seq_len_kv"])
            assert of_q.shape == of_kv.shape == (q.shape[0], 1, 1, 1)
            assert of_q.unique().tolist() == [q.shape[1]]
            lengths = of_kv.flatten()
        if (paged := options["paged_attention_k_table"]) is not None:
            assert options["paged_attention_v_table"] is paged
            table = paged.at(pointers[paged.uid])[:, 0, :, 0]
            # A block table ends at the maximum length of a sequence.
            assert options["paged_attention_max_seq_len_kv"] == table.shape[1] * k.shape[1]
        out, lse = attended(q, k, v, lengths, table, options["attn_scale"], **kinds)
        self.out.at(pointers[self.out.uid]).copy_(out.transpose(1, 2))
        if self.lse is not None:
            self.lse.at(pointers[self.lse.uid]).copy_(lse[..., None])


@pytest.fixture
def graphs(monkeypatch):
    """Return the graphs that were built."""
    Graph.made = []
    stand_in(
        monkeypatch,
        "cudnn",
        pygraph=Graph,
        create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None,
        data_type=SimpleNamespace(FLOAT="float"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
        diagonal_alignment=SimpleNamespace(BOTTOM_RIGHT="BOTTOM_RIGHT"),
    )
    for cached in (cudnn_frontend._built, cudnn_frontend._handle):
        cached.cache_clear()
    yield Graph.made
    for cached in (cudnn_frontend._built, cudnn_frontend._handle):
        cached.cache_clear()


@pytest.mark.parametrize(
    "problem",
    [*UNIFORM, *RAGGED, *PAGED, *CAPACITY, *SEVERAL_QUERIES, *WINDOWS, *OF_FLASH_ATTN[:1]],
    ids=label,
)
@pytest.mark.parametrize("name", NAMES)
def test_cudnn_reads_the_caches_and_writes_the_outputs_in_place(name, problem, graphs):
    assert kernel(name).unsupported_reason(problem) is None
    inputs, _ = checked(name, problem)
    assert len(graphs) == 1
    options = graphs[0].options
    assert options["attn_scale"] == problem.head_dim**-0.5
    assert options["generate_stats"] == (name == "cudnn_frontend_lse")
    # Equal lengths known to the host need no mask.
    is_plain = problem.lengths_on == "host" and problem.page_size is None
    assert options["use_padding_mask"] == (not is_plain)
    assert inputs.lse.isnan().all() == (name == "cudnn_frontend")


@pytest.mark.parametrize("problem", [UNIFORM[1], PAGED[2]], ids=label)
def test_one_graph_serves_buffers_that_rotate(problem, graphs):
    adapter = kernel("cudnn_frontend_lse")
    buffers = [make_inputs(problem, "cpu") for _ in range(3)]
    launches = [adapter.prepare(inputs, None) for inputs in buffers]
    for inputs, launch in zip(buffers, launches, strict=True):
        inputs.poison()
        launch()
        check = Reference(inputs).check(inputs, math.e)
        assert check.failure(problem.dtype) is None
    assert len(graphs) == 1


def test_the_rows_library_names_the_front_end_and_cudnn(monkeypatch):
    from leanbench.kernels.libraries import library

    monkeypatch.setattr(library, "version", lambda name: "1.20.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert kernel("cudnn_frontend").library() == "nvidia-cudnn-frontend 1.20.0, cuDNN 91900"
