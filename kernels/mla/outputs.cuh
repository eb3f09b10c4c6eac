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

// Stores a partial in fp16, in units of powers of two with which a row's largest number of this
// warpgroup is below 512: fp16 ends at 65504, V and sums of bf16 do not. With an infinity it is 1.
template <int GROUPS>
DEVICE void store_partial(float *slot, int first_row, const float (&o)[VALUES / GROUPS / 4]) {
  if (!has_rows(first_row)) return;
  float scale[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES / GROUPS / 4; i++)
      if (i / 2 % 2 == half) largest = fmaxf(largest, fabsf(o[i]));
    const int exponent = __float_as_uint(max_of_lanes<1, 4>(largest)) >> 23;
    const int inverse = exponent < 255 ? min(262 - exponent, 253) : 127;
    scale[half] = __uint_as_float(inverse << 23);
    if (threadIdx.x % 4 == 0)
      slot[WEIGHTS_AT + 4 * (own_row() + 8 * half) + 2 + threadIdx.x / 128] =
          __uint_as_float((254 - inverse) << 23);
  }
#pragma unroll
  for (int block = 0; block < OwnColumns<GROUPS>::BLOCKS; block++) {
    const float *own = &o[4 * block];
    reinterpret_cast<uint2 *>(slot)[block * CONSUMERS + threadIdx.x] =
        make_uint2(cvt_rn_x2<false>(own[0] * scale[0], own[1] * scale[0]),
                   cvt_rn_x2<false>(own[2] * scale[1], own[3] * scale[1]));
  }
}

// Returns two numbers of a partial, in its units.
DEVICE float2 stored_pair(u32 both) {
  return make_float2(cvt_f32_f16(both & 0xffff), cvt_f32_f16(both >> 16));
}

// Returns m, l and the units of both warpgroups' columns of a partial's row.
DEVICE float4 log_of(const float *slot, int row) {
  return __ldcg(reinterpret_cast<const float4 *>(slot + WEIGHTS_AT) + row);
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
// weighted, and writes the LSE. `shares`: factors for each row, of the own numbers and of the other
// split's in the columns of either warpgroup.
template <int GROUPS>
DEVICE void add_second_split(const Params &p, const Position &part, int first_row,
                             const float *slot, float (&o)[VALUES / GROUPS / 4],
                             const float (&m)[2], const float (&l)[2], float4 *shares, u32 epoch) {
  if (threadIdx.x < 128) {
    if (threadIdx.x % 32 == 0) wait_for_partial(slot, epoch);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = own_row() + 8 * half;
      const float4 log = log_of(slot, row);
      const float high = fmaxf(m[half], log.x);
      const float own = ex2_approx_ftz(m[half] - high), other = ex2_approx_ftz(log.x - high);
      const float sum = own * l[half] + other * log.y, scale = value_scale(p, part, sum);
      if (threadIdx.x % 4 == 0) {
        shares[row] =
            make_float4(own * scale, other * scale * log.z, other * scale * log.w, 0.0f);
        write_lse<GROUPS>(p, part, first_row + row, high, sum);
      }
    }
  }
  bar_sync(OF_CONSUMERS, CONSUMERS);
  if (!has_rows(first_row)) return;
  const auto *blocks = reinterpret_cast<const uint2 *>(slot) + threadIdx.x;
  float own[2], other[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float4 share = shares[own_row() + 8 * half];
    own[half] = share.x, other[half] = threadIdx.x < 128 ? share.y : share.z;
  }
#pragma unroll
  for (int block = 0; block < OwnColumns<GROUPS>::BLOCKS; block++) {
    const uint2 both = __ldcg(blocks + block * CONSUMERS);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float2 theirs = stored_pair(half ? both.y : both.x);
      float *mine = &o[4 * block + 2 * half];
      mine[0] = own[half] * mine[0] + other[half] * theirs.x;
      mine[1] = own[half] * mine[1] + other[half] * theirs.y;
    }
  }
}

// Warps with rows, if there are fewer than 64; the others take a share of their blocks in merges.
constexpr int ROW_WARPS = ALL_ROWS <= 32 ? (ALL_ROWS + 15) / 16 : 4;

// A thread's share of an output tile's blocks, and the thread that stored them.
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

