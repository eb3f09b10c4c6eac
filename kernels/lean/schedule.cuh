// LeanTiles of a work range, a warp's position in it, and splits of an output tile:
// leanbench.core.decomposition.stream_k; RAGGED: stream_k_by_lengths; EQUAL_SPLITS: fixed_split.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

__device__ __forceinline__ int divide(int n, Divisor by) {
  return (int)((u64)(u32)n * by.multiplier >> by.shift);
}

// Returns a quotient below 2^21 through a reciprocal: a third of an integer division's latency.
__device__ __forceinline__ int divide(int n, int d) {
  int q = (int)(__int2float_rz(n) * rcp_approx_ftz(__int2float_rz(d)));
  const int rest = n - q * d;
  if (rest < 0) q--;
  if (rest >= d) q++;
  return q;
}

__device__ __forceinline__ int lean_tiles(int tokens, int shift) {
  int tiles = (tokens + (1 << shift) - 1) >> shift;
  return tiles > 1 ? tiles : 1;  // an empty sequence has one, too, so that its output is written
}

// Returns the tokens of a sequence in the cache before the launch, clamped to 0 and the cache.
__device__ __forceinline__ int length_of(const Params &p, int sequence) {
  // Lengths known to the host.
  if (!RAGGED || ((LEFTPAD || RAGGED_Q) && !p.cache_seqlens))
    return APPEND ? max(p.context - p.new_tokens, 0) : p.context;
  return min(max(__ldg(p.cache_seqlens + sequence), 0), p.context);
}

// RAGGED: returns the tokens of a sequence, including new ones for which the cache has room.
__device__ __forceinline__ int tokens_of(const Params &p, int sequence) {
  const int length = length_of(p, sequence);
  return APPEND ? length + min(p.new_tokens, p.context - length) : length;
}

// Query tokens of a sequence and the first of them. cu_seqlens_q is clamped to q.
struct Queries {
  int first, count;

  __device__ __forceinline__ static Queries of(const Params &p, int sequence) {
    if (Q_LEN > 0) return {0, Q_LEN};
    if (!RAGGED_Q) return {0, p.q_len};
    const int first = min(max(__ldg(p.cu_seqlens_q + sequence), 0), p.total_queries);
    const int end = min(__ldg(p.cu_seqlens_q + sequence + 1), p.total_queries);
    return {first, min(max(end - first, 0), p.q_len)};
  }
};

// True if output tiles may count empty LeanTiles at their end, so that all splits have one length.
constexpr bool EVEN_SPLITS = ROWS > 32 && !RAGGED;

// Returns the output tiles of a sequence; RAGGED_Q: of the one with the most query tokens.
__device__ __forceinline__ int head_tiles(const Params &p) {
  return p.kv_heads * row_tiles(p.q_len);
}

// Returns the position in the cache at which a sequence starts, clamped to its end.
__device__ __forceinline__ int leftpad_of(const Params &p, int sequence, int tokens) {
  return LEFTPAD ? min(max(__ldg(p.cache_leftpad + sequence), 0), tokens) : 0;
}

// ATTENTION_CHUNK: returns the first token of the chunk with `token`. Tokens before the sequence
// belong to a chunk, too.
__device__ __forceinline__ int chunk_start(const Params &p, int leftpad, int token) {
  const int place = token - leftpad;
  return leftpad +
         (place < 0 ? -1 : divide(place, p.by_attention_chunk)) * p.attention_chunk;
}

// Returns the first token that a sequence's first query token sees.
__device__ __forceinline__ int first_seen(const Params &p, int leftpad, int tokens, int queries) {
  int first = WINDOW_LEFT ? max(leftpad, tokens - queries - p.window_left) : leftpad;
  if (ATTENTION_CHUNK) first = max(first, chunk_start(p, leftpad, tokens - queries));
  return first;
}

// Returns the last token up to `token` at which a copy may start.
__device__ __forceinline__ int copy_start(int token) { return token / START_STEP * START_STEP; }

// Returns the tokens in a sequence's LeanTiles: those that a query token sees, from a `copy_start`
// on. With a window, START_STEP - 1 more, so that their number does not depend on its start.
__device__ __forceinline__ int dealt_tokens(const Params &p, int leftpad, int tokens, int queries) {
  const int own = tokens - copy_start(leftpad);
  return WINDOW_LEFT ? min(own, p.window_tokens + queries) : own;
}

