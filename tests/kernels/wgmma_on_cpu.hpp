// wgmma.cuh of kernels/lean for cuda_on_cpu.hpp: the same functions in C++. Matrix instructions read
// shared memory when they are waited for.
#pragma once
#include "ptx.cuh"

#include <functional>
#include <map>
#include <utility>
#include <vector>

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
template <class T>
inline T __ldcg(const T *at) {
  return *at;
}

template <int COUNT>
inline void setmaxnreg_dec() {}
template <int COUNT>
inline void setmaxnreg_inc() {}

// ---- barriers ----------------------------------------------------------------------------------

inline void mbarrier_init(u32 barrier, int arrivals) {
  mbarrier_init(barrier);
  Barrier &made = machine.current->cta->barriers[barrier];
  made.arrivals = made.expected = arrivals;
}

inline void mbarrier_arrive(u32 address) { arrive_at(barrier_at(address)); }

inline void mbarrier_arrive_cluster(u32 address, int rank) {
  arrive_at(machine.current->cta->cluster->ctas[rank]->barriers.at(address));
}

#if CLUSTER > 1
inline void barrier_cluster_arrive_relaxed() { barrier_cluster_arrive(); }
#endif

// A wait for what other warps do as well: lanes come alone.
inline void wait_for_phase(u32 address, u32 parity) {
  while (true) {
    Barrier &barrier = barrier_at(address);
    if ((barrier.phase & 1) != parity) return;
    arrive_copies(address);
    if ((barrier.phase & 1) == parity) yield_to_others();
  }
}
#define mbarrier_try_wait_parity wait_for_phase

static bool arrive_named(Named &named, int threads) {
  if (++named.arrived < threads) return false;
  named.arrived = 0;
  wake_all(named.waiting);
  return true;
}

inline void bar_sync(int barrier, int threads) {
  Named &named = machine.current->cta->named[barrier];
  if (arrive_named(named, threads)) return;
  named.waiting.push_back(machine.current);
  suspend();
}

inline void bar_arrive(int barrier, int threads) {
  arrive_named(machine.current->cta->named[barrier], threads);
}

inline void st_release_gpu(void *at, u32 x) { memcpy(at, &x, 4); }

inline u32 ld_acquire_gpu(const void *at) {
  yield_to_others();
  u32 x;
  memcpy(&x, at, 4);
  return x;
}

inline void prefetch_tensormap(const TensorMap *) {}
inline void prefetch_l2(const void *) {}

#if CLUSTER > 1
inline void cp_async_bulk_tensor_4d_multicast(u32 to, const TensorMap *map, u32 barrier, int x, int y,
                                              int z, int w, u64 policy) {
  Fiber *own = machine.current;
  Cta *cta = own->cta;
  for (Cta *peer : cta->cluster->ctas) {
    own->cta = peer;
    cp_async_bulk_tensor_4d(to, map, barrier, x, y, z, w, policy);
  }
  own->cta = cta;
}
#endif

// ---- matrices ----------------------------------------------------------------------------------

inline void wgmma_fence() {}

// A thread's matrix instructions that nobody has waited for; the last group is not committed.
static std::vector<std::vector<std::function<void()>>> &products() {
  static std::map<Fiber *, std::vector<std::vector<std::function<void()>>>> of_threads;
  auto &groups = of_threads[machine.current];
  if (groups.empty()) groups.emplace_back();
  return groups;
}

inline void wgmma_commit_group() { products().emplace_back(); }

template <int PENDING>
inline void wgmma_wait_group() {
  auto &groups = products();
  while (groups.size() > PENDING + 1) {
    for (auto &product : groups.front()) product();
    groups.erase(groups.begin());
  }
}

template <int COUNT>
inline void hold(float (&)[COUNT]) {}
template <int COUNT>
inline void hold(u32 (&)[COUNT]) {}

inline u64 matrix_descriptor(u32 address, int leading) {
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)(leading >> 4) << 16 |
         (u64)((address & 0x3ffff) >> 4);
}

static float element(u64 descriptor, int outer, int depth, bool transposed) {
  const u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
            stride = (descriptor >> 32 & 0x3fff) << 4;
  const u32 at = start + (transposed ? outer / 64 * leading + outer % 64 * 2 + depth / 8 * stride +
                                           depth % 8 * 128
                                     : outer / 8 * stride + outer % 8 * 128 + depth * 2);
  unsigned short half;
  memcpy(&half, at_shared(at ^ (at >> 7 & 7) << 4, 2), 2);
  return floats()[half];
}

// This thread's share of d = [d +] a b; `a` has its rows own_row and 8 further.
template <int COUNT>
static void multiply(float *d, const float (&a)[2][16], u64 b, bool transposed, bool add) {
  for (int i = 0; i < COUNT; i++) {
    const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    float sum = add ? d[i] : 0.0f;
    for (int k = 0; k < 16; k++) sum += a[i / 2 % 2][k] * element(b, column, k, transposed);
    d[i] = sum;
  }
}

template <int COUNT>
static void start_product(float (&d)[COUNT], u64 a, u64 b, bool transposed, bool add) {
  float *to = d;
  products().back().push_back([=] {
    float rows[2][16];
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    for (int half = 0; half < 2; half++)
      for (int k = 0; k < 16; k++) rows[half][k] = element(a, row + 8 * half, k, false);
    multiply<COUNT>(to, rows, b, transposed, add);
  });
}

inline void wgmma_m64n64k16(float (&d)[32], u64 a, u64 b, int add) {
  start_product(d, a, b, false, add);
}
inline void wgmma_m64n128k16(float (&d)[64], u64 a, u64 b, int add) {
  start_product(d, a, b, false, add);
}

inline void wgmma_m64n256k16(float (&d)[128], u64 a, u64 b) { start_product(d, a, b, true, true); }
inline void wgmma_m64n128k16(float (&d)[64], u64 a, u64 b) { start_product(d, a, b, true, true); }
inline void wgmma_m64n64k16(float (&d)[32], u64 a, u64 b) { start_product(d, a, b, true, true); }

// Rows of a left operand in registers are spread over four lanes: they are exchanged when it starts.
template <int COUNT>
static void start_product(float (&d)[COUNT], const u32 (&a)[4], u64 b) {
  struct Rows {
    u32 words[4];
    float rows[2][16];
  } own = {{a[0], a[1], a[2], a[3]}, {}};
  meet("wgmma", own, [](Rows **all) {
    for (int lane = 0; lane < LANES; lane++)
      for (int half = 0; half < 2; half++)
        for (int k = 0; k < 16; k++)
          all[lane]->rows[half][k] =
              floats()[all[lane / 4 * 4 + k % 8 / 2]->words[half + k / 8 * 2] >> 16 * (k % 2) &
                       0xffff];
  });
  float *to = d;
  products().back().push_back(
      [=] { multiply<COUNT>(to, own.rows, b, true, true); });
}

inline void wgmma_m64n64k16(float (&d)[32], const u32 (&a)[4], u64 b) { start_product(d, a, b); }
inline void wgmma_m64n128k16(float (&d)[64], const u32 (&a)[4], u64 b) { start_product(d, a, b); }
inline void wgmma_m64n256k16(float (&d)[128], const u32 (&a)[4], u64 b) { start_product(d, a, b); }
