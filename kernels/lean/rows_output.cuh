// The end of a part: writes the rows of a whole output tile, or stores partials. They are merged by
// all CTAs that have a part of the output tile and no further work.
#pragma once
#include "ptx.cuh"
#include "reduce.cuh"
#include "rows_layout.cuh"
#include "wgmma.cuh"

// Addresses of an output tile's rows.
struct RowWriter {
  unsigned short *out;
  float *lse;
  int row_offset, stride_lse;

  DEVICE RowWriter(const Params &p, const Position &part) {
    const HeadTile tile = part.head_tile();
    row_offset = tile.row_offset;
    const int head = tile.kv_head * Build::group_size;
    out = p.out + (i64)head * p.stride_out_head +
          (Build::ragged_q ? part.queries.first * (i64)p.stride_out_token
                           : part.sequence * p.stride_out_batch);
    stride_lse = Build::ragged_q ? p.total_queries : part.queries.count;
    lse = p.lse + (Build::ragged_q
                       ? (i64)head * stride_lse + part.queries.first
                       : ((i64)part.sequence * p.kv_heads * Build::group_size + head) * stride_lse);
  }

  // Returns the address of row `row` of the output tile.
  DEVICE unsigned short *at(const Params &p, int row) const {
    const int of_head = row_offset + row;
    return out + (i64)(of_head / Build::group_size) * p.stride_out_token +
           (i64)(of_head % Build::group_size) * p.stride_out_head;
  }

  DEVICE void write_lse(int row, float m, float l) const {
    const int of_head = row_offset + row;
    lse[(i64)(of_head % Build::group_size) * stride_lse + of_head / Build::group_size] =
        lse_of(m, l);
  }
};

// Writes this warp's rows of an output tile, in whole lines through shared memory if the queries
// are no longer needed.
DEVICE void write_rows(const Params &p, const Position &part, unsigned char *memory,
                       const float (&o)[COLUMNS], const float (&m)[2], const float (&l)[2]) {
  const RowWriter writer(p, part);
  const int rows = rows_of(part), lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = own_row() + 8 * half;
    // Includes the sink.
    const float sink = Build::sinks ? logit_of(sink_of(p, part, row)) : m[half],
                high = fmaxf(m[half], sink);
    const float share = ex2_approx_ftz(m[half] - high);
    const float sum = l[half] * share + (Build::sinks ? ex2_approx_ftz(sink - high) : 0.0f);
    const float scale = share * reciprocal(sum);
#pragma unroll
    for (int i = 0; i < Build::v_head_dim / 8; i++)
      *reinterpret_cast<u32 *>(memory + piece_at(row, i) + lane % 4 * 4) =
          cvt_rn_x2<Build::bf16>(o[4 * i + 2 * half] * scale, o[4 * i + 2 * half + 1] * scale);
    if (lane % 4 == 0 && row < rows) writer.write_lse(row, high, sum);
  }
  __syncwarp();
  constexpr int STEPS = 16 * ROW_UNITS / 32, AT_ONCE = STEPS < 16 ? STEPS : 16;
#pragma unroll 1
  for (int first = 0; first < STEPS; first += AT_ONCE) {
    u64 words[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = (first + i) * 32 + lane, unit = at % ROW_UNITS;
      const int row = threadIdx.x / 32 * 16 + at / ROW_UNITS;
      words[i] = *reinterpret_cast<u64 *>(memory + piece_at(row, unit / 2) + unit % 2 * 8);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = (first + i) * 32 + lane, unit = at % ROW_UNITS;
      const int row = threadIdx.x / 32 * 16 + at / ROW_UNITS;
      if (row < rows) *reinterpret_cast<u64 *>(writer.at(p, row) + 4 * unit) = words[i];
    }
  }
}

// Waits for all threads of the cluster, including copying ones.
DEVICE void meet_cluster() {
  __syncwarp();  // lanes have diverged
  barrier_cluster_arrive();
  barrier_cluster_wait();
}

// Stores this thread's two rows of sums, and their (m, l), for others to read.
DEVICE void store_sums(unsigned char *memory, const float (&o)[COLUMNS], const float (&m)[2],
                       const float (&l)[2]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = own_row() + 8 * half;
    float *to = reinterpret_cast<float *>(memory + SUMS_AT) + row * SUM_ROW + 2 * lane;
#pragma unroll
    for (int i = 0; i < Build::v_head_dim / 8; i++)
      *reinterpret_cast<float2 *>(to + 8 * i) =
          make_float2(o[4 * i + 2 * half], o[4 * i + 2 * half + 1]);
    if (lane == 0)
      reinterpret_cast<float2 *>(memory + SUM_LOGS_AT)[row] = make_float2(m[half], l[half]);
  }
}

