// Tokens, LeanTiles and output tiles of sequences, and equal shares of LeanTiles.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

DEVICE int divide(int n, Divisor by) { return (int)((u64)(u32)n * by.multiplier >> by.shift); }

// Returns a quotient below 2^21 through a reciprocal: a third of an integer division's latency.
DEVICE int divide(int n, int d) {
  int q = (int)(__int2float_rz(n) * rcp_approx_ftz(__int2float_rz(d)));
  const int rest = n - q * d;
  if (rest < 0) q--;
  if (rest >= d) q++;
  return q;
}

DEVICE int lean_tiles(int tokens, int shift) {
  int tiles = (tokens + (1 << shift) - 1) >> shift;
  return tiles > 1 ? tiles : 1;  // an empty sequence has one, too, so that its output is written
}

// Returns the tokens of a sequence in the cache before the launch, clamped to 0 and the cache.
DEVICE int length_of(const Params &p, int sequence) {
  // Lengths known to the host.
  if (!Build::ragged || ((Build::leftpad || Build::ragged_q) && !p.cache_seqlens))
    return Build::append ? max(p.context - p.new_tokens, 0) : p.context;
  const int prior = Build::prior ? p.prior_tokens : 0;
  return min(max(__ldg(p.cache_seqlens + sequence), prior) - prior, p.context);
}

// Build::ragged: returns the tokens of a sequence, including new ones for which the cache has room.
DEVICE int tokens_of(const Params &p, int sequence) {
  const int length = length_of(p, sequence);
  return Build::append ? length + min(p.new_tokens, p.context - length) : length;
}

// Query tokens of a sequence and the first of them. cu_seqlens_q is clamped to q.
struct Queries {
  int first, count;

  DEVICE static Queries of(const Params &p, int sequence) {
    if constexpr (Build::q_len > 0) return {0, Build::q_len};
    if constexpr (!Build::ragged_q) return {0, p.q_len};
    const int first = min(max(__ldg(p.cu_seqlens_q + sequence), 0), p.total_queries);
    const int end = min(__ldg(p.cu_seqlens_q + sequence + 1), p.total_queries);
    return {first, min(max(end - first, 0), p.q_len)};
  }
};

// True if output tiles may count empty LeanTiles at their end, so that all splits have one length.
constexpr bool EVEN_SPLITS = Build::rows > 32 && !Build::ragged;

// Returns the output tiles of a sequence; Build::ragged_q: of the one with the most query tokens.
DEVICE int head_tiles(const Params &p) { return p.kv_heads * row_tiles(p.q_len); }

// Returns the position in the cache at which a sequence starts, clamped to its end.
DEVICE int leftpad_of(const Params &p, int sequence, int tokens) {
  return Build::leftpad ? min(max(__ldg(p.cache_leftpad + sequence), 0), tokens) : 0;
}

// Build::attention_chunk: returns the first token of the chunk with `token`. Tokens before the
// sequence belong to a chunk, too.
DEVICE int chunk_start(const Params &p, int leftpad, int token) {
  const int place = token - leftpad;
  return leftpad + (place < 0 ? -1 : divide(place, p.by_attention_chunk)) * p.attention_chunk;
}

// Returns the first token that a sequence's first query token sees.
DEVICE int first_seen(const Params &p, int leftpad, int tokens, int queries) {
  int first = Build::window_left ? max(leftpad, tokens - queries - p.window_left) : leftpad;
  if constexpr (Build::attention_chunk)
    first = max(first, chunk_start(p, leftpad, tokens - queries));
  return first;
}

// Returns the last token up to `token` at which a copy may start.
DEVICE int copy_start(int token) { return token / Build::start_step * Build::start_step; }

// Returns the tokens in a sequence's LeanTiles: those that a query token sees, from a `copy_start`
// on. With a window, Build::start_step - 1 more, so that their number does not depend on its start.
DEVICE int dealt_tokens(const Params &p, int leftpad, int tokens, int queries) {
  const int own = tokens - copy_start(leftpad);
  return Build::window_left ? min(own, p.window_tokens + queries) : own;
}

