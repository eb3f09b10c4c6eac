// Work ranges kept from launch to launch. The layers of a model have the same lengths in a step, so
// each launch but the first would repeat its search. A launch writes its CTAs' ranges with the
// lengths that they follow from, and later launches with the same lengths read them.
//
// A CTA's numbers in memory: the start of its range; its warps' first copies; then all arrays that
// the schedule reads. They are valid if the launch is the same, the arrays are, and the sum is:
// memory of a launch that is out of use serves another.
//
// First copies start before ranges are compared or searched for. They are right for the same
// lengths, and mostly if sequences have grown by a token. A wrong one is dropped.
#pragma once
#include "copy.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

// Numbers of an array that a lane reads at once.
constexpr int AT_ONCE = 4;
// Tokens by which a sequence grows in a step of decoding, at most. With other lengths a first copy
// would likely be wrong.
constexpr u32 MOST_GROWN = 8;
// Numbers behind the start of a range.
enum { KEPT_CONTEXT = 9, KEPT_KEY, KEPT_SUM };
static_assert(KEPT_SUM < KEPT_NUMBERS || !Build::keeps);

// Factors of places are far from multiples of each other: small numbers seldom have equal sums.
DEVICE u32 kept_term(u32 number, int place) {
  const u32 factor = place * 0x9e3779b1u;
  return number * ((factor ^ factor >> 15) | 1);
}

// Numbers of an array that a lane reads at once, and those kept of them.
struct Numbers {
  u32 now[AT_ONCE], before[AT_ONCE];

  // Starts the reads of every 32nd number from `first` on; null `kept`: without those kept.
  DEVICE void start(const int *array, const u32 *kept, int first, int count) {
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int i = first + 32 * j;
      now[j] = i < count ? __ldg(array + i) : 0;
      before[j] = i < count && kept != nullptr ? kept[i] : 0;
    }
  }
};

// A CTA's kept range, held by a warp.
struct Kept {
  u32 *at;          // null: none is kept
  u32 own;          // number `lane`
  Numbers lengths;  // the first ones
  u32 sum;          // of this lane's terms of the arrays
  bool is_same;     // this lane's numbers of the arrays

  DEVICE static u32 *of_cta(const Params &p) { return p.kept + (i64)blockIdx.x * p.kept_stride; }

  // Starts the reads of the range and of the first `count` lengths. None waits for another.
  DEVICE void start(const Params &p, int lane, int count) {
    at = p.kept ? of_cta(p) : nullptr;
    own = at != nullptr && threadIdx.x < KEPT_NUMBERS ? at[lane] : 0;
    lengths.start(p.cache_seqlens, at ? at + KEPT_ARRAYS_AT : nullptr, lane,
                  p.cache_seqlens ? count : 0);
  }

  // Compares the arrays with the kept ones.
  DEVICE void compare(const Params &p, int lane) {
    is_same = at != nullptr;
    sum = 0;
    int place = KEPT_ARRAYS_AT;
    if (p.cache_seqlens) place = compare(p.cache_seqlens, p.batch, place, lane, true);
    if constexpr (Build::leftpad) place = compare(p.cache_leftpad, p.batch, place, lane, false);
    if constexpr (Build::ragged_q) compare(p.cu_seqlens_q, p.batch + 1, place, lane, false);
  }

