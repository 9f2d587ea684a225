// Page-sparse decode attention in one launch, for Hopper: rank a row's pages, select the best ones,
// and attend to them.
//
// This does three things that the Triton kernels cannot do. Each warp has its own tiles in flight
// and never waits for another warp's. Scores come from the tensor cores and stay in shared memory.
// Pages that are nearly always kept (the first, the newest, each warp's best) are already being
// fetched while the selection is computed.
//
// The files build on each other: tiles.cuh (a warp and its tiles), program.cuh (the work of a
// program), select.cuh (page selection). This file contains scoring, attention, and the sums over
// warps and parts; the kernel is the last function.
//
// The division of the batch (attention/division.py), the scratch memory and the meaning of every
// argument are the same as for the Triton kernels (attention/triton/kernels.py); pages.py is the
// specification for both. The 16 tokens of a page are the rows of a tensor-core tile. The queries
// that read a page are the columns of one or more tiles of 8 columns. Logits are in base 2.
//
// A row may have several new tokens. The queries of the first new token rank the pages. The queries
// of all new tokens read the kept pages, and each query sees the new tokens up to and including its
// own.
//
// Macros defined at compilation: D head dim, G query heads per KV head, K KV heads, NEW_TOKENS new
// tokens of each row, PER_BLOCK pages per block of the cache, SINK and RECENT always-kept pages,
// BF16 (otherwise float16), FP8_CACHE and FP8_LANDMARKS (e4m3, otherwise the queries' dtype),
// INT8_CACHE (scales per token and head, attention/int8.py), WARPS, STAGES pages in flight per
// warp, RESIDENT programs that should fit on a multiprocessor, EACH_RANKS whether every part of a
// row ranks the row's pages (otherwise, the first part does so, and the others wait for its list),
// BINS for scores, and CANDIDATES, the maximum number of scores ranked in a bin.

#include "select.cuh"

static_assert(P == 16, "a page is the 16 rows of a tensor-core tile");
static_assert(D == 64 || D == 128 || D == 256,
              "rows of 4, 8, 16 or 32 chunks are those that `swizzled` knows");
static_assert(1 <= G && G <= MAX_GROUP, "the group's heads are the columns of one or two tiles");
static_assert(1 <= NEW_TOKENS && NEW_TOKENS <= P, "new tokens are in the two newest pages");
static_assert(QUERIES <= MAX_QUERIES, "sums and queries of up to four tiles fit in registers");
static_assert(STEPS % 2 == 0, "in 8 bits, one load brings two steps of a product");
static_assert(32 % CHUNKS == 0 && P % COPY_ROWS == 0,
              "a warp copies whole rows, and a page in whole turns");
static_assert(32 % MARK_CHUNKS == 0 && 16 % MARK_COPY_ROWS == 0,
              "a warp copies whole landmarks, and a tile of them in whole turns");
static_assert((WARPS & (WARPS - 1)) == 0 && WARPS <= 32, "lanes exchange the warps' extremes");
static_assert(STAGES <= 32, "each lane remembers one page that was prefetched");
static_assert(TILES_IN_FLIGHT >= 1, "a warp's slots hold at least one tile of landmarks");
static_assert(BINS == 32 * 32, "each of 32 lanes counts 32 bins");
static_assert(SINK >= 0 && RECENT >= 1, "the newest page, filled in part, is never ranked");
static_assert(!(FP8_CACHE && INT8_CACHE), "the cache has one format");
static_assert(NEW_TOKENS == 1 || WARPS >= 2, "two warps begin with the two newest pages");
static_assert(WARPS * (QUERIES * D + 2 * COLUMNS) * 4 <= WARPS * STAGES * SLOT + 4 * BINS,
              "the warps' results take the place of the ring and the bins");

// Queries, laid out as the right-hand side of products, and a factor to apply to the products.
template <int COUNT> struct Queries {
  static constexpr int TILES = (COUNT + 7) / 8;
  QueryTiles<TILES> q;
  float factor;
};

// The first COUNT queries for 16-bit rows.
template <int COUNT>
DEVICE Queries<COUNT> load_queries_for_16_bits(const Program& p) {
  constexpr int TILES = Queries<COUNT>::TILES;
  Queries<COUNT> queries;
  queries.factor = 1.f;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    const int query = 8 * t + p.row8;
    const u32* const from =
        (const u32*)(p.a.q + p.row_of(query) * p.a.q_row + p.head_of(query) * p.a.q_head);
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i)
      queries.q[t][i] = query < COUNT ? from[4 * i + p.column2] : 0u;
  }
  return queries;
}

