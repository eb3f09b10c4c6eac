// LeanAttention in CUDA C++: stream-K over LeanTiles and the reduction, in one launch.
//
// Compiled at run time, includes nothing. Parameters of the build (-D):
//   HEAD_DIM       64, 80, 96, 128 or 256
//   BF16           1: bf16, 0: fp16
//   GROUP_SIZE     query heads that share a KV head
//   Q_LEN          query tokens of a sequence; row r of an output tile is query token r / GROUP_SIZE
//   ROWS           rows of an output tile, padded: 8, 16 or 32
//   CHUNK          tokens that a warp takes at a time: a multiple of 16
//   WARPS, STAGES  warps of a CTA; chunks that each of them has in flight
//   CTAS_PER_SM    for the registers of a thread
//   CLUSTER        CTAs that share a run; above 1 their partials meet in distributed shared memory
//   BULK           1: bulk tensor copies on mbarriers (compute capability 9.0), 0: 16-byte cp.async (8.0)
//   RAGGED         1: lengths are read from cache_seqlens
//   PAGE           tokens of a page, 0: the cache is contiguous
//   MARKS          time stamps of a CTA, 0: none
//   PARAMS_BYTES   size of Params as the host has it
//
// Each warp has a ring of STAGES chunks of its own and walks every (WARPS x CLUSTER)-th chunk of the run, with its own
// running softmax; warps meet only where an output tile ends. Tokens fill the large dimension of the matrix
// instructions (S^T = K Q^T, O^T = V^T P^T), so a group of up to 8 query heads pads to 8 columns.
//
// Words, schedule and reduction are those of kernels/lean/triton.py; leanbench.core.decomposition.stream_k is the schedule,
// where RAGGED stream_k_with_ends.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int COLUMNS = (HEAD_DIM + 63) / 64;  // 128-byte columns of a row in shared memory
constexpr int STEPS = HEAD_DIM / 16;           // matrix instructions along head_dim
constexpr int ROW_BLOCKS = ROWS / 8;
constexpr int TOKEN_BLOCKS = CHUNK / 16;
constexpr int ALL_ROWS = GROUP_SIZE * Q_LEN;
constexpr int ROW_TILES = (ALL_ROWS + ROWS - 1) / ROWS;
constexpr int ROW_COUNT = ALL_ROWS < ROWS ? ALL_ROWS : ROWS;
constexpr int THREADS = 32 * WARPS;
constexpr int TAKERS = WARPS * CLUSTER;  // warps that share a run
constexpr int HALF_STAGE = COLUMNS * CHUNK * 128;  // K or V of a chunk
constexpr int STAGE = 2 * HALF_STAGE;
constexpr int BOX = PAGE > 0 && PAGE < CHUNK ? PAGE : CHUNK;  // tokens of one copy: none crosses a page
// Query fragments of more rows than this take too many registers: they are read from shared memory each time.
constexpr bool SHARED_QUERY = ROW_BLOCKS * STEPS > 16;
// Blocks of V that are read before the weights are known, as far as registers allow.
constexpr int EARLY = ROW_BLOCKS * STEPS <= 8 ? STEPS : 0;
constexpr int QUERY_ROW = HEAD_DIM + 8;  // 8: rows fall into different banks
constexpr int SCRATCH_ROW = HEAD_DIM + 4;  // 4: rows of a warp's fragments fall into different banks
constexpr int SCRATCH_WARP = ROW_COUNT * SCRATCH_ROW;
constexpr int QUADS = ROW_COUNT * HEAD_DIM / 4;  // 16-byte pieces of a partial
constexpr int ROW_QUADS = HEAD_DIM / 4;
// A CTA of a cluster has a slice of the partial.
constexpr int SLICE = (QUADS + CLUSTER - 1) / CLUSTER;
constexpr int SLOT = 5 * QUADS;  // numbers of a partial on its way: the pieces, then a logarithm for each
constexpr int MERGE_BITS = 4;    // a CTA merges this many partials at once, its own among them; more go through a tree
constexpr int MERGE = 1 << MERGE_BITS;

// Adjacent threads that merge a piece together where there are threads to spare: it pays for reads of other CTAs' slots.
constexpr int team_of(int pieces) {
  int team = 1;
  while (CLUSTER == 1 && team < 2 && 2 * team * pieces <= THREADS) team *= 2;
  return team;
}

// Shared memory, in bytes from a 1024-byte border.
constexpr int RING_BYTES = WARPS * STAGES * STAGE;
constexpr int SCRATCH_BYTES = 4 * WARPS * SCRATCH_WARP;
// States of many rows lie over the ring: nothing is asked for then before the part before has been merged.
constexpr bool OVER_RING = SHARED_QUERY;
constexpr int SCRATCH_AT = OVER_RING ? 0 : RING_BYTES;
// (m, l) of each warp's rows.
constexpr int LOGS_AT = OVER_RING && RING_BYTES > SCRATCH_BYTES ? RING_BYTES : SCRATCH_AT + SCRATCH_BYTES;
constexpr int OWN_AT = LOGS_AT + 8 * WARPS * ROWS;              // CLUSTER > 1: the CTA's partial, for its peers
constexpr int QUERY_AT = OWN_AT + (CLUSTER > 1 ? 16 * QUADS + 16 * ((ROW_COUNT + 3) / 4) : 0);
constexpr int BARRIERS_AT = QUERY_AT + (SHARED_QUERY ? 2 * ROWS * QUERY_ROW : 0);

