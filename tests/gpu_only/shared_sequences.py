"""Calls over sequences shared by GPUs, checked on each of them: ``torchrun --nproc-per-node 2
tests/gpu_only/shared_sequences.py SEED chain=5 fuzz=60 late=1``, with seconds of each.

Every rank exits with 0, or with a traceback.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist

from leanbench.distributed import ContextGroup, lean_attn_with_kvcache
from leanbench.records.environment import kernels_hash

#: As in leanbench.check.reference.
_LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
_LSE_LIMIT = 1e-3
_MOST_PROBLEMS, _FAMILIES = 5000, 10


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return every rank's tensor: (ranks, *)."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def reference(arguments: dict[str, Any], tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output (batch, heads, q_len, head_dim) and LSE (batch, heads, q_len) of all shards."""
    q, k_cache, v_cache = (arguments[name].double() for name in ("q", "k_cache", "v_cache"))
    table, softcap = arguments["block_table"], arguments["softcap"]
    q = q.unflatten(2, (k_cache.shape[2], -1)) * q.shape[3] ** -0.5
    own = []
    for sequence, length in enumerate(tokens):
        if table is None:
            k, v = k_cache[sequence, :length], v_cache[sequence, :length]
        else:
            pages = table[sequence].long()
            k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        scores = torch.einsum("qhgd,thd->hgqt", q[sequence], k)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        lse = torch.logsumexp(scores, -1, keepdim=True)
        out = torch.einsum("hgqt,thd->hgqd", torch.exp(scores - lse.nan_to_num(neginf=0.0)), v)
        own.append(torch.cat((out, lse), -1).flatten(0, 1))
    outs, lses = gathered(torch.stack(own)).split((q.shape[-1], 1), -1)
    whole = torch.logsumexp(lses, 0)
    sinks = arguments["sinks"]
    if sinks is not None:
        whole = torch.logaddexp(whole, sinks.double()[:, None, None].expand_as(whole))
    weights = torch.exp(lses - whole.nan_to_num(neginf=0.0))
    return (weights * outs).sum(0), whole.squeeze(-1)


def families(count: int, seed: int) -> list[dict[str, Any]]:
    """Return random families, each of which needs builds of the kernel.

    A build takes half a second. The first family is that of most measured problems.
    """
    draw = random.Random(seed)
    plain = {"group": 4, "head_dim": 128, "dtype": torch.float16, "q_len": 1, "page": None}
    plain |= {"on_device": True, "softcap": 0.0, "sinks": False}
    return [plain | {"batch_invariant": False, "fp8": False}] + [
        {
            "group": draw.choice([1, 4, 8]),
            "head_dim": draw.choice([64, 128]),
            "dtype": draw.choice([torch.float16, torch.bfloat16]),
            "q_len": draw.choice([1, 1, 1, 2]),
            "page": draw.choice([None, None, 16]),
            "on_device": draw.random() < 0.7,
            "softcap": draw.choice([0.0, 0.0, 20.0]),
            "sinks": draw.random() < 0.2,
            "batch_invariant": draw.random() < 0.2,
            "fp8": draw.random() < 0.2,
        }
        for _ in range(count - 1)
    ]


