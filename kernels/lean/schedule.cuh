// Which LeanTiles a work range holds, where a warp is in it, and how an output tile is split:
// leanbench.core.decomposition.stream_k; RAGGED: stream_k_by_lengths.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

__device__ __forceinline__ int divide(int n, Divisor by) {
  return (int)((u64)(u32)n * by.multiplier >> by.shift);
}

// A quotient below 2^21: through a reciprocal, a third of an integer division's latency.
__device__ __forceinline__ int divide(int n, int d) {
  int q = (int)(__int2float_rz(n) * rcp_approx_ftz(__int2float_rz(d)));
  const int rest = n - q * d;
  if (rest < 0) q--;
  if (rest >= d) q++;
  return q;
}

__device__ __forceinline__ int lean_tiles(int tokens, int shift) {
  int tiles = (tokens + (1 << shift) - 1) >> shift;
  return tiles > 1 ? tiles : 1;  // an empty sequence has one too: its output gets written
}

// RAGGED: tokens of a sequence, whatever the length tensor says: none below 0, none past the cache.
__device__ __forceinline__ int tokens_of(const Params &p, int sequence) {
  return min(max(__ldg(p.cache_seqlens + sequence), 0), p.context);
}

// The log2 of a LeanTile's tokens. FIXED_RUNS: a LeanTile is a fixed run, whose length follows from
// its sequence's own: runs for 128 CTAs where it is alone, no shorter than `tile_shift` and no longer
// than `longest_shift`. leanbench.kernels.lean.cuda_schedule.fixed_run_tokens.
__device__ __forceinline__ int tile_shift(const Params &p, int tokens) {
  if (!FIXED_RUNS) return p.tile_shift;
  const int run = min(tokens, 1 << 17) * p.kv_heads * ROW_TILES >> 7;
  return min(max(run > 1 ? 32 - __clz(run - 1) : 0, p.tile_shift), p.longest_shift);
}

// LeanTiles of an output tile.
__device__ __forceinline__ int tiles_of(const Params &p, int tokens) {
  return lean_tiles(tokens, tile_shift(p, tokens));
}

// First LeanTile of a work range.
__device__ __forceinline__ int range_start(int range, int share, int longer) {
  return range * share + min(range, longer);
}

// The work range that holds a LeanTile.
__device__ __forceinline__ int range_of(const Params &p, int lean_tile, int share, int longer) {
  const int boundary = longer * (share + 1);
  const bool early = lean_tile < boundary;
  const int n = early ? lean_tile : lean_tile - boundary;
  if (RAGGED) return (early ? 0 : longer) + divide(n, early ? share + 1 : share);
  return (early ? 0 : longer) + divide(n, early ? p.by_share_plus_1 : p.by_share);
}

// A warp's position in its work range: the part of an output tile that it is in, from there to the
// end of the output tile or of the work range, and its next chunk of that part.
struct Position {
  int at;               // LeanTile, among all LeanTiles of the launch
  int sequence, head;   // `head`: KV head x ROW_TILES + row tile
  int sequence_start;   // RAGGED: the sequence's first LeanTile
  int end_tiles;        // RAGGED: empty LeanTiles that an output tile counts at its end
  int tokens, tiles;    // of the sequence
  int first, last;      // LeanTiles of the output tile
  int token;            // first token of the part
  int chunks, chunk;    // of the part; this warp's next

  __device__ __forceinline__ void enter_part(const Params &p, int end, int range_warp) {
    if (RAGGED) {
      tokens = tokens_of(p, sequence);
      tiles = tiles_of(p, tokens) + end_tiles;
      int within = at - sequence_start;
      head = divide(within, tiles);
      first = within - head * tiles;
    } else {
      int output_tile = divide(at, p.by_tiles);
      first = at - output_tile * tiles;
      sequence = divide(output_tile, p.by_heads);
      head = output_tile - sequence * p.kv_heads * ROW_TILES;
    }
    last = FIXED_RUNS ? first + 1 : min(tiles, first + end - at);
    const int shift = tile_shift(p, tokens);
    token = first << shift;
    int stop = min(last << shift, tokens);
    chunks = max(0, stop - token + CHUNK - 1) / CHUNK;
    chunk = range_warp;
  }

