// A warp's position in its work range: part by part, chunk by chunk.
#pragma once
#include "params.cuh"
#include "tiles.cuh"

// Build::fixed_runs: how far a CTA is in its runs.
struct FixedRuns {
  bool merging;  // whether it has reached those that wait for others
  int at, first, tiles, sequence, sequence_start;  // of its start
};

// A warp's position in its work range: the part of the current output tile, up to the end of the
// output tile or of the work range, and its next chunk of that part.
struct Position {
  int lowest, highest;          // Build::fixed_runs: LeanTiles of the work range
  int at;                       // LeanTile among all LeanTiles of the launch
  int sequence, head;           // `head`: KV head x row tiles + row tile
  HeadTile run_time_head_tile;  // Build::q_len is 0: `head`
  Queries queries;              // of the sequence
  int sequence_start;           // Build::ragged: the sequence's first LeanTile
  int end_tiles;      // Build::ragged: empty LeanTiles that an output tile counts at its end
  int tokens, tiles;  // of the sequence
  int leftpad;        // the sequence's first token; 0 without Build::leftpad
  int first, last;    // LeanTiles of the output tile
  int token;          // first token of the part
  int chunks, chunk;  // of the part; this warp's next
  // Build::packs: maximum tokens of a packed output tile, or 0; warp with the next turn; whether
  // this part is packed, and belongs to this warp.
  int packed_tokens, turn;
  bool packed, mine;
  bool is_rest;  // Build::ragged: the part belongs to the previous work range
  FixedRuns runs;

  // Returns the number of chunks from one of this warp's to its next, and its first one.
  DEVICE int step() const { return Build::packs && packed ? 1 : RANGE_WARPS; }
  DEVICE int first_chunk(int range_warp) const { return Build::packs && packed ? 0 : range_warp; }

  // Returns whether all warps of the CTA walk the part.
  DEVICE bool is_shared() const { return !packed && !is_rest; }

  // Enters the part that begins at `at`. Build::ragged, `is_split`: a split, whose place is known.
  DEVICE void enter_part(const Params &p, int end, int range_warp, bool is_split = false) {
    if constexpr (Build::ragged) {
      enter_sequence(p);
      if (!is_split) {
        end_tiles = end_tiles_of(p, tiles, packed_tokens > 0);
        tiles += end_tiles;
        int within = at - sequence_start;
        head = divide(within, tiles);
        first = within - head * tiles;
      }
    } else {
      // Fixed runs are not counted on the host, because a prepared launch is used with other
      // lengths.
      int output_tile = Build::fixed_runs ? divide(at, tiles) : divide(at, p.by_tiles);
      first = at - output_tile * tiles;
      sequence = divide(output_tile, p.by_heads);
      head = output_tile - sequence * head_tiles(p);
    }
    int stop = Build::fixed_runs ? first + 1 : min(tiles, first + end - at);
    const bool deals_rests = Build::ragged && !Build::fixed_runs && !is_split;
    if (deals_rests && is_short_rest(p, stop)) stop = tiles;
    enter_tiles(p, stop, range_warp);
    is_rest = deals_rests && first > 0 && is_short_rest(p, first);
    if (is_rest) chunk = chunks;
  }

  // Enters output tile `head` of the sequence.
  DEVICE void enter_head(const Params &p) {
    queries = Queries::of(p, sequence);
    if constexpr (Build::q_len > 0) return;
    const int tiles = row_tiles(queries.count), kv_head = divide(head, tiles);
    run_time_head_tile = {kv_head, row_tile_in_turn(head - kv_head * tiles, tiles) * Build::rows};
  }

  DEVICE HeadTile head_tile() const {
    if constexpr (Build::q_len == 0) return run_time_head_tile;
    constexpr int TILES = Build::q_len > 0 ? row_tiles(Build::q_len) : 1;
    return {head / TILES, ONE_ROW_TILE ? 0 : head % TILES * Build::rows};
  }

  // Returns the query token of the output tile's row `row`.
  DEVICE int query_of(int row) const { return min(row / Build::group_size, queries.count - 1); }

  // Returns the number of tokens that the output tile's row `row` sees (the causal tail).
  DEVICE int seen_by(const Params &p, int row) const {
    int seen = tokens - (queries.count - 1) + query_of(row);
    const int own = seen - 1;
    if constexpr (Build::window_right) seen = min(seen + p.window_right, tokens);
    if constexpr (Build::attention_chunk && Build::window_right)
      seen = min(seen, chunk_start(p, leftpad, own) + p.attention_chunk);
    return seen;
  }

  // Returns the first token that the row sees.
  DEVICE int first_seen(const Params &p, int row) const {
    return ::first_seen(p, leftpad, tokens, queries.count - query_of(row));
  }

  // Returns the first token that the row sees, or that is appended.
  DEVICE int first_needed(const Params &p, int row) const {
    const int seen = first_seen(p, row);
    return Build::window_left && Build::append ? min(seen, length_of(p, sequence)) : seen;
  }

