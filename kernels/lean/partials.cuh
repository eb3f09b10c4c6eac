// Partials: how several become one, and how they travel between CTAs through the partials
// workspace. A slot is made of 16-byte units, each of which arrives whole and carries the epoch of
// its launch: no fence and no flag stand between the store and the read, and what a slot held
// before, whatever it was, is not taken for a partial.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

// A 16-byte piece of a partial: four columns of a row, weighted against 2^m; and the sum of the
// row's weights.
struct Piece {
  float4 o;
  float m, l;  // m: in units of log2; l: 0 where no token was seen

  // Four columns of the output.
  __device__ __forceinline__ float4 scaled() const {
    const float scale = l > 0.0f ? rcp_approx_ftz(l) : l;  // 0 where no token was seen, or NaN
    return make_float4(o.x * scale, o.y * scale, o.z * scale, o.w * scale);
  }

  // One more logit, in units of log2, that has no value.
  __device__ __forceinline__ void add_logit(float logit) {
    const float reference = fmaxf(m, logit), scale = ex2_approx_ftz(m - reference);
    o = make_float4(o.x * scale, o.y * scale, o.z * scale, o.w * scale);
    l = l * scale + ex2_approx_ftz(logit - reference);
    m = reference;
  }

  __device__ __forceinline__ float lse() const {
    return l == 0.0f ? -INFINITE : (m + lg2_approx_ftz(l)) * 0.6931471805599453f;
  }
};

// Several pieces of one row on the way to one. The re-scaling of LeanAttention's section III; a
// fixed order, so the same parts give the same bits.
template <int COUNT>
struct Parts {
  float4 o[COUNT];
  float m[COUNT], l[COUNT];  // m: -INFINITE where there is no part

  // Merges the parts of the TEAM threads of this piece; all of them get the result.
  template <int TEAM>
  __device__ __forceinline__ Piece merged() const {
    float reference = LOWEST;
#pragma unroll
    for (int i = 0; i < COUNT; i++) reference = fmaxf(reference, m[i]);
#pragma unroll
    for (int step = 1; step < TEAM; step *= 2)
      reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, step));
    Piece sum = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), reference, 0.0f};
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float weight = ex2_approx_ftz(m[i] - reference);
      sum.o.x += weight * o[i].x, sum.o.y += weight * o[i].y;
      sum.o.z += weight * o[i].z, sum.o.w += weight * o[i].w;
      sum.l += weight * l[i];
    }
#pragma unroll
    for (int step = 1; step < TEAM; step *= 2) {
      sum.o.x += __shfl_xor_sync(~0u, sum.o.x, step);
      sum.o.y += __shfl_xor_sync(~0u, sum.o.y, step);
      sum.o.z += __shfl_xor_sync(~0u, sum.o.z, step);
      sum.o.w += __shfl_xor_sync(~0u, sum.o.w, step);
      sum.l += __shfl_xor_sync(~0u, sum.l, step);
    }
    return sum;
  }
};

// Stores a piece of a partial in its slot: two units, each with the epoch.
__device__ __forceinline__ void store_partial(u32 *slot, int quad, const Piece &piece, u32 epoch) {
  st_relaxed_gpu_b128(slot + 4 * quad,
                      make_uint4(__float_as_uint(piece.o.x), __float_as_uint(piece.o.y),
                                 __float_as_uint(piece.o.z), epoch));
  st_relaxed_gpu_b128(slot + 4 * (QUADS + quad),
                      make_uint4(__float_as_uint(piece.o.w), __float_as_uint(piece.m),
                                 __float_as_uint(piece.l), epoch));
}

// Merges to `own` the same piece of `count` < MERGE partials, `stride` numbers apart, once they
// have arrived. All reads are in flight together; what was too early is read again.
template <int TEAM>
__device__ __forceinline__ Piece gather_partials(const Piece &own, const u32 *slots, i64 stride,
                                                 int count, int quad, u32 epoch) {
  constexpr int EACH = MERGE / TEAM;
  const int member = threadIdx.x % TEAM;
  uint4 first[EACH], second[EACH];
  bool missing = true;
  while (missing) {
    missing = false;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int part = i * TEAM + member;
      first[i] = make_uint4(0, 0, 0, epoch);
      second[i] = make_uint4(0, __float_as_uint(-INFINITE), 0, epoch);
      if (part < count) {
        first[i] = ld_relaxed_gpu_b128(slots + part * stride + 4 * quad);
        second[i] = ld_relaxed_gpu_b128(slots + part * stride + 4 * (QUADS + quad));
      }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) missing |= first[i].w != epoch | second[i].w != epoch;
  }
  Parts<EACH> parts;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    parts.o[i] = make_float4(__uint_as_float(first[i].x), __uint_as_float(first[i].y),
                             __uint_as_float(first[i].z), __uint_as_float(second[i].x));
    parts.m[i] = __uint_as_float(second[i].y);
    parts.l[i] = __uint_as_float(second[i].z);
  }
  // A place is free, count < MERGE: the last member's last.
  if (member == TEAM - 1)
    parts.o[EACH - 1] = own.o, parts.m[EACH - 1] = own.m, parts.l[EACH - 1] = own.l;
  return parts.template merged<TEAM>();
}
