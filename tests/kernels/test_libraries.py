"""The adapters of libraries without a GPU and mostly without the libraries: stand-ins take their place in sys.modules,
look at what they are handed, and compute with plain torch.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from leanbench.kernels.libraries import flash_infer, library
from typer.testing import CliRunner

from leanbench.cli.main import app
from leanbench.gpu.catalogue import find
from leanbench.inputs import AttentionInputs, make_inputs
from leanbench.measure.check import CheckResult, Reference
from leanbench.model.cell import predict_cell
from leanbench.problem import AttentionProblem
from leanbench.registry import Kernel, OwnOutputs, kernel, written_by
from leanbench.run import environment
from leanbench.run.cells import DEFAULT_KERNELS

NAMES = ("cudnn", "torch_flash", "flashinfer", "flashinfer_cuda_cores", "flash_attn_3")
UNIFORM = [
    AttentionProblem(1, 2, 2, 150, 64),
    AttentionProblem(3, 8, 2, 128, 128, "bf16", "NHD"),
    AttentionProblem(2, 4, 1, 192, 64),
    AttentionProblem(2, 6, 2, 97, 64, "fp16", "HND"),
    AttentionProblem(2, 6, 2, 97, 64, "fp16", "NHD"),
]
RAGGED = [
    AttentionProblem(4, 4, 2, (1, 190, 33, 64), 64, "fp16", "NHD"),
    AttentionProblem(3, 4, 4, (128, 7, 65), 128, "bf16", "HND"),
]
PAGED = [
    AttentionProblem(2, 8, 2, 100, 64, "fp16", "HND", page_size=16),
    AttentionProblem(2, 8, 2, 96, 128, "bf16", "NHD", page_size=32),
    AttentionProblem(3, 4, 2, (1, 65, 130), 64, "fp16", "NHD", page_size=64),
    AttentionProblem(3, 4, 1, (40, 16, 130), 64, "fp16", "HND", page_size=16),
]
SEVERAL_QUERIES = [
    AttentionProblem(2, 4, 2, 50, 80, q_len=4),
    AttentionProblem(3, 4, 2, (9, 65, 130), 64, "bf16", "HND", q_len=7, page_size=16),
]


def label(problem: AttentionProblem) -> str:
    return problem.label


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(heads, q_len, head_dim) over (kv_heads, tokens, head_dim), causal at the end: output in fp32, natural LSE."""
    group_size = q.shape[0] // k.shape[0]
    k, v = (cache.float().repeat_interleave(group_size, 0) for cache in (k, v))
    scores = q.float() @ k.transpose(1, 2) * scale
    q_len, tokens = scores.shape[1:]
    unseen = torch.ones(q_len, tokens, dtype=torch.bool).triu(tokens - q_len + 1)
    scores = scores.masked_fill(unseen, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def checked(name: str, problem: AttentionProblem) -> tuple[AttentionInputs, Any]:
    """One call on fresh inputs, held against the reference."""
    inputs = make_inputs(problem, "cpu")
    launch = kernel(name).prepare(inputs, None)
    written_by(launch, inputs).poison()
    launch()
    result = Reference(inputs).check(written_by(launch, inputs), kernel(name).lse_base)
    assert result.failure(problem.dtype) is None
    assert result.checked_heads == result.total_heads == problem.batch * problem.kv_heads
    assert (result.lse_error is None) == (kernel(name).lse_base is None)
    return inputs, launch


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def all_installed(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: ModuleSpec(name, None))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cudnn", None),
        ("torch_flash", None),
        (
            "flashinfer",
            "flashinfer is not installed here (no module flashinfer, tvm_ffi): "
            "pip install flashinfer-python apache-tvm-ffi",
        ),
        (
            "flash_attn_3",
            "flash_attn_3 is not installed here (no module flash_attn_interface): "
            'pip install "git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper"',
        ),
    ],
)
def test_a_library_that_is_missing_is_said_with_what_installs_it(name, sentence, monkeypatch):
    here = {"torch": ModuleSpec("torch", None)}
    monkeypatch.setattr(library, "find_spec", here.get)
    assert kernel(name).unavailable_reason() == sentence
    assert kernel(name).unsupported_reason(UNIFORM[0]) == sentence
    listed = " ".join(CliRunner().invoke(app, ["list", "kernels"]).stdout.split())
    assert listed.count("; flashinfer is not") == listed.count("; flash_attn_3 is not") == 1
    assert "cudnn is not" not in listed


