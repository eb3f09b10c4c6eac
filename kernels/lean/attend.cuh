// Attention over a chunk: scores, a warp's running softmax, and the weighted sum of values. Tokens
// fill the large dimension of the matrix instructions (S^T = K Q^T, O^T = V^T P^T), so a group of
// up to 8 query heads pads to 8 columns.
#pragma once
#include "fp8.cuh"
#include "lanes.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "rotary.cuh"
#include "schedule.cuh"

// Four lanes hold a step's row of Q, in the order of `keys_of`: adjacent lanes begin LANE_STEP
// numbers apart, and a lane's second half is HALF_STEP numbers after its first.
constexpr int LANE_STEP = Build::kv_dtype == 0 ? 2 : 4, HALF_STEP = Build::kv_dtype == 0 ? 8 : 2;

// The query rows of an output tile, as columns of the second operand.
struct Query {
  u32 fragments[Build::shared_query ? 1 : K_STEPS][ROW_BLOCKS][2];
  const QNumber *base;          // the KV head's query heads
  int row_offset, all_rows;     // of the output tile; of the KV head
  int sequence = -1, head;      // Build::fixed_runs: owner of these rows
  int position;                 // Build::rotary_dim: position of the first query token
  float slopes[ROW_BLOCKS][2];  // Build::alibi: slopes of the lane's rows, see State
  u32 shared_lane;              // Build::shared_query: the lane's address
  float scales[ROW_BLOCKS][2];  // Build::kv_dtype: scales of the lane's rows of scores

  // Returns whether the rows differ from the previous ones. Fixed runs of an output tile share
  // them.
  DEVICE bool enter_part(const Params &p, const Position &part) {
    const HeadTile tile = part.head_tile();
    row_offset = tile.row_offset;
    all_rows = ::all_rows(part.queries.count);
    base = p.q +
           (Build::ragged_q ? part.queries.first * (i64)p.stride_q_token
                            : part.sequence * p.stride_q_batch) +
           (i64)tile.kv_head * Build::group_size * p.stride_q_head;
    if constexpr (Build::rotary_dim > 0) position = length_of(p, part.sequence);
    const bool others = !Build::fixed_runs || sequence != part.sequence || head != part.head;
    sequence = part.sequence, head = part.head;
    return others;
  }

  DEVICE void load_slopes(const Params &p, const Position &part, int lane) {
    const float *of_heads = p.alibi_slopes + part.sequence * p.stride_slopes_batch +
                            part.head_tile().kv_head * Build::group_size;
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        slopes[rows][j] = __ldg(of_heads + (row_offset + rows * BLOCK_ROWS + lane % 4 * 2 + j) %
                                               Build::group_size);
  }

  // Loads two numbers as operands, except for `divide_row`.
  DEVICE static u32 two_numbers(const QNumber *at) {
    if constexpr (Build::q_dtype == 0) return __ldg(reinterpret_cast<const u32 *>(at));
    return to_fp16<Build::q_dtype>(__ldg(reinterpret_cast<const unsigned short *>(at)), 0, 1);
  }

  DEVICE const QNumber *row_of(const Params &p, int row) const {
    return base + (i64)(row / Build::group_size) * p.stride_q_token +
           (i64)(row % Build::group_size) * p.stride_q_head;
  }

  DEVICE Angles angles_of(const Params &p, int row) const {
    Angles angles;
    angles.enter(p, position + row / Build::group_size * p.rotary_step);
    return angles;
  }

  DEVICE float scale(const Params &p, int rows, int j) const {
    return Build::kv_dtype == 0 ? p.qk_scale : scales[rows][j];
  }