// Merges and writes this CTA's share of the blocks of up to SPLITS splits, AT_ONCE at a time. Blocks
// and weights are read at once, so nothing waits between them. Slower for partials of all columns,
// unless they are many and of few rows (H200; reports/performance-log.md, entries 59 and 74).
template <int GROUPS, int SPLITS, int AT_ONCE>
DEVICE void merge_few(const Params &p, const WorkRange &range, const Position &part,
                      const Splits &splits, int rank, int first_row) {
  constexpr int BLOCKS = OwnColumns<GROUPS>::BLOCKS;
  const MergeShare share(splits);
  for (int first = share.first; first < BLOCKS; first += AT_ONCE * share.step) {
    uint2 o[SPLITS][AT_ONCE];
    float4 log[SPLITS][2];
#pragma unroll
    for (int j = 0; j < SPLITS; j++) {
      const float *slot =
          partial_of<GROUPS>(p, range, part, splits, min(j, splits.count - 1), rank);
#pragma unroll
      for (int half = 0; half < 2; half++)
        log[j][half] = j < splits.count ? log_of(slot, share.row + 8 * half)
                                        : make_float4(LOWEST, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int block = first + i * share.step;
        o[j][i] = make_uint2(0, 0);
        if (block < BLOCKS && j < splits.count)
          o[j][i] = __ldcg(reinterpret_cast<const uint2 *>(slot) + block * CONSUMERS + share.thread);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first_row + share.row + 8 * half;
      float m = LOWEST, l = 0.0f, weights[SPLITS];
#pragma unroll
      for (int j = 0; j < SPLITS; j++) m = fmaxf(m, log[j][half].x);
#pragma unroll
      for (int j = 0; j < SPLITS; j++) {
        const float4 own = log[j][half];
        weights[j] = ex2_approx_ftz(own.x - m);
        l += weights[j] * own.y;
        weights[j] *= share.thread < 128 ? own.z : own.w;
      }
      const float scale = value_scale(p, part, l);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int block = first + i * share.step;
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < SPLITS; j++) {
          const float2 theirs = stored_pair(half ? o[j][i].y : o[j][i].x);
          sum.x += weights[j] * theirs.x, sum.y += weights[j] * theirs.y;
        }
        if (block >= BLOCKS) break;
        write_pair(p, part, row, OwnColumns<GROUPS>::of_unit(2 * block), sum.x * scale,
                   sum.y * scale);
        if (block == 0 && share.thread < 128 && share.thread % 4 == 0)
          write_lse<GROUPS>(p, part, row, m, l);
      }
    }
  }
}

// Fewer splits of all columns are read in fewer pieces.
constexpr int LEAST_OF_ONE_ROUND = 8;

template <int AT_ONCE, int SPLITS>
struct AtOnce {
  static constexpr int BLOCKS_AT_ONCE = AT_ONCE, SPLITS_AT_ONCE = SPLITS;
};

// Merges and writes this CTA's share of the blocks of all splits. `weights`: of each row of each
// split, for the columns of either warpgroup.
template <int GROUPS, int AT_ONCE, int SPLITS>
DEVICE void merge_blocks(const Params &p, const WorkRange &range, const Position &part,
                         const Splits &splits, int rank, int first_row, const float2 *weights) {
  constexpr int BLOCKS = OwnColumns<GROUPS>::BLOCKS;
  const MergeShare share(splits);
  const int thread = share.thread, own_row = share.row, mergers = share.step;
  const float *own_weights = &weights[own_row].x + thread / 128;
  for (int first = share.first; first < BLOCKS; first += AT_ONCE * mergers) {
    float2 sum[AT_ONCE][2];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) sum[i][0] = sum[i][1] = make_float2(0.0f, 0.0f);
    for (int split = 0; split < splits.count; split += SPLITS) {
      uint2 o[SPLITS][AT_ONCE];
#pragma unroll
      for (int j = 0; j < SPLITS; j++) {
        const auto *slot = reinterpret_cast<const uint2 *>(
            partial_of<GROUPS>(p, range, part, splits, min(split + j, splits.count - 1), rank));
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const int block = first + i * mergers;
          o[j][i] = make_uint2(0, 0);
          if (block < BLOCKS) o[j][i] = __ldcg(slot + block * CONSUMERS + thread);
        }
      }
#pragma unroll
      for (int j = 0; j < SPLITS; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float weight =
              split + j < splits.count ? own_weights[2 * ((split + j) * TILE + 8 * half)] : 0.0f;
#pragma unroll
          for (int i = 0; i < AT_ONCE; i++) {
            const float2 theirs = stored_pair(half ? o[j][i].y : o[j][i].x);
            sum[i][half].x += weight * theirs.x, sum[i][half].y += weight * theirs.y;
          }
        }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int block = first + i * mergers;
      if (block >= BLOCKS) break;
#pragma unroll
      for (int half = 0; half < 2; half++)
        write_pair(p, part, first_row + own_row + 8 * half,
                   OwnColumns<GROUPS>::of_unit(2 * block), sum[i][half].x, sum[i][half].y);
    }
  }
}

