// A warp's ring of stages, and the copies of K and V into it. With Build::stages = 3, while the
// warp attends to its chunk 4:
//
//       stage 0         stage 1         stage 2
//   +---------------+---------------+---------------+
//   |    chunk 6    |    chunk 4    |    chunk 5    |  K of Build::chunk tokens, then V;
//   |  on its way   |  being read   |   on its way  |  chunk i is in stage i % Build::stages
//   +---------------+---------------+---------------+
//                     ^ stage, and next_stage: for chunk 7, once released
//
//   wait     for the chunk's bytes. With Build::bulk, lane 0 sets their number at the mbarrier, and
//            the last of them flip its phase (`parity`). Without, and for page scales, for this
//            lane's oldest group of cp.async; then __syncwarp, because lanes read what others copy.
//   release  for all lanes' reads: __syncwarp.
//   fill     for nothing: it starts the copy into the stage just released.
//
// A proxy fence follows what threads write into a stage (zero_values, appended tokens, states over
// the ring), because bulk copies write through another proxy.
#pragma once
#include "params.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

constexpr int BOXES = Build::chunk / Build::box;  // copies of a chunk along its tokens
// Pages held by a warp: a box per lane, or several.
constexpr int CHUNKS_AHEAD = BOXES <= 32 ? 32 / BOXES : 1;
constexpr int LANE_PAGES = (BOXES + 31) / 32;
// 16-byte pieces of a row in shared memory.
constexpr int K_PIECES = Build::heads_of_row * KV_BYTES * K_STEPS;
constexpr int V_PIECES = Build::heads_of_row * KV_BYTES * V_STEPS;
constexpr int PIECE_NUMBERS = 16 / KV_BYTES;

// A warp and the addresses of its stages.
struct Warp {
  u32 ring, barriers;  // shared addresses of this warp's stages and barriers
  int lane, range_warp;
  // Build::page > 0: pages of this warp's next chunks, fetched by a single read, and the number of
  // chunks left.
  int page[LANE_PAGES], known;

  DEVICE void start(unsigned char *shared, int rank, int number, int lane_) {
    lane = lane_;
    range_warp = rank * Build::warps + number;
    known = 0;
    ring = shared_address(shared) + number * Build::stages * STAGE;
    barriers = shared_address(shared) + Shared::barriers +
               number * Build::stages * (Build::page_scales ? 8 + 8 * BOXES : 8);
    if constexpr (!Build::bulk) return;
    if (lane == 0) {
      for (int stage = 0; stage < Build::stages; stage++) mbarrier_init(barriers + 8 * stage);
      fence_mbarrier_init_release_cluster();
      fence_proxy_async_shared_cta();
    }
    __syncwarp();
  }

  // Reads the pages from chunk `chunk` on.
  DEVICE void look_up_pages(const Params &p, const Position &position, int kv_head, int chunk) {
    const int *row = table_row(p, position.sequence, kv_head);
#pragma unroll
    for (int i = 0; i < LANE_PAGES; i++) {
      const int box = lane + 32 * i;
      const int at = position.token + (chunk + box / BOXES * position.step()) * Build::chunk +
                     box % BOXES * Build::box;
      page[i] =
          box < CHUNKS_AHEAD * BOXES && at < position.tokens ? __ldg(row + at / PAGE_OR_1) : 0;
    }
    known = CHUNKS_AHEAD;
  }

  // Returns the address of the scales of a stage's pages: a pair for each copy of K and V along its
  // tokens.
  DEVICE u32 scales(int stage) const { return barriers + 8 * Build::stages + stage * (8 * BOXES); }

  // Starts the copies of the page scales of the chunk at `position`. Its pages are those held from
  // `first` on.
  DEVICE void copy_scales(const Params &p, const Position &position, int first, int stage) {
    const int token = position.token + position.chunk * Build::chunk;
    const int kv_head = position.head_tile().kv_head;
    // Lanes copy scales of K and of V alternately.
#pragma unroll
    for (int i = 0; i < (2 * BOXES + 31) / 32; i++) {
      const int place = lane + 32 * i, box = place / 2;
      const i64 own = __shfl_sync(~0u, page[i / 2], first + box);
      if (box >= BOXES) continue;
      const Descale &of = p.page_descales[lane % 2];
      const float *from = of.at + own * of.stride_batch + kv_head * of.stride_head;
      // Zeros past the sequence's end: weights of 0 do not remove NaN.
      cp_async_ca_4(scales(stage) + 4 * place, from, token + box * Build::box < position.tokens);
    }
  }

