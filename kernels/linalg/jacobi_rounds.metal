// The rounds of blocked one-sided Jacobi. A threadgroup takes a pair of blocks. It computes their Gram matrix, the
// rotation that makes it diagonal, and the pair times that rotation. With few pairs several threadgroups share the rows
// of each pair: one dispatch makes the parts of the Gram matrix, and in the next one each threadgroup sums them, finds
// the rotation, and applies it to its own rows.
#include <metal_stdlib>
using namespace metal;

#include "jacobi_solve.h"

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

// How far from orthogonal a matrix's columns were in a sweep, as the bits of a float that is not negative.
inline device atomic_uint* off_of(device atomic_uint* off, constant JacobiRoundParams& p, uint matrix) {
  return off + ulong(matrix) * p.jacobi.sweeps + p.sweep;
}

inline bool converged(device atomic_uint* off, constant JacobiRoundParams& p, uint matrix) {
  if (p.sweep == 0) return false;
  const uint before = atomic_load_explicit(off_of(off, p, matrix) - 1, memory_order_relaxed);
  return as_type<float>(before) <= 2.0f * p.jacobi.tolerance;
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