// Returns the log2 of a LeanTile's tokens. FIXED_RUNS: a LeanTile is a fixed run. Its length
// follows from that of its sequence: runs for 128 CTAs if it is alone, from `tile_shift` to
// `longest_shift`. leanbench.kernels.lean.cuda_schedule.fixed_run_tokens.
__device__ __forceinline__ int tile_shift(const Params &p, int tokens) {
  if (!FIXED_RUNS) return p.tile_shift;
  const int run = min(tokens, 1 << 17) * head_tiles(p) >> 7;
  return min(max(run > 1 ? 32 - __clz(run - 1) : 0, p.tile_shift), p.longest_shift);
}

// With two computing warpgroups, a LeanTile in which one has no rows takes less time and has more
// tokens: these multiples of 2^`tile_shift` (reports/performance-log.md, entry 56).
constexpr bool UNEQUAL_TILES = RAGGED_Q && ROWS > 64;
constexpr int STEPS_OF_MANY_ROWS = 3, STEPS_OF_FEW_ROWS = 4;

__device__ __forceinline__ int tile_steps(int queries) {
  if (!UNEQUAL_TILES) return 1;
  return 2 * all_rows(queries) <= ROWS ? STEPS_OF_FEW_ROWS : STEPS_OF_MANY_ROWS;
}

// Returns the LeanTiles of an output tile.
__device__ __forceinline__ int tiles_of(const Params &p, int leftpad, int tokens, int queries) {
  const int dealt = dealt_tokens(p, leftpad, tokens, queries);
  const int steps = lean_tiles(dealt, tile_shift(p, dealt));
  if (!UNEQUAL_TILES) return steps;
  return tile_steps(queries) == STEPS_OF_FEW_ROWS
             ? (steps + STEPS_OF_FEW_ROWS - 1) / STEPS_OF_FEW_ROWS
             : (steps + STEPS_OF_MANY_ROWS - 1) / STEPS_OF_MANY_ROWS;
}

// RAGGED: returns the LeanTiles of an output tile of a sequence.
__device__ __forceinline__ int tiles_of_sequence(const Params &p, int sequence) {
  const int tokens = tokens_of(p, sequence);
  const int leftpad = leftpad_of(p, sequence, tokens);
  return tiles_of(p, leftpad, tokens, Queries::of(p, sequence).count);
}

// RAGGED: returns the empty LeanTiles that an output tile counts at its end. With packing, output
// tiles of one LeanTile count none, because other warps continue meanwhile.
__device__ __forceinline__ int end_tiles_of(const Params &p, int tiles, bool packs) {
  return packs && tiles == 1 ? 0 : p.end_tiles;
}

// RAGGED: returns whether output tiles are packed: if few have more than one LeanTile. If many do,
// the other warps would wait in those for the warp with a packed one.
__device__ __forceinline__ bool packs(int lean_tiles, int output_tiles) {
  return PACKS && lean_tiles - output_tiles <= output_tiles / 8 * 3;
}

// Returns whether few enough CTAs with warpgroups idle to keep row tiles in step;
// leanbench.kernels.lean.cuda_schedule.few_idle.
__device__ __forceinline__ bool few_idle(int used, int all) { return 8 * used >= 7 * all; }

// RAGGED: returns the LeanTiles at an output tile's end, in addition to the empty ones, that belong
// to the previous work range. With warpgroups, as long as a merge; otherwise none, because longer
// ranges cost more than the merge (reports/performance-log.md, entry 58).
__device__ __forceinline__ int short_rest(const Params &p) {
  return ROWS > 32 ? max(1, p.merge_tiles) : 0;
}

// Returns the first LeanTile of a work range.
__device__ __forceinline__ int range_start(int range, int share, int longer) {
  return range * share + min(range, longer);
}

// Returns the work range of a LeanTile.
__device__ __forceinline__ int range_of(const Params &p, int lean_tile, int share, int longer) {
  const int boundary = longer * (share + 1);
  const bool early = lean_tile < boundary;
  const int n = early ? lean_tile : lean_tile - boundary;
  if (RAGGED) return (early ? 0 : longer) + divide(n, early ? share + 1 : share);
  return (early ? 0 : longer) + divide(n, early ? p.by_share_plus_1 : p.by_share);
}

// Returns the row tile with number `i` in the order of distribution. With warpgroups: the first,
// the last, the second, the last but one. Later row tiles see more tokens, so every two consecutive
// ones see about the same number.
__device__ __forceinline__ int row_tile_in_turn(int i, int tiles) {
  return ROWS > 32 && i % 2 ? tiles - 1 - i / 2 : ROWS > 32 ? i / 2 : i;
}

