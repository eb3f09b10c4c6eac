// Multi-head latent attention in CUDA C++ for Hopper: stream-K over the schedule of lean.cu.
//
// A token of the cache is one row of 576 numbers for all query heads: K is the whole row, V its
// first 512 numbers. layout.cuh describes the roles of threads.

#include "lean/params.cuh"
#include "lean/ptx.cuh"
#include "lean/schedule.cuh"
#include "mla/layout.cuh"
#include "lean/wgmma.cuh"
#include "mla/bytes.cuh"
#include "mla/row_scales.cuh"
#include "mla/gather.cuh"
#include "mla/scores.cuh"
#include "mla/outputs.cuh"

// Goes to the next part that is no rest of the previous work range; returns false if there is none.
DEVICE bool next_part(const Params &p, const WorkRange &range, Position &part) {
  do {
    part.leave_part(p);
    if (part.at >= range.end) return false;
    part.enter_part(p, range.end, 0);
  } while (part.is_rest);
  return true;
}

// Copies a box to the same address in all CTAs of the cluster.
DEVICE void copy_box(const Params &p, u32 to, u32 full, int column, int token, int row,
                     u64 policy) {
  if constexpr (Build::cluster > 1)
    cp_async_bulk_tensor_4d_multicast(to, &p.k_map, full, column, token, 0, row, policy);
  else
    cp_async_bulk_tensor_4d(to, &p.k_map, full, column, token, 0, row, policy);
}

// Copies a stage of bytes to the memory of its own warpgroup's values.
template <int STAGE>
DEVICE void copy_bytes(const Params &p, u32 shared, int filled, int row, int token, int rank,
                       u64 policy) {
  const u32 to = shared + STAGE_AT<STAGE> + rank * (RUN / Build::cluster);
  mbarrier_try_wait_parity(shared + empty_at(STAGE, STAGE), filled % 2 ^ 1);
#pragma unroll
  for (int turn = 0; turn < RUNS; turn++) {
    const u32 full = shared + full_at(STAGE, turn);
    mbarrier_arrive_expect_tx(full, RUN);
    copy_box(p, to + run_at(turn), full, RUN_ROW * run_in_turn(STAGE, turn), token, row, policy);
  }
}

// Copies a stage column by column, in the order in which they become free. Each CTA of a cluster
// copies its share of a stage's tokens to all of them.
template <int STAGE, int GROUPS>
DEVICE void copy_stage(const Params &p, u32 shared, int filled, int row, int token, int rank,
                       u64 policy) {
  if constexpr (HAS_BYTES) return copy_bytes<STAGE>(p, shared, filled, row, token, rank, policy);
  const u32 to = shared + STAGE_AT<STAGE> + rank * (COLUMN / Build::cluster);
#pragma unroll 1
  for (int i = 0; i < QUERY_COLUMNS; i++) {
    const int column = column_in_turn(STAGE, i);
    const u32 full = shared + full_at(STAGE, column);
    if (i == 0) mbarrier_try_wait_parity(shared + empty_at(STAGE, STAGE), filled % 2 ^ 1);
    if (i == OwnColumns<GROUPS>::FIRST_OF_OTHER)
      mbarrier_try_wait_parity(shared + empty_at(STAGE, 1 - STAGE), filled % 2 ^ 1);
    mbarrier_arrive_expect_tx(full, COLUMN);
    copy_box(p, to + column * COLUMN, full, 64 * column, token, row, policy);
  }
}

