// LeanAttention in CUDA C++: stream-K over LeanTiles and the reduction, in one launch.
//
// Compiled at run time; build.cuh has the parameters of a build. Each warp has a private ring of
// Build::stages chunks. It walks every RANGE_WARPS-th chunk of the work range with its own running
// softmax. Warps meet only at the end of an output tile. A single warp can process a short output
// tile.
//
// Terms, schedule and reduction are those of kernels/lean/triton.py.

#include "append.cuh"
#include "attend.cuh"
#include "build.cuh"
#include "copy.cuh"
#include "events.cuh"
#include "kept.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "schedule.cuh"

static_assert(Shared::bytes == Build::shared_bytes && 32 * QUADS == Build::partial_bytes,
              "CudaBuild has other sizes");

extern "C" __global__ void __launch_bounds__(THREADS, Build::ctas_per_sm)
    lean(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp_number = threadIdx.x / 32;
  Events events;
  events.start(p);
  const int rank = Build::cluster > 1 ? cluster_ctarank() : 0;
  RangeFinder finder;
  // Before barriers are initialized, because their fences wait for reads.
  if constexpr (Build::cluster == 1) finder.start(p, lane, GUESSES);
  Warp warp;
  warp.start(shared, rank, warp_number, lane);
  bool arrived = Build::cluster > 1;  // at the cluster's barrier
  if constexpr (Build::cluster > 1) {
    start_inbox(shared);
    barrier_cluster_arrive_relaxed();
  }
  Position part;  // the current part
  WorkRange range;
  // A cluster's first split is known without reads, for which its copies do not wait.
  const bool first_split = Build::bulk && Build::cluster > 1 && range.may_be_first_split(p);
  if constexpr (Build::cluster > 1) finder.start(p, lane, GUESSES && !first_split);

  Ring ring;
  ring.start();
  PeerExchange exchange;
  if constexpr (Build::peers > 0) exchange.start(p);
  FirstCopy guess{};
  if constexpr (Build::bulk && Build::ragged) {
    const bool guesses = first_split ? range.guess(p, warp.range_warp, ring.next)
                                     : GUESSES && finder.guess(p, ring.next);
    if (guesses) guess = ring.copy_guess(p, warp);
  }
  u32 *found = at_place<u32>(shared, Shared::kept);
  const bool works = finder.find(p, lane, warp.range_warp, found, range, part);
  if (!works) {
    if (guess.exists) ring.drop_guess(warp);
    finder.keep(p, lane, FirstCopy{});
    if constexpr (Build::cluster > 1) barrier_cluster_wait();
    events.end();
    return;
  }
  events.record(BEGIN, 0);
  // Copies do not depend on the part's other values, so they start before those are read.
  const FirstCopy first = ring.begin(p, warp, part, range.end, guess);
  finder.keep(p, lane, first);
  Query query;
  query.shared_lane =
      shared_address(shared) + Shared::query + 2 * ((lane & 7) * QUERY_ROW + (lane >> 3 & 1) * 8);
  bool first_part = true, fresh = true;  // fresh: the query rows are yet to be loaded
  u32 exchanges = 0;                     // Build::cluster: of partials between its CTAs
  while (true) {
    if constexpr (SCRATCH_OVER_RING) ring.fill(p, warp, range.end);
    State state;
    state.reset();
    fresh |= query.enter_part(p, part);
    Append append;
    if constexpr (Build::append) append.enter_part(p, part, lane);
    if constexpr (Build::alibi) query.load_slopes(p, part, lane);
    const u32 sink = Build::sinks ? load_sink(p, part) : 0;
    Splits splits;
    splits.find(p, part, range);
    // Read early, used at the end of the part.
    const u32 replays = splits.count > 1 ? __ldg(p.replays) : 0;
    const float v_scale = v_scale_of(p, part, 0);
    const float second_v_scale = Build::heads_of_row > 1 ? v_scale_of(p, part, 1) : 1.0f;
    while (true) {
      if (STAGED_QUERY && fresh && !part.is_rest) {
        if (Build::shared_query && !first_part)
          __syncthreads();  // the previous part has been computed
        query.load_shared(p, shared);
        __syncthreads();
        if constexpr (Build::shared_query && Build::kv_dtype != 0)
          query.load_scales(p, part, shared, lane);
        if constexpr (!Build::shared_query) query.load_staged();
        fresh = false;
      }
      if (part.chunk >= part.chunks) break;
      if (!STAGED_QUERY && fresh) {
        query.load(p, part, lane);
        fresh = false;
      }
      const bool appends = Build::append && append.starts(p, part, lane);
      const u32 stage = ring.wait(warp);
      if (appends) append.write_chunk(p, part, stage, lane);
      const u32 scales = Build::page_scales ? warp.scales(ring.stage) : 0;
      attend_chunk(state, p, query, stage, scales, part, lane);
      ring.release();
      part.chunk += part.step();
      ring.fill(p, warp, range.end);
    }

    const int output_tile = part.sequence * head_tiles(p) + part.head;
    float *scratch = at_place<float>(shared, Shared::scratch);
    float2 *logs = at_place<float2>(shared, Shared::logs);
    const bool is_shared = part.is_shared();
    if (is_shared) {
      // The ring, or the previous part, has been read.
      if (SCRATCH_OVER_RING || !first_part) __syncthreads();
      state.store(scratch, logs, warp_number, lane, v_scale * KV_UNIT, second_v_scale * KV_UNIT);
      if (Build::sinks && threadIdx.x < Build::rows)
        at_place<u32>(shared, Shared::sinks)[threadIdx.x] = sink;
      if (Build::peers && first_part)
        exchange.publish(p, *at_place<PeerPlaces>(shared, Shared::peers));
      if (Build::peers && part.first == 0) exchange.stored(output_tile);
      __syncthreads();
      // Values for a reduction arrive during it and count as part of it.
      const bool reduces = Build::cluster > 1 || (part.first == 0 && splits.count > 1);
      if (reduces) events.record(TILES, output_tile);
      const int slot = Build::fixed_runs ? part.at : range.slot;
      if (WRITES_ALONE && __builtin_expect(part.chunks <= Build::warps && splits.count == 1, 0)) {
        if (rank == 0) write_alone(p, part, shared);
      } else {
        reduce_part(p, part, splits, slot, rank, shared, exchanges++, p.epoch + replays);
        arrived = false;
      }
      events.record(reduces ? REDUCTION : TILES, output_tile);
      first_part = false;
    } else if (part.packed) {
      if (part.mine) {
        state.store(scratch, logs, warp_number, lane, v_scale * KV_UNIT, second_v_scale * KV_UNIT);
        __syncwarp();
        write_packed(p, part, warp_number, lane, scratch, logs);
        __syncwarp();
      }
      events.record(TILES, output_tile);
    }
    part.leave_part(p);
    if (part.at >= range.end) break;
    if (Build::cluster > 1 && !arrived) {
      // The inbox has been read. A releasing arrival would wait for the output's stores, too.
      barrier_cluster_arrive_relaxed();
      arrived = true;
    }
    part.enter_part(p, range.end, warp.range_warp);
    if (Build::packs && is_shared && part.packed) __syncthreads();  // the scratch has been read
    if constexpr (SCRATCH_OVER_RING) {
      __syncthreads();  // the states have been read
      if constexpr (Build::bulk) fence_proxy_async_shared_cta();
      ring.next = part;
      ring.empty_stages = Build::stages;
    }
  }
  if constexpr (Build::peers > 0) {
    collect_peers(p, exchange, rank, shared);
    // The wait for partials of other GPUs counts as part of the reduction.
    if (exchange.count > 0) events.record(REDUCTION, exchange.first);
  }
  if (Build::cluster > 1 && arrived) barrier_cluster_wait();
  events.end();
}