constexpr int PAGE_OR_1 = PAGE > 0 ? PAGE : 1;
constexpr u32 EMPTY = 0xffffffffu;  // what a slot holds until a number arrives
#define INFINITE __int_as_float(0x7f800000)
constexpr float LOWEST = -1e30f;    // finite: LOWEST - LOWEST is 0
// The exponent of a score is taken against a reference that is moved only where a score passes it by REACH, to LEFT
// below the new maximum: few chunks re-scale, weights stay below 2^15, and fp16 keeps weights down to 2^-31 of them.
constexpr float REACH = 15.0f;
constexpr float LEFT = 7.0f;

struct alignas(64) TensorMap {
  u64 words[16];
};

// Division of numbers below 2^31 by a number that the host knows: n / d = n x multiplier >> shift.
struct Divisor {
  u32 multiplier, shift;
};

struct Params {
  TensorMap k_map, v_map;  // BULK: (head_dim, token, KV head, sequence or page)
  const unsigned short *q, *k, *v;
  unsigned short *out;
  float *lse;
  u32 *partials;  // a slot per run, all EMPTY between launches
  const int *cache_seqlens, *block_table;
  i64 stride_q_batch, stride_k_batch, stride_k_head, stride_v_batch, stride_v_head, stride_out_batch;
  int stride_q_token, stride_q_head, stride_k_token, stride_v_token, stride_out_token, stride_out_head;
  int context, batch, kv_heads, pages_per_sequence;
  int tile_shift;  // log2 of a LeanTile's tokens
  int end_tiles;   // RAGGED: empty LeanTiles that an output tile counts at its end when runs are dealt
  int min_tiles_per_run, share, longer;
  Divisor by_tiles, by_heads, by_share, by_share_plus_1;  // RAGGED: by_heads only, the others come from the lengths
  float qk_scale;  // softmax scale x log2(e)
  u64 *stamps;  // MARKS: see kernels/stamps.py
};

static_assert(sizeof(Params) == PARAMS_BYTES, "kernels/lean/cuda_params.py has another idea of Params");

__device__ __forceinline__ u32 shared_address(const void *pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two numbers in the cache's dtype, `low` in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  if (BF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ u32 transposed(u32 fragment) {
  u32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
  return result;
}

__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

__device__ __forceinline__ void load_two_matrices(u32 (&b)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(address));
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (BF16)
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- copies into the ring ------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void copy_box(u32 to, const TensorMap *map, u32 barrier, int column, int token, int head,
                                         int page) {
#if BULK
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(page)
      : "memory");
#endif
}

__device__ __forceinline__ void copy_16(u32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// ---- the schedule --------------------------------------------------------------------------------------------------

__device__ __forceinline__ int divide(int n, Divisor by) { return (int)((u64)(u32)n * by.multiplier >> by.shift); }

// A quotient below 2^21: through a reciprocal, a third of an integer division's latency.
__device__ __forceinline__ int divide(int n, int d) {
  int q = (int)(__int2float_rz(n) * reciprocal(__int2float_rz(d)));
  const int rest = n - q * d;
  if (rest < 0) q--;
  if (rest >= d) q++;
  return q;
}

__device__ __forceinline__ int lean_tiles_of(int tokens, int shift) {
  int tiles = (tokens + (1 << shift) - 1) >> shift;
  return tiles > 1 ? tiles : 1;  // an empty sequence has one too: somebody writes its output
}

// RAGGED: LeanTiles that an output tile counts when runs are dealt.
__device__ __forceinline__ int counted_tiles(const Params &p, int tokens) {
  return lean_tiles_of(tokens, p.tile_shift) + p.end_tiles;
}

__device__ __forceinline__ int start_of(int run, int share, int longer) {
  return run * share + min(run, longer);
}

__device__ __forceinline__ int run_of(const Params &p, int lean_tile, int share, int longer) {
  const int border = longer * (share + 1);
  const bool early = lean_tile < border;
  const int n = early ? lean_tile : lean_tile - border;
  if (RAGGED) return (early ? 0 : longer) + divide(n, early ? share + 1 : share);
  return (early ? 0 : longer) + divide(n, early ? p.by_share_plus_1 : p.by_share);
}

// A warp's place in its run: the output tile, and its chunks from there to the tile's or the run's end.
struct Place {
  int at;               // LeanTile, on the line of all LeanTiles
  int sequence, head;   // `head`: KV head x ROW_TILES + row tile
  int sequence_start;   // RAGGED: the sequence's first LeanTile
  int tokens, tiles;    // of the sequence
  int first, last;      // LeanTiles of the output tile
  int token;            // first token of the part
  int chunks, chunk;    // of the part; this warp's next

  __device__ __forceinline__ void enter(const Params &p, int end, int taker) {
    if (RAGGED) {
      tokens = __ldg(p.cache_seqlens + sequence);
      tiles = counted_tiles(p, tokens);
      int within = at - sequence_start;
      head = divide(within, tiles);
      first = within - head * tiles;
    } else {
      int output_tile = divide(at, p.by_tiles);
      first = at - output_tile * tiles;
      sequence = divide(output_tile, p.by_heads);
      head = output_tile - sequence * p.kv_heads * ROW_TILES;
    }
    last = min(tiles, first + end - at);
    token = first << p.tile_shift;
    int stop = min(last << p.tile_shift, tokens);
    chunks = max(0, stop - token + CHUNK - 1) / CHUNK;
    chunk = taker;
  }

  __device__ __forceinline__ void leave(const Params &p) {
    at += last - first;
    if (RAGGED) {
      int sequence_end = sequence_start + tiles * p.kv_heads * ROW_TILES;
      if (at >= sequence_end) {
        sequence += 1;
        sequence_start = sequence_end;
      }
    }
  }

  // To the next chunk that this warp takes, whichever part it is of; false at the run's end.
  __device__ __forceinline__ bool settle(const Params &p, int end, int taker) {
    while (chunk >= chunks) {
      leave(p);
      if (at >= end) return false;
      enter(p, end, taker);
    }
    return true;
  }
};

// All LeanTiles of a ragged batch, as counted, and by a second walk the sequence that holds one of them; a warp together.
__device__ __forceinline__ int all_tiles(const Params &p, int lane) {
  int sum = 0;
  for (int i = lane; i < p.batch; i += 32) sum += counted_tiles(p, __ldg(p.cache_seqlens + i));
  return __reduce_add_sync(~0u, sum) * p.kv_heads * ROW_TILES;
}

__device__ __forceinline__ void find_sequence(const Params &p, int lane, Place &place) {
  int seen = 0;
  for (int base = 0; base < p.batch; base += 32) {
    int i = base + lane;
    int tiles = i < p.batch ? counted_tiles(p, __ldg(p.cache_seqlens + i)) * p.kv_heads * ROW_TILES : 0;
    int end = tiles;
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    u32 holders = __ballot_sync(~0u, i < p.batch && seen + end > place.at);
    if (holders) {
      int holder = __ffs(holders) - 1;
      place.sequence = base + holder;
      place.sequence_start = seen + __shfl_sync(~0u, end - tiles, holder);
      return;
    }
    seen += __shfl_sync(~0u, end, 31);
  }
}

// ---- merging -------------------------------------------------------------------------------------------------------

// A 16-byte piece of a partial: four columns of a row, normalised, and the row's logarithm (base 2).
struct Piece {
  float4 o;
  float log;
};

// Several pieces of one row, each against its own reference m, on the way to one. The re-scaling of LeanAttention's
// section III; a fixed order, so the same parts give the same bits.
template <int COUNT>
struct Parts {
  float4 o[COUNT];
  float m[COUNT], l[COUNT];  // l: 0 where there is no part

  // Merges the parts of the TEAM threads of this piece; all of them get the result.
  template <int TEAM>
  __device__ __forceinline__ Piece merged() const {
    float reference = LOWEST;
#pragma unroll
    for (int i = 0; i < COUNT; i++) reference = fmaxf(reference, m[i]);
#pragma unroll
    for (int step = 1; step < TEAM; step *= 2) reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, step));
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float weights = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float weight = exp2_fast(m[i] - reference);
      sum.x += weight * o[i].x, sum.y += weight * o[i].y, sum.z += weight * o[i].z, sum.w += weight * o[i].w;
      weights += weight * l[i];
    }
