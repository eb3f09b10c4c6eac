// What a build of lean.cu is made for: its macros, and the constants that follow from them.
//
//   HEAD_DIM       of Q and K: a multiple of 8 up to 256, 512 or 576
//   V_HEAD_DIM     of V and the output: likewise, up to 512
//   BF16           of the output, 1: bf16, 0: fp16
//   KV_DTYPE       of K and V, 0: as Q, 1: e4m3, 2: e5m2; these have head_dims that are multiples
//                  of 16
//   Q_DTYPE        of Q, 0: as the output, 1: e4m3, 2: e5m2, where KV_DTYPE is not 0
//   GROUP_SIZE     query heads that share a KV head
//   Q_LEN          query tokens of a sequence; row r of an output tile is query token
//                  r / GROUP_SIZE. 0: the launch says how many
//   RAGGED_Q       1: cu_seqlens_q says how many, of each sequence (Q_LEN is 0, RAGGED 1)
//   ROWS           rows of an output tile, padded: 8, 16 or 32
//   CHUNK          tokens that a warp takes at a time: a multiple of 16
//   WARPS, STAGES  warps of a CTA; chunks that each of them has in flight
//   CTAS_PER_SM    for the registers of a thread
//   CLUSTER        CTAs that share a work range; above 1 their partials meet in distributed shared
//                  memory
//   BULK           1: bulk tensor copies on mbarriers (compute capability 9.0), 0: 16-byte cp.async
//                  (8.0), which pages that are no multiple of 16 tokens need
//   RAGGED         1: lengths are read from cache_seqlens
//   FIXED_RUNS     1: splits follow from a sequence's own length
//   EQUAL_SPLITS   1: the output tiles have as many splits each, of equal length, a CTA's or a
//                  cluster's (FlashDecoding; one split: FlashAttention-2), as the grid says
//                  (RAGGED_Q, FIXED_RUNS and PEERS are 0)
//   PAGE           tokens of a page, 0: the cache is contiguous
//   WINDOW_LEFT    1: a query token sees no more than `window_left` tokens before its own
//   WINDOW_RIGHT   1: it sees `window_right` tokens past its own, 0: none (causal)
//   ATTENTION_CHUNK  1: it sees no token of another chunk of the sequence (WINDOW_LEFT is 1)
//   SOFTCAP        1: scores are capped: softcap x tanh(score / softcap)
//   ALIBI          1: scores fall by a slope of the head with the distance
//   SINKS          a logit of the head without a value, as 1: fp32, 2: fp16, 3: bf16; 0: none
//   LEFTPAD        1: sequences start at cache_leftpad in their caches (RAGGED is 1)
//   BATCH_IDX      1: sequences have the rows of the cache that cache_batch_idx says
//   APPEND         1: new tokens are appended to the cache and attended to
//   ROTARY_DIM     leading numbers of a head of q and of new tokens that are rotated by their
//                  position, a multiple of 16; 0: none (KV_DTYPE is 0)
//   INTERLEAVED    1: number 2i is rotated with number 2i + 1, 0: number i with i + ROTARY_DIM / 2
//   PAGE_SCALES    1: each page of K and of V has a scale (KV_DTYPE and PAGE are not 0)
//   PEERS          GPUs that share each sequence's tokens and merge their partials, 0: this one alone
//   HEADS_OF_ROW   KV heads whose rows of a token are copied as one, side by side in a token-major
//                  cache: 1, or 2, which are one of the launch with both heads' query heads, up to 8
//                  of each (GROUP_SIZE counts both heads', ROWS is 16, Q_LEN 1; APPEND, PAGE_SCALES
//                  and PEERS are 0)
//   MAX_EVENTS     timeline events of a CTA that are recorded, 0: none
//   PARAMS_BYTES   size of Params as the host has it
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int KV_BYTES = KV_DTYPE == 0 ? 2 : 1;  // of a number of K or V
// Whether a row of K or V that fills no whole columns is one copy, and lies in shared memory as in
// the cache. Not of two KV heads: up to eight rows would meet at a bank.
constexpr bool WHOLE_ROWS = BULK && KV_DTYPE == 0 && HEADS_OF_ROW == 1 && HEAD_DIM == V_HEAD_DIM &&
                            HEAD_DIM > 64 && HEAD_DIM % 64 > 0 && HEAD_DIM % 16 == 0;
