// Multi-head latent attention in CUDA C++ for Hopper: stream-K over the schedule of lean.cu.
//
// A token of the cache is one row of 576 numbers, K whole and V in its first 512, for all query heads.
// layout.cuh has who does what.

#include "lean/params.cuh"
#include "lean/ptx.cuh"
#include "lean/schedule.cuh"
#include "mla/layout.cuh"
#include "lean/wgmma.cuh"
#include "mla/scores.cuh"
#include "mla/outputs.cuh"

// The warp that copies: Q of each part, and its stages, half of each at a time. Each CTA of a cluster
// copies its share of a stage's tokens to all of them.
__device__ __forceinline__ void copy_all(const Params &p, WorkRange &range, Position part, int rank,
                                         u32 shared) {
  if (threadIdx.x % 32 != 0) return;
  const u64 policy = ROW_TILES > 1 ? createpolicy_evict_normal() : createpolicy_evict_first();
  const u64 policy_of_query = createpolicy_evict_normal();
  Stage stage = {0};
  for (int parts = 0; part.at < range.end; parts++) {
    if (parts > 0) {
      part.enter_part(p, range.end, 0);
      mbarrier_try_wait_parity(shared + QUERY_EMPTY, (parts - 1) % 2);
    }
    mbarrier_arrive_expect_tx(shared + QUERY_FULL, QUERY_COLUMNS * COLUMN);
    for (int column = 0; column < QUERY_COLUMNS; column++)
      cp_async_bulk_tensor_4d(shared + column * COLUMN, &p.v_map, shared + QUERY_FULL, 64 * column,
                              part.head * ROWS + rank * TILE, 0, part.sequence, policy_of_query);
    for (int chunk = 0; chunk < part.chunks; chunk++, stage.filled++) {
      const int token = part.token + chunk * TILE;
      int row = part.sequence, at = token;
      if (PAGE > 0) {
        const int page = token / PAGE_OR_1;
        row = __ldg(p.block_table + (i64)part.sequence * p.pages_per_sequence + page);
        at = token - page * PAGE_OR_1;
      }
      at += rank * (TILE / CLUSTER);
      const u32 to = shared + stage.at() + rank * (COLUMN / CLUSTER);
#pragma unroll
      for (int i = 0; i < QUERY_COLUMNS; i++) {
        const int column = column_in_turn(i);
        const bool left = i < LEFT_COLUMNS;
        const u32 full = shared + (left ? LEFT_FULL : RIGHT_FULL) + 8 * stage.index();
        if (i == 0 || i == LEFT_COLUMNS) {
          const u32 empty = shared + (left ? LEFT_EMPTY : RIGHT_EMPTY) + 8 * stage.index();
          mbarrier_try_wait_parity(empty, stage.parity() ^ 1);
          mbarrier_arrive_expect_tx(full, (left ? LEFT_COLUMNS : RIGHT_COLUMNS) * COLUMN);
        }
#if CLUSTER > 1
        cp_async_bulk_tensor_4d_multicast(to + column * COLUMN, &p.k_map, full, 64 * column, at, 0, row,
                                          policy);
#else
        cp_async_bulk_tensor_4d(to + column * COLUMN, &p.k_map, full, 64 * column, at, 0, row, policy);
#endif
      }
    }
    part.leave_part(p);
  }
  // Until all CTAs of the cluster have arrived at this one's barriers for the last time.
  for (int i = 0; i < LATENT_STAGES; i++, stage.filled++) {
    mbarrier_try_wait_parity(shared + LEFT_EMPTY + 8 * stage.index(), stage.parity() ^ 1);
    mbarrier_try_wait_parity(shared + RIGHT_EMPTY + 8 * stage.index(), stage.parity() ^ 1);
  }
}

__device__ __forceinline__ void start_values(float (&o)[128], const u32 (&weights)[4][4], u32 shared,
                                             Stage stage) {
  const u64 values = matrix_descriptor(shared + stage.at(), COLUMN);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; step++)
    wgmma_m64n256k16(o, weights[step], values + step * (2048 >> 4));
  wgmma_commit_group();
}

