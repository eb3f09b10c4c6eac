"""Calls to tune: common ones of servers, those that a server recorded, and random ones."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from leanbench.configs.lookup import refusal
from leanbench.core.errors import UserError
from leanbench.core.files import parse_json, read_file
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.cuda_settings import fill_lengths
from leanbench.kernels.mla.build import LATENT_DIM, VALUE_DIM

#: Query heads, KV heads and head_dim of models, most used first.
MODELS = (
    *((32, 8, 128), (64, 8, 128), (8, 1, 128), (64, 8, 64), (16, 8, 256), (32, 32, 128)),
    *((32, 8, 64), (24, 8, 128), (28, 4, 128), (14, 2, 64), (64, 4, 128), (40, 8, 128)),
    *((48, 8, 128), (32, 4, 128), (96, 8, 128), (128, 8, 64), (8, 1, 256), (8, 4, 256)),
    *((32, 32, 96), (32, 32, 80)),
)
#: Batches of servers' CUDA graphs, and bounds of their sequences.
_BATCHES = (1, 8, 32, 128)
_BOUNDS = (4096, 16384)
#: Query heads over a latent cache, on each of 8 GPUs and on one.
_LATENT_HEADS = (16, 128)
_LATENT = {"latent": True, "v_head_dim": VALUE_DIM}
#: Share of drawn calls over a latent cache.
_LATENT_SHARE = 0.1
#: Other drawn kinds of calls, and their weights.
_KINDS = {"plain": 46, "fp8": 22, "q": 14, "window": 10, "sinks": 8}
_MOST_KV_BYTES = 1.2e9
_MOST_MB = 100


def common(spec: GpuSpec) -> list[AttentionProblem]:
    """Return calls of servers: paged, with lengths on the device, in 16 and 8 bits, and over a
    latent cache on GPUs that `lean_mla` runs on; and of eager decoding: dense, with a length on the
    host. The first ones of any number are spread.
    """
    served = [
        AttentionProblem(
            *(batch, q_heads, kv_heads, bound, head_dim, "bf16", "NHD"),
            page_size=16,
            lengths_on="device",
            capacity=bound,
            kv_dtype=kv_dtype,
        )
        for kv_dtype, bound, (q_heads, kv_heads, head_dim), batch in product(
            ("same", "e4m3"), _BOUNDS, MODELS, _BATCHES
        )
    ]
    latent = [
        AttentionProblem(
            *(batch, q_heads, 1, bound, LATENT_DIM, "bf16"),
            page_size=64,
            lengths_on="device",
            **_LATENT,
        )
        for bound, q_heads, batch in product(_BOUNDS, _LATENT_HEADS, _BATCHES)
    ]
    served += [call for call in latent if refusal(call, spec) is None]
    eager = [
        AttentionProblem(1, q_heads, kv_heads, context, head_dim, "bf16", "HND")
        for context, (q_heads, kv_heads, head_dim) in product((1024, 8192, 32768), MODELS)
    ]
    random.Random(0).shuffle(served)
    random.Random(0).shuffle(eager)
    step = -(-len(served) // len(eager))
    return [call for at, one in enumerate(eager) for call in (*served[at * step :][:step], one)]


def fills(call: AttentionProblem) -> list[AttentionProblem]:
    """Return the problems to time for a call: one, or a fill of its cache each.

    Lengths that a ragged call has are used as they are.
    """
    if call.lengths_on == "host" or call.is_ragged:
        return [call]
    capacity, least = call.cache_capacity, max(1, call.append)
    return [
        replace(call, context=tuple(max(length, least) for length in lengths), capacity=capacity)
        for lengths in fill_lengths(call.batch, call.max_context)
    ]


def read_calls(path: Path) -> list[AttentionProblem]:
    """Read the calls that LEANBENCH_RECORD wrote, one JSON object per line, each once.

    Raises:
        UserError: it cannot be read, or has none.
    """
    calls: dict[AttentionProblem, None] = {}
    damaged = 0
    for line in read_file(path, _MOST_MB).splitlines():
        try:
            calls[AttentionProblem.from_dict(parse_json(line)["problem"])] = None
        except (ValueError, TypeError, KeyError, AttributeError, UserError):
            damaged += 1
    if not calls:
        raise UserError(
            f"{path} has no recorded calls: give a file that LEANBENCH_RECORD={path} wrote"
        )
    if damaged:
        warnings.warn(f"{damaged} lines of {path} are no recorded calls, left out", stacklevel=2)
    return list(calls)


def drawn(seed: int) -> Iterator[list[AttentionProblem]]:
    """Draw served calls from continuous distributions: each a list of fills of one signature.

    Half of them have lengths on the device: all long, all short, one long, and mixed.
    """
    plain, latent = random.Random(seed), random.Random(f"latent {seed}")
    while True:
        is_latent = latent.random() < _LATENT_SHARE
        rng = latent if is_latent else plain
        if is_latent:
            q_heads, kv_heads, head_dim = rng.choice([8, 16, 32, 64, 128]), 1, LATENT_DIM
        else:
            q_heads, kv_heads, head_dim = rng.choice(MODELS)
            gpus = rng.choice([1, 1, 2, 4, 8])
            q_heads, kv_heads = q_heads // gpus, max(1, kv_heads // gpus)
        batch = max(1, round(math.exp(rng.uniform(0, math.log(257)) - 0.3)))
        context = round(math.exp(rng.uniform(math.log(150), math.log(70_000))))
        if q_heads % kv_heads or batch * kv_heads * context * head_dim * 4 > _MOST_KV_BYTES:
            continue
        more = _drawn_latent_kind(rng) if is_latent else _drawn_kind(rng)
        lengths: list[int | tuple[int, ...]] = [context]
        if rng.random() < 0.5:
            more |= {"lengths_on": "device", "capacity": context}
            few = [round(context * rng.uniform(0.01, 0.12)) for _ in range(batch)]
            many = [round(context * rng.random() ** 3) for _ in range(batch)]
            shorter = few, [context, *few[1:]], many
            lengths = [(context,) * batch, *(tuple(max(9, n) for n in fill) for fill in shorter)]
        form = head_dim, rng.choice(["fp16", "bf16"]), rng.choice(["HND", "NHD"])
        yield [AttentionProblem(batch, q_heads, kv_heads, fill, *form, **more) for fill in lengths]


def _drawn_kind(rng: random.Random) -> dict[str, Any]:
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    more: dict[str, Any] = {"page_size": rng.choice([None, None, 16, 64])}
    if kind == "fp8":
        more |= {"kv_dtype": "e4m3"} | ({"q_dtype": "e4m3"} if rng.random() < 0.4 else {})
    elif kind == "q":
        more["q_len"] = rng.choice([2, 3, 4, 6, 8])
    elif kind == "window":
        more["window_left"] = rng.choice([127, 511, 1023, 4095])
    elif kind == "sinks":
        more |= {"sinks": True, "window_left": rng.choice([-1, 127])}
    return more


def _drawn_latent_kind(rng: random.Random) -> dict[str, Any]:
    kinds = {"page_size": rng.choice([None, 64, 128]), "q_len": rng.choice([1, 1, 1, 2, 4])}
    return {**_LATENT, **kinds, "kv_dtype": rng.choice(["same", "same", "e4m3"])}
