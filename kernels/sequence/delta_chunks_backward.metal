// The gradients of q, k, g and beta of gated_delta_rule by chunks, with the symbols of delta_chunks.metal and
// delta_walk_back.metal. All chunks are found at once. With w = B u, and products of do and of dv with u in the place
// of scores,
//
//   dq(i) = scale (d(i) S do(i) + sum over j <= i of d(i, j) (do(i) w(j)) k(j))
//   dk(i) = beta(i) y(i) - d(i) S dv(i) - sum over j < i of d(i, j) (dv(i) w(j)) k(j)
//   y(j) = d(·, j) D u(j) + scale sum over i >= j of d(i, j) (do(i) u(j)) q(i) - sum over i > j of d(i, j) (dv(i) u(j))
//   k(i) dbeta(j) = k(j) y(j)
//
// The gradient of g is the sum of S D at its position, where both are sums over positions: of the terms of a position
// i >= t and one j < t, between which the gate at t lies, those of a position and the state before or behind the chunk,
// and those of both states. The gradient of the sum of g up to a position, q dq - k dk, has fewer products, but its
// sums have the terms that lie on one side of the gate too, whose rounding errors may be larger than the result.
#include "sequence/delta_walk.h"

constexpr constant uint kRows = 64;                           // of a state, which a chunk's positions meet at once
constexpr constant uint kTall = kChunk + 4, kPitch = 16 + 4;  // of products, and of tiles of WIDTH columns

// The products of two matrices' elements, of which a thread has some.
inline float overlap_of(device const float* a, device const float* b, uint size, bool wide, uint thread_index) {
  float sum = 0.0f;
  if (wide) {
#pragma unroll 4
    for (uint i = 4 * thread_index; i < size; i += 4 * DELTA_THREADS)
      sum += dot(*reinterpret_cast<device const float4*>(a + i), *reinterpret_cast<device const float4*>(b + i));
    return sum;
  }
  for (uint i = thread_index; i < size; i += DELTA_THREADS) sum += a[i] * b[i];
  return sum;
}

// sums += a bᵀ of rows in device memory.
template <typename T, typename U>
inline void add_products(thread Fragments<float, 2, 8>& sums, threadgroup float* tiles, device const T* a, long stride,
                         uint count, device const U* b, long b_stride, uint b_count, uint size, bool vectors,
                         uint thread_index) {
  constexpr uint kWidth = 16, kLeft = kWidth + 16 / sizeof(T), kRight = kWidth + 16 / sizeof(U);
  threadgroup T* const own = reinterpret_cast<threadgroup T*>(tiles);
  threadgroup U* const others = reinterpret_cast<threadgroup U*>(tiles + kChunk * kPitch);
  for (uint first = 0; first < size; first += kWidth) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fetch_rows<kWidth, kLeft>(own, a, stride, count, first, size, vectors, thread_index);
    fetch_rows<kWidth, kRight>(others, b, b_stride, b_count, first, size, vectors, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Fragments<T, 2, kWidth / 8> rows;
    RightFragments<U, kWidth / 8, 8> terms;
    load<kLeft>(rows, own + thread_index / 32 * kOwn * kLeft);
    load_transposed<kRight>(terms, others);
    if constexpr (sizeof(U) == 4)
      metalcore_multiply_mixed(sums.at, rows.at, 0, terms.at, 0);  // fewer parts, as in add_lower()
    else
      multiply(sums, rows, 0, terms);
  }
}
// The same where `a` is `narrow` or `wide`.
template <typename T>
inline void add_products(thread Fragments<float, 2, 8>& sums, threadgroup float* tiles, device const T* narrow,
                         device const float* wide, bool is_narrow, long stride, uint count, device const float* b,
                         long b_stride, uint b_count, uint size, bool vectors, uint thread_index) {
  if (is_narrow)
    add_products(sums, tiles, narrow, stride, count, b, b_stride, b_count, size, vectors, thread_index);
  else
    add_products(sums, tiles, wide, stride, count, b, b_stride, b_count, size, vectors, thread_index);
}