@pytest.mark.usefixtures("all_installed")
def test_what_is_installed_is_available():
    assert [kernel(name).unavailable_reason() for name in NAMES] == [None] * 5
    assert [kernel(name).unsupported_reason(UNIFORM[0]) for name in NAMES] == [None] * 5


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    ("problem", "refused"),
    [
        (RAGGED[0], {"cudnn": "ragged", "torch_flash": "ragged"}),
        (PAGED[0], {"cudnn": "page_size 16", "torch_flash": "page_size 16"}),
        (
            AttentionProblem(1, 4, 4, 50, 64, q_len=4),
            dict.fromkeys(("cudnn", "torch_flash", "flashinfer", "flashinfer_cuda_cores"), "q_len 4"),
        ),
        (AttentionProblem(1, 4, 4, 50, 256), {"cudnn": "head_dim 256"}),
        (AttentionProblem(1, 4, 4, 50, 80), dict.fromkeys(("flashinfer", "flashinfer_cuda_cores"), "head_dim 80")),
        (AttentionProblem(1, 4, 4, 50, 96), dict.fromkeys(("flashinfer", "flashinfer_cuda_cores"), "head_dim 96")),
        (AttentionProblem(1, 10, 2, 50, 64), {"flashinfer_cuda_cores": "groups of 5 query heads"}),
        (AttentionProblem(1, 4, 4, 1, 64), {"cudnn": "context of one token"}),
    ],
    ids=lambda value: value.label if isinstance(value, AttentionProblem) else "",
)
def test_what_a_library_cannot_do_is_said(problem, refused):
    reasons = {name: kernel(name).unsupported_reason(problem) for name in NAMES}
    assert {name for name, reason in reasons.items() if reason} == set(refused)
    for name, words in refused.items():
        assert words in str(reasons[name])
        assert str(reasons[name]).startswith(name)


@pytest.mark.usefixtures("all_installed")
def test_without_a_schedule_there_is_no_prediction_and_the_row_says_so():
    assert not set(NAMES) & set(DEFAULT_KERNELS)
    for name in NAMES:
        row = predict_cell(AttentionProblem(1, 8, 8, 4096, 128), kernel(name), "best", find("h200"))
        assert (row["status"], row["reason"]) == ("unsupported", f"{name} has no schedule to predict from")


@pytest.mark.parametrize("problem", UNIFORM, ids=label)
@pytest.mark.parametrize(("name", "backend"), [("cudnn", "CUDNN_ATTENTION"), ("torch_flash", "FLASH_ATTENTION")])
def test_sdpa_is_handed_views_and_its_own_output_is_checked(name, backend, problem, monkeypatch):
    from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

    calls = []

    def scaled_dot_product_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append((q, k, v, options, _cur_sdpa_kernel_backends()))
        outs = [attend(*tensors, options["scale"])[0] for tensors in zip(q, k, v, strict=True)]
        return torch.stack(outs).to(q.dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)
    inputs, launch = checked(name, problem)
    q, k, v, options, backends = calls[-1]
    assert backends == [getattr(SDPBackend, backend)]
    assert options == {"is_causal": False, "scale": problem.head_dim**-0.5, "enable_gqa": problem.group_size > 1}
    assert q.shape == (problem.batch, problem.q_heads, 1, problem.head_dim)
    assert k.shape == v.shape == (problem.batch, problem.kv_heads, problem.max_context, problem.head_dim)
    assert [tensor.data_ptr() for tensor in (q, k, v)] == [
        tensor.data_ptr() for tensor in (inputs.q, inputs.k_cache, inputs.v_cache)
    ]
    assert k.stride() == inputs.k_cache.transpose(1, 2).stride()
    assert inputs.out.isnan().all(), "nothing is copied"
    first = launch.results.out
    launch()
    assert launch.results.out.data_ptr() != first.data_ptr()


class FlashInferWrapper:
    """Reads the cache by page numbers, as the library does: through the strides of what it is handed."""

    made: list[FlashInferWrapper]

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        assert workspace.dtype == torch.uint8
        assert not workspace.any()
        self.workspace, self.kv_layout, self.use_tensor_cores = workspace, kv_layout, use_tensor_cores
        self.made.append(self)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        assert {tensor.dtype for tensor in (indptr, indices, last_page_len)} == {torch.int32}
        assert len(indices) == indptr[-1]
        self.indptr, self._paged_kv_indices_buf, self.last_page_len = indptr, indices, last_page_len
        self.heads, self.head_dim, self.page_size = (num_qo_heads, num_kv_heads), head_dim, page_size
        self.dtypes, self.scale = {q_data_type, kv_data_type}, sm_scale

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert return_lse
        assert q.shape == out.shape == (len(self.last_page_len), self.heads[0], self.head_dim)
        assert lse.shape == q.shape[:2]
        assert {q.dtype, out.dtype, *(cache.dtype for cache in paged_kv_cache)} == self.dtypes
        token_axis = 2 if self.kv_layout == "HND" else 1
        assert all(cache.shape[token_axis] == self.page_size for cache in paged_kv_cache)
        assert all(cache.shape[3 - token_axis] == self.heads[1] for cache in paged_kv_cache)
        assert self._paged_kv_indices_buf.dtype == torch.int32
        for row, last in enumerate(self.last_page_len.tolist()):
            pages = self._paged_kv_indices_buf[self.indptr[row] : self.indptr[row + 1]].long()
            tokens = (len(pages) - 1) * self.page_size + last
            # (kv_heads, tokens, head_dim)
            k, v = (
                cache[pages].movedim(3 - token_axis, 0).flatten(1, 2)[:, :tokens]
                for cache in paged_kv_cache
            )  # fmt: skip
            attended, natural = attend(q[row, :, None], k, v, self.scale)
            out[row] = attended[:, 0].to(out.dtype)
            lse[row] = natural[:, 0] / math.log(2)
        return out, lse


