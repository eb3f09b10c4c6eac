// The output columns of both warpgroups, and the end of a part.
#pragma once
#include "lean/fp8.cuh"
#include "lean/lanes.cuh"
#include "lean/schedule.cuh"
#include "mla/layout.cuh"
#include "lean/wgmma.cuh"

template <int COUNT>
DEVICE void rescale(float (&o)[COUNT], float first, float second) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) o[i] *= i / 2 % 2 ? second : first;
}

// Arrives at a barrier: this warp has finished using memory that may be overwritten.
DEVICE void release(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Arrives at the barriers of all CTAs of the cluster, which copy to each other.
DEVICE void release_in_cluster(u32 barrier) {
  if constexpr (Build::cluster == 1) return release(barrier);
  __syncwarp();
  if (threadIdx.x % 32 < Build::cluster) mbarrier_arrive_cluster(barrier, threadIdx.x % 32);
}

// Writes two columns of a row, if the row exists.
DEVICE void write_pair(const Params &p, const Position &part, int row, int column, float x,
                       float y) {
  if (row >= ALL_ROWS) return;
  unsigned short *at = p.out + part.sequence * p.stride_out_batch +
                       (i64)(row / Build::group_size) * p.stride_out_token +
                       (i64)(row % Build::group_size) * p.stride_out_head + column;
  *reinterpret_cast<u32 *>(at) = cvt_rn_x2<Build::bf16>(x, y);
}

template <int GROUPS>
DEVICE void write_lse(const Params &p, const Position &part, int row, float m, float l) {
  if (row >= ALL_ROWS || group_of_cta<GROUPS>() > 0) return;
  const i64 head = (i64)part.sequence * Build::group_size + row % Build::group_size;
  p.lse[head * Build::q_len + row / Build::group_size] = lse_of(m, l);
}

// Returns the factor of a row's sum of values; `l` is its sum of weights.
DEVICE float value_scale(const Params &p, const Position &part, float l) {
  if constexpr (!HAS_BYTES) return reciprocal(l);
  // The scale of an empty sequence can be NaN.
  return l == 0.0f ? 0.0f : reciprocal(l) * KV_UNIT * scale_of(p.k_descale, part.sequence, 0);
}

// Transposes four words of each of four lanes: lane i gets the i-th of each.
DEVICE void transpose_in_quad(u32 (&words)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (!(i & step)) {
        const u32 theirs = __shfl_xor_sync(~0u, upper ? words[i] : words[i + step], step);
        (upper ? words[i] : words[i + step]) = theirs;
      }
  }
}

// Writes the thread's rows, 16 bytes at a time: accumulators times the factors of their rows.
template <int GROUPS>
DEVICE void write_rows(const Params &p, const Position &part, int first_row,
                       const float (&o)[VALUES / GROUPS / 4], const float (&scale)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = first_row + own_row() + 8 * half;
    unsigned short *at = p.out + part.sequence * p.stride_out_batch +
                         (i64)(row / Build::group_size) * p.stride_out_token +
                         (i64)(row % Build::group_size) * p.stride_out_head +
                         OwnColumns<GROUPS>::of_unit(0) + threadIdx.x % 4 * 6;
#pragma unroll
    for (int first = half; first < OwnColumns<GROUPS>::UNITS; first += 8) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int unit = first + 2 * i;
        words[i] = cvt_rn_x2<Build::bf16>(o[2 * unit] * scale[half], o[2 * unit + 1] * scale[half]);
      }
      transpose_in_quad(words);
      if (row < ALL_ROWS)
        *reinterpret_cast<uint4 *>(at + first / 8 * 32) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Returns the partial of split `split` of an output tile. Each work range has a slot, and another
// for an output tile's first split, so that it need not wait until the first slot has been read.
template <int GROUPS>
DEVICE float *partial_of(const Params &p, const WorkRange &range, const Position &part,
                         const Splits &splits, int split, int rank) {
  const int ranges = gridDim.x / Build::cluster / GROUPS;
  int slot = range.slot + split - splits.mine;
  if (split == 0)
    slot = ranges + (Build::ragged && range.longest > 0 ? part.sequence * ROW_TILES + part.head
                                                        : range.slot - splits.mine);
  slot = slot * GROUPS + group_of_cta<GROUPS>();
  return reinterpret_cast<float *>(p.partials) + ((i64)slot * Build::cluster + rank) * PARTIAL;
}