// Merges the sums of a cluster with a whole output tile in distributed shared memory. Each CTA
// merges and writes a share of the rows. Called by all computing threads.
DEVICE void merge_cluster(const Params &p, const Position &part, int rank, u32 shared,
                          unsigned char *memory, const float (&o)[COLUMNS], const float (&m)[2],
                          const float (&l)[2]) {
  bar_sync(OF_CONSUMERS, CONSUMERS);  // the ring has been read
  store_sums(memory, o, m, l);
  meet_cluster();
  const RowWriter writer(p, part);
  const int rows = rows_of(part), share = (rows + Build::cluster - 1) / Build::cluster;
  const int first = rank * share, units = max(0, min(share, rows - first)) * ROW_UNITS;
  // All reads of AT_ONCE units precede the first use.
  constexpr int AT_ONCE = 8 / Build::cluster;
#pragma unroll 1
  for (int base = threadIdx.x; base < units; base += AT_ONCE * CONSUMERS) {
    float4 sums[AT_ONCE][Build::cluster];
    float2 logs[AT_ONCE][Build::cluster];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = min(base + i * CONSUMERS, units - 1), row = first + at / ROW_UNITS;
#pragma unroll
      for (int peer = 0; peer < Build::cluster; peer++) {
        const u32 there = mapa_shared_cluster(shared, peer);
        sums[i][peer] =
            ld_shared_cluster_v4(there + SUMS_AT + 4 * row * SUM_ROW + at % ROW_UNITS * 16);
        logs[i][peer] = ld_shared_cluster_v2(there + SUM_LOGS_AT + 8 * row);
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = base + i * CONSUMERS, row = first + at / ROW_UNITS;
      if (at >= units) break;
      const float sink = Build::sinks ? logit_of(sink_of(p, part, row)) : LOWEST;
      float high = sink;
#pragma unroll
      for (int peer = 0; peer < Build::cluster; peer++) high = fmaxf(high, logs[i][peer].x);
      float sum = Build::sinks ? ex2_approx_ftz(sink - high) : 0.0f;
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int peer = 0; peer < Build::cluster; peer++) {
        const float weight = ex2_approx_ftz(logs[i][peer].x - high);
        sum += weight * logs[i][peer].y;
        add_weighted(x, weight, sums[i][peer]);
      }
      const float scale = reciprocal(sum);
      *reinterpret_cast<uint2 *>(writer.at(p, row) + at % ROW_UNITS * 4) =
          make_uint2(cvt_rn_x2<Build::bf16>(x.x * scale, x.y * scale),
                     cvt_rn_x2<Build::bf16>(x.z * scale, x.w * scale));
      if (at % ROW_UNITS == 0) writer.write_lse(row, high, sum);
    }
  }
  meet_cluster();  // no CTA exits while others read its sums
}

// Slots of the partials of an output tile's splits. Each work range has a slot. A range that begins
// with the end of an output tile has another for the first split of the next, so that it need not
// wait until the first slot has been read.
struct Slots {
  u32 *partials;
  int second, first;  // of the second split, less 1; of the first
  // Number of merging CTAs: those of all splits, except the last one's if it continues with another
  // output tile.
  int mergers;

  DEVICE Slots(const Params &p, const WorkRange &range, const Position &part,
               const Splits &splits) {
    partials = p.partials;
    second = range.slot - splits.mine;
    mergers = splits.count;
    if (!Build::ragged || range.longest == 0) {
      const int host = range.slot - splits.mine, tile_start = part.at - part.first;
      const bool begins = range_start(host, range.share, range.longer) == tile_start;
      first = begins ? host : gridDim.x + host;
      if (range_start(host + splits.count, range.share, range.longer) > tile_start + part.tiles)
        mergers--;
    } else if constexpr (Build::ragged_q) {
      first = units_before(p, threadIdx.x % 32, -1, part.sequence) + part.head;
    } else {
      first = part.sequence * head_tiles(p) + part.head;
    }
  }

  // Returns unit `unit` of a split's partial.
  DEVICE u32 *at(int split, int unit) const {
    return partials + (i64)(split == 0 ? first : second + split) * (Build::partial_bytes / 4) +
           4 * unit;
  }
};