// The first COUNT queries for 8-bit rows, in float16 and in the order that
// ``times_queries_in_halves`` expects. Queries in bfloat16 are scaled by one power of 2 that brings
// the largest to 2^14 or more; values that float16 cannot represent are then too small to matter.
template <int COUNT>
DEVICE Queries<COUNT> load_queries_for_8_bits(const Program& p) {
  constexpr int TILES = Queries<COUNT>::TILES;
  Queries<COUNT> queries;
  queries.factor = 1.f;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    const int query = 8 * t + p.row8;
    const uint2* const from =
        (const uint2*)(p.a.q + p.row_of(query) * p.a.q_row + p.head_of(query) * p.a.q_head);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      const uint2 four = query < COUNT ? from[4 * j + p.column2] : make_uint2(0, 0);
      queries.q[t][2 * j] = four.x;
      queries.q[t][2 * j + 1] = four.y;
    }
  }
#if BF16
  u32* const q = &queries.q[0][0];
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < TILES * 2 * STEPS; ++i)
    largest = max(largest, max(q[i] & 0x7fff, q[i] >> 16 & 0x7fff));
  const int exponent = __reduce_max_sync(ALL, largest) >> 7;
  const int scale_exponent = min(254, 2 * 127 + 14 - exponent);
  const float scale = __int_as_float(scale_exponent << 23);
  queries.factor = __int_as_float((254 - scale_exponent) << 23);
#pragma unroll
  for (int i = 0; i < TILES * 2 * STEPS; ++i)
    q[i] = pack_halves(__int_as_float(q[i] << 16) * scale,
                       __int_as_float(q[i] & 0xffff0000u) * scale);
#endif
  return queries;
}

template <bool IN_8_BITS, int COUNT>
DEVICE Queries<COUNT> load_queries(const Program& p) {
  if constexpr (IN_8_BITS) return load_queries_for_8_bits<COUNT>(p);
  else return load_queries_for_16_bits<COUNT>(p);
}

// Extremes of the scores that a thread has computed.
struct Seen {
  float low;
  float high;
  int best;  // page with the highest score
  int best_block;
};

// Looks up the blocks of the row and clears the selection's counters; a warp can then load its
// first landmarks.
DEVICE void stage_blocks(const Program& p) {
  // Copies the blocks of the tiles that this warp ranks, two tiles at a time; the tiles needed
  // first are in a commit group of their own.
  auto copy_blocks = [&](int i) {
    const int n = (p.warp + (i + p.lane / 16) * WARPS) * 16 + p.lane % 16;
    if (n < p.pages) copy4(shared_address(p.list + n), p.table + n / PER_BLOCK);
  };
#pragma unroll
  for (int i = 0; i < TILES_IN_FLIGHT; i += 2) copy_blocks(i);
  commit();
#pragma unroll 4
  for (int i = TILES_IN_FLIGHT; (p.warp + i * WARPS) * 16 < p.pages; i += 2) copy_blocks(i);
  commit();
#pragma unroll 1
  for (int i = threadIdx.x; i < p.a.capacity / 32; i += THREADS) p.prefetched[i] = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < BINS / 4; i += THREADS) ((int4*)p.bins)[i] = make_int4(0, 0, 0, 0);
  if (threadIdx.x == 0) p.shared->candidates = 0;
  wait_for_all_but<1>();
  __syncwarp();
}

