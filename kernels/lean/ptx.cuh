// PTX instructions without a C++ equivalent, each under its own name.
#pragma once
#include "params.cuh"

DEVICE u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// ---- arithmetic --------------------------------------------------------------------------------

DEVICE float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float cvt_f32_f16(u32 half) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)half));
  return x;
}

// Converts two numbers to 16 bits, `low` to the low half.
template <bool TO_BF16>
DEVICE u32 cvt_rn_x2(float low, float high) {
  u32 both;
  if constexpr (TO_BF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Converts two numbers from e4m3 to fp16; of compute capability 8.9, as the next.
DEVICE u32 cvt_rn_f16x2_e4m3x2(unsigned short pair) {
  u32 both;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(pair));
  return both;
}

// Converts a word's low or high half: the only form of operand that the instruction takes.
template <int HALF>
DEVICE u32 cvt_rn_f16x2_e4m3x2_half(u32 word) {
  u32 both;
  if constexpr (HALF == 0)
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %1;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "}"
        : "=r"(both)
        : "r"(word));
  else
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %1;\n"
        "cvt.rn.f16x2.e4m3x2 %0, high;\n"
        "}"
        : "=r"(both)
        : "r"(word));
  return both;
}

// ---- matrices ----------------------------------------------------------------------------------

DEVICE u32 movmatrix_trans(u32 fragment) {
  u32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
  return result;
}

DEVICE void ldmatrix_x4(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

DEVICE void ldmatrix_x4_trans(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

DEVICE void ldmatrix_x2(u32 (&b)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(b[0]), "=r"(b[1])
               : "r"(address));
}

// c += a b.
DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (BF16_OPERANDS)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- copies to shared memory -------------------------------------------------------------------

DEVICE void cp_async_cg_16(u32 to, const void *from) {
  // Whole lines of 128 bytes are prefetched, unless rows share lines with others that are not
  // needed now: rows of 160 and 192 bytes, one KV head of a token-major cache.
  if constexpr (Build::heads_of_row * (Build::head_dim | Build::v_head_dim) * KV_BYTES % 128 == 0)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Copies if `copied`; otherwise writes zeros and reads nothing.
DEVICE void cp_async_cg_16(u32 to, const void *from, bool copied) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(copied ? 16 : 0)
               : "memory");
}

// Copies 4 bytes if `copied`; otherwise writes zeros and reads nothing.
DEVICE void cp_async_ca_4(u32 to, const void *from, bool copied) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(copied ? 4 : 0)
               : "memory");
}

DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of the latest groups are in flight.
template <int PENDING>
DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE float ld_shared_f32(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}

DEVICE void st_shared_v4(u32 address, u32 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(x) : "memory");
}

DEVICE void st_shared_b32(u32 address, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Of compute capability 9.0, as what follows up to the next section.
// Data read once leaves the L2 first.
DEVICE u64 createpolicy_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

DEVICE u64 createpolicy_evict_unchanged() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies to this CTA, in a cluster too: on compute capability 12.0 the form for memory of a cluster
// is a call of the driver.
DEVICE void cp_async_bulk_tensor_4d(u32 to, const TensorMap *map, u32 barrier, int x, int y, int z,
                                    int w, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
      : "memory");
}

DEVICE void mbarrier_init(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives once for this thread after all of its previous cp.async copies.
DEVICE void cp_async_mbarrier_arrive_noinc(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Polls until the phase of this parity is complete.
DEVICE void mbarrier_try_wait_parity(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

DEVICE void fence_mbarrier_init_release_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void fence_proxy_async_shared_cta() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- global memory that other CTAs read and write ----------------------------------------------

// 16 bytes, accessed as a whole by the threads of SCOPE: gpu or sys (all GPUs).
#define RELAXED_B128(SCOPE)                                 \
  DEVICE void st_relaxed_##SCOPE##_b128(u32 *at, uint4 x) { \
    asm volatile(                                           \
        "{\n"                                               \
        ".reg .b64 low, high;\n"                            \
        ".reg .b128 whole;\n"                               \
        "mov.b64 low, {%1, %2};\n"                          \
        "mov.b64 high, {%3, %4};\n"                         \
        "mov.b128 whole, {low, high};\n"                    \
        "st.relaxed." #SCOPE                                \
        ".global.b128 [%0], whole;\n"                       \
        "}" ::"l"(at),                                      \
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)              \
        : "memory");                                        \
  }                                                         \
                                                            \
  DEVICE uint4 ld_relaxed_##SCOPE##_b128(const u32 *at) {   \
    uint4 x;                                                \
    asm volatile(                                           \
        "{\n"                                               \
        ".reg .b64 low, high;\n"                            \
        ".reg .b128 whole;\n"                               \
        "ld.relaxed." #SCOPE                                \
        ".global.b128 whole, [%4];\n"                       \
        "mov.b128 {low, high}, whole;\n"                    \
        "mov.b64 {%0, %1}, low;\n"                          \
        "mov.b64 {%2, %3}, high;\n"                         \
        "}"                                                 \
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)        \
        : "l"(at)                                           \
        : "memory");                                        \
    return x;                                               \
  }

RELAXED_B128(gpu)

// ---- memory that other GPUs read and write -----------------------------------------------------

RELAXED_B128(sys)

DEVICE void st_relaxed_sys_u32(u32 *at, u32 x) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

DEVICE u64 atom_add_relaxed_gpu_u64(u64 *at, u64 x) {
  u64 before;
  asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(at), "l"(x)
               : "memory");
  return before;
}

// ---- clusters ----------------------------------------------------------------------------------

DEVICE void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}

// Other CTAs see earlier writes only after a releasing fence.
DEVICE void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

DEVICE void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

DEVICE int cluster_ctarank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Returns the address in CTA `rank` of the cluster that corresponds to `address` in this one.
DEVICE u32 mapa_shared_cluster(u32 address, int rank) {
  u32 result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

DEVICE float4 ld_shared_cluster_v4(u32 address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

DEVICE float2 ld_shared_cluster_v2(u32 address) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(address)
               : "memory");
  return x;
}

// Starts a store in a CTA of the cluster; its bytes complete there, at the barrier of the same CTA.
DEVICE void st_async_v4(u32 address, float4 x, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::
          "r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
      : "memory");
}

DEVICE void st_async_v2(u32 address, float2 x, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(
          address),
      "f"(x.x), "f"(x.y), "r"(barrier)
      : "memory");
}

// Polls until the phase of this parity is complete, and acquires what the cluster has stored.
DEVICE void mbarrier_try_wait_parity_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- registers of the machine ------------------------------------------------------------------

// Returns nanoseconds of a clock shared by all SMs.
DEVICE u64 globaltimer() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

DEVICE u32 smid() {
  u32 sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}