// Returns whether this warp has any rows: 16 query heads fill one warp of each warpgroup.
DEVICE bool has_rows(int first_row) {
  return ALL_ROWS % TILE == 0 || first_row + threadIdx.x % 128 / 32 * 16 < ALL_ROWS;
}

template <int GROUPS>
DEVICE void store_partial(float *slot, int first_row, const float (&o)[VALUES / GROUPS / 4]) {
  if (!has_rows(first_row)) return;
#pragma unroll
  for (int unit = 0; unit < OwnColumns<GROUPS>::UNITS; unit++)
    reinterpret_cast<float2 *>(slot)[unit * CONSUMERS + threadIdx.x] =
        make_float2(o[2 * unit], o[2 * unit + 1]);
}

// Called once all threads of the CTA have stored theirs.
DEVICE void publish_partial(float *slot, u32 epoch) {
  bar_sync(OF_CONSUMERS, CONSUMERS);
  if (threadIdx.x == 0) st_release_gpu(slot + EPOCH_AT, epoch);
}

DEVICE void wait_for_partial(const float *slot, u32 epoch) {
  while (ld_acquire_gpu(slot + EPOCH_AT) != epoch) {
  }
}

// Adds the partial of an output tile's second and last split to the first one's accumulators,
// weighted, and writes the LSE. `shares`: factors of the two for each row.
template <int GROUPS>
DEVICE void add_second_split(const Params &p, const Position &part, int first_row,
                             const float *slot, float (&o)[VALUES / GROUPS / 4],
                             const float (&m)[2], const float (&l)[2], float2 *shares, u32 epoch) {
  if (threadIdx.x < 128) {
    if (threadIdx.x % 32 == 0) wait_for_partial(slot, epoch);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = own_row() + 8 * half;
      const float2 log = __ldcg(reinterpret_cast<const float2 *>(slot + WEIGHTS_AT) + row);
      const float high = fmaxf(m[half], log.x);
      const float own = ex2_approx_ftz(m[half] - high), other = ex2_approx_ftz(log.x - high);
      const float sum = own * l[half] + other * log.y, scale = value_scale(p, part, sum);
      if (threadIdx.x % 4 == 0) {
        shares[row] = make_float2(own * scale, other * scale);
        write_lse<GROUPS>(p, part, first_row + row, high, sum);
      }
    }
  }
  bar_sync(OF_CONSUMERS, CONSUMERS);
  if (!has_rows(first_row)) return;
  const auto *units = reinterpret_cast<const float2 *>(slot) + threadIdx.x;
  const float2 of_rows[2] = {shares[own_row()], shares[own_row() + 8]};
#pragma unroll
  for (int unit = 0; unit < OwnColumns<GROUPS>::UNITS; unit++) {
    const float2 other = __ldcg(units + unit * CONSUMERS), share = of_rows[unit % 2];
    o[2 * unit] = share.x * o[2 * unit] + share.y * other.x;
    o[2 * unit + 1] = share.x * o[2 * unit + 1] + share.y * other.y;
  }
}

// Warps with rows, if there are fewer than 64; the others take a share of their units in merges.
constexpr int ROW_WARPS = ALL_ROWS <= 32 ? (ALL_ROWS + 15) / 16 : 4;

// A thread's share of an output tile's units, and the thread that stored them.
struct MergeShare {
  int thread, row, first, step;

  DEVICE explicit MergeShare(const Splits &splits) {
    const int team = threadIdx.x % 128 / 32 / ROW_WARPS;
    thread = threadIdx.x - team * ROW_WARPS * 32;
    row = thread % 128 / 32 * 16 + thread % 32 / 4;
    first = splits.mine + team * (splits.count - 1);
    step = (splits.count - 1) * (4 / ROW_WARPS);
  }
};

