// The parameters of a build of lean.cu, many_rows.cu or mla.cu, and the constants that follow from
// them. The host passes each parameter as a macro, the member's name in capitals.
#pragma once

#ifndef COLUMN_GROUPS  // only mla.cu's builds set these
#define COLUMN_GROUPS 1
#define MOST_GROUPED_STAGES 1
#define MOST_SHORT_SPLITS 0
#define LEAST_GROUPED_SPLITS 1
#define ONE_ROUND 1
#define ROW_SCALES 0
#define CAUSAL 1
#endif

// The dtype of operands, in texts of instructions; see BF16_OPERANDS.
#if BF16 && KV_DTYPE == 0
#define OPERAND "bf16"
#else
#define OPERAND "f16"
#endif

#define DEVICE __device__ __forceinline__

struct Build {
#ifdef __CUDA_ARCH__
  static constexpr int architecture = __CUDA_ARCH__;  // of the compute capability: 900
#else
  static constexpr int architecture = 0;
#endif
  static constexpr int head_dim = HEAD_DIM;  // of Q and K: a multiple of 8 up to 256, 512 or 576
  static constexpr int v_head_dim = V_HEAD_DIM;  // of V and the output: up to 256, or 512
  static constexpr bool bf16 = BF16;             // dtype of the output; false: fp16
  // Of K and V, 0: as Q, 1: e4m3, 2: e5m2; in 8 bits head_dims are multiples of 16.
  static constexpr int kv_dtype = KV_DTYPE;
  // Of Q, 0: as the output, 1: e4m3, 2: e5m2, if kv_dtype is not 0.
  static constexpr int q_dtype = Q_DTYPE;
  static constexpr int group_size = GROUP_SIZE;  // query heads that share a KV head
  // Query tokens of a sequence; row r of an output tile is query token r / group_size. 0: a
  // parameter of the launch.
  static constexpr int q_len = Q_LEN;
  // Query tokens of each sequence are in cu_seqlens_q (q_len is 0, and lengths are ragged).
  static constexpr bool ragged_q = RAGGED_Q;
  static constexpr int rows = ROWS;                // of an output tile, padded: 8, 16 or 32
  static constexpr int chunk = CHUNK;              // tokens that a warp processes at a time, in 16
  static constexpr int warps = WARPS;              // of a CTA
  static constexpr int stages = STAGES;            // chunks in flight per warp
  static constexpr int ctas_per_sm = CTAS_PER_SM;  // limits the registers of a thread
  // CTAs that share a work range; above 1 their partials meet in distributed shared memory.
  static constexpr int cluster = CLUSTER;
  // Bulk tensor copies on mbarriers (compute capability 9.0). False: 16-byte cp.async (8.0),
  // required by pages that are not multiples of 16 tokens.
  static constexpr bool bulk = BULK;
  static constexpr bool ragged = RAGGED;          // lengths are read from cache_seqlens
  static constexpr bool fixed_runs = FIXED_RUNS;  // splits follow from a sequence's own length
  // The grid sets the number of equal splits of every output tile. A CTA or a cluster computes a
  // split (FlashDecoding; one split: FlashAttention-2). Without ragged_q, fixed_runs and peers.
  static constexpr bool equal_splits = EQUAL_SPLITS;
  static constexpr int page = PAGE;  // tokens of a page, 0: contiguous cache
  // A query token sees at most `window_left` tokens before its own.
  static constexpr bool window_left = WINDOW_LEFT;
  // It sees `window_right` tokens past its own; false: none (causal).
  static constexpr bool window_right = WINDOW_RIGHT;
  // It sees only its own chunk of the sequence (window_left is true).
  static constexpr bool attention_chunk = ATTENTION_CHUNK;
  static constexpr bool softcap = SOFTCAP;  // scores are softcap x tanh(score / softcap)
  static constexpr bool alibi = ALIBI;  // scores decrease with the distance by a slope of the head
  // A logit of the head without a value, as 1: fp32, 2: fp16, 3: bf16; 0: none.
  static constexpr int sinks = SINKS;
  // `prior` has the results of other tokens, which outputs and LSEs include; the first
  // `prior_tokens` of a length on the device are among these.
  static constexpr bool prior = PRIOR;
  // Sequences start at cache_leftpad in their caches (lengths are ragged).
  static constexpr bool leftpad = LEFTPAD;
  static constexpr bool batch_idx = BATCH_IDX;  // cache_batch_idx has the sequences' cache rows
  static constexpr bool append = APPEND;  // new tokens are appended to the cache and attended to
  // Leading numbers of a head of q and of new tokens that are rotated by their position, a multiple
  // of 16; 0: none (kv_dtype is 0).
  static constexpr int rotary_dim = ROTARY_DIM;
  // Number 2i is rotated with number 2i + 1; false: number i with i + rotary_dim / 2.
  static constexpr bool interleaved = INTERLEAVED;
  // Each page of K and of V has a scale (kv_dtype and page are not 0).
  static constexpr bool page_scales = PAGE_SCALES;
  // GPUs that share each sequence's tokens and merge their partials, 0: one GPU.
  static constexpr int peers = PEERS;
  // KV heads with rows of a token copied as one, adjacent in a token-major cache: 1, or 2, which
  // form one head of the launch with both heads' query heads, up to 8 of each (group_size counts
  // both heads', rows is 16, q_len 1; without append, page_scales and peers).
  static constexpr int heads_of_row = HEADS_OF_ROW;
  static constexpr int max_events = MAX_EVENTS;  // capacity of a CTA for timeline events, 0: none
  // Of CudaBuild, which needs them before a build:
  static constexpr int box = BOX;  // tokens of one copy, which never crosses a page
  // Divisor of the first token of a LeanTile, so that copies stay within pages.
  static constexpr int start_step = START_STEP;
  // A row of K or V that fills no whole columns is a single copy, laid out as in the cache. False
  // for two KV heads: up to eight rows would conflict at a bank.
  static constexpr bool whole_rows = WHOLE_ROWS;
  // Bytes of a row of K or V per copy. Unless whole_rows, columns of 128 bytes; rows of 64 numbers
  // in 8 bits have one column of 64.
  static constexpr int column_bytes = COLUMN_BYTES;
  // Query fragments would need too many registers, and are read from shared memory each time.
  static constexpr bool shared_query = SHARED_QUERY;
  // Output tiles can be packed: several short ones at a time, one per warp.
  static constexpr bool packs = PACKS;
  // A launch finds its work ranges from lengths on the device: kept.cuh.
  static constexpr bool keeps = KEEPS;
  static constexpr int params_bytes = PARAMS_BYTES;    // size of Params on the host
  static constexpr int shared_bytes = SHARED_BYTES;    // shared memory of a CTA
  static constexpr int partial_bytes = PARTIAL_BYTES;  // of a slot in the partials workspace

