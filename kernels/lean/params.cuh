// Parameters of a launch; kernels/lean/cuda_params.py has the same structures.
#pragma once
#include "build.cuh"

struct alignas(64) TensorMap {
  u64 words[16];
};

// Division of numbers below 2^31 by a divisor known to the host: n / d = n x multiplier >> shift.
struct Divisor {
  u32 multiplier, shift;
};

// Scales of a tensor in 8 bits, by sequence, or page of a cache, and KV head. Null `at`: scale 1.
struct Descale {
  const float *at;
  i64 stride_batch, stride_head;
};

// Type of a number of `DTYPE`, a value of Build::kv_dtype or Build::q_dtype.
template <int DTYPE>
struct Number {
  typedef unsigned char Type;
};

template <>
struct Number<0> {
  typedef unsigned short Type;
};

typedef Number<Build::kv_dtype>::Type KvNumber;
typedef Number<Build::q_dtype>::Type QNumber;

constexpr int GPUS = Build::peers > 0 ? Build::peers : 1;

// Build::peers: state of the GPUs that share a launch's sequences, in this GPU's memory. PeerFields
// in leanbench/distributed/group.py has the same structure.
struct PeerGroup {
  u64 tickets;            // drawn by CTAs
  u64 timeout_ns;         // of a CTA's wait for the other GPUs
  u64 failed;             // 1: a launch has timed out
  u32 *failure;           // on the host: 1 + the rank that was late
  i64 half_numbers;       // 32-bit numbers of half a workspace
  u64 rank;               // of this GPU
  u32 *workspaces[GPUS];  // by rank, as addresses on this GPU
};

struct Params {
  TensorMap k_map, v_map;  // Build::bulk: (head_dim, token, KV head, sequence or page)
  const QNumber *q;
  KvNumber *k, *v;  // Build::append writes into them
  unsigned short *out;
  float *lse;
  u32 *partials;  // the partials workspace: a slot per work range
  const int *cache_seqlens, *block_table;
  u32 *kept;        // Build::keeps: see kept.cuh; null: nothing is kept
  int kept_stride;  // numbers of a CTA
  u32 kept_key;     // of the launch: no other has it
  int context, batch;
  const int *cache_leftpad, *cache_batch_idx;
  const float *alibi_slopes;
  const void *sinks;
  const unsigned short
      *prior;              // Build::prior: (query token, head, Build::v_head_dim) of all sequences
  const float *prior_lse;  // (head, query token)
  const KvNumber *k_new, *v_new;  // Build::append: (sequence, token, KV head, head_dim)
  const unsigned short *rotary_cos,
      *rotary_sin;  // Build::rotary_dim: (position, Build::rotary_dim / 2)
  i64 stride_q_batch, stride_k_batch, stride_k_head, stride_v_batch, stride_v_head;
  i64 stride_out_batch, stride_slopes_batch;
  i64 stride_k_new_batch, stride_k_new_token, stride_k_new_head;
  i64 stride_v_new_batch, stride_v_new_token, stride_v_new_head;
  int stride_q_token, stride_q_head, stride_k_token, stride_v_token;
  int stride_out_token, stride_out_head;
  // The table's are from sequence to sequence, and from KV head to KV head, 0 if these share rows.
  int kv_heads, stride_table, stride_table_head;
  int window_left, window_right;
  int window_tokens;  // Build::window_left: maximum in LeanTiles, less the sequence's query tokens
  int tile_shift;     // log2 of a LeanTile's tokens; Build::fixed_runs: of the shortest run's
  int longest_shift;  // Build::fixed_runs: of the longest run's
  int new_tokens;     // Build::append: of each sequence
  int prior_tokens;   // Build::prior: of each length in cache_seqlens
  int rotary_positions;  // Build::rotary_dim: rows of cos and sin
  int rotary_step;       // Build::rotary_dim: positions between consecutive query tokens, 0 or 1
  // Build::ragged, EVEN_SPLITS: empty LeanTiles counted by the schedule at an output tile's end.
  int end_tiles;
  int min_tiles_per_range, share, longer;
  // Build::ragged: sixteenths by which a split may exceed the mean range so that no range crosses
  // an output tile's boundary (mla.cu: LeanTiles); and the cost of a merge through memory, in
  // LeanTiles.
  int longest_steps, merge_tiles;
  // Build::ragged, Build::fixed_runs: only by_heads; the others follow from the lengths.
  Divisor by_tiles, by_heads, by_share, by_share_plus_1;
  float qk_scale;           // softmax scale x log2(e); Build::softcap: x 2 / softcap
  float softcap;            // x log2(e)
  u32 epoch;                // of the launch; see kernels/lean/workspace.py
  const u32 *replays;       // added to the epoch
  u64 *events;              // Build::max_events: see kernels/events.py
  const int *cu_seqlens_q;  // Build::ragged_q
  int q_len;          // Build::q_len is 0: query tokens of a sequence; Build::ragged_q: at most
  int total_queries;  // Build::ragged_q: of all sequences
  Descale q_descale, k_descale, v_descale;  // Build::kv_dtype
  int attention_chunk;                      // Build::attention_chunk: tokens of a chunk
  Divisor by_attention_chunk;
  int pages;  // of the cache: mla.cu with GATHERS
  PeerGroup *peers;
  // Build::page_scales: of K, of V; by page, never null.
  Descale page_descales[1 + Build::page_scales];
};

static_assert(sizeof(Params) == Build::params_bytes,
              "Params differs from the one of kernels/lean/cuda_params.py");

// Returns the row of the block table with the pages of a sequence's KV head.
DEVICE const int *table_row(const Params &p, int sequence, int kv_head) {
  return p.block_table + (i64)sequence * p.stride_table + (i64)kv_head * p.stride_table_head;
}