  // Build::ragged: reads the sequence's length.
  DEVICE void enter_sequence(const Params &p) {
    tokens = tokens_of(p, sequence);
    leftpad = leftpad_of(p, sequence, tokens);
    tiles = tiles_of(p, leftpad, tokens, Queries::of(p, sequence).count);
  }

  // Uses the length known to the host.
  DEVICE void enter_host_length(const Params &p) {
    tokens = p.context;
    leftpad = 0;
    tiles = tiles_of(p, 0, tokens, Build::q_len > 0 ? Build::q_len : p.q_len) +
            (EVEN_SPLITS ? p.end_tiles : 0);
  }

  // Build::ragged: returns whether an output tile's rest from LeanTile `from` on belongs to the
  // previous work range.
  DEVICE bool is_short_rest(const Params &p, int from) const {
    return tiles - from <= short_rest(p) + end_tiles;
  }

  // Enters the part of the output tile from LeanTile `first` up to LeanTile `stop`.
  DEVICE void enter_tiles(const Params &p, int stop_tile, int range_warp) {
    enter_head(p);
    last = stop_tile;
    const int dealt = dealt_tokens(p, leftpad, tokens, queries.count);
    const int shift = tile_shift(p, dealt), steps = tile_steps(queries.count);
    const int start = copy_start(first_needed(p, 0));
    token = start + (first * steps << shift);
    int stop = start + min(last * steps << shift, tokens - start);
    if constexpr (Build::q_len == 0) {
      // Row tiles of many query tokens see only some of these tokens.
      const int row = run_time_head_tile.row_offset;
      stop = min(stop, seen_by(p, row + Build::rows - 1));
      // In whole chunks: the next part begins at the end of this part's last one.
      if constexpr (Build::window_left)
        token += max(first_needed(p, row) - token, 0) / Build::chunk * Build::chunk;
    }
    chunks = max(0, stop - token + Build::chunk - 1) / Build::chunk;
    chunk = range_warp;
    packed = Build::packs && dealt <= packed_tokens && first == 0 && last == tiles;
    is_rest = false;
    if (packed) {
      mine = turn == range_warp;
      turn = turn + 1 == Build::warps ? 0 : turn + 1;
      chunk = mine ? 0 : chunks;
    }
  }

  // Build::fixed_runs: returns whether a run waits for others and merges their partials.
  DEVICE bool merges() const { return first % MERGE == 0; }

  // Build::fixed_runs: goes to the previous run of the output tile, or to the last one of the next.
  DEVICE void to_next_run(const Params &p) {
    if (first > 0 && at > lowest) {
      at -= 1, first -= 1;
      return;
    }
    at += tiles - first;
    if (Build::ragged && at >= sequence_start + tiles * head_tiles(p)) {
      sequence_start = at;
      sequence += 1;
      if (at <= highest) tiles = tiles_of_sequence(p, sequence);
    }
    if (at > highest) return;
    first = min(tiles - 1, highest - at);
    at += first;
  }

  // Build::fixed_runs: goes to the end of the first output tile, the CTA's start.
  DEVICE void begin_runs(const Params &p) {
    const int ahead = min(tiles - 1 - first, highest - at);
    at += ahead, first += ahead;
    runs.merging = lowest == highest;
    runs.at = at, runs.first = first, runs.tiles = tiles;
    runs.sequence = sequence, runs.sequence_start = sequence_start;
    if (merges() && !runs.merging) leave_part(p);
  }

  // Goes to the next LeanTile of the CTA; there is none at the work range's end. Build::fixed_runs:
  // runs that wait for no other come first, then the others, each output tile's from the last to
  // the first. Most partials have arrived by then.
  DEVICE void leave_part(const Params &p) {
    if constexpr (Build::fixed_runs) {
      do {
        to_next_run(p);
        if (at > highest && !runs.merging) {
          runs.merging = true;
          at = runs.at, first = runs.first, tiles = runs.tiles;
          sequence = runs.sequence, sequence_start = runs.sequence_start;
        }
      } while (at <= highest && merges() != runs.merging);
      return;
    }
    at += last - first;
    if constexpr (Build::ragged) {
      int sequence_end = sequence_start + tiles * p.kv_heads * row_tiles(queries.count);
      if (at >= sequence_end) {
        sequence += 1;
        while (Build::ragged_q && sequence < p.batch && Queries::of(p, sequence).count == 0)
          sequence += 1;
        sequence_start = sequence_end;
      }
    }
  }

  // Goes to this warp's next chunk, in any part; returns false at the range's end.
  DEVICE bool to_next_chunk(const Params &p, int end, int range_warp) {
    while (chunk >= chunks) {
      leave_part(p);
      if (at >= end) return false;
      enter_part(p, end, range_warp);
    }
    return true;
  }
};