// Replaces blocks with scores. The tiles of 16 landmarks are divided among the warps, and each warp
// has TILES_IN_FLIGHT tiles in flight.
DEVICE Seen score_pages(const Program& p, const Queries<G>& queries) {
  constexpr int TILES = Queries<G>::TILES;
  Seen seen = {infinity(), -infinity(), 0, 0};
  const int tiles = (p.ranked_end + 15) / 16;
  const int own = p.warp < tiles ? (tiles - p.warp + WARPS - 1) / WARPS : 0;
#pragma unroll 1
  for (int i = 0; i < TILES_IN_FLIGHT; ++i) {
    if (i < own) p.load_landmarks(i, i);
    commit();
  }
  wait_for_all_but<TILES_IN_FLIGHT>();
  __syncthreads();
  int place = 0;
  for (int i = 0; i < own; ++i) {
    wait_for_all_but<TILES_IN_FLIGHT - 1>();
    __syncwarp();
    const u32 tile = p.warp_ring + place * MARK_TILE;
    Sums<TILES> even = {};
    Sums<TILES> odd = {};
    times_queries<MARKS>(even, odd, tile, queries.q, p.chunks);
    // The mean query's score, times G (and the queries' scale); columns beyond the group contain no
    // queries.
    float first = 0.f;
    float second = 0.f;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const int head = 8 * t + 2 * p.column2;
      if (head < G) {
        first += even[t][0] + odd[t][0];
        second += even[t][2] + odd[t][2];
      }
      if (head + 1 < G) {
        first += even[t][1] + odd[t][1];
        second += even[t][3] + odd[t][3];
      }
    }
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) {
      first += __shfl_xor_sync(ALL, first, o);
      second += __shfl_xor_sync(ALL, second, o);
    }
    const int n = (p.warp + i * WARPS) * 16 + p.row8 + p.column2 * 8;
    if (p.column2 < 2 && n >= SINK && n < p.ranked_end) {
      const float score = (p.column2 ? second : first) + 0.f;  // -0.0 equals 0.0
      seen.low = fminf(seen.low, score);
      if (score > seen.high) {
        seen.high = score;
        seen.best = n;
        seen.best_block = p.list[n];
      }
      p.scores[n] = score;
    }
    __syncwarp();
    if (i + TILES_IN_FLIGHT < own) p.load_landmarks(i + TILES_IN_FLIGHT, place);
    commit();
    if (++place == TILES_IN_FLIGHT) place = 0;
  }
  wait_for_all_but<0>();
  __syncwarp();
  return seen;
}

// Pages that a warp fetches before the selection is known; lane i remembers the i-th page.
struct Prefetch {
  int count;
  int page;
  float score;  // infinite for pages that are always kept
};

// Fetches a warp's share of the always-kept pages, the newest first, and then the pages with the
// highest scores in the warp. If every part of the row ranks, the parts take turns fetching these
// pages, which are the same in every part.
DEVICE Prefetch prefetch(const Program& p, const Seen& seen) {
  Prefetch fetched = {0, -1, infinity()};
  u32 key = seen.high > -infinity() ? order_of(seen.high) : 0u;
  int next = 0;  // part whose turn it is
#pragma unroll 1
  for (int turn = p.warp; EACH_RANKS ? turn < STAGES * p.parts * WARPS : fetched.count < STAGES;
       turn += WARPS) {
    int n;
    int page;
    float score = infinity();
    if (turn < ALWAYS + p.begun) {
      n = turn < RECENT + p.begun ? p.pages - 1 - turn : turn - (RECENT + p.begun);
      page = p.list[n] * PER_BLOCK + n % PER_BLOCK;
    } else {
      const u32 top = __reduce_max_sync(ALL, key);
      if (!top) break;
      const int who = __ffs(__ballot_sync(ALL, key == top)) - 1;
      n = __shfl_sync(ALL, seen.best, who);
      page = __shfl_sync(ALL, seen.best_block, who) * PER_BLOCK + n % PER_BLOCK;
      score = from_order(top);
      if (p.lane == who) key = 0;
    }
    const bool is_own = !EACH_RANKS || next == p.part;
    if (is_own) {
      p.load_page(n, page, fetched.count);
      commit();
    }
    if (p.lane == 0) atomicOr(&p.prefetched[n / 32], 1u << (n & 31));
    if (is_own) {
      if (p.lane == fetched.count) {
        fetched.page = n;
        fetched.score = score;
      }
      ++fetched.count;
    }
    next = next + 1 == p.parts ? 0 : next + 1;
  }
  return fetched;
}

