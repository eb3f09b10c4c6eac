// Context parallelism: each of Build::peers GPUs has a part of every sequence's tokens. A CTA with
// an output tile's partial of this GPU stores it by NVLink in the peer workspaces of all GPUs,
// including its own. At the end of its work range it merges the partials of all GPUs from its own
// GPU's peer workspace, in the order of their ranks: the bits are the same on all GPUs.
//
// Units are those of the partials workspace: 16 bytes, whole, with the epoch of the launch. A peer
// workspace has two halves, used in turn. A GPU stores for launch n + 2 only after it has all
// others' partials of launch n + 1. All others have then ended launch n, so the overwritten half
// has been read.
#pragma once
#include "params.cuh"
#include "partials.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

// Sum of a launch's tickets; see `PeerExchange::start`.
constexpr u64 LAUNCH_TICKETS = 1 << 20;

// The CTA's state of the exchange, in shared memory.
struct PeerPlaces {
  u32 *workspaces[GPUS];  // the half of this launch
  u32 epoch;
  unsigned short rank, failed;  // failed: a previous launch has timed out
};

static_assert(Build::peers == 0 || sizeof(PeerPlaces) == Shared::peers_bytes,
              "CudaBuild.shared_bytes counts with it");

// Address of a piece in a workspace, independent of the output tiles of the GPU that stores it.
struct PeerPiece {
  i64 at, pieces;

  // Returns false if the row is padding.
  DEVICE bool find(const Params &p, const Position &part, int quad) {
    const HeadTile tile = part.head_tile();
    const int row = tile.row_offset + quad / ROW_QUADS, rows = all_rows(part.queries.count);
    pieces = (i64)p.batch * p.kv_heads * rows * ROW_QUADS;
    at = (((i64)part.sequence * p.kv_heads + tile.kv_head) * rows + row) * ROW_QUADS +
         quad % ROW_QUADS;
    return ONE_ROW_TILE || row < rows;
  }

  // Returns the first of two units stored by rank `source`; the second is `pieces` units further.
  DEVICE u32 *unit(u32 *workspace, int source) const {
    return workspace + 4 * (2 * source * pieces + at);
  }
};

// Stores a piece of this GPU's partial in the workspaces of all GPUs.
DEVICE void push_piece(const Params &p, const Position &part, int quad, const Piece &piece,
                       const PeerPlaces &places) {
  PeerPiece place;
  if (!place.find(p, part, quad)) return;
#pragma unroll
  for (int peer = 0; peer < GPUS; peer++) {
    u32 *unit = place.unit(places.workspaces[peer], places.rank);
    st_relaxed_sys_b128(unit, piece.first_unit(places.epoch));
    st_relaxed_sys_b128(unit + 4 * place.pieces, piece.second_unit(places.epoch));
  }
}

// The CTA's side of the exchange.
struct PeerExchange {
  u64 ticket, failed;  // thread 0
  u32 *workspace;      // thread i < GPUS: of rank i
  int first, count;    // output tiles with partials stored by the CTA
  u64 deadline;        // of a waiting thread; 0: not waiting yet

  // Draws the CTA's ticket. Tickets count launches: those of a launch add up to LAUNCH_TICKETS.
  // This also counts a graph's replays, and no CTA has to be the last.
  DEVICE void start(const Params &p) {
    first = count = 0;
    deadline = 0;
    if (threadIdx.x == 0) {
      ticket = atom_add_relaxed_gpu_u64(&p.peers->tickets,
                                        blockIdx.x == 0 ? LAUNCH_TICKETS - (gridDim.x - 1) : 1);
      failed = p.peers->failed;
    }
    if (threadIdx.x < GPUS) workspace = p.peers->workspaces[threadIdx.x];
  }

  // Called by all threads, before the barrier that precedes the first `push_piece`.
  DEVICE void publish(const Params &p, PeerPlaces &places) {
    if (threadIdx.x >= 32) return;
    const u32 launch = __shfl_sync(~0u, (u32)(ticket / LAUNCH_TICKETS), 0);
    if (threadIdx.x < GPUS)
      places.workspaces[threadIdx.x] = workspace + (launch & 1) * p.peers->half_numbers;
    if (threadIdx.x == 0) {
      // 0 is the content of new workspaces.
      places.epoch = (launch ^ shape(p)) | 1u << 31;
      places.rank = p.peers->rank, places.failed = failed != 0;
    }
  }

  // Returns a hash of the call's shape. GPUs called with different shapes do not accept each
  // other's partials.
  DEVICE static u32 shape(const Params &p) {
    u32 hash = 0;
    for (u32 size : {(u32)p.batch, (u32)p.kv_heads, (u32)p.q_len, (u32)Build::group_size,
                     (u32)Build::v_head_dim})
      hash = (hash ^ size) * 0x9E3779B1u, hash ^= hash >> 15;
    return hash;
  }

  DEVICE void stored(int output_tile) {
    if (count == 0) first = output_tile;
    count++;
  }

  // Waits for all GPUs' partials of a piece and returns them merged; NaN past the deadline.
  DEVICE Piece gather(const Params &p, const PeerPiece &place, const PeerPlaces &places) {
    u32 *workspace = places.workspaces[places.rank];
    uint4 head[GPUS], rest[GPUS];
    while (true) {
      int missing = -1;
#pragma unroll
      for (int peer = 0; peer < GPUS; peer++) {
        const u32 *unit = place.unit(workspace, peer);
        head[peer] = ld_relaxed_sys_b128(unit);
        rest[peer] = ld_relaxed_sys_b128(unit + 4 * place.pieces);
      }
#pragma unroll
      for (int peer = 0; peer < GPUS; peer++)
        if (head[peer].w != places.epoch | rest[peer].w != places.epoch) missing = peer;
      if (missing < 0) break;
      if (is_late(p, places)) {
        st_relaxed_sys_u32(p.peers->failure, 1 + missing);
        p.peers->failed = 1;
        return {make_float4(0.0f, 0.0f, 0.0f, 0.0f), 0.0f, NOT_A_NUMBER};
      }
    }
    Parts<GPUS> parts;
#pragma unroll
    for (int peer = 0; peer < GPUS; peer++) parts.set(peer, head[peer], rest[peer]);
    return parts.template merged<1>();
  }

  // After a timeout, later launches do not wait: many may be queued, or in a graph.
  DEVICE bool is_late(const Params &p, const PeerPlaces &places) {
    const u64 now = globaltimer();
    if (deadline == 0) deadline = now + (places.failed ? 0 : p.peers->timeout_ns);
    return now > deadline;
  }
};
