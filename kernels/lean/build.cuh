// Parameters of a build of lean.cu: its macros, and the constants that follow from them.
//
//   HEAD_DIM       of Q and K: a multiple of 8 up to 256, 512 or 576
//   V_HEAD_DIM     of V and the output: a multiple of 8 up to 256, or 512
//   BF16           of the output, 1: bf16, 0: fp16
//   KV_DTYPE       of K and V, 0: as Q, 1: e4m3, 2: e5m2; in 8 bits head_dims are multiples of 16
//   Q_DTYPE        of Q, 0: as the output, 1: e4m3, 2: e5m2, if KV_DTYPE is not 0
//   GROUP_SIZE     query heads that share a KV head
//   Q_LEN          query tokens of a sequence; row r of an output tile is query token
//                  r / GROUP_SIZE. 0: a parameter of the launch
//   RAGGED_Q       1: query tokens of each sequence are in cu_seqlens_q (Q_LEN is 0, RAGGED 1)
//   ROWS           rows of an output tile, padded: 8, 16 or 32
//   CHUNK          tokens that a warp processes at a time: a multiple of 16
//   WARPS, STAGES  warps of a CTA; chunks in flight per warp
//   CTAS_PER_SM    limits the registers of a thread
//   CLUSTER        CTAs that share a work range; above 1 their partials meet in distributed shared
//                  memory
//   BULK           1: bulk tensor copies on mbarriers (compute capability 9.0), 0: 16-byte cp.async
//                  (8.0), required by pages that are not multiples of 16 tokens
//   RAGGED         1: lengths are read from cache_seqlens
//   FIXED_RUNS     1: splits follow from a sequence's own length
//   EQUAL_SPLITS   1: the grid sets the number of equal splits of every output tile. A CTA or a
//                  cluster computes a split (FlashDecoding; one split: FlashAttention-2).
//                  (RAGGED_Q, FIXED_RUNS and PEERS are 0)
//   PAGE           tokens of a page, 0: contiguous cache
//   WINDOW_LEFT    1: a query token sees at most `window_left` tokens before its own
//   WINDOW_RIGHT   1: it sees `window_right` tokens past its own, 0: none (causal)
//   ATTENTION_CHUNK  1: it sees only its own chunk of the sequence (WINDOW_LEFT is 1)
//   SOFTCAP        1: scores are capped: softcap x tanh(score / softcap)
//   ALIBI          1: scores decrease with the distance by a slope of the head
//   SINKS          a logit of the head without a value, as 1: fp32, 2: fp16, 3: bf16; 0: none
//   PRIOR          1: `prior` has the results of other tokens, which outputs and LSEs include; the
//                  first `prior_tokens` of a length on the device are among these
//   LEFTPAD        1: sequences start at cache_leftpad in their caches (RAGGED is 1)
//   BATCH_IDX      1: cache_batch_idx has the cache rows of the sequences
//   APPEND         1: new tokens are appended to the cache and attended to
//   ROTARY_DIM     leading numbers of a head of q and of new tokens that are rotated by their
//                  position, a multiple of 16; 0: none (KV_DTYPE is 0)
//   INTERLEAVED    1: number 2i is rotated with number 2i + 1, 0: number i with i + ROTARY_DIM / 2
//   PAGE_SCALES    1: each page of K and of V has a scale (KV_DTYPE and PAGE are not 0)
//   PEERS          GPUs that share each sequence's tokens and merge their partials, 0: one GPU
//   HEADS_OF_ROW   KV heads with rows of a token copied as one, adjacent in a token-major cache: 1,
//                  or 2, which form one head of the launch with both heads' query heads, up to 8 of
//                  each (GROUP_SIZE counts both heads', ROWS is 16, Q_LEN 1; APPEND, PAGE_SCALES and
//                  PEERS are 0)
//   COLUMN_GROUPS  CTAs that can share the columns of an output tile: see mla/layout.cuh. Only mla.cu's
//                  builds set it, and the limits that go with it
//   MAX_EVENTS     capacity of a CTA for timeline events, 0: none
//   PARAMS_BYTES   size of Params on the host
#pragma once