// An output tile of a sequence: its KV head, and its first row.
struct HeadTile {
  int kv_head, row_offset;
};

// A warp's position in its work range: the part of the current output tile, up to the end of the
// output tile or of the work range, and its next chunk of that part.
struct Position {
  int lowest, highest;  // FIXED_RUNS: LeanTiles of the work range
  int at;               // LeanTile among all LeanTiles of the launch
  int sequence, head;   // `head`: KV head x row tiles + row tile
  HeadTile run_time_head_tile;  // Q_LEN is 0: `head`
  Queries queries;              // of the sequence
  int sequence_start;   // RAGGED: the sequence's first LeanTile
  int end_tiles;        // RAGGED: empty LeanTiles that an output tile counts at its end
  int tokens, tiles;    // of the sequence
  int leftpad;          // the sequence's first token; 0 without LEFTPAD
  int first, last;      // LeanTiles of the output tile
  int token;            // first token of the part
  int chunks, chunk;    // of the part; this warp's next
  // PACKS: maximum tokens of a packed output tile, or 0; warp with the next turn; whether this part
  // is packed, and belongs to this warp.
  int packed_tokens, turn;
  bool packed, mine;
  bool is_rest;  // RAGGED: the part belongs to the previous work range
  // FIXED_RUNS: whether the CTA has reached the runs that wait for others; its start.
  bool merging;
  int begin_at, begin_first, begin_tiles, begin_sequence, begin_sequence_start;

  // Returns the number of chunks from one of this warp's to its next, and its first one.
  __device__ __forceinline__ int step() const { return PACKS && packed ? 1 : RANGE_WARPS; }
  __device__ __forceinline__ int first_chunk(int range_warp) const {
    return PACKS && packed ? 0 : range_warp;
  }

  // Returns whether all warps of the CTA walk the part.
  __device__ __forceinline__ bool is_shared() const { return !packed && !is_rest; }

  __device__ __forceinline__ void enter_part(const Params &p, int end, int range_warp) {
    if (RAGGED) {
      enter_sequence(p);
      end_tiles = end_tiles_of(p, tiles, packed_tokens > 0);
      tiles += end_tiles;
      int within = at - sequence_start;
      head = divide(within, tiles);
      first = within - head * tiles;
    } else {
      // Fixed runs are not counted on the host, because a prepared launch is used with other
      // lengths.
      int output_tile = FIXED_RUNS ? divide(at, tiles) : divide(at, p.by_tiles);
      first = at - output_tile * tiles;
      sequence = divide(output_tile, p.by_heads);
      head = output_tile - sequence * head_tiles(p);
    }
    int stop = FIXED_RUNS ? first + 1 : min(tiles, first + end - at);
    const bool deals_rests = RAGGED && !FIXED_RUNS;
    if (deals_rests && is_short_rest(p, stop)) stop = tiles;
    enter_tiles(p, stop, range_warp);
    is_rest = deals_rests && first > 0 && is_short_rest(p, first);
    if (is_rest) chunk = chunks;
  }

  // Enters output tile `head` of the sequence.
  __device__ __forceinline__ void enter_head(const Params &p) {
    queries = Queries::of(p, sequence);
    if (Q_LEN > 0) return;
    const int tiles = row_tiles(queries.count), kv_head = divide(head, tiles);
    run_time_head_tile = {kv_head, row_tile_in_turn(head - kv_head * tiles, tiles) * ROWS};
  }

  __device__ __forceinline__ HeadTile head_tile() const {
    if (Q_LEN == 0) return run_time_head_tile;
    constexpr int TILES = Q_LEN > 0 ? row_tiles(Q_LEN) : 1;
    return {head / TILES, ONE_ROW_TILE ? 0 : head % TILES * ROWS};
  }

  // Returns the query token of the output tile's row `row`.
  __device__ __forceinline__ int query_of(int row) const {
    return min(row / GROUP_SIZE, queries.count - 1);
  }

  // Returns the number of tokens that the output tile's row `row` sees (the causal tail).
  __device__ __forceinline__ int seen_by(const Params &p, int row) const {
    int seen = tokens - (queries.count - 1) + query_of(row);
    const int own = seen - 1;
    if (WINDOW_RIGHT) seen = min(seen + p.window_right, tokens);
    if (ATTENTION_CHUNK && WINDOW_RIGHT)
      seen = min(seen, chunk_start(p, leftpad, own) + p.attention_chunk);
    return seen;
  }

