// Scores, softmax and weights of a stage, computed by its own warpgroup.
#pragma once
#include "lean/lanes.cuh"
#include "lean/schedule.cuh"
#include "mla/layout.cuh"
#include "lean/wgmma.cuh"

// Returns the factor above 0 that makes scores of a thread's row `half` exponents of 2: of both
// rows, or of each.
DEVICE float of_row(float scale, int) { return scale; }
DEVICE float of_row(float2 scale, int half) { return half ? scale.y : scale.x; }
DEVICE void set_ones(float &scale) { scale = 1.0f; }
DEVICE void set_ones(float2 &scale) { scale = make_float2(1.0f, 1.0f); }

struct Softmax : RowSums {
  bool rescales;  // a row of this warp has a scale other than 1

  // Turns scores into weights; `qk_scale` as in `of_row`.
  template <class Scale>
  DEVICE void weigh(float (&s)[32], Scale qk_scale, bool first) {
    rescales = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float high = -INFINITE;
#pragma unroll
      for (int i = 0; i < 16; i++) high = fmaxf(high, s[i / 2 * 4 + 2 * half + i % 2]);
      high = max_of_lanes<1, 4>(high) * of_row(qk_scale, half);
      scale[half] = 1.0f;
      if (first) {
        m[half] = fmaxf(high, LOWEST);
      } else if (high - m[half] > RESCALE_THRESHOLD) {
        scale[half] = ex2_approx_ftz(m[half] - high);
        m[half] = high;
        rescales = true;
      }
    }
    // Products of large scores are rounded before a reference is subtracted, see MOST_FUSED.
    if ((fabsf(m[0]) > MOST_FUSED) | (fabsf(m[1]) > MOST_FUSED)) {
#pragma unroll
      for (int i = 0; i < 32; i++) s[i] *= of_row(qk_scale, i / 2 % 2);
      set_ones(qk_scale);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; i++) {
        float &x = s[i / 2 * 4 + 2 * half + i % 2];
        x = ex2_approx_ftz(__fmaf_rn(x, of_row(qk_scale, half), -m[half]));
        sum += x;
      }
      l[half] = l[half] * scale[half] + sum;
    }
    rescales = __any_sync(~0u, rescales);
  }
};

// S += Q K^T of a column of a stage, or = without `adds`.
template <int STAGE>
DEVICE void add_scores(float (&s)[32], u32 shared, int column, bool adds) {
  const u64 a = matrix_descriptor(shared + column * COLUMN, 16);
  const u64 b = matrix_descriptor(shared + STAGE_AT<STAGE> + place_of(STAGE, column) * COLUMN, 16);
#pragma unroll
  for (int step = 0; step < 4; step++)
    wgmma_m64k16(s, a + 2 * step, b + 2 * step, adds || step > 0);
}

// Starts S = Q K^T of a stage, column by column as they arrive.
template <int STAGE>
DEVICE void start_scores(float (&s)[32], u32 shared, int filled) {
#pragma unroll
  for (int i = 0; i < QUERY_COLUMNS; i++) {
    const int column = column_in_turn(STAGE, i);
    mbarrier_try_wait_parity(shared + full_at(STAGE, column), filled % 2);
    if constexpr (GATHERS) fence_proxy_async_shared_cta();
    wgmma_fence();
    add_scores<STAGE>(s, shared, column, i > 0);
  }
  wgmma_commit_group();
}

// Clears the values of tokens past the sequence's end. They can be NaN, which weights of 0 do not
// remove.
template <int STAGE>
DEVICE void clear_end(u32 shared, int filled, int tokens) {
#pragma unroll 1
  for (int column = 0; column < QUERY_COLUMNS; column++)
    mbarrier_try_wait_parity(shared + full_at(STAGE, column), filled % 2);
  const int place = threadIdx.x % 128;
#pragma unroll 1
  for (int token = tokens + place / 8; token < TILE; token += 16)
#pragma unroll
    for (int column = 0; column < VALUES / 64; column++)
      st_shared_v4(shared + STAGE_AT<STAGE> + column * COLUMN + token * 128 + place % 8 * 16, 0);
  fence_proxy_async_shared_cta();
  bar_sync(OF_WARPGROUP + STAGE, 128);
}

// Masks tokens: the row sees the first `visible`, counted from the stage's first.
DEVICE void mask(float (&s)[32], const int (&visible)[2]) {
  if (min(visible[0], visible[1]) >= TILE) return;
  // Compared with constants, not with numbers of the thread, which would take a register each.
  const int first = threadIdx.x % 4 * 2, own[2] = {visible[0] - first, visible[1] - first};
#pragma unroll
  for (int i = 0; i < 32; i++)
    if (i / 4 * 8 + i % 2 >= own[i / 2 % 2]) s[i] = -INFINITE;
}

// Passes weights and maxima to the other warpgroup.
template <int STAGE>
DEVICE void publish(u32 shared, unsigned char *memory, const Softmax &softmax,
                    const u32 (&weights)[4][4]) {
  const int row = own_row(), lane = threadIdx.x % 32;
  if (lane % 4 == 0) {
    float2 *maxima = reinterpret_cast<float2 *>(memory + MAXIMA_AT) + STAGE * TILE;
#pragma unroll
    for (int half = 0; half < 2; half++)
      maxima[row + 8 * half] = make_float2(softmax.m[half], softmax.scale[half]);
  }
  // All warps have their scores, so their operands may be overwritten.
  bar_sync(OF_WARPGROUP + STAGE, 128);
  const int first = row * 128 + row % 8 * 16 + lane % 4 * 4;
#pragma unroll
  for (int i = 0; i < 16; i++)
    *reinterpret_cast<u32 *>(memory + WEIGHTS_AT_STAGE<STAGE> + (first ^ i / 2 * 16) +
                             i % 2 * 1024) = weights[i / 4][i % 4];
  fence_proxy_async_shared_cta();
  __syncwarp();
  if (lane == 0) mbarrier_arrive(shared + WEIGHTS_FULL + 8 * STAGE);
}

// Waits for the other warpgroup's weights, and adopts its maxima.
template <int STAGE>
DEVICE void take_over(u32 shared, const unsigned char *memory, int filled, Softmax &softmax) {
  mbarrier_try_wait_parity(shared + WEIGHTS_FULL + 8 * STAGE, filled % 2);
  const float2 *maxima = reinterpret_cast<const float2 *>(memory + MAXIMA_AT) + STAGE * TILE;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float2 log = maxima[own_row() + 8 * half];
    softmax.m[half] = log.x, softmax.scale[half] = log.y;
    softmax.l[half] *= log.y;
  }
  softmax.rescales = __any_sync(~0u, softmax.scale[0] != 1.0f || softmax.scale[1] != 1.0f);
}
