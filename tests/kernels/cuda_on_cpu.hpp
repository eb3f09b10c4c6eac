// A GPU that executes lean.cu on one thread of the CPU: every CUDA thread is a fiber. Fibers switch
// where threads of a GPU meet or wait, so one that nobody wakes is an error, not a hang.
//
// Included by ptx_on_cpu.hpp, after build.cuh.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct Index { u32 x; };

// Bytes of two words, by the numbers in the selector's digits.
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const u64 both = (u64)high << 32 | low;
  u32 bytes = 0;
  for (int i = 0; i < 4; i++) bytes |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return bytes;
}

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

constexpr int LANES = 32;
constexpr u32 SHARED_BASE = 1024;   // shared address of a CTA's first byte
constexpr u32 RANK_SHIFT = 24;      // of a peer's: its rank + 1 above this bit
constexpr size_t STACK_BYTES = 1 << 16;
constexpr int MOST_IDLE_READS = 1 << 22;

struct Copy {
  u32 to, barrier;
  std::vector<unsigned char> bytes;  // empty: 16 bytes from `from`, or, where that is null, an arrival
  const unsigned char *from;
  u32 swizzle;  // the part of a 128-byte row's number that pieces' numbers are XORed with
};

// Of 16 bytes to global memory.
struct Store {
  u32 *at;
  uint4 x;
};

struct Barrier {
  int arrivals = 1, expected = 1;
  i64 bytes = 0;
  u32 phase = 0;
};

struct Fiber {
  struct Cta *cta;
  struct Lanes *lanes;
  Index thread;
  ucontext_t start;
  jmp_buf at;
  bool started = false;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  const void *argument;                     // of the collective that it waits in
  std::vector<std::vector<Copy>> groups{1};  // cp.async; the last one is not committed
  bool arrived = false;                     // at its cluster's barrier
  u32 cluster_phase = 0;
};

// A warp: who of it can go on, and who waits in a collective.
struct Lanes {
  Fiber *all[LANES];
  std::vector<Fiber *> ready;
  int waiting = 0;
  const char *meeting = nullptr;
  i64 priority;
};

struct Cluster {
  int threads = 0, arrived = 0;
  u32 phase = 0;
  std::vector<Fiber *> waiting;
  std::vector<struct Cta *> ctas;
};

// A named barrier: threads that have come, and those of them that wait.
struct Named {
  int arrived = 0;
  std::vector<Fiber *> waiting;
};

struct Cta {
  Index block;
  int threads = THREADS;
  std::vector<Fiber> fibers;
  std::vector<Lanes> warps;
  std::vector<Fiber *> waiting;  // at __syncthreads
  std::map<u32, Barrier> barriers;
  std::map<int, Named> named;
  std::vector<Copy> copies;  // on their way
  unsigned char *shared;
  Cluster *cluster;
};

static struct Machine {
  bool lazy;  // copies arrive when they are waited for; otherwise at once
  u32 random, shared_bytes;
  const Params *params;
  Index grid;
  Fiber *current;
  bool switches;  // to another warp
  jmp_buf scheduler;
  int idle_reads;
  i64 lowest;
  std::string failure;
  std::vector<std::unique_ptr<Cta>> running;
  std::vector<Store> stores;  // that nobody sees yet
} machine;

#define threadIdx (machine.current->thread)
#define blockIdx (machine.current->cta->block)
#define gridDim (machine.grid)

static u32 draw(u32 below) {
  u32 &x = machine.random;
  x ^= x << 13, x ^= x >> 17, x ^= x << 5;
  return x % below;
}

// ---- fibers ------------------------------------------------------------------------------------

__attribute__((noinline)) static void suspend() {
  if (!_setjmp(machine.current->at)) _longjmp(machine.scheduler, 1);
}

__attribute__((noinline)) static void resume(Fiber *fiber) {
  machine.current = fiber;
  if (_setjmp(machine.scheduler)) return;
  if (fiber->started) _longjmp(fiber->at, 1);
  fiber->started = true;
  setcontext(&fiber->start);
}

static void fail(const std::string &reason) {
  if (machine.failure.empty())
    machine.failure = "CTA " + std::to_string(blockIdx.x) + ", thread " +
                      std::to_string(threadIdx.x) + ": " + reason;
  suspend();
}

static void wake(Fiber *fiber) {
  fiber->lanes->ready.push_back(fiber);
  machine.idle_reads = 0;
}

