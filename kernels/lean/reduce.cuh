// The end of an output tile, by all threads: merges the CTA's warps, the cluster's CTAs and the
// output tile's splits, and writes the rows.
#pragma once
#include "params.cuh"
#include "partials.cuh"
#include "peers.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

// Build::sinks: returns the sink of the output tile's row `row`.
template <class Row>
DEVICE u32 sink_of(const Params &p, const Position &part, Row row) {
  const HeadTile tile = part.head_tile();
  const int head = tile.kv_head * Build::group_size + (tile.row_offset + row) % Build::group_size;
  return Build::sinks == 1 ? __ldg(static_cast<const u32 *>(p.sinks) + head)
                           : __ldg(static_cast<const unsigned short *>(p.sinks) + head);
}

// Build::sinks: returns the sink of the part's row threadIdx.x. It is read at the beginning of the
// part and arrives by its end.
DEVICE u32 load_sink(const Params &p, const Position &part) {
  return threadIdx.x < Build::rows ? sink_of(p, part, threadIdx.x) : 0;
}

// Returns a sink's logit in units of log2.
DEVICE float logit_of(u32 sink) {
  const u32 bits = Build::sinks == 3 ? sink << 16 : sink;
  return (Build::sinks == 2 ? cvt_f32_f16(bits) : __uint_as_float(bits)) * LOG2_E;
}

// Returns a number of Q's dtype.
DEVICE float number_of_half(u32 bits) {
  return Build::bf16 ? __uint_as_float(bits << 16) : cvt_f32_f16(bits);
}

// Build::prior: adds the result of other tokens to four columns of a query token's head.
DEVICE void add_prior(const Params &p, const Position &part, int query, int head, int column,
                      Piece &piece) {
  const int count = part.queries.count;
  const int token = query + (Build::ragged_q ? part.queries.first : part.sequence * count);
  const int tokens = Build::ragged_q ? p.total_queries : p.batch * count;
  const i64 row = (i64)token * p.kv_heads * Build::group_size + head;
  const uint2 o =
      __ldg(reinterpret_cast<const uint2 *>(p.prior + row * Build::v_head_dim + column));
  piece.add_result(make_float4(number_of_half(o.x & 0xffff), number_of_half(o.x >> 16),
                               number_of_half(o.y & 0xffff), number_of_half(o.y >> 16)),
                   __ldg(p.prior_lse + (i64)head * tokens + token) * LOG2_E);
}

// Writes four columns of the output; the first four include the row's LSE. `sink`: of the row.
DEVICE void write_output(const Params &p, const Position &part, int quad, Piece piece, u32 sink) {
  const HeadTile tile = part.head_tile();
  const int row = tile.row_offset + quad / ROW_QUADS;
  if (!ONE_ROW_TILE && row >= all_rows(part.queries.count)) return;
  const int head = tile.kv_head * Build::group_size + row % Build::group_size;
  const int query = row / Build::group_size;
  const int column = quad % ROW_QUADS * 4;
  unsigned short *at = p.out +
                       (Build::ragged_q ? part.queries.first * (i64)p.stride_out_token
                                        : part.sequence * p.stride_out_batch) +
                       (i64)query * p.stride_out_token + (i64)head * p.stride_out_head + column;
  if constexpr (Build::prior) add_prior(p, part, query, head, column, piece);
  if constexpr (Build::sinks) piece.add_logit(logit_of(sink));
  const float4 o = piece.scaled();
  *reinterpret_cast<uint2 *>(at) =
      make_uint2(cvt_rn_x2<Build::bf16>(o.x, o.y), cvt_rn_x2<Build::bf16>(o.z, o.w));
  if (column == 0)
    p.lse[(Build::ragged_q ? (i64)head * p.total_queries + part.queries.first
                           : ((i64)part.sequence * p.kv_heads * Build::group_size + head) *
                                 part.queries.count) +
          query] = piece.lse();
}

// Writes a piece of this GPU's result to the output, or to all GPUs that share the sequence.
DEVICE void finish_piece(const Params &p, const Position &part, int quad, const Piece &piece,
                         const unsigned char *shared) {
  const u32 *sinks = at_place<u32>(shared, Shared::sinks);
  if constexpr (Build::peers > 0)
    push_piece(p, part, quad, piece, *at_place<PeerPlaces>(shared, Shared::peers));
  else
    write_output(p, part, quad, piece, Build::sinks ? sinks[quad / ROW_QUADS] : 0);
}