// sums += a b or aᵀ b, where a is the lower triangular tile of scores, and b has rows in device memory, times factors.
template <bool TRANSPOSED, typename T>
inline void add_scores(thread Fragments<float, 2, 8>& sums, threadgroup float* tiles, threadgroup const float* scores,
                       device const T* x, long stride, uint count, uint first_column, uint size, bool wide,
                       threadgroup const float* factors, uint thread_index) {
  constexpr uint kPart = 32, kTerms = 4 / sizeof(T), kRight = kRows + 16 / sizeof(T);
  threadgroup T* const tile = reinterpret_cast<threadgroup T*>(tiles);
  const uint own = thread_index / 32 * kOwn, column = place_of(thread_index % 32).column;
#pragma unroll 1
  for (uint first = 0; first < kChunk; first += kPart) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fetch_rows<kRows, kRight, kRows, kPart>(tile, x + first * stride, stride, max(count, first) - first, first_column,
                                            size, wide, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
    for (uint term = first; term < first + kPart; term += kTerms * 8) {
      if (TRANSPOSED ? term + kTerms * 8 <= own : term >= own + kOwn) continue;  // zeros
      Fragments<float, 2, kTerms> rows;
#pragma unroll
      for (uint k = 0; k < kTerms; ++k) {
        threadgroup const float* const factor = factors + term + k * 8 + column;
#pragma unroll
        for (uint m = 0; m < 2; ++m) {
          const uint row = own + m * 8;
          if (TRANSPOSED)
            simdgroup_load(rows.at[m][k], scores + (term + k * 8) * kTall + row, kTall, ulong2(0), true);
          else
            simdgroup_load(rows.at[m][k], scores + row * kTall + term + k * 8, kTall);
          elements(rows.at[m][k]) *= float2(factor[0], factor[1]);
        }
      }
      RightFragments<T, kTerms, 8> terms;
      load<kRight>(terms, tile + (term - first) * kRight);
      multiply(sums, rows, 0, terms);
    }
  }
}

// Adds the products of the rows of sums, times a sign, and of x, with its inverse lengths.
template <typename T>
inline void add_dots(threadgroup float* products, thread Fragments<float, 2, 8>& sums, float sign, device const T* x,
                     long stride, threadgroup const float* lengths, uint count, uint first_column, uint size, bool wide,
                     uint thread_index) {
  const Place place = place_of(thread_index % 32);
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    const uint row = thread_index / 32 * kOwn + m * 8 + place.row, column = first_column + place.column;
    device const T* const other = x + row * stride;
    float product = 0.0f;
    if (row < count && wide) {
      vec<T, 2> others[8];  // no load waits behind a branch
#pragma unroll
      for (uint n = 0; n < 8; ++n)
        others[n] = *reinterpret_cast<device const vec<T, 2>*>(other + min(column + n * 8, size - 2));
#pragma unroll
      for (uint n = 0; n < 8; ++n)
        product += column + n * 8 < size ? dot(elements(sums.at[m][n]), static_cast<float2>(others[n])) : 0.0f;
    } else if (row < count) {
#pragma unroll
      for (uint n = 0; n < 8; ++n)
        product += dot(elements(sums.at[m][n]), pair_of(other + column + n * 8, rest_of(column + n * 8, size)));
    }
    product += simd_shuffle_xor(product, 1);  // over the lanes of the row
    product += simd_shuffle_xor(product, 8);
    if (place.column == 0) products[row] += product * lengths[row] * sign;
  }
}

// Writes sums times a factor for each row, or adds them to what is there.
template <typename F>
inline void put(thread Fragments<float, 2, 8>& sums, bool adds, float sign, F factors, device float* to, long stride,
                uint count, uint first_column, uint size, bool wide, uint thread_index) {
  const Place place = place_of(thread_index % 32);
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    const uint row = thread_index / 32 * kOwn + m * 8 + place.row, column = first_column + place.column;
    const float factor = factors[row] * sign;
    device float* const own = to + row * stride;
    if (row < count && wide) {
      float2 before[8];
#pragma unroll
      for (uint n = 0; n < 8; ++n)
        before[n] =  // others write what a lane behind the row's end would read
            adds && column + n * 8 < size ? *reinterpret_cast<device const float2*>(own + column + n * 8)
                                          : float2(0.0f);
#pragma unroll
      for (uint n = 0; n < 8; ++n)
        if (column + n * 8 < size)
          *reinterpret_cast<device float2*>(own + column + n * 8) = before[n] + elements(sums.at[m][n]) * factor;
    } else if (row < count) {
#pragma unroll
      for (uint n = 0; n < 8; ++n) {
        const uint rest = rest_of(column + n * 8, size);
        const float2 before = pair_of(own + column + n * 8, adds ? rest : 0);
        put_pair(own + column + n * 8, before + elements(sums.at[m][n]) * factor, rest);
      }
    }
  }
}