  // To the LeanTile that the CTA walks next, if `ended` does not say that there is none. FIXED_RUNS:
  // the one before, as a fixed run waits for those after it.
  __device__ __forceinline__ void leave_part(const Params &p) {
    if (FIXED_RUNS) {
      at -= 1;
      if (RAGGED && at < sequence_start && at >= 0) {
        sequence -= 1;
        sequence_start -= tiles_of(p, tokens_of(p, sequence)) * p.kv_heads * ROW_TILES;
      }
      return;
    }
    at += last - first;
    if (RAGGED) {
      int sequence_end = sequence_start + tiles * p.kv_heads * ROW_TILES;
      if (at >= sequence_end) {
        sequence += 1;
        sequence_start = sequence_end;
      }
    }
  }

  __device__ __forceinline__ bool ended(int end) const { return FIXED_RUNS ? at < end : at >= end; }

  // To the next chunk that this warp takes, whichever part it is of; false at the range's end.
  __device__ __forceinline__ bool to_next_chunk(const Params &p, int end, int range_warp) {
    while (chunk >= chunks) {
      leave_part(p);
      if (ended(end)) return false;
      enter_part(p, end, range_warp);
    }
    return true;
  }
};

// RAGGED: LeanTiles of one KV head's row tile: of all sequences, of the shortest and the longest.
struct Lengths {
  int sum, least, most;

  // By a warp together.
  __device__ __forceinline__ void read(const Params &p, int lane) {
    sum = 0, least = 0x7fffffff, most = 0;
    for (int i = lane; i < p.batch; i += 32) {
      const int tiles = tiles_of(p, tokens_of(p, i));
      sum += tiles, least = min(least, tiles), most = max(most, tiles);
    }
    sum = __reduce_add_sync(~0u, sum);
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most);
  }
};

// RAGGED: the sequence that holds LeanTile `position.at`, and its first LeanTile; by a warp
// together.
__device__ __forceinline__ void find_sequence(const Params &p, int lane, Position &position) {
  int seen = 0;
  for (int base = 0; base < p.batch; base += 32) {
    int i = base + lane;
    int tiles = 0;
    if (i < p.batch)
      tiles = (tiles_of(p, tokens_of(p, i)) + p.end_tiles) * p.kv_heads * ROW_TILES;
    int end = tiles;
    for (int step = 1; step < 32; step *= 2) {
      int before = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += before;
    }
    u32 holders = __ballot_sync(~0u, i < p.batch && seen + end > position.at);
    if (holders) {
      int holder = __ffs(holders) - 1;
      position.sequence = base + holder;
      position.sequence_start = seen + __shfl_sync(~0u, end - tiles, holder);
      return;
    }
    seen += __shfl_sync(~0u, end, 31);
  }
}

// The work range that a CTA, or its cluster, walks, up to LeanTile `end`. Ranges are equal shares
// of all LeanTiles, the first `longer` of them have one more; or, where `splits` is not 0, each is
// one of so many splits of an output tile.
struct WorkRange {
  int index, end, share, longer, splits;

  // RAGGED: splits of every output tile, where none of the ranges is to cross from one to the next;
  // 0: stream-K.
  __device__ __forceinline__ int equal_splits(const Params &p, const Lengths &lengths, int ranges,
                                              int output_tiles, int real) const {
    if (ranges < output_tiles) return 0;
    int count = 0;
    if (lengths.least == lengths.most) {
      count = min(divide(ranges, output_tiles), lengths.most);
      // Not where the ranges that are left over would idle for too long.
      const i64 idle = (i64)(ranges - count * output_tiles) * real;
      if (count < lengths.most && idle >= (i64)p.align_tiles * ranges) count = 0;
    }
    const int longest_split = count > 0 ? divide(lengths.most + count - 1, count)
                                        : divide(real + ranges - 1, ranges);
    // Whole, where a merge takes longer than splitting saves.
    return lengths.most <= longest_split + p.merge_tiles ? 1 : count;
  }