  // Returns the first token that the row sees.
  __device__ __forceinline__ int first_seen(const Params &p, int row) const {
    return ::first_seen(p, leftpad, tokens, queries.count - query_of(row));
  }

  // Returns the first token that the row sees, or that is appended.
  __device__ __forceinline__ int first_needed(const Params &p, int row) const {
    const int seen = first_seen(p, row);
    return WINDOW_LEFT && APPEND ? min(seen, length_of(p, sequence)) : seen;
  }

  // RAGGED: reads the sequence's length.
  __device__ __forceinline__ void enter_sequence(const Params &p) {
    tokens = tokens_of(p, sequence);
    leftpad = leftpad_of(p, sequence, tokens);
    tiles = tiles_of(p, leftpad, tokens, Queries::of(p, sequence).count);
  }

  // Uses the length known to the host.
  __device__ __forceinline__ void enter_host_length(const Params &p) {
    tokens = p.context;
    leftpad = 0;
    tiles = tiles_of(p, 0, tokens, Q_LEN > 0 ? Q_LEN : p.q_len) + (EVEN_SPLITS ? p.end_tiles : 0);
  }

  // RAGGED: returns whether an output tile's rest from LeanTile `from` on belongs to the previous
  // work range.
  __device__ __forceinline__ bool is_short_rest(const Params &p, int from) const {
    return tiles - from <= short_rest(p) + end_tiles;
  }

  // Enters the part of the output tile from LeanTile `first` up to LeanTile `stop`.
  __device__ __forceinline__ void enter_tiles(const Params &p, int stop_tile, int range_warp) {
    enter_head(p);
    last = stop_tile;
    const int dealt = dealt_tokens(p, leftpad, tokens, queries.count);
    const int shift = tile_shift(p, dealt), steps = tile_steps(queries.count);
    const int start = copy_start(first_needed(p, 0));
    token = start + (first * steps << shift);
    int stop = start + min(last * steps << shift, tokens - start);
    if (Q_LEN == 0) {
      // Row tiles of many query tokens see only some of these tokens.
      const int row = run_time_head_tile.row_offset;
      stop = min(stop, seen_by(p, row + ROWS - 1));
      // In whole chunks: the next part begins at the end of this part's last one.
      if (WINDOW_LEFT) token += max(first_needed(p, row) - token, 0) / CHUNK * CHUNK;
    }
    chunks = max(0, stop - token + CHUNK - 1) / CHUNK;
    chunk = range_warp;
    packed = PACKS && dealt <= packed_tokens && first == 0 && last == tiles;
    is_rest = false;
    if (packed) {
      mine = turn == range_warp;
      turn = turn + 1 == WARPS ? 0 : turn + 1;
      chunk = mine ? 0 : chunks;
    }
  }

  // FIXED_RUNS: returns whether a run waits for others and merges their partials.
  __device__ __forceinline__ bool merges() const { return first % MERGE == 0; }

  // FIXED_RUNS: goes to the previous run of the output tile, or to the last one of the next.
  __device__ __forceinline__ void to_next_run(const Params &p) {
    if (first > 0 && at > lowest) {
      at -= 1, first -= 1;
      return;
    }
    at += tiles - first;
    if (RAGGED && at >= sequence_start + tiles * head_tiles(p)) {
      sequence_start = at;
      sequence += 1;
      if (at <= highest) tiles = tiles_of_sequence(p, sequence);
    }
    if (at > highest) return;
    first = min(tiles - 1, highest - at);
    at += first;
  }

  // FIXED_RUNS: goes to the end of the first output tile, the CTA's start.
  __device__ __forceinline__ void begin_runs(const Params &p) {
    const int ahead = min(tiles - 1 - first, highest - at);
    at += ahead, first += ahead;
    merging = lowest == highest;
    begin_at = at, begin_first = first, begin_tiles = tiles;
    begin_sequence = sequence, begin_sequence_start = sequence_start;
    if (merges() && !merging) leave_part(p);
  }

  // Goes to the next LeanTile of the CTA; there is none at the work range's end. FIXED_RUNS: runs
  // that wait for no other come first, then the others, each output tile's from the last to the
  // first. Most partials have arrived by then.
  __device__ __forceinline__ void leave_part(const Params &p) {
    if (FIXED_RUNS) {
      do {
        to_next_run(p);
        if (at > highest && !merging) {
          merging = true;
          at = begin_at, first = begin_first, tiles = begin_tiles;
          sequence = begin_sequence, sequence_start = begin_sequence_start;
        }
      } while (at <= highest && merges() != merging);
      return;
    }
    at += last - first;
    if (RAGGED) {
      int sequence_end = sequence_start + tiles * p.kv_heads * row_tiles(queries.count);
      if (at >= sequence_end) {
        sequence += 1;
        while (RAGGED_Q && sequence < p.batch && Queries::of(p, sequence).count == 0) sequence += 1;
        sequence_start = sequence_end;
      }
    }
  }