#pragma unroll
    for (int step = 1; step < TEAM; step *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, step), sum.y += __shfl_xor_sync(~0u, sum.y, step);
      sum.z += __shfl_xor_sync(~0u, sum.z, step), sum.w += __shfl_xor_sync(~0u, sum.w, step);
      weights += __shfl_xor_sync(~0u, weights, step);
    }
    const float scale = weights > 0.0f ? reciprocal(weights) : weights;  // 0 where no token was seen, or NaN
    return {make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale),
            weights == 0.0f ? -INFINITE : reference + log2_fast(weights)};
  }
};

// ---- the mailbox: how partials travel between CTAs -----------------------------------------------------------------

__device__ __forceinline__ u32 bits_of(float x) {
  return x != x ? 0x7fc00000u : __float_as_uint(x);  // no NaN is EMPTY
}

__device__ __forceinline__ void store(u32 *at, uint4 x) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ void store(u32 *at, u32 x) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

__device__ __forceinline__ uint4 load4(const u32 *at) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at)
               : "memory");
  return x;
}

__device__ __forceinline__ u32 load(const u32 *at) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

__device__ __forceinline__ void post(u32 *slot, int quad, const Piece &piece) {
  store(slot + 4 * quad, make_uint4(bits_of(piece.o.x), bits_of(piece.o.y), bits_of(piece.o.z), bits_of(piece.o.w)));
  store(slot + 4 * QUADS + quad, bits_of(piece.log));
}

// Merges to `own` the same piece of `count` < MERGE partials, `stride` numbers apart, once they have arrived. No thread
// but this team reads these numbers. All reads are in flight together; what was too early is read again.
template <int TEAM>
__device__ __forceinline__ Piece collect(const Piece &own, const u32 *slots, i64 stride, int count, int quad) {
  constexpr int EACH = MERGE / TEAM;
  const int member = threadIdx.x % TEAM;
  uint4 numbers[EACH];
  u32 logs[EACH];
  bool missing = true;
  while (missing) {
    missing = false;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int part = i * TEAM + member;
      numbers[i] = make_uint4(0, 0, 0, 0);
      logs[i] = 0xff800000u;  // -infinity
      if (part < count) {
        numbers[i] = load4(slots + part * stride + 4 * quad);
        logs[i] = load(slots + part * stride + 4 * QUADS + quad);
      }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
      missing |= numbers[i].x == EMPTY | numbers[i].y == EMPTY | numbers[i].z == EMPTY | numbers[i].w == EMPTY |
                 logs[i] == EMPTY;
  }
  Parts<EACH> parts;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    parts.o[i] = make_float4(__uint_as_float(numbers[i].x), __uint_as_float(numbers[i].y),
                             __uint_as_float(numbers[i].z), __uint_as_float(numbers[i].w));
    parts.m[i] = __uint_as_float(logs[i]);
    parts.l[i] = 1.0f;
  }
  // A place is free, count < MERGE: the last member's last.
  if (member == TEAM - 1) parts.o[EACH - 1] = own.o, parts.m[EACH - 1] = own.log;
  return parts.template merged<TEAM>();
}