  DEVICE void load(const Params &p, const Position &part, int lane) {
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++) {
      const int within = rows * BLOCK_ROWS + lane / 4, row = row_offset + within;
      const bool valid = row < all_rows && within < ROW_COUNT && in_block(lane / 4);
      const QNumber *at = row_of(p, row) + lane % 4 * LANE_STEP;
#pragma unroll
      for (int step = 0; step < K_STEPS; step++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          fragments[step][rows][half] = valid && step * 16 + half * 8 < Build::head_dim
                                            ? two_numbers(at + step * 16 + half * HALF_STEP)
                                            : 0;
    }
    if constexpr (Build::kv_dtype == 0) return;
    const float first = descaled(p, part, 0);
    const float second = Build::heads_of_row > 1 ? descaled(p, part, 1) : first;
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++) {
      const float scale = rows < HEAD_BLOCKS ? first : second;
      const float unit = DIVIDED_QUERY ? divide_row(rows) : 1.0f;
#pragma unroll
      for (int j = 0; j < 2; j++)
        scales[rows][j] =
            scale * (DIVIDED_QUERY ? __shfl_sync(~0u, unit, (lane % 4 * 2 + j) * 4) : 1.0f);
    }
  }

  // Loads from shared memory, after `load_shared` and a barrier.
  DEVICE void load_staged() {
#pragma unroll
    for (int step = 0; step < K_STEPS; step++)
#pragma unroll
      for (int rows = 0; rows < ROW_BLOCKS; rows++)
        ldmatrix_x2(fragments[step][rows], shared_lane + 2 * (rows * 8 * QUERY_ROW + step * 16));
  }

  // Build::kv_dtype: returns the factor of scores for rows of a row's KV head `head`.
  DEVICE static float descaled(const Params &p, const Position &part, int head) {
    const int kv_head = part.head_tile().kv_head * Build::heads_of_row + head;
    return p.qk_scale * KV_UNIT * Q_UNIT * scale_of(p.q_descale, part.sequence, kv_head) *
           scale_of(p.k_descale, part.sequence, kv_head);
  }

  // Converts a row from bf16 to fp16; returns its unit.
  DEVICE float divide_row(int rows) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 2 * K_STEPS; i++) largest = larger(largest, fragments[i / 2][rows][i % 2]);
    const float unit = unit_of(max_of_lanes<1, 4>(largest));
#pragma unroll
    for (int i = 0; i < 2 * K_STEPS; i++)
      fragments[i / 2][rows][i % 2] = in_units(fragments[i / 2][rows][i % 2], unit);
    return unit;
  }

  // Called by all threads; the caller places barriers around it.
  DEVICE void load_shared(const Params &p, unsigned char *shared) const {
    float *units = at_place<float>(shared, Shared::units);
    if constexpr (DIVIDED_QUERY) load_units(p, units);
#pragma unroll 4
    for (int i = threadIdx.x; i < Build::rows * (2 * K_STEPS); i += THREADS) {
      const int within = i / (2 * K_STEPS), column = i % (2 * K_STEPS) * 8,
                row = row_offset + within;
      u32 words[4] = {0, 0, 0, 0};
      if (row < all_rows && (Build::head_dim % 16 == 0 || column < Build::head_dim)) {
        const QNumber *at = row_of(p, row) + column;
#pragma unroll
        for (int word = 0; word < 4; word++)
          words[word] = turned(angles_of(p, row), two_numbers(at + 2 * word), at + 2 * word,
                               column + 2 * word);
      }
      if constexpr (Build::kv_dtype == 0) {
        *reinterpret_cast<uint4 *>(shared + Shared::query + 2 * (within * QUERY_ROW + column)) =
            make_uint4(words[0], words[1], words[2], words[3]);
      } else {
#pragma unroll
        for (int word = 0; word < 4; word++)
          if constexpr (DIVIDED_QUERY) words[word] = in_units(words[word], units[within]);
        // Numbers of two lanes: 8 bytes in each half.
        const int to = within * QUERY_ROW + column / 16 * 16 + column % 16 / 2;
        uint2 *halves = reinterpret_cast<uint2 *>(shared + Shared::query + 2 * to);
        halves[0] = make_uint2(words[0], words[2]);
        halves[2] = make_uint2(words[1], words[3]);
      }
    }
  }

  // Stores the units of all rows, a row per warp. Called by all threads.
  DEVICE void load_units(const Params &p, float *units) const {
    const int lane = threadIdx.x % 32;
    for (int within = threadIdx.x / 32; within < Build::rows; within += Build::warps) {
      const int row = row_offset + within;
      u32 largest = 0;
      for (int pair = lane; row < all_rows && pair < Build::head_dim / 2; pair += 32)
        largest = larger(largest, two_numbers(row_of(p, row) + 2 * pair));
      largest = max_of_lanes<1, 32>(largest);
      if (lane == 0) units[within] = unit_of(largest);
    }
    __syncthreads();
  }

  // Build::kv_dtype: called after `load_shared` and a barrier.
  DEVICE void load_scales(const Params &p, const Position &part, const unsigned char *shared,
                          int lane) {
    const float *units = at_place<float>(shared, Shared::units);
    const float first = descaled(p, part, 0);
    const float second = Build::heads_of_row > 1 ? descaled(p, part, 1) : first;
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++) {
      const float scale = rows < HEAD_BLOCKS ? first : second;
#pragma unroll
      for (int j = 0; j < 2; j++)
        scales[rows][j] = scale * (DIVIDED_QUERY ? units[rows * 8 + lane % 4 * 2 + j] : 1.0f);
    }
  }

  DEVICE void fragment(u32 (&b)[2], int step, int rows) const {
    if constexpr (Build::shared_query)
      ldmatrix_x2(b, shared_lane + 2 * (rows * 8 * QUERY_ROW + step * 16));
    else
      b[0] = fragments[Build::shared_query ? 0 : step][rows][0],
      b[1] = fragments[Build::shared_query ? 0 : step][rows][1];
  }
};