  // Only of mla.cu; see mla/layout.cuh. CTAs with the same rows and tokens, each with a share of
  // the columns: 1, 2 or 4. With ragged lengths 1 or that many, by the lengths:
  // Lengths::in_groups.
  static constexpr int column_groups = COLUMN_GROUPS;
  // Limits of that choice.
  static constexpr int most_grouped_stages = MOST_GROUPED_STAGES;
  static constexpr int most_short_splits = MOST_SHORT_SPLITS;
  static constexpr int least_grouped_splits = LEAST_GROUPED_SPLITS;
  // Splits merged in one round with several column groups, or few rows.
  static constexpr int one_round = ONE_ROUND;
  // Rows as in DeepSeek's caches: v_head_dim numbers in e4m3, a scale in fp32 for each 128 of them,
  // and the other 64 columns in bf16 (kv_dtype is 0: operands are Q's).
  static constexpr bool row_scales = ROW_SCALES;
  // Query token i of q_len sees all but the last q_len - 1 - i tokens.
  static constexpr bool causal = CAUSAL;
};

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int KV_BYTES = Build::kv_dtype == 0 ? 2 : 1;  // of a number of K or V
// Every second row of two KV heads begins in the middle of a line. Its copy starts half a column
// before its first number, so that each column is a line.
constexpr bool SHIFTED_ROWS = Build::bulk && Build::kv_dtype == 0 && Build::heads_of_row == 2 &&
                              Build::head_dim == Build::v_head_dim && Build::head_dim % 32 == 16;
constexpr int COLUMN_PIECES = Build::column_bytes / 16,
              COLUMN_NUMBERS = Build::column_bytes / KV_BYTES;
constexpr int K_COLUMNS =
    (Build::heads_of_row * Build::head_dim + COLUMN_NUMBERS - 1) / COLUMN_NUMBERS;
constexpr int V_COLUMNS =
    (Build::heads_of_row * Build::v_head_dim + COLUMN_NUMBERS - 1) / COLUMN_NUMBERS;
