// ptx.cuh of kernels/lean for cuda_on_cpu.hpp: the same functions in C++.
#pragma once
#include "params.cuh"

#include "cuda_on_cpu.hpp"

// ---- shared memory -----------------------------------------------------------------------------

inline unsigned char *shared_memory() { return machine.current->cta->shared; }

inline u32 shared_address(const void *pointer) {
  return SHARED_BASE + (u32)(static_cast<const unsigned char *>(pointer) - shared_memory());
}

// What is at a shared address, a peer's among them.
static unsigned char *at_shared(u32 address, u32 bytes) {
  Cta *cta = machine.current->cta;
  if (const u32 rank = address >> RANK_SHIFT) cta = cta->cluster->ctas[rank - 1];
  const u32 offset = (address & ((1u << RANK_SHIFT) - 1)) - SHARED_BASE;
  if (cta->threads == 0) fail("reads shared memory of a CTA that has ended");
  if (offset % bytes || offset + bytes > machine.shared_bytes)
    fail("an address outside of shared memory, or not aligned");
  return cta->shared + offset;
}

// ---- arithmetic --------------------------------------------------------------------------------

inline float ex2_approx_ftz(float x) {
  // Threads may fall behind anywhere, within a merge too.
  if (draw(256) == 0) yield_to_others();
  return exp2f(x);
}


inline float rcp_approx_ftz(float x) { return 1.0f / x; }
inline float lg2_approx_ftz(float x) { return log2f(x); }

static u32 half_of(float x, bool to_bf16) {
  const u32 sign = bits_of<u32>(x) >> 16 & 0x8000;
  if (to_bf16) {
    const u32 bits = bits_of<u32>(x);
    return x != x ? 0x7fff : bits + 0x7fff + (bits >> 16 & 1) >> 16;
  }
  const float a = fabsf(x);
  if (x != x) return 0x7fff;
  if (a >= 65520.0f) return sign | 0x7c00;
  const int exponent = a < 6.103515625e-05f ? -14 : ilogbf(a);
  return sign | ((exponent + 14 << 10) + (int)rintf(ldexpf(a, 10 - exponent)));
}

inline float cvt_f32_f16(u32 half) {
  const int exponent = half >> 10 & 31, digits = half & 1023;
  const float a = exponent == 31 ? (digits ? NAN : INFINITY)
                                 : ldexpf(digits + (exponent ? 1024 : 0), max(exponent, 1) - 25);
  return half & 0x8000 ? -a : a;
}

static float float_of(u32 half) {
  return BF16_OPERANDS ? bits_of<float>(half << 16) : cvt_f32_f16(half);
}

// `float_of` of all halves.
static const float *floats() {
  static const std::vector<float> table = [] {
    std::vector<float> numbers(1 << 16);
    for (u32 half = 0; half < numbers.size(); half++) numbers[half] = float_of(half);
    return numbers;
  }();
  return table.data();
}

template <bool TO_BF16>
inline u32 cvt_rn_x2(float low, float high) {
  return half_of(low, TO_BF16) | half_of(high, TO_BF16) << 16;
}

#if __CUDA_ARCH__ >= 890
static float e4m3(u32 byte) {
  const int exponent = byte >> 3 & 15, digits = byte & 7;
  const float a = (byte & 127) == 127 ? NAN
                                      : ldexpf(digits + (exponent ? 8 : 0), max(exponent, 1) - 10);
  return byte & 128 ? -a : a;
}

inline u32 cvt_rn_f16x2_e4m3x2(unsigned short pair) {
  return half_of(e4m3(pair & 0xff), false) | half_of(e4m3(pair >> 8), false) << 16;
}

template <int HALF>
inline u32 cvt_rn_f16x2_e4m3x2_half(u32 word) {
  return cvt_rn_f16x2_e4m3x2((unsigned short)(word >> 16 * HALF));
}
#endif

// ---- matrices ----------------------------------------------------------------------------------

struct Fragments {
  u32 words[4];
  u32 address;
};

