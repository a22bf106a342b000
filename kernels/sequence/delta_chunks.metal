// gated_delta_rule by chunks of positions, whose errors u, results o and last state are products of matrices. With the
// decays d(i, j) from position j to i, d(i) from before the chunk to i, and the state S before it:
//
//   (I + M) u = v - d(i) k S          where M(i, j) = d(i, j) beta(j) (k(i) k(j)), j < i
//   o = scale (d(i) q S + P beta u)   where P(i, j) = d(i, j) (q(i) k(j)), j <= i
//
// The first kernel has all chunks at once, and leaves the inverse of I + M, and P. The second one walks along the
// chunks of a sequence with some columns of the state in threadgroup memory.
#include "common/matrices.h"
#include "sequence/delta_state.h"

constexpr constant uint kChunk = DELTA_CHUNK, kOwn = kChunk / kSimdgroups;  // rows of a simdgroup

// Brings `count` rows from `first` on, of which WIDTH elements, into a tile, times their factors. The rest is zero.
template <uint WIDTH, uint kPitch, typename T, typename U>
inline void fetch_slice(threadgroup U* tile, device const T* x, long stride, uint count, uint first, uint size,
                        device const float* factors, uint thread_index) {
  constexpr uint kStep = DELTA_THREADS / WIDTH;  // rows between those of a thread
  const uint column = thread_index % WIDTH, begin = thread_index / WIDTH;
  const bool inside = first + column < size;
  x += begin * stride + first + column;
  tile += begin * kPitch + column;
#pragma unroll 2
  for (uint row = begin; row < kChunk; row += kStep, x += kStep * stride, tile += kStep * kPitch) {
    const float factor = factors != nullptr ? factors[row] : 1.0f;
    *tile = static_cast<U>(inside && row < count ? static_cast<float>(*x) * factor : 0.0f);
  }
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule_inverse(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const float* g [[buffer(2)]],
    device const float* beta [[buffer(3)]], device const int* ends [[buffer(4)]], device float* inverses [[buffer(5)]],
    device float* scores [[buffer(6)]], device float* factors [[buffer(7)]],
    constant DeltaRuleParams& params [[buffer(8)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kWidth = 32 / sizeof(T), kPitch = kWidth + 16 / sizeof(T), kTall = kChunk + 4;
  threadgroup T keys[kChunk * kPitch];
  threadgroup T queries[kChunk * kPitch];
  threadgroup float system[kChunk * kTall];     // M by columns
  threadgroup float lengths[2][kChunk];         // of q and k, their inverses
  threadgroup float high[kChunk], low[kChunk];  // the logarithm of d(i), in two parts, since differences count
  threadgroup float strengths[kChunk];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint head = group % params.value_heads, key_head = head / (params.value_heads / params.heads);
  const Span span = chunk_of(ends, params, group / params.value_heads);
  const uint count = span.end - span.begin;
  q += span.batch * params.q[0] + span.begin * params.q[1] + key_head * params.q[2];
  k += span.batch * params.k[0] + span.begin * params.k[1] + key_head * params.k[2];
  const ulong at = (ulong(span.batch) * params.length + span.begin) * params.value_heads + head;
  for (uint i = simdgroup; i < kChunk; i += kSimdgroups) {
    const bool normalized = params.normalized && i < count;
    const float of_q = normalized ? inverse_length_of(q + i * params.q[1], params.keys, lane) : 1.0f;
    const float of_k = normalized ? inverse_length_of(k + i * params.k[1], params.keys, lane) : 1.0f;
    if (lane == 0) {
      lengths[0][i] = of_q * params.scale;
      lengths[1][i] = of_k;
    }
  }
  if (thread_index < kChunk) {
    float sum = 0.0f, rest = 0.0f;
    for (uint i = 0; params.has_gate && i < min(count, thread_index + 1); ++i) {
      const float term = max(g[at + ulong(i) * params.value_heads], -1e4f) + rest, next = sum + term;
      const float part = next - sum;
      rest = (sum - (next - part)) + (term - part);
      sum = next;
    }
    high[thread_index] = sum;
    low[thread_index] = rest;
    strengths[thread_index] = thread_index < count ? beta[at + ulong(thread_index) * params.value_heads] : 0.0f;
  }
  const ulong chunk = ulong(group) * kChunk;
  device float* const own_scores = scores + chunk * kChunk;
  for (uint pass = 0; pass < 2; ++pass) {
    const bool of_queries = pass == 0;
    Fragments<float, 2, kChunk / 8> products;
    clear(products);
    for (uint first = 0; first < params.keys; first += kWidth) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      fetch_slice<kWidth, kPitch>(keys, k, params.k[1], count, first, params.keys, nullptr, thread_index);
      if (of_queries)
        fetch_slice<kWidth, kPitch>(queries, q, params.q[1], count, first, params.keys, nullptr, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      Fragments<T, 2, kWidth / 8> rows;
      RightFragments<T, kWidth / 8, kChunk / 8> columns;
      load<kPitch>(rows, (of_queries ? queries : keys) + simdgroup * kOwn * kPitch);
      load_transposed<kPitch>(columns, keys);
      multiply(products, rows, 0, columns);
    }
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
#pragma unroll
      for (uint n = 0; n < kChunk / 8; ++n)
        simdgroup_store(products.at[m][n], system + (simdgroup * kOwn + m * 8) * kTall + n * 8, kTall);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Products of keys lie by rows or by columns, which are the same.
    for (uint i = thread_index; i < kChunk * kChunk; i += DELTA_THREADS) {
      const uint later = of_queries ? i / kChunk : i % kChunk, earlier = of_queries ? i % kChunk : i / kChunk;
      const float passed = min((high[later] - high[earlier]) + (low[later] - low[earlier]), 0.0f);
      const float product = exp(passed) * lengths[1][earlier] * system[i / kChunk * kTall + i % kChunk];
      if (of_queries)
        own_scores[i] = earlier <= later ? product * lengths[0][later] : 0.0f;
      else
        system[i / kChunk * kTall + i % kChunk] =
            earlier < later ? product * strengths[earlier] * lengths[1][later] : 0.0f;
    }
  }
  if (thread_index < kChunk) {
    const float since = exp(high[thread_index] + low[thread_index]);
    const float until = (high[kChunk - 1] - high[thread_index]) + (low[kChunk - 1] - low[thread_index]);
    device float* const own_factors = factors + chunk * 4 + thread_index;
    own_factors[0] = since * lengths[1][thread_index];
    own_factors[kChunk] = since * lengths[0][thread_index];
    own_factors[2 * kChunk] = exp(min(until, 0.0f)) * lengths[1][thread_index];
    own_factors[3 * kChunk] = since;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // A thread has a column of the inverse, by substitution of some rows at a time.
  constexpr uint kBlock = 16;
  if (thread_index < kChunk) {
    device float* const column = inverses + chunk * kChunk + thread_index;
    for (uint first = 0; first < kChunk; first += kBlock) {
      float values[kBlock];
#pragma unroll
      for (uint i = 0; i < kBlock; ++i) values[i] = first + i == thread_index ? 1.0f : 0.0f;
      for (uint j = 0; j < first; ++j) {
        const float known = column[j * kChunk];
#pragma unroll
        for (uint i = 0; i < kBlock; ++i) values[i] -= system[j * kTall + first + i] * known;
      }
#pragma unroll
      for (uint i = 0; i < kBlock; ++i) {
#pragma unroll
        for (uint below = i + 1; below < kBlock; ++below)
          values[below] -= system[(first + i) * kTall + first + below] * values[i];
        column[(first + i) * kChunk] = values[i];
      }
    }
  }
}

// sums += a b, where a is a matrix in device memory with rows of a chunk, and b a tile. The matrix is lower triangular.
template <uint kPitch>
inline void add_lower(thread Fragments<float, 2, 2>& sums, device const float* a, threadgroup const float* tile,
                      uint simdgroup) {
  constexpr uint kTerms = 2;
  for (uint first = 0; first < (simdgroup + 1) * kOwn; first += kTerms * 8) {
    Fragments<float, 2, kTerms> rows;
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
#pragma unroll
      for (uint n = 0; n < kTerms; ++n)
        simdgroup_load(rows.at[m][n], a + (simdgroup * kOwn + m * 8) * kChunk + first + n * 8, kChunk);
    }
    RightFragments<float, kTerms, 2> terms;
    load<kPitch>(terms, tile + first * kPitch);
    multiply(sums, rows, 0, terms);
  }
}

template <uint KEYS, uint WIDTH, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule_walk(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const float* beta [[buffer(3)]], device const int* ends [[buffer(4)]],
    device const float* state [[buffer(5)]], device const float* inverses [[buffer(6)]],
    device const float* scores [[buffer(7)]], device const float* factors [[buffer(8)]], device T* out [[buffer(9)]],
    device float* final_state [[buffer(10)]], device float* errors [[buffer(11)]], device float* kept [[buffer(12)]],
    constant DeltaRuleParams& params [[buffer(13)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kColumns = DELTA_COLUMNS, kPitch = kColumns + 4, kSlice = WIDTH + 4;
  threadgroup float matrix[KEYS * kPitch];
  threadgroup float slice[kChunk * kSlice];
  threadgroup float updates[kChunk * kPitch];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint blocks = (params.values + kColumns - 1) / kColumns;
  const uint head = group / blocks % params.value_heads, sequence = group / blocks / params.value_heads;
  const uint block = group % blocks * kColumns;  // the first column
  const Span span = span_of(ends, params, sequence);
  const uint key_head = head / (params.value_heads / params.heads);
  q += span.batch * params.q[0] + key_head * params.q[2];
  k += span.batch * params.k[0] + key_head * params.k[2];
  v += span.batch * params.v[0] + head * params.v[2];
  const ulong size = ulong(params.keys) * params.values;  // of a state
  const ulong first_state = (ulong(sequence) * params.value_heads + head) * size;
  for (uint i = thread_index; i < KEYS * kColumns; i += DELTA_THREADS) {
    const uint row = i / kColumns, column = block + i % kColumns;
    const bool inside = params.has_state && row < params.keys && column < params.values;
    matrix[row * kPitch + i % kColumns] = inside ? state[first_state + ulong(row) * params.values + column] : 0.0f;
  }
  const Place own = place_of(lane);
  for (uint begin = span.begin; begin < span.end; begin += kChunk) {
    const uint count = min(kChunk, span.end - begin);
    const ulong chunk = (span.place + (begin - span.begin) / kChunk) * params.value_heads + head;
    device const float* const own_factors = factors + chunk * 4 * kChunk;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; params.for_derivative && i < KEYS * kColumns; i += DELTA_THREADS) {
      const uint row = i / kColumns, column = block + i % kColumns;
      if (row < params.keys && column < params.values)
        kept[chunk * size + ulong(row) * params.values + column] = matrix[row * kPitch + i % kColumns];
    }
    Fragments<float, 2, 2> by_key, by_query;
    clear(by_key);
    clear(by_query);
    for (uint first = 0; first < params.keys; first += WIDTH) {
      RightFragments<float, WIDTH / 8, 2> terms;
      Fragments<float, 2, WIDTH / 8> rows;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      fetch_slice<WIDTH, kSlice>(slice, k + begin * params.k[1], params.k[1], count, first, params.keys, own_factors,
                                 thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      load<kPitch>(terms, matrix + first * kPitch);
      load<kSlice>(rows, slice + simdgroup * kOwn * kSlice);
      multiply(by_key, rows, 0, terms);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      fetch_slice<WIDTH, kSlice>(slice, q + begin * params.q[1], params.q[1], count, first, params.keys,
                                 own_factors + kChunk, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      load<kSlice>(rows, slice + simdgroup * kOwn * kSlice);
      multiply(by_query, rows, 0, terms);
    }
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
#pragma unroll
      for (uint n = 0; n < 2; ++n) {
#pragma unroll
        for (uint e = 0; e < 2; ++e) {
          const uint row = simdgroup * kOwn + m * 8 + own.row, column = n * 8 + own.column + e;
          const bool inside = row < count && block + column < params.values;
          const float value = inside ? static_cast<float>(v[(begin + row) * params.v[1] + block + column]) : 0.0f;
          updates[row * kPitch + column] = value - elements(by_key.at[m][n])[e];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Fragments<float, 2, 2> found;
    clear(found);
    add_lower<kPitch>(found, inverses + chunk * kChunk * kChunk, updates, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
#pragma unroll
      for (uint n = 0; n < 2; ++n) {
#pragma unroll
        for (uint e = 0; e < 2; ++e) {
          const uint row = simdgroup * kOwn + m * 8 + own.row, column = n * 8 + own.column + e;
          const ulong at = (ulong(span.batch) * params.length + begin + row) * params.value_heads + head;
          const float error = elements(found.at[m][n])[e];
          if (params.for_derivative && row < count && block + column < params.values)
            errors[at * params.values + block + column] = error;
          updates[row * kPitch + column] = row < count ? beta[at] * error : 0.0f;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_lower<kPitch>(by_query, scores + chunk * kChunk * kChunk, updates, simdgroup);
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
#pragma unroll
      for (uint n = 0; n < 2; ++n) {
#pragma unroll
        for (uint e = 0; e < 2; ++e) {
          const uint row = simdgroup * kOwn + m * 8 + own.row, column = n * 8 + own.column + e;
          const ulong at = (ulong(span.batch) * params.length + begin + row) * params.value_heads + head;
          if (!params.for_derivative && row < count && block + column < params.values)
            out[at * params.values + block + column] = static_cast<T>(elements(by_query.at[m][n])[e]);
        }
      }
    }
    // The state, of which a simdgroup has some fragments in each slice.
    const float decay = own_factors[4 * kChunk - 1];
    for (uint first = 0; first < params.keys; first += WIDTH) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      fetch_slice<WIDTH, kSlice>(slice, k + begin * params.k[1], params.k[1], count, first, params.keys,
                                 own_factors + 2 * kChunk, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint n = 0; n < WIDTH / 4 / kSimdgroups; ++n) {
        const uint place = n * kSimdgroups + simdgroup, down = place / 2 * 8, across = place % 2 * 8;
        threadgroup float* const part = matrix + (first + down) * kPitch + across;
        Fragments<float, 1, 1> sums;
        load<kPitch>(sums, part);
        elements(sums.at[0][0]) *= decay;
#pragma unroll
        for (uint i = 0; i < kChunk / 8; ++i) {
          Fragments<float, 1, 1> keys;
          RightFragments<float, 1, 1> terms;
          simdgroup_load(keys.at[0][0], slice + i * 8 * kSlice + down, kSlice, ulong2(0), true);
          load<kPitch>(terms, updates + i * 8 * kPitch + across);
          multiply(sums, keys, 0, terms);
        }
        simdgroup_store(sums.at[0][0], part, kPitch);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; !params.for_derivative && i < KEYS * kColumns; i += DELTA_THREADS) {
    const uint row = i / kColumns, column = block + i % kColumns;
    if (row < params.keys && column < params.values)
      final_state[first_state + ulong(row) * params.values + column] = matrix[row * kPitch + i % kColumns];
  }
}

#define INSTANTIATE_CHUNKS(types, T)                                                 \
  INSTANTIATE("gated_delta_rule_inverse", types, gated_delta_rule_inverse<T>)        \
  INSTANTIATE("gated_delta_rule_walk_128", types, gated_delta_rule_walk<128, 16, T>) \
  INSTANTIATE("gated_delta_rule_walk_256", types, gated_delta_rule_walk<256, 16, T>)
INSTANTIATE_CHUNKS("_float", float)
INSTANTIATE_CHUNKS("_half", half)
INSTANTIATE_CHUNKS("_bfloat", bfloat)