#ifndef COLUMN_GROUPS
#define COLUMN_GROUPS 1
#define MOST_GROUPED_STAGES 1
#define MOST_SHORT_SPLITS 1
#define LEAST_GROUPED_SPLITS 1
#define ONE_ROUND 1
#endif

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int KV_BYTES = KV_DTYPE == 0 ? 2 : 1;  // of a number of K or V
// True if a row of K or V that fills no whole columns is a single copy, laid out as in the cache.
// False for two KV heads: up to eight rows would conflict at a bank.
constexpr bool WHOLE_ROWS = BULK && KV_DTYPE == 0 && HEADS_OF_ROW == 1 && HEAD_DIM == V_HEAD_DIM &&
                            HEAD_DIM > 64 && HEAD_DIM % 64 > 0 && HEAD_DIM % 16 == 0;
// Every second row of two KV heads begins in the middle of a line. Its copy starts half a column
// before its first number, so that each column is a line.
constexpr bool SHIFTED_ROWS =
    BULK && KV_DTYPE == 0 && HEADS_OF_ROW == 2 && HEAD_DIM == V_HEAD_DIM && HEAD_DIM % 32 == 16;
// Other rows have columns of 128 bytes; rows of 64 numbers in 8 bits have one column of 64.
constexpr int COLUMN_BYTES =
    WHOLE_ROWS ? 2 * HEAD_DIM
    : KV_DTYPE != 0 && HEADS_OF_ROW * HEAD_DIM <= 64 && HEADS_OF_ROW * V_HEAD_DIM <= 64 ? 64 : 128;
constexpr int COLUMN_PIECES = COLUMN_BYTES / 16, COLUMN_NUMBERS = COLUMN_BYTES / KV_BYTES;
constexpr int K_COLUMNS = (HEADS_OF_ROW * HEAD_DIM + COLUMN_NUMBERS - 1) / COLUMN_NUMBERS;
constexpr int V_COLUMNS = (HEADS_OF_ROW * V_HEAD_DIM + COLUMN_NUMBERS - 1) / COLUMN_NUMBERS;
// Matrix instructions along head_dim; a last one of 8 numbers is padded with zeros.
constexpr int K_STEPS = (HEAD_DIM + 15) / 16, V_STEPS = (V_HEAD_DIM + 15) / 16;
// Loads of shared memory, each with the numbers of LOAD_STEPS steps.
constexpr int LOAD_STEPS = 2 / KV_BYTES;
constexpr int K_LOADS = (K_STEPS + LOAD_STEPS - 1) / LOAD_STEPS;
constexpr int V_LOADS = (V_STEPS + LOAD_STEPS - 1) / LOAD_STEPS;
// Operands have Q's dtype. K and V in 8 bits become fp16 together with Q; fp16 holds all of their
// numbers.
constexpr bool BF16_OPERANDS = BF16 && KV_DTYPE == 0;
// Rows of Q in bf16 are then divided by powers of two, see `unit_of`.
constexpr bool DIVIDED_QUERY = BF16 && KV_DTYPE != 0 && Q_DTYPE == 0;
constexpr int ROW_BLOCKS = ROWS / 8;
constexpr int HEAD_BLOCKS = ROW_BLOCKS / HEADS_OF_ROW;  // of a KV head
// Rows of a block, padded to 8 by matrix instructions. With two KV heads, each has a block, which
// can hold fewer query heads.
constexpr int BLOCK_ROWS = HEADS_OF_ROW > 1 ? GROUP_SIZE / HEADS_OF_ROW : 8;
static_assert(HEADS_OF_ROW == 1 ||
                  (HEADS_OF_ROW == 2 && GROUP_SIZE % 2 == 0 && GROUP_SIZE <= 16 && ROWS == 16 &&
                   Q_LEN == 1 && HEAD_DIM * KV_BYTES % 32 == 0 && V_HEAD_DIM * KV_BYTES % 32 == 0 &&
                   !APPEND && !PAGE_SCALES && !PEERS),
              "Not made for these heads");
