// Pages of other than a multiple of 64 tokens, such as tokens chosen one by one: the copying
// warpgroup copies rows by lanes, 16 bytes at a time, to the places of bulk copies.
//
// Tokens without a page of the cache get zeros as rows, and no weight.
#pragma once
#include "mla/layout.cuh"
#include "lean/wgmma.cuh"
#include "mla/row_scales.cuh"

constexpr int ROW_LANES = 4 * KV_BYTES;            // copy 64 numbers of a row, or 128 with scales
constexpr int LANE_ROWS = TILE * ROW_LANES / 128;  // of a stage
constexpr int ROW_STEP = TILE / LANE_ROWS;         // from a lane's row to its next
constexpr int STEP_BYTES = Build::row_scales ? 1 : KV_BYTES;  // of the cache's strides
// The barrier of a copy counts every lane's.
constexpr int COPY_ARRIVALS = GATHERS ? 128 : 1;

// Returns the page of a token of the part's sequence, or -1.
DEVICE int page_of(const Params &p, const Position &part, int token) {
  if (token >= part.tokens) return -1;
  const int page = __ldg(p.block_table + (i64)part.sequence * p.stride_table + token / PAGE_OR_1);
  return (u32)page < (u32)p.pages ? page : -1;
}

// Returns whether rows have this lane's piece of a column: the last one can be shorter, or empty.
DEVICE bool has_piece(int column) {
  return column < OTHER_COLUMN || LATENT == VALUES + 64 ||
         64 * column + threadIdx.x % ROW_LANES * 16 / KV_BYTES < LATENT;
}

// A lane of the copying warpgroup, and its rows of a stage.
struct Gather {
  int pages[LANE_ROWS];  // of the next stage

  DEVICE static int row() { return threadIdx.x % 128 / ROW_LANES; }
  DEVICE static int piece() { return threadIdx.x % ROW_LANES; }

  // Reads the pages of the stage from `token` on, in flight while the previous one is copied.
  DEVICE void look_up(const Params &p, const Position &part, int token) {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) pages[i] = page_of(p, part, token + row() + i * ROW_STEP);
  }

  // Copies a stage, and looks up the next one's pages.
  template <int STAGE, int GROUPS>
  DEVICE void copy(const Params &p, const Position &part, u32 shared, int filled, int token) {
    const unsigned char *from[LANE_ROWS];
    bool exists[LANE_ROWS];
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
      exists[i] = pages[i] >= 0;
      const int place = (token + row() + i * ROW_STEP) % PAGE_OR_1;
      from[i] = reinterpret_cast<const unsigned char *>(p.k) + 16 * piece() +
                STEP_BYTES * (max(pages[i], 0) * p.stride_k_batch + (i64)place * p.stride_k_token);
    }
    look_up(p, part, token + TILE);
    mbarrier_try_wait_parity(shared + empty_at(STAGE, STAGE), filled % 2 ^ 1);
    if constexpr (HAS_BYTES)
      copy_bytes<STAGE>(from, exists, shared);
    else if constexpr (Build::row_scales)
      copy_scaled<STAGE>(from, exists, shared, filled);
    else
      copy_columns<STAGE, GROUPS>(from, exists, shared, filled);
  }

  // The copies of a stage's rows, each at `from` if it exists: of bytes,
  template <int STAGE>
  DEVICE static void copy_bytes(const unsigned char *const (&from)[LANE_ROWS],
                                const bool (&exists)[LANE_ROWS], u32 shared) {
    const u32 to = shared + STAGE_AT<STAGE> + row() * RUN_ROW + piece() * 16;
#pragma unroll
    for (int turn = 0; turn < RUNS; turn++) {
#pragma unroll
      for (int i = 0; i < LANE_ROWS; i++)
#pragma unroll
        for (int column = 0; column < RUN_COLUMNS; column++)
          cp_async_cg_16(to + run_at(turn) + i * ROW_STEP * RUN_ROW + 64 * column,
                         from[i] + RUN_ROW * run_in_turn(STAGE, turn) + 64 * column,
                         exists[i] && has_piece(RUN_COLUMNS * run_in_turn(STAGE, turn) + column));
      cp_async_mbarrier_arrive_noinc(shared + full_at(STAGE, turn));
    }
  }

  // of bytes with scales and other columns,
  template <int STAGE>
  DEVICE static void copy_scaled(const unsigned char *const (&from)[LANE_ROWS],
                                 const bool (&exists)[LANE_ROWS], u32 shared, int filled) {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++)
      if (piece() == 0)
        cp_async_cg_16(
            shared + ROW_SCALES_AT + (STAGE * TILE + row() + i * ROW_STEP) * SCALES_OF_ROW,
            from[i] + VALUES, exists[i]);
    const u32 bytes = shared + SCALED_RUNS_AT<STAGE> + byte_piece_at(row(), piece());