// The copying warps: Q of each part, and its stages. One lane makes all bulk copies.
template <int GROUPS>
DEVICE void copy_all(const Params &p, WorkRange &range, Position part, int rank, u32 shared,
                     Gather &gather) {
  const bool makes_bulk_copies = threadIdx.x == COPY_WARP * 32;
  if (!GATHERS && !makes_bulk_copies) return;
  const u64 policy =
      ROW_TILES > 1 || GROUPS > 1 ? createpolicy_evict_unchanged() : createpolicy_evict_first();
  const u64 policy_of_query = createpolicy_evict_unchanged();
  int filled[LATENT_STAGES] = {0, 0};
  for (int parts = 0;; parts++) {
    if (GATHERS && parts > 0) gather.look_up(p, part, part.token);
    if (makes_bulk_copies) {
      if (parts > 0) mbarrier_try_wait_parity(shared + QUERY_EMPTY, (parts - 1) % 2);
      mbarrier_arrive_expect_tx(shared + QUERY_FULL, QUERY_COLUMNS * COLUMN);
#pragma unroll 1
      for (int column = 0; column < QUERY_COLUMNS; column++)
        cp_async_bulk_tensor_4d(shared + column * COLUMN, &p.v_map, shared + QUERY_FULL,
                                64 * column, part.head * Build::rows + rank * TILE, 0,
                                part.sequence, policy_of_query);
    }
    for (int chunk = 0; chunk < part.chunks; chunk++) {
      const int token = part.token + chunk * TILE;
      if constexpr (GATHERS) {
        if (chunk % 2 == 0)
          gather.copy<0, GROUPS>(p, part, shared, filled[0]++, token);
        else
          gather.copy<1, GROUPS>(p, part, shared, filled[1]++, token);
        continue;
      }
      int row = part.sequence, at = token;
      if constexpr (Build::page > 0) {
        const int page = token / PAGE_OR_1;
        row = __ldg(p.block_table + (i64)part.sequence * p.stride_table + page);
        at = token - page * PAGE_OR_1;
      }
      at += rank * (TILE / Build::cluster);
      if (chunk % 2 == 0)
        copy_stage<0, GROUPS>(p, shared, filled[0]++, row, at, rank, policy);
      else
        copy_stage<1, GROUPS>(p, shared, filled[1]++, row, at, rank, policy);
    }
    if (!next_part(p, range, part)) break;
  }
  // Waits for the last arrivals of all CTAs of the cluster at this one's barriers.
  for (int i = 0; i < LATENT_STAGES; i++)
    for (int half = 0; half < 2; half++)
      mbarrier_try_wait_parity(shared + empty_at(i, half), filled[i] % 2 ^ 1);
}

// A warpgroup's columns of the output, its softmax, and its position in the ring of stages.
template <int GROUPS>
struct Attention {
  float o[VALUES / GROUPS / 4];
  Softmax softmax;
  int filled[LATENT_STAGES];

  // Starts O += P V of the warpgroup's own stage.
  template <int HALF>
  DEVICE void start_own(const u32 (&weights)[4][4], u32 shared) {
    const u64 values =
        matrix_descriptor(shared + STAGE_AT<HALF> + values_at<GROUPS>(HALF, HALF), COLUMN);
    if (softmax.rescales) rescale(o, softmax.scale[0], softmax.scale[1]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
      wgmma_m64k16(o, weights[step], values + step * (2048 >> 4));
    wgmma_commit_group();
  }

  // Starts O += P V of the other warpgroup's stage.
  template <int HALF>
  DEVICE void start_other(u32 shared, const unsigned char *memory) {
    constexpr int OTHER = 1 - HALF;
    const u64 weights = matrix_descriptor(shared + WEIGHTS_AT_STAGE<OTHER>, 16);
    const u64 values =
        matrix_descriptor(shared + STAGE_AT<OTHER> + values_at<GROUPS>(OTHER, HALF), COLUMN);
    take_over<OTHER>(shared, memory, filled[OTHER], softmax);
    if (softmax.rescales) rescale(o, softmax.scale[0], softmax.scale[1]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
      wgmma_m64k16(o, weights + 2 * step, values + step * (2048 >> 4));
    wgmma_commit_group();
  }

  // Waits until the values of a stage have been added, and releases their memory.
  template <int STAGE, int HALF>
  DEVICE void end_values(u32 shared) {
    wgmma_wait_group<0>();
    hold(o);
    // Bytes are copied only over its own warpgroup's values.
    if constexpr (Build::kv_dtype != 0 && STAGE != HALF)
      release(shared + empty_at(STAGE, HALF));
    else
      release_in_cluster(shared + empty_at(STAGE, HALF));
    filled[STAGE]++;
  }
};

// This thread's rows.
template <bool BYTES>
struct OwnRows {
  int visible[2];  // number of visible tokens, counted from the part's first

  DEVICE void find(const Position &part, int first_row) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int query = (first_row + own_row() + 8 * half) / Build::group_size;
      visible[half] =
          part.tokens - part.token - (Build::causal ? max(0, Build::q_len - 1 - query) : 0);
    }
  }

