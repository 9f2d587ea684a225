// Page-sparse decode attention in one launch, for Hopper: rank a row's pages, select, attend to the kept ones.
//
// What Triton's kernels cannot do: each warp has tiles of its own in flight and never waits for another warp's, scores
// come from the tensor cores and stay in shared memory, and while pages are being selected the ones that are nearly
// always kept (the first, the newest, each warp's best) are on their way already.
//
// The division of the batch (attention/division.py), the scratch memory and the meaning of every argument are those
// of the Triton kernels (attention/triton/kernels.py); pages.py is what both answer to. A page is 16 tokens, the rows of a
// tensor-core tile; heads of a group are its columns, up to 8. "Logits" are to base 2.
//
// Defined by who compiles it: D head dim, G query heads per kv head, K kv heads, PER_BLOCK pages in a block of the
// cache, SINK and RECENT pages always kept, BF16 (else float16), WARPS, STAGES pages in flight per warp, RESIDENT
// programs that are to fit on a multiprocessor, BINS of scores, and CANDIDATES: most scores of one bin that are ranked.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr int P = 16;
constexpr int THREADS = 32 * WARPS;
constexpr u32 ALL = 0xffffffffu;
constexpr int ROW = 2 * D;         // bytes of a token's, or a page's landmark's, row of one head
constexpr int TILE = P * ROW;      // keys of a page, its values, or 16 landmarks
constexpr int SLOT = 2 * TILE;     // keys and values of a page
constexpr int CHUNKS = ROW / 16;   // 16 bytes each, swizzled within a row so that a column of tiles has no conflicts
constexpr int STEPS = D / 16;      // of a product of tiles
constexpr int AT_ONCE = 8;         // scores that a thread looks at before it waits for the first

struct Args {
  const u16 *q, *k, *v;
  u16 *landmarks;
  const int* table;
  u16 *out;
  int *rows;
  float *partial, *stats;
  int *ready, *counters;
  const int4 *plan;
  i64 q_row, q_head, block, head, token, landmark_block, landmark_page, landmark_head, table_row, out_row, out_head, rows_row;
  float scale_log2, v_scale;
  int count, rank_before_wait, capacity;
};

