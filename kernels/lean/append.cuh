// Appending: the warp that processes a chunk with new tokens writes their rows of K and V over the
// copied chunk and, for one row tile, into the cache. Every reader then has them, and no CTA waits
// for another. The first new tokens are read at the start of a part, behind its first copies.
// Reading them with their chunk would stall: its copy has arrived by then.
#pragma once
#include "params.cuh"
#include "ptx.cuh"
#include "rotary.cuh"
#include "schedule.cuh"

constexpr int WORD_NUMBERS = 4 / KV_BYTES;
// Words of a row per lane; the lanes read one word each at a time.
constexpr int K_WORDS = (Build::head_dim / WORD_NUMBERS + 31) / 32;
constexpr int V_WORDS = (Build::v_head_dim / WORD_NUMBERS + 31) / 32;
// Rows in flight, limited by registers. The first ones hold theirs for longer.
constexpr int APPEND_ROWS = Build::rotary_dim > 0 && Build::rows > 16 ? 1
                            : Build::rotary_dim > 0 && K_WORDS <= 2   ? 2
                            : K_WORDS <= 1                            ? 4
                            : K_WORDS <= 2                            ? 2
                                                                      : 1;
constexpr int FIRST_ROWS = Build::rotary_dim > 0 || Build::rows > 8 ? 1 : APPEND_ROWS;

struct Append {
  int length;  // of the sequence before the launch
  int kv_head;
  bool to_cache;    // true for the last row tile, which sees all of the sequence's last tokens
  int token, stop;  // of the chunk's tokens: the first, and the end of the new ones
  int early;        // chunk with new tokens that are read at the start of the part; -1: none
  u32 k[APPEND_ROWS][K_WORDS], v[APPEND_ROWS][V_WORDS];
  Turn turns[Build::rotary_dim > 0 ? APPEND_ROWS : 1][K_WORDS];
  int outer[APPEND_ROWS];  // rows of the cache, or pages

  DEVICE void enter_part(const Params &p, const Position &part, int lane) {
    const HeadTile tile = part.head_tile();
    length = length_of(p, part.sequence);
    kv_head = tile.kv_head;
    to_cache = tile.row_offset + Build::rows >= all_rows(part.queries.count);
    early = -1;
    // The warp's first chunk at or after the one with the first new token.
    const int behind = max(length - part.token, 0) / Build::chunk - part.chunk;
    const int chunk = part.chunk + (max(behind, 0) + RANGE_WARPS - 1) / RANGE_WARPS * RANGE_WARPS;
    if (chunk >= part.chunks) return;
    token = part.token + chunk * Build::chunk;
    stop = min(token + Build::chunk, part.tokens);
    early = chunk;
    load<FIRST_ROWS>(p, part, max(token, length), lane);
  }

  // Returns whether the part's next chunk has new tokens; if so, starts reading the first.
  DEVICE bool starts(const Params &p, const Position &part, int lane) {
    token = part.token + part.chunk * Build::chunk;
    stop = min(token + Build::chunk, part.tokens);
    const bool any = stop > length;
    if (any && part.chunk != early) load<FIRST_ROWS>(p, part, max(token, length), lane);
    return any;
  }

  // Starts reading the rows of COUNT tokens from `at` on, within the chunk.
  template <int COUNT>
  DEVICE void load(const Params &p, const Position &part, int at, int lane) {
    const KvNumber *k_new = p.k_new + part.sequence * p.stride_k_new_batch +
                            kv_head * p.stride_k_new_head + WORD_NUMBERS * lane;
    const KvNumber *v_new = p.v_new + part.sequence * p.stride_v_new_batch +
                            kv_head * p.stride_v_new_head + WORD_NUMBERS * lane;
#pragma unroll
    for (int row = 0; row < COUNT; row++) {
      if (at + row >= stop) break;
      Angles angles;
      angles.enter(p, at + row);
#pragma unroll
      for (int word = 0; word < K_WORDS; word++) {
        const int column = WORD_NUMBERS * (lane + 32 * word);
        const KvNumber *from =
            k_new + (at + row - length) * p.stride_k_new_token + WORD_NUMBERS * 32 * word;
        if (column >= Build::head_dim) continue;
        k[row][word] = __ldg(reinterpret_cast<const u32 *>(from));
        turns[Build::rotary_dim > 0 ? row : 0][word].read(angles, from, column);
      }
#pragma unroll
      for (int word = 0; word < V_WORDS; word++)
        if (WORD_NUMBERS * (lane + 32 * word) < Build::v_head_dim)
          v[row][word] = __ldg(
              reinterpret_cast<const u32 *>(v_new + (at + row - length) * p.stride_v_new_token) +
              32 * word);
      outer[row] = outer_of(p, part, at + row);
    }
  }

  // Returns the cache row, or the page, of the sequence's token `at`.
  DEVICE static int outer_of(const Params &p, const Position &part, int at) {
    if constexpr (Build::page > 0)
      return __ldg(p.block_table + (i64)part.sequence * p.stride_table + at / PAGE_OR_1);
    return Build::batch_idx ? __ldg(p.cache_batch_idx + part.sequence) : part.sequence;
  }

  // Writes the loaded rows to `stage`, and to the cache.
  template <int COUNT>
  DEVICE void store(const Params &p, const Position &part, u32 stage, int at, int lane) const {
#pragma unroll
    for (int row = 0; row < COUNT; row++) {
      if (at + row >= stop) break;
      const i64 inner = Build::page > 0 ? (at + row) % PAGE_OR_1 : at + row;
      u32 turned[K_WORDS];
#pragma unroll
      for (int word = 0; word < K_WORDS; word++)
        turned[word] = turns[Build::rotary_dim > 0 ? row : 0][word].of(
            k[row][word], WORD_NUMBERS * (lane + 32 * word));
      store_row<K_WORDS, Build::head_dim>(stage,
                                          p.k + (i64)outer[row] * p.stride_k_batch +
                                              inner * p.stride_k_token + kv_head * p.stride_k_head,
                                          at + row - token, turned, lane);
      store_row<V_WORDS, Build::v_head_dim>(stage + V_AT,
                                            p.v + (i64)outer[row] * p.stride_v_batch +
                                                inner * p.stride_v_token +
                                                kv_head * p.stride_v_head,
                                            at + row - token, v[row], lane);
    }
  }

  template <int WORDS, int DIM>
  DEVICE void store_row(u32 stage, KvNumber *in_cache, int row, const u32 (&words)[WORDS],
                        int lane) const {
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
      const int at = lane + 32 * word, piece = at / 4;
      if (WORD_NUMBERS * at >= DIM) continue;
      // The layout of copies.
      st_shared_b32(stage + (piece / COLUMN_PIECES * Build::chunk + row) * Build::column_bytes +
                        ((piece % COLUMN_PIECES ^ swizzle_of(row % 8)) << 4) + at % 4 * 4,
                    words[word]);
      if (to_cache) reinterpret_cast<u32 *>(in_cache)[at] = words[word];
    }
  }

  // Writes the new tokens of the chunk in `stage`; the first have been read already.
  DEVICE void write_chunk(const Params &p, const Position &part, u32 stage, int lane) {
    const int first = max(token, length);
    store<FIRST_ROWS>(p, part, stage, first, lane);
#pragma unroll 1
    for (int at = first + FIRST_ROWS; at < stop; at += APPEND_ROWS) {
      load<APPEND_ROWS>(p, part, at, lane);
      store<APPEND_ROWS>(p, part, stage, at, lane);
    }
    if constexpr (Build::bulk) fence_proxy_async_shared_cta();  // before the stage's next copy
    __syncwarp();
  }
};