constexpr int TOKEN_BLOCKS = CHUNK / 16;
// Rows of a KV head, and its output tiles.
__host__ __device__ constexpr int all_rows(int q_len) {
  return GROUP_SIZE * (Q_LEN > 0 ? Q_LEN : q_len);
}
__host__ __device__ constexpr int row_tiles(int q_len) { return (all_rows(q_len) + ROWS - 1) / ROWS; }
constexpr bool ONE_ROW_TILE = Q_LEN > 0 && GROUP_SIZE * Q_LEN <= ROWS;
constexpr int ROW_COUNT = ONE_ROW_TILE ? GROUP_SIZE * Q_LEN : ROWS;
// Returns whether one of a block's eight rows belongs to its KV head.
__host__ __device__ constexpr bool in_block(int place) {
  return BLOCK_ROWS == 8 || place < BLOCK_ROWS;
}
constexpr int THREADS = 32 * WARPS;
constexpr int RANGE_WARPS = WARPS * CLUSTER;       // warps of a work range
constexpr int V_AT = K_COLUMNS * CHUNK * COLUMN_BYTES;  // V of a chunk, after its K
constexpr int STAGE = V_AT + V_COLUMNS * CHUNK * COLUMN_BYTES;
// Tokens of one copy, which never crosses a page.
__host__ __device__ constexpr int box_of(int page) {
  int box = CHUNK;
  while (page % box != 0) box /= 2;
  return box;
}
constexpr int BOX = box_of(PAGE);
// True if each row of a copy needs a page lookup.
constexpr bool PAGED_ROWS = BOX < 8;
constexpr int PAGE_OR_1 = PAGE > 0 ? PAGE : 1;
// Divisor of the first token of a LeanTile, so that copies stay within pages.
constexpr int START_STEP = PAGE > 0 ? BOX : 1;
// True if LeanTiles include tokens before the first visible one.
constexpr bool MASKED_STARTS =
    (WINDOW_LEFT && (Q_LEN != 1 || APPEND)) || ((WINDOW_LEFT || LEFTPAD) && START_STEP > 1);
// Query fragments of more rows need too many registers and are read from shared memory each time.
constexpr int MOST_QUERY = KV_DTYPE == 0 || (BULK && HEAD_BLOCKS == 1) ? 48 : 47;
constexpr bool SHARED_QUERY = ROW_BLOCKS * (K_STEPS + 2 * V_STEPS) > MOST_QUERY;
// True if rows of Q pass through shared memory, rotated once by all threads.
constexpr bool STAGED_QUERY = SHARED_QUERY || ROTARY_DIM > 0;
static_assert(!STAGED_QUERY || BLOCK_ROWS == 8, "Rows pass through shared memory in full blocks");
// True if output tiles can be packed: several short ones at a time, one per warp.
constexpr bool PACKS = RAGGED && !RAGGED_Q && !FIXED_RUNS && !EQUAL_SPLITS && !STAGED_QUERY &&
                       !SINKS && !APPEND && CLUSTER == 1 && WARPS > 1 && !PEERS;
// Maximum tokens of a packed output tile, and the maximum if a CTA has more than two output tiles.
constexpr int PACKED_TOKENS = 64, PACKED_TOKENS_OF_MANY = 128;
// True if the cluster's first CTA writes output tiles that it walks alone. If the launch reads the
// lengths, the cluster can have more CTAs than an output tile has chunks.
constexpr bool WRITES_ALONE = RAGGED && CLUSTER > 1 && !PEERS;
// Loads of V issued before the weights are known, limited by registers.
constexpr int EARLY_LOADS = ROW_BLOCKS * V_STEPS <= 8 ? V_LOADS : 0;
constexpr int QUERY_ROW = 16 * K_STEPS + 8;  // 8: rows fall into different banks
// True if a CTA's end takes so long that longer splits pay: a range that crosses an output tile has
// two ends. See kernels/lean/cuda_schedule.py. False for latent caches, which have 64 rows.
constexpr bool LARGE_PARTIAL = Q_LEN > 0 && ROWS <= 32 && ROW_COUNT * V_HEAD_DIM >= 1024;
constexpr int SCRATCH_ROW = V_HEAD_DIM + 4;  // 4: as for a warp's fragments
constexpr int SCRATCH_WARP = ROW_COUNT * SCRATCH_ROW;
constexpr int QUADS = ROW_COUNT * V_HEAD_DIM / 4;  // 16-byte pieces of a partial
constexpr int ROW_QUADS = V_HEAD_DIM / 4;
constexpr int SLICE = (QUADS + CLUSTER - 1) / CLUSTER;  // of a partial, for one CTA of a cluster
constexpr int SLOT = 8 * QUADS;  // numbers of a slot: two units of 4 for each piece
// Partials that a CTA merges at once, including its own. More are merged in a tree. Larger values
// double the code and the registers. Fixed runs are numerous, so their tree has fewer levels.
constexpr int MERGE_BITS = FIXED_RUNS ? 4 : 3;
constexpr int MERGE = 1 << MERGE_BITS;