  // Starts the copy of this lane's pieces of a row of K or V; `column` is the first of PIECES.
  // Pieces past head_dim become zeros.
  template <int PIECES, int DIM>
  DEVICE static void copy_row(u32 to, const KvNumber *from, int column) {
#pragma unroll
    for (int i = 0; i < PIECES; i += 32) {
      if (PIECES > 32 && i + 32 > PIECES && column + i >= PIECES) break;  // rows of 72 pieces
      const u32 at = to + i / COLUMN_PIECES * (Build::chunk * Build::column_bytes);
      if constexpr (DIM % 16 == 0)
        cp_async_cg_16(at, from + PIECE_NUMBERS * i);
      else
        cp_async_cg_16(at, from + PIECE_NUMBERS * i, column + i < DIM / PIECE_NUMBERS);
    }
  }

  // Starts the copies of a chunk's rows, several at once. `pages`: of the boxes, unless each row
  // has its own.
  DEVICE void copy_by_lanes(const Params &p, const Position &position, int token, int kv_head,
                            int cache_row, const int (&pages)[BOXES], int boxes, u32 to) {
    // Lanes of a row, each with the same pieces of K and V.
    constexpr int PIECES = K_PIECES > V_PIECES ? K_PIECES : V_PIECES;
    constexpr int ROW_LANES = PIECES <= COLUMN_PIECES ? COLUMN_PIECES : PIECES <= 16 ? 16 : 32;
    constexpr int ROWS_AT_ONCE = 32 / ROW_LANES;
    const int column = lane % ROW_LANES, row = lane / ROW_LANES;
    const bool has_k = K_PIECES >= ROW_LANES || column < K_PIECES;
    const bool has_v = V_PIECES >= ROW_LANES || column < V_PIECES;
    const u32 lane_to = to + column / COLUMN_PIECES * (Build::chunk * Build::column_bytes) +
                        row * Build::column_bytes +
                        ((column % COLUMN_PIECES ^ swizzle_of(row)) << 4);
    const KvNumber *k_head = p.k + kv_head * p.stride_k_head + column * PIECE_NUMBERS;
    const KvNumber *v_head = p.v + kv_head * p.stride_v_head + column * PIECE_NUMBERS;
    if constexpr (PAGED_ROWS) {
#pragma unroll
      for (int i = 0; i < Build::chunk; i += ROWS_AT_ONCE) {
        const i64 outer = __shfl_sync(~0u, page[i / Build::box / 32],
                                      (CHUNKS_AHEAD - known) * BOXES + (i + row) / Build::box);
        const int at = token + i + row, from = at % PAGE_OR_1;
        const u32 offset = (lane_to ^ (swizzle_of(i % 8) << 4)) + i * Build::column_bytes;
        if (at >= position.tokens) continue;  // the stage's contents are masked
        if (has_k)
          copy_row<K_PIECES, Build::head_dim>(
              offset, k_head + outer * p.stride_k_batch + (i64)from * p.stride_k_token, column);
        if (has_v)
          copy_row<V_PIECES, Build::v_head_dim>(
              offset + V_AT, v_head + outer * p.stride_v_batch + (i64)from * p.stride_v_token,
              column);
      }
      known--;
      // Read for the next copy, in flight while others are started.
      if (known == 0) look_up_pages(p, position, kv_head, position.chunk + position.step());
    } else if (has_k || has_v) {
#pragma unroll
      for (int box = 0; box < BOXES; box++) {
        if (Build::page > 0 && box >= boxes) break;
        const i64 outer = Build::page > 0 ? pages[box] : cache_row;
        const KvNumber *k = k_head + outer * p.stride_k_batch;
        const KvNumber *v = v_head + outer * p.stride_v_batch;
        const int at = token + box * Build::box;
        const int first = Build::page > 0 ? at % PAGE_OR_1 : at;
        const int last =
            Build::page > 0 ? Build::page - 1 : position.tokens - 1;  // a page is complete
#pragma unroll
        for (int i = 0; i < Build::box; i += ROWS_AT_ONCE) {
          // Past the end, the last token is copied again and masked.
          const i64 from = min(first + row + i, last);
          const u32 offset =
              (lane_to ^ (swizzle_of(i % 8) << 4)) + (box * Build::box + i) * Build::column_bytes;
          if (has_k)
            copy_row<K_PIECES, Build::head_dim>(offset, k + from * p.stride_k_token, column);
          if (has_v)
            copy_row<V_PIECES, Build::v_head_dim>(offset + V_AT, v + from * p.stride_v_token,
                                                  column);
        }
      }
    }
  }

