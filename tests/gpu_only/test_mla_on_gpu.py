"""lean_mla and `lean_mla_with_kvcache` on a Hopper GPU, against the fp64 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hostile_inputs import EQUAL_SCORES, error_by_halves, steep_scores, values_of_two_sizes
from leanbench.kernels.mla import LEAN_MLA

from leanbench import lean_mla_with_kvcache
from leanbench.check.grid import CheckCase, drop_pages, run_case, wild_case
from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.local import spec_of_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="lean_mla is for Hopper",
    ),
]

LATENT: dict[str, Any] = {"latent": True, "v_head_dim": 512}
ONE = AttentionProblem(1, 128, 1, 4096, 576, "bf16", page_size=64, **LATENT)
PROBLEMS = [
    *(replace(ONE, context=context) for context in (1, 63, 64, 65, 1000, 131_072)),
    *(replace(ONE, q_heads=heads, context=1000, page_size=None) for heads in (1, 16, 24, 64, 96)),
    # Column groups: 4 with the number of splits merged in one round, 2 with more of them, batches.
    *(replace(ONE, context=context) for context in (4096, 8192)),
    *(replace(ONE, q_heads=16, context=context) for context in (2048, 8192)),
    *(replace(ONE, batch=batch, context=context) for batch, context in ((4, 1024), (8, 512))),
    replace(ONE, batch=3, context=(700, 2, 65), capacity=1024, q_heads=16),
    replace(ONE, batch=3, context=(65, 700, 2), capacity=1024, q_heads=32),
    replace(ONE, batch=100, context=1024, kv_layout="NHD"),
    replace(ONE, batch=3, context=4100, dtype="fp16", page_size=128),
    replace(ONE, batch=3, context=(5000, 1, 777), capacity=8192, page_size=None),
    replace(ONE, batch=4, context=(1, 64, 30_000, 500), q_heads=16, q_len=4),
    replace(ONE, batch=3, context=(700, 2, 65), q_len=3, dtype="fp16"),
    replace(ONE, batch=2, context=700, q_len=2, causal=False),
    *(replace(ONE, context=context, kv_dtype="e4m3") for context in (1, 65, 1000, 131_072)),
    replace(ONE, batch=100, context=1024, kv_dtype="e5m2", dtype="fp16", scaled=False),
    replace(ONE, batch=3, context=(5000, 1, 777), capacity=8192, page_size=None, kv_dtype="e5m2"),
    replace(ONE, batch=4, context=(1, 64, 30_000, 500), q_heads=16, q_len=4, kv_dtype="e4m3"),
]
#: Rows without columns beyond V, with 64 of them, and with 32.
COLUMNS = [
    *(
        replace(ONE, head_dim=head_dim, v_head_dim=value_dim, **axes)
        for head_dim, value_dim in ((512, 512), (320, 256), (288, 256), (160, 128))
        for axes in (
            {"context": 1000},
            {"batch": 8, "q_heads": 16, "context": 2048, "page_size": 1},
            {"batch": 3, "q_heads": 64, "context": (700, 2, 65), "q_len": 3, "dtype": "fp16"},
            {"batch": 100, "page_size": None, "context": 1024},
            # A split for each SM.
            {"q_heads": 16, "context": 131_072},
        )
    ),
    *(
        replace(ONE, head_dim=512, v_head_dim=512, batch=8, q_heads=16, kv_dtype="e4m3", **axes)
        for axes in ({"context": 4096}, {"context": 2048, "page_size": 1})
    ),
]
#: Chosen tokens, and pages of parts of a stage; lengths that end anywhere in one.
CHOSEN = replace(ONE, batch=8, q_heads=16, context=2048, page_size=1)
RAGGED = {"batch": 5, "context": (700, 1, 65, 1999, 2048), "capacity": 2048}
GATHERED = [
    *(replace(CHOSEN, kv_dtype=kv_dtype) for kv_dtype in ("same", "e4m3", "e5m2")),
    *(replace(CHOSEN, q_heads=heads, dtype="fp16") for heads in (1, 8, 64, 128)),
    *(replace(CHOSEN, batch=batch) for batch in (1, 2, 64)),
    *(replace(CHOSEN, **RAGGED, q_heads=heads) for heads in (16, 128)),
    replace(CHOSEN, **RAGGED, kv_dtype="e4m3", dtype="fp16", scaled=False),
    replace(CHOSEN, **RAGGED, q_len=3, kv_dtype="e4m3"),
    *(replace(CHOSEN, **RAGGED, page_size=page_size) for page_size in (16, 32, 48, 65)),
    replace(CHOSEN, batch=1, context=60_000, page_size=3, q_heads=128),
    replace(CHOSEN, batch=100, context=500, q_heads=128, kv_dtype="e4m3"),
    replace(CHOSEN, context=20_000, page_size=None, select=2048),
    replace(CHOSEN, kv_dtype="e4m3", row_scales=True),
    replace(CHOSEN, **RAGGED, q_heads=128, kv_dtype="e4m3", row_scales=True),
    replace(CHOSEN, batch=64, page_size=16, kv_dtype="e4m3", row_scales=True),
]


@pytest.mark.parametrize("scale", [1.0, 12.0])
@pytest.mark.parametrize(
    "problem", [*PROBLEMS, *GATHERED, *COLUMNS], ids=lambda problem: problem.label
)
def test_right_and_the_same_bits_again(problem, scale):
    result = run_case("lean_mla", CheckCase(problem, scale, 0), spec_of_device(0), "cuda")
    assert result.failure is None


@pytest.mark.parametrize("problem", GATHERED, ids=lambda problem: problem.label)
def test_tokens_without_a_page_have_no_weight(problem):
    """Rows that nobody chose are NaN."""
    inputs = poison_unused(drop_pages(make_inputs(problem, "cuda", score_scale=4.0)))
    out, lse = lean_mla_with_kvcache(
        inputs.q,
        inputs.k_cache,
        inputs.context if inputs.cache_seqlens is None else inputs.cache_seqlens,
        block_table=inputs.block_table,
        k_descale=inputs.k_descale,
        causal=inputs.causal,
        return_softmax_lse=True,
    )
    written = replace(inputs, out=out, lse=lse)
    assert Reference(inputs).check(written).failure(problem.dtype) is None
    assert not out[0].any()
    assert lse[0].isneginf().all()


@pytest.mark.parametrize("kv_dtype", ["same", "e4m3"])
def test_a_graph_is_replayed_with_other_tokens(kv_dtype):
    problem = replace(CHOSEN, **RAGGED, kv_dtype=kv_dtype)
    inputs = make_inputs(problem, "cuda")
    lengths, table = inputs.cache_seqlens, inputs.block_table
    assert lengths is not None
    assert table is not None
    run = LEAN_MLA.prepare(inputs, LEAN_MLA.default_config(problem, spec_of_device(0)))
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(6):
        table.copy_(torch.randint(-1, inputs.k_cache.shape[0], table.shape))
        lengths.copy_(torch.randint(0, 2049, lengths.shape))
        inputs = drop_pages(inputs, seed)
        assert inputs.block_table is not None
        table.copy_(inputs.block_table)
        inputs.poison()
        graph.replay()
        assert Reference(inputs).check(inputs).failure("bf16") is None


@pytest.mark.parametrize("score", EQUAL_SCORES)
@pytest.mark.parametrize(
    "axes", [{"q_heads": 16}, {"q_heads": 16, "q_len": 4, "causal": False}, {"q_len": 2}], ids=str
)
def test_equal_scores_of_any_size(axes, score):
    case = CheckCase(replace(ONE, **axes), 1.0, 0, equal_scores=score)
    assert run_case("lean_mla", case, spec_of_device(0), "cuda").failure is None


@pytest.mark.parametrize("q_heads", [16, 128])
def test_scores_above_2_to_the_27th(q_heads):
    problem = replace(ONE, dtype="fp16", q_heads=q_heads, page_size=None)
    inputs = steep_scores(problem, "cuda")
    inputs.poison()
    LEAN_MLA.prepare(inputs, LEAN_MLA.default_config(problem, spec_of_device(0)))()
    assert Reference(inputs).check(inputs).failure("fp16") is None


@pytest.mark.parametrize("context", [700, 5000])
@pytest.mark.parametrize("q_heads", [16, 128])
def test_partials_hold_values_of_any_size(q_heads, context):
    problem = replace(ONE, dtype="bf16", q_heads=q_heads, context=context, page_size=None)
    inputs = values_of_two_sizes(problem, "cuda")
    inputs.poison()
    LEAN_MLA.prepare(inputs, LEAN_MLA.default_config(problem, spec_of_device(0)))()
    assert error_by_halves(inputs) < 5e-3


@pytest.mark.parametrize("kv_dtype", ["same", "e4m3"])
@pytest.mark.parametrize("page_size", [None, 64])
def test_lengths_that_the_cache_does_not_have(page_size, kv_dtype):
    """Scales of empty sequences are NaN."""
    problem = replace(ONE, context=1000, capacity=5056, page_size=page_size, lengths_on="device")
    problem = replace(problem, kv_dtype=kv_dtype)
    result = run_case("lean_mla", wild_case(problem, 1.0, 0), spec_of_device(0), "cuda")
    assert result.failure is None


def test_a_call_takes_other_tensors_and_lengths_with_the_same_launch():
    problem = replace(ONE, batch=2, context=1000, page_size=None, capacity=1024)
    for length in (1000, 961, 1024, 1, 1000):
        inputs = replace(make_inputs(problem, "cuda"), context=length)
        out, lse = lean_mla_with_kvcache(
            inputs.q, inputs.k_cache[:, :, 0], length, return_softmax_lse=True
        )
        written = replace(inputs, out=out, lse=lse)
        assert Reference(inputs).check(written).failure("bf16") is None


def test_another_scale_goes_with_the_same_launch():
    problem = replace(ONE, batch=2, context=1000, page_size=None, kv_dtype="e4m3")
    for _ in range(3):
        inputs = make_inputs(problem, "cuda")
        assert inputs.k_descale is not None
        scale = inputs.k_descale[0].clone()
        out, lse = lean_mla_with_kvcache(
            inputs.q, inputs.k_cache[:, :, 0], k_descale=scale, return_softmax_lse=True
        )
        written = replace(inputs, out=out, lse=lse)
        assert Reference(inputs).check(written).failure("bf16") is None


def test_torch_compile_takes_a_call_whole():
    inputs = make_inputs(replace(ONE, batch=2, context=700, page_size=None), "cuda")

    def call(q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        out = lean_mla_with_kvcache(q + 0, cache, 700)
        assert isinstance(out, torch.Tensor)
        return out * 2

    cache = inputs.k_cache[:, :, 0]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(inputs.q, cache), call(inputs.q, cache))


@pytest.mark.parametrize("kv_dtype", ["same", "e4m3"])
def test_streams_run_at_the_same_time(kv_dtype):
    streams = [torch.cuda.Stream() for _ in range(3)]
    problem = replace(ONE, batch=2, page_size=None, kv_dtype=kv_dtype)
    sets = [make_inputs(problem, "cuda") for _ in streams]
    results: list[list[Any]] = [[] for _ in streams]
    torch.cuda.synchronize()
    for _ in range(40):
        for stream, inputs, own in zip(streams, sets, results, strict=True):
            with torch.cuda.stream(stream):
                own.append(
                    lean_mla_with_kvcache(
                        inputs.q,
                        inputs.k_cache[:, :, 0],
                        k_descale=inputs.k_descale,
                        return_softmax_lse=True,
                    )
                )
    torch.cuda.synchronize()
    for inputs, own in zip(sets, results, strict=True):
        out, lse = own[0]
        written = replace(inputs, out=out, lse=lse)
        assert Reference(inputs).check(written).failure("bf16") is None
        assert all(torch.equal(out, later) for later, _ in own)
        assert all(torch.equal(lse, later) for _, later in own)


def test_a_graph_is_replayed_with_other_lengths():
    inputs = make_inputs(replace(ONE, batch=3, context=(4096, 1, 700)), "cuda")
    lengths = inputs.cache_seqlens
    assert lengths is not None
    run = LEAN_MLA.prepare(inputs, LEAN_MLA.default_config(ONE, spec_of_device(0)))
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    # Other queries every time: leftovers of the previous launch in a slot are wrong at any length.
    for tokens in ((4096, 1, 700), (4090, 3, 690), (5, 4000, 0), (4096, 1, 700), (64, 64, 4096)):
        inputs.q.normal_()
        lengths.copy_(torch.tensor(tokens).clamp(max=torch.tensor((4096, 64, 704))))
        inputs.poison()
        graph.replay()
        assert Reference(inputs).check(inputs).failure("bf16") is None
