// Work ranges kept from launch to launch. The layers of a model have the same lengths in a step, so
// each launch but the first would repeat its search. A launch writes its CTAs' ranges with the
// lengths that they follow from, and later launches with the same lengths read them.
//
// A CTA's numbers in memory: the start of its range; then all arrays that the schedule reads. They
// are valid if the launch is the same, the arrays are, and the sum is: memory of a launch that is
// out of use serves another.
#pragma once
#include "params.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

// Numbers of an array that a lane reads at once.
constexpr int AT_ONCE = 4;
// Numbers behind the start of a range.
enum { KEPT_CONTEXT = 9, KEPT_KEY, KEPT_SUM };
static_assert(KEPT_SUM < KEPT_NUMBERS || !Build::keeps);

// Factors of places are far from multiples of each other: small numbers seldom have equal sums.
DEVICE u32 kept_term(u32 number, int place) {
  const u32 factor = place * 0x9e3779b1u;
  return number * ((factor ^ factor >> 15) | 1);
}

// A CTA's kept range, held by a warp.
struct Kept {
  u32 *at;       // null: none is kept
  u32 own;       // number `lane`
  u32 sum;       // of this lane's terms of the arrays
  bool is_same;  // this lane's numbers of the arrays

  // Starts the reads.
  DEVICE void start(const Params &p, int lane) {
    at = p.kept ? p.kept + (i64)blockIdx.x * p.kept_stride : nullptr;
    own = at != nullptr && lane < KEPT_NUMBERS ? at[lane] : 0;
    is_same = at != nullptr;
    sum = 0;
    visit(p, lane, false);
  }

  // Compares the arrays with the kept ones, or writes those.
  DEVICE void visit(const Params &p, int lane, bool writes) {
    int place = 32;
    if (p.cache_seqlens) place = visit(p.cache_seqlens, p.batch, place, lane, writes);
    if constexpr (Build::leftpad) place = visit(p.cache_leftpad, p.batch, place, lane, writes);
    if constexpr (Build::ragged_q) visit(p.cu_seqlens_q, p.batch + 1, place, lane, writes);
  }

  DEVICE int visit(const int *array, int count, int place, int lane, bool writes) {
#pragma unroll 1
    for (int first = lane; first < count; first += 32 * AT_ONCE) {
      u32 numbers[AT_ONCE], kept[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const int i = first + 32 * j;
        numbers[j] = i < count ? __ldg(array + i) : 0;
        kept[j] = i < count && at != nullptr && !writes ? at[place + i] : numbers[j];
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const int i = first + 32 * j;
        is_same &= kept[j] == numbers[j];
        if (writes && i < count) at[place + i] = numbers[j];
        if (!writes) sum += kept_term(numbers[j], place + i);
      }
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
    visit(p, lane, true);
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

  // Starts the reads. Other work can hide their latency.
  DEVICE void start(const Params &p, int lane) {
    if (Build::keeps && threadIdx.x < 32) kept.start(p, lane);
  }

  DEVICE bool find(const Params &p, int lane, int range_warp, u32 *shared, WorkRange &range,
                   Position &position) {
    Lengths lengths;
    if constexpr (!Build::keeps) return range.find(p, lane, lengths, range_warp, position);
    if (threadIdx.x < 32) {
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
};
