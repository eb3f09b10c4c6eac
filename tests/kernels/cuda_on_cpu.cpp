// Implementation of cuda_on_cpu.hpp.
#include "cuda_on_cpu.hpp"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

Thread *current_thread;
Index grid;

namespace {

struct Copy {
  u32 to, barrier;
  std::vector<unsigned char> bytes;  // empty: 16 bytes from `from`, or an arrival if that is null
  const unsigned char *from;
  u32 swizzle;  // part of a 128-byte row's number that is XORed with numbers of pieces
  struct Fiber *by;  // cp.async: the thread that started it
};

// A store of 16 bytes to global memory.
struct Store {
  u32 *at;
  uint4 x;
};

struct Barrier {
  int arrivals = 1, expected = 1;
  i64 bytes = 0;
  u32 phase = 0, completed = 0;  // completed: time of the last phase's end
  struct Fiber *maker = nullptr;
  u32 made = 0;
};

// The latest accesses of four bytes of shared memory by threads, not by bulk copies.
struct Word {
  struct Fiber *writer, *reader;
  u32 written, read;
};

// A thread's share of d = [d +] a b, computed when it is waited for.
struct WarpgroupProduct {
  float *d;
  int count;
  bool loaded;         // `rows` has the thread's two rows of a
  float rows[2][16];
  u64 a, b;            // matrix descriptors
  bool transposed, add;
};

struct Fiber : Thread {
  struct Cta *cta;
  struct Lanes *lanes;
  ucontext_t start;
  jmp_buf at;
  bool started = false;
  std::unique_ptr<char[]> stack;
  const void *argument;                      // of the collective in which it waits
  std::vector<std::vector<Copy>> groups{1};  // cp.async; the last one is not committed
  std::vector<std::vector<WarpgroupProduct>> products{1};  // wgmma; the last one is not committed
  bool arrived = false;                      // at its cluster's barrier
  u32 cluster_phase = 0;
  // Times of its latest barrier, proxy fence and fence of barriers.
  u32 synced = 0, fenced = 0, shown = 0;
};

// A warp: its runnable fibers, those that wait for a copy, and those that wait in a collective.
struct Lanes {
  Fiber *all[LANES];
  std::vector<Fiber *> ready, late;
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

// A named barrier: the number of arrivals, and the waiting threads.
struct Named {
  int arrived = 0;
  std::vector<Fiber *> waiting;
};

struct Cta {
  int threads;
  std::vector<Fiber> fibers;
  std::vector<Lanes> warps;
  std::vector<Fiber *> waiting;  // at __syncthreads
  std::map<u32, Barrier> barriers;
  std::map<int, Named> named;
  std::vector<Copy> copies;  // in flight
  unsigned char *shared;
  Word *words;     // of shared memory
  u32 fenced = 0;  // a proxy fence covers what all threads wrote before this time
  Cluster *cluster;
};

struct Machine {
  Kernel kernel;
  const float *floats;  // values of the 16-bit numbers of operands
  bool lazy;            // copies and products end when they are waited for; otherwise at once
  u32 random, shared_bytes;
  u32 now;              // grows at barriers and fences
  const void *params;
  Fiber *current;
  bool switches;  // to another warp
  jmp_buf scheduler;
  int idle_reads;
  i64 lowest;
  std::string failure;
  std::vector<std::unique_ptr<Cta>> running;
  std::vector<Store> stores;  // not visible yet
};
Machine machine;

constexpr u32 SHARED_BASE = 1024;  // shared address of a CTA's first byte
// Memory after a CTA's shared memory, so that accesses past its end are noticed.
constexpr u32 GUARD_BYTES = 1 << 18;
constexpr size_t STACK_BYTES = 1 << 16;
constexpr int MOST_IDLE_READS = 1 << 22;

u32 draw(u32 below) {
  u32 &x = machine.random;
  x ^= x << 13, x ^= x >> 17, x ^= x << 5;
  return x % below;
}

// ---- fibers ------------------------------------------------------------------------------------

__attribute__((noinline)) void suspend() {
  if (!_setjmp(machine.current->at)) _longjmp(machine.scheduler, 1);
}

__attribute__((noinline)) void resume(Fiber *fiber) {
  machine.current = fiber, current_thread = fiber;
  if (_setjmp(machine.scheduler)) return;
  if (fiber->started) _longjmp(fiber->at, 1);
  fiber->started = true;
  setcontext(&fiber->start);
}

void fail(const std::string &reason) {
  if (machine.failure.empty())
    machine.failure = "CTA " + std::to_string(blockIdx.x) + ", thread " +
                      std::to_string(threadIdx.x) + ": " + reason;
  suspend();
}

void wake(Fiber *fiber) {
  fiber->lanes->ready.push_back(fiber);
  machine.idle_reads = 0;
}

void wake_all(std::vector<Fiber *> &waiting) {
  for (Fiber *fiber : waiting) wake(fiber);
  waiting.clear();
}

// Makes a pending store visible. The order of stores is arbitrary.
void show_store() {
  std::swap(machine.stores[draw(machine.stores.size())], machine.stores.back());
  memcpy(machine.stores.back().at, &machine.stores.back().x, 16);
  machine.stores.pop_back();
  machine.idle_reads = 0;
}

// Lets all others run before this thread's warp continues.
void yield_to_others() {
  Lanes *lanes = machine.current->lanes;
  if (++machine.idle_reads > MOST_IDLE_READS) fail("waits for a partial that nobody stores");
  lanes->priority = --machine.lowest;
  machine.switches = true;
  lanes->ready.push_back(machine.current);
  suspend();
}

// ---- order of accesses to shared memory --------------------------------------------------------

// Threads see each other's accesses only across barriers: warp-wide instructions order no memory. A
// barrier orders all that came before it in time, which is more than a GPU promises.
void order(Fiber *fiber) { fiber->synced = machine.now; }

void order(const std::vector<Fiber *> &fibers) {
  machine.now++;
  for (Fiber *fiber : fibers) order(fiber);
}

std::string name_of(const Fiber *fiber) {
  return "thread " + std::to_string(fiber->index.x) + " of CTA " + std::to_string(fiber->block.x);
}

void check_order(Fiber *other, u32 time, const char *what) {
  if (other && other != machine.current && time >= machine.current->synced)
    fail(what + name_of(other) + " without a barrier between");
}

void note_read(Cta *cta, u32 offset, u32 bytes) {
  for (u32 i = offset / 4; i < (offset + bytes + 3) / 4; i++) {
    Word &word = cta->words[i];
    check_order(word.writer, word.written, "reads what was written by ");
    word.reader = machine.current, word.read = machine.now;
  }
}

void note_write(Cta *cta, u32 offset, u32 bytes, Fiber *by) {
  for (u32 i = offset / 4; i < (offset + bytes + 3) / 4; i++) {
    Word &word = cta->words[i];
    check_order(word.reader, word.read, "overwrites what was read by ");
    check_order(word.writer, word.written, "overwrites what was written by ");
    word.writer = by, word.written = machine.now;
  }
}

// The async proxy, of bulk copies and warpgroups' matrix instructions, sees the writes of threads
// only across a fence: of the writer, or of a thread that a barrier has ordered after the write.
void check_fence(const Cta *cta, const Word &word) {
  if (word.writer && word.written >= cta->fenced && word.written >= word.writer->fenced)
    fail("no proxy fence follows what was written by " + name_of(word.writer));
}

// ---- where threads meet ------------------------------------------------------------------------

// A collective of a warp: the last lane to arrive calls `combine` with all lanes' arguments.
template <class Argument, class Combine>
void meet(const char *name, Argument &argument, Combine combine) {
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

struct Exchange {
  u64 value;
  int source;
};

template <class Join>
int reduce_lanes(const char *name, int value, Join join) {
  meet(name, value, [&](int **all) {
    int result = *all[0];
    for (int lane = 1; lane < LANES; lane++) result = join(result, *all[lane]);
    for (int lane = 0; lane < LANES; lane++) *all[lane] = result;
  });
  return value;
}

void complete_if_all_arrived(Cluster *cluster) {
  if (cluster->arrived < cluster->threads) return;
  cluster->arrived = 0;
  cluster->phase++;
  order(cluster->waiting);
  wake_all(cluster->waiting);
}

bool arrive_named(Named &named, int threads) {
  if (++named.arrived < threads) return false;
  named.arrived = 0;
  order(named.waiting);
  wake_all(named.waiting);
  return true;
}

}  // namespace

u64 shuffle_word(const char *name, u64 value, int source) {
  Exchange own = {value, source};
  meet(name, own, [](Exchange **all) {
    u64 values[LANES];
    for (int lane = 0; lane < LANES; lane++) values[lane] = all[lane]->value;
    for (int lane = 0; lane < LANES; lane++)
      if (all[lane]->source >= 0) all[lane]->value = values[all[lane]->source];
  });
  return own.value;
}

int __reduce_add_sync(u32, int value) {
  return reduce_lanes("redux.add", value, [](int a, int b) { return a + b; });
}

int __reduce_max_sync(u32, int value) { return reduce_lanes("redux.max", value, max); }

u32 __ballot_sync(u32, bool vote) {
  const int bit = vote ? 1 << own_lane() : 0;
  return reduce_lanes("vote.ballot", bit, [](int a, int b) { return a | b; });
}

void __syncwarp() {
  int none = 0;
  meet("bar.warp", none, [](int **) {
    Lanes *lanes = machine.current->lanes;
    machine.now++;
    for (Fiber *lane : lanes->all) order(lane);
  });
}

void __syncthreads() {
  Cta *cta = machine.current->cta;
  cta->waiting.push_back(machine.current);
  if ((int)cta->waiting.size() < cta->threads) return suspend();
  order(cta->waiting);
  cta->waiting.pop_back();
  wake_all(cta->waiting);
}

void bar_sync(int barrier, int threads) {
  Named &named = machine.current->cta->named[barrier];
  if (arrive_named(named, threads)) return order(machine.current);
  named.waiting.push_back(machine.current);
  suspend();
}

void bar_arrive(int barrier, int threads) {
  arrive_named(machine.current->cta->named[barrier], threads);
}

void arrive_at_cluster() {
  Fiber *fiber = machine.current;
  Cluster *cluster = fiber->cta->cluster;
  if (fiber->arrived) fail("arrives at a cluster's barrier twice");
  fiber->arrived = true;
  fiber->cluster_phase = cluster->phase;
  cluster->arrived++;
  complete_if_all_arrived(cluster);
}

void wait_for_cluster() {
  Fiber *fiber = machine.current;
  Cluster *cluster = fiber->cta->cluster;
  if (!fiber->arrived) fail("waits at a cluster's barrier without arriving");
  fiber->arrived = false;
  if (cluster->phase != fiber->cluster_phase) return order(fiber);
  cluster->waiting.push_back(fiber);
  suspend();
}

// ---- arithmetic --------------------------------------------------------------------------------

// Bytes of two words, selected by the digits of the selector.
u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const u64 both = (u64)high << 32 | low;
  u32 bytes = 0;
  for (int i = 0; i < 4; i++) bytes |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return bytes;
}

float ex2_approx_ftz(float x) {
  // Threads can fall behind anywhere, even within a merge.
  if (draw(256) == 0) yield_to_others();
  return exp2f(x);
}

u32 half_of(float x, bool to_bf16) {
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

float cvt_f32_f16(u32 half) {
  const int exponent = half >> 10 & 31, digits = half & 1023;
  const float a = exponent == 31 ? (digits ? NAN : INFINITY)
                                 : ldexpf(digits + (exponent ? 1024 : 0), max(exponent, 1) - 25);
  return half & 0x8000 ? -a : a;
}

u32 half_of_e4m3(u32 byte) {
  const int exponent = byte >> 3 & 15, digits = byte & 7;
  const float a = (byte & 127) == 127 ? NAN
                                      : ldexpf(digits + (exponent ? 8 : 0), max(exponent, 1) - 10);
  return half_of(byte & 128 ? -a : a, false);
}

// The values of all 16-bit numbers.
static std::vector<float> floats_of(bool bf16) {
  std::vector<float> numbers(1 << 16);
  for (u32 half = 0; half < numbers.size(); half++)
    numbers[half] = bf16 ? bits_of<float>(half << 16) : cvt_f32_f16(half);
  return numbers;
}

// ---- shared memory -----------------------------------------------------------------------------

u32 shared_address(const void *pointer) {
  return SHARED_BASE + (u32)(static_cast<const unsigned char *>(pointer) - shared_memory());
}

namespace {

// Memory of a CTA at a shared address.
struct Place {
  Cta *cta;
  u32 offset;

  unsigned char *memory() const { return cta->shared + offset; }
};

Place at_shared(u32 address, u32 bytes) {
  Cta *cta = machine.current->cta;
  if (const u32 rank = address >> RANK_SHIFT) cta = cta->cluster->ctas[rank - 1];
  const u32 offset = (address & ((1u << RANK_SHIFT) - 1)) - SHARED_BASE;
  if (cta->threads == 0) fail("reads shared memory of a CTA that has ended");
  if (offset % bytes || offset + bytes > machine.shared_bytes)
    fail("an address outside of shared memory, or not aligned");
  return {cta, offset};
}

// Reads an operand of a warpgroup's matrix instruction.
const unsigned char *operand(u32 address, u32 bytes) {
  const Place place = at_shared(address, bytes);
  note_read(place.cta, place.offset, bytes);
  for (u32 i = place.offset / 4; i < (place.offset + bytes) / 4; i++)
    check_fence(place.cta, place.cta->words[i]);
  return place.memory();
}

// Notes an access of a kernel through a pointer, which g++ reports.
template <bool WRITES>
void note_access(const void *at, size_t bytes) {
  const size_t offset = static_cast<const unsigned char *>(at) - current_thread->shared;
  if (offset >= machine.shared_bytes + GUARD_BYTES) return;
  if (offset + bytes > machine.shared_bytes) fail("an address past the end of shared memory");
  if (WRITES)
    note_write(machine.current->cta, offset, bytes, machine.current);
  else
    note_read(machine.current->cta, offset, bytes);
}

}  // namespace

const unsigned char *read_shared(u32 address, u32 bytes) {
  const Place place = at_shared(address, bytes);
  note_read(place.cta, place.offset, bytes);
  return place.memory();
}

void write_shared(u32 address, const void *from, u32 bytes) {
  const Place place = at_shared(address, bytes);
  // Two warpgroups may both clear the same values, each before its own reads.
  if (memcmp(place.memory(), from, bytes) == 0) return;
  note_write(place.cta, place.offset, bytes, machine.current);
  memcpy(place.memory(), from, bytes);
}

#define NOTED(BYTES)                                                                              \
  extern "C" void __asan_load##BYTES##_noabort(const void *at) { note_access<false>(at, BYTES); } \
  extern "C" void __asan_store##BYTES##_noabort(const void *at) { note_access<true>(at, BYTES); }
NOTED(1)
NOTED(2)
NOTED(4)
NOTED(8)
NOTED(16)
extern "C" void __asan_loadN_noabort(const void *at, size_t bytes) { note_access<false>(at, bytes); }
extern "C" void __asan_storeN_noabort(const void *at, size_t bytes) { note_access<true>(at, bytes); }
extern "C" void __asan_handle_no_return() {}

void fence_proxy() {
  Fiber *own = machine.current;
  own->fenced = ++machine.now;
  own->cta->fenced = max(own->cta->fenced, own->synced);
}

void fence_barriers() { machine.current->shown = ++machine.now; }

// ---- matrices ----------------------------------------------------------------------------------

namespace {

struct Fragments {
  u32 words[4];
  u32 address;
};

struct Product {
  float *c;
  const u32 *a;
  u32 b[2];
};

// Returns the address of a number of an operand; numbers of a 16-byte piece are adjacent.
u32 operand_at(u64 descriptor, int outer, int depth, bool transposed) {
  const u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
            stride = (descriptor >> 32 & 0x3fff) << 4;
  const u32 at = start + (transposed ? outer / 64 * leading + outer % 64 * 2 + depth / 8 * stride +
                                           depth % 8 * 128
                                     : outer / 8 * stride + outer % 8 * 128 + depth * 2);
  return at ^ (at >> 7 & 7) << 4;
}

// Loads the 16 numbers of a row of a, or of a column of b that is not transposed.
void load_row(u64 descriptor, int outer, float (&numbers)[16]) {
  for (int depth = 0; depth < 16; depth += 8) {
    unsigned short halves[8];
    memcpy(halves, operand(operand_at(descriptor, outer, depth, false), 16), 16);
    for (int i = 0; i < 8; i++) numbers[depth + i] = machine.floats[halves[i]];
  }
}

// Loads two columns of b; the first has an even number.
void load_columns(u64 descriptor, int column, bool transposed, float (&numbers)[2][16]) {
  if (!transposed) {
    for (int i = 0; i < 2; i++) load_row(descriptor, column + i, numbers[i]);
    return;
  }
  for (int depth = 0; depth < 16; depth++) {
    unsigned short halves[2];
    memcpy(halves, operand(operand_at(descriptor, column, depth, true), 4), 4);
    for (int i = 0; i < 2; i++) numbers[i][depth] = machine.floats[halves[i]];
  }
}

// Computes this thread's share: two of each 8 columns, in a row of the warpgroup and the one 8
// further.
void multiply(WarpgroupProduct &own) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  if (!own.loaded)
    for (int i = 0; i < 2; i++) load_row(own.a, row + 8 * i, own.rows[i]);
  for (int first = 0; first < own.count; first += 4) {
    float columns[2][16];
    load_columns(own.b, 2 * first + threadIdx.x % 4 * 2, own.transposed, columns);
    for (int i = 0; i < 4; i++) {
      float sum = own.add ? own.d[first + i] : 0.0f;
      for (int k = 0; k < 16; k++) sum += own.rows[i / 2][k] * columns[i % 2][k];
      own.d[first + i] = sum;
    }
  }
}

// Operands may be read as soon as a product starts, and as late as it is waited for.
void start(WarpgroupProduct product) {
  if (machine.lazy)
    machine.current->products.back().push_back(product);
  else
    multiply(product);
}

}  // namespace

u32 movmatrix_trans(u32 fragment) {
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

void load_matrices(u32 *a, int count, bool trans, u32 address) {
  Fragments own = {{}, address};
  if (own_lane() < 8 * count) read_shared(address, 16);
  meet(trans ? "ldmatrix.trans" : "ldmatrix", own, [&](Fragments **all) {
    for (int i = 0; i < count; i++) {
      unsigned short matrix[8][8];
      for (int row = 0; row < 8; row++)
        memcpy(matrix[row], at_shared(all[8 * i + row]->address, 16).memory(), 16);
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

void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Product own = {c, a, {b0, b1}};
  meet("mma", own, [](Product **all) {
    const float *number = machine.floats;
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

void start_product(float *d, int count, u64 a, u64 b, bool transposed, bool add) {
  start({d, count, false, {}, a, b, transposed, add});
}

// Rows of a left operand in registers are spread over four lanes, which exchange them at the start.
void start_product(float *d, int count, const u32 (&a)[4], u64 b) {
  struct Rows {
    u32 words[4];
    float rows[2][16];
  } own = {{a[0], a[1], a[2], a[3]}, {}};
  meet("wgmma", own, [](Rows **all) {
    for (int lane = 0; lane < LANES; lane++)
      for (int half = 0; half < 2; half++)
        for (int k = 0; k < 16; k++)
          all[lane]->rows[half][k] =
              machine.floats[all[lane / 4 * 4 + k % 8 / 2]->words[half + k / 8 * 2] >>
                                 16 * (k % 2) &
                             0xffff];
  });
  WarpgroupProduct product = {d, count, true, {}, 0, b, true, true};
  memcpy(product.rows, own.rows, sizeof own.rows);
  start(product);
}

void commit_products() { machine.current->products.emplace_back(); }

void wait_for_products(int pending) {
  auto &groups = machine.current->products;
  while ((int)groups.size() > pending + 1) {
    for (WarpgroupProduct &product : groups.front()) multiply(product);
    groups.erase(groups.begin());
  }
}

// ---- copies to shared memory -------------------------------------------------------------------

namespace {

void complete_phase(Barrier &barrier) {
  if (barrier.arrivals > 0 || barrier.bytes != 0) return;
  barrier.phase++;
  barrier.completed = ++machine.now;
  barrier.arrivals = barrier.expected;
}

Barrier &barrier_at(u32 address) {
  auto &barriers = machine.current->cta->barriers;
  if (!barriers.count(address)) fail("a barrier that nobody initialised");
  return barriers[address];
}

// Returns a barrier that another CTA of the cluster may have made.
Barrier &barrier_of_peer(Cta *peer, u32 address) {
  if (!peer->barriers.count(address)) fail("a barrier of another CTA that nobody initialised");
  Barrier &barrier = peer->barriers.at(address);
  if (peer != machine.current->cta && barrier.made >= barrier.maker->shown)
    fail("a barrier of another CTA that no fence has shown to the cluster");
  return barrier;
}

void arrive_at(Barrier &barrier) {
  if (barrier.arrivals-- <= 0) fail("a barrier has more arrivals than a phase takes");
  complete_phase(barrier);
}

// Writes what a thread has copied with cp.async, as its own write.
void write_copy(const Copy &copy) {
  const u32 bytes = copy.from ? 16 : 4;
  const Place place = at_shared(copy.to, bytes);
  for (u32 i = place.offset / 4; i < (place.offset + bytes) / 4; i++)
    place.cta->words[i].writer = copy.by, place.cta->words[i].written = machine.now;
  memcpy(place.memory(), copy.from ? copy.from : copy.bytes.data(), bytes);
}

void arrive_copy(const Copy &copy) {
  if (copy.bytes.empty()) {
    if (copy.from)
      write_copy(copy);
    else
      arrive_at(barrier_at(copy.barrier));
    return;
  }
  const u32 piece = min(16, copy.bytes.size());
  for (u32 at = 0; at < copy.bytes.size(); at += piece) {
    const u32 to = copy.to + at;
    memcpy(at_shared(to ^ (to >> 7 & copy.swizzle) << 4, piece).memory(), &copy.bytes[at], piece);
  }
  Barrier &barrier = barrier_at(copy.barrier);
  barrier.bytes -= copy.bytes.size();
  complete_phase(barrier);
}

// Completes the copies that a barrier waits for.
void arrive_copies(u32 address) {
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

}  // namespace

namespace {

void start_copy(const Copy &copy, u32 bytes) {
  const Place place = at_shared(copy.to, bytes);
  note_write(place.cta, place.offset, bytes, machine.current);
  if (machine.lazy)
    machine.current->groups.back().push_back(copy);
  else
    write_copy(copy);
}

}  // namespace

void cp_async_cg_16(u32 to, const void *from) {
  if ((size_t)from % 16) fail("a copy from an address that is no multiple of 16");
  start_copy({to, 0, {}, static_cast<const unsigned char *>(from), 0, machine.current}, 16);
}

void cp_async_cg_16(u32 to, const void *from, bool copied) {
  alignas(16) static const unsigned char zeros[16] = {};
  cp_async_cg_16(to, copied ? from : zeros);
}

void cp_async_ca_4(u32 to, const void *from, bool copied) {
  if ((size_t)from % 4) fail("a copy from an address that is no multiple of 4");
  Copy copy = {to, 0, std::vector<unsigned char>(4), nullptr, 0, machine.current};
  if (copied) memcpy(copy.bytes.data(), from, 4);
  start_copy(copy, 4);
}

void cp_async_commit_group() { machine.current->groups.emplace_back(); }

void wait_for_copies(int pending) {
  auto &groups = machine.current->groups;
  while ((int)groups.size() > pending + 1) {
    for (const Copy &copy : groups.front()) write_copy(copy);
    groups.erase(groups.begin());
  }
}

// Checks that a bulk copy may overwrite memory.
static void begin_bulk_copy(u32 to, u32 bytes) {
  const Place place = at_shared(to, 16);
  at_shared(to + bytes - 16, 16);
  for (u32 i = place.offset / 4; i < (place.offset + bytes) / 4; i++) {
    Word &word = place.cta->words[i];
    check_fence(place.cta, word);
    check_order(word.reader, word.read, "copies over what was read by ");
    check_order(word.writer, word.written, "copies over what was written by ");
    word = {};
  }
}

void copy_box(u32 to, const u64 *words, u32 barrier, int x, int y, int z, int w) {
  const auto *base = reinterpret_cast<const unsigned char *>(words[0]);
  const u64 *sizes = words + 1, *strides = words + 5;
  const int box = words[9], number = words[10], row_bytes = words[11];
  if (to % 128) fail("a bulk copy to an address that is no multiple of 128");
  const u32 swizzle = row_bytes == 64 || row_bytes == 128 ? row_bytes / 16 - 1 : 0;
  Copy copy = {to, barrier, std::vector<unsigned char>(box * row_bytes), nullptr, swizzle};
  begin_bulk_copy(to, copy.bytes.size());
  const Place place = at_shared(barrier, 8);
  for (int i = 0; i < 2; i++) check_fence(place.cta, place.cta->words[place.offset / 4 + i]);
  const bool outside = z < 0 || w < 0 || (u64)z >= sizes[2] || (u64)w >= sizes[3];
  for (int row = y; row < y + box; row++)
    for (int column = x; column < x + row_bytes / number; column++) {
      if (outside || row < 0 || (u64)row >= sizes[1] || column < 0 || (u64)column >= sizes[0])
        continue;
      memcpy(&copy.bytes[(row - y) * row_bytes + (column - x) * number],
             base + (column + row * strides[1] + z * strides[2] + w * strides[3]) * number, number);
    }
  if (machine.lazy)
    machine.current->cta->copies.push_back(std::move(copy));
  else
    arrive_copy(copy);
}

void copy_box_to_all(u32 to, const u64 *words, u32 barrier, int x, int y, int z, int w) {
  Fiber *own = machine.current;
  Cta *cta = own->cta;
  for (Cta *peer : cta->cluster->ctas) {
    barrier_of_peer(peer, barrier);
    own->cta = peer;
    copy_box(to, words, barrier, x, y, z, w);
  }
  own->cta = cta;
}

void store_async(u32 to, const void *from, u32 bytes, u32 barrier) {
  constexpr u32 LOCAL = (1u << RANK_SHIFT) - 1;
  if (to >> RANK_SHIFT != barrier >> RANK_SHIFT) fail("a store and its barrier in different CTAs");
  const Place place = at_shared(to, bytes);
  barrier_of_peer(place.cta, barrier & LOCAL);
  note_write(place.cta, place.offset, bytes, machine.current);
  const auto *first = static_cast<const unsigned char *>(from);
  Copy copy = {to & LOCAL, barrier & LOCAL, {first, first + bytes}, nullptr, 0};
  if (machine.lazy) return place.cta->copies.push_back(std::move(copy));
  Fiber *own = machine.current;
  Cta *cta = own->cta;
  own->cta = place.cta;
  arrive_copy(copy);
  own->cta = cta;
}

void init_barrier(u32 barrier, int arrivals) {
  const u64 none = 0;
  write_shared(barrier, &none, 8);
  Barrier &made = machine.current->cta->barriers[barrier] = Barrier();
  made.arrivals = made.expected = arrivals;
  made.maker = machine.current, made.made = machine.now;
}

void arrive(u32 address) { arrive_at(barrier_at(address)); }

void arrive_at_peer(u32 address, int rank) {
  arrive_at(barrier_of_peer(machine.current->cta->cluster->ctas[rank], address));
}

void arrive_with_bytes(u32 address, u32 bytes) {
  Barrier &barrier = barrier_at(address);
  barrier.bytes += bytes;
  if (barrier.arrivals-- == 0) fail("a barrier is armed twice in one phase");
  complete_phase(barrier);
}

void arrive_after_copies(u32 address) {
  barrier_at(address);
  auto &groups = machine.current->groups;
  std::vector<Copy> own;
  for (auto &group : groups)
    for (Copy &copy : group) own.push_back(std::move(copy));
  groups.assign(1, {});
  own.push_back({0, address});
  for (Copy &copy : own) {
    copy.barrier = address;
    if (machine.lazy)
      machine.current->cta->copies.push_back(std::move(copy));
    else
      arrive_copy(copy);
  }
}

namespace {

// Returns whether the phase of this parity is complete, after the arrival of the barrier's copies.
bool is_complete(u32 address, u32 parity) {
  Barrier &barrier = barrier_at(address);
  if ((barrier.phase & 1) == parity) arrive_copies(address);
  if ((barrier.phase & 1) == parity) return false;
  machine.current->synced = max(machine.current->synced, barrier.completed);
  return true;
}

}  // namespace

void wait_for_parity(u32 address, u32 parity) {
  if (is_complete(address, parity)) return;
  // Another lane may start the copies later.
  machine.current->lanes->late.push_back(machine.current);
  suspend();
  if (!is_complete(address, parity)) fail("a copy that is waited for never arrives");
}

void wait_for_phase(u32 address, u32 parity) {
  while (!is_complete(address, parity)) yield_to_others();
}

// ---- global memory that other CTAs read and write ----------------------------------------------

void st_relaxed_gpu_b128(u32 *at, uint4 x) { machine.stores.push_back({at, x}); }

uint4 ld_relaxed_gpu_b128(const u32 *at) {
  yield_to_others();
  if (!machine.stores.empty() && draw(2) == 0) show_store();
  uint4 x;
  memcpy(&x, at, 16);
  return x;
}

u32 ld_acquire_gpu(const void *at) {
  yield_to_others();
  u32 x;
  memcpy(&x, at, 4);
  return x;
}

u64 globaltimer() {
  static u64 now = 0;
  return ++now;
}

// ---- launches ----------------------------------------------------------------------------------

namespace {

// The main function of a fiber.
void live() {
  machine.kernel.run(machine.params);
  Cta *cta = machine.current->cta;
  if (--cta->threads == 0 && !cta->copies.empty()) fail("a CTA ends before its copies have arrived");
  cta->cluster->threads--;
  if (cta->cluster->threads > 0) complete_if_all_arrived(cta->cluster);
  if (cta->threads > 0 && (int)cta->waiting.size() == cta->threads) {
    order(cta->waiting);
    wake_all(cta->waiting);
  }
  machine.idle_reads = 0;
  suspend();
}

void start_cta(int block, Cluster *cluster) {
  const int threads = LANES * machine.kernel.warps;
  machine.running.push_back(std::make_unique<Cta>());
  Cta *cta = machine.running.back().get();
  cta->cluster = cluster, cta->threads = threads;
  const u32 whole = (machine.shared_bytes + 1023) / 1024 * 1024;
  cta->shared = static_cast<unsigned char *>(aligned_alloc(1024, whole + GUARD_BYTES));
  memset(cta->shared, 0xff, machine.shared_bytes);  // NaN in all dtypes
  cta->words = static_cast<Word *>(calloc(whole / 4, sizeof(Word)));
  cta->fibers = std::vector<Fiber>(threads);
  cta->warps = std::vector<Lanes>(machine.kernel.warps);
  cluster->threads += threads;
  cluster->ctas.push_back(cta);
  for (Lanes &lanes : cta->warps) lanes.priority = draw(1 << 20);
  for (int thread = 0; thread < threads; thread++) {
    Fiber &fiber = cta->fibers[thread];
    fiber.cta = cta, fiber.lanes = &cta->warps[thread / LANES], fiber.index.x = thread;
    fiber.block.x = block, fiber.shared = cta->shared;
    fiber.stack.reset(new char[STACK_BYTES]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.start, live, 0);
    fiber.lanes->all[thread % LANES] = &fiber;
    fiber.lanes->ready.push_back(&fiber);
  }
}

void free_cta(Cta *cta) {
  free(cta->shared);
  free(cta->words);
}

// Returns the runnable warp of highest priority. Occasionally a warp falls behind all others, which
// breaks any order that is not enforced by a barrier.
Lanes *next_warp() {
  Lanes *best = nullptr;
  for (auto &cta : machine.running)
    for (Lanes &lanes : cta->warps) {
      if (lanes.ready.empty()) lanes.ready.swap(lanes.late);
      if (!lanes.ready.empty() && (!best || lanes.priority > best->priority)) best = &lanes;
    }
  if (best && draw(16) == 0) best->priority = --machine.lowest;
  return best;
}

}  // namespace

const char *run_grid(const Kernel &kernel, const void *params, int ctas, int shared_bytes,
                     int most_ctas, bool lazy, u32 seed) {
  static const std::vector<float> floats[2] = {floats_of(false), floats_of(true)};
  machine.kernel = kernel, machine.floats = floats[kernel.bf16].data();
  machine.lazy = lazy, machine.random = seed + 1, machine.params = params;
  machine.shared_bytes = shared_bytes;
  grid.x = ctas, machine.idle_reads = 0, machine.lowest = machine.now = 0, machine.failure.clear();
  std::vector<std::unique_ptr<Cluster>> clusters;
  int started = 0, alive = 0;
  while (machine.failure.empty()) {
    for (; started < ctas && alive + kernel.cluster <= most_ctas; alive += kernel.cluster) {
      clusters.push_back(std::make_unique<Cluster>());
      for (int rank = 0; rank < kernel.cluster; rank++) start_cta(started++, clusters.back().get());
    }
    if (alive == 0) break;
    Lanes *lanes = next_warp();
    if (!lanes) {
      machine.failure = "threads wait for one another: a deadlock";
      break;
    }
    machine.switches = false;
    while (!lanes->ready.empty() && !machine.switches && machine.failure.empty()) {
      // Lanes run in any order between two places where they meet.
      std::swap(lanes->ready[draw(lanes->ready.size())], lanes->ready.back());
      Fiber *fiber = lanes->ready.back();
      lanes->ready.pop_back();
      resume(fiber);
    }
    for (size_t i = 0; i < machine.running.size();) {
      Cta *cta = machine.running[i].get();
      if (cta->cluster->threads > 0) {
        i++;
        continue;
      }
      free_cta(cta);
      machine.running.erase(machine.running.begin() + i);
      alive--;
    }
  }
  for (auto &cta : machine.running) free_cta(cta.get());
  machine.running.clear();
  while (!machine.stores.empty()) show_store();
  return machine.failure.empty() ? nullptr : machine.failure.c_str();
}
