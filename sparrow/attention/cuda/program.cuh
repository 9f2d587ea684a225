// The kernel's arguments, and the data and memory of each of its programs.
#pragma once

#include "tiles.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int SCALES = CACHE == INT8 ? P : 0;  // bytes of the exponents of a page's keys, or of its values
constexpr int SLOT = 2 * (TILE + SCALES);     // keys and values of a page, then exponents of both
constexpr int COPY_ROWS = 32 / CHUNKS;        // rows that a warp copies at once
constexpr int MARK_COPY_ROWS = 32 / MARK_CHUNKS;
constexpr int TILES_IN_FLIGHT = STAGES * SLOT / MARK_TILE;  // tiles of landmarks, per warp
constexpr int AT_ONCE = 8;                    // scores that a thread loads before it waits for the first
constexpr int ALL_PAGES = 1 << 30;            // a top_k that head budgets do not scale
constexpr int ALWAYS = SINK + RECENT;         // always-kept pages; a row with ranked pages has all of them

template <Format FORMAT> struct Stored { typedef u16 Type; };
template <> struct Stored<E4M3> { typedef unsigned char Type; };
template <> struct Stored<INT8> { typedef signed char Type; };
typedef Stored<CACHE>::Type Entry;  // element of a key or value
typedef Stored<MARKS>::Type Mark;   // element of a landmark
template <Format FORMAT> struct Scales { typedef float Type; };                 // one per head
template <> struct Scales<INT8> { typedef unsigned char Type; };                // one per token and head
typedef Scales<CACHE>::Type Scale;

// head_budgets: factors that multiply top_k, in units of 1 / 256; null if all heads keep top_k pages.
struct Args {
  const u16 *q;
  const Entry *k, *v;
  Mark *landmarks;
  const int* table;
  u16 *out;
  int *rows;
  float *partial, *stats;
  int *ready, *counters;
  const int4 *plan;
  const Scale *k_scales, *v_scales;
  const int *head_budgets;
  i64 q_row, q_head, block, head, token, landmark_block, landmark_page, landmark_head, table_row, out_row, out_head;
  i64 rows_row;
  float scale_log2;
  int count, rank_before_wait, capacity;
  i64 scale_block, scale_head;
};

struct Shared {  // values that a program's warps exchange, besides scores and lists
  float low[WARPS], high[WARPS];
  int sums[WARPS];
  int candidates, last;
};

// A program: one part of the kept pages of one row and kv head, according to the batch's plan.
struct Program {
  const Args& a;
  // A thread's position, also within a tile of results: rows row8 and row8 + 8, columns 2 * column2
  // and 2 * column2 + 1.
  const int lane, warp, row8, column2;
  const Chunks chunks;
  // Dynamic shared memory; its size must match ``shared_bytes`` in launch.py.
  unsigned char* ring;     // [WARPS, STAGES] slots for pages in flight; afterwards the warps' results
  int* bins;               // [BINS] number of scores in each bin
  float* candidate_score;  // [CANDIDATES] candidates from the last bin
  int* candidate_index;
  Shared* shared;
  float* scores;           // [capacity] scores of the row's pages
  int* list;               // in the scores' memory: first the row's blocks, finally the kept pages' indices
  u32 *prefetched, *kept;  // one bit per page: whether it was prefetched, and whether it is kept
  int b;
  int head;
  int part;
  int parts;
  int item;
  int first_partial;  // index of the row's first part among all partial results
  int tokens;
  int pages;
  int ranked_end;
  int budget;
  // Pages that start at a new token other than the first; they are kept in addition to the recent
  // pages.
#if NEW_TOKENS == 1
  static constexpr int begun = 0;
#else
  int begun;
#endif
  bool listed;  // whether only some of the row's pages are kept
  bool ranks;   // whether this program selects the kept pages
  const int* table;
  // Addresses and offsets of this thread's copies.
  u32 warp_ring;
  int copy_row, copy_chunk, mark_row, mark_chunk;
  const Entry *keys, *values;
  const Mark *landmarks;