// Warpgroup 0's share of a part: its columns of the output, in `o`, and its softmax.
__device__ __forceinline__ void attend_left(const Params &p, const Position &part, int first_row,
                                            int parts, Stage &stage, u32 shared,
                                            unsigned char *memory, float (&o)[128],
                                            Softmax &softmax) {
  softmax.reset();
  mbarrier_try_wait_parity(shared + QUERY_FULL, parts % 2);
  float s[32];
  u32 weights[4][4];
  // Tokens that this thread's rows see, counted from the part's first.
  int visible[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int query = (first_row + own_row() + 8 * half) / GROUP_SIZE;
    visible[half] = part.tokens - part.token - (CAUSAL ? max(0, Q_LEN - 1 - query) : 0);
  }
  const int tokens = part.tokens - part.token;
  if (part.chunks > 0) {
    if (tokens < TILE) clear_end(shared, stage, tokens);
    start_scores(s, shared, stage);
    wgmma_wait_group<0>();
    hold(s);
    mask(s, visible);
    softmax.weigh(s, p.qk_scale, true);
    pack_weights(s, weights);
    mbarrier_try_wait_parity(shared + WEIGHTS_EMPTY, (stage.filled & 1) ^ 1);
    publish(shared, memory, softmax, weights);
  }
  if (part.chunks <= 1) release(shared + QUERY_EMPTY);
  // The tensor cores have this warpgroup's values of a stage and scores of the next one; and the other
  // warpgroup's values, also while these scores become weights.
  for (int chunk = 1; chunk < part.chunks; chunk++) {
    const Stage next = {stage.filled + 1};
    start_values(o, weights, shared, stage);
    if (tokens - chunk * TILE < TILE) clear_end(shared, next, tokens - chunk * TILE);
    start_scores(s, shared, next);
    wgmma_wait_group<1>();
    hold(o);
    release_in_cluster(shared + LEFT_EMPTY + 8 * stage.index());
    wgmma_wait_group<0>();
    hold(s);
    if (chunk + 1 == part.chunks) release(shared + QUERY_EMPTY);
    visible[0] -= TILE, visible[1] -= TILE;
    mask(s, visible);
    softmax.weigh(s, p.qk_scale, false);
    pack_weights(s, weights);
    stage = next;
    mbarrier_try_wait_parity(shared + WEIGHTS_EMPTY, (stage.filled & 1) ^ 1);
    publish(shared, memory, softmax, weights);
    if (softmax.rescales) rescale(o, softmax.scale[0], softmax.scale[1]);
  }
  if (part.chunks > 0) {
    start_values(o, weights, shared, stage);
    wgmma_wait_group<0>();
    hold(o);
    release_in_cluster(shared + LEFT_EMPTY + 8 * stage.index());
    stage.filled++;
  }
}