// Replaces the last byte of four numbers by the epoch, with an error of 2^-15 of each; NaN stays
// NaN.
DEVICE uint4 marked(float x, float y, float z, float w, u32 epoch) {
  return make_uint4(__byte_perm(__float_as_uint(x), epoch, 0x3214),
                    __byte_perm(__float_as_uint(y), epoch, 0x3215),
                    __byte_perm(__float_as_uint(z), epoch, 0x3216),
                    __byte_perm(__float_as_uint(w), epoch, 0x3217));
}

DEVICE bool has_epoch(const uint4 &unit, u32 epoch) {
  return (__byte_perm(unit.x, unit.y, 0x0040) & 0xffff |
          __byte_perm(unit.z, unit.w, 0x4000) & 0xffff0000) == epoch;
}

DEVICE float number_of(u32 marked) { return __uint_as_float(marked & ~0xffu); }

// Stores this thread's rows of a partial.
DEVICE void store_partial(const Position &part, const Slots &slots, int split,
                          const float (&o)[COLUMNS], const float (&m)[2], const float (&l)[2],
                          u32 epoch) {
  const int rows = rows_of(part), lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = own_row() + 8 * half;
    if (row >= rows) continue;
    u32 *const to = slots.at(split, row * ROW_UNITS + lane);
#pragma unroll
    for (int i = 0; i < ROW_UNITS / 4; i++) {
      const float *x = o + 8 * i + 2 * half;
      st_relaxed_gpu_b128(to + 16 * i, marked(x[0], x[1], x[4], x[5], epoch));
    }
    if (lane == 0)
      st_relaxed_gpu_b128(slots.at(split, LOGS_UNIT + row),
                          make_uint4(__float_as_uint(m[half]), __float_as_uint(l[half]), 0, epoch));
  }
}

// Adds the partial of the output tile's other split to this thread's rows.
DEVICE void add_partial(const Position &part, const Slots &slots, int split, float (&o)[COLUMNS],
                        float (&m)[2], float (&l)[2], u32 epoch) {
  constexpr int OF_ROW = ROW_UNITS / 4, AT_ONCE = OF_ROW < 8 ? OF_ROW : 8;
  const int last = rows_of(part) - 1;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = min(own_row() + 8 * half, last);
    const u32 *const from = slots.at(split, row * ROW_UNITS + threadIdx.x % 4);
    const u32 *const log_from = slots.at(split, LOGS_UNIT + row);
    float before = 1.0f, weight = 0.0f;
#pragma unroll
    for (int first = 0; first < OF_ROW; first += AT_ONCE) {
      uint4 units[AT_ONCE], log;
      bool missing = true;
      while (missing) {
        log = ld_relaxed_gpu_b128(log_from);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) units[i] = ld_relaxed_gpu_b128(from + 16 * (first + i));
        missing = log.w != epoch;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) missing |= !has_epoch(units[i], epoch);
      }
      if (first == 0) {
        const float high = fmaxf(m[half], __uint_as_float(log.x));
        before = ex2_approx_ftz(m[half] - high);
        weight = ex2_approx_ftz(__uint_as_float(log.x) - high);
        l[half] = l[half] * before + weight * __uint_as_float(log.y);
        m[half] = high;
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        float *x = o + 8 * (first + i) + 2 * half;
        x[0] = x[0] * before + weight * number_of(units[i].x);
        x[1] = x[1] * before + weight * number_of(units[i].y);
        x[4] = x[4] * before + weight * number_of(units[i].z);
        x[5] = x[5] * before + weight * number_of(units[i].w);
      }
    }
  }
}