// Writes the output tiles that the CTA, with its cluster, has pushed, from all GPUs' partials.
DEVICE void collect_peers(const Params &p, PeerExchange &exchange, int rank,
                          const unsigned char *shared) {
  const PeerPlaces &places = *at_place<PeerPlaces>(shared, Shared::peers);
#pragma unroll 1
  for (int i = threadIdx.x; i < exchange.count * SLICE; i += THREADS) {
    const int tile = exchange.first + i / SLICE, quad = rank * SLICE + i % SLICE;
    if (quad >= QUADS) continue;
    Position part;
    part.sequence = divide(tile, p.by_heads);
    part.head = tile - part.sequence * head_tiles(p);
    part.enter_head(p);
    PeerPiece place;
    if (!place.find(p, part, quad)) continue;
    write_output(p, part, quad, exchange.gather(p, place, places),
                 Build::sinks ? sink_of(p, part, (u32)(quad / ROW_QUADS)) : 0);
  }
}

// Merges a piece of the CTA's partial from its warps.
template <int TEAM>
DEVICE Piece merge_warps(const float *scratch, const float2 *logs, int quad) {
  constexpr int EACH = (Build::warps + TEAM - 1) / TEAM;
  const int row = quad / ROW_QUADS;
  Parts<EACH> parts;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int warp = i * TEAM + threadIdx.x % TEAM;
    const int from = min(warp, Build::warps - 1);
    const float2 state = logs[from * Build::rows + row];
    parts.o[i] = *reinterpret_cast<const float4 *>(scratch + from * SCRATCH_WARP +
                                                   row * SCRATCH_ROW + quad % ROW_QUADS * 4);
    parts.m[i] = warp < Build::warps ? state.x : -INFINITE;
    parts.l[i] = state.y;
  }
  return parts.template merged<TEAM>();
}

// Writes a packed output tile, by the warp that walked it.
DEVICE void write_packed(const Params &p, const Position &part, int warp, int lane,
                         const float *scratch, const float2 *logs) {
#pragma unroll 2
  for (int quad = lane; quad < QUADS; quad += 32) {
    const int row = quad / ROW_QUADS;
    const float2 state = logs[warp * Build::rows + row];
    write_output(p, part, quad,
                 {*reinterpret_cast<const float4 *>(scratch + warp * SCRATCH_WARP +
                                                    row * SCRATCH_ROW + quad % ROW_QUADS * 4),
                  state.x, state.y},
                 0);
  }
}

// Merges piece `within` of the CTA's slice from the cluster's CTAs.
DEVICE Piece merge_cluster(const unsigned char *shared, int rank, int within) {
  const float4 *inbox = reinterpret_cast<const float4 *>(shared + Shared::inbox);
  const float2 *logs = reinterpret_cast<const float2 *>(shared + Shared::inbox_logs);
  const int row = (rank * SLICE + within) / ROW_QUADS - rank * SLICE / ROW_QUADS;
  Parts<Build::cluster> parts;
#pragma unroll
  for (int i = 0; i < Build::cluster; i++) {
    const float2 state = logs[i * SLICE_ROWS + row];
    parts.o[i] = inbox[i * SLICE + within];
    parts.m[i] = state.x, parts.l[i] = state.y;
  }
  return parts.template merged<1>();
}

// Initialises the barrier of the CTA's inbox.
DEVICE void start_inbox(unsigned char *shared) {
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(shared) + Shared::inbox_barrier);
    fence_mbarrier_init_release_cluster();
  }
  __syncwarp();
}

