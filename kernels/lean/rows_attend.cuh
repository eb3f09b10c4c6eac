// A warpgroup's work on its rows of an output tile: queries, scores, softmax, values.
#pragma once
#include "ptx.cuh"
#include "reduce.cuh"
#include "rows_layout.cuh"
#include "wgmma.cuh"

// Warpgroups alternate at the tensor cores: one multiplies while the other turns scores into
// weights.
DEVICE void take_turn() {
  if constexpr (WARPGROUPS > 1) bar_sync(TURN_OF_WARPGROUP + warpgroup(), CONSUMERS);
}

DEVICE void pass_turn() {
  if constexpr (WARPGROUPS > 1) bar_arrive(TURN_OF_WARPGROUP + 1 - warpgroup(), CONSUMERS);
}

// Arrives at a barrier: this warp has finished reading memory that may be overwritten.
DEVICE void release(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Waits for a stage's K, or V. Matrix instructions read through the async proxy, as bulk copies
// write. The proxy sees data from cp.async only after a fence.
DEVICE void wait_for_copies(u32 full, int parity) {
  mbarrier_try_wait_parity(full, parity);
  if constexpr (!Build::bulk) fence_proxy_async_shared_cta();
}

// Returns row `row` of an output tile in q.
DEVICE const QNumber *query_row(const Params &p, const Position &part, int row) {
  const HeadTile tile = part.head_tile();
  const int of_head = tile.row_offset + row;
  return p.q +
         (Build::ragged_q ? part.queries.first * (i64)p.stride_q_token
                          : part.sequence * p.stride_q_batch) +
         (i64)(of_head / Build::group_size) * p.stride_q_token +
         (i64)(tile.kv_head * Build::group_size + of_head % Build::group_size) * p.stride_q_head;
}

// Prefetches all rows of Q into the L2; called by a whole warp.
DEVICE void prefetch_queries(const Params &p, const Position &part) {
  const int rows = rows_of(part);
#pragma unroll 1
  for (int row = threadIdx.x % 32; row < rows; row += 32)
#pragma unroll
    for (int column = 0; column < K_COLUMNS; column++)
      prefetch_l2(query_row(p, part, row) + 64 * column);
}

// Copies this warpgroup's rows of Q to shared memory, with zeros for missing rows.
DEVICE void load_queries(const Params &p, const Position &part, unsigned char *memory) {
  constexpr int PIECES = Build::head_dim / 8, OF_THREAD = GROUP_ROWS * PIECES / 128;
  constexpr int AT_ONCE = OF_THREAD % 8 ? 4 : 8;
  const int rows = rows_of(part);
#pragma unroll 1
  for (int first = 0; first < OF_THREAD; first += AT_ONCE) {
    // All reads precede the first store, because each waits for memory.
    u32 words[AT_ONCE][4];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = (first + i) * 128 + threadIdx.x % 128;
      const int row = min(warpgroup() * GROUP_ROWS + at / PIECES, rows - 1);
      const u32 *from = reinterpret_cast<const u32 *>(query_row(p, part, row) + at % PIECES * 8);
#pragma unroll
      for (int word = 0; word < 4; word++) words[i][word] = __ldg(from + word);
    }
    // Waits until all have written the previous contents.
    if (first == 0) bar_sync(OF_WARPGROUP + warpgroup(), 128);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = (first + i) * 128 + threadIdx.x % 128;
      const int row = warpgroup() * GROUP_ROWS + at / PIECES;
      const bool exists = row < rows;
      *reinterpret_cast<uint4 *>(memory + piece_at(row, at % PIECES)) =
          make_uint4(exists ? words[i][0] : 0, exists ? words[i][1] : 0, exists ? words[i][2] : 0,
                     exists ? words[i][3] : 0);
    }
  }
  fence_proxy_async_shared_cta();
  bar_sync(OF_WARPGROUP + warpgroup(), 128);
}

// Starts S = Q K^T of a stage.
DEVICE void start_scores(float (&s)[SCORES], u32 shared, Stage stage) {
  wait_for_copies(stage.barrier(shared, K_FULL), stage.parity());
  wgmma_fence();
#pragma unroll
  for (int column = 0; column < K_COLUMNS; column++) {
    const u64 q =
        matrix_descriptor(shared + column * QUERY_COLUMN + warpgroup() * GROUP_ROWS * 128, 16);
    const u64 k = matrix_descriptor(stage.k(shared) + column * TOKEN_COLUMN, 16);
#pragma unroll
    for (int step = 0; step < 4; step++)
      wgmma_m64k16(s, q + 2 * step, k + 2 * step, column + step > 0);
  }
  wgmma_commit_group();
}