// Build::page_scales: reads the scales of the lane's tokens of a chunk. `at` is the scale of K's
// first page; V's are 4 bytes further.
DEVICE void load_scales(float (&scales)[TOKEN_BLOCKS][2], u32 at, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * TOKEN_BLOCKS; i++) {
    const int token = 8 * i;
    // Otherwise the lane's previous token has the same page.
    scales[i / 2][i % 2] =
        token % Build::box == 0
            ? ld_shared_f32(at + (token + (Build::box < 8 ? lane / 4 : 0)) / Build::box * 8)
            : scales[(i - 1) / 2][(i - 1) % 2];
  }
}

// A warp's share of an output tile: the running softmax over its chunks. Lane `lane` holds rows
// `pair` and `pair` + 1 of each block of 8 rows.
struct State {
  float o[V_STEPS][ROW_BLOCKS][4];  // O^T: 16 columns of head_dim per step
  float m[ROW_BLOCKS][2];           // the reference of weights, in units of log2
  float l[ROW_BLOCKS][2];           // this lane's sum of weights
  float unit;                       // Build::page_scales: pending factor of `o`, a power of two
  float v_scales[TOKEN_BLOCKS][2];  // Build::page_scales: scales of the lane's tokens over `unit`

  DEVICE void reset() {
    if constexpr (Build::page_scales) unit = unit_above(0.0f);
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++) {
#pragma unroll
      for (int j = 0; j < 2; j++) m[rows][j] = LOWEST, l[rows][j] = 0.0f;
#pragma unroll
      for (int step = 0; step < V_STEPS; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[step][rows][i] = 0.0f;
    }
  }

