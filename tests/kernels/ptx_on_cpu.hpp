// ptx.cuh of kernels/lean for cuda_on_cpu.hpp: the same functions in C++, those of a build; and how a
// build is launched.
#pragma once
#include "params.cuh"

#include "cuda_on_cpu.hpp"

// ---- arithmetic --------------------------------------------------------------------------------

template <bool TO_BF16>
inline u32 cvt_rn_x2(float low, float high) {
  return half_of(low, TO_BF16) | half_of(high, TO_BF16) << 16;
}

inline u32 cvt_rn_f16x2_e4m3x2(unsigned short pair) {
  return half_of_e4m3(pair & 0xff) | half_of_e4m3(pair >> 8) << 16;
}

template <int HALF>
inline u32 cvt_rn_f16x2_e4m3x2_half(u32 word) {
  return cvt_rn_f16x2_e4m3x2((unsigned short)(word >> 16 * HALF));
}

// ---- copies to shared memory -------------------------------------------------------------------

template <int PENDING>
inline void cp_async_wait_group() {
  wait_for_copies(PENDING);
}

inline u64 createpolicy_evict_first() { return 0; }
inline u64 createpolicy_evict_unchanged() { return 1; }
inline void fence_mbarrier_init_release_cluster() { fence_barriers(); }
inline void fence_proxy_async_shared_cta() { fence_proxy(); }

inline void cp_async_bulk_tensor_4d(u32 to, const TensorMap *map, u32 barrier, int x, int y, int z,
                                    int w, u64) {
  copy_box(to, map->words, barrier, x, y, z, w);
}

inline void mbarrier_init(u32 barrier) { init_barrier(barrier, 1); }
inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) { arrive_with_bytes(barrier, bytes); }
inline void cp_async_mbarrier_arrive_noinc(u32 barrier) { arrive_after_copies(barrier); }
inline void mbarrier_try_wait_parity(u32 barrier, u32 parity) { wait_for_parity(barrier, parity); }

// ---- memory that other GPUs read and write -----------------------------------------------------

inline void st_relaxed_sys_b128(u32 *at, uint4 x) { st_relaxed_gpu_b128(at, x); }
inline uint4 ld_relaxed_sys_b128(const u32 *at) { return ld_relaxed_gpu_b128(at); }
inline void st_relaxed_sys_u32(u32 *at, u32 x) { *at = x; }

inline u64 atom_add_relaxed_gpu_u64(u64 *at, u64 x) {
  const u64 before = *at;
  *at += x;
  return before;
}

// ---- clusters ----------------------------------------------------------------------------------

inline void barrier_cluster_arrive() { arrive_at_cluster(); }
inline void barrier_cluster_arrive_relaxed() { arrive_at_cluster(); }
inline void barrier_cluster_wait() { wait_for_cluster(); }
inline int cluster_ctarank() { return blockIdx.x % Build::cluster; }

inline u32 mapa_shared_cluster(u32 address, int rank) {
  return address | (u32)(rank + 1) << RANK_SHIFT;
}

inline float4 ld_shared_cluster_v4(u32 address) { return of_shared<float4>(address); }
inline float2 ld_shared_cluster_v2(u32 address) { return of_shared<float2>(address); }

inline void st_async_v4(u32 to, float4 x, u32 barrier) { store_async(to, &x, 16, barrier); }
inline void st_async_v2(u32 to, float2 x, u32 barrier) { store_async(to, &x, 8, barrier); }

inline void mbarrier_try_wait_parity_cluster(u32 barrier, u32 parity) {
  wait_for_phase(barrier, parity);
}

// ---- launches ----------------------------------------------------------------------------------

extern "C" void ENTRY(const Params p);

// See `run_grid`.
extern "C" const char *launch(const Params *params, int grid, int shared_bytes, int most_ctas,
                              int lazy, u32 seed) {
  const Kernel kernel = {Build::warps, Build::cluster, BF16_OPERANDS,
                         [](const void *p) { ENTRY(*static_cast<const Params *>(p)); }};
  return run_grid(kernel, params, grid, shared_bytes, most_ctas, lazy, seed);
}