  // Finds the factors that make their scores exponents of 2: `scale`.
  DEVICE void find_scale(const Params &, const Position &, const unsigned char *) {}
  DEVICE float scale(const Params &p) const { return p.qk_scale; }
};

template <>
struct OwnRows<true> : OwnRows<false> {
  static constexpr float LEAST_SCALE = 1.17549435e-38f;  // the smallest normal number
  float2 own;

  // Called after `divide_query`.
  DEVICE void find_scale(const Params &p, const Position &part, const unsigned char *memory) {
    const float *units = reinterpret_cast<const float *>(memory + ROW_UNITS_AT);
    const float of_cache = p.qk_scale * KV_UNIT * scale_of(p.k_descale, part.sequence, 0);
    own = make_float2(of_cache, of_cache);
    if constexpr (DIVIDED_QUERY) own.x *= units[own_row()], own.y *= units[own_row() + 8];
    // A row of zeros has a unit near 0. Scores of hidden tokens are -inf, and -inf times 0 is NaN.
    own.x = fmaxf(own.x, LEAST_SCALE), own.y = fmaxf(own.y, LEAST_SCALE);
  }
  DEVICE float2 scale(const Params &) const { return own; }
};

// Starts the scores of a stage with `tokens` of the sequence.
template <int STAGE>
DEVICE void start_stage(float (&s)[32], u32 shared, unsigned char *memory, int filled, int tokens) {
  if constexpr (HAS_BYTES) {
    start_scores_of_bytes<STAGE>(s, shared, memory, filled, tokens);
  } else if constexpr (Build::row_scales) {
    start_scores_of_scaled_rows<STAGE>(s, shared, memory, filled);
  } else {
    if (!GATHERS && tokens < TILE) clear_end<STAGE>(shared, filled, tokens);
    start_scores<STAGE>(s, shared, filled);
  }
}

// Turns a stage's scores into weights, for both warpgroups.
template <int STAGE>
DEVICE void weigh(const Params &p, const OwnRows<HAS_BYTES> &rows, int chunk, u32 shared,
                  unsigned char *memory, const TokenPages &tokens, float (&s)[32], Softmax &softmax,
                  u32 (&weights)[4][4]) {
  hold(s);
  const int left[2] = {rows.visible[0] - chunk * TILE, rows.visible[1] - chunk * TILE};
  mask(s, left);
  if constexpr (GATHERS) tokens.mask(s);
  softmax.weigh(s, rows.scale(p), chunk == 0);
  pack_weights(s, weights);
  publish<STAGE>(shared, memory, softmax, weights);
}

// Warpgroup 0's share of two stages, or of a part's last one: its scores, its values, the other's.
template <int GROUPS>
DEVICE void attend_left(const Params &p, const Position &part, const OwnRows<HAS_BYTES> &rows,
                        int chunk, bool pair, u32 shared, unsigned char *memory,
                        Attention<GROUPS> &own) {
  float s[32];
  u32 weights[4][4];
  TokenPages pages;
  const int tokens = part.tokens - part.token - chunk * TILE;
  start_stage<0>(s, shared, memory, own.filled[0], tokens);
  if constexpr (GATHERS) pages.look_up(p, part, chunk);
  wgmma_wait_group<0>();
  if (chunk + 2 >= part.chunks) release(shared + QUERY_EMPTY);
  weigh<0>(p, rows, chunk, shared, memory, pages, s, own.softmax, weights);
  own.template start_own<0>(weights, shared);
  own.template end_values<0, 0>(shared);
  if (pair) {
    own.template start_other<0>(shared, memory);
    own.template end_values<1, 0>(shared);
  }
}