// Empties the slots that `collect` has read, for the next launch.
template <int TEAM>
__device__ __forceinline__ void clear(u32 *slots, i64 stride, int count, int quad) {
#pragma unroll 1
  for (int part = threadIdx.x % TEAM; part < count; part += TEAM) {
    store(slots + part * stride + 4 * quad, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
    store(slots + part * stride + 4 * QUADS + quad, EMPTY);
  }
}

// ---- an output tile's rows -----------------------------------------------------------------------------------------

__device__ __forceinline__ void write_output(const Params &p, const Place &part, int quad, const Piece &piece) {
  const int row = (part.head % ROW_TILES) * ROWS + quad / ROW_QUADS;
  if (ROW_TILES > 1 && row >= ALL_ROWS) return;
  const int head = part.head / ROW_TILES * GROUP_SIZE + row % GROUP_SIZE;
  const int query = row / GROUP_SIZE;
  const int column = quad % ROW_QUADS * 4;
  unsigned short *at = p.out + part.sequence * p.stride_out_batch + (i64)query * p.stride_out_token +
                       (i64)head * p.stride_out_head + column;
  *reinterpret_cast<uint2 *>(at) = make_uint2(pack(piece.o.x, piece.o.y), pack(piece.o.z, piece.o.w));
  if (column == 0)
    p.lse[((i64)part.sequence * p.kv_heads * GROUP_SIZE + head) * Q_LEN + query] = piece.log * 0.6931471805599453f;
}

#if CLUSTER > 1
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 peer_address(u32 address, int rank) {
  u32 result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

__device__ __forceinline__ float4 load_peer4(u32 address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ float load_peer(u32 address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// A piece of the cluster's partial: its CTAs'.
template <int TEAM>
__device__ __forceinline__ Piece merge_cluster(u32 own, int quad) {
  constexpr int EACH = (CLUSTER + TEAM - 1) / TEAM;
  Parts<EACH> parts;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int rank = i * TEAM + threadIdx.x % TEAM;
    const int peer = min(rank, CLUSTER - 1);
    parts.o[i] = load_peer4(peer_address(own + 16 * quad, peer));
    parts.m[i] = rank < CLUSTER ? load_peer(peer_address(own + 16 * QUADS + 4 * (quad / ROW_QUADS), peer)) : -INFINITE;
    parts.l[i] = 1.0f;
  }
  return parts.template merged<TEAM>();
}
#endif

// A piece of the CTA's partial: its warps'.
template <int TEAM>
__device__ __forceinline__ Piece merge_warps(const float *scratch, const float2 *logs, int quad) {
  constexpr int EACH = (WARPS + TEAM - 1) / TEAM;
  const int row = quad / ROW_QUADS;
  Parts<EACH> parts;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int warp = i * TEAM + threadIdx.x % TEAM;
    const int from = min(warp, WARPS - 1);
    const float2 state = logs[from * ROWS + row];
    parts.o[i] = *reinterpret_cast<const float4 *>(scratch + from * SCRATCH_WARP + row * SCRATCH_ROW +
                                                   quad % ROW_QUADS * 4);
    parts.m[i] = warp < WARPS ? state.x : -INFINITE;
    parts.l[i] = state.y;
  }
  return parts.template merged<TEAM>();
}

// ---- time stamps, as in kernels/stamps.py --------------------------------------------------------------------------

constexpr int BEGIN = 0, TILES = 1, REDUCTION = 3;

__device__ __forceinline__ u64 time_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// What a CTA did and when; one thread stores it. Nothing of it is left where MARKS is 0.
struct Stamps {
  u64 *row;
  int marks;

  __device__ __forceinline__ void start(const Params &p) {
    if (MARKS == 0) return;
    row = p.stamps + (u64)blockIdx.x * (4 + 2 * MARKS);
    marks = 0;
    u32 sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if (threadIdx.x == 0) row[0] = time_ns(), row[2] = sm;
  }

  __device__ __forceinline__ void mark(int kind, int output_tile) {
    if (MARKS == 0) return;
    __syncthreads();
    if (threadIdx.x == 0 && marks < MARKS) {
      row[4 + 2 * marks] = (u64)kind << 32 | (u32)output_tile;
      row[5 + 2 * marks] = time_ns();
    }
    marks++;
  }

  __device__ __forceinline__ void end() {
    if (MARKS == 0) return;
    __syncthreads();
    if (threadIdx.x == 0) row[1] = time_ns(), row[3] = marks;
  }
};

// ---- a warp's work -------------------------------------------------------------------------------------------------

constexpr int BOXES = CHUNK / BOX;        // copies of a chunk along its tokens
constexpr int CHUNKS_AHEAD = 32 / BOXES;  // whose pages a warp knows, a box to each lane

struct Warp {
  u32 ring, barriers;  // shared addresses: this warp's stages, and their barriers
  int lane, taker;
  // PAGE > 0: the pages of this warp's next chunks, one read for all of them; how many of the chunks are left.
  int page, known;

  __device__ __forceinline__ void start(unsigned char *shared, int rank, int number, int lane_) {
    lane = lane_;
    taker = rank * WARPS + number;
    known = 0;
    ring = shared_address(shared) + number * STAGES * STAGE;
    barriers = shared_address(shared) + BARRIERS_AT + number * STAGES * 8;
#if BULK
    if (lane == 0) {
      for (int stage = 0; stage < STAGES; stage++) barrier_init(barriers + 8 * stage);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
#endif
  }

  __device__ __forceinline__ void look_up_pages(const Params &p, const Place &place) {
    const int at = place.token + (place.chunk + lane / BOXES * TAKERS) * CHUNK + lane % BOXES * BOX;
    const int *row = p.block_table + (i64)place.sequence * p.pages_per_sequence;
    page = lane < CHUNKS_AHEAD * BOXES && at < place.tokens ? __ldg(row + at / PAGE_OR_1) : 0;
    known = CHUNKS_AHEAD;
  }

  // Asks for K and V of the chunk at `place`.
  __device__ __forceinline__ void request(const Params &p, const Place &place, int stage) {
    const int token = place.token + place.chunk * CHUNK;
    const int kv_head = place.head / ROW_TILES;
    const u32 to = ring + stage * STAGE;
    int pages[BOXES];
    int boxes = 1;
    if (PAGE > 0) {
      if (known == 0 || place.chunk == taker) look_up_pages(p, place);
#pragma unroll
      for (int box = 0; box < BOXES; box++)
        pages[box] = __shfl_sync(~0u, page, (CHUNKS_AHEAD - known) * BOXES + box);
      known--;
      boxes = min(CHUNK, place.tokens - token + BOX - 1) / BOX;  // none past the sequence's end
    }
#if BULK
    if (lane == 0) {
      const u32 barrier = barriers + 8 * stage;
      barrier_expect(barrier, boxes * (2 * COLUMNS * BOX * 128));
#pragma unroll
      for (int box = 0; box < BOXES; box++)
        if (box < boxes) {
          const int at = token + box * BOX;
          const int row = PAGE > 0 ? at % PAGE_OR_1 : at;
          const int outer = PAGE > 0 ? pages[box] : place.sequence;
#pragma unroll
          for (int column = 0; column < COLUMNS; column++) {
            const u32 offset = to + column * CHUNK * 128 + box * BOX * 128;
            copy_box(offset, &p.k_map, barrier, 64 * column, row, kv_head, outer);
            copy_box(offset + HALF_STAGE, &p.v_map, barrier, 64 * column, row, kv_head, outer);
          }
        }
    }
#else
    constexpr int PIECES = HEAD_DIM / 8;  // 16-byte pieces of a row; a row has this many lanes:
    constexpr int ROW_LANES = PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32;
    constexpr int ROWS_AT_ONCE = 32 / ROW_LANES;
    const int column = lane % ROW_LANES, row = lane / ROW_LANES;
    if (PIECES == ROW_LANES || column < PIECES) {
      const u32 lane_to = to + column / 8 * (CHUNK * 128) + row * 128 + ((column % 8 ^ row) << 4);
      const unsigned short *k_head = p.k + kv_head * p.stride_k_head + column * 8;
      const unsigned short *v_head = p.v + kv_head * p.stride_v_head + column * 8;
#pragma unroll
      for (int box = 0; box < BOXES; box++) {
        if (PAGE > 0 && box >= boxes) break;
        const i64 outer = PAGE > 0 ? pages[box] : place.sequence;
        const unsigned short *k = k_head + outer * p.stride_k_batch, *v = v_head + outer * p.stride_v_batch;
        const int at = token + box * BOX;
        const int first = PAGE > 0 ? at % PAGE_OR_1 : at;
        const int last = PAGE > 0 ? PAGE - 1 : place.tokens - 1;  // all of a page is there
#pragma unroll
        for (int i = 0; i < BOX; i += ROWS_AT_ONCE) {
          const i64 from = min(first + row + i, last);  // past the end the last token again: it is masked
          const u32 offset = (lane_to ^ (i % 8 << 4)) + (box * BOX + i) * 128;
          copy_16(offset, k + from * p.stride_k_token);
          copy_16(offset + HALF_STAGE, v + from * p.stride_v_token);
        }
      }
    }
#endif
  }
};

// A warp's share of an output tile: the running softmax over its chunks. Lane `lane` holds rows `pair` and `pair` + 1 of
// each block of 8 rows.
struct State {
  float o[STEPS][ROW_BLOCKS][4];  // O^T: 16 columns of head_dim a step
  float m[ROW_BLOCKS][2];         // the reference that weights are taken against, in units of log2
  float l[ROW_BLOCKS][2];         // this lane's sum of weights

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++) {
#pragma unroll
      for (int j = 0; j < 2; j++) m[rows][j] = LOWEST, l[rows][j] = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[step][rows][i] = 0.0f;
    }
  }

  // Moves the references where a score of this chunk has passed one by REACH.
  __device__ __forceinline__ void keep_up(const float (&s)[TOKEN_BLOCKS][ROW_BLOCKS][4]) {
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
        passed |= top[rows][j] > m[rows][j] + REACH;
      }
    if (!__any_sync(~0u, passed)) return;
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float t = top[rows][j];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) t = fmaxf(t, __shfl_xor_sync(~0u, t, step));
        const float moved = fmaxf(m[rows][j], t - LEFT);
        const float scale = exp2_fast(m[rows][j] - moved);
        m[rows][j] = moved;
        l[rows][j] *= scale;
#pragma unroll
        for (int step = 0; step < STEPS; step++) o[step][rows][j] *= scale, o[step][rows][j + 2] *= scale;
      }
  }

  // Turns scores into weights, as fragments of the second operand.
  __device__ __forceinline__ void weigh(const float (&s)[TOKEN_BLOCKS][ROW_BLOCKS][4],
                                        u32 (&weights)[TOKEN_BLOCKS][ROW_BLOCKS][2]) {
#pragma unroll
    for (int block = 0; block < TOKEN_BLOCKS; block++)
#pragma unroll
      for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float x = exp2_fast(s[block][rows][2 * half] - m[rows][0]);
          const float y = exp2_fast(s[block][rows][2 * half + 1] - m[rows][1]);
          l[rows][0] += x;
          l[rows][1] += y;
          weights[block][rows][half] = transposed(pack(x, y));
        }
  }

  // To shared memory, where the CTA's warps meet.
  __device__ __forceinline__ void store(float *scratch, float2 *logs, int warp, int lane) const {
    const int pair = lane % 4 * 2;
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = rows * 8 + pair + j;
        float sum = l[rows][j];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane < 4) logs[warp * ROWS + row] = make_float2(m[rows][j], sum);
        if (row < ROW_COUNT)
