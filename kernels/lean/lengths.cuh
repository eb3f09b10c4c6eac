// Build::ragged: LeanTiles of all sequences from their lengths on the device, by a whole warp.
#pragma once
#include "params.cuh"
#include "ptx.cuh"
#include "tiles.cuh"

// Returns the splits of an output tile with at most `longest` LeanTiles each; 0 without LeanTiles.
// mla.cu: it stays whole if a merge takes longer than its other LeanTiles.
DEVICE int split_count(const Params &p, int tiles, int longest) {
  if (OF_LATENTS && tiles <= longest + p.merge_tiles / Build::column_groups) return min(tiles, 1);
  return divide(tiles + longest - 1, longest);
}

// Build::ragged: LeanTiles of one KV head's row tile, held by a whole warp.
struct Lengths {
  int own_tiles;     // of sequence `lane`; 0: none, or without query tokens
  int sum, most;     // of all sequences (Build::ragged_q: of all their row tiles); of the longest
  int output_tiles;  // of all sequences
  int longer_than_one;  // Build::packs: sequences of more than a LeanTile

  DEVICE static int of(const Params &p, int sequence) {
    return sequence < p.batch && rows_of(p, sequence) > 0 ? tiles_of_sequence(p, sequence) : 0;
  }

  // Returns the weight of a sequence in sums: 1; Build::ragged_q: its row tiles.
  DEVICE static int rows_of(const Params &p, int sequence) {
    return Build::ragged_q && sequence < p.batch ? row_tiles(Queries::of(p, sequence).count) : 1;
  }

  // Returns the output tiles per sequence; Build::ragged_q: per row tile.
  DEVICE static int heads(const Params &p) { return Build::ragged_q ? p.kv_heads : head_tiles(p); }

  // Starts the read. Other work can hide its latency.
  DEVICE void start(const Params &p, int lane) { own_tiles = of(p, lane); }

  DEVICE void finish(const Params &p, int lane) {
    sum = own_tiles * rows_of(p, lane), most = own_tiles, longer_than_one = own_tiles > 1;
#pragma unroll 1
    for (int i = lane + 32; i < p.batch; i += 32) {
      const int tiles = of(p, i);
      sum += tiles * rows_of(p, i), most = max(most, tiles), longer_than_one += tiles > 1;
    }
    sum = __reduce_add_sync(~0u, sum);
    if constexpr (Build::packs) longer_than_one = __reduce_add_sync(~0u, longer_than_one);
    most = __reduce_max_sync(~0u, most);
    output_tiles = p.batch * head_tiles(p);
    if constexpr (Build::ragged_q) {
      int rows = 0;
#pragma unroll 1
      for (int i = lane; i < p.batch; i += 32) rows += rows_of(p, i);
      output_tiles = __reduce_add_sync(~0u, rows) * p.kv_heads;
    }
  }

  // Returns the smallest share of a CTA. Sequences of up to Build::most_short_splits LeanTiles have
  // so few splits that they merge well.
  DEVICE int least_share(const Params &p) const {
    return OF_LATENTS && most <= Build::most_short_splits ? 1 : p.min_tiles_per_range;
  }

  // Build::column_groups: returns whether a launch of `ranges` work ranges has column groups: if
  // these lengths are so short that merges save more than scores cost. `_Deal` in
  // leanbench.kernels.mla has the same rule for lengths that the host knows.
  DEVICE bool in_groups(const Params &p, int ranges) const {
    constexpr int ROW_COST = 4 * (all_rows(Build::q_len) < 64 ? all_rows(Build::q_len) : 64);
    constexpr bool FEW_ROWS = all_rows(Build::q_len) <= 32;
    const int clusters = ranges / Build::column_groups, real = sum * heads(p);
    // Most launches of long contexts end here, before any division.
    if (output_tiles > clusters || real > clusters * Build::most_grouped_stages) return false;
    const int longest = max(least_share(p), divide(real + clusters - 1, clusters));
    const int whole = max(least_share(p), divide(real + ranges - 1, ranges));
    const int splits = divide(most + longest - 1, longest);
    const int whole_splits = divide(most + whole - 1, whole);
    // In 64ths of a LeanTile.
    const int cost = 64 * longest + (splits > 1 ? ROW_COST / Build::column_groups : 0) +
                     (splits > Build::one_round ? 64 : 0);
    const int whole_cost =
        64 * whole + (whole_splits > 1 ? ROW_COST : 0) + (whole_splits > Build::one_round ? 64 : 0);
    // Four groups of few rows repeat the scores, which pays if half of the SMs would idle.
    const bool pays = Build::column_groups == 2
                          ? splits == 1 || splits >= Build::least_grouped_splits
                          : !FEW_ROWS || 2 * real <= clusters;
    return longest <= Build::most_grouped_stages && pays && cost <= whole_cost;
  }

  // Returns the splits of all sequences with at most `longest` LeanTiles, which differs between
  // lanes.
  DEVICE int splits_by_lane(const Params &p, int lane, int longest) const {
    int count = 0;
#pragma unroll 1
    for (int base = 0; base < p.batch; base += 32) {
      const int tiles = base == 0 ? own_tiles : of(p, base + lane), rows = rows_of(p, base + lane);
      const int sequences = min(32, p.batch - base);
#pragma unroll 1
      for (int i = 0; i < sequences; i++) {
        const int splits = split_count(p, __shfl_sync(~0u, tiles, i), longest);
        count += Build::ragged_q ? splits * __shfl_sync(~0u, rows, i) : splits;
      }
    }
    return count;
  }

  // Returns the splits of all sequences for a single `longest`.
  DEVICE int splits(const Params &p, int lane, int longest) const {
    int count = split_count(p, own_tiles, longest) * rows_of(p, lane);
#pragma unroll 1
    for (int i = lane + 32; i < p.batch; i += 32)
      count += split_count(p, of(p, i), longest) * rows_of(p, i);
    return __reduce_add_sync(~0u, count);
  }
};

// Build::ragged: returns the units of a sequence's output tiles in the schedule: splits after the
// first if `longest` is the longest split; otherwise LeanTiles with their ends, without ends of
// packed ones if it is negative. Build::ragged_q: 1 per output tile if it is negative.
DEVICE int units_of(const Params &p, int sequence, int longest) {
  if (sequence >= p.batch) return 0;
  const int tiles = tiles_of_sequence(p, sequence);
  const int units = Build::ragged_q && longest < 0 ? 1
                    : longest > 0                  ? split_count(p, tiles, longest) - 1
                                                   : tiles + end_tiles_of(p, tiles, longest < 0);
  return units * p.kv_heads * row_tiles(Queries::of(p, sequence).count);
}

// Build::ragged: finds the sequence of unit `unit`, and its first unit; called by a whole warp.
DEVICE void find_sequence(const Params &p, int lane, int longest, int unit, int &sequence,
                          int &first_unit) {
  int seen = 0;
#pragma unroll 1
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

// Build::ragged: returns the units of the preceding sequences.
DEVICE int units_before(const Params &p, int lane, int longest, int sequence) {
  int units = 0;
#pragma unroll 1
  for (int i = lane; i < sequence; i += 32) units += units_of(p, i, longest);
  return __reduce_add_sync(~0u, units);
}