  // Moves the references if a score of this chunk exceeds one by the threshold.
  DEVICE void rescale(const float (&s)[TOKEN_BLOCKS][ROW_BLOCKS][4]) {
    float top[ROW_BLOCKS][2];
    bool passed = false;
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        top[rows][j] = fmaxf(s[0][rows][j], s[0][rows][j + 2]);
#pragma unroll
        for (int block = 1; block < TOKEN_BLOCKS; block++)
          top[rows][j] = fmaxf(top[rows][j], fmaxf(s[block][rows][j], s[block][rows][j + 2]));
        // A sum would be rounded up beyond the threshold for scores above 2^27.
        passed |= top[rows][j] - m[rows][j] > RESCALE_THRESHOLD;
      }
    if (!__any_sync(~0u, passed)) return;
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float highest = max_of_lanes<4, 32>(top[rows][j]);
        const float moved = fmaxf(m[rows][j], highest - RESCALE_MARGIN);
        const float scale = ex2_approx_ftz(m[rows][j] - moved);
        m[rows][j] = moved;
        l[rows][j] *= scale;
#pragma unroll
        for (int step = 0; step < V_STEPS; step++)
          o[step][rows][j] *= scale, o[step][rows][j + 2] *= scale;
      }
  }

  // Build::page_scales: reads scales of values and divides them by the unit. A scale above it moves
  // the unit, so weights times the quotients stay within fp16.
  DEVICE void take_scales(u32 page_scales, int lane) {
    load_scales(v_scales, page_scales + 4, lane);
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * TOKEN_BLOCKS; i++) top = fmaxf(top, fabsf(v_scales[i / 2][i % 2]));
    if (__any_sync(~0u, top > unit)) {
      top = max_of_lanes<4, 32>(top);
      const float moved = unit_above(top), scale = unit * reciprocal_of(moved);
      unit = moved;
#pragma unroll
      for (int step = 0; step < V_STEPS; step++)
#pragma unroll
        for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
          for (int i = 0; i < 4; i++) o[step][rows][i] *= scale;
    }
    const float by = reciprocal_of(unit);
#pragma unroll
    for (int i = 0; i < 2 * TOKEN_BLOCKS; i++) v_scales[i / 2][i % 2] *= by;
  }

  // Turns scores into weights, as fragments of the second operand; Build::page_scales: times the
  // scales.
  DEVICE void weigh(const float (&s)[TOKEN_BLOCKS][ROW_BLOCKS][4],
                    u32 (&weights)[TOKEN_BLOCKS][ROW_BLOCKS][2]) {
#pragma unroll
    for (int block = 0; block < TOKEN_BLOCKS; block++)
#pragma unroll
      for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          // Never fused with the product that a score is, see MOST_FUSED.
          const float x = ex2_approx_ftz(__fsub_rn(s[block][rows][2 * half], m[rows][0]));
          const float y = ex2_approx_ftz(__fsub_rn(s[block][rows][2 * half + 1], m[rows][1]));
          l[rows][0] += x;
          l[rows][1] += y;
          const float by = Build::page_scales ? v_scales[block][half] : 1.0f;
          weights[block][rows][half] = movmatrix_trans(cvt_rn_x2<BF16_OPERANDS>(x * by, y * by));
        }
  }

  // Stores the state to shared memory, where the CTA's warps merge. Values are multiplied by
  // `v_scale`, those of a second KV head by its own scale.
  DEVICE void store(float *scratch, float2 *logs, int warp, int lane, float v_scale,
                    float second_v_scale) const {
    // Columns of a lane's rows of O^T, in the order of `values_of`.
    constexpr int LANE_COLUMNS = Build::kv_dtype == 0 ? 1 : 2,
                  SECOND = Build::kv_dtype == 0 ? 8 : 1;
    if constexpr (Build::page_scales) v_scale *= unit;
    const int pair = lane % 4 * 2;
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = rows * BLOCK_ROWS + pair + j;
        float scale = rows < HEAD_BLOCKS ? v_scale : second_v_scale;
        const float sum = sum_of_lanes<4, 32>(l[rows][j]);
        // The scales of an empty sequence can be NaN.
        if (Build::kv_dtype != 0 && sum == 0.0f) scale = 0.0f;
        if (lane < 4 && in_block(pair + j))
          logs[warp * Build::rows + row] = make_float2(m[rows][j], sum);
        if (row < ROW_COUNT && in_block(pair + j))
#pragma unroll
          for (int step = 0; step < V_STEPS; step++) {
            float *to = scratch + warp * SCRATCH_WARP + row * SCRATCH_ROW + step * 16 +
                        lane / 4 * LANE_COLUMNS;
            to[0] = o[step][rows][j] * scale;
            if (step * 16 + 8 < Build::v_head_dim) to[SECOND] = o[step][rows][j + 2] * scale;
          }
      }
  }
};

