"""The adapters of torch's attention and of xFormers. Code that runs on a CPU is not faked."""

from __future__ import annotations

from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from decode.tiny_models import problem_of, written
from depth import label
from leanbench.kernels.libraries import flex, library
from leanbench.kernels.libraries.best_mode import CudnnMode
from library_stand_ins import UNIFORM, addresses, attend, checked, stand_in

from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.decode.measure import attention_of
from leanbench.decode.measure import checked as checked_step
from leanbench.decode.step import DecodeStep
from leanbench.gpu.catalogue import find

#: Whole prompts.
PROMPTS = [replace(each, q_len=each.max_context) for each in UNIFORM[:3]]


@pytest.mark.parametrize("problem", [*UNIFORM, *PROMPTS], ids=label)
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("cudnn", "CUDNN_ATTENTION"),
        ("torch_flash", "FLASH_ATTENTION"),
        ("torch_efficient", "EFFICIENT_ATTENTION"),
        ("torch_math", "MATH"),
    ],
)
def test_sdpa_is_handed_views_and_its_own_output_is_checked(name, backend, problem, monkeypatch):
    from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

    calls = []

    def scaled_dot_product_attention(q, k, v, **options):
        calls.append((q, k, v, options, _cur_sdpa_kernel_backends()))
        return attend(q, k, v, options["scale"], options["is_causal"])[0].to(q.dtype)

    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention
    )
    inputs, launch = checked(name, problem)
    q, k, v, options, backends = calls[-1]
    assert backends == [getattr(SDPBackend, backend)]
    assert options == {
        "is_causal": problem.q_len > 1,
        "scale": problem.head_dim**-0.5,
        "enable_gqa": problem.group_size > 1,
    }
    assert q.shape == (problem.batch, problem.q_heads, problem.q_len, problem.head_dim)
    assert k.shape == v.shape == heads_first(problem)
    assert addresses(q, k, v) == addresses(inputs.q, inputs.k_cache, inputs.v_cache)
    assert k.stride() == inputs.k_cache.transpose(1, 2).stride()
    assert inputs.out.isnan().all(), "nothing is copied"
    first = launch.results.out
    launch()
    assert launch.results.out.data_ptr() != first.data_ptr()


def heads_first(problem: AttentionProblem) -> tuple[int, ...]:
    """Return the shape of a cache with heads before tokens."""
    return problem.batch, problem.kv_heads, problem.max_context, problem.head_dim


@pytest.mark.parametrize(
    ("name", "config", "problem"),
    [
        *(("cudnn_lse", None, problem) for problem in (*UNIFORM, *PROMPTS)),
        ("cudnn_best", CudnnMode("cudnn_lse"), UNIFORM[0]),
    ],
    ids=label,
)
def test_cudnn_with_its_lse_is_the_operator_that_computes_one(name, config, problem, monkeypatch):
    calls = []

    def operator(q, k, v, **options):
        calls.append((q, k, v, options))
        out, lse = attend(q, k, v, options["scale"], options["is_causal"])
        return out.to(q.dtype), lse[..., None], torch.empty(0)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", operator)
    inputs, _ = checked(name, problem, config)
    q, k, v, options = calls[-1]
    scale = problem.head_dim**-0.5
    assert options == {
        "attn_bias": None,
        "compute_log_sumexp": True,
        "is_causal": problem.q_len > 1,
        "scale": scale,
    }
    assert addresses(q, k, v) == addresses(inputs.q, inputs.k_cache, inputs.v_cache)
    assert k.shape == heads_first(problem)


class VarlenOperator:
    """`aten::_flash_attention_forward` on sequences with separate starts and lengths."""

    def __init__(self, *arguments: str) -> None:
        schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in arguments])
        self.default = SimpleNamespace(_schema=schema)
        self.options: dict[str, Any] = {}
        self.calls = 0

    def __call__(
        self, q, k, v, starts_q, starts_k, max_q, max_k, *switches, scale, seqused_k, **options
    ):
        self.options = options
        self.calls += 1
        assert (max_q, switches) == (1, (0.0, False, False))
        assert max_k >= int(seqused_k.max())
        assert starts_q.tolist() == list(range(len(seqused_k) + 1))
        rows = []
        for sequence, length in enumerate(seqused_k.tolist()):
            start = int(starts_k[sequence])
            own = slice(start, start + length)
            keys, values = k[own].transpose(0, 1), v[own].transpose(0, 1)
            rows.append(attend(q[sequence][:, None], keys, values, scale))
        out = torch.stack([out[:, 0] for out, _ in rows]).to(q.dtype)
        return out, torch.stack([lse[:, 0] for _, lse in rows], 1), torch.empty(0)


