// The rounds of blocked one-sided Jacobi. A threadgroup takes a pair of blocks. It computes their Gram matrix, the
// rotation that makes it diagonal, and the pair times that rotation. With few pairs several threadgroups share the rows
// of each pair: one dispatch makes the parts of the Gram matrix, and in the next one each threadgroup sums them, finds
// the rotation, and applies it to its own rows.
#include <metal_stdlib>
using namespace metal;

#include "jacobi_pair.h"

// The state of the columns, which their Gram matrix shows.
struct PairState {
  float off;    // the largest |xᵀy| / (‖x‖ ‖y‖)
  bool active;  // whether there is anything to do: rotate or sort
};

inline PairState state_of(threadgroup const float* gram, threadgroup float* work, float tolerance, uint thread_index) {
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const float qq = gram[lane * kProductStride + lane];
  float off = 0.0f;
  bool unsorted = false;
#pragma unroll
  for (uint i = 0; i < 1024 / JACOBI_THREADS; ++i) {
    const uint p = i * (JACOBI_THREADS / 32) + simdgroup;
    const float pp = gram[p * kProductStride + p];
    const float cosine =
        metal::abs(gram[p * kProductStride + lane]) / (metal::precise::sqrt(pp) * metal::precise::sqrt(qq));
    off = p < lane && pp >= kZeroSquare && qq >= kZeroSquare && cosine > off ? cosine : off;
    unsorted = unsorted || (p < lane && pp >= kZeroSquare && pp < qq);
  }
  off = metal::simd_max(off);
  const uint some = metal::simd_max(unsorted ? 1u : 0u);
  if (lane == 0) work[simdgroup] = off, work[8 + simdgroup] = some ? 1.0f : 0.0f;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  float most = work[0], anywhere = work[8];
#pragma unroll
  for (uint i = 1; i < JACOBI_THREADS / 32; ++i) most = metal::max(most, work[i]), anywhere += work[8 + i];
  return {most, anywhere > 0.0f || most > tolerance};
}

constant constexpr uint kQuads = JACOBI_CHUNK / 4;
typedef Chunk<JACOBI_CHUNK> PairChunk;

// The pair of blocks that a threadgroup takes.
struct Pair {
  uint matrix, split;
  uint first, second;  // the first columns of the blocks
  device float4* x;    // the matrix
  uint quads;          // quads of a column

  uint column(uint i) const { return (i < JACOBI_BLOCK ? first : second - JACOBI_BLOCK) + i; }
  device float4* at(uint i) const { return x + ulong(column(i)) * quads; }
};

// Rounds follow the circle method: block 0 stays, and the others move around the circle.
inline Pair pair_of(constant JacobiRoundParams& p, device float* x, uint group) {
  const uint blocks = p.jacobi.padded / JACOBI_BLOCK, others = blocks - 1;
  const uint split = group % p.jacobi.splits, index = group / p.jacobi.splits % (blocks / 2);
  const uint matrix = group / p.jacobi.splits / (blocks / 2);
  const uint a = index == 0 ? 0 : (p.round + index) % others + 1;
  const uint b = (p.round + others - index) % others + 1;
  device float* const own = x + ulong(matrix) * p.jacobi.padded * p.jacobi.length;
  return {matrix, split, min(a, b) * JACOBI_BLOCK, max(a, b) * JACOBI_BLOCK, (device float4*)own, p.jacobi.length / 4};
}

// Loads rows of the pair's columns from quad `base` on, with zeros from quad `end` on.
inline void load(threadgroup float4* chunk, Pair pair, uint base, uint end, uint thread_index) {
#pragma unroll
  for (uint i = 0; i < JACOBI_PAIR * kQuads / JACOBI_THREADS; ++i) {
    const uint at = i * JACOBI_THREADS + thread_index, column = at / kQuads, quad = at % kQuads;
    chunk[column * PairChunk::kStride + quad] = base + quad < end ? pair.at(column)[base + quad] : float4(0.0f);
  }
}

inline void gram_part(thread ProductPart& part, threadgroup float4* chunk, constant JacobiParams& p, Pair pair,
                      uint thread_index) {
  const uint end = p.gram_rows / 4;
  clear(part);
  for (uint base = pair.split * kQuads; base < end; base += p.splits * kQuads) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load(chunk, pair, base, end, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply<JACOBI_CHUNK>(part, chunk, chunk, thread_index % 32, thread_index / 32);
  }
}

