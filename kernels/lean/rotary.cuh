// Rotary position embedding of Q, and of K before it is appended. Pairs of numbers are rotated by
// angles that follow from the token's position, and rounded to their dtype. The first
// Build::rotary_dim numbers of a head are paired: number i with i + Build::rotary_dim / 2, or
// Build::interleaved 2i with 2i + 1.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

// Converts two numbers from Q's dtype.
DEVICE float2 floats_of(u32 both) {
  if constexpr (Build::bf16)
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000));
  return make_float2(cvt_f32_f16(both & 0xffff), cvt_f32_f16(both >> 16));
}

// Addresses of cos and sin of a position.
struct Angles {
  const unsigned short *cos, *sin;

  // Positions past the last use the last.
  DEVICE void enter(const Params &p, int position) {
    if constexpr (Build::rotary_dim == 0) return;
    const i64 row = (i64)min(position, p.rotary_positions - 1) * (Build::rotary_dim / 2);
    cos = p.rotary_cos + row, sin = p.rotary_sin + row;
  }
};

// Operands that rotate two numbers of a row, read some time in advance: the numbers paired with
// them, and cos and sin, in their dtype.
struct Turn {
  u32 other, cos, sin;

  // Starts reading the operands for the numbers at `at`; the first is in `column`.
  DEVICE void read(const Angles &angles, const void *at, int column) {
    if (Build::rotary_dim == 0 || column >= Build::rotary_dim) return;
    if constexpr (Build::interleaved) {
      cos = __ldg(angles.cos + column / 2), sin = __ldg(angles.sin + column / 2);
      return;
    }
    const bool is_low = column < Build::rotary_dim / 2;
    const int angle = is_low ? column : column - Build::rotary_dim / 2;
    other = __ldg(static_cast<const u32 *>(at) +
                  (is_low ? Build::rotary_dim / 4 : -Build::rotary_dim / 4));
    cos = __ldg(reinterpret_cast<const u32 *>(angles.cos + angle));
    sin = __ldg(reinterpret_cast<const u32 *>(angles.sin + angle));
  }

  // Returns the numbers `own`, rotated.
  DEVICE u32 of(u32 own, int column) const {
    if (Build::rotary_dim == 0 || column >= Build::rotary_dim) return own;
    const float2 x = floats_of(own), c = floats_of(cos), s = floats_of(sin);
    if constexpr (Build::interleaved)
      return cvt_rn_x2<Build::bf16>(x.x * c.x - x.y * s.x, x.y * c.x + x.x * s.x);
    const float2 y = floats_of(other);
    const float sign = column < Build::rotary_dim / 2 ? -1.0f : 1.0f;
    return cvt_rn_x2<Build::bf16>(x.x * c.x + sign * y.x * s.x, x.y * c.y + sign * y.y * s.y);
  }
};

// Rotates two numbers of a row, read from `at`, after reading their operands; the first is in
// `column`.
DEVICE u32 turned(const Angles &angles, u32 own, const void *at, int column) {
  Turn turn;
  turn.read(angles, at, column);
  return turn.of(own, column);
}
