// Work ranges, and splits of an output tile: leanbench.core.decomposition.stream_k; Build::ragged:
// stream_k_by_lengths; Build::equal_splits: fixed_split.
#pragma once
#include "lengths.cuh"
#include "params.cuh"
#include "position.cuh"
#include "ptx.cuh"
#include "tiles.cuh"

// The work range of a CTA or its cluster, up to LeanTile `end`. Ranges are equal shares of all
// LeanTiles; the first `longer` have one more. If `longest` is not 0, they are splits of output
// tiles, none longer than that.
struct WorkRange {
  int end, share, longer;
  int slot;                    // of its partial in the workspace
  int longest, splits, split;  // Build::ragged, Build::equal_splits
  bool grouped;                // Build::column_groups: that many CTAs, or clusters, have this range

  static constexpr bool TRIES_LONGER = LARGE_PARTIAL || OF_LATENTS;

  // Returns by how many LeanTiles a candidate for the longest split exceeds the share.
  DEVICE static int longer_candidate(int share, int step) {
    return OF_LATENTS ? step : (share >> 4) * step + ((share & 15) * step + 15 >> 4);
  }

  // Build::ragged: returns the longest split with which no range crosses an output tile's boundary,
  // and how many of `ranges` it needs; 0: stream-K. leanbench.core.decomposition.longest_split.
  // `least`: the fewest LeanTiles of the longest split.
  DEVICE int longest_split(const Params &p, int lane, const Lengths &lengths, int ranges, int least,
                           int output_tiles, int real, int &used) const {
    if (ranges < output_tiles) return 0;
    const int share = max(least, divide(real + ranges - 1, ranges));
    int shortest = share, count = 0;
    // Whole output tiles if a merge takes longer than splitting saves.
    const int merge_tiles = Build::column_groups > 1
                                ? p.merge_tiles / (grouped ? Build::column_groups : 1)
                                : p.merge_tiles;
    bool whole = lengths.most <= share + merge_tiles, enough = false;
    if (!whole && (Build::cluster > 1 || Build::q_len == 0)) {
      // The shortest candidate that needs at most `ranges` wins.
      const int longer_by = longer_candidate(share, lane);
      count = lengths.splits_by_lane(p, lane, share + longer_by) * Lengths::heads(p);
      const u32 fitting = __ballot_sync(~0u, lane <= p.longest_steps && count <= ranges);
      const int first = fitting ? __ffs(fitting) - 1 : 0;
      shortest += __shfl_sync(~0u, longer_by, first);
      count = __shfl_sync(~0u, count, first);
      enough = fitting != 0;
      whole = lengths.most <= shortest + merge_tiles;
    } else if (!whole) {
      // The same sequentially: the candidates are few, and batches may be large.
      int candidate = 0;
#pragma unroll 1
      for (int step = 0; step <= (TRIES_LONGER ? p.longest_steps : 0) && !enough; step++) {
        shortest = share + longer_candidate(share, step);
        if (shortest == candidate) continue;
        candidate = shortest;
        count = lengths.splits(p, lane, candidate) * Lengths::heads(p);
        enough = count <= ranges;
      }
      if constexpr (TRIES_LONGER) whole = enough && lengths.most <= shortest + merge_tiles;
    }
    if (!whole && !enough) return 0;
    used = whole ? output_tiles : count;
    return whole ? lengths.most : shortest;
  }

  // Build::ragged: returns the output tile whose first split is a CTA's unit, if any. First splits
  // come last, because they wait for the others.
  DEVICE static int first_split_of(int unit, int output_tiles) {
    return unit - divide(unit, output_tiles) * output_tiles;
  }