  // Starts the bulk copies of a box, which write the swizzle; called by one lane.
  DEVICE static void copy_box(const Params &p, u32 to, u32 barrier, int row, int kv_head, int outer,
                              u64 policy) {
#pragma unroll
    for (int column = 0; column < K_COLUMNS || column < V_COLUMNS; column++) {
      const u32 offset = to + column * Build::chunk * Build::column_bytes;
      const int x = COLUMN_NUMBERS * column - (SHIFTED_ROWS ? kv_head % 2 * 32 : 0);
      if (column < K_COLUMNS)
        cp_async_bulk_tensor_4d(offset, &p.k_map, barrier, x, row, kv_head, outer, policy);
      if (column < V_COLUMNS)
        cp_async_bulk_tensor_4d(offset + V_AT, &p.v_map, barrier, x, row, kv_head, outer, policy);
    }
  }

  // Starts the copies of K and V of the chunk at `position`; a guess copies no scales.
  DEVICE void copy_chunk(const Params &p, const Position &position, int stage, bool guess) {
    const int token = position.token + position.chunk * Build::chunk;
    const int kv_head = position.head_tile().kv_head;
    const int cache_row =
        Build::batch_idx ? __ldg(p.cache_batch_idx + position.sequence) : position.sequence;
    const u32 to = ring + stage * STAGE;
    int pages[BOXES];
    int boxes = 1;
    if (Build::page > 0 && (known == 0 || position.chunk == position.first_chunk(range_warp)))
      look_up_pages(p, position, kv_head, position.chunk);
    if (Build::page_scales && !guess)
      copy_scales(p, position, (CHUNKS_AHEAD - known) * BOXES, stage);
    if constexpr (Build::page > 0 && !PAGED_ROWS) {
#pragma unroll
      for (int box = 0; box < BOXES; box++)
        pages[box] = __shfl_sync(~0u, page[0], (CHUNKS_AHEAD - known) * BOXES + box);
      known--;
      boxes = min(Build::chunk, position.tokens - token + Build::box - 1) /
              Build::box;  // none past the sequence's end
    }
    if constexpr (!Build::bulk) {
      copy_by_lanes(p, position, token, kv_head, cache_row, pages, boxes, to);
    } else if (lane == 0) {
      const u32 barrier = barriers + 8 * stage;
      mbarrier_arrive_expect_tx(
          barrier, boxes * ((K_COLUMNS + V_COLUMNS) * Build::box * Build::column_bytes));
      // Other row tiles reread the same K and V from the L2.
      const bool once =
          ONE_ROW_TILE || (Build::q_len == 0 && row_tiles(position.queries.count) == 1);
      const u64 policy = once ? createpolicy_evict_first() : createpolicy_evict_unchanged();
#pragma unroll
      for (int box = 0; box < BOXES; box++)
        if (box < boxes) {
          const int at = token + box * Build::box;
          const int row = Build::page > 0 ? at % PAGE_OR_1 : at;
          const int outer = Build::page > 0 ? pages[box] : cache_row;
          copy_box(p, to + box * Build::box * Build::column_bytes, barrier, row, kv_head, outer,
                   policy);
        }
    }
  }
};

// Chunk that a warp copies first in a launch.
struct FirstCopy {
  bool exists, packed;
  int sequence, kv_head, token;

  DEVICE static FirstCopy of(bool exists, const Position &position) {
    return {exists, Build::packs && position.packed, position.sequence,
            position.head_tile().kv_head, position.token + position.chunk * Build::chunk};
  }

  DEVICE bool is(const FirstCopy &other) const {
    return exists && packed == other.packed && sequence == other.sequence &&
           kv_head == other.kv_head && token == other.token;
  }

  // Returns the numbers that are kept.
  DEVICE uint4 pack(const Params &p) const {
    return {exists ? p.kept_key : 0, (u32)(packed ? ~sequence : sequence), (u32)kv_head,
            (u32)token};
  }