  // Goes to this warp's next chunk, in any part; returns false at the range's end.
  __device__ __forceinline__ bool to_next_chunk(const Params &p, int end, int range_warp) {
    while (chunk >= chunks) {
      leave_part(p);
      if (at >= end) return false;
      enter_part(p, end, range_warp);
    }
    return true;
  }
};

// Returns the splits of an output tile with at most `longest` LeanTiles each.
__device__ __forceinline__ int split_count(int tiles, int longest) {
  return divide(tiles + longest - 1, longest);
}

// RAGGED: LeanTiles of one KV head's row tile, held by a whole warp.
struct Lengths {
  int own;           // of sequence `lane`; 0: none, or without query tokens
  int sum, most;     // of all sequences (RAGGED_Q: of all their row tiles); of the longest
  int output_tiles;  // of all sequences
  int longer_than_one;  // PACKS: sequences of more than a LeanTile

  __device__ __forceinline__ static int of(const Params &p, int sequence) {
    return sequence < p.batch && rows_of(p, sequence) > 0 ? tiles_of_sequence(p, sequence) : 0;
  }

  // Returns the weight of a sequence in sums: 1; RAGGED_Q: its row tiles.
  __device__ __forceinline__ static int rows_of(const Params &p, int sequence) {
    return RAGGED_Q && sequence < p.batch ? row_tiles(Queries::of(p, sequence).count) : 1;
  }

  // Returns the output tiles per sequence; RAGGED_Q: per row tile.
  __device__ __forceinline__ static int heads(const Params &p) {
    return RAGGED_Q ? p.kv_heads : head_tiles(p);
  }

  // Starts the read. Other work can hide its latency.
  __device__ __forceinline__ void start(const Params &p, int lane) { own = of(p, lane); }

  __device__ __forceinline__ void finish(const Params &p, int lane) {
    sum = own * rows_of(p, lane), most = own, longer_than_one = own > 1;
    for (int i = lane + 32; i < p.batch; i += 32) {
      const int tiles = of(p, i);
      sum += tiles * rows_of(p, i), most = max(most, tiles), longer_than_one += tiles > 1;
    }
    sum = __reduce_add_sync(~0u, sum);
    if (PACKS) longer_than_one = __reduce_add_sync(~0u, longer_than_one);
    most = __reduce_max_sync(~0u, most);
    output_tiles = p.batch * head_tiles(p);
    if (RAGGED_Q) {
      int rows = 0;
      for (int i = lane; i < p.batch; i += 32) rows += rows_of(p, i);
      output_tiles = __reduce_add_sync(~0u, rows) * p.kv_heads;
    }
  }

  // Returns the splits of all sequences with at most `longest` LeanTiles, which differs between
  // lanes.
  __device__ __forceinline__ int splits_by_lane(const Params &p, int lane, int longest) const {
    int count = 0;
#pragma unroll 1
    for (int base = 0; base < p.batch; base += 32) {
      const int tiles = base == 0 ? own : of(p, base + lane), rows = rows_of(p, base + lane);
      const int sequences = min(32, p.batch - base);
#pragma unroll 1
      for (int i = 0; i < sequences; i++) {
        const int splits = split_count(__shfl_sync(~0u, tiles, i), longest);
        count += RAGGED_Q ? splits * __shfl_sync(~0u, rows, i) : splits;
      }
    }
    return count;
  }

  // Returns the splits of all sequences for a single `longest`.
  __device__ __forceinline__ int splits(const Params &p, int lane, int longest) const {
    int count = split_count(own, longest) * rows_of(p, lane);
    for (int i = lane + 32; i < p.batch; i += 32)
      count += split_count(of(p, i), longest) * rows_of(p, i);
    return __reduce_add_sync(~0u, count);
  }
};

