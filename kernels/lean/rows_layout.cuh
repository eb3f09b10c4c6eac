// Layout of a CTA of many_rows.cu: roles of threads, shared memory, barriers.
//
// A CTA has the Build::rows rows of an output tile, 64 per warpgroup, and a ring of stages, each
// with K and V of Build::chunk tokens, read by all warpgroups. One or four more warps copy: with
// Build::bulk by bulk copies, otherwise 16 bytes per lane. Build::cluster > 1: the CTAs of a
// cluster share a whole output tile, take its chunks in turn and merge in distributed shared
// memory. A LeanTile has a multiple of Build::chunk tokens.
#pragma once
#include "params.cuh"
#include "schedule.cuh"

constexpr int GROUP_ROWS = 64;                        // of a warpgroup
constexpr int WARPGROUPS = Build::rows / GROUP_ROWS;  // number of computing warpgroups
static_assert(Build::cluster == 1 || (Build::bulk && !Build::ragged && WARPGROUPS == 1));
constexpr int CONSUMERS = 128 * WARPGROUPS;  // their threads
constexpr int COPY_WARP = CONSUMERS / 32;    // first copying warp
// A warp starts its lanes' copies one at a time, which for small pages takes as long as their
// bytes. The four copying warps needed by two warpgroups share them. Copies by lanes always use 128
// threads.
constexpr int COPY_WARPS =
    !Build::bulk || (WARPGROUPS > 1 && Build::page > 0 && Build::page < Build::chunk) ? 4 : 1;
static_assert(Build::kv_dtype == 0 && !Build::append && !Build::fixed_runs &&
              Build::rotary_dim == 0 && !Build::peers && !Build::packs &&
              Build::warps == COPY_WARP + (WARPGROUPS > 1 || !Build::bulk ? 4 : 1));
// Arrivals at a barrier for a stage's K, or V: of warps that start bulk copies, or of copying
// threads.
constexpr int COPY_ARRIVALS = Build::bulk ? COPY_WARPS : 32 * COPY_WARPS;
// Registers per thread if computing threads need more than an equal share: those of a copying
// thread, and the remainder for the others.
constexpr bool MOVES_REGISTERS = WARPGROUPS > 1 || (!Build::bulk && Build::ctas_per_sm > 1);
constexpr int EACH_REGISTERS = WARPGROUPS > 1 ? 168 : 128;
constexpr int COPY_REGISTERS = Build::v_head_dim > 128 ? 40 : Build::bulk ? 56 : 72;
constexpr int CONSUMER_REGISTERS =
    ((WARPGROUPS + 1) * EACH_REGISTERS - COPY_REGISTERS) / WARPGROUPS;
static_assert(COPY_REGISTERS % 8 == 0 && CONSUMER_REGISTERS % 8 == 0);

constexpr int SCORES =
    Build::chunk / 2;  // of a thread: 64 rows of Build::chunk tokens per warpgroup
constexpr int COLUMNS = Build::v_head_dim / 2;    // of a thread: the output
constexpr int TOKEN_STEPS = Build::chunk / 16;    // matrix instructions along the tokens
constexpr int QUERY_COLUMN = Build::rows * 128;   // bytes of 64 numbers of all rows
constexpr int TOKEN_COLUMN = Build::chunk * 128;  // bytes of 64 numbers of all tokens

// A partial in the workspace consists of 16-byte units. Each arrives whole and carries the epoch of
// its launch. A unit has four columns of a row, as held by the threads of a quad; the last 8 bits
// of each column are replaced by a byte of the epoch. All rows are followed by the (m, l) of each
// row with the epoch.
constexpr int ROW_UNITS = Build::v_head_dim / 4;
constexpr int LOGS_UNIT = Build::rows * ROW_UNITS;
static_assert(16 * (LOGS_UNIT + Build::rows) == Build::partial_bytes,
              "Build::partial_bytes differs from ManyRowsBuild's");

// Q, and rows of the output on their way to memory.
constexpr int STAGES_AT = (K_COLUMNS > V_COLUMNS ? K_COLUMNS : V_COLUMNS) * QUERY_COLUMN;
constexpr int BARRIERS = STAGES_AT + Build::stages * STAGE;
// Barriers for each of the stages.
constexpr int K_FULL = BARRIERS, K_EMPTY = K_FULL + 8 * Build::stages;
constexpr int V_FULL = K_EMPTY + 8 * Build::stages, V_EMPTY = V_FULL + 8 * Build::stages;
constexpr int FOUND_AT =
    V_EMPTY + 8 * Build::stages + (Build::keeps ? 15 : 0) & (Build::keeps ? ~15 : ~0);
static_assert(FOUND_AT + KEPT_BYTES == Build::shared_bytes,
              "Build::shared_bytes differs from ManyRowsBuild's");

// Named barriers: of all warpgroups, and from these numbers on of each warpgroup and its turn.
constexpr int OF_CONSUMERS = 1, OF_WARPGROUP = 2, TURN_OF_WARPGROUP = 4;
static_assert(WARPGROUPS <= 2);

// The CTA's position in the ring.
struct Stage {
  int filled;  // stages before this one

  DEVICE int index() const { return filled % Build::stages; }
  DEVICE int parity() const { return filled / Build::stages % 2; }
  DEVICE u32 k(u32 shared) const { return shared + STAGES_AT + index() * STAGE; }
  DEVICE u32 v(u32 shared) const { return k(shared) + V_AT; }
  DEVICE u32 barrier(u32 shared, int at) const { return shared + at + 8 * index(); }
};

// Build::cluster > 1: the sums of a CTA's rows, read by its peers, overlay the ring; and the (m, l)
// of each row.
constexpr int SUM_ROW = Build::v_head_dim + 8;  // 8: rows fall into different banks
constexpr int SUMS_AT = STAGES_AT, SUM_LOGS_AT = SUMS_AT + 4 * Build::rows * SUM_ROW;
static_assert(Build::cluster == 1 || SUM_LOGS_AT + 8 * Build::rows <= BARRIERS);

DEVICE int warpgroup() { return threadIdx.x / 128; }

// Returns the copy of a stage made by a lane of a copying warp.
DEVICE int own_copy() { return threadIdx.x % 32 * COPY_WARPS + threadIdx.x / 32 - COPY_WARP; }

// Returns the row of the output tile in a thread's accumulators 0 and 1; 2 and 3 are 8 rows
// further.
DEVICE int own_row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }

// Returns the token, or column, of accumulator `i` of a thread.
DEVICE int own_column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// Returns the swizzled offset in shared memory of 8 numbers of a row of Q, or of the output.
DEVICE int piece_at(int row, int piece) {
  return piece / 8 * QUERY_COLUMN + row * 128 + (piece % 8 ^ row % 8) * 16;
}

// Returns the number of rows in use of the output tile.
DEVICE int rows_of(const Position &part) {
  return min(Build::rows, all_rows(part.queries.count) - part.head_tile().row_offset);
}