@pytest.fixture
def flashinfer(monkeypatch) -> Iterator[list[FlashInferWrapper]]:
    """The wrappers that were made."""
    FlashInferWrapper.made = []
    stand_in(monkeypatch, "flashinfer", BatchDecodeWithPagedKVCacheWrapper=FlashInferWrapper)
    stand_in(monkeypatch, "tvm_ffi")
    monkeypatch.setattr(flash_infer, "_WORKSPACE_BYTES", 1000)
    flash_infer._planned.cache_clear()
    flash_infer._workspace.cache_clear()
    yield FlashInferWrapper.made
    flash_infer._planned.cache_clear()
    flash_infer._workspace.cache_clear()


@pytest.mark.parametrize("problem", [*UNIFORM, *RAGGED, *PAGED], ids=label)
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_cuda_cores"])
def test_flashinfer_reads_the_cache_in_place(name, problem, flashinfer):
    assert kernel(name).unsupported_reason(problem) is None
    inputs, launch = checked(name, problem)
    assert len(flashinfer) == 1
    planned = flashinfer[0]
    assert planned.use_tensor_cores == (name == "flashinfer")
    assert planned.kv_layout == problem.kv_layout
    assert planned.page_size == (problem.page_size or math.gcd(problem.max_context, 64))
    assert planned.scale == problem.head_dim**-0.5
    (q, caches), options = launch.args, launch.keywords
    tensors = [q, *caches, options["out"], options["lse"]]
    assert [tensor.data_ptr() for tensor in tensors] == [
        tensor.data_ptr() for tensor in (inputs.q, inputs.k_cache, inputs.v_cache, inputs.out, inputs.lse)
    ]
    assert caches[0].stride() == caches[1].stride()


@pytest.mark.parametrize("problem", [UNIFORM[1], RAGGED[0], PAGED[2]], ids=label)
def test_flashinfer_plans_once_for_buffers_that_rotate(problem, flashinfer):
    """Made first, launched afterwards: no launch reads what another one was prepared for."""
    buffers = [make_inputs(problem, "cpu") for _ in range(3)]
    launches = [kernel("flashinfer").prepare(inputs, None) for inputs in buffers]
    launches += [kernel("flashinfer_cuda_cores").prepare(inputs, None) for inputs in buffers]
    for inputs, launch in zip([*buffers, *buffers], launches, strict=True):
        inputs.poison()
        launch()
        assert Reference(inputs).check(inputs, 2.0).failure(problem.dtype) is None
    assert [wrapper.use_tensor_cores for wrapper in flashinfer] == [True, False]
    assert flashinfer[0].workspace is flashinfer[1].workspace


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_keeps_few_plans():
    for batch in range(1, 9):
        kernel("flashinfer").prepare(make_inputs(AttentionProblem(batch, 2, 2, 64, 64), "cpu"), None)
    assert flash_infer._planned.cache_info().currsize == 4


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    pack_gqa: bool,
    scheduler_metadata: object,
    return_softmax_lse: bool,
) -> tuple[torch.Tensor, ...]:
    assert return_softmax_lse
    assert cache_seqlens.dtype == torch.int32
    assert causal == (q.shape[1] > 1)
    assert pack_gqa == (q.shape[2] > k_cache.shape[2])
    results = []
    for row, tokens in enumerate(cache_seqlens.tolist()):
        k, v = (
            (cache[row] if page_table is None else cache[page_table[row].long()].flatten(0, 1))[:tokens].transpose(0, 1)
            for cache in (k_cache, v_cache)
        )
        results.append(attend(q[row].transpose(0, 1), k, v, softmax_scale))
    out = torch.stack([out.transpose(0, 1) for out, _ in results]).to(q.dtype)
    return out, torch.stack([lse for _, lse in results]), torch.empty(0), torch.empty(0)