// RAGGED: returns the units of a sequence's output tiles in the schedule: splits after the first if
// `longest` is the longest split; otherwise LeanTiles with their ends, without ends of packed ones
// if it is negative. RAGGED_Q: 1 per output tile if it is negative.
__device__ __forceinline__ int units_of(const Params &p, int sequence, int longest) {
  if (sequence >= p.batch) return 0;
  const int tiles = tiles_of_sequence(p, sequence);
  const int units = RAGGED_Q && longest < 0 ? 1
                    : longest > 0           ? split_count(tiles, longest) - 1
                                            : tiles + end_tiles_of(p, tiles, longest < 0);
  return units * p.kv_heads * row_tiles(Queries::of(p, sequence).count);
}

// RAGGED: finds the sequence of unit `unit`, and its first unit; called by a whole warp.
__device__ __forceinline__ void find_sequence(const Params &p, int lane, int longest, int unit,
                                              int &sequence, int &first_unit) {
  int seen = 0;
  for (int base = 0; base < p.batch; base += 32) {
    const int units = units_of(p, base + lane, longest);
    int end = units;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += before;
    }
    const u32 holders = __ballot_sync(~0u, base + lane < p.batch && seen + end > unit);
    if (holders) {
      const int holder = __ffs(holders) - 1;
      sequence = base + holder;
      first_unit = seen + __shfl_sync(~0u, end - units, holder);
      return;
    }
    seen += __shfl_sync(~0u, end, 31);
  }
}

// RAGGED: returns the units of the preceding sequences.
__device__ __forceinline__ int units_before(const Params &p, int lane, int longest, int sequence) {
  int units = 0;
  for (int i = lane; i < sequence; i += 32) units += units_of(p, i, longest);
  return __reduce_add_sync(~0u, units);
}

// The work range of a CTA or its cluster, up to LeanTile `end`. Ranges are equal shares of all
// LeanTiles; the first `longer` have one more. If `longest` is not 0, they are splits of output
// tiles, none longer than that.
struct WorkRange {
  int end, share, longer;
  int slot;                     // of its partial in the workspace
  int longest, splits, split;   // RAGGED, EQUAL_SPLITS

  // RAGGED: returns the longest split with which no range crosses an output tile's boundary, and
  // how many of `ranges` it needs; 0: stream-K. leanbench.core.decomposition.longest_split.
  __device__ __forceinline__ int longest_split(const Params &p, int lane, const Lengths &lengths,
                                               int ranges, int output_tiles, int real,
                                               int &used) const {
    if (ranges < output_tiles) return 0;
    const int share = divide(real + ranges - 1, ranges);
    int shortest = share, count = 0;
    // Whole output tiles if a merge takes longer than splitting saves.
    bool whole = lengths.most <= share + p.merge_tiles, enough = false;
    if (!whole && (CLUSTER > 1 || Q_LEN == 0)) {
      // Candidates are a sixteenth of the share apart; the shortest that needs at most `ranges`
      // wins.
      const int longer_by = (share >> 4) * lane + ((share & 15) * lane + 15 >> 4);
      count = lengths.splits_by_lane(p, lane, share + longer_by) * Lengths::heads(p);
      const u32 fitting = __ballot_sync(~0u, lane <= p.longest_steps && count <= ranges);
      const int first = fitting ? __ffs(fitting) - 1 : 0;
      shortest += __shfl_sync(~0u, longer_by, first);
      count = __shfl_sync(~0u, count, first);
      enough = fitting != 0;
      whole = lengths.most <= shortest + p.merge_tiles;
    } else if (!whole) {
      // The same sequentially: the candidates are few, and batches may be large.
      int candidate = 0;
#pragma unroll 1
      for (int step = 0; step <= (LARGE_PARTIAL ? p.longest_steps : 0) && !enough; step++) {
        shortest = share + (share >> 4) * step + ((share & 15) * step + 15 >> 4);
        if (shortest == candidate) continue;
        candidate = shortest;
        count = lengths.splits(p, lane, candidate) * Lengths::heads(p);
        enough = count <= ranges;
      }
      if (LARGE_PARTIAL) whole = enough && lengths.most <= shortest + p.merge_tiles;
    }
    if (!whole && !enough) return 0;
    used = whole ? output_tiles : count;
    return whole ? lengths.most : shortest;
  }

  // RAGGED: returns the output tile whose first split is a CTA's unit, if any. First splits come
  // last, because they wait for the others.
  __device__ __forceinline__ static int first_split_of(int unit, int output_tiles) {
    return unit - divide(unit, output_tiles) * output_tiles;
  }

