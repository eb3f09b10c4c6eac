// What a CTA of mla.cu is made of: its threads' roles, its shared memory, its barriers.
//
// A CTA has 64 rows (a row: a query head at a query position) of an output tile, Q, and two stages of
// 64 tokens of the latent cache. Tokens of the first stage are warpgroup 0's, those of the second
// warpgroup 1's: each computes scores and weights of its own, and hands the weights to the other one.
// Of the CTA's columns of the output, warpgroup 0 has the first half, warpgroup 1 the second. One more
// warp copies.
//
// Macros are those of lean/build.cuh, as its schedule is shared: ROWS is 64 x CLUSTER, CHUNK 64. And
//   COLUMN_GROUPS  1, 2 or 4: CTAs that have the same rows and tokens, and of the output a share of
//                  the columns each
//   ONE_ROUND      splits that are merged in one round where there are several column groups
//   CAUSAL         1: query token i of Q_LEN sees all but the last Q_LEN - 1 - i tokens
//
// A cache in 8 bits (KV_DTYPE) is copied as it is. The stage's warpgroup makes operands in fp16 of it,
// in the place where a cache in 16 bits is copied to: see bytes.cuh.
#pragma once
#include "lean/params.cuh"

constexpr int ALL_ROWS = all_rows(Q_LEN), ROW_TILES = row_tiles(Q_LEN);
constexpr int LATENT = 576;        // numbers of a token: K
constexpr int VALUES = 512;        // the first of them: V
constexpr int OWN_VALUES = VALUES / COLUMN_GROUPS;  // columns of a CTA's output
constexpr int TILE = 64;           // rows of a CTA, and tokens of a stage
constexpr int COLUMN = 128 * TILE; // bytes of 64 columns of either
constexpr int QUERY_COLUMNS = LATENT / 64;
constexpr int HALF_COLUMNS = VALUES / 128;        // of V, half of them
constexpr int OWN_COLUMNS = OWN_VALUES / 128;     // of V, a warpgroup's
constexpr int ACCUMULATORS = OWN_VALUES / 4;      // of a thread
constexpr int OTHER_COLUMN = QUERY_COLUMNS - 1;   // what K has more than V
constexpr int LATENT_STAGES = 2;
constexpr int LATENT_STAGE = QUERY_COLUMNS * COLUMN;
constexpr int CONSUMERS = 256;  // threads of both warpgroups
constexpr int COPY_WARP = CONSUMERS / 32;
static_assert(Q_LEN > 0 && ROWS == TILE * CLUSTER && CHUNK == TILE && WARPS == COPY_WARP + 4);
// Of a thread: what its warpgroup's accumulators leave the others. The copying warp spills with 24, in
// every copy (H200, entry 54 of the performance log).
constexpr int COPY_REGISTERS = 40, CONSUMER_REGISTERS = 232;

// A partial in the workspace: the accumulators as threads hold them, two at a time; the (m, l) of
// its rows; and the epoch of the launch that stored it.
constexpr int UNITS = ACCUMULATORS / 2;               // float2 of a thread
constexpr int WEIGHTS_AT = 2 * UNITS * CONSUMERS;     // in numbers of 32 bits
constexpr int EPOCH_AT = WEIGHTS_AT + 2 * TILE;
constexpr int PARTIAL = EPOCH_AT + 32;
static_assert(4 * PARTIAL == PARTIAL_BYTES, "PARTIAL differs from MlaBuild.partial_bytes");

