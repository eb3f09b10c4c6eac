// A latent cache in 8 bits: the bytes of a stage become its operands in fp16, and Q is in fp16, too.
#pragma once
#if KV_DTYPE != 0
#include "lean/fp8.cuh"
#include "mla/layout.cuh"
#include "lean/wgmma.cuh"
#include "mla/scores.cuh"

// Makes operands of 16 tokens of a run: a thread of 8 bytes of each of its columns. Tokens past the
// sequence's end, where the cache may have NaN, become zeros.
template <int STAGE, int TURN, int QUARTER>
__device__ __forceinline__ void convert_quarter(unsigned char *memory, int tokens) {
  const int row = 16 * QUARTER + threadIdx.x % 128 / 8, piece = threadIdx.x % 8;
  u32 words[RUN_COLUMNS][2];
#pragma unroll
  for (int i = 0; i < RUN_COLUMNS; i++) {
    uint2 bytes = make_uint2(0, 0);
    if (row < tokens)
      bytes = *reinterpret_cast<const uint2 *>(memory + STAGE_AT<STAGE> + run_at(TURN) +
                                               row * RUN_ROW + 64 * i + 8 * piece);
    words[i][0] = bytes.x, words[i][1] = bytes.y;
  }
  // All threads have loaded what operands of this quarter, and of the next, are stored over. Those of
  // the last run lie over bytes of their own quarter and the one before (the last two over those before
  // alone), those of the run before it over bytes of the quarter two before.
  if (TURN == RUNS - 1 ? QUARTER != 1 : TURN == RUNS - 2 && QUARTER == 1)
    bar_sync(OF_WARPGROUP + STAGE, 128);
#pragma unroll
  for (int i = 0; i < RUN_COLUMNS; i++) {
    const int column = run_in_turn(STAGE, TURN) * RUN_COLUMNS + i;
    // Operands of one column at a time take registers.
    hold(words[i]);
    *reinterpret_cast<uint4 *>(memory + STAGE_AT<STAGE> + place_of(STAGE, column) * COLUMN +
                               row * 128 + (piece ^ row % 8) * 16) =
        make_uint4(to_fp16<KV_DTYPE>(words[i][0], 0, 1), to_fp16<KV_DTYPE>(words[i][0], 2, 3),
                   to_fp16<KV_DTYPE>(words[i][1], 0, 1), to_fp16<KV_DTYPE>(words[i][1], 2, 3));
  }
}

// Makes operands of a run that has arrived.
template <int STAGE, int TURN>
__device__ __forceinline__ void convert_run(u32 shared, unsigned char *memory, int filled,
                                            int tokens) {
  mbarrier_try_wait_parity(shared + full_at(STAGE, TURN), filled % 2);
  // Until the other warpgroup has used its values, and the weights, of the stage before.
  if (TURN == 0) mbarrier_try_wait_parity(shared + empty_at(STAGE, 1 - STAGE), filled % 2 ^ 1);
  convert_quarter<STAGE, TURN, 3>(memory, tokens);
  convert_quarter<STAGE, TURN, 2>(memory, tokens);
  convert_quarter<STAGE, TURN, 1>(memory, tokens);
  convert_quarter<STAGE, TURN, 0>(memory, tokens);
  fence_proxy_async_shared_cta();
  bar_sync(OF_WARPGROUP + STAGE, 128);
}

// Makes operands of a run and starts their share of S = Q K^T.
template <int STAGE, int TURN>
__device__ __forceinline__ void start_scores_of_run(float (&s)[32], u32 shared, unsigned char *memory,
                                                    int filled, int tokens) {
  convert_run<STAGE, TURN>(shared, memory, filled, tokens);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < RUN_COLUMNS; i++) {
    const int column = run_in_turn(STAGE, TURN) * RUN_COLUMNS + i;
    const u64 a = matrix_descriptor(shared + column * COLUMN, 16);
    const u64 b =
        matrix_descriptor(shared + STAGE_AT<STAGE> + place_of(STAGE, column) * COLUMN, 16);
#pragma unroll
    for (int step = 0; step < 4; step++)
      wgmma_m64n64k16(s, a + 2 * step, b + 2 * step, TURN > 0 || i > 0 || step > 0);
  }
}

// Starts S = Q K^T of a stage: matrix instructions have one run while the next becomes operands.
template <int STAGE>
__device__ __forceinline__ void start_scores_of_bytes(float (&s)[32], u32 shared,
                                                      unsigned char *memory, int filled,
                                                      int tokens) {
  static_assert(RUNS == 3);
  start_scores_of_run<STAGE, 0>(s, shared, memory, filled, tokens);
  start_scores_of_run<STAGE, 1>(s, shared, memory, filled, tokens);
  start_scores_of_run<STAGE, 2>(s, shared, memory, filled, tokens);
  wgmma_commit_group();
}

// Q in bf16 becomes fp16, each row in units of its own; see `unit_of`. All consumers, four threads to
// a row.
__device__ __forceinline__ void divide_query(unsigned char *memory) {
  const int row = threadIdx.x / 4;
  const auto piece = [&](int i) {
    return reinterpret_cast<uint4 *>(memory + i / 2 * COLUMN + row * 128 +
                                     ((threadIdx.x % 4 * 2 + i % 2) ^ row % 8) * 16);
  };
  u32 largest = 0;
#pragma unroll 6
  for (int i = 0; i < 2 * QUERY_COLUMNS; i++) {
    const uint4 x = *piece(i);
    largest = larger(larger(larger(larger(largest, x.x), x.y), x.z), x.w);
  }
  largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
  const float unit = unit_of(largest);
#pragma unroll 6
  for (int i = 0; i < 2 * QUERY_COLUMNS; i++) {
    const uint4 x = *piece(i);
    *piece(i) = make_uint4(in_units(x.x, unit), in_units(x.y, unit), in_units(x.z, unit),
                           in_units(x.w, unit));
  }
  if (threadIdx.x % 4 == 0) reinterpret_cast<float *>(memory + ROW_UNITS_AT)[row] = unit;
  fence_proxy_async_shared_cta();
  bar_sync(OF_CONSUMERS, CONSUMERS);
}
#endif