  // Finds the split of a unit.
  __device__ __forceinline__ void find_split(const Params &p, int lane, int unit, int used,
                                             int output_tiles, Position &position) {
    const int each = head_tiles(p), others = used - output_tiles;
    int head, before = 0;
    split = 0;
    if (unit >= others) {
      const int output_tile = first_split_of(unit, output_tiles);
      if (RAGGED_Q) {
        find_sequence(p, lane, -1, output_tile, position.sequence, before);
        head = output_tile - before;
        before = 0;
      } else {
        position.sequence = divide(output_tile, each);
        head = output_tile - position.sequence * each;
      }
      if (others > 0) before = units_before(p, lane, longest, position.sequence);
    } else {
      find_sequence(p, lane, longest, others - 1 - unit, position.sequence, before);
    }
    position.enter_sequence(p);
    splits = split_count(position.tiles, longest);
    if (unit < others) {
      const int within = others - 1 - unit - before;
      head = divide(within, splits - 1);
      split = 1 + within - head * (splits - 1);
    }
    slot = output_tiles + before + head * (splits - 1) + split - 1;
    const int length = divide(position.tiles, splits), rest = position.tiles - length * splits;
    position.head = head;
    position.first = range_start(split, length, rest);
    position.at = head * position.tiles + position.first;
    end = head * position.tiles + range_start(split + 1, length, rest);
  }

  // EQUAL_SPLITS: enters the unit's split of its output tile; every output tile has the same number
  // of units. Returns false if its sequence has too few LeanTiles for all splits. First splits come
  // last, because they wait for the others.
  __device__ __forceinline__ bool enter_equal_split(const Params &p, int range_warp,
                                                    Position &position) {
    const int ranges = gridDim.x / CLUSTER, unit = blockIdx.x / CLUSTER;
    position.sequence_start = position.end_tiles = position.turn = position.packed_tokens = 0;
    share = p.share, longer = p.longer;
    const int each = head_tiles(p), output_tiles = p.batch * each;
    const int most = divide(ranges, output_tiles), turn = divide(unit, output_tiles);
    const int output_tile = unit - turn * output_tiles;
    position.sequence = divide(output_tile, p.by_heads);
    position.head = output_tile - position.sequence * each;
    if (RAGGED)
      position.enter_sequence(p);
    else
      position.enter_host_length(p);
    longest = split_count(position.tiles, most);
    splits = split_count(position.tiles, longest);
    split = most - 1 - turn;
    if (split >= splits) return false;
    slot = output_tile * most + split;
    position.first = split * longest;
    position.at = position.head * position.tiles + position.first;
    end = position.at + min(longest, position.tiles - position.first);
    position.enter_tiles(p, position.first + end - position.at, range_warp);
    return true;
  }

#if BULK && CLUSTER > 1
  // RAGGED: sets the start of the unit's part in case it is a first split; returns false if that is
  // unlikely. The first chunk does not depend on the length, except with windows and padded
  // sequences, which wait for their length.
  __device__ __forceinline__ bool guess(const Params &p, int range_warp, Position &position) const {
    const int ranges = gridDim.x / CLUSTER;
    const int each = head_tiles(p), output_tiles = p.batch * each;
    // EQUAL_SPLITS: first splits are the last units.
    const int unit = blockIdx.x / CLUSTER - (EQUAL_SPLITS ? ranges - output_tiles : 0);
    if (!RAGGED || RAGGED_Q || FIXED_RUNS || (WINDOW_LEFT && Q_LEN == 0)) return false;
    if (EQUAL_SPLITS ? unit < 0 : unit >= output_tiles || ranges >= 2 * output_tiles) return false;
    position.sequence = divide(unit, each);
    position.head = unit - position.sequence * each;
    position.enter_head(p);
    position.tokens = p.context;
    position.token = position.leftpad = 0;
    if (WINDOW_LEFT || LEFTPAD) {
      position.enter_sequence(p);
      position.token = copy_start(position.first_needed(p, 0));
    }
    position.chunk = range_warp;
    return position.token + range_warp * CHUNK < position.tokens;
  }
#endif

  __device__ __forceinline__ bool is_first_split() const { return longest > 0 && split == 0; }

  // Finds the range and sets `position` to its start. Ranges are assigned from the last to the first,
  // so that merging CTAs wait for CTAs that started earlier. Returns false if the lengths need fewer
  // ranges.
  __device__ __forceinline__ bool find(const Params &p, int lane, Lengths &lengths, int range_warp,
                                       Position &position) {
    if (EQUAL_SPLITS) return enter_equal_split(p, range_warp, position);
    const bool works = search(p, lane, lengths, position);
    if (works) enter(p, range_warp, position);
    return works;
  }

