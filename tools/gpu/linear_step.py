"""Time a decode step of linear attention, in torch: another function, with a state and no cache.

    python tools/gpu/linear_step.py

The gated delta rule of registered models (Qwen3-Next, Qwen3.5, Kimi Linear): S = a S, then
S += b (v - S k) k^T, and o = S q. It is no row of a sweep: rows are checked against attention over
K and V, and their floor is the time to read those.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from leanbench.core.llm.config import registry

#: Bytes of all states that launches rotate through: more than any L2 holds.
_ROTATED_BYTES = 512 << 20
_REPLAYS = 20


def step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: Any, beta: Any
) -> torch.Tensor:
    """Update a state (heads of all sequences, values, keys), and return its output.

    Args:
        q: (heads, keys, 1), as is k; v is (heads, values, 1).
        decay: (heads, 1, 1), or (heads, 1, keys) with a decay for each key (Kimi).
    """
    state.mul_(decay)
    change = beta * (v - torch.bmm(state, k))
    state.baddbmm_(change, k.mT)
    return torch.bmm(state, q)


def shapes() -> dict[tuple[int, int, int], list[str]]:
    """Return the models of each state: value heads, values and keys of a head."""
    found: dict[tuple[int, int, int], list[str]] = {}
    for name, config in registry().items():
        keys = config.keys
        if table := keys.get("linear_attn_config"):
            shape = table["num_heads"], table["head_dim"], table["head_dim"]
        elif heads := keys.get("linear_num_value_heads"):
            shape = heads, keys["linear_value_head_dim"], keys["linear_key_head_dim"]
        else:
            continue
        found.setdefault(shape, []).append(name)
    return found


def step_us(heads: int, values: int, keys: int) -> float:
    """Return the time of a step over cold states in fp32, replayed from a CUDA graph."""
    count = 2 + _ROTATED_BYTES // (4 * heads * values * keys)
    states = torch.randn(count, heads, values, keys, device="cuda")
    q, k, v = (torch.randn(heads, size, 1, device="cuda") for size in (keys, keys, values))
    k /= k.norm(dim=1, keepdim=True)
    decay, beta = (torch.rand(heads, 1, 1, device="cuda") for _ in range(2))
    step(states[0], q, k, v, decay, beta)
    graph, (start, end) = torch.cuda.CUDAGraph(), (torch.cuda.Event(True), torch.cuda.Event(True))
    with torch.cuda.graph(graph):
        for state in states:
            step(state, q, k, v, decay, beta)
    graph.replay()
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / _REPLAYS / count


def main() -> int:
    if not torch.cuda.is_available():
        print("linear_step needs a GPU: run it there", file=sys.stderr)
        return 2
    print("state (read and written once), batch: us a step, TB/s of those bytes; models")
    for (heads, values, keys), models in shapes().items():
        for batch in (1, 8, 64):
            moved = 2 * 4 * batch * heads * values * keys
            us = step_us(batch * heads, values, keys)
            print(
                f"{heads} x {values} x {keys} fp32 ({moved / 1e6:.1f} MB), {batch}: {us:.2f},"
                f" {moved / us / 1e6:.2f}; {', '.join(models)}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
