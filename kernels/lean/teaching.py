"""LeanAttention as one plain kernel: read this first.

Decode attention has one query token per sequence, so one CTA per head can leave most SMs idle.
LeanAttention also divides the contexts:

- An output tile is the output of one KV head's query heads in one sequence. Its context is cut into
  LeanTiles of `TILE_TOKENS` tokens.
- Stream-K lays the LeanTiles of all output tiles end to end and gives each CTA an equal work range,
  which can begin and end in the middle of an output tile.
- For its part of an output tile, a CTA computes a partial: the unnormalized output o, the maximum m
  of the scores, and the sum l of their exponentials. Re-scaled to one maximum, partials add up.
- The host block has an output tile's first LeanTile, the finishing block its last one. The host
  block waits for the other partials, merges them and writes the output.
- Each CTA signals its own partial before it waits, so nothing deadlocks if all CTAs are resident.

This is Algorithm 4 of arXiv 2405.10480v1: `# 16` marks its line 16, `# 3.20` Algorithm 3's line 20.
`python -m leanbench.kernels.lean.teaching` draws a small schedule and prints the largest error.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad, scaled_dot_product_attention

TILE_TOKENS = tl.constexpr(64)  # the paper's T_n


# fmt: off
@triton.jit
def lean_tile(q, k, v, tile_idx, iter_begin, iter_end, context, capacity, scale,
              TILE_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the partial of LeanTiles [iter_begin, iter_end), by FlashAttention-2's loop."""
    rows, columns = tl.arange(0, TILE_ROWS)[:, None], tl.arange(0, HEAD_DIM)
    o = tl.zeros((TILE_ROWS, HEAD_DIM), tl.float32)                                     # 3.8
    m = tl.full((TILE_ROWS, 1), float("-inf"), tl.float32)                              # 3.9
    l = tl.zeros((TILE_ROWS, 1), tl.float32)                                            # 3.9
    q_tile = tl.load(q + (tile_idx * TILE_ROWS + rows) * HEAD_DIM + columns)            # 3.16
    for iter in range(iter_begin, iter_end):                                            # 3.13
        tokens = iter * TILE_TOKENS + tl.arange(0, TILE_TOKENS)                         # 3.14
        valid = tokens < context  # a context's last LeanTile can be shorter
        # In K and V, output tiles are `capacity` tokens apart, also from sequence to sequence.
        offsets = (tile_idx.to(tl.int64) * capacity + tokens)[:, None] * HEAD_DIM + columns
        k_tile = tl.load(k + offsets, mask=valid[:, None], other=0.0)                   # 3.17
        v_tile = tl.load(v + offsets, mask=valid[:, None], other=0.0)                   # 3.18
        scores = tl.where(valid, tl.dot(q_tile, k_tile.T) * scale, float("-inf"))       # 3.20
        m_new = tl.maximum(m, tl.max(scores, 1, keep_dims=True))                        # 3.21
        p = tl.exp(scores - m_new)                                                      # 3.22
        l = tl.exp(m - m_new) * l + tl.sum(p, 1, keep_dims=True)                        # 3.23
        o = tl.exp(m - m_new) * o + tl.dot(p.to(v_tile.dtype), v_tile)                  # 3.24
        m = m_new                                                                       # 3.25
    return o, m, l                                                                      # 3.27