// Stores each slice of the CTA's partial in the inbox of its CTA, and waits for the own inbox.
DEVICE void exchange_slices(const float *scratch, const float2 *logs, u32 shared, int rank,
                            u32 parity) {
  if (threadIdx.x == 0) {
    const int first = rank * SLICE, count = max(0, min(SLICE, QUADS - first));
    const int rows = count > 0 ? (first + count - 1) / ROW_QUADS - first / ROW_QUADS + 1 : 0;
    mbarrier_arrive_expect_tx(shared + Shared::inbox_barrier,
                              Build::cluster * (16 * count + 8 * rows));
  }
#pragma unroll(Build::shared_query ? 2 : 1)
  for (int quad = threadIdx.x; quad < QUADS; quad += THREADS) {
    const Piece piece = merge_warps<1>(scratch, logs, quad);
    const int owner = quad / SLICE, within = quad - owner * SLICE, row = quad / ROW_QUADS;
    const u32 peer = mapa_shared_cluster(shared, owner), barrier = peer + Shared::inbox_barrier;
    st_async_v4(peer + Shared::inbox + 16 * (rank * SLICE + within), piece.o, barrier);
    if (within == 0 || quad % ROW_QUADS == 0) {
      const int at = rank * SLICE_ROWS + row - owner * SLICE / ROW_QUADS;
      st_async_v2(peer + Shared::inbox_logs + 8 * at, make_float2(piece.m, piece.l), barrier);
    }
  }
  mbarrier_try_wait_parity_cluster(shared + Shared::inbox_barrier, parity);
}

// Writes an output tile by the cluster's first CTA, which has computed all of its chunks.
DEVICE void write_alone(const Params &p, const Position &part, const unsigned char *shared) {
  const float *scratch = at_place<float>(shared, Shared::scratch);
  const float2 *logs = at_place<float2>(shared, Shared::logs);
#pragma unroll 1
  for (int quad = threadIdx.x; quad < QUADS; quad += THREADS)
    finish_piece(p, part, quad, merge_warps<1>(scratch, logs, quad), shared);
}

// Sends a piece of this work range's partial to the output, to the range's slot, or up the tree of
// the output tile's splits. A split waits only for later splits, which belong to ranges that
// started earlier.
template <int TEAM>
DEVICE void reduce_partials(const Params &p, const Position &part, const Splits &splits, int range,
                            int quad, bool valid, Piece piece, const unsigned char *shared,
                            u32 epoch) {
  u32 *slot = p.partials + (i64)range * (Build::partial_bytes / 4);
  bool stored = false;
#pragma unroll 1
  for (int level = 0; splits.count - 1 >> level; level += MERGE_BITS) {
    stored = (splits.mine >> level) % MERGE != 0;
    if (stored) break;
    const i64 stride = (i64)(Build::partial_bytes / 4) << level;
    const int others = valid ? min(MERGE - 1, splits.count - 1 - splits.mine >> level) : 0;
    piece = gather_partials<TEAM>(piece, slot + stride, stride, others, quad, epoch);
  }
  if (valid && threadIdx.x % TEAM == 0) {
    if (stored)
      store_partial(slot, quad, piece, epoch);
    else
      finish_piece(p, part, quad, piece, shared);
  }
}

// Merges the CTA's warps and the cluster's CTAs, and reduces this CTA's slice. All threads stay
// until the end, because they shuffle. `exchanges`: earlier ones of the cluster's CTAs.
DEVICE void reduce_part(const Params &p, const Position &part, const Splits &splits, int range,
                        int rank, unsigned char *shared, u32 exchanges, u32 epoch) {
  const float *scratch = at_place<float>(shared, Shared::scratch);
  const float2 *logs = at_place<float2>(shared, Shared::logs);
  if constexpr (Build::cluster > 1) {
    barrier_cluster_wait();  // the peers have started, and read the previous part
    exchange_slices(scratch, logs, shared_address(shared), rank, exchanges % 2);
  }
  constexpr int TEAM = team_of(SLICE);
#pragma unroll 1
  for (int base = 0; base < SLICE; base += THREADS / TEAM) {
    const int within = base + threadIdx.x / TEAM, wanted = rank * SLICE + within;
    const bool valid = within < SLICE && wanted < QUADS;
    const int quad = valid ? wanted : QUADS - 1;
    const Piece piece = Build::cluster > 1 ? merge_cluster(shared, rank, valid ? within : 0)
                                           : merge_warps<TEAM>(scratch, logs, quad);
    reduce_partials<TEAM>(p, part, splits, range, quad, valid, piece, shared, epoch);
  }
}