// Merges and writes this CTA's share of the units of up to SPLITS splits, AT_ONCE at a time. Units
// and weights are read at once, so nothing waits between them. Slower for partials of all columns,
// unless they are many and of few rows (H200; reports/performance-log.md, entries 59 and 74).
template <int GROUPS, int SPLITS, int AT_ONCE>
DEVICE void merge_few(const Params &p, const WorkRange &range, const Position &part,
                      const Splits &splits, int rank, int first_row) {
  constexpr int UNITS = OwnColumns<GROUPS>::UNITS;
  const MergeShare share(splits);
  for (int first = share.first; first < UNITS; first += AT_ONCE * share.step) {
    float2 o[SPLITS][AT_ONCE], log[SPLITS][AT_ONCE];
#pragma unroll
    for (int j = 0; j < SPLITS; j++) {
      const float *slot =
          partial_of<GROUPS>(p, range, part, splits, min(j, splits.count - 1), rank);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int unit = first + i * share.step;
        o[j][i] = make_float2(0.0f, 0.0f), log[j][i] = make_float2(LOWEST, 0.0f);
        if (unit < UNITS && j < splits.count) {
          log[j][i] = __ldcg(reinterpret_cast<const float2 *>(slot + WEIGHTS_AT) + share.row +
                             8 * (unit % 2));
          o[j][i] =
              __ldcg(reinterpret_cast<const float2 *>(slot) + unit * CONSUMERS + share.thread);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int unit = first + i * share.step, row = first_row + share.row + 8 * (unit % 2);
      float m = LOWEST, l = 0.0f;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int j = 0; j < SPLITS; j++) m = fmaxf(m, log[j][i].x);
#pragma unroll
      for (int j = 0; j < SPLITS; j++) {
        const float weight = ex2_approx_ftz(log[j][i].x - m);
        l += weight * log[j][i].y;
        sum.x += weight * o[j][i].x, sum.y += weight * o[j][i].y;
      }
      if (unit >= UNITS) break;
      const float scale = value_scale(p, part, l);
      write_pair(p, part, row, OwnColumns<GROUPS>::of_unit(unit), sum.x * scale, sum.y * scale);
      if (unit < 2 && share.thread < 128 && share.thread % 4 == 0)
        write_lse<GROUPS>(p, part, row, m, l);
    }
  }
}

// Fewer splits of all columns are read in fewer pieces.
constexpr int LEAST_OF_ONE_ROUND = 8;

template <int AT_ONCE, int SPLITS>
struct AtOnce {
  static constexpr int UNITS_AT_ONCE = AT_ONCE, SPLITS_AT_ONCE = SPLITS;
};

// Merges and writes this CTA's share of the units of all splits, weighted.
template <int GROUPS, int AT_ONCE, int SPLITS>
DEVICE void merge_units(const Params &p, const WorkRange &range, const Position &part,
                        const Splits &splits, int rank, int first_row, const float2 *weights) {
  constexpr int UNITS = OwnColumns<GROUPS>::UNITS;
  const MergeShare share(splits);
  const int thread = share.thread, own_row = share.row, mergers = share.step;
  for (int first = share.first; first < UNITS; first += AT_ONCE * mergers) {
    float2 sum[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) sum[i] = make_float2(0.0f, 0.0f);
    for (int split = 0; split < splits.count; split += SPLITS) {
      float2 o[SPLITS][AT_ONCE];
#pragma unroll
      for (int j = 0; j < SPLITS; j++) {
        const auto *slot = reinterpret_cast<const float2 *>(
            partial_of<GROUPS>(p, range, part, splits, min(split + j, splits.count - 1), rank));
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const int unit = first + i * mergers;
          o[j][i] = make_float2(0.0f, 0.0f);
          if (unit < UNITS) o[j][i] = __ldcg(slot + unit * CONSUMERS + thread);
        }
      }
#pragma unroll
      for (int j = 0; j < SPLITS; j++)
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const int row = own_row + 8 * ((first + i * mergers) % 2);
          const float weight =
              split + j < splits.count ? weights[(split + j) * TILE + row].x : 0.0f;
          sum[i].x += weight * o[j][i].x, sum[i].y += weight * o[j][i].y;
        }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int unit = first + i * mergers;
      if (unit < UNITS)
        write_pair(p, part, first_row + own_row + 8 * (unit % 2), OwnColumns<GROUPS>::of_unit(unit),
                   sum[i].x, sum[i].y);
    }
  }
}