struct Shared {  // what a program's warps tell each other, besides scores and lists
  float low[WARPS], high[WARPS];
  int sums[WARPS];
  int candidates, last;
};

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * ROW + ((chunk ^ (row & 7)) << 4); }
// Of what is read once in a step, and leaves the cache to what is read again; zeros beyond `bytes`, 0 or 16.
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes = 16) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
               ::"r"(to), "l"(from), "r"(bytes), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ float exp2_of(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

__device__ __forceinline__ void load_tiles(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_tiles_transposed(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ u32 transposed(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ void multiply(float* c, const u32* a, u32 b0, u32 b1) {  // c[16, 8] += a[16, 16] b[16, 8]
#if BF16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// A tile's 16 rows times the queries, even and odd steps added apart, which do not wait for each other.
__device__ __forceinline__ void times_queries(float* even, float* odd, u32 tile, const u32* q, int lane) {
  const int row = lane % 16, chunk = lane / 16;
#pragma unroll
  for (int j = 0; j < STEPS; ++j) {
    u32 left[4];
    load_tiles(left, tile + swizzled(row, 2 * j + chunk));
    multiply(j & 1 ? odd : even, left, q[2 * j], q[2 * j + 1]);
  }
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 y;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#endif
  return y;
}
__device__ __forceinline__ float widen(u16 x) {
#if BF16
  return __int_as_float((u32)x << 16);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#endif
}

// Maps a float to an unsigned integer of the same order.
__device__ __forceinline__ u32 order_of(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_order(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ int inclusive_sum(int x, int lane) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const int below = __shfl_up_sync(ALL, x, o);
    if (lane >= o) x += below;
  }
  return x;
}
// Sum over the program; every thread gets it.
__device__ __forceinline__ int total_of(int x, Shared* s) {
  x = __reduce_add_sync(ALL, x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s->sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) x += s->sums[w];
  return x;
}

// A page is kept if it scores above the threshold, or equals it and lies no later than the index.
struct Threshold {
  float score;
  int index;
  __device__ __forceinline__ bool keeps(float its_score, int its_index) const {
    return its_score > score || (its_score == score && its_index <= index);
  }
};

// For ties by the hundred and scores whose range does not fit a float: one bit of the threshold after the other.
__device__ __noinline__ Threshold bisect(const float* scores, int begin, int end, int budget, Shared* s) {
  u32 key = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const u32 guess = key | 1u << bit;
    int reached = 0;
    for (int n = begin + threadIdx.x; n < end; n += THREADS) reached += order_of(scores[n]) >= guess;
    if (total_of(reached, s) >= budget) key = guess;
  }
  int low = begin, high = end - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    int kept = 0;
    for (int n = begin + threadIdx.x; n < end; n += THREADS) {
      const u32 its = order_of(scores[n]);
      kept += its > key || (its == key && n <= middle);
    }
    if (total_of(kept, s) >= budget) high = middle; else low = middle + 1;
  }
  return {from_order(key), low};
}

// Scores fall into bins, the highest into the first. Pages of the bins before `number` are kept, and so are the `wanted`
// best of its `inside` own; if it is negative, bins do not tell.
struct Bin {
  float high, per_unit;
  int number, inside, wanted;
  __device__ __forceinline__ int of(float x) const { return min(BINS - 1, (int)((high - x) * per_unit)); }
};

// The bin that holds the last of the `budget` pages to be kept of begin .. end - 1.
__device__ __forceinline__ Bin find_bin(const float* scores, int* bins, int begin, int end, int budget, Shared* s) {
  const int lane = threadIdx.x % 32;
  float low = s->low[lane % WARPS], high = s->high[lane % WARPS];
#pragma unroll
  for (int o = 1; o < WARPS; o <<= 1) {
    low = fminf(low, __shfl_xor_sync(ALL, low, o));
    high = fmaxf(high, __shfl_xor_sync(ALL, high, o));
  }
  Bin bin = {high, __fdividef(BINS - 0.5f, high - low), -1, 0, 0};
  if (!(high > low && bin.per_unit > 0.f && bin.per_unit < 1e30f)) return bin;
#pragma unroll 1
  for (int first = begin + threadIdx.x; first < end; first += AT_ONCE * THREADS) {
    int its[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) its[i] = bin.of(scores[min(first + i * THREADS, end - 1)]);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (first + i * THREADS < end) atomicAdd(&bins[its[i]], 1);
  }
  __syncthreads();
  // Every warp for itself: 32 bins a lane, then the 32 bins of the lane where the sum reaches the budget.
  int sum = 0;
#pragma unroll
  for (int i = 0; i < BINS / 128; ++i) {
    const int4 four = ((const int4*)bins)[lane * (BINS / 128) + (i ^ (lane & 7))];
    sum += four.x + four.y + four.z + four.w;
  }
  int reached = inclusive_sum(sum, lane);
  const int group = __ffs(__ballot_sync(ALL, reached >= budget)) - 1;
  const int above_group = __shfl_sync(ALL, reached - sum, group);
  sum = bins[group * 32 + lane];
  reached = inclusive_sum(sum, lane);
  const int place = __ffs(__ballot_sync(ALL, above_group + reached >= budget)) - 1;
  bin.inside = __shfl_sync(ALL, sum, place);
  bin.wanted = budget - above_group - __shfl_sync(ALL, reached - sum, place);
  if (bin.inside <= CANDIDATES) bin.number = group * 32 + place;
  return bin;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attend(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  int* const bins = (int*)(memory + WARPS * STAGES * SLOT);
  float* const candidate_score = (float*)(bins + BINS);
  int* const candidate_index = (int*)(candidate_score + CANDIDATES);
  Shared* const s = (Shared*)(candidate_index + CANDIDATES);
  float* const scores = (float*)(s + 1);  // before: blocks of the row; after: the list, as places in the row
  int* const list = (int*)scores;
  u32* const asked = (u32*)(scores + a.capacity);  // a bit for each page that a warp asked for before the selection
  u32* const chosen = asked + a.capacity / 32;     // and for each that is kept
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row8 = lane / 4, column2 = lane % 4;  // a lane's place in a tile of results: rows row8 and row8 + 8, two columns

  if (!a.rank_before_wait) wait_for_launch_before();
  const int4 entry = a.plan[blockIdx.x / K * 2], row = a.plan[blockIdx.x / K * 2 + 1];
  const int b = entry.x, part = entry.y, parts = entry.z, h = blockIdx.x % K;
  if (b >= a.count) return;
  const int item = b * K + h, slot = entry.w * K + h;
  const int tokens = row.x, pages = (tokens + P - 1) / P;
  const int ranked = max(pages - SINK - RECENT, 0), budget = min(ranked, max(row.y, 0));
  const bool listed = budget < ranked, ranks = listed && part == 0;
  const int* const table = a.table + b * a.table_row;
  auto page_at = [&](int n) { return PER_BLOCK == 1 ? table[n] : table[n / PER_BLOCK] * PER_BLOCK + n % PER_BLOCK; };

  u32 q[2 * STEPS];  // the group's queries, as the right-hand side of a product
  {
    const u32* const from = (const u32*)(a.q + b * a.q_row + (h * G + row8) * a.q_head);
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) q[i] = row8 < G ? from[4 * i + column2] : 0u;
  }
  const u32 ring = shared_address(memory) + warp * STAGES * SLOT;
  const int copy_row = lane / CHUNKS, copy_chunk = lane % CHUNKS;
  constexpr int COPY_ROWS = 32 / CHUNKS;
  const int turned_row = (lane & 7) + (lane >> 4) * 8, turned_chunk = (lane >> 3) & 1;  // of values: tokens are columns

  const u16* const keys = a.k + h * a.head + copy_chunk * 8;
  const u16* const values = a.v + h * a.head + copy_chunk * 8;
  auto ask_for = [&](int n, int page, int place) {  // page id; n: its place in the row, or -1 if it is surely full
    const u32 to = ring + place * SLOT;
    const int inside = n == pages - 1 ? tokens - n * P : P;  // what lies beyond may be NaN, and 0 * NaN is NaN
    i64 from = (i64)(page / PER_BLOCK) * a.block + (page % PER_BLOCK * P + copy_row) * a.token;
#pragma unroll
    for (int row = copy_row; row < P + copy_row; row += COPY_ROWS, from += COPY_ROWS * a.token) {
      const int at = swizzled(row, copy_chunk), bytes = row < inside ? 16 : 0;
      copy16(to + at, keys + from, bytes);
      copy16(to + TILE + at, values + from, bytes);
    }
  };

  // Pages that this warp asks for before the selection is known, and a bit for each that turns out to be kept.
  int asked_count = 0;
  u32 asked_kept = 0;
  int begin = 0, end = pages;  // what this part attends to besides: places in the list, or in a row that is kept whole

  if (ranks) {
    float low = infinity(), high = -infinity();
    int best = 0, best_block = 0;
    const int ranked_end = SINK + ranked;
    constexpr int IN_FLIGHT = 2 * STAGES;
    // Blocks of the tiles that this warp ranks, two tiles at a time, the first before the rest.
    auto ask_for_blocks = [&](int i) {
      const int n = (warp + (i + lane / 16) * WARPS) * 16 + lane % 16;
      if (n < pages) copy4(shared_address(list + n), table + n / PER_BLOCK);
    };
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i += 2) ask_for_blocks(i);
    commit();
#pragma unroll 4
    for (int i = IN_FLIGHT; (warp + i * WARPS) * 16 < pages; i += 2) ask_for_blocks(i);
    commit();
#pragma unroll 1
    for (int i = threadIdx.x; i < a.capacity / 32; i += THREADS) asked[i] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < BINS / 4; i += THREADS) ((int4*)bins)[i] = make_int4(0, 0, 0, 0);
    if (threadIdx.x == 0) s->candidates = 0;
    wait_for_all_but<1>();
    __syncwarp();
    if (budget == 0) {
      wait_for_all_but<0>();
      __syncthreads();
    } else {
      const int tiles = (ranked_end + 15) / 16, mine = warp < tiles ? (tiles - warp + WARPS - 1) / WARPS : 0;
      const u16* const marks = a.landmarks + h * a.landmark_head + copy_chunk * 8;
      auto ask_for_marks = [&](int i, int place) {
#pragma unroll
        for (int j = 0; j < 16 / COPY_ROWS; ++j) {
          const int row = j * COPY_ROWS + copy_row;
          const int n = min((warp + i * WARPS) * 16 + row, pages - 1);
          copy16(ring + place * TILE + swizzled(row, copy_chunk),
                 marks + list[n] * a.landmark_block + n % PER_BLOCK * a.landmark_page);
        }
      };
#pragma unroll 1
      for (int i = 0; i < IN_FLIGHT; ++i) {
        if (i < mine) ask_for_marks(i, i);
        commit();
      }
      wait_for_all_but<IN_FLIGHT>();
      __syncthreads();
      int place = 0;
      for (int i = 0; i < mine; ++i) {
        wait_for_all_but<IN_FLIGHT - 1>();
        __syncwarp();
        const u32 tile = ring + place * TILE;
        float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
        times_queries(even, odd, tile, q, lane);
        // The mean query's score, times G; columns beyond the group are no queries.
        float first = 0.f, second = 0.f;
        if (2 * column2 < G) first += even[0] + odd[0], second += even[2] + odd[2];
        if (2 * column2 + 1 < G) first += even[1] + odd[1], second += even[3] + odd[3];
#pragma unroll
        for (int o = 1; o < 4; o <<= 1) {
          first += __shfl_xor_sync(ALL, first, o);
          second += __shfl_xor_sync(ALL, second, o);
        }
        const int n = (warp + i * WARPS) * 16 + row8 + column2 * 8;
        if (column2 < 2 && n >= SINK && n < ranked_end) {
          const float score = (column2 ? second : first) + 0.f;  // -0.0 equals 0.0
          low = fminf(low, score);
          if (score > high) high = score, best = n, best_block = list[n];
          scores[n] = score;
        }
        __syncwarp();
        if (i + IN_FLIGHT < mine) ask_for_marks(i + IN_FLIGHT, place);
        commit();
        if (++place == IN_FLIGHT) place = 0;
      }
      wait_for_all_but<0>();
      __syncwarp();
    }
    if (a.rank_before_wait) wait_for_launch_before();  // which stores the newest tokens
    // A warp asks for its share of the pages always kept, the newest first, then for those it found to score best.
    const int always = SINK + RECENT;  // a row with ranked pages has them all
    u32 key = high > -infinity() ? order_of(high) : 0u;
    int asked_page = -1;  // of this lane, as is its score
    float asked_score = infinity();
#pragma unroll 1
    for (int turn = warp; asked_count < STAGES; turn += WARPS) {
      int n, page;
      float score = infinity();
      if (turn < always) {
        n = turn < RECENT ? pages - 1 - turn : turn - RECENT;
        page = list[n] * PER_BLOCK + n % PER_BLOCK;
      } else {
        const u32 top = __reduce_max_sync(ALL, key);
        if (!top) break;
        const int who = __ffs(__ballot_sync(ALL, key == top)) - 1;
        n = __shfl_sync(ALL, best, who);
        page = __shfl_sync(ALL, best_block, who) * PER_BLOCK + n % PER_BLOCK;
        score = from_order(top);
        if (lane == who) key = 0;
      }
      ask_for(n, page, asked_count);
      commit();
      if (lane == 0) atomicOr(&asked[n / 32], 1u << (n & 31));
      if (lane == asked_count) asked_page = n, asked_score = score;
      ++asked_count;
    }
    low = from_order(__reduce_min_sync(ALL, order_of(low))), high = from_order(__reduce_max_sync(ALL, order_of(high)));
    if (lane == 0) s->low[warp] = low, s->high[warp] = high;
    __syncthreads();
    Threshold threshold = {infinity(), -1};
    Bin bin = {0.f, 0.f, -1, 0, 0};
    if (budget > 0) {
      bin = find_bin(scores, bins, SINK, ranked_end, budget, s);
      if (bin.number < 0) threshold = bisect(scores, SINK, ranked_end, budget, s);
    }
    // A bit for each page that is kept; a warp owns consecutive groups of 32 pages. Those of the last bin come after.
    const int groups = (pages + 31) / 32, own = (groups + AT_ONCE * WARPS - 1) / (AT_ONCE * WARPS) * AT_ONCE;
    const int first_group = warp * own, last_group = min(first_group + own, groups);
#pragma unroll 1
    for (int group = first_group; group < last_group; group += AT_ONCE) {
      float score[AT_ONCE];
      u32 bits = 0, candidates = 0;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) score[i] = scores[min((group + i) * 32 + lane, pages - 1)];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int n = (group + i) * 32 + lane, its_bin = bin.of(score[i]);
        const bool is_ranked = n >= SINK && n < ranked_end;
        const bool surely = bin.number < 0 ? threshold.keeps(score[i], n) : its_bin < bin.number;
        const u32 its = __ballot_sync(ALL, n < pages && (!is_ranked || surely));
        if (lane == i) bits = its;
        if (is_ranked && its_bin == bin.number) candidates |= 1u << i;
      }
      if (lane < AT_ONCE && group + lane < last_group) chosen[group + lane] = bits;
      if (candidates)
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
          if (candidates >> i & 1) {
            const int at = atomicAdd(&s->candidates, 1);
            candidate_score[at] = score[i];
            candidate_index[at] = (group + i) * 32 + lane;
          }
    }
    __syncthreads();
    for (int first = 0; bin.number >= 0 && first < bin.inside; first += 32) {  // every warp ranks them for itself
      const int i = min(first + lane, bin.inside - 1);
      const float score = candidate_score[i];
      const int index = candidate_index[i];
      int before = 0;
#pragma unroll 4
      for (int j = 0; j < bin.inside; ++j) {
        const float other = candidate_score[j];
        before += other > score || (other == score && candidate_index[j] < index);
      }
      const u32 last = __ballot_sync(ALL, before == bin.wanted - 1);
      if (last) {
        threshold.score = __shfl_sync(ALL, score, __ffs(last) - 1);
        threshold.index = __shfl_sync(ALL, index, __ffs(last) - 1);
      }
      if (before < bin.wanted && index / 32 >= first_group && index / 32 < last_group)
        atomicOr(&chosen[index / 32], 1u << (index & 31));
    }
    __syncwarp();
    const bool is_always = warp + lane * WARPS < always;
    asked_kept = __ballot_sync(ALL, lane < asked_count && (is_always || threshold.keeps(asked_score, asked_page)));
    // What else is kept, as a list in place of the scores.
    int kept = 0;
    for (int group = first_group + lane; group < last_group; group += 32)
      kept += __popc(chosen[group] &= ~asked[group]);
    kept = __reduce_add_sync(ALL, kept);
    if (lane == 0) s->sums[warp] = kept;
    __syncthreads();
    int position = 0, rest = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      if (w < warp) position += s->sums[w];
      rest += s->sums[w];
    }