// Returns the XOR mask of the numbers of a row's 16-byte pieces; for rows below 8.
__host__ __device__ constexpr int swizzle_of(int row) {
  return WHOLE_ROWS ? 0 : row * COLUMN_BYTES / 128;
}

// Returns the number of adjacent threads that merge a piece together, if there are spare threads.
// It pays for reads of other CTAs' slots.
__host__ __device__ constexpr int team_of(int pieces) {
  int team = 1;
  while (CLUSTER == 1 && team < 2 && 2 * team * pieces <= THREADS) team *= 2;
  return team;
}

// Shared memory, in bytes from a 1024-byte boundary; CudaBuild.shared_bytes is its size.
constexpr int RING_BYTES = WARPS * STAGES * STAGE;
constexpr int SCRATCH_BYTES = 4 * WARPS * SCRATCH_WARP;
// States of many rows overlay the ring: copies start only after the previous part has been merged.
constexpr bool SCRATCH_OVER_RING = SHARED_QUERY;
constexpr int SCRATCH_AT = SCRATCH_OVER_RING ? 0 : RING_BYTES;
// (m, l) of each warp's rows.
constexpr int LOGS_AT =
    SCRATCH_OVER_RING && RING_BYTES > SCRATCH_BYTES ? RING_BYTES : SCRATCH_AT + SCRATCH_BYTES;
// CLUSTER > 1: the CTA's partial, for its peers.
constexpr int OWN_AT = LOGS_AT + 8 * WARPS * ROWS;
constexpr int QUERY_AT = OWN_AT + (CLUSTER > 1 ? 16 * QUADS + 16 * ((ROW_COUNT + 1) / 2) : 0);
// SINKS: sinks of the part's rows, in the dtype of `sinks`.
constexpr int SINKS_AT = QUERY_AT + (STAGED_QUERY ? 2 * ROWS * QUERY_ROW : 0);
// Divisors of rows of Q.
constexpr int UNITS_AT = SINKS_AT + (SINKS ? 4 * ROWS : 0);
// PEERS: addresses of workspaces, the launch's epoch and the GPU's rank.
constexpr int PEERS_AT = UNITS_AT + (SHARED_QUERY && DIVIDED_QUERY ? 4 * ROWS : 0);
constexpr int PEERS_BYTES = PEERS > 0 ? 8 * PEERS + 8 : 0;
// One per warp and stage; PAGE_SCALES: followed by the scales of the stages' pages.
constexpr int BARRIERS_AT = PEERS_AT + PEERS_BYTES;
// True if a launch finds its work ranges from lengths on the device: kept.cuh. A CTA's is in shared
// memory, behind everything else.
constexpr bool KEEPS = RAGGED && !EQUAL_SPLITS;
constexpr int KEPT_NUMBERS = 12, KEPT_BYTES = KEEPS ? 4 * KEPT_NUMBERS : 0;
constexpr int KEPT_AT =
    BARRIERS_AT + WARPS * STAGES * (8 + (PAGE_SCALES ? 8 * (CHUNK / BOX) : 0)) + 15 & ~15;

#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
constexpr float LOG2_E = 1.4426950408889634f;
// Below every finite score, and finite: LOWEST - LOWEST is 0.
constexpr float LOWEST = -3.402823466e38f;
// Exponents are relative to a reference. It moves only if a score exceeds it by the threshold, to
// the margin below the new maximum. Few chunks are re-scaled, weights stay below 2^15, and fp16
// keeps weights down to 2^-31 relative to them.
constexpr float RESCALE_THRESHOLD = 15.0f;
constexpr float RESCALE_MARGIN = 7.0f;
// Largest size of a reference that a fused multiply-add of score and scale subtracts. The reference
// is a rounded product, and the sum is not: the rounding error, here at most 1/2, adds to exponents.
// Products of larger scores are rounded first.
constexpr float MOST_FUSED = 8388608.0f;
