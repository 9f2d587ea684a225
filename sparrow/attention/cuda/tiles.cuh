// Operations of a warp on a tile: 16 rows (tokens of a page, or landmarks) of one head, in shared memory.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define DEVICE __device__ __forceinline__

constexpr u32 ALL = 0xffffffffu;
constexpr int P = 16;              // tokens per page
constexpr int MAX_GROUP = 16;
constexpr int MAX_QUERIES = D == 256 ? 16 : 32;
constexpr int QUERIES = G * NEW_TOKENS;              // queries that read the same pages, first token's queries first
constexpr int COLUMN_TILES = (QUERIES + 7) / 8;      // tensor-core tiles of 8 columns, one per query
constexpr int COLUMNS = 8 * COLUMN_TILES;
enum Format { BITS16, E4M3, INT8 };
constexpr Format CACHE = INT8_CACHE ? INT8 : FP8_CACHE ? E4M3 : BITS16;
constexpr Format MARKS = FP8_LANDMARKS ? E4M3 : BITS16;
constexpr int ROW = CACHE == BITS16 ? 2 * D : D;     // bytes per key or value
constexpr int TILE = P * ROW;                        // bytes of a page's keys, or of its values
constexpr int CHUNKS = ROW / 16;                     // 16-byte chunks per row
constexpr int STEPS = D / 16;                        // steps of a product of tiles
constexpr int MARK_ROW = FP8_LANDMARKS ? D : 2 * D;  // bytes per landmark
constexpr int MARK_TILE = 16 * MARK_ROW;
constexpr int MARK_CHUNKS = MARK_ROW / 16;

DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Offset of a chunk in a tile with rows of BYTES bytes; chunks are permuted so that reading a column of a tile has no
// bank conflicts.
template <int BYTES>
DEVICE int swizzled(int row, int chunk) {  // a row of 4 chunks spans half of the banks
  return row * BYTES + ((chunk ^ (BYTES == 64 ? row >> 1 & 3 : row & 7)) << 4);
}
// Copies data that is read once per step, with evict_first, so that data that is read again stays in the cache. Bytes
// from `bytes` (0 or 16) on are filled with zeros.
DEVICE void copy16(u32 to, const void* from, int bytes = 16) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
               ::"r"(to), "l"(from), "r"(bytes), "l"(policy) : "memory");
}
// Copies 16 bytes of scales without prefetching more, since the next bytes in memory belong to other heads.
DEVICE void copy_scales(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void wait_for_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
DEVICE void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE float exp2_of(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

DEVICE void load_tiles(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void load_tiles_transposed(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE u32 transposed(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
#define MULTIPLY(TYPE)                                                                                               \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32"                                         \
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                              \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <bool IN_BF16 = BF16>
DEVICE void multiply(float* c, const u32* a, u32 b0, u32 b1) {  // c[16, 8] += a[16, 16] b[16, 8]
  if constexpr (IN_BF16) MULTIPLY("bf16");
  else MULTIPLY("f16");
}
// Whether registers are scarce, because sums and queries take most of them.
constexpr bool SHORT = COLUMN_TILES * D >= 512;
// Offsets of a lane's chunks in a 16-bit tile, for each step of a product. The shuffles keep the compiler from
// recomputing the offsets for every page. Offsets repeat every 4 steps, 128 bytes further on; with head dim 256, only
// the first 4 are stored. With smaller heads, if registers are short, only the first is stored; 8-bit tiles, which do
// not use the offsets, leave room for 4.
constexpr int STORED_STEPS = D == 256 ? 4 : SHORT ? (CACHE == BITS16 ? 1 : 4) : STEPS;
struct Chunks {
  int lane, of_rows[STORED_STEPS], of_columns[STORED_STEPS];

  DEVICE explicit Chunks(int lane) : lane(lane) {
#pragma unroll
    for (int j = 0; j < STORED_STEPS; ++j) {
      of_rows[j] = __shfl_sync(ALL, swizzled<2 * D>(lane % 16, 2 * j + lane / 16), lane);
      of_columns[j] = __shfl_sync(ALL, swizzled<2 * D>(lane % 8 + lane / 16 * 8, 2 * j + lane / 8 % 2), lane);
    }
  }
  DEVICE int rows(int j) const { return step(of_rows, j); }
  DEVICE int columns(int j) const { return step(of_columns, j); }
  DEVICE static int step(const int* offsets, int j) {
    if (STORED_STEPS == 1) return offsets[0] ^ j * 32;  // a step is two chunks, and chunks are permuted by xor
    return offsets[j % STORED_STEPS] + j / STORED_STEPS * 128;
  }
};
DEVICE u32 pack(float low, float high) {
  u32 y;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#endif
  return y;
}
DEVICE u32 pack_halves(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE unsigned char to_e4m3(float x) {  // saturates at 448
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(0.f), "f"(x));
  return (unsigned char)y;
}
DEVICE u32 from_e4m3(u32 pair) {  // converts the two values in the lower half to float16, exactly
  u32 y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((u16)pair));
  return y;
}
// Converts two int8 codes, bytes LOW and HIGH of a word that `biased` returned, to float16. With 0x64 as the upper
// byte, a byte b is the float16 1024 + b; codes are biased by 128, so 1024 + 128 is subtracted. All of this is exact.
DEVICE u32 biased(u32 codes) { return codes ^ 0x80808080u; }
template <int LOW, int HIGH>
DEVICE u32 from_int8(u32 word) {
  u32 y;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(__byte_perm(word, 0x64646464u, 0x4040 | HIGH << 8 | LOW)),
      "r"(0x64806480u));
  return y;
}
// Converts bytes `LOW` and `HIGH` of a word of an 8-bit tile to float16.
template <Format FORMAT, int LOW, int HIGH>
DEVICE u32 pair_of(u32 word) {
  if constexpr (FORMAT == INT8) return from_int8<LOW, HIGH>(word);
  else if constexpr (LOW == 0 && HIGH == 1) return from_e4m3(word);
  else if constexpr (LOW == 2 && HIGH == 3) return from_e4m3(word >> 16);
  else return from_e4m3(__byte_perm(word, 0, HIGH << 4 | LOW));
}
// Prepares the words of an 8-bit tile for ``pair_of``.
template <Format FORMAT>
DEVICE void prepare(u32* words) {
  if constexpr (FORMAT == INT8)
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = biased(words[i]);
}
template <int TILES> using QueryTiles = u32[TILES][2 * STEPS];  // queries as the right-hand side of products
template <int TILES> using Sums = float[TILES][4];              // results of products with queries
// Multiplies the 16 rows of a 16-bit tile by queries. Even and odd steps have separate sums, so that they do not
// wait for each other, unless registers are short.
template <int TILES>
DEVICE void times_queries_in_16_bits(
    Sums<TILES>& even, Sums<TILES>& odd, u32 tile, const QueryTiles<TILES>& q, const Chunks& chunks) {
#pragma unroll
  for (int j = 0; j < STEPS; ++j) {
    u32 left[4];
    load_tiles(left, tile + chunks.rows(j));
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      multiply(!SHORT && j & 1 ? odd[t] : even[t], left, q[t][2 * j], q[t][2 * j + 1]);
  }
}
// Multiplies the 16 rows of an 8-bit tile by float16 queries. Of every 16 dimensions, a thread loads 4 consecutive ones
// from 4 * column2 on, and uses them as the pairs at 2 * column2 and 2 * column2 + 8 of a step. The queries are in the
// same order.
template <Format FORMAT, int TILES>
DEVICE void times_queries_in_halves(
    Sums<TILES>& even, Sums<TILES>& odd, u32 tile, const QueryTiles<TILES>& q, int lane) {
  const int row = lane % 16, chunk = lane / 16;
#pragma unroll
  for (int j = 0; j < STEPS; j += 2) {
    u32 x[4];
    load_tiles(x, tile + swizzled<D>(row, j + chunk));
    prepare<FORMAT>(x);
    const u32 left[4] = {pair_of<FORMAT, 0, 1>(x[0]), pair_of<FORMAT, 0, 1>(x[1]), pair_of<FORMAT, 2, 3>(x[0]),
                         pair_of<FORMAT, 2, 3>(x[1])};
    const u32 next[4] = {pair_of<FORMAT, 0, 1>(x[2]), pair_of<FORMAT, 0, 1>(x[3]), pair_of<FORMAT, 2, 3>(x[2]),
                         pair_of<FORMAT, 2, 3>(x[3])};
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      multiply<false>(even[t], left, q[t][2 * j], q[t][2 * j + 1]);
      multiply<false>(SHORT ? even[t] : odd[t], next, q[t][2 * j + 2], q[t][2 * j + 3]);
    }
  }
}
template <Format FORMAT, int TILES>
DEVICE void times_queries(
    Sums<TILES>& even, Sums<TILES>& odd, u32 tile, const QueryTiles<TILES>& q, const Chunks& chunks) {
  if constexpr (FORMAT == BITS16) times_queries_in_16_bits(even, odd, tile, q, chunks);
  else times_queries_in_halves<FORMAT>(even, odd, tile, q, chunks.lane);
}
// Convert an exponent byte (attention/int8.py) to its scale, the reciprocal of the scale, and the exponent. Byte 255
// stands for an infinite exponent: a value that was not finite makes the maximum infinite, and its own weight and the
// result NaN.
DEVICE float scale_of(u32 byte) { return __int_as_float(byte << 23); }
DEVICE float reciprocal_of(u32 byte) { return __int_as_float((254 - byte) << 23); }
DEVICE float exponent_of(u32 byte) {  // the bits represent 2^23 + byte
  return byte == 255 ? infinity() : __int_as_float(0x4b000000 | byte) - (8388608.f + 127.f);
}
DEVICE u32 load_byte(u32 address) {
  u32 x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
DEVICE float widen(signed char x) { return x; }  // int8
DEVICE float widen(unsigned char x) {  // e4m3
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)from_e4m3(x)));
  return y;
}
DEVICE float widen(u16 x) {
#if BF16
  return __int_as_float((u32)x << 16);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#endif
}