// Starts O += P V of a stage.
DEVICE void start_values(float (&o)[COLUMNS], const u32 (&weights)[TOKEN_STEPS][4], u32 shared,
                         Stage stage) {
  wait_for_copies(stage.barrier(shared, V_FULL), stage.parity());
  const u64 v = matrix_descriptor(stage.v(shared), TOKEN_COLUMN);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < TOKEN_STEPS; step++)
    wgmma_m64k16(o, weights[step], v + step * (16 * 128 >> 4));
  wgmma_commit_group();
}

// True if scores are transformed before they become weights.
constexpr bool SHAPED_SCORES = Build::softcap || Build::alibi;

// Soft cap and ALiBi, as in `cap_scores` and `slope_scores` of attend.cuh.
struct Shape {
  float slopes[2];  // Build::alibi: of a thread's two rows
  int own[2];       // Build::alibi: positions of their query tokens in the cache

  DEVICE void enter_part(const Params &p, const Position &part) {
    if constexpr (!Build::alibi) return;
    const HeadTile tile = part.head_tile();
    const float *of_heads =
        p.alibi_slopes + part.sequence * p.stride_slopes_batch + tile.kv_head * Build::group_size;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = tile.row_offset + own_row() + 8 * half;
      slopes[half] = __ldg(of_heads + row % Build::group_size);
      own[half] = part.tokens - part.queries.count + row / Build::group_size;
    }
  }

  // Transforms scores of the chunk from `token` on into exponents of 2.
  DEVICE void apply(const Params &p, float (&s)[SCORES], int token) const {
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      s[i] *= p.qk_scale;
      if constexpr (Build::softcap)
        s[i] = p.softcap - 2.0f * p.softcap * rcp_approx_ftz(1.0f + ex2_approx_ftz(s[i]));
      if constexpr (Build::alibi) {
        const int half = i / 2 % 2;
        const float distance = fabsf(__int2float_rz(token + own_column(i) - own[half]));
        s[i] -= slopes[half] * (distance * LOG2_E);
      }
    }
  }
};

// Visible tokens of a thread's two rows.
struct Seen {
  int first[2], end[2];  // of each row
  int all_from, all_to;  // visible to all rows of the warp
  int start, tokens;     // of the sequence

  DEVICE void enter_part(const Params &p, const Position &part) {
    const int row_offset = part.head_tile().row_offset;
    const int warp_row = row_offset + threadIdx.x / 32 * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = row_offset + own_row() + 8 * half;
      first[half] = part.first_seen(p, row);
      end[half] = part.seen_by(p, row);
    }
    all_from = part.first_seen(p, warp_row + 15);
    all_to = part.seen_by(p, warp_row);
    start = part.first_seen(p, row_offset), tokens = part.tokens;
  }

  // Masks tokens of the chunk from `token` on that a row does not see.
  DEVICE void mask(float (&s)[SCORES], int token) const {
    if (token + Build::chunk <= all_to && (!MASKED_STARTS || token >= all_from)) return;
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const int at = token + own_column(i), half = i / 2 % 2;
      if (at >= end[half] || (MASKED_STARTS && at < first[half])) s[i] = -INFINITE;
    }
  }

  // Zeroes the values of tokens outside the sequence. They can be NaN, which weights of 0 do not
  // remove. Each warpgroup does it for its own reads.
  DEVICE void zero_values(u32 shared, Stage stage, int token) const {
    const int left = tokens - token,
              before = Build::start_step > 1 && MASKED_STARTS ? start - token : 0;
    if (left >= Build::chunk && before <= 0) return;
    mbarrier_try_wait_parity(stage.barrier(shared, V_FULL), stage.parity());
    for (int i = threadIdx.x % 128; i < Build::chunk * 8; i += 128)
      if (i / 8 >= left || i / 8 < before)
#pragma unroll
        for (int column = 0; column < V_COLUMNS; column++)
          st_shared_v4(stage.v(shared) + column * TOKEN_COLUMN + i * 16, 0);
    fence_proxy_async_shared_cta();
    bar_sync(OF_WARPGROUP + warpgroup(), 128);
  }
};