  // Sets the position to a copy that was kept; returns false if there is none. What another launch
  // has written never leads to a read outside the block table.
  DEVICE static bool unpack(const Params &p, const uint4 &kept, Position &position) {
    position.packed = Build::packs && (int)kept.y < 0;
    position.sequence = position.packed ? ~kept.y : kept.y;
    position.tokens = p.context;
    position.token = kept.w;
    position.chunk = 0;
    if constexpr (Build::q_len == 0) {
      position.queries.count = p.q_len;
      position.run_time_head_tile = {(int)kept.z, 0};
    } else {
      position.head = kept.z * row_tiles(Build::q_len);
    }
    return kept.x == p.kept_key && (u32)position.sequence < (u32)p.batch &&
           kept.z < (u32)p.kv_heads && kept.w < (u32)p.context;
  }
};

// State of a warp's ring: its fill level and next stage.
struct Ring {
  Position next;  // next chunk to copy
  bool more;
  int next_stage, empty_stages, stage;
  u32 parity;

  DEVICE void start() {
    more = true;
    next_stage = stage = 0;
    empty_stages = Build::stages;
    parity = 0;
  }

  // Goes to the next chunk; `more`: there is one.
  DEVICE void find_next(const Params &p, const Warp &warp, int end) {
    if constexpr (SCRATCH_OVER_RING)
      more = next.chunk < next.chunks;
    else
      more = more && next.to_next_chunk(p, end, warp.range_warp);
  }

  DEVICE void copy_next(const Params &p, Warp &warp) {
    warp.copy_chunk(p, next, next_stage, false);
    advance();
  }

  DEVICE void advance() {
    next.chunk += next.step();
    next_stage = next_stage + 1 == Build::stages ? 0 : next_stage + 1;
  }

  // Build::bulk: starts a speculative copy into stage 0.
  DEVICE FirstCopy copy_guess(const Params &p, Warp &warp) {
    const FirstCopy guess = FirstCopy::of(true, next);
    warp.copy_chunk(p, next, 0, true);
    return guess;
  }

  // Waits for the speculative copy and discards it.
  DEVICE void drop_guess(const Warp &warp) {
    mbarrier_try_wait_parity(warp.barriers, 0);
    // Lane 0 starts the next copy into this stage: a lane still waiting would miss this phase.
    __syncwarp();
    parity = 1;
  }

  // Starts a launch's first copies in its part `part`; returns the first. If a guess was wrong, its
  // stage is filled last.
  DEVICE FirstCopy begin(const Params &p, Warp &warp, const Position &part, int end,
                         const FirstCopy &guess) {
    FirstCopy first{};
    bool drops = guess.exists;
    next = part;
#pragma unroll 1
    for (; empty_stages > 0; empty_stages--) {
      find_next(p, warp, end);
      bool copies = more;
      if (Build::bulk && Build::ragged && more && !first.exists) {
        first = FirstCopy::of(true, next);
        if (guess.is(first)) {
          copies = drops = false;
          // Past the sequence's end, a block table can contain any pages. Tensor maps read nothing
          // outside the caches, but these copies would.
          if constexpr (Build::page_scales) warp.copy_scales(p, next, 0, 0);
          advance();
        } else if (drops && Build::stages > 1) {
          stage = next_stage = 1;
        }
      }
      if (copies) {
        if (drops && next_stage == 0) {
          drop_guess(warp);
          drops = false;
        }
        copy_next(p, warp);
      }
      if constexpr (!Build::bulk || Build::page_scales) cp_async_commit_group();
    }
    if (drops) drop_guess(warp);
    return first;
  }

  // Starts copies until the ring is full, then one for each chunk attended to.
  DEVICE void fill(const Params &p, Warp &warp, int end) {
#pragma unroll 1
    for (; empty_stages > 0; empty_stages--) {
      find_next(p, warp, end);
      if (more) copy_next(p, warp);
      if constexpr (!Build::bulk || Build::page_scales) cp_async_commit_group();
    }
  }

  // Returns the address of the next chunk, after its arrival.
  DEVICE u32 wait(const Warp &warp) {
    if constexpr (Build::bulk) {
      mbarrier_try_wait_parity(warp.barriers + 8 * stage, parity >> stage & 1);
      parity ^= 1 << stage;
    }
    if constexpr (!Build::bulk || Build::page_scales) {
      cp_async_wait_group<Build::stages - 1>();
      __syncwarp();
    }
    return warp.ring + stage * STAGE;
  }

  DEVICE void release() {
    __syncwarp();
    stage = stage + 1 == Build::stages ? 0 : stage + 1;
    empty_stages = 1;
  }
};
