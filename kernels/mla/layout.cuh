// Layout of a CTA of mla.cu: roles of threads, shared memory, barriers.
//
// A CTA has 64 rows (a row: a query head at a query position) of an output tile, Q, and two stages
// of 64 tokens of the latent cache. Tokens of the first stage belong to warpgroup 0, those of the
// second to warpgroup 1. Each warpgroup computes scores and weights of its tokens and passes the
// weights to the other. Warpgroup 0 has the first half of the CTA's output columns, warpgroup 1 the
// second. One more warp copies, or a warpgroup (GATHERS).
//
// The build is that of lean/build.cuh, because the schedule is shared: Build::rows is 64 x
// Build::cluster, Build::chunk 64.
//
// A cache in 8 bits (Build::kv_dtype) is copied unchanged. The stage's warpgroup converts it to
// operands in fp16, in the memory to which a cache in 16 bits would be copied: see bytes.cuh.
// Build::row_scales: in bf16, see row_scales.cuh.
#pragma once
#include "lean/params.cuh"
#include "lean/schedule.cuh"

constexpr int ALL_ROWS = all_rows(Build::q_len), ROW_TILES = row_tiles(Build::q_len);
constexpr int LATENT = Build::head_dim;    // numbers of a token: K
constexpr int VALUES = Build::v_head_dim;  // the first of them: V
constexpr int TILE = 64;                   // rows of a CTA, and tokens of a stage
constexpr int COLUMN = 128 * TILE;         // bytes of 64 columns of either
// In the last column K has numbers that V has not, up to 64: the others are zeros.
constexpr int QUERY_COLUMNS = VALUES / 64 + 1;
constexpr int HALF_COLUMNS = VALUES / 128;  // columns of half of V
// True if the lengths decide whether there are column groups.
constexpr bool CHOOSES_GROUPS = Build::ragged && Build::column_groups > 1;
constexpr int FEWEST_GROUPS = CHOOSES_GROUPS ? 1 : Build::column_groups;
constexpr int OTHER_COLUMN = QUERY_COLUMNS - 1;  // the column that is not part of V
constexpr int LATENT_STAGES = 2;
constexpr int LATENT_STAGE = QUERY_COLUMNS * COLUMN;
// True if a stage's tokens can have several pages: rows are copied one by one; see gather.cuh.
constexpr bool GATHERS = Build::page % TILE != 0;
static_assert(!GATHERS || Build::cluster == 1, "only bulk copies go to several CTAs");
static_assert(VALUES <= LATENT && LATENT <= VALUES + 64 && VALUES >= 128 * Build::column_groups);
static_assert(!Build::row_scales ||
                  (GATHERS && Build::bf16 && Build::kv_dtype == 0 && Build::column_groups == 1),
              "rows with scales are copied by lanes");
constexpr int CONSUMERS = 256;  // threads of both warpgroups
constexpr int COPY_WARP = CONSUMERS / 32;
static_assert(Build::q_len > 0 && Build::rows == TILE * Build::cluster && Build::chunk == TILE &&
              Build::warps == COPY_WARP + 4);
// Registers per thread: computing warpgroups get the remainder of the copying warp's. With 24, the
// copying warp spills in every copy (H200; reports/performance-log.md, entry 54).
// Rows of 16-bit numbers copied by lanes need more, and those of 8 bits leave none for them.
constexpr int COPY_REGISTERS = GATHERS && Build::kv_dtype == 0 ? 56 : 40;
constexpr int CONSUMER_REGISTERS = GATHERS && Build::kv_dtype == 0 ? 224 : 232;

// A partial in the workspace: the accumulators as held by threads in fp16, four at a time; m, l and
// the units of both warpgroups' columns of its rows; and the epoch of the launch that stored it.
constexpr int WEIGHTS_AT = VALUES / FEWEST_GROUPS / 8 * CONSUMERS;  // in numbers of 32 bits
constexpr int EPOCH_AT = WEIGHTS_AT + 4 * TILE;
constexpr int PARTIAL = EPOCH_AT + 32;
static_assert(4 * PARTIAL == Build::partial_bytes, "PARTIAL differs from MlaBuild.partial_bytes");

constexpr int STAGES_AT = QUERY_COLUMNS * COLUMN;
// Build::kv_dtype: the bytes of a stage arrive in runs of 192 columns. They occupy the memory of
// its own warpgroup's values and the BEFORE_STAGE bytes before them.
constexpr bool HAS_BYTES = Build::kv_dtype != 0;
constexpr int RUN_COLUMNS = 3, RUN_ROW = 64 * RUN_COLUMNS, RUN = TILE * RUN_ROW;
constexpr int RUNS = QUERY_COLUMNS / RUN_COLUMNS;
constexpr int BEFORE_STAGE = HAS_BYTES ? RUNS * RUN - HALF_COLUMNS * COLUMN : 0;
constexpr int STAGE_STEP = BEFORE_STAGE + LATENT_STAGE;
constexpr int STAGE_COPIES = HAS_BYTES ? RUNS : QUERY_COLUMNS;
// For each stage's tokens: the maximum of each row so far, and the scale of earlier sums.
constexpr int MAXIMA_AT = STAGES_AT + LATENT_STAGES * STAGE_STEP;
constexpr int SUMS_AT = MAXIMA_AT + 2 * 8 * TILE;  // l of the rows, per warpgroup; double-buffered
constexpr int WAITING_AT = SUMS_AT + 4 * 4 * TILE, WAITING_BYTES = 8 * TILE;  // see `Waiting`
// The end of a merge has the weights of all splits up to here: of a split for each SM of a Hopper
// GPU, by warpgroup.
constexpr int MOST_SPLITS = 144;
static_assert(8 * TILE * MOST_SPLITS <= MAXIMA_AT);
// Weights of two partials in their sum, after the last stage.
constexpr int SHARES_AT = MAXIMA_AT;
constexpr int ROW_UNITS_AT = WAITING_AT + WAITING_BYTES;  // HAS_BYTES: divisors of rows of Q
// Build::row_scales: of both stages.
constexpr int ROW_SCALES_AT = ROW_UNITS_AT + HAS_BYTES * 4 * TILE;
constexpr int SCALES_OF_ROW = VALUES / 128 * 4;
constexpr int BARRIERS = ROW_SCALES_AT + Build::row_scales * LATENT_STAGES * TILE * SCALES_OF_ROW;
constexpr int FULL = BARRIERS;                                  // of each copy of each stage
constexpr int EMPTY = FULL + 8 * LATENT_STAGES * STAGE_COPIES;  // of each warpgroup's columns
constexpr int WEIGHTS_FULL = EMPTY + 8 * LATENT_STAGES * 2;     // of each stage
constexpr int QUERY_FULL = WEIGHTS_FULL + 8 * LATENT_STAGES, QUERY_EMPTY = QUERY_FULL + 8;
static_assert(QUERY_EMPTY + 8 <= Build::shared_bytes, "MlaBuild.shared_bytes is too small");