  // `started`: the first numbers are in `lengths`.
  DEVICE int compare(const int *array, int count, int place, int lane, bool started) {
    const u32 *kept = at ? at + place : nullptr;
    if (!started) lengths.start(array, kept, lane, count);
    int first = lane;
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        is_same &= lengths.before[j] == lengths.now[j];
        sum += kept_term(lengths.now[j], place + first + 32 * j);
      }
      first += 32 * AT_ONCE;
      if (first >= count) return place + count;
      lengths.start(array, kept, first, count);
    }
  }

  // Writes the arrays.
  DEVICE void write_arrays(const Params &p, int lane) const {
    int place = KEPT_ARRAYS_AT;
    if (p.cache_seqlens) place = write(p.cache_seqlens, p.batch, place, lane);
    if constexpr (Build::leftpad) place = write(p.cache_leftpad, p.batch, place, lane);
    if constexpr (Build::ragged_q) write(p.cu_seqlens_q, p.batch + 1, place, lane);
  }

  DEVICE int write(const int *array, int count, int place, int lane) const {
#pragma unroll 1
    for (int first = lane; first < count; first += 32 * AT_ONCE) {
      Numbers numbers;
      numbers.start(array, nullptr, first, count);
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++)
        if (first + 32 * j < count) at[place + first + 32 * j] = numbers.now[j];
    }
    return place + count;
  }

  // Returns the sum of a range's numbers and the arrays.
  DEVICE u32 total(u32 number, int lane) const {
    return __reduce_add_sync(~0u, sum + (lane < KEPT_CONTEXT ? kept_term(number, lane) : 0));
  }

  DEVICE bool is_valid(const Params &p, int lane) const {
    const u32 expected = total(own, lane);
    const bool matches = lane == KEPT_CONTEXT ? own == p.context
                         : lane == KEPT_KEY   ? own == p.kept_key
                         : lane == KEPT_SUM   ? own == expected
                                              : true;
    return __ballot_sync(~0u, is_same && matches) == ~0u;
  }

  // Sets this lane's number of a range that was found.
  DEVICE void pack(const WorkRange &range, const Position &start, bool works, int lane) {
    const bool splits = !Build::fixed_runs && range.longest > 0;
    const int numbers[KEPT_CONTEXT] = {
        range.longest,
        range.slot,
        range.end,
        start.sequence,
        start.at,
        splits ? range.splits : range.share,
        splits ? range.split : range.longer,
        splits ? start.head : start.sequence_start,
        splits ? start.first : start.packed_tokens,
    };
    own = lane == 0 ? -1 : 0;
#pragma unroll
    for (int i = 0; i < KEPT_CONTEXT; i++) own = works && lane == i ? numbers[i] : own;
  }

  // Keeps the range for later launches.
  DEVICE void write(const Params &p, int lane) {
    if (at == nullptr) return;
    const u32 whole = total(own, lane);
    const u32 number = lane == KEPT_CONTEXT ? p.context
                       : lane == KEPT_KEY   ? p.kept_key
                       : lane == KEPT_SUM   ? whole
                                            : own;
    if (lane < KEPT_NUMBERS) at[lane] = number;
    write_arrays(p, lane);
  }

  // Reads a range from its numbers in shared memory; returns false if the CTA has none.
  DEVICE static bool unpack(const u32 *numbers, WorkRange &range, Position &start) {
    const uint4 *quads = reinterpret_cast<const uint4 *>(numbers);
    const uint4 first = quads[0], second = quads[1];
    const int last = numbers[8];
    range.longest = first.x, range.slot = first.y, range.end = first.z;
    start.sequence = first.w, start.at = second.x;
    const bool splits = !Build::fixed_runs && range.longest > 0;
    range.splits = range.share = second.y, range.split = range.longer = second.z;
    start.head = start.sequence_start = second.w;
    start.first = last;
    start.packed_tokens = splits ? 0 : last;
    return range.longest >= 0;
  }
};

// Finds the CTA's range as WorkRange::find does. One warp reads a kept one for all. If there is
// none, all warps search, because what takes time is the instructions' way to the SM.
struct RangeFinder {
  Kept kept;
  bool searched;
  uint4 copy;  // GUESSES: the warp's first copy in an earlier launch

  // Starts the reads. Other work can hide their latency. `guesses`: every warp reads its first
  // copy, and lengths that tell whether it is likely right.
  DEVICE void start(const Params &p, int lane, bool guesses) {
    if constexpr (GUESSES) copy = guesses && p.kept ? *first_copy(p) : uint4{};
    if (Build::keeps && (guesses || threadIdx.x < 32))
      kept.start(p, lane, threadIdx.x < 32 ? p.batch : min(p.batch, 32));
  }

  DEVICE static uint4 *first_copy(const Params &p) {
    return reinterpret_cast<uint4 *>(Kept::of_cta(p) + FIRST_COPIES_AT) + threadIdx.x / 32;
  }

  // GUESSES: sets the first copy that the warp had in an earlier launch; returns false if there is
  // none, or if one of the first 32 sequences is not the same or a step longer.
  DEVICE bool guess(const Params &p, Position &position) const {
    const u32 grown = kept.lengths.now[0] - kept.lengths.before[0];
    const bool exists = p.kept != nullptr && FirstCopy::unpack(p, copy, position);
    return __ballot_sync(~0u, grown <= MOST_GROWN) == ~0u && exists;
  }

  DEVICE bool find(const Params &p, int lane, int range_warp, u32 *shared, WorkRange &range,
                   Position &position) {
    Lengths lengths;
    if constexpr (!Build::keeps) return range.find(p, lane, lengths, range_warp, position);
    if (threadIdx.x < 32) {
      kept.compare(p, lane);
      const bool is_valid = kept.is_valid(p, lane);
      if (lane <= KEPT_CONTEXT) shared[lane] = lane < KEPT_CONTEXT ? kept.own : is_valid;
    }
    __syncthreads();
    searched = !shared[KEPT_CONTEXT];
    bool works;
    if (searched) {
      lengths.start(p, lane);
      works = range.search(p, lane, lengths, position);
      if (threadIdx.x < 32) kept.pack(range, position, works, lane);
    } else {
      works = Kept::unpack(shared, range, position);
    }
    if (works) range.enter(p, range_warp, position);
    return works;
  }

  // Keeps a range that was searched for.
  DEVICE void keep(const Params &p, int lane) {
    if (Build::keeps && searched && threadIdx.x < 32) kept.write(p, lane);
  }

  DEVICE void keep(const Params &p, int lane, const FirstCopy &first) {
    keep(p, lane);
    if (GUESSES && p.kept != nullptr && searched && lane == 0) *first_copy(p) = first.pack(p);
  }
};