// Shares the list with the row's other parts, and returns how many of its entries this part attends
// to itself. With the prefetched pages, that gives it as many pages as any other part.
DEVICE int share_list(const Program& p, int listed) {
  const int all = ALWAYS + p.begun + p.budget;
  const int equal = (all + p.parts - 1) / p.parts;
  const int own = min(max(equal - (all - listed), 0), listed);
#pragma unroll 1
  for (int i = threadIdx.x; i < listed; i += THREADS)
    p.a.rows[p.item * p.a.rows_row + i] = p.page_at(p.list[i]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicExch(p.a.ready + p.item, 1 << 30 | own << 15 | listed);
  return own;
}

// Pages that a program attends to besides the prefetched pages: a range of positions in the list,
// or in the row if all its pages are kept.
struct Range {
  int begin;
  int end;
};

// Waits for the list from the row's first part; returns this part's share of the entries that the
// first part does not attend to.
DEVICE Range wait_for_list(const Program& p) {
  if (threadIdx.x == 0) {
    int message;
    do {
      asm volatile("ld.acquire.gpu.s32 %0, [%1];"
                   : "=r"(message) : "l"(p.a.ready + p.item) : "memory");
    } while (message == 0);
    p.shared->last = message;
  }
  __syncthreads();
  const int message = p.shared->last;
  const int first = message >> 15 & 0x7fff;
  const int others = (message & 0x7fff) - first;
  const Range range = {first + (int)((u32)others * (p.part - 1) / (p.parts - 1)),
                       first + (int)((u32)others * p.part / (p.parts - 1))};
  __syncthreads();
  return range;
}

constexpr bool NARROW = CACHE != BITS16;
// A thread owns two of every 16 dimensions; 8-bit dimensions come in adjacent pairs.
constexpr int OWN = NARROW ? 2 : 1;
constexpr int OTHER = NARROW ? 1 : 8;

// The running softmax of a warp, for the queries of a thread's two columns in each tile.
//
// Values in int8 are added as codes, so the weights have to include the values' scales, 2^e. The
// exponent is added to the logit, and the maximum is taken over logits plus exponents. All weights
// 2^(logit + e - max) are therefore at most 1 and fit in float16. A token contributes 2^(logit -
// max) to the sum, which is the weight times 2^-e. The exponents of a cache are at most 100 apart,
// so a weight that is flushed to 0 (below 2^-126) belongs to a token with less than 2^-26 of the
// sum. A token at the maximum contributes 2^-e, so sums are normal floats. Warps and parts are
// merged as for other caches, with one maximum for both weights and sums.
struct Softmax {
  // value dimensions d = j * 16 + OWN * row8 and d + OTHER
  float acc[COLUMN_TILES][STEPS][4];
  float max0[COLUMN_TILES];
  float max1[COLUMN_TILES];
  float sum0[COLUMN_TILES];
  float sum1[COLUMN_TILES];

  DEVICE Softmax() {
#pragma unroll
    for (int t = 0; t < COLUMN_TILES; ++t) {
      max0[t] = -1e30f;
      max1[t] = -1e30f;
      sum0[t] = 0.f;
      sum1[t] = 0.f;
#pragma unroll
      for (int j = 0; j < STEPS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[t][j][i] = 0.f;
    }
  }

  // Adds the page at an address in the ring. `is_new` states whether the page may contain new
  // tokens. If so, it is the `age`-th page from the row's end, and a query may see only a part of
  // it.
  DEVICE void add_page(
      const Program& p, const Queries<QUERIES>& queries, u32 address, bool is_new, int age) {
    Sums<COLUMN_TILES> logits = {};
    Sums<COLUMN_TILES> odd = {};
    times_queries<CACHE>(logits, odd, address, queries.q, p.chunks);
#pragma unroll
    for (int t = 0; t < COLUMN_TILES; ++t)
#pragma unroll
      for (int j = 0; j < 4; ++j) logits[t][j] = (logits[t][j] + odd[t][j]) * queries.factor;
    float in_sum0 = 1.f;  // factor of a token's weight in the sum
    float in_sum1 = 1.f;
    if constexpr (CACHE == INT8) {
      const u32 of_keys = address + 2 * TILE + p.row8;
      const u32 of_values = of_keys + SCALES;
      const float key0 = scale_of(load_byte(of_keys));
      const float key1 = scale_of(load_byte(of_keys + 8));
      const u32 value0 = load_byte(of_values);
      const u32 value1 = load_byte(of_values + 8);
      const float exponent0 = exponent_of(value0);
      const float exponent1 = exponent_of(value1);
#pragma unroll
      for (int t = 0; t < COLUMN_TILES; ++t) {
        logits[t][0] = logits[t][0] * key0 + exponent0;
        logits[t][1] = logits[t][1] * key0 + exponent0;
        logits[t][2] = logits[t][2] * key1 + exponent1;
        logits[t][3] = logits[t][3] * key1 + exponent1;
      }
      in_sum0 = reciprocal_of(value0);
      in_sum1 = reciprocal_of(value1);
    }
    if (is_new) {
      __syncwarp();  // keeps this a branch; otherwise every page would pay for the masks
      const int inside = p.tokens - P * (p.pages - 1 - age);
      if constexpr (CACHE == INT8) {  // an unwritten byte may represent infinity; 0 * inf is NaN
        if (p.row8 >= inside) in_sum0 = 0.f;
        if (p.row8 + 8 >= inside) in_sum1 = 0.f;
      }
#pragma unroll
      for (int t = 0; t < COLUMN_TILES; ++t) {
        const int query = 8 * t + 2 * p.column2;
        const int seen0 = NEW_TOKENS == 1 ? inside : inside - (NEW_TOKENS - 1) + query / G;
        const int seen1 = NEW_TOKENS == 1 ? inside : inside - (NEW_TOKENS - 1) + (query + 1) / G;
        if (p.row8 >= seen0) logits[t][0] = -infinity();
        if (p.row8 >= seen1) logits[t][1] = -infinity();
        if (p.row8 + 8 >= seen0) logits[t][2] = -infinity();
        if (p.row8 + 8 >= seen1) logits[t][3] = -infinity();
      }
    }
    Sums<COLUMN_TILES> weights;
#pragma unroll
    for (int t = 0; t < COLUMN_TILES; ++t)
      add_weights(t, logits[t], weights[t], in_sum0, in_sum1);
    add_values(p, address + TILE, weights);
  }

  // Turns the logits of one tile into weights and adds them to the sums.
  DEVICE void add_weights(
      int t, const float* logit, float* weight, float in_sum0, float in_sum1) {
    float top0 = fmaxf(logit[0], logit[2]);
    float top1 = fmaxf(logit[1], logit[3]);
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
      top0 = fmaxf(top0, __shfl_xor_sync(ALL, top0, o));
      top1 = fmaxf(top1, __shfl_xor_sync(ALL, top1, o));
    }
    if (__any_sync(ALL, top0 > max0[t] || top1 > max1[t])) {
      top0 = fmaxf(max0[t], top0);
      top1 = fmaxf(max1[t], top1);
      const float shrink0 = exp2_of(max0[t] - top0);
      const float shrink1 = exp2_of(max1[t] - top1);
      max0[t] = top0;
      max1[t] = top1;
      sum0[t] *= shrink0;
      sum1[t] *= shrink1;
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
        acc[t][j][0] *= shrink0;
        acc[t][j][1] *= shrink1;
        acc[t][j][2] *= shrink0;
        acc[t][j][3] *= shrink1;
      }
    }
    weight[0] = exp2_of(logit[0] - max0[t]);
    weight[1] = exp2_of(logit[1] - max1[t]);
    weight[2] = exp2_of(logit[2] - max0[t]);
    weight[3] = exp2_of(logit[3] - max1[t]);
    if constexpr (CACHE == INT8) {
      sum0[t] += weight[0] * in_sum0 + weight[2] * in_sum1;
      sum1[t] += weight[1] * in_sum0 + weight[3] * in_sum1;
    } else {
      sum0[t] += weight[0] + weight[2];
      sum1[t] += weight[1] + weight[3];
    }
  }

  // Adds values times weights; tokens are the columns of the left-hand side.
  DEVICE void add_values(const Program& p, u32 tile, const Sums<COLUMN_TILES>& weights) {
    u32 right0[COLUMN_TILES];
    u32 right1[COLUMN_TILES];
#if FP8_CACHE || INT8_CACHE
    const int row = p.lane % 8 + p.lane / 16 * 8;
    const int chunk = p.lane / 8 % 2;
#pragma unroll
    for (int t = 0; t < COLUMN_TILES; ++t) {
      right0[t] = transposed(pack_halves(weights[t][0], weights[t][1]));
      right1[t] = transposed(pack_halves(weights[t][2], weights[t][3]));
    }
#pragma unroll
    for (int j = 0; j < STEPS; j += 2) {
      u32 x[4];  // each word holds two adjacent dimensions of each of two tokens
      load_tiles_transposed(x, tile + swizzled<ROW>(row, j + chunk));
      prepare<CACHE>(x);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 first = x[i];       // tokens 0 to 7
        const u32 second = x[i + 2];  // tokens 8 to 15
        const u32 left[4] = {pair_of<CACHE, 0, 2>(first), pair_of<CACHE, 1, 3>(first),
                             pair_of<CACHE, 0, 2>(second), pair_of<CACHE, 1, 3>(second)};
#pragma unroll
        for (int t = 0; t < COLUMN_TILES; ++t)
          multiply<false>(acc[t][j + i], left, right0[t], right1[t]);
      }
    }
#else
#pragma unroll
    for (int t = 0; t < COLUMN_TILES; ++t) {
      right0[t] = transposed(pack(weights[t][0], weights[t][1]));
      right1[t] = transposed(pack(weights[t][2], weights[t][3]));
    }
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      u32 left[4];
      load_tiles_transposed(left, tile + p.chunks.columns(j));
#pragma unroll
      for (int t = 0; t < COLUMN_TILES; ++t) multiply(acc[t][j], left, right0[t], right1[t]);
    }
