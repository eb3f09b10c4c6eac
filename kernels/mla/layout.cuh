// What a CTA of mla.cu is made of: its threads' roles, its shared memory, its barriers.
//
// A CTA has 64 rows (a row: a query head at a query position) of an output tile: Q, two stages of 64
// tokens of the latent cache, the weights of one stage. Warpgroup 0 has scores, softmax and columns 0
// to 255 of the output, warpgroup 1 columns 256 to 511; one more warp copies.
//
// Macros are those of lean/build.cuh, as its schedule is shared: ROWS is 64 x CLUSTER, CHUNK 64. And
//   CAUSAL         1: query token i of Q_LEN sees all but the last Q_LEN - 1 - i tokens
#pragma once
#include "lean/params.cuh"

constexpr int ALL_ROWS = all_rows(Q_LEN), ROW_TILES = row_tiles(Q_LEN);
constexpr int LATENT = 576;        // numbers of a token: K
constexpr int VALUES = 512;        // the first of them: V
constexpr int TILE = 64;           // rows of a CTA, and tokens of a stage
constexpr int COLUMN = 128 * TILE; // bytes of 64 columns of either
constexpr int QUERY_COLUMNS = LATENT / 64;
// Of 64 numbers of a token: those that warpgroup 0 is the last to read (its half of V, and what K has
// more), and those that warpgroup 1 is.
constexpr int RIGHT_COLUMNS = VALUES / 128;
constexpr int LEFT_COLUMNS = QUERY_COLUMNS - RIGHT_COLUMNS;
constexpr int LATENT_STAGES = 2;
constexpr int LATENT_STAGE = QUERY_COLUMNS * COLUMN;
constexpr int CONSUMERS = 256;  // threads of both warpgroups
constexpr int COPY_WARP = CONSUMERS / 32;
static_assert(Q_LEN > 0 && ROWS == TILE * CLUSTER && CHUNK == TILE && WARPS == COPY_WARP + 4);
// Of a thread: what its warpgroup's accumulators leave the others.
constexpr int COPY_REGISTERS = 24, CONSUMER_REGISTERS = 240;

// A partial in the workspace: the accumulators as threads hold them, two at a time; the (m, l) of
// its rows; and the epoch of the launch that stored it.
constexpr int UNITS = VALUES / 2 * TILE / CONSUMERS;  // float2 of a thread
constexpr int WEIGHTS_AT = 2 * UNITS * CONSUMERS;     // in numbers of 32 bits
constexpr int EPOCH_AT = WEIGHTS_AT + 2 * TILE;
constexpr int PARTIAL = EPOCH_AT + 32;
static_assert(4 * PARTIAL == PARTIAL_BYTES, "PARTIAL differs from MlaBuild.partial_bytes");

constexpr int STAGES_AT = QUERY_COLUMNS * COLUMN;
constexpr int PROBABILITIES_AT = STAGES_AT + LATENT_STAGES * LATENT_STAGE;
constexpr int SCALES_AT = PROBABILITIES_AT + COLUMN;  // of the output's rows, before this stage
constexpr int SUMS_AT = SCALES_AT + 4 * TILE;     // 1 / l of the rows, twice
constexpr int SHARES_AT = SUMS_AT + 8 * TILE;         // of two partials in their sum
constexpr int RESCALES_AT = SHARES_AT + 8 * TILE;   // whether a warp's rows are scaled
constexpr int BARRIERS = RESCALES_AT + 16;
static_assert(BARRIERS + 8 * 12 <= SHARED_BYTES, "MlaBuild.shared_bytes is too small");

// Each pair: the stage's first and second.
constexpr int QUERY_FULL = BARRIERS, QUERY_EMPTY = BARRIERS + 8;
constexpr int LEFT_FULL = BARRIERS + 16, LEFT_EMPTY = BARRIERS + 32;
constexpr int RIGHT_FULL = BARRIERS + 48, RIGHT_EMPTY = BARRIERS + 64;
constexpr int WEIGHTS_FULL = BARRIERS + 80, WEIGHTS_EMPTY = BARRIERS + 88;

// Named barriers.
constexpr int OF_SCORES = 1, OF_CONSUMERS = 2;

// Where a CTA is in the ring of stages.
struct Stage {
  int filled;  // stages before this one

  __device__ __forceinline__ int index() const { return filled % LATENT_STAGES; }
  __device__ __forceinline__ int parity() const { return filled / LATENT_STAGES % 2; }
  __device__ __forceinline__ int at() const { return STAGES_AT + index() * LATENT_STAGE; }
};

// The columns in the order in which they are copied and read: the left ones first.
__device__ __forceinline__ constexpr int column_in_turn(int i) {
  return i < VALUES / 128 ? i : i == VALUES / 128 ? QUERY_COLUMNS - 1 : i - 1;
}

// The output row that a thread's accumulators 0 and 1 are of; 2 and 3 are 8 rows further.
__device__ __forceinline__ int own_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