// Warpgroup 1's.
__device__ __forceinline__ void attend_right(const Position &part, Stage &stage, u32 shared,
                                             const unsigned char *memory, float (&o)[128]) {
  const u64 weights = matrix_descriptor(shared + PROBABILITIES_AT, 16);
  const int warp = threadIdx.x % 128 / 32;
  for (int chunk = 0; chunk < part.chunks; chunk++, stage.filled++) {
    mbarrier_try_wait_parity(shared + RIGHT_FULL + 8 * stage.index(), stage.parity());
    mbarrier_try_wait_parity(shared + WEIGHTS_FULL, stage.filled & 1);
    if (reinterpret_cast<const int *>(memory + RESCALES_AT)[warp]) {
      const float *scales = reinterpret_cast<const float *>(memory + SCALES_AT) + own_row();
      rescale(o, scales[0], scales[8]);
    }
    const u64 values = matrix_descriptor(shared + stage.at() + VALUES / 128 * COLUMN, COLUMN);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
      wgmma_m64n256k16(o, weights + 2 * step, values + step * (2048 >> 4));
    wgmma_commit_group();
    wgmma_wait_group<0>();
    hold(o);
    release(shared + WEIGHTS_EMPTY);
    release_in_cluster(shared + RIGHT_EMPTY + 8 * stage.index());
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) mla(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  int rank = 0;
#if CLUSTER > 1
  rank = cluster_ctarank();
#endif
  if (threadIdx.x == COPY_WARP * 32) {
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
  }
  if (threadIdx.x == 0) {
    mbarrier_init(shared + QUERY_FULL, 1);
    mbarrier_init(shared + QUERY_EMPTY, 4);
    for (int stage = 0; stage < LATENT_STAGES; stage++) {
      mbarrier_init(shared + LEFT_FULL + 8 * stage, 1);
      mbarrier_init(shared + LEFT_EMPTY + 8 * stage, 4 * CLUSTER);
      mbarrier_init(shared + RIGHT_FULL + 8 * stage, 1);
      mbarrier_init(shared + RIGHT_EMPTY + 8 * stage, 4 * CLUSTER);
    }
    mbarrier_init(shared + WEIGHTS_FULL, 4);
    mbarrier_init(shared + WEIGHTS_EMPTY, 4);
    fence_mbarrier_init_release_cluster();
    fence_proxy_async_shared_cta();
  }
  Lengths lengths;
  if (RAGGED) lengths.start(p, lane);
  __syncthreads();
#if CLUSTER > 1
  barrier_cluster_arrive_relaxed();
  barrier_cluster_wait();
#endif
  WorkRange range;
  Position part;
  if (!range.find(p, lane, lengths, 0, part)) return;  // as all CTAs of the cluster

  if (warp >= COPY_WARP) {
    setmaxnreg_dec<COPY_REGISTERS>();
    if (warp == COPY_WARP) copy_all(p, range, part, rank, shared);
    __syncwarp();
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    Stage stage = {0};
    for (int parts = 0;; parts++) {
      const int first_row = part.head * ROWS + rank * TILE;
      Splits splits;
      splits.find(p, part, range);
      float o[128];
#pragma unroll
      for (int i = 0; i < 128; i++) o[i] = 0.0f;
      Softmax softmax;
      if (warp < 4)
        attend_left(p, part, first_row, parts, stage, shared, memory, o, softmax);
      else
        attend_right(part, stage, shared, memory, o);
      float l[2];
#pragma unroll
      for (int half = 0; half < 2; half++) l[half] = warp < 4 ? softmax.sum(half) : 0.0f;
      if (splits.count == 1) {
        float *scales = reinterpret_cast<float *>(memory + SUMS_AT) + parts % 2 * TILE;
        if (warp < 4 && lane % 4 == 0)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int row = own_row() + 8 * half;
            scales[row] = reciprocal(l[half]);
            write_lse(p, part, first_row + row, softmax.m[half], l[half]);
          }
        bar_sync(OF_CONSUMERS, CONSUMERS);
        write_rows(p, part, first_row, o, scales[own_row()], scales[own_row() + 8]);
      } else {
        const u32 epoch = p.epoch + __ldg(p.replays);
        if (splits.count == 2 && splits.mine == 0) {
          merge_pair(p, part, first_row, partial_of(p, range, part, splits, 1, rank), o, softmax.m,
                     l, reinterpret_cast<float2 *>(memory + SHARES_AT), epoch);
          break;
        }
        float *slot = partial_of(p, range, part, splits, splits.mine, rank);
        store_partial(slot, o);
        if (warp < 4 && lane % 4 == 0)
#pragma unroll
          for (int half = 0; half < 2; half++)
            reinterpret_cast<float2 *>(slot + WEIGHTS_AT)[own_row() + 8 * half] =
                make_float2(softmax.m[half], l[half]);
        publish_partial(slot, epoch);
        if (splits.mine < splits.count - 1) {
          merge(p, range, part, splits, rank, first_row, memory, epoch);
          break;
        }
      }
      part.leave_part(p);
      if (part.at >= range.end) break;
      part.enter_part(p, range.end, 0);
    }
  }
}
