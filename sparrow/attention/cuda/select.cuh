// Selects the pages with the best scores without sorting: scores are counted in bins, and only the last bin is ranked.
#pragma once

#include "program.cuh"

// Maps a float to an unsigned integer so that the order is preserved.
DEVICE u32 order_of(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float from_order(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
DEVICE int inclusive_sum(int x, int lane) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const int below = __shfl_up_sync(ALL, x, o);
    if (lane >= o) x += below;
  }
  return x;
}
// Adds x over all threads of the program; every thread gets the sum.
DEVICE int total_of(int x, Shared* s) {
  x = __reduce_add_sync(ALL, x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s->sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) x += s->sums[w];
  return x;
}

// A page is kept if its score is above `score`, or if the scores are equal and the page's index is at most `index`.
struct Threshold {
  float score;
  int index;
  DEVICE bool keeps(float its_score, int its_index) const {
    return its_score > score || (its_score == score && its_index <= index);
  }
};

// Finds the threshold bit by bit, which copes with hundreds of ties and with scores whose range overflows a float.
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

// The highest scores are in the first bin. The pages in the bins before bin `number` are kept, and so are the `wanted`
// best of the `inside` pages in bin `number`. A negative `number` means that bins are not enough to select the pages.
struct Bin {
  float high, per_unit;
  int number, inside, wanted;
  DEVICE int of(float x) const { return min(BINS - 1, (int)((high - x) * per_unit)); }
};

// Finds the bin that contains the last of the `budget` pages to keep among pages begin .. end - 1.
DEVICE Bin find_bin(const float* scores, int* bins, int begin, int end, int budget, Shared* s) {
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
  // Every warp does this independently. Each lane sums 32 bins. Where the running sum reaches the budget, the lanes
  // then look at those 32 bins, one bin each.
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

// A range of groups of 32 consecutive pages; a warp marks, counts and lists the pages of its own range.
struct Groups {
  int first, last;
};

// Sets a bit for each kept page; pages in the last bin become candidates instead.
DEVICE void mark_kept(const Program& p, const Bin& bin, const Threshold& threshold, const Groups& groups) {
#pragma unroll 1
  for (int group = groups.first; group < groups.last; group += AT_ONCE) {
    float score[AT_ONCE];
    u32 bits = 0, candidates = 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) score[i] = p.scores[min((group + i) * 32 + p.lane, p.pages - 1)];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int n = (group + i) * 32 + p.lane, its_bin = bin.of(score[i]);
      const bool is_ranked = n >= SINK && n < p.ranked_end;
      const bool above = bin.number < 0 ? threshold.keeps(score[i], n) : its_bin < bin.number;
      const u32 its = __ballot_sync(ALL, n < p.pages && (!is_ranked || above));
      if (p.lane == i) bits = its;
      if (is_ranked && its_bin == bin.number) candidates |= 1u << i;
    }
    if (p.lane < AT_ONCE && group + p.lane < groups.last) p.kept[group + p.lane] = bits;
    if (candidates)
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (candidates >> i & 1) {
          const int at = atomicAdd(&p.shared->candidates, 1);
          p.candidate_score[at] = score[i];
          p.candidate_index[at] = (group + i) * 32 + p.lane;
        }
  }
}

// Marks the best candidates and finds the threshold; every warp ranks all candidates independently.
DEVICE void settle_last_bin(const Program& p, const Bin& bin, Threshold& threshold, const Groups& groups) {
  for (int first = 0; bin.number >= 0 && first < bin.inside; first += 32) {
    const int i = min(first + p.lane, bin.inside - 1);
    const float score = p.candidate_score[i];
    const int index = p.candidate_index[i];
    int before = 0;
#pragma unroll 4
    for (int j = 0; j < bin.inside; ++j) {
      const float other = p.candidate_score[j];
      before += other > score || (other == score && p.candidate_index[j] < index);
    }
    const u32 last = __ballot_sync(ALL, before == bin.wanted - 1);
    if (last) {
      threshold.score = __shfl_sync(ALL, score, __ffs(last) - 1);
      threshold.index = __shfl_sync(ALL, index, __ffs(last) - 1);
    }
    if (before < bin.wanted && index / 32 >= groups.first && index / 32 < groups.last)
      atomicOr(&p.kept[index / 32], 1u << (index & 31));
  }
  __syncwarp();
}

// Lists the kept pages that no warp has prefetched, in place of the scores, and returns their number.
DEVICE int list_kept(const Program& p, const Groups& groups) {
  int count = 0;
  for (int group = groups.first + p.lane; group < groups.last; group += 32)
    count += __popc(p.kept[group] &= ~p.prefetched[group]);
  count = __reduce_add_sync(ALL, count);
  if (p.lane == 0) p.shared->sums[p.warp] = count;
  __syncthreads();
  int position = 0, total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    if (w < p.warp) position += p.shared->sums[w];
    total += p.shared->sums[w];
  }
#pragma unroll 1
  for (int group = groups.first; group < groups.last; group += 32) {
    u32 bits = group + p.lane < groups.last ? p.kept[group + p.lane] : 0;
    const int after = position + inclusive_sum(__popc(bits), p.lane);
    for (int at = after - __popc(bits); bits; bits &= bits - 1) p.list[at++] = (group + p.lane) * 32 + __ffs(bits) - 1;
    position = __shfl_sync(ALL, after, 31);
  }
  __syncthreads();
  return total;
}