#endif
  }

  // Adds the sums of a warp's rows; every thread of a column gets the result.
  DEVICE void add_rows() {
#pragma unroll
    for (int t = 0; t < COLUMN_TILES; ++t)
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) {
        sum0[t] += __shfl_xor_sync(ALL, sum0[t], o);
        sum1[t] += __shfl_xor_sync(ALL, sum1[t], o);
      }
  }
};

// Attends to the prefetched pages that are kept (`fetched_kept`, one bit per prefetched page), then
// to every WARPS-th page of the range; STAGES pages are in flight.
DEVICE void attend_pages(
    const Program& p, const Queries<QUERIES>& queries, int fetched, u32 fetched_kept,
    const Range& range, Softmax& softmax) {
  const int* const ids = p.a.rows + p.item * p.a.rows_row;
  const int first = range.begin + p.warp;
  const int own = first < range.end ? (range.end - range.begin - p.warp + WARPS - 1) / WARPS : 0;
  const int all = fetched + own;
  auto page_of = [&](int i) {  // id of this warp's i-th page, not counting prefetched pages
    const int at = first + i * WARPS;
    if (i >= own) return 0;
    if (!p.listed) return p.page_at(at);
    if (EACH_RANKS || p.part == 0) return p.page_at(p.list[at]);
    return __ldcg(ids + at);
  };
  // Holds one page id per lane, starting with the `known`-th.
  int known = 0;
  int page_now = page_of(p.lane);
  int page_next = page_of(p.lane + 32);
  auto load_next = [&](int i, int slot) {
    if (i - known == 32) {
      known = i;
      page_now = page_next;
      page_next = page_of(i + 32 + p.lane);
    }
    p.load_page(p.listed ? -1 : first + i * WARPS, __shfl_sync(ALL, page_now, i - known), slot);
  };
#pragma unroll 1
  for (int i = fetched; i < STAGES; ++i) {
    if (i < all) load_next(i - fetched, i);
    commit();
  }
  int slot = 0;
  for (int i = 0; i < all; ++i) {
    wait_for_all_but<STAGES - 1>();
    __syncwarp();
    if (i >= fetched || fetched_kept >> i & 1) {
#if NEW_TOKENS == 1
      const int age = 0;
      const bool is_new =
          p.listed ? p.ranks && (!EACH_RANKS || p.part == 0) && p.warp == 0 && i == 0
                   : first + i * WARPS == p.pages - 1;
#else  // new tokens are in the two newest pages, which two of a part's warps read first
      const int age = p.listed ? p.warp : p.pages - 1 - (first + i * WARPS);
      const bool is_new =
          age < 2 && (!p.listed || (p.ranks && (!EACH_RANKS || p.part == 0) && i == 0));
#endif
      softmax.add_page(p, queries, p.warp_ring + slot * SLOT, is_new, age);
    }
    __syncwarp();
    if (i + STAGES < all) load_next(i + STAGES - fetched, slot);
    commit();
    if (++slot == STAGES) slot = 0;
  }
  wait_for_all_but<0>();
}