// Warpgroup 1's share: its scores, the other's values while these become weights, its values. The
// tensor cores multiply for one warpgroup while the other computes its softmax.
template <int GROUPS>
DEVICE void attend_right(const Params &p, const Position &part, const OwnRows<HAS_BYTES> &rows,
                         int chunk, bool pair, u32 shared, unsigned char *memory,
                         Attention<GROUPS> &own) {
  if (!pair) {
    own.template start_other<1>(shared, memory);
    own.template end_values<0, 1>(shared);
    return;
  }
  float s[32];
  u32 weights[4][4];
  TokenPages pages;
  const int tokens = part.tokens - part.token - (chunk + 1) * TILE;
  start_stage<1>(s, shared, memory, own.filled[1], tokens);
  own.template start_other<1>(shared, memory);
  if constexpr (GATHERS) pages.look_up(p, part, chunk + 1);
  wgmma_wait_group<1>();
  if (chunk + 3 >= part.chunks) release(shared + QUERY_EMPTY);
  weigh<1>(p, rows, chunk + 1, shared, memory, pages, s, own.softmax, weights);
  own.template end_values<0, 1>(shared);
  own.template start_own<1>(weights, shared);
  own.template end_values<1, 1>(shared);
}

// A warpgroup's share of a part.
template <int HALF, int GROUPS>
DEVICE void attend(const Params &p, const Position &part, int first_row, int parts, u32 shared,
                   unsigned char *memory, Attention<GROUPS> &own) {
  own.softmax.reset();
#pragma unroll
  for (int i = 0; i < VALUES / GROUPS / 4; i++) own.o[i] = 0.0f;
  OwnRows<HAS_BYTES> rows;
  rows.find(part, first_row);
  mbarrier_try_wait_parity(shared + QUERY_FULL, parts % 2);
  rows.find_scale(p, part, memory);
  if (part.chunks <= HALF) release(shared + QUERY_EMPTY);
  for (int chunk = 0; chunk < part.chunks; chunk += 2) {
    const bool pair = chunk + 1 < part.chunks;
    if constexpr (HALF == 0)
      attend_left<GROUPS>(p, part, rows, chunk, pair, shared, memory, own);
    else
      attend_right<GROUPS>(p, part, rows, chunk, pair, shared, memory, own);
  }
}

// Adds the sums of both warpgroups' tokens over whole rows.
DEVICE void add_sums(unsigned char *memory, int parts, Softmax &softmax) {
  float *sums = reinterpret_cast<float *>(memory + SUMS_AT) + parts % 2 * 2 * TILE;
  const int half_of_thread = threadIdx.x / 128;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float sum = softmax.sum(half);
    if (threadIdx.x % 4 == 0) sums[half_of_thread * TILE + own_row() + 8 * half] = sum;
  }
  bar_sync(OF_CONSUMERS, CONSUMERS);
#pragma unroll
  for (int half = 0; half < 2; half++)
    softmax.l[half] = sums[own_row() + 8 * half] + sums[TILE + own_row() + 8 * half];
}

// What a part's end needs. It waits in shared memory, since a part's stages need all registers.
struct Waiting {
  WorkRange range;
  Position part;
  Splits splits;
};
static_assert(2 * sizeof(Waiting) <= WAITING_BYTES);

// Writes a part's rows, or its partial, and merges; returns whether the range may have more parts.
template <int GROUPS>
DEVICE bool end_part(const Params &p, const Waiting &waiting, int rank, unsigned char *memory,
                     Attention<GROUPS> &own) {
  const WorkRange range = waiting.range;
  const Position part = waiting.part;
  const Splits splits = waiting.splits;
  const int first_row = part.head * Build::rows + rank * TILE;
  const float(&m)[2] = own.softmax.m, (&l)[2] = own.softmax.l;
  const u32 epoch = p.epoch + __ldg(p.replays);
  if (splits.count == 1 || (splits.count == 2 && splits.mine == 0)) {
    float scale[2] = {1.0f, 1.0f};
    if (splits.count == 2) {
      add_second_split<GROUPS>(p, part, first_row,
                               partial_of<GROUPS>(p, range, part, splits, 1, rank), own.o, m, l,
                               reinterpret_cast<float4 *>(memory + SHARES_AT), epoch);
    } else {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        scale[half] = value_scale(p, part, l[half]);
        if (threadIdx.x < 128 && threadIdx.x % 4 == 0)
          write_lse<GROUPS>(p, part, first_row + own_row() + 8 * half, m[half], l[half]);
      }
    }
    if (has_rows(first_row)) write_rows<GROUPS>(p, part, first_row, own.o, scale);
    return splits.count == 1;
  }
  float *slot = partial_of<GROUPS>(p, range, part, splits, splits.mine, rank);
  store_partial<GROUPS>(slot, first_row, own.o);
  if (threadIdx.x < 128 && threadIdx.x % 4 == 0)
