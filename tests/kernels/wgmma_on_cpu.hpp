// wgmma.cuh of kernels/lean for cuda_on_cpu.hpp: the same functions in C++. Matrix instructions
// read shared memory only when they are waited for.
#pragma once
#include "ptx.cuh"

template <int COUNT>
inline void setmaxnreg_dec() {}
template <int COUNT>
inline void setmaxnreg_inc() {}

// ---- barriers ----------------------------------------------------------------------------------

inline void mbarrier_init(u32 barrier, int arrivals) { init_barrier(barrier, arrivals); }
inline void mbarrier_arrive(u32 barrier) { arrive(barrier); }
inline void mbarrier_arrive_cluster(u32 barrier, int rank) { arrive_at_peer(barrier, rank); }

// These barriers wait for other warps, too.
#define mbarrier_try_wait_parity wait_for_phase

inline void prefetch_tensormap(const TensorMap *) {}
inline void prefetch_l2(const void *) {}

inline void cp_async_bulk_tensor_4d_multicast(u32 to, const TensorMap *map, u32 barrier, int x, int y,
                                              int z, int w, u64) {
  copy_box_to_all(to, map->words, barrier, x, y, z, w);
}

// ---- matrices ----------------------------------------------------------------------------------

inline void wgmma_fence() {}
inline void wgmma_commit_group() { commit_products(); }

template <int PENDING>
inline void wgmma_wait_group() {
  wait_for_products(PENDING);
}

template <int COUNT>
inline void hold(float (&)[COUNT]) {}
template <int COUNT>
inline void hold(u32 (&)[COUNT]) {}

inline u64 matrix_descriptor(u32 address, int leading) {
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)(leading >> 4) << 16 |
         (u64)((address & 0x3ffff) >> 4);
}

template <int COUNT>
inline void wgmma_m64k16(float (&d)[COUNT], u64 a, u64 b, int add) {
  start_product(d, COUNT, a, b, false, add);
}
template <int COUNT>
inline void wgmma_m64k16(float (&d)[COUNT], u64 a, u64 b) {
  start_product(d, COUNT, a, b, true, true);
}
template <int COUNT>
inline void wgmma_m64k16(float (&d)[COUNT], const u32 (&a)[4], u64 b) {
  start_product(d, COUNT, a, b);
}