inline u32 movmatrix_trans(u32 fragment) {
  Fragments own = {{fragment}, 0};
  meet("movmatrix", own, [](Fragments **all) {
    unsigned short matrix[8][8];
    for (int lane = 0; lane < LANES; lane++)
      memcpy(&matrix[lane / 4][lane % 4 * 2], &all[lane]->words[0], 4);
    for (int lane = 0; lane < LANES; lane++) {
      const int row = lane / 4, column = lane % 4 * 2;
      all[lane]->words[0] = matrix[column][row] | (u32)matrix[column + 1][row] << 16;
    }
  });
  return own.words[0];
}

static void load_matrices(u32 *a, int count, bool trans, u32 address) {
  Fragments own = {{}, address};
  meet(trans ? "ldmatrix.trans" : "ldmatrix", own, [&](Fragments **all) {
    for (int i = 0; i < count; i++) {
      unsigned short matrix[8][8];
      for (int row = 0; row < 8; row++)
        memcpy(matrix[row], at_shared(all[8 * i + row]->address, 16), 16);
      for (int lane = 0; lane < LANES; lane++) {
        const int row = lane / 4, column = lane % 4 * 2;
        all[lane]->words[i] =
            trans ? matrix[column][row] | (u32)matrix[column + 1][row] << 16
                  : matrix[row][column] | (u32)matrix[row][column + 1] << 16;
      }
    }
  });
  memcpy(a, own.words, 4 * count);
}

inline void ldmatrix_x4(u32 (&a)[4], u32 address) { load_matrices(a, 4, false, address); }
inline void ldmatrix_x4_trans(u32 (&a)[4], u32 address) { load_matrices(a, 4, true, address); }
inline void ldmatrix_x2(u32 (&b)[2], u32 address) { load_matrices(b, 2, false, address); }

struct Product {
  float *c;
  const u32 *a;
  u32 b[2];
};

inline void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Product own = {c, a, {b0, b1}};
  meet("mma", own, [](Product **all) {
    const float *number = floats();
    float left[16][16], right[8][16];
    for (int lane = 0; lane < LANES; lane++) {
      const int group = lane / 4, pair = lane % 4 * 2;
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++)
          left[group + i % 2 * 8][pair + i / 2 * 8 + j] =
              number[all[lane]->a[i] >> 16 * j & 0xffff];
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++)
          right[group][pair + i * 8 + j] = number[all[lane]->b[i] >> 16 * j & 0xffff];
    }
    for (int lane = 0; lane < LANES; lane++)
      for (int i = 0; i < 4; i++) {
        const float *row = left[lane / 4 + i / 2 * 8], *column = right[lane % 4 * 2 + i % 2];
        float sum = 0.0f;
        for (int k = 0; k < 16; k++) sum += row[k] * column[k];
        all[lane]->c[i] += sum;
      }
  });
}

// ---- copies to shared memory -------------------------------------------------------------------

inline void cp_async_cg_16(u32 to, const void *from) {
  if ((size_t)from % 16) fail("a copy from an address that is no multiple of 16");
  unsigned char *into = at_shared(to, 16);
  if (machine.lazy)
    machine.current->groups.back().push_back({to, 0, {}, static_cast<const unsigned char *>(from)});
  else
    memcpy(into, from, 16);
}

inline void cp_async_cg_16(u32 to, const void *from, bool copied) {
  alignas(16) static const unsigned char zeros[16] = {};
  cp_async_cg_16(to, copied ? from : zeros);
}

inline void cp_async_ca_4(u32 to, const void *from, bool copied) {
  if ((size_t)from % 4) fail("a copy from an address that is no multiple of 4");
  Copy copy = {to, 0, std::vector<unsigned char>(4), nullptr};
  if (copied) memcpy(copy.bytes.data(), from, 4);
  unsigned char *into = at_shared(to, 4);
  if (machine.lazy)
    machine.current->groups.back().push_back(copy);
  else
    memcpy(into, copy.bytes.data(), 4);
}

inline void cp_async_commit_group() { machine.current->groups.emplace_back(); }