// Returns the log2 of a LeanTile's tokens. Build::fixed_runs: a LeanTile is a fixed run. Its length
// follows from that of its sequence: runs for 128 CTAs if it is alone, from `tile_shift` to
// `longest_shift`. leanbench.kernels.lean.cuda_schedule.fixed_run_tokens.
DEVICE int tile_shift(const Params &p, int tokens) {
  if constexpr (!Build::fixed_runs) return p.tile_shift;
  const int run = min(tokens, 1 << 17) * head_tiles(p) >> 7;
  return min(max(run > 1 ? 32 - __clz(run - 1) : 0, p.tile_shift), p.longest_shift);
}

// With two computing warpgroups, a LeanTile in which one has no rows takes less time and has more
// tokens: these multiples of 2^`tile_shift` (reports/performance-log.md, entry 56).
constexpr bool UNEQUAL_TILES = Build::ragged_q && Build::rows > 64;
constexpr int STEPS_OF_MANY_ROWS = 3, STEPS_OF_FEW_ROWS = 4;

DEVICE int tile_steps(int queries) {
  if constexpr (!UNEQUAL_TILES) return 1;
  return 2 * all_rows(queries) <= Build::rows ? STEPS_OF_FEW_ROWS : STEPS_OF_MANY_ROWS;
}

// Returns the LeanTiles of an output tile.
DEVICE int tiles_of(const Params &p, int leftpad, int tokens, int queries) {
  const int dealt = dealt_tokens(p, leftpad, tokens, queries);
  const int steps = lean_tiles(dealt, tile_shift(p, dealt));
  if constexpr (!UNEQUAL_TILES) return steps;
  return tile_steps(queries) == STEPS_OF_FEW_ROWS
             ? (steps + STEPS_OF_FEW_ROWS - 1) / STEPS_OF_FEW_ROWS
             : (steps + STEPS_OF_MANY_ROWS - 1) / STEPS_OF_MANY_ROWS;
}

// Build::ragged: returns the LeanTiles of an output tile of a sequence.
DEVICE int tiles_of_sequence(const Params &p, int sequence) {
  const int tokens = tokens_of(p, sequence);
  const int leftpad = leftpad_of(p, sequence, tokens);
  return tiles_of(p, leftpad, tokens, Queries::of(p, sequence).count);
}

// Build::ragged: returns the empty LeanTiles that an output tile counts at its end. With packing,
// output tiles of one LeanTile count none, because other warps continue meanwhile.
DEVICE int end_tiles_of(const Params &p, int tiles, bool packs) {
  return packs && tiles == 1 ? 0 : p.end_tiles;
}

// Build::ragged: returns whether output tiles are packed: if few have more than one LeanTile. If
// many do, the other warps would wait in those for the warp with a packed one.
DEVICE bool packs(int lean_tiles, int output_tiles) {
  return Build::packs && lean_tiles - output_tiles <= output_tiles / 8 * 3;
}

// Returns whether few enough CTAs with warpgroups idle to keep row tiles in step;
// leanbench.kernels.lean.cuda_schedule.few_idle.
DEVICE bool few_idle(int used, int all) { return 8 * used >= 7 * all; }

// Build::ragged: returns the LeanTiles at an output tile's end, in addition to the empty ones, that
// belong to the previous work range. With warpgroups, as long as a merge; otherwise none, because
// longer ranges cost more than the merge (reports/performance-log.md, entry 58).
DEVICE int short_rest(const Params &p) { return Build::rows > 32 ? max(1, p.merge_tiles) : 0; }

// Returns the first LeanTile of a work range.
DEVICE int range_start(int range, int share, int longer) {
  return range * share + min(range, longer);
}

// Returns the work range of a LeanTile.
DEVICE int range_of(const Params &p, int lean_tile, int share, int longer) {
  const int boundary = longer * (share + 1);
  const bool early = lean_tile < boundary;
  const int n = early ? lean_tile : lean_tile - boundary;
  if constexpr (Build::ragged) return (early ? 0 : longer) + divide(n, early ? share + 1 : share);
  return (early ? 0 : longer) + divide(n, early ? p.by_share_plus_1 : p.by_share);
}

// Returns the row tile with number `i` in the order of distribution. With warpgroups: the first,
// the last, the second, the last but one. Later row tiles see more tokens, so every two consecutive
// ones see about the same number.
DEVICE int row_tile_in_turn(int i, int tiles) {
  return Build::rows > 32 && i % 2 ? tiles - 1 - i / 2 : Build::rows > 32 ? i / 2 : i;
}

// An output tile of a sequence: its KV head, and its first row.
struct HeadTile {
  int kv_head, row_offset;
};