// Returns the address for ldmatrix within a stage: 32 bytes of 16 tokens each. The number of a
// 16-byte piece is XORed with the row (swizzle). `odd`: SHIFTED_ROWS: the row begins in the middle
// of a column.
DEVICE u32 load_address(u32 lane_at, int load, int block, u32 odd) {
  constexpr int COLUMN_LOADS = Build::column_bytes / 32;
  if constexpr (SHIFTED_ROWS) {
    lane_at ^= odd << 6;
    if (load % COLUMN_LOADS >= 2) lane_at += odd * (Build::chunk * Build::column_bytes);
  }
  if constexpr (Build::whole_rows) return lane_at + 32 * load + block * (16 * Build::column_bytes);
  return (lane_at ^ (load % COLUMN_LOADS << 5)) +
         load / COLUMN_LOADS * (Build::chunk * Build::column_bytes) +
         block * (16 * Build::column_bytes);
}

DEVICE u32 k_address(u32 stage, int lane, int load, int block, u32 odd) {
  const u32 k_lane =
      (lane & 15) * Build::column_bytes + (((lane >> 4) ^ swizzle_of(lane & 7)) << 4);
  return load_address(stage + k_lane, load, block, odd);
}

DEVICE u32 v_address(u32 stage, int lane, int load, int block, u32 odd) {
  const u32 v_lane = V_AT + ((lane & 7) + (lane >> 4 << 3)) * Build::column_bytes +
                     ((((lane >> 3) & 1) ^ swizzle_of(lane & 7)) << 4);
  return load_address(stage + v_lane, load, block, odd);
}

// Computes S^T = scale K Q^T of a chunk.
DEVICE void compute_scores(float (&s)[TOKEN_BLOCKS][ROW_BLOCKS][4], const Params &p,
                           const Query &query, u32 stage, u32 page_scales, int lane, u32 odd) {
  // Two sums in turn reduce dependencies between instructions.
  constexpr int CHAINS = TOKEN_BLOCKS * ROW_BLOCKS == 1 ? 2 : 1;
  float chains[CHAINS][TOKEN_BLOCKS][ROW_BLOCKS][4];
#pragma unroll
  for (int chain = 0; chain < CHAINS; chain++)
#pragma unroll
    for (int block = 0; block < TOKEN_BLOCKS; block++)
#pragma unroll
      for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
        for (int i = 0; i < 4; i++) chains[chain][block][rows][i] = 0.0f;
#pragma unroll
  for (int load = 0; load < K_LOADS; load++) {
    u32 columns[LOAD_STEPS][ROW_BLOCKS][2];
#pragma unroll
    for (int half = 0; half < LOAD_STEPS; half++)
#pragma unroll
      for (int rows = 0; rows < ROW_BLOCKS; rows++)
        if (load * LOAD_STEPS + half < K_STEPS)
          query.fragment(columns[half][rows], load * LOAD_STEPS + half, rows);
#pragma unroll
    for (int block = 0; block < TOKEN_BLOCKS; block++) {
#pragma unroll
      for (int head = 0; head < Build::heads_of_row; head++) {
        u32 loaded[4];
        ldmatrix_x4(loaded, k_address(stage, lane, head * K_LOADS + load, block, odd));
#pragma unroll
        for (int half = 0; half < LOAD_STEPS; half++) {
          const int step = load * LOAD_STEPS + half;
          if (step >= K_STEPS) break;
          u32 k[4];
          keys_of(k, loaded, half);
#pragma unroll
          for (int rows = head * HEAD_BLOCKS; rows < (head + 1) * HEAD_BLOCKS; rows++)
            mma_m16n8k16(chains[step % CHAINS][block][rows], k, columns[half][rows][0],
                         columns[half][rows][1]);
        }
      }
    }
  }
  float k_scales[TOKEN_BLOCKS][2];
  if constexpr (Build::page_scales) load_scales(k_scales, page_scales, lane);
#pragma unroll
  for (int block = 0; block < TOKEN_BLOCKS; block++)
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float scale = query.scale(p, rows, i % 2);
        if constexpr (Build::page_scales) scale *= k_scales[block][i / 2];
        s[block][rows][i] = chains[0][block][rows][i] * scale;
        if constexpr (CHAINS > 1) s[block][rows][i] += chains[CHAINS - 1][block][rows][i] * scale;
      }
}