#pragma unroll
    for (int turn = 0; turn < SCALED_RUNS; turn++) {
#pragma unroll
      for (int i = 0; i < LANE_ROWS; i++)
        cp_async_cg_16(bytes + turn * SCALED_RUN + i * ROW_STEP * 128,
                       from[i] + 128 * scaled_run(STAGE, turn), exists[i]);
      cp_async_mbarrier_arrive_noinc(shared + full_at(STAGE, turn));
    }
    mbarrier_try_wait_parity(shared + empty_at(STAGE, 1 - STAGE), filled % 2 ^ 1);
    const u32 to =
        shared + STAGE_AT<STAGE> + OTHER_COLUMN * COLUMN + row() * 128 + (piece() ^ row() % 8) * 16;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++)
      cp_async_cg_16(to + i * ROW_STEP * 128, from[i] + OTHER_AT_ROW, exists[i]);
    cp_async_mbarrier_arrive_noinc(shared + full_at(STAGE, OTHER_COLUMN));
  }

  // and of 16-bit numbers.
  template <int STAGE, int GROUPS>
  DEVICE static void copy_columns(const unsigned char *const (&from)[LANE_ROWS],
                                  const bool (&exists)[LANE_ROWS], u32 shared, int filled) {
    const u32 to = shared + STAGE_AT<STAGE> + row() * 128 + (piece() ^ row() % 8) * 16;
#pragma unroll
    for (int turn = 0; turn < QUERY_COLUMNS; turn++) {
      const int column = column_in_turn(STAGE, turn);
      if (turn == OwnColumns<GROUPS>::FIRST_OF_OTHER)
        mbarrier_try_wait_parity(shared + empty_at(STAGE, 1 - STAGE), filled % 2 ^ 1);
#pragma unroll
      for (int i = 0; i < LANE_ROWS; i++)
        cp_async_cg_16(to + column * COLUMN + i * ROW_STEP * 128, from[i] + 128 * column,
                       exists[i] && has_piece(column));
      cp_async_mbarrier_arrive_noinc(shared + full_at(STAGE, column));
    }
  }
};

// The pages of two tokens of a stage, read by a lane of a computing warp.
struct TokenPages {
  int pages[2];

  DEVICE void look_up(const Params &p, const Position &part, int chunk) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      pages[half] = page_of(p, part, part.token + chunk * TILE + 32 * half + threadIdx.x % 32);
  }

  // Masks tokens without a page.
  DEVICE void mask(float (&s)[32]) const {
    const u32 exist[2] = {__ballot_sync(~0u, pages[0] >= 0), __ballot_sync(~0u, pages[1] >= 0)};
    if ((exist[0] & exist[1]) == ~0u) return;
#pragma unroll
    for (int i = 0; i < 32; i++)
      if (!(exist[i / 16] >> (i / 4 % 4 * 8 + threadIdx.x % 4 * 2 + i % 2) & 1)) s[i] = -INFINITE;
  }
};