@pytest.mark.parametrize("arguments", [("query",), ("query", "num_splits")], ids=len)
@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(1, 3, 3, 150, 64, "fp16", "HND"),
        AttentionProblem(2, 4, 4, 97, 128, "bf16", "NHD"),
        AttentionProblem(3, 4, 4, (128, 7, 65), 128, "bf16", "HND"),
        AttentionProblem(2, 4, 4, 50, 64, "fp16", "HND", capacity=128, lengths_on="device"),
    ],
    ids=label,
)
def test_flash_attention_2_without_splits_reads_sequences_in_place(problem, arguments, monkeypatch):
    operator = VarlenOperator(*arguments)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    assert kernel("torch_flash_no_split").unsupported_reason(problem) is None
    inputs, launch = checked("torch_flash_no_split", problem)
    tensors = launch._attend.args[:3]
    assert addresses(*tensors) == addresses(inputs.q, inputs.k_cache, inputs.v_cache)
    assert operator.options == ({"num_splits": 1} if "num_splits" in arguments else {})


def test_flash_attention_2_is_the_attention_of_a_model_without_groups(tmp_path, monkeypatch):
    """It is called once per layer.

    The call that may compile is an exception, because a CUDA graph must not keep it.
    """
    pytest.importorskip("transformers")
    operator = VarlenOperator()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    instruments: Any = SimpleNamespace(spec=find("h200"))
    step = DecodeStep(problem_of(written(tmp_path, "opt"), 37, 90), "cpu")
    own = kernel("torch_flash_no_split")
    assert own.unsupported_reason(step.problem) is None
    attention, _ = attention_of(instruments, step, own, "default")
    outcome = checked_step(step, own, attention)
    assert outcome.status is None
    assert 0 < (outcome.relative_error or 0) < 1e-3
    assert operator.calls == 1 + 2
    step()
    assert operator.calls == 1 + 2 + 2
    llama = problem_of(written(tmp_path, "llama"), 37, 90)
    assert "torch would split their contexts" in str(own.unsupported_reason(llama))


CUDNN = ("cudnn", "cudnn_lse", "cudnn_frontend", "cudnn_frontend_lse")


@pytest.mark.parametrize(
    ("problem", "has_frontend", "modes"),
    [
        (UNIFORM[0], True, CUDNN),
        (UNIFORM[0], False, CUDNN[:2]),
        (AttentionProblem(2, 4, 4, (50, 20), 64), True, CUDNN[2:]),
    ],
)
def test_the_best_of_cudnn_is_any_call_that_takes_the_problem(
    problem, has_frontend, modes, monkeypatch
):
    here = {"torch": ModuleSpec("torch", None)}
    here |= {"cudnn": ModuleSpec("cudnn", None)} if has_frontend else {}
    monkeypatch.setattr(library, "find_spec", here.get)
    best = kernel("cudnn_best")
    assert best.unsupported_reason(problem) is None
    candidates = best.candidate_configs(problem, find("h200"))
    assert candidates == [CudnnMode(mode) for mode in modes]
    assert best.default_config(problem, find("h200")) == candidates[0]


def test_the_best_of_cudnn_says_why_no_call_takes_a_problem(monkeypatch):
    monkeypatch.setattr(library, "find_spec", {"torch": ModuleSpec("torch", None)}.get)
    ragged = AttentionProblem(2, 4, 4, (50, 20), 64)
    reason = kernel("cudnn_best").unsupported_reason(ragged)
    assert str(reason).startswith("cudnn_best takes no ragged batch, all sequences must have")


#: The real backend MATH, FlexAttention and matrix products, with every group size, dtype and layout
#: that they take.
REAL = [
    AttentionProblem(2, 8, 2, 100, 64, "fp16", "HND"),
    AttentionProblem(3, 4, 4, 130, 96, "bf16", "HND"),
    AttentionProblem(1, 8, 4, 257, 128, "bf16", "NHD"),
    AttentionProblem(3, 4, 1, 64, 80, "fp16", "NHD"),
    AttentionProblem(1, 16, 1, 1, 256),
]


@pytest.mark.parametrize("problem", REAL, ids=label)
@pytest.mark.parametrize("name", ["torch_math", "standard"])
def test_what_torch_computes_on_a_cpu_is_right(name, problem):
    assert kernel(name).unsupported_reason(problem) is None
    inputs, launch = checked(name, problem)
    assert launch._k.data_ptr() == inputs.k_cache.data_ptr()
    assert launch._v.data_ptr() == inputs.v_cache.data_ptr()


def test_standard_attention_is_two_products_and_a_softmax():
    from torch.profiler import profile

    inputs = make_inputs(AttentionProblem(2, 8, 2, 100, 64), "cpu")
    launch = kernel("standard").prepare(inputs, None)
    with profile() as profiled:
        launch()
    names = {event.key for event in profiled.key_averages()}
    assert {"aten::baddbmm", "aten::softmax", "aten::bmm"} <= names
    assert not {"aten::clone", "aten::contiguous", "aten::repeat_interleave"} & names