struct Softmax : RowSums {
  // Turns scores into weights; `qk_scale` above 0 makes them exponents of 2. Returns whether a row
  // of the warp may have a scale other than 1.
  DEVICE bool weigh(float (&s)[SCORES], float qk_scale) {
    float high[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      high[half] = s[2 * half];
#pragma unroll
      for (int i = 0; i < SCORES / 2; i++)
        high[half] = fmaxf(high[half], s[i / 2 * 4 + 2 * half + i % 2]);
      high[half] *= qk_scale;
      scale[half] = 1.0f;
    }
    const bool passed = high[0] - m[0] > RESCALE_THRESHOLD || high[1] - m[1] > RESCALE_THRESHOLD;
    const bool rescales = __any_sync(~0u, passed | is_large());
    if (rescales) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float moved = fmaxf(m[half], max_of_lanes<1, 4>(high[half]) - RESCALE_MARGIN);
        scale[half] = ex2_approx_ftz(m[half] - moved);
        m[half] = moved;
        l[half] *= scale[half];
      }
      if (is_large()) {
#pragma unroll
        for (int i = 0; i < SCORES; i++) s[i] *= qk_scale;
        qk_scale = 1.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const int half = i / 2 % 2;
      s[i] = ex2_approx_ftz(__fmaf_rn(s[i], qk_scale, -m[half]));
      l[half] += s[i];
    }
    return rescales;
  }

  // Returns whether products of scores are rounded before a reference is subtracted.
  DEVICE bool is_large() const {
    return !SHAPED_SCORES && ((fabsf(m[0]) > MOST_FUSED) | (fabsf(m[1]) > MOST_FUSED));
  }
};

// Walks a part in which this warpgroup has no rows: releases every stage, and passes its turns.
DEVICE void skip_part(const Position &part, Stage &stage, u32 shared) {
  for (int chunk = 0; chunk < part.chunks; chunk++, stage.filled++) {
    if (chunk > 0) {
      take_turn();
      pass_turn();
    }
    mbarrier_try_wait_parity(stage.barrier(shared, K_FULL), stage.parity());
    release(stage.barrier(shared, K_EMPTY));
    mbarrier_try_wait_parity(stage.barrier(shared, V_FULL), stage.parity());
    release(stage.barrier(shared, V_EMPTY));
  }
}

// Attends to a part: accumulates values in `o`, and the softmax. Build::cluster > 1: only this
// CTA's chunks; `rank` is its number in the cluster.
DEVICE void attend_part(const Params &p, const Position &part, Stage &stage, int rank, u32 shared,
                        unsigned char *memory, float (&o)[COLUMNS], Softmax &softmax) {
#pragma unroll
  for (int i = 0; i < COLUMNS; i++) o[i] = 0.0f;
  softmax.reset();
  if (part.chunks <= 0) {
    __syncwarp();  // the warp has read the previous rows, which the next ones overwrite
    return;
  }
  if (WARPGROUPS > 1 && warpgroup() * GROUP_ROWS >= rows_of(part)) {
    skip_part(part, stage, shared);
    return;
  }
  load_queries(p, part, memory);
  const int first = Build::cluster > 1 ? rank : 0;
  if (Build::cluster > 1 && first >= part.chunks) return;
  const int last = part.chunks - 1 - (part.chunks - 1 - first) % Build::cluster;
  Seen seen;
  seen.enter_part(p, part);
  Shape shape;
  shape.enter_part(p, part);
  // A scale of 0 or below does not keep the order of scores.
  const bool shaped = SHAPED_SCORES || p.qk_scale <= 0.0f;
  const float scale = shaped ? 1.0f : p.qk_scale;
  float s[SCORES];
  u32 weights[TOKEN_STEPS][4];
  start_scores(s, shared, stage);
  wgmma_wait_group<0>();
  hold(s);
  release(stage.barrier(shared, K_EMPTY));
  if (shaped) shape.apply(p, s, part.token + first * Build::chunk);
  seen.mask(s, part.token + first * Build::chunk);
  softmax.weigh(s, scale);
  pack_weights(s, weights);
  // The tensor cores multiply values of a chunk while scores of the next become weights.
#pragma unroll 1
  for (int chunk = first + Build::cluster; chunk < part.chunks; chunk += Build::cluster) {
    const Stage next = {stage.filled + 1};
    const int token = part.token + chunk * Build::chunk;
    take_turn();
    start_scores(s, shared, next);
    seen.zero_values(shared, stage, token - Build::cluster * Build::chunk);
    start_values(o, weights, shared, stage);
    pass_turn();
    wgmma_wait_group<1>();
    hold(s);
    release(next.barrier(shared, K_EMPTY));
    if (shaped) shape.apply(p, s, token);
    seen.mask(s, token);
    const bool rescales = softmax.weigh(s, scale);
    wgmma_wait_group<0>();
    hold(o);
    release(stage.barrier(shared, V_EMPTY));
    if (rescales)
#pragma unroll
      for (int i = 0; i < COLUMNS; i++) o[i] *= softmax.scale[i / 2 % 2];
    pack_weights(s, weights);
    stage = next;
  }
  seen.zero_values(shared, stage, part.token + last * Build::chunk);
  start_values(o, weights, shared, stage);
  wgmma_wait_group<0>();
  hold(o);
  release(stage.barrier(shared, V_EMPTY));
  stage.filled++;
}