#pragma unroll
          for (int step = 0; step < STEPS; step++) {
            float *to = scratch + warp * SCRATCH_WARP + row * SCRATCH_ROW + step * 16 + lane / 4;
            to[0] = o[step][rows][j];
            to[8] = o[step][rows][j + 2];
          }
      }
  }
};

// The query rows of an output tile, as columns of the second operand.
struct Query {
  u32 fragments[SHARED_QUERY ? 1 : STEPS][ROW_BLOCKS][2];
  const unsigned short *base;  // of the KV head's query heads
  int row_offset;              // of the output tile
  u32 shared_lane;             // SHARED_QUERY: the lane's address

  __device__ __forceinline__ void enter(const Params &p, const Place &part) {
    row_offset = ROW_TILES > 1 ? part.head % ROW_TILES * ROWS : 0;
    base = p.q + part.sequence * p.stride_q_batch + (i64)(part.head / ROW_TILES) * GROUP_SIZE * p.stride_q_head;
  }

  __device__ __forceinline__ const unsigned short *row_of(const Params &p, int row) const {
    return base + (i64)(row / GROUP_SIZE) * p.stride_q_token + (i64)(row % GROUP_SIZE) * p.stride_q_head;
  }

  __device__ __forceinline__ void load(const Params &p, int lane) {
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++) {
      const int within = rows * 8 + lane / 4, row = row_offset + within;
      const bool valid = row < ALL_ROWS && within < ROW_COUNT;
      const unsigned short *at = row_of(p, row) + lane % 4 * 2;
#pragma unroll
      for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          fragments[step][rows][half] = valid ? __ldg(reinterpret_cast<const u32 *>(at + step * 16 + half * 8)) : 0;
    }
  }

  // By all threads; barriers around it are the caller's.
  __device__ __forceinline__ void load_shared(const Params &p, unsigned char *shared) const {
    for (int i = threadIdx.x; i < ROWS * (HEAD_DIM / 8); i += THREADS) {
      const int within = i / (HEAD_DIM / 8), column = i % (HEAD_DIM / 8) * 8, row = row_offset + within;
      u32 words[4] = {0, 0, 0, 0};
      if (row < ALL_ROWS) {
        const u32 *at = reinterpret_cast<const u32 *>(row_of(p, row) + column);
#pragma unroll
        for (int word = 0; word < 4; word++) words[word] = __ldg(at + word);
      }
      *reinterpret_cast<uint4 *>(shared + QUERY_AT + 2 * (within * QUERY_ROW + column)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  __device__ __forceinline__ void fragment(u32 (&b)[2], int step, int rows) const {
    if (SHARED_QUERY)
      load_two_matrices(b, shared_lane + 2 * (rows * 8 * QUERY_ROW + step * 16));
    else
      b[0] = fragments[SHARED_QUERY ? 0 : step][rows][0], b[1] = fragments[SHARED_QUERY ? 0 : step][rows][1];
  }
};

// Addresses of ldmatrix within a stage; the 16-byte piece of a row is XORed with the row (128-byte swizzle).
__device__ __forceinline__ u32 k_address(u32 stage, int lane, int step, int block) {
  const u32 k_lane = (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
  return ((stage + k_lane) ^ (step % 4 << 5)) + step / 4 * (CHUNK * 128) + block * 2048;
}

__device__ __forceinline__ u32 v_address(u32 stage, int lane, int step, int block) {
  const u32 v_lane = HALF_STAGE + ((lane & 7) + (lane >> 4 << 3)) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
  return ((stage + v_lane) ^ (step % 4 << 5)) + step / 4 * (CHUNK * 128) + block * 2048;
}

// S^T = scale K Q^T of a chunk.
__device__ __forceinline__ void scores(float (&s)[TOKEN_BLOCKS][ROW_BLOCKS][4], const Query &query, u32 stage, int lane,
                                       float scale) {
  constexpr int CHAINS = TOKEN_BLOCKS * ROW_BLOCKS == 1 ? 2 : 1;  // sums: few instructions wait for one another
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
  for (int step = 0; step < STEPS; step++) {
    u32 columns[ROW_BLOCKS][2];
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++) query.fragment(columns[rows], step, rows);
#pragma unroll
    for (int block = 0; block < TOKEN_BLOCKS; block++) {
      u32 k[4];
      load_matrices(k, k_address(stage, lane, step, block));
#pragma unroll
      for (int rows = 0; rows < ROW_BLOCKS; rows++)
        multiply(chains[step % CHAINS][block][rows], k, columns[rows][0], columns[rows][1]);
    }
  }
#pragma unroll
  for (int block = 0; block < TOKEN_BLOCKS; block++)
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[block][rows][i] = chains[0][block][rows][i] * scale;
        if (CHAINS > 1) s[block][rows][i] += chains[CHAINS - 1][block][rows][i] * scale;
      }
}

// Hides the tokens that a row does not see: past the sequence's end, or past its query token (the causal tail).
__device__ __forceinline__ void hide(float (&s)[TOKEN_BLOCKS][ROW_BLOCKS][4], int token, int tokens, int row_offset,
                                     int lane) {
#pragma unroll
  for (int block = 0; block < TOKEN_BLOCKS; block++)
#pragma unroll
    for (int rows = 0; rows < ROW_BLOCKS; rows++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int query = (row_offset + rows * 8 + lane % 4 * 2 + i % 2) / GROUP_SIZE;
        const int seen = Q_LEN == 1 ? tokens : min(tokens, tokens - (Q_LEN - 1) + query);
        if (token + block * 16 + lane / 4 + i / 2 * 8 >= seen) s[block][rows][i] = -INFINITE;
      }
}

// What lies in the cache past the sequence may be NaN, which a weight of 0 does not silence.
__device__ __forceinline__ void blank_values(u32 stage, int from, int lane) {
  // Four rows of 128 bytes at once, 16 bytes a lane.
  const u32 lane_at = stage + HALF_STAGE + 16 * lane;
#pragma unroll
  for (int row = 0; row < CHUNK; row += 4)
    if (row + lane / 8 >= from) {
#pragma unroll
      for (int column = 0; column < COLUMNS; column++)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(lane_at + column * CHUNK * 128 + row * 128), "r"(0)
                     : "memory");
    }
#if BULK
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncwarp();
}