@triton.jit
def lean_kernel(q, k, v, out, lse, lengths, tile_starts, cta_starts, o_partials, m_partials,
                l_partials, flags, kv_heads, capacity, scale,
                TILE_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    rows, columns = tl.arange(0, TILE_ROWS)[:, None], tl.arange(0, HEAD_DIM)
    # Backwards: a CTA waits only for larger g, which a GPU starts, and the interpreter runs, first.
    g = tl.num_programs(0) - 1 - tl.program_id(0)                                       # 8
    iter, cta_end = tl.load(cta_starts + g), tl.load(cta_starts + g + 1)                # 9
    tile_idx = 0
    while iter < cta_end:                                                               # 10
        while tl.load(tile_starts + tile_idx + 1) <= iter:                              # 11
            tile_idx += 1  # iter / C_n in the paper, where all contexts have the same length
        tile_iter = tl.load(tile_starts + tile_idx)                                     # 12
        tile_iter_end = tl.load(tile_starts + tile_idx + 1)                             # 13
        local_iter = iter - tile_iter                                                   # 14
        local_iter_end = tl.minimum(tile_iter_end, cta_end) - tile_iter                 # 15
        context = tl.load(lengths + tile_idx // kv_heads)
        o, m, l = lean_tile(q, k, v, tile_idx, local_iter, local_iter_end, context, capacity,
                            scale, TILE_ROWS, HEAD_DIM)                                 # 16
        host_block = iter == tile_iter                                                  # 17
        finishing_block = cta_end >= tile_iter_end                                      # 18
        if not host_block:                                                              # 19
            slot = g * TILE_ROWS + rows  # one per CTA: its later output tiles begin in it
            tl.store(o_partials + slot * HEAD_DIM + columns, o)                         # 20
            tl.store(m_partials + slot, m)                                              # 21
            tl.store(l_partials + slot, l)                                              # 22
            tl.debug_barrier()  # all threads have stored before one of them signals
            tl.atomic_xchg(flags + g, 1, sem="release")                                 # 23
        else:                                                                           # 24
            if not finishing_block:                                                     # 25
                cta = g + 1  # up to the finishing block: line 26 of the paper is a misprint
                while tl.load(cta_starts + cta) < tile_iter_end:                        # 27
                    while tl.atomic_add(flags + cta, 0, sem="acquire") == 0:            # 28
                        pass
                    slot = cta * TILE_ROWS + rows
                    m_cta = tl.load(m_partials + slot)                                  # 29
                    l_cta = tl.load(l_partials + slot)                                  # 30
                    o_cta = tl.load(o_partials + slot * HEAD_DIM + columns)             # 31
                    m_new = tl.maximum(m_cta, m)                                        # 32
                    l = tl.exp(m_cta - m_new) * l_cta + tl.exp(m - m_new) * l           # 33
                    o = tl.exp(m_cta - m_new) * o_cta + tl.exp(m - m_new) * o           # 34
                    m = m_new                                                           # 35
                    cta += 1
            row = tile_idx * TILE_ROWS + rows
            tl.store(out + row * HEAD_DIM + columns, o / l)                             # 38
            tl.store(lse + row, m + tl.log(l))                                          # 39
        iter = tile_iter_end                                                            # 41
# fmt: on


def work_ranges(lengths, kv_heads, ctas):
    """Return the first LeanTile of every output tile and of every CTA, each up to the total."""
    lean_tiles = -(-lengths // TILE_TOKENS.value)  # 5
    tile_starts = pad(lean_tiles.repeat_interleave(kv_heads).cumsum(0), (1, 0))  # 6
    g, total = torch.arange(ctas + 1, device=lengths.device), tile_starts[-1]
    return tile_starts, g * (total // ctas) + g.minimum(total % ctas)  # 7; the first get one more


def lean_attention(q, k, v, lengths, ctas):
    """Return output and LSE of q (batch, heads, head_dim) over the first `lengths` (batch,) tokens
    of k and v (batch, KV heads, tokens, head_dim), computed by at most `ctas` CTAs.
    """
    batch, kv_heads, capacity, head_dim = k.shape
    group_size = q.shape[1] // kv_heads
    rows = max(16, triton.next_power_of_2(group_size))  # T_m; tensor cores need at least 16
    q_tiles = pad(q.reshape(batch * kv_heads, group_size, -1), (0, 0, 0, rows - group_size))  # 4
    out, lse = torch.zeros_like(q_tiles), torch.full(q_tiles.shape[:2], -torch.inf, device=q.device)
    if q.is_cuda:  # CTAs that wait must all be resident: at most one per SM
        ctas = min(ctas, torch.cuda.get_device_properties(q.device).multi_processor_count)
    if triton.knobs.runtime.interpret and q.dtype == torch.bfloat16:
        q_tiles, k, v = q_tiles.float(), k.float(), v.float()  # no bf16 products in the interpreter
    lengths = lengths.clamp(0, capacity)
    o_partials = torch.empty(ctas, rows, head_dim, device=q.device)
    m_partials, l_partials = torch.empty(2, ctas, rows, device=q.device)
    flags = torch.zeros(ctas, dtype=torch.int32, device=q.device)
    tensors = (q_tiles, k.contiguous(), v.contiguous(), out, lse, lengths)
    tensors += (*work_ranges(lengths, kv_heads, ctas), o_partials, m_partials, l_partials, flags)
    lean_kernel[(ctas,)](*tensors, kv_heads, capacity, head_dim**-0.5, rows, head_dim)  # 8
    return out[:, :group_size].reshape(q.shape), lse[:, :group_size].reshape(q.shape[:2])


if __name__ == "__main__":
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        raise SystemExit("no GPU found: set TRITON_INTERPRET=1 to run in Triton's interpreter")
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    lengths, ctas = torch.tensor([700, 130, 390]), 5
    q, k, v = torch.randn(3, 8, 64).half(), *torch.randn(2, 3, 2, 700, 64).half()
    tile_starts, cta_starts = work_ranges(lengths, 2, ctas)
    owners = torch.arange(ctas).repeat_interleave(cta_starts.diff())
    print("CTA of each LeanTile, from the host block to the finishing block:")
    for tile_idx, owner in enumerate(owners.split(tile_starts.diff().tolist())):
        print(f"sequence {tile_idx // 2}, KV head {tile_idx % 2}:", *owner.tolist())
    out, _ = lean_attention(q, k, v, lengths, ctas)
    mask = torch.arange(700) < lengths[:, None, None, None]
    q, k, v = q[:, :, None].double(), k.double(), v.double()
    expected = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[:, :, 0]
    print(f"Largest error against torch in fp64: {(out - expected).abs().max():.1e}")