// Matrix instructions along head_dim; a last one of 8 numbers is padded with zeros.
constexpr int K_STEPS = (Build::head_dim + 15) / 16, V_STEPS = (Build::v_head_dim + 15) / 16;
// Loads of shared memory, each with the numbers of LOAD_STEPS steps.
constexpr int LOAD_STEPS = 2 / KV_BYTES;
constexpr int K_LOADS = (K_STEPS + LOAD_STEPS - 1) / LOAD_STEPS;
constexpr int V_LOADS = (V_STEPS + LOAD_STEPS - 1) / LOAD_STEPS;
// Operands have Q's dtype. K and V in 8 bits become fp16 together with Q; fp16 holds all of their
// numbers.
constexpr bool BF16_OPERANDS = Build::bf16 && Build::kv_dtype == 0;
// Rows of Q in bf16 are then divided by powers of two, see `unit_of`.
constexpr bool DIVIDED_QUERY = Build::bf16 && Build::kv_dtype != 0 && Build::q_dtype == 0;
constexpr int ROW_BLOCKS = Build::rows / 8;
constexpr int HEAD_BLOCKS = ROW_BLOCKS / Build::heads_of_row;  // of a KV head
// Rows of a block, padded to 8 by matrix instructions. With two KV heads, each has a block, which
// can hold fewer query heads.
constexpr int BLOCK_ROWS = Build::heads_of_row > 1 ? Build::group_size / Build::heads_of_row : 8;
static_assert(Build::heads_of_row == 1 ||
                  (Build::heads_of_row == 2 && Build::group_size % 2 == 0 &&
                   Build::group_size <= 16 && Build::rows == 16 && Build::q_len == 1 &&
                   Build::head_dim * KV_BYTES % 32 == 0 && Build::v_head_dim * KV_BYTES % 32 == 0 &&
                   !Build::append && !Build::page_scales && !Build::peers),
              "Not made for these heads");
constexpr int TOKEN_BLOCKS = Build::chunk / 16;
// Rows of a KV head, and its output tiles.
__host__ __device__ constexpr int all_rows(int q_len) {
  return Build::group_size * (Build::q_len > 0 ? Build::q_len : q_len);
}
__host__ __device__ constexpr int row_tiles(int q_len) {
  return (all_rows(q_len) + Build::rows - 1) / Build::rows;
}
constexpr bool ONE_ROW_TILE = Build::q_len > 0 && all_rows(Build::q_len) <= Build::rows;
constexpr int ROW_COUNT = ONE_ROW_TILE ? Build::group_size * Build::q_len : Build::rows;
// Returns whether one of a block's eight rows belongs to its KV head.
__host__ __device__ constexpr bool in_block(int place) {
  return BLOCK_ROWS == 8 || place < BLOCK_ROWS;
}
constexpr int THREADS = 32 * Build::warps;
constexpr int RANGE_WARPS = Build::warps * Build::cluster;            // warps of a work range
constexpr int V_AT = K_COLUMNS * Build::chunk * Build::column_bytes;  // V of a chunk, after its K
constexpr int STAGE = V_AT + V_COLUMNS * Build::chunk * Build::column_bytes;
// True if each row of a copy needs a page lookup.
constexpr bool PAGED_ROWS = Build::box < 8;
constexpr int PAGE_OR_1 = Build::page > 0 ? Build::page : 1;
// True if LeanTiles include tokens before the first visible one.
constexpr bool MASKED_STARTS = (Build::window_left && (Build::q_len != 1 || Build::append)) ||
                               ((Build::window_left || Build::leftpad) && Build::start_step > 1);
// True if rows of Q pass through shared memory, rotated once by all threads.
constexpr bool STAGED_QUERY = Build::shared_query || Build::rotary_dim > 0;
static_assert(!STAGED_QUERY || BLOCK_ROWS == 8, "Rows pass through shared memory in full blocks");
// Maximum tokens of a packed output tile, and the maximum if a CTA has more than two output tiles.
constexpr int PACKED_TOKENS = 64, PACKED_TOKENS_OF_MANY = 128;
// True if the cluster's first CTA writes output tiles that it walks alone. If the launch reads the
// lengths, the cluster can have more CTAs than an output tile has chunks.
constexpr bool WRITES_ALONE = Build::ragged && Build::cluster > 1 && !Build::peers;
// Loads of V issued before the weights are known, limited by registers.
constexpr int EARLY_LOADS = ROW_BLOCKS * V_STEPS <= 8 ? V_LOADS : 0;
constexpr int QUERY_ROW = 16 * K_STEPS + 8;         // 8: rows fall into different banks
constexpr int SCRATCH_ROW = Build::v_head_dim + 4;  // 4: as for a warp's fragments
constexpr int SCRATCH_WARP = ROW_COUNT * SCRATCH_ROW;
constexpr int QUADS = ROW_COUNT * Build::v_head_dim / 4;  // 16-byte pieces of a partial
// True if a CTA's end takes so long that longer splits pay: a range that crosses an output tile has
// two ends. See kernels/lean/cuda_schedule.py. False for latent caches, which have 64 rows.
constexpr bool LARGE_PARTIAL = Build::q_len > 0 && Build::rows <= 32 && QUADS >= 256;
constexpr bool OF_LATENTS = Build::most_short_splits > 0;  // mla.cu
constexpr int ROW_QUADS = Build::v_head_dim / 4;
constexpr int SLICE =
    (QUADS + Build::cluster - 1) / Build::cluster;  // of a partial, for one CTA of a cluster