static void wake_all(std::vector<Fiber *> &waiting) {
  for (Fiber *fiber : waiting) wake(fiber);
  waiting.clear();
}

// A store that nobody saw yet is seen: any of them, their order is free.
static void show_store() {
  std::swap(machine.stores[draw(machine.stores.size())], machine.stores.back());
  memcpy(machine.stores.back().at, &machine.stores.back().x, 16);
  machine.stores.pop_back();
  machine.idle_reads = 0;
}

// Lets all others go on before this thread's warp does.
static void yield_to_others() {
  Lanes *lanes = machine.current->lanes;
  if (++machine.idle_reads > MOST_IDLE_READS) fail("waits for a partial that nobody stores");
  lanes->priority = --machine.lowest;
  machine.switches = true;
  lanes->ready.push_back(machine.current);
  suspend();
}

// ---- where threads meet ------------------------------------------------------------------------

// A collective of a warp: the last lane to come calls `combine` with all lanes' arguments.
template <class Argument, class Combine>
static void meet(const char *name, Argument &argument, Combine combine) {
  Fiber *own = machine.current;
  Lanes &lanes = *own->lanes;
  if (lanes.waiting > 0 && strcmp(lanes.meeting, name))
    fail(std::string(name) + " while other lanes are at " + lanes.meeting);
  lanes.meeting = name;
  own->argument = &argument;
  if (++lanes.waiting < LANES) return suspend();
  lanes.waiting = 0;
  Argument *all[LANES];
  for (int lane = 0; lane < LANES; lane++)
    all[lane] = static_cast<Argument *>(const_cast<void *>(lanes.all[lane]->argument));
  combine(all);
  for (Fiber *fiber : lanes.all)
    if (fiber != own) wake(fiber);
}

template <class T>
struct Exchange {
  T value;
  int source;
};

// What lane `source` has; the own value where there is no such lane.
template <class T>
static T shuffle(const char *name, T value, int source) {
  Exchange<T> own = {value, source};
  meet(name, own, [](Exchange<T> **all) {
    T values[LANES];
    for (int lane = 0; lane < LANES; lane++) values[lane] = all[lane]->value;
    for (int lane = 0; lane < LANES; lane++)
      if (all[lane]->source >= 0) all[lane]->value = values[all[lane]->source];
  });
  return own.value;
}

inline int own_lane() { return threadIdx.x % LANES; }

template <class T>
inline T __shfl_sync(u32, T value, int lane) {
  return shuffle("shfl.idx", value, lane % LANES);
}

template <class T>
inline T __shfl_up_sync(u32, T value, int by) {
  return shuffle("shfl.up", value, own_lane() - by);
}

template <class T>
inline T __shfl_xor_sync(u32, T value, int mask) {
  return shuffle("shfl.bfly", value, own_lane() ^ mask);
}

