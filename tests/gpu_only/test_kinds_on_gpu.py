"""Every kind of call on a GPU: under torch.compile, in CUDA graphs with changing lengths, and on
several streams at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_calls import compiled
from every_kind import KINDS, PLAIN, called
from leanbench.kernels.launch import spec_of
from leanbench.kernels.lean.cuda_settings import cuda_config

from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core import registry
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

# The thread method ends the process, because a kernel that never ends cannot be interrupted.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180, method="thread")]

Call = Callable[[AttentionInputs], tuple[torch.Tensor, torch.Tensor]]
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def problem_of(kind: dict[str, Any]) -> AttentionProblem:
    """Return the problem with lengths on the device, in caches with spare capacity."""
    own = {"context": (700, 430), "capacity": 1024, **kind}
    if isinstance(own["context"], tuple):
        own["context"] = (700, 430)
    return replace(PLAIN, head_dim=64, lengths_on="device", **own)


def called_by_default(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a call with default settings."""
    return called(inputs, config=None)


def assert_right(inputs: AttentionInputs, call: Call) -> None:
    """Check the results, and appended tokens in the caches."""
    reference = Reference(inputs, max_elements=1 << 62)
    out, lse = call(inputs)
    check = reference.check(replace(inputs, out=out, lse=lse))
    assert check.failure("fp16" if out.dtype == torch.float16 else "bf16") is None


def redraw(inputs: AttentionInputs, seed: int) -> None:
    """Replace lengths, starts of sequences and query lengths without reallocation."""
    draw, batch = random.Random(seed), inputs.batch
    assert inputs.cache_seqlens is not None
    most = inputs.context - inputs.new_tokens
    lengths = [draw.randint(0, most) for _ in range(batch)]
    inputs.cache_seqlens.copy_(torch.tensor(lengths))
    if inputs.cache_leftpad is not None:
        pads = [draw.randint(0, length) for length in lengths]
        inputs.cache_leftpad.copy_(torch.tensor(pads))
    if inputs.block_table is not None:
        pages = torch.randperm(inputs.k_cache.shape[0], device=inputs.q.device)
        table = inputs.block_table
        inputs.block_table.copy_(pages[: table.numel()].view(table.shape))
    if inputs.cu_seqlens_q is not None:
        tokens, most = inputs.q.shape[0], inputs.q_len
        first = draw.randint(tokens - most, most)
        starts = [0, first, tokens]
        inputs.cu_seqlens_q.copy_(torch.tensor(starts))


#: Blocks of each KV head, in sequences longer and shorter than all of them.
CHOSEN = AttentionProblem(3, 32, 4, (5000, 100, 2048), 128, "bf16", select="16x128")


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"kv_layout": "NHD", "head_dim": 80, "kv_heads": 8, "sinks": True},
        {"kv_dtype": "e4m3", "page_scales": "page-head"},
        {"page_size": 3, "select": "200x3"},
    ],
    ids=["plain", "token-major", "fp8", "odd pages"],
)
@pytest.mark.parametrize("kernel", ["lean", "lean_triton", "fa2_cuda", "fixed_split_cuda"])
def test_blocks_of_each_kv_head(axes, kernel):
    problem = replace(CHOSEN, lengths_on="device", **{"page_size": 128, **axes})
    subject, gpu = registry.kernel(kernel), spec_of(torch.device("cuda"))
    if (reason := subject.unsupported_reason(problem)) is not None:
        pytest.skip(reason)
    inputs = poison_unused(make_inputs(problem, "cuda"))
    assert_right(inputs, lambda inputs: launched(subject, inputs, problem, gpu))
    if kernel == "lean":
        assert_right(inputs, called_by_default)


@pytest.mark.parametrize("copy", ["bulk", "async"])
def test_blocks_of_each_kv_head_in_many_rows(copy):
    inputs = poison_unused(make_inputs(replace(CHOSEN, q_heads=256), "cuda"))
    config = cuda_config(128, 4, 2, 1, 1, 64, copy, 1, False)
    assert_right(inputs, lambda inputs: called(inputs, config=config))