constexpr int STAGES_AT = QUERY_COLUMNS * COLUMN;
#if KV_DTYPE != 0
// The bytes of a stage come in runs of 192 columns, to the places of its own warpgroup's values and the
// so many bytes before them.
constexpr int RUN_COLUMNS = 3, RUN_ROW = 64 * RUN_COLUMNS, RUN = TILE * RUN_ROW;
constexpr int RUNS = QUERY_COLUMNS / RUN_COLUMNS;
constexpr int BEFORE_STAGE = RUNS * RUN - HALF_COLUMNS * COLUMN;
constexpr int STAGE_STEP = BEFORE_STAGE + LATENT_STAGE, STAGE_COPIES = RUNS;
#else
#define BEFORE_STAGE 0
#define STAGE_STEP LATENT_STAGE
#define STAGE_COPIES QUERY_COLUMNS
#endif
// Of each stage's tokens: the maximum of each row so far, and what it scales what was summed before by.
constexpr int MAXIMA_AT = STAGES_AT + LATENT_STAGES * STAGE_STEP;
constexpr int SUMS_AT = MAXIMA_AT + 2 * 8 * TILE;  // l of the rows, of each warpgroup; twice
constexpr int SHARES_AT = SUMS_AT + 4 * 4 * TILE;  // of two partials in their sum
#if KV_DTYPE != 0
constexpr int ROW_UNITS_AT = SHARES_AT + 8 * TILE;  // what rows of Q are divided by
constexpr int BARRIERS = ROW_UNITS_AT + 4 * TILE;
#else
constexpr int BARRIERS = SHARES_AT + 8 * TILE;
#endif
constexpr int FULL = BARRIERS;                                        // of each copy of each stage
constexpr int EMPTY = FULL + 8 * LATENT_STAGES * STAGE_COPIES;        // of each warpgroup's columns
constexpr int WEIGHTS_FULL = EMPTY + 8 * LATENT_STAGES * 2;           // of each stage
constexpr int QUERY_FULL = WEIGHTS_FULL + 8 * LATENT_STAGES, QUERY_EMPTY = QUERY_FULL + 8;
static_assert(QUERY_EMPTY + 8 <= SHARED_BYTES, "MlaBuild.shared_bytes is too small");

// Named barriers: of a warpgroup, and of both.
constexpr int OF_WARPGROUP = 1, OF_CONSUMERS = 3;

// Stages in shared memory, and how often each has been filled.
template <int STAGE>
constexpr int STAGE_AT = STAGES_AT + BEFORE_STAGE + STAGE * STAGE_STEP;

// Weights take the place of the column that only scores need.
template <int STAGE>
constexpr int WEIGHTS_AT_STAGE = STAGE_AT<STAGE> + OTHER_COLUMN * COLUMN;

// A CTA's rows and columns: an output tile's head is its columns x row tiles + its row tile.
__device__ __forceinline__ int row_tile_of(int head) {
  return COLUMN_GROUPS == 1 ? head : head % ROW_TILES;
}
__device__ __forceinline__ int column_group_of(int head) {
  return COLUMN_GROUPS == 1 ? 0 : head / ROW_TILES;
}

// The columns of a stage in the order in which they are copied and read: those whose values its own
// warpgroup uses, which are free first, and last the one where the weights were.
__device__ __forceinline__ constexpr int column_in_turn(int stage, int i) {
  return i < HALF_COLUMNS       ? stage * HALF_COLUMNS + i
         : i < 2 * HALF_COLUMNS ? (1 - stage) * HALF_COLUMNS + i - HALF_COLUMNS
                                : OTHER_COLUMN;
}

// Where a column lies in its stage, in columns; KV_DTYPE: those of its own warpgroup's values first.
__device__ __forceinline__ constexpr int place_of(int stage, int column) {
  return KV_DTYPE != 0 && stage == 1 && column < OTHER_COLUMN ? column ^ HALF_COLUMNS : column;
}

// Where a warpgroup's columns of V begin in a stage.
__device__ __forceinline__ int values_at(int stage, int group, int half) {
  return place_of(stage, (group * 2 + half) * OWN_COLUMNS) * COLUMN;
}
static_assert(KV_DTYPE == 0 || COLUMN_GROUPS == 1, "a stage of bytes has all columns");

#if KV_DTYPE != 0
// The runs of a stage in the order in which they are copied and become operands, and where they lie
// until then, before the stage's own values and in their place: no operand is stored over bytes of a
// run that comes after its own. The first run has no columns of the own warpgroup's.
__device__ __forceinline__ constexpr int run_in_turn(int stage, int turn) {
  return stage == 0 ? RUNS - 1 - turn : 2 * turn % RUNS;
}

__device__ __forceinline__ constexpr int run_at(int turn) {
  return (RUNS - 1 - turn) * RUN - BEFORE_STAGE;
}
#endif

// The barrier of a stage's column, or run.
__device__ __forceinline__ constexpr int full_at(int stage, int copy) {
  return FULL + 8 * (stage * STAGE_COPIES + copy);
}

// The barrier at which warpgroup `half` says that it has used its columns of a stage.
__device__ __forceinline__ constexpr int empty_at(int stage, int half) {
  return EMPTY + 8 * (2 * stage + half);
}

// The output row that a thread's accumulators 0 and 1 are of; 2 and 3 are 8 rows further.
__device__ __forceinline__ int own_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