// Rows of two KV heads that end in the middle of a line, as every second one begins: those are copied
// from half a column before their first number on, so that each column is a line.
constexpr bool SHIFTED_ROWS =
    BULK && KV_DTYPE == 0 && HEADS_OF_ROW == 2 && HEAD_DIM == V_HEAD_DIM && HEAD_DIM % 32 == 16;
// Other rows lie in columns of 128 bytes; those of 64 numbers in 8 bits in one of 64.
constexpr int COLUMN_BYTES =
    WHOLE_ROWS ? 2 * HEAD_DIM
    : KV_DTYPE != 0 && HEADS_OF_ROW * HEAD_DIM <= 64 && HEADS_OF_ROW * V_HEAD_DIM <= 64 ? 64 : 128;
constexpr int COLUMN_PIECES = COLUMN_BYTES / 16, COLUMN_NUMBERS = COLUMN_BYTES / KV_BYTES;
constexpr int K_COLUMNS = (HEADS_OF_ROW * HEAD_DIM + COLUMN_NUMBERS - 1) / COLUMN_NUMBERS;
constexpr int V_COLUMNS = (HEADS_OF_ROW * V_HEAD_DIM + COLUMN_NUMBERS - 1) / COLUMN_NUMBERS;
// Matrix instructions along head_dim; a last one of 8 numbers is padded with zeros.
constexpr int K_STEPS = (HEAD_DIM + 15) / 16, V_STEPS = (V_HEAD_DIM + 15) / 16;
// Loads of shared memory, each with the numbers of so many steps.
constexpr int LOAD_STEPS = 2 / KV_BYTES;
constexpr int K_LOADS = (K_STEPS + LOAD_STEPS - 1) / LOAD_STEPS;
constexpr int V_LOADS = (V_STEPS + LOAD_STEPS - 1) / LOAD_STEPS;
// Operands are in Q's dtype. K and V in 8 bits, and Q with them, become fp16, which holds all of
// their numbers.
constexpr bool BF16_OPERANDS = BF16 && KV_DTYPE == 0;
// Rows of Q in bf16 are divided by powers of two then, see `unit_of`.
constexpr bool DIVIDED_QUERY = BF16 && KV_DTYPE != 0 && Q_DTYPE == 0;
constexpr int ROW_BLOCKS = ROWS / 8;
constexpr int HEAD_BLOCKS = ROW_BLOCKS / HEADS_OF_ROW;  // of a KV head
// Rows of a block, which matrix instructions pad to 8: fewer where each of two KV heads has a block
// for a group of fewer query heads.
constexpr int BLOCK_ROWS = HEADS_OF_ROW > 1 ? GROUP_SIZE / HEADS_OF_ROW : 8;
static_assert(HEADS_OF_ROW == 1 ||
                  (HEADS_OF_ROW == 2 && GROUP_SIZE % 2 == 0 && GROUP_SIZE <= 16 && ROWS == 16 &&
                   Q_LEN == 1 && HEAD_DIM * KV_BYTES % 32 == 0 && V_HEAD_DIM * KV_BYTES % 32 == 0 &&
                   !APPEND && !PAGE_SCALES && !PEERS),
              "Not made for these heads");