// The query token of the lane's row `j` of a block, and a token of the lane in the chunk.
DEVICE int query_of(const Query &query, int rows, int j, int lane) {
  return (query.row_offset + rows * BLOCK_ROWS + lane % 4 * 2 + j) / Build::group_size;
}

// Soft cap. The scores arrive multiplied by 2 log2(e) / softcap, so that 2^s is e^2x of tanh(x) = 1
// - 2 / (1 + e^2x). ex2 and rcp are accurate to some 2^-22, tanh.approx only to 2^-11, which is too
// coarse for a cap of 50.
DEVICE void cap_scores(float (&s)[TOKEN_BLOCKS][ROW_BLOCKS][4], float softcap) {
#pragma unroll
  for (int block = 0; block < TOKEN_BLOCKS; block++)
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        s[block][rows][i] =
            softcap - 2.0f * softcap * rcp_approx_ftz(1.0f + ex2_approx_ftz(s[block][rows][i]));
}

// ALiBi: scores decrease by the head's slope per token of distance from the query token.
DEVICE void slope_scores(float (&s)[TOKEN_BLOCKS][ROW_BLOCKS][4], const Query &query,
                         const Position &part, int token, int lane) {
  // Relative to the first query token; exact below 2^24.
  const float ahead = __int2float_rz(token + lane / 4 - (part.tokens - part.queries.count));
#pragma unroll
  for (int block = 0; block < TOKEN_BLOCKS; block++)
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float own =
            Build::q_len == 1 ? 0.0f : __int2float_rz(query_of(query, rows, i % 2, lane));
        const float distance = fabsf(ahead + (block * 16 + i / 2 * 8) - own);
        s[block][rows][i] -= query.slopes[rows][i % 2] * (distance * LOG2_E);
      }
}

// Masks the tokens that a row does not see: before the sequence or past its end, outside the
// window, or past its query token (the causal tail).
DEVICE void mask_scores(float (&s)[TOKEN_BLOCKS][ROW_BLOCKS][4], const Params &p,
                        const Query &query, const Position &part, int token, int lane) {
#pragma unroll
  for (int block = 0; block < TOKEN_BLOCKS; block++)
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = token + block * 16 + lane / 4 + i / 2 * 8;
        const int own = part.tokens - part.queries.count + query_of(query, rows, i % 2, lane);
        const int seen = own + 1 + Build::window_right * p.window_right;
        int end = Build::q_len == 1 ? part.tokens : min(part.tokens, seen);
        int first = Build::window_left ? max(part.leftpad, own - p.window_left) : part.leftpad;
        if constexpr (Build::attention_chunk) {
          const int chunk = chunk_start(p, part.leftpad, own);
          first = max(first, chunk), end = min(end, chunk + p.attention_chunk);
        }
        if (at >= end || (MASKED_STARTS && at < first)) s[block][rows][i] = -INFINITE;
      }
}