// Multiplies the pair's columns by the rotation, in place.
inline void apply(threadgroup float4* chunk, threadgroup const float* product, constant JacobiParams& p, Pair pair,
                  bool active, uint thread_index) {
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  threadgroup const float4* const factor = (threadgroup const float4*)product + simdgroup;
  const uint end = active ? pair.quads : 0;
  for (uint base = pair.split * kQuads; base < end; base += p.splits * kQuads) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load(chunk, pair, base, end, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    float4 y[4];
#pragma unroll
    for (uint c = 0; c < 4; ++c) y[c] = float4(0.0f);
#pragma unroll 8
    for (uint k = 0; k < JACOBI_PAIR; ++k) {
      const float4 x = chunk[k * PairChunk::kStride + lane], j = factor[k * (kRotationStride / 4)];
#pragma unroll
      for (uint c = 0; c < 4; ++c) y[c] = fma(float4(j[c]), x, y[c]);
    }
    const uint quad = base + lane;
#pragma unroll
    for (uint c = 0; c < 4; ++c) {
      if (quad < end) pair.at(4 * simdgroup + c)[quad] = y[c];
    }
  }
}

// Finds the rotation of the Gram matrix and applies it.
inline void rotate(threadgroup float4* chunk, threadgroup float* gram, threadgroup float* product,
                   threadgroup float4* rotations, device atomic_uint* off, constant JacobiRoundParams& p, Pair pair,
                   uint thread_index) {
  const PairState state = state_of(gram, product, p.jacobi.tolerance, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index == 0 && pair.split == 0 && state.off > 0.0f)
    atomic_fetch_max_explicit(off_of(off, p, pair.matrix), as_type<uint>(state.off), memory_order_relaxed);
  diagonalize(gram, product, rotations, state.active ? JACOBI_PAIR - 1 : 0, p.jacobi.tolerance, thread_index);
  apply(chunk, product, p.jacobi, pair, state.active, thread_index);
}

[[kernel]] [[max_total_threads_per_threadgroup(JACOBI_THREADS)]] void jacobi_round(
    device float* x [[buffer(0)]], device atomic_uint* off [[buffer(1)]], constant JacobiRoundParams& p [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 chunk[PairChunk::kSize];
  threadgroup float gram[kProductSize];
  threadgroup float4 product[JACOBI_PAIR * kRotationStride / 4];
  threadgroup float4 rotations[JACOBI_BLOCK];
  const Pair pair = pair_of(p, x, group);
  if (converged(off, p, pair.matrix)) return;
  ProductPart part;
  gram_part(part, chunk, p.jacobi, pair, thread_index);
  add_parts(part, (threadgroup float*)chunk, (threadgroup float*)chunk + 2048, gram, thread_index);
  rotate(chunk, gram, (threadgroup float*)product, rotations, off, p, pair, thread_index);
}

[[kernel]] [[max_total_threads_per_threadgroup(JACOBI_THREADS)]] void jacobi_gram(
    device float* x [[buffer(0)]], device atomic_uint* off [[buffer(1)]], constant JacobiRoundParams& p [[buffer(2)]],
    device float* parts [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 chunk[PairChunk::kSize];
  threadgroup float gram[kProductSize];
  const Pair pair = pair_of(p, x, group);
  if (converged(off, p, pair.matrix)) return;
  ProductPart part;
  gram_part(part, chunk, p.jacobi, pair, thread_index);
  add_parts(part, (threadgroup float*)chunk, (threadgroup float*)chunk + 2048, gram, thread_index);
#pragma unroll
  for (uint i = 0; i < 1024 / JACOBI_THREADS; ++i) {
    const uint at = i * JACOBI_THREADS + thread_index;
    parts[ulong(group) * 1024 + at] = gram[at / 32 * kProductStride + at % 32];
  }
}

[[kernel]] [[max_total_threads_per_threadgroup(JACOBI_THREADS)]] void jacobi_rotate(
    device float* x [[buffer(0)]], device atomic_uint* off [[buffer(1)]], constant JacobiRoundParams& p [[buffer(2)]],
    device const float* parts [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 chunk[PairChunk::kSize];
  threadgroup float gram[kProductSize];
  threadgroup float4 product[JACOBI_PAIR * kRotationStride / 4];
  threadgroup float4 rotations[JACOBI_BLOCK];
  const Pair pair = pair_of(p, x, group);
  if (converged(off, p, pair.matrix)) return;
  device const float* const first = parts + ulong(group - pair.split) * 1024;
#pragma unroll
  for (uint i = 0; i < 1024 / JACOBI_THREADS; ++i) {
    const uint at = i * JACOBI_THREADS + thread_index;
    float sum = 0.0f;
    for (uint split = 0; split < p.jacobi.splits; ++split) sum += first[split * 1024 + at];
    gram[at / 32 * kProductStride + at % 32] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  rotate(chunk, gram, (threadgroup float*)product, rotations, off, p, pair, thread_index);
}
