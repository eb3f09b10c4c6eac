// schedule.cuh of kernels/lean on the CPU: the lanes of a warp take turns at their meeting points.
#include <ucontext.h>

#define __device__
#define __host__
#define __forceinline__ inline

constexpr int LANES = 32;
static struct { unsigned x; } blockIdx, gridDim;
static ucontext_t lanes[LANES], caller;
static char stacks[LANES][1 << 16];
static int this_lane, values[LANES];

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

// Waits until all lanes have arrived.
static void wait() {
  const int lane = this_lane;
  this_lane = (lane + 1) % LANES;
  swapcontext(&lanes[lane], &lanes[this_lane]);
}

// Returns the combination of every lane's value.
template <class Combine>
static int meet(int value, Combine combine) {
  values[this_lane] = value;
  wait();
  const int result = combine();
  wait();
  return result;
}

template <class Join>
static int reduce(int value, Join join) {
  return meet(value, [&] {
    int result = values[0];
    for (int lane = 1; lane < LANES; lane++) result = join(result, values[lane]);
    return result;
  });
}

static inline int __shfl_sync(unsigned, int value, int lane) {
  return meet(value, [&] { return values[lane % LANES]; });
}

static inline int __shfl_up_sync(unsigned, int value, int by) {
  return meet(value, [&] { return this_lane < by ? value : values[this_lane - by]; });
}

static inline int __reduce_add_sync(unsigned, int value) {
  return reduce(value, [](int a, int b) { return a + b; });
}

static inline int __reduce_max_sync(unsigned, int value) { return reduce(value, max); }

static inline unsigned __ballot_sync(unsigned, bool vote) {
  return reduce(vote ? 1 << this_lane : 0, [](int a, int b) { return a | b; });
}

static inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
static inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
static inline int __ldg(const int *address) { return *address; }
// Exact below 2^24.
static inline float __int2float_rz(int number) { return (float)number; }
static inline float rcp_approx_ftz(float number) { return 1 / number; }

#include "schedule.cuh"

struct Part {
  int cta, sequence, head, first, last, tiles, splits, split;
};

static const Params *params;
static Part *parts;
static int ranges, most, count;

// Runs a lane of every CTA; lane 0 records the parts.
static void walk() {
  for (int cta = 0; cta < ranges; cta++) {
    gridDim.x = ranges * Build::cluster, blockIdx.x = cta * Build::cluster;
    const int lane = this_lane;
    Lengths lengths;
    lengths.start(*params, lane);
    WorkRange range;
    Position part;
    if (!range.find(*params, lane, lengths, 0, part)) continue;
    while (true) {
      Splits splits;
      splits.find(*params, part, range);
      if (lane == 0 && count < most && !part.is_rest)
        parts[count++] = {cta,       part.sequence, part.head,    part.first,
                          part.last, part.tiles,    splits.count, splits.mine};
      part.leave_part(*params);
      if (part.at >= range.end) break;
      part.enter_part(*params, range.end, 0);
    }
  }
  // The next lane has met the others equally often and ends, too. The last one returns.
  if (++this_lane < LANES) setcontext(&lanes[this_lane]);
}

// Writes the parts of a launch of `work_ranges`, at most `room`; returns their number.
extern "C" int deal(const Params *of, int work_ranges, Part *into, int room) {
  params = of, ranges = work_ranges, parts = into, most = room, count = 0;
  for (int lane = 0; lane < LANES; lane++) {
    getcontext(&lanes[lane]);
    lanes[lane].uc_stack.ss_sp = stacks[lane];
    lanes[lane].uc_stack.ss_size = sizeof stacks[lane];
    lanes[lane].uc_link = &caller;
    makecontext(&lanes[lane], walk, 0);
  }
  this_lane = 0;
  swapcontext(&caller, &lanes[0]);
  return count;
}
