// A GPU that executes lean.cu on one thread of the CPU: every CUDA thread is a fiber. Fibers switch
// where threads of a GPU meet or wait, so a fiber that is never resumed is an error, not a hang.
//
// Every access to shared memory is noted. Two by different threads without a barrier between are an
// error, and so is what the async proxy reads or overwrites without a fence, or an access past the
// end. g++ reports accesses through pointers with the calls of a sanitizer (lean_on_cpu.py).
//
// Code that depends on a build's macros is in ptx_on_cpu.hpp and wgmma_on_cpu.hpp. All else is here
// and in cuda_on_cpu.cpp, compiled once for all builds: neither may use a macro of a build. Every
// build reads whatever this header includes.
#ifndef CUDA_ON_CPU
#define CUDA_ON_CPU
#include <math.h>
#include <string.h>

#include <initializer_list>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct Index { u32 x; };

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

constexpr int LANES = 32;
constexpr u32 RANK_SHIFT = 24;  // of a peer's shared address: its rank + 1 is above this bit

// Properties of a build.
struct Kernel {
  int warps, cluster;
  bool bf16;             // of the operands of matrix instructions
  void (*run)(const void *params);
};

// A CUDA thread, as seen by kernels.
struct Thread {
  Index index, block;
  unsigned char *shared;
};
extern Thread *current_thread;
extern Index grid;

#define threadIdx (current_thread->index)
#define blockIdx (current_thread->block)
#define gridDim (grid)

// Runs a grid, started in order with at most `most_ctas` running. Returns why it cannot end, or
// null.
const char *run_grid(const Kernel &kernel, const void *params, int ctas, int shared_bytes,
                     int most_ctas, bool lazy, u32 seed);

// ---- where threads meet ------------------------------------------------------------------------

// Returns the value of lane `source`, or the own value if there is no such lane.
u64 shuffle_word(const char *name, u64 value, int source);

template <class T>
inline T shuffle(const char *name, T value, int source) {
  u64 word = 0;
  memcpy(&word, &value, sizeof value);
  word = shuffle_word(name, word, source);
  memcpy(&value, &word, sizeof value);
  return value;
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

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
int __reduce_add_sync(u32, int value);
int __reduce_max_sync(u32, int value);
u32 __ballot_sync(u32, bool vote);
inline bool __any_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
void __syncwarp();
void __syncthreads();
void bar_sync(int barrier, int threads);
void bar_arrive(int barrier, int threads);
void arrive_at_cluster();
void wait_for_cluster();

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
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsub_rn(float a, float b) { return a - b; }
u32 __byte_perm(u32 low, u32 high, u32 selector);
template <class T>
inline T __ldg(const T *at) { return *at; }
template <class T>
inline T __ldcg(const T *at) { return *at; }

// Threads can fall behind in it.
float ex2_approx_ftz(float x);
inline float rcp_approx_ftz(float x) { return 1.0f / x; }
inline float lg2_approx_ftz(float x) { return log2f(x); }

u32 half_of(float x, bool to_bf16);
float cvt_f32_f16(u32 half);
u32 half_of_e4m3(u32 byte);

// ---- shared memory -----------------------------------------------------------------------------

inline unsigned char *shared_memory() { return current_thread->shared; }
u32 shared_address(const void *pointer);
// Returns memory at a shared address, which can be a peer's, to be read.
const unsigned char *read_shared(u32 address, u32 bytes);
void write_shared(u32 address, const void *from, u32 bytes);
// Makes earlier writes of threads visible to bulk copies and warpgroups' matrix instructions.
void fence_proxy();
// Makes barriers that this thread has initialised visible to the cluster.
void fence_barriers();

template <class T>
inline T of_shared(u32 address) {
  T x;
  memcpy(&x, read_shared(address, sizeof x), sizeof x);
  return x;
}

inline float ld_shared_f32(u32 address) { return of_shared<float>(address); }
inline void st_shared_b32(u32 address, u32 x) { write_shared(address, &x, 4); }
inline void st_shared_v4(u32 address, u32 x) {
  const u32 words[4] = {x, x, x, x};
  write_shared(address, words, 16);
}

// ---- matrices ----------------------------------------------------------------------------------

u32 movmatrix_trans(u32 fragment);
void load_matrices(u32 *a, int count, bool trans, u32 address);
inline void ldmatrix_x4(u32 (&a)[4], u32 address) { load_matrices(a, 4, false, address); }
inline void ldmatrix_x4_trans(u32 (&a)[4], u32 address) { load_matrices(a, 4, true, address); }
inline void ldmatrix_x2(u32 (&b)[2], u32 address) { load_matrices(b, 2, false, address); }
void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);

void start_product(float *d, int count, u64 a, u64 b, bool transposed, bool add);
// Starts a product with a left operand in registers.
void start_product(float *d, int count, const u32 (&a)[4], u64 b);
void commit_products();
void wait_for_products(int pending);

// ---- copies to shared memory -------------------------------------------------------------------

void cp_async_cg_16(u32 to, const void *from);
void cp_async_cg_16(u32 to, const void *from, bool copied);
void cp_async_ca_4(u32 to, const void *from, bool copied);
void cp_async_commit_group();
void wait_for_copies(int pending);
// Words of a tensor map: address; size and stride, in numbers, of (head_dim, token, head, outer);
// tokens of a box; bytes of a number, and of a row of a box: 64 and 128 are swizzled.
void copy_box(u32 to, const u64 *words, u32 barrier, int x, int y, int z, int w);
// Copies into the shared memory of every CTA of the cluster.
void copy_box_to_all(u32 to, const u64 *words, u32 barrier, int x, int y, int z, int w);

// Stores in a CTA of the cluster; the bytes arrive there at its barrier.
void store_async(u32 to, const void *from, u32 bytes, u32 barrier);

void init_barrier(u32 barrier, int arrivals);
void arrive(u32 barrier);
void arrive_at_peer(u32 barrier, int rank);
void arrive_with_bytes(u32 barrier, u32 bytes);
// This thread's copies arrive in order, followed by its arrival.
void arrive_after_copies(u32 barrier);
// Waits only for copies that lanes of the own warp start.
void wait_for_parity(u32 barrier, u32 parity);
// Waits for other warps, too. Lanes call it separately.
void wait_for_phase(u32 barrier, u32 parity);

// ---- global memory that other CTAs read and write ----------------------------------------------

void st_relaxed_gpu_b128(u32 *at, uint4 x);
uint4 ld_relaxed_gpu_b128(const u32 *at);
inline void st_release_gpu(void *at, u32 x) { memcpy(at, &x, 4); }
u32 ld_acquire_gpu(const void *at);

// ---- registers of the machine ------------------------------------------------------------------

u64 globaltimer();
inline u32 smid() { return blockIdx.x; }
#endif
