// Reductions over the lanes of a warp, and arithmetic of softmax and merges.
#pragma once
#include "ptx.cuh"

DEVICE float maximum(float x, float y) { return fmaxf(x, y); }
DEVICE u32 maximum(u32 x, u32 y) { return max(x, y); }

// Returns the maximum over lanes whose numbers differ in the bits from FROM on, below TO.
template <int FROM, int TO, class Number>
DEVICE Number max_of_lanes(Number x) {
#pragma unroll
  for (int step = FROM; step < TO; step *= 2) x = maximum(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// Returns the sum over the same lanes.
template <int FROM, int TO>
DEVICE float sum_of_lanes(float x) {
#pragma unroll
  for (int step = FROM; step < TO; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

DEVICE float4 times(float4 x, float by) {
  return make_float4(x.x * by, x.y * by, x.z * by, x.w * by);
}

DEVICE void add_weighted(float4 &sum, float weight, const float4 &x) {
  sum.x += weight * x.x, sum.y += weight * x.y;
  sum.z += weight * x.z, sum.w += weight * x.w;
}

// Returns the factor of a row's sum of values; 0 if no token was seen, or NaN.
DEVICE float reciprocal(float l) { return l > 0.0f ? rcp_approx_ftz(l) : l; }

// Returns the LSE of a row from its reference, in units of log2, and its sum of weights.
DEVICE float lse_of(float m, float l) {
  return l == 0.0f ? -INFINITE : (m + lg2_approx_ftz(l)) * 0.6931471805599453f;
}

// References of the weights of a thread's two rows, and their sums over its tokens so far.
struct RowSums {
  float m[2], l[2];
  float scale[2];  // factor of the sums before the latest chunk

  DEVICE void reset() {
    m[0] = m[1] = LOWEST;
    l[0] = l[1] = 0.0f;
  }

  // Returns the sum over the whole row.
  DEVICE float sum(int half) const { return sum_of_lanes<1, 4>(l[half]); }
};

// Packs weights as left operands of a matrix instruction.
template <int COUNT>
DEVICE void pack_weights(const float (&s)[COUNT], u32 (&weights)[COUNT / 8][4]) {
#pragma unroll
  for (int i = 0; i < COUNT / 2; i++)
    weights[i / 4][i % 4] = cvt_rn_x2<BF16_OPERANDS>(s[2 * i], s[2 * i + 1]);
}
