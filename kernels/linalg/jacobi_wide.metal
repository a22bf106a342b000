// The rounds of blocked one-sided Jacobi for matrices of many columns. A pair of wide blocks has 128 columns, so that
// each pass over memory multiplies by a matrix of 128 rows. A round is several dispatches: parts of the Gram matrices,
// their sums, a sweep that makes them diagonal, and the columns times the rotations. The sweep has rounds of its own.
// In each of these one dispatch finds the rotations of pairs of narrow blocks, and the next one applies them to the
// Gram matrix and to the product of all rotations.
#include <metal_stdlib>
using namespace metal;

#include "jacobi_pair.h"

constant constexpr uint kPair = JACOBI_WIDE_PAIR, kQuads = kPair / 4;
constant constexpr uint kDepth = 16;         // terms in threadgroup memory at once
constant constexpr uint kPitch = kPair + 4;  // aligned to float4, spread over banks
constant constexpr uint kShare = kDepth * kQuads / JACOBI_THREADS;
constant constexpr uint kTurnPitch = JACOBI_PAIR + 4;

struct WidePair {
  uint matrix;
  uint first, second;  // the first columns of the wide blocks
  device float* x;     // the matrix
  uint length;

  device float* column(uint i) const {
    return x + ulong((i < JACOBI_WIDE ? first : second - JACOBI_WIDE) + i) * length;
  }
};

// The blocks of pair `index` in a round of the circle method: block 0 stays, and the others move around the circle.
inline uint2 blocks_of(uint blocks, uint round, uint index) {
  const uint others = blocks - 1;
  const uint a = index == 0 ? 0 : (round + index) % others + 1, b = (round + others - index) % others + 1;
  return uint2(min(a, b), max(a, b));
}

inline uint pairs_of(constant JacobiRoundParams& p) { return p.jacobi.padded / kPair; }

inline WidePair wide_pair(constant JacobiRoundParams& p, device float* x, uint index) {
  const uint pairs = pairs_of(p), matrix = index / pairs;
  const uint2 blocks = blocks_of(2 * pairs, p.round, index % pairs) * JACOBI_WIDE;
  return {matrix, blocks.x, blocks.y, x + ulong(matrix) * p.jacobi.padded * p.jacobi.length, p.jacobi.length};
}

// Whether a pair is to be rotated: the matrix has not converged, and the pair's columns are not orthogonal and sorted.
inline bool turns(device atomic_uint* off, device const uint* found, constant JacobiRoundParams& p, uint index) {
  return !converged(off, p, index / pairs_of(p)) && as_type<float>(found[index]) > p.jacobi.tolerance;
}

// A column of a pair of narrow blocks, as a column of the pair of wide blocks.
inline uint wide_column(uint inner, uint slot, uint i) {
  const uint2 blocks = blocks_of(2 * JACOBI_WIDE_SLOTS, inner, slot) * JACOBI_BLOCK;
  return i < JACOBI_BLOCK ? blocks.x + i : blocks.y + i - JACOBI_BLOCK;
}