// Sums over the positions i >= t > j of `scores`, whose diagonal and upper part are zero, for the thread's position t.
inline float sum_across(threadgroup float* scores, uint thread_index) {
  if (thread_index < kChunk) {
    float sum = 0.0f;  // of the row's elements before the column
    for (uint j = 0; j < kChunk; ++j) {
      const float score = scores[thread_index * kTall + j];
      scores[thread_index * kTall + j] = sum;
      sum += score;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (uint i = thread_index; i < kChunk; ++i) sum += scores[i * kTall + thread_index];
  return sum;
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_PROMISE)]] void gated_delta_rule_chunks(
    device const T* grad [[buffer(0)]], device const T* q [[buffer(1)]], device const T* k [[buffer(2)]],
    device const float* g [[buffer(3)]], device const float* beta [[buffer(4)]], device const int* ends [[buffer(5)]],
    device const float* errors [[buffer(6)]], device const float* value_grads [[buffer(7)]],
    device const float* states [[buffer(8)]], device const float* state_grads [[buffer(9)]],
    device float* gq [[buffer(10)]], device float* gk [[buffer(11)]], device float* gg [[buffer(12)]],
    device float* gbeta [[buffer(13)]], constant DeltaRuleParams& params [[buffer(14)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  alignas(16) threadgroup float scores[kChunk * kTall];
  alignas(16) threadgroup float tiles[2 * kChunk * kPitch];
  threadgroup float lengths[2][kChunk];         // of q and k, their inverses
  threadgroup float high[kChunk], low[kChunk];  // the logarithm of d(i)
  threadgroup float since[kChunk], until[kChunk], strengths[kChunk], learned[kChunk];
  threadgroup float reads[kChunk], writes[kChunk], carried[kChunk];  // products of rows of q and k, and of gradients
  threadgroup float acrosses[kChunk];                                // sums of pairs of positions around a gate
  threadgroup float overlaps[kSimdgroups];                           // parts of the sum of S D
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint head = group % params.value_heads, place = group / params.value_heads;
  const Span span = chunk_of(ends, params, place);
  const uint count = span.end - span.begin;
  if (count == 0) return;
  const uint key_head = head / (params.value_heads / params.heads);
  q += span.batch * params.q[0] + span.begin * params.q[1] + key_head * params.q[2];
  k += span.batch * params.k[0] + span.begin * params.k[1] + key_head * params.k[2];
  grad += span.batch * params.grad[0] + span.begin * params.grad[1] + head * params.grad[2];
  const ulong at = (ulong(span.batch) * params.length + span.begin) * params.value_heads + head;
  const long value_stride = long(params.value_heads) * params.values,
             key_stride = long(params.value_heads) * params.keys;
  errors += at * params.values;
  value_grads += at * params.values;
  gq += at * params.keys;
  gk += at * params.keys;
  states += ulong(group) * params.keys * params.values;
  state_grads += ulong(group) * params.keys * params.values;
  measure(lengths[0], lengths[1], q, k, count, params, simdgroup, lane);
  add_gates(high, low, g + at, count, params, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < kChunk) {
    const float strength = strength_of(beta + at, thread_index, count, params);
    since[thread_index] = exp(high[thread_index] + low[thread_index]);
    until[thread_index] = decay_of(high, low, kChunk - 1, thread_index);
    strengths[thread_index] = strength;
    learned[thread_index] = strength * lengths[1][thread_index];
    reads[thread_index] = writes[thread_index] = carried[thread_index] = acrosses[thread_index] = 0.0f;
  }
  Fragments<float, 2, 8> sums;
  float overlap = 0.0f;
  // What comes from behind the chunk.
  for (uint first = 0; first < params.keys; first += kRows) {
    const uint rows = min(kRows, params.keys - first);
    const ulong matrix = ulong(first) * params.values;
    if (params.has_gate)
      overlap += overlap_of(states + matrix, state_grads + matrix, rows * params.values, params.wide, thread_index);
    clear(sums);
    add_products(sums, tiles, errors, value_stride, count, state_grads + matrix, params.values, rows, params.values,
                 params.wide, thread_index);
    scale_rows(sums, until + simdgroup * kOwn, 1.0f, lane);
    add_dots(carried, sums, 1.0f, k, params.k[1], lengths[1], count, first, params.keys, params.wide, thread_index);
    put(sums, false, 1.0f, strengths, gk, key_stride, count, first, params.keys, params.wide, thread_index);
  }
  // The gradients of results, and then those of values.
#pragma unroll 1
  for (uint pass = 0; pass < (params.corrects ? 2 : 1); ++pass) {
    const bool of_results = pass == 0;
    const float scale = of_results ? params.scale : 1.0f, sign = of_results ? 1.0f : -1.0f;
    device const T* const x = of_results ? q : k;
    const long stride = of_results ? params.q[1] : params.k[1];
    const long grad_stride = of_results ? params.grad[1] : value_stride;
    clear(sums);
    add_products(sums, tiles, grad, value_grads, of_results, grad_stride, count, errors, value_stride, count,
                 params.values, params.wide, thread_index);
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
#pragma unroll
      for (uint n = 0; n < 8; ++n)
        simdgroup_store(sums.at[m][n], scores + (simdgroup * kOwn + m * 8) * kTall + n * 8, kTall);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; i < kChunk * kChunk; i += DELTA_THREADS) {
      const uint later = i / kChunk, earlier = i % kChunk;
      threadgroup float* const score = scores + later * kTall + earlier;
      *score = earlier < later + of_results ? *score * scale * decay_of(high, low, later, earlier) : 0.0f;
    }
    for (uint first = 0; first < params.keys; first += kRows) {
      const uint rows = min(kRows, params.keys - first);
      clear(sums);
      add_products(sums, tiles, grad, value_grads, of_results, grad_stride, count,
                   states + ulong(first) * params.values, params.values, rows, params.values, params.wide,
                   thread_index);
      scale_rows(sums, since + simdgroup * kOwn, scale, lane);
      add_dots(reads, sums, sign, x, stride, lengths[pass], count, first, params.keys, params.wide, thread_index);
      add_scores<false>(sums, tiles, scores, k, params.k[1], count, first, params.keys, params.wide, learned,
                        thread_index);
      put(sums, !of_results, sign, One(), of_results ? gq : gk, key_stride, count, first, params.keys, params.wide,
          thread_index);
      clear(sums);
      add_scores<true>(sums, tiles, scores, x, stride, count, first, params.keys, params.wide, lengths[pass],
                       thread_index);
      add_dots(writes, sums, sign, k, params.k[1], lengths[1], count, first, params.keys, params.wide, thread_index);
      put(sums, true, sign, strengths, gk, key_stride, count, first, params.keys, params.wide, thread_index);
    }
    if (!params.has_gate) continue;
    clear(sums);
    add_products(sums, tiles, x, stride, count, k, params.k[1], count, params.keys, params.wide, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
      const uint row = simdgroup * kOwn + m * 8 + place_of(lane).row;
#pragma unroll
      for (uint n = 0; n < kChunk / 8; ++n) {
        const uint column = n * 8 + place_of(lane).column;
        threadgroup float* const score = scores + row * kTall + column;
        const float2 factors =
            float2(column < row ? learned[column] : 0.0f, column + 1 < row ? learned[column + 1] : 0.0f);
        const float2 pair = elements(sums.at[m][n]) * factors * lengths[pass][row];
        score[0] *= pair.x;
        score[1] *= pair.y;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float across = sum_across(scores, thread_index);
    if (thread_index < kChunk) acrosses[thread_index] += sign * across;
  }
  overlap = simd_sum(overlap);
  if (lane == 0) overlaps[simdgroup] = overlap;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index >= count) return;
  const ulong own = at + ulong(thread_index) * params.value_heads;
  if (params.weighted) gbeta[own] = carried[thread_index] + writes[thread_index];
  if (!params.has_gate) return;
  float behind = 0.0f, sum = acrosses[thread_index];
#pragma unroll
  for (uint s = 0; s < kSimdgroups; ++s) behind += overlaps[s];
  behind *= since[kChunk - 1];
  for (uint i = 0; i < thread_index; ++i) behind += strengths[i] * carried[i];
  for (uint i = thread_index; i < count; ++i) sum += reads[i];
  gg[own] = behind + sum;
}

INSTANTIATE("gated_delta_rule_chunks", "_float", gated_delta_rule_chunks<float>)
INSTANTIATE("gated_delta_rule_chunks", "_half", gated_delta_rule_chunks<half>)
INSTANTIATE("gated_delta_rule_chunks", "_bfloat", gated_delta_rule_chunks<bfloat>)
