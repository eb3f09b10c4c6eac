// Copies of K and V for many_rows.cu without bulk copies: 16 bytes per lane of four warps, from
// rows at any address. Required by pages that are not multiples of 16 tokens.
#pragma once
#include "ptx.cuh"
#include "rows_layout.cuh"
#include "wgmma.cuh"

constexpr int COPY_ROWS = Build::chunk / COPY_WARPS;  // rows per warp; a lane has one's address
constexpr int ROWS_AT_ONCE = 32 / 8;  // with 64 numbers copied by a warp: 8 lanes per row

struct RowCopies {
  int page;  // of this lane's token of the next chunk

  // Returns this lane's token of the chunk from `token` on. Past the sequence's end, the last token
  // is copied again and masked.
  DEVICE static int own_token(const Position &part, int token) {
    const int row = (threadIdx.x / 32 - COPY_WARP) * COPY_ROWS + threadIdx.x % COPY_ROWS;
    return min(token + row, part.tokens - 1);
  }

  // Reads the page of a chunk, in flight while the previous chunk is copied.
  DEVICE void look_up(const Params &p, const Position &part, int kv_head, int token) {
    if constexpr (Build::page == 0) return;
    const int *row = table_row(p, part.sequence, kv_head);
    page = __ldg(row + own_token(part, token) / PAGE_OR_1);
  }

  // Starts this warp's copies of a stage's K, or V; `own` is the start of this lane's row.
  template <int COLUMNS>
  DEVICE static void copy(u32 to, u32 full, u32 empty, int parity, const KvNumber *own) {
    const int lane = threadIdx.x % 32, row = lane / 8, piece = lane % 8;
    to += ((threadIdx.x / 32 - COPY_WARP) * COPY_ROWS + row) * 128 + (piece ^ row) * 16;
    mbarrier_try_wait_parity(empty, parity ^ 1);
#pragma unroll 4
    for (int i = 0; i < COPY_ROWS; i += ROWS_AT_ONCE) {
      const auto *from =
          reinterpret_cast<const KvNumber *>(__shfl_sync(~0u, (u64)own, i + row)) + 8 * piece;
      const u32 at = (to ^ i % 8 * 16) + i * 128;
#pragma unroll
      for (int column = 0; column < COLUMNS; column++)
        cp_async_cg_16(at + column * TOKEN_COLUMN, from + 64 * column);
    }
    cp_async_mbarrier_arrive_noinc(full);
  }

  // Copies the chunk from `token` on, and looks up the next one's pages.
  DEVICE void copy_chunk(const Params &p, const Position &part, Stage stage, u32 shared, int token,
                         int kv_head, int cache_row) {
    const int at = own_token(part, token);
    const i64 outer = Build::page > 0 ? page : cache_row,
              from = Build::page > 0 ? at % PAGE_OR_1 : at;
    // Both addresses precede the look-up: otherwise a register move would wait for it.
    const KvNumber *k =
        p.k + kv_head * p.stride_k_head + outer * p.stride_k_batch + from * p.stride_k_token;
    const KvNumber *v =
        p.v + kv_head * p.stride_v_head + outer * p.stride_v_batch + from * p.stride_v_token;
    look_up(p, part, kv_head, token + Build::chunk);
    copy<K_COLUMNS>(stage.k(shared), stage.barrier(shared, K_FULL), stage.barrier(shared, K_EMPTY),
                    stage.parity(), k);
    copy<V_COLUMNS>(stage.v(shared), stage.barrier(shared, V_FULL), stage.barrier(shared, V_EMPTY),
                    stage.parity(), v);
  }
};