DEVICE void store(const Program& p, int i, float acc, float sum) {
  const float scale = CACHE == E4M3 ? __ldg(p.a.v_scales + p.head) : 1.f;
  // A row without tokens returns zeros.
  const float result = acc * __fdividef(scale, sum > 0.f ? sum : 1.f);
  const i64 to = p.row_of(i / D) * p.a.out_row + p.head_of(i / D) * p.a.out_head + i % D;
  p.a.out[to] = (u16)pack(result, 0.f);
}

// Adds the warps' results in order; the sum is the output if the row has one part, and a partial
// result otherwise.
DEVICE void add_warps(const Program& p, Softmax& softmax) {
  softmax.add_rows();
  __syncthreads();
  float* const warp_acc = (float*)p.ring;  // [WARPS, QUERIES, D]
  float* const warp_max = warp_acc + WARPS * QUERIES * D;  // [WARPS, COLUMNS]
  float* const warp_sum = warp_max + WARPS * COLUMNS;
#pragma unroll
  for (int t = 0; t < COLUMN_TILES; ++t) {
    const int query0 = 8 * t + 2 * p.column2;
    const int query1 = query0 + 1;
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      float* const to = warp_acc + p.warp * QUERIES * D + j * 16 + OWN * p.row8;
      if (query0 < QUERIES) {
        to[query0 * D] = softmax.acc[t][j][0];
        to[query0 * D + OTHER] = softmax.acc[t][j][2];
      }
      if (query1 < QUERIES) {
        to[query1 * D] = softmax.acc[t][j][1];
        to[query1 * D + OTHER] = softmax.acc[t][j][3];
      }
    }
    if (p.row8 == 0) {
      warp_max[p.warp * COLUMNS + query0] = softmax.max0[t];
      warp_max[p.warp * COLUMNS + query1] = softmax.max1[t];
      warp_sum[p.warp * COLUMNS + query0] = softmax.sum0[t];
      warp_sum[p.warp * COLUMNS + query1] = softmax.sum1[t];
    }
  }
  __syncthreads();
  const i64 cell = (i64)(p.first_partial + p.part * K) * QUERIES;
  for (int i = threadIdx.x; i < QUERIES * D; i += THREADS) {
    const int query = i / D;
    float highest = -1e30f;
    float sum = 0.f;
    float acc = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, warp_max[w * COLUMNS + query]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float weight = exp2_of(warp_max[w * COLUMNS + query] - highest);
      sum += weight * warp_sum[w * COLUMNS + query];
      acc += weight * warp_acc[w * QUERIES * D + i];
    }
    if (p.parts == 1) {
      store(p, i, acc, sum);
    } else {
      p.a.partial[cell * D + i] = acc;
      if (i % D == 0) {
        p.a.stats[cell * 2 + query] = highest;
        p.a.stats[cell * 2 + QUERIES + query] = sum;
      }
    }
  }
}

