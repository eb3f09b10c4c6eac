// A message from one GPU to another and back, again and again; ping_pong.py
// launches a CTA on each and has the macros: RELEASE, THREADS, UNITS, BATCHES, ROUNDS, POLLS.
//
// Each message has the number of its round, which nobody has sent before, so whoever sees it has the
// message. Nothing is overwritten unread: a GPU sends the next one once it has all of the answer.
typedef unsigned int u32;
typedef unsigned long long u64;

#if RELEASE
// A flag beside data: what was stored before it is seen by those that see it.
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
// Data that has its flag in it: 16 bytes, seen whole or not at all, as kernels/lean/peers.cuh sends
// partials. Here every one of the four numbers is the flag.
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

// Looks at all four: of an asm's unused results the compiler would leave out the reading.
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

// Whether all of the message came within POLLS looks; the same to all threads.
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

// Of one CTA. `own` is this GPU's memory, `peer` the other's; `ends`: nanoseconds at the end of
// each batch of ROUNDS, 0 where a message did not come; null on the GPU that answers.
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