  __device__ __forceinline__ void enter_split(const Params &p, Position &position) {
    const int output_tile = divide(index, splits), split = index - output_tile * splits;
    const int each = p.kv_heads * ROW_TILES;
    position.sequence = divide(output_tile, each);
    position.end_tiles = 0;
    const int tiles = tiles_of(p, tokens_of(p, position.sequence));
    const int length = divide(tiles, splits), rest = tiles - length * splits;
    const int start = (output_tile - position.sequence * each) * tiles;
    position.at = start + range_start(split, length, rest);
    end = start + range_start(split + 1, length, rest);
  }

  // Sets `position` to its start. Ranges are dealt from the last to the first, so that who merges
  // waits for CTAs that started before it. False: there is none, the lengths need fewer ranges.
  __device__ __forceinline__ bool find(const Params &p, int lane, int range_warp,
                                       Position &position) {
    const int ranges = gridDim.x / CLUSTER;
    index = ranges - 1 - (int)(blockIdx.x / CLUSTER);
    share = p.share, longer = p.longer, splits = 0;
    position.sequence = position.sequence_start = 0;
    position.end_tiles = p.end_tiles;
    if (FIXED_RUNS) {
      // Dealt from the last to the first, within work ranges too.
      int total = p.batch * p.kv_heads * ROW_TILES * tiles_of(p, p.context);
      if (RAGGED) {
        Lengths lengths;
        lengths.read(p, lane);
        total = lengths.sum * p.kv_heads * ROW_TILES;
      }
      position.tokens = p.context;
      position.tiles = tiles_of(p, p.context);
      const int used = min(ranges, total), cta = blockIdx.x / CLUSTER;
      if (cta >= used) return false;
      share = divide(total, used), longer = total - share * used;
      position.at = total - 1 - range_start(cta, share, longer);
      end = total - range_start(cta + 1, share, longer);
      if (RAGGED) find_sequence(p, lane, position);
      position.enter_part(p, end, range_warp);
      return true;
    }
    if (RAGGED) {
      Lengths lengths;
      lengths.read(p, lane);
      const int output_tiles = p.batch * p.kv_heads * ROW_TILES;
      const int real = lengths.sum * p.kv_heads * ROW_TILES;
      splits = equal_splits(p, lengths, ranges, output_tiles, real);
      // Ends are no work to share: how many ranges there are follows from the real LeanTiles.
      const int used = splits > 0 ? splits * output_tiles
                                  : max(1, min(ranges, divide(real, p.min_tiles_per_range)));
      const int total = real + p.end_tiles * output_tiles;
      share = divide(total, used);
      longer = total - share * used;
      index -= ranges - used;
      if (index < 0) return false;
    } else {
      position.tokens = p.context;
      position.tiles = tiles_of(p, p.context);
    }
    if (RAGGED && splits > 0) {
      enter_split(p, position);
    } else {
      end = range_start(index + 1, share, longer);
      position.at = range_start(index, share, longer);
      if (RAGGED) find_sequence(p, lane, position);
    }
    position.enter_part(p, end, range_warp);
    return true;
  }
};

// The splits of an output tile, and which of them a work range has. Split 0 is the host block's.
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
    if (RAGGED && range.splits > 0) {
      count = range.splits, mine = range.index % range.splits;
      return;
    }
    const int tile_start = part.at - part.first;
    const int host = range_of(p, tile_start, range.share, range.longer);
    count = range_of(p, tile_start + part.tiles - 1, range.share, range.longer) - host + 1;
    mine = range.index - host;
  }
};
