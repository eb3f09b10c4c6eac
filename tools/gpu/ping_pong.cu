// A message between two GPUs, back and forth repeatedly; ping_pong.py launches a CTA on each and
// has the macros: RELEASE, THREADS, UNITS, BATCHES, ROUNDS, POLLS.
//
// Each message carries the unique number of its round, so a reader that sees the number has the
// message. Nothing unread is overwritten: a GPU sends the next message only after it has received
// the whole answer.
typedef unsigned int u32;
typedef unsigned long long u64;

#if RELEASE
// A flag next to data: a reader that sees it also sees earlier stores.
constexpr int UNIT = 1;  // 32-bit numbers

__device__ __forceinline__ void store(u32 *at, u32 number) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(number) : "memory");
}

__device__ __forceinline__ bool holds(const u32 *at, u32 number) {
  u32 found;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(at) : "memory");
  return found == number;
}
#else
// Data that contains its flag: 16 bytes, seen as a whole, as kernels/lean/peers.cuh sends partials.
// Each of the four numbers is the flag.
constexpr int UNIT = 4;

__device__ __forceinline__ void store(u32 *at, u32 number) {
  asm volatile(
      "{\n"
      ".reg .b64 half;\n"
      ".reg .b128 unit;\n"
      "mov.b64 half, {%1, %1};\n"
      "mov.b128 unit, {half, half};\n"
      "st.relaxed.sys.global.b128 [%0], unit;\n"
      "}" ::"l"(at),
      "r"(number)
      : "memory");
}

// Compares all four numbers: the compiler would remove loads of unused results.
__device__ __forceinline__ bool holds(const u32 *at, u32 number) {
  u32 a, b, c, d;
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 unit;\n"
      "ld.relaxed.sys.global.b128 unit, [%4];\n"
      "mov.b128 {low, high}, unit;\n"
      "mov.b64 {%0, %1}, low;\n"
      "mov.b64 {%2, %3}, high;\n"
      "}"
      : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
      : "l"(at)
      : "memory");
  return (a == number) & (b == number) & (c == number) & (d == number);
}
#endif

__device__ __forceinline__ u64 globaltimer() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// ---- the rounds --------------------------------------------------------------------------------

__device__ __forceinline__ u32 *unit_of_thread(u32 *slots, int unit) {
  return slots + UNIT * (THREADS * unit + threadIdx.x);
}

__device__ __forceinline__ void send(u32 *slots, u32 number) {
#pragma unroll
  for (int unit = 0; unit < UNITS; unit++) store(unit_of_thread(slots, unit), number);
}

// Returns whether all of the message arrived within POLLS reads; the same for all threads.
__device__ __forceinline__ bool receive(u32 *slots, u32 number) {
  bool came = false;
  for (int poll = 0; poll < POLLS && !came; poll++) {
    came = true;
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++)
      came &= holds(unit_of_thread(slots, unit), number);
  }
  return THREADS == 1 ? came : __syncthreads_and(came);
}

// Runs one CTA. `own` is this GPU's memory, `peer` the other's; `ends`: nanoseconds at the end of
// each batch of ROUNDS, 0 if a message did not arrive; null on the answering GPU.
extern "C" __global__ void __launch_bounds__(THREADS)
    ping_pong(u32 *own, u32 *peer, u64 *ends) {
  const bool asks = ends != nullptr;
  u32 number = 0;
  for (int batch = 0; batch < BATCHES; batch++) {
    for (int round = 0; round < ROUNDS; round++) {
      number++;
      if (asks) send(peer, number);
      if (!receive(own, number)) return;
      if (!asks) send(peer, number);
    }
    if (asks && threadIdx.x == 0) ends[batch] = globaltimer();
  }
}
