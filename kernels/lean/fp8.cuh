// K and V in 8 bits, with Q, as operands in fp16, which holds all numbers of e4m3 and e5m2.
#pragma once
#include "ptx.cuh"
#include "schedule.cuh"

constexpr bool HAS_CVT = Build::architecture >= 890;
// Without an instruction for e4m3, its bits under fp16's exponent are smaller by 2^8.
__host__ __device__ constexpr float fp16_unit(int dtype) {
  return dtype == 1 && !HAS_CVT ? 256.0f : 1.0f;
}
constexpr float KV_UNIT = fp16_unit(Build::kv_dtype), Q_UNIT = fp16_unit(Build::q_dtype);

// The scale of a sequence's KV head.
DEVICE float scale_of(const Descale &scales, int sequence, int kv_head) {
  const i64 at = sequence * scales.stride_batch + kv_head * scales.stride_head;
  return scales.at ? __ldg(scales.at + at) : 1.0f;
}

DEVICE float reciprocal_of(float power_of_two) {
  return __uint_as_float((254 << 23) - __float_as_uint(power_of_two));
}

// Build::page_scales: returns a power of two above a scale; for 0 the smallest normal one.
DEVICE float unit_above(float scale) {
  return __uint_as_float(min((__float_as_uint(scale) >> 23) + 1, 253u) << 23);
}

// Returns V's scale for KV head `head` of a part's rows.
DEVICE float v_scale_of(const Params &p, const Position &part, int head) {
  const int kv_head = part.head_tile().kv_head * Build::heads_of_row + head;
  return Build::kv_dtype == 0 ? 1.0f : scale_of(p.v_descale, part.sequence, kv_head);
}

// Converts bytes `first` and `second` of a word to fp16.
template <int DTYPE>
DEVICE u32 to_fp16(u32 word, int first, int second) {
  if constexpr (DTYPE == 1 && HAS_CVT)
    return cvt_rn_f16x2_e4m3x2((unsigned short)__byte_perm(word, 0, first | second << 4));
  const u32 high_bytes = __byte_perm(word, 0, 0x0404 | first << 4 | second << 12);
  if constexpr (DTYPE == 2) return high_bytes;
  const u32 digits = high_bytes & 0x7f007f00;
  const u32 nan = digits + 0x01000100 & 0x80008000;  // all seven bits are set
  return high_bytes & 0x80008000 | digits >> 1 | nan - (nan >> 5);
}

// True if words are converted by halves, which the instruction for e4m3 takes unchanged. Otherwise
// two numbers need a permutation in any case.
constexpr bool BY_HALVES = Build::kv_dtype == 1 && HAS_CVT;

// Converts bytes 0 and 1 of a word, and 2 and 3, from e4m3 to fp16.
DEVICE void halves_to_fp16(u32 word, u32 &low, u32 &high) {
  low = cvt_rn_f16x2_e4m3x2_half<0>(word);
  high = cvt_rn_f16x2_e4m3x2_half<1>(word);
}

// Sets the first operand of matrix instruction `half` of a load of K. Lane t of four has numbers 4t
// to 4t + 3 of its tokens, as columns 2t, 2t + 1, 2t + 8 and 2t + 9. Q has the same order.
DEVICE void keys_of(u32 (&k)[4], const u32 (&loaded)[4], int half) {
#pragma unroll
  for (int i = 0; BY_HALVES && i < 2; i++) halves_to_fp16(loaded[2 * half + i], k[i], k[i + 2]);
#pragma unroll
  for (int i = 0; !BY_HALVES && i < 4; i++)
    k[i] = Build::kv_dtype == 0
               ? loaded[i]
               : to_fp16<Build::kv_dtype>(loaded[2 * half + i % 2], i / 2 * 2, i / 2 * 2 + 1);
}

// The same for V: a lane has numbers 2g and 2g + 1 of two tokens, as rows g and g + 8.
DEVICE void values_of(u32 (&v)[4], const u32 (&loaded)[4], int half) {
#pragma unroll
  for (int i = 0; BY_HALVES && i < 4; i += 2)
    // The first numbers of both tokens, then the second: one permutation for four numbers.
    halves_to_fp16(__byte_perm(loaded[half + i], 0, 0x3120), v[i], v[i + 1]);
#pragma unroll
  for (int i = 0; !BY_HALVES && i < 4; i++)
    v[i] = Build::kv_dtype == 0
               ? loaded[i]
               : to_fp16<Build::kv_dtype>(loaded[half + i / 2 * 2], i % 2, i % 2 + 2);
}

// Rows of Q in bf16 are each divided by a power of two that brings their largest number to at least
// 2^14, below 2^15. Rounding to fp16 then loses at most 2^-39 of it.
DEVICE u32 larger(u32 largest, u32 pair) {
  // Only finite numbers count, compared by their bits.
  const u32 low = pair & 0x7fff, high = pair >> 16 & 0x7fff;
  largest = max(largest, low < 0x7f80 ? low : 0);
  return max(largest, high < 0x7f80 ? high : 0);
}

DEVICE float unit_of(u32 largest) { return __uint_as_float((max(largest >> 7, 15u) - 14) << 23); }

// Converts a pair from bf16 to fp16.
DEVICE u32 in_units(u32 pair, float unit) {
  const float by = reciprocal_of(unit);
  return cvt_rn_x2<false>(__uint_as_float(pair << 16) * by,
                          __uint_as_float(pair & 0xffff0000) * by);
}