template <int PENDING>
inline void cp_async_wait_group() {
  auto &groups = machine.current->groups;
  while (groups.size() > PENDING + 1) {
    for (const Copy &copy : groups.front())
      if (copy.bytes.empty())
        memcpy(at_shared(copy.to, 16), copy.from, 16);
      else
        memcpy(at_shared(copy.to, 4), copy.bytes.data(), 4);
    groups.erase(groups.begin());
  }
}

inline float ld_shared_f32(u32 address) {
  float x;
  memcpy(&x, at_shared(address, 4), 4);
  return x;
}

inline void st_shared_v4(u32 address, u32 x) {
  const u32 words[4] = {x, x, x, x};
  memcpy(at_shared(address, 16), words, 16);
}

inline void st_shared_b32(u32 address, u32 x) { memcpy(at_shared(address, 4), &x, 4); }

#if BULK || ROWS > 32
inline u64 createpolicy_evict_first() { return 0; }
inline u64 createpolicy_evict_unchanged() { return 1; }
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared_cta() {}

static Barrier &barrier_at(u32 address) {
  auto &barriers = machine.current->cta->barriers;
  if (!barriers.count(address)) fail("a barrier that nobody initialised");
  return barriers[address];
}

static void complete_phase(Barrier &barrier) {
  if (barrier.arrivals > 0 || barrier.bytes != 0) return;
  barrier.phase++;
  barrier.arrivals = barrier.expected;
}

static void arrive_at(Barrier &barrier) {
  if (barrier.arrivals-- <= 0) fail("a barrier has more arrivals than a phase takes");
  complete_phase(barrier);
}

static void arrive_copy(const Copy &copy) {
  if (copy.bytes.empty()) {
    if (copy.from)
      memcpy(at_shared(copy.to, 16), copy.from, 16);
    else
      arrive_at(barrier_at(copy.barrier));
    return;
  }
  for (u32 at = 0; at < copy.bytes.size(); at += 16) {
    const u32 to = copy.to + at;
    memcpy(at_shared(to ^ (to >> 7 & copy.swizzle) << 4, 16), &copy.bytes[at], 16);
  }
  Barrier &barrier = barrier_at(copy.barrier);
  barrier.bytes -= copy.bytes.size();
  complete_phase(barrier);
}

// A tensor map's words: address; size and stride, in numbers, of (head_dim, token, head, outer); tokens
// of a box; bytes of a number, and of a row of a box: 64 and 128 are swizzled.
inline void cp_async_bulk_tensor_4d(u32 to, const TensorMap *map, u32 barrier, int x, int y, int z,
                                    int w, u64) {
  const auto *base = reinterpret_cast<const unsigned char *>(map->words[0]);
  const u64 *sizes = map->words + 1, *strides = map->words + 5;
  const int box = map->words[9], number = map->words[10], row_bytes = map->words[11];
  if (to % 128) fail("a bulk copy to an address that is no multiple of 128");
  const u32 swizzle = row_bytes == 64 || row_bytes == 128 ? row_bytes / 16 - 1 : 0;
  Copy copy = {to, barrier, std::vector<unsigned char>(box * row_bytes), nullptr, swizzle};
  const bool outside = x < 0 || z < 0 || w < 0 || (u64)z >= sizes[2] || (u64)w >= sizes[3];
  for (int row = y; row < y + box; row++)
    for (int column = x; column < x + row_bytes / number; column++) {
      if (outside || row < 0 || (u64)row >= sizes[1] || (u64)column >= sizes[0]) continue;
      memcpy(&copy.bytes[(row - y) * row_bytes + (column - x) * number],
             base + (column + row * strides[1] + z * strides[2] + w * strides[3]) * number, number);
    }
  if (machine.lazy)
    machine.current->cta->copies.push_back(std::move(copy));
  else
    arrive_copy(copy);
}

inline void mbarrier_init(u32 barrier) {
  at_shared(barrier, 8);
  machine.current->cta->barriers[barrier] = Barrier();
}

inline void mbarrier_arrive_expect_tx(u32 address, u32 bytes) {
  Barrier &barrier = barrier_at(address);
  barrier.bytes += bytes;
  if (barrier.arrivals-- == 0) fail("a barrier is armed twice in one phase");
  complete_phase(barrier);
}