// Merges rows of this CTA's share: AT_ONCE rows per warp, SPLITS of each at a time. Called by a
// whole warp; each thread rereads units that have not arrived.
template <int SPLITS, int AT_ONCE>
DEVICE void merge_rows(const Params &p, const Position &part, const Splits &splits,
                       const Slots &slots, const RowWriter &writer, u32 epoch) {
  // Units of a row per lane; lanes without any duplicate another.
  constexpr int LANE_UNITS = ROW_UNITS > 32 ? ROW_UNITS / 32 : 1;
  const int mergers = slots.mergers;
  const int rows = (rows_of(part) - splits.mine + mergers - 1) / mergers;  // this CTA's
  const int lane = threadIdx.x % 32, unit = lane % ROW_UNITS;
  // Row and split of this lane's (m, l).
  const int log_row = lane / SPLITS % AT_ONCE, log_split = lane % SPLITS;
  for (int i = threadIdx.x / 32 * AT_ONCE; i < rows; i += CONSUMERS / 32 * AT_ONCE) {
    int row[AT_ONCE];
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) row[r] = splits.mine + min(i + r, rows - 1) * mergers;
    const int own = splits.mine + min(i + log_row, rows - 1) * mergers;
    float m = Build::sinks ? logit_of(sink_of(p, part, own)) : LOWEST,
          l = Build::sinks ? 1.0f : 0.0f;
    float4 sum[AT_ONCE][LANE_UNITS];
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++)
#pragma unroll
      for (int j = 0; j < LANE_UNITS; j++) sum[r][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int first = 0; first < splits.count; first += SPLITS) {
      // A waiting lane polls (m, l) instead of all rows, which would delay others.
      const u32 *log_at = slots.at(min(first + log_split, splits.count - 1), LOGS_UNIT + own);
      uint4 units[SPLITS][AT_ONCE][LANE_UNITS], log;
      bool missing = true;
      while (missing) {
        missing = false;
#pragma unroll
        for (int s = 0; s < SPLITS; s++)
#pragma unroll
          for (int r = 0; r < AT_ONCE; r++)
#pragma unroll
            for (int j = 0; j < LANE_UNITS; j++)
              units[s][r][j] = ld_relaxed_gpu_b128(
                  slots.at(min(first + s, splits.count - 1), row[r] * ROW_UNITS + unit + 32 * j));
        log = ld_relaxed_gpu_b128(log_at);
#pragma unroll
        for (int s = 0; s < SPLITS; s++)
#pragma unroll
          for (int r = 0; r < AT_ONCE; r++)
#pragma unroll
            for (int j = 0; j < LANE_UNITS; j++) missing |= !has_epoch(units[s][r][j], epoch);
        missing = __any_sync(~0u, missing || log.w != epoch);
        while (__any_sync(~0u, log.w != epoch)) log = ld_relaxed_gpu_b128(log_at);
      }
      const bool valid = first + log_split < splits.count;
      const float log_m = valid ? __uint_as_float(log.x) : -INFINITE;
      float high = fmaxf(m, log_m);
      high = max_of_lanes<1, SPLITS>(high);
      const float before = ex2_approx_ftz(m - high), weight = ex2_approx_ftz(log_m - high);
      const float added = sum_of_lanes<1, SPLITS>(valid ? weight * __uint_as_float(log.y) : 0.0f);
      l = l * before + added;
      m = high;
#pragma unroll
      for (int r = 0; r < AT_ONCE; r++) {
        const float scale = __shfl_sync(~0u, before, r * SPLITS);
#pragma unroll
        for (int j = 0; j < LANE_UNITS; j++) sum[r][j] = times(sum[r][j], scale);
#pragma unroll
        for (int s = 0; s < SPLITS; s++) {
          const float share = __shfl_sync(~0u, weight, r * SPLITS + s);
#pragma unroll
          for (int j = 0; j < LANE_UNITS; j++) {
            sum[r][j].x += share * number_of(units[s][r][j].x);
            sum[r][j].y += share * number_of(units[s][r][j].y);
            sum[r][j].z += share * number_of(units[s][r][j].z);
            sum[r][j].w += share * number_of(units[s][r][j].w);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
      const float row_m = __shfl_sync(~0u, m, r * SPLITS);
      const float row_l = __shfl_sync(~0u, l, r * SPLITS), scale = reciprocal(row_l);
      if (i + r >= rows || lane >= ROW_UNITS) continue;
      unsigned short *at = writer.at(p, row[r]) + unit / 4 * 16 + unit % 4 * 2;
#pragma unroll
      for (int j = 0; j < LANE_UNITS; j++) {
        const float4 x = sum[r][j];
        *reinterpret_cast<u32 *>(at + 128 * j) = cvt_rn_x2<Build::bf16>(x.x * scale, x.y * scale);
        *reinterpret_cast<u32 *>(at + 128 * j + 8) =
            cvt_rn_x2<Build::bf16>(x.z * scale, x.w * scale);
      }
      if (lane == 0) writer.write_lse(row[r], row_m, row_l);
    }
  }
}

// Merges this CTA's share of the rows of an output tile: row `splits.mine`, and further rows in
// steps of the number of mergers. All CTAs of the launch are resident, because it is cooperative.
DEVICE void merge(const Params &p, const Position &part, const Splits &splits, const Slots &slots,
                  u32 epoch) {
  const RowWriter writer(p, part);
  constexpr int WIDE = Build::v_head_dim > 128 ? 2 : 1;
  if (splits.count <= 4)
    merge_rows<4, 4 / WIDE>(p, part, splits, slots, writer, epoch);
  else if (splits.count <= 8)
    merge_rows<8, 2 / WIDE>(p, part, splits, slots, writer, epoch);
  else
    merge_rows<16 / WIDE, 1>(p, part, splits, slots, writer, epoch);
}