#pragma unroll 1
    for (int group = first_group; group < last_group; group += 32) {
      u32 bits = group + lane < last_group ? chosen[group + lane] : 0;
      const int after = position + inclusive_sum(__popc(bits), lane);
      for (int at = after - __popc(bits); bits; bits &= bits - 1) list[at++] = (group + lane) * 32 + __ffs(bits) - 1;
      position = __shfl_sync(ALL, after, 31);
    }
    __syncthreads();
    end = rest;
    if (parts > 1) {  // an equal share, of which the pages asked for are a part; the others divide what is left
      const int all = always + budget, share = (all + parts - 1) / parts;
      end = min(max(share - (all - rest), 0), rest);
#pragma unroll 1
      for (int i = threadIdx.x; i < rest; i += THREADS) a.rows[item * a.rows_row + i] = page_at(list[i]);
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) atomicExch(a.ready + item, 1 << 30 | end << 15 | rest);
    }
  } else if (listed) {
    if (threadIdx.x == 0) {
      int message;
      do asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(message) : "l"(a.ready + item) : "memory");
      while (message == 0);
      s->last = message;
    }
    __syncthreads();
    const int message = s->last, first = message >> 15 & 0x7fff, others = (message & 0x7fff) - first;
    begin = first + (u32)others * (part - 1) / (parts - 1);
    end = first + (u32)others * part / (parts - 1);
    __syncthreads();
  } else {
    begin = (u32)pages * part / parts;
    end = (u32)pages * (part + 1) / parts;
  }
  if (!ranks && a.rank_before_wait) wait_for_launch_before();

  // Each warp attends to every WARPS-th page, STAGES of them in flight.
  const int* const ids = a.rows + item * a.rows_row;
  const int mine = begin + warp < end ? (end - begin - warp + WARPS - 1) / WARPS : 0, all = asked_count + mine;
  auto page_of = [&](int i) {  // of this warp's pages besides those asked for
    const int at = begin + warp + i * WARPS;
    return i >= mine ? 0 : !listed ? page_at(at) : part == 0 ? page_at(list[at]) : __ldcg(ids + at);
  };
  int known = 0, page_now = page_of(lane), page_next = page_of(lane + 32);  // page ids, one a lane, from `known` on
  auto ask_for_next = [&](int i, int place) {
    if (i - known == 32) known = i, page_now = page_next, page_next = page_of(i + 32 + lane);
    ask_for(listed ? -1 : begin + warp + i * WARPS, __shfl_sync(ALL, page_now, i - known), place);
  };
  float acc[STEPS][4];  // of the value's dimensions j * 16 + row8 and + 8, for the heads of two columns