// A chunk that has arrived: `tokens` of the sequence, the chunk's first is `token`.
__device__ __forceinline__ void consume(State &state, const Query &query, u32 stage, int token, int tokens, int lane,
                                        float scale) {
  const bool masked = token + CHUNK > tokens - (Q_LEN - 1);
  if (masked) blank_values(stage, tokens - token, lane);
  float s[TOKEN_BLOCKS][ROW_BLOCKS][4];
  scores(s, query, stage, lane, scale);
  // The first values wait in registers while the weights are computed.
  u32 early[EARLY > 0 ? EARLY : 1][4];
#pragma unroll
  for (int step = 0; step < EARLY; step++) load_matrices_transposed(early[step], v_address(stage, lane, step, 0));
  if (masked) hide(s, token, tokens, query.row_offset, lane);
  state.keep_up(s);
  u32 weights[TOKEN_BLOCKS][ROW_BLOCKS][2];
  state.weigh(s, weights);
#pragma unroll
  for (int block = 0; block < TOKEN_BLOCKS; block++)
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u32 v[4];
      if (block == 0 && step < EARLY) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = early[step < EARLY ? step : 0][i];
      } else {
        load_matrices_transposed(v, v_address(stage, lane, step, block));
      }
#pragma unroll
      for (int rows = 0; rows < ROW_BLOCKS; rows++)
        multiply(state.o[step][rows], v, weights[block][rows][0], weights[block][rows][1]);
    }
}