// Part of the products of all columns of a pair. A thread has 8 x 8 of them: of the columns 4 y + {0, 1, 2, 3} and 64
// more with those of x.
[[kernel]] [[max_total_threads_per_threadgroup(JACOBI_THREADS)]] void jacobi_wide_gram(
    device float* x [[buffer(0)]], device atomic_uint* off [[buffer(1)]], device float4* parts [[buffer(2)]],
    device uint* found [[buffer(3)]], constant JacobiWideParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 chunk[kDepth * kPitch / 4];  // by rows
  const uint splits = p.outer.jacobi.splits, split = group % splits, index = group / splits;
  const WidePair pair = wide_pair(p.outer, x, index);
  if (converged(off, p.outer, pair.matrix)) return;
  if (split == 0 && thread_index == 0) found[index] = 0;

  const uint chunks = (p.outer.jacobi.gram_rows + kDepth - 1) / kDepth, each = (chunks + splits - 1) / splits;
  const uint first = split * each * kDepth, end = min(first + each * kDepth, p.outer.jacobi.gram_rows);
  const uint left = thread_index / 16, right = thread_index % 16;
  float4 sum[8][2];
#pragma unroll
  for (uint i = 0; i < 8; ++i) sum[i][0] = sum[i][1] = float4(0.0f);
  float4 next[kShare];
  for (uint k = first; k < end + kDepth; k += kDepth) {
    if (k > first) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint i = 0; i < kShare; ++i) {
        const uint at = i * JACOBI_THREADS + thread_index;
#pragma unroll
        for (uint e = 0; e < 4; ++e)
          ((threadgroup float*)chunk)[(at % (kDepth / 4) * 4 + e) * kPitch + at / (kDepth / 4)] = next[i][e];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
#pragma unroll
    for (uint i = 0; i < kShare; ++i) {
      const uint at = i * JACOBI_THREADS + thread_index, row = k + at % (kDepth / 4) * 4;
      next[i] = row < end ? *(device const float4*)(pair.column(at / (kDepth / 4)) + row) : float4(0.0f);
    }
    if (k == first) continue;
#pragma unroll(2)
    for (uint i = 0; i < kDepth; ++i) {
      threadgroup const float4* const row = chunk + i * (kPitch / 4);
      const float4 l[2] = {row[left], row[left + kQuads / 2]}, r[2] = {row[right], row[right + kQuads / 2]};
#pragma unroll
      for (uint e = 0; e < 8; ++e) {
#pragma unroll
        for (uint s = 0; s < 2; ++s) sum[e][s] = fma(float4(l[e / 4][e % 4]), r[s], sum[e][s]);
      }
    }
  }
  device float4* const to = parts + ulong(group) * kPair * kQuads;
#pragma unroll
  for (uint e = 0; e < 8; ++e) {
#pragma unroll
    for (uint s = 0; s < 2; ++s)
      to[(4 * left + e % 4 + e / 4 * JACOBI_WIDE) * kQuads + right + s * (kQuads / 2)] = sum[e][s];
  }
}