// The last program of a row to finish adds all parts in order, so the result does not depend on
// timing.
DEVICE void add_parts(const Program& p) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) p.shared->last = atomicAdd(p.a.counters + p.item, 1) == p.parts - 1;
  __syncthreads();
  if (!p.shared->last) return;
  __threadfence();
  if (threadIdx.x == 0) {
    p.a.counters[p.item] = 0;
    p.a.ready[p.item] = 0;
  }
  for (int i = threadIdx.x; i < QUERIES * D; i += THREADS) {
    float highest = -1e30f;
    float sum = 0.f;
    float acc = 0.f;
#pragma unroll 4
    for (int part = 0; part < p.parts; ++part) {
      const i64 other = (i64)(p.first_partial + part * K) * QUERIES;
      const float its_highest = __ldcg(p.a.stats + other * 2 + i / D);
      const float both = fmaxf(highest, its_highest);
      const float shrink = exp2_of(highest - both);
      const float weight = exp2_of(its_highest - both);
      sum = sum * shrink + weight * __ldcg(p.a.stats + other * 2 + QUERIES + i / D);
      acc = acc * shrink + weight * __ldcg(p.a.partial + other * D + i);
      highest = both;
    }
    store(p, i, acc, sum);
  }
}

// Writes the landmark of the page that a new token completed; that page is not ranked in this step.
DEVICE void write_landmark(const Program& p) {
  const int page = p.page_at((NEW_TOKENS == 1 ? p.pages : p.tokens / P) - 1);
  const int block = page / PER_BLOCK;
  const int inside = page % PER_BLOCK;
  for (int d = threadIdx.x; d < D; d += THREADS) {
    const Entry* const from =
        p.a.k + block * p.a.block + p.head * p.a.head + (i64)inside * P * p.a.token + d;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      float key = widen(from[i * p.a.token]);
      if constexpr (CACHE == INT8)
        key *= scale_of(
            p.a.k_scales[block * p.a.scale_block + p.head * p.a.scale_head + inside * P + i]);
      sum += key;
    }
    Mark* const to = p.a.landmarks + block * p.a.landmark_block + inside * p.a.landmark_page + d;
#if FP8_LANDMARKS
    to[p.head * p.a.landmark_head] = to_e4m3(sum / P);
#else
    to[p.head * p.a.landmark_head] = (u16)pack(sum / P, 0.f);
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
attend(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  if (!a.rank_before_wait) wait_for_launch_before();
  const Program p(a, memory);
  if (p.b >= a.count) return;
  Queries<QUERIES> queries = load_queries<NARROW, QUERIES>(p);
  queries.factor *= a.scale_log2 * (CACHE == E4M3 ? __ldg(a.k_scales + p.head) : 1.f);
  int fetched = 0;
  u32 fetched_kept = 0;
  Range range = {0, p.pages};
  if (p.ranks) {
    stage_blocks(p);
    Seen seen = {infinity(), -infinity(), 0, 0};
    if (p.budget > 0) {
#if NEW_TOKENS == 1
      seen = score_pages(p, NARROW == FP8_LANDMARKS ? queries : load_queries<FP8_LANDMARKS, G>(p));
#else  // queries of later tokens, which may be guesses, do not even affect the scale
      seen = score_pages(p, load_queries<FP8_LANDMARKS, G>(p));
#endif
    } else {
      wait_for_all_but<0>();
      __syncthreads();
    }
    if (a.rank_before_wait) wait_for_launch_before();  // that launch stores the newest tokens
    const Prefetch prefetched = prefetch(p, seen);
    fetched = prefetched.count;
    const float low = from_order(__reduce_min_sync(ALL, order_of(seen.low)));
    const float high = from_order(__reduce_max_sync(ALL, order_of(seen.high)));
    if (p.lane == 0) {
      p.shared->low[p.warp] = low;
      p.shared->high[p.warp] = high;
    }
    __syncthreads();
    Threshold threshold = {infinity(), -1};
    Bin bin = {0.f, 0.f, -1, 0, 0};
    if (p.budget > 0) {
      bin = find_bin(p.scores, p.bins, SINK, p.ranked_end, p.budget, p.shared);
      if (bin.number < 0) threshold = bisect(p.scores, SINK, p.ranked_end, p.budget, p.shared);
    }
    const int all = (p.pages + 31) / 32;
    const int own = (all + AT_ONCE * WARPS - 1) / (AT_ONCE * WARPS) * AT_ONCE;
    const Groups groups = {p.warp * own, min(p.warp * own + own, all)};
    mark_kept(p, bin, threshold, groups);
    __syncthreads();
    settle_last_bin(p, bin, threshold, groups);
    const int turn = EACH_RANKS ? p.lane * p.parts + p.part : p.lane;
    const bool is_always = p.warp + turn * WARPS < ALWAYS + p.begun;
    fetched_kept = __ballot_sync(
        ALL, p.lane < fetched && (is_always || threshold.keeps(prefetched.score, prefetched.page)));
    range.end = list_kept(p, groups);
    if (EACH_RANKS) {
      range.begin = (u32)range.end * p.part / p.parts;
      range.end = (u32)range.end * (p.part + 1) / p.parts;
    } else if (p.parts > 1) {
      range.end = share_list(p, range.end);
    }
  } else if (p.listed) {
    range = wait_for_list(p);
  } else {
    range.begin = (u32)p.pages * p.part / p.parts;
    range.end = (u32)p.pages * (p.part + 1) / p.parts;
  }
  if (!p.ranks && a.rank_before_wait) wait_for_launch_before();
  Softmax softmax;
  attend_pages(p, queries, fetched, fetched_kept, range, softmax);
  add_warps(p, softmax);
  if (p.parts > 1) add_parts(p);
  const bool has_full_page = NEW_TOKENS == 1 ? p.tokens > 0 : p.tokens >= P;
  if (p.part == 0 && has_full_page && p.tokens % P < NEW_TOKENS) write_landmark(p);
}