constexpr int TOKEN_BLOCKS = CHUNK / 16;
// Of a KV head, and its output tiles.
constexpr int all_rows(int q_len) { return GROUP_SIZE * (Q_LEN > 0 ? Q_LEN : q_len); }
constexpr int row_tiles(int q_len) { return (all_rows(q_len) + ROWS - 1) / ROWS; }
constexpr bool ONE_ROW_TILE = Q_LEN > 0 && GROUP_SIZE * Q_LEN <= ROWS;
constexpr int ROW_COUNT = ONE_ROW_TILE ? GROUP_SIZE * Q_LEN : ROWS;
// Whether one of a block's eight places is of a row of its KV head.
constexpr bool in_block(int place) { return BLOCK_ROWS == 8 || place < BLOCK_ROWS; }
constexpr int THREADS = 32 * WARPS;
constexpr int RANGE_WARPS = WARPS * CLUSTER;       // warps of a work range
constexpr int V_AT = K_COLUMNS * CHUNK * COLUMN_BYTES;  // V of a chunk, after its K
constexpr int STAGE = V_AT + V_COLUMNS * CHUNK * COLUMN_BYTES;
// Tokens of one copy: none crosses a page.
constexpr int box_of(int page) {
  int box = CHUNK;
  while (page % box != 0) box /= 2;
  return box;
}
constexpr int BOX = box_of(PAGE);
// Pages are looked up for each row of a copy.
constexpr bool PAGED_ROWS = BOX < 8;
constexpr int PAGE_OR_1 = PAGE > 0 ? PAGE : 1;
// What the first token of a LeanTile is a multiple of, so that copies stay within pages.
constexpr int START_STEP = PAGE > 0 ? BOX : 1;
// Whether LeanTiles hold tokens before the first that a query token sees.
constexpr bool MASKED_STARTS =
    (WINDOW_LEFT && (Q_LEN != 1 || APPEND)) || ((WINDOW_LEFT || LEFTPAD) && START_STEP > 1);
// Query fragments of more rows than this take too many registers: they are read from shared memory
// each time.
constexpr int MOST_QUERY = KV_DTYPE == 0 || (BULK && HEAD_BLOCKS == 1) ? 48 : 47;
constexpr bool SHARED_QUERY = ROW_BLOCKS * (K_STEPS + 2 * V_STEPS) > MOST_QUERY;
// Rows of Q pass through shared memory: rotated by all threads, once.
constexpr bool STAGED_QUERY = SHARED_QUERY || ROTARY_DIM > 0;
static_assert(!STAGED_QUERY || BLOCK_ROWS == 8, "Rows pass through shared memory in full blocks");
// Whether output tiles can be packed: short ones are a single warp's each, several at a time.
constexpr bool PACKS = RAGGED && !RAGGED_Q && !FIXED_RUNS && !EQUAL_SPLITS && !STAGED_QUERY &&
                       !SINKS && !APPEND && CLUSTER == 1 && WARPS > 1 && !PEERS;
// Tokens up to which they are, and where a CTA has more than two output tiles.
constexpr int PACKED_TOKENS = 64, PACKED_TOKENS_OF_MANY = 128;
// Whether output tiles that the cluster's first CTA walks alone are written by it, without the others:
// with lengths that the launch reads, the cluster may be larger than they are long.
constexpr bool WRITES_ALONE = RAGGED && CLUSTER > 1 && !PEERS;
// Loads of V before the weights are known, as far as registers allow.
constexpr int EARLY_LOADS = ROW_BLOCKS * V_STEPS <= 8 ? V_LOADS : 0;
constexpr int QUERY_ROW = 16 * K_STEPS + 8;  // 8: rows fall into different banks
// Whether a CTA's end takes so long that ranges which cross output tiles, with two of them, are worth
// longer splits: kernels/lean/cuda_schedule.py. Not of latent caches, which have 64 rows.
constexpr bool LARGE_PARTIAL = Q_LEN > 0 && ROWS <= 32 && ROW_COUNT * V_HEAD_DIM >= 1024;
constexpr int SCRATCH_ROW = V_HEAD_DIM + 4;  // 4: as for a warp's fragments
constexpr int SCRATCH_WARP = ROW_COUNT * SCRATCH_ROW;
constexpr int QUADS = ROW_COUNT * V_HEAD_DIM / 4;  // 16-byte pieces of a partial
constexpr int ROW_QUADS = V_HEAD_DIM / 4;
constexpr int SLICE = (QUADS + CLUSTER - 1) / CLUSTER;  // of a partial, for one CTA of a cluster
constexpr int SLOT = 8 * QUADS;  // numbers of a slot: two units of 4 for each piece
// Partials that a CTA merges at once, its own among them; more go through a tree. Eight take 2 to 5%
// less than 16, whose code is twice as long and holds more registers; a tree of fixed runs, of which
// there are many, has fewer levels.
constexpr int MERGE_BITS = FIXED_RUNS ? 4 : 3;
constexpr int MERGE = 1 << MERGE_BITS;