// Merges the partials of an output tile's splits and writes its rows, together with the other CTAs:
// all except the one with the last split, which continues. They wait for each other, so all CTAs of
// the launch must be resident: it is cooperative.
template <int GROUPS>
DEVICE void merge(const Params &p, const WorkRange &range, const Position &part,
                  const Splits &splits, int rank, int first_row, unsigned char *memory, u32 epoch) {
  const int mergers = splits.count - 1;
  for (int split = threadIdx.x; split < splits.count; split += CONSUMERS)
    wait_for_partial(partial_of<GROUPS>(p, range, part, splits, split, rank), epoch);
  bar_sync(OF_CONSUMERS, CONSUMERS);
  if constexpr (GROUPS > 1 || ROW_WARPS < 4) {
    if (splits.count <= Build::one_round && (GROUPS > 1 || splits.count > LEAST_OF_ONE_ROUND)) {
      if (ROW_WARPS == 4 && !has_rows(first_row)) return;
      // Few splits have few mergers, each with many units.
      if (GROUPS > 1 && splits.count <= 4)
        merge_few<GROUPS, 4, 4>(p, range, part, splits, rank, first_row);
      else
        merge_few<GROUPS, Build::one_round, 2>(p, range, part, splits, rank, first_row);
      return;
    }
  }
  // The query and the stages are no longer used.
  float2 *logs = reinterpret_cast<float2 *>(memory);
  constexpr int AT_ONCE = 8;
  const int rows = splits.count * TILE;
  for (int first = threadIdx.x; first < rows; first += AT_ONCE * CONSUMERS) {
    float2 log[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int i = min(first + j * CONSUMERS, rows - 1);
      const float *slot = partial_of<GROUPS>(p, range, part, splits, i / TILE, rank);
      log[j] = __ldcg(reinterpret_cast<const float2 *>(slot + WEIGHTS_AT) + i % TILE);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
      if (first + j * CONSUMERS < rows) logs[first + j * CONSUMERS] = log[j];
  }
  bar_sync(OF_CONSUMERS, CONSUMERS);
  const int row = threadIdx.x / 4;
  float m = LOWEST, l = 0.0f;
  for (int split = threadIdx.x % 4; split < splits.count; split += 4)
    m = fmaxf(m, logs[split * TILE + row].x);
  m = max_of_lanes<1, 4>(m);
  for (int split = threadIdx.x % 4; split < splits.count; split += 4) {
    float2 &log = logs[split * TILE + row];
    log.x = ex2_approx_ftz(log.x - m);
    l += log.x * log.y;
  }
  l = sum_of_lanes<1, 4>(l);
  const float scale = value_scale(p, part, l);
  for (int split = threadIdx.x % 4; split < splits.count; split += 4)
    logs[split * TILE + row].x *= scale;
  if (splits.mine == 0 && threadIdx.x % 4 == 0) write_lse<GROUPS>(p, part, first_row + row, m, l);
  bar_sync(OF_CONSUMERS, CONSUMERS);
  const auto units = [&](auto groups) {
    merge_units<GROUPS, decltype(groups)::UNITS_AT_ONCE, decltype(groups)::SPLITS_AT_ONCE>(
        p, range, part, splits, rank, first_row, logs);
  };
  if (ROW_WARPS == 4 && !has_rows(first_row)) return;
  if constexpr (GROUPS > 1) {
    if (mergers >= 16)
      units(AtOnce<2, 32>());
    else
      units(AtOnce<2, 16>());
    return;
  }
  if constexpr (Build::cluster == 1) {
    if (ROW_WARPS < 4 && mergers >= 16) units(AtOnce<2, 16>());
    // Fewer reads in flight, in less code (H200; reports/performance-log.md, entry 47).
    else if (mergers >= 8)
      units(AtOnce<2, 8>());
    else
      units(AtOnce<4, 4>());
  } else {
    // The most reads in flight that registers allow. 8 to 15 mergers belong to a short context,
    // which is faster with less code (H200; reports/performance-log.md, entry 54).
    if (mergers >= 32)
      units(AtOnce<2, 32>());
    else if (mergers >= 16)
      units(AtOnce<4, 16>());
    else if (mergers >= 8)
      units(AtOnce<2, 8>());
    else
      units(AtOnce<16, 4>());
  }
}