def test_blocks_that_change_between_replays():
    inputs = make_inputs(replace(CHOSEN, lengths_on="device"), "cuda")
    lengths = inputs.cache_seqlens
    assert inputs.block_table is not None
    assert lengths is not None
    called_by_default(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = called_by_default(inputs)
    for _ in range(3):
        inputs.block_table.random_(inputs.k_cache.shape[0])
        lengths.random_(0, 2049)
        graph.replay()
        assert_right(inputs, lambda _: (out, lse))


def launched(subject: Any, inputs: AttentionInputs, problem: AttentionProblem, gpu: Any) -> Any:
    """Launch a kernel with its default settings."""
    subject.prepare(inputs, subject.default_config(problem.known_to_host, gpu))()
    return inputs.out, inputs.lse


def whole_pages(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with pages for the whole capacity of each sequence."""
    if inputs.block_table is None:
        return inputs
    pages, size = inputs.block_table.numel(), inputs.k_cache.shape[1]
    caches = {
        name: torch.randn(pages, size, *cache.shape[2:], device=cache.device).to(cache.dtype)
        for name, cache in (("k_cache", inputs.k_cache), ("v_cache", inputs.v_cache))
    }
    scales = {
        name: torch.rand(pages, *own.shape[1:], device=own.device)
        for name in ("k_page_descale", "v_page_descale")
        if (own := getattr(inputs, name)) is not None
    }
    return replace(inputs, **caches, **scales)


@kinds
def test_torch_compile_takes_every_kind_whole(kind):
    call = compiled(called_by_default)
    for _ in range(2):
        assert_right(make_inputs(problem_of(kind), "cuda"), call)


@pytest.mark.parametrize("name", ["rotated", "sinks"])
def test_inductor_takes_what_changes_the_caches_and_what_does_not(name):
    torch._dynamo.reset()
    graph = torch.compile(called_by_default, fullgraph=True)
    assert_right(make_inputs(problem_of(KINDS[name]), "cuda"), graph)


@kinds
def test_a_captured_call_follows_what_changes_in_its_tensors(kind):
    inputs = whole_pages(make_inputs(problem_of(kind), "cuda"))
    called_by_default(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = called_by_default(inputs)

    def replayed(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        return out, lse

    for seed in range(6):
        redraw(inputs, seed)
        assert_right(inputs, replayed)
        first = out.clone(), lse.clone()
        # The same tokens are appended again.
        again = called_by_default(inputs)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@kinds
def test_streams_run_at_the_same_time(kind):
    streams = [torch.cuda.Stream() for _ in range(3)]
    sets = [make_inputs(problem_of(kind), "cuda") for _ in streams]
    references = [Reference(inputs, max_elements=1 << 62) for inputs in sets]
    results: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in streams]
    torch.cuda.synchronize()
    for _ in range(40):
        for stream, inputs, own in zip(streams, sets, results, strict=True):
            with torch.cuda.stream(stream):
                own.append(called_by_default(inputs))
    torch.cuda.synchronize()
    for inputs, reference, own in zip(sets, references, results, strict=True):
        out, lse = own[0]
        dtype = "fp16" if out.dtype == torch.float16 else "bf16"
        assert reference.check(replace(inputs, out=out, lse=lse)).failure(dtype) is None
        assert all(torch.equal(out, later) for later, _ in own)
        assert all(torch.equal(lse, later) for _, later in own)


def test_bits_of_packed_queries_do_not_depend_on_the_other_sequences():
    """Batch-invariant calls have the same `max_seqlen_q`."""
    problem = AttentionProblem(4, 8, 2, (3000, 90, 2048, 700), 128, q_lens=(5, 1, 3, 5))
    inputs = make_inputs(problem, "cuda")
    starts = inputs.read_query_starts()

    def rows_of(sequences: list[int]) -> AttentionInputs:
        q = [inputs.q[starts[own] : starts[own + 1]] for own in sequences]
        ends = torch.tensor([len(own) for own in q]).cumsum(0)
        assert inputs.cache_seqlens is not None
        return replace(
            inputs,
            q=torch.cat(q),
            k_cache=inputs.k_cache[sequences],
            v_cache=inputs.v_cache[sequences],
            cache_seqlens=inputs.cache_seqlens[sequences],
            cu_seqlens_q=torch.tensor([0, *ends.tolist()], dtype=torch.int32, device="cuda"),
            out=inputs.out[: int(ends[-1])],
            lse=inputs.lse[:, : int(ends[-1])],
        )

    def call(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        return called(inputs, config=None, batch_invariant=True)

    assert_right(inputs, call)
    whole, _ = call(inputs)
    for sequences in ([0], [3, 1], [2, 0, 1]):
        some, at = rows_of(sequences), 0
        out, _ = call(some)
        for own in sequences:
            count = starts[own + 1] - starts[own]
            expected = whole[starts[own] : starts[own + 1]]
            assert torch.equal(out[at : at + count], expected)
            at += count