// Writes the weights of all splits, in the order of `merge_blocks`, and the LSE. Four threads share
// a row.
template <int GROUPS>
DEVICE void weigh_splits(const Params &p, const WorkRange &range, const Position &part,
                         const Splits &splits, int rank, int first_row, float2 *weights) {
  constexpr int AT_ONCE = 3, ROUND = 4 * AT_ONCE;
  const int row = threadIdx.x / 4;
  float4 logs[AT_ONCE];
  const auto read = [&](int first) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int split = first + 4 * i + threadIdx.x % 4;
      logs[i] = make_float4(LOWEST, 0.0f, 0.0f, 0.0f);
      if (split < splits.count)
        logs[i] = log_of(partial_of<GROUPS>(p, range, part, splits, split, rank), row);
    }
  };
  float m = LOWEST, l = 0.0f;
  for (int first = 0; first < splits.count; first += ROUND) {
    read(first);
    const float before = m;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) m = fmaxf(m, logs[i].x);
    l *= ex2_approx_ftz(before - m);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) l += ex2_approx_ftz(logs[i].x - m) * logs[i].y;
  }
  const float high = max_of_lanes<1, 4>(m);
  l = sum_of_lanes<1, 4>(l * ex2_approx_ftz(m - high));
  const float scale = value_scale(p, part, l);
  for (int first = 0; first < splits.count; first += ROUND) {
    if (splits.count > ROUND) read(first);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int split = first + 4 * i + threadIdx.x % 4;
      const float weight = ex2_approx_ftz(logs[i].x - high) * scale;
      if (split < splits.count)
        weights[split * TILE + row] = make_float2(weight * logs[i].z, weight * logs[i].w);
    }
  }
  if (splits.mine == 0 && threadIdx.x % 4 == 0)
    write_lse<GROUPS>(p, part, first_row + row, high, l);
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
      // Few splits have few mergers, each with many blocks.
      if (GROUPS > 1 && splits.count <= 4)
        merge_few<GROUPS, 4, 2>(p, range, part, splits, rank, first_row);
      else
        merge_few<GROUPS, Build::one_round, 1>(p, range, part, splits, rank, first_row);
      return;
    }
  }
  // The query and the stages are no longer used.
  float2 *weights = reinterpret_cast<float2 *>(memory);
  weigh_splits<GROUPS>(p, range, part, splits, rank, first_row, weights);
  bar_sync(OF_CONSUMERS, CONSUMERS);
  const auto blocks = [&](auto groups) {
    merge_blocks<GROUPS, decltype(groups)::BLOCKS_AT_ONCE, decltype(groups)::SPLITS_AT_ONCE>(
        p, range, part, splits, rank, first_row, weights);
  };
  if (ROW_WARPS == 4 && !has_rows(first_row)) return;
  if constexpr (GROUPS > 1) {
    if (mergers >= 16)
      blocks(AtOnce<1, 32>());
    else
      blocks(AtOnce<1, 16>());
    return;
  }
  if constexpr (Build::cluster == 1) {
    if (ROW_WARPS < 4 && mergers >= 16) blocks(AtOnce<1, 16>());
    // Fewer reads in flight, in less code (H200; reports/performance-log.md, entry 47).
    else if (mergers >= 8)
      blocks(AtOnce<1, 8>());
    else
      blocks(AtOnce<2, 4>());
  } else {
    // The most reads in flight that registers allow. 8 to 15 mergers belong to a short context,
    // which is faster with less code (H200; reports/performance-log.md, entry 54).
    if (mergers >= 32)
      blocks(AtOnce<1, 32>());
    else if (mergers >= 16)
      blocks(AtOnce<2, 16>());
    else if (mergers >= 8)
      blocks(AtOnce<1, 8>());
    else
      blocks(AtOnce<8, 4>());
  }
}