def drawn(
    draw: random.Random, kinds: list[dict[str, Any]], rank: int, size: int
) -> tuple[dict[str, Any], list[int]]:
    """Return a call's arguments, and the rank's own tokens of each sequence.

    Q and the sinks are the same on all ranks.
    """
    batch, kv_heads = draw.choice([1, 1, 2, 3, 8]), draw.choice([1, 2, 4, 8])
    family, most = draw.choice(kinds), draw.choice([40, 700, 5000])
    head_dim, dtype, page = family["head_dim"], family["dtype"], family["page"]
    q_heads = kv_heads * family["group"]
    lengths = [[draw.choice([0, draw.randint(0, most)]) for _ in range(batch)] for _ in range(size)]
    seed = draw.getrandbits(32)
    if not family["on_device"]:
        lengths = [[own[0]] * batch for own in lengths]
    device = torch.device("cuda")
    same = torch.Generator(device).manual_seed(seed)
    own = torch.Generator(device).manual_seed(seed + 1 + rank)
    q = torch.randn(batch, family["q_len"], q_heads, head_dim, device=device, generator=same)
    sinks = torch.randn(q_heads, device=device, generator=same)
    tokens = lengths[rank]
    capacity = max(16, -(-max(tokens) // 16) * 16)
    shape = (batch, capacity, kv_heads, head_dim)
    table = None
    if page is not None:
        pages = batch * capacity // page
        shape = (pages, page, kv_heads, head_dim)
        table = torch.randperm(pages, device=device, generator=own).int().view(batch, -1)
    kv_dtype = torch.float8_e4m3fn if family["fp8"] else dtype
    k, v = (torch.randn(shape, device=device, generator=own).to(kv_dtype) for _ in range(2))
    return {
        "q": (3 * q).to(dtype),
        "k_cache": k,
        "v_cache": v,
        "cache_seqlens": torch.tensor(tokens, dtype=torch.int32, device=device)
        if family["on_device"]
        else tokens[0],
        "block_table": table,
        "softcap": family["softcap"],
        "sinks": sinks if family["sinks"] else None,
        "batch_invariant": family["batch_invariant"],
    }, tokens


def check_one(group: ContextGroup, draw: random.Random, kinds: list[dict[str, Any]]) -> None:
    check_call(group, *drawn(draw, kinds, group.rank, group.size))


def check_call(group: ContextGroup, arguments: dict[str, Any], tokens: list[int]) -> None:
    """Check that a call is right, and the same on all ranks."""
    expected, expected_lse = reference(arguments, tokens)
    out, lse = lean_attn_with_kvcache(**arguments, group=group, return_softmax_lse=True)
    group.check()
    bits = gathered(out.view(torch.int32))
    error = (out.double().transpose(1, 2) - expected).flatten(1).norm(dim=1)
    norm = expected.flatten(1).norm(dim=1)
    empty = expected_lse.isneginf()
    off = (lse.double() - expected_lse).abs() / expected_lse.abs().clamp(min=1.0)
    verdicts = {
        "all ranks have the same bits": (bits == bits[0]).all(),
        "the output is right": (error <= _LIMITS[out.dtype] * norm).all(),
        "the LSE is right": torch.where(empty, lse.isneginf(), off <= _LSE_LIMIT).all(),
    }
    right = torch.stack([*verdicts.values()]).tolist()
    wrong = [name for name, is_right in zip(verdicts, right, strict=True) if not is_right]
    shapes = {name: getattr(value, "shape", value) for name, value in arguments.items()}
    assert not wrong, (f"not so: {', '.join(wrong)}", tokens, shapes, error / norm, off.max())


def agree(go_on: bool) -> bool:
    """Return rank 0's answer on all ranks."""
    answer = torch.tensor(int(go_on), device="cuda")
    dist.broadcast(answer, 0)
    return bool(answer)


def fuzz(group: ContextGroup, seconds: float, seed: int) -> str:
    """Check random problems, at most `_MOST_PROBLEMS`."""
    draw, begun, count = random.Random(seed), time.monotonic(), 0
    kinds = families(_FAMILIES, seed)
    while count < _MOST_PROBLEMS and agree(time.monotonic() - begun < seconds):
        for _ in range(20):
            check_one(group, draw, kinds)
            count += 1
        if count % 1000 == 0 and group.rank == 0:
            print(f"{count} problems right after {time.monotonic() - begun:.1f} s", flush=True)
    return f"{count} problems, seed {seed}"


def chain(group: ContextGroup, seconds: float, seed: int) -> str:
    """Replay a graph of dependent steps: the output of each step is the next one's query.

    Each rank is delayed before some replays, and before some steps of every replay. The first step
    is compared with the reference, every replay with the bits of the first.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    query = torch.randn(2, 1, 16, 128, device="cuda", generator=generator).half()
    own = torch.Generator("cuda").manual_seed(seed + 1 + group.rank)
    k, v = (torch.randn(2, 1000, 4, 128, device="cuda", generator=own).half() for _ in range(2))
    tokens = [1000, 3 + group.rank]
    lengths = torch.tensor(tokens, dtype=torch.int32, device="cuda")
    rest = {"block_table": None, "softcap": 0.0, "sinks": None}
    caches = {"k_cache": k, "v_cache": v, "cache_seqlens": lengths}
    check_call(group, {"q": query, **caches, **rest}, tokens)
    step: Callable[..., Any] = lean_attn_with_kvcache
    draw = random.Random(1000 * seed + group.rank)
    graph, steps = torch.cuda.CUDAGraph(), 51
    state = query.clone()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            if draw.random() < 0.1:
                torch.cuda._sleep(draw.randint(1, 100_000))
            state.copy_(10 * step(state, **caches, group=group))
    begun, count, first = time.monotonic(), 0, None
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    while agree(time.monotonic() - begun < seconds):
        for _ in range(20):
            state.copy_(query)
            if draw.random() < 0.2:
                torch.cuda._sleep(draw.randint(1, 2_000_000))
            graph.replay()
            first = state.clone() if first is None else first
            wrong += (state.view(torch.int16) != first.view(torch.int16)).any()
            count += steps
        group.check()
    assert int(wrong) == 0, f"{int(wrong)} replays had other bits"
    assert first is not None
    bits = gathered(first.view(torch.int32))
    assert (bits == bits[0]).all(), "ranks have different bits"
    return f"{count} steps"


def late(group: ContextGroup, seconds: float, seed: int) -> str:
    """Call on rank 0 alone, ten times in a graph.

    The first call waits for the group's limit; then there is an error, and outputs are NaN.
    """
    own = ContextGroup(timeout_s=1.0)
    step: Callable[..., Any] = lean_attn_with_kvcache
    query = torch.ones(1, 1, 8, 64, device="cuda").half()
    cache = torch.ones(1, 64, 2, 64, device="cuda").half()
    step(query, cache, cache, group=own)
    own.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [step(query, cache, cache, group=own) for _ in range(10)]
    dist.barrier()
    sentence = ""
    if own.rank == 0:
        begun = time.monotonic()
        graph.replay()
        try:
            own.check()
        except RuntimeError as error:
            sentence = str(error)
        waited = time.monotonic() - begun
        assert all(out.isnan().all() for out in outs)
        assert sentence.startswith("rank "), sentence
        assert 0.9 < waited < 2.0, waited
    dist.barrier()
    return sentence


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    group = ContextGroup()
    seed, runs = int(sys.argv[1]), {"fuzz": fuzz, "chain": chain, "late": late}
    if group.rank == 0:
        gpus = f"{group.size} {torch.cuda.get_device_name()}, kernels {kernels_hash()}"
        print(f"{' '.join(sys.argv[1:])} on {gpus}, {date.today()}", flush=True)
    for words in sys.argv[2:]:
        name, _, seconds = words.partition("=")
        result = runs[name](group, float(seconds), seed)
        if group.rank == 0:
            print(f"{name}: {result}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