  DEVICE Program(const Args& a, unsigned char* memory)
      : a(a), lane(threadIdx.x % 32), warp(threadIdx.x / 32), row8(lane / 4), column2(lane % 4), chunks(lane),
        ring(memory) {
    bins = (int*)(ring + WARPS * STAGES * SLOT);
    candidate_score = (float*)(bins + BINS);
    candidate_index = (int*)(candidate_score + CANDIDATES);
    shared = (Shared*)(candidate_index + CANDIDATES);
    scores = (float*)(shared + 1);
    list = (int*)scores;
    prefetched = (u32*)(scores + a.capacity);
    kept = prefetched + a.capacity / 32;
    const int4 entry = a.plan[blockIdx.x / K * 2];
    const int4 row = a.plan[blockIdx.x / K * 2 + 1];
    b = entry.x;
    part = entry.y;
    parts = entry.z;
    head = blockIdx.x % K;
    item = b * K + head;
    first_partial = entry.w * K + head;
    tokens = row.x;
    pages = (tokens + P - 1) / P;
#if NEW_TOKENS > 1
    begun = pages - (max(tokens - (NEW_TOKENS - 1), 0) + P - 1) / P;
#endif
    const int ranked = max(pages - begun - ALWAYS, 0);
    int top_k = max(row.y, 0);
    if (a.head_budgets && top_k < ALL_PAGES)
      top_k = (int)min((i64)ALL_PAGES, ((i64)top_k * __ldg(a.head_budgets + head) + 128) >> 8);
    ranked_end = SINK + ranked;
    budget = min(ranked, top_k);
    listed = budget < ranked;
    ranks = listed && (EACH_RANKS || part == 0);
    table = a.table + b * a.table_row;
    warp_ring = shared_address(ring) + warp * STAGES * SLOT;
    copy_row = lane / CHUNKS;
    copy_chunk = lane % CHUNKS;
    mark_row = lane / MARK_CHUNKS;
    mark_chunk = lane % MARK_CHUNKS;
    keys = a.k + head * a.head + copy_chunk * (16 / (int)sizeof(Entry));
    values = a.v + head * a.head + copy_chunk * (16 / (int)sizeof(Entry));
    landmarks = a.landmarks + head * a.landmark_head + mark_chunk * (16 / (int)sizeof(Mark));
  }

  // Row and head of a query, and of its result.
  DEVICE int row_of(int query) const { return NEW_TOKENS == 1 ? b : b * NEW_TOKENS + query / G; }
  DEVICE int head_of(int query) const { return head * G + (NEW_TOKENS == 1 ? query : query % G); }

  DEVICE int page_at(int n) const {  // id of the row's n-th page
    return PER_BLOCK == 1 ? table[n] : table[n / PER_BLOCK] * PER_BLOCK + n % PER_BLOCK;
  }

  // Copies the keys and values of the page with this id into a slot of the ring; n is the page's
  // index in the row, or -1 for a page that is known to be full.
  DEVICE void load_page(int n, int page, int slot) const {
    const u32 to = warp_ring + slot * SLOT;
    const int inside = n == pages - 1 ? tokens - n * P : P;  // later tokens may be NaN, and 0 * NaN is NaN
    i64 from = (i64)(page / PER_BLOCK) * a.block + (page % PER_BLOCK * P + copy_row) * a.token;
#pragma unroll
    for (int row = copy_row; row < P + copy_row; row += COPY_ROWS, from += COPY_ROWS * a.token) {
      const int at = swizzled<ROW>(row, copy_chunk), bytes = row < inside ? 16 : 0;
      copy16(to + at, keys + from, bytes);
      copy16(to + TILE + at, values + from, bytes);
    }
    if constexpr (CACHE == INT8)  // scales beyond the end of a sequence may be anything, and are not used
      if (lane < 2)
        copy_scales(to + 2 * TILE + lane * SCALES, (lane ? a.v_scales : a.k_scales) + head * a.scale_head +
                    (i64)(page / PER_BLOCK) * a.scale_block + page % PER_BLOCK * P);
  }

  // Copies the landmarks of the 16 pages of the warp's i-th tile; `list` contains the pages' blocks.
  DEVICE void load_landmarks(int i, int place) const {
#pragma unroll
    for (int j = 0; j < 16 / MARK_COPY_ROWS; ++j) {
      const int row = j * MARK_COPY_ROWS + mark_row;
      const int n = min((warp + i * WARPS) * 16 + row, pages - 1);
      copy16(warp_ring + place * MARK_TILE + swizzled<MARK_ROW>(row, mark_chunk),
             landmarks + list[n] * a.landmark_block + n % PER_BLOCK * a.landmark_page);
    }
  }
};
