// LeanAttention for many query rows per KV head, on Hopper: stream-K over the schedule of lean.cu,
// with matrix instructions of warpgroups. rows_layout.cuh describes the roles of threads.

#include "events.cuh"
#include "kept.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "rows_attend.cuh"
#include "rows_copy.cuh"
#include "rows_layout.cuh"
#include "rows_output.cuh"
#include "schedule.cuh"
#include "wgmma.cuh"

// Starts the copies of the stage's K, or V, by the lanes of the copying warps. There are `boxes`
// copies; a lane's starts at token `at` in row `outer` of the cache.
template <int KV_COLUMNS>
DEVICE void copy_columns(const TensorMap *map, u32 to, u32 full, u32 empty, int parity, int boxes,
                         int at, int kv_head, int outer, u64 policy) {
  const int lane = threadIdx.x % 32, own = own_copy(), copies = boxes * KV_COLUMNS;
  const int box = own / KV_COLUMNS, column = own % KV_COLUMNS;
  mbarrier_try_wait_parity(empty, parity ^ 1);
  if (lane == 0) {
    const int of_warp = (copies - threadIdx.x / 32 + COPY_WARP + COPY_WARPS - 1) / COPY_WARPS;
    mbarrier_arrive_expect_tx(full, of_warp * Build::box * 128);
  }
  __syncwarp();
  if (own < copies)
    cp_async_bulk_tensor_4d(to + (column * Build::chunk + box * Build::box) * 128, map, full,
                            64 * column, at, kv_head, outer, policy);
}

// Runs a copying warp: K and V of all parts.
DEVICE void copy_all(const Params &p, const WorkRange &range, Position part, int rank, u32 shared) {
  constexpr int BOXES = Build::chunk / Build::box;
  static_assert(!Build::bulk || (BOXES * K_COLUMNS <= 32 && BOXES * V_COLUMNS <= 32));
  Stage stage = {0};
  RowCopies rows;
  while (true) {
    const bool once = row_tiles(part.queries.count) == 1;
    const u64 policy = once ? createpolicy_evict_first() : createpolicy_evict_unchanged();
    const int kv_head = part.head_tile().kv_head;
    const int chunks = part.is_rest ? 0 : part.chunks;
    const int cache_row =
        Build::batch_idx ? __ldg(p.cache_batch_idx + part.sequence) : part.sequence;
    if (!Build::bulk && chunks > 0) rows.look_up(p, part, kv_head, part.token);
    for (int chunk = Build::cluster > 1 ? rank : 0; chunk < chunks;
         chunk += Build::cluster, stage.filled++) {
      const int token = part.token + chunk * Build::chunk;
      if constexpr (!Build::bulk) {
        rows.copy_chunk(p, part, stage, shared, token, kv_head, cache_row);
        continue;
      }
      // No copies past the sequence's end.
      const int boxes = Build::page > 0
                            ? min(Build::chunk, part.tokens - token + Build::box - 1) / Build::box
                            : 1;
      // For the boxes of K and of V.
      int outer[2] = {cache_row, cache_row}, at[2] = {token, token};
#pragma unroll
      for (int i = 0; Build::page > 0 && i < 2; i++) {
        const int box = own_copy() / (i == 0 ? K_COLUMNS : V_COLUMNS);
        at[i] = token + box * Build::box;
        const int page = at[i] / PAGE_OR_1;
        if (box < boxes) outer[i] = __ldg(table_row(p, part.sequence, kv_head) + page);
        at[i] -= page * PAGE_OR_1;
      }
      copy_columns<K_COLUMNS>(&p.k_map, stage.k(shared), stage.barrier(shared, K_FULL),
                              stage.barrier(shared, K_EMPTY), stage.parity(), boxes, at[0], kv_head,
                              outer[0], policy);
      copy_columns<V_COLUMNS>(&p.v_map, stage.v(shared), stage.barrier(shared, V_FULL),
                              stage.barrier(shared, V_EMPTY), stage.parity(), boxes, at[1], kv_head,
                              outer[1], policy);
    }
    part.leave_part(p);
    if (part.at >= range.end) break;
    part.enter_part(p, range.end, 0);
    if (!part.is_rest && threadIdx.x / 32 == COPY_WARP) prefetch_queries(p, part);
  }
  if constexpr (!Build::bulk) {
    // A barrier counts copies only of threads that have not exited.
    cp_async_commit_group();
    cp_async_wait_group<0>();
  }
}