// What the number of a 16-byte piece of a row is XORed with; rows below 8.
constexpr int swizzle_of(int row) { return WHOLE_ROWS ? 0 : row * COLUMN_BYTES / 128; }

// Adjacent threads that merge a piece together where there are threads to spare: it pays for reads
// of other CTAs' slots.
constexpr int team_of(int pieces) {
  int team = 1;
  while (CLUSTER == 1 && team < 2 && 2 * team * pieces <= THREADS) team *= 2;
  return team;
}

// Shared memory, in bytes from a 1024-byte boundary; CudaBuild.shared_bytes is its size.
constexpr int RING_BYTES = WARPS * STAGES * STAGE;
constexpr int SCRATCH_BYTES = 4 * WARPS * SCRATCH_WARP;
// States of many rows lie over the ring: no copy into it starts before the part before has been
// merged.
constexpr bool SCRATCH_OVER_RING = SHARED_QUERY;
constexpr int SCRATCH_AT = SCRATCH_OVER_RING ? 0 : RING_BYTES;
// (m, l) of each warp's rows.
constexpr int LOGS_AT =
    SCRATCH_OVER_RING && RING_BYTES > SCRATCH_BYTES ? RING_BYTES : SCRATCH_AT + SCRATCH_BYTES;
// CLUSTER > 1: the CTA's partial, for its peers.
constexpr int OWN_AT = LOGS_AT + 8 * WARPS * ROWS;
constexpr int QUERY_AT = OWN_AT + (CLUSTER > 1 ? 16 * QUADS + 16 * ((ROW_COUNT + 1) / 2) : 0);
// SINKS: of the part's rows, as they lie in `sinks`.
constexpr int SINKS_AT = QUERY_AT + (STAGED_QUERY ? 2 * ROWS * QUERY_ROW : 0);
// What rows of Q are divided by.
constexpr int UNITS_AT = SINKS_AT + (SINKS ? 4 * ROWS : 0);
// PEERS: where their workspaces are, the launch's epoch and the GPU's rank.
constexpr int PEERS_AT = UNITS_AT + (SHARED_QUERY && DIVIDED_QUERY ? 4 * ROWS : 0);
constexpr int PEERS_BYTES = PEERS > 0 ? 8 * PEERS + 8 : 0;
// Each warp's, one for each stage; PAGE_SCALES: with the scales of its stages' pages behind them.
constexpr int BARRIERS_AT = PEERS_AT + PEERS_BYTES;

#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
constexpr float LOG2_E = 1.4426950408889634f;
// Below every finite score, and finite: LOWEST - LOWEST is 0.
constexpr float LOWEST = -3.402823466e38f;
// The exponent of a score is taken against a reference that is moved only where a score passes it
// by the threshold, to the margin below the new maximum: few chunks re-scale, weights stay below
// 2^15, and fp16 keeps weights down to 2^-31 of them.
constexpr float RESCALE_THRESHOLD = 15.0f;
constexpr float RESCALE_MARGIN = 7.0f;
