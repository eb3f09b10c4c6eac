// What a launch passes; kernels/lean/cuda_params.py has the same structures.
#pragma once
#include "build.cuh"

struct alignas(64) TensorMap {
  u64 words[16];
};

// Division of numbers below 2^31 by a number that the host knows: n / d = n x multiplier >> shift.
struct Divisor {
  u32 multiplier, shift;
};

// The scales of a tensor in 8 bits, by sequence, or page of a cache, and KV head; `at` null: 1.
struct Descale {
  const float *at;
  i64 stride_batch, stride_head;
};

// A number of `DTYPE`, as KV_DTYPE and Q_DTYPE have it.
template <int DTYPE>
struct Number {
  typedef unsigned char Type;
};

template <>
struct Number<0> {
  typedef unsigned short Type;
};

typedef Number<KV_DTYPE>::Type KvNumber;
typedef Number<Q_DTYPE>::Type QNumber;

// PEERS: what a launch knows of the GPUs that share its sequences, in this GPU's memory;
// PeerFields in leanbench/distributed/group.py has the same structure.
struct PeerGroup {
  u64 tickets;       // that CTAs have drawn
  u64 timeout_ns;    // that a CTA waits for the other GPUs
  u64 failed;        // 1: a launch has waited in vain
  u32 *failure;      // on the host: 1 + the rank that did not come in time
  i64 half_numbers;  // 32-bit numbers of half a workspace
  u64 rank;          // of this GPU
  u32 *workspaces[PEERS > 0 ? PEERS : 1];  // by rank, where this GPU sees them
};

struct Params {
  TensorMap k_map, v_map;  // BULK: (head_dim, token, KV head, sequence or page)
  const QNumber *q;
  KvNumber *k, *v;  // APPEND writes into them
  unsigned short *out;
  float *lse;
  u32 *partials;  // the partials workspace: a slot per work range
  const int *cache_seqlens, *block_table;
  const int *cache_leftpad, *cache_batch_idx;
  const float *alibi_slopes;
  const void *sinks;
  const KvNumber *k_new, *v_new;  // APPEND: (sequence, token, KV head, head_dim)
  const unsigned short *rotary_cos, *rotary_sin;  // ROTARY_DIM: (position, ROTARY_DIM / 2)
  i64 stride_q_batch, stride_k_batch, stride_k_head, stride_v_batch, stride_v_head;
  i64 stride_out_batch, stride_slopes_batch;
  i64 stride_k_new_batch, stride_k_new_token, stride_k_new_head;
  i64 stride_v_new_batch, stride_v_new_token, stride_v_new_head;
  int stride_q_token, stride_q_head, stride_k_token, stride_v_token;
  int stride_out_token, stride_out_head;
  int context, batch, kv_heads, stride_table;
  int window_left, window_right;
  int window_tokens;  // WINDOW_LEFT: of LeanTiles at most, less the sequence's query tokens
  int tile_shift;     // log2 of a LeanTile's tokens; FIXED_RUNS: of the shortest run's
  int longest_shift;  // FIXED_RUNS: of the longest run's
  int new_tokens;        // APPEND: of each sequence
  int rotary_positions;  // ROTARY_DIM: for which there are cos and sin
  int rotary_step;       // ROTARY_DIM: positions from a query token to the next, 0 or 1
  // RAGGED, EVEN_SPLITS: empty LeanTiles that an output tile counts at its end in the schedule.
  int end_tiles;
  int min_tiles_per_range, share, longer;
  // RAGGED: sixteenths by which a split may exceed the mean range so that no range crosses from an
  // output tile to the next, and LeanTiles of what a merge through memory takes.
  int longest_steps, merge_tiles;
  // RAGGED, FIXED_RUNS: by_heads only, the others come from the lengths.
  Divisor by_tiles, by_heads, by_share, by_share_plus_1;
  float qk_scale;  // softmax scale x log2(e); SOFTCAP: x 2 / softcap
  float softcap;   // x log2(e)
  u32 epoch;       // of the launch; see kernels/lean/workspace.py
  const u32 *replays;  // added to it
  u64 *events;     // MAX_EVENTS: see kernels/events.py
  const int *cu_seqlens_q;  // RAGGED_Q
  int q_len;                // Q_LEN is 0: query tokens of a sequence; RAGGED_Q: at most
  int total_queries;        // RAGGED_Q: of all sequences
  Descale q_descale, k_descale, v_descale;  // KV_DTYPE
  int attention_chunk;  // ATTENTION_CHUNK: tokens of a chunk
  Divisor by_attention_chunk;
  PeerGroup *peers;
#if PAGE_SCALES
  Descale page_descales[2];  // of K, of V; by page, never null
#endif
};

static_assert(sizeof(Params) == PARAMS_BYTES,
              "Params differs from the one of kernels/lean/cuda_params.py");