  // Finds the split of a unit in its sequence, which begins at unit `before` of its kind.
  DEVICE void find_split(const Params &p, int lane, int unit, int used, int output_tiles,
                         int before, Position &position) {
    const int others = used - output_tiles;
    int head;
    split = 0;
    position.enter_sequence(p);
    splits = split_count(p, position.tiles, longest);
    if (unit >= others) {
      head = first_split_of(unit, output_tiles) - before;
      before = others > 0 ? units_before(p, lane, longest, position.sequence) : 0;
    } else {
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

  // Build::equal_splits: enters the unit's split of its output tile; every output tile has the same
  // number of units. Returns false if its sequence has too few LeanTiles for all splits. First
  // splits come last, because they wait for the others.
  DEVICE bool enter_equal_split(const Params &p, int range_warp, Position &position) {
    const int ranges = gridDim.x / Build::cluster, unit = blockIdx.x / Build::cluster;
    position.sequence_start = position.end_tiles = position.turn = position.packed_tokens = 0;
    share = p.share, longer = p.longer;
    const int each = head_tiles(p), output_tiles = p.batch * each;
    const int most = divide(ranges, output_tiles), turn = divide(unit, output_tiles);
    const int output_tile = unit - turn * output_tiles;
    position.sequence = divide(output_tile, p.by_heads);
    position.head = output_tile - position.sequence * each;
    if constexpr (Build::ragged)
      position.enter_sequence(p);
    else
      position.enter_host_length(p);
    longest = split_count(p, position.tiles, most);
    splits = split_count(p, position.tiles, longest);
    split = most - 1 - turn;
    if (split >= splits) return false;
    slot = output_tile * most + split;
    position.first = split * longest;
    position.at = position.head * position.tiles + position.first;
    end = position.at + min(longest, position.tiles - position.first);
    position.enter_tiles(p, position.first + end - position.at, range_warp);
    return true;
  }

  // Build::cluster: returns the output tile of which the unit may have the first split.
  DEVICE static int guessed_tile(const Params &p) {
    // Build::equal_splits: first splits are the last units.
    return blockIdx.x / Build::cluster -
           (Build::equal_splits ? gridDim.x / Build::cluster - p.batch * head_tiles(p) : 0);
  }

  // Build::ragged, Build::cluster: returns whether the unit likely has a first split.
  DEVICE static bool may_be_first_split(const Params &p) {
    const int ranges = gridDim.x / Build::cluster, output_tiles = p.batch * head_tiles(p);
    const int unit = guessed_tile(p);
    if constexpr (!Build::ragged || Build::ragged_q || Build::fixed_runs ||
                  (Build::window_left && Build::q_len == 0))
      return false;
    return Build::equal_splits ? unit >= 0 : unit < output_tiles && ranges < 2 * output_tiles;
  }

  // Build::ragged, Build::cluster: sets the start of the unit's part as a first split; returns
  // false if this warp has none of its chunks. The first one does not depend on the length, except
  // with windows and padded sequences, which wait for their length.
  DEVICE bool guess(const Params &p, int range_warp, Position &position) const {
    const int each = head_tiles(p), unit = guessed_tile(p);
    position.sequence = divide(unit, each);
    position.head = unit - position.sequence * each;
    position.enter_head(p);
    position.tokens = p.context;
    position.token = position.leftpad = 0;
    if constexpr (Build::window_left || Build::leftpad) {
      position.enter_sequence(p);
      position.token = copy_start(position.first_needed(p, 0));
    }
    position.chunk = range_warp;
    return position.token + range_warp * Build::chunk < position.tokens;
  }

  // Finds the range and sets `position` to its start. Ranges are assigned from the last to the
  // first, so that merging CTAs wait for CTAs that started earlier. Returns false if the lengths
  // need fewer ranges.
  DEVICE bool find(const Params &p, int lane, Lengths &lengths, int range_warp,
                   Position &position) {
    if constexpr (Build::equal_splits) return enter_equal_split(p, range_warp, position);
    const bool works = search(p, lane, lengths, position);
    if (works) enter(p, range_warp, position);
    return works;
  }

  // Build::fixed_runs: the same as `search`. Ranges are assigned from the last to the first.
  DEVICE bool search_runs(const Params &p, int lane, const Lengths &lengths, int ranges, int unit,
                          Position &position) {
    if constexpr (!Build::ragged) position.enter_host_length(p);
    const int total = (Build::ragged ? lengths.sum : p.batch * position.tiles) * head_tiles(p);
    const int used = min(ranges, total);
    if (unit >= used) return false;
    share = divide(total, used), longer = total - share * used;
    end = total - range_start(unit, share, longer);
    slot = position.at = total - range_start(unit + 1, share, longer);
    if constexpr (Build::ragged)
      find_sequence(p, lane, 0, position.at, position.sequence, position.sequence_start);
    return true;
  }

  // Finds the range's start, without its part; called by a whole warp.
  DEVICE bool search(const Params &p, int lane, Lengths &lengths, Position &position) {
    int ranges = gridDim.x / Build::cluster, unit = blockIdx.x / Build::cluster;
    share = p.share, longer = p.longer, longest = slot = end = 0;
    position.sequence = position.sequence_start = position.at = position.packed_tokens = 0;
    if constexpr (Build::ragged) lengths.finish(p, lane);
    const int least = Build::ragged ? lengths.least_share(p) : p.min_tiles_per_range;
    if constexpr (Build::column_groups > 1) {
      grouped = Build::ragged ? lengths.in_groups(p, ranges) : true;
      if (grouped) ranges /= Build::column_groups, unit /= Build::column_groups;
      if (unit >= ranges) return false;
    }
    int used = ranges;
    if constexpr (Build::fixed_runs) return search_runs(p, lane, lengths, ranges, unit, position);
    if constexpr (Build::ragged) {
      const int output_tiles = lengths.output_tiles, real = lengths.sum * Lengths::heads(p);
      if (Build::ragged_q && real == 0) return false;
      // Ends are no divisible work, so the number of ranges follows from the real LeanTiles.
      used = min(ranges, least > 1 ? divide(real, least) : real);
      used = max(1, used);
      // Short sequences need more ranges than a least share of all LeanTiles for each.
      longest = longest_split(p, lane, lengths, OF_LATENTS ? max(1, min(ranges, real)) : used,
                              OF_LATENTS ? least : 1, output_tiles, real, used);
      // Row tiles that share K and V are in step, and ranges of equal latent sequences end where
      // output tiles do: leanbench.kernels.lean.cuda_schedule.whole_ranges.
      const bool whole_tiles = OF_LATENTS ? lengths.most * p.batch == lengths.sum
                                          : Build::q_len == 0 && Build::cluster == 1 &&
                                                p.longest_steps > 0;
      if (whole_tiles && longest == 0 && used < output_tiles) {
        const int whole = divide(output_tiles, divide(output_tiles + used - 1, used));
        if (Build::rows <= 32 || few_idle(whole, used)) used = whole;
      }
      if (unit >= used) return false;
      const bool packed = longest == 0 && packs(real, output_tiles);
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
    if constexpr (!Build::ragged) return true;
    // Units among which the range's first is sought, and the first one of its sequence. A single
    // search, because its instructions take longer to arrive than to run.
    const int output_tiles = lengths.output_tiles, others = used - output_tiles;
    const bool is_first = longest > 0 && unit >= others;
    const int units = is_first || position.packed_tokens > 0 ? -1 : longest;
    const int sought = is_first      ? first_split_of(unit, output_tiles)
                       : longest > 0 ? others - 1 - unit
                                     : position.at;
    int before;
    if (is_first && !Build::ragged_q) {
      position.sequence = divide(sought, head_tiles(p));
      before = position.sequence * head_tiles(p);
    } else {
      find_sequence(p, lane, units, sought, position.sequence, before);
    }
    if (longest > 0)
      find_split(p, lane, unit, used, output_tiles, before, position);
    else
      position.sequence_start = before;
    return true;
  }

  // Enters the first part of a range that was found.
  DEVICE void enter(const Params &p, int range_warp, Position &position) {
    position.end_tiles = position.turn = 0;
    if constexpr (!Build::ragged) position.enter_host_length(p);
    if constexpr (Build::fixed_runs) {
      position.lowest = position.at, position.highest = end - 1;
      position.enter_part(p, end, range_warp);
      position.begin_runs(p);
    }
    position.enter_part(p, end, range_warp, Build::ragged && !Build::fixed_runs && longest > 0);
  }
};

// The splits of an output tile, and the one of this work range. Split 0 belongs to the host block.
struct Splits {
  int count, mine;

  DEVICE void find(const Params &p, const Position &part, const WorkRange &range) {
    count = 1, mine = 0;
    if constexpr (Build::fixed_runs) {
      count = part.tiles, mine = part.first;
      return;
    }
    if (part.last - part.first == part.tiles) return;
    if (Build::equal_splits || (Build::ragged && range.longest > 0)) {
      count = range.splits, mine = range.split;
      return;
    }
    const int tile_start = part.at - part.first;
    const int host = range_of(p, tile_start, range.share, range.longer);
    // A range with a short rest is not counted.
    const int rest = Build::ragged ? part.end_tiles + short_rest(p) : 0;
    const int last = max(0, part.tiles - 1 - rest);
    count = range_of(p, tile_start + last, range.share, range.longer) - host + 1;
    mine = range.slot - host;
  }
};