template <class Join>
static int reduce_lanes(const char *name, int value, Join join) {
  meet(name, value, [&](int **all) {
    int result = *all[0];
    for (int lane = 1; lane < LANES; lane++) result = join(result, *all[lane]);
    for (int lane = 0; lane < LANES; lane++) *all[lane] = result;
  });
  return value;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __reduce_add_sync(u32, int value) {
  return reduce_lanes("redux.add", value, [](int a, int b) { return a + b; });
}
inline int __reduce_max_sync(u32, int value) { return reduce_lanes("redux.max", value, max); }
inline u32 __ballot_sync(u32, bool vote) {
  const int bit = vote ? 1 << own_lane() : 0;
  return reduce_lanes("vote.ballot", bit, [](int a, int b) { return a | b; });
}
inline bool __any_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline void __syncwarp() { reduce_lanes("bar.warp", 0, min); }

inline void __syncthreads() {
  Cta *cta = machine.current->cta;
  cta->waiting.push_back(machine.current);
  if ((int)cta->waiting.size() < cta->threads) return suspend();
  cta->waiting.pop_back();
  wake_all(cta->waiting);
}

static void complete_if_all_arrived(Cluster *cluster) {
  if (cluster->arrived < cluster->threads) return;
  cluster->arrived = 0;
  cluster->phase++;
  wake_all(cluster->waiting);
}

// ---- arithmetic --------------------------------------------------------------------------------

template <class To, class From>
inline To bits_of(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

inline u32 __float_as_uint(float x) { return bits_of<u32>(x); }
inline float __uint_as_float(u32 x) { return bits_of<float>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline int __clz(u32 bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffs(u32 bits) { return __builtin_ffs(bits); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline float __int2float_rz(int x) { return (float)x; }  // exact below 2^24
template <class T>
inline T __ldg(const T *at) { return *at; }

// ---- launches ----------------------------------------------------------------------------------

extern "C" void ENTRY(const Params p);

// A fiber's life.
static void live() {
  ENTRY(*machine.params);
  Cta *cta = machine.current->cta;
  if (--cta->threads == 0 && !cta->copies.empty()) fail("a CTA ends before its copies have arrived");
  cta->cluster->threads--;
  if (cta->cluster->threads > 0) complete_if_all_arrived(cta->cluster);
  if (cta->threads > 0 && (int)cta->waiting.size() == cta->threads) wake_all(cta->waiting);
  machine.idle_reads = 0;
  suspend();
}

static void start_cta(int block, Cluster *cluster) {
  machine.running.push_back(std::make_unique<Cta>());
  Cta *cta = machine.running.back().get();
  cta->block.x = block, cta->cluster = cluster;
  cta->shared = static_cast<unsigned char *>(aligned_alloc(1024, machine.shared_bytes));
  memset(cta->shared, 0xff, machine.shared_bytes);  // NaN in all dtypes
  cta->fibers = std::vector<Fiber>(THREADS);
  cta->warps = std::vector<Lanes>(WARPS);
  cluster->threads += THREADS;
  cluster->ctas.push_back(cta);
  for (Lanes &lanes : cta->warps) lanes.priority = draw(1 << 20);
  for (int thread = 0; thread < THREADS; thread++) {
    Fiber &fiber = cta->fibers[thread];
    fiber.cta = cta, fiber.lanes = &cta->warps[thread / LANES], fiber.thread.x = thread;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.start, live, 0);
    fiber.lanes->all[thread % LANES] = &fiber;
    fiber.lanes->ready.push_back(&fiber);
  }
}

// The warp of highest priority that can go on. Now and then a warp falls behind all others, so that
// what only a barrier keeps in order gets out of order where the barrier is missing.
static Lanes *next_warp() {
  Lanes *best = nullptr;
  for (auto &cta : machine.running)
    for (Lanes &lanes : cta->warps)
      if (!lanes.ready.empty() && (!best || lanes.priority > best->priority)) best = &lanes;
  if (best && draw(16) == 0) best->priority = --machine.lowest;
  return best;
}

// Runs a grid, no more than `most_ctas` of it at once, started in order. Why it cannot end, or null.
extern "C" const char *launch(const Params *params, int grid, int shared_bytes, int most_ctas,
                              int lazy, u32 seed) {
  machine.lazy = lazy, machine.random = seed + 1, machine.params = params;
  machine.shared_bytes = (shared_bytes + 1023) / 1024 * 1024;
  machine.grid.x = grid, machine.idle_reads = 0, machine.lowest = 0, machine.failure.clear();
  std::vector<std::unique_ptr<Cluster>> clusters;
  int started = 0, alive = 0;
  while (machine.failure.empty()) {
    for (; started < grid && alive + CLUSTER <= most_ctas; alive += CLUSTER) {
      clusters.push_back(std::make_unique<Cluster>());
      for (int rank = 0; rank < CLUSTER; rank++) start_cta(started++, clusters.back().get());
    }
    if (alive == 0) break;
    Lanes *lanes = next_warp();
    if (!lanes) {
      machine.failure = "threads wait for one another: a deadlock";
      break;
    }
    machine.switches = false;
    while (!lanes->ready.empty() && !machine.switches && machine.failure.empty()) {
      Fiber *fiber = lanes->ready.front();
      lanes->ready.erase(lanes->ready.begin());
      resume(fiber);
    }
    for (size_t i = 0; i < machine.running.size();) {
      Cta *cta = machine.running[i].get();
      if (cta->cluster->threads > 0) {
        i++;
        continue;
      }
      free(cta->shared);
      machine.running.erase(machine.running.begin() + i);
      alive--;
    }
  }
  for (auto &cta : machine.running) free(cta->shared);
  machine.running.clear();
  while (!machine.stores.empty()) show_store();
  return machine.failure.empty() ? nullptr : machine.failure.c_str();
}