#pragma unroll
    for (int half = 0; half < 2; half++)
      reinterpret_cast<float2 *>(slot + WEIGHTS_AT)[2 * (own_row() + 8 * half)] =
          make_float2(m[half], l[half]);
  publish_partial(slot, epoch);
  if (splits.mine == splits.count - 1) return true;
  merge<GROUPS>(p, range, part, splits, rank, first_row, memory, epoch);
  return false;
}

// A warpgroup's share of a work range: all parts, and their rows or partials.
template <int GROUPS>
DEVICE void attend_range(const Params &p, WorkRange &range, Position part, int rank, u32 shared,
                         unsigned char *memory) {
  Attention<GROUPS> own;
  own.filled[0] = own.filled[1] = 0;
  for (int parts = 0;; parts++) {
    Waiting &waiting = reinterpret_cast<Waiting *>(memory + WAITING_AT)[parts % 2];
    if (threadIdx.x == 0) {
      waiting.range = range, waiting.part = part;
      waiting.splits.find(p, part, range);
    }
    const int first_row = part.head * Build::rows + rank * TILE;
    // Here and not in `attend`, which exists once per warpgroup: synccheck reports a barrier in two
    // positions as divergence.
    if constexpr (DIVIDED_QUERY) {
      mbarrier_try_wait_parity(shared + QUERY_FULL, parts % 2);
      divide_query(memory);
    }
    if (threadIdx.x < 128)
      attend<0>(p, part, first_row, parts, shared, memory, own);
    else
      attend<1>(p, part, first_row, parts, shared, memory, own);
    add_sums(memory, parts, own.softmax);
    if (!end_part<GROUPS>(p, waiting, rank, memory, own)) break;
    range = waiting.range, part = waiting.part;
    if (!next_part(p, range, part)) break;
  }
}

extern "C" __global__ void __launch_bounds__(32 * Build::warps, 1)
    mla(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int rank = Build::cluster > 1 ? cluster_ctarank() : 0;
  if (threadIdx.x == COPY_WARP * 32) {
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
  }
  if (threadIdx.x == 0) {
    mbarrier_init(shared + QUERY_FULL, 1);
    mbarrier_init(shared + QUERY_EMPTY, CONSUMERS / 32);
    for (int stage = 0; stage < LATENT_STAGES; stage++) {
      for (int copy = 0; copy < STAGE_COPIES; copy++)
        mbarrier_init(shared + full_at(stage, copy), COPY_ARRIVALS);
      for (int half = 0; half < 2; half++)
        mbarrier_init(shared + empty_at(stage, half),
                      Build::kv_dtype != 0 && stage != half ? 4 : 4 * Build::cluster);
      mbarrier_init(shared + WEIGHTS_FULL + 8 * stage, 4);
    }
    fence_mbarrier_init_release_cluster();
    fence_proxy_async_shared_cta();
  }
  Lengths lengths;
  if constexpr (Build::ragged) lengths.start(p, lane);
  WorkRange range;
  Position part;
  const bool has_work =
      range.find(p, lane, lengths, 0, part) && (!part.is_rest || next_part(p, range, part));
  Gather gather;
  if (GATHERS && has_work && warp >= COPY_WARP) gather.look_up(p, part, part.token);
  __syncthreads();
  if constexpr (Build::cluster > 1) {
    barrier_cluster_arrive_relaxed();
    barrier_cluster_wait();
  }
  // All CTAs of the cluster take the same branch.
  if (!has_work) return;

  if (warp >= COPY_WARP) {
    setmaxnreg_dec<COPY_REGISTERS>();
    if (GATHERS || warp == COPY_WARP)
      with_columns_of(range, [&](auto columns) {
        copy_all<decltype(columns)::SHARERS>(p, range, part, rank, shared, gather);
      });
    __syncwarp();
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    with_columns_of(range, [&](auto columns) {
      attend_range<decltype(columns)::SHARERS>(p, range, part, rank, shared, memory);
    });
  }
}