// Named barriers: of a warpgroup, and of both.
constexpr int OF_WARPGROUP = 1, OF_CONSUMERS = 3;

// Stages in shared memory, and the number of times that each has been filled.
template <int STAGE>
constexpr int STAGE_AT = STAGES_AT + BEFORE_STAGE + STAGE *STAGE_STEP;

// Weights overwrite the column that only scores need.
template <int STAGE>
constexpr int WEIGHTS_AT_STAGE = STAGE_AT<STAGE> + OTHER_COLUMN *COLUMN;

// Columns of a stage in the order of copies and reads: first those with values of its own
// warpgroup, which become free first; last the one overwritten by the weights.
DEVICE constexpr int column_in_turn(int stage, int i) {
  return i < HALF_COLUMNS       ? stage * HALF_COLUMNS + i
         : i < 2 * HALF_COLUMNS ? (1 - stage) * HALF_COLUMNS + i - HALF_COLUMNS
                                : OTHER_COLUMN;
}

// Returns the position of a column in its stage, in columns; Build::kv_dtype: the values of its own
// warpgroup come first.
DEVICE constexpr int place_of(int stage, int column) {
  return Build::kv_dtype != 0 && stage == 1 && column < OTHER_COLUMN ? column ^ HALF_COLUMNS
                                                                     : column;
}

// Returns the CTA's group of GROUPS.
template <int GROUPS>
DEVICE int group_of_cta() {
  return blockIdx.x / Build::cluster % GROUPS;
}

// The columns of a CTA's output, which GROUPS CTAs share.
template <int GROUPS>
struct OwnColumns {
  static constexpr int SHARERS = GROUPS;
  static constexpr int COUNT = VALUES / GROUPS, UNITS = COUNT / 8;  // float2 of a thread
  static constexpr int BLOCKS = UNITS / 2;  // of two columns in both of a thread's rows

  // Place in a stage's order of columns of the first that waits for the other warpgroup.
  static constexpr int FIRST_OF_OTHER = GROUPS > 1 ? 0 : HALF_COLUMNS;

  // Returns the column of a thread's accumulator pair `unit`, in row own_row() + 8 * (unit % 2).
  DEVICE static int of_unit(int unit) {
    return group_of_cta<GROUPS>() * COUNT + threadIdx.x / 128 * (COUNT / 2) + unit / 2 * 8 +
           threadIdx.x % 4 * 2;
  }
};

// Calls `run` with the columns of a work range's CTAs. One group comes first: the code of the
// second branch is 1 to 4 us slower, whichever it is (H200; reports/performance-log.md, entry 79).
template <class Run>
DEVICE void with_columns_of(const WorkRange &range, const Run &run) {
  if constexpr (CHOOSES_GROUPS)
    if (!range.grouped) return run(OwnColumns<1>());
  run(OwnColumns<Build::column_groups>());
}

// Returns the start of a warpgroup's columns of V in a stage.
template <int GROUPS>
DEVICE int values_at(int stage, int half) {
  return place_of(stage, (group_of_cta<GROUPS>() * 2 + half) * (VALUES / GROUPS / 128)) * COLUMN;
}
static_assert(!HAS_BYTES || (Build::column_groups == 1 && VALUES == 512),
              "a stage of bytes has all columns, and whole runs");

// Runs of a stage in the order of copies and conversions, and their positions until then: in the
// memory of the stage's own values and before it. Operands never overwrite bytes of a later run.
// The first run has no columns of the stage's own warpgroup.
DEVICE constexpr int run_in_turn(int stage, int turn) {
  return stage == 0 ? RUNS - 1 - turn : 2 * turn % RUNS;
}

DEVICE constexpr int run_at(int turn) { return (RUNS - 1 - turn) * RUN - BEFORE_STAGE; }

// Returns the barrier of a stage's column, or run.
DEVICE constexpr int full_at(int stage, int copy) {
  return FULL + 8 * (stage * STAGE_COPIES + copy);
}

// Returns the barrier at which warpgroup `half` releases its columns of a stage.
DEVICE constexpr int empty_at(int stage, int half) { return EMPTY + 8 * (2 * stage + half); }

// Returns the output row in a thread's accumulators 0 and 1; 2 and 3 are 8 rows further.
DEVICE int own_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