  // Finds the range's start, without its part; called by a whole warp.
  __device__ __forceinline__ bool search(const Params &p, int lane, Lengths &lengths,
                                         Position &position) {
    const int ranges = gridDim.x / CLUSTER, unit = blockIdx.x / CLUSTER;
    int used = ranges;
    share = p.share, longer = p.longer, longest = slot = end = 0;
    position.sequence = position.sequence_start = position.at = position.packed_tokens = 0;
    if (RAGGED) lengths.finish(p, lane);
    if (FIXED_RUNS) {
      // Assigned from the last to the first.
      if (!RAGGED) position.enter_host_length(p);
      const int total =
          (RAGGED ? lengths.sum : p.batch * position.tiles) * head_tiles(p);
      used = min(ranges, total);
      if (unit >= used) return false;
      share = divide(total, used), longer = total - share * used;
      end = total - range_start(unit, share, longer);
      slot = position.at = total - range_start(unit + 1, share, longer);
      if (RAGGED)
        find_sequence(p, lane, 0, position.at, position.sequence, position.sequence_start);
      return true;
    }
    if (RAGGED) {
      const int output_tiles = lengths.output_tiles, real = lengths.sum * Lengths::heads(p);
      if (RAGGED_Q && real == 0) return false;
      // Ends are no divisible work, so the number of ranges follows from the real LeanTiles.
      used = min(ranges, p.min_tiles_per_range > 1 ? divide(real, p.min_tiles_per_range) : real);
      used = max(1, used);
      longest = longest_split(p, lane, lengths, used, output_tiles, real, used);
      // Row tiles that share K and V are in step:
      // leanbench.kernels.lean.cuda_schedule.whole_ranges.
      if (Q_LEN == 0 && CLUSTER == 1 && longest == 0 && p.longest_steps > 0 && used < output_tiles) {
        const int whole = divide(output_tiles, divide(output_tiles + used - 1, used));
        if (ROWS <= 32 || few_idle(whole, used)) used = whole;
      }
      if (unit >= used) return false;
      if (longest > 0) {
        find_split(p, lane, unit, used, output_tiles, position);
        return true;
      }
      const bool packed = packs(real, output_tiles);
      if (packed)
        position.packed_tokens = output_tiles > 2 * used ? PACKED_TOKENS_OF_MANY : PACKED_TOKENS;
      const int ends = packed ? lengths.longer_than_one * head_tiles(p) : output_tiles;
      const int total = real + p.end_tiles * ends;
      share = divide(total, used);
      longer = total - share * used;
    }
    slot = used - 1 - unit;
    end = range_start(slot + 1, share, longer);
    position.at = range_start(slot, share, longer);
    if (RAGGED)
      find_sequence(p, lane, position.packed_tokens > 0 ? -1 : 0, position.at, position.sequence,
                    position.sequence_start);
    return true;
  }

  // Enters the first part of a range that was found.
  __device__ __forceinline__ void enter(const Params &p, int range_warp, Position &position) {
    position.end_tiles = position.turn = 0;
    if (!RAGGED) position.enter_host_length(p);
    if (RAGGED && !FIXED_RUNS && longest > 0) {
      position.enter_sequence(p);
      position.enter_tiles(p, position.first + end - position.at, range_warp);
      return;
    }
    if (FIXED_RUNS) {
      position.lowest = position.at, position.highest = end - 1;
      position.enter_part(p, end, range_warp);
      position.begin_runs(p);
    }
    position.enter_part(p, end, range_warp);
  }
};

// The splits of an output tile, and the one of this work range. Split 0 belongs to the host block.
struct Splits {
  int count, mine;

  __device__ __forceinline__ void find(const Params &p, const Position &part,
                                       const WorkRange &range) {
    count = 1, mine = 0;
    if (FIXED_RUNS) {
      count = part.tiles, mine = part.first;
      return;
    }
    if (part.last - part.first == part.tiles) return;
    if (EQUAL_SPLITS || (RAGGED && range.longest > 0)) {
      count = range.splits, mine = range.split;
      return;
    }
    const int tile_start = part.at - part.first;
    const int host = range_of(p, tile_start, range.share, range.longer);
    // A range with a short rest is not counted.
    const int rest = RAGGED ? part.end_tiles + short_rest(p) : 0;
    const int last = max(0, part.tiles - 1 - rest);
    count = range_of(p, tile_start + last, range.share, range.longer) - host + 1;
    mine = range.slot - host;
  }
};
