// Partials: merging, and the exchange between CTAs through the partials workspace. A slot consists
// of 16-byte units. Each arrives whole and carries the epoch of its launch, so store and read need
// neither fence nor flag, and earlier contents of a slot are never mistaken for a partial.
#pragma once
#include "lanes.cuh"
#include "params.cuh"
#include "ptx.cuh"

// A 16-byte piece of a partial: four columns of a row, weighted relative to 2^m, and the sum of the
// row's weights.
struct Piece {
  float4 o;
  float m, l;  // m: in units of log2; l: 0 if no token was seen

  // Returns four columns of the output.
  DEVICE float4 scaled() const { return times(o, reciprocal(l)); }

  // Adds a logit without a value, in units of log2.
  DEVICE void add_logit(float logit) {
    const float reference = fmaxf(m, logit), scale = ex2_approx_ftz(m - reference);
    o = times(o, scale);
    l = l * scale + ex2_approx_ftz(logit - reference);
    m = reference;
  }

  // Adds four columns of the result of other tokens; its LSE is in units of log2.
  DEVICE void add_result(float4 other, float lse) {
    add_logit(lse);
    const float weight = ex2_approx_ftz(lse - m);
    add_weighted(o, weight, other);
  }

  DEVICE float lse() const { return lse_of(m, l); }

  // Return its units in the workspaces, each with the launch's epoch.
  DEVICE uint4 first_unit(u32 epoch) const {
    return make_uint4(__float_as_uint(o.x), __float_as_uint(o.y), __float_as_uint(o.z), epoch);
  }
  DEVICE uint4 second_unit(u32 epoch) const {
    return make_uint4(__float_as_uint(o.w), __float_as_uint(m), __float_as_uint(l), epoch);
  }
};

// Pieces of one row to be merged, by the re-scaling of LeanAttention's section III. The order is
// fixed, so the same parts give the same bits.
template <int COUNT>
struct Parts {
  float4 o[COUNT];
  float m[COUNT], l[COUNT];  // m: -INFINITE without a part

  // Sets part `i` from its units.
  DEVICE void set(int i, const uint4 &first, const uint4 &second) {
    o[i] = make_float4(__uint_as_float(first.x), __uint_as_float(first.y), __uint_as_float(first.z),
                       __uint_as_float(second.x));
    m[i] = __uint_as_float(second.y), l[i] = __uint_as_float(second.z);
  }

  // Merges the parts of the TEAM threads of this piece; all of them get the result.
  template <int TEAM>
  DEVICE Piece merged() const {
    float reference = LOWEST;
#pragma unroll
    for (int i = 0; i < COUNT; i++) reference = fmaxf(reference, m[i]);
    reference = max_of_lanes<1, TEAM>(reference);
    Piece sum = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), reference, 0.0f};
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float weight = ex2_approx_ftz(m[i] - reference);
      add_weighted(sum.o, weight, o[i]);
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
DEVICE void store_partial(u32 *slot, int quad, const Piece &piece, u32 epoch) {
  st_relaxed_gpu_b128(slot + 4 * quad, piece.first_unit(epoch));
  st_relaxed_gpu_b128(slot + 4 * (QUADS + quad), piece.second_unit(epoch));
}

// Waits for the same piece of `count` < MERGE partials, `stride` numbers apart, and merges them
// into `own`. All reads are in flight together; those that came too early are repeated.
template <int TEAM>
DEVICE Piece gather_partials(const Piece &own, const u32 *slots, i64 stride, int count, int quad,
                             u32 epoch) {
  constexpr int EACH = MERGE / TEAM;
  const int member = threadIdx.x % TEAM;
  uint4 first[EACH], second[EACH];
  bool missing = true;
  while (missing) {
    missing = false;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int other = i * TEAM + member;
      first[i] = make_uint4(0, 0, 0, epoch);
      second[i] = make_uint4(0, __float_as_uint(-INFINITE), 0, epoch);
      if (other < count) {
        first[i] = ld_relaxed_gpu_b128(slots + other * stride + 4 * quad);
        second[i] = ld_relaxed_gpu_b128(slots + other * stride + 4 * (QUADS + quad));
      }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) missing |= first[i].w != epoch | second[i].w != epoch;
  }
  Parts<EACH> parts;
#pragma unroll
  for (int i = 0; i < EACH; i++) parts.set(i, first[i], second[i]);
  // The last member's last element is free because count < MERGE.
  if (member == TEAM - 1)
    parts.o[EACH - 1] = own.o, parts.m[EACH - 1] = own.m, parts.l[EACH - 1] = own.l;
  return parts.template merged<TEAM>();
}