// Called once all computing threads have arrived.
DEVICE void record(Events &events, int kind, int output_tile) {
  if constexpr (Build::max_events == 0) return;
  bar_sync(OF_CONSUMERS, CONSUMERS);
  events.store(kind, output_tile);
}

extern "C" __global__ void __launch_bounds__(THREADS, Build::ctas_per_sm)
    lean_many_rows(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 at = shared_address(shared);
  Events events;
  events.start(p);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (Build::bulk && threadIdx.x == COPY_WARP * 32) {
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
  }
  RangeFinder finder;
  finder.start(p, lane, false);
  if (threadIdx.x == 32) {  // fences of warp 0 would wait for its reads
    for (int stage = 0; stage < Build::stages; stage++) {
      mbarrier_init(at + K_FULL + 8 * stage, COPY_ARRIVALS);
      mbarrier_init(at + V_FULL + 8 * stage, COPY_ARRIVALS);
      mbarrier_init(at + K_EMPTY + 8 * stage, 4 * WARPGROUPS);
      mbarrier_init(at + V_EMPTY + 8 * stage, 4 * WARPGROUPS);
    }
    fence_mbarrier_init_release_cluster();
    fence_proxy_async_shared_cta();
  }
  if constexpr (!Build::keeps) __syncthreads();
  const int rank = Build::cluster > 1 ? cluster_ctarank() : 0;
  WorkRange range;
  Position part;
  if (!finder.find(p, lane, 0, reinterpret_cast<u32 *>(shared + FOUND_AT), range, part)) {
    finder.keep(p, lane);
    events.end();
    return;
  }
  finder.keep(p, lane);
  events.record(BEGIN, 0);

  if (warp >= COPY_WARP) {
    if constexpr (MOVES_REGISTERS) setmaxnreg_dec<COPY_REGISTERS>();
    if (warp < COPY_WARP + COPY_WARPS) copy_all(p, range, part, rank, at);
    if constexpr (Build::cluster > 1) {
      meet_cluster();  // as `merge_cluster` does
      meet_cluster();
    }
  } else {
    if constexpr (MOVES_REGISTERS) setmaxnreg_inc<CONSUMER_REGISTERS>();
    if (WARPGROUPS > 1 && warp >= 4) pass_turn();  // the first is warpgroup 0's
    Stage stage = {0};
    while (true) {
      const int output_tile = part.sequence * head_tiles(p) + part.head;
      if (!part.is_rest) {
        Splits splits;
        splits.find(p, part, range);
        float o[COLUMNS];
        Softmax softmax;
        attend_part(p, part, stage, rank, at, shared, o, softmax);
        record(events, TILES, output_tile);
        float m[2] = {softmax.m[0], softmax.m[1]}, l[2] = {softmax.sum(0), softmax.sum(1)};
        if constexpr (Build::cluster > 1) {
          merge_cluster(p, part, rank, at, shared, o, m, l);
          record(events, REDUCTION, output_tile);
          break;
        }
        bool whole = splits.count == 1;
        if (!whole) {
          const u32 epoch = p.epoch + __ldg(p.replays);
          const Slots slots(p, range, part, splits);
          // One of two splits, and the other's CTA continues with another output tile.
          whole = slots.mergers == 1 && splits.mine == 0;
          if (whole) {
            add_partial(part, slots, 1, o, m, l, epoch);
            record(events, REDUCTION, output_tile);
          } else {
            store_partial(part, slots, splits.mine, o, m, l, epoch);
            if (splits.mine < slots.mergers) {
              merge(p, part, splits, slots, epoch);
              record(events, REDUCTION, output_tile);
              break;
            }
          }
        }
        if (whole) write_rows(p, part, shared, o, m, l);
      }
      part.leave_part(p);
      if (part.at >= range.end) break;
      part.enter_part(p, range.end, 0);
    }
  }
  events.end();
}
