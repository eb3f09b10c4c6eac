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