#pragma unroll
  for (int j = 0; j < STEPS; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
  float max0 = -1e30f, max1 = -1e30f, sum0 = 0.f, sum1 = 0.f;
#pragma unroll 1
  for (int i = asked_count; i < STAGES; ++i) {
    if (i < all) ask_for_next(i - asked_count, i);
    commit();
  }
  int place = 0;
  for (int i = 0; i < all; ++i) {
    wait_for_all_but<STAGES - 1>();
    __syncwarp();
    if (i >= asked_count || asked_kept >> i & 1) {
      const u32 key_tile = ring + place * SLOT, value_tile = key_tile + TILE;
      float logit[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
      times_queries(logit, odd, key_tile, q, lane);
#pragma unroll
      for (int j = 0; j < 4; ++j) logit[j] = (logit[j] + odd[j]) * a.scale_log2;
      if (ranks ? warp == 0 && i == 0 : !listed && begin + warp + i * WARPS == pages - 1) {  // the newest page
        const int inside = tokens - P * (pages - 1);
        if (row8 >= inside) logit[0] = logit[1] = -infinity();
        if (row8 + 8 >= inside) logit[2] = logit[3] = -infinity();
      }
      float top0 = fmaxf(logit[0], logit[2]), top1 = fmaxf(logit[1], logit[3]);
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) {
        top0 = fmaxf(top0, __shfl_xor_sync(ALL, top0, o));
        top1 = fmaxf(top1, __shfl_xor_sync(ALL, top1, o));
      }
      if (__any_sync(ALL, top0 > max0 || top1 > max1)) {
        top0 = fmaxf(max0, top0), top1 = fmaxf(max1, top1);
        const float shrink0 = exp2_of(max0 - top0), shrink1 = exp2_of(max1 - top1);
        max0 = top0, max1 = top1, sum0 *= shrink0, sum1 *= shrink1;
#pragma unroll
        for (int j = 0; j < STEPS; ++j)
          acc[j][0] *= shrink0, acc[j][1] *= shrink1, acc[j][2] *= shrink0, acc[j][3] *= shrink1;
      }
      const float w0 = exp2_of(logit[0] - max0), w1 = exp2_of(logit[1] - max1);
      const float w2 = exp2_of(logit[2] - max0), w3 = exp2_of(logit[3] - max1);
      sum0 += w0 + w2, sum1 += w1 + w3;
      const u32 right0 = transposed(pack(w0, w1)), right1 = transposed(pack(w2, w3));
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
        u32 left[4];
        load_tiles_transposed(left, value_tile + swizzled(turned_row, 2 * j + turned_chunk));
        multiply(acc[j], left, right0, right1);
      }
    }
    __syncwarp();
    if (i + STAGES < all) ask_for_next(i + STAGES - asked_count, place);
    commit();
    if (++place == STAGES) place = 0;
  }
  wait_for_all_but<0>();

  // The warps' results are added in their order, then the parts' in theirs by whoever finishes last.
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) {
    sum0 += __shfl_xor_sync(ALL, sum0, o);
    sum1 += __shfl_xor_sync(ALL, sum1, o);
  }
  __syncthreads();
  float* const warp_acc = (float*)memory;  // [WARPS, G, D]
  float* const warp_max = warp_acc + WARPS * G * D, *const warp_sum = warp_max + WARPS * 8;
  const int head0 = 2 * column2, head1 = head0 + 1;
