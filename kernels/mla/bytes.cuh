// A latent cache in 8 bits: the bytes of a stage are converted to operands in fp16, and so is Q.
#pragma once
#include "lean/fp8.cuh"
#include "mla/layout.cuh"
#include "lean/wgmma.cuh"
#include "mla/scores.cuh"

// Converts a run that has arrived to operands: a thread converts 16 bytes of each column, of two
// tokens. Tokens past the sequence's end, which can be NaN in the cache, become zeros.
template <int STAGE, int TURN>
DEVICE void convert_run(u32 shared, unsigned char *memory, int filled, int tokens) {
  const int row = threadIdx.x % 128 / 4, piece = threadIdx.x % 4;
  u32 words[RUN_COLUMNS][2][4];
  mbarrier_try_wait_parity(shared + full_at(STAGE, TURN), filled % 2);
#pragma unroll
  for (int i = 0; i < RUN_COLUMNS; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int token = row + 32 * half;
      uint4 bytes = make_uint4(0, 0, 0, 0);
      if (token < tokens)
        bytes = *reinterpret_cast<const uint4 *>(memory + STAGE_AT<STAGE> + run_at(TURN) +
                                                 token * RUN_ROW + 64 * i + 16 * piece);
      words[i][half][0] = bytes.x, words[i][half][1] = bytes.y;
      words[i][half][2] = bytes.z, words[i][half][3] = bytes.w;
    }
  if constexpr (TURN == 0)
    // The other warpgroup has used its values of the previous stage, and the weights.
    mbarrier_try_wait_parity(shared + empty_at(STAGE, 1 - STAGE), filled % 2 ^ 1);
  else
    // All threads have loaded the bytes that operands overwrite.
    bar_sync(OF_WARPGROUP + STAGE, 128);
#pragma unroll
  for (int i = 0; i < RUN_COLUMNS; i++) {
    const int column = run_in_turn(STAGE, TURN) * RUN_COLUMNS + i;
    unsigned char *operands = memory + STAGE_AT<STAGE> + place_of(STAGE, column) * COLUMN;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32(&of_token)[4] = words[i][half];
      // Operands of a single token at a time, to save registers.
      hold(words[i][half]);
#pragma unroll
      for (int j = 0; j < 2; j++)
        *reinterpret_cast<uint4 *>(operands + (row + 32 * half) * 128 +
                                   ((2 * piece + j) ^ row % 8) * 16) =
            make_uint4(to_fp16<Build::kv_dtype>(of_token[2 * j], 0, 1),
                       to_fp16<Build::kv_dtype>(of_token[2 * j], 2, 3),
                       to_fp16<Build::kv_dtype>(of_token[2 * j + 1], 0, 1),
                       to_fp16<Build::kv_dtype>(of_token[2 * j + 1], 2, 3));
    }
  }
  fence_proxy_async_shared_cta();
  bar_sync(OF_WARPGROUP + STAGE, 128);
}

// Converts a run to operands and starts its share of S = Q K^T.
template <int STAGE, int TURN>
DEVICE void start_scores_of_run(float (&s)[32], u32 shared, unsigned char *memory, int filled,
                                int tokens) {
  convert_run<STAGE, TURN>(shared, memory, filled, tokens);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < RUN_COLUMNS; i++) {
    const int column = run_in_turn(STAGE, TURN) * RUN_COLUMNS + i;
    add_scores<STAGE>(s, shared, column, TURN > 0 || i > 0);
  }
}

// Starts S = Q K^T of a stage: matrix instructions process one run while the next is converted.
template <int STAGE>
DEVICE void start_scores_of_bytes(float (&s)[32], u32 shared, unsigned char *memory, int filled,
                                  int tokens) {
  static_assert(!HAS_BYTES || RUNS == 3);
  start_scores_of_run<STAGE, 0>(s, shared, memory, filled, tokens);
  start_scores_of_run<STAGE, 1>(s, shared, memory, filled, tokens);
  start_scores_of_run<STAGE, 2>(s, shared, memory, filled, tokens);
  wgmma_commit_group();
}

// Rows of Q that are divided by at least 8 threads each, unless there are more. The others are
// zeros.
constexpr int DIVIDED_ROWS = ALL_ROWS > 32 ? TILE : ALL_ROWS > 16 ? 32 : ALL_ROWS > 8 ? 16 : 8;
constexpr int ROW_THREADS = CONSUMERS / DIVIDED_ROWS;
constexpr int ROW_PIECES = (8 * QUERY_COLUMNS + ROW_THREADS - 1) / ROW_THREADS;  // of a thread

// Converts Q from bf16 to fp16, each row in its own unit; see `unit_of`. All consumers.
DEVICE void divide_query(unsigned char *memory) {
  const int row = threadIdx.x / ROW_THREADS, thread = threadIdx.x % ROW_THREADS;
  const auto piece = [&](int i) {
    // Four threads have every second piece: two rows then have different banks.
    return ROW_THREADS == 4 ? 8 * (i / 2) + 2 * thread + i % 2 : i * ROW_THREADS + thread;
  };
  const auto at = [&](int n) {
    return reinterpret_cast<uint4 *>(memory + n / 8 * COLUMN + row * 128 + (n % 8 ^ row % 8) * 16);
  };
  u32 largest = 0;
#pragma unroll 6
  for (int i = 0; i < ROW_PIECES; i++) {
    if (piece(i) >= 8 * QUERY_COLUMNS) break;
    const uint4 x = *at(piece(i));
    largest = larger(larger(larger(larger(largest, x.x), x.y), x.z), x.w);
  }
  const float unit = unit_of(max_of_lanes<1, ROW_THREADS>(largest));
#pragma unroll 6
  for (int i = 0; i < ROW_PIECES; i++) {
    if (piece(i) >= 8 * QUERY_COLUMNS) break;
    const uint4 x = *at(piece(i));
    *at(piece(i)) = make_uint4(in_units(x.x, unit), in_units(x.y, unit), in_units(x.z, unit),
                               in_units(x.w, unit));
  }
  float *units = reinterpret_cast<float *>(memory + ROW_UNITS_AT);
  if (thread == 0) units[row] = unit;
  if (DIVIDED_ROWS < TILE && threadIdx.x >= DIVIDED_ROWS && threadIdx.x < TILE)
    units[threadIdx.x] = 1.0f;
  fence_proxy_async_shared_cta();
  bar_sync(OF_CONSUMERS, CONSUMERS);
}