// Rows that a slice can have pieces of.
constexpr int MOST_SLICE_ROWS = (SLICE + ROW_QUADS - 2) / ROW_QUADS + 1;
constexpr int SLICE_ROWS = MOST_SLICE_ROWS < ROW_COUNT ? MOST_SLICE_ROWS : ROW_COUNT;
// Partials that a CTA merges at once, including its own. More are merged in a tree. Larger values
// double the code and the registers. Fixed runs are numerous, so their tree has fewer levels.
constexpr int MERGE_BITS = Build::fixed_runs ? 4 : 3;
constexpr int MERGE = 1 << MERGE_BITS;

// Returns the XOR mask of the numbers of a row's 16-byte pieces; for rows below 8.
__host__ __device__ constexpr int swizzle_of(int row) {
  return Build::whole_rows ? 0 : row * Build::column_bytes / 128;
}

// Returns the number of adjacent threads that merge a piece together, if there are spare threads.
// It pays for reads of other CTAs' slots.
__host__ __device__ constexpr int team_of(int pieces) {
  int team = 1;
  while (Build::cluster == 1 && team < 2 && 2 * team * pieces <= THREADS) team *= 2;
  return team;
}

constexpr int KEPT_NUMBERS = 12, KEPT_BYTES = Build::keeps ? 4 * KEPT_NUMBERS : 0;
// Places in memory: the first copies of a CTA's warps, and the arrays that the schedule reads.
constexpr int FIRST_COPIES_AT = 16, KEPT_ARRAYS_AT = FIRST_COPIES_AT + 4 * Build::warps + 31 & ~31;
// True if warps start first copies from what an earlier launch has kept.
constexpr bool GUESSES = Build::keeps && Build::bulk;
// States of many rows overlay the ring: copies start only after the previous part has been merged.
constexpr bool SCRATCH_OVER_RING = Build::shared_query;

// Shared memory of a CTA of lean.cu, in bytes from a 1024-byte boundary.
struct Shared {
  static constexpr int ring_bytes = Build::warps * Build::stages * STAGE;
  static constexpr int scratch_bytes = 4 * Build::warps * SCRATCH_WARP;
  static constexpr int peers_bytes = Build::peers > 0 ? 8 * Build::peers + 8 : 0;

  static constexpr int ring = 0;
  static constexpr int scratch = SCRATCH_OVER_RING ? 0 : ring_bytes;  // states of warps
  // (m, l) of each warp's rows.
  static constexpr int logs =
      SCRATCH_OVER_RING && ring_bytes > scratch_bytes ? ring_bytes : scratch + scratch_bytes;
  // Build::cluster > 1: the CTA's slice of the partials of all CTAs of the cluster, which they
  // store there; (m, l) of its rows; and the barrier that counts these bytes.
  static constexpr int inbox = logs + 8 * Build::warps * Build::rows;
  static constexpr int inbox_logs = inbox + 16 * Build::cluster * SLICE;
  static constexpr int inbox_barrier = inbox_logs + 8 * Build::cluster * SLICE_ROWS;
  static constexpr int query = Build::cluster > 1 ? inbox_barrier + 8 + 15 & ~15 : inbox;
  // Build::sinks: of the part's rows, in the dtype of `sinks`.
  static constexpr int sinks = query + (STAGED_QUERY ? 2 * Build::rows * QUERY_ROW : 0);
  static constexpr int units =
      sinks + (Build::sinks ? 4 * Build::rows : 0);  // divisors of rows of Q
  // Build::peers: addresses of workspaces, the launch's epoch and the GPU's rank.
  static constexpr int peers = units + (Build::shared_query && DIVIDED_QUERY ? 4 * Build::rows : 0);
  // One per warp and stage; Build::page_scales: followed by the scales of the stages' pages.
  static constexpr int barriers = peers + peers_bytes;
  static constexpr int end =
      barriers +
      Build::warps * Build::stages * (Build::page_scales ? 8 + 8 * (Build::chunk / Build::box) : 8);
  static constexpr int kept = end + 15 & ~15;  // Build::keeps: the CTA's work range
  static constexpr int bytes = Build::keeps ? kept + KEPT_BYTES : end;
};

// Returns what is at a place in shared memory.
template <class T>
DEVICE T *at_place(unsigned char *shared, int place) {
  return reinterpret_cast<T *>(shared + place);
}
template <class T>
DEVICE const T *at_place(const unsigned char *shared, int place) {
  return reinterpret_cast<const T *>(shared + place);
}

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
// is a rounded product, and the sum is not: the rounding error, here at most 1/2, adds to
// exponents. Products of larger scores are rounded first.
constexpr float MOST_FUSED = 8388608.0f;