#pragma unroll
  for (int j = 0; j < STEPS; ++j) {
    float* const to = warp_acc + warp * G * D + j * 16 + row8;
    if (head0 < G) to[head0 * D] = acc[j][0], to[head0 * D + 8] = acc[j][2];
    if (head1 < G) to[head1 * D] = acc[j][1], to[head1 * D + 8] = acc[j][3];
  }
  if (row8 == 0) {
    warp_max[warp * 8 + head0] = max0, warp_max[warp * 8 + head1] = max1;
    warp_sum[warp * 8 + head0] = sum0, warp_sum[warp * 8 + head1] = sum1;
  }
  __syncthreads();
  auto store = [&](int i, float its_acc, float its_sum) {  // a row without tokens returns zeros
    const float result = its_acc * __fdividef(a.v_scale, its_sum > 0.f ? its_sum : 1.f);
    a.out[b * a.out_row + (h * G + i / D) * a.out_head + i % D] = (u16)pack(result, 0.f);
  };
  const i64 cell = (i64)(slot + part * K) * G;
  for (int i = threadIdx.x; i < G * D; i += THREADS) {
    const int head = i / D;
    float highest = -1e30f, its_sum = 0.f, its_acc = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, warp_max[w * 8 + head]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float weight = exp2_of(warp_max[w * 8 + head] - highest);
      its_sum += weight * warp_sum[w * 8 + head];
      its_acc += weight * warp_acc[w * G * D + i];
    }
    if (parts == 1) {
      store(i, its_acc, its_sum);
    } else {
      a.partial[cell * D + i] = its_acc;
      if (i % D == 0) a.stats[cell * 2 + head] = highest, a.stats[cell * 2 + G + head] = its_sum;
    }
  }
  if (parts > 1) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) s->last = atomicAdd(a.counters + item, 1) == parts - 1;
    __syncthreads();
    if (s->last) {
      __threadfence();
      if (threadIdx.x == 0) a.counters[item] = 0, a.ready[item] = 0;
      for (int i = threadIdx.x; i < G * D; i += THREADS) {
        float highest = -1e30f, its_sum = 0.f, its_acc = 0.f;
#pragma unroll 4
        for (int p = 0; p < parts; ++p) {
          const i64 other = (i64)(slot + p * K) * G;
          const float its_highest = __ldcg(a.stats + other * 2 + i / D), both = fmaxf(highest, its_highest);
          const float shrink = exp2_of(highest - both), weight = exp2_of(its_highest - both);
          its_sum = its_sum * shrink + weight * __ldcg(a.stats + other * 2 + G + i / D);
          its_acc = its_acc * shrink + weight * __ldcg(a.partial + other * D + i);
          highest = both;
        }
        store(i, its_acc, its_sum);
      }
    }
  }
  // The landmark of a page that the newest token filled; nobody ranks that page in this step.
  if (part == 0 && tokens > 0 && tokens % P == 0) {
    const int page = page_at(pages - 1), block = page / PER_BLOCK, inside = page % PER_BLOCK;
    for (int d = threadIdx.x; d < D; d += THREADS) {
      const u16* const from = a.k + block * a.block + h * a.head + (i64)inside * P * a.token + d;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < P; ++i) sum += widen(from[i * a.token]);
      a.landmarks[block * a.landmark_block + inside * a.landmark_page + h * a.landmark_head + d] = (u16)pack(sum / P, 0.f);
    }
  }
}
