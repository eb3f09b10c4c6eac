// Rows as in DeepSeek's caches, of 656 bytes: the bytes of a stage are converted to operands in
// bf16.
//
// They arrive in runs of 128 columns, in the memory of the stage's own warpgroup's values. First
// come the values of the other warpgroup, so that operands never lie over bytes of a later run.
#pragma once
#include "mla/layout.cuh"
#include "lean/wgmma.cuh"
#include "mla/scores.cuh"

constexpr int SCALED_RUNS = VALUES / 128, SCALED_RUN = TILE * 128;
constexpr int OTHER_AT_ROW = VALUES + SCALES_OF_ROW;  // of the columns in bf16, in bytes

// Returns the columns of a run, in 128.
DEVICE constexpr int scaled_run(int stage, int turn) {
  return turn < SCALED_RUNS / 2 ? (1 - stage) * SCALED_RUNS / 2 + turn
                                : stage * SCALED_RUNS / 2 + turn - SCALED_RUNS / 2;
}

// Returns the position of a run's bytes in shared memory.
template <int STAGE>
constexpr int SCALED_RUNS_AT = STAGE_AT<STAGE> + STAGE *HALF_COLUMNS *COLUMN;

// Returns the position of 16 bytes of a run: two rows have different banks.
DEVICE int byte_piece_at(int row, int piece) { return row * 128 + (piece ^ row % 2 * 4) * 16; }

// Converts bytes of a word's half from e4m3 to bf16, times a scale.
template <int HALF>
DEVICE u32 scaled_half(u32 word, float scale) {
  const u32 both = cvt_rn_f16x2_e4m3x2_half<HALF>(word);
  return cvt_rn_x2<true>(cvt_f32_f16(both & 0xffff) * scale, cvt_f32_f16(both >> 16) * scale);
}

// Converts a run that has arrived, and starts its share of S = Q K^T. A thread converts 16 bytes of
// each column, of two tokens.
template <int STAGE, int TURN>
DEVICE void start_scores_of_scaled_run(float (&s)[32], u32 shared, unsigned char *memory,
                                       int filled) {
  constexpr int RUN = scaled_run(STAGE, TURN);
  const int row = threadIdx.x % 128 / 4, piece = threadIdx.x % 4;
  uint4 bytes[2][2];
  float scales[2];
  mbarrier_try_wait_parity(shared + full_at(STAGE, TURN), filled % 2);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int token = row + 32 * half;
    scales[half] =
        ld_shared_f32(shared + ROW_SCALES_AT + (STAGE * TILE + token) * SCALES_OF_ROW + 4 * RUN);
#pragma unroll
    for (int i = 0; i < 2; i++)
      bytes[half][i] = *reinterpret_cast<const uint4 *>(
          memory + SCALED_RUNS_AT<STAGE> + TURN * SCALED_RUN + byte_piece_at(token, 4 * i + piece));
  }
  if constexpr (TURN == 0)
    // The other warpgroup has used its values of the previous stage.
    mbarrier_try_wait_parity(shared + empty_at(STAGE, 1 - STAGE), filled % 2 ^ 1);
  else if constexpr (TURN == SCALED_RUNS - 1)
    // All threads have loaded the bytes that operands overwrite.
    bar_sync(OF_WARPGROUP + STAGE, 128);
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 of_token = bytes[half][i];
      const u32 words[4] = {of_token.x, of_token.y, of_token.z, of_token.w};
#pragma unroll
      for (int j = 0; j < 2; j++)
        *reinterpret_cast<uint4 *>(memory + STAGE_AT<STAGE> + (2 * RUN + i) * COLUMN +
                                   (row + 32 * half) * 128 + ((2 * piece + j) ^ row % 8) * 16) =
            make_uint4(scaled_half<0>(words[2 * j], scales[half]),
                       scaled_half<1>(words[2 * j], scales[half]),
                       scaled_half<0>(words[2 * j + 1], scales[half]),
                       scaled_half<1>(words[2 * j + 1], scales[half]));
    }
  fence_proxy_async_shared_cta();
  bar_sync(OF_WARPGROUP + STAGE, 128);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 2; i++) add_scores<STAGE>(s, shared, 2 * RUN + i, TURN > 0 || i > 0);
}

// Starts S = Q K^T of a stage: matrix instructions process one run while the next is converted.
template <int STAGE>
DEVICE void start_scores_of_scaled_rows(float (&s)[32], u32 shared, unsigned char *memory,
                                        int filled) {
  static_assert(!Build::row_scales || SCALED_RUNS == 4);
  start_scores_of_scaled_run<STAGE, 0>(s, shared, memory, filled);
  start_scores_of_scaled_run<STAGE, 1>(s, shared, memory, filled);
  start_scores_of_scaled_run<STAGE, 2>(s, shared, memory, filled);
  start_scores_of_scaled_run<STAGE, 3>(s, shared, memory, filled);
  mbarrier_try_wait_parity(shared + full_at(STAGE, OTHER_COLUMN), filled % 2);
  fence_proxy_async_shared_cta();
  wgmma_fence();
  add_scores<STAGE>(s, shared, OTHER_COLUMN, true);
  wgmma_commit_group();
}
