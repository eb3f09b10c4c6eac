// Hopper-only instructions: matrix instructions of a warpgroup, copies to all CTAs of a cluster,
// barriers of other CTAs; each under its own name.
#pragma once
#include "ptx.cuh"

// ---- barriers ----------------------------------------------------------------------------------

DEVICE void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier at this address in CTA `rank` of the cluster. It signals the end of reads,
// so a release at cluster scope, which takes a microsecond, is unnecessary.
DEVICE void mbarrier_arrive_cluster(u32 barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

DEVICE void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts these threads at a barrier without waiting for the others.
DEVICE void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- registers ---------------------------------------------------------------------------------

template <int COUNT>
DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- global memory that other CTAs read and write ----------------------------------------------

DEVICE void st_release_gpu(void *at, u32 x) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

DEVICE u32 ld_acquire_gpu(const void *at) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

// ---- copies ------------------------------------------------------------------------------------

DEVICE void prefetch_tensormap(const TensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Prefetches the line of `at` into the L2.
DEVICE void prefetch_l2(const void *at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

// Copies to the same address in all CTAs of the cluster; their barriers at `barrier` count the
// bytes.
DEVICE void cp_async_bulk_tensor_4d_multicast(u32 to, const TensorMap *map, u32 barrier, int x,
                                              int y, int z, int w, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w),
      "h"((unsigned short)((1 << Build::cluster) - 1)), "l"(policy)
      : "memory");
}

// ---- matrices ----------------------------------------------------------------------------------

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups are in flight.
template <int PENDING>
DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Prevents the compiler from moving accesses to accumulators across this point.
template <int COUNT>
DEVICE void hold(float (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(x[i])::"memory");
}

template <int COUNT>
DEVICE void hold(u32 (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(x[i])::"memory");
}

// Returns the descriptor of a matrix in shared memory: columns of 128 bytes, swizzled. `leading`:
// bytes between columns if the matrix is read transposed. Groups of eight rows are 1024 bytes
// apart.
DEVICE u64 matrix_descriptor(u32 address, int leading) {
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)(leading >> 4) << 16 |
         (u64)((address & 0x3ffff) >> 4);
}

// Accumulators of a matrix instruction: their names in its text, and its operands.
#define NAMES_OF_32                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_OF_64                                                                       \
  NAMES_OF_32                                                                             \
  ", "                                                                                    \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_OF_128                                                                         \
  NAMES_OF_64                                                                                \
  ", "                                                                                       \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, "    \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "    \
  "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "     \
  "%127"
#define OPERANDS_OF_8(d, i)                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define OPERANDS_FROM(d, i) \
  OPERANDS_OF_8(d, i), OPERANDS_OF_8(d, i + 8), OPERANDS_OF_8(d, i + 16), OPERANDS_OF_8(d, i + 24)
#define OPERANDS_OF_32(d) OPERANDS_FROM(d, 0)
#define OPERANDS_OF_64(d) OPERANDS_FROM(d, 0), OPERANDS_FROM(d, 32)
#define OPERANDS_OF_128(d) OPERANDS_OF_64(d), OPERANDS_FROM(d, 64), OPERANDS_FROM(d, 96)
#define MMA_OF(COLUMNS) "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." OPERAND "." OPERAND

// Defines d = a b of 64 rows and COLUMNS columns, added to d if `add`; both operands have 16
// adjacent numbers of the depth. A_B: their names in the text; ADD: that of `add`.
#define WGMMA_ADD(COLUMNS, COUNT, A_B, ADD)                                                       \
  DEVICE void wgmma_m64k16(float(&d)[COUNT], u64 a, u64 b, int add) {                             \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD                                      \
                 ", 0;\n" MMA_OF(COLUMNS) " {" NAMES_OF_##COUNT "}, " A_B ", add, 1, 1, 0, 0;\n}" \
                 : OPERANDS_OF_##COUNT(d)                                                         \
                 : "l"(a), "l"(b), "r"(add));                                                     \
  }
// Defines d += a b, with b of COLUMNS columns in groups of 64 adjacent ones, and a in memory or
// registers. REST: names of both and flags; then comes a as an operand.
#define WGMMA(COLUMNS, COUNT, A, REST, ...)                           \
  DEVICE void wgmma_m64k16(float(&d)[COUNT], A, u64 b) {              \
    asm volatile(MMA_OF(COLUMNS) " {" NAMES_OF_##COUNT "}, " REST ";" \
                 : OPERANDS_OF_##COUNT(d)                             \
                 : __VA_ARGS__, "l"(b));                              \
  }
#define REGISTERS(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

WGMMA_ADD(64, 32, "%32, %33", "%34")
WGMMA_ADD(128, 64, "%64, %65", "%66")
WGMMA(64, 32, u64 a, "%32, %33, 1, 1, 1, 0, 1", "l"(a))
WGMMA(128, 64, u64 a, "%64, %65, 1, 1, 1, 0, 1", "l"(a))
WGMMA(256, 128, u64 a, "%128, %129, 1, 1, 1, 0, 1", "l"(a))
WGMMA(64, 32, const u32 (&a)[4], "{%32, %33, %34, %35}, %36, 1, 1, 1, 1", REGISTERS(a))
WGMMA(128, 64, const u32 (&a)[4], "{%64, %65, %66, %67}, %68, 1, 1, 1, 1", REGISTERS(a))
WGMMA(256, 128, const u32 (&a)[4], "{%128, %129, %130, %131}, %132, 1, 1, 1, 1", REGISTERS(a))