@pytest.fixture
def eager(monkeypatch) -> list[dict[str, Any]]:
    """Use FlexAttention's own definition, not compiled; return the options of its compilations."""
    from torch.nn.attention import flex_attention

    calls: list[dict[str, Any]] = []

    def keep(function: Any, **options: Any) -> Any:
        calls.append(options)
        return function

    monkeypatch.setattr(torch, "compile", keep)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    flex._compiled.cache_clear()
    return calls


@pytest.mark.parametrize("problem", REAL, ids=label)
def test_flex_attention_is_compiled_once_for_buffers_that_rotate(problem, eager):
    assert kernel("torch_flex").unsupported_reason(problem) is None
    inputs, launch = checked("torch_flex", problem)
    q, k, v = launch._attend.args
    assert addresses(q, k, v) == addresses(inputs.q, inputs.k_cache, inputs.v_cache)
    assert k.shape == heads_first(problem)
    checked("torch_flex", problem)
    # Static sizes, and no silent fallback to eager code.
    assert eager == [{"dynamic": False, "fullgraph": True}]


SCORED = [
    replace(REAL[0], softcap=15.0),
    replace(REAL[1], alibi=True),
    replace(REAL[0], alibi=True, softcap=20.0, q_len=3),
    replace(REAL[2], window_left=60),
    replace(REAL[3], q_len=5),
    replace(REAL[3], q_len=5, window_left=20, window_right=2, causal=False),
]


@pytest.mark.parametrize("problem", SCORED, ids=label)
def test_flex_attention_takes_functions_of_scores_and_block_masks(problem, eager):
    assert kernel("torch_flex").unsupported_reason(problem) is None
    checked("torch_flex", problem)
    # ALiBi's slopes are another tensor each time.
    checked("torch_flex", problem)
    assert len(eager) == 1


def test_flex_attention_is_compiled_anew_for_every_problem(eager):
    for problem in (*REAL, REAL[0]):
        checked("torch_flex", problem)
    assert len(eager) == len(REAL) + 1


def install_xformers(monkeypatch: pytest.MonkeyPatch, forward: Any) -> type:
    """Install a fake of xFormers with this function; return its operator of split K."""
    fmha, split_k = ModuleType("xformers.ops.fmha"), type("FwOp", (), {})
    vars(fmha).update(
        memory_efficient_attention_forward=forward, triton_splitk=SimpleNamespace(FwOp=split_k)
    )
    stand_in(monkeypatch, "xformers")
    stand_in(monkeypatch, "xformers.ops", fmha=fmha)
    return split_k


@pytest.mark.parametrize(
    "problem", [*UNIFORM[:3], AttentionProblem(2, 4, 4, 97, 128, "bf16", "NHD")], ids=label
)
def test_xformers_is_handed_groups_and_expanded_views(problem, monkeypatch):
    calls: list[tuple[torch.Tensor, ...]] = []

    def forward(query, key, value, *, scale, op):
        assert op is split_k
        calls.append((query, key, value))
        # (batch, tokens, heads, head_dim): heads of a group follow each other.
        q, k, v = (own.flatten(2, -2).transpose(1, 2) for own in (query, key, value))
        out, _ = attend(q, k, v, scale)
        return out.transpose(1, 2).to(query.dtype).reshape(query.shape)

    split_k = install_xformers(monkeypatch, forward)
    assert kernel("xformers_split_k").unsupported_reason(problem) is None
    inputs, _ = checked("xformers_split_k", problem)
    query, key, value = calls[-1]
    heads = (problem.kv_heads, problem.group_size) if problem.group_size > 1 else (problem.q_heads,)
    assert query.shape == (problem.batch, 1, *heads, problem.head_dim)
    cache = (problem.batch, problem.max_context, *heads, problem.head_dim)
    assert key.shape == value.shape == cache
    if problem.group_size > 1:
        assert key.stride(3) == value.stride(3) == 0
    assert addresses(query, key, value) == addresses(inputs.q, inputs.k_cache, inputs.v_cache)


@pytest.mark.parametrize(
    ("message", "raised", "expected"),
    [
        (
            "Operator `x` does not support inputs:\n  query: shape=(1, 4)\n  it was built"
            " without CUDA\n",
            UserError,
            r"refused by xFormers \(it was built without CUDA\)",
        ),
        ("expected 4 dimensions", ValueError, "expected 4 dimensions"),
        ("", ValueError, None),
    ],
)
def test_what_xformers_refuses_is_told(message, raised, expected, monkeypatch):
    def refuse(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        raise ValueError(message)

    install_xformers(monkeypatch, refuse)
    with pytest.raises(raised, match=expected):
        kernel("xformers_split_k").prepare(make_inputs(UNIFORM[0], "cpu"), None)
