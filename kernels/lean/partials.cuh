// Partials: how several become one, and how they travel between CTAs through the partials
// workspace. A slot is EMPTY until its numbers arrive, each number arrives whole, and none has the
// bits of EMPTY: no fence and no flag stand between the store and the read.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

// A 16-byte piece of a partial: four columns of a row, normalised, and the row's logarithm (base
// 2).
struct Piece {
  float4 o;
  float log;
};

// Several pieces of one row, each against its own reference m, on the way to one. The re-scaling of
// LeanAttention's section III; a fixed order, so the same parts give the same bits.
template <int COUNT>
struct Parts {
  float4 o[COUNT];
  float m[COUNT], l[COUNT];  // l: 0 where there is no part

  // Merges the parts of the TEAM threads of this piece; all of them get the result.
  template <int TEAM>
  __device__ __forceinline__ Piece merged() const {
    float reference = LOWEST;
#pragma unroll
    for (int i = 0; i < COUNT; i++) reference = fmaxf(reference, m[i]);
#pragma unroll
    for (int step = 1; step < TEAM; step *= 2)
      reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, step));
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float weights = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float weight = ex2_approx_ftz(m[i] - reference);
      sum.x += weight * o[i].x, sum.y += weight * o[i].y;
      sum.z += weight * o[i].z, sum.w += weight * o[i].w;
      weights += weight * l[i];
    }
#pragma unroll
    for (int step = 1; step < TEAM; step *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, step), sum.y += __shfl_xor_sync(~0u, sum.y, step);
      sum.z += __shfl_xor_sync(~0u, sum.z, step), sum.w += __shfl_xor_sync(~0u, sum.w, step);
      weights += __shfl_xor_sync(~0u, weights, step);
    }
    // 0 where no token was seen, or NaN.
    const float scale = weights > 0.0f ? rcp_approx_ftz(weights) : weights;
    return {make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale),
            weights == 0.0f ? -INFINITE : reference + lg2_approx_ftz(weights)};
  }
};

__device__ __forceinline__ u32 bits_of(float x) {
  return x != x ? 0x7fc00000u : __float_as_uint(x);  // no NaN is EMPTY
}

// Stores a piece of a partial in its slot.
__device__ __forceinline__ void store_partial(u32 *slot, int quad, const Piece &piece) {
  st_relaxed_gpu(slot + 4 * quad, make_uint4(bits_of(piece.o.x), bits_of(piece.o.y),
                                             bits_of(piece.o.z), bits_of(piece.o.w)));
  st_relaxed_gpu(slot + 4 * QUADS + quad, bits_of(piece.log));
}

// Merges to `own` the same piece of `count` < MERGE partials, `stride` numbers apart, once they
// have arrived. No thread but this team reads these numbers. All reads are in flight together;
// what was too early is read again.
template <int TEAM>
__device__ __forceinline__ Piece gather_partials(const Piece &own, const u32 *slots, i64 stride,
                                                 int count, int quad) {
  constexpr int EACH = MERGE / TEAM;
  const int member = threadIdx.x % TEAM;
  uint4 numbers[EACH];
  u32 logs[EACH];
  bool missing = true;
  while (missing) {
    missing = false;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int part = i * TEAM + member;
      numbers[i] = make_uint4(0, 0, 0, 0);
      logs[i] = 0xff800000u;  // -infinity
      if (part < count) {
        numbers[i] = ld_relaxed_gpu_v4(slots + part * stride + 4 * quad);
        logs[i] = ld_relaxed_gpu(slots + part * stride + 4 * QUADS + quad);
      }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
      missing |= numbers[i].x == EMPTY | numbers[i].y == EMPTY | numbers[i].z == EMPTY |
                 numbers[i].w == EMPTY | logs[i] == EMPTY;
  }
  Parts<EACH> parts;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    parts.o[i] = make_float4(__uint_as_float(numbers[i].x), __uint_as_float(numbers[i].y),
                             __uint_as_float(numbers[i].z), __uint_as_float(numbers[i].w));
    parts.m[i] = __uint_as_float(logs[i]);
    parts.l[i] = 1.0f;
  }
  // A place is free, count < MERGE: the last member's last.
  if (member == TEAM - 1) parts.o[EACH - 1] = own.o, parts.m[EACH - 1] = own.log;
  return parts.template merged<TEAM>();
}

// Empties the slots that `gather_partials` has read, for the next launch.
template <int TEAM>
__device__ __forceinline__ void clear_partials(u32 *slots, i64 stride, int count, int quad) {
#pragma unroll 1
  for (int part = threadIdx.x % TEAM; part < count; part += TEAM) {
    st_relaxed_gpu(slots + part * stride + 4 * quad, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
    st_relaxed_gpu(slots + part * stride + 4 * QUADS + quad, EMPTY);
  }
}