// ---- an output tile's end, all threads together --------------------------------------------------------------------

// The parts that an output tile is cut into, and which of them this run has. Part 0 is the host block's.
struct Cuts {
  int parts, mine;

  __device__ __forceinline__ void find(const Params &p, const Place &part, int run, int share, int longer) {
    parts = 1, mine = 0;
    if (part.last - part.first == part.tiles) return;
    const int tile_start = part.at - part.first;
    const int host = run_of(p, tile_start, share, longer);
    parts = run_of(p, tile_start + part.tiles - 1, share, longer) - host + 1;
    mine = run - host;
  }
};

// A piece of this run's partial goes to the output, to the run's slot, or on up the tree of the output tile's parts.
// A part waits for parts after it only, which belong to runs that started earlier.
template <int TEAM>
__device__ __forceinline__ void deliver(const Params &p, const Place &part, const Cuts &cuts, int run, int quad,
                                        bool valid, Piece piece) {
  u32 *slot = p.partials + (i64)run * SLOT;
  bool mailed = false;
#pragma unroll 1
  for (int level = 0; cuts.parts - 1 >> level; level += MERGE_BITS) {
    mailed = (cuts.mine >> level) % MERGE != 0;
    if (mailed) break;
    const i64 stride = (i64)SLOT << level;
    const int others = valid ? min(MERGE - 1, cuts.parts - 1 - cuts.mine >> level) : 0;
    piece = collect<TEAM>(piece, slot + stride, stride, others, quad);
  }
  if (valid && threadIdx.x % TEAM == 0) {
    if (mailed)
      post(slot, quad, piece);
    else
      write_output(p, part, quad, piece);
  }
#pragma unroll 1
  for (int level = 0; cuts.parts - 1 >> level && (cuts.mine >> level) % MERGE == 0; level += MERGE_BITS) {
    const i64 stride = (i64)SLOT << level;
    if (valid) clear<TEAM>(slot + stride, stride, min(MERGE - 1, cuts.parts - 1 - cuts.mine >> level), quad);
  }
}

#if CLUSTER > 1
// The CTA's partial, where its peers read it.
__device__ __forceinline__ void show(float4 *own, const float *scratch, const float2 *logs) {
  constexpr int TEAM = team_of(QUADS);
#pragma unroll(SHARED_QUERY ? 2 : 1)
  for (int base = 0; base < QUADS; base += THREADS / TEAM) {
    const int quad = base + threadIdx.x / TEAM;
    const Piece piece = merge_warps<TEAM>(scratch, logs, min(quad, QUADS - 1));
    if (quad < QUADS && threadIdx.x % TEAM == 0) {
      own[quad] = piece.o;
      if (quad % ROW_QUADS == 0) reinterpret_cast<float *>(own + QUADS)[quad / ROW_QUADS] = piece.log;
    }
  }
}
#endif