@pytest.mark.parametrize("problem", [*UNIFORM, *RAGGED, *PAGED, *SEVERAL_QUERIES], ids=label)
def test_flash_attn_3_is_handed_the_tensors_and_its_schedule(problem, monkeypatch):
    schedules: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def get_scheduler_metadata(*shape: Any, **options: Any) -> str:
        schedules.append((shape, options))
        return "metadata"

    stand_in(
        monkeypatch,
        "flash_attn_interface",
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        get_scheduler_metadata=get_scheduler_metadata,
    )
    assert kernel("flash_attn_3").unsupported_reason(problem) is None
    inputs, launch = checked("flash_attn_3", problem)
    ((batch, q_len, tokens, q_heads, kv_heads, head_dim), options) = schedules[0]
    page_size = problem.page_size or 1
    assert tokens == -(-problem.max_context // page_size) * page_size
    assert (batch, q_len, q_heads, kv_heads, head_dim) == (
        problem.batch,
        problem.q_len,
        problem.q_heads,
        problem.kv_heads,
        problem.head_dim,
    )
    assert options.pop("cache_seqlens").tolist() == list(problem.contexts)
    assert options == {
        "qkv_dtype": inputs.q.dtype,
        "page_size": problem.page_size,
        "causal": problem.q_len > 1,
        "pack_gqa": problem.group_size > 1,
    }
    call = launch._attend
    assert call.keywords["scheduler_metadata"] == "metadata"
    assert [tensor is own for tensor, own in zip(call.args, (inputs.q, inputs.k_cache, inputs.v_cache), strict=True)]
    assert call.keywords["page_table"] is inputs.block_table


def test_flash_attn_3_without_a_scheduler_function(monkeypatch):
    stand_in(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)
    _, launch = checked("flash_attn_3", UNIFORM[1])
    assert launch._attend.keywords["scheduler_metadata"] is None


def test_an_lse_is_checked_in_the_base_it_is_written_in():
    inputs = make_inputs(AttentionProblem(1, 4, 2, 50, 64), "cpu")
    kernel("reference").prepare(inputs, None)()
    reference = Reference(inputs)
    assert reference.check(inputs).lse_error == pytest.approx(0, abs=1e-6)
    assert "LSE error" in str(reference.check(inputs, 2.0).failure("fp16"))
    inputs.lse.div_(math.log(2))
    assert reference.check(inputs, 2.0).lse_error == pytest.approx(0, abs=1e-6)
    inputs.lse.fill_(math.nan)
    assert reference.check(inputs, 2.0).lse_error == math.inf
    told_none = reference.check(inputs, None)
    assert told_none.lse_error is None
    assert told_none.failure("fp16") is None
    inputs.out[0, 0, 0, 0] = math.nan
    assert reference.check(inputs, None).relative_error == math.inf
    assert CheckResult(math.inf, None, 1, 1).failure("fp16") is not None


@pytest.fixture
def pretended(monkeypatch) -> Any:
    """The pretended GPU of the tests of measuring."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "measure"))
    return importlib.import_module("pretended_gpu")


def own_outputs_kernel(pretended: Any, replay_writes: bool) -> Kernel:
    class Launch(OwnOutputs):
        def __init__(self, owner: Any, inputs: AttentionInputs) -> None:
            super().__init__(inputs)
            self.kernel, self.inputs = owner, inputs

        def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
            own = make_inputs(pretended.PROBLEM, "cpu")
            kernel("reference").prepare(type(own)(**{**vars(self.inputs), "out": own.out, "lse": own.lse}), None)()
            return own.out, self.inputs.lse

    class Own(pretended.Right):
        lse_base = None

        def prepare(self, inputs: AttentionInputs, config: object) -> Launch:
            return Launch(self, inputs)

        def replay(self, launches: Any) -> None:
            """Writes the tensors of the capture again, as a graph does."""
            for launch in launches:
                if replay_writes:
                    launch.results.out.copy_(launch.compute()[0])

    return Own("own")


def test_a_row_of_a_library_that_makes_its_own_output(pretended, monkeypatch):
    gpu = pretended.pretend(monkeypatch)
    row = pretended.measure(gpu, own_outputs_kernel(pretended, replay_writes=True))["own"]
    assert row["status"] == "ok"
    assert 0 < row["relative_error"] < 1e-3
    assert row["lse_error"] is None


def test_an_own_output_that_the_graph_does_not_write_is_an_alarm(pretended, monkeypatch):
    from leanbench.measure.cell import Alarm

    gpu = pretended.pretend(monkeypatch)
    with pytest.raises(Alarm, match="3 of 3 outputs were not written"):
        pretended.measure(gpu, own_outputs_kernel(pretended, replay_writes=False))


def test_rows_are_taken_with_the_versions_of_the_libraries(monkeypatch):
    versions = {"flashinfer-python": "0.6.13", "torch": "2.13.0"}
    monkeypatch.setattr(environment, "_version", versions.get)
    found = environment.predicted_environment()
    assert found["flashinfer-python"] == "0.6.13"
    assert "flash_attn_3" not in found