// Those that a barrier waits for.
inline void arrive_copies(u32 address) {
  auto &copies = machine.current->cta->copies;
  for (size_t i = 0; i < copies.size();) {
    if (copies[i].barrier != address) {
      i++;
      continue;
    }
    const Copy copy = std::move(copies[i]);
    copies.erase(copies.begin() + i);
    arrive_copy(copy);
  }
}

// This thread's copies arrive in their order, and then it does.
inline void cp_async_mbarrier_arrive_noinc(u32 address) {
  barrier_at(address);
  auto &groups = machine.current->groups;
  std::vector<Copy> own;
  for (auto &group : groups)
    for (Copy &copy : group) own.push_back(std::move(copy));
  groups.assign(1, {});
  own.push_back({0, address, {}, nullptr});
  for (Copy &copy : own) {
    copy.barrier = address;
    if (machine.lazy)
      machine.current->cta->copies.push_back(std::move(copy));
    else
      arrive_copy(copy);
  }
}

inline void mbarrier_try_wait_parity(u32 address, u32 parity) {
  // Lane 0 starts copies, which the others may come to wait for before it.
  __syncwarp();
  Barrier &barrier = barrier_at(address);
  if ((barrier.phase & 1) != parity) return;
  arrive_copies(address);
  if ((barrier.phase & 1) == parity) fail("a copy that is waited for never arrives");
}
#endif

// ---- global memory that other CTAs read and write ----------------------------------------------

inline void st_relaxed_gpu_b128(u32 *at, uint4 x) { machine.stores.push_back({at, x}); }

inline uint4 ld_relaxed_gpu_b128(const u32 *at) {
  yield_to_others();
  if (!machine.stores.empty() && draw(2) == 0) show_store();
  uint4 x;
  memcpy(&x, at, 16);
  return x;
}

#if PEERS
// ---- memory that other GPUs read and write -----------------------------------------------------

inline void st_relaxed_sys_b128(u32 *at, uint4 x) { st_relaxed_gpu_b128(at, x); }
inline uint4 ld_relaxed_sys_b128(const u32 *at) { return ld_relaxed_gpu_b128(at); }
inline void st_relaxed_sys_u32(u32 *at, u32 x) { *at = x; }

inline u64 atom_add_relaxed_gpu_u64(u64 *at, u64 x) {
  const u64 before = *at;
  *at += x;
  return before;
}
#endif

// ---- clusters ----------------------------------------------------------------------------------

#if CLUSTER > 1
inline void barrier_cluster_arrive() {
  Fiber *fiber = machine.current;
  Cluster *cluster = fiber->cta->cluster;
  if (fiber->arrived) fail("arrives at a cluster's barrier twice");
  fiber->arrived = true;
  fiber->cluster_phase = cluster->phase;
  cluster->arrived++;
  complete_if_all_arrived(cluster);
}

inline void barrier_cluster_wait() {
  Fiber *fiber = machine.current;
  Cluster *cluster = fiber->cta->cluster;
  if (!fiber->arrived) fail("waits at a cluster's barrier without arriving");
  fiber->arrived = false;
  if (cluster->phase != fiber->cluster_phase) return;
  cluster->waiting.push_back(fiber);
  suspend();
}

inline int cluster_ctarank() { return blockIdx.x % CLUSTER; }

inline u32 mapa_shared_cluster(u32 address, int rank) {
  return address | (u32)(rank + 1) << RANK_SHIFT;
}

template <class T>
static T at_peer(u32 address) {
  T x;
  memcpy(&x, at_shared(address, sizeof x), sizeof x);
  return x;
}

inline float4 ld_shared_cluster_v4(u32 address) { return at_peer<float4>(address); }
inline float2 ld_shared_cluster_v2(u32 address) { return at_peer<float2>(address); }
#endif

// ---- registers of the machine ------------------------------------------------------------------

inline u64 globaltimer() {
  static u64 now = 0;
  return ++now;
}

inline u32 smid() { return blockIdx.x; }