// Sums the parts for 32 x 32 products, and finds how far from orthogonal and sorted their columns are. The product of
// the rotations begins as the identity. A thread takes four neighbours in a row.
[[kernel]] [[max_total_threads_per_threadgroup(JACOBI_THREADS)]] void jacobi_wide_sum(
    device const float* parts [[buffer(0)]], device atomic_uint* off [[buffer(1)]], device float* gram [[buffer(2)]],
    device float4* product [[buffer(3)]], device atomic_uint* found [[buffer(4)]],
    constant JacobiWideParams& p [[buffer(5)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const uint index = group / (JACOBI_WIDE_SLOTS * JACOBI_WIDE_SLOTS), matrix = index / pairs_of(p.outer);
  if (converged(off, p.outer, matrix)) return;
  const uint block = group % (JACOBI_WIDE_SLOTS * JACOBI_WIDE_SLOTS), splits = p.outer.jacobi.splits;
  const uint row = block / JACOBI_WIDE_SLOTS * JACOBI_PAIR + thread_index / 8;
  const uint column = block % JACOBI_WIDE_SLOTS * JACOBI_PAIR + thread_index % 8 * 4;
  parts += ulong(index) * splits * kPair * kPair;
  float4 sum = float4(0.0f), qq = float4(0.0f);
  float pp = 0.0f;
  for (uint split = 0; split < splits; ++split, parts += kPair * kPair) {
    sum += *(device const float4*)(parts + row * kPair + column);
    pp += parts[row * (kPair + 1)];
#pragma unroll
    for (uint e = 0; e < 4; ++e) qq[e] += parts[(column + e) * (kPair + 1)];
  }
  const ulong to = ulong(index) * kPair * kPair + row * kPair + column;
  *(device float4*)(gram + to) = sum;
  product[to / 4] = select(float4(0.0f), float4(1.0f), column + uint4(0, 1, 2, 3) == row);

  float most = 0.0f;
  bool unsorted = false;
#pragma unroll
  for (uint e = 0; e < 4; ++e) {
    const bool taken = row < column + e && pp >= kZeroSquare;
    const float cosine = abs(sum[e]) / (precise::sqrt(pp) * precise::sqrt(qq[e]));
    most = taken && qq[e] >= kZeroSquare && cosine > most ? cosine : most;
    unsorted = unsorted || (taken && pp < qq[e]);
  }
  most = simd_max(most);
  const float state = simd_max(unsorted ? 1.0f : most);
  if (thread_index % 32 != 0 || state == 0.0f) return;
  atomic_fetch_max_explicit(off_of(off, p.outer, matrix), as_type<uint>(most), memory_order_relaxed);
  atomic_fetch_max_explicit(found + index, as_type<uint>(state), memory_order_relaxed);
}

// Finds the rotation of a pair of narrow blocks.
[[kernel]] [[max_total_threads_per_threadgroup(JACOBI_THREADS)]] void jacobi_wide_turn(
    device const float* gram [[buffer(0)]], device atomic_uint* off [[buffer(1)]], device float* rotation [[buffer(2)]],
    device const uint* found [[buffer(3)]], constant JacobiWideParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float own[kProductSize];
  threadgroup float4 product[JACOBI_PAIR * kRotationStride / 4];
  threadgroup float4 rotations[JACOBI_BLOCK];
  const uint slot = group % JACOBI_WIDE_SLOTS, index = group / JACOBI_WIDE_SLOTS;
  if (!turns(off, found, p.outer, index)) return;
  gram += ulong(index) * kPair * kPair;
  for (uint at = thread_index; at < JACOBI_PAIR * JACOBI_PAIR; at += JACOBI_THREADS) {
    const uint row = at / JACOBI_PAIR, column = at % JACOBI_PAIR;
    own[row * kProductStride + column] =
        gram[wide_column(p.inner, slot, row) * kPair + wide_column(p.inner, slot, column)];
  }
  diagonalize(own, (threadgroup float*)product, rotations, JACOBI_PAIR - 1, p.outer.jacobi.tolerance, thread_index);
  for (uint at = thread_index; at < JACOBI_PAIR * JACOBI_PAIR; at += JACOBI_THREADS)
    rotation[group * JACOBI_PAIR * JACOBI_PAIR + at] =
        ((threadgroup const float*)product)[at / JACOBI_PAIR * kRotationStride + at % JACOBI_PAIR];
}

// Applies the rotations to 32 x 32 entries: from both sides to those of the Gram matrix, and from the right to those of
// the product. A thread takes four neighbours in a row.
[[kernel]] [[max_total_threads_per_threadgroup(JACOBI_THREADS)]] void jacobi_wide_update(
    device float* gram [[buffer(0)]], device atomic_uint* off [[buffer(1)]], device float* product [[buffer(2)]],
    device const float4* rotation [[buffer(3)]], device const uint* found [[buffer(4)]],
    constant JacobiWideParams& p [[buffer(5)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kBlocks = JACOBI_WIDE_SLOTS * JACOBI_WIDE_SLOTS, kTurnQuads = kTurnPitch / 4;
  threadgroup float4 entries[JACOBI_PAIR * kTurnQuads], left[JACOBI_PAIR * kTurnQuads], right[JACOBI_PAIR * kTurnQuads];
  const uint index = group / (2 * kBlocks), block = group % (2 * kBlocks);
  if (!turns(off, found, p.outer, index)) return;
  const bool of_gram = block < kBlocks;
  const uint above = block / JACOBI_WIDE_SLOTS % JACOBI_WIDE_SLOTS, beside = block % JACOBI_WIDE_SLOTS;
  const uint row = thread_index / 8, quad = thread_index % 8, at = row * kTurnQuads + quad;
  rotation += index * JACOBI_WIDE_SLOTS * (JACOBI_PAIR * JACOBI_PAIR / 4);
  device float4* const place =
      (device float4*)((of_gram ? gram : product) + ulong(index) * kPair * kPair +
                       (of_gram ? wide_column(p.inner, above, row) : above * JACOBI_PAIR + row) * kPair +
                       wide_column(p.inner, beside, 4 * quad));
  entries[at] = *place;
  left[at] = rotation[above * (JACOBI_PAIR * JACOBI_PAIR / 4) + thread_index];
  right[at] = rotation[beside * (JACOBI_PAIR * JACOBI_PAIR / 4) + thread_index];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float4 sum = float4(0.0f);
#pragma unroll(8)
  for (uint k = 0; k < JACOBI_PAIR; ++k)
    sum = fma(float4(((threadgroup const float*)entries)[row * kTurnPitch + k]), right[k * kTurnQuads + quad], sum);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  entries[at] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (of_gram) {
    sum = float4(0.0f);
#pragma unroll(8)
    for (uint k = 0; k < JACOBI_PAIR; ++k)
      sum = fma(float4(((threadgroup const float*)left)[k * kTurnPitch + row]), entries[k * kTurnQuads + quad], sum);
  }
  *place = sum;
}

// Multiplies rows of a pair's columns by the product of the rotations, in place. A thread has the rows 4 down + {0, 1,
// 2, 3} and 64 more of 8 columns.
[[kernel]] [[max_total_threads_per_threadgroup(JACOBI_THREADS)]] void jacobi_wide_apply(
    device float* x [[buffer(0)]], device atomic_uint* off [[buffer(1)]], device const float4* product [[buffer(2)]],
    device const uint* found [[buffer(3)]], constant JacobiWideParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 rows[kDepth * kQuads], factors[kDepth * kQuads];  // by columns of X, and by rows of the product
  const uint index = group / p.tiles;
  if (!turns(off, found, p.outer, index)) return;
  const WidePair pair = wide_pair(p.outer, x, index);
  const uint first_row = group % p.tiles * JACOBI_WIDE_TILE;
  product += ulong(index) * kPair * kQuads;
  const uint down = thread_index % 16, across = thread_index / 16;
  float4 sum[8][2];
#pragma unroll
  for (uint c = 0; c < 8; ++c) sum[c][0] = sum[c][1] = float4(0.0f);
  float4 next_rows[kShare], next_factors[kShare];
  for (uint k = 0; k < kPair + kDepth; k += kDepth) {
    if (k > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
#pragma unroll
      for (uint i = 0; i < kShare; ++i) {
        rows[i * JACOBI_THREADS + thread_index] = next_rows[i];
        factors[i * JACOBI_THREADS + thread_index] = next_factors[i];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    }
    if (k < kPair) {
#pragma unroll
      for (uint i = 0; i < kShare; ++i) {
        const uint at = i * JACOBI_THREADS + thread_index, row = first_row + at % kQuads * 4;
        next_rows[i] = row < pair.length ? *(device const float4*)(pair.column(k + at / kQuads) + row) : float4(0.0f);
        next_factors[i] = product[k * kQuads + at];
      }
    }
    if (k == 0) continue;
#pragma unroll(1)
    for (uint i = 0; i < kDepth; ++i) {
      const float4 r[2] = {rows[i * kQuads + down], rows[i * kQuads + down + kQuads / 2]};
      const float4 f[2] = {factors[i * kQuads + across], factors[i * kQuads + across + kQuads / 2]};
#pragma unroll
      for (uint c = 0; c < 8; ++c) {
#pragma unroll
        for (uint s = 0; s < 2; ++s) sum[c][s] = fma(float4(f[c / 4][c % 4]), r[s], sum[c][s]);
      }
    }
  }
#pragma unroll
  for (uint c = 0; c < 8; ++c) {
    device float* const to = pair.column(4 * across + c % 4 + c / 4 * JACOBI_WIDE);
#pragma unroll
    for (uint s = 0; s < 2; ++s) {
      const uint row = first_row + 4 * down + s * (JACOBI_WIDE_TILE / 2);
      if (row < pair.length) *(device float4*)(to + row) = sum[c][s];
    }
  }
}