// Zeroes the values of a stage before token `first` and from token `end` on. The cache around the
// sequence can contain NaN, which a weight of 0 does not remove.
DEVICE void zero_values(u32 stage, int first, int end, int lane) {
  const auto outside = [=](int row) {
    return row >= end || (Build::start_step > 1 && MASKED_STARTS && row < first);
  };
  const u32 lane_at = stage + V_AT + 16 * lane;  // 16 bytes per lane
  if constexpr (Build::whole_rows) {
#pragma unroll
    for (int piece = 0; piece < Build::chunk * COLUMN_PIECES; piece += 32)
      if (outside((piece + lane) / COLUMN_PIECES)) st_shared_v4(lane_at + 16 * piece, 0);
  } else {
    constexpr int ROWS_AT_ONCE = 32 / COLUMN_PIECES;
#pragma unroll
    for (int row = 0; row < Build::chunk; row += ROWS_AT_ONCE)
      if (outside(row + lane / COLUMN_PIECES)) {
#pragma unroll
        for (int column = 0; column < V_COLUMNS; column++)
          st_shared_v4(lane_at + (column * Build::chunk + row) * Build::column_bytes, 0);
      }
  }
  if constexpr (Build::bulk) fence_proxy_async_shared_cta();
  __syncwarp();
}

// Attends to the part's next chunk, after its arrival. Build::page_scales: its pages' scales are at
// `page_scales`.
DEVICE void attend_chunk(State &state, const Params &p, const Query &query, u32 stage,
                         u32 page_scales, const Position &part, int lane) {
  const int token = part.token + part.chunk * Build::chunk, tokens = part.tokens;
  // Masking starts at the first token that some row of the output tile does not see.
  const int first_query = Build::q_len > 0 ? 0 : query.row_offset / Build::group_size;
  bool masked = token + Build::chunk > tokens - (part.queries.count - 1) + first_query;
  if constexpr (MASKED_STARTS)
    masked |= token < part.first_seen(p, query.row_offset + Build::rows - 1);
  if (masked) zero_values(stage, part.first_seen(p, 0) - token, tokens - token, lane);
  float s[TOKEN_BLOCKS][ROW_BLOCKS][4];
  const u32 odd = SHIFTED_ROWS ? part.head_tile().kv_head % 2 : 0;
  compute_scores(s, p, query, stage, page_scales, lane, odd);
  // The first values wait in registers while the weights are computed.
  u32 early[EARLY_LOADS > 0 ? Build::heads_of_row * EARLY_LOADS : 1][4];
#pragma unroll
  for (int load = 0; load < Build::heads_of_row * EARLY_LOADS; load++)
    ldmatrix_x4_trans(early[load], v_address(stage, lane, load, 0, odd));
  if constexpr (Build::softcap) cap_scores(s, p.softcap);
  if constexpr (Build::alibi) slope_scores(s, query, part, token, lane);
  if (masked) mask_scores(s, p, query, part, token, lane);
  if constexpr (Build::page_scales) state.take_scales(page_scales, lane);
  state.rescale(s);
  u32 weights[TOKEN_BLOCKS][ROW_BLOCKS][2];
  state.weigh(s, weights);
#pragma unroll
  for (int block = 0; block < TOKEN_BLOCKS; block++)
#pragma unroll
    for (int load = 0; load < Build::heads_of_row * V_LOADS; load++) {
      const int head = load / V_LOADS;
      u32 loaded[4];
      if (block == 0 && load < Build::heads_of_row * EARLY_LOADS) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          loaded[i] = early[load < Build::heads_of_row * EARLY_LOADS ? load : 0][i];
      } else {
        ldmatrix_x4_trans(loaded, v_address(stage, lane, load, block, odd));
      }
#pragma unroll
      for (int half = 0; half < LOAD_STEPS; half++) {
        const int step = load % V_LOADS * LOAD_STEPS + half;
        if (step >= V_STEPS) break;
        u32 v[4];
        values_of(v, loaded, half);
#pragma unroll
        for (int rows = head * HEAD_BLOCKS; rows < (head + 1) * HEAD_BLOCKS; rows++)
          mma_m16n8k16(state.o[step][rows], v, weights[block][rows][0], weights[block][rows][1]);
      }
    }
}
