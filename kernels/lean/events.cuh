// Timeline events of a CTA, as in kernels/events.py.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

constexpr int BEGIN = 0, TILES = 1, REDUCTION = 3;

// Activities of the CTA with their times, stored by one thread. With Build::max_events 0, no code
// remains.
struct Events {
  u64 *row;
  int count;

  DEVICE void start(const Params &p) {
    if constexpr (Build::max_events == 0) return;
    row = p.events + (u64)blockIdx.x * (4 + 2 * Build::max_events);
    count = 0;
    const u32 sm = smid();
    if (threadIdx.x == 0) row[0] = globaltimer(), row[2] = sm;
  }

  DEVICE void record(int kind, int output_tile) {
    if constexpr (Build::max_events == 0) return;
    __syncthreads();
    store(kind, output_tile);
  }

  // Called once all participating threads have arrived.
  DEVICE void store(int kind, int output_tile) {
    if (threadIdx.x == 0 && count < Build::max_events) {
      row[4 + 2 * count] = (u64)kind << 32 | (u32)output_tile;
      row[5 + 2 * count] = globaltimer();
    }
    count++;
  }

  DEVICE void end() {
    if constexpr (Build::max_events == 0) return;
    __syncthreads();
    if (threadIdx.x == 0) row[1] = globaltimer(), row[3] = count;
  }
};