// Merges the CTA's warps, and the cluster's CTAs, and delivers this CTA's slice. All threads stay to the end: they
// shuffle.
__device__ __forceinline__ void finish(const Params &p, const Place &part, const Cuts &cuts, int run, int rank,
                                       unsigned char *shared, bool first_part) {
  const float *scratch = reinterpret_cast<const float *>(shared + SCRATCH_AT);
  const float2 *logs = reinterpret_cast<const float2 *>(shared + LOGS_AT);
#if CLUSTER > 1
  float4 *own = reinterpret_cast<float4 *>(shared + OWN_AT);
  if (!first_part) cluster_wait();  // the peers have read the part before
  show(own, scratch, logs);
  cluster_arrive();
  cluster_wait();
#endif
  constexpr int TEAM = team_of(SLICE);
#pragma unroll 1
  for (int base = 0; base < SLICE; base += THREADS / TEAM) {
    const int within = base + threadIdx.x / TEAM, wanted = rank * SLICE + within;
    const bool valid = within < SLICE && wanted < QUADS;
    const int quad = valid ? wanted : QUADS - 1;
#if CLUSTER > 1
    const Piece piece = merge_cluster<TEAM>(shared_address(own), quad);
#else
    const Piece piece = merge_warps<TEAM>(scratch, logs, quad);
#endif
    deliver<TEAM>(p, part, cuts, run, quad, valid, piece);
  }
#if CLUSTER > 1
  cluster_arrive();
#endif
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// The run that this CTA, or its cluster, walks: LeanTiles [take.at, end). They are dealt from the last to the first, so
// that who merges waits for CTAs that started before it. False: there is none, the lengths need fewer runs.
__device__ __forceinline__ bool find_run(const Params &p, int lane, int taker, Place &take, int &run, int &end, int &share,
                                         int &longer) {
  const int runs = gridDim.x / CLUSTER;
  run = runs - 1 - (int)(blockIdx.x / CLUSTER);
  share = p.share, longer = p.longer;
  take.sequence = take.sequence_start = 0;
  if (RAGGED) {
    const int total = all_tiles(p, lane);
    // Ends are no work to share: how many runs there are is the real LeanTiles' to say.
    const int real = total - p.end_tiles * p.batch * p.kv_heads * ROW_TILES;
    const int used = max(1, min(runs, divide(real, p.min_tiles_per_run)));
    share = divide(total, used);
    longer = total - share * used;
    run -= runs - used;
    if (run < 0) return false;
  } else {
    take.tokens = p.context;
    take.tiles = lean_tiles_of(p.context, p.tile_shift);
  }
  end = start_of(run + 1, share, longer);
  take.at = start_of(run, share, longer);
  if (RAGGED) find_sequence(p, lane, take);
  take.enter(p, end, taker);
  return true;
}

// A warp's ring: how full it is, and which stage comes next.
struct Ring {
  Place put;  // the next chunk to ask for
  bool more;
  int put_stage, empty_stages, stage;
  u32 parity;

  // The one place where copies are asked for: until the ring is full, then one for each chunk that was consumed.
  __device__ __forceinline__ void fill(const Params &p, Warp &warp, int end) {
#pragma unroll 1
    for (; empty_stages > 0; empty_stages--) {
      if (OVER_RING)
        more = put.chunk < put.chunks;
      else
        more = more && put.settle(p, end, warp.taker);
      if (more) {
        warp.request(p, put, put_stage);
        put.chunk += TAKERS;
        put_stage = put_stage + 1 == STAGES ? 0 : put_stage + 1;
      }
#if !BULK
      asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }
  }

  // The address of the next chunk, once it is there.
  __device__ __forceinline__ u32 wait(const Warp &warp) {
#if BULK
    barrier_wait(warp.barriers + 8 * stage, parity >> stage & 1);
    parity ^= 1 << stage;
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    __syncwarp();
#endif
    return warp.ring + stage * STAGE;
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    empty_stages = 1;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) lean(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp_number = threadIdx.x / 32;
  Stamps stamps;
  stamps.start(p);
  int rank = 0;
#if CLUSTER > 1
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  Warp warp;
  warp.start(shared, rank, warp_number, lane);

  Place take;  // the part at hand
  int run, end, share, longer;
  if (!find_run(p, lane, warp.taker, take, run, end, share, longer)) {
    stamps.end();
    return;
  }
  stamps.mark(BEGIN, 0);
  Ring ring = {take, true, 0, STAGES, 0, 0};
  Query query;
  query.shared_lane = shared_address(shared) + QUERY_AT + 2 * ((lane & 7) * QUERY_ROW + (lane >> 3 & 1) * 8);
  bool first_part = true;
  while (true) {
    State state;
    state.reset();
    query.enter(p, take);
    Cuts cuts;
    cuts.find(p, take, run, share, longer);
    bool fresh = true;
    while (true) {
      ring.fill(p, warp, end);
      if (SHARED_QUERY && fresh) {
        if (!first_part) __syncthreads();  // the part before has been computed
        query.load_shared(p, shared);
        __syncthreads();
        fresh = false;
      }
      if (take.chunk >= take.chunks) break;
      if (!SHARED_QUERY && fresh) {
        query.load(p, lane);
        fresh = false;
      }
      const u32 stage = ring.wait(warp);
      consume(state, query, stage, take.token + take.chunk * CHUNK, take.tokens, lane, p.qk_scale);
      ring.release();
      take.chunk += TAKERS;
    }

    if (OVER_RING || !first_part) __syncthreads();  // the ring, or the part before, has been read
    state.store(reinterpret_cast<float *>(shared + SCRATCH_AT), reinterpret_cast<float2 *>(shared + LOGS_AT), warp_number,
                lane);
    __syncthreads();
    const int output_tile = take.sequence * p.kv_heads * ROW_TILES + take.head;
    // What a reduction waits for comes in while it goes on, and counts as part of it.
    const bool reduces = CLUSTER > 1 || (take.first == 0 && cuts.parts > 1);
    if (reduces) stamps.mark(TILES, output_tile);
    finish(p, take, cuts, run, rank, shared, first_part);
    stamps.mark(reduces ? REDUCTION : TILES, output_tile);
    first_part = false;
    take.leave(p);
    if (take.at >= end) break;
    take.enter(p, end, warp.taker);
    if (OVER_RING) {
      __syncthreads();  // the states have been read
#if BULK
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
      ring.put = take;
      ring.empty_stages = STAGES;
    }
  }
#if CLUSTER > 1
  cluster_wait();  // no peer reads this CTA's shared memory any more
#endif
  stamps.end();
}
